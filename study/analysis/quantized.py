"""FP8 beside bf16: the fastest dense and the fastest sparse layer of each case, and the quality.

A *side* is dense or sparse, in bf16 or FP8. Dense is under torch.compile, and in FP8 the fastest of
several, among them our dense path. Sparse is our fastest other path, never "auto".
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from study.analysis.speed import CALL, CASE, MODEL_CASE, _newest
from twell.measure import providers
from twell.measure.providers import Provider

# "FP8 all": of models, attention's linear layers too.
_PRECISIONS = {
    None: "",
    providers.FP8: " FP8",
    providers.FP8_TENSOR: " FP8",
    providers.FP8_TORCHAO: " FP8",
    providers.FP8_ALL: " FP8 all",
}


def side_of(name: str) -> str:
    """Return the side of a layer's or compiled model's provider, such as "dense FP8"; else ""."""
    provider = Provider.parse(name)
    ours = provider.sparse_path and provider.compilation == providers.EAGER
    ours |= provider == replace(providers.TRITON_COMPILED, precision=provider.precision)
    dense = provider.backend == "dense" and provider.compilation == providers.COMPILED
    dense |= provider.path == "dense" and bool(provider.precision)
    if provider.precision not in _PRECISIONS or not (ours or dense):
        return ""
    return ("dense" if dense else "sparse") + _PRECISIONS[provider.precision]


def fastest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest row of each case and side, of the newest call that measured the side.

    table: `speedups`, `model_speedups` or `decode_speedups`. Added columns: side, and over_fp8, the
    speed-up over the fastest dense FP8 of the same call and the same linear layers.
    """
    table = table.assign(side=[side_of(name) for name in table.get("provider", [])])
    table = table[table["side"] != ""]
    if table.empty:
        return table.assign(over_fp8=np.nan)
    columns = dict.fromkeys([*CASE, *MODEL_CASE, "steps", "tuned"])
    case = [column for column in columns if column in table]
    call = [*case, *CALL, "active"]
    table = table.sort_values("speedup", kind="stable", ascending=False)
    table = table.drop_duplicates([*call, "side"]).sort_index()
    table["in"] = table["side"].str.partition(" ")[2]
    other = table.loc[table["side"].str.startswith("dense "), [*call, "in", "speedup"]]
    table = table.merge(other, on=[*call, "in"], how="left", suffixes=("", "_fp8"))
    table["over_fp8"] = table["speedup"] / table.pop("speedup_fp8")
    return _newest(table.drop(columns="in"), [*case, "side"]).reset_index(drop=True)


def fp8_quality(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of data/bench/quality.csv with their side, of each model's newest call.

    Models by size, then by activity, the most active first. The model in bf16 is the side "dense",
    of which differences are 0.
    """
    if rows.empty:
        return rows.assign(side="")
    rows = rows[rows["date"] == rows.groupby("model")["date"].transform("max")]
    sides = [
        ("dense" if one.backend == "dense" else "sparse") + _PRECISIONS[one.precision]
        for one in rows["provider"].map(Provider.parse)
    ]
    rows = rows.assign(side=sides, level=-rows.groupby("model")["active"].transform("first"))
    return rows.sort_values(["parameters", "level"], kind="stable").drop(columns="level")
