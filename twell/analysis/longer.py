"""Tables over training tokens, and of the time that two trainings take to one loss."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from twell.analysis.runs import check_alike, choice, levels, sweep
from twell.analysis.variants import CONFIDENCE, QUANTITIES, noise_limit

BUDGETS = 2  # numbers of tokens, at least, of a level that is compared over tokens
RACED = {"backend", "l1_coefficient"}  # fields in which two trainings of a race may differ


def over_tokens(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the recipe's outcome by training tokens and level, of levels with several budgets.

    Each number of tokens is a schedule of its own. Columns: tokens, l1_coefficient, runs (seeds),
    dense_runs (those at L1 = 0), and for active (neurons), dead (%) and change (of cross-entropy,
    % over L1 = 0 on the same tokens) the mean over seeds, NAME_low and NAME_high: the 95% interval
    by the noise of seeds on these tokens (`noise_limit`), NaN for a single run. Of the change also
    NaN where L1 = 0 has a single run.
    """
    names = ["active", "dead", "change"]
    names = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    tables = [_of_budget(table) for table in _budgets(runs, log)]
    table = pd.concat([pd.DataFrame(columns=["tokens", "l1_coefficient"]), *tables])
    table = table.reindex(columns=["tokens", "l1_coefficient", "runs", "dense_runs", *names])
    several = table.groupby("l1_coefficient")["tokens"].transform("nunique") >= BUDGETS
    return table[several].sort_values(["l1_coefficient", "tokens"], ignore_index=True)


def _budgets(runs: pd.DataFrame, log: pd.DataFrame) -> list[pd.DataFrame]:
    """The recipe's `sweep` on each number of tokens."""
    runs = runs[runs["complete"].astype(bool) & (choice(runs) == "recipe")]
    return [sweep(some, log) for _, some in runs.groupby("tokens")] if len(runs) else []


def _of_budget(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of `over_tokens` from a `sweep` on one number of tokens."""
    by_level, rows = levels(table), []
    dense = int(by_level.loc[by_level["l1_coefficient"] == 0, "runs"].sum())
    loss, active, dead = QUANTITIES
    for row in by_level.to_dict("records"):
        seeds = row["runs"]
        known = seeds > 1  # a single run has no interval of its own
        spread = noise_limit(table, active, seeds, np.inf) if known else np.nan
        row["active_low"] = row["active"] * np.exp(-spread)  # activity scatters in proportion
        row["active_high"] = row["active"] * np.exp(spread)

        limit = 100 * noise_limit(table, dead, seeds, np.inf) if known else np.nan
        row |= _interval("dead", 100 * row["dead_fraction_train"], limit)

        both = known and dense > 1 and row["l1_coefficient"] > 0
        limit = noise_limit(table, loss, seeds, dense) if both else np.nan
        row |= _interval("change", row["cross_entropy_change"], limit)
        rows.append(row)
    return pd.DataFrame(rows).assign(dense_runs=dense)


def _interval(name: str, mean: float, limit: float) -> dict[str, float]:
    return {name: mean, f"{name}_low": mean - limit, f"{name}_high": mean + limit}


def trend(runs: pd.DataFrame, log: pd.DataFrame, tokens: float) -> pd.DataFrame:
    """Return the straight line of the change of cross-entropy over doublings of tokens, by level.

    runs, log: as for `over_tokens`; a level with L1 counts that has three numbers of tokens or more
    with runs at L1 = 0 too. Columns: l1_coefficient, budgets (their number), runs (all that count),
    first and last (tokens), slope (points of % a doubling) and slope_limit, at (the line at
    `tokens`, in %) and at_limit. Least squares on the runs, with a mean of L1 = 0 for each number
    of tokens; limits are its 95% intervals (Student's t), as if all runs scattered alike about
    a straight line. They say nothing of whether the line goes on.
    """
    tables = [table.dropna(subset="cross_entropy_change") for table in _budgets(runs, log)]
    present, rows = {level for table in tables for level in table["l1_coefficient"]}, []
    for level in sorted(present - {0.0}):
        some = [table for table in tables if {0.0, level} <= set(table["l1_coefficient"])]
        if len(some) < 3:
            continue
        every = pd.concat(some)
        every = every[every["l1_coefficient"].isin([0.0, level])]
        sparse = (every["l1_coefficient"] == level).to_numpy(float)
        doublings = np.log2(every["tokens"].to_numpy(float) / tokens)
        budgets = pd.get_dummies(every["tokens"]).to_numpy(float)
        line = _least_squares(
            np.column_stack([budgets, sparse, sparse * doublings]),
            every["cross_entropy_change"].to_numpy(float),
        )
        (at, slope), (at_limit, slope_limit) = (values[-2:] for values in line)
        row = level, len(some), len(every), every["tokens"].min(), every["tokens"].max()
        rows.append((*row, slope, slope_limit, at, at_limit))
    columns = "l1_coefficient budgets runs first last slope slope_limit at at_limit"
    return pd.DataFrame(rows, columns=columns.split())


def _least_squares(terms: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the coefficients of columns of terms, and their 95% intervals by Student's t."""
    freedom = len(values) - terms.shape[1]
    found = np.linalg.lstsq(terms, values)[0]
    variance = ((values - terms @ found) ** 2).sum() / freedom
    errors = np.sqrt(variance * np.linalg.inv(terms.T @ terms).diagonal())
    return found, scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * errors


def race(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the validations of complete runs over the seconds of training, slowest run first.

    Columns: run, backend, l1_coefficient, tokens, seconds (of training alone, by the logged
    tokens/s), cross_entropy, peak_memory (the run's most bytes, NaN on a CPU). Raises ValueError
    when runs differ in more than backend and level.
    """
    columns = "run backend l1_coefficient tokens seconds cross_entropy peak_memory".split()
    runs = runs[runs["complete"].astype(bool)] if len(runs) else runs
    tables = []
    if len(runs):
        computed = "run path complete versions commit command parameters micro_batch compile"
        computed += " log_every valid_every checkpoint_every"
        check_alike(runs, [*RACED, *computed.split()], "a race is of one model, text and device")
    for run in runs.to_dict("records"):
        rows = log[log["run"] == run["run"]]
        speed = rows[(rows["split"] == "train") & (rows["metric"] == "tokens_per_second")]
        tokens = speed["tokens"].to_numpy()
        seconds = np.cumsum(np.diff(tokens, prepend=0) / speed["value"].to_numpy())
        valid = rows[(rows["split"] == "valid") & (rows["metric"] == "cross_entropy")]
        table = valid[["tokens", "value"]].rename(columns={"value": "cross_entropy"})
        table["seconds"] = np.interp(table["tokens"], [0, *tokens], [0, *seconds])
        table["peak_memory"] = rows.loc[rows["metric"] == "peak_memory", "value"].max()
        tables.append(table.assign(**{name: run[name] for name in columns[:3]})[columns])
    tables.sort(key=lambda table: -table["seconds"].max())
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def reached(raced: pd.DataFrame, loss: float | None = None) -> pd.DataFrame:
    """Return the seconds and tokens after which each run of `race` has a loss.

    loss: in nats; without one it is the highest of their last losses, which all reach. Between two
    validations the loss is linear. Columns: run, backend, l1_coefficient, cross_entropy, seconds,
    tokens (NaN where it is not reached), last (its own last loss), peak_memory.
    """
    last = raced.groupby("run", sort=False)["cross_entropy"].last()
    rows = []
    target, by = last.max() if loss is None else loss, ["run", "backend", "l1_coefficient"]
    for (run, backend, level), table in raced.groupby(by, sort=False):
        end = int(np.argmax(table["cross_entropy"].to_numpy() <= target))
        near = table.iloc[max(end - 1, 0) : end + 1].sort_values("cross_entropy")
        seconds, tokens = (
            float(np.interp(target, near["cross_entropy"], near[name], left=np.nan))
            for name in ("seconds", "tokens")
        )
        peak = table["peak_memory"].iloc[0]
        rows.append((run, backend, level, target, seconds, tokens, last[run], peak))
    columns = [*by, "cross_entropy", "seconds", "tokens", "last", "peak_memory"]
    return pd.DataFrame(rows, columns=columns)
