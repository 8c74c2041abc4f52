"""The table "The paper and ours" at the end of each notebook: `compare`, and the rows that it is given, by subject.

Each function of rows takes the paper's numbers and tables of the other modules, and returns (finding, paper, ours, whether
they agree or None where that cannot be said, reason if they do not).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from twell.analysis.runs import MAX_PRICE, level_name, recommended, settles_after
from twell.analysis.speed import at_level, correlation, crossovers
from twell.analysis.tasks import NEAR_CHANCE, against_dense, by_level, paper_tasks, seven_tasks
from twell.analysis.variants import (
    QUANTITIES,
    UNKNOWN,
    against_frontier,
    choice_table,
    compared_level,
    contrast,
    noise_limit,
    noise_verdict,
    paper_sizes,
)

# Below this share of dead neurons there is nothing to remedy, and what a remedy leaves counts as none.
FEW_DEAD = 0.01
NOT_RECORDED = "no such run is recorded"


def compare(rows: Iterable[tuple[str, Any, Any, bool | None, str]]) -> pd.DataFrame:
    """Return the "paper | ours" table of a notebook.

    rows: (finding, paper, ours, whether they agree or None where that cannot be said, reason if they do not).
    Columns: finding, paper, ours, verdict ("agrees", "differs" or "not comparable"), reason (empty where they
    agree). Numbers are printed with three digits, bool as yes or no.
    """

    def show(value: Any) -> str:
        if isinstance(value, bool | np.bool):
            return "yes" if value else "no"
        return f"{value:.3g}" if isinstance(value, int | float | np.number) else str(value)

    verdicts = {True: "agrees", False: "differs", None: "not comparable"}
    table = []
    for finding, paper, ours, agrees, reason in rows:
        verdict = verdicts[None if agrees is None else bool(agrees)]
        table.append((finding, show(paper), show(ours), verdict, "" if agrees else reason))
    return pd.DataFrame(table, columns=["finding", "paper", "ours", "verdict", "reason"])


def sweep_findings(paper: pd.DataFrame, table: pd.DataFrame, active: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: what the paper finds of its sweep, and what `levels` says of ours.

    paper: `results.paper()`; active: `training_curves` of active_mean; reason: why a difference is to be expected.
    """
    if not (table["l1_coefficient"] == 0).any():
        raise ValueError("no run has L1 = 0, which the others are compared with")
    of_levels = paper[(paper["source"] == "Table 3") & (paper["activation"] == "ReLU")]
    theirs = of_levels.pivot(index="metric", columns="l1", values="value").astype(float)
    their_active, their_loss = theirs.loc["avg_nonzeros"], theirs.loc["cross_entropy"]
    settled = paper.loc[paper["metric"] == "sparsity_settles_after", "value"].item()
    dense, best = table[table["l1_coefficient"] == 0].iloc[0], recommended(table)
    fall, their_fall = dense["active"] / best["active"], their_active[0] / their_active[2e-5]
    price, their_price = best["cross_entropy_change"], 100 * (their_loss[2e-5] / their_loss[0] - 1)
    share, their_share = 100 * dense["active_fraction"], 100 * their_active[0] / 5632
    inactive, their_inactive = 100 - 100 * best["active_fraction"], 100 - 100 * their_active[2e-5] / 5632
    early = settles_after(active[active["run"] == best["run"]])
    died = 100 * best["dead_fraction_train"]
    falls = table["active"].is_monotonic_decreasing
    dies = table["dead_fraction_train"].is_monotonic_increasing
    bad = [f"{level_name(row.l1_coefficient)} ({row.status})" for row in table.itertuples() if row.status != "alive"]
    return [
        ("active at L1 = 0, % (below 30)", their_share, share, share < 30, reason),
        ("inactive at the recommended level, % (at least 95)", their_inactive, inactive, inactive >= 95, reason),
        ("its price in cross-entropy, % (at most 2)", their_price, price, price <= MAX_PRICE, reason),
        ("fall of activity from L1 = 0 (at least half)", their_fall, fall, fall > their_fall / 2, reason),
        ("activity falls with every level", True, falls, falls, reason),
        (
            "activity stays within 20% of its last value after (below half)",
            f"{settled} of 30,000 steps",
            f"{100 * early:.0f}% of the training",
            early < 0.5,
            reason,
        ),
        ("dead neurons at the recommended level, %", ">30", died, died > 30, reason),
        ("dead neurons rise with every level", True, dies, dies, reason),
        ("levels that cannot be used", "none", ", ".join(bad) or "none", not bad, reason),
    ]


def _judged(verdict: str, agrees: Sequence[str], printed: float, limit: float, reason: str) -> tuple[bool | None, str]:
    """Whether a difference is as the paper says, and the reason if not; agrees: the verdicts that are."""
    if verdict in ("", UNKNOWN):
        return None, "no setting has several seeds" if verdict else NOT_RECORDED
    if verdict == "within noise" and verdict not in agrees and abs(printed) <= limit:
        return None, "the paper's difference is less than our noise"
    return verdict in agrees, reason


def _said(difference: float, limit: float, *runs: int) -> str:
    if np.isnan(difference):
        return "–"
    noise = "" if np.isnan(limit) else f" ± {limit:.2g}"
    return f"{difference:+.3g}{noise} (n = {', '.join(map(str, runs))})"


def choice_findings(paper: pd.DataFrame, table: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: what the paper says of its choices of training, and `choices` of ours at `compared_level`.

    paper: `results.paper()`; reason: why a difference is to be expected. A difference is one only above the `noise_limit`, which
    stands behind the ±; within it a claim of a difference is only contradicted where the paper's is larger than the limit.
    """
    level, rows = compared_level(table), []
    loss, active, dead = QUANTITIES
    theirs = pd.concat([choice_table(paper, table, f"Table {n}") for n in (4, 3, 5)])
    theirs = theirs.groupby(["choice", "paper_l1"]).first()  # of Table 4 the accuracies, which have a digit more

    def printed(column: str, first: tuple, second: tuple, of: tuple | None = None) -> float:
        value = theirs[f"paper_{column}"]
        return float(value[first] - value[second]) * (1 if of is None else 100 / value[of])

    def row(
        what: str, effect: float, column: str, first: tuple, second: tuple, agrees: Sequence[str], why: str = reason
    ):
        found = contrast(table, column, first, second)
        said = _said(*(found[key] for key in ("difference", "limit", "runs", "other_runs")))
        rows.append((what, f"{effect:+.3g}", said, *_judged(found["verdict"], agrees, effect, found["limit"], why)))

    recipe, plain, at = (
        ("recipe", 0.0),
        ("recipe", 2e-5),
        f"L1 = {level_name(level)}" if level == level else "the sparse level",
    )
    not_worse = ["within noise", "less"]
    found = contrast(table, loss, ("recipe", level), recipe)
    said = _said(*(found[key] for key in ("difference", "limit", "runs", "other_runs")))
    cheap = None if np.isnan(found["difference"]) else found["difference"] <= MAX_PRICE
    price = f"{printed('cross_entropy', plain, recipe, recipe):+.3g}"
    what = f"cross-entropy at {at} over L1 = 0, % (at most {MAX_PRICE:g})"
    rows.append((what, price, said, cheap, NOT_RECORDED if cheap is None else reason))

    effect = printed("cross_entropy", ("SiLU", 0.0), recipe, recipe)
    row("SiLU over ReLU at L1 = 0, cross-entropy, % (less)", effect, loss, ("SiLU", 0.0), recipe, ["less"])
    for l1, theirs_l1 in ((0.0, 0.0), (level, 2e-5)):
        effect = printed("accuracy", ("non-gated", theirs_l1), ("recipe", theirs_l1))
        what = f"non-gated over gated at {'L1 = 0' if l1 == 0 else at}, cross-entropy, points of % "
        what += "(the same; paper: accuracy, points)"
        row(what, effect, loss, ("non-gated", l1), ("recipe", l1), ["within noise"])

    without = contrast(table, dead, ("recipe", level), ("recipe", level))["value"]
    for name, theirs_l1 in (("re-initialisation", 2e-5), ("L1 warm-up", 3e-4)):
        left = contrast(table, dead, (name, level), ("recipe", level))
        said = f"{100 * left['value']:.3g} (n = {left['runs']})" if left["runs"] else "–"
        agrees, why = left["value"] <= FEW_DEAD, reason
        if np.isnan(left["value"]) or np.isnan(without):
            agrees, why = None, NOT_RECORDED if np.isnan(left["value"]) else "no run of the recipe at this level"
        elif not without > FEW_DEAD:
            agrees, why = None, "hardly any neuron is dead without it"
        known = "" if np.isnan(without) else f"; without it {100 * without:.3g}"
        rows.append((f"{name}: dead neurons left, %{known}", "~0", said, agrees, why))
        ours, setting = (name, level), (name, theirs_l1)
        effect = 100 * printed("active", setting, plain) / theirs.loc[plain, "paper_active"]
        if name == "re-initialisation":
            cost = printed("cross_entropy", setting, plain, recipe)
            row(f"{name}: cross-entropy, points of % (no more)", cost, loss, ours, ("recipe", level), not_worse)
            row(f"{name}: active neurons, % (no more)", effect, active, ours, ("recipe", level), not_worse)
        else:
            why = "at the same coefficient; the paper's with warm-up is 15 times its other"
            row(f"{name}: active neurons, % (more)", effect, active, ours, ("recipe", level), ["more"], why)
    return rows


def frontier_findings(table: pd.DataFrame, name: str) -> list[tuple]:
    """Return rows for `compare` on a choice of our own, from `choices`: what it gains over the recipe's line, by level."""
    rows = []
    for row in against_frontier(table).query("choice == @name").itertuples():
        at = f"{name}, L1 = {level_name(row.l1_coefficient)} ({100 * row.active_fraction:.3g}% active)"
        why = "ours" if row.status == "alive" else f"ours; {row.status}"
        outside = "no level of the recipe is beside it"
        said = _said(row.difference, row.limit, row.runs)
        verdict = f"{why}; {row.verdict or outside}"
        rows.append((f"{at}: cross-entropy over the recipe as sparse, points of %", "–", said, None, verdict))
        said = f"{100 * row.line_active_fraction:.3g}" if row.line_active_fraction == row.line_active_fraction else "–"
        rows.append((f"{at}: active in the recipe at this price, %", "–", said, None, why))
        said = f"{100 * row.dead:.3g}, {_said(100 * (row.dead - row.line_dead), 100 * row.dead_limit, row.runs)}"
        verdict = f"{why}; {row.dead_verdict or outside}"
        rows.append((f"{at}: dead neurons, %, and over the recipe as sparse, points", "–", said, None, verdict))
    return rows or [(f"{name}: cross-entropy over the recipe as sparse", "–", "–", None, NOT_RECORDED)]


def size_findings(paper: pd.DataFrame, table: pd.DataFrame, seeds: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: what the paper says of its four sizes, and `sizes` of ours.

    seeds: `choices`, whose noise counts for all sizes, as these have one seed each; reason: why a difference is to be expected.
    """
    theirs = paper_sizes(paper)
    gaps = ", ".join(f"{gap:+.1f}" for gap in theirs["accuracy"] - theirs["accuracy_dense"])
    activity = theirs.dropna(subset="active")
    rows = []
    for column, what in (("active_fraction", "share of neurons active, %"), ("active", "active neurons")):
        scaled = 100 if column == "active_fraction" else 1
        printed, ours = (
            " → ".join(f"{scaled * value:.3g}" for value in values) for values in (activity[column], table[column])
        )
        agrees, why = None, NOT_RECORDED
        if len(table) > 1:
            steps = np.diff(np.log(table[column].astype(float)))
            limit = noise_limit(seeds, "active_fraction", table["runs"].min(), table["runs"].min())
            effect = np.log(activity[column].iloc[-1] / activity[column].iloc[0])
            agrees, why = _judged(noise_verdict(steps.sum(), limit), ["less"], effect, limit, reason)
            if agrees and steps.max() > limit:
                agrees, why = False, "it rises between two sizes"
        rows.append((f"larger is sparser: {what}", printed, ours or "–", agrees, why))
    change = table["change"].dropna()
    agrees = bool((change <= MAX_PRICE).all()) if len(change) else None
    said = ", ".join(f"{value:+.2f}" for value in change) or "–"
    what = f"cross-entropy of sparse over dense by size, % (at most {MAX_PRICE:g})"
    printed = f"{theirs['change'].dropna().item():+.2f} (1.5B)"
    rows.append((what, printed, said, agrees, reason if len(change) else NOT_RECORDED))
    agrees, why, said = None, NOT_RECORDED, "–"
    if len(change) > 1:
        # The difference of two gaps has the noise of four models.
        limit = np.sqrt(2) * noise_limit(seeds, "cross_entropy_change", 1, 1)
        grows = change.iloc[-1] - change.iloc[0]
        agrees, why = _judged(noise_verdict(grows, limit), ["within noise", "less"], 0, limit, reason)
        said = f"{grows:+.2f} ± {limit:.2f} points of %"
    rows.append(
        ("the gap grows from the smallest to the largest (no)", f"{gaps} points of accuracy", said, agrees, why)
    )
    return rows


def _percent(value: float, over: float) -> str:
    change = 100 * (value / over - 1)
    return "–" if np.isnan(change) else f"{change:+.3g}"


_ONE_PAIR = "ours; one pair, which cannot tell a drift by rounding from a bias"


def computed_findings(paper: pd.DataFrame, flagships: pd.DataFrame, scaled: pd.DataFrame) -> list[tuple]:
    """Return rows for `compare`: whole trainings by the sparse kernels beside dense ones, and on more devices beside fewer.

    paper: `results.paper()`; flagships, scaled: `computed_otherwise` of a training with both, and of one on several numbers of
    devices; either may be empty. Each run is compared with the dense one on as many devices, or with that of its backend on the
    fewest. Speed and memory stand beside the paper's of 0.5B, with a reason why they do not compare.
    """
    known = paper[(paper["source"] == "Table 1") & (paper["model"] == "0.5B") & (paper["l1"] > 0)]
    known = known.set_index("metric")["value"].astype(float)
    theirs = paper[(paper["source"] == "Table 2") & (paper["model"] == "all (gated)")].set_index("metric")["value"]
    faster, smaller = (f"{known[f'training_{what}_change']:+.3g}" for what in ("throughput", "peak_memory"))
    rows, titles = [], ("training speed", "peak memory")
    for _, alike in flagships.groupby("devices"):
        dense = alike[alike["backend"] == "dense"]
        for run in alike[alike["backend"] != "dense"].itertuples() if len(dense) else ():
            first, what = dense.iloc[0], f"{run.way} over {dense['way'].iloc[0]}"
            why = f"another GPU; ours: {run.parameters / 1e6:.3g} M parameters, steps of {run.batch_tokens:,} tokens, a vocabulary "
            why += f"of {run.vocab_size:,}, {run.active:.3g} active; the paper: 0.5B, {theirs['tokens_per_step']:,}, {theirs['vocab_size']:,}"
            change = _percent(run.cross_entropy, first["cross_entropy"])
            rows.append((f"{what}: last cross-entropy, %", "–", change, None, _ONE_PAIR))
            for column, printed, name, reason in (
                ("tokens_per_second", faster, f"{titles[0]}, second half, %", why),
                ("peak_memory", smaller, f"{titles[1]}, second half, %", why),
                ("peak_memory_whole", "–", f"{titles[1]}, whole training, %", "ours; early steps are the least sparse"),
            ):
                change = _percent(getattr(run, column), first[column])
                rows.append((f"{what}: {name}", printed, change, None, "not measured" if change == "–" else reason))
    if not rows:
        rows = [("sparse kernels over dense: last cross-entropy, %", "–", "–", None, NOT_RECORDED)]
        for name, printed in zip(titles, (faster, smaller), strict=True):
            rows.append((f"sparse kernels over dense: {name}, %", printed, "–", None, NOT_RECORDED))
    before = len(rows)
    for _, alike in scaled.groupby("backend"):
        first = alike.sort_values("devices", kind="stable").iloc[0]
        for run in alike[alike["devices"] > first["devices"]].itertuples():
            what, why = f"{run.way} over {first['way']}", "ours; the paper prints no such number"
            times = run.tokens_per_second / first["tokens_per_second"]
            why, times = ("not measured", "–") if np.isnan(times) else (why, f"{times:.3g}")
            rows.append((f"{what}: training speed, times", "–", times, None, why))
            change = _percent(run.cross_entropy, first["cross_entropy"])
            rows.append((f"{what}: last cross-entropy, %", "–", change, None, _ONE_PAIR))
    if len(rows) == before:
        for name in ("training speed, times", "last cross-entropy, %"):
            rows.append((f"more devices over one: {name}", "–", "–", None, NOT_RECORDED))
    return rows


def layer_findings(
    paper: pd.DataFrame,
    sparse: pd.DataFrame,
    dense: pd.DataFrame,
    sparsest: pd.DataFrame,
    overflow: pd.DataFrame,
    reason: str,
) -> list[tuple]:
    """Return rows for `compare`: where the paper finds activity, and where we do.

    paper: `results.paper()`; sparse, dense, sparsest: `per_layer` or `logged_layers` at the recommended level, without L1 and
    at a level beyond use; overflow: `tile_overflow` at the recommended level; reason: why a difference is to be expected.
    A peak agrees when it lies within a quarter of the depth of the paper's; of two, the other has to be in the last layer.
    """
    theirs = paper.set_index("metric")["value"]
    peaks = paper[paper["metric"] == "peak_layer"].set_index("l1")["value"]
    their_last, last = 27, len(sparse) - 1

    def near(at: int, printed: str) -> bool:
        return abs(at / max(last, 1) - float(printed.strip("~")) / their_last) < 0.25

    def peak(name: str, table: pd.DataFrame, printed: str) -> tuple:
        at = int(table["mean"].idxmax())
        return name, f"{printed} (of 0 to {their_last})", f"{at} (of 0 to {last})", near(at, printed), reason

    least = sorted(int(layer) for layer in sparse.nsmallest(2, "mean")["layer"])
    two = sorted(int(layer) for layer in sparsest.nlargest(2, "mean")["layer"])
    printed_two, as_printed = theirs["peak_layers"], len(two) == 2 and two[1] == last
    as_printed = as_printed and near(two[0], printed_two.split()[0])
    ratio, over = sparse["max_over_mean"].min(), overflow[overflow["compression"] == theirs["compression_factor"]]
    over = over["overflow_rows"].mean()
    independent = "neurons do not fire independently"
    return [
        ("least active layers", theirs["least_active_layers"], least, least == [0, 1], reason),
        peak("peak layer, recommended level", sparse, peaks[2e-5]),
        peak("peak layer, L1 = 0", dense, peaks[0]),
        ("peak layers, a level beyond use", printed_two, f"{two} (of 0 to {last})", as_printed, reason),
        ("maximum over mean, in every layer", theirs["max_over_mean_nonzeros_per_layer"], ratio, ratio > 10, reason),
        ("tokens with a tile that overflows", theirs["overflow_probability"], over, over == 0, independent),
    ]


def token_findings(paper: pd.DataFrame, tokens: pd.DataFrame, positions: pd.DataFrame, reason: str) -> list[tuple]:
    """Return rows for `compare`: which tokens and positions are active in the paper, and here.

    paper: `results.paper()`; tokens: `per_token`; positions: `by_position`; reason: why a difference is to be expected.
    """
    theirs = paper.set_index("metric")["value"]
    mean = positions["mean_active"]
    first, later = mean.iloc[0], mean.iloc[len(mean) // 2 :].mean()
    names = [token.strip() or repr(token) for token in tokens["token"]]
    found = f"{first:.3g} at the first position, {later:.3g} over the second half"
    falls = first == mean.max() and first > later
    return [
        ("lowest activity", theirs["lowest_nnz_tokens"], ", ".join(names[:6]), None, reason),
        ("highest activity", theirs["highest_nnz_tokens"], ", ".join(names[-6:]), None, reason),
        ("activity and position", theirs["position_trend"], found, falls, reason),
    ]


def model_findings(
    paper: pd.DataFrame,
    scale: pd.DataFrame,
    models: pd.DataFrame,
    decode: pd.DataFrame,
    layers: pd.DataFrame,
    dense_level: float = 911,
) -> list[tuple]:
    """Return rows for `compare`: the paper's gains of whole models, and ours.

    paper: `results.paper()`; scale: `scale_table`; models: `model_speedups`; decode: `decode_speedups`; layers:
    `layer_contributions` at the recommended level; each of the last three may be empty. dense_level: active neurons without
    L1, where "auto" must not lose. A gain agrees where it has the paper's sign; what was not measured is None or NaN.
    """
    why = "another GPU; the activity is imposed"
    rows = []
    for row in scale.itertuples():
        agrees = None if np.isnan(row.change) else bool(np.sign(row.change) == np.sign(row.paper_change))
        larger = row.quantity == "training memory" and row.paper_change > 0
        reason = "the paper's sparse run had a larger micro-batch" if larger else why
        rows.append((f"{row.model}, {row.quantity}: % over dense", row.paper_change, row.change, agrees, reason))
    theirs = paper.loc[paper["metric"] == "pearson_layer_nnz_vs_speedup", "value"].item()
    r = correlation(layers) if len(layers) else np.nan
    rows.append(("Pearson's r, a layer's activity and time saved", theirs, r, None if np.isnan(r) else r < -0.95, why))
    lost, gained, tuned = np.nan, np.nan, np.nan
    if len(models):
        near = models[(models["active"] > dense_level / 1.25) & (models["provider"] == "auto torch.compile")]
        lost = 100 * (near["speedup"].min() - 1)
    if len(decode):
        gained, tuned = (100 * (decode.loc[decode["tuned"] == kind, "speedup"].max() - 1) for kind in (False, True))
    rows.append(
        (f"forward with {dense_level:g} active: auto, % over dense", "slower", lost, None, "it has no such choice")
    )
    why = "the paper has no decoding"
    rows.append(("decoding: largest gain, % over dense", "–", gained, None, why))
    rows.append(("decoding, both sides tuned: largest gain, % over dense", "–", tuned, None, why))
    return rows


def forward_findings(paper: pd.DataFrame, table: pd.DataFrame, level: float, tokens: Sequence[int]) -> list[tuple]:
    """Return rows for `compare`: the paper's gains of a forward pass and those of `speedups` (one layer, one pattern).

    paper: `results.paper()`; level: the active neurons to compare at; tokens: the batches that count. What was not
    measured is None or NaN.
    """
    near = at_level(table, level)
    near = near[near["provider"].str.startswith("triton ") & near["tokens"].isin(tokens)]
    gain, saved = (
        paper.loc[paper["metric"] == metric, "value"] for metric in ("max_forward_speedup", "energy_per_token_change")
    )
    best, wins = near["speedup"].max(), None if near.empty else near["speedup"].max() > 1
    whole = "there a whole model on an H100, here the layer alone"
    return [
        (f"faster than dense at {level} active", True, wins, wins, "no path is faster here"),
        ("largest gain in speed, %", gain.item(), 100 * (best - 1), None, whole),
        ("largest change of energy a token, %", saved.min(), near["energy_change"].min(), None, whole),
    ]


def training_findings(paper: pd.DataFrame, table: pd.DataFrame, level: float) -> list[tuple]:
    """Return rows for `compare`: the paper's gains in training, and ours of one layer; `model_findings` has whole models.

    paper: `results.paper()`; table: `training_speedups` of one layer, or empty; level: the active neurons to compare at. What
    was not measured is None or NaN.
    """
    wins, best, held, crossing = None, np.nan, np.nan, np.nan
    if len(table):
        near = at_level(table, level)
        near = near[near["provider"].str.startswith("triton ")]
        wins, best, held = near["speedup"].max() > 1, 100 * (near["speedup"].max() - 1), near["held_share"].min() - 100
        crossing = crossovers(table)["crossover"].max()
    gain = paper.loc[paper["metric"] == "max_training_speedup", "value"].item()
    whole = "there a whole model on an H100, here the layer alone"
    return [
        (f"training is faster than dense at {level} active", True, wins, wins, "no path is faster here"),
        ("largest gain in training speed, %", gain, best, None, whole),
        ("least held for the backward pass, % over dense", "–", held, None, "the paper gives a model's peak"),
        ("training is faster than dense below, active neurons", "–", crossing, None, "the paper shows no number"),
    ]


def task_findings(paper: pd.DataFrame, table: pd.DataFrame, differences: pd.DataFrame) -> list[tuple]:
    """Return rows for `compare`: what Table 6 says, and `evaluations` with their `backend_differences`."""
    seven, printed = seven_tasks(table), paper_tasks(paper)
    theirs, ours = against_dense(printed), against_dense(by_level(seven))
    lettered = 100 * printed.loc[printed["task"] == "commonsense_qa", "accuracy"]
    asked = seven[seven["task"] == "commonsense_qa"]
    at_chance = bool((asked["verdict"] != "above chance").all()) if len(asked) else None
    shares = zip(100 * asked["accuracy"], 100 * asked["stderr"], asked["verdict"], strict=True)
    found = ", ".join(f"{share:.1f} ± {error:.1f}% ({verdict})" for share, error, verdict in shares) or "not measured"
    why = "not measured" if at_chance is None else "a model that is above chance"
    what = "CommonsenseQA with lettered choices: at chance, 20%"
    rows = [(what, f"{lettered.min():.1f} to {lettered.max():.1f}%", found, at_chance, why)]
    worst = f"{100 * theirs['difference'].min():+.1f} at the worst"
    for row in ours.itertuples():
        budget = "" if np.isnan(row.training_tokens) else f" after {row.training_tokens / 1e6:.3g} M tokens"
        what = f"mean accuracy of {row.parameters / 1e6:.3g} M parameters{budget} at L1 = {level_name(row.l1_coefficient)} over L1 = 0, points"
        change = f"{100 * row.difference:+.1f} ± {100 * row.stderr:.1f}"
        if not row.above_chance:
            rows.append((what, worst, change, None, "neither is above chance: there is nothing to lose"))
        else:
            agrees = row.difference >= -NEAR_CHANCE * row.stderr
            rows.append((what, worst, change, agrees, "more than two standard errors below dense"))
    if ours.empty:
        rows.append(("mean accuracy of sparse over dense, points", worst, "not measured", None, "no pair of one size"))
    for between, what in (("backend", "backends"), ("dtype", "types of numbers")):
        found = differences[differences["between"] == between]
        if len(found):
            what = f"largest difference between {what}, points, of {found['accuracies'].sum()} accuracies"
            rows.append((what, "–", 100 * found["difference"].max(), None, "ours"))
    return rows
