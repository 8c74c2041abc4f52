"""Figures of activity: layers (Figs 6, 10, 11), tokens (Fig. 7), and neurons (ours)."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from study.plots import base
from twell.inspector import figure as inspector


def fig06_layers(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw mean, 99th percentile and maximum of active neurons by layer (`analysis.per_layer`)."""
    figure, ax = base.panel(base.COLUMN, 2.7)
    layer = table["layer"]
    shown = table[["mean", "p99", "max"]].clip(lower=base.ACTIVE_FLOOR)
    ax.vlines(layer, shown["mean"], shown["max"], color="0.85", linewidth=1, zorder=1)
    names = {"mean": ("mean", "o"), "p99": ("99th percentile", "_"), "max": ("busiest token", "^")}
    for column, (name, marker) in names.items():
        look = {"markersize": 5, "mfc": "white" if marker == "^" else base.SPARSE}
        ax.plot(layer, shown[column], marker, color=base.SPARSE, **look)
        place = layer.iloc[-1], shown[column].iloc[-1]
        base.note(ax, name, place, (7, 0), va="center", color=base.SPARSE)
    ax.set(xlabel="layer", ylabel="active neurons per token", yscale="log")
    ax.set_ylim(0.6 * shown["mean"].min(), 1.6 * shown["max"].max())
    base.plain(ax.yaxis)
    ax.set_xticks(layer[:: max(1, len(layer) // 6)])
    ax.grid(False, axis="x")
    base.caption(figure, base.sentence(about))
    return figure


def fig07_tokens(
    tokens: pd.DataFrame,
    positions: pd.DataFrame,
    passage: pd.DataFrame,
    num_tokens: int = 6,
    columns: int = 96,
    about: str = "",
) -> Figure:
    """Draw activity by token and by position, and a passage (Fig. 7).

    tokens, positions, passage: `analysis.per_token`, `by_position` and `passage`. num_tokens: of
    the lowest, and of the highest. columns: characters of a line of the passage.
    """
    places, lines = inspector.typeset(passage["token"], columns)
    heights = 1.2 + 0.3 * num_tokens, inspector.LINE * lines + 0.75
    figure = base.empty(inspector.PAGE, sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    left, right = above.subplots(1, 2)
    _tokens(left, tokens.head(num_tokens), tokens.iloc[num_tokens:].tail(num_tokens))

    position, active = positions["position"] + 1, positions["mean_active"]
    active = active.clip(lower=base.ACTIVE_FLOOR)
    right.plot(position, active, color=base.SPARSE, alpha=0.3, linewidth=0.8)
    ranges = (np.log(position) / np.log(1.25)).astype(int)  # each ends 1.25 times as far
    means = pd.DataFrame({"x": np.log(position), "y": active}).groupby(ranges).mean()
    right.plot(np.exp(means["x"]), means["y"], "o-", color=base.SPARSE, markersize=3)
    right.set(xlabel="position in the sequence (the first is 1)", ylabel="active neurons per token")
    right.set(xscale="log", yscale="log")
    base.plain(right.xaxis, right.yaxis)

    # A log scale has no zero: silent tokens get the colour of the least active ones.
    positive, text = passage.loc[passage["active"] > 0, "active"], below.subplots()
    active = passage["active"].clip(lower=base.ACTIVE_FLOOR if positive.empty else positive.min())
    low, high = active.quantile([0.02, 0.98])
    norm, colours = LogNorm(low, max(high, 1.001 * low), clip=True), inspector.inspector_colours()
    inspector.write_tokens(text, places, lines, [colours(norm(value)) for value in active], columns)
    label = "active neurons per token, mean over layers (⏎: end of a line)"
    inspector.text_scale(below, text, norm, colours, "bottom", label, "both")
    base.caption(
        figure,
        base.sentence(about),
        "Right: points are means over ranges of positions, the thin line single positions.",
        "Below: the scale spans the middle 96% of the tokens.",
    )
    return figure


def _tokens(ax: Axes, lowest: pd.DataFrame, highest: pd.DataFrame) -> None:
    """Draw a bar a token, in two groups."""
    both, y = pd.concat([lowest, highest]), np.arange(len(lowest) + len(highest))
    y = y + 1.2 * (y >= len(lowest))  # a gap between the two groups
    ax.barh(y, both["mean_active"], 0.75, color=base.SPARSE)
    base.row_names(ax, y, [inspector.visible(token)[:16] for token in both["token"]])
    for place, value, count in zip(y, both["mean_active"], both["count"], strict=True):
        base.note(ax, f"{value:.3g} (n = {count:,})", (value, place), (3, 0), va="center")
    for name, group in (("lowest", y[: len(lowest)]), ("highest", y[len(lowest) :])):
        if len(group):
            look = {"xycoords": ("axes fraction", "data"), "va": "center", "style": "italic"}
            base.note(ax, f"the {len(group)} {name}", (0, group[0] - 0.95), (3, 0), **look)
    ax.set_ylim(y[-1] + 0.6, -1.5)
    # Notes stand beyond the axes: the layout leaves them as much as they need.
    ax.set_xlim(0, 1.02 * both["mean_active"].max())
    ax.set_xlabel("active neurons per token\n(mean over its n occurrences and all layers)")


def number_neurons(
    table: pd.DataFrame, examples: list[pd.DataFrame], columns: int = 76, about: str = ""
) -> Figure:
    """Draw how well each neuron tells numbers from other tokens, and examples of the best one.

    table: `analysis.tells_apart`; examples: `analysis.examples`, one a line of so many characters.
    """
    heights = 2.1, 1.2 * inspector.LINE * len(examples) + 0.1
    figure = base.empty(inspector.PAGE, sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    ax, text = above.subplots(), below.subplots()
    y = table["layer"] + 0.6 * ((table["neuron"] * 0.618) % 1 - 0.5)  # the same each time
    ax.scatter(table["phi"], y, 5, linewidth=0, alpha=0.4, color=base.SPARSE)
    sides = (8, "bottom"), (-8, "top")
    for row, (offset, va) in zip(table.head(2).itertuples(), sides, strict=True):
        place, look = (row.phi, y[row.Index]), {"ha": "center", "va": va, "fontsize": 9}
        ax.plot(*place, "o", color=base.SPARSE, markersize=6)
        base.note(ax, f"neuron {row.neuron}", place, (0, offset), **look)
    ax.set(xlabel="how well firing tells numbers from other tokens (phi)", ylabel="layer")
    ax.set_yticks(range(table["layer"].max() + 1))
    ax.invert_yaxis()
    colours, places, shades = inspector.inspector_colours(), [], []
    for line, one in enumerate(examples):
        across = one["token"].str.replace(r"\s", " ", regex=True)
        starts = across.str.len().cumsum() - across.str.len()
        for x, word, h in zip(starts, across, one["value"], strict=True):
            if x + len(word) <= columns:
                places.append((x, 1.2 * line, word))
                shades.append(colours(abs(h) ** 0.5))
    inspector.write_tokens(text, places, 1.2 * len(examples), shades, columns)
    best = table.iloc[0]
    base.caption(
        figure,
        base.sentence(about),
        f"Above, one dot per neuron. Below, tokens around places where neuron {best['neuron']:.0f} of",
        f"layer {best['layer']:.0f} fires. The darker a token, the larger |h| (root of the scale).",
    )
    return figure
