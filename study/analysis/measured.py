"""Quantities of measured rows, named for `claims.yaml` as in `trained`.

Speeds over dense are ratios where a name ends in `_times`, else changes in % of dense.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from study.analysis.quantized import DENSE_FP8_BY
from study.analysis.speed import BASELINE, at_level, correlation, crossovers, near_level
from study.analysis.tasks import MEAN
from study.analysis.trained import Quantities
from study.analysis.variants import mean_limit
from twell.measure import providers

SPARSE = [providers.UNION.name, providers.ROWWISE.name, providers.DECODE.name]
FORCED_AND_AUTO = providers.TRITON_COMPILED.name, providers.AUTO_COMPILED.name
STEP = providers.UNION_COMPILED.name
# A case of the layer alone: tokens, pattern, mode, active neurons, gated.
CASES = {
    "large": (131_072, "skewed", "stream", 29, True),
    "even": (131_072, "even", "stream", 29, True),
    "hundred": (131_072, "skewed", "stream", 100, True),
    "middle": (16_384, "skewed", "stream", 29, True),
    "small": (2048, "skewed", "graph", 29, True),
    "small_eager": (2048, "skewed", "stream", 29, True),
    "one": (1, "skewed", "graph", 29, True),
    "two": (2, "skewed", "graph", 29, True),
    "four": (4, "skewed", "graph", 29, True),
    "sixteen": (16, "skewed", "graph", 29, True),
    "sixty_four": (64, "skewed", "graph", 29, True),
    "ungated": (131_072, "skewed", "stream", 40, False),
}
# A case of its training step: tokens, pattern, active neurons, gated.
STEPS = {
    "even": (16_384, "even", 29, True),
    "middle": (16_384, "skewed", 29, True),
    "few": (16_384, "skewed", 10, True),
    "large": (65_536, "skewed", 60, True),
    "many": (16_384, "skewed", 197, True),
    "ungated": (16_384, "skewed", 29, False),
}
# A case of the layer in FP8: one of CASES, and other widths.
FP8_CASES = {name: (CASES[name], {}) for name in ("large", "middle", "hundred", "small", "one")}
FP8_CASES["wide"] = (
    (65_536, "skewed", "stream", 41, True),
    {"hidden_size": 3072, "intermediate_size": 8192},
)
WIDTHS = {True: (2048, 5632), False: (2048, 8192)}


def _case(table: pd.DataFrame, active: float, gated: bool, **equal: Any) -> pd.DataFrame:
    """Rows of `near_level`, of the paper's width unless `equal` says another."""
    width, neurons = WIDTHS[gated]
    usual = {"gated": gated, "hidden_size": width, "intermediate_size": neurons}
    for column, value in (usual | equal).items():
        table = table[table[column] == value]
    return near_level(table, active)


def layer_case(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of one of CASES."""
    tokens, pattern, mode, active, gated = CASES[name]
    return _case(table, active, gated, tokens=tokens, pattern=pattern, mode=mode)


def layer_speed(
    table: pd.DataFrame, auto: pd.DataFrame | None = None, rows: pd.DataFrame | None = None
) -> Quantities:
    """Return the speed of the layer alone over compiled dense, and up to which activity it gains.

    table: `speedups`; auto: `speedups` of data/bench/auto.csv, by default `table`; rows: those of
    data/bench/ffn.csv, all calls. Of each of CASES, NAME_times and NAME_path are of the fastest
    path. auto_shipped_times, auto_eager_times and auto_compiled_times: the lowest of auto in
    `table`, of eager and of compiled calls one after the other. A crossing is in active neurons.
    """
    result = {}
    for name in CASES:
        case = layer_case(table, name)
        case = case[case["provider"].isin(SPARSE)]
        if len(case):
            best = case.loc[case["speedup"].idxmax()]
            path = best["path"].replace("rowwise", "row-wise")
            result |= {f"{name}_times": best["speedup"], f"{name}_path": path}
    width, neurons = WIDTHS[True]
    table = table[table["gated"].astype(bool) & (table["hidden_size"] == width)]
    table = table[table["intermediate_size"] == neurons]
    table = table[table["pattern"].isin(["skewed", "even"])]  # ReLU without biases
    situations = {name: table[table["mode"] == name] for name in ("eager", "compiled")}
    shipped = table[~table["mode"].isin(situations)]
    of_auto = {"auto": shipped if auto is None or auto.empty else auto, "auto_shipped": shipped}
    of_auto |= {f"auto_{name}": some for name, some in situations.items()}
    for name, some in of_auto.items():
        times = some.loc[some["provider"] == providers.AUTO.name, "speedup"]
        result[f"{name}_times"] = times.min()
    at_29 = at_level(table[table["pattern"] == "skewed"], 29)
    large = at_29[at_29["provider"].isin(SPARSE) & (at_29["tokens"] >= 16_384)]
    result["gain"] = 100 * (large["speedup"].max() - 1)
    chosen = at_29[(at_29["provider"] == providers.AUTO.name) & (at_29["mode"] == "graph")]
    dense = chosen.loc[chosen["path"] == "dense", "tokens"].sort_values()
    result["auto_dense"] = (", ".join(map(str, dense)) or "none") if len(chosen) else None

    stream = crossovers(table[table["mode"] == "stream"])
    union = stream[(stream["provider"] == providers.UNION.name) & (stream["pattern"] == "skewed")]
    for name, tokens in (("large", 131_072), ("middle", 16_384)):
        result[f"{name}_crossing"] = union.loc[union["tokens"] == tokens, "crossover"].max()
    even = (stream["pattern"] == "even") & stream["provider"].isin(SPARSE)
    even = stream.loc[even, "crossover"]
    result |= {"even_least": even.min(), "even_most": even.max()}
    return result | (_calls(rows) if rows is not None and len(rows) else {})


def _calls(rows: pd.DataFrame) -> Quantities:
    """Of all calls of the first of CASES the speed-ups, sorted; and the energy in % of dense."""
    case = layer_case(rows, "large")
    calls = case.pivot_table(index="date", columns="provider", values=["p50", "energy"])
    result, sides = {}, (BASELINE, providers.UNION.name)
    time, energy = (
        [calls[column, side] for side in sides if (column, side) in calls]
        for column in ("p50", "energy")
    )
    if len(time) == 2:
        ratios = (time[0] / time[1]).dropna().sort_values()
        result["calls"] = ", ".join(f"{ratio:.2f}" for ratio in ratios) or None
        result["calls_spread"] = 100 * (ratios.max() / ratios.min() - 1)
    if len(energy) == 2:
        changes = 100 * (energy[1] / energy[0] - 1).dropna()
        result["large_energy"] = changes.iloc[-1] if len(changes) else np.nan
    return result


def layer_training(table: pd.DataFrame) -> Quantities:
    """Return the speed and memory of a training step of the layer, from `training_speedups`.

    Of each of STEPS, in the mode "stream": _union and _hybrid, speed-ups over compiled dense;
    _kept, bytes from forward to backward as a share of dense's. A crossing is in active neurons.
    """
    if len(table):
        table = table[table["mode"] == "stream"]
    if table.empty:
        return {}
    result = {}
    for name, (tokens, pattern, active, gated) in STEPS.items():
        case = _case(table, active, gated, tokens=tokens, pattern=pattern)
        rows = case.drop_duplicates("provider", keep="last").set_index("provider")
        for path in ("union", "hybrid"):
            provider = providers.Provider("triton", path).name
            if provider in rows.index:
                result[f"{name}_{path}"] = rows.loc[provider, "speedup"]
                result[f"{name}_{path}_kept"] = rows.loc[provider, "held_share"] / 100
    near = at_level(table, 29)
    near = near[near["provider"].map(providers.is_sparse).astype(bool)]
    result["gain"] = 100 * (near["speedup"].max() - 1)
    result["held"] = near["held_share"].min() - 100
    crossings = crossovers(table[(table["provider"] == providers.UNION.name) & table["gated"]])
    for pattern in ("skewed", "even"):
        alike = crossings.loc[crossings["pattern"] == pattern, "crossover"]
        result |= {f"{pattern}_crossing": alike.min(), f"{pattern}_crossing_most": alike.max()}
    return result


def _scale(scale: pd.DataFrame, rows: pd.DataFrame, kind: str, other: str) -> Quantities:
    """Changes of `scale_table` in "KIND speed" and "KIND OTHER": speed_MODEL and OTHER_MODEL.

    rows: those behind the table; active_MODEL: the activity of the row behind the speed.
    """
    result = {}
    for row in scale.itertuples():
        model = row.model.lower().replace(".", "_")
        if row.quantity == f"{kind} {other}":
            result[f"{other}_{model}"] = row.change
        if row.quantity == f"{kind} speed":
            result[f"speed_{model}"] = row.change
            if len(rows) and not np.isnan(row.change):
                same = rows[rows["model"].str.upper() == row.model.upper()]
                same = same[same["provider"] != BASELINE]
                distance = (100 * (same["speedup"] - 1) - row.change).abs()
                result[f"active_{model}"] = rows.loc[distance.idxmin(), "active"]
    return result


def models(
    scale: pd.DataFrame, rows: pd.DataFrame, decode: pd.DataFrame, layers: pd.DataFrame
) -> Quantities:
    """Return the speed of forward passes of whole models with imposed activity, and of decoding.

    scale: `scale_table`; rows: `model_speedups` of one batch; decode: `decode_speedups`; layers:
    `layer_contributions` at one level; each but the first may be empty. active_MODEL: active
    neurons of the level nearest to the paper's. The level of L1 = 0 has more than 800.
    """
    result = _scale(scale, rows, "forward", "energy")
    result["correlation"] = correlation(layers) if len(layers) else np.nan
    if len(rows):
        dense = rows[rows["active"] > 800].drop_duplicates("provider").set_index("provider")
        for name, provider in zip(("forced", "auto"), FORCED_AND_AUTO, strict=True):
            if provider in dense.index:
                result[name] = 100 * (dense.loc[provider, "speedup"] - 1)
                result["dense_active"] = dense.loc[provider, "active"]
        eager = rows[(rows["model"] == "2b") & (rows["active"] < 800)]
        times = eager.drop_duplicates("provider").pivot(index="date", columns="provider")["p50"]
        if {providers.DENSE_EAGER.name, providers.AUTO.name} <= set(times):
            ratio = times[providers.DENSE_EAGER.name] / times[providers.AUTO.name]
            result["eager_2b"] = 100 * (ratio.max() - 1)  # NaN but for the calls of both
    return result | (_decoding(decode) if len(decode) else {})


def _decoding(table: pd.DataFrame) -> Quantities:
    """Gains of decoding by the number of documents, untuned and tuned."""
    result = {}
    for name, some in (("decode", table[~table["tuned"]]), ("decode_tuned", table[table["tuned"]])):
        sparse, auto = (some[some["provider"] == provider] for provider in FORCED_AND_AUTO)
        for row in sparse.itertuples():
            result[f"{name}_{row.batch}"] = 100 * (row.speedup - 1)
            result[f"{name}_{row.batch}_active"] = row.active
        result |= {f"{name}_{row.batch}_path": row.path for row in auto.itertuples()}
    return result


def trained_models(rows: pd.DataFrame, layers: pd.DataFrame) -> Quantities:
    """Return forward passes of trained models, from `model_speedups` and `layer_contributions`.

    half_*: of the run flagship-half; small_*: of twell-6m, times that they take of dense;
    layer_error: the worst relative RMS of a feed-forward layer in any row in bf16.
    """
    if rows.empty:
        return {}
    in_bf16 = [providers.Provider.parse(name).precision is None for name in rows["provider"]]
    result = {"layer_error": rows.get("layer_rms", pd.Series(dtype=float))[in_bf16].max()}
    half = rows[(rows["model"] == "flagship-half") & (rows["provider"] == FORCED_AND_AUTO[1])]
    if len(half):
        first = half.iloc[0]
        result |= {"half": 100 * (first["speedup"] - 1), "half_active": first["active"]}
    small = rows[rows["model"] == "twell-6m"].set_index("provider")["speedup"]
    for name, provider in zip(("small_sparse", "small_auto"), FORCED_AND_AUTO, strict=True):
        result[name] = 1 / small.get(provider, np.nan)
    trained = layers[layers["model"] == "flagship-half"] if len(layers) else layers
    if len(trained):
        result |= {"trained_correlation": correlation(trained), "trained_layers": len(trained)}
    return result


def flattered(forward: pd.DataFrame, decode: pd.DataFrame) -> Quantities:
    """Return the gains of trained models beside imposed activity, from `beside_imposed`.

    By the sparse kernels with compiled layers, of the newest flagship (`flagship_`) and of the 99 M
    model (`recipe_`): a forward pass and decoding one document, in % over dense. _verdict: whether
    imposed activity gains more.
    """
    result = {}
    for name, table, where in (("forward", forward, "batch > 0"), ("decode", decode, "batch == 1")):
        if table.empty:
            continue
        table = table.query(f"{where} and provider == {FORCED_AND_AUTO[0]!r}")
        for prefix, model in (("flagship", "flagship-"), ("recipe", "85m-")):
            some = table[table["model"].str.startswith(model)]
            if len(some):
                row = some.iloc[-1]
                result |= {
                    f"{prefix}_{name}": 100 * (row["speedup"] - 1),
                    f"{prefix}_{name}_imposed": 100 * (row["imposed_speedup"] - 1),
                    f"{prefix}_{name}_low": 100 * (row["imposed_speedup_low"] - 1),
                    f"{prefix}_{name}_high": 100 * (row["imposed_speedup_high"] - 1),
                    f"{prefix}_{name}_verdict": row["verdict"],
                    f"{prefix}_{name}_active": row["active"],
                    f"{prefix}_{name}_model": f"{row['model']} on {row['device']}",
                }
    return result


def stepped(
    raced: Iterable[pd.DataFrame], table: pd.DataFrame, prefix: str, model: str
) -> Quantities:
    """Return the gain of a trained model's steps beside that of imposed activity, in % over dense.

    raced: for each seed `longer.race` of a dense and a sparse training, of which the second half
    counts; table: `step_speedups` with imposed activity, of which the rows of the model's
    configuration count. Names begin with the prefix; _limit is Student's t over the seeds,
    _least and _most are the ends.
    """
    table = table[table["model"] == model] if len(table) else table
    gains = [_step_gain(pair) for pair in raced if pair["run"].nunique() == 2]
    if table.empty or not gains:
        return {}
    row = table[table["provider"] == STEP].iloc[-1]
    return {
        f"{prefix}_step": np.mean(gains),
        f"{prefix}_step_limit": mean_limit(gains),
        f"{prefix}_step_least": min(gains),
        f"{prefix}_step_most": max(gains),
        f"{prefix}_step_runs": len(gains),
        f"{prefix}_step_imposed": 100 * (row["speedup"] - 1),
        f"{prefix}_step_active": row["active"],
        f"{prefix}_step_device": row["device"],
    }


def _step_gain(raced: pd.DataFrame) -> float:
    """Tokens/s of the sparse run over the dense one's in the second half, in %."""
    late = raced[raced["tokens"] >= raced["tokens"].max() / 2].groupby("run", sort=False)
    spans = late[["tokens", "seconds"]].agg(lambda values: values.iloc[-1] - values.iloc[0])
    speeds = spans["tokens"] / spans["seconds"]
    of_dense = raced.groupby("run", sort=False)["backend"].first() == "dense"
    return 100 * (speeds[~of_dense].item() / speeds[of_dense].item() - 1)


def steps(scale: pd.DataFrame, table: pd.DataFrame) -> Quantities:
    """Return the speed and peak memory of optimiser steps of whole models with imposed activity.

    scale: `scale_table`; table: `step_speedups`, or empty. again_*: with checkpointed activations;
    largest_*: sequences of the largest micro-batch of 1.5B.
    """
    result = _scale(scale, table, "training", "memory")
    if table.empty:
        return result
    forced = table[(table["active"] > 800) & (table["provider"] == STEP)]
    if len(forced):
        result["forced"] = 100 * (forced["speedup"].iloc[0] - 1)
        result["forced_active"] = forced["active"].iloc[0]
    table = table.assign(largest=table.get("largest", np.nan))
    largest = table[(table["model"] == "1.5b") & table["largest"].notna()]
    checkpointed = largest["checkpoint_activations"].astype(bool)
    for name, some in (
        ("largest", largest[~checkpointed]),
        ("again_largest", largest[checkpointed]),
    ):
        numbers = some.set_index("provider")["largest"]
        for side, provider in (("sparse", STEP), ("dense", BASELINE)):
            result[f"{name}_{side}"] = numbers.get(provider, np.nan)
    again = largest[checkpointed & (largest["provider"] == STEP)]
    result["again"] = 100 * (again["speedup"].max() - 1)
    small = table[table["model"] == "171m"].set_index("provider")["speedup"]
    eager = providers.DENSE_EAGER.name, providers.UNION.name
    if {STEP, *eager} <= set(small.index):
        result["small"] = 100 * (small[STEP] - 1)
        result["small_eager"] = 100 * (small[eager[1]] / small[eager[0]] - 1)
    return result


# --- FP8 ------------------------------------------------------------------------------------------


def fp8(
    layers: pd.DataFrame,
    forward: pd.DataFrame,
    decode: pd.DataFrame,
    quality: pd.DataFrame,
    evaluated: pd.DataFrame,
) -> Quantities:
    """Return the speed of FP8 over bf16 and over dense FP8, and what it costs in quality.

    layers, forward, decode: `fastest` of layers, of 2B's forward passes at one batch, and of 2B's
    decoding, untuned; quality: `fp8_quality`; evaluated: `evaluations`. All may be empty. Of each
    of FP8_CASES, NAME_dense, NAME_sparse and NAME_over: dense FP8 and sparse FP8 over dense bf16,
    and sparse over dense FP8; of models the same as changes in %, with energy_. What was not
    measured is NaN.
    """
    result: Quantities = {}
    for name, ((tokens, pattern, mode, active, gated), shape) in FP8_CASES.items():
        some = layers
        if len(some):
            some = _case(some, active, gated, tokens=tokens, pattern=pattern, mode=mode, **shape)
        dense, sparse = _fp8_sides(some)
        by = DENSE_FP8_BY.get(providers.Provider.parse(dense["provider"]).precision, "")
        path = (sparse["path"] or "").replace("rowwise", "row-wise")
        result |= {f"{name}_dense": dense["speedup"], f"{name}_sparse": sparse["speedup"]}
        result |= {f"{name}_over": sparse["over_fp8"], f"{name}_active": sparse["active"]}
        result |= {f"{name}_by": by or None, f"{name}_path": path or None}
    for name, kind in (("ffn", "FP8"), ("all", "FP8 all")):
        result |= _fp8_changes(forward, name, kind)
    for batch in (1, 8, 32, 128):
        some = decode[decode["batch"] == batch] if len(decode) else decode
        result |= _fp8_changes(some, f"decode_{batch}", "FP8")
    return result | _fp8_costs(quality) | _fp8_tasks(evaluated)


def _fp8_sides(table: pd.DataFrame, kind: str = "FP8") -> tuple[dict, dict]:
    """The rows of dense and sparse FP8 of one case, or of dense bf16 and NaN in their place."""
    empty = {"provider": BASELINE, "path": None} | dict.fromkeys(
        ["speedup", "over_fp8", "active", "energy_change", "energy_over_fp8"], np.nan
    )
    sides = []
    for side in ("dense", "sparse"):
        rows = table[table["side"] == f"{side} {kind}"] if len(table) else table
        sides.append(rows.iloc[-1].to_dict() if len(rows) else empty)
    return sides[0], sides[1]


def _fp8_changes(table: pd.DataFrame, name: str, kind: str) -> Quantities:
    """Changes of one model's speed and energy in %."""
    dense, sparse = _fp8_sides(table, kind)
    result = {f"{name}_dense": 100 * (dense["speedup"] - 1)}
    result |= {f"{name}_sparse": 100 * (sparse["speedup"] - 1), f"{name}_active": sparse["active"]}
    result |= {f"{name}_over": 100 * (sparse["over_fp8"] - 1)}
    result |= {f"energy_{name}": sparse["energy_change"]}
    return result | {f"energy_{name}_over": sparse["energy_over_fp8"]}


def _fp8_costs(quality: pd.DataFrame) -> Quantities:
    """Changes of cross-entropy in nats, with the ends of their 95% intervals.

    shipped_*: of twell-6m; first_*, second_*, third_*: of models above 50 M parameters, from the
    most active. Of each side_ _dense and _sparse, and _over: sparse FP8 over dense FP8.
    """
    names = ["shipped", "first", "second", "third"]
    columns = {
        f"{side}{end}" for side in ("dense", "sparse", "over") for end in ("", "_low", "_high")
    }
    columns |= {f"all_{column}" for column in columns} | {"model", "active", "tokens"}
    result = {f"{name}_{column}": np.nan for name in names for column in columns}
    if quality.empty:
        return result
    large = quality.loc[quality["parameters"] > 5e7, "model"].drop_duplicates().tolist()
    for name, model in zip(names, ["twell-6m", *large], strict=False):
        rows = quality[quality["model"] == model].set_index("side")
        for prefix, kind in (("", "FP8"), ("all_", "FP8 all")):
            for side, of, column in (
                ("dense", "dense", ""), ("sparse", "sparse", ""), ("over", "sparse", "dense_"),
            ):  # fmt: skip
                if f"{of} {kind}" in rows.index:
                    row = rows.loc[f"{of} {kind}"]
                    for end, number in (("", "difference"), ("_low", "low"), ("_high", "high")):
                        result[f"{name}_{prefix}{side}{end}"] = row[f"{column}{number}"]
        if len(rows):
            result |= {f"{name}_{column}": rows[column].iloc[0] for column in ("active", "tokens")}
            result[f"{name}_model"] = model
    return result


def _fp8_tasks(evaluated: pd.DataFrame) -> Quantities:
    """Changes of the mean accuracy of seven tasks over dense bf16, in points, over the models."""
    names = ["least", "most", "error", "models"]
    result = {f"tasks_{side}_{name}": np.nan for side in ("dense", "sparse") for name in names}
    if evaluated.empty:
        return result
    means = evaluated[(evaluated["task"] == MEAN) & (evaluated["metric"] == "acc")]
    accuracy = means.pivot_table(index="model", columns=["backend", "dtype"], values="accuracy")
    for side, backend in (("dense", "dense"), ("sparse", "triton")):
        if {("dense", "bfloat16"), (backend, providers.FP8)} <= set(accuracy):
            fp8 = accuracy[backend, providers.FP8]
            change = 100 * (fp8 - accuracy["dense", "bfloat16"]).dropna()
            error = means.loc[means["dtype"] == providers.FP8, "stderr"].max()
            numbers = change.min(), change.max(), 100 * error, len(change)
            pairs = zip(names, numbers, strict=True)
            result |= {f"tasks_{side}_{name}": number for name, number in pairs}
    return result
