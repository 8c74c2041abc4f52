"""Tables of models that `twell relufy` changed, and of the speed that their activity allows."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import (
    GOOD,
    MARKS,
    TEACHER,
    kept_answers,
    relufied_run,
    relufied_study,
    speed_rows,
    tables,
)
from twell.config import TrainConfig

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


def test_a_course_begins_with_the_teacher_and_has_means_over_layers():
    course = analysis.relufied_course(*tables(relufied_run("b", 0.1, (12, 8), kl=0.3)))
    assert course["tokens"].tolist() == [0, 200, 1000]
    assert course["active_fraction"].tolist() == pytest.approx([0.505, 0.2, 0.1])
    assert course["kl"].tolist() == [5.0, 1.0, 0.3] and set(course["name"]) == {"10%"}


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
    assert table.loc["talks", "by"] == "threshold, conversations, not fitted"
    assert table["name"].drop("talks").tolist() == [f"10% by a threshold ({run})" for run in "abc"]
    assert np.isnan(table["threshold"]["a"]) and table["threshold"]["b"] == pytest.approx(4e-3)
    few = analysis.relufied_runs(*tables(*runs[2:], relufied_study()[0]))
    assert few["level"].tolist() == ["ReLU alone", "10% by a threshold, fitted", level[:-12]]


def test_relu_alone_on_sampled_text_is_no_reference():
    same = {"teacher_sha256": TEACHER}
    sampled = relufied_run("drawn", 0.0, (60, 40), 0.1, sampled_share=0.25, **same)
    items = kept_answers(MARKS | {"drawn": MARKS["longer"]})
    pairs = analysis.relufied_pairs(tables(*relufied_study(), sampled)[0], items)
    assert set(pairs.loc[pairs["reference"] == "ReLU alone", "beside"]) == {"alone"}


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


@pytest.mark.parametrize(
    ("field", "value"), [("active_share", 0.3), ("l1_coefficient", 1e-3), ("threshold", 0.5)]
)
def test_relu_alone_has_neither_l1_nor_a_threshold(field, value):
    runs, items = study_with_answers()
    runs.loc[runs["run"] == "alone", field] = value
    assert set(analysis.relufied_pairs(runs, items)["reference"]) == {"original"}


def test_runs_of_another_teacher_have_no_original():
    runs, items = study_with_answers()
    pairs = analysis.relufied_pairs(runs.drop(columns="teacher_sha256"), items)
    assert set(pairs["reference"]) == {"ReLU alone"} and set(pairs["run"]) == {"tenth"}


def test_a_mean_is_over_the_tasks_of_both():
    runs, items = study_with_answers()
    original = items["run"] == "small-original-abcdef12"
    fewer = items[~(original & (items["task"] == "piqa"))]
    with pytest.raises(ValueError, match="alone and small-original.* only one has answers of piqa"):
        analysis.relufied_pairs(runs, fewer)
    # Other tasks than the seven do not count.
    more = items[items["run"] == "tenth"].assign(task="last_word")
    pairs = analysis.relufied_pairs(runs, items)
    again = analysis.relufied_pairs(runs, pd.concat([items, more]))
    pd.testing.assert_frame_equal(pairs, again)


def test_one_teacher_may_lie_in_several_folders():
    """Its hash tells."""
    (*runs, (row, log)) = relufied_study()
    runs.append((row | {"teacher": "elsewhere", "tokenizer": "elsewhere"}, log))
    assert len(analysis.relufied_runs(*tables(*runs))) == len(runs)


def test_names_tell_runs_apart():
    fields = {"a": {}, "b": {"l1_coefficient": 1e-5}}
    runs = [relufied_run(run, 0.1, (12, 8), kl=0.3, **more) for run, more in fields.items()]
    runs.append(relufied_run("c", 0.0, (12, 8), kl=0.3, l1_coefficient=1e-3))
    table = analysis.relufied_runs(*tables(*runs)).set_index("run")
    assert table["name"].to_dict() == {"a": "10% (a)", "b": "10% (b)", "c": "L1 = 1e-3"}
    assert table["level"].to_dict() == {"a": "10%", "b": "10%", "c": "L1 = 1e-3"}


def test_a_steered_threshold_is_the_last_one():
    """And its line is one, wherever it began."""
    fields = {"l1_coefficient": 0.0, "threshold": 0.5}
    runs = [relufied_run("a", 0.1, (12, 8), kl=0.3, **fields)]
    runs += [relufied_run("b", 0.1, (12, 8), kl=0.2, tokens=2000, **fields)]
    runs += [relufied_run("c", 0.1, (12, 8), kl=0.4, threshold=0.5)]
    runs += [relufied_run("d", 0.1, (12, 8), kl=0.4), relufied_run("e", 0.0, (60, 40), kl=0.1)]
    table = analysis.relufied_runs(*tables(*runs))
    rows = table.set_index("run").loc[[*"abcde"]]
    assert rows["name"].tolist() == [
        "10% by a threshold",
        "10% by a threshold, 0.002 M tokens",
        "10%, threshold 0.5",
        "10%",
        "ReLU alone",
    ]
    assert rows["by"].tolist() == ["threshold", "threshold", "L1, threshold 0.5", "L1", "L1"]
    assert rows["threshold"].tolist() == [4e-3, 4e-3, 0.5, 0, 0]
    assert rows["l1"].tolist() == [0, 0, 4e-3, 4e-3, 0]
    budgets = analysis.relufied_budgets(
        table, analysis.relufied_pairs(tables(*runs)[0], kept_answers())
    )
    assert budgets["run"].tolist() == ["a", "b"]


def test_text_that_the_teacher_wrote_makes_another_level():
    fields = {"l1_coefficient": 0.0, "threshold": 0.5, "sampled_share": 0.25, "samples": "a.jsonl"}
    runs = [relufied_run("a", 0.1, (12, 8), kl=0.3, **fields | {"sampled_tokens": 1000})]
    runs += [relufied_run("b", 0.1, (12, 8), kl=0.2, tokens=2000, **fields)]
    runs += [relufied_run("c", 0.1, (12, 8), kl=0.4), relufied_run("d", 0.0, (60, 40), kl=0.1)]
    rows = analysis.relufied_runs(*tables(*runs)).set_index("run").loc[[*"abcd"]]
    assert rows["level"].tolist() == [*2 * ["10% by a threshold, 25% sampled"], "10%", "ReLU alone"]
    assert rows["by"].tolist() == [*2 * ["threshold, sampled"], "L1", "L1"]


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


def test_budgets_are_the_levels_with_several():
    study = tables(*relufied_study())
    table = analysis.relufied_runs(*study)
    pairs = analysis.relufied_pairs(study[0], kept_answers())
    budgets = analysis.relufied_budgets(table, pairs)
    assert budgets["run"].tolist() == ["tenth", "longer"] and set(budgets["level"]) == {"10%"}
    assert budgets["tokens"].tolist() == [1000, 2000] and budgets["kl"].tolist() == [0.3, 0.2]
    assert budgets["difference"].tolist() == pytest.approx([-0.375, -0.5])
    assert (budgets["low"] < budgets["difference"]).all()
    assert (budgets["difference"] < budgets["high"]).all()


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
    assert found["students"] == 4 and found["nearest"] == 0.1
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


def test_the_weight_of_hidden_states_is_part_of_the_level():
    steered = {"l1_coefficient": 0.0, "threshold": 0.5}
    runs = [relufied_run("plain", 0.1, (12, 8), 0.3, **steered)]
    runs += [
        relufied_run(f"w-{weight:g}", 0.1, (11, 8), 0.2, **steered, hidden_weight=weight)
        for weight in (0.5, 1.0)
    ]
    table = analysis.relufied_runs(*tables(*runs)).set_index("run")
    names = {"plain": "", "w-0.5": ", hidden states 0.5", "w-1": ", hidden states"}
    for run, name in names.items():
        assert table.loc[run, "level"] == table.loc[run, "name"] == f"10% by a threshold{name}"
        assert table.loc[run, "by"] == f"threshold{name}"


def test_another_learning_rate_is_part_of_the_level():
    rates = {"usual": 1e-3, "again": 1e-3, "lower": 5e-4}
    runs = [
        relufied_run(run, 0.1, (12, 8), 0.3, learning_rate=rate, seed=i)
        for i, (run, rate) in enumerate(rates.items())
    ]
    table = analysis.relufied_runs(*tables(*runs)).set_index("run")
    assert table["level"].to_dict() == dict(usual="10%", again="10%", lower="10%, rate 5e-4")
    assert table["by"].to_dict() == dict(usual="L1", again="L1", lower="L1, rate 5e-4")


def test_runs_without_answers_have_no_pairs():
    study = tables(*relufied_study())
    table = analysis.relufied_runs(*study)
    for items in (pd.DataFrame(columns=["run"]), kept_answers({"other": ("11111111", "1111")})):
        pairs = analysis.relufied_pairs(study[0], items)
        assert pairs.empty and analysis.relufied_answers(table, pairs).empty
        budgets = analysis.relufied_budgets(table, pairs)
        assert budgets["run"].tolist() == ["tenth", "longer"]
        assert budgets["difference"].isna().all()


def test_layers_are_those_of_each_run():
    runs = relufied_run("b", 0.1, (12, 8), kl=0.3), relufied_run("a", 0.0, (60, 40), kl=0.1)
    table = analysis.relufied_layers(*tables(*runs))
    shares = table.pivot(index="layer", columns="name", values="active_fraction")
    assert shares["10%"].tolist() == [0.12, 0.08] and shares["ReLU alone"].tolist() == [0.6, 0.4]


@pytest.mark.parametrize(
    "field", ["teacher", "teacher_sha256", "hidden_size", "weight_decay", "batch_tokens"]
)
def test_runs_that_differ_in_more_are_not_compared(field):
    runs = [relufied_run(name, 0.1, (12, 8), kl=0.3, **{field: name}) for name in "ab"]
    with pytest.raises(ValueError, match=f"one teacher and text; these differ in {field}: a .*b"):
        analysis.relufied_runs(*tables(*runs))


def test_runs_without_a_teacher_are_refused():
    for runs in ((GOOD,), (relufied_run("cut", 0.1, (6, 4), kl=9, complete=False), GOOD)):
        with pytest.raises(ValueError, match="none of .*good is a complete run of `twell relufy`"):
            analysis.relufied_runs(*tables(*runs))


def test_the_fields_that_may_differ_exist():
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert {*analysis.ASKED} <= names


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
