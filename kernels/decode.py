"""Inference with 1 to 4 tokens, where reading the weights takes the time: each row once or never.

Two launches, and no message to the host, so a CUDA graph can hold them:

  1. A program owns a neuron. It reads its row of w_gate, and its row of w_up if it is active for
     some token. It stores h = u * g and a flag.
  2. A program owns BN outputs. It turns the flags into a list of active neurons, the same in every
     program, which is cheaper than a third launch. Then it sums their rows of w_down_t. There are
     no partial sums, so two calls give the same bits.

Neither uses tensor cores: their tiles of 16 tokens would be mostly padding. `ffn` hands more tokens
to few.py. For one token in bf16 or fp16 on Hopper, a kernel may start while the one before ends
(PDL), and waits for its results by itself.

    x, y   [M, K]
    h      [W, M], W = N rounded up to 8
    flags  [W] int8, 1 where any token activates the neuron
    lists  [programs, W / 8] int32

    g = relu(x w_gate^T + b_gate)    h = (x w_up^T + b_up) * g    y = h w_down_t + b_down
    without w_gate: h = g = relu(x w_up^T + b_up)

An inf or NaN in w_down may reach the other tokens, where h is 0: 0 * inf is NaN.
Reference: twell.sparse.reference.from_gate.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twell.kernels import few
from twell.kernels.common import (
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
    with_bias,
)
from twell.kernels.float8 import quantized
from twell.kernels.launch import MAX_CASES, direct, traced
from twell.kernels.options import (
    VECTOR_TOKENS,
    decode_up,
    launches_dependents,
    options_by_tokens,
)
from twell.sparse.activations import Weights


@direct
@triton.jit(do_not_specialize=["N"])
def decode_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    b_ptr,
    s_ptr,
    wu_ptr,
    bu_ptr,
    su_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    threshold,
    N,
    K,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h and flags of BN neurons, with their whole weight rows in registers.

    TOKENS: M, rounded up to a power of 2.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    neurons = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = neurons.to(tl.int64)[:, None] * K + k[None, :]
    w = load(w_ptr + place, (neurons < N)[:, None] & (k < K)[None, :], EVEN).to(tl.float32)
    # g and u stay in registers: [BN, TOKENS], one column a token, filled one after the other.
    tokens = tl.arange(0, TOKENS)
    g = tl.zeros((BN, TOKENS), tl.float32)
    for token in tl.static_range(M):
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        g += tl.where((tokens == token)[None, :], tl.sum(w * x[None, :], 1)[:, None], 0.0)
    g = scaled(g, x_scale_ptr, s_ptr, tokens, neurons, M, N, True)
    g = with_bias(g, b_ptr, neurons, N, True)
    h = gate_value(g, threshold, h_ptr.dtype.element_ty).to(tl.float32)
    active = (h != 0) & (neurons < N)[:, None] & (tokens < M)[None, :]
    flags = tl.max(active.to(tl.int32), 1)
    tl.store(flags_ptr + neurons, flags.to(tl.int8))
    if activity_ptr is not None:
        entries = tl.sum(active.to(tl.int32))
        add_activity(activity_ptr, tl.program_id(0) == 0, M, entries, tl.sum(flags, 0))
    h = of_gate(h, h_ptr.dtype.element_ty, ACT)
    if GATED:
        if tl.max(flags, 0) != 0:
            mask = (flags != 0)[:, None] & (k < K)[None, :]
            wu = tl.load(wu_ptr + place, mask=mask, other=0.0).to(tl.float32)
            u = tl.zeros((BN, TOKENS), tl.float32)
            for token in tl.static_range(M):
                row = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
                dots = tl.sum(wu * row[None, :], 1)
                u += tl.where((tokens == token)[None, :], dots[:, None], 0.0)
            u = scaled(u, x_scale_ptr, su_ptr, tokens, neurons, M, N, True)
            u = with_bias(u, bu_ptr, neurons, N, True)
            h *= of_up(u, ACT)
    h = narrow(tl.where(active, h, 0.0), h_ptr.dtype.element_ty)
    tl.store(h_ptr + neurons[:, None] * M + tokens[None, :], h, mask=(tokens < M)[None, :])


@direct
@triton.jit
def decode_down_kernel(
    h_ptr,
    flags_ptr,
    wd_ptr,
    bd_ptr,
    lists_ptr,
    y_ptr,
    K,
    width,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EIGHTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [M, BN outputs] of one program, which first lists the flagged neurons by words of eight.

    A word of the list is 256 times its place plus its eight flags as bits, so one store makes an
    entry. A step takes BK words; rows of inactive neurons are masked.
    """
    if PDL:
        gdc_wait()
    place = tl.arange(0, EIGHTS)
    flags = tl.load(flags_ptr + place, mask=place < width // 8, other=0)
    listed = (flags != 0).to(tl.int32)
    total = tl.sum(listed, 0)
    bits = ((flags * 0x0102040810204080) >> 56).to(tl.int32) & 255
    list_ptr = lists_ptr + tl.program_id(0).to(tl.int64) * (width // 8)
    tl.store(list_ptr + tl.cumsum(listed, 0) - listed, place * 256 + bits, mask=listed != 0)
    tl.debug_barrier()
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    eight = tl.arange(0, 8)
    tokens = tl.arange(0, TOKENS)
    acc = tl.zeros((TOKENS, BN), tl.float32)
    for start in range(0, total, BK):
        slots = start + tl.arange(0, BK)
        word = tl.load(list_ptr + slots, mask=slots < total, other=0)
        neurons = tl.reshape((word >> 8)[:, None] * 8 + eight[None, :], (BK * 8,))
        active = tl.reshape((word[:, None] >> eight[None, :]) & 1, (BK * 8,)) != 0
        mask = active[:, None] & (columns < K)[None, :]
        w_ptrs = wd_ptr + neurons.to(tl.int64)[:, None] * K + columns[None, :]
        w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
        for token in tl.static_range(M):
            h = tl.load(h_ptr + neurons * M + token, mask=active, other=0.0).to(tl.float32)
            acc += tl.where((tokens == token)[:, None], tl.sum(w * h[:, None], 0)[None, :], 0.0)
    acc = with_bias(acc, bd_ptr, columns, K, False)
    y_ptrs = y_ptr + tokens[:, None] * K + columns[None, :]
    inside = (columns < K)[None, :] & (tokens < M)[:, None]
    tl.store(y_ptrs, narrow(acc, y_ptr.dtype.element_ty), mask=inside)


@lru_cache(MAX_CASES)
def make_plan(
    num_tokens: int, hidden_size: int, device: torch.device, overlap: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options of both launches; cached, so callers must not change them."""
    shared = dict(M=num_tokens, TOKENS=next_power_of_2(num_tokens), PDL=overlap)
    if overlap:
        shared |= dict(launch_pdl=True)
    down = options_by_tokens("decode_down_", num_tokens, device)
    return decode_up(hidden_size) | shared, down | shared


def vector_ffn(
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """`ffn` by the two kernels of this file, for at most TRACED_TOKENS tokens.

    overlap: whether they are launched as dependents, which code of torch.compile cannot do.
    """
    y = empty_output(x) if out is None else out
    num_tokens, hidden_size = map(int, x.shape)  # symbols of torch where shapes are dynamic
    up, down = make_plan(num_tokens, hidden_size, x.device, overlap)
    intermediate_size = weights.w_up.shape[0]
    width, num_columns = round_up(intermediate_size, 8), cdiv(hidden_size, down["BN"])
    h = weights.w_down_t.new_empty(width, num_tokens)
    flags = torch.empty(width, dtype=torch.int8, device=x.device)
    traced(decode_up_kernel, x)[(width // up["BN"],)](
        x,
        x_scale,
        *weights.first,
        weights.first_scale,
        weights.w_up,
        weights.b_up,
        weights.s_up,
        h,
        flags,
        activity,
        weights.act.threshold or None,
        intermediate_size,
        hidden_size,
        GATED=weights.gated,
        ACT=weights.act.name,
        EVEN=up["BK"] == hidden_size and width == intermediate_size,
        **up,
    )
    lists = torch.empty(num_columns, width // 8, dtype=torch.int32, device=x.device)
    traced(decode_down_kernel, h)[(num_columns,)](
        h,
        flags.view(torch.int64),
        weights.w_down_t,
        weights.b_down,
        lists,
        y,
        hidden_size,
        width,
        EIGHTS=next_power_of_2(width // 8),
        **down,
    )
    return y


def ffn(
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The layer for few tokens: y [M, K] of x [M, K], M at least 1 and best at most 512.

    g and h are rounded to y.dtype, u is not. `activity`: see `sparse_ffn`. Workspace:
    h, flags, and for each 16 outputs a list of N / 8 words; few.py's from four tokens on.
    Ours: the paper has no kernel for decoding.
    """
    x, x_scale = quantized(x, x_scale, weights)
    given = dict(activity=activity, out=out)
    if x.shape[0] > VECTOR_TOKENS:
        return few.ffn(x, weights, x_scale, **given)
    overlap = x_scale is None and launches_dependents(x.shape[0], x.device)
    return vector_ffn(x, weights, x_scale, **given, overlap=overlap)
