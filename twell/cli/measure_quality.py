"""`twell measure quality`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from twell.cli.common import BENCH, INPUT, Bench, Model, option, say

EXAMPLE = "twell measure quality data/checkpoints/twell-6m --source sotu --tokens 65536"


def command(
    model: Model,
    source: Annotated[
        str,
        option(
            "Text that the model has not seen: a file or folder, read as a whole, or sotu, of "
            "which every 20th document is read.",
            INPUT,
        ),
    ] = "sotu",
    tokens: Annotated[int, option("Number of tokens.", INPUT)] = 2**16,
    out: Bench = BENCH,
) -> None:
    """Compare a model's cross-entropy in bf16 and in FP8, dense and sparse, on held-out text.

    Rows are appended to quality.csv.
    """
    import torch

    from twell import measure, results, trace

    loaded, tokenizer = trace.load_with_tokenizer(model, dtype=torch.bfloat16)
    sequences = trace.held_out(source, loaded, tokenizer, tokens, whole=source != "sotu")
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    measure.quality(
        results.model_name(model),
        loaded,
        sequences,
        source=Path(source).name,
        out=out,
        say=say,
    )
