"""Figures of the formats (Fig. 1)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from twell.plots.base import BLUE, COLUMN, GREEN, ORANGE, PAGE, PURPLE, _figure, _plain


def fig01_formats(cells: pd.DataFrame, tile_n: int) -> Figure:
    """Draw the same small matrix dense, as ELL, TwELL and hybrid, from `analysis.format_cells`; colours are tiles."""
    tiles = [BLUE, ORANGE, GREEN, PURPLE]
    names = [["Dense", "TwELL"], ["ELL", "Hybrid"]]
    panels = dict(list(cells.groupby("format")))
    heights = {
        name: (panel.groupby("part")["row"].max() + 2).sum() for name, panel in panels.items()
    }
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
                    ax.text(
                        x + 0.5,
                        y + 0.53,
                        cell.label,
                        color=text,
                        fontsize=6,
                        ha="center",
                        va="center",
                    )
            for row, token in table.groupby("row")["token"].first().items():
                ax.text(
                    -0.3, top + row + 0.53, f"$t_{{{token}}}$", fontsize=7, ha="right", va="center"
                )
            top += table["row"].max() + 2.0
        ax.set(
            xlim=(-1.3, cells["slot"].max() + 1.1),
            ylim=(height - 0.7, -0.1),
            aspect="equal",
            anchor="NW",
        )
        ax.set_title(name, loc="left", weight="bold")
        ax.axis("off")
    kinds = [(tiles[t], f"non-zero of tile {t}, with its column") for t in range(2)]
    kinds += [("0.25", "count"), ("0.93", "unused slot")]
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour, _ in kinds]
    figure.legend(
        handles, [name for _, name in kinds], loc="outside lower center", ncols=4, handlelength=1
    )
    return figure


def fig01_bytes(table: pd.DataFrame) -> Figure:
    """Draw each format's bytes against dense as the active share grows, from `analysis.format_bytes`."""
    figure, axes = _figure(COLUMN, 2.5)
    ax = axes[0, 0]
    shades = iter(sns.light_palette(BLUE, 5)[::-1])
    looks = {"Dense": ("black", "--"), "ELL": (ORANGE, "-"), "Hybrid": (GREEN, "-")}
    for name, line in table.groupby("format", sort=False):
        colour, dash = looks.get(name.split(",")[0]) or (next(shades), "-")
        order = (
            3 if name == "Dense" else 2
        )  # its dashes lie on TwELL's line at C = 2, which is as large as dense
        ax.plot(
            100 * line["active_share"],
            line["relative"],
            dash,
            color=colour,
            label=name,
            zorder=order,
        )
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="active neurons (%)",
        ylabel="bytes / bytes of dense bf16",
    )
    _plain(ax.xaxis)
    _plain(ax.yaxis)
    ax.legend(loc="lower right", labelspacing=0.25)
    return figure
