"""Time a stock transformers model beside its sparsified copy: python -m study.stock --out DIR

What a user gets by `twell.sparsify(model, backend="auto")` and `twell.tune`: eager passes and
`generate`, `torch.compile(model)` as it is, and with mode="reduce-overhead". Rows go to stock.csv.
"""

import argparse
import copy
import shlex
import sys
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import twell
from twell import results
from twell.measure import check, imposed, runner
from twell.measure.runner import Call, bench
from twell.measure.sides import random_model

SIZES = "2b", ["num_layers=16", "vocab_size=32768"]
ACTIVE, WRITTEN = 28, 32  # neurons a token; tokens of generate
TOLERANCE = 0.03  # relative RMS of logits; each layer rounds to bf16 otherwise
BATCHES = {
    "eager": "1x128 1x512 1x2048 4x2048 8x2048",
    "generate": "1x128 8x128",
    "compiled": "1x16 1x512 1x2048 8x2048",
    "reduce-overhead": "1x16 1x512 1x2048",
}


def pair(gpu: runner.Gpu) -> dict[str, LlamaForCausalLM]:
    """Return a stock model and its sparsified copy."""
    model, config = random_model(*SIZES, 4096, gpu.device)
    imposed.impose(model, [ACTIVE] * config.num_layers)
    kept = {k: v for k, v in model.config.to_dict().items() if k in LlamaConfig().to_dict()}
    with gpu.device:
        stock = LlamaForCausalLM(LlamaConfig(**kept)).to(torch.bfloat16).eval()
    stock.load_state_dict(model.state_dict())
    sparse = twell.sparsify(copy.deepcopy(stock.requires_grad_(False)), backend="auto")
    ids = imposed.draw_tokens(config.vocab_size, 4, 2048, device=gpu.device)
    twell.tune(sparse, {"input_ids": ids, "use_cache": False})
    return {"dense": stock, "auto": sparse}


def warm(model: LlamaForCausalLM, mode: str, ids: torch.Tensor) -> runner.Run:
    """Return the call that is timed, compiled and warm."""
    call = partial(model, ids, use_cache=False, logits_to_keep=1)
    if mode == "generate":
        options = {"min_new_tokens": WRITTEN, "max_new_tokens": WRITTEN, "do_sample": False}
        mask = torch.ones_like(ids)
        call = partial(model.generate, ids, attention_mask=mask, pad_token_id=0, **options)
    elif mode != "eager":
        compiled = torch.compile(model, dynamic=False, mode=None if mode == "compiled" else mode)
        call = partial(compiled, *call.args, **call.keywords)
    runner.repeat([call], 5)
    return call


def measure(
    gpu: runner.Gpu, models: dict[str, LlamaForCausalLM], mode: str, batch: int, context: int
) -> list[dict]:
    """Check and time both models; return a row of each."""
    vocab_size = models["dense"].config.vocab_size
    ids = imposed.draw_tokens(vocab_size, batch, context, device=gpu.device)
    runs = {name: warm(model, mode, ids) for name, model in models.items()}
    # Of `generate` the pass is checked that reads the prompt.
    passed = warm(models["auto"], "eager", ids) if mode == "generate" else runs["auto"]
    exact = warm(models["dense"], "eager", ids)().logits
    error = check.relative(passed().logits, exact)
    check.accept(error, TOLERANCE, "logits differ")
    case = {"mode": mode, "batch": batch, "context": context, "active": ACTIVE}
    case["relative_rms"] = runner.significant(error, 3)
    waits = mode in ("eager", "generate")  # for Python, whose times vary more
    calls = bench(gpu, lambda name: Call(runs[name]), runs, "pass" if waits else "step")
    rows = [case | {"provider": name} | call.columns for name, call in calls.items()]
    print(*rows, rows[0]["p50"] / rows[1]["p50"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(BATCHES), help="with commas")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    given = parser.parse_args()
    origin = results.provenance(shlex.join(["python", "-m", "study.stock", *sys.argv[1:]]))
    with torch.no_grad():
        gpu = runner.Gpu()
        models = pair(gpu)
        for mode in given.modes.split(","):
            for batch in BATCHES[mode].split():
                torch.compiler.reset()
                rows = measure(gpu, models, mode, *map(int, batch.split("x")))
                results.append_rows(given.out / "stock.csv", rows, origin)


if __name__ == "__main__":
    main()
