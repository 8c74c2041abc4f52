"""Tables of traces and aggregates against numpy on the dense mask."""

import numpy as np
import pandas as pd
import pytest
import torch

from study import analysis
from tests.factories import SEED
from tests.factories.analysis import make_trace
from tests.factories.trace import aggregate_of
from twell.sparse.formats import PackedTwELL
from twell.trace import Trace


@pytest.fixture(params=[60, 1, 33], ids=lambda tokens: f"{tokens} tokens")
def traced(request):
    return make_trace(SEED, num_tokens=request.param)


def same(table, expected, **tolerance):
    pd.testing.assert_frame_equal(table, expected, check_dtype=False, rtol=1e-12, **tolerance)


def test_layers_positions_and_neurons(traced):
    trace, mask = traced
    counts = mask.sum(2)
    expected = pd.DataFrame({"layer": range(3), "mean": counts.mean(1)})
    expected = expected.assign(median=np.median(counts, 1), p99=np.percentile(counts, 99, axis=1))
    expected = expected.assign(max=counts.max(1), dead=1 - mask.any(1).mean(1))
    expected = expected.assign(active_fraction=counts.mean(1) / 300)
    expected["max_over_mean"] = expected["max"] / expected["mean"]
    same(analysis.per_layer(trace), expected)
    groups = pd.DataFrame({"position": trace.position, "active": counts.mean(0)})
    groups = groups.groupby("position")["active"].agg(mean_active="mean", n="size")
    same(analysis.by_position(trace), groups.reset_index())
    values = np.full(mask.shape, np.nan)
    values[mask] = trace.values  # stored zeros are active
    entries = pd.DataFrame(values.transpose(0, 2, 1).reshape(900, -1))
    layer, neuron = np.indices((3, 300)).reshape(2, -1)
    expected = pd.DataFrame({"layer": layer, "neuron": neuron, "rate": mask.mean(1).reshape(-1)})
    expected = expected.assign(mean_value=entries.mean(axis=1))
    expected["max_abs"] = entries.abs().max(axis=1).fillna(0)
    same(analysis.by_neuron(trace), expected, atol=1e-7)


def test_tokens(traced):
    trace, mask = traced
    rows = pd.DataFrame({"token_id": trace.token_ids, "active": mask.sum(2).mean(0)})
    rows = rows.groupby("token_id")["active"].agg(count="size", mean_active="mean").reset_index()
    rows = rows.assign(frequency=rows["count"] / trace.num_tokens)
    rows["token"] = "<" + rows["token_id"].astype(str) + ">"
    rows = rows[["token_id", "token", "count", "frequency", "mean_active"]]
    every = analysis.per_token(trace, min_count=1)
    assert every["mean_active"].is_monotonic_increasing
    same(every.sort_values("token_id", ignore_index=True), rows)
    half = int(every["count"].median())
    often = set(rows.loc[rows["count"] >= half, "token_id"])
    assert set(analysis.per_token(trace, min_count=half)["token_id"]) == often
    least = half / trace.num_tokens
    assert set(analysis.per_token(trace, least, min_count=1)["token_id"]) == often
    assert analysis.per_token(trace, min_count=61).empty


def test_blocks_and_tiles(traced):
    trace, mask = traced
    sizes = [block for block in (1, 4, 16, 100) if block <= trace.num_tokens]
    table = analysis.union_sizes(trace, blocks=(1, 4, 16, 100))
    assert list(zip(table["layer"], table["block"], strict=True)) == [
        (layer, block) for layer in range(3) for block in sizes
    ]
    for row in table.itertuples():
        whole = trace.num_tokens // row.block * row.block
        blocks = mask[row.layer, :whole].reshape(-1, row.block, 300)
        unions = blocks.any(1).sum(1)
        expected = unions.mean(), unions.max(), blocks.sum() / whole
        assert (row.mean, row.max, row.mean_active) == pytest.approx(expected, rel=1e-12)
    table = analysis.tile_overflow(trace, tile_n=64, compressions=(2, 8))
    assert table["compression"].tolist() == [2, 8] * 3 and table["capacity"].tolist() == [31, 7] * 3
    tiles = np.pad(mask, ((0, 0), (0, 0), (0, 20))).reshape(3, -1, 5, 64).sum(-1)
    for row in table.itertuples():
        over = tiles[row.layer] > row.capacity
        rates = row.overflow_rows, row.overflow_tiles
        assert rates == pytest.approx((over.any(1).mean(), over.mean()), abs=1e-12)
    packed = PackedTwELL.pack(torch.from_numpy(mask[1]).bfloat16(), 64, 8)
    assert table["overflow_rows"][3] == pytest.approx(float(packed.overflow.double().mean()))
    with pytest.raises(ValueError, match="compression 7 does not divide tile_n 64"):
        analysis.tile_overflow(trace, tile_n=64, compressions=(7,))


@pytest.mark.parametrize("tokens", [33, 1100])  # 1100: more than four of the largest blocks
def test_an_aggregate_has_the_tables_of_its_trace(tokens):
    trace, _ = make_trace(SEED, num_tokens=tokens)
    counted = aggregate_of(trace)
    tables = [analysis.per_layer, analysis.by_position, analysis.union_sizes]
    tables += [analysis.tile_overflow, lambda record: analysis.per_token(record, min_count=1)]
    tables += [lambda record: analysis.union_sizes(record, blocks=(64, 16))]
    tables += [lambda record: analysis.tile_overflow(record, compressions=(8, 2))]
    for table in tables:
        pd.testing.assert_frame_equal(table(counted), table(trace), check_exact=True)
    ours, direct = analysis.by_neuron(counted), analysis.by_neuron(trace)
    pd.testing.assert_frame_equal(ours, direct, rtol=1e-6, atol=1e-7)


def test_the_strongest_neurons():
    trace, _ = make_trace(SEED, num_tokens=60)
    counted = aggregate_of(trace)
    total = np.stack([abs(trace.layer(n)).sum(axis=0) for n in range(trace.num_layers)])
    expected = sorted(np.ndindex(total.shape), key=lambda place: -total[place])[:9]
    np.testing.assert_allclose(
        [total[place] for place in analysis.strongest(counted, 9)],
        [total[place] for place in expected],
        rtol=1e-6,
    )
    counted.abs_sum[:] = 1
    assert analysis.strongest(counted, 2) == [(0, 0), (0, 1)]


def test_an_aggregate_says_what_it_did_not_count():
    counted = aggregate_of(make_trace(SEED)[0])
    for table, options, number in (
        (analysis.union_sizes, {"blocks": (16, 48)}, "block 48"),
        (analysis.tile_overflow, {"tile_n": 64}, "tile_n 64"),
        (analysis.tile_overflow, {"compressions": (32,)}, "compression 32"),
    ):
        with pytest.raises(ValueError, match=f"{number} was not counted; the aggregate has"):
            table(counted, **options)


def test_some_tokens():
    trace, mask = make_trace(SEED)
    table = analysis.passage(trace, sequence=1, num_tokens=5)
    assert table["token"].tolist() == trace.strings[16:21] and table["position"][4] == 4
    np.testing.assert_allclose(table["active"], mask[:, 16:21].sum(2).mean(0))
    np.testing.assert_array_equal(table["logprob"], trace.logprob[16:21])
    with pytest.raises(ValueError, match="no sequence 9 in the trace; it has 0 to 3"):
        analysis.passage(trace, 9, 5)
    table = analysis.firing(trace, 0, 1, 2)
    assert table[["place", "neuron"]].to_numpy().tolist() == np.argwhere(mask[0, 1:3]).tolist()
    assert table["token"].tolist() == [trace.strings[1 + place] for place in table["place"]]
    for start in (trace.num_tokens - 1, -1):
        with pytest.raises(IndexError, match="the trace has 0 to 59"):
            analysis.firing(trace, 0, start, 2)


# --- single neurons -------------------------------------------------------------------------------


def phis(first, second):
    """The correlations of the columns of two masks, [I, J]; NaN for a constant column."""
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = np.corrcoef(np.hstack([first, second]).astype(float), rowvar=False)
    return np.atleast_2d(whole)[: first.shape[1], first.shape[1] :]


@pytest.mark.parametrize("tokens", [60, 2])
@pytest.mark.parametrize("to", ["token", "position"])
def test_specific(to, tokens):
    trace, mask = make_trace(SEED, num_tokens=tokens, intermediate_size=50)
    table = analysis.specific(trace, to, min_fires=2, min_count=2).set_index(["layer", "neuron"])
    kept = trace.position > 0 if to == "token" else trace.position >= 0
    label = (trace.token_ids if to == "token" else trace.position)[kept]
    labels = np.unique(label)
    here = label[:, None] == labels
    expected = set()
    for layer in range(3):
        fires = mask[layer, kept]
        both = fires.T.astype(int) @ here
        allowed = (fires.sum(0) >= 2)[:, None] & (here.sum(0) >= 2) & (both > 0)
        correlations = np.where(allowed, phis(fires, here), -2)
        for neuron in np.flatnonzero(allowed.any(1)):
            expected.add((layer, neuron))
            row = table.loc[(layer, neuron)]
            value = int(row[to].strip("<>")) if to == "token" else row[to]
            n = np.flatnonzero(labels == value)[0]
            assert row["phi"] == pytest.approx(correlations[neuron, n], abs=1e-9, nan_ok=True)
            assert not correlations[neuron].max() > correlations[neuron, n] + 1e-9
            counts = fires[:, neuron].sum(), here[:, n].sum(), both[neuron, n]
            assert (row["fires"], row["count"], row["both"]) == counts
            shares = counts[2] / counts[0], counts[2] / counts[1]
            assert (row["share"], row["coverage"]) == pytest.approx(shares)
            assert row["lift"] == pytest.approx(shares[0] / here[:, n].mean())
    assert set(table.index) == expected and (table["phi"].diff().dropna() <= 1e-12).all()
    assert len(table) > 50 or tokens == 2
    with pytest.raises(ValueError, match="to is 'layer'; use 'token' or 'position'"):
        analysis.specific(trace, "layer")


@pytest.mark.parametrize("other", [None, 2])
def test_together(other):
    trace, mask = make_trace(SEED, intermediate_size=50)
    table = analysis.together(trace, 1, other, min_fires=2, top=10**6)
    inside = trace.position > 0
    first, second = mask[1][inside], mask[other or 1][inside]
    both = first.T.astype(int) @ second
    allowed = (first.sum(0) >= 2)[:, None] & (second.sum(0) >= 2) & (both > 0)
    if other is None:
        allowed &= np.triu(np.ones_like(allowed), 1)
    pairs = table[["neuron", "other"]].to_numpy()
    assert sorted(pairs.tolist()) == np.argwhere(allowed).tolist()
    assert set(table["layer"]) == {1} and set(table["other_layer"]) == {other or 1}
    a, b = pairs.T
    n, m, ab = first.sum(0)[a], second.sum(0)[b], both[a, b]
    columns = {"fires": n, "other_fires": m, "both": ab, "expected": n * m / inside.sum()}
    columns |= {"jaccard": ab / (n + m - ab), "phi": phis(first, second)[a, b]}
    for column, values in columns.items():
        np.testing.assert_allclose(table[column], values, atol=1e-9)
    assert table["phi"].dropna().is_monotonic_decreasing
    few = analysis.together(trace, 1, other, min_fires=2, top=5)
    pd.testing.assert_frame_equal(few, table.head(5))
    with pytest.raises(IndexError, match="layer 3 does not exist"):
        analysis.together(trace, 3)


def test_surprise(traced):
    trace, mask = traced
    table = analysis.surprise(trace, layers=[0, 2])
    np.testing.assert_allclose(table["active"], mask[[0, 2]].sum(2).mean(0))
    np.testing.assert_array_equal(table["surprise"], -trace.logprob)  # NaN at first tokens
    following = np.append(-trace.logprob[1:], np.nan)
    np.testing.assert_array_equal(table["next_surprise"], following)
    bins = analysis.by_surprise(table, bins=4)
    inside = table[table["position"] > 0]
    assert bins["n"].sum() == len(inside) and (trace.num_tokens == 1) == bins.empty
    for row in bins.itertuples():
        part = inside[inside["surprise"].between(row.low, row.high)]
        expected = len(part), part["surprise"].mean(), part["active"].mean()
        assert (row.n, row.surprise, row.active) == pytest.approx(expected)
        quartiles = part["active"].quantile([0.25, 0.75]).tolist()
        assert [row.q25, row.q75] == pytest.approx(quartiles)


def test_surprise_correlation_has_the_interval_of_blocks():
    trace, mask = make_trace(SEED, num_tokens=1600)
    trace.logprob -= 0.03 * trace.counts()[1]  # in layer 1 activity and surprise rise together
    trace.logprob[trace.position == 0] = np.nan
    table = analysis.surprise_correlation(trace, block=8).set_index(["of", "layer"])
    assert len(table) == 2 * 4
    whole = analysis.surprise(trace)
    whole = whole[whole["position"] > 0]
    for (of, layer), row in table.iterrows():
        active = mask.sum(-1).mean(0) if layer < 0 else mask[layer].sum(-1)
        pairs = pd.DataFrame({"x": active[whole.index], "y": whole[of]}).dropna()
        spearman = pairs["x"].corr(pairs["y"], method="spearman")
        assert row["n"] == len(pairs) and row["spearman"] == pytest.approx(spearman, abs=1e-9)
        assert row["low"] < row["spearman"] < row["high"]
        if layer in (0, 2):
            # 200 blocks of 7 and 8 tokens that do not depend on each other: as of single tokens.
            width = 2 * 1.96 / np.sqrt(row["n"])
            assert (row["high"] - row["low"]) / width == pytest.approx(1, abs=0.5)
    assert table.loc[("surprise", 1), "low"] > 0.3
    for tokens in (60, 1):
        few = analysis.surprise_correlation(make_trace(SEED, num_tokens=tokens)[0])
        assert few[["low", "high"]].isna().all(axis=None) and len(few) == 8


def test_repeated_tokens_are_no_more_witnesses():
    """Blocks that say the same thing many times leave the interval as wide as one of each does."""
    trace, _ = make_trace(SEED, num_tokens=16 * 60)
    again = np.repeat(np.arange(trace.num_tokens), 4)
    counts = np.diff(trace.indptr).reshape(3, -1)[:, again].reshape(-1)
    place = 1 + np.arange(len(again)) % 64
    copied = Trace(
        token_ids=trace.token_ids[again],
        strings=[trace.strings[n] for n in again],
        logprob=trace.logprob[again],
        sequence=trace.sequence[again],
        position=np.where(trace.position[again] == 0, 0, place),
        indptr=np.concatenate([[0], counts.cumsum()]),
        indices=np.zeros(counts.sum(), np.uint16),
        values=np.ones(counts.sum(), np.float32),
        intermediate_size=300,
    )
    one, four = (
        analysis.surprise_correlation(record, block=128).query("of == 'surprise'")
        for record in (trace, copied)
    )
    ratio = (four["high"] - four["low"]) / (one["high"] - one["low"])
    np.testing.assert_allclose(ratio, 1, rtol=1e-6)  # of independent tokens it would be half
