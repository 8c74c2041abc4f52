"""The gate: g = relu(x w^T + b) as one matmul whose epilogue also does the first step of what follows.

x is [M, K] and w [N, K], both row-major, with K a multiple of 16; M and N are free. In a non-gated layer w is
w_up. A fixed number of programs stays resident and takes tiles in turn. Operands come through tensor
descriptors, which give zeros outside the matrices, so the product itself needs no masks. Two epilogues:

  gate_bits   stores g dense, by tokens or by neurons (transposed), and one bit an entry that says whether it is active.
              32 bits make a word by one sum in registers, so this costs a few percent of the product; the lists of both
              fast paths are made from these words.
  gate_words  packs each row of a tile as TwELL (twell.sparse.formats.PackedTwELL), as in the paper; a tile of the matmul is
              one of the format too. The scan and the scattered stores cost more than half of the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import cdiv, config, narrow, num_processors, relu, round_up, wide

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
    token,
    neuron,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    BY_NEURON: tl.constexpr,
):
    """The tile of g, not yet rounded, that begins at (token, neuron): [BM, BN], or [BN, BM] if BY_NEURON.

    0 beyond neuron N but for tokens with NaN.
    """
    acc = tl.zeros((BN, BM) if BY_NEURON else (BM, BN), tl.float32)
    neurons = neuron + tl.arange(0, BN)
    for k in range(0, K, BK):
        x = wide(x_desc.load([token, k]))
        w = wide(w_desc.load([neuron, k]))
        acc = tl.dot(w, x.T, acc) if BY_NEURON else tl.dot(x, w.T, acc)
    if BIAS:
        b = tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)
        acc += b[:, None] if BY_NEURON else b[None, :]
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
        acc = _gate_tile(
            x_desc, w_desc, b_ptr, row_tile * BM, column_tile * BN, N, K, BM, BN, BK, BIAS, False
        )
        g = narrow(tl.where((columns < N)[None, :], acc, 0.0), x_desc.dtype)
        active = g.to(tl.float32) != 0
        # Word 0 is the count, so the first non-zero of a row goes to word 1: its inclusive prefix sum.
        slot = tl.cumsum(active.to(tl.int32), 1)
        words = (g.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | columns.to(tl.uint32)[None, :]
        rows = row_tile * BM + tl.arange(0, BM)
        inside = (rows < M)[:, None]
        tile_ptr = words_ptr + ((rows.to(tl.int64) * num_column_tiles + column_tile) * S)[:, None]
        tl.store(
            tile_ptr + slot, words.to(tl.int32, bitcast=True), mask=active & (slot < S) & inside
        )
        count = tl.sum(active.to(tl.int32), 1)[:, None]
        slots = tl.arange(0, S)[None, :]
        rest = (slots == 0) | (slots > count)
        tl.store(tile_ptr + slots, tl.where(slots == 0, count, 0), mask=rest & inside)


@triton.jit(do_not_specialize=["M", "N"])
def gate_bits_kernel(
    x_desc,
    w_desc,
    b_ptr,
    g_desc,
    bits_ptr,
    zero_ptr,
    M,
    N,
    K,
    bits_stride,
    num_programs,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BY_NEURON: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    if ZERO:
        if tl.program_id(0) == 0:
            tl.store(zero_ptr, 0)
    num_token_tiles = tl.cdiv(M, BM)
    num_neuron_tiles = tl.cdiv(N, BN)
    ROWS: tl.constexpr = BN if BY_NEURON else BM
    WORDS: tl.constexpr = (BM if BY_NEURON else BN) // 32
    for number in tl.range(
        tl.program_id(0), num_token_tiles * num_neuron_tiles, num_programs, flatten=True
    ):
        token_tile, neuron_tile = _tile_of(number, num_token_tiles, num_neuron_tiles)
        token, neuron = token_tile * BM, neuron_tile * BN
        acc = _gate_tile(x_desc, w_desc, b_ptr, token, neuron, N, K, BM, BN, BK, BIAS, BY_NEURON)
        g = narrow(acc, x_desc.dtype)
        row, column = (neuron, token) if BY_NEURON else (token, neuron)
        g_desc.store([row, column], g)
        active = (g.to(tl.uint16, bitcast=True).to(tl.int32) & 0x7FFF) != 0  # not 0 and not -0
        place = tl.arange(0, 32)[None, None, :]
        bits = tl.sum(tl.reshape(active.to(tl.int32), (ROWS, WORDS, 32)) << place, 2)
        # What is beyond the last column may hold relu(bias) or NaN, and is not active.
        words = column // 32 + tl.arange(0, WORDS)
        inside = (M if BY_NEURON else N) - words * 32
        bits &= tl.where(inside >= 32, -1, (1 << tl.minimum(tl.maximum(inside, 0), 31)) - 1)[
            None, :
        ]
        rows = row + tl.arange(0, ROWS)
        if BY_NEURON:
            tl.store(bits_ptr + words.to(tl.int64)[None, :] * bits_stride + rows[:, None], bits)
        else:
            tl.store(bits_ptr + rows.to(tl.int64)[:, None] * bits_stride + words[None, :], bits)


def _check_gate(x: Tensor, w: Tensor, b: Tensor | None) -> None:
    if x.shape[1] != w.shape[1] or x.shape[1] % 16:
        raise ValueError(
            f"x has {x.shape[1]} columns and w {w.shape[1]}; expected one multiple of 16"
        )
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
    num_column_tiles = cdiv(intermediate_size, TILE_N)
    words = torch.empty(
        num_tokens, num_column_tiles * (TILE_N // compression), dtype=torch.int32, device=x.device
    )
    if num_tokens:
        num_programs = min(
            num_processors(x.device), cdiv(num_tokens, options["BM"]) * num_column_tiles
        )
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


def gate_bits(
    x: Tensor, w: Tensor, b: Tensor | None, *, by_neuron: bool, zero: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """relu(x w^T + b) dense, by tokens or by neurons, and a bit for each entry: whether it is active.

    x [M, K], w [N, K] contiguous, b [N] or None, all bf16 or all fp16; M at least 1. Returns g in x.dtype and the
    bits, 32 to a word of int32, the lowest first:

        by tokens    g [M, width], bits [tokens, words]: bit i of bits[m, j] is neuron 32 j + i of token m
        by neurons   g [N, tokens], bits [tokens / 32, width]: bit i of bits[j, n] is token 32 j + i of neuron n

    with `tokens` M rounded up to whole tiles (by neurons at least to a multiple of 128), and width >= N. Bits of columns
    outside x or w are 0; other entries outside may be anything. The first entry of `zero` is set to 0 on the way, which
    saves its owner a launch. Raises ValueError for shapes that do not fit. Ours: the paper packs each row at once
    (App. A.1), which costs more than these words and one more pass.
    """
    _check_gate(x, w, b)
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    options = config("gate_neurons" if by_neuron else "gate_tokens", x.device)
    tokens, width = round_up(num_tokens, options["BM"]), round_up(intermediate_size, 256)
    if by_neuron:
        g, block = x.new_empty(intermediate_size, tokens), [options["BN"], options["BM"]]
        bits = torch.empty(tokens // 32, width, dtype=torch.int32, device=x.device)
    else:
        g, block = x.new_empty(num_tokens, width), [options["BM"], options["BN"]]
        bits = torch.empty(tokens, width // 32, dtype=torch.int32, device=x.device)
    num_tiles = cdiv(num_tokens, options["BM"]) * cdiv(intermediate_size, options["BN"])
    num_programs = min(num_processors(x.device), num_tiles)
    gate_bits_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [options["BM"], options["BK"]]),
        TensorDescriptor.from_tensor(w, [options["BN"], options["BK"]]),
        b,
        TensorDescriptor.from_tensor(g, block),
        bits,
        zero,
        num_tokens,
        intermediate_size,
        hidden_size,
        bits.shape[1],
        num_programs,
        ZERO=zero is not None,
        BIAS=b is not None,
        BY_NEURON=by_neuron,
        **options,
    )
    return g, bits
