"""Serving: two servers of vLLM on one GPU, dense and as a folder says, timed in turns.

`vllm bench serve` sends the requests and counts the times. An idle server takes none of the GPU's
time. Every request gets NEW_TOKENS tokens, greedily.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from twell import results
from twell.measure import imposed, runner
from twell.measure.calibration import tune
from twell.measure.providers import COMPILED, DENSE_COMPILED, Provider
from twell.measure.rows import COLUMNS, Rows, require, significant
from twell.measure.sides import model_columns, random_model
from twell.models import num_weights, quantize_, read_json, resolve, save
from twell.models.convert import ACTIVITY
from twell.trace.texts import held_out, load_with_tokenizer

LEVELS = {1: 8, 8: 48, 32: 128, 128: 384}  # requests at once, and in all
ROUNDS, SEED, NEW_TOKENS, START_SECONDS = 4, 0, 128, 900
SHORTEST, LONGEST, CONTEXT = 128, 1024, 2048  # tokens of prompts, and what a new model can read
# The check: tokens of its prompts and answers, and what it allows as a share of the logits'
# standard deviation: how much lower than the first choice a token is, errors of log-probabilities.
CHECKED, ANSWER, NEAR_TIE, ERROR = (1, 7, 64, 300, 700, 1024), 64, 0.1, 0.05
TOGETHER = 24  # long prompts that are checked at once, in passes beyond those of CUDA graphs
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
SERVE = "--served-model-name m --no-enable-prefix-caching --dtype bfloat16"
DENSE = ["--hf-overrides", '{"ffn_backend": "dense"}']
BENCH = "--backend openai --model m --dataset-name custom --skip-chat-template --disable-shuffle"
GREEDY = f"--custom-output-len {NEW_TOKENS} --ignore-eos --temperature 0 --disable-tqdm"


@torch.no_grad()
def serve(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    fp8: bool = False,
    source: str = "sotu",
    tensor_parallel: int = 1,
    out: str | Path,
) -> list[dict]:
    """Time vLLM with a model, dense and sparse: `twell measure serve`. Return rows of serve.csv.

    size: a saved folder, whose prompts are held-out text of `source`; or a configuration, whose
    model of random weights is saved in `out`. Raises ModuleNotFoundError without vLLM, ValueError
    for a folder that vLLM computes densely, RuntimeError where vLLM does not start or finish, and
    ArithmeticError for an answer that is not transformers'.
    """
    gpu, rows, place = runner.Gpu(), Rows(out, "serve"), Path(out, "serve")
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("serving needs the package vllm: pip install -e '.[vllm]'")
    folder, is_saved = place / "model", Path(size).is_dir()
    if is_saved:
        require(not (overrides or fp8), "key=value and FP8 are for random weights")
        folder, size = resolve(size), results.model_name(size)
    else:
        create(folder, size, overrides, fp8, gpu.device)
    fields = read_json(folder / "config.json")
    backend, activity = fields.get("ffn_backend", "auto"), fields.get(ACTIVITY)
    unfit = f"vLLM computes {folder} densely: set the backend 'auto' and call twell.tune"
    require(backend != "dense" and activity is not None, unfit)
    model, tokenizer = load_with_tokenizer(folder, backend="dense", dtype=torch.bfloat16)
    model.to(gpu.device)
    case = model_columns(size, model, "checkpoint" if is_saved else "paper")
    case |= {"parameters": num_weights(model), "tensor_parallel": tensor_parallel}
    case |= {"precision": "FP8" if "quantization_config" in fields else "bfloat16"}
    case |= {"active": round(fmean(layer[1] for layer in activity), 2), "new_tokens": NEW_TOKENS}

    # A part of a text may have other tokens again, and more.
    longest = min(LONGEST, model.config.max_position_embeddings - 2 * NEW_TOKENS)
    require(longest >= SHORTEST, f"a model has to read {SHORTEST + 2 * NEW_TOKENS} tokens")
    number, g = max(LEVELS.values()), torch.Generator().manual_seed(SEED)
    lengths = torch.randint(SHORTEST, longest + 1, (number,), generator=g).tolist()
    if is_saved:
        parts = held_out(source, model, tokenizer, 2**16, whole=source != "sotu")
        text = [token for part in parts for token in part]
        starts = torch.randint(len(text) - longest, (number,), generator=g).tolist()
        tokens = [text[start : start + longest] for start in starts]
    else:
        tokens = imposed.draw_tokens(model.config.vocab_size, number, longest, seed=SEED).tolist()
    texts = [tokenizer.decode(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
    results.write_atomically(prompts := place / "prompts.jsonl", "".join(lines))

    # Each has half of the GPU. vLLM itself would count the memory that the other server takes.
    command = [*VLLM, str(folder), *SERVE.split(), "--tensor-parallel-size", str(tensor_parallel)]
    command += ["--gpu-memory-utilization", "0.4"]
    command += ["--kv-cache-memory-bytes", str(torch.cuda.mem_get_info()[1] // 3)]
    commands = {DENSE_COMPILED: [*command, *DENSE], Provider(backend, None, COMPILED): command}
    with contextlib.ExitStack() as stack:
        starting = {
            provider: stack.enter_context(server(command, place / f"{provider.backend}.log"))
            for provider, command in commands.items()
        }
        addresses = {provider: ready() for provider, ready in starting.items()}
        for provider, address in addresses.items():
            alone = [[row[:length]] for row, length in zip(tokens, CHECKED, strict=False)]
            for some in [*alone, tokens[:TOGETHER]]:
                check_answers(f"{provider} of {size}", address, model, some)
        for count, (at_once, requests) in itertools.product(range(ROUNDS + 1), LEVELS.items()):
            for provider, address in list(addresses.items())[:: -1 if count % 2 else 1]:
                words = ["--tokenizer", str(folder), "--dataset-path", str(prompts)]
                words += ["--num-prompts", str(requests), "--max-concurrency", str(at_once)]
                result = bench([*BENCH.split(), *GREEDY.split(), *words, "--base-url", address])
                if (completed := result["completed"]) != requests:
                    raise RuntimeError(f"vLLM finished {completed} of {requests} requests")
                row = case | {"provider": provider.name, "at_once": at_once, "requests": requests}
                row |= {"round": count, "prompt_tokens": result["total_input_tokens"]}
                times = [name for name in COLUMNS["serve"] if name not in row]
                row |= {name: significant(result[name], 4) for name in times}
                rows.add("serve", [row] if count else [])  # the first round warms up
    return rows.by_file["serve"]


def create(
    folder: Path, size: str, overrides: Sequence[str], fp8: bool, device: torch.device
) -> None:
    """Save a model of random weights with imposed activity, tuned, whose tokens are words."""
    model, config = random_model(size, overrides, CONTEXT, device)
    imposed.impose(model, imposed.layer_means("paper", config.num_layers, None, size))
    model.set_ffn_backend("auto")
    tune(model, imposed.draw_tokens(config.vocab_size, 3, LONGEST, device=device, seed=7))
    if fp8:
        quantize_(model)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0"), folder)


@contextlib.contextmanager
def server(command: list[str], log: Path, page: str = "/health") -> Iterator[Callable[[], str]]:
    """Run a server inside the block; yield a function that waits for it and returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it, as Ctrl-C does

    def ready() -> str:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}{page}", timeout=5).close()
                return address
            time.sleep(1)
        print(log.read_text(errors="replace")[-4000:])
        raise RuntimeError(f"the server did not start; its log is {log}")

    try:
        yield ready
    finally:
        process.terminate()
        process.wait()
        signal.signal(signal.SIGTERM, before)


def check_answers(
    what: str, address: str, model: torch.nn.Module, prompts: list[list[int]]
) -> None:
    """Compare greedy answers, and log-probabilities of prompts, with passes of transformers."""
    body = {"model": "m", "prompt": prompts, "max_tokens": ANSWER, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "prompt_logprobs": 1}
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        choices = sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = torch.tensor([prompt + choice["token_ids"]], device=model.device)
        logits = model(ids).logits[0, :-1].float()
        deviation, chances = float(logits.std()), logits.log_softmax(-1)
        exact = chances.gather(1, ids[0, 1:, None])[:, 0]
        gap = float((chances.max(-1).values - exact)[len(prompt) - 1 :].max()) / deviation
        read = zip(prompt[1:], choice["prompt_logprobs"][1:], exact.tolist(), strict=False)
        errors = [abs(entry[str(token)]["logprob"] - right) for token, entry, right in read]
        error = fmean(errors or [0.0]) / deviation
        if not (gap <= NEAR_TIE and error <= ERROR):
            raise ArithmeticError(
                f"vLLM's answer by {what} to {len(prompt)} tokens is wrong: a token is {gap:.2g} "
                f"below the first choice (allowed {NEAR_TIE}), "
                f"log-probabilities err by {error:.2g} ({ERROR})"
            )


def bench(words: list[str]) -> dict:
    """Return the result of `vllm bench serve`, in this process: importing vLLM takes long."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with contextlib.redirect_stdout(io.StringIO()):
        return main(parser.parse_args(words))
