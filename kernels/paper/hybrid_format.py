"""The hybrid format of the paper's training: packing g, and the transpose of what is packed.

A token with at most ELL_WIDTH active neurons has a list of them, any other token a backup row. A
counter hands out the backup rows, in any order; no result depends on it. The gate is computed for
chunks of tokens, whose dense g is freed after it is packed.

    place    [M] int32: n >= 0 for a list of n entries, n < 0 for backup row ~n
    lists    indices, g, u [M, ELL_WIDTH]
    backup   owners [rows] int32, the token of each row; used [1] int32, the tokens that need a row;
             dense g, u [rows, N]

A token without a backup row, for lack of capacity, counts as empty, and `needed` reports it.

The transpose, neurons by tokens, is hybrid again. The place of an entry in its neuron's list is the
number of earlier tokens for which the neuron is active, from a bit matrix. So every list is in the
order of tokens, and no sum depends on the order of the programs.

Paper: App. B.2, conversion to the hybrid format.
Reference: twell.sparse.formats.Hybrid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, narrow, next_power_of_2, popcount, round_up
from twell.kernels.gate import gate_bits
from twell.kernels.launch import direct
from twell.kernels.options import with_fusion
from twell.sparse.activations import Weights

ELL_WIDTH = tl.constexpr(128)  # the paper's
LEAST_WIDTH = 64  # of a neuron's list
NEURON_ROWS = 4
# Tokens are taken in chunks whose dense g is smaller than this, or 256 at a time.
WORKSPACE_BYTES = 2**30


class Backup(NamedTuple):
    """Backup rows: the owner of each [num_rows] int32, and the owners that need one [1] int32."""

    owners: Tensor
    used: Tensor
    num_rows: int


class HybridSaved(NamedTuple):
    """The tensors that `hybrid.forward` saves besides x and the weights: see the module.

    Indices and the bits of g and u are int16. Non-gated, the tensors of u are empty. Sizes depend
    on no data.
    """

    place: Tensor
    indices: Tensor
    g: Tensor
    u: Tensor
    owners: Tensor
    used: Tensor
    dense_g: Tensor
    dense_u: Tensor

    def lists(self, dtype: torch.dtype) -> HybridSaved:
        """The same with the lists' values in the storage type."""
        return self._replace(g=self.g.view(dtype), u=self.u.view(dtype))

    def backup(self) -> Backup:
        """The owners of the backup rows."""
        return Backup(self.owners, self.used, len(self.dense_g))


class Transpose(NamedTuple):
    """The transpose, as kernels write and read it.

    marks   [M / 32, N] int32, where bit i of word j is token 32 j + i
    before  [M / 32, N] int32, the marks of the neuron in words before this one
    place   [N] int32: n >= 0 for a list of n tokens, n < 0 for backup row ~n
    tokens  [N, width] int32
    planes  h, du and, gated, dg; each has plane_size entries: the lists [N, width], lists_size in
            all, and then the backup rows [rows, M]
    """

    marks: Tensor
    before: Tensor
    place: Tensor
    tokens: Tensor
    planes: Tensor
    plane_size: int
    lists_size: int
    width: int


# Sizes follow from shapes alone, so that no launch waits for the device.


def backup_rows(num_tokens: int, num_neurons: int, capacity: int) -> int:
    """Backup rows of tokens: at least `capacity` entries per token, from 1 row to M rows."""
    return torch.sym_min(torch.sym_max(-(-num_tokens * capacity // num_neurons), 1), num_tokens)


def list_width(num_tokens: int) -> int:
    """Entries of a neuron's list in the transpose: one token in 64, a power of two, at least 64."""
    return max(next_power_of_2(cdiv(num_tokens, 64)), LEAST_WIDTH)


def transposed_rows(num_tokens: int, num_neurons: int, num_backup: int) -> int:
    """Backup rows of the transpose, for neurons with more tokens than `list_width`; 1 to N.

    They hold up to NEURON_ROWS times the entries of the tokens' `num_backup` rows.
    """
    return min(max(NEURON_ROWS * num_backup * num_neurons // num_tokens, 1), num_neurons)


@direct
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


@direct
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


@direct
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


def saved_like(x: Tensor, weights: Weights, capacity: int) -> HybridSaved:
    """Empty tensors for `pack` and the forward pass to write."""
    num_tokens, num_neurons = x.shape[0], weights.w_up.shape[0]
    num_backup = backup_rows(num_tokens, num_neurons, capacity)
    lists, dense = (num_tokens, ELL_WIDTH.value), (num_backup, num_neurons)

    def empty(*shape: int, dtype: torch.dtype = torch.int16) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    return HybridSaved(
        place=empty(num_tokens, dtype=torch.int32),
        indices=empty(*lists),
        g=empty(*lists),
        u=empty(*lists) if weights.gated else empty(0),
        owners=empty(num_backup, dtype=torch.int32),
        used=empty(1, dtype=torch.int32),
        dense_g=empty(*dense),
        dense_u=empty(*dense) if weights.gated else empty(0),
    )


def pack(
    x: Tensor, weights: Weights, token_mask: Tensor | None, saved: HybridSaved
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gate of x [M, K] and writes all of `saved` but u.

    token_mask [M] bool or None. Returns token_counts [M] int32, neuron_counts [N] int32 and
    `needed` 0-d int64.
    """
    num_tokens, num_neurons = len(x), len(weights.w_up)
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
        g, bits = gate_bits(x[chunk], *weights.first, by_neuron=False)
        mask = None if token_mask is None else token_mask[chunk]
        tensors, sizes = (bits, mask, counts, neuron_counts), (len(g), num_neurons, bits.shape[1])
        options = with_fusion(num_warps=4, num_stages=1)
        hybrid_count_kernel[(cdiv(num_neurons, 128), cdiv(len(g), 512))](
            *tensors, *sizes, TOKENS=512, **options
        )
        hybrid_pack_kernel[(len(g),)](
            g.view(torch.int16),
            bits,
            *(tensor[chunk] for tensor in (token_counts, saved.place, saved.indices, saved.g)),
            saved.backup(),
            saved.dense_g,
            first,
            num_neurons,
            g.shape[1],
            WORDS=next_power_of_2(cdiv(num_neurons, 32)),
            **with_fusion(num_warps=1, num_stages=1),
        )
    needed = torch.empty((), dtype=torch.int64, device=x.device)
    hybrid_needed_kernel[(1,)](
        counts,
        saved.used,
        needed,
        num_tokens,
        num_neurons,
        WIDTH=list_width(num_tokens),
        ROWS=NEURON_ROWS,
        BLOCK=4096,
        **with_fusion(num_warps=8, num_stages=1),
    )
    return token_counts, neuron_counts, needed


@direct
@triton.jit
def hybrid_marks_kernel(place_ptr, indices_ptr, dense_ptr, marks_ptr, N):
    """Sets one token's bit for each of its active neurons."""
    token = tl.program_id(0)
    place = tl.load(place_ptr + token)
    marks_ptr += (token // 32).to(tl.int64) * N
    bit = 1 << (token % 32)
    if place >= 0:
        slots = tl.arange(0, ELL_WIDTH)
        neurons = tl.load(
            indices_ptr + token.to(tl.int64) * ELL_WIDTH + slots, mask=slots < place, other=0
        ).to(tl.int32)
        tl.atomic_or(marks_ptr + (neurons & 0xFFFF), bit, mask=slots < place, sem="relaxed")
    else:
        for start in range(0, N, 1024):
            neurons = start + tl.arange(0, 1024)
            g = tl.load(dense_ptr + (~place).to(tl.int64) * N + neurons, mask=neurons < N, other=0)
            tl.atomic_or(marks_ptr + neurons, bit, mask=g != 0, sem="relaxed")


@direct
@triton.jit(do_not_specialize=["num_words"])
def hybrid_ranks_kernel(transpose, backup, num_words, N, BN: tl.constexpr, STEP: tl.constexpr):
    """`before` and `place` of BN neurons, and the owners of the backup rows."""
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.int32)
    for start in range(0, num_words, STEP):
        words = start + tl.arange(0, STEP)
        place = words.to(tl.int64)[:, None] * N + neurons[None, :]
        inside = (words < num_words)[:, None] & (neurons < N)[None, :]
        count = popcount(tl.load(transpose.marks + place, mask=inside, other=0))
        before = total[None, :] + tl.cumsum(count, 0) - count
        tl.store(transpose.before + place, before, mask=inside)
        total += tl.sum(count, 0)
    heavy = (total > transpose.width).to(tl.int32)
    free = tl.atomic_add(backup.used, tl.sum(heavy, 0), sem="relaxed") + tl.cumsum(heavy, 0) - heavy
    stored = (heavy != 0) & (free < backup.num_rows)
    tl.store(backup.owners + free, neurons, mask=stored)
    place = tl.where(heavy != 0, tl.where(stored, ~free, 0), total)
    tl.store(transpose.place + neurons, place, mask=neurons < N)


@triton.jit
def entry_gradients(dh, g, u, dl1, active, dtype, GATED):
    """h, du and dg in the storage type, from dh without the L1 term; du, dg are 0 if inactive."""
    h = narrow(g * u, dtype) if GATED else narrow(g, dtype)
    sign = (h.to(tl.float32) > 0).to(tl.float32) - (h.to(tl.float32) < 0).to(tl.float32)
    dh += sign * dl1
    du = narrow(tl.where(active, dh * g if GATED else dh, 0.0), dtype)
    dg = narrow(tl.where(active, dh * u, 0.0), dtype)
    return h, du, dg


@triton.jit
def store_transposed(transpose, token, neuron, active, h, du, dg, M, N, GATED):
    """Stores active entries in the transpose."""
    word = (token // 32).to(tl.int64) * N + neuron
    earlier = tl.load(transpose.marks + word, mask=active, other=0) & ((1 << (token % 32)) - 1)
    rank = tl.load(transpose.before + word, mask=active, other=0) + popcount(earlier)
    place = tl.load(transpose.place + neuron, mask=active, other=0)
    listed = active & (rank < place)
    stored = active & ((rank < place) | (place < 0))
    slot = neuron.to(tl.int64) * transpose.width + rank
    tl.store(transpose.tokens + slot, token, mask=listed)
    dense_slot = transpose.lists_size + (~place).to(tl.int64) * M + token
    slot = tl.where(place < 0, dense_slot, slot)
    tl.store(transpose.planes + slot, h, mask=stored)
    tl.store(transpose.planes + transpose.plane_size + slot, du, mask=stored)
    if GATED:
        dg_ptr = transpose.planes + 2 * transpose.plane_size.to(tl.int64)
        tl.store(dg_ptr + slot, dg, mask=stored)


def make_transpose(saved: HybridSaved, x: Tensor, gated: bool) -> tuple[Transpose, Backup]:
    """The transpose of `saved`, planes in x's dtype with backup rows of 0, and their owners."""
    num_tokens, (num_rows, num_neurons) = len(x), saved.dense_g.shape
    width, num_backup = list_width(num_tokens), transposed_rows(num_tokens, num_neurons, num_rows)
    num_words, lists_size = cdiv(num_tokens, 32), num_neurons * width
    marks = torch.zeros(num_words, num_neurons, dtype=torch.int32, device=x.device)
    planes = x.new_empty(2 + gated, lists_size + num_backup * num_tokens)
    planes[:, lists_size:].zero_()
    transpose = Transpose(
        marks=marks,
        before=torch.empty_like(marks),
        place=marks.new_empty(num_neurons),
        tokens=marks.new_empty(num_neurons, width),
        planes=planes,
        plane_size=planes.shape[1],
        lists_size=lists_size,
        width=width,
    )
    backup = Backup(marks.new_empty(num_backup), marks.new_zeros(1), num_backup)
    tensors, options = (saved.place, saved.indices, saved.dense_g, marks), dict(num_stages=1)
    hybrid_marks_kernel[(num_tokens,)](*tensors, num_neurons, **with_fusion(num_warps=1, **options))
    hybrid_ranks_kernel[(cdiv(num_neurons, 32),)](
        transpose,
        backup,
        num_words,
        num_neurons,
        BN=32,
        STEP=64,
        **with_fusion(num_warps=4, **options),
    )
    return transpose, backup
