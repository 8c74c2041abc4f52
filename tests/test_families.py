"""Traces, the inspector and evaluations of models whose layers have other names than Llama's."""

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from tests.factories.evaluate import brute_force
from tests.factories.inspector import unpack
from tests.factories.models import family
from twell import inspector, models, trace
from twell.__main__ import main
from twell.evaluate.scores import LM
from twell.inspector.side import Side

TEXT = "ba de fun ba ba de"


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A function that saves a model of a family with the tokenizer of a run, and returns both."""

    def make(kind):
        torch.manual_seed(0)
        model = family(kind, vocab_size=320)
        models.save(model, models.load(tiny_run)[1], tmp_path / kind)
        return tmp_path / kind, model

    return make


def test_a_trace_has_what_the_activations_of_the_dense_model_say(folder):
    path, dense = folder("opt")
    seen = []
    for name, module in dense.named_modules():
        if name.endswith("activation_fn"):
            module.register_forward_hook(lambda module, args, h: seen.append(h))
    model, tokenizer = trace.load_with_tokenizer(path)
    inputs = torch.tensor([trace.encode(tokenizer, TEXT)])
    with torch.no_grad():
        logits = dense(input_ids=inputs).logits[0]
    traced = trace.trace_text(model, tokenizer, TEXT)
    assert traced.intermediate_size == 84 and traced.num_layers == len(seen) == 3
    for layer, h in enumerate(seen):
        stored = traced.layer(layer).toarray()
        np.testing.assert_allclose(stored, h.reshape(-1, 84), rtol=1e-4, atol=1e-4)
        assert 0 < (stored != 0).mean() < 1
    expected = torch.log_softmax(logits, -1)[:-1].gather(-1, inputs[0, 1:, None])[:, 0]
    np.testing.assert_allclose(traced.logprob[1:], expected, rtol=1e-4, atol=1e-3)
    change = trace.silenced_loss(model, inputs.tolist(), [(2, 5)])
    assert change["fires"].item() == (seen[2].reshape(-1, 84)[:, 5] != 0).sum()


LAST = {  # the last norm, a down projection, and what the norm adds to its weight
    "opt": ("model.decoder.final_layer_norm", "model.decoder.layers.1.fc2", 0),
    "nemotron": ("model.norm", "model.layers.1.mlp.down_proj", 1),
}


@pytest.mark.parametrize("kind", LAST)
def test_words_go_through_the_last_norm_of_the_family(folder, kind):
    """They are derivatives of the logits, where the norm finds a residual stream of spread 1."""
    (path, dense), (last, down, added) = folder(kind), LAST[kind]
    model, tokenizer = trace.load_with_tokenizer(path)
    side = Side("model", trace.trace_tokens(model, tokenizer, []), None, model, tokenizer)
    weight = dense.get_submodule(last).weight + added
    direction = dense.get_submodule(down).weight[:, 7]
    logits = dense.lm_head.weight @ (weight * (direction - direction.mean()))
    logits = logits - logits.mean()
    _, arrays = unpack(inspector.Catalog(side).chunk("words-1"))
    changes = torch.from_numpy(arrays["change"].reshape(84, 2, 10)[7])
    for values, order in zip(changes, (1, -1), strict=True):
        expected = (order * logits).topk(10).values * order
        torch.testing.assert_close(values, expected.detach(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", LAST)
@torch.no_grad()
def test_direct_effects_sum_to_the_logits_of_the_family(folder, kind):
    path, dense = folder(kind)
    side = inspector.sides(trace.load_with_tokenizer(path), TEXT)[0]
    logits = dense(input_ids=torch.tensor(side.trace.token_ids[None].astype(int))).logits[0]
    start, attention, sums, _ = side.direct
    total = torch.from_numpy(start + (attention + sums).sum(1))[:, 0].float()
    expected = logits.max(-1).values - logits.mean(-1)
    torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(attention).mean() > 0 < np.abs(sums).mean()


def test_commands_take_opt_and_those_for_llamas_refuse_it_by_name(folder, capsys):
    path, dense = folder("opt")
    out = path.parent / "out"
    assert main(["inspect", str(path), "--text", TEXT, "--out", f"{out}.html"]) == 0
    assert "of 84 neurons active a layer" in capsys.readouterr().out
    lm = LM(path, 4, device=torch.device("cpu"), backend="reference")
    request = Instance("loglikelihood", {}, ("ba de", " fun"), 0, ("a task", 0, 1))
    ((score, _),) = lm.loglikelihood([request])
    first, whole = (lm.tokenizer(text).input_ids for text in ("ba de", "ba de fun"))
    assert score == pytest.approx(brute_force(dense, first, whole[len(first) :]), rel=1e-4)
    path, _ = folder("t5")  # an encoder and a decoder
    assert main(["trace", str(path), "--text", TEXT, "--out", f"{out}.npz"]) != 0
    assert "T5ForConditionalGeneration" in capsys.readouterr().err
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        LM(path, 4, device=torch.device("cpu"))
