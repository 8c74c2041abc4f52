"""Tables of traces and aggregates against numpy on the dense mask."""

import numpy as np
import pandas as pd
import pytest
import torch

from study import analysis
from study.analysis.activity import WHERE
from tests.factories import SEED
from tests.factories.analysis import make_trace
from tests.factories.trace import aggregate_of
from twell.sparse.formats import PackedTwELL


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
        assert (row.mean, row.max) == pytest.approx((unions.mean(), unions.max()), rel=1e-12)
    table = analysis.tile_overflow(trace, tile_n=64, compressions=(2, 8))
    assert table["compression"].tolist() == [2, 8] * 3
    tiles = np.pad(mask, ((0, 0), (0, 0), (0, 20))).reshape(3, -1, 5, 64).sum(-1)
    for row in table.itertuples():
        over = tiles[row.layer] > 64 // row.compression - 1
        assert row.overflow_rows == pytest.approx(over.any(1).mean(), abs=1e-12)
    packed = PackedTwELL.pack(torch.from_numpy(mask[1]).bfloat16(), 64, 8)
    assert table["overflow_rows"][3] == pytest.approx(float(packed.overflow.double().mean()))


@pytest.mark.parametrize("tokens", [33, 300])
def test_an_aggregate_has_the_tables_of_its_trace(tokens):
    trace, _ = make_trace(SEED, num_tokens=tokens)
    counted = aggregate_of(trace)
    tables = [analysis.per_layer, analysis.by_position, analysis.union_sizes]
    tables += [analysis.tile_overflow, lambda record: analysis.per_token(record, min_count=1)]
    tables += [lambda record: analysis.union_sizes(record, blocks=(64, 16))]
    tables += [lambda record: analysis.tile_overflow(record, compressions=(8, 2))]
    for table in tables:
        pd.testing.assert_frame_equal(table(counted), table(trace), check_exact=True)


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


def test_surprise_correlates_by_layer_with_an_interval_of_blocks():
    trace, mask = make_trace(SEED, num_tokens=1600)
    trace.logprob -= 0.03 * trace.counts()[1]  # in layer 1 activity and surprise rise together
    trace.logprob[trace.position == 0] = np.nan
    table = analysis.surprise_correlation(trace, block=8).set_index(["of", "layer"])
    known = trace.position > 0
    for layer in range(3):
        row = table.loc[("surprise", layer)]
        pairs = pd.DataFrame({"x": mask[layer].sum(-1)[known], "y": -trace.logprob[known]})
        assert row["spearman"] == pytest.approx(pairs["x"].corr(pairs["y"], method="spearman"))
        assert row["low"] < row["spearman"] < row["high"] and row["n"] == known.sum()
    assert table.loc[("surprise", 1), "low"] > 0.3


def test_the_rise_of_the_loss_around_a_word():
    before = make_trace(SEED, num_tokens=320, context=16)[0]
    random = np.random.default_rng(SEED)
    logprob = before.logprob + random.normal(0.1, 1, 320).astype(np.float32)
    word = before.strings[17]
    table = analysis.around_word(before, logprob, word).set_index("where")
    is_word = np.array(before.strings) == word
    after = np.append(False, is_word[:-1]) & (before.position > 0)
    row = table.loc[WHERE[0]]
    assert row["rise"] == pytest.approx((before.logprob - logprob)[after].mean(), abs=1e-6)
    assert row["tokens"] == after.sum() and table["tokens"].sum() == (before.position > 0).sum()
    assert row["low"] < row["rise"] < row["high"]
    with pytest.raises(ValueError, match="'nothing' does not occur"):
        analysis.around_word(before, logprob, "nothing")
