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
    runs = runs[runs["complete"].astype(bool) & (choice(runs) == "recipe")]
    budgets = [some for _, some in runs.groupby("tokens")] if len(runs) else []
    names = ["active", "dead", "change"]
    names = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    tables = [_of_budget(sweep(some, log)) for some in budgets]
    table = pd.concat([pd.DataFrame(columns=["tokens", "l1_coefficient"]), *tables])
    table = table.reindex(columns=["tokens", "l1_coefficient", "runs", "dense_runs", *names])
    several = table.groupby("l1_coefficient")["tokens"].transform("nunique") >= BUDGETS
    return table[several].sort_values(["l1_coefficient", "tokens"], ignore_index=True)


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


def trend(table: pd.DataFrame, tokens: float) -> pd.DataFrame:
    """Return the straight line of the change of cross-entropy over doublings of tokens, by level.

    table: `over_tokens`; a level with L1 counts that has three numbers of tokens or more. Columns:
    l1_coefficient, budgets (their number), first and last (tokens), slope (points of % a doubling)
    and slope_limit, at (the line at `tokens`, in %) and at_limit. Limits are 95% intervals of least
    squares (Student's t) on one point a budget. They say nothing of whether the line goes on.
    """
    rows = []
    for level, some in table[table["l1_coefficient"] > 0].groupby("l1_coefficient"):
        some = some.dropna(subset="change")
        if len(some) < 3:
            continue
        x, change = np.log2(some["tokens"].astype(float)), some["change"].astype(float)
        line = scipy.stats.linregress(x, change)
        quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(some) - 2)
        beyond = np.log2(tokens) - x.mean()
        middle = line.stderr * x.std(ddof=0)  # standard error of the line at its middle
        spread = float(np.hypot(middle, line.stderr * beyond))
        at = change.mean() + line.slope * beyond
        row = level, len(some), some["tokens"].min(), some["tokens"].max()
        rows.append((*row, line.slope, quantile * line.stderr, at, quantile * spread))
    columns = "l1_coefficient budgets first last slope slope_limit at at_limit"
    return pd.DataFrame(rows, columns=columns.split())


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


def reached(raced: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds and tokens after which each run of `race` has the loss that all reach.

    That is the highest of their last losses; between two validations the loss is linear. Columns:
    run, backend, l1_coefficient, cross_entropy, seconds, tokens, last (its own last loss),
    peak_memory.
    """
    last = raced.groupby("run", sort=False)["cross_entropy"].last()
    rows = []
    target, by = last.max(), ["run", "backend", "l1_coefficient"]
    for (run, backend, level), table in raced.groupby(by, sort=False):
        end = int(np.argmax(table["cross_entropy"].to_numpy() <= target))
        near = table.iloc[max(end - 1, 0) : end + 1].sort_values("cross_entropy")
        seconds, tokens = (
            float(np.interp(target, near["cross_entropy"], near[name]))
            for name in ("seconds", "tokens")
        )
        peak = table["peak_memory"].iloc[0]
        rows.append((run, backend, level, target, seconds, tokens, last[run], peak))
    columns = [*by, "cross_entropy", "seconds", "tokens", "last", "peak_memory"]
    return pd.DataFrame(rows, columns=columns)
