"""A finished run as a folder to give away: weights in bf16, tokenizer, and a model card.

The card is written from the run's own log and configuration, and from an evaluation of the rounded
weights on the run's validation text. Only the description of the text is typed by hand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import torch

from twell import results, tables, trace
from twell.measure.calibration import tune
from twell.models import check_llama, load, save
from twell.train.text import evaluate, run_text

AGGREGATE = "aggregate.npz"  # statistics of each neuron, which `twell inspect` shows
CARD = Path(__file__).with_name("templates") / "model_card.md"


@torch.no_grad()
def export(run: str | Path, out: str | Path, *, text: str) -> Path:
    """Write a run's model to the folder `out`: bf16 weights, tokenizer, config and model card.

    run: its folder; of an older version, its validation text has to be at hand. text: the training
    text in a sentence, for the card. Raises FileExistsError where `out` exists, and ValueError for
    a run that is not complete or a model that is no Llama.
    """
    run, out = Path(run), Path(out)
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} already exists; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)  # before the evaluation, should that be no folder
    row, log = results.load_run(run)
    if not row["complete"]:
        raise ValueError(f"{run} is not complete; let it finish, or resume it")
    model, tokenizer = load(run, dtype=torch.bfloat16)
    check_llama(run, model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    blocks = run_text(run)
    tokens = blocks.tokens[: len(blocks) * row["context"]]
    loss = evaluate(model, blocks)["cross_entropy"]
    card = _card(out, row, log, loss, len(tokens), text)

    out.mkdir()
    if model.ffns[0].act.sparse:
        model.set_ffn_backend("auto")  # dense where there are no kernels
        tune(model, blocks.draw(range(min(len(blocks), 4))).to(model.device))
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


def _card(
    out: Path, row: dict, log: pd.DataFrame, loss: float, valid_tokens: int, text: str
) -> str:
    """Return the model card. `loss` is that of the rounded weights, on `valid_tokens` tokens."""
    start, *resumes = results.load_provenance(row["path"])["starts"]
    resumed = [f"from step {r['step']} on {r['device']}, commit {r['commit']}" for r in resumes]
    last = log[log["split"] == "valid"].groupby("metric")["value"].last()
    by_layer = tables.logged_layers(log, row["intermediate_size"])
    active, share = by_layer["mean"].mean(), 100 * by_layer["active_fraction"].mean()
    rows = [
        ["", "this model"],
        ["L1 coefficient", f"{row['l1_coefficient']:g}"],
        ["cross-entropy, nats a token", f"{last['cross_entropy']:.4f}"],
        ["the same from the stored weights, in bf16", f"{loss:.4f}"],
        ["the same without feed-forward layers", f"{last['cross_entropy_silenced']:.4f}"],
        ["active neurons a layer and token", f"{active:.3g}"],
        ["inactive", f"{100 - share:.2f}%"],
    ]
    layers = [["layer", "active neurons, mean", "99th percentile", "maximum", "never active"]]
    for n in by_layer.itertuples():
        numbers = f"{n.mean:.3g}", f"{n.p99:g}", f"{n.max:g}", f"{100 * n.dead:.2g}%"
        layers.append([n.layer, *numbers])
    steered = log.query("split == 'train' and metric == 'threshold'")["value"]
    threshold = [row.get("threshold") or 0, *steered][-1]
    teacher = row.get("teacher")  # whose licence holds for the weights
    stock = "It needs twell:\n`LlamaForCausalLM` has other layers."
    if row["gated"] and row["activation"] in ("relu", "silu") and not threshold:
        stock = "Without\ntwell, `LlamaForCausalLM` loads these weights and computes densely."
    return CARD.read_text(encoding="utf-8").format(
        row=row,
        start=start,
        license="" if teacher else "license: apache-2.0\n",
        name=out.resolve().name,
        teacher=f" It began as `{Path(teacher).name}`, and learnt from it." if teacher else "",
        stock=stock,
        millions=row["parameters"] / 1e6,
        active=active,
        share=share,
        rows=tables.markdown(rows),
        layers=tables.markdown(layers),
        activation=row["activation"] + (f" above {threshold:.3g}" if threshold else ""),
        tokens=f"{row['tokens'] / 1e6:.4g} M",
        valid_tokens=valid_tokens,
        text=text,
        command=start["command"].replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~"),
        resumes=", resumed " + " and ".join(resumed) if resumed else "",
    )
