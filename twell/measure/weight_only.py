"""Dense layers with int8 or int4 weights: what decoding could use instead. They quantise more.

x, h and the arithmetic stay in bf16. int8 has a scale for each row, and Inductor widens the weights
inside its product, once it searches for one (OPTIONS); torchao's weight-only configuration does the
same. int4 has a scale for each GROUP weights of a row, and torch's own product. A result is
compared with fp64 of the widened weights, so `relative_rms` does not say what quantising costs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from twell.measure.case import Call, Case
from twell.measure.check import Exact
from twell.measure.providers import DENSE_INT4, DENSE_INT8, Provider

MAX_TOKENS = 16  # above, products are not bound by reading the weights
GROUP = 128
OPTIONS = {"coordinate_descent_tuning": True, "max_autotune": True}
# Relative RMS. int4: one token with 34 active neurons had 1.9e-2 on an H200 [kernel log, FP8].
ALLOWED = {DENSE_INT8: 1e-2, DENSE_INT4: 3e-2}


class Int8(NamedTuple):
    """A weight [N, K] as integers, and a scale for each row."""

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = (weight.abs().amax(1).float() / 127).clamp(min=1e-12).to(weight.dtype)
        values = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
        return cls(values.to(torch.int8), scale)

    def copy(self) -> Int8:
        return Int8(self.values.clone(), self.scale)

    def wide(self) -> Tensor:
        return self.values.double() * self.scale.double()[:, None]

    def linear(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.values.to(x.dtype)) * self.scale


class Int4(NamedTuple):
    """A weight [N, K] as integers 0 to 15: (integer - 8) * scale, by groups of a row.

    torch's product also adds a zero for each group, which is 0 here.
    """

    values: Tensor  # as torch packs them
    groups: Tensor  # [K / GROUP, N, 2]: scale and zero
    widened: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int4:
        rows = weight.float().view(len(weight), -1, GROUP)
        scale = (rows.abs().amax(-1) / 7).clamp(min=1e-6).to(weight.dtype)
        values = (rows / scale.float()[..., None] + 8).round().clamp(0, 15)
        widened = ((values - 8) * scale.double()[..., None]).view_as(weight)
        integers = values.to(torch.int32).view_as(weight)
        if weight.is_cuda:
            pairs = (integers[:, ::2] << 4 | integers[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        groups = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
        return cls(packed, groups, widened)

    def copy(self) -> Int4:
        return Int4(self.values.clone(), self.groups.clone(), self.widened)

    def wide(self) -> Tensor:
        return self.widened

    def linear(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm
        product = product if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        return product(x, self.values, GROUP, self.groups)


def providers(case: Case) -> dict[Provider, type[Int8] | type[Int4]]:
    """Return the providers that are measured for a case."""
    _, up, _ = case.sets[0]
    fits = not any(size % GROUP for size in up.shape)
    if len(case.x) > MAX_TOKENS:
        return {}
    return {DENSE_INT8: Int8} | ({DENSE_INT4: Int4} if fits else {})


def calls(case: Case, kind: type[Int8] | type[Int4]) -> tuple[list[Call], tuple[Exact, float]]:
    """Return the calls, one for each set of weights, and what their result is compared with."""

    def layer(x: Tensor, gate, up, down) -> Tensor:
        u = up.linear(x)
        return down.linear(torch.relu(u) if gate is None else torch.relu(gate.linear(x)) * u)

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=OPTIONS)
    first = [w if w is None else kind.of(w.contiguous()) for w in case.sets[0]]
    exact = Exact.of(case.x, [weight and weight.wide() for weight in first])
    # Copies: the groups of a permuted w_down would hold other weights, and round to other integers.
    copies = ([weight and weight.copy() for weight in first] for _ in case.sets)
    several = [functools.partial(compiled, case.x, *weights) for weights in copies]
    return several, (exact, ALLOWED[DENSE_INT8 if kind is Int8 else DENSE_INT4])
