"""Launches of compiled kernels without Triton's preparation, and descriptors of matrices.

A small layer waits for Python. In each call Triton binds a kernel's arguments by name, inspects
their types, alignment and divisibility, and looks the compiled code up. `direct` does that once for
each case and keeps the code. The key of a case is everything on which the code depends: device,
types and alignment of tensors, blocks of descriptors, constants, launch options, and integers by
their value. A new key goes through Triton.

In the interpreter kernels are launched as Triton does. docs/kernel-log.md has the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_CASES = 4096  # kept of a kernel; then all are dropped


def _of_tensor(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.data_ptr() % 16


def _of_tuple(values: tuple) -> tuple:
    return tuple([_KINDS[type(value)](value) for value in values])


def _of_descriptor(value) -> tuple:
    """Of Triton's and Gluon's descriptors, which have a layout too."""
    return type(value), value.base.dtype, *value.block_shape, getattr(value, "layout", None)


class _Kinds(dict):
    """Type of an argument -> the function that makes its part of the key."""

    def __missing__(self, of: type) -> Callable:
        kinds = ((Tensor, _of_tensor), (tuple, _of_tuple), (object, _of_descriptor))
        # Assigned once: another thread may look it up meanwhile.
        self[of] = next(function for kind, function in kinds if issubclass(of, kind))
        return self[of]


_KINDS = _Kinds({float: type, **dict.fromkeys((bool, int, type(None)), repr)})


class Direct:
    """A kernel, launched as `kernel[grid](*arguments, **constants_and_options)`."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.constants = [p.name for p in kernel.params if p.is_constexpr]
        self.cases: dict[tuple, tuple] = {}

    def __getattr__(self, name: str):
        if name == "kernel":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments, **options) -> None:
        kinds = [value if type(value) is int else _KINDS[type(value)](value) for value in arguments]
        device = driver.active.get_current_device()
        case = device, *kinds, *options.items()
        known = self.cases.get(case)
        if known is not None:
            compiled, constants = known
            stream = driver.active.get_current_stream(device)
            compiled[(*grid, 1, 1)](*arguments, *constants, stream=stream)
            return
        compiled = self.kernel[grid](*arguments, **options)
        if len(self.cases) >= MAX_CASES:
            self.cases.clear()
        # Else a hook of Triton's prevented the compilation, or it is under way.
        if isinstance(compiled, CompiledKernel):
            self.cases[case] = compiled, tuple(options[name] for name in self.constants)


def direct(kernel):
    """The kernel as `Direct`; its constants are given by name, all other arguments by place."""
    return kernel if triton.knobs.runtime.interpret else Direct(kernel)


def traced(kernel, tensor: Tensor):
    """The kernel; where PyTorch traces the tensor, one that puts launches into its graph."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return kernel if plain else torch.library.wrap_triton(kernel.kernel)


@lru_cache(MAX_CASES)
def _template(make: Callable, block: tuple[int, int], shape, strides, dtype) -> tuple[type, dict]:
    """Type and fields of a descriptor of such a matrix, after Triton's checks."""
    matrix = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    made = make(matrix, list(block))
    return type(made), {name: value for name, value in vars(made).items() if name != "base"}


def descriptor(matrix: Tensor, block: Sequence[int], make: Callable = TensorDescriptor.from_tensor):
    """A descriptor of an aligned matrix by blocks: `make(matrix, block)`.

    Triton would check its shape in every call, where mostly the address alone is new.
    """
    size = matrix.shape, matrix.stride(), matrix.dtype
    kind, fields = _template(make, tuple(block), *size)
    made = object.__new__(kind)
    made.__dict__.update(fields, base=matrix)
    return made
