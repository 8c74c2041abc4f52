"""What the counter counts, against slow loops over random traces."""

import math

import numpy as np
import pytest

from tests.trace.activity import LENGTHS, aggregate_of, firings, random_activity
from twell import analysis
from twell.trace.contexts import Best

DEAD, OFTEN, AT_MOST_ONCE = 7, 8, 9


@pytest.mark.parametrize(
    ("layer", "neurons"),
    [(0, (DEAD, OFTEN, AT_MOST_ONCE, 0, 255, 256)), (1, (OFTEN, AT_MOST_ONCE, 300, 599))],
)
def test_neurons_against_slow_loops(seed, layer, neurons):
    trace = random_activity(seed, LENGTHS)
    counted = aggregate_of(trace)
    edges = counted.value_edges.tolist()
    for neuron in neurons:
        _, values = firings(trace, layer, neuron)
        bins = [0] * 24
        for h in values:
            size, octave = abs(h), 0
            while octave < 11 and size >= edges[13 + octave]:
                octave += 1
            bins[11 - octave if h < 0 else 12 + octave] += 1
        assert counted.value_histogram[layer, neuron].tolist() == bins
        assert counted.max_abs[layer, neuron] == max(map(abs, values), default=0)
        total, magnitude = math.fsum(values), math.fsum(map(abs, values))
        assert counted.value_sum[layer, neuron] == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert counted.abs_sum[layer, neuron] == pytest.approx(magnitude, rel=1e-6)
        table = analysis.value_histogram(counted, layer, neuron)
        assert table["count"].sum() == len(values) and table["low"].tolist() == edges[:-1]


def test_edges_tokens_and_loss(seed):
    trace = random_activity(seed, LENGTHS)
    counted = aggregate_of(trace)
    edges = counted.value_edges.tolist()
    assert edges[-1] == 2.0 ** (math.floor(math.log2(counted.max_abs.max())) + 1)
    assert edges == sorted(edges) and edges[12] == 0 and edges[13] == edges[-1] / 2**11
    loss = -np.nanmean(trace.logprob.astype(float))
    assert counted.cross_entropy == pytest.approx(loss, rel=1e-12)
    occurrences = [(trace.token_ids == token).sum() for token in counted.token_ids]
    assert counted.occurrences.tolist() == occurrences


def test_neither_batches_nor_the_number_of_merges_change_an_aggregate(seed, monkeypatch):
    trace = random_activity(seed, LENGTHS)
    once = aggregate_of(trace, batch=100)
    merges, merge, add = [], Best.merge, Best.add

    def add_and_merge(best, *entries):
        add(best, *entries)
        best.merge()

    monkeypatch.setattr(Best, "merge", lambda best: merges.append(1) or merge(best))
    monkeypatch.setattr(Best, "add", add_and_merge)
    often = aggregate_of(trace, batch=1)
    assert len(merges) > 2 * len(LENGTHS)
    for name, value in vars(once).items():
        if name in ("value_sum", "abs_sum"):
            np.testing.assert_allclose(getattr(often, name), value, rtol=1e-6, atol=1e-6)
        elif isinstance(value, np.ndarray):
            assert np.array_equal(getattr(often, name), value), name
        else:
            assert getattr(often, name) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(seed, value):
    trace = random_activity(seed, (9, 9))
    trace.values[trace.indptr[trace.num_tokens]] = value  # the first one in layer 1
    with pytest.raises(FloatingPointError, match="layer 1 has values that are not finite"):
        aggregate_of(trace)
