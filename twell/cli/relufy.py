"""`twell relufy`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twell.cli.common import OUTPUT, RUNS, Overrides, Overwrite, Resume, option
from twell.cli.train import end_processes

EXAMPLE = "twell relufy HuggingFaceTB/SmolLM2-135M source=texts.jsonl active_share=0.1"
MODEL = "A Llama, Mistral, Qwen2 or Qwen3: its folder, a run, or its name on the hub."
OUT = f"The run's folder; default: {RUNS}/MODEL-relu-ACTIVE_SHARE."


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    overrides: Overrides = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="DIR")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Exchange the SiLU of a pretrained model for ReLU, and let it learn from the original.

    An L1 term rises until the wanted share of neurons is active.
    """
    from twell.train import relufy_config, train

    config = relufy_config(model, overrides or ())
    out = out or RUNS / f"{Path(model).name}-relu-{config.active_share:g}"
    train(config, out, overwrite=overwrite, resume=resume)
    end_processes()
