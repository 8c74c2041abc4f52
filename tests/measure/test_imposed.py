"""Models of imposed activity: the given means, uneven as recorded ones, and random weights."""

import numpy as np
import pytest
import torch

from tests.factories import SEED, measure
from twell.measure import imposed
from twell.measure.patterns import recorded_masks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
def test_layers_are_as_active_as_asked_for_and_channels_stay_untouched(gated, dtype):
    model = measure.model(dtype, gated_mlp=gated, tie_word_embeddings=gated)
    tokens = imposed.draw_tokens(640, 16, 64, seed=SEED)
    streams = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, y: streams.append(y))
    for means in ([3.0, 40.0, 12.0, 1.0], [100.0, 5.0, 30.0, 150.0]):  # the same model again
        imposed.impose(model, means, tokens, SEED)
        streams.clear()
        entries = measure.active_entries(model, tokens)
        given = [float(layer.double().sum(1).mean()) for layer in entries]
        # In fp32 only ties are off; in bf16 each neuron's threshold is rounded by up to 2^-8 of it.
        assert np.allclose(given, means, rtol=0.01 if dtype == torch.float32 else 0.15, atol=0.05)
        embedded = model.model.embed_tokens(tokens)
        assert (embedded[..., imposed.CONSTANT] == 1).all()
        assert embedded[..., imposed.DRAW].float().std() > 0.5
        for stream in streams:
            assert torch.equal(stream[..., :2], embedded[..., :2])
            assert not torch.equal(stream[..., 2:], embedded[..., 2:])
        assert not model.model.norm(streams[-1])[..., :2].any()  # the head does not see them
    assert len(streams) == 4 and model.lm_head.weight.float().std() > 0
    assert not any(ffn._forward_hooks or ffn._forward_pre_hooks for ffn in model.ffns)


def test_under_autocast_the_means_are_those_of_the_computation():
    model = measure.model(torch.float32).requires_grad_()
    tokens = imposed.draw_tokens(640, 16, 64, seed=SEED)
    with torch.autocast("cpu", torch.bfloat16):
        # Again: casts of the first weights are of no use.
        for means in ([30.0] * 4, [5.0, 10.0, 20.0, 40.0]):
            imposed.impose(model, means, tokens, SEED)
            given = [layer["mean"] for layer in imposed.activity_of(model, tokens)]
            assert np.allclose(given, means, rtol=0.15)


def test_what_layers_add_is_small_and_the_same_at_any_activity():
    model = measure.model(torch.float32)
    tokens = imposed.draw_tokens(640, 16, 64, seed=SEED)
    added = []
    for ffn in model.ffns:
        ffn.register_forward_hook(lambda _, __, y: added.append(float(y.square().mean().sqrt())))
    for means in ([2.0] * 4, [90.0] * 4):
        imposed.impose(model, means, tokens, SEED)
        added.clear()
        logits = model(input_ids=tokens, use_cache=False).logits
        assert np.allclose(added, imposed.FFN_PART, rtol=0.02)
        own = logits.gather(-1, tokens[..., None])
        assert 0.5 * imposed.LOGIT < float(logits.std()) < 3 * imposed.LOGIT < float(own.mean())


def test_unions_and_heavy_tokens_are_as_recorded():
    """At the mean activity of a recorded layer: unions of 64 tokens, and the busiest tokens."""
    mask = torch.from_numpy(recorded_masks()["sparser_8"])
    recorded = float(mask.view(-1, 64, 2816).any(1).sum(1).double().mean())
    sizes = {"hidden_size": 128, "intermediate_size": 2816, "num_hidden_layers": 1}
    model = measure.model(torch.float32, **sizes, vocab_size=49152)
    mean = float(mask.sum(1).double().mean())
    imposed.impose(model, [mean], imposed.draw_tokens(49152, 64, 64, seed=1))
    (layer,) = imposed.activity_of(model, imposed.draw_tokens(49152, 16, 256))
    assert layer["mean"] == pytest.approx(mean, rel=0.15)
    assert layer["union"] / layer["mean"] == pytest.approx(recorded / mean, rel=0.15)
    assert 7 * layer["mean"] < layer["max"] < 60 * layer["mean"]
    assert 3 * layer["mean"] < layer["p99"] < 10 * layer["mean"]


@pytest.mark.parametrize(("num_tokens", "block"), [(1, 64), (70, 1), (300, 64)])
def test_activity_is_that_of_a_plain_loop(num_tokens, block, monkeypatch):
    monkeypatch.setattr(imposed, "ACTIVITY_CHUNK", 130)  # not a multiple of the block
    ffn = measure.model().ffns[0]
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    activity = imposed.layer_activity(ffn, x.view(1, num_tokens, 64), block)
    active = (ffn.activations(x)[0] != 0).numpy()
    counts = np.sort(active.sum(1))
    unions = [active[start : start + block].any(0).sum() for start in range(0, num_tokens, block)]
    assert activity["tokens"] == num_tokens and activity["mean"] == pytest.approx(counts.mean())
    assert activity["max"] == counts[-1]
    assert activity["p99"] == counts[-(-99 * num_tokens // 100) - 1]
    assert activity["union"] == pytest.approx(np.mean(unions))
    assert activity["dead"] == pytest.approx((~active.any(0)).mean())
