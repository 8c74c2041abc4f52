"""The weight and bias gradients of a training step by unions, from its entries (entries.py).

    dWu = du^T x        dWg = dg^T x        dWd^T = h^T dy        db = the sums of du and dg

Lists. A program sums the rows of x and dy of one neuron's tokens, one after the other. Columns are
taken in slabs, so that the gathered rows stay in the cache.

Backup. A neuron that is active for many tokens gets dense rows of h, du and dg instead, whose
products run on tensor cores. Which neurons have a row depends on their numbers of tokens alone.
This is the paper's transposed hybrid format with lists in place of ELL rows (App. B.2).

    entries, gradients, spans    see entries.py
    x, dy      [M, K]
    dense      [3 * backup rows, tokens]: h, du and, gated, dg, one after the other

Where the buffer does not hold all rows, the rest follows in another round.

Reference: twell.sparse.reference.union_train.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import Gradients, cdiv, load, narrow, next_power_of_2, of_gate, put, wide
from twell.kernels.entries import UnionSaved, entry_places, low_value
from twell.kernels.launch import descriptor, direct
from twell.kernels.options import launch_options, num_processors, with_fusion
from twell.sparse.activations import Weights

# Gathered rows of x and dy should stay in the cache (50 MB on an H200) beside all else.
CACHE_BYTES = 2**24
WARP_COLUMNS = 512  # that a warp sums


@triton.jit
def _add_entry(sums, place, operands, k, inside, K, dtype, GATED, ACT, EVEN, GATE, UP, DOWN):
    """Adds dg x, du x and h dy of one entry to the sums dwg, dwu and dwd, as the flags ask."""
    dwg, dwu, dwd = sums
    entries_ptr, gradients_ptr, x_ptr, dy_ptr = operands
    entry = tl.load(entries_ptr + place)
    row = (entry >> 32) * K + k
    if GATE or UP:
        x = load(x_ptr + row, inside, EVEN).to(tl.float32)
        gradients = tl.load(gradients_ptr + place)
        if UP:
            dwu += low_value(gradients >> 16, dtype) * x
        if GATE:
            dwg += low_value(gradients, dtype) * x
    if DOWN:
        h = of_gate(low_value(entry >> 16, dtype), dtype, ACT)
        if GATED:
            h = narrow(h * low_value(entry, dtype), dtype).to(tl.float32)
        dwd += h * load(dy_ptr + row, inside, EVEN).to(tl.float32)
    return dwg, dwu, dwd


@direct
@triton.jit
def list_gradients_kernel(
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
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A slab of BK columns of one neuron's weight gradients; slabs are the slow axis."""
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
        operands = (entries_ptr, gradients_ptr, x_ptr, dy_ptr)
        whole = begin + (end - begin) // UNROLL * UNROLL
        for first in range(begin, whole, UNROLL):
            for i in tl.static_range(UNROLL):
                sums = _add_entry(
                    sums, first + i, operands, k, inside, K, dtype, GATED, ACT, EVEN, GATE, UP, DOWN
                )
        for place in range(whole, end):
            sums = _add_entry(
                sums, place, operands, k, inside, K, dtype, GATED, ACT, EVEN, GATE, UP, DOWN
            )
        dwg, dwu, dwd = sums
        row = neuron.to(tl.int64) * K + k
        put(dwg_ptr, row, dwg, inside)
        put(dwu_ptr, row, dwu, inside)
        put(dwd_ptr, row, dwd, inside)


@direct
@triton.jit
def bias_gradients_kernel(gradients_ptr, spans_ptr, dbg_ptr, dbu_ptr, N, STEP: tl.constexpr):
    """The sums of one neuron's dg and du."""
    some_ptr = dbg_ptr if dbu_ptr is None else dbu_ptr
    dtype: tl.constexpr = some_ptr.dtype.element_ty
    neuron = tl.program_id(0)
    begin = tl.load(spans_ptr + neuron)
    end = tl.load(spans_ptr + N + neuron)
    up = tl.zeros((STEP,), tl.float32)
    gate = tl.zeros((STEP,), tl.float32)
    for first in range(begin, end, STEP):
        place = first + tl.arange(0, STEP)
        gradients = tl.load(gradients_ptr + place, mask=place < end, other=0)
        up += low_value(gradients >> 16, dtype)
        gate += low_value(gradients, dtype)
    put(dbu_ptr, neuron, tl.sum(up, 0))
    put(dbg_ptr, neuron, tl.sum(gate, 0))


@triton.jit
def _num_rows_of_round(totals_ptr, first_row, backup_rows, listed):
    """How many neurons a round has. A step beyond its capacity needs more rows than are listed."""
    needed = tl.load(totals_ptr + 1).to(tl.int32)
    return tl.minimum(tl.minimum(needed, listed) - first_row, backup_rows)


@direct
@triton.jit(do_not_specialize=["num_words", "first_row"])
def backup_fill_kernel(
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
    listed,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    DOWN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The dense rows of the backup's neurons from number `first_row` on."""
    dtype: tl.constexpr = dense_ptr.dtype.element_ty
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    real = words < num_words
    lane = tl.arange(0, 32)
    size = num_words.to(tl.int64) * 32
    used = _num_rows_of_round(totals_ptr, first_row, backup_rows, listed)
    for row in range(tl.program_id(1), used, tl.num_programs(1)):
        neuron = tl.load(backup_ptr + first_row + row)
        index = tl.load(index_ptr + words.to(tl.int64) * width + neuron, mask=real, other=0)
        _, place, stored = entry_places(index, lane, capacity)
        column = row * size + words[:, None] * 32 + lane[None, :]
        if DOWN:
            entry = tl.load(entries_ptr + place, mask=stored, other=0)
            h = of_gate(low_value(entry >> 16, dtype), dtype, ACT)
            if GATED:
                h *= low_value(entry, dtype)
            tl.store(dense_ptr + column, narrow(h, dtype), mask=real[:, None])
        if GATE or UP:
            gradients = tl.load(gradients_ptr + place, mask=stored, other=0)
            column += backup_rows * size
            if UP:
                du = narrow(low_value(gradients >> 16, dtype), dtype)
                tl.store(dense_ptr + column, du, mask=real[:, None])
            if GATE:
                column += backup_rows * size
                dg = narrow(low_value(gradients, dtype), dtype)
                tl.store(dense_ptr + column, dg, mask=real[:, None])


@triton.jit
def _dense_product(dense_desc, x_desc, first, column, M, BH, BN, BT):
    """BH rows of the backup times BN columns of x [M, K]."""
    acc = tl.zeros((BH, BN), tl.float32)
    for token in range(0, M, BT):
        acc = tl.dot(wide(dense_desc.load([first, token])), wide(x_desc.load([token, column])), acc)
    return acc


@direct
@triton.jit(do_not_specialize=["M", "first_row"])
def backup_gradients_kernel(
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
    listed,
    M,
    K,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """BN columns of one weight gradient of BH backup neurons: their dense rows times x or dy."""
    num_columns = tl.cdiv(K, BN)
    per_weight = backup_rows // BH * num_columns
    weight = tl.program_id(0) // per_weight
    row = tl.program_id(0) % per_weight // num_columns * BH
    column = tl.program_id(0) % num_columns * BN
    used = _num_rows_of_round(totals_ptr, first_row, backup_rows, listed)
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
                put(dwd_ptr, place, acc, inside)
        elif dwg_ptr is not None or dwu_ptr is not None:
            acc = _dense_product(dense_desc, x_desc, first, column, M, BH, BN, BT)
            if weight == 1:
                put(dwu_ptr, place, acc, inside)
            else:
                put(dwg_ptr, place, acc, inside)


def backward(
    x: Tensor,
    dy: Tensor,
    saved: UnionSaved,
    entry_gradients: Tensor | None,
    weights: Weights,
    scratch: Tensor,
    gradients: Gradients,
) -> None:
    """Writes the gradients of weights and biases that are not None.

    x and dy [M, K]; `entry_gradients` of entries.py. `scratch`, of any shape in x.dtype, holds the
    dense rows. Where it is too small for all of them, there are several rounds.
    """
    (num_tokens, hidden_size), intermediate_size = x.shape, saved.spans.shape[1]
    _, gate, up, down, *biases = gradients
    flags = dict(GATED=weights.gated, ACT=weights.act.name)
    if any(bias is not None for bias in biases):
        bias_gradients_kernel[(intermediate_size,)](
            entry_gradients,
            saved.spans,
            *biases,
            intermediate_size,
            STEP=256,
            **with_fusion(num_warps=1, num_stages=1),
        )
    if gate is None and up is None and down is None:
        return

    options = launch_options("training_backup", x.device)
    block_rows, num_matrices = options["BH"], 2 + weights.gated
    num_words, width = saved.index.shape
    most = scratch.numel() // (num_matrices * 32 * num_words)
    num_rows = min(most // block_rows * block_rows, len(saved.backup))
    dense = scratch.view(-1)[: num_matrices * num_rows * 32 * num_words].view(-1, 32 * num_words)
    num_tiles = num_matrices * num_rows // block_rows * cdiv(hidden_size, options["BN"])
    fill_grid = cdiv(num_words, 64), min(num_rows, 4 * num_processors(x.device))
    for first_row in range(0, len(saved.backup), num_rows):
        backup_fill_kernel[fill_grid](
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
            num_rows,
            len(saved.backup),
            GATE=gate is not None,
            UP=up is not None,
            DOWN=down is not None,
            WORDS=64,
            **flags,
            **with_fusion(num_warps=4, num_stages=1),
        )
        backup_gradients_kernel[(num_tiles,)](
            descriptor(dense, [block_rows, options["BT"]]),
            descriptor(x, [options["BT"], options["BN"]]),
            descriptor(dy, [options["BT"], options["BN"]]),
            gate,
            up,
            down,
            saved.backup,
            saved.totals,
            first_row,
            num_rows,
            len(saved.backup),
            num_tokens,
            hidden_size,
            **options,
        )

    # The widest power of two whose columns of x and dy stay in the cache.
    columns = max(CACHE_BYTES // (2 * 2 * num_tokens), 1)
    block_k = min(max(1 << (columns.bit_length() - 1), 128), next_power_of_2(hidden_size), 2048)
    list_gradients_kernel[(intermediate_size * cdiv(hidden_size, block_k),)](
        saved.entries,
        entry_gradients,
        saved.spans,
        x,
        dy,
        gate,
        up,
        down,
        intermediate_size,
        hidden_size,
        EVEN=hidden_size % block_k == 0,
        BK=block_k,
        num_warps=max(block_k // WARP_COLUMNS, 1),
        **flags,
        **launch_options("training_lists", x.device),
    )
