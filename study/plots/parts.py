"""Figures of a decoder layer's parts, and of decoding (2B)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from study import analysis
from study.plots.base import (
    _HALO,
    AUTO,
    GATE,
    PAGE,
    SPARSE,
    UP,
    _bars,
    _caption,
    _change,
    _key,
    _legend,
    _measured,
    _note,
    _one,
    _panel,
    _row_names,
)
from study.plots.models import _PICKS, SIDES, _imposed, _model, _title
from study.plots.speed import DENSE_FP8, SPARSE_FP8
from twell.measure import providers

_RING = {"color": AUTO, "linestyle": "", "marker": "D", "markersize": 9, "mfc": "none"}


def model_parts(table: pd.DataFrame) -> Figure:
    """Draw the time of a decoder layer's parts, and the least that Amdahl's law leaves.

    table: `analysis.layer_parts` of one model and device; several batches stand one below the
    other, all of forward passes or all of decoding behind as many tokens. Raises ValueError for
    others.
    """
    _model(table)
    decoding, twice = table["tokens"] == table["batch"], table.duplicated(["batch", "provider"])
    if decoding.nunique() != 1 or table["context"].nunique() != 1 or twice.any():
        raise ValueError("this figure shows batches of one kind, each once; this table has others")
    decoding = bool(decoding.iloc[0])
    columns = list(table.columns)
    parts = columns[columns.index("provider") + 1 : columns.index("total")]
    sides = table["provider"].map(list(SIDES).index)
    table = table.assign(side=sides).sort_values(["batch", "side"], ignore_index=True)
    cases = list(dict.fromkeys(table["batch"]))
    # Bars of a batch touch each other, batches do not.
    y = np.arange(len(table)) + 0.5 * table["batch"].map(cases.index).to_numpy()
    scale, unit = (1e3, "µs") if table["total"].max() < 1 else (1, "ms")
    table[[*parts, "total"]] *= scale
    figure, ax = _panel(PAGE, 1.4 + 0.27 * len(table) + 0.1 * len(cases))
    drawn = _stack(ax, y, table, parts)
    for row, place in zip(table.itertuples(), y, strict=True):
        gain = f", {_change(100 * (row.speedup - 1))}" if row.speedup != 1 else ""
        digits = max(0, 2 - int(np.log10(row.total)))
        text = f"{row.total:.{digits}f} {unit}{gain}"
        _note(ax, text, (row.total, place), (4, 0), va="center", fontsize=7, **_HALO)
    for batch in cases:
        _mark_limit(ax, y[table["batch"] == batch], table[table["batch"] == batch])
    names, title = _parts_names(table, decoding)
    _row_names(ax, y, names)
    ax.set_ylim(y.max() + 0.5, -0.8)
    ax.set_xlim(0, 1.18 * table["total"].max())
    ax.set_xlabel(f"time of one decoder layer ({unit})")
    _title(figure, table, title)
    limit = _key("black", linestyle=":", linewidth=1.2)
    drawn["limit: up and down cost nothing"] = limit
    _legend(figure, "lower center", drawn, ncols=4, handlelength=1.4, columnspacing=1.2)
    layers = f"{table['num_layers'].iloc[0]:.0f}"
    whole = (
        f"A whole step has {layers} such layers, the embedding and the output layer, so its speed"
    )
    _caption(
        figure,
        "Percentages are changes of speed of this layer over dense.",
        f"{whole} changes a little less." if decoding else "",
        "On the decode path, one kernel computes gate and active up; it counts as gate."
        if decoding
        else "",
        _imposed(table),
        "One measurement: the median time of the layer, split by a profile of its kernels.",
    )
    return figure


def _stack(ax: Axes, y: np.ndarray, table: pd.DataFrame, parts: list) -> dict[str, Rectangle]:
    """Draw parts end to end, each with as many digits as it has room for; what was drawn."""
    looks = [{"color": shade} for shade in ("0.35", "0.55", "0.8", GATE, UP)]
    looks.append({"facecolor": "white", "edgecolor": "0.6", "hatch": "/////", "linewidth": 0})
    left, drawn = np.zeros(len(table)), {}
    for part, look in zip(parts, looks, strict=False):
        if not table[part].any():
            continue
        bars = ax.barh(y, table[part], 0.8, left=left, **look)
        drawn[part] = bars[0]
        text_look = {"ha": "center", "va": "center", "fontsize": 6.5, "zorder": 5}
        text_look["color"] = "white" if look.get("color") in ("0.35", "0.55") else "black"
        # Digits stand on the line of the limit.
        ground = {"facecolor": look.get("color", "white"), "edgecolor": "none", "pad": 0.6}
        for place, value, start in zip(y, table[part], left, strict=True):
            texts = (f"{value:.{digits}g}" for digits in (3, 2, 1))
            room = value / (0.0125 * table["total"].max())  # characters
            if text := next((text for text in texts if len(text) < room), None):
                ax.text(start + value / 2, place, text, bbox=ground, **text_look)
        left += table[part].to_numpy()
    return drawn


def _mark_limit(ax: Axes, y: np.ndarray, rows: pd.DataFrame) -> None:
    """Mark the time that a batch takes without up and down, above its bars and between them."""
    limit = rows["limit"].iloc[0]
    least = rows.loc[rows["provider"] == analysis.BASELINE, "total"].iloc[0] / limit
    ends = [y.min() - 0.62, y.max() + 0.48]
    ax.plot([least] * 2, ends, color="black", linestyle=":", linewidth=1.2, zorder=4)
    note = f"limit {_change(100 * (limit - 1))}"
    _note(ax, note, (least, y.min() - 0.6), (2, 0), ha="left", va="center")


def _parts_names(table: pd.DataFrame, decoding: bool) -> tuple[list[str], str]:
    """Names of bars, and the end of the title."""
    context, several = f"{table['context'].iloc[0]:.0f}", table["batch"].nunique() > 1
    if decoding:
        kinds = [f"{batch:.0f} document{'s' if batch > 1 else ''}" for batch in table["batch"]]
        title = f"decoding {'' if several else 'of ' + kinds[0] + ' '}behind {context} tokens"
    else:
        kinds = [f"{batch:.0f} x {float(context):,.0f}" for batch in table["batch"]]
        title = "forward" if several else f"forward, {kinds[0]} tokens"
    sides = [SIDES[name][1] for name in table["provider"]]
    names = [f"{kind}, {side}" for kind, side in zip(kinds, sides, strict=True)]
    low, high = table["active"].min(), table["active"].max()
    active = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return names if several else sides, f"{title}, {active} active"


def _decode_lines(table: pd.DataFrame) -> dict[str, tuple[pd.DataFrame, str | tuple, dict, int]]:
    """By name the rows of a line, its colour and look, and how high notes beside points are."""
    sides, tuned = analysis.fastest(table[~table["tuned"]]), table[table["tuned"]]
    has_fp8 = (sides["side"] == SPARSE_FP8).any()
    tuned = tuned[tuned["provider"] == providers.TRITON_COMPILED.name]
    hollow = {"markersize": 4, "markerfacecolor": "white", "linestyle": "--"}
    square = {"marker": "s", "markersize": 5, "markerfacecolor": "white", "linestyle": ""}
    looks = {
        "sparse": (SPARSE, {"marker": "o", "markersize": 4}, -6 if has_fp8 else 5),
        SPARSE_FP8: (SPARSE, hollow | {"marker": "o"}, 6),
        DENSE_FP8: ("black", hollow | {"marker": "v"}, 0),
    }
    lines = {side: (sides[sides["side"] == side], *look) for side, look in looks.items()}
    return lines | {"sparse, the compiler tunes both sides": (tuned, SPARSE, square, -1)}


def model_decode(table: pd.DataFrame) -> Figure:
    """Draw the gain of decoding over dense, tuned and not and in FP8, against documents.

    table: `analysis.decode_speedups` of one model, context and device. Raises ValueError for
    several.
    """
    (context,) = _one(table, ["context"], "length of context")
    batches = sorted(table["batch"].unique())
    table = table.assign(x=table["batch"].map(batches.index), gain=100 * (table["speedup"] - 1))
    for end in ("low", "high"):
        table[end] = 100 * (table[f"speedup_{end}"] - 1)
    table = table.sort_values("x")
    lines = _decode_lines(table)
    in_fp8 = len(lines[SPARSE_FP8][0]) > 0
    figure, ax = _panel(PAGE, 3.2 if in_fp8 else 2.5)
    _title(figure, table, f"decoding behind {context} tokens, in CUDA graphs")
    for name, (rows, colour, look, height) in lines.items():
        if len(rows):
            ax.plot(rows["x"], rows["gain"], color=colour, label=name, **look)
            _bars(ax, rows["x"], rows["gain"], rows["low"], rows["high"], colour)
        for row in rows.itertuples() if name != DENSE_FP8 else ():
            aside = {"ha": "right"} if height < 0 else {}  # notes of FP8 are on the other side
            look = {"va": "center", "fontsize": 7} | _HALO | aside
            _note(ax, _change(row.gain), (row.x, row.gain), (-9 if aside else 9, height), **look)
    auto = table[(table["provider"] == providers.AUTO_COMPILED.name) & ~table["tuned"]]
    ax.plot(auto["x"], auto["gain"], label="auto", **_RING)
    dense = table[(table["provider"] == analysis.BASELINE) & ~table["tuned"]].set_index("batch")
    ax.axhline(0, color="black", linewidth=0.8)
    ticks = [
        f"{row.Index}\n{row.active:.0f} active\n{row.tokens_per_second:,.0f}"
        for row in dense.itertuples()
    ]
    ax.set_xticks(range(len(batches)), ticks)
    ax.margins(0.12, 0.25)
    below = "documents continued at once; active neurons; tokens/s of dense"
    ax.set(xlabel=below, ylabel="tokens/s (% over dense)")
    _legend(figure, "lower center", ncols=3)
    of_all = auto.loc[auto["path"].str.fullmatch(r"dense \d+"), "batch"]
    densely = f"With {' and '.join(map(str, of_all))} documents it computes all layers densely."
    words = "FP8: of the feed-forward layers; all else is in bf16." if in_fp8 else ""
    spread = _measured(table["low"], "replays")
    _caption(figure, _imposed(table), _PICKS, densely if len(of_all) else "", words, spread)
    return figure
