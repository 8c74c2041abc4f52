"""CUDA graphs of eager calls that come again.

The launches of a small layer take longer on the host than its kernels on the GPU. So `ffn` captures
the launches of a case that comes again, with copies of x and y at fixed addresses, and replays the
graph from then on. The kernels, their order and the bits stay the same.

A case is a path, the number of tokens, the addresses of the weights and a stream. The graphs of a
stream share their workspace and the copies, which stay allocated: they run one after the other.
docs/kernel-log.md has the times.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from twell.sparse.activations import Weights

# More tokens keep the GPU busy for longer than the host takes for their launches.
MAX_TOKENS = 4096
REPEATS = 3  # calls of a case before its capture, so that all kernels are compiled and loaded
MAX_CASES = 4096  # then all are dropped


class Stream:
    """What the graphs of one stream share. `lock`: another thread may launch on it, too."""

    def __init__(self):
        self.pool, self.capturing = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.lock = threading.Lock()
        self.copies: dict[Hashable, Tensor] = {}

    def copies_like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return places for x and y."""
        most = 1 << (len(x) - 1).bit_length()
        kind = most, x.shape[1], x.dtype
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if kind not in self.copies:
                self.copies[kind] = x.new_empty(2, most, x.shape[1])
            return self.copies[kind][:, : len(x)].unbind()


class Graph(NamedTuple):
    """The launches that compute y of x."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    y: Tensor
    lock: threading.Lock

    def run(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        with self.lock:
            self.x.copy_(x)
            self.graph.replay()
            return self.y.clone() if out is None else out.copy_(self.y)


_cases: dict[Hashable, float | Graph] = {}  # the number of calls, then the graph
_streams: dict[tuple[int, int], Stream] = {}  # by device and stream


def fits(x: Tensor) -> bool:
    """Whether a call with x may be a graph: it waits for the host, and nobody captures it."""
    return x.is_cuda and 0 < len(x) <= MAX_TOKENS and not torch.cuda.is_current_stream_capturing()


def ffn(
    path: Callable,
    x: Tensor,
    weights: Weights,
    activity: Tensor | None,
    out: Tensor | None = None,
    *,
    captures: bool = True,
) -> Tensor | None:
    """Return y by the graph of such a call; None where there is none.

    captures: count the call, and capture the launches of a path's function where the case came
    before. x is on the current device, and `fits`. The launches depend on sizes, types, addresses
    and the activation, and never wait for the host.
    """
    case = _case(path, x, weights, activity)
    known = _cases.get(case, 0)
    if type(known) is Graph:
        return known.run(x, out)
    if not captures:
        return None
    if len(_cases) >= MAX_CASES:
        clear()
    if known < REPEATS:
        _cases[case] = known + 1
        return None
    try:
        _cases[case] = graph = _capture(path, x, weights, activity)
    except RuntimeError:  # out of memory, say: the case is launched from now on
        _cases[case] = -math.inf
        _streams.pop(_place(x), None)
        return None
    return graph.run(x, out)


def clear() -> None:
    """Drop all graphs and their workspace."""
    _cases.clear()
    _streams.clear()


def _case(path: Callable, x: Tensor, weights: Weights, activity: Tensor | None) -> Hashable:
    given = activity, *weights.tensors, *(weights.down_fp8 or ())
    tensors = [None if t is None else (t.data_ptr(), t.dtype, t.shape) for t in given]
    act = weights.act
    return path, *_place(x), x.dtype, x.shape, act.name, act.threshold, *tensors


def _place(x: Tensor) -> tuple[int, int]:
    return x.device.index, driver.active.get_current_stream(x.device.index)


def _capture(path: Callable, x: Tensor, weights: Weights, activity: Tensor | None) -> Graph:
    place = _place(x)
    if place not in _streams:
        _streams[place] = Stream()
    stream = _streams[place]
    x, y = stream.copies_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_blas_handle()  # made here: a capture could not make it
    with stream.lock, torch.cuda.stream(stream.capturing):
        # Other threads may allocate meanwhile.
        graph.capture_begin(stream.pool, capture_error_mode="thread_local")
        try:
            path(x, weights, activity=activity, out=y)
        finally:
            graph.capture_end()
    return Graph(graph, x, y, stream.lock)
