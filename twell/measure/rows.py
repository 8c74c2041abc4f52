"""Measured rows: the columns of each file of data/bench, and the files that rows are appended to.

data/README.md says what the columns mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from twell import results

LAYER_CASE = "tokens hidden_size intermediate_size gated dtype pattern active".split()
LAYER_MODEL = (
    "model parameters num_layers hidden_size intermediate_size num_heads vocab_size gated dtype"
).split()
SHAPE = "profile sdpa batch context tokens".split()
MODEL_CASE = [*LAYER_MODEL, *SHAPE, *"active active_max union".split()]
STEP_SIZES = (
    "num_layers hidden_size intermediate_size num_heads vocab_size gated context micro_batch"
).split()
SPEED = "p20 p50 p80".split()
ENERGY = "energy watts".split()
WORK = "flops bytes roofline".split()
LAYER_TIMES = "dense sparse auto auto_path relative_rms".split()

COLUMNS = {
    "ffn": LAYER_CASE
    + "active_max union mode weight_sets provider path relative_rms".split()
    + [*SPEED, *WORK, *ENERGY],
    "kernels": [*LAYER_CASE, *"union provider kernel launches ms".split(), *WORK],
    "ceilings": "metric value unit".split(),
    "training": LAYER_CASE
    + "active_max union provider path capacity relative_rms worst".split()
    + [*SPEED, *"forward held peak".split(), *WORK, *ENERGY],
    "training_kernels": [*LAYER_CASE, *"union provider kernel launches ms".split()],
    "train_step": [
        *("model", "parameters", *STEP_SIZES),
        *"precision checkpoint_activations profile active active_max".split(),
        *"provider path capacity loss grad_norm".split(),
        *(*SPEED, "tokens_per_second", "peak", *ENERGY),
        *("largest", "largest_tokens_per_second"),
    ],
    "model": MODEL_CASE
    + "mode provider path relative_rms layer_rms".split()
    + [*SPEED, "tokens_per_ms", "peak", *ENERGY, "idle"],
    "model_layers": [*LAYER_MODEL, *SHAPE]
    + "level layer wanted active p99 active_max union".split()
    + LAYER_TIMES,
    "model_parts": [*MODEL_CASE, *"layer provider part ms".split()],
    "decode": MODEL_CASE
    + "steps provider path relative_rms layer_rms same".split()
    + [*SPEED, "tokens_per_second", *ENERGY, "idle"],
}


class Rows:
    """The rows of one command by file, appended to CSV files in `folder` as they are measured.

    folder: None keeps them in memory alone. Raises before anything is measured: NotADirectoryError
    for a file in place of the folder, ValueError for a file with other columns.
    """

    def __init__(self, folder: str | Path | None, files: Sequence[str]):
        if folder is not None and Path(folder).is_file():
            names = ", ".join(f"{name}.csv" for name in files)
            raise NotADirectoryError(f"{folder} is a file; out is a folder, for {names}")
        self.folder = None if folder is None else Path(folder)
        for name in files if folder is not None else ():
            path = self.folder / f"{name}.csv"
            existing = list(pd.read_csv(path, nrows=0)) if path.is_file() else COLUMNS[name]
            if existing[: len(COLUMNS[name])] != COLUMNS[name]:
                raise ValueError(
                    f"{path} has the columns {existing}; the rows to add have {COLUMNS[name]}: "
                    "move it away first"
                )
        self.origin = results.provenance()
        self.by_file: dict[str, list[dict]] = {name: [] for name in files}

    def add(self, name: str, rows: Iterable[dict]) -> None:
        """Append rows to a file, each with its columns alone; KeyError for a row without one."""
        rows = [{column: row[column] for column in COLUMNS[name]} for row in rows]
        self.by_file[name] += rows
        if self.folder is not None and rows:
            results.append_rows(self.folder / f"{name}.csv", rows, self.origin)


def significant(value: float, digits: int) -> float:
    """Return a number rounded to so many significant digits, as files have it."""
    return float(f"{value:.{digits}g}")
