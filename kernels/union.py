"""The layer for many tokens: blocks of 64 or 128 tokens share one list, the union of their active neurons.

Tokens that stand together activate many of the same neurons. The gate leaves g by neurons and a bit for each
entry; for each block the neurons that any token has active become a sorted list; then two ordinary tensor-core
products gather the listed weight rows: u^T = Wu[union] x^T, h^T = u^T * g^T[union], y = h Wd[union]. With g and h
by neurons, a block's part of a neuron's row is one contiguous line, so that gathering it costs no more than
reading it. Products at entries that are inactive for a token are computed and set to exactly 0. There are no
slots, so there is no overflow: a list may hold all N neurons, and a heavy token costs its block no more than the
neurons it adds.

The lists are cut into tiles of equal length, and resident programs take these from one queue: blocks differ in
their number of tiles by ten times and more.

Memory. Lists are padded to whole tiles (with a neuron of the list and h = 0), so that loads need no masks. g and
h take 2 bytes each for every token and neuron (N rounded up to 256), bits and lists up to 9 / 64 more. So that the
longest lists fit without asking the device how long they are, tokens are processed in chunks whose workspace
stays below WORKSPACE_BYTES (or in chunks of 256 tokens, where not even these do).

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

from twell.kernels.common import (
    cdiv,
    config,
    launch_options,
    narrow,
    num_processors,
    popcount,
    round_up,
    wide,
)
from twell.kernels.gate import gate_bits

# Less than a dense layer keeps at 131,072 tokens for one of g, u and h with N = 5632.
WORKSPACE_BYTES = 2**30
# Up to so many tokens blocks of 128 are faster on an H200, which then has only a few tiles for each program. With more
# tokens, blocks of 64 read fewer rows for each token. Figures: docs/kernel-log.md.
LARGE_BLOCK_TOKENS = 16_384


def block_tokens(num_tokens: int) -> int:
    """Tokens that share a list."""
    return 128 if num_tokens <= LARGE_BLOCK_TOKENS else 64


@triton.jit(do_not_specialize=["M", "N"])
def lists_kernel(
    bits_ptr,
    lists_ptr,
    counts_ptr,
    tiles_ptr,
    activity_ptr,
    M,
    N,
    width,
    max_tiles,
    ACTIVITY: tl.constexpr,
    WORDS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A block's list: sorted, its last tile filled up with the first neuron; and its tiles, appended to the queue.

    The queue begins with its length; a tile is block * max_tiles + number. Its order differs from run to run, which no
    result depends on.
    """
    block = tl.program_id(0)
    words = (block * WORDS + tl.arange(0, WORDS)).to(tl.int64)
    lists_ptr += block.to(tl.int64) * width
    total = 0
    first = N
    entries = 0
    in_unions = 0
    for start in range(0, N, CHUNK):
        neurons = start + tl.arange(0, CHUNK)
        bits = tl.load(
            bits_ptr + words[:, None] * width + neurons[None, :],
            mask=(neurons < N)[None, :],
            other=0,
        )
        some = (bits != 0).to(tl.int32)
        active = tl.max(some, 0)
        place = total + tl.cumsum(active, 0) - active
        tl.store(lists_ptr + place, neurons, mask=active != 0)
        total += tl.sum(active, 0)
        first = tl.minimum(first, tl.min(tl.where(active != 0, neurons, N), 0))
        if ACTIVITY:
            entries += tl.sum(popcount(bits))
            in_unions += tl.sum(tl.max(tl.reshape(some, (WORDS // 2, 2, CHUNK)), 1))
    tl.store(counts_ptr + block, total)
    place = total + tl.arange(0, STEP)
    num_tiles = tl.cdiv(total, STEP)
    tl.store(lists_ptr + place, tl.zeros((STEP,), tl.int32) + first, mask=place < num_tiles * STEP)
    place = 1 + tl.atomic_add(tiles_ptr, num_tiles, sem="relaxed")
    for tile in range(0, num_tiles):
        tl.store(tiles_ptr + place + tile, block * max_tiles + tile)
    if ACTIVITY:
        if block == 0:
            tl.atomic_add(activity_ptr, M.to(tl.int64), sem="relaxed")
            tl.atomic_add(activity_ptr + 1, tl.cdiv(M, 64).to(tl.int64), sem="relaxed")
        tl.atomic_add(activity_ptr + 2, entries.to(tl.int64), sem="relaxed")
        tl.atomic_add(activity_ptr + 3, in_unions.to(tl.int64), sem="relaxed")


@triton.jit
def up_kernel(
    x_desc,
    wu_ptr,
    bu_ptr,
    add_ptr,
    g_ptr,
    h_ptr,
    lists_ptr,
    counts_ptr,
    tiles_ptr,
    tokens,
    width,
    K,
    max_tiles,
    num_programs,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h over the unions, by neurons: u * g for BN neurons of a block's list at a time, non-gated a copy of g.

    PRODUCT leaves out g: u itself, rounded, also where it is not active; ADD: plus a number for each token.
    """
    k = tl.arange(0, BK)
    columns = tl.arange(0, BM)
    for number in range(tl.program_id(0), tl.load(tiles_ptr), num_programs):
        tile = tl.load(tiles_ptr + 1 + number)
        block = tile // max_tiles
        places = tile % max_tiles * BN + tl.arange(0, BN)
        count = tl.load(counts_ptr + block)
        neurons = tl.load(lists_ptr + block.to(tl.int64) * width + places).to(tl.int64)
        if GATED:
            w_ptrs = wu_ptr + neurons[:, None] * K + k[None, :]
            u = tl.zeros((BN, BM), tl.float32)
            for start in range(0, K, BK):
                if EVEN:
                    w = tl.load(w_ptrs + start)
                else:
                    w = tl.load(w_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
                u = tl.dot(wide(w), wide(x_desc.load([block * BM, start])).T, u)
            if BIAS:
                u += tl.load(bu_ptr + neurons).to(tl.float32)[:, None]
        if PRODUCT:
            h = u
            if ADD:
                h += tl.load(add_ptr + block * BM + columns)[None, :]
        else:
            h = tl.load(g_ptr + neurons[:, None] * tokens + (block * BM + columns)[None, :]).to(
                tl.float32
            )
            active = (h != 0) & (places < count)[:, None]
            if GATED:
                h *= u
            # u may be infinite where the token is inactive, and 0 * inf is NaN: select, do not multiply.
            h = tl.where(active, h, 0.0)
        h_ptrs = h_ptr + (block.to(tl.int64) * width + places)[:, None] * BM + columns[None, :]
        tl.store(h_ptrs, narrow(h, h_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["M"])
def down_kernel(
    h_desc,
    wd_ptr,
    h2_desc,
    w2_ptr,
    bd_ptr,
    lists_ptr,
    counts_ptr,
    y_ptr,
    M,
    width,
    K,
    PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[BM tokens, BN outputs] in each program: the block's h times the listed rows of w_down_t; PAIR: plus h2 w2."""
    num_columns = tl.cdiv(K, BN)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    list_ptr = lists_ptr + block.to(tl.int64) * width
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, count, BK):
        neurons = tl.load(list_ptr + start + tl.arange(0, BK)).to(tl.int64)
        w_ptrs = wd_ptr + neurons[:, None] * K + columns[None, :]
        if EVEN:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=(columns < K)[None, :], other=0.0)
        acc = tl.dot(wide(h_desc.load([block * width + start, 0])).T, wide(w), acc)
    if PAIR:
        for start in range(0, count, BK):
            neurons = tl.load(list_ptr + start + tl.arange(0, BK)).to(tl.int64)
            w_ptrs = w2_ptr + neurons[:, None] * K + columns[None, :]
            if EVEN:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=(columns < K)[None, :], other=0.0)
            acc = tl.dot(wide(h2_desc.load([block * width + start, 0])).T, wide(w), acc)
    if BIAS:
        acc += tl.load(bd_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    rows = block * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


def make_lists(
    bits: Tensor,
    tiles: Tensor,
    num_tokens: int,
    intermediate_size: int,
    block_m: int,
    activity: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Lists and counts from the bits that `gate_bits` left by neurons; appends to the queue of tiles.

    Returns (or writes to `out`) lists [blocks, width] int32, of which the first counts[block], rounded up to a multiple of a tile's neurons, are
    set, and counts [blocks] int32. `tiles`, from `queue`, begins with the number that follow, 0 at first.
    """
    step = config(f"union_up_{block_m}", bits.device)["BN"]
    num_blocks, width = cdiv(num_tokens, block_m), bits.shape[1]
    lists, counts = out or (
        torch.empty(num_blocks, width, dtype=torch.int32, device=bits.device),
        torch.empty(num_blocks, dtype=torch.int32, device=bits.device),
    )
    max_tiles = cdiv(intermediate_size, step)
    lists_kernel[(num_blocks,)](
        bits,
        lists,
        counts,
        tiles,
        activity,
        num_tokens,
        intermediate_size,
        width,
        max_tiles,
        ACTIVITY=activity is not None,
        WORDS=block_m // 32,
        STEP=step,
        CHUNK=4096,
        **launch_options(num_warps=8, num_stages=1),
    )
    return lists, counts


def queue(num_tokens: int, intermediate_size: int, block_m: int, device: torch.device) -> Tensor:
    """An empty queue of tiles, long enough for lists of all neurons; its first entry is for `gate_bits` to set to 0."""
    max_tiles = cdiv(intermediate_size, config(f"union_up_{block_m}", device)["BN"])
    return torch.empty(1 + cdiv(num_tokens, block_m) * max_tiles, dtype=torch.int32, device=device)


def up(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    g: Tensor | None,
    unions: tuple[Tensor, Tensor, Tensor],
    block_m: int,
    gated: bool = True,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(x w^T + b) * g over the unions, by neurons; without g the product alone. x [M, K], w [N, K]; see `up_kernel`.

    `add` [blocks * block_m] fp32 is added to each token's products, which needs that there is no g.

    `unions` are lists, counts and the queue of tiles. Returns (or writes to `out`) [blocks * width, block_m], of which the
    first counts[block] of a block's `width` rows are set.
    """
    lists, counts, tiles = unions
    (num_blocks, width), hidden_size = lists.shape, x.shape[1]
    options = config(f"union_up_{block_m}", x.device)
    h = x.new_empty(num_blocks * width, block_m) if out is None else out
    num_programs = min(options.pop("PER_SM") * num_processors(x.device), len(tiles) - 1)
    up_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [block_m, options["BK"]]),
        w,
        b,
        add,
        g,
        h,
        lists,
        counts,
        tiles,
        0 if g is None else g.shape[1],
        width,
        hidden_size,
        cdiv(len(w), options["BN"]),
        num_programs,
        GATED=gated,
        BIAS=gated and b is not None,
        ADD=add is not None,
        EVEN=hidden_size % options["BK"] == 0,
        PRODUCT=g is None,
        BM=block_m,
        **options,
    )
    return h


def down(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    unions: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    second: tuple[Tensor, Tensor] | None = None,
) -> None:
    """y = h w + b for h as `up` returns it and w [N, K]; `second`: another such h and w, whose product is added."""
    lists, counts, _ = unions
    num_blocks, width = lists.shape
    (num_tokens, hidden_size), block_m = y.shape, h.shape[1]
    options = config(f"union_down_{block_m}", h.device)
    h2, w2 = second or (h, None)
    down_kernel[(num_blocks * cdiv(hidden_size, options["BN"]),)](
        TensorDescriptor.from_tensor(h, [options["BK"], block_m]),
        w,
        TensorDescriptor.from_tensor(h2, [options["BK"], block_m]),
        w2,
        b,
        lists,
        counts,
        y,
        num_tokens,
        width,
        hidden_size,
        PAIR=second is not None,
        BIAS=b is not None,
        EVEN=hidden_size % options["BN"] == 0,
        BM=block_m,
        **options,
    )


def _chunk(
    x: Tensor,
    y: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    block_m: int,
    activity: Tensor | None,
) -> None:
    """One chunk of tokens, x and y [M, K]."""
    num_tokens, intermediate_size = len(x), len(w_up)
    gated = w_gate is not None
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    tiles = queue(num_tokens, intermediate_size, block_m, x.device)
    g, bits = gate_bits(x, w, b, by_neuron=True, zero=tiles)
    lists, counts = make_lists(bits, tiles, num_tokens, intermediate_size, block_m, activity)
    h = up(x, w_up, b_up, g, (lists, counts, tiles), block_m, gated)
    down(h, w_down_t, b_down, (lists, counts, tiles), y)


def chunk_tokens(intermediate_size: int) -> int:
    """Tokens that are processed at a time, a multiple of 256: what WORKSPACE_BYTES has room for."""
    width = round_up(intermediate_size, 256)
    # g and h; one word of bits for 32 tokens; list and count, and at most one tile of the queue for 64 neurons.
    bytes_per_256_tokens = (
        256 * 2 * 2 * width + 256 // 32 * 4 * width + 256 // 64 * 4 * (width + 1 + width // 64 + 1)
    )
    return 256 * max(1, WORKSPACE_BYTES // bytes_per_256_tokens)


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
    """The layer by unions of blocks of tokens: y [M, K], M at least 1.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down, w_gate None in a non-gated layer;
    biases [N], [N], [K] or None. g and h are rounded to x.dtype, u is not. `activity` [4] int64 counts as ops.py says.
    Ours, not the paper's.
    """
    y = torch.empty_like(x)
    num_tokens = len(x)
    num_chunks = cdiv(num_tokens, chunk_tokens(w_up.shape[0]))
    size = round_up(cdiv(num_tokens, num_chunks), 256)
    for x_chunk, y_chunk in zip(x.split(size), y.split(size), strict=True):
        weights = w_gate, w_up, w_down_t, b_gate, b_up, b_down
        _chunk(x_chunk, y_chunk, *weights, block_tokens(num_tokens), activity)
    return y
