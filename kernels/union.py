"""Inference with many tokens: a block of 64 or 128 tokens shares one list of neurons.

Tokens of one text activate many of the same neurons. For each block, the neurons that any of its
tokens activates become a sorted list, the union. Two tensor-core products gather the listed weight
rows, so each row is read once a block, not once a token. Entries that are inactive for a token are
computed and set to exactly 0. A list can hold all N neurons, so nothing overflows.

Lists are cut into tiles of BN neurons. Resident programs take the tiles from one queue, because
the lengths of lists differ by more than ten times. Padding fills the last tile of a list, so loads
need no masks. g and h are neuron-major: a block's part of a neuron is one contiguous line.

    M tokens, K hidden size, N neurons, B = ceil(M / block_m) blocks, W = N rounded up to 256

    x, y           [M, K]
    w_gate, w_up   [N, K]
    w_down_t       [N, K]           the transpose of w_down
    g              [N, tokens]      tokens >= M
    bits           [tokens / 32, W] int32, bit i of word j: token 32 j + i is active
    lists, counts  [B, W], [B]      int32
    h              [B * W, block_m]

    g = relu(x w_gate^T + b_gate)    h = (x w_up^T + b_up) * g    y = h w_down_t + b_down
    without w_gate: h = g = relu(x w_up^T + b_up)

Reference: twell.sparse.reference.union_up_down, union_down; test: tests/kernels/test_union.py;
options: kernels/options.py 'union_lists', 'union_up_*', 'union_down_*'.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import add_activity, cdiv, load, narrow, popcount, round_up, wide
from twell.kernels.gate import gate_bits
from twell.kernels.options import block_tokens, launch_options, num_processors

# Below the memory of one of g, u and h in a dense layer of 131,072 tokens and 5,632 neurons.
WORKSPACE_BYTES = 2**30


class Unions(NamedTuple):
    """The lists of all blocks, cut into tiles.

    lists   [blocks, width] int32; of each row the first counts[block] entries, rounded up to whole
            tiles, are set: the union in ascending order, then its first neuron again
    counts  [blocks] int32, neurons of each union
    queue   [1 + most tiles] int32, the number of tiles, then the tiles in any order:
            block * ceil(N / BN) + number of the tile in its list
    """

    lists: Tensor
    counts: Tensor
    queue: Tensor


@triton.jit(do_not_specialize=["M", "N"])
def union_lists_kernel(
    bits_ptr,
    lists_ptr,
    counts_ptr,
    queue_ptr,
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
    """The list of one block, and its tiles appended to the queue; see `Unions`.

    The order of the queue differs between runs. No result depends on it.
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
    place = 1 + tl.atomic_add(queue_ptr, num_tiles, sem="relaxed")
    for tile in range(0, num_tiles):
        tl.store(queue_ptr + place + tile, block * max_tiles + tile)
    if ACTIVITY:
        add_activity(activity_ptr, block == 0, M, entries, in_unions)


@triton.jit
def _tile(number, lists_ptr, counts_ptr, queue_ptr, width, max_tiles, BN: tl.constexpr):
    """Of a tile in the queue: block, length of its list, places in the list, neurons there."""
    tile = tl.load(queue_ptr + 1 + number)
    block = tile // max_tiles
    places = tile % max_tiles * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    neurons = tl.load(lists_ptr + block.to(tl.int64) * width + places).to(tl.int64)
    return block, count, places, neurons


@triton.jit
def _product(
    x_desc,
    w_ptr,
    b_ptr,
    block,
    neurons,
    K,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """w[neurons] x^T + b[neurons] [BN, BM] in fp32, for the tokens of a block."""
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + neurons[:, None] * K + k[None, :]
    u = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        w = load(w_ptrs + start, (start + k < K)[None, :], EVEN)
        u = tl.dot(wide(w), wide(x_desc.load([block * BM, start])).T, u)
    if BIAS:
        u += tl.load(b_ptr + neurons).to(tl.float32)[:, None]
    return u


@triton.jit
def _store(h_ptr, h, block, places, width, BM: tl.constexpr):
    """h [BN, BM] to its places in the block."""
    rows = block.to(tl.int64) * width + places
    h_ptrs = h_ptr + rows[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(h_ptrs, narrow(h, h_ptr.dtype.element_ty))


@triton.jit
def union_up_kernel(
    x_desc,
    w_ptr,
    b_ptr,
    g_ptr,
    h_ptr,
    lists_ptr,
    counts_ptr,
    queue_ptr,
    tokens,
    width,
    K,
    max_tiles,
    num_programs,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h = u * g over the unions, tile by tile; without a gate a copy of g."""
    for number in range(tl.program_id(0), tl.load(queue_ptr), num_programs):
        block, count, places, neurons = _tile(
            number, lists_ptr, counts_ptr, queue_ptr, width, max_tiles, BN
        )
        if GATED:
            u = _product(x_desc, w_ptr, b_ptr, block, neurons, K, BIAS, EVEN, BM, BN, BK)
        columns = block * BM + tl.arange(0, BM)
        h = tl.load(g_ptr + neurons[:, None] * tokens + columns[None, :]).to(tl.float32)
        active = (h != 0) & (places < count)[:, None]
        if GATED:
            h *= u
        # Select, do not multiply: u may be infinite where the token is inactive.
        h = tl.where(active, h, 0.0)
        _store(h_ptr, h, block, places, width, BM)


@triton.jit
def union_product_kernel(
    x_desc,
    w_ptr,
    b_ptr,
    add_ptr,
    out_ptr,
    lists_ptr,
    counts_ptr,
    queue_ptr,
    width,
    K,
    max_tiles,
    num_programs,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x w^T over the unions, tile by tile, also at inactive entries; ADD: plus one number a token.

    Training needs the product itself: u is kept, and dy w_down^T has another epilogue.
    """
    for number in range(tl.program_id(0), tl.load(queue_ptr), num_programs):
        block, _, places, neurons = _tile(
            number, lists_ptr, counts_ptr, queue_ptr, width, max_tiles, BN
        )
        u = _product(x_desc, w_ptr, b_ptr, block, neurons, K, BIAS, EVEN, BM, BN, BK)
        if ADD:
            u += tl.load(add_ptr + block * BM + tl.arange(0, BM))[None, :]
        _store(out_ptr, u, block, places, width, BM)


@triton.jit
def _add_listed(
    acc,
    h_desc,
    w_ptr,
    list_ptr,
    block,
    count,
    columns,
    width,
    K,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
):
    """acc [BM, BN] + h times the listed rows of w at `columns`."""
    for start in range(0, count, BK):
        neurons = tl.load(list_ptr + start + tl.arange(0, BK)).to(tl.int64)
        w_ptrs = w_ptr + neurons[:, None] * K + columns[None, :]
        w = load(w_ptrs, (columns < K)[None, :], EVEN)
        acc = tl.dot(wide(h_desc.load([block * width + start, 0])).T, wide(w), acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def union_down_kernel(
    h_desc,
    w_ptr,
    h2_desc,
    w2_ptr,
    b_ptr,
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
    """y [BM tokens, BN outputs] of one program: h w + b over the block's list; PAIR: plus h2 w2."""
    num_columns = tl.cdiv(K, BN)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    list_ptr = lists_ptr + block.to(tl.int64) * width
    acc = tl.zeros((BM, BN), tl.float32)
    acc = _add_listed(acc, h_desc, w_ptr, list_ptr, block, count, columns, width, K, EVEN, BK)
    if PAIR:
        acc = _add_listed(acc, h2_desc, w2_ptr, list_ptr, block, count, columns, width, K, EVEN, BK)
    if BIAS:
        acc += tl.load(b_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    rows = block * BM + tl.arange(0, BM)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


def _max_tiles(intermediate_size: int, block_m: int, device: torch.device) -> int:
    """Tiles of a list of all neurons."""
    return cdiv(intermediate_size, launch_options(f"union_up_{block_m}", device)["BN"])


def queue(num_tokens: int, intermediate_size: int, block_m: int, device: torch.device) -> Tensor:
    """An empty queue, long enough for lists of all neurons. `gate_bits` sets its length to 0."""
    size = 1 + cdiv(num_tokens, block_m) * _max_tiles(intermediate_size, block_m, device)
    return torch.empty(size, dtype=torch.int32, device=device)


def make_lists(
    bits: Tensor,
    queue: Tensor,
    num_tokens: int,
    intermediate_size: int,
    block_m: int,
    activity: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> Unions:
    """The unions of blocks of `block_m` tokens, from the bits that `gate_bits` stores by neurons.

    Appends to `queue`. Writes lists and counts to `out` if given. `activity` [4] int64 counts as
    ops.py says.
    """
    num_blocks, width = cdiv(num_tokens, block_m), bits.shape[1]
    lists, counts = out or (
        torch.empty(num_blocks, width, dtype=torch.int32, device=bits.device),
        torch.empty(num_blocks, dtype=torch.int32, device=bits.device),
    )
    union_lists_kernel[(num_blocks,)](
        bits,
        lists,
        counts,
        queue,
        activity,
        num_tokens,
        intermediate_size,
        width,
        _max_tiles(intermediate_size, block_m, bits.device),
        ACTIVITY=activity is not None,
        WORDS=block_m // 32,
        STEP=launch_options(f"union_up_{block_m}", bits.device)["BN"],
        **launch_options("union_lists", bits.device),
    )
    return Unions(lists, counts, queue)


def _over_unions(
    kernel,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    other: Tensor | None,
    unions: Unions,
    block_m: int,
    out: Tensor | None,
    *sizes: int,
    **flags: bool,
) -> Tensor:
    """Launches union_up_kernel or union_product_kernel; returns `out` or a new tensor."""
    options = launch_options(f"union_up_{block_m}", x.device)
    width, hidden_size = unions.lists.shape[1], x.shape[1]
    num_programs = min(options.pop("PER_SM") * num_processors(x.device), len(unions.queue) - 1)
    result = x.new_empty(unions.lists.numel(), block_m) if out is None else out
    kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [block_m, options["BK"]]),
        w,
        b,
        other,
        result,
        *unions,
        *sizes,
        width,
        hidden_size,
        cdiv(len(w), options["BN"]),
        num_programs,
        EVEN=hidden_size % options["BK"] == 0,
        BM=block_m,
        **flags,
        **options,
    )
    return result


def up(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    g: Tensor,
    unions: Unions,
    block_m: int,
    gated: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """h = (x w^T + b) * g over the unions, without a gate g; 0 where a token is inactive.

    x [M, K]; w [N, K]; b [N] or None; g [N, tokens] as `gate_bits` stores it. Returns, or writes to
    `out`, [blocks * width, block_m], of which the first counts[block] of each block's `width` rows,
    rounded up to whole tiles, are set. h is rounded to x.dtype, u is not.
    """
    sizes, flags = (g.shape[1],), dict(GATED=gated, BIAS=gated and b is not None)
    return _over_unions(union_up_kernel, x, w, b, g, unions, block_m, out, *sizes, **flags)


def product(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    unions: Unions,
    block_m: int,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x w^T + b + add over the unions, rounded to x.dtype, also where a token is inactive.

    x [M, K]; w [N, K]; b [N] or None; add [blocks * block_m] fp32 or None, a number for each token.
    Returns, or writes to `out`, the layout of `up`.
    """
    flags = dict(BIAS=b is not None, ADD=add is not None)
    return _over_unions(union_product_kernel, x, w, b, add, unions, block_m, out, **flags)


def down(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    unions: Unions,
    y: Tensor,
    second: tuple[Tensor, Tensor] | None = None,
) -> None:
    """y [M, K] = h w + b for h as `up` returns it and w [N, K]; `second`: plus another h w."""
    num_blocks, width = unions.lists.shape
    (num_tokens, hidden_size), block_m = y.shape, h.shape[1]
    options = launch_options(f"union_down_{block_m}", h.device)
    h2, w2 = second or (h, None)
    union_down_kernel[(num_blocks * cdiv(hidden_size, options["BN"]),)](
        TensorDescriptor.from_tensor(h, [options["BK"], block_m]),
        w,
        TensorDescriptor.from_tensor(h2, [options["BK"], block_m]),
        w2,
        b,
        unions.lists,
        unions.counts,
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


def chunk_tokens(intermediate_size: int) -> int:
    """Tokens processed at once: the multiple of 256 that WORKSPACE_BYTES allows, at least 256."""
    width = round_up(intermediate_size, 256)
    g_and_h = 256 * 2 * 2 * width
    bits = 256 // 32 * 4 * width
    unions = 256 // 64 * 4 * (width + 1 + width // 64 + 1)  # list, count, queue
    return 256 * max(1, WORKSPACE_BYTES // (g_and_h + bits + unions))


def _chunk(x: Tensor, y: Tensor, weights: tuple, block_m: int, activity: Tensor | None) -> None:
    """One chunk of tokens, x and y [M, K]; a function, so that its workspace is freed."""
    w_gate, w_up, w_down_t, b_gate, b_up, b_down = weights
    num_tokens, intermediate_size = len(x), len(w_up)
    w, b = (w_up, b_up) if w_gate is None else (w_gate, b_gate)
    tiles = queue(num_tokens, intermediate_size, block_m, x.device)
    g, bits = gate_bits(x, w, b, by_neuron=True, zero=tiles)
    unions = make_lists(bits, tiles, num_tokens, intermediate_size, block_m, activity)
    h = up(x, w_up, b_up, g, unions, block_m, gated=w_gate is not None)
    down(h, w_down_t, b_down, unions, y)


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
    """The layer by unions: y [M, K], M at least 1.

    x [M, K]; w_gate (or None), w_up and w_down_t [N, K] contiguous; b_gate and b_up [N], b_down [K]
    or None. g and h are rounded to x.dtype, u is not. `activity` [4] int64 counts as ops.py says.
    Workspace: 4 bytes for each token and neuron, and 9/64 more for bits and lists. Tokens are taken
    in chunks that keep it below WORKSPACE_BYTES, since the lengths of lists are not known.
    Ours, not the paper's.
    """
    weights = w_gate, w_up, w_down_t, b_gate, b_up, b_down
    y = torch.empty_like(x)
    num_tokens = len(x)
    num_chunks = cdiv(num_tokens, chunk_tokens(w_up.shape[0]))
    size = round_up(cdiv(num_tokens, num_chunks), 256)
    for x_chunk, y_chunk in zip(x.split(size), y.split(size), strict=True):
        _chunk(x_chunk, y_chunk, weights, block_tokens(num_tokens), activity)
    return y
