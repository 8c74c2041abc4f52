"""A change of neurons: the layer's output takes factor * h + value in place of h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Edit(NamedTuple):
    """The factor and the value of each neuron, both [N]. 1 and 0: unchanged; 0 and 0: silent.

    Without a value it is 0. A neuron with factor 0 gets no gradient, and its h may be infinite.
    """

    factor: Tensor
    value: Tensor | None = None

    def scaled(self, neurons: list[int], factor: Tensor) -> Edit:
        """Return this edit, then `factor` times the result."""
        factors = torch.ones_like(self.factor)
        factors[neurons] = factor.to(factors)
        value = None if self.value is None else self.value * factors
        return Edit(self.factor * factors, value)

    def set_to(self, neurons: list[int], value: Tensor) -> Edit:
        """Return this edit with the value in place of these neurons' h."""
        edit = self.scaled(neurons, torch.zeros(()))
        values = torch.zeros_like(edit.factor) if edit.value is None else edit.value
        values[neurons] = value.to(values)
        return Edit(edit.factor, values)

    def of_h(self, h: Tensor) -> Tensor:
        """Return the changed h [..., N]."""
        factor = self.factor.to(h.device)
        value = torch.zeros_like(factor) if self.value is None else self.value.to(h.device)
        return torch.where(factor == 0, value, h * factor + value).to(h.dtype)

    def of_down(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weight [K, N] and bias [K] of down that give the same output from h itself."""
        factor = self.factor.to(weight.device)
        scaled = torch.where(factor == 0, 0, weight * factor).to(weight.dtype)
        if self.value is not None:
            value = self.value.to(weight.device)
            moved = (weight.to(value.dtype) @ value).to(weight.dtype)
            bias = moved if bias is None else bias + moved
        return scaled, bias
