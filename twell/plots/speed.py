"""Figures of the speed of one layer: by activity and batch size, in training, under the roof."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator

from twell import analysis
from twell.measure import providers
from twell.plots.base import (
    BLUE,
    GREEN,
    ORANGE,
    PAGE,
    PURPLE,
    RED,
    _bars_by_level,
    _figure,
    _key,
    _legend,
    _note,
    _one,
    _panel,
    _plain,
    _row_names,
)

# Colour and marker of each provider; auto, which takes one of the others, lies broad beneath them.
PROVIDERS = {
    providers.AUTO.name: ("0.8", ""),
    providers.UNION.name: (BLUE, "o"),
    providers.ROWWISE.name: (ORANGE, "s"),
    providers.DECODE.name: (GREEN, "^"),
    providers.HYBRID.name: (RED, "X"),
    providers.DENSE_KERNELS.name: (PURPLE, "D"),
    providers.DENSE_EAGER.name: ("0.45", "v"),
    analysis.BASELINE: ("black", ""),
}
# Dashes, and whether markers are filled.
STYLES = [("-", True), ((0, (3.5, 1.5)), False), ((0, (1, 1)), False)]
NEAR = 1.25  # a case within this factor of the wanted activity is drawn without a word
_HALO = {"path_effects": [withStroke(linewidth=1.5, foreground="white")], "zorder": 5}
_LAYER = "hidden_size", "intermediate_size", "gated", "dtype"


def _name(hidden_size: int, intermediate_size: int, gated: bool, dtype: str) -> str:
    kind = "gated" if gated else "non-gated"
    return f"{kind} layer, {hidden_size} x {intermediate_size}, {dtype}"


def _layer(table: pd.DataFrame) -> str:
    """Layer and device, as a title. Raises ValueError unless there is one of each."""
    *layer, device = _one(table, (*_LAYER, "device"), "layer on one device")
    return f"{_name(*layer)}, {device}"


def _lines(ax: Axes, table: pd.DataFrame, x: str, y: str, kind: str, styles: dict) -> None:
    """y against x, a line for each provider and each value of the column `kind`, by its style."""
    for (name, value), line in table.sort_values(x).groupby(["provider", kind]):
        (colour, marker), (dashes, filled) = PROVIDERS[name], styles[value]
        look = {"linestyle": dashes, "marker": marker, "markersize": 3.5, "zorder": 3}
        look = {"linewidth": 5, "solid_capstyle": "round"} if name == providers.AUTO.name else look
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
    widths = {providers.AUTO.name: 5, analysis.BASELINE: 0.8}
    entries = {}
    for name in (*names, analysis.BASELINE):
        colour, marker = PROVIDERS[name]
        entries[name] = _key(colour, marker=marker, markersize=4, linewidth=widths.get(name))
    for text, (dashes, filled) in styles.items():
        look = {"marker": "o", "markersize": 4, "markerfacecolor": "0.6" if filled else "white"}
        entries[text] = _key("0.6", linestyle=dashes, **look)
    _legend(figure, "lower center", entries, ncols=4, handlelength=2.6)


def _told_apart(values: Iterable, looks: list, what: str) -> dict:
    """A look for each value. Raises ValueError where there are too few."""
    values = list(values)
    if len(values) > len(looks):
        number = f"{len(values)} {what} cannot be told apart in one figure"
        raise ValueError(f"{number}; give at most {len(looks)}")
    return dict(zip(values, looks, strict=False))


def _mark_crossovers(ax: Axes, crossovers: pd.DataFrame, styles: dict) -> None:
    """Mark at how many active neurons lines fall below 1; the styles are of batch sizes."""
    falls = crossovers[crossovers["tokens"].isin(list(styles)) & crossovers["crossover"].notna()]
    last = {}  # the last number of a side, and its height
    for row in falls.sort_values("crossover").itertuples():
        above = row.tokens == next(iter(styles))  # the largest batch above the line, others below
        colour = PROVIDERS[row.provider][0]
        look = {"marker": "|", "markersize": 9, "markeredgewidth": 1.4, "zorder": 4}
        ax.plot(row.crossover, 1, color=colour, **look)
        before, height = last.get(above, (0, 6))
        height = height + 8 if row.crossover < 1.5 * before else 6
        last[above] = row.crossover, height
        offset, va, ha = (
            ((1, height), "bottom", "left") if above else ((-1, -height), "top", "right")
        )
        look = {"color": colour, "fontsize": 7, "va": va, "ha": ha} | _HALO
        _note(ax, f"{row.crossover:.0f}", (row.crossover, 1), offset, **look)


def _of_batches(table: pd.DataFrame, crossovers: pd.DataFrame, wanted: Iterable) -> tuple:
    """Of the wanted providers names, styles by batch size, and rows and crossovers by pattern."""
    names = [provider.name for provider in wanted if provider.name in set(table["provider"])]
    table, falls = (rows[rows["provider"].isin(names)] for rows in (table, crossovers))
    sizes = sorted(table["tokens"].unique(), reverse=True)
    styles = _told_apart(sizes, STYLES, "batch sizes")
    # Skewed, as trained models are, before even.
    patterns = sorted(table["pattern"].unique(), reverse=True)
    panels = {
        pattern: (table[table["pattern"] == pattern], falls[falls["pattern"] == pattern])
        for pattern in patterns
    }
    return names, styles, panels


def _batches_legend(figure: Figure, names: list[str], styles: dict) -> None:
    _speed_legend(figure, names, {f"{size:,} tokens": style for size, style in styles.items()})


def ffn_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw speed-up over dense torch.compile by active neurons, a panel a pattern.

    table: `analysis.speedups` of one layer in one mode; crossovers: `analysis.crossovers` of it,
    marked where the lines fall below 1. Raises ValueError for several layers or none, and for more
    than three batch sizes. Ours.
    """
    title = _layer(table)
    wanted = providers.AUTO, providers.UNION, providers.ROWWISE, providers.DENSE_EAGER
    names, styles, panels = _of_batches(table, crossovers, wanted)
    figure, axes = _figure(PAGE, 3.0, 1, len(panels), sharey=True)
    for ax, (pattern, (rows, falls)) in zip(axes.flat, panels.items(), strict=True):
        _speed_lines(ax, rows, "active", "tokens", styles)
        _mark_crossovers(ax, falls, styles)
        ax.set(xscale="log", xlabel="active neurons per token")
        ax.set_title(pattern, loc="left")
        _plain(ax.xaxis)
    axes[0, 0].set_ylabel("speed-up over dense torch.compile")
    figure.suptitle(title, fontsize=8)
    _batches_legend(figure, names, styles)
    return figure


def training_activity(table: pd.DataFrame, crossovers: pd.DataFrame) -> Figure:
    """Draw a training step's speed-up and held memory by active neurons (Fig. 5, one layer).

    table: `analysis.training_speedups` of one layer; crossovers: `analysis.crossovers` of it,
    marked where the lines fall below 1. Left, speed-up over dense torch.compile, forward and
    backward; right, what is held between the two, in % of dense. Raises ValueError for several
    layers or none, and for more than three batch sizes.
    """
    title = _layer(table)
    wanted = providers.UNION, providers.HYBRID, providers.DENSE_EAGER
    names, styles, panels = _of_batches(table, crossovers, wanted)
    figure, axes = _figure(PAGE, 0.9 + 2.1 * len(panels), len(panels), 2, sharex=True)
    for (pattern, (rows, falls)), (left, right) in zip(panels.items(), axes, strict=True):
        _speed_lines(left, rows, "active", "tokens", styles)
        _mark_crossovers(left, falls, styles)
        _lines(right, rows, "active", "held_share", "tokens", styles)
        right.axhline(100, color=PROVIDERS[analysis.BASELINE][0], linewidth=0.8)
        left.set(xscale="log", ylabel="speed-up over dense torch.compile")
        right.set(xscale="log", ylim=(0, None), ylabel="held for backward, % of dense")
        left.set_title(pattern, loc="left")
        _plain(left.xaxis, left.yaxis, right.xaxis)
    for ax in axes[-1]:
        ax.set_xlabel("active neurons per token")
    figure.suptitle(f"{title}; forward and backward", fontsize=8)
    _batches_legend(figure, names, styles)
    return figure


def training_devices(table: pd.DataFrame, provider: str = providers.UNION.name) -> Figure:
    """Draw a training step's change of speed and held memory, a bar a device (Fig. 12, one layer).

    table: `analysis.training_speedups` of one layer, one pattern and one batch size, on any
    devices. Levels of activity are the same where their first two digits are. Raises ValueError for
    several layers, patterns or batch sizes, for none, and for more than four devices.
    """
    table = table[table["provider"] == provider]
    columns = (*_LAYER, "pattern", "tokens")
    *layer, pattern, tokens = _one(table, columns, "layer, pattern and batch size")
    fills = [(BLUE, ""), (ORANGE, "////"), (GREEN, "...."), (PURPLE, "xxxx")]
    devices = _told_apart(sorted(table["device"].unique()), fills, "devices")
    table = table.assign(
        level=table["active"].map(lambda active: float(f"{active:.2g}")),
        faster=100 * (table["speedup"] - 1),
        smaller=table["held_share"] - 100,
    )
    levels = sorted(table["level"].unique())
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    labels = {
        "faster": "training speed, % over dense",
        "smaller": "held for backward, % over dense",
    }
    for ax, (column, label) in zip(axes.flat, labels.items(), strict=True):
        groups = []
        for device, (colour, hatch) in devices.items():
            rows = table[table["device"] == device].drop_duplicates("level", keep="last")
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            groups.append((rows["level"], rows[column], look | {"label": device}))
        _bars_by_level(ax, levels, groups, 90 if len(devices) > 1 else 0)
        ax.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
        ax.margins(y=0.15)
        ax.set_ylabel(label)
    sides = f"{provider} against {analysis.BASELINE}"
    figure.suptitle(f"{_name(*layer)}; {tokens:,} tokens, {pattern}; {sides}", fontsize=8)
    _legend(figure, "lower center", ncols=2, handlelength=1.6)
    return figure


def ffn_tokens(table: pd.DataFrame, active: float) -> Figure:
    """Draw speed-up over dense torch.compile against batch size, a line a path and way of calling.

    table: `analysis.at_level` of `analysis.speedups`, of one layer and one pattern; active: the
    level wanted. A batch whose activity is farther from it than a factor of 1.25 has it in
    brackets. Raises ValueError for several layers or none, several patterns, and more than three
    ways of calling. Ours.
    """
    title = _layer(table)
    (pattern,) = _one(table, ["pattern"], "pattern")
    words = {"stream": "one call after the other", "graph": "CUDA graph"}
    sets = table["weight_sets"].map(lambda n: f", {n} sets of weights in turn" if n > 1 else "")
    table = table.assign(way=table["mode"].map(words) + sets)
    ways = table.sort_values(["mode", "weight_sets"], ascending=[False, True])["way"].unique()
    styles = _told_apart(ways, STYLES, "ways of calling")
    table = table[table["provider"].isin(PROVIDERS)]
    names = [name for name in PROVIDERS if name in set(table["provider"]) - {analysis.BASELINE}]
    figure, ax = _panel(PAGE, 3.3)
    _speed_lines(ax, table[table["provider"].isin(names)], "tokens", "way", styles)
    batches = {
        n: f"{n // 1024:,}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"
        for n in sorted(table["tokens"].unique())
    }
    far = table[~table["active"].between(active / NEAR, active * NEAR)]
    for tokens, measured in far.groupby("tokens")["active"].first().items():
        batches[tokens] += f"\n({measured:.0f})"
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(batches), batches.values())
    ax.xaxis.set_minor_locator(NullLocator())
    brackets = f" (in brackets: active, where it is far from {active:g})" if len(far) else ""
    ax.set(xlabel="tokens in the batch" + brackets, ylabel="speed-up over dense torch.compile")
    ax.set_title(f"{title}; {pattern}, {active:g} active", loc="left", fontsize=8)
    _speed_legend(figure, names, styles)
    return figure


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
    figure, ((left, right),) = _figure(PAGE, max(2.8, 0.6 + 0.2 * len(table)), 1, 2)
    _roof(left, table)
    _against_floor(right, table)
    figure.suptitle(f"{title}; {tokens:,} tokens, {pattern}, {active:.0f} active", fontsize=8)
    entries = {
        name: Rectangle((0, 0), 1, 1, facecolor=PROVIDERS[name][0])
        for name in table["provider"].unique()
    }
    _legend(figure, "lower center", entries, ncols=4, handlelength=1)
    return figure


def _roof(ax: Axes, table: pd.DataFrame) -> None:
    """Kernels under the roof; those that lie close together share a label."""
    peak, bandwidth = table["peak"].iloc[0], table["bandwidth"].iloc[0]
    drawn = table[(table["intensity"] > 0) & (table["tflops"] > 0)]
    ridge = 1000 * peak / bandwidth
    low, high = min([ridge, *drawn["intensity"]]) / 3, max([ridge, *drawn["intensity"]]) * 3
    start = low * bandwidth / 1000
    ax.plot([low, ridge, high], [start, peak, peak], color="black", linewidth=1)
    _note(ax, f"matmul {peak:.0f} TFLOP/s", (high, peak), (0, 3), ha="right", fontsize=7)
    _note(ax, f"copy {bandwidth:.0f} GB/s", (low, start), (8, -3), fontsize=7)
    labels: dict[tuple[float, float], list[str]] = {}
    for row in drawn.itertuples():
        place = row.intensity, row.tflops
        near = (at for at in labels if np.abs(np.log(np.divide(at, place))).max() < 0.35)
        numbers = labels.setdefault(next(near, place), [])
        numbers.append(str(row.Index + 1))
        # Each one of a label lies larger beneath the one before, so that none is hidden.
        look = {"markersize": 2 + 3 * len(numbers), "zorder": 4 - row.Index / 99}
        look |= {"markeredgecolor": "white", "markeredgewidth": 0.5}
        ax.plot(*place, "o", color=PROVIDERS[row.provider][0], **look)
    for at, numbers in labels.items():
        _note(ax, ", ".join(numbers), at, (0, -5), ha="center", va="top", fontsize=7, **_HALO)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="operations / least bytes (flop / byte)", ylabel="achieved TFLOP/s")
    _plain(ax.xaxis, ax.yaxis)


def _against_floor(ax: Axes, table: pd.DataFrame) -> None:
    """The time of each kernel, its least part dark."""
    colours = [PROVIDERS[name][0] for name in table["provider"]]
    y = np.arange(len(table)) + 0.7 * (table["provider"] != table["provider"].shift()).cumsum()
    ax.barh(y, table["ms"], 0.75, color=colours, alpha=0.35)
    ax.barh(y, table["floor"].clip(upper=table["ms"]).fillna(0), 0.75, color=colours)
    _row_names(ax, y, [f"{row.kernel}  {row.Index + 1}" for row in table.itertuples()])
    for place, row in zip(y, table.itertuples(), strict=True):
        share = "floor not known" if np.isnan(row.share) else f"{100 * row.share:.0f}%"
        _note(ax, f"{row.ms:.3g} ms, {share}", (row.ms, place), (3, 0), va="center")
    ax.set_xlim(0, 1.5 * table["ms"].max())
    ax.set_xlabel("ms a call (dark: the least; its share in %)")
