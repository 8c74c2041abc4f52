"""The dense layer: cuBLAS products, and one kernel between them that writes over g.

What `torch.compile` makes of the layer, without compiling: g and u are rounded to the storage type, h = relu(g) u is
computed in fp32 and rounded. Where most neurons are active no sparse path is faster.

Non-finite values. As in any dense layer an inf or NaN in a weight reaches every token, whether the neuron is active
for it or not: 0 * inf is NaN. The sparse paths leave such products out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from twell.kernels.common import cdiv, launch_options, narrow, relu

# 16 values to a thread, two loads of 16 bytes of each operand: what keeps a device's memory busy; no size is
# measurably better for so simple a kernel.
BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def relu_times_kernel(g_ptr, u_ptr, size, BLOCK: tl.constexpr):
    """Writes relu(g) * u over g."""
    # M x N may exceed 32 bits: 2^20 tokens of 5,632 neurons do.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(g_ptr + place, narrow(relu(g) * u, g_ptr.dtype.element_ty), mask=inside)


def plain(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> Tensor:
    """The dense layer in torch's operators, for torch.compile to fuse with what stands around it; w_down [K, N]."""
    u = F.linear(x, w_up, b_up)
    return F.linear(
        F.relu(u) if w_gate is None else F.relu(F.linear(x, w_gate, b_gate)) * u, w_down, b_down
    )


def ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down_t: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
) -> Tensor:
    """The dense layer: y [M, K].

    x [M, K]; weights [N, K], w_down_t the transpose of w_down, w_gate None in a non-gated layer; biases [N], [N], [K]
    or None. g, u and h are rounded to x.dtype. Workspace: g and u, 2 M N values (non-gated: M N). Ours; the paper's
    dense baseline computes the same.
    """
    u = F.linear(x, w_up, b_up)
    if w_gate is None:
        h = u.relu_()
    else:
        h = F.linear(x, w_gate, b_gate)
        relu_times_kernel[(cdiv(h.numel(), BLOCK),)](
            h, u, h.numel(), BLOCK=BLOCK, **launch_options(num_warps=NUM_WARPS, num_stages=1)
        )
    return F.linear(h, w_down_t.t(), b_down)
