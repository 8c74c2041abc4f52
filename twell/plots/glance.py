"""The picture at the top of README: the idea, one layer, and whole models at a glance."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from twell.measure import providers
from twell.plots.base import BLUE, ORANGE, PAGE, _figure, _key

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
    for ax in row:
        ax.grid(axis="x", visible=False)
    return figure


def _tokens(ax: Axes, activity: pd.DataFrame, neurons: int) -> None:
    words = activity.drop_duplicates("place").set_index("place")["token"]
    mark = {"color": BLUE, "markersize": 4, "markeredgewidth": 0.8}
    ax.plot(activity["neuron"], activity["place"], "|", **mark)
    ax.set_yticks(words.index, [word.strip() for word in words], fontsize=6.5)
    ax.invert_yaxis()
    share = 100 * len(activity) / (len(words) * neurons)
    ax.set(xlabel=f"neuron (of {neurons:,})", xlim=(0, neurons))
    ax.set_title(f"Few neurons fire for a token ({share:.1f}%)", fontsize=8)
    ax.tick_params(axis="y", length=0)


def _layer(ax: Axes, kernels: pd.DataFrame) -> None:
    dense = kernels.loc[kernels["provider"] == providers.DENSE_KERNELS.name, "ms"].sum()
    sparse = kernels[kernels["provider"] == providers.UNION.name].set_index("kernel")["ms"]
    sparse.index = sparse.index.str.removeprefix("union_")  # older rows have none
    ax.bar(0, dense, 0.6, color="0.55")
    bottom = 0.0
    for names, (label, colour) in _KERNELS.items():
        height = sparse[list(names)].sum()
        ax.bar(1, height, 0.6, bottom=bottom, color=colour, label=label)
        bottom += height
    for place, total in enumerate((dense, bottom)):
        ax.annotate(f"{total:.1f} ms", (place, total), ha="center", va="bottom", fontsize=7)
    ax.set_xticks([0, 1], ["dense", "sparse (ours)"])
    ax.set(ylabel="time of one layer (ms)", ylim=(0, 1.4 * dense))
    ax.set_title("Our kernels skip the rest", fontsize=8)
    ax.legend(reverse=True, loc="upper right", fontsize=6, borderaxespad=0.1)


def _models(ax: Axes, scale: pd.DataFrame) -> None:
    kinds = {"forward speed": (BLUE, "o"), "training speed": (ORANGE, "s")}
    models = list(dict.fromkeys(scale["model"]))
    devices = [scale[column].iloc[0] for column in ("device", "paper_device")]
    ours, paper = (device.removeprefix("NVIDIA ").split()[0] for device in devices)
    open_mark = {"linestyle": ":", "mfc": "white", "markersize": 4}
    for quantity, (colour, marker) in kinds.items():
        rows = scale[scale["quantity"] == quantity].set_index("model").loc[models]
        look = {"color": colour, "marker": marker, "markersize": 4}
        ax.plot(range(len(models)), rows["change"], **look)
        ax.plot(range(len(models)), rows["paper_change"], linewidth=0.8, **look | open_mark)
    ax.axhline(0, color="0.4", linewidth=0.8)
    ax.set_xticks(range(len(models)), models)
    ax.set(xlabel="model", ylabel="tokens/s over dense (%)")
    ax.set_ylim(top=1.6 * scale[["change", "paper_change"]].max(axis=None))  # room for the legend
    ax.set_title("Whole models are faster", fontsize=8)
    handles = [
        _key(BLUE, marker="o", markersize=4, label="forward pass"),
        _key(ORANGE, marker="s", markersize=4, label="training step"),
        _key("0.3", label=f"ours, {ours}"),
        _key("0.3", marker="o", label=f"paper, {paper}", **open_mark),
    ]
    look = {"fontsize": 6, "columnspacing": 0.8, "borderaxespad": 0.1}
    ax.legend(handles=handles, loc="upper left", ncols=2, **look)
