"""The active entries that a training step by unions keeps between forward and backward.

An entry is one active pair of token and neuron. The entries of a neuron stand together, its tokens
rising. Neurons follow in any order: programs reserve their places with a counter, and no result
depends on the order. `index` leads from a word of 32 tokens and a neuron to the entries: the low
half has a bit for each token, the high half the place of the first entry. So the entry of token i
stands as many places later as bits below i are set.

    index      [M / 32, width] int64   a quarter of a byte for each token and neuron
    entries    [capacity * M] int64    token (32 bits), g and u (16 each): 8 bytes an entry; drelu
                                       has relu(u) in place of u, which is 0 as its gradient is
    gradients  [capacity * M] int32    du and dg (16 each), in backward only
    spans      [3, N] int32            each neuron's first entry, the one after its last, has a row
    backup     [rows] int32            the neurons with a dense row (weight_gradients.py)
    totals     [2] int64               entries, and neurons that need a dense row

    forward:   h = g u        l1 = sum |h|
    backward:  dh += sign(h) dl1        du = dh g        dg = dh u

h and its gradients are over the unions, neuron-major: a row of 64 tokens for each listed neuron.
A place beyond the capacity is not stored and not read; totals[0] counts it all the same.

Reference: twell.sparse.reference.union_train.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import narrow, of_gate, of_up, popcount, through_gate
from twell.kernels.gate import PANEL
from twell.kernels.launch import direct


class UnionSaved(NamedTuple):
    """The tensors that `training.forward` saves besides x and the weights.

    entries, index, spans, backup and totals are described above; the unions are lists
    [blocks, width] int32, counts [blocks] int32 and the queue of tiles, int32 (union.py).
    """

    entries: Tensor
    index: Tensor
    lists: Tensor
    counts: Tensor
    queue: Tensor
    spans: Tensor
    backup: Tensor
    totals: Tensor


@direct
@triton.jit(do_not_specialize=["num_words", "N", "capacity", "dense_count", "backup_rows"])
def entries_index_kernel(
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
    BN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Places of BN neurons' entries: their index, spans, counts of tokens, and backup rows."""
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = neurons < N
    total = tl.zeros((BN,), tl.int32)
    counted = tl.zeros((BN,), tl.int32)
    for first in range(0, num_words, WORDS):
        words = first + tl.arange(0, WORDS)
        real = (words < num_words)[:, None] & inside[None, :]
        bits = tl.load(
            bits_ptr + words.to(tl.int64)[:, None] * width + neurons[None, :], mask=real, other=0
        )
        total += tl.sum(popcount(bits), 0)
        if mask_ptr is not None:
            tokens = words[:, None] * 32 + tl.arange(0, 32)[None, :]
            mask = tl.load(mask_ptr + tokens, mask=tokens < M, other=0).to(tl.int32)
            mask_bits = tl.sum(mask << tl.arange(0, 32)[None, :], 1)[:, None]
            counted += tl.sum(popcount(bits & mask_bits), 0)
    tl.store(counts_ptr + neurons, total if mask_ptr is None else counted, mask=inside)
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
        index = (tl.minimum(entry, capacity) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
        tl.store(index_ptr + place, index, mask=real)
        begin += tl.sum(count, 0)


@triton.jit
def entry_places(index, lane, capacity):
    """For 32 tokens (lanes) of each neuron: is it active, its entry's place, is that stored."""
    bits = index.to(tl.int32)[:, None]
    active = ((bits >> lane[None, :]) & 1) != 0
    place = (index >> 32).to(tl.int32)[:, None] + popcount(bits & ((1 << lane) - 1)[None, :])
    return active, place, active & (place < capacity)


@triton.jit
def low_value(word, dtype):
    """The value in the low 16 bits, in fp32."""
    return word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def value_bits(value):
    """The 16 bits of a value, as an int32 from 0."""
    return value.to(tl.uint16, bitcast=True).to(tl.int32)


@direct
@triton.jit
def entries_forward_kernel(
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
    width,
    capacity,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """For 32 tokens of a block: h = g u, written over u, the entries, and the sums l1 and l0."""
    dtype: tl.constexpr = g_ptr.dtype.element_ty
    word = tl.program_id(0)
    if word == 0:
        tl.store(needed_ptr, tl.cdiv(tl.load(totals_ptr), M))
    block = word // (BM // 32)
    lane = tl.arange(0, 32)
    tokens = word * 32 + lane
    count = tl.load(counts_ptr + block)
    # Summed over neurons at the end: a sum over warps in each step costs more than all else.
    l1 = tl.zeros((BN, 32), tl.float32)
    l0 = tl.zeros((BN, 32), tl.int32)
    for first in range(0, count, BN):
        places = first + tl.arange(0, BN)
        rows = block.to(tl.int64) * width + places
        neurons = tl.load(lists_ptr + rows).to(tl.int64)
        index = tl.load(
            index_ptr + word.to(tl.int64) * width + neurons, mask=places < count, other=0
        )
        active, place, stored = entry_places(index, lane, capacity)
        panel = g_ptr + (word // (PANEL // 32)).to(tl.int64) * width * PANEL
        g = tl.load(
            panel + neurons[:, None] * PANEL + (tokens % PANEL)[None, :], mask=active, other=0.0
        )
        h_ptrs = h_ptr + rows[:, None] * BM + (tokens % BM)[None, :]
        entry = (tokens.to(tl.int64) << 32)[None, :] | (value_bits(g).to(tl.int64) << 16)
        if GATED:
            u = tl.load(h_ptrs, mask=active, other=0.0)
            if ACT == "drelu":
                u = narrow(of_up(u.to(tl.float32), ACT), dtype)
            entry |= value_bits(u).to(tl.int64)
            h = of_gate(g.to(tl.float32), dtype, ACT) * u.to(tl.float32)
            h = narrow(tl.where(active, h, 0.0), dtype)
        elif ACT == "relu2":
            h = narrow(of_gate(g.to(tl.float32), dtype, ACT), dtype)
        else:
            h = g
        tl.store(h_ptrs, h)
        tl.store(entries_ptr + place, entry, mask=stored)
        l1 += tl.abs(h.to(tl.float32))
        l0 += active.to(tl.int32)
    tl.store(l1_ptr + tokens, tl.sum(l1, 0), mask=tokens < M)
    tl.store(l0_ptr + tokens, tl.sum(l0, 0), mask=tokens < M)


@direct
@triton.jit
def entries_backward_kernel(
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
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """For 32 tokens of a block: du, written over dh, and dg; unless None, both for each entry.

    Non-gated, dh includes the L1 term already.
    """
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    GATED: tl.constexpr = dg_ptr is not None
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
        active, place, stored = entry_places(index, lane, capacity)
        column = rows[:, None] * BM + (tokens % BM)[None, :]
        dh = tl.load(dh_ptr + column, mask=active, other=0.0).to(tl.float32)
        if GATED or ACT == "relu2":
            entry = tl.load(entries_ptr + place, mask=stored, other=0)
            g = low_value(entry >> 16, dtype)
        if GATED:
            u = low_value(entry, dtype)
            factor = of_gate(g, dtype, ACT)
            h = narrow(factor * u, dtype).to(tl.float32)
            sign = tl.where(h > 0, 1.0, tl.where(h < 0, -1.0, h))  # of 0 it is 0, of NaN NaN
            dh += sign * dl1[None, :]
            dg = narrow(tl.where(active, through_gate(dh * u, g, ACT), 0.0), dtype)
            reached = active & (u != 0) if ACT == "drelu" else active
            du = tl.where(reached, dh * factor, 0.0)
            tl.store(dg_ptr + column, dg)
        else:
            du = through_gate(dh, g, ACT) if ACT == "relu2" else dh
        du = narrow(du, dtype)
        tl.store(dh_ptr + column, du)
        if gradients_ptr is not None:
            gradients = value_bits(du) << 16
            if GATED:
                gradients |= value_bits(dg)
            tl.store(gradients_ptr + place, gradients, mask=stored)
