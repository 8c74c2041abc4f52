"""Training by rows: the paper's algorithm on its hybrid format (App. B.2), forward and backward.

Counts of active neurons are very uneven, so a token with at most ELL_WIDTH of them keeps a short list, and any other one a
dense backup row. Lists run on ordinary cores, one program a token, as in rowwise.py; backup rows are products for the
tensor cores. Forward keeps g and u at active entries and nothing else:

    h = g * u    l1 = sum |h|    y = h w_down^T
    dh = dy w_down + sign(h) dl1    du = dh * g    dg = dh * u    dx = du w_up + dg w_gate

(Non-gated: h = g, du = dh.) The weight gradients need the transpose, which is hybrid again: a neuron with few tokens keeps
a list of them, any other one a dense row. An entry's place in its neuron's list is the number of tokens before it that have
the neuron active, taken from a bit matrix: every list is in the order of tokens, and no sum depends on which program ran
first. Backup rows are handed out by a counter and may be any row, which no result depends on.

Kernels share these tuples; `place` is n >= 0 for a list of n entries and n < 0 for backup row ~n:

    lists      place [M], indices, g and u [M, ELL_WIDTH]
    backup     the token of each backup row, how many rows were wanted, and how many there are
    transpose  marks [ceil(M / 32), N], where bit i of word j is token 32 j + i; before (the same shape), the marks of a
               neuron in words before this one; place [N]; tokens [N, T]; values: h, du and dg, each of them lists
               [N, T] and then backup rows [backup, M]; the size of one of the three and that of its lists; T.
               None where no gradient of a weight is asked for

Whether a token or a neuron has a list or a backup row depends on its number of entries alone: results do not depend on
`capacity`, which decides how many backup rows there are.

A row that finds no room in the backup counts as empty, and `needed` says so. g, u, h, du and dg are rounded to the storage
type, dh is not.

Non-finite values. A NaN in a row of x reaches that row of y alone. An inf or NaN in an operand of an inactive entry reaches
nothing through a list; in a backup row it may, since 0 * inf is NaN there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import (
    cdiv,
    config,
    launch_options,
    narrow,
    next_power_of_2,
    popcount,
    round_up,
    wide,
)
from twell.kernels.gate import gate_bits

ELL_WIDTH = tl.constexpr(128)  # the paper's
LEAST_WIDTH = 64  # of a neuron's list
NEURON_ROWS = 4
# For g, which is packed and freed: tokens are taken in chunks that keep it within this (or 256 at a time).
WORKSPACE_BYTES = 2**30
# Where lists of neurons are summed, programs work on as many columns as leave x and dy in the cache.
COLUMN_BYTES = 2**25

# Sizes. They follow from shapes alone, so that nothing waits for the device.


def backup_rows(num_tokens: int, num_neurons: int, capacity: int) -> int:
    """Backup rows of tokens: at least `capacity` entries for each token, at least 1 row, at most one for each token."""
    return torch.sym_min(torch.sym_max(-(-num_tokens * capacity // num_neurons), 1), num_tokens)


def list_width(num_tokens: int) -> int:
    """Entries of a neuron's list in the transpose: one token in 64, rounded up to a power of two, at least LEAST_WIDTH."""
    return max(next_power_of_2(cdiv(num_tokens, 64)), LEAST_WIDTH)


def transposed_rows(num_tokens: int, num_neurons: int, num_backup: int) -> int:
    """Backup rows of the transpose, for neurons with longer lists, from the number of backup rows of tokens.

    At least 1 and at most one for each neuron; they have up to NEURON_ROWS times the entries of those of tokens.
    """
    return min(max(NEURON_ROWS * num_backup * num_neurons // num_tokens, 1), num_neurons)


@triton.jit(do_not_specialize=["M"])
def needed_kernel(
    counts_ptr,
    used_ptr,
    needed_ptr,
    M,
    N,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least capacity that has room for these counts: `backup_rows` and `transposed_rows`, inverted."""
    heavy = tl.load(used_ptr).to(tl.int64) * 0
    for start in range(0, N, BLOCK):
        neurons = start + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + neurons, mask=neurons < N, other=0)
        heavy += tl.sum((count > WIDTH).to(tl.int64), 0)
    of_neurons = tl.where(heavy > 1, tl.cdiv(heavy * M, ROWS * N), 1)
    rows = tl.maximum(of_neurons, tl.load(used_ptr))
    tl.store(needed_ptr, tl.where(rows > 1, (rows - 1) * N // M + 1, 0))


def find_needed(counts: Tensor, used: Tensor, num_tokens: int, needed: Tensor) -> None:
    """Writes into `needed` 0-d int64 the least capacity that has room.

    counts [N] int32, the tokens of each neuron; used [1] int32, the tokens that want a backup row. Ours.
    """
    needed_kernel[(1,)](
        *(counts, used, needed, num_tokens, len(counts)),
        WIDTH=list_width(num_tokens),
        ROWS=NEURON_ROWS,
        BLOCK=4096,
        **launch_options(num_warps=8, num_stages=1),
    )


class Saved(NamedTuple):
    """What is kept between forward and backward besides x and the weights, all integers; sizes depend on no data.

    place [M] int32; lists [M, ELL_WIDTH] int16: indices, bits of g, bits of u; tokens of backup rows [B] int32, number of
    rows wanted [1] int32; backup rows [B, num_neurons] int16: bits of g, bits of u. Those of u are empty if not gated.
    """

    place: Tensor
    indices: Tensor
    g: Tensor
    u: Tensor
    tokens: Tensor
    used: Tensor
    dense_g: Tensor
    dense_u: Tensor


def saved_like(x: Tensor, num_neurons: int, capacity: int, gated: bool) -> Saved:
    """Empty tensors of the shapes of what `forward` keeps."""
    num_tokens = x.shape[0]
    num_backup = backup_rows(num_tokens, num_neurons, capacity)
    lists, dense = (num_tokens, ELL_WIDTH.value), (num_backup, num_neurons)
    int32 = ((num_tokens,), (num_backup,), (1,))
    int16 = (lists, lists, lists if gated else (0,), dense, dense if gated else (0,))
    place, tokens, used = (x.new_empty(shape, dtype=torch.int32) for shape in int32)
    indices, g, u, dense_g, dense_u = (x.new_empty(shape, dtype=torch.int16) for shape in int16)
    return Saved(place, indices, g, u, tokens, used, dense_g, dense_u)


# Packing


@triton.jit(do_not_specialize=["first"])
def pack_kernel(
    g_ptr, bits_ptr, counts_ptr, lists, backup, dense_ptr, first, N, width, WORDS: tl.constexpr
):
    """Packs one token, number first + program: its count, its place, and its list or backup row. Moves bare bits."""
    place_ptr, indices_ptr, values_ptr = lists
    tokens_ptr, used_ptr, num_backup = backup
    row = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    bits = tl.load(bits_ptr + row * (width // 32) + words, mask=words < tl.cdiv(N, 32), other=0)
    count = popcount(bits)
    total = tl.sum(count, 0)
    place = total
    if total <= ELL_WIDTH:
        slot = row * ELL_WIDTH + tl.cumsum(count, 0) - count
        # Each lane takes one bit of its word at a time, the lowest first.
        for _ in range(0, tl.max(count, 0)):
            lowest = bits & -bits
            bits ^= lowest
            neurons = words * 32 + popcount(lowest - 1)
            g = tl.load(g_ptr + row * width + neurons, mask=lowest != 0, other=0)
            tl.store(values_ptr + slot, g, mask=lowest != 0)
            tl.store(indices_ptr + slot, neurons.to(tl.int16), mask=lowest != 0)
            slot += 1
    else:
        free = tl.atomic_add(used_ptr, 1, sem="relaxed")
        place = tl.where(free < num_backup, ~free, 0)
        if free < num_backup:
            tl.store(tokens_ptr + free, first + tl.program_id(0))
            for start in range(0, N, 1024):
                neurons = start + tl.arange(0, 1024)
                g = tl.load(g_ptr + row * width + neurons, mask=neurons < N, other=0)
                g = tl.where((g & 0x7FFF) != 0, g, 0)  # -0.0 is not active
                tl.store(dense_ptr + free.to(tl.int64) * N + neurons, g, mask=neurons < N)
    tl.store(counts_ptr + row, total)
    tl.store(place_ptr + row, place)


@triton.jit(do_not_specialize=["M"])
def count_kernel(bits_ptr, mask_ptr, all_ptr, counted_ptr, M, N, stride, TOKENS: tl.constexpr):
    """Adds, for each of 128 neurons, the tokens that have it active, and those of them whose mask is not 0."""
    words = tl.program_id(0) * 4 + tl.arange(0, 4)
    all = tl.zeros((4, 32), tl.int32)
    counted = tl.zeros((4, 32), tl.int32)
    for step in range(0, TOKENS, 32):
        rows = tl.program_id(1) * TOKENS + step + tl.arange(0, 32)
        inside = (rows < M)[:, None] & (words < tl.cdiv(N, 32))[None, :]
        bits = tl.load(
            bits_ptr + rows.to(tl.int64)[:, None] * stride + words[None, :], mask=inside, other=0
        )
        active = (bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        all += tl.sum(active, 0)
        if mask_ptr is not None:
            mask = tl.load(mask_ptr + rows, mask=rows < M, other=0) != 0
            counted += tl.sum(tl.where(mask[:, None, None], active, 0), 0)
    neurons = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.atomic_add(all_ptr + neurons, all, mask=(neurons < N) & (all != 0), sem="relaxed")
    if mask_ptr is not None:
        tl.atomic_add(
            counted_ptr + neurons, counted, mask=(neurons < N) & (counted != 0), sem="relaxed"
        )


def _pack(
    x: Tensor, w: Tensor, b: Tensor | None, token_mask: Tensor | None, saved: Saved
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gate and fills all that is saved but u; returns counts of tokens and of neurons, and `needed`."""
    num_tokens, num_neurons = len(x), len(w)
    place, indices, values, _, tokens, used, dense, _ = saved
    used.zero_()
    token_counts = torch.empty_like(place)
    counts = torch.zeros(num_neurons, dtype=torch.int32, device=x.device)
    neuron_counts = counts
    if token_mask is not None:
        token_mask = token_mask.contiguous().view(torch.uint8)
        neuron_counts = torch.zeros_like(counts)
    size = 256 * max(1, WORKSPACE_BYTES // (256 * 2 * round_up(num_neurons, 256)))
    for first in range(0, num_tokens, size):
        chunk = slice(first, first + size)
        g, bits = gate_bits(x[chunk], w, b, by_neuron=False)
        mask = None if token_mask is None else token_mask[chunk]
        count_kernel[(cdiv(num_neurons, 128), cdiv(len(g), 512))](
            *(bits, mask, counts, neuron_counts, len(g), num_neurons, bits.shape[1]),
            TOKENS=512,
            **launch_options(num_warps=4, num_stages=1),
        )
        lists = (place[chunk], indices[chunk], values[chunk])
        pack_kernel[(len(g),)](
            *(
                g.view(torch.int16),
                bits,
                token_counts[chunk],
                lists,
                (tokens, used, len(dense)),
                dense,
            ),
            *(first, num_neurons, g.shape[1]),
            WORDS=next_power_of_2(cdiv(num_neurons, 32)),
            **launch_options(num_warps=1, num_stages=1),
        )
    needed = torch.empty((), dtype=torch.int64, device=x.device)
    find_needed(counts, used, num_tokens, needed)
    return token_counts, neuron_counts, needed


# Tokens with a list: one program each, with rows of K values in registers


@triton.jit
def _rows(ptr, rows, k, wanted, K, EVEN: tl.constexpr):
    """Columns k of these rows in fp32, 0 for rows that are not wanted."""
    mask = wanted[:, None]
    if not EVEN:
        mask = mask & (k < K)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def row_forward_kernel(
    x_ptr,
    lists,
    up,
    down,
    y_ptr,
    l1_ptr,
    K,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BK: tl.constexpr,
):
    """y and l1 of one token; stores u. `down` and, gated, `up` are weights and a bias or None."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    place_ptr, indices_ptr, g_ptr, u_ptr = lists
    wu_ptr, bu_ptr = up
    wd_ptr, bd_ptr = down
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(place_ptr + row)
    if count >= 0:
        k = tl.arange(0, BK)
        x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        y = tl.zeros((BK,), tl.float32)
        l1 = tl.zeros((SLOTS,), tl.float32)
        for start in range(0, count, SLOTS):
            slots = start + tl.arange(0, SLOTS)
            listed = slots < count
            slots += row * ELL_WIDTH
            neurons = tl.load(indices_ptr + slots, mask=listed, other=0).to(tl.int32) & 0xFFFF
            h = tl.load(g_ptr + slots, mask=listed, other=0.0).to(tl.float32)
            if wu_ptr is not None:
                u = tl.sum(_rows(wu_ptr, neurons, k, listed, K, EVEN) * x[None, :], 1)
                if bu_ptr is not None:
                    u += tl.load(bu_ptr + neurons, mask=listed, other=0.0).to(tl.float32)
                u = narrow(u, dtype)
                tl.store(u_ptr + slots, u, mask=listed)
                h = narrow(h * u.to(tl.float32), dtype).to(tl.float32)
                h = tl.where(listed, h, 0.0)  # of an infinite x, u is NaN beyond the list
            l1 += tl.abs(h)
            y += tl.sum(h[:, None] * _rows(wd_ptr, neurons, k, listed, K, EVEN), 0)
        if bd_ptr is not None:
            y += tl.load(bd_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * K + k, narrow(y, dtype), mask=k < K)
        tl.store(l1_ptr + row, tl.sum(l1, 0))


@triton.jit
def _gradients(dh, g, u, dl1, active, dtype: tl.constexpr, GATED: tl.constexpr):
    """h, du and dg in the storage type, from dh without the part of l1; du and dg are 0 where not active."""
    h = narrow(g * u, dtype) if GATED else narrow(g, dtype)
    sign = (h.to(tl.float32) > 0).to(tl.float32) - (h.to(tl.float32) < 0).to(tl.float32)
    dh += sign * dl1
    du = narrow(tl.where(active, dh * g if GATED else dh, 0.0), dtype)
    dg = narrow(tl.where(active, dh * u, 0.0), dtype)
    return h, du, dg


@triton.jit
def _transpose(transpose, token, neuron, active, h, du, dg, M, N, GATED: tl.constexpr):
    """Stores active entries in the transpose."""
    marks_ptr, before_ptr, place_ptr, tokens_ptr, values_ptr, size, listed_size, T = transpose
    word = (token // 32).to(tl.int64) * N + neuron
    earlier = tl.load(marks_ptr + word, mask=active, other=0) & ((1 << (token % 32)) - 1)
    rank = tl.load(before_ptr + word, mask=active, other=0) + popcount(earlier)
    place = tl.load(place_ptr + neuron, mask=active, other=0)
    listed = active & (rank < place)
    stored = active & ((rank < place) | (place < 0))
    slot = neuron.to(tl.int64) * T + rank
    tl.store(tokens_ptr + slot, token, mask=listed)
    slot = tl.where(place < 0, listed_size + (~place).to(tl.int64) * M + token, slot)
    tl.store(values_ptr + slot, h, mask=stored)
    tl.store(values_ptr + size + slot, du, mask=stored)
    if GATED:
        tl.store(values_ptr + 2 * size.to(tl.int64) + slot, dg, mask=stored)


@triton.jit(do_not_specialize=["M"])
def row_backward_kernel(
    dy_ptr,
    dl1_ptr,
    lists,
    weights,
    dx_ptr,
    transpose,
    M,
    N,
    K,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BK: tl.constexpr,
):
    """dx of one token, if asked for; its h, du and dg go to the transpose. `weights` are those of gate, up and down."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    place_ptr, indices_ptr, g_ptr, u_ptr = lists
    wg_ptr, wu_ptr, wd_ptr = weights
    GATED: tl.constexpr = wg_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(place_ptr + row)
    if count >= 0:
        k = tl.arange(0, BK)
        dy = tl.load(dy_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        dl1 = tl.load(dl1_ptr + row)
        dx = tl.zeros((BK,), tl.float32)
        for start in range(0, count, SLOTS):
            slots = start + tl.arange(0, SLOTS)
            listed = slots < count
            slots += row * ELL_WIDTH
            neurons = tl.load(indices_ptr + slots, mask=listed, other=0).to(tl.int32) & 0xFFFF
            g = tl.load(g_ptr + slots, mask=listed, other=0.0).to(tl.float32)
            u = tl.load(u_ptr + slots, mask=listed, other=0.0).to(tl.float32) if GATED else g
            dh = tl.sum(_rows(wd_ptr, neurons, k, listed, K, EVEN) * dy[None, :], 1)
            h, du, dg = _gradients(dh, g, u, dl1, listed, dtype, GATED)
            if dx_ptr is not None:
                dx += tl.sum(
                    du.to(tl.float32)[:, None] * _rows(wu_ptr, neurons, k, listed, K, EVEN), 0
                )
            if GATED and dx_ptr is not None:
                dx += tl.sum(
                    dg.to(tl.float32)[:, None] * _rows(wg_ptr, neurons, k, listed, K, EVEN), 0
                )
            if transpose is not None:
                tokens = tl.zeros((SLOTS,), tl.int32) + tl.program_id(0)
                _transpose(transpose, tokens, neurons, listed, h, du, dg, M, N, GATED)
        if dx_ptr is not None:
            tl.store(dx_ptr + row * K + k, narrow(dx, dtype), mask=k < K)


def _row_options(x: Tensor) -> dict[str, int]:
    block_k = next_power_of_2(x.shape[1])
    options = dict(
        EVEN=block_k == x.shape[1], BK=block_k, num_warps=min(max(block_k // 1024, 1), 16)
    )
    return {**options, **config("hybrid_rows", x.device)}


# Tokens with a backup row: products of tiles, [BM, BN] of them in each program


@triton.jit
def _backup_rows(backup, BM: tl.constexpr):
    """This program's BM backup rows, which of them are in use, whose they are, and whether any is in use."""
    owners_ptr, used_ptr, num_backup = backup
    used = tl.minimum(tl.load(used_ptr), num_backup)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    return (
        rows,
        rows < used,
        tl.load(owners_ptr + rows, mask=rows < used, other=0),
        tl.program_id(0) * BM < used,
    )


@triton.jit
def _backup_tile(a_ptr, rows, valid, start, size, BK: tl.constexpr):
    """BK columns of rows of a matrix [., size]."""
    columns = start + tl.arange(0, BK)
    place = rows.to(tl.int64)[:, None] * size + columns[None, :]
    return tl.load(a_ptr + place, mask=valid[:, None] & (columns < size)[None, :], other=0.0)


@triton.jit
def _sampled(
    a_ptr, tokens, valid, w_ptr, neurons, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
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
def backup_up_kernel(
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
    rows, valid, tokens, some = _backup_rows(backup, BM)
    if some:
        neurons = tl.program_id(1) * BN + tl.arange(0, BN)
        u = _sampled(x_ptr, tokens, valid, wu_ptr, neurons, N, K, BM, BN, BK)
        if bu_ptr is not None:
            u += tl.load(bu_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[None, :]
        place = rows.to(tl.int64)[:, None] * N + neurons[None, :]
        inside = valid[:, None] & (neurons < N)[None, :]
        g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
        u = narrow(tl.where(g != 0, u, 0.0), dtype)
        tl.store(u_ptr + place, u, mask=inside)
        tl.store(h_ptr + place, narrow(g * u.to(tl.float32), dtype), mask=inside)


@triton.jit
def backup_product_kernel(
    first,
    second,
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
    """Rows of the output: the product of the first pair, plus that of the second if there is one, plus the bias.

    A pair is a matrix of backup rows [., N] and weights [N, K]. l1 gets each row's sum of |a| of the first.
    """
    a_ptr, w_ptr = first
    rows, valid, tokens, some = _backup_rows(backup, BM)
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
            if second[0] is not None:
                a = tl.load(second[0] + a_place, mask=a_inside, other=0.0)
                acc = tl.dot(
                    wide(a), wide(tl.load(second[1] + w_place, mask=w_inside, other=0.0)), acc
                )
        if b_ptr is not None:
            acc += tl.load(b_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(out_ptrs, narrow(acc, out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
        # In a loop of its own: what tensor cores read of the shared memory must not be read into registers beside them.
        if l1_ptr is not None:
            if tl.program_id(1) == 0:
                l1 = tl.zeros((BM,), tl.float32)
                for start in range(0, N, BK):
                    l1 += tl.sum(
                        tl.abs(_backup_tile(a_ptr, rows, valid, start, N, BK).to(tl.float32)), 1
                    )
                tl.store(l1_ptr + tokens, l1, mask=valid)


@triton.jit(do_not_specialize=["M"])
def backup_backward_kernel(
    dy_ptr,
    dl1_ptr,
    wd_ptr,
    kept,
    gradients,
    backup,
    transpose,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """du and dg from g and u, all dense; active entries go to the transpose too."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    GATED: tl.constexpr = gradients[1] is not None
    rows, valid, tokens, some = _backup_rows(backup, BM)
    if some:
        neurons = tl.program_id(1) * BN + tl.arange(0, BN)
        dh = _sampled(dy_ptr, tokens, valid, wd_ptr, neurons, N, K, BM, BN, BK)
        dl1 = tl.load(dl1_ptr + tokens, mask=valid, other=0.0)[:, None]
        place = rows.to(tl.int64)[:, None] * N + neurons[None, :]
        inside = valid[:, None] & (neurons < N)[None, :]
        g = tl.load(kept[0] + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(kept[1] + place, mask=inside, other=0.0).to(tl.float32) if GATED else g
        h, du, dg = _gradients(dh, g, u, dl1, g != 0, dtype, GATED)
        tl.store(gradients[0] + place, du, mask=inside)
        if GATED:
            tl.store(gradients[1] + place, dg, mask=inside)
        if transpose is not None:
            of_token = tl.broadcast_to(tokens[:, None], (BM, BN))
            of_neuron = tl.broadcast_to(neurons[None, :], (BM, BN))
            _transpose(transpose, of_token, of_neuron, g != 0, h, du, dg, M, N, GATED)


# The transpose and the weight gradients


@triton.jit
def mark_kernel(place_ptr, indices_ptr, dense_ptr, marks_ptr, N):
    """Sets one token's bit for each of its active neurons."""
    token = tl.program_id(0)
    place = tl.load(place_ptr + token)
    marks_ptr += (token // 32).to(tl.int64) * N
    if place >= 0:
        slots = tl.arange(0, ELL_WIDTH)
        neurons = tl.load(
            indices_ptr + token.to(tl.int64) * ELL_WIDTH + slots, mask=slots < place, other=0
        ).to(tl.int32)
        bits = tl.zeros((ELL_WIDTH,), tl.int32) + (1 << (token % 32))
        tl.atomic_or(marks_ptr + (neurons & 0xFFFF), bits, mask=slots < place, sem="relaxed")
    else:
        for start in range(0, N, 1024):
            neurons = start + tl.arange(0, 1024)
            g = tl.load(dense_ptr + (~place).to(tl.int64) * N + neurons, mask=neurons < N, other=0)
            bits = tl.zeros((1024,), tl.int32) + (1 << (token % 32))
            tl.atomic_or(marks_ptr + neurons, bits, mask=g != 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_words"])
def rank_kernel(
    transpose, neurons_ptr, used_ptr, num_backup, num_words, N, BN: tl.constexpr, STEP: tl.constexpr
):
    """`before` and `place` of BN neurons; those with a backup row are listed in their rows' order."""
    marks_ptr, before_ptr, place_ptr, _, _, _, _, T = transpose
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.int32)
    for start in range(0, num_words, STEP):
        words = start + tl.arange(0, STEP)
        place = words.to(tl.int64)[:, None] * N + neurons[None, :]
        inside = (words < num_words)[:, None] & (neurons < N)[None, :]
        count = popcount(tl.load(marks_ptr + place, mask=inside, other=0))
        tl.store(before_ptr + place, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    heavy = (total > T).to(tl.int32)
    free = tl.atomic_add(used_ptr, tl.sum(heavy, 0), sem="relaxed") + tl.cumsum(heavy, 0) - heavy
    stored = (heavy != 0) & (free < num_backup)
    tl.store(neurons_ptr + free, neurons, mask=stored)
    place = tl.where(heavy != 0, tl.where(stored, ~free, 0), total)
    tl.store(place_ptr + neurons, place, mask=neurons < N)


@triton.jit
def weights_kernel(
    x_ptr, dy_ptr, transpose, dw, db, K, EVEN: tl.constexpr, SLOTS: tl.constexpr, BK: tl.constexpr
):
    """BK columns of the weight gradients of one neuron with a list, and its gradients of biases; None: not asked for."""
    GATE: tl.constexpr = dw[2] is not None or db[2] is not None
    UP: tl.constexpr = dw[1] is not None or db[1] is not None
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    _, _, place_ptr, tokens_ptr, values_ptr, size, _, T = transpose
    neuron = tl.program_id(0).to(tl.int64)
    count = tl.load(place_ptr + neuron)
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
            slots += neuron * T
            tokens = tl.load(tokens_ptr + slots, mask=listed, other=0)
            if dw[0] is not None:
                h = tl.load(values_ptr + slots, mask=listed, other=0.0).to(tl.float32)
                down += tl.sum(h[:, None] * _rows(dy_ptr, tokens, k, listed, K, EVEN), 0)
            if UP or GATE:
                x = _rows(x_ptr, tokens, k, listed, K, EVEN)
            if UP:
                du = tl.load(values_ptr + size + slots, mask=listed, other=0.0).to(tl.float32)
                up += tl.sum(du[:, None] * x, 0)
                up_bias += du
            if GATE:
                dg = tl.load(values_ptr + 2 * size.to(tl.int64) + slots, mask=listed, other=0.0).to(
                    tl.float32
                )
                gate += tl.sum(dg[:, None] * x, 0)
                gate_bias += dg
        place = neuron * K + k
        if dw[0] is not None:
            tl.store(dw[0] + place, narrow(down, dtype), mask=k < K)
        if dw[1] is not None:
            tl.store(dw[1] + place, narrow(up, dtype), mask=k < K)
        if dw[2] is not None:
            tl.store(dw[2] + place, narrow(gate, dtype), mask=k < K)
        if tl.program_id(1) == 0:
            if db[1] is not None:
                tl.store(db[1] + neuron, narrow(tl.sum(up_bias, 0), dtype))
            if db[2] is not None:
                tl.store(db[2] + neuron, narrow(tl.sum(gate_bias, 0), dtype))


@triton.jit(do_not_specialize=["M"])
def backup_weights_kernel(
    a_ptr, x_ptr, dw_ptr, db_ptr, backup, M, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Rows of one weight gradient: backup rows a [., M] times x [M, K]; db gets their sums."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows, valid, neurons, some = _backup_rows(backup, BM)
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
        if db_ptr is not None:  # apart, as l1 above
            if tl.program_id(1) == 0:
                bias = tl.zeros((BM,), tl.float32)
                for start in range(0, M, BK):
                    bias += tl.sum(_backup_tile(a_ptr, rows, valid, start, M, BK).to(tl.float32), 1)
                tl.store(db_ptr + neurons, narrow(bias, dtype), mask=valid)


# One step


def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    token_mask: Tensor | None,
    capacity: int,
) -> tuple[Tensor, ...]:
    """The forward half of a training step: y, l1, counts of tokens and of neurons, `needed`, and all of `saved_like`.

    x [M, K] contiguous, M at least 1; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a
    non-gated layer; biases [N], [N], [K] or None; all bf16 or all fp16; token_mask [M] bool or None. y [M, K]; l1 [M] fp32,
    the sum of |h| of each token, h as rounded; token_counts [M] int32, its active neurons; neuron_counts [N] int32, the
    tokens with each neuron active, without those whose mask is False; needed 0-d int64, the least `capacity` whose buffers
    have room for this input: where it is above `capacity`, y, l1 and gradients are wrong (counts are right). Raises
    ValueError for shapes that do not fit. Paper: App. B.2, forward pass.
    """
    gated = w_gate is not None
    num_neurons, hidden_size = w_up.shape
    saved = saved_like(x, num_neurons, capacity, gated)
    counts = _pack(x, w_gate if gated else w_up, b_gate if gated else b_up, token_mask, saved)
    place, indices, *_, tokens, used, _, _ = saved
    g, u, dense_g, dense_u = (saved[i].view(x.dtype) for i in (2, 3, 6, 7))
    y = torch.empty_like(x)
    l1 = torch.empty(len(x), dtype=torch.float32, device=x.device)
    row_forward_kernel[(len(x),)](
        *(
            x,
            (place, indices, g, u),
            (w_up, b_up) if gated else (None, None),
            (w_down_t, b_down),
            y,
            l1,
            hidden_size,
        ),
        **_row_options(x),
    )
    options = config("hybrid_backup", x.device)
    backup = (tokens, used, len(dense_g))
    blocks = cdiv(len(dense_g), options["BM"])
    dense_h = dense_g
    if gated:
        dense_h = torch.empty_like(dense_g)
        backup_up_kernel[(blocks, cdiv(num_neurons, options["BN"]))](
            *(x, w_up, b_up, dense_g, dense_u, dense_h, backup, num_neurons, hidden_size), **options
        )
    backup_product_kernel[(blocks, cdiv(hidden_size, options["BN"]))](
        *((dense_h, w_down_t), (None, None), b_down, y, l1, backup, num_neurons, hidden_size),
        **options,
    )
    return y, l1, *counts, *saved


def backward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    saved: Saved,
    dy: Tensor,
    dl1: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The backward half: gradients of sum(y * dy) + sum(l1 * dl1), the same bits for the same call.

    Tensors as for `forward`, which gave `saved`; dy [M, K] in x.dtype, dl1 [M] fp32. Returns dx [M, K], dw_gate, dw_up and
    dw_down_t [N, K], db_gate and db_up [N], in x.dtype, each None unless `needs`, in this order, asks for it. Paper:
    App. B.2, backward pass.
    """
    gated = w_gate is not None
    num_tokens, (num_neurons, hidden_size) = len(x), w_up.shape
    dy, dl1 = dy.contiguous(), dl1.contiguous()
    given = x, w_gate, w_up, w_down_t, b_gate, b_up
    gradients = [
        torch.empty_like(t) if need else None for t, need in zip(given, needs, strict=True)
    ]
    dx, dw_gate, dw_up, dw_down, db_gate, db_up = gradients
    place, indices, *_, dense, _ = saved
    g, u, dense_g, dense_u = (saved[i].view(x.dtype) for i in (2, 3, 6, 7))
    backup = (*saved[4:6], len(dense))
    sizes = (num_tokens, num_neurons, hidden_size)

    transpose = None
    if any(needs[1:]):
        transpose, transposed_backup, dense_values = _transposed(saved, x, gated, num_neurons)
    row_backward_kernel[(num_tokens,)](
        *(dy, dl1, (place, indices, g, u), (w_gate, w_up, w_down_t), dx, transpose, *sizes),
        **_row_options(x),
    )
    options = config("hybrid_backup", x.device)
    blocks = cdiv(len(dense), options["BM"])
    columns = cdiv(hidden_size, options["BN"])
    dense_du = torch.empty_like(dense_g)
    dense_dg = torch.empty_like(dense_g) if gated else None
    backup_backward_kernel[(blocks, cdiv(num_neurons, options["BN"]))](
        *(dy, dl1, w_down_t, (dense_g, dense_u), (dense_du, dense_dg), backup, transpose, *sizes),
        **options,
    )
    if dx is not None:
        backup_product_kernel[(blocks, columns)](
            *(
                (dense_du, w_up),
                (dense_dg, w_gate),
                None,
                dx,
                None,
                backup,
                num_neurons,
                hidden_size,
            ),
            **options,
        )
    if transpose is None:
        return tuple(gradients)

    dw, db = (
        (dw_down, dw_up, dw_gate),
        (None, db_up, db_gate),
    )  # in the order of the transpose's values
    fits = max(COLUMN_BYTES // (2 * x.element_size() * num_tokens), 32)
    block_k = min(next_power_of_2(hidden_size), next_power_of_2(fits + 1) // 2)
    # The slow axis is that of columns: all neurons pass over the same part of x and dy before the next one comes.
    weights_kernel[(num_neurons, cdiv(hidden_size, block_k))](
        *(x, dy, transpose, dw, db, hidden_size),
        EVEN=hidden_size % block_k == 0,
        BK=block_k,
        num_warps=min(max(block_k // 256, 1), 8),
        **config("hybrid_weights", x.device),
    )
    for i in range(2 + gated):
        if dw[i] is not None or db[i] is not None:
            backup_weights_kernel[(cdiv(transposed_backup[2], options["BM"]), columns)](
                *(
                    dense_values[i],
                    x if i else dy,
                    dw[i],
                    db[i],
                    transposed_backup,
                    num_tokens,
                    hidden_size,
                ),
                **options,
            )
    return tuple(gradients)


def _transposed(
    saved: Saved, x: Tensor, gated: bool, num_neurons: int
) -> tuple[tuple, tuple, Tensor]:
    """The transpose with its places and without its values, its backup, and the backup rows of h, du and dg."""
    num_tokens, dense = len(x), saved.dense_g
    width, num_backup = list_width(num_tokens), transposed_rows(num_tokens, num_neurons, len(dense))
    num_words, listed = cdiv(num_tokens, 32), num_neurons * width
    marks = torch.zeros(num_words, num_neurons, dtype=torch.int32, device=x.device)
    values = x.new_empty(2 + gated, listed + num_backup * num_tokens)
    values[:, listed:].zero_()
    transpose = (
        marks,
        torch.empty_like(marks),
        marks.new_empty(num_neurons),
        marks.new_empty(num_neurons, width),
        values,
        values.shape[1],
        listed,
        width,
    )
    backup = (marks.new_empty(num_backup), marks.new_zeros(1), num_backup)
    mark_kernel[(num_tokens,)](
        *(saved.place, saved.indices, dense, marks, num_neurons),
        **launch_options(num_warps=1, num_stages=1),
    )
    rank_kernel[(cdiv(num_neurons, 32),)](
        *(transpose, *backup, num_words, num_neurons),
        BN=32,
        STEP=64,
        **launch_options(num_warps=4, num_stages=1),
    )
    return transpose, backup, values[:, listed:]
