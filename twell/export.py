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

from twell import results, tables, trace
from twell.config import TrainConfig
from twell.models import check_llama, load, save
from twell.train.text import evaluate, run_text

AGGREGATE = "aggregate.npz"  # statistics of each neuron, which `twell inspect` shows
# Fields in which a run and its twin may differ.
TWIN_MAY_DIFFER = {"l1_coefficient", "log_every", "valid_every", "checkpoint_every"}
CARD = """---
{license}pipeline_tag: text-generation
tags: [llama, sparse, relu, twell]
---
# {name}

A Llama-like language model with {millions:.1f} M parameters and sparse feed-forward layers: \
{active:.3g} of {row[intermediate_size]} neurons a layer ({share:.2g}%) are active for a token of \
held-out text. After "Sparser, Faster, Lighter Transformer Language Models" (arXiv 2603.23198).

{rows}
{twin}
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

on {start[device]}, commit {start[commit]}{resumes}

{facts}

The L1 term is the mean over tokens and layers of the sum over neurons of |h|.

## Limits

A small model for looking at sparse activity, not for answers. What it writes is often wrong, and \
it repeats what its text holds. Nobody has checked it for bias.
"""

# By whether transformers' Llama has such layers
STOCK = {
    True: "Without\ntwell, `LlamaForCausalLM` loads these weights and computes densely.",
    False: "It needs twell:\n`LlamaForCausalLM` has other layers.",
}


class _Run:
    """A complete run: its row, its log, and the activity of its layers."""

    def __init__(self, path: Path):
        self.row, self.log = results.load_run(path)
        if not self.row["complete"]:
            raise ValueError(f"{path} is not complete; let it finish, or resume it")
        self.layers: pd.DataFrame = tables.logged_layers(self.log, self.row["intermediate_size"])
        self.active = self.layers["mean"].mean()
        self.inactive = 100 - 100 * self.layers["active_fraction"].mean()  # percent

    def last(self, metric: str) -> float:
        """Return the last value of a metric on the validation text."""
        return self.log.query("split == 'valid' and metric == @metric")["value"].iloc[-1]


@torch.no_grad()
def export(run: str | Path, out: str | Path, *, text: str, twin: str | Path | None = None) -> Path:
    """Write a run's model to the folder `out`: bf16 weights, tokenizer, config and model card.

    Args:
        run: the run's folder; of an older version, its validation text has to be at hand.
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
        raise ValueError(f"--twin {twin} is the run itself; give a run with another L1 coefficient")
    runs = [_Run(Path(path)) for path in (run, twin) if path is not None]
    row, other = runs[0].row, runs[-1].row
    for name in TrainConfig.__dataclass_fields__:
        if name not in TWIN_MAY_DIFFER and row.get(name) != other.get(name):
            values = f"{name} is {other.get(name)!r}, not {row.get(name)!r}"
            raise ValueError(f"{twin} is no twin of {run}: {values}")
    model, tokenizer = load(run, dtype=torch.bfloat16)
    check_llama(run, model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    blocks = run_text(run)
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
    row, name = run.row, out.resolve().name
    start, *resumes = results.load_provenance(row["path"])["starts"]
    resumed = [f"from step {r['step']} on {r['device']}, commit {r['commit']}" for r in resumes]
    price = ""
    for twin in twins:
        percent = 100 * (run.last("cross_entropy") / twin.last("cross_entropy") - 1)
        named = f"The twin is the run `{twin.row['run']}` of commit {twin.row['commit']}"
        price = f"\n{named}; the price is {percent:+.2f}% cross-entropy.\n"

    silenced = "cross_entropy_silenced"
    rows = [
        ["", "this model", *("its twin" for _ in twins)],
        ["L1 coefficient", *(f"{one.row['l1_coefficient']:g}" for one in runs)],
        ["cross-entropy, nats a token", *(f"{one.last('cross_entropy'):.4f}" for one in runs)],
        ["the same from the stored weights, in bf16", f"{loss:.4f}", *("" for _ in twins)],
        ["the same without feed-forward layers", *(f"{one.last(silenced):.4f}" for one in runs)],
        ["active neurons a layer and token", *(f"{one.active:.3g}" for one in runs)],
        ["inactive", *(f"{one.inactive:.2f}%" for one in runs)],
    ]
    layers = [["layer", "active neurons, mean", "99th percentile", "maximum", "never active"]]
    for n in run.layers.itertuples():
        numbers = f"{n.mean:.3g}", f"{n.p99:g}", f"{n.max:g}", f"{100 * n.dead:.2g}%"
        layers.append([n.layer, *numbers])
    steered = run.log.query("split == 'train' and metric == 'threshold'")["value"]
    threshold = [row.get("threshold") or 0, *steered][-1]
    facts = [
        ["setting", "value"],
        ["layers, hidden size", f"{row['num_layers']}, {row['hidden_size']}"],
        ["neurons a layer, heads", f"{row['intermediate_size']}, {row['num_heads']}"],
        ["activation", row["activation"] + (f" above {threshold:.3g}" if threshold else "")],
        ["vocabulary, context", f"{row['vocab_size']}, {row['context']}"],
        ["tokens", f"{row['tokens'] / 1e6:.4g} M, {row['batch_tokens']:,} a step"],
        ["peak learning rate", f"{row['learning_rate']:g}"],
    ]
    teacher = row.get("teacher")  # whose licence holds for the weights
    is_stock = bool(row["gated"] and row["activation"] in ("relu", "silu") and not threshold)
    return CARD.format(
        row=row,
        start=start,
        license="" if teacher else "license: apache-2.0\n",
        name=name,
        teacher=f" It began as `{Path(teacher).name}`, and learnt from it." if teacher else "",
        stock=STOCK[is_stock],
        millions=row["parameters"] / 1e6,
        active=run.active,
        share=100 - run.inactive,
        twin=price,
        rows=tables.markdown(rows),
        layers=tables.markdown(layers),
        facts=tables.markdown(facts),
        valid_tokens=valid_tokens,
        text=text,
        command=_portable(start["command"]),
        resumes=", resumed " + " and ".join(resumed) if resumed else "",
    )


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
