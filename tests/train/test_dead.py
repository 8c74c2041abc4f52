"""Dead neurons: windows, re-initialisation, and columns of one length."""

import dataclasses

import pytest
import torch

from tests.factories import SEED
from twell.models import SparseLlamaForCausalLM
from twell.train.dead import DeadWindow, balance, reinitialize


@pytest.fixture
def model(request, tiny_config):
    torch.manual_seed(SEED)
    config = dataclasses.replace(tiny_config, **request.param)
    return SparseLlamaForCausalLM(config.model_config())


def test_a_window_spans_steps():
    window = DeadWindow(2, 100)
    counts = lambda *layers: [torch.tensor(layer) for layer in layers]  # noqa: E731
    assert window.add(counts([1, 0, 0], [0, 0, 2]), 60) is None
    again = DeadWindow(2, 100)
    again.restore(window.state(), torch.device("cpu"))
    dead = again.add(counts([0, 3, 0], [0, 0, 1]), 60)
    assert [layer.tolist() for layer in dead] == [[False, False, True], [True, True, False]]
    assert again.add(counts([0, 0, 0], [0, 0, 0]), 99) is None  # the next window starts empty
    assert all(layer.all() for layer in again.add(counts([0, 0, 0], [0, 0, 0]), 1))
    assert again.number == 2


@pytest.mark.parametrize("model", [{"gated": True}, {"gated": False}], indirect=True)
def test_reinitialisation_mixes_noise_into_dead_rows_alone(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    dead = [torch.rand(96) < 0.3 for _ in model.ffns]
    part = "gate_proj" if model.config.gated_mlp else "up_proj"

    def changed(seed):
        model.load_state_dict(before, strict=False)  # without the tied head
        reinitialize(model, dead, 0.25, seed)
        return {name: p.clone() for name, p in model.named_parameters()}

    after, again, other = changed([5, 1]), changed([5, 1]), changed([5, 2])
    for name, old in before.items():
        assert torch.equal(after[name], again[name])  # the same on every process
        if part not in name:
            assert torch.equal(after[name], old), name
    for layer, rows in enumerate(dead):
        name = f"model.layers.{layer}.mlp.{part}.weight"
        new, old = after[name], before[name]
        assert torch.equal(new[~rows], old[~rows]) and not torch.equal(new, other[name])
        noise = (new[rows] - 0.75 * old[rows]) / 0.25
        assert noise.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("model", [{"gated": False}, {"activation": "silu"}], indirect=True)
def test_balance_gives_columns_one_length_and_leaves_the_outputs(model):
    model = model.double().train()
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
    assert abs(after.l1 / before.l1 - 1) > 0.1
    for ffn, counts in zip(model.ffns, counted, strict=True):
        assert torch.equal(ffn.stats.take()[0], counts)
        lengths = ffn.down_proj.weight.norm(dim=0)
        expected = torch.full_like(lengths, 0.02 * 32**0.5).index_fill(0, torch.tensor(5), 0.0)
        torch.testing.assert_close(lengths, expected, rtol=1e-9, atol=0)
