import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from twell import results, trace
from twell.model import SparseLlamaForCausalLM


def random_trace(tokens=7, layers=2, neurons=300):
    active = np.random.default_rng().random((layers * tokens, neurons)) < 0.1
    rows, columns = active.nonzero()
    return trace.Trace(
        token_ids=np.arange(tokens, dtype=np.int32),
        strings=[f"t{n}" for n in range(tokens)],
        logprob=np.full(tokens, -1.0, np.float32),
        sequence=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
        indptr=np.concatenate([[0], np.bincount(rows, minlength=layers * tokens).cumsum()]),
        indices=columns.astype(np.uint16),
        values=np.where(columns % 5, columns, 0).astype(np.float32),
        intermediate_size=neurons,
    ), active


def test_layers_and_counts_keep_active_neurons_of_value_zero():
    found, active = random_trace()
    assert found.num_layers == 2 and found.num_tokens == 7
    assert np.array_equal(found.counts().reshape(14), active.sum(1))
    for layer in range(2):
        stored = found.layer(layer)
        assert stored.shape == (7, 300) and stored.nnz == active[7 * layer : 7 * layer + 7].sum()
        expected = np.where(np.arange(300) % 5, np.arange(300), 0) * active[7 * layer : 7 * layer + 7]
        assert np.array_equal(stored.toarray(), expected)
    with pytest.raises(IndexError, match="layer 2 does not exist"):
        found.layer(2)


def test_saved_and_loaded(tmp_path):
    found, _ = random_trace()
    found.strings[0] = "👩‍👧<b>\n"
    found.meta["l1_coefficient"] = 0.5
    found.save(tmp_path / "t.npz")
    again = trace.Trace.load(tmp_path / "t.npz")
    assert again.strings == found.strings and again.meta == found.meta and again.intermediate_size == 300
    for name in trace.ARRAYS:
        assert np.array_equal(getattr(again, name), getattr(found, name))
    whole = (tmp_path / "t.npz").read_bytes()
    for damaged in (b"", b"PK", whole[:300], whole[:-40], b"not a zip at all"):
        (tmp_path / "t.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.npz is not a trace, or it is damaged"):
            trace.Trace.load(tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strings": ["a"]}, "strings has 1 entries; the trace has 7 tokens"),
        ({"indptr": np.zeros(9, np.int64)}, "indptr has 9 entries"),
        ({"values": np.zeros(3, np.float32)}, "3 values; indptr ends at"),
        ({"intermediate_size": 2}, "in a layer of 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    found, _ = random_trace()
    with pytest.raises(ValueError, match=words):
        trace.Trace(**vars(found) | change)


def test_validation_trace_has_the_counts_that_training_logged(tiny_run):
    found = trace.trace_validation(tiny_run)
    _, log = results.load_run(tiny_run)
    last = log[(log.split == "valid") & (log.step == log.step.max())]
    for metric, ours in (
        ("active_mean", found.counts().mean(1)),
        ("active_max", found.counts().max(1)),
        ("dead_fraction", [1 - len(np.unique(found.layer(n).indices)) / 96 for n in range(2)]),
    ):
        np.testing.assert_allclose(ours, last[last.metric == metric].value, rtol=1e-5)
    logged = last[last.metric == "cross_entropy"].value.item()
    assert -np.nanmean(found.logprob) == pytest.approx(logged, rel=1e-5)
    assert np.isnan(found.logprob).sum() == len(np.unique(found.sequence)) == 16
    assert found.meta["commit"] and found.meta["l1_coefficient"] == 1e-2


def test_a_trace_is_what_the_layers_compute(tiny_run):
    model, tokenizer = trace.load_model(tiny_run)
    assert isinstance(model, SparseLlamaForCausalLM)
    sequences = [torch.randint(1, 320, (length,)).tolist() for length in (9, 9, 4, 1, 9)]
    found = trace.trace_tokens(model, tokenizer, sequences, batch=2)
    at = 0
    for number, sequence in enumerate(sequences):
        seen = []
        hooks = [ffn.register_forward_hook(lambda f, i, _, s=seen: s.append(f.activations(i[0]))) for ffn in model.ffns]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequence])).logits[0]
        [hook.remove() for hook in hooks]
        rows = slice(at, at + len(sequence))
        for layer, (g, h) in enumerate(seen):
            stored = found.layer(layer)[rows]
            np.testing.assert_allclose(stored.toarray(), h[0].numpy(), rtol=1e-4, atol=1e-6)
            assert np.array_equal(np.diff(stored.indptr), (g[0] != 0).sum(-1).numpy())
        expected = torch.log_softmax(logits, -1)[range(len(sequence) - 1), sequence[1:]]
        np.testing.assert_allclose(found.logprob[rows][1:], expected, rtol=1e-4, atol=1e-5)
        assert found.sequence[rows].tolist() == [number] * len(sequence)
        assert found.position[rows].tolist() == list(range(len(sequence)))
        at += len(sequence)
    with pytest.raises(ValueError, match="token 320 does not exist: the model has a vocabulary of 320"):
        trace.trace_tokens(model, tokenizer, [[1, 320]])
    with pytest.raises(ValueError, match="empty sequence"):
        trace.trace_tokens(model, tokenizer, [[]])


def test_text_is_cut_into_contexts_and_read_back(tiny_run):
    model, tokenizer = trace.load_model(tiny_run)
    text = "ba de <b>fun</b> — 😀 " * 20
    found = trace.trace_text(model, tokenizer, text)
    assert found.position.max() == 31 and found.sequence.max() == (found.num_tokens - 1) // 32
    assert tokenizer.decode(found.token_ids) == text
    assert "<0xF0>" in found.strings and " de" in found.strings
    plain = [string for string in found.strings if not string.startswith("<0x")]
    assert "\ufffd" not in "".join(plain)
    with pytest.raises(ValueError, match="the text is empty"):
        trace.trace_text(model, tokenizer, "")


def test_missing_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no model: it has no config\.json"):
        trace.load_model(tmp_path)


def test_token_strings_of_whole_vocabulary(tiny_run):
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    strings = trace.token_strings(tokenizer, range(320))
    assert len(set(strings)) == 320  # no two tokens look the same
