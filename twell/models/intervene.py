"""Change neurons while a model runs: silence them, scale them, set their value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral

import torch
from torch import nn

from twell.models.convert import sparse_ffns
from twell.sparse.edit import Edit


@contextlib.contextmanager
def silence(
    model: nn.Module,
    layers: int | Iterable[int] | None = None,
    neurons: int | Iterable[int] | None = None,
) -> Iterator[None]:
    """Silence feed-forward layers, or neurons of one layer, inside a `with` block.

    layers: their numbers, or one; None: all. neurons: one or more of this one layer.

    Silent layers and neurons add nothing to the residual stream and get no gradient from the
    output. Statistics and the L1 term still count them. Every backend does this, in training too.
    Nested blocks silence both selections, and each restores the state before it. A captured CUDA
    graph keeps the state of its capture. Raises IndexError for a layer or neuron that the model
    does not have, ValueError for neurons without one layer.
    """
    if neurons is not None:
        with intervene(model, layers, neurons, scale=0):
            yield
        return
    ffns = sparse_ffns(model)
    chosen = range(len(ffns)) if layers is None else _numbers("layer", layers, len(ffns))
    before = [ffn.silenced for ffn in ffns]
    try:
        for layer in chosen:
            ffns[layer].silenced = True
        yield
    finally:
        for ffn, silenced in zip(ffns, before, strict=True):
            ffn.silenced = silenced


@contextlib.contextmanager
def intervene(
    model: nn.Module,
    layer: int,
    neurons: int | Iterable[int],
    *,
    scale: float | Sequence[float] | None = None,
    value: float | Sequence[float] | None = None,
) -> Iterator[None]:
    """Scale neurons of a layer, or set their h to a value for every token, inside a `with` block.

    scale: the factor of h, where 0 silences; or value: what replaces h. Either is one number or one
    for each neuron. The output changes; statistics, the L1 term and `activations` still have the h
    that the layer computes. Gradients are of the changed output. Every backend does this, in
    training too. Of nested blocks the inner one changes what the outer one left. A captured CUDA
    graph keeps the state of its capture. Raises IndexError for a layer or neuron that the model
    does not have, ValueError unless one of scale and value is given, in numbers that fit.
    """
    if not isinstance(layer, Integral):
        raise ValueError(f"neurons belong to one layer, such as 3; layers is {layer!r}")
    if (scale is None) == (value is None):
        raise ValueError(f"give scale or value, and not both; they are {scale!r} and {value!r}")
    ffns = sparse_ffns(model)
    ffn = ffns[_numbers("layer", layer, len(ffns))[0]]
    neurons = _numbers("neuron", neurons, ffn.intermediate_size)
    given = scale if value is None else value
    numbers = torch.as_tensor(given, dtype=torch.float64)
    if numbers.shape not in ((), (len(neurons),)) or not numbers.isfinite().all():
        many = len(neurons)
        raise ValueError(f"{many} neurons need one finite number or {many}, not {given!r}")
    before = ffn.edit
    dtype = torch.promote_types(next(ffn.parameters()).dtype, torch.float32)
    edit = before or Edit(torch.ones(ffn.intermediate_size, dtype=dtype, device=ffn.device))
    change = edit.scaled if value is None else edit.set_to
    ffn.edit = change(neurons, numbers)
    try:
        yield
    finally:
        ffn.edit = before


def _numbers(kind: str, given: int | Iterable[int], size: int) -> list[int]:
    """Return one number or several as a list. Raises IndexError unless all are below `size`."""
    numbers = [given] if isinstance(given, Integral) else list(given)
    for number in numbers:
        if not 0 <= number < size:
            raise IndexError(f"{kind} {number} does not exist; there are 0 to {size - 1}")
    return numbers
