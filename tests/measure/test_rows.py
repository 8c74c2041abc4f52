"""Files of rows: refused before anything is measured, and appended to row by row."""

import pandas as pd
import pytest

from twell.measure.rows import COLUMNS, Rows, significant


def test_rows_have_the_columns_of_their_file_and_one_date(tmp_path):
    rows = Rows(tmp_path, ["ceilings", "ffn"])
    given = {"unit": "GB/s", "more": 1, "metric": "copy", "value": 2.0}
    rows.add("ceilings", [given])
    rows.add("ceilings", [given | {"value": 3.0}])
    rows.add("ffn", [])
    assert [list(row) for row in rows.by_file["ceilings"]] == 2 * [COLUMNS["ceilings"]]
    table = pd.read_csv(tmp_path / "ceilings.csv")
    assert list(table["value"]) == [2, 3] and table["date"].nunique() == 1
    assert list(table.columns)[:3] == COLUMNS["ceilings"] and "device" in table
    assert not (tmp_path / "ffn.csv").exists()
    with pytest.raises(KeyError, match="unit"):
        rows.add("ceilings", [{"metric": "copy", "value": 2.0}])


def test_without_a_folder_rows_are_kept_in_memory():
    rows = Rows(None, ["ceilings"])
    rows.add("ceilings", [{"metric": "copy", "value": 2.0, "unit": "GB/s"}])
    assert len(rows.by_file["ceilings"]) == 1


def test_unfit_files_are_refused(tmp_path):
    (tmp_path / "ffn.csv").write_text("tokens,active,device\n1,2,x\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"ffn.csv has the columns \['tokens', 'active', 'device'"):
        Rows(tmp_path, ["ceilings", "ffn"])
    message = "file is a file; out is a folder, for training.csv, ceilings.csv"
    with pytest.raises(NotADirectoryError, match=message):
        Rows(tmp_path / "file", ["training", "ceilings"])
    assert Rows(tmp_path, ["ceilings"])


def test_recorded_files_have_these_columns():
    from twell import results

    for name, columns in COLUMNS.items():
        path = results.root() / "data" / "bench" / f"{name}.csv"
        assert list(pd.read_csv(path, nrows=0))[: len(columns)] == columns, name


def test_numbers_are_rounded_to_significant_digits():
    assert [significant(x, 3) for x in (0.0012345, 98765.0, 0.0)] == [0.00123, 98800.0, 0.0]
