"""A small grid of one layer for a device that nobody measured yet: minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twell.measure import clock

GRIDS = "--tokens 1,64,16384 --kernels", "--tokens 16384 --backward"
LEVELS = "--active 3,29,300 --pattern skewed,even"


def small_grid(folder: str | Path) -> Path:
    """Measure one layer, in inference and training, into a folder; return the folder.

    `twell measure ffn` runs in a process of its own, so each row names a command that can be
    repeated. Raises RuntimeError without a GPU, CalledProcessError where the command fails.
    """
    clock.Gpu()
    for grid in GRIDS:
        options = f"{grid} {LEVELS} --out".split()
        command = [sys.executable, "-m", "twell", "measure", "ffn", *options, str(folder)]
        subprocess.run(command, check=True)
    return Path(folder)
