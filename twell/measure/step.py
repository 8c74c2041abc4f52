"""Training of one layer: a pass forward and backward, dense and by each sparse path.

Output, L1 term and gradients are compared with fp64 before a step is timed. All providers have the
same loss, the gradient of the L1 term included. `twell.SparseTraining` prepares the SparseFFN of a
sparse step. Steps are timed in one of two modes of runner.py: "stream", or "eager", where the
host's work counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twell.measure import runner
from twell.measure.case import Case, DenseLayer, cases, check_sizes, compiled
from twell.measure.check import Exact
from twell.measure.layer import check_grid
from twell.measure.patterns import synthetic_layer
from twell.measure.providers import DENSE_COMPILED, DENSE_EAGER, HYBRID, TRITON, UNION, Provider
from twell.measure.rows import Rows, require, significant
from twell.measure.runner import Call, Gpu, bench
from twell.sparse.calibration import crossing
from twell.sparse.observe import Collector
from twell.sparse.training import SparseTraining

# Gradients that reach the layer. The L1 term's is a tenth of the random one that a neuron gets from
# y, so that the check notices its absence. It is a power of two, since any other constant would be
# rounded the same way in every entry, and such errors do not average.
DY, DL1 = 1e-5, 2.0**-20
# By mode; in the mode "eager" "triton" is the layer by the path "union".
PROVIDERS = {
    "stream": (DENSE_EAGER, DENSE_COMPILED, UNION, HYBRID),
    "eager": (DENSE_EAGER, DENSE_COMPILED, TRITON),
}
CROSSOVER_TOKENS = 16384
CROSSOVER_SHARES = 0.005, 0.02, 0.05, 0.1, 0.2  # mean active neurons per token, of all


def ffn_steps(
    tokens: Sequence[int],
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    hidden_size: int | None = None,
    intermediate_size: int = 5632,
    gated: bool = True,
    mode: str = "stream",
    masks: Mapping[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16 forward and backward: dense (eager and compiled), each sparse path.

    Arguments as in `ffn`; `out` is the folder of training.csv and training_kernels.csv. x and the
    weights get gradients for a random dy, and for the L1 term the same gradient at each token. In
    the mode "stream" each step finds the cache emptied. In the mode "eager" steps follow one
    another, so they wait for the host where it is slower. Returns the rows of training.csv,
    COLUMNS["training"]. Raises ValueError for unfit arguments, ArithmeticError, with its name, for
    a wrong tensor, RuntimeError without a GPU. Ours.
    """
    check_grid(tokens, patterns, hidden_size, intermediate_size, kernels, out)
    known = mode in PROVIDERS
    require(known, f"mode {mode!r} is unknown for steps; use one of {', '.join(PROVIDERS)}")
    grid = {"patterns": patterns, "active": active, "masks": masks, "gated": gated}
    grid |= {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    gpu, rows = runner.Gpu(energy), Rows(out, ["training", "training_kernels"])
    for case, _ in cases(gpu, dict.fromkeys(tokens, mode), 1, **grid):
        StepBench(gpu, case, mode).measure(rows, kernels)
        del case
    return rows.by_file["training"]


class DenseTraining(DenseLayer):
    """The dense layer with its L1 term: of x [M, K] y [M, K], and l1 [M] in fp32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.hidden(x)
        return self.down_proj(h), h.abs().sum(-1, dtype=torch.float32)


class Step:
    """A layer's pass forward and backward.

    function: calls the layer with x; returns y and l1. gradients: dy [M, K] and dl1 [M], which
    reach the layer. path, capacity: the sparse path and its entries per token.
    """

    path: str = "dense"
    capacity: int | None = None

    def __init__(
        self, layer: nn.Module, function: Callable, x: Tensor, gradients: tuple[Tensor, Tensor]
    ):
        self.function, self.gradients = function, gradients
        self.leaves = {"x": x.detach().requires_grad_()}
        for name in ("gate", "up", "down"):
            if (part := getattr(layer, f"{name}_proj")) is not None:
                self.leaves[f"w_{name}"] = part.weight.requires_grad_()

    @classmethod
    def sparse(cls, case: Case, path: str, gradients: tuple[Tensor, Tensor]) -> Step:
        """The step of a SparseFFN as it is within `SparseTraining.attempts`."""
        (layer,) = case.layers(TRITON)
        layer.train()

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            with Collector([layer]) as collector:
                y = layer(x)
            return y, collector.terms[0][1]

        step, sparse = cls(layer, function, case.x, gradients), SparseTraining(layer, path=path)
        for _ in sparse.attempts():  # to find the capacity
            step()
        step.clear()
        step.attempts = sparse.attempts()  # stays open: the layer is dense after its end
        next(step.attempts)
        step.path, step.capacity = layer.train_path or "dense", layer.capacity
        return step

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.function(self.leaves["x"])

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def __call__(self, between: Callable = lambda y, l1: None) -> tuple[Tensor, Tensor]:
        """Take the step; call `between` with its results between the passes."""
        self.clear()
        outputs = self.forward()
        between(*outputs)
        torch.autograd.backward(outputs, self.gradients)
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """Return the results of a step, named as in Exact."""
        y, l1 = self()
        gradients = {f"d{name}": leaf.grad for name, leaf in self.leaves.items()}
        self.clear()
        return {"y": y.detach(), "l1": l1.detach()} | gradients

    def memory(self, gpu: Gpu) -> dict[str, int]:
        """Return the bytes held between the passes, and the most that a step allocates.

        held: x, and the allocations that the forward pass keeps without y and l1, which go on to
        the next layer. x counts although the caller holds it here: in a model the layer keeps it.
        """
        self.clear()
        held = 0

        def between(y: Tensor, l1: Tensor) -> None:
            nonlocal held
            held = gpu.allocated() - y.nbytes - l1.nbytes

        before, most = gpu.peak(functools.partial(self, between))
        self.clear()
        return {"held": held - before + self.leaves["x"].nbytes, "peak": most - before}


def output_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients dy [M, K] and dl1 [M] that reach a layer."""
    g = torch.Generator(x.device).manual_seed(1)
    dy = DY * torch.randn(x.shape, generator=g, device=x.device)
    return dy.to(x.dtype), torch.full(x.shape[:1], DL1, device=x.device)


class StepBench:
    """The steps of a case. Keys of the runner are a provider, and whether the whole step runs."""

    def __init__(self, gpu: Gpu, case: Case, mode: str = "stream"):
        self.gpu, self.case, self.mode = gpu, case, mode
        self.gradients = output_gradients(case.x)
        self.exact = Exact.of(case.x, case.sets[0], *self.gradients)
        self.steps: dict[Provider, Step] = {}

    def prepare(self, key: tuple[Provider, bool]) -> Call:
        provider, whole = key
        flush = self.mode == "stream"
        if not whole:  # its result is part of the step's
            return Call(self.steps[provider].forward, flush=flush, metered=False)
        step = self.steps[provider] = self._step(provider)
        worst, error = self.exact.check_step(step.tensors(), f"{provider} at {self.case}")
        columns = {"worst": worst, "relative_rms": significant(error, 3)}
        return Call(step, columns, flush=flush)

    def _step(self, provider: Provider) -> Step:
        if provider.backend == "triton":
            return Step.sparse(self.case, provider.path or UNION.path, self.gradients)
        layer = DenseTraining(self.case.sets[0], act=self.case.act)
        function = compiled(layer) if provider.compiled else layer
        return Step(layer, function, self.case.x, self.gradients)

    def measure(self, rows: Rows, kernels: bool) -> None:
        """Add the rows of training.csv and training_kernels.csv."""
        providers = PROVIDERS[self.mode]
        keys = [(provider, whole) for provider in providers for whole in (True, False)]
        columns = bench(self, keys, "step")
        for provider in providers:
            step = self.steps.pop(provider)
            row = self.case.columns | columns[provider, True] | step.memory(self.gpu)
            row |= {"provider": provider.name, "mode": self.mode, "path": step.path}
            row |= {"capacity": step.capacity, "forward": columns[provider, False]["p50"]}
            rows.add("training", [row])
            if kernels:
                parts = runner.kernel_rows(self.gpu, [step])
                rows.add("training_kernels", [row | kernel for kernel in parts])


# --- up to which activity sparse training is faster -------------------------------------------


def crossover(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    tokens: int = CROSSOVER_TOKENS,
) -> float:
    """Return up to how many active neurons per token a sparse step is faster than a dense one.

    The value of `Calibration.training`. The step is that of `ffn_steps`, by the path "union" and by
    dense torch.compile. Activity is skewed and rises from 0.5% to 20% of the neurons until sparse
    is slower; each level is printed. 0: sparse is slower at the lowest. Raises ValueError for sizes
    that the kernels do not take, ArithmeticError, with its name, for a wrong tensor, RuntimeError
    without a GPU. Ours.
    """
    gpu = runner.Gpu()
    check_sizes([tokens], hidden_size, intermediate_size)
    levels: list[tuple[float, float]] = []
    for active in sorted({max(share * intermediate_size, 1.0) for share in CROSSOVER_SHARES}):
        size = tokens, hidden_size, intermediate_size
        inputs = synthetic_layer(*size, active=active, device=gpu.device)
        case = Case.of("skewed", inputs, gated=gated)
        measured = bench(StepBench(gpu, case), [(DENSE_COMPILED, True), (UNION, True)], "step")
        dense, sparse = (columns["p50"] for columns in measured.values())
        speeds = f"dense {dense:.4f} ms  sparse {sparse:.4f} ms"
        print(f"{case}  forward and backward: {speeds}", flush=True)
        levels.append((case.columns["active"], dense / sparse))
        if dense < sparse:
            break
    torch.compiler.reset()
    result = crossing(levels)
    if result < levels[-1][0]:
        result = significant(result, 4)
    print(f"training is faster sparsely up to {result:g} active neurons per token", flush=True)
    return result
