"""A training step of the layer by unions of blocks of tokens; between forward and backward only active entries are kept.

Forward is inference by unions (union.py) with one element-wise pass more, which keeps g and u of the active entries.
Backward makes the same products with the weights of the unions, and the weight gradients from the active tokens of
each neuron. With g, u, h and the gradients d of a loss:

    dh = dy Wd^T + sign(h) dl1    du = dh g    dg = dh u    dx = du Wu + dg Wg
    dWu = du^T x    dWg = dg^T x    dWd^T = h^T dy                              (non-gated: h is g, du is dh)

Entries. The active entries of one neuron stand together, its tokens rising; the neurons follow in any order (programs
take their places as they come, and no result depends on it). `index` [M / 32, width] int64 finds them from either
side: for 32 tokens and a neuron the low half has a bit for each token, the high half the place of the first one's entry,
so that the entry of token i stands as many places further as bits below i are set. An entry is 64 bits: token,
g and u; its gradients are 32 more, du and dg. That is a quarter of a byte for each token and neuron, and 8 bytes for
each active entry, where a dense layer keeps 6 bytes for each token and neuron.

Weight gradients. A neuron's rows of x and dy are added up one after the other, as long as it is active for at most one
token in DENSE_FROM. A more active one goes to a dense backup of h, du and dg, whose products run on tensor cores
(the paper's transposed hybrid with lists in place of ELL). Which neurons these are depends on their tokens alone, not on
`capacity`: it is their number that follows from it, fewer than DENSE_FROM * `capacity`. Their rows stand where du and dg
of the unions stood, and where these do not hold all of them the rest follows in a second round.

Room. How many entries there are is not known when their buffer is made. It holds `capacity` entries per token; what does
not fit is not stored anywhere, and `needed` tells the caller, who has to do the step again (twell/sparse/training.py).

Paper: training with the hybrid format (App. B.2); unions and entries are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels import union
from twell.kernels.common import (
    cdiv,
    config,
    launch_options,
    narrow,
    next_power_of_2,
    num_processors,
    popcount,
    round_up,
    wide,
)
from twell.kernels.gate import gate_bits

BLOCK = 64  # tokens that share a list
# A dense row of the backup costs M tokens of tensor-core work, an entry of a list two rows of x and dy through the cache.
DENSE_FROM = 64
# Rows of x and dy that lists gather should stay in the cache (50 MB on an H200), so columns are taken in slabs.
CACHE_BYTES = 2**24
WARP_COLUMNS = 512  # that a warp sums


@triton.jit(do_not_specialize=["num_words", "N", "capacity", "dense_count", "backup_rows"])
def index_kernel(
    bits_ptr,
    mask_ptr,
    index_ptr,
    spans_ptr,
    counts_ptr,
    totals_ptr,
    backup_ptr,
    M,
    num_words,
    N,
    width,
    capacity,
    dense_count,
    backup_rows,
    MASK: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Places of BN neurons' entries: their index, spans of entries, counts, and rows of the backup."""
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = neurons < N
    total = tl.zeros((BN,), tl.int32)
    kept = tl.zeros((BN,), tl.int32)
    for first in range(0, num_words, WORDS):
        words = first + tl.arange(0, WORDS)
        real = (words < num_words)[:, None] & inside[None, :]
        bits = tl.load(
            bits_ptr + words.to(tl.int64)[:, None] * width + neurons[None, :], mask=real, other=0
        )
        total += tl.sum(popcount(bits), 0)
        if MASK:
            tokens = words[:, None] * 32 + tl.arange(0, 32)[None, :]
            keep = tl.load(mask_ptr + tokens, mask=tokens < M, other=0).to(tl.int32)
            kept += tl.sum(
                popcount(bits & tl.sum(keep << tl.arange(0, 32)[None, :], 1)[:, None]), 0
            )
    tl.store(counts_ptr + neurons, kept if MASK else total, mask=inside)
    begin = tl.atomic_add(totals_ptr, tl.sum(total.to(tl.int64), 0), sem="relaxed")
    begin += tl.cumsum(total.to(tl.int64), 0) - total
    dense = (total > dense_count).to(tl.int32)
    row = tl.atomic_add(totals_ptr + 1, tl.sum(dense, 0).to(tl.int64), sem="relaxed").to(tl.int32)
    row += tl.cumsum(dense, 0) - 1
    has_row = (dense != 0) & (row < backup_rows)
    tl.store(backup_ptr + row, neurons, mask=has_row)
    tl.store(spans_ptr + neurons, tl.minimum(begin, capacity).to(tl.int32), mask=inside)
    tl.store(spans_ptr + N + neurons, tl.minimum(begin + total, capacity).to(tl.int32), mask=inside)
    tl.store(spans_ptr + 2 * N + neurons, has_row.to(tl.int32), mask=inside)
    for first in range(0, num_words, WORDS):
        words = first + tl.arange(0, WORDS)
        real = (words < num_words)[:, None] & inside[None, :]
        place = words.to(tl.int64)[:, None] * width + neurons[None, :]
        bits = tl.load(bits_ptr + place, mask=real, other=0)
        count = popcount(bits)
        entry = begin[None, :] + (tl.cumsum(count, 0) - count)
        # Beyond the capacity all places are the same: nothing is stored there or read.
        found = (tl.minimum(entry, capacity) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
        tl.store(index_ptr + place, found, mask=real)
        begin += tl.sum(count, 0)


@triton.jit
def _entries_of(index, lane, capacity):
    """For 32 tokens (lanes) of each neuron: whether it is active, and the entry's place, with whether that exists."""
    bits = index.to(tl.int32)[:, None]
    active = ((bits >> lane[None, :]) & 1) != 0
    place = (index >> 32).to(tl.int32)[:, None] + popcount(bits & ((1 << lane) - 1)[None, :])
    return active, place, active & (place < capacity)


@triton.jit
def _value(word, dtype: tl.constexpr):
    """The value in the low 16 bits, in fp32."""
    return word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _bits(value):
    """The 16 bits of a value, as an int32 from 0."""
    return value.to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def multiply_kernel(
    g_ptr,
    h_ptr,
    index_ptr,
    lists_ptr,
    counts_ptr,
    entries_ptr,
    l1_ptr,
    l0_ptr,
    totals_ptr,
    needed_ptr,
    M,
    tokens_of_g,
    width,
    capacity,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """h = g * u over u for 32 tokens of a block; keeps their entries, and adds up |h| and the active neurons of each."""
    dtype: tl.constexpr = g_ptr.dtype.element_ty
    word = tl.program_id(0)
    if word == 0:
        tl.store(needed_ptr, tl.cdiv(tl.load(totals_ptr), M))
    block = word // (BM // 32)
    lane = tl.arange(0, 32)
    tokens = word * 32 + lane
    count = tl.load(counts_ptr + block)
    # Added up over neurons at the end: a sum over warps in each step would cost more than all else.
    l1 = tl.zeros((BN, 32), tl.float32)
    l0 = tl.zeros((BN, 32), tl.int32)
    for first in range(0, count, BN):
        places = first + tl.arange(0, BN)
        rows = block.to(tl.int64) * width + places
        neurons = tl.load(lists_ptr + rows).to(tl.int64)
        index = tl.load(
            index_ptr + word.to(tl.int64) * width + neurons, mask=places < count, other=0
        )
        active, entry, kept = _entries_of(index, lane, capacity)
        g = tl.load(
            g_ptr + neurons[:, None] * tokens_of_g + tokens[None, :], mask=active, other=0.0
        )
        h_ptrs = h_ptr + rows[:, None] * BM + (tokens % BM)[None, :]
        kept_word = (tokens.to(tl.int64) << 32)[None, :] | (_bits(g).to(tl.int64) << 16)
        if GATED:
            u = tl.load(h_ptrs, mask=active, other=0.0)
            kept_word |= _bits(u).to(tl.int64)
            h = narrow(tl.where(active, g.to(tl.float32) * u.to(tl.float32), 0.0), dtype)
        else:
            h = g
        tl.store(h_ptrs, h)
        tl.store(entries_ptr + entry, kept_word, mask=kept)
        l1 += tl.abs(h.to(tl.float32))
        l0 += active.to(tl.int32)
    tl.store(l1_ptr + tokens, tl.sum(l1, 0), mask=tokens < M)
    tl.store(l0_ptr + tokens, tl.sum(l0, 0), mask=tokens < M)


@triton.jit
def gradient_kernel(
    dh_ptr,
    dg_ptr,
    index_ptr,
    lists_ptr,
    counts_ptr,
    entries_ptr,
    gradients_ptr,
    dl1_ptr,
    M,
    width,
    capacity,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """du over dh, and dg, for 32 tokens of a block; both also for each entry, if a weight or bias asks for them.

    Non-gated, dh has the L1 term already.
    """
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    word = tl.program_id(0)
    block = word // (BM // 32)
    lane = tl.arange(0, 32)
    tokens = word * 32 + lane
    count = tl.load(counts_ptr + block)
    if GATED:
        dl1 = tl.load(dl1_ptr + tokens, mask=tokens < M, other=0.0)
    for first in range(0, count, BN):
        places = first + tl.arange(0, BN)
        rows = block.to(tl.int64) * width + places
        neurons = tl.load(lists_ptr + rows).to(tl.int64)
        index = tl.load(
            index_ptr + word.to(tl.int64) * width + neurons, mask=places < count, other=0
        )
        active, entry, kept = _entries_of(index, lane, capacity)
        column = rows[:, None] * BM + (tokens % BM)[None, :]
        dh = tl.load(dh_ptr + column, mask=active, other=0.0).to(tl.float32)
        du = dh
        if GATED:
            kept_word = tl.load(entries_ptr + entry, mask=kept, other=0)
            g = _value(kept_word >> 16, dtype)
            u = _value(kept_word, dtype)
            h = narrow(g * u, dtype).to(tl.float32)
            sign = tl.where(h > 0, 1.0, tl.where(h < 0, -1.0, h))  # of 0 it is 0, of NaN NaN
            dh += sign * dl1[None, :]
            dg = narrow(tl.where(active, dh * u, 0.0), dtype)
            du = tl.where(active, dh * g, 0.0)
            tl.store(dg_ptr + column, dg)
        du = narrow(du, dtype)
        tl.store(dh_ptr + column, du)
        if gradients_ptr is not None:
            found = _bits(du) << 16
            if GATED:
                found |= _bits(dg)
            tl.store(gradients_ptr + entry, found, mask=kept)


@triton.jit
def _wide_load(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add_entry(
    sums,
    entry,
    entries_ptr,
    gradients_ptr,
    x_ptr,
    dy_ptr,
    k,
    inside,
    K,
    dtype: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
):
    """The sums dwg, dwu and dwd with dg x, du x and h dy of one entry added, where they are asked for."""
    dwg, dwu, dwd = sums
    kept_word = tl.load(entries_ptr + entry)
    place = (kept_word >> 32) * K + k
    if GATE or UP:
        x = _wide_load(x_ptr + place, inside, EVEN)
        found = tl.load(gradients_ptr + entry)
        if UP:
            dwu += _value(found >> 16, dtype) * x
        if GATE:
            dwg += _value(found, dtype) * x
    if DOWN:
        h = _value(kept_word >> 16, dtype)
        if GATED:
            h = narrow(h * _value(kept_word, dtype), dtype).to(tl.float32)
        dwd += h * _wide_load(dy_ptr + place, inside, EVEN)
    return dwg, dwu, dwd


@triton.jit
def lists_gradient_kernel(
    entries_ptr,
    gradients_ptr,
    spans_ptr,
    x_ptr,
    dy_ptr,
    dwg_ptr,
    dwu_ptr,
    dwd_ptr,
    N,
    K,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A slab of BK columns of one neuron's weight gradients, from its list of entries; slabs are the slow axis.

    A gradient without a pointer is not asked for.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    GATE: tl.constexpr = dwg_ptr is not None
    UP: tl.constexpr = dwu_ptr is not None
    DOWN: tl.constexpr = dwd_ptr is not None
    neuron = tl.program_id(0) % N
    slab = tl.program_id(0) // N
    begin = tl.load(spans_ptr + neuron)
    end = tl.load(spans_ptr + N + neuron)
    if tl.load(spans_ptr + 2 * N + neuron) == 0:
        k = slab * BK + tl.arange(0, BK)
        inside = k < K
        zeros = tl.zeros((BK,), tl.float32)
        sums = (zeros, zeros, zeros)
        whole = begin + (end - begin) // UNROLL * UNROLL
        for first in range(begin, whole, UNROLL):
            for i in tl.static_range(UNROLL):
                sums = _add_entry(
                    sums,
                    first + i,
                    entries_ptr,
                    gradients_ptr,
                    x_ptr,
                    dy_ptr,
                    k,
                    inside,
                    K,
                    dtype,
                    GATED,
                    EVEN,
                    GATE,
                    UP,
                    DOWN,
                )
        for entry in range(whole, end):
            sums = _add_entry(
                sums,
                entry,
                entries_ptr,
                gradients_ptr,
                x_ptr,
                dy_ptr,
                k,
                inside,
                K,
                dtype,
                GATED,
                EVEN,
                GATE,
                UP,
                DOWN,
            )
        dwg, dwu, dwd = sums
        place = neuron.to(tl.int64) * K + k
        if GATE:
            tl.store(dwg_ptr + place, narrow(dwg, dtype), mask=inside)
        if UP:
            tl.store(dwu_ptr + place, narrow(dwu, dtype), mask=inside)
        if DOWN:
            tl.store(dwd_ptr + place, narrow(dwd, dtype), mask=inside)


@triton.jit
def bias_gradient_kernel(
    gradients_ptr,
    spans_ptr,
    dbg_ptr,
    dbu_ptr,
    N,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    STEP: tl.constexpr,
):
    """The sums of one neuron's dg and du."""
    dtype: tl.constexpr = dbu_ptr.dtype.element_ty if UP else dbg_ptr.dtype.element_ty
    neuron = tl.program_id(0)
    begin = tl.load(spans_ptr + neuron)
    end = tl.load(spans_ptr + N + neuron)
    up = tl.zeros((STEP,), tl.float32)
    gate = tl.zeros((STEP,), tl.float32)
    for first in range(begin, end, STEP):
        place = first + tl.arange(0, STEP)
        found = tl.load(gradients_ptr + place, mask=place < end, other=0)
        up += _value(found >> 16, dtype)
        gate += _value(found, dtype)
    if UP:
        tl.store(dbu_ptr + neuron, narrow(tl.sum(up, 0), dtype))
    if GATE:
        tl.store(dbg_ptr + neuron, narrow(tl.sum(gate, 0), dtype))


@triton.jit(do_not_specialize=["num_words", "first_row"])
def backup_kernel(
    index_ptr,
    entries_ptr,
    gradients_ptr,
    backup_ptr,
    totals_ptr,
    dense_ptr,
    first_row,
    num_words,
    width,
    capacity,
    backup_rows,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Dense rows of the backup's neurons from `first_row` on, one after the other h, du and dg [3 * backup_rows, tokens]."""
    dtype: tl.constexpr = dense_ptr.dtype.element_ty
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    real = words < num_words
    lane = tl.arange(0, 32)
    size = num_words.to(tl.int64) * 32
    used = tl.minimum(tl.load(totals_ptr + 1).to(tl.int32) - first_row, backup_rows)
    for row in range(tl.program_id(1), used, tl.num_programs(1)):
        neuron = tl.load(backup_ptr + first_row + row)
        index = tl.load(index_ptr + words.to(tl.int64) * width + neuron, mask=real, other=0)
        _, entry, kept = _entries_of(index, lane, capacity)
        place = row * size + words[:, None] * 32 + lane[None, :]
        if DOWN:
            kept_word = tl.load(entries_ptr + entry, mask=kept, other=0)
            h = _value(kept_word >> 16, dtype)
            if GATED:
                h *= _value(kept_word, dtype)
            tl.store(dense_ptr + place, narrow(h, dtype), mask=real[:, None])
        if GATE or UP:
            found = tl.load(gradients_ptr + entry, mask=kept, other=0)
            place += backup_rows * size
            if UP:
                tl.store(
                    dense_ptr + place, narrow(_value(found >> 16, dtype), dtype), mask=real[:, None]
                )
            if GATE:
                place += backup_rows * size
                tl.store(dense_ptr + place, narrow(_value(found, dtype), dtype), mask=real[:, None])


@triton.jit
def _dense_product(
    dense_desc, x_desc, first, column, M, BH: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr
):
    """BH rows of the backup times BN columns of x [M, K]."""
    acc = tl.zeros((BH, BN), tl.float32)
    for token in range(0, M, BT):
        acc = tl.dot(wide(dense_desc.load([first, token])), wide(x_desc.load([token, column])), acc)
    return acc


@triton.jit(do_not_specialize=["M", "first_row"])
def backup_gradient_kernel(
    dense_desc,
    x_desc,
    dy_desc,
    dwg_ptr,
    dwu_ptr,
    dwd_ptr,
    backup_ptr,
    totals_ptr,
    first_row,
    backup_rows,
    M,
    K,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """BN columns of one weight gradient of BH neurons of the backup: their dense rows times x or dy.

    A gradient without a pointer is not asked for.
    """
    dtype: tl.constexpr = dense_desc.dtype
    num_columns = tl.cdiv(K, BN)
    per_weight = backup_rows // BH * num_columns
    weight = tl.program_id(0) // per_weight
    row = tl.program_id(0) % per_weight // num_columns * BH
    column = tl.program_id(0) % num_columns * BN
    used = tl.minimum(tl.load(totals_ptr + 1).to(tl.int32) - first_row, backup_rows)
    if row < used:
        rows = row + tl.arange(0, BH)
        neurons = tl.load(backup_ptr + first_row + rows, mask=rows < used, other=0)
        columns = column + tl.arange(0, BN)
        inside = (rows < used)[:, None] & (columns < K)[None, :]
        place = neurons.to(tl.int64)[:, None] * K + columns[None, :]
        first = weight * backup_rows + row
        if weight == 0:
            if dwd_ptr is not None:
                acc = _dense_product(dense_desc, dy_desc, first, column, M, BH, BN, BT)
                tl.store(dwd_ptr + place, narrow(acc, dtype), mask=inside)
        elif dwg_ptr is not None or dwu_ptr is not None:
            acc = _dense_product(dense_desc, x_desc, first, column, M, BH, BN, BT)
            if weight == 1:
                if dwu_ptr is not None:
                    tl.store(dwu_ptr + place, narrow(acc, dtype), mask=inside)
            elif dwg_ptr is not None:
                tl.store(dwg_ptr + place, narrow(acc, dtype), mask=inside)


class Saved(NamedTuple):
    """What is kept between forward and backward besides x and the weights; see the module.

    entries [capacity * M] int64; index [ceil(M / 32), width] int64; lists [blocks, width], counts [blocks] and tiles int32,
    the unions; spans [3, N] int32, each neuron's first entry, the one after its last, and whether it is in the backup;
    backup [rows] int32, the neurons there; totals [2] int64, all entries and the neurons of the backup.
    """

    entries: Tensor
    index: Tensor
    lists: Tensor
    counts: Tensor
    tiles: Tensor
    spans: Tensor
    backup: Tensor
    totals: Tensor


def saved_like(x: Tensor, intermediate_size: int, capacity: int, gated: bool) -> Saved:
    """Empty tensors of the shapes of what `forward` keeps, gated or not."""
    num_tokens = len(x)
    rows = torch.sym_min(DENSE_FROM * capacity, intermediate_size)
    width, num_blocks = round_up(intermediate_size, 256), cdiv(num_tokens, BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    return Saved(
        empty(torch.sym_max(capacity * num_tokens, 1), dtype=torch.int64),
        empty(cdiv(num_tokens, 32), width, dtype=torch.int64),
        empty(num_blocks, width),
        empty(num_blocks),
        union.queue(num_tokens, intermediate_size, BLOCK, x.device),
        empty(3, intermediate_size),
        empty(round_up(rows, 128)),
        empty(2, dtype=torch.int64),
    )


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
    """y [M, K], l1 [M] fp32, active neurons of each token [M] int32, tokens of each neuron [N] int32, needed, and Saved.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a non-gated layer; biases [N], [N],
    [K] or None; token_mask [M] bool, False for tokens that the neurons' counts leave out; M at least 1. needed (0-d int64):
    entries per token, rounded up; more than `capacity` means that y, l1 and gradients are wrong. g, u and h are rounded.
    """
    num_tokens, intermediate_size = len(x), len(w_up)
    gated = w_gate is not None
    saved = saved_like(x, intermediate_size, capacity, gated)
    unions = lists, counts, tiles = saved.lists, saved.counts, saved.tiles
    g, bits = gate_bits(
        x, *((w_gate, b_gate) if gated else (w_up, b_up)), by_neuron=True, zero=tiles
    )
    union.make_lists(bits, tiles, num_tokens, intermediate_size, BLOCK, out=(lists, counts))
    saved.totals.zero_()
    neuron_counts = torch.empty(intermediate_size, dtype=torch.int32, device=x.device)
    num_words, width = saved.index.shape
    options = config("training_index", x.device)
    index_kernel[(cdiv(intermediate_size, options["BN"]),)](
        bits,
        None if token_mask is None else token_mask.view(torch.uint8),
        saved.index,
        saved.spans,
        neuron_counts,
        saved.totals,
        saved.backup,
        num_tokens,
        num_words,
        intermediate_size,
        width,
        len(saved.entries),
        num_tokens // DENSE_FROM,
        len(saved.backup),
        MASK=token_mask is not None,
        **options,
    )
    if gated:
        h = union.up(x, w_up, b_up, None, unions, BLOCK)
    else:
        h = x.new_empty(lists.numel(), BLOCK)
    l1 = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    token_counts = torch.empty(num_tokens, dtype=torch.int32, device=x.device)
    needed = torch.empty((), dtype=torch.int64, device=x.device)
    multiply_kernel[(num_words,)](
        g,
        h,
        saved.index,
        lists,
        counts,
        saved.entries,
        l1,
        token_counts,
        saved.totals,
        needed,
        num_tokens,
        g.shape[1],
        width,
        len(saved.entries),
        GATED=gated,
        BM=BLOCK,
        **config("training_elements", x.device),
    )
    y = torch.empty_like(x)
    union.down(h, w_down_t, b_down, unions, y)
    return y, l1, token_counts, neuron_counts, needed, *saved


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
    """Gradients of x [M, K], w_gate, w_up, w_down_t [N, K], b_gate and b_up [N], each None unless `needs` asks for it.

    dy [M, K] contiguous, in x.dtype; dl1 [M] fp32; `needs`: six, in the order of the gradients. dh, du and dg are rounded,
    sums are in fp32.
    """
    given = x, w_gate, w_up, w_down_t, b_gate, b_up
    gradients = [
        torch.empty_like(t) if need else None for t, need in zip(given, needs, strict=True)
    ]
    dx, d_gate, d_up, d_down, d_b_gate, d_b_up = gradients
    by_weight = d_gate is not None or d_up is not None or d_down is not None
    gated, num_tokens = w_gate is not None, len(x)
    unions = lists, counts, _ = saved.lists, saved.counts, saved.tiles
    num_words, width = saved.index.shape
    capacity = len(saved.entries)
    # du and, gated, dg of the unions; then the backup's dense rows.
    scratch = x.new_empty(1 + gated, lists.numel(), BLOCK)
    du, dg = scratch[0], scratch[1] if gated else None
    entry_gradients = None
    if any(gradient is not None for gradient in (d_gate, d_up, d_b_gate, d_b_up)):
        entry_gradients = torch.empty(capacity, dtype=torch.int32, device=x.device)
    if dx is not None or entry_gradients is not None:
        # Non-gated every h is above 0, and the L1 term joins dh before it is rounded: the same number added to rounded ones
        # would be rounded the same way for all of a token's neurons.
        add = None if gated else F.pad(dl1, (0, -num_tokens % BLOCK))
        union.up(dy, w_down_t, None, None, unions, BLOCK, add=add, out=du)
        gradient_kernel[(num_words,)](
            du,
            dg,
            saved.index,
            lists,
            counts,
            saved.entries,
            entry_gradients,
            dl1,
            num_tokens,
            width,
            capacity,
            GATED=gated,
            BM=BLOCK,
            **config("training_elements", x.device),
        )
    if dx is not None:
        union.down(du, w_up, None, unions, dx, (dg, w_gate) if gated else None)
    if d_b_gate is not None or d_b_up is not None:
        bias_gradient_kernel[(len(w_up),)](
            entry_gradients,
            saved.spans,
            d_b_gate,
            d_b_up,
            len(w_up),
            GATE=d_b_gate is not None,
            UP=d_b_up is not None,
            STEP=256,
            **launch_options(num_warps=1, num_stages=1),
        )
    if by_weight:
        weights = d_gate, d_up, d_down
        _backup_gradients(x, dy, saved, entry_gradients, scratch, weights)
        _lists_gradients(x, dy, saved, entry_gradients, gated, weights)
    return tuple(gradients)


def _backup_gradients(
    x: Tensor,
    dy: Tensor,
    saved: Saved,
    entry_gradients: Tensor | None,
    scratch: Tensor,
    weights: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Writes the weight gradients (gate, up, down; None: not asked for) of the neurons of the backup; overwrites `scratch`."""
    gated = len(scratch) == 2
    d_gate, d_up, d_down = weights
    hidden_size = x.shape[1]
    num_words, width = saved.index.shape
    options = config("training_backup", x.device)
    # Rows of h, du and, gated, dg that fit.
    most = scratch.numel() // ((2 + gated) * 32 * num_words)
    backup_rows = min(most // options["BH"] * options["BH"], len(saved.backup))
    dense = scratch.view(-1)[: (2 + gated) * backup_rows * 32 * num_words].view(-1, 32 * num_words)
    num_tiles = (2 + gated) * backup_rows // options["BH"] * cdiv(hidden_size, options["BN"])
    for first_row in range(0, len(saved.backup), backup_rows):
        backup_kernel[(cdiv(num_words, 64), min(backup_rows, 4 * num_processors(x.device)))](
            saved.index,
            saved.entries,
            entry_gradients,
            saved.backup,
            saved.totals,
            dense,
            first_row,
            num_words,
            width,
            len(saved.entries),
            backup_rows,
            GATED=gated,
            GATE=d_gate is not None,
            UP=d_up is not None,
            DOWN=d_down is not None,
            WORDS=64,
            **launch_options(num_warps=4, num_stages=1),
        )
        backup_gradient_kernel[(num_tiles,)](
            TensorDescriptor.from_tensor(dense, [options["BH"], options["BT"]]),
            TensorDescriptor.from_tensor(x, [options["BT"], options["BN"]]),
            TensorDescriptor.from_tensor(dy, [options["BT"], options["BN"]]),
            d_gate,
            d_up,
            d_down,
            saved.backup,
            saved.totals,
            first_row,
            backup_rows,
            len(x),
            hidden_size,
            **options,
        )


def _lists_gradients(
    x: Tensor,
    dy: Tensor,
    saved: Saved,
    entry_gradients: Tensor | None,
    gated: bool,
    weights: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Writes the weight gradients (gate, up, down; None: not asked for) of all other neurons."""
    num_tokens, hidden_size = x.shape
    intermediate_size = saved.spans.shape[1]
    # The widest power of two whose columns of x and dy stay in the cache.
    columns = max(CACHE_BYTES // (2 * 2 * num_tokens), 1)
    block_k = min(max(1 << (columns.bit_length() - 1), 128), next_power_of_2(hidden_size), 2048)
    lists_gradient_kernel[(intermediate_size * cdiv(hidden_size, block_k),)](
        saved.entries,
        entry_gradients,
        saved.spans,
        x,
        dy,
        *weights,
        intermediate_size,
        hidden_size,
        GATED=gated,
        EVEN=hidden_size % block_k == 0,
        BK=block_k,
        num_warps=max(block_k // WARP_COLUMNS, 1),
        **config("training_lists", x.device),
    )
