"""Log-likelihoods are those of the model, for requests of any length."""

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import LlamaForCausalLM

import twell
from tests.factories.evaluate import brute_force
from tests.factories.train import write_pretrained
from twell import evaluate
from twell.evaluate import adapter
from twell.sparse.float8 import Float8Linear

CPU = torch.device("cpu")


def requests_of(pairs, names=("some",)):
    made = [(names[min(n // 5, len(names) - 1)], n, 1) for n in range(len(pairs))]
    pairs = zip(pairs, made, strict=True)
    return [Instance("loglikelihood", {}, pair, 0, name) for pair, name in pairs]


WAYS = [("reference", 7, None), ("dense", 1, "FP8")]


@pytest.mark.parametrize(("backend", "batch_size", "dtype"), WAYS)
def test_log_likelihoods_are_those_of_the_model(tiny_run, random, backend, batch_size, dtype):
    lm = adapter.LM(tiny_run, batch_size, device=CPU, backend=backend, dtype=dtype)
    kind = torch.bfloat16 if dtype == "FP8" else None
    model, tokenizer = twell.load(tiny_run, backend=backend, dtype=kind)
    assert lm.model.dtype == model.dtype
    assert lm.precision == (dtype or "float32")
    if dtype == "FP8":
        twell.quantize_(model)
        for ffn in model.ffns:
            ffn.down_proj = Float8Linear.of(ffn.down_proj)

    def some(number):
        return " ".join(random.choice("ba dun fain ge ho kun".split(), number))

    asked = [("", some(3)), ("ba", " " + some(1)), ("ba de", " ba"), ("ba de", " dun")]
    asked += [(some(4), " " + some(2)), (some(60), " " + some(2)), (some(3), " " + some(90))]
    asked += [(some(50), " " + some(50)), ("", some(70))]
    answers = lm.loglikelihood(requests_of(asked, ("short", "long")))
    for (context, continuation), (logprob, greedy) in zip(asked, answers, strict=True):
        before = tokenizer(context).input_ids or [tokenizer.bos_token_id]
        after = tokenizer(context + continuation).input_ids[len(before) if context else 0 :]
        expected = pytest.approx(brute_force(model, before, after), rel=1e-5)
        assert logprob == expected, (context, continuation)
        assert isinstance(greedy, bool)
    assert lm.truncated == {"long": 4}
    with pytest.raises(ValueError, match="'' after 'ba de'"):
        lm.loglikelihood(requests_of([("ba de", "")]))


def test_greedy_means_every_token_of_every_part(tiny_run):
    lm = adapter.LM(tiny_run, 4, device=CPU)
    model, tokenizer = twell.load(tiny_run)

    @torch.no_grad()
    def likely(ids, number, window):
        for _ in range(number):
            ids = [*ids, int(model(input_ids=torch.tensor([ids[window:]])).logits[0, -1].argmax())]
        return ids

    first = tokenizer("ba de").input_ids
    short, size = likely(first, 5, 0)[len(first) :], len(first)
    other = [(short[0] + 1) % 320, *short[1:]], [*short[:-1], (short[-1] + 1) % 320]
    # A part of 32 tokens, and one of 8 that is likely after as much as fits.
    parts = likely([*first, *range(100, 132)], 8, size + 40 - 33)
    requests = [(None, first, continuation) for continuation in (short, *other, parts[size:])]
    requests.append((None, parts[:-8], parts[-8:]))
    answers = lm._loglikelihood_tokens(requests, override_bs=1)
    assert [greedy for _, greedy in answers] == [True, False, False, False, True]


def test_the_original_of_a_relufied_model(tiny_text, tmp_path):
    folder = write_pretrained(tmp_path / "model", tiny_text)
    record = evaluate.run(folder, text=str(tiny_text), limit=3)
    expected = {"hidden_act": "silu", "num_hidden_layers": 2, "intermediate_size": 96}
    assert expected.items() <= record["model"].items() and record["backend"] == "dense"
    assert type(adapter.LM(folder, 2, device=CPU).model) is LlamaForCausalLM
    for options, named in (({"backend": "reference"}, "'reference'"), ({"dtype": "FP8"}, "FP8")):
        with pytest.raises(ValueError, match=named):
            evaluate.run(folder, **options)
