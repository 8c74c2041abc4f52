"""A model that computes its feed-forward layers by one provider and then by another."""

from collections import Counter
from functools import partial

import pytest
import torch

from tests.measure import factories
from tests.measure.factories import relative
from twell.measure import imposed
from twell.measure.check import TOLERANCE
from twell.measure.providers import (
    AUTO,
    AUTO_COMPILED,
    BACKENDS,
    COMPILED,
    DENSE_EAGER,
    TRITON,
    TUNED,
    Provider,
    model_providers,
)
from twell.measure.sides import Sides, exact_hidden_states, forward
from twell.sparse.calibration import Calibration, Point

pytest.importorskip("triton")
TUNING = {"coordinate_descent_tuning": True}


def test_the_pass_is_the_models_own(seed):
    model, ids = factories.model(seed=seed), imposed.draw_tokens(640, 3, 40, seed=seed)
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
def sides(fake_kernels, monkeypatch):
    """A model with 20 active neurons; `asked` logs paths, `compiled_with` compile options."""
    from twell.kernels import ops

    asked, compiled = [], []

    def run(path, *tensors, **_):
        asked.append(path)
        return factories.run(path, *tensors)

    def compile_(self, *, fullgraph, dynamic, options):
        assert fullgraph and not dynamic
        compiled.append(options)
        self._compiled_call_impl = partial(self._call_impl)  # another one for each way

    monkeypatch.setattr(ops, "run", run)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    model = factories.model().requires_grad_(False)
    imposed.impose(model, [20.0] * 4, imposed.draw_tokens(640, 8, 64))
    result = Sides(model)
    result.asked, result.compiled_with = asked, compiled
    return result


def test_sides_differ_in_nothing_but_the_feed_forward_layers(sides):
    model, ids = sides.model, imposed.draw_tokens(640, 2, 50)
    values = {name: weight.clone() for name, weight in model.named_parameters()}
    sides.observe([{"mean": 20.0, "union": 90.0}] * 4, 64)
    results = {}
    for provider in [*model_providers(None, tuned=True), DENSE_EAGER]:
        sides.become(provider)
        dense = provider.backend == "dense"
        assert all(torch.equal(weight, values[key]) for key, weight in model.named_parameters())
        strides = {ffn.down_proj.weight.stride() for ffn in model.ffns}
        assert strides == {(192, 1) if dense else (1, 64)}
        parts = [*model.model.layers, model.model.norm]
        assert {part._compiled_call_impl is not None for part in parts} == {provider.compiled}
        sides.asked.clear()
        with torch.no_grad():
            hidden, _ = forward(model, ids)
        paths = ", ".join(f"{path} {number}" for path, number in Counter(sides.asked).items())
        assert sides.paths(provider, 100) == (paths or "dense 4") and bool(paths) != dense
        assert torch.equal(results.setdefault(provider, hidden), hidden)
    assert sides.paths(TRITON, 64) == "decode 4"


def test_each_compilation_is_made_once(sides):
    calls = {}
    for kind in (COMPILED, TUNED, COMPILED):
        for backend in BACKENDS:
            sides.become(Provider(backend, None, kind))
            calls.setdefault(sides.model.model.norm._compiled_call_impl, set()).add(kind)
    assert list(calls.values()) == [{COMPILED}, {TUNED}]
    assert sides.compiled_with == 5 * [None] + 5 * [TUNING]  # four layers and the norm


def test_auto_chooses_by_the_activity_of_each_layer(sides):
    times = [Point(100, 1, u, {"dense": 1.0, "union": u / 50}) for u in (1, 192)]
    calibration = Calibration("x", 64, 192, True, "bfloat16", "", "", tuple(times))
    own = Sides(sides.model, calibration)
    own.observe([{"mean": 9.0, "union": u} for u in (5.0, 100.0, 20.0, 190.0)], 64)
    own.become(AUTO)
    assert own.paths(AUTO_COMPILED, 100) == "dense 2, union 2"
    paths = [ffn.chooser.path(100) for ffn in sides.model.ffns]
    assert paths == ["union", "dense", "union", "dense"]


def test_new_weights_are_taken(sides):
    for provider in (TRITON, DENSE_EAGER):
        sides.become(provider)
    imposed.impose(sides.model, [60.0] * 4, imposed.draw_tokens(640, 8, 64))
    weights = [ffn.down_proj.weight.clone() for ffn in sides.model.ffns]
    sides.take_weights()
    for provider in (TRITON, DENSE_EAGER):
        sides.become(provider)
        present = [ffn.down_proj.weight for ffn in sides.model.ffns]
        assert all(torch.equal(a, b) for a, b in zip(present, weights, strict=True))
