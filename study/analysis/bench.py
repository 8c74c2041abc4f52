"""Measured rows of a folder, as notebooks read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

# These have no times, so that rows of any device serve.
_UNTIMED = "quality.csv", "fuzz.csv"


class Bench:
    """The CSV files of `twell measure` in a folder, of one device.

    device: its name; by default that with the most rows, "" where the folder has none. Raises
    FileNotFoundError for a `required` file that is not there.
    """

    def __init__(
        self, folder: str | Path, required: Sequence[str] = (), device: str | None = None
    ) -> None:
        self.folder = Path(folder)
        for file in required:
            if not (self.folder / file).is_file():
                raise FileNotFoundError(
                    f"nothing is recorded in {self.folder / file}; "
                    "docs/benchmarks.md says which command measures it"
                )
        self.device = self._most_rows() if device is None else device

    def _most_rows(self) -> str:
        timed = [path for path in sorted(self.folder.glob("*.csv")) if path.name not in _UNTIMED]
        files = [pd.read_csv(path) for path in timed]
        devices = [rows["device"] for rows in files if "device" in rows]
        by_rows = pd.concat(devices).mode() if devices else ()
        return by_rows[0] if len(by_rows) else ""

    def rows(
        self,
        file: str,
        table: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
        where: str | None = None,
    ) -> pd.DataFrame:
        """Return the rows of a file, or a table of them, of this device and as `query` keeps them.

        Those of quality.csv and fuzz.csv are of any device. Empty where there is no such file or no
        such row.
        """
        path = self.folder / file
        rows = pd.read_csv(path) if path.is_file() else pd.DataFrame()
        if table is not None and len(rows):
            rows = table(rows)
        if not len(rows):
            return rows
        if file not in _UNTIMED:
            rows = rows[rows["device"] == self.device]
        return rows.query(where) if where and len(rows) else rows
