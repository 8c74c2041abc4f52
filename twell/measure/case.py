"""A case: one layer's inputs and weights, its exact result and columns, and its providers' layers.

A provider's layer is a module: `DenseLayer` of nn.Linear projections, or a `SparseFFN` whose
backend and path are the provider's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from twell.measure.providers import FP8, Provider
from twell.measure.rows import require
from twell.measure.runner import Gpu
from twell.models.quantize import quantize_
from twell.sparse import float8
from twell.sparse.activations import RELU, Activation
from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN

WEIGHT_SETS = 8  # of a graph: eight sets of 2048 x 5632 are 550 MB, eleven caches of an H200
GRAPH_TOKENS = 4096  # up to so many tokens the default mode is "graph"
DECODE_TOKENS = 1024  # the path "decode" is measured up to so many tokens
# Row-wise takes half a second for so many entries, and is then far behind every other path.
ROWWISE_ENTRIES = 100_000_000
NO_BIASES = None, None, None


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
    merged: gate and up are one projection, whose halves w_gate and w_up are.
    """

    def __init__(
        self,
        weights: Weights,
        biases: Sequence[Tensor | None] = NO_BIASES,
        act: Activation = RELU,
        merged: bool = False,
    ):
        super().__init__()
        self.act, self.merged = act, merged
        self.read: Callable = _unchanged  # quantises inputs, see quantized.py
        w_gate, w_up, w_down = weights
        first = w_up._base if merged else w_up
        stored = None if merged else w_gate, first, w_down.contiguous()
        self.gate_proj, self.up_proj, self.down_proj = (
            None if w is None else nn.Linear(*w.shape[::-1], bias=False, device="meta")
            for w in stored
        )
        give(self, stored, biases)

    def hidden(self, x: Tensor) -> Tensor:
        x, act = self.read(x), self.act
        if self.merged:
            g, u = self.up_proj(x).chunk(2, -1)
            return act.hidden(act.gate(g), u)
        if self.gate_proj is None:
            return act.hidden(act.gate(self.up_proj(x)), None)
        return act.hidden(act.gate(self.gate_proj(x)), self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.read(self.hidden(x)))


def _unchanged(x: Tensor) -> Tensor:
    return x


def give(layer: nn.Module, weights: Weights, biases: Sequence[Tensor | None]) -> None:
    """Put weights and biases into a layer's projections."""
    projections = layer.gate_proj, layer.up_proj, layer.down_proj
    for part, weight, bias in zip(projections, weights, biases, strict=True):
        if part is not None:
            part.weight = nn.Parameter(weight, requires_grad=False)
            part.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


def compiled(function: Callable, **options: Any) -> Callable:
    """Return the function by torch.compile, whole and for each shape anew."""
    allow_recompiling()
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


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
    biases: tuple[Tensor | None, ...] = NO_BIASES  # b_gate, b_up and b_down
    merged: bool = False  # gate and up are the halves of one tensor
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
        merged: bool = False,
        calibration: Calibration | None = None,
    ) -> Case:
        """Return the case of x, w_gate, w_up and w_down (not gated: w_gate is w_up).

        pattern: the column, which also names what is unusual. bias: with biases of zeros. merged:
        gate and up are halves of one tensor.
        """
        x, w_gate, w_up, w_down = inputs
        weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
        exact, biases = Exact.of(x, weights, act=act), NO_BIASES
        if bias:
            b_up, b_down = x.new_zeros(len(w_up)), x.new_zeros(x.shape[1])
            biases = b_up if gated else None, b_up, b_down
        unusual = [act.name] * (act != RELU) + ["biases"] * bias + ["merged"] * merged
        columns = {
            "tokens": len(x),
            "hidden_size": x.shape[1],
            "intermediate_size": len(w_up),
            "gated": gated,
            "dtype": str(x.dtype).removeprefix("torch."),
            "pattern": " ".join([pattern, *unusual]),
            "active": round(float(exact.counts.double().mean()), 2),
            "active_max": int(exact.counts.max()),
            "union": round(float(exact.unions.double().mean()), 1),
        }
        sets = [weights, *(permuted(weights, seed) for seed in range(1, weight_sets))]
        if merged:
            sets = [(*torch.cat(several[:2]).chunk(2), several[2]) for several in sets]
        return cls(x, sets, exact, columns, act, biases, merged, calibration)

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

    def providers(self, rounded: bool) -> list[Provider]:
        """Return the providers of inference; rounded: also those of FP8 and integer weights."""
        dense = [Provider("dense"), Provider("dense", None, "torch.compile")]
        precisions = [None]
        if rounded and self.act == RELU and self.biases == NO_BIASES and not self.merged:
            sizes = self.sets[0][1].shape
            of_dense = quantized.dense_precisions(len(self.x), sizes, self.x.device)
            dense += [Provider("dense", None, "torch.compile", one) for one in of_dense]
            precisions += [FP8] if FP8 in of_dense else []
        kernels = [("triton", path) for path in self.paths()] + [("auto", None)]
        return dense + [
            Provider(*kind, precision=precision) for precision in precisions for kind in kernels
        ]

    def layers(self, provider: Provider) -> list[nn.Module]:
        """Return a provider's layers, one for each set of weights, not compiled.

        Those of "auto" know the case's activity. A dense provider with a path is a SparseFFN.
        """
        if provider.backend != "dense" or provider.path:
            return [self._sparse(provider, weights) for weights in self.sets]
        layers = [DenseLayer(w, self.biases, self.act, self.merged) for w in self.sets]
        if provider.precision in quantized.ALLOWED:
            quantized.round_weights(layers[0], provider.precision)
            # Copies: the groups of permuted weights would round to other integers.
            return [copy.deepcopy(layers[0]) for _ in layers]
        if provider.precision is not None:
            for layer in layers:
                quantized.round_weights(layer, provider.precision)
        return layers

    def _sparse(self, provider: Provider, weights: Weights) -> SparseFFN:
        c = self.columns
        sizes = c["hidden_size"], c["intermediate_size"]
        options = {"activation": self.act.name, "bias": self.biases[1] is not None}
        options |= {"gated": c["gated"], "backend": provider.backend, "device": "meta"}
        layer = SparseFFN(*sizes, **options)
        give(layer, weights, self.biases)
        if provider.in_fp8:
            quantize_(layer)
        layer.path = provider.path
        layer.calibration = self.calibration
        layer.observe(c["active"], c["union"], min(c["tokens"], BLOCK))
        return layer.eval()

    def exact_for(self, provider: Provider, path: str | None) -> tuple[Exact, float]:
        """Return what a provider has to compute by a path, and its error above the tolerance."""
        precision, kind = provider.precision, quantized.KINDS.get(provider.precision)
        if kind is None:
            return self.exact, 0.0
        if provider.backend != "dense" and path != "dense":
            return self._exact_in_fp8, 0.0
        wide = [None if w is None else kind(w.contiguous()).wide() for w in self.sets[0]]
        if precision in quantized.ALLOWED:
            return Exact.of(self.x, wide), quantized.ALLOWED[precision]
        exact = Exact.of(float8.wide(*kind.read(self.x)), wide, fp8=True)
        return exact, exact.fp8_limit

    @cached_property
    def _exact_in_fp8(self) -> Exact:
        """Of x, gate and up by rows."""
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
    one set of weights. options: those of `Case.of`. The rest: arguments of `ffn`.
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
