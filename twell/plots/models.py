"""Figures of whole models: tasks (Table 6, Fig. 3), speed, memory (Figs 4-6, 10, 11, Table 1)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from twell import analysis
from twell.measure import providers
from twell.plots.base import (
    ACTIVE_FLOOR,
    BLUE,
    COLUMN,
    GREEN,
    ORANGE,
    PAGE,
    _bars_by_level,
    _figure,
    _key,
    _legend,
    _level_colours,
    _note,
    _one,
    _panel,
    _plain,
    _row_names,
)

_DASHED = {"color": "0.4", "linestyle": "--", "linewidth": 0.8}  # chance

# --- downstream tasks (Table 6, Fig. 3) ---------------------------------------------------------


def _by_level(rows: pd.DataFrame, levels: list) -> Iterator[tuple[float, pd.DataFrame]]:
    """Rows of each level by size, with x and y: levels stand a little beside each other."""
    for place, level in enumerate(levels):
        line = rows[rows["l1_coefficient"] == level].sort_values("parameters")
        aside = 10 ** (0.07 * (place - (len(levels) - 1) / 2))
        yield level, line.assign(x=aside * line["parameters"], y=100 * line["accuracy"])


def table6_tasks(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw accuracy of each task and their mean against model size, by L1, ours and the paper's.

    table: `analysis.across_sizes`; paper: `analysis.paper_tasks`. Bars are one standard error,
    dashed lines chance, and open circles accuracies that are not more than two standard errors
    above it. The paper's levels are of another model and do not compare with ours.
    """
    figure, axes = _figure(PAGE, 4.0, 2, 4, sharex=True)
    ours, theirs = (sorted(rows["l1_coefficient"].unique()) for rows in (table, paper))
    colours = _level_colours([*ours, *theirs])
    for ax, (task, (title, _)) in zip(axes.flat, analysis.TASKS.items(), strict=True):
        rows, printed = (every[every["task"] == task] for every in (table, paper))
        for level, line in _by_level(printed, theirs):
            look = {"color": colours[level], "markersize": 3, "linewidth": 0.6}
            ax.plot(line["x"], line["y"], "s-", **look)
        for level, line in _by_level(rows, ours):
            look = {"fmt": "-", "color": colours[level], "linewidth": 0.6}
            ax.errorbar(line["x"], line["y"], 100 * line["stderr"], **look)
            above = line["verdict"] == "above chance"
            for dots, fill in ((line[~above], "white"), (line[above], colours[level])):
                ax.plot(dots["x"], dots["y"], "o", color=colours[level], mfc=fill, markersize=4)
        ax.axhline(100 * rows["chance"].iloc[0], zorder=1, **_DASHED)
        ax.set(xscale="log", title=title)
        ax.margins(0.08, 0.12)
        ax.xaxis.set_minor_locator(NullLocator())
    for ax in axes[1]:
        ax.set_xlabel("parameters")
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy (%)")
    mark = {"linestyle": "", "markersize": 4}
    entries = {
        f"{whose}, L1 = {analysis.level_name(level)}": _key(colours[level], marker=marker, **mark)
        for whose, marker, levels in (("ours", "o", ours), ("paper", "s", theirs))
        for level in levels
    }
    entries["not above chance"] = _key("0.4", marker="o", mfc="white", **mark)
    entries["chance"] = _key(**_DASHED)
    _legend(figure, "lower center", entries, ncols=4, columnspacing=1.2)
    return figure


def fig03_accuracy(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the mean accuracy of the tasks at each L1, a panel a model size, ours and the paper's.

    table: `analysis.several_levels`; paper: `analysis.paper_levels`. Bars are one standard error,
    the dashed line is chance.
    """
    means = table[table["task"] == analysis.MEAN]
    sizes = [rows for _, rows in means.groupby(analysis.SIZE, dropna=False)]
    panels = [rows.sort_values("l1_coefficient") for rows in [*sizes, paper]]
    ratios = [1 + len(rows) for rows in panels]
    shape = {"sharey": True, "width_ratios": ratios}
    figure, (row,) = _figure(min(PAGE, 0.5 * sum(ratios)), 2.3, 1, len(panels), **shape)
    chance = 100 * sizes[0]["chance"].iloc[0]
    for ax, rows in zip(row, panels, strict=True):
        x, y = range(len(rows)), 100 * rows["accuracy"]
        colours = list(_level_colours(rows["l1_coefficient"]).values())[-len(rows) :]
        ax.plot(x, y, color="0.7", linewidth=1, zorder=1)
        ax.scatter(x, y, 22, colours, marker="s" if rows is panels[-1] else "o", zorder=3)
        name = f"{rows['parameters'].iloc[0] / 1e6:,.3g} M parameters"
        if "stderr" in rows:
            look = {"fmt": "none", "ecolor": "0.4", "elinewidth": 1, "zorder": 2}
            ax.errorbar(x, y, 100 * rows["stderr"], **look)
            if not np.isnan(tokens := rows["training_tokens"].iloc[0]):
                name += f",\n{tokens / 1e6:,.3g} M tokens"
        ax.axhline(chance, zorder=1, **_DASHED)
        ax.set_xticks(x, [analysis.level_name(level) for level in rows["l1_coefficient"]])
        ax.set(xlabel="L1 coefficient", title=name)
        ax.margins(0.15, 0.12)
    look = {"xycoords": ("axes fraction", "data"), "fontsize": 7, "color": "0.3", "ha": "center"}
    _note(row[-1], f"chance {chance:.1f}", (0.5, chance), (0, 3), **look)
    row[-1].set_title(f"the paper, {paper['parameters'].iloc[0] / 1e9:g} B")
    row[0].set_ylabel("mean accuracy (%)")
    return figure


# --- whole models (Figs 4, 5, 6, 10, 11, Table 1) -----------------------------------------------

# Colour and name of each side of a model; all with compiled layers.
SIDES = {
    providers.DENSE_COMPILED.name: ("0.45", "dense"),
    providers.TRITON_COMPILED.name: (BLUE, "sparse"),
    providers.UNION_COMPILED.name: (BLUE, "sparse"),
    providers.AUTO_COMPILED.name: (ORANGE, "auto"),
}
_DENSE = SIDES[analysis.BASELINE][0]
ACTIVITY = {
    "paper": "random weights, imposed activity",
    "flat": "random weights, imposed activity, the same in each layer",
    "checkpoint": "trained, activity of a text",
}


def _model(table: pd.DataFrame) -> tuple[str, str]:
    """Model and device, and activity. Raises ValueError unless there is one of each."""
    columns = "model", "num_layers", "profile", "device"
    model, layers, profile, device = _one(table, columns, "model on one device")
    return f"{model}, {layers} layers, {device}", ACTIVITY.get(profile, profile)


def _title(figure: Figure, table: pd.DataFrame, rest: str) -> None:
    figure.suptitle("; ".join([*_model(table), rest]), fontsize=8)


def _gains(table: pd.DataFrame, by: str, labels: tuple[str, str], title: str) -> Figure:
    """Two panels, faster and saved in % of dense, with bars by level of activity and provider."""
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    _title(figure, table, title)
    table = analysis.level_gains(table, by)
    levels = list(dict.fromkeys(table["active"]))
    names = [name for name in SIDES if name in set(table["provider"])]
    rotation = 90 if len(levels) * len(names) > 12 else 0
    for ax, column, label in zip(axes.flat, ("faster", "saved"), labels, strict=True):
        groups = []
        for name in names:
            rows = table[(table["provider"] == name) & table[column].notna()]
            colour, side = SIDES[name]
            groups.append((rows["active"], rows[column], {"color": colour, "label": side}))
        _bars_by_level(ax, levels, groups, rotation)
        ticks = [f"{active:.2g}" if active < 100 else f"{active:.0f}" for active in levels]
        ax.set_xticks(range(len(levels)), ticks)
        aside = max(0.6, 1.6 - len(levels) / 2)  # no bar is a wall
        ax.set_xlim(-aside, len(levels) - 1 + aside)
        ax.margins(y=0.18)
        ax.set_ylabel(label)
    _legend(figure, "lower center", ncols=2, handlelength=1)
    return figure


def fig04_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in forward speed and energy at each level of activity (Fig. 4).

    table: `analysis.model_speedups` of one model, batch and device. Raises ValueError for several.
    """
    batch, context = table[["batch", "context"]].iloc[0]
    labels = "forward speed, % over dense", "energy saved, % of dense"
    return _gains(table, "energy_change", labels, f"{batch} x {context} tokens")


def fig05_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in training speed and peak memory at each level of activity (Fig. 5).

    table: `analysis.step_speedups` of one model, micro-batch and device. Raises ValueError for
    several.
    """
    batch, context = table[["micro_batch", "context"]].iloc[0]
    labels = "training speed, % over dense", "peak memory saved, %"
    return _gains(table, "peak_change", labels, f"steps of {batch} x {context} tokens")


def fig06_contributions(table: pd.DataFrame) -> Figure:
    """Draw each layer's activity and the time that it saves (Figs 6, 10, 11).

    table: `analysis.layer_contributions` of one model, level and device. Raises ValueError for
    several.
    """
    model, activity = _model(table)
    (level,) = _one(table, ["level"], "level of activity")
    table = table.sort_values("layer")
    layer = table["layer"]
    figure, axes = _figure(COLUMN, 3.9, 2, 1, sharex=True)
    top, bottom = axes[:, 0]
    shown = table[["active", "active_max"]].clip(lower=ACTIVE_FLOOR)
    top.bar(layer, shown["active"], 0.7, color=BLUE, label="mean")
    top.scatter(layer, shown["active_max"], 14, marker="v", color=ORANGE, label="maximum")
    top.set(yscale="log", ylabel="active neurons per token")
    top.set_ylim(0.5 * shown["active"].min(), 4 * shown["active_max"].max())
    _plain(top.yaxis)
    r = analysis.correlation(table)
    bottom.bar(layer, table["saved"], 0.7, color=BLUE, label=f"sparse (r = {r:.3f})")
    look = {"color": ORANGE, "edgecolor": "white", "linewidth": 0.5, "zorder": 3}
    bottom.scatter(layer, table["auto_saved"], 14, marker="D", label="auto", **look)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="layer", ylabel="ms saved of the\ndense feed-forward layer")
    bottom.margins(y=0.3)
    bottom.set_xticks(layer[:: max(1, len(table) // 10)])
    for ax in (top, bottom):
        ax.grid(False, axis="x")
        ax.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1, borderaxespad=0.2)
    figure.suptitle(f"{model}\n{activity}; {level:.3g} active", fontsize=7.5)
    return figure


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
    figure, ax = _panel(PAGE, 1.3 + 0.3 * len(table) + 0.1 * len(cases))
    _stack(ax, y, table, parts, decoding)
    for row, place in zip(table.itertuples(), y, strict=True):
        gain = f", {100 * (row.speedup - 1):+.0f}%" if row.speedup != 1 else ""
        text = f"{row.total:.3g} {unit}{gain}"
        _note(ax, text, (row.total, place), (3, 0), va="center", fontsize=7)
    for batch in cases:
        _mark_limit(ax, y[table["batch"] == batch], table[table["batch"] == batch], table["total"])
    names, title = _parts_names(table, decoding)
    _row_names(ax, y, names)
    ax.set_ylim(y.max() + 0.5, -0.8)
    ax.set_xlim(0, 1.18 * table["total"].max())
    ax.set_xlabel(f"{unit} of one decoder layer")
    _title(figure, table, title)
    _legend(figure, "lower center", ncols=6, handlelength=1, columnspacing=1)
    return figure


def _stack(ax: Axes, y: np.ndarray, table: pd.DataFrame, parts: list, decoding: bool) -> None:
    """Draw parts end to end, each with as many digits as it has room for."""
    colours = dict(zip(parts, ["0.35", "0.55", "0.8", ORANGE, BLUE, GREEN], strict=False))
    left = np.zeros(len(table))
    for part, colour in colours.items():
        name = "gate (of sparse: and up)" if part == "gate" and decoding else part
        ax.barh(y, table[part], 0.8, left=left, color=colour, label=name)
        look = {"ha": "center", "va": "center", "fontsize": 6.5}
        look["color"] = "black" if colour == "0.8" else "white"
        for place, value, start in zip(y, table[part], left, strict=True):
            texts = (f"{value:.{digits}g}" for digits in (3, 2, 1))
            room = value / (0.0125 * table["total"].max())  # characters
            if text := next((text for text in texts if len(text) < room), None):
                ax.text(start + value / 2, place, text, **look)
        left += table[part].to_numpy()


def _mark_limit(ax: Axes, y: np.ndarray, rows: pd.DataFrame, totals: pd.Series) -> None:
    """Mark the time that a batch takes without up and down, not across the numbers of bars."""
    limit = rows["limit"].iloc[0]
    least = rows.loc[rows["provider"] == analysis.BASELINE, "total"].iloc[0] / limit
    for place in (*(y - 0.45), y.max() + 0.45):
        ax.plot([least] * 2, [place - 0.08, place + 0.08], color="black", linewidth=1.2)
    note = f"dense without up and down: {100 * (limit - 1):+.0f}%"
    aside, side = (3, "left") if least < 0.4 * totals.max() else (-3, "right")
    _note(ax, note, (least, y.min() - 0.58), (aside, 0), ha=side, va="center")


def _parts_names(table: pd.DataFrame, decoding: bool) -> tuple[list[str], str]:
    """Names of bars, and the end of the title."""
    context, several = f"{table['context'].iloc[0]:.0f}", table["batch"].nunique() > 1
    if decoding:
        kinds = [f"{batch:.0f} document{'s' if batch > 1 else ''}" for batch in table["batch"]]
        title = f"{'' if several else kinds[0] + ', '}a token each behind {context} tokens"
    else:
        kinds = [f"{batch:.0f} x {context}" for batch in table["batch"]]
        title = "forward" if several else f"{kinds[0]} tokens"
    sides = [SIDES[name][1] for name in table["provider"]]
    names = [f"{kind}, {side}" for kind, side in zip(kinds, sides, strict=True)]
    low, high = table["active"].min(), table["active"].max()
    active = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return names if several else sides, f"{title}, {active} active"


def model_decode(table: pd.DataFrame) -> Figure:
    """Draw the gain of decoding over dense, tuned and not, against the number of documents.

    table: `analysis.decode_speedups` of one model, context and device. Raises ValueError for
    several.
    """
    (context,) = _one(table, ["context"], "length of context")
    figure, ax = _panel(PAGE, 2.5)
    _title(figure, table, f"{context} tokens in the cache, CUDA graphs")
    batches = sorted(table["batch"].unique())
    table = table.assign(x=table["batch"].map(batches.index), gain=100 * (table["speedup"] - 1))
    table = table.sort_values("x")
    sparse = table["provider"] == providers.TRITON_COMPILED.name
    auto = table[(table["provider"] == providers.AUTO_COMPILED.name) & ~table["tuned"]]
    square = {"marker": "s", "markersize": 5, "markerfacecolor": "white", "linestyle": "--"}
    ring = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "linestyle": ":"}
    lines = {
        "sparse": (table[sparse & ~table["tuned"]], BLUE, {"marker": "o", "markersize": 5}, 4),
        "auto": (auto, ORANGE, ring, None),
        "sparse, both sides tuned": (table[sparse & table["tuned"]], BLUE, square, -4),
    }
    for name, (rows, colour, look, height) in lines.items():
        if len(rows):
            ax.plot(rows["x"], rows["gain"], color=colour, label=name, **look)
        for row in rows.itertuples():
            if height is not None:
                _note(ax, f"{row.gain:+.0f}%", (row.x, row.gain), (9, height), fontsize=7)
            elif row.path.startswith("dense"):
                _note(ax, "auto is dense", (row.x, row.gain), (0, 9), ha="center", fontsize=7)
    dense = table[(table["provider"] == analysis.BASELINE) & ~table["tuned"]].set_index("batch")
    ax.axhline(0, color=_DENSE, linewidth=0.8)
    ticks = [
        f"{row.Index}\n{row.active:.0f} active\ndense {row.tokens_per_second:,.0f} tokens/s"
        for row in dense.itertuples()
    ]
    ax.set_xticks(range(len(batches)), ticks)
    ax.margins(0.12, 0.25)
    ax.set(xlabel="documents continued at once", ylabel="tokens/s, % over dense")
    _legend(figure, "lower center", ncols=3)
    return figure


def table1_scale(table: pd.DataFrame) -> Figure:
    """Draw Table 1, the paper's and ours: a row a quantity, a group of bars a model.

    table: `analysis.scale_table`; a row of panels for each quantity that was measured. Raises
    ValueError where none was.
    """
    quantities = dict(list(table.groupby("quantity", sort=False)))
    measured = [name for name, rows in quantities.items() if rows["dense"].notna().any()]
    if not measured:
        raise ValueError("none of the quantities of Table 1 was measured")
    figure, axes = _figure(PAGE, 0.7 + 1.45 * len(measured), len(measured), 2)
    for quantity, pair in zip(measured, axes, strict=True):
        rows = quantities[quantity].reset_index(drop=True)
        for ax, side in zip(pair, ("paper_", ""), strict=True):
            dense, sparse = rows[f"{side}dense"], rows[f"{side}sparse"]
            ax.bar(rows.index - 0.2, dense, 0.38, color=_DENSE, label="dense")
            ax.bar(rows.index + 0.2, sparse, 0.38, color=BLUE, label="sparse")
            for place, change in rows[f"{side}change"].dropna().items():
                top = max(dense[place], sparse[place])
                _note(ax, f"{change:+.1f}%", (place, top), (0, 3), ha="center")
            look = {"rotation": 90, "ha": "center", "va": "bottom", "color": "0.4"}
            for place in rows.index[dense.isna()]:
                ax.text(place, 0, " not measured", fontsize=6.5, **look)
            ax.set_xticks(rows.index, rows["model"])
            ax.set_xlim(-0.6, len(rows) - 0.4)  # also where the last is missing
            ax.margins(y=0.2)
            ax.grid(False, axis="x")
        pair[0].set_ylabel(f"{quantity}\n({rows['unit'].iloc[0]})")
    devices = "; ".join(dict.fromkeys(device for device in table["device"] if device))
    axes[0, 0].set_title(f"paper, {table['paper_device'].iloc[0]}", loc="left")
    imposed = ", imposed activity" if set(table["profile"]) - {"", "checkpoint"} else ""
    axes[0, 1].set_title(f"ours, {devices}{imposed}", loc="left")
    _legend(figure, "lower center", ncols=2, handlelength=1)
    return figure
