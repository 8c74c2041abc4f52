"""Up and down projections of one token at a time: only its active neurons' weights are read.

One program holds a row of x and the sum for its row of y in registers. For each active neuron n it reads row
n of w_up, whose product with x gives u, and adds g u times row n of w_down^T. h is never written. Rows are
independent of one another, so neither a NaN nor the company a token keeps changes its result.

The active neurons come in one of two layouts of the same words (value in the high 16 bits, neuron in the low
ones; the first word of each tile is its count):

  lists   one tile for the whole row, as long as the row may need: nothing can overflow. Made from the gate's bits by a
          kernel of its own, which costs less than a scan in the gate's epilogue.
  TwELL   tiles of 256 neurons with 256 / C words, packed by the gate's epilogue as in the paper. A tile whose count
          does not fit its slots has lost non-zeros. The same program then computes the tile's 256 gate values
          again from x and the gate's weights, and goes on with those. Nothing is lost, no second launch, no memory and no
          word to the host are needed; but the registers for it cost every other row half of its speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import (
    cdiv,
    config,
    launch_options,
    narrow,
    next_power_of_2,
    popcount,
    relu,
    round_up,
)
from twell.kernels.gate import TILE_N, gate_bits, gate_words

# For g and the lists: tokens are taken in chunks that keep them within it (or 256 at a time).
WORKSPACE_BYTES = 2**30


@triton.jit
def lists_kernel(g_ptr, bits_ptr, words_ptr, N, width, stride, WORDS: tl.constexpr):
    """Packs one token: words[0] is its number of active neurons, the following ones are these."""
    row = tl.program_id(0).to(tl.int64)
    place_in_row = tl.arange(0, WORDS)
    num_words = tl.cdiv(N, 32)
    bits = tl.load(
        bits_ptr + row * (width // 32) + place_in_row, mask=place_in_row < num_words, other=0
    )
    count = popcount(bits)
    place = 1 + tl.cumsum(count, 0) - count
    words_ptr += row * stride
    tl.store(words_ptr, tl.sum(count, 0))
    # Each lane takes one bit of its word at a time, the lowest first.
    for _ in range(0, tl.max(count, 0)):
        lowest = bits & -bits
        bits ^= lowest
        neurons = place_in_row * 32 + popcount(lowest - 1)
        g = tl.load(g_ptr + row * width + neurons, mask=lowest != 0, other=0.0)
        words = (g.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | neurons.to(tl.uint32)
        tl.store(words_ptr + place, words.to(tl.int32, bitcast=True), mask=lowest != 0)
        place += 1


@triton.jit
def _or(a, b):
    return a | b


@triton.jit(do_not_specialize=["M"])
def count_kernel(bits_ptr, activity_ptr, M, N, stride, WORDS: tl.constexpr):
    """Adds a block's tokens, itself, its active entries and its union to `activity`."""
    first = tl.program_id(0) * 64
    rows = (first + tl.arange(0, 64)).to(tl.int64)
    place = tl.arange(0, WORDS)
    inside = (rows < M)[:, None] & (place < tl.cdiv(N, 32))[None, :]
    bits = tl.load(bits_ptr + rows[:, None] * stride + place[None, :], mask=inside, other=0)
    tl.atomic_add(activity_ptr, tl.minimum(M - first, 64).to(tl.int64), sem="relaxed")
    tl.atomic_add(activity_ptr + 1, tl.full((), 1, tl.int64), sem="relaxed")
    tl.atomic_add(activity_ptr + 2, tl.sum(popcount(bits)).to(tl.int64), sem="relaxed")
    union = tl.reduce(bits, 0, _or)
    tl.atomic_add(activity_ptr + 3, tl.sum(popcount(union), 0).to(tl.int64), sem="relaxed")


@triton.jit
def _dots(
    x_ptr, w_ptr, b_ptr, neurons, wanted, K, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """The products [BN] in fp32 of one token with these neurons' weight rows, 0 for those not wanted."""
    acc = tl.zeros((BN,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        place = neurons.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(w_ptr + place, mask=wanted[:, None] & (k < K)[None, :], other=0.0).to(
            tl.float32
        )
        acc += tl.sum(w * x[None, :], 1)
    if BIAS:
        acc += tl.load(b_ptr + neurons, mask=wanted, other=0.0).to(tl.float32)
    return tl.where(wanted, acc, 0.0)


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    """In fp32. A mask costs the loads of this kernel a third of their speed, so it is left out where it can be."""
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N", "TILE"])
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
    TILE,
    S,
    AGAIN: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
    AGAIN_N: tl.constexpr,
    AGAIN_K: tl.constexpr,
):
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    x_ptr += row * K
    x = _load(x_ptr + k, inside, EVEN)
    acc = tl.zeros((BK,), tl.float32)
    num_tiles = tl.cdiv(N, TILE)
    words_ptr += row * num_tiles * S
    for tile in range(num_tiles):
        count = tl.load(words_ptr + tile * S)
        listed = count
        if AGAIN:
            listed = tl.where(count < S, count, 0)
        for slot in range(1, listed + 1):
            word = tl.load(words_ptr + tile * S + slot)
            neuron = word & 0xFFFF
            h = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
            weights = neuron.to(tl.int64) * K + k
            down = _load(wd_ptr + weights, inside, EVEN)
            if GATED:
                u = tl.sum(x * _load(wu_ptr + weights, inside, EVEN), 0)
                if BIAS_UP:
                    u += tl.load(bu_ptr + neuron).to(tl.float32)
                h *= u
            acc += h * down
        if AGAIN and listed != count:
            for first in range(tile * TILE, tl.minimum(tile * TILE + TILE, N), AGAIN_N):
                neurons = first + tl.arange(0, AGAIN_N)
                h = _dots(x_ptr, w_ptr, b_ptr, neurons, neurons < N, K, BIAS, AGAIN_N, AGAIN_K)
                h = narrow(relu(h), dtype).to(tl.float32)
                active = h != 0
                if tl.max(active.to(tl.int32), 0) != 0:
                    if GATED:
                        h *= _dots(
                            x_ptr, wu_ptr, bu_ptr, neurons, active, K, BIAS_UP, AGAIN_N, AGAIN_K
                        )
                    weights = neurons.to(tl.int64)[:, None] * K + k[None, :]
                    down = tl.load(
                        wd_ptr + weights, mask=active[:, None] & inside[None, :], other=0.0
                    )
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
    out: Tensor | None = None,
) -> Tensor:
    """y [M, K] from `words`, made of this x with w_gate, in a non-gated layer with w_up.

    x [M, K]; words [M, *] as `make_lists` (compression 1) or `gate_words` makes them; weights [N, K] contiguous,
    w_down_t the transpose of w_down; biases [N], [N], [K] or None; y goes to `out` if given. u and h are not
    rounded. Paper: App. A.1.
    """
    num_tokens, hidden_size = x.shape
    gated = w_gate is not None
    w, b = (w_gate, b_gate) if gated else (w_up, b_up)
    # Down alone keeps nothing of x, and two programs to a row, each with half of it, hide the loads better.
    block_k = next_power_of_2(hidden_size) // (1 if gated else 2)
    y = torch.empty_like(x) if out is None else out
    lists = compression == 1
    if num_tokens:
        up_down_kernel[(num_tokens, cdiv(hidden_size, block_k))](
            x,
            words,
            w,
            b,
            w_up,
            b_up,
            w_down_t,
            b_down,
            y,
            len(w_up),
            hidden_size,
            GATED=gated,
            BIAS=b is not None,
            BIAS_UP=gated and b_up is not None,
            BIAS_DOWN=b_down is not None,
            TILE=len(w_up) if lists else TILE_N,
            S=words.shape[1] if lists else TILE_N // compression,
            AGAIN=not lists,
            EVEN=hidden_size % block_k == 0,
            BK=block_k,
            # 32 values of x and 32 of the sum in a thread; more warps only make the sums over K dearer.
            num_warps=min(max(block_k // 1024, 1), 16),
            **config("twell_rowwise", x.device),
        )
    return y


def make_lists(g: Tensor, bits: Tensor, intermediate_size: int) -> Tensor:
    """The active neurons of each token, packed: words [M, N + 1 rounded up to a multiple of 8] int32.

    g and bits as `gate_bits` makes them by tokens. Of each row word 0 is the number of active neurons, and as many words
    follow: the value's 16 bits above those of the neuron's number, neurons ascending. The rest is not written.
    """
    num_tokens, width = g.shape
    words = torch.empty(
        num_tokens, round_up(intermediate_size + 1, 8), dtype=torch.int32, device=g.device
    )
    lists_kernel[(num_tokens,)](
        g,
        bits,
        words,
        intermediate_size,
        width,
        words.shape[1],
        WORDS=next_power_of_2(cdiv(intermediate_size, 32)),
        **launch_options(num_warps=1, num_stages=1),
    )
    return words


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int = 1,
    *,
    activity: Tensor | None = None,
) -> Tensor:
    """The layer by rows, y [M, K]: from lists (compression 1) or from TwELL; shapes as for `up_down`.

    `activity` [4] int64 counts as ops.py says, with lists alone: a tile of TwELL that overflows does not know its neurons.
    """
    w, b = (w_up, b_up) if w_gate is None else (w_gate, b_gate)
    weights = w_gate, w_up, w_down_t, b_gate, b_up, b_down
    if compression > 1:
        return up_down(x, gate_words(x, w, b, compression), *weights, compression)
    y = torch.empty_like(x)
    intermediate_size = len(w_up)
    size = 256 * max(1, WORKSPACE_BYTES // (256 * (2 + 4) * round_up(intermediate_size + 1, 256)))
    size = round_up(cdiv(len(x), cdiv(len(x), size)), 256)
    for x_chunk, y_chunk in zip(x.split(size), y.split(size), strict=True):
        g, bits = gate_bits(x_chunk, w, b, by_neuron=False)
        if activity is not None:
            count_kernel[(cdiv(len(x_chunk), 64),)](
                bits,
                activity,
                len(x_chunk),
                intermediate_size,
                bits.shape[1],
                WORDS=next_power_of_2(cdiv(intermediate_size, 32)),
                **launch_options(num_warps=4, num_stages=1),
            )
        up_down(x_chunk, make_lists(g, bits, intermediate_size), *weights, compression, y_chunk)
    return y
