"""Tables of runs beside one sweep: other choices of training (Fig. 8, Tables 3 to 5), other sizes,
and one training computed in several ways.

A setting is one choice at one level of L1; its runs differ by seed. A difference of two settings
counts above the noise of seeds alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import scipy.stats

from study.analysis.runs import (
    COMPUTED_BY,
    MAY_DIFFER,
    RECIPE,
    activity_at,
    alive_levels,
    check_alike,
    choice,
    cross_entropy_change,
    levels,
    price_at,
    sweep,
)
from twell.tables import last_validation, processes

CONFIDENCE = 0.95
UNKNOWN = "no seeds"  # the verdict on a difference where no setting has several runs
QUANTITIES = {  # of a contrast, with the unit of its difference
    "cross_entropy_change": "cross-entropy, % over L1 = 0",
    "active_fraction": "active neurons, %; difference relative",
    "dead_fraction_train": "dead neurons, %",
}


def choices(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return `sweep` of the recipe and then of each other choice.

    cross_entropy_change is over the mean of the recipe at L1 = 0. An empty table where no run is
    complete. Raises ValueError when runs differ in more than choice, level, seed and width: the
    non-gated layer is wider, to have as many parameters.
    """
    runs = runs[runs["complete"]] if len(runs) else runs
    if runs.empty:
        return pd.DataFrame(columns=["run", "choice", "l1_coefficient", *QUANTITIES])
    may_differ = [*MAY_DIFFER, *RECIPE, "intermediate_size"]
    check_alike(runs, may_differ, "choices are compared at one size and token budget")
    chosen = choice(runs)
    order = sorted(chosen.unique(), key=lambda name: (name != "recipe", name))
    table = pd.concat([sweep(runs[chosen == name], log) for name in order], ignore_index=True)
    return table.assign(cross_entropy_change=cross_entropy_change(table))


def compared_level(table: pd.DataFrame) -> float:
    """Return the level above 0 with most runs of `choices`, the lowest of equals; NaN for none."""
    return float(table.loc[table["l1_coefficient"] > 0, "l1_coefficient"].mode().min())


def remedied(runs: pd.DataFrame, level: float) -> pd.DataFrame:
    """Return the runs at a level with a remedy for dead neurons, and the recipe's (Fig. 8).

    Complete runs alone; no rows where there is no remedy.
    """
    if runs.empty:
        return runs
    runs = runs[runs["complete"] & (runs["l1_coefficient"] == level)]
    remedies = choice(runs).isin(["re-initialisation", "L1 warm-up"])
    return runs[remedies | (choice(runs) == "recipe")] if remedies.any() else runs[:0]


# --- differences and noise --------------------------------------------------------------------


def seed_noise(table: pd.DataFrame, column: str) -> tuple[float, int]:
    """Return a column's standard deviation between seeds, and its degrees of freedom.

    table: `choices`. Pooled over all settings with several runs; (NaN, 0) without any.
    active_fraction counts in natural logarithms, since activity scatters in proportion. Left out:
    SiLU's activity and settings without a dead neuron, which cannot scatter.
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
    """Return the largest difference of two means that seeds explain: Student's t at CONFIDENCE."""
    deviation, freedom = seed_noise(table, column)
    if not (freedom and runs and other_runs):
        return np.nan
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
    return float(quantile * deviation * np.sqrt(1 / runs + 1 / other_runs))


def mean_limit(values: Sequence[float]) -> float:
    """Return the 95% limit of a mean over seeds, by Student's t; NaN for one value."""
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, max(1, len(values) - 1))
    return (
        float(quantile * np.std(values, ddof=1) / np.sqrt(len(values)))
        if len(values) > 1
        else np.nan
    )


def noise_verdict(difference: float, limit: float) -> str:
    """Return "within noise", "more" or "less"; UNKNOWN for no limit, empty for no difference."""
    if np.isnan(difference):
        return ""
    if np.isnan(limit):
        return UNKNOWN
    return "within noise" if abs(difference) <= limit else "more" if difference > 0 else "less"


def contrast(
    table: pd.DataFrame, column: str, first: tuple[str, float], second: tuple[str, float]
) -> dict:
    """Return the difference of two settings of `choices`, (choice, l1_coefficient), in a column.

    Keys: runs and value (mean) of the first, other_runs and other of the second; difference, first
    less second, and limit, the `noise_limit` (cross_entropy_change: points of %; active_fraction: %
    of the second; dead_fraction_train: a share); verdict, as `noise_verdict`.
    """
    first_values, second_values = (
        table.loc[(table["choice"] == name) & (table["l1_coefficient"] == l1), column].dropna()
        for name, l1 in (first, second)
    )
    runs, other_runs = len(first_values), len(second_values)
    value, other = (float(rows.astype(float).mean()) for rows in (first_values, second_values))
    limit, difference = noise_limit(table, column, runs, other_runs), value - other
    verdict = noise_verdict(difference, limit)
    if column == "active_fraction":
        verdict = noise_verdict(float(np.log(value / other)), limit)
        difference, limit = 100 * (value / other - 1), 100 * float(np.expm1(limit))
    result = {"runs": runs, "value": value, "other_runs": other_runs, "other": other}
    return result | {"difference": difference, "limit": limit, "verdict": verdict}


def contrasts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the change of each choice against the recipe at the same level, a row a quantity.

    table: `choices`. Columns: choice, l1_coefficient, quantity (QUANTITIES), and the keys of
    `contrast`, shares of neurons in %.
    """
    rows = []
    others = table.loc[table["choice"] != "recipe", ["choice", "l1_coefficient"]].drop_duplicates()
    for name, l1 in others.itertuples(index=False):
        for column, quantity in QUANTITIES.items():
            row = {"choice": name, "l1_coefficient": l1, "quantity": quantity}
            row |= contrast(table, column, (name, l1), ("recipe", l1))
            shares = ["value", "other"] if column != "cross_entropy_change" else []
            shares += ["difference", "limit"] if column == "dead_fraction_train" else []
            rows.append(row | {key: 100 * row[key] for key in shares})
    columns = "choice l1_coefficient quantity runs value other_runs other difference limit verdict"
    return pd.DataFrame(rows, columns=columns.split())


def against_frontier(table: pd.DataFrame) -> pd.DataFrame:
    """Return each gated ReLU choice beside the recipe's line, at the same activity and price.

    table: `choices`. Columns: choice, l1_coefficient, runs, status; active_fraction, price (% over
    L1 = 0), line_price (`price_at` of the recipe), difference (points), limit (a `noise_limit`) and
    verdict; line_active_fraction (`activity_at` of the recipe at this price); dead (share),
    line_dead (of the recipe at this activity), dead_limit and dead_verdict. NaN outside of the
    recipe's alive levels. A point of the line has the noise of the two levels around it; the
    scatter of activity is left out. Ours.
    """
    columns = "choice l1_coefficient runs status active_fraction price line_price difference limit"
    columns += " verdict line_active_fraction dead line_dead dead_limit dead_verdict"
    every = levels(table) if len(table) else table
    recipe = every[every["choice"] == "recipe"]
    if recipe.empty or alive_levels(recipe).empty:
        return pd.DataFrame(columns=columns.split())
    alive = alive_levels(recipe)
    known = alive["log_active"]
    gated = every[~every["choice"].str.contains("recipe|SiLU|non-gated")]
    gated = gated[gated["active_fraction"] > 0]
    names = {"cross_entropy_change": "price", "dead_fraction_train": "dead"}
    rows = []
    for row in gated.rename(columns=names).to_dict("records"):
        log_active = np.log(row["active_fraction"])
        weights = np.array([np.interp(log_active, known, one) for one in np.eye(len(known))])
        # So many runs of one level would scatter like this point between levels.
        beside = 1 / (weights**2 / alive["runs"]).sum()
        limits = [noise_limit(table, column, row["runs"], beside) for column in names]
        row["line_price"] = price_at(recipe, row["active_fraction"])
        row["line_active_fraction"] = activity_at(recipe, row["price"])
        dead = alive["dead_fraction_train"]
        row["line_dead"] = float(np.interp(log_active, known, dead, np.nan, np.nan))
        row["limit"], row["dead_limit"] = limits
        row["difference"] = row["price"] - row["line_price"]
        row["verdict"] = noise_verdict(row["difference"], row["limit"])
        row["dead_verdict"] = noise_verdict(row["dead"] - row["line_dead"], row["dead_limit"])
        rows.append(row)
    return pd.DataFrame(rows, columns=columns.split())


# --- beside the paper's tables ----------------------------------------------------------------


def choice_table(paper: pd.DataFrame, table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return Table 3, 4 or 5 of the paper beside ours, a row a setting of the paper's.

    paper: `results.paper()`; table: `choices`; source: "Table 3", for example. Columns: choice;
    paper_l1, paper_accuracy (%), paper_cross_entropy (nats), paper_active (of 5632); ours: l1,
    runs, cross_entropy and cross_entropy_std, change (% over the recipe at L1 = 0), active and
    active_std, dead (%, in the last window of training). NaN where not printed or not trained. The
    paper's 2e-5, and 3e-4 of its warm-up, stand beside our `compared_level`; its other levels have
    no partner. Raises ValueError for another source.
    """
    if source not in ("Table 3", "Table 4", "Table 5"):
        known = "use 'Table 3', 'Table 4' or 'Table 5'"
        raise ValueError(f"{source!r} is no table of choices; {known}")
    rows = paper[paper["source"] == source]
    modified = {"dead_neuron_reinit": "re-initialisation", "sparsity_warmup": "L1 warm-up"}
    named = rows["training_modification"].map(modified)
    named = named.mask(named.isna() & (rows["activation"] == "SiLU"), "SiLU")
    named = named.mask(named.isna() & ~rows["gated"].astype(bool), "non-gated").fillna("recipe")
    rows = rows.assign(choice=named, paper_l1=rows["l1"], value=rows["value"].astype(float))
    setting = ["choice", "paper_l1"]
    order = pd.MultiIndex.from_frame(rows[setting].drop_duplicates())
    names = {"mean_task_accuracy": "paper_accuracy", "cross_entropy": "paper_cross_entropy"}
    names |= {"avg_nonzeros": "paper_active"}
    printed = rows.pivot(index=setting, columns="metric", values="value").reindex(order)
    printed = printed.rename(columns=names).rename_axis(columns=None).reset_index()
    printed = printed.astype({"paper_l1": float})
    if len(table):
        level, ours = compared_level(table), levels(table)
        ours = ours.assign(dead=100 * ours["dead_fraction_train"], l1=ours["l1_coefficient"])
        printed["l1_coefficient"] = printed["paper_l1"].map({0: 0.0, 2e-5: level, 3e-4: level})
        printed = printed.merge(ours, how="left", on=["choice", "l1_coefficient"])
        printed = printed.rename(columns={"cross_entropy_change": "change"})
    columns = [*setting, *names.values(), "l1", "runs", "cross_entropy", "cross_entropy_std"]
    return printed.reindex(columns=[*columns, "change", "active", "active_std", "dead"])


def sizes(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return dense and sparse models of the recipe, a row a size, rising (section 4.2).

    Columns: parameters, tokens, num_layers, hidden_size, intermediate_size, l1_coefficient (the
    level above 0 of most sizes, the lowest of equals); at that level runs, cross_entropy, active,
    active_fraction, dead_fraction_train, status; cross_entropy_dense (NaN without a run at L1 = 0),
    dense_runs and change (%). Sizes without a run at the level are left out. Empty where no run is
    complete.
    """
    size = ["parameters", "tokens", "num_layers", "hidden_size", "intermediate_size"]
    own = ["runs", "cross_entropy", "active", "active_fraction", "dead_fraction_train", "status"]
    rows = []
    if len(runs):
        runs = runs[runs["complete"].astype(bool) & (choice(runs) == "recipe")]
        sparse = runs[runs["l1_coefficient"] > 0].drop_duplicates(["l1_coefficient", *size])
        level = sparse["l1_coefficient"].mode().min()  # NaN without any
        for key, some in runs.groupby(size):
            by_level = levels(sweep(some, log)).set_index("l1_coefficient")
            if level in by_level.index:
                dense = by_level["cross_entropy"].get(0.0, np.nan)
                number = by_level["runs"].get(0.0, 0)
                rows.append((*key, level, *by_level.loc[level, own], dense, number))
    columns = [*size, "l1_coefficient", *own, "cross_entropy_dense", "dense_runs"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(change=100 * (table["cross_entropy"] / table["cross_entropy_dense"] - 1))


def paper_sizes(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's four sizes at 2e-5, from `results.paper()`: columns as of `sizes`.

    NaN where it prints nothing. Also accuracy and accuracy_dense, mean task accuracies in %.
    """
    printed = paper[(paper["source"] == "Table 1") & (paper["metric"] == "mean_task_accuracy")]
    active = paper[(paper["metric"] == "avg_nonzeros") & (paper["l1"] == 2e-5)]
    loss = paper[(paper["source"] == "Table 3") & (paper["activation"] == "ReLU")]
    loss = loss[loss["metric"] == "cross_entropy"]
    accuracy, loss = (
        rows.pivot(index="model", columns="sparse", values="value").astype(float)
        for rows in (printed, loss)
    )
    models = accuracy.index
    table = pd.DataFrame({"parameters": 1e9 * models.str.removesuffix("B").astype(float)}, models)
    table["tokens"] = 1e9 * printed.groupby("model")["train_tokens_B"].first().astype(float)
    table = table.assign(intermediate_size=5632, l1_coefficient=2e-5)
    table["active"] = active.groupby("model")["value"].first().astype(float)
    table["active_fraction"] = table["active"] / 5632
    table["cross_entropy"], table["cross_entropy_dense"] = loss[True], loss[False]
    table["change"] = 100 * (table["cross_entropy"] / table["cross_entropy_dense"] - 1)
    table["accuracy"], table["accuracy_dense"] = accuracy[True], accuracy[False]
    return table.sort_values("parameters").reset_index()


# --- one training, computed in several ways ---------------------------------------------------


def computed_otherwise(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs of one training that was computed in several ways.

    Columns, fewest devices and dense first: run; way, its difference in words; backend, devices,
    parameters, batch_tokens, vocab_size; of the last validation cross_entropy and active; apart and
    apart_mean, the largest and the mean difference of training cross-entropy from the first run's
    (nats), NaN without rows of the same steps; over the second half of training, when activity has
    settled, tokens_per_second (median) and peak_memory (bytes of one device, the most), and
    peak_memory_whole over all of it, NaN on a CPU. Raises ValueError when runs differ in more than
    how they were computed, or in their device, whose speeds do not compare.
    """
    columns = (
        "run way backend devices parameters batch_tokens vocab_size cross_entropy active apart"
    )
    columns += " apart_mean tokens_per_second peak_memory peak_memory_whole"
    complete = runs[runs["complete"].astype(bool)] if len(runs) else runs
    if complete.empty:
        return pd.DataFrame(columns=columns.split())
    rule = "one training, computed in several ways, has one configuration and kind of device"
    check_alike(complete, set(MAY_DIFFER) - {"l1_coefficient", "seed", "device"}, rule)

    complete = complete.set_index("run", drop=False)
    fields = ["run", "backend", "parameters", "batch_tokens", "vocab_size", "tokens"]
    table = complete.reindex(columns=fields).rename_axis(None)
    table["parameters"] = table["parameters"].astype(float)  # None in a run without the number
    table["devices"] = processes(complete)
    table["way"] = _ways(complete, table["devices"])
    table["sparse"] = table["backend"] != "dense"
    table = table.sort_values(["devices", "sparse", "run"])

    last = last_validation(log[log["run"].isin(table.index)])
    last = last.groupby(["run", "metric"])["value"].mean().unstack()
    for column, metric in (("cross_entropy", "cross_entropy"), ("active", "active_mean")):
        table[column] = last.reindex(columns=[metric])[metric]
    curves = computed_curves(complete, log)
    losses = curves[curves["metric"] == "cross_entropy"].sort_values(["run", "step"])
    # A row is a mean over the steps since the last one: only rows of the same steps compare.
    losses = losses.assign(since=losses.groupby("run")["step"].shift(fill_value=0))
    losses = losses.pivot(index=["since", "step"], columns="run", values="value")
    losses = losses.reindex(columns=table.index)
    apart = losses.sub(losses[table.index[0]], axis=0).abs()
    table["apart"], table["apart_mean"] = apart.max(), apart.mean()
    late = curves[curves["tokens"] > table["tokens"].iloc[0] / 2]
    for column, metric, rows, statistic in (
        ("tokens_per_second", "tokens_per_second", late, "median"),
        ("peak_memory", "peak_memory", late, "max"),
        ("peak_memory_whole", "peak_memory", curves, "max"),
    ):
        values = rows[rows["metric"] == metric].groupby("run")["value"]
        table[column] = values.agg(statistic).astype(float)
    return table[columns.split()].reset_index(drop=True)


def computed_by_seed(runs: pd.DataFrame, log: pd.DataFrame) -> list[pd.DataFrame]:
    """Return `computed_otherwise` of the runs of each seed; without runs one table without rows."""
    if runs.empty:
        return [computed_otherwise(runs, log)]
    by_seed = runs.groupby("seed")
    return [computed_otherwise(some.reset_index(drop=True), log) for _, some in by_seed]


def _ways(runs: pd.DataFrame, devices: pd.Series) -> pd.Series:
    """How each run was computed, in words, as far as the others differ."""
    ways = runs["backend"].replace({"triton": "sparse kernels"})
    if (devices > 1).any():
        ways = ways + devices.map(lambda number: f", {number} device{'s' * (number > 1)}")
    for field in COMPUTED_BY[1:]:
        if field in runs and runs[field].nunique(dropna=False) > 1:
            numbers = runs[field].map(lambda value: "none" if pd.isna(value) else f"{value:g}")
            ways = ways + f", {field} " + numbers
    return ways


def computed_curves(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return cross_entropy, tokens_per_second and peak_memory over the training of complete runs.

    Columns: run, metric, step, tokens, value. Memory is of one device; a CPU has none.
    """
    columns = ["run", "metric", "step", "tokens", "value"]
    if runs.empty or log.empty:
        return pd.DataFrame(columns=columns)
    rows = log[log["run"].isin(runs.loc[runs["complete"].astype(bool), "run"])]
    metrics = ["cross_entropy", "tokens_per_second", "peak_memory"]
    rows = rows[(rows["split"] == "train") & rows["metric"].isin(metrics)]
    return rows[columns].reset_index(drop=True)
