"""The picture at the top of README: the idea, one layer, and whole models at a glance."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from twell.measure import providers
from twell.plots.base import (
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

# Kernels of the union path, without "union_", -> label and colour. The lists of active neurons take
# 0.1 ms: part of "up".
_KERNELS = {
    ("gate_bits_kernel", "gate_hopper_kernel"): ("gate (all)", GATE),
    ("lists_kernel", "up_kernel"): ("up (active)", UP),
    ("down_kernel",): ("down (active)", DOWN),
}


def overview(
    activity: pd.DataFrame, neurons: int, kernels: pd.DataFrame, scale: pd.DataFrame
) -> Figure:
    """Draw three panels: which neurons fire, the time of one layer, and the gain of whole models.

    activity: columns place (0, 1, ...), token (text) and neuron, one row an active neuron of one
    layer; neurons: the neurons of that layer. kernels: rows of kernels.csv of one case, with
    provider "dense" and "triton union", ms and the case. scale: `analysis.scale_table`, of one
    device of ours.
    """
    figure, (row,) = _figure(PAGE, 2.5, 1, 3, width_ratios=(1.25, 0.95, 1.1))
    _tokens(row[0], activity, neurons)
    _layer(row[1], kernels)
    _models(row[2], scale)
    for ax in row:
        ax.grid(axis="x", visible=False)
    case = kernels.iloc[0]
    size = f"{case['hidden_size']} x {case['intermediate_size']}"
    _caption(
        figure,
        "Left: each mark is an active neuron of one layer of a trained model.",
        f"Middle: kernels of one gated layer, {size}, bf16, {case['tokens']:,} tokens,",
        f"{case['active']:.0f} active neurons per token, {case['device']}; one profile.",
        "All: computed for all neurons; active: for active neurons only.",
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


def _layer(ax: Axes, kernels: pd.DataFrame) -> None:
    dense = kernels.loc[kernels["provider"] == providers.DENSE_KERNELS.name, "ms"].sum()
    sparse = kernels[kernels["provider"] == providers.UNION.name].set_index("kernel")["ms"]
    sparse.index = sparse.index.str.removeprefix("union_")  # older rows have none
    ax.bar(0, dense, 0.55, color=DENSE)
    bottom = 0.0
    for names, (label, colour) in _KERNELS.items():
        height = sparse[sparse.index.isin(names)].sum()
        ax.bar(0.8, height, 0.55, bottom=bottom, color=colour)
        ax.text(1.12, bottom + height / 2, label, va="center", fontsize=6)
        bottom += height
    for place, total in ((0, dense), (0.8, bottom)):
        _note(ax, f"{total:.1f} ms", (place, total), (0, 2), ha="center", fontsize=7)
    ax.set_xticks([0, 0.8], ["dense", "sparse\n(ours)"])
    ax.set_xlim(-0.45, 2.1)
    ax.set(ylabel="time of one layer (ms)", ylim=(0, 1.15 * dense))
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
