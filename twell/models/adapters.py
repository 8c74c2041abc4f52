"""Where the feed-forward layers of other models are, and what they compute: one `Adapter` a class.

`sites` finds the modules of these classes in a model. `replace` lets a SparseFFN compute for one,
and `put_back` undoes that. A module whose projections have Llama's names is replaced. Any other
stays, under a class that computes by a child SLOT, an `OwnedFFN`. So projections keep their names,
by which savers, loaders, optimizers, peft and Accelerate find them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ReLUSquaredActivation

from twell.sparse.activations import ACTIVATIONS, RELU, Activation, get_activation
from twell.sparse.layer import SparseFFN
from twell.sparse.projections import CALLED_WITH, HOOKS, is_plain

PARTS = "gate_proj", "up_proj", "down_proj"  # of SparseFFN
SLOT = "sparse_ffn"
# Children under these names are the whole of their owner: torch.compile, FSDP, checkpoint_wrapper.
WRAPPED = "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"


@dataclass(frozen=True)
class Adapter:
    """How modules of one class compute a feed-forward layer, by the names of their attributes.

    gate, up, down: the projections, nn.Linear. Without a gate the layer is down(act(up(x))), else
        down(act(gate(x)) * up(x)).
    act: the activation, a module or function. Where the class has no such attribute, `activation`
        and `threshold` say what it computes (twell/sparse/activations.py).
    dropout: the nn.Dropout between h and the down projection, if any.
    inline: whether the module computes more than this layer, as OPT's decoder layer does. Its
        forward then gets a stand-in for the module, with the SparseFFN as `up` and identities as
        `act` and `down`. So nothing else may stand between the two projections.
    config: the field of the model's configuration that names the activation.
    norm: the model's last norm, seen from its `base_model`; for the words of the inspector.

    Raises ValueError for an unknown activation, and where it is missing or given twice.
    """

    up: str
    down: str
    gate: str | None = None
    act: str | None = None
    activation: str | None = None
    threshold: float = 0.0
    dropout: str | None = None
    inline: bool = False
    config: str | None = None
    norm: str = "norm"

    def __post_init__(self):
        if (self.act is None) == (self.activation is None):
            raise ValueError(
                "give either act, the attribute that holds the activation, or activation, its name"
            )
        if self.activation is not None:
            get_activation(self.activation, self.threshold, gated=self.gate is not None)
        if self.inline and (self.act is None or self.dropout or self.gate):
            raise ValueError("an inline layer needs act, and cannot have a gate or dropout")

    @property
    def projections(self) -> tuple[str | None, str, str]:
        return self.gate, self.up, self.down

    @property
    def renamed(self) -> bool:
        """Whether the projections have other names than in a SparseFFN."""
        pairs = zip(self.projections, PARTS, strict=True)
        return self.inline or any(own not in (None, ours) for own, ours in pairs)


# --- the table

_NON_GATED = Adapter("up_proj", "down_proj", act="act_fn", config="hidden_act")
_GATED = Adapter("up_proj", "down_proj", gate="gate_proj", act="act_fn", config="hidden_act")
_OPT = {"config": "activation_function", "norm": "decoder.final_layer_norm"}
_T5 = {"act": "act", "dropout": "dropout"}
BUILT_IN = {
    "llama.LlamaMLP": _GATED,
    "mistral.MistralMLP": _GATED,
    "qwen2.Qwen2MLP": _GATED,
    "qwen3.Qwen3MLP": _GATED,
    "nemotron.NemotronMLP": _NON_GATED,
    "arcee.ArceeMLP": _NON_GATED,
    "nanochat.NanoChatMLP": Adapter("fc1", "fc2", act="activation_fn", config="hidden_act"),
    "opt.OPTDecoderLayer": Adapter("fc1", "fc2", act="activation_fn", inline=True, **_OPT),
    "t5.T5DenseActDense": Adapter("wi", "wo", **_T5),
    "t5.T5DenseGatedActDense": Adapter("wi_1", "wo", gate="wi_0", **_T5),
}
SPARSIFIABLE = tuple(dict.fromkeys(name.partition(".")[0] for name in BUILT_IN))


def _in_transformers(name: str) -> str:
    family, _, kind = name.partition(".")
    return f"transformers.models.{family}.modeling_{family}.{kind}"


ADAPTERS = {_in_transformers(name): adapter for name, adapter in BUILT_IN.items()}
REFUSED = {
    _in_transformers("bitnet.BitNetMLP"): "normalises h before its down projection",
}
KNOWN = {nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", ReLUSquaredActivation: "relu2"}
KNOWN_NAMES = "nn.ReLU, nn.Threshold, F.relu, torch.relu and transformers' ReLUSquaredActivation"


def register_adapter(kind: type[nn.Module], **fields: Any) -> None:
    """Let `twell.sparsify` replace modules of a class; `fields` as of `twell.models.Adapter`.

    kind: the class itself; classes that inherit from it need an adapter of their own. A second call
    replaces the first. `sparsify` compares the results of every module of the class with
    SparseFFN's (not of inline ones), and refuses an adapter that describes something else. Raises
    TypeError for a field that does not exist, and ValueError for values that do not fit together.
    """
    ADAPTERS[_name(kind)] = Adapter(**fields)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter of a module. Raises ValueError where its class cannot be replaced."""
    for kind in type(module).__mro__:
        name = _name(kind)
        if name in REFUSED:
            raise ValueError(f"a {name} {REFUSED[name]}, which SparseFFN does not compute")
        if name in ADAPTERS and kind is not type(module):
            raise ValueError(
                f"a feed-forward module is a {_name(type(module))}, not a {name}; sparsify before "
                "wrapping or sharding, or describe the class by twell.register_adapter"
            )
        if name in ADAPTERS:
            return ADAPTERS[name]
    return None


# --- finding them


@dataclass(frozen=True)
class Site:
    """A feed-forward layer that is not sparse yet: `module` is `owner.name`."""

    owner: nn.Module
    name: str
    module: nn.Module
    adapter: Adapter

    @property
    def act(self) -> Any:
        return None if self.adapter.act is None else getattr(self.module, self.adapter.act)

    @property
    def activation(self) -> Activation | None:
        """What the module computes; None where that is unknown or makes no zeros."""
        adapter, act = self.adapter, self.act
        name, threshold = adapter.activation, adapter.threshold
        if type(act) is nn.Threshold and act.value == 0:
            name, threshold = "relu", act.threshold
        elif act is not None:
            name = KNOWN.get(type(act) if isinstance(act, nn.Module) else act)
        known = name is not None and ACTIVATIONS[name].sparse
        return get_activation(name, threshold, gated=adapter.gate is not None) if known else None


def sites(model: nn.Module) -> list[Site]:
    """Return the feed-forward layers of the classes in ADAPTERS, in order, without sparse ones.

    Raises ValueError for modules that are wrapped, or of a class that cannot be replaced.
    """
    if (whole := _adapter_of(model)) is not None and not whole.inline:
        raise ValueError(
            f"{type(model).__name__} is itself the layer to replace; give a module that holds it"
        )
    result: dict[tuple[int, str], Site] = {}  # several owners may hold one module
    for owner in model.modules():
        for name, module in owner._modules.items():  # named_children names a module once
            if module is None or SLOT in module._modules:
                continue
            if (adapter := _adapter_of(module)) is None:
                continue
            if name in WRAPPED:
                raise ValueError(
                    f"a {type(module).__name__} is wrapped in a {type(owner).__name__}; "
                    "sparsify before wrapping or sharding"
                )
            place = (id(module), SLOT) if adapter.renamed else (id(owner), name)
            result[place] = Site(owner, name, module, adapter)
    return list(result.values())


def check(site: Site, config: Any, *, relufy: bool) -> str | None:
    """Refuse a layer whose replacement would compute something else.

    config: the model's. Returns the name of the activation that ReLU has to replace, if any.
    """
    module, adapter, kind = site.module, site.adapter, type(site.module).__name__
    # Accelerate's hooks give a module a forward too; SparseFFN takes them over.
    if "forward" in vars(module) and "_hf_hook" not in vars(module):
        raise ValueError(f"a {kind} has a forward of its own, which SparseFFN would replace")
    for name in (*adapter.projections, adapter.act, adapter.dropout):
        if name is not None and not hasattr(module, name):
            raise ValueError(f"the adapter of {kind} names {name!r}, which the module lacks")
    drop = None if adapter.dropout is None else getattr(module, adapter.dropout)
    if not isinstance(drop, nn.Dropout | None):
        raise ValueError(f"{adapter.dropout} of a {kind} is {drop}; expected an nn.Dropout")
    if adapter.inline and not isinstance(site.act, nn.Module):
        raise ValueError(f"{adapter.act} of a {kind} is {site.act}; expected a module")
    for name in (adapter.act, adapter.dropout):
        if any(getattr(getattr(module, name or "", None), hooks, None) for hooks in CALLED_WITH):
            raise ValueError(f"{name} of a {kind} has hooks, which SparseFFN would not call")
    _check_projections(site)
    return _check_activation(site, config, relufy)


def _check_projections(site: Site) -> None:
    """Refuse projections that do not fit together, and weights or dropout beside them."""
    module, adapter, kind = site.module, site.adapter, type(site.module).__name__
    parts = {name: getattr(module, name) for name in adapter.projections if name is not None}
    for name, part in parts.items():
        if not hasattr(part, "out_features"):
            raise ValueError(f"{name} of a {kind} is a {type(part).__name__}; expected nn.Linear")
    shapes = {name: _shape(part) for name, part in parts.items()}
    size = shapes[adapter.up]
    expected = {name: size[::-1] if name == adapter.down else size for name in parts}
    if shapes != expected:
        raise ValueError(
            f"the projections of a {kind} have (out, in) features {shapes}; expected {expected}"
        )
    dtypes = {str(part.weight.dtype) for part in parts.values() if is_plain(part)}
    if len(dtypes) > 1:
        raise ValueError(
            f"the projections of a {kind} have the types {' and '.join(sorted(dtypes))}; load the "
            "model in one, such as dtype=torch.bfloat16"
        )
    if adapter.inline:
        if getattr(module, "activation_dropout", 0):
            raise ValueError(
                f"a {kind} has activation_dropout={module.activation_dropout}, which SparseFFN "
                "drops; set 0"
            )
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.partition(".")[0] not in parts:
            raise ValueError(
                f"a {kind} has {name} of shape {tuple(tensor.shape)} beside its projections, which "
                "SparseFFN does not compute with"
            )


def _check_activation(site: Site, config: Any, relufy: bool) -> str | None:
    """Refuse an activation without zeros; with `relufy` return its name."""
    adapter, kind, known = site.adapter, type(site.module).__name__, site.activation
    in_config = getattr(config, adapter.config or "", None)
    if in_config in ACTIVATIONS and (known.name if known else "silu") != in_config:
        raise ValueError(
            f"the configuration says {in_config!r}, and a {kind} has {site.act}; make them agree"
        )
    if known is not None:
        return None
    name = in_config or adapter.activation or type(site.act).__name__
    if not relufy:
        raise ValueError(
            f"the activation of a {kind} is {name!r}, which makes nothing zero as far as twell "
            f"knows; {KNOWN_NAMES} do. An adapter may say activation= in place of act=. "
            "twell.sparsify(model, relufy=True) exchanges it for ReLU, after which the model needs "
            "training"
        )
    if in_config is None or adapter.act is None:
        raise ValueError(
            f"relufy=True notes ReLU in the model's configuration, where the adapter of {kind} "
            f"finds no activation; exchange the {name!r} of the modules yourself"
        )
    return name


def _shape(part: nn.Module) -> tuple[int, int]:
    return part.out_features, part.in_features


def last_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the norm before the head of a model with SparseFFN layers; None where it has none."""
    layers = (module for module in model.modules() if isinstance(module, SparseFFN))
    replaced = next(layers).replaced
    norm = model.base_model
    for name in ("norm" if replaced is None else replaced.adapter.norm).split("."):
        norm = getattr(norm, name, None)
    return norm


# --- computing in a module that stays


class OwnedFFN(SparseFFN):
    """A SparseFFN that computes with children of the module that holds it, under their own names.

    owner: that module. names: the names of its children by those of a SparseFFN.
    """

    def __init__(self, owner: nn.Module, names: dict[str, str], *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        # Past nn.Module, of which the owner would become a child.
        vars(self).update(owner=owner, names=names)

    def _make_parts(self, gated: bool, **options: Any) -> None:
        vars(self).update(owner=None, names={})

    @property
    def parts(self) -> dict[str, nn.Module]:
        owned = self.owner._modules
        return {ours: owned[own] for ours, own in self.names.items()}

    gate_proj = property(lambda self: self.parts.get("gate_proj"))
    up_proj = property(lambda self: self.parts["up_proj"])
    down_proj = property(lambda self: self.parts["down_proj"])
    h_dropout = property(lambda self: self.parts.get("h_dropout"))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("names", ()):
            setattr(self.owner, self.names[name], value)
        else:
            super().__setattr__(name, value)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for part in self.parts.values() if recurse else ():
            yield from part.parameters()

    def train(self, mode: bool = True) -> OwnedFFN:
        for part in self.parts.values():
            part.train(mode)
        return super().train(mode)


class _Inside:
    """An inline module as its own forward sees it.

    It has the SparseFFN as `up`, and identities as `act` and `down`.
    """

    forward = None  # transformers' checkpointing compares it with the forward that runs

    def __init__(self, module: nn.Module, adapter: Adapter):
        self._module = module
        for name in (adapter.act, adapter.down):
            setattr(self, name, _same)
        setattr(self, adapter.up, module._modules[SLOT])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return MethodType(value.__func__, self)
        return value


@functools.cache
def _sparse_class(kind: type[nn.Module], adapter: Adapter) -> type[nn.Module]:
    """Return a subclass of a module's class that computes by the child SLOT, an `OwnedFFN`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ffn = self._modules[SLOT]
        if ffn.owner is not self:  # in a replica of nn.DataParallel
            vars(ffn)["owner"] = self
        if adapter.inline:
            return kind.forward(_Inside(self, adapter), *args, **kwargs)
        return ffn(*args, **kwargs)

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _new_sparse, (kind, adapter), vars(self)

    fields = {"forward": forward, "__reduce_ex__": reduce, "_dense_class": kind}
    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (kind,), fields | about)


def _new_sparse(kind: type[nn.Module], adapter: Adapter) -> nn.Module:
    """Return an empty module of a class that cannot be imported, for copies and pickles."""
    return object.__new__(_sparse_class(kind, adapter))


def _same(x: Any) -> Any:
    return x


# --- replacing, and putting back


@dataclass
class Replaced:
    """What a SparseFFN computes for: a module, which it replaces or which holds it."""

    adapter: Adapter
    stride: tuple[int, ...] | None = None  # of the down weight; None where that is not plain
    module: nn.Module | None = None  # the replaced one


def around(site: Site) -> SparseFFN:
    """Return a SparseFFN with the projections of a module, which it shares.

    An unknown activation becomes ReLU: `check` has refused it, or reported it.
    """
    module, adapter, act = site.module, site.adapter, site.activation or RELU
    names = {ours: own for ours, own in zip(PARTS, adapter.projections, strict=True) if own}
    down, sizes = getattr(module, adapter.down), _shape(getattr(module, adapter.up))[::-1]
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
    stride = down.weight.stride() if is_plain(down) else None
    ffn.replaced = Replaced(adapter, stride, None if adapter.renamed else module)
    ffn.training = module.training
    return ffn


def replace(site: Site, ffn: SparseFFN) -> None:
    """Let the SparseFFN of `around` compute for its module."""
    module, adapter = site.module, site.adapter
    if adapter.renamed:
        setattr(module, SLOT, ffn)
        _set_class(module, _sparse_class(type(module), adapter))
    else:
        setattr(site.owner, site.name, ffn)
        _hand_hooks(module, ffn)


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change a module's class, for the hook of Accelerate too, which calls the bound forward."""
    module.__class__ = kind
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(kind.forward, module)


def _hand_hooks(giver: nn.Module, taker: nn.Module) -> None:
    """Let two modules share the hooks of one, so that a handle removes them from both."""
    for name in HOOKS:
        setattr(taker, name, getattr(giver, name))
    if "_hf_hook" in giver.__dict__:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(taker, giver._hf_hook)


@torch.no_grad()
def put_back(owner: nn.Module, name: str, ffn: SparseFFN) -> None:
    """Undo `replace`, with the present projections and hooks.

    The activation is the module's own, or ReLU where `relufy` exchanged it.
    """
    adapter, stride, module = ffn.replaced.adapter, ffn.replaced.stride, ffn.replaced.module
    down, shape = ffn.down_proj, (ffn.hidden_size, ffn.intermediate_size)
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
    if Site(owner, name, module, adapter).activation is None:
        setattr(module, adapter.act, nn.ReLU())
    for parameter in down.parameters():  # peft's adapters may stand around the weight
        if parameter.shape == shape:
            data = parameter.data
            if stride is None:
                parameter.data = data.contiguous()
            elif data.stride() != stride:
                given = {"dtype": data.dtype, "device": data.device}
                parameter.data = torch.empty_strided(data.shape, stride, **given).copy_(data)
