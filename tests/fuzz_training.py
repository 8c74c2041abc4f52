"""The gradients of random cases: python -m tests.fuzz --training; see fuzz.py for the cases.

y, l1 and the gradients of every tensor and of the L1 term are compared with fp64. Where values are
integers, u, du and dg are rounded, and dh in the path by unions of a gated layer. Errors are
relative to the RMS of the result, or to the RMS it would have if no sum cancelled, whichever is
larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.fuzz import (
    FEW,
    FP32_SUM,
    LARGEST,
    TWO_UNITS,
    Case,
    Tensors,
    assert_same_bits,
    doubles,
    exact,
    layer,
    projection,
    round_to,
)
from twell.sparse.activations import RELU, Activation

# Of a heavy token one gradient is 40 times the others, and its roundings decide the relative RMS.
FEW_DECISIVE = 4


def _border(act: Activation, dtype: torch.dtype) -> float:
    """The number above which a gate's result is rounded to more than the threshold."""
    low = torch.tensor(act.threshold, dtype=torch.float64).to(dtype)
    if low > act.threshold:
        low = torch.nextafter(low, torch.zeros_like(low))
    return float(low.double() + torch.nextafter(low, torch.ones_like(low) * 1e4).double()) / 2


Terms = dict[str, tuple[Tensor, Tensor, Tensor]]


def _product(*pairs: tuple[Tensor, Tensor], add: Tensor | None = None) -> tuple[Tensor, ...]:
    """The sum of a @ b over pairs, of its absolute terms, and the root of its squared terms."""
    value = sum(a @ b for a, b in pairs)
    squares = sum((a * a) @ (b * b) for a, b in pairs)
    total = sum(a.abs() @ b.abs() for a, b in pairs)
    return value if add is None else value + add, total, squares.sqrt()


def exact_training(
    tensors: Tensors,
    dy: Tensor,
    dl1: Tensor,
    dtype: torch.dtype | None = None,
    round_dh: bool = False,
    edge: float = 0.0,
    act: Activation = RELU,
) -> Terms:
    """y, l1 and the gradient of each tensor in fp64, g rounded to x.dtype deciding the activity.

    Each with the sums of its terms' absolute values, and the roots of the sums of their squares.
    With `dtype` all roundings of the kernels, to this type. With `edge` a neuron is active above
    `edge` times the sum of the gate's absolute terms, or as much above the threshold.
    """
    t = doubles(tensors)
    gated = t["w_gate"] is not None
    first = "gate" if gated else "up"
    pre = projection(t, first)
    active = act.gate(pre.to(tensors["x"].dtype)) != 0
    if edge:
        edges = (edge * (t["x"].abs() @ t[f"w_{name}"].abs().t()) for name in (first, "up"))
        border, up_border = edges
        active = ~(pre - _border(act, tensors["x"].dtype) <= border)

    def kept(value: Tensor) -> Tensor:
        return torch.where(active, value, 0.0)

    # A gate just below zero that counts as active is positive: the L1 term has the sign of its h.
    g = kept(round_to(pre.abs() if edge else pre, dtype))
    factor = round_to(act.of_gate(g), dtype)
    u = round_to(projection(t, "up"), dtype)
    reached = active
    if act.both:
        reached = active & ~(u <= up_border) if edge else active & ~(u <= 0)
        u = torch.where(reached, u.abs() if edge else u, 0)
    h = kept(round_to(factor * u, dtype)) if gated else factor
    dy, dl1 = dy.double(), dl1.double()
    dh = dy @ t["w_down"]
    dh = kept((round_to(dh, dtype) if round_dh and gated else dh) + h.sign() * dl1[:, None])
    dh = dh if gated else round_to(dh, dtype)
    through = [part if dtype is None else part.float() for part in (dh * u if gated else dh, g)]
    dg = through[0] * (2 * through[1]) if act.squared else through[0]
    dg = kept(round_to(dg.double(), dtype))
    du = dg
    if gated:
        du = torch.where(reached, round_to(dh * factor, dtype), 0.0)
    l1 = h.abs().sum(1)
    results = {
        "y": _product((h, t["w_down"].t()), add=t["b_down"]),
        "l1": (l1, l1, l1),
        "x": _product((du, t["w_up"]), *([(dg, t["w_gate"])] if gated else [])),
        "w_up": _product((du.t(), t["x"])),
        "w_down": _product((dy.t(), h)),
    }
    if gated:
        results["w_gate"] = _product((dg.t(), t["x"]))
    for name, part in (("b_gate", dg), ("b_up", du), ("b_down", dy)):
        if tensors[name] is not None:
            results[name] = part.sum(0), part.abs().sum(0), part.square().sum(0).sqrt()
    return results


@dataclass
class Step:
    """One training step of a case: its inputs, and its results from the kernels."""

    case: Case
    path: str
    tensors: Tensors
    dy: Tensor
    dl1: Tensor
    mask: Tensor

    @classmethod
    def of(cls, case: Case, path: str, device: torch.device | str) -> Step:
        g = torch.Generator(device).manual_seed(case.seed + 1)
        given = dict(generator=g, device=device)
        dy = torch.randn(case.num_tokens, case.hidden_size, **given)
        dl1 = 0.1 * torch.randn(case.num_tokens, **given)  # more would cancel in sums over tokens
        if case.values == "integer":
            dy, dl1 = dy.round(), (10 * dl1).round()
        mask = torch.rand(case.num_tokens, **given) < 0.7
        return cls(case, path, layer(case, device), dy.to(case.dtype), dl1, mask)

    def run(self, capacity: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The results of `sparse_train`, and y, l1 and each gradient by name."""
        from tests.factories.ops import train

        given = {n: t.detach().requires_grad_() for n, t in self.tensors.items() if t is not None}
        options = {"token_mask": self.mask, "act": self.case.act}
        trained = train(self.path, capacity, **{**self.tensors, **given}, **options)
        outputs, weights = [trained.y, trained.l1], [self.dy, self.dl1]
        gradients = torch.autograd.grad(outputs, list(given.values()), weights)
        results = {"y": trained.y.detach(), "l1": trained.l1.detach()}
        for name, gradient in zip(given, gradients, strict=True):
            assert gradient.shape == given[name].shape and gradient.dtype == self.case.dtype, name
            results[name] = gradient
        return trained, results

    def exact(self, *roundings, edge: float = 0.0) -> Terms:
        given = self.tensors, self.dy, self.dl1
        return exact_training(*given, *roundings, edge=edge, act=self.case.act)


def check_training(
    case: Case, device: torch.device | str, path: str, beyond: bool = False
) -> float:
    """Largest relative RMS error of y, l1 and the gradients of a case (integer values: 0).

    beyond: also compute a step with less capacity than it needs, whose results are wrong. Raises
    AssertionError if a result is wrong.
    """
    case = replace(case, fp8=False)
    if path == "hybrid":
        case = replace(case, activation="relu", threshold=0.0)
    step = Step.of(case, path, device)
    trained, results = step.run(case.intermediate_size)
    if beyond and trained.needed > 1:
        step.run(1 + case.seed % (int(trained.needed) - 1))
    if trained.y.is_cuda:  # the interpreter runs programs one after the other
        again, repeated = step.run(max(int(trained.needed), 1))
        message = "two calls with different capacities, two results"
        assert_same_bits((*trained, *results.values()), (*again, *repeated.values()), message)
    active = exact(step.tensors, act=case.act)[0].to(case.dtype) != 0
    if case.values == "integer":
        assert torch.equal(trained.token_counts, active.sum(1).int())
        assert torch.equal(trained.neuron_counts, (active & step.mask[:, None]).sum(0).int())
    total = int(trained.token_counts.sum())
    assert total <= int(trained.needed) * case.num_tokens or path != "union"
    finite = step.tensors["x"].isfinite().all(1)
    if case.nonfinite:
        # As in a dense layer it may reach all weights' gradients; of y and dx only its own row.
        expected = step.exact()["y"][0]
        assert torch.equal(results["y"].isnan().any(1), expected.isnan().any(1))
        results = {name: results[name][finite] for name in ("y", "x")}
    rows = finite if case.nonfinite else slice(None)
    return _compare(step, results, rows, int(active[finite].sum()))


def _decisive(values: Tensor) -> float:
    """How many equally large values would decide the norm as these do; nan without a norm."""
    squares = values.square()
    return float(squares.sum() ** 2 / squares.square().sum())


def _compare(step: Step, results: dict[str, Tensor], rows, num_active: int) -> float:
    """The largest error of `results`, which hold only `rows` of a step's."""
    case = step.case
    expected = step.exact()
    strict = step.exact(case.dtype, step.path == "union")
    # A gate within the rounding of fp32 sums from zero may be active or not; either is right.
    fewest, most = (step.exact(edge=edge) for edge in (FP32_SUM, -FP32_SUM))
    worst = 0.0
    for name, value in results.items():
        right, bound, _ = (part[rows] for part in strict[name])
        right = right if name == "l1" else right.to(case.dtype).double()
        if case.values == "integer":
            known = bound <= LARGEST
            same = torch.equal(value.double()[known], right[known])
            assert same, f"{name} differs from the rounded result"
            continue
        few = num_active < FEW or int((right != 0).sum()) < FEW or _decisive(right) < FEW_DECISIVE
        limit = TWO_UNITS[case.dtype] if few else case.tolerance
        right = right if few else expected[name][0][rows]
        fits = right.to(value.dtype).isfinite()  # fp16 overflows
        sizes = expected[name][0], expected[name][2]
        scale = max(float(part[rows][fits].norm()) for part in sizes)
        slack = float((most[name][0] - fewest[name][0])[rows][fits].norm())
        error = max(float((value.double() - right)[fits].norm()) - slack, 0.0) / (scale or 1.0)
        assert error <= limit, f"{name}: relative RMS {error:.2e} is above {limit:.2e}"  # so is NaN
        worst = max(worst, 0.0 if few else error)
    return worst
