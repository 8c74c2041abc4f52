"""Cells and bytes of the packed formats against the dense matrix."""

import numpy as np
import pandas as pd
import pytest

from study import analysis
from tests.factories import SEED


def test_cells_show_the_packed_tensors():
    random = np.random.default_rng(SEED)
    dense = (random.random((7, 20)) < 0.2).astype(np.float32)  # the last of three tiles is partial
    dense[2], dense[5], dense[3] = 0, 1, 0
    dense[3, 19] = 1
    cells = analysis.format_cells(dense, tile_n=8, compression=2, ell_width=6)
    active = {token: np.flatnonzero(row).tolist() for token, row in enumerate(dense)}
    for name, table in cells.groupby("format"):
        stored = table[table["kind"] == "value"].groupby(["part", "token"])["label"].apply(list)
        columns = {token: set() for token in active}
        for (part, token), labels in stored.items():
            assert labels == active[token] or (name, part) == ("TwELL", "all rows")
            columns[token] |= set(labels)
        assert {token: sorted(labels) for token, labels in columns.items()} == active, name
    tiles = cells[(cells["format"] == "TwELL") & (cells["part"] == "all rows")]
    assert (
        set(tiles.groupby("token").size()) == {12}
        and (cells.query("kind == 'zero'").label < 0).all()
    )
    counts = np.pad(dense, ((0, 0), (0, 4))).reshape(7, 3, 8).sum(2)
    heads = tiles[tiles["kind"] == "count"]
    assert heads["slot"].tolist() == [0, 4, 8] * 7
    assert heads["label"].tolist() == counts.reshape(-1).tolist()
    for part, tokens in (
        ("overflow rows", np.flatnonzero(counts.max(1) > 3)),
        ("backup rows", np.flatnonzero(dense.sum(1) > 6)),
        ("ELL rows", np.flatnonzero(dense.sum(1) <= 6)),
    ):
        assert cells.loc[cells["part"] == part, "token"].unique().tolist() == tokens.tolist()


def test_bytes_are_those_of_the_formats():
    options = {"tile_n": 128, "compressions": (8,), "ell_width": 16}
    table = analysis.format_bytes(64, 512, [0.5, 1e6], **options)
    sparse, full = (rows.set_index("format")["nbytes"] for _, rows in table.groupby("active"))
    assert table["nbytes"].eq((table["relative"] * 64 * 512 * 2).round()).all()
    slots, counts, vector, dense = 64 * 16 * 4, 64 * 4, 64 * 4, 64 * 512 * 2
    tiles = 64 * 512 // 8 * 4
    assert sparse["TwELL, C = 8"] == tiles and sparse["Hybrid, width 16"] == slots + counts + vector
    assert sparse["ELL"] < sparse["Hybrid, width 16"]
    assert table["active_share"].iloc[-1] == 1 and full["ELL"] == 64 * 512 * 4 + counts
    assert full["Hybrid, width 16"] == dense + vector
    assert full["TwELL, C = 8"] == tiles + dense + vector


def test_rows_are_uneven_around_the_mean():
    table = analysis.format_bytes(2000, 1000, [20.0], seed=SEED)
    assert table["active"].iloc[0] == pytest.approx(20, rel=0.2)
    width = table.set_index("format").loc["ELL", "nbytes"] / 2000 / 4 - 1
    assert width > 5 * 20
    again, other = (analysis.format_bytes(9, 50, [3.0], seed=seed) for seed in (0, 1))
    pd.testing.assert_frame_equal(analysis.format_bytes(9, 50, [3.0]), again)
    assert not again.equals(other)
