"""Kernels in which the checks of tests/kernels/ir.py have to find certain problems."""

from __future__ import annotations

import pytest

from tests.kernels import ir

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def sample_product_kernel(x_ptr, w_ptr, y_ptr, K, SUM: tl.constexpr, BN: tl.constexpr):
    """x w^T, 64 columns at a time; with SUM registers also add the rows of x."""
    m = tl.arange(0, 64)
    n = tl.arange(0, BN)
    acc = tl.zeros((64, BN), tl.float32)
    sums = tl.zeros((64,), tl.float32)
    for start in range(0, K, 64):
        k = start + tl.arange(0, 64)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :])
        w = tl.load(w_ptr + n[:, None] * K + k[None, :])
        acc = tl.dot(x, w.T, acc)
        if SUM:
            sums += tl.sum(x.to(tl.float32), 1)
    tl.store(y_ptr + m[:, None] * BN + n[None, :], acc + sums[:, None])


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
    "late": [("row * width", "17,179,852,800")],
    "memory": [("tl.load(y_ptr + row) * width", "any number")],
    "loop": [("offset += width", "17,179,885,583")],
    "sum": [("offset = tl.sum(counts, 0) + columns", "17,179,869,184")],
    "int64": [],
    "masked": [],
    "few": [],
}


@triton.jit
def sample_index_kernel(x_ptr, y_ptr, width, MODE: tl.constexpr):
    """Stores at an offset that is computed in one of several ways."""
    row = tl.program_id(0)
    columns = tl.arange(0, 16)
    offset = columns
    if MODE == "int64":
        offset = row.to(tl.int64) * width + columns
    elif MODE == "late":
        offset = (row * width).to(tl.int64) + columns
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
    tl.store(x_ptr + offset, columns)


def compile_samples() -> tuple[list, dict, dict]:
    """The problems that the three checks find in these kernels, by their mode."""
    import torch

    x = torch.empty(16, dtype=torch.bfloat16)
    y, table, rows, width = x.float(), x.int(), 2**20, 2**14
    products = [sample_product_kernel[(1,)](x, x, y, 1024, n, 128, num_stages=3) for n in (0, 1)]
    buffers = [ir.races(product.asm["ttgir"]) for product in products]
    indices = {}
    for mode in INDEX_MODES:
        compiled = sample_index_kernel[(rows,)](table, table, width, mode)
        numbers = {"x_ptr": [], "y_ptr": [], "width": [width]}
        indices[mode] = ir.overflows(compiled.asm["ttir"], numbers, (rows,))
    modes = ("once", "again", "barrier")
    kernels = {mode: sample_copy_kernel[(1,)](y, y, mode) for mode in modes}
    again = {mode: ir.read_back(kernel.asm["ttir"]) for mode, kernel in kernels.items()}
    return buffers, indices, again
