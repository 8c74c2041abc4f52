"""The paper's algorithms by our kernels, the best of ours, and the authors' release, on one card."""

from collections.abc import Iterator
from functools import partial

import pandas as pd

from study.analysis import speed
from twell.measure import providers
from twell.measure.providers import Provider

PAPER = "twell.sparse.paper:layer"  # the paper's inference, by `measure --provider`
PAPER_SIDE, OURS = "the paper's algorithm, ours", "best of ours"
OURS_FP8, RELEASE = "best of ours, FP8", "the authors' release"
SIDES = [PAPER_SIDE, OURS, OURS_FP8, RELEASE]
_CASE = ["what", "model", "tokens", "pattern"]
_NEAR = 0.05  # activity of one case: the release's rows have round numbers
_PROFILES = "profile in ('paper', 'flat') and mode == 'stream'"
_LAYER = "gated and hidden_size == 2048 and intermediate_size == 5632"


def like_for_like(bench: speed.Bench) -> pd.DataFrame:
    """Return speed-ups over dense torch.compile of the same call, a row a case, a column a side.

    bench: of one card; layers of 2048 x 5632. Columns: SIDES and each third party, dense in ms, the
    release's relative RMS. Of each provider the newest call counts, of a side the fastest provider;
    NaN where nobody measured. Layers are single calls, their training steps plain ones. Activity is
    equal within _NEAR. data/README.md says where rows of release.csv are from.
    """
    rows = pd.concat([bench.rows("release.csv"), *_own(bench)], ignore_index=True).query(_LAYER)
    rows = rows.assign(model=rows["model"].fillna("")).sort_values("active", kind="stable")
    jumps = rows.groupby(_CASE)["active"].diff() > _NEAR * rows["active"]
    level = jumps.groupby([rows[column] for column in _CASE]).cumsum()
    case = [*_CASE, "active"]
    active = rows.groupby([*_CASE, level.rename("level")])["active"].transform("median")
    rows = rows.assign(active=active.round(1), side=rows["provider"].map(_side))
    rows = rows.sort_values("date", kind="stable").drop_duplicates([*case, "provider"], keep="last")
    ours = rows[rows["side"] == PAPER_SIDE].assign(side=OURS)
    wide = pd.concat([rows, ours]).pivot_table("speedup", case, "side", aggfunc="max")
    dense, release = (
        rows[rows["side"] == side].set_index(case)[column]
        for side, column in (("dense", "p50"), (RELEASE, "relative_rms"))
    )
    wide = wide.reindex(columns=[*SIDES, *wide.columns.difference([*SIDES, "dense", ""])])
    return wide.assign(**{"dense, ms": dense, "the release's error": release})


def _models(rows: pd.DataFrame, compiled: bool) -> pd.DataFrame:
    """Return `model_speedups` of compiled models, or of eager ones over eager dense."""
    parsed = rows["provider"].map(Provider.parse)
    rows = rows[[one.compiled == compiled for one in parsed]]
    return speed.model_speedups(rows.replace(providers.DENSE_EAGER.name, speed.BASELINE))


def _own(bench: speed.Bench) -> Iterator[pd.DataFrame]:
    """Yield our rows beside dense, by what they time; the pattern of models is their profile."""
    parts = {
        "layer": ("ffn.csv", speed.speedups, "mode == 'stream'"),
        "layer step": ("training.csv", speed.training_speedups, "mode == 'eager'"),
        "model": ("model.csv", partial(_models, compiled=False), _PROFILES),
        "model, compiled": ("model.csv", partial(_models, compiled=True), _PROFILES),
        "optimiser step": ("train_step.csv", speed.step_speedups, "not checkpoint_activations"),
    }
    for what, part in parts.items():
        for one in (bench, speed.Bench(bench.folder / "auto", device=bench.device)):
            table = one.rows(*part)
            if len(table):
                pattern = table["pattern" if "pattern" in table else "profile"]
                yield table.assign(what=what, pattern=pattern)


def _side(name: str) -> str:
    """Return the column of a provider: a side, "dense", or a third party; "" for any other."""
    if name == "release":
        return RELEASE
    provider = Provider.parse(name)
    if provider.backend == PAPER or provider.path in ("twell", "hybrid"):
        return PAPER_SIDE
    if provider.third_party:
        return provider.backend
    if provider.backend == "dense":
        return "dense" if name == speed.BASELINE else ""
    return {None: OURS, providers.FP8: OURS_FP8}.get(provider.precision, "")
