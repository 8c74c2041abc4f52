"""Tables of runs: their outcomes, an L1 sweep by level, curves over training, prices of activity.

A run is a row of the configurations and many rows of the log, both from `results.load_runs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from twell.tables import last_validation, level_name

if TYPE_CHECKING:
    import twell

# Below 1 token in 100 that activates even one neuron, a layer passes nothing on: it is dead.
MIN_LAYER_ACTIVE = 0.01
# Silencing all feed-forward layers of a working model costs far more than this many nats. Where it
# costs less, the model does without them, and its sparsity says nothing about sparse layers.
MIN_FFN_GAIN = 0.05
STATUSES = ["alive", "unused", "dead layer"]  # of a run, from good to bad
# The rise of cross-entropy over L1 = 0, in %, that the paper accepts up to 3e-5 (section 4.2).
MAX_PRICE = 2.0
# What the recipe leaves out. A configuration without one of these fields is older than the choice.
RECIPE = {"activation": "relu", "gated": True, "reinit": 0.0, "l1_zero_steps": 0}
RECIPE |= {"l1_warmup_steps": 0, "balance_every": 0}
# Runs of one sweep may differ in: level, seed, how and when they were computed, what was logged.
COMPUTED_BY = "backend micro_batch checkpoint_activations compile".split()
MAY_DIFFER = "run path complete parameters device versions commit command".split()
MAY_DIFFER += ["l1_coefficient", "seed", *COMPUTED_BY]
MAY_DIFFER += ["log_every", "valid_every", "checkpoint_every"]


def fits(names: pd.Series, patterns: str) -> pd.Series:
    """Return whether each name fits one of several patterns, as those of files, with spaces."""
    return names.map(lambda name: any(map(Path(name).match, patterns.split()))).astype(bool)


def choice(runs: pd.DataFrame) -> pd.Series:
    """Return how the configuration of each run departs from the recipe.

    "recipe", or one or more of "SiLU", "non-gated", "re-initialisation", "L1 warm-up" and
    "balanced columns", joined by " + ". The level of L1, sizes, tokens and seed are no choices.
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
    """Return the model that runs share, in words: parameters, layers, training tokens, L1.

    Left out is a field that a run lacks, or in which runs differ.
    """
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


def traced_model(
    trace: twell.Trace | twell.Aggregate, other: twell.Trace | twell.Aggregate | None = None
) -> str:
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
        # A configuration without the field is like any.
        first = runs.dropna(subset=field).drop_duplicates(field)
        if len(first) > 1:
            values = zip(first[field], first["run"], strict=True)
            named = ", ".join(f"{value} ({run})" for value, run in values)
            raise ValueError(f"{rule}; these differ in {field}: {named}")


def sweep(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the outcome of each complete run of an L1 sweep, by rising level (Fig. 3).

    Of the last validation, activity as the mean over layers: cross_entropy, cross_entropy_silenced
    (without feed-forward layers), ffn_gain (their difference), in nats; active, active_fraction (of
    intermediate_size), active_init (before the first step), fall (active_init / active);
    cross_entropy_change in % of the mean at L1 = 0 (NaN without such a run); min_layer_active;
    dead_fraction (inactive in the whole validation sample). dead_fraction_train: inactive in the
    last full window of training tokens, NaN before one is full. status: one of STATUSES; choice: as
    `choice`. Raises ValueError when no run is complete, or when they differ in more than level and
    seed.
    """
    complete = runs[runs["complete"]]
    if complete.empty:
        raise ValueError(f"none of the {len(runs)} runs is complete: {', '.join(runs['run'])}")
    chosen = choice(complete)
    if chosen.nunique() > 1:
        first = complete.groupby(chosen, sort=False)["run"].first()
        named = ", ".join(f"{name} ({run})" for name, run in first.items())
        rule = "a sweep compares levels of one choice; these runs are of several"
        raise ValueError(f"{rule}: {named}; see analysis.choice")
    rule = "a sweep compares runs of one model and token budget, by level and seed"
    check_alike(complete, MAY_DIFFER, rule)

    table = complete[["run", "l1_coefficient", "tokens"]].set_index("run")
    log = log[log["run"].isin(table.index)]
    by_metric = last_validation(log).groupby(["run", "metric"])["value"]
    means, least, most = by_metric.mean().unstack(), by_metric.min(), by_metric.max()
    first = log.query("split == 'valid' and step == 0 and metric == 'active_mean'")

    table["cross_entropy"] = means["cross_entropy"]
    table["cross_entropy_silenced"] = means["cross_entropy_silenced"]
    table["ffn_gain"] = table["cross_entropy_silenced"] - table["cross_entropy"]
    table["active"] = means["active_mean"]
    table["active_fraction"] = table["active"] / complete["intermediate_size"].iloc[0]
    table["active_init"] = first.groupby("run")["value"].mean()
    table["fall"] = table["active_init"] / table["active"]
    table["cross_entropy_change"] = cross_entropy_change(table)
    table["min_layer_active"] = least.xs("active_mean", level="metric")
    table["dead_fraction"] = means["dead_fraction"]
    windows = training_curves(complete, log, "dead_fraction")
    table["dead_fraction_train"] = windows.groupby("run")["value"].last()

    used = table["ffn_gain"] >= MIN_FFN_GAIN  # not of NaN, which shows no gain
    table["status"] = np.where(used, "alive", "unused")
    dead = most.xs("dead_fraction", level="metric").reindex(table.index) >= 1
    table.loc[dead | (table["min_layer_active"] < MIN_LAYER_ACTIVE), "status"] = "dead layer"
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
    """Return `sweep` (or `choices`) by level of L1: means over runs, which differ by seed.

    Columns: those of `sweep`, `run` and `tokens` of the first run, `status` the worst; runs, their
    number; and sample standard deviations (NaN for a single run): cross_entropy_std,
    cross_entropy_change_std, active_std, active_fraction_std and dead_fraction_train_std.
    """
    table = table.assign(status=pd.Categorical(table["status"], STATUSES, ordered=True))
    groups = table.groupby(["choice", "l1_coefficient"], sort=False)
    scattered = "cross_entropy cross_entropy_change active active_fraction dead_fraction_train"
    parts = [
        groups.mean(numeric_only=True).drop(columns="tokens"),
        groups[scattered.split()].std().add_suffix("_std"),
        groups.size().rename("runs"),
        groups["status"].max().astype(str),
        groups[["run", "tokens"]].first(),
    ]
    return pd.concat(parts, axis=1).reset_index()


def recommended(table: pd.DataFrame, max_price: float = MAX_PRICE) -> pd.Series:
    """Return the row of `levels` that stands for the paper's 2e-5.

    It is the sparsest level alive above 0 with a cross_entropy_change of at most `max_price` %;
    without one, the alive level of lowest cross-entropy. Raises ValueError when none is alive.
    """
    alive = table[(table["l1_coefficient"] > 0) & (table["status"] == "alive")]
    if alive.empty:
        known = ", ".join(map(level_name, table["l1_coefficient"]))
        raise ValueError(f"no level above 0 is alive; the levels are {known}")
    cheap = alive[alive["cross_entropy_change"] <= max_price]
    best = cheap["active"].idxmin() if len(cheap) else alive["cross_entropy"].idxmin()
    return table.loc[best]


def alive_levels(table: pd.DataFrame) -> pd.DataFrame:
    """Return the alive rows of `levels` by rising activity, with its logarithm in `log_active`."""
    alive = table[(table["status"] == "alive") & (table["active_fraction"] > 0)]
    alive = alive.sort_values("active_fraction")
    return alive.assign(log_active=np.log(alive["active_fraction"].astype(float)))


def price_at(table: pd.DataFrame, active_fraction: float) -> float:
    """Return the rise of cross-entropy in % over L1 = 0 at an activity, on the line of `levels`.

    Between two levels it is linear in the logarithm of activity. NaN outside of the alive levels.
    """
    alive = alive_levels(table)
    if alive.empty:
        return np.nan
    line = alive["log_active"], alive["cross_entropy_change"]
    return float(np.interp(np.log(active_fraction), *line, left=np.nan, right=np.nan))


def activity_at(table: pd.DataFrame, max_price: float = MAX_PRICE) -> float:
    """Return the lowest share of active neurons at which that line is at most `max_price` %.

    NaN where it never is.
    """
    alive = alive_levels(table)
    known, price = alive["log_active"].to_numpy(), alive["cross_entropy_change"].to_numpy()
    cheap = np.flatnonzero(price <= max_price)
    if not len(cheap):
        return np.nan
    first = cheap[0]
    if first == 0:
        return float(np.exp(known[0]))
    step = (price[first - 1] - max_price) / (price[first - 1] - price[first])
    return float(np.exp(known[first - 1] + step * (known[first] - known[first - 1])))


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table to be read: numbers with four digits, "–" for unknown ones.

    Columns with "l1" in their name are levels. Columns without any number are left out.
    """
    named = {name: table[name].map(level_name, "ignore") for name in table if "l1" in name}
    short = table.assign(**named).dropna(axis=1, how="all")
    short = short.map(
        lambda cell: f"{round(cell, 9) + 0:.4g}" if isinstance(cell, float) else cell  # no -0
    )
    return short.replace("nan", "–")


def training_curves(
    runs: pd.DataFrame, log: pd.DataFrame, metric: str, split: str = "train"
) -> pd.DataFrame:
    """Return one metric over training, by coefficient, run and step (Figs 2, 8, 9).

    Columns: run, choice, l1_coefficient, step, tokens, value (the mean over layers). Empty before
    the metric is first logged: dead_fraction needs a full window. Raises ValueError for a metric
    that no run has.
    """
    if metric not in set(log["metric"]):
        known = ", ".join(sorted(set(log["metric"])))
        raise ValueError(f"no run logged {metric!r}; the log has {known}")
    rows = log[(log["metric"] == metric) & (log["split"] == split)]
    curves = rows.groupby(["run", "step", "tokens"], as_index=False)["value"].mean()
    curves = curves.merge(runs[["run", "l1_coefficient"]].assign(choice=choice(runs)), on="run")
    curves = curves.sort_values(["l1_coefficient", "run", "step"], ignore_index=True)
    return curves[["run", "choice", "l1_coefficient", "step", "tokens", "value"]]


def settles_after(curve: pd.DataFrame, within: float = 0.2) -> float:
    """Return the share of training after which a curve stays within `within` of its last value.

    curve: `training_curves` of one run.
    """
    curve = curve.sort_values("tokens")
    value, tokens = curve["value"].to_numpy(), curve["tokens"].to_numpy()
    far = np.flatnonzero(np.abs(value - value[-1]) > within * abs(value[-1]))
    return float(tokens[far[-1] + 1 if len(far) else 0] / tokens[-1])
