"""The paper's row-wise kernel: the up and down projections of one token, from TwELL words.

As kernels/rowwise.py, but a token's neurons come in tiles of 256 with 256 / C words (gate.py of
this folder). A tile whose count does not fit its slots has lost non-zeros. The same program then
computes the tile's 256 gate values again from x and the gate's weights and continues with those.
Nothing is lost, without a second launch, memory or a message to the host. But the registers of
this branch cost every other row half of its speed.

    x, y [M, K]    words [M, ceil(N / 256) * 256 / C] int32

    g = relu(x w_gate^T + b_gate)    y = ((x w_up^T + b_up) * g) w_down_t + b_down
    without w_gate: y = relu(x w_up^T + b_up) w_down_t + b_down

Paper: App. A.1. Reference: twell.sparse.reference.up_down, down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv, load, narrow, relu
from twell.kernels.options import launch_options
from twell.kernels.paper.gate import TILE_N, gate_words
from twell.kernels.rowwise import add_neuron, row_block
from twell.sparse.activations import Weights


@triton.jit
def _dots(x_ptr, w_ptr, b_ptr, neurons, wanted, K, BN, BK):
    """x w[neurons]^T + b[neurons] [BN] in fp32 for one token, 0 where not wanted."""
    acc = tl.zeros((BN,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        place = neurons.to(tl.int64)[:, None] * K + k[None, :]
        mask = wanted[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + place, mask=mask, other=0.0).to(tl.float32)
        acc += tl.sum(w * x[None, :], 1)
    if b_ptr is not None:
        acc += tl.load(b_ptr + neurons, mask=wanted, other=0.0).to(tl.float32)
    return tl.where(wanted, acc, 0.0)


@triton.jit(do_not_specialize=["N", "TILE"])
def twell_rowwise_kernel(
    x_ptr,
    words_ptr,
    w_ptr,
    b_ptr,
    wu_ptr,
    bu_ptr,
    wd_ptr,
    bd_ptr,
    y_ptr,
    N,
    K,
    TILE,
    S,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
    AGAIN_N: tl.constexpr,
    AGAIN_K: tl.constexpr,
):
    """BK outputs of one token: the sum over its tiles, each from its words or computed again."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    x_ptr += row * K
    x = load(x_ptr + k, inside, EVEN).to(tl.float32)
    acc = tl.zeros((BK,), tl.float32)
    num_tiles = tl.cdiv(N, TILE)
    words_ptr += row * num_tiles * S
    for tile in range(num_tiles):
        count = tl.load(words_ptr + tile * S)
        listed = tl.where(count < S, count, 0)
        for slot in range(1, listed + 1):
            word = tl.load(words_ptr + tile * S + slot)
            acc = add_neuron(
                acc, word, x, wu_ptr, bu_ptr, None, wd_ptr, k, inside, K, dtype, GATED, "relu", EVEN
            )
        if listed != count:
            for first in range(tile * TILE, tl.minimum(tile * TILE + TILE, N), AGAIN_N):
                neurons = first + tl.arange(0, AGAIN_N)
                h = _dots(x_ptr, w_ptr, b_ptr, neurons, neurons < N, K, AGAIN_N, AGAIN_K)
                h = narrow(relu(h), dtype).to(tl.float32)
                active = h != 0
                if tl.max(active.to(tl.int32), 0) != 0:
                    if GATED:
                        h *= _dots(x_ptr, wu_ptr, bu_ptr, neurons, active, K, AGAIN_N, AGAIN_K)
                    weights = neurons.to(tl.int64)[:, None] * K + k[None, :]
                    mask = active[:, None] & inside[None, :]
                    down = tl.load(wd_ptr + weights, mask=mask, other=0.0).to(tl.float32)
                    acc += tl.sum(h[:, None] * down, 0)
    if bd_ptr is not None:
        acc += tl.load(bd_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * K + k, narrow(acc, dtype), mask=inside)


def ffn(x: Tensor, weights: Weights, compression: int = 8) -> Tensor:
    """The layer by rows from TwELL: y [M, K] of x [M, K], M at least 1; u and h are not rounded."""
    num_tokens, hidden_size = x.shape
    words = gate_words(x, *weights.first, compression)
    options = launch_options("twell_rowwise", x.device) | row_block(hidden_size, weights.gated)
    y = torch.empty_like(x)
    twell_rowwise_kernel[(num_tokens, cdiv(hidden_size, options["BK"]))](
        x,
        words,
        *weights.first,
        weights.w_up,
        weights.b_up,
        weights.w_down_t,
        weights.b_down,
        y,
        len(weights.w_up),
        hidden_size,
        TILE_N,
        TILE_N // compression,
        **options,
    )
    return y
