"""Tables of runs, tasks and measured rows, from rows made by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories import SEED
from tests.factories.analysis import (
    BASE,
    DENSE,
    GOOD,
    UNFINISHED,
    UNUSED,
    make_run,
    speed_rows,
    tables,
    together,
)

PRICE = "cross_entropy_change"
UNION, FP8 = "triton union", "dense FP8 torch.compile"


def test_sweep():
    dead = make_run("dead", 1e-1, 4.8, 4.8, (1, 0.009))
    dead_too = make_run("dead-too", 2e-1, 4.8, 5.8, (1, 0.5), (0.5, 1.0))
    unknown = make_run("nan", 5e-2, math.nan, 5.0, (3, 3))
    runs = tables(dead_too, dead, GOOD, UNFINISHED, UNUSED, DENSE, unknown)
    table = analysis.sweep(*runs).set_index("run")
    statuses = ["alive", "alive", "unused", "unused", "dead layer", "dead layer"]
    names = ["dense", "good", "unused", "nan", "dead", "dead-too"]
    assert table["status"].to_dict() == dict(zip(names, statuses, strict=True))
    good = {"l1_coefficient": 1e-3, "tokens": 1000, "cross_entropy": 4.04, "ffn_gain": 0.96}
    good |= {"active": 2, "active_fraction": 0.02, PRICE: 1.0}
    good |= {"dead_fraction": 0.3, "dead_fraction_train": 0.5}
    assert table.loc["good", list(good)].to_dict() == pytest.approx(good)
    assert math.isnan(table.loc["dense", "dead_fraction_train"])
    assert analysis.sweep(*tables(GOOD, UNUSED))[PRICE].isna().all()  # no baseline


def test_a_sweep_refuses_runs_that_do_not_compare():
    with pytest.raises(ValueError, match="unfinished"):
        analysis.sweep(*tables(UNFINISHED))
    with pytest.raises(ValueError, match="differ in choice: recipe .dense., re-init"):
        analysis.sweep(*tables(DENSE, make_run("reinit", 1e-3, 4.0, 5.0, (3, 1), reinit=0.1)))
    runs = [make_run(f"r{n}", 0.0, 4, 5, (3, 1), num_layers=n) for n in (2, 3)]
    with pytest.raises(ValueError, match="differ in num_layers: 2"):
        analysis.sweep(*tables(*runs))


def test_noise_is_pooled_over_settings():
    table = pd.DataFrame({"choice": ["recipe"] * 6 + ["SiLU"] * 2 + ["other"]})
    table["l1_coefficient"] = [0, 0, 0, 1, 1, 2, 0, 0, 0]
    table[PRICE] = [1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 4.0, 8.0, 1.0]
    table["active_fraction"] = [0.1, 0.2, 0.4, 0.03, 0.03, 0.5, 0.99999, 1.0, 0.9]
    table["dead_fraction_train"] = [0.0, 0.0, 0.0, 0.25, 0.75, np.nan, 0.0, 0.5, 0.1]
    table["tokens"], table["seed"] = 1000, range(9)
    noise = {column: analysis.seed_noise(table, column) for column in analysis.QUANTITIES}
    assert noise[PRICE] == (pytest.approx(math.sqrt((2 * 1 + 1 * 2 + 1 * 8) / 4)), 4)
    # Neither SiLU nor runs that are all equal.
    assert noise["active_fraction"] == (pytest.approx(math.log(2)), 2)
    assert noise["dead_fraction_train"] == (pytest.approx(0.5 / math.sqrt(2)), 1)
    # Student's t: 2.776445 at 97.5% with four degrees of freedom.
    limit = 2.776445 * math.sqrt(3) * math.sqrt(1 / 3)
    assert analysis.noise_limit(table, PRICE, 3, np.inf) == pytest.approx(limit, rel=1e-6)
    alone = table.drop_duplicates(["choice", "l1_coefficient"])
    assert analysis.seed_noise(alone, PRICE)[1] == 0
    for rows, runs in ((table, 0), (alone, 3)):
        assert math.isnan(analysis.noise_limit(rows, PRICE, runs, 3))


def test_settings_are_paired_by_seed():
    """What all settings share of a seed is no noise; of other numbers of tokens it is another."""
    random, rows = np.random.default_rng(SEED), []
    for tokens in (50, 100):
        shared = 10 * random.normal(size=3)
        for setting in range(4):
            for seed in range(3):
                value = setting + shared[seed] + random.normal()
                rows.append((tokens, f"{tokens}-{setting}", seed, value))
    table = pd.DataFrame(rows, columns=["tokens", "choice", "seed", PRICE])
    table = table.assign(l1_coefficient=0.0, active_fraction=0.1)
    rest = table[PRICE] - table.groupby("choice")[PRICE].transform("mean")
    rest -= rest.groupby([table["tokens"], table["seed"]]).transform("mean")
    deviation, freedom = analysis.seed_noise(table, PRICE, paired=True)
    assert freedom == 2 * 2 * 3 and deviation == pytest.approx(math.sqrt((rest**2).sum() / freedom))
    assert analysis.seed_noise(table, PRICE)[0] > 3 * deviation


def test_a_family_of_tests_is_corrected():
    p = pd.Series([0.04, 0.001, np.nan, 0.02, 0.5])
    np.testing.assert_allclose(analysis.holm(p), [0.08, 0.004, np.nan, 0.06, 0.5], rtol=1e-6)
    # Half-widths of 95%: alone 2.2 is beyond one, of three differences it is not.
    assert analysis.below(pd.Series([-2.2, -2.9]), pd.Series([2.0, 2.0])).tolist() == [True, True]
    some = analysis.below(pd.Series([-2.2, 0.1, -5, 9, 0]), pd.Series([2.0] * 5))
    assert some.tolist() == [False, False, True, False, False]


def answers(run, right, task="arc_easy", seed=0):
    random = np.random.default_rng(seed)
    correct = (random.random(400) < right).astype(int)
    return pd.DataFrame({"run": run, "task": task, "correct": correct})


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


def test_models_are_compared_item_by_item():
    random = np.random.default_rng(SEED)
    answers = {task: random.integers(0, 2, (2, 400)) for task in ("piqa", "arc_easy")}
    answers["piqa"][1, :380] = answers["piqa"][0, :380]  # mostly alike
    records = [{task: marks[one] for task, marks in answers.items()} for one in (0, 1)]
    table = analysis.paired_records(*records).set_index("task")
    assert list(table.index) == ["arc_easy", "piqa", "mean"] and table["items"]["mean"] == 800
    resampled = []
    for task, marks in answers.items():
        gains = marks[0] - marks[1]
        assert table["difference"][task] == pytest.approx(gains.mean())
        drawn = gains[random.integers(0, 400, (10_000, 400))].mean(1)
        resampled.append(drawn)
        bounds = table.loc[task, ["low", "high"]].to_numpy(float)
        np.testing.assert_allclose(bounds, np.percentile(drawn, [2.5, 97.5]), atol=0.005)
    bounds = table.loc["mean", ["low", "high"]].to_numpy(float)
    expected = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    np.testing.assert_allclose(bounds, expected, atol=0.005)


def test_speedups_are_over_compiled_dense_of_the_same_case_and_call():
    cases = [{}, {"mode": "graph", "weight_sets": 8}, {"mode": "graph"}, {"device": "other"}]
    cases += [{"gated": False}, {"pattern": "even"}, {"dtype": "float32"}]
    parts = [
        speed_rows(64, 29.0, {BASE: 3.0 + 2 * n, UNION: 2.0}, **case)
        for n, case in enumerate(cases)
    ]
    table = analysis.speedups(together(*parts, speed_rows(64, 31.0, {BASE: 17.0, UNION: 2.0})))
    assert sorted(table.loc[table["provider"] == UNION, "speedup"]) == [1.5 + n for n in range(8)]
    assert (table.loc[table["provider"] == BASE, "speedup"] == 1).all() and len(table) == 16
    spread = {"p20": [9.0, 4.0], "p80": [12.0, 6.0]}
    one = analysis.speedups(speed_rows(64, 29.0, {BASE: 10.0, UNION: 5.0}, **spread))
    union = one.set_index("provider").loc[UNION]
    assert union[["speedup_low", "speedup", "speedup_high"]].tolist() == pytest.approx([1.5, 2, 3])
    times = {BASE: 2.0, UNION: 1.0, "auto": 1.0}
    table = analysis.speedups(speed_rows(500, 29.0, times, energy=[1000.0, 600.0, np.nan]))
    np.testing.assert_allclose(table["energy_per_token"], [2, 1.2, np.nan])
    np.testing.assert_allclose(table["energy_change"], [0, -40, np.nan])


def test_ours_stand_beside_the_release_like_for_like(tmp_path):
    third, words, card = "other.package:layer", analysis.PAPER, {"device": "card"}
    ours = speed_rows(64, 28.5, {BASE: 6.0, UNION: 3.0, "triton rowwise": 4.0, words: 5.0}, **card)
    newer = [speed_rows(64, 28.6, {BASE: 4, "triton rowwise": 4}, **card, date="2026-12-04")]
    for n, ratio in ((1, 0.75), (2, 0.625), (3, 0.6)):  # calls of one command: the median counts
        times = {BASE: n, UNION: ratio * n, third: 2 * n, "triton union FP8": n / 4, FP8: n / 2}
        call = card | {"date": f"2026-12-0{n}", "energy": [10, 10 - n, 1, 1, 1]}
        newer += [speed_rows(64, 28.6, times, **call)]
    for other in ({"command": "other"}, {"commit": "other"}):
        newer += [speed_rows(64, 28.6, {BASE: 1, UNION: 0.1}, **card | other, date="2026-12-01")]
    release = speed_rows(64, 29, {BASE: 6.0, "release": np.nan}, **card, what="layer", model="")
    release = release.iloc[[0, 1, 1]].assign(speedup=[1, 1.25, 1.1], relative_rms=[0, 0.4, 0.1])
    together(ours, *newer, speed_rows(64, 28.5, {BASE: 1, UNION: 0.1})).to_csv(tmp_path / "ffn.csv")
    pd.concat([release, release.assign(tokens=99)]).to_csv(tmp_path / "release.csv")
    table = analysis.like_for_like(analysis.Bench(tmp_path, device="card"))
    assert list(table.index.get_level_values("tokens")) == [64, 99]
    values = [1.2, 1.6, 1.25, 4.0, 2.0, 0.5, 3.0, 0.4, 3, 1.25]
    columns = [*analysis.SIDES, third, "dense, ms", "the release's error", "calls", "range"]
    np.testing.assert_allclose(table[columns].iloc[0], [*values], rtol=1e-6)
    saved = analysis.like_for_like(analysis.Bench(tmp_path, device="card"), "energy_change")
    assert saved[analysis.OURS].iloc[0] == pytest.approx(-20)
    cases = table.reset_index().assign(what=["layer", "model"], tokens=64, active=[29.0, 22.0])
    assert list(cases[analysis.SIDES].iloc[1].dropna()) == [1.25]
    assert len(analysis.at_level(cases, 29)) == 2  # each has its own nearest level


def test_the_second_half_begins_at_the_half():
    rows = [("dense", tokens, tokens / 10) for tokens in (0, 40, 100)]
    rows += [("auto", *point) for point in ((0, 0), (40, 9), (50, 11), (100, 13))]
    raced = pd.DataFrame(rows, columns=["backend", "tokens", "seconds"])
    assert analysis.late_gain(raced) == pytest.approx(150)
    raced = raced[raced["tokens"] != 50]  # between validations speed is even
    assert analysis.late_gain(raced) == pytest.approx(100 * (5 / (13 - 29 / 3) - 1))
