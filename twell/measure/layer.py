"""One layer, forward or as in training: dense baselines, each path of the kernels, and "auto".

A provider's layer is a module: `DenseLayer` of nn.Linear projections, a `SparseFFN` whose backend
and path are the provider's, or `ThirdPartyLayer`, whose error has no limit. In training, output, L1
term and gradients are compared with fp64 before a step is timed. All get the same dy and dl1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from twell.measure import runner
from twell.measure.check import Exact, Weights, exact_layer
from twell.measure.imposed import PATTERNS, permuted, synthetic_layer
from twell.measure.providers import (
    AUTO,
    COMPILED,
    DENSE_COMPILED,
    DENSE_EAGER,
    DENSE_KERNELS,
    FP8,
    FP8_TENSOR,
    HYBRID,
    TRITON,
    UNION,
    Provider,
    third_party,
)
from twell.measure.rows import Rows, require, significant
from twell.measure.runner import MODES, Call, Gpu, bench, compiled, repeat
from twell.models.quantize import quantize_
from twell.sparse import float8
from twell.sparse.activations import RELU, Activation, get_activation
from twell.sparse.calibration import BLOCK, Calibration
from twell.sparse.float8 import Float8Linear
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import Collector
from twell.sparse.projections import PROJECTIONS
from twell.sparse.training import SparseTraining

WEIGHT_SETS = 8  # called in turn: eight sets of 2048 x 5632 are 550 MB, eleven caches of an H200
FORWARD_TOKENS, BACKWARD_TOKENS = (131_072, 16_384, 2048, 64, 16, 1), (65_536, 16_384)
GRAPH_TOKENS = 4096  # largest number of tokens whose default mode is "graph"
DECODE_TOKENS = 1024  # largest number of tokens for which the path "decode" is timed
# With this many entries row-wise takes half a second, far more than any other path.
ROWWISE_ENTRIES = 100_000_000
# Gradients that reach the layer. A neuron gets a tenth as much from the L1 term as from y, so the
# check notices a missing term. Any constant but a power of two is rounded alike in every entry, and
# such errors do not average.
DY, DL1 = 1e-5, 2.0**-20


def ffn(
    tokens: Sequence[int] | None = None,
    active: Sequence[float] = (29,),
    patterns: Sequence[str] = ("skewed",),
    *,
    backward: bool = False,
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    gated: bool = True,
    activation: str = "relu",
    bias: bool = False,
    mode: str | None = None,
    energy: bool = False,
    kernels: bool = False,
    auto: bool = False,
    providers: Sequence[str] = (),
    out: str | Path | None = None,
) -> list[dict]:
    """Time one layer in bf16, and forward also in FP8: `twell measure ffn`, whose help has more.

    patterns: names of PATTERNS. mode: one of MODES (`runner`); default: graph up to 4,096 tokens,
    else and in training stream. providers: names for `ThirdPartyLayer`. Returns the rows. Raises
    ValueError for unfit arguments, ArithmeticError for a wrong result of ours, RuntimeError without
    a GPU. Ours.
    """
    tokens = tokens or (BACKWARD_TOKENS if backward else FORWARD_TOKENS)
    act = get_activation(activation, gated=gated, sparse=True)
    for name in patterns:
        require(name in PATTERNS, f"pattern {name!r} is unknown; use one of {', '.join(PATTERNS)}")
    check_sizes(tokens, hidden_size)
    known = ("stream", "eager") if backward else MODES
    require(mode in (None, *known), f"mode {mode!r} is unknown; use one of {', '.join(known)}")
    plain = act == RELU and not bias
    require(plain or not backward, "backward passes are timed of ReLU without biases")
    require(plain or not providers, "third parties' layers are timed with ReLU, without biases")
    third_parties = third_party(providers)
    gpu, kind = runner.Gpu(energy), TrainingCase if backward else Case
    rows = Rows(out, *kind.files)
    with torch.set_grad_enabled(backward):
        for num_tokens in tokens:
            how = mode or ("stream" if backward else default_mode(num_tokens))
            for name, mean in itertools.product(patterns, active):
                shape = num_tokens, hidden_size, intermediate_size
                options = {"mode": how, "gated": gated, "act": act, "bias": bias, "auto": auto}
                options["third_parties"] = third_parties
                case = kind.draw(gpu, shape, mean, name, **options)
                case.measure(rows, kernels)
                del case  # before the next one is drawn
                torch.cuda.empty_cache()
            torch.compiler.reset()  # compiled anew for each number of tokens, up to a limit
    return rows.by_file[kind.files[0]]


def default_mode(num_tokens: int) -> str:
    """Return "graph" for few tokens, else "stream"."""
    return "graph" if num_tokens <= GRAPH_TOKENS else "stream"


def check_sizes(tokens: Sequence[int], hidden_size: int) -> None:
    """Raise ValueError for numbers of tokens and a width that the kernels do not take."""
    require(min(tokens) >= 1, f"tokens holds {min(tokens)}; it has to be at least 1")
    unfit = f"hidden_size is {hidden_size}; the kernels need a multiple of 16"
    require(hidden_size >= 16 and hidden_size % 16 == 0, unfit)


class ByRow(Float8Linear):
    """A product in FP8 with one scale a row, of an input that `read` has quantised."""

    read = staticmethod(float8.quantize)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return float8.linear(*x, *self.tensors)


class ByTensor(ByRow):
    """The same product with one scale a tensor."""

    @staticmethod
    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax().float().clamp(min=float8.SMALLEST)
        values = (x.float() * (float8.LARGEST / amax)).clamp(-float8.LARGEST, float8.LARGEST)
        return values.to(float8.FLOAT8), amax / float8.LARGEST

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        scales = {"scale_a": x[1], "scale_b": self.weight_scale}
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(x[0], self.weight.t(), **scales, **options)


class DenseLayer(nn.Module):
    """The dense layer, a baseline: x [M, K] -> y [M, K] by nn.Linear projections, as in models.

    precision: FP8 or FP8_TENSOR, of all three products; exact results have the same rounded
    weights, so `relative_rms` does not show what rounding costs.
    """

    def __init__(
        self,
        weights: Weights,
        bias: bool = False,
        act: Activation = RELU,
        precision: str | None = None,
    ):
        super().__init__()
        self.act, self.read = act, lambda x: x
        set_projections(self, (*weights[:2], weights[2].contiguous()), bias)
        if precision is not None:
            kind = {FP8: ByRow, FP8_TENSOR: ByTensor}[precision]
            self.read = kind.read
            for name in PROJECTIONS:
                if (part := getattr(self, name)) is not None:
                    rounded = kind(part.in_features, part.out_features, None, part.weight.device)
                    rounded.weight, rounded.weight_scale = kind.read(part.weight)
                    setattr(self, name, rounded)

    def hidden(self, x: Tensor) -> Tensor:
        x, act = self.read(x), self.act
        if self.gate_proj is None:
            return act.hidden(act.gate(self.up_proj(x)), None)
        return act.hidden(act.gate(self.gate_proj(x)), self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.read(self.hidden(x)))

    def with_l1(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y, and the L1 term [M] in fp32."""
        h = self.hidden(x)
        return self.down_proj(h), h.abs().sum(-1, dtype=torch.float32)


class ThirdPartyLayer(nn.Module):
    """A third party's layer: x [.., K] -> y [.., K], by a function of its weights.

    The function takes w_gate [N, K] (None without a gate), w_up [N, K] and w_down [K, N], and
    returns a callable of x [M, K] that returns y [M, K]. Where the weights require gradients, it
    returns y and the L1 term [M] as `DenseLayer.with_l1` does, with gradients of x and the weights.
    """

    def __init__(self, provider: Provider, weights: Weights):
        super().__init__()
        set_projections(self, weights, bias=False)
        parts = [getattr(self, name) for name in PROJECTIONS]
        self.trains = trains = torch.is_grad_enabled()
        given = (part and part.weight.requires_grad_(trains) for part in parts)
        self.function = provider.load()(*given)

    def forward(self, x: Tensor) -> Any:
        rows = x.flatten(0, -2)
        results = self.function(rows)
        shapes = [tuple(one.shape) for one in (results if self.trains else (results,))]
        expected = [tuple(rows.shape), (len(rows),)][: 1 + self.trains]
        require(shapes == expected, f"its results have the shapes {shapes}, expected {expected}")
        return results if self.trains else results.view(x.shape)


def set_projections(layer: nn.Module, weights: Weights, bias: bool) -> None:
    """Set a layer's projections to nn.Linear of these weights, and of biases of zeros."""
    for name, weight in zip(PROJECTIONS, weights, strict=True):
        part = None
        if weight is not None:
            part = nn.Linear(*weight.shape[::-1], bias=bias, device="meta").requires_grad_(False)
            part.weight = nn.Parameter(weight, requires_grad=False)
            if bias:
                part.bias = nn.Parameter(weight.new_zeros(len(weight)), requires_grad=False)
        setattr(layer, name, part)


@dataclass
class Case:
    """x, sets of weights with the same activity, the exact result and the columns, for `bench`.

    pattern: the column, to which another activation and biases (of zeros) are added. inputs: x,
    w_gate, w_up and w_down; without a gate, w_gate serves as up. auto: of our paths time "auto"
    alone. calibration: of "auto" in bf16; None: the card's. allowed: a relative RMS, where it is
    more than the tolerance. Results are checked in the mode in which they are timed.
    """

    gpu: Gpu
    pattern: str
    inputs: tuple[Tensor, ...]
    mode: str = "stream"
    gated: bool = True
    act: Activation = RELU
    bias: bool = False
    auto: bool = False
    third_parties: Sequence[Provider] = ()
    calibration: Calibration | None = None
    allowed: float = 0.0

    files, turns, weight_sets = ("ffn", "kernels"), "layer", WEIGHT_SETS
    gradients = ()  # that reach the layer; a forward pass has none

    def __post_init__(self):
        self.x, w_gate, w_up, w_down = self.inputs
        weights = (w_gate, w_up, w_down) if self.gated else (None, w_gate, w_down)
        self.exact = exact = Exact.of(self.x, weights, *self.gradients, act=self.act)
        words = [self.pattern, *[self.act.name] * (self.act != RELU), *["biases"] * self.bias]
        self.columns = {
            "tokens": len(self.x),
            "hidden_size": self.x.shape[1],
            "intermediate_size": len(w_up),
            "gated": self.gated,
            "dtype": str(self.x.dtype).removeprefix("torch."),
            "pattern": " ".join(words),
            "active": round(float(exact.counts.double().mean()), 2),
            "active_max": int(exact.counts.max()),
            "union": round(float(exact.unions.double().mean()), 1),
            "mode": self.mode,
            "weight_sets": 1 if self.mode == "stream" else self.weight_sets,
        }
        seeds = range(1, self.columns["weight_sets"])
        self.sets = [weights, *(permuted(weights, seed) for seed in seeds)]

    @classmethod
    def draw(
        cls, gpu: Gpu, shape: Sequence[int], active: float, pattern: str = "skewed", **options: Any
    ) -> Self:
        """Return a case of `synthetic_layer`; shape: M, K and N."""
        given = {"active": active, "pattern": PATTERNS[pattern], "device": gpu.device}
        return cls(gpu, pattern, synthetic_layer(*shape, **given), **options)

    def __str__(self) -> str:
        c = self.columns
        return f"{c['tokens']:>6} tokens  {c['pattern']:<8} {c['active']:>7} active"

    def paths(self) -> list[str]:
        """Return the paths of the kernels, dense first, without those that would take too long."""
        slow = {
            "rowwise": self.exact.entries > ROWWISE_ENTRIES,
            "decode": len(self.x) > DECODE_TOKENS,
        }
        return [path for path in ("dense", "rowwise", "union", "decode") if not slow.get(path)]

    def providers(self) -> list[Provider]:
        """Return the providers to time, in FP8 too where it can be measured."""
        dense = [DENSE_EAGER, DENSE_COMPILED]
        ours = [Provider("triton", path) for path in ([] if self.auto else self.paths())] + [AUTO]
        if self.act == RELU and not self.bias and float8.why_not(self.x.device) is None:
            dense += [Provider("dense", None, COMPILED, kind) for kind in (FP8, FP8_TENSOR)]
            ours += [replace(provider, precision=FP8) for provider in ours]
        return [*dense, *ours, *self.third_parties]

    def layer(self, provider: Provider, weights: Weights) -> nn.Module:
        """Return a provider's layer, not compiled. A dense provider with a path is a SparseFFN."""
        if provider.backend == "dense" and not provider.path:
            return DenseLayer(weights, self.bias, self.act, provider.precision)
        if provider.third_party:
            return ThirdPartyLayer(provider, weights)
        c = self.columns
        options = {"activation": self.act.name, "gated": self.gated, "device": "meta"}
        options["backend"] = provider.backend
        layer = SparseFFN(c["hidden_size"], c["intermediate_size"], **options)
        set_projections(layer, weights, self.bias)
        if provider.in_fp8:
            quantize_(layer)
        else:
            layer.calibration = self.calibration
        layer.path = provider.path
        layer.observe(c["active"], c["union"], min(c["tokens"], BLOCK))
        return layer.eval()

    def prepare(self, provider: Provider) -> Call:
        mode, layers = self.mode, [self.layer(provider, weights) for weights in self.sets]
        as_it_is = provider == DENSE_EAGER or provider.third_party
        by_compiling = provider.compiled or (mode == "compiled" and not as_it_is)
        calls = [partial(compiled(one) if by_compiling else one, self.x) for one in layers]
        if mode == "stream":
            run, outputs = calls[0], [calls[0]()]
        elif mode == "graph":
            run, outputs = self.gpu.capture(calls)
            run()
        else:
            run, outputs = partial(repeat, calls, 1), [call() for call in calls]
        path = provider.path or provider.backend
        if provider.backend == "auto":  # its first call, above, made the plan for this card
            path = layers[0].chooser.path(len(self.x), "eager" if mode == "stream" else mode)
        exact, limit = self.exact, max(self.allowed, provider.allowed)
        if provider.in_fp8:
            exact, limit = exact_layer(layers[0], self.x, path)
            # Sparse paths: the plain tolerance. A trained layer's is too wide for random weights.
            limit = max(limit, self.allowed) if path == "dense" else self.allowed
        error = max(exact.check(y, f"{provider} at {self}", limit) for y in outputs)
        columns = {"path": path, "relative_rms": significant(error, 3)}
        profiled = provider == DENSE_KERNELS or provider.sparse_path
        parts = calls if profiled else ()
        return Call(run, columns, len(outputs), flush=mode == "stream", parts=parts)

    def measure(self, rows: Rows, kernels: bool) -> None:
        """Add the rows of a layer, and with `kernels` those of each kernel."""
        results, parts = [], []
        for provider, call in bench(self.gpu, self.prepare, self.providers(), self.turns).items():
            results.append(self.columns | {"provider": provider.name} | call.columns)
            if kernels and call.parts:
                of_kernels = runner.kernel_rows(self.gpu, call.parts)
                parts += [results[-1] | one for one in of_kernels]
        for file, several in zip(self.files, (results, parts), strict=True):
            rows.add(file, several)


# --- training ---------------------------------------------------------------------------------


class TrainingCase(Case):
    """A pass forward and backward. In the mode "eager" the row "triton" takes the path "union"."""

    files, turns, weight_sets = ("training", "training_kernels"), "step", 1

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """dy [M, K] and dl1 [M], which reach the layer."""
        x, g = self.x, torch.Generator(self.x.device).manual_seed(1)
        dy = DY * torch.randn(x.shape, generator=g, device=x.device)
        return dy.to(x.dtype), torch.full(x.shape[:1], DL1, device=x.device)

    def providers(self) -> list[Provider]:
        sparse = UNION if self.mode == "stream" else TRITON
        return [DENSE_EAGER, DENSE_COMPILED, sparse, HYBRID, *self.third_parties]

    def prepare(self, provider: Provider) -> Call:
        columns: dict = {"path": provider.backend, "capacity": None}
        if provider.backend == "triton":
            layer = self.layer(TRITON, self.sets[0])
            step = Step(layer.train(), partial(with_l1, layer), self)
            sparse = SparseTraining(layer, path=provider.path or UNION.path)
            for _ in sparse.attempts():  # to find the capacity
                step()
            step.attempts = sparse.attempts()  # stays open: the layer is dense after its end
            next(step.attempts)
            columns = {"path": layer.train_path or "dense", "capacity": layer.capacity}
        else:
            layer = self.layer(provider, self.sets[0])
            function = layer if provider.third_party else layer.with_l1
            step = Step(layer, compiled(function) if provider.compiled else function, self)
        what = f"{provider} at {self}"
        worst, error = self.exact.check_step(step(), what, provider.allowed)
        columns |= {"worst": worst, "relative_rms": significant(error, 3)} | step.memory(self.gpu)
        return Call(step, columns, flush=self.mode == "stream", parts=[step])


def with_l1(layer: SparseFFN, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return y, and the L1 term [M]."""
    with Collector([layer]) as collector:
        y = layer(x)
    return y, collector.terms[0][1]


class Step:
    """A layer's pass forward and backward, by a function of x that returns y and l1."""

    def __init__(self, layer: nn.Module, function: Callable, case: TrainingCase):
        self.function, self.gradients = function, case.gradients
        self.leaves = {"x": case.x.detach().requires_grad_()}
        for name in PROJECTIONS:
            if (part := getattr(layer, name)) is not None:
                self.leaves[f"w_{name.removesuffix('_proj')}"] = part.weight.requires_grad_()

    def __call__(self, between: Callable = lambda y, l1: None) -> dict[str, Tensor]:
        """Return the results, named as in Exact; call `between` between the passes."""
        outputs = y, l1 = self.function(self.leaves["x"])
        between(y, l1)
        gradients = torch.autograd.grad(outputs, list(self.leaves.values()), self.gradients)
        names = (f"d{name}" for name in self.leaves)
        return {"y": y.detach(), "l1": l1.detach()} | dict(zip(names, gradients, strict=True))

    def memory(self, gpu: Gpu) -> dict[str, int]:
        """Return the bytes held between the passes, and the most that a step allocates.

        held: x, and the allocations that the forward pass keeps without y and l1, which go on to
        the next layer. x counts although the caller holds it here: in a model the layer keeps it.
        """
        held = []

        def between(y: Tensor, l1: Tensor) -> None:
            held.append(gpu.allocated() - y.nbytes - l1.nbytes)

        before, most = gpu.peak(partial(self, between))
        return {"held": held[0] - before + self.leaves["x"].nbytes, "peak": most - before}
