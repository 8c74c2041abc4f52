"""SparseFFN in place of the feed-forward layers of transformers' models, and back.

`check` refuses modules for which a SparseFFN would compute something else. `check_same` compares
both on random tokens.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twell.models import adapters
from twell.models.adapters import KNOWN_NAMES, SLOT, SPARSIFIABLE, OwnedFFN, Site
from twell.sparse.activations import ACTIVATIONS, RELU
from twell.sparse.layer import SparseFFN
from twell.sparse.projections import CALLED_WITH, HOOKS, PROJECTIONS

# The largest relative error between a module and its SparseFFN, which compute the same products.
SAME = {torch.float64: 1e-6, torch.float32: 1e-4}
SAME_IN_HALF = 0.01  # bf16 and fp16


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
    """Fix the paths of "auto" by the activity of each layer; do nothing without one."""
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
    something else; AttributeError where a module lacks what its adapter names. The model is then as
    it was.
    """
    base = _without_peft(model)
    sites = adapters.sites(base)
    present = [module for module in base.modules() if isinstance(module, SparseFFN)]
    if not sites and not present:
        raise ValueError(
            f"{type(base).__name__} has no feed-forward layer that twell knows; it knows those of "
            f"{', '.join(SPARSIFIABLE)}, and twell.register_adapter describes others"
        )
    config = getattr(base, "config", None)
    changes = {(check(site, config, relufy=relufy), site.adapter.config) for site in sites}
    ffns = [_around(site) for site in sites]
    compared = set()  # built-in classes; modules of a registered class may differ from each other
    for site, ffn in zip(sites, ffns, strict=True):
        if site.activation is not None and type(site.module) not in compared:
            check_same(site, ffn)
            if any(site.adapter is one for one in adapters.BUILT_IN.values()):
                compared.add(type(site.module))
    for ffn in (*present, *ffns):
        ffn.backend = backend
    for site, ffn in zip(sites, ffns, strict=True):
        _replace(site, ffn)
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
        if ffn.replaced[1] is None and "_dense_class" not in vars(type(owner)):
            raise ValueError(f"a {type(owner).__name__} was sharded; densify the model before that")
    if any(ffn.quantized for _, _, ffn in places):
        raise ValueError("the model has FP8 weights; twell.dequantize_ puts bf16 back first")
    for place in places:
        _put_back(*place)
    return model


def _without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a model of peft, which computes with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def last_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the norm before the head of a model with SparseFFN layers; None where it has none."""
    adapter, _ = sparse_ffns(model)[0].replaced or (None, None)
    norm = model.base_model
    for name in ("norm" if adapter is None else adapter.norm).split("."):
        norm = getattr(norm, name, None)
    return norm


# --- replacing, and putting back


def _around(site: Site) -> SparseFFN:
    """Return a SparseFFN that shares a module's projections; ReLU replaces other activations."""
    module, adapter, act = site.module, site.adapter, site.activation or RELU
    names = {ours: own for ours, own in zip(PROJECTIONS, adapter.projections, strict=True) if own}
    up = getattr(module, adapter.up)
    sizes = up.in_features, up.out_features
    options = {"activation": act.name, "threshold": act.threshold, "gated": bool(adapter.gate)}
    if adapter.renamed:
        names |= {"h_dropout": adapter.dropout} if adapter.dropout else {}
        ffn = OwnedFFN(module, names, *sizes, **options)
    else:
        ffn = SparseFFN(*sizes, device="meta", **options)
        # In the module's own order, by which optimizers know parameters
        for name in (name for name in module._modules if name in names):
            delattr(ffn, name)
            setattr(ffn, name, getattr(module, name))
        if adapter.dropout is not None:
            ffn.h_dropout = getattr(module, adapter.dropout)
    ffn.replaced = adapter, None if adapter.renamed else module
    ffn.training = module.training
    return ffn


def _replace(site: Site, ffn: SparseFFN) -> None:
    """Let the SparseFFN of `_around` compute for its module."""
    module, adapter = site.module, site.adapter
    if adapter.renamed:
        setattr(module, SLOT, ffn)
        _set_class(module, adapters.sparse_class(type(module), adapter))
    else:
        setattr(site.owner, site.name, ffn)
        for hooks in HOOKS:  # shared: a handle removes its hook from both
            setattr(ffn, hooks, getattr(module, hooks))
        hand_mover(module, ffn)


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change a module's class, for the hook of Accelerate too, which calls the bound forward."""
    module.__class__ = kind
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(kind.forward, module)


def hand_mover(giver: nn.Module, taker: nn.Module) -> None:
    """Give a module the hook of Accelerate that moves another one's inputs, if there is one."""
    if "_hf_hook" in vars(giver):
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(taker, giver._hf_hook)


@torch.no_grad()
def _put_back(owner: nn.Module, name: str, ffn: SparseFFN) -> None:
    """Undo `_replace`, with the present projections and hooks."""
    (adapter, module), down = ffn.replaced, ffn.down_proj
    if module is None:
        module = owner
        delattr(module, SLOT)
        _set_class(module, module._dense_class)
    else:
        for part in filter(None, adapter.projections):
            setattr(module, part, getattr(ffn, part))
        for hooks in HOOKS:
            setattr(module, hooks, getattr(ffn, hooks))
        setattr(owner, name, module)
    if not adapter.inline:
        module.train(ffn.training)
    if Site(owner, name, module, adapter).activation is None:  # relufy replaced it
        setattr(module, adapter.act, nn.ReLU())
    for parameter in down.parameters():  # peft's adapters may stand around the weight
        parameter.data = parameter.data.contiguous()


# --- refusing


def check(site: Site, config: Any, *, relufy: bool) -> str | None:
    """Refuse another layer than SparseFFN's; return the activation that ReLU has to replace."""
    module, adapter, kind = site.module, site.adapter, type(site.module).__name__
    # Accelerate's hooks give a module a forward too; SparseFFN takes them over.
    if "forward" in vars(module) and "_hf_hook" not in vars(module):
        raise ValueError(f"a {kind} has a forward of its own, which SparseFFN would replace")
    drop = None if adapter.dropout is None else getattr(module, adapter.dropout)
    if not isinstance(drop, nn.Dropout | None):  # the backends know when an nn.Dropout acts
        raise ValueError(f"{adapter.dropout} of a {kind} is {drop}; expected an nn.Dropout")
    for name in (adapter.act, adapter.dropout):
        if any(getattr(getattr(module, name or "", None), hooks, None) for hooks in CALLED_WITH):
            raise ValueError(f"{name} of a {kind} has hooks, which SparseFFN would not call")
    _check_projections(site)
    return _check_activation(site, config, relufy)


def _check_projections(site: Site) -> None:
    """Refuse weights and dropout beside the projections."""
    module, adapter, kind = site.module, site.adapter, type(site.module).__name__
    for name in filter(None, adapter.projections):
        getattr(module, name)  # raises AttributeError where the module lacks it
    if adapter.inline:
        if rate := getattr(module, "activation_dropout", 0):
            raise ValueError(f"a {kind} has activation_dropout={rate}; set 0, as SparseFFN has")
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.partition(".")[0] not in adapter.projections:
            more = f"{name} of shape {tuple(tensor.shape)} beside its projections"
            raise ValueError(f"a {kind} has {more}, which SparseFFN does not compute with")


def _check_activation(site: Site, config: Any, relufy: bool) -> str | None:
    """Refuse an activation without zeros; with `relufy` return its name."""
    adapter, kind, known = site.adapter, type(site.module).__name__, site.activation
    in_config = getattr(config, adapter.config or "", None)
    if in_config in ACTIVATIONS and (known.name if known else "silu") != in_config:
        raise ValueError(f"the configuration says {in_config!r}, and a {kind} has {site.act}")
    if known is not None:
        return None
    name = in_config or adapter.activation or type(site.act).__name__
    if not relufy:
        raise ValueError(
            f"the activation of a {kind} is {name!r}, which makes nothing zero as far as twell "
            f"knows; {KNOWN_NAMES} do. An adapter may say activation= in place of act=. "
            "twell.sparsify(model, relufy=True) puts ReLU there: the model then needs training"
        )
    if in_config is None or adapter.act is None:
        raise ValueError(
            f"relufy=True notes ReLU in the model's configuration, where the adapter of {kind} "
            f"finds no activation; exchange the {name!r} of the modules yourself"
        )
    return name


# --- comparing


@torch.no_grad()
def check_same(site: Site, ffn: SparseFFN) -> None:
    """Compare a module with the SparseFFN for it on random tokens, and again while training.

    A down projection of zeros, as some trainings begin with, is random for the moment. The page
    docs/models.md says where nothing is compared. Raises ValueError where the results differ.
    """
    parts = filter(None, (ffn.gate_proj, ffn.up_proj, ffn.down_proj))
    if site.adapter.inline or not all(map(_can_compute, parts)):
        return
    modules = [*site.module.modules(), *ffn.modules()]
    before, down = [module.training for module in modules], ffn.down_proj.weight
    weight, kind = down.data, type(site.module).__name__
    try:
        if not weight.any():
            down.data = _random(weight.shape, weight)
        for training in (False, True):
            for module in modules:
                module.training = training
            x = _random((1, 4, ffn.hidden_size), weight)
            for _ in range(4):  # where no neuron is active nothing is compared
                x = x if ffn.activations(x)[1].any() else 10 * x
            with _seeded(x):
                expected = site.module.forward(x)
            if getattr(expected, "shape", None) != x.shape:
                raise ValueError(f"a {kind} returns something else than {tuple(x.shape)} values")
            expected = expected.double()
            with _seeded(x):
                result = ffn.forward(x).double()
            error = float((result - expected).norm() / expected.norm().clamp(min=1e-30))
            if error > SAME.get(weight.dtype, SAME_IN_HALF) and expected.isfinite().all():
                hint = " while training; only an nn.Dropout of h may differ there" * training
                raise ValueError(
                    f"the adapter of {kind} describes something else than the module computes: a "
                    f"relative error of {error:.2g} on random tokens{hint}"
                )
    finally:
        down.data, ffn.outbox.last = weight, None
        for module, was in zip(modules, before, strict=True):
            module.training = was


def _can_compute(part: nn.Module) -> bool:
    """Return whether a projection computes here as it is; its class may inherit from nn.Linear."""
    own = vars(part).keys() & {"forward"} or any(getattr(part, name) for name in CALLED_WITH)
    if own or not isinstance(part, nn.Linear) or type(part.weight) is not nn.Parameter:
        return False
    whole = part.weight.shape == (part.out_features, part.in_features)  # FSDP1 keeps shards
    return whole and part.weight.device.type in ("cpu", "cuda")


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


@contextlib.contextmanager
def _seeded(x: Tensor) -> Iterator[None]:
    """Draw the same random numbers in every block, on the device of x alone."""
    generators = torch.cuda.default_generators if x.is_cuda else [torch.default_generator]
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        generators[max(x.get_device(), 0)].manual_seed(0)
        yield
