"""The weight and bias gradients of training by the hybrid format, from the transpose.

    dWd^T = h^T dy        dWu = du^T x        dWg = dg^T x        dbu, dbg: the sums of du, dg

A neuron with a list sums the rows of x and dy of its tokens, as the tokens' lists do; a neuron with
a backup row is a row of a product on tensor cores.

    x, dy  [M, K]      dwd, dwu, dwg  [N, K]      dbu, dbg  [N]; None leaves a gradient out

Paper: App. B.2, weight gradients.
Reference: twell.sparse.hybrid_reference.transpose_matmul;
test: tests/kernels/test_hybrid.py; options: kernels/options.py 'hybrid_weights', 'hybrid_backup'.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, narrow, next_power_of_2, wide
from twell.kernels.options import launch_options
from twell.kernels.paper.hybrid_backup import load_columns, owned_rows
from twell.kernels.paper.hybrid_rows import load_rows
from twell.kernels.paper.hybrid_transpose import Transpose, Transposed

# Programs sum as many columns as keep x and dy in the cache.
COLUMN_BYTES = 2**25


@triton.jit
def hybrid_list_gradients_kernel(
    x_ptr,
    dy_ptr,
    transpose,
    dwd_ptr,
    dwu_ptr,
    dwg_ptr,
    dbu_ptr,
    dbg_ptr,
    K,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BK: tl.constexpr,
):
    """BK columns of the weight gradients of one neuron with a list, and its bias gradients."""
    GATE: tl.constexpr = dwg_ptr is not None or dbg_ptr is not None
    UP: tl.constexpr = dwu_ptr is not None or dbu_ptr is not None
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    planes_ptr = transpose.planes
    neuron = tl.program_id(0).to(tl.int64)
    count = tl.load(transpose.place + neuron)
    if count >= 0:
        k = tl.program_id(1) * BK + tl.arange(0, BK)
        gate = tl.zeros((BK,), tl.float32)
        up = tl.zeros((BK,), tl.float32)
        down = tl.zeros((BK,), tl.float32)
        gate_bias = tl.zeros((SLOTS,), tl.float32)
        up_bias = tl.zeros((SLOTS,), tl.float32)
        for start in range(0, count, SLOTS):
            slots = start + tl.arange(0, SLOTS)
            listed = slots < count
            slots += neuron * transpose.width
            tokens = tl.load(transpose.tokens + slots, mask=listed, other=0)
            if dwd_ptr is not None:
                h = tl.load(planes_ptr + slots, mask=listed, other=0.0).to(tl.float32)
                down += tl.sum(h[:, None] * load_rows(dy_ptr, tokens, k, listed, K, EVEN), 0)
            if UP or GATE:
                x = load_rows(x_ptr, tokens, k, listed, K, EVEN)
            if UP:
                du_ptrs = planes_ptr + transpose.plane_size + slots
                du = tl.load(du_ptrs, mask=listed, other=0.0).to(tl.float32)
                up += tl.sum(du[:, None] * x, 0)
                up_bias += du
            if GATE:
                dg_ptrs = planes_ptr + 2 * transpose.plane_size.to(tl.int64) + slots
                dg = tl.load(dg_ptrs, mask=listed, other=0.0).to(tl.float32)
                gate += tl.sum(dg[:, None] * x, 0)
                gate_bias += dg
        place = neuron * K + k
        if dwd_ptr is not None:
            tl.store(dwd_ptr + place, narrow(down, dtype), mask=k < K)
        if dwu_ptr is not None:
            tl.store(dwu_ptr + place, narrow(up, dtype), mask=k < K)
        if dwg_ptr is not None:
            tl.store(dwg_ptr + place, narrow(gate, dtype), mask=k < K)
        if tl.program_id(1) == 0:
            if dbu_ptr is not None:
                tl.store(dbu_ptr + neuron, narrow(tl.sum(up_bias, 0), dtype))
            if dbg_ptr is not None:
                tl.store(dbg_ptr + neuron, narrow(tl.sum(gate_bias, 0), dtype))


@triton.jit(do_not_specialize=["M"])
def hybrid_backup_gradients_kernel(
    a_ptr, x_ptr, dw_ptr, db_ptr, backup, M, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Rows of one weight gradient: backup rows a [., M] times x [M, K]; db gets their sums."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows, valid, neurons, some = owned_rows(backup, BM)
    if some:
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = (columns < K)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, M, BK):
            tokens = start + tl.arange(0, BK)
            a_place = rows.to(tl.int64)[:, None] * M + tokens[None, :]
            x_place = tokens.to(tl.int64)[:, None] * K + columns[None, :]
            a = tl.load(a_ptr + a_place, mask=valid[:, None] & (tokens < M)[None, :], other=0.0)
            x = tl.load(x_ptr + x_place, mask=(tokens < M)[:, None] & inside, other=0.0)
            acc = tl.dot(wide(a), wide(x), acc)
        if dw_ptr is not None:
            dw_ptrs = dw_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
            tl.store(dw_ptrs, narrow(acc, dtype), mask=valid[:, None] & inside)
        # A loop of its own, as l1 of hybrid_backup_product_kernel.
        if db_ptr is not None:
            if tl.program_id(1) == 0:
                bias = tl.zeros((BM,), tl.float32)
                for start in range(0, M, BK):
                    a = load_columns(a_ptr, rows, valid, start, M, BK)
                    bias += tl.sum(a.to(tl.float32), 1)
                tl.store(db_ptr + neurons, narrow(bias, dtype), mask=valid)


def from_lists(
    x: Tensor,
    dy: Tensor,
    transpose: Transpose,
    weights: tuple[Tensor | None, Tensor | None, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
) -> None:
    """Writes the gradients of the neurons with a list.

    weights: dwd, dwu, dwg [N, K] or None; biases: dbu, dbg [N] or None.
    """
    num_tokens, hidden_size = x.shape
    columns = max(COLUMN_BYTES // (2 * x.element_size() * num_tokens), 32)
    block_k = min(next_power_of_2(hidden_size), next_power_of_2(columns + 1) // 2)
    # Columns are the slow axis: all neurons pass over the same part of x and dy, then the next.
    hybrid_list_gradients_kernel[(len(transpose.place), cdiv(hidden_size, block_k))](
        x,
        dy,
        transpose,
        *weights,
        *biases,
        hidden_size,
        EVEN=hidden_size % block_k == 0,
        BK=block_k,
        num_warps=min(max(block_k // 256, 1), 8),
        **launch_options("hybrid_weights", x.device),
    )


def from_backup(
    x: Tensor,
    dy: Tensor,
    transposed: Transposed,
    weights: tuple[Tensor | None, Tensor | None, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
) -> None:
    """Writes the gradients of the neurons with a backup row; weights and biases: `from_lists`."""
    num_tokens, hidden_size = x.shape
    backup = transposed.backup
    options = launch_options("hybrid_backup", x.device)
    grid = cdiv(backup.num_rows, options["BM"]), cdiv(hidden_size, options["BN"])
    # Non-gated, there is no dense matrix of dg.
    products = zip(transposed.dense, (dy, x, x), weights, (None, *biases), strict=False)
    for dense, other, dw, db in products:
        if dw is not None or db is not None:
            hybrid_backup_gradients_kernel[grid](
                dense, other, dw, db, backup, num_tokens, hidden_size, **options
            )
