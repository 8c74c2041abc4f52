"""Figures of whole models: tasks, speed, energy and memory (Figs 4 to 6, Table 1), decoding."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from study import analysis
from study.plots import base
from study.plots.speed import DENSE_FP8, SPARSE_FP8
from twell.measure import providers

AUTO = providers.AUTO_COMPILED.name
SIDES = {  # colour and name of each side of a model
    providers.DENSE_COMPILED.name: (base.DENSE, "dense"),
    providers.TRITON_COMPILED.name: (base.SPARSE, "sparse"),
    AUTO: (base.AUTO, "auto"),
}
_MARK = {"color": base.AUTO, "marker": "D", "markersize": 4, "mec": "white"}
_MARK |= {"mew": 0.6, "zorder": 3}
_IMPOSED = "Imposed activity: random weights whose gate fires as often as the paper reports."
_PICKS = "auto: each layer takes the sparse kernels or dense, by measured times."
_ACTIVITY = {
    "paper": "random weights, imposed activity",
    "checkpoint": "trained, activity of a text",
}


def _model(table: pd.DataFrame) -> str:
    """Return model, device and activity, of which there is one."""
    columns = "model", "num_layers", "profile", "device"
    model, layers, profile, device = base.one_case(table, columns, "model on one device")
    return f"{base.model_name(model)}, {layers} layers, {device}; {_ACTIVITY[profile]}"


def _title(figure: Figure, table: pd.DataFrame, rest: str) -> None:
    figure.conditions = f"{_model(table)}; {rest}"


def fig04_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in forward speed and energy at each level of activity (Fig. 4).

    table: `analysis.model_speedups` of one model, batch and device.
    """
    batch, context = table[["batch", "context"]].iloc[0]
    labels = "forward tokens/s (% over dense)", "energy saved (% of dense)"
    return _gains(table, "energy_change", labels, f"forward, {batch} x {context:,} tokens")


def fig05_levels(table: pd.DataFrame) -> Figure:
    """Draw a model's gain in training speed and peak memory at each level of activity (Fig. 5).

    table: `analysis.step_speedups` of one model, micro-batch and device.
    """
    batch, context = table[["micro_batch", "context"]].iloc[0]
    labels = "training tokens/s (% over dense)", "peak memory saved (% of dense)"
    return _gains(table, "peak_change", labels, f"steps of {batch} x {context:,} tokens")


def _gains(table: pd.DataFrame, by: str, labels: tuple[str, str], title: str) -> Figure:
    """Draw two panels, faster and saved in % of dense, by level: bars sparse, marks auto."""
    figure, axes = base.subplots(base.PAGE, 2.5, 1, 2, sharey=True)
    _title(figure, table, title)
    gains = analysis.level_gains(table, by)
    levels = list(dict.fromkeys(gains["active"]))
    gains = gains.assign(x=gains["active"].map(levels.index))
    auto, sparse = gains[gains["provider"] == AUTO], gains[gains["provider"] != AUTO]
    for ax, column, label in zip(axes.flat, ("faster", "saved"), labels, strict=True):
        ax.bar(sparse["x"], sparse[column], 0.6, color=base.SPARSE, label="sparse")
        if auto[column].notna().any():
            ax.plot(auto["x"], auto[column], linestyle="", label="auto", **_MARK)
        ends = [f"{column}_low", f"{column}_high"] if column == "faster" else [column] * 2
        if column == "faster":
            base.bars(
                ax, sparse["x"], sparse[column], *sparse[ends].T.to_numpy(), "black", zorder=4
            )
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
        base.legend(figure, "lower center", ncols=2, handlelength=1)
    base.caption(
        figure,
        _IMPOSED,
        _PICKS if len(auto) else "Sparse: the union path in every layer.",
        base.measured().replace("point", "bar").replace("; bars", "; error bars"),
        f"The {by.split('_')[0].replace('peak', 'memory')} of each side was read once.",
        "Where auto runs the sparse kernels, its distance from sparse is noise." * (len(auto) > 0),
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
        base.note(ax, base.change(value), (row["x"], far(heights)), (0, offset), ha="center", va=va)


def fig06_contributions(table: pd.DataFrame) -> Figure:
    """Draw each layer's activity and the time that it saves (Fig. 6).

    table: `analysis.layer_contributions` of one model, level and device.
    """
    table = table.sort_values("layer")
    layer, first = table["layer"], table.iloc[0]
    figure, axes = base.subplots(base.COLUMN, 3.7, 2, 1, sharex=True)
    top, bottom = axes[:, 0]
    shown = table[["active", "active_max"]].clip(lower=base.ACTIVE_FLOOR)
    dots = {"linestyle": "", "color": base.SPARSE, "markersize": 4.5}
    top.plot(layer, shown["active"], marker="o", label="mean", **dots)
    top.plot(layer, shown["active_max"], marker="^", mfc="white", label="busiest token", **dots)
    top.set(yscale="log", ylabel="active neurons per\ntoken (log scale)")
    top.set_ylim(0.5 * shown["active"].min(), 12 * shown["active_max"].max())
    base.plain(top.yaxis)
    r = f"{analysis.correlation(table):.3f}".replace("-", "−")
    bottom.bar(layer, table["saved"], 0.7, color=base.SPARSE, label=f"sparse (r = {r})")
    bottom.plot(layer, table["auto_saved"], linestyle="", label="auto", **_MARK)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.set(xlabel="layer", ylabel="time saved over the\ndense layer (ms)")
    bottom.margins(y=0.3)
    bottom.set_xticks(layer[:: max(1, len(table) // 10)])
    for ax in (top, bottom):
        ax.grid(False, axis="x")
        ax.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1, borderaxespad=0.2)
    tokens = f"{first['batch']:.0f} x {first['context']:,.0f} tokens; {first['level']:.3g} active"
    figure.conditions = f"{_model(table)}; {tokens}"
    base.caption(
        figure,
        "Feed-forward layers, forward.",
        "r: Pearson's correlation of mean activity and time saved.",
        "One measurement; medians of the timed calls, without a recorded spread.",
    )
    return figure


_TASKS = {
    "continuation": "continuations of held-out text",
    "last_word": "last words of held-out text",
    "arc_easy": "ARC-easy",
    "piqa": "PIQA",
    "hellaswag": "HellaSwag, by bytes",
}


def paired_tasks(pairs: pd.DataFrame, about: str = "") -> Figure:
    """Draw how much more accurate sparse models are than dense ones on the same items.

    pairs: `analysis.paired_runs`. about: the models.
    """
    pairs = pairs[pairs["task"].isin(_TASKS)].iloc[::-1]
    places, middle = np.arange(len(pairs)), pairs["difference"]
    counts = [base.number_range(pairs[side]) for side in ("dense_runs", "runs")]
    figure, ax = base.panel(1.4 * base.COLUMN, 0.9 + 0.3 * len(pairs))
    ax.errorbar(middle, places, xerr=pairs["limit"], fmt="none", ecolor=base.SPARSE, elinewidth=1)
    ends = [middle - pairs["low"], pairs["high"] - middle]
    ax.errorbar(middle, places, xerr=ends, fmt="o", color=base.SPARSE, elinewidth=3.5, markersize=4)
    ax.axvline(0, color="black", linewidth=0.8)
    means = "{}\n{:.1f} → {:.1f}%".format
    names = [means(_TASKS[row.task], row.dense, row.sparse) for row in pairs.itertuples()]
    ax.set_yticks(places, names)
    ax.set_ylim(-0.6, len(pairs) - 0.4)
    ax.set_xlabel("accuracy, sparse − dense (points)")
    base.caption(
        figure,
        base.sentence(about),
        "{} dense and {} sparse models a task, by seed.".format(*counts),
        "Thick bars are 95% intervals over the items, thin ones over items and seeds.",
        "Below the names: mean accuracies, dense → sparse.",
    )
    return figure


def table1_scale(table: pd.DataFrame) -> Figure:
    """Draw Table 1, the paper's and ours: a row a quantity, a group of bars a model.

    table: `analysis.scale_table`. A star marks what the paper did not measure alike.
    """
    quantities = dict(list(table.groupby("quantity", sort=False)))
    size = base.PAGE, 0.8 + 1.2 * len(quantities)
    figure, axes = base.subplots(*size, len(quantities), 2, sharey="row")
    for (quantity, rows), pair in zip(quantities.items(), axes, strict=True):
        for ax, side in zip(pair, ("paper_", ""), strict=True):
            _scale_bars(ax, rows.reset_index(drop=True), side)
        pair[0].set_ylabel(f"{quantity}\n({rows['unit'].iloc[0]})")
    for ax, side in zip(axes[-1], ("paper_", ""), strict=True):
        ax.set_xticks(range(table["model"].nunique()), _scale_ticks(table, side))
    devices = "; ".join(dict.fromkeys(device for device in table["device"] if device))
    axes[0, 0].set_title(f"paper, {table['paper_device'].iloc[0]}", loc="left")
    axes[0, 1].set_title(f"ours, {devices}", loc="left")
    base.legend(figure, "lower center", base.named(axes[0, 1]), ncols=2, handlelength=1)
    notes = [note for note in dict.fromkeys(table["paper_note"]) if note]
    base.caption(
        figure,
        "Numbers above bars: change of sparse over dense, of ours with the range that p20 and p80",
        "of the timed calls of both sides allow; one measurement a bar. The paper gives no spread.",
        "The GPUs differ, so compare changes, not heights.",
        "Active: neurons per token and layer.",
        f"Ours: {_IMPOSED[0].lower()}{_IMPOSED[1:]}",
        f"* {'; '.join(notes).split(';')[0]}.",
    )
    return figure


def _scale_bars(ax: Axes, rows: pd.DataFrame, side: str) -> None:
    """Draw bars of one quantity with their change; side: "paper_", or "" for ours."""
    dense, sparse = rows[f"{side}dense"], rows[f"{side}sparse"]
    ax.bar(rows.index - 0.2, dense, 0.38, color=base.DENSE, label="dense")
    ax.bar(rows.index + 0.2, sparse, 0.38, color=base.SPARSE, label="sparse")
    for row in rows[rows[f"{side}change"].notna()].itertuples():
        text = base.change(getattr(row, f"{side}change"), 1)
        if side and row.paper_note:
            text += " *"
        if not side and np.isfinite(row.low):
            text += f"\n({base.change(row.low)[:-1]} to {base.change(row.high)[:-1]})"
        top = max(dense[row.Index], sparse[row.Index])
        base.note(ax, text, (row.Index, top), (0, 3), ha="center", linespacing=1.0)
    ax.set_xticks(range(len(rows)), [""] * len(rows))
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.margins(y=0.3)
    ax.grid(False, axis="x")


def _scale_ticks(table: pd.DataFrame, side: str) -> list[str]:
    """Return models, each with its active neurons."""
    ticks = []
    for model, rows in table.groupby("model", sort=False):
        active = sorted({f"{value:.0f}" for value in rows[f"{side}active"].dropna()})
        ticks.append(f"{model}\n{' or '.join(active)} active" if active else f"{model}\n")
    return ticks


def model_parts(table: pd.DataFrame) -> Figure:
    """Draw the time of a decoder layer's parts, and the least that Amdahl's law leaves.

    table: `analysis.layer_parts` of forward passes of one model, batch and device.
    """
    columns = list(table.columns)
    parts = columns[columns.index("provider") + 1 : columns.index("total")]
    order = table["provider"].map(list(SIDES).index)
    table = table.loc[order.sort_values().index].reset_index(drop=True)
    y, first = np.arange(len(table)), table.iloc[0]
    figure, ax = base.panel(base.PAGE, 1.4 + 0.27 * len(table) + 0.1)
    drawn = _stack(ax, y, table, parts)
    for row in table.itertuples():
        gain = f", {base.change(100 * (row.speedup - 1))}" if row.speedup != 1 else ""
        text = f"{row.total:.{max(0, 2 - int(np.log10(row.total)))}f} ms{gain}"
        look = {"va": "center", "fontsize": 7} | base.HALO
        base.note(ax, text, (row.total, row.Index), (4, 0), **look)
    dense = table.loc[table["provider"] == analysis.BASELINE, "total"].iloc[0]
    least, line = dense / first["limit"], {"color": "black", "linestyle": ":", "linewidth": 1.2}
    ax.plot([least] * 2, [y.min() - 0.62, y.max() + 0.48], zorder=4, **line)
    limit = f"limit {base.change(100 * (first['limit'] - 1))}"
    base.note(ax, limit, (least, y.min() - 0.6), (2, 0), ha="left", va="center")
    base.row_names(ax, y, [SIDES[name][1] for name in table["provider"]])
    ax.set_ylim(y.max() + 0.5, -0.8)
    ax.set_xlim(0, 1.18 * table["total"].max())
    ax.set_xlabel("time of one decoder layer (ms)")
    size = f"{first['batch']:.0f} x {first['context']:,.0f} tokens, {first['active']:.3g} active"
    _title(figure, table, f"forward, {size}")
    drawn["limit: up and down cost nothing"] = base.key(**line)
    base.legend(figure, "lower center", drawn, ncols=4, handlelength=1.4, columnspacing=1.2)
    base.caption(
        figure,
        "Percentages are changes of speed of this layer over dense.",
        _IMPOSED,
        "One measurement: the median time of the layer, split by a profile of its kernels.",
    )
    return figure


def _stack(ax: Axes, y: np.ndarray, table: pd.DataFrame, parts: list) -> dict[str, Rectangle]:
    """Draw parts end to end, each with as many digits as it has room for; return the first bars."""
    looks = [{"color": shade} for shade in ("0.35", "0.55", "0.8", base.GATE, base.UP)]
    looks.append({"facecolor": "white", "edgecolor": "0.6", "hatch": "/////", "linewidth": 0})
    left, drawn = np.zeros(len(table)), {}
    for part, look in zip(parts, looks, strict=False):
        if not table[part].any():
            continue
        drawn[part] = ax.barh(y, table[part], 0.8, left=left, **look)[0]
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


def _decode_lines(table: pd.DataFrame) -> dict[str, tuple[pd.DataFrame, str | tuple, dict, int]]:
    """Return by name the rows of a line, its colour and look, and how high its notes are."""
    sides, tuned = analysis.fastest(table[~table["tuned"]]), table[table["tuned"]]
    tuned = tuned[tuned["provider"] == providers.TRITON_COMPILED.name]
    hollow = {"markersize": 4, "markerfacecolor": "white", "linestyle": "--"}
    square = {"marker": "s", "markersize": 5, "markerfacecolor": "white", "linestyle": ""}
    looks = {
        "sparse": (base.SPARSE, {"marker": "o", "markersize": 4}, -6),
        SPARSE_FP8: (base.SPARSE, hollow | {"marker": "o"}, 6),
        DENSE_FP8: ("black", hollow | {"marker": "v"}, 0),
    }
    lines = {side: (sides[sides["side"] == side], *look) for side, look in looks.items()}
    return lines | {"sparse, the compiler tunes both sides": (tuned, base.SPARSE, square, -1)}


def model_decode(table: pd.DataFrame) -> Figure:
    """Draw the gain of decoding over dense, tuned and not and in FP8, against documents.

    table: `analysis.decode_speedups` of one model, context and device.
    """
    batches = sorted(table["batch"].unique())
    table = table.assign(x=table["batch"].map(batches.index), gain=100 * (table["speedup"] - 1))
    for end in ("low", "high"):
        table[end] = 100 * (table[f"speedup_{end}"] - 1)
    table = table.sort_values("x")
    figure, ax = base.panel(base.PAGE, 3.2)
    context = table["context"].iloc[0]
    _title(figure, table, f"decoding behind {context} tokens, in CUDA graphs")
    for name, (rows, colour, look, height) in _decode_lines(table).items():
        if len(rows):
            ax.plot(rows["x"], rows["gain"], color=colour, label=name, **look)
            base.bars(ax, rows["x"], rows["gain"], rows["low"], rows["high"], colour)
        for row in rows.itertuples() if name != DENSE_FP8 else ():
            aside = {"ha": "right"} if height < 0 else {}  # notes of FP8 are on the other side
            look = {"va": "center", "fontsize": 7} | base.HALO | aside
            place = (row.x, row.gain), (-9 if aside else 9, height)
            base.note(ax, base.change(row.gain), *place, **look)
    auto = table[(table["provider"] == AUTO) & ~table["tuned"]]
    ring = {"color": base.AUTO, "linestyle": "", "marker": "D", "markersize": 9, "mfc": "none"}
    ax.plot(auto["x"], auto["gain"], label="auto", **ring)
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
    base.legend(figure, "lower center", ncols=3)
    of_all = auto.loc[auto["path"].str.fullmatch(r"dense \d+"), "batch"]
    densely = f"With {' and '.join(map(str, of_all))} documents it computes all layers densely."
    base.caption(
        figure,
        _IMPOSED,
        _PICKS,
        densely if len(of_all) else "",
        "FP8: of the feed-forward layers; all else is in bf16.",
        base.measured("replays"),
    )
    return figure


_KERNELS = {  # kernels of the union path -> label and colour; lists take 0.1 ms: part of "up"
    ("gate_bits_kernel", "gate_hopper_kernel"): ("gate (all)", base.GATE),
    ("lists_kernel", "up_kernel"): ("up (active)", base.UP),
    ("down_kernel",): ("down (active)", base.DOWN),
}


def overview(
    activity: pd.DataFrame,
    neurons: int,
    kernels: pd.DataFrame,
    layers: pd.DataFrame,
    scale: pd.DataFrame,
) -> Figure:
    """Draw three panels: which neurons fire, the time of one layer, and the gain of whole models.

    activity: `analysis.firing` of a layer with so many neurons. kernels: rows of kernels.csv of one
    case. layers: `analysis.fastest` of the same case, whose times are drawn; kernels say how that
    of the sparse layer is shared. scale: `analysis.scale_table`.
    """
    figure, (row,) = base.subplots(base.PAGE, 2.5, 1, 3, width_ratios=(1.25, 0.95, 1.1))
    _firing(row[0], activity, neurons)
    _layer_times(row[1], kernels, layers)
    _model_gains(row[2], scale)
    for ax in row:
        ax.grid(axis="x", visible=False)
    case = layers.iloc[0]
    size = f"{case['hidden_size']} x {case['intermediate_size']}"
    base.caption(
        figure,
        "Left: each mark is an active neuron of one layer of a trained model.",
        f"Middle: one gated layer, {size}, bf16 or FP8, {case['tokens']:,} tokens,",
        f"{case['active']:.0f} active neurons per token, {case['device']}; one measurement, and a",
        "profile that splits sparse. All: computed for all neurons; active: for active ones only.",
        "Dense FP8 is the fastest of several.",
        "Right: models with random weights whose gate fires as often as the paper reports; one",
        "measurement each, with bars from p20 to p80 of the timed calls of both sides.",
    )
    return figure


def _firing(ax: Axes, activity: pd.DataFrame, neurons: int) -> None:
    words = activity.drop_duplicates("place").set_index("place")["token"]
    mark = {"color": base.SPARSE, "markersize": 4, "markeredgewidth": 0.8}
    ax.plot(activity["neuron"], activity["place"], "|", **mark)
    ax.set_yticks(words.index, [word.strip() for word in words], fontsize=6.5)
    ax.invert_yaxis()
    share = 100 * len(activity) / (len(words) * neurons)
    ax.set(xlabel=f"neuron (of {neurons:,})", xlim=(0, neurons))
    ax.set_title(f"Few neurons fire for a token ({share:.1f}%)", fontsize=8)
    ax.tick_params(axis="y", length=0)


def _layer_times(ax: Axes, kernels: pd.DataFrame, layers: pd.DataFrame) -> None:
    """Draw times of the sides; bf16 sparse by its kernels."""
    times = layers.set_index("side")["p50"]
    drawn = [side for side in ("dense", "sparse", "dense FP8", "sparse FP8") if side in times]
    parts = kernels[kernels["provider"] == providers.UNION.name].set_index("kernel")["ms"]
    parts.index = parts.index.str.removeprefix("union_")  # older rows have none
    bottom = 0.0
    for place, side in enumerate(drawn):
        if side != "sparse":
            colour = base.SPARSE if side.startswith("sparse") else base.DENSE
            ax.bar(place, times[side], 0.62, color=colour)
            continue
        for names, (label, colour) in _KERNELS.items():
            height = times[side] * parts[parts.index.isin(names)].sum() / parts.sum()
            ax.bar(place, height, 0.62, bottom=bottom, color=colour, label=label)
            bottom += height
    for place, side in enumerate(drawn):
        base.note(ax, f"{times[side]:.1f}", (place, times[side]), (0, 2), ha="center", fontsize=7)
    ax.set_xticks(range(len(drawn)), [side.replace(" ", "\n") for side in drawn])
    ax.set(ylabel="time of one layer (ms)", ylim=(0, 1.15 * times["dense"]))
    handles, names = ax.get_legend_handles_labels()
    look = {"fontsize": 6, "loc": "upper right", "borderaxespad": 0.1, "handlelength": 1}
    ax.legend(handles[::-1], names[::-1], title="sparse", title_fontsize=6, **look)
    ax.set_title("Our kernels skip the rest", fontsize=8)


def _model_gains(ax: Axes, scale: pd.DataFrame) -> None:
    """Draw gains of models: colours say who measured, marks say what."""
    kinds = {"forward": ("forward pass", "-", True), "training": ("training step", "--", False)}
    models = list(dict.fromkeys(scale["model"]))
    devices = [scale[column].iloc[0] for column in ("device", "paper_device")]
    ours, paper = (device.removeprefix("NVIDIA ").split()[0] for device in devices)
    sides = {
        "change": (f"ours, {ours}", base.OURS, "o"),
        "paper_change": (f"paper, {paper}", base.PAPER, "s"),
    }
    handles, x = [], range(len(models))
    for column, (whose, colour, marker) in sides.items():
        for quantity, (kind, dashes, filled) in kinds.items():
            rows = scale[scale["quantity"] == f"{quantity} speed"].set_index("model").loc[models]
            look = {"color": colour, "marker": marker, "markersize": 4, "linestyle": dashes}
            look |= {"linewidth": 1, "mfc": colour if filled else "white"}
            ax.plot(x, rows[column], **look)
            if column == "change":
                base.bars(ax, x, rows[column], rows["low"], rows["high"], colour)
            handles.append(base.key(label=f"{whose}: {kind}", **look))
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(x, models)
    ax.set(xlabel="model", ylabel="tokens/s (% over dense)")
    top = scale[["change", "paper_change"]].max(axis=None)
    ax.set_ylim(top=2 * top)  # room for the legend
    ax.set_title("Whole models are faster", fontsize=8)
    ax.legend(handles=handles, loc="upper left", fontsize=6, borderaxespad=0.1, handlelength=2.6)
