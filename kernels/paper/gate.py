"""The paper's gate: g = relu(x w^T + b), packed as TwELL in the product's own epilogue.

A tile of the product is one of the format: 256 neurons of a token become 256 / C words. Word 0 is
the true count of non-zeros. Each of the others is a non-zero: its 16 bits above the 16 of its
neuron. Where the count is 256 / C or more, the last non-zeros are dropped and the reader computes
the tile again. The scan and the scattered stores take more than half as long as the product, which
is why gate.py stores bits.

    x [M, K]    w [N, K]    b [N] or None    words [M, ceil(N / 256) * 256 / C] int32

Paper: App. A.1. Reference: twell.sparse.reference.gate_pack.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import cdiv, narrow, relu, with_bias
from twell.kernels.gate import tile_of, tile_product
from twell.kernels.options import GATE_GROUP, launch_options, num_processors

TILE_N = 256  # the paper's tile, and the widest product of one tensor-core instruction of Hopper
COMPRESSIONS = 2, 4, 8, 16


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
    GROUP: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The words of a queue of tiles, one tile of the product for one of the format."""
    num_row_tiles = tl.cdiv(M, BM)
    num_column_tiles = tl.cdiv(N, BN)
    for number in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, num_programs):
        row_tile, column_tile = tile_of(number, num_row_tiles, num_column_tiles, GROUP)
        columns = column_tile * BN + tl.arange(0, BN)
        token, neuron = row_tile * BM, column_tile * BN
        acc = tile_product(x_desc, w_desc, token, neuron, K, BM, BN, BK, False)
        acc = relu(with_bias(acc, b_ptr, columns, N, False))
        g = narrow(tl.where((columns < N)[None, :], acc, 0.0), x_desc.dtype)
        active = g.to(tl.float32) != 0
        # The first non-zero of a row goes to word 1, its inclusive prefix sum: word 0 is the count.
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


def check_compression(compression: int) -> None:
    """Raises ValueError for a compression that the kernels do not have."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression}, expected one of {COMPRESSIONS}")


def gate_words(x: Tensor, w: Tensor, b: Tensor | None = None, compression: int = 8) -> Tensor:
    """relu(x w^T + b), rounded to x.dtype and packed: the `words` of a PackedTwELL, tiles of 256.

    x [M, K], w [N, K] contiguous, b [N] or None, all bf16 or all fp16. Returns words as above, C =
    `compression`, 0 in unused slots. Raises ValueError for a compression other than 2, 4, 8 and 16.
    """
    check_compression(compression)
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    options = launch_options("gate_words", x.device)
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
            GROUP=GATE_GROUP,
            S=TILE_N // compression,
            BN=TILE_N,
            **options,
        )
    return words
