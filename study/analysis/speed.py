"""Tables of measured rows (data/bench): speed and energy of layers, training steps and models.

Every ratio is taken within one case and one call. Times are in ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd

from study.analysis.runs import MIN_LAYER_ACTIVE
from twell.measure import providers
from twell.sparse.calibration import crossing

BASELINE = providers.DENSE_COMPILED.name  # speed-ups are over it, but for eager calls
# Rows of one case, with the same `active`, are compared. Rows of kernels have no mode.
KERNEL_CASE = "tokens hidden_size intermediate_size gated dtype pattern device".split()
TRAINING_CASE = [*KERNEL_CASE, "mode"]
CASE = [*TRAINING_CASE, "weight_sets"]
_MODEL = "model num_layers hidden_size intermediate_size num_heads vocab_size gated".split()
STEP_CASE = [*_MODEL, "context", "micro_batch", "tokens", "precision", "checkpoint_activations"]
STEP_CASE += ["profile", "device"]
_SIDES = "checkpoint", "imposed"  # profiles: a trained model, and random weights with its activity
MODEL_CASE = [*_MODEL, *"dtype profile sdpa batch context tokens device".split()]
CALL = ["commit", "command", "date"]  # a ratio is only taken within one call: absolute times drift
_SPREAD = ["p20", "p80"]  # of the timed calls; the oldest rows have none
WRITTEN_BY = {"training.csv": "ffn --backward", "train_step.csv": "train-step"}
WRITTEN_BY |= dict.fromkeys(("model.csv", "model_layers.csv", "model_parts.csv"), "model")
WRITTEN_BY |= {"decode.csv": "model"}
# The same seed gives the same activity but for rounding. Levels of a grid are further apart.
SAME_ACTIVE = 0.01


def _check_rows(
    rows: pd.DataFrame, file: str, columns: Sequence[str], or_empty: Sequence[str] = ()
) -> None:
    missing = [column for column in (*columns, *or_empty) if column not in rows]
    if missing:
        command = f"twell measure {WRITTEN_BY.get(file, 'ffn')}"
        need = f"need the columns {', '.join(missing)}"
        raise ValueError(f"rows of {file} {need}; `{command}` writes such rows")
    if rows.empty:
        raise ValueError(f"{file} has no row")
    empty = [column for column in columns if rows[column].isna().any()]
    if empty:
        raise ValueError(f"{file} has empty cells in {', '.join(empty)}, which every row needs")


def _newest(rows: pd.DataFrame, case: list[str]) -> pd.DataFrame:
    """Of each case, with `active` the same within SAME_ACTIVE, the rows of the newest date."""
    ordered = rows.sort_values("active", kind="stable")
    by_case = [ordered[column] for column in case]
    jumps = ordered["active"].groupby(by_case).diff() > SAME_ACTIVE * ordered["active"]
    steps = jumps.groupby(by_case).cumsum()
    newest = ordered.groupby([*case, steps.rename("level")])["date"].transform("max")
    return ordered[ordered["date"] == newest].sort_index()


def _change(table: pd.DataFrame, column: str) -> pd.Series:
    """A column in % over its dense partner NAME_dense, which is taken out of the table."""
    return 100 * (table[column] / table.pop(f"{column}_dense") - 1)


def _beside_dense(
    rows: pd.DataFrame, file: str, case: list[str], compared: Sequence[str] = ()
) -> pd.DataFrame:
    """Rows of each provider's newest call of a case that timed dense torch.compile too, beside it.

    p50 and `compared` of dense torch.compile are beside each row as NAME_dense; in the mode "eager"
    of the faster one of it and dense eager, which starts sooner. speedup_low and speedup_high are
    the least and the most that the p20 and p80 of both sides allow.
    """
    columns = [*case, *CALL, "active", "provider", "p50"]
    _check_rows(rows, file, columns, ["energy", *compared])
    wrong = rows[rows["p50"] <= 0]
    if len(wrong):
        first = wrong.iloc[0]
        time = f"{first['p50']:g} ms on {first['date']}"
        raise ValueError(f"p50 of {first['provider']} is {time}; a time is above 0")
    call = [*case, *CALL, "active"]
    rows = rows.drop_duplicates([*call, "provider"], keep="last")
    rows = rows.assign(**{name: np.nan for name in _SPREAD if name not in rows})
    plain = rows["provider"] == BASELINE
    if "mode" in rows:
        plain |= (rows["provider"] == providers.DENSE_EAGER.name) & (rows["mode"] == "eager")
    dense = rows.loc[plain, [*call, "p50", *_SPREAD, "energy", *compared]]
    dense = dense.sort_values("p50").drop_duplicates(call)
    table = rows.merge(dense, on=call, how="left", suffixes=("", "_dense"))
    alone = table["p50_dense"].isna()
    if alone.any():
        first = table[alone].iloc[0]
        message = f"{alone.sum()} of {len(table)} rows have no {BASELINE} of the same case and call"
        message += f" beside them, the first: {first['provider']} at {first['tokens']} tokens"
        message += f" on {first['date']}"
        if alone.all():
            raise ValueError(message)
        warnings.warn(f"left out: {message}", stacklevel=3)
    table = _newest(table[~alone], [*case, "provider"])
    table["speedup"] = table["p50_dense"] / table["p50"]
    table["speedup_low"] = table.pop("p20_dense") / table["p80"]
    table["speedup_high"] = table.pop("p80_dense") / table["p20"]
    table["energy_per_token"] = table["energy"] / table["tokens"]
    table["energy_change"] = _change(table, "energy")
    return table.reset_index(drop=True)


# --- layers ---------------------------------------------------------------------------------------


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/ffn.csv beside dense torch.compile in the same case and call.

    In the mode "eager" dense is the faster one of dense torch.compile and dense eager.
    Of several calls of a case each provider's newest counts, beside dense of that call. Added
    columns: p50_dense (ms), speedup (p50_dense / p50), speedup_low and speedup_high (of p20 and p80
    of both sides; NaN where rows have none), energy_per_token (mJ) and energy_change (% of dense),
    NaN where no energy was measured. Rows without dense torch.compile beside them are left out with
    a warning that counts them. Raises ValueError for rows that lack columns or their values, for a
    time that is not positive, and when no row is left. Ours.
    """
    return _beside_dense(rows, "ffn.csv", CASE)


def training_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/training.csv beside dense torch.compile in the same case and call.

    Added columns as in `speedups`, of forward and backward together; forward_speedup, of the
    forward pass alone; held_share and peak_share, held and peak in % of dense. The modes "stream"
    and "eager" are cases of their own. Left out and raised: as there. Paper: the layer's part in
    Fig. 5.
    """
    table = _beside_dense(rows, "training.csv", TRAINING_CASE, ["forward", "held", "peak"])
    table["forward_speedup"] = table.pop("forward_dense") / table["forward"]
    for name in ("held", "peak"):
        table[f"{name}_share"] = 100 * table[name] / table.pop(f"{name}_dense")
    return table


def crossovers(table: pd.DataFrame) -> pd.DataFrame:
    """Return the active neurons up to which each Triton path is faster than dense, a row a line.

    table: `speedups`. Columns: those of the case, provider, best (the largest speed-up), lowest and
    highest (the active neurons measured), crossover: where the speed-up first falls below 1 as
    activity rises, interpolated in the logarithms of both (NaN when it does not fall from above),
    and verdict, the same in words. Levels with 0 active neurons are left out. Ours.
    """
    paths = table[table["provider"].map(providers.is_sparse).astype(bool) & (table["active"] > 0)]
    case = [column for column in CASE if column in table]
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


def at_level(table: pd.DataFrame, active: float) -> pd.DataFrame:
    """Return of each case the rows whose active neurons are nearest to `active`, by ratio.

    table: `speedups` or `roofline`. The column active keeps the measured number. Ours.
    """
    distance = np.log(table["active"].clip(lower=MIN_LAYER_ACTIVE) / active).abs()
    case = [table[column] for column in CASE if column in table]
    nearest = distance.groupby(case).transform("min") + SAME_ACTIVE
    return table[distance <= nearest].reset_index(drop=True)


def near_level(table: pd.DataFrame, active: float) -> pd.DataFrame:
    """Return the rows at the level within 20% of `active` that is nearest to it, by ratio."""
    distance = np.log(table["active"].where(table["active"] > 0) / active).abs()
    return table[(distance <= distance.min() + SAME_ACTIVE) & (distance < np.log(1.2))]


def by_case(table: pd.DataFrame, column: str = "speedup") -> pd.DataFrame:
    """Return one column of `speedups` to be read: a row a case, a column a provider.

    Index: pattern, hidden_size, intermediate_size, gated, tokens, active, mode, weight_sets (not of
    `training_speedups`), device, date (the day), commit (7 digits). Providers without any value
    are left out. Ours.
    """
    commit = table["commit"].str.replace(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", regex=True)
    table = table.assign(date=table["date"].str[:10], commit=commit)
    index = "pattern hidden_size intermediate_size gated tokens active mode weight_sets".split()
    index = [name for name in index if name in table] + ["device", "date", "commit"]
    return table.pivot_table(index=index, columns="provider", values=column)


def short(cases: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return the origin of a table of `by_case`, and the table without these levels.

    The origin is "device day commit", several joined by "; ".
    """
    levels = [name for name in ("device", "date", "commit") if name in cases.index.names]
    origins = cases.index.to_frame()[levels].to_numpy().tolist()
    dropped = [*levels, *({"weight_sets"} & set(cases.index.names))]
    return "; ".join(dict.fromkeys(map(" ".join, origins))), cases.droplevel(dropped)


def roofline(kernels: pd.DataFrame, ceilings: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/kernels.csv beside the least time that their work could take.

    Of each case and provider in bf16 the newest call is taken; FP8 has other ceilings. ceilings:
    rows of data/bench/ceilings.csv; of the kernel's call, else the newest on its device. Added
    columns: peak (TFLOP/s) and bandwidth (GB/s), the ceilings; intensity (flop / byte) and tflops
    (achieved TFLOP/s); floor (ms), the larger of flops / peak and bytes / bandwidth; share = floor
    / ms; bound ("compute" or "memory"). NaN and empty where operations or bytes are unknown. A
    share above 1 is possible for data from the cache, which the copy does not use. Raises
    ValueError for rows that lack columns or values, other units, and a device without both
    ceilings. Ours.
    """
    columns = [*KERNEL_CASE, "active", "provider", "kernel", "ms", "date"]
    _check_rows(kernels, "kernels.csv", columns, ["flops", "bytes"])
    _check_rows(ceilings, "ceilings.csv", ["metric", "value", "unit", "device", "date"])
    units = {"matmul": "TFLOP/s", "copy bandwidth": "GB/s"}
    for row in ceilings.itertuples():
        if units.get(row.metric, row.unit) != row.unit:
            needed = f"it has to be in {units[row.metric]}"
            raise ValueError(f"the ceiling {row.metric!r} is in {row.unit!r}; {needed}")
    ordered = ceilings.sort_values("date").groupby(["device", "metric"])
    last = ordered["value"].last().unstack().reindex(columns=[*units])
    own = ceilings.groupby(["device", "date", "metric"])["value"].last().unstack()
    in_bf16 = [not providers.Provider.parse(name).in_fp8 for name in kernels["provider"]]
    table = _newest(kernels[in_bf16], [*KERNEL_CASE, "provider"]).reset_index(drop=True)
    own = own.reindex(pd.MultiIndex.from_frame(table[["device", "date"]]), columns=[*units])
    for column, metric in zip(("peak", "bandwidth"), units, strict=True):
        of_device = table["device"].map(last[metric])
        table[column] = own[metric].reset_index(drop=True).fillna(of_device)
    without = table.loc[table[["peak", "bandwidth"]].isna().any(axis=1), "device"]
    if len(without):
        missing = f"{' or '.join(units)} of {without.iloc[0]}"
        raise ValueError(f"ceilings.csv lacks {missing}; measure them in the same call")
    compute = table["flops"] / table["peak"] / 1e9  # ms
    memory = table["bytes"] / table["bandwidth"] / 1e6
    table["intensity"] = table["flops"] / table["bytes"]
    table["tflops"] = table["flops"] / table["ms"] / 1e9
    table["floor"] = np.fmax(compute, memory)
    table["share"] = table["floor"] / table["ms"]
    bound = np.where(table["floor"] == compute, "compute", "memory")
    return table.assign(bound=np.where(table["floor"].isna(), "", bound))


# --- training steps and whole models --------------------------------------------------------------


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Smaller models first, then smaller batches, then fewer active neurons; else as they were."""
    order = ["num_layers", "model", "tokens", "active"]
    return table.sort_values(order, kind="stable", ignore_index=True)


def step_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/train_step.csv beside dense with compiled layers, in the same call.

    Added columns as in `speedups`, with tokens (of a step), and peak_change (% of dense). Left out
    and raised: as there. Paper: Fig. 5 and Table 1.
    """
    _check_rows(rows, "train_step.csv", ["micro_batch", "context"])
    rows = rows.assign(tokens=rows["micro_batch"] * rows["context"])
    table = _in_order(_beside_dense(rows, "train_step.csv", STEP_CASE, ["peak"]))
    table["peak_change"] = _change(table, "peak")
    return table


def model_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/model.csv, forward passes, beside dense with compiled layers.

    Added columns as in `speedups`, with peak_change (% of dense), and, less the idle power,
    energy_net (mJ a token) and energy_net_change (% of dense). Left out and raised: as there.
    Paper: Table 1, Fig. 4.
    """
    table = _in_order(_beside_dense(rows, "model.csv", [*MODEL_CASE, "mode"], ["peak"]))
    table["peak_change"] = _change(table, "peak")
    dense = table["energy"] / (1 + table["energy_change"] / 100)
    dense = dense - table["idle"] * table["p50_dense"]
    net = table["energy"] - table["idle"] * table["p50"]
    return table.assign(energy_net=net / table["tokens"], energy_net_change=100 * (net / dense - 1))


def decode_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/decode.csv beside dense with layers compiled alike.

    Added columns as in `speedups`, and tuned: whether both were tuned; `provider` then has the name
    of the untuned one. Tuning differs from call to call, so of tuned rows each provider's fastest
    is taken, whatever its call. tokens are those of a step, one a document. Left out and raised: as
    there. Ours.
    """
    case = [*MODEL_CASE, "steps", "mode", "tuned"]
    _check_rows(rows, "decode.csv", [*case[:-1], *CALL, "active", "provider", "p50"])
    parsed = rows["provider"].map(providers.Provider.parse)
    tuned = parsed.map(lambda provider: provider.compilation == providers.TUNED)
    rows = rows.assign(provider=[provider.untuned.name for provider in parsed], tuned=tuned)
    fastest = rows[rows["tuned"]].sort_values("p50").drop_duplicates([*case, "active", "provider"])
    # Ratios are taken within a call, so these become one call.
    fastest = fastest.assign(**fastest.groupby([*case, "active"])[CALL].transform("first"))
    rows = pd.concat([rows[~rows["tuned"]], fastest])
    return _in_order(_beside_dense(rows, "decode.csv", case))


def beside_imposed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the gains of trained models beside those of random weights with their activity.

    table: `model_speedups` or `decode_speedups`; of each case that has the profiles "checkpoint"
    and "imposed". Columns: model, batch, context, mode, provider, device; active, speedup and
    imposed_active, imposed_speedup, with their ranges from p20 to p80 (_low, _high); verdict, of
    the imposed speed-up: "higher" or "lower" where the ranges are apart, else "alike". Empty for an
    empty table. Ours.
    """
    if table.empty:
        return table
    case = ["model", "batch", "context", "mode", "provider", "device"]
    numbers = ["active", "speedup", "speedup_low", "speedup_high"]
    sides = (table.loc[table["profile"] == name, case + numbers] for name in _SIDES)
    both = pd.merge(*sides, on=case, suffixes=("", "_imposed"))
    higher = both["speedup_low_imposed"] > both["speedup_high"]
    lower = both["speedup_high_imposed"] < both["speedup_low"]
    both["verdict"] = np.select([higher, lower], ["higher", "lower"], "alike")
    names = {f"{name}_imposed": f"imposed_{name}" for name in numbers}
    return both.rename(columns=names)[[*case, *numbers, *names.values(), "verdict"]]


def _check_checkpointed(steps: pd.DataFrame) -> None:
    if "checkpoint_activations" in steps and steps["checkpoint_activations"].nunique() > 1:
        kinds = "with and without checkpointed activations"
        raise ValueError(f"these steps are {kinds}; choose one of them")


def level_gains(table: pd.DataFrame, by: str = "energy_change") -> pd.DataFrame:
    """Return the gain of compiled bf16 providers by level, most active first (Figs 4, 5).

    table: `model_speedups` of one model and batch, or `step_speedups`. Columns: active, provider,
    faster, faster_low and faster_high (% of dense), saved (the fall of `by`, in % of dense; NaN
    where it was not measured), device. Raises ValueError for several models or batches, and for
    steps with and without checkpointed activations.
    """
    _check_checkpointed(table)
    cases = table[["model", "tokens"]].drop_duplicates()
    if len(cases) > 1:
        raise ValueError(f"levels are compared of one model and batch; this table has {len(cases)}")
    parsed = table["provider"].map(providers.Provider.parse)
    compiled = parsed.map(
        lambda one: one.compilation == providers.COMPILED and one.precision is None
    )
    gains = table[compiled.astype(bool) & (table["provider"] != BASELINE)]
    for end in ("", "_low", "_high"):
        gains[f"faster{end}"] = 100 * (gains[f"speedup{end}"] - 1)
    gains = gains.assign(saved=-gains[by])
    gains = gains.sort_values(["active", "provider"], ascending=[False, True], ignore_index=True)
    columns = ["active", "provider", "faster", "faster_low", "faster_high", "saved", "device"]
    return gains[columns]


def layer_contributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/model_layers.csv with the time each layer saves (Figs 6, 10, 11).

    Of each case and level (a mean over layers) the newest call that timed layers is taken. Added
    columns: saved and auto_saved, ms by which the sparse path and "auto" are faster than dense.
    Raises ValueError for rows that lack columns and when none has times.
    """
    times = ["dense", "sparse", "auto"]
    columns = [*MODEL_CASE, "level", "layer", "active", "date"]
    _check_rows(rows, "model_layers.csv", columns, times)
    timed = rows.dropna(subset=times)
    if timed.empty:
        command = "`twell measure model --layers`"
        raise ValueError(f"model_layers.csv has no times; {command} measures them")
    levels = timed.rename(columns={"level": "active", "active": "of_layer"})
    table = timed.loc[_newest(levels, MODEL_CASE).index]
    saved, auto = table["dense"] - table["sparse"], table["dense"] - table["auto"]
    return table.assign(saved=saved, auto_saved=auto).reset_index(drop=True)


def layers_at(table: pd.DataFrame, level: float) -> pd.DataFrame:
    """Return of `layer_contributions` the nearest level, if its ratio is at most 2."""
    distance = np.log(table["level"] / level).abs()
    near = (distance == distance.min()) & (distance <= np.log(2))
    return table[near].reset_index(drop=True)


def correlation(table: pd.DataFrame) -> float:
    """Return Pearson's r of active and saved; NaN for a constant one, or below two rows."""
    a, b = table["active"].to_numpy(float), table["saved"].to_numpy(float)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan
    return float(np.corrcoef(a, b)[0, 1])


def layer_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return where the time of one decoder layer goes, a row a provider.

    rows: of data/bench/model_parts.csv; of each case the newest call is taken. Columns: those of
    the case and active, provider, a column a part in ms, total, limit (the speed-up if up and down
    took no time, Amdahl's law) and speedup (dense over it). Where the kernels took longer under the
    profiler than the layer without it, the parts are scaled to the layer. Raises ValueError for
    rows that lack columns.
    """
    index = [*MODEL_CASE, "active", "provider"]
    _check_rows(rows, "model_parts.csv", [*index, "part", "ms", "date"])
    newest = _newest(rows, MODEL_CASE)
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


SCALE = {  # of Table 1: the paper's metric, its name here, and its unit
    "forward_throughput": ("forward speed", "tokens/ms"),
    "energy_per_token": ("forward energy", "mJ/token"),
    "training_throughput": ("training speed", "tokens/ms"),
    "training_peak_memory": ("training memory", "GB"),
}
# In % of dense of the same call; of speeds it is that of `speedup`.
_CHANGES = {"energy_per_token": "energy_change", "training_peak_memory": "peak_change"}


def scale_table(paper: pd.DataFrame, models: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's Table 1 beside ours, a row a quantity of SCALE and model.

    paper: `results.paper()`; models: `model_speedups` of one batch, or empty; steps:
    `step_speedups` of one micro-batch, or empty. Columns: quantity, unit, model; paper_dense,
    paper_sparse, paper_change (%), paper_active, paper_device, paper_note; dense, sparse, change,
    active, device and profile of ours, and low and high, the change that p20 and p80 of both sides
    allow (of speeds); NaN and empty where not measured. Ours is with compiled layers, in forward
    passes by "auto", at the level of activity nearest to the paper's. Raises ValueError for steps
    with and without checkpointed activations.
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
            value = printed.set_index("sparse")["value"].astype(float)
            row = {"quantity": quantity, "unit": unit, "model": model}
            row |= {"paper_dense": value[False], "paper_sparse": value[True]}
            row |= {"paper_change": float(changes[f"{metric}_change", model])}
            row |= {"paper_active": active.get(model, np.nan)}
            row |= {"paper_device": printed["hardware"].iloc[0]}
            row |= {"paper_note": "; ".join(dict.fromkeys(printed["note"].dropna()))}
            measured = steps if metric.startswith("training") else models
            rows.append(row | _ours(measured, model, metric, active.get(model, np.nan)))
    return pd.DataFrame(rows)


def _ours(table: pd.DataFrame, model: str, column: str, active: float) -> dict:
    """Numbers of one model's `column`, at the level of activity nearest to `active`."""
    numbers = ["dense", "sparse", "change", "active", "low", "high"]
    nothing = dict.fromkeys(numbers, np.nan) | {"device": "", "profile": ""}
    if table.empty:
        return nothing
    rows = table[table["model"].str.upper() == model.upper()]
    distance = np.log(rows["active"] / active).abs().fillna(0)
    rows = rows[distance <= distance.min() + SAME_ACTIVE]
    compiled = [providers.AUTO_COMPILED.name, providers.UNION_COMPILED.name]
    rows = rows[rows["provider"].isin(compiled)]
    if rows.empty:
        return nothing
    row = rows.iloc[-1]
    fast = column.endswith("throughput")
    change = 100 * (row["speedup"] - 1) if fast else row[_CHANGES[column]]
    about = {"device": row["device"], "profile": row["profile"], "active": row["active"]}
    if fast:
        about |= {end: 100 * (row[f"speedup_{end}"] - 1) for end in ("low", "high")}
    # Dense of the same call: another provider may have a newer one.
    measured = {"dense": row[column] / (1 + change / 100), "sparse": row[column], "change": change}
    return nothing | measured | about
