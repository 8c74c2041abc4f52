"""Dead neurons: windows, re-initialisation, and columns of one length."""

import dataclasses

import pytest
import torch

from tests.train.runs import log_of, series, train_changed
from twell.models import SparseLlamaForCausalLM, load
from twell.train.dead import DeadWindow, balance, reinitialize


def test_dead_window_spans_steps():
    window = DeadWindow(2, 100)
    counts = lambda *layers: [torch.tensor(layer) for layer in layers]  # noqa: E731
    assert window.add(counts([1, 0, 0], [0, 0, 2]), 60) is None
    dead = window.add(counts([0, 3, 0], [0, 0, 1]), 60)
    assert [layer.tolist() for layer in dead] == [[False, False, True], [True, True, False]]
    assert window.add(counts([0, 0, 0], [0, 0, 0]), 99) is None  # the next window starts empty
    assert all(layer.all() for layer in window.add(counts([0, 0, 0], [0, 0, 0]), 1))


@pytest.mark.parametrize("gated", [True, False])
def test_reinitialisation_mixes_noise_into_dead_rows_alone(tiny_config, gated):
    model = SparseLlamaForCausalLM(dataclasses.replace(tiny_config, gated=gated).model_config())
    weights = [(ffn.gate_proj or ffn.up_proj).weight for ffn in model.ffns]
    before = {name: p.clone() for name, p in model.named_parameters()}
    dead = [torch.rand(96) < 0.3 for _ in weights]
    changed = ["gate_proj" if gated else "up_proj"]
    reinitialize(model, dead, 0.25, [5, 1])
    for name, parameter in model.named_parameters():
        if not any(part in name for part in changed):
            assert torch.equal(parameter, before[name]), name
    for layer, (weight, rows) in enumerate(zip(weights, dead, strict=True)):
        old = before[f"model.layers.{layer}.mlp.{changed[0]}.weight"]
        assert torch.equal(weight[~rows], old[~rows])
        noise = (weight[rows] - 0.75 * old[rows]) / 0.25
        assert noise.std().item() == pytest.approx(0.02, rel=0.15)
        assert abs(noise.mean().item()) < 0.002
    again = SparseLlamaForCausalLM(dataclasses.replace(tiny_config, gated=gated).model_config())
    again.load_state_dict(before | {"lm_head.weight": before["model.embed_tokens.weight"]})
    # The noise depends on the seed alone: the same on every process.
    reinitialize(again, dead, 0.25, [5, 1])
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    reinitialize(again, dead, 0.25, [5, 2])
    assert not torch.equal((again.ffns[0].gate_proj or again.ffns[0].up_proj).weight, weights[0])


def test_reinitialisation_revives_neurons_once_a_window(tiny_config, tmp_path):
    settings = {"l1_coefficient": 1.0, "tokens": 64 * 512, "learning_rate": 1e-2}
    dead = {}
    for share in (0.0, 0.5):
        log = log_of(tiny_config, tmp_path / str(share), reinit=share, **settings)
        dead[share] = series(log, "dead_fraction").groupby("step").mean()
    assert len(dead[0.5]) == 16
    first = dead[0.0][dead[0.0] > 0].index[0]
    # Nothing acts before there are dead neurons.
    assert (dead[0.0].loc[:first] == dead[0.5].loc[:first]).all()
    assert dead[0.5].iloc[-1] < dead[0.0].iloc[-1] - 0.05


@pytest.mark.parametrize("kind", ["gated", "not gated", "SiLU"])
def test_balance_gives_columns_one_length_and_leaves_the_outputs(tiny_config, kind):
    changes = {"gated": kind != "not gated", "activation": "silu" if kind == "SiLU" else "relu"}
    config = dataclasses.replace(tiny_config, **changes).model_config()
    model = SparseLlamaForCausalLM(config).double().train()
    for ffn in model.ffns:
        columns = ffn.down_proj.weight
        columns.data *= torch.rand(columns.shape[1]).mul(3).exp()
        columns.data[:, 5] = 0
        ffn.up_proj.bias = torch.nn.Parameter(torch.randn(columns.shape[1], dtype=torch.double))
    tokens = torch.randint(0, 300, (2, 16))
    before = model(input_ids=tokens, labels=tokens)
    counted = [ffn.stats.take()[0] for ffn in model.ffns]
    balance(model)
    after = model(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-9, atol=1e-12)
    for ffn, counts in zip(model.ffns, counted, strict=True):
        assert torch.equal(ffn.stats.take()[0], counts)
    assert abs(after.l1 / before.l1 - 1) > 0.1
    for ffn in model.ffns:
        lengths = ffn.down_proj.weight.norm(dim=0)
        expected = torch.full_like(lengths, 0.02 * 32**0.5).index_fill(0, torch.tensor(5), 0.0)
        torch.testing.assert_close(lengths, expected, rtol=1e-9, atol=0)


def test_balanced_training_ends_with_columns_of_one_length(tiny_config, tmp_path):
    spread = {}
    for every in (0, 2):
        model, _ = load(train_changed(tiny_config, tmp_path / str(every), balance_every=every))
        lengths = torch.stack([ffn.down_proj.weight.detach().norm(dim=0) for ffn in model.ffns])
        spread[every] = float(lengths.max() / lengths.min())
    assert spread[2] < 1 + 1e-5 < spread[0]
