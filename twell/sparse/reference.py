"""The feed-forward layer over active neurons only, in plain torch: what every kernel must compute.

The idea: a format of twell.sparse.formats lists, for each token, its active neurons and their values (`rows`).
Everything here is a loop over that list which reads the weight rows of active neurons and no others. Nothing
is tuned.

Shapes: M tokens, K = hidden_size, N = intermediate_size. x [M, K]; w_gate and w_up [N, K] (as nn.Linear has
them); w_down [K, N]; b_gate and b_up [N]; b_down [K]. Without w_gate the layer is the non-gated one.

Precision: products are accumulated in fp32 (fp64 inputs stay fp64) and rounded to x.dtype where a kernel
stores its result: g, and in training u, h, du and dg. The fused inference kernel does not store u and h, and
the backward pass does not store dh, so these are not rounded.

Non-finite values: a NaN in a row of x reaches that row of y and no other, since a NaN gate counts as active.
An inf or NaN in weights of a neuron that is inactive for a token does not reach the token. The one exception
is w_down in the union form, where a neuron active for one token of a block is multiplied, by 0, for the
others too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twell.sparse.formats import Hybrid, SparseRows, TileUnion, TwELL, check_tensor


def _wide(tensor: Tensor) -> Tensor:
    """The type to accumulate in: fp64 stays, anything else becomes fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _matmul(sparse: SparseRows, weight: Tensor) -> Tensor:
    """Sparse [M, N] times dense [N, K], not rounded; reads the weight rows of active columns only."""
    check_tensor("weight", weight, (sparse.shape[1], weight.shape[1]))
    weight = _wide(weight)
    out = weight.new_zeros(sparse.shape[0], weight.shape[1])
    for m, (columns, values) in enumerate(sparse.rows()):
        out[m] = _wide(values) @ weight[columns]
    return out


def _add_bias(y: Tensor, b: Tensor | None) -> Tensor:
    return y if b is None else y + b


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return _add_bias(_wide(x) @ _wide(w).t(), b)


def _check_layer(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [tokens, hidden_size]")
    if w_gate is None and b_gate is not None:
        raise ValueError("b_gate is given without w_gate; the bias of a non-gated layer is b_up")
    n, k = w_up.shape[0], x.shape[1]
    expected = dict(w_gate=(n, k), w_up=(n, k), w_down=(k, n), b_gate=(n,), b_up=(n,), b_down=(k,))
    given = dict(w_gate=w_gate, w_up=w_up, w_down=w_down, b_gate=b_gate, b_up=b_up, b_down=b_down)
    for name, tensor in given.items():
        if tensor is not None:
            check_tensor(name, tensor, expected[name])


def _check_pattern(name: str, sparse: SparseRows, shape: tuple[int, int]) -> None:
    if sparse.shape != shape:
        raise ValueError(
            f"{name} is {sparse.shape[0]} x {sparse.shape[1]}, expected {shape[0]} x {shape[1]}"
        )


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str = "relu",
) -> Tensor:
    """The dense layer: y [M, K] = h w_down^T, h = act(x w_gate^T) * (x w_up^T) or non-gated act(x w_up^T).

    g, u and h are rounded to x.dtype. `activation` is "relu" or "silu". Raises ValueError for another one or
    for shapes that do not fit. Differentiable. Paper: the feed-forward block.
    """
    _check_layer(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    activations = {"relu": torch.relu, "silu": torch.nn.functional.silu}
    if activation not in activations:
        raise ValueError(f"activation={activation!r}, expected one of {sorted(activations)}")
    act = activations[activation]
    u = _linear(x, w_up, b_up)
    if w_gate is None:
        h = act(u).to(x.dtype)
    else:
        h = act(_linear(x, w_gate, b_gate)).to(x.dtype) * u.to(x.dtype)
    return _linear(h, w_down, b_down).to(x.dtype)


# Inference: one kernel for the gate, which packs, and one for all the rest.


def gate_pack(
    x: Tensor, w: Tensor, b: Tensor | None = None, tile_n: int = 256, compression: int = 8
) -> TwELL:
    """relu(x w^T + b) [M, N], rounded to x.dtype and packed; w [N, K] is w_gate, in a non-gated layer w_up.

    Raises ValueError for tile sizes that `TwELL.pack` refuses. Paper: inference, gate kernel.
    """
    return TwELL.pack(torch.relu(_linear(x, w, b)).to(x.dtype), tile_n, compression)


def up_down(
    x: Tensor,
    g: SparseRows,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """y [M, K]: per token the sum of g[n] (x . w_up[n] + b_up[n]) w_down[:, n] over active n, plus b_down.

    g [M, N] is a TwELL, whose overflow rows come from beside the slots, or another format. y is in x.dtype; u
    and h are not rounded. Raises ValueError for shapes that do not fit. Paper: inference, fused up and down
    projection.
    """
    _check_layer(x, None, w_up, w_down, None, b_up, b_down)
    _check_pattern("g", g, (x.shape[0], w_up.shape[0]))
    wide_x, wide_up, wide_down = _wide(x), _wide(w_up), _wide(w_down.t())
    y = torch.zeros_like(wide_x)
    for m, (neurons, gate) in enumerate(g.rows()):
        u = wide_up[neurons] @ wide_x[m]
        if b_up is not None:
            u += b_up[neurons]
        y[m] = (gate * u) @ wide_down[neurons]
    return _add_bias(y, b_down).to(x.dtype)


def down(h: SparseRows, w_down: Tensor, b_down: Tensor | None = None) -> Tensor:
    """y [M, K] in h's dtype: per token the sum of h[n] w_down[:, n] over its active n, plus b_down.

    h [M, N] is any format. Raises ValueError for shapes that do not fit. Paper: inference, non-gated layer.
    """
    return _add_bias(_matmul(h, w_down.t()), b_down).to(h.dtype)


def union_up_down(
    x: Tensor,
    g: TileUnion,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """As `up_down`, by blocks of tokens: two dense products with the weight rows of the block's union.

    Ours, not the paper's: it exchanges some work on zeros for matrix products. Raises as `up_down` does.
    """
    _check_layer(x, None, w_up, w_down, None, b_up, b_down)
    _check_pattern("g", g, (x.shape[0], w_up.shape[0]))
    y = _wide(torch.zeros_like(x))
    for b in range(len(g.offsets) - 1):
        tokens = slice(b * g.block_m, (b + 1) * g.block_m)
        neurons, gate = g.block(b)
        neurons = neurons.long()
        u = _linear(x[tokens], w_up[neurons], None if b_up is None else b_up[neurons])
        # Where a token is inactive u may be anything, also infinite, and 0 * inf is NaN.
        h = torch.where(gate != 0, gate * u, 0)
        y[tokens] = h @ _wide(w_down.t()[neurons])
    return _add_bias(y, b_down).to(x.dtype)


def union_down(h: TileUnion, w_down: Tensor, b_down: Tensor | None = None) -> Tensor:
    """As `down`, by blocks of tokens: one dense product with the weight rows of the block's union.

    Raises ValueError for shapes that do not fit.
    """
    check_tensor("w_down", w_down, (w_down.shape[0], h.shape[1]))
    w_down = _wide(w_down)
    y = w_down.new_zeros(h.shape[0], w_down.shape[0])
    for b in range(len(h.offsets) - 1):
        neurons, values = h.block(b)
        y[b * h.block_m : (b + 1) * h.block_m] = _wide(values) @ w_down.t()[neurons.long()]
    return _add_bias(y, b_down).to(h.dtype)


# Training: the hybrid format, and the parts of a step that work on it.


def to_hybrid(
    g: TwELL, ell_width: int = 128, backup_rows: int | None = None
) -> tuple[Hybrid, Tensor]:
    """The same matrix as a Hybrid, and the number of non-zeros of each token, l0 [M] int32.

    Raises BufferOverflow if `backup_rows` is too small. Paper: training, conversion to the hybrid format.
    """
    return Hybrid.pack(g.unpack(), ell_width, backup_rows), g.counts.sum(1, dtype=torch.int32)


def sampled_matmul(x: Tensor, w: Tensor, pattern: Hybrid, b: Tensor | None = None) -> Hybrid:
    """x[m] . w[n] + b[n] at the pattern's active entries (m, n) only, in x.dtype; elsewhere 0.

    x [M, K], w [N, K], b [N]; of the pattern [M, N] the values do not matter. Raises ValueError for shapes
    that do not fit. Paper: training, sampled dense-dense product.
    """
    check_tensor("w", w, (pattern.shape[1], w.shape[1]))
    check_tensor("x", x, (pattern.shape[0], w.shape[1]))
    wide_x, wide_w = _wide(x), _wide(w)
    products = [wide_w[columns] @ wide_x[m] for m, (columns, _) in enumerate(pattern.rows())]
    values = torch.cat([wide_x.new_zeros(0), *products])
    if b is not None:
        values += b[pattern.entries()[1]]
    return pattern.with_entries(values.to(x.dtype))


def _row_l1(h: Hybrid) -> Tensor:
    rows, _, values = h.entries()
    values = _wide(values).abs()
    return values.new_zeros(h.shape[0]).index_add_(0, rows, values)


def multiply(u: Hybrid, g: Hybrid) -> tuple[Hybrid, Tensor]:
    """h = u * g for two of the same pattern, in g's dtype, and l1 [M], the sum of |h| of each token.

    l1 is that of h as rounded, fp32 (fp64 for fp64). Paper: training, element-wise step.
    """
    h = g.with_entries((_wide(u.entries()[2]) * _wide(g.entries()[2])).to(g.dtype))
    return h, _row_l1(h)


# The sparse-dense product of a training step is the sum that `down` is; only the kernels differ.
hybrid_matmul = down


def transpose_matmul(h: Hybrid, x: Tensor) -> Tensor:
    """h^T x [N, K] in x.dtype, through the transposed Hybrid; h [M, N], x [M, K].

    Raises ValueError for shapes that do not fit. Paper: training, weight gradients.
    """
    return _matmul(h.transpose(), x).to(x.dtype)


def _column_sums(h: Hybrid) -> Tensor:
    _, columns, values = h.entries()
    values = _wide(values)
    return values.new_zeros(h.shape[1]).index_add_(0, columns, values).to(h.dtype)


@dataclass(frozen=True, eq=False)
class Saved:
    """What `ffn_backward` needs of a forward step; non-gated, g and u are None and h is the pattern."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    g: Hybrid | None
    u: Hybrid | None
    h: Hybrid


class Gradients(NamedTuple):
    """Gradients in the order of `ffn_forward`'s arguments; None for those that were not given."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None


def ffn_forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    ell_width: int = 128,
    backup_rows: int | None = None,
    tile_n: int = 256,
    compression: int = 8,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """The forward half of a training step (ReLU): y [M, K], l1 [M], l0 [M] int32, and what backward needs.

    l1 is the sum over neurons of |h|, fp32 (fp64 for fp64), l0 the number of active neurons: those where g,
    non-gated h, is not 0 after ReLU and rounding to x.dtype. Raises BufferOverflow if `backup_rows` is too
    small, ValueError for shapes that do not fit. Paper: training, forward pass.
    """
    _check_layer(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    first, first_bias = (w_up, b_up) if w_gate is None else (w_gate, b_gate)
    packed = gate_pack(x, first, first_bias, tile_n, compression)
    active, l0 = to_hybrid(packed, ell_width, backup_rows)
    if w_gate is None:
        g, u, h, l1 = None, None, active, _row_l1(active)
    else:
        g, u = active, sampled_matmul(x, w_up, active, b_up)
        h, l1 = multiply(u, g)
    y = hybrid_matmul(h, w_down, b_down)
    return y, l1, l0, Saved(x, w_gate, w_up, w_down, b_gate, b_up, b_down, g, u, h)


def ffn_backward(saved: Saved, dy: Tensor, dl1: Tensor) -> Gradients:
    """The backward half: gradients of sum(y * dy) + sum(l1 * dl1), in x.dtype and in their arguments' shapes.

    dy [M, K]; dl1 [M], the gradient with respect to each token's l1, so that h gets sign(h) * dl1[m]. The
    gradient of ReLU at 0 is 0. Raises ValueError for shapes that do not fit. Paper: training, backward pass.
    """
    x, g, u, h = saved.x, saved.g, saved.u, saved.h
    check_tensor("dy", dy, tuple(x.shape))
    check_tensor("dl1", dl1, (x.shape[0],))

    dh = sampled_matmul(_wide(dy), saved.w_down.t(), h).entries()[
        2
    ]  # of wide inputs, so not rounded
    rows, _, h_values = h.entries()
    dh += h_values.sign() * dl1[rows]
    d_w_down = transpose_matmul(h, dy).t()
    d_b_down = None if saved.b_down is None else _wide(dy).sum(0).to(x.dtype)

    if g is None:
        du = h.with_entries(dh.to(x.dtype))
        dx = _matmul(du, saved.w_up)
        d_w_gate = d_b_gate = None
    else:
        du = g.with_entries((dh * g.entries()[2]).to(x.dtype))
        dg = g.with_entries((dh * u.entries()[2]).to(x.dtype))
        dx = _matmul(du, saved.w_up) + _matmul(dg, saved.w_gate)
        d_w_gate = transpose_matmul(dg, x)
        d_b_gate = None if saved.b_gate is None else _column_sums(dg)
    d_w_up = transpose_matmul(du, x)
    d_b_up = None if saved.b_up is None else _column_sums(du)
    return Gradients(dx.to(x.dtype), d_w_gate, d_w_up, d_w_down, d_b_gate, d_b_up, d_b_down)
