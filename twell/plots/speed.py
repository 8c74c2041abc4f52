"""Figures of the speed of one layer: against dense by activity and batch size, in training, and under the roof (ours)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator

from twell import analysis
from twell.measure import providers
from twell.plots.base import BLUE, GREEN, ORANGE, PAGE, PURPLE, RED, _figure, _plain

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
STYLES = [
    ("-", True),
    ((0, (3.5, 1.5)), False),
    ((0, (1, 1)), False),
]  # dashes, and whether markers are filled
NEAR = 1.25  # a case within this factor of the wanted activity is drawn without a word


def _layer(table: pd.DataFrame) -> str:
    """What was measured, on what: a figure's title. Raises ValueError unless it is one layer on one device."""
    about = table[
        ["hidden_size", "intermediate_size", "gated", "dtype", "device"]
    ].drop_duplicates()
    if len(about) != 1:
        raise ValueError(
            f"a figure of speed shows one layer on one device; this table has {len(about)}"
        )
    hidden_size, intermediate_size, gated, dtype, device = about.iloc[0]
    return f"{'gated' if gated else 'non-gated'} layer, {hidden_size} x {intermediate_size}, {dtype}, {device}"


def _lines(ax: Axes, table: pd.DataFrame, x: str, y: str, kind: str, styles: dict) -> None:
    """y against x, a line for each provider and each value of the column `kind`, which has a style of its own."""
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
    entries = {}
    for name in (*names, analysis.BASELINE):
        colour, marker = PROVIDERS[name]
        width = {providers.AUTO.name: 5, analysis.BASELINE: 0.8}.get(name)
        entries[name] = Line2D([], [], color=colour, marker=marker, markersize=4, linewidth=width)
    for text, (dashes, filled) in styles.items():
        face = "0.6" if filled else "white"
        entries[text] = Line2D(
            [], [], color="0.6", linestyle=dashes, marker="o", markersize=4, markerfacecolor=face
        )
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=4, handlelength=2.6
    )


def _styles(values: Iterable, what: str) -> dict:
    values = list(values)
    if len(values) > len(STYLES):
        raise ValueError(
            f"{len(values)} {what} cannot be told apart in one figure; give at most {len(STYLES)}"
        )
    return dict(zip(values, STYLES, strict=False))


def _mark_crossovers(ax: Axes, crossovers: pd.DataFrame, styles: dict) -> None:
    """Mark where lines fall below 1, and write at how many active neurons; the styles are of batch sizes."""
    falls = crossovers[crossovers["tokens"].isin(list(styles)) & crossovers["crossover"].notna()]
    last = {}  # where the last number of a side stands, and how high
    for row in falls.sort_values("crossover").itertuples():
        above = (
            list(styles).index(row.tokens) == 0
        )  # the largest batch above the line, others below
        colour = PROVIDERS[row.provider][0]
        ax.plot(
            row.crossover, 1, marker="|", markersize=9, markeredgewidth=1.4, color=colour, zorder=4
        )
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
        name
        for name in (
            providers.AUTO.name,
            providers.UNION.name,
            providers.ROWWISE.name,
            providers.DENSE_EAGER.name,
        )
        if name in set(table["provider"])
    ]
    table = table[table["provider"].isin(names)]
    styles = _styles(sorted(table["tokens"].unique(), reverse=True), "batch sizes")
    patterns = sorted(
        table["pattern"].unique(), reverse=True
    )  # skewed, as trained models are, before even
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
    names = [
        name
        for name in (providers.UNION.name, providers.HYBRID.name, providers.DENSE_EAGER.name)
        if name in set(table["provider"])
    ]
    table = table[table["provider"].isin(names)]
    styles = _styles(sorted(table["tokens"].unique(), reverse=True), "batch sizes")
    patterns = sorted(table["pattern"].unique(), reverse=True)
    figure, axes = _figure(PAGE, 0.9 + 2.1 * len(patterns), len(patterns), 2, sharex=True)
    for pattern, (left, right) in zip(patterns, axes, strict=True):
        panel = table[table["pattern"] == pattern]
        _speed_lines(left, panel, "active", "tokens", styles)
        _mark_crossovers(
            left,
            crossovers[(crossovers["pattern"] == pattern) & crossovers["provider"].isin(names)],
            styles,
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


def training_devices(table: pd.DataFrame, provider: str = providers.UNION.name) -> Figure:
    """Draw a training step's change of speed and of held memory by activity, a bar a device (Fig. 12, one layer).

    table: `analysis.training_speedups` of one layer, one pattern and one batch size, on any devices. Levels of activity are
    the same where their first two digits are. Raises ValueError for several layers, patterns or batch sizes, for
    none, and for more than four devices.
    """
    table = table[table["provider"] == provider]
    cases = table[
        ["hidden_size", "intermediate_size", "gated", "dtype", "pattern", "tokens"]
    ].drop_duplicates()
    if len(cases) != 1:
        raise ValueError(
            f"a figure of devices shows one layer, pattern and batch size; this table has {len(cases)}"
        )
    devices = sorted(table["device"].unique())
    fills = [(BLUE, ""), (ORANGE, "////"), (GREEN, "...."), (PURPLE, "xxxx")]
    if len(devices) > len(fills):
        raise ValueError(
            f"{len(devices)} devices cannot be told apart in one figure; give at most {len(fills)}"
        )
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
            x = [
                levels.index(level) + (place - (len(devices) - 1) / 2) * width
                for level in rows["level"]
            ]
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            bars = ax.bar(x, rows[column], width, label=device, **look)
            labels = [f"{value:+.0f}" for value in rows[column]]
            ax.bar_label(
                bars, labels, fontsize=6.5, padding=2, rotation=90 if len(devices) > 1 else 0
            )
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
        ax.grid(False, axis="x")
        ax.margins(y=0.15)
        ax.set_xlabel("active neurons per token")
    axes[0, 0].set_ylabel("training speed, % over dense")
    axes[0, 1].set_ylabel("held for backward, % over dense")
    hidden_size, intermediate_size, gated, dtype, pattern, tokens = cases.iloc[0]
    kind = (
        f"{'gated' if gated else 'non-gated'} layer, {hidden_size} x {intermediate_size}, {dtype}"
    )
    figure.suptitle(
        f"{kind}; {tokens:,} tokens, {pattern}; {provider} against {analysis.BASELINE}", fontsize=8
    )
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
        raise ValueError(
            f"one figure shows one pattern; this table has {', '.join(sorted(table['pattern'].unique()))}"
        )
    words = {"stream": "one call after the other", "graph": "CUDA graph"}
    sets = table["weight_sets"].map(lambda n: f", {n} sets of weights in turn" if n > 1 else "")
    table = table.assign(way=table["mode"].map(words) + sets)
    ways = table.sort_values(["mode", "weight_sets"], ascending=[False, True])["way"].unique()
    styles = _styles(ways, "ways of calling")
    names = [
        name for name in PROVIDERS if name in set(table["provider"]) and name != analysis.BASELINE
    ]
    figure, axes = _figure(PAGE, 3.3)
    ax = axes[0, 0]
    _speed_lines(ax, table[table["provider"].isin(names)], "tokens", "way", styles)
    batches = {
        n: f"{n // 1024:,}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"
        for n in sorted(table["tokens"].unique())
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
    table = table.sort_values(
        "provider", key=lambda names: names.map(known), kind="stable"
    ).reset_index(drop=True)
    figure, (pair,) = _figure(PAGE, max(2.8, 0.6 + 0.2 * len(table)), 1, 2)
    left, right = pair

    peak, bandwidth = table["peak"].iloc[0], table["bandwidth"].iloc[0]
    drawn = table[(table["intensity"] > 0) & (table["tflops"] > 0)]
    ridge = 1000 * peak / bandwidth
    ends = min([ridge, *drawn["intensity"]]) / 3, max([ridge, *drawn["intensity"]]) * 3
    left.plot(
        [ends[0], ridge, ends[1]],
        [ends[0] * bandwidth / 1000, peak, peak],
        color="black",
        linewidth=1,
    )
    note = {"textcoords": "offset points", "fontsize": 7}
    left.annotate(f"matmul {peak:.0f} TFLOP/s", (ends[1], peak), (0, 3), ha="right", **note)
    left.annotate(
        f"copy {bandwidth:.0f} GB/s", (ends[0], ends[0] * bandwidth / 1000), (8, -3), **note
    )
    labels: dict[
        tuple[float, float], list[str]
    ] = {}  # kernels that lie close together share a label
    for row in drawn.itertuples():
        near = (
            at
            for at in labels
            if max(abs(np.log(at[0] / row.intensity)), abs(np.log(at[1] / row.tflops))) < 0.35
        )
        numbers = labels.setdefault(next(near, (row.intensity, row.tflops)), [])
        numbers.append(str(row.Index + 1))
        # Each one of a label lies larger beneath the one before, so that none is hidden.
        look = {
            "markersize": 2 + 3 * len(numbers),
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
        }
        left.plot(
            row.intensity,
            row.tflops,
            "o",
            color=PROVIDERS[row.provider][0],
            zorder=4 - row.Index / 99,
            **look,
        )
    for at, numbers in labels.items():
        halo = [withStroke(linewidth=1.5, foreground="white")]
        left.annotate(
            ", ".join(numbers),
            at,
            (0, -5),
            ha="center",
            va="top",
            path_effects=halo,
            zorder=5,
            **note,
        )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="operations / least bytes (flop / byte)",
        ylabel="achieved TFLOP/s",
    )
    for axis in (left.xaxis, left.yaxis):
        _plain(axis)

    colours = [PROVIDERS[name][0] for name in table["provider"]]
    y = np.arange(len(table)) + 0.7 * (table["provider"] != table["provider"].shift()).cumsum()
    right.barh(y, table["ms"], 0.75, color=colours, alpha=0.35)
    right.barh(y, table["floor"].clip(upper=table["ms"]).fillna(0), 0.75, color=colours)
    right.invert_yaxis()
    right.set_yticks(y, [f"{row.kernel}  {row.Index + 1}" for row in table.itertuples()])
    for at, row in zip(y, table.itertuples(), strict=True):
        text = f"{row.ms:.3g} ms" + (
            f", {100 * row.share:.0f}%" if row.share == row.share else ", floor not known"
        )
        right.annotate(
            text, (row.ms, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5
        )
    right.set_xlim(0, 1.5 * table["ms"].max())
    right.set_xlabel("ms a call (dark: the least; its share in %)")
    right.grid(False, axis="y")
    right.tick_params(axis="y", length=0)
    figure.suptitle(f"{title}; {tokens:,} tokens, {pattern}, {active:.0f} active", fontsize=8)
    names = table["provider"].unique()
    handles = [Rectangle((0, 0), 1, 1, facecolor=PROVIDERS[name][0]) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=4, handlelength=1)
    return figure
