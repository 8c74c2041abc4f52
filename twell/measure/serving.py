"""Serving: requests a second and time to the first token of transformers' continuous batching.

All requests arrive at once, with prompts of different lengths, and each gets the same number of
new tokens, greedily. Activity is imposed on random weights (imposed.py); each feed-forward layer is
compared with fp64 before anything is timed. Providers serve in turns. Times are transformers' own:
a request's creation, and each of its tokens. They hold no warming up, no capture of a CUDA graph,
and no HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from twell.measure import check, imposed, runner
from twell.measure.patterns import layer_means
from twell.measure.providers import DENSE_EAGER, Provider, model_providers
from twell.measure.rows import Rows, require, significant
from twell.measure.sides import Subject, forward, random_model
from twell.models.llama import SparseLlamaForCausalLM

ROUNDS = 3
Answer = tuple[float, np.ndarray]  # seconds of all requests, and to the first token of each


@dataclass(frozen=True)
class Load:
    """The requests, all at once: prompts of lengths from `shortest` to `longest`.

    Lengths are evenly drawn by `seed`. cuda_graph: transformers' option, None: its own choice.
    """

    requests: int = 64
    shortest: int = 128
    longest: int = 1024
    new_tokens: int = 128
    cuda_graph: bool | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("requests", "shortest", "new_tokens"):
            number = getattr(self, name)
            require(number >= 1, f"{name} is {number}; it has to be at least 1")
        message = f"prompts of {self.shortest} to {self.longest} tokens: there are none"
        require(self.shortest <= self.longest, message)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        g = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.requests,), generator=g)
        tokens = imposed.draw_tokens(vocab_size, self.requests, self.longest, seed=self.seed)
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@torch.no_grad()
def serve(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    load: Load | None = None,
    profile: str = "paper",
    active: float | None = None,
    seconds: float = math.inf,
    out: str | Path | None = None,
) -> list[dict]:
    """Time serving with a model in bf16, dense, sparse and by "auto": `twell measure serve`.

    A model whose feed-forward layers return zeros is timed too: no kernel can serve faster than it.
    After `seconds` no further round begins. An interrupted measurement writes the rows of the
    rounds that it has. Returns the rows of serve.csv. Raises as `ffn` does, and RuntimeError where
    transformers does not finish a request.
    """
    start, load, gpu = time.monotonic(), load or Load(), runner.Gpu()
    rows = Rows(out, "serve")
    mean = imposed.PAPER_ACTIVE.get(size, imposed.ACTIVE) if active is None else active

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {line}", flush=True)

    say(f"build {size}")
    longest = load.longest + load.new_tokens
    model, config = random_model(size, overrides, longest, gpu.device)
    draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=gpu.device)
    imposed.impose(model, layer_means(profile, config.num_layers, mean), draw(64, 128, seed=1))
    subject, ids = Subject(size, model, profile, gpu), draw(1, load.longest)
    activity = imposed.activity_of(model, ids)
    subject.observe(activity, ids.numel())
    prompts = load.prompts(config.vocab_size)
    about = subject.case(ids, activity) | dataclasses.asdict(load)
    about |= {"prompt_tokens": sum(map(len, prompts)), "attention": _attention()}
    about["cuda_graph"] = "default" if load.cuda_graph is None else load.cuda_graph

    errors: dict[Provider, float] = {}
    once = functools.partial(forward, model, ids)
    for provider in model_providers(False):
        say(f"check the layers of {provider}")
        subject.become(provider)
        error = check.check_layers(model.ffns, once, f"{provider} of {size}")
        errors[provider] = significant(error, 3)
    # None stands for a model without feed-forward layers.
    answers: dict[Provider | None, list[Answer]] = {provider: [] for provider in (*errors, None)}
    try:
        for number in range(ROUNDS + 1):  # the first one warms up
            if number > 1 and time.monotonic() - start > seconds:
                say(f"{seconds:g} s are over: {number - 1} of {ROUNDS} rounds are done")
                break
            for provider in answers if number % 2 else reversed(answers):
                subject.become(provider or DENSE_EAGER)
                with contextlib.nullcontext() if provider else _without_ffn(model):
                    answer = _answer(model, prompts, load)
                name = provider or "no feed-forward layer"
                say(f"round {number} of {ROUNDS}: {name} took {answer[0]:.2f} s")
                answers[provider] += [answer] if number else []
    finally:  # also the rounds of an interrupted command
        about["without_ffn"] = _columns(answers.pop(None), load).get("p50")
        for provider, several in answers.items():
            if columns := _columns(several, load):
                own = {"provider": provider.name, "layer_rms": errors[provider]}
                rows.add("serve", [about | own | columns])
    return rows.by_file["serve"]


@contextlib.contextmanager
def _without_ffn(model: SparseLlamaForCausalLM) -> Iterator[None]:
    """Let the feed-forward layers return zeros: the time of all else, which no kernel changes."""
    for ffn in model.ffns:
        ffn.forward = torch.zeros_like
    try:
        yield
    finally:
        for ffn in model.ffns:
            del ffn.forward


def _attention() -> str:
    """Return the attention that continuous batching takes: "flash" where it is installed."""
    flash = is_flash_attn_3_available, is_flash_attn_2_available
    return "flash" if any(found(kernels_fallback_ok=True) for found in flash) else "sdpa"


def _answer(model: SparseLlamaForCausalLM, prompts: list[list[int]], load: Load) -> Answer:
    """Serve all requests; with CUDA graphs once before, so that all graphs are captured."""
    graphs = load.cuda_graph or (load.cuda_graph is None and _attention() == "flash")
    serve = functools.partial(
        model.generate_batch,
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1
        ),
        # Without sharing: the second pass would find the prompts of the first in the cache.
        continuous_batching_config=ContinuousBatchingConfig(
            use_cuda_graph=load.cuda_graph, allow_block_sharing=False
        ),
        record_timestamps=True,
        persistent_manager=graphs,
    )
    try:
        if graphs:
            serve()
        answers = serve().values()
    finally:
        if graphs:  # they belong to the present provider
            model.destroy_cached_continuous_batching_manager()
    lengths = [len(answer.generated_tokens) for answer in answers]
    if lengths != [load.new_tokens] * load.requests:
        errors = {str(answer.error) for answer in answers}
        raise RuntimeError(
            f"transformers answered {len(lengths)} of {load.requests} requests, with {lengths} "
            f"of {load.new_tokens} tokens: {'; '.join(sorted(errors))}"
        )
    start = min(answer.created_time for answer in answers)
    end = max(answer.timestamps[-1] for answer in answers)
    first = [answer.timestamps[0] - answer.created_time for answer in answers]
    return end - start, np.array(first)


def _columns(answers: list[Answer], load: Load) -> dict:
    """Return a provider's columns, in ms; none without answers."""
    if not answers:
        return {}
    total = np.array([seconds for seconds, _ in answers])
    first = 1e3 * np.concatenate([seconds for _, seconds in answers])
    columns = runner.quantiles(1e3 * total) | {"rounds": len(answers)}
    columns["requests_per_second"] = load.requests / np.median(total)
    columns["tokens_per_second"] = load.requests * load.new_tokens / np.median(total)
    columns["first_token"], columns["first_token_p95"] = np.quantile(first, (0.5, 0.95))
    return {name: significant(number, 5) for name, number in columns.items()}
