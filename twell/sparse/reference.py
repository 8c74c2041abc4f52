"""The feed-forward layer in plain torch: the formula of every kernel, one function a computation.

    function                    computes                              kernel
    ffn                         the dense layer, every activation     kernels/dense.py
    gate_pack                   the gate, packed                      kernels/gate.py
    up_down, down               one token after the other             kernels/rowwise.py, decode.py
                                blocks of tokens (of a TileUnion)     kernels/union.py, few.py
    union_train_forward         a training step by unions: forward    kernels/training.py
    union_train_backward        ... and backward                      kernels/training.py
                                the paper's, with blocks of 1 token   kernels/paper/hybrid.py

A format of twell.sparse.formats lists the active neurons of each token. The functions loop over
that list and read the weight rows of active neurons and no others. Nothing is tuned.

Shapes: M tokens, K = hidden_size, N = intermediate_size. x [M, K]; w_gate and w_up [N, K] (as
nn.Linear stores them); w_down [K, N]; b_gate and b_up [N]; b_down [K]. A layer without w_gate is
non-gated. All functions raise ValueError for shapes that do not fit.

Precision: sums are in fp32 (fp64 inputs stay fp64). Values are rounded to x.dtype where a kernel
stores them: g, and in training u, h, du and dg, in the union kernels also dh. The fused inference
kernel does not store u and h.

Non-finite values: a NaN in a row of x reaches that row of y and no other, since a NaN gate counts
as active. An inf or NaN in weights of a neuron that is inactive for a token does not reach the
token. The one exception is w_down by unions, where a neuron that is active for one token of a block
is multiplied by 0 for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from twell.sparse.activations import RELU, Activation, add_bias, wide
from twell.sparse.formats import SparseRows, TileUnion, TwELL, check_tensor


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return add_bias(wide(x) @ wide(w).t(), b)


class Gradients(NamedTuple):
    """Gradients in the order of the layer's arguments; None for those that were not given."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None


class Layer(Gradients):
    """The tensors of a layer, in the order of all functions that take a whole one."""

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
    if w_gate is None:
        g = act.gate(u)
        return g, act.hidden(g, None)
    g = act.gate(F.linear(x, w_gate, b_gate))
    return g, act.hidden(g, u)


def ffn(*tensors: Tensor | None, act: Activation = RELU, **named: Tensor | None) -> Tensor:
    """Return the dense layer y [M, K] = h w_down^T + b_down in torch's operators, differentiable.

    Takes x, w_gate, w_up, w_down, b_gate, b_up, b_down (biases may be left out) of any dtype; g, u
    and h (`activations`) are rounded to it. Paper: the feed-forward block.
    """
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = Layer.checked(*tensors, **named)
    _, h = activations(x, w_gate, w_up, b_gate, b_up, act)
    return F.linear(h, w_down, b_down)


def gradients(
    *tensors: Tensor | None, dy: Tensor, needs: Sequence[bool], act: Activation = RELU
) -> Gradients:
    """Gradients of sum(y * dy) of `ffn`, None where `needs` is False, in torch's operators.

    dy [M, K]. g, u, h and their gradients are rounded to x.dtype.
    """
    x, w_gate, w_up, w_down, b_gate, b_up, _ = tensors
    needed, du, da = Gradients(*needs), None, None
    g, h = activations(x, w_gate, w_up, b_gate, b_up, act)
    dh = dy @ w_down
    if w_gate is None:
        du = torch.where(g != 0, act.through_gate(dh, g), 0)
    else:
        u = act.of_up(F.linear(x, w_up, b_up))
        da = torch.where(g != 0, act.through_gate(dh * u, g), 0)
        du = dh * act.of_gate(g)
        du = torch.where(u != 0, du, 0) if act.both else du

    def product(needed: bool, value: Tensor, rows: Tensor) -> Tensor | None:
        return value.t() @ rows if needed else None

    dx = None
    if needed.x:
        dx = du @ w_up if da is None else du @ w_up + da @ w_gate
    return Gradients(
        dx,
        product(needed.w_gate, da, x),
        product(needed.w_up, du, x),
        product(needed.w_down, dy, h),
        da.sum(0) if needed.b_gate else None,
        du.sum(0) if needed.b_up else None,
        dy.sum(0) if needed.b_down else None,
    )


# Inference: one kernel for the gate, which packs, and one for all the rest.


def gate_pack(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    tile_n: int = 256,
    compression: int = 8,
    act: Activation = RELU,
) -> TwELL:
    """g [M, N] of x w^T + b rounded to x.dtype, packed; w [N, K] is `Layer.first`.

    Raises ValueError for tile sizes that `TwELL.pack` refuses. Paper: inference, gate kernel.
    """
    return TwELL.pack(act.gate(linear(x, w, b).to(x.dtype)), tile_n, compression)


def up_down(
    x: Tensor,
    g: SparseRows,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    act: Activation = RELU,
) -> Tensor:
    """y [M, K]: per token the sum over active n of h[n] w_down[:, n].

    h[n] is made of g[n] and u[n] = x . w_up[n] + b_up[n]. y is in x.dtype; b_down is added.
    g [M, N] is a TwELL, whose overflow rows come from beside the slots, or another format. u and h
    are not rounded. Paper: inference, fused up and down. A TileUnion computes blocks of tokens, by
    dense products with the weight rows of the block's union; ours, not the paper's.
    """
    Layer.checked(x, None, w_up, w_down, None, b_up, b_down)
    if g.shape != (expected := (x.shape[0], w_up.shape[0])):
        given, expected = (" x ".join(map(str, shape)) for shape in (g.shape, expected))
        raise ValueError(f"g is {given}, expected {expected}")
    y = wide(torch.zeros_like(x))
    for tokens, neurons, gate in _blocks(g):
        u = linear(x[tokens], w_up[neurons], None if b_up is None else b_up[neurons])
        # Where a token is inactive u may be anything, also infinite, and 0 * inf is NaN.
        h = torch.where(gate != 0, wide(act.of_gate(gate)) * act.of_up(u), 0)
        y[tokens] = h @ wide(w_down.t()[neurons])
    return add_bias(y, b_down).to(x.dtype)


def _blocks(g: SparseRows) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield tokens computed together as a slice, their neurons, and g [tokens, neurons]."""
    if not isinstance(g, TileUnion):
        for m, (neurons, gate) in enumerate(g.rows()):
            yield slice(m, m + 1), neurons, gate[None]
        return
    for b in range(len(g.offsets) - 1):
        neurons, gate = g.block(b)
        yield slice(b * g.block_m, (b + 1) * g.block_m), neurons.long(), gate


def down(
    g: SparseRows, w_down: Tensor, b_down: Tensor | None = None, act: Activation = RELU
) -> Tensor:
    """y [M, K] in g's dtype: per token the sum of h[n] w_down[:, n] over its active n, plus b_down.

    g [M, N] is any format, and h is `act.of_gate(g)`. Paper: inference, non-gated layer.
    """
    check_tensor("w_down", w_down, (w_down.shape[0], g.shape[1]))
    y = wide(w_down.new_zeros(g.shape[0], w_down.shape[0]))
    for tokens, neurons, gate in _blocks(g):
        y[tokens] = wide(act.of_gate(gate)) @ wide(w_down.t()[neurons])
    return add_bias(y, b_down).to(g.dtype)


def rowwise_ffn(g: SparseRows, *tensors: Tensor | None, act: Activation = RELU) -> Tensor:
    """Return y [M, K] of the layer from its packed gate g [M, N] (`gate_pack`)."""
    x, w_gate, w_up, w_down, _, b_up, b_down = tensors
    if w_gate is None:
        return down(g, w_down, b_down, act)
    return up_down(x, g, w_up, w_down, b_up, b_down, act)


# Training by unions: dense products over each block's union, weight gradients over active entries.


class SavedStep(NamedTuple):
    """What `union_train_backward` needs of a forward pass.

    g and u [M, N]: the gate and, in a gated layer, the factor `act.of_up` of the up projection,
    rounded, 0 where inactive. The kernels keep their active entries alone.
    """

    layer: Layer
    g: Tensor
    u: Tensor | None
    block: int
    act: Activation


def _unions(active: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each block as a slice, and the neurons that any of them has active."""
    for start in range(0, len(active), block):
        tokens = slice(start, start + block)
        yield tokens, active[tokens].any(0).nonzero().flatten()


def union_train_forward(
    *tensors: Tensor | None, block: int = 64, act: Activation = RELU, **named: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, SavedStep]:
    """The forward half of a training step by unions of `block` tokens; takes those of `ffn`.

    Returns y [M, K] in x.dtype; l1 [M], the sum over neurons of |h|, fp32 (fp64 for fp64);
    token_counts [M] int32, the active neurons of each token; neuron_counts [N] int32, the tokens of
    each neuron; and the tensors for `union_train_backward`. Ours. With a block of 1, whose union
    is the token's list of active neurons, it is the paper's step (App. B.2).
    """
    layer = Layer.checked(*tensors, **named)
    x, w_gate, w_up, w_down, _, b_up, b_down = layer
    g = act.gate(linear(x, *layer.first).to(x.dtype))
    active = g != 0
    u = None if w_gate is None else torch.zeros_like(g)
    y, l1 = wide(torch.zeros_like(x)), wide(x.new_zeros(len(x)))
    for tokens, neurons in _unions(active, block):
        h = act.of_gate(g[tokens, neurons])
        if u is not None:
            bias = None if b_up is None else b_up[neurons]
            product = act.of_up(linear(x[tokens], w_up[neurons], bias).to(x.dtype))
            # Select, do not multiply: inactive entries may hold infinite products; 0 * inf is NaN.
            u[tokens, neurons] = torch.where(active[tokens, neurons], product, 0)
            h = (wide(h) * wide(u[tokens, neurons])).to(x.dtype)
        l1[tokens] = wide(h).abs().sum(1)
        y[tokens] = wide(h) @ wide(w_down.t()[neurons])
    y = add_bias(y, b_down).to(x.dtype)
    token_counts, neuron_counts = active.sum(1).int(), active.sum(0).int()
    return y, l1, token_counts, neuron_counts, SavedStep(layer, g, u, block, act)


def union_train_backward(
    saved: SavedStep, dy: Tensor, dl1: Tensor, round_dh: bool = True
) -> Gradients:
    """The backward half: gradients of sum(y * dy) + sum(l1 * dl1), in x.dtype.

    dy [M, K]; dl1 [M], the gradient of each token's l1, so that h gets sign(h) * dl1[m]:

        dh = dy Wd + sign(h) dl1    du = dh G    dg = dh U dG/dg    dx = du Wu + dg Wg
        dWu = du^T x    dWg = dg^T x    dWd = dy^T h

    G, U and what is 0: activations.py. Non-gated, du is dh dG/dg. round_dh: round dh to x.dtype,
    as the union kernels do and the paper's do not.
    """
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = saved.layer
    check_tensor("dy", dy, tuple(x.shape))
    check_tensor("dl1", dl1, (x.shape[0],))
    stored = x.dtype if round_dh else wide(x).dtype
    g, u, act, active = saved.g, saved.u, saved.act, saved.g != 0
    h = factor = act.of_gate(g)
    if u is not None:
        h = torch.where(active, wide(factor) * wide(u), 0).to(x.dtype)
    dx, du, dg = wide(torch.zeros_like(x)), torch.zeros_like(g), torch.zeros_like(g)
    for tokens, neurons in _unions(active, saved.block):
        here = tokens, neurons
        dh = wide(dy[tokens]) @ wide(w_down.t()[neurons]).t()
        sign = wide(h[here]).sign() * dl1[tokens, None]
        if u is None:
            dh = wide((dh + sign).to(stored))
            da = act.through_gate(dh, wide(g[here]))
            du[here] = torch.where(active[here], da, 0).to(x.dtype)
        else:
            dh = wide(dh.to(stored)) + sign
            reached = active[here] & (u[here] != 0) if act.both else active[here]
            du[here] = torch.where(reached, dh * wide(factor[here]), 0).to(x.dtype)
            da = act.through_gate(dh * wide(u[here]), wide(g[here]))
            dg[here] = torch.where(active[here], da, 0).to(x.dtype)
            dx[tokens] += wide(dg[here]) @ wide(w_gate[neurons])
        dx[tokens] += wide(du[here]) @ wide(w_up[neurons])
    return Gradients(
        dx.to(x.dtype),
        None if w_gate is None else _weight_gradient(dg, x, active),
        _weight_gradient(du, x, active),
        _weight_gradient(h, dy, active).t(),
        None if b_gate is None else wide(dg).sum(0).to(x.dtype),
        None if b_up is None else wide(du).sum(0).to(x.dtype),
        None if b_down is None else wide(dy).sum(0).to(x.dtype),
    )


def _weight_gradient(values: Tensor, rows: Tensor, active: Tensor) -> Tensor:
    """values^T rows [N, K]: for each neuron the sum over its active tokens and no others."""
    gradient = rows.new_zeros(values.shape[1], rows.shape[1])
    for neuron in active.any(0).nonzero().flatten().tolist():
        tokens = active[:, neuron]
        gradient[neuron] = (wide(values[tokens, neuron]) @ wide(rows[tokens])).to(rows.dtype)
    return gradient


class _UnionTraining(torch.autograd.Function):
    @staticmethod
    def forward(ctx, act, *tensors):
        y, l1, _, _, saved = union_train_forward(*tensors, act=act)
        active = saved.g != 0
        ctx.mark_non_differentiable(active)
        # All of them here: activation checkpointing replaces saved tensors, not attributes of ctx.
        ctx.save_for_backward(*tensors, saved.g, saved.u)
        ctx.block, ctx.act = saved.block, saved.act
        return y, l1, active

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dl1, _):
        *tensors, g, u = ctx.saved_tensors
        saved = SavedStep(Layer(*tensors), g, u, ctx.block, ctx.act)
        gradients = union_train_backward(saved, dy, dl1)
        needs = ctx.needs_input_grad[1:]
        return None, *(g if need else None for g, need in zip(gradients, needs, strict=True))


def union_train(*tensors: Tensor | None, act: Activation = RELU) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, l1 and the active entries [M, N] bool of `union_train_forward`, differentiable."""
    return _UnionTraining.apply(act, *tensors)
