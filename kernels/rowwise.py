"""Inference with one program a token, which reads the weight rows of its active neurons only.

A program holds a row of x and the sum for the row of y in registers. For each active neuron n it
reads row n of w_up, whose product with x is u, and adds g u times row n of w_down_t. h is never
stored. Rows are independent, so neither a NaN nor the other tokens change a row's result.

The list of a token can hold all N neurons, so nothing overflows. A kernel of its own makes the
lists from the gate's bits, which is cheaper than a scan in the gate's epilogue (paper/gate.py).

    x, y     [M, K]
    g, bits  by tokens: see gate.py
    words    [M, N + 1 rounded up to 8] int32

A row of words begins with its number of active neurons. Each following word is one of them, in
ascending order: the 16 bits of g above the 16 of the neuron's number.

    g = relu(x w_gate^T + b_gate)    y = ((x w_up^T + b_up) * g) w_down_t + b_down
    without w_gate: y = relu(x w_up^T + b_up) w_down_t + b_down

Paper: App. A.1, with whole lists in place of TwELL.
Reference: twell.sparse.reference.from_gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import (
    add_activity,
    cdiv,
    chunks,
    empty_output,
    load,
    narrow,
    next_power_of_2,
    of_gate,
    of_up,
    popcount,
    round_up,
)
from twell.kernels.float8 import quantized
from twell.kernels.gate import gate_bits
from twell.kernels.launch import direct
from twell.kernels.options import launch_options, row_warps
from twell.sparse.activations import Weights

# For g and the lists of a chunk of tokens.
WORKSPACE_BYTES = 2**30


@direct
@triton.jit(do_not_specialize=["rest"])
def token_lists_kernel(
    g_ptr, bits_ptr, words_ptr, rest, N, width, stride, WORDS: tl.constexpr, SLOTS: tl.constexpr
):
    """The words of 32 WORDS neurons of one token, their number first.

    With SLOTS they are a tile of paper/gate.py; those without a slot go to words_ptr[rest:].
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place_in_row = tile * WORDS + tl.arange(0, WORDS)
    num_words = tl.cdiv(N, 32)
    bits = tl.load(
        bits_ptr + row * (width // 32) + place_in_row, mask=place_in_row < num_words, other=0
    )
    count = popcount(bits)
    place = 1 + tl.cumsum(count, 0) - count
    tile_ptr = words_ptr + row * stride + tile * SLOTS
    rest_ptr = words_ptr + rest + (row * tl.num_programs(1) + tile) * (32 * WORDS) - SLOTS
    tl.store(tile_ptr, tl.sum(count, 0))
    # Each lane takes one bit of its word at a time, the lowest first.
    for _ in range(0, tl.max(count, 0)):
        lowest = bits & -bits
        bits ^= lowest
        neurons = place_in_row * 32 + popcount(lowest - 1)
        g = tl.load(g_ptr + row * width + neurons, mask=lowest != 0, other=0.0)
        words = (g.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | neurons.to(tl.uint32)
        words = words.to(tl.int32, bitcast=True)
        fits = (SLOTS == 0) | (place < SLOTS)
        tl.store(tile_ptr + place, words, mask=(lowest != 0) & fits)
        if SLOTS > 0:
            if rest > 0:
                tl.store(rest_ptr + place, words, mask=(lowest != 0) & (place >= SLOTS))
        place += 1


@direct
@triton.jit(do_not_specialize=["M"])
def count_activity_kernel(bits_ptr, activity_ptr, M, N, stride, WORDS: tl.constexpr):
    """Adds the active entries and the union of 64 tokens to `activity`."""
    rows = (tl.program_id(0) * 64 + tl.arange(0, 64)).to(tl.int64)
    place = tl.arange(0, WORDS)
    inside = (rows < M)[:, None] & (place < tl.cdiv(N, 32))[None, :]
    bits = tl.load(bits_ptr + rows[:, None] * stride + place[None, :], mask=inside, other=0)
    union = tl.sum(popcount(tl.reduce_or(bits, 0)), 0)
    add_activity(activity_ptr, tl.program_id(0) == 0, M, tl.sum(popcount(bits)), union)


@triton.jit
def row_of(word, w_ptr, k, inside, K, EVEN):
    """Entries k of the row of w of a word's neuron."""
    return load(w_ptr + (word & 0xFFFF).to(tl.int64) * K + k, inside, EVEN)


@triton.jit
def add_neuron(acc, word, up, x, bu_ptr, su_ptr, wd_ptr, k, inside, K, dtype, GATED, ACT, EVEN):
    """acc [BK] + h times the row of w_down_t of a word's neuron, for one token's row x [BK].

    up: the neuron's row of w_up if GATED. su_ptr: the scales of w_up in FP8, or None.
    """
    neuron = word & 0xFFFF
    h = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    h = of_gate(h, dtype, ACT)
    down = row_of(word, wd_ptr, k, inside, K, EVEN).to(tl.float32)
    if GATED:
        u = tl.sum(x * up.to(tl.float32), 0)
        if su_ptr is not None:
            u *= tl.load(su_ptr + neuron)
        if bu_ptr is not None:
            u += tl.load(bu_ptr + neuron).to(tl.float32)
        h *= of_up(u, ACT)
    return acc + h * down


@direct
@triton.jit
def rowwise_kernel(
    x_ptr,
    x_scale_ptr,
    words_ptr,
    wu_ptr,
    bu_ptr,
    su_ptr,
    wd_ptr,
    bd_ptr,
    y_ptr,
    K,
    stride,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BK: tl.constexpr,
):
    """BK outputs of one token: the sum over the neurons of its list."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    x = load(x_ptr + row * K + k, inside, EVEN).to(tl.float32)
    if x_scale_ptr is not None:
        x *= tl.load(x_scale_ptr + row)
    acc = tl.zeros((BK,), tl.float32)
    words_ptr += row * stride
    count = tl.load(words_ptr)
    # A neuron's row of w_up is fetched while the neuron before is added.
    word = tl.load(words_ptr + 1, mask=count > 0, other=0)
    up = row_of(word, wu_ptr, k, inside, K, EVEN) if GATED else word
    for slot in range(1, count + 1):
        following = tl.load(words_ptr + slot + 1, mask=slot < count, other=0)
        following_up = row_of(following, wu_ptr, k, inside, K, EVEN) if GATED else following
        acc = add_neuron(
            acc, word, up, x, bu_ptr, su_ptr, wd_ptr, k, inside, K, dtype, GATED, ACT, EVEN
        )
        word, up = following, following_up
    if bd_ptr is not None:
        acc += tl.load(bd_ptr + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * K + k, narrow(acc, dtype), mask=inside)


def row_block(hidden_size: int, gated: bool) -> dict[str, int]:
    """BK and num_warps of a program that computes (part of) a row of y.

    Without a gate nothing of x is kept. Two programs a row, with half of it each, then hide the
    loads better.
    """
    block_k = next_power_of_2(hidden_size) // (1 if gated else 2)
    return dict(
        BK=block_k, num_warps=row_warps(block_k), GATED=gated, EVEN=hidden_size % block_k == 0
    )


def chunk_tokens(intermediate_size: int) -> int:
    """Tokens processed at once: the multiple of 256 that WORKSPACE_BYTES allows, at least 256."""
    bytes_per_token = (2 + 4) * round_up(intermediate_size + 1, 256)  # g and words
    return 256 * max(1, WORKSPACE_BYTES // (256 * bytes_per_token))


def ffn(
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The layer by rows: y [M, K] of x [M, K], M at least 1. Only g is rounded to y.dtype.

    `activity`: see `sparse_ffn`. Workspace: 6 bytes for each token and neuron, in
    chunks that keep it below WORKSPACE_BYTES.
    """
    x, x_scale = quantized(x, x_scale, weights)
    (intermediate_size, hidden_size), device = weights.w_up.shape, x.device
    y = empty_output(x) if out is None else out
    most = chunk_tokens(intermediate_size)
    size = round_up(cdiv(len(x), cdiv(len(x), most)), 256)
    words_of_bits = next_power_of_2(cdiv(intermediate_size, 32))
    length = round_up(intermediate_size + 1, 8)
    options = launch_options("rowwise", device) | row_block(hidden_size, weights.gated)
    for x_chunk, x_scales, y_chunk in chunks(size, x, x_scale, y):
        num_tokens = len(x_chunk)
        given = dict(scales=(x_scales, weights.first_scale), threshold=weights.act.threshold)
        g, bits = gate_bits(x_chunk, *weights.first, by_neuron=False, **given)
        if activity is not None:
            count_activity_kernel[(cdiv(num_tokens, 64),)](
                bits,
                activity,
                num_tokens,
                intermediate_size,
                bits.shape[1],
                WORDS=words_of_bits,
                **launch_options("count_activity", device),
            )
        # Words behind the last neuron of a row are not written.
        words = torch.empty(num_tokens, length, dtype=torch.int32, device=device)
        token_lists_kernel[(num_tokens, 1)](
            g,
            bits,
            words,
            0,
            intermediate_size,
            g.shape[1],
            length,
            WORDS=words_of_bits,
            SLOTS=0,
            **launch_options("token_lists", device),
        )
        rowwise_kernel[(num_tokens, cdiv(hidden_size, options["BK"]))](
            x_chunk,
            x_scales,
            words,
            weights.w_up,
            weights.b_up,
            weights.s_up,
            weights.w_down_t,
            weights.b_down,
            y_chunk,
            hidden_size,
            length,
            ACT=weights.act.name,
            **options,
        )
        del g, bits, words  # before the next chunk allocates its own
    return y
