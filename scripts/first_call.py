"""Time the first call of a layer, compilation included: python scripts/first_call.py --out data/bench

Each case runs in two fresh processes: "empty", with empty caches of compiled code, and "filled",
with the caches that the first process left. A process starts CUDA and cuBLAS before the clock
starts, and checks the result against fp64. Needs a GPU; takes about five minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from twell import SparseFFN, SparseTraining, results
from twell.measure.check import Exact
from twell.measure.patterns import synthetic_layer
from twell.measure.providers import DENSE_COMPILED, TRITON

WIDTHS, ACTIVE = (2048, 5632), 29.0
CALLS = ("layer forward", 131072), ("layer forward", 1), ("layer step", 16384)
CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"


def measure(what: str, tokens: int, provider: str) -> dict:
    """Return the seconds of the first call, and the most bytes that a later one allocates."""
    warm = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    (warm @ warm).relu().sum().item()
    x, *weights = synthetic_layer(tokens, *WIDTHS, active=ACTIVE)
    backend = "dense" if provider == DENSE_COMPILED.name else "triton"
    layer = SparseFFN(*WIDTHS, backend=backend, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        for name, weight in zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True):
            getattr(layer, name).weight.copy_(weight)
    if backend == "dense":
        layer.compile(fullgraph=True, dynamic=False)
    exact, training = Exact.of(x, tuple(weights)), SparseTraining(layer)

    def call() -> torch.Tensor:
        if what == "layer forward":
            with torch.no_grad():
                return layer.eval()(x)
        for _ in training.attempts():
            layer.zero_grad()
            y = layer(x)
            y.backward(y.detach())
        return y.detach()

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    exact.check(call(), provider)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    workspace = torch.cuda.max_memory_allocated() - before
    return {"seconds": round(seconds, 2), "workspace": workspace}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        what, tokens, provider = given.case
        print(json.dumps(measure(what, int(tokens), provider)))
        return
    origin = results.provenance(f"python scripts/first_call.py --out {given.out}")
    for (what, tokens), provider in product(CALLS, (DENSE_COMPILED.name, TRITON.name)):
        rows, words = [], [sys.executable, __file__, "--case", what, str(tokens), provider]
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: f"{folder}/{name}" for name in CACHES}
            for state in ("empty", "filled"):
                output = subprocess.check_output(words, env=os.environ | caches, text=True)
                row = {"what": what, "tokens": tokens, "provider": provider, "caches": state}
                rows.append(row | json.loads(output.splitlines()[-1]))
                print(rows[-1], flush=True)
        results.append_rows(given.out / "first_call.csv", rows, origin)


if __name__ == "__main__":
    main()
