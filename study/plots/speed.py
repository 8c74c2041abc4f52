"""Figures of the speed of one layer: by activity and batch size, in training, and in FP8."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from study import analysis
from study.plots import base
from twell.measure import providers

DENSE_FP8, SPARSE_FP8 = "dense FP8", "sparse FP8"  # sides of `analysis.fastest`
PROVIDERS = {  # colour, marker and name of each provider or side
    providers.AUTO.name: (base.AUTO, "", "auto: the path that it picks"),
    providers.UNION.name: (base.SPARSE, "o", "union path"),
    providers.ROWWISE.name: (base.ROWWISE, "D", "row-wise path"),
    providers.DECODE.name: (base.DECODE, "^", "decode path"),
    providers.HYBRID.name: (base.HYBRID, "X", "the paper's hybrid format"),
    DENSE_FP8: ("black", "v", "dense FP8, torch.compile"),
    SPARSE_FP8: (base.SPARSE, "o", "sparse FP8: the fastest path"),
}
_PATHS = [name for name in PROVIDERS if name not in (DENSE_FP8, SPARSE_FP8)]
# Dashes, and whether markers are filled; lines in FP8 always have the second.
STYLES = [("-", True), ((0, (3.5, 1.5)), False), ((0, (1, 1)), False)]
NEAR = 1.25  # a case within this factor of the wanted activity is drawn without a word
_BROAD = {"linewidth": 6, "alpha": 0.35, "solid_capstyle": "round"}  # auto, beneath the others
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
_FP8 = "Dense FP8: the fastest of scales by rows, by tensors and torchao; other dense is in bf16."
_LAYER = "hidden_size", "intermediate_size", "gated", "dtype", "device"


def _layer(table: pd.DataFrame) -> str:
    """Return layer and device, as a title. Raises ValueError unless there is one of each."""
    width, neurons, gated, dtype, device = base.one_case(table, _LAYER, "layer on one device")
    kind, dtype = "gated" if gated else "non-gated", dtype.replace("float", "f")
    return f"{kind} layer, {width} x {neurons}, {dtype}, {device}"


def _lines(ax: Axes, table: pd.DataFrame, x: str, y: str, styles: dict | None = None) -> None:
    """Draw y against x, a line for each provider and batch size; styles: of the sizes."""
    for (name, tokens), line in table.sort_values(x).groupby(["provider", "line"]):
        in_fp8 = name in (DENSE_FP8, SPARSE_FP8)
        dashes, filled = STYLES[1] if in_fp8 else (styles or {}).get(tokens, STYLES[0])
        colour, marker, _ = PROVIDERS[name]
        look = {"linestyle": dashes, "marker": marker, "markersize": 3.5, "zorder": 3 + in_fp8}
        look = _BROAD if name == providers.AUTO.name else look
        face = colour if filled else "white"
        ax.plot(line[x], line[y], color=colour, markerfacecolor=face, **look)


def _speed_lines(ax: Axes, table: pd.DataFrame, x: str, styles: dict | None = None) -> None:
    """Draw speed-up against x with its spread, and a line at 1."""
    _lines(ax, table, x, "speedup", styles)
    for name, rows in table[table["provider"] != providers.AUTO.name].groupby("provider"):
        ends = rows["speedup_low"], rows["speedup_high"]
        base.bars(ax, rows[x], rows["speedup"], *ends, PROVIDERS[name][0], zorder=3)
    ax.axhline(1, **_BASELINE)
    ax.set_yscale("log")
    base.plain(ax.yaxis)


def _speed_legend(figure: Figure, names: Iterable[str], styles: dict | None = None) -> None:
    """Write below the figure providers by colour and marker, then what each line style means."""
    entries = {}
    for name in names:
        colour, marker, text = PROVIDERS[name]
        look = {"marker": marker, "markersize": 4}
        if name in (DENSE_FP8, SPARSE_FP8):
            look |= {"linestyle": STYLES[1][0], "markerfacecolor": "white"}
        entries[text] = base.key(colour, **_BROAD if name == providers.AUTO.name else look)
    entries["dense, torch.compile"] = Line2D([], [], **_BASELINE)
    for tokens, (dashes, filled) in (styles or {}).items():
        look = {"marker": "o", "markersize": 4, "markerfacecolor": "0.6" if filled else "white"}
        entries[f"{tokens:,} tokens"] = base.key("0.6", linestyle=dashes, **look)
    columns = 4 if len(entries) == 4 else 3
    base.legend(figure, "lower center", entries, ncols=columns, handlelength=2.6)


def _mark_crossovers(ax: Axes, crossovers: pd.DataFrame) -> None:
    """Mark at how many active neurons lines fall below 1; numbers stand where no line goes."""
    falls = crossovers[crossovers["crossover"].notna()].sort_values("crossover")
    for place, row in enumerate(falls.itertuples()):
        colour = PROVIDERS[row.provider][0]
        look = {"marker": "|", "markersize": 8, "markeredgewidth": 1.2, "zorder": 4}
        ax.plot(row.crossover, 1, color=colour, **look)
        where = ((-2, -4), "top", "right") if place % 2 == 0 else ((2, 4), "bottom", "left")
        offset, va, ha = where
        look = {"color": colour, "fontsize": 7, "va": va, "ha": ha} | base.HALO
        base.note(ax, f"{row.crossover:.0f}", (row.crossover, 1), offset, **look)


def _of_paths(table: pd.DataFrame) -> tuple[list[str], pd.DataFrame]:
    """Return names and rows of the sparse paths and auto, and of the fastest in FP8."""
    rows, quantized = table[table["provider"].isin(_PATHS)], analysis.fastest(table)
    quantized = quantized[quantized["side"].isin([DENSE_FP8, SPARSE_FP8])]
    rows = pd.concat([rows, quantized.assign(provider=quantized["side"])[rows.columns]])
    names = [name for name in PROVIDERS if name in set(rows["provider"])]
    return names, rows.assign(line=rows["tokens"])


def _of_pattern(patterns: Iterable[str]) -> str:
    return " ".join(_PATTERNS[pattern] for pattern in patterns)


def _with_fp8(names: Iterable[str]) -> str:
    return _FP8 if {DENSE_FP8, SPARSE_FP8} & {*names} else ""


def ffn_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw speed-up over dense torch.compile by active neurons, a panel a batch size and pattern.

    table: `analysis.speedups` of one layer in one mode; crossovers: `analysis.crossovers` of it.
    """
    names, rows = _of_paths(table)
    sizes = sorted(rows["tokens"].unique(), reverse=True)
    patterns = sorted(table["pattern"].unique(), reverse=True)
    shape = len(sizes), len(patterns)
    figure, axes = base.subplots(
        base.PAGE, 0.9 + 1.6 * len(sizes), *shape, sharex=True, sharey=True
    )
    falls = crossovers[crossovers["provider"].isin(_PATHS)]
    for tokens, panels in zip(sizes, axes, strict=True):
        for pattern, ax in zip(patterns, panels, strict=True):
            some, marked = (
                every[(every["tokens"] == tokens) & (every["pattern"] == pattern)]
                for every in (rows, falls)
            )
            _speed_lines(ax, some, "active")
            _mark_crossovers(ax, marked)
            ax.set_xscale("log")
            ax.set_title(f"{pattern} activity, {tokens:,} tokens", loc="left", fontsize=8)
    base.plain(axes[0, 0].xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    for ax in axes[:, 0]:
        ax.set_ylabel("speed-up over dense\n(log scale)")
    figure.conditions = f"{_layer(table)}, forward"
    _speed_legend(figure, names)
    sentences = _of_pattern(patterns), _CROSSED, _with_fp8(names), base.measured()
    base.caption(figure, *sentences)
    return figure


def training_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw a training step's speed-up and held memory by active neurons (Fig. 5, one layer).

    table: `analysis.training_speedups` of one layer in one mode, with up to three batch sizes;
    crossovers: `analysis.crossovers` of it.
    """
    names, rows = _of_paths(table)
    sizes = sorted(rows["tokens"].unique(), reverse=True)
    patterns = sorted(table["pattern"].unique(), reverse=True)
    styles = dict(zip(sizes, STYLES, strict=False))
    size = base.PAGE, 0.9 + 1.75 * len(patterns)
    figure, axes = base.subplots(*size, len(patterns), 2, sharex=True, sharey="col")
    falls = crossovers[crossovers["provider"].isin(_PATHS)]
    for pattern, (left, right) in zip(patterns, axes, strict=True):
        some, marked = (every[every["pattern"] == pattern] for every in (rows, falls))
        _speed_lines(left, some, "active", styles)
        _mark_crossovers(left, marked)
        _lines(right, some, "active", "held_share", styles)
        right.axhline(100, **_BASELINE)
        left.set(xscale="log", ylabel="speed-up over dense\n(log scale)")
        right.set(xscale="log", ylim=(0, 110), ylabel="memory held for\nbackward (% of dense)")
        for ax in (left, right):
            ax.set_title(f"{pattern} activity", loc="left", fontsize=8)
            base.plain(ax.xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    figure.conditions = f"{_layer(table)}; forward and backward"
    _speed_legend(figure, names, styles)
    terms = "Held: bytes that forward keeps for backward."
    base.caption(figure, _of_pattern(patterns), terms, _CROSSED, base.measured())
    return figure


def ffn_tokens(table: pd.DataFrame, active: float) -> Figure:
    """Draw speed-up over dense torch.compile against batch size, a panel a way of calling.

    table: `analysis.at_level` of `analysis.speedups`, of one layer and one pattern; active: the
    level wanted. A batch whose activity is far from it has its own in brackets.
    """
    (pattern,) = base.one_case(table, ["pattern"], "pattern")
    sets = table["weight_sets"].map(lambda n: f", {n} sets of weights" if n > 1 else "")
    order = table["mode"].map(list(_WAYS).index)
    table = table.assign(way=table["mode"].map(_WAYS) + sets, order=order)
    table = table.sort_values(["order", "weight_sets"], ascending=[True, False])
    names, rows = _of_paths(table)
    rows = rows.assign(line=rows["way"])
    ways = [way for way in table["way"].unique() if way in set(rows["way"])]
    lines = -(-len(ways) // 2)
    size = base.PAGE, 0.6 + 2.4 * lines
    figure, axes = base.subplots(*size, lines, min(len(ways), 2), sharey=True)
    far = False
    for ax in axes.flat[len(ways) :]:
        ax.remove()
    for way, ax in zip(ways, axes.flat, strict=False):
        some = rows[rows["way"] == way]
        tokens = some["tokens"].unique()
        _speed_lines(ax, some, "tokens")
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
    title = f"{_layer(table)}, forward; {pattern} activity, {active:g} active"
    figure.conditions = title
    _speed_legend(figure, names)
    turns = " Sets of weights take turns, so that they come from memory."
    eager = "Eager calls are beside the faster one of compiled and uncompiled dense."
    base.caption(
        figure,
        _of_pattern([pattern]),
        "Without a CUDA graph, few tokens wait for Python." + turns * int((sets != "").any()),
        eager if "eager" in set(table["mode"]) else "",
        f"In brackets: active neurons, where they are far from {active:g}." if far else "",
        _with_fp8(names),
        base.measured(),
    )
    return figure


def _batch_names(table: pd.DataFrame, active: float) -> dict[int, str]:
    """Return numbers of tokens as words, with the activity where it is far from `active`."""
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


_LOOKS = {  # side -> name, colour, marker, and whether it is filled
    "dense": ("dense bf16", "black", "v", True),
    "sparse": ("sparse bf16", base.SPARSE, "o", True),
    DENSE_FP8: (DENSE_FP8, "black", "v", False),
    SPARSE_FP8: (SPARSE_FP8, base.SPARSE, "o", False),
    "dense FP8 all": ("dense FP8,\nattention too", "black", "v", False),
    "sparse FP8 all": ("sparse FP8,\nattention too", base.SPARSE, "o", False),
}


def fp8_quality(layer: pd.DataFrame, model: pd.DataFrame, quality: pd.DataFrame) -> Figure:
    """Draw the speed of bf16 and FP8, dense and sparse, against the change of cross-entropy.

    layer, model: `analysis.speed_and_quality` of one case of a layer, and of one model's forward
    passes, which may be empty; quality: the rows of `analysis.fp8_quality` of the judged model.
    """
    judged, tokens = base.one_case(quality, ["model", "tokens"], "model whose quality was measured")
    tables = [table for table in (layer, model) if len(table)]
    figure, (row,) = base.subplots(base.PAGE, 2.9, 1, len(tables), sharex=True)
    for ax, table in zip(row, tables, strict=True):
        first = table.iloc[0]
        case = "one layer, {hidden_size} x {intermediate_size}, {tokens:,} tokens"
        if "model" in table:
            case = f"{base.model_name(first['model'])}, forward, {{batch}} x {{context:,}} tokens"
        ax.set_title(case.format(**first), loc="left", fontsize=8)
        _points(ax, table)
        ax.set_xlabel(f"change of cross-entropy of {judged} (nats)")
    left, right = row[0].get_xlim()
    row[0].set_xlim(left, right + 0.4 * (right - left))  # for the notes
    row[0].set_ylabel("speed over dense bf16")
    figure.conditions = f"speed: {layer['device'].iloc[0]}; quality: {judged}"
    size, neurons = quality["parameters"].iloc[0] / 1e6, quality["active"].iloc[0]
    levels = " and ".join(f"{table['active'].iloc[0]:.0f}" for table in tables)
    base.caption(
        figure,
        "Up is faster, left is better.",
        f"Quality is of {judged}: {size:.3g} M parameters, {neurons:.0f} active neurons,",
        f"{tokens:,} held-out tokens, with paired 95% intervals.",
        f"Speed is of random weights with imposed activity, {levels} active.",
        "Sparse bf16 computes the function of dense bf16.",
        base.measured(),
    )
    return figure


def _points(ax: Axes, table: pd.DataFrame) -> None:
    """Draw a point a side, named, with the bars of both directions."""
    for row in table.itertuples():
        name, colour, marker, filled = _LOOKS[row.side]
        x, y = row.difference, row.speedup
        if row.high > row.low:
            ends = np.array([[x - row.low], [row.high - x]])
            ax.errorbar([x], [y], xerr=ends, fmt="none", ecolor=colour, elinewidth=0.9, capsize=2)
        low, high = np.array([row.speedup_low]), np.array([row.speedup_high])
        base.bars(ax, [x], [y], low, high, colour)
        face = colour if filled else "white"
        ax.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=6, zorder=3)
        look = {"ha": "left", "va": "bottom", "fontsize": 7, "color": colour}
        place = (np.nanmax([x, row.high]), y), (6, 3)  # beside the bar
        base.note(ax, f"{name} ({y:.2f})", *place, **look)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.margins(0.12, 0.2)
