"""The transpose of the hybrid format, which the weight gradients read: neurons by tokens.

It is hybrid again: a neuron with few tokens has a list of them, any other neuron a dense row. The
place of an entry in its neuron's list is the number of earlier tokens for which the neuron is
active, from a bit matrix. So every list is in the order of tokens, and no sum depends on the order
of the programs.

    marks    [M / 32, N] int32, where bit i of word j is token 32 j + i
    before   [M / 32, N] int32, the marks of the neuron in words before this one
    place    [N] int32: n >= 0 for a list of n tokens, n < 0 for backup row ~n
    tokens   [N, width] int32
    planes   h, du and, gated, dg; each has the lists [N, width] and then the backup rows [rows, M]

    dh = dy w_down + sign(h) dl1        du = dh g        dg = dh u

Paper: App. B.2, weight gradients.
Reference: twell.sparse.hybrid_reference.transpose_matmul;
test: tests/kernels/test_hybrid.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, narrow, popcount
from twell.kernels.options import with_fusion
from twell.kernels.paper.hybrid_pack import (
    ELL_WIDTH,
    Backup,
    HybridSaved,
    list_width,
    transposed_rows,
)


class Transpose(NamedTuple):
    """The transpose, as kernels write and read it: see the module.

    plane_size is the number of entries of one plane, of which lists_size are in lists.
    """

    marks: Tensor
    before: Tensor
    place: Tensor
    tokens: Tensor
    planes: Tensor
    plane_size: int
    lists_size: int
    width: int


@triton.jit
def hybrid_marks_kernel(place_ptr, indices_ptr, dense_ptr, marks_ptr, N):
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
def entry_gradients(dh, g, u, dl1, active, dtype: tl.constexpr, GATED: tl.constexpr):
    """h, du and dg in the storage type, from dh without the L1 term; du, dg are 0 if inactive."""
    h = narrow(g * u, dtype) if GATED else narrow(g, dtype)
    sign = (h.to(tl.float32) > 0).to(tl.float32) - (h.to(tl.float32) < 0).to(tl.float32)
    dh += sign * dl1
    du = narrow(tl.where(active, dh * g if GATED else dh, 0.0), dtype)
    dg = narrow(tl.where(active, dh * u, 0.0), dtype)
    return h, du, dg


@triton.jit
def store_transposed(transpose, token, neuron, active, h, du, dg, M, N, GATED: tl.constexpr):
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


class Transposed(NamedTuple):
    """A transpose with the owners of its backup rows, and these rows of h, du and dg."""

    transpose: Transpose
    backup: Backup
    dense: Tensor


def make_transpose(saved: HybridSaved, x: Tensor, gated: bool) -> Transposed:
    """The transpose of `saved` with its places; the planes follow from `store_transposed`.

    x [M, K] has the storage type. Backup rows are 0.
    """
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
    hybrid_marks_kernel[(num_tokens,)](
        saved.place,
        saved.indices,
        saved.dense_g,
        marks,
        num_neurons,
        **with_fusion(num_warps=1, num_stages=1),
    )
    hybrid_ranks_kernel[(cdiv(num_neurons, 32),)](
        transpose,
        backup,
        num_words,
        num_neurons,
        BN=32,
        STEP=64,
        **with_fusion(num_warps=4, num_stages=1),
    )
    return Transposed(transpose, backup, planes[:, lists_size:])
