"""Models of imposed activity: the given means, uneven as recorded ones, and random weights."""

import numpy as np
import pytest
import torch

from tests.measure import factories
from tests.measure.factories import active_entries
from twell.measure import imposed
from twell.measure.patterns import recorded_masks
from twell.models import SparseLlamaForCausalLM


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 49152])
def test_a_document_keeps_to_one_topic(vocab_size, seed):
    tokens = imposed.draw_tokens(vocab_size, 40, 100, seed=seed)
    assert tokens.shape == (40, 100) and tokens.min() >= 0 and tokens.max() < vocab_size
    topics = tokens % imposed.TOPICS
    assert (topics == topics[:, :1]).all()
    if vocab_size >= 1000:
        assert len(topics.unique()) > 10 and len(tokens[0].unique()) > 10
    assert torch.equal(tokens, imposed.draw_tokens(vocab_size, 40, 100, seed=seed))


# --- the model --------------------------------------------------------------------------------


@pytest.mark.parametrize("gated, tied", [(True, True), (False, False)])
def test_nothing_is_added_to_the_model(gated, tied):
    changes = {"gated_mlp": gated, "tie_word_embeddings": tied}
    model = factories.model(**changes)
    imposed.impose(model, [10.0] * 4, imposed.draw_tokens(640, 8, 32))
    plain = SparseLlamaForCausalLM(model.config)
    assert [(name, type(part)) for name, part in model.named_modules()] == [
        (name, type(part)) for name, part in plain.named_modules()
    ]
    shapes = [(name, weight.shape) for name, weight in plain.named_parameters()]
    assert [(name, weight.shape) for name, weight in model.named_parameters()] == shapes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert all(
        bool(weight.float().std()) for name, weight in model.named_parameters() if "proj" in name
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
def test_layers_are_as_active_as_wanted_and_channels_stay_untouched(gated, dtype, seed):
    model = factories.model(dtype, seed, gated_mlp=gated)
    tokens = imposed.draw_tokens(640, 16, 64, seed=seed)
    streams = []
    hooks = [
        layer.register_forward_hook(lambda _, __, y: streams.append(y))
        for layer in model.model.layers
    ]
    for wanted in ([3.0, 40.0, 12.0, 1.0], [100.0, 5.0, 30.0, 150.0]):  # the same model again
        imposed.impose(model, wanted, tokens, seed)
        streams.clear()
        means = [float(layer.double().sum(1).mean()) for layer in active_entries(model, tokens)]
        # In fp32 only ties are off; in bf16 each neuron's threshold is rounded by up to 2^-8 of it.
        assert np.allclose(means, wanted, rtol=0.01 if dtype == torch.float32 else 0.15, atol=0.05)
        given = model.model.embed_tokens(tokens)
        assert (given[..., imposed.CONSTANT] == 1).all() and given[
            ..., imposed.DRAW
        ].float().std() > 0.5
        for stream in streams:
            assert torch.equal(stream[..., :2], given[..., :2])
            assert not torch.equal(stream[..., 2:], given[..., 2:])
        assert not model.model.norm(streams[-1])[..., :2].any()  # the head does not see them
    assert hooks and len(streams) == 4


def test_under_autocast_the_means_are_those_of_the_computation(seed):
    model = factories.model(torch.float32, seed)
    tokens = imposed.draw_tokens(640, 16, 64, seed=seed)
    with torch.autocast("cpu", torch.bfloat16):
        for wanted in (
            [30.0] * 4,
            [5.0, 10.0, 20.0, 40.0],
        ):  # again: casts of the first weights are of no use
            imposed.impose(model, wanted, tokens, seed)
            found = [layer["mean"] for layer in imposed.activity_of(model, tokens)]
            assert np.allclose(found, wanted, rtol=0.15)


def test_what_layers_add_is_small_and_the_same_at_any_activity(seed):
    model = factories.model(torch.float32, seed)
    tokens = imposed.draw_tokens(640, 16, 64, seed=seed)
    added = []
    for ffn in model.ffns:
        ffn.register_forward_hook(
            lambda _, __, y: added.append(float(y.detach().square().mean().sqrt()))
        )
    for wanted in ([2.0] * 4, [90.0] * 4):
        imposed.impose(model, wanted, tokens, seed)
        added.clear()
        logits = model(input_ids=tokens, use_cache=False).logits
        assert np.allclose(added, imposed.FFN_PART, rtol=0.02)
        own = logits.gather(-1, tokens[..., None])
        assert 0.5 * imposed.LOGIT < float(logits.std()) < 3 * imposed.LOGIT < float(own.mean())


def test_unions_and_heavy_tokens_are_as_recorded():
    """At the mean activity of a recorded layer: unions of 64 tokens, and the busiest tokens."""
    mask = torch.from_numpy(recorded_masks()["sparser_8"])
    recorded = mask.view(-1, 64, 2816).any(1).sum(1).double().mean()
    model = factories.model(
        torch.float32,
        hidden_size=128,
        intermediate_size=2816,
        num_hidden_layers=1,
        vocab_size=49152,
    )
    mean = float(mask.sum(1).double().mean())
    imposed.impose(model, [mean], imposed.draw_tokens(49152, 64, 64, seed=1))
    (found,) = imposed.activity_of(model, imposed.draw_tokens(49152, 16, 256))
    assert found["mean"] == pytest.approx(mean, rel=0.15)
    assert found["union"] / found["mean"] == pytest.approx(float(recorded) / mean, rel=0.15)
    assert 7 * found["mean"] < found["max"] < 60 * found["mean"]
    assert 3 * found["mean"] < found["p99"] < 10 * found["mean"]


def test_activity_that_no_layer_has_is_refused():
    model = factories.model()
    for wanted in ([5.0] * 3, [5.0, 5.0, 5.0, 0.0], [5.0, 192.0, 5.0, 5.0]):
        with pytest.raises(
            ValueError,
            match="each of 4 layers can have more than 0 and less than 192 active neurons",
        ):
            imposed.impose(model, wanted, imposed.draw_tokens(640, 2, 8))


# --- what is counted --------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 70, 300])
@pytest.mark.parametrize("block", [1, 8, 64])
def test_activity_is_that_of_a_plain_loop(num_tokens, block, seed, monkeypatch):
    monkeypatch.setattr(imposed, "ACTIVITY_CHUNK", 130)  # not a multiple of the block
    ffn = factories.model(seed=seed).ffns[0]
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    found = imposed.layer_activity(ffn, x.view(1, num_tokens, 64), block)
    active = (ffn.activations(x)[0] != 0).numpy()
    counts = np.sort(active.sum(1))
    unions = [active[start : start + block].any(0).sum() for start in range(0, num_tokens, block)]
    assert found["tokens"] == num_tokens and found["mean"] == pytest.approx(counts.mean())
    assert found["max"] == counts[-1] and found["p99"] == counts[-(-99 * num_tokens // 100) - 1]
    assert found["union"] == pytest.approx(np.mean(unions))
    assert found["dead"] == pytest.approx((~active.any(0)).mean())
