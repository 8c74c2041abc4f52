"""Figures of whole models: tasks (Table 6, Fig. 3), speed, memory (Figs 4-6, 10, 11, Table 1)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from study import analysis
from study.plots.base import (
    ACTIVE_FLOOR,
    AUTO,
    COLUMN,
    DENSE,
    PAGE,
    SPARSE,
    _bars,
    _caption,
    _change,
    _figure,
    _key,
    _legend,
    _level_colours,
    _measured,
    _named,
    _note,
    _one,
    _panel,
    _range,
    _sentence,
    plain,
)
from twell.measure import providers

_DASHED = {"color": "0.4", "linestyle": "--", "linewidth": 0.8}  # chance

# --- downstream tasks (Table 6, Fig. 3) ---------------------------------------------------------


_TWO_ERRORS = "Bars of ours are ± two standard errors over the items of a task"


def _by_level(rows: pd.DataFrame, levels: list) -> Iterator[tuple[float, pd.DataFrame]]:
    """Rows of each level by size, with x and y: levels stand a little beside each other."""
    for place, level in enumerate(levels):
        line = rows[rows["l1_coefficient"] == level].sort_values("parameters")
        aside = 10 ** (0.07 * (place - (len(levels) - 1) / 2))
        yield level, line.assign(x=aside * line["parameters"], y=100 * line["accuracy"])


def table6_tasks(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw accuracy of each task and their mean against model size, by L1, ours and the paper's.

    table: `analysis.across_sizes`; paper: `analysis.paper_tasks`. Bars are two standard errors: an
    accuracy is above chance, the dashed line, where its bar is. Sizes are not joined, since their
    numbers of training tokens differ. The paper's levels are of another model and do not compare
    with ours.
    """
    figure, axes = _figure(PAGE, 4.2, 2, 4, sharex=True)
    ours, theirs = (sorted(rows["l1_coefficient"].unique()) for rows in (table, paper))
    colours = _level_colours([*ours, *theirs])
    for ax, (task, (title, _)) in zip(axes.flat, analysis.TASKS.items(), strict=True):
        rows, printed = (every[every["task"] == task] for every in (table, paper))
        for level, line in _by_level(printed, theirs):
            ax.plot(line["x"], line["y"], "s", color=colours[level], markersize=3)
        for level, line in _by_level(rows, ours):
            look = {"fmt": "o", "color": colours[level], "markersize": 3, "elinewidth": 0.8}
            ax.errorbar(line["x"], line["y"], 200 * line["stderr"], **look)
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
    entries["chance"] = _key(**_DASHED)
    _legend(figure, "lower center", entries, ncols=3, columnspacing=1.2)
    above = f"{_TWO_ERRORS}: an accuracy is above chance where its whole bar is."
    runs = f"{_models(table).capitalize()} a point; the paper prints no errors."
    beside = "Levels of a size stand beside each other; sizes differ in their training tokens."
    _caption(figure, above, runs, beside)
    return figure


def _models(table: pd.DataFrame) -> str:
    """How many models a point is the mean of."""
    number = _range(table["models"])
    return "one model" if number == "1" else f"{number} models"


def fig03_accuracy(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the mean accuracy of the tasks at each L1, a panel a model size, ours and the paper's.

    table: `analysis.several_levels`; paper: `analysis.paper_levels`. Bars are two standard errors,
    the dashed line is chance. All panels have the same axis.
    """
    means = table[table["task"] == analysis.MEAN]
    sizes = [rows for _, rows in means.groupby(analysis.SIZE, dropna=False)]
    panels = [rows.sort_values("l1_coefficient") for rows in [*sizes, paper]]
    colours = _level_colours([*means["l1_coefficient"], *paper["l1_coefficient"]])
    ratios = [1 + len(rows) for rows in panels]
    shape = {"sharey": True, "width_ratios": ratios}
    figure, (row,) = _figure(min(PAGE, 0.5 * sum(ratios)), 2.4, 1, len(panels), **shape)
    chance = 100 * sizes[0]["chance"].iloc[0]
    for ax, rows in zip(row, panels, strict=True):
        x, y = range(len(rows)), 100 * rows["accuracy"]
        shades = [colours[level] for level in rows["l1_coefficient"]]
        ax.scatter(x, y, 20, shades, marker="s" if rows is panels[-1] else "o", zorder=3)
        name = f"ours, {rows['parameters'].iloc[0] / 1e6:,.3g} M parameters"
        if "stderr" in rows:
            ax.errorbar(x, y, 200 * rows["stderr"], fmt="none", ecolor=shades, elinewidth=1.2)
            if not np.isnan(tokens := rows["training_tokens"].iloc[0]):
                name += f",\n{tokens / 1e6:,.3g} M training tokens"
        ax.axhline(chance, zorder=1, **_DASHED)
        ax.set_xticks(x, [analysis.level_name(level) for level in rows["l1_coefficient"]])
        if rows is panels[-1]:
            name = f"paper, {rows['parameters'].iloc[0] / 1e9:g} B parameters"
        ax.set(xlabel="L1 coefficient")
        ax.set_title(name, fontsize=7.5)
        ax.margins(0.15, 0.12)
    look = {"xycoords": ("axes fraction", "data"), "fontsize": 7, "color": "0.3", "ha": "center"}
    _note(row[-1], f"chance {chance:.1f}", (0.5, chance), (0, 3), **look)
    row[0].set_ylabel("mean accuracy\nof seven tasks (%)")
    runs = f"{_models(means).capitalize()} a level; the paper prints no errors."
    _caption(figure, f"{_TWO_ERRORS}.", runs)
    return figure


# --- whole models (Figs 4, 5, 6, 10, 11, Table 1) -----------------------------------------------

# Colour and name of each side of a model; all with compiled layers.
SIDES = {
    providers.DENSE_COMPILED.name: (DENSE, "dense"),
    providers.TRITON_COMPILED.name: (SPARSE, "sparse"),
    providers.UNION_COMPILED.name: (SPARSE, "sparse"),
    providers.AUTO_COMPILED.name: (AUTO, "auto"),
}
_AUTO = {"color": AUTO, "marker": "D", "markersize": 4, "mec": "white", "mew": 0.6, "zorder": 3}
_IMPOSED = "Imposed activity: random weights whose gate fires as often as the paper reports."
_PICKS = "auto: each layer takes the sparse kernels or dense, by measured times."
_ON_RANDOM = {"paper", "flat", "imposed"}
ACTIVITY = {
    "paper": "random weights, imposed activity",
    "flat": "random weights, imposed activity, the same in each layer",
    "imposed": "random weights, imposed activity of a trained model",
    "checkpoint": "trained, activity of a text",
    "checkpoint ordered": "trained, activity of a text, similar tokens side by side",
}


def _model(table: pd.DataFrame) -> tuple[str, str]:
    """Model and device, and activity. Raises ValueError unless there is one of each."""
    columns = "model", "num_layers", "profile", "device"
    model, layers, profile, device = _one(table, columns, "model on one device")
    return f"{_size(model)}, {layers} layers, {device}", ACTIVITY.get(profile, profile)


def _size(model: str) -> str:
    """A model's name, as the paper writes its sizes: 1.5B."""
    return model.upper() if re.fullmatch(r"[\d.]+b", model) else model


def _imposed(table: pd.DataFrame) -> str:
    return _IMPOSED if set(table["profile"]) & _ON_RANDOM else ""


def _title(figure: Figure, table: pd.DataFrame, rest: str) -> None:
    figure.suptitle("; ".join([*_model(table), rest]), fontsize=8)


def _gains(table: pd.DataFrame, by: str, labels: tuple[str, str], title: str) -> Figure:
    """Two panels, faster and saved in % of dense, by level of activity: bars sparse, marks auto."""
    figure, axes = _figure(PAGE, 2.5, 1, 2, sharey=True)
    _title(figure, table, title)
    gains = analysis.level_gains(table, by)
    levels = list(dict.fromkeys(gains["active"]))
    gains = gains.assign(x=gains["active"].map(levels.index))
    auto = gains[gains["provider"] == providers.AUTO_COMPILED.name]
    sparse = gains[gains["provider"] != providers.AUTO_COMPILED.name]
    for ax, column, label in zip(axes.flat, ("faster", "saved"), labels, strict=True):
        ax.bar(sparse["x"], sparse[column], 0.6, color=SPARSE, label="sparse")
        if auto[column].notna().any():
            ax.plot(auto["x"], auto[column], linestyle="", label="auto", **_AUTO)
        ends = [f"{column}_low", f"{column}_high"] if column == "faster" else [column] * 2
        if column == "faster":
            _bars(ax, sparse["x"], sparse[column], *sparse[ends].T.to_numpy(), "black", zorder=4)
        _gain_notes(ax, sparse, auto, column, ends)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.grid(False, axis="x")
        ticks = [f"{active:.2g}" if active < 100 else f"{active:.0f}" for active in levels]
        ax.set_xticks(range(len(levels)), ticks)
        aside = max(0.6, 1.6 - len(levels) / 2)  # no bar is a wall
        ax.set_xlim(-aside, len(levels) - 1 + aside)
        ax.margins(y=0.18)
        ax.yaxis.set_tick_params(labelleft=True)
        ax.set(xlabel="active neurons per token", ylabel=label)
    if len(auto):
        _legend(figure, "lower center", ncols=2, handlelength=1)
    what = "energy" if by.startswith("energy") else "memory"
    noise = "Where auto runs the sparse kernels, its distance from sparse is noise."
    _caption(
        figure,
        _imposed(table),
        _PICKS if len(auto) else "Sparse: the union path in every layer.",
        _measured(gains["faster_low"]).replace("point", "bar").replace("; bars", "; error bars"),
        f"The {what} of each side was read once.",
        noise if len(auto) else "",
    )
    return figure


def _gain_notes(
    ax: Axes, sparse: pd.DataFrame, auto: pd.DataFrame, column: str, ends: list[str]
) -> None:
    """Write the gain of each sparse bar beyond its error bar and the mark of auto."""
    others = auto.set_index("active")[column]
    for row in sparse[sparse[column].notna()].to_dict("records"):
        value, heights = row[column], [row[column], *(row[end] for end in ends)]
        heights.append(others.get(row["active"], np.nan))
        far, offset, va = (np.nanmin, -4, "top") if value < 0 else (np.nanmax, 4, "bottom")
        _note(ax, _change(value), (row["x"], far(heights)), (0, offset), ha="center", va=va)


_TASKS = {
    "continuation": "continuations of held-out text",
    "last_word": "last words of held-out text",
    "arc_easy": "ARC-easy",
    "piqa": "PIQA",
    "hellaswag": "HellaSwag, by bytes",
}


def paired_tasks(pairs: pd.DataFrame, about: str = "") -> Figure:
    """Draw how much more accurate sparse models are than dense ones on the same items.

    pairs: `analysis.paired_runs`; of each task that has an accuracy, the difference with two bars:
    its 95% interval over the items alone, and over items and seeds. about: the models. Ours.
    """
    pairs = pairs[pairs["task"].isin(_TASKS)].iloc[::-1]
    places = np.arange(len(pairs))
    counts = {side: _range(pairs[side]) for side in ("dense_runs", "runs")}
    figure, ax = _panel(1.4 * COLUMN, 0.9 + 0.3 * len(pairs))
    middle = pairs["difference"]
    ax.errorbar(middle, places, xerr=pairs["limit"], fmt="none", ecolor=SPARSE, elinewidth=1)
    ends = [middle - pairs["low"], pairs["high"] - middle]
    ax.errorbar(middle, places, xerr=ends, fmt="o", color=SPARSE, elinewidth=3.5, markersize=4)
    ax.axvline(0, color="black", linewidth=0.8)
    names = [
        f"{_TASKS[row.task]}\n{row.dense:.1f} → {row.sparse:.1f}%" for row in pairs.itertuples()
    ]
    ax.set_yticks(places, names)
    ax.set_ylim(-0.6, len(pairs) - 0.4)
    ax.set_xlabel("accuracy, sparse − dense (points)")
    _caption(
        figure,
        _sentence(about),
        f"{counts['dense_runs']} dense and {counts['runs']} sparse models a task, by seed.",
        "Thick bars are 95% intervals over the items, thin ones over items and seeds.",
        "Below the names: mean accuracies, dense → sparse.",
    )
    return figure


def fig04_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in forward speed and energy at each level of activity (Fig. 4).

    table: `analysis.model_speedups` of one model, batch and device. Raises ValueError for several.
    """
    batch, context = table[["batch", "context"]].iloc[0]
    labels = "forward tokens/s (% over dense)", "energy saved (% of dense)"
    return _gains(table, "energy_change", labels, f"forward, {batch} x {context:,} tokens")


def fig05_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in training speed and peak memory at each level of activity (Fig. 5).

    table: `analysis.step_speedups` of one model, micro-batch and device. Raises ValueError for
    several.
    """
    batch, context = table[["micro_batch", "context"]].iloc[0]
    labels = "training tokens/s (% over dense)", "peak memory saved (% of dense)"
    return _gains(table, "peak_change", labels, f"steps of {batch} x {context:,} tokens")


def fig06_contributions(table: pd.DataFrame) -> Figure:
    """Draw each layer's activity and the time that it saves (Figs 6, 10, 11).

    table: `analysis.layer_contributions` of one model, level and device. Raises ValueError for
    several.
    """
    model, activity = _model(table)
    (level,) = _one(table, ["level"], "level of activity")
    table = table.sort_values("layer")
    layer = table["layer"]
    figure, axes = _figure(COLUMN, 3.7, 2, 1, sharex=True)
    top, bottom = axes[:, 0]
    shown = table[["active", "active_max"]].clip(lower=ACTIVE_FLOOR)
    dots = {"linestyle": "", "color": SPARSE, "markersize": 4.5}
    top.plot(layer, shown["active"], marker="o", label="mean", **dots)
    top.plot(layer, shown["active_max"], marker="^", mfc="white", label="busiest token", **dots)
    top.set(yscale="log", ylabel="active neurons per\ntoken (log scale)")
    top.set_ylim(0.5 * shown["active"].min(), 12 * shown["active_max"].max())
    plain(top.yaxis)
    r = _signless(analysis.correlation(table))
    bottom.bar(layer, table["saved"], 0.7, color=SPARSE, label=f"sparse (r = {r})")
    bottom.plot(layer, table["auto_saved"], linestyle="", label="auto", **_AUTO)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="layer", ylabel="time saved over the\ndense layer (ms)")
    bottom.margins(y=0.3)
    bottom.set_xticks(layer[:: max(1, len(table) // 10)])
    for ax in (top, bottom):
        ax.grid(False, axis="x")
        ax.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1, borderaxespad=0.2)
    title = f"{model}\n{activity}\n{_tokens(table)} tokens; {level:.3g} active"
    figure.suptitle(title, fontsize=7.5)
    terms = "r: Pearson's correlation of mean activity and time saved."
    once = "One measurement; medians of the timed calls, without a recorded spread."
    _caption(figure, "Feed-forward layers, forward.", terms, once)
    return figure


def _signless(r: float) -> str:
    """A correlation, with a minus as long as a plus."""
    return f"{r:.3f}".replace("-", "−")


def _tokens(table: pd.DataFrame) -> str:
    batch, context = table[["batch", "context"]].iloc[0]
    return f"{batch:.0f} x {context:,.0f}"


def table1_scale(table: pd.DataFrame) -> Figure:
    """Draw Table 1, the paper's and ours: a row a quantity, a group of bars a model.

    table: `analysis.scale_table`; a row of panels for each quantity that was measured, with one
    axis for both sides. A star marks what the paper did not measure alike. Raises ValueError where
    none was measured.
    """
    quantities = dict(list(table.groupby("quantity", sort=False)))
    measured = [name for name, rows in quantities.items() if rows["dense"].notna().any()]
    if not measured:
        raise ValueError("none of the quantities of Table 1 was measured")
    size = PAGE, 0.8 + 1.2 * len(measured)
    figure, axes = _figure(*size, len(measured), 2, sharey="row")
    for quantity, pair in zip(measured, axes, strict=True):
        rows = quantities[quantity].reset_index(drop=True)
        for ax, side in zip(pair, ("paper_", ""), strict=True):
            _scale_bars(ax, rows, side)
        pair[0].set_ylabel(f"{quantity}\n({rows['unit'].iloc[0]})")
    drawn = table[table["quantity"].isin(measured)]
    for ax, side in zip(axes[-1], ("paper_", ""), strict=True):
        ax.set_xticks(range(rows["model"].nunique()), _scale_ticks(drawn, side))
    devices = "; ".join(dict.fromkeys(device for device in table["device"] if device))
    axes[0, 0].set_title(f"paper, {table['paper_device'].iloc[0]}", loc="left")
    axes[0, 1].set_title(f"ours, {devices}", loc="left")
    _legend(figure, "lower center", _named(axes[0, 1]), ncols=2, handlelength=1)
    notes = [note for note in dict.fromkeys(drawn["paper_note"]) if note]
    imposed = set(drawn["profile"]) & _ON_RANDOM
    _caption(
        figure,
        "Numbers above bars: change of sparse over dense, of ours with the range that p20 and p80",
        "of the timed calls of both sides allow; one measurement a bar. The paper gives no spread.",
        "The GPUs differ, so compare changes, not heights.",
        "Active: neurons per token and layer.",
        f"Ours: {_IMPOSED[0].lower()}{_IMPOSED[1:]}" if imposed else "",
        f"* {'; '.join(notes).split(';')[0]}." if notes else "",
    )
    return figure


def _scale_bars(ax: Axes, rows: pd.DataFrame, side: str) -> None:
    """Dense and sparse bars of one quantity, with the change; side: "paper_", or "" for ours."""
    dense, sparse = rows[f"{side}dense"], rows[f"{side}sparse"]
    ax.bar(rows.index - 0.2, dense, 0.38, color=DENSE, label="dense")
    ax.bar(rows.index + 0.2, sparse, 0.38, color=SPARSE, label="sparse")
    for row in rows[rows[f"{side}change"].notna()].itertuples():
        text = _change(getattr(row, f"{side}change"), 1)
        if side and row.paper_note:
            text += " *"
        if not side and np.isfinite(row.low):
            text += f"\n({_change(row.low)[:-1]} to {_change(row.high)[:-1]})"
        top = max(dense[row.Index], sparse[row.Index])
        _note(ax, text, (row.Index, top), (0, 3), ha="center", linespacing=1.0)
    look = {"rotation": 90, "ha": "center", "va": "bottom", "color": "0.4"}
    for place in rows.index[dense.isna()]:
        ax.text(place, 0, " not measured", fontsize=6.5, **look)
    ax.set_xticks(range(len(rows)), [""] * len(rows))
    ax.set_xlim(-0.6, len(rows) - 0.4)  # also where the last is missing
    ax.margins(y=0.3)
    ax.grid(False, axis="x")


def _scale_ticks(table: pd.DataFrame, side: str) -> list[str]:
    """Models, each with its active neurons where they are known."""
    ticks = []
    for model, rows in table.groupby("model", sort=False):
        active = sorted({f"{value:.0f}" for value in rows[f"{side}active"].dropna()})
        ticks.append(f"{model}\n{' or '.join(active)} active" if active else f"{model}\n")
    return ticks
