"""The picture at the top of README: the idea, one layer, and whole models at a glance."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.plots.base import (
    DENSE,
    DOWN,
    GATE,
    OURS,
    PAGE,
    PAPER,
    SPARSE,
    UP,
    _bars,
    _caption,
    _figure,
    _key,
    _note,
)
from twell.measure import providers

# Kernels of the union path, without "union_", -> label and colour. The lists of active neurons take
# 0.1 ms: part of "up".
_KERNELS = {
    ("gate_bits_kernel", "gate_hopper_kernel"): ("gate (all)", GATE),
    ("lists_kernel", "up_kernel"): ("up (active)", UP),
    ("down_kernel",): ("down (active)", DOWN),
}


def overview(
    activity: pd.DataFrame,
    neurons: int,
    kernels: pd.DataFrame,
    layers: pd.DataFrame,
    scale: pd.DataFrame,
) -> Figure:
    """Draw three panels: which neurons fire, the time of one layer, and the gain of whole models.

    activity: columns place (0, 1, ...), token (text) and neuron, one row an active neuron of one
    layer; neurons: the neurons of that layer. kernels: rows of kernels.csv of one case, with
    provider "triton union" and ms. layers: `analysis.fastest` of the same case, whose times are
    drawn; kernels say how that of the sparse layer is shared. scale: `analysis.scale_table`, of one
    device of ours.
    """
    figure, (row,) = _figure(PAGE, 2.5, 1, 3, width_ratios=(1.25, 0.95, 1.1))
    _tokens(row[0], activity, neurons)
    _layer(row[1], kernels, layers)
    _models(row[2], scale)
    for ax in row:
        ax.grid(axis="x", visible=False)
    case = layers.iloc[0]
    size = f"{case['hidden_size']} x {case['intermediate_size']}"
    in_fp8 = "Dense FP8 is the fastest of several." if len(layers) > 2 else ""
    _caption(
        figure,
        "Left: each mark is an active neuron of one layer of a trained model.",
        f"Middle: one gated layer, {size}, bf16 or FP8, {case['tokens']:,} tokens,",
        f"{case['active']:.0f} active neurons per token, {case['device']}; one measurement, and a",
        "profile that splits sparse. All: computed for all neurons; active: for active ones only.",
        in_fp8,
        "Right: models with random weights whose gate fires as often as the paper reports; one",
        "measurement each, with bars from p20 to p80 of the timed calls of both sides.",
    )
    return figure


def _tokens(ax: Axes, activity: pd.DataFrame, neurons: int) -> None:
    words = activity.drop_duplicates("place").set_index("place")["token"]
    mark = {"color": SPARSE, "markersize": 4, "markeredgewidth": 0.8}
    ax.plot(activity["neuron"], activity["place"], "|", **mark)
    ax.set_yticks(words.index, [word.strip() for word in words], fontsize=6.5)
    ax.invert_yaxis()
    share = 100 * len(activity) / (len(words) * neurons)
    ax.set(xlabel=f"neuron (of {neurons:,})", xlim=(0, neurons))
    ax.set_title(f"Few neurons fire for a token ({share:.1f}%)", fontsize=8)
    ax.tick_params(axis="y", length=0)


def _layer(ax: Axes, kernels: pd.DataFrame, layers: pd.DataFrame) -> None:
    """Times of the sides, those in FP8 where they were measured; bf16 sparse by its kernels."""
    times = layers.set_index("side")["p50"]
    drawn = [side for side in ("dense", "sparse", "dense FP8", "sparse FP8") if side in times]
    parts = kernels[kernels["provider"] == providers.UNION.name].set_index("kernel")["ms"]
    parts.index = parts.index.str.removeprefix("union_")  # older rows have none
    bottom = 0.0
    for place, side in enumerate(drawn):
        if side != "sparse":
            colour = SPARSE if side.startswith("sparse") else DENSE
            ax.bar(place, times[side], 0.62, color=colour)
            continue
        for names, (label, colour) in _KERNELS.items():
            height = times[side] * parts[parts.index.isin(names)].sum() / parts.sum()
            ax.bar(place, height, 0.62, bottom=bottom, color=colour, label=label)
            bottom += height
    for place, side in enumerate(drawn):
        _note(ax, f"{times[side]:.1f}", (place, times[side]), (0, 2), ha="center", fontsize=7)
    ax.set_xticks(range(len(drawn)), [side.replace(" ", "\n") for side in drawn])
    ax.set(ylabel="time of one layer (ms)", ylim=(0, 1.15 * times["dense"]))
    handles, names = ax.get_legend_handles_labels()
    look = {"fontsize": 6, "loc": "upper right", "borderaxespad": 0.1, "handlelength": 1}
    ax.legend(handles[::-1], names[::-1], title="sparse", title_fontsize=6, **look)
    ax.set_title("Our kernels skip the rest", fontsize=8)


def _models(ax: Axes, scale: pd.DataFrame) -> None:
    """Colours say who measured, marks say what."""
    kinds = {
        "forward speed": ("forward pass", "-", True),
        "training speed": ("training step", "--", False),
    }
    models = list(dict.fromkeys(scale["model"]))
    devices = [scale[column].iloc[0] for column in ("device", "paper_device")]
    ours, paper = (device.removeprefix("NVIDIA ").split()[0] for device in devices)
    sides = {
        "change": (f"ours, {ours}", OURS, "o"),
        "paper_change": (f"paper, {paper}", PAPER, "s"),
    }
    handles = []
    for column, (whose, colour, marker) in sides.items():
        for quantity, (kind, dashes, filled) in kinds.items():
            rows = scale[scale["quantity"] == quantity].set_index("model").loc[models]
            look = {"color": colour, "marker": marker, "markersize": 4, "linestyle": dashes}
            look |= {"linewidth": 1, "mfc": colour if filled else "white"}
            ax.plot(range(len(models)), rows[column], **look)
            if column == "change":
                _bars(ax, range(len(models)), rows[column], rows["low"], rows["high"], colour)
            handles.append(_key(label=f"{whose}: {kind}", **look))
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(models)), models)
    ax.set(xlabel="model", ylabel="tokens/s (% over dense)")
    top = scale[["change", "paper_change"]].max(axis=None)
    ax.set_ylim(top=2 * top)  # room for the legend
    ax.set_title("Whole models are faster", fontsize=8)
    ax.legend(handles=handles, loc="upper left", fontsize=6, borderaxespad=0.1, handlelength=2.6)
