"""The dense layer: three cuBLAS products, and one kernel that computes relu(g) u over g.

This is the work of torch.compile on the layer, without compilation: g and u are rounded to the
storage type; h = relu(g) u is computed in fp32 and rounded. Where most neurons are active, no
sparse path is faster. Under torch.compile the operators use the plain formula instead, which fuses
with its surroundings.

With gate and up in FP8 their products are torch's, in FP8 too, and the third one stays in bf16.

    x, y [M, K]    g, u, h [M, N]
    g = x w_gate^T + b_gate    u = x w_up^T + b_up    h = relu(g) u    y = h w_down_t + b_down
    without w_gate: h = relu(u)

As in any dense layer, an inf or NaN in a weight reaches every token, also where the neuron is
inactive: 0 * inf is NaN. Reference: twell.sparse.reference.ffn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from twell.kernels.common import Layer, cdiv, narrow, relu
from twell.kernels.options import launch_options
from twell.sparse import float8


@triton.jit
def relu_times_kernel(g_ptr, u_ptr, size, BLOCK: tl.constexpr):
    """Writes relu(g) * u over g."""
    # M x N may exceed 32 bits: 2^20 tokens of 5,632 neurons do.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(g_ptr + place, narrow(relu(g) * u, g_ptr.dtype.element_ty), mask=inside)


def relu_times(g: Tensor, u: Tensor) -> Tensor:
    """relu(g) * u in place of g, both contiguous and of one shape."""
    options = launch_options("dense", g.device)
    relu_times_kernel[(cdiv(g.numel(), options["BLOCK"]),)](g, u, g.numel(), **options)
    return g


def ffn(x: Tensor, layer: Layer, x_scale: Tensor | None = None) -> Tensor:
    """The dense layer: y [M, K] of x [M, K]; g, u and h are rounded to y.dtype.

    Workspace: g and u, 2 M N values, without a gate M N. The paper's dense baseline computes
    the same.
    """

    def linear(w: Tensor, w_scale: Tensor | None, b: Tensor | None) -> Tensor:
        if x_scale is None:
            return F.linear(x, w, b)
        return float8.linear(x, x_scale, w, w_scale, b)

    u = linear(layer.w_up, layer.s_up, layer.b_up)
    if layer.gated:
        h = relu_times(linear(layer.w_gate, layer.s_gate, layer.b_gate), u)
    else:
        h = u.relu_()
    return F.linear(h, layer.w_down_t.t(), layer.b_down)
