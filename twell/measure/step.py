"""Training of one layer: a pass forward and backward, dense and by each sparse path.

Output, L1 term and gradients are compared with fp64 before a step is timed. All providers have the
same loss, the gradient of the L1 term included. Steps are timed in one of two modes of clock.py:
"stream", or "eager", where the host's work counts and the layer itself is timed too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell.measure import clock
from twell.measure.case import Case, DenseTraining, Grid, check_sizes, give, in_mode
from twell.measure.check import Exact
from twell.measure.clock import Gpu
from twell.measure.layer import Bench
from twell.measure.patterns import Weights, synthetic_layer
from twell.measure.providers import DENSE_COMPILED, DENSE_EAGER, TRITON, UNION, Provider
from twell.measure.rows import require, significant
from twell.sparse import reference
from twell.sparse.calibration import crossing
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import Collector
from twell.sparse.training import CAPACITY_MARGIN, SparseTraining, capacities

# Gradients that reach the layer: of y at random, of the L1 term about a tenth of what a neuron gets
# from y, so that the check notices its absence. It is a power of two: another constant is rounded
# alike in every entry, by all providers, which does not average.
DY, DL1 = 1e-5, 2.0**-20
STEP_MODES = "stream", "eager"  # of timing: see clock.py
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
    mode: str = "stream",
    masks: Mapping[str, np.ndarray] | None = None,
    energy: bool = False,
    kernels: bool = False,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16 forward and backward: dense (eager and compiled), each sparse path.

    Arguments as in `ffn`; `out` is the folder of training.csv, training_kernels.csv and
    ceilings.csv. x and the weights get gradients for a random dy, and for the L1 term the same
    gradient at each token. In the mode "stream" each step finds the cache emptied. In the mode
    "eager" steps follow one another, so they wait for the host where it is slower. There dense is a
    module, and the provider "triton" is a SparseFFN as `twell.SparseTraining` prepares it for the
    path "union". Returns the rows of training.csv, COLUMNS["training"]. Raises ValueError for unfit
    arguments, ArithmeticError, with its name, for a wrong tensor, RuntimeError without a GPU. Ours.
    """
    gpu = clock.Gpu(energy)
    grid = Grid(tokens, active, patterns, hidden_size, intermediate_size, gated, masks)
    known = mode in STEP_MODES
    require(known, f"mode {mode!r} is unknown for steps; use one of {', '.join(STEP_MODES)}")
    bench = Bench(gpu, out, ["training", "training_kernels"], kernels)
    for num_tokens in tokens:
        compiled = torch.compile(dense, fullgraph=True, dynamic=False)
        for case in grid.cases(num_tokens, 1, gpu.device):
            paths = list(training_ops().TRAIN_PATHS)
            stream = mode == "stream"
            steps = case_steps(case, compiled, paths) if stream else eager_steps(case, paths)
            _measure(bench, case, steps, mode)
            del case, steps
        torch.compiler.reset()  # compiled anew each time, up to a limit
    return bench.rows.by_file["training"]


def _measure(bench: Bench, case: Case, steps: Mapping[Provider, Step], mode: str) -> None:
    """Add the rows of training.csv and training_kernels.csv for one case."""
    columns = measure_steps(bench.gpu, case, steps, mode, forward=True)
    rows = []
    for provider, step in steps.items():
        more = columns[provider, True] | step.memory(bench.gpu)
        more |= {"mode": mode, "path": step.path, "capacity": step.capacity}
        more["forward"] = columns[provider, False]["p50"]
        rows.append(bench.row(case, provider, more, step, backward=True))
        step.clear()
    bench.rows.add("training", rows)
    for row, step in zip(rows, steps.values(), strict=True):
        bench.rows.add("training_kernels", bench.kernel_rows(row, [step]))
        step.clear()


# --- the steps --------------------------------------------------------------------------------


def dense(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
    """The dense layer with its L1 term: y [M, K] and l1 [M] in fp32."""
    _, h = reference.activations(x, w_gate, w_up)
    return F.linear(h, w_down), h.abs().sum(-1, dtype=torch.float32)


class Step:
    """A provider's pass forward and backward.

    function: of x and the weights; returns y and l1. Gradients are those of weights that are
    parameters, and of views of other tensors. gradients: dy [M, K] and dl1 [M], which reach the
    layer. path, capacity: the sparse path and its entries per token.
    """

    def __init__(
        self,
        function: Callable,
        x: Tensor,
        weights: Weights,
        gradients: tuple[Tensor, Tensor],
        path: str = "dense",
        capacity: int | None = None,
    ):
        self.function, self.gradients = function, gradients
        self.path, self.capacity = path, capacity
        self.attempts: Iterator[int] | None = None  # in which a SparseFFN trains sparsely
        tensors = zip(("x", "w_gate", "w_up", "w_down"), (x, *weights), strict=True)
        self.leaves = {name: _leaf(tensor) for name, tensor in tensors}

    @classmethod
    def sparse(cls, path: str, capacity: int, *tensors) -> Step:
        """The step by a sparse path; tensors: x, weights and gradients."""

        def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            trained = training_ops().train(path, capacity, *leaves)
            return trained.y, trained.l1

        return cls(function, *tensors, path, capacity)

    @classmethod
    def module(
        cls, layer: nn.Module, function: Callable, x: Tensor, gradients: tuple[Tensor, Tensor]
    ) -> Step:
        """The step of a layer; function: what calls it with x, and returns y and l1."""
        layer.requires_grad_()
        parts = layer.gate_proj, layer.up_proj, layer.down_proj
        w_gate, w_up, w_down = (None if part is None else part.weight for part in parts)
        return cls(lambda x, *_: function(x), x, (w_gate, w_up, w_down), gradients)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.function(*self.leaves.values())

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves.values():
            if leaf is not None:
                leaf.grad = None

    def __call__(self, between: Callable = lambda y, l1: None) -> tuple[Tensor, Tensor]:
        """between: called with the results between the passes."""
        self.clear()
        outputs = self.forward()
        between(*outputs)
        torch.autograd.backward(outputs, self.gradients)
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """Return the results of a step, named as in Exact."""
        y, l1 = self()
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf is not None}
        gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
        self.clear()
        return {"y": y.detach(), "l1": l1.detach()} | gradients

    def times(self, gpu: Gpu, run: Callable, budget: float, mode: str = "stream") -> np.ndarray:
        """Return times in ms of `run`, the step or its forward pass alone, in a mode."""
        if mode == "stream":
            times = gpu.stream_times(run, budget)
        else:
            times = clock.graph_times(gpu, run, 1, budget)
        self.clear()
        return times

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


def _leaf(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_()


def output_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients dy [M, K] and dl1 [M] that reach a layer."""
    g = torch.Generator(x.device).manual_seed(1)
    dy = DY * torch.randn(x.shape, generator=g, device=x.device)
    return dy.to(x.dtype), torch.full(x.shape[:1], DL1, device=x.device)


def training_capacity(path: str, case: Case) -> int:
    """Return the entries per token that SparseTraining would give this case."""
    *_, most = sizes = capacities(case.columns["intermediate_size"])
    needed = math.ceil(case.columns["active"])
    for capacity in sizes:
        if capacity >= CAPACITY_MARGIN * needed or capacity == most:
            with torch.no_grad():
                needed = int(training_ops().train(path, capacity, case.x, *case.sets[0]).needed)
            if needed <= capacity:
                return capacity
    raise ArithmeticError(
        f"triton {path} at {case} needs {needed} entries a token, of {most} neurons"
    )


def case_steps(case: Case, compiled: Callable, paths: Sequence[str]) -> dict[Provider, Step]:
    """Return the steps of a case: `dense`, the same compiled, and the sparse paths."""
    gradients, weights = output_gradients(case.x), case.sets[0]
    *others, w_down = weights
    plain = *others, w_down.contiguous()  # as nn.Linear stores it
    steps = {
        DENSE_EAGER: Step(dense, case.x, plain, gradients),
        DENSE_COMPILED: Step(compiled, case.x, plain, gradients),
    }
    return steps | _path_steps(case, paths, gradients)


def _path_steps(
    case: Case, paths: Sequence[str], gradients: tuple[Tensor, Tensor]
) -> dict[Provider, Step]:
    steps = {}
    for path in paths:
        capacity = training_capacity(path, case)
        step = Step.sparse(path, capacity, case.x, case.sets[0], gradients)
        steps[Provider("triton", path)] = step
    return steps


def eager_steps(case: Case, paths: Sequence[str]) -> dict[Provider, Step]:
    """Return the steps of a case in the mode "eager", where a module's work on the host counts.

    Dense is a module, also compiled. The layer by the path "union" comes beside the sparse paths.
    """
    gradients = output_gradients(case.x)
    *others, w_down = case.sets[0]
    plain = *others, w_down.contiguous()  # as nn.Linear stores it
    steps: dict[Provider, Step] = {}
    for provider in (DENSE_EAGER, DENSE_COMPILED):
        layer = DenseTraining(case.act, plain, ())
        function = in_mode(layer, "compiled") if provider.compiled else layer
        steps[provider] = Step.module(layer, function, case.x, gradients)
    steps[TRITON] = sparse_layer_step(case, gradients)
    return steps | _path_steps(case, paths, gradients)


def sparse_layer_step(case: Case, gradients: tuple[Tensor, Tensor]) -> Step:
    """Return the step of a SparseFFN as it is within `SparseTraining.attempts`."""
    sizes = case.columns["hidden_size"], case.columns["intermediate_size"]
    options = {"gated": case.columns["gated"], "device": "meta"}
    layer = SparseFFN(*sizes, **options, backend="triton")
    give(layer, case.sets[0], ())

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with Collector([layer]) as seen:
            y = layer(x)
        return y, seen.terms[0][1]

    step = Step.module(layer, function, case.x, gradients)
    sparse = SparseTraining(layer, path=UNION.path)
    for _ in sparse.attempts():  # to find the capacity
        step()
    step.clear()
    step.attempts = sparse.attempts()  # stays open: the layer is dense after its end
    next(step.attempts)
    step.path, step.capacity = layer.train_path or "dense", layer.capacity
    return step


def measure_steps(
    gpu: Gpu,
    case: Case,
    steps: Mapping[Provider, Step],
    mode: str = "stream",
    *,
    forward: bool = False,
) -> dict[tuple[Provider, bool], dict]:
    """Return the columns of steps (provider, True), after all were checked.

    forward: also times of forward passes alone, under (provider, False).
    """
    first, *_ = steps.values()
    exact = Exact.of(case.x, case.sets[0], *first.gradients)

    def check(key: tuple[Provider, bool]) -> tuple[dict, Callable]:
        provider, whole = key
        step = steps[provider]
        if not whole:  # its result is part of the step's
            run = step.forward, clock.STEP_TURN / 2, mode
            return {}, functools.partial(step.times, gpu, *run)
        worst, error = exact.check_step(step.tensors(), f"{provider} at {case}")
        columns = {"worst": worst, "relative_rms": significant(error, 3)}
        return columns, functools.partial(step.times, gpu, step, clock.STEP_TURN, mode)

    keys = [(provider, whole) for provider in steps for whole in ([True, False][: 1 + forward])]
    return clock.measure(keys, check, clock.LAYER_ROUNDS)


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
    gpu = clock.Gpu()
    check_sizes([tokens], hidden_size, intermediate_size)
    compiled = torch.compile(dense, fullgraph=True, dynamic=False)
    levels: list[tuple[float, float]] = []
    for active in sorted({max(share * intermediate_size, 1.0) for share in CROSSOVER_SHARES}):
        size = tokens, hidden_size, intermediate_size
        case = Case.of("skewed", synthetic_layer(*size, active=active, device=gpu.device), gated)
        steps = case_steps(case, compiled, [UNION.path])
        del steps[DENSE_EAGER]
        times = measure_steps(gpu, case, steps)
        gain = times[DENSE_COMPILED, True]["p50"] / times[UNION, True]["p50"]
        speeds = "  ".join(f"{key} {columns['p50']:.4f} ms" for (key, _), columns in times.items())
        print(f"{case}  forward and backward: {speeds}  {gain:.2f} times as fast", flush=True)
        levels.append((case.columns["active"], gain))
        if gain < 1:
            break
    torch.compiler.reset()
    result = crossing(levels)
    if result < levels[-1][0]:
        result = significant(result, 4)
    print(f"training is faster sparsely up to {result:g} active neurons per token", flush=True)
    return result
