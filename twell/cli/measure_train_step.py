"""`twell measure train-step`"""

from __future__ import annotations

from typing import Annotated

import typer

from twell.cli.common import BENCH, Bench, Compile, Energy, Overrides, Spread, option, split_config

CONFIG = "171m"
EXAMPLE = "twell measure train-step 1.5b micro_batch=16 --spread paper --largest"


def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A YAML file, or one of the package's configurations."
        ),
    ] = CONFIG,
    overrides: Overrides = None,
    active: Annotated[
        float | None,
        option(
            "Mean active neurons per token and layer; default: the paper's for this size, else 29."
        ),
    ] = None,
    spread: Spread = None,
    compile: Compile = None,
    largest: Annotated[
        bool,
        option(
            "Also find the largest micro-batch that fits, and its speed: minutes more.",
            name="--largest",
        ),
    ] = False,
    energy: Energy = False,
    out: Bench = BENCH,
) -> None:
    """Time one optimiser step of a whole model on random tokens, dense and sparse.

    A row for each provider is appended to train_step.csv, if it learns as dense does.
    """
    config, overrides = split_config(config, overrides, CONFIG)

    from twell import measure

    measure.train_step(
        config,
        overrides,
        active=active,
        profile=spread or "flat",
        compiled=compile,
        largest=largest,
        energy=energy,
        out=out,
    )
