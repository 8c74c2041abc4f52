"""Layers and models of a known activity."""

import numpy as np
import pytest
import torch

from tests.factories import SEED, measure
from tests.factories.measure import counts_of
from twell import results
from twell.measure import imposed
from twell.measure.imposed import EVEN, SKEWED, layer_means, synthetic_layer


def test_the_papers_profile_has_its_hump_and_its_mean():
    means = layer_means("paper", 38, 29)
    assert len(means) == 38 and np.mean(means) == pytest.approx(29)
    assert sorted(means)[:2] == means[:2]  # the first two are least active, the first one least
    assert abs(np.argmax(means) - 6 / 27 * 37) <= 0.5 and max(means) > 2.5 * means[-1]
    assert layer_means("paper", 2, 7) == [7.0, 7.0]  # few layers have no hump


@pytest.mark.parametrize("pattern", [EVEN, SKEWED])
@pytest.mark.parametrize("active", [0, 1, 300, 600])
def test_a_synthetic_layer_has_the_given_activity(active, pattern):
    options = {"active": active, "pattern": pattern, "device": "cpu", "seed": SEED}
    num_tokens = 3000
    x, w_gate, w_up, w_down = parts = synthetic_layer(num_tokens, 128, 600, **options)
    shapes = [(num_tokens, 128), (600, 128), (600, 128), (128, 600)]
    assert [tuple(part.shape) for part in parts] == shapes
    assert w_down.stride() == (1, 128) and all(part.dtype == torch.bfloat16 for part in parts)
    mean = float(counts_of(x, w_gate).double().mean())
    # Tokens of a document are alike and neurons differ, so the mean of few tokens scatters.
    variance = active * (0.3 if pattern is SKEWED else 1 / num_tokens)
    most = 0 if active in (0, 600) else 5 * variance**0.5 + 0.05 * active
    assert abs(mean - active) <= most


# --- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gated, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_layers_are_as_active_as_asked_for_and_channels_stay_untouched(gated, dtype):
    model = measure.model(dtype, gated_mlp=gated, tie_word_embeddings=gated)
    tokens = imposed.draw_tokens(640, 16, 64, seed=SEED)
    streams, added = [], []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, __, y: streams.append(y))
        block.mlp.register_forward_hook(lambda _, __, y: added.append(float(y.float().std())))
    for means in ([3.0, 40.0, 12.0, 1.0], [100.0, 5.0, 30.0, 150.0]):  # the same model again
        imposed.impose(model, means, tokens, SEED)
        added.clear()
        given = [float(a.double().sum(1).mean()) for a in measure.active_entries(model, tokens)]
        # In fp32 only ties are off; in bf16 each neuron's threshold is rounded by up to 2^-8 of it.
        assert np.allclose(given, means, rtol=0.01 if dtype == torch.float32 else 0.15, atol=0.05)
        assert np.allclose(added, imposed.FFN_PART, rtol=0.1)  # the same at any activity
        embedded = model.model.embed_tokens(tokens)
        assert all(torch.equal(stream[..., :2], embedded[..., :2]) for stream in streams[-4:])
        assert not model.model.norm(streams[-1])[..., :2].any()  # the head does not see them


def test_unions_and_heavy_tokens_are_as_recorded():
    """At the mean activity of a recorded layer: unions of 64 tokens, and the busiest tokens."""
    with np.load(results.root() / "data" / "traces" / "masks.npz") as file:
        mask = torch.from_numpy(np.unpackbits(file["sparser_8"], axis=1, count=2816))
    recorded = float(mask.view(-1, 64, 2816).any(1).sum(1).double().mean())
    sizes = {"hidden_size": 128, "intermediate_size": 2816, "num_hidden_layers": 1}
    model = measure.model(torch.float32, **sizes, vocab_size=49152)
    mean = float(mask.sum(1).double().mean())
    imposed.impose(model, [mean], imposed.draw_tokens(49152, 64, 64, seed=1))
    (layer,) = imposed.activity_of(model, imposed.draw_tokens(49152, 16, 256))
    assert layer["mean"] == pytest.approx(mean, rel=0.15)
    assert layer["union"] / layer["mean"] == pytest.approx(recorded / mean, rel=0.15)
    assert 3 * layer["mean"] < layer["p99"] < 10 * layer["mean"]


@pytest.mark.parametrize("behind", [0, 5])
def test_activity_is_that_of_a_plain_loop(behind):
    model, tokens = measure.model(num_hidden_layers=1), imposed.draw_tokens(640, 3, 100)
    (activity,) = imposed.activity_of(model, tokens, behind)
    (active,) = measure.active_entries(model, tokens)
    size = 64
    if behind:  # one token of each document at a time
        active, size = active.view(3, 100, -1)[:, 5:].transpose(0, 1).flatten(0, 1), 3
    counts = active.sum(1).sort().values
    unions = [float(block.any(0).sum()) for block in active.split(size)]
    assert activity["tokens"] == len(active)
    assert activity["mean"] == pytest.approx(float(counts.double().mean()))
    assert activity["max"] == counts[-1]
    assert activity["p99"] == counts[-(-99 * len(counts) // 100) - 1]
    assert activity["union"] == pytest.approx(np.mean(unions))
