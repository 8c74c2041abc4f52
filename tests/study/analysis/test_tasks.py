"""Tables of downstream tasks, from evaluations made by hand."""

import numpy as np
import pytest

from study import analysis
from tests.factories.analysis import evaluation
from twell import results


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
    assert table["task"].tolist() == [*analysis.TASKS] * 2 and table["accuracy"][0] == 0.35
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


def test_sizes_are_compared_at_one_level():
    def compared(*models):
        records = [
            evaluation(str(n), l1=l1, parameters=size, training_tokens=tokens)
            for n, (size, tokens, l1) in enumerate(models)
        ]
        levels = analysis.across_sizes(levels_of(*records)).query("task == 'piqa'").fillna(0)
        return rows(levels, "parameters", "training_tokens", "l1_coefficient")

    pairs = [(10, 9, 0), (10, 9, 3e-3), (20, 9, 0), (20, 9, 3e-3)]
    sweep = [(20, 5, level) for level in (0, 1e-4, 1e-3, 1e-2)]  # shorter
    alone = [(5, None, 0), (5, None, 2e-3), (5, None, 1e-3)]
    assert compared(*pairs, *sweep, *alone) == [(5, 0, 0), (5, 0, 1e-3), *pairs]
    assert compared(*sweep) == sweep[:2]  # of equally frequent levels the lowest
    assert compared(pairs[0], pairs[2]) == [pairs[0], pairs[2]] and compared() == []


def test_the_papers_tasks():
    table = analysis.paper_tasks(results.paper())
    assert len(table) == 4 * 2 * 8 and set(table["parameters"]) == {5e8, 1e9, 1.5e9, 2e9}
    wide = table.pivot(index=["parameters", "l1_coefficient"], columns="task", values="accuracy")
    assert (wide.drop(columns="paper7").mean(axis=1) - wide["paper7"]).abs().max() < 1e-3
    change = analysis.against_dense(table)
    assert (change["l1_coefficient"] == 2e-5).all()
    np.testing.assert_allclose(change["difference"], [0, 0.001, -0.002, -0.003], atol=1e-9)
    levels = analysis.paper_levels(results.paper())
    expected = [(0.0, 0.4636), (2e-5, 0.462), (3e-5, 0.4483)]
    assert rows(levels, "l1_coefficient", "accuracy") == expected
    assert set(levels["task"]) == {"paper7"} and set(levels["parameters"]) == {1.5e9}


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
