"""Times, energy, memory and kernels of calls on a GPU.

Everything that touches the device's clocks is here. A layer is timed in one of two modes. "stream"
is what a caller of the layer sees: launches one after the other, behind a cache that other work has
emptied. "graph" is the GPU alone: a CUDA graph of several calls, each with its own weights, so they
come from memory as in a model of many layers.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.measure.rows import significant

# A turn is the ms that a provider is timed for before it is the next one's turn.
LAYER_TURN = 60  # calls of a layer
STEP_TURN = 100  # steps of a layer, forward and backward; half as many ms of forward passes
CALIBRATION_TURN = 30
CEILING_TURN = 100
MODEL_TURN = 800  # passes of a model: clocks change within seconds
OPTIMIZER_TURN = 2000  # 2 to 20 optimiser steps
LAYER_ROUNDS, MODEL_ROUNDS = 4, 9  # turns of each provider
SETTLE = 300  # ms before a turn of a model that do not count: power takes a while to settle
PROFILED = 8  # calls that are profiled, at least

Meter = Callable[[], int]  # reads the energy counter, mJ


def gpu() -> torch.device:
    """Return the GPU. Raises RuntimeError without one."""
    if not torch.cuda.is_available():
        raise RuntimeError("measuring needs a GPU, and torch sees none")
    return torch.device("cuda")


# --- times ------------------------------------------------------------------------------------


def stream_times(call: Callable[[], object], budget: float) -> np.ndarray:
    """Return times in ms of single calls, the cache emptied before each; about `budget` ms."""
    from triton.testing import do_bench

    warmup = max(1, int(budget / 4))
    return np.array(do_bench(call, warmup=warmup, rep=int(budget), return_mode="all"))


def between_replays(replay: Callable[[], object], number: int, lead: int = 3) -> np.ndarray:
    """Return times in ms of so many replays that follow one another without a gap.

    `lead` more replays find the queue empty and wait for the host; they are not counted.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    for _ in range(lead):
        replay()
    for event in events[:-1]:
        event.record()
        replay()
    events[-1].record()
    events[-1].synchronize()
    pairs = zip(events, events[1:], strict=False)
    return np.array([start.elapsed_time(end) for start, end in pairs])


def graph_times(replay: Callable[[], object], calls: int, budget: float) -> np.ndarray:
    """Return times in ms of one call of `calls` a replay; 5 to 1,000 replays in `budget` ms."""
    trial = between_replays(replay, 5)
    number = int(min(max(budget / trial[2:].mean(), 5), 1000))
    return between_replays(replay, number) / calls


def capture(calls: Sequence[Callable[[], Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return a graph of all calls, one after the other, and the outputs that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # a first call may compile, allocate or look up, outside the graph
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    return graph, outputs


def quantiles(times: np.ndarray) -> dict[str, float]:
    """Return the columns p20, p50 and p80."""
    values = (significant(value, 4) for value in np.quantile(times, [0.2, 0.5, 0.8]))
    return dict(zip(("p20", "p50", "p80"), values, strict=True))


def in_turns(
    timers: Mapping[Hashable, Callable[[], np.ndarray]], rounds: int
) -> dict[Any, dict[str, float]]:
    """Return the quantiles of each timer over its turns.

    In turns: a GPU's clock falls while it works, so the first provider would look fastest.
    """
    times: dict[Hashable, list[np.ndarray]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key, timer in timers.items():
            times[key].append(timer())
    return {key: quantiles(np.concatenate(turns)) for key, turns in times.items()}


# --- energy and memory ------------------------------------------------------------------------


def energy_meter() -> Meter:
    """Return the reader of the GPU's energy counter. Raises RuntimeError where there is none."""
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        # NVML counts all GPUs, torch those of CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        meter = functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        meter()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML says: {error}") from None
    return meter


def optional_meter(wanted: bool) -> Meter | None:
    """Return the meter where energy is wanted; None, with the reason printed, without a counter."""
    try:
        return energy_meter() if wanted else None
    except RuntimeError as error:
        print(f"energy is not measured: {error}", flush=True)
        return None


def energy(
    run: Callable[[], object], calls: int, milliseconds: float, meter: Meter | None
) -> dict[str, float | None]:
    """Return the energy of a call in mJ and the mean power in W; idle power is part of both.

    Over a second of runs, each of `calls` calls of so many ms. Without a meter both are None.
    """
    if meter is None:
        return {"energy": None, "watts": None}

    def repeat(seconds: float) -> int:
        number = math.ceil(1e3 * seconds / (milliseconds * calls))
        for _ in range(number):
            run()
        torch.cuda.synchronize()
        return number * calls

    repeat(SETTLE / 1e3)
    before, start = meter(), time.perf_counter()
    number = repeat(1.0)
    seconds, used = time.perf_counter() - start, meter() - before
    return {"energy": significant(used / number, 4), "watts": round(used / 1e3 / seconds, 1)}


def idle_watts(meter: Meter) -> float:
    """Return the mean power in W over two seconds without work, after a second's wait."""
    torch.cuda.synchronize()
    time.sleep(1.0)
    before, start = meter(), time.perf_counter()
    time.sleep(2.0)
    return round((meter() - before) / 1e3 / (time.perf_counter() - start), 1)


def peak_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes allocated before a run, and the most during it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return before, torch.cuda.max_memory_allocated()


@dataclass
class Clock:
    """Times of a call over its turns, and its energy: `used` mJ and `seconds` for `calls` calls.

    A call may count as several: the steps of a generation.
    """

    call: Callable[[], object]
    meter: Meter | None
    per_call: int = 1
    times: list[np.ndarray] = field(default_factory=list)
    trial: float = 0.0  # ms
    used: float = 0.0
    seconds: float = 0.0
    calls: int = 0

    def turn(self) -> None:
        """Run for MODEL_TURN ms, at least twice, after SETTLE ms that are not counted."""
        if not self.times:
            self.trial = float(between_replays(self.call, 1, lead=1)[0])
        for _ in range(min(math.ceil(SETTLE / self.trial), 1000)):
            self.call()
        number = min(max(round(MODEL_TURN / self.trial), 2), 2000)
        torch.cuda.synchronize()
        before, start = (self.meter() if self.meter else 0), time.perf_counter()
        self.times.append(between_replays(self.call, number, lead=0) / self.per_call)
        self.seconds += time.perf_counter() - start
        self.used += (self.meter() if self.meter else 0) - before
        self.calls += number * self.per_call

    def columns(self, idle: float | None) -> dict:
        """Return the columns of speed and energy."""
        columns = quantiles(np.concatenate(self.times))
        if self.meter is None:
            return columns | {"energy": None, "watts": None, "idle": None}
        mean, watts = self.used / self.calls, self.used / 1e3 / self.seconds
        return columns | {"energy": significant(mean, 5), "watts": round(watts, 1), "idle": idle}


# --- kernels ----------------------------------------------------------------------------------


def kernel_name(name: str) -> str:
    """Return a GPU kernel's short name: "cublas matmul", "elementwise", "copy", or its own."""
    if re.search(r"nvjet|gemm|gemv|cutlass|cublas|splitK", name):
        return "cublas matmul"
    if re.match(r"Memcpy|Memset", name):
        return "copy"
    if re.search(r"^triton_|elementwise|at::native", name):
        return "elementwise"
    return re.split(r"[(<]", name.removeprefix("void "))[0]


def _profile(calls: Sequence[Callable[[], object]], rounds: int):
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the first profile of a process pays for its start
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(rounds):
                for call in calls:
                    call()
            torch.cuda.synchronize()
    return profiler


def kernel_times(calls: Sequence[Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Return launches and ms in one call of each kernel by short name, means over the calls."""
    rounds = -(-PROFILED // len(calls))
    number = rounds * len(calls)
    times: dict[str, tuple[float, float]] = {}
    for event in _profile(calls, rounds).key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total:
            launches, ms = times.get(kernel_name(event.key), (0.0, 0.0))
            ms += event.self_device_time_total / 1e3 / number
            times[kernel_name(event.key)] = launches + event.count / number, ms
    return times


def kernel_sequence(
    call: Callable[[], object], calls: int, lead: int
) -> list[Sequence[tuple[str, float]]]:
    """Return the kernels (name, ms) of so many calls, in the order they ran.

    They follow `lead` more calls, so that clocks are those of steady work. Raises RuntimeError
    where calls ran different kernels.
    """
    cuda = torch.autograd.DeviceType.CUDA
    events = [
        event
        for event in _profile([call], lead + calls).events()
        if event.device_type == cuda and not getattr(event, "is_user_annotation", 0)
    ]
    events.sort(key=lambda event: event.time_range.start)
    kernels = [(event.name, event.time_range.elapsed_us() / 1e3) for event in events]
    return equal_parts(kernels, lead + calls)[lead:]


def equal_parts(kernels: Sequence[tuple[str, float]], number: int) -> list[Sequence]:
    """Cut into so many parts of the same kernels in the same order; RuntimeError for others."""
    each, rest = divmod(len(kernels), number)
    parts = [kernels[start : start + each] for start in range(0, len(kernels), each or 1)]
    names = [[name for name, _ in part] for part in parts]
    if rest or not each or any(part != names[0] for part in names):
        raise RuntimeError(
            f"{len(kernels)} kernels ran in {number} equal passes, and not the same in each"
        )
    return parts
