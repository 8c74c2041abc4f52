"""The backup rows of training by the hybrid format: products on tensor cores.

Each program computes a tile of BM backup rows. Rows that nothing owns are skipped. The formulas are
those of hybrid.py.

    a, g, u, h, du, dg  [rows, N], dense    x, y, dy, dx  [M, K], read and written by owners

Paper: App. B.2, dense backup. Reference: that of hybrid.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, narrow, wide, with_bias
from twell.kernels.launch import direct
from twell.kernels.options import launch_options
from twell.kernels.paper.hybrid_format import Backup, entry_gradients, store_transposed


@triton.jit
def owned_rows(backup, BM):
    """This program's BM backup rows, which of them are in use, their owners, and if any is."""
    used = tl.minimum(tl.load(backup.used), backup.num_rows)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    owners = tl.load(backup.owners + rows, mask=rows < used, other=0)
    return rows, rows < used, owners, tl.program_id(0) * BM < used


@triton.jit
def _sampled_product(a_ptr, tokens, valid, w_ptr, neurons, N, K, BM, BN, BK):
    """Rows `tokens` of a times rows `neurons` of w, in fp32."""
    acc = tl.zeros((BM, BN), tl.float32)
    a_ptrs = a_ptr + tokens.to(tl.int64)[:, None] * K
    w_ptrs = w_ptr + neurons.to(tl.int64)[:, None] * K
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)[None, :]
        a = tl.load(a_ptrs + k, mask=valid[:, None] & (k < K), other=0.0)
        w = tl.load(w_ptrs + k, mask=(neurons < N)[:, None] & (k < K), other=0.0)
        acc = tl.dot(wide(a), wide(w).T, acc)
    return acc


@triton.jit
def _row_sums(a_ptr, rows, valid, size, ABSOLUTE, BM, BK):
    """The sums over rows of a [., size], or over the absolute values."""
    sums = tl.zeros((BM,), tl.float32)
    for start in range(0, size, BK):
        columns = start + tl.arange(0, BK)
        place = rows.to(tl.int64)[:, None] * size + columns[None, :]
        inside = valid[:, None] & (columns < size)[None, :]
        a = tl.load(a_ptr + place, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(tl.abs(a) if ABSOLUTE else a, 1)
    return sums


@direct
@triton.jit
def hybrid_backup_up_kernel(
    x_ptr,
    wu_ptr,
    bu_ptr,
    g_ptr,
    u_ptr,
    h_ptr,
    backup,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """u and h, 0 where g is."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows, valid, tokens, some = owned_rows(backup, BM)
    if some:
        neurons = tl.program_id(1) * BN + tl.arange(0, BN)
        u = _sampled_product(x_ptr, tokens, valid, wu_ptr, neurons, N, K, BM, BN, BK)
        u = with_bias(u, bu_ptr, neurons, N, False)
        place = rows.to(tl.int64)[:, None] * N + neurons[None, :]
        inside = valid[:, None] & (neurons < N)[None, :]
        g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
        u = narrow(tl.where(g != 0, u, 0.0), dtype)
        tl.store(u_ptr + place, u, mask=inside)
        tl.store(h_ptr + place, narrow(g * u.to(tl.float32), dtype), mask=inside)


@direct
@triton.jit
def hybrid_backup_product_kernel(
    a_ptr,
    w_ptr,
    a2_ptr,
    w2_ptr,
    b_ptr,
    out_ptr,
    l1_ptr,
    backup,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows of the output: a w + a2 w2 + b, without the terms that are None.

    a and a2 are backup rows [., N], w and w2 weights [N, K]. l1 gets each row's sum of |a|.
    """
    rows, valid, tokens, some = owned_rows(backup, BM)
    if some:
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = (columns < K)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, N, BK):
            neurons = start + tl.arange(0, BK)
            a_place = rows.to(tl.int64)[:, None] * N + neurons[None, :]
            a_inside = valid[:, None] & (neurons < N)[None, :]
            w_place = neurons.to(tl.int64)[:, None] * K + columns[None, :]
            w_inside = (neurons < N)[:, None] & inside
            a = tl.load(a_ptr + a_place, mask=a_inside, other=0.0)
            acc = tl.dot(wide(a), wide(tl.load(w_ptr + w_place, mask=w_inside, other=0.0)), acc)
            if a2_ptr is not None:
                a = tl.load(a2_ptr + a_place, mask=a_inside, other=0.0)
                w = tl.load(w2_ptr + w_place, mask=w_inside, other=0.0)
                acc = tl.dot(wide(a), wide(w), acc)
        acc = with_bias(acc, b_ptr, columns, K, False)
        out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
        # A loop of its own: shared memory that tensor cores read in the product's loop must not be
        # read into registers beside them.
        if l1_ptr is not None:
            if tl.program_id(1) == 0:
                l1 = _row_sums(a_ptr, rows, valid, N, True, BM, BK)
                tl.store(l1_ptr + tokens, l1, mask=valid)


@direct
@triton.jit(do_not_specialize=["M"])
def hybrid_backup_backward_kernel(
    dy_ptr,
    dl1_ptr,
    wd_ptr,
    g_ptr,
    u_ptr,
    du_ptr,
    dg_ptr,
    backup,
    transpose,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """du and dg from g and u; active entries go to the transpose too, unless it is None."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    GATED: tl.constexpr = dg_ptr is not None
    rows, valid, tokens, some = owned_rows(backup, BM)
    if some:
        neurons = tl.program_id(1) * BN + tl.arange(0, BN)
        dh = _sampled_product(dy_ptr, tokens, valid, wd_ptr, neurons, N, K, BM, BN, BK)
        dl1 = tl.load(dl1_ptr + tokens, mask=valid, other=0.0)[:, None]
        place = rows.to(tl.int64)[:, None] * N + neurons[None, :]
        inside = valid[:, None] & (neurons < N)[None, :]
        g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + place, mask=inside, other=0.0).to(tl.float32) if GATED else g
        h, du, dg = entry_gradients(dh, g, u, dl1, g != 0, dtype, GATED)
        tl.store(du_ptr + place, du, mask=inside)
        if GATED:
            tl.store(dg_ptr + place, dg, mask=inside)
        if transpose is not None:
            of_token = tl.broadcast_to(tokens[:, None], (BM, BN))
            of_neuron = tl.broadcast_to(neurons[None, :], (BM, BN))
            store_transposed(transpose, of_token, of_neuron, g != 0, h, du, dg, M, N, GATED)


@direct
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
                bias = _row_sums(a_ptr, rows, valid, M, False, BM, BK)
                tl.store(db_ptr + neurons, narrow(bias, dtype), mask=valid)


def backup_grid(num_rows: int, num_columns: int, options: dict[str, int]) -> tuple[int, int]:
    return cdiv(num_rows, options["BM"]), cdiv(num_columns, options["BN"])


def backup_product(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    out: Tensor,
    l1: Tensor | None,
    backup: Backup,
) -> None:
    """Writes the owners' rows of out [M, K]: the sum of the pairs' products, plus bias [K].

    A pair is a matrix [rows, N] and weights [N, K]. l1 [M] fp32 gets the sums of |first matrix|.
    """
    num_neurons, hidden_size = first[1].shape
    options = launch_options("hybrid_backup", out.device)
    hybrid_backup_product_kernel[backup_grid(backup.num_rows, hidden_size, options)](
        *first, *second, bias, out, l1, backup, num_neurons, hidden_size, **options
    )
