"""Tables of runs, from logs made by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import DENSE, GOOD, UNFINISHED, UNUSED, make_run, tables

PRICE = "cross_entropy_change"


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
    for field in ("learning_rate", "num_layers"):
        runs = [make_run(f"r{n}", 0.0, 4, 5, (3, 1), **{field: n}) for n in (2, 3)]
        with pytest.raises(ValueError, match=f"differ in {field}: 2"):
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
