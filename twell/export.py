"""A finished run as a folder to give away: weights in bf16, tokenizer, and a model card.

The card is written from the run's own log and configuration, and from an evaluation of the rounded
weights on the run's validation text. Only the description of the text is typed by hand.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from twell import analysis, results, trace
from twell.config import TrainConfig
from twell.corpus import Blocks
from twell.models import load, save
from twell.train.text import run_text
from twell.train.validation import evaluate

AGGREGATE = "aggregate.npz"  # statistics of each neuron, which `twell inspect` shows
# Fields in which a run and its twin may differ.
TWIN_MAY_DIFFER = {"l1_coefficient", "log_every", "valid_every", "checkpoint_every"}
CARD = """---
license: apache-2.0
pipeline_tag: text-generation
tags: [llama, sparse, relu, twell]
---
# {name}

A Llama-like language model with {millions:.1f} M parameters whose feed-forward layers are \
sparse: with ReLU and an L1 term on
the activations, {active:.3g} of {intermediate_size} neurons a layer ({share:.2g}%) are active \
for a token of held-out text, so {inactive:.1f}% are
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

`twell trace {name} --text "..." --out trace.npz` records which neurons fire; without twell, \
transformers' `LlamaForCausalLM` with
`hidden_act="relu"` loads the weights (gated layers).

## Training

Text: {text}

`{command}`

on {device}, commit {commit}{starts}; {layers_number} layers, hidden size {hidden_size}, \
{intermediate_size} neurons a layer, {heads} heads,
vocabulary {vocab_size} (byte-level BPE), context {context}; {tokens:.4g} M tokens in all, \
{batch_tokens:,} a step, peak learning rate {learning_rate:g}, L1 coefficient
{l1} on the mean over tokens and layers of the sum over neurons of |h|.

## Limits

A small model for looking at sparse activity, not for answers: what it writes is fluent at best \
and often wrong. It has not been tuned to
follow instructions, nor checked for bias; it repeats what its text holds.
"""


@dataclass
class _Run:
    """A complete run: its row, its log, and the tables of the card that come from them."""

    row: dict
    log: pd.DataFrame

    @classmethod
    def load(cls, path: Path) -> _Run:
        row, log = results.load_run(path)
        if not row["complete"]:
            raise ValueError(f"{path} is not complete; let it finish, or resume it")
        return cls(row, log)

    def last(self, metric: str) -> float:
        """Return the last value of a metric on the validation text."""
        log = self.log
        return log[(log["split"] == "valid") & (log["metric"] == metric)]["value"].iloc[-1]

    def layers(self) -> pd.DataFrame:
        return analysis.logged_layers(self.log, self.row["intermediate_size"])


@torch.no_grad()
def export(run: str | Path, out: str | Path, *, text: str, twin: str | Path | None = None) -> Path:
    """Write a run's model to the folder `out`: bf16 weights, tokenizer, config and model card.

    Args:
        run: the run's folder; its validation text has to be at hand.
        text: the training text in a sentence, for the card.
        twin: a run that differs by its L1 coefficient (and by when it was evaluated), usually the
            dense one. The card names it, shows its losses, and says the price: how much higher the
            run's cross-entropy is, in %.

    Raises FileExistsError where `out` exists, and ValueError for a run that is not complete or a
    twin that differs by more.
    """
    run, out = Path(run), Path(out)
    if out.exists():
        raise FileExistsError(f"{out} already exists; choose another folder")
    if twin is not None and Path(twin).resolve() == run.resolve():
        raise ValueError(
            f"--twin {twin} is the run itself; a twin is another run, usually with l1_coefficient=0"
        )
    runs = [_Run.load(path) for path in ([run] if twin is None else [run, Path(twin)])]
    row = runs[0].row
    if twin is not None:
        _check_twin(run, row, twin, runs[1].row)
    model, tokenizer = load(run, dtype=torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    _, _, blocks = run_text(run)
    loss = evaluate(model, blocks)["cross_entropy"]
    starts = results.load_provenance(run)["starts"]
    card = _card(out, runs, starts, loss, len(blocks) * row["context"], text)

    out.mkdir(parents=True)
    model.config.training_tokens = row["tokens"]  # the run's own configuration does not go with it
    try:
        save(model, tokenizer, out)
        results.write_atomically(out / "README.md", card)
        if (run / AGGREGATE).is_file():
            shutil.copyfile(run / AGGREGATE, out / AGGREGATE)
        else:
            _aggregate(model, tokenizer, blocks, row).save(out / AGGREGATE)
        for path in out.iterdir():
            path.chmod(0o644)  # safetensors lets only the owner read
    except BaseException:
        shutil.rmtree(out)
        raise
    return out


def _check_twin(run: Path, row: dict, twin: str | Path, other: dict) -> None:
    fields = TrainConfig.__dataclass_fields__.keys() - TWIN_MAY_DIFFER
    differ = [name for name in row if name in fields and row[name] != other[name]]
    if differ:
        name = differ[0]
        raise ValueError(
            f"{twin} is no twin of {run}: {name} is {other[name]!r}, not {row[name]!r}"
        )


def _aggregate(model, tokenizer, blocks: Blocks, row: dict) -> trace.Aggregate:
    """Return the statistics of each neuron on the run's validation text."""
    tokens = blocks.tokens[: len(blocks) * row["context"]]
    fields = {name: row[name] for name in ("run", "l1_coefficient")}
    meta = results.provenance() | fields
    return trace.aggregate(model, tokenizer, trace.cut(tokens, model), meta=meta)


def _card(
    out: Path, runs: list[_Run], starts: list[dict], loss: float, valid_tokens: int, text: str
) -> str:
    """Return the model card. `loss` is that of the rounded weights, on `valid_tokens` tokens."""
    row, layers = runs[0].row, runs[0].layers()
    active = layers["mean"].mean()
    share = 100 * active / row["intermediate_size"]
    twins = len(runs) - 1
    names = "context hidden_size intermediate_size vocab_size batch_tokens learning_rate".split()
    return CARD.format(
        name=out.resolve().name,
        millions=row["parameters"] / 1e6,
        active=active,
        share=share,
        inactive=100 - share,
        twin=_price(*runs) if twins else "",
        twin_head=" | its twin" * twins,
        twin_rule="---:|" * twins,
        rows=_table(runs, loss),
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
        **{name: row[name] for name in names},
    )


def _table(runs: list[_Run], loss: float) -> str:
    """Return the card's table of losses and activity, a column a run."""
    tables = [run.layers() for run in runs]
    lines = {
        "L1 coefficient": [f"{run.row['l1_coefficient']:g}" for run in runs],
        "cross-entropy, nats a token": [f"{run.last('cross_entropy'):.4f}" for run in runs],
        "the same from the stored weights, in bf16": [f"{loss:.4f}", ""][: len(runs)],
        "the same without feed-forward layers": [
            f"{run.last('cross_entropy_silenced'):.4f}" for run in runs
        ],
        "active neurons a layer and token": [f"{table['mean'].mean():.3g}" for table in tables],
        "inactive": [f"{100 - 100 * table['active_fraction'].mean():.2f}%" for table in tables],
    }
    return "\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items())


def _price(run: _Run, twin: _Run) -> str:
    price = 100 * (run.last("cross_entropy") / twin.last("cross_entropy") - 1)
    row = twin.row
    name = f"The twin is the run `{row['run']}` of commit {row['commit']}"
    return f"\n{name}; the price is {price:+.2f}% cross-entropy.\n"


def _portable(command: str) -> str:
    """Return a command without absolute paths.

    A path in the working folder becomes relative to it; of another one the last part stays.
    """
    words = []
    for word in shlex.split(command):
        option, equals, value = word.rpartition("=")
        if os.path.isabs(value):
            path = Path(value)
            inside = path.is_relative_to(Path.cwd())
            value = str(path.relative_to(Path.cwd())) if inside else path.name
        words.append(option + equals + value)
    return shlex.join(words)


def _resumed(starts: list[dict]) -> str:
    """Return the step, device and commit of each resume, as words for the card."""
    parts = [
        f" from step {one['step']} on {one['device']}, commit {one['commit']}" for one in starts[1:]
    ]
    return ", resumed" + " and".join(parts) if parts else ""
