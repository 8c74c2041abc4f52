"""Files of rows, and the names of providers in them."""

import pandas as pd
import pytest

from twell import results
from twell.measure.providers import AUTO, COMPILED, TUNED, Provider
from twell.measure.rows import COLUMNS, Rows

BENCH = results.root() / "data" / "bench"


def test_rows_have_the_columns_of_their_file_and_one_date(tmp_path):
    rows, memory = Rows(tmp_path, "kernels", "ffn"), Rows(None, "kernels")
    given = dict.fromkeys(COLUMNS["kernels"], 1) | {"kernel": "copy", "more": 1}
    for one in (rows, memory):
        one.add("kernels", [given | {"ms": 2.0}])
        one.add("kernels", [given | {"ms": 3.0}])
    rows.add("ffn", [])
    assert rows.by_file["kernels"] == memory.by_file["kernels"]
    assert [list(row) for row in rows.by_file["kernels"]] == 2 * [COLUMNS["kernels"]]
    table = pd.read_csv(tmp_path / "kernels.csv")
    assert list(table["ms"]) == [2, 3] and table["date"].nunique() == 1 and "device" in table
    assert not (tmp_path / "ffn.csv").exists()
    with pytest.raises(KeyError, match="launches"):
        rows.add("kernels", [{name: 1 for name in given if name != "launches"}])
    (tmp_path / "ffn.csv").write_text("tokens,active,device\n1,2,x\n")
    with pytest.raises(ValueError, match="ffn.csv has the columns"):
        Rows(tmp_path, "kernels", "ffn")


def test_recorded_files_have_these_columns_and_names_that_are_parsed():
    names = set()
    for name, columns in COLUMNS.items():
        table = pd.read_csv(BENCH / f"{name}.csv")
        assert list(table)[: len(columns)] == columns, name
        names |= {*table.get("provider", [])}
    for name in names:
        provider = Provider.parse(name)
        assert provider.name == str(provider) == name
        assert provider.compiled == ("torch.compile" in name)
    tuned = Provider("triton", None, TUNED)
    assert tuned.untuned == Provider("triton", None, COMPILED) and AUTO.untuned == AUTO
    for name in ("union", "triton eager", "dense union", ""):
        with pytest.raises(ValueError, match=f"provider '{name}' is unknown"):
            Provider.parse(name)
