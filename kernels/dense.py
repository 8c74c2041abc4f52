"""The dense layer: three cuBLAS products, and one kernel that computes h = relu(g) u over g.

This is the work of torch.compile on the layer, without compilation: g and u are rounded to the
storage type; h is computed in fp32 and rounded. Where most neurons are active, no
sparse path is faster. Under torch.compile the operators use the plain formula instead, which fuses
with its surroundings.

With gate and up in FP8 their products are torch's, in FP8 too, and so is the third one where the
weights have `down_fp8`; one kernel then computes h and quantises it.

    x, y [M, K]    g, u, h [M, N]
    g = x w_gate^T + b_gate    u = x w_up^T + b_up    h = relu(g) u    y = h w_down_t + b_down
    without w_gate: h = relu(u); other activations: twell/sparse/activations.py

As in any dense layer, an inf or NaN in a weight reaches every token, also where the neuron is
inactive: 0 * inf is NaN. Reference: twell.sparse.reference.ffn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from twell.kernels.common import cdiv, hidden, narrow, rectified
from twell.kernels.float8 import quantize, quantized
from twell.kernels.launch import direct
from twell.kernels.options import launch_options
from twell.sparse import float8
from twell.sparse.activations import RELU, Activation, Weights


@direct
@triton.jit
def relu_times_kernel(g_ptr, u_ptr, threshold, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Writes h, that is relu(g) * u, over g; without u what g alone makes."""
    dtype: tl.constexpr = g_ptr.dtype.element_ty
    # M x N may exceed 32 bits: 2^20 tokens of 5,632 neurons do.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = rectified(tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32), threshold)
    u = None
    if u_ptr is not None:
        u = tl.load(u_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(g_ptr + place, narrow(hidden(g, u, dtype, ACT), dtype), mask=inside)


def relu_times(g: Tensor, u: Tensor | None, act: Activation = RELU) -> Tensor:
    """h in place of g; u is None without a gate. Both are contiguous and of one shape."""
    options = launch_options("dense", g.device) | {"ACT": act.name}
    grid = (cdiv(g.numel(), options["BLOCK"]),)
    relu_times_kernel[grid](g, u, act.threshold or None, g.numel(), **options)
    return g


def ffn(
    x: Tensor,
    weights: Weights,
    x_scale: Tensor | None = None,
    *,
    activity: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The dense layer: y [M, K] of x [M, K]; g, u and h are rounded to y.dtype.

    Nothing is added to `activity`. Workspace: g and u, 2 M N values, without a gate M N. The
    paper's dense baseline computes the same.
    """
    x, x_scale = quantized(x, x_scale, weights)

    def linear(w: Tensor, w_scale: Tensor | None, b: Tensor | None) -> Tensor:
        if x_scale is None:
            return F.linear(x, w, b)
        return float8.linear(x, x_scale, w, w_scale, b)

    g, u = linear(weights.w_up, weights.s_up, weights.b_up), None
    if weights.gated:
        g, u = linear(weights.w_gate, weights.s_gate, weights.b_gate), g
    if weights.down_fp8 is not None:
        h = quantize(g, u, weights.act)
        y = float8.linear(*h, *weights.down_fp8, weights.b_down)
        return y if out is None else out.copy_(y)
    simple = u is None and weights.act == RELU
    h = g.relu_() if simple else relu_times(g, u, weights.act)
    if out is None:
        return F.linear(h, weights.w_down_t.t(), weights.b_down)
    if weights.b_down is None:
        return torch.mm(h, weights.w_down_t, out=out)
    return torch.addmm(weights.b_down, h, weights.w_down_t, out=out)
