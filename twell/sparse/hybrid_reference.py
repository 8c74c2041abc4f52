"""The paper's training step in plain torch, on the hybrid format (App. B.2): its parts and the
whole.

Shapes, precision and non-finite values: see reference.py. The kernels stand in
kernels/paper/hybrid.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell.sparse.formats import Hybrid, TwELL, check_tensor
from twell.sparse.reference import (
    Gradients,
    check_layer,
    down,
    first_weights,
    gate_pack,
    matmul,
    wide,
)


def to_hybrid(
    g: TwELL, ell_width: int = 128, backup_rows: int | None = None
) -> tuple[Hybrid, Tensor]:
    """The same matrix as a Hybrid, and the number of non-zeros of each token, l0 [M] int32.

    Raises BufferOverflow if `backup_rows` is too small. Paper: training, conversion to the hybrid
    format.
    """
    return Hybrid.pack(g.unpack(), ell_width, backup_rows), g.counts.sum(1, dtype=torch.int32)


def sampled_matmul(x: Tensor, w: Tensor, pattern: Hybrid, b: Tensor | None = None) -> Hybrid:
    """x[m] . w[n] + b[n] at the pattern's active entries (m, n) only, in x.dtype; elsewhere 0.

    x [M, K], w [N, K], b [N]; of the pattern [M, N] the values do not matter. Raises ValueError for
    shapes that do not fit. Paper: training, sampled dense-dense product.
    """
    check_tensor("w", w, (pattern.shape[1], w.shape[1]))
    check_tensor("x", x, (pattern.shape[0], w.shape[1]))
    wide_x, wide_w = wide(x), wide(w)
    products = [wide_w[columns] @ wide_x[m] for m, (columns, _) in enumerate(pattern.rows())]
    values = torch.cat([wide_x.new_zeros(0), *products])
    if b is not None:
        values += b[pattern.entries()[1]]
    return pattern.with_entries(values.to(x.dtype))


def _row_l1(h: Hybrid) -> Tensor:
    rows, _, values = h.entries()
    values = wide(values).abs()
    return values.new_zeros(h.shape[0]).index_add_(0, rows, values)


def multiply(u: Hybrid, g: Hybrid) -> tuple[Hybrid, Tensor]:
    """h = u * g for two of the same pattern, in g's dtype, and l1 [M], the sum of |h| of each
    token.

    l1 is that of h as rounded, fp32 (fp64 for fp64). Paper: training, element-wise step.
    """
    h = g.with_entries((wide(u.entries()[2]) * wide(g.entries()[2])).to(g.dtype))
    return h, _row_l1(h)


# The sparse-dense product of a training step is the sum that `down` is; only the kernels differ.
hybrid_matmul = down


def transpose_matmul(h: Hybrid, x: Tensor) -> Tensor:
    """h^T x [N, K] in x.dtype, through the transposed Hybrid; h [M, N], x [M, K].

    Raises ValueError for shapes that do not fit. Paper: training, weight gradients.
    """
    return matmul(h.transpose(), x).to(x.dtype)


def _column_sums(h: Hybrid) -> Tensor:
    _, columns, values = h.entries()
    values = wide(values)
    return values.new_zeros(h.shape[1]).index_add_(0, columns, values).to(h.dtype)


@dataclass(frozen=True, eq=False)
class Saved:
    """What `ffn_backward` needs of a forward step; non-gated, g and u are None and h is the
    pattern.
    """

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
    """The forward half of a training step (ReLU): y [M, K], l1 [M], l0 [M] int32, and what backward
    needs.

    l1 is the sum over neurons of |h|, fp32 (fp64 for fp64), l0 the number of active neurons: those
    where g, non-gated h, is not 0 after ReLU and rounding to x.dtype. Raises BufferOverflow if
    `backup_rows` is too small, ValueError for shapes that do not fit. Paper: training, forward
    pass.
    """
    check_layer(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    first = first_weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    packed = gate_pack(x, *first, tile_n, compression)
    active, l0 = to_hybrid(packed, ell_width, backup_rows)
    if w_gate is None:
        g, u, h, l1 = None, None, active, _row_l1(active)
    else:
        g, u = active, sampled_matmul(x, w_up, active, b_up)
        h, l1 = multiply(u, g)
    y = hybrid_matmul(h, w_down, b_down)
    return y, l1, l0, Saved(x, w_gate, w_up, w_down, b_gate, b_up, b_down, g, u, h)


def ffn_backward(saved: Saved, dy: Tensor, dl1: Tensor) -> Gradients:
    """The backward half: gradients of sum(y * dy) + sum(l1 * dl1), in x.dtype and in their
    arguments' shapes.

    dy [M, K]; dl1 [M], the gradient with respect to each token's l1, so that h gets sign(h) *
    dl1[m]. The gradient of ReLU at 0 is 0. Raises ValueError for shapes that do not fit. Paper:
    training, backward pass.
    """
    x, g, u, h = saved.x, saved.g, saved.u, saved.h
    check_tensor("dy", dy, tuple(x.shape))
    check_tensor("dl1", dl1, (x.shape[0],))

    dh = sampled_matmul(wide(dy), saved.w_down.t(), h).entries()[
        2
    ]  # of wide inputs, so not rounded
    rows, _, h_values = h.entries()
    dh += h_values.sign() * dl1[rows]
    d_w_down = transpose_matmul(h, dy).t()
    d_b_down = None if saved.b_down is None else wide(dy).sum(0).to(x.dtype)

    if g is None:
        du = h.with_entries(dh.to(x.dtype))
        dx = matmul(du, saved.w_up)
        d_w_gate = d_b_gate = None
    else:
        du = g.with_entries((dh * g.entries()[2]).to(x.dtype))
        dg = g.with_entries((dh * u.entries()[2]).to(x.dtype))
        dx = matmul(du, saved.w_up) + matmul(dg, saved.w_gate)
        d_w_gate = transpose_matmul(dg, x)
        d_b_gate = None if saved.b_gate is None else _column_sums(dg)
    d_w_up = transpose_matmul(du, x)
    d_b_up = None if saved.b_up is None else _column_sums(du)
    return Gradients(dx.to(x.dtype), d_w_gate, d_w_up, d_w_down, d_b_gate, d_b_up, d_b_down)
