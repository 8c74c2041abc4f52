"""Tables of pretrained models that `twell relufy` made sparse, and of the speed of their activity.

A run of `twell relufy` has a teacher. Its log has the KL divergence from the teacher.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from study.analysis.runs import MAY_DIFFER, check_alike
from study.analysis.tasks import DRAWS, answer_records, paired_records
from study.analysis.variants import below
from twell.measure import providers
from twell.tables import last_validation, level_name

_LEVEL = ["active_share", "l1_coefficient", "threshold", "sampled_share", "sampled_chat"]
_LEVEL += ["hidden_weight"]
# Fields in which such runs may differ: those of a sweep, and what was asked for.
_MAY_DIFFER = {*MAY_DIFFER} - {"parameters", "backend", "checkpoint_activations"}
_MAY_DIFFER |= {*_LEVEL, "fit_tokens", "learning_rate", "tokens", "sampled_tokens", "samples"}
_MAY_DIFFER |= {"warmup_steps", "l1_zero_steps", "l1_stage_steps"}
# Runs of one pretrained model, without worse learning rates and a lighter first L1.
STUDENTS = "relufy-* again-* fitted-* hidden-* unfitted-* rate-5e-4-*"
MANY_TOKENS = 16_384  # tokens of a call, above which a layer's speed hardly depends on them
_PAIRS = "run name reference beside task items accuracy other difference low high".split()
ORIGINAL, WITHOUT_L1 = "original", "ReLU alone"  # the references of a run's answers


def relufied_runs(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the outcome of each complete run of `twell relufy`, the sparsest last.

    level: the target; name: the same, unique; wanted: the target share of active neurons (0: none);
    by: what makes neurons inactive; l1 and threshold: the last ones. Losses and activity are of the
    last validation. Raises ValueError for runs of several models or texts.
    """
    complete = _complete(runs)
    means = last_validation(log).groupby(["run", "metric"])["value"].mean().unstack()
    table = complete[["level", "name", "tokens", "threshold", "active_share"]]
    table = table.rename(columns={"active_share": "wanted"})
    table["active_fraction"] = means["active_mean"] / complete["intermediate_size"]
    metrics = ["kl", "cross_entropy", "cross_entropy_teacher", "dead_fraction"]
    table = table.join(means.reindex(columns=metrics))
    table["rise"] = table["cross_entropy"] - table["cross_entropy_teacher"]
    cut = (complete["active_share"] > 0) & (complete["l1_coefficient"] == 0)
    fixed = [f"L1, threshold {one:g}" if one else "L1" for one in table["threshold"]]
    table["by"] = np.where(cut, "threshold", fixed)
    # A log has steered values alone: the configuration has the others. A log of printed lines has
    # no threshold.
    for name, of in (("l1", "l1_coefficient"), ("threshold", "threshold")):
        steered = log[(log["split"] == "train") & (log["metric"] == of)]
        table[name] = steered.groupby("run")["value"].last().reindex(table.index)
        table[name] = table[name].fillna(complete[of].mask(cut & (of == "threshold")))
    return table.sort_values("active_fraction", ascending=False).reset_index()


def relufied_pairs(runs: pd.DataFrame, items: pd.DataFrame) -> pd.DataFrame:
    """Return how much more accurate each complete run is than its references, item by item.

    items: answers of `study.keep` with a column run. The references are the original, whose name
    ends with the hash of the run's teacher, and the last run of ReLU alone on as many tokens.
    Columns: run, name, reference, beside (its answers' name) and those of `paired_records`.
    """
    complete, parts = _complete(runs), []
    records = answer_records(items)
    plain = complete[complete["level"] == WITHOUT_L1]
    alone = dict(zip(plain["tokens"], plain.index, strict=True))
    originals = {name.rpartition("-original-")[2]: name for name in records}
    for run, row in complete.iterrows():
        original = originals.get(str(row.get("teacher_sha256"))[:8])
        for reference, other in ((ORIGINAL, original), (WITHOUT_L1, alone.get(row["tokens"]))):
            itself = reference == WITHOUT_L1 and row["level"] == WITHOUT_L1
            if run in records and other in records and not itself:
                pairs = paired_records(records[run], records[other])
                names = {"run": run, "name": row["name"], "reference": reference, "beside": other}
                parts.append(pairs.assign(**names))
    return pd.concat(parts or [pd.DataFrame(columns=_PAIRS)], ignore_index=True)[_PAIRS]


def relufied_answers(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy (%) of each run with answers, and its difference from references.

    table, pairs: `relufied_runs` and `relufied_pairs`. Differences are in points with the 95%
    interval over items. worse: the number of tasks below the original, corrected by Holm.
    """
    references = {reference: f"over {reference}" for reference in (ORIGINAL, WITHOUT_L1)}
    lines = []
    for row in table.to_dict("records"):
        own = pairs[pairs["run"] == row["run"]]
        means = own[own["task"] == "mean"].set_index("reference")
        if means.empty:
            continue
        line = {"name": row["name"], "active_fraction": row["active_fraction"]}
        line["accuracy"] = 100 * means["accuracy"].iloc[0]
        for reference, name in references.items():
            line[name] = _points(means.loc[reference]) if reference in means.index else np.nan
        tasks = own[(own["reference"] == ORIGINAL) & (own["task"] != "mean")]
        line["worse"] = f"{worse(tasks).sum()} of {len(tasks)}" if len(tasks) else np.nan
        lines.append(line)
    columns = ["name", "active_fraction", "accuracy", *references.values(), "worse"]
    return pd.DataFrame(lines, columns=columns)


def worse(pairs: pd.DataFrame) -> pd.Series:
    """Return which rows of `paired_records`, a family, are less accurate beyond their interval."""
    return below(pairs["difference"], (pairs["high"] - pairs["low"]) / 2)


def _points(means: pd.Series) -> str:
    """Return a difference in points with its interval."""
    ends = 100 * means[["difference", "low", "high"]].astype(float).round(3) + 0.0  # no -0
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*ends).replace("-", "−")


def relufied_budgets(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of each level that was trained on several numbers of tokens.

    table, pairs: `relufied_runs` and `relufied_pairs`. difference, low and high are of the mean
    over tasks, from the original (shares of 1).
    """
    several = table[table.groupby("level")["tokens"].transform("nunique") > 1]
    several = several.sort_values(["wanted", "level", "tokens"], ignore_index=True)
    over = beside_original(pairs)[["difference", "low", "high"]].astype(float)
    return several.join(over, on="run")


def beside_original(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `relufied_pairs` of the mean over tasks and the original, by run."""
    return pairs[(pairs["task"] == "mean") & (pairs["reference"] == ORIGINAL)].set_index("run")


def relufied_frontier(
    table: pd.DataFrame, pairs: pd.DataFrame, items: pd.DataFrame, lost: float = 0.02
) -> dict[str, float]:
    """Return the line through all students of their accuracy over the divergence.

    A line of least squares through the differences from the original (shares of 1) over ln KL:
    slope, intercept, deviation of students around it, and kl, at which the line is `lost` below the
    original, with low and high: the 95% interval of bootstrap samples of items and students. Raises
    ValueError for fewer than three students.
    """
    over = beside_original(pairs)[["difference", "beside"]].dropna()
    answered = table.set_index("run").join(over, how="inner")
    if len(answered) < 3:
        raise ValueError(f"{len(answered)} students have answers; a line needs 3 at least")
    x, y = np.log(answered["kl"].to_numpy()), answered["difference"].to_numpy(float)
    random = np.random.default_rng(0)
    resampled = _differences(answered["beside"], items, random)
    draws = random.integers(len(x), size=(DRAWS, len(x)))
    slopes, intercepts = _line(x[draws], np.take_along_axis(resampled, draws, axis=1))
    slopes = np.where(slopes == 0, np.nan, slopes)  # a level line never gets there
    low, high = np.exp(np.nanquantile((-lost - intercepts) / slopes, [0.025, 0.975]))
    slope, intercept = _line(x, y)
    off = y - intercept - slope * x
    deviation = np.sqrt((off**2).sum() / (len(x) - 2))
    line = {"slope": slope, "intercept": intercept, "lost": lost, "deviation": deviation}
    line |= {"kl": np.exp((-lost - intercept) / slope), "low": low, "high": high}
    return {"students": len(x)} | {name: float(value) for name, value in line.items()}


def _differences(beside: pd.Series, items: pd.DataFrame, random: np.random.Generator) -> np.ndarray:
    """Return mean differences of students from their originals in samples of items, [DRAWS, runs].

    beside: the original's answers, by run. All students answer the same sample.
    """
    records = answer_records(items)
    tasks = list(records[beside.index[0]])
    total = np.zeros((DRAWS, len(beside)))
    for task in tasks:
        gains = [records[run][task] - records[other][task] for run, other in beside.items()]
        gains, number = np.array(gains), len(gains[0])
        total += random.multinomial(number, np.full(number, 1 / number), DRAWS) @ gains.T / number
    return total / len(tasks)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return slope and intercept of least squares over the last axis; NaN where all x are one."""
    from_mean = x - x.mean(-1, keepdims=True)
    square = (from_mean**2).sum(-1)
    slope = (from_mean * y).sum(-1) / np.where(square > 0, square, np.nan)
    return slope, y.mean(-1) - slope * x.mean(-1)


def gains_by_share(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest sparse path in bf16 of each measured layer, by share of active neurons.

    table: `speedups`. One token in a CUDA graph, and calls of MANY_TOKENS and more, with skewed
    activity.
    """
    sparse = table[table["provider"].map(providers.is_sparse).astype(bool)]
    sparse = sparse[~sparse["provider"].str.contains("FP8") & (sparse["active"] > 0)].copy()
    one = (sparse["tokens"] == 1) & (sparse["mode"] == "graph")
    many = (sparse["tokens"] >= MANY_TOKENS) & (sparse["mode"] == "stream")
    sparse["calls"] = np.select([one, many], ["one token", "many tokens"], "")
    sparse["active_fraction"] = sparse["active"] / sparse["intermediate_size"]
    skewed = sparse["pattern"].str.startswith("skewed") & (sparse["pattern"] != "skewed merged")
    sparse = sparse[(sparse["calls"] != "") & skewed]
    case = "device calls hidden_size intermediate_size gated pattern tokens active_fraction".split()
    return sparse.sort_values("speedup").groupby(case, as_index=False).last()


def _complete(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs with a teacher, by run, with their level and name."""
    teachers = runs["teacher"].notna() if "teacher" in runs else pd.Series(False, runs.index)
    complete = runs[runs["complete"] & teachers].copy()
    later = ["fit_tokens", "sampled_share", "sampled_chat", "hidden_weight"]  # older runs lack them
    complete[later] = complete.reindex(columns=later).astype(float).fillna(0)
    if complete.empty:
        raise ValueError(f"none of {', '.join(runs['run'])} is a complete run of `twell relufy`")
    known = "teacher_sha256" in complete and complete["teacher_sha256"].notna().all()
    folders = ["teacher", "tokenizer"] if known else []  # one teacher, wherever it lies
    check_alike(complete, [*_MAY_DIFFER, *folders], "these runs have to be of one teacher and text")
    fitted = {True: ", fitted", False: ", not fitted"}.get
    unusual = _unusual(complete["fit_tokens"] > 0, fitted)
    unusual += _unusual(complete["learning_rate"], lambda rate: f", rate {level_name(rate)}")
    levels = [_level(*asked) for asked in complete[_LEVEL].to_numpy()]
    complete = complete.assign(level=levels + unusual)
    names = complete["level"]
    names = names + _unusual(complete["tokens"], lambda tokens: f", {tokens / 1e6:g} M tokens")
    names = names.where(~names.duplicated(keep=False), names + " (" + complete["run"] + ")")
    return complete.assign(name=names).set_index("run")


def _unusual(values: pd.Series, name: Callable[..., str]) -> pd.Series:
    """Return the names of values, and nothing for the most frequent one."""
    return values.map(name).where(values != values.mode().iloc[0], "")


def _level(
    share: float, l1: float, threshold: float, sampled: float, chat: float, hidden: float
) -> str:
    """Return what was asked for: "ReLU alone", "10%, threshold 0.2", or "10% by a threshold"."""
    if share and not l1:
        name = f"{100 * share:g}% by a threshold"
    else:
        name = f"L1 = {level_name(l1)}" if l1 else WITHOUT_L1
        name = f"{100 * share:g}%" if share else name
        name += f", threshold {threshold:g}" if threshold else ""
    name += f", {100 * sampled:g}% {'conversations' if chat else 'sampled'}" if sampled else ""
    return name + (f", hidden states{'' if hidden == 1 else f' {hidden:g}'}" if hidden else "")
