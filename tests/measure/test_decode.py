"""Decoding with a static cache, and fused projections."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.measure import factories
from tests.measure.factories import relative
from twell.measure import decode, imposed
from twell.measure.decode import Decoder, Joined, joined_projections
from twell.measure.providers import COMPILED, EAGER, TUNED
from twell.measure.sides import exact_hidden_states, hidden_states


def test_decoding_gives_the_logits_of_a_pass_over_the_whole_text(seed):
    model = factories.model(torch.float32, seed, num_key_value_heads=2).requires_grad_(False)
    script = imposed.draw_tokens(640, 3, 29, seed=seed)
    imposed.impose(model, [20.0] * 4, script)
    decoder = Decoder(model, script, 17)
    with torch.no_grad():
        decoder.read()
        logits = decoder.generate(decoder.step)
        whole = model(input_ids=script, use_cache=False).logits[:, 17:].transpose(0, 1)
        assert logits.shape == (12, 3, 640) and relative(logits, whole) < 1e-5
        assert torch.equal(decoder.picked[:, 17:].t(), logits.argmax(-1))
        assert not decoder.picked[:, :17].any() and int(decoder.position) == 29
        addresses = [cache.keys.data_ptr() for cache in decoder.caches]
        assert torch.equal(decoder.generate(decoder.step), logits)  # again from the first step
        assert addresses == [cache.keys.data_ptr() for cache in decoder.caches]
        other = script.clone()
        other[1, 20] += 1
        decoder.script.copy_(other)
        again = decoder.generate(decoder.step)
    same = (again == logits).all(-1)
    assert same[:3].all() and same[:, [0, 2]].all() and not same[3:, 1].any()


def projections(model):
    layers = [layer.self_attn for layer in model.model.layers]
    return [(a.q_proj, a.k_proj, a.v_proj) for a in layers]


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_are_one_product_in_decoding(bias, seed):
    options = {"num_key_value_heads": 2, "attention_bias": bias}
    model = factories.model(torch.float32, seed, **options).requires_grad_(False)
    before = projections(model)
    for part in itertools.chain(*before) if bias else ():
        part.bias.normal_()
    ids = imposed.draw_tokens(640, 2, 9, seed=seed)
    hidden = torch.randn(2, 3, model.config.hidden_size)
    rotary = model.model.rotary_emb(torch.ones(1), torch.arange(3)[None])
    products = []

    def count(graph, _):
        products.append(sum(node.target is F.linear for node in graph.graph.nodes))
        return graph.forward

    def states():
        torch._dynamo.reset()
        layer = torch.compile(model.model.layers[0], fullgraph=True, backend=count)
        layer(hidden, position_embeddings=rotary)
        return hidden_states(model, ids)

    apart = states()
    with pytest.raises(ZeroDivisionError), joined_projections(model):
        torch.testing.assert_close(states(), apart)
        torch.testing.assert_close(exact_hidden_states(model, ids), apart)  # copies layers
        raise ZeroDivisionError
    assert products == [7, 5] and torch.equal(states(), apart) and projections(model) == before


def test_layers_get_their_projections_back_when_fusing_fails(monkeypatch):
    model = factories.model()
    before = projections(model)

    class Failing(Joined):
        def __init__(self, parts):
            if parts[0] is before[1][0]:
                raise MemoryError
            super().__init__(parts)

    monkeypatch.setattr(decode, "Joined", Failing)
    with pytest.raises(MemoryError), joined_projections(model):
        pass
    assert projections(model) == before


def test_the_parts_around_the_layers_are_compiled_as_they_are(monkeypatch):
    asked = []

    def compile_(part, *, options, **_):
        asked.append(options)
        return part

    monkeypatch.setattr(torch, "compile", compile_)
    decoder = Decoder(factories.model(), imposed.draw_tokens(640, 1, 8), 4)
    assert asked == 2 * [None] + 2 * [{"coordinate_descent_tuning": True}]
    assert set(decoder.around) == {EAGER, COMPILED, TUNED}
