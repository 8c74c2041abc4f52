"""Tables of models that `twell relufy` changed, and of the speed that their activity allows. Ours.

A run of `twell relufy` has a teacher. Its log has the KL divergence from the teacher.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from study.analysis.items import DRAWS, answer_records, paired_records
from study.analysis.runs import check_alike
from twell.measure import providers
from twell.tables import last_validation, level_name, logged_layers

# Fields that tell such runs apart; all else has to be alike.
_LEVEL = ["active_share", "l1_coefficient", "threshold", "sampled_share", "sampled_chat"]
_LEVEL += ["hidden_weight"]
ASKED = [*_LEVEL, "fit_tokens", "learning_rate", "tokens", "seed"]
_SAMPLED = ["sampled_tokens", "samples"]
_SCHEDULE = ["l1_zero_steps", "l1_stage_steps", "log_every", "valid_every", "checkpoint_every"]
_COMPUTED = "run path complete device versions commit command compile micro_batch".split()
ALIKE = 0.05  # relative difference of activity
# Runs of one pretrained model; worse learning rates and a lighter first L1 are left out.
STUDENTS = "relufy-* again-* fitted-* hidden-* unfitted-* rate-5e-4-*"
MANY_TOKENS = 16_384  # of a call, from which on a layer's speed hardly depends on their number
_PAIRS = "run name reference beside task items accuracy other difference low high".split()
ORIGINAL, WITHOUT_L1 = "original", "ReLU alone"  # the references of a run's answers


def relufied_runs(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return the outcome of each complete run of `twell relufy`, the sparsest last.

    Columns: run, level (what was asked for), name (the same, with what else tells runs apart),
    tokens, wanted (share of active neurons; 0: not steered), threshold (where it is steered the
    last one) and by ("L1", also of ReLU alone, "L1, threshold 0.5", or "threshold" where that is
    steered; with "sampled" or "conversations" where the teacher wrote some of the text, and with
    "not fitted" or "fitted" where most are not so, and "rate 5e-4" where most have another); of the
    last validation active_fraction (mean over layers), kl, cross_entropy, cross_entropy_teacher and
    rise (their difference), in nats, and dead_fraction; l1, the last coefficient. Other runs are
    left out. Raises ValueError for runs of several models or texts.
    """
    complete = _complete(runs)
    means = last_validation(log).groupby(["run", "metric"])["value"].mean().unstack()
    table = complete[["level", "name", "tokens", "threshold"]].assign(
        wanted=complete["active_share"]
    )
    table["active_fraction"] = means["active_mean"] / complete["intermediate_size"]
    metrics = ["kl", "cross_entropy", "cross_entropy_teacher", "dead_fraction"]
    table = table.join(means.reindex(columns=metrics))
    table["rise"] = table["cross_entropy"] - table["cross_entropy_teacher"]
    cut = (complete["active_share"] > 0) & (complete["l1_coefficient"] == 0)
    fixed = [
        f"L1, threshold {threshold:g}" if threshold else "L1" for threshold in table["threshold"]
    ]
    table["by"] = np.where(cut, "threshold", fixed)
    written = np.where(complete["sampled_chat"], ", conversations", ", sampled")
    table["by"] += np.where(complete["sampled_share"] > 0, written, "")
    table["by"] += complete["hidden_weight"].map(_hidden)
    table["by"] += complete["unusual"]
    # Of what is not steered the log has nothing: the configuration's is the last. A log of printed
    # lines alone has no threshold.
    for name, of in (("l1", "l1_coefficient"), ("threshold", "threshold")):
        steered = log[(log["split"] == "train") & (log["metric"] == of)]
        table[name] = steered.groupby("run")["value"].last().reindex(table.index)
        table[name] = table[name].fillna(complete[of].mask(cut & (of == "threshold")))
    return table.sort_values("active_fraction", ascending=False).reset_index()


def relufied_course(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return KL divergence and activity over the training of each complete run.

    Columns: run, name, tokens, kl (nats), active_fraction: means over the steps since the row
    before; the first row is the teacher with ReLU, fitted or not, before any step. A log of printed
    lines has no activity there, and so not this row.
    """
    complete = _complete(runs)
    rows = log[log["run"].isin(complete.index) & log["metric"].isin(["kl", "active_mean"])]
    rows = rows[(rows["split"] == "train") | (rows["step"] == 0)]
    means = rows.groupby(["run", "tokens", "metric"])["value"].mean().unstack().reset_index()
    width = means["run"].map(complete["intermediate_size"])
    means["active_fraction"] = means.pop("active_mean") / width
    means.insert(1, "name", means["run"].map(complete["name"]))
    return means.rename_axis(columns=None).dropna().reset_index(drop=True)


def relufied_layers(runs: pd.DataFrame, log: pd.DataFrame) -> pd.DataFrame:
    """Return `logged_layers` of each complete run, with its run and name."""
    layers = {
        (run, row["name"]): logged_layers(log[log["run"] == run], row["intermediate_size"])
        for run, row in _complete(runs).iterrows()
    }
    return (
        pd.concat(layers, names=["run", "name"]).reset_index(["run", "name"]).reset_index(drop=True)
    )


def relufied_pairs(runs: pd.DataFrame, items: pd.DataFrame) -> pd.DataFrame:
    """Return how much more accurate each complete run is than its references, item by item.

    items: answers of `study.keep` with a column run. The references are the original, whose name
    ends with the hash of the run's teacher, and ReLU alone: without L1 and threshold, on as many
    tokens, at the usual learning rate; of several such runs the last by name. Columns: run, name,
    reference (ORIGINAL or WITHOUT_L1), beside (its answers' name) and those of `paired_records`, a
    row a task and the mean of the tasks. A run without answers has no rows. Raises ValueError for a
    run and a reference with answers of different tasks.
    """
    complete, parts = _complete(runs), []
    records = answer_records(items.reindex(columns=["run", "task", "correct"]))
    plain = complete[complete["level"] == WITHOUT_L1]
    alone = dict(zip(plain["tokens"], plain.index, strict=True))
    originals = {name.rpartition("-original-")[2]: name for name in records}
    for run, row in complete.iterrows():
        original = originals.get(str(row.get("teacher_sha256"))[:8])
        for reference, other in ((ORIGINAL, original), (WITHOUT_L1, alone.get(row["tokens"]))):
            itself = reference == WITHOUT_L1 and row["level"] == WITHOUT_L1
            if run in records and other in records and not itself:
                _check_tasks(records, run, other)
                pairs = paired_records(records[run], records[other])
                names = {"run": run, "name": row["name"], "reference": reference, "beside": other}
                parts.append(pairs.assign(**names))
    return pd.concat(parts or [pd.DataFrame(columns=_PAIRS)], ignore_index=True)[_PAIRS]


def relufied_answers(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return a line on the answers of each run that has some, in the order of `relufied_runs`.

    table, pairs: `relufied_runs` and `relufied_pairs`. Columns: name, active_fraction, accuracy
    (mean over tasks, %), the difference from each reference in points with its 95% interval over
    items, and worse: tasks whose whole interval is below the original.
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
        line["worse"] = f"{(tasks['high'] < 0).sum()} of {len(tasks)}" if len(tasks) else np.nan
        lines.append(line)
    columns = ["name", "active_fraction", "accuracy", *references.values(), "worse"]
    return pd.DataFrame(lines, columns=columns)


def relufied_budgets(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of each level that were trained on several budgets.

    table, pairs: `relufied_runs` and `relufied_pairs`. Columns: those of `relufied_runs`, and of
    the mean over tasks difference, low and high (from the original, shares of 1; NaN without
    answers). By share, by what makes it sparse, and by tokens.
    """
    several = table[table.groupby("level")["tokens"].transform("nunique") > 1]
    several = several.sort_values(["wanted", "by", "tokens"], ignore_index=True)
    return several.join(_over_original(pairs), on="run")


def relufied_frontier(
    table: pd.DataFrame, pairs: pd.DataFrame, items: pd.DataFrame, lost: float = 0.02
) -> dict[str, float]:
    """Return the line through all students of their accuracy over the divergence.

    table, pairs: `relufied_runs` and `relufied_pairs`; items: the answers of these. A line of least
    squares through the differences from the original (shares of 1) over ln KL: students (their
    number), slope, intercept, deviation (standard deviation of students around it), nearest (their
    least KL), lost, and kl, at which the line is `lost` below the original, with low and high. This
    95% interval is from bootstrap samples of items, which all students answer, and of students; it
    takes the form of the line for granted. Raises ValueError for fewer than three students.
    """
    over = _beside_original(pairs)[["difference", "beside"]].dropna()
    answered = table.set_index("run").join(over, how="inner")
    if len(answered) < 3:
        raise ValueError(f"{len(answered)} students have answers; a line needs 3 at least")
    x, y = np.log(answered["kl"].to_numpy()), answered["difference"].to_numpy(float)
    random = np.random.default_rng(0)
    resampled = _differences(answered["beside"], items, random)
    draws = random.integers(len(x), size=(DRAWS, len(x)))
    slopes, intercepts = _line(x[draws], np.take_along_axis(resampled, draws, axis=1))
    slopes = np.where(slopes == 0, np.nan, slopes)  # level: never there
    low, high = np.exp(np.nanquantile((-lost - intercepts) / slopes, [0.025, 0.975]))
    slope, intercept = _line(x, y)
    off = y - intercept - slope * x
    return {
        "students": len(x),
        "slope": float(slope),
        "intercept": float(intercept),
        "lost": lost,
        "deviation": float(np.sqrt((off**2).sum() / (len(x) - 2))),
        "nearest": float(answered["kl"].min()),
        "kl": float(np.exp((-lost - intercept) / slope)),
        "low": float(low),
        "high": float(high),
    }


def _differences(beside: pd.Series, items: pd.DataFrame, random: np.random.Generator) -> np.ndarray:
    """Mean differences of students from their originals in samples of items, [DRAWS, students].

    beside: the original's answers, by run. All students answer the same sample.
    """
    records = answer_records(items.reindex(columns=["run", "task", "correct"]))
    tasks = records[beside.index[0]]["tasks"]
    total = np.zeros((DRAWS, len(beside)))
    for task, fact in tasks.items():
        marks = {
            run: np.frombuffer(records[run]["tasks"][task]["correct"].encode(), np.uint8)
            for run in {*beside.index, *beside}
        }
        gains = np.array([marks[run] - marks[other].astype(float) for run, other in beside.items()])
        number = fact["items"]
        total += random.multinomial(number, np.full(number, 1 / number), DRAWS) @ gains.T / number
    return total / len(tasks)


def relufied_outlook(
    table: pd.DataFrame, pairs: pd.DataFrame, frontier: dict[str, float]
) -> pd.DataFrame:
    """Return how many tokens would bring each level to the divergence of `relufied_frontier`.

    table, pairs: `relufied_runs` and `relufied_pairs`. Of levels with several budgets, whose
    activity differs by at most ALIKE, the runs on the fewest and the most tokens count. Columns:
    level, runs (that count), fewest and most (tokens), of the latter active_fraction, kl (geometric
    mean) and difference, halving (the divergence after twice the tokens over that before), and
    tokens, with fewer and more for the ends of the frontier's interval, if each doubling went on
    alike: `most` where that is near enough, infinite where the divergence does not fall.
    """
    lines = []
    for level, runs in relufied_budgets(table, pairs).groupby("level"):
        fewest, most = runs["tokens"].min(), runs["tokens"].max()
        first, last = runs[runs["tokens"] == fewest], runs[runs["tokens"] == most]
        shares = pd.concat([first, last])["active_fraction"]
        if fewest == most or shares.max() > (1 + ALIKE) * shares.min():
            continue
        before, kl = (float(np.exp(np.log(some["kl"]).mean())) for some in (first, last))
        exponent = np.log(kl / before) / np.log(most / fewest)
        line = {"level": level, "runs": len(shares), "fewest": fewest, "most": most}
        line |= last[["active_fraction", "difference"]].mean().to_dict()
        line |= {"kl": kl, "halving": 2.0**exponent}
        for name, end in (("tokens", "kl"), ("fewer", "high"), ("more", "low")):
            ratio = frontier[end] / kl
            further = ratio ** (1 / exponent) if exponent < 0 else np.inf
            line[name] = most * (1.0 if ratio >= 1 else further)
        lines.append(line)
    return pd.DataFrame(lines)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and intercept of least squares over the last axis; NaN where all x are one."""
    from_mean = x - x.mean(-1, keepdims=True)
    square = (from_mean**2).sum(-1)
    slope = (from_mean * y).sum(-1) / np.where(square > 0, square, np.nan)
    return slope, y.mean(-1) - slope * x.mean(-1)


def gains_by_share(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest sparse path in bf16 of each measured layer, by share of active neurons.

    table: `speedups`. One token in a CUDA graph, and calls of MANY_TOKENS and more with skewed
    activity. Columns: device, calls ("one token", "many tokens"), hidden_size, intermediate_size,
    gated, pattern, tokens, active_fraction, provider, speedup.
    """
    sparse = table[table["provider"].map(providers.is_sparse).astype(bool)]
    sparse = sparse[~sparse["provider"].str.contains("FP8") & (sparse["active"] > 0)]
    one = (sparse["tokens"] == 1) & (sparse["mode"] == "graph")
    many = (sparse["tokens"] >= MANY_TOKENS) & (sparse["mode"] == "stream")
    sparse = sparse.assign(
        calls=np.select([one, many], ["one token", "many tokens"], ""),
        active_fraction=sparse["active"] / sparse["intermediate_size"],
    )
    kind = sparse["pattern"].str.startswith("skewed") & (sparse["pattern"] != "skewed merged")
    sparse = sparse[(sparse["calls"] != "") & kind]
    case = ["device", "calls", "hidden_size", "intermediate_size", "gated", "pattern", "tokens"]
    case.append("active_fraction")
    best = sparse.sort_values("speedup").groupby(case, as_index=False).last()
    return best[[*case, "provider", "speedup"]]


def _over_original(pairs: pd.DataFrame) -> pd.DataFrame:
    """Difference, low and high of the mean over tasks, by run."""
    return _beside_original(pairs)[["difference", "low", "high"]].astype(float)


def _beside_original(pairs: pd.DataFrame) -> pd.DataFrame:
    """The rows of the mean over tasks, by run."""
    return pairs[(pairs["task"] == "mean") & (pairs["reference"] == ORIGINAL)].set_index("run")


def _check_tasks(records: dict[str, dict], *runs: str) -> None:
    """Means over other tasks would not compare."""
    one, other = (records[run]["tasks"].keys() for run in runs)
    if one != other:
        named = ", ".join(sorted(one ^ other))
        raise ValueError(f"of {' and '.join(runs)} only one has answers of {named}")


def _points(means: pd.Series) -> str:
    """A difference in points with its interval."""
    ends = 100 * means[["difference", "low", "high"]].astype(float).round(3) + 0.0  # no -0
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*ends).replace("-", "−")


def _complete(runs: pd.DataFrame) -> pd.DataFrame:
    """The complete runs with a teacher, by run, which have to differ in what was asked for alone.

    level: what that is; name: with tokens where they are not the usual ones, and with the run where
    several were asked for the same.
    """
    teachers = runs["teacher"].notna() if "teacher" in runs else pd.Series(False, runs.index)
    complete = runs[runs["complete"] & teachers].copy()
    for field in ("fit_tokens", "sampled_share", "sampled_chat", "hidden_weight"):  # later fields
        given = complete.get(field, pd.Series(0.0, complete.index))
        complete[field] = given.astype(float).fillna(0)
    if complete.empty:
        raise ValueError(f"none of {', '.join(runs['run'])} is a complete run of `twell relufy`")
    rule = "these runs have to be of one teacher and text"
    known = "teacher_sha256" in complete and complete["teacher_sha256"].notna().all()
    folders = ["teacher", "tokenizer"] if known else []  # of one teacher, wherever it lies
    check_alike(
        complete, [*ASKED, *_SAMPLED, *_SCHEDULE, *_COMPUTED, *folders, "warmup_steps"], rule
    )
    fitted = complete["fit_tokens"] > 0
    complete["unusual"] = _unusual(fitted, {True: ", fitted", False: ", not fitted"}.get)
    complete["unusual"] += _unusual(complete["learning_rate"], lambda r: f", rate {level_name(r)}")
    levels = [_level(*asked) for asked in complete[_LEVEL].to_numpy()]
    complete = complete.assign(level=levels + complete["unusual"])
    names = complete["level"]
    names = names + _unusual(complete["tokens"], lambda tokens: f", {tokens / 1e6:g} M tokens")
    names = names.where(~names.duplicated(keep=False), names + " (" + complete["run"] + ")")
    return complete.assign(name=names).set_index("run")


def _unusual(values: pd.Series, name: Callable[..., str]) -> pd.Series:
    """The names of values, and nothing for the most frequent one."""
    return values.map(name).where(values != values.mode().iloc[0], "")


def _level(
    share: float,
    coefficient: float,
    threshold: float,
    sampled: float = 0,
    chat: float = 0,
    hidden: float = 0,
) -> str:
    """What was asked for: "ReLU alone", "10%", "10%, threshold 0.2", or "L1 = 1e-3" as it is.

    Or "10% by a threshold", wherever that began. With ", 25% sampled" or ", 50% conversations"
    where the teacher wrote text, and ", hidden states" where these were compared too,
    with their weight where it is not 1.
    """
    if hidden:
        return _level(share, coefficient, threshold, sampled, chat) + _hidden(hidden)
    if sampled:
        written = f"{100 * sampled:g}% {'conversations' if chat else 'sampled'}"
        return f"{_level(share, coefficient, threshold)}, {written}"
    if share and not coefficient:
        return f"{100 * share:g}% by a threshold"
    name = f"L1 = {level_name(coefficient)}" if coefficient else WITHOUT_L1
    name = f"{100 * share:g}%" if share else name
    return name + (f", threshold {threshold:g}" if threshold else "")


def _hidden(weight: float) -> str:
    """How the comparison of hidden states is named, with its weight where that is not 1."""
    return f", hidden states{'' if weight == 1 else f' {weight:g}'}" if weight else ""
