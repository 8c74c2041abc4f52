"""The activations: how the gate g and the up projection u of a neuron make its h. And `Weights`.

This module is the leaf that the kernels share with the library.

    name    g                    h, gated       h, non-gated    models
    relu    relu(a)              g u            g               the paper's; OPT, T5 v1.0
    relu2   relu(a)              g^2 u          g^2             Nemotron, nanochat
    drelu   relu(a)              g relu(u)      -               TurboSparse
    silu    silu(a)              g u            g               Llama; nothing is zero, dense only

a = x w^T + b of the projection that decides which neurons are active (`SparseFFN.first`). A neuron
is active for a token where g != 0. With a threshold t, g is a where a > t and else 0 (FATReLU,
ProSparse); silu takes none.

Rounding. a is rounded to the storage type. It is compared with t in fp32; t is not rounded. So
every path has the same active neurons. g^2 is computed in fp32 and rounded: these are the bits of
torch.relu(a).square(). In fp16 it overflows to inf from g = 256 on, and it is 0 below 1.7e-4,
where the neuron counts as active all the same. bf16 has fp32's range. NaN is active.

Gradients. da = dh U s, du = dh G, for h = G U and s = dG/dg (1, or 2 g). Both are 0 where the
neuron is inactive; du of drelu also where u <= 0.

A norm of h before the down projection, as in BitNet, is not among these: the sparse paths never
hold a whole row of h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(tensor: Tensor) -> Tensor:
    """The type to accumulate in: fp64 stays, anything else becomes fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def add_bias(y: Tensor, b: Tensor | None) -> Tensor:
    return y if b is None else y + b


@dataclass(frozen=True)
class Activation:
    """One row of the table above, and its threshold. `get_activation` makes one.

    squared: h has g^2. both: h has relu(u). sparse: whether inactive neurons are exactly 0.
    """

    name: str
    squared: bool = False
    both: bool = False
    sparse: bool = True
    threshold: float = 0  # no 0.0: torch.compile would make a symbol of it and compile twice

    def gate(self, a: Tensor) -> Tensor:
        """g of the first projection's rounded result a, of any shape."""
        if not self.sparse:
            return F.silu(a)
        # Not F.threshold, which does not document the type of its comparison.
        return torch.where(wide(a) <= self.threshold, 0, a) if self.threshold else torch.relu(a)

    def of_gate(self, g: Tensor) -> Tensor:
        """The factor G of h, in g's type."""
        return g.square() if self.squared else g

    def of_up(self, u: Tensor) -> Tensor:
        """The factor U of h, in u's type."""
        return torch.relu(u) if self.both else u

    def hidden(self, g: Tensor, u: Tensor | None = None) -> Tensor:
        """h of g and, in a gated layer, u."""
        return self.of_gate(g) if u is None else self.of_gate(g) * self.of_up(u)


RELU = Activation("relu")
ACTIVATIONS = {
    "relu": RELU,
    "relu2": Activation("relu2", squared=True),
    "drelu": Activation("drelu", both=True),
    "silu": Activation("silu", sparse=False),
}


def get_activation(
    name: str, threshold: float = 0.0, *, gated: bool = True, sparse: bool = False
) -> Activation:
    """Return an activation by name.

    Raises ValueError for one that does not exist, and with `sparse` for one without zeros.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    result = ACTIVATIONS[name]
    if sparse and not result.sparse:
        raise ValueError(f"activation {name!r} makes no zeros, so no sparse path can compute it")
    if result.both and not gated:
        raise ValueError(f"activation {name!r} needs a gate: it takes ReLU on both branches")
    if not 0 <= threshold < math.inf:
        raise ValueError(f"threshold is {threshold}; it has to be a finite number, 0 or more")
    if threshold and not result.sparse:
        raise ValueError(f"threshold is {threshold}; activation {name!r} takes none")
    return replace(result, threshold=float(threshold)) if threshold else result


class Weights(NamedTuple):
    """The weights of one layer as the kernels read them, all bf16 or all fp16, or in FP8.

    w_gate (None in a non-gated layer), w_up and w_down_t, the transpose of w_down: [N, K]
    contiguous. b_gate and b_up [N], b_down [K], or None. FP8 layers have w_gate and w_up in
    float8_e4m3fn, with scales s_gate and s_up [N] fp32; all other tensors are bf16. down_fp8:
    values [K, N] and scales [K] of w_down in FP8, for dense passes. act: how g and u make h.
    """

    w_gate: Tensor | None
    w_up: Tensor
    w_down_t: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None
    s_gate: Tensor | None = None
    s_up: Tensor | None = None
    down_fp8: tuple[Tensor, Tensor] | None = None
    act: Activation = RELU

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights, biases and scales, in order."""
        return self[:8]

    @property
    def gated(self) -> bool:
        return self.w_gate is not None

    @property
    def first(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projection that decides which neurons are active."""
        return (self.w_gate, self.b_gate) if self.gated else (self.w_up, self.b_up)

    @property
    def first_scale(self) -> Tensor | None:
        """The scales of that weight."""
        return self.s_gate if self.gated else self.s_up
