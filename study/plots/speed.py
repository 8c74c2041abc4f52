"""Figures of speed: by activity, batch size, card and algorithm, in training and in FP8."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from study import analysis
from study.plots import base
from twell.measure import providers

PROVIDERS = {  # colour, marker and name of each path
    providers.AUTO.name: (base.AUTO, "", "auto: the path that it picks"),
    providers.UNION.name: (base.SPARSE, "o", "union path"),
    providers.ROWWISE.name: (base.ROWWISE, "D", "row-wise path"),
    providers.DECODE.name: (base.DECODE, "^", "decode path"),
    providers.HYBRID.name: (base.HYBRID, "X", "the paper's hybrid format"),
}
# The line without a marker, auto's, lies beneath the others.
_BROAD = {"linewidth": 6, "alpha": 0.35, "solid_capstyle": "round"}
_BASELINE = {"color": base.DENSE, "linewidth": 1.2}
_WAYS = {"graph": "in a CUDA graph", "stream": "separate calls"}
_PATTERNS = {
    "skewed": "Skewed: a few neurons fire often, as in trained models.",
    "even": "Even: all neurons fire equally often.",
}
_CROSSED = "Numbers: active neurons at which a path falls behind dense."
_LAYER = "hidden_size", "intermediate_size", "gated", "dtype", "device"


def _layer(table: pd.DataFrame) -> str:
    """Return layer and device, as a title. Raises ValueError unless there is one of each."""
    width, neurons, gated, dtype, device = base.one_case(table, _LAYER, "layer on one device")
    kind, dtype = "gated" if gated else "non-gated", dtype.replace("float", "f")
    return f"{kind} layer, {width} x {neurons}, {dtype}, {device}"


def _lines(ax: Axes, table: pd.DataFrame, x: str, y: str) -> None:
    """Draw y against x, a line for each path."""
    for name, line in table.sort_values(x).groupby("provider"):
        colour, marker, _ = PROVIDERS[name]
        look = {"marker": marker, "markersize": 3.5, "zorder": 3} if marker else _BROAD
        ax.plot(line[x], line[y], color=colour, **look)


def _speed_lines(ax: Axes, table: pd.DataFrame, x: str) -> None:
    """Draw speed-up against x with its spread, and a line at 1."""
    _lines(ax, table, x, "speedup")
    for name, rows in table[table["provider"] != providers.AUTO.name].groupby("provider"):
        ends = rows["speedup_low"], rows["speedup_high"]
        base.bars(ax, rows[x], rows["speedup"], *ends, PROVIDERS[name][0], zorder=3)
    ax.axhline(1, **_BASELINE)
    ax.set_yscale("log")
    base.plain(ax.yaxis)


def _speed_legend(figure: Figure, rows: pd.DataFrame) -> None:
    """Write below the figure the paths of its rows by colour and marker."""
    entries = {}
    for name, (colour, marker, text) in PROVIDERS.items():
        if name in set(rows["provider"]):
            look = {"marker": marker, "markersize": 4} if marker else _BROAD
            entries[text] = Line2D([], [], color=colour, **look)
    entries["dense, torch.compile"] = Line2D([], [], **_BASELINE)
    columns = 2 if len(entries) == 4 else 3
    base.legend(figure, "lower center", entries, ncols=columns, handlelength=2.6)


def _mark_crossovers(ax: Axes, crossovers: pd.DataFrame) -> None:
    """Mark at how many active neurons lines fall below 1; numbers stand where no line goes."""
    falls = crossovers[crossovers["provider"].isin(PROVIDERS)].dropna(subset="crossover")
    falls = falls.sort_values("crossover")
    for place, row in enumerate(falls.itertuples()):
        colour = PROVIDERS[row.provider][0]
        look = {"marker": "|", "markersize": 8, "markeredgewidth": 1.2, "zorder": 4}
        ax.plot(row.crossover, 1, color=colour, **look)
        offset, va, ha = ((2, 4), "bottom", "left") if place % 2 else ((-2, -4), "top", "right")
        look = {"color": colour, "va": va, "ha": ha} | base.HALO
        base.note(ax, f"{row.crossover:.0f}", (row.crossover, 1), offset, **look)


def ffn_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw speed-up over dense torch.compile by active neurons, a panel a batch size and pattern.

    table: `analysis.speedups` of one layer in one mode; crossovers: `analysis.crossovers` of it.
    """
    rows = table[table["provider"].isin(PROVIDERS)]
    sizes = sorted(rows["tokens"].unique(), reverse=True)
    patterns = sorted(table["pattern"].unique(), reverse=True)
    size = base.PAGE, 0.9 + 1.6 * len(patterns)
    figure, axes = base.subplots(*size, len(patterns), len(sizes), sharex=True, sharey=True)
    for pattern, panels in zip(patterns, axes, strict=True):
        for tokens, ax in zip(sizes, panels, strict=True):
            case = "tokens == @tokens and pattern == @pattern"
            _speed_lines(ax, rows.query(case), "active")
            _mark_crossovers(ax, crossovers.query(case))
            ax.set_xscale("log")
            ax.set_title(f"{pattern}, {tokens:,} tokens", loc="left")
    base.plain(axes[0, 0].xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    for ax in axes[:, 0]:
        ax.set_ylabel("speed over dense")
    figure.conditions = f"{_layer(table)}, forward"
    _speed_legend(figure, rows)
    base.caption(figure, *map(_PATTERNS.get, patterns), _CROSSED, base.measured())
    return figure


def training_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw a training step's speed-up and held memory by active neurons (Fig. 5, one layer).

    table: `analysis.training_speedups` of one layer and batch size in one mode; crossovers:
    `analysis.crossovers` of it.
    """
    table = table[table["pattern"].isin(_PATTERNS)]
    rows = table[table["provider"].isin(PROVIDERS)]
    (tokens,) = base.one_case(table, ["tokens"], "batch size")
    patterns = sorted(table["pattern"].unique(), reverse=True)
    size = base.PAGE, 0.9 + 1.75 * len(patterns)
    figure, axes = base.subplots(*size, len(patterns), 2, sharex=True, sharey="col")
    for pattern, (left, right) in zip(patterns, axes, strict=True):
        some = rows[rows["pattern"] == pattern]
        _speed_lines(left, some, "active")
        _mark_crossovers(left, crossovers[crossovers["pattern"] == pattern])
        _lines(right, some, "active", "held_share")
        right.axhline(100, **_BASELINE)
        left.set(xscale="log", ylabel="speed over dense")
        right.set(xscale="log", ylim=(0, 110), ylabel="held memory\n(% of dense)")
        for ax in (left, right):
            ax.set_title(f"{pattern} activity", loc="left")
            base.plain(ax.xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    figure.conditions = f"{_layer(table)}, {tokens:,} tokens; forward and backward"
    _speed_legend(figure, rows)
    held = "Held: bytes that forward keeps for backward."
    base.caption(figure, *map(_PATTERNS.get, patterns), held, _CROSSED, base.measured())
    return figure


def ffn_tokens(table: pd.DataFrame, active: float) -> Figure:
    """Draw speed-up over dense torch.compile against batch size, a panel a way of calling.

    table: `analysis.at_level` of `analysis.speedups`, of one layer and one pattern; active: the
    level wanted.
    """
    (pattern,) = base.one_case(table, ["pattern"], "pattern")
    rows = table[table["provider"].isin(PROVIDERS)]
    ways = [way for way in _WAYS if way in set(rows["mode"])]
    figure, (axes,) = base.subplots(base.PAGE, 2.7, 1, len(ways), sharey=True)
    for way, ax in zip(ways, axes, strict=True):
        some = rows[rows["mode"] == way]
        tokens = some["tokens"].unique()
        _speed_lines(ax, some, "tokens")
        ax.set_xscale("log", base=2)
        step = 4 if max(tokens) > 32 * min(tokens) else 2
        ticks = [n for n in (step**power for power in range(20)) if min(tokens) <= n <= max(tokens)]
        ax.set_xticks(ticks, [_short(n) for n in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(min(tokens) / 1.5, max(tokens) * 1.5)
        ax.set_title(_WAYS[way], loc="left")
        ax.set_xlabel("tokens in the call")
    axes[0].set_ylabel("speed over dense")
    figure.conditions = f"{_layer(table)}, forward; {pattern} activity, {active:g} active"
    _speed_legend(figure, rows)
    low, high = rows["active"].min(), rows["active"].max()
    base.caption(
        figure,
        _PATTERNS[pattern],
        f"Each panel is of one commit; {low:.3g} to {high:.3g} neurons are active.",
        "In CUDA graphs 8 sets of weights take turns.",
        base.measured(),
    )
    return figure


def cards(table: pd.DataFrame) -> Figure:
    """Draw speed-up over dense against tokens on several cards, a panel a level (Fig. 12).

    table: `analysis.speedups` of one layer by "auto". level: the title of a panel.
    """
    levels = [*table.groupby("level", observed=True)]
    figure, (row,) = base.subplots(base.PAGE, 2.3, 1, len(levels), sharey=True)
    for (level, layer), ax in zip(levels, row, strict=True):
        for (device, rows), dashes in zip(layer.groupby("device"), ("-", "--"), strict=False):
            rows, face = rows.sort_values("tokens"), base.AUTO if dashes == "-" else "white"
            look = {"color": base.AUTO, "linestyle": dashes, "marker": "o", "mfc": face}
            name = " ".join(device.split()[:2])
            ax.plot(rows["tokens"], rows["speedup"], label=name, markersize=5, **look)
            ends = rows["speedup_low"], rows["speedup_high"]
            base.bars(ax, rows["tokens"], rows["speedup"], *ends, base.AUTO)
        ax.axhline(1, **_BASELINE)
        ax.set(xscale="log", xlabel="tokens in the call", ylim=(0, None))
        ax.set_xticks(ticks := [1, 64, 2048, 131072], [_short(n) for n in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_title(level, loc="left")
        ax.margins(x=0.12)
    row[0].set_ylabel("speed over dense")
    base.legend(figure, "lower center", ncols=2, handlelength=2.6)
    figure.conditions = f"{_layer(table.assign(device='both cards'))}, skewed activity"
    base.caption(figure, "Up to 2,048 tokens in CUDA graphs. Whiskers: 20th to 80th percentile.")
    return figure


_ALGORITHMS = {
    analysis.PAPERS: base.TWELL,
    analysis.OURS: base.SPARSE,
    analysis.RELEASE: base.PAPER,
    analysis.OURS_FP8: base.in_fp8(base.SPARSE),
    analysis.DENSE_FP8: base.in_fp8(base.DENSE),
}
_TIMED = {  # what `analysis.like_for_like` names, in words
    "layer": "one layer",
    "layer step": "layer, training",
    "model": "{} forward, eager",
    "model, compiled": "{} forward",
    "optimiser step": "{} step",
}


def like_for_like(table: pd.DataFrame, device: str) -> Figure:
    """Draw speed-up over dense by algorithm, a group of bars a case.

    table: cases of `analysis.like_for_like` of one device, with their index as columns.
    """
    order = {"by": ["what", "tokens", "active"], "ascending": [True, True, False]}
    table = table.sort_values(**order, ignore_index=True)
    bars = table[[*_ALGORITHMS]].notna()
    counts = bars.sum(axis=1)
    tops = (counts + 1).cumsum() - counts - 1
    places = bars.cumsum(axis=1).add(tops, axis=0) - 1
    figure, ax = base.panel(base.PAGE, 0.7 + 0.13 * (counts + 1).sum())
    for side, colour in _ALGORITHMS.items():
        known = table[side].dropna()
        ax.barh(places[side][known.index], known, 0.92, color=colour)
        for case, speed in known.items():
            name = f"{speed:.2f}" + (f"  {side}" if case == known.index[0] else "")
            place = speed, places.loc[case, side]
            base.note(ax, name, place, (3, -0.5), va="center", **base.HALO)
    ax.axvline(1, **_BASELINE)
    names = []
    for case in table.itertuples():
        what = _TIMED[case.what].format(base.model_name(case.model))
        pattern = "" if case.model else f", {case.pattern}"  # that of models is the paper's
        names.append(f"{what}{pattern}\n{case.tokens:,} tokens")
    base.row_names(ax, tops + (counts - 1) / 2, names)
    ax.set_ylim(tops.iloc[-1] + counts.iloc[-1], -1.2)
    ax.set_xlim(0, 1.5 * table[[*_ALGORITHMS]].max(axis=None))  # for the names
    ax.set_xlabel("speed over dense bf16, torch.compile")
    low, high = table["active"].min(), table["active"].max()
    figure.conditions = f"2048 x 5632 (trained: narrower), {low:.0f} to {high:.0f} active, {device}"
    base.caption(
        figure,
        "The paper's algorithm by our kernels: TwELL words forward, the hybrid format in training.",
        "The release was measured elsewhere; its fastest measurement is drawn. Of ours some are",
        f"medians of up to {table['calls'].max():.0f} measurements.",
    )
    return figure


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else f"{tokens}"


def fp8_quality(layer: pd.DataFrame, model: pd.DataFrame, quality: pd.DataFrame) -> Figure:
    """Draw the speed of bf16 and FP8 over dense bf16, and apart from it what FP8 costs.

    layer, model: `analysis.fastest` of one case of a layer, and of one model's forward passes;
    quality: `analysis.fp8_quality` of several models.
    """
    tables = [table for table in (layer, model) if len(table)]
    figure, (row,) = base.subplots(base.PAGE, 2.2, 1, len(tables) + 1, sharey=True)
    *speeds, ax = row
    sides, y = list(base.SIDES), np.arange(len(base.SIDES))
    for panel, table in zip(speeds, tables, strict=True):
        speed = table.set_index("side")["speedup"].reindex(sides)
        panel.barh(y, speed, 0.7, color=base.SIDES.values())
        for place, value in zip(y, speed, strict=True):
            base.note(panel, f"{value:.2f}", (value, place), (3, 0), va="center")
        name = f"{base.model_name(model['model'].iloc[0])} model" if table is model else "one layer"
        panel.set_title(name, loc="left")
        panel.set(xlim=(0, 1.3 * speed.max()), xlabel="speed over dense bf16")
        panel.grid(False, axis="y")
    for place, (side, colour) in enumerate(base.SIDES.items()):
        rows = quality[quality["side"].isin([side, "dense"] if side == "sparse" else [side])]
        ends = 1e3 * np.abs(rows[["low", "high"]].to_numpy().T - rows["difference"].to_numpy())
        places = place + np.linspace(-0.25, 0.25, len(rows))
        ax.errorbar(1e3 * rows["difference"], places, xerr=ends, fmt="o", ms=4, color=colour)
    smallest = quality[quality["parameters"] == quality["parameters"].min()]
    for row in smallest[smallest["side"].isin(sides[2:])].itertuples():
        place = sides.index(row.side) - 0.25
        base.note(ax, f"{row.parameters / 1e6:.0f} M", (1e3 * row.difference, place), (4, 3))
    ax.set_title("cross-entropy", loc="left")
    ax.set(xlabel="rise (0.001 nats)", xlim=(-0.3, 1.35e3 * smallest["high"].iloc[1]))
    base.row_names(ax, y, [side if "FP8" in side else f"{side} bf16" for side in sides])
    figure.conditions = f"{layer['device'].iloc[0]}; {layer['tokens'].iloc[0]:,} tokens in a call"
    sizes = ", ".join(f"{size / 1e6:.0f} M" for size in quality["parameters"].unique())
    levels = " and ".join(f"{table['active'].iloc[0]:.0f}" for table in tables)
    base.caption(
        figure,
        f"Speed is of random weights with imposed activity, {levels} active.",
        f"Cost is of {quality['model'].nunique()} trained models ({sizes} parameters), each a",
        "point with its paired 95% interval. Sparse bf16 computes the function of dense bf16.",
        f"Bars are medians of {' and '.join(str(t['calls'].max()) for t in tables)} measurements.",
    )
    return figure
