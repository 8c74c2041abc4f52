"""Quantities of formats, traces and evaluations, named for `claims.yaml` as in `trained`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from twell.analysis.runs import level_name, logged_layers
from twell.analysis.tasks import (
    MEAN,
    NEAR_CHANCE,
    against_dense,
    by_level,
    seven_tasks,
    several_levels,
)

Quantities = dict[str, Any]


def formats(packed: Any, exact: bool, fuzz: pd.DataFrame | None = None) -> Quantities:
    """Return what a tile of TwELL holds and whether nothing is lost.

    packed: a `twell.PackedTwELL`; exact: whether unpacking gave the same bits; fuzz: rows of
    data/bench/fuzz.csv. Errors are relative RMS against fp64, of bf16.
    """
    result = {"slots": packed.values.shape[2], "words": packed.words.shape[1]}
    result["kept"] = "exact" if exact else "not exact"
    if fuzz is not None and len(fuzz):
        training = fuzz["path"].str.startswith("training")
        for name, rows in (("forward", fuzz[~training]), ("backward", fuzz[training])):
            result[f"{name}_cases"] = rows["cases"].iloc[0]
            result[f"{name}_failed"] = rows["failed"].sum()
            of_bf16 = rows.loc[rows["dtype"] == "bfloat16", "worst_relative_rms"]
            result[f"{name}_error"] = of_bf16.max()
    return result


# --- activity ------------------------------------------------------------------------------------


def layers(
    sparse: pd.DataFrame,
    dense: pd.DataFrame,
    sparsest: pd.DataFrame,
    overflow: pd.DataFrame,
    seeds: pd.DataFrame | None = None,
    prefix: str = "",
) -> Quantities:
    """Return where in the model activity is.

    sparse, dense, sparsest: `per_layer` or `logged_layers` at the recommended level, without L1,
    and at a level beyond use; overflow: `tile_overflow` at the recommended level; seeds: the first
    table of other seeds, one under the other with a column run; prefix stands before every name.
    Layers count from 0; _depth is a layer's place from 0 (first) to 1 (last).
    """
    last = len(sparse) - 1
    least = sparse.nsmallest(3, "mean")["layer"].astype(int).tolist()
    two = sorted(sparsest.nlargest(2, "mean")["layer"].astype(int)) if len(sparsest) else []
    tiles = overflow[overflow["compression"] == 8]
    worst = tiles[tiles["overflow_rows"] == tiles["overflow_rows"].max()]
    result = {
        "last": last,
        "ratio_least": sparse["max_over_mean"].min(),
        "ratio_most": sparse["max_over_mean"].max(),
        "overflow": 100 * tiles["overflow_rows"].max(),
        "overflow_layer": worst["layer"].max(),
        "least": ", ".join(map(str, sorted(least))),
        "least_layer": least[0],
        "first_two_least": set(least[:2]) == {0, 1},
        "most_active": sparse["mean"].max(),
    }
    for name, table in (("peak", sparse), ("dense_peak", dense)):
        if len(table):
            peak = int(table.set_index("layer")["mean"].idxmax())
            result |= {name: peak, f"{name}_depth": peak / max(last, 1)}
    if len(two) == 2:
        result |= {"sparsest_peaks": f"{two[0]}, {two[1]}", "sparsest_at_last": two[1] == last}
        result["sparsest_first_depth"] = two[0] / max(last, 1)
    if seeds is not None and len(seeds):
        ratios = seeds.groupby("run", sort=False)["max_over_mean"].min()
        result |= {"seed_ratios": ", ".join(f"{ratio:.1f}" for ratio in ratios)}
        result |= {"seed_ratio_least": ratios.min(), "seed_ratio_most": ratios.max()}
    return {f"{prefix}{name}": value for name, value in result.items()}


def seed_layers(log: pd.DataFrame, intermediate_size: int) -> pd.DataFrame:
    """Return `logged_layers` of each run of a log with a column run, one under the other."""
    tables = []
    for run, rows in log.groupby("run"):
        tables.append(logged_layers(rows, intermediate_size).assign(run=run))
    return pd.concat(tables, ignore_index=True)


def tokens(table: pd.DataFrame, positions: pd.DataFrame, prefix: str = "") -> Quantities:
    """Return which tokens and positions are active; table: `per_token`; positions: `by_position`;
    prefix: before every name.
    """
    names = [token.strip() or repr(token) for token in table["token"]]
    mean = positions["mean_active"]
    first, later = mean.iloc[0], mean.iloc[len(mean) // 2 :].mean()
    result = {
        "first": first,
        "later": later,
        "first_is_most": first == mean.max() and first > later,
        "lowest": ", ".join(names[:6]) or None,
        "highest": ", ".join(names[-6:]) or None,
    }
    return {f"{prefix}{name}": value for name, value in result.items()}


def neurons(
    correlation: pd.DataFrame,
    specific: pd.DataFrame | None = None,
    cost: pd.DataFrame | None = None,
) -> Quantities:
    """Return what single neurons do: tables of `surprise_correlation`, `specific` and
    `trace.silenced_loss`.
    """
    overall = correlation[(correlation["layer"] == -1) & (correlation["of"] == "surprise")]
    result = {}
    if len(overall):
        row = overall.iloc[0]
        result |= {"rank": row["spearman"], "rank_low": row["low"], "rank_high": row["high"]}
    if specific is not None and len(specific):
        row = specific.iloc[0]
        result |= {"layer": int(row["layer"]), "neuron": int(row["neuron"])}
        result |= {"token": row["token"].strip() or repr(row["token"]), "phi": row["phi"]}
    if cost is not None and len(cost):
        result["cost"] = cost["loss_change"].max()
    return result


# --- tasks ---------------------------------------------------------------------------------------


def tasks(table: pd.DataFrame, differences: pd.DataFrame) -> Quantities:
    """Return accuracies of downstream tasks, from `evaluations` and their `backend_differences`.

    Accuracies in %, differences in points. `pairs` are sparse models beside the dense one of their
    size and tokens; `pairs_above` those of which one is above chance; `pairs_lost` those of them
    more than two standard errors below dense. The list of means is of the size with the most levels
    of L1.
    """
    result = {}
    seven = seven_tasks(table)
    pairs = against_dense(by_level(seven))
    if len(pairs):
        above = pairs[pairs["above_chance"].astype(bool)]
        lost = above["difference"] < -NEAR_CHANCE * above["stderr"]
        worst = pairs.loc[pairs["difference"].idxmin()]
        result |= {"pairs": len(pairs), "pairs_above": len(above), "pairs_lost": lost.sum()}
        result |= {"worst": 100 * worst["difference"], "worst_error": 100 * worst["stderr"]}
    asked = seven[seven["task"] == "commonsense_qa"]
    if len(asked):
        result |= {"lettered_least": 100 * asked["accuracy"].min()}
        result |= {"lettered_most": 100 * asked["accuracy"].max()}
        result["lettered_above"] = (asked["verdict"] == "above chance").sum()
    result |= _by_level(table, seven)
    for between in ("backend", "dtype"):
        rows = differences[differences["between"] == between]
        if len(rows):
            result[f"{between}_difference"] = 100 * rows["difference"].max()
            result[f"{between}_accuracies"] = rows["accuracies"].sum()
    return result


def _by_level(table: pd.DataFrame, seven: pd.DataFrame) -> Quantities:
    """Means of the seven tasks and accuracies of continuations by level, of the size with the most
    levels.
    """
    means = several_levels(by_level(seven))
    means = means[means["task"] == MEAN]
    if means.empty:
        return {}
    size = means[["parameters", "training_tokens"]].iloc[-1]
    means = means[(means[["parameters", "training_tokens"]] == size).all(axis=1)]
    result = {
        "task_levels": ", ".join(level_name(level) for level in means["l1_coefficient"]),
        "means": ", ".join(f"{100 * value:.1f}" for value in means["accuracy"]),
        "means_error": 100 * means["stderr"].max(),
        "chance": 100 * means["chance"].iloc[0],
    }
    same = (table[["parameters", "training_tokens"]] == size).all(axis=1)
    for column, value in (("dtype", "float32"), ("backend", "dense"), ("metric", "acc")):
        same &= table[column] == value
    held_out = table[same & (table["task"] == "held_out_continuation")]
    held_out = held_out.sort_values("l1_coefficient")
    if len(held_out):
        result |= {
            "continued": ", ".join(f"{100 * value:.1f}" for value in held_out["accuracy"]),
            "continued_error": 100 * held_out["stderr"].max(),
            "continued_chance": 100 * held_out["chance"].iloc[0],
        }
    above = table[same & table["task"].isin(seven["task"]) & (table["task"] != MEAN)]
    above = (above["verdict"] == "above chance").groupby(above["task"]).all()
    result["tasks_above"] = ", ".join(above.index[above]) or "none"
    return result
