"""Packing for training by the hybrid format: g becomes short lists and dense backup rows.

A token with at most ELL_WIDTH active neurons has a list of them, any other token a backup row. A
counter hands out the backup rows, in any order; no result depends on it. The gate is computed for
chunks of tokens, whose dense g is freed after it is packed.

    g        [tokens, width] of one chunk; bits: a bit for each entry, 32 neurons to a word of int32
    place    [M] int32: n >= 0 for a list of n entries, n < 0 for backup row ~n
    lists    indices, g, u [M, ELL_WIDTH]
    backup   owners [rows] int32, the token of each row; used [1] int32, the tokens that need a row;
             dense g, u [rows, N]
    counts   active neurons of each token [M] int32, tokens of each neuron [N] int32

A token without a backup row, for lack of capacity, counts as empty, and `needed` reports it.

Paper: App. B.2, conversion to the hybrid format.
Reference: twell.sparse.hybrid_reference.to_hybrid;
test: tests/kernels/test_hybrid.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, next_power_of_2, popcount, round_up
from twell.kernels.gate import gate_bits
from twell.kernels.options import with_fusion

ELL_WIDTH = tl.constexpr(128)  # the paper's
LEAST_WIDTH = 64  # of a neuron's list
NEURON_ROWS = 4
# Tokens are taken in chunks whose dense g is smaller than this, or 256 at a time.
WORKSPACE_BYTES = 2**30


class Lists(NamedTuple):
    """The tokens' lists, as kernels read them: place [M] int32; indices, g, u [M, ELL_WIDTH]."""

    place: Tensor
    indices: Tensor
    g: Tensor
    u: Tensor


class Backup(NamedTuple):
    """Backup rows: the owner of each [num_rows] int32, and the owners that need one [1] int32."""

    owners: Tensor
    used: Tensor
    num_rows: int


class HybridSaved(NamedTuple):
    """The tensors that `hybrid.forward` saves besides x and the weights, all integers.

    place [M] int32; lists [M, ELL_WIDTH] int16: indices, bits of g, bits of u; backup rows: owners
    [rows] int32, used [1] int32, bits of g and of u [rows, N] int16. Non-gated, the tensors of u
    are empty. Sizes depend on no data.
    """

    place: Tensor
    indices: Tensor
    g: Tensor
    u: Tensor
    owners: Tensor
    used: Tensor
    dense_g: Tensor
    dense_u: Tensor

    def lists(self, dtype: torch.dtype) -> Lists:
        """The lists, their values in the storage type."""
        return Lists(self.place, self.indices, self.g.view(dtype), self.u.view(dtype))

    def backup(self) -> Backup:
        """The owners of the backup rows."""
        return Backup(self.owners, self.used, len(self.dense_g))


# Sizes follow from shapes alone, so that no launch waits for the device.


def backup_rows(num_tokens: int, num_neurons: int, capacity: int) -> int:
    """Backup rows of tokens: at least `capacity` entries per token, from 1 row to M rows."""
    return torch.sym_min(torch.sym_max(-(-num_tokens * capacity // num_neurons), 1), num_tokens)


def list_width(num_tokens: int) -> int:
    """Entries of a neuron's list in the transpose.

    One token in 64, rounded up to a power of two, at least LEAST_WIDTH.
    """
    return max(next_power_of_2(cdiv(num_tokens, 64)), LEAST_WIDTH)


def transposed_rows(num_tokens: int, num_neurons: int, num_backup: int) -> int:
    """Backup rows of the transpose, for neurons with more tokens than `list_width`.

    They hold up to NEURON_ROWS times the entries of the tokens' `num_backup` rows. At least 1 row,
    at most one for each neuron.
    """
    return min(max(NEURON_ROWS * num_backup * num_neurons // num_tokens, 1), num_neurons)


@triton.jit(do_not_specialize=["M"])
def hybrid_needed_kernel(
    counts_ptr,
    used_ptr,
    needed_ptr,
    M,
    N,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least capacity for these counts: `backup_rows` and `transposed_rows`, inverted."""
    heavy = tl.load(used_ptr).to(tl.int64) * 0
    for start in range(0, N, BLOCK):
        neurons = start + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + neurons, mask=neurons < N, other=0)
        heavy += tl.sum((count > WIDTH).to(tl.int64), 0)
    of_neurons = tl.where(heavy > 1, tl.cdiv(heavy * M, ROWS * N), 1)
    rows = tl.maximum(of_neurons, tl.load(used_ptr))
    tl.store(needed_ptr, tl.where(rows > 1, (rows - 1) * N // M + 1, 0))


def least_capacity(counts: Tensor, used: Tensor, num_tokens: int, needed: Tensor) -> None:
    """Writes into `needed` 0-d int64 the least capacity that suffices.

    counts [N] int32, the tokens of each neuron; used [1] int32, the tokens that need a backup row.
    Ours.
    """
    hybrid_needed_kernel[(1,)](
        counts,
        used,
        needed,
        num_tokens,
        len(counts),
        WIDTH=list_width(num_tokens),
        ROWS=NEURON_ROWS,
        BLOCK=4096,
        **with_fusion(num_warps=8, num_stages=1),
    )


@triton.jit(do_not_specialize=["first"])
def hybrid_pack_kernel(
    g_ptr,
    bits_ptr,
    counts_ptr,
    place_ptr,
    indices_ptr,
    values_ptr,
    backup,
    dense_ptr,
    first,
    N,
    width,
    WORDS: tl.constexpr,
):
    """Packs one token, number first + program: its count, its place, and its list or backup row.

    Moves bits, not numbers.
    """
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
        free = tl.atomic_add(backup.used, 1, sem="relaxed")
        place = tl.where(free < backup.num_rows, ~free, 0)
        if free < backup.num_rows:
            tl.store(backup.owners + free, first + tl.program_id(0))
            for start in range(0, N, 1024):
                neurons = start + tl.arange(0, 1024)
                g = tl.load(g_ptr + row * width + neurons, mask=neurons < N, other=0)
                g = tl.where((g & 0x7FFF) != 0, g, 0)  # -0.0 is not active
                tl.store(dense_ptr + free.to(tl.int64) * N + neurons, g, mask=neurons < N)
    tl.store(counts_ptr + row, total)
    tl.store(place_ptr + row, place)


@triton.jit(do_not_specialize=["M"])
def hybrid_count_kernel(
    bits_ptr, mask_ptr, all_ptr, counted_ptr, M, N, stride, TOKENS: tl.constexpr
):
    """Adds each of 128 neurons' active tokens, and those of them whose mask is not 0."""
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


def pack(
    x: Tensor, w: Tensor, b: Tensor | None, token_mask: Tensor | None, saved: HybridSaved
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gate and writes all of `saved` but u.

    x [M, K]; w [N, K] and b [N] of the gate, non-gated of up; token_mask [M] bool or None. Returns
    token_counts [M] int32, neuron_counts [N] int32 and `needed` 0-d int64.
    """
    num_tokens, num_neurons = len(x), len(w)
    saved.used.zero_()
    token_counts = torch.empty_like(saved.place)
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
        _count(bits, mask, counts, neuron_counts, len(g))
        _pack_chunk(g, bits, token_counts, first, chunk, saved)
    needed = torch.empty((), dtype=torch.int64, device=x.device)
    least_capacity(counts, saved.used, num_tokens, needed)
    return token_counts, neuron_counts, needed


def _count(
    bits: Tensor, mask: Tensor | None, counts: Tensor, masked_counts: Tensor, num_tokens: int
) -> None:
    """Adds a chunk's tokens of each neuron to `counts` [N], and those of the mask apart."""
    num_neurons = len(counts)
    hybrid_count_kernel[(cdiv(num_neurons, 128), cdiv(num_tokens, 512))](
        bits,
        mask,
        counts,
        masked_counts,
        num_tokens,
        num_neurons,
        bits.shape[1],
        TOKENS=512,
        **with_fusion(num_warps=4, num_stages=1),
    )


def _pack_chunk(
    g: Tensor, bits: Tensor, token_counts: Tensor, first: int, chunk: slice, saved: HybridSaved
) -> None:
    """Packs g of the tokens `chunk`, which begin with number `first`."""
    num_neurons = saved.dense_g.shape[1]
    hybrid_pack_kernel[(len(g),)](
        g.view(torch.int16),
        bits,
        token_counts[chunk],
        saved.place[chunk],
        saved.indices[chunk],
        saved.g[chunk],
        saved.backup(),
        saved.dense_g,
        first,
        num_neurons,
        g.shape[1],
        WORDS=next_power_of_2(cdiv(num_neurons, 32)),
        **with_fusion(num_warps=1, num_stages=1),
    )
