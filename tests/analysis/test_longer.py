"""Tables over training tokens and time, findings of several models, and paired answers."""

import numpy as np
import pandas as pd
import pytest

from tests.factories.analysis import made, make_run, make_trace, tables
from twell import analysis, results
from twell.analysis import quantities

NOTHING = results.load_runs("none", required=False)


def test_points_have_intervals_where_there_are_seeds():
    runs = []
    for tokens, seeds in ((1000, 3), (2000, 1)):
        for seed in range(seeds):
            for level, price, active in ((0.0, 0.0, 20.0), (1e-3, 1.0, 2.0)):
                name = f"{tokens}-{level}-{seed}"
                more = {"tokens": tokens, "seed": seed}
                runs += [made(name, level, price + seed / 10, active + seed / 10, 5 + seed, **more)]
    runs += [made("other", 1e-3, 1.0, 2.0, 5, reinit=0.1), made("alone", 1e-2, 1.0, 2.0, 5)]
    table = analysis.over_tokens(*tables(*runs)).set_index(["l1_coefficient", "tokens"])
    assert table.index.tolist() == [(level, n) for level in (0.0, 1e-3) for n in (1000, 2000)]
    assert table["runs"].tolist() == [3, 1, 3, 1]
    several, single = table.loc[(1e-3, 1000)], table.loc[(1e-3, 2000)]
    assert several["active"] == pytest.approx(2.1) and single["change"] == pytest.approx(1)
    for name in ("active", "dead", "change"):
        assert several[f"{name}_low"] < several[name] < several[f"{name}_high"], name
        assert np.isnan(single[f"{name}_low"]) and np.isnan(single[f"{name}_high"]), name
    # The change is of two means of three; of L1 = 0 from itself there is none.
    each = analysis.sweep(*tables(*(run for run in runs if run[0]["run"].startswith("1000"))))
    limit = analysis.noise_limit(each, "cross_entropy_change", 3, 3)
    assert several["change_high"] - several["change"] == pytest.approx(limit)
    assert np.isnan(table.loc[(0.0, 1000), "change_low"])
    assert analysis.over_tokens(*NOTHING).empty


def racer(name, speeds, losses, **config):
    """A run with rows of 100 tokens, validated after each."""
    rows = [(100 * n, "train", "tokens_per_second", speed) for n, speed in enumerate(speeds, 1)]
    rows += [(100 * n, "valid", "cross_entropy", loss) for n, loss in enumerate(losses)]
    log = pd.DataFrame(rows, columns=["tokens", "split", "metric", "value"])
    log = log.assign(run=name, step=log["tokens"], layer=pd.array([pd.NA] * len(log), "Int64"))
    return make_run(name, 1e-3, 4, 5, (1, 1), **config)[0], log


def test_a_race_ends_at_the_loss_that_both_reach():
    slow = racer("a", [10, 10], [9, 5, 4], backend="dense")
    fast = racer("b", [20, 50], [9, 5, 3], backend="auto")
    ends = analysis.reached(analysis.race(*tables(fast, slow))).set_index("run")
    assert ends.index.tolist() == ["a", "b"] and set(ends["cross_entropy"]) == {4}
    assert ends.loc["a", "seconds"] == 20 and ends.loc["b", "seconds"] == pytest.approx(5 + 1)
    assert ends.loc["b", "tokens"] == 150 and ends.loc["b", "last"] == 3
    numbers = quantities.raced(ends.reset_index())
    assert numbers["race_first"] * 60 == 20 and numbers["race_fast"] == "auto, L1 = 1e-3"
    other = racer("c", [10, 10], [9, 5, 4], backend="auto", num_layers=3)
    with pytest.raises(ValueError, match="a race is of one model.*num_layers"):
        analysis.race(*tables(slow, other))
    nothing = analysis.reached(analysis.race(*NOTHING))
    assert nothing.empty and quantities.raced(nothing) == {}


def layered(name, *means, most=20.0, **config):
    """A run whose layers have these means, and a busiest token of `most` times each."""
    columns = {"active_mean": 1.0, "active_p99": 2.0, "active_max": most, "dead_fraction": 0.0}
    rows = [
        (10, 1000, "valid", layer, metric, factor * mean)
        for layer, mean in enumerate(means)
        for metric, factor in columns.items()
    ]
    log = pd.DataFrame(rows, columns=results.LOG_COLUMNS).astype({"layer": "Int64"})
    shape = {"num_layers": len(means), "activation": "relu", "seed": 0}
    run = make_run(name, 6e-4, 4, 5, (1, 1), **shape | config)[0]
    return run, log.assign(run=name)


def test_what_all_models_share_is_no_accident():
    trace, _ = make_trace(0)
    kept = analysis.kept_activity(trace)
    layers = kept[kept["metric"] == "mean"]
    assert layers["value"].to_numpy() == pytest.approx(analysis.per_layer(trace)["mean"], abs=1e-6)
    first = kept.set_index("metric").loc["first", "value"]
    assert first == pytest.approx(analysis.by_position(trace)["mean_active"][0], abs=1e-6)
    kept = pd.concat([kept.assign(run="m-seed-0"), kept.assign(run="m-seed-1")])
    runs = [layered(f"m-seed-{seed}", 1, 2, 9, 4, seed=seed) for seed in range(3)]
    runs += [layered("low", 5, 9, 3, 4, most=9.0), layered("two", 1, 2)]
    runs += [layered("silu", 1, 2, 9, 4, activation="silu")]
    table = analysis.findings(*tables(*runs), kept, peak_depth=0.6)
    assert table["run"].tolist() == [f"m-seed-{n}" for n in range(3)] + ["low", "two"]
    assert table["first_two_least"].tolist() == [True] * 3 + [False, None]
    seeds = analysis.shared(table[table["setting"] == "m"]).set_index("finding")
    every = analysis.shared(table).set_index("finding")
    assert seeds.loc["first_two_least"].tolist() == [3, 3, "in all"]
    assert every.loc["first_two_least"].tolist() == [3, 4, "in some"]
    assert every.loc["ten_times"].tolist() == [4, 5, "in some"]
    assert seeds.loc["no_overflow", "models"] == 2  # of those that were traced
    numbers = quantities.shared_findings(table, "m", "m-* low")
    assert (numbers["all_ten_times_holds"], numbers["all_ten_times_models"]) == (3, 4)
    assert numbers["ten_times_models"] == 3 and numbers["all_settings"] == 2
    nothing = analysis.shared(analysis.findings(*tables(runs[-1]), kept[:0], 0.6).reindex(
        columns=list(analysis.FINDINGS)))  # fmt: skip
    assert set(nothing["verdict"]) == {""}


def answers(run, right, task="arc_easy", seed=0):
    random = np.random.default_rng(seed)
    correct = (random.random(400) < right).astype(int)
    return pd.DataFrame({"run": run, "task": task, "item": range(400), "correct": correct})


def test_answers_are_paired_over_items_and_seeds():
    def of(dense, sparse):
        parts = [answers(f"d{n}", p, seed=n) for n, p in enumerate(dense)]
        parts += [answers(f"s{n}", p, seed=n) for n, p in enumerate(sparse)]
        names = [f"d{n}" for n in range(len(dense))], [f"s{n}" for n in range(len(sparse))]
        return analysis.paired_runs(pd.concat(parts), *names).iloc[0]

    same, worse = of([0.6] * 3, [0.6] * 3), of([0.6] * 3, [0.3] * 3)
    assert same["difference"] == 0 and same["low"] == same["high"] == 0  # the same answers
    assert same["verdict"] == "within noise" and same["above_chance"]
    assert worse["verdict"] == "less" and worse["low"] < worse["difference"] < worse["high"] < 0
    assert worse["limit"] == pytest.approx(
        np.hypot((worse["high"] - worse["low"]) / 2, worse["seeds"])
    )
    single = of([0.6], [0.3])
    assert single["verdict"] == "one seed" and np.isnan(single["seeds"])
    assert not of([0.2] * 3, [0.2] * 3)["above_chance"]
    table = analysis.paired_runs(pd.concat([answers("d", 0.6), answers("s", 0.3)]), ["d"], ["s"])
    numbers = quantities.paired(table)
    assert numbers["paired_tasks"] == 1 and not numbers["paired_settled"]
    assert quantities.paired(analysis.paired_runs(pd.DataFrame(columns=["run"]), [], [])) == {}
