"""`twell measure calibrate`"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from twell.cli.common import (
    BUILD,
    OUTPUT,
    HiddenSize,
    IntermediateSize,
    NonGated,
    option,
    prepare_out,
)

EXAMPLE = "twell measure calibrate data/checkpoints/twell-6m --out build/calibration.json"


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A run or model folder: its layers, in place of sizes."
        ),
    ] = None,
    hidden_size: HiddenSize = None,
    intermediate_size: IntermediateSize = None,
    non_gated: NonGated = False,
    fp8: Annotated[
        bool, option("Of layers with FP8 weights (twell.quantize_).", name="--fp8")
    ] = False,
    out: Annotated[
        Path | None,
        option(
            f"The .json file to write; default: beside the model's weights, or "
            f"{BUILD}/calibration.json.",
            OUTPUT,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Time all paths of a layer over tokens and activity: the times that backend="auto" chooses by.

    Then training steps are timed, dense and sparse, for the activity up to which sparse ones are
    faster. This takes a minute or two.
    """
    from twell import measure, results
    from twell.models import CALIBRATION, load_empty, sparse_ffns

    sizes = hidden_size, intermediate_size, not non_gated
    default = BUILD / CALIBRATION
    if model is not None:
        if (hidden_size, intermediate_size, non_gated) != (None, None, False):
            raise ValueError(
                f"{model} has its own layers; leave out --hidden-size, --intermediate-size and "
                "--non-gated"
            )
        folder, empty = load_empty(model)
        ffn = sparse_ffns(empty)[0]
        if ffn.activation != "relu":
            raise ValueError(
                f"{folder} has the activation {ffn.activation!r}, and layers of 'relu' are timed; "
                "give their sizes in place of the model"
            )
        sizes = ffn.hidden_size, ffn.intermediate_size, ffn.gated
        default = folder / CALIBRATION
        if out is None and results.is_recorded(folder):
            raise ValueError(
                f"{folder} is recorded data; --out {default} writes there all the same"
            )
    hidden_size, intermediate_size, gated = sizes
    hidden_size = 2048 if hidden_size is None else hidden_size
    intermediate_size = 5632 if intermediate_size is None else intermediate_size
    out = out or default
    prepare_out(out, ".json")
    # Saved before training is timed, which may fail.
    calibration = measure.calibrate(
        hidden_size, intermediate_size, gated=gated, quantized=fp8, out=out
    )
    if fp8:
        return
    training = measure.crossover(hidden_size, intermediate_size, gated=gated)
    dataclasses.replace(calibration, training=training).save(out)
