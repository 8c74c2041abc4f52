"""Optimiser steps of a model: the same steps by every provider, rows, the largest micro-batch."""

import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from tests.factories import SEED, measure
from tests.factories.ops import as_sparse_train
from twell.measure import trainer
from twell.measure.providers import DENSE_EAGER, UNION_COMPILED
from twell.measure.rows import COLUMNS
from twell.measure.trainer import Trainer, chunked_cross_entropy, model_config, train_step
from twell.train import TrainConfig

OPS = pytest.importorskip("twell.sparse.training_ops")
TINY = [*measure.TINY, "context=32", "micro_batch=4", "valid_tokens=512", "precision=bf16"]
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def build(dense_kernels):
    """A small trainer, 20 neurons of 96 active."""

    def build(*overrides):
        config = model_config("quick", [*TINY, *overrides])
        return Trainer("quick", config, "flat", 20.0, dense_kernels)

    return build


def test_the_cross_entropy_in_chunks_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr(trainer, "LOSS_CHUNK", 3)
    g = torch.Generator().manual_seed(SEED)
    double = {"generator": g, "dtype": torch.float64, "requires_grad": True}
    leaves = hidden, weight = torch.randn(7, 5, **double), torch.randn(11, 5, **double)
    labels = torch.randint(11, (7,), generator=g)
    labels[1:3] = -100

    def loss(hidden, weight, labels):
        return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")

    whole = F.cross_entropy(hidden @ weight.t(), labels)
    chunked = chunked_cross_entropy(*leaves, labels, loss)
    gradients = [torch.autograd.grad(value, leaves) for value in (chunked, whole)]
    torch.testing.assert_close([chunked, *gradients[0]], [whole, *gradients[1]])


def test_providers_take_the_same_steps_from_the_same_weights(build):
    trainer, results = build(), {}
    for provider in (DENSE_EAGER, UNION_COMPILED, DENSE_EAGER):
        trainer.become(provider, 1e-3)
        weight = trainer.model.ffns[0].down_proj.weight
        assert torch.equal(weight, trainer.start[DOWN])
        assert weight.stride() == ((1, 32) if provider.backend == "triton" else (96, 1))
        calls = [layer._compiled_call_impl for layer in trainer.model.model.layers]
        assert [call is not None for call in calls] == 3 * [provider.compiled]
        steps = trainer.steps()
        assert results.setdefault(provider, steps) == steps  # dense again: as at first
        assert trainer.optimizer.state[weight]["exp_avg"].stride() == weight.stride()
        assert not trainer.model.ffns[0].stats.counters  # no statistics


def test_a_step_is_that_of_the_model_itself(build):
    """Loss with the L1 term and clipped gradients: the same as by the model's own forward."""
    trainer = build("max_grad_norm=0.1")
    trainer.config.l1_coefficient = trainer.model.config.l1_coefficient = 0.01
    trainer.become(DENSE_EAGER, 1e-3)
    loss, norm, own_norm = trainer.step()
    stepped = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.become(DENSE_EAGER, 1e-3)
    with trainer.autocast():
        output = trainer.model(input_ids=trainer.tokens, labels=trainer.tokens, use_cache=False)
    output.loss.backward()
    assert float(loss) == pytest.approx(output.loss.item()) and output.l1 > 0.1
    gradients = [p.grad.flatten() for ffn in trainer.model.ffns for p in ffn.parameters()]
    assert float(own_norm) == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-4)
    whole = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1))
    assert float(norm) == pytest.approx(whole, rel=1e-4) and 0.02 < own_norm < norm
    trainer.optimizer.step()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), stepped[name], msg=name)


def test_rows_are_of_steps_with_the_first_weights_and_their_own_capacity(
    dense_kernels, monkeypatch, tmp_path
):
    steps, step, rates, paths = Trainer.steps, Trainer.step, [], set()

    def train(path, *tensors, **options):
        paths.add(path)
        return measure.train(path, *tensors, **options)

    def logged(trainer):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return step(trainer)

    def with_large_buffers(trainer):  # as after a training that turned all neurons on
        result = steps(trainer)
        if trainer.sparse is not None:
            trainer.sparse.capacity = trainer.sparse.capacities[-1]
        return result

    monkeypatch.setattr(OPS, "sparse_train", as_sparse_train(train))
    monkeypatch.setattr(Trainer, "step", logged)
    monkeypatch.setattr(Trainer, "steps", with_large_buffers)
    options = {"profile": "paper", "hybrid": True, "energy": True, "out": tmp_path}
    rows = train_step("quick", [*TINY, "checkpoint_activations=true"], active=4, **options)
    assert all(list(row) == COLUMNS["train_step"] for row in rows)
    table = pd.read_csv(tmp_path / "train_step.csv")
    providers = "dense eager,triton union,triton hybrid,dense torch.compile"
    providers += ",triton union torch.compile,triton hybrid torch.compile"
    assert list(table["provider"]) == providers.split(",")
    assert list(table["path"]) == 2 * ["dense", "union", "hybrid"] and paths == {"union", "hybrid"}
    assert table["capacity"].isna().tolist() == 2 * [True, False, False]
    assert table["capacity"].max() < 96 and table["energy"].notna().all()
    expected = {"micro_batch": 4, "tokens_per_second": 128_000, "context": 32}
    expected |= {"profile": "paper", "num_layers": 3}
    assert all((table[name] == value).all() for name, value in expected.items())
    assert (table["active_max"] > 1.3 * table["active"]).all()
    # Timed steps leave the activity as it is.
    checked = [rate for rate in rates if rate]
    assert checked == 6 * (trainer.CHECKED_STEPS + 1) * [TrainConfig.load("quick").learning_rate]


@pytest.mark.parametrize("wrong", ["gradient", "loss", "dense layer"])
def test_a_model_that_learns_something_else_is_refused(dense_kernels, tmp_path, monkeypatch, wrong):
    from twell.sparse import ops

    def train(*tensors, **options):
        result = measure.train(*tensors, **options)
        half = 0.5 * result.y + 0.5 * result.y.detach()
        return result._replace(y=half if wrong == "gradient" else 3 * result.y + 1)

    if wrong == "dense layer":
        monkeypatch.setattr(ops, "takes", lambda *_: False)
    else:
        monkeypatch.setattr(OPS, "sparse_train", as_sparse_train(train))
    message = "computed a layer densely" if wrong == "dense layer" else "is wrong: the"
    with pytest.raises(ArithmeticError, match=f"^triton union of quick {message}"):
        train_step("quick", TINY, active=20, compiled=False, out=tmp_path)
    assert not dense_kernels.timed and not list(tmp_path.iterdir())
