"""Inference with 2 to 2,048 tokens: no kernel reads or launches more than its bytes need.

Three launches ("tiles"), or two ("fused", up to 64 tokens):

  1. gate. A program owns BN neurons and BM tokens, whole blocks. It stores g by neurons, and of
     each block the neurons that are active in its *segment* of BN neurons: a list and a count.
     With a list a segment, no program needs another one's count, and no atomic decides an order.
  2. up. A program takes BN places of a block's union and TM of its tokens. It finds its places by
     a prefix sum over the counts, which is a few hundred numbers, not N flags. It stores h and
     the union as one list.
  3. down. A program owns BN outputs and TM tokens of a block, and sums over the list.

Fused: the first launch computes up too, for its own segment, whose active neurons it compacts to
tiles of 16 rows; so x is read again once for 16 *active* neurons. Down finds the places itself.

    x, y    [M, K], in B = ceil(M / block) blocks
    g       [N, tokens]
    lists   [B, W] int32: segment s has its neurons from s * BN on    counts [B, S] int32
    union   [B, W] int32: the active neurons in ascending order, padded to whole steps of down
    h       [B * W, block], by places of the union (fused: by places of the segments' lists)

Each sum has one order, so two calls give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from twell.kernels.common import (
    Layer,
    add_activity,
    cdiv,
    empty_output,
    gate_value,
    load,
    narrow,
    next_power_of_2,
    of_gate,
    of_up,
    round_up,
    scaled,
    wide,
)
from twell.kernels.gate import tile_of, tile_product, with_bias
from twell.kernels.options import num_processors, with_fusion


@triton.jit
def _listed(active, list_ptrs, neurons):
    """Number of active neurons in a segment [BN], whose list is stored."""
    slot = tl.cumsum(active, 0) - active
    tl.store(list_ptrs + slot, neurons, mask=active != 0)
    return tl.sum(active, 0)


@triton.jit
def _gate_tile(
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
    token_tile,
    segment,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    token, neuron = token_tile * BM, segment * BN
    acc = tile_product(x_desc, w_desc, token, neuron, K, BM, BN, BK, True)
    if PDL:
        gdc_launch_dependents()
    tokens, neurons = token + tl.arange(0, BM), neuron + tl.arange(0, BN)
    acc = scaled(acc, x_scale_ptr, w_scale_ptr, tokens, neurons, M, N, True)
    acc = with_bias(acc, b_ptr, neurons, N, True)
    g = gate_value(acc, threshold, g_desc.dtype)
    g_desc.store([neuron, token], g)
    active = (g.to(tl.float32) != 0) & (tokens < M)[None, :] & (neurons < N)[:, None]
    BLOCKS: tl.constexpr = BM // BLOCK
    if BLOCKS == 1:
        flags = tl.max(active.to(tl.int32), 1)
        list_ptr = lists_ptr + token_tile.to(tl.int64) * width + neuron
        count = _listed(flags, list_ptr, neurons)
        tl.store(counts_ptr + token_tile * num_segments + segment, count)
    else:
        flags = tl.max(tl.reshape(active.to(tl.int32), (BN, BLOCKS, BLOCK)), 2)
        blocks = token_tile * BLOCKS + tl.arange(0, BLOCKS)
        slot = tl.cumsum(flags, 0) - flags
        list_ptrs = lists_ptr + blocks.to(tl.int64)[None, :] * width + neuron + slot
        tl.store(list_ptrs, tl.broadcast_to(neurons[:, None], (BN, BLOCKS)), mask=flags != 0)
        place = counts_ptr + blocks * num_segments + segment
        tl.store(place, tl.sum(flags, 0), mask=blocks < tl.cdiv(M, BLOCK))
    if activity_ptr is not None:
        SIZE: tl.constexpr = BM if BM < 64 else 64
        in_unions = tl.max(tl.reshape(active.to(tl.int32), (BN, BM // SIZE, SIZE)), 2)
        first = (segment == 0) & (token_tile == 0)
        add_activity(activity_ptr, first, M, tl.sum(active.to(tl.int32)), tl.sum(in_unions))


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
    num_programs,
    GROUP: tl.constexpr,
    RESIDENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """g, lists and counts; RESIDENT: of a queue of tiles, else of one tile a program."""
    num_token_tiles = tl.cdiv(M, BM)
    # fmt: off
    if RESIDENT:
        num_tiles = num_token_tiles * num_segments
        for number in tl.range(tl.program_id(0), num_tiles, num_programs, flatten=True):
            token_tile, segment = tile_of(number, num_token_tiles, num_segments, GROUP)
            _gate_tile(
                x_desc, w_desc, b_ptr, x_scale_ptr, w_scale_ptr, g_desc, lists_ptr, counts_ptr,
                activity_ptr, threshold, M, N, K, width, num_segments, token_tile, segment,
                BLOCK, BM, BN, BK, PDL,
            )
    else:
        token_tile, segment = tile_of(tl.program_id(0), num_token_tiles, num_segments, GROUP)
        _gate_tile(
            x_desc, w_desc, b_ptr, x_scale_ptr, w_scale_ptr, g_desc, lists_ptr, counts_ptr,
            activity_ptr, threshold, M, N, K, width, num_segments, token_tile, segment,
            BLOCK, BM, BN, BK, PDL,
        )
    # fmt: on


@triton.jit
def _find(places, total, counts, ends, SEGMENT):
    """Where in the segments' lists the places of a union are; behind the last: the last."""
    places = tl.minimum(places, total - 1)
    before = ends[None, :] <= places[:, None]
    # What the lists before it leave unused.
    return places + tl.sum(tl.where(before, SEGMENT - counts[None, :], 0), 1)


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
    num_programs,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """h and the union, by tiles of BN places and TM tokens, in turns of num_programs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = BLOCK // TM
    blocks, segments = tl.arange(0, BLOCKS), tl.arange(0, SEGMENTS)
    inside = (blocks < num_blocks)[:, None] & (segments < num_segments)[None, :]
    count_ptrs = counts_ptr + blocks[:, None] * num_segments + segments[None, :]
    all_counts = tl.load(count_ptrs, mask=inside, other=0)
    totals = tl.sum(all_counts, 1)
    tiles = (totals + BN - 1) // BN
    tile_ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    k = tl.arange(0, BK)
    for number in range(tl.program_id(0), num_tiles * PARTS, num_programs):
        tile, part = number // PARTS, number % PARTS
        past = tile_ends <= tile
        block = tl.sum(past.to(tl.int32), 0)
        tile -= tl.sum(tl.where(past, tiles, 0), 0)
        total = tl.sum(tl.where(blocks == block, totals, 0), 0)
        counts = tl.sum(tl.where((blocks == block)[:, None], all_counts, 0), 0)
        places = tile * BN + tl.arange(0, BN)
        at = _find(places, total, counts, tl.cumsum(counts, 0), SEGMENT)
        base = block.to(tl.int64) * width
        neurons = tl.load(lists_ptr + base + at)
        if part == 0:
            tl.store(union_ptr + base + places, neurons)
        first = block * BLOCK + part * TM
        columns = first + tl.arange(0, TM)
        rows = neurons.to(tl.int64)[:, None]
        g_ptrs = g_ptr + rows * tokens + columns[None, :]
        EARLY: tl.constexpr = BN * TM <= 4096  # larger ones would cost the loop its registers
        if EARLY:
            g = tl.load(g_ptrs).to(tl.float32)
        if GATED:
            w_ptrs = w_ptr + rows * K + k[None, :]
            u = tl.zeros((BN, TM), tl.float32)
            for start in range(0, K, BK):
                w = load(w_ptrs + start, (start + k < K)[None, :], EVEN)
                u = tl.dot(wide(w), wide(x_desc.load([first, start])).T, u)
            u = scaled(u, x_scale_ptr, w_scale_ptr, columns, neurons, M, N, True)
            if b_ptr is not None:
                u += tl.load(b_ptr + neurons).to(tl.float32)[:, None]
        if not EARLY:
            g = tl.load(g_ptrs).to(tl.float32)
        active = (g != 0) & (places < total)[:, None]
        h = of_gate(g, h_ptr.dtype.element_ty, ACT)
        if GATED:
            h *= of_up(u, ACT)
        # Select, do not multiply: u may be infinite where the token is inactive.
        h = narrow(tl.where(active, h, 0.0), h_ptr.dtype.element_ty)
        of_part = part * TM + tl.arange(0, TM)[None, :]
        tl.store(h_ptr + (base + places)[:, None] * BLOCK + of_part, h)
        if tile * BN + BN >= total:
            last = tl.max(neurons, 0)  # in ascending order
            zeros = tl.zeros((BN, TM), h_ptr.dtype.element_ty)
            for behind in range(tile * BN + BN, tl.cdiv(total, PAD) * PAD, BN):
                padding = base + behind + tl.arange(0, BN)
                tl.store(union_ptr + padding, tl.zeros((BN,), tl.int32) + last)
                tl.store(h_ptr + padding[:, None] * BLOCK + of_part, zeros)


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
    """y [TM tokens, BN outputs] over the union of a block, padded to BK."""
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
    for start in range(0, total, BK):
        neurons = tl.load(list_ptr + start + tl.arange(0, BK)).to(tl.int64)
        w = load(w_ptr + neurons[:, None] * K + columns[None, :], (columns < K)[None, :], EVEN)
        h = wide(h_desc.load([block * width + start, part * TM]))
        acc = tl.dot(h.T, wide(w), acc)
    if b_ptr is not None:
        acc += tl.load(b_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    rows = block * BLOCK + part * TM + tl.arange(0, TM)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N"])
def few_gate_up_kernel(
    x_desc,
    w_desc,
    b_ptr,
    x_scale_ptr,
    w_scale_ptr,
    wu_ptr,
    bu_ptr,
    su_ptr,
    h_ptr,
    lists_ptr,
    counts_ptr,
    activity_ptr,
    threshold,
    M,
    N,
    K,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """h, list and count of a segment of BN neurons, for one block of BM tokens."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    segment = tl.program_id(0)
    first = segment * BN
    neurons, tokens = first + tl.arange(0, BN), tl.arange(0, BM)
    acc = tile_product(x_desc, w_desc, 0, first, K, BM, BN, BK, True)
    if PDL:
        gdc_launch_dependents()
    acc = scaled(acc, x_scale_ptr, w_scale_ptr, tokens, neurons, M, N, True)
    acc = with_bias(acc, b_ptr, neurons, N, True)
    g = gate_value(acc, threshold, dtype).to(tl.float32)
    active = (g != 0) & (tokens < M)[None, :] & (neurons < N)[:, None]
    g = tl.where(active, g, 0.0)
    flags = tl.max(active.to(tl.int32), 1)
    ends = tl.cumsum(flags, 0)
    count = tl.sum(flags, 0)
    tl.store(counts_ptr + segment, count)
    if activity_ptr is not None:
        entries = tl.sum(active.to(tl.int32))
        add_activity(activity_ptr, segment == 0, M, entries, count)
    k = tl.arange(0, STEP)
    for tile in range(0, count, ROWS):
        # The row of g of each place, and its neuron: ends is 1 + place at an active neuron.
        places = tile + tl.arange(0, ROWS)
        here = (ends[None, :] <= tl.minimum(places, count - 1)[:, None]).to(tl.int32)
        row = tl.sum(here, 1)
        h = tl.gather(g, tl.broadcast_to(row[:, None], (ROWS, BM)), 0)
        inside = (h != 0) & (places < count)[:, None]
        listed = first + row
        tl.store(lists_ptr + first + places, listed, mask=places < count)
        h = of_gate(h, dtype, ACT)
        if GATED:
            w_ptrs = wu_ptr + listed.to(tl.int64)[:, None] * K + k[None, :]
            u = tl.zeros((ROWS, BM), tl.float32)
            for start in range(0, K, STEP):
                mask = (places < count)[:, None]
                if not EVEN:
                    mask &= (start + k < K)[None, :]
                w = tl.load(w_ptrs + start, mask=mask, other=0.0)
                u = tl.dot(wide(w), wide(x_desc.load([0, start])).T, u)
            u = scaled(u, x_scale_ptr, su_ptr, tokens, listed, M, N, True)
            if bu_ptr is not None:
                u += tl.load(bu_ptr + listed).to(tl.float32)[:, None]
            h *= of_up(u, ACT)
        h = narrow(tl.where(inside, h, 0.0), dtype)
        h_ptrs = h_ptr + (first + places)[:, None] * BM + tokens[None, :]
        tl.store(h_ptrs, h, mask=(places < count)[:, None])


@triton.jit(do_not_specialize=["M"])
def few_find_down_kernel(
    h_ptr,
    w_ptr,
    b_ptr,
    lists_ptr,
    counts_ptr,
    y_ptr,
    M,
    K,
    num_segments,
    EVEN: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [BM tokens, BN outputs] over the lists of the segments."""
    if PDL:
        gdc_wait()
    segments = tl.arange(0, SEGMENTS)
    counts = tl.load(counts_ptr + segments, mask=segments < num_segments, other=0)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, total, BK):
        places = start + tl.arange(0, BK)
        at = _find(places, total, counts, ends, SEGMENT)
        neurons = tl.load(lists_ptr + at).to(tl.int64)
        w = load(w_ptr + neurons[:, None] * K + columns[None, :], (columns < K)[None, :], EVEN)
        h = wide(tl.load(h_ptr + at[:, None] * BM + tokens[None, :]))
        h = tl.where((places < total)[:, None], h, 0.0)
        acc = tl.dot(h.T, wide(w), acc)
    if b_ptr is not None:
        acc += tl.load(b_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    inside = (tokens < M)[:, None] & (columns < K)[None, :]
    y_ptrs = y_ptr + tokens[:, None] * K + columns[None, :]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Plan:
    """Launch options of the three kernels; a kernel's PDL: it waits for the one before itself."""

    form: str  # "tiles" or "fused"
    gate: dict = field(default_factory=dict)
    up: dict = field(default_factory=dict)
    down: dict = field(default_factory=dict)
    block: int = 128
    pdl: bool = False


def _pdl(plan: Plan) -> dict:
    return {"launch_pdl": True} if plan.pdl else {}


def ffn(
    x: Tensor,
    layer: Layer,
    plan: Plan,
    x_scale: Tensor | None = None,
    activity: Tensor | None = None,
) -> Tensor:
    """y [M, K] of x [M, K] by a plan."""
    return (_fused if plan.form == "fused" else _tiles)(x, layer, plan, x_scale, activity)


def _fused(x, layer, plan, x_scale, activity) -> Tensor:
    (num_tokens, k), n, y = x.shape, len(layer.w_up), empty_output(x)
    up, down = with_fusion(**plan.gate), with_fusion(**plan.down)
    block_m = max(next_power_of_2(num_tokens), 16)
    num_segments = cdiv(n, up["BN"])
    width = num_segments * up["BN"]
    h = y.new_empty(width, block_m)
    lists, counts = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in (width, num_segments)
    )
    w, b = layer.first
    step = up.pop("STEP")
    assert step == up["BK"], "one descriptor of x serves both loops"
    few_gate_up_kernel[(num_segments,)](
        TensorDescriptor.from_tensor(x, [block_m, up["BK"]]),
        TensorDescriptor.from_tensor(w, [up["BN"], up["BK"]]),
        b,
        x_scale,
        layer.first_scale,
        layer.w_up,
        layer.b_up,
        layer.s_up,
        h,
        lists,
        counts,
        activity,
        layer.act.threshold or None,
        num_tokens,
        n,
        k,
        GATED=layer.gated,
        ACT=layer.act.name,
        EVEN=k % step == 0,
        BM=block_m,
        ROWS=16,
        STEP=step,
        PDL=plan.pdl,
        **up,
    )
    few_find_down_kernel[(cdiv(k, down["BN"]),)](
        h,
        layer.w_down_t,
        layer.b_down,
        lists,
        counts,
        y,
        num_tokens,
        k,
        num_segments,
        EVEN=k % down["BN"] == 0,
        SEGMENT=up["BN"],
        SEGMENTS=next_power_of_2(num_segments),
        BM=block_m,
        PDL=plan.pdl,
        **down,
        **_pdl(plan),
    )
    return y


def _tiles(x, layer, plan, x_scale, activity) -> Tensor:
    (num_tokens, k), n, y = x.shape, len(layer.w_up), empty_output(x)
    gate, up, down = (with_fusion(**part) for part in (plan.gate, plan.up, plan.down))
    block, num_blocks = plan.block, cdiv(num_tokens, plan.block)
    tokens = round_up(num_tokens, gate["BM"])
    num_segments = cdiv(n, gate["BN"])
    pad = down["BK"]  # down reads whole steps
    width = round_up(num_segments * gate["BN"], max(pad, up["BN"]))
    num_all, processors = cdiv(num_tokens, gate["BM"]) * num_segments, num_processors(x.device)
    resident = gate.pop("RESIDENT", False)
    num_programs = min(num_all, processors) if resident else num_all
    g, h = y.new_empty(n, tokens), y.new_empty(num_blocks * width, block)
    ints = dict(dtype=torch.int32, device=x.device)
    lists, union = (torch.empty(num_blocks, width, **ints) for _ in range(2))
    counts = torch.empty(num_blocks, num_segments, **ints)
    w, b = layer.first
    few_gate_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [gate["BM"], gate["BK"]]),
        TensorDescriptor.from_tensor(w, [gate["BN"], gate["BK"]]),
        b,
        x_scale,
        layer.first_scale,
        TensorDescriptor.from_tensor(g, [gate["BN"], gate["BM"]]),
        lists,
        counts,
        activity,
        layer.act.threshold or None,
        num_tokens,
        n,
        k,
        width,
        num_segments,
        num_programs,
        RESIDENT=resident,
        BLOCK=block,
        PDL=plan.pdl,
        **{"GROUP": 8, **gate},
    )
    segments = next_power_of_2(num_segments)
    per_sm = up.pop("PER_SM")
    most = num_blocks * cdiv(n, up["BN"]) * (block // up["TM"])
    num_programs = min(most, per_sm * processors)
    few_up_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [up["TM"], up["BK"]]),
        layer.w_up,
        layer.b_up,
        x_scale,
        layer.s_up,
        g,
        h,
        lists,
        counts,
        union,
        num_tokens,
        n,
        k,
        tokens,
        width,
        num_blocks,
        num_segments,
        num_programs,
        GATED=layer.gated,
        ACT=layer.act.name,
        EVEN=k % up["BK"] == 0,
        BLOCK=block,
        BLOCKS=next_power_of_2(num_blocks),
        SEGMENT=gate["BN"],
        SEGMENTS=segments,
        PAD=pad,
        PDL=plan.pdl,
        **up,
        **_pdl(plan),
    )
    few_down_kernel[(cdiv(k, down["BN"]), num_blocks * (block // down["TM"]))](
        TensorDescriptor.from_tensor(h, [down["BK"], down["TM"]]),
        layer.w_down_t,
        layer.b_down,
        union,
        counts,
        y,
        num_tokens,
        k,
        width,
        num_segments,
        EVEN=k % down["BN"] == 0,
        BLOCK=block,
        SEGMENTS=segments,
        PDL=plan.pdl,
        **down,
        **_pdl(plan),
    )
    return y
