"""Tables of measured rows, from rows made by hand."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import BASE, speed_rows, together

UNION = "triton union"
LATER = {"date": "2026-11-23T10:00:00+00:00"}


def rows(table, *columns):
    return sorted(table[list(columns)].itertuples(index=False, name=None))


def near(*values):
    return pytest.approx(values, nan_ok=True)


def test_speedups_are_over_compiled_dense_of_the_same_case_and_call():
    cases = [{}, {"mode": "graph", "weight_sets": 8}, {"mode": "graph"}, {"device": "other"}]
    cases += [{"gated": False}, {"pattern": "even"}, {"dtype": "float32"}]
    parts = [
        speed_rows(64, 29.0, {BASE: 3.0 + 2 * n, UNION: 2.0}, **case)
        for n, case in enumerate(cases)
    ]
    parts += [speed_rows(64, 31.0, {BASE: 17.0, UNION: 2.0})]
    table = analysis.speedups(together(*parts))
    assert sorted(table.loc[table["provider"] == UNION, "speedup"]) == [1.5 + n for n in range(8)]
    assert (table.loc[table["provider"] == BASE, "speedup"] == 1).all() and len(table) == 16
    spread = {"p20": [9.0, 4.0], "p80": [12.0, 6.0]}
    one = analysis.speedups(speed_rows(64, 29.0, {BASE: 10.0, UNION: 5.0}, **spread))
    union = one.set_index("provider").loc[UNION]
    assert union[["speedup_low", "speedup", "speedup_high"]].tolist() == near(1.5, 2, 3)
    times = {BASE: 2.0, UNION: 1.0, "auto": 1.0}
    table = analysis.speedups(speed_rows(500, 29.0, times, energy=[1000.0, 600.0, np.nan]))
    assert table["energy_per_token"].tolist() == near(2, 1.2, np.nan)
    assert table["energy_change"].tolist() == near(0, -40, np.nan)


def test_rows_are_of_the_device_with_the_most(tmp_path):
    few = pd.DataFrame(speed_rows(64, 29.0, {BASE: 2.0, UNION: 1.0}))
    many = pd.concat([few, few]).assign(device="new")
    pd.concat([many, few]).to_csv(tmp_path / "ffn.csv", index=False)
    few.drop(columns="device").to_csv(tmp_path / "other.csv", index=False)
    bench = analysis.Bench(tmp_path, required=["ffn.csv"])
    assert bench.device == "new" and set(bench.rows("ffn.csv")["device"]) == {"new"}
    table = bench.rows("ffn.csv", analysis.speedups, f"provider == '{UNION}'")
    assert table["speedup"].tolist() == [2.0]
    assert bench.rows("training.csv", analysis.training_speedups, "tokens == 1").empty
