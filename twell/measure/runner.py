"""The runner: `bench` checks every provider's call, then times all calls in turns.

`Gpu` touches the device's clocks and counters. A layer is timed in one of four modes. "stream":
single calls, each behind a cache that other work has emptied, while the host runs ahead. The other
modes call several layers in turn, so weights come from memory as in a model of many layers.
"graph": a CUDA graph, the GPU alone. "eager": back to back, so a small layer waits for the host.
"compiled": the same, by torch.compile.
"""

from __future__ import annotations

import functools
import itertools
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

    Clocks fall while a GPU works: providers take turns, so that the first is not the fastest.
    """

    rounds: int
    ms: float
    settle: float = 0


TURNS = {
    "layer": Turns(8, 60),  # with 4 rounds, where power binds, dense against itself had 0.95
    "step": Turns(8, 100),
    "calibration": Turns(1, 30),
    "floor": Turns(4, 30),
    "pass": Turns(9, 800, settle=SETTLE_MS),
    "optimizer": Turns(8, 2000),  # 2 steps at least
}


@dataclass
class Call:
    """A checked call of one provider, how to time it, and its times.

    run: the function to time. columns: the provider's columns, such as its error. per_run: the
    calls that a run makes, such as layers of a graph. flush: empty the cache before each run.
    enter: switches a shared model to this provider. parts: the calls whose kernels are profiled.
    """

    run: Run
    columns: dict = field(default_factory=dict)
    per_run: int = 1
    flush: bool = False
    enter: Run = lambda: None
    parts: Sequence[Run] = ()
    times: list[np.ndarray] = field(default_factory=list)  # ms of runs, by turn
    metered: list[tuple[int, float, float]] = field(default_factory=list)  # runs, mJ and seconds


def bench(
    gpu: Gpu,
    prepare: Callable[[Any], Call],
    providers: Iterable[Hashable],
    turns: str = "layer",
) -> dict[Any, Call]:
    """Check every provider, then time all in turns; return their calls.

    prepare: takes a provider and returns its Call, or raises ArithmeticError for a wrong result.
    Nothing is timed before all results were found correct. turns: a name of TURNS. An error of a
    third party's layer becomes a ValueError that names it.

    The columns of the check get p20, p50 and p80 of ms a call, and with a meter energy (mJ a call,
    idle power included) and watts. The order of a round is random, with a fixed seed: under a power
    limit, a call that always followed the hottest one would look slow.
    """
    how = TURNS[turns]
    calls = {}
    for provider in providers:
        try:
            calls[provider] = prepare(provider)
        except Exception as error:
            if not getattr(provider, "third_party", False):
                raise
            raise ValueError(f"{provider} does not compute this case: {error}") from error
    draws = random.Random(0)
    for _ in range(how.rounds):
        for provider in draws.sample(list(calls), len(calls)):
            _take_turn(gpu, calls[provider], how)
    for call in calls.values():
        times = np.concatenate(call.times)
        values = (significant(t, 4) for t in np.quantile(times, (0.2, 0.5, 0.8)) / call.per_run)
        call.columns |= zip(("p20", "p50", "p80"), values, strict=True)
        if gpu.meter is not None:
            call.columns |= _energy(gpu, call, how, float(np.median(times)))
    return calls


def _take_turn(gpu: Gpu, call: Call, turns: Turns) -> None:
    call.enter()
    run, ms = call.run, turns.ms
    if call.flush:
        call.times.append(gpu.flushed_times(run, ms))
    else:
        known = call.times[-1] if call.times else gpu.replay_times(run, 2)
        one = float(known.mean())
        repeat([run], min(math.ceil(turns.settle / one), 1000))
        number = min(max(round(ms / one), 2), 1000)
        times, *used = gpu.metered(lambda: gpu.replay_times(run, number))
        call.times.append(times)
        call.metered.append((number + LEAD, *used))


def _energy(gpu: Gpu, call: Call, turns: Turns, ms: float) -> dict[str, float]:
    """Return the columns energy and watts. ms: the median time of a run.

    Long turns were metered while they were timed, at the same clocks; others run again here.
    """
    if call.flush or turns.ms < ENERGY_MS / 2:
        call.enter()
        repeat([call.run], math.ceil(SETTLE_MS / ms))
        number = math.ceil(ENERGY_MS / ms)
        _, *used = gpu.metered(lambda: repeat([call.run], number))
        call.metered = [(number, *used)]
    runs, used, seconds = np.sum(call.metered, axis=0)
    used = used if np.all(call.metered, axis=0)[1] else math.nan  # the counter stood still
    energy = significant(used / runs / call.per_run, 5)
    return {"energy": energy, "watts": round(float(used / 1e3 / seconds), 1)}


def repeat(calls: Sequence[Run], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def compiled(function: Callable, **options: Any) -> Callable:
    """Return the function by torch.compile, whole and for each shape anew."""
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


class Gpu:
    """The clocks and counters of the GPU in use. Raises RuntimeError without one.

    energy: also its energy counter in mJ, `meter`, by the package nvidia-ml-py. Without a counter
    the reason is printed.
    """

    device = torch.device("cuda")

    def __init__(self, energy: bool = False):
        if not torch.cuda.is_available():
            raise RuntimeError("measuring needs a GPU, and torch sees none")
        # Code is compiled for each provider, shape and path, and kept for all layers together.
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), 256))
        self.meter: Callable[[], int] | None = None
        try:
            if energy:
                import pynvml

                pynvml.nvmlInit()
                # NVML numbers all GPUs, torch only the visible ones.
                uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                meter = functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
                meter()
                self.meter = meter
        except Exception as error:  # no package, or an error of NVML
            print(f"energy is not measured: {error}", flush=True)

    def flushed_times(self, run: Run, budget: float) -> np.ndarray:
        """Return times in ms of single runs, the cache emptied before each; about `budget` ms."""
        from triton.testing import do_bench

        warmup = max(1, int(budget / 4))
        return np.array(do_bench(run, warmup=warmup, rep=int(budget), return_mode="all"))

    def replay_times(self, run: Run, number: int) -> np.ndarray:
        """Return times in ms of `number` runs without gaps, after LEAD uncounted ones."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        repeat([run], LEAD)
        for event in events[:-1]:
            event.record()
            run()
        events[-1].record()
        events[-1].synchronize()
        return np.array([start.elapsed_time(end) for start, end in itertools.pairwise(events)])

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

        def replay(calls: Sequence[Run] = calls) -> None:  # the graph reads their tensors
            graph.replay()

        return replay, outputs

    def metered(self, run: Run) -> tuple[Any, float, float]:
        """Return a run's result, the mJ that it used (without a meter 0), and its seconds."""
        meter = self.meter or (lambda: 0)
        torch.cuda.synchronize()
        before, start = meter(), time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return result, meter() - before, seconds

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


def kernel_name(name: str) -> str:
    """Return a GPU kernel's short name: "cublas matmul", "elementwise", "copy", or its own."""
    if re.search(r"nvjet|gemm|gemv|cutlass|cublas|splitK", name):
        return "cublas matmul"
    if re.search(r"^triton_|elementwise|at::native", name):
        return "elementwise"
    if re.match(r"Memcpy|Memset", name):
        return "copy"
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
