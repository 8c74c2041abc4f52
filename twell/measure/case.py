"""A case: one layer's inputs and weights, what is exact for them, and its columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from twell.measure import patterns
from twell.measure.check import BLOCK, Exact
from twell.measure.patterns import Pattern, Weights
from twell.measure.rows import require
from twell.sparse import reference
from twell.sparse.activations import RELU, Activation
from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN

WEIGHT_SETS = 8  # of a graph: eight sets of 2048 x 5632 are 550 MB, eleven caches of an H200
MODES = "stream", "graph", "eager", "compiled"  # of timing: see clock.py
GRAPH_TOKENS = 4096  # up to so many tokens the default mode is "graph"
DECODE_TOKENS = 1024  # the path "decode" is measured up to so many tokens
# Row-wise takes half a second for so many entries, and is then far behind every other path.
ROWWISE_ENTRIES = 100_000_000

Call = Callable[[], Tensor]


def check_sizes(tokens: Sequence[int], hidden_size: int, intermediate_size: int) -> None:
    """Raise ValueError for sizes that the kernels do not take."""
    require(min(tokens) >= 1, f"tokens holds {min(tokens)}; it has to be at least 1")
    unfit = f"hidden_size is {hidden_size}; the kernels need a multiple of 16"
    require(hidden_size >= 16 and hidden_size % 16 == 0, unfit)
    unfit = f"intermediate_size is {intermediate_size}; it has to be at least 1"
    require(intermediate_size >= 1, unfit)


@dataclass(frozen=True)
class Case:
    """x, sets of weights with the same activity, the exact result, and the case's columns."""

    x: Tensor
    sets: list[Weights]
    exact: Exact
    columns: dict
    act: Activation = RELU
    biases: tuple[Tensor | None, ...] = ()  # b_gate, b_up and b_down, of zeros
    merged: bool = False  # gate and up are the halves of one tensor

    @classmethod
    def of(
        cls,
        pattern: str,
        inputs: tuple[Tensor, ...],
        gated: bool,
        weight_sets: int = 1,
        act: Activation = RELU,
        bias: bool = False,
        merged: bool = False,
    ) -> Case:
        """pattern: the column; inputs: x, w_gate, w_up and w_down (not gated: w_gate is w_up)."""
        x, w_gate, w_up, w_down = inputs
        weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
        exact, biases = Exact.of(x, weights, act=act), ()
        if bias:
            b_up, b_down = x.new_zeros(len(w_up)), x.new_zeros(x.shape[1])
            biases = b_up if gated else None, b_up, b_down
        columns = {
            "tokens": len(x),
            "hidden_size": x.shape[1],
            "intermediate_size": len(w_up),
            "gated": gated,
            "dtype": str(x.dtype).removeprefix("torch."),
            "pattern": pattern,
            "active": round(float(exact.counts.double().mean()), 2),
            "active_max": int(exact.counts.max()),
            "union": round(float(exact.unions.double().mean()), 1),
        }
        sets = [weights, *(patterns.permuted(weights, seed) for seed in range(1, weight_sets))]
        if merged:
            sets = [(*torch.cat(several[:2]).chunk(2), several[2]) for several in sets]
        return cls(x, sets, exact, columns, act, biases, merged)

    @property
    def plain(self) -> bool:
        """Whether the layer has ReLU, no biases, and gate and up apart."""
        return self.act == RELU and not self.biases and not self.merged

    def __str__(self) -> str:
        c = self.columns
        return f"{c['tokens']:>6} tokens  {c['pattern']:<8} {c['active']:>7} active"

    def calls(self, function: Callable[..., Tensor], *, plain: bool = False) -> list[Call]:
        """Return a call for each set of weights; plain: as a dense layer stores them.

        That is w_down as nn.Linear has it, and merged weights [2 N, K] as one.
        """
        calls = []
        for w_gate, w_up, w_down in self.sets:
            first = [w_gate._base] if plain and self.merged else [w_gate, w_up]
            last = w_down.contiguous() if plain else w_down
            calls.append(functools.partial(function, self.x, *first, last, *self.biases))
        return calls

    def dense_calls(self, mode: str) -> list[Call]:
        """Return calls of the dense layer as a module of nn.Linear layers, as models have it."""
        weights = [(*others, w_down.contiguous()) for *others, w_down in self.sets]
        layers = [DenseLayer(self.act, some, self.biases) for some in weights]
        return [functools.partial(in_mode(layer, mode), self.x) for layer in layers]

    def path_calls(self, path: str, mode: str = "stream") -> list[Call]:
        """Return the calls of one path of the kernels, in the mode "compiled" compiled."""
        from twell.kernels import ops

        return self.calls(in_mode(functools.partial(ops.run, path, act=self.act), mode))

    def paths(self) -> list[str]:
        """Return the paths of the kernels, dense first, without those that would take too long."""
        slow = {
            "rowwise": self.exact.entries > ROWWISE_ENTRIES,
            "decode": len(self.x) > DECODE_TOKENS,
        }
        return [path for path in ("dense", "rowwise", "union", "decode") if not slow.get(path)]

    def auto_layers(
        self,
        calibration: Calibration | None = None,
        prepare: Callable[[SparseFFN], None] | None = None,
    ) -> list[SparseFFN]:
        """Return layers of backend "auto" with these weights that know this activity.

        `prepare` changes each before it gets its calibration.
        """
        c, layers = self.columns, []
        for weights in self.sets:
            sizes = c["hidden_size"], c["intermediate_size"]
            options = {"activation": self.act.name, "bias": bool(self.biases), "device": "meta"}
            layer = SparseFFN(*sizes, gated=c["gated"], backend="auto", **options)
            give(layer, weights, self.biases)
            if prepare is not None:
                prepare(layer)
            layer.calibration = calibration
            layer.observe(c["active"], c["union"], min(c["tokens"], BLOCK))
            layers.append(layer.eval())
        return layers


def merged_ffn(x: Tensor, both: Tensor, w_down: Tensor, *, act: Activation) -> Tensor:
    """The dense layer whose gate and up are one product, of both weights [2 N, K]."""
    g, u = nn.functional.linear(x, both).chunk(2, -1)
    return nn.functional.linear(act.hidden(act.gate(g), u), w_down)


class DenseLayer(nn.Module):
    """The dense layer of these weights, a baseline: its projections are nn.Linear layers."""

    def __init__(self, act: Activation, weights: Weights, biases: Sequence[Tensor | None]):
        super().__init__()
        self.act = act
        (intermediate_size, hidden_size), options = weights[1].shape, {"device": "meta"}
        gated = weights[0] is not None
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        give(self, weights, biases)

    def hidden(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.act.hidden(self.act.gate(self.up_proj(x)), None)
        g = self.act.gate(self.gate_proj(x))
        return self.act.hidden(g, self.up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x))


class DenseTraining(DenseLayer):
    """The dense layer with its L1 term: of x [M, K] y [M, K], and l1 [M] in fp32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.hidden(x)
        return self.down_proj(h), h.abs().sum(-1, dtype=torch.float32)


def give(layer: nn.Module, weights: Weights, biases: Sequence[Tensor | None]) -> None:
    """Put weights and, if there are any, biases into a layer's projections."""
    projections = layer.gate_proj, layer.up_proj, layer.down_proj
    for part, weight, bias in zip(projections, weights, biases or (None,) * 3, strict=True):
        if part is not None:
            part.weight = nn.Parameter(weight, requires_grad=False)
            part.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


def in_mode(function: Callable, mode: str) -> Callable:
    """Return the function as it is called in a mode."""
    if mode != "compiled":
        return function
    return torch.compile(function, fullgraph=True, dynamic=False)


@dataclass(frozen=True)
class Grid:
    """The layers of a command: arguments of `layer.ffn`. Raises ValueError for unfit ones."""

    tokens: Sequence[int]
    active: Sequence[float]
    patterns: Sequence[str]
    hidden_size: int | None
    intermediate_size: int
    gated: bool
    masks: Mapping[str, np.ndarray] | None
    act: Activation = RELU
    bias: bool = False
    merged: bool = False

    def __post_init__(self):
        for name in self.patterns:
            Pattern(name)
        unfit = "merged: of gated layers without biases"
        require(not self.merged or (self.gated and not self.bias), unfit)
        hidden_size = 16 if self.hidden_size is None else self.hidden_size
        check_sizes(self.tokens, hidden_size, self.intermediate_size)

    def dense(self) -> Callable[..., Tensor]:
        """Return the dense layer as a function of x and the weights of `Case.calls`, plain."""
        return functools.partial(merged_ffn if self.merged else reference.ffn, act=self.act)

    def cases(self, num_tokens: int, weight_sets: int, device: torch.device) -> Iterator[Case]:
        """Yield the cases of a number of tokens, one at a time: delete a case before the next."""
        for column, inputs in self._inputs(num_tokens, device):
            column += "" if self.act == RELU else f" {self.act.name}"
            column += " biases" if self.bias else ""
            column += " merged" if self.merged else ""
            options = self.act, self.bias, self.merged
            yield Case.of(column, inputs, self.gated, weight_sets, *options)
            del inputs
            torch.cuda.empty_cache()

    def _inputs(
        self, num_tokens: int, device: torch.device
    ) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """The column `pattern` and a layer's inputs, for each level of activity or each mask."""
        for name in self.patterns:
            if name == "recorded":
                width = self.hidden_size or 1024
                for label, mask in (self.masks or patterns.recorded_masks()).items():
                    inputs = patterns.imposed_layer(mask[:width], num_tokens, width, device=device)
                    yield f"recorded {label}", inputs
                continue
            size = num_tokens, self.hidden_size or 2048, self.intermediate_size
            for active in self.active:
                options = {"active": active, "pattern": patterns.PATTERNS[name], "device": device}
                yield name, patterns.synthetic_layer(*size, **options)
