"""Inference of one layer: dense baselines, each path of the kernels, and "auto"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from twell.measure import clock
from twell.measure.case import GRAPH_TOKENS, WEIGHT_SETS, Call, Case, Grid
from twell.measure.costs import ceilings, kernel_formulas, roofline
from twell.measure.providers import AUTO, DENSE_COMPILED, DENSE_EAGER, DENSE_KERNELS, Provider
from twell.measure.rows import Rows, significant
from twell.sparse import reference
from twell.sparse.calibration import Calibration


@torch.no_grad()
def ffn(
    tokens: Sequence[int],
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    hidden_size: int | None = None,
    intermediate_size: int = 5632,
    gated: bool = True,
    mode: str | None = None,
    masks: Mapping[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    calibration: Calibration | None = None,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16: dense (eager, compiled, our kernels), each sparse path, and "auto".

    Args:
        tokens: numbers of tokens.
        active: mean active neurons per token; not for recorded patterns.
        patterns: "even", "skewed" (`synthetic_layer`), "recorded" for each mask (`imposed_layer`).
        hidden_size: default 2048, for recorded patterns 1024; as many tokens of a mask are used.
        intermediate_size: of even and skewed layers; a recorded one has that of its mask.
        gated: whether the layer has a gate.
        mode: "stream" or "graph" (see `clock`); default: graph up to 4,096 tokens.
        masks: name -> [T, N] bool; default: those of `recorded_masks()`.
        energy: also measure the energy of each call: over a second more for each row.
        kernels: also measure each kernel of our paths; needs `out`.
        calibration: the times that "auto", which knows the activity, chooses by; None: its default.
        out: the folder of ffn.csv, kernels.csv and ceilings.csv.

    Returns the rows of ffn.csv, COLUMNS["ffn"]. The dense baselines have w_down as nn.Linear
    stores it. Decoding is timed up to 1,024 tokens, row-wise up to 10^8 active entries. Raises
    ValueError for unfit arguments, ArithmeticError for a wrong result, RuntimeError without a GPU.
    Ours.
    """
    device = clock.gpu()
    grid = Grid(tokens, active, patterns, hidden_size, intermediate_size, gated, masks)
    if mode not in (None, "stream", "graph"):
        raise ValueError(f"mode {mode!r} is unknown; use 'stream' or 'graph'")
    rows = layer_rows(out, kernels, ["ffn", "kernels", "ceilings"])
    bench = Bench(measured_ceilings(rows), clock.optional_meter(energy), kernels, calibration)
    for num_tokens in tokens:
        default = "graph" if num_tokens <= GRAPH_TOKENS else "stream"
        bench.measure(grid, num_tokens, mode or default, rows, device)
        torch.compiler.reset()  # compiled anew each time, up to a limit
    return rows.by_file["ffn"]


def layer_rows(out: str | Path | None, kernels: bool, files: Sequence[str]) -> Rows:
    """Return the rows of a command. Raises ValueError for rows of kernels without a folder."""
    if kernels and out is None:
        raise ValueError("the rows of kernels go to a file; say in which folder (out)")
    return Rows(out, files)


def measured_ceilings(rows: Rows) -> list[dict]:
    """Measure, save and print the GPU's ceilings."""
    peaks = ceilings()
    rows.add("ceilings", peaks)
    for peak in peaks:
        print(f"{peak['metric']}: {peak['value']} {peak['unit']}", flush=True)
    return peaks


class Contender(NamedTuple):
    """A provider's calls, one for each set of weights, and what names the path they take."""

    calls: list[Call]
    path: Callable[[], str]


def contenders(
    case: Case, compiled: Callable, calibration: Calibration | None
) -> dict[Provider, Contender]:
    """Return the contenders of a case; `compiled` is the compiled dense layer."""
    result = {
        DENSE_EAGER: Contender(case.calls(reference.ffn, plain=True), lambda: "dense"),
        DENSE_COMPILED: Contender(case.calls(compiled, plain=True), lambda: "dense"),
    }
    for path in case.paths():
        result[Provider("triton", path)] = Contender(case.path_calls(path), lambda path=path: path)
    layers = case.auto_layers(calibration)
    calls = [functools.partial(layer, case.x) for layer in layers]
    # It looks again while it runs, so its path is read after the calls.
    result[AUTO] = Contender(calls, lambda: layers[0].chooser.path(len(case.x)))
    return result


class Checked(NamedTuple):
    """A provider's relative RMS error, its timer (budget in ms), and the call that it repeats."""

    error: float
    times: Callable[[float], np.ndarray]
    run: Callable[[], object]


def checked(case: Case, name: str, calls: list[Call], mode: str) -> Checked:
    """Check calls in the mode in which they are timed: in a graph, all calls at once."""
    what = f"{name} at {case}"
    if mode == "stream":
        error = case.exact.check(calls[0](), what)
        return Checked(error, functools.partial(clock.stream_times, calls[0]), calls[0])
    graph, outputs = clock.capture(calls)
    graph.replay()
    error = max(case.exact.check(y, what) for y in outputs)
    times = functools.partial(clock.graph_times, graph.replay, len(calls))
    return Checked(error, times, graph.replay)


@dataclass(frozen=True)
class Bench:
    """What all cases of one command share."""

    peaks: Sequence[dict]
    meter: clock.Meter | None
    kernels: bool
    calibration: Calibration | None

    def measure(
        self, grid: Grid, num_tokens: int, mode: str, rows: Rows, device: torch.device
    ) -> None:
        """Measure all cases of a number of tokens; rows are saved after each case."""
        compiled = torch.compile(reference.ffn, fullgraph=True, dynamic=False)
        for case in grid.cases(num_tokens, WEIGHT_SETS if mode == "graph" else 1, device):
            ffn_rows, kernel_rows = self._measure(
                case, contenders(case, compiled, self.calibration), mode
            )
            rows.add("ffn", ffn_rows)
            rows.add("kernels", kernel_rows)
            del case

    def _measure(
        self, case: Case, given: Mapping[Provider, Contender], mode: str
    ) -> tuple[list[dict], list[dict]]:
        """Return rows of ffn.csv and of kernels.csv."""
        tests = {
            provider: checked(case, provider.name, contender.calls, mode)
            for provider, contender in given.items()
        }
        timers = {
            provider: functools.partial(test.times, clock.LAYER_TURN)
            for provider, test in tests.items()
        }
        times = clock.in_turns(timers, clock.LAYER_ROUNDS)
        rows, kernel_rows = [], []
        for provider, contender in given.items():
            test, path, p50 = tests[provider], contender.path(), times[provider]["p50"]
            row = case.columns | {"mode": mode, "weight_sets": len(contender.calls)}
            row |= {"provider": provider.name, "path": path}
            row |= {"relative_rms": significant(test.error, 3)} | times[provider]
            row |= work_columns(case.work(path), p50, self.peaks)
            row |= clock.energy(test.run, len(contender.calls), p50, self.meter)
            rows.append(row)
            energy = f"  {row['energy']} mJ" if self.meter else ""
            speed = f"{p50:.4f} ms  {row['roofline']:.0%} of the roofline"
            print(f"{case}  {provider.name:<20} {speed}{energy}", flush=True)
            if self.kernels and (provider == DENSE_KERNELS or provider.sparse_path):
                kernel_rows += self._kernel_rows(case, row, contender.calls)
        return rows, kernel_rows

    def _kernel_rows(self, case: Case, row: dict, calls: list[Call]) -> list[dict]:
        formulas = kernel_formulas(case.columns, case.exact)
        rows = kernel_rows(row, calls)
        for part in rows:
            part |= work_columns(
                formulas.get((row["path"], part["kernel"])), part["ms"], self.peaks
            )
        return rows


def kernel_rows(row: dict, calls: Sequence[Callable[[], object]]) -> list[dict]:
    """Return a provider's row once for each of its kernels, with kernel, launches and ms."""
    return [
        row | {"kernel": name, "launches": round(launches, 2), "ms": significant(ms, 4)}
        for name, (launches, ms) in clock.kernel_times(calls).items()
    ]


def work_columns(cost: tuple[int, int] | None, ms: float, peaks: Sequence[dict]) -> dict:
    """Return the columns flops, bytes and roofline; None without a formula."""
    flops, num_bytes = cost or (None, None)
    share = roofline(*cost, ms, peaks) if cost else None
    return {"flops": flops, "bytes": num_bytes, "roofline": share}
