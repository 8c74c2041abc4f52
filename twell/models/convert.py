"""SparseFFN in place of the feed-forward layers of transformers' models, and back."""

from __future__ import annotations

import warnings

from torch import nn
from transformers import PreTrainedModel

from twell.sparse.layer import SparseFFN

SPARSIFIABLE = ("llama", "mistral", "qwen2", "qwen3")


def sparse_ffns(model: nn.Module) -> list[SparseFFN]:
    """Return the SparseFFN layers of any model, in order. Raises ValueError when it has none."""
    ffns = [module for module in model.modules() if isinstance(module, SparseFFN)]
    if not ffns:
        raise ValueError(
            f"{type(model).__name__} has no SparseFFN layer; twell.sparsify(model) puts them in"
        )
    return ffns


def sparsify(model: nn.Module, *, relufy: bool = False, backend: str = "dense") -> nn.Module:
    """Replace the feed-forward layers of a Llama, Mistral or Qwen2/3 model, and return the model.

    SparseFFN layers take their place, with the same weights; no copy is made. Parameters and saved
    files keep their names. Adapters (a peft model too) and hooks stay in place and act, on every
    backend: where the kernels cannot read plain weights the layer computes densely
    (`SparseFFN.readable`). A model with ReLU computes the same as before.

    A model with SiLU is refused unless `relufy` is set. ReLU then replaces SiLU, the model computes
    something else, and it needs training. Raises ValueError for a model of another type, and for
    feed-forward modules that are not the model's own.
    """
    base = _without_adapters(model)
    kind, activation = base.config.model_type, base.config.hidden_act
    if kind not in SPARSIFIABLE:
        supported = ", ".join(SPARSIFIABLE)
        raise ValueError(
            f"a model of type {kind!r} cannot be made sparse; supported are {supported}"
        )
    layers = base.base_model.layers
    for layer in layers:
        if not isinstance(layer.mlp, SparseFFN):
            _check_replaceable(layer.mlp, kind, any_activation=relufy or activation != "relu")
    if activation != "relu" and not relufy:
        raise ValueError(
            f"the model's activation is {activation!r}, which makes nothing zero; "
            "relufy=True exchanges it for ReLU, after which the model needs training"
        )
    if activation != "relu":
        message = f"activation {activation!r} became 'relu': the model needs training"
        warnings.warn(message, stacklevel=2)
    for layer in layers:
        if not isinstance(layer.mlp, SparseFFN):
            layer.mlp = SparseFFN.around(layer.mlp)
        layer.mlp.backend = backend
    base.config.hidden_act = "relu"
    return model


def densify(model: nn.Module) -> nn.Module:
    """Undo `sparsify` in place: put the model's own feed-forward layers back, and return the model.

    They have the present weights. The activation stays ReLU, which these weights belong to. Raises
    ValueError for a model that was not sparsified.
    """
    layers = _without_adapters(model).base_model.layers
    for layer in layers:
        if not isinstance(layer.mlp, SparseFFN) or layer.mlp.replaced is None:
            raise ValueError(
                f"{type(model).__name__} was not made by twell.sparsify; there is nothing to undo"
            )
    if any(layer.mlp.quantized for layer in layers):
        raise ValueError("the model has FP8 weights; twell.dequantize_ puts bf16 back first")
    for layer in layers:
        layer.mlp = layer.mlp.restored()
    return model


def _without_adapters(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a model of peft, which computes with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_replaceable(mlp: nn.Module, kind: str, *, any_activation: bool) -> None:
    """Refuse a feed-forward module that may compute something else than the model's own."""
    name = f"{type(mlp).__module__}.{type(mlp).__qualname__}"
    if not name.startswith(f"transformers.models.{kind}.modeling_"):
        problem = f"a feed-forward module is a {name}, not the one of {kind!r}"
        raise ValueError(f"{problem}; sparsify before wrapping or sharding")
    # Accelerate's hooks give a module a forward too; SparseFFN takes them over.
    if "forward" in mlp.__dict__ and "_hf_hook" not in mlp.__dict__:
        problem = f"a feed-forward module, a {name}, has a forward of its own"
        raise ValueError(f"{problem}, which SparseFFN would replace")
    if not any_activation and not isinstance(mlp.act_fn, nn.ReLU):
        problem = f"the configuration says 'relu', and a feed-forward module has {mlp.act_fn}"
        raise ValueError(f"{problem}; make them agree")
