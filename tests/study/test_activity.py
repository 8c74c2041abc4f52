"""Tables of traces and aggregates against numpy on the dense mask."""

import numpy as np
import pandas as pd
import pytest
import torch

from study import analysis
from tests.factories import SEED
from tests.factories.analysis import make_trace
from tests.factories.trace import aggregate_of
from twell import Aggregate, results
from twell.sparse.formats import PackedTwELL
from twell.trace import BLOCKS, COMPRESSIONS, TILE_N


@pytest.fixture(params=[60, 1], ids=lambda tokens: f"{tokens} tokens")
def traced(request):
    return make_trace(SEED, num_tokens=request.param)


def same(table, expected):
    pd.testing.assert_frame_equal(table, expected, check_dtype=False, rtol=1e-12)


def test_layers_positions_and_neurons(traced):
    trace, mask = traced
    counts = mask.sum(2)
    expected = pd.DataFrame({"layer": range(3), "mean": counts.mean(1)})
    expected = expected.assign(median=np.median(counts, 1), p99=np.percentile(counts, 99, axis=1))
    expected = expected.assign(max=counts.max(1), dead=1 - mask.any(1).mean(1))
    expected = expected.assign(active_fraction=counts.mean(1) / 300)
    expected["max_over_mean"] = expected["max"] / expected["mean"]
    same(analysis.per_layer(aggregate_of(trace)), expected)
    groups = pd.DataFrame({"position": trace.position, "active": counts.mean(0)})
    groups = groups.groupby("position")["active"].agg(mean_active="mean", n="size")
    same(analysis.by_position(aggregate_of(trace)), groups.reset_index())


def test_blocks_and_tiles(traced):
    trace, mask = traced
    counted = aggregate_of(trace)
    table = analysis.union_sizes(counted)
    sizes = [block for block in BLOCKS if block <= trace.num_tokens]
    assert table["block"].tolist() == 3 * sizes
    for row in table.itertuples():
        whole = trace.num_tokens // row.block * row.block
        blocks = mask[row.layer, :whole].reshape(-1, row.block, 300)
        unions = blocks.any(1).sum(1)
        assert (row.mean, row.max) == pytest.approx((unions.mean(), unions.max()), rel=1e-12)
    table = analysis.tile_overflow(counted)
    assert table["compression"].tolist() == [*COMPRESSIONS] * 3
    tiles = np.pad(mask, ((0, 0), (0, 0), (0, 212))).reshape(3, -1, 2, TILE_N).sum(-1)
    for row in table.itertuples():
        over = tiles[row.layer] > TILE_N // row.compression - 1
        assert row.overflow_rows == pytest.approx(over.any(1).mean(), abs=1e-12)
    packed = PackedTwELL.pack(torch.from_numpy(mask[1]).bfloat16(), TILE_N, 16)
    (share,) = table.query("layer == 1 and compression == 16")["overflow_rows"]
    assert share == pytest.approx(len(packed.overflow_rows) / len(mask[1]))


@pytest.mark.parametrize("to", ["token", "position"])
def test_specific(to):
    trace, mask = make_trace(SEED, intermediate_size=50)
    table = analysis.specific(trace, to, min_fires=2, min_count=2)
    chosen = trace.position > 0 if to == "token" else trace.position >= 0
    label = (trace.token_ids if to == "token" else trace.position)[chosen]
    here = {value: label == value for value in np.unique(label)}
    expected = set()
    for layer, neuron in np.ndindex(3, 50):
        fires = mask[layer, chosen, neuron]
        phis = {
            value: np.corrcoef(fires, is_here)[0, 1]
            for value, is_here in here.items()
            if fires.sum() >= 2 and is_here.sum() >= 2 and (fires & is_here).any()
        }
        if not phis:
            continue
        expected.add((layer, neuron))
        (row,) = table.query(f"layer == {layer} and neuron == {neuron}").itertuples()
        value = int(row.token.strip("<>")) if to == "token" else row.position
        assert row.phi == pytest.approx(phis[value], abs=1e-9)
        assert row.phi >= max(phis.values()) - 1e-9
        both = (fires & here[value]).sum()
        assert (row.fires, row.count, row.both) == (fires.sum(), here[value].sum(), both)
        assert (row.share, row.coverage) == pytest.approx((both / row.fires, both / row.count))
        assert row.lift == pytest.approx(row.share / here[value].mean())
    assert {*zip(table["layer"], table["neuron"], strict=True)} == expected and len(table) > 50
    assert (table["phi"].diff().dropna() <= 1e-12).all()


def test_neurons_of_numbers_are_those_that_the_inspector_finds():
    counted = Aggregate.load(results.root() / "data/checkpoints/twell-6m/aggregate.npz")
    table = analysis.tells_apart(counted)
    assert table[["layer", "neuron"]].to_numpy()[:2].tolist() == [[1, 587], [1, 19]]
    assert table["phi"].is_monotonic_decreasing and 0.905 < table["phi"][0] < 0.915
    for one in analysis.examples(counted, 1, 587)[:8]:  # the strongest
        strong = one.loc[one["value"].abs() > 0.25, "token"]
        assert len(strong) and strong.str.contains(r"\d").all()


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
