"""A layer that two processes compute together (tensor parallelism): each has half of its neurons.

They run on two GPUs with NCCL, or on the CPU with gloo.
"""

from typing import NamedTuple

import torch
from torch import distributed, multiprocessing

import twell
from tests import fuzz
from tests.factories import SEED

KINDS = [("relu", True), ("relu", False), ("drelu", True)]  # activation, gated
SPLIT = "w_gate", "w_up", "w_down_t", "b_gate", "b_up"  # by neurons; b_down is added once


class Result(NamedTuple):
    """Of one case on one rank. The two errors are relative RMS."""

    case: fuzz.Case
    from_one: float  # process
    from_fp64: float
    replayed: bool | None  # a CUDA graph with the all-reduce gave the same bits; None on a CPU


def cases(sizes, intermediate_size, hidden_size):
    """Cases of every kind, with biases, for pairs of a path and a number of tokens."""
    sizes = [(path, m, intermediate_size, hidden_size) for path, m in sizes]
    options = dict(biases=True, pattern="skewed", seed=SEED)
    return [
        fuzz.Case(*size, gated=gated, activation=activation, **options)
        for size in sizes
        for activation, gated in KINDS
    ]


def compute_by_two(cases, device_type, folder):
    multiprocessing.spawn(_compute, (cases, device_type, folder), 2)
    files = sorted(folder.glob("results-*.pt"))
    return [result for file in files for result in torch.load(file, weights_only=False)]


def _compute(rank, cases, device_type, folder):
    device, options = torch.device(device_type), {"backend": "gloo"}
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    options |= {"rank": rank, "world_size": 2, "init_method": f"file://{folder}/meeting"}
    distributed.init_process_group(**options)
    torch.save([_result(case, rank, device) for case in cases], folder / f"results-{rank}.pt")
    distributed.destroy_process_group()


def _result(case, rank, device):
    tensors = fuzz.layer(case, device)
    _, expected = fuzz.exact(tensors, act=case.act)
    whole = {**tensors, "w_down_t": tensors["w_down"].t()}
    del whole["w_down"]
    mine = {n: t.chunk(2)[rank] if t is not None and n in SPLIT else t for n, t in whole.items()}
    if rank > 0:
        mine["b_down"] = None
    options = {"activation": case.activation, "path": case.path}

    def compute():
        y = twell.ffn(**mine, **options)
        distributed.all_reduce(y)
        return y

    y = compute()
    from_one = fuzz.relative_rms(y, twell.ffn(**whole, **options).double())
    replayed = torch.equal(_replay(compute), y) if device.type == "cuda" else None
    return Result(case, from_one, fuzz.relative_rms(y, expected), replayed)


def _replay(compute):
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events of earlier calls meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = compute()
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return y
