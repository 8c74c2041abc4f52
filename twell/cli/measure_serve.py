"""`twell measure serve`"""

from __future__ import annotations

import math
from typing import Annotated

import typer

from twell.cli.common import BENCH, Bench, Overrides, Spread, option, split_config

CONFIG = "2b"
EXAMPLE = "twell measure serve 2b --requests 64 --prompts 128-1024 --new-tokens 128"


def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A YAML file, or one of the package's configurations."
        ),
    ] = CONFIG,
    overrides: Overrides = None,
    requests: Annotated[int, option("Requests that arrive at once.")] = 64,
    prompts: Annotated[
        str, option("Tokens of the shortest and the longest prompt.", metavar="A-B")
    ] = "128-1024",
    new_tokens: Annotated[int, option("Tokens that each request gets.")] = 128,
    cuda_graph: Annotated[
        bool | None,
        typer.Option("--cuda-graph/--no-cuda-graph", help="Default: what transformers chooses."),
    ] = None,
    active: Annotated[
        float | None,
        option("Mean active neurons per token and layer; default: the paper's for this size."),
    ] = None,
    spread: Spread = None,
    seconds: Annotated[
        float, option("After so many no further round begins; default: all rounds.")
    ] = math.inf,
    out: Bench = BENCH,
) -> None:
    """Time transformers' continuous batching with random weights and imposed activity.

    Requests a second and the time to the first token, dense, sparse and by auto. Rows are appended
    to serve.csv, also after Ctrl-C.
    """
    shortest, dash, longest = prompts.partition("-")
    if not (dash and shortest.isdigit() and longest.isdigit()):
        raise ValueError(f"--prompts is {prompts!r}; write two numbers, such as 128-1024")
    config, overrides = split_config(config, overrides, CONFIG)

    from twell import measure

    measure.serve(
        config,
        overrides,
        load=measure.Load(requests, int(shortest), int(longest), new_tokens, cuda_graph),
        profile=spread or "paper",
        active=active,
        seconds=seconds,
        out=out,
    )
