"""`twell atlas`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twell.cli.common import BUILD, OUTPUT, Statistics, option

EXAMPLE = "twell atlas data/checkpoints/twell-6m"
MODEL = "A run or a folder with a model, or an aggregate's .npz file."
LABELS = "Notes on neurons, lines of LAYER:NEURON TEXT; default: notes.txt beside the model."
OUT = f"The folder to write; default: {BUILD}/atlas/MODEL."


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    aggregate: Statistics = None,
    labels: Annotated[Path | None, option(LABELS, metavar="FILE")] = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="DIR")] = None,
) -> None:
    """Write a site that shows all neurons of a model.

    It opens from disk, without a server or a network: index.html.
    """
    from twell import inspector, results

    out = out or BUILD / "atlas" / results.model_name(model.removesuffix(".npz"))
    side = inspector.write_atlas(model, out, aggregate=aggregate, labels=labels)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    layers, neurons = side.shape
    print(f"{side.name}: {layers} layers of {neurons} neurons, {len(side.notes)} notes")
    print(f"{out / 'index.html'}: {size} bytes with its chunks")
