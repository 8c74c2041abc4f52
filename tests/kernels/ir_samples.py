"""Kernels in which the checks of tests/kernels/ir.py have to find certain problems."""

from __future__ import annotations

import pytest

from tests.kernels import ir

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def sample_product_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    sums_ptr,
    K,
    MODE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x w^T; MODE: the operand that is also summed in registers, or multiplied once more."""
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BM), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :])
        w = tl.load(w_ptr + n[:, None] * K + k[None, :])
        acc = tl.dot(x, w.T, acc)
        if MODE == "x":
            sums += tl.sum(x.to(tl.float32), 1)
        if MODE == "w":
            sums += tl.sum(tl.reshape(w.to(tl.float32), (BM, BN // BM * BK)), 1)
        if MODE == "two products":
            squares = tl.dot(x, x.T, squares)
    tl.store(y_ptr + m[:, None] * BN + n[None, :], acc)
    tl.store(sums_ptr + m[:, None] * BM + m[None, :], squares + sums[:, None])


@triton.jit
def sample_copy_kernel(x_ptr, y_ptr, MODE: tl.constexpr):
    """Stores what it loads, and in two modes loads it again."""
    place = tl.arange(0, 16)
    tl.store(y_ptr + place, tl.load(x_ptr + place))
    if MODE == "barrier":
        tl.debug_barrier()
    if MODE != "once":
        tl.store(x_ptr + place, tl.load(y_ptr + place) + 1)


def compile_samples() -> tuple[dict, dict]:
    """The problems that the two checks find in these kernels, by their MODE."""
    import torch

    x = torch.empty(16, dtype=torch.bfloat16)
    y, buffers = x.float(), {}
    for mode in ("none", "x", "w", "two products"):
        compiled = sample_product_kernel[(1,)](x, x, y, y, 1024, mode, 64, 128, 64, num_stages=3)
        buffers[mode] = ir.races(compiled.asm["ttgir"])
    modes = ("once", "again", "barrier")
    kernels = {mode: sample_copy_kernel[(1,)](y, y, mode) for mode in modes}
    return buffers, {mode: ir.read_back(kernel.asm["ttir"]) for mode, kernel in kernels.items()}
