"""Times, energy, memory and kernels of calls on a GPU.

`Gpu` is the one place that touches the device's clocks and counters. A layer is timed in one of
four modes. "stream": single calls, each behind a cache that other work has emptied, while the host
runs ahead. The others call several layers in turn, so weights come from memory as in a model of
many layers: "graph" in a CUDA graph, the GPU alone; "eager" back to back, so a small layer waits
for the host; "compiled" the same, by torch.compile.
"""

from __future__ import annotations

import functools
import math
import random
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from twell.measure.rows import significant

# A turn is the ms that a provider is timed for before it is the next one's turn.
LAYER_TURN = 60  # calls of a layer
STEP_TURN = 100  # steps of a layer, forward and backward; half as many ms of forward passes
CALIBRATION_TURN = 30
CEILING_TURN = 100
MODEL_TURN = 800  # passes of a model: clocks change within seconds
OPTIMIZER_TURN = 2000  # 2 to 20 optimiser steps
ENERGY_TURN = 1000  # runs of a call whose energy is measured apart from its times
# Turns of each provider. With 4 of a layer, where power binds, dense against itself had 0.95.
LAYER_ROUNDS, MODEL_ROUNDS = 8, 9
SETTLE = 300  # ms of work that do not count: power takes a while to settle
PROFILED = 8  # calls that are profiled, at least

Run = Callable[[], Any]
Kernels = Sequence[tuple[str, float]]  # names and ms


class Gpu:
    """The clocks and counters of the GPU in use. Raises RuntimeError without one.

    energy: also its energy counter, `meter`. Without a counter the reason is printed.
    """

    device = torch.device("cuda")

    def __init__(self, energy: bool = False):
        if not torch.cuda.is_available():
            raise RuntimeError("measuring needs a GPU, and torch sees none")
        self.meter: Callable[[], int] | None = None
        try:
            self.meter = energy_meter() if energy else None
        except RuntimeError as error:
            print(f"energy is not measured: {error}", flush=True)

    def stream_times(self, call: Run, budget: float) -> np.ndarray:
        """Return times in ms of single calls, the cache emptied before each; about `budget` ms."""
        from triton.testing import do_bench

        warmup = max(1, int(budget / 4))
        return np.array(do_bench(call, warmup=warmup, rep=int(budget), return_mode="all"))

    def replay_times(self, replay: Run, number: int, lead: int = 3) -> np.ndarray:
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

    def capture(self, calls: Sequence[Run]) -> tuple[Run, list]:
        """Return the replay of a graph of all calls, and the outputs that a replay writes."""
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
        return graph.replay, outputs

    def metered(self, run: Run) -> tuple[Any, float, float]:
        """Return a run's result, the mJ that it used (without a meter 0), and its seconds."""
        torch.cuda.synchronize()
        before, start = (self.meter() if self.meter else 0), time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return result, (self.meter() if self.meter else 0) - before, seconds

    def allocated(self) -> int:
        """Return the bytes allocated now."""
        return torch.cuda.memory_allocated()

    def peak(self, run: Run) -> tuple[int, int]:
        """Return the bytes allocated before a run, and the most during it."""
        torch.cuda.synchronize()
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return before, torch.cuda.max_memory_allocated()

    def available(self) -> int:
        """Return the bytes that are free, and those that torch holds to use again."""
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def kernels(self, calls: Sequence[Run], rounds: int) -> Kernels:
        """Return the kernels of so many rounds of the calls, in the order they ran."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(2):  # the first profile of a process pays for its start
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                repeat(calls, rounds)
                torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        events = [
            event
            for event in profiler.events()
            if event.device_type == cuda and not getattr(event, "is_user_annotation", 0)
        ]
        events.sort(key=lambda event: event.time_range.start)
        return [(event.name, event.time_range.elapsed_us() / 1e3) for event in events]


def energy_meter() -> Callable[[], int]:
    """Return the reader of the GPU's energy counter in mJ; RuntimeError where there is none."""
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


def repeat(calls: Sequence[Run], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


# --- checked first, then timed in turns -------------------------------------------------------


def measure(
    keys: Iterable[Hashable], check: Callable[[Any], tuple[dict, Callable]], rounds: int
) -> dict[Any, dict]:
    """Check a call for every key, then time all in turns; return the columns by key.

    check: raises for a wrong result; returns columns, and what runs the call for a turn and returns
    times in ms. p20, p50 and p80 are added. In turns: a GPU's clock falls while it works, so the
    first call would look fastest. The order of a round is drawn, always alike: where power binds, a
    call that always followed the hottest one would look slow.
    """
    checked = {key: check(key) for key in keys}
    turns: dict[Any, list[np.ndarray]] = {key: [] for key in checked}
    draws = random.Random(0)
    for _ in range(rounds):
        for key in draws.sample(list(checked), len(checked)):
            turns[key].append(checked[key][1]())
    return {
        key: columns | quantiles(np.concatenate(turns[key]))
        for key, (columns, _) in checked.items()
    }


def quantiles(times: np.ndarray) -> dict[str, float]:
    """Return the columns p20, p50 and p80."""
    values = (significant(value, 4) for value in np.quantile(times, [0.2, 0.5, 0.8]))
    return dict(zip(("p20", "p50", "p80"), values, strict=True))


def graph_times(gpu: Gpu, replay: Run, calls: int, budget: float) -> np.ndarray:
    """Return times in ms of one call of `calls` a replay; 5 to 1,000 replays in `budget` ms."""
    trial = gpu.replay_times(replay, 5)
    number = int(min(max(budget / trial[2:].mean(), 5), 1000))
    return gpu.replay_times(replay, number) / calls


class Clock:
    """Times a call in turns, and counts its energy over the same turns.

    per_call: a call may count as several, such as the steps of a generation.
    """

    def __init__(self, gpu: Gpu, call: Run, per_call: int = 1):
        self.gpu, self.call, self.per_call = gpu, call, per_call
        self.trial = 0.0  # ms
        self.used = self.seconds = 0.0
        self.calls = 0

    def turn(self) -> np.ndarray:
        """Run for MODEL_TURN ms, at least twice, after SETTLE ms that are not counted."""
        if not self.calls:
            self.trial = float(self.gpu.replay_times(self.call, 1, lead=1)[0])
        repeat([self.call], min(math.ceil(SETTLE / self.trial), 1000))
        number = min(max(round(MODEL_TURN / self.trial), 2), 2000)
        run = functools.partial(self.gpu.replay_times, self.call, number, lead=0)
        times, used, seconds = self.gpu.metered(run)
        self.used += used
        self.seconds += seconds
        self.calls += number * self.per_call
        return times / self.per_call

    def energy(self, idle: float | None) -> dict[str, float | None]:
        """Return the columns energy, in mJ a call, watts and idle; None without a meter."""
        if self.gpu.meter is None:
            return {"energy": None, "watts": None, "idle": None}
        return _energy(self.used, self.calls, self.seconds, 5) | {"idle": idle}


def energy(gpu: Gpu, run: Run, calls: int, milliseconds: float) -> dict[str, float | None]:
    """Return the energy of a call in mJ and the mean power in W; idle power is part of both.

    Over a second of runs, each of `calls` calls of so many ms. Without a meter both are None.
    """
    if gpu.meter is None:
        return {"energy": None, "watts": None}
    repeat([run], math.ceil(SETTLE / (milliseconds * calls)))
    number = math.ceil(ENERGY_TURN / (milliseconds * calls))
    _, used, seconds = gpu.metered(lambda: repeat([run], number))
    return _energy(used, number * calls, seconds, 4)


def _energy(used: float, calls: int, seconds: float, digits: int) -> dict[str, float]:
    return {"energy": significant(used / calls, digits), "watts": round(used / 1e3 / seconds, 1)}


def idle_watts(gpu: Gpu) -> float | None:
    """Return the mean power in W over two seconds without work, after a second's wait."""
    if gpu.meter is None:
        return None
    gpu.metered(lambda: time.sleep(1.0))
    _, used, seconds = gpu.metered(lambda: time.sleep(2.0))
    return round(used / 1e3 / seconds, 1)


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


def kernel_times(gpu: Gpu, calls: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Return launches and ms in one call of each kernel by short name, means over the calls."""
    rounds = -(-PROFILED // len(calls))
    number = rounds * len(calls)
    kernels = pd.DataFrame(gpu.kernels(calls, rounds), columns=["name", "ms"])
    groups = kernels.groupby(kernels["name"].map(kernel_name), sort=False)["ms"]
    return {name: (len(times) / number, times.sum() / number) for name, times in groups}


def kernel_sequence(gpu: Gpu, call: Run, calls: int, lead: int) -> list[Kernels]:
    """Return the kernels of each of so many calls, in the order they ran.

    They follow `lead` more calls, so that clocks are those of steady work. Raises RuntimeError
    where calls ran different kernels.
    """
    return equal_parts(gpu.kernels([call], lead + calls), lead + calls)[lead:]


def equal_parts(kernels: Kernels, number: int) -> list[Kernels]:
    """Cut into so many parts of the same kernels in the same order; RuntimeError for others."""
    each, rest = divmod(len(kernels), number)
    parts = [kernels[start : start + each] for start in range(0, len(kernels), each or 1)]
    names = [[name for name, _ in part] for part in parts]
    if rest or not each or any(part != names[0] for part in names):
        raise RuntimeError(
            f"{len(kernels)} kernels ran in {number} equal passes, and not the same in each"
        )
    return parts
