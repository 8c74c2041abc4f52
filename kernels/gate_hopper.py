"""The gate by neurons on Hopper (sm_90), in Gluon: the bits of `gate_bits_kernel`, sooner.

A product keeps the tensor cores busy; storing its tile does not. So two groups of four warps take
whole tiles in turns: one stores g and bits while the other multiplies. A ninth warp loads.

    loader        load 0 | load 1 | load 2 | load 3 | ...
    consumer 0      multiply 0      | store 0     multiply 2      | store 2
    consumer 1                        multiply 1      | store 1     multiply 3

A ring of STAGES buffers holds the operands. Each role counts the steps of all tiles of its program:
step i uses buffer i % STAGES, for the time i // STAGES. Three kinds of barriers guard the ring. A
barrier goes through phases; phase t of these completes:

    full[s]     when the operands of time t lie in buffer s: its consumer waits for that
    empty[s]    when the product of time t has read buffer s: the loader fills it for t + 1 then
    order[c]    when the other consumer has issued the products of a tile: consumer c may begin

A wait names the parity of a phase, and returns at once if the last phase that completed has it. It
cannot tell phase t from phase t - 2. With `order`, a consumer waits for `full` only after the other
one did so for all steps before. Then phase t - 1 is complete, so there is no confusion. Without
`order`, it would multiply operands of an older step.

Shapes as in gate.py, whose `gate_bits` launches this kernel. tests/kernels/test_gate_hopper.py runs
the roles against a model of the barriers. Times: docs/kernel-log.md. Ours, not the paper's.
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


@gluon.constexpr_function
def word_layout():
    """These registers of a half tile [128, 64] seen as [128, 2 words, 4 threads, 8 entries]."""
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 1],
            [0, 0, 0, 2],
            [0, 0, 0, 4],
            [8, 0, 0, 0],
            [0, 1, 0, 0],
            [64, 0, 0, 0],
        ],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[128, 2, 4, 8],
    )


@gluon.jit
def tile_of(number, num_token_tiles, num_neuron_tiles, GROUP: gl.constexpr):
    """Token and neuron tile by its number, as gate.tile_of."""
    per_group = GROUP * num_neuron_tiles
    first = number // per_group * GROUP
    height = gl.minimum(num_token_tiles - first, GROUP)
    return first + number % per_group % height, number % per_group // height


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
def first_of_two(value):
    """[..., 2 n] to [..., n]: the even entries."""
    even, odd = gl.split(value)
    return even


@gluon.jit
def words_of(g):
    """Bits of a half tile g [128, 64] != 0, packed along the tokens: [128, 2] int32."""
    values = gl.permute(gl.reshape(g, [128, 2, 4, 4, 2]), [0, 1, 3, 2, 4])
    values = gl.reshape(values, [128, 2, 4, 8])
    values = gl.convert_layout(values, word_layout(), assert_trivial=True)
    eight = gl.inline_asm_elementwise(
        EIGHT_BITS,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [values.to(gl.int16, bitcast=True)],
        dtype=gl.int32,
        is_pure=True,
        pack=8,
    )
    eight = gl.reshape(eight, [128, 2, 4, 2, 2, 2])
    eight = first_of_two(first_of_two(first_of_two(eight)))
    place_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, eight.type.layout))
    place = gl.arange(0, 4, layout=place_layout) * 2
    place = gl.expand_dims(gl.expand_dims(place, 0), 1)
    return gl.reduce_or(eight << place, 2)


@gluon.jit
def store_words(bits, neuron, token, M, bits_ptr, bits_stride):
    """Stores words of a half tile, without bits of tokens beyond M: relu(bias) is not active."""
    layout: gl.constexpr = bits.type.layout
    words = token // 32 + gl.arange(0, bits.shape[1], layout=gl.SliceLayout(0, layout))
    inside = M - words * 32
    mask = gl.where(inside >= 32, -1, (1 << gl.minimum(gl.maximum(inside, 0), 31)) - 1)
    bits &= gl.expand_dims(mask, 0)
    neurons = neuron + gl.arange(0, bits.shape[0], layout=gl.SliceLayout(1, layout))
    words, neurons = gl.expand_dims(words, 0), gl.expand_dims(neurons, 1)
    gl.store(bits_ptr + words.to(gl.int64) * bits_stride + neurons, bits)


@gluon.jit
def of_neurons(pointer, neuron, N, BN: gl.constexpr, layout: gl.constexpr):
    """fp32 values of a tile's neurons."""
    neurons = neuron + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    return gl.load(pointer + neurons, mask=neurons < N, other=0.0).to(gl.float32)


@gluon.jit
def column(values, layout: gl.constexpr):
    """Values of neurons in the layout of a half tile, as a column."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    return gl.expand_dims(gl.convert_layout(values, rows, assert_trivial=True), 1)


@gluon.jit
def fetch_scales(buffer, pointer, token, M):
    """Copies the scales of a tile's tokens to shared memory: registers have no room for them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tokens = token + gl.arange(0, buffer.shape[0], layout=layout)
    values = gl.load(pointer + tokens, mask=tokens < M, other=0.0)
    buffer.store(values.to(gl.float32))


@gluon.jit
def store_tile(acc, BITS: gl.constexpr, g_buffer, neuron, token, M, factors, threshold, outputs):
    """The epilogue, by halves: shared memory has room for half a tile of g."""
    bias, w_scale, x_scales = factors
    g_desc, bits_ptr, bits_stride = outputs
    BN: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = product_layout(HALF, BITS)
    halves = gl.split(gl.permute(gl.reshape(acc, [BN, 2, HALF]), [0, 2, 1]))
    for i in gl.static_range(2):
        half = gl.convert_layout(halves[i], layout, assert_trivial=True)
        if x_scales is not None:
            x_scale = x_scales.slice(i * HALF, HALF).load(gl.SliceLayout(0, layout))
            half *= column(w_scale, layout) * gl.expand_dims(x_scale, 0)
        if bias is not None:
            half += column(bias, layout)
        g = gate_value(half, threshold, g_desc.dtype)
        tma.store_wait(0)  # the half before has left the buffer
        g_buffer.store(g)
        fence_async_shared()
        tma.async_copy_shared_to_global(g_desc, [neuron, token + i * HALF], g_buffer)
        store_words(words_of(g), neuron, token + i * HALF, M, bits_ptr, bits_stride)


@gluon.jit
def loader(w_desc, x_desc, ring, tiles, K, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """One warp: loads the operands of every step of every tile of this program."""
    w_buffers, x_buffers, full, empty = ring
    num_token_tiles, num_neuron_tiles, num_programs = tiles
    BN: gl.constexpr = w_desc.block_shape[0]
    BK: gl.constexpr = w_desc.block_shape[1]
    BM: gl.constexpr = x_desc.block_shape[0]
    BYTES: gl.constexpr = (BN + BM) * BK * w_desc.dtype.primitive_bitwidth // 8
    step = 0
    for number in range(gl.program_id(0), num_token_tiles * num_neuron_tiles, num_programs):
        token_tile, neuron_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP)
        neuron, token = neuron_tile * BN, token_tile * BM
        for k in range(0, K, BK):
            stage = step % STAGES
            # For time 0 it returns at once: it names the phase before the first.
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(w_desc, [neuron, k], ready, w_buffers.index(stage))
            tma.async_copy_global_to_shared(x_desc, [token, k], ready, x_buffers.index(stage))
            step += 1


@gluon.jit
def consumer(
    work, g_buffer, x_scales, GROUP: gl.constexpr, STAGES: gl.constexpr, TURN: gl.constexpr
):
    """Four warps: products and epilogues of this program's tiles TURN, TURN + 2, ..."""
    ring, order, tiles, inputs, outputs, M, N, num_steps = work
    w_buffers, x_buffers, full, empty = ring
    num_token_tiles, num_neuron_tiles, num_programs = tiles
    b_ptr, w_scale_ptr, x_scale_ptr, threshold = inputs
    BN: gl.constexpr = w_buffers.shape[1]
    BM: gl.constexpr = x_buffers.shape[1]
    BITS: gl.constexpr = w_buffers.dtype.primitive_bitwidth
    layout: gl.constexpr = product_layout(BM, BITS)
    step = TURN * num_steps
    turn = 0
    for number in range(
        gl.program_id(0) + TURN * num_programs, num_token_tiles * num_neuron_tiles, num_programs * 2
    ):
        token_tile, neuron_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP)
        neuron, token = neuron_tile * BN, token_tile * BM
        if x_scales is not None:
            w_scale = of_neurons(w_scale_ptr, neuron, N, BN, layout)
        else:
            w_scale: gl.constexpr = None
        if b_ptr is not None:
            bias = of_neurons(b_ptr, neuron, N, BN, layout)
        else:
            bias: gl.constexpr = None
        if x_scales is not None:
            fetch_scales(x_scales, x_scale_ptr, token, M)
        # Consumer 0 begins: its first wait names the phase before the first.
        mbarrier.wait(order.index(TURN), (turn & 1) ^ (1 - TURN))
        acc = gl.zeros([BN, BM], gl.float32, layout)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            x = x_buffers.index(stage).permute([1, 0])
            acc = warpgroup_mma(w_buffers.index(stage), x, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The product before this one is done, so its buffers are free.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        mbarrier.arrive(order.index(1 - TURN), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        factors = bias, w_scale, x_scales
        store_tile(acc, BITS, g_buffer, neuron, token, M, factors, threshold, outputs)
        step += num_steps  # of the other consumer's tile
        turn += 1
    tma.store_wait(0)


@direct
@gluon.jit(do_not_specialize=["M", "N", "K", "bits_stride", "num_programs"])
def gate_hopper_kernel(
    x_desc, w_desc, b_ptr, x_scale_ptr, w_scale_ptr, g_desc, bits_ptr, zero_ptr, threshold,
    M, N, K, bits_stride, num_programs,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """g of a queue of tiles, and its bits; see gate.gate_bits. Stores 0 at zero_ptr."""
    gl.static_assert(BM == 128 and BN == 128)
    if zero_ptr is not None:
        if gl.program_id(0) == 0:
            gl.store(zero_ptr, 0)
    tiles = gl.cdiv(M, BM), gl.cdiv(N, BN), num_programs
    w_buffers = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    x_buffers = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    g_buffers = gl.allocate_shared_memory(g_desc.dtype, [2, BN, BM // 2], g_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()
    num_steps = gl.cdiv(K, BK)
    if x_scale_ptr is not None:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        x_scales0 = gl.allocate_shared_memory(gl.float32, [BM], layout)
        x_scales1 = gl.allocate_shared_memory(gl.float32, [BM], layout)
    else:
        x_scales0: gl.constexpr = None
        x_scales1: gl.constexpr = None
    ring = w_buffers, x_buffers, full, empty
    inputs = b_ptr, w_scale_ptr, x_scale_ptr, threshold
    outputs = g_desc, bits_ptr, bits_stride
    work = ring, order, tiles, inputs, outputs, M, N, num_steps
    gl.warp_specialize(
        [
            (consumer, (work, g_buffers.index(0), x_scales0, GROUP, STAGES, 0)),
            (consumer, (work, g_buffers.index(1), x_scales1, GROUP, STAGES, 1)),
            (loader, (w_desc, x_desc, ring, tiles, K, GROUP, STAGES)),
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
