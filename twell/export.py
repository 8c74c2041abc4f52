"""A finished run as a folder to give away: weights in bf16, tokenizer, and a model card that says what it is.

The card is written from the run's own log and configuration, and from an evaluation of the rounded weights on the run's
validation text, so that nothing in it is typed by hand but the description of the text.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import torch

from twell import analysis, results, trace
from twell.model import load, save
from twell.train import TrainConfig, evaluate, run_text

AGGREGATE = "aggregate.npz"  # statistics of each neuron, which `twell inspect` shows
CARD = """---
license: apache-2.0
pipeline_tag: text-generation
tags: [llama, sparse, relu, twell]
---
# {name}

A Llama-like language model with {millions:.1f} M parameters whose feed-forward layers are sparse: with ReLU and an L1 term on
the activations, {active:.3g} of {intermediate_size} neurons a layer ({share:.2g}%) are active for a token of held-out text, so {inactive:.1f}% are
not. After "Sparser, Faster, Lighter Transformer Language Models" (arXiv 2603.23198).

| | this model{twin_head} |
|---|---:|{twin_rule}
{rows}
{twin}
| layer | active neurons, mean | 99th percentile | maximum | never active |
|---:|---:|---:|---:|---:|
{layers}

Both tables are of {valid_tokens:,} tokens of held-out text, in sequences of {context}.

## Use

```python
import twell

model, tokenizer = twell.load("{name}")   # from the folder that holds it
inputs = tokenizer("The", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=60, do_sample=True, top_k=40)[0]))
```

`twell trace {name} --text "..." --out trace.npz` records which neurons fire; without twell, transformers' `LlamaForCausalLM` with
`hidden_act="relu"` loads the weights (gated layers).

## Training

Text: {text}

`{command}`

on {device}, commit {commit}{starts}; {layers_number} layers, hidden size {hidden_size}, {intermediate_size} neurons a layer, {heads} heads,
vocabulary {vocab_size} (byte-level BPE), context {context}; {tokens:.4g} M tokens in all, {batch_tokens:,} a step, peak learning rate {learning_rate:g}, L1 coefficient
{l1} on the mean over tokens and layers of the sum over neurons of |h|.

## Limits

A small model for looking at sparse activity, not for answers: what it writes is fluent at best and often wrong. It has not been tuned to
follow instructions, nor checked for bias; it repeats what its text holds.
"""


@torch.no_grad()
def export(run: str | Path, out: str | Path, *, text: str, twin: str | Path | None = None) -> Path:
    """Write a run's model to the folder `out`: bf16 weights, tokenizer, config and README.md, the model card.

    text: what the model was trained on, in a sentence, for the card. twin: a run that differs by its L1 coefficient (and by
    when it was looked at), usually the dense one, whose losses the card shows beside; the card also names it and
    says the price, how much higher the run's cross-entropy is, in %. The run's validation text has to be at hand. Raises FileExistsError where `out` exists and ValueError for a run that is not complete or a twin that differs by more.
    """
    run, out = Path(run), Path(out)
    if out.exists():
        raise FileExistsError(f"{out} already exists; choose another folder")
    if twin is not None and Path(twin).resolve() == run.resolve():
        raise ValueError(
            f"--twin {twin} is the run itself; a twin is another run, usually with l1_coefficient=0"
        )
    rows, logs = [], []
    for path in [run] if twin is None else [run, Path(twin)]:
        row, log = results.load_run(path)
        if not row["complete"]:
            raise ValueError(f"{path} is not complete; let it finish, or resume it")
        rows.append(row)
        logs.append(log)
    row = rows[0]
    if twin is not None:
        may_differ = ("l1_coefficient", "log_every", "valid_every", "checkpoint_every")
        same = [
            name
            for name in row
            if name in TrainConfig.__dataclass_fields__ and name not in may_differ
        ]
        differ = [name for name in same if row[name] != rows[1][name]]
        if differ:
            raise ValueError(
                f"{twin} is no twin of {run}: {differ[0]} is {rows[1][differ[0]]!r}, not {row[differ[0]]!r}"
            )
    model, tokenizer = load(run, dtype=torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    _, _, blocks = run_text(run)
    stored = evaluate(model, blocks)["cross_entropy"]
    starts = results.load_provenance(run)["starts"]
    card = _card(out, rows, starts, logs, stored, len(blocks) * row["context"], text)
    out.mkdir(parents=True)
    model.config.training_tokens = row["tokens"]  # the run's own configuration does not go with it
    try:
        save(model, tokenizer, out)
        results.write_atomically(out / "README.md", card)
        if (run / AGGREGATE).is_file():
            shutil.copyfile(run / AGGREGATE, out / AGGREGATE)
        else:
            ids = blocks.tokens[: len(blocks) * row["context"]]
            meta = results.provenance() | {
                "run": row["run"],
                "l1_coefficient": row["l1_coefficient"],
            }
            trace.aggregate(model, tokenizer, trace.cut(ids, model), meta=meta).save(
                out / AGGREGATE
            )
        for path in out.iterdir():
            path.chmod(0o644)  # safetensors lets only the owner read
    except BaseException:
        shutil.rmtree(out)
        raise
    return out


def _card(
    out: Path,
    rows: list[dict],
    starts: list[dict],
    logs: list,
    stored: float,
    valid_tokens: int,
    text: str,
) -> str:
    row = rows[0]
    tables = [analysis.logged_layers(log, row["intermediate_size"]) for log in logs]
    valid = [
        log[(log["split"] == "valid") & (log["metric"] == "cross_entropy")]["value"].iloc[-1]
        for log in logs
    ]
    silenced = [log[log["metric"] == "cross_entropy_silenced"]["value"].iloc[-1] for log in logs]
    lines = {
        "L1 coefficient": [f"{one['l1_coefficient']:g}" for one in rows],
        "cross-entropy, nats a token": [f"{value:.4f}" for value in valid],
        "the same from the stored weights, in bf16": [f"{stored:.4f}", ""][: len(rows)],
        "the same without feed-forward layers": [f"{value:.4f}" for value in silenced],
        "active neurons a layer and token": [f"{table['mean'].mean():.3g}" for table in tables],
        "inactive": [f"{100 - 100 * table['active_fraction'].mean():.2f}%" for table in tables],
    }
    twin = ""
    if len(rows) > 1:
        price = 100 * (valid[0] / valid[1] - 1)
        twin = f"\nThe twin is the run `{rows[1]['run']}` of commit {rows[1]['commit']}; the price is {price:+.2f}% cross-entropy.\n"
    layers = tables[0]
    active = layers["mean"].mean()
    share = 100 * active / row["intermediate_size"]
    return CARD.format(
        name=out.resolve().name,
        millions=row["parameters"] / 1e6,
        active=active,
        share=share,
        inactive=100 - share,
        twin=twin,
        twin_head=" | its twin" * (len(rows) - 1),
        twin_rule="---:|" * (len(rows) - 1),
        rows="\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items()),
        layers="\n".join(
            f"| {one.layer} | {one.mean:.3g} | {one.p99:g} | {one.max:g} | {100 * one.dead:.2g}% |"
            for one in layers.itertuples(index=False)
        ),
        valid_tokens=valid_tokens,
        text=text,
        tokens=row["tokens"] / 1e6,
        layers_number=row["num_layers"],
        heads=row["num_heads"],
        l1=f"{row['l1_coefficient']:g}",
        command=_portable(starts[0]["command"]),
        starts=_resumed(starts),
        **{name: starts[0][name] for name in ("device", "commit")},
        **{name: row[name] for name in ("context", "hidden_size", "intermediate_size")},
        **{name: row[name] for name in ("vocab_size", "batch_tokens", "learning_rate")},
    )


def _portable(command: str) -> str:
    """Return a command whose absolute paths are relative to the working folder, or cut to their last part."""
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=")
        if os.path.isabs(value):
            path = Path(value)
            value = str(
                path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name
            )
        words.append(option + equals + value)
    return shlex.join(words)


def _resumed(starts: list[dict]) -> str:
    """Return the step, device and commit of each resume, as words for the card."""
    parts = [
        f" from step {one['step']} on {one['device']}, commit {one['commit']}" for one in starts[1:]
    ]
    return ", resumed" + " and".join(parts) if parts else ""
