"""Tables of the time that two trainings take to one loss."""

import numpy as np
import pandas as pd
import scipy.interpolate

from study.analysis.runs import MAY_DIFFER, check_alike

_END = 0.05  # the share of training, its last, whose cross-entropy stands for the training text


def race(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the validations of complete runs over the seconds of training, slowest run first.

    seconds are of training alone, by the logged tokens/s; train_last is the cross-entropy on the
    training text at the end. Raises ValueError when runs differ in more than backend and level.
    """
    columns = ["run", "backend", "tokens", "seconds", "cross_entropy", "train_last"]
    runs, tables = runs[runs["complete"]], []
    may_differ = {*MAY_DIFFER} - {"device", "seed", "checkpoint_activations"}
    check_alike(runs, may_differ, "a race is of one model, text and device")
    for run in runs.to_dict("records"):
        rows = log[log["run"] == run["run"]]
        speed = rows[(rows["split"] == "train") & (rows["metric"] == "tokens_per_second")]
        tokens = speed["tokens"].to_numpy()
        seconds = np.cumsum(np.diff(tokens, prepend=0) / speed["value"].to_numpy())
        valid = rows[(rows["split"] == "valid") & (rows["metric"] == "cross_entropy")]
        table = valid[["tokens", "value"]].rename(columns={"value": "cross_entropy"})
        table["seconds"] = np.interp(table["tokens"], [0, *tokens], [0, *seconds])
        losses = rows[(rows["split"] == "train") & (rows["metric"] == "cross_entropy")]
        at_end = losses["tokens"] > (1 - _END) * losses["tokens"].max()
        table["train_last"] = losses.loc[at_end, "value"].mean()
        tables.append(table.assign(run=run["run"], backend=run["backend"])[columns])
    tables.sort(key=lambda table: -table["seconds"].max())
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def reached(raced: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds and tokens after which each run of `race` reaches the same loss.

    It is the highest of their last losses (nats). Between validations a monotone cubic is drawn.
    last is the run's own last loss.
    """
    last = raced.groupby("run", sort=False)["cross_entropy"].last()
    rows, target = [], last.max()
    for run, table in raced.groupby("run", sort=False):
        tokens, losses = table["tokens"].astype(float), table["cross_entropy"]
        where = tokens[losses <= target].min()
        if where > tokens.min():
            curve = scipy.interpolate.PchipInterpolator(tokens, losses)
            where = np.append(where, curve.solve(target, False, extrapolate=False)).min()
        seconds = np.interp(where, tokens, table["seconds"])
        rows.append((run, target, seconds, where, last[run], table["train_last"].iloc[0]))
    columns = ["run", "cross_entropy", "seconds", "tokens", "last", "train_last"]
    return pd.DataFrame(rows, columns=columns)


def late_gain(raced: pd.DataFrame) -> float:
    """Return the tokens/s of the sparse run of a `race` over the dense one's, in %.

    Of the second half of training, when activity has settled. Raises KeyError without a dense run.
    """
    half, seconds = raced["tokens"].max() / 2, {}
    for backend, run in raced.groupby("backend"):
        at_half = np.interp(half, run["tokens"], run["seconds"])
        seconds[backend == "dense"] = run["seconds"].max() - at_half
    return float(100 * (seconds[True] / seconds[False] - 1))
