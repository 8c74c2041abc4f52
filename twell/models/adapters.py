"""Where the feed-forward layers of other models are, and what they compute: one `Adapter` a class.

`sites` finds the modules of these classes in a model. A module whose projections have Llama's names
is replaced by a SparseFFN. Any other stays, under a class that computes by a child SLOT, an
`OwnedFFN`. So projections keep their names, by which savers, loaders, optimizers, peft and
Accelerate find them.
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
from transformers.activations import ReLUSquaredActivation

from twell.sparse.activations import ACTIVATIONS, Activation, get_activation
from twell.sparse.layer import SparseFFN
from twell.sparse.projections import PROJECTIONS

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
            raise ValueError("give either act, the activation's attribute, or activation, its name")
        if self.activation is not None:
            get_activation(self.activation, self.threshold, gated=self.gate is not None)
        if self.inline and (self.act is None or self.dropout or self.gate):
            raise ValueError("an inline layer needs act, and cannot have a gate or dropout")

    @property
    def projections(self) -> tuple[str | None, str, str]:
        return self.gate, self.up, self.down

    @property
    def renamed(self) -> bool:
        pairs = zip(self.projections, PROJECTIONS, strict=True)
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
ADAPTERS = {
    "transformers.models.{0}.modeling_{0}.{1}".format(*name.split(".")): adapter
    for name, adapter in BUILT_IN.items()
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
    """Return the feed-forward layers that are not sparse yet, in order; refuse wrapped ones."""
    result: list[Site] = []
    for owner in model.modules():
        for name, module in owner._modules.items():  # named_children names a module once
            if module is None or SLOT in module._modules:
                continue
            kind = type(module)
            if (adapter := ADAPTERS.get(_name(kind))) is None:
                if any(_name(base) in ADAPTERS for base in kind.__mro__):
                    unknown = f"a {kind.__name__} inherits from a known layer, and may compute more"
                    raise ValueError(f"{unknown}; twell.register_adapter says what it computes")
                continue
            if name in WRAPPED:
                wrapper = f"a {kind.__name__} is wrapped in a {type(owner).__name__}"
                raise ValueError(f"{wrapper}; sparsify before")
            if adapter.renamed and any(site.module is module for site in result):
                continue  # several owners hold it
            result.append(Site(owner, name, module, adapter))
    return result


# --- computing in a module that stays


class OwnedFFN(SparseFFN):
    """A SparseFFN that computes with children of its owner; `names` has theirs by its own."""

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
    """An inline module as its own forward sees it."""

    forward = None  # transformers' checkpointing compares it with the forward that runs

    def __init__(self, module: nn.Module, adapter: Adapter):
        self._module = module
        for name in (adapter.act, adapter.down):
            setattr(self, name, lambda x: x)
        setattr(self, adapter.up, module._modules[SLOT])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return MethodType(value.__func__, self)
        return value


@functools.cache
def sparse_class(kind: type[nn.Module], adapter: Adapter) -> type[nn.Module]:
    """Return a subclass of a module's class that computes by the child SLOT, an `OwnedFFN`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ffn = self._modules[SLOT]
        if ffn.owner is not self:  # in a replica of nn.DataParallel
            vars(ffn)["owner"] = self
        if adapter.inline:
            return kind.forward(_Inside(self, adapter), *args, **kwargs)
        return ffn(*args, **kwargs)

    fields = {"forward": forward, "_dense_class": kind}
    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (kind,), fields | about)
