"""The paper's row-wise kernel: the up and down projections of one token, from TwELL words.

As kernels/rowwise.py, but a token's neurons come in tiles of 256 with 256 / C words (gate.py of
this folder), continued in `rest`.

    x, y [M, K]    words, rest: see gate.py

    g = relu(x w_gate^T + b_gate)    y = ((x w_up^T + b_up) * g) w_down_t + b_down
    without w_gate: y = relu(x w_up^T + b_up) w_down_t + b_down

Paper: App. A.1. Reference: twell.sparse.reference.from_gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, chunks, load, narrow, next_power_of_2
from twell.kernels.launch import direct
from twell.kernels.options import launch_options
from twell.kernels.paper.gate import TILE_N, store_words
from twell.kernels.rowwise import add_neuron, chunk_tokens, row_block, row_of
from twell.sparse.activations import Weights


@direct
@triton.jit(do_not_specialize=["rest"])
def twell_rowwise_kernel(
    x_ptr,
    words_ptr,
    rest,
    wu_ptr,
    bu_ptr,
    wd_ptr,
    bd_ptr,
    y_ptr,
    num_tiles,
    K,
    TILE: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
):
    """BK outputs of one token: the sum over the words of its tiles."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    x = load(x_ptr + row * K + k, inside, EVEN).to(tl.float32)
    acc = tl.zeros((BK,), tl.float32)
    rest_ptr = words_ptr + rest + row * num_tiles * TILE
    words_ptr += row * num_tiles * S
    # All counts at once: this brings the first words of every tile to the cache, too.
    tiles = tl.arange(0, TILES)
    counts = tl.load(words_ptr + tiles * S, mask=tiles < num_tiles, other=0)
    for tile in range(tl.where(tl.max(counts, 0) > 0, num_tiles, 0)):
        for slot in range(1, tl.load(words_ptr + tile * S) + 1):
            word_ptr = words_ptr + tile * S + slot
            if slot >= S:
                word_ptr = rest_ptr + tile * TILE + slot - S
            word = tl.load(word_ptr)
            up = row_of(word, wu_ptr, k, inside, K, EVEN) if GATED else None
            acc = add_neuron(
                acc, word, up, x, bu_ptr, None, wd_ptr, k, inside, K, dtype, GATED, "relu", EVEN
            )
    if bd_ptr is not None:
        acc += tl.load(bd_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * K + k, narrow(acc, dtype), mask=inside)


def ffn(x: Tensor, weights: Weights, compression: int = 8) -> Tensor:
    """The layer by rows from TwELL: y [M, K] of x [M, K], M at least 1; u and h are not rounded.

    Workspace: 4 + 4 / C bytes for each token and neuron, 2 more where the words are made from bits,
    in chunks of about WORKSPACE_BYTES.
    """
    hidden_size, num_tiles = x.shape[1], cdiv(len(weights.w_up), TILE_N)
    num_slots = TILE_N // compression
    options = launch_options("twell_rowwise", x.device) | row_block(hidden_size, weights.gated)
    y = torch.empty_like(x)
    size = chunk_tokens(num_tiles * TILE_N)
    for x_chunk, y_chunk in chunks(size, x, y):
        rest = len(x_chunk) * num_tiles * num_slots
        words = torch.empty(
            rest + len(x_chunk) * num_tiles * TILE_N, dtype=torch.int32, device=x.device
        )
        store_words(x_chunk, *weights.first, words, num_slots, rest)
        twell_rowwise_kernel[(len(x_chunk), cdiv(hidden_size, options["BK"]))](
            x_chunk,
            words,
            rest,
            weights.w_up,
            weights.b_up,
            weights.w_down_t,
            weights.b_down,
            y_chunk,
            num_tiles,
            hidden_size,
            TILE=TILE_N,
            S=num_slots,
            TILES=next_power_of_2(num_tiles),
            **options,
        )
        del words  # before the next chunk allocates its own
    return y
