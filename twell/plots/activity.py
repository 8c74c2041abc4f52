"""Figures of activity: layers (Figs 6, 10, 11), tokens (Fig. 7), and neurons (ours)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from twell import analysis
from twell.plots.base import (
    ACTIVE_FLOOR,
    BLUE,
    COLUMN,
    ORANGE,
    PAGE,
    RED,
    _figure,
    _level_colours,
    _plain,
    style,
)

# Colours of the inspector, light and dark: counts and surprise from the background to strong, signed values from blue
# through the background to orange. Steps of lightness, so that they are read without seeing colour.
PALETTES = {
    "light": {
        "sequential": [
            "#ffffff",
            "#e4f2df",
            "#b5e0c6",
            "#7bcac6",
            "#43a9c4",
            "#2a80b4",
            "#27549b",
            "#202a68",
        ],
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
        "sequential": [
            "#15181d",
            "#2b2f56",
            "#34508b",
            "#2a788e",
            "#22a884",
            "#63cb5f",
            "#b8de3b",
            "#fde725",
        ],
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
    handles = {
        "mean": bars,
        f"mean of all: {overall:.3g}": line,
        "99th percentile": p99,
        "maximum": largest,
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        title=title,
        loc="outside upper center",
        ncols=2,
        labelspacing=0.3,
    )
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
    y = np.arange(len(both)) + 0.6 * (
        np.arange(len(both)) >= len(lowest)
    )  # a gap between the two groups
    ax.barh(y, both["mean_active"], 0.75, color=[BLUE] * len(lowest) + [ORANGE] * len(highest))
    ax.invert_yaxis()
    ax.set_yticks(y, [visible(token)[:16] for token in both["token"]])
    for label in ax.get_yticklabels():
        label.set_parse_math(False)
    for at, value, count in zip(y, both["mean_active"], both["count"], strict=True):
        text = f"{value:.3g} (n = {count})"
        ax.annotate(
            text, (value, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5
        )
    ax.set_xlim(
        0, 1.02 * both["mean_active"].max()
    )  # notes go beyond: the layout leaves them as much as they need
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
        ax.plot(
            line["position"] + 1,
            line["mean_active"].clip(lower=ACTIVE_FLOOR),
            color=colours[l1],
            label=analysis.level_name(l1),
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="position in the sequence",
        ylabel="active neurons per token",
    )
    _plain(ax.xaxis)
    _plain(ax.yaxis)
    ax.legend(title="L1 coefficient")
    return figure


LINE = 0.17  # height of a line of text, inches
FIXED_WIDTH = ["DejaVu Sans Mono", "DejaVu Sans"]  # the second has scripts that the first lacks


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
    size = (
        72 * (PAGE - 0.15) / columns / 0.602
    )  # points; the advance of DejaVu Sans Mono is 0.602 of its size
    for (x, y, token), colour in zip(places, colours, strict=True):
        ax.add_patch(Rectangle((x, y), len(token), 0.94, facecolor=colour, linewidth=0))
        ink = "white" if np.dot(colour[:3], (0.3, 0.59, 0.11)) < 0.5 else "black"
        text = token.replace("␣", " ")
        ax.text(
            x,
            y + 0.5,
            text,
            color=ink,
            family=FIXED_WIDTH,
            fontsize=size,
            va="center",
            parse_math=False,
        )
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
        mpl.cm.ScalarMappable(norm, colours),
        ax=ax,
        location="bottom",
        aspect=60,
        shrink=0.6,
        pad=0.02,
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
    shades = [
        colours(norm(value)) if value == value else (1, 1, 1, 1) for value in passage["value"]
    ]
    _write(text, places, lines, shades, columns)
    bar = above.colorbar(
        mpl.cm.ScalarMappable(norm, colours),
        ax=text,
        location="top",
        aspect=60,
        shrink=0.6,
        pad=0.02,
    )
    bar.set_label(label)
    bar.outline.set_visible(False)
    if low > 0:
        _plain(bar.ax.xaxis)
    shown = counts.to_numpy(np.float64)
    most = max(float(np.nanmax(shown, initial=1)), 2)
    cells = LinearSegmentedColormap.from_list(
        "twell", PALETTES["light"]["sequential"]
    ).with_extremes(bad="0.85", under="white")
    left = counts.columns[0] - 0.5
    extent = (left, left + len(counts.columns), len(counts) - 0.5, -0.5)
    shown = np.where(shown == 0, 0.5, shown)  # below the scale
    image = heat.imshow(
        shown, cells, LogNorm(1, most), aspect="auto", interpolation="nearest", extent=extent
    )
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
        raise ValueError(
            "no neuron fires often enough; lower min_fires or min_count, or trace a longer text"
        )
    shown = table.head(rows)
    figure, axes = _figure(COLUMN, 0.75 + 0.2 * len(shown))
    ax = axes[0, 0]
    y = np.arange(len(shown))
    ax.hlines(
        y, 100 * shown["share"], 100 * shown["coverage"], color="0.8", linewidth=1.5, zorder=1
    )
    ax.scatter(100 * shown["share"], y, 18, color=BLUE, label="its firings that are at this token")
    ax.scatter(
        100 * shown["coverage"],
        y,
        18,
        color=ORANGE,
        marker="D",
        label="occurrences at which it fires",
    )
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
        bins["surprise"],
        bins["q25"],
        bins["q75"],
        color=BLUE,
        alpha=0.18,
        linewidth=0,
        label="middle half",
    )
    left.plot(bins["surprise"], bins["active"], "o-", color=BLUE, markersize=3.5, label="mean")
    left.set(
        xlabel="surprise of the token, $-$log p (nats)",
        ylabel="active neurons per token",
        ylim=(0, None),
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    looks = {
        "surprise": ("this token", BLUE, "o", -0.12),
        "next_surprise": ("the next token", ORANGE, "D", 0.12),
    }
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
    right.set_xticks(
        [*range(0, layers, every), layers + 0.5], [*map(str, range(0, layers, every)), "mean"]
    )
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
