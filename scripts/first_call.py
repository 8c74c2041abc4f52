"""Time the first call of the sparse layer, compilation included, and record its peak memory.

    python scripts/first_call.py --out data/bench

Each case runs in two fresh processes: "empty", with empty caches of compiled code, and "filled",
with the caches that the first process left. A process starts CUDA and cuBLAS before the clock
starts. It checks the result against fp64 (a model: against its dense layers) before it prints.
Needs a GPU; takes about eight minutes on an H200.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from twell import SparseFFN, SparseTraining, results
from twell.measure import imposed, runner
from twell.measure.check import TOLERANCE, Exact, relative
from twell.measure.patterns import synthetic_layer
from twell.measure.providers import (
    DENSE_COMPILED,
    DENSE_EAGER,
    TRITON,
    TRITON_COMPILED,
    Provider,
)
from twell.measure.sides import Subject, forward, random_model

LAYER = {"hidden_size": 2048, "intermediate_size": 5632, "active": 29.0}
BOTH = DENSE_COMPILED, TRITON
CASES = [
    *(("layer forward", provider, 131072) for provider in BOTH),
    *(("layer forward", provider, 1) for provider in BOTH),
    *(("layer step", provider, 16384) for provider in BOTH),
    *(("0.5b forward", provider, 4096) for provider in (*BOTH, TRITON_COMPILED)),
]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes until the GPU has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def workspace(call: Callable[[], object]) -> int:
    """Return the most bytes that a call allocates beside what exists before it."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def layer(what: str, provider: Provider, tokens: int) -> dict:
    """Measure one SparseFFN of LAYER: its forward pass, or forward and backward."""
    x, *weights = synthetic_layer(tokens, **LAYER)
    sizes = LAYER["hidden_size"], LAYER["intermediate_size"]
    ffn = SparseFFN(*sizes, backend=provider.backend, dtype=x.dtype, device=x.device)
    parts = ffn.gate_proj, ffn.up_proj, ffn.down_proj
    with torch.no_grad():
        for part, weight in zip(parts, weights, strict=True):
            part.weight.copy_(weight)
    if provider.compiled:
        ffn.compile(fullgraph=True, dynamic=False)
    exact = Exact.of(x, tuple(weights))

    sparse = SparseTraining(ffn)

    def step() -> torch.Tensor:
        for _ in sparse.attempts():
            ffn.zero_grad()
            y = ffn(x)
            y.backward(y.detach())
        return y.detach()

    @torch.no_grad()
    def run() -> torch.Tensor:
        return ffn.eval()(x)

    call = step if what == "layer step" else run
    seconds = timed(call)
    exact.check(call(), provider.name)
    return {"seconds": seconds, "workspace": workspace(call)}


@torch.no_grad()
def model(what: str, provider: Provider, tokens: int) -> dict:
    """Measure the forward pass of a model with random weights and imposed activity."""
    device = torch.device("cuda")
    subject, config = random_model(what.split()[0], [], tokens, device)
    ids = imposed.draw_tokens(config.vocab_size, 1, tokens, seed=1, device=device)
    imposed.impose(subject, [LAYER["active"]] * config.num_layers, ids)
    sides = Subject(what, subject, "flat", runner.Gpu())
    sides.become(DENSE_EAGER)
    dense = forward(subject, ids)[0]
    sides.become(provider)
    call = functools.partial(forward, subject, ids)
    seconds = timed(call)
    error = relative(call()[0], dense)
    if not error <= TOLERANCE["hidden states"]:
        raise ArithmeticError(f"{what}, {provider}: {error:.2e} from the dense hidden states")
    return {"seconds": seconds, "workspace": workspace(call)}


def child(what: str, provider: Provider, tokens: int) -> None:
    """Measure one case in this process and print it as JSON."""
    warm = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    (warm @ warm).relu().sum().item()
    print(json.dumps((layer if what.startswith("layer") else model)(what, provider, tokens)))


def main() -> None:
    """Run every case twice and append the rows to first_call.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        what, provider, tokens = options.case
        child(what, Provider.parse(provider), int(tokens))
        return
    origin = results.provenance(f"python scripts/first_call.py --out {options.out}")
    for what, provider, tokens in CASES:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            names = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"
            caches = {name: f"{folder}/{name}" for name in names}
            for state in ("empty", "filled"):
                command = [sys.executable, __file__, "--case", what, provider.name, str(tokens)]
                done = subprocess.run(
                    command, env=os.environ | caches, capture_output=True, text=True
                )
                if done.returncode:
                    raise RuntimeError(f"{what}, {provider}: {done.stderr}")
                measured = json.loads(done.stdout.splitlines()[-1])
                row = {"what": what, "tokens": tokens, "provider": provider.name, "caches": state}
                row |= {
                    "seconds": round(measured["seconds"], 2),
                    "workspace": measured["workspace"],
                }
                print(row, flush=True)
                rows.append(row)
        results.append_rows(options.out / "first_call.csv", rows, origin)


if __name__ == "__main__":
    main()
