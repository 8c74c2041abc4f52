"""Figures of training: sweeps (Figs 2, 3, 9), choices of training (Fig. 8), sizes (section 4.2), and one training computed in several ways."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from twell import analysis
from twell.plots.base import (
    ACTIVE_FLOOR,
    BLUE,
    COLUMN,
    GREEN,
    ORANGE,
    PAGE,
    PURPLE,
    _figure,
    _level_colours,
    _plain,
)

STATUS_MARKERS = {"alive": "o", "unused": "s", "dead layer": "X"}
_ON_WHITE = {
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    "zorder": 4,
}  # text above lines


# --- sweeps (Figs 2, 3, 9) ----------------------------------------------------------------------


def _signed(percent: float) -> str:
    return f"{percent:+.1f}%".replace("-", "−")


def _level_lines(ax: Axes, curves: pd.DataFrame, window: int = 1, **options) -> None:
    """One line a run, coloured by its L1 coefficient; the running mean over `window` points."""
    colours = _level_colours(curves["l1_coefficient"])
    labelled = set()
    for (l1, _), curve in curves.groupby(["l1_coefficient", "run"]):
        smooth = curve["value"].rolling(window, min_periods=1).mean()
        label = None if l1 in labelled else analysis.level_name(l1)
        ax.plot(curve["tokens"] / 1e6, smooth, color=colours[l1], label=label, **options)
        labelled.add(l1)
    ax.set_xlabel("training tokens (millions)")


def fig02_training_curves(curves: pd.DataFrame) -> Figure:
    """Draw the cross-entropy over training for each L1 level, whole and its last half, smoothed over 5% of the points.

    curves: `analysis.training_curves` of cross_entropy.
    """
    figure, axes = _figure(PAGE, 2.4, 1, 2)
    window = max(1, curves.groupby("run").size().max() // 20)
    half = curves[curves["tokens"] >= curves["tokens"].max() / 2]
    _level_lines(axes[0, 0], curves, window)
    # The running mean is that of the whole curve, so both panels show the same lines.
    _level_lines(axes[0, 1], curves, window)
    margin = 0.1 * (half["value"].max() - half["value"].min())
    axes[0, 1].set_xlim(half["tokens"].min() / 1e6, half["tokens"].max() / 1e6)
    axes[0, 1].set_ylim(half["value"].min() - margin, half["value"].max() + margin)
    axes[0, 0].set(ylabel="training cross-entropy (nats)")
    axes[0, 1].set_title("last half", loc="left")
    axes[0, 0].set_title("whole run", loc="left")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), title="L1 coefficient", loc="outside right center"
    )
    return figure


def fig03_frontier(table: pd.DataFrame) -> Figure:
    """Draw cross-entropy, its price in % of L1 = 0, and active neurons for each L1 level, from `analysis.sweep`.

    Levels at which a layer is dead or the feed-forward layers are unused have a mark of their own.
    """
    figure, axes = _figure(COLUMN, 3.6, 2, 1, sharex=True)
    levels = sorted(table["l1_coefficient"].unique())
    colours = _level_colours(levels)
    table = table.assign(level=table["l1_coefficient"].map(levels.index))
    means = table.groupby("level")[["cross_entropy", "cross_entropy_change", "active"]].mean()
    lowest = table.groupby("level")["cross_entropy"].min()
    prices = means.loc[means.index > 0, "cross_entropy_change"].dropna().map(_signed)
    notes = {"cross_entropy": prices, "active": means["active"].map("{:.3g}".format)}
    for ax, column in zip(axes.flat, notes, strict=True):
        floor = ACTIVE_FLOOR if column == "active" else None
        heights = means[column].clip(lower=floor)
        ax.plot(heights, color="0.7", linewidth=1, zorder=1)
        for status, rows in table.groupby("status"):
            colour = [colours[l1] for l1 in rows["l1_coefficient"]]
            ax.scatter(
                rows["level"],
                rows[column].clip(lower=floor),
                28,
                colour,
                marker=STATUS_MARKERS[status],
            )
        for level, note in notes[column].items():  # where the line does not go
            if column == "active":  # the line falls to the right
                place = {"xy": (level, heights[level]), "xytext": (4, 4), "ha": "left"}
            else:
                rises = level - 1 in heights.index and heights[level - 1] < heights[level]
                place = {
                    "xy": (level, lowest[level]),
                    "xytext": (3 * rises, -12),
                    "ha": "left" if rises else "center",
                }
            ax.annotate(note, textcoords="offset points", fontsize=6.5, **place, **_ON_WHITE)
        ax.margins(0.09, 0.2)
    axes[0, 0].set_ylabel("cross-entropy (nats)")
    axes[1, 0].set(yscale="log", ylabel="active neurons per token", xlabel="L1 coefficient")
    axes[1, 0].set_xticks(range(len(levels)), [analysis.level_name(l1) for l1 in levels])
    _plain(axes[1, 0].yaxis)
    names = {"alive": "alive", "unused": "feed-forward unused", "dead layer": "dead layer"}
    shown = [status for status in names if status in set(table["status"])]
    handles = [
        Line2D([], [], color="0.55", marker=STATUS_MARKERS[s], linestyle="", markersize=5)
        for s in shown
    ]
    labels = [names[status] for status in shown]
    if shown != ["alive"]:
        figure.legend(
            handles, labels, loc="outside upper center", ncols=3, columnspacing=1, handletextpad=0
        )
    return figure


def frontier(table: pd.DataFrame) -> Figure:
    """Draw cross-entropy against the share of active neurons, a line for each number of training tokens.

    table: `analysis.levels` of one or more sweeps. Bars are the standard deviation over seeds, dashed lines the price that
    the paper accepts (analysis.MAX_PRICE above L1 = 0), the dotted one 95% inactive neurons. Levels at which a layer is
    dead or the feed-forward layers are unused have a mark of their own and are not joined.
    """
    figure, axes = _figure(COLUMN, 2.9)
    ax = axes[0, 0]
    budgets = sorted(table["tokens"].unique())
    for tokens, colour in zip(budgets, [BLUE, ORANGE, GREEN, PURPLE], strict=False):
        rows = table[table["tokens"] == tokens].sort_values("active")
        share = 100 * rows["active_fraction"].clip(lower=1e-6)
        alive = rows["status"] == "alive"
        ax.plot(
            share[alive],
            rows["cross_entropy"][alive],
            color=colour,
            label=f"{tokens / 1e6:.3g} M tokens",
        )
        seeds = rows["runs"] > 1
        neurons = (rows["active"] / rows["active_fraction"]).max()
        bars = {
            "xerr": 100 * rows["active_std"][seeds] / neurons,
            "yerr": rows["cross_entropy_std"][seeds],
        }
        ax.errorbar(
            share[seeds], rows["cross_entropy"][seeds], **bars, fmt="none", ecolor=colour, capsize=2
        )
        for status, some in rows.groupby("status"):
            marker = {"color": colour, "marker": STATUS_MARKERS[status], "s": 22, "zorder": 3}
            ax.scatter(share[some.index], some["cross_entropy"], **marker)
        dense = rows.loc[rows["l1_coefficient"] == 0, "cross_entropy"]
        if len(dense):
            ax.axhline(
                (1 + analysis.MAX_PRICE / 100) * dense.item(),
                color=colour,
                linestyle="--",
                linewidth=0.8,
            )
        if tokens == budgets[0]:
            # Below the points, where the line of a frontier does not go, and upright, since levels may be close.
            lowest = rows["cross_entropy"] - rows["cross_entropy_std"].fillna(0)
            for x, y, l1 in zip(share, lowest, rows["l1_coefficient"], strict=True):
                place = {
                    "xytext": (0, -6),
                    "textcoords": "offset points",
                    "ha": "center",
                    "va": "top",
                }
                ax.annotate(
                    analysis.level_name(l1), (x, y), fontsize=6.5, rotation=90, **place, **_ON_WHITE
                )
    inactive = ax.axvline(5, color="0.5", linestyle=":", linewidth=1)
    ax.set(
        xscale="log", xlabel="active neurons per token (% of all)", ylabel="cross-entropy (nats)"
    )
    ax.margins(0.1, 0.4)
    _plain(ax.xaxis)
    price = Line2D([], [], color="0.5", linestyle="--", linewidth=0.8)
    lines, names = ax.get_legend_handles_labels()
    others = {f"{analysis.MAX_PRICE:g}% above L1 = 0": price, "95% inactive": inactive}
    figure.legend(
        [*lines, *others.values()], [*names, *others], loc="outside upper center", ncols=2
    )
    return figure


def fig09_activity_over_training(
    active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int
) -> Figure:
    """Draw active neurons and the dead fraction over training for each L1 level.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction; window_tokens: for how many
    tokens a neuron that counts as dead was silent.
    """
    figure, axes = _figure(PAGE, 2.4, 1, 2)
    _level_lines(axes[0, 0], active.assign(value=active["value"].clip(lower=ACTIVE_FLOOR)))
    axes[0, 0].set(yscale="log", ylabel="active neurons per token")
    _plain(axes[0, 0].yaxis)
    if len(dead):
        _level_lines(axes[0, 1], dead.assign(value=100 * dead["value"]), marker=".", markersize=4)
    else:
        axes[0, 1].text(
            0.5, 0.5, "no window was filled", ha="center", transform=axes[0, 1].transAxes
        )
    axes[0, 1].set(ylabel=f"dead neurons (%)\n(silent for {window_tokens:,} tokens)")
    axes[0, 1].set_xlim(axes[0, 0].get_xlim())
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), title="L1 coefficient", loc="outside right center"
    )
    return figure


# --- choices of training and sizes (Fig. 8, section 4.2), ways to compute ------------------------------------------

CHOICES = {  # of `analysis.choice`: colour, mark and dash
    "recipe": (BLUE, "o", "-"),
    "re-initialisation": (ORANGE, "s", "--"),
    "L1 warm-up": (GREEN, "^", "-."),
    "balanced columns": (PURPLE, "D", ":"),
}


def fig08_remedies(active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int) -> Figure:
    """Draw active neurons and the dead fraction over training for each remedy: means over seeds, and bands from least to most.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction, of one level of L1; window_tokens: for how many
    tokens a neuron that counts as dead was silent. Raises ValueError for several levels.
    """
    if active["l1_coefficient"].nunique() != 1:
        raise ValueError(
            f"this figure shows one level of L1; these curves have {active['l1_coefficient'].nunique()}"
        )
    figure, axes = _figure(PAGE, 2.4, 1, 2)
    for ax, curves, unit in zip(axes.flat, (active, dead), (1, 100), strict=True):
        for name, (colour, _, dash) in CHOICES.items():
            some = curves[curves["choice"] == name]
            if some.empty:
                continue
            values = (unit * some["value"]).groupby(some["tokens"]).agg(["mean", "min", "max"])
            values = values.clip(lower=ACTIVE_FLOOR) if unit == 1 else values
            seeds = some["run"].nunique()
            label = f"{name}, {seeds} seed{'s' if seeds > 1 else ''}"
            ax.plot(values.index / 1e6, values["mean"], dash, color=colour, label=label)
            if seeds > 1:
                ax.fill_between(
                    values.index / 1e6,
                    values["min"],
                    values["max"],
                    color=colour,
                    alpha=0.25,
                    linewidth=0,
                )
        ax.set_xlabel("training tokens (millions)")
    axes[0, 0].set(yscale="log", ylabel="active neurons per token")
    _plain(axes[0, 0].yaxis)
    axes[0, 1].set(ylabel=f"dead neurons (%)\n(silent for {window_tokens:,} tokens)")
    axes[0, 1].set_xlim(axes[0, 0].get_xlim())
    if dead.empty:
        axes[0, 1].text(
            0.5, 0.5, "no window was filled", ha="center", transform=axes[0, 1].transAxes
        )
    handles = axes[0, 0].get_legend_handles_labels()
    title = f"L1 = {analysis.level_name(active['l1_coefficient'].iloc[0])}"
    figure.legend(*handles, title=title, loc="outside lower center", ncols=len(handles[0]))
    return figure


def choices_frontier(table: pd.DataFrame) -> Figure:
    """Draw the price in cross-entropy and the dead neurons of each choice against its share of active neurons.

    table: `analysis.levels` of `analysis.choices`; drawn are the CHOICES, at levels that are alive, joined where there are
    several. Bars are the standard deviation over seeds. The dashed line is the price that the paper accepts.
    """
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    table = table[table["status"] == "alive"]
    for ax, column, unit in zip(
        axes.flat, ("cross_entropy_change", "dead_fraction_train"), (1, 100), strict=True
    ):
        for name, (colour, marker, dash) in CHOICES.items():
            rows = table[table["choice"] == name].sort_values("active_fraction")
            if rows.empty:
                continue
            share, height = 100 * rows["active_fraction"], unit * rows[column]
            ax.plot(share, height, dash, color=colour, marker=marker, markersize=3.5, label=name)
            seeds = rows["runs"] > 1
            bars = {
                "xerr": 100 * rows["active_fraction_std"][seeds],
                "yerr": unit * rows[f"{column}_std"][seeds],
            }
            ax.errorbar(
                share[seeds],
                height[seeds],
                **bars,
                fmt="none",
                ecolor=colour,
                capsize=2,
                linewidth=0.8,
            )
            if name == "recipe" and unit == 100:  # where the line falls, and nothing is above it
                for x, y, l1 in zip(share, height, rows["l1_coefficient"], strict=True):
                    place = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 6.5}
                    ax.annotate(analysis.level_name(l1), (x, y), **place)
        ax.set(xscale="log", xlabel="active neurons per token (% of all)")
        ax.margins(0.1, 0.12)
        _plain(ax.xaxis)
    price = axes[0, 0].axhline(analysis.MAX_PRICE, color="0.5", linestyle="--", linewidth=0.8)
    axes[0, 0].set_ylabel("cross-entropy (% over L1 = 0)")
    axes[0, 1].set_ylabel("dead neurons (%)")
    lines, names = axes[0, 0].get_legend_handles_labels()
    names = [*names, f"{analysis.MAX_PRICE:g}% above L1 = 0"]
    figure.legend([*lines, price], names, loc="outside lower center", ncols=len(names))
    return figure


def scale_activity(table: pd.DataFrame, paper: pd.DataFrame, noise: dict[str, float]) -> Figure:
    """Draw the share of active neurons and the gap to the dense model by size, ours and the paper's.

    table, paper: `analysis.sizes` and `analysis.paper_sizes`; noise: the deviation of `analysis.seed_noise` for active_fraction
    and cross_entropy_change, drawn as bars where it is known. Numbers beside the points of the left are active neurons.
    """
    figure, axes = _figure(PAGE, 2.6, 1, 2, sharex=True)
    for rows, colour, marker, label in ((table, BLUE, "o", "ours"), (paper, "black", "s", "paper")):
        rows = rows.sort_values("parameters")
        for ax, column, unit in zip(
            axes.flat, ("active_fraction", "change"), (100, 1), strict=True
        ):
            known = rows.dropna(subset=column)
            size, height = known["parameters"] / 1e6, unit * known[column]
            ax.plot(
                size, height, color=colour, marker=marker, markersize=4.5, linewidth=1, label=label
            )
            # Of a logarithm, and of the difference of two models.
            bar = (
                height * noise["active_fraction"]
                if unit == 100
                else np.sqrt(2) * noise["cross_entropy_change"]
            )
            if label == "ours" and np.isfinite(bar).all():
                ax.errorbar(size, height, bar, fmt="none", ecolor=colour, capsize=2, linewidth=0.8)
            if column == "active_fraction":
                for x, y, active in zip(size, height, known["active"], strict=True):
                    ax.annotate(
                        f"{active:.3g}",
                        (x, y),
                        (4, 4),
                        textcoords="offset points",
                        fontsize=6.5,
                        color=colour,
                    )
    for ax in axes.flat:
        ax.set(xscale="log", xlabel="parameters (millions)")
        ax.margins(0.12)
        _plain(ax.xaxis)
    axes[0, 0].set(yscale="log", ylabel="active neurons per token (% of all)")
    _plain(axes[0, 0].yaxis)
    price = axes[0, 1].axhline(analysis.MAX_PRICE, color="0.5", linestyle="--", linewidth=0.8)
    low, high = axes[0, 1].get_ylim()
    axes[0, 1].set(
        ylabel="cross-entropy (% over dense)",
        ylim=(min(low, 0), max(high, 1.15 * analysis.MAX_PRICE)),
    )
    lines, names = axes[0, 0].get_legend_handles_labels()
    names = [
        f"{name}, L1 = {analysis.level_name(rows['l1_coefficient'].iloc[0])}"
        for name, rows in zip(names, (table, paper), strict=True)
    ]
    figure.legend(
        [*lines, price], [*names, f"{analysis.MAX_PRICE:g}%"], loc="outside lower center", ncols=3
    )
    return figure


def computed_otherwise(table: pd.DataFrame, curves: pd.DataFrame) -> Figure:
    """Draw one training that was computed in several ways: cross-entropy, tokens a second and peak memory over training.

    table, curves: `analysis.computed_otherwise` and `analysis.computed_curves` of the same runs. The first run has a wide line, so
    that one above it is seen. Where no memory was logged, the third panel says so. Raises ValueError for more runs than it has colours.
    """
    colours = ("0.65", BLUE, ORANGE, GREEN, PURPLE)
    if len(table) > len(colours):
        raise ValueError(
            f"this figure shows up to {len(colours)} runs; this table has {len(table)}"
        )
    figure, axes = _figure(PAGE, 2.3, 1, 3)
    panels = {
        "cross_entropy": ("cross-entropy (nats)", 1),
        "tokens_per_second": ("thousand tokens a second", 1e-3),
        "peak_memory": ("peak memory of a device (GB)", 1e-9),
    }
    for ax, (metric, (unit, factor)) in zip(axes.flat, panels.items(), strict=True):
        ax.set(xlabel="training tokens (millions)", ylabel=unit)
        some = curves[curves["metric"] == metric]
        if some.empty:
            ax.text(0.5, 0.5, "not logged", ha="center", transform=ax.transAxes)
            continue
        for number, (run, way) in enumerate(zip(table["run"], table["way"], strict=True)):
            curve = some[some["run"] == run].sort_values("step")
            look = {"color": colours[number], "linewidth": 1 if number else 3.2}
            ax.plot(curve["tokens"] / 1e6, factor * curve["value"], label=way, **look)
        if metric != "cross_entropy":
            ax.set_ylim(bottom=0)
    axes[0, 2].set_xlim(axes[0, 0].get_xlim())
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(table)
    )
    return figure
