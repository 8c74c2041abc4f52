"""Inference with 1 to 64 tokens, where reading the weights takes the time: each row once or never.

Two launches, and no message to the host, so a CUDA graph can hold them:

  1. A program owns BN neurons. It reads their rows of w_gate once for all tokens, then the rows of
     w_up whose neuron is active for some token (a masked load causes no traffic). It stores
     h = u * g and one flag a neuron.
  2. A program owns BN outputs. It turns the flags into a list of active neurons, the same in every
     program, which is cheaper than a third launch. Then it sums their rows of w_down_t. There are
     no partial sums, so two calls give the same bits.

For 1 to 4 tokens the first launch uses no tensor cores, for 1 and 2 neither does the second: their
tiles of 16 tokens would be mostly padding. More than 64 tokens run as blocks of 64, each of which
reads the weights again.

    x, y   [M, K], in B = ceil(M / block_m) blocks of block_m = 16, 32 or 64 tokens
    h      [B * W, block_m], W = N rounded up to 64
    flags  [B, W] int8, 1 where any token of the block activates the neuron
    lists  [B * programs, W] int32, for one and two tokens [programs, W / 8]

    g = relu(x w_gate^T + b_gate)    h = (x w_up^T + b_up) * g    y = h w_down_t + b_down
    without w_gate: h = g = relu(x w_up^T + b_up)

An inf or NaN in w_down may reach the other tokens of a block, where h is 0: 0 * inf is NaN.
Reference: twell.sparse.reference.up_down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import (
    Layer,
    add_activity,
    cdiv,
    chunks,
    empty_output,
    gate_value,
    load,
    narrow,
    next_power_of_2,
    of_gate,
    of_up,
    round_up,
    scaled,
    wide,
)
from twell.kernels.options import FEW_DOWN_TOKENS, FEW_UP_TOKENS, decode_few_up, launch_options

MAX_TOKENS = 64
# For h and the lists of a chunk of tokens, at least 64.
WORKSPACE_BYTES = 2**28
MAX_BLOCKS = 65_535  # of a chunk: the limit of a grid's second axis


@triton.jit(do_not_specialize=["N"])
def decode_few_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    b_ptr,
    s_ptr,
    wu_ptr,
    bu_ptr,
    su_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    threshold,
    N,
    K,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """As decode_up_kernel for one to four tokens, with whole weight rows in registers.

    TOKENS is M rounded up to a power of two.
    """
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = neurons.to(tl.int64)[:, None] * K + k[None, :]
    w = load(w_ptr + place, (neurons < N)[:, None] & (k < K)[None, :], EVEN).to(tl.float32)
    # g and u stay in registers: [BN, TOKENS], one column a token, filled one after the other.
    tokens = tl.arange(0, TOKENS)
    g = tl.zeros((BN, TOKENS), tl.float32)
    for token in tl.static_range(M):
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        g += tl.where((tokens == token)[None, :], tl.sum(w * x[None, :], 1)[:, None], 0.0)
    g = scaled(g, x_scale_ptr, s_ptr, tokens, neurons, M, N, True)
    if b_ptr is not None:
        g += tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
    h = gate_value(g, threshold, h_ptr.dtype.element_ty).to(tl.float32)
    active = (h != 0) & (neurons < N)[:, None] & (tokens < M)[None, :]
    flags = tl.max(active.to(tl.int32), 1)
    tl.store(flags_ptr + neurons, flags.to(tl.int8))
    if activity_ptr is not None:
        entries = tl.sum(active.to(tl.int32))
        add_activity(activity_ptr, tl.program_id(0) == 0, M, entries, tl.sum(flags, 0))
    h = of_gate(h, h_ptr.dtype.element_ty, ACT)
    if GATED:
        if tl.max(flags, 0) != 0:
            mask = (flags != 0)[:, None] & (k < K)[None, :]
            wu = tl.load(wu_ptr + place, mask=mask, other=0.0).to(tl.float32)
            u = tl.zeros((BN, TOKENS), tl.float32)
            for token in tl.static_range(M):
                row = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
                dots = tl.sum(wu * row[None, :], 1)
                u += tl.where((tokens == token)[None, :], dots[:, None], 0.0)
            u = scaled(u, x_scale_ptr, su_ptr, tokens, neurons, M, N, True)
            if bu_ptr is not None:
                u += tl.load(bu_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
            h *= of_up(u, ACT)
    h_ptrs = h_ptr + neurons[:, None] * BM + tokens[None, :]
    h = narrow(tl.where(active, h, 0.0), h_ptr.dtype.element_ty)
    tl.store(h_ptrs, h, mask=(tokens < M)[None, :])


@triton.jit(do_not_specialize=["M", "N"])
def decode_up_kernel(
    x_desc,
    x_scale_ptr,
    w_desc,
    b_ptr,
    s_ptr,
    wu_ptr,
    bu_ptr,
    su_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    threshold,
    M,
    N,
    K,
    width,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h and flags of BN neurons and one block of tokens."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    first_row = tl.program_id(1) * BM
    first_neuron = tl.program_id(0) * BN
    rows = first_row + tl.arange(0, BM)
    neurons = first_neuron + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        acc = tl.dot(
            wide(w_desc.load([first_neuron, start])), wide(x_desc.load([first_row, start])).T, acc
        )
    acc = scaled(acc, x_scale_ptr, s_ptr, rows, neurons, M, N, True)
    if b_ptr is not None:
        acc += tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
    h = gate_value(acc, threshold, dtype).to(tl.float32)
    # Rows beyond M may hold relu(bias), neurons beyond N the NaN of a row of x.
    active = (h != 0) & (rows < M)[None, :] & (neurons < N)[:, None]
    flags = tl.max(active.to(tl.int32), 1)
    place = tl.program_id(1).to(tl.int64) * width + neurons
    tl.store(flags_ptr + place, flags.to(tl.int8))
    if activity_ptr is not None:
        SIZE: tl.constexpr = BM if BM < 64 else 64
        in_unions = tl.max(tl.reshape(active.to(tl.int32), (BN, BM // SIZE, SIZE)), 2)
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        entries = tl.sum(active.to(tl.int32))
        add_activity(activity_ptr, first, M, entries, tl.sum(in_unions))
    h = of_gate(h, dtype, ACT)
    if GATED:
        k = tl.arange(0, BK)
        w_ptrs = wu_ptr + neurons.to(tl.int64)[:, None] * K + k[None, :]
        u = tl.zeros((BN, BM), tl.float32)
        # No step where no neuron is active. Not tl.max(flags, 0): Triton 3.7 cannot compile the
        # maximum of a maximum over an accumulator in the tensor memory of sm_100.
        for start in range(0, K * tl.max(active.to(tl.int32)), BK):
            mask = (flags != 0)[:, None] & (start + k < K)[None, :]
            w = tl.load(w_ptrs + start, mask=mask, other=0.0)
            u = tl.dot(wide(w), wide(x_desc.load([first_row, start])).T, u)
        u = scaled(u, x_scale_ptr, su_ptr, rows, neurons, M, N, True)
        if bu_ptr is not None:
            u += tl.load(bu_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
        h *= of_up(u, ACT)
    h = tl.where(active, h, 0.0)
    tl.store(h_ptr + place[:, None] * BM + tl.arange(0, BM)[None, :], narrow(h, dtype))


@triton.jit(do_not_specialize=["M"])
def decode_down_kernel(
    h_ptr,
    flags_ptr,
    wd_ptr,
    bd_ptr,
    lists_ptr,
    y_ptr,
    M,
    K,
    width,
    stride,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """y [BM tokens, BN outputs] of one program, which first lists the block's flagged neurons.

    It reads eight flags as one word of int64; `width` is a multiple of 8.
    """
    block = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, EIGHTS)
    flags = tl.load(flags_ptr + block * (width // 8) + place, mask=place < width // 8, other=0)
    count = ((flags * 0x0101010101010101) >> 56).to(tl.int32)
    slot = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    list_ptr = lists_ptr + (block * tl.num_programs(0) + tl.program_id(0)) * stride
    for i in tl.static_range(8):
        active = ((flags >> (8 * i)) & 1).to(tl.int32)
        tl.store(list_ptr + slot, place * 8 + i, mask=active != 0)
        slot += active
    tl.debug_barrier()
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, total, BK):
        slots = start + tl.arange(0, BK)
        # Padding repeats the last active neuron, with h = 0: an inactive one may have a NaN in
        # w_down.
        neurons = tl.load(list_ptr + tl.minimum(slots, total - 1))
        w_ptrs = wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
        w = load(w_ptrs, (columns < K)[None, :], EVEN)
        h_ptrs = h_ptr + (block * width + neurons)[:, None] * BM + tl.arange(0, BM)[None, :]
        h = wide(tl.load(h_ptrs))
        h = tl.where((slots < total)[:, None], h, 0.0)
        acc = tl.dot(h.T, wide(w), acc)
    if bd_ptr is not None:
        acc += tl.load(bd_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    rows = block * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + rows[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def decode_few_down_kernel(
    h_ptr,
    flags_ptr,
    wd_ptr,
    bd_ptr,
    lists_ptr,
    y_ptr,
    K,
    width,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """As decode_down_kernel for one or two tokens, without tensor cores; BK words of flags a step.

    A word of the list is 256 times its place plus its eight flags as bits. So one store makes an
    entry, where decode_down_kernel needs eight. Rows of inactive neurons are masked.
    """
    place = tl.arange(0, EIGHTS)
    flags = tl.load(flags_ptr + place, mask=place < width // 8, other=0)
    listed = (flags != 0).to(tl.int32)
    total = tl.sum(listed, 0)
    bits = ((flags * 0x0102040810204080) >> 56).to(tl.int32) & 255
    list_ptr = lists_ptr + tl.program_id(0).to(tl.int64) * (width // 8)
    tl.store(list_ptr + tl.cumsum(listed, 0) - listed, place * 256 + bits, mask=listed != 0)
    tl.debug_barrier()
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    eight = tl.arange(0, 8)
    tokens = tl.arange(0, M)
    acc = tl.zeros((M, BN), tl.float32)
    for start in range(0, total, BK):
        slots = start + tl.arange(0, BK)
        word = tl.load(list_ptr + slots, mask=slots < total, other=0)
        neurons = tl.reshape((word >> 8)[:, None] * 8 + eight[None, :], (BK * 8,))
        active = tl.reshape((word[:, None] >> eight[None, :]) & 1, (BK * 8,)) != 0
        mask = active[:, None] & (columns < K)[None, :]
        w_ptrs = wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
        w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
        for token in tl.static_range(M):
            h = tl.load(h_ptr + neurons * BM + token, mask=active, other=0.0).to(tl.float32)
            acc += tl.where((tokens == token)[:, None], tl.sum(w * h[:, None], 0)[None, :], 0.0)
    if bd_ptr is not None:
        acc += tl.load(bd_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + tokens[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=(columns < K)[None, :])


def _up(
    x: Tensor, x_scale: Tensor | None, layer: Layer, activity: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The first launch: h and flags of x [M, K]; flags as words of eight, [B, W / 8] int64."""
    (num_tokens, hidden_size), intermediate_size = x.shape, len(layer.w_up)
    w, b = layer.first
    block_m = min(max(next_power_of_2(num_tokens), 16), MAX_TOKENS)
    num_blocks, width = cdiv(num_tokens, block_m), round_up(intermediate_size, 64)
    h = empty_output(x[:0]).new_empty(num_blocks * width, block_m)
    flags = torch.empty(num_blocks, width // 8, dtype=torch.int64, device=x.device)
    up = layer.w_up, layer.b_up, layer.s_up
    results = h, flags.view(torch.int8), activity
    rest = b, layer.first_scale, *up, *results, layer.act.threshold or None
    given = dict(GATED=layer.gated, ACT=layer.act.name, BM=block_m)
    if num_tokens <= FEW_UP_TOKENS:
        options = decode_few_up(num_tokens, hidden_size)
        decode_few_up_kernel[(width // options["BN"],)](
            x,
            x_scale,
            w,
            *rest,
            intermediate_size,
            hidden_size,
            M=num_tokens,
            TOKENS=next_power_of_2(num_tokens),
            EVEN=options["BK"] == hidden_size and width == intermediate_size,
            **given,
            **options,
        )
    else:
        options = launch_options(
            "decode_up_16" if block_m == 16 else "decode_up_64", x.device, fp8=x_scale is not None
        )
        decode_up_kernel[(width // options["BN"], num_blocks)](
            TensorDescriptor.from_tensor(x, [block_m, options["BK"]]),
            x_scale,
            TensorDescriptor.from_tensor(w, [options["BN"], options["BK"]]),
            *rest,
            num_tokens,
            intermediate_size,
            hidden_size,
            width,
            **given,
            **options,
        )
    return h, flags


def _down(h: Tensor, flags: Tensor, layer: Layer, y: Tensor) -> None:
    """The second launch: y [M, K] from the results of `_up`."""
    (num_tokens, hidden_size), num_blocks, width = y.shape, len(flags), 8 * flags.shape[1]
    few = num_tokens <= FEW_DOWN_TOKENS
    options = launch_options("decode_few_down" if few else "decode_down", h.device)
    num_columns, even = cdiv(hidden_size, options["BN"]), hidden_size % options["BN"] == 0
    stride = width // 8 if few else width
    lists = torch.empty(num_blocks * num_columns, stride, dtype=torch.int32, device=h.device)
    options |= dict(BM=h.shape[1], EIGHTS=next_power_of_2(width // 8))
    tensors = h, flags, layer.w_down_t, layer.b_down, lists, y
    if few:
        decode_few_down_kernel[(num_columns,)](
            *tensors, hidden_size, width, M=num_tokens, **options
        )
    else:
        decode_down_kernel[(num_columns, num_blocks)](
            *tensors, num_tokens, hidden_size, width, stride, EVEN=even, **options
        )


def chunk_tokens(hidden_size: int, intermediate_size: int, device: torch.device) -> int:
    """Tokens processed at once: the multiple of 64 that WORKSPACE_BYTES allows, at least 64."""
    width = round_up(intermediate_size, 64)
    num_columns = cdiv(hidden_size, launch_options("decode_down", device)["BN"])
    bytes_per_block = width * (MAX_TOKENS * 2 + 1 + 4 * num_columns)  # h, flags and lists
    return MAX_TOKENS * min(max(WORKSPACE_BYTES // bytes_per_block, 1), MAX_BLOCKS)


def ffn(
    x: Tensor,
    layer: Layer,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The layer for few tokens: y [M, K] of x [M, K], M at least 1 and best at most 64.

    g and h are rounded to y.dtype, u is not. `activity` [4] int64 counts as ops.py says. Workspace:
    h, and a list of N neurons (one or two tokens: N / 8 words) for each 16 outputs and 64 tokens;
    more tokens are taken in chunks that keep it below WORKSPACE_BYTES. Ours: the paper has no
    kernel for decoding.
    """
    y = empty_output(x) if out is None else out
    if len(x) <= MAX_TOKENS:
        _down(*_up(x, x_scale, layer, activity), layer, y)
        return y
    size = chunk_tokens(x.shape[1], len(layer.w_up), x.device)
    for x_chunk, x_scales, y_chunk in chunks(size, x, x_scale, y):
        _down(*_up(x_chunk, x_scales, layer, activity), layer, y_chunk)
    return y
