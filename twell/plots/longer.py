"""Figures over training tokens and over time: what more text changes, who is first at a loss."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from twell import analysis
from twell.plots.base import (
    COLUMN,
    GREEN,
    PAGE,
    _caption,
    _figure,
    _key,
    _legend,
    _level_colours,
    _note,
    _panel,
    _plain,
    _sentence,
)
from twell.plots.training import BACKENDS, _number

_APART = 1.05  # ratio of places of neighbouring levels, so that no bar hides another one


def over_tokens(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw active neurons, dead neurons and the change of cross-entropy over training tokens.

    table: `analysis.over_tokens`, a line a level of L1. Bars are its intervals, which a single run
    has not. about: the model.
    """
    figure, axes = _figure(PAGE, 2.7, 1, 3)
    colours = _level_colours(table["l1_coefficient"])
    panels = {
        "active": "active neurons per token",
        "dead": "dead neurons (%)",
        "change": "cross-entropy (% over L1 = 0)",
    }
    for ax, (name, label) in zip(axes[0], panels.items(), strict=True):
        for place, (level, rows) in enumerate(table.groupby("l1_coefficient")):
            if name == "change" and not level:
                continue
            tokens, height = rows["tokens"].astype(float) / 1e6, rows[name].astype(float)
            tokens *= _APART ** (place - (len(colours) - 1) / 2)
            look = {"color": colours[level], "marker": "o", "markersize": 3.5, "linewidth": 1}
            ax.plot(tokens, height, **look)
            known = rows[f"{name}_low"].notna()
            ends = [height - rows[f"{name}_low"], rows[f"{name}_high"] - height]
            ends = [end[known].astype(float) for end in ends]
            ax.errorbar(tokens[known], height[known], ends, fmt="none", ecolor=colours[level])
        ax.set(xscale="log", xlabel="training tokens (millions)", ylabel=label)
        ax.set_xticks(sorted(table["tokens"].astype(float).unique() / 1e6))
        ax.margins(0.12)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    axes[0, 0].set_yscale("log")
    _plain(axes[0, 0].yaxis)
    axes[0, 2].axhline(0, color="black", linewidth=1)
    levels = {f"L1 = {analysis.level_name(l1)}": _key(c) for l1, c in colours.items()}
    _legend(figure, "lower center", levels, ncols=len(levels))
    seeds = _number(table["runs"].astype(int)).replace("run", "seed")
    bars = "Bars are 95% intervals over seeds; points without one are single runs, the change from "
    bars += "a single run, or hide it. Points on as many tokens stand side by side."
    _caption(figure, _sentence(about), f"{seeds} a point, each with a schedule of its own.", bars)
    return figure


def race(raced: pd.DataFrame, ends: pd.DataFrame, about: str = "") -> Figure:
    """Draw held-out cross-entropy over minutes of training, and when each run has the same loss.

    raced, ends: `analysis.race` and `analysis.reached` of it. about: the model.
    """
    figure, ax = _panel(1.4 * COLUMN, 2.7)
    for (run, backend, level), rows in raced.groupby(
        ["run", "backend", "l1_coefficient"], sort=False
    ):
        rows = rows[rows["tokens"] > 0]
        colour = BACKENDS.get(backend, GREEN)
        name = {"triton": "sparse kernels"}.get(backend, backend)
        label = f"{name}, L1 = {analysis.level_name(level)}"
        if pd.notna(peak := rows["peak_memory"].iloc[0]):  # a CPU has none
            label += f", {peak / 1e9:.0f} GB"
        look = {"marker": "o", "markersize": 3, "color": colour, "label": label}
        ax.plot(rows["seconds"] / 60, rows["cross_entropy"], **look)
        end = ends[ends["run"] == run].iloc[0]
        place = end["seconds"] / 60, end["cross_entropy"]
        ax.plot(*place, marker="|", markersize=12, color=colour)
        _note(ax, f"{place[0]:.1f} min", place, (0, -14), ha="center", color=colour)
    target = ends["cross_entropy"].iloc[0]
    ax.axhline(target, color="0.5", linestyle="--", linewidth=0.8)
    ax.set(xlabel="training time (minutes)", ylabel="held-out cross-entropy (nats)")
    ax.margins(0.08, 0.2)
    _legend(figure, "lower center", ncols=2)
    line = f"The dashed line is {target:.3f} nats, which all reach; between validations it is "
    line += "interpolated."
    runs = "One run each; minutes without validation; GB: the most memory of the whole training."
    _caption(figure, _sentence(about), runs, line)
    return figure
