"""Tables of runs, from logs made by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.interpolate
import scipy.stats

from study import analysis
from tests.factories.analysis import (
    BY_TWO,
    DENSE,
    DENSELY,
    GOOD,
    SPARSELY,
    UNFINISHED,
    UNUSED,
    family,
    made,
    make_run,
    make_trace,
    scaled,
    tables,
    trained,
)
from twell import results

NOTHING = pd.DataFrame(), pd.DataFrame()


PRICE = "cross_entropy_change"


LIMIT = (
    12.7062047 * 0.4 / math.sqrt(2)
)  # of the family's prices: Student's t, one degree of freedom


def numbers(values):
    return pytest.approx(values, nan_ok=True)


def test_what_runs_share_is_described():
    run = {"parameters": 99_306_240, "num_layers": 12, "intermediate_size": 2112, "tokens": 5e7}
    both = pd.DataFrame([run | {"l1_coefficient": l1} for l1 in (0.0, 6e-4)])
    shape = "99.3 M parameters, 12 layers, 2,112 neurons a layer"
    assert analysis.described(both) == f"{shape}, 50 M training tokens"
    assert analysis.described(both[1:]) == f"{shape}, 50 M training tokens, L1 = 6e-4"
    assert analysis.described(both.assign(tokens=[1e6, 2e6], parameters=None)) == shape[19:]
    assert analysis.described(both[:0]) == analysis.described(pd.DataFrame()) == ""


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
    alone = analysis.sweep(*tables(GOOD, UNUSED))  # no baseline
    assert alone[PRICE].isna().all()


def test_a_sweep_refuses_runs_that_do_not_compare():
    with pytest.raises(ValueError, match="none of the 1 runs is complete: unfinished"):
        analysis.sweep(*tables(UNFINISHED))
    with pytest.raises(ValueError, match="differ in choice: recipe .dense., re-init"):
        analysis.sweep(*tables(DENSE, make_run("reinit", 1e-3, 4.0, 5.0, (3, 1), reinit=0.1)))
    for field, first, second in (("learning_rate", 1, 2), ("num_layers", 2, 3), ("reinit", 1, 2)):
        runs = (
            make_run(n, 0.0, 4, 5, (3, 1), **{field: v}) for n, v in (("a", first), ("b", second))
        )
        with pytest.raises(ValueError, match=rf"differ in {field}: {first} \(a\), {second} \(b\)"):
            analysis.sweep(*tables(*runs))
    older = make_run("a", 1e-3, 4.0, 5.0, (3, 1), learning_rate=1e-3, seed=1, backend="dense")
    newer = make_run("b", 0.0, 4.0, 5.0, (3, 1), seed=2, backend="triton")
    assert len(analysis.sweep(*tables(older, newer))) == 2  # the second is older than the field


def test_levels_are_means_over_seeds():
    again = make_run("good-again", 1e-3, 4.08, 5.0, (1, 7))
    worse = make_run("worse", 1e-2, 4.5, 5.0, (1, 2))
    table = analysis.levels(analysis.sweep(*tables(DENSE, GOOD, again, UNUSED, worse)))
    assert table["l1_coefficient"].tolist() == [0, 1e-3, 1e-2]
    assert table["runs"].tolist() == [1, 2, 2] and table["run"].tolist()[1] == "good"
    assert table["status"].tolist() == ["alive", "alive", "unused"]  # the worst
    means = table.loc[1, ["cross_entropy", "active", "tokens"]].tolist()
    assert means == pytest.approx([4.06, 3, 1000])
    names = [analysis.level_name(l1) for l1 in (0, 2e-5, 1.5e-4, 0.001, 0.1, 0.3)]
    assert names == ["0", "2e-5", "1.5e-4", "1e-3", "0.1", "0.3"]


def test_the_line_through_the_levels():
    table = pd.DataFrame({"active_fraction": [0.4, 0.1, 0.025, 0.001], PRICE: [0.0, 1, 5, 0.1]})
    table["status"] = ["alive", "alive", "alive", "unused"]
    prices = [analysis.price_at(table, share) for share in (0.1, 0.05, 0.2, 0.5, 0.01)]
    assert prices == numbers([1, 3, 0.5, np.nan, np.nan])  # linear in the logarithm of activity
    assert math.isnan(analysis.price_at(table[:0], 0.1))


def test_curves_over_training():
    runs, log = tables(GOOD, DENSE)
    curves = analysis.training_curves(runs, log, "active_mean")
    assert curves.drop(columns="choice").to_numpy().tolist() == [
        [run, l1, step, 100 * step, 10 * step + 0.5]
        for run, l1 in (("dense", 0.0), ("good", 1e-3))
        for step in (2, 4, 10)
    ]
    assert analysis.training_curves(*tables(DENSE), "dead_fraction").empty
    curve = pd.DataFrame({"tokens": [40, 10, 20, 30], "value": [10.0, 50.0, 12.0, 8.5]})
    settled = [analysis.settles_after(curve, within) for within in (0.2, 0.1, 5)]
    assert settled == [0.5, 1.0, 0.25]


def test_runs_in_a_list():
    runs, log = tables(GOOD, UNFINISHED, DENSE)
    commands = ["twell train", "accelerate launch --num_processes 4 -m twell train", "twell train"]
    runs = runs.assign(parameters=[10, 20, 30], seed=[1, 2, 3], device="here", command=commands)
    speed = {"run": "good", "step": [1, 2, 3], "split": "train", "metric": "tokens_per_second"}
    log = pd.concat([log, pd.DataFrame(speed).assign(value=[5.0, 1.0, 7.0])], ignore_index=True)
    table = analysis.list_runs(runs, log)
    assert table["run"].tolist() == ["dense", "good", "unfinished"]
    good = [10, 1000, 1e-3, 1, 4.04, 2, 0.3, 0.02, 5]
    assert table.loc[1].tolist() == ["good", *map(pytest.approx, good), "here", True]
    assert math.isnan(table["tokens_per_second"][0]) and not table["complete"][2]
    assert table["device"][2] == "4 x here"
    for missing in (None, "", np.nan):
        with pytest.raises(ValueError, match="unfinished has no parameters in config.yaml and pro"):
            analysis.list_runs(runs.assign(parameters=[10, missing, 30]), log)


def test_layers_of_a_log():
    _, log = tables(GOOD)
    more = [
        (step, layer, m, 7.0 * step) for step in (5, 10) for layer in (0, 1) for m in ("p99", "max")
    ]
    more = pd.DataFrame(more, columns=["step", "layer", "metric", "value"])
    more = more.assign(run="good", split="valid", metric="active_" + more["metric"])
    table = analysis.logged_layers(pd.concat([log, more], ignore_index=True), 100)
    columns = ["layer", "mean", "p99", "max", "dead", "active_fraction", "max_over_mean"]
    assert table.columns.tolist() == columns
    expected = [[0, 3, 70, 70, 0.2, 0.03, 70 / 3], [1, 1, 70, 70, 0.4, 0.01, 70]]
    np.testing.assert_allclose(table, expected)
    with pytest.raises(ValueError, match="no validation"):
        analysis.logged_layers(log[log["split"] == "train"], 100)


def test_tables_to_be_read():
    table = pd.DataFrame({"l1": [6e-4, np.nan], "paper_l1": [np.nan, 2e-5], "nothing": np.nan})
    table = table.assign(value=[123.456, -1e-12], name=["a", "b"], number=[1, 2])
    short = analysis.readable(table)
    assert short.columns.tolist() == ["l1", "paper_l1", "value", "name", "number"]
    assert short.to_numpy().tolist() == [["6e-4", "–", "123.5", "a", 1], ["–", "2e-5", "0", "b", 2]]
    assert analysis.readable(table[:0]).empty and table["value"][1] == -1e-12


def test_a_choice_is_read_from_the_configuration():
    named = [
        ({}, "recipe"),
        ({"activation": "silu"}, "SiLU"),
        ({"gated": False}, "non-gated"),
        ({"reinit": 0.1}, "re-initialisation"),
        ({"l1_zero_steps": 5}, "L1 warm-up"),
        ({"l1_warmup_steps": 5}, "L1 warm-up"),
        ({"balance_every": 1}, "balanced columns"),
        ({"gated": False, "reinit": 0.2, "balance_every": 0}, "non-gated + re-initialisation"),
        ({"reinit": 0.0, "gated": True, "seed": 3}, "recipe"),
    ]
    fields, names = zip(*named, strict=True)
    assert analysis.choice(pd.DataFrame(fields)).tolist() == list(names)  # others' fields are NaN
    assert [analysis.choice(pd.DataFrame([field], [7]))[7] for field in fields] == list(names)


def test_choices_are_beside_the_recipe():
    table = analysis.choices(*tables(*family()))
    assert table["choice"][0] == "recipe" and "l1-c-0" not in set(table["run"])
    runs = table.set_index("run")
    assert runs.loc[["silu-0", "wide-a"], PRICE].tolist() == pytest.approx([-1, 1.1])
    assert runs.loc[["ours", "wide-a"], "active_fraction"].tolist() == [0.02, 0.02]
    longer = make_run("longer", 0.0, 4.0, 5.0, (1, 1), activation="silu", tokens=2000)
    with pytest.raises(ValueError, match="these differ in tokens: 1000 .*, 2000"):
        analysis.choices(*tables(*family(), longer))
    assert analysis.choices(*tables(UNFINISHED)).empty and analysis.choices(*NOTHING).empty
    assert analysis.compared_level(table) == 1e-3
    for runs, level in (((DENSE, UNUSED, GOOD), 1e-3), ((DENSE,), np.nan)):  # the lowest of equals
        assert analysis.compared_level(analysis.choices(*tables(*runs))) == numbers(level)


def test_runs_with_a_remedy():
    runs, log = tables(*family(), made("unfinished", 1e-3, 1, 2, 3, reinit=0.1, complete=False))
    names = ["l1-a-0", "l1-a-1", "reinit-0", "reinit-1", "warm-0", "warm-1"]
    assert analysis.remedied(runs, 1e-3)["run"].tolist() == names
    assert analysis.remedied(runs, 3e-3).empty and analysis.remedied(runs[:0], 1e-3).empty


def test_noise_is_pooled_over_settings():
    table = pd.DataFrame({"choice": ["recipe"] * 6 + ["SiLU"] * 2 + ["other"]})
    table["l1_coefficient"] = [0, 0, 0, 1, 1, 2, 0, 0, 0]
    table[PRICE] = [1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 4.0, 8.0, 1.0]
    table["active_fraction"] = [0.1, 0.2, 0.4, 0.03, 0.03, 0.5, 0.99999, 1.0, 0.9]
    table["dead_fraction_train"] = [0.0, 0.0, 0.0, 0.25, 0.75, np.nan, 0.0, 0.5, 0.1]
    noise = {column: analysis.seed_noise(table, column) for column in analysis.QUANTITIES}
    assert noise[PRICE] == (pytest.approx(math.sqrt((2 * 1 + 1 * 2 + 1 * 8) / 4)), 4)
    # Neither SiLU nor runs that are all equal.
    assert noise["active_fraction"] == (pytest.approx(math.log(2)), 2)
    assert noise["dead_fraction_train"] == (pytest.approx(0.5 / math.sqrt(2)), 1)
    # Student's t: 2.776445 at 97.5% with four degrees of freedom.
    limit = 2.776445 * math.sqrt(3) * math.sqrt(1 + 1 / 3)
    assert analysis.noise_limit(table, PRICE, 3, 1) == pytest.approx(limit, rel=1e-6)
    alone = table.drop_duplicates(["choice", "l1_coefficient"])
    assert analysis.seed_noise(alone, PRICE)[1] == 0
    for rows, runs in ((table, 0), (alone, 3)):
        assert math.isnan(analysis.noise_limit(rows, PRICE, runs, 3))


def test_a_difference_counts_above_the_noise():
    table = analysis.choices(*tables(*family()))
    recipe, silu = ("recipe", 0.0), ("SiLU", 0.0)
    result = analysis.contrast(table, PRICE, silu, recipe)
    assert (result["runs"], result["other_runs"], result["verdict"]) == (2, 2, "within noise")
    assert (result["difference"], result["limit"]) == pytest.approx((-1, LIMIT))
    single = analysis.contrast(table, PRICE, ("recipe", 3e-3), recipe)
    assert single["limit"] == pytest.approx(LIMIT * math.sqrt(1.5))
    for change, verdict in ((3.7, "more"), (-3.7, "less"), (3.5, "within noise")):
        other = table.assign(**{PRICE: table[PRICE].where(table["choice"] != "SiLU", change)})
        assert analysis.contrast(other, PRICE, silu, recipe)["verdict"] == verdict
    assert analysis.contrast(table, PRICE, ("SiLU", 1e-3), recipe)["verdict"] == ""
    alone = table.drop_duplicates(["choice", "l1_coefficient"])
    assert analysis.contrast(alone, PRICE, silu, recipe)["verdict"] == "no seeds"
    result = analysis.contrast(table, "active_fraction", ("L1 warm-up", 1e-3), ("recipe", 1e-3))
    limit = 100 * math.expm1(12.7062047 * math.log(2.02 / 1.98) / math.sqrt(2))
    assert (result["difference"], result["limit"]) == pytest.approx((300, limit), rel=1e-6)
    assert result["verdict"] == "more"
    rows = analysis.contrasts(table).set_index(["choice", "l1_coefficient", "quantity"])
    assert len(rows) == 3 * 6 and "recipe" not in rows.index.get_level_values(0)
    dead = rows.loc[("re-initialisation", 1e-3, "dead neurons, %")]
    assert dead[["value", "other", "difference"]].tolist() == pytest.approx([0.5, 40, -39.5])
    assert dead["verdict"] == "no seeds"  # no setting's dead neurons differ between seeds


def beside(*more, **changes):
    """`against_frontier` of the family and other runs."""
    return analysis.against_frontier(analysis.choices(*tables(*family(**changes), *more)))


def test_choices_beside_the_line_of_the_recipe():
    rows = beside(warm_active=math.sqrt(2 * 20)).set_index("choice")
    assert set(rows.index) == {"L1 warm-up", "re-initialisation", "balanced columns"}
    # Half way in logarithms, between two levels of two seeds.
    warm = rows.loc["L1 warm-up", ["line_price", "price", "line_dead", "dead", "limit"]]
    assert warm.tolist() == pytest.approx(
        [0.5, 0.9, 0.2, 0, LIMIT * math.sqrt(1 / 2 + 2 * 0.25 / 2)]
    )
    assert rows.loc["L1 warm-up", "verdict"] == "within noise"
    outside = beside(made("dense", 0.0, 0.0, 40.0, 0.0, balance_every=1)).query("price == 0")
    assert outside["line_price"].isna().all() and outside["verdict"].tolist() == [""]
    sparser = made("sparser", 3e-3, 2.0, math.sqrt(2), 10.0, balance_every=1)
    row = beside(sparser).query("l1_coefficient == 3e-3").iloc[0]  # between one run and two
    assert row["limit"] == pytest.approx(LIMIT * math.sqrt(1 + 0.25 / 1 + 0.25 / 2))
    # A level whose feed-forward layers are unused is no end of the line.
    sparser = made("sparser", 3e-3, 2.0, 0.5, 10.0, balance_every=1)
    unused = make_run("unused", 1e-2, 4.4, 4.41, (0.1, 0.1), window=(0.9,))
    row = beside(sparser, unused).query("l1_coefficient == 3e-3")
    assert row[["line_price", "line_dead"]].isna().all(axis=None)
    assert analysis.against_frontier(analysis.choices(*NOTHING)).empty


def test_choices_beside_the_papers_tables():
    paper, table = results.paper(), analysis.choices(*tables(*family()))
    third, fourth, fifth = (
        analysis.choice_table(paper, table, f"Table {n}").set_index(["choice", "paper_l1"])
        for n in (3, 4, 5)
    )
    assert third["paper_cross_entropy"].tolist() == [2.255, 2.24, 2.297]
    assert third["l1"].tolist() == [0, 0, 1e-3]
    silu = third.loc[("SiLU", 0), ["paper_active", "runs", "active"]]
    assert silu.tolist() == [5632, 2, 100]
    recipe = third.loc[("recipe", 2e-5), ["change", "active", "dead"]]
    assert recipe.tolist() == pytest.approx([1.0, 2.0, 40.0])
    assert fourth["change"].tolist() == numbers([0, 1, np.nan, 0.1, 1.1, np.nan])
    warm = fifth.loc[("L1 warm-up", 3e-4), ["paper_active", "l1", "active"]]
    assert warm.tolist() == [108, 1e-3, 8]
    reinit = fifth.loc[("re-initialisation", 2e-5), ["paper_cross_entropy", "dead"]]
    assert reinit.tolist() == pytest.approx([2.298, 0.5])
    nothing = analysis.choice_table(paper, analysis.choices(*NOTHING), "Table 5")
    assert nothing["l1"].isna().all() and nothing["paper_active"].tolist() == [911, 29, 29, 108]


def test_sizes():
    runs = [scaled("a", 10, 0, 0, 20), scaled("b", 10, 1e-3, 1.0, 5)]
    runs += [scaled("c", 40, 0, 0, 20, width=200), scaled("d", 40, 1e-3, 1.5, 6, width=200)]
    runs += [scaled("e", 40, 3e-3, 9, 1, width=200), scaled("f", 90, 1e-3, 1, 4, width=400)]
    runs += [scaled("g", 99, 0, 0, 20), scaled("h", 10, 1e-3, 1, 2, reinit=0.1)]
    runs += [scaled("i", 90, 0, 0, 50, width=400, complete=False)]
    table = analysis.sizes(*tables(*runs))
    columns = ["parameters", "tokens", "l1_coefficient", "active", "active_fraction", "change"]
    assert table[columns].to_numpy() == numbers(
        np.array(
            [[10, 200, 1e-3, 5, 0.05, 1], [40, 800, 1e-3, 6, 0.03, 1.5]]
            + [[90, 1800, 1e-3, 4, 0.01, np.nan]]
        )
    )
    assert analysis.sizes(*tables(runs[3], runs[4]))["active"].tolist() == [6]  # the lowest level
    assert analysis.sizes(*NOTHING).empty and analysis.sizes(*tables(runs[0], runs[-1])).empty
    table = analysis.paper_sizes(results.paper())
    assert table["model"].tolist() == ["0.5B", "1.5B", "2B"]
    assert table["active"].tolist() == [39, 29, 24]
    assert table["change"].dropna().tolist() == pytest.approx([100 * (2.297 / 2.255 - 1)])


def computed(*runs):
    return analysis.computed_otherwise(*tables(*runs))


def test_one_training_computed_in_several_ways():
    unfinished = trained("c-unfinished", [1, 1], [1, 1], [1, 1], "auto", complete=False, tokens=400)
    table = computed(SPARSELY, BY_TWO, unfinished, DENSELY)  # then fewest devices first, then dense
    ways = ["dense, 1 device", "sparse kernels, 1 device", "sparse kernels, 2 devices"]
    expected = pd.DataFrame({"run": ["dense", "a-sparse", "b-two"], "way": ways})
    expected = expected.assign(backend=["dense", "triton", "triton"], devices=[1, 1, 2])
    expected = expected.assign(cross_entropy=[4, 4.1, 4.2], active=5.0, apart=[0, 0.5, 0.5])
    expected["tokens_per_second"] = [20.0, 50, 95]  # the last two of four rows are the second half
    expected = expected.assign(peak_memory=[500.0, 400, 200], peak_memory_whole=[800.0, 900, 600])
    pd.testing.assert_frame_equal(table, expected)
    assert computed(SPARSELY, DENSELY)["way"].tolist() == ["dense", "sparse kernels"]
    assert computed(BY_TWO)["apart"].tolist() == [0]
    sharded = "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 -m twell train"
    assert computed(trained("s", [8], [1], command=sharded))["devices"].tolist() == [4]
    curves = analysis.computed_curves(*tables(SPARSELY, unfinished))
    speeds = curves[curves["metric"] == "tokens_per_second"]
    assert set(curves["run"]) == {"a-sparse"} and len(curves) == 12
    assert speeds["value"].tolist() == [10, 20, 60, 40] and speeds["tokens"].iloc[3] == 400


def test_only_rows_of_the_same_steps_are_compared():
    """A row is the mean over the steps since the last one, so the same step may be of others."""
    fine = trained("fine", [8, 7, 6, 5], [1, 1, 2, 4])
    table = computed(fine, trained("sparse", [7.5, 5.25], [2, 8], backend="triton", every=2))
    assert np.isnan(table["apart"].iloc[1])
    config, log = trained("sparse", [8.5, 7, 5.5, 5.25], [1, 1, 1, 1], backend="triton")
    table = computed(fine, (config, log[log["step"] != 2]))  # row 3 is now of steps 2 and 3
    assert table["apart"].tolist() == [0, 0.5]


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
    runs += [layered("student", 1, 2, 9, 4, teacher="silu")]
    runs += [layered("silu", 1, 2, 9, 4, activation="silu")]
    table = analysis.findings(*tables(*runs), kept, peak_depth=0.6)
    assert table["run"].tolist() == [f"m-seed-{n}" for n in range(3)] + ["low", "two"]
    assert table["first_two_least"].tolist() == [True] * 3 + [False, None]
    seeds = analysis.shared(table[table["setting"] == "m"]).set_index("finding")
    every = analysis.shared(table).set_index("finding")
    assert seeds.loc["first_two_least"].tolist() == [3, 3, "in all"]
    assert every.loc["first_two_least"].tolist() == [3, 4, "in some"]
    assert every.loc["ten_times"].tolist() == [4, 5, "in some"]
    assert seeds.loc["no_overflow", "models"] == 2  # two of the three have traces


def test_points_have_intervals_where_there_are_seeds():
    runs = []
    for tokens, seeds in ((1000, 3), (2000, 1)):
        for seed in range(seeds):
            for level, price, active in ((0.0, 0.0, 20.0), (1e-3, 1.0, 2.0)):
                name = f"{tokens}-{level}-{seed}"
                more = {"tokens": tokens, "seed": seed}
                more["train_price"] = 2 * price + seed / 10
                runs += [made(name, level, price + seed / 10, active + seed / 10, 5 + seed, **more)]
    runs += [made("other", 1e-3, 1.0, 2.0, 5, reinit=0.1), made("alone", 1e-2, 1.0, 2.0, 5)]
    table = analysis.over_tokens(*tables(*runs)).set_index(["l1_coefficient", "tokens"])
    assert table.index.tolist() == [(level, n) for level in (0.0, 1e-3) for n in (1000, 2000)]
    assert table["runs"].tolist() == [3, 1, 3, 1]
    several, single = table.loc[(1e-3, 1000)], table.loc[(1e-3, 2000)]
    assert several["active"] == pytest.approx(2.1) and single["change"] == pytest.approx(1)
    assert single["train_change"] == pytest.approx(2)
    for name in ("active", "dead", "change", "train_change"):
        assert several[f"{name}_low"] < several[name] < several[f"{name}_high"], name
        assert np.isnan(single[f"{name}_low"]) and np.isnan(single[f"{name}_high"]), name
    # The change is of two means of three; of L1 = 0 from itself there is none.
    each = analysis.sweep(*tables(*(run for run in runs if run[0]["run"].startswith("1000"))))
    limit = analysis.noise_limit(each, "cross_entropy_change", 3, 3)
    assert several["change_high"] - several["change"] == pytest.approx(limit)
    assert np.isnan(table.loc[(0.0, 1000), "change_low"])
    # A run without rows of training does not count for its text.
    lost = pd.concat(log for _, log in runs)
    lost = lost[(lost["run"] != "1000-0.001-0") | (lost["split"] == "valid")]
    fewer = analysis.over_tokens(pd.DataFrame([run for run, _ in runs]), lost)
    (fewer,) = fewer.query("tokens == 1000 and l1_coefficient == 0.001").to_dict("records")
    each["train"] = [
        (100 + 2 * (l1 > 0) + n / 10) / 1.001 - 100
        for n, l1 in zip(each["run"].str[-1].astype(int), each["l1_coefficient"], strict=True)
    ]
    each.loc[each["run"] == "1000-0.001-0", "train"] = np.nan
    limit = analysis.noise_limit(each, "train", 2, 3)
    assert fewer["train_change_high"] - fewer["train_change"] == pytest.approx(limit)
    assert fewer["train_change"] == pytest.approx(102.15 / 1.001 - 100)
    nothing = results.load_runs("none", required=False)
    assert analysis.over_tokens(*nothing).empty


def schedules(change, level=1e-3, seeds=1, spread=0.0):
    """Runs at L1 = 0 and at a level on 25 to 300 M tokens; seeds lie symmetrically.

    change: by tokens the price on held-out text, of which the training text has twice.
    """
    runs = []
    for tokens, price in change.items():
        for seed in range(seeds):
            off = spread * (seed - (seeds - 1) / 2)
            for l1, value in ((0.0, 0.0), (level, price)):
                name, more = f"{tokens}-{l1}-{seed}", {"tokens": tokens, "seed": seed}
                more["train_price"] = 2 * (value + off)
                runs.append(made(name, l1, value + off, 2.0, 5, **more))
    return runs


def test_the_line_over_doublings_has_intervals():
    """Of one run each they are those of a line, or a parabola, through the differences; seeds whose
    mean is the same move nothing and narrow them."""
    tokens = np.array([25e6, 50e6, 1e8, 2e8, 3e8])
    doublings = np.log2(tokens / 3e8)
    bent = 4 + 0.5 * doublings - 0.4 * doublings**2 / 2
    change = bent + np.array([0.1, -0.2, 0, 0.2, -0.1])
    runs = schedules(dict(zip(tokens.astype(int), change, strict=True)))
    twice = schedules(dict.fromkeys((10**7, 10**8), 1.0), level=1.0)
    (row,) = analysis.trend(*tables(*runs, *twice[1::2])).to_dict("records")
    assert (row["l1_coefficient"], row["budgets"], row["runs"], row["last"]) == (1e-3, 5, 10, 3e8)
    ends = row["last_change"], row["last_train_change"]
    assert ends == pytest.approx((change[-1], 2 * change[-1]))
    fit = scipy.stats.linregress(doublings, change)
    assert row["slope"] == pytest.approx(fit.slope)
    assert row["slope_limit"] == pytest.approx(scipy.stats.t.ppf(0.975, 3) * fit.stderr)
    assert row["bend"] == pytest.approx(2 * np.polyfit(doublings, change, 2)[0])
    assert row["later_bend"] == pytest.approx(2 * np.polyfit(doublings[1:], change[1:], 2)[0])

    exact = dict(zip(tokens.astype(int), bent, strict=True))
    near, wide = (
        analysis.trend(*tables(*schedules(exact, seeds=3, spread=spread))).iloc[0]
        for spread in (0.01, 0.1)
    )
    assert near["runs"] == 30 and near["bend"] == pytest.approx(-0.4)
    assert wide["bend_limit"] == pytest.approx(10 * near["bend_limit"], rel=1e-3)
    residual = np.sqrt(20 * 0.1**2 / (30 - 8))  # at most: each of 10 means has two seeds 0.1 off
    square = doublings**2 / 2
    square = square - np.polyval(np.polyfit(doublings, square, 1), doublings)
    error = scipy.stats.t.ppf(0.975, 22) * residual * np.sqrt(2 / 3 / (square**2).sum())
    assert wide["bend_limit"] == pytest.approx(error, rel=1e-3)

    three = analysis.trend(*tables(*schedules({10**7: 1.0, 10**8: 2.0, 10**9: 2.0}))).iloc[0]
    assert three["slope_limit"] > 0 and np.isnan(three["later_bend"])
    assert three["bend"] < 0 and np.isnan(three["bend_limit"])  # a parabola through all
    assert analysis.trend(*tables(*twice)).empty


def racer(name, speeds, losses, **config):
    """A run with rows of 100 tokens, validated after each; on training text a nat less."""
    rows = [(100 * n, "train", "tokens_per_second", speed) for n, speed in enumerate(speeds, 1)]
    rows += [(100 * n, "train", "peak_memory", speed * 1e9) for n, speed in enumerate(speeds, 1)]
    rows += [(100 * n, "valid", "cross_entropy", loss) for n, loss in enumerate(losses)]
    rows += [(100 * n, "train", "cross_entropy", loss - 1) for n, loss in enumerate(losses)]
    log = pd.DataFrame(rows, columns=["tokens", "split", "metric", "value"])
    log = log.assign(run=name, step=log["tokens"], layer=pd.array([pd.NA] * len(log), "Int64"))
    return make_run(name, 1e-3, 4, 5, (1, 1), **config)[0], log


def test_a_race_ends_at_the_loss_that_both_reach():
    slow = racer("a", [10, 10], [6, 5, 4], backend="dense")
    fast = racer("b", [20, 50], [7, 5, 3], backend="auto")
    ends = analysis.reached(analysis.race(*tables(fast, slow))).set_index("run")
    assert ends.index.tolist() == ["a", "b"] and set(ends["cross_entropy"]) == {4}
    assert ends.loc["a", "seconds"] == 20 and ends.loc["b", "seconds"] == pytest.approx(5 + 1)
    assert ends.loc["b", "tokens"] == pytest.approx(150) and ends.loc["b", "last"] == 3
    raced = analysis.race(*tables(fast, slow))
    early = analysis.reached(raced, 3.5).set_index("run")
    assert np.isnan(early.loc["a", "seconds"]) and early.loc["b", "tokens"] == pytest.approx(175)
    bent = analysis.race(*tables(racer("a", [10, 10, 10], [9, 5, 3, 2.5], backend="dense")))
    loss = scipy.interpolate.pchip_interpolate([0, 100, 200, 300], [9, 5, 3, 2.5], 140)
    assert loss < 4.2  # by a straight line
    assert analysis.reached(bent, loss)["tokens"].item() == pytest.approx(140)
    assert analysis.late_gain(raced) == pytest.approx(400)  # 50 tokens/s over 10
    other = racer("c", [10, 10], [9, 5, 4], backend="auto", num_layers=3)
    with pytest.raises(ValueError, match="a race is of one model.*num_layers"):
        analysis.race(*tables(slow, other))
    nothing = analysis.race(*results.load_runs("none", required=False))
    assert nothing.empty and analysis.reached(nothing).empty
