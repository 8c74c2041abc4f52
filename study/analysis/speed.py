"""Tables of measured rows (data/bench): speed and energy of layers, training steps and models.

Every ratio is taken within one case and one call, since absolute times drift. Times are in ms.
A case is a shape, number of tokens, pattern of activity, device and way of calling.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from study.analysis.runs import HEADS
from study.analysis.variants import paper_sizes
from twell.measure import providers
from twell.sparse.calibration import crossing

BASELINE = providers.DENSE_COMPILED.name  # speed-ups are over it, except those of eager calls
TRAINING_CASE = "tokens hidden_size intermediate_size gated dtype pattern device mode".split()
CASE = [*TRAINING_CASE, "weight_sets"]
_MODEL = "model num_layers hidden_size intermediate_size num_heads vocab_size gated".split()
STEP_CASE = [*_MODEL, "context", "micro_batch", "tokens", "precision", "checkpoint_activations"]
STEP_CASE += ["profile", "device"]
MODEL_CASE = [*_MODEL, *"dtype profile sdpa batch context tokens device".split()]
CALL = ["commit", "command", "date"]
SAME_ACTIVE = 0.01  # the same seed gives the same activity, except for rounding
_LEAST_ACTIVE = 0.01  # fewer active neurons count as so many
# These have no times, so that rows of any device serve.
_UNTIMED = "quality.csv", "fuzz.csv"


class Bench:
    """The CSV files of `twell measure` in a folder, of one device.

    device: its name; by default that with the most rows, "" where the folder has none. Raises
    FileNotFoundError for a `required` file that is not there.
    """

    def __init__(
        self, folder: str | Path, required: Sequence[str] = (), device: str | None = None
    ) -> None:
        self.folder = Path(folder)
        for file in required:
            if not (self.folder / file).is_file():
                raise FileNotFoundError(
                    f"nothing is recorded in {self.folder / file}; "
                    "docs/benchmarks.md says which command measures it"
                )
        self.device = self._most_rows() if device is None else device

    def _most_rows(self) -> str:
        files = [path for path in self.folder.glob("*.csv") if path.name not in _UNTIMED]
        tables = [pd.read_csv(path, usecols=lambda name: name == "device") for path in files]
        devices = pd.concat(tables).get("device", pd.Series()) if tables else pd.Series()
        return next(iter(devices.mode()), "")

    def rows(
        self,
        file: str,
        table: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
        where: str | None = None,
    ) -> pd.DataFrame:
        """Return the rows of a file, or a table of them, of this device and as `query` keeps them.

        Those of quality.csv and fuzz.csv are of any device. Empty where there is no such file or no
        such row.
        """
        if not (self.folder / file).is_file():
            return pd.DataFrame()
        rows = pd.read_csv(self.folder / file)
        rows = rows if table is None or rows.empty else table(rows)
        if file not in _UNTIMED and len(rows):
            rows = rows[rows["device"] == self.device]
        return rows.query(where) if where and len(rows) else rows


def _levels(rows: pd.DataFrame, case: list[str], within: float) -> pd.DataFrame:
    """Return the rows by `active`. Neighbours within a share of each other get one `level`."""
    rows = rows.sort_values("active", kind="stable")
    by_case = [rows[column] for column in case]
    jumps = rows["active"].groupby(by_case).diff() > within * rows["active"]
    return rows.assign(level=jumps.groupby(by_case).cumsum())


def _newest(rows: pd.DataFrame, case: list[str]) -> pd.DataFrame:
    """Return the rows of the newest date of each case, with `active` equal within SAME_ACTIVE."""
    levels = _levels(rows, case, SAME_ACTIVE).groupby([*case, "level"])
    return rows[rows["date"] == levels["date"].transform("max").reindex(rows.index)]


def _middle(rows: pd.DataFrame, case: list[str]) -> pd.DataFrame:
    """Return `_newest`, with the median of calls that repeat one command at one commit.

    Repeated calls become one call of the newest date. An even number loses its oldest call, and
    uncommitted code all but the newest. Added: calls, their number, and range, highest over lowest.
    """
    call = [*case, "commit", "command", "active"]
    newest = _newest(rows, case)[[*call, "date"]].rename(columns={"date": "newest"})
    rows = rows.merge(newest.drop_duplicates()).sort_values("p50", kind="stable")
    rows = rows[(rows["date"] == rows["newest"]) | ~rows["commit"].str.contains("dirty|unknown")]
    repeated = rows.groupby(call)
    ratio = repeated["speedup"].transform("max") / repeated["speedup"].transform("min")
    rows = rows.assign(calls=repeated["date"].transform("size"), range=ratio)
    rows = rows[(rows["calls"] % 2 == 1) | (rows["date"] > repeated["date"].transform("min"))]
    middle = rows.groupby(call)["speedup"].rank(method="first") == (rows["calls"] + 1) // 2
    dates = rows.groupby([name for name in call if name != "provider"])["date"].transform("max")
    return rows.assign(date=dates)[middle].drop(columns="newest").sort_index()


def of_one_commit(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the commit that has most of them."""
    return rows[rows["commit"].isin(rows["commit"].mode()[:1])]


def _beside_dense(
    rows: pd.DataFrame, case: list[str], compared: Sequence[str] = ()
) -> pd.DataFrame:
    """Return each provider's newest rows of a case beside dense torch.compile of the same call.

    Columns in % over dense: energy_change, and NAME_change of those `compared`.
    """
    call = [*case, *CALL, "active"]
    rows = rows.drop_duplicates([*call, "provider"], keep="last")
    rows = rows.assign(**{name: np.nan for name in ("p20", "p80") if name not in rows})
    plain = rows["provider"] == BASELINE
    if "mode" in rows:
        plain |= (rows["provider"] == providers.DENSE_EAGER.name) & (rows["mode"] == "eager")
    dense = rows.loc[plain, [*call, "p50", "p20", "p80", "energy", *compared]]
    dense = dense.sort_values("p50").drop_duplicates(call)
    table = rows.merge(dense, on=call, suffixes=("", "_dense"))
    table = _middle(table.assign(speedup=table["p50_dense"] / table["p50"]), [*case, "provider"])
    table["speedup_low"] = table.pop("p20_dense") / table["p80"]
    table["speedup_high"] = table.pop("p80_dense") / table["p20"]
    table["energy_per_token"] = table["energy"] / table["tokens"]
    for name in ("energy", *compared):
        table[f"{name}_change"] = 100 * (table[name] / table.pop(f"{name}_dense") - 1)
    return table.reset_index(drop=True)


def speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of ffn.csv beside dense torch.compile (`_beside_dense`)."""
    return _beside_dense(rows, CASE)


def training_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of training.csv, forward and backward, beside dense torch.compile.

    Added to `_beside_dense`: held_share, memory in % of dense.
    """
    table = _beside_dense(rows, TRAINING_CASE, ["held"])
    return table.assign(held_share=100 + table["held_change"])


def crossovers(table: pd.DataFrame) -> pd.DataFrame:
    """Return the active neurons up to which each sparse path is faster than dense, a row a line.

    table: `speedups`. Columns: the case, provider, and crossover, where the speed-up first falls
    below 1 as activity rises, interpolated in the logarithms of both; NaN where it does not fall.
    """
    paths = table[table["provider"].map(providers.is_sparse).astype(bool) & (table["active"] > 0)]
    case = [column for column in CASE if column in table]
    rows = []
    for keys, line in paths.groupby([*case, "provider"]):
        line = line.sort_values("active")
        result = crossing(list(zip(line["active"].tolist(), line["speedup"].tolist(), strict=True)))
        rows.append((*keys, result if 0 < result < line["active"].max() else np.nan))
    return pd.DataFrame(rows, columns=[*case, "provider", "crossover"])


def at_level(table: pd.DataFrame, active: float) -> pd.DataFrame:
    """Return the rows of each case whose active neurons are nearest to `active`, by ratio."""
    distance = np.log(table["active"].clip(lower=_LEAST_ACTIVE) / active).abs()
    case = [table[column] for column in [*CASE, *_LIKE] if column in table]
    nearest = distance.groupby(case).transform("min") + SAME_ACTIVE
    return table[distance <= nearest].reset_index(drop=True)


def near_level(
    table: pd.DataFrame, level: float, column: str = "active", within: float = 1.2
) -> pd.DataFrame:
    """Return the rows at the level nearest to `level`, if their ratio is at most `within`."""
    distance = np.log(table[column].where(table[column] > 0) / level).abs()
    return table[(distance <= distance.min() + SAME_ACTIVE) & (distance <= np.log(within))]


def by_case(table: pd.DataFrame) -> pd.DataFrame:
    """Return `speedups` to be read: a row a case, a column a provider."""
    shown = "pattern hidden_size intermediate_size gated tokens active mode".split()
    apart = ["weight_sets", "date", "commit"]
    table = table.assign(date=table["date"].str[:10], commit=table["commit"].str[:7])
    cases = table.pivot_table(index=[*shown, *apart], columns="provider", values="speedup")
    return cases.droplevel(apart).rename_axis(index=HEADS)


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return smaller models first, then smaller batches, then fewer active neurons."""
    order = ["num_layers", "model", "tokens", "active"]
    return table.sort_values(order, kind="stable", ignore_index=True)


def step_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of train_step.csv beside dense with compiled layers, with tokens of a step."""
    rows = rows.assign(tokens=rows["micro_batch"] * rows["context"])
    return _in_order(_beside_dense(rows, STEP_CASE, ["peak"]))


def model_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of model.csv, forward passes, beside dense with compiled layers (Table 1)."""
    return _in_order(_beside_dense(rows, [*MODEL_CASE, "mode"], ["peak"]))


def decode_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of decode.csv beside dense with layers compiled alike.

    tuned: whether the compiler tuned both sides; `provider` is then the untuned name. Tuning
    differs from call to call, so each provider's fastest tuned row counts, whatever its call.
    """
    case = [*MODEL_CASE, "steps", "mode", "tuned"]
    parsed = rows["provider"].map(providers.Provider.parse)
    tuned = parsed.map(lambda provider: provider.compilation == providers.TUNED)
    rows = rows.assign(provider=[provider.untuned.name for provider in parsed], tuned=tuned)
    fastest = rows[rows["tuned"]].sort_values("p50").drop_duplicates([*case, "active", "provider"])
    # Ratios are taken within a call, so these become one call.
    fastest = fastest.assign(**fastest.groupby([*case, "active"])[CALL].transform("first"))
    return _in_order(_beside_dense(pd.concat([rows[~rows["tuned"]], fastest]), case))


def beside_imposed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the gains of trained models beside random weights with their activity.

    table: `model_speedups` or `decode_speedups`; of each case with the profiles "checkpoint" and
    "imposed". verdict: "higher" or "lower" where the imposed range from p20 to p80 lies apart from
    that of the trained model, else "alike".
    """
    case = ["model", "batch", "context", "mode", "provider", "device"]
    numbers = ["active", "speedup", "speedup_low", "speedup_high"]
    trained, imposed = (
        table.loc[table["profile"] == name, case + numbers] for name in ("checkpoint", "imposed")
    )
    imposed = imposed.rename(columns={name: f"imposed_{name}" for name in numbers})
    both = trained.merge(imposed, on=case)
    higher = both["imposed_speedup_low"] > both["speedup_high"]
    lower = both["imposed_speedup_high"] < both["speedup_low"]
    return both.assign(verdict=np.select([higher, lower], ["higher", "lower"], "alike"))


def level_gains(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the gain of our compiled bf16 kernels by level, most active first (Figs 4, 5).

    table: `model_speedups` or `step_speedups` of one model and batch. Columns: active, provider,
    faster with its _low and _high, and saved, the fall of the column `by`, all in % of dense.
    """
    ours = *providers.model_providers(True)[1:], providers.UNION_COMPILED
    gains = table[table["provider"].isin([one.name for one in ours])]
    ends = ("", "_low", "_high")
    faster = {f"faster{end}": 100 * (gains[f"speedup{end}"] - 1) for end in ends}
    gains = gains[["active", "provider"]].assign(**faster, saved=-gains[by])
    return gains.sort_values(["active", "provider"], ascending=[False, True], ignore_index=True)


def layer_contributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of model_layers.csv with the ms that each layer saves (Figs 6, 10, 11).

    The newest call of each case and level counts. saved and auto_saved: the ms by which the sparse
    path and "auto" are faster than dense.
    """
    timed = rows.dropna(subset=["dense", "sparse", "auto"])
    levels = timed.rename(columns={"level": "active", "active": "of_layer"})
    table = timed.loc[_newest(levels, MODEL_CASE).index]
    saved, auto = table["dense"] - table["sparse"], table["dense"] - table["auto"]
    return table.assign(saved=saved, auto_saved=auto).reset_index(drop=True)


def correlation(table: pd.DataFrame) -> float:
    """Return Pearson's r of active neurons and saved time."""
    return float(table["active"].corr(table["saved"]))


def layer_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return where the time of one decoder layer goes, a row a provider (model_parts.csv).

    Columns: the case, active, provider, a column a part in ms, total, limit (the speed-up if up and
    down took no time, by Amdahl's law) and speedup. Where the kernels took longer under the
    profiler than the layer without it, the parts are scaled to the layer.
    """
    index = [*MODEL_CASE, "active", "provider"]
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


SCALE = {  # the paper's metric in Table 1, its name here, and its unit
    "forward_throughput": ("forward speed", "tokens/ms"),
    "energy_per_token": ("forward energy", "mJ/token"),
    "training_throughput": ("training speed", "tokens/ms"),
    "training_peak_memory": ("training memory", "GB"),
}
_CHANGES = {"energy_per_token": "energy_change", "training_peak_memory": "peak_change"}


def scale_table(paper: pd.DataFrame, models: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's Table 1 beside ours, a row a quantity of SCALE and model.

    models, steps: `model_speedups` and `step_speedups` of one batch each. paper_dense,
    paper_sparse, paper_change (%), paper_active, paper_device and paper_note are printed; dense,
    sparse, change, active, device and profile are ours, with compiled layers, forward
    passes by "auto", at the level of activity nearest to the paper's.
    """
    models = models.assign(forward_throughput=models["tokens"] / models["p50"])
    speed, peak = steps["tokens"] / steps["p50"], steps["peak"] / 1e9
    steps = steps.assign(training_throughput=speed, training_peak_memory=peak)
    active = paper_sizes(paper).set_index("model")["active"]
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
            rows.append(row | _ours(measured, model, metric, row["paper_active"]))
    return pd.DataFrame(rows)


def _ours(table: pd.DataFrame, model: str, column: str, active: float) -> dict:
    """Return one model's `column` at the level of activity nearest to `active`."""
    rows = table[table["model"].str.upper() == model.upper()]
    distance = np.log(rows["active"] / active).abs().fillna(0)
    rows = rows[distance <= distance.min() + SAME_ACTIVE]
    compiled = [providers.AUTO_COMPILED.name, providers.UNION_COMPILED.name]
    rows = rows[rows["provider"].isin(compiled)]
    if rows.empty:
        numbers = dict.fromkeys(["dense", "sparse", "change", "active"], np.nan)
        return numbers | {"device": "", "profile": ""}
    row = rows.iloc[-1]
    fast = column.endswith("throughput")
    change = 100 * (row["speedup"] - 1) if fast else row[_CHANGES[column]]
    # Dense of the same call: another provider may have a newer one.
    measured = {"dense": row[column] / (1 + change / 100), "sparse": row[column], "change": change}
    return measured | row[["active", "device", "profile"]].to_dict()


PAPER = "twell.sparse.paper:layer"  # the paper's inference, by `measure --provider`
PAPERS, OURS = "paper's algorithm in our kernels", "our fastest kernel"
OURS_FP8, DENSE_FP8, RELEASE = "our fastest kernel in FP8", "dense FP8", "the authors' release"
SIDES = [PAPERS, OURS, RELEASE, OURS_FP8, DENSE_FP8]
_THIRD = {PAPER: PAPERS, "study.untuned:layer": "", "study.dense:joined": "gate and up joined"}
_THIRD |= {"study.dense:max_autotune": "max-autotune", "study.dense:two_of_four": "weights in 2:4"}
_IN_FP8 = providers.FP8, providers.FP8_TENSOR
_LIKE = ["what", "model", "tokens", "pattern"]
_NEAR = 0.05  # activity of one case: the release's rows have round numbers


def like_for_like(bench: Bench, value: str = "speedup") -> pd.DataFrame:
    """Return a value, by default speed over dense torch.compile, a row a case, a column a side.

    bench: of one card; layers of 2048 x 5632, models of them, trained models. Columns: SIDES and
    each third party, dense in ms, the release's relative RMS, and of repeated calls their number
    and the widest range of a side (`_middle`). Of each side the newest call counts, and of that
    the fastest provider, of the release the fastest call; NaN where nobody measured. Layers are
    single calls, their training steps plain ones. Activity is equal within _NEAR.
    """
    rows = pd.concat([bench.rows("release.csv"), *_own(bench)], ignore_index=True)
    columns = rows.columns.union([value, "model", "calls", "range", "relative_rms"])
    shape = "hidden_size == 2048 and intermediate_size == 5632"
    rows = rows.reindex(columns=columns).query(f"gated and ({shape} or pattern == 'checkpoint')")
    rows, case = _levels(rows.fillna({"model": ""}), _LIKE, _NEAR), [*_LIKE, "active"]
    active = rows.groupby([*_LIKE, "level"])["active"].transform("median")
    rows = rows.assign(active=active.round(1), side=rows["provider"].map(_like_side))
    newest = rows["date"] == rows.groupby([*case, "side"])["date"].transform("max")
    rows = rows[newest | (rows["side"] == RELEASE)]
    ours = rows[rows["side"] == PAPERS].assign(side=OURS)
    best = pd.concat([rows, ours]).sort_values("speedup", kind="stable")
    best = best.drop_duplicates([*case, "side"], keep="last").set_index([*case, "side"])
    wide = best[value].unstack()
    wide = wide.reindex(columns=[*SIDES, *wide.columns.difference([*SIDES, "dense", ""])])
    sides = best.index.get_level_values("side")
    dense, release = (best[sides == side].droplevel("side") for side in ("dense", RELEASE))
    repeated = best[sides.isin(SIDES) & (best["calls"] > 1)].groupby(case)
    named = {"dense, ms": dense["p50"], "the release's error": release["relative_rms"]}
    return wide.assign(**named, calls=repeated["calls"].max(), range=repeated["range"].max())


def _own(bench: Bench) -> Iterator[pd.DataFrame]:
    """Yield our rows beside dense, by what they time; the pattern of models is their profile."""
    compiled = "mode == 'stream' and provider.str.contains('torch.compile')"
    parts = {
        "layer": ("ffn.csv", speedups, "mode == 'stream'"),
        "layer step": ("training.csv", training_speedups, "mode == 'eager'"),
        "model, compiled": ("model.csv", model_speedups, compiled),
        "optimiser step": ("train_step.csv", step_speedups, "not checkpoint_activations"),
    }
    for one in (bench, Bench(bench.folder / "auto", device=bench.device)):
        for what, part in parts.items():
            if len(table := one.rows(*part)):
                pattern = table["pattern" if "pattern" in table else "profile"]
                yield table.assign(what=what, pattern=pattern)


def _like_side(name: str) -> str:
    """Return the column of a provider: a side, "dense", or a third party; "" for any other."""
    if name == "release":
        return RELEASE
    provider = providers.Provider.parse(name)
    if provider.third_party:
        return _THIRD.get(provider.backend, provider.backend)
    if "dense" in (provider.backend, provider.path) and provider.precision in _IN_FP8:
        return DENSE_FP8
    if provider.backend == "dense":
        return "dense" if name == BASELINE else ""
    if provider.path == "hybrid":
        return PAPERS
    return {None: OURS, providers.FP8: OURS_FP8}.get(provider.precision, "")
