"""Inference with many tokens: a block of 64 or 128 tokens shares one list of neurons.

Tokens of one text activate many of the same neurons. For each block, the neurons that any of its
tokens activates become a sorted list, the union. Two tensor-core products gather the listed weight
rows, so each row is read once a block, not once a token. Entries that are inactive for a token are
computed and set to exactly 0. A list can hold all N neurons, so nothing overflows.

Lists are cut into tiles of BN neurons. Resident programs take the tiles from one queue, because
the lengths of lists differ by more than ten times. Padding fills the last tile of a list, so loads
need no masks. g and h are neuron-major: a block's part of a neuron is one contiguous line.

    x, y           [M, K], in B = ceil(M / block_m) blocks
    g, bits        by neurons: see gate.py
    lists, counts  [B, W], [B] int32, W = N rounded up to 256
    h              [B * W, block_m]

    g = relu(x w_gate^T + b_gate)    h = (x w_up^T + b_up) * g    y = h w_down_t + b_down
    without w_gate: h = g = relu(x w_up^T + b_up)

Ours, not the paper's. Reference: twell.sparse.reference.from_gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import (
    add_activity,
    cdiv,
    chunks,
    empty_output,
    hidden,
    load,
    narrow,
    popcount,
    round_up,
    scaled,
    wide,
    with_bias,
)
from twell.kernels.float8 import quantized
from twell.kernels.gate import PANEL, gate_bits
from twell.kernels.launch import descriptor, direct
from twell.kernels.options import block_tokens, launch_options, num_processors
from twell.sparse.activations import Weights

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


@direct
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
        if activity_ptr is not None:
            entries += tl.sum(popcount(bits))
            in_unions += tl.sum(tl.max(tl.reshape(some, (WORDS // 2, 2, CHUNK)), 1))
    tl.store(counts_ptr + block, total)
    place = total + tl.arange(0, STEP)
    num_tiles = tl.cdiv(total, STEP)
    tl.store(lists_ptr + place, tl.zeros((STEP,), tl.int32) + first, mask=place < num_tiles * STEP)
    place = 1 + tl.atomic_add(queue_ptr, num_tiles, sem="relaxed")
    for tile in range(0, num_tiles):
        tl.store(queue_ptr + place + tile, block * max_tiles + tile)
    if activity_ptr is not None:
        add_activity(activity_ptr, block == 0, M, entries, in_unions)


@triton.jit
def _tile(number, lists_ptr, counts_ptr, queue_ptr, width, max_tiles, BN):
    """Of a tile in the queue: block, length of its list, places in the list, neurons there."""
    tile = tl.load(queue_ptr + 1 + number)
    block = tile // max_tiles
    places = tile % max_tiles * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    neurons = tl.load(lists_ptr + block.to(tl.int64) * width + places).to(tl.int64)
    return block, count, places, neurons


@triton.jit
def listed_product(x_desc, w_ptr, token, neurons, k, K, EVEN, BM, listed=None):
    """w[neurons] x^T [BN, BM] in fp32, for BM tokens from `token` on, in steps of k [BK].

    listed [BN], if given: other rows are not read, and 0.
    """
    w_ptrs = w_ptr + neurons[:, None] * K + k[None, :]
    u = tl.zeros((neurons.shape[0], BM), tl.float32)
    for start in range(0, K, k.shape[0]):
        if listed is None:
            w = load(w_ptrs + start, (start + k < K)[None, :], EVEN)
        elif EVEN:
            w = load(w_ptrs + start, listed[:, None], False)
        else:
            w = load(w_ptrs + start, listed[:, None] & (start + k < K)[None, :], False)
        u = tl.dot(wide(w), wide(x_desc.load([token, start])).T, u)
    return u


@triton.jit
def listed_hidden(g, u, places, count, dtype, ACT):
    """h [BN, BM] of g and u in fp32, 0 where inactive or beyond `count`; u: None without a gate."""
    active = (g != 0) & (places < count)[:, None]
    # Select, do not multiply: u may be infinite where the token is inactive.
    return tl.where(active, hidden(g, u, dtype, ACT), 0.0)


@triton.jit
def _store(h_ptr, h, block, places, width, BM):
    """h [BN, BM] to its places in the block."""
    rows = block.to(tl.int64) * width + places
    h_ptrs = h_ptr + rows[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(h_ptrs, narrow(h, h_ptr.dtype.element_ty))


@direct
@triton.jit
def union_up_kernel(
    x_desc,
    w_ptr,
    b_ptr,
    x_scale_ptr,
    w_scale_ptr,
    g_ptr,
    h_ptr,
    lists_ptr,
    counts_ptr,
    queue_ptr,
    M,
    N,
    width,
    K,
    max_tiles,
    num_programs,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """h = u * g over the unions, tile by tile; without a gate h is made of g alone."""
    for number in range(tl.program_id(0), tl.load(queue_ptr), num_programs):
        block, count, places, neurons = _tile(
            number, lists_ptr, counts_ptr, queue_ptr, width, max_tiles, BN
        )
        columns = block.to(tl.int64) * BM + tl.arange(0, BM)
        of_columns = columns // PANEL * width * PANEL + columns % PANEL  # in the panels of g
        u = None
        if GATED:
            u = listed_product(x_desc, w_ptr, block * BM, neurons, tl.arange(0, BK), K, EVEN, BM)
            u = scaled(u, x_scale_ptr, w_scale_ptr, columns, neurons, M, N, True)
            u = with_bias(u, b_ptr, neurons, None, True)
        g = tl.load(g_ptr + neurons[:, None] * PANEL + of_columns[None, :]).to(tl.float32)
        h = listed_hidden(g, u, places, count, h_ptr.dtype.element_ty, ACT)
        _store(h_ptr, h, block, places, width, BM)


@direct
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
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x w^T + b over the unions, tile by tile, also at inactive entries.

    add_ptr [blocks * BM] fp32, or None, adds a number for each token. Training needs the product
    itself: u is kept, and dy w_down^T has another epilogue.
    """
    for number in range(tl.program_id(0), tl.load(queue_ptr), num_programs):
        block, _, places, neurons = _tile(
            number, lists_ptr, counts_ptr, queue_ptr, width, max_tiles, BN
        )
        u = listed_product(x_desc, w_ptr, block * BM, neurons, tl.arange(0, BK), K, EVEN, BM)
        u = with_bias(u, b_ptr, neurons, None, True)
        if add_ptr is not None:
            u += tl.load(add_ptr + block * BM + tl.arange(0, BM))[None, :]
        _store(out_ptr, u, block, places, width, BM)


@triton.jit
def add_listed(acc, h_desc, w_ptr, list_ptr, block, part, count, columns, width, K, EVEN, BK):
    """acc [BM, BN] + h, of a block's part of BM tokens, times the listed rows of w."""
    for start in range(0, count, BK):
        neurons = tl.load(list_ptr + start + tl.arange(0, BK)).to(tl.int64)
        w_ptrs = w_ptr + neurons[:, None] * K + columns[None, :]
        w = load(w_ptrs, (columns < K)[None, :], EVEN)
        h = wide(h_desc.load([block * width + start, part * acc.shape[0]]))
        acc = tl.dot(h.T, wide(w), acc)
    return acc


@triton.jit
def store_output(acc, y_ptr, token, columns, M, K):
    """acc [BM, BN] to y, from row `token` on."""
    rows = token + tl.arange(0, acc.shape[0])
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


@direct
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
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y [BM tokens, BN outputs]: h w + b over the block's list, plus h2 w2 if given."""
    num_columns = tl.cdiv(K, BN)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BN + tl.arange(0, BN)
    count = tl.load(counts_ptr + block)
    list_ptr = lists_ptr + block.to(tl.int64) * width
    acc = tl.zeros((BM, BN), tl.float32)
    acc = add_listed(acc, h_desc, w_ptr, list_ptr, block, 0, count, columns, width, K, EVEN, BK)
    if w2_ptr is not None:
        acc = add_listed(
            acc, h2_desc, w2_ptr, list_ptr, block, 0, count, columns, width, K, EVEN, BK
        )
    acc = with_bias(acc, b_ptr, columns, K, False)
    store_output(acc, y_ptr, block * BM, columns, M, K)


def _tile_neurons(block_m: int, device: torch.device) -> int:
    """Neurons of a tile."""
    return launch_options(f"union_up_{block_m}", device)["BN"]


def empty_unions(num_tokens: int, num_neurons: int, block_m: int, device: torch.device) -> Unions:
    """Tensors for `make_lists`, long enough for lists of all neurons."""
    num_blocks = cdiv(num_tokens, block_m)
    lists = num_blocks, round_up(num_neurons, 256)
    queue = 1 + num_blocks * cdiv(num_neurons, _tile_neurons(block_m, device))
    shapes = lists, num_blocks, queue
    return Unions(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def make_lists(
    bits: Tensor,
    unions: Unions,
    num_tokens: int,
    intermediate_size: int,
    block_m: int,
    activity: Tensor | None = None,
) -> None:
    """Writes the unions of blocks of `block_m` tokens, from bits by neurons of `gate_bits`.

    `gate_bits` has set the length of the queue to 0. `activity`: see `sparse_ffn`.
    """
    num_blocks, width = unions.lists.shape
    step = _tile_neurons(block_m, bits.device)
    sizes = num_tokens, intermediate_size, width, cdiv(intermediate_size, step)
    union_lists_kernel[(num_blocks,)](
        bits,
        *unions,
        activity,
        *sizes,
        WORDS=block_m // 32,
        STEP=step,
        **launch_options("union_lists", bits.device),
    )


def over_unions(
    kernel, x: Tensor, w: Tensor, rest: tuple, unions: Unions, out: Tensor, *sizes: int, **flags
) -> None:
    """Launches union_up_kernel or union_product_kernel on the tiles of the queue.

    x [M, K], w [N, K]; rest: the kernel's arguments between w and out. out [blocks * width,
    block_m]: of each block's rows the first counts[block], rounded up to whole tiles, are written.
    """
    block_m, width, hidden_size = out.shape[1], unions.lists.shape[1], x.shape[1]
    options = launch_options(f"union_up_{block_m}", x.device, fp8=w.itemsize == 1) | flags
    num_programs = min(options.pop("PER_SM") * num_processors(x.device), unions.queue.shape[0] - 1)
    sizes = *sizes, width, hidden_size, cdiv(w.shape[0], options["BN"]), num_programs
    even = hidden_size % options["BK"] == 0
    x = descriptor(x, [block_m, options["BK"]])
    kernel[(num_programs,)](x, w, *rest, out, *unions, *sizes, EVEN=even, BM=block_m, **options)


def down(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    unions: Unions,
    y: Tensor,
    second: tuple[Tensor, Tensor] | None = None,
) -> None:
    """y [M, K] = h w + b for h over the unions and w [N, K]; `second`: plus another h w."""
    num_blocks, width = unions.lists.shape
    (num_tokens, hidden_size), block_m = y.shape, h.shape[1]
    options = launch_options(f"union_down_{block_m}", h.device)
    block, even = [options["BK"], block_m], hidden_size % options["BN"] == 0
    h2, w2 = second or (None, None)
    union_down_kernel[(num_blocks * cdiv(hidden_size, options["BN"]),)](
        descriptor(h, block),
        w,
        None if h2 is None else descriptor(h2, block),
        w2,
        b,
        *unions[:2],
        y,
        *(num_tokens, width, hidden_size),
        EVEN=even,
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


def ffn(
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The layer by unions: y [M, K] of x [M, K], M at least 1.

    g and h are rounded to y.dtype, u is not. `activity`: see `sparse_ffn`. Workspace: 4
    bytes for each token and neuron, and 9/64 more for bits and lists. Tokens are taken in chunks
    that keep it below WORKSPACE_BYTES, since the lengths of lists are not known.
    """
    x, x_scale = quantized(x, x_scale, weights)
    y = empty_output(x) if out is None else out
    num_tokens, num_neurons = len(x), len(weights.w_up)
    most, fp8 = chunk_tokens(num_neurons), weights.w_up.itemsize == 1
    block_m = block_tokens(num_tokens, fp8=fp8)
    size = round_up(cdiv(num_tokens, cdiv(num_tokens, most)), 256)
    flags = dict(GATED=weights.gated, ACT=weights.act.name)
    for tokens, scale, out in chunks(size, x, x_scale, y):
        unions = empty_unions(len(tokens), num_neurons, block_m, x.device)
        scales = scale, weights.first_scale
        options = dict(zero=unions.queue, scales=scales, threshold=weights.act.threshold)
        g, bits = gate_bits(tokens, *weights.first, by_neuron=True, **options)
        make_lists(bits, unions, len(tokens), num_neurons, block_m, activity)
        h = g.new_empty(unions.lists.numel(), block_m)
        rest, sizes = (weights.b_up, scale, weights.s_up, g), (len(tokens), num_neurons)
        over_unions(union_up_kernel, tokens, weights.w_up, rest, unions, h, *sizes, **flags)
        down(h, weights.w_down_t, weights.b_down, unions, out)
        del unions, g, bits, h, rest  # before the next chunk allocates its own
    return y
