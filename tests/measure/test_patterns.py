"""Layers of a known activity, and where the pattern of a model's layers comes from."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.factories import SEED
from tests.factories.measure import K, N, counts_of, fresh_mask, layer
from twell import results
from twell.measure.check import Exact
from twell.measure.patterns import (
    EVEN,
    IMPOSED,
    SKEWED,
    imposed_layer,
    permuted,
    recorded_masks,
    synthetic_layer,
)


@pytest.mark.parametrize("num_layers", [8, 28, 38])
def test_the_papers_profile_has_its_hump_and_its_mean(num_layers):
    means = IMPOSED.means(num_layers, 29)
    assert len(means) == num_layers and np.mean(means) == pytest.approx(29)
    assert sorted(means)[:2] == means[:2]  # the first two are least active, the first one least
    assert abs(np.argmax(means) - max(6 / 27 * (num_layers - 1), 2)) <= 0.5
    assert max(means) > 2.5 * means[-1]
    assert replace(IMPOSED, profile="flat").means(num_layers, 7) == [7] * num_layers
    assert IMPOSED.means(2, 7) == [7.0, 7.0]  # few layers have no hump


@pytest.mark.parametrize("num_tokens", [40, 3000])
@pytest.mark.parametrize("pattern", [EVEN, SKEWED])
@pytest.mark.parametrize("active", [0, 1, 300, 600])
def test_a_synthetic_layer_has_the_given_activity(active, pattern, num_tokens):
    options = {"active": active, "pattern": pattern, "device": "cpu", "seed": SEED}
    x, w_gate, w_up, w_down = parts = synthetic_layer(num_tokens, 128, 600, **options)
    shapes = [(num_tokens, 128), (600, 128), (600, 128), (128, 600)]
    assert [tuple(part.shape) for part in parts] == shapes
    assert w_down.stride() == (1, 128) and all(part.dtype == torch.bfloat16 for part in parts)
    mean = float(counts_of(x, w_gate).double().mean())
    # Tokens of a document are alike and neurons differ, so the mean of few tokens scatters.
    variance = active * (0.3 if pattern is SKEWED else 1 / num_tokens)
    most = 0 if active in (0, 600) else 5 * variance**0.5 + 0.05 * active
    assert abs(mean - active) <= most


def test_a_skewed_layer_has_popular_neurons_and_heavy_tokens():
    tokens, neurons, unions = {}, {}, {}
    for pattern in (EVEN, SKEWED):
        options = {"active": 30, "pattern": pattern, "device": "cpu", "seed": SEED}
        x, w_gate, *_ = synthetic_layer(2000, 128, 600, **options)
        active = torch.relu(x.double() @ w_gate.double().t()) != 0
        tokens[pattern], neurons[pattern] = active.sum(1).max(), active.sum(0).max()
        unions[pattern] = active.view(-1, 50, 600).any(1).sum(1).double().mean()
    assert tokens[SKEWED] > 2 * tokens[EVEN] and neurons[SKEWED] > 2 * neurons[EVEN]
    assert unions[SKEWED] < 0.8 * unions[EVEN]


@pytest.mark.parametrize("length", [1, 3, 24, 48])
def test_a_mask_is_imposed_exactly(length):
    mask = fresh_mask(length, 40 * length)
    for num_tokens in (1, length, 2 * length + 1):
        x, w_gate, w_up, w_down = imposed_layer(mask, num_tokens, 48, device="cpu", seed=SEED)
        assert x.shape == (num_tokens, 48) and w_gate.dtype == torch.bfloat16
        assert w_gate.shape == w_up.shape == w_down.t().shape and w_down.stride() == (1, 48)
        g = F.relu(F.linear(x, w_gate))  # as a dense layer in bf16 computes it
        expected = mask[np.arange(num_tokens) % length]  # a short passage is repeated
        assert np.array_equal((g != 0).numpy(), expected)
        assert expected.sum() < 2 or len(g[g != 0].unique()) > 1


def test_impossible_layers_are_refused(monkeypatch):
    for shape in ((17, 5), (0, 5), (5,)):
        with pytest.raises(ValueError, match=re.escape(f"shape {shape}")):
            imposed_layer(np.ones(shape, bool), 4, 16, device="cpu")
    for active in (-1, 97):
        with pytest.raises(ValueError, match=f"active is {active}; .* 96 neurons"):
            synthetic_layer(4, K, N, active=active, device="cpu")
    not_orthogonal = lambda a: type("QR", (), {"Q": a})  # noqa: E731
    monkeypatch.setattr(torch.linalg, "qr", not_orthogonal)
    with pytest.raises(ArithmeticError, match=r"\d+ of 640 entries differ from the mask"):
        imposed_layer(fresh_mask(16, 40), 16, 16, device="cpu")


def test_the_recorded_masks_are_those_of_the_readme(tmp_path):
    masks = recorded_masks()
    means = {name: round(float(mask.sum(1).mean()), 1) for name, mask in masks.items()}
    assert means == {"sparser_2": 3.3, "sparser_8": 12.5, "sparser_11": 16.8, "denser_8": 100.2}
    assert {mask.shape for mask in masks.values()} == {(2048, 2816)}
    text = (results.root() / "data" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}` {mean}" in text for name, mean in means.items())
    (tmp_path / "a.npz").write_bytes(b"PK nonsense")
    np.savez(tmp_path / "b.npz", something=np.ones(3))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(ValueError, match=rf"{name} is no file of masks"):
            recorded_masks(tmp_path / name)


@pytest.mark.parametrize("gated", [True, False])
def test_permuted_weights_are_the_same_layer_in_other_memory(gated):
    x, weights = layer(70, gated)
    exact = Exact.of(x, weights)
    other = permuted(weights, SEED)
    assert other[2].stride() == weights[2].stride() and (other[0] is None) == (not gated)
    assert not any(map(torch.equal, other[1:], weights[1:]))
    again = Exact.of(x, other)
    assert torch.equal(again.counts, exact.counts) and torch.equal(again.unions, exact.unions)
    torch.testing.assert_close(again.y, exact.y)
