"""The runner: `bench` checks every provider's call, then times all calls in turns.

`Gpu` touches the device's clocks and counters. A layer is timed in one of four modes. "stream":
single calls, each behind a cache that other work has emptied, while the host runs ahead. The other
modes call several layers in turn, so weights come from memory as in a model of many layers.
"graph": a CUDA graph, the GPU alone. "eager": back to back, so a small layer waits for the host.
"compiled": the same, by torch.compile.
"""

from __future__ import annotations

import functools
import math
import random
import re
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from twell.measure.rows import significant

MODES = "stream", "graph", "eager", "compiled"
LEAD = 3  # runs that find the queue empty and wait for the host, which do not count
ENERGY_MS = 1000  # of runs whose energy is counted; NVML updates its counter every 100 ms
SETTLE_MS = 300  # of runs before them: power takes a while to settle
PROFILED = 8  # calls that are profiled, at least

Run = Callable[[], Any]


@dataclass(frozen=True)
class Turns:
    """How long each provider is timed: `rounds` turns of `ms`, each after `settle` ms of runs.

    Without `ms` a turn is one run, which returns its own ms. Clocks fall while a GPU works:
    providers take turns, so that the first is not the fastest.
    """

    rounds: int
    ms: float | None
    settle: float = 0


TURNS = {
    "layer": Turns(8, 60),  # with 4 rounds, where power binds, dense against itself had 0.95
    "step": Turns(8, 100),
    "calibration": Turns(1, 30),
    "floor": Turns(4, 30),
    "pass": Turns(9, 800, settle=SETTLE_MS),
    "optimizer": Turns(8, 2000),  # 2 steps at least
    "serving": Turns(2, None),
}


@dataclass
class Call:
    """A checked call of one provider, and how to time it.

    run: the function to time. columns: the provider's columns, such as its error. per_run: the
    calls that a run makes, such as layers of a graph. flush: empty the cache before each run.
    enter: switches a shared model to this provider.
    """

    run: Run
    columns: dict = field(default_factory=dict)
    per_run: int = 1
    flush: bool = False
    enter: Run = lambda: None


def bench(case: Any, providers: Iterable[Hashable], turns: str = "layer") -> dict[Any, dict]:
    """Check every provider, then time all in turns; return the columns by provider.

    case: has a `gpu`; its `prepare(provider)` returns a Call, or raises ArithmeticError for a wrong
    result. Nothing is timed before all results were found correct. turns: a name of TURNS.

    The columns are the check's; p20, p50 and p80 of ms a call; with a meter also energy (mJ a call,
    idle power included) and watts. The order of a round is random, with a fixed seed: under a power
    limit, a call that always followed the hottest one would look slow.
    """
    how = TURNS[turns]
    timers = {key: _Timer(case.gpu, case.prepare(key), how) for key in providers}
    draws = random.Random(0)
    for _ in range(how.rounds):
        for key in draws.sample(list(timers), len(timers)):
            timers[key].turn()
    return {key: timer.columns() for key, timer in timers.items()}


class _Timer:
    """Times one call in turns, and counts its energy: over the same turns where they are long."""

    def __init__(self, gpu: Gpu, call: Call, turns: Turns):
        self.gpu, self.call, self.turns = gpu, call, turns
        self.times: list[np.ndarray] = []
        self.trial = 0.0  # ms
        self.counted: list[tuple[int, float, float]] = []  # runs, mJ and seconds

    def turn(self) -> None:
        self.call.enter()
        run, ms = self.call.run, self.turns.ms
        if ms is None:
            self.times.append(np.array([run()]))
            return
        if self.call.flush:
            self.times.append(self.gpu.flushed_times(run, ms))
            return
        self.trial = self.trial or float(self.gpu.replay_times(run, 2).mean())
        repeat([run], min(math.ceil(self.turns.settle / self.trial), 1000))
        number = min(max(round(ms / self.trial), 2), 1000)
        times, *used = self.gpu.metered(lambda: self.gpu.replay_times(run, number))
        self.times.append(times)
        self.counted.append((number + LEAD, *used))

    def columns(self) -> dict:
        times, per_run = np.concatenate(self.times), self.call.per_run
        columns = self.call.columns | quantiles(times / per_run)
        if self.gpu.meter is None:
            return columns
        if self.call.flush or self.turns.ms < ENERGY_MS / 2:
            self.call.enter()
            ms = float(np.median(times))
            repeat([self.call.run], math.ceil(SETTLE_MS / ms))
            number = math.ceil(ENERGY_MS / ms)
            _, *used = self.gpu.metered(lambda: repeat([self.call.run], number))
            self.counted = [(number, *used)]
        runs, used, seconds = np.sum(self.counted, axis=0)
        watts = round(float(used / 1e3 / seconds), 1)
        return columns | {"energy": significant(used / runs / per_run, 5), "watts": watts}


def repeat(calls: Sequence[Run], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def quantiles(times: np.ndarray) -> dict[str, float]:
    """Return the columns p20, p50 and p80."""
    values = (significant(value, 4) for value in np.quantile(times, [0.2, 0.5, 0.8]))
    return dict(zip(("p20", "p50", "p80"), values, strict=True))


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
        except Exception as error:  # no package, or an error of NVML
            print(f"energy is not measured: {error}", flush=True)

    def flushed_times(self, run: Run, budget: float) -> np.ndarray:
        """Return times in ms of single runs, the cache emptied before each; about `budget` ms."""
        from triton.testing import do_bench

        warmup = max(1, int(budget / 4))
        return np.array(do_bench(run, warmup=warmup, rep=int(budget), return_mode="all"))

    def replay_times(self, run: Run, number: int, lead: int = LEAD) -> np.ndarray:
        """Return times in ms of `number` runs without gaps, after `lead` uncounted ones."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        repeat([run], lead)
        for event in events[:-1]:
            event.record()
            run()
        events[-1].record()
        events[-1].synchronize()
        pairs = zip(events, events[1:], strict=False)
        return np.array([start.elapsed_time(end) for start, end in pairs])

    def capture(self, calls: Sequence[Run]) -> tuple[Run, list]:
        """Return the replay of a graph of all calls, and the outputs that a replay writes."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            repeat(calls, 2)  # a first call may compile, allocate or look up, outside the graph
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
        return torch.cuda.memory_allocated()

    def peak(self, run: Run) -> tuple[int, int]:
        """Return the bytes allocated before a run, and the most during it."""
        torch.cuda.synchronize()
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return before, torch.cuda.max_memory_allocated()

    def kernels(self, calls: Sequence[Run], rounds: int) -> list[tuple[str, int, float]]:
        """Return name, launches and total ms of each kernel in `rounds` rounds of the calls."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(2):  # the first profile of a process pays for its start
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                repeat(calls, rounds)
                torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        return [
            (event.key, event.count, event.self_device_time_total / 1e3)
            for event in profiler.key_averages()
            if event.device_type == cuda and not event.is_user_annotation
        ]


def energy_meter() -> Callable[[], int]:
    """Return the reader of the GPU's energy counter in mJ, by the package nvidia-ml-py."""
    import pynvml

    pynvml.nvmlInit()
    # NVML numbers all GPUs, torch only the visible ones.
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
    meter = functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    meter()
    return meter


def kernel_name(name: str) -> str:
    """Return a GPU kernel's short name: "cublas matmul", "elementwise", "copy", or its own."""
    if re.search(r"nvjet|gemm|gemv|cutlass|cublas|splitK", name):
        return "cublas matmul"
    if re.match(r"Memcpy|Memset", name):
        return "copy"
    if re.search(r"^triton_|elementwise|at::native", name):
        return "elementwise"
    return re.split(r"[(<]", name.removeprefix("void "))[0]


def kernel_rows(gpu: Gpu, calls: Sequence[Run]) -> list[dict]:
    """Return kernel, launches and ms in one call (means over the calls) of each kernel."""
    rounds = -(-PROFILED // len(calls))
    number = rounds * len(calls)
    table = pd.DataFrame(gpu.kernels(calls, rounds), columns=["kernel", "launches", "ms"])
    sums = table.groupby(table["kernel"].map(kernel_name), sort=False)[["launches", "ms"]].sum()
    return [
        {"kernel": name, "launches": round(launches / number, 2), "ms": significant(ms / number, 4)}
        for name, launches, ms in sums.itertuples()
    ]
