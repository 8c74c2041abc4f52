"""Figures over training tokens and over time: what more text changes, who is first at a loss."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from study import analysis
from study.plots.base import (
    GREEN,
    PAGE,
    _caption,
    _figure,
    _key,
    _legend,
    _level_colours,
    _sentence,
    plain,
)
from study.plots.training import _AGAIN, BACKENDS, _number

_APART = 1.05  # ratio of places of neighbouring levels, so that no bar hides another one


def over_tokens(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw active neurons, dead neurons and the change of cross-entropy over training tokens.

    table: `analysis.over_tokens`, a line a level of L1; of cross-entropy a dashed one for the
    training text. Bars are its intervals, of solid lines. A single run has none. about: the model.
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
            if name == "change":
                again = rows["train_change"].astype(float)
                ax.plot(tokens, again, **look | {"linestyle": "--", "markerfacecolor": "white"})
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
    plain(axes[0, 0].yaxis)
    axes[0, 2].axhline(0, color="black", linewidth=1)
    lines = {f"L1 = {analysis.level_name(l1)}": _key(c) for l1, c in colours.items()}
    lines |= {"on held-out text": _key("0.4"), "on the training text": _key("0.4", linestyle="--")}
    _legend(figure, "lower center", lines, ncols=len(lines))
    seeds = _number(table["runs"].astype(int)).replace("run", "seed")
    bars = "Bars are 95% intervals over seeds, of solid lines; points without one are of a single "
    bars += "run, or hide it. Points are shifted sideways so that bars stay visible."
    _caption(figure, _sentence(about), f"{seeds} a point, each with a schedule of its own.", bars)
    return figure


def race(raced: pd.DataFrame, ends: pd.DataFrame, curves: pd.DataFrame, about: str = "") -> Figure:
    """Draw held-out cross-entropy over minutes of training, when each run has the same, and speed.

    raced, ends: `analysis.race` and `analysis.reached` of it; curves: `analysis.computed_curves` of
    the same runs. about: the model.
    """
    figure, ((left, right),) = _figure(PAGE, 2.7, 1, 2)
    legend = {}
    speeds = curves[curves["metric"] == "tokens_per_second"]
    seen: list[str] = []
    for (run, backend, level), rows in raced.groupby(
        ["run", "backend", "l1_coefficient"], sort=False
    ):
        rows = rows[rows["tokens"] > 0]
        colour = BACKENDS.get(backend, GREEN)
        look = {"color": colour, "linestyle": _AGAIN[seen.count(backend)]}
        seen.append(backend)
        name = {"triton": "sparse kernels"}.get(backend, backend)
        end = ends[ends["run"] == run].iloc[0]
        label = f"{name}, L1 = {analysis.level_name(level)}: {end['seconds'] / 60:.1f} min"
        memory = curves[(curves["run"] == run) & (curves["metric"] == "peak_memory")]
        label += _gigabytes(end["peak_memory"], memory["value"])
        legend[label] = _key(**look)
        left.plot(rows["seconds"] / 60, rows["cross_entropy"], marker="o", ms=3, **look)
        place = end["seconds"] / 60, end["cross_entropy"]
        left.plot(*place, marker="|", markersize=12, color=colour)
        line = speeds[speeds["run"] == run].sort_values("step")
        right.plot(line["tokens"] / 1e6, line["value"] / 1e3, linewidth=1, **look)
    target = ends["cross_entropy"].iloc[0]
    left.axhline(target, color="0.5", linestyle="--", linewidth=0.8)
    left.set(xlabel="training time (minutes)", ylabel="held-out cross-entropy (nats)")
    left.margins(0.08, 0.2)
    right.set(xlabel="training tokens (millions)", ylabel="speed (thousand tokens/s)")
    right.set_ylim(bottom=0)
    _legend(figure, "lower center", legend, ncols=2)
    line = (
        f"The dashed line is {target:.3f} nats, which all reach, after the minutes in the legend; "
    )
    line += "between validations a monotone cubic stands, and their time does not count."
    runs = "One run each. GB: peak memory of a GPU, and that of the last steps."
    _caption(figure, _sentence(about), runs, line)
    return figure


def _gigabytes(peak: float, course: pd.Series) -> str:
    """The most memory of a training, and that at its end where it is less; a CPU has none."""
    if course.empty:
        return ""
    most, last = (f"{value / 1e9:.0f}" for value in (peak, course.iloc[-1]))
    return f", {most} GB" + (f", then {last} GB" if last != most else "")
