"""Tables that commands print: recorded runs, the activity of a run's layers, and evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

NEAR_CHANCE = 2.0  # standard errors
SIZE = ["parameters", "training_tokens"]  # models are compared with each other within one of these
EVALUATED = ["model", *SIZE, "l1_coefficient"]  # tells models apart
COMPUTED = ["backend", "dtype"]  # tells apart how a model was computed


def level_name(l1: float) -> str:
    """Return an L1 coefficient as one writes it: 0.3, 3e-3, 1.5e-4."""
    if l1 == 0 or l1 >= 0.1:
        return f"{l1:g}"
    mantissa, exponent = f"{l1:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def markdown(rows: Sequence[Sequence], left: Sequence[int] = (0,)) -> str:
    """Return rows as a Markdown table. The first one is its head; `left` columns align left."""
    head, *rest = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    rule = ["---" if column in left else "---:" for column in range(len(rows[0]))]
    return "\n".join([head, f"|{'|'.join(rule)}|", *rest])


def last_validation(log: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each run's last validation so far."""
    valid = log[log["split"] == "valid"]
    return valid[valid["step"] == valid.groupby("run")["step"].transform("max")]


def processes(runs: pd.DataFrame) -> pd.Series:
    """Return on how many devices each run was trained, by Accelerate's launcher in its command."""
    launched = runs["command"].astype(str).str.extract(r"--num_processes[ =](\d+)")[0]
    return launched.fillna("1").astype(int)


def list_runs(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return a line on each run, of any kind, by name.

    Columns: run, parameters, tokens, l1_coefficient, seed; of the last validation so far:
    cross_entropy (nats), active (mean over layers), dead_fraction and active_fraction;
    tokens_per_second (median over training); device, such as "4 x NVIDIA H200", and complete.
    """
    fields = ["parameters", "tokens", "l1_coefficient", "seed", "intermediate_size"]
    table = runs.set_index("run").reindex(columns=fields)
    means = last_validation(log).groupby(["run", "metric"])["value"].mean().unstack()
    means = means.reindex(columns=["cross_entropy", "active_mean", "dead_fraction"])
    table = table.join(means.rename(columns={"active_mean": "active"}))
    table["active_fraction"] = table["active"] / table.pop("intermediate_size")
    speed = log[(log["split"] == "train") & (log["metric"] == "tokens_per_second")]
    table["tokens_per_second"] = speed.groupby("run")["value"].median()
    count, device = processes(runs), runs["device"]
    devices = device.where(count == 1, count.astype(str) + " x " + device)
    ended = runs.assign(device=devices).set_index("run")[["device", "complete"]]
    return table.join(ended).sort_index().reset_index()


def logged_layers(log: pd.DataFrame, intermediate_size: int) -> pd.DataFrame:
    """Return the layers at a run's last validation (Figs 6, 10, 11), as `per_layer` of a trace.

    log: of one run. Columns: layer, mean, p99, max, dead, active_fraction, max_over_mean. Raises
    ValueError for a log without a validation.
    """
    rows = log[(log["split"] == "valid") & log["layer"].notna()]
    if rows.empty:
        raise ValueError("the log has no validation; let the run finish")
    last = rows[rows["step"] == rows["step"].max()].astype({"layer": int})
    names = {"active_mean": "mean", "active_p99": "p99", "active_max": "max"}
    names |= {"dead_fraction": "dead"}
    table = last.pivot(index="layer", columns="metric", values="value")[list(names)]
    table = table.rename(columns=names).rename_axis(columns=None).reset_index()
    fraction, ratio = table["mean"] / intermediate_size, table["max"] / table["mean"]
    return table.assign(active_fraction=fraction, max_over_mean=ratio)


def evaluations(records: Iterable[dict]) -> pd.DataFrame:
    """Return the accuracies of `results.load_evaluations`, a row an accuracy, in their order.

    Columns: model, parameters, training_tokens (where a record has none, of another record with the
    same weights, else NaN), l1_coefficient, backend, dtype, task, metric, items, accuracy and
    stderr (of lm-eval, shares of 1; stderr is NaN for a single item), chance, and verdict: "above
    chance", "below chance", or "near chance" within NEAR_CHANCE, empty where error or chance are
    unknown. Metrics: acc; acc_norm, with log-likelihoods by the characters of a choice;
    acc_mutual_info, less the choice's own log-likelihood.
    """
    records = list(records)
    tokens_of = {
        weights: record["model"]["training_tokens"]
        for record in records
        if (weights := _weights(record)) and record["model"]["training_tokens"]
    }
    rows = []
    for record in records:
        model = record["model"]
        tokens = model["training_tokens"] or tokens_of.get(_weights(record), np.nan)
        of_model = model["name"], model["parameters"], tokens, float(model["l1_coefficient"])
        for task, facts in record["tasks"].items():
            scores = record["lm_eval"]["results"][task]
            for key, accuracy in scores.items():
                metric, _, kind = key.partition(",")
                if metric.startswith("acc") and not metric.endswith("_stderr"):
                    computed = record["backend"], record["dtype"], task, metric
                    numbers = accuracy, scores[f"{metric}_stderr,{kind}"], facts["chance"]
                    rows.append((*of_model, *computed, scores["sample_len"], *numbers))
    numbers = ["items", "accuracy", "stderr", "chance"]
    table = pd.DataFrame(rows, columns=[*EVALUATED, *COMPUTED, "task", "metric", *numbers])
    for name in ("stderr", "chance"):  # lm-eval's "N/A" and None become NaN
        table[name] = pd.to_numeric(table[name], errors="coerce")
    return table.assign(verdict=verdicts(table))


def _weights(record: dict) -> tuple[str, ...]:
    """The SHA-256 of the record's files of weights; empty for a record without them."""
    return tuple(sorted(record["model"].get("sha256", {}).values()))


def verdicts(table: pd.DataFrame) -> pd.Series:
    """Of accuracies against chance, as `evaluations` says."""
    accuracy, stderr, chance = table[["accuracy", "stderr", "chance"]].astype(float).to_numpy().T
    # An error of 0 is of a few items, all right or all wrong, which say nothing.
    unknown = np.isnan(stderr + chance) | (stderr == 0)
    near = np.abs(accuracy - chance) <= NEAR_CHANCE * stderr
    names = ["", "near chance", "above chance"]
    verdicts = np.select([unknown, near, accuracy > chance], names, "below chance")
    return pd.Series(verdicts, table.index, dtype=table["task"].dtype)
