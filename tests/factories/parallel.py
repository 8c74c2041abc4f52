"""A layer that two processes compute together (tensor parallelism): each has half of its neurons.

They run on the CPU with gloo, or on two GPUs with NCCL.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

import twell
from tests import fuzz
from tests.factories import SEED

PROCESSES = 2
TIMEOUT = datetime.timedelta(seconds=120)  # a process that waits for a failed one ends then
KINDS = [("relu", True), ("relu", False), ("drelu", True)]  # activation, gated
SPLIT = "w_gate", "w_up", "w_down_t", "b_gate", "b_up"  # by neurons; b_down is added once


@dataclass(frozen=True)
class Result:
    """Of one case on one rank. The two errors are relative RMS."""

    case: fuzz.Case
    from_one: float  # process
    from_fp64: float
    replayed: bool | None  # a CUDA graph with the all-reduce gave the same bits; None on a CPU


def cases(sizes, intermediate_size, hidden_size):
    """Cases of every kind, with biases, for pairs of a path and a number of tokens."""
    options = dict(biases=True, pattern="skewed", seed=SEED)
    return [
        fuzz.Case(
            path, m, intermediate_size, hidden_size, gated=gated, activation=activation, **options
        )
        for path, m in sizes
        for activation, gated in KINDS
    ]


def compute_by_two(cases: list[fuzz.Case], device_type: str, folder: Path) -> list[Result]:
    multiprocessing.spawn(_compute, (cases, device_type, folder), PROCESSES)
    files = sorted(folder.glob("results-*.pt"))
    return [result for file in files for result in torch.load(file, weights_only=False)]


def _compute(rank: int, cases: list[fuzz.Case], device_type: str, folder: Path) -> None:
    device, options = torch.device(device_type), {"backend": "gloo"}
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    options |= {"rank": rank, "world_size": PROCESSES, "timeout": TIMEOUT}
    distributed.init_process_group(init_method=f"file://{folder}/meeting", **options)
    torch.save([_result(case, rank, device) for case in cases], folder / f"results-{rank}.pt")
    distributed.destroy_process_group()


def _result(case: fuzz.Case, rank: int, device: torch.device) -> Result:
    tensors = fuzz.layer(case, device)
    _, expected = fuzz.exact(tensors, act=case.act)
    whole = {**tensors, "w_down_t": tensors["w_down"].t()}
    del whole["w_down"]
    mine = {name: _slice(name, t, rank) for name, t in whole.items()}
    options = {"activation": case.activation, "path": case.path}

    def compute() -> Tensor:
        y = twell.ffn(**mine, **options)
        distributed.all_reduce(y)
        return y

    y = compute()
    from_one = fuzz.relative_rms(y, twell.ffn(**whole, **options).double())
    replayed = torch.equal(_replay(compute), y) if device.type == "cuda" else None
    return Result(case, from_one, fuzz.relative_rms(y, expected), replayed)


def _slice(name: str, tensor: Tensor | None, rank: int) -> Tensor | None:
    if name == "b_down" and rank > 0:
        return None
    whole = tensor is None or name not in SPLIT
    return tensor if whole else tensor.tensor_split(PROCESSES)[rank]


def _replay(compute: Callable[[], Tensor]) -> Tensor:
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events of earlier calls meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = compute()
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return y
