"""CUDA graphs of eager calls that come again with the same addresses.

The launches of a small layer take longer on the host than its kernels on the GPU. They depend on
their arguments alone, and in a model that runs again and again the caching allocator gives every
layer the same addresses. So `replay` captures the launches of a case that comes again, and replays
the graph from then on. The kernels, their order and the bits stay the same.

The workspace of a graph stays allocated. All graphs of a stream share it, since they run one after
the other. docs/kernel-log.md has the times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor
from triton.runtime import driver

from twell.sparse.activations import Weights

# More tokens keep the GPU busy for longer than the host takes for their launches.
MAX_TOKENS = 4096
REPEATS = 3  # calls of a case before its capture, so that all kernels are compiled and loaded
MAX_CASES = 4096  # then all are dropped

_cases: dict[Hashable, int | torch.cuda.CUDAGraph] = {}  # the number of calls, then the graph
_streams: dict[tuple[int, int], tuple] = {}  # by device and stream: workspace, stream of captures
_capturing = threading.Lock()


def fits(x: Tensor) -> bool:
    """Whether a call with x may be a graph: it waits for the host, and nobody captures it."""
    return x.is_cuda and 0 < len(x) <= MAX_TOKENS and not torch.cuda.is_current_stream_capturing()


def replay(
    ffn: Callable,
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None,
    activity: Tensor | None,
    y: Tensor,
) -> None:
    """Write y by a path's function, or by its graph where the same addresses came before.

    The launches depend on addresses, sizes, types and the activation, and never wait for the host.
    """
    place = x.device.index, driver.active.get_current_stream(x.device.index)
    given = x, *weights.tensors, x_scale, activity, y
    tensors = [t if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride()) for t in given]
    case = place, ffn, weights.act.name, weights.act.threshold, *tensors
    known = _cases.get(case, 0)
    if isinstance(known, torch.cuda.CUDAGraph):
        known.replay()
        return
    launch = partial(ffn, x, weights, x_scale, activity=activity, out=y)
    if known < REPEATS or not _capturing.acquire(blocking=False):
        launch()
        if len(_cases) >= MAX_CASES:
            clear()
        _cases[case] = known + 1
        return
    try:
        _cases[case] = graph = _captured(place, launch)
    finally:
        _capturing.release()
    graph.replay()


def clear() -> None:
    """Drop all graphs and their workspace."""
    _cases.clear()
    _streams.clear()


def _captured(place: tuple[int, int], launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(place[0]):
        if place not in _streams:
            _streams[place] = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        pool, stream = _streams[place]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Other threads may allocate meanwhile.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
    return graph
