"""SparseFFN in place of the feed-forward layers of transformers' models, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from twell.models import adapters
from twell.models.adapters import SPARSIFIABLE
from twell.models.comparison import check_same
from twell.sparse.layer import SparseFFN


def sparse_ffns(model: nn.Module) -> list[SparseFFN]:
    """Return the SparseFFN layers of any model, in order. Raises ValueError when it has none."""
    ffns = [module for module in model.modules() if isinstance(module, SparseFFN)]
    if not ffns:
        raise ValueError(
            f"{type(model).__name__} has no SparseFFN layer; twell.sparsify(model) puts them in"
        )
    return ffns


# The field of a model's configuration with the activity that `twell.tune` observed: of each layer
# the tokens of a block, and the means of active neurons and of a block's union.
ACTIVITY = "ffn_activity"


def apply_activity(ffns: Sequence[SparseFFN], activity: Sequence[Sequence[float]] | None) -> None:
    """Fix the paths of "auto" by the activity of each layer; do nothing without one.

    Raises ValueError for the activity of another number of layers.
    """
    if activity is None:
        return
    if len(activity) != len(ffns):
        raise ValueError(
            f"{ACTIVITY} has the activity of {len(activity)} layers, and the model has {len(ffns)}"
        )
    for ffn, (tokens, active, union) in zip(ffns, activity, strict=True):
        ffn.chooser.freeze({int(tokens): (active, union)})


def sparsify(model: nn.Module, *, relufy: bool = False, backend: str = "dense") -> nn.Module:
    """Replace the feed-forward layers of a model of transformers, or of your own; return the model.

    Those of the types in SPARSIFIABLE are known; `register_adapter` describes other classes.
    SparseFFN layers compute for them, with the same weights; no copy is made. Parameters keep their
    names. Adapters of peft and hooks stay in place and act, on every backend: where the kernels
    cannot read plain weights the layer computes densely (`SparseFFN.readable`). The model computes
    the same as before.

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
    config, compared = getattr(base, "config", None), set()
    ffns: dict[int, SparseFFN] = {}  # by module, which may be in several places
    changes = {(adapters.check(site, config, relufy=relufy), site.adapter.config) for site in sites}
    for site in sites:
        if id(site.module) in ffns:
            continue
        ffns[id(site.module)] = ffn = adapters.around(site)
        built_in = any(site.adapter is one for one in adapters.BUILT_IN.values())
        known = built_in and type(site.module) in compared  # others may differ in a class
        if site.activation is not None and not known:
            check_same(site, ffn)
            compared.add(type(site.module))
    for ffn in (*present, *ffns.values()):
        ffn.backend = backend
    for site in sites:
        adapters.replace(site, ffns[id(site.module)])
    apply_activity(sparse_ffns(base), getattr(config, ACTIVITY, None))
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
        for name, child in owner._modules.items()
        if isinstance(child, SparseFFN)
    ]
    if not places or any(ffn.replaced is None for _, _, ffn in places):
        raise ValueError(
            f"{type(model).__name__} was not made by twell.sparsify; there is nothing to undo"
        )
    for owner, _, ffn in places:
        if ffn.replaced.module is None and "_dense_class" not in vars(type(owner)):
            raise ValueError(f"a {type(owner).__name__} was sharded; densify the model before that")
    if any(ffn.quantized for _, _, ffn in places):
        raise ValueError("the model has FP8 weights; twell.dequantize_ puts bf16 back first")
    for place in places:
        adapters.put_back(*place)
    return model


def _without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a model of peft, which computes with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
