"""Accuracies of tasks, paired answers, and models that `twell relufy` changed."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from study import analysis
from tests.factories import SEED
from tests.factories.analysis import (
    GOOD,
    TEACHER,
    kept_answers,
    relufied_run,
    relufied_study,
    tables,
)


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


def test_outcomes_are_of_the_last_validation_and_the_sparsest_is_last():
    table = analysis.relufied_runs(
        *tables(
            relufied_run("b", 0.1, (12, 8), kl=0.3),
            relufied_run("a", 0.0, (60, 40), kl=0.1),
            relufied_run("c", 0.1, (6, 4), kl=0.5, threshold=0.2, tokens=2000),
            relufied_run("cut", 0.1, (6, 4), kl=9, complete=False),
            GOOD,
        )
    ).set_index("run")
    assert [*table.index] == ["a", "b", "c"]
    assert table["active_fraction"].tolist() == pytest.approx([0.5, 0.1, 0.05])  # of 100 neurons
    assert table["kl"].tolist() == [0.1, 0.3, 0.5]
    assert table["rise"].tolist() == pytest.approx([0.1, 0.3, 0.5])
    # Steered runs log the coefficient; the last row counts.
    assert table["l1"].tolist() == [0.0, 4e-3, 4e-3]
    other = relufied_run("d", 0.1, (12, 8), kl=0.3, teacher="another")
    with pytest.raises(ValueError, match="these differ in teacher"):
        analysis.relufied_runs(*tables(relufied_run("b", 0.1, (12, 8), kl=0.3), other))


def test_answers_are_paired_with_the_original_and_with_relu_alone():
    pairs = analysis.relufied_pairs(tables(*relufied_study())[0], kept_answers())
    means = pairs[pairs["task"] == "mean"].set_index(["run", "reference"])["difference"]
    expected = {
        ("alone", "original"): -0.125,  # of piqa a quarter, of arc_easy nothing
        ("tenth", "original"): -0.375,
        ("tenth", "ReLU alone"): -0.25,
        ("longer", "original"): -0.5,
    }
    assert means.to_dict() == pytest.approx(expected)
    beside = pairs.groupby("reference")["beside"].unique().map(list)
    assert beside.to_dict() == {"original": ["small-original-abcdef12"], "ReLU alone": ["alone"]}


def test_accuracy_over_the_divergence():
    """Students that answer so many of 20 items of each task; the original answers all."""
    right, kls = (18, 14, 10, 7), (0.1, 0.2, 0.4, 0.8)
    runs = [
        relufied_run(name, 0.1, (12, 8), kl, teacher_sha256=TEACHER, seed=seed)
        for seed, (name, kl) in enumerate(zip("abcd", kls, strict=True))
    ]
    study = tables(*runs)
    marks = {name: "1" * n + "0" * (20 - n) for name, n in zip("abcd", right, strict=True)}
    marks["small-original-abcdef12"] = "1" * 20
    items = kept_answers({name: (mark, mark) for name, mark in marks.items()})
    pairs = analysis.relufied_pairs(study[0], items)
    line = analysis.relufied_frontier(analysis.relufied_runs(*study), pairs, items, 0.4)
    fit = scipy.stats.linregress(np.log(kls), np.array(right) / 20 - 1)
    assert [line["intercept"], line["slope"]] == pytest.approx([fit.intercept, fit.slope])
    assert line["kl"] == pytest.approx(np.exp((-0.4 - fit.intercept) / fit.slope))
    assert line["students"] == 4 and line["low"] < line["kl"] < line["high"]
