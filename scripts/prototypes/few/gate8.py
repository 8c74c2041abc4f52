"""Decoding one or two tokens with an 8-bit copy of w_gate that chooses whose rows are read.

The gate's rows are three quarters of the bytes that one token reads, and nearly all of them only
show that a neuron is inactive. The copy shows the same from half of the bytes: a neuron is skipped
where an upper bound of its gate is not active. All others are computed from their bf16 rows, by the
same operations in the same order as without the copy. So the copy changes no bit of the result.

    q      [N, K] int8        the copy, in groups of G entries of a row
    scale  [N, K / G] bf16    an entry of the copy is q * scale
    bound  [N, K / G] bf16    e below

The bound. Let a be the exact product of a row w with x, and j a group. With d = w - q * scale and
Cauchy-Schwarz in each group,

    |a - sum_k (q * scale)_k x_k|  <=  sum_j |d_j| |x_j|.

Without the copy, a kernel sums K products in fp32, each exact or fused into the sum. In any order,
a sum of n terms t in fp32 is off by at most c sum |t|, where c = n u / (1 - n u) and u = 2^-24
(Higham, Accuracy and Stability, 4.2), so by at most c sum_j |w_j| |x_j|. The sum over the copy is
off by at most c sum_j |q_j scale_j| |x_j|, and |q_j scale_j| <= |w_j| + |d_j|; n = K + 64 counts the
product with the scale and the additions of the bound as well. So with

    e_j = (1 + 2^-8) (|d_j| + c |w_j| + c (|w_j| + |d_j|)),

computed in fp64 and rounded up,

    (sum without the copy)  <=  V = sum_j (scale_j sum_k q_k x_k + e_j |x_j|)  as computed.

2^-8 covers the norms |x_j| in fp32 (relative error below (G + 4) u) and the rounding of the sum of
the e_j |x_j|. Products below the normal range may each lose 2^-149: |x_j| is at least 1e-18 and e_j
at least 1e-20, whose product 1e-38 is above 4 K 2^-149, where a group of w is not all 0 (then both
sums have exact zeros). What follows V, the bias, the rounding to bf16 and the threshold, never
decreases where V does not. So if V is not active, the neuron is not. A NaN or an overflow in V is
active. A row with an inf or NaN has e = inf, which makes V inf or NaN.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels import decode
from twell.kernels.common import (
    Layer,
    add_activity,
    empty_output,
    gate_value,
    load,
    narrow,
    next_power_of_2,
    of_gate,
    of_up,
    round_up,
)
from twell.kernels.options import with_fusion


class Copy(NamedTuple):
    q: Tensor
    scale: Tensor
    bound: Tensor


def copy_gate(w: Tensor, group: int = 128) -> Copy:
    """The copy of w [N, K], for a K that is a multiple of `group`."""
    (n, k), parts = w.shape, w.double().unflatten(1, (-1, group))
    finite = w.isfinite().all(1)[:, None]
    amax = parts.abs().amax(2).where(finite, 0.0)
    scale = _rounded_up(amax / 127)
    wide = scale.double()[:, :, None]
    q = torch.where(wide > 0, parts / wide, 0.0).nan_to_num(0.0).round().clamp(-127, 127)
    d, norm = (parts - q * wide).norm(dim=2), parts.norm(dim=2)
    c = (k + 64) * 2.0**-24
    c /= 1 - c
    e = (1 + 2.0**-8) * (d + c * norm + c * (norm + d))
    e = torch.where(amax > 0, e.clamp_min(1e-20), 0.0).where(finite, torch.inf)
    return Copy(q.to(torch.int8).flatten(1), scale, _rounded_up(e))


def _rounded_up(value: Tensor) -> Tensor:
    """Positive fp64 values to bf16, never below."""
    rounded = value.to(torch.bfloat16)
    above = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(rounded.double() < value, above, rounded)


@triton.jit
def _one_neuron(
    x_ptr,
    w_ptr,
    b_ptr,
    wu_ptr,
    bu_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    threshold,
    neuron,
    K,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """decode_few_up_kernel of one neuron, operation by operation."""
    neurons = neuron + tl.arange(0, 1)
    k = tl.arange(0, BK)
    place = neurons.to(tl.int64)[:, None] * K + k[None, :]
    w = load(w_ptr + place, (k < K)[None, :], EVEN).to(tl.float32)
    tokens = tl.arange(0, TOKENS)
    g = tl.zeros((1, TOKENS), tl.float32)
    for token in tl.static_range(M):
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        g += tl.where((tokens == token)[None, :], tl.sum(w * x[None, :], 1)[:, None], 0.0)
    if b_ptr is not None:
        g += tl.load(b_ptr + neurons).to(tl.float32)[:, None]
    h = gate_value(g, threshold, h_ptr.dtype.element_ty).to(tl.float32)
    active = (h != 0) & (tokens < M)[None, :]
    flag = tl.max(tl.max(active.to(tl.int32), 1), 0)
    tl.store(flags_ptr + neuron, flag.to(tl.int8))
    if flag != 0:
        if activity_ptr is not None:
            tl.atomic_add(activity_ptr + 2, tl.sum(active.to(tl.int64)), sem="relaxed")
            tl.atomic_add(activity_ptr + 3, flag.to(tl.int64), sem="relaxed")
        h = of_gate(h, h_ptr.dtype.element_ty, ACT)
        if GATED:
            wu = tl.load(wu_ptr + place, mask=(k < K)[None, :], other=0.0).to(tl.float32)
            u = tl.zeros((1, TOKENS), tl.float32)
            for token in tl.static_range(M):
                row = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
                dots = tl.sum(wu * row[None, :], 1)
                u += tl.where((tokens == token)[None, :], dots[:, None], 0.0)
            if bu_ptr is not None:
                u += tl.load(bu_ptr + neurons).to(tl.float32)[:, None]
            h *= of_up(u, ACT)
        result = narrow(tl.where(active, h, 0.0), h_ptr.dtype.element_ty)
        h_ptrs = h_ptr + neurons[:, None] * BM + tokens[None, :]
        tl.store(h_ptrs, result, mask=(tokens < M)[None, :])


@triton.jit(do_not_specialize=["N"])
def decode_copy_up_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    bound_ptr,
    w_ptr,
    b_ptr,
    wu_ptr,
    bu_ptr,
    h_ptr,
    flags_ptr,
    activity_ptr,
    read_ptr,
    threshold,
    N,
    K,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """h and flags of BN neurons for one or two tokens; `read` counts rows of w that were read."""
    first = tl.program_id(0) * BN
    neurons = first + tl.arange(0, BN)
    groups = tl.arange(0, BK // GROUP)
    k = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (neurons < N)[:, None, None] & (k < K)[None, :, :]
    q = load(q_ptr + neurons.to(tl.int64)[:, None, None] * K + k[None, :, :], inside, EVEN)
    q = q.to(tl.float32)
    place = neurons.to(tl.int64)[:, None] * (K // GROUP) + groups[None, :]
    inside = (neurons < N)[:, None] & (groups < K // GROUP)[None, :]
    scale = load(scale_ptr + place, inside, EVEN).to(tl.float32)
    bound = load(bound_ptr + place, inside, EVEN).to(tl.float32)
    maybe = tl.zeros((BN,), tl.int32)
    for token in tl.static_range(M):
        x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(x * x, 1) + 1e-36)
        dots = tl.sum(q * x[None, :, :], 2)
        slack = tl.sum(bound * norm[None, :], 1)
        most = tl.sum(dots * scale, 1) + slack
        if b_ptr is not None:
            most += tl.load(b_ptr + neurons, mask=neurons < N, other=0.0).to(tl.float32)
        most = gate_value(most, threshold, h_ptr.dtype.element_ty).to(tl.float32)
        maybe |= ((most != 0) | (slack >= 2.0**96)).to(tl.int32)
    maybe = tl.where(neurons < N, maybe, 0)
    # Rows beyond N too: decode_few_down_kernel reads flags in words of eight.
    tl.store(flags_ptr + neurons, tl.zeros((BN,), tl.int8), mask=maybe == 0)
    if activity_ptr is not None:
        none = 0 * tl.sum(maybe, 0)
        add_activity(activity_ptr, tl.program_id(0) == 0, M, none, none)
    if read_ptr is not None:
        tl.atomic_add(read_ptr, tl.sum(maybe, 0), sem="relaxed")
    if tl.max(maybe, 0) != 0:
        for i in range(BN):
            if tl.sum(tl.where(neurons == first + i, maybe, 0), 0) != 0:
                _one_neuron(
                    x_ptr,
                    w_ptr,
                    b_ptr,
                    wu_ptr,
                    bu_ptr,
                    h_ptr,
                    flags_ptr,
                    activity_ptr,
                    threshold,
                    first + i,
                    K,
                    M,
                    TOKENS,
                    GATED,
                    ACT,
                    EVEN,
                    BM,
                    BK,
                )


OPTIONS = [dict(BN=n, GROUP=g) for n, g in ((1, 128), (2, 128), (4, 128), (8, 128), (1, 64), (2, 64), (4, 64))]


def ffn(x: Tensor, layer: Layer, copy: Copy, options: dict, activity=None, read=None) -> Tensor:
    """y [M, K] of one or two tokens x, with the same bits as decode.ffn."""
    (num_tokens, k), n, y = x.shape, len(layer.w_up), empty_output(x)
    width, block_k = round_up(n, 64), next_power_of_2(k)
    h = y.new_empty(width, 16)
    flags = torch.empty(1, width // 8, dtype=torch.int64, device=x.device)
    w, b = layer.first
    decode_copy_up_kernel[(width // options["BN"],)](
        x,
        *copy,
        w,
        b,
        layer.w_up,
        layer.b_up,
        h,
        flags.view(torch.int8),
        activity,
        read,
        layer.act.threshold or None,
        n,
        k,
        M=num_tokens,
        TOKENS=next_power_of_2(num_tokens),
        GATED=layer.gated,
        ACT=layer.act.name,
        EVEN=block_k == k and width == n,
        BM=16,
        BK=block_k,
        **with_fusion(num_warps=1, num_stages=1, **options),
    )
    decode._down(h, flags, layer, y)
    return y


def compile_only(w: Tensor, options: dict) -> None:
    n, groups = len(w), w.shape[1] // options["GROUP"]
    s = torch.empty(n, groups, dtype=torch.bfloat16)
    copy = Copy(torch.empty(w.shape, dtype=torch.int8), s, s)
    for m in (1, 2):
        ffn(w[:m], Layer(w, w, w), copy, options)


def measure(gpu, Bench, final, kernels, say, failed) -> dict:
    """Today's path and the copy's variants for one and two tokens."""
    from twell.sparse import reference

    record = {}
    for m in (1, 2):
        bench = Bench(m, gpu)
        compiled = torch.compile(reference.ffn, fullgraph=True, dynamic=False)
        calls = {"dense": bench.case.calls(compiled, plain=True), "today": bench.calls("today")}
        copies = {g: [copy_gate(layer.w_gate, g) for layer in bench.layers] for g in (64, 128)}
        for i, options in enumerate(OPTIONS):
            if ("gate8", i) not in failed:
                pairs = zip(bench.layers, copies[options["GROUP"]], strict=True)
                name = " ".join(f"{k}{v}" for k, v in options.items())
                calls[name] = [partial(ffn, bench.x, *pair, options) for pair in pairs]
        times = final(bench, calls)
        rows = {}
        for g in (64, 128):
            read = torch.zeros(1, dtype=torch.int32, device="cuda")
            ffn(bench.x, bench.layers[0], copies[g][0], dict(BN=1, GROUP=g), read=read)
            rows[g] = int(read)
        ours = {n: t["us"] for n, t in times.items() if n.startswith("BN") and "us" in t}
        best = min(ours, key=ours.get)
        parts = {n: kernels(bench, calls[n]) for n in ("today", best)}
        record[m] = {"times": times, "rows read": rows, "kernels": parts}
        now, dense = times["today"]["us"], times["dense"]["us"]
        say(f"8-bit copy, {m} tokens: dense {dense}, today {now} ({dense / now:.2f}), best {best}",
            f"{ours[best]} ({dense / ours[best]:.2f}), rows read {rows}", ours, parts,
            "same bits" if times[best]["same_bits"] else "BITS DIFFER")
    return record
