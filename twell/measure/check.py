"""Checks results: a layer against fp64, a model's hidden states against fp32.

The exact layer does not use `reference.ffn`, which is itself a provider and hides the gate before
its ReLU; gates near zero need that value.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twell.sparse import float8, reference
from twell.sparse.activations import RELU, Activation
from twell.sparse.calibration import BLOCK

Weights = tuple[Tensor | None, Tensor, Tensor]
TOLERANCE = {
    # Relative RMS of a bf16 layer or of a tensor of its step; dense products are at 3e-3 to 4e-3.
    "layer": 5e-3,
    "step": 5e-3,
    # Below FEW_ENTRIES errors do not average: each of g, u, h and y may be off by half a unit in
    # the last place, and in a step each of g, u, dh, its L1 part, dg and dx.
    "layer of few entries": (1 + 2**-9) ** 4 - 1,
    "step of few entries": (1 + 2**-9) ** 6 - 1,
    # The terms of a trained layer cancel, so plain products err more, and a path may err AS_DENSE
    # times as much; but never above this.
    "trained layer": 2e-2,
    # Relative RMS of the dense model's last hidden states against fp32: rounding adds up over
    # layers, to 0.5% with 4 layers and 1.5% with 38.
    "hidden states": 5e-2,
    # As "hidden states", of a model whose linear layers are in FP8, against its bf16 weights; and
    # of a dense layer in FP8 against fp64, which does not quantise h.
    "FP8 hidden states": 0.1,
    "FP8 layer": 5e-2,
    # Rounded to FP8, each h may be off by half a unit in the last place, too.
    "FP8 layer of few entries": (1 + 2**-4) * (1 + 2**-9) ** 4 - 1,
    # Relative, of a sparse optimiser step against dense ones.
    "loss": 1e-2,
    "gradient norm": 3e-2,
}
FEW_ENTRIES = 400
# Another way to compute the same may err AS_DENSE times as much as dense, and may differ from dense
# by FROM_DENSE times the error of dense: by both errors.
AS_DENSE, FROM_DENSE = 1.25, 2.0
# Sums in fp32 err by about this share of the sum of their terms' absolute values. A gate nearer to
# zero is active or not by chance, and has its full gradient if it is.
EDGE = 2.0**-21
# The same for FP8 products, which tensor cores sum with 13 bits behind the point. With few active
# entries one sum may decide, whose K / 32 roundings may all go to the same side.
FP8_SUM, FP8_SUM_OF_FEW = 2.0**-13, 2.0**-10
CHUNK = 4096  # tokens computed in fp64 at a time
SAMPLE = 4096  # tokens of a batch that are compared with fp32, and rows of each layer with fp64


@dataclass(frozen=True)
class Exact:
    """A layer's result in fp64, its activity in the type of its inputs, and perhaps its gradients.

    tensors: y [M, K]; with gradients also l1 [M], dx [M, K], dw_gate and dw_up [N, K] (a layer
    without a gate has no dw_gate) and dw_down [K, N]. counts [M] int64: active neurons of each
    token. unions int64: active neurons of each block. either: by tensor, the norm of the part from
    gates that rounding may put on either side of zero; for y, the norm of the change by errors of
    FP8 sums. slack: the factor of the tolerance.
    """

    tensors: dict[str, Tensor]
    counts: Tensor
    unions: Tensor
    either: dict[str, float]
    slack: float = 1.0

    @classmethod
    def of(
        cls,
        x: Tensor,
        weights: Weights,
        dy: Tensor | None = None,
        dl1: Tensor | None = None,
        act: Activation = RELU,
        fp8: bool = False,
    ) -> Exact:
        """Compute it, CHUNK tokens at a time; with the gradients of sum(y dy) + sum(l1 dl1).

        Gradients are of ReLU. fp8: whether tensor cores sum products of FP8 values (ReLU only).
        """
        steps = dy is not None
        named = zip(("w_gate", "w_up", "w_down"), weights, strict=True)
        wide = {n: w.detach().double().requires_grad_(steps) for n, w in named if w is not None}
        first = "w_gate" if "w_gate" in wide else "w_up"
        parts: dict[str, list[Tensor]] = {}
        sums = edges = 0.0
        for index, rows in enumerate(x.detach().split(CHUNK)):
            rows = rows.double().requires_grad_(steps)
            with torch.set_grad_enabled(steps):
                gate = rows @ wide[first].t()
                active = act.gate(gate.detach().to(x.dtype)) != 0
                u = rows @ wide["w_up"].t() if first == "w_gate" else torch.ones_like(gate)
                h = act.of_gate(torch.where(active, gate, 0.0)) * act.of_up(u)
                y, l1 = h @ wide["w_down"].t(), (h * u.sign()).sum(1)
            unions = torch.stack([block.any(0).sum() for block in active.split(BLOCK)])
            results = {"y": y.detach(), "counts": active.sum(1), "unions": unions}
            if fp8:
                sums += _changed_by_sums(rows, wide, first, gate, u)
            if steps:
                h.retain_grad()
                dys, dl1s = (t.split(CHUNK)[index].double() for t in (dy, dl1))
                torch.autograd.backward([y, l1], [dys, dl1s])
                given, weight = rows.detach(), wide[first].detach()
                near = gate.detach().abs() <= EDGE * (given.abs() @ weight.abs().t())
                edge = h.grad * u.detach() * near
                edges = edges + edge.t() @ given
                results |= {"l1": l1.detach(), "dx": rows.grad}
                results["edge"] = (edge @ weight).norm()[None]
            for name, result in results.items():
                parts.setdefault(name, []).append(result)
        tensors = {name: torch.cat(several) for name, several in parts.items()}
        counts, unions = tensors.pop("counts"), tensors.pop("unions")
        either = {}
        if steps:
            tensors |= {f"d{name}": weight.grad for name, weight in wide.items()}
            either = {"dx": float(tensors.pop("edge").norm()), f"d{first}": float(edges.norm())}
        if fp8:
            few = int(counts.sum()) < FEW_ENTRIES
            either["y"] = (FP8_SUM_OF_FEW if few else FP8_SUM) * math.sqrt(sums)
        # The error of a g that is squared counts twice.
        return cls(tensors, counts, unions, either, 1.5 if act.squared else 1.0)

    @property
    def y(self) -> Tensor:
        return self.tensors["y"]

    @property
    def entries(self) -> int:
        """Active neurons, summed over tokens."""
        return int(self.counts.sum())

    def check(self, y: Tensor, what: str, allowed: float = 0.0) -> float:
        """Return the relative RMS error of y.

        Raises ArithmeticError above the tolerance, or above `allowed` where that is more.
        """
        return self._error("y", y, max(self.limit("layer"), allowed), what)

    def check_step(
        self, tensors: dict[str, Tensor], what: str, allowed: float = 0.0
    ) -> tuple[str, float]:
        """Return name and relative RMS error of the worst tensor; ArithmeticError as `check`."""
        limit = max(self.limit("step"), allowed)
        errors = {n: self._error(n, tensors[n], limit, f"{n} of {what}") for n in self.tensors}
        return max(errors.items(), key=lambda item: item[1])

    def limit(self, kind: str) -> float:
        """Return the tolerance of "layer", "step" or "FP8 layer"; it is larger for few entries."""
        few = " of few entries" if self.entries < FEW_ENTRIES else ""
        return self.slack * TOLERANCE[kind + few]

    def _error(self, name: str, result: Tensor, limit: float, what: str) -> float:
        error, scale = relative(result, self.tensors[name]), float(self.tensors[name].norm())
        near = self.either.get(name, 0.0) / (scale or 1.0)
        accept(error, math.hypot(limit, near), f"{what} is wrong")
        return error


def _changed_by_sums(
    rows: Tensor, wide: dict[str, Tensor], first: str, gate: Tensor, u: Tensor
) -> float:
    """Return the squared norm of the change of y if sums err by their terms' absolute sum."""
    error = rows.abs() @ wide[first].abs().t()
    changed = (error * u).square() * (gate > -FP8_SUM * error)
    if first == "w_gate":
        changed += (gate.relu() * (rows.abs() @ wide["w_up"].abs().t())).square()
    return float((changed @ wide["w_down"].square().sum(0)).sum())


def accept(error: float, limit: float, message: str) -> None:
    """Raise ArithmeticError, with the message, for an error above its limit."""
    if not error <= limit:
        raise ArithmeticError(f"{message}: relative RMS {error:.2e}, allowed {limit:.2e}")


def relative(result: Tensor, exact: Tensor) -> float:
    """Return the relative RMS error of a result (inf for a NaN); the norm where `exact` is zero."""
    dtype, norms = torch.promote_types(exact.dtype, torch.float32), []
    parts = (tensor.reshape(-1).split(2**24) for tensor in (result, exact))  # little memory
    for one, other in zip(*parts, strict=True):
        other = other.to(dtype)
        norms.append((float((one.to(dtype) - other).norm()), float(other.norm())))
    wrong, size = (math.hypot(*values) for values in zip(*norms, strict=True))
    return math.inf if math.isnan(wrong) else wrong / (size or 1.0)


def trained_limit(exact: Exact, rows: Tensor, weights: Weights) -> float:
    """Return the limit of a trained layer's error, by the error of plain products."""
    plain = relative(reference.ffn(rows, *weights), exact.y)
    return min(AS_DENSE * plain, TOLERANCE["trained layer"])


def exact_layer(layer: nn.Module, rows: Tensor, path: str | None = None) -> tuple[Exact, float]:
    """Return the exact result of a layer's rows, with its present weights, and its limit.

    By the path "dense" a quantised SparseFFN has its copy of down in FP8.
    """
    down = getattr(layer, "dense_down", None) if path == "dense" else None
    parts = [layer.gate_proj, layer.up_proj, down or layer.down_proj]
    in_fp8 = [isinstance(part, float8.Float8Linear) for part in parts]
    weights = [
        part and (float8.wide(*part.tensors[:2]) if quantized else part.weight)
        for part, quantized in zip(parts, in_fp8, strict=True)
    ]
    if not in_fp8[1]:
        exact = Exact.of(rows, weights)
        return exact, trained_limit(exact, rows, weights)
    read = getattr(layer, "read", float8.quantize)
    exact = Exact.of(float8.wide(*read(rows)), weights, fp8=True)
    return exact, (exact.limit("FP8 layer") if in_fp8[2] else TOLERANCE["trained layer"])


@contextlib.contextmanager
def hooked(ffns: Iterable[nn.Module], hook: Callable, before: bool = False) -> Iterator[None]:
    """Call hook(index, layer, inputs, y) after each layer, or hook(index, layer, inputs) before."""
    with contextlib.ExitStack() as hooks:
        for index, ffn in enumerate(ffns):
            add = ffn.register_forward_pre_hook if before else ffn.register_forward_hook
            hooks.callback(add(functools.partial(hook, index)).remove)
        yield


def check_layers(
    ffns: Iterable[nn.Module], run: Callable[[], object], what: str, allowed: float = 0.0
) -> float:
    """Return the worst relative RMS of the layers' outputs in the pass `run`, on a sample of rows.

    Raises ArithmeticError, with the layer, above the tolerance and above `allowed`.
    """
    errors = []

    def compare(index: int, ffn: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        rows = inputs[0].flatten(0, -2)
        sample = torch.arange(0, len(rows), max(1, len(rows) // SAMPLE), device=rows.device)
        exact, limit = exact_layer(ffn, rows[sample])
        outputs, limit = y.flatten(0, -2)[sample], max(limit, allowed)
        errors.append(exact.check(outputs, f"layer {index} of {what}", limit))

    with hooked(ffns, compare):
        run()
    return max(errors, default=0.0)
