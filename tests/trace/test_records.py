"""Traces and aggregates: what they count, their files, and sizes that do not fit."""

import copy
import math

import numpy as np
import pytest

from study import analysis
from tests.factories import SEED
from tests.factories import trace as factory
from tests.factories.trace import DEAD, LENGTHS, OFTEN, aggregate_of, dense, random_activity
from twell import results
from twell.trace import BLOCKS, COMPRESSIONS, SAMPLE, TILE_N, Aggregate, Trace


@pytest.fixture(scope="module")
def trace():
    return random_activity(SEED)


@pytest.fixture(scope="module")
def counted(trace):
    return aggregate_of(trace)


@pytest.fixture(scope="module")
def records(trace, counted):
    return {"trace": trace, "aggregate": counted}


def test_counts_are_those_of_the_dense_layers(trace, counted):
    active, h = dense(trace)
    layers, tokens, neurons = active.shape
    for record in (trace, counted):
        assert (record.num_layers, record.num_tokens) == (layers, tokens)
        fires, sums, largest = record.neurons()
        assert np.array_equal(fires, active.sum(1))
        np.testing.assert_allclose(sums, h.sum(1), rtol=1e-6, atol=1e-3)
        assert np.array_equal(largest, np.abs(h).max(1))
    histogram = [np.bincount(of_layer.sum(1), minlength=neurons + 1) for of_layer in active]
    assert np.array_equal(counted.active_histogram, histogram)

    ids = counted.token_ids
    assert ids.tolist() == sorted(set(trace.token_ids))
    assert counted.strings == [f"<{token}>" for token in ids]
    assert counted.occurrences.tolist() == [(trace.token_ids == token).sum() for token in ids]
    of_token = [active[:, trace.token_ids == token].sum() for token in ids]
    assert counted.token_active.tolist() == of_token

    places = [trace.position == place for place in range(trace.position.max() + 1)]
    expected = np.stack([active[:, place].sum((1, 2)) for place in places], 1)
    assert np.array_equal(counted.position_active, expected)

    unions = counted.union_sum, counted.union_max, counted.union_active
    for n, block in enumerate(BLOCKS):
        whole = active[:, : tokens // block * block].reshape(layers, -1, block, neurons)
        sizes = whole.any(2).sum(2)
        expected = sizes.sum(1), sizes.max(1), whole.sum((1, 2, 3))
        assert np.array_equal([part[:, n] for part in unions], expected), block

    for n, compression in enumerate(COMPRESSIONS):
        edges = np.arange(0, neurons, TILE_N)
        over = np.add.reduceat(active, edges, 2, int) > TILE_N // compression - 1
        overflows = counted.overflow_rows[:, n], counted.overflow_tiles[:, n]
        assert np.array_equal(overflows, (over.any(2).sum(1), over.sum((1, 2)))), compression


def test_layers_parts_and_the_table_of_a_trace(trace):
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
    for damaged in (b"", whole[:300], whole[:-40], flipped):
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


SOME = [(0, DEAD), (0, OFTEN), (0, factory.AT_MOST_ONCE), (0, 31), (0, 256), (1, OFTEN), (1, 599)]


def firings_of(trace):
    """Return a function of layer and neuron: tokens that activate it, and its values."""
    active, h = dense(trace)

    def firings(layer, neuron):
        at = np.flatnonzero(active[layer, :, neuron])
        return at.tolist(), h[layer, at, neuron].tolist()

    return firings


def test_values_and_strongest_places_of_neurons(trace, counted):
    firings, edges = firings_of(trace), counted.value_edges.tolist()
    assert edges[-1] == 2.0 ** (math.floor(math.log2(counted.max_abs.max())) + 1)
    assert edges == sorted(edges) and edges[12] == 0 and edges[13] == edges[-1] / 2**11
    for layer, neuron in SOME:
        at, values = firings(layer, neuron)
        bins = [0] * 24
        for h in values:
            octave = sum(abs(h) >= edge for edge in edges[13:24])
            bins[11 - octave if h < 0 else 12 + octave] += 1
        assert counted.value_histogram[layer, neuron].tolist() == bins
        total, magnitude = math.fsum(values), math.fsum(map(abs, values))
        assert counted.value_sum[layer, neuron] == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert counted.abs_sum[layer, neuron] == pytest.approx(magnitude, rel=1e-6)

        best = sorted(zip(at, values, strict=True), key=lambda pair: (-abs(pair[1]), pair[0]))[:8]
        table = analysis.contexts(counted, layer, neuron)
        assert len(table) == len(best)
        for (token, value), row in zip(best, table.itertuples(), strict=True):
            assert row.value == pytest.approx(value, rel=2**-12)
            assert (row.sequence, row.position) == (trace.sequence[token], trace.position[token])
            near = [n for n in range(token - 24, token + 13) if 0 <= n < trace.num_tokens]
            near = [n for n in near if trace.sequence[n] == row.sequence]
            assert row.token == trace.strings[token]
            assert row.before == "".join(trace.strings[n] for n in near if n < token)
            assert row.after == "".join(trace.strings[n] for n in near if n > token)


def test_batches_do_not_change_an_aggregate(trace, counted):
    often = aggregate_of(trace, batch=1)
    for name in Aggregate.arrays():
        tolerance = 1e-6 if name in ("value_sum", "abs_sum") else 0
        expected = getattr(counted, name)
        np.testing.assert_allclose(getattr(often, name), expected, tolerance, tolerance, name)
    assert often.meta == counted.meta


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_refused(value):
    trace = random_activity(SEED, (9, 9))
    trace.values[trace.indptr[trace.num_tokens]] = value  # the first one in layer 1
    with pytest.raises(FloatingPointError, match="layer 1"):
        aggregate_of(trace)


def test_quantile_places_of_a_rare_neuron_are_exact():
    trace = random_activity(SEED, rate=0.01)
    counted, firings, checked = aggregate_of(trace), firings_of(trace), 0
    for neuron in range(0, 600, 7):
        at, values = firings(1, neuron)
        if len(values) > SAMPLE:
            continue
        table = analysis.contexts(counted, 1, neuron, "quantile")
        ranks = [round(q * (len(values) - 1)) for q in counted.quantiles] if values else []
        expected = [sorted(values)[rank] for n, rank in enumerate(ranks) if rank not in ranks[:n]]
        np.testing.assert_allclose(table["value"].astype(float), expected, rtol=2**-12)
        for row in table.itertuples():
            assert sum(LENGTHS[: row.sequence]) + row.position in at
        checked += len(expected) > 1
    assert checked > 20


def test_values_around_places(trace, counted):
    """In 127ths of the largest |h|, rounded, and not 0 where the neuron is active with h != 0."""
    _, h = dense(trace)
    at = np.concatenate([counted.top_at, counted.quantile_at], -1)
    assert counted.near.shape == (*at.shape, 24 + 1 + 12) and counted.near.dtype == np.int8
    for layer, neuron in SOME:
        largest = np.abs(h[layer, :, neuron]).max()
        for place, codes in zip(at[layer, neuron], counted.near[layer, neuron], strict=True):
            for token, code in zip(range(place - 24, place + 13), codes.tolist(), strict=True):
                inside = place >= 0 and 0 <= token < trace.num_tokens
                same = inside and trace.sequence[token] == trace.sequence[place]
                value = h[layer, token, neuron] if same else 0
                assert abs(code) == (max(round(127 * abs(value) / largest), 1) if value else 0)
                assert code * value >= 0


def test_neurons_that_fire_together_are_those_of_the_trace():
    trace = random_activity(SEED, rate=0.1, neurons=60)
    counted = aggregate_of(trace)
    for layer in range(2):
        pairs = analysis.together(trace, layer, top=60**2)
        phi = np.zeros((60, 60))
        phi[pairs["neuron"], pairs["other"]] = phi[pairs["other"], pairs["neuron"]] = pairs["phi"]
        order = np.sort(phi, 1)[:, ::-1][:, :8].clip(0)
        np.testing.assert_allclose(counted.together[layer], order, rtol=2**-12, atol=1e-12)
        at = counted.together_at[layer]
        assert np.array_equal(at >= 0, order > 0) and (at[DEAD] == -1).all()
        own = np.take_along_axis(phi, at.clip(0), 1)
        np.testing.assert_allclose(own[at >= 0], order[at >= 0], rtol=1e-6)


def test_places_make_way_until_the_file_fits_and_counts_never_do():
    trace = random_activity(SEED, LENGTHS[-2:], neurons=100)
    full = aggregate_of(trace)
    assert full.meta["reduced"] == {} and full.top_at.shape[-1] == 8 and len(full.quantiles) == 5
    limit = int(len(full.pack()) * 0.7)
    smaller = aggregate_of(trace, max_bytes=limit)
    assert len(smaller.pack()) <= limit
    top = smaller.top_at.shape[-1]
    assert smaller.meta["kept"]["top"] == top and smaller.meta["reduced"] != {}
    for name in Aggregate.arrays()[:16]:
        assert np.array_equal(getattr(smaller, name), getattr(full, name)), name
    assert np.array_equal(smaller.top_at, full.top_at[..., :top])
    with pytest.raises(ValueError, match="max_bytes is 1000"):
        aggregate_of(trace, max_bytes=1000)
