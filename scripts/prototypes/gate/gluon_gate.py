"""Gate kernels for Hopper in Gluon: prototypes beside twell/kernels/gate.py.

A tile of the result has rows and columns: neurons and tokens by neurons, tokens and neurons by
tokens. Both operands are read along K, `a` for the rows and `b` for the columns.

    plain      8 warps load, multiply and store in turns
    coop       8 warps multiply a tile; one warp loads
    skewed     two groups of 4 warps multiply the halves of a tile, the second SKEW steps behind the
               first, so that one works on its epilogue while the other multiplies; one warp loads
    pingpong   two groups of 4 warps take whole tiles in turns; one warp loads

A ring of STAGES buffers feeds the products. Every role counts its steps through all tiles, so step
i uses buffer i % STAGES for the i // STAGES-th time. `full` of a buffer completes when its copies
arrived, `empty` when all groups that read it are done.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twell.kernels.common import cdiv, round_up
from twell.kernels.options import num_processors

RELU_BF16 = gl.constexpr("cvt.rn.relu.bf16x2.f32 $0, $2, $1;")
RELU_FP16 = gl.constexpr("cvt.rn.relu.f16x2.f32 $0, $2, $1;")
# Eight 16-bit numbers, columns 0, 1, 8, 9, 16, 17, 24, 25 of a word: bits of those that are not 0.
EIGHT_BITS = gl.constexpr("""{
.reg .b32 t<4>, u, v, lo, hi, one;
mov.b32 one, 0x00010001;
min.u16x2 t0, $8, one;
min.u16x2 t1, $9, one;
min.u16x2 t2, $10, one;
min.u16x2 t3, $11, one;
mad.lo.u32 u, t1, 256, t0;
mad.lo.u32 v, t3, 256, t2;
prmt.b32 lo, u, v, 0x5410;
prmt.b32 hi, u, v, 0x7632;
mad.lo.u32 $0, hi, 2, lo;
mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0;
mov.b32 $4, $0; mov.b32 $5, $0; mov.b32 $6, $0; mov.b32 $7, $0;
}""")


@gluon.constexpr_function
def accumulator_layout(columns, element_bits, warps):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 256 // element_bits]
    )


@gluon.constexpr_function
def powers(start, end, make):
    bases = []
    while start < end:
        bases.append(make(start))
        start *= 2
    return bases


@gluon.constexpr_function
def word_layout(rows, words, warps):
    """[rows, words, 4, 8]: the last axis in consecutive registers, the one before in a quad."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            *powers(1, 8, lambda i: [0, 0, 0, i]),
            [8, 0, 0, 0],
            *powers(1, words, lambda i: [0, i, 0, 0]),
            *powers(16 * warps, rows, lambda i: [i, 0, 0, 0]),
        ],
        lane_bases=[
            *powers(1, 4, lambda i: [0, 0, i, 0]),
            *powers(1, 8, lambda i: [i, 0, 0, 0]),
        ],
        warp_bases=powers(16, 16 * warps, lambda i: [i, 0, 0, 0]),
        block_bases=[],
        shape=[rows, words, 4, 8],
    )


@gluon.jit
def tile_of(number, num_token_tiles, num_neuron_tiles, GROUP: gl.constexpr, BY_NEURON: gl.constexpr):
    """Row and column tile by its number, in columns of GROUP tiles of tokens."""
    per_group = GROUP * num_neuron_tiles
    first = number // per_group * GROUP
    height = gl.minimum(num_token_tiles - first, GROUP)
    token, neuron = first + number % per_group % height, number % per_group // height
    if BY_NEURON:
        return neuron, token
    else:
        return token, neuron


@gluon.jit
def first_half(value):
    """[..., 2n] to [..., n] by its even entries."""
    even, odd = gl.split(value)
    return even


@gluon.jit
def words_of(g):
    """Bits of g [R, C] != 0, packed along C: [R, C / 32]. No entry may be -0."""
    R: gl.constexpr = g.shape[0]
    W: gl.constexpr = g.shape[1] // 32
    values = gl.permute(gl.reshape(g, [R, W, 4, 4, 2]), [0, 1, 3, 2, 4])
    layout: gl.constexpr = word_layout(R, W, gl.num_warps())
    values = gl.convert_layout(gl.reshape(values, [R, W, 4, 8]), layout, assert_trivial=True)
    part = gl.inline_asm_elementwise(
        EIGHT_BITS,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [values.to(gl.int16, bitcast=True)],
        dtype=gl.int32,
        is_pure=True,
        pack=8,
    )
    part = first_half(first_half(first_half(gl.reshape(part, [R, W, 4, 2, 2, 2]))))
    place_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, part.type.layout))
    place = gl.arange(0, 4, layout=place_layout) * 2
    place = gl.expand_dims(gl.expand_dims(place, 0), 1)
    return gl.reduce_or(part << place, 2)


@gluon.jit
def words_by_sum(g):
    """The same without assembly."""
    R: gl.constexpr = g.shape[0]
    W: gl.constexpr = g.shape[1] // 32
    active = gl.reshape((g.to(gl.uint16, bitcast=True) != 0).to(gl.int32), [R, W, 32])
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, active.type.layout))
    place = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=layout), 0), 1)
    return gl.sum(active << place, 2)


@gluon.jit
def gate_value(value, threshold, dtype: gl.constexpr, ASM: gl.constexpr):
    """As in common.gate_value."""
    if threshold is not None:
        value = value.to(dtype).to(gl.float32)
        g = gl.where(value <= threshold, 0.0, value).to(dtype)
    else:
        if ASM:
            gl.static_assert(dtype == gl.bfloat16 or dtype == gl.float16)
            asm: gl.constexpr = RELU_BF16 if dtype == gl.bfloat16 else RELU_FP16
            bits = gl.inline_asm_elementwise(
                asm, "=r,r,r", [value], dtype=gl.int16, is_pure=True, pack=2
            )
            g = bits.to(dtype, bitcast=True)
        else:
            g = gl.maximum(value, 0.0, propagate_nan=PROPAGATE).to(dtype)
    return g


from triton.language import PropagateNan  # noqa: E402

PROPAGATE = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def halves(value, ELEMENT_BITS: gl.constexpr):
    """[R, C] to its left and right half, each in the layout of an accumulator."""
    R: gl.constexpr = value.shape[0]
    C: gl.constexpr = value.shape[1]
    layout: gl.constexpr = accumulator_layout(C // 2, ELEMENT_BITS, gl.num_warps())
    left, right = gl.split(gl.permute(gl.reshape(value, [R, 2, C // 2]), [0, 2, 1]))
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def finish_chunk(
    acc, at: gl.constexpr, buffer, row, column, row_scale, row_bias, column_values,
    g_desc, bits_ptr, threshold, num_columns, bits_stride,
    BY_NEURON: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr,
):
    """Epilogue of the columns `at` and following of a tile: g through `buffer`, and the bits.

    PARTS: 1 stores g, 2 stores bits, 4 by assembly.
    """
    R: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1]
    column_scale, column_bias = column_values
    rows_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    columns_layout: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    if column_scale is not None:
        scale = gl.convert_layout(row_scale, rows_layout, assert_trivial=True)
        scale = gl.expand_dims(scale, 1)
        acc *= scale * gl.expand_dims(column_scale.slice(at, C).load(columns_layout), 0)
    if column_bias is not None:
        acc += gl.expand_dims(column_bias.slice(at, C).load(columns_layout), 0)
    if row_bias is not None:
        bias = gl.convert_layout(row_bias, rows_layout, assert_trivial=True)
        acc += gl.expand_dims(bias, 1)
    g = gate_value(acc, threshold, g_desc.dtype, PARTS & 4)
    if PARTS & 1:
        tma.store_wait(BUFFERS - 1)
        buffer.store(g)
        fence_async_shared()
        tma.async_copy_shared_to_global(g_desc, [row, column + at], buffer)
    if PARTS & 2:
        bits = words_of(g) if PARTS & 4 else words_by_sum(g)
        layout: gl.constexpr = bits.type.layout
        words = (column + at) // 32 + gl.arange(0, C // 32, layout=gl.SliceLayout(0, layout))
        inside = num_columns - words * 32
        mask = gl.where(inside >= 32, -1, (1 << gl.minimum(gl.maximum(inside, 0), 31)) - 1)
        bits &= gl.expand_dims(mask, 0)
        rows = row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
        words, rows = gl.expand_dims(words, 0), gl.expand_dims(rows, 1)
        if BY_NEURON:
            gl.store(bits_ptr + words.to(gl.int64) * bits_stride + rows, bits)
        else:
            gl.store(bits_ptr + rows.to(gl.int64) * bits_stride + words, bits)


@gluon.jit
def finish(
    acc, buffers, FIRST: gl.constexpr, row, column, row_scale, row_bias, column_values,
    g_desc, bits_ptr, threshold, num_columns, bits_stride,
    BY_NEURON: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr, ELEMENT_BITS: gl.constexpr,
):
    """Epilogue of a tile in pieces of the width of g_desc's blocks, through BUFFERS in turn."""
    C: gl.constexpr = acc.shape[1]
    CHUNK: gl.constexpr = g_desc.block_shape[1]
    if CHUNK == C:
        finish_chunk(
            acc, 0, buffers.index(FIRST), row, column, row_scale, row_bias, column_values,
            g_desc, bits_ptr, threshold, num_columns, bits_stride, BY_NEURON, BUFFERS, PARTS,
        )
    elif CHUNK == C // 2:
        pieces = halves(acc, ELEMENT_BITS)
        for i in gl.static_range(2):
            finish_chunk(
                pieces[i], i * CHUNK, buffers.index(FIRST + i % BUFFERS),
                row, column, row_scale, row_bias, column_values,
                g_desc, bits_ptr, threshold, num_columns, bits_stride, BY_NEURON, BUFFERS, PARTS,
            )
    else:
        gl.static_assert(CHUNK == C // 4)
        left, right = halves(acc, ELEMENT_BITS)
        pieces = halves(left, ELEMENT_BITS) + halves(right, ELEMENT_BITS)
        for i in gl.static_range(4):
            finish_chunk(
                pieces[i], i * CHUNK, buffers.index(FIRST + i % BUFFERS),
                row, column, row_scale, row_bias, column_values,
                g_desc, bits_ptr, threshold, num_columns, bits_stride, BY_NEURON, BUFFERS, PARTS,
            )


@gluon.jit
def row_values(pointer, row, num_rows, R: gl.constexpr, layout: gl.constexpr):
    """fp32 values of a tile's rows."""
    rows = row + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    return gl.load(pointer + rows, mask=rows < num_rows, other=0.0).to(gl.float32)


@gluon.jit
def fill(buffer, pointer, column, num_columns):
    """Copies values of a tile's columns to shared memory, in fp32."""
    if buffer is not None:
        C: gl.constexpr = buffer.shape[0]
        WARPS: gl.constexpr = gl.num_warps()
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        columns = column + gl.arange(0, C, layout=layout)
        values = gl.load(pointer + columns, mask=columns < num_columns, other=0.0)
        buffer.store(values.to(gl.float32))


@gluon.jit
def load_partition(
    a_desc, b_desc, a_buffers, b_buffers, full, empty,
    num_token_tiles, num_neuron_tiles, K, num_programs,
    GROUP: gl.constexpr, BY_NEURON: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):
    """Loads the operands of every step of every tile of this program."""
    R: gl.constexpr = a_desc.block_shape[0]
    BK: gl.constexpr = a_desc.block_shape[1]
    C: gl.constexpr = b_desc.block_shape[0]
    SIZE: gl.constexpr = (R * HALVES + C) * BK * a_desc.dtype.primitive_bitwidth // 8
    step = 0
    for number in range(gl.program_id(0), num_token_tiles * num_neuron_tiles, num_programs):
        row_tile, column_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP, BY_NEURON)
        row, column = row_tile * (R * HALVES), column_tile * C
        for k in range(0, K, BK):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, SIZE)
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    a_desc, [row + half * R, k], ready, a_buffers.index(stage * HALVES + half)
                )
            tma.async_copy_global_to_shared(b_desc, [column, k], ready, b_buffers.index(stage))
            step += 1


@gluon.jit
def multiply_partition(
    a_buffers, b_buffers, g_buffers, full, empty, order, column_scale, column_bias,
    g_desc, row_bias_ptr, column_bias_ptr, row_scale_ptr, column_scale_ptr, bits_ptr, threshold,
    num_token_tiles, num_neuron_tiles, num_rows, num_columns, num_steps, bits_stride, num_programs,
    GROUP: gl.constexpr, BY_NEURON: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    TURNS: gl.constexpr, PART: gl.constexpr, SKEW: gl.constexpr, BUFFERS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Products and epilogues of one group of warps.

    HALVES 2: of half PART of every tile. TURNS 2: of tiles PART, PART + 2, ... of this program;
    `order` hands over then. A group must not wait for buffers of its tile before the other group
    waited for all of the tile before: their phases have the same parity.
    SKEW > 0: half 1 starts a tile once half 0 is in step SKEW - 1 of it. This needs more steps in
    a tile than stages, else `order` could run two phases ahead; so shorter tiles go without.
    """
    R: gl.constexpr = a_buffers.shape[1]
    C: gl.constexpr = b_buffers.shape[1]
    BITS: gl.constexpr = a_buffers.dtype.primitive_bitwidth
    layout: gl.constexpr = accumulator_layout(C, BITS, gl.num_warps())
    FIRST: gl.constexpr = PART * BUFFERS
    HALF: gl.constexpr = PART if HALVES == 2 else 0
    START: gl.constexpr = PART if TURNS == 2 else 0
    skewed = num_steps > STAGES
    step = START * num_steps
    turn = 0
    for number in range(
        gl.program_id(0) + START * num_programs,
        num_token_tiles * num_neuron_tiles,
        num_programs * TURNS,
    ):
        row_tile, column_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP, BY_NEURON)
        row, column = (row_tile * HALVES + HALF) * R, column_tile * C
        if row_scale_ptr is not None:
            row_scale = row_values(row_scale_ptr, row, num_rows, R, layout)
        else:
            row_scale: gl.constexpr = None
        if row_bias_ptr is not None:
            row_bias = row_values(row_bias_ptr, row, num_rows, R, layout)
        else:
            row_bias: gl.constexpr = None
        fill(column_scale, column_scale_ptr, column, num_columns)
        fill(column_bias, column_bias_ptr, column, num_columns)
        if TURNS == 2:
            mbarrier.wait(order.index(PART), (turn & 1) ^ (1 - PART))
        if SKEW > 0 and PART == 1:
            mbarrier.wait(order.index(0), turn & 1, pred=skewed)
        acc = gl.zeros([R, C], gl.float32, layout)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            if SKEW > 0 and PART == 0:
                if skewed & (k == SKEW - 1):
                    mbarrier.arrive(order.index(0), count=1)
            a = a_buffers.index(stage * HALVES + HALF)
            b = b_buffers.index(stage).permute([1, 0])
            acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The product before this one is done, so its buffers are free.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if TURNS == 2:
            mbarrier.arrive(order.index(1 - PART), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        finish(
            acc, g_buffers, FIRST, row, column, row_scale, row_bias, (column_scale, column_bias),
            g_desc, bits_ptr, threshold, num_columns, bits_stride,
            BY_NEURON, BUFFERS, PARTS, BITS,
        )
        step += (TURNS - 1) * num_steps
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "bits_stride", "num_programs"])
def specialised_kernel(
    a_desc, b_desc, g_desc, row_bias_ptr, column_bias_ptr, row_scale_ptr, column_scale_ptr,
    bits_ptr, zero_ptr, threshold,
    M, N, K, bits_stride, num_programs,
    GROUP: gl.constexpr, BY_NEURON: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    TURNS: gl.constexpr, SKEW: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):
    """g of a queue of tiles, and its bits: coop, skewed and pingpong."""
    if zero_ptr is not None:
        if gl.program_id(0) == 0:
            gl.store(zero_ptr, 0)
    R: gl.constexpr = a_desc.block_shape[0]
    BK: gl.constexpr = a_desc.block_shape[1]
    C: gl.constexpr = b_desc.block_shape[0]
    GROUPS: gl.constexpr = HALVES * TURNS
    if BY_NEURON:
        num_token_tiles, num_neuron_tiles = gl.cdiv(M, C), gl.cdiv(N, R * HALVES)
        num_rows, num_columns = N, M
    else:
        num_token_tiles, num_neuron_tiles = gl.cdiv(M, R * HALVES), gl.cdiv(N, C)
        num_rows, num_columns = M, N
    a_buffers = gl.allocate_shared_memory(a_desc.dtype, [STAGES * HALVES, R, BK], a_desc.layout)
    b_buffers = gl.allocate_shared_memory(b_desc.dtype, [STAGES, C, BK], b_desc.layout)
    g_buffers = gl.allocate_shared_memory(
        g_desc.dtype, [GROUPS * BUFFERS, R, g_desc.block_shape[1]], g_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=HALVES)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()
    num_steps = gl.cdiv(K, BK)
    value_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    if column_scale_ptr is not None:
        scale0 = gl.allocate_shared_memory(gl.float32, [C], value_layout)
        scale1 = gl.allocate_shared_memory(gl.float32, [C], value_layout)
    else:
        scale0: gl.constexpr = None
        scale1: gl.constexpr = None
    if column_bias_ptr is not None:
        bias0 = gl.allocate_shared_memory(gl.float32, [C], value_layout)
        bias1 = gl.allocate_shared_memory(gl.float32, [C], value_layout)
    else:
        bias0: gl.constexpr = None
        bias1: gl.constexpr = None
    if GROUPS == 1:
        gl.warp_specialize(
            [
            (multiply_partition, (
                a_buffers, b_buffers, g_buffers, full, empty, order, scale0, bias0,
                g_desc, row_bias_ptr, column_bias_ptr, row_scale_ptr, column_scale_ptr, bits_ptr,
                threshold, num_token_tiles, num_neuron_tiles, num_rows, num_columns, num_steps,
                bits_stride, num_programs, GROUP, BY_NEURON, STAGES, HALVES, TURNS, 0, SKEW,
                BUFFERS, PARTS,
            )),
            (load_partition, (
                a_desc, b_desc, a_buffers, b_buffers, full, empty,
                num_token_tiles, num_neuron_tiles, K, num_programs,
                GROUP, BY_NEURON, STAGES, HALVES,
            )),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
            (multiply_partition, (
                a_buffers, b_buffers, g_buffers, full, empty, order, scale0, bias0,
                g_desc, row_bias_ptr, column_bias_ptr, row_scale_ptr, column_scale_ptr, bits_ptr,
                threshold, num_token_tiles, num_neuron_tiles, num_rows, num_columns, num_steps,
                bits_stride, num_programs, GROUP, BY_NEURON, STAGES, HALVES, TURNS, 0, SKEW,
                BUFFERS, PARTS,
            )),
            (multiply_partition, (
                a_buffers, b_buffers, g_buffers, full, empty, order, scale1, bias1,
                g_desc, row_bias_ptr, column_bias_ptr, row_scale_ptr, column_scale_ptr, bits_ptr,
                threshold, num_token_tiles, num_neuron_tiles, num_rows, num_columns, num_steps,
                bits_stride, num_programs, GROUP, BY_NEURON, STAGES, HALVES, TURNS, 1, SKEW,
                BUFFERS, PARTS,
            )),
            (load_partition, (
                a_desc, b_desc, a_buffers, b_buffers, full, empty,
                num_token_tiles, num_neuron_tiles, K, num_programs,
                GROUP, BY_NEURON, STAGES, HALVES,
            )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )


@gluon.jit
def load_until(
    end, a_desc, b_desc, a_buffers, b_buffers, full, number, k, step,
    num_token_tiles, num_neuron_tiles, num_steps, num_programs,
    GROUP: gl.constexpr, BY_NEURON: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the operands of this program's steps before `end`; returns the place of the next."""
    R: gl.constexpr = a_desc.block_shape[0]
    BK: gl.constexpr = a_desc.block_shape[1]
    C: gl.constexpr = b_desc.block_shape[0]
    SIZE: gl.constexpr = (R + C) * BK * a_desc.dtype.primitive_bitwidth // 8
    while (step < end) & (number < num_token_tiles * num_neuron_tiles):
        row_tile, column_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP, BY_NEURON)
        stage = step % STAGES
        ready = full.index(stage)
        mbarrier.expect(ready, SIZE)
        tma.async_copy_global_to_shared(
            a_desc, [row_tile * R, k * BK], ready, a_buffers.index(stage)
        )
        tma.async_copy_global_to_shared(
            b_desc, [column_tile * C, k * BK], ready, b_buffers.index(stage)
        )
        step += 1
        k += 1
        if k == num_steps:
            k = 0
            number += num_programs
    return number, k, step


@gluon.jit(do_not_specialize=["M", "N", "K", "bits_stride", "num_programs"])
def plain_kernel(
    a_desc, b_desc, g_desc, row_bias_ptr, column_bias_ptr, row_scale_ptr, column_scale_ptr,
    bits_ptr, zero_ptr, threshold,
    M, N, K, bits_stride, num_programs,
    GROUP: gl.constexpr, BY_NEURON: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The same by 8 warps without roles: loads run STAGES - 1 steps ahead, also into next tiles."""
    if zero_ptr is not None:
        if gl.program_id(0) == 0:
            gl.store(zero_ptr, 0)
    R: gl.constexpr = a_desc.block_shape[0]
    BK: gl.constexpr = a_desc.block_shape[1]
    C: gl.constexpr = b_desc.block_shape[0]
    BITS: gl.constexpr = a_desc.dtype.primitive_bitwidth
    SIZE: gl.constexpr = (R + C) * BK * BITS // 8
    layout: gl.constexpr = accumulator_layout(C, BITS, gl.num_warps())
    if BY_NEURON:
        num_token_tiles, num_neuron_tiles = gl.cdiv(M, C), gl.cdiv(N, R)
        num_rows, num_columns = N, M
    else:
        num_token_tiles, num_neuron_tiles = gl.cdiv(M, R), gl.cdiv(N, C)
        num_rows, num_columns = M, N
    a_buffers = gl.allocate_shared_memory(a_desc.dtype, [STAGES, R, BK], a_desc.layout)
    b_buffers = gl.allocate_shared_memory(b_desc.dtype, [STAGES, C, BK], b_desc.layout)
    g_buffers = gl.allocate_shared_memory(
        g_desc.dtype, [BUFFERS, R, g_desc.block_shape[1]], g_desc.layout
    )
    value_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    if column_scale_ptr is not None:
        column_scale = gl.allocate_shared_memory(gl.float32, [C], value_layout)
    else:
        column_scale: gl.constexpr = None
    if column_bias_ptr is not None:
        column_bias = gl.allocate_shared_memory(gl.float32, [C], value_layout)
    else:
        column_bias: gl.constexpr = None
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    num_tiles = num_token_tiles * num_neuron_tiles
    num_steps = gl.cdiv(K, BK)
    # The place of the next load: tile, step in it, step in all.
    load_number, load_k, load_step = gl.program_id(0), 0, 0
    load_number, load_k, load_step = load_until(
        STAGES, a_desc, b_desc, a_buffers, b_buffers, full, load_number, load_k, load_step,
        num_token_tiles, num_neuron_tiles, num_steps, num_programs, GROUP, BY_NEURON, STAGES,
    )
    step = 0
    for number in range(gl.program_id(0), num_tiles, num_programs):
        row_tile, column_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP, BY_NEURON)
        row, column = row_tile * R, column_tile * C
        if row_scale_ptr is not None:
            row_scale = row_values(row_scale_ptr, row, num_rows, R, layout)
        else:
            row_scale: gl.constexpr = None
        if row_bias_ptr is not None:
            row_bias = row_values(row_bias_ptr, row, num_rows, R, layout)
        else:
            row_bias: gl.constexpr = None
        fill(column_scale, column_scale_ptr, column, num_columns)
        fill(column_bias, column_bias_ptr, column, num_columns)
        acc = gl.zeros([R, C], gl.float32, layout)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            b = b_buffers.index(stage).permute([1, 0])
            acc = warpgroup_mma(a_buffers.index(stage), b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # Step `step - 1` is done, so its buffers take the operands of step `step - 1 + STAGES`.
            load_number, load_k, load_step = load_until(
                step + STAGES, a_desc, b_desc, a_buffers, b_buffers, full,
                load_number, load_k, load_step, num_token_tiles, num_neuron_tiles, num_steps,
                num_programs, GROUP, BY_NEURON, STAGES,
            )
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        load_number, load_k, load_step = load_until(
            step + STAGES, a_desc, b_desc, a_buffers, b_buffers, full,
            load_number, load_k, load_step, num_token_tiles, num_neuron_tiles, num_steps,
            num_programs, GROUP, BY_NEURON, STAGES,
        )
        finish(
            acc, g_buffers, 0, row, column, row_scale, row_bias, (column_scale, column_bias),
            g_desc, bits_ptr, threshold, num_columns, bits_stride, BY_NEURON, BUFFERS, PARTS, BITS,
        )
    tma.store_wait(0)


def descriptor(tensor, block):
    dtype = {1: gl.float8e4nv, 2: gl.bfloat16}[tensor.itemsize]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(tensor, block, layout)


def launch(x, w, b, *, by_neuron, options, zero=None, scales=(None, None), threshold=0.0, run=None):
    """g and bits as twell.kernels.gate.gate_bits, by a variant's options.

    Options: kind, R, C (rows and columns of one group's tile), BK, STAGES, CHUNK, BUFFERS, GROUP,
    SKEW, PARTS.
    """
    (num_tokens, hidden_size), intermediate_size = x.shape, w.shape[0]
    o = {"GROUP": 8, "SKEW": 0, "PARTS": 7, "LOADER": 24, "CONSUMER": 240, **options}
    if b is not None and not by_neuron and w.itemsize == 1 and o["BUFFERS"] > 1:
        o["BUFFERS"] = 1  # room for the biases and scales of columns
    kind = o["kind"]
    halves_, turns = (2 if kind == "skewed" else 1), (2 if kind == "pingpong" else 1)
    rows, columns = o["R"] * halves_, o["C"]
    token_tile = columns if by_neuron else rows
    neuron_tile = rows if by_neuron else columns
    tokens, width = round_up(num_tokens, max(token_tile, 128)), round_up(intermediate_size, 256)
    dtype = torch.bfloat16 if w.itemsize == 1 else x.dtype
    if by_neuron:
        g = x.new_empty(intermediate_size, tokens, dtype=dtype)
        bits = torch.empty(tokens // 32, width, dtype=torch.int32, device=x.device)
    else:
        g = x.new_empty(num_tokens, width, dtype=dtype)
        bits = torch.empty(tokens, width // 32, dtype=torch.int32, device=x.device)
    num_tiles = cdiv(num_tokens, token_tile) * cdiv(intermediate_size, neuron_tile)
    num_programs = min(num_processors(x.device), num_tiles)
    first, second = (w, x) if by_neuron else (x, w)
    biases = (b, None) if by_neuron else (None, b)
    scales = scales[::-1] if by_neuron else scales
    arguments = (
        descriptor(first, [o["R"], o["BK"]]),
        descriptor(second, [o["C"], o["BK"]]),
        descriptor(g, [o["R"], o["CHUNK"]]),
        *biases, *scales, bits, zero, threshold or None,
        num_tokens, intermediate_size, hidden_size, bits.shape[1], num_programs,
    )
    given = {
        "GROUP": o["GROUP"], "BY_NEURON": by_neuron, "STAGES": o["STAGES"],
        "BUFFERS": o["BUFFERS"], "PARTS": o["PARTS"], "enable_fp_fusion": True,
    }
    kernel = plain_kernel
    if kind == "plain":
        given |= {"num_warps": 8}
    else:
        kernel = specialised_kernel
        given |= {
            "HALVES": halves_, "TURNS": turns, "SKEW": o["SKEW"],
            "CONSUMER_REGISTERS": o["CONSUMER"], "LOADER_REGISTERS": o["LOADER"],
            "num_warps": 8 if kind == "coop" else 4,
        }
    compiled = (run or call)(kernel, (num_programs,), arguments, given)
    return g, bits, compiled


def call(kernel, grid, arguments, given):
    return kernel[grid](*arguments, **given)
