"""Measured rows of a folder, as lessons read them."""

import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import speed_rows


def test_rows_are_of_the_device_with_the_most(tmp_path):
    few = pd.DataFrame(speed_rows(64, 29.0, {"dense torch.compile": 2.0, "triton union": 1.0}))
    many = pd.concat([few, few]).assign(device="new")
    pd.concat([many, few]).to_csv(tmp_path / "ffn.csv", index=False)
    few.drop(columns="device").to_csv(tmp_path / "other.csv", index=False)
    bench = analysis.Bench(tmp_path, required=["ffn.csv"])
    assert bench.device == "new" and set(bench.rows("ffn.csv")["device"]) == {"new"}
    named = analysis.Bench(tmp_path, device=few["device"][0])
    assert set(named.rows("ffn.csv")["device"]) == {few["device"][0]}
    table = bench.rows("ffn.csv", analysis.speedups, "provider == 'triton union'")
    assert table["speedup"].tolist() == [2.0]
    assert bench.rows("ffn.csv", analysis.speedups, "tokens == 1").empty
    assert bench.rows("training.csv", analysis.training_speedups, "tokens == 1").empty


def test_random_cases_do_not_say_which_device_was_timed(tmp_path):
    rows = pd.DataFrame(speed_rows(64, 29.0, {"dense torch.compile": 2.0}))
    rows.to_csv(tmp_path / "ffn.csv", index=False)
    cases = pd.DataFrame([{"cases": 10, "device": "other"}] * 9)
    cases.to_csv(tmp_path / "fuzz.csv", index=False)
    bench = analysis.Bench(tmp_path)
    assert bench.device == rows["device"][0] and len(bench.rows("fuzz.csv")) == 9


def test_a_folder_without_rows(tmp_path):
    assert analysis.Bench(tmp_path).device == ""
    with pytest.raises(FileNotFoundError, match="nothing is recorded in .*decode.csv"):
        analysis.Bench(tmp_path, required=["decode.csv"])
