"""Figures of training: sweeps (Figs 2, 3, 9), choices (Fig. 8), sizes (section 4.2), ways."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    _instead,
    _key,
    _legend,
    _level_colours,
    _named,
    _note,
    _one,
    _panel,
    _plain,
)

STATUS_MARKERS = {"alive": "o", "unused": "s", "dead layer": "X"}
# Text above lines.
_ON_WHITE = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}, "zorder": 4}
_PRICE = {"color": "0.5", "linestyle": "--", "linewidth": 0.8}  # the price that the paper accepts


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
    """Draw cross-entropy over training for each L1, whole and its last half.

    curves: `analysis.training_curves` of cross_entropy; smoothed over 5% of the points.
    """
    figure, ((whole, last),) = _figure(PAGE, 2.4, 1, 2)
    window = max(1, curves.groupby("run").size().max() // 20)
    # The running mean is that of the whole curve, so both panels show the same lines.
    for ax, title in ((whole, "whole run"), (last, "last half")):
        _level_lines(ax, curves, window)
        ax.set_title(title, loc="left")
    half = curves[curves["tokens"] >= curves["tokens"].max() / 2]
    low, high = half["value"].min(), half["value"].max()
    margin = 0.1 * (high - low)
    last.set_xlim(half["tokens"].min() / 1e6, half["tokens"].max() / 1e6)
    last.set_ylim(low - margin, high + margin)
    whole.set_ylabel("training cross-entropy (nats)")
    _legend(figure, "right center", title="L1 coefficient")
    return figure


def fig03_frontier(table: pd.DataFrame) -> Figure:
    """Draw cross-entropy, its price in % of L1 = 0, and active neurons for each L1.

    table: `analysis.sweep`. Levels at which a layer is dead or the feed-forward layers are unused
    have a mark of their own.
    """
    figure, axes = _figure(COLUMN, 3.6, 2, 1, sharex=True)
    top, bottom = axes[:, 0]
    levels = sorted(table["l1_coefficient"].unique())
    colours = _level_colours(levels)
    table = table.assign(level=table["l1_coefficient"].map(levels.index))
    means = table.groupby("level")[["cross_entropy", "cross_entropy_change", "active"]].mean()
    for ax, column in ((top, "cross_entropy"), (bottom, "active")):
        ax.plot(means[column].clip(lower=ACTIVE_FLOOR), color="0.7", linewidth=1, zorder=1)
        for status, rows in table.groupby("status"):
            colour = [colours[l1] for l1 in rows["l1_coefficient"]]
            heights = rows[column].clip(lower=ACTIVE_FLOOR)
            ax.scatter(rows["level"], heights, 28, colour, marker=STATUS_MARKERS[status])
        ax.margins(0.09, 0.2)
    # Notes stand where the line does not go.
    lowest, losses = table.groupby("level")["cross_entropy"].min(), means["cross_entropy"]
    for level, price in means.loc[means.index > 0, "cross_entropy_change"].dropna().items():
        rises = level - 1 in losses.index and losses[level - 1] < losses[level]
        look = {"ha": "left" if rises else "center"} | _ON_WHITE
        _note(top, _signed(price), (level, lowest[level]), (3 * rises, -12), **look)
    for level, active in means["active"].items():
        place = level, max(active, ACTIVE_FLOOR)
        _note(bottom, f"{active:.3g}", place, (4, 4), ha="left", **_ON_WHITE)
    top.set_ylabel("cross-entropy (nats)")
    bottom.set(yscale="log", ylabel="active neurons per token", xlabel="L1 coefficient")
    bottom.set_xticks(range(len(levels)), [analysis.level_name(l1) for l1 in levels])
    _plain(bottom.yaxis)
    names = {"alive": "alive", "unused": "feed-forward unused", "dead layer": "dead layer"}
    shown = [status for status in names if status in set(table["status"])]
    if shown != ["alive"]:
        entries = {
            names[status]: _key("0.55", marker=STATUS_MARKERS[status], linestyle="", markersize=5)
            for status in shown
        }
        _legend(figure, "upper center", entries, ncols=3, columnspacing=1, handletextpad=0)
    return figure


def _seed_bars(ax: Axes, rows: pd.DataFrame, x, y, colour, xerr, yerr, **look) -> None:
    """Bars of the deviation over seeds, where there are several."""
    seeds = rows["runs"] > 1
    look = {"fmt": "none", "ecolor": colour, "capsize": 2} | look
    ax.errorbar(x[seeds], y[seeds], xerr=xerr[seeds], yerr=yerr[seeds], **look)


def frontier(table: pd.DataFrame) -> Figure:
    """Draw cross-entropy by share of active neurons, a line for each number of training tokens.

    table: `analysis.levels` of one or more sweeps. Bars are the standard deviation over seeds,
    dashed lines the price that the paper accepts (analysis.MAX_PRICE above L1 = 0), the dotted one
    95% inactive neurons. Levels at which a layer is dead or the feed-forward layers are unused have
    a mark of their own and are not joined.
    """
    figure, ax = _panel(COLUMN, 2.9)
    budgets = sorted(table["tokens"].unique())
    for tokens, colour in zip(budgets, [BLUE, ORANGE, GREEN, PURPLE], strict=False):
        rows = table[table["tokens"] == tokens].sort_values("active")
        share, loss = 100 * rows["active_fraction"].clip(lower=1e-6), rows["cross_entropy"]
        alive = rows["status"] == "alive"
        ax.plot(share[alive], loss[alive], color=colour, label=f"{tokens / 1e6:.3g} M tokens")
        neurons = (rows["active"] / rows["active_fraction"]).max()
        aside = 100 * rows["active_std"] / neurons
        _seed_bars(ax, rows, share, loss, colour, aside, rows["cross_entropy_std"])
        for status, some in rows.groupby("status"):
            look = {"color": colour, "marker": STATUS_MARKERS[status], "s": 22, "zorder": 3}
            ax.scatter(share[some.index], some["cross_entropy"], **look)
        dense = loss[rows["l1_coefficient"] == 0]
        if len(dense):
            price = (1 + analysis.MAX_PRICE / 100) * dense.item()
            ax.axhline(price, **_PRICE | {"color": colour})
        if tokens == budgets[0]:
            # Below the points, where the line does not go, and upright, since levels may be close.
            lowest = loss - rows["cross_entropy_std"].fillna(0)
            look = {"rotation": 90, "ha": "center", "va": "top"} | _ON_WHITE
            for x, y, l1 in zip(share, lowest, rows["l1_coefficient"], strict=True):
                _note(ax, analysis.level_name(l1), (x, y), (0, -6), **look)
    inactive = ax.axvline(5, color="0.5", linestyle=":", linewidth=1)
    ax.set(xscale="log", xlabel="active neurons per token (% of all)")
    ax.set_ylabel("cross-entropy (nats)")
    ax.margins(0.1, 0.4)
    _plain(ax.xaxis)
    entries = _named(ax) | {f"{analysis.MAX_PRICE:g}% above L1 = 0": _key(**_PRICE)}
    _legend(figure, "upper center", entries | {"95% inactive": inactive}, ncols=2)
    return figure


def _over_training(figure: Figure, axes: np.ndarray, dead: pd.DataFrame, window_tokens: int):
    """Finish two panels over training: active neurons, and dead ones, if a window was filled."""
    left, right = axes[0]
    left.set(yscale="log", ylabel="active neurons per token")
    _plain(left.yaxis)
    right.set_ylabel(f"dead neurons (%)\n(silent for {window_tokens:,} tokens)")
    right.set_xlim(left.get_xlim())
    if dead.empty:
        _instead(right, "no window was filled")


def fig09_activity_over_training(
    active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int
) -> Figure:
    """Draw active neurons and the dead fraction over training for each L1 level.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction; window_tokens: for
    how many tokens a neuron that counts as dead was silent.
    """
    figure, axes = _figure(PAGE, 2.4, 1, 2)
    _level_lines(axes[0, 0], active.assign(value=active["value"].clip(lower=ACTIVE_FLOOR)))
    if len(dead):
        _level_lines(axes[0, 1], dead.assign(value=100 * dead["value"]), marker=".", markersize=4)
    _over_training(figure, axes, dead, window_tokens)
    _legend(figure, "right center", title="L1 coefficient")
    return figure


# --- choices of training and sizes (Fig. 8, section 4.2), ways to compute -----------------------

CHOICES = {  # of `analysis.choice`: colour, mark and dash
    "recipe": (BLUE, "o", "-"),
    "re-initialisation": (ORANGE, "s", "--"),
    "L1 warm-up": (GREEN, "^", "-."),
    "balanced columns": (PURPLE, "D", ":"),
}


def _by_choice(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, tuple]]:
    """The choices that a table has: name, rows and look."""
    for name, look in CHOICES.items():
        rows = table[table["choice"] == name]
        if len(rows):
            yield name, rows, look


def fig08_remedies(active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int) -> Figure:
    """Draw active and dead neurons over training for each remedy: means, and bands of all seeds.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction, of one level of L1;
    window_tokens: for how many tokens a neuron that counts as dead was silent. Raises ValueError
    for several levels.
    """
    (level,) = _one(active, ["l1_coefficient"], "level of L1")
    figure, axes = _figure(PAGE, 2.4, 1, 2)
    for ax, curves, unit in zip(axes.flat, (active, dead), (1, 100), strict=True):
        for name, rows, (colour, _, dash) in _by_choice(curves):
            values = (unit * rows["value"]).groupby(rows["tokens"]).agg(["mean", "min", "max"])
            values = values.clip(lower=ACTIVE_FLOOR) if unit == 1 else values
            seeds, tokens = rows["run"].nunique(), values.index / 1e6
            label = f"{name}, {seeds} seed{'s' if seeds > 1 else ''}"
            ax.plot(tokens, values["mean"], dash, color=colour, label=label)
            if seeds > 1:
                look = {"color": colour, "alpha": 0.25, "linewidth": 0}
                ax.fill_between(tokens, values["min"], values["max"], **look)
        ax.set_xlabel("training tokens (millions)")
    _over_training(figure, axes, dead, window_tokens)
    title, columns = f"L1 = {analysis.level_name(level)}", len(_named(axes[0, 0]))
    _legend(figure, "lower center", title=title, ncols=columns)
    return figure


def choices_frontier(table: pd.DataFrame) -> Figure:
    """Draw the price and the dead neurons of each choice against its share of active neurons.

    table: `analysis.levels` of `analysis.choices`; drawn are the CHOICES, at levels that are alive,
    joined where there are several. Bars are the standard deviation over seeds. The dashed line is
    the price that the paper accepts.
    """
    figure, ((left, right),) = _figure(PAGE, 2.7, 1, 2)
    table = table[table["status"] == "alive"].sort_values("active_fraction")
    panels = (left, "cross_entropy_change", 1), (right, "dead_fraction_train", 100)
    for ax, column, unit in panels:
        for name, rows, (colour, marker, dash) in _by_choice(table):
            share, height = 100 * rows["active_fraction"], unit * rows[column]
            ax.plot(share, height, dash, color=colour, marker=marker, markersize=3.5, label=name)
            errors = 100 * rows["active_fraction_std"], unit * rows[f"{column}_std"]
            _seed_bars(ax, rows, share, height, colour, *errors, linewidth=0.8)
            if name == "recipe" and ax is right:  # where the line falls, and nothing is above it
                for x, y, l1 in zip(share, height, rows["l1_coefficient"], strict=True):
                    _note(ax, analysis.level_name(l1), (x, y), (3, 3))
        ax.set(xscale="log", xlabel="active neurons per token (% of all)")
        ax.margins(0.1, 0.12)
        _plain(ax.xaxis)
    price = left.axhline(analysis.MAX_PRICE, **_PRICE)
    left.set_ylabel("cross-entropy (% over L1 = 0)")
    right.set_ylabel("dead neurons (%)")
    entries = _named(left) | {f"{analysis.MAX_PRICE:g}% above L1 = 0": price}
    _legend(figure, "lower center", entries, ncols=len(entries))
    return figure


def scale_activity(table: pd.DataFrame, paper: pd.DataFrame, noise: dict[str, float]) -> Figure:
    """Draw active neurons and the gap to the dense model by size, ours and the paper's.

    table, paper: `analysis.sizes` and `analysis.paper_sizes`; noise: the deviation of
    `analysis.seed_noise` for active_fraction and cross_entropy_change, drawn as bars where it is
    known. Numbers beside the points of the left are active neurons.
    """
    figure, axes = _figure(PAGE, 2.6, 1, 2, sharex=True)
    left, right = axes[0]
    entries = {}
    for whose, rows, colour, marker in (("ours", table, BLUE, "o"), ("paper", paper, "black", "s")):
        level = analysis.level_name(rows["l1_coefficient"].iloc[0])
        rows = rows.sort_values("parameters").assign(share=100 * rows["active_fraction"])
        # Noise of a logarithm, and of the difference of two models.
        shares = rows["share"] * noise["active_fraction"]
        changes = 0 * rows["change"] + np.sqrt(2) * noise["cross_entropy_change"]
        for ax, column, bars in ((left, "share", shares), (right, "change", changes)):
            known = rows.dropna(subset=column)
            size, height, bar = known["parameters"] / 1e6, known[column], bars[known.index]
            look = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1}
            (line,) = ax.plot(size, height, label=whose, **look)
            entries.setdefault(f"{whose}, L1 = {level}", line)
            if whose == "ours" and np.isfinite(bar).all():
                ax.errorbar(size, height, bar, fmt="none", ecolor=colour, capsize=2, linewidth=0.8)
            if ax is left:
                for x, y, active in zip(size, height, known["active"], strict=True):
                    _note(ax, f"{active:.3g}", (x, y), (4, 4), color=colour)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="parameters (millions)")
        ax.margins(0.12)
        _plain(ax.xaxis)
    left.set(yscale="log", ylabel="active neurons per token (% of all)")
    _plain(left.yaxis)
    entries[f"{analysis.MAX_PRICE:g}%"] = right.axhline(analysis.MAX_PRICE, **_PRICE)
    low, high = right.get_ylim()
    right.set_ylabel("cross-entropy (% over dense)")
    right.set_ylim(min(low, 0), max(high, 1.15 * analysis.MAX_PRICE))
    _legend(figure, "lower center", entries, ncols=3)
    return figure


def computed_otherwise(table: pd.DataFrame, curves: pd.DataFrame) -> Figure:
    """Draw a training that was computed in several ways: cross-entropy, speed and peak memory.

    table, curves: `analysis.computed_otherwise` and `analysis.computed_curves` of the same runs.
    The first run has a wide line, so that one above it is seen. Where no memory was logged, the
    third panel says so. Raises ValueError for more runs than it has colours.
    """
    colours = ("0.65", BLUE, ORANGE, GREEN, PURPLE)
    if len(table) > len(colours):
        number = f"up to {len(colours)} runs; this table has {len(table)}"
        raise ValueError(f"this figure shows {number}")
    figure, axes = _figure(PAGE, 2.3, 1, 3)
    panels = {
        "cross_entropy": ("cross-entropy (nats)", 1),
        "tokens_per_second": ("thousand tokens a second", 1e-3),
        "peak_memory": ("peak memory of a device (GB)", 1e-9),
    }
    for ax, (metric, (label, factor)) in zip(axes.flat, panels.items(), strict=True):
        ax.set(xlabel="training tokens (millions)", ylabel=label)
        some = curves[curves["metric"] == metric].sort_values("step")
        if some.empty:
            _instead(ax, "not logged")
            continue
        for number, (run, way) in enumerate(zip(table["run"], table["way"], strict=True)):
            curve = some[some["run"] == run]
            look = {"color": colours[number], "linewidth": 1 if number else 3.2}
            ax.plot(curve["tokens"] / 1e6, factor * curve["value"], label=way, **look)
        if metric != "cross_entropy":
            ax.set_ylim(bottom=0)
    axes[0, 2].set_xlim(axes[0, 0].get_xlim())
    _legend(figure, "upper center", ncols=len(table))
    return figure
