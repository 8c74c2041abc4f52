"""The places of neurons in the text, and how they make way until the file fits."""

import numpy as np
import pytest

from tests.trace.activity import LENGTHS, aggregate_of, firings, random_activity
from twell import analysis
from twell.trace import CONTEXTS, COUNTED, SAMPLE
from twell.trace.contexts import rounded


def test_strongest_places_against_slow_loops(seed):
    trace = random_activity(seed, LENGTHS)
    counted = aggregate_of(trace)
    for layer, neuron in [(0, 7), (0, 8), (1, 8), (0, 9), (0, 31), (1, 599)]:
        at, values = firings(trace, layer, neuron)
        best = sorted(zip(at, values, strict=True), key=lambda pair: (-abs(pair[1]), pair[0]))[:8]
        table = analysis.contexts(counted, layer, neuron)
        assert len(table) == len(best)
        for (token, value), row in zip(best, table.itertuples(), strict=True):
            assert row.value == pytest.approx(value, rel=2**-12)
            assert (row.sequence, row.position) == (trace.sequence[token], trace.position[token])
            near = [n for n in range(token - 12, token + 5) if 0 <= n < trace.num_tokens]
            near = [n for n in near if trace.sequence[n] == row.sequence]
            assert row.token == trace.strings[token]
            assert row.before == "".join(trace.strings[n] for n in near if n < token)
            assert row.after == "".join(trace.strings[n] for n in near if n > token)


def test_unknown_places_are_refused(seed):
    counted = aggregate_of(random_activity(seed, (9,)))
    with pytest.raises(ValueError, match="kind is 'most'; use 'top' or 'quantile'"):
        analysis.contexts(counted, 0, 0, "most")
    words = "layer 2, neuron 0 does not exist: there are 2 layers of 600"
    with pytest.raises(IndexError, match=words):
        analysis.contexts(counted, 2, 0)


def test_quantile_places_of_a_rare_neuron_are_exact(seed):
    trace = random_activity(seed, LENGTHS, rate=0.01)
    counted = aggregate_of(trace)
    checked = 0
    for neuron in range(0, 600, 7):
        at, values = firings(trace, 1, neuron)
        if len(values) > SAMPLE:
            continue
        table = analysis.contexts(counted, 1, neuron, "quantile")
        ranks = [round(q * (len(values) - 1)) for q in counted.quantiles] if values else []
        expected = [sorted(values)[rank] for n, rank in enumerate(ranks) if rank not in ranks[:n]]
        np.testing.assert_allclose(table["value"].astype(float), expected, rtol=2**-12)
        assert {*table["quantile"]} <= {*counted.quantiles}
        for row in table.itertuples():
            assert sum(LENGTHS[: row.sequence]) + row.position in at
        checked += len(expected) > 1
    assert checked > 20


def test_quantile_places_are_an_even_sample(seed):
    """The mean ranks of neurons that fire much more often than SAMPLE are the quantiles."""
    trace = random_activity(seed, (50,) * 20, layers=1, neurons=300, rate=0.3)
    counted = aggregate_of(trace)
    ranks = []
    by_neuron = trace.layer(0).tocsc()
    for neuron in range(10, 300):
        values = by_neuron.data[by_neuron.indptr[neuron] : by_neuron.indptr[neuron + 1]]
        assert len(values) > 2 * SAMPLE
        order, chosen = np.sort(rounded(values)), counted.quantile_value[0, neuron]
        sides = [np.searchsorted(order, chosen, side) for side in ("left", "right")]
        ranks.append(np.mean(sides, 0) / len(order))
    np.testing.assert_allclose(np.mean(ranks, 0), (0.1, 0.3, 0.5, 0.7, 0.9), atol=0.05)
    other = aggregate_of(trace, seed=1)
    assert (other.quantile_at != counted.quantile_at).mean() > 0.5
    assert np.array_equal(other.top_at, counted.top_at)


def test_words_are_stored_once(seed):
    counted = aggregate_of(random_activity(seed, LENGTHS, layers=1, neurons=10, rate=0.002))
    assert len(counted.text_at) < sum(LENGTHS)
    assert (np.diff(counted.text_at) > 0).all()
    starts = (np.cumsum(LENGTHS) - LENGTHS).tolist()
    near = set()
    for at in {*counted.top_at.reshape(-1).tolist(), *counted.quantile_at.reshape(-1).tolist()}:
        if at >= 0:
            first = max(start for start in starts if start <= at)
            end = first + LENGTHS[starts.index(first)]
            near |= {*range(max(first, at - 12), min(end, at + 5))}
    assert counted.text_at.tolist() == sorted(near)


def test_places_make_way_until_the_file_fits_and_counts_never_do(seed):
    trace = random_activity(seed, LENGTHS)
    full = aggregate_of(trace)
    assert full.meta["reduced"] == {} and full.top_at.shape[-1] == 8 and len(full.quantiles) == 5
    least = full
    for share in (0.9, 0.6, 0.4):
        limit = int(len(full.pack()) * share)
        smaller = aggregate_of(trace, max_bytes=limit)
        assert len(smaller.pack()) <= limit < len(least.pack())
        assert smaller.meta["reduced"] and smaller.meta["max_bytes"] == limit
        assert smaller.meta["kept"] == {
            "top": smaller.top_at.shape[-1],
            "quantiles": smaller.quantiles,
            "before": smaller.before,
            "after": smaller.after,
        }
        for name in COUNTED:
            assert np.array_equal(getattr(smaller, name), getattr(full, name)), name
        kept = smaller.top_at.shape[-1]
        assert np.array_equal(smaller.top_at, full.top_at[..., :kept])
        least = smaller
    with pytest.raises(ValueError, match=r"the counts alone need \d+ bytes; max_bytes is 1000"):
        aggregate_of(trace, max_bytes=1000)


def test_each_row_of_contexts_takes_no_more_than_the_one_before():
    for one, after in zip(CONTEXTS, CONTEXTS[1:], strict=False):
        sizes = [row._replace(quantiles=len(row.quantiles)) for row in (one, after)]
        assert all(a >= b for a, b in zip(*sizes, strict=True)) and sizes[0] != sizes[1]
        assert {*after.quantiles} <= {*one.quantiles}
    assert CONTEXTS[-1] == (0, [], 0, 0)
