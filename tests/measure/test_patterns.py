"""Layers of a known activity, and where the pattern of a model's layers comes from."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.measure import factories
from tests.measure.factories import K, N, counts_of, fresh_mask
from twell import results
from twell.measure.check import Exact
from twell.measure.patterns import (
    EVEN,
    IMPOSED,
    SKEWED,
    Pattern,
    imposed_layer,
    permuted,
    recorded_masks,
    synthetic_layer,
)


@pytest.mark.parametrize("num_layers", [8, 18, 28, 38])
@pytest.mark.parametrize("active", [0.5, 29, 911])
def test_the_papers_profile_has_its_hump_and_its_mean(num_layers, active):
    means = IMPOSED.means(num_layers, active)
    assert len(means) == num_layers and np.mean(means) == pytest.approx(active)
    assert sorted(means)[:2] == means[:2]  # the first two are least active, the first one least
    peak = int(np.argmax(means))
    assert abs(peak - max(6 / 27 * (num_layers - 1), 2)) <= 0.5
    assert means[peak] > 2.5 * means[-1] and max(means) < 5632
    assert replace(IMPOSED, profile="flat").means(num_layers, active) == [active] * num_layers


def test_few_layers_have_no_hump_and_other_names_are_refused():
    assert IMPOSED.means(1, 7) == [7.0] and IMPOSED.means(2, 7) == [7.0, 7.0]
    with pytest.raises(ValueError, match="profile 'hump' is unknown; use one of paper, flat"):
        replace(IMPOSED, profile="hump")
    with pytest.raises(ValueError, match="'evn' is unknown; use one of even, skewed, recorded"):
        Pattern("evn")


@pytest.mark.parametrize("num_tokens", [40, 3000])
@pytest.mark.parametrize("pattern", [EVEN, SKEWED])
@pytest.mark.parametrize("active", [0, 1, 29, 300, 600])
def test_a_synthetic_layer_has_the_given_activity(active, pattern, num_tokens, seed):
    options = {"active": active, "pattern": pattern, "device": "cpu", "seed": seed}
    x, w_gate, w_up, w_down = parts = synthetic_layer(num_tokens, 128, 600, **options)
    shapes = [(num_tokens, 128), (600, 128), (600, 128), (128, 600)]
    assert [tuple(part.shape) for part in parts] == shapes
    assert w_down.stride() == (1, 128) and all(part.dtype == torch.bfloat16 for part in parts)
    mean = float(counts_of(x, w_gate).double().mean())
    if active in (0, 600):
        assert mean == active
    else:
        # Tokens of a document are alike and neurons differ, so the mean of few tokens scatters.
        variance = active * (0.3 if pattern is SKEWED else 1 / num_tokens)
        assert abs(mean - active) <= 5 * variance**0.5 + 0.05 * active


def test_a_skewed_layer_has_popular_neurons_and_heavy_tokens(seed):
    tokens, neurons, unions = {}, {}, {}
    for pattern in (EVEN, SKEWED):
        options = {"active": 30, "pattern": pattern, "device": "cpu", "seed": seed}
        x, w_gate, *_ = synthetic_layer(2000, 128, 600, **options)
        active = torch.relu(x.double() @ w_gate.double().t()) != 0
        tokens[pattern], neurons[pattern] = active.sum(1).max(), active.sum(0).max()
        unions[pattern] = active.view(-1, 50, 600).any(1).sum(1).double().mean()
    assert tokens[SKEWED] > 2 * tokens[EVEN] and neurons[SKEWED] > 2 * neurons[EVEN]
    assert unions[SKEWED] < 0.8 * unions[EVEN]


def test_a_single_token_has_the_given_activity_whatever_token_is_drawn(seed):
    counts = []
    for number in range(240):
        options = {"active": 50, "device": "cpu", "seed": seed + number}
        x, w_gate, *_ = synthetic_layer(1, 64, 1000, **options)
        counts.append(int(counts_of(x, w_gate)))
    # Of 12,000 draws: mean 48, standard deviation 13, at most 103.
    assert abs(np.mean(counts) - 50) < 7 and max(counts) < 50 + 12 * 50**0.5


@pytest.mark.parametrize("hidden_size", [16, 48, 256])
def test_a_mask_is_imposed_exactly(hidden_size, seed):
    r = np.random.default_rng(seed)
    for length in (1, 3, hidden_size // 2, hidden_size):
        mask = fresh_mask(r, length, int(r.integers(1, 400)))
        num_tokens = int(r.integers(1, 3 * length + 1))
        inputs = imposed_layer(mask, num_tokens, hidden_size, device="cpu", seed=seed)
        x, w_gate, w_up, w_down = inputs
        assert x.shape == (num_tokens, hidden_size)
        assert w_gate.shape == w_up.shape == w_down.t().shape
        assert w_down.stride() == (1, hidden_size) and w_gate.dtype == torch.bfloat16
        g = F.relu(F.linear(x, w_gate))  # as a dense layer in bf16 computes it
        expected = mask[np.arange(num_tokens) % length]  # a short passage is repeated
        assert np.array_equal((g != 0).numpy(), expected)
        if expected.sum() > 1:
            assert len(g[g != 0].unique()) > 1


def test_a_mask_that_rounding_breaks_is_refused(seed, monkeypatch):
    not_orthogonal = lambda a: type("QR", (), {"Q": a})  # noqa: E731
    monkeypatch.setattr(torch.linalg, "qr", not_orthogonal)
    mask = np.random.default_rng(seed).random((16, 40)) < 0.1
    with pytest.raises(ArithmeticError, match=r"\d+ of 640 entries differ from the mask"):
        imposed_layer(mask, 16, 16, device="cpu")


@pytest.mark.parametrize("shape", [(17, 5), (0, 5), (5,)])
def test_a_mask_that_does_not_fit_is_refused(shape):
    message = r"the mask has shape \(.*\), expected \[1 to 16 \(hidden_size\), neurons\]"
    with pytest.raises(ValueError, match=message):
        imposed_layer(np.ones(shape, bool), 4, 16, device="cpu")


@pytest.mark.parametrize("active", [-1, 97])
def test_activity_that_no_layer_has_is_refused(active):
    message = f"active is {active}; a layer of 96 neurons can have 0 to all of them"
    with pytest.raises(ValueError, match=message):
        synthetic_layer(4, K, N, active=active, device="cpu")


def test_the_recorded_masks_are_those_of_the_readme():
    masks = recorded_masks()
    means = {name: round(float(mask.sum(1).mean()), 1) for name, mask in masks.items()}
    assert means == {"sparser_2": 3.3, "sparser_8": 12.5, "sparser_11": 16.8, "denser_8": 100.2}
    assert {mask.shape for mask in masks.values()} == {(2048, 2816)}
    data = results.root() / "data"
    assert (data / "traces" / "masks.npz").stat().st_size < 700_000
    text = (data / "README.md").read_text(encoding="utf-8")
    for name, mean in means.items():
        assert f"`{name}` {mean}" in text


def test_a_file_of_something_else_is_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nonsense")
    np.savez(tmp_path / "b.npz", something=np.ones(3))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(ValueError, match=rf"{name} is no file of masks"):
            recorded_masks(tmp_path / name)


@pytest.mark.parametrize("gated", [True, False])
def test_permuted_weights_are_the_same_layer_in_other_memory(gated, seed):
    x, weights = factories.layer(70, gated, seed)
    exact = Exact.of(x, weights)
    seen = [weights]
    for number in range(3):
        other = permuted(weights, seed + number)
        assert other[2].stride() == weights[2].stride() and (other[0] is None) == (not gated)
        for before, part in itertools.product(seen, range(3)):
            if other[part] is not None:
                assert other[part].data_ptr() != before[part].data_ptr()
                assert not torch.equal(other[part], before[part])
        again = Exact.of(x, other)
        assert torch.equal(again.counts, exact.counts) and torch.equal(again.unions, exact.unions)
        assert again.touched == exact.touched
        torch.testing.assert_close(again.y, exact.y)
        seen.append(other)
