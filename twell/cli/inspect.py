"""`twell inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twell.cli.common import (
    BUILD,
    INPUT,
    OUTPUT,
    File,
    Statistics,
    Text,
    option,
    prepare_out,
    read_text,
)

EXAMPLE = 'twell inspect runs/quick --text "The bridge was built in 1862."'
COMPARE = "Compare"
WHAT = (
    "A run, a folder with a model and its tokenizer, or a name on the Hugging Face hub; or a trace "
    "(`twell trace`), which has its own text."
)
START = "The first token of a trace to show; a page has 4,096."
OTHER = "Another model or trace, shown beside the first."
OUT = f"The .html file to write; default: {BUILD}/inspect/MODEL.html."


def command(
    what: Annotated[str, typer.Argument(metavar="MODEL", help=WHAT)],
    text: Text = None,
    file: File = None,
    model: Annotated[
        str | None, option("The model that a trace came from.", INPUT, metavar="MODEL")
    ] = None,
    start: Annotated[int, option(START, INPUT)] = 0,
    aggregate: Statistics = None,
    compare: Annotated[str | None, option(OTHER, COMPARE, metavar="MODEL")] = None,
    compare_text: Annotated[
        str | None, option("Another text under the same model.", COMPARE, metavar="TEXT")
    ] = None,
    compare_file: Annotated[
        Path | None, option("The same, a UTF-8 text file.", COMPARE, metavar="FILE")
    ] = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="FILE")] = None,
) -> None:
    """Write a page that shows which neurons fire for each token of a text.

    The page is one HTML file; it opens without a server or a network. In a notebook, twell.inspect
    shows the same.
    """
    traced = what.endswith(".npz")
    read = read_text(text, file) if not traced or (text, file) != (None, None) else None
    if (compare_text, compare_file) != (None, None):
        read = read, read_text(compare_text, compare_file, "--compare-text", "--compare-file")

    from twell import results

    name = Path(what).stem if traced else results.model_name(what)
    out = out or BUILD / "inspect" / f"{name}.html"
    prepare_out(out, ".html")

    from twell import inspector

    sides = inspector.sides(
        what, read, compare=compare, aggregate=aggregate, model=model, start=start
    )
    results.write_atomically(out, inspector.page(sides))
    for side in sides:
        active = side.trace.counts().mean()
        cut = f", the first of {side.of[1]}" if side.of[1] > side.trace.num_tokens else ""
        tokens = f"{side.trace.num_tokens} tokens{cut}"
        print(f"{side.name}: {tokens}, {active:.3g} of {side.shape[1]} neurons active a layer")
    print(f"{out}: {out.stat().st_size} bytes")
