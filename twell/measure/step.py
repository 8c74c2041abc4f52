"""Training of one layer: a pass forward and backward, dense and by each sparse path.

Output, L1 term and gradients are compared with fp64 before a step is timed. All providers have the
same loss, the gradient of the L1 term included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from twell.measure import clock
from twell.measure.case import Case, Grid, check_sizes
from twell.measure.check import Exact
from twell.measure.layer import kernel_rows, layer_rows, measured_ceilings, work_columns
from twell.measure.patterns import Weights, synthetic_layer
from twell.measure.providers import DENSE_COMPILED, DENSE_EAGER, UNION, Provider
from twell.measure.rows import Rows, significant
from twell.sparse import reference
from twell.sparse.calibration import crossing
from twell.sparse.training import CAPACITY_MARGIN, capacities

# Gradients that reach the layer: of y at random, of the L1 term about a tenth of what a neuron gets
# from y, so that the check notices its absence. It is a power of two: another constant is rounded
# alike in every entry, by all providers, which does not average.
DY, DL1 = 1e-5, 2.0**-20
CROSSOVER_TOKENS = 16384
CROSSOVER_SHARES = 0.005, 0.02, 0.05, 0.1, 0.2  # mean active neurons per token, of all


def training_ops():
    """The module of the kernels' training operators; it needs triton."""
    from twell.kernels import training_ops

    return training_ops


def ffn_steps(
    tokens: Sequence[int],
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    hidden_size: int | None = None,
    intermediate_size: int = 5632,
    gated: bool = True,
    masks: Mapping[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16 forward and backward: dense (eager and compiled), each sparse path.

    Arguments as in `ffn`; `out` is the folder of training.csv, training_kernels.csv and
    ceilings.csv. x and the weights get gradients for a random dy, and for the L1 term the same
    gradient at each token. Steps follow one another, the cache emptied between. Returns the rows of
    training.csv, COLUMNS["training"]. Raises ValueError for unfit arguments, ArithmeticError, with
    its name, for a wrong tensor, RuntimeError without a GPU. Ours.
    """
    device = clock.gpu()
    grid = Grid(tokens, active, patterns, hidden_size, intermediate_size, gated, masks)
    rows = layer_rows(out, kernels, ["training", "training_kernels", "ceilings"])
    bench = _Bench(clock.optional_meter(energy), kernels, measured_ceilings(rows))
    for num_tokens in tokens:
        compiled = torch.compile(dense, fullgraph=True, dynamic=False)
        for case in grid.cases(num_tokens, 1, device):
            bench.measure(case, compiled, rows)
            del case
        torch.compiler.reset()  # compiled anew each time, up to a limit
    return rows.by_file["training"]


# --- the steps --------------------------------------------------------------------------------


def dense(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    """The dense layer with its L1 term: y [M, K] and l1 [M] in fp32."""
    _, h = reference.activations(x, w_gate, w_up)
    return F.linear(h, w_down), h.abs().sum(-1, dtype=torch.float32)


def sparse(path: str, capacity: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The layer by a sparse path, with so many entries per token."""

    def function(x, w_gate, w_up, w_down):
        trained = training_ops().train(path, capacity, x, w_gate, w_up, w_down)
        return trained.y, trained.l1

    return function


@dataclass(frozen=True)
class Step:
    """A provider's pass forward and backward, and the tensors that get gradients."""

    function: Callable[..., tuple[Tensor, Tensor]]
    leaves: dict[str, Tensor | None]
    dy: Tensor
    dl1: Tensor
    path: str = "dense"
    capacity: int | None = None

    @classmethod
    def of(
        cls, function: Callable, x: Tensor, weights: Weights, dy: Tensor, dl1: Tensor, *path
    ) -> Step:
        """path: the sparse path and its capacity, in entries per token."""
        tensors = dict(zip(("x", "w_gate", "w_up", "w_down"), (x, *weights), strict=True))
        leaves = {
            name: None if tensor is None else tensor.detach().requires_grad_()
            for name, tensor in tensors.items()
        }
        return cls(function, leaves, dy, dl1, *path)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.function(*self.leaves.values())

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves.values():
            if leaf is not None:
                leaf.grad = None

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.clear()
        y, l1 = self.forward()
        torch.autograd.backward((y, l1), (self.dy, self.dl1))
        return y, l1

    def tensors(self) -> dict[str, Tensor]:
        """Return the results of a step, named as in Exact."""
        y, l1 = self()
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf is not None}
        gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
        self.clear()
        return {"y": y.detach(), "l1": l1.detach()} | gradients

    def times(self, budget: float, *, backward: bool = True) -> np.ndarray:
        """Return times in ms of steps, or of forward passes alone."""
        times = clock.stream_times(self if backward else self.forward, budget)
        self.clear()
        return times

    def memory(self) -> dict[str, int]:
        """Return the bytes held between the passes, and the most that a step allocates.

        held: x, and the allocations that the forward pass keeps without y and l1, which go on to
        the next layer. x counts although the caller holds it here: in a model the layer keeps it.
        """
        self.clear()
        held = 0

        def run() -> None:
            nonlocal held
            y, l1 = self.forward()
            held = torch.cuda.memory_allocated() - y.nbytes - l1.nbytes
            torch.autograd.backward((y, l1), (self.dy, self.dl1))

        before, most = clock.peak_bytes(run)
        self.clear()
        return {"held": held - before + self.leaves["x"].nbytes, "peak": most - before}


def training_capacity(path: str, case: Case) -> int:
    """Return the entries per token that SparseTraining would give this case."""
    sizes = capacities(case.columns["intermediate_size"])
    needed = math.ceil(case.columns["active"])
    while True:
        fitting = (size for size in sizes if size >= CAPACITY_MARGIN * needed)
        capacity = next(fitting, sizes[-1])
        with torch.no_grad():
            needed = int(training_ops().train(path, capacity, case.x, *case.sets[0]).needed)
        if needed <= capacity:
            return capacity
        if capacity == sizes[-1]:
            raise ArithmeticError(
                f"triton {path} at {case} needs {needed} entries a token, of {capacity} neurons"
            )


def checked_steps(
    case: Case, compiled: Callable[..., tuple[Tensor, Tensor]], paths: Sequence[str]
) -> tuple[dict[Provider, Step], dict[Provider, tuple[str, float]]]:
    """Return the steps of a case, and of each the worst tensor and its relative RMS error.

    compiled: `dense`, compiled; paths: the sparse paths.
    """
    g = torch.Generator(case.x.device).manual_seed(1)
    dy = (DY * torch.randn(case.x.shape, generator=g, device=case.x.device)).to(case.x.dtype)
    dl1 = torch.full(case.x.shape[:1], DL1, device=case.x.device)
    *others, w_down = case.sets[0]
    plain = *others, w_down.contiguous()  # as nn.Linear stores it
    steps = {
        DENSE_EAGER: Step.of(dense, case.x, plain, dy, dl1),
        DENSE_COMPILED: Step.of(compiled, case.x, plain, dy, dl1),
    }
    for path in paths:
        capacity = training_capacity(path, case)
        function, more = sparse(path, capacity), (path, capacity)
        steps[Provider("triton", path)] = Step.of(function, case.x, case.sets[0], dy, dl1, *more)
    # Local, since 65,536 tokens take 3 GB: freed before steps are timed.
    exact = Exact.of(case.x, case.sets[0], dy, dl1)
    errors = {
        provider: exact.check_step(step.tensors(), f"{provider} at {case}")
        for provider, step in steps.items()
    }
    return steps, errors


# --- one layer --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """What all cases of one command share."""

    meter: clock.Meter | None
    kernels: bool
    peaks: Sequence[dict]

    def measure(self, case: Case, compiled: Callable, rows: Rows) -> None:
        """Add the rows of training.csv and of training_kernels.csv for one case."""
        steps, errors = checked_steps(case, compiled, list(training_ops().TRAIN_PATHS))
        timers = {}
        for provider, step in steps.items():
            forward = functools.partial(step.times, clock.STEP_TURN / 2, backward=False)
            timers[provider, "both"] = functools.partial(step.times, clock.STEP_TURN)
            timers[provider, "forward"] = forward
        times = clock.in_turns(timers, clock.LAYER_ROUNDS)
        results = [
            self._row(case, provider, step, errors[provider], times)
            for provider, step in steps.items()
        ]
        rows.add("training", results)
        for row, step in zip(results, steps.values(), strict=True) if self.kernels else ():
            rows.add("training_kernels", kernel_rows(row, [step]))
            step.clear()

    def _row(
        self, case: Case, provider: Provider, step: Step, error: tuple[str, float], times: dict
    ) -> dict:
        worst, relative_rms = error
        both, forward = times[provider, "both"], times[provider, "forward"]
        row = case.columns | {"provider": provider.name, "path": step.path}
        row |= {"capacity": step.capacity, "relative_rms": significant(relative_rms, 3)}
        row |= {"worst": worst, **both, "forward": forward["p50"], **step.memory()}
        row |= work_columns(case.work(step.path, backward=True), both["p50"], self.peaks)
        row |= clock.energy(step, 1, both["p50"], self.meter)
        step.clear()
        speed = f"{both['p50']:.4f} ms ({forward['p50']:.4f} forward)"
        print(
            f"{case}  {provider.name:<20} {speed}  held {row['held'] / 2**20:.0f} MiB", flush=True
        )
        return row


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
    device = clock.gpu()
    check_sizes([tokens], hidden_size, intermediate_size)
    compiled = torch.compile(dense, fullgraph=True, dynamic=False)
    levels: list[tuple[float, float]] = []
    for active in sorted({max(share * intermediate_size, 1.0) for share in CROSSOVER_SHARES}):
        size = tokens, hidden_size, intermediate_size
        case = Case.of("skewed", synthetic_layer(*size, active=active, device=device), gated)
        levels.append((case.columns["active"], speedup(case, compiled)))
        if levels[-1][1] < 1:
            break
    torch.compiler.reset()
    result = crossing(levels)
    if result < levels[-1][0]:
        result = significant(result, 4)
    print(f"training is faster sparsely up to {result:g} active neurons per token", flush=True)
    return result


def speedup(case: Case, compiled: Callable[..., tuple[Tensor, Tensor]]) -> float:
    """Return the speed-up of a union step over dense torch.compile, after both were checked."""
    steps, _ = checked_steps(case, compiled, [UNION.path])
    timers = {
        provider: functools.partial(steps[provider].times, clock.STEP_TURN)
        for provider in (DENSE_COMPILED, UNION)
    }
    times = clock.in_turns(timers, clock.LAYER_ROUNDS)
    result = times[DENSE_COMPILED]["p50"] / times[UNION]["p50"]
    speeds = "  ".join(f"{provider} {times[provider]['p50']:.4f} ms" for provider in timers)
    print(f"{case}  forward and backward: {speeds}  {result:.2f} times as fast", flush=True)
    return result
