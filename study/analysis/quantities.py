"""The numbers behind the claims: by subject of `claims.yaml` a function from tables to a flat dict.

The functions of formats, traces and evaluations are here, the others in `trained` and `measured`,
which say how quantities are named. A notebook gives the functions its own tables; `recorded` gives
them those of data/.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import pandas as pd

from study.analysis import (
    activity,
    agreement,
    items,
    longer,
    quantized,
    relufied,
    runs,
    speed,
    variants,
)
from study.analysis import tasks as accuracy
from study.analysis.bench import Bench
from study.analysis.measured import (
    flattered,
    fp8,
    layer_speed,
    layer_training,
    models,
    stepped,
    steps,
    trained_models,
)
from study.analysis.trained import (
    LOSS,
    Quantities,
    choices,
    devices,
    pretrained,
    single,
    sizes,
    slowed,
    sweep,
    training,
)
from twell import results
from twell.tables import NEAR_CHANCE, evaluations, level_name, list_runs, logged_layers


def formats(packed: Any, exact: bool, fuzz: pd.DataFrame | None = None) -> Quantities:
    """Return the numbers of a tile of TwELL, and of random cases of the kernels.

    packed: a `twell.PackedTwELL`; exact: whether unpacking gave the same bits; fuzz: rows of
    data/bench/fuzz.csv, of which the newest commit counts. Left out are calls of a single case,
    which repeats one, and of a single path.
    Errors are relative RMS against fp64, of bf16.
    """
    result = {"slots": packed.values.shape[2], "words": packed.words.shape[1]}
    result["kept"] = "exact" if exact else "not exact"
    if fuzz is not None and len(fuzz):
        single_path = fuzz["command"].str.contains("--path", regex=False)
        fuzz = fuzz[(fuzz["cases"] > 1) & ~single_path].sort_values("date", kind="stable")
        backward = fuzz["path"].str.startswith("training")
        for name, rows in (("forward", fuzz[~backward]), ("backward", fuzz[backward])):
            rows = rows[rows["commit"] == rows["commit"].iloc[-1]]
            calls = rows.drop_duplicates(["command", "date"])  # whose rows all have its numbers
            result |= {f"{name}_{column}": calls[column].sum() for column in ("cases", "failed")}
            errors = rows.loc[rows["dtype"] == "bfloat16", "worst_relative_rms"]
            result[f"{name}_error"] = errors.max()
    return result


# --- activity ------------------------------------------------------------------------------------


def layers(
    sparse: pd.DataFrame,
    dense: pd.DataFrame,
    sparsest: pd.DataFrame,
    overflow: pd.DataFrame,
    prefix: str = "",
) -> Quantities:
    """Return where in the model activity is.

    sparse, dense, sparsest: `per_layer` or `logged_layers` at the recommended level, without L1,
    and at a level beyond use; overflow: `tile_overflow` at the recommended level; prefix stands
    before every name. Layers count from
    0; _depth is a layer's place from 0 (first) to 1 (last).
    """
    last = len(sparse) - 1
    least = sparse.nsmallest(3, "mean")["layer"].astype(int).tolist()
    tiles = overflow[overflow["compression"] == 8]
    most = tiles["overflow_rows"].max()
    result = {
        "last": last,
        "ratio_least": sparse["max_over_mean"].min(),
        "ratio_most": sparse["max_over_mean"].max(),
        "overflow": 100 * most,
        "overflow_layer": tiles.loc[tiles["overflow_rows"] == most, "layer"].max(),
        "least": ", ".join(map(str, sorted(least))),
        "least_layer": least[0],
        "first_two_least": set(least[:2]) == {0, 1},
        "most_active": sparse["mean"].max(),
    }
    for name, table in (("peak", sparse), ("dense_peak", dense)):
        if len(table):
            peak = int(table.set_index("layer")["mean"].idxmax())
            result |= {name: peak, f"{name}_depth": peak / max(last, 1)}
    if len(sparsest) > 1:
        first, second = sorted(sparsest.nlargest(2, "mean")["layer"].astype(int))
        result |= {"sparsest_peaks": f"{first}, {second}", "sparsest_at_last": second == last}
        result["sparsest_first_depth"] = first / max(last, 1)
    return {f"{prefix}{name}": value for name, value in result.items()}


def shared_findings(table: pd.DataFrame, setting: str, at_level: str) -> Quantities:
    """Return FINDING_holds and FINDING_models of the seeds, see `agreement.groups`.

    With the prefix `level_` of the models at that level, with `all_` of every model; each group has
    `settings` too.
    """
    result = {}
    for name, some in agreement.groups(table, setting, at_level).items():
        prefix = "" if name == "seeds" else f"{name}_"
        result[f"{prefix}settings"] = some["setting"].nunique()
        for row in agreement.shared(some).to_dict("records"):
            finding = f"{prefix}{row['finding']}"
            result |= {f"{finding}_holds": row["holds"], f"{finding}_models": row["models"]}
    return result


def raced(race: pd.DataFrame, seeds: pd.DataFrame) -> Quantities:
    """Return the times that two trainings take to a loss, from `longer.race`; first the slower one.

    seeds: `choices`, for the noise. Minutes to the faster one's last loss (race_loss) are
    race_first and race_second, and early_first and early_second to EARLY nats. Where the slower
    one's loss differs by noise (race_change_limit, in %), race_first is from race_soonest to
    race_latest. race_change: the faster one's last loss over the slower one's, in %, and
    race_train_change on the training text.
    """
    ends, early = longer.reached(race), longer.reached(race, EARLY)
    if len(ends) < 2:
        return {}
    first, last = ends.iloc[0], ends.iloc[-1]
    limit = variants.noise_limit(seeds, LOSS, 1, 1)
    slower = race[race["run"] == first["run"]]
    noisy = [
        longer.reached(slower, first["cross_entropy"] * (1 + sign * limit / 100))["seconds"].item()
        for sign in (1, -1)
    ]
    sides = {"first": first, "second": last}
    return {
        "race_loss": first["cross_entropy"],
        "race_change": 100 * (last["last"] / first["last"] - 1),
        "race_change_limit": limit,
        "race_train_change": 100 * (last["train_last"] / first["train_last"] - 1),
        "race_soonest": noisy[0] / 60,
        "race_latest": noisy[1] / 60,
        "early_loss": EARLY,
        "early_first": early["seconds"].iloc[0] / 60,
        "early_second": early["seconds"].iloc[-1] / 60,
        **{f"race_{side}": row["seconds"] / 60 for side, row in sides.items()},
        **{f"race_{side}_tokens": row["tokens"] / 1e6 for side, row in sides.items()},
        **{f"race_{side}_gb": row["peak_memory"] / 1e9 for side, row in sides.items()},
        **{
            f"race_{side}_name": f"{row['backend']}, L1 = {level_name(row['l1_coefficient'])}"
            for side, row in sides.items()
        },
    }


def trended(table: pd.DataFrame, level: float, prefix: str = "trend") -> Quantities:
    """Return a level's row of `longer.trend` as trend_NAME, tokens in millions.

    prefix stands before every name.
    """
    result = {}
    for row in table[table["l1_coefficient"] == level].to_dict("records"):
        result = {f"{prefix}_{name}": value for name, value in row.items()}
        result |= {f"{prefix}_{name}": row[name] / 1e6 for name in ("first", "last")}
    return result


def paired(table: pd.DataFrame) -> Quantities:
    """Return the numbers of `items.paired_runs` by task, and how many tasks sparse models lose."""
    result = {}
    for row in table.to_dict("records"):
        result |= {f"{row['task']}_{name}": row[name] for name in row if name != "task"}
    asked = table[table["above_chance"].astype(bool)] if len(table) else table
    if len(asked):
        lost = asked["verdict"] == "less"
        result |= {"paired_tasks": len(asked), "paired_lost": int(lost.sum())}
        result |= {"paired_runs": int(asked[["runs", "dense_runs"]].to_numpy().min())}
        result["paired_settled"] = not (asked["verdict"] == "one seed").any()
        unseen = asked["limit"] - asked["difference"]  # points of loss that are not excluded
        result |= {"paired_unseen_least": unseen.min(), "paired_unseen_most": unseen.max()}
    return result


def _word(token: str) -> str:
    """A token without its spaces; quoted where nothing else is in it."""
    return token.strip() or repr(token)


def tokens(table: pd.DataFrame, positions: pd.DataFrame, prefix: str = "") -> Quantities:
    """Return which tokens and positions are active, from `per_token` and `by_position`.

    prefix stands before every name.
    """
    names = table["token"].map(_word).tolist()
    mean = positions["mean_active"]
    first, later = mean.iloc[0], mean.iloc[len(mean) // 2 :].mean()
    result = {
        "first": first,
        "later": later,
        "first_is_most": first == mean.max() and first > later,
        "lowest": ", ".join(names[:6]) or None,
        "highest": ", ".join(names[-6:]) or None,
    }
    return {f"{prefix}{name}": value for name, value in result.items()}


def neurons(
    correlation: pd.DataFrame,
    specific: pd.DataFrame | None = None,
    cost: pd.DataFrame | None = None,
) -> Quantities:
    """Return numbers of single neurons.

    correlation: `surprise_correlation`; specific: `specific`; cost: `trace.silenced_loss`.
    """
    overall = correlation[(correlation["layer"] == -1) & (correlation["of"] == "surprise")]
    result = {}
    if len(overall):
        row = overall.iloc[0]
        result |= {"rank": row["spearman"], "rank_low": row["low"], "rank_high": row["high"]}
    if specific is not None and len(specific):
        row = specific.iloc[0]
        result |= {"layer": int(row["layer"]), "neuron": int(row["neuron"])}
        result |= {"token": _word(row["token"]), "phi": row["phi"]}
    if cost is not None and len(cost):
        result["cost"] = cost["loss_change"].max()
    return result


# --- tasks ---------------------------------------------------------------------------------------


def tasks(table: pd.DataFrame, differences: pd.DataFrame) -> Quantities:
    """Return accuracies of downstream tasks, from `evaluations` and their `backend_differences`.

    Accuracies in %, differences in points. `pairs` are sparse models beside the dense one of their
    size and tokens; of `pairs_above` one model is above chance; of these, `pairs_lost` are more
    than two standard errors below dense. The list of means is of the size with the most levels.
    """
    result = {}
    seven = accuracy.seven_tasks(table)
    pairs = accuracy.against_dense(accuracy.by_level(seven))
    if len(pairs):
        above = pairs[pairs["above_chance"].astype(bool)]
        lost = above["difference"] < -NEAR_CHANCE * above["stderr"]
        worst = pairs.loc[pairs["difference"].idxmin()]
        result |= {"pairs": len(pairs), "pairs_above": len(above), "pairs_lost": lost.sum()}
        result |= {"worst": 100 * worst["difference"], "worst_error": 100 * worst["stderr"]}
    asked = seven[seven["task"] == "commonsense_qa"]
    if len(asked):
        result |= {"lettered_least": 100 * asked["accuracy"].min()}
        result |= {"lettered_most": 100 * asked["accuracy"].max()}
        result["lettered_above"] = (asked["verdict"] == "above chance").sum()
    result |= _by_level(table, seven)
    for between in ("backend", "dtype"):
        rows = differences[differences["between"] == between]
        if len(rows):
            result[f"{between}_difference"] = 100 * rows["difference"].max()
            result[f"{between}_accuracies"] = rows["accuracies"].sum()
    return result


def _by_level(table: pd.DataFrame, seven: pd.DataFrame) -> Quantities:
    """Means of the seven tasks and of continuations, of the size with the most levels."""
    means = accuracy.several_levels(accuracy.by_level(seven))
    means = means[means["task"] == accuracy.MEAN]
    if means.empty:
        return {}
    size = means[accuracy.SIZE].iloc[-1]
    means = means[(means[accuracy.SIZE] == size).all(axis=1)]
    same = (table[accuracy.SIZE] == size).all(axis=1)
    same &= (table["dtype"] == "float32") & (table["backend"] == "dense")
    plain = table[same & (table["metric"] == "acc")]
    held_out = plain[plain["task"] == "held_out_continuation"].sort_values("l1_coefficient")
    result = {"task_levels": ", ".join(means["l1_coefficient"].map(level_name))}
    for name, prefix, rows in (("means", "", means), ("continued", "continued_", held_out)):
        if len(rows):
            result[name] = ", ".join(f"{100 * value:.1f}" for value in rows["accuracy"])
            result[f"{name}_error"] = 100 * rows["stderr"].max()
            result[f"{prefix}chance"] = 100 * rows["chance"].iloc[0]
    above = plain[plain["task"].isin(seven["task"]) & (plain["task"] != accuracy.MEAN)]
    above = (above["verdict"] == "above chance").groupby(above["task"]).all()
    result["tasks_above"] = ", ".join(above.index[above]) or "none"
    return result


# --- data/ ----------------------------------------------------------------------------------------

Runs = tuple[pd.DataFrame, pd.DataFrame]  # configurations and logs, as `results.load_runs`
SWEEP, LONGER, BY_SIZE = "85m-50m-*", "85m-100m-*", "depth-* 85m-100m-l1-*"
BUDGETS, LEVEL, LOWER = "85m-*m-l1-*", 6e-4, 1.5e-4  # LEVEL stands for the paper's
FLAGSHIP = "flagship-dense flagship-triton"
RACE = "flagship-300m-l1-0 flagship-300m-l1-6e-4"  # on four GPUs, by one code for all capacities
STEPS = {  # configuration, and a dense and a sparse training on one GPU each
    "flagship": ("0.5b", "flagship-200m-l1-0 flagship-200m-l1-6e-4"),
    "recipe": ("85m", "step-l1-6e-4-*"),
}
EARLY = 3.3  # nats, which the race passes in half of its time
PAPER_LAST_LAYER = 27  # of the 1.5B model, counted from 0
SETTING = "85m-50m-l1-6e-4"  # its runs differ by seed
# Trainings at the level that stands for the paper's, each with another text order, size or length.
AT_LEVEL = "85m-*m-l1-6e-4-seed-* depth-*-l1-6e-4-seed-* 171m-30m-1-gpu flagship-half "
AT_LEVEL += "flagship-triton flagship-*m-l1-6e-4"
ASKED = "85m-100m-l1-0-seed-*", "85m-100m-l1-6e-4-seed-*"  # dense and sparse, on the same items
NO_SEEDS = "fp8-* *-reinit-* *-warmup-* *-silu-* *-nongated-*"  # evaluated, of other choices
BENCH = "ffn training model train_step model_layers decode auto quality fuzz"  # files of rows
# Of one pretrained model; those of worse learning rates, and of a lighter first L1, are left out.
STUDENTS = "relufy-* again-* fitted-* hidden-* unfitted-* rate-5e-4-*"
PAIRS = {  # one training on one GPU and on two, and the same with four times the tokens a step
    "devices": "171m-30m-*",
    "larger": "171m-40m-*",
}


def recorded(root: str | Path) -> dict[str, Quantities]:
    """Return the quantities of every subject from data/ of a repository, by subject.

    Raises FileNotFoundError where data/ is not whole.
    """
    data = Path(root) / "data"
    every, log = results.load_runs(data / "runs")
    evaluated = evaluations(results.load_evaluations(data / "eval"))
    bench = Bench(data / "bench", [f"{name}.csv" for name in BENCH.split()])
    result = {"formats": _formats(bench)} | _runs(every, log)
    result |= _speed(bench, evaluated) | _traces(data, log, evaluated)
    imposed = Bench(data / "bench" / "trained").rows("train_step.csv", speed.step_speedups)
    for prefix, (model, pattern) in STEPS.items():
        alone, of_alone = _fitting(every, log, pattern)
        raced_alone = [longer.race(pair, of_alone) for _, pair in alone.groupby("seed")]
        if found := stepped(raced_alone, imposed, prefix, model):
            devices = alone.drop_duplicates("seed")["device"].value_counts()
            seeds = ", ".join(f"{number} on {device}" for device, number in devices.items())
            result["models"] |= found | {f"{prefix}_step_seeds": seeds}
    shared = _shared(data, every, log)
    result["layers"] |= shared
    result["tokens"] |= shared
    asked = results.load_kept(data / "eval", ".csv.xz")
    names = [fnmatch.filter(asked["run"].unique(), pattern) for pattern in ASKED]
    result["tasks"] |= paired(items.paired_runs(asked, *names))
    students = _fitting(every, log, STUDENTS)
    pairs = relufied.relufied_pairs(students[0], asked)
    result["pretrained"] = pretrained(relufied.relufied_runs(*students), pairs, asked)
    return result


def _formats(bench: Bench) -> Quantities:
    """Of a small tensor with full, empty and overflowing rows, and of all fuzz cases."""
    import torch

    from twell.sparse.formats import PackedTwELL

    dense = torch.zeros(4, 5632, dtype=torch.bfloat16)
    dense[0], dense[1, ::100], dense[2, :40] = 1, 2, 3
    packed = PackedTwELL.pack(dense, 256, 8)
    return formats(packed, torch.equal(packed.unpack(), dense), bench.rows("fuzz.csv"))


def _fitting(every: pd.DataFrame, log: pd.DataFrame, pattern: str) -> Runs:
    """The runs whose name fits one of several patterns, and their log."""
    some = every[runs.fits(every["run"], pattern)]
    of_some = log[log["run"].isin(some["run"])].reset_index(drop=True)
    return some.dropna(axis=1, how="all").reset_index(drop=True), of_some


def _runs(every: pd.DataFrame, log: pd.DataFrame) -> dict[str, Quantities]:
    family, family_log = _fitting(every, log, SWEEP)
    recipe = family[runs.choice(family) == "recipe"]
    table = runs.levels(runs.sweep(recipe, family_log))
    on_more = runs.sweep(*_fitting(every, log, LONGER))
    chosen = variants.choices(family, family_log)
    active = runs.training_curves(recipe, family_log, "active_mean")
    by_size = variants.sizes(*_fitting(every, log, BY_SIZE))

    pair = _fitting(every, log, FLAGSHIP)
    flagships, curves = variants.computed_otherwise(*pair), variants.computed_curves(*pair)
    sparse_log = log[log["run"] == "flagship-triton"]
    whole = training(flagships, curves, sparse_log)
    for name, pattern in PAIRS.items():
        whole |= devices(*variants.computed_by_seed(*_fitting(every, log, pattern)), prefix=name)
    whole |= raced(longer.race(*_fitting(every, log, RACE)), chosen)
    whole |= slowed(log[log["run"] == RACE.split()[1]])
    trend = longer.trend(*_fitting(every, log, BUDGETS))
    trends = trended(trend, LEVEL) | trended(trend, LOWER, "lower_trend")
    swept = sweep(table, active, chosen, on_more) | trends
    return {
        "sweep": swept | single(list_runs(every, log)),
        "choices": choices(chosen),
        "sizes": sizes(by_size, chosen),
        "training": whole,
    }


def _shared(data: Path, every: pd.DataFrame, log: pd.DataFrame) -> Quantities:
    """In how many models the findings hold; the peak is of the paper's model at L1 = 2e-5."""
    (peak,) = results.paper().query("metric == 'peak_layer' and l1 == 2e-5")["value"]
    kept = results.load_kept(data / "traces", ".csv")
    table = agreement.findings(every, log, kept, float(peak.strip("~")) / PAPER_LAST_LAYER)
    return shared_findings(table, SETTING, AT_LEVEL)


def _speed(bench: Bench, evaluated: pd.DataFrame) -> dict[str, Quantities]:
    rows, training_rows = bench.rows("ffn.csv"), bench.rows("training.csv")
    by_tokens = speed.model_speedups(bench.rows("model.csv"))
    by_step = speed.step_speedups(bench.rows("train_step.csv"))
    imposed = by_tokens.query("profile == 'paper' and batch == 64 and context == 2048")
    plain = by_step.query("profile == 'paper' and micro_batch == 16 and not checkpoint_activations")
    scale = speed.scale_table(results.paper(), imposed, plain)
    every_layer = speed.layer_contributions(bench.rows("model_layers.csv"))
    of_middle = every_layer.query("profile == 'paper' and model == '1.5b'")
    decode = speed.decode_speedups(bench.rows("decode.csv")).query(
        "context == 512 and mode == 'graph'"
    )
    trained = Bench(bench.folder / "trained")  # of a device of their own
    sides = (
        trained.rows("model.csv", speed.model_speedups),
        trained.rows("decode.csv", speed.decode_speedups),
    )
    auto = speed.speedups(bench.rows("auto.csv"))
    whole = models(scale, imposed, decode, speed.layers_at(of_middle, 29))
    layers = speed.speedups(rows)
    tables = (
        quantized.fastest(table)
        for table in (layers, imposed.query("model == '2b'"), decode.query("not tuned"))
    )
    cost = quantized.fp8_quality(bench.rows("quality.csv"))
    return {
        "layer_speed": layer_speed(layers, auto, rows),
        "fp8": fp8(*tables, cost, evaluated),
        "layer_training": layer_training(speed.training_speedups(training_rows)),
        "models": whole
        | trained_models(by_tokens, every_layer)
        | flattered(*map(speed.beside_imposed, sides)),
        "steps": steps(scale, by_step),
    }


def _traces(data: Path, log: pd.DataFrame, evaluated: pd.DataFrame) -> dict[str, Quantities]:
    from twell.trace import Aggregate, Trace

    logs = {}
    for level in ("0", "5e-3"):
        logs[level] = logged_layers(log[log["run"] == f"85m-50m-l1-{level}-seed-0"], 2112)
    where, which = {}, {}
    for prefix, name in (("", "85m-50m-l1-6e-4"), ("flagship_", "flagship")):
        counted = Aggregate.load(data / "traces" / f"{name}-aggregate.npz")
        table, tiles = activity.per_layer(counted), activity.tile_overflow(counted)
        beyond = (logs["0"], logs["5e-3"]) if not prefix else (table[:0], table[:0])
        where |= layers(table, *beyond, tiles, prefix)
        by_token = activity.per_token(counted, min_count=16)
        which |= tokens(by_token, activity.by_position(counted), prefix)
    passage = Trace.load(data / "traces" / "flagship-passage.npz")
    correlation = activity.surprise_correlation(passage)
    of_recipe = evaluated[~runs.fits(evaluated["model"], NO_SEEDS)]
    of_tasks = tasks(of_recipe, accuracy.backend_differences(evaluated))
    return {"layers": where, "tokens": which, "neurons": neurons(correlation), "tasks": of_tasks}
