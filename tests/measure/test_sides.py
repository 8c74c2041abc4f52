"""One model by one provider and then by another, and its decoding with a static cache."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.factories import SEED, measure
from tests.factories.measure import relative
from tests.factories.ops import as_sparse_ffn
from twell.measure import imposed
from twell.measure.check import TOLERANCE
from twell.measure.decode import Decoder, joined_projections
from twell.measure.providers import (
    AUTO,
    AUTO_COMPILED,
    DENSE_EAGER,
    TRITON,
    model_providers,
)
from twell.measure.sides import Sides, exact_hidden_states, forward
from twell.sparse.calibration import Calibration, Point

ops = pytest.importorskip("twell.sparse.ops")


def test_the_pass_is_the_models_own():
    model, ids = measure.model(), imposed.draw_tokens(640, 3, 40, seed=SEED)
    imposed.impose(model, [20.0] * 4, ids)
    with torch.no_grad():
        hidden, logits = forward(model, ids)
        own = model(input_ids=ids, use_cache=False, logits_to_keep=1)
        assert torch.equal(hidden, model.model(input_ids=ids, use_cache=False).last_hidden_state)
        assert torch.equal(logits, own.logits[:, 0])
        exact = exact_hidden_states(model, ids)
        wide = model.float().model(input_ids=ids, use_cache=False).last_hidden_state
    assert exact.dtype == torch.float32 and relative(exact, wide) < 1e-6
    assert 1e-4 < relative(hidden, exact) < TOLERANCE["hidden states"]


@pytest.fixture
def sides(dense_kernels, monkeypatch):
    """A model with 20 active neurons; `asked` logs paths."""
    asked = []

    def run(path, *tensors, **_):
        asked.append(path)
        return measure.run(path, *tensors)

    def compile_(self, *, fullgraph, dynamic, options):
        assert fullgraph and not dynamic
        self._compiled_call_impl = partial(self._call_impl)  # another one for each way

    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(run))
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    model = measure.model()
    imposed.impose(model, [20.0] * 4, imposed.draw_tokens(640, 8, 64))
    result = Sides(model)
    result.asked = asked
    return result


def test_sides_differ_in_nothing_but_the_feed_forward_layers(sides):
    model, ids = sides.model, imposed.draw_tokens(640, 2, 50)
    values = {name: weight.clone() for name, weight in model.named_parameters()}
    sides.observe([{"mean": 20.0, "union": 90.0}] * 4, 100)
    results = {}
    for provider in [*model_providers(None, tuned=True), DENSE_EAGER]:
        sides.become(provider)
        dense = provider.backend == "dense"
        assert all(torch.equal(weight, values[key]) for key, weight in model.named_parameters())
        strides = {ffn.down_proj.weight.stride() for ffn in model.ffns}
        assert strides == {(192, 1) if dense else (1, 64)}
        parts = [*model.model.layers, model.model.norm]
        assert {part._compiled_call_impl is not None for part in parts} == {provider.compiled}
        with torch.no_grad():
            forward(model, ids)  # "auto" also loads what a graph would launch
            sides.asked.clear()
            hidden, _ = forward(model, ids)
        paths = ", ".join(f"{path} {number}" for path, number in Counter(sides.asked).items())
        assert sides.paths(provider, 100) == (paths or "dense 4")
        assert bool(paths) == (provider.backend == "triton")  # "auto" is dense, by the projections
        assert torch.equal(results.setdefault(provider, hidden), hidden)
    assert sides.paths(TRITON, 64) == "decode 4"


def test_auto_chooses_by_the_activity_of_each_layer(sides):
    times = [Point(100, 1, u, {"dense": 1.0, "union": u / 50}) for u in (1, 192)]
    calibration = Calibration("x", 64, 192, True, "bfloat16", "", "", tuple(times))
    own = Sides(sides.model, calibration)
    own.observe([{"mean": 9.0, "union": u} for u in (5.0, 100.0, 20.0, 190.0)], 64)
    own.become(AUTO)
    assert own.paths(AUTO_COMPILED, 100) == "dense 2, union 2"
    paths = [ffn.chooser.path(100) for ffn in sides.model.ffns]
    assert paths == ["union", "dense", "union", "dense"]


# --- decoding ---------------------------------------------------------------------------------


def test_decoding_gives_the_logits_of_a_pass_over_the_whole_text():
    model = measure.model(torch.float32, num_key_value_heads=2)
    script = imposed.draw_tokens(640, 3, 29, seed=SEED)
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
def test_queries_keys_and_values_are_one_product_in_decoding(bias):
    model = measure.model(torch.float32, num_key_value_heads=2, attention_bias=bias)
    before = projections(model)
    for part in itertools.chain(*before) if bias else ():
        part.bias.normal_(generator=torch.Generator().manual_seed(SEED))
    ids = imposed.draw_tokens(640, 2, 9, seed=SEED)
    g = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(2, 3, model.config.hidden_size, generator=g)
    rotary = model.model.rotary_emb(torch.ones(1), torch.arange(3)[None])
    products = []

    def count(graph, _):
        products.append(sum(node.target is F.linear for node in graph.graph.nodes))
        return graph.forward

    def states():
        torch._dynamo.reset()
        layer = torch.compile(model.model.layers[0], fullgraph=True, backend=count)
        layer(hidden, position_embeddings=rotary)
        return forward(model, ids)[0]

    apart = states()
    with pytest.raises(ZeroDivisionError), joined_projections(model):
        torch.testing.assert_close(states(), apart)
        torch.testing.assert_close(exact_hidden_states(model, ids), apart)  # copies layers
        raise ZeroDivisionError
    assert products == [7, 5] and torch.equal(states(), apart) and projections(model) == before
