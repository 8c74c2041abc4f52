"""Traces and aggregates of a model are what its layers compute."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from twell import analysis, results, trace
from twell import models as model_module
from twell.models import SparseLlamaForCausalLM
from twell.trace import tracing

TABLES = [
    analysis.per_layer,
    lambda record: analysis.per_token(record, min_count=1),
    analysis.by_position,
    analysis.by_neuron,
    analysis.union_sizes,
    analysis.tile_overflow,
]


def random_sequences(*lengths):
    return [torch.randint(1, 320, (length,)).tolist() for length in lengths]


def last_validation(run):
    """The log's rows of the last evaluation."""
    _, log = results.load_run(run)
    return log[(log.split == "valid") & (log.step == log.step.max())]


def logged_loss(run):
    last = last_validation(run)
    return last[last.metric == "cross_entropy"].value.item()


def test_validation_trace_has_the_counts_that_training_logged(tiny_run):
    traced = trace.trace_validation(tiny_run)
    last = last_validation(tiny_run)
    dead = [1 - len(np.unique(traced.layer(n).indices)) / 96 for n in range(2)]
    for metric, ours in (
        ("active_mean", traced.counts().mean(1)),
        ("active_max", traced.counts().max(1)),
        ("dead_fraction", dead),
    ):
        np.testing.assert_allclose(ours, last[last.metric == metric].value, rtol=1e-5)
    assert -np.nanmean(traced.logprob) == pytest.approx(logged_loss(tiny_run), rel=1e-5)
    assert np.isnan(traced.logprob).sum() == len(np.unique(traced.sequence)) == 16
    assert traced.meta["commit"] and traced.meta["l1_coefficient"] == 1e-2


def test_validation_aggregate_has_the_loss_that_training_logged(tiny_run):
    counted = trace.aggregate_run(tiny_run, tokens=512)
    assert counted.cross_entropy == pytest.approx(logged_loss(tiny_run), rel=1e-5)


def layers_of(model, sequence):
    """Return g and h of each layer, and the logits, of one sequence."""
    seen = []
    hooks = [
        ffn.register_forward_hook(lambda f, i, _: seen.append(f.activations(i[0])))
        for ffn in model.ffns
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sequence])).logits[0]
    [hook.remove() for hook in hooks]
    return [(g[0], h[0]) for g, h in seen], logits


def test_a_trace_is_what_the_layers_compute(tiny_run):
    model, tokenizer = model_module.load(tiny_run)
    assert isinstance(model, SparseLlamaForCausalLM)
    sequences = random_sequences(9, 9, 4, 1, 9)
    traced = trace.trace_tokens(model, tokenizer, sequences, batch=2)
    start = 0
    for number, sequence in enumerate(sequences):
        seen, logits = layers_of(model, sequence)
        rows = slice(start, start + len(sequence))
        for layer, (g, h) in enumerate(seen):
            stored = traced.layer(layer)[rows]
            np.testing.assert_allclose(stored.toarray(), h.numpy(), rtol=1e-4, atol=1e-6)
            assert np.array_equal(np.diff(stored.indptr), (g != 0).sum(-1).numpy())
        expected = torch.log_softmax(logits, -1)[range(len(sequence) - 1), sequence[1:]]
        np.testing.assert_allclose(traced.logprob[rows][1:], expected, rtol=1e-4, atol=1e-5)
        assert traced.sequence[rows].tolist() == [number] * len(sequence)
        assert traced.position[rows].tolist() == list(range(len(sequence)))
        start += len(sequence)


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        ([1, 320], "token 320 does not exist: the model has tokens 0 to 319"),
        ([7, -1, 2], "token -1 does not exist: the model has tokens 0 to 319"),
        ([], "empty sequence"),
    ],
)
def test_sequences_that_the_model_does_not_take_are_refused(tiny_run, sequence, words):
    model, tokenizer = model_module.load(tiny_run)
    model.train()
    with pytest.raises(ValueError, match=words):
        trace.trace_tokens(model, tokenizer, [sequence])
    assert model.training and not any(ffn._forward_hooks for ffn in model.ffns)


def test_text_is_cut_into_contexts_and_read_back(tiny_run):
    model, tokenizer = model_module.load(tiny_run)
    text = "ba de <b>fun</b> — 😀 " * 20
    traced = trace.trace_text(model, tokenizer, text)
    assert traced.position.max() == 31 and traced.sequence.max() == (traced.num_tokens - 1) // 32
    assert tokenizer.decode(traced.token_ids) == text
    assert "<0xF0>" in traced.strings and " de" in traced.strings
    plain = [string for string in traced.strings if not string.startswith("<0x")]
    assert "\ufffd" not in "".join(plain)
    with pytest.raises(ValueError, match="the text is empty"):
        trace.trace_text(model, tokenizer, "")


def test_token_strings_of_whole_vocabulary(tiny_run):
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    strings = trace.token_strings(tokenizer, range(320))
    assert len(set(strings)) == 320  # no two tokens look the same


def test_aggregate_of_a_model_has_the_tables_of_its_trace(tiny_run, monkeypatch):
    model, tokenizer = model_module.load(tiny_run)
    sequences = random_sequences(*[32] * 17, 9, 9, 4, 1, 9)
    monkeypatch.setattr(tracing, "BATCH_TOKENS", 96)
    traced = trace.trace_tokens(model, tokenizer, sequences, batch=3)
    counted = trace.aggregate(model, tokenizer, sequences, meta={"run": "x"})
    for table in TABLES:
        pd.testing.assert_frame_equal(table(counted), table(traced), check_dtype=False, rtol=1e-6)
    loss = -np.nanmean(traced.logprob.astype(float))
    assert counted.cross_entropy == pytest.approx(loss, rel=1e-9)
    assert counted.meta["run"] == "x" and counted.meta["context"] == 32
    assert counted.meta["num_tokens"] == counted.num_tokens == 576
    layer, neuron = np.unravel_index(counted.max_abs.argmax(), counted.max_abs.shape)
    first = analysis.contexts(counted, layer, neuron).iloc[0]
    before = sequences[first["sequence"]][max(first["position"] - 12, 0) : first["position"]]
    assert first["before"] == "".join(trace.token_strings(tokenizer, before))


def test_an_aggregate_of_nothing_or_of_too_much_is_refused(tiny_run):
    model, tokenizer = model_module.load(tiny_run)
    with pytest.raises(ValueError, match="no sequence to count"):
        trace.aggregate(model, tokenizer, [])
    words = "2 layers of 96 neurons may need 6144 bytes; max_bytes is 6000"
    with pytest.raises(ValueError, match=words):
        trace.aggregate(model, tokenizer, random_sequences(9), max_bytes=6000)


def test_progress_says_how_far_it_is(monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(tracing.time, "perf_counter", lambda: next(clock))
    lines = []
    assert list(tracing.progress([[1] * 500] * 5, lines.append)) == [[1] * 500] * 5
    assert lines == [
        "500 of 2,500 tokens  83 tokens/s  0:24 left",
        "1,500 of 2,500 tokens  125 tokens/s  0:08 left",
    ]
