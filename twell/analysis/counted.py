"""Quantities of formats, traces and evaluations, named for `claims.yaml` as in `trained`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from twell.analysis.runs import level_name, logged_layers
from twell.analysis.tasks import (
    MEAN,
    NEAR_CHANCE,
    SIZE,
    against_dense,
    by_level,
    seven_tasks,
    several_levels,
)

Quantities = dict[str, Any]


def formats(packed: Any, exact: bool, fuzz: pd.DataFrame | None = None) -> Quantities:
    """Return the numbers of a tile of TwELL, and of random cases of the kernels.

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
            errors = rows.loc[rows["dtype"] == "bfloat16", "worst_relative_rms"]
            result[f"{name}_error"] = errors.max()
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
    and at a level beyond use; overflow: `tile_overflow` at the recommended level; seeds: tables as
    the first, of other seeds, with a column run; prefix stands before every name. Layers count from
    0; _depth is a layer's place from 0 (first) to 1 (last).
    """
    last = len(sparse) - 1
    least = sparse.nsmallest(3, "mean")["layer"].astype(int).tolist()
    tiles = overflow[overflow["compression"] == 8]
    most = tiles["overflow_rows"].max()
    result = {
        "last": last,
        "ratio_least": sparse["max_over_mean"].min(),
        "ratio_most": sparse["max_over_mean"].max(),
        "overflow": 100 * most,
        "overflow_layer": tiles.loc[tiles["overflow_rows"] == most, "layer"].max(),
        "least": ", ".join(map(str, sorted(least))),
        "least_layer": least[0],
        "first_two_least": set(least[:2]) == {0, 1},
        "most_active": sparse["mean"].max(),
    }
    for name, table in (("peak", sparse), ("dense_peak", dense)):
        if len(table):
            peak = int(table.set_index("layer")["mean"].idxmax())
            result |= {name: peak, f"{name}_depth": peak / max(last, 1)}
    if len(sparsest) > 1:
        first, second = sorted(sparsest.nlargest(2, "mean")["layer"].astype(int))
        result |= {"sparsest_peaks": f"{first}, {second}", "sparsest_at_last": second == last}
        result["sparsest_first_depth"] = first / max(last, 1)
    if seeds is not None and len(seeds):
        ratios = seeds.groupby("run", sort=False)["max_over_mean"].min()
        result |= {"seed_ratios": ", ".join(f"{ratio:.1f}" for ratio in ratios)}
        result |= {"seed_ratio_least": ratios.min(), "seed_ratio_most": ratios.max()}
    return {f"{prefix}{name}": value for name, value in result.items()}


def seed_layers(log: pd.DataFrame, intermediate_size: int) -> pd.DataFrame:
    """Return `logged_layers` of each run of a log, one under the other, with a column run."""
    tables = [
        logged_layers(rows, intermediate_size).assign(run=run) for run, rows in log.groupby("run")
    ]
    return pd.concat(tables, ignore_index=True)


def _word(token: str) -> str:
    """A token without its spaces; quoted where nothing else is in it."""
    return token.strip() or repr(token)


def tokens(table: pd.DataFrame, positions: pd.DataFrame, prefix: str = "") -> Quantities:
    """Return which tokens and positions are active, from `per_token` and `by_position`.

    prefix stands before every name.
    """
    names = table["token"].map(_word).tolist()
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
    """Return numbers of single neurons.

    correlation: `surprise_correlation`; specific: `specific`; cost: `trace.silenced_loss`.
    """
    overall = correlation[(correlation["layer"] == -1) & (correlation["of"] == "surprise")]
    result = {}
    if len(overall):
        row = overall.iloc[0]
        result |= {"rank": row["spearman"], "rank_low": row["low"], "rank_high": row["high"]}
    if specific is not None and len(specific):
        row = specific.iloc[0]
        result |= {"layer": int(row["layer"]), "neuron": int(row["neuron"])}
        result |= {"token": _word(row["token"]), "phi": row["phi"]}
    if cost is not None and len(cost):
        result["cost"] = cost["loss_change"].max()
    return result


# --- tasks ---------------------------------------------------------------------------------------


def tasks(table: pd.DataFrame, differences: pd.DataFrame) -> Quantities:
    """Return accuracies of downstream tasks, from `evaluations` and their `backend_differences`.

    Accuracies in %, differences in points. `pairs` are sparse models beside the dense one of their
    size and tokens; of `pairs_above` one model is above chance; of these, `pairs_lost` are more
    than two standard errors below dense. The list of means is of the size with the most levels.
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
    """Means of the seven tasks and of continuations, of the size with the most levels."""
    means = several_levels(by_level(seven))
    means = means[means["task"] == MEAN]
    if means.empty:
        return {}
    size = means[SIZE].iloc[-1]
    means = means[(means[SIZE] == size).all(axis=1)]
    same = (table[SIZE] == size).all(axis=1)
    same &= (table["dtype"] == "float32") & (table["backend"] == "dense")
    plain = table[same & (table["metric"] == "acc")]
    held_out = plain[plain["task"] == "held_out_continuation"].sort_values("l1_coefficient")
    result = {"task_levels": ", ".join(means["l1_coefficient"].map(level_name))}
    for name, prefix, rows in (("means", "", means), ("continued", "continued_", held_out)):
        if len(rows):
            result[name] = ", ".join(f"{100 * value:.1f}" for value in rows["accuracy"])
            result[f"{name}_error"] = 100 * rows["stderr"].max()
            result[f"{prefix}chance"] = 100 * rows["chance"].iloc[0]
    above = plain[plain["task"].isin(seven["task"]) & (plain["task"] != MEAN)]
    above = (above["verdict"] == "above chance").groupby(above["task"]).all()
    result["tasks_above"] = ", ".join(above.index[above]) or "none"
    return result
