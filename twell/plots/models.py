"""Figures of whole models: downstream tasks (Table 6, Fig. 3), speed, energy and memory (Figs 4, 5, 6, 10, 11, Table 1)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
    _figure,
    _level_colours,
    _plain,
)

# --- downstream tasks (Table 6, Fig. 3) ------------------------------------------------------------


def _dodged(parameters: pd.Series, place: int, places: int) -> pd.Series:
    """Sizes on a log axis, each level a little beside the others."""
    return parameters * 10 ** (0.07 * (place - (places - 1) / 2))


def table6_tasks(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw accuracy against model size for each of the seven tasks and their mean, by L1 level, ours and the paper's.

    table: `analysis.across_sizes`; paper: `analysis.paper_tasks`. Bars are one standard error, dashed lines chance, and open
    circles accuracies that are not more than two standard errors above it. The paper's levels are of another model and do not compare
    with ours.
    """
    figure, axes = _figure(PAGE, 4.0, 2, 4, sharex=True)
    ours, theirs = (sorted(rows["l1_coefficient"].unique()) for rows in (table, paper))
    colours = _level_colours([*ours, *theirs])
    for ax, (task, (title, _)) in zip(axes.flat, analysis.TASKS.items(), strict=True):
        rows, printed = (found[found["task"] == task] for found in (table, paper))
        for place, level in enumerate(theirs):
            line = printed[printed["l1_coefficient"] == level].sort_values("parameters")
            x = _dodged(line["parameters"], place, len(theirs))
            ax.plot(
                x, 100 * line["accuracy"], "s-", color=colours[level], markersize=3, linewidth=0.6
            )
        for place, level in enumerate(ours):
            line = rows[rows["l1_coefficient"] == level].sort_values("parameters")
            x = _dodged(line["parameters"], place, len(ours))
            ax.errorbar(
                x,
                100 * line["accuracy"],
                100 * line["stderr"],
                fmt="-",
                color=colours[level],
                linewidth=0.6,
            )
            above = line["verdict"] == "above chance"
            for chosen, fill in ((~above, "white"), (above, colours[level])):
                ax.plot(
                    x[chosen],
                    100 * line["accuracy"][chosen],
                    "o",
                    color=colours[level],
                    mfc=fill,
                    markersize=4,
                )
        ax.axhline(
            100 * rows["chance"].iloc[0], color="0.4", linestyle="--", linewidth=0.8, zorder=1
        )
        ax.set(xscale="log", title=title)
        ax.margins(0.08, 0.12)
        ax.xaxis.set_minor_locator(NullLocator())
    for ax in axes[1]:
        ax.set_xlabel("parameters")
    for ax in axes[:, 0]:
        ax.set_ylabel("accuracy (%)")
    dot = {"marker": "o", "linestyle": "", "markersize": 4}
    handles = {
        f"ours, L1 = {analysis.level_name(level)}": Line2D([], [], color=colours[level], **dot)
        for level in ours
    }
    handles |= {
        f"paper, L1 = {analysis.level_name(level)}": Line2D(
            [], [], color=colours[level], **(dot | {"marker": "s"})
        )
        for level in theirs
    }
    handles["not above chance"] = Line2D([], [], color="0.4", mfc="white", **dot)
    handles["chance"] = Line2D([], [], color="0.4", linestyle="--", linewidth=0.8)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, columnspacing=1.2
    )
    return figure


def fig03_accuracy(table: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the mean accuracy of the seven tasks at each L1 level, a panel a model size, ours and the paper's.

    table: `analysis.several_levels`; paper: `analysis.paper_levels`. Bars are one standard error, the dashed line is chance.
    """
    sizes = [
        rows
        for _, rows in table[table["task"] == analysis.MEAN].groupby(analysis.SIZE, dropna=False)
    ]
    panels = [rows.sort_values("l1_coefficient") for rows in [*sizes, paper]]
    ratios = [1 + len(rows) for rows in panels]
    figure, (row,) = _figure(
        min(PAGE, 0.5 * sum(ratios)), 2.3, 1, len(panels), sharey=True, width_ratios=ratios
    )
    chance = 100 * sizes[0]["chance"].iloc[0]
    for ax, rows in zip(row, panels, strict=True):
        x, y = range(len(rows)), 100 * rows["accuracy"]
        colours = list(_level_colours(rows["l1_coefficient"]).values())
        ax.plot(x, y, color="0.7", linewidth=1, zorder=1)
        ax.scatter(
            x, y, 22, colours[-len(rows) :], marker="s" if rows is panels[-1] else "o", zorder=3
        )
        name = f"{rows['parameters'].iloc[0] / 1e6:,.3g} M parameters"
        if "stderr" in rows:
            ax.errorbar(
                x, y, 100 * rows["stderr"], fmt="none", ecolor="0.4", elinewidth=1, zorder=2
            )
            if not np.isnan(tokens := rows["training_tokens"].iloc[0]):
                name += f",\n{tokens / 1e6:,.3g} M tokens"
        ax.axhline(chance, color="0.4", linestyle="--", linewidth=0.8, zorder=1)
        ax.set_xticks(x, [analysis.level_name(level) for level in rows["l1_coefficient"]])
        ax.set(xlabel="L1 coefficient", title=name)
        ax.margins(0.15, 0.12)
    note = {"textcoords": "offset points", "fontsize": 7, "color": "0.3", "ha": "center"}
    row[-1].annotate(
        f"chance {chance:.1f}", (0.5, chance), (0, 3), xycoords=("axes fraction", "data"), **note
    )
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
ACTIVITY = {
    "paper": "random weights, imposed activity",
    "flat": "random weights, imposed activity, the same in each layer",
    "checkpoint": "trained, activity of a text",
}


def _model(table: pd.DataFrame) -> str:
    """What was measured, on what: a figure's title. Raises ValueError unless it is one model, profile and device."""
    about = table[["model", "num_layers", "profile", "device"]].drop_duplicates()
    if len(about) != 1:
        raise ValueError(f"this figure shows one model on one device; this table has {len(about)}")
    model, layers, profile, device = about.iloc[0]
    return f"{model}, {layers} layers, {device}; {ACTIVITY.get(profile, profile)}"


def _gains(table: pd.DataFrame, labels: tuple[str, str], title: str) -> Figure:
    """Two panels, faster and saved in % of dense, a group of bars a level of activity and a bar a provider."""
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    levels = list(dict.fromkeys(table["active"]))
    names = [name for name in SIDES if name in set(table["provider"])]
    width = 0.8 / len(names)
    for ax, column, label in zip(axes.flat, ("faster", "saved"), labels, strict=True):
        for place, name in enumerate(names):
            rows = table[(table["provider"] == name) & table[column].notna()]
            x = [
                levels.index(active) + (place - (len(names) - 1) / 2) * width
                for active in rows["active"]
            ]
            bars = ax.bar(x, rows[column], width, color=SIDES[name][0], label=SIDES[name][1])
            texts = [f"{round(value) + 0:+d}" for value in rows[column]]
            ax.bar_label(
                bars,
                texts,
                fontsize=6.5,
                padding=2,
                rotation=90 if len(levels) * len(names) > 12 else 0,
            )
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks(
            range(len(levels)),
            [f"{active:.2g}" if active < 100 else f"{active:.0f}" for active in levels],
        )
        ax.set_xlim(
            -max(0.6, 1.6 - len(levels) / 2), len(levels) - 1 + max(0.6, 1.6 - len(levels) / 2)
        )  # no bar is a wall
        ax.grid(False, axis="x")
        ax.margins(y=0.18)
        ax.set(xlabel="active neurons per token", ylabel=label)
    figure.suptitle(title, fontsize=8)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1
    )
    return figure


def fig04_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in forward speed and the energy it saves at each level of activity (Fig. 4).

    table: `analysis.model_speedups` of one model, batch and device. Raises ValueError for several.
    """
    batch, context = table[["batch", "context"]].iloc[0]
    title = f"{_model(table)}; {batch} x {context} tokens"
    labels = "forward speed, % over dense", "energy saved, % of dense"
    return _gains(analysis.level_gains(table), labels, title)


def fig05_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in training speed and the peak memory it saves at each level of activity (Fig. 5).

    table: `analysis.step_speedups` of one model, micro-batch and device. Raises ValueError for several.
    """
    title = f"{_model(table)}; steps of {table['micro_batch'].iloc[0]} x {table['context'].iloc[0]} tokens"
    labels = "training speed, % over dense", "peak memory saved, %"
    return _gains(analysis.level_gains(table, by="peak_change"), labels, title)


def fig06_contributions(table: pd.DataFrame) -> Figure:
    """Draw each layer's activity and, below, the time that its feed-forward layer saves (Figs 6, 10, 11).

    table: `analysis.layer_contributions` of one model, level and device. Raises ValueError for several.
    """
    title = _model(table)
    if table["level"].nunique() != 1:
        raise ValueError(
            f"this figure shows one level of activity; this table has {table['level'].nunique()}"
        )
    table = table.sort_values("layer")
    figure, axes = _figure(COLUMN, 3.9, 2, 1, sharex=True)
    top, bottom = axes[0, 0], axes[1, 0]
    shown = table[["active", "active_max"]].clip(lower=ACTIVE_FLOOR)
    top.bar(table["layer"], shown["active"], 0.7, color=BLUE, label="mean")
    top.scatter(table["layer"], shown["active_max"], 14, marker="v", color=ORANGE, label="maximum")
    top.set(yscale="log", ylabel="active neurons per token")
    top.set_ylim(0.5 * shown["active"].min(), 4 * shown["active_max"].max())
    _plain(top.yaxis)
    r = analysis.correlation(table)
    bottom.bar(table["layer"], table["saved"], 0.7, color=BLUE, label=f"sparse (r = {r:.3f})")
    look = {"color": ORANGE, "edgecolor": "white", "linewidth": 0.5, "zorder": 3}
    bottom.scatter(table["layer"], table["auto_saved"], 14, marker="D", label="auto", **look)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="layer", ylabel="ms saved of the\ndense feed-forward layer")
    bottom.margins(y=0.3)
    bottom.set_xticks(table["layer"][:: max(1, len(table) // 10)])
    for ax in (top, bottom):
        ax.grid(False, axis="x")
        ax.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1, borderaxespad=0.2)
    model, rest = title.split("; ")
    figure.suptitle(f"{model}\n{rest}; {table['level'].iloc[0]:.3g} active", fontsize=7.5)
    return figure


def model_parts(table: pd.DataFrame) -> Figure:
    """Draw where the time of a decoder layer goes, dense and sparse, and the least that Amdahl's law leaves.

    table: `analysis.layer_parts` of one model and device; several batches stand one below the other, all of forward passes or
    all of decoding behind as many tokens. Raises ValueError for others.
    """
    title = _model(table)
    decoding = table["tokens"] == table["batch"]
    if (
        decoding.nunique() != 1
        or table["context"].nunique() != 1
        or table.duplicated(["batch", "provider"]).any()
    ):
        raise ValueError("this figure shows batches of one kind, each once; this table has others")
    after = list(table.columns).index("provider") + 1
    parts = list(table.columns[after : list(table.columns).index("total")])
    table = table.sort_values(
        "provider", key=lambda names: names.map(list(SIDES).index)
    ).sort_values("batch", kind="stable", ignore_index=True)
    cases = list(dict.fromkeys(table["batch"]))
    # Bars of a batch touch each other, batches do not.
    y = np.arange(len(table)) + 0.5 * table["batch"].map(cases.index).to_numpy()
    scale, unit = (1e3, "µs") if table["total"].max() < 1 else (1, "ms")
    figure, axes = _figure(PAGE, 1.3 + 0.3 * len(table) + 0.1 * len(cases))
    ax = axes[0, 0]
    colours = dict(zip(parts, ["0.35", "0.55", "0.8", ORANGE, BLUE, GREEN], strict=False))
    left, total = np.zeros(len(table)), scale * table["total"]
    for part in parts:
        widths = scale * table[part]
        name = "gate (of sparse: and up)" if part == "gate" and decoding.iloc[0] else part
        ax.barh(y, widths, 0.8, left=left, color=colours[part], label=name)
        for place, value, start in zip(y, widths, left, strict=True):
            ink = "black" if colours[part] == "0.8" else "white"
            for text in (f"{value:.3g}", f"{value:.2g}", f"{value:.1g}"):
                if len(text) * 0.0125 * total.max() < value:  # there is room for it
                    ax.text(
                        start + value / 2,
                        place,
                        text,
                        ha="center",
                        va="center",
                        fontsize=6.5,
                        color=ink,
                    )
                    break
        left += widths.to_numpy()
    for row, place in zip(table.itertuples(), y, strict=True):
        text = f"{scale * row.total:.3g} {unit}" + (
            f", {100 * (row.speedup - 1):+.0f}%" if row.speedup != 1 else ""
        )
        ax.annotate(
            text,
            (scale * row.total, place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    for batch in cases:
        of = table["batch"] == batch
        limit = table.loc[of, "limit"].iloc[0]
        least = total[of & (table["provider"] == analysis.BASELINE)].iloc[0] / limit
        for place in (
            *(y[of] - 0.45),
            y[of].max() + 0.45,
        ):  # between bars, not across their numbers
            ax.plot([least] * 2, [place - 0.08, place + 0.08], color="black", linewidth=1.2)
        note = f"dense without up and down: {100 * (limit - 1):+.0f}%"
        rightward = least < 0.4 * total.max()
        look = {
            "textcoords": "offset points",
            "ha": "left" if rightward else "right",
            "va": "center",
            "fontsize": 6.5,
        }
        ax.annotate(note, (least, y[of].min() - 0.58), (3 if rightward else -3, 0), **look)
    names = [SIDES[name][1] for name in table["provider"]]
    context, several = f"{table['context'].iloc[0]:.0f}", len(cases) > 1
    if decoding.iloc[0]:
        kinds = [f"{batch:.0f} document{'s' if batch > 1 else ''}" for batch in table["batch"]]
        said = f"{'' if several else kinds[0] + ', '}a token each behind {context} tokens"
    else:
        kinds = [f"{batch:.0f} x {context}" for batch in table["batch"]]
        said = "forward" if several else f"{kinds[0]} tokens"
    names = (
        [f"{kind}, {name}" for kind, name in zip(kinds, names, strict=True)] if several else names
    )
    low, high = table["active"].min(), table["active"].max()
    said += f", {low:.3g} active" if low == high else f", {low:.3g} to {high:.3g} active"
    ax.set_yticks(y, names)
    ax.set_ylim(y.max() + 0.5, -0.8)
    ax.set_xlim(0, 1.18 * total.max())
    ax.set_xlabel(f"{unit} of one decoder layer")
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    figure.suptitle(f"{title}; {said}", fontsize=8)
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        handlelength=1,
        columnspacing=1,
    )
    return figure


def model_decode(table: pd.DataFrame) -> Figure:
    """Draw what decoding gains over dense, tuned and not, with tokens a second, against the number of documents.

    table: `analysis.decode_speedups` of one model, context and device. Raises ValueError for several.
    """
    title = _model(table)
    if table["context"].nunique() != 1:
        raise ValueError(
            f"this figure shows one length of context; this table has {table['context'].nunique()}"
        )
    figure, axes = _figure(PAGE, 2.5)
    ax = axes[0, 0]
    batches = sorted(table["batch"].unique())
    table = table.assign(x=table["batch"].map(batches.index), gain=100 * (table["speedup"] - 1))
    tuned, table = table[table["tuned"]], table[~table["tuned"]]
    looks = {
        providers.TRITON_COMPILED.name: {"marker": "o", "markersize": 5},
        providers.AUTO_COMPILED.name: {
            "marker": "o",
            "markersize": 10,
            "markerfacecolor": "none",
            "linestyle": ":",
        },
    }
    for name, look in looks.items():
        rows = table[table["provider"] == name].sort_values("x")
        if len(rows):
            ax.plot(rows["x"], rows["gain"], color=SIDES[name][0], label=SIDES[name][1], **look)
        for row in rows.itertuples():
            if name == providers.TRITON_COMPILED.name:
                ax.annotate(
                    f"{row.gain:+.0f}%",
                    (row.x, row.gain),
                    (9, 4),
                    textcoords="offset points",
                    fontsize=7,
                )
            elif row.path.startswith("dense"):
                ax.annotate(
                    "auto is dense",
                    (row.x, row.gain),
                    (0, 9),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
    tuned = tuned[tuned["provider"] == providers.TRITON_COMPILED.name].sort_values("x")
    if len(tuned):
        look = {"marker": "s", "markersize": 5, "markerfacecolor": "white", "linestyle": "--"}
        ax.plot(tuned["x"], tuned["gain"], color=BLUE, label="sparse, both sides tuned", **look)
    for row in tuned.itertuples():
        ax.annotate(
            f"{row.gain:+.0f}%", (row.x, row.gain), (9, -4), textcoords="offset points", fontsize=7
        )
    dense = table[table["provider"] == analysis.BASELINE].set_index("batch")
    ax.axhline(0, color=SIDES[analysis.BASELINE][0], linewidth=0.8)
    ticks = [
        f"{batch}\n{dense.loc[batch, 'active']:.0f} active\ndense {dense.loc[batch, 'tokens_per_second']:,.0f} tokens/s"
        for batch in batches
    ]
    ax.set_xticks(range(len(batches)), ticks)
    ax.margins(0.12, 0.25)
    ax.set(xlabel="documents continued at once", ylabel="tokens/s, % over dense")
    figure.suptitle(
        f"{title}; {table['context'].iloc[0]} tokens in the cache, CUDA graphs", fontsize=8
    )
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def table1_scale(table: pd.DataFrame) -> Figure:
    """Draw Table 1 as the paper has it and as we measured it, a row a quantity, a group of bars a model.

    table: `analysis.scale_table`; a row of panels for each quantity that was measured. Raises ValueError where none was.
    """
    measured = [
        quantity
        for quantity, rows in table.groupby("quantity", sort=False)
        if rows["dense"].notna().any()
    ]
    if not measured:
        raise ValueError("none of the quantities of Table 1 was measured")
    figure, axes = _figure(PAGE, 0.7 + 1.45 * len(measured), len(measured), 2)
    for quantity, pair in zip(measured, axes, strict=True):
        rows = table[table["quantity"] == quantity].reset_index(drop=True)
        for ax, side in zip(pair, ("paper_", ""), strict=True):
            dense, sparse = rows[f"{side}dense"], rows[f"{side}sparse"]
            ax.bar(rows.index - 0.2, dense, 0.38, color=SIDES[analysis.BASELINE][0], label="dense")
            ax.bar(rows.index + 0.2, sparse, 0.38, color=BLUE, label="sparse")
            for place, change in rows[f"{side}change"].dropna().items():
                at = place, max(dense[place], sparse[place])
                ax.annotate(
                    f"{change:+.1f}%",
                    at,
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6.5,
                )
            for place in rows.index[dense.isna()]:
                ax.text(
                    place,
                    0,
                    " not measured",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=6.5,
                    color="0.4",
                )
            ax.set_xticks(rows.index, rows["model"])
            ax.set_xlim(-0.6, len(rows) - 0.4)  # also where the last is missing
            ax.margins(y=0.2)
            ax.grid(False, axis="x")
        pair[0].set_ylabel(f"{quantity}\n({rows['unit'].iloc[0]})")
    devices = "; ".join(dict.fromkeys(device for device in table["device"] if device))
    axes[0, 0].set_title(f"paper, {table['paper_device'].iloc[0]}", loc="left")
    imposed = ", imposed activity" if set(table["profile"]) - {"", "checkpoint"} else ""
    axes[0, 1].set_title(f"ours, {devices}{imposed}", loc="left")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=1
    )
    return figure
