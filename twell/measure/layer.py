"""Inference of one layer: dense baselines, each path of the kernels, and "auto"."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from twell.measure import runner
from twell.measure.case import Case, cases, check_sizes, compiled, default_mode
from twell.measure.patterns import Pattern
from twell.measure.providers import DENSE_COMPILED, DENSE_EAGER, DENSE_KERNELS, Provider
from twell.measure.rows import Rows, require, significant
from twell.measure.runner import MODES, Call, bench, repeat
from twell.sparse.activations import get_activation
from twell.sparse.calibration import EAGER, Calibration

DENSE = DENSE_EAGER, DENSE_COMPILED  # in every mode


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
    mode: str | None = None,
    masks: Mapping[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    calibration: Calibration | None = None,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer: dense (eager, compiled, our kernels), each sparse path, and "auto".

    In bf16, and on a GPU that has it in FP8 too (quantized.py).

    Args:
        tokens: numbers of tokens.
        active: mean active neurons per token; not for recorded patterns.
        patterns: "even", "skewed" (`synthetic_layer`), "recorded" for each mask (`imposed_layer`).
        hidden_size: default 2048, for recorded patterns 1024; as many tokens of a mask are used.
        intermediate_size: of even and skewed layers; a recorded one has its mask's.
        gated: whether the layer has a gate.
        activation: of the layer; one other than "relu" joins the column `pattern`.
        bias: whether the projections have biases, of zeros; they join the column `pattern`. FP8 is
            timed for ReLU without biases.
        mode: one of MODES (see `runner`); default: graph up to 4,096 tokens, else stream. FP8 is
            timed in these two.
        masks: name -> [T, N] bool; default: `recorded_masks()`.
        energy: also measure the energy of each call: over a second more for each row.
        kernels: also measure each kernel of our paths; needs `out`.
        calibration: the times that "auto", which knows the activity, chooses by; None: its default.
        out: the folder of ffn.csv and kernels.csv.

    Returns the rows of ffn.csv, COLUMNS["ffn"]. Decoding is timed up to 1,024 tokens, row-wise up
    to 10^8 active entries. Raises ValueError for unfit arguments, ArithmeticError for a wrong
    result, RuntimeError without a GPU. Ours.
    """
    act = get_activation(activation, gated=gated, sparse=True)
    check_grid(tokens, patterns, hidden_size, intermediate_size, kernels, out)
    known = mode is None or mode in MODES
    require(known, f"mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    grid = {"patterns": patterns, "active": active, "masks": masks, "gated": gated, "act": act}
    grid |= {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "bias": bias}
    gpu, rows = runner.Gpu(energy), Rows(out, ["ffn", "kernels"])
    modes = {number: mode or default_mode(number) for number in tokens}
    for case, how in cases(gpu, modes, **grid, calibration=calibration):
        LayerBench(gpu, case, how).measure(rows, kernels)
        del case
    return rows.by_file["ffn"]


def check_grid(
    tokens: Sequence[int],
    patterns: Sequence[str],
    hidden_size: int | None,
    intermediate_size: int,
    kernels: bool,
    out: str | Path | None,
) -> None:
    """Raise ValueError for unfit arguments of `ffn` and `ffn_steps`."""
    for name in patterns:
        Pattern(name)
    check_sizes(tokens, 16 if hidden_size is None else hidden_size, intermediate_size)
    somewhere = not kernels or out is not None
    require(somewhere, "the rows of kernels go to a file; say in which folder (out)")


class LayerBench:
    """The forward pass of a case's layers, checked in the mode in which they are timed.

    allowed: relative RMS, where it is more than the tolerance.
    """

    def __init__(self, gpu: runner.Gpu, case: Case, mode: str, allowed: float = 0.0):
        self.gpu, self.case, self.mode, self.allowed = gpu, case, mode, allowed
        self.layers: dict[Provider, list[nn.Module]] = {}
        self.calls: dict[Provider, list[runner.Run]] = {}

    def prepare(self, provider: Provider) -> Call:
        case, mode = self.case, self.mode
        layers = self.layers[provider] = case.layers(provider)
        if provider.compiled or (mode == "compiled" and provider not in DENSE):
            layers = [compiled(layer) for layer in layers]
        calls = self.calls[provider] = [functools.partial(layer, case.x) for layer in layers]
        if mode == "stream":
            run, outputs = calls[0], [calls[0]()]
        elif mode == "graph":
            run, outputs = self.gpu.capture(calls)
            run()
        else:
            run, outputs = functools.partial(repeat, calls, 1), [call() for call in calls]
        exact, limit = case.exact_for(provider)
        limit = max(limit, self.allowed)
        error = max(exact.check(y, f"{provider} at {case}", limit) for y in outputs)
        columns = {"relative_rms": significant(error, 3)}
        return Call(run, columns, len(outputs), flush=mode == "stream")

    def path(self, provider: Provider) -> str:
        """Return the path that a provider takes. "auto" plans for this card in its first call."""
        if provider.backend != "auto":
            return provider.path or "dense"
        situation = EAGER if self.mode == "stream" else self.mode
        return self.layers[provider][0].chooser.path(len(self.case.x), situation)

    def measure(self, rows: Rows, kernels: bool) -> None:
        """Add the rows of ffn.csv and kernels.csv."""
        results, parts = [], []
        providers = self.case.providers(in_fp8=self.mode in ("stream", "graph"))
        for provider, columns in bench(self, providers).items():
            calls = self.calls[provider]
            row = self.case.columns | {"mode": self.mode, "weight_sets": len(calls)} | columns
            row |= {"provider": provider.name, "path": self.path(provider)}
            results.append(row)
            if kernels and (provider == DENSE_KERNELS or provider.sparse_path):
                parts += [row | kernel for kernel in runner.kernel_rows(self.gpu, calls)]
        rows.add("ffn", results)
        rows.add("kernels", parts)


def small_grid(folder: str | Path) -> Path:
    """Measure one layer, in inference and training, into a folder; return the folder. Minutes.

    For a device that nobody measured yet. `twell measure ffn` runs in a process of its own, so each
    row names a command that can be repeated. Raises RuntimeError without a GPU, CalledProcessError
    where the command fails.
    """
    runner.Gpu()
    for grid in ("--tokens 1,64,16384 --kernels", "--tokens 16384 --backward"):
        options = f"{grid} --active 3,29,300 --pattern skewed,even --out".split()
        command = [sys.executable, "-m", "twell", "measure", "ffn", *options, str(folder)]
        subprocess.run(command, check=True)
    return Path(folder)
