"""Up and down projections of one token at a time, from TwELL: only its active neurons' weights are read.

One program holds a row of x and the sum for its row of y in registers. For each active neuron n it reads row
n of w_up, whose product with x gives u, and adds g u times row n of w_down^T. h is never written. Rows are
independent of one another, so neither a NaN nor the company a token keeps changes its result.

Overflow: a tile whose count does not fit its slots has lost non-zeros. The same program then computes the
tile's 256 gate values again from x and the gate's weights, and goes on with those. Nothing is lost, no second
launch, no memory and no word to the host are needed; only that tile of that row takes longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import config, narrow, relu
from twell.kernels.gate import TILE_N, gate_words


@triton.jit
def _dots(x_ptr, w_ptr, b_ptr, neurons, wanted, K, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The products [BN] in fp32 of one token with these neurons' weight rows, 0 for those not wanted."""
    acc = tl.zeros((BN,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        place = neurons.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(w_ptr + place, mask=wanted[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        acc += tl.sum(w * x[None, :], 1)
    if BIAS:
        acc += tl.load(b_ptr + neurons, mask=wanted, other=0.0).to(tl.float32)
    return tl.where(wanted, acc, 0.0)


@triton.jit(do_not_specialize=["N"])
def up_down_kernel(
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
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_UP: tl.constexpr,
    BIAS_DOWN: tl.constexpr,
    TILE: tl.constexpr,
    S: tl.constexpr,
    BK: tl.constexpr,
    AGAIN_N: tl.constexpr,
    AGAIN_K: tl.constexpr,
):
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    x_ptr += row * K
    x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros((BK,), tl.float32)
    num_tiles = tl.cdiv(N, TILE)
    words_ptr += row * num_tiles * S
    for tile in range(num_tiles):
        count = tl.load(words_ptr + tile * S)
        if count < S:
            for slot in range(1, count + 1):
                word = tl.load(words_ptr + tile * S + slot)
                neuron = word & 0xFFFF
                h = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                weights = neuron.to(tl.int64) * K + k
                down = tl.load(wd_ptr + weights, mask=inside, other=0.0).to(tl.float32)
                if GATED:
                    u = tl.sum(x * tl.load(wu_ptr + weights, mask=inside, other=0.0).to(tl.float32), 0)
                    if BIAS_UP:
                        u += tl.load(bu_ptr + neuron).to(tl.float32)
                    h *= u
                acc += h * down
        else:
            for first in range(tile * TILE, tl.minimum(tile * TILE + TILE, N), AGAIN_N):
                neurons = first + tl.arange(0, AGAIN_N)
                h = _dots(x_ptr, w_ptr, b_ptr, neurons, neurons < N, K, BIAS, AGAIN_N, AGAIN_K)
                h = narrow(relu(h), dtype).to(tl.float32)
                active = h != 0
                if tl.max(active.to(tl.int32), 0) != 0:
                    if GATED:
                        h *= _dots(x_ptr, wu_ptr, bu_ptr, neurons, active, K, BIAS_UP, AGAIN_N, AGAIN_K)
                    weights = neurons.to(tl.int64)[:, None] * K + k[None, :]
                    down = tl.load(wd_ptr + weights, mask=active[:, None] & inside[None, :], other=0.0)
                    acc += tl.sum(h[:, None] * down.to(tl.float32), 0)
    if BIAS_DOWN:
        acc += tl.load(bd_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * K + k, narrow(acc, dtype), mask=inside)


def up_down(
    x: Tensor,
    words: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int,
) -> Tensor:
    """y [M, K] from `words`, which `gate_words` made of this x with w_gate, in a non-gated layer with w_up.

    x [M, K]; weights [N, K] contiguous, w_down_t the transpose of w_down; biases [N], [N], [K] or None. u and
    h are not rounded. Paper: App. A.1.
    """
    num_tokens, hidden_size = x.shape
    gated = w_gate is not None
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    # Down alone keeps nothing of x, and two programs to a row, each with half of it, hide the loads better.
    block_k = triton.next_power_of_2(hidden_size) // (1 if gated else 2)
    y = torch.empty_like(x)
    if num_tokens:
        up_down_kernel[(num_tokens, triton.cdiv(hidden_size, block_k))](
            x,
            words,
            w,
            b,
            w_up,
            b_up,
            w_down_t,
            b_down,
            y,
            w_up.shape[0],
            hidden_size,
            GATED=gated,
            BIAS=b is not None,
            BIAS_UP=gated and b_up is not None,
            BIAS_DOWN=b_down is not None,
            TILE=TILE_N,
            S=TILE_N // compression,
            BK=block_k,
            # 32 values of x and 32 of the sum in a thread; more warps only make the sums over K dearer.
            num_warps=min(max(block_k // 1024, 1), 16),
            **config("rowwise", x.device),
        )
    return y


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int,
) -> Tensor:
    """The layer by rows: `gate_words`, then `up_down`, whose docstrings give the shapes."""
    w, b = (w_up, b_up) if w_gate is None else (w_gate, b_gate)
    words = gate_words(x, w, b, compression)
    return up_down(x, words, w_gate, w_up, w_down_t, b_gate, b_up, b_down, compression)
