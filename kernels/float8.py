"""The tokens of a layer with FP8 weights, quantised: one program a row.

x in bf16 is read once; float8_e4m3fn values, whose largest is 448, and an fp32 scale are written.
Under torch.compile the reference is used instead, which fuses with the norm before the layer.

    x [M, K] bf16    values [M, K] float8_e4m3fn    scale [M] fp32

    amax = max(max |x|, 1e-12)    scale = amax * (1 / 448)    values = round(x * (448 / amax))

The same kernel quantises h of a dense layer whose down projection is in FP8 too: it computes h from
g and u, so that h is neither stored nor read.

Reference: twell.sparse.float8.quantize.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import INTERPRETED, hidden, narrow, next_power_of_2, on_device, rectified
from twell.kernels.launch import direct
from twell.kernels.options import row_warps, with_fusion
from twell.sparse.activations import Activation, Weights
from twell.sparse.float8 import FLOAT8

LARGEST = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def narrow_float8(value):
    """fp32 rounded to float8_e4m3fn: to nearest, ties to even; magnitudes above 448 become 448."""
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    if INTERPRETED:
        # Its cast does not round so. Three bits stay behind the first, in steps of at least 2^-9:
        # adding a power of two 20 places up rounds to them.
        word = value.to(tl.uint32, bitcast=True)
        exponent = tl.maximum((word >> 23) & 255, 121)
        magic = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
        rounded = tl.abs(value) + magic - magic
        normal = (rounded.to(tl.uint32, bitcast=True) >> 20) - (120 << 3)
        code = tl.where(rounded < 2.0**-6, (rounded * 2.0**9).to(tl.uint32), normal)
        return (code | ((word >> 24) & 128)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return value.to(tl.float8e4nv)


@direct
@triton.jit
def quantize_kernel(
    x_ptr, u_ptr, values_ptr, scale_ptr, stride, threshold, K, ACT: tl.constexpr, BK: tl.constexpr
):
    """One row of x; with ACT of h, which x makes as g, with u if there is one (dense.py)."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    x = tl.load(x_ptr + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    if ACT is not None:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        u = None
        if u_ptr is not None:
            u = tl.load(u_ptr + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
        x = narrow(hidden(rectified(x, threshold), u, dtype, ACT), dtype).to(tl.float32)
    finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 0) == BK
    amax = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST)
    tl.store(scale_ptr + row, tl.where(finite, amax * (1 / LARGEST), float("nan")))
    values = tl.where(finite, x * tl.div_rn(LARGEST, amax), 0.0)
    tl.store(values_ptr + row * K + k, narrow_float8(values), mask=k < K)


def quantize(
    x: Tensor, u: Tensor | None = None, act: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """Values [M, K] float8_e4m3fn and scales [M] fp32 of x [M, K] in bf16, M at least 1.

    With `act` of h instead, where x is the first projection's result and u that of the other, if
    there is one; both are contiguous. A row with NaN or inf gets the scale NaN.
    """
    num_rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    values = torch.empty(num_rows, size, dtype=FLOAT8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    options = with_fusion(BK=block, num_warps=row_warps(block))
    name, threshold = (None, None) if act is None else (act.name, act.threshold or None)
    given = x, u, values, scale, x.stride(0), threshold, size
    with on_device(x):
        quantize_kernel[(num_rows,)](*given, ACT=name, **options)
    return values, scale


def quantized(x: Tensor, x_scale: Tensor | None, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """x and its scales: quantised here where the weights are in FP8 and x is not."""
    return (x, x_scale) if weights.s_up is None or x_scale is not None else quantize(x)
