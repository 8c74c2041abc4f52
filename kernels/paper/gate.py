"""The paper's gate: g = relu(x w^T + b), packed as TwELL in the product's own epilogue.

A tile of the product is one of the format: 256 neurons of a token become 256 / C words. Word 0 is
the true count of non-zeros. Each of the others is a non-zero: its 16 bits above the 16 of its
neuron. A tile with 256 / C or more has no room for the last ones, which go to `rest`; nothing else
of that is touched. On sm_90, gate_hopper.py computes the same words. Here the scan and the
scattered stores take more than half as long as the product.

    x [M, K]    w [N, K]    b [N] or None    T = ceil(N / 256)
    words [M, T * 256 / C] int32    rest [M, T * 256] int32, behind them in one buffer

Paper: App. A.1; `rest` is ours. Reference: twell.sparse.reference.gate_pack.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, narrow, relu, with_bias
from twell.kernels.gate import tile_of, tile_product
from twell.kernels.launch import descriptor, direct
from twell.kernels.options import (
    GATE_GROUP,
    hopper_gate,
    hopper_name,
    launch_options,
    num_processors,
)

TILE_N = 256  # the paper's tile, and the widest product of one tensor-core instruction of Hopper
COMPRESSIONS = 2, 4, 8, 16


@direct
@triton.jit(do_not_specialize=["M", "N"])
def gate_words_kernel(
    x_desc,
    w_desc,
    b_ptr,
    words_ptr,
    rest,
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
        tiles = (rows.to(tl.int64) * num_column_tiles + column_tile)[:, None]
        words = words.to(tl.int32, bitcast=True)
        tl.store(words_ptr + tiles * S + slot, words, mask=active & (slot < S) & inside)
        if rest is not None:
            rest_ptrs = words_ptr + rest + tiles * BN + slot - S
            tl.store(rest_ptrs, words, mask=active & (slot >= S) & inside)
        count = tl.sum(active.to(tl.int32), 1)[:, None]
        tl.store(words_ptr + tiles * S, count, mask=inside)


def check_compression(compression: int) -> None:
    """Raises ValueError for a compression that the kernels do not have."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression}, expected one of {COMPRESSIONS}")


def gate_words(x: Tensor, w: Tensor, b: Tensor | None = None, compression: int = 8) -> Tensor:
    """relu(x w^T + b), rounded to x.dtype and packed: the `words` of a PackedTwELL, tiles of 256.

    x [M, K], w [N, K] contiguous, b [N] or None, all bf16 or all fp16. Returns words as above, C =
    `compression`, 0 in unused slots; non-zeros without a slot are dropped. Raises ValueError for a
    compression other than 2, 4, 8 and 16.
    """
    check_compression(compression)
    words = torch.zeros(
        len(x), cdiv(len(w), TILE_N) * (TILE_N // compression), dtype=torch.int32, device=x.device
    )
    if len(x):
        store_words(x, w, b, words, TILE_N // compression, None)
    return words


def store_words(
    x: Tensor, w: Tensor, b: Tensor | None, words: Tensor, num_slots: int, rest: int | None
) -> None:
    """Writes words of tiles with `num_slots` slots; the others to words[rest:] unless it is None.

    Unused slots stay as they are.
    """
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    num_column_tiles = cdiv(intermediate_size, TILE_N)
    hopper = words.numel() < 2**31  # its places are int32
    hopper = hopper and hopper_gate(num_tokens, w, x.device, by_neuron=False, bias=b is not None)
    options = launch_options(hopper_name(False) if hopper else "gate_words", x.device)
    options = {"GROUP": GATE_GROUP, "S": num_slots} | options
    num_tiles = cdiv(num_tokens, options["BM"]) * num_column_tiles
    num_programs = min(num_processors(x.device), num_tiles)
    sizes = num_tokens, intermediate_size, hidden_size
    of_x, of_w = [options["BM"], options["BK"]], [TILE_N, options["BK"]]
    if hopper:
        from twell.kernels.gate_hopper import blocks, gate_hopper_kernel

        given = None, None, None, rest, words, None, None, *sizes, num_column_tiles, num_programs
        gate_hopper_kernel[(num_programs,)](
            blocks(x, of_x), blocks(w, of_w), *given, BY_NEURON=False, **options
        )
    else:
        descriptors = descriptor(x, of_x), descriptor(w, of_w)
        gate_words_kernel[(num_programs,)](
            *descriptors, b, words, rest, *sizes, num_programs, **options
        )
