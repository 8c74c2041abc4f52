"""Tables behind the figures: from runs, logs, traces, measured rows and evaluations to DataFrames, and nothing else.

Everything here is a count, a mean or a ratio of what a run logged, a trace or an aggregate stored or a call measured.
Nothing reads files or draws.
"Active" is always the number of neurons of one layer that are active for one token (the paper's "non-zeros"):
what a trace stores is active, whatever its value is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse
import scipy.stats

if TYPE_CHECKING:
    import twell

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
RECIPE = {"activation": "relu", "gated": True, "reinit": 0.0, "l1_zero_steps": 0, "l1_warmup_steps": 0}
RECIPE |= {"balance_every": 0}
# What runs of one sweep may differ in: the level, the seed, how and when it was computed, what was looked at.
MAY_DIFFER = ["run", "path", "complete", "parameters", *("device", "versions", "commit", "command")]
MAY_DIFFER += ["l1_coefficient", "seed", "backend", "micro_batch", "checkpoint_activations", "compile"]
MAY_DIFFER += ["log_every", "valid_every", "checkpoint_every"]


# --- runs ---------------------------------------------------------------------------------------


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


def _check_alike(runs: pd.DataFrame, may_differ: Iterable[str], what: str) -> None:
    """Raise ValueError naming the first field of the configuration, outside of `may_differ`, in which runs differ."""
    for field in runs.columns.drop(list(may_differ), errors="ignore"):
        first = runs.drop_duplicates(field)  # a configuration that does not have the field is like any
        first = first[first[field].notna()]
        if len(first) > 1:
            found = ", ".join(f"{value} ({run})" for value, run in zip(first[field], first["run"], strict=True))
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
    _check_alike(complete, MAY_DIFFER, "a sweep compares runs of one model and token budget, by level and seed")

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
    table["cross_entropy_change"] = _change(table)
    table["min_layer_active"] = layers.loc[layers["metric"] == "active_mean", "value"].groupby("run").min()
    table["dead_fraction"] = means["dead_fraction"]
    table["dead_fraction_train"] = dead_windows.groupby("run")["value"].last()

    most_dead = layers.loc[layers["metric"] == "dead_fraction", "value"].groupby("run").max()
    dead_layer = (table["min_layer_active"] < MIN_LAYER_ACTIVE) | (most_dead >= 1)
    table["status"] = "alive"
    table.loc[~(table["ffn_gain"] >= MIN_FFN_GAIN), "status"] = "unused"  # NaN too: no gain was shown
    table.loc[dead_layer, "status"] = "dead layer"
    table["choice"] = chosen.iloc[0]
    return table.reset_index().sort_values(["l1_coefficient", "run"], ignore_index=True)


def _change(table: pd.DataFrame) -> pd.Series:
    """Cross-entropy in % over the mean of the recipe's runs at L1 = 0 (in a table of one choice: of its own)."""
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
    deviating = ["cross_entropy", "cross_entropy_change", "active", "active_fraction", "dead_fraction_train"]
    means = means.join(groups[deviating].std().add_suffix("_std")).join(groups.size().rename("runs"))
    means = means.join(groups["status"].max().astype(str)).join(groups[["run", "tokens"]].first())
    return means.reset_index()


def recommended(table: pd.DataFrame, max_price: float = MAX_PRICE) -> pd.Series:
    """Return the row of `levels` that stands for the paper's 2e-5: the sparsest alive level that is cheap enough.

    Cheap enough is a cross_entropy_change of at most `max_price` %; where no level above 0 is, the cheapest
    that is alive. Raises ValueError when no level above 0 is alive.
    """
    alive = table[(table["l1_coefficient"] > 0) & (table["status"] == "alive")]
    if alive.empty:
        known = ", ".join(f"{l1:g}" for l1 in table["l1_coefficient"])
        raise ValueError(f"no level above 0 is alive; the levels are {known}")
    cheap = alive[alive["cross_entropy_change"] <= max_price]
    best = cheap["active"].idxmin() if len(cheap) else alive["cross_entropy"].idxmin()
    return table.loc[best]


def price_at(table: pd.DataFrame, active_fraction: float) -> float:
    """Return the rise of cross-entropy in % over L1 = 0 at an activity, on the line through the levels of `levels`.

    Between two levels it is linear in the logarithm of activity. NaN outside of the alive levels.
    """
    alive = table[(table["status"] == "alive") & (table["active_fraction"] > 0)].sort_values("active_fraction")
    known = np.log(alive["active_fraction"].to_numpy())
    price = alive["cross_entropy_change"].to_numpy()
    return float(np.interp(np.log(active_fraction), known, price, left=np.nan, right=np.nan)) if len(alive) else np.nan


def activity_at(table: pd.DataFrame, max_price: float = MAX_PRICE) -> float:
    """Return the lowest share of neurons active at which that line is still at most `max_price` %; NaN where it never is."""
    alive = table[(table["status"] == "alive") & (table["active_fraction"] > 0)].sort_values("active_fraction")
    known, price = np.log(alive["active_fraction"].to_numpy()), alive["cross_entropy_change"].to_numpy()
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
    table = runs.set_index("run")[["parameters", "tokens", "l1_coefficient", "seed", "intermediate_size"]].copy()
    valid = log[log["split"] == "valid"]
    last = valid[valid["step"] == valid.groupby("run")["step"].transform("max")]
    means = last.groupby(["run", "metric"])["value"].mean().unstack()
    means = means.reindex(columns=["cross_entropy", "active_mean", "dead_fraction"])
    table = table.join(means.rename(columns={"active_mean": "active"}))
    table["active_fraction"] = table["active"] / table.pop("intermediate_size")
    speed = log[(log["split"] == "train") & (log["metric"] == "tokens_per_second")]
    table["tokens_per_second"] = speed.groupby("run")["value"].median()
    return table.join(runs.set_index("run")[["device", "complete"]]).sort_index().reset_index()


def training_curves(runs: pd.DataFrame, log: pd.DataFrame, metric: str, split: str = "train") -> pd.DataFrame:
    """Return one metric over training, by coefficient and step (Figs 2, 8, 9).

    Columns: run, choice, l1_coefficient, step, tokens, value. Metrics of layers are averaged over layers. Empty when
    the metric was not reached in this split (dead_fraction before the first window of training tokens is
    full). Raises ValueError for a metric that no run has.
    """
    if metric not in set(log["metric"]):
        raise ValueError(f"no run logged {metric!r}; the log has {', '.join(sorted(set(log['metric'])))}")
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


def sweep_findings(paper: pd.DataFrame, table: pd.DataFrame, active: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: what the paper finds of its sweep, and what `levels` says of ours.

    paper: `results.paper()`; active: `training_curves` of active_mean; reason: why a difference is to be expected.
    """
    if not (table["l1_coefficient"] == 0).any():
        raise ValueError("no run has L1 = 0, which the others are compared with")
    of_levels = paper[(paper["source"] == "Table 3") & (paper["activation"] == "ReLU")]
    theirs = of_levels.pivot(index="metric", columns="l1", values="value").astype(float)
    their_active, their_loss = theirs.loc["avg_nonzeros"], theirs.loc["cross_entropy"]
    settled = paper.loc[paper["metric"] == "sparsity_settles_after", "value"].item()
    dense, best = table[table["l1_coefficient"] == 0].iloc[0], recommended(table)
    fall, their_fall = dense["active"] / best["active"], their_active[0] / their_active[2e-5]
    price, their_price = best["cross_entropy_change"], 100 * (their_loss[2e-5] / their_loss[0] - 1)
    share, their_share = 100 * dense["active_fraction"], 100 * their_active[0] / 5632
    inactive, their_inactive = 100 - 100 * best["active_fraction"], 100 - 100 * their_active[2e-5] / 5632
    early = settles_after(active[active["run"] == best["run"]])
    died = 100 * best["dead_fraction_train"]
    falls = table["active"].is_monotonic_decreasing
    dies = table["dead_fraction_train"].is_monotonic_increasing
    bad = [f"{row.l1_coefficient:g} ({row.status})" for row in table.itertuples() if row.status != "alive"]
    return [
        ("active at L1 = 0, % (below 30)", their_share, share, share < 30, reason),
        ("inactive at the recommended level, % (at least 95)", their_inactive, inactive, inactive >= 95, reason),
        ("its price in cross-entropy, % (at most 2)", their_price, price, price <= MAX_PRICE, reason),
        ("fall of activity from L1 = 0 (at least half)", their_fall, fall, fall > their_fall / 2, reason),
        ("activity falls with every level", True, falls, falls, reason),
        (
            "activity stays within 20% of its last value after (below half)",
            f"{settled} of 30,000 steps",
            f"{100 * early:.0f}% of the training",
            early < 0.5,
            reason,
        ),
        ("dead neurons at the recommended level, %", ">30", died, died > 30, reason),
        ("dead neurons rise with every level", True, dies, dies, reason),
        ("levels that cannot be used", "none", ", ".join(bad) or "none", not bad, reason),
    ]


# --- choices of training (Fig. 8, Tables 3 to 5) and sizes --------------------------------------------
# A setting is one choice at one level of L1; its runs differ by seed.

CONFIDENCE = 0.95
# Below this share of dead neurons there is nothing to remedy, and what a remedy leaves counts as none.
FEW_DEAD = 0.01
UNKNOWN = "no seeds"  # the verdict on a difference where no setting has several runs
QUANTITIES = {  # of a contrast, and in what its difference is
    "cross_entropy_change": "cross-entropy, % over L1 = 0",
    "active_fraction": "active neurons, %; difference relative",
    "dead_fraction_train": "dead neurons, %",
}


def choices(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return what each complete run came to, columns as of `sweep`, of the recipe and then of each other choice.

    cross_entropy_change is over the mean of the recipe at L1 = 0. An empty table where no run is complete. Raises
    ValueError when runs differ in more than choice, level, seed and width (the non-gated layer is wider, so that its parameters
    are as many).
    """
    runs = runs[runs["complete"]] if len(runs) else runs
    if runs.empty:
        return pd.DataFrame(columns=["run", "choice", "l1_coefficient", *QUANTITIES])
    may_differ = [*MAY_DIFFER, *RECIPE, "intermediate_size"]
    _check_alike(runs, may_differ, "choices are compared at one size and token budget")
    chosen = choice(runs)
    order = sorted(chosen.unique(), key=lambda name: (name != "recipe", name))
    table = pd.concat([sweep(runs[chosen == name], log) for name in order], ignore_index=True)
    return table.assign(cross_entropy_change=_change(table))


def compared_level(table: pd.DataFrame) -> float:
    """Return the level above 0 at which most runs of `choices` were trained (the lowest of several); NaN without any."""
    counts = table.loc[table["l1_coefficient"] > 0, "l1_coefficient"].value_counts()
    return float(counts[counts == counts.max()].index.min()) if len(counts) else np.nan


def remedied(runs: pd.DataFrame, level: float) -> pd.DataFrame:
    """Return the complete runs at a level of L1 with a remedy for dead neurons, and the recipe's beside them (Fig. 8).

    No rows where there is no remedy.
    """
    if runs.empty:
        return runs
    at = runs[runs["complete"] & (runs["l1_coefficient"] == level)]
    remedies = choice(at).isin(["re-initialisation", "L1 warm-up"])
    return at[remedies | (choice(at) == "recipe")] if remedies.any() else at[:0]


def seed_noise(table: pd.DataFrame, column: str) -> tuple[float, int]:
    """Return the standard deviation of `column` of `choices` between seeds and its degrees of freedom, runs less settings.

    Pooled over all settings with several runs; (NaN, 0) without any. active_fraction counts in natural logarithms, since
    activity scatters in proportion. What cannot scatter is left out: SiLU's activity, settings without a dead neuron.
    """
    values = table[column].astype(float)
    if column != "cross_entropy_change":
        values = values.where(table["active_fraction"] < 0.99)
    if column == "active_fraction":
        values = np.log(values.where(values > 0))
    spread = values.groupby([table["choice"], table["l1_coefficient"]]).agg(["var", "count"])
    spread = spread[spread["var"] > 0]
    freedom = int((spread["count"] - 1).sum())
    if not freedom:
        return np.nan, 0
    return float(np.sqrt((spread["var"] * (spread["count"] - 1)).sum() / freedom)), freedom


def noise_limit(table: pd.DataFrame, column: str, runs: float, other_runs: float) -> float:
    """Return the largest difference of two means that seeds alone explain: Student's t at CONFIDENCE on `seed_noise`."""
    deviation, freedom = seed_noise(table, column)
    if not (freedom and runs and other_runs):
        return np.nan
    return float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * deviation * np.sqrt(1 / runs + 1 / other_runs))


def _verdict(difference: float, limit: float) -> str:
    if np.isnan(difference):
        return ""
    if np.isnan(limit):
        return UNKNOWN
    return "within noise" if abs(difference) <= limit else "more" if difference > 0 else "less"


def contrast(table: pd.DataFrame, column: str, first: tuple[str, float], second: tuple[str, float]) -> dict:
    """Return by how much two settings of `choices`, (choice, l1_coefficient), differ in a column, and whether seeds explain it.

    Keys: runs and value (mean) of the first, other_runs and other of the second; difference, first less second, and limit, the
    `noise_limit` (cross_entropy_change: points of %; active_fraction: % of the second; dead_fraction_train: a share);
    verdict: "more", "less", "within noise", "no seeds", or empty where one of them was not trained.
    """
    found = [
        table.loc[(table["choice"] == c) & (table["l1_coefficient"] == l1), column].dropna()
        for c, l1 in (first, second)
    ]
    (runs, value), (other_runs, other) = ((len(f), float(f.mean()) if len(f) else np.nan) for f in found)
    limit, difference = noise_limit(table, column, runs, other_runs), value - other
    verdict = _verdict(difference, limit)
    if column == "active_fraction":
        verdict = _verdict(float(np.log(value / other)), limit)
        difference, limit = 100 * (value / other - 1), 100 * float(np.expm1(limit))
    told = {"runs": runs, "value": value, "other_runs": other_runs, "other": other}
    return told | {"difference": difference, "limit": limit, "verdict": verdict}


def contrasts(table: pd.DataFrame) -> pd.DataFrame:
    """Return what each choice changes against the recipe at the same level, from `choices`, a row a quantity.

    Columns: choice, l1_coefficient, quantity (QUANTITIES), and the keys of `contrast`, shares of neurons in %.
    """
    rows = []
    others = table.loc[table["choice"] != "recipe", ["choice", "l1_coefficient"]].drop_duplicates()
    for name, l1 in others.itertuples(index=False):
        for column, quantity in QUANTITIES.items():
            found = contrast(table, column, (name, l1), ("recipe", l1))
            if column != "cross_entropy_change":
                found |= {key: 100 * found[key] for key in ("value", "other")}
            if column == "dead_fraction_train":
                found |= {key: 100 * found[key] for key in ("difference", "limit")}
            rows.append({"choice": name, "l1_coefficient": l1, "quantity": quantity} | found)
    columns = ["choice", "l1_coefficient", "quantity", "runs", "value", "other_runs", "other", "difference", "limit"]
    return pd.DataFrame(rows, columns=[*columns, "verdict"])


def against_frontier(table: pd.DataFrame) -> pd.DataFrame:
    """Return each gated ReLU choice beside the recipe's line through its levels, at the same activity and at the same price.

    table: `choices`. Columns: choice, l1_coefficient, runs, status; active_fraction, price (% over L1 = 0), line_price (of the
    recipe at this activity, as `price_at`), difference (points), limit (`noise_limit`; a point of the line has the noise of the
    two levels that it lies between; that activity scatters too is left out) and verdict; line_active_fraction (as `activity_at`,
    of the recipe at this price); dead (share), line_dead (of the recipe at this activity), dead_limit and dead_verdict. What
    would be outside of the recipe's alive levels is NaN. Ours.
    """
    every = levels(table) if len(table) else table
    recipe = every[every["choice"] == "recipe"]
    columns = ["choice", "l1_coefficient", "runs", "status", "active_fraction", "price", "line_price", "difference"]
    columns += ["limit", "verdict", "line_active_fraction", "dead", "line_dead", "dead_limit", "dead_verdict"]
    rows = []
    alive = (
        recipe.query("status == 'alive' and active_fraction > 0").sort_values("active_fraction")
        if len(recipe)
        else recipe
    )
    gated = every[~every["choice"].str.contains("recipe|SiLU|non-gated")] if len(alive) else every[:0]
    known = np.log(alive["active_fraction"].to_numpy(float))
    for row in gated[gated["active_fraction"] > 0].itertuples():
        at, line_price = np.log(row.active_fraction), price_at(recipe, row.active_fraction)
        weights = np.array([np.interp(at, known, one) for one in np.eye(len(known))])  # of each level in this point
        beside = 1 / (weights**2 / alive["runs"]).sum()  # so many runs of one level would scatter alike
        limit = noise_limit(table, "cross_entropy_change", row.runs, beside)
        dead_limit = noise_limit(table, "dead_fraction_train", row.runs, beside)
        difference, dead = row.cross_entropy_change - line_price, row.dead_fraction_train
        line_dead = float(np.interp(at, known, alive["dead_fraction_train"], np.nan, np.nan))
        found = [row.choice, row.l1_coefficient, row.runs, row.status, row.active_fraction, row.cross_entropy_change]
        found += [line_price, difference, limit, _verdict(difference, limit)]
        found += [activity_at(recipe, row.cross_entropy_change), dead, line_dead, dead_limit]
        rows.append([*found, _verdict(dead - line_dead, dead_limit)])
    return pd.DataFrame(rows, columns=columns)


_MODIFICATIONS = {"dead_neuron_reinit": "re-initialisation", "sparsity_warmup": "L1 warm-up"}


def choice_table(paper: pd.DataFrame, table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return Table 3, 4 or 5 of the paper beside ours, a row a setting of the paper's.

    paper: `results.paper()`; table: `choices`; source: "Table 3", for example. Columns: choice; paper_l1, paper_accuracy (%),
    paper_cross_entropy (nats) and paper_active (of 5632), NaN where not printed; ours, NaN where not trained: l1, runs,
    cross_entropy and its standard deviation, change (% over the recipe at L1 = 0), active with its standard deviation,
    dead (%, in the last window of training). The paper's 2e-5, and 3e-4 of its
    warm-up, stand beside our `compared_level`; its other levels have no partner. Raises ValueError for another source.
    """
    if source not in ("Table 3", "Table 4", "Table 5"):
        raise ValueError(f"{source!r} is no table of choices; use 'Table 3', 'Table 4' or 'Table 5'")
    printed = paper[paper["source"] == source]
    named = np.select(
        [printed["activation"] == "SiLU", ~printed["gated"].astype(bool)], ["SiLU", "non-gated"], "recipe"
    )
    named = printed["training_modification"].map(_MODIFICATIONS).fillna(pd.Series(named, printed.index))
    every = levels(table).set_index(["choice", "l1_coefficient"]) if len(table) else None
    level, rows = compared_level(table), []
    for (name, l1), theirs in printed.groupby([named, "l1"], sort=False):
        value = theirs.set_index("metric")["value"].astype(float)
        row = {"choice": name, "paper_l1": float(l1), "paper_accuracy": value.get("mean_task_accuracy", np.nan)}
        row |= {
            "paper_cross_entropy": value.get("cross_entropy", np.nan),
            "paper_active": value.get("avg_nonzeros", np.nan),
        }
        ours = {0: 0.0, 2e-5: level, 3e-4: level}.get(l1, np.nan)
        if every is not None and (name, ours) in every.index:
            found = every.loc[name, ours]
            row |= {"l1": ours, "runs": found["runs"], "cross_entropy": found["cross_entropy"]}
            row |= {"cross_entropy_std": found["cross_entropy_std"], "change": found["cross_entropy_change"]}
            row |= {"active": found["active"], "active_std": found["active_std"]}
            row |= {"dead": 100 * found["dead_fraction_train"]}
        rows.append(row)
    columns = ["choice", "paper_l1", "paper_accuracy", "paper_cross_entropy", "paper_active", "l1", "runs"]
    columns += ["cross_entropy", "cross_entropy_std", "change", "active", "active_std", "dead"]
    return pd.DataFrame(rows).reindex(columns=columns)


def sizes(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return dense and sparse models of the recipe by size (section 4.2), one row a size, by rising parameters.

    Columns: parameters, tokens, num_layers, hidden_size, intermediate_size, l1_coefficient (above 0: the one
    that most sizes have, of several the lowest); runs, cross_entropy, active, active_fraction, dead_fraction_train, status at that level;
    cross_entropy_dense (NaN without a run at L1 = 0) and change (%). Sizes without a run at the level are left out, runs of
    other choices too. An empty table where no run is complete.
    """
    size = ["parameters", "tokens", "num_layers", "hidden_size", "intermediate_size"]
    found = ["runs", "cross_entropy", "active", "active_fraction", "dead_fraction_train", "status"]
    rows = []
    if len(runs):
        runs = runs[runs["complete"].astype(bool) & (choice(runs) == "recipe")]
        sparse = runs[runs["l1_coefficient"] > 0].drop_duplicates(["l1_coefficient", *size])
        level = sparse["l1_coefficient"].mode().min()  # NaN without any
        for of, some in runs.groupby(size):
            by_level = levels(sweep(some, log)).set_index("l1_coefficient")
            if level in by_level.index:
                dense = by_level["cross_entropy"].get(0.0, np.nan)
                rows.append((*of, level, *by_level.loc[level, found], dense))
    table = pd.DataFrame(rows, columns=[*size, "l1_coefficient", *found, "cross_entropy_dense"])
    return table.assign(change=100 * (table["cross_entropy"] / table["cross_entropy_dense"] - 1))


def paper_sizes(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's four sizes at 2e-5 with columns as of `sizes`, from `results.paper()`; NaN where it prints nothing.

    Also accuracy and accuracy_dense, its mean task accuracies in %.
    """
    printed = paper[(paper["source"] == "Table 1") & (paper["metric"] == "mean_task_accuracy")]
    accuracy = printed.pivot(index="model", columns="sparse", values="value").astype(float)
    at = paper[(paper["metric"] == "avg_nonzeros") & (paper["l1"] == 2e-5)].groupby("model")["value"].first()
    loss = paper[
        (paper["source"] == "Table 3") & (paper["activation"] == "ReLU") & (paper["metric"] == "cross_entropy")
    ]
    loss = loss.pivot(index="model", columns="sparse", values="value").astype(float).reindex(accuracy.index)
    table = pd.DataFrame({"parameters": 1e9 * accuracy.index.str.removesuffix("B").astype(float)}, accuracy.index)
    tokens = 1e9 * printed.groupby("model")["train_tokens_B"].first().astype(float)
    table = table.assign(tokens=tokens, intermediate_size=5632, l1_coefficient=2e-5)
    table["active"] = at.reindex(table.index).astype(float)
    table["active_fraction"] = table["active"] / 5632
    table["cross_entropy"], table["cross_entropy_dense"] = loss[True], loss[False]
    table["change"] = 100 * (loss[True] / loss[False] - 1)
    table["accuracy"], table["accuracy_dense"] = accuracy[True], accuracy[False]
    return table.sort_values("parameters").reset_index()


NOT_RECORDED = "no such run is recorded"


def _judged(verdict: str, agrees: Sequence[str], printed: float, limit: float, reason: str) -> tuple[bool | None, str]:
    """Whether a difference is as the paper says, and the reason if not; agrees: the verdicts that are."""
    if verdict in ("", UNKNOWN):
        return None, "no setting has several seeds" if verdict else NOT_RECORDED
    if verdict == "within noise" and verdict not in agrees and abs(printed) <= limit:
        return None, "the paper's difference is less than our noise"
    return verdict in agrees, reason


def _said(difference: float, limit: float, *runs: int) -> str:
    if np.isnan(difference):
        return "–"
    noise = "" if np.isnan(limit) else f" ± {limit:.2g}"
    return f"{difference:+.3g}{noise} (n = {', '.join(map(str, runs))})"


def choice_findings(paper: pd.DataFrame, table: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: what the paper says of its choices of training, and `choices` of ours at `compared_level`.

    paper: `results.paper()`; reason: why a difference is to be expected. A difference is one only above the `noise_limit`, which
    stands behind the ±; within it a claim of a difference is only contradicted where the paper's is larger than the limit.
    """
    level, rows = compared_level(table), []
    loss, active, dead = QUANTITIES
    theirs = pd.concat([choice_table(paper, table, f"Table {n}") for n in (4, 3, 5)])
    theirs = theirs.groupby(["choice", "paper_l1"]).first()  # of Table 4 the accuracies, which have a digit more

    def printed(column: str, first: tuple, second: tuple, of: tuple | None = None) -> float:
        value = theirs[f"paper_{column}"]
        return float(value[first] - value[second]) * (1 if of is None else 100 / value[of])

    def row(
        what: str, effect: float, column: str, first: tuple, second: tuple, agrees: Sequence[str], why: str = reason
    ):
        found = contrast(table, column, first, second)
        said = _said(*(found[key] for key in ("difference", "limit", "runs", "other_runs")))
        rows.append((what, f"{effect:+.3g}", said, *_judged(found["verdict"], agrees, effect, found["limit"], why)))

    recipe, plain, at = ("recipe", 0.0), ("recipe", 2e-5), f"L1 = {level:g}" if level == level else "the sparse level"
    not_worse = ["within noise", "less"]
    found = contrast(table, loss, ("recipe", level), recipe)
    said = _said(*(found[key] for key in ("difference", "limit", "runs", "other_runs")))
    cheap = None if np.isnan(found["difference"]) else found["difference"] <= MAX_PRICE
    price = f"{printed('cross_entropy', plain, recipe, recipe):+.3g}"
    what = f"cross-entropy at {at} over L1 = 0, % (at most {MAX_PRICE:g})"
    rows.append((what, price, said, cheap, NOT_RECORDED if cheap is None else reason))

    effect = printed("cross_entropy", ("SiLU", 0.0), recipe, recipe)
    row("SiLU over ReLU at L1 = 0, cross-entropy, % (less)", effect, loss, ("SiLU", 0.0), recipe, ["less"])
    for l1, theirs_l1 in ((0.0, 0.0), (level, 2e-5)):
        effect = printed("accuracy", ("non-gated", theirs_l1), ("recipe", theirs_l1))
        what = f"non-gated over gated at {'L1 = 0' if l1 == 0 else at}, cross-entropy, points of % "
        what += "(the same; paper: accuracy, points)"
        row(what, effect, loss, ("non-gated", l1), ("recipe", l1), ["within noise"])

    without = contrast(table, dead, ("recipe", level), ("recipe", level))["value"]
    for name, theirs_l1 in (("re-initialisation", 2e-5), ("L1 warm-up", 3e-4)):
        left = contrast(table, dead, (name, level), ("recipe", level))
        said = f"{100 * left['value']:.3g} (n = {left['runs']})" if left["runs"] else "–"
        agrees, why = left["value"] <= FEW_DEAD, reason
        if np.isnan(left["value"]) or np.isnan(without):
            agrees, why = None, NOT_RECORDED if np.isnan(left["value"]) else "no run of the recipe at this level"
        elif not without > FEW_DEAD:
            agrees, why = None, "hardly any neuron is dead without it"
        known = "" if np.isnan(without) else f"; without it {100 * without:.3g}"
        rows.append((f"{name}: dead neurons left, %{known}", "~0", said, agrees, why))
        ours, setting = (name, level), (name, theirs_l1)
        effect = 100 * printed("active", setting, plain) / theirs.loc[plain, "paper_active"]
        if name == "re-initialisation":
            cost = printed("cross_entropy", setting, plain, recipe)
            row(f"{name}: cross-entropy, points of % (no more)", cost, loss, ours, ("recipe", level), not_worse)
            row(f"{name}: active neurons, % (no more)", effect, active, ours, ("recipe", level), not_worse)
        else:
            why = "at the same coefficient; the paper's with warm-up is 15 times its other"
            row(f"{name}: active neurons, % (more)", effect, active, ours, ("recipe", level), ["more"], why)
    return rows


def frontier_findings(table: pd.DataFrame, name: str) -> list[tuple]:
    """Return rows for `compare` on a choice of our own, from `choices`: what it gains over the recipe's line, by level."""
    rows = []
    for row in against_frontier(table).query("choice == @name").itertuples():
        at = f"{name}, L1 = {row.l1_coefficient:g} ({100 * row.active_fraction:.3g}% active)"
        why = "ours" if row.status == "alive" else f"ours; {row.status}"
        outside = "no level of the recipe is beside it"
        said = _said(row.difference, row.limit, row.runs)
        verdict = f"{why}; {row.verdict or outside}"
        rows.append((f"{at}: cross-entropy over the recipe as sparse, points of %", "–", said, None, verdict))
        said = f"{100 * row.line_active_fraction:.3g}" if row.line_active_fraction == row.line_active_fraction else "–"
        rows.append((f"{at}: active in the recipe at this price, %", "–", said, None, why))
        said = f"{100 * row.dead:.3g}, {_said(100 * (row.dead - row.line_dead), 100 * row.dead_limit, row.runs)}"
        verdict = f"{why}; {row.dead_verdict or outside}"
        rows.append((f"{at}: dead neurons, %, and over the recipe as sparse, points", "–", said, None, verdict))
    return rows or [(f"{name}: cross-entropy over the recipe as sparse", "–", "–", None, NOT_RECORDED)]


def size_findings(paper: pd.DataFrame, table: pd.DataFrame, seeds: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: what the paper says of its four sizes, and `sizes` of ours.

    seeds: `choices`, whose noise counts for all sizes, as these have one seed each; reason: why a difference is to be expected.
    """
    theirs = paper_sizes(paper)
    gaps = ", ".join(f"{gap:+.1f}" for gap in theirs["accuracy"] - theirs["accuracy_dense"])
    activity = theirs.dropna(subset="active")
    rows = []
    for column, what in (("active_fraction", "share of neurons active, %"), ("active", "active neurons")):
        scaled = 100 if column == "active_fraction" else 1
        printed, ours = (
            " → ".join(f"{scaled * value:.3g}" for value in values) for values in (activity[column], table[column])
        )
        agrees, why = None, NOT_RECORDED
        if len(table) > 1:
            steps = np.diff(np.log(table[column].astype(float)))
            limit = noise_limit(seeds, "active_fraction", table["runs"].min(), table["runs"].min())
            effect = np.log(activity[column].iloc[-1] / activity[column].iloc[0])
            agrees, why = _judged(_verdict(steps.sum(), limit), ["less"], effect, limit, reason)
            if agrees and steps.max() > limit:
                agrees, why = False, "it rises between two sizes"
        rows.append((f"larger is sparser: {what}", printed, ours or "–", agrees, why))
    change = table["change"].dropna()
    agrees = bool((change <= MAX_PRICE).all()) if len(change) else None
    said = ", ".join(f"{value:+.2f}" for value in change) or "–"
    what = f"cross-entropy of sparse over dense by size, % (at most {MAX_PRICE:g})"
    printed = f"{theirs['change'].dropna().item():+.2f} (1.5B)"
    rows.append((what, printed, said, agrees, reason if len(change) else NOT_RECORDED))
    agrees, why, said = None, NOT_RECORDED, "–"
    if len(change) > 1:
        # The difference of two gaps has the noise of four models.
        limit = np.sqrt(2) * noise_limit(seeds, "cross_entropy_change", 1, 1)
        grows = change.iloc[-1] - change.iloc[0]
        agrees, why = _judged(_verdict(grows, limit), ["within noise", "less"], 0, limit, reason)
        said = f"{grows:+.2f} ± {limit:.2f} points of %"
    rows.append(
        ("the gap grows from the smallest to the largest (no)", f"{gaps} points of accuracy", said, agrees, why)
    )
    return rows


def logged_layers(log: pd.DataFrame, intermediate_size: int) -> pd.DataFrame:
    """Return the activity of each layer at a run's last validation (Figs 6, 10, 11), as `per_layer` does of a trace.

    log: of one run. Columns: layer, mean, p99, max, dead, active_fraction, max_over_mean. Raises ValueError for a log
    without a validation.
    """
    rows = log[(log["split"] == "valid") & log["layer"].notna()]
    if rows.empty:
        raise ValueError("the log has no validation; let the run finish")
    last = rows[rows["step"] == rows["step"].max()].pivot(index="layer", columns="metric", values="value")
    names = {"active_mean": "mean", "active_p99": "p99", "active_max": "max", "dead_fraction": "dead"}
    table = last[list(names)].rename(columns=names).rename_axis(columns=None).reset_index().astype({"layer": int})
    table["active_fraction"] = table["mean"] / intermediate_size
    table["max_over_mean"] = table["max"] / table["mean"]
    return table


# --- traces -------------------------------------------------------------------------------------
# Each of these takes a trace or an aggregate, whose methods of the same names give the same counts.


def per_layer(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return each layer's activity (Figs 6, 10, 11).

    Columns: layer; mean, median, p99 and max of the active neurons per token; active_fraction (mean /
    intermediate_size), max_over_mean, dead (fraction of neurons never active in the trace).
    """
    number = np.arange(trace.intermediate_size + 1)
    counts = [np.repeat(number, tokens) for tokens in trace.histogram()]  # of every token, ascending
    table = pd.DataFrame(
        {
            "layer": np.arange(trace.num_layers),
            "mean": [layer.mean() for layer in counts],
            "median": [np.median(layer) for layer in counts],
            "p99": [np.percentile(layer, 99) for layer in counts],
            "max": [layer.max() for layer in counts],
        }
    )
    table["dead"] = (trace.neurons()[0] == 0).mean(axis=1)
    table["active_fraction"] = table["mean"] / trace.intermediate_size
    table["max_over_mean"] = table["max"] / table["mean"]
    return table


def per_token(trace: twell.Trace | twell.Aggregate, min_frequency: float = 2**-14, min_count: int = 16) -> pd.DataFrame:
    """Return the mean activity of each token of the vocabulary, lowest first (Fig. 7a).

    Columns: token_id, token, count, frequency, mean_active (over its occurrences and all layers). Tokens are
    left out below `min_frequency` (the paper's filter: 64 occurrences in its 2^20 tokens) and below
    `min_count` occurrences, which is what keeps the means of a small trace from being those of one context.
    """
    token_id, token, count, active = trace.by_token()
    table = pd.DataFrame(
        {
            "token_id": token_id,
            "token": token,
            "count": count,
            "frequency": count / trace.num_tokens,
            "mean_active": active / (count * trace.num_layers),
        }
    )
    table = table[(table["frequency"] >= min_frequency) & (table["count"] >= min_count)]
    return table.sort_values(["mean_active", "token_id"], ignore_index=True)


def by_position(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return the mean activity at each position of a sequence (Fig. 7b): position (0 first), mean_active, n.

    The mean is over layers and over the n sequences that reach the position.
    """
    n, active = trace.by_position()
    means = active.sum(axis=0) / (n * trace.num_layers)
    return pd.DataFrame({"position": np.arange(len(n)), "mean_active": means, "n": n})


def by_neuron(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return each neuron's habits: layer, neuron, rate, mean_value, max_abs.

    rate is the fraction of tokens that activate it; mean_value the signed mean of h where it is active (NaN
    if never); max_abs the largest |h| (0 if never).
    """
    counts, sums, largest = trace.neurons()
    mean = np.full(counts.shape, np.nan)
    np.divide(sums, counts, out=mean, where=counts > 0)
    layer, neuron = np.indices(counts.shape)
    columns = {"layer": layer, "neuron": neuron, "rate": counts / trace.num_tokens}
    columns |= {"mean_value": mean, "max_abs": largest}
    return pd.DataFrame({name: column.reshape(-1) for name, column in columns.items()})


def value_histogram(aggregate: twell.Aggregate, layer: int, neuron: int) -> pd.DataFrame:
    """Return how often a neuron's value h fell between `low` and `high`: low, high, count.

    Both are powers of two or 0, the same for all neurons; values too small for the others count beside 0.
    """
    _check_neuron(aggregate, layer, neuron)
    edges = aggregate.value_edges
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:], "count": aggregate.value_histogram[layer, neuron]})


def contexts(aggregate: twell.Aggregate, layer: int, neuron: int, kind: str = "top") -> pd.DataFrame:
    """Return places in the text where a neuron fires: the strongest ("top"), or one at each of set quantiles.

    Columns: value (h, signed); quantile (of the neuron's signed values; NaN for the strongest); before, token,
    after (text around the token that fires); sequence and position of that token. The strongest come by
    falling |value|, the others by rising value. A neuron that never fires has no rows; one that fires rarely
    has fewer. Raises ValueError for another kind, IndexError for a neuron that does not exist.
    """
    rows = places(aggregate, layer, neuron, kind)
    return pd.DataFrame(rows, columns=["value", "quantile", "before", "token", "after", "sequence", "position"])


def places(aggregate: twell.Aggregate, layer: int, neuron: int, kind: str = "top") -> list[tuple]:
    """Return the rows of `contexts` as tuples, for who asks about thousands of neurons."""
    _check_neuron(aggregate, layer, neuron)
    if kind == "top":
        at, value = aggregate.top_at, aggregate.top_value
        quantiles = [np.nan] * at.shape[-1]
    elif kind == "quantile":
        at, value, quantiles = aggregate.quantile_at, aggregate.quantile_value, aggregate.quantiles
    else:
        raise ValueError(f"kind is {kind!r}; use 'top' or 'quantile'")
    rows = []
    for place, h, quantile in zip(at[layer, neuron].tolist(), value[layer, neuron], quantiles, strict=True):
        if place < 0:
            continue
        sequence, position, ids, here = aggregate.context(place)
        words = [aggregate.strings[n] for n in np.searchsorted(aggregate.token_ids, ids)]
        around = "".join(words[:here]), words[here], "".join(words[here + 1 :])
        rows.append((float(h), quantile, *around, sequence, position))
    return rows


def _check_neuron(aggregate: twell.Aggregate, layer: int, neuron: int) -> None:
    layers, neurons = aggregate.num_layers, aggregate.intermediate_size
    if not (0 <= layer < layers and 0 <= neuron < neurons):
        raise IndexError(f"layer {layer}, neuron {neuron} does not exist: there are {layers} layers of {neurons}")


def passage(trace: twell.Trace, sequence: int, num_tokens: int) -> pd.DataFrame:
    """Return the first tokens of one sequence: position, token, active (mean over layers), logprob (nats).

    Raises ValueError for a sequence that the trace does not have.
    """
    rows = np.flatnonzero(trace.sequence == sequence)[:num_tokens]
    if len(rows) == 0:
        raise ValueError(f"no sequence {sequence} in the trace; it has 0 to {trace.sequence.max()}")
    return pd.DataFrame(
        {
            "position": trace.position[rows],
            "token": [trace.strings[row] for row in rows],
            "active": trace.counts()[:, rows].mean(axis=0),
            "logprob": trace.logprob[rows],
        }
    )


def union_sizes(trace: twell.Trace | twell.Aggregate, blocks: Sequence[int] = (16, 32, 64, 128, 256)) -> pd.DataFrame:
    """Return how many different neurons a block of consecutive tokens activates.

    Columns: layer, block, mean and max over the blocks, mean_active. A kernel that treats `block` tokens
    together has to read the weights of their union; mean_active is what one token needs. A last, partial
    block is dropped; block sizes above the length of the trace have no row. Raises ValueError for a block
    size that an aggregate did not count.
    """
    blocks = np.array([block for block in blocks if block <= trace.num_tokens], dtype=np.int64)
    total, largest, active = trace.unions(blocks.tolist())
    num_blocks = trace.num_tokens // blocks
    columns = {"layer": np.arange(trace.num_layers)[:, None], "block": blocks, "mean": total / num_blocks}
    columns |= {"max": largest, "mean_active": active / (num_blocks * blocks)}
    return pd.DataFrame({name: np.broadcast_to(part, total.shape).reshape(-1) for name, part in columns.items()})


def tile_overflow(
    trace: twell.Trace | twell.Aggregate, tile_n: int = 256, compressions: Sequence[int] = (2, 4, 8, 16)
) -> pd.DataFrame:
    """Return how often TwELL's tiles are too small (section 3.2, App. A.1).

    Columns: layer, compression, capacity, overflow_rows, overflow_tiles. capacity is that of the one-matrix
    form, tile_n / compression - 1 non-zeros; overflow_rows the fraction of tokens with any tile above it,
    overflow_tiles the fraction of all tiles. Raises ValueError when a compression does not divide tile_n, or
    for a width or compression that an aggregate did not count.
    """
    for compression in compressions:
        if tile_n % compression:
            raise ValueError(f"compression {compression} does not divide tile_n {tile_n}; use one that does")
    rows, tiles = trace.overflows(tile_n, compressions)
    compression = np.array(compressions)
    columns = {"layer": np.arange(trace.num_layers)[:, None], "compression": compression}
    columns |= {"capacity": tile_n // compression - 1, "overflow_rows": rows / trace.num_tokens}
    columns["overflow_tiles"] = tiles / (trace.num_tokens * -(-trace.intermediate_size // tile_n))
    return pd.DataFrame({name: np.broadcast_to(part, rows.shape).reshape(-1) for name, part in columns.items()})


def layer_findings(
    paper: pd.DataFrame,
    sparse: pd.DataFrame,
    dense: pd.DataFrame,
    sparsest: pd.DataFrame,
    overflow: pd.DataFrame,
    reason: str,
) -> list[tuple]:
    """Return rows for `compare`: where the paper finds activity, and where we do.

    paper: `results.paper()`; sparse, dense, sparsest: `per_layer` or `logged_layers` at the recommended level, without L1 and
    at a level beyond use; overflow: `tile_overflow` at the recommended level; reason: why a difference is to be expected.
    A peak agrees when it lies within a quarter of the depth of the paper's.
    """
    theirs = paper.set_index("metric")["value"]
    peaks = paper[paper["metric"] == "peak_layer"].set_index("l1")["value"]
    depth, num_layers = 28, len(sparse)

    def peak(name: str, table: pd.DataFrame, printed: str) -> tuple:
        at, place = int(table["mean"].idxmax()), float(printed.strip("~")) / (depth - 1)
        near = abs(at / max(num_layers - 1, 1) - place) < 0.25
        return name, f"{printed} of {depth}", f"{at} of {num_layers}", near, reason

    least = sorted(int(layer) for layer in sparse.nsmallest(2, "mean")["layer"])
    two = sorted(int(layer) for layer in sparsest.nlargest(2, "mean")["layer"])
    ratio, over = sparse["max_over_mean"].min(), overflow[overflow["compression"] == theirs["compression_factor"]]
    over = over["overflow_rows"].mean()
    independent = "neurons do not fire independently"
    return [
        ("least active layers", theirs["least_active_layers"], least, least == [0, 1], reason),
        peak("peak layer, recommended level", sparse, peaks[2e-5]),
        peak("peak layer, L1 = 0", dense, peaks[0]),
        ("peak layers, a level beyond use", theirs["peak_layers"], two, two[1] == num_layers - 1, reason),
        ("maximum over mean, in every layer", theirs["max_over_mean_nonzeros_per_layer"], ratio, ratio > 10, reason),
        ("tokens with a tile that overflows", theirs["overflow_probability"], over, over == 0, independent),
    ]


def token_findings(paper: pd.DataFrame, tokens: pd.DataFrame, positions: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: which tokens and positions are active in the paper, and here.

    paper: `results.paper()`; tokens: `per_token`; positions: `by_position`; reason: why a difference is to be expected.
    """
    theirs = paper.set_index("metric")["value"]
    mean = positions["mean_active"]
    first, later = mean.iloc[0], mean.iloc[len(mean) // 2 :].mean()
    names = [token.strip() or repr(token) for token in tokens["token"]]
    found = f"{first:.3g} at the first position, {later:.3g} over the second half"
    falls = first == mean.max() and first > later
    return [
        ("lowest activity", theirs["lowest_nnz_tokens"], ", ".join(names[:6]), None, reason),
        ("highest activity", theirs["highest_nnz_tokens"], ", ".join(names[-6:]), None, reason),
        ("activity and position", theirs["position_trend"], found, falls, reason),
    ]


# --- questions about neurons ----------------------------------------------------------------------
# These need a trace: an aggregate does not keep which neurons fired for which token.


def specific(
    trace: twell.Trace, to: str = "token", min_fires: int = 8, min_count: int = 8, skip_first: bool = True
) -> pd.DataFrame:
    """Return for each neuron the token or the position that it is most specific to, the most specific first.

    to: "token" or "position". Columns: layer, neuron; token (or position); fires, the neuron's firings; count, occurrences of the
    token; both; share = both / fires; coverage = both / count; lift, share over the token's frequency; phi, the correlation
    of "fires" with "is this token", 1 where each implies the other. Neurons with fewer than min_fires firings and tokens with
    fewer than min_count occurrences have no row. skip_first leaves out the first token of each sequence, whose activity
    is unlike all others (for positions it stays). Raises ValueError for another `to`. Ours.
    """
    if to not in ("token", "position"):
        raise ValueError(f"to is {to!r}; use 'token' or 'position'")
    kept = np.flatnonzero(trace.position > 0) if skip_first and to == "token" else np.arange(trace.num_tokens)
    labels, which, count = np.unique(
        (trace.token_ids if to == "token" else trace.position)[kept], return_inverse=True, return_counts=True
    )
    onehot = scipy.sparse.csr_array((np.ones(len(kept)), (which, np.arange(len(kept)))), (len(labels), len(kept)))
    tables = []
    for layer in range(trace.num_layers):
        active = _active(trace, layer)[kept]
        fires = np.bincount(active.indices, minlength=trace.intermediate_size)
        both = (onehot @ active).tocoo()
        label, neuron, n = both.row, both.col, both.data
        enough = (fires[neuron] >= min_fires) & (count[label] >= min_count)
        label, neuron, n = label[enough], neuron[enough], n[enough]
        phi = _phi(n, fires[neuron], count[label], len(kept))
        best = np.lexsort(
            (label, -phi, neuron)
        )  # of each neuron the first: highest phi, of equal ones the lowest label
        best = best[np.unique(neuron[best], return_index=True)[1]]
        label, neuron, n, phi = label[best], neuron[best], n[best], phi[best]
        columns = {"layer": layer, "neuron": neuron, to: labels[label], "fires": fires[neuron], "count": count[label]}
        columns |= {"both": n.astype(np.int64), "share": n / fires[neuron], "coverage": n / count[label]}
        columns |= {"lift": n / fires[neuron] * len(kept) / count[label], "phi": phi}
        tables.append(pd.DataFrame(columns))
    table = pd.concat(tables) if tables else pd.DataFrame(columns=["layer", "neuron", to, "phi"])
    if to == "token":
        strings = dict(zip(trace.token_ids.tolist(), trace.strings, strict=True))
        table["token"] = table["token"].map(strings)
    return table.sort_values(["phi", "layer", "neuron"], ascending=[False, True, True], ignore_index=True)


def together(
    trace: twell.Trace, layer: int, other: int | None = None, min_fires: int = 8, top: int = 100
) -> pd.DataFrame:
    """Return the pairs of neurons of a layer (or of two layers) that fire together most, by falling correlation.

    Columns: layer, neuron, other_layer, other; fires and other_fires; both, tokens that activate both; expected, what
    independence would give; jaccard, both over either; phi, the correlation of the two firing. First tokens of sequences
    are left out, at which many neurons fire at once; so are neurons with fewer than min_fires firings. At most `top` rows.
    Raises IndexError for a layer that does not exist. Ours.
    """
    kept = np.flatnonzero(trace.position > 0)
    other_layer = layer if other is None else other
    a, b = (_active(trace, n)[kept] for n in (layer, other_layer))
    fires, other_fires = (np.bincount(m.indices, minlength=trace.intermediate_size) for m in (a, b))
    pairs = (a.T @ b).tocoo()
    first, second, both = pairs.row, pairs.col, pairs.data
    enough = (fires[first] >= min_fires) & (other_fires[second] >= min_fires)
    if layer == other_layer:
        enough &= first < second
    first, second, both = first[enough], second[enough], both[enough]
    n, m = fires[first], other_fires[second]
    table = {"layer": layer, "neuron": first, "other_layer": other_layer, "other": second, "fires": n, "other_fires": m}
    table |= {"both": both.astype(np.int64), "expected": n * m / max(len(kept), 1), "jaccard": both / (n + m - both)}
    table = pd.DataFrame(table | {"phi": _phi(both, n, m, len(kept))})
    return table.sort_values(["phi", "neuron", "other"], ascending=[False, True, True], ignore_index=True).head(top)


def surprise(trace: twell.Trace, layers: Sequence[int] | None = None) -> pd.DataFrame:
    """Return each token's activity and surprise: sequence, position, token, active, surprise, next_surprise.

    active: mean over `layers` (default: all). surprise: -log p of the token given those before it, nats; next_surprise:
    of the token after it, which is what the model predicts here. NaN at the first and the last of a sequence. Ours.
    """
    following = np.append(trace.sequence[1:] == trace.sequence[:-1], False)
    active = trace.counts() if layers is None else trace.counts()[list(layers)]
    columns = {"sequence": trace.sequence, "position": trace.position, "token": trace.strings}
    columns |= {"active": active.mean(axis=0), "surprise": -trace.logprob}
    columns["next_surprise"] = np.where(following, np.append(-trace.logprob[1:], np.nan)[: trace.num_tokens], np.nan)
    return pd.DataFrame(columns)


def surprise_correlation(trace: twell.Trace, block: int = 64, draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Return how activity goes with surprise, layer by layer and for their mean: correlations with 95% intervals.

    Columns: layer (-1: the mean over layers), of ("surprise" or "next_surprise", see `surprise`), n (tokens), spearman, low,
    high: Spearman's rank correlation with its interval, from `draws` bootstrap samples of blocks of at most `block`
    consecutive tokens of one sequence, since tokens near each other are no independent witnesses. First
    tokens are left out. low and high are NaN where there are fewer than 8 blocks. Ours.
    """
    table = surprise(trace)
    kept = np.flatnonzero(trace.position > 0)
    blocks = np.unique(np.stack([trace.sequence, trace.position // block])[:, kept], axis=1, return_inverse=True)[1]
    counts = np.concatenate([trace.counts(), table["active"].to_numpy()[None]])[:, kept]
    names = [*range(trace.num_layers), -1]
    rows = []
    for of in ("surprise", "next_surprise"):
        values = table[of].to_numpy()[kept]
        known = ~np.isnan(values)
        where = np.unique(blocks[known], return_inverse=True)[1]
        number = where.max(initial=-1) + 1
        y = scipy.stats.rankdata(values[known])
        weights = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / max(number, 1)), draws)
        for name, active in zip(names, counts, strict=True):
            x = scipy.stats.rankdata(active[known])
            # Six sums of each block are all that a correlation of any sample of blocks needs.
            sums = np.stack([np.bincount(where, part, number) for part in (x * 0 + 1, x, y, x * x, y * y, x * y)])
            low, high = np.nan, np.nan
            if number >= 8:
                low, high = np.nanquantile(_correlation(*(weights @ sums.T).T), [0.025, 0.975])
            rows.append((name, of, len(x), float(_correlation(*sums.sum(axis=1))), low, high))
    return pd.DataFrame(rows, columns=["layer", "of", "n", "spearman", "low", "high"])


def by_surprise(table: pd.DataFrame, of: str = "surprise", bins: int = 10) -> pd.DataFrame:
    """Return the activity in equally filled bins of surprise: low, high, surprise, active, q25, q75, n.

    table: `surprise`; of: its column to bin by, from low to high in a bin; surprise and active are means, q25 and q75
    quartiles of active. First tokens are left out. Ours.
    """
    known = table[(table["position"] > 0) & table[of].notna()]
    bin_of = pd.qcut(known[of], bins, labels=False, duplicates="drop")
    groups = known.groupby(bin_of)
    columns = {"low": groups[of].min(), "high": groups[of].max(), "surprise": groups[of].mean()}
    columns |= {"active": groups["active"].mean(), "n": groups.size()}
    columns |= {f"q{percent}": groups["active"].quantile(percent / 100) for percent in (25, 75)}
    return pd.DataFrame(columns).reset_index(drop=True)


def _active(trace: twell.Trace, layer: int) -> scipy.sparse.csr_array:
    """1 where a neuron is active, whatever its value: [T, N]."""
    h = trace.layer(layer)
    return scipy.sparse.csr_array((np.ones(len(h.data)), h.indices, h.indptr), h.shape)


def _phi(both: np.ndarray, first: np.ndarray, second: np.ndarray, total: int) -> np.ndarray:
    """The correlation of two yes-or-no properties with these counts; NaN where one is always or never so."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (both * total - first * second) / np.sqrt(first * second * (total - first) * (total - second))


def _correlation(
    n: np.ndarray, x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray, xy: np.ndarray
) -> np.ndarray:
    """Pearson's correlation from sums."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))


# --- formats ------------------------------------------------------------------------------------
# twell.format needs torch, whose import takes seconds, and nothing above does: it is imported where it is
# used.


def format_cells(dense: np.ndarray, tile_n: int, compression: int, ell_width: int) -> pd.DataFrame:
    """Return a small matrix packed in each format, cell by cell, to be drawn (Fig. 1).

    dense [M, N] float32. Columns: format ("Dense", "ELL", "TwELL", "Hybrid"); part of that format; row and
    slot of the cell within the part; token, the row of `dense` it belongs to; kind ("value", "count",
    "unused", "zero"); label, the column in `dense` of a value, the number in a count, -1 otherwise. TwELL is
    the one-matrix form. Read from the packed objects.
    """
    import torch

    from twell.format import ELL, Hybrid, PackedTwELL

    matrix = torch.from_numpy(dense).bfloat16()
    ell = ELL.pack(matrix)
    twell = PackedTwELL.pack(matrix, tile_n, compression)
    hybrid = Hybrid.pack(matrix, ell_width)

    def dense_row(row: torch.Tensor) -> list[tuple[str, int]]:
        return [("value", column) if value else ("zero", -1) for column, value in enumerate(row.tolist())]

    def slot_row(indices: torch.Tensor, count: int) -> list[tuple[str, int]]:
        return [("value", i) if slot < count else ("unused", -1) for slot, i in enumerate(indices.tolist())]

    def ell_part(ell: ELL) -> list[list[tuple[str, int]]]:
        return [
            [("count", count), *slot_row(i, count)] for i, count in zip(ell.indices, ell.counts.tolist(), strict=True)
        ]

    def twell_row(indices: torch.Tensor, counts: torch.Tensor) -> list[tuple[str, int]]:
        tiles = zip(indices, counts.tolist(), strict=True)
        return [cell for i, count in tiles for cell in [("count", count), *slot_row(i, count)]]

    everyone = range(len(dense))
    slots = hybrid.slot.tolist()
    short = [token for token in everyone if slots[token] >= 0]
    long = [token for token in everyone if slots[token] < 0]
    tiles = [twell_row(i, counts) for i, counts in zip(twell.indices, twell.counts, strict=True)]
    parts = [
        ("Dense", "all rows", everyone, [dense_row(row) for row in matrix]),
        ("ELL", "all rows", everyone, ell_part(ell)),
        ("TwELL", "all rows", everyone, tiles),
        (
            "TwELL",
            "overflow rows",
            twell.overflow_rows.tolist(),
            [dense_row(row) for row in twell.overflow_values],
        ),
        ("Hybrid", "ELL rows", short, ell_part(hybrid.ell)),
        ("Hybrid", "backup rows", long, [dense_row(hybrid.backup[~slots[token]]) for token in long]),
    ]
    return pd.DataFrame(
        [
            (name, part, row, slot, token, kind, label)
            for name, part, tokens, rows in parts
            for row, (token, cells) in enumerate(zip(tokens, rows, strict=True))
            for slot, (kind, label) in enumerate(cells)
        ],
        columns=["format", "part", "row", "slot", "token", "kind", "label"],
    )


def format_bytes(
    num_tokens: int,
    intermediate_size: int,
    active: Sequence[float],
    tile_n: int = 256,
    compressions: Sequence[int] = (8, 4, 2),
    ell_width: int = 128,
    spread: float = 1.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the bytes of each format as activations grow denser, from packing random bf16 matrices (Fig. 1).

    For each mean number of active neurons in `active`, a matrix [num_tokens, intermediate_size] is drawn
    whose rows are uneven as the paper reports them: their means are lognormal with standard deviation
    `spread` of the logarithm (at 1 the longest of 1,000 rows is about ten times the mean). Which neurons are
    active is independent, as TwELL hopes. Columns: active and active_share as drawn, format, nbytes (of all
    tensors held, overflow and backup rows included), relative (to dense bf16).
    """
    import torch

    from twell.format import ELL, Hybrid, PackedTwELL

    generator = np.random.default_rng(seed)
    rows = []
    for mean in active:
        row_means = generator.lognormal(np.log(mean) - spread**2 / 2, spread, (num_tokens, 1))
        mask = generator.random((num_tokens, intermediate_size), dtype=np.float32) < row_means / intermediate_size
        dense = torch.from_numpy(mask).bfloat16()
        packed = {
            "Dense": dense,
            "ELL": ELL.pack(dense),
            f"Hybrid, width {ell_width}": Hybrid.pack(dense, ell_width),
        }
        for compression in compressions:
            packed[f"TwELL, C = {compression}"] = PackedTwELL.pack(dense, tile_n, compression)
        drawn = mask.sum() / num_tokens
        for name, form in packed.items():
            rows.append((drawn, drawn / intermediate_size, name, form.nbytes, form.nbytes / dense.nbytes))
    return pd.DataFrame(rows, columns=["active", "active_share", "format", "nbytes", "relative"])


# --- notebooks ----------------------------------------------------------------------------------


def compare(rows: Iterable[tuple[str, Any, Any, bool | None, str]]) -> pd.DataFrame:
    """Return the "paper | ours" table of a notebook.

    rows: (finding, paper, ours, whether they agree or None where that cannot be said, reason if they do not).
    Columns: finding, paper, ours, verdict ("agrees", "differs" or "not comparable"), reason (empty where they
    agree). Numbers are printed with three digits, bool as yes or no.
    """

    def show(value: Any) -> str:
        if isinstance(value, bool | np.bool):
            return "yes" if value else "no"
        return f"{value:.3g}" if isinstance(value, int | float | np.number) else str(value)

    verdicts = {True: "agrees", False: "differs", None: "not comparable"}
    table = []
    for finding, paper, ours, agrees, reason in rows:
        verdict = verdicts[None if agrees is None else bool(agrees)]
        table.append((finding, show(paper), show(ours), verdict, "" if agrees else reason))
    return pd.DataFrame(table, columns=["finding", "paper", "ours", "verdict", "reason"])


# --- speed of the layer (ours) ------------------------------------------------------------------

BASELINE = "dense torch.compile"  # what every speed-up is over
# What makes two measured rows the same case, together with `active`; rows of kernels have no mode and weight_sets.
CASE = ["tokens", "hidden_size", "intermediate_size", "gated", "dtype", "pattern", "device", "mode", "weight_sets"]
STEP_CASE = "model num_layers hidden_size intermediate_size num_heads vocab_size gated context micro_batch".split()
STEP_CASE += ["tokens", "precision", "checkpoint_activations", "profile", "device"]
MODEL_CASE = "model num_layers hidden_size intermediate_size num_heads vocab_size gated dtype profile sdpa".split()
MODEL_CASE += ["batch", "context", "tokens", "device"]
CALL = ["commit", "command", "date"]  # a ratio is only taken within one call: absolute times drift
WRITTEN_BY = {"training.csv": "twell measure ffn --backward", "train_step.csv": "twell measure train-step"}
WRITTEN_BY |= dict.fromkeys(("model.csv", "model_layers.csv", "model_parts.csv", "decode.csv"), "twell measure model")
SAME_ACTIVE = 0.01  # the same seed gives the same activity but for rounding; levels of a grid are further apart


def _case_of(rows: pd.DataFrame) -> list[str]:
    return [column for column in CASE if column in rows]


def _check_rows(rows: pd.DataFrame, file: str, columns: Sequence[str], or_empty: Sequence[str] = ()) -> None:
    missing = [column for column in (*columns, *or_empty) if column not in rows]
    if missing:
        command = WRITTEN_BY.get(file, "twell measure ffn")
        raise ValueError(f"rows of {file} need the columns {', '.join(missing)}; `{command}` writes such rows")
    if rows.empty:
        raise ValueError(f"{file} has no row")
    empty = [column for column in columns if rows[column].isna().any()]
    if empty:
        raise ValueError(f"{file} has empty cells in {', '.join(empty)}, which every row needs")


def _newest(rows: pd.DataFrame, case: list[str]) -> pd.DataFrame:
    """Of each case, with `active` the same within SAME_ACTIVE, the rows of the newest date."""
    ordered = rows.sort_values("active", kind="stable")
    steps = ordered.groupby(case)["active"].transform(lambda active: (active.diff() > SAME_ACTIVE * active).cumsum())
    newest = ordered.groupby([*case, steps.rename("level")])["date"].transform("max")
    return ordered[ordered["date"] == newest].sort_index()


def _beside_dense(rows: pd.DataFrame, file: str, case: list[str], compared: Sequence[str]) -> pd.DataFrame:
    """Rows of the newest call of each case, each with `compared` of dense torch.compile as NAME_dense, and its speed-up."""
    _check_rows(rows, file, [*case, *CALL, "active", "provider", "p50"], [name for name in compared if name != "p50"])
    wrong = rows[rows["p50"] <= 0]
    if len(wrong):
        first = wrong.iloc[0]
        raise ValueError(f"p50 of {first['provider']} is {first['p50']:g} ms on {first['date']}; a time is above 0")
    call = [*case, *CALL, "active"]
    rows = rows.drop_duplicates([*call, "provider"], keep="last")
    dense = rows.loc[rows["provider"] == BASELINE, [*call, *compared]]
    table = rows.merge(dense, on=call, how="left", suffixes=("", "_dense"))
    alone = table["p50_dense"].isna()
    if alone.any():
        first = table[alone].iloc[0]
        said = f"{alone.sum()} of {len(table)} rows have no {BASELINE} of the same case and call beside them"
        said += f", the first: {first['provider']} at {first['tokens']} tokens on {first['date']}"
        if alone.all():
            raise ValueError(said)
        warnings.warn(f"left out: {said}", stacklevel=3)
    table = _newest(table[~alone], case)
    table["speedup"] = table["p50_dense"] / table["p50"]
    table["energy_per_token"] = table["energy"] / table["tokens"]
    table["energy_change"] = 100 * (table["energy"] / table["energy_dense"] - 1)
    return table.drop(columns="energy_dense").reset_index(drop=True)


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/ffn.csv, each with its speed-up over dense torch.compile in the same case and call.

    A case measured by several calls is that of the newest. Added columns: p50_dense (ms), speedup (p50_dense / p50),
    energy_per_token (mJ) and energy_change (% of dense torch.compile), both NaN where no energy was measured. Rows
    without dense torch.compile beside them are left out with a warning that counts them. Raises ValueError for
    rows that lack columns or their values, for a time that is not positive, and when no row is left. Ours.
    """
    return _beside_dense(rows, "ffn.csv", CASE, ["p50", "energy"])


def training_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/training.csv, each beside dense torch.compile in the same case and call.

    Added columns as in `speedups`, of forward and backward together, and forward_speedup, of the forward pass alone;
    held_share and peak_share, held and peak in % of dense. Left out and raised: as there. Paper: the layer's part in Fig. 5.
    """
    case = [column for column in CASE if column not in ("mode", "weight_sets")]
    table = _beside_dense(rows, "training.csv", case, ["p50", "energy", "forward", "held", "peak"])
    table["forward_speedup"] = table.pop("forward_dense") / table["forward"]
    for name in ("held", "peak"):
        table[f"{name}_share"] = 100 * table[name] / table.pop(f"{name}_dense")
    return table


def training_crossover(table: pd.DataFrame, provider: str = "triton union") -> float:
    """Return up to how many active neurons a sparse training step is faster than dense, whatever the case.

    table: `training_speedups`. The least over the cases of where the speed-up falls below 1 (`crossovers`); a case that is
    faster at every level counts with its highest one, which is as far as was measured, and one that is slower at every
    level with 0. Raises ValueError for a table without the provider. Ours.
    """
    found = crossovers(table[table["provider"] == provider])
    if found.empty:
        raise ValueError(f"the table has no row of {provider!r} with active neurons")
    faster = found["verdict"].str.startswith("faster")
    return float(found["crossover"].fillna(found["highest"].where(faster, 0.0)).min())


def step_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/train_step.csv, each beside the dense step with compiled layers of the same case and call.

    Added columns as in `speedups`, with tokens (of a step), and peak_change (% of dense). Left out and raised: as there.
    Paper: Fig. 5 and Table 1.
    """
    _check_rows(rows, "train_step.csv", ["micro_batch", "context"])
    rows = rows.assign(tokens=rows["micro_batch"] * rows["context"])
    table = _beside_dense(rows, "train_step.csv", STEP_CASE, ["p50", "energy", "peak"])
    table["peak_change"] = 100 * (table["peak"] / table.pop("peak_dense") - 1)
    return table


def model_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/model.csv, forward passes, each beside dense with compiled layers in the same case and call.

    Added columns as in `speedups`, with peak_change (% of dense), and, the idle power taken off, energy_net (mJ a token) and
    energy_net_change (% of dense). Left out and raised: as there. Paper: Table 1, Fig. 4.
    """
    table = _beside_dense(rows, "model.csv", [*MODEL_CASE, "mode"], ["p50", "energy", "peak"])
    table["peak_change"] = 100 * (table["peak"] / table.pop("peak_dense") - 1)
    dense = table["energy"] / (1 + table["energy_change"] / 100) - table["idle"] * table["p50_dense"]
    net = table["energy"] - table["idle"] * table["p50"]
    return table.assign(energy_net=net / table["tokens"], energy_net_change=100 * (net / dense - 1))


def decode_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/decode.csv, each beside dense with compiled layers in the same case and call.

    Added columns as in `speedups`; tokens are those of a step, one for each document. Left out and raised: as there. Ours.
    """
    return _beside_dense(rows, "decode.csv", [*MODEL_CASE, "steps"], ["p50", "energy"])


def level_gains(table: pd.DataFrame, by: str = "energy_change") -> pd.DataFrame:
    """Return what compiled providers gain over dense at each level of activity, most active first (Figs 4, 5).

    table: `model_speedups` of one model and batch, or `step_speedups`. Columns: active, provider, faster (% of dense), saved (the
    fall of `by`, in % of dense; NaN where it was not measured), device. Raises ValueError for several models or batches.
    """
    cases = table[["model", "tokens"]].drop_duplicates()
    if len(cases) > 1:
        raise ValueError(f"levels are compared of one model and batch; this table has {len(cases)}")
    found = table[table["provider"].str.endswith("torch.compile") & (table["provider"] != BASELINE)]
    found = found.assign(faster=100 * (found["speedup"] - 1), saved=-found[by])
    found = found.sort_values(["active", "provider"], ascending=[False, True], ignore_index=True)
    return found[["active", "provider", "faster", "saved", "device"]]


def layer_contributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/model_layers.csv with the time that each layer saves (Figs 6, 10, 11).

    Of each case and level of activity (the column level, a mean over layers) the newest call that timed layers is taken. Added
    columns: saved and auto_saved, ms that the sparse path and "auto" take less than dense for the feed-forward layer, negative
    where they take longer. Raises ValueError for rows that lack columns and when none has times.
    """
    _check_rows(
        rows, "model_layers.csv", [*MODEL_CASE, "level", "layer", "active", "date"], ["dense", "sparse", "auto"]
    )
    timed = rows[rows[["dense", "sparse", "auto"]].notna().all(axis=1)]
    if timed.empty:
        raise ValueError("model_layers.csv has no times; `twell measure model --layers` measures them")
    levels = timed.rename(columns={"level": "active", "active": "of_layer"})
    table = timed.loc[_newest(levels, MODEL_CASE).index]
    saved, auto = table["dense"] - table["sparse"], table["dense"] - table["auto"]
    return table.assign(saved=saved, auto_saved=auto).reset_index(drop=True)


def layers_at(table: pd.DataFrame, level: float, most: float = 2.0) -> pd.DataFrame:
    """Return of `layer_contributions` the level nearest to `level` by ratio; no rows where none is within a factor `most`."""
    distance = np.log(table["level"] / level).abs()
    near = (distance == distance.min()) & (distance <= np.log(most))
    return table[near].reset_index(drop=True)


def correlation(table: pd.DataFrame, x: str = "active", y: str = "saved") -> float:
    """Return Pearson's r of two columns; NaN where one of them is constant, or with fewer than two rows."""
    a, b = table[x].to_numpy(float), table[y].to_numpy(float)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan
    return float(np.corrcoef(a, b)[0, 1])


def layer_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return where the time of one decoder layer goes, from rows of data/bench/model_parts.csv: a row a provider.

    Of each case the newest call is taken. Columns: those of the case and active, provider, a column a part in ms, total, speedup
    (dense over it) and limit: the speed-up that Amdahl's law leaves, if up and down took no time. Raises ValueError for
    rows that lack columns.
    """
    columns = [*MODEL_CASE, "active", "provider", "part", "ms", "date"]
    _check_rows(rows, "model_parts.csv", columns)
    newest = _newest(rows, MODEL_CASE)
    index = [*MODEL_CASE, "active", "provider"]
    parts = list(dict.fromkeys(newest["part"]))
    table = newest.pivot_table(index=index, columns="part", values="ms", aggfunc="last")[parts]
    table["total"] = table.sum(axis=1)
    table = table.rename_axis(columns=None).reset_index()
    dense = table.loc[table["provider"] == BASELINE, [*index[:-1], "total", "up and down"]]
    dense = dense.assign(limit=dense["total"] / (dense["total"] - dense["up and down"]))
    table = table.merge(dense.drop(columns="up and down"), on=index[:-1], suffixes=("", "_dense"))
    return table.assign(speedup=table.pop("total_dense") / table["total"])


# Of Table 1: the paper's metric, what it is called here, and its unit.
SCALE = {
    "forward_throughput": ("forward speed", "tokens/ms"),
    "energy_per_token": ("forward energy", "mJ/token"),
    "training_throughput": ("training speed", "tokens/ms"),
    "training_peak_memory": ("training memory", "GB"),
}


def scale_table(paper: pd.DataFrame, models: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's Table 1 beside ours, a row a quantity of SCALE and model.

    paper: `results.paper()`; models: `model_speedups` of one batch, or empty; steps: `step_speedups` of one micro-batch, or empty.
    Columns: quantity, unit, model; paper_dense, paper_sparse, paper_change (%), paper_device; dense, sparse, change, device and
    profile of ours, NaN and empty where not measured: with compiled layers, in forward passes by "auto", of several levels of
    activity at the one nearest to the paper's.
    """
    if len(models):
        models = models.assign(forward_throughput=models["tokens"] / models["p50"])
    if len(steps):
        speed, peak = steps["tokens"] / steps["p50"], steps["peak"] / 1e9
        steps = steps.assign(training_throughput=speed, training_peak_memory=peak)
    known = paper[(paper["metric"] == "avg_nonzeros") & (paper["l1"] == 2e-5)]
    active = known.groupby("model")["value"].first().astype(float)
    table_1 = paper[paper["source"] == "Table 1"]
    changes = table_1[table_1["sparse"]].set_index(["metric", "model"])["value"]
    rows = []
    for metric, (quantity, unit) in SCALE.items():
        for model, printed in table_1[table_1["metric"] == metric].groupby("model", sort=False):
            theirs = printed.set_index("sparse")["value"].astype(float)
            row = {"quantity": quantity, "unit": unit, "model": model}
            row |= {"paper_dense": theirs[False], "paper_sparse": theirs[True]}
            row |= {"paper_change": float(changes[f"{metric}_change", model])}
            row |= {"paper_device": printed["hardware"].iloc[0]}
            ours = steps if metric.startswith("training") else models
            rows.append(row | _ours(ours, model, metric, active.get(model, np.nan)))
    return pd.DataFrame(rows)


def _ours(table: pd.DataFrame, model: str, column: str, active: float) -> dict:
    """dense, sparse, change and device of one model's `column`, at the level of activity nearest to `active`."""
    nothing = {"dense": np.nan, "sparse": np.nan, "change": np.nan, "device": "", "profile": ""}
    if table.empty:
        return nothing
    rows = table[table["model"].str.upper() == model.upper()]
    distance = np.log(rows["active"] / active).abs().fillna(0)
    rows = rows[distance <= distance.min() + SAME_ACTIVE]
    dense = rows.loc[rows["provider"] == BASELINE]
    sparse = rows[rows["provider"].isin(["auto torch.compile", "triton union torch.compile"])]
    if dense.empty or sparse.empty:
        return nothing
    first, second = dense.iloc[-1], sparse.iloc[-1]
    change = 100 * (second[column] / first[column] - 1)
    about = {"device": second["device"], "profile": second["profile"]}
    return {"dense": first[column], "sparse": second[column], "change": change} | about


def model_findings(
    paper: pd.DataFrame,
    scale: pd.DataFrame,
    models: pd.DataFrame,
    decode: pd.DataFrame,
    layers: pd.DataFrame,
    dense_level: float = 911,
) -> list[tuple]:
    """Return rows for `compare`: the paper's gains of whole models, and ours.

    paper: `results.paper()`; scale: `scale_table`; models: `model_speedups`; decode: `decode_speedups`; layers:
    `layer_contributions` at the recommended level; each of the last three may be empty. dense_level: active neurons without
    L1, where "auto" must not lose. A gain agrees where it has the paper's sign; what was not measured is None or NaN.
    """
    why = "another GPU; the activity is imposed"
    rows = []
    for row in scale.itertuples():
        agrees = None if np.isnan(row.change) else bool(np.sign(row.change) == np.sign(row.paper_change))
        larger = row.quantity == "training memory" and row.paper_change > 0
        reason = "the paper's sparse run had a larger micro-batch" if larger else why
        rows.append((f"{row.model}, {row.quantity}: % over dense", row.paper_change, row.change, agrees, reason))
    theirs = paper.loc[paper["metric"] == "pearson_layer_nnz_vs_speedup", "value"].item()
    r = correlation(layers) if len(layers) else np.nan
    rows.append(("Pearson's r, a layer's activity and time saved", theirs, r, None if np.isnan(r) else r < -0.95, why))
    lost, gained = np.nan, np.nan
    if len(models):
        near = models[(models["active"] > dense_level / 1.25) & (models["provider"] == "auto torch.compile")]
        lost = 100 * (near["speedup"].min() - 1)
    if len(decode):
        gained = 100 * (decode["speedup"].max() - 1)
    rows.append(
        (f"forward with {dense_level:g} active: auto, % over dense", "slower", lost, None, "it has no such choice")
    )
    rows.append(("decoding: largest gain, % over dense", "–", gained, None, "the paper has no decoding"))
    return rows


def crossovers(table: pd.DataFrame) -> pd.DataFrame:
    """Return up to how many active neurons each Triton path is faster than dense, from `speedups`; one row a line.

    Columns: those of the case, provider, best (the largest speed-up), lowest and highest (the active neurons measured),
    crossover: where the speed-up first falls below 1 as activity rises, interpolated in the logarithms of
    both (NaN when it does not fall from above), and verdict, the same in words. Levels with 0 active neurons, which
    have no logarithm, are left out. Ours.
    """
    paths = table[table["provider"].str.startswith("triton ") & (table["active"] > 0)]
    case = _case_of(table)
    found = []
    for keys, line in paths.groupby([*case, "provider"]):
        line = line.sort_values("active")
        active, gain = np.log(line["active"].to_numpy()), np.log(line["speedup"].to_numpy())
        lowest, highest = line["active"].iloc[0], line["active"].iloc[-1]
        falls = np.flatnonzero((gain[:-1] >= 0) & (gain[1:] < 0))
        crossing = np.nan
        if len(falls):
            at = falls[0]
            crossing = np.exp(active[at] + (active[at + 1] - active[at]) * gain[at] / (gain[at] - gain[at + 1]))
            verdict = f"faster below {crossing:.0f} active"
        elif gain[-1] >= 0:
            verdict = f"faster at {highest:.0f} active, the most measured"
        else:
            verdict = f"slower from {lowest:.0f} active on, the fewest measured"
        found.append((*keys, line["speedup"].max(), lowest, highest, crossing, verdict))
    return pd.DataFrame(found, columns=[*case, "provider", "best", "lowest", "highest", "crossover", "verdict"])


def at_level(table: pd.DataFrame, active: float) -> pd.DataFrame:
    """Return of each case the rows whose active neurons are nearest to `active` (by ratio), from `speedups` or `roofline`.

    What was measured stays in the column active: small batches of the same layer differ from the mean. Ours.
    """
    distance = np.log(table["active"].clip(lower=MIN_LAYER_ACTIVE) / active).abs()
    nearest = distance.groupby([table[column] for column in _case_of(table)]).transform("min")
    return table[distance == nearest].reset_index(drop=True)


def by_case(table: pd.DataFrame, column: str = "speedup") -> pd.DataFrame:
    """Return one column of `speedups` to be read: a row a case, a column a provider, with the day and commit of the call.

    Index: pattern, hidden_size, intermediate_size, gated, tokens, active, mode, weight_sets (of `training_speedups` without
    these two), device, date (the day), commit (7 digits). Providers of which no row has a value are left out. Ours.
    """
    short = table["commit"].str.replace(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", regex=True)
    table = table.assign(date=table["date"].str[:10], commit=short)
    index = ["pattern", "hidden_size", "intermediate_size", "gated", "tokens", "active", "mode", "weight_sets"]
    index = [column for column in index if column in table]
    return table.pivot_table(index=[*index, "device", "date", "commit"], columns="provider", values=column)


def short(cases: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return what a table of `by_case` was measured on ("device day commit", joined by "; "), and it without these levels."""
    levels = [name for name in ("device", "date", "commit") if name in cases.index.names]
    origin = dict.fromkeys(" ".join(map(str, key)) for key in cases.index.to_frame()[levels].to_numpy())
    return "; ".join(origin), cases.droplevel([name for name in (*levels, "weight_sets") if name in cases.index.names])


def forward_findings(paper: pd.DataFrame, table: pd.DataFrame, level: float, tokens: Sequence[int]) -> list[tuple]:
    """Return rows for `compare`: the paper's gains of a forward pass and those of `speedups` (one layer, one pattern).

    paper: `results.paper()`; level: the active neurons to compare at; tokens: the batches that count. What was not
    measured is None or NaN.
    """
    near = at_level(table, level)
    near = near[near["provider"].str.startswith("triton ") & near["tokens"].isin(tokens)]
    gain, saved = (
        paper.loc[paper["metric"] == metric, "value"] for metric in ("max_forward_speedup", "energy_per_token_change")
    )
    best, wins = near["speedup"].max(), None if near.empty else near["speedup"].max() > 1
    whole = "there a whole model on an H100, here the layer alone"
    return [
        (f"faster than dense at {level} active", True, wins, wins, "no path is faster here"),
        ("largest gain in speed, %", gain.item(), 100 * (best - 1), None, whole),
        ("largest change of energy a token, %", saved.min(), near["energy_change"].min(), None, whole),
    ]


def training_findings(paper: pd.DataFrame, table: pd.DataFrame, steps: pd.DataFrame, level: float) -> list[tuple]:
    """Return rows for `compare`: the paper's gains in training, and ours of one layer and of whole steps.

    paper: `results.paper()`; table: `training_speedups` of one layer, or empty; steps: `step_speedups`, or empty; level: the
    active neurons to compare at. Of each model with the paper's name the fastest sparse step counts. What was not measured
    is None or NaN.
    """
    wins, best, held, crossing = None, np.nan, np.nan, np.nan
    if len(table):
        near = at_level(table, level)
        near = near[near["provider"].str.startswith("triton ")]
        wins, best, held = near["speedup"].max() > 1, 100 * (near["speedup"].max() - 1), near["held_share"].min() - 100
        crossing = crossovers(table)["crossover"].max()
    gain = paper.loc[paper["metric"] == "max_training_speedup", "value"].item()
    whole = "there a whole model on an H100, here the layer alone"
    rows = [
        (f"training is faster than dense at {level} active", True, wins, wins, "no path is faster here"),
        ("largest gain in training speed, %", gain, best, None, whole),
        ("least held for the backward pass, % over dense", "–", held, None, "the paper gives a model's peak"),
        ("training is faster than dense below, active neurons", "–", crossing, None, "the paper shows no number"),
    ]
    sparse = steps[steps["provider"].str.startswith("triton ")] if len(steps) else steps
    if sparse.empty:
        return rows
    for name in paper.loc[paper["metric"] == "training_throughput_change", "model"].unique():
        measured = sparse[sparse["model"].str.upper() == name.upper()]
        if measured.empty:
            continue
        first = measured.sort_values("speedup").iloc[-1]
        known = paper[(paper["model"] == name) & (paper["l1"] > 0)].set_index("metric")["value"]
        why = f"another GPU and micro-batch; activity imposed, {first['active']:.0f}"
        faster = known["training_throughput_change"], 100 * (first["speedup"] - 1)
        smaller = known["training_peak_memory_change"], first["peak_change"]
        rows += [(f"step of the {name} model, speed, % over dense", *faster, None, why)]
        rows += [(f"step of the {name} model, peak memory, % over dense", *smaller, None, why)]
    return rows


def roofline(kernels: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/kernels.csv, each with how near its time is to the least its work could take.

    Of each case and provider the newest call is taken. ceilings: rows of data/bench/ceilings.csv; the newest of each
    metric on the kernel's device. Added columns: peak (TFLOP/s) and bandwidth (GB/s), the ceilings; intensity (flop /
    byte) and tflops (achieved TFLOP/s), NaN where the operations or bytes of a kernel are not known; floor (ms), the larger
    of flops / peak and bytes / bandwidth, with share = floor / ms and bound ("compute" or "memory", empty where
    neither is known). A share above 1 is possible where data comes from the cache, which the copy does not use.
    Raises ValueError for rows that lack columns or values, other units, and a device without both ceilings. Ours.
    """
    case = [column for column in CASE if column not in ("mode", "weight_sets")]
    _check_rows(kernels, "kernels.csv", [*case, "active", "provider", "kernel", "ms", "date"], ["flops", "bytes"])
    _check_rows(ceilings, "ceilings.csv", ["metric", "value", "unit", "device", "date"])
    units = {"matmul": "TFLOP/s", "copy bandwidth": "GB/s"}
    for row in ceilings.itertuples():
        if units.get(row.metric, row.unit) != row.unit:
            raise ValueError(f"the ceiling {row.metric!r} is in {row.unit!r}; it has to be in {units[row.metric]}")
    last = (
        ceilings.sort_values("date").groupby(["device", "metric"])["value"].last().unstack().reindex(columns=[*units])
    )
    table = _newest(kernels, [*case, "provider"]).reset_index(drop=True)
    table["peak"], table["bandwidth"] = (table["device"].map(last[metric]) for metric in units)
    without = table.loc[table[["peak", "bandwidth"]].isna().any(axis=1), "device"]
    if len(without):
        raise ValueError(f"ceilings.csv lacks {' or '.join(units)} of {without.iloc[0]}; measure them in the same call")
    compute = table["flops"] / table["peak"] / 1e9  # ms
    memory = table["bytes"] / table["bandwidth"] / 1e6
    table["intensity"] = table["flops"] / table["bytes"]
    table["tflops"] = table["flops"] / table["ms"] / 1e9
    table["floor"] = np.fmax(compute, memory)
    table["share"] = table["floor"] / table["ms"]
    table["bound"] = np.where(table["floor"].isna(), "", np.where(table["floor"] == compute, "compute", "memory"))
    return table


# --- downstream tasks (Table 6) ---------------------------------------------------------------------

MEAN = "paper7"  # the group of tasks whose accuracy is the mean of the seven
TASKS = {  # of lm-eval, as they are called and as paper.yaml calls their metric
    "arc_easy": ("ARC-easy", "arc_easy_accuracy"),
    "arc_challenge": ("ARC-challenge", "arc_challenge_accuracy"),
    "hellaswag": ("HellaSwag", "hellaswag_accuracy"),
    "openbookqa": ("OpenBookQA", "openbookqa_accuracy"),
    "piqa": ("PIQA", "piqa_accuracy"),
    "winogrande": ("WinoGrande", "winogrande_accuracy"),
    "commonsense_qa": ("CommonsenseQA", "commonsenseqa_accuracy"),
    MEAN: ("mean of seven", "mean_task_accuracy"),
}
NEAR_CHANCE = 2.0  # standard errors
EVALUATED = ["model", "parameters", "training_tokens", "l1_coefficient"]  # what tells models apart
COMPUTED = ["backend", "dtype"]  # and how the same model was computed


def evaluations(records: Iterable[dict]) -> pd.DataFrame:
    """Return the accuracies of `results.load_evaluations`, one a row, in the order of the records and their tasks.

    Columns: model, parameters, training_tokens (NaN where not known), l1_coefficient (of a list the mean), backend, dtype, task, metric (lm-eval's: acc; acc_norm, with
    log-likelihoods by the characters of a choice; acc_mutual_info, less the choice's own log-likelihood), items, accuracy and stderr
    (as lm-eval gives them, shares of 1; stderr is NaN for a single item), chance, and verdict: "above chance", "below chance", or "near
    chance" within two standard errors, empty where an error or chance is not known. The task "paper7" is the mean of the
    paper's seven.
    """
    rows = []
    for record in records:
        about = record["model"]
        tokens = about["training_tokens"] or np.nan
        level = float(np.mean(about["l1_coefficient"]))
        origin = about["name"], about["parameters"], tokens, level, record["backend"], record["dtype"]
        for task, facts in record["tasks"].items():
            found = record["lm_eval"]["results"][task]
            for key, accuracy in found.items():
                metric, _, kind = key.partition(",")
                if not metric.startswith("acc") or metric.endswith("_stderr"):
                    continue
                stderr = found[f"{metric}_stderr,{kind}"]
                stderr, chance = (np.nan if value in ("N/A", None) else value for value in (stderr, facts["chance"]))
                verdict = _near_chance(accuracy, stderr, chance)
                rows.append((*origin, task, metric, found["sample_len"], accuracy, stderr, chance, verdict))
    columns = [*EVALUATED, *COMPUTED, "task", "metric", "items", "accuracy", "stderr", "chance", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def _near_chance(accuracy: float, stderr: float, chance: float) -> str:
    if np.isnan(stderr + chance):
        return ""
    if abs(accuracy - chance) <= NEAR_CHANCE * stderr:
        return "near chance"
    return "above chance" if accuracy > chance else "below chance"


def seven_tasks(table: pd.DataFrame) -> pd.DataFrame:
    """Return from `evaluations` the rows of Table 6: acc of the seven tasks and their mean, of models that have them all.

    A model that was evaluated more than once, by several backends or in several types, is there once: with the most items,
    of these rather in fp32, then rather densely, and then as it first stands in the table.
    """
    table = table[(table["metric"] == "acc") & table["task"].isin(TASKS)]
    means = table[table["task"] == MEAN]
    means = means.assign(rounded=means["dtype"] != "float32", sparse=means["backend"] != "dense")
    means = means.sort_values(["items", "rounded", "sparse"], ascending=[False, True, True], kind="stable")
    means = means.drop_duplicates(EVALUATED)[[*EVALUATED, *COMPUTED]]
    rows = table.merge(means, on=[*EVALUATED, *COMPUTED]).sort_values("items", ascending=False, kind="stable")
    return rows.drop_duplicates([*EVALUATED, "task"]).sort_index().reset_index(drop=True)


SIZE = ["parameters", "training_tokens"]  # models that differ in these are not compared with each other


def by_level(seven: pd.DataFrame) -> pd.DataFrame:
    """Return `seven_tasks` with the mean over models of one size, training tokens and level, which differ in their seed.

    Columns: parameters, training_tokens, l1_coefficient, task, models (how many), accuracy, stderr, chance, verdict; by size and level. The
    error is the mean of theirs, not less: all were asked the same items.
    """
    numbers = {"models": ("model", "size")} | {name: (name, "mean") for name in ("accuracy", "stderr", "chance")}
    found = seven.groupby([*SIZE, "l1_coefficient", "task"], dropna=False).agg(**numbers).reset_index()
    found["verdict"] = [_near_chance(*row) for row in found[["accuracy", "stderr", "chance"]].to_numpy()]
    return found


def across_sizes(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` that compare sizes: of each the longest training, densely and at one level of L1.

    That level is the one that most sizes have, of several the lowest; of a size that does not have it, the size's lowest.
    """
    longest = levels.groupby("parameters")["training_tokens"].transform("max")
    levels = levels[longest.isna() | (levels["training_tokens"] == longest)]
    sparse = levels[levels["l1_coefficient"] > 0]
    if sparse.empty:
        return levels
    common = sparse.groupby("l1_coefficient")["parameters"].nunique().idxmax()
    own = sparse.groupby("parameters")["l1_coefficient"].transform(
        lambda has: common if common in set(has) else has.min()
    )
    kept = sparse.index[sparse["l1_coefficient"] == own]
    return levels[(levels["l1_coefficient"] == 0) | levels.index.isin(kept)]


def several_levels(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` whose size and training tokens have more than two levels of L1; if none has, more than one."""
    number = levels.groupby(SIZE, dropna=False)["l1_coefficient"].transform("nunique")
    return levels[number > (2 if (number > 2).any() else 1)]


def paper_tasks(paper: pd.DataFrame) -> pd.DataFrame:
    """Return Table 6, from `results.paper()`, with the columns model, parameters, l1_coefficient, task and accuracy (of 1)."""
    names = {metric: task for task, (_, metric) in TASKS.items()}
    rows = paper[(paper["source"] == "Table 6") & paper["metric"].isin(names)]
    table = rows[["model"]].assign(
        parameters=rows["model"].str.removesuffix("B").astype(float) * 1e9,
        l1_coefficient=rows["l1"].astype(float),
        task=rows["metric"].map(names),
        accuracy=rows["value"].astype(float) / 100,
    )
    return table.reset_index(drop=True)


def backend_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return the largest difference of any accuracy of one model, from `evaluations`: between backends in one type, and between types.

    Rows: a model and type that several backends computed, and a model and backend with several types, which says what rounding alone
    does. Columns: model, between ("backend" or "dtype"), compared (their names), alike (the other one), accuracies (how many were
    compared), difference (of shares of 1).
    """
    rows = []
    for between, same in (COMPUTED, COMPUTED[::-1]):
        for (model, alike), found in table.groupby(["model", same], sort=False):
            wide = found.pivot_table(index=["task", "metric", "items"], columns=between, values="accuracy").dropna()
            if wide.shape[1] > 1 and len(wide):
                largest = (wide.max(axis=1) - wide.min(axis=1)).max()
                rows.append((model, between, ", ".join(wide.columns), alike, len(wide), largest))
    return pd.DataFrame(rows, columns=["model", "between", "compared", "alike", "accuracies", "difference"])


def paper_levels(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy that the paper prints at each level of its gated 1.5B model, columns as of `paper_tasks`."""
    rows = paper[(paper["source"] == "Table 4") & (paper["metric"] == TASKS[MEAN][1]) & paper["gated"].eq(True)]
    values = {"l1_coefficient": rows["l1"].astype(float), "accuracy": rows["value"].astype(float) / 100}
    return pd.DataFrame({"model": rows["model"], "parameters": 1.5e9, **values, "task": MEAN}).reset_index(drop=True)


def accuracies(table: pd.DataFrame) -> pd.DataFrame:
    """Return `evaluations` to be read: a row a model, backend and type, by size and level, a column a task and metric, "accuracy ± error" in %.

    Accuracies that are near chance or below it are in brackets. The first row is chance, the second the number of items (of the first
    model that was asked).
    """
    table = table.sort_values([*SIZE, "l1_coefficient"], kind="stable")
    column = table["task"] + np.where(table["metric"] == "acc", "", ", " + table["metric"])
    not_above = table["verdict"].isin(["near chance", "below chance"])
    cell = (100 * table["accuracy"]).map("{:.1f}".format) + " ± " + (100 * table["stderr"]).map("{:.1f}".format)
    cell = cell.where(~not_above, "(" + cell + ")")
    how = table["backend"] + " " + table["dtype"]
    name = table["model"] + ", " + how + ", L1 = " + table["l1_coefficient"].map("{:g}".format)
    wide = pd.DataFrame({"model": name, "column": column, "cell": cell}).drop_duplicates(["model", "column"])
    wide = wide.pivot(index="model", columns="column", values="cell").loc[name.unique(), column.unique()]
    first = table.assign(column=column).drop_duplicates("column").set_index("column")
    heads = pd.DataFrame([(100 * first["chance"]).map("{:.1f}".format), first["items"].map("{:,}".format)])
    return pd.concat([heads.set_axis(["chance", "items"]), wide]).fillna("").rename_axis(None, axis=1)


def against_dense(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of each sparse model beside that of the dense one (L1 = 0) of its size and training tokens.

    table: `by_level`, or `paper_tasks`. Columns: parameters, l1_coefficient, accuracy, dense, difference; from ours also training_tokens, stderr
    (of the difference, errors taken as independent: too large where both models err alike) and above_chance (either of them).
    """
    same = [column for column in SIZE if column in table]
    means = table[table["task"] == MEAN]
    dense = means[means["l1_coefficient"] == 0]
    both = means[means["l1_coefficient"] > 0].merge(dense, on=same, suffixes=("", "_dense"))
    found = both[[*same, "l1_coefficient", "accuracy"]].assign(
        dense=both["accuracy_dense"], difference=both["accuracy"] - both["accuracy_dense"]
    )
    if "stderr" in both:
        found["stderr"] = np.hypot(both["stderr"], both["stderr_dense"])
        found["above_chance"] = (both[["verdict", "verdict_dense"]] == "above chance").any(axis=1)
    return found


def task_findings(paper: pd.DataFrame, table: pd.DataFrame, differences: pd.DataFrame) -> list[tuple]:
    """Return rows for `compare`: what Table 6 says, and `evaluations` with their `backend_differences`."""
    seven, printed = seven_tasks(table), paper_tasks(paper)
    theirs, ours = against_dense(printed), against_dense(by_level(seven))
    lettered = 100 * printed.loc[printed["task"] == "commonsense_qa", "accuracy"]
    verdicts = seven.loc[seven["task"] == "commonsense_qa", "verdict"]
    at_chance = bool((verdicts != "above chance").all()) if len(verdicts) else None
    found = ", ".join(f"{number} {name}" for name, number in verdicts.value_counts().items()) or "not measured"
    why = "not measured" if at_chance is None else "a model that is above chance"
    what = "CommonsenseQA with lettered choices: at chance, 20%"
    rows = [(what, f"{lettered.min():.1f} to {lettered.max():.1f}%", found, at_chance, why)]
    worst = f"{100 * theirs['difference'].min():+.1f} at the worst"
    for row in ours.itertuples():
        budget = "" if np.isnan(row.training_tokens) else f" after {row.training_tokens / 1e6:.3g} M tokens"
        what = f"mean accuracy of {row.parameters / 1e6:.3g} M parameters{budget} at L1 = {row.l1_coefficient:g} over L1 = 0, points"
        change = f"{100 * row.difference:+.1f} ± {100 * row.stderr:.1f}"
        if not row.above_chance:
            rows.append((what, worst, change, None, "neither is above chance: there is nothing to lose"))
        else:
            agrees = row.difference >= -NEAR_CHANCE * row.stderr
            rows.append((what, worst, change, agrees, "more than two standard errors below dense"))
    if ours.empty:
        rows.append(("mean accuracy of sparse over dense, points", worst, "not measured", None, "no pair of one size"))
    for between, what in (("backend", "backends"), ("dtype", "types of numbers")):
        found = differences[differences["between"] == between]
        if len(found):
            what = f"largest difference between {what}, points, of {found['accuracies'].sum()} accuracies"
            rows.append((what, "–", 100 * found["difference"].max(), None, "ours"))
    return rows
