"""Accuracies of downstream tasks (Table 6) beside chance, and models beside each other on the same
items: paired differences, with intervals over items.
"""

import numpy as np
import pandas as pd
import scipy.stats

from study.analysis.variants import CONFIDENCE, corrected, noise_verdict, p_value
from twell.tables import COMPUTED, EVALUATED, SIZE, level_name, verdicts

MEAN = "paper7"  # the group of tasks whose accuracy is the mean of the seven
TASKS = "arc_easy arc_challenge hellaswag openbookqa piqa winogrande commonsense_qa".split()


def seven_tasks(table: pd.DataFrame) -> pd.DataFrame:
    """Return from `evaluations` the rows of Table 6: acc of the seven tasks and of their mean.

    Only of models that have the mean. A model evaluated more than once counts once: with the most
    items, then in fp32, then densely, then as it first stands in the table.
    """
    table = table[(table["metric"] == "acc") & table["task"].isin([*TASKS, MEAN])]
    means = table[table["task"] == MEAN]
    means = means.assign(rounded=means["dtype"] != "float32", sparse=means["backend"] != "dense")
    order = {"ascending": [False, True, True], "kind": "stable"}
    means = means.sort_values(["items", "rounded", "sparse"], **order)
    means = means.drop_duplicates(EVALUATED)[[*EVALUATED, *COMPUTED]]
    rows = table.merge(means, on=[*EVALUATED, *COMPUTED])
    rows = rows.sort_values("items", ascending=False, kind="stable")
    return rows.drop_duplicates([*EVALUATED, "task"]).sort_index().reset_index(drop=True)


def by_level(seven: pd.DataFrame) -> pd.DataFrame:
    """Return `seven_tasks` with the mean over models of one size, training tokens and level.

    stderr is the mean of the models' errors: all were asked the same items.
    """
    numbers = {name: (name, "mean") for name in ("accuracy", "stderr", "chance")}
    groups = seven.groupby([*SIZE, "l1_coefficient", "task"], dropna=False)
    table = groups.agg(models=("model", "size"), **numbers).reset_index()
    return table.assign(verdict=verdicts(table))


def several_levels(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` of sizes with more than two levels; without any, with two."""
    number = levels.groupby(SIZE, dropna=False)["l1_coefficient"].transform("nunique")
    return levels[number > (2 if (number > 2).any() else 1)]


def accuracies(table: pd.DataFrame) -> pd.DataFrame:
    """Return `evaluations` of one backend and type to be read: a row a model, a column a score.

    Cells are "accuracy ± error" in %, in brackets where near chance or below it; rows are by size
    and level. The first row is chance, the second the number of items.
    """
    if not len(table):
        return pd.DataFrame()
    table = table.sort_values([*SIZE, "l1_coefficient"], kind="stable")
    accuracy, stderr, chance = (
        (100 * table[name]).map("{:.1f}".format) for name in ("accuracy", "stderr", "chance")
    )
    cell = accuracy + " ± " + stderr
    cell = cell.mask(table["verdict"].isin(["near chance", "below chance"]), "(" + cell + ")")
    column = table["task"] + np.where(table["metric"] == "acc", "", ", " + table["metric"])
    column = column.str.replace("_", " ")
    name = table["model"] + ", L1 = " + table["l1_coefficient"].map(level_name)
    wide = pd.DataFrame({"model": name, "column": column, "cell": cell})
    wide = wide.drop_duplicates(["model", "column"]).pivot(index="model", columns="column")["cell"]
    wide = wide.loc[name.unique(), column.unique()]
    first = pd.DataFrame({"chance": chance, "items": table["items"].map("{:,}".format)})
    first = first.assign(column=column).drop_duplicates("column").set_index("column").T
    return pd.concat([first, wide]).fillna("").rename_axis(None, axis=1)


def against_dense(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of each sparse model beside the dense one (L1 = 0) of its size.

    levels: `by_level`. stderr is of the difference, with errors taken as independent; above_chance:
    whether either model is.
    """
    means = levels[levels["task"] == MEAN]
    sparse, dense = means[means["l1_coefficient"] > 0], means[means["l1_coefficient"] == 0]
    both = sparse.merge(dense, on=SIZE, suffixes=("", "_dense"))
    result = both[[*SIZE, "l1_coefficient", "accuracy"]].assign(dense=both["accuracy_dense"])
    result["difference"] = both["accuracy"] - both["accuracy_dense"]
    result["stderr"] = np.hypot(both["stderr"], both["stderr_dense"])
    result["above_chance"] = (both[["verdict", "verdict_dense"]] == "above chance").any(axis=1)
    return result


DRAWS = 2000  # bootstrap samples
_ENDS = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2  # quantiles of an interval
SCORES = {  # task -> the column that counts, chosen from dense models, and what guessing gives
    "continuation": ("correct", 0.25),
    "last_word": ("correct", 0.0),
    "arc_easy": ("correct", 0.25),
    "piqa": ("correct", 0.5),
    "hellaswag": ("by_bytes", 0.25),
    "held_out_text": ("nats", np.nan),
}


def paired_runs(items: pd.DataFrame, dense: list[str], sparse: list[str]) -> pd.DataFrame:
    """Return the difference of sparse models from dense ones on each task of SCORES.

    items: answers of `study.keep` with a column run; dense, sparse: runs, which differ by seed.
    Accuracies are in %, held_out_text in nats a token. low and high: the 95% interval over items
    (paired bootstrap); seeds: the limit that seeds explain (Student's t); limit: both together.
    Verdicts are corrected by Holm over the tasks, limits are not. Raises ValueError where runs have
    not as many items.
    """
    columns = "task items dense_runs runs dense sparse difference low high seeds limit verdict p"
    items = items.reindex(columns=["run", "task", "correct", "by_bytes", "nats"])
    items = items.assign(item=items.groupby(["run", "task"]).cumcount())
    rows, random = [], np.random.default_rng(0)
    for task, (column, chance) in SCORES.items():
        asked = items[(items["task"] == task) & items["run"].isin([*dense, *sparse])]
        sizes = asked.groupby("run").size()
        if sizes.nunique() > 1:
            raise ValueError(f"runs have different numbers of items of {task}: {sizes.to_dict()}")
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
        number, other = second.shape[1], first.shape[1]
        p = p_value(difference, limit, number + other - 2)
        row = task, len(wide), other, number, *both.mean(axis=1), difference
        lowest = np.quantile(both[0][drawn].mean(axis=1), _ENDS[0])
        rows.append((*row, low, high, seeds, limit, verdict, p, bool(lowest > unit * chance)))
    return corrected(pd.DataFrame(rows, columns=[*columns.split(), "above_chance"]))


def _seed_limit(first: pd.DataFrame, second: pd.DataFrame) -> float:
    """Return the largest difference of two means that seeds explain; columns are seeds."""
    means = [table.mean() for table in (first, second)]
    freedom = sum(len(one) - 1 for one in means)
    if not freedom:
        return np.nan
    pooled = sum(((one - one.mean()) ** 2).sum() for one in means) / freedom
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom)
    return float(quantile * np.sqrt(pooled * sum(1 / len(one) for one in means)))


def answer_records(items: pd.DataFrame) -> dict[str, dict[str, np.ndarray]]:
    """Return for each run whether its answers to each of the seven tasks are correct (0 or 1).

    items: answers of `study.keep` with a column run, those of a task in order.
    """
    records = {}
    items = items.reindex(columns=["run", "task", "correct"]).dropna()
    for (run, task), rows in items[items["task"].isin(TASKS)].groupby(["run", "task"]):
        records.setdefault(run, {})[task] = rows["correct"].to_numpy(int)
    return records


def _marks(record: dict) -> dict[str, np.ndarray]:
    """Return the answers of a record of `results.load_evaluations` as `answer_records` does."""
    facts = record["tasks"].items()
    return {task: np.array([*map(int, one["correct"])]) for task, one in facts if task in TASKS}


def paired_records(one: dict, other: dict) -> pd.DataFrame:
    """Return how much more accurate `one` is than `other`, on the same items of the seven tasks.

    one, other: of `answer_records` or `results.load_evaluations`. Rows: their tasks, and the mean
    of these. The 95% interval, low to high, is from bootstrap samples of the items of each task.
    Raises ValueError for other tasks or numbers of items.
    """
    one, other = (_marks(record) if "tasks" in record else record for record in (one, other))
    sizes = [{task: len(marks) for task, marks in record.items()} for record in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the items differ: {sizes[0]} and {sizes[1]}")
    random, rows, samples = np.random.default_rng(0), [], []
    for name in [task for task in TASKS if task in one]:
        gains, items = one[name] - other[name], len(one[name])
        # A sample of items is known by how often each of the three gains is in it.
        shares = [(gains == gain).mean() for gain in (-1, 0, 1)]
        drawn = random.multinomial(items, shares, 10_000)
        samples.append((drawn[:, 2] - drawn[:, 0]) / items)
        rows.append((name, items, one[name].mean(), other[name].mean(), gains.mean()))
    columns = ["task", "items", "accuracy", "other", "difference"]
    table = pd.DataFrame(rows, columns=columns)
    mean = table[columns[2:]].mean().to_dict() | {"task": "mean", "items": table["items"].sum()}
    table = pd.concat([table, pd.DataFrame([mean])], ignore_index=True)[columns]
    low, high = np.quantile([*samples, np.mean(samples, axis=0)], _ENDS, axis=1)
    return table.assign(low=low, high=high)
