"""Tables over training tokens, and of the time that two trainings take to one loss."""

import math

import numpy as np
import pandas as pd
import scipy.interpolate
import scipy.stats

from study.analysis.runs import check_alike, choice, levels, sweep, training_curves
from study.analysis.variants import CONFIDENCE, QUANTITIES, noise_limit

BUDGETS = 2  # numbers of tokens, at least, of a level that is compared over tokens
_END = 0.05  # the share of training, its last, whose cross-entropy stands for the training text
_LOSS, _ACTIVE, _DEAD = QUANTITIES
RACED = {"backend", "l1_coefficient"}  # fields in which two trainings of a race may differ


def over_tokens(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the recipe's outcome by training tokens and level, of levels with several budgets.

    active (neurons), dead (%), change (of held-out cross-entropy, % over L1 = 0 on the same tokens)
    and train_change (the same on the training text) are means over seeds. NAME_low to NAME_high is
    the 95% interval by the noise of seeds (`noise_limit`), NaN where a side has a single run.
    """
    names = ["active", "dead", "change", "train_change"]
    names = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    tables = [_of_budget(table) for table in _budgets(runs, log)]
    table = pd.concat([pd.DataFrame(columns=["tokens", "l1_coefficient"]), *tables])
    table = table.reindex(columns=["tokens", "l1_coefficient", "runs", "dense_runs", *names])
    several = table.groupby("l1_coefficient")["tokens"].transform("nunique") >= BUDGETS
    return table[several].sort_values(["l1_coefficient", "tokens"], ignore_index=True)


def _budgets(runs: pd.DataFrame, log: pd.DataFrame) -> list[pd.DataFrame]:
    """The recipe's `sweep` on each number of tokens, with `train_change`, as `over_tokens`."""
    runs = runs[runs["complete"].astype(bool) & (choice(runs) == "recipe")]
    if runs.empty:
        return []
    curves = training_curves(runs, log, "cross_entropy")
    last = curves.groupby("run")["tokens"].transform(_at_end)
    losses = curves[last].groupby("run")["value"].mean()
    tables = []
    for _, some in runs.groupby("tokens"):
        table = sweep(some, log)
        loss = table["run"].map(losses)
        table["train_change"] = 100 * (loss / loss[table["l1_coefficient"] == 0].mean() - 1)
        tables.append(table)
    return tables


def _at_end(tokens: pd.Series) -> pd.Series:
    return tokens > (1 - _END) * tokens.max()


def _of_budget(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of `over_tokens` from a `sweep` on one number of tokens."""
    by_level, rows = levels(table), []
    dense = int(by_level.loc[by_level["l1_coefficient"] == 0, "runs"].sum())
    for row in by_level.to_dict("records"):
        seeds = row["runs"]
        known = seeds > 1  # a single run has no interval of its own
        spread = noise_limit(table, _ACTIVE, seeds, np.inf) if known else np.nan
        row["active_low"] = row["active"] * np.exp(-spread)  # activity scatters in proportion
        row["active_high"] = row["active"] * np.exp(spread)

        limit = 100 * noise_limit(table, _DEAD, seeds, np.inf) if known else np.nan
        row |= _interval("dead", 100 * row["dead_fraction_train"], limit)

        compared = row["l1_coefficient"] > 0
        for name, column in (("change", _LOSS), ("train_change", "train_change")):
            counts = table.dropna(subset=column)["l1_coefficient"].value_counts()
            pair = counts.get(row["l1_coefficient"], 0), counts.get(0.0, 0)
            limit = noise_limit(table, column, *pair) if compared and min(pair) > 1 else np.nan
            row |= _interval(name, row[column], limit)
        rows.append(row)
    return pd.DataFrame(rows).assign(dense_runs=dense)


def _interval(name: str, mean: float, limit: float) -> dict[str, float]:
    return {name: mean, f"{name}_low": mean - limit, f"{name}_high": mean + limit}


def trend(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return how the change of held-out cross-entropy rises over doublings of tokens, by level.

    Levels with three numbers of tokens or more count. slope: of a straight line (points of % a
    doubling); bend: of a parabola; later_bend: the same without the fewest tokens. Least squares on
    the runs, with a mean of L1 = 0 for each number of tokens; NAME_limit is the 95% interval.
    """
    tables = [table.dropna(subset=_LOSS) for table in _budgets(runs, log)]
    present, rows = {level for table in tables for level in table["l1_coefficient"]}, []
    for level in sorted(present - {0.0}):
        some = [table for table in tables if {0.0, level} <= set(table["l1_coefficient"])]
        if len(some) < 3:
            continue
        every = pd.concat(some)
        every = every[every["l1_coefficient"].isin([0.0, level])]
        most = some[-1][some[-1]["l1_coefficient"] == level]
        rows.append(
            {
                "l1_coefficient": level,
                "budgets": len(some),
                "runs": len(every),
                "first": every["tokens"].min(),
                "last": every["tokens"].max(),
                "last_change": most[_LOSS].mean(),
                "last_train_change": most["train_change"].mean(),
                **_fitted("slope", every, 1),
                **_fitted("bend", every, 2),
                **_fitted("later_bend", every[every["tokens"] > every["tokens"].min()], 2),
            }
        )
    names = "l1_coefficient budgets runs first last last_change last_train_change slope"
    names += " slope_limit bend bend_limit later_bend later_bend_limit"
    return pd.DataFrame(rows, columns=names.split())


def _fitted(name: str, runs: pd.DataFrame, degree: int) -> dict[str, float]:
    """Return the last coefficient of a polynomial in doublings, by least squares, and its limit."""
    sparse = (runs["l1_coefficient"] > 0).to_numpy(float)
    tokens = runs["tokens"].to_numpy(float)
    budgets = pd.get_dummies(tokens).to_numpy(float)
    if budgets.shape[1] <= degree:
        return {name: np.nan, f"{name}_limit": np.nan}
    doublings = np.log2(tokens / tokens.max())
    powers = [sparse * doublings**power / math.factorial(power) for power in range(degree + 1)]
    terms, values = np.column_stack([budgets, *powers]), runs[_LOSS].to_numpy(float)
    found = np.linalg.lstsq(terms, values)[0]
    freedom, limit = len(values) - terms.shape[1], np.nan
    if freedom > 0:
        variance = ((values - terms @ found) ** 2).sum() / freedom
        error = np.sqrt(variance * np.linalg.inv(terms.T @ terms)[-1, -1])
        limit = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error
    return {name: found[-1], f"{name}_limit": limit}


def race(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the validations of complete runs over the seconds of training, slowest run first.

    seconds are of training alone, by the logged tokens/s; peak_memory is the run's most bytes;
    train_last is the cross-entropy on the training text at the end. Raises ValueError when runs
    differ in more than backend and level.
    """
    columns = "run backend l1_coefficient tokens seconds cross_entropy peak_memory train_last"
    columns = columns.split()
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
        losses = rows[(rows["split"] == "train") & (rows["metric"] == "cross_entropy")]
        table["train_last"] = losses.loc[_at_end(losses["tokens"]), "value"].mean()
        tables.append(table.assign(**{name: run[name] for name in columns[:3]})[columns])
    tables.sort(key=lambda table: -table["seconds"].max())
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def reached(raced: pd.DataFrame, loss: float | None = None) -> pd.DataFrame:
    """Return the seconds and tokens after which each run of `race` has a loss.

    loss: in nats, by default the highest of their last losses, which all reach. Between validations
    a monotone cubic is drawn. tokens is NaN where the loss is not reached; last is the run's own
    last loss.
    """
    last = raced.groupby("run", sort=False)["cross_entropy"].last()
    rows = []
    target, by = last.max() if loss is None else loss, ["run", "backend", "l1_coefficient"]
    for (run, backend, level), table in raced.groupby(by, sort=False):
        tokens, losses = table["tokens"].astype(float), table["cross_entropy"]
        where = tokens[losses <= target].min()  # NaN for none
        if where > tokens.min():
            curve = scipy.interpolate.PchipInterpolator(tokens, losses)
            where = np.append(where, curve.solve(target, False, extrapolate=False)).min()
        seconds = np.interp(where, tokens, table["seconds"])
        whole = table[["peak_memory", "train_last"]].iloc[0]
        rows.append((run, backend, level, target, seconds, where, last[run], *whole))
    columns = [*by, "cross_entropy", "seconds", "tokens", "last", "peak_memory", "train_last"]
    return pd.DataFrame(rows, columns=columns)


def late_gain(raced: pd.DataFrame) -> float:
    """Return the tokens/s of the sparse run of a `race` over the dense one's, in %.

    Of the second half of training, when activity has settled. Raises KeyError without a dense run.
    """
    late = raced[raced["tokens"] >= raced["tokens"].max() / 2].groupby("backend")
    spans = late[["tokens", "seconds"]].agg(np.ptp)
    speeds = spans["tokens"] / spans["seconds"]
    return float(100 * (speeds.drop("dense").item() / speeds["dense"] - 1))
