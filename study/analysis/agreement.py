"""Where activity is, in every recorded model: which findings hold in all, and which in some."""

from __future__ import annotations

import pandas as pd

from study.analysis.runs import choice, fits
from twell.tables import logged_layers

PEAK_WITHIN = 0.25  # largest distance from the paper's peak, as a share of the depth
# Column of `findings` -> what the paper says of its models.
FINDINGS = {
    "first_two_least": "the first two layers are the least active",
    "ten_times": "the busiest token of every layer has ten times its mean",
    "early_peak": "activity peaks near a fifth of the depth",
    "no_overflow": "no tile overflows at compression 8",
    "first_is_most": "the first token is the most active",
}


def findings(
    runs: pd.DataFrame, log: pd.DataFrame, kept: pd.DataFrame, peak_depth: float
) -> pd.DataFrame:
    """Return a row a complete ReLU run without a teacher: which of FINDINGS hold in it.

    A run with a teacher is left out: it began with the activity of another model. kept:
    `kept_activity` of traced models, with a column run. no_overflow and first_is_most are None in
    other models, first_two_least in models of up to three layers. peak_depth: the paper's, from 0
    (first layer) to 1 (last). Other columns: run, setting (the run's name without its seed),
    choice, l1_coefficient, tokens, num_layers, seed, least and peak (layers, from 0), ratio_least
    and ratio_most (busiest token over mean), overflow (share of tokens, in the layer with most),
    first and later (active neurons).
    """
    rows = []
    runs = runs[runs["complete"].astype(bool)] if len(runs) else runs
    runs = runs.assign(choice=choice(runs))
    by_run = dict(tuple(log.groupby("run")))
    traced = dict(tuple(kept.groupby("run"))) if len(kept) else {}
    for run in runs.to_dict("records"):
        if run["activation"] != "relu" or pd.notna(run.get("teacher")):
            continue
        table = logged_layers(by_run[run["run"]], run["intermediate_size"]).set_index("layer")
        least, peak = table["mean"].nsmallest(2).index.tolist(), int(table["mean"].idxmax())
        ratios = table["max_over_mean"]
        row = {
            name: run[name] for name in "run choice l1_coefficient tokens num_layers seed".split()
        }
        row |= {"setting": run["run"].partition("-seed-")[0], "least": least[0], "peak": peak}
        row |= {"ratio_least": ratios.min(), "ratio_most": ratios.max()}
        depth = peak / max(len(table) - 1, 1)
        # In few layers this says little: of two layers, both are the least active.
        row["first_two_least"] = set(least) == {0, 1} if len(table) > 3 else None
        row |= {"ten_times": bool(ratios.min() > 10)}
        row["early_peak"] = abs(depth - peak_depth) < PEAK_WITHIN
        row |= {"no_overflow": None, "first_is_most": None}
        if run["run"] in traced:
            row |= _of_trace(traced[run["run"]])
        rows.append(row)
    return pd.DataFrame(rows)


def _of_trace(kept: pd.DataFrame) -> dict:
    """Columns of one model's `kept_activity`."""
    whole = kept[kept["layer"] == -1].set_index("metric")["value"]
    overflow = kept.loc[kept["metric"] == "overflow", "value"].max()
    row = {"overflow": overflow, "first": whole["first"], "later": whole["later"]}
    first_is_most = bool(whole["most"] == 0 and whole["first"] > whole["later"])
    return row | {"no_overflow": bool(overflow == 0), "first_is_most": first_is_most}


def groups(table: pd.DataFrame, setting: str, at_level: str) -> dict[str, pd.DataFrame]:
    """Return the rows of `findings` of three groups of runs, each within the next.

    seeds: of one setting; level: of one L1 level, `at_level` has patterns of their names, each a
    training of its own; all.
    """
    level = table[fits(table["run"], at_level)]
    return {"seeds": table[table["setting"] == setting], "level": level, "all": table}


def shared(table: pd.DataFrame) -> pd.DataFrame:
    """Return how many models of a table of `findings` each finding holds in, a row a finding.

    Columns: finding, models (how many are known), holds (in how many of these), and verdict:
    "in all", "in none" or "in some"; "one model" where only one is known, empty where none is.
    """
    rows = []
    for name in FINDINGS:
        known = table[name].dropna().astype(bool)
        holds, models = int(known.sum()), len(known)
        verdict = {0: "in none", models: "in all"}.get(holds, "in some")
        rows.append((name, holds, models, verdict if models > 1 else "one model" * models))
    return pd.DataFrame(rows, columns=["finding", "holds", "models", "verdict"])
