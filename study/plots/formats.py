"""Figures of the formats (Fig. 1)."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from study.plots import base

_TILES = (base.TWELL, "white"), (sns.light_palette(base.TWELL, 5)[2], "black")  # and text
# Face, edge and text of the cells that are no values.
_KINDS = {
    "count": ("0.25", "white", "white"),
    "unused": ("0.93", "white", None),
    "zero": ("white", "0.85", None),
}


def fig01_formats(cells: pd.DataFrame, tile_n: int) -> Figure:
    """Draw a small matrix in each format, from `analysis.format_cells`; colours are tiles."""
    names = [["Dense", "TwELL"], ["ELL", "Hybrid"]]
    panels = dict(list(cells.groupby("format")))
    parts = {name: panel.groupby("part")["row"].max() for name, panel in panels.items()}
    heights = {name: (last + 2).sum() for name, last in parts.items()}  # with a gap below each
    rows = [max(heights[name] for name in row) for row in names]
    width = cells["slot"].max() + 3.5
    figure, axes = base.subplots(
        base.PAGE, base.PAGE * sum(rows) / (2 * width) + 0.7, 2, 2, height_ratios=rows
    )
    for ax, name, height in zip(axes.flat, sum(names, []), np.repeat(rows, 2), strict=True):
        _draw_cells(ax, panels[name], tile_n)
        ax.set(xlim=(-1.3, width - 2.4), ylim=(height - 0.7, -0.1), aspect="equal", anchor="NW")
        ax.set_title(name, loc="left", weight="bold")
        ax.axis("off")
    kinds = {f"non-zero of tile {tile}, with its column": _TILES[tile][0] for tile in range(2)}
    kinds |= {"count": _KINDS["count"][0], "unused slot": _KINDS["unused"][0]}
    entries = {name: Rectangle((0, 0), 1, 1, facecolor=colour) for name, colour in kinds.items()}
    base.legend(figure, "lower center", entries, ncols=2, handlelength=1)
    base.caption(
        figure,
        f"One matrix in four formats. Rows are tokens, and tiles have {tile_n} columns. Every cell",
        "with a column also stores the value. A row that does not fit keeps its true counts, and",
        "is stored densely as an overflow row or backup row.",
    )
    return figure


def _draw_cells(ax: Axes, panel: pd.DataFrame, tile_n: int) -> None:
    """Draw a format's parts, one below the other."""
    top = 0
    for part, table in panel.groupby("part", sort=False):
        if top:
            ax.text(0, top - 0.15, part, fontsize=base.SMALL, style="italic", va="bottom")
        for cell in table.itertuples():
            x, y = cell.slot, top + cell.row
            colour, ink = _TILES[cell.label // tile_n % len(_TILES)]
            face, edge, ink = _KINDS.get(cell.kind, (colour, "white", ink))
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor=edge, linewidth=0.5))
            if ink:
                look = {"color": ink, "fontsize": base.SMALL, "ha": "center", "va": "center"}
                ax.text(x + 0.5, y + 0.53, cell.label, **look)
        for row, token in table.groupby("row")["token"].first().items():
            y = top + row + 0.53
            ax.text(-0.3, y, f"$t_{{{token}}}$", fontsize=8, ha="right", va="center")
        top += table["row"].max() + 2.0


def fig01_bytes(table: pd.DataFrame) -> Figure:
    """Draw bytes against dense by active share, from `analysis.format_bytes`."""
    figure, ax = base.panel(base.COLUMN, 2.9)
    shades = iter(sns.light_palette(base.TWELL, 4)[:0:-1])
    looks = {"Dense": (base.DENSE, ""), "ELL": (base.ELL, "D"), "Hybrid": (base.HYBRID, "X")}
    for name, line in table.groupby("format", sort=False):
        kind = name.split(",")[0]
        colour, marker = looks.get(kind) or (next(shades), "o")
        look = {"color": colour, "marker": marker, "markersize": 4, "mec": "white", "mew": 0.5}
        look |= {"linewidth": 6} if kind == "Dense" else {}  # beneath TwELL of the same size
        ax.plot(100 * line["active_share"], line["relative"], **look)
        first = 100 * line["active_share"].iloc[0], line["relative"].iloc[0]
        offset = {"TwELL": (-2, -13), "ELL": (7, -4)}.get(kind, (-2, 4))
        base.note(ax, name if kind == "TwELL" else kind, first, offset, **base.HALO)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="active neurons (% of all)", ylabel="bytes (ratio to dense bf16)")
    base.plain(ax.xaxis, ax.yaxis)
    dense = table[table["format"] == "Dense"].iloc[0]
    neurons = round(dense["active"] / dense["active_share"])
    shape = f"{dense['nbytes'] / 2 / neurons:,.0f} x {neurons:,}"
    base.caption(
        figure,
        f"Each point packs one random matrix of {shape} with uneven rows: counted, not measured.",
        "C: compression of TwELL; at C = 2 it is as large as dense until tiles overflow.",
    )
    return figure
