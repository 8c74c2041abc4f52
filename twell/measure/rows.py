"""Measured rows: the columns of each file of data/bench, and the files that rows are appended to.

data/README.md says what the columns mean. Columns that only recorded rows have stay empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from twell import results

SIZES = "num_layers hidden_size intermediate_size num_heads vocab_size gated"
LAYER = "tokens hidden_size intermediate_size gated dtype pattern active"
MODEL = f"model parameters {SIZES} dtype profile sdpa batch context tokens"
ACTIVITY = "active active_max union"
SPEED, WORK, ENERGY = "p20 p50 p80", "flops bytes roofline", "energy watts"
KERNEL = "provider kernel launches ms"
COLUMNS = {
    file: columns.split()
    for file, columns in {
        "ffn": f"{LAYER} active_max union mode weight_sets provider path relative_rms "
        f"{SPEED} {WORK} {ENERGY}",
        "kernels": f"{LAYER} union {KERNEL} {WORK}",
        "training": f"{LAYER} active_max union mode provider path capacity relative_rms worst "
        f"{SPEED} forward held peak {WORK} {ENERGY}",
        "training_kernels": f"{LAYER} union {KERNEL}",
        "train_step": f"model parameters {SIZES} context micro_batch precision "
        f"checkpoint_activations profile active active_max provider path capacity loss grad_norm "
        f"{SPEED} tokens_per_second peak {ENERGY} largest largest_tokens_per_second",
        "model": f"{MODEL} {ACTIVITY} mode provider path relative_rms layer_rms "
        f"{SPEED} tokens_per_ms peak {ENERGY} idle",
        "model_layers": f"{MODEL} level layer wanted active p99 active_max union "
        "dense sparse auto auto_path relative_rms",
        "decode": f"{MODEL} {ACTIVITY} steps mode provider path relative_rms layer_rms same "
        f"{SPEED} tokens_per_second {ENERGY} idle",
        "serve": f"model parameters {SIZES} profile precision active tensor_parallel new_tokens "
        "at_once requests round provider prompt_tokens request_throughput mean_ttft_ms "
        "median_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms p99_tpot_ms",
        "quality": "model parameters source tokens sequences provider cross_entropy difference low "
        "high dense_difference dense_low dense_high active",
    }.items()
}
# Columns that only some rows have, or only recorded ones: None in the others.
OPTIONAL = f"{ENERGY} {WORK} idle forward wanted largest largest_tokens_per_second".split()
# The printed columns of a row, where they have values.
SHOWN = (
    "model batch context pattern tokens active layer kernel at_once round provider path "
    "relative_rms p50 ms dense sparse auto tokens_per_second request_throughput median_ttft_ms "
    "median_tpot_ms energy peak cross_entropy difference low high"
).split()


class Rows:
    """The rows of one command by file, appended to CSV files in `folder` as they are measured.

    folder: None keeps them in memory. Raises ValueError for a file with other columns, before
    anything is measured.
    """

    def __init__(self, folder: str | Path | None, *files: str):
        self.folder = None if folder is None else Path(folder)
        self.origin = results.provenance()
        self.by_file: dict[str, list[dict]] = {name: [] for name in files}
        for name in files if self.folder else ():
            path, columns = self.folder / f"{name}.csv", COLUMNS[name]
            existing = list(pd.read_csv(path, nrows=0)) if path.is_file() else columns
            message = f"{path} has the columns {existing}; move it away: the rows have {columns}"
            require(existing[: len(columns)] == columns, message)

    def add(self, name: str, rows: Iterable[dict]) -> None:
        """Append and print rows, each with its file's columns; KeyError for a row without one."""
        rows = [{c: row.get(c) if c in OPTIONAL else row[c] for c in COLUMNS[name]} for row in rows]
        for row in rows:
            shown = (f"{c} {row[c]}" for c in SHOWN if row.get(c) is not None)
            print(f"{name}:", *shown, sep="  ", flush=True)
        self.by_file[name] += rows
        if self.folder and rows:
            results.append_rows(self.folder / f"{name}.csv", rows, self.origin)


def require(condition: bool, message: str) -> None:
    """Raise ValueError, with the message, where the condition does not hold."""
    if not condition:
        raise ValueError(message)


def significant(value: float, digits: int) -> float:
    """Return a number rounded to `digits` significant digits."""
    return float(f"{value:.{digits}g}")
