"""Tables of the runs that depart from one sweep: other choices of training (Fig. 8, Tables 3 to 5), other sizes, and one
training computed in several ways.

A setting is one choice at one level of L1; its runs differ by seed. A difference between two settings counts only above
what seeds alone explain.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from twell.analysis.runs import (
    MAY_DIFFER,
    RECIPE,
    activity_at,
    check_alike,
    choice,
    cross_entropy_change,
    levels,
    price_at,
    sweep,
)

CONFIDENCE = 0.95
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
    check_alike(runs, may_differ, "choices are compared at one size and token budget")
    chosen = choice(runs)
    order = sorted(chosen.unique(), key=lambda name: (name != "recipe", name))
    table = pd.concat([sweep(runs[chosen == name], log) for name in order], ignore_index=True)
    return table.assign(cross_entropy_change=cross_entropy_change(table))


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
    return float(
        scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
        * deviation
        * np.sqrt(1 / runs + 1 / other_runs)
    )


def noise_verdict(difference: float, limit: float) -> str:
    """Return what a difference is: "within noise" up to a `noise_limit`, "more", "less"; UNKNOWN without a limit, empty without itself."""
    if np.isnan(difference):
        return ""
    if np.isnan(limit):
        return UNKNOWN
    return "within noise" if abs(difference) <= limit else "more" if difference > 0 else "less"


def contrast(
    table: pd.DataFrame, column: str, first: tuple[str, float], second: tuple[str, float]
) -> dict:
    """Return by how much two settings of `choices`, (choice, l1_coefficient), differ in a column, and whether seeds explain it.

    Keys: runs and value (mean) of the first, other_runs and other of the second; difference, first less second, and limit, the
    `noise_limit` (cross_entropy_change: points of %; active_fraction: % of the second; dead_fraction_train: a share);
    verdict: "more", "less", "within noise", "no seeds", or empty where one of them was not trained.
    """
    found = [
        table.loc[(table["choice"] == c) & (table["l1_coefficient"] == l1), column].dropna()
        for c, l1 in (first, second)
    ]
    (runs, value), (other_runs, other) = (
        (len(f), float(f.mean()) if len(f) else np.nan) for f in found
    )
    limit, difference = noise_limit(table, column, runs, other_runs), value - other
    verdict = noise_verdict(difference, limit)
    if column == "active_fraction":
        verdict = noise_verdict(float(np.log(value / other)), limit)
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
    columns = [
        "choice",
        "l1_coefficient",
        "quantity",
        "runs",
        "value",
        "other_runs",
        "other",
        "difference",
        "limit",
    ]
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
    columns = [
        "choice",
        "l1_coefficient",
        "runs",
        "status",
        "active_fraction",
        "price",
        "line_price",
        "difference",
    ]
    columns += [
        "limit",
        "verdict",
        "line_active_fraction",
        "dead",
        "line_dead",
        "dead_limit",
        "dead_verdict",
    ]
    rows = []
    alive = (
        recipe.query("status == 'alive' and active_fraction > 0").sort_values("active_fraction")
        if len(recipe)
        else recipe
    )
    gated = (
        every[~every["choice"].str.contains("recipe|SiLU|non-gated")] if len(alive) else every[:0]
    )
    known = np.log(alive["active_fraction"].to_numpy(float))
    for row in gated[gated["active_fraction"] > 0].itertuples():
        at, line_price = np.log(row.active_fraction), price_at(recipe, row.active_fraction)
        weights = np.array(
            [np.interp(at, known, one) for one in np.eye(len(known))]
        )  # of each level in this point
        beside = (
            1 / (weights**2 / alive["runs"]).sum()
        )  # so many runs of one level would scatter alike
        limit = noise_limit(table, "cross_entropy_change", row.runs, beside)
        dead_limit = noise_limit(table, "dead_fraction_train", row.runs, beside)
        difference, dead = row.cross_entropy_change - line_price, row.dead_fraction_train
        line_dead = float(np.interp(at, known, alive["dead_fraction_train"], np.nan, np.nan))
        found = [
            row.choice,
            row.l1_coefficient,
            row.runs,
            row.status,
            row.active_fraction,
            row.cross_entropy_change,
        ]
        found += [line_price, difference, limit, noise_verdict(difference, limit)]
        found += [activity_at(recipe, row.cross_entropy_change), dead, line_dead, dead_limit]
        rows.append([*found, noise_verdict(dead - line_dead, dead_limit)])
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
        raise ValueError(
            f"{source!r} is no table of choices; use 'Table 3', 'Table 4' or 'Table 5'"
        )
    printed = paper[paper["source"] == source]
    named = np.select(
        [printed["activation"] == "SiLU", ~printed["gated"].astype(bool)],
        ["SiLU", "non-gated"],
        "recipe",
    )
    named = (
        printed["training_modification"].map(_MODIFICATIONS).fillna(pd.Series(named, printed.index))
    )
    every = levels(table).set_index(["choice", "l1_coefficient"]) if len(table) else None
    level, rows = compared_level(table), []
    for (name, l1), theirs in printed.groupby([named, "l1"], sort=False):
        value = theirs.set_index("metric")["value"].astype(float)
        row = {
            "choice": name,
            "paper_l1": float(l1),
            "paper_accuracy": value.get("mean_task_accuracy", np.nan),
        }
        row |= {
            "paper_cross_entropy": value.get("cross_entropy", np.nan),
            "paper_active": value.get("avg_nonzeros", np.nan),
        }
        ours = {0: 0.0, 2e-5: level, 3e-4: level}.get(l1, np.nan)
        if every is not None and (name, ours) in every.index:
            found = every.loc[name, ours]
            row |= {"l1": ours, "runs": found["runs"], "cross_entropy": found["cross_entropy"]}
            row |= {
                "cross_entropy_std": found["cross_entropy_std"],
                "change": found["cross_entropy_change"],
            }
            row |= {"active": found["active"], "active_std": found["active_std"]}
            row |= {"dead": 100 * found["dead_fraction_train"]}
        rows.append(row)
    columns = [
        "choice",
        "paper_l1",
        "paper_accuracy",
        "paper_cross_entropy",
        "paper_active",
        "l1",
        "runs",
    ]
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


def computed_otherwise(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs of one training that was computed in several ways: densely and by the kernels, or by more devices.

    Columns, fewest devices and dense first: run; way, what sets it apart, in words; backend, devices; parameters, batch_tokens,
    vocab_size; of the last validation cross_entropy and active; apart, the most that the training cross-entropy of a row of the
    log differs from the first run's (nats), and apart_mean, its mean over rows, NaN where no rows are of the same steps; over the
    second half of training, when activity has settled: tokens_per_second (median) and peak_memory (bytes of one device, the
    most), and peak_memory_whole, over all of it (NaN on a CPU, where it is not logged). Without a complete run no rows.
    Raises ValueError when runs differ in more than how they were computed, or are of different devices, whose speeds do not compare.
    """
    columns = [
        "run",
        "way",
        "backend",
        "devices",
        "parameters",
        "batch_tokens",
        "vocab_size",
        "cross_entropy",
    ]
    columns += [
        "active",
        "apart",
        "apart_mean",
        "tokens_per_second",
        "peak_memory",
        "peak_memory_whole",
    ]
    complete = runs[runs["complete"].astype(bool)] if len(runs) else runs
    if complete.empty:
        return pd.DataFrame(columns=columns)
    may_differ = [
        field for field in MAY_DIFFER if field not in ("l1_coefficient", "seed", "device")
    ]
    check_alike(
        complete,
        may_differ,
        "one training, computed in several ways, has one configuration and kind of device",
    )
    table = complete.set_index("run").reindex(
        columns=["backend", "parameters", "batch_tokens", "vocab_size", "tokens"]
    )
    table["parameters"] = table["parameters"].astype(float)  # None in a run that does not say
    # Accelerate's launcher is part of the recorded command.
    processes = (
        complete.set_index("run")["command"].astype(str).str.extract(r"--num_processes[ =](\d+)")[0]
    )
    table["devices"] = processes.fillna("1").astype(int)
    table["way"] = _ways(complete.set_index("run"), table["devices"])
    order = table.assign(sparse=table["backend"] != "dense", name=table.index)
    table = table.loc[order.sort_values(["devices", "sparse", "name"]).index]
    valid = log[(log["split"] == "valid") & log["run"].isin(table.index)]
    last = valid[valid["step"] == valid.groupby("run")["step"].transform("max")]
    last = (
        last.groupby(["run", "metric"])["value"]
        .mean()
        .unstack()
        .reindex(columns=["cross_entropy", "active_mean"])
    )
    table["cross_entropy"], table["active"] = last["cross_entropy"], last["active_mean"]
    curves = computed_curves(complete, log)
    losses = curves[curves["metric"] == "cross_entropy"].sort_values(["run", "step"])
    # A row is a mean over the steps since the last one: only rows of the same steps compare.
    losses = losses.assign(since=losses.groupby("run")["step"].shift(fill_value=0))
    losses = losses.pivot(index=["since", "step"], columns="run", values="value").reindex(
        columns=table.index
    )
    apart = losses.sub(losses[table.index[0]], axis=0).abs()
    table["apart"], table["apart_mean"] = apart.max(), apart.mean()
    late = curves[curves["tokens"] > table["tokens"].iloc[0] / 2]
    for column, some, most in (
        ("tokens_per_second", late, "median"),
        ("peak_memory", late, "max"),
        ("peak_memory_whole", curves, "max"),
    ):
        of = some[some["metric"] == column.removesuffix("_whole")]
        table[column] = of.groupby("run")["value"].agg(most).astype(float)
    return table.reset_index()[columns]


def _ways(runs: pd.DataFrame, devices: pd.Series) -> pd.Series:
    """What is different about how each run was computed, in words; runs: with their names as index."""
    ways = runs["backend"].replace({"triton": "sparse kernels"})
    if (devices > 1).any():
        ways = ways + devices.map(lambda number: f", {number} device{'s' * (number > 1)}")
    for field in ("micro_batch", "checkpoint_activations", "compile"):
        if field in runs and runs[field].nunique(dropna=False) > 1:
            ways = ways + runs[field].map(
                lambda value, of=field: f", {of} {'none' if pd.isna(value) else f'{value:g}'}"
            )
    return ways


def computed_curves(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return cross_entropy, tokens_per_second and peak_memory over the training of complete runs, as far as they were logged.

    Columns: run, metric, step, tokens, value. Memory is that of one device; a run on a CPU has none.
    """
    complete = runs.loc[runs["complete"].astype(bool), "run"] if len(runs) else ()
    wanted = ("cross_entropy", "tokens_per_second", "peak_memory")
    rows = (
        log[(log["split"] == "train") & log["metric"].isin(wanted) & log["run"].isin(complete)]
        if len(log)
        else log
    )
    return rows.reindex(columns=["run", "metric", "step", "tokens", "value"]).reset_index(drop=True)


def paper_sizes(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's four sizes at 2e-5 with columns as of `sizes`, from `results.paper()`; NaN where it prints nothing.

    Also accuracy and accuracy_dense, its mean task accuracies in %.
    """
    printed = paper[(paper["source"] == "Table 1") & (paper["metric"] == "mean_task_accuracy")]
    accuracy = printed.pivot(index="model", columns="sparse", values="value").astype(float)
    at = (
        paper[(paper["metric"] == "avg_nonzeros") & (paper["l1"] == 2e-5)]
        .groupby("model")["value"]
        .first()
    )
    loss = paper[
        (paper["source"] == "Table 3")
        & (paper["activation"] == "ReLU")
        & (paper["metric"] == "cross_entropy")
    ]
    loss = (
        loss.pivot(index="model", columns="sparse", values="value")
        .astype(float)
        .reindex(accuracy.index)
    )
    table = pd.DataFrame(
        {"parameters": 1e9 * accuracy.index.str.removesuffix("B").astype(float)}, accuracy.index
    )
    tokens = 1e9 * printed.groupby("model")["train_tokens_B"].first().astype(float)
    table = table.assign(tokens=tokens, intermediate_size=5632, l1_coefficient=2e-5)
    table["active"] = at.reindex(table.index).astype(float)
    table["active_fraction"] = table["active"] / 5632
    table["cross_entropy"], table["cross_entropy_dense"] = loss[True], loss[False]
    table["change"] = 100 * (loss[True] / loss[False] - 1)
    table["accuracy"], table["accuracy_dense"] = accuracy[True], accuracy[False]
    return table.sort_values("parameters").reset_index()
