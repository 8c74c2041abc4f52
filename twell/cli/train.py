"""`twell train`"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from twell.cli.common import OUTPUT, RUNS, Overrides, Overwrite, Resume, option

EXAMPLE = "twell train quick l1_coefficient=3e-3 --out runs/quick"
CONFIG = "A YAML file, or the name of one of the package's configurations."
OUT = f"The run's folder; default: {RUNS}/CONFIG-l1-COEFFICIENT-seed-SEED."


def command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG)],
    overrides: Overrides = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="DIR")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train a model with the L1 term."""
    from twell.train import TrainConfig, train

    loaded = TrainConfig.load(config, overrides or ())
    name = f"{Path(config).stem}-l1-{loaded.l1_coefficient:g}-seed-{loaded.seed}"
    train(loaded, out or RUNS / name, overwrite=overwrite, resume=resume)
    end_processes()


def end_processes() -> None:
    """End a process of several at once: all have finished.

    Gloo's threads may abort an interpreter that shuts down (one FSDP2 run in four on two CPU
    processes).
    """
    from torch import distributed

    if not distributed.is_initialized():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)
