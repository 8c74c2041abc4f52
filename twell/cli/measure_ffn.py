"""`twell measure ffn`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from twell.cli.common import (
    BENCH,
    LAYER,
    Bench,
    CalibrationFile,
    Energy,
    HiddenSize,
    IntermediateSize,
    NonGated,
    load_calibration,
    numbers,
    option,
)

EXAMPLE = "twell measure ffn --tokens 131072,16384 --active 29"
FORWARD_TOKENS, BACKWARD_TOKENS = "131072,16384,2048,64,16,1", "65536,16384"


def command(
    backward: Annotated[
        bool, option("Time the layer as in training, with its gradients.", name="--backward")
    ] = False,
    tokens: Annotated[
        str | None,
        option(
            f"Numbers of tokens, with commas; default: {FORWARD_TOKENS}, with --backward "
            f"{BACKWARD_TOKENS}."
        ),
    ] = None,
    active: Annotated[str, option("Mean active neurons per token, with commas.", LAYER)] = "29",
    pattern: Annotated[
        str,
        option(
            "How activity is spread, with commas: skewed, even, recorded (of a real text).", LAYER
        ),
    ] = "skewed",
    hidden_size: HiddenSize = None,
    intermediate_size: IntermediateSize = None,
    non_gated: NonGated = False,
    activation: Annotated[
        Literal["relu", "relu2", "drelu"],
        option("Another activation joins the column `pattern`. Not with --backward.", LAYER),
    ] = "relu",
    bias: Annotated[
        bool, option("Projections with biases. Not with --backward.", LAYER, name="--bias")
    ] = False,
    trace: Annotated[
        Path | None,
        option("A trace for the recorded pattern (`twell trace`), with --layer.", LAYER),
    ] = None,
    layer: Annotated[int | None, option("The layer of the trace.", LAYER)] = None,
    mode: Annotated[
        Literal["stream", "graph", "eager", "compiled"] | None,
        option(
            "stream: single calls, cache emptied between; graph: a CUDA graph with 8 sets of "
            "weights in rotation; eager, compiled: these calls back to back; default: graph up to "
            "4096 tokens. With --backward stream, the default, or eager: steps back to back."
        ),
    ] = None,
    energy: Energy = False,
    kernels: Annotated[
        bool, option("Also measure each kernel of our paths.", name="--kernels")
    ] = False,
    calibration: CalibrationFile = None,
    out: Bench = BENCH,
) -> None:
    """Time one layer in bf16: dense, by each path of the kernels, and by auto.

    Rows are appended after each case to ffn.csv and kernels.csv, with --backward to training.csv
    and training_kernels.csv.
    """
    patterns = pattern.split(",")
    if (trace is None) != (layer is None):
        raise ValueError("--trace FILE and --layer NUMBER go together")
    if trace and "recorded" not in patterns:
        raise ValueError(f"--trace is for --pattern recorded; the pattern is {pattern}")
    if backward and (bias or activation != "relu"):
        given = "--bias" if bias else f"--activation {activation}"
        raise ValueError(f"{given} is for forward passes; --backward times ReLU without biases")
    if backward and calibration is not None:
        raise ValueError("--calibration is for auto, which --backward does not time")
    tokens = tokens or (BACKWARD_TOKENS if backward else FORWARD_TOKENS)
    cases = numbers("--tokens", tokens, int), numbers("--active", active, float), patterns
    options = {
        "hidden_size": hidden_size,
        "intermediate_size": 5632 if intermediate_size is None else intermediate_size,
        "gated": not non_gated,
        "masks": _mask(trace, layer) if trace else None,
        "energy": energy,
        "kernels": kernels,
        "out": out,
    }

    from twell import measure

    if backward:
        measure.ffn_steps(*cases, **options, mode=mode or "stream")
    else:
        options |= {"activation": activation, "bias": bias, "mode": mode}
        measure.ffn(*cases, **options, calibration=load_calibration(calibration))


def _mask(path: Path, layer: int) -> dict:
    """Return the activity of a trace's layer, [num_tokens, intermediate_size] bool, by its name."""
    import numpy as np

    from twell.trace import Trace

    h = Trace.load(path).layer(layer)
    mask = np.zeros(h.shape, bool)
    # A stored zero is active too.
    mask[np.repeat(np.arange(len(mask)), np.diff(h.indptr)), h.indices] = True
    return {f"{path.stem}_{layer}": mask}
