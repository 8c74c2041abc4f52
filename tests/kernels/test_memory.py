"""Accesses outside of a launch's tensors are found; conftest.py watches all kernels so."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.factories.kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="in the interpreter alone")


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, first, ATOMIC: tl.constexpr, SIZE: tl.constexpr):
    places = first + tl.arange(0, SIZE)
    x = tl.load(x_ptr + places, mask=places < n)
    if ATOMIC:
        tl.atomic_add(y_ptr + places, x, mask=places < n)
    else:
        tl.store(y_ptr + places, x, mask=places < n)


@pytest.mark.parametrize("atomic", [False, True])
def test_accesses_outside_of_a_tensor_are_found(atomic):
    """Also where that memory is of the tensor's own storage."""
    for first, n in ((0, 6), (2, 6), (0, 0)):
        x, y = torch.arange(1.0, 7.0), torch.zeros(6)
        copy_kernel[(1,)](x, y, n, first, atomic, 8)
        assert torch.equal(y[first:n], x[first:n]) and y.count_nonzero() == max(n - first, 0)
    large, inner = torch.zeros(100), torch.zeros(100)[10:16]
    for x, y, first, n, access in (
        (inner, large, 0, 7, "load"),
        (inner, large, -1, 6, "load"),
        (inner, large, 10**9, 10**9 + 1, "load"),
        (large, inner, 5, 7, "rmw" if atomic else "store"),
    ):
        with pytest.raises(InterpreterError, match=f"{access}.* outside of all"):
            copy_kernel[(1,)](x, y, n, first, atomic, 8)
