"""The paper number by number: the claims of data/claims.yaml beside what data/ says.

`table` has a row a claim. Each subject has one function here, which takes our numbers from the
tables that the lessons show, and states its rules. data/claims.yaml has what the paper prints.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from study import analysis, price
from study.analysis import contrast, noise_limit
from twell import results
from twell.measure import providers
from twell.sparse.formats import PackedTwELL
from twell.tables import NEAR_CHANCE, evaluations, level_name, logged_layers
from twell.trace import Trace

LOSS, ACTIVE, DEAD = analysis.QUANTITIES
LEVEL = 6e-4  # of L1; it stands for the paper's 2e-5
SETTING = "85m-50m-l1-6e-4"
AT_LEVEL = "85m-*m-l1-6e-4-seed-* depth-*-l1-6e-4-seed-* 171m-30m-1-gpu flagship-half "
AT_LEVEL += "flagship-triton flagship-*m-l1-6e-4"
OTHER_CHOICES = "fp8-* *-reinit-* *-warmup-* *-silu-* *-nongated-*"
SIZES = {"0_5b": "0.5B", "1b": "1B", "1_5b": "1.5B", "2b": "2B"}
FORCED = providers.TRITON_COMPILED.name
SPARSE = [providers.UNION.name, providers.ROWWISE.name, providers.DECODE.name]
LARGE = "gated and hidden_size == 2048 and intermediate_size == 5632 and pattern == 'skewed'"
LARGE += " and tokens == 131072 and mode == 'stream'"
LAST = 27  # the last layer of the paper's 1.5B model, counted from 0
NEAR = 0.1  # a number is reproduced within this share of the paper's, or within its interval
MARGIN = 1.0  # of "no change": % of cross-entropy, or points of accuracy
ACTIVE_MARGIN = 10.0  # of "no change" in activity, %
VERDICTS = ["reproduced", "in part", "contradicted", "not testable", "differs at this size"]
VERDICTS += ["one run", "beyond the paper", "ours", "not compared"]
JUDGED = VERDICTS[:6]
COLUMNS = ["subject", "name", "claim", "paper", "source", "ours", "beyond", "interval", "seeds"]
COLUMNS += ["verdict", "note", "evidence", "command"]
Row = dict[str, Any]


class Recorded:
    """What data/ of a repository holds. Each part is read once, when it is first needed."""

    def __init__(self, root: str | Path) -> None:
        self.folder = Path(root) / "data"
        text = (self.folder / "claims.yaml").read_text(encoding="utf-8")
        self.subjects: dict[str, dict[str, Any]] = yaml.safe_load(text)
        self.readme: dict[str, str] = self.subjects.pop("readme")
        self.paper = results.paper()
        required = "ffn.csv", "model.csv", "train_step.csv"
        self.bench = analysis.Bench(self.folder / "bench", required)

    @cached_property
    def every_run(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        return results.load_runs(self.folder / "runs")

    def runs(self, patterns: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the runs whose names fit one of the patterns, and their log."""
        every, log = self.every_run
        some = every[analysis.fits(every["run"], patterns)]
        log = log[log["run"].isin(some["run"])].reset_index(drop=True)
        return some.dropna(axis=1, how="all").reset_index(drop=True), log

    @cached_property
    def choices(self) -> pd.DataFrame:
        return analysis.choices(*self.runs("85m-50m-*"))

    @cached_property
    def answers(self) -> pd.DataFrame:
        return results.load_kept(self.folder / "eval", ".csv.xz")

    @cached_property
    def findings(self) -> pd.DataFrame:
        kept = results.load_kept(self.folder / "traces", ".csv")
        return analysis.findings(*self.every_run, kept, 6 / LAST)

    @cached_property
    def scale(self) -> pd.DataFrame:
        """The paper's Table 1 beside ours, `scale_table` by quantity and model."""
        where = "profile == 'paper' and batch == 64 and context == 2048"
        models = self.bench.rows("model.csv", analysis.model_speedups, where)
        where = "profile == 'paper' and micro_batch == 16 and not checkpoint_activations"
        steps = self.bench.rows("train_step.csv", analysis.step_speedups, where)
        return analysis.scale_table(self.paper, models, steps).set_index(["quantity", "model"])

    def printed(self, **where: Any) -> float:
        """Return the paper's one number whose row in data/paper.yaml has these cells."""
        rows = self.paper
        for column, value in where.items():
            rows = rows[rows[column] == value]
        return float(rows["value"].item())


def row(
    name: str, ours: str, verdict: str, limit: str = "", seeds: int | str = "", note: str = ""
) -> Row:
    """Return our side of a claim. limit: of an interval, such as "0.5", or "0.19 to 0.37".

    A verdict on a single run is "one run". A number "beyond the paper" has a column of its own.
    """
    interval = limit if not limit or " to " in limit else f"± {limit}"
    verdict = "one run" if seeds == 1 and verdict in JUDGED else verdict
    beyond = ours if verdict == "beyond the paper" else ""
    values = {"ours": "" if beyond else ours, "beyond": beyond, "interval": interval}
    return {"name": name} | values | {"seeds": seeds, "verdict": verdict, "note": note}


def judge(reproduced: bool, not_testable: bool = False, in_part: bool = False) -> str:
    """Return the first verdict that holds, or "contradicted"."""
    if reproduced:
        return "reproduced"
    return "not testable" if not_testable else "in part" if in_part else "contradicted"


def close(value: float, paper: float, limit: float) -> str:
    """Return the verdict on a change of a known size; limit is that of our interval."""
    distance, same_sign, noise = abs(value - paper), value * paper > 0, abs(value) <= limit
    near = distance <= max(limit, NEAR * abs(paper))
    return judge(near and not noise, noise and distance <= limit, same_sign and not noise)


def no_change(value: float, limit: float, margin: float = MARGIN) -> str:
    """Return the verdict on "no change": the whole interval has to be within the margin."""
    return judge(abs(value) + limit <= margin, abs(value) - limit <= margin)


def at_most(bound: float, value: float, limit: float) -> str:
    """Return the verdict on an upper bound, or "no rise": the whole interval is within it."""
    return judge(value + limit <= bound, value - limit <= bound)


def more_than(bound: float, value: float, limit: float) -> str:
    """Return the verdict on a lower bound."""
    return judge(value - limit > bound, value + limit > bound)


def hangs(trend: Callable[[pd.Series], str], values: pd.Series) -> str:
    """Return a note on the points without which a trend has another verdict; empty for none."""
    without = {name: trend(values.drop(name)) for name in values.index}
    other = {name: verdict for name, verdict in without.items() if verdict != trend(values)}
    apart = ", ".join(f"without {name} it is {verdict}" for name, verdict in other.items())
    return f"it hangs on one point: {apart}" if apart else ""


def ends(values: Any, spec: str) -> str:
    """Return the least and the largest value, or one where they read alike."""
    return " to ".join(dict.fromkeys(f"{end:{spec}}" for end in (min(values), max(values))))


def percent(ratio: float) -> float:
    """Return the change in % that a ratio is."""
    return 100 * (ratio - 1)


# --- trainings ------------------------------------------------------------------------------------


def outcomes(levels: pd.DataFrame, seeds: pd.DataFrame) -> pd.DataFrame:
    """Return `levels` by L1 with shares in %, and with what seeds explain as NAME_limit.

    price is the change of cross-entropy over L1 = 0. seeds: runs, whose noise counts.
    """
    table = levels.set_index("l1_coefficient", drop=False)
    dense = table.loc[0.0, "runs"]
    spread = [np.expm1(noise_limit(seeds, ACTIVE, number, np.inf)) for number in table["runs"]]
    return table.assign(
        active_limit=table["active"] * spread,
        share=100 * table["active_fraction"],
        share_limit=100 * table["active_fraction"] * spread,
        price=table[LOSS],
        price_limit=[noise_limit(seeds, LOSS, number, dense) for number in table["runs"]],
        dead=100 * table[DEAD],
        dead_limit=[100 * noise_limit(seeds, DEAD, number, np.inf) for number in table["runs"]],
    )


def sweep(data: Recorded) -> Iterator[Row]:
    family, log = data.runs("85m-50m-*")
    recipe = family[analysis.choice(family) == "recipe"]
    more = analysis.sweep(*data.runs("85m-100m-*"))
    seeds = pd.concat([data.choices, more.assign(choice="longer")], ignore_index=True)
    table = outcomes(analysis.levels(analysis.sweep(recipe, log)), seeds)
    dense, best, last = table.loc[0.0], table.loc[LEVEL], table.iloc[-1]
    lower, beyond = table.loc[1e-9 : LEVEL - 1e-9], table.loc[LEVEL + 1e-9 :].iloc[0]

    text = f"{dense.active:.0f} of {dense.active / dense.active_fraction:,.0f} ({dense.share:.1f}%)"
    printed = {"source": "Table 3", "activation": "ReLU", "metric": "avg_nonzeros"}
    without, with_l1 = (data.printed(**printed, l1=level) for level in (0, 2e-5))
    verdict = close(dense.share, 100 * without / 5632, dense.share_limit)
    yield row("relu_alone", text, verdict, f"{dense.share_limit:.1f}%", dense.runs)
    inactive = 100 - best.share
    least = inactive - best.share_limit
    verdict, note = judge(least > 99, in_part=least >= 95), f"{best.active:.1f} active"
    yield row("inactive", f"{inactive:.2f}%", verdict, f"{best.share_limit:.2f}", best.runs, note)
    fall = dense.active / best.active
    limit = fall * np.expm1(noise_limit(seeds, ACTIVE, dense.runs, best.runs))
    verdict = close(fall, without / with_l1, limit)
    yield row("fall", f"{fall:.1f} times", verdict, f"{limit:.1f}", best.runs)

    verdict = at_most(2, best.price, best.price_limit)
    yield row("price", f"{best.price:+.1f}%", verdict, f"{best.price_limit:.1f}", best.runs)
    once = price.pairs(pd.read_csv(data.folder / "bench" / "price.csv"))
    once = once.query("size == '85m' and text == 'new' and l1_coefficient == @LEVEL")
    once = once[once["tokens"] == once["tokens"].max()]
    share, low, _ = price.interval(100 * (1 - once["active"] / once["neurons"]))
    verdict, note = more_than(99, share, share - low), f"{once['active'].mean():.1f} active"
    yield row("inactive_once", f"{share:.2f}%", verdict, f"{share - low:.2f}", len(once), note)
    rise, low, _ = price.interval(once["price"])
    verdict = at_most(2, rise, rise - low)
    yield row("price_once", f"{rise:+.1f}%", verdict, f"{rise - low:.1f}", len(once))
    limit, seeds_of_each = lower["price_limit"].max(), lower["runs"].min()
    text, verdict = f"{ends(lower['price'], '+.1f')}%", at_most(2, lower["price"].max(), limit)
    yield row("price_of_lower_levels", text, verdict, f"{limit:.1f}", seeds_of_each)
    rise, limit = beyond.price - best.price, noise_limit(seeds, LOSS, beyond.runs, best.runs)
    text = f"{rise:+.1f} points ({beyond.share:.2f}% active)"
    before = bool(best.price - lower["price"].min() > limit)
    verdict = judge(rise > limit and not before, rise <= limit, before)
    note = f"over L1 = 0 it is {beyond.price:+.2f}%" + before * "; it rises above 0.5% active too"
    yield row("breaks", text, verdict, f"{limit:.1f}", beyond.runs, note)
    text, limit = f"{last.price:+.1f}% ({last.active:.2f} active)", last.price_limit
    yield row("breaks_last", text, more_than(2, last.price, limit), f"{limit:.1f}", last.runs)

    for name, column, values in (
        ("activity_falls", ACTIVE, -np.log(table["active"])),
        ("dead_rise", DEAD, table[DEAD]),
    ):
        steps = np.diff(values)
        limits = np.array([noise_limit(seeds, column, *pair) for pair in pairwise(table["runs"])])
        verdict = judge((steps > limits).all(), not (steps < -limits).any())
        note = f"steps within the noise: {(abs(steps) <= limits).sum()} of {len(steps)}"
        text = "yes" if (steps > 0).all() else "no"
        yield row(name, text, verdict, seeds=ends(table["runs"], "d"), note=note)
    bad = [level_name(level) for level in table.index[table["status"] != "alive"]]
    text, verdict = ", ".join(bad) or "none", judge(not bad)
    yield row("unusable", text, verdict, seeds=ends(table["runs"], "d"))
    curves = analysis.training_curves(recipe, log, "active_mean")
    curves = curves[curves["l1_coefficient"] == LEVEL]
    shares = [100 * analysis.settles_after(curve) for _, curve in curves.groupby("run")]
    text = f"{ends(shares, '.0f')}% of {curves['step'].max():,} steps"
    verdict = judge(max(shares) <= 10, in_part=max(shares) < 50)
    yield row("settles", text, verdict, seeds=len(shares))
    verdict = more_than(30, best.dead, best.dead_limit)
    yield row("dead", f"{best.dead:.0f}%", verdict, f"{best.dead_limit:.0f}", best.runs)


def choices(data: Recorded) -> Iterator[Row]:
    table, tests = data.choices, len(analysis.contrasts(data.choices))

    def change(choice: str, column: str, level: float = LEVEL) -> pd.Series:
        return pd.Series(contrast(table, column, (choice, level), ("recipe", level), tests))

    def difference(name: str, one: pd.Series, verdict: str, note: str = "") -> Row:
        return row(name, f"{one.difference:+.1f}%", verdict, f"{one.limit:.1f}", one.runs, note)

    for name, choice, spec in (
        ("reinit", "re-initialisation", ".1f"),
        ("warmup", "L1 warm-up", ".0f"),
    ):
        dead, price, active = (change(choice, column) for column in (DEAD, LOSS, ACTIVE))
        share, limit = 100 * dead.value, 100 * noise_limit(table, DEAD, dead.runs, np.inf)
        without = 100 * dead.other
        least = without - 100 * noise_limit(table, DEAD, dead.other_runs, np.inf)
        most = share + limit
        verdict = judge(least > 1 and most <= 1, without <= 1, most < least)
        text = f"{share:{spec}} instead of {without:.0f}% dead"
        yield row(f"{name}_dead", text, verdict, f"{limit:{spec}}", dead.runs)
        yield difference(f"{name}_price", price, at_most(MARGIN, price.difference, price.limit))
        if choice == "L1 warm-up":
            width = 2112
            text = f"{width * active.value:.1f} instead of {width * active.other:.1f} active"
            note = f"{active.difference:+.0f} ± {active.limit:.0f}% at the same coefficient"
            printed = {"source": "Table 5", "metric": "avg_nonzeros"}
            recipe = data.printed(**printed, training_modification="none", l1=2e-5)
            warmed = data.printed(**printed, training_modification="sparsity_warmup")
            paper = percent(warmed / recipe)
            verdict = close(active.difference, paper, active.limit)
            yield row("warmup_activity", text, verdict, seeds=active.runs, note=note)
        else:
            verdict = at_most(ACTIVE_MARGIN, active.difference, active.limit)
            yield difference("reinit_activity", active, verdict)
    printed = {"source": "Table 3", "metric": "cross_entropy", "l1": 0}
    paper = data.printed(**printed, activation="SiLU") / data.printed(**printed, activation="ReLU")
    silu = change("SiLU", LOSS, 0.0)
    yield difference("silu", silu, close(silu.difference, percent(paper), silu.limit))
    for name, level in (("nongated_dense", 0.0), ("nongated", LEVEL)):
        one = change("non-gated", LOSS, level)
        yield difference(name, one, no_change(one.difference, one.limit))


def sizes(data: Recorded) -> Iterator[Row]:
    table, seeds = analysis.sizes(*data.runs("depth-* 85m-100m-l1-*")), data.choices
    table.index = table["num_layers"].map("the size of {} layers".format)
    number = ends(table["runs"], "d")
    limit = noise_limit(seeds, ACTIVE, table["runs"].min(), table["runs"].min())
    printed = {"source": "text 4.2/App. A.1/Table 3", "metric": "avg_nonzeros"}
    paper = np.log(data.printed(**printed, model="0.5B") / data.printed(**printed, model="2B"))
    shares = 100 * table["active_fraction"]

    def falls(values: pd.Series) -> str:
        steps = np.diff(np.log(values.astype(float)))
        untestable = max(abs(steps.sum()), abs(steps.sum() + paper)) <= limit
        return judge(-steps.sum() > limit and steps.max() <= limit, untestable)

    for name, values, texts in (
        ("larger_active", table["active"], table["active"].map("{:.1f}".format)),
        ("larger_share", shares, shares.map("{:.3g}%".format)),
    ):
        note = hangs(falls, values)
        yield row(name, " → ".join(texts), falls(values), seeds=number, note=note)
    change, pairs = table["change"], table[["runs", "dense_runs"]].to_numpy()
    limits = pd.Series([noise_limit(seeds, LOSS, *pair) for pair in pairs], table.index)
    text, verdict = f"{ends(change, '+.1f')}%", at_most(2, change.max(), limits.max())
    yield row("price_by_size", text, verdict, f"{limits.max():.1f}", number)

    def growth(values: pd.Series) -> tuple[float, float]:
        first, last = values.index[[0, -1]]
        return values[last] - values[first], np.hypot(limits[first], limits[last])

    def grows_not(values: pd.Series) -> str:
        return at_most(MARGIN, *growth(values))

    rise, limit = growth(change)
    text, note = f"{rise:+.1f} points of %", hangs(grows_not, change)
    verdict = "not testable" if note else grows_not(change)
    yield row("gap_by_size", text, verdict, f"{limit:.1f}", number, note)


def training(data: Recorded) -> Iterator[Row]:
    pair = data.runs("flagship-dense flagship-triton")
    ways = analysis.computed_otherwise(*pair).set_index("backend")
    dense, sparse = ways.loc["dense"], ways.loc["triton"]
    curves = analysis.computed_curves(*pair).query("metric == 'tokens_per_second'")
    seconds = curves.groupby("run")["tokens"].diff().fillna(curves["tokens"]) / curves["value"]
    seconds = seconds.groupby(curves["run"]).sum()
    whole = percent(seconds["flagship-dense"] / seconds["flagship-triton"])
    late = percent(sparse["tokens_per_second"] / dense["tokens_per_second"])
    memory = percent(sparse["peak_memory"] / dense["peak_memory"])
    most = percent(sparse["peak_memory_whole"] / dense["peak_memory_whole"])
    gigabytes = (side["peak_memory"] / 1e9 for side in (sparse, dense))
    for name, text in (
        ("whole", f"{whole:+.0f}% tokens/s"),
        ("late", f"{late:+.0f}% tokens/s ({sparse['active']:.1f} active at the end)"),
        ("memory_late", "{:+.0f}% ({:.1f} instead of {:.1f} GB)".format(memory, *gigabytes)),
        ("memory_whole", f"{most:+.0f}% ({sparse['peak_memory_whole'] / 1e9:.1f} GB)"),
    ):
        yield row(f"training_{name}", text, "beyond the paper", seeds=1)

    race = analysis.race(*data.runs("flagship-300m-l1-0 flagship-300m-l1-6e-4"))
    first, second = analysis.reached(race).itertuples()
    change, limit = percent(second.last / first.last), noise_limit(data.choices, LOSS, 1, 1)
    train = percent(second.train_last / first.train_last)
    note = f"on its own training text the price is {train:+.1f}%"
    verdict = at_most(2, change, limit)
    yield row("training_race_loss", f"{change:+.1f}%", verdict, f"{limit:.1f}", 1, note)


# --- activity -------------------------------------------------------------------------------------


def shared(name: str, data: Recorded, finding: str) -> Row:
    """Return the row of a finding that has to hold in every model at LEVEL, seeds among them.

    no_overflow and first_is_most have to hold in every traced model.
    """
    groups = analysis.groups(data.findings, SETTING, AT_LEVEL)
    counts = {of: analysis.shared(some).set_index("finding") for of, some in groups.items()}
    everywhere = finding in ("no_overflow", "first_is_most")
    models = counts["all" if everywhere else "level"].loc[finding]
    seeds = models if everywhere else counts["seeds"].loc[finding]
    whole, enough = models["holds"] == models["models"], seeds["models"] > 2
    verdict = judge(enough and whole, not enough, 2 * models["holds"] > models["models"])
    if verdict == "contradicted" and finding in ("first_two_least", "early_peak"):
        verdict = "differs at this size"  # of 2 to 12 layers; the paper's have 8 to 38
    text = f"holds in {models['holds']} of {models['models']} models"
    if not everywhere:
        text = f"{text}, {seeds['holds']} of {seeds['models']} seeds"
    sizes = "" if everywhere else f"{groups['level']['setting'].nunique()} sizes and lengths"
    return row(name, text, verdict, note=sizes)


def layers(data: Recorded) -> Iterator[Row]:
    def peaks(level: str, number: int) -> list[list[int]]:
        """Return the layers of most activity and the last one, a list a seed."""
        runs, log = data.runs(f"85m-50m-l1-{level}-seed-*")
        means = [logged_layers(log[log["run"] == run], 2112)["mean"] for run in runs["run"]]
        return [[*sorted(mean.nlargest(number).index), len(mean) - 1] for mean in means]

    def early(layer: int, last: int, paper: int) -> bool:
        return abs(layer / last - paper / LAST) < analysis.PEAK_WITHIN

    dense, sparsest = peaks("0", 1), peaks("5e-3", 2)
    at_end = [two == last and early(one, last, 2) for one, two, last in sparsest]
    for name, found, holds in (
        ("peak_dense", dense, [early(peak, last, 13) for peak, last in dense]),
        ("peaks_sparsest", sparsest, at_end),
    ):
        text = "; ".join(" and ".join(map(str, layers)) for *layers, _ in found)
        verdict = "reproduced" if all(holds) else "differs at this size"
        yield row(name, f"layer {text} of 0 to {found[0][-1]}", verdict, seeds=len(found))
    yield shared("least_active_shared", data, "first_two_least")
    yield shared("busiest_token_shared", data, "ten_times")
    yield shared("peak_shared", data, "early_peak")
    yield shared("overflow_shared", data, "no_overflow")


def tokens(data: Recorded) -> Iterator[Row]:
    yield shared("first_token_shared", data, "first_is_most")


def neurons(data: Recorded) -> Iterator[Row]:
    passage = Trace.load(data.folder / "traces" / "flagship-passage.npz")
    table = analysis.surprise_correlation(passage).query("layer == -1 and of == 'surprise'")
    one = table.iloc[0]
    limit, verdict = "{low:.2f} to {high:.2f}".format(**one), judge(one.low > 0, one.high > 0)
    yield row("surprise", f"rank correlation {one['spearman']:.2f}", verdict, limit, seeds=1)


# --- tasks ----------------------------------------------------------------------------------------


def tasks(data: Recorded) -> Iterator[Row]:
    evaluated = evaluations(results.load_evaluations(data.folder / "eval"))
    seven = analysis.seven_tasks(evaluated[~analysis.fits(evaluated["model"], OTHER_CHOICES)])
    levels = analysis.by_level(seven)
    pairs = analysis.against_dense(levels)
    above = pairs[pairs["above_chance"].astype(bool)]
    lost = analysis.below(above["difference"], NEAR_CHANCE * above["stderr"]).sum()
    verdict = judge(len(above) > 0 and lost == 0, above.empty, lost < len(above))
    means = analysis.several_levels(levels).query(f"task == {analysis.MEAN!r}")
    means = means[means["parameters"] == means["parameters"].iloc[-1]]
    text = ", ".join((100 * means["accuracy"]).map("{:.1f}".format))
    text = f"{text}% (chance {100 * means['chance'].iloc[0]:.1f}%)"
    yield row("seven_tasks", text, verdict, f"{100 * means['stderr'].max():.1f}")
    worst = pairs.loc[pairs["difference"].idxmin()]
    note = f"of {len(pairs)} pairs; in {len(above)} of them a model is above chance on the mean"
    text, limit = f"{100 * worst['difference']:+.1f} points", f"{100 * worst['stderr']:.1f}"
    yield row("worst_pair", text, verdict, limit, note=note)
    lettered = seven[seven["task"] == "commonsense_qa"]
    over = lettered["accuracy"] - lettered["chance"]
    verdict = judge(not analysis.below(-over, NEAR_CHANCE * lettered["stderr"]).any())
    yield row("lettered", f"{ends(100 * lettered['accuracy'], '.1f')}%", verdict)

    every, named = pd.Series(sorted(data.answers["run"].unique())), "85m-100m-l1-{}-seed-*".format
    sides = (every[analysis.fits(every, named(level))].tolist() for level in ("0", "6e-4"))
    table = analysis.paired_runs(data.answers, *sides).query("above_chance")
    lost, seeds = (table["verdict"] == "less").sum(), table[["runs", "dense_runs"]].min().min()
    settled = seeds > 2 and not (table["verdict"] == "one seed").any()
    unseen = ends(table["limit"] - table["difference"], ".1f")
    text = f"{lost} of {len(table)} tasks are worse beyond the interval"
    note = f"losses of up to {unseen} points, by task, are not excluded"
    within = (table["difference"] - table["limit"] >= -MARGIN).all()
    verdict = judge(settled and within, not settled or lost == 0, lost < len(table))
    yield row("paired", text, verdict, seeds=seeds, note=note)


def pretrained(data: Recorded) -> Iterator[Row]:
    students = data.runs(analysis.STUDENTS)
    table = analysis.relufied_runs(*students).set_index("run")
    pairs = analysis.relufied_pairs(students[0], data.answers).query("task == 'mean'")
    pairs = pairs.join(100 * table["active_fraction"].rename("share"), on="run")
    columns = ["difference", "low", "high"]
    pairs[columns] = 100 * pairs[columns].astype(float)
    beside = pairs[pairs["reference"] == analysis.WITHOUT_L1].sort_values("share")
    alone = pairs[pairs["run"].map(table["level"]) == analysis.WITHOUT_L1]
    alone = alone.sort_values("difference", ascending=False)
    busiest, sparsest, worse = beside.iloc[-1], beside.iloc[0], analysis.worse(beside).sum()
    text = f"{busiest['difference']:+.1f} points with {busiest['share']:.0f}% active, "
    text += f"{sparsest['difference']:+.1f} with {sparsest['share']:.1f}%"
    note = f"{worse} of {len(beside)} students are worse (Holm); intervals "
    note += "{low:+.1f} to {high:+.1f} and ".format(**busiest)
    note += "{low:+.1f} to {high:+.1f}; ReLU alone has ".format(**sparsest)
    note += f"{alone['share'].iloc[0]:.0f}% active and "
    note += " and ".join(alone["difference"].map("{:+.1f}".format)) + " points over the original"
    verdict = judge(worse == 0, in_part=worse < len(beside) / 2)
    yield row("students_lost", text, verdict, note=note)


# --- speed ----------------------------------------------------------------------------------------


def by_size(data: Recorded, name: str, timed: str, saved: str) -> Iterator[Row]:
    """Yield the speed of the paper's sizes, and the memory or energy that they save."""
    for size, model in SIZES.items():
        one = data.scale.loc[f"{timed} speed", model]
        text, note = f"{one['change']:+.0f}% tokens/s", f"{one['active']:.0f} active"
        yield row(f"{name}_{size}", text, "beyond the paper", note=note)
        text = f"{data.scale.loc[f'{timed} {saved}', model]['change']:+.0f}% {saved}"
        yield row(f"{saved}_{size}", text, "beyond the paper")


def steps(data: Recorded) -> Iterator[Row]:
    yield from by_size(data, "step", "training", "memory")


def models(data: Recorded) -> Iterator[Row]:
    yield from by_size(data, "forward", "forward", "energy")
    every = data.bench.rows("model_layers.csv", analysis.layer_contributions)
    middle = every.query("profile == 'paper' and model == '1.5b'")
    middle = analysis.near_level(middle, 29, "level", 2)
    trained = every[every["model"] == "flagship-half"]
    for name, some in (("correlation", middle), ("correlation_trained", trained)):
        r, note = analysis.correlation(some), f"over {len(some)} layers"
        yield row(name, f"r = {r:.3f}", "beyond the paper", note=note)
    where = f"provider == {FORCED!r} and model == '1.5b' and profile == 'paper' and active > 800"
    one = data.bench.rows("model.csv", analysis.model_speedups, where).iloc[0]
    gain, note = percent(one["speedup"]), f"1.5B with {one['active']:.0f} active"
    yield row("forced", f"{gain:+.0f}% tokens/s", "beyond the paper", note=note)
    where = f"provider == {FORCED!r} and context == 512 and mode == 'graph' and batch == 1"
    decoded = data.bench.rows("decode.csv", analysis.decode_speedups, where)
    for name, tuned in (("decode", False), ("decode_tuned", True)):
        one = decoded[decoded["tuned"] == tuned].iloc[-1]
        note = f"{one['active']:.0f} active"
        yield row(name, f"{percent(one['speedup']):+.0f}% tokens/s", "ours", note=note)


def layer_speed(data: Recorded) -> Iterator[Row]:
    large = analysis.near_level(data.bench.rows("ffn.csv", analysis.speedups, LARGE), 29)
    best = large.loc[large["provider"].isin(SPARSE), "speedup"].max()
    yield row("layer_large", f"{best:.2f} times dense", "ours")
    one = analysis.fastest(large).query("side == 'sparse FP8'").iloc[-1]
    text = f"{one['speedup']:.2f} times dense bf16, {one['over_fp8']:.2f} times dense FP8"
    yield row("fp8_large", text, "ours")


def formats(data: Recorded) -> Iterator[Row]:
    dense = torch.zeros(4, 5632, dtype=torch.bfloat16)  # a full, two sparse and an empty row
    dense[0], dense[1, ::100], dense[2, :40] = 1, 2, 3
    packed = PackedTwELL.pack(dense, 256, 8)
    slots, words = packed.values.shape[2], packed.words.shape[1]
    printed = data.printed(metric="payload_slots_per_tile")
    yield row("slots", str(slots), judge(slots == printed))
    yield row("words", str(words), judge(words == 5632 / data.printed(metric="compression_factor")))
    text = "no value lost" if torch.equal(packed.unpack(), dense) else "not exact"
    yield row("overflowing_tile", text, "not compared")
    yield row("overflowing_buffers", "none dropped", "not compared")


# --- the table ------------------------------------------------------------------------------------

_FUNCTIONS = [sweep, choices, sizes, layers, tokens, neurons, tasks, pretrained, training, steps]
_FUNCTIONS += [models, layer_speed, formats]
SUBJECTS = {function.__name__: function for function in _FUNCTIONS}


def table(data: Recorded) -> pd.DataFrame:
    """Return every claim beside our number, a row a claim, in the order of data/claims.yaml.

    Columns: COLUMNS; paper is "–" where the paper claims nothing. Raises ValueError for a claim
    without a number of ours, a number without a claim, and a number that is NaN; KeyError for a
    subject without a function.
    """
    rows = []
    for subject, about in data.subjects.items():
        ours = {one["name"]: one for one in SUBJECTS[subject](data)}
        names = [claim["name"] for claim in about["claims"]]
        if sorted(names) != sorted(ours):
            apart = ", ".join(sorted({*names} ^ {*ours})) or "a name twice"
            raise ValueError(f"claims and numbers of {subject} differ: {apart}")
        for claim in about["claims"]:
            one = ours[claim["name"]]
            if "nan" in f"{one['ours']} {one['beyond']} {one['interval']} {one['note']}":
                raise ValueError(f"{claim['name']} has no number: {one}")
            note = "; ".join(filter(None, [one["note"], claim.get("note", "")]))
            defaults = about | {"subject": subject, "paper": "–", "source": ""}
            rows.append(defaults | claim | one | {"note": note})
    table = pd.DataFrame(rows, columns=COLUMNS)
    signed = table[["ours", "beyond", "interval", "note"]]
    return table.assign(**signed.replace(r"(^|[ (])-(?=\d)", r"\1−", regex=True))


def section(table: pd.DataFrame, *subjects: str) -> pd.DataFrame:
    """Return the claims of subjects to be read, without the columns that have nothing."""
    some = table[table["subject"].isin(subjects)]
    some = some[["claim", "paper", "ours", "beyond", "interval", "seeds", "verdict"]]
    empty = [name for name in ("ours", "beyond", "interval", "seeds") if (some[name] == "").all()]
    return some.drop(columns=empty).rename(columns={"beyond": "beyond the paper"})
