"""`twell export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twell.cli.common import BUILD, OUTPUT, option

EXAMPLE = 'twell export runs/quick --trained-on "The State of the Union addresses."'
TRAINED_ON = "What the model was trained on, in a sentence, for the card."
TWIN = "The run with another L1 coefficient that the card shows beside."
OUT = f"The folder to write; default: {BUILD}/export/RUN."


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run.")],
    trained_on: Annotated[str, option(TRAINED_ON)],
    twin: Annotated[Path | None, option(TWIN, metavar="RUN")] = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="DIR")] = None,
) -> None:
    """Write a finished run as a folder to give away: bf16 weights, tokenizer, model card."""
    from twell import results
    from twell.export import export

    out = out or BUILD / "export" / results.model_name(run)
    print(export(run, out, text=trained_on, twin=twin))
