"""Tables of measured rows (data/bench): the speed and energy of a layer, of training steps and of whole models over dense.

Every ratio is taken within one case and one call. Times are in ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd

from twell.analysis.runs import MIN_LAYER_ACTIVE
from twell.measure import providers
from twell.sparse.calibration import crossing

BASELINE = providers.DENSE_COMPILED.name  # speed-ups are over it
# What makes two measured rows the same case, together with `active`; rows of kernels have no mode and weight_sets.
CASE = [
    "tokens",
    "hidden_size",
    "intermediate_size",
    "gated",
    "dtype",
    "pattern",
    "device",
    "mode",
    "weight_sets",
]
STEP_CASE = "model num_layers hidden_size intermediate_size num_heads vocab_size gated context micro_batch".split()
STEP_CASE += ["tokens", "precision", "checkpoint_activations", "profile", "device"]
MODEL_CASE = "model num_layers hidden_size intermediate_size num_heads vocab_size gated dtype profile sdpa".split()
MODEL_CASE += ["batch", "context", "tokens", "device"]
CALL = ["commit", "command", "date"]  # a ratio is only taken within one call: absolute times drift
WRITTEN_BY = {
    "training.csv": "twell measure ffn --backward",
    "train_step.csv": "twell measure train-step",
}
WRITTEN_BY |= dict.fromkeys(
    ("model.csv", "model_layers.csv", "model_parts.csv", "decode.csv"), "twell measure model"
)
SAME_ACTIVE = 0.01  # the same seed gives the same activity but for rounding; levels of a grid are further apart


def _case_of(rows: pd.DataFrame) -> list[str]:
    return [column for column in CASE if column in rows]


def _check_rows(
    rows: pd.DataFrame, file: str, columns: Sequence[str], or_empty: Sequence[str] = ()
) -> None:
    missing = [column for column in (*columns, *or_empty) if column not in rows]
    if missing:
        command = WRITTEN_BY.get(file, "twell measure ffn")
        raise ValueError(
            f"rows of {file} need the columns {', '.join(missing)}; `{command}` writes such rows"
        )
    if rows.empty:
        raise ValueError(f"{file} has no row")
    empty = [column for column in columns if rows[column].isna().any()]
    if empty:
        raise ValueError(f"{file} has empty cells in {', '.join(empty)}, which every row needs")


def _newest(rows: pd.DataFrame, case: list[str]) -> pd.DataFrame:
    """Of each case, with `active` the same within SAME_ACTIVE, the rows of the newest date."""
    ordered = rows.sort_values("active", kind="stable")
    steps = ordered.groupby(case)["active"].transform(
        lambda active: (active.diff() > SAME_ACTIVE * active).cumsum()
    )
    newest = ordered.groupby([*case, steps.rename("level")])["date"].transform("max")
    return ordered[ordered["date"] == newest].sort_index()


def _beside_dense(
    rows: pd.DataFrame, file: str, case: list[str], compared: Sequence[str]
) -> pd.DataFrame:
    """Rows of the newest call of each case, each with `compared` of dense torch.compile as NAME_dense, and its speed-up."""
    _check_rows(
        rows,
        file,
        [*case, *CALL, "active", "provider", "p50"],
        [name for name in compared if name != "p50"],
    )
    wrong = rows[rows["p50"] <= 0]
    if len(wrong):
        first = wrong.iloc[0]
        raise ValueError(
            f"p50 of {first['provider']} is {first['p50']:g} ms on {first['date']}; a time is above 0"
        )
    call = [*case, *CALL, "active"]
    rows = rows.drop_duplicates([*call, "provider"], keep="last")
    dense = rows.loc[rows["provider"] == BASELINE, [*call, *compared]]
    table = rows.merge(dense, on=call, how="left", suffixes=("", "_dense"))
    alone = table["p50_dense"].isna()
    if alone.any():
        first = table[alone].iloc[0]
        said = f"{alone.sum()} of {len(table)} rows have no {BASELINE} of the same case and call beside them"
        said += f", the first: {first['provider']} at {first['tokens']} tokens on {first['date']}"
        if alone.all():
            raise ValueError(said)
        warnings.warn(f"left out: {said}", stacklevel=3)
    table = _newest(table[~alone], case)
    table["speedup"] = table["p50_dense"] / table["p50"]
    table["energy_per_token"] = table["energy"] / table["tokens"]
    table["energy_change"] = 100 * (table["energy"] / table["energy_dense"] - 1)
    return table.drop(columns="energy_dense").reset_index(drop=True)


# --- layers ---------------------------------------------------------------------------------------


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/ffn.csv, each with its speed-up over dense torch.compile in the same case and call.

    A case measured by several calls is that of the newest. Added columns: p50_dense (ms), speedup (p50_dense / p50),
    energy_per_token (mJ) and energy_change (% of dense torch.compile), both NaN where no energy was measured. Rows
    without dense torch.compile beside them are left out with a warning that counts them. Raises ValueError for
    rows that lack columns or their values, for a time that is not positive, and when no row is left. Ours.
    """
    return _beside_dense(rows, "ffn.csv", CASE, ["p50", "energy"])


def training_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/training.csv, each beside dense torch.compile in the same case and call.

    Added columns as in `speedups`, of forward and backward together, and forward_speedup, of the forward pass alone;
    held_share and peak_share, held and peak in % of dense. Left out and raised: as there. Paper: the layer's part in Fig. 5.
    """
    case = [column for column in CASE if column not in ("mode", "weight_sets")]
    table = _beside_dense(rows, "training.csv", case, ["p50", "energy", "forward", "held", "peak"])
    table["forward_speedup"] = table.pop("forward_dense") / table["forward"]
    for name in ("held", "peak"):
        table[f"{name}_share"] = 100 * table[name] / table.pop(f"{name}_dense")
    return table


def crossovers(table: pd.DataFrame) -> pd.DataFrame:
    """Return up to how many active neurons each Triton path is faster than dense, from `speedups`; one row a line.

    Columns: those of the case, provider, best (the largest speed-up), lowest and highest (the active neurons measured),
    crossover: where the speed-up first falls below 1 as activity rises, interpolated in the logarithms of
    both (NaN when it does not fall from above), and verdict, the same in words. Levels with 0 active neurons, which
    have no logarithm, are left out. Ours.
    """
    paths = table[table["provider"].map(providers.is_sparse).astype(bool) & (table["active"] > 0)]
    case = _case_of(table)
    found = []
    for keys, line in paths.groupby([*case, "provider"]):
        line = line.sort_values("active")
        levels = list(zip(line["active"].tolist(), line["speedup"].tolist(), strict=True))
        lowest, highest = levels[0][0], levels[-1][0]
        result = crossing(levels)
        if result == 0:
            verdict = f"slower from {lowest:.0f} active on, the fewest measured"
        elif result == highest:
            verdict = f"faster at {highest:.0f} active, the most measured"
        else:
            verdict = f"faster below {result:.0f} active"
        fall = result if 0 < result < highest else np.nan
        found.append((*keys, line["speedup"].max(), lowest, highest, fall, verdict))
    return pd.DataFrame(
        found, columns=[*case, "provider", "best", "lowest", "highest", "crossover", "verdict"]
    )


def training_crossover(table: pd.DataFrame, provider: str = providers.UNION.name) -> float:
    """Return up to how many active neurons a sparse training step is faster than dense, whatever the case.

    table: `training_speedups`. The least over the cases of where the speed-up falls below 1 (`crossovers`); a case that is
    faster at every level counts with its highest one, which is as far as was measured, and one that is slower at every
    level with 0. Raises ValueError for a table without the provider. Ours.
    """
    found = crossovers(table[table["provider"] == provider])
    if found.empty:
        raise ValueError(f"the table has no row of {provider!r} with active neurons")
    faster = found["verdict"].str.startswith("faster")
    return float(found["crossover"].fillna(found["highest"].where(faster, 0.0)).min())


def at_level(table: pd.DataFrame, active: float) -> pd.DataFrame:
    """Return of each case the rows whose active neurons are nearest to `active` (by ratio), from `speedups` or `roofline`.

    What was measured stays in the column active: small batches of the same layer differ from the mean. Ours.
    """
    distance = np.log(table["active"].clip(lower=MIN_LAYER_ACTIVE) / active).abs()
    nearest = distance.groupby([table[column] for column in _case_of(table)]).transform("min")
    return table[distance == nearest].reset_index(drop=True)


def by_case(table: pd.DataFrame, column: str = "speedup") -> pd.DataFrame:
    """Return one column of `speedups` to be read: a row a case, a column a provider, with the day and commit of the call.

    Index: pattern, hidden_size, intermediate_size, gated, tokens, active, mode, weight_sets (of `training_speedups` without
    these two), device, date (the day), commit (7 digits). Providers of which no row has a value are left out. Ours.
    """
    short = table["commit"].str.replace(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", regex=True)
    table = table.assign(date=table["date"].str[:10], commit=short)
    index = [
        "pattern",
        "hidden_size",
        "intermediate_size",
        "gated",
        "tokens",
        "active",
        "mode",
        "weight_sets",
    ]
    index = [column for column in index if column in table]
    return table.pivot_table(
        index=[*index, "device", "date", "commit"], columns="provider", values=column
    )


def short(cases: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return what a table of `by_case` was measured on ("device day commit", joined by "; "), and it without these levels."""
    levels = [name for name in ("device", "date", "commit") if name in cases.index.names]
    origin = dict.fromkeys(
        " ".join(map(str, key)) for key in cases.index.to_frame()[levels].to_numpy()
    )
    return "; ".join(origin), cases.droplevel(
        [name for name in (*levels, "weight_sets") if name in cases.index.names]
    )


def roofline(kernels: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/kernels.csv, each with how near its time is to the least its work could take.

    Of each case and provider the newest call is taken. ceilings: rows of data/bench/ceilings.csv; the newest of each
    metric on the kernel's device. Added columns: peak (TFLOP/s) and bandwidth (GB/s), the ceilings; intensity (flop /
    byte) and tflops (achieved TFLOP/s), NaN where the operations or bytes of a kernel are not known; floor (ms), the larger
    of flops / peak and bytes / bandwidth, with share = floor / ms and bound ("compute" or "memory", empty where
    neither is known). A share above 1 is possible where data comes from the cache, which the copy does not use.
    Raises ValueError for rows that lack columns or values, other units, and a device without both ceilings. Ours.
    """
    case = [column for column in CASE if column not in ("mode", "weight_sets")]
    _check_rows(
        kernels,
        "kernels.csv",
        [*case, "active", "provider", "kernel", "ms", "date"],
        ["flops", "bytes"],
    )
    _check_rows(ceilings, "ceilings.csv", ["metric", "value", "unit", "device", "date"])
    units = {"matmul": "TFLOP/s", "copy bandwidth": "GB/s"}
    for row in ceilings.itertuples():
        if units.get(row.metric, row.unit) != row.unit:
            raise ValueError(
                f"the ceiling {row.metric!r} is in {row.unit!r}; it has to be in {units[row.metric]}"
            )
    last = (
        ceilings.sort_values("date")
        .groupby(["device", "metric"])["value"]
        .last()
        .unstack()
        .reindex(columns=[*units])
    )
    table = _newest(kernels, [*case, "provider"]).reset_index(drop=True)
    table["peak"], table["bandwidth"] = (table["device"].map(last[metric]) for metric in units)
    without = table.loc[table[["peak", "bandwidth"]].isna().any(axis=1), "device"]
    if len(without):
        raise ValueError(
            f"ceilings.csv lacks {' or '.join(units)} of {without.iloc[0]}; measure them in the same call"
        )
    compute = table["flops"] / table["peak"] / 1e9  # ms
    memory = table["bytes"] / table["bandwidth"] / 1e6
    table["intensity"] = table["flops"] / table["bytes"]
    table["tflops"] = table["flops"] / table["ms"] / 1e9
    table["floor"] = np.fmax(compute, memory)
    table["share"] = table["floor"] / table["ms"]
    table["bound"] = np.where(
        table["floor"].isna(), "", np.where(table["floor"] == compute, "compute", "memory")
    )
    return table


# --- training steps and whole models ----------------------------------------------------------------


def step_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/train_step.csv, each beside the dense step with compiled layers of the same case and call.

    Added columns as in `speedups`, with tokens (of a step), and peak_change (% of dense). Left out and raised: as there.
    Paper: Fig. 5 and Table 1.
    """
    _check_rows(rows, "train_step.csv", ["micro_batch", "context"])
    rows = rows.assign(tokens=rows["micro_batch"] * rows["context"])
    table = _in_order(_beside_dense(rows, "train_step.csv", STEP_CASE, ["p50", "energy", "peak"]))
    table["peak_change"] = 100 * (table["peak"] / table.pop("peak_dense") - 1)
    return table


def model_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/model.csv, forward passes, each beside dense with compiled layers in the same case and call.

    Added columns as in `speedups`, with peak_change (% of dense), and, the idle power taken off, energy_net (mJ a token) and
    energy_net_change (% of dense). Left out and raised: as there. Paper: Table 1, Fig. 4.
    """
    table = _in_order(
        _beside_dense(rows, "model.csv", [*MODEL_CASE, "mode"], ["p50", "energy", "peak"])
    )
    table["peak_change"] = 100 * (table["peak"] / table.pop("peak_dense") - 1)
    dense = (
        table["energy"] / (1 + table["energy_change"] / 100) - table["idle"] * table["p50_dense"]
    )
    net = table["energy"] - table["idle"] * table["p50"]
    return table.assign(energy_net=net / table["tokens"], energy_net_change=100 * (net / dense - 1))


def decode_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/decode.csv, each beside dense with layers compiled alike in the same case and call.

    Added columns as in `speedups`, and tuned: whether both were tuned, which `provider` then says no more. What tuning finds
    differs from call to call, so that of tuned rows each provider's fastest is taken, whatever its call. tokens are those
    of a step, one for each document. Left out and raised: as there. Ours.
    """
    case = [*MODEL_CASE, "steps", "tuned"]
    _check_rows(rows, "decode.csv", [*case[:-1], *CALL, "active", "provider", "p50"])
    parsed = rows["provider"].map(providers.Provider.parse)
    tuned = parsed.map(lambda provider: provider.compilation == providers.TUNED)
    rows = rows.assign(provider=[provider.untuned.name for provider in parsed], tuned=tuned)
    fastest = rows[rows["tuned"]].sort_values("p50").drop_duplicates([*case, "active", "provider"])
    # Ratios are taken within a call, so that these are given one.
    fastest = fastest.assign(**fastest.groupby([*case, "active"])[CALL].transform("first"))
    rows = pd.concat([rows[~rows["tuned"]], fastest])
    return _in_order(_beside_dense(rows, "decode.csv", case, ["p50", "energy"]))


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Smaller models first, then smaller batches, then fewer active neurons; of one case as they were."""
    return table.sort_values(
        ["num_layers", "model", "tokens", "active"], kind="stable", ignore_index=True
    )


def _check_checkpointed(steps: pd.DataFrame) -> None:
    if "checkpoint_activations" in steps and steps["checkpoint_activations"].nunique() > 1:
        raise ValueError(
            "these steps are with and without checkpointed activations; choose one of them"
        )


def level_gains(table: pd.DataFrame, by: str = "energy_change") -> pd.DataFrame:
    """Return what compiled providers gain over dense at each level of activity, most active first (Figs 4, 5).

    table: `model_speedups` of one model and batch, or `step_speedups`. Columns: active, provider, faster (% of dense), saved (the
    fall of `by`, in % of dense; NaN where it was not measured), device. Raises ValueError for several models or batches, and for
    steps with and without checkpointed activations.
    """
    _check_checkpointed(table)
    cases = table[["model", "tokens"]].drop_duplicates()
    if len(cases) > 1:
        raise ValueError(f"levels are compared of one model and batch; this table has {len(cases)}")
    parsed = table["provider"].map(providers.Provider.parse)
    compiled = parsed.map(lambda provider: provider.compilation == providers.COMPILED).astype(bool)
    found = table[compiled & (table["provider"] != BASELINE)]
    found = found.assign(faster=100 * (found["speedup"] - 1), saved=-found[by])
    found = found.sort_values(["active", "provider"], ascending=[False, True], ignore_index=True)
    return found[["active", "provider", "faster", "saved", "device"]]


def layer_contributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/model_layers.csv with the time that each layer saves (Figs 6, 10, 11).

    Of each case and level of activity (the column level, a mean over layers) the newest call that timed layers is taken. Added
    columns: saved and auto_saved, ms that the sparse path and "auto" take less than dense for the feed-forward layer, negative
    where they take longer. Raises ValueError for rows that lack columns and when none has times.
    """
    _check_rows(
        rows,
        "model_layers.csv",
        [*MODEL_CASE, "level", "layer", "active", "date"],
        ["dense", "sparse", "auto"],
    )
    timed = rows[rows[["dense", "sparse", "auto"]].notna().all(axis=1)]
    if timed.empty:
        raise ValueError(
            "model_layers.csv has no times; `twell measure model --layers` measures them"
        )
    levels = timed.rename(columns={"level": "active", "active": "of_layer"})
    table = timed.loc[_newest(levels, MODEL_CASE).index]
    saved, auto = table["dense"] - table["sparse"], table["dense"] - table["auto"]
    return table.assign(saved=saved, auto_saved=auto).reset_index(drop=True)


def layers_at(table: pd.DataFrame, level: float, most: float = 2.0) -> pd.DataFrame:
    """Return of `layer_contributions` the level nearest to `level` by ratio; no rows where none is within a factor `most`."""
    distance = np.log(table["level"] / level).abs()
    near = (distance == distance.min()) & (distance <= np.log(most))
    return table[near].reset_index(drop=True)


def correlation(table: pd.DataFrame, x: str = "active", y: str = "saved") -> float:
    """Return Pearson's r of two columns; NaN where one of them is constant, or with fewer than two rows."""
    a, b = table[x].to_numpy(float), table[y].to_numpy(float)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan
    return float(np.corrcoef(a, b)[0, 1])


def layer_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return where the time of one decoder layer goes, from rows of data/bench/model_parts.csv: a row a provider.

    Of each case the newest call is taken. Columns: those of the case and active, provider, a column a part in ms, total, speedup
    (dense over it) and limit: the speed-up that Amdahl's law leaves, if up and down took no time. Where the kernels took longer
    under the profiler than the layer without it, the parts are scaled to the layer. Raises ValueError for rows that lack columns.
    """
    columns = [*MODEL_CASE, "active", "provider", "part", "ms", "date"]
    _check_rows(rows, "model_parts.csv", columns)
    newest = _newest(rows, MODEL_CASE)
    index = [*MODEL_CASE, "active", "provider"]
    parts = list(dict.fromkeys(newest["part"]))
    table = newest.pivot_table(index=index, columns="part", values="ms", aggfunc="last")[parts]
    table["total"] = table.sum(axis=1)
    kernels = table[parts].clip(lower=0)
    table[parts] = kernels.mul(table["total"] / kernels.sum(axis=1), axis=0)
    table = table.rename_axis(columns=None).reset_index()
    dense = table.loc[table["provider"] == BASELINE, [*index[:-1], "total", "up and down"]]
    dense = dense.assign(limit=dense["total"] / (dense["total"] - dense["up and down"]))
    table = table.merge(dense.drop(columns="up and down"), on=index[:-1], suffixes=("", "_dense"))
    return table.assign(speedup=table.pop("total_dense") / table["total"])


# Of Table 1: the paper's metric, what it is called here, and its unit.
SCALE = {
    "forward_throughput": ("forward speed", "tokens/ms"),
    "energy_per_token": ("forward energy", "mJ/token"),
    "training_throughput": ("training speed", "tokens/ms"),
    "training_peak_memory": ("training memory", "GB"),
}


def scale_table(paper: pd.DataFrame, models: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's Table 1 beside ours, a row a quantity of SCALE and model.

    paper: `results.paper()`; models: `model_speedups` of one batch, or empty; steps: `step_speedups` of one micro-batch, or empty.
    Columns: quantity, unit, model; paper_dense, paper_sparse, paper_change (%), paper_device; dense, sparse, change, device and
    profile of ours, NaN and empty where not measured: with compiled layers, in forward passes by "auto", of several levels of
    activity at the one nearest to the paper's. Raises ValueError for steps with and without checkpointed activations.
    """
    _check_checkpointed(steps)
    if len(models):
        models = models.assign(forward_throughput=models["tokens"] / models["p50"])
    if len(steps):
        speed, peak = steps["tokens"] / steps["p50"], steps["peak"] / 1e9
        steps = steps.assign(training_throughput=speed, training_peak_memory=peak)
    known = paper[(paper["metric"] == "avg_nonzeros") & (paper["l1"] == 2e-5)]
    active = known.groupby("model")["value"].first().astype(float)
    table_1 = paper[paper["source"] == "Table 1"]
    changes = table_1[table_1["sparse"]].set_index(["metric", "model"])["value"]
    rows = []
    for metric, (quantity, unit) in SCALE.items():
        for model, printed in table_1[table_1["metric"] == metric].groupby("model", sort=False):
            theirs = printed.set_index("sparse")["value"].astype(float)
            row = {"quantity": quantity, "unit": unit, "model": model}
            row |= {"paper_dense": theirs[False], "paper_sparse": theirs[True]}
            row |= {"paper_change": float(changes[f"{metric}_change", model])}
            row |= {"paper_device": printed["hardware"].iloc[0]}
            ours = steps if metric.startswith("training") else models
            rows.append(row | _ours(ours, model, metric, active.get(model, np.nan)))
    return pd.DataFrame(rows)


def _ours(table: pd.DataFrame, model: str, column: str, active: float) -> dict:
    """dense, sparse, change and device of one model's `column`, at the level of activity nearest to `active`."""
    nothing = {"dense": np.nan, "sparse": np.nan, "change": np.nan, "device": "", "profile": ""}
    if table.empty:
        return nothing
    rows = table[table["model"].str.upper() == model.upper()]
    distance = np.log(rows["active"] / active).abs().fillna(0)
    rows = rows[distance <= distance.min() + SAME_ACTIVE]
    dense = rows.loc[rows["provider"] == BASELINE]
    sparse = rows[
        rows["provider"].isin([providers.AUTO_COMPILED.name, providers.UNION_COMPILED.name])
    ]
    if dense.empty or sparse.empty:
        return nothing
    first, second = dense.iloc[-1], sparse.iloc[-1]
    change = 100 * (second[column] / first[column] - 1)
    about = {"device": second["device"], "profile": second["profile"]}
    return {"dense": first[column], "sparse": second[column], "change": change} | about
