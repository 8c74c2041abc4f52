"""The layer for many tokens: blocks of 64 tokens share one list, the union of their active neurons.

Tokens that stand together activate many of the same neurons. For each block the gate flags the neurons that
any token has active; these become a sorted list; then two ordinary tensor-core products gather the listed
weight rows: u = x Wu[union], h = u * g, y = h Wd[union]. Products at entries that are inactive for a token
are computed and set to exactly 0. There are no slots, so there is no overflow: a list may hold all N neurons,
and a heavy token costs its block no more than the neurons it adds.

Memory. Lists are padded to whole steps of the products (with a neuron of the list and h = 0), so that loads
need no masks. g and h take 2 bytes each for every token and neuron (N rounded up to 256), lists and flags 5
bytes for every block and neuron. So that the longest lists fit without asking the device how long they are,
tokens are processed in chunks whose workspace stays below WORKSPACE_BYTES (or in chunks of 128 tokens, where
not even these do).

Non-finite values. A NaN in a row of x reaches that row of y alone. An inf or NaN in w_up does not reach
tokens for which its neuron is inactive; in w_down it may reach the other tokens of the block, where h is 0,
since 0 * inf is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import config, launch_options, narrow, wide
from twell.kernels.gate import gate_flags

# On an H200 at 131,072 tokens blocks of 64 took 2.95 ms for both products, blocks of 128 took 3.28.
BLOCK_M = 64
# Less than a dense layer keeps at 131,072 tokens for one of g, u and h with N = 5632.
WORKSPACE_BYTES = 2**30


@triton.jit(do_not_specialize=["N"])
def lists_kernel(flags_ptr, lists_ptr, counts_ptr, N, width, STEP: tl.constexpr, CHUNK: tl.constexpr):
    """Turns a block's flags into its sorted list and fills up the last step with the list's first neuron."""
    block = tl.program_id(0)
    flags_ptr += block.to(tl.int64) * width
    lists_ptr += block.to(tl.int64) * width
    total = 0
    first = N
    for start in range(0, N, CHUNK):
        neurons = start + tl.arange(0, CHUNK)
        active = tl.load(flags_ptr + neurons, mask=neurons < N, other=0).to(tl.int32)
        place = total + tl.cumsum(active, 0) - active
        tl.store(lists_ptr + place, neurons, mask=active != 0)
        total += tl.sum(active, 0)
        first = tl.minimum(first, tl.min(tl.where(active != 0, neurons, N), 0))
    tl.store(counts_ptr + block, total)
    place = total + tl.arange(0, STEP)
    tl.store(lists_ptr + place, tl.zeros((STEP,), tl.int32) + first, mask=place < tl.cdiv(total, STEP) * STEP)


@triton.jit
def up_kernel(
    x_desc,
    wu_ptr,
    bu_ptr,
    g_ptr,
    h_ptr,
    lists_ptr,
    counts_ptr,
    width,
    K,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h over the union, [BM, BN] of it in each program: u * g, in a non-gated layer g gathered."""
    block = tl.program_id(1)
    places = tl.program_id(0) * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    if tl.program_id(0) * BN < count:
        neurons = tl.load(lists_ptr + block.to(tl.int64) * width + places)
        rows = (block * BM + tl.arange(0, BM)).to(tl.int64)[:, None] * width
        h = tl.load(g_ptr + rows + neurons[None, :]).to(tl.float32)
        active = (h != 0) & (places < count)[None, :]
        if GATED:
            k = tl.arange(0, BK)
            w_ptrs = wu_ptr + neurons.to(tl.int64)[:, None] * K + k[None, :]
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, K, BK):
                if EVEN:
                    w = tl.load(w_ptrs + start)
                else:
                    w = tl.load(w_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
                acc = tl.dot(wide(x_desc.load([block * BM, start])), wide(w).T, acc)
            if BIAS:
                acc += tl.load(bu_ptr + neurons).to(tl.float32)[None, :]
            h *= acc
        # u may be infinite where the token is inactive, and 0 * inf is NaN: select, do not multiply.
        h = tl.where(active, h, 0.0)
        tl.store(h_ptr + rows + places[None, :], narrow(h, h_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["M"])
def down_kernel(
    h_ptr,
    wd_ptr,
    bd_ptr,
    lists_ptr,
    counts_ptr,
    y_ptr,
    M,
    width,
    K,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[BM tokens, BN outputs] in each program: the block's h times the listed rows of w_down_t."""
    num_columns = tl.cdiv(K, BN)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    list_ptr = lists_ptr + block.to(tl.int64) * width
    rows = block * BM + tl.arange(0, BM)
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * width
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, count, BK):
        places = start + tl.arange(0, BK)
        neurons = tl.load(list_ptr + places)
        h = tl.load(h_ptrs + places[None, :])
        w_ptrs = wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
        if EVEN:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(columns < K)[None, :], other=0.0)
        acc = tl.dot(wide(h), wide(w), acc)
    if BIAS:
        acc += tl.load(bd_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


def _chunk(
    x: Tensor,
    y: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> None:
    """One chunk of tokens, x and y [M, K]."""
    num_tokens, hidden_size = x.shape
    intermediate_size = w_up.shape[0]
    gated = w_gate is not None
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    g, flags = gate_flags(x, w, b, BLOCK_M)
    num_blocks, width = flags.shape
    lists = torch.empty(num_blocks, width, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=x.device)
    options = config("union_up", x.device)
    lists_kernel[(num_blocks,)](
        flags,
        lists,
        counts,
        intermediate_size,
        width,
        STEP=options["BN"],
        CHUNK=1024,
        **launch_options(num_warps=4, num_stages=1),
    )
    h = torch.empty_like(g)
    up_kernel[(triton.cdiv(intermediate_size, options["BN"]), num_blocks)](
        TensorDescriptor.from_tensor(x, [BLOCK_M, options["BK"]]),
        w_up,
        b_up,
        g,
        h,
        lists,
        counts,
        width,
        hidden_size,
        GATED=gated,
        BIAS=gated and b_up is not None,
        EVEN=hidden_size % options["BK"] == 0,
        BM=BLOCK_M,
        **options,
    )
    options = config("union_down", x.device)
    num_columns = triton.cdiv(hidden_size, options["BN"])
    down_kernel[(triton.cdiv(num_tokens, BLOCK_M) * num_columns,)](
        h,
        w_down_t,
        b_down,
        lists,
        counts,
        y,
        num_tokens,
        width,
        hidden_size,
        BIAS=b_down is not None,
        EVEN=hidden_size % options["BN"] == 0,
        BM=BLOCK_M,
        **options,
    )


def chunk_tokens(intermediate_size: int) -> int:
    """Tokens that are processed at a time, a multiple of 128: what WORKSPACE_BYTES has room for."""
    width = -(-intermediate_size // 256) * 256
    bytes_per_128_tokens = 128 * 2 * 2 * width + 128 // BLOCK_M * (5 * width + 4)
    return 128 * max(1, WORKSPACE_BYTES // bytes_per_128_tokens)


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> Tensor:
    """The layer by unions of blocks of tokens: y [M, K], M at least 1.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a non-gated layer;
    biases [N], [N], [K] or None. g and h are rounded to x.dtype, u is not. Ours, not the paper's.
    """
    y = torch.empty_like(x)
    size = chunk_tokens(w_up.shape[0])
    for x_chunk, y_chunk in zip(x.split(size), y.split(size), strict=True):
        _chunk(x_chunk, y_chunk, w_gate, w_up, w_down_t, b_gate, b_up, b_down)
    return y
