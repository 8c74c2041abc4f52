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


# What `ir.overflows` reports of sample_index_kernel in 2^20 programs of width 2^14.
INDEX_MODES = {
    "int32": [("row * width", "17,179,852,800")],
    "late": [("row * width", "17,179,852,800")],
    "scaled": [("(row // 64 * width + columns) * 64", "17,178,821,568")],
    "memory": [("tl.load(y_ptr + row) * width", "any number")],
    "loop": [("offset += width", "17,179,885,583")],
    "sum": [("offset = tl.sum(counts, 0) + columns", "17,179,869,184")],
    "descriptor": [("row * width", "17,179,852,800")],
    "int64": [],
    "masked": [],
    "few": [],
}


@triton.jit
def sample_index_kernel(x_ptr, y_ptr, y_desc, width, MODE: tl.constexpr):
    """Stores at an offset that is computed in one of several ways."""
    row = tl.program_id(0)
    columns = tl.arange(0, 16)
    offset = columns
    if MODE == "int64":
        offset = row.to(tl.int64) * width + columns
    elif MODE == "int32":
        offset = row * width + columns
    elif MODE == "late":
        offset = (row * width).to(tl.int64) + columns
    elif MODE == "scaled":
        offset = (row // 64 * width + columns) * 64
    elif MODE == "memory":
        offset = tl.load(y_ptr + row) * width + columns
    elif MODE == "masked":
        offset = (tl.load(y_ptr + row) & 0xFFFF) * width + columns
    elif MODE == "few":
        offset = row % 4 * width + columns
    elif MODE == "loop":
        for _ in range(0, tl.num_programs(0)):
            offset += width
    elif MODE == "sum":
        counts = tl.zeros((16384,), tl.int32) + tl.num_programs(0)
        offset = tl.sum(counts, 0) + columns
    elif MODE == "descriptor":
        columns += tl.sum(y_desc.load([row * width, 0]).to(tl.int32), 0)
    tl.store(x_ptr + offset, columns)


def compile_samples() -> tuple[dict, dict, dict]:
    """The problems that the three checks find in these kernels, by their MODE."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.empty(16, dtype=torch.bfloat16)
    y, table = x.float(), x.int()
    buffers, indices = {}, {}
    for mode in ("none", "x", "w", "two products"):
        compiled = sample_product_kernel[(1,)](x, x, y, y, 1024, mode, 64, 128, 64, num_stages=3)
        buffers[mode] = ir.races(compiled.asm["ttgir"])
    rows, width = 2**20, 2**14
    descriptor = TensorDescriptor.from_tensor(torch.empty(64, 16, dtype=torch.bfloat16), [16, 16])
    for mode in INDEX_MODES:
        compiled = sample_index_kernel[(rows,)](table, table, descriptor, width, mode)
        shape = [*descriptor.shape, *descriptor.strides]
        numbers = {"x_ptr": [], "y_ptr": [], "y_desc": shape, "width": [width]}
        indices[mode] = ir.overflows(compiled.asm["ttir"], numbers, (rows,))
    modes = ("once", "again", "barrier")
    kernels = {mode: sample_copy_kernel[(1,)](y, y, mode) for mode in modes}
    again = {mode: ir.read_back(kernel.asm["ttir"]) for mode, kernel in kernels.items()}
    return buffers, indices, again
