"""SparseFFN in place of the feed-forward layers of transformers' models, and back; silence."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from numbers import Integral

import torch
from torch import Tensor, nn

from twell.models import adapters
from twell.models.adapters import SPARSIFIABLE
from twell.sparse.layer import SparseFFN


def sparse_ffns(model: nn.Module) -> list[SparseFFN]:
    """Return the SparseFFN layers of any model, in order. Raises ValueError when it has none."""
    ffns = [module for module in model.modules() if isinstance(module, SparseFFN)]
    if not ffns:
        raise ValueError(
            f"{type(model).__name__} has no SparseFFN layer; twell.sparsify(model) puts them in"
        )
    return ffns


def sparsify(model: nn.Module, *, relufy: bool = False, backend: str = "dense") -> nn.Module:
    """Replace the feed-forward layers of a model of transformers, or of your own; return the model.

    Those of the types in SPARSIFIABLE are known; `register_adapter` describes other classes.
    SparseFFN layers take their place, with the same weights; no copy is made. Saved files keep
    their names, and parameters too where the layers have Llama's. Adapters of peft and hooks stay
    in place and act, on every backend: where the kernels cannot read plain weights the layer
    computes densely (`SparseFFN.readable`). The model computes the same as before.

    A model whose activation makes no zeros, such as SiLU, is refused unless `relufy` is set. ReLU
    then replaces the activation, the model computes something else, and it needs training. Raises
    ValueError for a model without known feed-forward modules, and where a replacement would compute
    something else. The model is then as it was.
    """
    base = _without_peft(model)
    sites = adapters.sites(base)
    present = [module for module in base.modules() if isinstance(module, SparseFFN)]
    if not sites and not present:
        raise ValueError(
            f"{type(base).__name__} has no feed-forward layer that twell knows; it knows those of "
            f"{', '.join(SPARSIFIABLE)}, and twell.register_adapter describes others"
        )
    config, compared, ffns = getattr(base, "config", None), set(), []
    changes = {(adapters.check(site, config, relufy=relufy), site.adapter.config) for site in sites}
    for site in sites:
        ffns.append(adapters.around(site))
        if site.activation is not None and type(site.module) not in compared:
            adapters.check_same(site, ffns[-1])
            compared.add(type(site.module))
    for ffn in (*present, *ffns):
        ffn.backend = backend
    for site, ffn in zip(sites, ffns, strict=True):
        adapters.replace(site, ffn)
    for activation, field in changes:
        if activation is not None:
            message = f"activation {activation!r} became 'relu': the model needs training"
            warnings.warn(message, stacklevel=2)
            setattr(config, field, "relu")
    return model


def densify(model: nn.Module) -> nn.Module:
    """Undo `sparsify` in place: put the model's own feed-forward layers back, and return the model.

    They have the present weights. Where `relufy` exchanged the activation it stays ReLU, which
    these weights belong to. Raises ValueError for a model that was not sparsified.
    """
    base = _without_peft(model)
    places = [
        (owner, name, child)
        for owner in base.modules()
        for name, child in owner.named_children()
        if isinstance(child, SparseFFN)
    ]
    if not places or any(ffn.replaced is None for _, _, ffn in places):
        raise ValueError(
            f"{type(model).__name__} was not made by twell.sparsify; there is nothing to undo"
        )
    if any(ffn.quantized for _, _, ffn in places):
        raise ValueError("the model has FP8 weights; twell.dequantize_ puts bf16 back first")
    for place in places:
        adapters.put_back(*place)
    return model


def _without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a model of peft, which computes with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
    _check_places("layer", chosen, len(ffns), "the model has SparseFFN layers")
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


def _check_places(kind: str, places: Iterable[int], size: int, owner: str) -> None:
    for place in places:
        if not 0 <= place < size:
            raise IndexError(f"{kind} {place} does not exist: {owner} 0 to {size - 1}")


def _muted(ffn: SparseFFN, neurons: list[int]) -> Tensor:
    """Return a mask [N] of these neurons and of the ones that are silent already."""
    _check_places("neuron", neurons, ffn.intermediate_size, "the layer has neurons")
    mask = torch.zeros(ffn.intermediate_size, dtype=torch.bool, device=ffn.device)
    if ffn.muted is not None:
        mask = ffn.muted.clone()
    mask[neurons] = True
    return mask
