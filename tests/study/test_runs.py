"""Tables of runs, from logs made by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.interpolate

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
    with pytest.raises(ValueError, match="num_layers"):
        analysis.race(*tables(slow, other))
