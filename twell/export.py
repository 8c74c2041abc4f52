"""A finished run as a folder to give away: weights in bf16, tokenizer, and a model card.

The card is written from the run's own log and configuration, and from an evaluation of the rounded
weights on the run's validation text. Only the description of the text is typed by hand.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pandas as pd
import torch

from twell import analysis, results, trace
from twell.config import TrainConfig
from twell.models import check_llama, load, save
from twell.train.text import run_text
from twell.train.validation import evaluate

AGGREGATE = "aggregate.npz"  # statistics of each neuron, which `twell inspect` shows
# Fields in which a run and its twin may differ.
TWIN_MAY_DIFFER = {"l1_coefficient", "log_every", "valid_every", "checkpoint_every"}
CARD = """---
{license}pipeline_tag: text-generation
tags: [llama, sparse, relu, twell]
---
# {name}

A Llama-like language model with {millions:.1f} M parameters whose feed-forward layers are \
sparse: with {activation}, {active:.3g} of {row[intermediate_size]} \
neurons a layer ({share:.2g}%) are active for a token of held-out text, so {inactive:.1f}% are
not. After "Sparser, Faster, Lighter Transformer Language Models" (arXiv 2603.23198).

| | this model{twin_head} |
|---|---:|{twin_rule}
{rows}
{twin}
| layer | active neurons, mean | 99th percentile | maximum | never active |
|---:|---:|---:|---:|---:|
{layers}

Both tables are of {valid_tokens:,} tokens of held-out text, in sequences of {row[context]}.

## Use

```python
import twell

model, tokenizer = twell.load("{name}")   # from the folder that holds it
inputs = tokenizer("The", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=60, do_sample=True, top_k=40)[0]))
```

`AutoModelForCausalLM.from_pretrained("{name}")` of transformers loads the same model after
`import twell`, or with `trust_remote_code=True`, which runs the file `modeling_twell.py` of this \
folder. {stock}

`twell trace {name} --text "..." --out trace.npz` records which neurons fire.

## Training

Text: {text}{teacher}

`{command}`

on {start[device]}, commit {start[commit]}{resumes}; {row[num_layers]} layers, hidden size \
{row[hidden_size]}, {row[intermediate_size]} neurons a layer, {row[num_heads]} heads,
vocabulary {row[vocab_size]} (byte-level BPE), context {row[context]}; {millions_of_tokens:.4g} M \
tokens in all, {row[batch_tokens]:,} a step, peak learning rate {row[learning_rate]:g}, \
{l1}.

## Limits

A small model for looking at sparse activity, not for answers: what it writes is fluent at best \
and often wrong. {untuned}
"""

# By whether it began as another model: what nobody did.
UNTUNED = {
    False: "It has not been tuned to\nfollow instructions, nor checked for bias; "
    "it repeats what its text holds.",
    True: "It has not been\nchecked for bias; it repeats what its text and that model hold.",
}

# By whether transformers' Llama has such layers: what there is without twell.
STOCK = {
    True: "Without\ntwell, `LlamaForCausalLM` loads these weights and computes densely.",
    False: "It needs twell:\n`LlamaForCausalLM` has other layers.",
}


class _Run:
    """A complete run: its row, its log, and the activity of its layers."""

    def __init__(self, path: Path):
        self.path = path
        self.row, self.log = results.load_run(path)
        if not self.row["complete"]:
            raise ValueError(f"{path} is not complete; let it finish, or resume it")
        self.layers: pd.DataFrame = analysis.logged_layers(self.log, self.row["intermediate_size"])

    def last(self, metric: str) -> float:
        """Return the last value of a metric on the validation text."""
        return self.log.query("split == 'valid' and metric == @metric")["value"].iloc[-1]


@torch.no_grad()
def export(run: str | Path, out: str | Path, *, text: str, twin: str | Path | None = None) -> Path:
    """Write a run's model to the folder `out`: bf16 weights, tokenizer, config and model card.

    Args:
        run: the run's folder; its validation text has to be at hand.
        text: the training text in a sentence, for the card.
        twin: a run that differs by its L1 coefficient (and by when it was evaluated), usually the
            dense one. The card names it, shows its losses, and says the price: how much higher the
            run's cross-entropy is, in %.

    Raises FileExistsError where `out` exists, and ValueError for a run that is not complete, a
    model that is no Llama, or a twin that differs by more.
    """
    run, out = Path(run), Path(out)
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} already exists; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)  # before the evaluation, should that be no folder
    if twin is not None and Path(twin).resolve() == run.resolve():
        raise ValueError(
            f"--twin {twin} is the run itself; a twin is another run, usually with l1_coefficient=0"
        )
    runs = [_Run(Path(path)) for path in (run, twin) if path is not None]
    row = runs[0].row
    for other in runs[1:]:
        fields = TrainConfig.__dataclass_fields__.keys() - TWIN_MAY_DIFFER
        for name in row:
            if name in fields and row[name] != other.row[name]:
                values = f"{name} is {other.row[name]!r}, not {row[name]!r}"
                raise ValueError(f"{twin} is no twin of {run}: {values}")
    model, tokenizer = load(run, dtype=torch.bfloat16)
    check_llama(run, model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    _, _, blocks = run_text(run)
    tokens = blocks.tokens[: len(blocks) * row["context"]]
    loss = evaluate(model, blocks)["cross_entropy"]
    card = _card(out, runs, loss, len(tokens), text)

    out.mkdir()
    if model.ffns[0].act.sparse:
        model.set_ffn_backend("auto")  # dense where there are no kernels
    model.config.training_tokens = row["tokens"]  # the run's own configuration does not go with it
    try:
        save(model, tokenizer, out)
        results.write_atomically(out / "README.md", card)
        if (run / AGGREGATE).is_file():
            shutil.copyfile(run / AGGREGATE, out / AGGREGATE)
        else:
            meta = results.provenance() | {key: row[key] for key in ("run", "l1_coefficient")}
            statistics = trace.aggregate(model, tokenizer, trace.cut(tokens, model), meta=meta)
            statistics.save(out / AGGREGATE)
        for path in out.iterdir():
            path.chmod(0o644)  # safetensors lets only the owner read
    except BaseException:
        shutil.rmtree(out)
        raise
    return out


def _card(out: Path, runs: list[_Run], loss: float, valid_tokens: int, text: str) -> str:
    """Return the model card. `loss` is that of the rounded weights, on `valid_tokens` tokens."""
    run, *twins = runs
    row, active = run.row, run.layers["mean"].mean()
    start, *resumes = results.load_provenance(run.path)["starts"]
    resumes = [
        f" from step {one['step']} on {one['device']}, commit {one['commit']}" for one in resumes
    ]
    price = ""
    for twin in twins:
        percent = 100 * (run.last("cross_entropy") / twin.last("cross_entropy") - 1)
        name = f"The twin is the run `{twin.row['run']}` of commit {twin.row['commit']}"
        price = f"\n{name}; the price is {percent:+.2f}% cross-entropy.\n"
    lines = {
        "L1 coefficient": [f"{one.row['l1_coefficient']:g}" for one in runs],
        "cross-entropy, nats a token": [f"{one.last('cross_entropy'):.4f}" for one in runs],
        "the same from the stored weights, in bf16": [f"{loss:.4f}", *("" for _ in twins)],
        "the same without feed-forward layers": [
            f"{one.last('cross_entropy_silenced'):.4f}" for one in runs
        ],
        "active neurons a layer and token": [f"{one.layers['mean'].mean():.3g}" for one in runs],
        "inactive": [f"{100 - 100 * one.layers['active_fraction'].mean():.2f}%" for one in runs],
    }
    share = 100 * active / row["intermediate_size"]
    teacher = row.get("teacher")  # whose licence holds for the weights
    known = row["activation"] in ("relu", "silu") and not row.get("threshold")
    activation, l1 = _sparsely(run)
    return CARD.format(
        row=row,
        start=start,
        license="" if teacher else "license: apache-2.0\n",
        l1=l1,
        untuned=UNTUNED[bool(teacher)],
        teacher=f" It began as `{Path(teacher).name}`, and learnt from it." if teacher else "",
        name=out.resolve().name,
        stock=STOCK[row["gated"] and known],
        activation=activation,
        millions=row["parameters"] / 1e6,
        millions_of_tokens=row["tokens"] / 1e6,
        active=active,
        share=share,
        inactive=100 - share,
        twin=price,
        twin_head=" | its twin" * len(twins),
        twin_rule="---:|" * len(twins),
        rows="\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items()),
        layers="\n".join(
            f"| {one.layer} | {one.mean:.3g} | {one.p99:g} | {one.max:g} | {100 * one.dead:.2g}% |"
            for one in run.layers.itertuples(index=False)
        ),
        valid_tokens=valid_tokens,
        text=text,
        command=_portable(start["command"]),
        resumes=", resumed" + " and".join(resumes) if resumes else "",
    )


def _sparsely(run: _Run) -> tuple[str, str]:
    """What makes the activations of a model sparse, and what the L1 term was."""
    row, staged = run.row, " at first (its log has the rest)" if run.row.get("teacher") else ""
    activation = {"relu": "ReLU"}.get(row["activation"], f"the activation {row['activation']}")
    if threshold := row.get("threshold"):
        steered = run.log.query("split == 'train' and metric == 'threshold'")["value"]
        activation += f" above a threshold of {[threshold, *steered][-1]:.3g}"
    if not row["l1_coefficient"]:
        return activation, "no L1 term"
    l1 = f"L1 coefficient\n{row['l1_coefficient']:g}{staged} on the mean over tokens and layers of "
    return f"{activation} and an L1 term on\nthe activations", l1 + "the sum over neurons of |h|"


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
