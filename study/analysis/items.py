"""Models beside each other on the same items: paired differences, with intervals over items.

`paired_runs` compares sparse with dense runs, several seeds of each, by the answers that
`study.keep` leaves. `paired_records` compares two evaluations of `twell evaluate`, or of
`answer_records`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from study.analysis.tasks import MEAN, TASKS
from study.analysis.variants import CONFIDENCE, noise_verdict

DRAWS = 2000  # bootstrap samples
_ENDS = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2  # quantiles of an interval
# Task -> the column that counts, chosen from dense models, and what guessing gives.
SCORES = {
    "continuation": ("correct", 0.25),
    "last_word": ("correct", 0.0),
    "arc_easy": ("correct", 0.25),
    "piqa": ("correct", 0.5),
    "hellaswag": ("by_bytes", 0.25),
    "held_out_text": ("nats", np.nan),
}


def paired_runs(items: pd.DataFrame, dense: list[str], sparse: list[str]) -> pd.DataFrame:
    """Return the difference of sparse models from dense ones on each task of SCORES.

    items: answers of `study.keep` with a column run, those of a task in one order in all runs;
    dense, sparse: runs, which differ by seed.
    Columns: task, items, dense_runs and runs, dense and sparse (means; accuracies in %,
    held_out_text in nats a token), difference, low and high: its 95% interval over items (paired
    bootstrap of the means over seeds), seeds: the limit that seeds explain (Student's t, NaN where
    neither side has several), limit: both together, verdict as `noise_verdict`, and above_chance:
    whether the dense models' interval over items is. Raises ValueError where runs have not as many
    items.
    """
    columns = "task items dense_runs runs dense sparse difference low high seeds limit verdict"
    items = items.reindex(columns=["run", "task", "correct", "by_bytes", "nats"])
    items = items.assign(item=items.groupby(["run", "task"]).cumcount())
    rows, random = [], np.random.default_rng(0)
    for task, (column, chance) in SCORES.items():
        asked = items[(items["task"] == task) & items["run"].isin([*dense, *sparse])]
        if asked.empty:
            continue
        sizes = asked.groupby("run").size()
        if sizes.nunique() > 1:
            numbers = ", ".join(f"{size} in {run}" for run, size in sizes.items())
            raise ValueError(f"{task} has {numbers}".replace(" in ", " items in ", 1))
        unit = 1 if column == "nats" else 100
        wide = unit * asked.pivot(index="item", columns="run", values=column)
        first, second = (wide[[run for run in names if run in wide]] for names in (dense, sparse))
        if not (first.shape[1] and second.shape[1]):
            continue
        both = np.stack([first.mean(axis=1), second.mean(axis=1)])
        drawn = random.integers(0, len(wide), (DRAWS, len(wide)))
        low, high = np.quantile((both[1] - both[0])[drawn].mean(axis=1), _ENDS)
        difference, seeds = both[1].mean() - both[0].mean(), _seed_limit(first, second)
        limit = float(np.hypot((high - low) / 2, seeds))
        verdict = noise_verdict(difference, limit) if np.isfinite(seeds) else "one seed"
        row = task, len(wide), first.shape[1], second.shape[1], *both.mean(axis=1), difference
        lowest = np.quantile(both[0][drawn].mean(axis=1), _ENDS[0])
        rows.append((*row, low, high, seeds, limit, verdict, bool(lowest > unit * chance)))
    return pd.DataFrame(rows, columns=[*columns.split(), "above_chance"])


def _seed_limit(first: pd.DataFrame, second: pd.DataFrame) -> float:
    """The largest difference of two means that seeds explain; columns are seeds."""
    means = [table.mean() for table in (first, second)]
    freedom = sum(len(one) - 1 for one in means)
    if not freedom:
        return np.nan
    pooled = sum(((one - one.mean()) ** 2).sum() for one in means) / freedom
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
    return float(quantile * np.sqrt(pooled * sum(1 / len(one) for one in means)))


def answer_records(items: pd.DataFrame) -> dict[str, dict]:
    """Return what `paired_records` takes of each run, from answers of `study.keep`.

    items: with a column run, those of a task in order. Other tasks than the seven are left out, and
    runs without one. Accuracies are those of lm-eval's "acc".
    """
    records = {}
    items = items[items["task"].isin(TASKS)]
    for (run, task), rows in items.dropna(subset="correct").groupby(["run", "task"]):
        marks = "".join(str(int(mark)) for mark in rows["correct"])
        fact = {"data": "study.keep", "items": len(marks), "correct": marks}
        records.setdefault(run, {"tasks": {}})["tasks"][task] = fact
    return records


def paired_records(one: dict, other: dict, draws: int = 10_000) -> pd.DataFrame:
    """Return how much more accurate `one` is than `other`, on the same items of the seven tasks.

    one, other: records of `results.load_evaluations` with "correct", or of `answer_records`. Rows:
    the tasks that both have, and the mean of these. Columns: task, items, accuracy, other,
    difference, low, high; the 95% interval is from `draws` bootstrap samples of the items of each
    task, the same for both models. Raises ValueError for records without single items, or of other
    items.
    """
    random, rows, samples = np.random.default_rng(0), [], []
    for name in TASKS:
        if name == MEAN or not (name in one["tasks"] and name in other["tasks"]):
            continue
        facts = one["tasks"][name], other["tasks"][name]
        if any("correct" not in fact for fact in facts):
            raise ValueError(f"a record has no single items of {name}; evaluate the model anew")
        if len({(fact["data"], fact["items"]) for fact in facts}) > 1:
            sources = " and ".join(f"{fact['items']} of {fact['data']}" for fact in facts)
            raise ValueError(f"the items of {name} differ: {sources}")
        marks = np.array([[int(mark) for mark in fact["correct"]] for fact in facts])
        gains, items = marks[0] - marks[1], marks.shape[1]
        # A sample of items is known by how often each of the three gains is in it.
        shares = [(gains == gain).mean() for gain in (-1, 0, 1)]
        drawn = random.multinomial(items, shares, draws)
        samples.append((drawn[:, 2] - drawn[:, 0]) / items)
        rows.append((name, items, *marks.mean(1), gains.mean()))
    if not rows:
        raise ValueError("the records have none of the seven tasks in common")
    columns = ["task", "items", "accuracy", "other", "difference"]
    table = pd.DataFrame(rows, columns=columns)
    mean = table[columns[2:]].mean().to_dict() | {"task": "mean", "items": table["items"].sum()}
    table = pd.concat([table, pd.DataFrame([mean])], ignore_index=True)[columns]
    low, high = np.quantile([*samples, np.mean(samples, axis=0)], _ENDS, axis=1)
    return table.assign(low=low, high=high)
