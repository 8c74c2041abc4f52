"""A user's own modules, described by an adapter, and adapters that describe something else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twell
from tests.factories.models import assert_same
from twell.models import adapters, register_adapter, sparse_ffns, sparsify
from twell.sparse.layer import SparseFFN

assert_close = torch.testing.assert_close


class Block(nn.Module):
    """A model of one feed-forward layer, and a residual."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(32, 84), nn.Linear(84, 32, bias=False)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Gated(nn.Module):
    """Functions of both branches, by default ReLU as in TurboSparse, and dropout."""

    def __init__(self, of_gate=F.relu, of_up=F.relu):
        super().__init__()
        self.of_gate, self.of_up = of_gate, of_up
        self.w1, self.w3 = nn.Linear(32, 84, bias=False), nn.Linear(32, 84, bias=False)
        self.w2, self.drop = nn.Linear(84, 32, bias=False), nn.Dropout(0.3)

    def forward(self, x):
        return self.w2(self.drop(self.of_gate(self.w1(x)) * self.of_up(self.w3(x))))


def of_prosparse():
    return Gated(lambda a: F.threshold(a, 0.2, 0.0), lambda u: u)


def changed(module, **parts):
    module._modules.update(parts)
    return module


class Threshold(Squared):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Flat(Threshold):
    def forward(self, x):
        return super().forward(x).flatten(0, -2)


def rare():
    return Threshold(nn.Threshold(40.0, 0.0))


SQUARED = {"up": "c_fc", "down": "c_proj"}
GATED = {"gate": "w1", "up": "w3", "down": "w2", "dropout": "drop"}
Linear = type("Linear", (nn.Linear,), {})  # a class of one's own
DRELU = {"activation": "drelu"}
OWN = [
    (Squared, SQUARED | {"activation": "relu2"}),
    (Gated, GATED | DRELU),
    (of_prosparse, GATED | {"activation": "relu", "threshold": 0.2}),
    (lambda: Threshold(nn.Threshold(0.2, 0.0)), SQUARED | {"act": "act"}),
]


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))


@pytest.mark.parametrize(("make", "fields"), OWN)
def test_a_module_of_ones_own_is_described_by_an_adapter(make, fields):
    model, x = nn.Sequential(Block(make()), Block(make())), torch.randn(2, 5, 32)
    before, text = model(x) if model.eval() else None, repr(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="Sequential has no feed-forward layer that twell knows"):
        sparsify(model)
    register_adapter(type(model[0].mlp), **fields)
    numbers = torch.get_rng_state()
    sparsify(model, backend="reference")
    assert torch.equal(torch.get_rng_state(), numbers)
    assert_close(model(x), before)
    assert_same(model.state_dict(), state)
    model.load_state_dict(state)
    sparse_ffns(model)[0].train()
    twell.densify(model)
    assert model[0].mlp.training and not model[1].mlp.training
    assert repr(model) == text and torch.equal(model.eval()(x), before)
    sparsify(sparsify(model))
    assert len(sparse_ffns(model)) == 2


@pytest.mark.parametrize(
    ("make", "fields", "names"),
    [
        (of_prosparse, GATED | {"activation": "relu"}, "Gated describes something else"),
        (rare, SQUARED | {"activation": "relu2", "threshold": 40.0}, "describes something else"),
        (Gated, SQUARED | {"activation": "relu"}, "'c_fc'"),
        (Gated, {"up": "w1", "down": "w3", "activation": "relu"}, "w2.weight"),
        (Squared, SQUARED | {"activation": "relu3"}, "'relu3'"),
        (lambda: Threshold(nn.GELU()), SQUARED | {"act": "act"}, "GELU"),
        (Squared, {"activation": "relu"}, "'up' and 'down'"),
        (lambda: changed(Squared(), c_fc=Linear(32, 84)), SQUARED | {"activation": "relu"}, "else"),
        (lambda: changed(Gated(), drop=nn.Identity()), GATED | DRELU, "is Identity"),
        (lambda: Flat(nn.ReLU()), SQUARED | {"act": "act"}, "Flat returns something else"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(make, fields, names):
    model = nn.Sequential(Block(make()))
    with pytest.raises((ValueError, TypeError, AttributeError), match=names):
        register_adapter(type(model[0].mlp), **fields)
        sparsify(model)
    assert not any(isinstance(module, SparseFFN) for module in model.modules())


def test_every_module_of_a_class_is_compared():
    model = nn.Sequential(*(Block(Threshold(nn.Threshold(value, 0.0))) for value in (0.1, 0.5)))
    register_adapter(Threshold, **SQUARED, activation="relu", threshold=0.1)
    with pytest.raises(ValueError, match="of Threshold describes something else"):
        sparsify(model)


def test_shards_are_not_compared():
    model = nn.Sequential(Squared())
    model[0].c_fc.weight.data = torch.empty(0)  # as FSDP1 and DeepSpeed keep it
    register_adapter(Squared, **SQUARED, activation="relu2")
    assert len(sparse_ffns(sparsify(model))) == 1
