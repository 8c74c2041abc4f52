"""A layer that two processes on two GPUs compute together: each has half of its neurons."""

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
    replayed: bool  # a CUDA graph with the all-reduce gave the same bits


def compute_by_two(sizes, folder):
    """The results of every kind of layer for these numbers of tokens, on both ranks."""
    options = dict(biases=True, pattern="skewed", seed=SEED)
    cases = [
        fuzz.Case(None, size, 5632, 2048, gated=gated, activation=activation, **options)
        for size in sizes
        for activation, gated in KINDS
    ]
    multiprocessing.spawn(_compute, (cases, folder), 2)
    files = sorted(folder.glob("results-*.pt"))
    return [result for file in files for result in torch.load(file, weights_only=False)]


def _compute(rank, cases, folder):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    options = {"rank": rank, "world_size": 2, "init_method": f"file://{folder}/meeting"}
    distributed.init_process_group("nccl", device_id=device, **options)
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
    replayed = torch.equal(_replay(compute), y)
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
