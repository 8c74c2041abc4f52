"""Inference with 4 to 512 tokens: three launches with tiles so small that all of the GPU works.

  1. gate. A program owns a *segment* of BN neurons and a block of tokens. It stores g and, of the
     neurons that are active for any token of the block, a list and its length. A list for each
     segment needs no other program's result, and no atomic decides an order.
  2. up. A program takes BN places in the lists of a few neighbouring segments, and TM of the
     block's tokens. It knows where these lists stand, so it gathers weight rows at once. Only to
     store h and its part of the union, it needs the lengths of all earlier lists.
  3. down. A program owns BN outputs and TM tokens, and sums over the union.

On Hopper and up to 256 tokens, a kernel may start while the one before ends (PDL: programmatic
dependent launch), and waits for its results by itself. So does the gate, behind any other kernel.

    x, y           [M, K], in B = ceil(M / block) blocks of 16, 32, 64 or 128 tokens
    g              [N, B * block]
    lists, counts  [B, W], [B, S] int32 for S segments of SEGMENT neurons; list s begins at
                   s * SEGMENT
    union          [B, W] int32, W at least N: the active neurons in ascending order, padded to a
                   multiple of down's BK, where the last neuron repeats, with h = 0
    h              [B * W, block], by places in the union

    g = relu(x w_gate^T + b_gate)    h = (x w_up^T + b_up) * g    y = h w_down_t + b_down
    without w_gate: h = g = relu(x w_up^T + b_up)

Each sum has one order, so two calls give the same bits. An inf or NaN in w_down may reach the other
tokens of a block, where h is 0: 0 * inf is NaN. Ours, not the paper's.
Reference: twell.sparse.reference.from_gate.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from twell.kernels.common import (
    add_activity,
    cdiv,
    chunks,
    empty_output,
    gate_value,
    narrow,
    next_power_of_2,
    round_up,
    scaled,
    tile_of,
    with_bias,
)
from twell.kernels.gate import tile_product
from twell.kernels.launch import MAX_CASES, descriptor, direct
from twell.kernels.options import GATE_GROUP, launches_dependents, options_by_tokens
from twell.kernels.union import add_listed, listed_hidden, listed_product, store_output
from twell.sparse.activations import Weights

MAX_TOKENS = 512
MAX_BLOCK = 128


@direct
@triton.jit(do_not_specialize=["M", "N"])
def few_gate_kernel(
    x_desc,
    w_desc,
    b_ptr,
    x_scale_ptr,
    w_scale_ptr,
    g_desc,
    lists_ptr,
    counts_ptr,
    activity_ptr,
    threshold,
    M,
    N,
    K,
    width,
    num_segments,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """g of BN neurons and one block of BM tokens, and which of the neurons are active."""
    if PDL:
        gdc_wait()
    num_blocks = tl.cdiv(M, BM)
    block, segment = tile_of(tl.program_id(0), num_blocks, num_segments, GROUP)
    token, neuron = block * BM, segment * BN
    acc = tile_product(x_desc, w_desc, token, neuron, K, BM, BN, BK, True)
    if PDL:
        gdc_launch_dependents()
    tokens, neurons = token + tl.arange(0, BM), neuron + tl.arange(0, BN)
    acc = scaled(acc, x_scale_ptr, w_scale_ptr, tokens, neurons, M, N, True)
    acc = with_bias(acc, b_ptr, neurons, N, True)
    g = gate_value(acc, threshold, g_desc.dtype)
    g_desc.store([neuron, token], g)
    # Tokens beyond M may hold relu(bias), neurons beyond N the NaN of a token.
    active = (g.to(tl.float32) != 0) & (tokens < M)[None, :] & (neurons < N)[:, None]
    flags = tl.max(active.to(tl.int32), 1)
    slot = tl.cumsum(flags, 0) - flags
    tl.store(lists_ptr + block.to(tl.int64) * width + neuron + slot, neurons, mask=flags != 0)
    count_ptr = counts_ptr + block * num_segments + segment
    # From tensor memory, a sum along the one axis left stops the compiler; one in any order passes.
    tl.store(count_ptr, tl.sum(flags) if cuda_capability_geq(10) else tl.sum(flags, 0))
    if activity_ptr is not None:
        SIZE: tl.constexpr = BM if BM < 64 else 64
        in_unions = tl.max(tl.reshape(active.to(tl.int32), (BN, BM // SIZE, SIZE)), 2)
        entries = tl.sum(active.to(tl.int32))
        add_activity(activity_ptr, tl.program_id(0) == 0, M, entries, tl.sum(in_unions))


@direct
@triton.jit(do_not_specialize=["M", "N"])
def few_up_kernel(
    x_desc,
    w_ptr,
    b_ptr,
    x_scale_ptr,
    w_scale_ptr,
    g_ptr,
    h_ptr,
    lists_ptr,
    counts_ptr,
    union_ptr,
    M,
    N,
    K,
    tokens,
    width,
    num_blocks,
    num_segments,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    JOIN: tl.constexpr,
    TM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """h and the union of BN places in the lists of JOIN segments, for TM tokens.

    Few of them hold more than the first BN places: programs of later ones come last and mostly end
    at once. STEP is BK of few_down_kernel.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = BLOCK // TM
    num_joined = tl.cdiv(num_segments, JOIN)
    number = tl.program_id(0)
    part = number % PARTS
    segment = number // PARTS % num_joined * JOIN
    block = number // (PARTS * num_joined) % num_blocks
    tile = number // (PARTS * num_joined * num_blocks)
    base = block.to(tl.int64) * width
    counts_ptr += block * num_segments
    places = tile * BN + tl.arange(0, BN)
    # All counts are needed at the end alone; to load them here hides the latency.
    segments = tl.arange(0, SEGMENTS)
    counts = tl.load(counts_ptr + segments, mask=segments < num_segments, other=0)
    if JOIN == 1:
        listed = tl.load(lists_ptr + base + segment * SEGMENT + places)  # does not wait for `total`
        total = tl.load(counts_ptr + segment)
        inside = places < total
    else:
        joined = segment + tl.arange(0, JOIN)
        own = tl.load(counts_ptr + joined, mask=joined < num_segments, other=0)
        total = tl.sum(own, 0)
        inside = places < total
        # Unused slots in the lists that end before a place.
        passed = tl.cumsum(own, 0)[None, :] <= places[:, None]
        slots = places + tl.sum(tl.where(passed, (SEGMENT - own)[None, :], 0), 1)
        listed = tl.load(lists_ptr + base + segment * SEGMENT + slots, mask=inside, other=0)
    if tile * BN < total:
        neurons = tl.where(inside, listed, 0)
        first = block * BLOCK + part * TM
        columns = first + tl.arange(0, TM)
        rows = neurons.to(tl.int64)
        g_ptrs = g_ptr + rows[:, None] * tokens + columns[None, :]
        EARLY: tl.constexpr = BN * TM <= 4096  # larger ones would cost the loop its registers
        if EARLY:
            g = tl.load(g_ptrs).to(tl.float32)
        u = None
        if GATED:
            u = listed_product(x_desc, w_ptr, first, rows, tl.arange(0, BK), K, EVEN, TM, inside)
            u = scaled(u, x_scale_ptr, w_scale_ptr, columns, neurons, M, N, True)
            u = with_bias(u, b_ptr, neurons, None, True)
        if not EARLY:
            g = tl.load(g_ptrs).to(tl.float32)
        dtype: tl.constexpr = h_ptr.dtype.element_ty
        h = narrow(listed_hidden(g, u, places, total, dtype, ACT), dtype)
        before = tl.sum(tl.where(segments < segment, counts, 0), 0)
        at = base + before + places
        of_part = part * TM + tl.arange(0, TM)[None, :]
        tl.store(h_ptr + at[:, None] * BLOCK + of_part, h, mask=inside[:, None])
        if part == 0:
            tl.store(union_ptr + at, neurons, mask=inside)
        end = before + tl.minimum(tile * BN + BN, total)
        if end == tl.sum(counts, 0):  # the last tile of the block
            last = tl.max(neurons, 0)  # in ascending order
            zeros = tl.zeros((BN, TM), dtype)
            padded = tl.cdiv(end, STEP) * STEP
            for behind in range(end, padded, BN):
                padding = behind + tl.arange(0, BN)
                unset = padding < padded
                tl.store(union_ptr + base + padding, tl.zeros((BN,), tl.int32) + last, mask=unset)
                h_ptrs = h_ptr + (base + padding)[:, None] * BLOCK + of_part
                tl.store(h_ptrs, zeros, mask=unset[:, None])


@direct
@triton.jit(do_not_specialize=["M"])
def few_down_kernel(
    h_desc,
    w_ptr,
    b_ptr,
    union_ptr,
    counts_ptr,
    y_ptr,
    M,
    K,
    width,
    num_segments,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [TM tokens, BN outputs] over the union of a block."""
    if PDL:
        gdc_wait()
    PARTS: tl.constexpr = BLOCK // TM
    block, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    segments = tl.arange(0, SEGMENTS)
    count_ptrs = counts_ptr + block * num_segments + segments
    total = tl.sum(tl.load(count_ptrs, mask=segments < num_segments, other=0), 0)
    list_ptr = union_ptr + block.to(tl.int64) * width
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((TM, BN), tl.float32)
    acc = add_listed(acc, h_desc, w_ptr, list_ptr, block, part, total, columns, width, K, EVEN, BK)
    acc = with_bias(acc, b_ptr, columns, K, False)
    store_output(acc, y_ptr, block * BLOCK + part * TM, columns, M, K)


class Plan(NamedTuple):
    """Launch plan for one token count; see the module."""

    block: int
    num_blocks: int
    num_segments: int
    width: int
    num_programs: int  # of up
    gate: dict[str, int]
    up: dict[str, int]
    down: dict[str, int]


@lru_cache(MAX_CASES)
def make_plan(num_tokens: int, intermediate_size: int, device: torch.device) -> Plan:
    """The plan for at most MAX_TOKENS tokens; cached, so callers must not change its options."""
    kernels = "few_gate_", "few_up_", "few_down_"
    gate, up, down = (options_by_tokens(kernel, num_tokens, device) for kernel in kernels)
    block = min(max(next_power_of_2(num_tokens), 16), MAX_BLOCK)
    up["TM"], down["TM"] = min(up["TM"], block), min(down["TM"], block)
    num_blocks, num_segments = cdiv(num_tokens, block), cdiv(intermediate_size, gate["BN"])
    width = round_up(num_segments * gate["BN"], max(up["BN"], down["BK"]))
    tiles = cdiv(num_segments, up["JOIN"]) * cdiv(up["JOIN"] * gate["BN"], up["BN"])
    num_programs = num_blocks * tiles * (block // up["TM"])
    size = next_power_of_2(num_segments)
    overlap = launches_dependents(num_tokens, device)
    launch = dict(PDL=True, launch_pdl=True) if overlap else dict(PDL=False)
    shared = dict(BLOCK=block, SEGMENTS=size, **launch)
    gate |= dict(GROUP=GATE_GROUP, BM=block, **launch)
    up |= dict(SEGMENT=gate["BN"], STEP=down["BK"], **shared)
    return Plan(block, num_blocks, num_segments, width, num_programs, gate, up, down | shared)


def ffn(
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The layer for some tokens: y [M, K] of x [M, K], M at least 1.

    g and h are rounded to y.dtype, u is not. `activity`: see `sparse_ffn`. More than
    MAX_TOKENS tokens are taken in chunks. Workspace: for each neuron, 4 bytes a token (up to whole
    blocks) and 8 a block.
    """
    y = empty_output(x) if out is None else out
    (n, k), (w, b), device = weights.w_up.shape, weights.first, x.device
    for x_chunk, scales, y_chunk in chunks(MAX_TOKENS, x, x_scale, y):
        num_tokens = len(x_chunk)
        plan = make_plan(num_tokens, n, device)
        block, num_blocks, num_segments, width, num_programs, gate, up, down = plan
        # Of all blocks the lists and the union, then the counts: see the module.
        sizes = num_blocks * width, num_blocks * width, num_blocks * num_segments
        integers = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        lists, union, counts = integers.split(sizes)
        g = weights.w_down_t.new_empty(n, num_blocks * block)
        few_gate_kernel[(num_blocks * num_segments,)](
            descriptor(x_chunk, (block, gate["BK"])),
            descriptor(w, (gate["BN"], gate["BK"])),
            b,
            scales,
            weights.first_scale,
            descriptor(g, (gate["BN"], block)),
            lists,
            counts,
            activity,
            weights.act.threshold or None,
            num_tokens,
            n,
            k,
            width,
            num_segments,
            **gate,
        )
        h = g.new_empty(num_blocks * width, block)
        few_up_kernel[(num_programs,)](
            descriptor(x_chunk, (up["TM"], up["BK"])),
            weights.w_up,
            weights.b_up,
            scales,
            weights.s_up,
            g,
            h,
            lists,
            counts,
            union,
            num_tokens,
            n,
            k,
            g.shape[1],
            width,
            num_blocks,
            num_segments,
            GATED=weights.gated,
            ACT=weights.act.name,
            EVEN=k % up["BK"] == 0,
            **up,
        )
        few_down_kernel[(cdiv(k, down["BN"]), num_blocks * (block // down["TM"]))](
            descriptor(h, (down["BK"], down["TM"])),
            weights.w_down_t,
            weights.b_down,
            union,
            counts,
            y_chunk,
            num_tokens,
            k,
            width,
            num_segments,
            EVEN=k % down["BN"] == 0,
            **down,
        )
        del integers, lists, union, counts, g, h  # before the next chunk allocates its own
    return y
