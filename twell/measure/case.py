"""A case: one layer's inputs and weights, its exact result and columns, and its providers' layers.

A provider's layer is a module: `DenseLayer` of nn.Linear projections, or a `SparseFFN` whose
backend and path are the provider's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twell.measure import quantized
from twell.measure.check import BLOCK, Exact
from twell.measure.patterns import (
    PATTERNS,
    Weights,
    imposed_layer,
    permuted,
    recorded_masks,
    synthetic_layer,
)
from twell.measure.providers import (
    DENSE_COMPILED,
    DENSE_EAGER,
    DENSE_FP8,
    FP8,
    FP8_TENSOR,
    Provider,
)
from twell.measure.rows import require
from twell.measure.runner import Gpu
from twell.models.quantize import quantize_
from twell.sparse import float8
from twell.sparse.activations import RELU, Activation
from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN

WEIGHT_SETS = 8  # of a graph: eight sets of 2048 x 5632 are 550 MB, eleven caches of an H200
GRAPH_TOKENS = 4096  # largest number of tokens whose default mode is "graph"
DECODE_TOKENS = 1024  # largest number of tokens for which the path "decode" is timed
# With this many entries row-wise takes half a second, far more than any other path.
ROWWISE_ENTRIES = 100_000_000


def default_mode(num_tokens: int) -> str:
    """Return "graph" for few tokens, else "stream"."""
    return "graph" if num_tokens <= GRAPH_TOKENS else "stream"


def check_sizes(tokens: Sequence[int], hidden_size: int, intermediate_size: int) -> None:
    """Raise ValueError for sizes that the kernels do not take."""
    require(min(tokens) >= 1, f"tokens holds {min(tokens)}; it has to be at least 1")
    unfit = f"hidden_size is {hidden_size}; the kernels need a multiple of 16"
    require(hidden_size >= 16 and hidden_size % 16 == 0, unfit)
    unfit = f"intermediate_size is {intermediate_size}; it has to be at least 1"
    require(intermediate_size >= 1, unfit)


class DenseLayer(nn.Module):
    """The dense layer, a baseline: x [M, K] -> y [M, K] by nn.Linear projections, as in models.

    The weights are w_gate and w_up [N, K] and w_down [K, N], which is stored as nn.Linear does.
    """

    def __init__(self, weights: Weights, bias: bool = False, act: Activation = RELU):
        super().__init__()
        self.act, self.read = act, _unchanged  # `read` quantises inputs, see quantized.py
        w_gate, w_up, w_down = weights
        stored = w_gate, w_up, w_down.contiguous()
        self.gate_proj, self.up_proj, self.down_proj = (
            None if w is None else nn.Linear(*w.shape[::-1], bias=False, device="meta")
            for w in stored
        )
        give(self, stored, bias)

    def hidden(self, x: Tensor) -> Tensor:
        x, act = self.read(x), self.act
        if self.gate_proj is None:
            return act.hidden(act.gate(self.up_proj(x)), None)
        return act.hidden(act.gate(self.gate_proj(x)), self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.read(self.hidden(x)))


def _unchanged(x: Tensor) -> Tensor:
    return x


def give(layer: nn.Module, weights: Weights, bias: bool) -> None:
    """Put weights, and biases of zeros, into a layer's projections."""
    projections = layer.gate_proj, layer.up_proj, layer.down_proj
    for part, weight in zip(projections, weights, strict=True):
        if part is not None:
            part.weight = nn.Parameter(weight, requires_grad=False)
            zeros = weight.new_zeros(len(weight)) if bias else None
            part.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)


def compiled(function: Callable) -> Callable:
    """Return the function by torch.compile, whole and for each shape anew."""
    allow_recompiling()
    return torch.compile(function, fullgraph=True, dynamic=False)


def allow_recompiling() -> None:
    """Let code be compiled for each provider, shape and path, and kept for all layers together."""
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), 256))


@dataclass(frozen=True)
class Case:
    """x, sets of weights with the same activity, the exact result, and the case's columns."""

    x: Tensor
    sets: list[Weights]
    exact: Exact
    columns: dict
    act: Activation = RELU
    bias: bool = False
    calibration: Calibration | None = None  # of "auto"

    @classmethod
    def of(
        cls,
        pattern: str,
        inputs: tuple[Tensor, ...],
        weight_sets: int = 1,
        *,
        gated: bool = True,
        act: Activation = RELU,
        bias: bool = False,
        calibration: Calibration | None = None,
    ) -> Case:
        """Return the case of x, w_gate, w_up and w_down (not gated: w_gate is w_up).

        pattern: the column, to which another activation and biases (of zeros) are added.
        """
        x, w_gate, w_up, w_down = inputs
        weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
        exact = Exact.of(x, weights, act=act)
        columns = {
            "tokens": len(x),
            "hidden_size": x.shape[1],
            "intermediate_size": len(w_up),
            "gated": gated,
            "dtype": str(x.dtype).removeprefix("torch."),
            "pattern": " ".join([pattern, *[act.name] * (act != RELU), *["biases"] * bias]),
            "active": round(float(exact.counts.double().mean()), 2),
            "active_max": int(exact.counts.max()),
            "union": round(float(exact.unions.double().mean()), 1),
        }
        sets = [weights, *(permuted(weights, seed) for seed in range(1, weight_sets))]
        return cls(x, sets, exact, columns, act, bias, calibration)

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

    def providers(self, in_fp8: bool) -> list[Provider]:
        """Return the providers of inference; in_fp8: also in FP8, where it can be measured."""
        ours = [*(Provider("triton", path) for path in self.paths()), Provider("auto")]
        plain = self.act == RELU and not self.bias
        if not (in_fp8 and plain and float8.why_not(self.x.device) is None):
            return [DENSE_EAGER, DENSE_COMPILED, *ours]
        dense = [DENSE_FP8, replace(DENSE_FP8, precision=FP8_TENSOR)]
        return [
            DENSE_EAGER,
            DENSE_COMPILED,
            *dense,
            *ours,
            *(replace(p, precision=FP8) for p in ours),
        ]

    def layers(self, provider: Provider) -> list[nn.Module]:
        """Return a provider's layers, one for each set of weights, not compiled.

        Layers of "auto" know the case's activity. A dense provider with a path is a SparseFFN.
        """
        if provider.backend != "dense" or provider.path:
            return [self._sparse(provider, weights) for weights in self.sets]
        layers = [DenseLayer(weights, self.bias, self.act) for weights in self.sets]
        for layer in layers if provider.in_fp8 else ():
            quantized.round_weights(layer, provider.precision)
        return layers

    def _sparse(self, provider: Provider, weights: Weights) -> SparseFFN:
        c = self.columns
        options = {"activation": self.act.name, "bias": self.bias, "gated": c["gated"]}
        options |= {"backend": provider.backend, "device": "meta"}
        layer = SparseFFN(c["hidden_size"], c["intermediate_size"], **options)
        give(layer, weights, self.bias)
        if provider.in_fp8:
            quantize_(layer)
        layer.path, layer.calibration = provider.path, self.calibration
        layer.observe(c["active"], c["union"], min(c["tokens"], BLOCK))
        return layer.eval()

    def exact_for(self, provider: Provider) -> tuple[Exact, float]:
        """Return the exact result of a provider, and a limit above the tolerance or 0."""
        if not provider.in_fp8:
            return self.exact, 0.0
        if provider.backend != "dense":
            return self._exact_in_fp8, 0.0
        kind = quantized.KINDS[provider.precision]
        wide = [None if w is None else kind(w.contiguous()).wide() for w in self.sets[0]]
        exact = Exact.of(float8.wide(*kind.read(self.x)), wide, fp8=True)
        return exact, exact.fp8_limit

    @cached_property
    def _exact_in_fp8(self) -> Exact:
        """The result of x, gate and up by rows in FP8, and of down as it is."""
        gate, up, down = self.sets[0]
        x, gate, up = (
            None if tensor is None else float8.wide(*float8.quantize(tensor.contiguous()))
            for tensor in (self.x, gate, up)
        )
        return Exact.of(x, (gate, up, down), fp8=True)


def cases(
    gpu: Gpu,
    modes: Mapping[int, str],
    weight_sets: int = WEIGHT_SETS,
    *,
    patterns: Sequence[str],
    active: Sequence[float],
    hidden_size: int | None,
    intermediate_size: int,
    masks: Mapping[str, np.ndarray] | None,
    **options: Any,
) -> Iterator[tuple[Case, str]]:
    """Yield a case for each level of activity or recorded mask, and its mode.

    Delete a case before the next one. modes: by number of tokens; in the mode "stream" a case has
    one set of weights. options: of `Case.of`. The rest: arguments of `ffn`.
    """
    for num_tokens, mode in modes.items():
        for name in patterns:
            if name == "recorded":
                width = hidden_size or 1024
                draws = [
                    (f"recorded {label}", partial(imposed_layer, mask[:width], hidden_size=width))
                    for label, mask in (masks or recorded_masks()).items()
                ]
            else:
                sizes = {"hidden_size": hidden_size or 2048, "intermediate_size": intermediate_size}
                draw = partial(synthetic_layer, pattern=PATTERNS[name], **sizes)
                draws = [(name, partial(draw, active=mean)) for mean in active]
            for column, draw in draws:
                inputs = draw(num_tokens=num_tokens, device=gpu.device)
                yield (
                    Case.of(column, inputs, 1 if mode == "stream" else weight_sets, **options),
                    mode,
                )
                del inputs
                torch.cuda.empty_cache()
        torch.compiler.reset()  # compiled anew for each number of tokens, up to a limit
