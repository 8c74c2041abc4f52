"""Tables of models that `twell relufy` changed, and of the speed that their activity allows."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest

from tests.factories.analysis import GOOD, relufied_run, speed_rows, tables
from twell import analysis
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


def test_layers_are_those_of_each_run():
    runs = relufied_run("b", 0.1, (12, 8), kl=0.3), relufied_run("a", 0.0, (60, 40), kl=0.1)
    table = analysis.relufied_layers(*tables(*runs))
    shares = table.pivot(index="layer", columns="name", values="active_fraction")
    assert shares["10%"].tolist() == [0.12, 0.08] and shares["ReLU alone"].tolist() == [0.6, 0.4]


@pytest.mark.parametrize("field", ["teacher", "hidden_size", "learning_rate", "batch_tokens"])
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
