"""A training step by rows: the paper's algorithm on its hybrid format (App. B.2).

Counts of active neurons are very uneven. So a token with few active neurons has a short list, and
any other token a dense backup row (hybrid_format.py). Lists run on ordinary cores: a program reads
the weight rows of a token's active neurons, SLOTS at a time. Backup rows run on tensor cores, a
tile of BM rows a program; rows that nothing owns are skipped. The weight gradients need the
transpose, which is hybrid again, and are computed alike: a neuron with a list sums the rows of x
and dy of its tokens. Forward saves g and u at active entries only.

The formulas are those of kernels/training.py, with g, u, h, du and dg in lists [M, ELL_WIDTH] and
backup rows [rows, N]. All five are rounded to the storage type, dh is not. Whether a token or a
neuron has a list or a backup row depends on its number of entries alone, so results do not depend
on `capacity`, which decides how many backup rows there are.

Non-finite values. A NaN in a row of x reaches that row of y alone. An inf or NaN in an operand of
an inactive entry reaches nothing through a list; through a backup row it may, since 0 * inf is NaN.

Reference: twell.sparse.reference.union_train.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import Gradients, cdiv, narrow, next_power_of_2, put, wide, with_bias
from twell.kernels.launch import direct
from twell.kernels.options import launch_options, row_warps
from twell.kernels.paper.hybrid_format import (
    ELL_WIDTH,
    Backup,
    HybridSaved,
    Transpose,
    entry_gradients,
    make_transpose,
    pack,
    saved_like,
    store_transposed,
)
from twell.sparse.activations import Weights

# Programs sum as many columns as keep x and dy in the cache.
COLUMN_BYTES = 2**25


@triton.jit
def load_rows(ptr, rows, k, valid, K, EVEN):
    """Columns k of these rows in fp32, 0 for rows that are not valid."""
    mask = valid[:, None]
    if not EVEN:
        mask = mask & (k < K)[None, :]
    value = tl.load(ptr + rows.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
    return value.to(tl.float32)


@direct
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


@direct
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
        put(dx_ptr, row * K + k, dx, k < K)


@direct
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
        put(dwd_ptr, place, down, k < K)
        put(dwu_ptr, place, up, k < K)
        put(dwg_ptr, place, gate, k < K)
        if tl.program_id(1) == 0:
            put(dbu_ptr, neuron, tl.sum(up_bias, 0))
            put(dbg_ptr, neuron, tl.sum(gate_bias, 0))


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
def _store_product(
    a_ptr, w_ptr, a2_ptr, w2_ptr, b_ptr, out_ptr, rows, owners, valid, N, K, BM, BN, BK
):
    """BN columns of the owners' rows: a w + a2 w2 + b, without the terms that are None.

    a and a2 are backup rows [., N], w and w2 [N, K].
    """
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (columns < K)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BK):
        summed = start + tl.arange(0, BK)
        a_place = rows.to(tl.int64)[:, None] * N + summed[None, :]
        a_inside = valid[:, None] & (summed < N)[None, :]
        w_place = summed.to(tl.int64)[:, None] * K + columns[None, :]
        w_inside = (summed < N)[:, None] & inside
        a = tl.load(a_ptr + a_place, mask=a_inside, other=0.0)
        acc = tl.dot(wide(a), wide(tl.load(w_ptr + w_place, mask=w_inside, other=0.0)), acc)
        if a2_ptr is not None:
            a = tl.load(a2_ptr + a_place, mask=a_inside, other=0.0)
            w = tl.load(w2_ptr + w_place, mask=w_inside, other=0.0)
            acc = tl.dot(wide(a), wide(w), acc)
    acc = with_bias(acc, b_ptr, columns, K, False)
    place = owners.to(tl.int64)[:, None] * K + columns[None, :]
    put(out_ptr, place, acc, valid[:, None] & inside)


@triton.jit
def _store_sums(a_ptr, out_ptr, rows, owners, valid, size, ABSOLUTE, BM, BK):
    """The owners' sums over backup rows of a [., size] or, ABSOLUTE, over the absolute values.

    A loop of its own: shared memory that tensor cores read in a product's loop must not be read
    into registers beside them.
    """
    if tl.program_id(1) == 0:
        sums = tl.zeros((BM,), tl.float32)
        for start in range(0, size, BK):
            columns = start + tl.arange(0, BK)
            place = rows.to(tl.int64)[:, None] * size + columns[None, :]
            inside = valid[:, None] & (columns < size)[None, :]
            a = tl.load(a_ptr + place, mask=inside, other=0.0).to(tl.float32)
            sums += tl.sum(tl.abs(a) if ABSOLUTE else a, 1)
        put(out_ptr, owners, sums, valid)


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
    """Rows of `_store_product`; l1, unless it is None, gets each row's sum of |a|."""
    rows, valid, tokens, some = owned_rows(backup, BM)
    if some:
        _store_product(
            a_ptr, w_ptr, a2_ptr, w2_ptr, b_ptr, out_ptr, rows, tokens, valid, N, K, BM, BN, BK
        )
        if l1_ptr is not None:
            _store_sums(a_ptr, l1_ptr, rows, tokens, valid, N, True, BM, BK)


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
    x_ptr,
    dy_ptr,
    transpose,
    weights,
    biases,
    backup,
    M,
    K,
    PLANES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows of the gradients of w_down_t, w_up and w_gate: a backup row [M] times dy or x [M, K].

    The bias gradients are the rows' sums. Products run beside each other: one alone does not fill
    the device.
    """
    rows, valid, neurons, some = owned_rows(backup, BM)
    for plane in tl.static_range(PLANES):
        dw_ptr, db_ptr = weights[plane], biases[plane]
        if some & (tl.program_id(2) == plane):
            a_ptr = transpose.planes + transpose.lists_size
            a_ptr += plane * transpose.plane_size.to(tl.int64)
            other_ptr = dy_ptr if plane == 0 else x_ptr
            if dw_ptr is not None:
                pointers = a_ptr, other_ptr, None, None, None, dw_ptr
                _store_product(*pointers, rows, neurons, valid, M, K, BM, BN, BK)
            if db_ptr is not None:
                _store_sums(a_ptr, db_ptr, rows, neurons, valid, M, False, BM, BK)


def backup_grid(num_rows: int, num_columns: int, options: dict[str, int]) -> tuple[int, int]:
    return cdiv(num_rows, options["BM"]), cdiv(num_columns, options["BN"])


def _row_options(x: Tensor) -> dict[str, int]:
    """Launch options of the kernels of tokens with a list, for x [M, K]."""
    block_k = next_power_of_2(x.shape[1])
    options = launch_options("hybrid_rows", x.device)
    return dict(EVEN=block_k == x.shape[1], BK=block_k, num_warps=row_warps(block_k), **options)


def forward(
    x: Tensor, weights: Weights, token_mask: Tensor | None, capacity: int
) -> tuple[Tensor, ...]:
    """y, l1, token_counts, neuron_counts and needed of a training step, then HybridSaved.

    x [M, K] contiguous, M at least 1; token_mask [M] bool, False for tokens that neuron_counts
    leaves out, or None. If `needed` is above `capacity`, y, l1 and gradients are wrong; counts are
    right.
    """
    num_neurons, hidden_size = weights.w_up.shape
    saved = saved_like(x, weights, capacity)
    counts = pack(x, weights, token_mask, saved)
    y = torch.empty_like(x)
    l1 = torch.empty(len(x), dtype=torch.float32, device=x.device)
    up = (weights.w_up, weights.b_up) if weights.gated else (None, None)
    down = weights.w_down_t, weights.b_down
    hybrid_rows_forward_kernel[(len(x),)](
        x, saved.lists(x.dtype), *up, *down, y, l1, hidden_size, **_row_options(x)
    )
    h = g = saved.dense_g.view(x.dtype)
    backup, options = saved.backup(), launch_options("hybrid_backup", x.device)
    if weights.gated:
        h, u = torch.empty_like(g), saved.dense_u.view(x.dtype)
        hybrid_backup_up_kernel[backup_grid(len(g), num_neurons, options)](
            x, *up, g, u, h, backup, num_neurons, hidden_size, **options
        )
    pairs = h, weights.w_down_t, None, None
    hybrid_backup_product_kernel[backup_grid(len(g), hidden_size, options)](
        *pairs, weights.b_down, y, l1, backup, num_neurons, hidden_size, **options
    )
    return y, l1, *counts, *saved


def backward(
    x: Tensor, weights: Weights, saved: HybridSaved, dy: Tensor, dl1: Tensor, gradients: Gradients
) -> None:
    """Writes the gradients of sum(y * dy) + sum(l1 * dl1), the same bits for the same call.

    dy [M, K] in x.dtype, dl1 [M] fp32.
    """
    transpose = transposed_backup = None
    if any(gradient is not None for gradient in gradients[1:]):
        transpose, transposed_backup = make_transpose(saved, x, weights.gated)
    sizes = len(dy), *weights.w_up.shape
    lists, backup = saved.lists(dy.dtype), saved.backup()
    hybrid_rows_backward_kernel[(len(dy),)](
        dy, dl1, lists, *weights[:3], gradients.x, transpose, *sizes, **_row_options(dy)
    )
    g, u = saved.dense_g.view(dy.dtype), saved.dense_u.view(dy.dtype)
    du, dg = torch.empty_like(g), torch.empty_like(g) if weights.gated else None
    options = launch_options("hybrid_backup", dy.device)
    hybrid_backup_backward_kernel[backup_grid(len(g), len(weights.w_up), options)](
        dy, dl1, weights.w_down_t, g, u, du, dg, backup, transpose, *sizes, **options
    )
    if gradients.x is not None:
        pairs = du, weights.w_up, dg, weights.w_gate
        hybrid_backup_product_kernel[backup_grid(len(g), sizes[2], options)](
            *pairs, None, gradients.x, None, backup, *sizes[1:], **options
        )
    if transpose is not None:
        _weight_gradients(x, dy, transpose, transposed_backup, gradients)


def _weight_gradients(
    x: Tensor, dy: Tensor, transpose: Transpose, backup: Backup, gradients: Gradients
) -> None:
    """Writes the gradients of weights and biases, of the neurons with a list and of the others."""
    num_tokens, hidden_size = x.shape
    weights = gradients.w_down_t, gradients.w_up, gradients.w_gate
    biases = gradients.b_up, gradients.b_gate
    columns = max(COLUMN_BYTES // (2 * x.element_size() * num_tokens), 32)
    block_k = min(next_power_of_2(hidden_size), next_power_of_2(columns + 1) // 2)
    grid = len(transpose.place), cdiv(hidden_size, block_k)
    # Columns are the slow axis: all neurons pass over the same part of x and dy, then the next.
    hybrid_list_gradients_kernel[grid](
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
    options = launch_options("hybrid_gradients", x.device)
    planes = len(transpose.planes)  # non-gated there is no dg
    hybrid_backup_gradients_kernel[*backup_grid(backup.num_rows, hidden_size, options), planes](
        *(x, dy, transpose, weights, (None, *biases), backup, num_tokens, hidden_size),
        PLANES=planes,
        **options,
    )
