"""`twell inspect`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from twell.cli.common import BUILD, OUTPUT, File, Model, Text, option, prepare_out, read_text

EXAMPLE = 'twell inspect runs/quick --text "The bridge was built in 1862."'


def command(
    model: Model,
    text: Text = None,
    file: File = None,
    aggregate: Annotated[
        Path | None,
        option(
            "Statistics of each neuron (`twell trace --aggregate`); default: aggregate.npz in "
            "the model's folder, if it is there.",
            metavar="FILE",
        ),
    ] = None,
    compare: Annotated[
        str | None, option("Another model, shown beside it.", metavar="MODEL")
    ] = None,
    out: Annotated[
        Path | None,
        option(
            f"The .html file to write; default: {BUILD}/inspect/MODEL.html.", OUTPUT, metavar="FILE"
        ),
    ] = None,
) -> None:
    """Write a page that shows which neurons fire for each token of a text.

    The page is one HTML file; it opens without a server or a network. In a notebook, twell.inspect
    shows the same.
    """
    read = read_text(text, file)

    from twell import results

    out = out or BUILD / "inspect" / f"{results.model_name(model)}.html"
    prepare_out(out, ".html")
    _check_models(model, compare, aggregate)

    from twell import inspector

    sides = inspector.sides(model, read, compare=compare, aggregate=aggregate)
    results.write_atomically(out, inspector.page(sides))
    for side in sides:
        active = side.trace.counts().mean()
        cut = f", the first of {side.of[1]}" if side.of[1] > side.trace.num_tokens else ""
        tokens = f"{side.trace.num_tokens} tokens{cut}"
        print(f"{side.name}: {tokens}, {active:.3g} of {side.shape[1]} neurons active a layer")
    print(f"{out}: {out.stat().st_size} bytes")


def _check_models(model: str, compare: str | None, aggregate: Path | None) -> None:
    """Refuse models without tokenizer and statistics of another model before weights load."""
    from twell.models import load_empty, sparse_ffns
    from twell.models.loading import TOKENIZER
    from twell.trace import Aggregate

    for name in filter(None, (model, compare)):
        folder, empty = load_empty(name)
        if not any((folder / file).is_file() for file in TOKENIZER):
            raise ValueError(f"{name} has no tokenizer; put tokenizer.json beside the model")
        if name == model and aggregate is not None:
            counted = Aggregate.load(aggregate).value_sum.shape
            ffns = sparse_ffns(empty)
            shape = len(ffns), ffns[0].intermediate_size
            if counted != shape:
                raise ValueError(
                    f"{name}: the model has {shape[0]} layers of {shape[1]} neurons, the aggregate "
                    f"{counted[0]} of {counted[1]}; they have to be of the "
                    "same model"
                )
