"""The rows of a run's log.csv."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from twell import results

# Metrics of a log, and their names in the results of `summarize_activity`.
ACTIVITY = {
    "active_mean": "mean",
    "active_p99": "p99",
    "active_max": "max",
    "dead_fraction": "dead",
}


class Log:
    """Appends tidy rows to a run's log.csv, each call's rows at once.

    A resumed run gives the `size` in bytes from its checkpoint. Rows after it are removed, whole or
    not: the run writes them again.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        if size is None:
            path.write_text(",".join(results.LOG_COLUMNS) + "\n", encoding="utf-8")
        else:
            os.truncate(path, size)

    def write(
        self, step: int, tokens: int, split: str, values: dict[str, float | list[float]]
    ) -> None:
        """Write one row for each number, and one for each layer of a list."""
        rows = []
        for metric, value in values.items():
            numbered = enumerate(value) if isinstance(value, list) else [("", value)]
            rows += [(step, tokens, split, layer, metric, f"{x:.6g}") for layer, x in numbered]
        # Mode "a" would create a deleted log again, without its header.
        with results.naming(self.path), open(self.path, "r+", encoding="utf-8") as file:
            file.seek(0, os.SEEK_END)
            csv.writer(file, lineterminator="\n").writerows(rows)


def activity_columns(layers: list[dict]) -> dict[str, list[float]]:
    """Return the per-layer metrics of a log from the results of `summarize_activity`."""
    return {metric: [layer[key] for layer in layers] for metric, key in ACTIVITY.items()}
