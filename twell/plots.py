"""One function a figure: a table from analysis.py in, a matplotlib Figure out, and `save`, which writes it.

No file is read here. Every figure is built without pyplot, in one style, and saved so that the same inputs
give the same bytes; a JSON beside it says what it was drawn from. In all of them L1 = 0 is
black, and levels above it run from dark to light.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from twell import analysis, results

COLUMN, PAGE = 3.35, 6.8  # widths in a two-column paper, inches
BLUE, ORANGE, GREEN, RED, PURPLE = sns.color_palette("colorblind", 5)
STATUS_MARKERS = {"alive": "o", "unused": "s", "dead layer": "X"}
ACTIVE_FLOOR = 0.01  # log axes of active neurons show anything below, zero included, at this height
DRAWN_WITH = ("matplotlib", "numpy", "pandas")  # only these: tracked figures must not change with the torch build
# Colours of the inspector, light and dark: counts and surprise from the background to strong, signed values from blue
# through the background to orange. Steps of lightness, so that they are read without seeing colour.
PALETTES = {
    "light": {
        "sequential": ["#ffffff", "#e4f2df", "#b5e0c6", "#7bcac6", "#43a9c4", "#2a80b4", "#27549b", "#202a68"],
        "diverging": [
            "#123e7c",
            "#2f74b8",
            "#83b4dd",
            "#d3e5f3",
            "#ffffff",
            "#fde3c4",
            "#f6ae62",
            "#d96d0f",
            "#8f3a05",
        ],
    },
    "dark": {
        "sequential": ["#15181d", "#2b2f56", "#34508b", "#2a788e", "#22a884", "#63cb5f", "#b8de3b", "#fde725"],
        "diverging": [
            "#a9d3ff",
            "#5aa4f0",
            "#2c66ad",
            "#1e3a61",
            "#15181d",
            "#5b3314",
            "#a85a12",
            "#ee9434",
            "#ffd39b",
        ],
    },
}
MODULES = [Path(__file__).with_name(name) for name in ("analysis.py", "format.py", "plots.py")]


def style() -> None:
    """Set the one style of all figures: matplotlib's own fonts, 8 pt, thin lines, fonts embedded as text."""
    sns.set_theme(context="paper", style="ticks", palette="colorblind", font="DejaVu Sans")
    mpl.rcParams.update(
        {
            "font.size": 8,
            "axes.labelsize": 8,
            "axes.titlesize": 8.5,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "legend.title_fontsize": 7.5,
            "legend.frameon": False,
            "legend.handlelength": 1.6,
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.linewidth": 0.4,
            "grid.color": "0.9",
            "lines.linewidth": 1.3,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "pdf.fonttype": 42,
        }
    )


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options) -> tuple[Figure, np.ndarray]:
    """A figure in the style with its axes, [rows, columns]."""
    style()
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _level_colours(levels: Iterable[float]) -> dict[float, tuple]:
    levels = sorted(set(levels) - {0})
    scale = mpl.colormaps["viridis"](np.linspace(0.12, 0.88, len(levels)))
    return {0: "black"} | dict(zip(levels, map(tuple, scale), strict=True))


def _level(l1: float) -> str:
    """An L1 coefficient as one writes it: 0.3, 3e-3, 1.5e-4."""
    if l1 == 0 or l1 >= 0.1:
        return f"{l1:g}"
    mantissa, exponent = f"{l1:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _signed(percent: float) -> str:
    return f"{percent:+.1f}%".replace("-", "−")


def _plain(axis: mpl.axis.Axis) -> None:
    """Write a log axis' ticks as few plain numbers: 1, 2, 5 in each decade, or only 1 when it spans many."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _level_lines(ax: Axes, curves: pd.DataFrame, window: int = 1, **options) -> None:
    """One line a run, coloured by its L1 coefficient; the running mean over `window` points."""
    colours = _level_colours(curves["l1_coefficient"])
    labelled = set()
    for (l1, _), curve in curves.groupby(["l1_coefficient", "run"]):
        smooth = curve["value"].rolling(window, min_periods=1).mean()
        label = None if l1 in labelled else _level(l1)
        ax.plot(curve["tokens"] / 1e6, smooth, color=colours[l1], label=label, **options)
        labelled.add(l1)
    ax.set_xlabel("training tokens (millions)")


# --- formats (Fig. 1) ---------------------------------------------------------------------------


def fig01_formats(cells: pd.DataFrame, tile_n: int) -> Figure:
    """Draw the same small matrix dense, as ELL, TwELL and hybrid, from `analysis.format_cells`; colours are tiles."""
    tiles = [BLUE, ORANGE, GREEN, PURPLE]
    names = [["Dense", "TwELL"], ["ELL", "Hybrid"]]
    panels = dict(list(cells.groupby("format")))
    heights = {name: (panel.groupby("part")["row"].max() + 2).sum() for name, panel in panels.items()}
    rows = [max(heights[name] for name in row) for row in names]
    width = cells["slot"].max() + 3.5
    figure, axes = _figure(PAGE, PAGE * sum(rows) / (2 * width) + 0.7, 2, 2, height_ratios=rows)
    for ax, name, height in zip(axes.flat, [*names[0], *names[1]], np.repeat(rows, 2), strict=True):
        top = 0
        for part, table in panels[name].groupby("part", sort=False):
            if top:
                ax.text(0, top - 0.15, part, fontsize=6.5, style="italic", va="bottom")
            for cell in table.itertuples():
                x, y = cell.slot, top + cell.row
                face, edge, text = {
                    "value": (tiles[cell.label // tile_n % len(tiles)], "white", "white"),
                    "count": ("0.25", "white", "white"),
                    "unused": ("0.93", "white", None),
                    "zero": ("white", "0.85", None),
                }[cell.kind]
                ax.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor=edge, linewidth=0.5))
                if text:
                    ax.text(x + 0.5, y + 0.53, cell.label, color=text, fontsize=6, ha="center", va="center")
            for row, token in table.groupby("row")["token"].first().items():
                ax.text(-0.3, top + row + 0.53, f"$t_{{{token}}}$", fontsize=7, ha="right", va="center")
            top += table["row"].max() + 2.0
        ax.set(xlim=(-1.3, cells["slot"].max() + 1.1), ylim=(height - 0.7, -0.1), aspect="equal", anchor="NW")
        ax.set_title(name, loc="left", weight="bold")
        ax.axis("off")
    kinds = [(tiles[t], f"non-zero of tile {t}, with its column") for t in range(2)]
    kinds += [("0.25", "count"), ("0.93", "unused slot")]
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour, _ in kinds]
    figure.legend(handles, [name for _, name in kinds], loc="outside lower center", ncols=4, handlelength=1)
    return figure


def fig01_bytes(table: pd.DataFrame) -> Figure:
    """Draw each format's bytes against dense as the active share grows, from `analysis.format_bytes`."""
    figure, axes = _figure(COLUMN, 2.5)
    ax = axes[0, 0]
    shades = iter(sns.light_palette(BLUE, 5)[::-1])
    looks = {"Dense": ("black", "--"), "ELL": (ORANGE, "-"), "Hybrid": (GREEN, "-")}
    for name, line in table.groupby("format", sort=False):
        colour, dash = looks.get(name.split(",")[0]) or (next(shades), "-")
        order = 3 if name == "Dense" else 2  # its dashes lie on TwELL's line at C = 2, which is as large as dense
        ax.plot(100 * line["active_share"], line["relative"], dash, color=colour, label=name, zorder=order)
    ax.set(xscale="log", yscale="log", xlabel="active neurons (%)", ylabel="bytes / bytes of dense bf16")
    _plain(ax.xaxis)
    _plain(ax.yaxis)
    ax.legend(loc="lower right", labelspacing=0.25)
    return figure


# --- sweeps (Figs 2, 3, 9) ----------------------------------------------------------------------


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
    figure.legend(*axes[0, 0].get_legend_handles_labels(), title="L1 coefficient", loc="outside right center")
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
            ax.scatter(rows["level"], rows[column].clip(lower=floor), 28, colour, marker=STATUS_MARKERS[status])
        for level, note in notes[column].items():  # where the line does not go
            place, above = ((level, heights[level]), 5) if column == "active" else ((level, lowest[level]), -12)
            ax.annotate(note, place, (0, above), textcoords="offset points", ha="center", fontsize=6.5)
        ax.margins(0.09, 0.2)
    axes[0, 0].set_ylabel("cross-entropy (nats)")
    axes[1, 0].set(yscale="log", ylabel="active neurons per token", xlabel="L1 coefficient")
    axes[1, 0].set_xticks(range(len(levels)), [_level(l1) for l1 in levels])
    _plain(axes[1, 0].yaxis)
    names = {"alive": "alive", "unused": "feed-forward unused", "dead layer": "dead layer"}
    shown = [status for status in names if status in set(table["status"])]
    handles = [Line2D([], [], color="0.55", marker=STATUS_MARKERS[s], linestyle="", markersize=5) for s in shown]
    labels = [names[status] for status in shown]
    figure.legend(handles, labels, loc="outside upper center", ncols=3, columnspacing=1, handletextpad=0)
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
        ax.plot(share[alive], rows["cross_entropy"][alive], color=colour, label=f"{tokens / 1e6:.3g} M tokens")
        seeds = rows["runs"] > 1
        neurons = (rows["active"] / rows["active_fraction"]).max()
        bars = {"xerr": 100 * rows["active_std"][seeds] / neurons, "yerr": rows["cross_entropy_std"][seeds]}
        ax.errorbar(share[seeds], rows["cross_entropy"][seeds], **bars, fmt="none", ecolor=colour, capsize=2)
        for status, some in rows.groupby("status"):
            marker = {"color": colour, "marker": STATUS_MARKERS[status], "s": 22, "zorder": 3}
            ax.scatter(share[some.index], some["cross_entropy"], **marker)
        dense = rows.loc[rows["l1_coefficient"] == 0, "cross_entropy"]
        if len(dense):
            ax.axhline((1 + analysis.MAX_PRICE / 100) * dense.item(), color=colour, linestyle="--", linewidth=0.8)
        if tokens == budgets[0]:
            # Below the points, where the line of a frontier does not go, and upright, since levels may be close.
            lowest = rows["cross_entropy"] - rows["cross_entropy_std"].fillna(0)
            for x, y, l1 in zip(share, lowest, rows["l1_coefficient"], strict=True):
                place = {"xytext": (0, -6), "textcoords": "offset points", "ha": "center", "va": "top"}
                ax.annotate(_level(l1), (x, y), fontsize=6.5, rotation=90, **place)
    inactive = ax.axvline(5, color="0.5", linestyle=":", linewidth=1)
    ax.set(xscale="log", xlabel="active neurons per token (% of all)", ylabel="cross-entropy (nats)")
    ax.margins(0.1, 0.27)
    _plain(ax.xaxis)
    price = Line2D([], [], color="0.5", linestyle="--", linewidth=0.8)
    lines, names = ax.get_legend_handles_labels()
    others = {f"{analysis.MAX_PRICE:g}% above L1 = 0": price, "95% inactive": inactive}
    figure.legend([*lines, *others.values()], [*names, *others], loc="outside upper center", ncols=2)
    return figure


def fig09_activity_over_training(active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int) -> Figure:
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
        axes[0, 1].text(0.5, 0.5, "no window was filled", ha="center", transform=axes[0, 1].transAxes)
    axes[0, 1].set(ylabel=f"dead neurons (%)\n(silent for {window_tokens:,} tokens)")
    axes[0, 1].set_xlim(axes[0, 0].get_xlim())
    figure.legend(*axes[0, 0].get_legend_handles_labels(), title="L1 coefficient", loc="outside right center")
    return figure


# --- choices of training and sizes (Fig. 8, section 4.2) ------------------------------------------

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
        raise ValueError(f"this figure shows one level of L1; these curves have {active['l1_coefficient'].nunique()}")
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
                ax.fill_between(values.index / 1e6, values["min"], values["max"], color=colour, alpha=0.25, linewidth=0)
        ax.set_xlabel("training tokens (millions)")
    axes[0, 0].set(yscale="log", ylabel="active neurons per token")
    _plain(axes[0, 0].yaxis)
    axes[0, 1].set(ylabel=f"dead neurons (%)\n(silent for {window_tokens:,} tokens)")
    axes[0, 1].set_xlim(axes[0, 0].get_xlim())
    if dead.empty:
        axes[0, 1].text(0.5, 0.5, "no window was filled", ha="center", transform=axes[0, 1].transAxes)
    handles = axes[0, 0].get_legend_handles_labels()
    title = f"L1 = {_level(active['l1_coefficient'].iloc[0])}"
    figure.legend(*handles, title=title, loc="outside lower center", ncols=len(handles[0]))
    return figure


def choices_frontier(table: pd.DataFrame) -> Figure:
    """Draw the price in cross-entropy and the dead neurons of each choice against its share of active neurons.

    table: `analysis.levels` of `analysis.choices`; drawn are the CHOICES, at levels that are alive, joined where there are
    several. Bars are the standard deviation over seeds. The dashed line is the price that the paper accepts.
    """
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    table = table[table["status"] == "alive"]
    for ax, column, unit in zip(axes.flat, ("cross_entropy_change", "dead_fraction_train"), (1, 100), strict=True):
        for name, (colour, marker, dash) in CHOICES.items():
            rows = table[table["choice"] == name].sort_values("active_fraction")
            if rows.empty:
                continue
            share, height = 100 * rows["active_fraction"], unit * rows[column]
            ax.plot(share, height, dash, color=colour, marker=marker, markersize=3.5, label=name)
            seeds = rows["runs"] > 1
            bars = {"xerr": 100 * rows["active_fraction_std"][seeds], "yerr": unit * rows[f"{column}_std"][seeds]}
            ax.errorbar(share[seeds], height[seeds], **bars, fmt="none", ecolor=colour, capsize=2, linewidth=0.8)
            if name == "recipe" and unit == 1:
                for x, y, l1 in zip(share, height, rows["l1_coefficient"], strict=True):
                    place = {"xytext": (1, 4), "textcoords": "offset points", "fontsize": 6.5, "rotation": 50}
                    ax.annotate(_level(l1), (x, y), **place)
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
        for ax, column, unit in zip(axes.flat, ("active_fraction", "change"), (100, 1), strict=True):
            known = rows.dropna(subset=column)
            size, height = known["parameters"] / 1e6, unit * known[column]
            ax.plot(size, height, color=colour, marker=marker, markersize=4.5, linewidth=1, label=label)
            # Of a logarithm, and of the difference of two models.
            bar = height * noise["active_fraction"] if unit == 100 else np.sqrt(2) * noise["cross_entropy_change"]
            if label == "ours" and np.isfinite(bar).all():
                ax.errorbar(size, height, bar, fmt="none", ecolor=colour, capsize=2, linewidth=0.8)
            if column == "active_fraction":
                for x, y, active in zip(size, height, known["active"], strict=True):
                    ax.annotate(f"{active:.3g}", (x, y), (4, 4), textcoords="offset points", fontsize=6.5, color=colour)
    for ax in axes.flat:
        ax.set(xscale="log", xlabel="parameters (millions)")
        ax.margins(0.12)
        _plain(ax.xaxis)
    axes[0, 0].set(yscale="log", ylabel="active neurons per token (% of all)")
    _plain(axes[0, 0].yaxis)
    price = axes[0, 1].axhline(analysis.MAX_PRICE, color="0.5", linestyle="--", linewidth=0.8)
    low, high = axes[0, 1].get_ylim()
    axes[0, 1].set(ylabel="cross-entropy (% over dense)", ylim=(min(low, 0), max(high, 1.15 * analysis.MAX_PRICE)))
    lines, names = axes[0, 0].get_legend_handles_labels()
    names = [
        f"{name}, L1 = {_level(rows['l1_coefficient'].iloc[0])}"
        for name, rows in zip(names, (table, paper), strict=True)
    ]
    figure.legend([*lines, price], [*names, f"{analysis.MAX_PRICE:g}%"], loc="outside lower center", ncols=3)
    return figure


# --- layers (Figs 6, 10, 11) --------------------------------------------------------------------


def fig06_layers(table: pd.DataFrame, title: str) -> Figure:
    """Draw mean, 99th percentile and maximum of the active neurons in each layer, from `analysis.per_layer`."""
    figure, axes = _figure(COLUMN, 2.5)
    ax = axes[0, 0]
    layer = table["layer"]
    shown = table[["mean", "p99", "max"]].clip(lower=ACTIVE_FLOOR)
    overall = table["mean"].mean()
    bars = ax.bar(layer, shown["mean"], 0.7, color=BLUE)
    line = ax.axhline(max(overall, ACTIVE_FLOOR), color=BLUE, linestyle=":", linewidth=1)
    p99 = ax.scatter(layer, shown["p99"], 30, marker="_", color="black", linewidth=1.2)
    largest = ax.scatter(layer, shown["max"], 16, marker="v", color=ORANGE)
    ax.set(yscale="log", xlabel="layer", ylabel="active neurons per token")
    ax.set_ylim(0.5 * shown["mean"].min(), 1.6 * shown["max"].max())
    ax.set_xticks(layer[:: max(1, len(layer) // 10)])
    ax.grid(False, axis="x")
    _plain(ax.yaxis)
    handles = {"mean": bars, f"mean of all: {overall:.3g}": line, "99th percentile": p99, "maximum": largest}
    figure.legend(handles.values(), handles.keys(), title=title, loc="outside upper center", ncols=2, labelspacing=0.3)
    return figure


# --- tokens (Fig. 7) ----------------------------------------------------------------------------


def visible(token: str) -> str:
    """A token as one can read it: white space and control characters made visible."""
    seen = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return "".join(seen.get(c, c if c.isprintable() else repr(c)[1:-1]) for c in token)


def fig07a_tokens(table: pd.DataFrame, num_tokens: int = 6) -> Figure:
    """Draw the tokens of lowest and of highest mean activity, `num_tokens` each, from `analysis.per_token`.

    Raises ValueError when there is no token.
    """
    if table.empty:
        raise ValueError("no token is left to draw; lower min_count or trace a longer text")
    lowest, highest = table.head(num_tokens), table.iloc[num_tokens:].tail(num_tokens)
    both = pd.concat([lowest, highest])
    figure, axes = _figure(COLUMN, 0.55 + 0.19 * len(both))
    ax = axes[0, 0]
    y = np.arange(len(both)) + 0.6 * (np.arange(len(both)) >= len(lowest))  # a gap between the two groups
    ax.barh(y, both["mean_active"], 0.75, color=[BLUE] * len(lowest) + [ORANGE] * len(highest))
    ax.invert_yaxis()
    ax.set_yticks(y, [visible(token)[:16] for token in both["token"]])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    for at, value, count in zip(y, both["mean_active"], both["count"], strict=True):
        text = f"{value:.3g} (n = {count})"
        ax.annotate(text, (value, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
    ax.set_xlim(0, 1.75 * both["mean_active"].max())
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("active neurons per token")
    return figure


def fig07b_positions(table: pd.DataFrame) -> Figure:
    """Draw mean activity against position in the sequence, log-log.

    table: `analysis.by_position` of one or more traces, with the column l1_coefficient to tell them apart.
    """
    figure, axes = _figure(COLUMN, 2.3)
    ax = axes[0, 0]
    colours = _level_colours(table["l1_coefficient"])
    for l1, line in table.groupby("l1_coefficient"):
        ax.plot(line["position"] + 1, line["mean_active"].clip(lower=ACTIVE_FLOOR), color=colours[l1], label=_level(l1))
    ax.set(xscale="log", yscale="log", xlabel="position in the sequence", ylabel="active neurons per token")
    _plain(ax.xaxis)
    _plain(ax.yaxis)
    ax.legend(title="L1 coefficient")
    return figure


LINE = 0.17  # height of a line of text, inches


def _typeset(tokens: Iterable[str], columns: int) -> tuple[list[tuple[int, int, str]], int]:
    """Set tokens in lines of `columns` characters: x, y and what is shown of each; and how many lines these are."""
    places, x, y = [], 0, 0
    for token in map(visible, tokens):
        if x and x + len(token) > columns:
            x, y = 0, y + 1
        places.append((x, y, token))
        x = 0 if token.endswith("⏎") else x + len(token)
        y += token.endswith("⏎")
    return places, places[-1][1] + 1


def _write(ax: Axes, places: list, lines: int, colours: Sequence[tuple], columns: int) -> None:
    """Write tokens on their colours."""
    size = 72 * (PAGE - 0.15) / columns / 0.602  # points; the advance of DejaVu Sans Mono is 0.602 of its size
    for (x, y, token), colour in zip(places, colours, strict=True):
        ax.add_patch(Rectangle((x, y), len(token), 0.94, facecolor=colour, linewidth=0))
        ink = "white" if np.dot(colour[:3], (0.3, 0.59, 0.11)) < 0.5 else "black"
        text = token.replace("␣", " ")
        ax.text(x, y + 0.5, text, color=ink, family="DejaVu Sans Mono", fontsize=size, va="center", parse_math=False)
    ax.set(xlim=(0, columns), ylim=(lines, 0))
    ax.axis("off")


def fig_passage(table: pd.DataFrame, columns: int = 96) -> Figure:
    """Draw a passage, each token coloured by its active neurons, from `analysis.passage`.

    columns: characters a line.
    """
    style()
    colours = mpl.colormaps["viridis"]
    # Tokens without any active neuron get the colour of the least active ones: a log scale has no zero.
    positive = table.loc[table["active"] > 0, "active"]
    active = table["active"].clip(lower=ACTIVE_FLOOR if positive.empty else positive.min())
    norm = LogNorm(active.min(), max(active.max(), 1.001 * active.min()))
    places, lines = _typeset(table["token"], columns)
    figure, axes = _figure(PAGE, LINE * lines + 0.5)
    ax = axes[0, 0]
    _write(ax, places, lines, [colours(norm(value)) for value in active], columns)
    bar = figure.colorbar(
        mpl.cm.ScalarMappable(norm, colours), ax=ax, location="bottom", aspect=60, shrink=0.6, pad=0.02
    )
    bar.set_label("active neurons per token, mean over layers")
    _plain(bar.ax.xaxis)
    bar.outline.set_visible(False)
    return figure


# --- neurons (ours) -----------------------------------------------------------------------------


def fig_inspector(
    passage: pd.DataFrame,
    counts: pd.DataFrame,
    over: pd.DataFrame,
    label: str,
    ends: tuple[float, float],
    columns: int = 96,
) -> Figure:
    """Draw a view of the inspector: a passage coloured by a value, and the active neurons of its tokens in each layer.

    passage: token, value (NaN: left out); counts: active neurons, a row a layer and a column a token; over: which of these cells
    have a tile that overflows, marked red; label: what the values are; ends of their scale, of which a lower one below 0 makes it
    signed, and one above 0 logarithmic. columns: characters a line. From `inspector.drawn`.
    """
    style()
    low, high = ends
    palette = PALETTES["light"]["diverging" if low < 0 else "sequential"]
    colours = LinearSegmentedColormap.from_list("twell", palette)
    norm = LogNorm(low, high) if low > 0 else Normalize(low, high)
    places, lines = _typeset(passage["token"], columns)
    tall = max(0.09 * len(counts), 0.5)
    # Two figures in one: the text needs the whole width, for which its letters are set.
    heights = [LINE * lines + 0.55, tall + 0.5]
    figure = Figure(figsize=(PAGE, sum(heights)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    text, heat = above.subplots(), below.subplots()
    shades = [colours(norm(value)) if value == value else (1, 1, 1, 1) for value in passage["value"]]
    _write(text, places, lines, shades, columns)
    bar = above.colorbar(mpl.cm.ScalarMappable(norm, colours), ax=text, location="top", aspect=60, shrink=0.6, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if low > 0:
        _plain(bar.ax.xaxis)
    shown = counts.to_numpy(np.float64)
    most = max(float(np.nanmax(shown, initial=1)), 2)
    cells = LinearSegmentedColormap.from_list("twell", PALETTES["light"]["sequential"]).with_extremes(
        bad="0.85", under="white"
    )
    left = counts.columns[0] - 0.5
    extent = (left, left + len(counts.columns), len(counts) - 0.5, -0.5)
    shown = np.where(shown == 0, 0.5, shown)  # below the scale
    image = heat.imshow(shown, cells, LogNorm(1, most), aspect="auto", interpolation="nearest", extent=extent)
    for row, column in np.argwhere(over.to_numpy()):
        heat.add_patch(Rectangle((left + column, row - 0.5), 1, 0.2, facecolor=RED, linewidth=0))
    heat.set(xlabel="token", ylabel="layer")
    heat.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    every = max(1, -(-len(counts) // 8))
    heat.set_yticks(range(0, len(counts), every), counts.index[::every])
    heat.grid(False)
    bar = below.colorbar(image, ax=heat, pad=0.01, aspect=12)
    bar.set_label("active\nneurons")
    _plain(bar.ax.yaxis)
    bar.outline.set_visible(False)
    return figure


def fig_specific(table: pd.DataFrame, rows: int = 12) -> Figure:
    """Draw the neurons that are most specific to a token: share and coverage, from `analysis.specific`.

    Raises ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("no neuron fires often enough; lower min_fires or min_count, or trace a longer text")
    shown = table.head(rows)
    figure, axes = _figure(COLUMN, 0.75 + 0.2 * len(shown))
    ax = axes[0, 0]
    y = np.arange(len(shown))
    ax.hlines(y, 100 * shown["share"], 100 * shown["coverage"], color="0.8", linewidth=1.5, zorder=1)
    ax.scatter(100 * shown["share"], y, 18, color=BLUE, label="its firings that are at this token")
    ax.scatter(100 * shown["coverage"], y, 18, color=ORANGE, marker="D", label="occurrences at which it fires")
    names = [f"{row.layer} · {row.neuron}  {visible(row.token)[:14]}" for row in shown.itertuples()]
    ax.set_yticks(y, names)
    for name in ax.get_yticklabels():
        name.set_parse_math(False)
    for at, row in enumerate(shown.itertuples()):
        ax.annotate(f"n = {row.fires}", (104, at), va="center", fontsize=6.5, annotation_clip=False)
    ax.invert_yaxis()
    ax.set(xlabel="%", xlim=(0, 102))
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=1, labelspacing=0.2)
    return figure


def fig_surprise(bins: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """Draw activity against surprise, and how they correlate in each layer.

    bins: `analysis.by_surprise`; correlations: `analysis.surprise_correlation`.
    """
    figure, axes = _figure(PAGE, 2.4, 1, 2)
    left, right = axes[0]
    left.fill_between(
        bins["surprise"], bins["q25"], bins["q75"], color=BLUE, alpha=0.18, linewidth=0, label="middle half"
    )
    left.plot(bins["surprise"], bins["active"], "o-", color=BLUE, markersize=3.5, label="mean")
    left.set(xlabel="surprise of the token, $-$log p (nats)", ylabel="active neurons per token", ylim=(0, None))
    left.legend(loc="upper left")
    looks = {"surprise": ("this token", BLUE, "o", -0.12), "next_surprise": ("the next token", ORANGE, "D", 0.12)}
    layers = correlations["layer"].max() + 1
    for of, rows in correlations.groupby("of", sort=False):
        name, colour, marker, aside = looks[of]
        x = rows["layer"].where(rows["layer"] >= 0, layers + 0.5) + aside
        spread = np.abs(rows[["low", "high"]].to_numpy().T - rows["spearman"].to_numpy())
        right.errorbar(
            x,
            rows["spearman"],
            spread,
            fmt=marker,
            color=colour,
            markersize=3.5,
            elinewidth=1,
            label=f"surprise of {name}",
        )
    right.axhline(0, color="0.4", linewidth=0.6)
    every = max(1, -(-layers // 10))
    right.set_xticks([*range(0, layers, every), layers + 0.5], [*map(str, range(0, layers, every)), "mean"])
    right.set(xlabel="layer", ylabel="rank correlation\nwith active neurons")
    right.margins(y=0.15)
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def fig_silenced(table: pd.DataFrame, rows: int = 16) -> Figure:
    """Draw what silencing neurons does to the loss, those with the largest changes, from `trace.silenced_loss`.

    Raises ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("no neuron was silenced")
    order = table["loss_change"].abs().sort_values(ascending=False, kind="stable").index[:rows]
    shown = table.loc[order].sort_values("loss_change", ascending=False, kind="stable")
    figure, axes = _figure(COLUMN, 0.7 + 0.17 * len(shown))
    ax = axes[0, 0]
    y = np.arange(len(shown))
    for chosen, colour in ((shown["loss_change"] > 0, BLUE), (shown["loss_change"] <= 0, ORANGE)):
        spread = 1.96e3 * shown["stderr"][chosen]
        ax.errorbar(
            1e3 * shown["loss_change"][chosen],
            y[chosen],
            xerr=spread,
            fmt="o",
            color=colour,
            markersize=3.5,
            elinewidth=1,
        )
    ax.axvline(0, color="0.4", linewidth=0.6)
    ax.set_yticks(y, [f"{row.layer} · {row.neuron}" for row in shown.itertuples()])
    ax.invert_yaxis()
    ax.set(
        xlabel="loss without the neuron, less loss with it\n(0.001 nats a token; 95% intervals)",
        ylabel="layer · neuron",
    )
    ax.grid(False, axis="y")
    return figure


# --- speed of the layer (ours) ------------------------------------------------------------------

# Colour and marker of each provider; auto, which takes one of the others, lies broad beneath them.
PROVIDERS = {
    "auto": ("0.8", ""),
    "triton union": (BLUE, "o"),
    "triton rowwise": (ORANGE, "s"),
    "triton decode": (GREEN, "^"),
    "triton hybrid": (RED, "X"),
    "dense": (PURPLE, "D"),
    "dense eager": ("0.45", "v"),
    analysis.BASELINE: ("black", ""),
}
STYLES = [("-", True), ((0, (3.5, 1.5)), False), ((0, (1, 1)), False)]  # dashes, and whether markers are filled
NEAR = 1.25  # a case within this factor of the wanted activity is drawn without a word


def _layer(table: pd.DataFrame) -> str:
    """What was measured, on what: a figure's title. Raises ValueError unless it is one layer on one device."""
    about = table[["hidden_size", "intermediate_size", "gated", "dtype", "device"]].drop_duplicates()
    if len(about) != 1:
        raise ValueError(f"a figure of speed shows one layer on one device; this table has {len(about)}")
    hidden_size, intermediate_size, gated, dtype, device = about.iloc[0]
    return f"{'gated' if gated else 'non-gated'} layer, {hidden_size} x {intermediate_size}, {dtype}, {device}"


def _lines(ax: Axes, table: pd.DataFrame, x: str, y: str, kind: str, styles: dict) -> None:
    """y against x, a line for each provider and each value of the column `kind`, which has a style of its own."""
    for (name, value), line in table.sort_values(x).groupby(["provider", kind]):
        (colour, marker), (dashes, filled) = PROVIDERS[name], styles[value]
        look = {"linestyle": dashes, "marker": marker, "markersize": 3.5, "zorder": 3}
        look = {"linewidth": 5, "solid_capstyle": "round"} if name == "auto" else look
        face = colour if filled else "white"
        ax.plot(line[x], line[y], color=colour, markerfacecolor=face, label=name, **look)


def _speed_lines(ax: Axes, table: pd.DataFrame, x: str, kind: str, styles: dict) -> None:
    """Speed-up against x, and a line at 1."""
    _lines(ax, table, x, "speedup", kind, styles)
    ax.axhline(1, color=PROVIDERS[analysis.BASELINE][0], linewidth=0.8)
    ax.set_yscale("log")
    _plain(ax.yaxis)


def _speed_legend(figure: Figure, names: Iterable[str], styles: dict) -> None:
    """Below the figure: providers by colour and marker, then what each line style means."""
    entries = {}
    for name in (*names, analysis.BASELINE):
        colour, marker = PROVIDERS[name]
        width = {"auto": 5, analysis.BASELINE: 0.8}.get(name)
        entries[name] = Line2D([], [], color=colour, marker=marker, markersize=4, linewidth=width)
    for text, (dashes, filled) in styles.items():
        face = "0.6" if filled else "white"
        entries[text] = Line2D([], [], color="0.6", linestyle=dashes, marker="o", markersize=4, markerfacecolor=face)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, handlelength=2.6)


def _styles(values: Iterable, what: str) -> dict:
    values = list(values)
    if len(values) > len(STYLES):
        raise ValueError(f"{len(values)} {what} cannot be told apart in one figure; give at most {len(STYLES)}")
    return dict(zip(values, STYLES, strict=False))


def _mark_crossovers(ax: Axes, crossovers: pd.DataFrame, styles: dict) -> None:
    """Mark where lines fall below 1, and write at how many active neurons; the styles are of batch sizes."""
    falls = crossovers[crossovers["tokens"].isin(list(styles)) & crossovers["crossover"].notna()]
    last = {}  # where the last number of a side stands, and how high
    for row in falls.sort_values("crossover").itertuples():
        above = list(styles).index(row.tokens) == 0  # the largest batch above the line, others below
        colour = PROVIDERS[row.provider][0]
        ax.plot(row.crossover, 1, marker="|", markersize=9, markeredgewidth=1.4, color=colour, zorder=4)
        text = f"{row.crossover:.0f}"
        at, height = last.get(above, (0, 6))
        height = height + 8 if row.crossover < 1.5 * at else 6
        last[above] = row.crossover, height
        place = {"xytext": (1, height), "va": "bottom"}
        if not above:
            place = {"xytext": (-1, -height), "va": "top", "ha": "right"}
        halo = [withStroke(linewidth=1.5, foreground="white")]
        look = {"color": colour, "fontsize": 7, "path_effects": halo, "zorder": 5}
        ax.annotate(text, (row.crossover, 1), textcoords="offset points", **place, **look)


def ffn_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw speed-up over dense torch.compile against active neurons, a panel a pattern, a line a path and batch size.

    table: `analysis.speedups` of one layer in one mode; crossovers: `analysis.crossovers` of it, marked where the
    lines fall below 1. Raises ValueError for several layers or none, and for more than three batch sizes. Ours.
    """
    title = _layer(table)
    names = [
        name for name in ("auto", "triton union", "triton rowwise", "dense eager") if name in set(table["provider"])
    ]
    table = table[table["provider"].isin(names)]
    styles = _styles(sorted(table["tokens"].unique(), reverse=True), "batch sizes")
    patterns = sorted(table["pattern"].unique(), reverse=True)  # skewed, as trained models are, before even
    figure, axes = _figure(PAGE, 3.0, 1, len(patterns), sharey=True)
    for ax, pattern in zip(axes.flat, patterns, strict=True):
        _speed_lines(ax, table[table["pattern"] == pattern], "active", "tokens", styles)
        marked = crossovers[crossovers["provider"].isin(names) & (crossovers["pattern"] == pattern)]
        _mark_crossovers(ax, marked, styles)
        ax.set(xscale="log", xlabel="active neurons per token")
        ax.set_title(pattern, loc="left")
        _plain(ax.xaxis)
    axes[0, 0].set_ylabel("speed-up over dense torch.compile")
    figure.suptitle(title, fontsize=8)
    _speed_legend(figure, names, {f"{tokens:,} tokens": style for tokens, style in styles.items()})
    return figure


def training_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw a training step's speed-up and held memory against active neurons, a row of panels a pattern (Fig. 5, one layer).

    table: `analysis.training_speedups` of one layer; crossovers: `analysis.crossovers` of it, marked where the lines fall
    below 1. Left, speed-up over dense torch.compile, forward and backward; right, what is held between the two, in % of
    dense. Raises ValueError for several layers or none, and for more than three batch sizes.
    """
    title = _layer(table)
    names = [name for name in ("triton union", "triton hybrid", "dense eager") if name in set(table["provider"])]
    table = table[table["provider"].isin(names)]
    styles = _styles(sorted(table["tokens"].unique(), reverse=True), "batch sizes")
    patterns = sorted(table["pattern"].unique(), reverse=True)
    figure, axes = _figure(PAGE, 0.9 + 2.1 * len(patterns), len(patterns), 2, sharex=True)
    for pattern, (left, right) in zip(patterns, axes, strict=True):
        panel = table[table["pattern"] == pattern]
        _speed_lines(left, panel, "active", "tokens", styles)
        _mark_crossovers(
            left, crossovers[(crossovers["pattern"] == pattern) & crossovers["provider"].isin(names)], styles
        )
        _lines(right, panel, "active", "held_share", "tokens", styles)
        right.axhline(100, color=PROVIDERS[analysis.BASELINE][0], linewidth=0.8)
        left.set(xscale="log", ylabel="speed-up over dense torch.compile")
        right.set(xscale="log", ylim=(0, None), ylabel="held for backward, % of dense")
        left.set_title(pattern, loc="left")
        for axis in (left.xaxis, left.yaxis, right.xaxis):
            _plain(axis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    figure.suptitle(f"{title}; forward and backward", fontsize=8)
    _speed_legend(figure, names, {f"{tokens:,} tokens": style for tokens, style in styles.items()})
    return figure


def training_devices(table: pd.DataFrame, provider: str = "triton union") -> Figure:
    """Draw a training step's change of speed and of held memory by activity, a bar a device (Fig. 12, one layer).

    table: `analysis.training_speedups` of one layer, one pattern and one batch size, on any devices. Levels of activity are
    the same where their first two digits are. Raises ValueError for several layers, patterns or batch sizes, for
    none, and for more than four devices.
    """
    table = table[table["provider"] == provider]
    cases = table[["hidden_size", "intermediate_size", "gated", "dtype", "pattern", "tokens"]].drop_duplicates()
    if len(cases) != 1:
        raise ValueError(f"a figure of devices shows one layer, pattern and batch size; this table has {len(cases)}")
    devices = sorted(table["device"].unique())
    fills = [(BLUE, ""), (ORANGE, "////"), (GREEN, "...."), (PURPLE, "xxxx")]
    if len(devices) > len(fills):
        raise ValueError(f"{len(devices)} devices cannot be told apart in one figure; give at most {len(fills)}")
    table = table.assign(
        level=table["active"].map(lambda active: float(f"{active:.2g}")),
        faster=100 * (table["speedup"] - 1),
        smaller=table["held_share"] - 100,
    )
    levels = sorted(table["level"].unique())
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    width = 0.8 / len(devices)
    for ax, column in zip(axes.flat, ("faster", "smaller"), strict=True):
        for place, (device, (colour, hatch)) in enumerate(zip(devices, fills, strict=False)):
            rows = table[table["device"] == device].drop_duplicates("level", keep="last")
            x = [levels.index(level) + (place - (len(devices) - 1) / 2) * width for level in rows["level"]]
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            bars = ax.bar(x, rows[column], width, label=device, **look)
            labels = [f"{value:+.0f}" for value in rows[column]]
            ax.bar_label(bars, labels, fontsize=6.5, padding=2, rotation=90 if len(devices) > 1 else 0)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
        ax.grid(False, axis="x")
        ax.margins(y=0.15)
        ax.set_xlabel("active neurons per token")
    axes[0, 0].set_ylabel("training speed, % over dense")
    axes[0, 1].set_ylabel("held for backward, % over dense")
    hidden_size, intermediate_size, gated, dtype, pattern, tokens = cases.iloc[0]
    kind = f"{'gated' if gated else 'non-gated'} layer, {hidden_size} x {intermediate_size}, {dtype}"
    figure.suptitle(f"{kind}; {tokens:,} tokens, {pattern}; {provider} against {analysis.BASELINE}", fontsize=8)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, handlelength=1.6)
    return figure


def ffn_tokens(table: pd.DataFrame, active: float) -> Figure:
    """Draw speed-up over dense torch.compile against batch size, a line a path and way of calling.

    table: `analysis.at_level` of `analysis.speedups`, of one layer and one pattern; active: the level wanted. A batch
    whose activity is farther from it than a factor of 1.25 has it in brackets. Raises ValueError for several layers or
    none, several patterns, and more than three ways of calling. Ours.
    """
    title = _layer(table)
    if table["pattern"].nunique() != 1:
        raise ValueError(f"one figure shows one pattern; this table has {', '.join(sorted(table['pattern'].unique()))}")
    words = {"stream": "one call after the other", "graph": "CUDA graph"}
    sets = table["weight_sets"].map(lambda n: f", {n} sets of weights in turn" if n > 1 else "")
    table = table.assign(way=table["mode"].map(words) + sets)
    ways = table.sort_values(["mode", "weight_sets"], ascending=[False, True])["way"].unique()
    styles = _styles(ways, "ways of calling")
    names = [name for name in PROVIDERS if name in set(table["provider"]) and name != analysis.BASELINE]
    figure, axes = _figure(PAGE, 3.3)
    ax = axes[0, 0]
    _speed_lines(ax, table[table["provider"].isin(names)], "tokens", "way", styles)
    batches = {
        n: f"{n // 1024:,}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}" for n in sorted(table["tokens"].unique())
    }
    far = table[(table["active"] > active * NEAR) | (table["active"] < active / NEAR)]
    for tokens, measured in far.groupby("tokens")["active"].first().items():
        batches[tokens] += f"\n({measured:.0f})"
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(batches), batches.values())
    ax.xaxis.set_minor_locator(NullLocator())
    brackets = f" (in brackets: active, where it is far from {active:g})" if len(far) else ""
    ax.set(xlabel="tokens in the batch" + brackets, ylabel="speed-up over dense torch.compile")
    ax.set_title(f"{title}; {table['pattern'].iloc[0]}, {active:g} active", loc="left", fontsize=8)
    _speed_legend(figure, names, styles)
    return figure


def ffn_roofline(table: pd.DataFrame) -> Figure:
    """Draw each kernel under the device's roof, and its time against the least that its work could take.

    table: `analysis.roofline` of one case. Kernels are numbered alike on both sides; one whose operations or bytes are not
    known (or that computes nothing) is only on the right. Raises ValueError for several layers or none, and
    for several cases. Ours.
    """
    title = _layer(table)
    cases = table[["tokens", "pattern", "active"]].drop_duplicates()
    if len(cases) != 1:
        raise ValueError(f"one figure shows one case; this table has {len(cases)}")
    tokens, pattern, active = cases.iloc[0]
    known = {name: at for at, name in enumerate(PROVIDERS)}
    table = table.sort_values("provider", key=lambda names: names.map(known), kind="stable").reset_index(drop=True)
    figure, (pair,) = _figure(PAGE, max(2.8, 0.6 + 0.2 * len(table)), 1, 2)
    left, right = pair

    peak, bandwidth = table["peak"].iloc[0], table["bandwidth"].iloc[0]
    drawn = table[(table["intensity"] > 0) & (table["tflops"] > 0)]
    ridge = 1000 * peak / bandwidth
    ends = min([ridge, *drawn["intensity"]]) / 3, max([ridge, *drawn["intensity"]]) * 3
    left.plot([ends[0], ridge, ends[1]], [ends[0] * bandwidth / 1000, peak, peak], color="black", linewidth=1)
    note = {"textcoords": "offset points", "fontsize": 7}
    left.annotate(f"matmul {peak:.0f} TFLOP/s", (ends[1], peak), (0, 3), ha="right", **note)
    left.annotate(f"copy {bandwidth:.0f} GB/s", (ends[0], ends[0] * bandwidth / 1000), (8, -3), **note)
    labels: dict[tuple[float, float], list[str]] = {}  # kernels that lie close together share a label
    for row in drawn.itertuples():
        near = (at for at in labels if max(abs(np.log(at[0] / row.intensity)), abs(np.log(at[1] / row.tflops))) < 0.35)
        numbers = labels.setdefault(next(near, (row.intensity, row.tflops)), [])
        numbers.append(str(row.Index + 1))
        # Each one of a label lies larger beneath the one before, so that none is hidden.
        look = {"markersize": 2 + 3 * len(numbers), "markeredgecolor": "white", "markeredgewidth": 0.5}
        left.plot(row.intensity, row.tflops, "o", color=PROVIDERS[row.provider][0], zorder=4 - row.Index / 99, **look)
    for at, numbers in labels.items():
        halo = [withStroke(linewidth=1.5, foreground="white")]
        left.annotate(", ".join(numbers), at, (0, -5), ha="center", va="top", path_effects=halo, zorder=5, **note)
    left.set(xscale="log", yscale="log", xlabel="operations / least bytes (flop / byte)", ylabel="achieved TFLOP/s")
    for axis in (left.xaxis, left.yaxis):
        _plain(axis)

    colours = [PROVIDERS[name][0] for name in table["provider"]]
    y = np.arange(len(table)) + 0.7 * (table["provider"] != table["provider"].shift()).cumsum()
    right.barh(y, table["ms"], 0.75, color=colours, alpha=0.35)
    right.barh(y, table["floor"].clip(upper=table["ms"]).fillna(0), 0.75, color=colours)
    right.invert_yaxis()
    right.set_yticks(y, [f"{row.kernel}  {row.Index + 1}" for row in table.itertuples()])
    for at, row in zip(y, table.itertuples(), strict=True):
        text = f"{row.ms:.3g} ms" + (f", {100 * row.share:.0f}%" if row.share == row.share else ", floor not known")
        right.annotate(text, (row.ms, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
    right.set_xlim(0, 1.5 * table["ms"].max())
    right.set_xlabel("ms a call (dark: the least; its share in %)")
    right.grid(False, axis="y")
    right.tick_params(axis="y", length=0)
    figure.suptitle(f"{title}; {tokens:,} tokens, {pattern}, {active:.0f} active", fontsize=8)
    names = table["provider"].unique()
    handles = [Rectangle((0, 0), 1, 1, facecolor=PROVIDERS[name][0]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=4, handlelength=1)
    return figure


# --- downstream tasks (Table 6, Fig. 3) ------------------------------------------------------------


def _dodged(parameters: pd.Series, place: int, places: int) -> pd.Series:
    """Sizes on a log axis, each level a little beside the others."""
    return parameters * 10 ** (0.07 * (place - (places - 1) / 2))


def table6_tasks(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw accuracy against model size for each of the seven tasks and their mean, by L1 level, ours and the paper's.

    table: `analysis.across_sizes`; paper: `analysis.paper_tasks`. Bars are one standard error, dashed lines chance, and open
    circles accuracies that are not more than two standard errors above it. The paper's levels are of another model and do not compare
    with ours.
    """
    figure, axes = _figure(PAGE, 4.0, 2, 4, sharex=True)
    ours, theirs = (sorted(rows["l1_coefficient"].unique()) for rows in (table, paper))
    colours = _level_colours([*ours, *theirs])
    for ax, (task, (title, _)) in zip(axes.flat, analysis.TASKS.items(), strict=True):
        rows, printed = (found[found["task"] == task] for found in (table, paper))
        for place, level in enumerate(theirs):
            line = printed[printed["l1_coefficient"] == level].sort_values("parameters")
            x = _dodged(line["parameters"], place, len(theirs))
            ax.plot(x, 100 * line["accuracy"], "s-", color=colours[level], markersize=3, linewidth=0.6)
        for place, level in enumerate(ours):
            line = rows[rows["l1_coefficient"] == level].sort_values("parameters")
            x = _dodged(line["parameters"], place, len(ours))
            ax.errorbar(x, 100 * line["accuracy"], 100 * line["stderr"], fmt="-", color=colours[level], linewidth=0.6)
            above = line["verdict"] == "above chance"
            for chosen, fill in ((~above, "white"), (above, colours[level])):
                ax.plot(x[chosen], 100 * line["accuracy"][chosen], "o", color=colours[level], mfc=fill, markersize=4)
        ax.axhline(100 * rows["chance"].iloc[0], color="0.4", linestyle="--", linewidth=0.8, zorder=1)
        ax.set(xscale="log", title=title)
        ax.margins(0.08, 0.12)
        ax.xaxis.set_minor_locator(NullLocator())
    for ax in axes[1]:
        ax.set_xlabel("parameters")
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy (%)")
    dot = {"marker": "o", "linestyle": "", "markersize": 4}
    handles = {f"ours, L1 = {_level(level)}": Line2D([], [], color=colours[level], **dot) for level in ours}
    handles |= {
        f"paper, L1 = {_level(level)}": Line2D([], [], color=colours[level], **(dot | {"marker": "s"}))
        for level in theirs
    }
    handles["not above chance"] = Line2D([], [], color="0.4", mfc="white", **dot)
    handles["chance"] = Line2D([], [], color="0.4", linestyle="--", linewidth=0.8)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, columnspacing=1.2)
    return figure


def fig03_accuracy(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the mean accuracy of the seven tasks at each L1 level, a panel a model size, ours and the paper's.

    table: `analysis.several_levels`; paper: `analysis.paper_levels`. Bars are one standard error, the dashed line is chance.
    """
    sizes = [rows for _, rows in table[table["task"] == analysis.MEAN].groupby(analysis.SIZE, dropna=False)]
    panels = [rows.sort_values("l1_coefficient") for rows in [*sizes, paper]]
    ratios = [1 + len(rows) for rows in panels]
    figure, (row,) = _figure(min(PAGE, 0.5 * sum(ratios)), 2.3, 1, len(panels), sharey=True, width_ratios=ratios)
    chance = 100 * sizes[0]["chance"].iloc[0]
    for ax, rows in zip(row, panels, strict=True):
        x, y = range(len(rows)), 100 * rows["accuracy"]
        colours = list(_level_colours(rows["l1_coefficient"]).values())
        ax.plot(x, y, color="0.7", linewidth=1, zorder=1)
        ax.scatter(x, y, 22, colours[-len(rows) :], marker="s" if rows is panels[-1] else "o", zorder=3)
        name = f"{rows['parameters'].iloc[0] / 1e6:,.3g} M parameters"
        if "stderr" in rows:
            ax.errorbar(x, y, 100 * rows["stderr"], fmt="none", ecolor="0.4", elinewidth=1, zorder=2)
            if not np.isnan(tokens := rows["training_tokens"].iloc[0]):
                name += f",\n{tokens / 1e6:,.3g} M tokens"
        ax.axhline(chance, color="0.4", linestyle="--", linewidth=0.8, zorder=1)
        ax.set_xticks(x, [_level(level) for level in rows["l1_coefficient"]])
        ax.set(xlabel="L1 coefficient", title=name)
        ax.margins(0.15, 0.12)
    note = {"textcoords": "offset points", "fontsize": 7, "color": "0.3", "ha": "center"}
    row[-1].annotate(f"chance {chance:.1f}", (0.5, chance), (0, 3), xycoords=("axes fraction", "data"), **note)
    row[-1].set_title(f"the paper, {paper['parameters'].iloc[0] / 1e9:g} B")
    row[0].set_ylabel("mean accuracy (%)")
    return figure


# --- whole models (Figs 4, 5, 6, 10, 11, Table 1) -----------------------------------------------

# Colour and name of each side of a model; all with compiled layers.
SIDES = {
    "dense torch.compile": ("0.45", "dense"),
    "triton torch.compile": (BLUE, "sparse"),
    "triton union torch.compile": (BLUE, "sparse"),
    "auto torch.compile": (ORANGE, "auto"),
}
IMPOSED = {
    "paper": "random weights, imposed activity",
    "flat": "random weights, imposed activity, the same in each layer",
}


def _model(table: pd.DataFrame) -> str:
    """What was measured, on what: a figure's title. Raises ValueError unless it is one model, profile and device."""
    about = table[["model", "num_layers", "profile", "device"]].drop_duplicates()
    if len(about) != 1:
        raise ValueError(f"this figure shows one model on one device; this table has {len(about)}")
    model, layers, profile, device = about.iloc[0]
    return f"{model}, {layers} layers, {device}; {IMPOSED.get(profile, profile)}"


def _gains(table: pd.DataFrame, labels: tuple[str, str], title: str) -> Figure:
    """Two panels, faster and saved in % of dense, a group of bars a level of activity and a bar a provider."""
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    levels = list(dict.fromkeys(table["active"]))
    names = [name for name in SIDES if name in set(table["provider"])]
    width = 0.8 / len(names)
    for ax, column, label in zip(axes.flat, ("faster", "saved"), labels, strict=True):
        for place, name in enumerate(names):
            rows = table[(table["provider"] == name) & table[column].notna()]
            x = [levels.index(active) + (place - (len(names) - 1) / 2) * width for active in rows["active"]]
            bars = ax.bar(x, rows[column], width, color=SIDES[name][0], label=SIDES[name][1])
            texts = [f"{round(value) + 0:+d}" for value in rows[column]]
            ax.bar_label(bars, texts, fontsize=6.5, padding=2, rotation=90 if len(levels) * len(names) > 12 else 0)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks(range(len(levels)), [f"{active:.2g}" if active < 100 else f"{active:.0f}" for active in levels])
        ax.grid(False, axis="x")
        ax.margins(y=0.18)
        ax.set(xlabel="active neurons per token", ylabel=label)
    figure.suptitle(title, fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1)
    return figure


def fig04_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in forward speed and the energy it saves at each level of activity (Fig. 4).

    table: `analysis.model_speedups` of one model, batch and device. Raises ValueError for several.
    """
    batch, context = table[["batch", "context"]].iloc[0]
    title = f"{_model(table)}; {batch} x {context} tokens"
    labels = "forward speed, % over dense", "energy saved, % of dense"
    return _gains(analysis.level_gains(table), labels, title)


def fig05_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in training speed and the peak memory it saves at each level of activity (Fig. 5).

    table: `analysis.step_speedups` of one model, micro-batch and device. Raises ValueError for several.
    """
    title = f"{_model(table)}; steps of {table['micro_batch'].iloc[0]} x {table['context'].iloc[0]} tokens"
    labels = "training speed, % over dense", "peak memory saved, %"
    return _gains(analysis.level_gains(table, by="peak_change"), labels, title)


def fig06_contributions(table: pd.DataFrame) -> Figure:
    """Draw each layer's activity and, below, the time that its feed-forward layer saves (Figs 6, 10, 11).

    table: `analysis.layer_contributions` of one model, level and device. Raises ValueError for several.
    """
    title = _model(table)
    if table["level"].nunique() != 1:
        raise ValueError(f"this figure shows one level of activity; this table has {table['level'].nunique()}")
    table = table.sort_values("layer")
    figure, axes = _figure(COLUMN, 3.9, 2, 1, sharex=True)
    top, bottom = axes[0, 0], axes[1, 0]
    shown = table[["active", "active_max"]].clip(lower=ACTIVE_FLOOR)
    top.bar(table["layer"], shown["active"], 0.7, color=BLUE, label="mean")
    top.scatter(table["layer"], shown["active_max"], 14, marker="v", color=ORANGE, label="maximum")
    top.set(yscale="log", ylabel="active neurons per token")
    top.set_ylim(0.5 * shown["active"].min(), 4 * shown["active_max"].max())
    _plain(top.yaxis)
    r = analysis.correlation(table)
    bottom.bar(table["layer"], table["saved"], 0.7, color=BLUE, label=f"sparse (r = {r:.3f})")
    look = {"color": ORANGE, "edgecolor": "white", "linewidth": 0.5, "zorder": 3}
    bottom.scatter(table["layer"], table["auto_saved"], 14, marker="D", label="auto", **look)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="layer", ylabel="ms saved of the\ndense feed-forward layer")
    bottom.margins(y=0.3)
    bottom.set_xticks(table["layer"][:: max(1, len(table) // 10)])
    for ax in (top, bottom):
        ax.grid(False, axis="x")
        ax.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1, borderaxespad=0.2)
    model, rest = title.split("; ")
    figure.suptitle(f"{model}\n{rest}; {table['level'].iloc[0]:.3g} active", fontsize=7.5)
    return figure


def model_parts(table: pd.DataFrame) -> Figure:
    """Draw where the time of a decoder layer goes, dense and sparse, and the least that Amdahl's law leaves.

    table: `analysis.layer_parts` of one model, batch and device. Raises ValueError for several.
    """
    title = _model(table)
    if len(table) != table["provider"].nunique():
        raise ValueError(f"this figure shows one case; this table has {len(table)} rows")
    after = list(table.columns).index("provider") + 1
    parts = list(table.columns[after : list(table.columns).index("total")])
    figure, axes = _figure(PAGE, 1.9)
    ax = axes[0, 0]
    table = table.sort_values("provider", key=lambda names: names.map(list(SIDES).index)).reset_index(drop=True)
    colours = dict(zip(parts, ["0.35", "0.55", "0.8", ORANGE, BLUE, GREEN], strict=False))
    left = np.zeros(len(table))
    for part in parts:
        ax.barh(table.index, table[part], 0.6, left=left, color=colours[part], label=part)
        for y, (value, start) in enumerate(zip(table[part], left, strict=True)):
            if value > 0.04 * table["total"].max():
                ink = "black" if colours[part] == "0.8" else "white"
                ax.text(start + value / 2, y, f"{value:.3g}", ha="center", va="center", fontsize=6.5, color=ink)
        left += table[part].to_numpy()
    for row in table.itertuples():
        text = f"{row.total:.3g} ms" + (f", {100 * (row.speedup - 1):+.0f}%" if row.speedup != 1 else "")
        ax.annotate(text, (row.total, row.Index), (3, 0), textcoords="offset points", va="center", fontsize=7)
    limit = table["limit"].iloc[0]
    least = table.loc[table["provider"] == analysis.BASELINE, "total"].iloc[0] / limit
    ax.axvline(least, color="black", linestyle="--", linewidth=0.9)
    note = f"dense without up and down: {100 * (limit - 1):+.0f}%"
    ax.annotate(note, (least, -0.42), (-3, 0), textcoords="offset points", ha="right", va="center", fontsize=7)
    ax.set_yticks(table.index, [SIDES[name][1] for name in table["provider"]])
    ax.set_ylim(len(table) - 0.5, -0.65)
    ax.set_xlim(0, 1.18 * table["total"].max())
    ax.set_xlabel("ms of one decoder layer")
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    batch, context, active = table[["batch", "context", "active"]].iloc[0]
    figure.suptitle(f"{title}; {batch:.0f} x {context:.0f} tokens, {active:.3g} active", fontsize=8)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=6, handlelength=1, columnspacing=1)
    return figure


def model_decode(table: pd.DataFrame) -> Figure:
    """Draw tokens a second in decoding, and the gain over dense, against the number of documents.

    table: `analysis.decode_speedups` of one model, context and device. Raises ValueError for several.
    """
    title = _model(table)
    if table["context"].nunique() != 1:
        raise ValueError(f"this figure shows one length of context; this table has {table['context'].nunique()}")
    figure, axes = _figure(PAGE, 2.5, 1, 2)
    left, right = axes.flat
    names = [name for name in SIDES if name in set(table["provider"])]
    for name in names:
        line = table[table["provider"] == name].sort_values("batch")
        colour, label = SIDES[name]
        look = {"color": colour, "marker": "o", "markersize": 4, "label": label}
        left.plot(line["batch"], line["tokens_per_second"], **look)
        if name != analysis.BASELINE:
            right.plot(line["batch"], 100 * (line["speedup"] - 1), **look)
            for batch, gain in zip(line["batch"], 100 * (line["speedup"] - 1), strict=True):
                place = {"xytext": (0, -11 if label == "auto" else 5), "textcoords": "offset points", "ha": "center"}
                right.annotate(f"{round(gain) + 0:+d}", (batch, gain), color=colour, fontsize=6.5, **place)
    right.axhline(0, color=SIDES[analysis.BASELINE][0], linewidth=0.8)
    right.margins(0.1, 0.2)
    batches = sorted(table["batch"].unique())
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(batches, [str(batch) for batch in batches])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("documents continued at once")
    left.set(yscale="log", ylabel="tokens per second")
    _plain(left.yaxis)
    right.set_ylabel("speed, % over dense")
    context = table["context"].iloc[0]
    figure.suptitle(f"{title}; {context} tokens in the cache, CUDA graphs", fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def table1_scale(table: pd.DataFrame) -> Figure:
    """Draw Table 1 as the paper has it and as we measured it, a row a quantity, a group of bars a model.

    table: `analysis.scale_table`; a row of panels for each quantity that was measured. Raises ValueError where none was.
    """
    measured = [quantity for quantity, rows in table.groupby("quantity", sort=False) if rows["dense"].notna().any()]
    if not measured:
        raise ValueError("none of the quantities of Table 1 was measured")
    figure, axes = _figure(PAGE, 0.7 + 1.45 * len(measured), len(measured), 2)
    for quantity, pair in zip(measured, axes, strict=True):
        rows = table[table["quantity"] == quantity].reset_index(drop=True)
        for ax, side in zip(pair, ("paper_", ""), strict=True):
            dense, sparse = rows[f"{side}dense"], rows[f"{side}sparse"]
            ax.bar(rows.index - 0.2, dense, 0.38, color=SIDES[analysis.BASELINE][0], label="dense")
            ax.bar(rows.index + 0.2, sparse, 0.38, color=BLUE, label="sparse")
            for place, change in rows[f"{side}change"].dropna().items():
                at = place, max(dense[place], sparse[place])
                ax.annotate(f"{change:+.1f}%", at, (0, 3), textcoords="offset points", ha="center", fontsize=6.5)
            ax.set_xticks(rows.index, rows["model"])
            ax.margins(y=0.2)
            ax.grid(False, axis="x")
        pair[0].set_ylabel(f"{quantity}\n({rows['unit'].iloc[0]})")
    devices = "; ".join(dict.fromkeys(device for device in table["device"] if device))
    axes[0, 0].set_title(f"paper, {table['paper_device'].iloc[0]}", loc="left")
    imposed = ", imposed activity" if set(table["profile"]) - {"", "checkpoint"} else ""
    axes[0, 1].set_title(f"ours, {devices}{imposed}", loc="left")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1)
    return figure


# --- saving -------------------------------------------------------------------------------------


def save(
    figure: Figure, path: str | Path, inputs: Sequence[Path], parameters: dict, source: str, device: str | None = None
) -> Path:
    """Write a figure as PNG (200 dpi) and PDF with a JSON beside it, and return the path of the PNG.

    path: without suffix. inputs: the files that the numbers came from. source: where they came from: "live"
    (measured by this run), "recorded" (kept in data/) or "paper"; device: on what they were measured. The
    same inputs give the same bytes. Each file appears whole or not at all. Raises ValueError for another
    source.
    """
    if source not in ("live", "recorded", "paper"):
        raise ValueError(f"source is {source!r}; use 'live', 'recorded' or 'paper'")
    path = Path(path)
    without_dates = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    for suffix, metadata in without_dates.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=200, metadata=metadata)
        results.write_atomically(path.with_name(f"{path.name}.{suffix}"), buffer.getvalue())
    origin = {
        "source": source,
        "device": device,
        "inputs": {os.path.relpath(file, results.root()): results.file_hash(file) for file in inputs},
        "parameters": parameters,
        "commit": results.source_commit(MODULES),
        "versions": {name: version for name, version in results.versions().items() if name in DRAWN_WITH},
    }
    results.write_atomically(path.with_name(f"{path.name}.json"), json.dumps(origin, indent=2) + "\n")
    return path.with_name(f"{path.name}.png")
