"""Traces and aggregates: what they count, their files, and sizes that do not fit."""

import copy
import re

import numpy as np
import pytest

from tests.factories import SEED
from tests.factories.trace import aggregate_of, dense, random_activity
from twell import results
from twell.trace import BLOCKS, COMPRESSIONS, TILE_N, Aggregate, Trace


@pytest.fixture(scope="module")
def records():
    trace = random_activity(SEED)
    return {"trace": trace, "aggregate": aggregate_of(trace)}


@pytest.mark.parametrize("kind", ["trace", "aggregate"])
def test_counts_are_those_of_the_dense_layers(records, kind):
    trace, record = records["trace"], records[kind]
    active, h = dense(trace)
    layers, tokens, neurons = active.shape
    assert (record.num_layers, record.num_tokens) == (layers, tokens)
    histogram = [np.bincount(of_layer.sum(1), minlength=neurons + 1) for of_layer in active]
    assert np.array_equal(record.histogram(), histogram)

    ids, strings, occurrences, token_active = record.by_token()
    assert ids.tolist() == sorted(set(trace.token_ids))
    assert strings == [f"<{token}>" for token in ids]
    assert occurrences.tolist() == [(trace.token_ids == token).sum() for token in ids]
    assert token_active.tolist() == [active[:, trace.token_ids == token].sum() for token in ids]

    places = [trace.position == place for place in range(trace.position.max() + 1)]
    at_position, position_active = record.by_position()
    assert at_position.tolist() == [place.sum() for place in places]
    expected = np.stack([active[:, place].sum((1, 2)) for place in places], 1)
    assert np.array_equal(position_active, expected)

    fires, sums, largest = record.neurons()
    assert np.array_equal(fires, active.sum(1))
    np.testing.assert_allclose(sums, h.sum(1), rtol=1e-6, atol=1e-3)
    assert np.array_equal(largest, np.abs(h).max(1))

    unions = record.unions(BLOCKS)
    for n, block in enumerate(BLOCKS):
        whole = active[:, : tokens // block * block].reshape(layers, -1, block, neurons)
        sizes = whole.any(2).sum(2)
        expected = sizes.sum(1), sizes.max(1), whole.sum((1, 2, 3))
        assert np.array_equal([part[:, n] for part in unions], expected), block

    overflows = record.overflows(TILE_N, COMPRESSIONS)
    for n, compression in enumerate(COMPRESSIONS):
        edges = np.arange(0, neurons, TILE_N)
        over = np.add.reduceat(active, edges, 2, int) > TILE_N // compression - 1
        expected = over.any(2).sum(1), over.sum((1, 2))
        assert np.array_equal([part[:, n] for part in overflows], expected), compression


def test_layers_parts_and_the_table_of_a_trace(records):
    trace = records["trace"]
    active, h = dense(trace)
    assert np.array_equal(trace.counts(), active.sum(2))
    for start, stop in ((0, trace.num_tokens), (4, 117), (9, 9)):
        part = trace.part(start, stop)
        assert part.strings == trace.strings[start:stop] and part.num_tokens == stop - start
        assert np.array_equal(part.position, trace.position[start:stop])
        assert part.num_layers == (2 if stop > start else 0)
        for layer in range(part.num_layers):
            stored = part.layer(layer)  # values of 0 too
            assert np.array_equal(stored.toarray(), h[layer, start:stop])
            assert np.array_equal(np.diff(stored.indptr), active[layer, start:stop].sum(1))
    table = trace.to_frame()
    counts = table.pivot(index="layer", columns="token", values="active")
    assert np.array_equal(counts, trace.counts())
    assert np.array_equal(table["logprob"], np.repeat(trace.logprob, 2), equal_nan=True)
    assert table["text"].tolist() == np.repeat(trace.strings, 2).tolist()
    with pytest.raises(ValueError, match="tokens 4 to 593 are no part of a trace of 592"):
        trace.part(4, 593)
    with pytest.raises(IndexError, match="layer 2"):
        trace.layer(2)


@pytest.mark.parametrize("kind", ["trace", "aggregate"])
def test_saved_and_loaded_and_damaged(tmp_path, records, kind):
    record, other = copy.copy(records[kind]), records["trace" if kind == "aggregate" else kind]
    record.strings = ["👩‍👧<b>\n", *record.strings[1:]]
    record.meta = {"l1_coefficient": 0.5}
    path = tmp_path / "a.npz"
    record.save(path)
    again = type(record).load(path)
    for name, value in vars(record).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(again, name), value)
            assert getattr(again, name).dtype == value.dtype, name
        else:
            assert getattr(again, name) == value or name == "cross_entropy"
    whole = path.read_bytes()
    assert again.pack() == whole
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    encrypted = re.sub(rb"(PK\x03\x04..|PK\x01\x02.{4}).", rb"\g<1>\1", whole, flags=re.DOTALL)
    for damaged in (b"", whole[:300], whole[:-40], flipped, encrypted):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.npz"):
            type(record).load(path)
    other.save(path)
    with pytest.raises(ValueError, match=r"a\.npz"):
        Aggregate.load(path)


def test_recorded_files_load_and_give_the_same_bytes():
    folder = results.root() / "data"
    assert Trace.load(folder / "traces" / "flagship-passage.npz").num_tokens > 1000
    path = folder / "checkpoints" / "twell-6m" / "aggregate.npz"
    assert Aggregate.load(path).pack() == path.read_bytes()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("trace", {"strings": ["a"]}, "strings has 1 .* 592"),
        ("trace", {"indptr": np.zeros(9, np.int64)}, "indptr has 9"),
        ("trace", {"values": np.zeros(3, np.float32)}, "3 values"),
        ("trace", {"intermediate_size": 2}, "layer of 2"),
        ("aggregate", {"occurrences": np.zeros(50)}, "occurrences counts 0.* 592"),
        ("aggregate", {"active_histogram": np.zeros((2, 601))}, "active_histogram counts 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(records, kind, change, words):
    record = records[kind]
    with pytest.raises(ValueError, match=words):
        type(record)(**vars(record) | change)
