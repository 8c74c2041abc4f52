import copy

import pytest
import torch

import twell
from tests.factories.models import family, inputs_of, make, tokens
from twell.models import order as module
from twell.models.convert import sparse_ffns


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(module, "MIN_TOKENS", 24)


def orders(model):
    return [ffn.token_order for ffn in sparse_ffns(model)]


@pytest.mark.parametrize("kind", ["opt", "t5"])
def test_a_model_computes_the_same(kind):
    model = twell.sparsify(family(kind), backend="reference")
    inputs = inputs_of(model, tokens(2, 16))
    with torch.no_grad():
        expected = model(**inputs).logits
        ordered = twell.order_tokens(model, clusters=5)
        same = copy.deepcopy(model)
        logits = model(**inputs).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        if kind != "t5":  # whose decoder sees fewer tokens, behind the encoder
            first = orders(model)[0]
            places = ordered.places[inputs["input_ids"].reshape(-1)]
            assert torch.equal(first.order, places.argsort(stable=True))
            assert all(order is first for order in orders(model)) and orders(same) == [None] * 3
            torch.testing.assert_close(same(**inputs).logits, logits)
            assert orders(same)[0] is not None
        model(**inputs_of(model, tokens(1, 8)))
        assert set(orders(model)) == {None}  # too few to gain
        ordered.remove()
        assert set(orders(model)) == {None}
        torch.testing.assert_close(model(**inputs).logits, expected)


def test_activation_checkpointing_has_the_same_gradients():
    model = make(ffn_backend="reference", l1_coefficient=0.0).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, others = {"input_ids": tokens(2, 16)}, {"input_ids": tokens(1, 8)}
    results = []
    for ordered in (False, True):
        model.zero_grad()
        with twell.order_tokens(model) if ordered else torch.enable_grad():
            logits = model(**inputs).logits
            assert (orders(model)[0] is not None) == ordered
            model(**others)  # before the first pass is computed again
            logits.square().sum().backward()
        results.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        (torch.nn.Sequential(twell.SparseFFN(16, 32)), {}, "Sequential"),
        (make(), {"clusters": 0}, "clusters is 0"),
        (make().to("meta"), {}, "offloaded"),
    ],
)
def test_models_that_have_no_order(model, options, names):
    with pytest.raises(ValueError, match=names):
        twell.order_tokens(model, **options)
