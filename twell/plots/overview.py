"""The picture at the top of README: the idea, one layer, and whole models at a glance."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from twell.measure import providers
from twell.plots.base import BLUE, ORANGE, PAGE, _figure

# Kernels of the union path, without "union_", -> label and colour. The lists of active neurons take
# 0.1 ms: part of "up".
_KERNELS = {
    ("gate_bits_kernel",): ("every neuron", "0.55"),
    ("lists_kernel", "up_kernel"): ("up, active neurons", BLUE),
    ("down_kernel",): ("down, active neurons", ORANGE),
}


def overview(
    activity: pd.DataFrame, neurons: int, kernels: pd.DataFrame, scale: pd.DataFrame
) -> Figure:
    """Draw three panels: which neurons fire, the time of one layer, and the gain of whole models.

    activity: columns place (0, 1, ...), token (text) and neuron, one row an active neuron of one
    layer; neurons: the neurons of that layer. kernels: rows of kernels.csv of one case, with
    provider "dense" and "triton union", ms. scale: `analysis.scale_table`, of one device of ours.
    """
    figure, (row,) = _figure(PAGE, 2.5, 1, 3, width_ratios=(1.25, 1, 1.05))
    _tokens(row[0], activity, neurons)
    _layer(row[1], kernels)
    _models(row[2], scale)
    return figure


def _tokens(ax, activity: pd.DataFrame, neurons: int) -> None:
    words = activity.drop_duplicates("place").set_index("place")["token"]
    ax.plot(
        activity["neuron"], activity["place"], "|", color=BLUE, markersize=4, markeredgewidth=0.8
    )
    ax.set_yticks(words.index, [word.strip() for word in words], fontsize=6.5)
    ax.invert_yaxis()
    share = 100 * len(activity) / (len(words) * neurons)
    ax.set(xlabel=f"neuron (of {neurons:,})", xlim=(0, neurons))
    ax.set_title(f"Few neurons fire for a token ({share:.1f}%)", fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", visible=False)


def _layer(ax, kernels: pd.DataFrame) -> None:
    dense = kernels.loc[kernels["provider"] == providers.DENSE_KERNELS.name, "ms"].sum()
    sparse = kernels[kernels["provider"] == providers.UNION.name].set_index("kernel")["ms"]
    sparse.index = sparse.index.str.removeprefix("union_")  # older rows have none
    ax.bar(0, dense, 0.6, color="0.55")
    ax.annotate(f"{dense:.1f} ms", (0, dense), ha="center", va="bottom", fontsize=7)
    bottom = 0.0
    for names, (label, colour) in _KERNELS.items():
        height = sparse[list(names)].sum()
        ax.bar(1, height, 0.6, bottom=bottom, color=colour, label=label)
        bottom += height
    ax.annotate(f"{bottom:.1f} ms", (1, bottom), ha="center", va="bottom", fontsize=7)
    ax.set_xticks([0, 1], ["dense", "sparse (ours)"])
    ax.set(ylabel="time of one layer (ms)", ylim=(0, 1.4 * dense))
    ax.set_title("Our kernels skip the rest", fontsize=8)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="upper right", fontsize=6, borderaxespad=0.1)
    ax.grid(axis="x", visible=False)


def _models(ax, scale: pd.DataFrame) -> None:
    kinds = (
        ("forward speed", BLUE, "o", "forward pass"),
        ("training speed", ORANGE, "s", "training step"),
    )
    models = list(dict.fromkeys(scale["model"]))
    ours, paper = (
        scale[column].iloc[0].removeprefix("NVIDIA ").split()[0]
        for column in ("device", "paper_device")
    )
    highest = scale[["change", "paper_change"]].max(axis=None)
    for quantity, colour, marker, _ in kinds:
        rows = scale[scale["quantity"] == quantity].set_index("model").loc[models]
        x = np.arange(len(models))
        ax.plot(x, rows["change"], marker + "-", color=colour, markersize=4)
        ax.plot(
            x,
            rows["paper_change"],
            marker + ":",
            color=colour,
            mfc="white",
            markersize=4,
            linewidth=0.8,
        )
    ax.axhline(0, color="0.4", linewidth=0.8)
    ax.set_xticks(range(len(models)), models)
    ax.set(xlabel="model", ylabel="tokens/s over dense (%)")
    ax.set_ylim(top=1.6 * highest)  # room for the legend
    ax.set_title("Whole models are faster", fontsize=8)
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=4, label=label)
        for _, colour, marker, label in kinds
    ]
    handles += [
        Line2D([], [], color="0.3", label=f"ours, {ours}"),
        Line2D(
            [],
            [],
            color="0.3",
            linestyle=":",
            marker="o",
            mfc="white",
            markersize=4,
            label=f"paper, {paper}",
        ),
    ]
    ax.legend(
        handles=handles, loc="upper left", ncols=2, fontsize=6, columnspacing=0.8, borderaxespad=0.1
    )
    ax.grid(axis="x", visible=False)
