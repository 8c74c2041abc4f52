"""`twell.tune`: the paths of a model's layers, fixed by the activity of a batch."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import twell
from tests.factories.measure import active_entries
from tests.factories.models import make, stock, tokens
from twell.measure import calibration
from twell.models import order, sparse_ffns


def true_activity(model, x):
    """Active neurons of a token and of blocks of 64 tokens, by layer, from dense activations."""
    layers = [(g, g.unflatten(0, (-1, 64)).any(1)) for g in active_entries(model, x)]
    return [tuple(float(one.sum(1).double().mean()) for one in pair) for pair in layers]


@pytest.mark.parametrize("kind", ["own", "sparsified"])
def test_the_activity_of_a_batch_is_kept_and_saved(kind, tmp_path):
    model, x = make() if kind == "own" else stock("qwen2"), tokens(4, 16)
    if kind == "sparsified":
        twell.sparsify(model, backend="auto")
    model.train()
    table = twell.tune(model, x)
    assert model.training and len(table) == 3
    activity = true_activity(model.eval(), x)
    columns = zip(table["active"], table["union of 64"], strict=True)
    assert [*columns] == [pytest.approx(pair, abs=0.051) for pair in activity]
    choosers = [ffn.chooser for ffn in sparse_ffns(model)]
    assert [c.observed for c in choosers] == activity
    assert not any(chooser.begin(64) for chooser in choosers)  # nothing is due any more

    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    if kind == "sparsified":
        twell.sparsify(again, backend="auto")
    for before, ffn in zip(choosers, sparse_ffns(again), strict=True):
        assert ffn.chooser.plans == before.plans and not ffn.chooser.begin(64)
    assert twell.tune(again, None) is None
    assert all(ffn.chooser.begin(64) for ffn in sparse_ffns(again))
    again.model.layers[1].forward = lambda hidden, **_: hidden
    with pytest.raises(ValueError, match="1 of 3 layers did not run"):
        twell.tune(again, x)


@pytest.mark.parametrize("kinds", [1, 8])
def test_similar_tokens_go_side_by_side_where_unions_shrink(kinds, monkeypatch):
    monkeypatch.setattr(calibration, "MIN_TOKENS", 256)
    monkeypatch.setattr(order, "MIN_TOKENS", 256)
    model, x = make(ffn_backend="reference").eval(), tokens(4, 64) % 80 // 8 * 8
    x += torch.arange(64) % kinds  # tokens of a kind activate the same eighth of the neurons
    embedding = model.model.embed_tokens.weight
    kind = torch.eye(8)[torch.arange(len(embedding)) % 8]
    with torch.no_grad():
        embedding.zero_()[:, :8] = 9 * kind
        for ffn in model.ffns:
            gate = ffn.gate_proj.weight
            gate[:, :8] = 2 * torch.eye(8)[torch.arange(len(gate)) % 8] - 1
    table = twell.tune(model, x)
    (union,) = (column for column in table if column.startswith("union"))
    gains = kinds == 8
    assert (table["in order"].sum() < 0.75 * table[union].sum()) == gains
    with torch.no_grad():
        logits = model(input_ids=x).logits
        assert all((ffn.token_order is not None) == gains for ffn in model.ffns)
        twell.tune(model, None)
        assert_close(model(input_ids=x).logits, logits, rtol=1e-4, atol=1e-4)
    assert all(ffn.token_order is None for ffn in model.ffns)
