"""Traces and aggregates of a model are what its layers compute."""

import copy

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from tests.factories import SEED, tokenizers
from tests.factories.trace import aggregate_of
from twell import corpus, models, results, trace
from twell.trace import tracing


@pytest.fixture
def loaded(tiny_run):
    return models.load(tiny_run)


def random_sequences(*lengths):
    random = np.random.default_rng(SEED)
    return [random.integers(1, 320, length).tolist() for length in lengths]


def test_validation_traces_have_the_counts_and_the_loss_that_training_logged(tiny_run):
    _, log = results.load_run(tiny_run)
    last = log[(log["split"] == "valid") & (log["step"] == log["step"].max())]
    logged = {metric: rows["value"].to_numpy() for metric, rows in last.groupby("metric")}
    traced = trace.trace_validation(tiny_run)
    dead = [1 - len(np.unique(traced.layer(n).indices)) / 96 for n in range(2)]
    np.testing.assert_allclose(traced.counts().mean(1), logged["active_mean"], rtol=1e-5)
    np.testing.assert_allclose(traced.counts().max(1), logged["active_max"])
    np.testing.assert_allclose(dead, logged["dead_fraction"], rtol=1e-5)
    loss = pytest.approx(logged["cross_entropy"].item(), rel=1e-5)
    assert -np.nanmean(traced.logprob) == loss
    assert np.isnan(traced.logprob).sum() == len(np.unique(traced.sequence)) == 16
    assert traced.meta["commit"] and traced.meta["l1_coefficient"] == 1e-2
    counted = trace.aggregate_run(tiny_run, tokens=512)
    assert counted.cross_entropy == loss and counted.meta["run"] == "tiny"


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


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_a_trace_is_what_the_layers_compute(loaded, backend, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setattr(tracing, "BATCH_TOKENS", 18)
    model.set_ffn_backend(backend)
    sequences = random_sequences(9, 9, 4, 1, 9)
    traced = trace.trace_tokens(model, tokenizer, sequences)
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


def test_neurons_beyond_16_bits_keep_their_numbers(loaded):
    sizes = {"intermediate_size": 66_000, "hidden_size": 8, "num_hidden_layers": 1}
    config = models.SparseLlamaConfig(vocab_size=320, num_attention_heads=2, **sizes)
    model = models.SparseLlamaForCausalLM(config).eval()
    traced = trace.trace_tokens(model, loaded[1], [[1, 2, 3]])
    ((_, h),), _ = layers_of(model, [1, 2, 3])
    assert np.array_equal(traced.indices, h.numpy().nonzero()[1]) and traced.indices.max() > 65_535
    assert traced.part(1, 2).indices.max() > 65_535


def test_what_cannot_be_traced_or_counted_is_refused(loaded):
    model, tokenizer = loaded
    model.train()
    refused = ([1, 320], "token 320 .* 0 to 319"), ([7, -1], "token -1 .* 0 to 319"), ([], "empty")
    for sequence, words in refused:
        with pytest.raises(ValueError, match=words):
            trace.trace_tokens(model, tokenizer, [sequence])
        assert model.training
    with pytest.raises(ValueError, match="2 layers of 96 neurons .* 6144 .* max_bytes is 6000"):
        trace.aggregate(*loaded, random_sequences(9), max_bytes=6000)
    with pytest.raises(IndexError, match="96"):
        trace.silenced_loss(model, [[1, 2]], [(0, 0), (1, 96)])
    with pytest.raises(ValueError, match="no token is predicted"):
        trace.silenced_loss(model, [[1], [2]], [(0, 0)])


def test_compiled_layers_are_refused_and_not_left_out(loaded):
    model, tokenizer = loaded
    torch.compiler.reset()
    for ffn in model.ffns:
        ffn.compile(backend="eager")
    with pytest.raises(RuntimeError, match="layer 0 showed no activity, as under torch.compile"):
        trace.trace_tokens(model, tokenizer, random_sequences(9))


def test_text_is_cut_into_contexts_and_read_back(loaded):
    model, tokenizer = loaded
    text = "ba de <b>fun</b> — 😀 " * 20
    traced = trace.trace_text(model, tokenizer, text)
    assert traced.position.max() == 31 and traced.sequence.max() == (traced.num_tokens - 1) // 32
    assert tokenizer.decode(traced.token_ids) == text
    assert "<0xF0>" in traced.strings and " de" in traced.strings
    with pytest.raises(ValueError, match="the text is empty"):
        trace.trace_text(model, tokenizer, "")


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_strings_are_what_the_tokenizer_decodes(kind):
    tokenizer = kind()

    def strings(text):
        return trace.token_strings(tokenizer, trace.encode(tokenizer, text))

    first = {"byte_level": "a", "sentencepiece": " a"}[kind.__name__]
    assert strings("a a é") == [first, " a", " ", "<0xC3>", "<0xA9>"]
    assert trace.token_strings(tokenizer, []) == []
    text = "the cats  don't sat. <fire>"
    decoded = tokenizer.decode(trace.encode(tokenizer, text))
    assert "".join(strings(text)).removeprefix(" ") == decoded.removeprefix(" ")
    added = ["éé", "ü b", "▁▁"]  # letters that stand for bytes, and for spaces
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added])
    tokenizer.add_special_tokens({"pad_token": "<é▁>"})
    ids = tokenizer.convert_tokens_to_ids([*added, "<é▁>"])
    shown = [text.removeprefix(" ") for text in trace.token_strings(tokenizer, ids)]
    spaces = " " if kind.__name__ == "sentencepiece" else "▁▁"
    assert shown == ["éé", "ü b", spaces, "<é▁>"]


def test_held_out_sequences_are_of_single_documents(loaded, tiny_text):
    model, tokenizer = loaded
    every = trace.held_out(str(tiny_text), model, tokenizer, 300)
    assert sum(map(len, every[:-1])) < 300 <= sum(map(len, every))
    texts = [text for part, text in corpus.split(str(tiny_text)) if part == "valid"]
    cuts = [trace.cut(trace.encode(tokenizer, text), model) for text in texts]
    assert every == sum(cuts, [])[: len(every)] and len(every) > len(cuts[0]) > 1
    assert trace.held_out(str(tiny_text), model, tokenizer, 33) == every[:2]
    with pytest.raises(ValueError, match="holds out .* tokens, not 1,000,000,000"):
        trace.held_out(str(tiny_text), model, tokenizer, 10**9)


def test_aggregate_of_a_model_is_that_of_its_trace(loaded, monkeypatch):
    model, tokenizer = loaded
    sequences = random_sequences(*[32] * 17, 9, 9, 4, 1, 9)
    monkeypatch.setattr(tracing, "BATCH_TOKENS", 96)
    traced = trace.trace_tokens(model, tokenizer, sequences)
    counted = trace.aggregate(model, tokenizer, sequences, meta={"run": "x"})
    expected = aggregate_of(traced)
    for name in trace.Aggregate.arrays():
        np.testing.assert_allclose(getattr(counted, name), getattr(expected, name), 1e-6)
    loss = -np.nanmean(traced.logprob.astype(float))
    assert counted.cross_entropy == pytest.approx(loss, rel=1e-9)
    assert counted.meta["run"] == "x" and counted.meta["context"] == 32
    assert counted.meta["num_tokens"] == counted.num_tokens == 576


def test_the_loss_without_a_neuron_is_that_of_a_model_whose_column_is_zero(loaded):
    model, tokenizer = loaded
    lengths = 12, 12, 12, 5, 1, 9
    sequences, predicted = random_sequences(*lengths), np.array(lengths) - 1
    traced = trace.trace_tokens(model, tokenizer, sequences)
    counts = traced.neurons()[0]
    # A rare neuron, the one that fires most often, and a dead one where there is one.
    rare = np.argwhere((counts > 0) & (counts <= counts[counts > 0].min() + 2))[:1]
    most = np.unravel_index(counts.argmax(), counts.shape)
    chosen = [(int(a), int(b)) for a, b in [*rare, most, *np.argwhere(counts == 0)[:1]]]
    model.train()
    table = trace.silenced_loss(model, sequences, chosen)
    assert model.training
    model.eval()
    for row, (layer, neuron) in zip(table.itertuples(), chosen, strict=True):
        changed = copy.deepcopy(model)
        changed.ffns[layer].down_proj.weight.data[:, neuron] = 0
        silent = trace.trace_tokens(changed, tokenizer, sequences)
        change = np.nan_to_num(traced.logprob.astype(float) - silent.logprob)
        mean = change.sum() / predicted.sum()
        assert (row.layer, row.neuron, row.fires) == (layer, neuron, counts[layer, neuron])
        assert row.loss_change == pytest.approx(mean, abs=1e-6)
        by_sequence = np.array([change[traced.sequence == n].sum() for n in range(6)])
        spread = np.square(by_sequence - mean * predicted).sum()
        stderr = np.sqrt(6 / 5 * spread) / predicted.sum()
        assert row.stderr == pytest.approx(stderr, abs=1e-6)
        fires = np.flatnonzero(np.diff(traced.layer(layer)[:, [neuron]].indptr))
        after = [token + 1 for token in fires if token + 1 < traced.num_tokens]
        after = [token for token in after if traced.position[token] > 0]
        expected = change[after].mean() if after else np.nan
        assert row.change_after == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert (table.loc[table["fires"] == 0, ["loss_change", "stderr"]] == 0).all(axis=None)
    assert table["loss_change"].abs().max() > 1e-5
    assert np.isnan(trace.silenced_loss(model, sequences[:1], chosen[:1])["stderr"]).all()
