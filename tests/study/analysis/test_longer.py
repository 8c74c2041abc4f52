"""Tables over training tokens, and the time of two trainings to one loss."""

import numpy as np
import pandas as pd
import pytest
import scipy.interpolate
import scipy.stats

from study import analysis
from tests.factories.analysis import made, make_run, tables
from twell import results

NOTHING = results.load_runs("none", required=False)


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
    assert analysis.over_tokens(*NOTHING).empty


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
    ends = row["last_runs"], row["last_change"], row["last_train_change"]
    assert ends == pytest.approx((1, change[-1], 2 * change[-1]))
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
    nothing = analysis.race(*NOTHING)
    assert nothing.empty and analysis.reached(nothing).empty

