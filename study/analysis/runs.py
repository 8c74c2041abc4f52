"""Tables of runs: outcomes, an L1 sweep by level, curves over training, and where activity is.

A run is a row of the configurations and many rows of the log, both from `results.load_runs`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from twell.tables import last_validation, level_name, logged_layers
from twell.trace import Aggregate, Trace

# A layer is dead if fewer than 1 token in 100 activates even one neuron.
MIN_LAYER_ACTIVE = 0.01
# Where silencing all feed-forward layers costs fewer nats, the model does without them, and its
# sparsity says nothing about sparse layers.
MIN_FFN_GAIN = 0.05
STATUSES = ["alive", "unused", "dead layer"]  # of a run, from good to bad
MAX_PRICE = 2.0  # the rise of cross-entropy over L1 = 0, in %, that the paper accepts (section 4.2)
# What the recipe leaves out. A configuration without one of these fields is older than the choice.
RECIPE = {"activation": "relu", "gated": True, "reinit": 0.0, "l1_zero_steps": 0}
RECIPE |= {"l1_warmup_steps": 0, "balance_every": 0}
# Runs of one sweep may differ in level and seed, and in how and when they were computed.
COMPUTED_BY = "backend micro_batch checkpoint_activations compile".split()
MAY_DIFFER = "run path complete parameters device versions commit command".split()
MAY_DIFFER += ["l1_coefficient", "seed", *COMPUTED_BY]
MAY_DIFFER += ["log_every", "valid_every", "checkpoint_every"]


def fits(names: pd.Series, patterns: str) -> pd.Series:
    """Return whether each name fits one of the file patterns, which spaces separate."""
    return names.map(lambda name: any(map(Path(name).match, patterns.split()))).astype(bool)


def choice(runs: pd.DataFrame) -> pd.Series:
    """Return how the configuration of each run departs from the recipe.

    "recipe", or one or more of "SiLU", "non-gated", "re-initialisation", "L1 warm-up" and
    "balanced columns", joined by " + ".
    """
    config = runs.reindex(columns=list(RECIPE)).astype(object).fillna(RECIPE)
    departs = pd.DataFrame(
        {
            "SiLU": config["activation"] == "silu",
            "non-gated": ~config["gated"].astype(bool),
            "re-initialisation": config["reinit"] > 0,
            "L1 warm-up": config["l1_zero_steps"] + config["l1_warmup_steps"] > 0,
            "balanced columns": config["balance_every"] > 0,
        }
    )
    names = [" + ".join(departs.columns[row]) or "recipe" for row in departs.to_numpy()]
    return pd.Series(names, runs.index, dtype=object)


def described(runs: pd.DataFrame) -> str:
    """Return the model that runs share, in words, without the fields in which they differ."""
    words = {
        "parameters": lambda n: f"{n / 1e6:,.3g} M parameters",
        "num_layers": lambda n: f"{n:.0f} layers",
        "intermediate_size": lambda n: f"{n:,.0f} neurons a layer",
        "tokens": lambda n: f"{n / 1e6:,.3g} M training tokens",
        "l1_coefficient": lambda l1: f"L1 = {level_name(l1)}",
    }
    alike = [name for name in words if name in runs and runs[name].nunique(dropna=False) == 1]
    values = {name: runs[name].iloc[0] for name in alike}
    return ", ".join(words[name](value) for name, value in values.items() if pd.notna(value))


def traced_model(trace: Trace | Aggregate, other: Trace | Aggregate | None = None) -> str:
    """Return the model of a trace in words: its run, layers and L1.

    A run or level that the trace lacks is taken from `other`, if its layers are as many and as
    wide.
    """
    shapes = [(one.num_layers, one.intermediate_size) for one in (trace, other or trace)]
    meta = (other.meta if other is not None and shapes[0] == shapes[1] else {}) | trace.meta
    layers = f"{trace.num_layers} layers of {trace.intermediate_size:,} neurons"
    l1 = meta.get("l1_coefficient")
    parts = [meta.get("run"), layers, None if l1 is None else f"L1 = {level_name(l1)}"]
    return ", ".join(part for part in parts if part)


def check_alike(runs: pd.DataFrame, may_differ: Iterable[str], rule: str) -> None:
    """Raise ValueError naming the first field outside of `may_differ` in which runs differ."""
    for field in runs.columns.drop(list(may_differ), errors="ignore"):
        first = runs[field].dropna().drop_duplicates()  # a configuration without it is like any
        if len(first) > 1:
            values = zip(first, runs.loc[first.index, "run"], strict=True)
            named = ", ".join(f"{value} ({run})" for value, run in values)
            raise ValueError(f"{rule}; these differ in {field}: {named}")


def sweep(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the outcome of each complete run of an L1 sweep, by rising level (Fig. 3).

    Of the last validation, activity as the mean over layers; ffn_gain is the cost of silencing all
    feed-forward layers (nats), cross_entropy_change is in % of the mean at L1 = 0.
    dead_fraction_train is of the last full window of training, status one of STATUSES. Raises
    ValueError when no run is complete, or when they differ in more than level and seed.
    """
    complete = runs[runs["complete"]]
    if complete.empty:
        raise ValueError(f"none of the {len(runs)} runs is complete: {', '.join(runs['run'])}")
    chosen = choice(complete)
    rule = "a sweep compares runs of one model, choice and token budget, by level and seed"
    check_alike(complete.assign(choice=chosen), MAY_DIFFER, rule)

    table = complete[["run", "l1_coefficient", "tokens", "seed"]].set_index("run")
    by_metric = last_validation(log).groupby(["run", "metric"])["value"]
    means, least, most = (
        by_metric.agg(name).unstack().reindex(table.index) for name in ("mean", "min", "max")
    )

    table["cross_entropy"] = means["cross_entropy"]
    table["ffn_gain"] = means["cross_entropy_silenced"] - table["cross_entropy"]
    table["active"] = means["active_mean"]
    table["active_fraction"] = table["active"] / complete["intermediate_size"].iloc[0]
    table["cross_entropy_change"] = cross_entropy_change(table)
    table["dead_fraction"] = means["dead_fraction"]
    windows = training_curves(complete, log, "dead_fraction")
    table["dead_fraction_train"] = windows.groupby("run")["value"].last()

    used = table["ffn_gain"] >= MIN_FFN_GAIN  # NaN shows no gain
    dead = (most["dead_fraction"] >= 1) | (least["active_mean"] < MIN_LAYER_ACTIVE)
    table["status"] = np.select([dead, used], ["dead layer", "alive"], "unused")
    table["choice"] = chosen.iloc[0]
    return table.reset_index().sort_values(["l1_coefficient", "run"], ignore_index=True)


def cross_entropy_change(table: pd.DataFrame) -> pd.Series:
    """Return the cross-entropy of runs in % over the recipe's mean at L1 = 0.

    A table without the column choice is of one choice: it is compared with itself.
    """
    dense = table["l1_coefficient"] == 0
    if "choice" in table:
        dense &= table["choice"] == "recipe"
    return 100 * (table["cross_entropy"] / table.loc[dense, "cross_entropy"].mean() - 1)


def levels(table: pd.DataFrame) -> pd.DataFrame:
    """Return means over seeds of `sweep` (or `choices`), a row a choice and level of L1.

    `run` and `tokens` are of the first run, `status` is the worst; runs: their number.
    """
    table = table.assign(status=pd.Categorical(table["status"], STATUSES, ordered=True))
    groups = table.groupby(["choice", "l1_coefficient"], sort=False)
    means, first = groups.mean(numeric_only=True), groups[["run", "tokens"]].first()
    worst = groups["status"].max().astype(str)
    table = means.drop(columns="seed").assign(runs=groups.size(), status=worst, **first)
    return table.reset_index()


HEADS = {  # of columns that readers see; of shares (in %) that are recorded as fractions
    "l1_coefficient": "L1",
    "l1": "L1",
    "name": "student",
    "accuracy": "accuracy (%)",
    "dead": "dead (%)",
    "paper_l1": "paper: L1",
    "paper_cross_entropy": "paper: cross-entropy (nats)",
    "paper_active": "paper: active",
    "active_fraction": "active (%)",
    "cross_entropy": "cross-entropy (nats)",
    "cross_entropy_change": "change of cross-entropy (%)",
    "dead_fraction": "dead (%)",
    "dead_fraction_train": "dead (%)",
    "kl": "divergence (nats)",
    "rise": "rise (nats)",
    "max_over_mean": "busiest / mean",
    "p99": "99th percentile",
    "low": "95%: from",
    "high": "95%: to",
    "price": "price (%)",
    "line_price": "recipe's price (%)",
    "line_dead": "recipe's dead (%)",
    "other": "recipe",
    "limit": "noise",
    "stderr": "standard error",
    "apart": "apart (nats)",
    "tokens_per_second": "tokens/s",
    "tokens_per_ms": "tokens/ms",
    "energy_change": "energy (%)",
    "peak_memory": "memory (GB)",
    "peak_memory_whole": "whole training (GB)",
    "last": "last loss (nats)",
    "train_last": "on training text (nats)",
    "faster_at": "gains at (%)",
    "slower_at": "loses at (%)",
    "hidden_size": "width",
    "intermediate_size": "neurons",
    "loss_change": "rise of loss (nats)",
}
_SHARES = "active_fraction dead_fraction dead_fraction_train faster_at slower_at".split()


def _readable_cell(value: Any, decimals: int | None) -> str:
    """Return a cell with three digits, at most three decimals, or with `decimals`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float) or np.isnan(value):
        return value if isinstance(value, str) else "–"
    value = round(value, 9)
    size = np.log10(abs(value)) if value else 9
    decimals = int(np.clip(2 - np.floor(size), 0, 3)) if decimals is None else decimals
    return f"{round(value, decimals) + 0:,.{decimals}f}".replace("-", "−")  # no -0


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table to be read: heads in words, shares in %, and rounded numbers.

    Columns with "l1" in their name are levels. Columns without any number are left out, and "–"
    stands for an unknown one.
    """
    cells = {}
    for name, column in table.dropna(axis=1, how="all").items():
        head = HEADS.get(name, str(name).replace("_", " "))
        if "l1" in str(name):
            column = column.map(level_name, "ignore")
        column = 100 * column if name in _SHARES else column
        whole = column.dtype.kind == "f" and (column.dropna() % 1 == 0).all()
        decimals = 3 if "nats" in head else 0 if whole else None
        cells[head] = [_readable_cell(value, decimals) for value in column.tolist()]
    return pd.DataFrame(cells, index=table.index)


def training_curves(runs: pd.DataFrame, log: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return one metric over training, the mean over layers (Figs 2, 8, 9).

    Columns: run, choice, l1_coefficient, step, tokens, value. Empty before the metric is first
    logged: dead_fraction needs a full window.
    """
    rows = log[(log["metric"] == metric) & (log["split"] == "train")]
    curves = rows.groupby(["run", "step", "tokens"], as_index=False)["value"].mean()
    curves = curves.merge(runs[["run", "l1_coefficient"]].assign(choice=choice(runs)), on="run")
    curves = curves.sort_values(["l1_coefficient", "run", "step"], ignore_index=True)
    return curves[["run", "choice", "l1_coefficient", "step", "tokens", "value"]]


def settles_after(curve: pd.DataFrame) -> float:
    """Return the share of training after which a run's curve stays within 20% of its last value."""
    curve = curve.sort_values("tokens")
    value, tokens = curve["value"].to_numpy(), curve["tokens"].to_numpy()
    far = np.flatnonzero(np.abs(value - value[-1]) > 0.2 * abs(value[-1]))
    return float(tokens[far[-1] + 1 if len(far) else 0] / tokens[-1])


PEAK_WITHIN = 0.25  # largest distance from the paper's peak, as a share of the depth
FINDINGS = {  # column of `findings` -> what the paper says of its models
    "first_two_least": "the first two layers are the least active",
    "ten_times": "the busiest token of most layers has ten times the mean",
    "early_peak": "activity peaks near a fifth of the depth",
    "no_overflow": "no tile overflows at compression 8",
    "first_is_most": "the first token is the most active",
}


def findings(
    runs: pd.DataFrame, log: pd.DataFrame, kept: pd.DataFrame, peak_depth: float
) -> pd.DataFrame:
    """Return a row a complete ReLU run without a teacher: which of FINDINGS hold in it.

    kept: `kept_activity` of traced models, with a column run. no_overflow and first_is_most are
    None in other models, first_two_least in models of up to three layers. peak_depth: the paper's,
    from 0 (first layer) to 1 (last). setting: the run's name without its seed.
    """
    rows = []
    by_run = dict(tuple(log.groupby("run")))
    traced = dict(tuple(kept.groupby("run"))) if len(kept) else {}
    for run in runs.to_dict("records"):
        if not run["complete"] or run["activation"] != "relu" or pd.notna(run.get("teacher")):
            continue
        table = logged_layers(by_run[run["run"]], run["intermediate_size"]).set_index("layer")
        least, peak = set(table["mean"].nsmallest(2).index), int(table["mean"].idxmax())
        depth = peak / max(len(table) - 1, 1)
        row = {"run": run["run"], "setting": run["run"].partition("-seed-")[0]}
        row["first_two_least"] = least == {0, 1} if len(table) > 3 else None
        row["ten_times"] = bool((table["max_over_mean"] > 10).mean() > 0.5)
        row["early_peak"] = peak > 0 and abs(depth - peak_depth) < PEAK_WITHIN
        row |= {"no_overflow": None, "first_is_most": None}
        if run["run"] in traced:
            some = traced[run["run"]]
            whole = some[some["layer"] == -1].set_index("metric")["value"]
            overflow = some.loc[some["metric"] == "overflow", "value"].max()
            row["no_overflow"] = bool(overflow == 0)
            row["first_is_most"] = bool(whole["most"] == 0 and whole["first"] > whole["later"])
        rows.append(row)
    return pd.DataFrame(rows)


def groups(table: pd.DataFrame, setting: str, at_level: str) -> dict[str, pd.DataFrame]:
    """Return the rows of `findings` of three groups of runs, each within the next.

    seeds: of one setting; level: the runs whose names fit the patterns `at_level`; all.
    """
    level = table[fits(table["run"], at_level)]
    return {"seeds": table[table["setting"] == setting], "level": level, "all": table}


def shared(table: pd.DataFrame) -> pd.DataFrame:
    """Return in how many models of `findings` each finding holds, and how many are known."""
    known = {name: table[name].dropna().astype(bool) for name in FINDINGS}
    rows = [(name, int(holds.sum()), len(holds)) for name, holds in known.items()]
    return pd.DataFrame(rows, columns=["finding", "holds", "models"])
