"""Tables of runs beside one sweep: other choices of training (Fig. 8, Tables 3 to 5), other sizes,
and one training computed in several ways.

A setting is one choice at one level of L1; its runs differ by seed. A difference of two settings
counts if it exceeds the noise of seeds.
"""

import numpy as np
import pandas as pd
import scipy.stats

from study.analysis.runs import (
    COMPUTED_BY,
    MAY_DIFFER,
    RECIPE,
    check_alike,
    choice,
    cross_entropy_change,
    levels,
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
    """Return `sweep` of the recipe and then of each other choice, complete runs alone.

    cross_entropy_change is over the mean of the recipe at L1 = 0. Raises ValueError when runs
    differ in more than choice, level, seed and width: the non-gated layer is wider, to have as many
    parameters.
    """
    runs = runs[runs["complete"]]
    if runs.empty:
        return pd.DataFrame(columns=["run", "choice", "l1_coefficient", *QUANTITIES])
    may_differ = [*MAY_DIFFER, *RECIPE, "intermediate_size"]
    check_alike(runs, may_differ, "choices are compared at one size and token budget")
    chosen = choice(runs)
    order = sorted(chosen.unique(), key=lambda name: (name != "recipe", name))
    table = pd.concat([sweep(runs[chosen == name], log) for name in order], ignore_index=True)
    return table.assign(cross_entropy_change=cross_entropy_change(table))


def compared_level(table: pd.DataFrame) -> float:
    """Return the level above 0 with most rows, the lowest of equals; NaN for none."""
    return float(table.loc[table["l1_coefficient"] > 0, "l1_coefficient"].mode().min())


def remedied(runs: pd.DataFrame, level: float) -> pd.DataFrame:
    """Return the complete runs at a level with a remedy for dead neurons, and the recipe's.

    No rows where there is no remedy.
    """
    if runs.empty:
        return runs
    runs = runs[runs["complete"] & (runs["l1_coefficient"] == level)]
    remedies = choice(runs).isin(["re-initialisation", "L1 warm-up"])
    return runs[remedies | (choice(runs) == "recipe")] if remedies.any() else runs[:0]


def seed_noise(table: pd.DataFrame, column: str, *, paired: bool = False) -> tuple[float, int]:
    """Return a column's standard deviation between seeds, and its degrees of freedom.

    table: `choices`. Pooled over all settings with several runs; (NaN, 0) without any. paired: what
    is left after the mean of each seed, which has the same text in the same order in all settings
    of as many tokens. active_fraction counts in natural logarithms, since activity scatters in
    proportion. SiLU's activity and settings without a dead neuron cannot scatter and are left out.
    """
    values = table[column].astype(float)
    if column != "cross_entropy_change":
        values = values.where(table["active_fraction"] < 0.99)
    if column == "active_fraction":
        values = np.log(values.where(values > 0))
    setting = table["choice"] + " " + table["l1_coefficient"].astype(str)
    seed = table["tokens"].astype(str) + " " + table["seed"].astype(str)
    scatters = values.groupby(setting).transform("std") > 0
    values, setting, seed = values[scatters], setting[scatters], seed[scatters]
    if not len(values):
        return np.nan, 0
    effects = pd.get_dummies(pd.concat([setting, seed], axis=1) if paired else setting)
    effects = effects.to_numpy(float)
    residuals = values - effects @ np.linalg.lstsq(effects, values.to_numpy(), rcond=None)[0]
    freedom = len(values) - int(np.linalg.matrix_rank(effects))
    return (float(np.sqrt((residuals**2).sum() / freedom)), freedom) if freedom else (np.nan, 0)


def noise_limit(
    table: pd.DataFrame, column: str, runs: float, other_runs: float, tests: int = 1
) -> float:
    """Return the largest difference of two means that seeds explain: Student's t at CONFIDENCE.

    Two settings are paired by seed. other_runs: infinity for one mean. tests: whose limits hold
    together (Bonferroni).
    """
    deviation, freedom = seed_noise(table, column, paired=bool(np.isfinite(other_runs)))
    if not (freedom and runs and other_runs):
        return np.nan
    quantile = scipy.stats.t.ppf(1 - (1 - CONFIDENCE) / 2 / tests, freedom)
    return float(quantile * deviation * np.sqrt(1 / runs + 1 / other_runs))


def noise_verdict(difference: float, limit: float) -> str:
    """Return "within noise", "more" or "less"; UNKNOWN for no limit, empty for no difference."""
    if np.isnan(difference):
        return ""
    if np.isnan(limit):
        return UNKNOWN
    return "within noise" if abs(difference) <= limit else "more" if difference > 0 else "less"


def contrast(
    table: pd.DataFrame,
    column: str,
    first: tuple[str, float],
    second: tuple[str, float],
    tests: int = 1,
) -> dict:
    """Return the difference of two settings of `choices`, (choice, l1_coefficient), in a column.

    Keys: runs and value (mean) of the first, other_runs and other of the second, difference, limit
    (`noise_limit`), verdict and p (two-sided). active_fraction differs in % of the second.
    """
    first_values, second_values = (
        table.loc[(table["choice"] == name) & (table["l1_coefficient"] == l1), column].dropna()
        for name, l1 in (first, second)
    )
    runs, other_runs = len(first_values), len(second_values)
    value, other = (float(rows.astype(float).mean()) for rows in (first_values, second_values))
    limit, difference = noise_limit(table, column, runs, other_runs, tests), value - other
    relative = column == "active_fraction"
    compared = float(np.log(value / other)) if relative else difference
    p = p_value(compared, limit, seed_noise(table, column, paired=True)[1], tests)
    verdict = noise_verdict(compared, limit)
    if relative:
        difference, limit = 100 * (value / other - 1), 100 * float(np.expm1(limit))
    result = {"runs": runs, "value": value, "other_runs": other_runs, "other": other}
    return result | {"difference": difference, "limit": limit, "verdict": verdict, "p": p}


def contrasts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the `contrast` of each choice with the recipe at the same level, a row a quantity.

    Shares of neurons are in %. Verdicts are corrected by Holm over all rows; limits are not.
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
    return corrected(pd.DataFrame(rows, columns=[*columns.split(), "p"]))


def p_value(
    difference: float | pd.Series, limit: float | pd.Series, freedom: float = np.inf, tests: int = 1
) -> float | np.ndarray:
    """Return the two-sided p of differences by their limits at CONFIDENCE (Student's t).

    tests: for which the limits hold together. NaN where nothing scatters.
    """
    t = scipy.stats.t
    quantile = t.ppf(1 - (1 - CONFIDENCE) / 2 / tests, freedom)
    return 2 * t.sf(np.divide(np.abs(difference), limit) * quantile, freedom)


def below(difference: pd.Series, limit: pd.Series) -> pd.Series:
    """Return which differences of a family are below zero, by limits at CONFIDENCE and Holm."""
    p = pd.Series(p_value(difference, limit), difference.index)
    return (difference < 0) & (holm(p) < 1 - CONFIDENCE)


def corrected(table: pd.DataFrame) -> pd.DataFrame:
    """Return a family of differences with verdicts corrected by Holm, without its column p."""
    noise = holm(table["p"]) >= 1 - CONFIDENCE
    return table.assign(verdict=table["verdict"].mask(noise, "within noise")).drop(columns="p")


def holm(p: pd.Series) -> pd.Series:
    """Return the p-values of a family of tests, corrected by Holm; NaN stays NaN."""
    ranked = p.dropna().sort_values()
    corrected = (ranked * np.arange(len(ranked), 0, -1)).cummax().clip(upper=1)
    return corrected.reindex(p.index)


def against_frontier(table: pd.DataFrame) -> pd.DataFrame:
    """Return each gated ReLU choice beside the recipe's line at the same activity.

    table: `choices`. Columns: choice, l1_coefficient, runs; price (% over L1 = 0), line_price,
    limit and verdict; dead (share), line_dead, dead_limit and dead_verdict. The line joins the
    recipe's alive levels over the logarithm of activity, and is NaN beyond them. Its points have
    the noise of the two levels around them; the scatter of activity is left out.
    """
    columns = "choice l1_coefficient runs price line_price limit verdict dead line_dead dead_limit"
    columns = [*columns.split(), "dead_verdict"]
    every = levels(table) if len(table) else table.assign(status="")
    alive = every[(every["choice"] == "recipe") & (every["status"] == "alive")]
    alive = alive[alive["active_fraction"] > 0].sort_values("active_fraction")
    if alive.empty:
        return pd.DataFrame(columns=columns)
    known = np.log(alive["active_fraction"].astype(float))
    remedies = every[~every["choice"].str.contains("recipe|SiLU|non-gated")]
    remedies = remedies[remedies["active_fraction"] > 0]
    names = {"cross_entropy_change": "price", "dead_fraction_train": "dead"}
    rows = []
    for row in remedies.rename(columns=names).to_dict("records"):
        log_active = np.log(row["active_fraction"])
        weights = np.array([np.interp(log_active, known, one) for one in np.eye(len(known))])
        # So many runs of one level would scatter like this point between levels.
        beside = 1 / (weights**2 / alive["runs"]).sum()
        for (column, name), prefix in zip(names.items(), ("", "dead_"), strict=True):
            line = float(np.interp(log_active, known, alive[column], np.nan, np.nan))
            limit = noise_limit(table, column, row["runs"], beside)
            row |= {f"line_{name}": line, f"{prefix}limit": limit}
            row[f"{prefix}verdict"] = noise_verdict(row[name] - line, limit)
        rows.append(row)
    return pd.DataFrame(rows, columns=columns)


def choice_table(paper: pd.DataFrame, table: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return Table 3, 4 or 5 of the paper beside ours, a row a setting of the paper's.

    paper: `results.paper()`; table: `choices`. paper_active is of 5,632 neurons; change is in %
    over the recipe at L1 = 0, dead in %. The paper's 2e-5, and 3e-4 of its warm-up, stand beside
    our `compared_level`; its other levels have no partner.
    """
    rows = paper[paper["source"] == source]
    modified = {"dead_neuron_reinit": "re-initialisation", "sparsity_warmup": "L1 warm-up"}
    named = rows["training_modification"].map(modified)
    named = named.mask(named.isna() & (rows["activation"] == "SiLU"), "SiLU")
    named = named.mask(named.isna() & ~rows["gated"].astype(bool), "non-gated").fillna("recipe")
    rows = rows.assign(choice=named, paper_l1=rows["l1"], value=rows["value"].astype(float))
    setting = ["choice", "paper_l1"]
    order = pd.MultiIndex.from_frame(rows[setting].drop_duplicates())
    names = {"cross_entropy": "paper_cross_entropy", "avg_nonzeros": "paper_active"}
    printed = rows.pivot(index=setting, columns="metric", values="value").reindex(order)
    printed = printed.rename(columns=names).rename_axis(columns=None).reset_index()
    printed = printed.astype({"paper_l1": float})
    if len(table):
        level, ours = compared_level(table), levels(table)
        ours = ours.assign(dead=100 * ours["dead_fraction_train"], l1=ours["l1_coefficient"])
        printed["l1_coefficient"] = printed["paper_l1"].map({0: 0.0, 2e-5: level, 3e-4: level})
        printed = printed.merge(ours, how="left", on=["choice", "l1_coefficient"])
        printed = printed.rename(columns={"cross_entropy_change": "change"})
    columns = [*setting, *names.values(), *"l1 runs active change dead".split()]
    return printed.reindex(columns=columns)


def sizes(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return dense and sparse models of the recipe, a row a size, rising (section 4.2).

    Sparse is at the level of L1 of most sizes, the lowest of equals; sizes without a run there are
    left out. dense_runs are at L1 = 0, of which change is in %.
    """
    size = ["parameters", "tokens", "num_layers", "hidden_size", "intermediate_size"]
    own = ["runs", "active", "active_fraction", "cross_entropy_change"]
    rows = []
    if len(runs):
        runs = runs[runs["complete"] & (choice(runs) == "recipe")]
        level = compared_level(runs.drop_duplicates(["l1_coefficient", *size]))
        for key, some in runs.groupby(size):
            by_level = levels(sweep(some, log)).set_index("l1_coefficient").astype(object)
            if level in by_level.index:
                dense_runs = by_level["runs"].get(0.0, 0)
                rows.append((*key, level, *by_level.loc[level, own], dense_runs))
    table = pd.DataFrame(rows, columns=[*size, "l1_coefficient", *own, "dense_runs"])
    return table.rename(columns={"cross_entropy_change": "change"})


def paper_sizes(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's sizes at 2e-5, with columns of `sizes`; NaN where it prints nothing."""
    active = paper[(paper["metric"] == "avg_nonzeros") & (paper["l1"] == 2e-5)]
    loss = paper[(paper["source"] == "Table 3") & (paper["activation"] == "ReLU")]
    loss = loss[loss["metric"] == "cross_entropy"]
    loss = loss.pivot(index="model", columns="sparse", values="value").astype(float)
    active = active.groupby("model")["value"].first().astype(float)
    table = pd.DataFrame({"active": active, "change": 100 * (loss[True] / loss[False] - 1)})
    table = table.rename_axis("model").reset_index()
    table["parameters"] = 1e9 * table["model"].str.removesuffix("B").astype(float)
    table["active_fraction"] = table["active"] / 5632
    table = table.assign(intermediate_size=5632, l1_coefficient=2e-5)
    return table.sort_values("parameters", ignore_index=True)


def computed_otherwise(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs of one training that was computed in several ways.

    Fewest devices and dense come first. way: the difference in words; apart: the largest difference
    of training cross-entropy from the first run's at the same steps (nats). tokens_per_second
    (median) and peak_memory (bytes of one device) are of the second half of training. Raises
    ValueError when runs differ in more than how they were computed.
    """
    complete = runs[runs["complete"]]
    columns = "run way backend devices cross_entropy active apart tokens_per_second peak_memory"
    columns = [*columns.split(), "peak_memory_whole"]
    if complete.empty:
        return pd.DataFrame(columns=columns)
    rule = "one training, computed in several ways, has one configuration and kind of device"
    check_alike(complete, set(MAY_DIFFER) - {"l1_coefficient", "seed", "device"}, rule)
    complete = complete.set_index("run", drop=False)
    table = complete[["run", "backend"]].rename_axis(None)
    table["devices"] = processes(complete)
    table["way"] = _ways(complete, table["devices"])
    table["sparse"] = table["backend"] != "dense"
    table = table.sort_values(["devices", "sparse", "run"])

    last = last_validation(log).groupby(["run", "metric"])["value"].mean().unstack()
    table["cross_entropy"], table["active"] = last["cross_entropy"], last["active_mean"]
    curves = computed_curves(complete, log)
    losses = curves[curves["metric"] == "cross_entropy"].sort_values(["run", "step"])
    # A row is a mean over the steps since the last one: only rows of the same steps compare.
    losses = losses.assign(since=losses.groupby("run")["step"].shift(fill_value=0))
    losses = losses.pivot(index=["since", "step"], columns="run", values="value")[table.index]
    table["apart"] = losses.sub(losses[table.index[0]], axis=0).abs().max()
    since = curves.groupby(["run", "metric"])["tokens"].shift(fill_value=0)
    late = curves[since >= complete["tokens"].iloc[0] / 2]  # rows without a step of the first half
    for column, metric, rows, statistic in (
        ("tokens_per_second", "tokens_per_second", late, "median"),
        ("peak_memory", "peak_memory", late, "max"),
        ("peak_memory_whole", "peak_memory", curves, "max"),
    ):
        values = rows[rows["metric"] == metric].groupby("run")["value"]
        table[column] = values.agg(statistic).astype(float)
    return table[columns].reset_index(drop=True)


def _ways(runs: pd.DataFrame, devices: pd.Series) -> pd.Series:
    """Return how each run was computed, in words, as far as the others differ."""
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
    rows = log[log["run"].isin(runs.loc[runs["complete"], "run"])]
    metrics = ["cross_entropy", "tokens_per_second", "peak_memory"]
    rows = rows[(rows["split"] == "train") & rows["metric"].isin(metrics)]
    return rows[["run", "metric", "step", "tokens", "value"]].reset_index(drop=True)
