"""Sparse models beside dense ones on the same items: paired differences, over items and seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from twell.analysis.variants import CONFIDENCE, noise_verdict

DRAWS = 2000  # bootstrap samples
# Task -> the column that counts, chosen from dense models, and what guessing gives.
SCORES = {
    "continuation": ("correct", 0.25),
    "last_word": ("correct", 0.0),
    "arc_easy": ("correct", 0.25),
    "piqa": ("correct", 0.5),
    "hellaswag": ("by_bytes", 0.25),
    "held_out_text": ("nats", np.nan),
}


def paired(items: pd.DataFrame, dense: list[str], sparse: list[str]) -> pd.DataFrame:
    """Return the difference of sparse models from dense ones on each task of SCORES.

    items: answers of `scripts.keep` with a column run; dense, sparse: runs, which differ by seed.
    Columns: task, items, dense_runs and runs, dense and sparse (means; accuracies in %,
    held_out_text in nats a token), difference, low and high: its 95% interval over items (paired
    bootstrap of the means over seeds), seeds: the limit that seeds explain (Student's t, NaN where
    neither side has several), limit: both together, verdict as `noise_verdict`, and above_chance:
    whether the dense models' interval over items is.
    """
    columns = "task items dense_runs runs dense sparse difference low high seeds limit verdict"
    items = items.reindex(columns=["run", "task", "item", "correct", "by_bytes", "nats"])
    rows, random = [], np.random.default_rng(0)
    for task, (column, chance) in SCORES.items():
        asked = items[(items["task"] == task) & items["run"].isin([*dense, *sparse])]
        if asked.empty:
            continue
        unit = 1 if column == "nats" else 100
        wide = unit * asked.pivot(index="item", columns="run", values=column)
        first, second = (wide[[run for run in names if run in wide]] for names in (dense, sparse))
        if not (first.shape[1] and second.shape[1]):
            continue
        both = np.stack([first.mean(axis=1), second.mean(axis=1)])
        drawn = random.integers(0, len(wide), (DRAWS, len(wide)))
        ends = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
        low, high = np.quantile((both[1] - both[0])[drawn].mean(axis=1), ends)
        difference, seeds = both[1].mean() - both[0].mean(), _seed_limit(first, second)
        limit = float(np.hypot((high - low) / 2, seeds))
        verdict = noise_verdict(difference, limit) if np.isfinite(seeds) else "one seed"
        row = task, len(wide), first.shape[1], second.shape[1], *both.mean(axis=1), difference
        lowest = np.quantile(both[0][drawn].mean(axis=1), ends[0])
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
