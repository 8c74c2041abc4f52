"""Tables of runs: what each came to, an L1 sweep by level, curves over training, and what a given activity costs.

A run is a row of the configurations and many rows of the log, both from `results.load_runs`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

# A layer in which fewer than 1 token in 100 activates even one neuron passes nothing on: it is dead.
MIN_LAYER_ACTIVE = 0.01
# Silencing every feed-forward layer of a working model costs far more than this many nats; when it costs
# less, the model has learnt to do without them, and its sparsity says nothing about sparse feed-forward
# layers.
MIN_FFN_GAIN = 0.05
# What a run of a sweep can be, from good to bad.
STATUSES = ["alive", "unused", "dead layer"]
# The rise of cross-entropy over L1 = 0, in %, that the paper accepts at its levels up to 3e-5 (section 4.2).
MAX_PRICE = 2.0
# What the recipe leaves out. A configuration without one of these fields is older than the choice.
RECIPE = {
    "activation": "relu",
    "gated": True,
    "reinit": 0.0,
    "l1_zero_steps": 0,
    "l1_warmup_steps": 0,
}
RECIPE |= {"balance_every": 0}
# What runs of one sweep may differ in: the level, the seed, how and when it was computed, what was looked at.
MAY_DIFFER = ["run", "path", "complete", "parameters", *("device", "versions", "commit", "command")]
MAY_DIFFER += [
    "l1_coefficient",
    "seed",
    "backend",
    "micro_batch",
    "checkpoint_activations",
    "compile",
]
MAY_DIFFER += ["log_every", "valid_every", "checkpoint_every"]


def choice(runs: pd.DataFrame) -> pd.Series:
    """Return what each run does otherwise than the recipe, from its configuration: this alone tells runs of a sweep from others.

    "recipe", or one or more of "SiLU", "non-gated", "re-initialisation", "L1 warm-up" and "balanced columns", joined by " + ".
    The level of L1, sizes, tokens and seed are no choices.
    """
    names = []
    for row in runs.to_dict("records"):
        told = {field: row.get(field) for field in RECIPE}
        told = {field: RECIPE[field] if pd.isna(value) else value for field, value in told.items()}
        others = {
            "SiLU": told["activation"] == "silu",
            "non-gated": not told["gated"],
            "re-initialisation": told["reinit"] > 0,
            "L1 warm-up": told["l1_zero_steps"] + told["l1_warmup_steps"] > 0,
            "balanced columns": told["balance_every"] > 0,
        }
        names.append(" + ".join(name for name, does in others.items() if does) or "recipe")
    return pd.Series(names, runs.index, dtype=object)


def level_name(l1: float) -> str:
    """Return an L1 coefficient as one writes it: 0.3, 3e-3, 1.5e-4."""
    if l1 == 0 or l1 >= 0.1:
        return f"{l1:g}"
    mantissa, exponent = f"{l1:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def check_alike(runs: pd.DataFrame, may_differ: Iterable[str], what: str) -> None:
    """Raise ValueError naming the first field of the configuration, outside of `may_differ`, in which runs differ."""
    for field in runs.columns.drop(list(may_differ), errors="ignore"):
        first = runs.drop_duplicates(
            field
        )  # a configuration that does not have the field is like any
        first = first[first[field].notna()]
        if len(first) > 1:
            found = ", ".join(
                f"{value} ({run})" for value, run in zip(first[field], first["run"], strict=True)
            )
            raise ValueError(f"{what}; these differ in {field}: {found}")


def sweep(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return what each complete run of an L1 sweep came to, one row a run, by rising coefficient (Fig. 3).

    All from the last validation unless said otherwise, activity as the mean over layers: cross_entropy,
    cross_entropy_silenced (without feed-forward layers), ffn_gain (their difference), in nats; active,
    active_fraction (of intermediate_size), active_init (before the first step), fall (active_init / active);
    cross_entropy_change in % of the mean at L1 = 0 (NaN without such a run); min_layer_active; dead_fraction
    (no activation in the whole validation sample); dead_fraction_train (none in the last full window of
    training tokens, NaN when no window was filled); status: "alive", "dead layer" or "unused", see the
    constants above; choice, see `choice`. Raises ValueError when no run is complete, or when they differ in more than
    level and seed.
    """
    complete = runs[runs["complete"]]
    if complete.empty:
        raise ValueError(f"none of the {len(runs)} runs is complete: {', '.join(runs['run'])}")
    chosen = choice(complete)
    if chosen.nunique() > 1:
        first = complete.groupby(chosen, sort=False)["run"].first()
        found = ", ".join(f"{name} ({run})" for name, run in first.items())
        raise ValueError(
            f"a sweep compares levels of one choice; these runs are of several: {found}; see analysis.choice"
        )
    check_alike(
        complete,
        MAY_DIFFER,
        "a sweep compares runs of one model and token budget, by level and seed",
    )

    table = complete[["run", "l1_coefficient", "tokens"]].set_index("run")
    valid = log[(log["split"] == "valid") & log["run"].isin(table.index)]
    last = valid[valid["step"] == valid.groupby("run")["step"].transform("max")]
    means = last.groupby(["run", "metric"])["value"].mean().unstack()
    layers = last.set_index("run")
    dead_windows = training_curves(complete, log, "dead_fraction")

    table["cross_entropy"] = means["cross_entropy"]
    table["cross_entropy_silenced"] = means["cross_entropy_silenced"]
    table["ffn_gain"] = table["cross_entropy_silenced"] - table["cross_entropy"]
    table["active"] = means["active_mean"]
    table["active_fraction"] = table["active"] / complete["intermediate_size"].iloc[0]
    init = valid[(valid["step"] == 0) & (valid["metric"] == "active_mean")]
    table["active_init"] = init.groupby("run")["value"].mean()
    table["fall"] = table["active_init"] / table["active"]
    table["cross_entropy_change"] = cross_entropy_change(table)
    table["min_layer_active"] = (
        layers.loc[layers["metric"] == "active_mean", "value"].groupby("run").min()
    )
    table["dead_fraction"] = means["dead_fraction"]
    table["dead_fraction_train"] = dead_windows.groupby("run")["value"].last()

    most_dead = layers.loc[layers["metric"] == "dead_fraction", "value"].groupby("run").max()
    dead_layer = (table["min_layer_active"] < MIN_LAYER_ACTIVE) | (most_dead >= 1)
    table["status"] = "alive"
    table.loc[~(table["ffn_gain"] >= MIN_FFN_GAIN), "status"] = (
        "unused"  # NaN too: no gain was shown
    )
    table.loc[dead_layer, "status"] = "dead layer"
    table["choice"] = chosen.iloc[0]
    return table.reset_index().sort_values(["l1_coefficient", "run"], ignore_index=True)


def cross_entropy_change(table: pd.DataFrame) -> pd.Series:
    """Return the cross-entropy of each run in % over the mean of the recipe's at L1 = 0 (in a table of one choice: of its own)."""
    dense = table["l1_coefficient"] == 0
    if "choice" in table:
        dense &= table["choice"] == "recipe"
    return 100 * (table["cross_entropy"] / table.loc[dense, "cross_entropy"].mean() - 1)


def levels(table: pd.DataFrame) -> pd.DataFrame:
    """Return `sweep` (or `choices`) by level of L1: the means over its runs, which differ by seed, and how much they do.

    Columns: those of `sweep`, `run` and `tokens` being its first run's and `status` the worst; runs, their number; and
    sample standard deviations (NaN for a single run): cross_entropy_std, cross_entropy_change_std, active_std,
    active_fraction_std and dead_fraction_train_std.
    """
    table = table.assign(status=pd.Categorical(table["status"], STATUSES, ordered=True))
    groups = table.groupby(["choice", "l1_coefficient"], sort=False)
    means = groups.mean(numeric_only=True).drop(columns="tokens")
    deviating = [
        "cross_entropy",
        "cross_entropy_change",
        "active",
        "active_fraction",
        "dead_fraction_train",
    ]
    means = means.join(groups[deviating].std().add_suffix("_std")).join(
        groups.size().rename("runs")
    )
    means = means.join(groups["status"].max().astype(str)).join(groups[["run", "tokens"]].first())
    return means.reset_index()


def recommended(table: pd.DataFrame, max_price: float = MAX_PRICE) -> pd.Series:
    """Return the row of `levels` that stands for the paper's 2e-5: the sparsest alive level that is cheap enough.

    Cheap enough is a cross_entropy_change of at most `max_price` %; where no level above 0 is, the cheapest
    that is alive. Raises ValueError when no level above 0 is alive.
    """
    alive = table[(table["l1_coefficient"] > 0) & (table["status"] == "alive")]
    if alive.empty:
        known = ", ".join(map(level_name, table["l1_coefficient"]))
        raise ValueError(f"no level above 0 is alive; the levels are {known}")
    cheap = alive[alive["cross_entropy_change"] <= max_price]
    best = cheap["active"].idxmin() if len(cheap) else alive["cross_entropy"].idxmin()
    return table.loc[best]


def price_at(table: pd.DataFrame, active_fraction: float) -> float:
    """Return the rise of cross-entropy in % over L1 = 0 at an activity, on the line through the levels of `levels`.

    Between two levels it is linear in the logarithm of activity. NaN outside of the alive levels.
    """
    alive = table[(table["status"] == "alive") & (table["active_fraction"] > 0)].sort_values(
        "active_fraction"
    )
    known = np.log(alive["active_fraction"].to_numpy())
    price = alive["cross_entropy_change"].to_numpy()
    return (
        float(np.interp(np.log(active_fraction), known, price, left=np.nan, right=np.nan))
        if len(alive)
        else np.nan
    )


def activity_at(table: pd.DataFrame, max_price: float = MAX_PRICE) -> float:
    """Return the lowest share of neurons active at which that line is still at most `max_price` %; NaN where it never is."""
    alive = table[(table["status"] == "alive") & (table["active_fraction"] > 0)].sort_values(
        "active_fraction"
    )
    known, price = (
        np.log(alive["active_fraction"].to_numpy()),
        alive["cross_entropy_change"].to_numpy(),
    )
    cheap = np.flatnonzero(price <= max_price)
    if not len(cheap):
        return np.nan
    first = cheap[0]
    if first == 0:
        return float(np.exp(known[0]))
    step = (price[first - 1] - max_price) / (price[first - 1] - price[first])
    return float(np.exp(known[first - 1] + step * (known[first] - known[first - 1])))


def list_runs(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return what is worth knowing of each run in a line, by name: for lists of runs of all kinds.

    Columns: run, parameters, tokens, l1_coefficient, seed; of the last validation so far: cross_entropy (nats), active
    (mean over layers), active_fraction and dead_fraction; tokens_per_second (median over training); device, complete.
    """
    fields = ["parameters", "tokens", "l1_coefficient", "seed", "intermediate_size"]
    for run in runs.to_dict("records"):
        missing = [name for name in fields if run.get(name) in (None, "") or run[name] != run[name]]
        if missing:
            raise ValueError(
                f"{run.get('path', run['run'])} has no {', '.join(missing)} in config.yaml and provenance.json; put back copies of them"
            )
    table = runs.set_index("run")[fields].copy()
    valid = log[log["split"] == "valid"]
    last = valid[valid["step"] == valid.groupby("run")["step"].transform("max")]
    means = last.groupby(["run", "metric"])["value"].mean().unstack()
    means = means.reindex(columns=["cross_entropy", "active_mean", "dead_fraction"])
    table = table.join(means.rename(columns={"active_mean": "active"}))
    table["active_fraction"] = table["active"] / table.pop("intermediate_size")
    speed = log[(log["split"] == "train") & (log["metric"] == "tokens_per_second")]
    table["tokens_per_second"] = speed.groupby("run")["value"].median()
    return table.join(runs.set_index("run")[["device", "complete"]]).sort_index().reset_index()


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table to be read: numbers with four digits, levels of L1 as one writes them, "–" for what is not known.

    Levels are columns with "l1" in their name. Columns of which nothing is known are left out.
    """
    table = table.assign(
        **{name: table[name].map(level_name, "ignore") for name in table if "l1" in name}
    )
    short = table.dropna(axis=1, how="all").map(
        lambda cell: f"{round(cell, 9) + 0:.4g}" if isinstance(cell, float) else cell  # no -0
    )
    return short.replace("nan", "–")


def training_curves(
    runs: pd.DataFrame, log: pd.DataFrame, metric: str, split: str = "train"
) -> pd.DataFrame:
    """Return one metric over training, by coefficient and step (Figs 2, 8, 9).

    Columns: run, choice, l1_coefficient, step, tokens, value. Metrics of layers are averaged over layers. Empty when
    the metric was not reached in this split (dead_fraction before the first window of training tokens is
    full). Raises ValueError for a metric that no run has.
    """
    if metric not in set(log["metric"]):
        raise ValueError(
            f"no run logged {metric!r}; the log has {', '.join(sorted(set(log['metric'])))}"
        )
    rows = log[(log["metric"] == metric) & (log["split"] == split)]
    curves = rows.groupby(["run", "step", "tokens"], as_index=False)["value"].mean()
    curves = curves.merge(runs[["run", "l1_coefficient"]].assign(choice=choice(runs)), on="run")
    curves = curves.sort_values(["l1_coefficient", "run", "step"], ignore_index=True)
    return curves[["run", "choice", "l1_coefficient", "step", "tokens", "value"]]


def settles_after(curve: pd.DataFrame, within: float = 0.2) -> float:
    """Return the share of training after which a curve stays within `within` of its last value, from 0 to 1.

    curve: `training_curves` of one run.
    """
    curve = curve.sort_values("tokens")
    value, tokens = curve["value"].to_numpy(), curve["tokens"].to_numpy()
    far = np.flatnonzero(np.abs(value - value[-1]) > within * abs(value[-1]))
    return float(tokens[far[-1] + 1] / tokens[-1]) if len(far) else float(tokens[0] / tokens[-1])


def logged_layers(log: pd.DataFrame, intermediate_size: int) -> pd.DataFrame:
    """Return the activity of each layer at a run's last validation (Figs 6, 10, 11), as `per_layer` does of a trace.

    log: of one run. Columns: layer, mean, p99, max, dead, active_fraction, max_over_mean. Raises ValueError for a log
    without a validation.
    """
    rows = log[(log["split"] == "valid") & log["layer"].notna()]
    if rows.empty:
        raise ValueError("the log has no validation; let the run finish")
    last = rows[rows["step"] == rows["step"].max()].pivot(
        index="layer", columns="metric", values="value"
    )
    names = {
        "active_mean": "mean",
        "active_p99": "p99",
        "active_max": "max",
        "dead_fraction": "dead",
    }
    table = (
        last[list(names)]
        .rename(columns=names)
        .rename_axis(columns=None)
        .reset_index()
        .astype({"layer": int})
    )
    table["active_fraction"] = table["mean"] / intermediate_size
    table["max_over_mean"] = table["max"] / table["mean"]
    return table
