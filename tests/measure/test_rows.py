"""Files of rows, and the names of providers in them."""

import pandas as pd
import pytest

from twell import results
from twell.measure.providers import AUTO, COMPILED, TUNED, Provider
from twell.measure.rows import COLUMNS

BENCH = results.root() / "data" / "bench"


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
