"""Quantities of runs: by subject of `claims.yaml` a flat dict of named numbers and strings.

Numbers are as the templates print them: shares in %, cross-entropies in nats, differences of
cross-entropy in % or points of %. A name ending in `_limit` is a `noise_limit`, in `_runs` a number
of seeds. A quantity that is not in the tables is NaN, None or absent, and claims about it are "not
measured".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from study.analysis.relufied import (
    ORIGINAL,
    WITHOUT_L1,
    relufied_frontier,
    relufied_outlook,
)
from study.analysis.runs import levels, recommended, settles_after
from study.analysis.variants import (
    QUANTITIES,
    against_frontier,
    compared_level,
    contrast,
    mean_limit,
    noise_limit,
)
from twell.tables import level_name

LOSS, ACTIVE, DEAD = QUANTITIES
Quantities = dict[str, Any]


def _level(prefix: str, row: pd.Series, table: pd.DataFrame, dense: pd.Series) -> Quantities:
    """Quantities of one level of L1, a row of `levels`; table: runs with seeds."""
    # Of a mean over seeds; activity scatters in proportion.
    spread = np.expm1(noise_limit(table, ACTIVE, row["runs"], np.inf))
    return {
        f"{prefix}_active_limit": row["active"] * spread,
        f"{prefix}_share_limit": 100 * row["active_fraction"] * spread,
        f"{prefix}_dead_limit": 100 * noise_limit(table, DEAD, row["runs"], np.inf),
        f"{prefix}_level": level_name(row["l1_coefficient"]),
        f"{prefix}_active": row["active"],
        f"{prefix}_share": 100 * row["active_fraction"],
        f"{prefix}_inactive": 100 - 100 * row["active_fraction"],
        f"{prefix}_price": row["cross_entropy_change"],
        f"{prefix}_price_limit": noise_limit(table, LOSS, row["runs"], dense["runs"]),
        f"{prefix}_runs": row["runs"],
        f"{prefix}_gain": row["ffn_gain"],
        f"{prefix}_dead": 100 * row["dead_fraction_train"],
    }


def sweep(
    table: pd.DataFrame,
    active: pd.DataFrame,
    seeds: pd.DataFrame,
    longer: pd.DataFrame | None = None,
) -> Quantities:
    """Return quantities of an L1 sweep.

    table: `levels` of the recipe; active: `training_curves` of active_mean; seeds: `choices` (or a
    `sweep`), for the noise; longer: a `sweep` on more tokens, whose seeds count too. `best` is the
    `recommended` level by the whole interval of its price, `beyond` the next one above, `last` the
    highest, `middle` those between 0 and best.
    """
    more = longer if longer is not None else seeds[:0]
    seeds = pd.concat([seeds, more.assign(choice="longer")], ignore_index=True)
    zero = table[table["l1_coefficient"] == 0]
    alive = table[(table["l1_coefficient"] > 0) & (table["status"] == "alive")]
    if zero.empty or alive.empty:
        return {}
    dense = zero.iloc[0]
    best = _best(table, seeds, dense)
    above = table[table["l1_coefficient"] > best["l1_coefficient"]].sort_values("l1_coefficient")
    between = alive[alive["l1_coefficient"] < best["l1_coefficient"]].sort_values("l1_coefficient")
    bad = table.loc[table["status"] != "alive", ["l1_coefficient", "status"]].to_numpy()
    bad = [f"{level_name(l1)} ({status})" for l1, status in bad]

    result = _level("dense", dense, seeds, dense) | _level("best", best, seeds, dense)
    result |= {
        "width": round(dense["active"] / dense["active_fraction"]),
        "fall": dense["active"] / best["active"],
        "seeds": _seeds(table["runs"]),
        "unusable": ", ".join(bad) or "none",
    }
    spread = noise_limit(seeds, ACTIVE, dense["runs"], best["runs"])
    result["fall_limit"] = result["fall"] * np.expm1(spread)
    result |= _steps("falls", -np.log(table["active"].astype(float)), ACTIVE, table, seeds)
    result |= _steps("dies", table["dead_fraction_train"], DEAD, table, seeds)
    curves = active[active["l1_coefficient"] == best["l1_coefficient"]]
    if len(curves):
        shares = [100 * settles_after(curve) for _, curve in curves.groupby("run")]
        result |= {"settles": _range(shares, ".0f"), "settles_most": max(shares)}
        result |= {"settles_runs": len(shares), "steps": curves["step"].max()}
    if len(above):
        beyond = above.iloc[0]
        limit = noise_limit(seeds, LOSS, beyond["runs"], best["runs"])
        result |= _level("beyond", beyond, seeds, dense)
        result["beyond_rise"] = beyond["cross_entropy_change"] - best["cross_entropy_change"]
        result["beyond_rise_limit"] = limit
        result |= _level("last", above.iloc[-1], seeds, dense)
    if len(between):
        price, runs = between["cross_entropy_change"], between["runs"].min()
        result |= {"middle_least": price.min(), "middle_most": price.max(), "middle_runs": runs}
        names = between["l1_coefficient"].map(level_name)
        result |= {"middle_first": names.iloc[0], "middle_last": names.iloc[-1]}
        result["middle_limit"] = noise_limit(seeds, LOSS, runs, dense["runs"])
    if len(more):
        result |= _longer(levels(more), seeds, dense, best["l1_coefficient"])
    return result


def _best(table: pd.DataFrame, seeds: pd.DataFrame, dense: pd.Series) -> pd.Series:
    """The `recommended` row of `levels`, if the whole interval of a price has to be low."""
    limits = table["runs"].map(lambda runs: noise_limit(seeds, LOSS, runs, dense["runs"])).fillna(0)
    highest = table["cross_entropy_change"] + limits.where(table["l1_coefficient"] > 0, 0)
    return table.loc[recommended(table.assign(cross_entropy_change=highest)).name]


def _longer(table: pd.DataFrame, seeds: pd.DataFrame, dense: pd.Series, level: float) -> Quantities:
    """Quantities of `levels` on more tokens, at the recommended level and at the first other."""
    zero, result = table[table["l1_coefficient"] == 0], {}
    dense = zero.iloc[0] if len(zero) else dense
    same = table["l1_coefficient"] == level
    other = ~same & (table["l1_coefficient"] > 0)
    for name, rows in (("longer", table[same]), ("longer_other", table[other])):
        for _, row in rows[:1].iterrows():
            numbers = _level(name, row, seeds, dense)
            kept = "level price price_limit dead dead_limit runs".split()
            result |= {f"{name}_{key}": numbers[f"{name}_{key}"] for key in kept}
    return result


def _range(values: Iterable[float], spec: str) -> str:
    """The least and the largest value, or one where they read alike."""
    ends = dict.fromkeys(f"{end:{spec}}" for end in (min(values), max(values)))
    return " to ".join(ends)


def _seeds(runs: pd.Series) -> str:
    """Numbers of runs in words: 1 seed, 1 to 3 seeds."""
    return f"{_range(runs, 'd')} seed{'s' if runs.max() > 1 else ''}"


def _steps(
    name: str, rising: pd.Series, column: str, table: pd.DataFrame, seeds: pd.DataFrame
) -> Quantities:
    """NAME: whether a value of `levels` rises with every level; NAME_clear: beyond the noise.

    NAME_not: whether a step goes the other way beyond the noise. NAME_within: how many of the
    NAME_steps are within it.
    """
    steps, runs = np.diff(rising.astype(float)), table["runs"].tolist()
    pairs = zip(runs[:-1], runs[1:], strict=True)
    limits = np.array([noise_limit(seeds, column, *pair) for pair in pairs])
    result = {name: bool((steps > 0).all())}
    if np.isfinite(limits).all():
        result |= {f"{name}_clear": bool((steps > limits).all())}
        result |= {f"{name}_not": bool((steps < -limits).any())}
        within = int((abs(steps) <= limits).sum())
        result |= {f"{name}_within": within, f"{name}_steps": len(steps)}
    return result


def single(table: pd.DataFrame) -> Quantities:
    """Return quantities of pairs of settings from `list_runs`: other learning rates, and the model
    that ships. Prices are in % over the second; a pair without both has no quantity. _runs: seeds
    of the first; _price_limit: Student's t on the runs of both, whose seeds may scatter more than
    the recipe's do, NaN for one run each; _inactive: inactive neurons (%), mean over the seeds of
    the first; _inactive_least, _most: of one seed.
    """
    table = table.assign(setting=table["run"].str.partition("-seed-")[0])
    by_setting = dict(tuple(table.groupby("setting")))
    pairs = {
        "lr_double_dense": ("lr-2e-3-l1-0", "85m-50m-l1-0"),
        "lr_double_sparse": ("lr-2e-3-l1-3e-4", "85m-50m-l1-3e-4"),
        "lr_half_dense": ("lr-5e-4-l1-0", "85m-50m-l1-0"),
        "small": ("5m-500m-l1-1.5e-3", "5m-500m-l1-0"),
    }
    result = {}
    for name, settings in pairs.items():
        if set(settings) <= set(by_setting):
            first, second = (by_setting[one] for one in settings)
            losses = pd.concat([first, second]).assign(
                choice="recipe", l1_coefficient=[0] * len(first) + [1] * len(second)
            )
            losses[LOSS] = 100 * losses["cross_entropy"] / second["cross_entropy"].mean()
            result |= {
                f"{name}_price": losses[LOSS][: len(first)].mean() - 100,
                f"{name}_price_limit": noise_limit(losses, LOSS, len(first), len(second)),
                f"{name}_runs": len(first),
                f"{name}_inactive": 100 - 100 * first["active_fraction"].mean(),
                f"{name}_inactive_least": 100 - 100 * first["active_fraction"].max(),
                f"{name}_inactive_most": 100 - 100 * first["active_fraction"].min(),
                f"{name}_parameters": first["parameters"].mean() / 1e6,
            }
    return result


BALANCED = "balanced columns"
# What is compared with the recipe, and whether at the compared level of L1 or without L1.
COMPARED = {
    "reinit": ("re-initialisation", True),
    "warmup": ("L1 warm-up", True),
    "silu": ("SiLU", False),
    "nongated": ("non-gated", True),
    "nongated_dense": ("non-gated", False),
    "balanced": (BALANCED, True),
}


def choices(table: pd.DataFrame) -> Quantities:
    """Return the change of each other choice against the recipe at `compared_level`.

    table: `choices`. For each of COMPARED: _price (points of %) and _activity (% more neurons
    active), with their limits; _dead (%), _active and _runs. `without`: the recipe's dead neurons.
    """
    level = compared_level(table)
    every = levels(table).set_index(["choice", "l1_coefficient"]) if len(table) else table
    result = {}
    for key, (name, sparse) in COMPARED.items():
        l1 = level if sparse else 0.0
        pair = (name, l1), ("recipe", l1)
        price, activity, dead = (contrast(table, column, *pair) for column in QUANTITIES)
        result |= {
            f"{key}_price": price["difference"],
            f"{key}_price_limit": price["limit"],
            f"{key}_activity": activity["difference"],
            f"{key}_activity_limit": activity["limit"],
            f"{key}_dead": 100 * dead["value"],
            f"{key}_dead_limit": 100 * noise_limit(table, DEAD, price["runs"], np.inf),
            f"{key}_runs": price["runs"],
        }
        if len(table) and (name, l1) in every.index:
            row = every.loc[(name, l1)]
            result[f"{key}_active"] = row["active"]
            result[f"{key}_width"] = round(row["active"] / row["active_fraction"])
    if len(table) and ("recipe", level) in every.index:
        result["recipe_active"] = every.loc[("recipe", level), "active"]
    recipe = contrast(table, DEAD, ("recipe", level), ("recipe", level))
    limit = noise_limit(table, DEAD, recipe["runs"], np.inf)
    result |= {"without": 100 * recipe["value"], "without_limit": 100 * limit}
    result["recipe_runs"] = recipe["runs"]
    return result | _beside_line(table, level)


def _beside_line(table: pd.DataFrame, level: float) -> Quantities:
    """Balanced columns beside the recipe's line, at the compared level and at the highest other."""
    rows = against_frontier(table).query("choice == @BALANCED")
    others = rows[rows["l1_coefficient"] != level].sort_values("l1_coefficient")
    result = {}
    for name, some in (("line", rows[rows["l1_coefficient"] == level]), ("line_beyond", others)):
        if len(some):
            row = some.iloc[-1]
            result |= {
                f"{name}_level": level_name(row["l1_coefficient"]),
                f"{name}_verdict": row["verdict"] if row["status"] == "alive" else row["status"],
                f"{name}_price": row["difference"],
                f"{name}_price_limit": row["limit"],
                f"{name}_active": 100 * row["line_active_fraction"],
                f"{name}_own_active": 100 * row["active_fraction"],
                f"{name}_dead": 100 * (row["dead"] - row["line_dead"]),
                f"{name}_dead_limit": 100 * row["dead_limit"],
                f"{name}_runs": row["runs"],
            }
    return result


def sizes(table: pd.DataFrame, seeds: pd.DataFrame) -> Quantities:
    """Return activity and price by size, from `sizes`; seeds: `choices`, for the noise.

    _fall: of the logarithm of activity from the smallest to the largest size; _rise: its largest
    rise between two sizes.
    """
    if table.empty:
        return {}
    result = {
        "actives": " → ".join(f"{value:.1f}" for value in table["active"]),
        "shares": " → ".join(f"{100 * value:.3g}" for value in table["active_fraction"]),
    }
    if len(table) > 1:
        runs = table["runs"].min()
        result["activity_limit"] = noise_limit(seeds, ACTIVE, runs, runs)
        for name, column in (("active", "active"), ("share", "active_fraction")):
            steps = np.diff(np.log(table[column].astype(float)))
            result |= {f"{name}_fall": -steps.sum(), f"{name}_rise": steps.max()}
    change = table["change"].dropna()
    result["seeds"] = _seeds(table["runs"])
    known = table.loc[change.index, ["runs", "dense_runs"]].to_numpy()
    limits = [noise_limit(seeds, LOSS, *pair) for pair in known]
    if len(change):
        result |= {"price_least": change.min(), "price_most": change.max()}
        result["price_limit"] = max(limits)
    if len(change) > 1:
        # The difference of two gaps has the noise of four models.
        limit = float(np.hypot(limits[0], limits[-1]))
        result |= {"gap_growth": change.iloc[-1] - change.iloc[0], "gap_growth_limit": limit}
    return result


def pretrained(table: pd.DataFrame, pairs: pd.DataFrame, items: pd.DataFrame) -> Quantities:
    """Return what `relufied_runs` lose in accuracy, by their `relufied_pairs` and answers.

    Shares in %, accuracies in points with their 95% interval over items. alone_: ReLU alone over
    the original, the run that is the reference of `relufied_pairs`, alone_every of all such runs;
    busiest_ and sparsest_: the runs at both ends over ReLU alone on as many tokens. seeds_: over
    the original, the mean of the runs of the sparse level that was trained most often, with
    Student's t over these. held_: over the original, the best of the held_runs, which have a
    steered threshold and more than half of the most tokens (at least held_fewest, in M), with its
    divergence (nats); held_worst: the worst. line_: `relufied_frontier` (deviation in points), and
    the level of `relufied_outlook` that needs the fewest tokens (M). `cuts` are the changes (%) of
    the divergence where a threshold joins L1, by wanted share.
    """
    shares = 100 * table.set_index("run")["active_fraction"]
    means = pairs[pairs["task"] == "mean"].assign(share=pairs["run"].map(shares))
    plain = table.loc[table["level"] == WITHOUT_L1, "run"]
    beside = means[means["reference"] == WITHOUT_L1].sort_values("share")
    beyond = means[means["reference"] == ORIGINAL].sort_values("difference")
    alone = means[means["run"].isin(plain) & (means["reference"] == ORIGINAL)]
    every_alone = [f"{100 * difference:+.1f}" for difference in alone["difference"][::-1]]
    steered = table[table["by"].str.startswith("threshold") & table["run"].isin(beyond["run"])]
    steered = steered[steered["tokens"] > steered["tokens"].max() / 2].set_index("run")
    every_held = beyond[beyond["run"].isin(steered.index)]
    held = every_held[-1:]
    worse = int((beside["high"] < 0).sum())
    result = {"students": len(beside), "students_worse": worse} if len(beside) else {}
    result["alone_every"] = ", ".join(every_alone).replace("-", "−")
    ends = {"alone": alone[-1:], "busiest": beside[-1:], "sparsest": beside[:1], "held": held}
    for name, rows in ends.items():
        for row in rows.to_dict("records"):
            result |= {f"{name}_{end}": 100 * row[end] for end in ("difference", "low", "high")}
            result[f"{name}_share"] = row["share"]
    if len(held):
        best = steered.loc[held["run"].item()]
        result |= {"held_name": best["name"], "held_kl": best["kl"]}
        result |= {"held_fewest": steered["tokens"].min() / 1e6, "held_runs": len(every_held)}
        result["held_worst"] = 100 * every_held["difference"].iloc[0]
    again = table[table["run"].isin(beyond["run"]) & ~table["run"].isin(plain)]
    trained_alike = [some for _, some in again.groupby(["level", "tokens"]) if len(some) > 1]
    if trained_alike:
        most = max(trained_alike, key=len)
        seeds = beyond[beyond["run"].isin(most["run"])]
        result |= {"seeds_name": most["level"].iloc[0], "seeds_runs": len(seeds)}
        result["seeds_difference"] = 100 * seeds["difference"].mean()
        result["seeds_limit"] = mean_limit(100 * seeds["difference"])
        result["seeds_share"] = seeds["share"].mean()
    result |= _line(table, pairs, items) if len(beyond) > 2 else {}
    wanted = table[table["tokens"] == table["tokens"].mode().iloc[0]]
    wanted = wanted[(wanted["wanted"] > 0) & wanted["by"].str.fullmatch("L1(, threshold [^,]+)?")]
    best = wanted.groupby(["wanted", wanted["threshold"] > 0])["kl"].min()
    both = best.unstack().reindex(columns=[False, True]).dropna().sort_index(ascending=False)
    changes = 100 * (both[True] / both[False] - 1)
    if len(changes):
        result["cut_shares"] = ", ".join(f"{100 * share:g}" for share in changes.index)
        result["cuts"] = ", ".join(f"{change:.0f}" for change in changes).replace("-", "−")
    return result


def _line(table: pd.DataFrame, pairs: pd.DataFrame, items: pd.DataFrame) -> Quantities:
    """The line of `relufied_frontier`, and the level that is to come there first."""
    line = relufied_frontier(table, pairs, items)
    names = "students", "kl", "low", "high", "nearest"
    result = {f"line_{name}": line[name] for name in names}
    result["line_deviation"] = 100 * line["deviation"]
    outlook = relufied_outlook(table, pairs, line)
    if outlook.empty:
        return result
    first = outlook.loc[outlook["tokens"].idxmin()]
    result |= {f"line_{end}": first[end] / 1e6 for end in ("tokens", "fewer", "more", "most")}
    return result | {"line_level": first["level"], "line_difference": 100 * first["difference"]}


def training(
    flagships: pd.DataFrame,
    curves: pd.DataFrame | None = None,
    sparse_log: pd.DataFrame | None = None,
) -> Quantities:
    """Return a training by the sparse kernels beside the dense one.

    flagships, curves: `computed_otherwise` and `computed_curves`; sparse_log: the log of the sparse
    run. Changes are in % over dense, memory in GB of one device; `_late` is the second half of
    training.
    """
    dense = flagships[flagships["backend"] == "dense"]
    others = flagships[flagships["backend"] != "dense"]
    others = others[others["devices"].isin(dense["devices"][:1])]
    if others.empty:
        return {}
    dense, sparse = dense.iloc[0], others.iloc[0]
    changes = {"loss_change": "cross_entropy", "faster_late": "tokens_per_second"}
    changes |= {"memory_late": "peak_memory", "memory_whole": "peak_memory_whole"}
    result = {"parameters": sparse["parameters"] / 1e6, "active": sparse["active"]}
    result |= {name: 100 * (sparse[of] / dense[of] - 1) for name, of in changes.items()}
    result |= {"dense_gb": dense["peak_memory"] / 1e9, "sparse_gb": sparse["peak_memory"] / 1e9}
    result["whole_gb"] = sparse["peak_memory_whole"] / 1e9
    if curves is not None:
        result |= _over_training(curves, dense["run"], sparse["run"])
    if sparse_log is not None:
        rows = sparse_log[sparse_log["split"] == "train"]
        means = rows.groupby(["metric", "step", "tokens"])["value"].mean().reset_index()
        active, dead = (means[means["metric"] == name] for name in ("active_mean", "dead_fraction"))
        result |= {"settles": 100 * settles_after(active), "steps": active["step"].max()}
        result["dead"] = 100 * dead["value"].iloc[-1] if len(dead) else np.nan
    return result


def _over_training(curves: pd.DataFrame, dense: str, sparse: str) -> Quantities:
    """Speed of a whole training, and the fall of the sparse loss in the second half (nats)."""
    speeds = curves[curves["metric"] == "tokens_per_second"]
    tokens = speeds.groupby("run")["tokens"].diff().fillna(speeds["tokens"])
    seconds = (tokens / speeds["value"]).groupby(speeds["run"]).sum()
    losses = curves[curves["metric"] == "cross_entropy"]
    losses = losses.pivot(index="step", columns="run", values="value")
    late = losses[losses.index > losses.index[-1] / 2]
    lower = (late[dense] - late[sparse]).mean()
    return {"faster_whole": 100 * (seconds[dense] / seconds[sparse] - 1), "lower_late": lower}


def devices(*scaled: pd.DataFrame, prefix: str = "devices") -> Quantities:
    """Return one training on most devices beside the same on fewest, from `computed_otherwise`.

    scaled: a table a seed. PREFIX_times: the ratio of tokens/s in the second half; _times_limit:
    Student's t over the seeds, NaN for one; _runs: the seeds; PREFIX_first and _second: these
    tokens/s in thousands; PREFIX_loss and _loss_first: cross-entropy at the end (nats). All are
    means over the seeds.
    """
    pairs = [pair for table in scaled if (pair := _pair(table))]
    if not pairs:
        return {}
    first, second = (pd.DataFrame(rows) for rows in zip(*pairs, strict=True))
    times = second["tokens_per_second"].to_numpy() / first["tokens_per_second"].to_numpy()
    return {
        f"{prefix}_times": times.mean(),
        f"{prefix}_times_limit": mean_limit(times),
        f"{prefix}_runs": len(times),
        f"{prefix}_first": first["tokens_per_second"].mean() / 1e3,
        f"{prefix}_second": second["tokens_per_second"].mean() / 1e3,
        f"{prefix}_loss": second["cross_entropy"].mean(),
        f"{prefix}_loss_first": first["cross_entropy"].mean(),
    }


def _pair(table: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """Return the runs on fewest and on most devices, of one backend."""
    for _, alike in table.groupby("backend"):
        ordered = alike.sort_values("devices", kind="stable")
        first, second = ordered.iloc[0], ordered.iloc[-1]
        if second["devices"] > first["devices"]:
            return first, second
    return None


def slowed(log: pd.DataFrame) -> Quantities:
    """Return the rows of a run's log below 0.9 times the median speed of the five rows around."""
    speeds = log.loc[log["metric"] == "tokens_per_second", "value"].reset_index(drop=True)
    if speeds.empty:
        return {}
    around = speeds.rolling(5, center=True, min_periods=1).median()
    return {"slow_rows": (speeds < 0.9 * around).sum(), "speed_rows": len(speeds)}
