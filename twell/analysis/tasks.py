"""Tables of downstream tasks (Table 6): accuracies of lm-eval, whether they are above chance, and sparse beside dense."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from twell.analysis.runs import level_name

MEAN = "paper7"  # the group of tasks whose accuracy is the mean of the seven
TASKS = {  # of lm-eval, as they are called and as paper.yaml calls their metric
    "arc_easy": ("ARC-easy", "arc_easy_accuracy"),
    "arc_challenge": ("ARC-challenge", "arc_challenge_accuracy"),
    "hellaswag": ("HellaSwag", "hellaswag_accuracy"),
    "openbookqa": ("OpenBookQA", "openbookqa_accuracy"),
    "piqa": ("PIQA", "piqa_accuracy"),
    "winogrande": ("WinoGrande", "winogrande_accuracy"),
    "commonsense_qa": ("CommonsenseQA", "commonsenseqa_accuracy"),
    MEAN: ("mean of seven", "mean_task_accuracy"),
}
NEAR_CHANCE = 2.0  # standard errors
EVALUATED = ["model", "parameters", "training_tokens", "l1_coefficient"]  # what tells models apart
COMPUTED = ["backend", "dtype"]  # and how the same model was computed


def evaluations(records: Iterable[dict]) -> pd.DataFrame:
    """Return the accuracies of `results.load_evaluations`, one a row, in the order of the records and their tasks.

    Columns: model, parameters, training_tokens (from another record with the same weights where a record does not say; NaN where
    none does), l1_coefficient, backend, dtype, task, metric (lm-eval's: acc; acc_norm, with
    log-likelihoods by the characters of a choice; acc_mutual_info, less the choice's own log-likelihood), items, accuracy and stderr
    (as lm-eval gives them, shares of 1; stderr is NaN for a single item), chance, and verdict: "above chance", "below chance", or "near
    chance" within two standard errors, empty where an error or chance is not known. The task "paper7" is the mean of the
    paper's seven. Raises ValueError for a model whose l1_coefficient is no number.
    """
    records = list(records)
    known = {
        _weights(record): tokens
        for record in records
        if (tokens := record["model"]["training_tokens"])
    }
    known.pop((), None)
    rows = []
    for record in records:
        about = record["model"]
        tokens = about["training_tokens"] or known.get(_weights(record), np.nan)
        level = about["l1_coefficient"]
        if not isinstance(level, int | float):
            raise ValueError(
                f"the evaluation of {about['name']} has l1_coefficient {level}; it has to be one number"
            )
        origin = (
            about["name"],
            about["parameters"],
            tokens,
            float(level),
            record["backend"],
            record["dtype"],
        )
        for task, facts in record["tasks"].items():
            found = record["lm_eval"]["results"][task]
            for key, accuracy in found.items():
                metric, _, kind = key.partition(",")
                if not metric.startswith("acc") or metric.endswith("_stderr"):
                    continue
                stderr = found[f"{metric}_stderr,{kind}"]
                stderr, chance = (
                    np.nan if value in ("N/A", None) else value
                    for value in (stderr, facts["chance"])
                )
                verdict = _near_chance(accuracy, stderr, chance)
                rows.append(
                    (*origin, task, metric, found["sample_len"], accuracy, stderr, chance, verdict)
                )
    columns = [
        *EVALUATED,
        *COMPUTED,
        "task",
        "metric",
        "items",
        "accuracy",
        "stderr",
        "chance",
        "verdict",
    ]
    return pd.DataFrame(rows, columns=columns)


def _weights(record: dict) -> tuple[str, ...]:
    """What tells a record's weights: the SHA-256 of their files; empty where the record has none."""
    return tuple(sorted(record["model"].get("sha256", {}).values()))


def _near_chance(accuracy: float, stderr: float, chance: float) -> str:
    if np.isnan(stderr + chance) or stderr == 0:  # a few items, all right or all wrong, say nothing
        return ""
    if abs(accuracy - chance) <= NEAR_CHANCE * stderr:
        return "near chance"
    return "above chance" if accuracy > chance else "below chance"


def seven_tasks(table: pd.DataFrame) -> pd.DataFrame:
    """Return from `evaluations` the rows of Table 6: acc of the seven tasks and their mean, of models that have them all.

    A model that was evaluated more than once, by several backends or in several types, is there once: with the most items,
    of these rather in fp32, then rather densely, and then as it first stands in the table.
    """
    table = table[(table["metric"] == "acc") & table["task"].isin(TASKS)]
    means = table[table["task"] == MEAN]
    means = means.assign(rounded=means["dtype"] != "float32", sparse=means["backend"] != "dense")
    means = means.sort_values(
        ["items", "rounded", "sparse"], ascending=[False, True, True], kind="stable"
    )
    means = means.drop_duplicates(EVALUATED)[[*EVALUATED, *COMPUTED]]
    rows = table.merge(means, on=[*EVALUATED, *COMPUTED]).sort_values(
        "items", ascending=False, kind="stable"
    )
    return rows.drop_duplicates([*EVALUATED, "task"]).sort_index().reset_index(drop=True)


SIZE = [
    "parameters",
    "training_tokens",
]  # models that differ in these are not compared with each other


def by_level(seven: pd.DataFrame) -> pd.DataFrame:
    """Return `seven_tasks` with the mean over models of one size, training tokens and level, which differ in their seed.

    Trainings that differ only in how they were computed, such as densely and by the kernels from one seed, are merged like seeds:
    right for a mean, but `models` then counts more than seeds. Columns: parameters, training_tokens, l1_coefficient, task, models
    (how many), accuracy, stderr, chance, verdict; by size and level. The error is the mean of theirs, not less: all were asked
    the same items.
    """
    numbers = {"models": ("model", "size")} | {
        name: (name, "mean") for name in ("accuracy", "stderr", "chance")
    }
    found = (
        seven.groupby([*SIZE, "l1_coefficient", "task"], dropna=False).agg(**numbers).reset_index()
    )
    found["verdict"] = [
        _near_chance(*row) for row in found[["accuracy", "stderr", "chance"]].to_numpy()
    ]
    return found


def across_sizes(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` that compare sizes: of each the longest training, densely and at one level of L1.

    That level is the one that most sizes have, of several the lowest; of a size that does not have it, the size's lowest.
    """
    longest = levels.groupby("parameters")["training_tokens"].transform("max")
    levels = levels[longest.isna() | (levels["training_tokens"] == longest)]
    sparse = levels[levels["l1_coefficient"] > 0]
    if sparse.empty:
        return levels
    common = sparse.groupby("l1_coefficient")["parameters"].nunique().idxmax()
    own = sparse.groupby("parameters")["l1_coefficient"].transform(
        lambda has: common if common in set(has) else has.min()
    )
    kept = sparse.index[sparse["l1_coefficient"] == own]
    return levels[(levels["l1_coefficient"] == 0) | levels.index.isin(kept)]


def several_levels(levels: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `by_level` whose size and training tokens have more than two levels of L1; if none has, more than one."""
    number = levels.groupby(SIZE, dropna=False)["l1_coefficient"].transform("nunique")
    return levels[number > (2 if (number > 2).any() else 1)]


def paper_tasks(paper: pd.DataFrame) -> pd.DataFrame:
    """Return Table 6, from `results.paper()`, with the columns model, parameters, l1_coefficient, task and accuracy (of 1)."""
    names = {metric: task for task, (_, metric) in TASKS.items()}
    rows = paper[(paper["source"] == "Table 6") & paper["metric"].isin(names)]
    table = rows[["model"]].assign(
        parameters=rows["model"].str.removesuffix("B").astype(float) * 1e9,
        l1_coefficient=rows["l1"].astype(float),
        task=rows["metric"].map(names),
        accuracy=rows["value"].astype(float) / 100,
    )
    return table.reset_index(drop=True)


def backend_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return the largest difference of any accuracy of one model, from `evaluations`: between backends in one type, and between types.

    Rows: a model and type that several backends computed, and a model and backend with several types, which says what rounding alone
    does. Columns: model, between ("backend" or "dtype"), compared (their names), alike (the other one), accuracies (how many were
    compared), difference (of shares of 1).
    """
    rows = []
    for between, same in (COMPUTED, COMPUTED[::-1]):
        for (model, alike), found in table.groupby(["model", same], sort=False):
            wide = found.pivot_table(
                index=["task", "metric", "items"], columns=between, values="accuracy"
            ).dropna()
            if wide.shape[1] > 1 and len(wide):
                largest = (wide.max(axis=1) - wide.min(axis=1)).max()
                rows.append((model, between, ", ".join(wide.columns), alike, len(wide), largest))
    return pd.DataFrame(
        rows, columns=["model", "between", "compared", "alike", "accuracies", "difference"]
    )


def paper_levels(paper: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy that the paper prints at each level of its gated 1.5B model, columns as of `paper_tasks`."""
    rows = paper[
        (paper["source"] == "Table 4")
        & (paper["metric"] == TASKS[MEAN][1])
        & paper["gated"].eq(True)
    ]
    values = {
        "l1_coefficient": rows["l1"].astype(float),
        "accuracy": rows["value"].astype(float) / 100,
    }
    return pd.DataFrame(
        {"model": rows["model"], "parameters": 1.5e9, **values, "task": MEAN}
    ).reset_index(drop=True)


def accuracies(table: pd.DataFrame) -> pd.DataFrame:
    """Return `evaluations` to be read: a row a model, backend and type, by size and level, a column a task and metric, "accuracy ± error" in %.

    Accuracies that are near chance or below it are in brackets. The first row is chance, the second the number of items (of the first
    model that was asked).
    """
    table = table.sort_values([*SIZE, "l1_coefficient"], kind="stable")
    column = table["task"] + np.where(table["metric"] == "acc", "", ", " + table["metric"])
    not_above = table["verdict"].isin(["near chance", "below chance"])
    cell = (
        (100 * table["accuracy"]).map("{:.1f}".format)
        + " ± "
        + (100 * table["stderr"]).map("{:.1f}".format)
    )
    cell = cell.where(~not_above, "(" + cell + ")")
    how = table["backend"] + " " + table["dtype"]
    name = table["model"] + ", " + how + ", L1 = " + table["l1_coefficient"].map(level_name)
    wide = pd.DataFrame({"model": name, "column": column, "cell": cell}).drop_duplicates(
        ["model", "column"]
    )
    wide = wide.pivot(index="model", columns="column", values="cell").loc[
        name.unique(), column.unique()
    ]
    first = table.assign(column=column).drop_duplicates("column").set_index("column")
    heads = pd.DataFrame(
        [(100 * first["chance"]).map("{:.1f}".format), first["items"].map("{:,}".format)]
    )
    return (
        pd.concat([heads.set_axis(["chance", "items"]), wide]).fillna("").rename_axis(None, axis=1)
    )


def against_dense(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of each sparse model beside that of the dense one (L1 = 0) of its size and training tokens.

    table: `by_level`, or `paper_tasks`. Columns: parameters, l1_coefficient, accuracy, dense, difference; from ours also training_tokens, stderr
    (of the difference, errors taken as independent: too large where both models err alike) and above_chance (either of them).
    """
    same = [column for column in SIZE if column in table]
    means = table[table["task"] == MEAN]
    dense = means[means["l1_coefficient"] == 0]
    both = means[means["l1_coefficient"] > 0].merge(dense, on=same, suffixes=("", "_dense"))
    found = both[[*same, "l1_coefficient", "accuracy"]].assign(
        dense=both["accuracy_dense"], difference=both["accuracy"] - both["accuracy_dense"]
    )
    if "stderr" in both:
        found["stderr"] = np.hypot(both["stderr"], both["stderr_dense"])
        found["above_chance"] = (both[["verdict", "verdict_dense"]] == "above chance").any(axis=1)
    return found
