"""Files of rows, and the names of providers in them."""

import pandas as pd
import pytest

from twell import measure, results
from twell.measure.providers import (
    AUTO,
    COMPILED,
    DENSE_KERNELS,
    SPARSE_PATHS,
    TUNED,
    Provider,
    model_providers,
)
from twell.measure.rows import COLUMNS, Rows

BENCH = results.root() / "data" / "bench"


def test_rows_have_the_columns_of_their_file_and_one_date(tmp_path):
    rows, memory = Rows(tmp_path, ["ceilings", "ffn"]), Rows(None, ["ceilings"])
    given = {"unit": "GB/s", "more": 1, "metric": "copy"}
    for one in (rows, memory):
        one.add("ceilings", [given | {"value": 2.0}])
        one.add("ceilings", [given | {"value": 3.0}])
    rows.add("ffn", [])
    assert rows.by_file["ceilings"] == memory.by_file["ceilings"]
    assert [list(row) for row in rows.by_file["ceilings"]] == 2 * [COLUMNS["ceilings"]]
    table = pd.read_csv(tmp_path / "ceilings.csv")
    assert list(table["value"]) == [2, 3] and table["date"].nunique() == 1
    assert list(table.columns)[:3] == COLUMNS["ceilings"] and "device" in table
    assert not (tmp_path / "ffn.csv").exists()
    with pytest.raises(KeyError, match="unit"):
        rows.add("ceilings", [{"metric": "copy", "value": 2.0}])


def test_unfit_files_are_refused(tmp_path):
    (tmp_path / "ffn.csv").write_text("tokens,active,device\n1,2,x\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"ffn.csv has the columns \['tokens', 'active', 'device'"):
        Rows(tmp_path, ["ceilings", "ffn"])
    with pytest.raises(NotADirectoryError, match="file is a file"):
        Rows(tmp_path / "file", ["training", "ceilings"])
    assert Rows(tmp_path, ["ceilings"])


def test_recorded_files_have_these_columns():
    for name, columns in COLUMNS.items():
        assert list(pd.read_csv(BENCH / f"{name}.csv", nrows=0))[: len(columns)] == columns, name


def test_recorded_names_are_parsed_and_written_alike():
    tables = [pd.read_csv(path) for path in BENCH.glob("*.csv")]
    names = {name for table in tables for name in table.get("provider", [])}
    assert len(names) > 10
    for name in names:
        provider = Provider.parse(name)
        assert provider.name == str(provider) == name
        assert provider.compiled == ("torch.compile" in name)
        assert provider.sparse_path == any(path in name.split() for path in SPARSE_PATHS)
        assert (provider.compilation == TUNED) == name.endswith("tuned")


def test_names_that_are_none_are_refused():
    assert Provider.parse("dense") == DENSE_KERNELS == Provider("triton", "dense")
    tuned = Provider("triton", None, TUNED)
    assert tuned.untuned == Provider("triton", None, COMPILED) and AUTO.untuned == AUTO
    for name in ("union", "triton eager", "dense union", "", "dense torch.compiled"):
        with pytest.raises(ValueError, match=f"provider '{name}' is unknown"):
            Provider.parse(name)


def test_the_providers_of_a_model_are_those_of_its_compilations():
    eager, compiled, tuned = (
        [Provider(backend, None, kind) for backend in ("dense", "triton", "auto")]
        for kind in ("eager", COMPILED, TUNED)
    )
    assert model_providers(None, True) == eager + compiled + tuned
    assert model_providers(True) == compiled and model_providers(False) == eager


def test_the_face_of_the_package_loads():
    for name in measure.__all__:
        assert getattr(measure, name) is not None and name in dir(measure)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        measure.nothing  # noqa: B018
