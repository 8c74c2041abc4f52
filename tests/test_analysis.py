"""Every table against slow loops over fresh random traces and hand-made logs."""

import math
import secrets

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories.analysis import (
    BY_TWO,
    COMPILED,
    DENSE,
    DENSELY,
    GOOD,
    SPARSELY,
    UNFINISHED,
    UNUSED,
    ceiling_rows,
    decode_rows,
    evaluation,
    family,
    kernel_rows,
    made,
    make_run,
    make_trace,
    model_layer_rows,
    model_rows,
    part_rows,
    scaled,
    speed_rows,
    step_rows,
    tables,
    together,
    trained,
    training_rows,
)
from tests.factories.trace import aggregate_of
from twell import analysis, results
from twell.trace import Trace


@pytest.fixture(params=[60, 1, 33], ids=lambda tokens: f"{tokens} tokens")
def traced(request):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return make_trace(seed, num_tokens=request.param)


def test_per_layer(traced):
    trace, mask = traced
    table = analysis.per_layer(trace)
    assert table["layer"].tolist() == [0, 1, 2]
    for layer, row in table.iterrows():
        counts = [int(token.sum()) for token in mask[layer]]
        assert row["mean"] == pytest.approx(sum(counts) / len(counts), rel=1e-12)
        assert row["median"] == np.median(counts)
        assert row["max"] == max(counts)
        assert row["p99"] == np.percentile(counts, 99)
        silent = sum(not mask[layer, :, neuron].any() for neuron in range(300))
        assert row["dead"] == pytest.approx(silent / 300, abs=1e-12)
        assert row["active_fraction"] == pytest.approx(row["mean"] / 300)
        if row["mean"]:
            assert row["max_over_mean"] == pytest.approx(max(counts) / row["mean"])


def test_per_token(traced):
    trace, mask = traced
    table = analysis.per_token(trace, min_count=1)
    assert table["mean_active"].is_monotonic_increasing
    expected = {}
    for at, token in enumerate(trace.token_ids.tolist()):
        expected.setdefault(token, []).append(sum(mask[layer, at].sum() for layer in range(3)) / 3)
    assert set(table["token_id"]) == set(expected)
    for row in table.itertuples():
        assert row.token == f"<{row.token_id}>"
        assert row.count == len(expected[row.token_id])
        assert row.frequency == row.count / trace.num_tokens
        assert row.mean_active == pytest.approx(sum(expected[row.token_id]) / row.count, rel=1e-12)


def test_per_token_leaves_rare_ones_out():
    trace, _ = make_trace(secrets.randbits(32))
    every = analysis.per_token(trace, min_count=1)
    half = int(every["count"].median())
    assert set(analysis.per_token(trace, min_count=half)["count"]) == {
        n for n in every["count"] if n >= half
    }
    frequent = analysis.per_token(trace, min_frequency=half / 60, min_count=1)
    assert frequent["count"].min() == min(n for n in every["count"] if n >= half)
    assert analysis.per_token(trace, min_count=61).empty


def test_by_position(traced):
    trace, mask = traced
    table = analysis.by_position(trace)
    assert table["n"].sum() == trace.num_tokens
    for row in table.itertuples():
        places = [at for at in range(trace.num_tokens) if trace.position[at] == row.position]
        assert row.n == len(places)
        assert row.mean_active == pytest.approx(
            mask[:, places].sum() / (3 * len(places)), rel=1e-12
        )


def test_by_neuron_counts_stored_zeros_as_active(traced):
    trace, mask = traced
    table = analysis.by_neuron(trace).set_index(["layer", "neuron"])
    assert len(table) == 3 * 300
    values = iter(trace.values.tolist())
    held = {}
    for layer, _, neuron in zip(*mask.nonzero(), strict=True):
        held.setdefault((layer, neuron), []).append(next(values))
    for key, row in table.iterrows():
        h = held.get(key, [])
        assert row["rate"] == len(h) / trace.num_tokens
        assert row["max_abs"] == max(map(abs, h), default=0)
        assert (
            row["mean_value"] == pytest.approx(sum(h) / len(h), rel=1e-5, abs=1e-7)
            if h
            else math.isnan(row["mean_value"])
        )
    assert (table.xs(7, level="neuron")["rate"] == 0).all()


def test_passage():
    trace, mask = make_trace(secrets.randbits(32))
    table = analysis.passage(trace, sequence=1, num_tokens=5)
    assert table["position"].tolist() == [0, 1, 2, 3, 4]
    assert table["token"].tolist() == trace.strings[16:21]
    np.testing.assert_allclose(table["active"], mask[:, 16:21].sum(2).mean(0))
    np.testing.assert_array_equal(table["logprob"], trace.logprob[16:21])
    with pytest.raises(ValueError, match="no sequence 9 in the trace; it has 0 to 3"):
        analysis.passage(trace, 9, 5)


def test_firing_lists_the_active_neurons_of_some_tokens():
    trace, mask = make_trace(secrets.randbits(32))
    table = analysis.firing(trace, 0, 1, 2)
    active = mask[0, 1:3]
    assert table[["place", "neuron"]].to_numpy().tolist() == np.argwhere(active).tolist()
    assert table["token"].tolist() == [trace.strings[1 + place] for place in table["place"]]
    with pytest.raises(IndexError, match="the trace has 0 to"):
        analysis.firing(trace, 0, trace.num_tokens - 1, 2)


def test_union_sizes(traced):
    trace, mask = traced
    table = analysis.union_sizes(trace, blocks=(1, 4, 16, 100))
    assert set(table["block"]) == {block for block in (1, 4, 16, 100) if block <= trace.num_tokens}
    for row in table.itertuples():
        starts = range(0, trace.num_tokens - row.block + 1, row.block)
        sizes = [int(mask[row.layer, start : start + row.block].any(0).sum()) for start in starts]
        assert row.mean == pytest.approx(sum(sizes) / len(sizes), rel=1e-12)
        assert row.max == max(sizes)
        whole = len(sizes) * row.block
        assert row.mean_active == pytest.approx(mask[row.layer, :whole].sum() / whole, rel=1e-12)


def test_tile_overflow(traced):
    trace, mask = traced
    table = analysis.tile_overflow(trace, tile_n=64, compressions=(2, 8))
    assert len(table) == 6
    for row in table.itertuples():
        assert row.capacity == 64 // row.compression - 1
        over = [
            [token[start : start + 64].sum() > row.capacity for start in range(0, 300, 64)]
            for token in mask[row.layer]
        ]
        assert row.overflow_rows == pytest.approx(
            sum(any(token) for token in over) / len(over), abs=1e-12
        )
        assert row.overflow_tiles == pytest.approx(np.mean(over), abs=1e-12)
    with pytest.raises(ValueError, match="compression 7 does not divide tile_n 64"):
        analysis.tile_overflow(trace, tile_n=64, compressions=(7,))


def test_an_aggregate_has_the_tables_of_its_trace(traced):
    longer = make_trace(
        secrets.randbits(32), num_tokens=1100
    )  # more than four of the largest blocks
    for trace, _ in (traced, longer):
        counted = aggregate_of(trace)
        for table in (
            analysis.per_layer,
            lambda found: analysis.per_token(found, min_count=1),
            analysis.by_position,
            analysis.union_sizes,
            lambda found: analysis.union_sizes(found, blocks=(64, 16)),
            analysis.tile_overflow,
            lambda found: analysis.tile_overflow(found, compressions=(8, 2)),
        ):
            pd.testing.assert_frame_equal(table(counted), table(trace), check_exact=True)
        ours, theirs = analysis.by_neuron(counted), analysis.by_neuron(trace)
        exact = ["layer", "neuron", "rate", "max_abs"]
        pd.testing.assert_frame_equal(ours[exact], theirs[exact], check_exact=True)
        np.testing.assert_allclose(ours["mean_value"], theirs["mean_value"], rtol=1e-6, atol=1e-7)
    assert len(analysis.union_sizes(counted)) == 3 * 5


def test_an_aggregate_says_what_it_did_not_count():
    counted = aggregate_of(make_trace(secrets.randbits(32))[0])
    with pytest.raises(
        ValueError, match="block 48 was not counted; the aggregate has 16, 32, 64, 128, 256"
    ):
        analysis.union_sizes(counted, blocks=(16, 48))
    with pytest.raises(ValueError, match="tile_n 64 was not counted; the aggregate has 256"):
        analysis.tile_overflow(counted, tile_n=64)
    with pytest.raises(
        ValueError, match="compression 32 was not counted; the aggregate has 2, 4, 8, 16"
    ):
        analysis.tile_overflow(counted, compressions=(32,))


def test_tile_overflow_is_that_of_the_format():
    from twell.sparse.formats import PackedTwELL

    trace, mask = make_trace(secrets.randbits(32))
    dense = torch.from_numpy(mask[1]).bfloat16()
    overflow = PackedTwELL.pack(dense, 64, 8).overflow.double().mean()
    table = analysis.tile_overflow(trace, tile_n=64, compressions=(8,))
    assert table.loc[table["layer"] == 1, "overflow_rows"].item() == pytest.approx(float(overflow))


# --- runs ---------------------------------------------------------------------------------------


# --- questions about neurons


def correlation(a, b):
    return np.corrcoef(a.astype(float), b.astype(float))[0, 1]


@pytest.mark.parametrize("to", ["token", "position"])
def test_specific(traced, to):
    trace, mask = traced
    table = analysis.specific(trace, to, min_fires=2, min_count=2)
    kept = trace.position > 0 if to == "token" else trace.position >= 0
    label = (trace.token_ids if to == "token" else trace.position)[kept]
    expected = {}
    for layer, neuron in np.ndindex(3, 300):
        fires = mask[layer, kept, neuron]
        known = [
            v
            for v in set(label.tolist())
            if (label == v).sum() >= 2 and (fires & (label == v)).any()
        ]
        if fires.sum() >= 2 and known:
            expected[layer, neuron] = {v: correlation(fires, label == v) for v in known}
    found = table.set_index(["layer", "neuron"])
    assert sorted(found.index) == sorted(expected)
    assert (table["phi"].diff().dropna() <= 1e-12).all()
    for (layer, neuron), row in found.iterrows():
        chosen = int(row[to].strip("<>")) if to == "token" else row[to]
        fires, here = mask[layer, kept, neuron], label == chosen
        assert row["phi"] == pytest.approx(max(expected[layer, neuron].values()), abs=1e-9)
        assert row["phi"] == pytest.approx(expected[layer, neuron][chosen], abs=1e-9)
        assert (row["fires"], row["count"], row["both"]) == (
            fires.sum(),
            here.sum(),
            (fires & here).sum(),
        )
        assert row["share"] == pytest.approx((fires & here).sum() / fires.sum())
        assert row["coverage"] == pytest.approx((fires & here).sum() / here.sum())
        assert row["lift"] == pytest.approx(row["share"] / here.mean())


def test_specific_of_what():
    trace, _ = make_trace(1)
    with pytest.raises(ValueError, match="to is 'layer'; use 'token' or 'position'"):
        analysis.specific(trace, "layer")


@pytest.mark.parametrize("other", [None, 2])
def test_together(traced, other):
    trace, mask = traced
    table = analysis.together(trace, 1, other, min_fires=2, top=10**6)
    inside = trace.position > 0
    first, second = mask[1][inside], mask[1 if other is None else other][inside]
    both = first.astype(int).T @ second.astype(int)
    enough = (first.sum(0) >= 2)[:, None] & (second.sum(0) >= 2) & (both > 0)
    if other is None:
        enough &= np.triu(np.ones_like(both, bool), 1)
    assert sorted(zip(table["neuron"], table["other"], strict=True)) == sorted(
        map(tuple, np.argwhere(enough).tolist())
    )
    assert set(table["layer"]) <= {1} and set(table["other_layer"]) <= {
        1 if other is None else other
    }
    for row in table.sample(min(len(table), 40)).itertuples():
        a, b = first[:, row.neuron], second[:, row.other]
        assert (row.fires, row.other_fires, row.both) == (a.sum(), b.sum(), (a & b).sum())
        assert row.expected == pytest.approx(a.sum() * b.sum() / len(a))
        assert row.jaccard == pytest.approx((a & b).sum() / (a | b).sum())
        if 0 < a.mean() < 1 and 0 < b.mean() < 1:
            assert row.phi == pytest.approx(correlation(a, b), abs=1e-9)
    few = analysis.together(trace, 1, other, min_fires=2, top=5)
    pd.testing.assert_frame_equal(few, table.head(5))
    with pytest.raises(IndexError, match="layer 3 does not exist"):
        analysis.together(trace, 3)


def test_surprise(traced):
    trace, mask = traced
    table = analysis.surprise(trace, layers=[0, 2])
    for token, row in table.iterrows():
        assert row["active"] == pytest.approx(mask[[0, 2], token].sum(-1).mean())
        first = trace.position[token] == 0
        assert math.isnan(row["surprise"]) if first else row["surprise"] == -trace.logprob[token]
        last = token + 1 == trace.num_tokens or trace.sequence[token + 1] != trace.sequence[token]
        assert (
            math.isnan(row["next_surprise"])
            if last
            else row["next_surprise"] == -trace.logprob[token + 1]
        )


def test_surprise_correlation_has_the_interval_of_blocks():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    trace, mask = make_trace(seed, num_tokens=1600)
    trace.logprob -= 0.03 * trace.counts()[1]  # in layer 1 activity and surprise rise together
    trace.logprob[trace.position == 0] = np.nan
    table = analysis.surprise_correlation(trace, block=8).set_index(["of", "layer"])
    assert len(table) == 2 * 4
    whole = analysis.surprise(trace)
    kept = whole[whole["position"] > 0]
    for (of, layer), row in table.iterrows():
        active = mask.sum(-1).mean(0) if layer < 0 else mask[layer].sum(-1)
        pairs = pd.DataFrame({"x": active[kept.index], "y": kept[of]}).dropna()
        assert row["n"] == len(pairs)
        assert row["spearman"] == pytest.approx(
            pairs["x"].corr(pairs["y"], method="spearman"), abs=1e-9
        )
        assert row["low"] < row["spearman"] < row["high"]
        if layer in (1, -1):
            continue
        # 200 blocks of 7 and 8 tokens that do not depend on each other: nearly the interval of single tokens.
        assert (row["high"] - row["low"]) / (2 * 1.96 / math.sqrt(row["n"])) == pytest.approx(
            1, abs=0.5
        )
    assert table.loc[("surprise", 1), "low"] > 0.3
    few = analysis.surprise_correlation(make_trace(seed, num_tokens=60)[0], block=64)
    assert few[["low", "high"]].isna().all(axis=None)


def test_repeated_tokens_are_no_more_witnesses():
    """Blocks that say the same thing many times leave the interval as wide as one of each does."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    trace, _ = make_trace(seed, num_tokens=16 * 60)
    again = np.repeat(np.arange(trace.num_tokens), 4)
    counts = np.diff(trace.indptr).reshape(3, -1)[:, again].reshape(-1)
    copied = Trace(
        token_ids=trace.token_ids[again],
        strings=[trace.strings[n] for n in again],
        logprob=trace.logprob[again],
        sequence=trace.sequence[again],
        position=np.where(trace.position[again] == 0, 0, 1 + np.arange(len(again)) % 64),
        indptr=np.concatenate([[0], counts.cumsum()]),
        indices=np.zeros(counts.sum(), np.uint16),
        values=np.ones(counts.sum(), np.float32),
        intermediate_size=300,
    )
    one, four = (
        analysis.surprise_correlation(t, block=128).query("of == 'surprise'")
        for t in (trace, copied)
    )
    ratio = (four["high"] - four["low"]) / (one["high"] - one["low"])
    np.testing.assert_allclose(
        ratio, 1, rtol=1e-6
    )  # of tokens that count one by one it would be half


def test_by_surprise(traced):
    trace, _ = traced
    table = analysis.by_surprise(analysis.surprise(trace), bins=4)
    whole = analysis.surprise(trace)
    whole = whole[(whole["position"] > 0) & whole["surprise"].notna()]
    assert table["n"].sum() == len(whole) and (trace.num_tokens == 1) == table.empty
    for row in table.itertuples():
        inside = whole[whole["surprise"].between(row.low, row.high)]
        assert row.n == len(inside) and row.surprise == pytest.approx(inside["surprise"].mean())
        assert row.active == pytest.approx(inside["active"].mean())
        assert row.q25 == pytest.approx(inside["active"].quantile(0.25)) and row.q25 <= row.q75
    assert table["n"].max() - table["n"].min() <= 1 if len(table) else True


DEAD = make_run("dead", 1e-1, 4.8, 4.8, (1, 0.009))
DEAD_TOO = make_run("dead-too", 2e-1, 4.8, 5.8, (1, 0.5), (0.5, 1.0))


def test_sweep():
    table = analysis.sweep(*tables(DEAD_TOO, DEAD, GOOD, UNFINISHED, UNUSED, DENSE))
    assert table["run"].tolist() == ["dense", "good", "unused", "dead", "dead-too"]
    assert table["status"].tolist() == ["alive", "alive", "unused", "dead layer", "dead layer"]
    good = table.set_index("run").loc["good"]
    assert good["cross_entropy"] == 4.04
    assert good["ffn_gain"] == pytest.approx(0.96)
    assert good["active"] == 2
    assert good["active_fraction"] == 0.02
    assert good["active_init"] == 50.5
    assert good["fall"] == 50.5 / 2
    assert good["cross_entropy_change"] == pytest.approx(1.0)
    assert good["min_layer_active"] == 1
    assert good["dead_fraction"] == pytest.approx(0.3)
    assert good["dead_fraction_train"] == 0.5
    assert good["tokens"] == 1000
    assert math.isnan(table.set_index("run").loc["dense", "dead_fraction_train"])


def test_sweep_without_a_baseline_has_no_price():
    table = analysis.sweep(*tables(GOOD, UNUSED))
    assert table["cross_entropy_change"].isna().all()
    assert analysis.recommended(analysis.levels(table))["run"] == "good"


def test_sweep_does_not_call_a_run_alive_whose_gain_is_unknown():
    run = make_run("nan", 1e-3, math.nan, 5.0, (3, 3))
    assert analysis.sweep(*tables(DENSE, run))["status"].tolist() == ["alive", "unused"]


def test_sweep_refuses_what_cannot_be_compared():
    with pytest.raises(ValueError, match="none of the 1 runs is complete: unfinished"):
        analysis.sweep(*tables(UNFINISHED))
    runs, log = tables(DENSE, GOOD)
    runs.loc[1, "num_layers"] = 3
    with pytest.raises(ValueError, match="one model and token budget"):
        analysis.sweep(runs, log)


def test_levels_are_means_over_seeds_with_their_noise():
    again = make_run("good-again", 1e-3, 4.08, 5.0, (1, 7))
    worse = make_run("worse", 1e-2, 4.5, 5.0, (1, 2))
    table = analysis.levels(
        analysis.sweep(*tables(DENSE, GOOD, again, UNUSED, worse, DEAD))
    ).set_index("l1_coefficient")
    good, noisy = table.loc[1e-3], table.loc[1e-2]
    assert (good["runs"], good["status"], good["run"], good["tokens"]) == (2, "alive", "good", 1000)
    assert good["cross_entropy"] == pytest.approx(4.06) and good["active"] == 3
    assert good["cross_entropy_std"] == pytest.approx(0.04 / math.sqrt(2))
    assert good["cross_entropy_change_std"] == pytest.approx(1 / math.sqrt(2))
    assert good["active_std"] == pytest.approx(math.sqrt(2))
    assert noisy["status"] == "unused" and noisy["runs"] == 2  # one of two is
    assert math.isnan(table.loc[0, "cross_entropy_std"]) and table.loc[0, "runs"] == 1
    assert list(table.index) == sorted(table.index)


def test_names_of_levels():
    assert [*map(analysis.level_name, (0, 2e-5, 1.5e-4, 6e-4, 0.001, 0.1, 0.3))] == [
        *("0", "2e-5", "1.5e-4", "6e-4", "1e-3", "0.1", "0.3")
    ]


def test_recommended_is_the_sparsest_that_is_alive_and_cheap():
    dear = make_run("dear", 5e-3, 4.2, 5.0, (1, 1))
    denser = make_run("denser", 5e-4, 4.01, 5.0, (9, 9))
    table = analysis.levels(analysis.sweep(*tables(DENSE, denser, GOOD, dear, UNUSED, DEAD)))
    assert analysis.recommended(table)["run"] == "good"
    assert analysis.recommended(table, max_price=6)["run"] == "dear"
    assert analysis.recommended(table, max_price=0.1)["run"] == "denser"  # none is: the cheapest
    with pytest.raises(ValueError, match="no level above 0 is alive; the levels are 0, 1e-2"):
        analysis.recommended(analysis.levels(analysis.sweep(*tables(DENSE, UNUSED))))


def test_the_line_through_the_levels():
    table = pd.DataFrame(
        {"active_fraction": [0.4, 0.1, 0.025, 0.001], "cross_entropy_change": [0.0, 1.0, 5.0, 0.1]}
    )
    table["status"] = ["alive", "alive", "alive", "unused"]
    assert analysis.price_at(table, 0.1) == pytest.approx(1.0)
    assert analysis.price_at(table, 0.05) == pytest.approx(3.0)  # half way in logarithms
    assert analysis.price_at(table, 0.2) == pytest.approx(0.5)
    assert math.isnan(analysis.price_at(table, 0.5)) and math.isnan(analysis.price_at(table, 0.01))
    assert analysis.activity_at(table, 3.0) == pytest.approx(0.05)
    assert analysis.activity_at(table, 1.0) == pytest.approx(0.1)
    assert analysis.activity_at(table, 9.0) == pytest.approx(0.025)
    assert math.isnan(analysis.activity_at(table, -1.0))
    assert math.isnan(analysis.price_at(table[:0], 0.1)) and math.isnan(
        analysis.activity_at(table[:0])
    )
    # A dip: the sparsest place that is cheap enough counts, not what lies between.
    dip = table.assign(cross_entropy_change=[0.0, 3.0, 1.0, 0.0])
    assert analysis.activity_at(dip, 2.0) == pytest.approx(0.025)


def test_training_curves():
    runs, log = tables(GOOD, DENSE)
    curves = analysis.training_curves(runs, log, "active_mean")
    assert curves["run"].tolist() == ["dense"] * 3 + ["good"] * 3
    assert curves["l1_coefficient"].tolist() == [0.0] * 3 + [1e-3] * 3
    assert curves["step"].tolist() == [2, 4, 10] * 2
    assert curves["tokens"].tolist() == [200, 400, 1000] * 2
    assert curves["value"].tolist() == [20.5, 40.5, 100.5] * 2
    valid = analysis.training_curves(runs, log, "cross_entropy", split="valid")
    assert valid["value"].tolist() == [9.0, 99.0, 4.0, 9.0, 99.0, 4.04]
    only = analysis.training_curves(runs[runs["run"] == "good"], log, "dead_fraction")
    assert only["value"].tolist() == [0.1, 0.3, 0.5]
    assert analysis.training_curves(*tables(DENSE), "dead_fraction").empty
    with pytest.raises(
        ValueError, match="no run logged 'actve'; the log has active_mean, cross_entropy"
    ):
        analysis.training_curves(runs, log, "actve")


def test_runs_in_a_list():
    runs, log = tables(GOOD, UNFINISHED, DENSE)
    runs = runs.assign(parameters=[10, 20, 30], seed=[1, 2, 3], device="here")
    speed = pd.DataFrame(
        {"run": "good", "step": [1, 2, 3], "split": "train", "metric": "tokens_per_second"}
    )
    log = pd.concat([log, speed.assign(value=[5.0, 1.0, 7.0])], ignore_index=True)
    table = analysis.list_runs(runs, log).set_index("run")
    assert list(table.index) == ["dense", "good", "unfinished"]
    good = table.loc["good"]
    assert (good["parameters"], good["tokens"], good["l1_coefficient"], good["seed"]) == (
        10,
        1000,
        1e-3,
        1,
    )
    assert (good["cross_entropy"], good["active"], good["active_fraction"]) == (4.04, 2, 0.02)
    assert good["dead_fraction"] == pytest.approx(0.3) and good["tokens_per_second"] == 5
    assert (
        math.isnan(table.loc["dense", "tokens_per_second"])
        and not table.loc["unfinished", "complete"]
    )
    with pytest.raises(
        ValueError,
        match="unfinished has no parameters in config.yaml and provenance.json; put back",
    ):
        analysis.list_runs(runs.assign(parameters=[10, None, 30]), log)


def test_settles_after():
    curve = pd.DataFrame({"tokens": [40, 10, 20, 30], "value": [10.0, 50.0, 12.0, 8.5]})
    assert analysis.settles_after(curve) == 0.5  # 12 is within 20% of 10
    assert analysis.settles_after(curve, within=0.1) == 1.0  # 8.5 is not within 10%
    assert analysis.settles_after(curve, within=5) == 0.25


def test_layers_as_a_log_has_them():
    _, log = tables(GOOD)
    more = {"run": "good", "tokens": 1000, "split": "valid"}
    rows = [
        (10, layer, metric, value)
        for layer in (0, 1)
        for metric, value in (("active_p99", 7.0), ("active_max", 9.0))
    ]
    rows += [(5, 0, "active_p99", 70.0), (5, 0, "active_max", 90.0)]
    more = (
        pd.DataFrame(rows, columns=["step", "layer", "metric", "value"])
        .assign(**more)
        .astype({"layer": "Int64"})
    )
    table = analysis.logged_layers(pd.concat([log, more], ignore_index=True), 100)
    assert (
        table["layer"].tolist() == [0, 1]
        and table["mean"].tolist() == [3, 1]
        and table["max"].tolist() == [9, 9]
    )
    assert table["p99"].tolist() == [7, 7] and table["dead"].tolist() == [0.2, 0.4]
    assert table["active_fraction"].tolist() == [0.03, 0.01] and table[
        "max_over_mean"
    ].tolist() == [3, 9]
    with pytest.raises(ValueError, match="no validation"):
        analysis.logged_layers(log[log["split"] == "train"], 100)


# --- choices of training and sizes ----------------------------------------------------------------


def test_a_choice_is_read_from_the_configuration():
    fields = [
        {},
        {"activation": "silu"},
        {"gated": False},
        {"reinit": 0.1},
        {"l1_zero_steps": 5},
        {"l1_warmup_steps": 5},
        {"balance_every": 1},
        {"gated": False, "reinit": 0.2, "balance_every": 0},
        {
            "activation": "relu",
            "gated": True,
            "reinit": 0.0,
            "l1_zero_steps": 0,
            "l1_warmup_steps": 0,
            "seed": 3,
        },
    ]
    names = [
        "recipe",
        "SiLU",
        "non-gated",
        "re-initialisation",
        "L1 warm-up",
        "L1 warm-up",
        "balanced columns",
    ]
    names += ["non-gated + re-initialisation", "recipe"]
    assert (
        analysis.choice(pd.DataFrame(fields)).tolist() == names
    )  # fields that others have are NaN here
    assert [analysis.choice(pd.DataFrame([field], [7]))[7] for field in fields] == names


def test_a_sweep_refuses_other_choices_and_settings():
    reinit = make_run("reinit", 1e-3, 4.0, 5.0, (3, 1), reinit=0.1)
    with pytest.raises(
        ValueError,
        match=r"one choice; .* several: recipe \(dense\), re-initialisation \(reinit\); see",
    ):
        analysis.sweep(*tables(DENSE, reinit))
    both = tables(
        make_run("a", 1e-3, 4.0, 5.0, (3, 1), learning_rate=1e-3),
        make_run("b", 0.0, 4.0, 5.0, (3, 1)),
    )
    assert len(analysis.sweep(*both)) == 2  # the second is older than the field
    runs, log = tables(
        *(
            make_run(name, 0.0, 4.0, 5.0, (3, 1), learning_rate=rate)
            for name, rate in (("a", 1), ("b", 2))
        )
    )
    with pytest.raises(ValueError, match=r"these differ in learning_rate: 1 \(a\), 2 \(b\)"):
        analysis.sweep(runs, log)
    analysis.sweep(runs.assign(learning_rate=1, seed=[0, 1], backend=["dense", "triton"]), log)
    twice = [
        make_run(name, 1e-3, 4.0, 5.0, (3, 1), reinit=share)
        for name, share in (("a", 0.1), ("b", 0.2))
    ]
    with pytest.raises(ValueError, match="these differ in reinit"):
        analysis.sweep(*tables(*twice))


def test_choices_are_beside_the_recipe():
    table = analysis.choices(*tables(*family())).set_index("run")
    assert table["choice"].unique().tolist()[0] == "recipe" and "l1-c-0" not in table.index
    assert table.loc["silu-0", "cross_entropy_change"] == pytest.approx(
        -1
    )  # over the recipe at L1 = 0
    assert table.loc["wide-a", "cross_entropy_change"] == pytest.approx(1.1)
    assert (
        table.loc["wide-a", "active_fraction"] == 0.02
        and table.loc["ours", "active_fraction"] == 0.02
    )
    levels = analysis.levels(analysis.choices(*tables(*family()))).set_index(
        ["choice", "l1_coefficient"]
    )
    assert (
        levels.loc[("recipe", 1e-3), "runs"] == 2
        and levels.loc[("re-initialisation", 1e-3), "runs"] == 2
    )
    assert (
        levels.loc[("recipe", 1e-3), "active"] == pytest.approx(2)
        and levels.loc[("SiLU", 0.0), "active"] == 100
    )
    longer = make_run("longer", 0.0, 4.0, 5.0, (1, 1), activation="silu", tokens=2000)
    with pytest.raises(
        ValueError, match="one size and token budget; these differ in tokens: 1000 .*, 2000"
    ):
        analysis.choices(*tables(*family(), longer))
    assert analysis.choices(*tables(UNFINISHED)).empty
    assert analysis.choices(pd.DataFrame(), pd.DataFrame()).empty


def test_the_level_of_most_runs_is_compared():
    assert analysis.compared_level(analysis.choices(*tables(*family()))) == 1e-3
    assert (
        analysis.compared_level(analysis.choices(*tables(DENSE, UNUSED, GOOD))) == 1e-3
    )  # the lowest of equals
    assert math.isnan(analysis.compared_level(analysis.choices(*tables(DENSE))))


def test_noise_is_pooled_over_settings():
    table = pd.DataFrame({"choice": ["recipe"] * 6 + ["SiLU"] * 2 + ["other"]})
    table["l1_coefficient"] = [0, 0, 0, 1, 1, 2, 0, 0, 0]
    table["cross_entropy_change"] = [1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 4.0, 8.0, 1.0]
    table["active_fraction"] = [0.1, 0.2, 0.4, 0.03, 0.03, 0.5, 0.99999, 1.0, 0.9]
    table["dead_fraction_train"] = [0.0, 0.0, 0.0, 0.25, 0.75, np.nan, 0.0, 0.5, 0.1]
    deviation, freedom = analysis.seed_noise(table, "cross_entropy_change")
    assert freedom == 4 and deviation == pytest.approx(math.sqrt((2 * 1 + 1 * 2 + 1 * 8) / 4))
    deviation, freedom = analysis.seed_noise(table, "active_fraction")
    assert freedom == 2 and deviation == pytest.approx(
        math.log(2)
    )  # neither SiLU nor runs that are all equal
    deviation, freedom = analysis.seed_noise(table, "dead_fraction_train")
    assert freedom == 1 and deviation == pytest.approx(0.5 / math.sqrt(2))
    # Student's t: 2.776445 at 97.5% with four degrees of freedom.
    limit = analysis.noise_limit(table, "cross_entropy_change", 3, 1)
    assert limit == pytest.approx(2.776445 * math.sqrt(3) * math.sqrt(1 + 1 / 3), rel=1e-6)
    assert math.isnan(analysis.noise_limit(table, "cross_entropy_change", 0, 3))
    alone = table.drop_duplicates(["choice", "l1_coefficient"])
    assert analysis.seed_noise(alone, "cross_entropy_change")[1] == 0
    assert math.isnan(analysis.noise_limit(alone, "cross_entropy_change", 3, 3))


def test_a_difference_is_one_only_above_the_noise():
    table = analysis.choices(*tables(*family()))
    price, recipe = "cross_entropy_change", ("recipe", 0.0)
    # One setting with two seeds that differ: 0.4 / sqrt(2); the others are equal and left out.
    limit = 12.7062047 * 0.4 / math.sqrt(2)
    found = analysis.contrast(table, price, ("SiLU", 0.0), recipe)
    assert (found["runs"], found["other_runs"]) == (2, 2) and found["difference"] == pytest.approx(
        -1
    )
    assert found["limit"] == pytest.approx(limit) and found["verdict"] == "within noise"
    assert analysis.contrast(table, price, ("recipe", 3e-3), recipe)["limit"] == pytest.approx(
        limit * math.sqrt(1.5)
    )
    for change, verdict in ((3.7, "more"), (-3.7, "less"), (3.5, "within noise")):
        other = table.assign(
            cross_entropy_change=table[price].where(table["choice"] != "SiLU", change)
        )
        assert analysis.contrast(other, price, ("SiLU", 0.0), recipe)["verdict"] == verdict
    assert analysis.contrast(table, price, ("SiLU", 1e-3), recipe)["verdict"] == ""
    single = table.drop_duplicates(["choice", "l1_coefficient"])
    assert analysis.contrast(single, price, ("SiLU", 0.0), recipe)["verdict"] == "no seeds"
    found = analysis.contrast(table, "active_fraction", ("L1 warm-up", 1e-3), ("recipe", 1e-3))
    assert found["difference"] == pytest.approx(300) and found["verdict"] == "more"
    assert found["limit"] == pytest.approx(
        100 * math.expm1(12.7062047 * math.log(2.02 / 1.98) / math.sqrt(2)), rel=1e-6
    )
    rows = analysis.contrasts(table).set_index(["choice", "l1_coefficient", "quantity"])
    assert len(rows) == 3 * 6 and "recipe" not in rows.index.get_level_values(0)
    dead = rows.loc[("re-initialisation", 1e-3, "dead neurons, %")]
    assert (dead["value"], dead["other"], dead["difference"]) == pytest.approx((0.5, 40, -39.5))
    assert dead["verdict"] == "no seeds"  # no setting's dead neurons differ between seeds


def test_choices_beside_the_line_of_the_recipe():
    rows = analysis.against_frontier(
        analysis.choices(*tables(*family(warm_active=math.sqrt(2 * 20))))
    ).set_index("choice")
    assert set(rows.index) == {"L1 warm-up", "re-initialisation", "balanced columns"}
    limit = 12.7062047 * 0.4 / math.sqrt(2)
    warm, ours = rows.loc["L1 warm-up"], rows.loc["balanced columns"]
    assert warm["line_price"] == pytest.approx(0.5) and warm["difference"] == pytest.approx(
        0.4
    )  # half way in logarithms
    assert (
        warm["line_dead"] == pytest.approx(0.2)
        and warm["dead"] == 0
        and warm["verdict"] == "within noise"
    )
    assert warm["limit"] == pytest.approx(
        limit * math.sqrt(1 / 2 + 2 * 0.5**2 / 2)
    )  # two seeds at both ends
    assert ours["line_active_fraction"] == pytest.approx(0.2 * 0.1**0.25)
    dense = made("dense too", 0.0, 0.0, 40.0, 0.0, balance_every=1)
    outside = (
        analysis.against_frontier(analysis.choices(*tables(*family(), dense)))
        .query("l1_coefficient == 0")
        .iloc[0]
    )
    assert math.isnan(outside["line_price"]) and outside["verdict"] == ""
    sparser = made("sparser", 3e-3, 2.0, math.sqrt(2), 10.0, balance_every=1)
    row = (
        analysis.against_frontier(analysis.choices(*tables(*family(), sparser)))
        .query("l1_coefficient == 3e-3")
        .iloc[0]
    )
    assert row["limit"] == pytest.approx(
        limit * math.sqrt(1 + 0.5**2 / 1 + 0.5**2 / 2)
    )  # between one run and two
    # A level whose feed-forward layers are unused is no end of the line.
    sparser = made("sparser", 3e-3, 2.0, 0.5, 10.0, balance_every=1)
    unused = make_run("unused", 1e-2, 4.4, 4.41, (0.1, 0.1), window=(0.9,))
    row = analysis.against_frontier(analysis.choices(*tables(*family(), sparser, unused))).query(
        "l1_coefficient == 3e-3"
    )
    assert row[["line_price", "line_dead"]].isna().all(axis=None)
    assert analysis.against_frontier(analysis.choices(pd.DataFrame(), pd.DataFrame())).empty


def test_tables_of_choices_beside_the_papers():
    paper, table = results.paper(), analysis.choices(*tables(*family()))
    third = analysis.choice_table(paper, table, "Table 3").set_index(["choice", "paper_l1"])
    assert third["paper_cross_entropy"].tolist() == [2.255, 2.24, 2.297] and third[
        "l1"
    ].tolist() == [0, 0, 1e-3]
    assert third.loc[
        ("SiLU", 0), ["paper_accuracy", "paper_active", "runs", "active"]
    ].tolist() == [47.1, 5632, 2, 100]
    assert third.loc[("recipe", 2e-5), ["change", "active", "dead"]].tolist() == pytest.approx(
        [1.0, 2.0, 40.0]
    )
    assert third.loc[("recipe", 0), "cross_entropy_std"] == pytest.approx(4 * 0.004 / math.sqrt(2))
    fourth = analysis.choice_table(paper, table, "Table 4").set_index(["choice", "paper_l1"])
    assert fourth["paper_accuracy"].tolist() == [46.36, 46.2, 44.83, 46.57, 46.46, 44.71]
    assert fourth["change"].tolist() == pytest.approx([0, 1, np.nan, 0.1, 1.1, np.nan], nan_ok=True)
    fifth = analysis.choice_table(paper, table, "Table 5").set_index("choice")
    assert fifth.loc["L1 warm-up", ["paper_l1", "paper_active", "l1", "active"]].tolist() == [
        3e-4,
        108,
        1e-3,
        8,
    ]
    assert fifth.loc[
        "re-initialisation", ["paper_cross_entropy", "dead"]
    ].tolist() == pytest.approx([2.298, 0.5])
    nothing = analysis.choice_table(
        paper, analysis.choices(pd.DataFrame(), pd.DataFrame()), "Table 5"
    )
    assert nothing["l1"].isna().all() and nothing["paper_active"].tolist() == [911, 29, 29, 108]
    with pytest.raises(ValueError, match="'Table 6' is no table of choices"):
        analysis.choice_table(paper, table, "Table 6")


def test_runs_with_a_remedy():
    runs, log = tables(*family(), made("unfinished", 1e-3, 1, 2, 3, reinit=0.1, complete=False))
    names = ["l1-a-0", "l1-a-1", "reinit-0", "reinit-1", "warm-0", "warm-1"]
    assert analysis.remedied(runs, 1e-3)["run"].tolist() == names
    assert analysis.remedied(runs, 3e-3).empty and analysis.remedied(runs[:0], 1e-3).empty
    curves = analysis.training_curves(analysis.remedied(runs, 1e-3), log, "dead_fraction")
    assert curves.groupby("choice")["run"].nunique().tolist() == [2, 2, 2]


def test_sizes():
    runs = [
        scaled("a", 10, 0, 0, 20),
        scaled("b", 10, 1e-3, 1.0, 5),
        scaled("c", 40, 0, 0, 20, width=200),
    ]
    runs += [scaled("d", 40, 1e-3, 1.5, 6, width=200), scaled("e", 40, 3e-3, 9, 1, width=200)]
    runs += [
        scaled("f", 90, 1e-3, 1, 4, width=400),
        scaled("g", 99, 0, 0, 20),
        scaled("h", 10, 1e-3, 1, 2, reinit=0.1),
    ]
    runs += [scaled("i", 90, 0, 0, 50, width=400, complete=False)]
    table = analysis.sizes(*tables(*runs))
    assert (
        table["parameters"].tolist() == [10, 40, 90]
        and table["l1_coefficient"].tolist() == [1e-3] * 3
    )
    assert table["active"].tolist() == [5, 6, 4] and table["active_fraction"].tolist() == [
        0.05,
        0.03,
        0.01,
    ]
    assert table["change"].tolist() == pytest.approx([1.0, 1.5, np.nan], nan_ok=True)
    assert table["tokens"].tolist() == [200, 800, 1800] and table["runs"].tolist() == [1, 1, 1]
    assert analysis.sizes(*tables(runs[3], runs[4]))["active"].tolist() == [
        6
    ]  # of levels as frequent the lowest
    assert (
        analysis.sizes(pd.DataFrame(), pd.DataFrame()).empty
        and analysis.sizes(*tables(runs[0], runs[-1])).empty
    )


def test_the_papers_sizes():
    table = analysis.paper_sizes(results.paper())
    assert table["model"].tolist() == ["0.5B", "1B", "1.5B", "2B"] and table["tokens"].tolist() == [
        1e10,
        2e10,
        3e10,
        4e10,
    ]
    assert table["active"].tolist() == pytest.approx([39, np.nan, 29, 24], nan_ok=True)
    assert table["change"].dropna().tolist() == pytest.approx([100 * (2.297 / 2.255 - 1)])
    assert (table["accuracy"] - table["accuracy_dense"]).round(1).tolist() == [0.0, 0.1, -0.2, -0.3]


def test_one_training_computed_in_several_ways():
    unfinished = trained("c-unfinished", [1, 1], [1, 1], [1, 1], "auto", complete=False, tokens=400)
    table = analysis.computed_otherwise(*tables(SPARSELY, BY_TWO, unfinished, DENSELY)).set_index(
        "run"
    )
    assert table.index.tolist() == [
        "dense",
        "a-sparse",
        "b-two",
    ]  # fewest devices first, then dense
    assert table["way"].tolist() == [
        "dense, 1 device",
        "sparse kernels, 1 device",
        "sparse kernels, 2 devices",
    ]
    assert table["devices"].tolist() == [1, 1, 2] and table["backend"].tolist() == [
        "dense",
        "triton",
        "triton",
    ]
    assert table["cross_entropy"].tolist() == [4, 4.1, 4.2] and table["active"].tolist() == [
        5,
        5,
        5,
    ]
    assert table["apart"].tolist() == [0, 0.5, 0.5] and table["apart_mean"].tolist() == [
        0,
        0.25,
        0.1875,
    ]
    # Of four rows the last two are the second half.
    assert table["tokens_per_second"].tolist() == [20, 50, 95] and table[
        "peak_memory"
    ].tolist() == [500, 400, 200]
    assert (
        table["peak_memory_whole"].tolist() == [800, 900, 600]
        and table["vocab_size"].tolist() == [16_384] * 3
    )
    pair = analysis.computed_otherwise(*tables(SPARSELY, DENSELY))
    assert pair["way"].tolist() == ["dense", "sparse kernels"]
    alone = analysis.computed_otherwise(*tables(BY_TWO))
    assert alone["way"].tolist() == ["sparse kernels, 2 devices"] and alone["apart"].tolist() == [0]
    sharded = "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 -m twell train"
    assert analysis.computed_otherwise(*tables(trained("s", [8], [1], command=sharded)))[
        "devices"
    ].tolist() == [4]
    curves = analysis.computed_curves(*tables(SPARSELY, unfinished))
    assert set(curves["run"]) == {"a-sparse"} and curves["metric"].value_counts().tolist() == [
        4,
        4,
        4,
    ]
    speeds = curves[curves["metric"] == "tokens_per_second"]
    assert speeds["value"].tolist() == [10, 20, 60, 40] and speeds["tokens"].tolist() == [
        100,
        200,
        300,
        400,
    ]


def test_a_training_on_a_cpu_has_no_memory_and_none_has_no_rows():
    runs = [trained("a", [8, 4], [10, 20], backend="reference"), trained("b", [8, 4], [30, 40])]
    table = analysis.computed_otherwise(*tables(*runs))
    assert table["run"].tolist() == ["b", "a"] and table["way"].tolist() == ["dense", "reference"]
    assert table["tokens_per_second"].tolist() == [40, 20]
    assert table[["peak_memory", "peak_memory_whole"]].isna().all(axis=None)
    assert table["peak_memory"].dtype.kind == table["peak_memory_whole"].dtype.kind == "f"
    half = analysis.computed_otherwise(*tables(runs[0], trained("b", [8, 4], [30, 40], [5, 6])))
    assert half["peak_memory"].tolist() == pytest.approx([6, np.nan], nan_ok=True)
    columns = analysis.computed_otherwise(*tables(*runs)).columns.tolist()
    nothing = (
        pd.DataFrame(columns=["run", "complete"]),
        pd.DataFrame(columns=["run", *results.LOG_COLUMNS]),
    )
    unfinished = tables(trained("c", [8, 4], [1, 1], complete=False))
    for none in (nothing, unfinished, (pd.DataFrame(), pd.DataFrame())):
        table, curves = analysis.computed_otherwise(*none), analysis.computed_curves(*none)
        assert table.empty and table.columns.tolist() == columns
        assert curves.empty and curves.columns.tolist() == [
            "run",
            "metric",
            "step",
            "tokens",
            "value",
        ]


def test_only_rows_of_the_same_steps_are_compared():
    """A row is the mean over the steps since the last one, so at the same step it may be of others."""
    fine = trained("fine", [8, 7, 6, 5], [1, 1, 2, 4])
    coarse = trained("sparse", [7.5, 5.25], [2, 8], backend="triton", every=2)
    table = analysis.computed_otherwise(*tables(fine, coarse))
    assert table[["apart", "apart_mean"]].iloc[1].isna().all() and table[
        "tokens_per_second"
    ].tolist() == [3, 8]
    config, log = trained("sparse", [8.5, 7, 5.5, 5.25], [1, 1, 1, 1], backend="triton")
    table = analysis.computed_otherwise(
        *tables(fine, (config, log[log["step"] != 2]))
    )  # row 3 is now of steps 2 and 3
    assert table["apart"].tolist() == [0, 0.5] and table["apart_mean"].tolist() == [0, 0.375]


def test_what_sets_computed_runs_apart_is_said_or_refused():
    shared = {"micro_batch": 8, "compile": True, "log_every": 1}
    other = shared | {"micro_batch": None, "log_every": 2, "commit": "abc"}
    runs = [
        trained("a", [8, 4], [1, 1], **shared),
        trained("b", [8, 4], [1, 1], backend="auto", **other),
    ]
    assert analysis.computed_otherwise(*tables(*runs))["way"].tolist() == [
        "dense, micro_batch 8",
        "auto, micro_batch none",
    ]
    runs[1] = trained("b", [8, 4], [1, 1], **(shared | {"compile": False}))
    assert analysis.computed_otherwise(*tables(*runs))["way"].tolist() == [
        "dense, compile 1",
        "dense, compile 0",
    ]
    for field, value in {
        "seed": 1,
        "l1_coefficient": 2e-3,
        "batch_tokens": 200,
        "device": "another GPU",
    }.items():
        runs[1] = trained("b", [8, 4], [1, 1], **{field: value})
        with pytest.raises(
            ValueError, match=rf"has one configuration.*; these differ in {field}: .*{value} \(b\)"
        ):
            analysis.computed_otherwise(*tables(trained("a", [8, 4], [1, 1]), runs[1]))


def test_tables_to_be_read():
    table = pd.DataFrame(
        {"l1_coefficient": [6e-4, np.nan], "paper_l1": [np.nan, 2e-5], "value": [123.456, -1e-12]}
    )
    table = table.assign(nothing=np.nan, name=["a", "b"], half=[np.nan, 0.5], number=[1, 2])
    found = analysis.readable(table)
    assert found.columns.tolist() == [
        "l1_coefficient",
        "paper_l1",
        "value",
        "name",
        "half",
        "number",
    ]
    assert found.to_numpy().tolist() == [
        ["6e-4", "–", "123.5", "a", "–", 1],
        ["–", "2e-5", "0", "b", "0.5", 2],
    ]
    assert table["value"].tolist() == [123.456, -1e-12] and analysis.readable(table[:0]).empty


# --- formats ------------------------------------------------------------------------------------


def test_format_cells_show_what_is_packed():
    random = np.random.default_rng(secrets.randbits(32))
    dense = (random.random((7, 20)) < 0.2).astype(
        np.float32
    )  # the last of three tiles is a partial one
    dense[2], dense[5], dense[3] = 0, 1, 0
    dense[3, 19] = 1
    cells = analysis.format_cells(dense, tile_n=8, compression=2, ell_width=6)
    active = {token: np.flatnonzero(row).tolist() for token, row in enumerate(dense)}
    for name, table in cells.groupby("format"):
        stored = table[table["kind"] == "value"].groupby(["part", "token"])["label"].apply(list)
        everything = {token: [] for token in active}
        for (part, token), labels in stored.items():
            if part in ("overflow rows", "backup rows") or name != "TwELL":
                assert labels == active[token]
            everything[token] = sorted({*everything[token], *labels})
        assert everything == active, name
    tiles = cells[(cells["format"] == "TwELL") & (cells["part"] == "all rows")]
    for (token, slot), cell in tiles[tiles["kind"] == "count"].groupby(["token", "slot"]):
        start = slot // 4 * 8
        assert cell["label"].item() == dense[token, start : start + 8].sum()
    over = [
        t for t, row in enumerate(dense) if max(row[:8].sum(), row[8:16].sum(), row[16:].sum()) > 3
    ]
    assert cells.loc[cells["part"] == "overflow rows", "token"].unique().tolist() == over
    assert set(tiles.groupby("token").size()) == {12}
    long = [t for t in active if len(active[t]) > 6]
    assert cells.loc[cells["part"] == "backup rows", "token"].unique().tolist() == long


def test_format_bytes_are_those_of_the_formats():
    table = analysis.format_bytes(64, 512, [0.5, 1e6], tile_n=128, compressions=(8,), ell_width=16)
    sparse, full = (rows.set_index("format") for _, rows in table.groupby("active"))
    assert table["nbytes"].eq((table["relative"] * 64 * 512 * 2).round()).all()
    assert sparse.loc["TwELL, C = 8", "nbytes"] == 64 * 512 // 8 * 4
    assert (
        sparse.loc["Hybrid, width 16", "nbytes"] == 64 * 16 * 4 + 64 * 4 * 2
    )  # slots, counts and the vector
    assert sparse.loc["ELL", "nbytes"] < sparse.loc["Hybrid, width 16", "nbytes"]
    assert (full["active_share"] == 1).all()
    assert full.loc["ELL", "nbytes"] == 64 * 512 * 4 + 64 * 4
    assert full.loc["Hybrid, width 16", "nbytes"] == 64 * 512 * 2 + 64 * 4
    assert full.loc["TwELL, C = 8", "nbytes"] == 64 * 512 // 8 * 4 + 64 * 512 * 2 + 64 * 4


def test_format_bytes_draws_uneven_rows_of_the_mean_asked_for():
    table = analysis.format_bytes(2000, 1000, [20.0], seed=secrets.randbits(32))
    assert table["active"].iloc[0] == pytest.approx(20, rel=0.2)
    ell_width = table.set_index("format").loc["ELL", "nbytes"] / 2000 / 4 - 1
    assert ell_width > 5 * 20
    assert table.equals(analysis.format_bytes(2000, 1000, [20.0], seed=1)) is False
    pd.testing.assert_frame_equal(
        analysis.format_bytes(9, 50, [3.0]), analysis.format_bytes(9, 50, [3.0])
    )


# --- speed of the layer -------------------------------------------------------------------------


def found(table, *columns):
    return sorted(table[list(columns)].itertuples(index=False, name=None))


def test_speedups_are_over_compiled_dense_of_the_same_case_and_call():
    base = "dense torch.compile"
    rows = together(
        speed_rows(64, 29.0, {base: 3.0, "triton union": 2.0}),
        speed_rows(64, 29.0, {base: 5.0, "triton union": 2.0}, mode="graph", weight_sets=8),
        speed_rows(64, 29.0, {base: 7.0, "triton union": 2.0}, mode="graph"),
        speed_rows(64, 29.0, {base: 9.0, "triton union": 2.0}, device="other"),
        speed_rows(64, 29.0, {base: 11.0, "triton union": 2.0}, gated=False),
        speed_rows(64, 29.0, {base: 13.0, "triton union": 2.0}, pattern="even"),
        speed_rows(64, 31.0, {base: 15.0, "triton union": 2.0}),
    )
    table = analysis.speedups(rows)
    union = table[table["provider"] == "triton union"]
    assert sorted(union["speedup"]) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    assert (union["speedup"] == union["p50_dense"] / 2).all()
    assert (table.loc[table["provider"] == base, "speedup"] == 1).all() and len(table) == 14
    assert set(rows.columns) | {"p50_dense", "speedup", "energy_per_token", "energy_change"} == set(
        table.columns
    )


def test_speedups_give_the_energy_of_a_token():
    times = {"dense torch.compile": 2.0, "triton union": 1.0, "auto": 1.0}
    table = analysis.speedups(
        speed_rows(500, 29.0, times, energy=[1000.0, 600.0, np.nan])
    ).set_index("provider")
    assert table["energy_per_token"].round(6).tolist()[:2] == [2.0, 1.2]
    assert table["energy_change"].round(6).tolist()[:2] == [0.0, -40.0]
    assert table.loc["auto", ["energy_per_token", "energy_change"]].isna().all()


def test_speedups_take_the_newest_call_of_a_case():
    base, later = "dense torch.compile", {"date": "2026-11-23T10:00:00+00:00", "commit": "b" * 40}
    rows = together(
        speed_rows(64, 29.28, {base: 4.0, "triton union": 1.0, "triton rowwise": 1.0}),
        speed_rows(
            64, 29.27, {base: 4.0, "triton union": 2.0}, **later
        ),  # the same level: rounded otherwise
        speed_rows(64, 98.0, {base: 4.0, "triton union": 8.0}),  # only measured earlier
        speed_rows(
            64, 29.28, {base: 4.0, "triton union": 0.5}, device="other"
        ),  # another device's newest
    )
    table = analysis.speedups(rows)
    paths = table[table["provider"] != base]
    expected = [(29.27, "NVIDIA H200", 2.0), (29.28, "other", 8.0), (98.0, "NVIDIA H200", 0.5)]
    assert found(paths, "active", "device", "speedup") == expected
    # A path timed again within one call counts once, as timed last.
    again = pd.concat(
        [speed_rows(64, 29.0, {base: 4.0, "auto": 1.0}), speed_rows(64, 29.0, {"auto": 2.0})]
    )
    assert analysis.speedups(again)["speedup"].tolist() == [1.0, 2.0]


def test_speedups_leave_out_rows_without_a_partner_and_say_so():
    base, later = "dense torch.compile", {"date": "2026-11-23T10:00:00+00:00"}
    whole = speed_rows(64, 29.0, {base: 4.0, "triton union": 1.0})
    alone = speed_rows(64, 29.0, {"triton union": 3.0}, **later)
    with pytest.warns(
        UserWarning,
        match=r"left out: 1 of 3 rows have no dense torch.compile .* 64 tokens on 2026-11-23",
    ):
        table = analysis.speedups(together(whole, alone))
    assert found(table, "provider", "speedup") == [(base, 1.0), ("triton union", 4.0)]
    with pytest.raises(ValueError, match=r"^1 of 1 rows have no dense torch.compile"):
        analysis.speedups(alone)


def test_speedups_refuse_rows_that_are_not_whole():
    rows = speed_rows(64, 29.0, {"dense torch.compile": 4.0, "auto": 1.0})
    with pytest.raises(
        ValueError,
        match="rows of ffn.csv need the columns mode, energy; `twell measure ffn` writes",
    ):
        analysis.speedups(rows.drop(columns=["mode", "energy"]))
    with pytest.raises(ValueError, match="ffn.csv has no row"):
        analysis.speedups(rows[:0])
    with pytest.raises(ValueError, match="ffn.csv has empty cells in commit, p50"):
        analysis.speedups(rows.assign(p50=[4.0, np.nan], commit=[None, "a"]))
    with pytest.raises(
        ValueError, match="p50 of auto is 0 ms on 2026-11-22T10:00:00.00:00; a time is above 0"
    ):
        analysis.speedups(rows.assign(p50=[4.0, 0.0]))


def speed_line(provider, points, **columns):
    """A line of `speedups`: points of (active, speed-up)."""
    calls = [
        speed_rows(64, active, {provider: 1.0}, speedup=gain, **columns) for active, gain in points
    ]
    return pd.concat(calls, ignore_index=True)


@pytest.mark.parametrize(
    ("points", "crossover", "verdict"),
    [
        ([(10, 2.0), (1000, 0.5)], 100.0, "faster below 100 active"),
        ([(1, 9.0), (10, 4.0), (40, 0.5), (90, 0.1)], 10 * 4 ** (2 / 3), "faster below 25 active"),
        ([(0, 9.0), (10, 2.0), (1000, 0.5)], 100.0, "faster below 100 active"),
        ([(10, 1.0), (20, 0.5)], 10.0, "faster below 10 active"),
        ([(10, 2.0), (30, 0.5), (50, 1.5), (80, 0.5)], 10 * 3**0.5, "faster below 17 active"),
        ([(10, 2.0), (1003, 1.0)], None, "faster at 1003 active, the most measured"),
        ([(29, 0.9), (300, 0.2)], None, "slower from 29 active on, the fewest measured"),
        ([(29, 0.9)], None, "slower from 29 active on, the fewest measured"),
    ],
)
def test_crossovers(points, crossover, verdict):
    other = speed_line("triton rowwise", [(5, 4.0), (20, 0.25)], pattern="even")
    table = together(speed_line("triton union", points), other, speed_line("auto", points))
    table = analysis.crossovers(table).set_index("provider")
    assert set(table.index) == {"triton union", "triton rowwise"}
    row = table.loc["triton union"]
    assert (
        row["crossover"] == pytest.approx(crossover) if crossover else math.isnan(row["crossover"])
    )
    assert row["verdict"] == verdict
    measured = [(active, gain) for active, gain in points if active]
    assert (row["lowest"], row["highest"]) == (measured[0][0], measured[-1][0])
    assert row["best"] == max(gain for _, gain in measured)
    assert table.loc["triton rowwise", "crossover"] == pytest.approx(10)
    assert table.loc["triton rowwise", "pattern"] == "even"


def test_crossovers_keep_batches_apart_and_need_no_path():
    line = speed_line("triton union", [(10, 2.0), (1000, 0.5)])
    shifted = speed_line("triton union", [(1, 2.0), (100, 0.5)]).assign(tokens=128)
    table = analysis.crossovers(together(line, shifted))
    assert table["tokens"].tolist() == [64, 128]
    assert table["crossover"].tolist() == pytest.approx([100, 10])
    none = analysis.crossovers(speed_line("auto", [(10, 2.0)]))
    assert none.empty and list(none.columns) == list(table.columns)


def test_at_level_takes_the_nearest_of_each_case():
    table = together(
        speed_line("triton union", [(9.7, 1.0), (29.3, 2.0), (98.0, 3.0)]),
        speed_line("dense eager", [(29.3, 4.0)]),
        speed_line("triton union", [(0.0, 6.0), (178.0, 5.0)]).assign(tokens=1),
        speed_line("triton union", [(10.0, 7.0), (70.0, 8.0)], mode="graph"),
    )
    assert found(analysis.at_level(table, 29), "active", "speedup") == [
        (29.3, 2.0),
        (29.3, 4.0),
        (70.0, 8.0),
        (178.0, 5.0),
    ]
    assert found(analysis.at_level(table, 1), "active", "speedup")[:2] == [(0.0, 6.0), (9.7, 1.0)]
    kernels = table.drop(columns=["mode", "weight_sets"])
    assert found(analysis.at_level(kernels, 29), "active", "speedup") == [
        (29.3, 2.0),
        (29.3, 4.0),
        (178.0, 5.0),
    ]
    assert analysis.at_level(table[:0], 29).empty


def test_by_case_has_a_row_a_case_and_a_column_a_provider():
    dirty = {"commit": "0123456789abcdef-dirty", "pattern": "even"}
    rows = together(
        speed_rows(64, 29.0, {"dense torch.compile": 4.0, "triton union": 2.0, "auto": 1.0}),
        speed_rows(
            64,
            10.0,
            {"dense torch.compile": 4.0, "triton union": 1.0},
            energy=[8.0, np.nan],
            **dirty,
        ),
    )
    table = analysis.speedups(rows)
    gains = analysis.by_case(table)
    assert list(gains.columns) == ["auto", "dense torch.compile", "triton union"]
    np.testing.assert_array_equal(gains.to_numpy(), [[np.nan, 1, 4], [4, 1, 2]])
    assert gains.index.get_level_values("commit").tolist() == ["0123456-dirty", "a" * 7]
    assert set(gains.index.get_level_values("date")) == {"2026-11-22"}
    energy = analysis.by_case(table, "energy_per_token")
    assert list(energy.columns) == ["dense torch.compile"] and energy.to_numpy().tolist() == [
        [0.125]
    ]
    assert analysis.by_case(table.assign(energy_change=np.nan), "energy_change").empty


def test_short_says_where_rows_are_from_apart():
    base = {"dense torch.compile": 4.0, "triton union": 2.0}
    rows = together(
        speed_rows(64, 29.0, base), speed_rows(64, 98.0, base, commit="b" * 40, device="other")
    )
    where, table = analysis.short(analysis.by_case(analysis.speedups(rows)))
    assert set(where.split("; ")) == {
        f"NVIDIA H200 2026-11-22 {'a' * 7}",
        f"other 2026-11-22 {'b' * 7}",
    }
    assert list(table.index.names) == [
        *("pattern", "hidden_size", "intermediate_size", "gated"),
        *("tokens", "active", "mode"),
    ]
    np.testing.assert_array_equal(table.to_numpy(), [[1, 2], [1, 2]])
    where, empty = analysis.short(
        analysis.by_case(analysis.speedups(rows).assign(energy_change=np.nan), "energy_change")
    )
    assert where == "" and empty.empty
    trained = analysis.by_case(
        analysis.training_speedups(training_rows(64, 29.0, base)), "held_share"
    )
    assert analysis.short(trained)[1].to_numpy().tolist() == [[100, 100]]
    assert analysis.short(pd.DataFrame())[0] == ""


# --- training of the layer, and of models -------------------------------------------------------


def test_training_speedups_are_over_compiled_dense_of_the_same_case_and_call():
    base, later = "dense torch.compile", {"date": "2026-11-23T10:00:00+00:00"}
    rows = together(
        training_rows(
            64, 29.0, {base: 8.0, "triton union": 4.0}, held=[800, 200], peak=[1000, 900]
        ),
        training_rows(
            64, 60.0, {base: 8.0, "triton union": 4.0}, forward=[3.0, 1.0], energy=[64.0, 16.0]
        ),
        training_rows(128, 29.0, {base: 6.0, "triton union": 4.0}, pattern="even"),
        training_rows(
            128, 29.1, {base: 9.0, "triton union": 3.0}, pattern="even", **later
        ),  # the same level, later
    )
    table = analysis.training_speedups(rows)
    union = table[table["provider"] == "triton union"]
    expected = [
        (64, 29.0, 2.0, 2.0, 25.0, 90.0),
        (64, 60.0, 2.0, 3.0, 100.0, 100.0),
        (128, 29.1, 3.0, 3.0, 100.0, 100.0),
    ]
    assert (
        found(union, "tokens", "active", "speedup", "forward_speedup", "held_share", "peak_share")
        == expected
    )
    assert union.loc[
        union["active"] == 60, ["energy_per_token", "energy_change"]
    ].to_numpy().tolist() == [[0.25, -75]]
    assert (
        table.loc[table["provider"] == base, ["speedup", "held_share", "forward_speedup"]]
        == [1, 100, 1]
    ).all(axis=None)
    added = {"p50_dense", "speedup", "energy_per_token", "energy_change"}
    assert set(table.columns) == set(rows.columns) | added | {
        "forward_speedup",
        "held_share",
        "peak_share",
    }


def test_training_speedups_refuse_rows_that_are_not_whole():
    rows = training_rows(64, 29.0, {"dense torch.compile": 4.0, "triton union": 1.0})
    with pytest.raises(
        ValueError,
        match="training.csv need the columns held; `twell measure ffn --backward` writes",
    ):
        analysis.training_speedups(rows.drop(columns="held"))
    with pytest.raises(ValueError, match="training.csv has empty cells in p50"):
        analysis.training_speedups(rows.assign(p50=[4.0, np.nan]))
    with pytest.raises(ValueError, match="^1 of 1 rows have no dense torch.compile"):
        analysis.training_speedups(rows[1:])
    with pytest.warns(UserWarning, match="left out: 1 of 3 rows") as warned:
        analysis.training_speedups(together(rows, training_rows(64, 90.0, {"triton union": 4.0})))
    assert warned[0].filename == __file__


def training_line(points, **columns):
    base = "dense torch.compile"
    return pd.concat(
        [training_rows(64, a, {base: gain, "triton union": 1.0}, **columns) for a, gain in points]
    )


def test_the_training_crossover_is_the_least_of_all_cases():
    falls = training_line([(10, 2.0), (1000, 0.5)])  # at 100
    for other, least in (
        (training_line([(10, 2.0), (250, 0.4)], pattern="even"), 40),
        (
            training_line([(10, 3.0), (60, 2.0)], pattern="even"),
            60,
        ),  # faster as far as was measured
        (training_line([(10, 9.0), (600, 2.0)], pattern="even"), 100),
        (training_line([(10, 0.9), (60, 0.5)], pattern="even"), 0),  # never faster
    ):
        table = analysis.training_speedups(together(falls, other))
        assert analysis.training_crossover(table) == pytest.approx(least, abs=0.1)
    with pytest.raises(
        ValueError, match="the table has no row of 'triton hybrid' with active neurons"
    ):
        analysis.training_crossover(table, "triton hybrid")


def test_step_speedups():
    base = {"dense torch.compile": 8.0, "dense eager": 10.0, "triton union torch.compile": 4.0}
    rows = together(
        step_rows(base, peak=[80, 100, 40], energy=[8192.0, 8192.0, 4096.0]),
        step_rows({"dense torch.compile": 6.0, "triton union": 4.0}, checkpoint_activations=True),
    )
    table = analysis.step_speedups(rows)
    columns = (
        "provider",
        "checkpoint_activations",
        "tokens",
        "speedup",
        "peak_change",
        "energy_change",
    )
    expected = [
        ("dense eager", False, 8192, 0.8, 25.0, 0.0),
        ("triton union torch.compile", False, 8192, 2.0, -50.0, -50.0),
    ]
    assert found(table[table["provider"].isin([e[0] for e in expected])], *columns) == expected
    assert table.loc[table["provider"] == "triton union", "speedup"].tolist() == [1.5]
    assert table.loc[table["energy"] == 4096, "energy_per_token"].tolist() == [0.5]
    with pytest.raises(
        ValueError,
        match="rows of train_step.csv need the columns peak; `twell measure train-step` writes",
    ):
        analysis.step_speedups(rows.drop(columns="peak"))


def test_roofline():
    kernels = kernel_rows(
        ("gate", 5.0, 3.2e12, 2e9),  # 4 ms of operations, 0.5 of bytes
        ("lists", 0.04, 0.0, 8e7),  # 0.02 ms of bytes
        ("up", 2.0, 1.6e11, 4e9),  # 0.2 ms of operations, 1 of bytes
        ("other", 0.1, np.nan, np.nan),
        ("half", 1.0, 4e11, np.nan),
    )
    older = ceiling_rows(100.0, 100.0, date="2026-11-21T10:00:00+00:00")
    ceilings = together(ceiling_rows(), older, ceiling_rows(1.0, 1.0, device="other"))
    table = analysis.roofline(kernels, ceilings).set_index("kernel")
    assert (table["peak"] == 800).all() and (table["bandwidth"] == 4000).all()
    np.testing.assert_allclose(table["intensity"], [1600, 0, 40, np.nan, np.nan])
    np.testing.assert_allclose(table["tflops"], [640, 0, 80, np.nan, 400])
    np.testing.assert_allclose(table["floor"], [4, 0.02, 1, np.nan, 0.5])
    np.testing.assert_allclose(table["share"], [0.8, 0.5, 0.5, np.nan, 0.5])
    assert table["bound"].tolist() == ["compute", "memory", "memory", "", "compute"]


def test_roofline_takes_the_newest_call_of_each_provider():
    kernels = together(
        kernel_rows(("gate", 5.0, 1e9, 1e9), ("gone", 1.0, 1e9, 1e9)),
        kernel_rows(("gate", 4.0, 1e9, 1e9), date="2026-11-23T10:00:00+00:00"),
        kernel_rows(("gate", 6.0, 1e9, 1e9), provider="dense"),
    )
    expected = [("dense", "gate", 6.0), ("triton union", "gate", 4.0)]
    assert found(analysis.roofline(kernels, ceiling_rows()), "provider", "kernel", "ms") == expected


def test_roofline_refuses_what_it_cannot_use():
    kernels = kernel_rows(("gate", 5.0, 1e9, 1e9))
    with pytest.raises(ValueError, match="rows of kernels.csv need the columns ms, bytes"):
        analysis.roofline(kernels.drop(columns=["ms", "bytes"]), ceiling_rows())
    with pytest.raises(ValueError, match="rows of ceilings.csv need the columns unit"):
        analysis.roofline(kernels, ceiling_rows().drop(columns="unit"))
    with pytest.raises(
        ValueError, match="the ceiling 'copy bandwidth' is in 'TB/s'; it has to be in GB/s"
    ):
        analysis.roofline(kernels, ceiling_rows().replace("GB/s", "TB/s"))
    for ceilings in (ceiling_rows(device="other"), ceiling_rows()[:1]):
        with pytest.raises(
            ValueError, match="ceilings.csv lacks matmul or copy bandwidth of NVIDIA H200"
        ):
            analysis.roofline(kernels, ceilings)


# --- downstream tasks -----------------------------------------------------------------------------------


def test_evaluations_say_what_is_near_chance():
    record = evaluation(tasks=("arc_easy", "piqa"), l1=2e-3)
    scores = record["lm_eval"]["results"]
    scores["arc_easy"] |= {
        "acc,none": 0.2701,
        "acc_norm,none": 0.269,
        "acc_norm_stderr,none": 0.01,
        "alias": "arc_easy",
    }
    scores["piqa"] |= {"acc,none": 0.4799, "perplexity,none": 7.0, "perplexity_stderr,none": 0.1}
    scores["paper7"] = {"sample_len": 2, "acc,none": 0.9, "acc_stderr,none": "N/A"}
    scores["own"] = {"sample_len": 2, "acc,strict": 0.9, "acc_stderr,strict": 0.1}
    scores["two"] = {
        "sample_len": 2,
        "acc,none": 0.0,
        "acc_stderr,none": 0.0,
    }  # two wrong answers say nothing
    record["tasks"] |= {"paper7": {"chance": 0.5}, "own": {"chance": None}, "two": {"chance": 0.5}}
    table = analysis.evaluations(
        [record, evaluation("other", training_tokens=None, tasks=("piqa",))]
    )
    columns = ["task", "metric", "accuracy", "verdict"]
    assert table[columns].to_numpy().tolist() == [
        ["arc_easy", "acc", 0.2701, "above chance"],
        ["arc_easy", "acc_norm", 0.269, "near chance"],
        ["piqa", "acc", 0.4799, "below chance"],
        ["paper7", "acc", 0.9, ""],
        ["own", "acc", 0.9, ""],
        ["two", "acc", 0.0, ""],
        ["piqa", "acc", 0.5, "near chance"],
    ]
    assert table["l1_coefficient"].tolist() == [2e-3] * 6 + [0]
    assert table["items"].tolist() == [100, 100, 100, 2, 2, 2, 100]
    assert (
        np.isnan(table["stderr"][3])
        and np.isnan(table["chance"][4])
        and np.isnan(table["training_tokens"][6])
    )
    with pytest.raises(
        ValueError,
        match=r"the evaluation of x has l1_coefficient \[0\.1, 0\.2\]; it has to be one number",
    ):
        analysis.evaluations([evaluation("x", l1=[0.1, 0.2])])


def test_training_tokens_are_those_of_the_same_weights():
    records = [evaluation(name, training_tokens=None, tasks=("piqa",)) for name in "abcdef"]
    for record, weights in zip(records, ("1", "1", "2", "3", "", ""), strict=True):
        record["model"]["sha256"] = (
            {f"{record['model']['name']}.safetensors": weights} if weights else {}
        )
    del records[4]["model"]["sha256"]
    for record in records[1::2]:
        record["model"]["training_tokens"] = 7
    known = [
        7,
        7,
        np.nan,
        7,
        np.nan,
        7,
    ]  # the third's weights are nobody else's, the fifth's are not known
    for given, expected in ((records, known), (reversed(records), known[::-1])):
        np.testing.assert_array_equal(analysis.evaluations(given)["training_tokens"], expected)
    records[2]["model"] |= {"training_tokens": 9, "sha256": records[0]["model"]["sha256"]}
    assert analysis.evaluations(records[1:3])["training_tokens"].tolist() == [
        7,
        9,
    ]  # what a record says, it keeps


def test_seven_tasks_are_of_the_fullest_evaluation():
    few = evaluation("twice", gain=0.5)
    for scores in few["lm_eval"]["results"].values():
        scores["sample_len"] //= 10
    records = [
        few,
        evaluation("twice", gain=0.1),
        evaluation("twice", gain=0.2, backend="reference"),
    ]
    records += [
        evaluation("part", tasks=("piqa", "winogrande")),
        evaluation("other", l1=1e-3, training_tokens=None),
    ]
    records[1]["tasks"]["held_out_continuation"] = {"chance": 0.25}
    held_out = {
        "sample_len": 9,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "acc_norm,none": 0.4,
        "acc_norm_stderr,none": 0.1,
    }
    records[1]["lm_eval"]["results"]["held_out_continuation"] = held_out
    table = analysis.seven_tasks(analysis.evaluations(records))
    assert table["model"].tolist() == ["twice"] * 8 + ["other"] * 8 and set(table["backend"]) == {
        "dense"
    }
    assert [*table["task"][:8]] == [*analysis.TASKS] and table["accuracy"][0] == 0.35
    rounded = [
        evaluation("twice", gain=0.3, dtype="bfloat16"),
        evaluation("twice", gain=0.4, backend="triton"),
    ]
    again = analysis.seven_tasks(analysis.evaluations([*rounded, *records]))
    assert again["accuracy"].tolist() == table["accuracy"].tolist()
    assert set(analysis.seven_tasks(analysis.evaluations(rounded))["backend"]) == {"triton"}
    assert analysis.seven_tasks(analysis.evaluations(records[3:4])).empty
    assert analysis.seven_tasks(analysis.evaluations([])).empty


def levels_of(*records):
    return analysis.by_level(analysis.seven_tasks(analysis.evaluations(records)))


def test_seeds_are_one_model():
    records = [
        evaluation("b", gain=0.03),
        evaluation("a", gain=0.06),
        evaluation("c", l1=1e-3, gain=0.018),
    ]
    records[1]["lm_eval"]["results"]["paper7"]["acc_stderr,none"] = 0.02
    levels = levels_of(*records)
    assert len(levels) == 16
    mean = levels[levels["task"] == "paper7"]
    assert found(mean, "l1_coefficient", "models", "verdict") == [
        (0, 2, "above chance"),
        (1e-3, 1, "near chance"),
    ]
    np.testing.assert_allclose(
        mean[["accuracy", "stderr"]], [[0.3143 + 0.045, 0.015], [0.3143 + 0.018, 0.01]]
    )
    assert analysis.by_level(analysis.seven_tasks(analysis.evaluations([]))).empty


def test_levels_are_compared_within_a_size_and_budget():
    records = [
        evaluation("a"),
        evaluation("b", l1=1e-3),
        evaluation("c", l1=1e-2, training_tokens=5),
    ]
    records += [
        evaluation("d", training_tokens=None),
        evaluation("e", l1=2e-3, training_tokens=None),
    ]
    records += [evaluation("f", parameters=7)]
    levels = levels_of(*records)
    several = analysis.several_levels(levels)
    assert set(several["l1_coefficient"]) == {0, 1e-3, 2e-3} and len(several) == 4 * 8
    change = analysis.against_dense(levels)
    changes = found(change.fillna(0), "training_tokens", "l1_coefficient", "difference")
    assert sorted(changes) == [(0, 2e-3, 0), (1e6, 1e-3, 0)]
    # with three levels somewhere, pairs are left to the comparison of sizes
    levels = levels_of(*records, evaluation("g", l1=3e-3))
    assert found(analysis.several_levels(levels)[::8], "l1_coefficient", "training_tokens") == [
        (level, 1e6) for level in (0, 1e-3, 3e-3)
    ]
    assert analysis.several_levels(levels[:0]).empty


def test_sizes_are_compared_at_one_level():
    def shown(*models):
        records = [
            evaluation(str(n), l1=l1, parameters=p, training_tokens=t)
            for n, (p, t, l1) in enumerate(models)
        ]
        levels = analysis.across_sizes(levels_of(*records))
        rows = levels[levels["task"] == "piqa"]
        assert len(levels) == 8 * len(rows)
        return found(rows.fillna(0), "parameters", "training_tokens", "l1_coefficient")

    pairs = [(10, 9, 0), (10, 9, 3e-3), (20, 9, 0), (20, 9, 3e-3)]
    sweep = [(20, 5, level) for level in (0, 1e-4, 1e-3, 1e-2)]  # shorter
    alone = [(5, None, 0), (5, None, 2e-3), (5, None, 1e-3)]
    assert shown(*pairs, *sweep, *alone) == [(5, 0, 0), (5, 0, 1e-3), *pairs]
    assert shown(*sweep) == sweep[:2]  # of levels that as many sizes have, the lowest
    assert shown(pairs[0], pairs[2]) == [pairs[0], pairs[2]]
    assert analysis.across_sizes(levels_of()).empty


def test_the_papers_table_6():
    table = analysis.paper_tasks(results.paper())
    assert len(table) == 4 * 2 * 8 and set(table["parameters"]) == {5e8, 1e9, 1.5e9, 2e9}
    wide = table.pivot(index=["parameters", "l1_coefficient"], columns="task", values="accuracy")
    assert (wide.drop(columns="paper7").mean(axis=1) - wide["paper7"]).abs().max() < 1e-3
    change = analysis.against_dense(table)
    assert (change["l1_coefficient"] == 2e-5).all()
    np.testing.assert_allclose(change["difference"], [0, 0.001, -0.002, -0.003], atol=1e-9)
    levels = analysis.paper_levels(results.paper())
    assert found(levels, "l1_coefficient", "accuracy") == [
        (0.0, 0.4636),
        (2e-5, 0.462),
        (3e-5, 0.4483),
    ]


def test_backends_are_compared_on_the_same_items():
    other = evaluation("a", gain=0.1, backend="reference")
    other["lm_eval"]["results"]["piqa"]["acc,none"] += 0.02
    other["lm_eval"]["results"]["winogrande"] |= {"acc,none": 0.0, "sample_len": 5}
    third = evaluation("a", gain=0.15, dtype="bfloat16")  # is no answer to how backends differ
    table = analysis.evaluations([evaluation("a", gain=0.1), other, evaluation("b"), third])
    differences = analysis.backend_differences(table)
    assert found(differences, "model", "between", "compared", "alike", "accuracies") == [
        ("a", "backend", "dense, reference", "float32", 7),
        ("a", "dtype", "bfloat16, float32", "dense", 8),
    ]
    assert differences["difference"].tolist() == pytest.approx([0.02, 0.05])
    assert analysis.backend_differences(analysis.evaluations([evaluation("b")])).empty


def test_accuracies_to_be_read():
    records = [
        evaluation("sparse", l1=1e-2, gain=0.021, tasks=("piqa",)),
        evaluation("dense", tasks=("arc_easy", "piqa")),
    ]
    records[0]["lm_eval"]["results"]["piqa"] |= {"acc_norm,none": 0.1, "acc_norm_stderr,none": 0.01}
    table = analysis.accuracies(analysis.evaluations(records))
    assert table.index.tolist() == [
        "chance",
        "items",
        "dense, dense float32, L1 = 0",
        "sparse, dense float32, L1 = 1e-2",
    ]
    assert table.to_dict("list") == {
        "arc_easy": ["25.0", "100", "(25.0 ± 1.0)", ""],
        "piqa": ["50.0", "100", "(50.0 ± 1.0)", "52.1 ± 1.0"],
        "piqa, acc_norm": ["50.0", "100", "", "(10.0 ± 1.0)"],
    }


# --- whole models ---------------------------------------------------------------------------------------------------


def test_model_speedups_are_over_dense_of_the_same_case_and_call():
    rows = together(
        model_rows(
            [10.0, 8.0, 5.0], energy=[6000.0, 4000.0, 3000.0], idle=100.0, peak=[100, 80, 90]
        ),
        model_rows([10.0, 4.0, 2.0], active=911.0),
        model_rows([30.0, 10.0, 5.0], batch=16, tokens=32768, mode="graph"),
        model_rows([10.0, 1.0, 1.0], profile="flat"),
        model_rows([9.0, 1.0, 1.0], date="2026-11-21T10:00:00+00:00"),  # an older call
    )
    table = analysis.model_speedups(rows)
    first = table.query("active == 29 and batch == 64 and profile == 'paper'").set_index("provider")
    assert first["speedup"].to_dict() == dict(zip(COMPILED, (1.0, 1.25, 2.0), strict=True))
    assert first["energy_per_token"].tolist() == pytest.approx(
        [e / 131072 for e in first["energy"]]
    )
    dense, sparse, auto = (first.loc[name] for name in COMPILED)
    assert sparse["energy_change"] == pytest.approx(-100 / 3) and auto[
        "peak_change"
    ] == pytest.approx(-10)
    # 100 W of idle power are 1 J in 10 ms: 5, 3.2 and 2.5 J are left.
    assert dense["energy_net"] == pytest.approx(5000 / 131072)
    assert sparse["energy_net_change"] == pytest.approx(-36) and auto[
        "energy_net_change"
    ] == pytest.approx(-50)
    assert table.query("active == 911")["energy_net_change"].isna().all()
    assert found(
        table[table["provider"] == COMPILED[2]], "batch", "active", "profile", "speedup"
    ) == [
        (16, 29.0, "paper", 6.0),
        (64, 29.0, "flat", 10.0),
        (64, 29.0, "paper", 2.0),
        (64, 911.0, "paper", 5.0),
    ]
    with pytest.raises(
        ValueError, match="rows of model.csv need the columns profile; `twell measure model` writes"
    ):
        analysis.model_speedups(rows.drop(columns="profile"))


def test_tables_of_models_are_in_order():
    times = [10.0, 9.0, 8.0]
    large, dense = model_rows(times, model="2b", num_layers=38), model_rows(times, active=911.0)
    table = analysis.model_speedups(
        together(large, dense, model_rows(times), model_rows(times, batch=1, tokens=2048))
    )
    order = list(zip(table["model"], table["tokens"], table["active"], strict=True))[::3]
    assert order == [
        ("1.5b", 2048, 29),
        ("1.5b", 131072, 29),
        ("1.5b", 131072, 911),
        ("2b", 131072, 29),
    ]
    steps = together(
        step_rows({"dense torch.compile": 2.0}, active=900.0),
        step_rows({"dense torch.compile": 2.0}),
    )
    assert analysis.step_speedups(steps)["active"].tolist() == [29, 900]


def test_decode_speedups_keep_numbers_of_documents_apart():
    rows = together(
        decode_rows([4.0, 2.0, 1.0]),
        decode_rows([8.0, 6.0, 5.0], batch=32, energy=[10.0, 5.0, 4.0]),
    )
    table = analysis.decode_speedups(rows)
    assert found(table, "batch", "provider", "speedup") == [
        (1, "auto torch.compile", 4.0),
        (1, "dense torch.compile", 1.0),
        (1, "triton torch.compile", 2.0),
        (32, "auto torch.compile", 1.6),
        (32, "dense torch.compile", 1.0),
        (32, "triton torch.compile", pytest.approx(4 / 3)),
    ]
    assert (
        table.query("batch == 32 and provider == 'triton torch.compile'")["energy_per_token"].item()
        == 5 / 32
    )
    assert not table["tuned"].any() and table["batch"].is_monotonic_increasing


def test_tuned_decoding_is_beside_tuned_dense():
    times = dict(zip(COMPILED, [4.0, 2.0, 1.0], strict=True))
    rows = decode_rows(
        times
        | {f"{name} tuned": 0.6 * ms for name, ms in zip(COMPILED, [5.0, 4.0, 4.0], strict=True)}
    )
    table = analysis.decode_speedups(together(rows))
    assert found(table[table["tuned"]], "provider", "p50", "speedup") == [
        ("auto torch.compile", pytest.approx(2.4), 1.25),
        ("dense torch.compile", 3.0, 1.0),
        ("triton torch.compile", pytest.approx(2.4), 1.25),
    ]
    assert sorted(table.loc[~table["tuned"], "speedup"]) == [1.0, 2.0, 4.0]
    assert analysis.decode_speedups(rows[3:])["tuned"].tolist() == [True] * 3
    with pytest.raises(ValueError, match="rows of decode.csv need the columns provider"):
        analysis.decode_speedups(rows.drop(columns="provider"))
    with pytest.raises(ValueError, match="decode.csv has no row"):
        analysis.decode_speedups(rows[:0])


def test_of_tuned_decoding_the_fastest_call_counts_on_each_side():
    times = {"2026-11-21": [5.0, 4.0, 4.5], "2026-11-22": [6.0, 3.0, 4.6]}
    names = [f"{name} tuned" for name in COMPILED]
    calls = [
        decode_rows(dict(zip(names, taken, strict=True)), date=date)
        for date, taken in times.items()
    ]
    for rows in (calls, calls[::-1]):
        table = analysis.decode_speedups(
            pd.concat([*rows, decode_rows(dict(zip(COMPILED, [9.0, 8.0, 8.0], strict=True)))])
        )
        tuned = table[table["tuned"]].set_index("provider")
        assert tuned["p50"].to_dict() == dict(zip(COMPILED, [5.0, 3.0, 4.5], strict=True))
        assert tuned["speedup"]["triton torch.compile"] == pytest.approx(5 / 3) and len(table) == 6


def test_gains_by_level():
    times = {"dense eager": 12.0, "triton": 4.0} | dict(
        zip(COMPILED, (10.0, 8.0, 5.0), strict=True)
    )
    energy = [9.0, 9.0, 8.0, 6.0, 4.0]
    rows = together(model_rows(times, energy=energy), model_rows([10.0, 20.0, 10.0], active=911.0))
    table = analysis.level_gains(analysis.model_speedups(rows))
    shown = [
        tuple(row) for row in table[["active", "provider", "faster", "saved"]].fillna(-1).to_numpy()
    ]
    assert shown == [
        (911.0, "auto torch.compile", 0.0, -1),
        (911.0, "triton torch.compile", -50.0, -1),
        (29.0, "auto torch.compile", 100.0, 50.0),
        (29.0, "triton torch.compile", 25.0, 25.0),
    ]
    steps = step_rows(
        {"dense torch.compile": 6.0, "triton union torch.compile": 4.0}, peak=[100, 70]
    )
    gains = analysis.level_gains(analysis.step_speedups(steps), by="peak_change")
    assert found(gains, "provider", "faster", "saved") == [
        ("triton union torch.compile", 50.0, pytest.approx(30))
    ]
    two = pd.concat([model_rows([2.0, 1.0, 1.0]), model_rows([2.0, 1.0, 1.0], model="2b")])
    with pytest.raises(
        ValueError, match="levels are compared of one model and batch; this table has 2"
    ):
        analysis.level_gains(analysis.model_speedups(two))


def test_what_layers_contribute():
    timed = model_layer_rows(10.0, [9.0, 7.0, 12.0], [50.0, 10.0, 200.0], auto=[9.0, 7.0, 10.0])
    rows = together(
        timed,
        model_layer_rows(
            10.0, [9.9, 9.9, 9.9], [5.0, 1.0, 2.0], date="2026-11-21T10:00:00+00:00"
        ),  # an older call
        model_layer_rows(
            np.nan, [np.nan] * 3, [1.0, 1.0, 1.0], date="2026-11-23T10:00:00+00:00"
        ),  # no times
        model_layer_rows(10.0, [15.0, 16.0, 17.0], [900.0, 910.0, 920.0], level=911.0),
        model_layer_rows(10.0, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], level=1.0, model="2b"),
    )
    table = analysis.layer_contributions(rows)
    assert found(table.query("level == 29"), "layer", "saved", "auto_saved") == [
        (0, 1, 1),
        (1, 3, 3),
        (2, -2, 0),
    ]
    assert (
        found(table.query("level == 911"), "layer", "saved") == [(0, -5), (1, -6), (2, -7)]
        and len(table) == 9
    )
    near = analysis.layers_at(table[table["model"] == "1.5b"], 32)
    assert set(near["level"]) == {29.0}
    assert analysis.correlation(near) == pytest.approx(np.corrcoef([50, 10, 200], [1, 3, -2])[0, 1])
    assert analysis.layers_at(table, 100).empty  # nothing within a factor of two
    with pytest.raises(
        ValueError,
        match="model_layers.csv has no times; `twell measure model --layers` measures them",
    ):
        analysis.layer_contributions(rows[rows["dense"].isna()])


def test_correlation():
    line = pd.DataFrame({"active": [1.0, 2.0, 4.0], "saved": [7.0, 5.0, 1.0], "same": 3.0})
    assert analysis.correlation(line) == pytest.approx(-1)
    assert analysis.correlation(line.assign(saved=[0.0, 1.0, -1.0])) == pytest.approx(-6 / 84**0.5)
    assert np.isnan(analysis.correlation(line, y="same")) and np.isnan(
        analysis.correlation(line[:1])
    )


def test_where_the_time_of_a_layer_goes():
    dense = {"attention": 3.0, "gate": 4.0, "up and down": 8.0, "between kernels": 1.0}
    sparse = {"attention": 3.0, "gate": 4.0, "up and down": 2.0, "between kernels": 1.0}
    rows = together(
        part_rows(dense, sparse),
        part_rows(dense, dense, date="2026-11-21T10:00:00+00:00"),
        part_rows(dense, sparse | {"attention": 13.0}, model="2b"),
    )
    table = analysis.layer_parts(rows).set_index(["model", "provider"])
    assert table["total"].to_dict() == {
        ("1.5b", COMPILED[0]): 16.0,
        ("1.5b", COMPILED[1]): 10.0,
        ("2b", COMPILED[0]): 16.0,
        ("2b", COMPILED[1]): 20.0,
    }
    assert (table["limit"] == 2).all() and table.loc["1.5b", "speedup"].tolist() == [1, 1.6]
    assert table.loc[("1.5b", COMPILED[1]), list(sparse)].to_dict() == sparse


def test_parts_that_take_longer_under_the_profiler_are_scaled_to_the_layer():
    dense = {"attention": 6.0, "up and down": 6.0, "between kernels": -2.0}
    sparse = {"attention": 4.0, "up and down": 2.0, "between kernels": 1.0}
    table = analysis.layer_parts(part_rows(dense, sparse))
    assert table["total"].tolist() == [10, 7] and table["attention"].tolist() == [5, 4]
    assert table["between kernels"].tolist() == [0, 1] and table["limit"].tolist() == [2, 2]


def test_the_scale_of_the_paper_beside_ours():
    forward = pd.concat(
        [
            model_rows([100.0, 90.0, 80.0], 24.3, model="2b", energy=[10.0, 9.0, 6.0], tokens=1000),
            model_rows([100.0, 90.0, 50.0], 10.0, model="2b", tokens=1000),  # another level
            model_rows([100.0, 90.0, 40.0], 911.0, model="0.5b", tokens=1000),
        ]
    )
    times = {"dense torch.compile": 6.0, "triton union torch.compile": 4.0}
    steps = step_rows(times, model="2b", active=24.0, peak=[100e9, 70e9])
    table = analysis.scale_table(
        results.paper(), analysis.model_speedups(forward), analysis.step_speedups(steps)
    )
    assert (
        list(table["quantity"].unique()) == [name for name, _ in analysis.SCALE.values()]
        and len(table) == 16
    )
    row = table.set_index(["quantity", "model"]).loc
    speed = row["forward speed", "2B"]
    assert (speed["paper_dense"], speed["paper_sparse"], speed["paper_change"]) == (87.8, 106, 20.5)
    assert (speed["dense"], speed["sparse"]) == (10, 12.5) and speed["change"] == pytest.approx(25)
    assert (speed["paper_device"], speed["device"]) == ("H100 PCIe", "NVIDIA H200")
    assert row["forward energy", "2B"]["change"] == pytest.approx(-40)
    assert row["training memory", "2B"][["paper_change", "dense", "sparse"]].tolist() == [
        22.3,
        100,
        70,
    ]
    assert row["training speed", "2B"]["dense"] == pytest.approx(8192 / 6)
    assert row["forward speed", "0.5B"]["change"] == pytest.approx(150)  # the only level there is
    assert (
        table.query("model == '1B'")["dense"].isna().all()
        and (table.query("model == '1B'")["device"] == "").all()
    )
    assert (
        analysis.scale_table(results.paper(), pd.DataFrame(), pd.DataFrame())["dense"].isna().all()
    )
    mixed = analysis.step_speedups(pd.concat([steps, steps.assign(checkpoint_activations=True)]))
    with pytest.raises(
        ValueError, match="steps are with and without checkpointed activations; choose one of them"
    ):
        analysis.scale_table(results.paper(), pd.DataFrame(), mixed)
    with pytest.raises(
        ValueError, match="steps are with and without checkpointed activations; choose one of them"
    ):
        analysis.level_gains(mixed, by="peak_change")
