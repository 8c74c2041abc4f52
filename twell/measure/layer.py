"""Inference of one layer: dense baselines, each path of the kernels, and "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from twell.measure import clock, weight_only
from twell.measure.case import GRAPH_TOKENS, MODES, WEIGHT_SETS, Call, Case, Grid, in_mode
from twell.measure.check import Exact
from twell.measure.clock import Gpu
from twell.measure.costs import ceilings, kernel_formulas, roofline, work
from twell.measure.float8 import Quantized
from twell.measure.providers import (
    AUTO,
    AUTO_FP8,
    DENSE_COMPILED,
    DENSE_EAGER,
    DENSE_KERNELS,
    Provider,
)
from twell.measure.rows import Rows, require, significant
from twell.sparse import float8
from twell.sparse.activations import get_activation
from twell.sparse.calibration import EAGER, Calibration


@torch.no_grad()
def ffn(
    tokens: Sequence[int],
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    hidden_size: int | None = None,
    intermediate_size: int = 5632,
    gated: bool = True,
    activation: str = "relu",
    bias: bool = False,
    merged: bool = False,
    mode: str | None = None,
    masks: Mapping[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    calibration: Calibration | None = None,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer: dense (eager, compiled, our kernels), each sparse path, and "auto".

    In bf16, and on a GPU that has it in FP8 too (measure/float8.py).

    Args:
        tokens: numbers of tokens.
        active: mean active neurons per token; not for recorded patterns.
        patterns: "even", "skewed" (`synthetic_layer`), "recorded" for each mask (`imposed_layer`).
        hidden_size: default 2048, for recorded patterns 1024; as many tokens of a mask are used.
        intermediate_size: of even and skewed layers; a recorded one has that of its mask.
        gated: whether the layer has a gate.
        activation: of the layer; one other than "relu" joins the column `pattern`.
        bias: whether the projections have biases, of zeros; they join the column `pattern`. Then,
            and for other activations, neither FP8 nor integer weights are timed.
        merged: gate and up are halves of one weight; it joins the column too, and is in bf16 alone.
        mode: one of MODES (see `clock`); default: graph up to 4,096 tokens, else stream. In the
            modes "eager" and "compiled" neither FP8 nor integer weights are timed.
        masks: name -> [T, N] bool; default: those of `recorded_masks()`.
        energy: also measure the energy of each call: over a second more for each row.
        kernels: also measure each kernel of our paths; needs `out`.
        calibration: the times that "auto", which knows the activity, chooses by; None: its default.
        out: the folder of ffn.csv, kernels.csv and ceilings.csv.

    Returns the rows of ffn.csv, COLUMNS["ffn"]. The dense baselines have w_down as nn.Linear
    stores it. In the modes "eager" and "compiled" they are modules, as layers of "auto" are.
    Decoding is timed up to 1,024 tokens, row-wise up to 10^8 active entries. Raises ValueError for
    unfit arguments, ArithmeticError for a wrong result, RuntimeError without a GPU. Ours.
    """
    gpu = clock.Gpu(energy)
    act = get_activation(activation, gated=gated, sparse=True)
    grid = Grid(tokens, active, patterns, hidden_size, intermediate_size, gated, masks, act)
    grid = replace(grid, bias=bias, merged=merged)
    _check_mode(mode, merged)
    bench = Bench(gpu, out, ["ffn", "kernels"], kernels)
    for num_tokens in tokens:
        how = mode or ("graph" if num_tokens <= GRAPH_TOKENS else "stream")
        dense = grid.dense(), in_mode(grid.dense(), "compiled")
        for case in grid.cases(num_tokens, 1 if how == "stream" else WEIGHT_SETS, gpu.device):
            _measure(bench, case, how, dense, calibration)
            del case
        torch.compiler.reset()  # compiled anew each time, up to a limit
    return bench.rows.by_file["ffn"]


def _check_mode(mode: str | None, merged: bool) -> None:
    known = mode is None or mode in MODES
    require(known, f"mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    apart = not merged or mode in (None, "stream", "graph")
    require(apart, f"merged: its baseline is timed in the modes stream and graph, not in {mode}")


def _measure(
    bench: Bench,
    case: Case,
    mode: str,
    dense: tuple[Callable, Callable],
    calibration: Calibration | None,
) -> None:
    """Add the rows of ffn.csv and kernels.csv for one case."""
    layers = {AUTO: case.auto_layers(calibration)}
    paths = {Provider("triton", path): case.path_calls(path, mode) for path in case.paths()}
    if mode in ("eager", "compiled"):  # where the host's work counts, a module's belongs to it
        several = map(case.dense_calls, ("eager", "compiled"))
    else:
        several = (case.calls(function, plain=True) for function in dense)
    calls = dict(zip((DENSE_EAGER, DENSE_COMPILED), several, strict=True)) | paths
    quantized, others = None, {}  # others: what is exact for their widened weights
    quantizable = case.plain and mode in ("stream", "graph")
    for provider, kind in weight_only.providers(case).items() if quantizable else ():
        calls[provider], others[provider] = weight_only.calls(case, kind)
    if quantizable and float8.why_not(bench.gpu.device) is None:
        quantized = Quantized(case)
        calls |= quantized.dense_calls() | quantized.sparse_calls()
        layers[AUTO_FP8] = quantized.auto_layers()
    for provider, several in layers.items():
        calls[provider] = [partial(in_mode(layer, mode), case.x) for layer in several]
    runs: dict[Provider, clock.Run] = {}

    def check(provider: Provider) -> tuple[dict, Callable]:
        exact = quantized.exact(provider) if provider.in_fp8 else others.get(provider)
        run = f"{provider} at {case}", calls[provider], mode
        columns, times, runs[provider] = checked(bench.gpu, exact or (case.exact,), *run)
        return columns, partial(times, clock.LAYER_TURN)

    rows, parts = [], []
    formulas = kernel_formulas(case.columns, case.exact)
    for provider, columns in clock.measure(calls, check, clock.LAYER_ROUNDS).items():
        # It looks again while it runs, so its path is read after the calls.
        path = provider.path or "dense"
        if provider in layers:
            situation = EAGER if mode == "stream" else mode
            path = layers[provider][0].chooser.path(len(case.x), situation)
        number = len(calls[provider])
        columns |= {"path": path, "mode": mode, "weight_sets": number}
        rows.append(bench.row(case, provider, columns, runs[provider], number))
        if provider == DENSE_KERNELS or provider.sparse_path:
            parts += bench.kernel_rows(rows[-1], calls[provider], formulas)
    bench.rows.add("ffn", rows)
    bench.rows.add("kernels", parts)


def checked(
    gpu: Gpu, exact: tuple[Exact, *tuple[float, ...]], what: str, calls: Sequence[Call], mode: str
) -> tuple[dict, Callable[[float], np.ndarray], clock.Run]:
    """Check calls in the mode in which they are timed: in a graph, all calls at once.

    exact: what they compute, and, where it is more than the tolerance, the error they may have.
    Returns the column of the check, what times them for so many ms, and the call that it repeats.
    """
    if mode == "stream":
        run, outputs = calls[0], [calls[0]()]
        times = partial(gpu.stream_times, run)
    elif mode == "graph":
        run, outputs = gpu.capture(calls)
        run()
        times = partial(clock.graph_times, gpu, run, len(calls))
    else:
        run, outputs = partial(clock.repeat, calls, 1), [call() for call in calls]
        times = partial(clock.graph_times, gpu, run, len(calls))
    result, *allowed = exact
    error = max(result.check(y, what, *allowed) for y in outputs)
    return {"relative_rms": significant(error, 3)}, times, run


class Bench:
    """What all cases of a command share: the clock, the rows, and the GPU's ceilings.

    kernels: also measure each kernel; raises ValueError for such rows without a folder.
    """

    def __init__(self, gpu: Gpu, out: str | Path | None, files: Sequence[str], kernels: bool):
        somewhere = not kernels or out is not None
        require(somewhere, "the rows of kernels go to a file; say in which folder (out)")
        self.gpu, self.kernels = gpu, kernels
        self.rows = Rows(out, [*files, "ceilings"])
        self.peaks = ceilings(gpu)
        self.rows.add("ceilings", self.peaks)

    def row(
        self,
        case: Case,
        provider: Provider,
        columns: dict,
        run: clock.Run,
        calls: int = 1,
        backward: bool = False,
    ) -> dict:
        """Return a provider's row; `columns` has its path, check and times."""
        c, exact, p50 = case.columns, case.exact, columns["p50"]
        shape = c["tokens"], c["hidden_size"], c["intermediate_size"], c["gated"]
        row = c | {"provider": provider.name} | columns
        cost = None  # in other types other ceilings apply
        if provider.precision is None:
            cost = work(row["path"], *shape, exact.entries, exact.touched, backward)
        return row | self._work(cost, p50) | clock.energy(self.gpu, run, calls, p50)

    def kernel_rows(
        self, row: dict, calls: Sequence[clock.Run], formulas: Mapping | None = None
    ) -> list[dict]:
        """Return a provider's row once for each of its kernels, with kernel, launches and ms."""
        rows, times = [], clock.kernel_times(self.gpu, calls) if self.kernels else {}
        for name, (launches, ms) in times.items():
            kernel = {"kernel": name, "launches": round(launches, 2), "ms": significant(ms, 4)}
            cost = (formulas or {}).get((row["path"], name))
            rows.append(row | kernel | self._work(cost, kernel["ms"]))
        return rows

    def _work(self, cost: tuple[int, int] | None, ms: float) -> dict:
        """The columns flops, bytes and roofline; None without a formula."""
        flops, num_bytes = cost or (None, None)
        share = roofline(*cost, ms, self.peaks) if cost else None
        return {"flops": flops, "bytes": num_bytes, "roofline": share}
