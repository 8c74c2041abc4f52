"""The gate on Hopper (sm_90), in Gluon: the bits of `gate_bits_kernel`, sooner.

A product keeps the tensor cores busy; storing its tile does not. So a tile is stored while the
first steps of the next one run. One warp loads; two groups of four warps multiply, each half of the
rows of a tile. Rows are neurons and columns tokens, or by tokens the other way round:

    loader          load 0 | load 1 | load 2 | load 3 | ...
    consumers       multiply 0 | multiply 1, store 0 | multiply 2, store 1 | ...

A ring of STAGES buffers holds the operands. Step i of a program uses buffer i % STAGES, for the
time i // STAGES. Two kinds of barriers guard the ring, and go through phases. Phase t completes:

    full[s]     when the operands of time t lie in buffer s: the consumers wait for that
    empty[s]    when both consumers have read buffer s at time t: the loader fills it for t + 1 then

A wait names the parity of a phase, and returns at once if the last phase that completed has it.

Shapes as in gate.py, whose `gate_bits` launches this kernel. Times: docs/kernel-log.md. Ours, not
the paper's.
"""

from __future__ import annotations

import torch
from torch import Tensor
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

from twell.kernels.common import tile_of
from twell.kernels.launch import descriptor, direct

# Registers a thread, of 65,536 in all: the accumulators need many, the loader hardly any.
CONSUMER_REGISTERS, LOADER_REGISTERS = gl.constexpr(240), gl.constexpr(24)

# Two numbers at once: relu (NaN stays NaN, -0 becomes 0), rounded to the storage type.
RELU_BF16 = gl.constexpr("cvt.rn.relu.bf16x2.f32 $0, $2, $1;")
RELU_FP16 = gl.constexpr("cvt.rn.relu.f16x2.f32 $0, $2, $1;")
# One bit each for eight 16-bit numbers, which are columns 0, 1, 8, 9, 16, 17, 24 and 25 of a word.
# min makes them 0 or 1, multiply-adds shift and join them. Without assembly, a similar kernel took
# 25% longer. $0 is the result; the other outputs only have to be written.
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
def product_layout(columns, element_bits):
    """Registers of a tile that the tensor cores compute, for a group of four warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // element_bits]
    )


# These registers of a panel [64, 64] seen as [64, 2 words, 4 threads, 8 entries].
WORD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [8, 0, 0, 0], [0, 1, 0, 0]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 2, 4, 8],
    )
)
# One word of each row: [64, 4, 8]; and a number for each row.
ENTRY_LAYOUT = gl.constexpr(gl.SliceLayout(1, WORD_LAYOUT.value))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, ENTRY_LAYOUT.value)))


@gluon.jit
def gate_value(value, threshold, dtype: gl.constexpr):
    """As common.gate_value, but never -0."""
    if threshold is not None:
        value = value.to(dtype).to(gl.float32)
        return gl.where(value <= threshold, 0.0, value).to(dtype)
    else:
        gl.static_assert(dtype == gl.bfloat16 or dtype == gl.float16)
        asm: gl.constexpr = RELU_BF16 if dtype == gl.bfloat16 else RELU_FP16
        bits = gl.inline_asm_elementwise(
            asm, "=r,r,r", [value], dtype=gl.int16, is_pure=True, pack=2
        )
        return bits.to(dtype, bitcast=True)


@gluon.jit
def entries_of(g):
    """The bits of a panel g [64, 64] as int16 [64, 2 words, 4 threads, 8 entries]."""
    values = gl.permute(gl.reshape(g, [64, 2, 4, 4, 2]), [0, 1, 3, 2, 4])
    values = gl.reshape(values, [64, 2, 4, 8])
    values = gl.convert_layout(values, WORD_LAYOUT, assert_trivial=True)
    return values.to(gl.int16, bitcast=True)


@gluon.jit
def words_of(entries):
    """Which entries of a panel are not 0, a bit each: [64, 2] int32."""
    eight = gl.inline_asm_elementwise(
        EIGHT_BITS,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [entries],
        dtype=gl.int32,
        is_pure=True,
        pack=8,
    )
    eight = gl.reshape(eight, [64, 2, 4, 2, 2, 2])
    for _ in gl.static_range(3):
        eight = gl.split(eight)[0]
    place_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, eight.type.layout))
    place = gl.arange(0, 4, layout=place_layout) * 2
    place = gl.expand_dims(gl.expand_dims(place, 0), 1)
    return gl.reduce_or(eight << place, 2)


@gluon.jit
def first_bits(number):
    """Ones in so many places of a word."""
    return gl.where(number >= 32, -1, (1 << gl.minimum(gl.maximum(number, 0), 31)) - 1)


@gluon.jit
def store_words(bits, row, column, limit, bits_ptr, bits_stride, BY_NEURON: gl.constexpr):
    """Stores words of a panel; bits of columns from `limit` on are 0: relu(bias) is not active."""
    layout: gl.constexpr = bits.type.layout
    words = column // 32 + gl.arange(0, bits.shape[1], layout=gl.SliceLayout(0, layout))
    bits &= gl.expand_dims(first_bits(limit - words * 32), 0)
    rows = row + gl.arange(0, bits.shape[0], layout=gl.SliceLayout(1, layout))
    words, rows = gl.expand_dims(words, 0), gl.expand_dims(rows, 1)
    if BY_NEURON:
        gl.store(bits_ptr + words.to(gl.int64) * bits_stride + rows, bits)
    else:
        gl.store(bits_ptr + rows.to(gl.int64) * bits_stride + words, bits)


@gluon.jit
def of_neurons(pointer, neuron, N, BN: gl.constexpr, layout: gl.constexpr):
    """fp32 values of a tile's neurons."""
    neurons = neuron + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    return gl.load(pointer + neurons, mask=neurons < N, other=0.0).to(gl.float32)


@gluon.jit
def fetch_scales(buffer, pointer, token, M):
    """Copies the scales of a tile's tokens to shared memory: registers have no room for them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tokens = token + gl.arange(0, buffer.shape[0], layout=layout)
    values = gl.load(pointer + tokens, mask=tokens < M, other=0.0)
    buffer.store(values.to(gl.float32))


@gluon.jit
def halves(values, layout: gl.constexpr):
    """[R, 2 C] as two [R, C] in this layout."""
    rows: gl.constexpr = values.shape[0]
    columns: gl.constexpr = values.shape[1] // 2
    first, second = gl.split(gl.permute(gl.reshape(values, [rows, 2, columns]), [0, 2, 1]))
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def panels_of(g, BITS: gl.constexpr):
    """g [64, 256] as four panels [64, 64]."""
    left, right = halves(g, product_layout(128, BITS))
    first, second = halves(left, product_layout(64, BITS))
    third, fourth = halves(right, product_layout(64, BITS))
    return first, second, third, fourth


@gluon.jit
def store_panel(g, i, row, column, limit, outputs, BY_NEURON: gl.constexpr):
    """Stores g [64, 64], through buffer i, and its bits."""
    g_desc, bits_ptr, bits_stride, buffers = outputs
    buffer = buffers.index(i)
    tma.store_wait(1)  # the panel before the last has left this buffer
    buffer.store(g)
    fence_async_shared()
    if BY_NEURON:  # bits_stride is the number of rows of a panel, too
        tma.async_copy_shared_to_global(g_desc, [column // 64 * bits_stride + row, 0], buffer)
    else:
        tma.async_copy_shared_to_global(g_desc, [row, column], buffer)
    store_words(words_of(entries_of(g)), row, column, limit, bits_ptr, bits_stride, BY_NEURON)


@gluon.jit
def earlier_bits(word, above):
    """The number of bits of a word below place 32 - above; a shift by 32 gives 0 in PTX alone."""
    code: gl.constexpr = "{ .reg .b32 t; shl.b32 t, $1, $2; popc.b32 $0, t; }"
    return gl.inline_asm_elementwise(
        code, "=r,r,r", [word, above], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def high_halves(entries):
    """int16 as the high halves of int32, from registers that hold two."""
    code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
    return gl.inline_asm_elementwise(
        code, "=r,=r,r", [entries], dtype=gl.int32, is_pure=True, pack=2
    )


@gluon.jit
def by_entry(rows):
    """[64] for each entry of a word: [64, 1, 1]."""
    return gl.expand_dims(gl.expand_dims(rows, 1), 2)


@gluon.jit
def store_twell(g, count, row, column, limits, outputs, S: gl.constexpr):
    """Stores the words of g [64, 64] behind the `count` [64] before; returns the count with them.

    The tile's last panel stores its count. See paper/gate.py.
    """
    rest, words_ptr, num_tiles = outputs
    M, N = limits
    entries = entries_of(g)
    bits = gl.split(words_of(entries))
    entries = gl.split(gl.permute(entries, [0, 2, 3, 1]))
    thread = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, ENTRY_LAYOUT)))
    entry = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, ENTRY_LAYOUT)))
    place = 2 * gl.expand_dims(gl.expand_dims(thread, 0), 2)
    place += gl.expand_dims(gl.expand_dims(8 * (entry // 2) + entry % 2, 0), 1)
    rows = row + gl.arange(0, 64, layout=ROW_LAYOUT)
    tile = rows * num_tiles + column // 256
    for i in gl.static_range(2):
        # Beyond the last neuron and token 0 times an infinity is NaN, which is not active.
        word = gl.convert_layout(bits[i], ROW_LAYOUT, assert_trivial=True)
        word = gl.where(rows < M, word & first_bits(N - column - 32 * i), 0)
        slot = 1 + by_entry(count) + earlier_bits(by_entry(word), 32 - place)
        neuron = column + 32 * i + place
        high = high_halves(gl.convert_layout(entries[i], ENTRY_LAYOUT, assert_trivial=True))
        active = (by_entry(word) << (31 - place)) < 0
        if rest == 0:
            active &= slot < S
        first = gl.where(slot < S, by_entry(tile * S), by_entry(tile * 256 - S + rest))
        gl.store(words_ptr + (first + slot), high | neuron, mask=active)
        count += earlier_bits(word, 0)
    gl.store(words_ptr + tile * S, count, mask=(rows < M) & (column % 256 == 192))
    return count


@gluon.jit
def store_part(
    g, count, i, place, limits, outputs, BY_NEURON: gl.constexpr, S: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """Stores panel i of a tile. limits: M and N."""
    if S > 0:
        count = store_twell(g, count, *place, limits, outputs, S)
    else:
        limit = limits[0] if BY_NEURON else limits[1]
        store_panel(g, 2 * HALF + i % 2, *place, limit, outputs, BY_NEURON)
    return count


@gluon.jit
def place_of(number, tiles, GROUP: gl.constexpr, BY_NEURON: gl.constexpr):
    """First row and column of a tile [128, 256] by its number."""
    num_token_tiles, num_neuron_tiles, _ = tiles
    token_tile, neuron_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP)
    if BY_NEURON:
        return neuron_tile * 128, token_tile * 256
    else:
        return token_tile * 128, neuron_tile * 256


@gluon.jit
def loader(
    descs, ring, tiles, K, GROUP: gl.constexpr, STAGES: gl.constexpr, BY_NEURON: gl.constexpr
):
    """One warp: loads the operands of every step of every tile of this program."""
    row_desc, column_desc = descs
    row_buffers, column_buffers, full, empty = ring
    BK: gl.constexpr = row_desc.block_shape[1]
    BYTES: gl.constexpr = (128 + 256) * BK * row_desc.dtype.primitive_bitwidth // 8
    step = 0
    for number in range(gl.program_id(0), tiles[0] * tiles[1], tiles[2]):
        row, column = place_of(number, tiles, GROUP, BY_NEURON)
        for k in range(0, K, BK):
            stage = step % STAGES
            # For time 0 it returns at once: it names the phase before the first.
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(row_desc, [row, k], ready, row_buffers.index(stage))
            tma.async_copy_global_to_shared(
                column_desc, [column, k], ready, column_buffers.index(stage)
            )
            step += 1


@gluon.jit
def multiply(acc, ring, step, first, HALF: gl.constexpr, STAGES: gl.constexpr):
    """Issues a step of the product, without waiting for it; `first`: not added to acc."""
    row_buffers, column_buffers, full, empty = ring
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    rows = row_buffers.index(stage).slice(HALF * 64, 64)
    columns = column_buffers.index(stage).permute([1, 0])
    return warpgroup_mma(rows, columns, acc, use_acc=first == 0, is_async=True)


@gluon.jit
def release(acc, ring, step, first, STAGES: gl.constexpr):
    """Waits for the step before this one, and gives its buffer back."""
    empty = ring[3]
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=first == 0)
    return acc


@gluon.jit
def consumer(
    work, GROUP: gl.constexpr, STAGES: gl.constexpr, BY_NEURON: gl.constexpr, S: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of all tiles of this program."""
    ring, tiles, inputs, outputs, M, N, num_steps = work
    b_ptr, w_scale_ptr, x_scale_ptr, x_scales, threshold = inputs
    BITS: gl.constexpr = ring[0].dtype.primitive_bitwidth
    dtype: gl.constexpr = ring[0].dtype if S > 0 else outputs[0].dtype
    layout: gl.constexpr = product_layout(256, BITS)
    acc = gl.zeros([64, 256], gl.float32, layout)
    before = panels_of(acc.to(dtype), BITS)  # of the tile before, not yet stored
    row_before, column_before, step = 0, 0, 0
    for number in range(gl.program_id(0), tiles[0] * tiles[1], tiles[2]):
        row, column = place_of(number, tiles, GROUP, BY_NEURON)
        row += HALF * 64
        if x_scales is not None:
            w_scale = of_neurons(w_scale_ptr, row, N, 64, layout)
            fetch_scales(x_scales.index(HALF), x_scale_ptr, column, M)
        if b_ptr is not None:
            bias = of_neurons(b_ptr, row, N, 64, layout)
        count = gl.zeros([64], gl.int32, ROW_LAYOUT)
        for i in gl.static_range(4):
            acc = multiply(acc, ring, step, i == 0, HALF, STAGES)
            if step >= num_steps:
                place = row_before, column_before + i * 64
                count = store_part(before[i], count, i, place, (M, N), outputs, BY_NEURON, S, HALF)
            acc = release(acc, ring, step, i == 0, STAGES)
            step += 1
        for _ in range(4, num_steps):
            acc = multiply(acc, ring, step, 0, HALF, STAGES)
            acc = release(acc, ring, step, 0, STAGES)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring[3].index((step + STAGES - 1) % STAGES), count=1)
        result = acc
        if x_scales is not None:
            x_scale = x_scales.index(HALF).load(gl.SliceLayout(0, layout))
            result *= gl.expand_dims(w_scale, 1) * gl.expand_dims(x_scale, 0)
        if b_ptr is not None:
            result += gl.expand_dims(bias, 1)
        before = panels_of(gate_value(result, threshold, dtype), BITS)
        row_before, column_before = row, column
    count = gl.zeros([64], gl.int32, ROW_LAYOUT)
    for i in gl.static_range(4):
        place = row_before, column_before + i * 64
        count = store_part(before[i], count, i, place, (M, N), outputs, BY_NEURON, S, HALF)
    if S == 0:
        tma.store_wait(0)


@direct
@gluon.jit(do_not_specialize=["M", "N", "K", "bits_stride", "num_programs"])
def gate_hopper_kernel(
    x_desc, w_desc, b_ptr, x_scale_ptr, w_scale_ptr, g_desc, bits_ptr, zero_ptr, threshold,
    M, N, K, bits_stride, num_programs,
    GROUP: gl.constexpr, BY_NEURON: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """g of a queue of tiles, and its bits; see gate.gate_bits. Stores 0 at zero_ptr.

    A tile has 128 rows and 256 columns. K is at least 4 BK, and there is a tile for each program.
    By tokens there is no bias, and no scale. With S slots a tile the words of paper/gate.py go to
    bits_ptr, bits_stride counts the tiles of a token, and g_desc is the place of `rest` or 0.
    """
    gl.static_assert(BM == (256 if BY_NEURON else 128) and BM + BN == 384)
    gl.static_assert(BY_NEURON or (b_ptr is None and x_scale_ptr is None))
    if zero_ptr is not None:
        if gl.program_id(0) == 0:
            gl.store(zero_ptr, 0)
    row_desc, column_desc = (w_desc, x_desc) if BY_NEURON else (x_desc, w_desc)
    dtype: gl.constexpr = x_desc.dtype
    row_buffers = gl.allocate_shared_memory(dtype, [STAGES, 128, BK], row_desc.layout)
    column_buffers = gl.allocate_shared_memory(dtype, [STAGES, 256, BK], column_desc.layout)
    if S > 0:
        outputs = g_desc, bits_ptr, bits_stride
    else:
        g_buffers = gl.allocate_shared_memory(g_desc.dtype, [4, 64, 64], g_desc.layout)
        outputs = g_desc, bits_ptr, bits_stride, g_buffers
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    if x_scale_ptr is not None:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        x_scales = gl.allocate_shared_memory(gl.float32, [2, BM], layout)
    else:
        x_scales: gl.constexpr = None
    ring = row_buffers, column_buffers, full, empty
    tiles = gl.cdiv(M, BM), gl.cdiv(N, BN), num_programs
    inputs = b_ptr, w_scale_ptr, x_scale_ptr, x_scales, threshold
    work = ring, tiles, inputs, outputs, M, N, gl.cdiv(K, BK)
    descs = row_desc, column_desc
    gl.warp_specialize(
        [
            (consumer, (work, GROUP, STAGES, BY_NEURON, S, 0)),
            (consumer, (work, GROUP, STAGES, BY_NEURON, S, 1)),
            (loader, (descs, ring, tiles, K, GROUP, STAGES, BY_NEURON)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )


def _shared(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    types = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    layout = gl.NVMMASharedLayout.get_default_for(block, types.get(matrix.dtype, gl.float8e4nv))
    return TensorDescriptor.from_tensor(matrix, block, layout)


def blocks(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """Blocks of a matrix, in shared memory as the tensor cores read them."""
    return descriptor(matrix, block, _shared)
