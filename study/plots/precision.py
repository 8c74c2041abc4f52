"""The figure of FP8: speed against what it costs in cross-entropy."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study.plots.base import (
    PAGE,
    SPARSE,
    _bars,
    _caption,
    _figure,
    _measured,
    _note,
    _one,
)
from study.plots.models import _size

# Colour, marker, and whether it is filled.
_LOOKS = {
    "dense": ("black", "v", True),
    "sparse": (SPARSE, "o", True),
    "dense FP8": ("black", "v", False),
    "sparse FP8": (SPARSE, "o", False),
    "dense FP8 all": ("black", "v", False),
    "sparse FP8 all": (SPARSE, "o", False),
}
_NAMES = {
    "dense": "dense bf16",
    "sparse": "sparse bf16",
    "dense FP8 all": "dense FP8,\nattention too",
    "sparse FP8 all": "sparse FP8,\nattention too",
}


def fp8_quality(layer: pd.DataFrame, model: pd.DataFrame, quality: pd.DataFrame) -> Figure:
    """Draw the speed of bf16 and FP8, dense and sparse, against the change of cross-entropy.

    layer, model: `analysis.speed_and_quality` of one case of a layer, and of one model's forward
    passes, which may be empty; quality: the model's rows of `analysis.fp8_quality` from which both
    have their changes. Raises ValueError for several cases or none, and for several models. Ours.
    """
    judged, tokens = _one(quality, ["model", "tokens"], "model whose quality was measured")
    tables = [table for table in (layer, model) if len(table)]
    figure, (row,) = _figure(PAGE, 2.9, 1, len(tables), sharex=True)
    for ax, table in zip(row, tables, strict=True):
        ax.set_title(_title(table), loc="left", fontsize=8)
        _points(ax, table)
        ax.set_xlabel(f"change of cross-entropy of {judged} (nats)")
    left, right = row[0].get_xlim()
    row[0].set_xlim(left, right + 0.4 * (right - left))  # for the notes
    row[0].set_ylabel("speed over dense bf16")
    (device,) = _one(pd.concat(tables), ["device"], "device")
    figure.suptitle(f"speed: {device}; quality: {judged}", fontsize=8)
    size, neurons = quality["parameters"].iloc[0] / 1e6, quality["active"].iloc[0]
    levels = " and ".join(f"{table['active'].iloc[0]:.0f}" for table in tables)
    _caption(
        figure,
        "Up is faster, left is better.",
        f"Quality is of {judged}: {size:.3g} M parameters, {neurons:.0f} active neurons,",
        f"{tokens:,} held-out tokens, with paired 95% intervals.",
        f"Speed is of random weights with imposed activity, {levels} active.",
        "Sparse bf16 computes the function of dense bf16.",
        _measured(tables[0]["speedup_low"]),
    )
    return figure


def _title(table: pd.DataFrame) -> str:
    """What was timed. Raises ValueError unless it is one case."""
    if "model" in table:
        columns = ["model", "batch", "context", "mode"]
        model, batch, context, _ = _one(table, columns, "case of a model")
        return f"{_size(model)}, forward, {batch} x {context:,} tokens"
    columns = ["hidden_size", "intermediate_size", "tokens", "pattern", "mode"]
    width, neurons, tokens, *_ = _one(table, columns, "case of a layer")
    return f"one layer, {width} x {neurons}, {tokens:,} tokens"


def _points(ax: Axes, table: pd.DataFrame) -> None:
    """A point a side, named, with the bars of both directions."""
    for row in table.itertuples():
        colour, marker, filled = _LOOKS[row.side]
        x, y = row.difference, row.speedup
        if row.high > row.low:
            ends = np.array([[x - row.low], [row.high - x]])
            ax.errorbar([x], [y], xerr=ends, fmt="none", ecolor=colour, elinewidth=0.9, capsize=2)
        _bars(ax, [x], [y], np.array([row.speedup_low]), np.array([row.speedup_high]), colour)
        face = colour if filled else "white"
        ax.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=6, zorder=3)
        text = f"{_NAMES.get(row.side, row.side)} ({y:.2f})"
        beside = np.nanmax([x, row.high])  # of the bar
        _note(ax, text, (beside, y), (6, 3), ha="left", va="bottom", fontsize=7, color=colour)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.margins(0.12, 0.2)
