"""Figures of the speed of one layer: by activity and batch size, in training, under the roof."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from study import analysis
from study.plots.base import (
    _HALO,
    AUTO,
    DECODE,
    DENSE,
    HYBRID,
    PAGE,
    ROWWISE,
    SPARSE,
    _bars,
    _caption,
    _figure,
    _key,
    _legend,
    _measured,
    _note,
    _one,
    _row_names,
    plain,
)
from twell.measure import providers

DENSE_FP8, SPARSE_FP8 = "dense FP8", "sparse FP8"  # sides of `analysis.fastest`
# Colour and marker of each provider or side; auto, which takes one of the others, lies broad
# beneath them.
PROVIDERS = {
    providers.AUTO.name: (AUTO, ""),
    providers.UNION.name: (SPARSE, "o"),
    providers.ROWWISE.name: (ROWWISE, "D"),
    providers.DECODE.name: (DECODE, "^"),
    providers.HYBRID.name: (HYBRID, "X"),
    providers.DENSE_KERNELS.name: (DENSE, "v"),
    providers.DENSE_EAGER.name: (DENSE, "P"),
    DENSE_FP8: ("black", "v"),
    SPARSE_FP8: (SPARSE, "o"),
    analysis.BASELINE: ("black", ""),
}
NAMES = {
    providers.AUTO.name: "auto: the path that it picks",
    providers.UNION.name: "union path",
    providers.ROWWISE.name: "row-wise path",
    providers.DECODE.name: "decode path",
    providers.HYBRID.name: "the paper's hybrid format",
    providers.DENSE_KERNELS.name: "dense",
    providers.DENSE_EAGER.name: "dense, eager",
    DENSE_FP8: "dense FP8, torch.compile",
    SPARSE_FP8: "sparse FP8: the fastest path",
    analysis.BASELINE: "dense, torch.compile",
}
_PATHS = providers.AUTO, providers.UNION, providers.ROWWISE, providers.DECODE, providers.HYBRID
# Dashes, and whether markers are filled; those in FP8 always have the second.
STYLES = [("-", True), ((0, (3.5, 1.5)), False), ((0, (1, 1)), False)]
_IN_FP8 = DENSE_FP8, SPARSE_FP8
NEAR = 1.25  # a case within this factor of the wanted activity is drawn without a word
_BROAD = {"linewidth": 6, "alpha": 0.35, "solid_capstyle": "round"}
_BASELINE = {"color": "black", "linewidth": 0.8}
_WAYS = {
    "graph": "in a CUDA graph",
    "stream": "separate calls, the cache emptied between",
    "eager": "eager calls, one after the other",
    "compiled": "compiled calls, one after the other",
}
_PATTERNS = {
    "skewed": "Skewed: a few neurons fire often, as in trained models.",
    "even": "Even: all neurons fire equally often.",
}
_CROSSED = "Numbers: active neurons at which a path falls behind dense."
_LAYER = "hidden_size", "intermediate_size", "gated", "dtype"


def _name(hidden_size: int, intermediate_size: int, gated: bool, dtype: str) -> str:
    kind = "gated" if gated else "non-gated"
    return f"{kind} layer, {hidden_size} x {intermediate_size}, {dtype.replace('float', 'f')}"


def _layer(table: pd.DataFrame) -> str:
    """Layer and device, as a title. Raises ValueError unless there is one of each."""
    *layer, device = _one(table, (*_LAYER, "device"), "layer on one device")
    return f"{_name(*layer)}, {device}"


def _lines(ax: Axes, table: pd.DataFrame, x: str, y: str, kind: str, styles: dict) -> None:
    """y against x, a line for each provider and each value of the column `kind`, by its style."""
    for (name, value), line in table.sort_values(x).groupby(["provider", kind]):
        style = STYLES[1] if name in _IN_FP8 else styles[value]
        (colour, marker), (dashes, filled) = PROVIDERS[name], style
        height = 4 if name in _IN_FP8 else 3
        look = {"linestyle": dashes, "marker": marker, "markersize": 3.5, "zorder": height}
        look = _BROAD if name == providers.AUTO.name else look
        face = colour if filled else "white"
        ax.plot(line[x], line[y], color=colour, markerfacecolor=face, **look)


def _speed_lines(ax: Axes, table: pd.DataFrame, x: str, kind: str, styles: dict) -> None:
    """Speed-up against x with its spread, and a line at 1."""
    _lines(ax, table, x, "speedup", kind, styles)
    for name, rows in table[table["provider"] != providers.AUTO.name].groupby("provider"):
        ends = rows["speedup_low"], rows["speedup_high"]
        _bars(ax, rows[x], rows["speedup"], *ends, PROVIDERS[name][0], zorder=3)
    ax.axhline(1, **_BASELINE)
    ax.set_yscale("log")
    plain(ax.yaxis)


def _speed_legend(figure: Figure, names: Iterable[str], styles: dict) -> None:
    """Below the figure: providers by colour and marker, then what each line style means."""
    entries = {}
    for name in names:
        colour, marker = PROVIDERS[name]
        look = {"marker": marker, "markersize": 4}
        if name in _IN_FP8:
            look |= {"linestyle": STYLES[1][0], "markerfacecolor": "white"}
        entries[NAMES[name]] = _key(colour, **_BROAD if name == providers.AUTO.name else look)
    entries[NAMES[analysis.BASELINE]] = Line2D([], [], **_BASELINE)
    for text, (dashes, filled) in styles.items():
        look = {"marker": "o", "markersize": 4, "markerfacecolor": "0.6" if filled else "white"}
        entries[text] = _key("0.6", linestyle=dashes, **look)
    _legend(figure, "lower center", entries, ncols=4 if len(entries) == 4 else 3, handlelength=2.6)


def _told_apart(values: Iterable, looks: list, what: str) -> dict:
    """A look for each value. Raises ValueError where there are too few."""
    values = list(values)
    if len(values) > len(looks):
        number = f"{len(values)} {what} cannot be told apart in one figure"
        raise ValueError(f"{number}; give at most {len(looks)}")
    return dict(zip(values, looks, strict=False))


def _mark_crossovers(ax: Axes, crossovers: pd.DataFrame) -> None:
    """Mark at how many active neurons lines fall below 1; numbers stand where no line goes."""
    falls = crossovers[crossovers["crossover"].notna()].sort_values("crossover")
    for place, row in enumerate(falls.itertuples()):
        colour = PROVIDERS[row.provider][0]
        look = {"marker": "|", "markersize": 8, "markeredgewidth": 1.2, "zorder": 4}
        ax.plot(row.crossover, 1, color=colour, **look)
        where = ((-2, -4), "top", "right") if place % 2 == 0 else ((2, 4), "bottom", "left")
        offset, va, ha = where
        look = {"color": colour, "fontsize": 7, "va": va, "ha": ha} | _HALO
        _note(ax, f"{row.crossover:.0f}", (row.crossover, 1), offset, **look)


def _of_paths(table: pd.DataFrame, crossovers: pd.DataFrame) -> tuple:
    """Of the sparse paths and auto, and of the fastest in FP8: names, rows and crossovers; and the
    patterns, skewed first.
    """
    names = [path.name for path in _PATHS if path.name in set(table["provider"])]
    rows, falls = (some[some["provider"].isin(names)] for some in (table, crossovers))
    quantized = analysis.fastest(table)
    quantized = quantized[quantized["side"].isin(_IN_FP8)]
    names += [side for side in _IN_FP8 if side in set(quantized["side"])]
    rows = pd.concat([rows, quantized.assign(provider=quantized["side"])[rows.columns]])
    return names, rows, falls, sorted(table["pattern"].unique(), reverse=True)


def _in_fp8(names: Iterable[str]) -> str:
    """The sentence of a caption on FP8, where any is drawn."""
    drawn = any(name in _IN_FP8 for name in names)
    words = (
        "Dense FP8: the fastest of scales by rows, by tensors and torchao; other dense is in bf16."
    )
    return words if drawn else ""


def _of_pattern(patterns: Iterable[str]) -> str:
    return " ".join(_PATTERNS[pattern] for pattern in patterns if pattern in _PATTERNS)


def ffn_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw speed-up over dense torch.compile by active neurons, a panel a batch size and pattern.

    table: `analysis.speedups` of one layer in one mode; crossovers: `analysis.crossovers` of it,
    marked where the lines fall below 1. Sparse paths and auto are drawn, and the fastest in FP8.
    Raises ValueError for several layers or none. Ours.
    """
    title = _layer(table)
    names, rows, falls, patterns = _of_paths(table, crossovers)
    sizes = sorted(rows["tokens"].unique(), reverse=True)
    size = PAGE, 0.9 + 1.6 * len(sizes)
    figure, axes = _figure(*size, len(sizes), len(patterns), sharex=True, sharey=True)
    for tokens, line in zip(sizes, axes, strict=True):
        for pattern, ax in zip(patterns, line, strict=True):
            some, marked = (
                every[(every["tokens"] == tokens) & (every["pattern"] == pattern)]
                for every in (rows, falls)
            )
            _speed_lines(ax, some, "active", "tokens", {tokens: STYLES[0]})
            _mark_crossovers(ax, marked)
            ax.set_xscale("log")
            ax.set_title(f"{pattern} activity, {tokens:,} tokens", loc="left", fontsize=8)
    plain(axes[0, 0].xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    for ax in axes[:, 0]:
        ax.set_ylabel("speed-up over dense\n(log scale)")
    figure.suptitle(f"{title}, forward", fontsize=8)
    _speed_legend(figure, names, {})
    spread = _measured(rows["speedup_low"])
    _caption(figure, _of_pattern(patterns), _CROSSED, _in_fp8(names), spread)
    return figure


def training_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw a training step's speed-up and held memory by active neurons (Fig. 5, one layer).

    table: `analysis.training_speedups` of one layer; crossovers: `analysis.crossovers` of it,
    marked where the lines fall below 1. Left, speed-up over dense torch.compile, forward and
    backward; right, what is held between the two, in % of dense. Raises ValueError for several
    layers or none, for several modes, and for more than three batch sizes.
    """
    title = _layer(table)
    _one(table, ["mode"], "mode")
    names, rows, falls, patterns = _of_paths(table, crossovers)
    sizes = sorted(rows["tokens"].unique(), reverse=True)
    styles = _told_apart(sizes, STYLES, "batch sizes")
    size = PAGE, 0.9 + 1.75 * len(patterns)
    figure, axes = _figure(*size, len(patterns), 2, sharex=True, sharey="col")
    for pattern, (left, right) in zip(patterns, axes, strict=True):
        some, marked = (every[every["pattern"] == pattern] for every in (rows, falls))
        _speed_lines(left, some, "active", "tokens", styles)
        _mark_crossovers(left, marked)
        _lines(right, some, "active", "held_share", "tokens", styles)
        right.axhline(100, **_BASELINE)
        left.set(xscale="log", ylabel="speed-up over dense\n(log scale)")
        right.set(xscale="log", ylim=(0, 110), ylabel="memory held for\nbackward (% of dense)")
        for ax in (left, right):
            ax.set_title(f"{pattern} activity", loc="left", fontsize=8)
            plain(ax.xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    figure.suptitle(f"{title}; forward and backward", fontsize=8)
    _speed_legend(figure, names, {f"{tokens:,} tokens": styles[tokens] for tokens in sizes})
    terms = "Held: bytes that forward keeps for backward."
    _caption(figure, _of_pattern(patterns), terms, _CROSSED, _measured(rows["speedup_low"]))
    return figure


def ffn_tokens(table: pd.DataFrame, active: float) -> Figure:
    """Draw speed-up over dense torch.compile against batch size, a panel a way of calling.

    table: `analysis.at_level` of `analysis.speedups`, of one layer and one pattern; active: the
    level wanted. A batch whose activity is farther from it than a factor of 1.25 has it in
    brackets. Sparse paths and auto are drawn, and the fastest in FP8. Raises ValueError for several
    layers or none, and for several patterns. Ours.
    """
    title = _layer(table)
    (pattern,) = _one(table, ["pattern"], "pattern")
    sets = table["weight_sets"].map(lambda n: f", {n} sets of weights" if n > 1 else "")
    table = table.assign(way=table["mode"].map(_WAYS) + sets)
    order = table["mode"].map(list(_WAYS).index)
    table = table.assign(order=order).sort_values(["order", "weight_sets"], ascending=[True, False])
    names, rows, _, _ = _of_paths(table, table[:0])
    ways = [way for way in table["way"].unique() if way in set(rows["way"])]
    lines = -(-len(ways) // 2)
    figure, axes = _figure(PAGE, 0.6 + 2.4 * lines, lines, min(len(ways), 2), sharey=True)
    far = False
    for ax in axes.flat[len(ways) :]:
        ax.remove()
    for way, ax in zip(ways, axes.flat, strict=False):
        some = rows[rows["way"] == way]
        tokens = some["tokens"].unique()
        _speed_lines(ax, some, "tokens", "way", {way: STYLES[0]})
        ax.set_xscale("log", base=2)
        named = _batch_names(some, active)
        far |= any("\n" in name for name in named.values())
        ax.set_xticks(list(named), named.values(), fontsize=7)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(min(tokens) / 1.5, max(tokens) * 1.5)
        ax.set_title(way, loc="left", fontsize=8)
        ax.set_xlabel("tokens in the call")
    for ax in axes[:, 0]:
        ax.set_ylabel("speed-up over dense\n(log scale)")
    figure.suptitle(f"{title}, forward; {pattern} activity, {active:g} active", fontsize=8)
    _speed_legend(figure, names, {})
    graph = "Without a CUDA graph, few tokens wait for Python. Sets of weights take turns, so that"
    graph = f"{graph} they come from memory." if table["weight_sets"].max() > 1 else ""
    eager = "Eager calls are beside the faster one of compiled and uncompiled dense."
    eager = eager if "eager" in set(table["mode"]) else ""
    brackets = f"In brackets: active neurons, where they are far from {active:g}." if far else ""
    spread = _measured(rows["speedup_low"])
    _caption(figure, _of_pattern([pattern]), graph, eager, brackets, _in_fp8(names), spread)
    return figure


def _batch_names(table: pd.DataFrame, active: float) -> dict[int, str]:
    """Numbers of tokens as words, with the activity where it is far from `active`."""
    names = {
        n: f"{n // 1024:,}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"
        for n in sorted(table["tokens"].unique())
    }
    powers = [n for n in names if n & (n - 1) == 0]
    for n in names.keys() - set(powers):
        if any(n < 2 * power and power < 2 * n for power in powers):
            names[n] = ""  # two names would overlap
    far = table[~table["active"].between(active / NEAR, active * NEAR)]
    for tokens, measured in far.groupby("tokens")["active"].first().items():
        names[tokens] += f"\n({measured:.0f})"
    return names


def ffn_roofline(table: pd.DataFrame) -> Figure:
    """Draw each kernel under the device's roof, and its time against the least possible.

    table: `analysis.roofline` of one case. Kernels are numbered alike on both sides; one whose
    operations or bytes are not known (or that computes nothing) is only on the right. Raises
    ValueError for several layers or none, and for several cases. Ours.
    """
    title = _layer(table)
    tokens, pattern, active = _one(table, ["tokens", "pattern", "active"], "case")
    order = table["provider"].map(list(PROVIDERS).index)
    table = table.loc[order.sort_values(kind="stable").index].reset_index(drop=True)
    height = max(2.8, 0.6 + 0.2 * len(table))
    figure, ((left, right),) = _figure(PAGE, height, 1, 2, width_ratios=(1, 1.2))
    _roof(left, table)
    _against_floor(right, table)
    case = f"{tokens:,} tokens, {pattern} activity, {active:.0f} active"
    figure.suptitle(f"{title}, forward; {case}", fontsize=8)
    entries = {}
    for name in table["provider"].unique():
        colour, marker = PROVIDERS[name]
        entries[NAMES[name]] = _key(colour, marker=marker or "o", markersize=5, linestyle="")
    _legend(figure, "lower center", entries, ncols=4, handlelength=1)
    _caption(
        figure,
        "Roof: the measured speed of a large matrix product and of a copy.",
        "Least time: operations or unavoidable bytes at that speed; % is its share of the time.",
        "A share above 100% means faster than the copy, which is a yardstick and no bound."
        if (table["share"] > 1).any()
        else "",
        "One profiled measurement.",
    )
    return figure


def _roof(ax: Axes, table: pd.DataFrame) -> None:
    """Kernels under the roof; those that lie close together share a label."""
    peak, bandwidth = table["peak"].iloc[0], table["bandwidth"].iloc[0]
    drawn = table[(table["intensity"] > 0) & (table["tflops"] > 0)]
    ridge = 1000 * peak / bandwidth
    low, high = min([ridge, *drawn["intensity"]]) / 4, max([ridge, *drawn["intensity"]]) * 12
    start = low * bandwidth / 1000
    ax.plot([low, ridge, high], [start, peak, peak], color="black", linewidth=1)
    _note(ax, f"matrix product, {peak:.0f} TFLOP/s", (high, peak), (0, 6), ha="right", fontsize=7)
    middle = np.sqrt(low * ridge)
    look = {"ha": "right", "va": "bottom", "fontsize": 7}
    _note(ax, f"copy,\n{bandwidth:,.0f} GB/s", (middle, middle * bandwidth / 1000), (-3, 3), **look)
    labels: dict[tuple[float, float], list[str]] = {}
    for row in drawn.itertuples():
        place = row.intensity, row.tflops
        near = (at for at in labels if np.abs(np.log(np.divide(at, place))).max() < 0.7)
        labels.setdefault(next(near, place), []).append(str(row.Index + 1))
        colour, marker = PROVIDERS[row.provider]
        look = {"markersize": 5, "markeredgewidth": 1.2, "markerfacecolor": "none", "zorder": 4}
        ax.plot(*place, marker or "o", color=colour, **look)
    for at, numbers in labels.items():
        _note(ax, ", ".join(numbers), at, (6, -4), va="center", fontsize=7, **_HALO)
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(top=4 * peak)
    ax.set(xlabel="intensity (flop / least byte)", ylabel="achieved (TFLOP/s)")
    plain(ax.xaxis, ax.yaxis)


def _against_floor(ax: Axes, table: pd.DataFrame) -> None:
    """The time of each kernel, its least part dark."""
    colours = [PROVIDERS[name][0] for name in table["provider"]]
    y = np.arange(len(table)) + 0.7 * (table["provider"] != table["provider"].shift()).cumsum()
    ax.barh(y, table["ms"], 0.75, color=colours, alpha=0.35)
    ax.barh(y, table["floor"].clip(upper=table["ms"]).fillna(0), 0.75, color=colours)
    _row_names(ax, y, [f"{row.kernel}  {row.Index + 1}" for row in table.itertuples()])
    for place, row in zip(y, table.itertuples(), strict=True):
        share = "least not known" if np.isnan(row.share) else f"{100 * row.share:.0f}%"
        _note(
            ax, f"{row.ms:.{2 + (row.ms > 1)}g} ms, {share}", (row.ms, place), (3, 0), va="center"
        )
    ax.set_xlim(0, 1.5 * table["ms"].max())
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.set_xlabel("time of a call (ms; dark: the least time)")
