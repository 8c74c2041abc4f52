"""Feed-forward layers, or single neurons, that add nothing to the residual stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from numbers import Integral

import torch
from torch import Tensor, nn

from twell.models.convert import sparse_ffns
from twell.sparse.layer import SparseFFN


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
    ffns = sparse_ffns(model)
    if neurons is not None and not isinstance(layers, Integral):
        raise ValueError(
            f"neurons belong to one layer, as in silence(model, 3, [17, 40]); layers is {layers!r}"
        )
    chosen = range(len(ffns)) if layers is None else _numbers(layers)
    for layer in chosen:
        if not 0 <= layer < len(ffns):
            raise IndexError(
                f"layer {layer} does not exist: the model has SparseFFN layers 0 to {len(ffns) - 1}"
            )
    before = [(ffn.silenced, ffn.muted) for ffn in ffns]
    try:
        for layer in chosen:
            if neurons is None:
                ffns[layer].silenced = True
            else:
                ffns[layer].muted = _muted(ffns[layer], _numbers(neurons))
        yield
    finally:
        for ffn, (silenced, muted) in zip(ffns, before, strict=True):
            ffn.silenced, ffn.muted = silenced, muted


def _numbers(one_or_more: int | Iterable[int]) -> list[int]:
    return [one_or_more] if isinstance(one_or_more, Integral) else list(one_or_more)


def _muted(ffn: SparseFFN, neurons: list[int]) -> Tensor:
    """Return a mask [N] of these neurons and of the ones that are silent already."""
    size = ffn.intermediate_size
    mask = torch.zeros(size, dtype=torch.bool, device=ffn.device)
    if ffn.muted is not None:
        mask = ffn.muted.clone()
    for neuron in neurons:
        if not 0 <= neuron < size:
            raise IndexError(
                f"neuron {neuron} does not exist: the layer has neurons 0 to {size - 1}"
            )
        mask[neuron] = True
    return mask
