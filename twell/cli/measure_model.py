"""`twell measure model`"""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from twell.cli.common import (
    BENCH,
    INPUT,
    RANDOM,
    Bench,
    CalibrationFile,
    Compile,
    Energy,
    File,
    Overrides,
    Spread,
    Text,
    load_calibration,
    numbers,
    option,
    read_text,
    split_config,
)

CONFIG = "2b"
EXAMPLE = "twell measure model 2b --batches 64x2048 --energy --decode 1,32"
MOST_TOKENS = 2**21  # of a text
BATCHES = "64x2048,16x2048,1x2048"


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run or model folder or a name on the Hugging Face hub, with a text; or a "
            "configuration (a YAML file or one of the package's) for random weights.",
        ),
    ] = CONFIG,
    overrides: Overrides = None,
    text: Text = None,
    file: File = None,
    source: Annotated[
        str | None,
        option("Instead of a text: a file or folder of documents, as `twell train` reads.", INPUT),
    ] = None,
    order_tokens: Annotated[
        bool,
        option(
            "Let sparse layers compute similar tokens side by side; see `twell.order_tokens`.",
            INPUT,
            name="--order-tokens",
        ),
    ] = False,
    alike: Annotated[
        bool,
        option(
            "Then measure random weights too, on whose layers the same activity is imposed.",
            INPUT,
            name="--alike",
        ),
    ] = False,
    batches: Annotated[str, option("Sequences x tokens of each, with commas, or none.")] = BATCHES,
    spread: Spread = None,
    active: Annotated[
        str | None,
        option(
            "Mean active neurons per token, with commas; default: the paper's for this size.",
            RANDOM,
        ),
    ] = None,
    layers: Annotated[
        bool, option("Also time each feed-forward layer alone.", name="--layers")
    ] = False,
    decode: Annotated[
        str | None, option("Also time decoding of so many documents, with commas, such as 1,8,32.")
    ] = None,
    context: Annotated[int, option("Tokens in the cache when decoding begins.")] = 512,
    compile: Compile = None,
    tuned: Annotated[
        bool,
        option(
            "Also time decoding with layers that torch.compile tunes: a minute more.",
            name="--tuned",
        ),
    ] = False,
    fp8: Annotated[
        bool,
        option(
            "Also time everything with feed-forward layers in FP8, and passes with attention's "
            "linear layers too.",
            name="--fp8",
        ),
    ] = False,
    calibration: CalibrationFile = None,
    no_graphs: Annotated[
        bool,
        option(
            "Time calls one after the other, not in CUDA graphs: Python's work counts.",
            name="--no-graphs",
        ),
    ] = False,
    energy: Energy = False,
    out: Bench = BENCH,
) -> None:
    """Time a language model in bf16: dense, sparse and by auto, eager and with compiled layers.

    The activity is that of the text, or imposed on random weights. Rows are appended to model.csv,
    model_layers.csv and decode.csv.
    """
    model, overrides = split_config(model, overrides, CONFIG)
    is_config = _is_config(model)
    if is_config and ((text, file, source) != (None,) * 3 or order_tokens):
        raise ValueError(
            f"{model} is a configuration, whose weights are random: give no text, and no order of "
            "its tokens"
        )
    if not is_config and (overrides or (spread, active) != (None, None)):
        raise ValueError(
            "key=value, --spread and --active are for random weights; a checkpoint has its own"
        )
    shapes = _shapes(batches)
    if alike and (is_config or not shapes):
        raise ValueError("--alike imposes the activity of a model and its text in one of --batches")
    means = numbers("--active", active, float) if active else None
    documents = numbers("--decode", decode, int) if decode else ()
    read = None if is_config or source else read_text(text, file)
    if source and (text, file) != (None, None):
        raise ValueError("give a text or a --source, and not both")

    from twell import measure
    from twell.measure import runner

    runner.Gpu()  # before anything is loaded
    measure.language_model(
        model if is_config else CONFIG,
        overrides,
        checkpoint=None if is_config else _checkpoint(model, read, source),
        ordered=order_tokens,
        alike=alike,
        shapes=shapes,
        profile=spread or "paper",
        active=means,
        layers=layers,
        decode=documents,
        decode_context=context,
        compiled=compile,
        tuned=tuned,
        fp8=fp8,
        calibration=load_calibration(calibration),
        graphs=not no_graphs,
        energy=energy,
        out=out,
    )


def _is_config(name: str) -> bool:
    """Whether a name is a configuration's: a YAML file or one of the package's."""
    from twell.config import CONFIGS

    return name.endswith((".yaml", ".yml")) or (CONFIGS / f"{name}.yaml").is_file()


def _shapes(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [part.split("x") for part in text.split(",")] if text != "none" else []
        return [(int(sequences), int(tokens)) for sequences, tokens in pairs]
    except ValueError:
        raise ValueError(
            f"--batches is {text!r}; write sequences x tokens with commas, such as {BATCHES}"
        ) from None


def _checkpoint(name: str, text: str | None, source: str | None = None) -> tuple:
    """Return a model's name, the model in bf16, and the tokens of a text or of a source."""
    import torch

    from twell import corpus, results, trace
    from twell.models import check_llama

    model, tokenizer = trace.load_with_tokenizer(name, dtype=torch.bfloat16)
    check_llama(name, model)
    texts = filter(None, corpus.documents(source)) if source else [text]
    tokens = (token for one in texts for token in trace.encode(tokenizer, one))
    return results.model_name(name), model, list(itertools.islice(tokens, MOST_TOKENS))
