"""Accuracies of tasks, paired answers, and models that `twell relufy` changed."""

import re

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories import SEED
from tests.factories.analysis import (
    GOOD,
    TEACHER,
    evaluation,
    kept_answers,
    relufied_run,
    relufied_study,
    speed_rows,
    tables,
)


def rows(table, *columns):
    return sorted(table[list(columns)].itertuples(index=False, name=None))


def levels_of(*records):
    return analysis.by_level(analysis.seven_tasks(analysis.evaluations(records)))


def test_evaluations_say_what_is_near_chance():
    record = evaluation(tasks=("arc_easy", "piqa"), l1=2e-3)
    scores = record["lm_eval"]["results"]
    scores["arc_easy"] |= {"acc,none": 0.2701, "acc_norm,none": 0.269, "acc_norm_stderr,none": 0.01}
    scores["arc_easy"]["alias"] = "arc_easy"
    scores["piqa"] |= {"acc,none": 0.4799, "perplexity,none": 7.0, "perplexity_stderr,none": 0.1}
    # Two wrong answers say nothing.
    others = {"paper7": (0.9, "N/A", 0.5), "own": (0.9, 0.1, None), "two": (0.0, 0.0, 0.5)}
    for task, (accuracy, stderr, chance) in others.items():
        scores[task] = {"sample_len": 2, "acc,strict": accuracy, "acc_stderr,strict": stderr}
        record["tasks"][task] = {"chance": chance}
    table = analysis.evaluations([record, evaluation("x", training_tokens=None, tasks=("piqa",))])
    assert table[["task", "metric", "accuracy", "verdict"]].to_numpy().tolist() == [
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
    assert np.isnan([table["stderr"][3], table["chance"][4], table["training_tokens"][6]]).all()


def test_training_tokens_are_those_of_the_same_weights():
    records = [evaluation(name, training_tokens=None, tasks=("piqa",)) for name in "abcdef"]
    for record, weights in zip(records, ("1", "1", "2", "3", "", ""), strict=True):
        files = {f"{record['model']['name']}.safetensors": weights} if weights else {}
        record["model"]["sha256"] = files
    del records[4]["model"]["sha256"]
    for record in records[1::2]:
        record["model"]["training_tokens"] = 7
    # The third's weights are nobody else's, the fifth's are not known.
    expected = [7, 7, np.nan, 7, np.nan, 7]
    for some, tokens in ((records, expected), (records[::-1], expected[::-1])):
        np.testing.assert_array_equal(analysis.evaluations(some)["training_tokens"], tokens)
    records[2]["model"] |= {"training_tokens": 9, "sha256": records[0]["model"]["sha256"]}
    assert analysis.evaluations(records[1:3])["training_tokens"].tolist() == [7, 9]  # its own first


def test_seven_tasks_are_of_the_fullest_evaluation():
    few = evaluation("twice", gain=0.5)
    for scores in few["lm_eval"]["results"].values():
        scores["sample_len"] //= 10
    full = evaluation("twice", gain=0.1)
    full["tasks"]["held_out_continuation"] = {"chance": 0.25}
    held_out = {"sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.1}
    full["lm_eval"]["results"]["held_out_continuation"] = held_out
    records = [few, full, evaluation("twice", gain=0.2, backend="reference")]
    records += [evaluation("part", tasks=("piqa",)), evaluation("x", l1=1e-3, training_tokens=None)]
    table = analysis.seven_tasks(analysis.evaluations(records))
    assert table["model"].tolist() == ["twice"] * 8 + ["x"] * 8 and set(table["backend"]) == {
        "dense"
    }
    assert table["task"].tolist() == [*analysis.TASKS, analysis.MEAN] * 2 and table["accuracy"][0] == 0.35
    rounded = [evaluation("twice", dtype="bfloat16"), evaluation("twice", backend="triton")]
    again = analysis.seven_tasks(analysis.evaluations([*rounded, *records]))
    assert again["accuracy"].tolist() == table["accuracy"].tolist()
    assert set(analysis.seven_tasks(analysis.evaluations(rounded))["backend"]) == {"triton"}
    for none in (records[3:4], []):
        assert levels_of(*none).empty and analysis.several_levels(levels_of(*none)).empty


def test_levels_are_compared_within_a_size_and_budget():
    noisy = evaluation("a", gain=0.06)
    noisy["lm_eval"]["results"]["paper7"]["acc_stderr,none"] = 0.02
    sparse = evaluation("c", l1=1e-3, gain=0.018)
    mean = levels_of(evaluation("b", gain=0.03), noisy, sparse).query("task == 'paper7'")
    columns = ["models", "accuracy", "stderr"]
    expected = [[2, 0.3143 + 0.045, 0.015], [1, 0.3143 + 0.018, 0.01]]
    np.testing.assert_allclose(mean[columns], expected)
    assert mean["verdict"].tolist() == ["above chance", "near chance"]
    models = ["abcdef", [0, 1e-3, 1e-2, 0, 2e-3, 0], [10**6, 10**6, 5, None, None, 10**6]]
    records = [evaluation(n, l1=l1, training_tokens=t) for n, l1, t in zip(*models, strict=True)]
    records[-1]["model"]["parameters"] = 7
    levels = levels_of(*records)
    several = analysis.several_levels(levels)
    assert set(several["l1_coefficient"]) == {0, 1e-3, 2e-3} and len(several) == 4 * 8
    change = analysis.against_dense(levels).fillna(0)
    columns = ["training_tokens", "l1_coefficient", "difference", "above_chance"]
    assert rows(change, *columns) == [(0, 2e-3, 0, False), (1e6, 1e-3, 0, False)]
    assert change["stderr"].tolist() == pytest.approx([0.01 * 2**0.5] * 2)
    # With three levels somewhere, pairs are left to the comparison of sizes.
    levels = analysis.several_levels(levels_of(*records, evaluation("g", l1=3e-3)))
    expected = [(level, 1e6) for level in (0, 1e-3, 3e-3)]
    assert rows(levels[::8], "l1_coefficient", "training_tokens") == expected


def test_backends_are_compared_on_the_same_items():
    other = evaluation("a", gain=0.1, backend="reference")
    other["lm_eval"]["results"]["piqa"]["acc,none"] += 0.02
    other["lm_eval"]["results"]["winogrande"] |= {"acc,none": 0.0, "sample_len": 5}
    third = evaluation("a", gain=0.15, dtype="bfloat16")  # says nothing about backends
    table = analysis.evaluations([evaluation("a", gain=0.1), other, evaluation("b"), third])
    assert analysis.backend_differences(table).to_numpy().tolist() == [
        ["a", "backend", "dense, reference", "float32", 7, pytest.approx(0.02)],
        ["a", "dtype", "bfloat16, float32", "dense", 8, pytest.approx(0.05)],
    ]
    assert analysis.backend_differences(analysis.evaluations([evaluation("b")])).empty


def test_accuracies_to_be_read():
    sparse = evaluation("sparse", l1=1e-2, gain=0.021, tasks=("piqa",))
    sparse["lm_eval"]["results"]["piqa"] |= {"acc_norm,none": 0.1, "acc_norm_stderr,none": 0.01}
    records = [sparse, evaluation("dense", tasks=("arc_easy", "piqa"))]
    table = analysis.accuracies(analysis.evaluations(records))
    models = ["dense, dense float32, L1 = 0", "sparse, dense float32, L1 = 1e-2"]
    assert table.index.tolist() == ["chance", "items", *models]
    assert table.to_dict("list") == {
        "arc_easy": ["25.0", "100", "(25.0 ± 1.0)", ""],
        "piqa": ["50.0", "100", "(50.0 ± 1.0)", "52.1 ± 1.0"],
        "piqa, acc_norm": ["50.0", "100", "", "(10.0 ± 1.0)"],
    }


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
    with pytest.raises(ValueError, match="items of arc_easy: .'d': 400, 's': 399"):
        parts = [answers("d", 0.6), answers("s", 0.3)[1:]]
        analysis.paired_runs(pd.concat(parts), ["d"], ["s"])


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
    assert table["high"]["piqa"] - table["low"]["piqa"] < 0.3 * (
        table["high"]["arc_easy"] - table["low"]["arc_easy"]
    )


DENSE, AUTO, UNION, DECODE = "dense torch.compile", "auto", "triton union", "triton decode"


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
    assert table["name"].to_dict() == {
        "a": "ReLU alone",
        "b": "10%",
        "c": "10%, threshold 0.2, 0.002 M tokens",
    }
    assert [*table.index] == ["a", "b", "c"]
    assert table["active_fraction"].tolist() == pytest.approx([0.5, 0.1, 0.05])  # of 100 neurons
    assert table["kl"].tolist() == [0.1, 0.3, 0.5]
    assert table["rise"].tolist() == pytest.approx([0.1, 0.3, 0.5])
    # Steered runs log the coefficient; the last row counts.
    assert table["l1"].tolist() == [0.0, 4e-3, 4e-3]


def test_conversations_and_what_few_runs_begin_with_are_named():
    steered = {"l1_coefficient": 0.0, "threshold": 0.5, "fit_tokens": 400}
    runs = [relufied_run(name, 0.1, (12, 8), kl=0.3, **steered, seed=seed) for seed, name in
            enumerate("abc")]  # fmt: skip
    chat = {"sampled_share": 0.5, "sampled_chat": True}
    runs.append(relufied_run("talks", 0.1, (11, 8), kl=0.3, **steered | chat | {"fit_tokens": 0}))
    configs, log = tables(*runs)
    # A log of printed lines has no threshold.
    log = log[(log["run"] != "a") | (log["metric"] != "threshold")]
    table = analysis.relufied_runs(configs, log).set_index("run")
    level = "10% by a threshold, 50% conversations, not fitted"
    assert table.loc["talks", ["level", "name"]].tolist() == [level, level]
    assert table.loc["talks", "by"] == "threshold"
    assert table["name"].drop("talks").tolist() == [f"10% by a threshold ({run})" for run in "abc"]
    assert np.isnan(table["threshold"]["a"]) and table["threshold"]["b"] == pytest.approx(4e-3)
    few = analysis.relufied_runs(*tables(*runs[2:], relufied_study()[0]))
    assert few["level"].tolist() == ["ReLU alone", "10% by a threshold, fitted", level[:-12]]


def test_answers_are_paired_with_the_original_and_with_relu_alone_on_as_many_tokens():
    pairs = analysis.relufied_pairs(*study_with_answers())
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
    names = pairs.drop_duplicates("run").set_index("run")["name"]
    assert names.to_dict() == {
        "alone": "ReLU alone",
        "tenth": "10%",
        "longer": "10%, 0.002 M tokens",
    }
    single = pairs[(pairs["run"] == "tenth") & (pairs["reference"] == "original")]
    single = single.set_index("task")
    assert [*single.index] == ["arc_easy", "piqa", "mean"] and single["items"]["mean"] == 12
    # The interval is that of `paired_records`.
    records = analysis.answer_records(kept_answers())
    same = analysis.paired_records(records["tenth"], records["small-original-abcdef12"])
    pd.testing.assert_frame_equal(single.reset_index()[same.columns], same, check_dtype=False)


def study_with_answers():
    return tables(*relufied_study())[0], kept_answers()


def test_a_line_on_answers_has_accuracy_and_both_differences():
    study = tables(*relufied_study())
    pairs = analysis.relufied_pairs(study[0], kept_answers())
    lines = analysis.relufied_answers(analysis.relufied_runs(*study), pairs)
    assert lines["name"].tolist() == ["ReLU alone", "10%", "10%, 0.002 M tokens"]
    assert lines["accuracy"].tolist() == pytest.approx([62.5, 37.5, 25.0])
    assert lines["active_fraction"].tolist() == pytest.approx([0.5, 0.1, 0.095])
    over, alone = lines["over original"], lines["over ReLU alone"]
    assert [text.partition(" (")[0] for text in over] == ["−12.5", "−37.5", "−50.0"]
    assert alone[1].startswith("−25.0 (−") and alone.isna().tolist() == [True, False, True]
    tenth = pairs[(pairs["run"] == "tenth") & (pairs["reference"] == "original")].iloc[-1]
    ends = f"({100 * tenth['low']:+.1f} to {100 * tenth['high']:+.1f})".replace("-", "−")
    assert over[1] == f"−37.5 {ends}"
    # Of `alone` the interval of piqa holds 0; no answer of arc_easy differs but those of `longer`.
    assert lines["worse"].tolist() == ["0 of 2", "1 of 2", "1 of 2"]


def test_accuracy_over_the_divergence():
    """Students that answer so many of 20 items of each task; the original answers all."""
    right, kls = {"a": 18, "b": 14, "c": 10, "d": 7}, {"a": 0.1, "b": 0.2, "c": 0.4, "d": 0.8}
    runs = [
        relufied_run(name, 0.1, (12, 8), kl, teacher_sha256=TEACHER, seed=seed)
        for seed, (name, kl) in enumerate([*kls.items(), ("unanswered", 9.0)])
    ]
    study = tables(*runs)
    table = analysis.relufied_runs(*study)

    def frontier(right, times=1, lost=0.4):
        marks = {name: ("1" * n + "0" * (20 - n)) * times for name, n in right.items()}
        marks["small-original-abcdef12"] = "1" * 20 * times
        items = kept_answers({name: (mark, mark) for name, mark in marks.items()})
        pairs = analysis.relufied_pairs(study[0], items)
        return analysis.relufied_frontier(table, pairs, items, lost)

    found = frontier(right)
    x, y = np.log([*kls.values()]), np.array([*right.values()]) / 20 - 1
    fitted = np.polynomial.Polynomial.fit(x, y, 1).convert().coef
    assert [found["intercept"], found["slope"]] == pytest.approx(fitted)
    off = y - fitted @ [np.ones(4), x]
    assert found["deviation"] == pytest.approx((off @ off / 2) ** 0.5)
    assert found["students"] == 4
    assert found["kl"] == pytest.approx(np.exp((-0.4 - fitted[0]) / fitted[1]))
    # On a line, students are no part of the interval; items are, the fewer the more.
    even = {"a": 16, "b": 12, "c": 8, "d": 4}
    few, many = frontier(even), frontier(even, times=100)
    widths = [np.log(one["high"] / one["low"]) for one in (few, many)]
    assert widths[0] == pytest.approx(10 * widths[1], rel=0.25) and widths[1] > 0.02
    assert few["low"] < few["kl"] < few["high"] and few["kl"] == pytest.approx(0.2)
    assert frontier(right, times=100)["high"] > many["high"]  # there, students are
    with pytest.raises(ValueError, match="2 students have answers; a line needs 3"):
        frontier({"a": 18, "b": 14})


def test_an_outlook_goes_on_as_the_runs_did():
    runs = [
        relufied_run("few", 0.1, (12, 8), 0.5),
        relufied_run("few-2", 0.1, (12, 8), 0.32, seed=1),
    ]
    runs.append(relufied_run("many", 0.1, (12, 8.2), 0.2, tokens=4000))
    other = relufied_run("other", 0.1, (8, 2), 0.2, tokens=4000, threshold=0.5)
    none = pd.DataFrame(columns=["run", "task", "reference", "difference", "low", "high"])

    def outlook(runs, **kls):
        return analysis.relufied_outlook(analysis.relufied_runs(*tables(*runs)), none, kls)

    (line,) = outlook(runs, kl=0.1, low=0.05, high=0.2).to_dict("records")
    assert (line["level"], line["runs"], line["fewest"], line["most"]) == ("10%", 3, 1000, 4000)
    assert line["kl"] == pytest.approx(0.2) and line["active_fraction"] == pytest.approx(0.101)
    # Four times the tokens halved the divergence of two seeds; half of it takes as much again.
    assert line["halving"] == pytest.approx(2**-0.5)
    ends = [line[end] for end in ("tokens", "fewer", "more")]
    assert ends == pytest.approx([16_000, 4000, 64_000])
    worse = [*runs[:2], relufied_run("many", 0.1, (12, 8.2), 0.5, tokens=4000)]
    for some in (runs, worse):  # no more are needed
        near = outlook(some, kl=0.6, low=0.55, high=0.7)
        assert near[["tokens", "fewer", "more"]].to_numpy().tolist() == [[4000] * 3]
    assert np.isinf(outlook(worse, kl=0.1, low=0.05, high=0.2)["tokens"].item())
    # Of runs whose activity differs nothing follows.
    uneven = [relufied_run("many", 0.1, (8, 8), 0.2, tokens=4000), runs[0], other]
    assert outlook(uneven, kl=0.1, low=0.05, high=0.2).empty


@pytest.mark.parametrize(
    "field", ["teacher", "teacher_sha256", "hidden_size", "weight_decay", "batch_tokens"]
)
def test_runs_that_differ_in_more_are_not_compared(field):
    runs = [relufied_run(name, 0.1, (12, 8), kl=0.3, **{field: name}) for name in "ab"]
    with pytest.raises(ValueError, match=f"one teacher and text; these differ in {field}: a .*b"):
        analysis.relufied_runs(*tables(*runs))


def test_gains_are_those_of_the_fastest_sparse_path_in_bf16():
    one = dict(tokens=1, active=10.0, mode="graph", pattern="skewed")
    many = dict(tokens=65536, active=10.0, mode="stream", pattern="skewed drelu")
    rows = pd.concat(
        [
            speed_rows(times={DENSE: 4.0, DECODE: 2.0, UNION: 1.0, AUTO: 0.1}, **one),
            speed_rows(times={DENSE: 4.0, UNION: 8.0, "triton union FP8": 1.0}, **many),
            speed_rows(times={DENSE: 4.0, UNION: 1.0}, **many | {"tokens": 2048}),
            speed_rows(times={DENSE: 4.0, UNION: 1.0}, **many | {"pattern": "even"}),
            speed_rows(times={DENSE: 4.0, UNION: 1.0}, **many | {"pattern": "skewed merged"}),
            speed_rows(times={DENSE: 4.0, DECODE: 1.0}, **one | {"mode": "eager"}),
            speed_rows(times={DENSE: 4.0, UNION: 1.0}, **many | {"active": 0.0}),
        ]
    )
    gains = analysis.gains_by_share(analysis.speedups(rows)).set_index("calls")
    assert gains["speedup"].to_dict() == {"one token": 4.0, "many tokens": 0.5}
    width = rows["intermediate_size"].iloc[0]
    assert np.allclose(gains["active_fraction"], 10 / width)
    assert re.fullmatch("triton union", gains.loc["many tokens", "provider"])
