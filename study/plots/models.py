"""Figures of whole models: tasks, speed, energy and memory (Figs 4 to 6, Table 1), decoding."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study import analysis
from study.plots import base
from twell.measure import providers

AUTO = providers.AUTO_COMPILED.name
PROVIDERS = {  # colour and name of each
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


def fig04_levels(forward: pd.DataFrame, steps: pd.DataFrame) -> Figure:
    """Draw a model's gain by level of activity, forward and in training (Figs 4, 5).

    forward, steps: `analysis.model_speedups` and `analysis.step_speedups` of one model and device.
    """
    figure, axes = base.subplots(base.PAGE, 4.4, 2, 2)
    batch, context = forward[["batch", "context"]].iloc[0]
    micro, length = steps[["micro_batch", "context"]].iloc[0]
    sizes = f"forward {batch} x {context:,} tokens, steps of {micro} x {length:,}"
    figure.conditions = f"{_model(forward)}; {sizes}"
    labels = "forward, tokens/s", "forward, energy", "training, tokens/s", "training, peak memory"
    _gains(axes[0], analysis.level_gains(forward, "energy_change"))
    _gains(axes[1], analysis.level_gains(steps, "peak_change"))
    for ax, label in zip(axes.flat, labels, strict=True):
        ax.set_title(label, loc="left")
    for left, right in axes:
        left.set_ylabel("% faster than dense")
        right.set_ylabel("% saved over dense")
    for ax in axes[1]:
        ax.set_xlabel("active neurons per token")
    base.legend(figure, "lower center", ncols=2, handlelength=1)
    base.caption(
        figure,
        _IMPOSED,
        _PICKS,
        base.measured(mark="bar", whiskers="error bars"),
        "Energy and memory of each side were read once.",
        "Where auto runs the sparse kernels, its distance from sparse is noise.",
    )
    return figure


def _gains(axes: np.ndarray, gains: pd.DataFrame) -> None:
    """Draw two panels, faster and saved in % of dense, by level: bars sparse, marks auto."""
    levels = list(dict.fromkeys(gains["active"]))
    gains = gains.assign(x=gains["active"].map(levels.index))
    auto, sparse = gains[gains["provider"] == AUTO], gains[gains["provider"] != AUTO]
    for ax, column in zip(axes, ("faster", "saved"), strict=True):
        ax.bar(sparse["x"], sparse[column], 0.6, color=base.SPARSE, label="sparse")
        if auto[column].notna().any():
            ax.plot(auto["x"], auto[column], linestyle="", label="auto", **_MARK)
        if column == "faster":
            ends = sparse["faster_low"], sparse["faster_high"]
            base.bars(ax, sparse["x"], sparse["faster"], *ends, "black", zorder=4)
        _gain_notes(ax, sparse, auto, column)
        ax.axhline(0, color=base.DENSE, linewidth=1.2)
        ax.grid(False, axis="x")
        ax.set_xticks(range(len(levels)), [f"{active:.0f}" for active in levels])
        ax.margins(y=0.2)


def _gain_notes(ax: Axes, sparse: pd.DataFrame, auto: pd.DataFrame, column: str) -> None:
    """Write the gain of each sparse bar beyond its error bar and the mark of auto."""
    others = auto.set_index("active")[column]
    for row in sparse[sparse[column].notna()].to_dict("records"):
        value, heights = row[column], [row[column], others.get(row["active"], np.nan)]
        heights += [row.get(f"{column}_{end}", np.nan) for end in ("low", "high")]
        far, offset, va = (np.nanmin, -4, "top") if value < 0 else (np.nanmax, 4, "bottom")
        place, look = (row["x"], far(heights)), {"ha": "center", "va": va}
        base.note(ax, base.change(value)[:-1], place, (0, offset), **look)


def fig06_contributions(cases: Sequence[pd.DataFrame]) -> Figure:
    """Draw each layer's activity and the time that it saves, a column a level (Figs 6, 10, 11).

    cases: `analysis.layer_contributions` of one model and device, a table a level.
    """
    figure, axes = base.subplots(base.PAGE, 3.2, 2, len(cases), sharex=True, sharey="row")
    for table, (top, bottom) in zip(cases, axes.T, strict=True):
        active = table["active"].clip(lower=base.ACTIVE_FLOOR)
        top.plot(table["layer"], active, "o", color=base.SPARSE, markersize=3.5)
        top.set_title(f"{table['level'].iloc[0]:.0f} active", loc="left")
        bottom.bar(table["layer"], table["saved"], 0.7, color=base.SPARSE, label="sparse")
        bottom.plot(table["layer"], table["auto_saved"], linestyle="", label="auto", **_MARK)
        bottom.axhline(0, color=base.DENSE, linewidth=1.2)
        bottom.set_xlabel("layer")
    axes[0, 0].set(yscale="log", ylabel="active neurons")
    base.plain(axes[0, 0].yaxis)
    axes[1, 0].set_ylabel("time saved (ms)")
    base.legend(figure, "lower center", base.named(axes[1, 0]), ncols=2, handlelength=1)
    first = cases[0].iloc[0]
    tokens = f"{first['batch']:.0f} x {first['context']:,.0f} tokens"
    figure.conditions = f"{_model(cases[0])}; {tokens}"
    base.caption(
        figure,
        "Feed-forward layers, forward; time saved over the dense layer.",
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
    figure, ax = base.panel(base.PAGE, 0.8 + 0.36 * len(pairs))
    ax.errorbar(middle, places, xerr=pairs["limit"], fmt="none", ecolor=base.SPARSE, elinewidth=1)
    ends = [middle - pairs["low"], pairs["high"] - middle]
    ax.errorbar(middle, places, xerr=ends, fmt="o", color=base.SPARSE, elinewidth=3.5, markersize=4)
    ax.axvline(0, color="black", linewidth=0.8)
    means = "{}\n{:.1f} → {:.1f}%".format
    names = [means(_TASKS[row.task], row.dense, row.sparse) for row in pairs.itertuples()]
    ax.set_yticks(places, names)
    ax.set_ylim(-0.6, len(pairs) - 0.4)
    ax.set_xlabel("accuracy, sparse − dense (points)")
    figure.conditions = "95% intervals, thick: over items, thin: over items and seeds"
    base.caption(
        figure,
        base.sentence(about),
        "{} dense and {} sparse models a task, by seed. Below the names: means.".format(*counts),
    )
    return figure


def table1_scale(table: pd.DataFrame) -> Figure:
    """Draw Table 1, the paper's and ours: a row a quantity, a group of bars a model.

    table: `analysis.scale_table`. A star marks what the paper did not measure alike.
    """
    quantities = dict(list(table.groupby("quantity", sort=False)))
    size = base.PAGE, 0.8 + 1.1 * len(quantities)
    figure, axes = base.subplots(*size, len(quantities), 2, sharey="row")
    for (quantity, rows), (left, right) in zip(quantities.items(), axes, strict=True):
        _scale_bars(left, rows.reset_index(drop=True), "paper_")
        _scale_bars(right, rows.reset_index(drop=True), "")
        left.set_ylabel(f"{quantity}\n({rows['unit'].iloc[0]})")
    for ax, side in zip(axes[-1], ("paper_", ""), strict=True):
        ax.set_xticks(range(table["model"].nunique()), _scale_ticks(table, side))
        ax.set_xlabel("model, and its active neurons")
    devices = "; ".join(dict.fromkeys(device for device in table["device"] if device))
    axes[0, 0].set_title(f"paper, {table['paper_device'].iloc[0]}", loc="left")
    axes[0, 1].set_title(f"ours, {devices}", loc="left")
    base.legend(figure, "lower center", base.named(axes[0, 1]), ncols=2, handlelength=1)
    note = next(filter(None, table["paper_note"]), "").partition(";")[0]
    base.caption(
        figure,
        "Numbers above bars: change of sparse over dense; one measurement a bar.",
        "The GPUs differ, so compare changes, not heights.",
        f"Ours: {_IMPOSED[0].lower()}{_IMPOSED[1:]}",
        f"* {note}.",
    )
    return figure


def _scale_bars(ax: Axes, rows: pd.DataFrame, side: str) -> None:
    """Draw bars of one quantity with their change; side: "paper_", or "" for ours."""
    dense, sparse = rows[f"{side}dense"], rows[f"{side}sparse"]
    ax.bar(rows.index - 0.2, dense, 0.38, color=base.DENSE, label="dense")
    ax.bar(rows.index + 0.2, sparse, 0.38, color=base.SPARSE, label="sparse")
    for row in rows[rows[f"{side}change"].notna()].itertuples():
        text = base.change(getattr(row, f"{side}change"))
        if side and row.paper_note:
            text += " *"
        top = max(dense[row.Index], sparse[row.Index])
        base.note(ax, text, (row.Index, top), (0, 2), ha="center")
    ax.set_xticks(range(len(rows)), [""] * len(rows))
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.margins(y=0.3)
    ax.grid(False, axis="x")


def _scale_ticks(table: pd.DataFrame, side: str) -> list[str]:
    """Return models, each with its active neurons."""
    ticks = []
    for model, rows in table.groupby("model", sort=False):
        active = sorted({f"{value:.0f}" for value in rows[f"{side}active"].dropna()})
        ticks.append(f"{model}\n{' or '.join(active)}")
    return ticks


def model_parts(table: pd.DataFrame) -> Figure:
    """Draw the time of the parts of one decoder layer, dense and sparse.

    table: `analysis.layer_parts` of forward passes of one model, batch and device.
    """
    columns = list(table.columns)
    parts = [*columns[columns.index("provider") + 1 : columns.index("total")], "total"]
    parts = [part for part in parts if table[part].any()]
    y, rows = np.arange(len(parts)), table.set_index("provider").to_dict("index")
    drawn = [provider for provider in PROVIDERS if provider in rows]
    figure, ax = base.panel(base.COLUMN, 0.7 + 0.36 * len(parts))
    for number, provider in enumerate(drawn):
        row, (colour, name) = rows[provider], PROVIDERS[provider]
        places, times = y + 0.8 * (number + 0.5) / len(drawn) - 0.4, [row[part] for part in parts]
        ax.barh(places, times, 0.8 / len(drawn), color=colour)
        for place, part, time in zip(places, parts, times, strict=True):
            gain = f" {name}" if part == "total" else ""
            gain += f", {base.change(100 * (row['speedup'] - 1))}" if gain and number else ""
            base.note(ax, f"{time:.1f}{gain}", (time, place), (3, -0.5), va="center")
    base.row_names(ax, y, parts)
    ax.set_xlim(0, 1.9 * table["total"].max())
    ax.set_xlabel("time (ms)")
    first = table.iloc[0]
    size = f"{first['batch']:.0f} x {first['context']:,.0f} tokens, {first['active']:.3g} active"
    figure.conditions = f"{_model(table)}; forward, {size}"
    limit = f"{100 * (first['limit'] - 1):.0f}%"
    base.caption(
        figure,
        f"Without any time for up and down the layer would gain {limit} over dense.",
        _IMPOSED,
        "One measurement: the median time of the layer, split by a profile of its kernels.",
    )
    return figure


def model_decode(table: pd.DataFrame) -> Figure:
    """Draw the gain of decoding over dense, against documents.

    table: `analysis.decode_speedups` of one model, context and device, without tuning.
    """
    batches = sorted(table["batch"].unique())
    ends = {"gain": "speedup", "low": "speedup_low", "high": "speedup_high"}
    gains = {name: 100 * (table[column] - 1) for name, column in ends.items()}
    table = table.assign(x=table["batch"].map(batches.index), **gains).sort_values("x")
    lines = {  # provider, colour, look and where their name stands
        "sparse": (providers.TRITON_COMPILED.name, base.SPARSE, {"marker": "o"}, (7, 0)),
        "auto": (AUTO, base.AUTO, _MARK | {"linestyle": ""}, (7, 8)),
    }
    table = table[table["provider"].isin([line[0] for line in lines.values()])]
    figure, ax = base.panel(base.COLUMN, 2.8)
    context = table["context"].iloc[0]
    figure.conditions = f"{_model(table)}; decoding behind {context} tokens, in CUDA graphs"
    for name, (provider, colour, look, offset) in lines.items():
        if len(rows := table[table["provider"] == provider]):
            ax.plot(rows["x"], rows["gain"], **{"color": colour, "markersize": 5} | look)
            base.bars(ax, rows["x"], rows["gain"], rows["low"], rows["high"], colour)
            last, look = rows.iloc[-1], {"va": "center", "color": colour} | base.HALO
            base.note(ax, name, (last["x"], last["gain"]), offset, **look)
    ax.axhline(0, color=base.DENSE, linewidth=1.2)
    ax.set_xticks(range(len(batches)), batches)
    ax.set_xlim(-0.3, len(batches) + 0.3)  # for the names
    ax.set_ylim(top=1.15 * table["gain"].max())
    ax.set(xlabel="documents continued at once", ylabel="tokens/s (% over dense)")
    low, high = table["active"].min(), table["active"].max()
    active = f"{low:.0f} to {high:.0f} neurons are active; the compiler tunes neither side."
    base.caption(figure, _IMPOSED, active, _PICKS, base.measured("replays"))
    return figure


def overview(
    activity: pd.DataFrame, neurons: int, layers: pd.DataFrame, scale: pd.DataFrame
) -> Figure:
    """Draw three panels: which neurons fire, the time of one layer, and the gain of whole models.

    activity: `analysis.firing` of a layer with so many neurons. layers: `analysis.fastest` of one
    case. scale: `analysis.scale_table`.
    """
    figure, (row,) = base.subplots(base.PAGE, 2.6, 1, 3, width_ratios=(1.2, 0.9, 1.1))
    _firing(row[0], activity, neurons)
    _layer_times(row[1], layers)
    _model_gains(row[2], scale)
    for ax in row:
        ax.grid(axis="x", visible=False)
    case = layers.iloc[0]
    size = f"{case['hidden_size']} x {case['intermediate_size']}"
    base.caption(
        figure,
        "Left: each mark is an active neuron of one layer of a trained model.",
        f"Middle: one gated layer, {size}, bf16 or FP8, {case['tokens']:,} tokens,",
        f"{case['active']:.0f} active neurons per token, {case['device']}; medians of",
        f"{layers['calls'].max()} measurements. Dense FP8 is the fastest of several.",
        f"Right: ours on {case['device']}, the paper's on {scale['paper_device'].iloc[0]}; random",
        "weights whose gate fires as often as the paper reports, one measurement each.",
    )
    return figure


def _firing(ax: Axes, activity: pd.DataFrame, neurons: int) -> None:
    words = activity.drop_duplicates("place").set_index("place")["token"]
    mark = {"color": base.SPARSE, "markersize": 5, "markeredgewidth": 0.9}
    ax.plot(activity["neuron"], activity["place"], "|", **mark)
    ax.set_yticks(words.index, [word.strip() for word in words], fontsize=base.SMALL)
    ax.invert_yaxis()
    share = 100 * len(activity) / (len(words) * neurons)
    ax.set(xlabel=f"neuron (of {neurons:,})", xlim=(0, neurons))
    ax.set_title(f"{share:.1f}% of neurons fire", loc="left")
    ax.tick_params(axis="y", length=0)


def _layer_times(ax: Axes, layers: pd.DataFrame) -> None:
    """Draw the times of the sides of a layer."""
    times = layers.set_index("side")["p50"]
    drawn = [side for side in base.SIDES if side in times]
    for place, side in enumerate(drawn):
        ax.bar(place, times[side], 0.7, color=base.SIDES[side])
        base.note(ax, f"{times[side]:.1f}", (place, times[side]), (0, 2), ha="center")
    ax.set_xticks(range(len(drawn)), [side.replace(" ", "\n") for side in drawn], rotation=90)
    ax.set(ylabel="time (ms)", ylim=(0, 1.15 * times["dense"]))
    ax.locator_params(axis="y", nbins=3)
    ax.set_title("One layer", loc="left")


def _model_gains(ax: Axes, scale: pd.DataFrame) -> None:
    """Draw gains of models: colours say who measured, marks say what."""
    models = list(dict.fromkeys(scale["model"]))
    x = range(len(models))
    sides = ("ours", "", base.OURS, "o"), ("paper", "paper_", base.PAPER, "s")
    for whose, side, colour, marker in sides:
        card, _, _ = scale[f"{side}device"].max().removeprefix("NVIDIA ").partition(" ")
        for kind, dashes, face in (("forward", "-", colour), ("training", "--", "white")):
            rows = scale[scale["quantity"] == f"{kind} speed"].set_index("model").loc[models]
            look = {"color": colour, "marker": marker, "markersize": 4, "mfc": face}
            look |= {"linestyle": dashes, "linewidth": 1, "label": f"{whose}, {card}, {kind}"}
            ax.plot(x, rows[f"{side}change"], **look)
    ax.axhline(0, color=base.DENSE, linewidth=1.2)
    ax.set_xticks(x, models)
    ax.set(xlabel="model", ylabel="tokens/s (% over dense)")
    ax.set_ylim(top=1.9 * scale[["change", "paper_change"]].max(axis=None))  # for the legend
    ax.set_title("Whole models", loc="left")
    ax.legend(loc="upper left", fontsize=base.SMALL, borderaxespad=0.1, handlelength=2.2)
