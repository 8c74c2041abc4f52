"""The tokens with a list, in training by the hybrid format: one program a token.

A program holds rows of K values in registers and reads the weight rows of the token's active
neurons, SLOTS at a time, as rowwise.py does in inference.

    forward:   u = x Wu^T + bu    h = g u    l1 = sum |h|    y = h Wd^T + bd
    backward:  dh = dy Wd + sign(h) dl1    du = dh g    dg = dh u    dx = du Wu + dg Wg

    x, y, dy, dx  [M, K]     lists    place [M], indices, g, u [M, ELL_WIDTH]
    weights       [N, K]     l1, dl1  [M] fp32

Paper: App. B.2, sampled dense-dense and sparse-dense products.
Reference: twell.sparse.hybrid_reference.ffn_forward, ffn_backward;
test: tests/kernels/test_hybrid.py; options: kernels/options.py 'hybrid_rows'.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import narrow, next_power_of_2
from twell.kernels.options import launch_options
from twell.kernels.paper.hybrid_pack import ELL_WIDTH, HybridSaved, Lists
from twell.kernels.paper.hybrid_transpose import Transpose, entry_gradients, store_transposed


@triton.jit
def load_rows(ptr, rows, k, valid, K, EVEN: tl.constexpr):
    """Columns k of these rows in fp32, 0 for rows that are not valid."""
    mask = valid[:, None]
    if not EVEN:
        mask = mask & (k < K)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def hybrid_rows_forward_kernel(
    x_ptr,
    lists,
    wu_ptr,
    bu_ptr,
    wd_ptr,
    bd_ptr,
    y_ptr,
    l1_ptr,
    K,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BK: tl.constexpr,
):
    """y and l1 of one token; stores u. wu_ptr is None if non-gated, biases may be None."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(lists.place + row)
    if count >= 0:
        k = tl.arange(0, BK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        y = tl.zeros((BK,), tl.float32)
        l1 = tl.zeros((SLOTS,), tl.float32)
        for start in range(0, count, SLOTS):
            slots = start + tl.arange(0, SLOTS)
            listed = slots < count
            slots += row * ELL_WIDTH
            neurons = tl.load(lists.indices + slots, mask=listed, other=0).to(tl.int32) & 0xFFFF
            h = tl.load(lists.g + slots, mask=listed, other=0.0).to(tl.float32)
            if wu_ptr is not None:
                u = tl.sum(load_rows(wu_ptr, neurons, k, listed, K, EVEN) * x[None, :], 1)
                if bu_ptr is not None:
                    u += tl.load(bu_ptr + neurons, mask=listed, other=0.0).to(tl.float32)
                u = narrow(u, dtype)
                tl.store(lists.u + slots, u, mask=listed)
                h = narrow(h * u.to(tl.float32), dtype).to(tl.float32)
                h = tl.where(listed, h, 0.0)  # of an infinite x, u is NaN beyond the list
            l1 += tl.abs(h)
            y += tl.sum(h[:, None] * load_rows(wd_ptr, neurons, k, listed, K, EVEN), 0)
        if bd_ptr is not None:
            y += tl.load(bd_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * K + k, narrow(y, dtype), mask=k < K)
        tl.store(l1_ptr + row, tl.sum(l1, 0))


@triton.jit(do_not_specialize=["M"])
def hybrid_rows_backward_kernel(
    dy_ptr,
    dl1_ptr,
    lists,
    wg_ptr,
    wu_ptr,
    wd_ptr,
    dx_ptr,
    transpose,
    M,
    N,
    K,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BK: tl.constexpr,
):
    """dx of one token, and its h, du and dg in the transpose; each unless it is None."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    GATED: tl.constexpr = wg_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(lists.place + row)
    if count >= 0:
        k = tl.arange(0, BK)
        dy = tl.load(dy_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        dl1 = tl.load(dl1_ptr + row)
        dx = tl.zeros((BK,), tl.float32)
        for start in range(0, count, SLOTS):
            slots = start + tl.arange(0, SLOTS)
            listed = slots < count
            slots += row * ELL_WIDTH
            neurons = tl.load(lists.indices + slots, mask=listed, other=0).to(tl.int32) & 0xFFFF
            g = tl.load(lists.g + slots, mask=listed, other=0.0).to(tl.float32)
            u = tl.load(lists.u + slots, mask=listed, other=0.0).to(tl.float32) if GATED else g
            dh = tl.sum(load_rows(wd_ptr, neurons, k, listed, K, EVEN) * dy[None, :], 1)
            h, du, dg = entry_gradients(dh, g, u, dl1, listed, dtype, GATED)
            if dx_ptr is not None:
                w = load_rows(wu_ptr, neurons, k, listed, K, EVEN)
                dx += tl.sum(du.to(tl.float32)[:, None] * w, 0)
            if GATED and dx_ptr is not None:
                w = load_rows(wg_ptr, neurons, k, listed, K, EVEN)
                dx += tl.sum(dg.to(tl.float32)[:, None] * w, 0)
            if transpose is not None:
                tokens = tl.zeros((SLOTS,), tl.int32) + tl.program_id(0)
                store_transposed(transpose, tokens, neurons, listed, h, du, dg, M, N, GATED)
        if dx_ptr is not None:
            tl.store(dx_ptr + row * K + k, narrow(dx, dtype), mask=k < K)


def _row_options(x: Tensor) -> dict[str, int]:
    """Launch options of both kernels for x [M, K]."""
    block_k = next_power_of_2(x.shape[1])
    num_warps = min(max(block_k // 1024, 1), 16)
    options = launch_options("hybrid_rows", x.device)
    return dict(EVEN=block_k == x.shape[1], BK=block_k, num_warps=num_warps, **options)


def forward(
    x: Tensor,
    w_up: Tensor | None,
    b_up: Tensor | None,
    w_down_t: Tensor,
    b_down: Tensor | None,
    lists: Lists,
    y: Tensor,
    l1: Tensor,
) -> None:
    """Writes y [M, K], l1 [M] fp32 and u of the tokens with a list; w_up is None if non-gated."""
    hybrid_rows_forward_kernel[(len(x),)](
        x, lists, w_up, b_up, w_down_t, b_down, y, l1, x.shape[1], **_row_options(x)
    )


def backward(
    dy: Tensor,
    dl1: Tensor,
    weights: tuple[Tensor | None, Tensor, Tensor],
    saved: HybridSaved,
    dx: Tensor | None,
    transpose: Transpose | None,
) -> None:
    """Writes dx [M, K] and the transpose of the tokens with a list, each unless it is None.

    dy [M, K]; dl1 [M] fp32; weights [N, K]: gate or None, up, the transpose of down.
    """
    num_neurons, hidden_size = weights[1].shape
    lists, sizes = saved.lists(dy.dtype), (len(dy), num_neurons, hidden_size)
    hybrid_rows_backward_kernel[(len(dy),)](
        dy, dl1, lists, *weights, dx, transpose, *sizes, **_row_options(dy)
    )
