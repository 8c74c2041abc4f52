"""The paper's training step in plain torch, on the hybrid format (App. B.2): parts and whole.

Shapes, precision, errors and non-finite values: see reference.py. The kernels stand in
kernels/paper/hybrid.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twell.sparse.formats import Hybrid, TwELL, check_tensor
from twell.sparse.reference import Gradients, Layer, check_step, down, gate_pack, matmul, wide


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

    x [M, K], w [N, K], b [N]; of the pattern [M, N] the values do not matter. Paper: training,
    sampled dense-dense product.
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
    """h = u * g for two of the same pattern, in g's dtype, and l1 [M], each token's sum of |h|.

    l1 is that of h as rounded, fp32 (fp64 for fp64). Paper: training, element-wise step.
    """
    h = g.with_entries((wide(u.entries()[2]) * wide(g.entries()[2])).to(g.dtype))
    return h, _row_l1(h)


# The sparse-dense product of a training step is the sum that `down` is; only the kernels differ.
hybrid_matmul = down


def transpose_matmul(h: Hybrid, x: Tensor) -> Tensor:
    """h^T x [N, K] in x.dtype, through the transposed Hybrid; h [M, N], x [M, K].

    Paper: training, weight gradients.
    """
    return matmul(h.transpose(), x).to(x.dtype)


def _column_sums(h: Hybrid) -> Tensor:
    _, columns, values = h.entries()
    values = wide(values)
    return values.new_zeros(h.shape[1]).index_add_(0, columns, values).to(h.dtype)


class Saved(NamedTuple):
    """What `ffn_backward` needs of a forward step; non-gated, g and u are None."""

    layer: Layer
    g: Hybrid | None
    u: Hybrid | None
    h: Hybrid


def ffn_forward(
    *tensors: Tensor | None,
    ell_width: int = 128,
    backup_rows: int | None = None,
    tile_n: int = 256,
    compression: int = 8,
    **named: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """The forward half of a training step (ReLU): y [M, K], l1 [M], l0 [M] int32, and `Saved`.

    Takes those of `ffn`. l1 is the sum over neurons of |h|, fp32 (fp64 for fp64), l0 the number of
    active neurons: those where g, non-gated h, is not 0 after ReLU and rounding to x.dtype. Raises
    BufferOverflow if `backup_rows` is too small. Paper: training, forward pass.
    """
    layer = Layer.checked(*tensors, **named)
    packed = gate_pack(layer.x, *layer.first, tile_n, compression)
    h, l0 = to_hybrid(packed, ell_width, backup_rows)
    if layer.w_gate is None:
        g, u, l1 = None, None, _row_l1(h)
    else:
        g, u = h, sampled_matmul(layer.x, layer.w_up, h, layer.b_up)
        h, l1 = multiply(u, g)
    return hybrid_matmul(h, layer.w_down, layer.b_down), l1, l0, Saved(layer, g, u, h)


def ffn_backward(saved: Saved, dy: Tensor, dl1: Tensor) -> Gradients:
    """The backward half: gradients of sum(y * dy) + sum(l1 * dl1), in x.dtype.

    dy [M, K]; dl1 [M], the gradient with respect to each token's l1, so that h gets sign(h) *
    dl1[m]. The gradient of ReLU at 0 is 0. Paper: training, backward pass.
    """
    (x, w_gate, w_up, w_down, b_gate, b_up, b_down), g, u, h = saved
    check_step(x, dy, dl1)
    _, _, dh = sampled_matmul(wide(dy), w_down.t(), h).entries()  # of wide inputs: not rounded
    rows, _, h_values = h.entries()
    dh += h_values.sign() * dl1[rows]
    dg = None
    if g is None:
        du = h.with_entries(dh.to(x.dtype))
        dx = matmul(du, w_up)
    else:
        du = g.with_entries((dh * g.entries()[2]).to(x.dtype))
        dg = g.with_entries((dh * u.entries()[2]).to(x.dtype))
        dx = matmul(du, w_up) + matmul(dg, w_gate)
    return Gradients(
        dx.to(x.dtype),
        None if dg is None else transpose_matmul(dg, x),
        transpose_matmul(du, x),
        transpose_matmul(h, dy).t(),
        None if b_gate is None else _column_sums(dg),
        None if b_up is None else _column_sums(du),
        None if b_down is None else wide(dy).sum(0).to(x.dtype),
    )
