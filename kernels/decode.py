"""The layer for 1 to 256 tokens, where time is the reading of weights: each row is read once, or not at all.

Three launches, without a word to the host, so that a graph can hold them:

  1. Each program owns a few neurons. It reads their gate rows once for all tokens, then those of w_up whose
     neuron is active for some token (the others are masked out of the load, which then causes no traffic),
     and leaves h = u * g with one flag per neuron.
  2. Programs share out the outputs and the neurons. Each reads the flagged rows of w_down_t and leaves a
     partial sum.
  3. The partial sums are added in a fixed order, so the same call gives the same bits.

More than 256 tokens are done as several such blocks, each of which reads the weights again. What union.py
says of non-finite weights holds here, with all tokens of a call as one block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import config, launch_options, narrow, relu, round_up, wide

MAX_TOKENS = 256
# Neurons that the second kernel takes in one step; lists of flags are padded to whole steps.
STEP = 32


@triton.jit(do_not_specialize=["M", "N"])
def up_kernel(
    x_desc,
    w_desc,
    b_ptr,
    wu_ptr,
    bu_ptr,
    h_ptr,
    flags_ptr,
    M,
    N,
    K,
    width,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    dtype: tl.constexpr = x_desc.dtype
    first_row = tl.program_id(1) * BM
    first_neuron = tl.program_id(0) * BN
    rows = first_row + tl.arange(0, BM)
    neurons = first_neuron + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        acc = tl.dot(wide(x_desc.load([first_row, start])), wide(w_desc.load([first_neuron, start])).T, acc)
    if BIAS:
        acc += tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[None, :]
    h = narrow(relu(acc), dtype).to(tl.float32)
    # Rows beyond M may hold relu(bias), neurons beyond N the NaN of a row of x.
    active = (h != 0) & (rows < M)[:, None] & (neurons < N)[None, :]
    flags = tl.max(active.to(tl.int32), 0)
    tl.store(flags_ptr + tl.program_id(1) * width + neurons, flags.to(tl.int8))
    if GATED:
        k = tl.arange(0, BK)
        w_ptrs = wu_ptr + neurons.to(tl.int64)[:, None] * K + k[None, :]
        u = tl.zeros((BM, BN), tl.float32)
        # Where nothing is active there is nothing to do. (Not tl.max(flags, 0): Triton 3.7 cannot compile the maximum of a
        # maximum over an accumulator in the tensor memory of sm_100.)
        for start in range(0, K * tl.max(active.to(tl.int32)), BK):
            w = tl.load(w_ptrs + start, mask=(flags != 0)[:, None] & (start + k < K)[None, :], other=0.0)
            u = tl.dot(wide(x_desc.load([first_row, start])), wide(w).T, u)
        if BIAS_UP:
            u += tl.load(bu_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)[None, :]
        h *= u
    h = tl.where(active, h, 0.0)
    tl.store(h_ptr + rows[:, None] * width + neurons[None, :], narrow(h, dtype))


@triton.jit
def down_kernel(
    h_ptr,
    flags_ptr,
    wd_ptr,
    partial_ptr,
    K,
    width,
    per_split,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows = tl.program_id(2) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * per_split
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(first, tl.minimum(first + per_split, width), BK):
        neurons = start + tl.arange(0, BK)
        flags = tl.load(flags_ptr + tl.program_id(2) * width + neurons).to(tl.int32)
        if tl.max(flags, 0) != 0:
            h = tl.load(h_ptr + rows[:, None] * width + neurons[None, :])
            w_ptrs = wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
            w = tl.load(w_ptrs, mask=(flags != 0)[:, None] & (columns < K)[None, :], other=0.0)
            acc = tl.dot(wide(h), wide(w), acc)
    num_rows = tl.num_programs(2) * BM
    place = (tl.program_id(1) * num_rows + rows).to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(partial_ptr + place, acc, mask=(columns < K)[None, :])


@triton.jit
def sum_kernel(partial_ptr, bd_ptr, y_ptr, size, partial_size, K, num_splits, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        acc += tl.load(partial_ptr + tl.cast(split, tl.int64) * partial_size + place, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bd_ptr + place % K, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> Tensor:
    """The layer for few tokens: y [M, K], M at least 1 and best at most 256.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a non-gated layer;
    biases [N], [N], [K] or None. g and h are rounded to x.dtype, u is not. Workspace: h, and at most 8,192
    rows of fp32 partial sums for each 256 tokens. Ours: the paper has no kernel for decoding.
    """
    num_tokens, hidden_size = x.shape
    intermediate_size = w_up.shape[0]
    gated = w_gate is not None
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    block_m = min(max(triton.next_power_of_2(num_tokens), 16), MAX_TOKENS)
    num_blocks = triton.cdiv(num_tokens, block_m)
    num_warps = 4 if block_m <= 64 else 8
    width = round_up(intermediate_size, STEP)
    h = x.new_empty(num_blocks * block_m, width)
    flags = torch.empty(num_blocks, width, dtype=torch.int8, device=x.device)
    options = config("decode_up", x.device)
    up_kernel[(width // options["BN"], num_blocks)](
        TensorDescriptor.from_tensor(x, [block_m, options["BK"]]),
        TensorDescriptor.from_tensor(w, [options["BN"], options["BK"]]),
        b,
        w_up,
        b_up,
        h,
        flags,
        num_tokens,
        intermediate_size,
        hidden_size,
        width,
        GATED=gated,
        BIAS=b is not None,
        BIAS_UP=gated and b_up is not None,
        BM=block_m,
        num_warps=num_warps,
        **options,
    )
    options = config("decode_down", x.device)
    # Few tokens: many splits, so that all multiprocessors read weights. Many: few, as partial sums are large.
    per_split = round_up(triton.cdiv(width, max(4, 512 // block_m)), STEP)
    num_splits = triton.cdiv(width, per_split)
    partial = torch.empty(num_splits, len(h), hidden_size, dtype=torch.float32, device=x.device)
    down_kernel[(triton.cdiv(hidden_size, options["BN"]), num_splits, num_blocks)](
        h,
        flags,
        w_down_t,
        partial,
        hidden_size,
        width,
        per_split,
        BM=block_m,
        BK=STEP,
        num_warps=num_warps,
        **options,
    )
    y = torch.empty_like(x)
    sum_kernel[(triton.cdiv(y.numel(), 512),)](
        partial,
        b_down,
        y,
        y.numel(),
        partial[0].numel(),
        hidden_size,
        num_splits,
        BIAS=b_down is not None,
        BLOCK=512,
        **launch_options(num_warps=4, num_stages=1),
    )
    return y
