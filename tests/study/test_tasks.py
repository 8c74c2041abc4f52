"""Paired answers of two models or of runs, against plain resampling."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories import SEED


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
