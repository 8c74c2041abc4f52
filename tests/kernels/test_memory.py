"""What the interpreter finds where a GPU goes wrong; conftest.py watches the accesses of all tests.

Indices of 32 bits suffice in the largest layers: smaller ones have to do with fewer bits.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests import fuzz, fuzz_training
from tests.factories import memory
from tests.factories.kernels import DEVICE, integer_case
from twell.kernels import training

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


@triton.jit
def again_kernel(x_ptr, BARRIER: tl.constexpr):
    places = tl.arange(0, 8)
    tl.store(x_ptr + places, places)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + places, tl.load(x_ptr + places) + 1)


def test_loads_of_what_another_thread_may_store_are_found():
    x = torch.zeros(8, dtype=torch.int32)
    again_kernel[(2,)](x, True)
    assert x.tolist() == [*range(1, 9)]
    with pytest.raises(InterpreterError, match="what the program stored"):
        again_kernel[(1,)](x, False)


@triton.jit
def index_kernel(x_ptr, width, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * width, 1)


def test_indices_that_need_64_bits_are_found(monkeypatch):
    memory.check_integers(16, monkeypatch.setattr)
    x = torch.zeros(21, dtype=torch.int32)
    index_kernel[(4,)](x, 5, False)
    index_kernel[(5,)](x, 5, True)
    assert x.nonzero().flatten().tolist() == [0, 5, 10, 15, 20]
    with pytest.raises(InterpreterError, match="mul reaches 20"):
        index_kernel[(5,)](x, 5, False)


# Tokens, neurons and hidden size: M N or M K is above what a number may reach, and N K is not, as
# 2^31 lies in the largest layers.
MOST = 4500
LARGE = []
for kind in ("rowwise", "twell", "union", "union training"):
    LARGE += [(kind, 140, 140, 16), (kind, 140, 16, 144)]
for sizes in ((70, 140, 16), (70, 16, 144)):
    LARGE += [pytest.param("hybrid training", *sizes, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind, num_tokens, num_neurons, hidden_size", LARGE)
def test_indices_are_in_range(kind, num_tokens, num_neurons, hidden_size, monkeypatch):
    memory.check_integers(MOST, monkeypatch.setattr)
    path, _, trained = kind.partition(" ")
    sizes = dict(num_tokens=num_tokens, intermediate_size=num_neurons, hidden_size=hidden_size)
    case = integer_case(path, **sizes, pattern="edges", biases=True)
    if not trained:
        fuzz.check(case, DEVICE)
        return
    for dense_from in (1, 64):
        monkeypatch.setattr(training, "DENSE_FROM", dense_from)
        fuzz_training.check_training(case, DEVICE, path)
