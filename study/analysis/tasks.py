"""Tables of downstream tasks (Table 6): accuracies beside chance, and sparse beside dense."""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.measure import providers
from twell.tables import COMPUTED, EVALUATED, SIZE, level_name, verdicts

MEAN = "paper7"  # the group of tasks whose accuracy is the mean of the seven
TASKS = {  # of lm-eval: the name that is shown, and the metric in paper.yaml
    "arc_easy": ("ARC-easy", "arc_easy_accuracy"),
    "arc_challenge": ("ARC-challenge", "arc_challenge_accuracy"),
    "hellaswag": ("HellaSwag", "hellaswag_accuracy"),
    "openbookqa": ("OpenBookQA", "openbookqa_accuracy"),
    "piqa": ("PIQA", "piqa_accuracy"),
    "winogrande": ("WinoGrande", "winogrande_accuracy"),
    "commonsense_qa": ("CommonsenseQA", "commonsenseqa_accuracy"),
    MEAN: ("mean of seven", "mean_task_accuracy"),
}


def seven_tasks(table: pd.DataFrame) -> pd.DataFrame:
    """Return from `evaluations` the rows of Table 6: acc of the seven tasks and of their mean.

    Only of models that have the mean. A model evaluated more than once counts once: with the most
    items, of these in fp32, then densely, then as it first stands in the table.
    """
    table = table[(table["metric"] == "acc") & table["task"].isin(TASKS)]
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

    These differ in their seed, or in how one training was computed; `models` counts both. Columns:
    parameters, training_tokens, l1_coefficient, task, models, accuracy, stderr, chance, verdict.
    stderr is the mean of the models' errors: all were asked the same items.
    """
    numbers = {name: (name, "mean") for name in ("accuracy", "stderr", "chance")}
    groups = seven.groupby([*SIZE, "l1_coefficient", "task"], dropna=False)
    table = groups.agg(models=("model", "size"), **numbers).reset_index()
    return table.assign(verdict=verdicts(table))


def across_sizes(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` that compare sizes: longest training, dense and at one level.

    That level is the level of most sizes, the lowest of equals. A size without it has its lowest.
    """
    longest = levels.groupby("parameters")["training_tokens"].transform("max")
    levels = levels[longest.isna() | (levels["training_tokens"] == longest)]
    sparse = levels[levels["l1_coefficient"] > 0]
    if sparse.empty:
        return levels
    common = sparse.groupby("l1_coefficient")["parameters"].nunique().idxmax()
    own = sparse.groupby("parameters")["l1_coefficient"].transform(
        lambda level: common if (level == common).any() else level.min()
    )
    kept = sparse.index[sparse["l1_coefficient"] == own]
    return levels[(levels["l1_coefficient"] == 0) | levels.index.isin(kept)]


def several_levels(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` of sizes with more than two levels; without any, with two."""
    number = levels.groupby(SIZE, dropna=False)["l1_coefficient"].transform("nunique")
    return levels[number > (2 if (number > 2).any() else 1)]


def _printed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of paper.yaml with the columns model, parameters, l1_coefficient, task and accuracy."""
    tasks = {metric: task for task, (_, metric) in TASKS.items()}
    table = pd.DataFrame({"model": rows["model"]})
    table["parameters"] = rows["model"].str.extract(r"([\d.]+)B")[0].astype(float) * 1e9
    table["l1_coefficient"] = rows["l1"].astype(float)
    table["task"] = rows["metric"].map(tasks)
    table["accuracy"] = rows["value"].astype(float) / 100
    return table.dropna(subset="task").reset_index(drop=True)


def paper_tasks(paper: pd.DataFrame) -> pd.DataFrame:
    """Return Table 6: model, parameters, l1_coefficient, task and accuracy (of 1)."""
    return _printed(paper[paper["source"] == "Table 6"])


def paper_levels(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's mean accuracy at each level of its gated 1.5B model, as `paper_tasks`."""
    rows = paper[(paper["source"] == "Table 4") & paper["gated"].eq(True)]
    return _printed(rows[rows["metric"] == TASKS[MEAN][1]])


def backend_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return the largest difference of any accuracy of a model between backends, and between types.

    table: `evaluations`. Rows: a model and type that several backends computed, and a model and
    backend with several types, which shows rounding alone. FP8 is left out. Columns: model, between
    ("backend" or "dtype"), compared (their names), alike (the other one), accuracies (their
    number), difference (of shares of 1).
    """
    rows, table = [], table[table["dtype"] != providers.FP8]
    for between, same in (COMPUTED, COMPUTED[::-1]):
        for (model, alike), some in table.groupby(["model", same], sort=False):
            asked = ["task", "metric", "items"]
            wide = some.pivot_table(index=asked, columns=between, values="accuracy").dropna()
            if wide.shape[1] > 1 and len(wide):
                largest = (wide.max(axis=1) - wide.min(axis=1)).max()
                rows.append((model, between, ", ".join(wide.columns), alike, len(wide), largest))
    columns = ["model", "between", "compared", "alike", "accuracies", "difference"]
    return pd.DataFrame(rows, columns=columns)


def accuracies(table: pd.DataFrame) -> pd.DataFrame:
    """Return `evaluations` to be read: a row a model, backend and type, a column a task and metric.

    Cells are "accuracy ± error" in %, in brackets where near chance or below it; rows are by size
    and level. The first row is chance, the second the number of items (of the first model). Empty
    for an empty table.
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
    name = table["model"] + ", " + table["backend"] + " " + table["dtype"] + ", L1 = "
    name += table["l1_coefficient"].map(level_name)
    wide = pd.DataFrame({"model": name, "column": column, "cell": cell})
    wide = wide.drop_duplicates(["model", "column"]).pivot(index="model", columns="column")["cell"]
    wide = wide.loc[name.unique(), column.unique()]
    first = pd.DataFrame({"chance": chance, "items": table["items"].map("{:,}".format)})
    first = first.assign(column=column).drop_duplicates("column").set_index("column").T
    return pd.concat([first, wide]).fillna("").rename_axis(None, axis=1)


def against_dense(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of each sparse model beside the dense one (L1 = 0) of its size.

    table: `by_level`, whose models also share training tokens, or `paper_tasks`. Columns:
    parameters, l1_coefficient, accuracy, dense, difference; from ours also training_tokens, stderr
    (of the difference, errors taken as independent: too large where both models err alike) and
    above_chance (either of them).
    """
    same = [column for column in SIZE if column in table]
    means = table[table["task"] == MEAN]
    sparse, dense = means[means["l1_coefficient"] > 0], means[means["l1_coefficient"] == 0]
    both = sparse.merge(dense, on=same, suffixes=("", "_dense"))
    result = both[[*same, "l1_coefficient", "accuracy"]].assign(dense=both["accuracy_dense"])
    result["difference"] = both["accuracy"] - both["accuracy_dense"]
    if "stderr" in both:
        result["stderr"] = np.hypot(both["stderr"], both["stderr_dense"])
        result["above_chance"] = (both[["verdict", "verdict_dense"]] == "above chance").any(axis=1)
    return result
