"""Whether a result is correct: a layer against fp64, a model's hidden states against fp32.

The exact layer is written out here once more, on purpose. `reference.ffn` is itself a provider that
is checked, and gates near zero need the gate before its ReLU, and u, which the reference hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twell.measure.patterns import Weights
from twell.sparse import reference

TOLERANCE = {
    # Relative RMS of a bf16 layer or of a tensor of its step; dense products are at 3e-3 to 4e-3.
    "layer": 5e-3,
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
BLOCK = 64  # consecutive tokens of a union
CHUNK = 4096  # tokens computed in fp64 at a time
SAMPLE = 4096  # tokens of a batch that are compared with fp32, and rows of each layer with fp64


@dataclass(frozen=True)
class Exact:
    """A layer's result in fp64, its activity in the type of its inputs, and perhaps its gradients.

    tensors: y [M, K]; with gradients also l1 [M], dx [M, K], dw_gate and dw_up [N, K] (a layer
    without a gate has no dw_gate) and dw_down [K, N]. counts [M] int64: active neurons of each
    token. unions int64: active neurons of each block of 64 tokens. touched: neurons active for any
    token. either: by tensor, the norm of the part that gates contribute which are so near to zero
    that sums in fp32 may come out on either side of it.
    """

    tensors: dict[str, Tensor]
    counts: Tensor
    unions: Tensor
    touched: int
    either: dict[str, float]

    @classmethod
    def of(
        cls, x: Tensor, weights: Weights, dy: Tensor | None = None, dl1: Tensor | None = None
    ) -> Exact:
        """Compute it, CHUNK tokens at a time; with the gradients of sum(y dy) + sum(l1 dl1)."""
        with_gradients, wide = dy is not None, {}
        for name, weight in zip(("w_gate", "w_up", "w_down"), weights, strict=True):
            if weight is not None:
                wide[name] = weight.detach().to(torch.float64, copy=True)
                wide[name].requires_grad_(with_gradients)
        rows, edges = [], {}
        for start in range(0, len(x), CHUNK):
            chunk = slice(start, start + CHUNK)
            given = (dy[chunk].double(), dl1[chunk].double()) if with_gradients else ()
            with torch.set_grad_enabled(with_gradients):
                rows.append(_chunk(x[chunk], wide, edges, *given))
        tensors = {name: torch.cat([chunk[name] for chunk in rows]) for name in rows[0]}
        counts, unions = tensors.pop("counts"), tensors.pop("unions")
        touched = int(tensors.pop("touched").view(len(rows), -1).any(0).sum())
        if with_gradients:
            tensors |= {f"d{name}": weight.grad for name, weight in wide.items()}
        either = {name: float(edge.norm()) for name, edge in edges.items()}
        return cls(tensors, counts, unions, touched, either)

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
        return self._error("y", y, max(self._limit("layer"), allowed), what)

    def check_step(self, tensors: dict[str, Tensor], what: str) -> tuple[str, float]:
        """Return the name and the relative RMS error of the worst tensor, of those in `tensors`.

        Raises ArithmeticError with the name of a tensor above the tolerance.
        """
        limit = self._limit("step")
        errors = {
            name: self._error(name, tensors[name], limit, f"{name} of {what}")
            for name in self.tensors
        }
        return max(errors.items(), key=lambda item: item[1])

    def _limit(self, kind: str) -> float:
        few = self.entries < FEW_ENTRIES
        return TOLERANCE[f"{kind} of few entries" if few else "layer"]

    def _error(self, name: str, result: Tensor, limit: float, what: str) -> float:
        exact = self.tensors[name]
        scale = float(exact.norm()) or 1.0  # without active neurons all are zero
        error = float((result.double() - exact).norm()) / scale
        limit = math.hypot(limit, self.either.get(name, 0.0) / scale)
        if not error <= limit:
            raise ArithmeticError(f"{what} is wrong: relative RMS {error:.2e}, allowed {limit:.2e}")
        return error


def _chunk(
    x: Tensor, wide: dict[str, Tensor], edges: dict[str, Tensor], *gradients: Tensor
) -> dict[str, Tensor]:
    """The tensors of some tokens; gradients of weights and EDGE's part are added to theirs."""
    rows = x.detach().to(torch.float64, copy=True).requires_grad_(bool(gradients))
    first = "w_gate" if "w_gate" in wide else "w_up"
    gate = rows @ wide[first].t()
    active = torch.relu(gate.detach()).to(x.dtype) != 0  # as rounded to x's type
    u = rows @ wide["w_up"].t() if "w_gate" in wide else torch.ones_like(gate)
    h = torch.where(active, gate, 0.0) * u
    y = h @ wide["w_down"].t()
    unions = torch.stack([block.any(0).sum() for block in active.split(BLOCK)])
    tensors = {"counts": active.sum(1), "unions": unions, "touched": active.any(0)}
    if not gradients:
        return tensors | {"y": y}
    h.retain_grad()
    l1 = (h * u.detach().sign()).sum(1)  # |h|, with its full gradient where the gate is at zero
    torch.autograd.backward((y, l1), gradients)
    with torch.no_grad():
        near = gate.abs() <= EDGE * (rows.abs() @ wide[first].abs().t())
        edge = h.grad * near * u
        edges[f"d{first}"] = edges.get(f"d{first}", 0.0) + edge.t() @ rows
        norms = [edges.get("dx", edge.new_zeros(1)), (edge @ wide[first]).norm()[None]]
        edges["dx"] = torch.cat(norms)
    return tensors | {"y": y.detach(), "l1": l1.detach(), "dx": rows.grad}


def relative(result: Tensor, exact: Tensor) -> float:
    """Return the relative RMS error of a result; sums are in fp32, 2^24 numbers at a time."""
    wrong = size = 0.0
    for a, b in zip(result.reshape(-1).split(2**24), exact.reshape(-1).split(2**24), strict=True):
        wrong += float((a.float() - b.float()).square().sum())
        size += float(b.float().square().sum())
    return math.sqrt(wrong / size) if size else math.sqrt(wrong)


class Judge:
    """Compares results with `exact`, in fp32, and with the first one, the dense provider's.

    `cut` takes the part of a result that `exact` is of.
    """

    def __init__(self, what: str, exact: Tensor, cut: Callable[[Tensor], Tensor]):
        self.what, self.exact, self.cut = what, exact, cut
        self.first: Tensor | None = None
        self.error = math.nan

    def check(self, name: str, result: Tensor) -> float:
        """Return the relative RMS against fp32; ArithmeticError for one above the limits."""
        error = relative(self.cut(result), self.exact)
        limit = TOLERANCE["hidden states"] if self.first is None else AS_DENSE * self.error
        self._require(error, limit, f"{self.what} of {name} are wrong")
        if self.first is None:
            self.first, self.error = result, error
        else:
            distance, limit = relative(result, self.first), FROM_DENSE * self.error
            self._require(distance, limit, f"{self.what} of {name} differ from dense ones")
        return error

    def _require(self, error: float, limit: float, message: str) -> None:
        if not error <= limit:
            raise ArithmeticError(f"{message}: relative RMS {error:.2e}, allowed {limit:.2e}")


def allowed(exact: Exact, rows: Tensor, weights: Weights) -> float:
    """Return the relative RMS that plain products allow a layer (TOLERANCE["trained layer"])."""
    plain = relative(reference.ffn(rows, *weights), exact.y)
    return min(AS_DENSE * plain, TOLERANCE["trained layer"])


def check_layers(ffns: list[nn.Module], run: Callable[[], object], what: str) -> float:
    """Return the worst relative RMS of the layers' outputs on SAMPLE tokens of a pass.

    `run` is the pass. Each layer computes all tokens, by its present backend, not compiled. Raises
    ArithmeticError, with the layer, above the tolerance.
    """
    errors = []

    def compare(index: int) -> Callable:
        def hook(ffn: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            rows, outputs = inputs[0].flatten(0, -2), y.flatten(0, -2)
            sample = torch.arange(0, len(rows), max(1, len(rows) // SAMPLE), device=rows.device)
            gate = ffn.gate_proj and ffn.gate_proj.weight
            weights = gate, ffn.up_proj.weight, ffn.down_proj.weight
            exact = Exact.of(rows[sample], weights)
            limit = allowed(exact, rows[sample], weights)
            errors.append(exact.check(outputs[sample], f"layer {index} of {what}", limit))

        return hook

    hooks = [ffn.register_forward_hook(compare(index)) for index, ffn in enumerate(ffns)]
    try:
        run()
    finally:
        for handle in hooks:
            handle.remove()
    return max(errors, default=0.0)
