"""Device functions and integer helpers of all kernels.

Values are stored in bf16 or fp16 and accumulated in fp32. A neuron is active for a token where its
value after ReLU *and rounding to the storage type* is `!= 0`: NaN is active, -0.0 is not. How g
and u make h is the activation ACT, by the names of twell/sparse/activations.py. A threshold is a
number, or None for 0.

Without a GPU, kernels run under TRITON_INTERPRET=1. There bf16 is a bare 16-bit integer: arithmetic
and tl.dot use its bits as a number, and rounding to it truncates. `wide` and `narrow` stand at each
load and store and hide this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
DTYPES = torch.bfloat16, torch.float16


class Gradients(NamedTuple):
    """Where a backward pass writes: each like the tensor of its name, or None to leave it out."""

    x: Tensor | None
    w_gate: Tensor | None
    w_up: Tensor | None
    w_down_t: Tensor | None
    b_gate: Tensor | None
    b_up: Tensor | None


@triton.jit
def wide(value):
    """A loaded value as an operand: unchanged on a GPU, fp32 in the interpreter."""
    if INTERPRETED:
        return value.to(tl.float32)
    else:
        return value


@triton.jit
def narrow(value, dtype):
    """fp32 rounded to the storage type: to nearest, ties to even; a NaN stays one."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(value == value, rounded, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def relu(value):
    """max(value, 0), NaN where the value is NaN."""
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rectified(value, threshold):
    """relu, or 0 up to the threshold; NaN stays NaN. What meets a threshold is rounded before."""
    if threshold is None:
        return relu(value)
    else:
        return tl.where(value <= threshold, 0.0, value)


@triton.jit
def gate_value(value, threshold, dtype):
    """g of the first projection's result in fp32, rounded to the storage type."""
    if threshold is not None:
        value = narrow(value, dtype).to(tl.float32)
    return narrow(rectified(value, threshold), dtype)


@triton.jit
def of_gate(g, dtype, ACT):
    """The factor of h that g makes, both in fp32; a square is rounded, as torch.square rounds."""
    if ACT == "relu2":
        return narrow(g * g, dtype).to(tl.float32)
    else:
        return g


@triton.jit
def of_up(u, ACT):
    """The factor of h that u makes, both in fp32."""
    if ACT == "drelu":
        return relu(u)
    else:
        return u


@triton.jit
def hidden(g, u, dtype, ACT):
    """h of g and of the other projection's result u, all in fp32; without a gate u is None."""
    h = of_gate(g, dtype, ACT)
    if u is not None:
        h *= of_up(u, ACT)
    return h


@triton.jit
def through_gate(gradient, g, ACT):
    """The gradient of the first projection's result, from that of `of_gate`."""
    if ACT == "relu2":
        return gradient * (2 * g)
    else:
        return gradient


@triton.jit
def tile_of(number, num_row_tiles, num_column_tiles, GROUP):
    """Row and column of a tile by its number, in columns of GROUP row tiles."""
    per_group = GROUP * num_column_tiles
    first = number // per_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    return first + number % per_group % height, number % per_group // height


@triton.jit
def scaled(acc, x_scale_ptr, w_scale_ptr, tokens, neurons, M, N, BY_NEURON):
    """acc times the scales of its tokens and neurons, 0 outside; unchanged without scales."""
    if x_scale_ptr is not None:
        x = tl.load(x_scale_ptr + tokens, mask=tokens < M, other=0.0)
        w = tl.load(w_scale_ptr + neurons, mask=neurons < N, other=0.0)
        acc *= w[:, None] * x[None, :] if BY_NEURON else x[:, None] * w[None, :]
    return acc


@triton.jit
def with_bias(acc, b_ptr, places, size, BY_ROW):
    """acc + b[places], by rows or columns; b is 0 from `size` on, or not masked if that is None."""
    if b_ptr is not None:
        if size is None:
            b = tl.load(b_ptr + places).to(tl.float32)
        else:
            b = tl.load(b_ptr + places, mask=places < size, other=0.0).to(tl.float32)
        acc += b[:, None] if BY_ROW else b[None, :]
    return acc


@triton.jit
def popcount(bits):
    """Number of bits that are set in each int32."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load(pointers, inside, EVEN):
    """The values at the pointers, 0 where not `inside`; EVEN: all are inside.

    A mask costs the row-wise kernel a third of its speed, so it is left out where it can be.
    """
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def put(ptr, place, value, inside=None):
    """Stores fp32 values, rounded to the type that the pointer has; nothing where it is None."""
    if ptr is not None:
        tl.store(ptr + place, narrow(value, ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_activity(activity_ptr, first, M, entries, in_unions):
    """Adds one program's counts to `activity`; the `first` program adds the tokens and blocks."""
    if first:
        tl.atomic_add(activity_ptr, tl.cast(M, tl.int64), sem="relaxed")
        tl.atomic_add(activity_ptr + 1, tl.cast(tl.cdiv(M, 64), tl.int64), sem="relaxed")
    tl.atomic_add(activity_ptr + 2, entries.to(tl.int64), sem="relaxed")
    tl.atomic_add(activity_ptr + 3, in_unions.to(tl.int64), sem="relaxed")


def on_device(x: Tensor) -> AbstractContextManager:
    """Makes x's device the current one, on which Triton launches."""
    # Mostly it is current already, and to ask takes a tenth of the time.
    elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


def empty_output(x: Tensor) -> Tensor:
    """Where y goes: contiguous, of x's shape and type, in bf16 if x is in FP8."""
    dtype = torch.bfloat16 if x.itemsize == 1 else x.dtype
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def chunks(size: int, *tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The tensors `size` rows at a time; None stays None."""
    num_rows = tensors[0].shape[0]
    if 0 < num_rows <= size:
        yield tensors  # a slice takes a microsecond
        return
    for start in range(0, num_rows, size):
        yield tuple(t if t is None else t[start : start + size] for t in tensors)


# Triton's own two take ten times as long, which every launch would pay.
def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below the number, from 1."""
    return 1 << (number - 1).bit_length()


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple
