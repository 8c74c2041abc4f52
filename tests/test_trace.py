import copy
import math
import secrets

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from twell import analysis, results, trace
from twell import model as model_module
from twell.__main__ import main
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
        expected = (
            np.where(np.arange(300) % 5, np.arange(300), 0) * active[7 * layer : 7 * layer + 7]
        )
        assert np.array_equal(stored.toarray(), expected)
    with pytest.raises(IndexError, match="layer 2 does not exist"):
        found.layer(2)


def test_saved_and_loaded(tmp_path):
    found, _ = random_trace()
    found.strings[0] = "👩‍👧<b>\n"
    found.meta["l1_coefficient"] = 0.5
    found.save(tmp_path / "t.npz")
    again = trace.Trace.load(tmp_path / "t.npz")
    assert (
        again.strings == found.strings
        and again.meta == found.meta
        and again.intermediate_size == 300
    )
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
    model, tokenizer = model_module.load(tiny_run)
    assert isinstance(model, SparseLlamaForCausalLM)
    sequences = [torch.randint(1, 320, (length,)).tolist() for length in (9, 9, 4, 1, 9)]
    found = trace.trace_tokens(model, tokenizer, sequences, batch=2)
    at = 0
    for number, sequence in enumerate(sequences):
        seen = []
        hooks = [
            ffn.register_forward_hook(lambda f, i, _, s=seen: s.append(f.activations(i[0])))
            for ffn in model.ffns
        ]
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
    with pytest.raises(ValueError, match="token 320 does not exist: the model has tokens 0 to 319"):
        trace.trace_tokens(model, tokenizer, [[1, 320]])
    with pytest.raises(ValueError, match="token -1 does not exist: the model has tokens 0 to 319"):
        trace.trace_tokens(model, tokenizer, [[7, -1, 2]])
    with pytest.raises(ValueError, match="empty sequence"):
        trace.trace_tokens(model, tokenizer, [[]])


def test_text_is_cut_into_contexts_and_read_back(tiny_run):
    model, tokenizer = model_module.load(tiny_run)
    text = "ba de <b>fun</b> — 😀 " * 20
    found = trace.trace_text(model, tokenizer, text)
    assert found.position.max() == 31 and found.sequence.max() == (found.num_tokens - 1) // 32
    assert tokenizer.decode(found.token_ids) == text
    assert "<0xF0>" in found.strings and " de" in found.strings
    plain = [string for string in found.strings if not string.startswith("<0x")]
    assert "\ufffd" not in "".join(plain)
    with pytest.raises(ValueError, match="the text is empty"):
        trace.trace_text(model, tokenizer, "")


def test_token_strings_of_whole_vocabulary(tiny_run):
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    strings = trace.token_strings(tokenizer, range(320))
    assert len(set(strings)) == 320  # no two tokens look the same


# --- parts, silent neurons


def test_part_is_these_tokens(seed):
    found = random_activity(seed, (9, 9, 5))
    for start, stop in ((0, 23), (4, 17), (9, 9), (22, 23), (0, 0)):
        part = found.part(start, stop)
        assert part.strings == found.strings[start:stop] and part.num_tokens == stop - start
        assert np.array_equal(part.position, found.position[start:stop])
        assert part.num_layers == (2 if stop > start else 0)
        assert np.array_equal(part.counts(), found.counts()[: part.num_layers, start:stop])
        for layer in range(part.num_layers):
            assert np.array_equal(
                part.layer(layer).toarray(), found.layer(layer)[start:stop].toarray()
            )
            assert np.array_equal(part.layer(layer).indices, found.layer(layer)[start:stop].indices)
    with pytest.raises(ValueError, match="tokens 4 to 24 are no part of a trace of 23"):
        found.part(4, 24)


def test_silenced_loss(tiny_run):
    model, tokenizer = model_module.load(tiny_run)
    sequences = [torch.randint(1, 320, (length,)).tolist() for length in (12, 12, 12, 5, 1, 9)]
    traced = trace.trace_tokens(model, tokenizer, sequences)
    counts = traced.neurons()[0]
    rare = [
        tuple(map(int, pair))
        for pair in np.argwhere((counts > 0) & (counts <= counts[counts > 0].min() + 2))[:3]
    ]
    chosen = [*rare, tuple(map(int, np.unravel_index(counts.argmax(), counts.shape)))]
    dead = np.argwhere(counts == 0)
    if len(dead):
        chosen.append(tuple(map(int, dead[0])))
    model.train()
    table = trace.silenced_loss(model, sequences, chosen, batch=2)
    assert model.training
    model.eval()
    plain = -np.nan_to_num(traced.logprob.astype(np.float64))
    predicted = sum(len(s) - 1 for s in sequences)
    for row, (layer, neuron) in zip(table.itertuples(), chosen, strict=True):
        without = copy.deepcopy(model)
        without.ffns[layer].down_proj.weight.data[:, neuron] = 0
        silent = -np.nan_to_num(
            trace.trace_tokens(without, tokenizer, sequences).logprob.astype(np.float64)
        )
        change = silent - plain
        assert (row.layer, row.neuron, row.fires) == (layer, neuron, counts[layer, neuron])
        assert row.loss_change == pytest.approx(change.sum() / predicted, abs=1e-6)
        by_sequence = np.array([change[traced.sequence == n].sum() for n in range(6)])
        spread = by_sequence - change.sum() / predicted * np.array([len(s) - 1 for s in sequences])
        assert row.stderr == pytest.approx(np.sqrt(6 / 5 * (spread**2).sum()) / predicted, abs=1e-6)
        fires = np.flatnonzero(np.diff(traced.layer(layer)[:, [neuron]].indptr))
        after = [
            token + 1
            for token in fires
            if token + 1 < len(change) and traced.position[token + 1] > 0
        ]
        assert row.change_after == pytest.approx(
            change[after].mean() if after else np.nan, abs=1e-5, nan_ok=True
        )
    assert (table.loc[table["fires"] == 0, ["loss_change", "stderr"]] == 0).all(axis=None)
    assert table["loss_change"].abs().max() > 1e-5
    assert np.isnan(trace.silenced_loss(model, sequences[:1], chosen[:1])["stderr"]).all()
    with pytest.raises(IndexError, match="neuron 96 does not exist"):
        trace.silenced_loss(model, sequences, [(0, 0), (1, 96)])
    with pytest.raises(ValueError, match="no token is predicted"):
        trace.silenced_loss(model, [[1], [2]], [(0, 0)])


# --- aggregates ---------------------------------------------------------------------------------------


@pytest.fixture
def seed():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


class Words:
    """Stands for a tokenizer: token 5 is "<5>"."""

    def decode(self, ids):
        return f"<{ids[0]}>"


def random_activity(seed, lengths, layers=2, neurons=600, rate=0.05):
    """A trace with the cases that go wrong: silent and full rows, dead neurons, ties, 0, -0.0, tiny and huge values."""
    random = np.random.default_rng(seed)
    tokens = sum(lengths)
    mask = random.random((layers, tokens, neurons)) < rate * random.lognormal(
        0, 1, (layers, tokens, 1)
    )
    mask[0, random.integers(tokens)] = True
    mask[:, random.integers(tokens)] = False
    mask[:, :, 7] = False
    mask[:, :, 8] = random.random((layers, tokens)) < 0.5  # fires often
    mask[:, 1:, 9] = False  # fires at the first token at most
    values = (random.standard_normal(mask.sum()) * random.lognormal(0, 1, mask.sum())).astype(
        np.float32
    )
    odd = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        2.0,
        1e-20,
        -1e-20,
        np.nextafter(np.float32(4), np.float32(0)),
        -4.0,
        1000.0,
    ]
    odd = random.choice(np.array(odd, np.float32), len(values))
    values = np.where(random.random(len(values)) < 0.3, odd, values)
    token_ids = random.integers(0, 50, tokens).astype(np.int32)
    position = np.concatenate([np.arange(length) for length in lengths])
    return trace.Trace(
        token_ids=token_ids,
        strings=[f"<{token}>" for token in token_ids],
        logprob=np.where(position == 0, np.nan, -random.random(tokens)).astype(np.float32),
        sequence=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        position=position.astype(np.int32),
        indptr=np.concatenate([[0], mask.sum(2).reshape(-1).cumsum()]).astype(np.int64),
        indices=mask.nonzero()[2].astype(np.uint16),
        values=values,
        intermediate_size=neurons,
    )


def aggregate_of(found, batch=3, seed=0, max_bytes=10**9):
    """Show a trace to the counter, at most `batch` sequences at a time."""
    starts = np.flatnonzero(found.position == 0)
    sequences = np.split(found.token_ids, starts[1:])
    longest = max(map(len, sequences))
    counter = trace._Count(found.num_layers, found.intermediate_size, 60, longest, seed=seed)
    at = 0
    for group in trace._same_length(sequences, batch):
        ids = torch.tensor(group)
        rows = slice(at, at + ids.numel())
        counter.begin(ids)
        for layer in range(found.num_layers):
            h = found.layer(layer)[rows]
            token = np.repeat(np.arange(ids.numel()), np.diff(h.indptr))
            parts = (token, h.indices.astype(np.int64), h.data)
            counter.layer(layer, *(torch.from_numpy(part) for part in parts))
        counter.end(torch.from_numpy(found.logprob[rows]).view(ids.shape))
        at += ids.numel()
    return counter.finish(sequences, Words(), max_bytes, {})


def firings(found, layer, neuron):
    """The numbers of the tokens that activate a neuron, and its values, by a slow loop."""
    at, values = [], []
    for token in range(found.num_tokens):
        row = layer * found.num_tokens + token
        for entry in range(found.indptr[row], found.indptr[row + 1]):
            if found.indices[entry] == neuron:
                at.append(token)
                values.append(float(found.values[entry]))
    return at, values


LENGTHS = (40, 40, 40, 40, 7, 1, 1, 64, 64, 64, 64, 64, 100, 3)


def test_neurons_against_slow_loops(seed):
    found = random_activity(seed, LENGTHS)
    counted = aggregate_of(found)
    assert counted.value_edges[-1] == 2.0 ** (math.floor(math.log2(counted.max_abs.max())) + 1)
    edges = counted.value_edges.tolist()
    assert edges == sorted(edges) and edges[12] == 0 and edges[13] == edges[-1] / 2**11
    for layer, neuron in [
        (0, 7),
        (0, 8),
        (1, 8),
        (0, 9),
        (1, 9),
        (0, 0),
        (1, 599),
        (0, 255),
        (0, 256),
        (1, 300),
    ]:
        at, values = firings(found, layer, neuron)
        bins = [0] * 24
        for h in values:
            size, octave = abs(h), 0
            while octave < 11 and size >= edges[13 + octave]:
                octave += 1
            bins[11 - octave if h < 0 else 12 + octave] += 1
        assert counted.value_histogram[layer, neuron].tolist() == bins
        assert counted.max_abs[layer, neuron] == max(map(abs, values), default=0)
        assert counted.value_sum[layer, neuron] == pytest.approx(
            math.fsum(values), rel=1e-6, abs=1e-6
        )
        assert counted.abs_sum[layer, neuron] == pytest.approx(
            math.fsum(map(abs, values)), rel=1e-6
        )
        table = analysis.value_histogram(counted, layer, neuron)
        assert table["count"].sum() == len(values) and table["low"].tolist() == edges[:-1]
    assert counted.cross_entropy == pytest.approx(
        -np.nanmean(found.logprob.astype(float)), rel=1e-12
    )
    assert counted.occurrences.tolist() == [
        (found.token_ids == token).sum() for token in counted.token_ids
    ]


def test_strongest_places_against_slow_loops(seed):
    found = random_activity(seed, LENGTHS)
    counted = aggregate_of(found)
    for layer, neuron in [(0, 7), (0, 8), (1, 8), (0, 9), (0, 31), (1, 599)]:
        at, values = firings(found, layer, neuron)
        best = sorted(zip(at, values, strict=True), key=lambda pair: (-abs(pair[1]), pair[0]))[:8]
        table = analysis.contexts(counted, layer, neuron)
        assert len(table) == len(best)
        for (token, value), row in zip(best, table.itertuples(), strict=True):
            assert row.value == pytest.approx(value, rel=2**-12)
            assert (row.sequence, row.position) == (found.sequence[token], found.position[token])
            near = [n for n in range(token - 12, token + 5) if 0 <= n < found.num_tokens]
            near = [n for n in near if found.sequence[n] == row.sequence]
            assert row.token == found.strings[token]
            assert row.before == "".join(found.strings[n] for n in near if n < token)
            assert row.after == "".join(found.strings[n] for n in near if n > token)
    with pytest.raises(ValueError, match="kind is 'most'; use 'top' or 'quantile'"):
        analysis.contexts(counted, 0, 0, "most")
    with pytest.raises(
        IndexError, match="layer 2, neuron 0 does not exist: there are 2 layers of 600"
    ):
        analysis.contexts(counted, 2, 0)


def test_quantile_places_of_a_rare_neuron_are_exact(seed):
    found = random_activity(seed, LENGTHS, rate=0.01)
    counted = aggregate_of(found)
    checked = 0
    for neuron in range(0, 600, 7):
        at, values = firings(found, 1, neuron)
        if len(values) > trace.SAMPLE:
            continue
        table = analysis.contexts(counted, 1, neuron, "quantile")
        ranks = [round(q * (len(values) - 1)) for q in counted.quantiles] if values else []
        expected = [sorted(values)[rank] for n, rank in enumerate(ranks) if rank not in ranks[:n]]
        np.testing.assert_allclose(table["value"].astype(float), expected, rtol=2**-12)
        assert {*table["quantile"]} <= {*counted.quantiles}
        for row in table.itertuples():
            token = LENGTHS[: row.sequence]
            assert sum(token) + row.position in at
        checked += len(expected) > 1
    assert checked > 20


def test_quantile_places_are_an_even_sample(seed):
    """Over many neurons that fire much more often than the sample holds, ranks come out where the quantiles are."""
    found = random_activity(seed, (50,) * 20, layers=1, neurons=300, rate=0.3)
    counted = aggregate_of(found)
    ranks = []
    by_neuron = found.layer(0).tocsc()
    for neuron in range(10, 300):
        values = by_neuron.data[by_neuron.indptr[neuron] : by_neuron.indptr[neuron + 1]]
        assert len(values) > 2 * trace.SAMPLE
        order, chosen = np.sort(trace._rounded(values)), counted.quantile_value[0, neuron]
        ranks.append(
            [(np.searchsorted(order, h, s) / len(order)) for h in chosen for s in ("left", "right")]
        )
    ranks = np.mean(ranks, 0).reshape(5, 2).mean(1)
    np.testing.assert_allclose(ranks, (0.1, 0.3, 0.5, 0.7, 0.9), atol=0.05)
    other = aggregate_of(found, seed=1)
    assert (other.quantile_at != counted.quantile_at).mean() > 0.5
    assert np.array_equal(other.top_at, counted.top_at)


def test_words_are_stored_once(seed):
    counted = aggregate_of(random_activity(seed, LENGTHS, layers=1, neurons=10, rate=0.002))
    assert len(counted.text_at) < sum(LENGTHS)
    assert (np.diff(counted.text_at) > 0).all()
    starts = np.cumsum(LENGTHS) - LENGTHS
    near = set()
    for at in {*counted.top_at.reshape(-1).tolist(), *counted.quantile_at.reshape(-1).tolist()} - {
        -1
    }:
        first = max(start for start in starts if start <= at)
        last = first + LENGTHS[starts.tolist().index(first)]
        near |= {*range(max(first, at - 12), min(last, at + 5))}
    assert counted.text_at.tolist() == sorted(near)


def test_neither_batches_nor_the_number_of_merges_change_an_aggregate(seed, monkeypatch):
    found = random_activity(seed, LENGTHS)
    once = aggregate_of(found, batch=100)
    merges = []
    merge = trace._Best.merge
    monkeypatch.setattr(trace._Best, "merge", lambda best: merges.append(1) or merge(best))
    add = trace._Best.add

    def add_and_merge(best, *entries):
        add(best, *entries)
        best.merge()

    monkeypatch.setattr(trace._Best, "add", add_and_merge)
    often = aggregate_of(found, batch=1)
    assert len(merges) > 2 * len(LENGTHS)
    for name, value in vars(once).items():
        if name in ("value_sum", "abs_sum"):
            np.testing.assert_allclose(getattr(often, name), value, rtol=1e-6, atol=1e-6)
        elif isinstance(value, np.ndarray):
            assert np.array_equal(getattr(often, name), value), name
        else:
            assert getattr(often, name) == value


def test_aggregate_saved_and_loaded(tmp_path, seed):
    found = aggregate_of(random_activity(seed, LENGTHS))
    found.strings[0] = "👩‍👧<b>\n"
    found.save(tmp_path / "a.npz")
    again = trace.Aggregate.load(tmp_path / "a.npz")
    for name, value in vars(found).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(again, name), value), name
            assert getattr(again, name).dtype == value.dtype, name
        else:
            assert getattr(again, name) == value
    whole = (tmp_path / "a.npz").read_bytes()
    assert whole == again.pack()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", b"PK", whole[:300], whole[:-40], b"not a zip at all", flipped):
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.npz is not an aggregate, or it is damaged"):
            trace.Aggregate.load(tmp_path / "a.npz")
    random_trace()[0].save(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a\.npz is not an aggregate"):
        trace.Aggregate.load(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"max_abs has the shape \(2, 3\); expected \(2, 600\)"):
        trace.Aggregate(**vars(found) | {"max_abs": np.zeros((2, 3))})
    with pytest.raises(ValueError, match="occurrences counts 0 tokens; the sequences have 592"):
        trace.Aggregate(**vars(found) | {"occurrences": found.occurrences * 0})


def test_places_make_way_until_the_file_fits_and_counts_never_do(seed):
    found = random_activity(seed, LENGTHS)
    full = aggregate_of(found)
    assert full.meta["reduced"] == {} and full.top_at.shape[-1] == 8 and len(full.quantiles) == 5
    least = full
    for share in (0.9, 0.6, 0.4):
        limit = int(len(full.pack()) * share)
        smaller = aggregate_of(found, max_bytes=limit)
        assert len(smaller.pack()) <= limit < len(least.pack())
        assert smaller.meta["reduced"] and smaller.meta["max_bytes"] == limit
        assert smaller.meta["kept"] == {
            "top": smaller.top_at.shape[-1],
            "quantiles": smaller.quantiles,
            "before": smaller.before,
            "after": smaller.after,
        }
        for name in trace.COUNTED:
            assert np.array_equal(getattr(smaller, name), getattr(full, name)), name
        kept = smaller.top_at.shape[-1]
        assert np.array_equal(smaller.top_at, full.top_at[..., :kept])
        least = smaller
    with pytest.raises(ValueError, match=r"the counts alone need \d+ bytes; max_bytes is 1000"):
        aggregate_of(found, max_bytes=1000)


def test_each_row_of_contexts_takes_no_more_than_the_one_before():
    for one, next in zip(trace.CONTEXTS, trace.CONTEXTS[1:], strict=False):
        sizes = [
            (top, len(quantiles), before, after) for top, quantiles, before, after in (one, next)
        ]
        assert all(a >= b for a, b in zip(*sizes, strict=True)) and sizes[0] != sizes[1]
        assert {*next[1]} <= {*one[1]}
    assert trace.CONTEXTS[-1] == (0, [], 0, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(seed, value):
    found = random_activity(seed, (9, 9))
    found.values[found.indptr[found.num_tokens]] = value  # the first one in layer 1
    with pytest.raises(FloatingPointError, match="layer 1 has values that are not finite"):
        aggregate_of(found)


def test_aggregate_of_a_model_has_the_tables_of_its_trace(tiny_run, monkeypatch):
    model, tokenizer = model_module.load(tiny_run)
    sequences = [
        torch.randint(1, 320, (length,)).tolist() for length in (*[32] * 17, 9, 9, 4, 1, 9)
    ]
    monkeypatch.setattr(trace, "BATCH_TOKENS", 96)
    found = trace.trace_tokens(model, tokenizer, sequences, batch=3)
    counted = trace.aggregate(model, tokenizer, sequences, meta={"run": "x"})
    for table in TABLES:
        pd.testing.assert_frame_equal(table(counted), table(found), check_dtype=False, rtol=1e-6)
    assert counted.cross_entropy == pytest.approx(
        -np.nanmean(found.logprob.astype(float)), rel=1e-9
    )
    assert counted.meta["run"] == "x" and counted.meta["context"] == 32
    assert counted.meta["num_tokens"] == counted.num_tokens == 576
    layer, neuron = np.unravel_index(counted.max_abs.argmax(), counted.max_abs.shape)
    first = analysis.contexts(counted, layer, neuron).iloc[0]
    before = sequences[first["sequence"]][max(first["position"] - 12, 0) : first["position"]]
    assert first["before"] == "".join(trace.token_strings(tokenizer, before))
    with pytest.raises(ValueError, match="no sequence to count"):
        trace.aggregate(model, tokenizer, [])
    with pytest.raises(
        ValueError, match="2 layers of 96 neurons may need 6144 bytes; max_bytes is 6000"
    ):
        trace.aggregate(model, tokenizer, sequences, max_bytes=6000)


TABLES = [
    analysis.per_layer,
    lambda found: analysis.per_token(found, min_count=1),
    analysis.by_position,
    analysis.by_neuron,
    analysis.union_sizes,
    analysis.tile_overflow,
]


def test_progress_says_how_far_it_is(monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(trace.time, "perf_counter", lambda: next(clock))
    said = []
    assert list(trace._progress([[1] * 500] * 5, said.append)) == [[1] * 500] * 5
    assert said == [
        "500 of 2,500 tokens  83 tokens/s  0:24 left",
        "1,500 of 2,500 tokens  125 tokens/s  0:08 left",
    ]


def test_aggregate_from_the_shell(tiny_run, tmp_path, capsys):
    out = tmp_path / "deep" / "a.npz"
    assert (
        main(
            ["trace", str(tiny_run), "--aggregate", "--valid", "--tokens", "500", "--out", str(out)]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "500 tokens, 2 layers" in said and f"{out.stat().st_size} bytes" in said
    counted = trace.Aggregate.load(out)
    assert counted.num_tokens == 500 and counted.lengths.tolist() == [32] * 15 + [20]
    assert (
        counted.meta["run"] == "tiny"
        and counted.meta["commit"]
        and counted.meta["l1_coefficient"] == 1e-2
    )
    assert main(["trace", str(tiny_run), "--aggregate", "--valid", "--out", str(out)]) == 0
    available = trace.Aggregate.load(out).num_tokens
    assert available > 512  # all that is held out
    text = tmp_path / "text.txt"
    text.write_text("ba de fun " * 30, encoding="utf-8")
    assert (
        main(["trace", str(tiny_run), "--aggregate", "--file", str(text), "--out", str(out)]) == 0
    )
    assert 30 < trace.Aggregate.load(out).num_tokens < 200


def test_validation_aggregate_has_the_loss_that_training_logged(tiny_run):
    _, log = results.load_run(tiny_run)
    last = log[(log.split == "valid") & (log.step == log.step.max())]
    counted = trace.aggregate_run(tiny_run, tokens=512)
    logged = last[last.metric == "cross_entropy"].value.item()
    assert counted.cross_entropy == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--aggregate", "--valid", "--tokens", "9999999"],
            "9999999 tokens were asked for; there are ",
        ),
        (["--aggregate", "--valid", "--tokens", "0"], "0 tokens were asked for"),
        (["--valid", "--tokens", "10"], "--tokens and --max-bytes belong to --aggregate"),
        (
            ["--aggregate", "--valid", "--max-bytes", "5000"],
            "2 layers of 96 neurons may need 6144 bytes; max_bytes is 5000",
        ),
        (["--aggregate", "--text", ""], "the text is empty"),
        (["--aggregate", "--file", "LATIN"], "latin.txt is not UTF-8 text: byte 1"),
    ],
)
def test_bad_requests_leave_nothing_behind(tiny_run, tmp_path, capsys, arguments, words):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"a\xe9")
    arguments = [str(latin) if argument == "LATIN" else argument for argument in arguments]
    assert main(["trace", str(tiny_run), *arguments, "--out", str(tmp_path / "a.npz")]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["latin.txt"]


def test_interrupted_aggregate_leaves_no_file(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace, "BATCH_TOKENS", 64)
    end, calls = trace._Count.end, []

    def interrupted(counter, logprob):
        end(counter, logprob)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(trace._Count, "end", interrupted)
    assert (
        main(["trace", str(tiny_run), "--aggregate", "--valid", "--out", str(tmp_path / "a.npz")])
        == 130
    )
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [] and len(calls) == 3


@pytest.mark.parametrize("kind", [[], ["--aggregate"]])
def test_a_model_without_a_tokenizer_is_refused_at_once(tiny_run, tmp_path, capsys, kind):
    model_module.load(tiny_run)[0].save_pretrained(tmp_path / "bare")
    assert (
        main(
            [
                "trace",
                str(tmp_path / "bare"),
                *kind,
                "--text",
                "a",
                "--out",
                str(tmp_path / "a.npz"),
            ]
        )
        == 2
    )
    assert "bare has no tokenizer" in capsys.readouterr().err
