"""The layer for 1 to 64 tokens, where time is the reading of weights: each row is read once, or not at all.

Two launches, without a word to the host, so that a graph can hold them:

  1. Each program owns a few neurons. It reads their gate rows once for all tokens, then those of w_up whose
     neuron is active for some token (the others are masked out of the load, which then causes no traffic),
     and leaves h = u * g with one flag per neuron. Up to four tokens are multiplied without tensor cores: their
     tiles of 16 would be mostly padding, and loading those costs more than the arithmetic.
  2. Each program owns 16 outputs. It turns the flags into a list of active neurons (all programs the same one, which is
     cheaper than a launch that makes it once), reads its part of their rows of w_down_t and is done: no partial
     sums, no third launch, and the same call gives the same bits. For one and two tokens each entry of the list is a word
     for eight neurons, and again there are no tensor cores.

More than 64 tokens are done as several such blocks, each of which reads the weights again. What union.py
says of non-finite weights holds here, with all tokens of a call as one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import (
    cdiv,
    config,
    launch_options,
    narrow,
    next_power_of_2,
    relu,
    round_up,
    wide,
)

MAX_TOKENS = 64
# For h and the lists: more tokens than fit are taken in chunks (at least 64 at a time).
WORKSPACE_BYTES = 2**28
MAX_BLOCKS = 65_535  # of a chunk: the grid's second axis has no more
# Up to so many tokens few_up_kernel is taken, and few_down_kernel.
FEW_TOKENS = 4
FEW_DOWN_TOKENS = 2


@triton.jit
def _count(activity_ptr, first, M, entries, in_unions):
    """Adds to `activity`; the first program of all adds the tokens and blocks of 64 of the call."""
    if first:
        tl.atomic_add(activity_ptr, tl.cast(M, tl.int64), sem="relaxed")
        tl.atomic_add(activity_ptr + 1, tl.cast(tl.cdiv(M, 64), tl.int64), sem="relaxed")
    tl.atomic_add(activity_ptr + 2, entries.to(tl.int64), sem="relaxed")
    tl.atomic_add(activity_ptr + 3, in_unions.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["N"])
def few_up_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    wu_ptr,
    bu_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    N,
    K,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    ACTIVITY: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UP: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """As up_kernel, for M tokens one after the other, with whole rows of weights in registers.

    TOKENS is M rounded up to a power of two.
    """
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = neurons.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:
        w = tl.load(w_ptr + place).to(tl.float32)
    else:
        w = tl.load(w_ptr + place, mask=(neurons < N)[:, None] & (k < K)[None, :], other=0.0).to(
            tl.float32
        )
    # g and u stay in registers: [BN, TOKENS], one column a token, filled one after the other.
    tokens = tl.arange(0, TOKENS)
    g = tl.zeros((BN, TOKENS), tl.float32)
    for token in tl.static_range(M):
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        g += tl.where((tokens == token)[None, :], tl.sum(w * x[None, :], 1)[:, None], 0.0)
    if BIAS:
        g += tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
    h = narrow(relu(g), h_ptr.dtype.element_ty).to(tl.float32)
    active = (h != 0) & (neurons < N)[:, None] & (tokens < M)[None, :]
    flags = tl.max(active.to(tl.int32), 1)
    tl.store(flags_ptr + neurons, flags.to(tl.int8))
    if ACTIVITY:
        _count(
            activity_ptr, tl.program_id(0) == 0, M, tl.sum(active.to(tl.int32)), tl.sum(flags, 0)
        )
    if GATED:
        if tl.max(flags, 0) != 0:
            wu = tl.load(
                wu_ptr + place, mask=(flags != 0)[:, None] & (k < K)[None, :], other=0.0
            ).to(tl.float32)
            u = tl.zeros((BN, TOKENS), tl.float32)
            for token in tl.static_range(M):
                again = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
                u += tl.where(
                    (tokens == token)[None, :], tl.sum(wu * again[None, :], 1)[:, None], 0.0
                )
            if BIAS_UP:
                u += tl.load(bu_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
            h *= u
    h_ptrs = h_ptr + neurons[:, None] * BM + tokens[None, :]
    tl.store(
        h_ptrs, narrow(tl.where(active, h, 0.0), h_ptr.dtype.element_ty), mask=(tokens < M)[None, :]
    )


@triton.jit(do_not_specialize=["M", "N"])
def up_kernel(
    x_desc,
    w_desc,
    b_ptr,
    wu_ptr,
    bu_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    M,
    N,
    K,
    width,
    ACTIVITY: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h by neurons, [width, BM] for each block of tokens, and whether any token of the block has the neuron active."""
    dtype: tl.constexpr = x_desc.dtype
    first_row = tl.program_id(1) * BM
    first_neuron = tl.program_id(0) * BN
    rows = first_row + tl.arange(0, BM)
    neurons = first_neuron + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        acc = tl.dot(
            wide(w_desc.load([first_neuron, start])), wide(x_desc.load([first_row, start])).T, acc
        )
    if BIAS:
        acc += tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
    h = narrow(relu(acc), dtype).to(tl.float32)
    # Rows beyond M may hold relu(bias), neurons beyond N the NaN of a row of x.
    active = (h != 0) & (rows < M)[None, :] & (neurons < N)[:, None]
    flags = tl.max(active.to(tl.int32), 1)
    place = tl.program_id(1).to(tl.int64) * width + neurons
    tl.store(flags_ptr + place, flags.to(tl.int8))
    if ACTIVITY:
        SIZE: tl.constexpr = BM if BM < 64 else 64
        in_unions = tl.max(tl.reshape(active.to(tl.int32), (BN, BM // SIZE, SIZE)), 2)
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        _count(activity_ptr, first, M, tl.sum(active.to(tl.int32)), tl.sum(in_unions))
    if GATED:
        k = tl.arange(0, BK)
        w_ptrs = wu_ptr + neurons.to(tl.int64)[:, None] * K + k[None, :]
        u = tl.zeros((BN, BM), tl.float32)
        # Where nothing is active there is nothing to do. (Not tl.max(flags, 0): Triton 3.7 cannot compile the maximum of a
        # maximum over an accumulator in the tensor memory of sm_100.)
        for start in range(0, K * tl.max(active.to(tl.int32)), BK):
            w = tl.load(
                w_ptrs + start, mask=(flags != 0)[:, None] & (start + k < K)[None, :], other=0.0
            )
            u = tl.dot(wide(w), wide(x_desc.load([first_row, start])).T, u)
        if BIAS_UP:
            u += tl.load(bu_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[:, None]
        h *= u
    h = tl.where(active, h, 0.0)
    tl.store(h_ptr + place[:, None] * BM + tl.arange(0, BM)[None, :], narrow(h, dtype))


@triton.jit(do_not_specialize=["M"])
def down_kernel(
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
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """y[BM tokens, BN outputs] in each program. Eight flags make a word of int64; `width` is a multiple of 8."""
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
        # The last step is filled up with the last active neuron, whose h does not count then: one that is idle may have a
        # NaN in w_down.
        neurons = tl.load(list_ptr + tl.minimum(slots, total - 1))
        w_ptrs = wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
        if EVEN:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(columns < K)[None, :], other=0.0)
        h = wide(
            tl.load(h_ptr + (block * width + neurons)[:, None] * BM + tl.arange(0, BM)[None, :])
        )
        h = tl.where((slots < total)[:, None], h, 0.0)
        acc = tl.dot(h.T, wide(w), acc)
    if BIAS:
        acc += tl.load(bd_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    rows = block * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    tl.store(
        y_ptr + rows[:, None] * K + columns[None, :],
        narrow(acc, y_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def few_down_kernel(
    h_ptr,
    flags_ptr,
    wd_ptr,
    bd_ptr,
    lists_ptr,
    y_ptr,
    K,
    width,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """As down_kernel, for M tokens one after the other: y[M, BN outputs] in each program, from BK words of flags in each step.

    A word of the list is 256 times its place, plus its eight flags as bits: one store a word makes the list, where
    down_kernel needs eight, and rows of idle neurons are masked out of the load.
    """
    place = tl.arange(0, EIGHTS)
    flags = tl.load(flags_ptr + place, mask=place < width // 8, other=0)
    found = (flags != 0).to(tl.int32)
    total = tl.sum(found, 0)
    bits = ((flags * 0x0102040810204080) >> 56).to(tl.int32) & 255
    list_ptr = lists_ptr + tl.program_id(0).to(tl.int64) * (width // 8)
    tl.store(list_ptr + tl.cumsum(found, 0) - found, place * 256 + bits, mask=found != 0)
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
        w = tl.load(
            wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        for token in tl.static_range(M):
            h = tl.load(h_ptr + neurons * BM + token, mask=active, other=0.0).to(tl.float32)
            acc += tl.where((tokens == token)[:, None], tl.sum(w * h[:, None], 0)[None, :], 0.0)
    if BIAS:
        acc += tl.load(bd_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + tokens[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=(columns < K)[None, :])


def _chunk(
    x: Tensor,
    y: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activity: Tensor | None,
) -> None:
    """One chunk of tokens, x and y [M, K]."""
    num_tokens, hidden_size = x.shape
    intermediate_size = w_up.shape[0]
    gated = w_gate is not None
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    block_m = min(max(next_power_of_2(num_tokens), 16), MAX_TOKENS)
    num_blocks = cdiv(num_tokens, block_m)
    # Flags are read eight at a time, and every program writes all of its own.
    width = round_up(intermediate_size, 64)
    h = x.new_empty(num_blocks * width, block_m)
    flags = torch.empty(num_blocks, width // 8, dtype=torch.int64, device=x.device)
    given = dict(
        ACTIVITY=activity is not None,
        GATED=gated,
        BIAS=b is not None,
        BIAS_UP=gated and b_up is not None,
    )
    if num_tokens <= FEW_TOKENS:
        block_k = next_power_of_2(hidden_size)
        neurons = 1 if num_tokens <= 2 else 2  # of a program
        few_up_kernel[(width // neurons,)](
            x,
            w,
            b,
            w_up,
            b_up,
            h,
            flags.view(torch.int8),
            activity,
            intermediate_size,
            hidden_size,
            M=num_tokens,
            TOKENS=next_power_of_2(num_tokens),
            EVEN=block_k == hidden_size and width == intermediate_size,
            BM=block_m,
            BN=neurons,
            BK=block_k,
            **given,
            **launch_options(num_warps=min(max(neurons * block_k // 2048, 1), 16), num_stages=1),
        )
    else:
        options = config("decode_up_16" if block_m == 16 else "decode_up_64", x.device)
        up_kernel[(width // options["BN"], num_blocks)](
            TensorDescriptor.from_tensor(x, [block_m, options["BK"]]),
            TensorDescriptor.from_tensor(w, [options["BN"], options["BK"]]),
            b,
            w_up,
            b_up,
            h,
            flags.view(torch.int8),
            activity,
            num_tokens,
            intermediate_size,
            hidden_size,
            width,
            BM=block_m,
            **given,
            **options,
        )
    few = num_tokens <= FEW_DOWN_TOKENS
    options = config("decode_few_down" if few else "decode_down", x.device)
    num_columns = cdiv(hidden_size, options["BN"])
    stride = width // 8 if few else width
    lists = torch.empty(num_blocks * num_columns, stride, dtype=torch.int32, device=x.device)
    options |= dict(BIAS=b_down is not None, BM=block_m, EIGHTS=next_power_of_2(width // 8))
    if few:
        few_down_kernel[(num_columns,)](
            h, flags, w_down_t, b_down, lists, y, hidden_size, width, M=num_tokens, **options
        )
    else:
        down_kernel[(num_columns, num_blocks)](
            h,
            flags,
            w_down_t,
            b_down,
            lists,
            y,
            num_tokens,
            hidden_size,
            width,
            stride,
            EVEN=hidden_size % options["BN"] == 0,
            **options,
        )


def chunk_tokens(hidden_size: int, intermediate_size: int, device: torch.device) -> int:
    """Tokens that are processed at a time, a multiple of 64: what WORKSPACE_BYTES has room for."""
    width = round_up(intermediate_size, 64)
    num_columns = cdiv(hidden_size, config("decode_down", device)["BN"])
    bytes_per_block = width * (MAX_TOKENS * 2 + 1 + 4 * num_columns)  # h, flags and lists
    return MAX_TOKENS * min(max(WORKSPACE_BYTES // bytes_per_block, 1), MAX_BLOCKS)


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    *,
    activity: Tensor | None = None,
) -> Tensor:
    """The layer for few tokens: y [M, K], M at least 1 and best at most 64.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a non-gated layer;
    biases [N], [N], [K] or None. g and h are rounded to x.dtype, u is not. `activity` [4] int64 counts as ops.py says.
    Workspace: h, and a list of N neurons (one or two tokens: N / 8 words) for each 16 outputs and 64 tokens; tokens are
    taken in chunks that keep it below WORKSPACE_BYTES. Ours: the paper has no kernel for decoding.
    """
    y = torch.empty_like(x)
    weights = w_gate, w_up, w_down_t, b_gate, b_up, b_down
    if len(x) <= MAX_TOKENS:
        _chunk(x, y, *weights, activity)
        return y
    size = chunk_tokens(x.shape[1], w_up.shape[0], x.device)
    for x_chunk, y_chunk in zip(x.split(size), y.split(size), strict=True):
        _chunk(x_chunk, y_chunk, *weights, activity)
    return y
