"""The gate: g = relu(x w^T + b) as one matmul whose epilogue also does the first step of what follows.

x is [M, K] and w [N, K], both row-major, with K a multiple of 16; M and N are free. In a non-gated layer w is
w_up. A fixed number of programs stays resident and takes tiles in turn. Operands come through tensor
descriptors, which give zeros outside the matrices, so the product itself needs no masks. Two epilogues:

  gate_words  packs each row of a tile as TwELL (twell.format.PackedTwELL); a tile of the matmul is one of the
              format too.
  gate_flags  stores g dense, and for each block of tokens and each neuron whether any of the tokens has it
              active.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import config, narrow, num_processors, relu, round_up, wide

TILE_N = 256  # the TwELL tile of the paper, and the widest product that a tensor core of Hopper does at once
COMPRESSIONS = 2, 4, 8, 16
# Tiles are taken in columns of GROUP row tiles, so that resident programs share rows of x and w in the cache.
GROUP = tl.constexpr(8)


@triton.jit
def _tile_of(number, num_row_tiles, num_column_tiles):
    """Row and column of a tile by its number."""
    per_group = GROUP * num_column_tiles
    first = number // per_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    return first + number % per_group % height, number % per_group // height


@triton.jit
def _gate_tile(
    x_desc,
    w_desc,
    b_ptr,
    row,
    column,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The tile [BM, BN] of g that begins at (row, column), not yet rounded; 0 beyond column N but for rows with NaN."""
    acc = tl.zeros((BM, BN), tl.float32)
    columns = column + tl.arange(0, BN)
    for k in range(0, K, BK):
        acc = tl.dot(wide(x_desc.load([row, k])), wide(w_desc.load([column, k])).T, acc)
    if BIAS:
        acc += tl.load(b_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return relu(acc)


@triton.jit(do_not_specialize=["M", "N"])
def gate_words_kernel(
    x_desc,
    w_desc,
    b_ptr,
    words_ptr,
    M,
    N,
    K,
    num_programs,
    BIAS: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    num_row_tiles = tl.cdiv(M, BM)
    num_column_tiles = tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, num_programs):
        row_tile, column_tile = _tile_of(number, num_row_tiles, num_column_tiles)
        columns = column_tile * BN + tl.arange(0, BN)
        acc = _gate_tile(x_desc, w_desc, b_ptr, row_tile * BM, column_tile * BN, N, K, BM, BN, BK, BIAS)
        g = narrow(tl.where((columns < N)[None, :], acc, 0.0), x_desc.dtype)
        active = g.to(tl.float32) != 0
        # Word 0 is the count, so the first non-zero of a row goes to word 1: its inclusive prefix sum.
        slot = tl.cumsum(active.to(tl.int32), 1)
        words = (g.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | columns.to(tl.uint32)[None, :]
        rows = row_tile * BM + tl.arange(0, BM)
        inside = (rows < M)[:, None]
        tile_ptr = words_ptr + ((rows.to(tl.int64) * num_column_tiles + column_tile) * S)[:, None]
        tl.store(tile_ptr + slot, words.to(tl.int32, bitcast=True), mask=active & (slot < S) & inside)
        count = tl.sum(active.to(tl.int32), 1)[:, None]
        slots = tl.arange(0, S)[None, :]
        rest = (slots == 0) | (slots > count)
        tl.store(tile_ptr + slots, tl.where(slots == 0, count, 0), mask=rest & inside)


@triton.jit(do_not_specialize=["M", "N"])
def gate_flags_kernel(
    x_desc,
    w_desc,
    b_ptr,
    g_desc,
    flags_ptr,
    M,
    N,
    K,
    width,
    num_programs,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    num_row_tiles = tl.cdiv(M, BM)
    num_column_tiles = tl.cdiv(N, BN)
    BLOCKS: tl.constexpr = BM // BLOCK_M
    for number in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, num_programs, flatten=True):
        row_tile, column_tile = _tile_of(number, num_row_tiles, num_column_tiles)
        columns = column_tile * BN + tl.arange(0, BN)
        acc = _gate_tile(x_desc, w_desc, b_ptr, row_tile * BM, column_tile * BN, N, K, BM, BN, BK, BIAS)
        g_desc.store([row_tile * BM, column_tile * BN], narrow(acc, x_desc.dtype))
        # Rounding keeps order, so only the largest value of a block is rounded and compared with 0. As integers values
        # that are not negative stand in the same order, with NaN (its sign removed) above all.
        bits = acc.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if BIAS:  # rows beyond M hold relu(bias); they are no tokens and flag nothing
            bits = tl.where((row_tile * BM + tl.arange(0, BM) < M)[:, None], bits, 0)
        largest = tl.max(tl.reshape(bits, (BLOCKS, BLOCK_M, BN)), 1).to(tl.float32, bitcast=True)
        flags = narrow(largest, x_desc.dtype).to(tl.float32) != 0
        blocks = row_tile * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(flags_ptr + blocks.to(tl.int64)[:, None] * width + columns[None, :], flags.to(tl.int8))


def _check_gate(x: Tensor, w: Tensor, b: Tensor | None) -> None:
    if x.shape[1] != w.shape[1] or x.shape[1] % 16:
        raise ValueError(f"x has {x.shape[1]} columns and w {w.shape[1]}; expected one multiple of 16")
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"the bias has shape {tuple(b.shape)}, expected {tuple(w.shape[:1])}")


def gate_words(x: Tensor, w: Tensor, b: Tensor | None = None, compression: int = 8) -> Tensor:
    """relu(x w^T + b), rounded to x.dtype and packed: the `words` of a PackedTwELL with tiles of 256.

    x [M, K], w [N, K] contiguous, b [N] or None, all bf16 or all fp16. Returns [M, ceil(N / 256) * S] int32,
    S = 256 // compression: per row and tile the true count and the first S - 1 non-zeros, 0 in unused slots.
    A tile with a count of S or more has lost the rest; the row-wise kernel computes it again. Raises
    ValueError for a compression other than 2, 4, 8 and 16 or for shapes that do not fit. Paper: App. A.1,
    TwELL in the epilogue.
    """
    _check_gate(x, w, b)
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression}, expected one of {COMPRESSIONS}")
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    options = config("gate_words", x.device)
    num_column_tiles = triton.cdiv(intermediate_size, TILE_N)
    words = torch.empty(num_tokens, num_column_tiles * (TILE_N // compression), dtype=torch.int32, device=x.device)
    if num_tokens:
        num_programs = min(num_processors(x.device), triton.cdiv(num_tokens, options["BM"]) * num_column_tiles)
        gate_words_kernel[(num_programs,)](
            TensorDescriptor.from_tensor(x, [options["BM"], options["BK"]]),
            TensorDescriptor.from_tensor(w, [TILE_N, options["BK"]]),
            b,
            words,
            num_tokens,
            intermediate_size,
            hidden_size,
            num_programs,
            BIAS=b is not None,
            S=TILE_N // compression,
            BN=TILE_N,
            **options,
        )
    return words


def gate_flags(x: Tensor, w: Tensor, b: Tensor | None, block_m: int) -> tuple[Tensor, Tensor]:
    """relu(x w^T + b) dense, and which neurons are active for any token of each block of `block_m`.

    x [M, K], w [N, K] contiguous, b [N] or None, all bf16 or all fp16; M at least 1. Returns g [rows, width]
    in x.dtype and flags [rows / block_m, width] int8. rows is M rounded up to whole tiles, width N rounded up
    to a multiple of 256; what is beyond column N is anything, what is beyond row M flags nothing. Raises
    ValueError for shapes that do not fit. Ours: the paper packs each row (App. A.1).
    """
    _check_gate(x, w, b)
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    options = config("gate_flags", x.device)
    rows, width = round_up(num_tokens, options["BM"]), round_up(intermediate_size, 256)
    g = x.new_empty(rows, width)
    flags = torch.empty(rows // block_m, width, dtype=torch.int8, device=x.device)
    num_tiles = rows // options["BM"] * triton.cdiv(intermediate_size, options["BN"])
    num_programs = min(num_processors(x.device), num_tiles)
    gate_flags_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [options["BM"], options["BK"]]),
        TensorDescriptor.from_tensor(w, [options["BN"], options["BK"]]),
        b,
        TensorDescriptor.from_tensor(g, [options["BM"], options["BN"]]),
        flags,
        num_tokens,
        intermediate_size,
        hidden_size,
        width,
        num_programs,
        BIAS=b is not None,
        BLOCK_M=block_m,
        **options,
    )
    return g, flags
