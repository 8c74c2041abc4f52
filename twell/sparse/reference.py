"""The feed-forward layer in plain torch: the formula of every kernel, one function a computation.

    function                    computes                              kernel
    ffn                         the dense layer, every activation     kernels/dense.py
    gate_pack                   the gate, packed                      kernels/gate.py
    from_gate                   one token after the other             kernels/rowwise.py, decode.py
                                blocks of tokens                      kernels/union.py, few.py
    union_train                 a training step by unions             kernels/training.py
                                the paper's, with blocks of 1 token   kernels/paper/hybrid.py

A format of twell.sparse.formats holds the active neurons of each token. The functions loop over
tokens or blocks, and read the weight rows of active neurons and no others. Nothing is tuned.

Shapes: M tokens, K = hidden_size, N = intermediate_size. x [M, K]; w_gate and w_up [N, K] (as
nn.Linear stores them); w_down [K, N]; b_gate and b_up [N]; b_down [K]. A layer without w_gate is
non-gated. All functions raise ValueError for shapes that do not fit.

Precision: sums are in fp32 (fp64 inputs stay fp64). Values are rounded to x.dtype where a kernel
stores them: g, and in training u, h and their gradients. The fused inference kernel does not store
u and h.

Non-finite values: a NaN in a row of x reaches that row of y and no other, since a NaN gate counts
as active. An inf or NaN in weights of a neuron that is inactive for a token does not reach the
token. There are two exceptions: w_down by unions, where a neuron that is active for one token of a
block is multiplied by 0 for the others, and gradients, where the gate is a dense product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from twell.sparse.activations import RELU, Activation, add_bias, wide
from twell.sparse.formats import SparseRows, TwELL, check_tensor


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return add_bias(wide(x) @ wide(w).t(), b)


class Layer(NamedTuple):
    """The tensors of a layer, in the order of all functions that take a whole one."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None

    @classmethod
    def checked(cls, *tensors: Tensor | None, **named: Tensor | None) -> Layer:
        """Return the layer of these arguments. Raises ValueError for shapes that do not fit."""
        layer = cls(*tensors, **named)
        if layer.x.dim() != 2:
            raise ValueError(f"x has shape {tuple(layer.x.shape)}, expected [tokens, hidden_size]")
        if layer.w_gate is None and layer.b_gate is not None:
            raise ValueError("b_gate is given without w_gate; a non-gated layer's bias is b_up")
        n, k = layer.w_up.shape[0], layer.x.shape[1]
        shapes = [layer.x.shape, (n, k), (n, k), (k, n), (n,), (n,), (k,)]
        for name, tensor, shape in zip(cls._fields, layer, shapes, strict=True):
            if tensor is not None:
                check_tensor(name, tensor, tuple(shape))
        return layer

    @property
    def first(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projection that decides which neurons are active."""
        return (self.w_up, self.b_up) if self.w_gate is None else (self.w_gate, self.b_gate)


def activations(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    act: Activation = RELU,
) -> tuple[Tensor, Tensor]:
    """Return (g, h) [M, N] of the dense layer; activations.py says how a makes g, and g and u h.

    A neuron is active for a token where g != 0.
    """
    u = F.linear(x, w_up, b_up)
    g = act.gate(u if w_gate is None else F.linear(x, w_gate, b_gate))
    return g, act.hidden(g, None if w_gate is None else u)


def ffn(*tensors: Tensor | None, act: Activation = RELU, **named: Tensor | None) -> Tensor:
    """Return the dense layer y [M, K] = h w_down^T + b_down in torch's operators, differentiable.

    Takes x, w_gate, w_up, w_down, b_gate, b_up, b_down (biases may be left out) of any dtype; g, u
    and h (`activations`) are rounded to it. Paper: the feed-forward block.
    """
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = Layer.checked(*tensors, **named)
    _, h = activations(x, w_gate, w_up, b_gate, b_up, act)
    return F.linear(h, w_down, b_down)


# Inference: one kernel for the gate, which packs, and one for all the rest.


def gate_pack(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    tile_n: int = 256,
    compression: int = 8,
    act: Activation = RELU,
) -> TwELL:
    """g [M, N] of x w^T + b rounded to x.dtype, packed; w [N, K] is `Weights.first`.

    Raises ValueError for tile sizes that `TwELL.pack` refuses. Paper: inference, gate kernel.
    """
    return TwELL.pack(act.gate(linear(x, w, b).to(x.dtype)), tile_n, compression)


def _unions(active: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each block as a slice, and the neurons that any of them has active.

    No tokens are one block, through which gradients reach the weights.
    """
    for start in range(0, max(len(active), 1), block):
        tokens = slice(start, start + block)
        yield tokens, active[tokens].any(0).nonzero().flatten()


def from_gate(
    g: SparseRows,
    *tensors: Tensor | None,
    block: int = 1,
    act: Activation = RELU,
    **named: Tensor | None,
) -> Tensor:
    """y [M, K] of the layer from its gate g [M, N]; takes the arguments of `ffn` behind g.

    Per token y is the sum over active n of h[n] w_down[:, n], plus b_down, in x.dtype. h[n] is made
    of g[n] and, in a gated layer, of u[n] = x . w_up[n] + b_up[n]; both are not rounded. g is in
    any format. Paper: inference, fused up and down, or the non-gated down. More tokens in a `block`
    take dense products with the weight rows of their union; ours, not the paper's.
    """
    x, w_gate, w_up, w_down, _, b_up, b_down = Layer.checked(*tensors, **named)
    y, dense = wide(torch.zeros_like(x)), g.unpack()
    check_tensor("g", dense, (x.shape[0], w_up.shape[0]))
    for tokens, neurons in _unions(dense != 0, block):
        gate = dense[tokens, neurons]
        h = wide(act.of_gate(gate))
        if w_gate is not None:
            u = linear(x[tokens], w_up[neurons], None if b_up is None else b_up[neurons])
            # Where a token is inactive u may be anything, also infinite, and 0 * inf is NaN.
            h = torch.where(gate != 0, h * act.of_up(u), 0)
        y[tokens] = h @ wide(w_down.t()[neurons])
    return add_bias(y, b_down).to(x.dtype)


# Training by unions: dense products over each block's union. autograd has the backward half.


def union_train(
    *tensors: Tensor | None, block: int = 64, act: Activation = RELU, **named: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A training step by unions of `block` tokens, differentiable; takes the arguments of `ffn`.

    Returns y [M, K] in x.dtype; l1 [M], the sum over neurons of |h|, fp32 (fp64 for fp64); and the
    active entries [M, N] bool. Ours. With a block of 1, whose union is the token's list of active
    neurons, it is the paper's step (App. B.2). The gradients of sum(y * dy) + sum(l1 * dl1) are

        dh = dy Wd + sign(h) dl1    du = dh G    dg = dh U dG/dg    dx = du Wu + dg Wg
        dWu = du^T x    dWg = dg^T x    dWd = dy^T h

    G, U and what is 0: activations.py. Non-gated, du is dh dG/dg.
    """
    layer = Layer.checked(*tensors, **named)
    dtype = layer.x.dtype
    # Widened here, so that gradients are summed over blocks before they are rounded.
    layer = Layer(*(None if tensor is None else wide(tensor) for tensor in layer))
    x, w_gate, w_up, w_down, _, b_up, b_down = layer
    g = act.gate(linear(x, *layer.first).to(dtype))
    active = g != 0
    y, l1 = torch.zeros_like(x), x.new_zeros(len(x))
    for tokens, neurons in _unions(active, block):
        h = act.of_gate(g[tokens, neurons])
        if w_gate is not None:
            bias = None if b_up is None else b_up[neurons]
            u = act.of_up(linear(x[tokens], w_up[neurons], bias).to(dtype))
            # Select, do not multiply: inactive entries may hold infinite products; 0 * inf is NaN.
            u = torch.where(active[tokens, neurons], u, 0)
            h = (wide(h) * wide(u)).to(dtype)
        h = wide(h)
        l1[tokens] = h.abs().sum(1)
        y[tokens] = h @ w_down.t()[neurons]
    return add_bias(y, b_down).to(dtype), l1, active
