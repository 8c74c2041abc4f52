"""Figures of pretrained models that became sparse, and of the speed that their activity allows."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from twell.plots.base import (
    DECODE,
    GATE,
    HYBRID,
    PAGE,
    ROWWISE,
    SPARSE,
    UP,
    _caption,
    _figure,
    _key,
    _legend,
    _plain,
    _sentence,
)

_LAYERS = [(SPARSE, "o"), (DECODE, "s"), (ROWWISE, "D"), (HYBRID, "^"), (GATE, "v"), (UP, "P")]
_LAYERS += [("0.45", "X")]  # colour and marker of measured layers
_SHARE, _WITHOUT_L1 = "active neurons (%)", "ReLU alone"


def _colours(table: pd.DataFrame) -> dict[str, str | tuple]:
    """A colour a run, by its name: black without L1, then from dark to light the sparser it is."""
    others = [name for name in table["name"] if name != _WITHOUT_L1]
    steps, scale = max(len(others) - 1, 1), mpl.colormaps["viridis"]
    colours = {name: scale(0.15 + 0.7 * place / steps) for place, name in enumerate(others)}
    return {name: colours.get(name, "black") for name in table["name"]}


def _end(figure: Figure, colours: dict, *sentences: str) -> None:
    """The legend and the caption of a figure of runs."""
    entries = {name: _key(colour) for name, colour in colours.items()}
    _legend(figure, "lower center", entries, ncols=4, title="wanted share of active neurons")
    _caption(figure, *sentences)


def _course(ax: Axes, course: pd.DataFrame, column: str, factor: float, colours: dict) -> None:
    for name, colour in colours.items():
        line = course[course["name"] == name].sort_values("tokens")
        ax.plot(line["tokens"] / 1e6, factor * line[column], color=colour, linewidth=1.1)
    ax.set(xlabel="training tokens (millions)", yscale="log")
    ax.xaxis.set_major_locator(MaxNLocator(5))
    _plain(ax.yaxis)


def relufied_course(course: pd.DataFrame, table: pd.DataFrame, about: str = "") -> Figure:
    """Draw KL divergence from the teacher and activity over training, a line a run.

    course, table: `analysis.relufied_course` and `analysis.relufied_runs`. about: the model.
    """
    figure, ((left, right),) = _figure(PAGE, 2.6, 1, 2)
    colours = _colours(table)
    _course(left, course, "kl", 1, colours)
    _course(right, course, "active_fraction", 100, colours)
    left.set_ylabel("KL divergence (nats)")
    right.set_ylabel(_SHARE)
    _end(figure, colours, _sentence(about), "One run each.")
    return figure


def relufied_price(table: pd.DataFrame, layers: pd.DataFrame, about: str = "") -> Figure:
    """Draw what activity costs, a mark a run, and the activity of each layer, a line a run.

    table, layers: `analysis.relufied_runs` and `analysis.relufied_layers`. about: the model.
    """
    figure, ((left, right),) = _figure(PAGE, 2.6, 1, 2)
    colours = _colours(table)
    shades = [colours[name] for name in table["name"]]
    share = 100 * table["active_fraction"]
    left.scatter(share, table["kl"], 26, shades, marker="o", zorder=3)
    left.scatter(share, table["rise"], 26, "white", marker="D", edgecolors=shades, zorder=3)
    left.set(xlabel=_SHARE, xscale="log", ylabel="nats")
    left.set_ylim(min(0, 1.1 * table["rise"].min()), None)
    _plain(left.xaxis)
    look = {"linestyle": "", "markersize": 5}
    left.legend(
        [_key("0.4", marker="o", **look), _key("0.4", marker="D", markerfacecolor="white", **look)],
        ["KL divergence from the original", "cross-entropy over the original's"],
    )
    for name, colour in colours.items():
        line = layers[layers["name"] == name]
        right.plot(line["layer"], 100 * line["active_fraction"], color=colour, marker="o", ms=2.5)
    right.set(xlabel="layer", yscale="log", ylabel=_SHARE)
    right.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    _plain(right.yaxis)
    _end(figure, colours, _sentence(about), "One run each, on held-out text.")
    return figure


def gains_by_share(gains: pd.DataFrame, reached: Iterable[float] = (), device: str = "") -> Figure:
    """Draw the speed-up of measured layers by their share of active neurons.

    gains: `analysis.gains_by_share`. reached: shares of active neurons (0 to 1), drawn as lines.
    Of many tokens the largest measured number counts, of each kind of layer.
    """
    figure, axes = _figure(PAGE, 2.9, 1, 2, sharex=True, sharey=True)
    shape = ["hidden_size", "intermediate_size", "gated"]
    looks = dict(zip([keys for keys, _ in gains.groupby(shape)], _LAYERS, strict=False))
    for ax, calls in zip(axes[0], ("one token", "many tokens"), strict=True):
        some = gains[gains["calls"] == calls]
        most = some.groupby([*shape, "pattern"])["tokens"].transform("max")
        some = some[some["tokens"] == most]
        for keys, line in some.groupby(shape):
            colour, marker = looks[keys]
            line = line.sort_values("active_fraction")
            share = 100 * line["active_fraction"]
            ax.plot(share, line["speedup"], color=colour, marker=marker, ms=4, linewidth=1)
        for one in reached:
            ax.axvline(100 * one, color="0.8", linewidth=0.8, zorder=0)
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set(title=calls, xlabel=_SHARE, xscale="log", yscale="log")
        _plain(ax.xaxis, ax.yaxis)
    axes[0, 0].set_ylabel("speed-up over dense")
    entries = {
        f"{k} x {n}{'' if gated else ', no gate'}": _key(colour, marker=marker)
        for (k, n, gated), (colour, marker) in looks.items()
    }
    _legend(figure, "lower center", entries, ncols=3)
    about = "Each point is the fastest sparse path of one measured layer, bf16, with imposed, "
    about += f"skewed activity{f', {device}' if device else ''}."
    drawn = "Light lines are the shares of the models above." if list(reached) else ""
    _caption(figure, about, drawn)
    return figure
