"""What a training would cost on many GPUs (`analysis.training_costs`)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from study.plots.base import (
    DENSE,
    ORANGE,
    PAGE,
    RED,
    SPARSE,
    _caption,
    _figure,
    _key,
    _legend,
    plain,
)
from twell.measure.providers import Provider

_SENDING = {"all GPUs": (RED, ":"), "a node": (ORANGE, "-")}  # by what parameters are sharded over


def cluster_costs(costs: pd.DataFrame, about: str = "") -> Figure:
    """Draw a step's computing and sending, and hours of the training, by the number of GPUs.

    costs: `analysis.training_costs` with one dense provider. about: the training, in a sentence.
    """
    figure, ((left, right),) = _figure(PAGE, 2.9, 1, 2, sharex=True)
    sides = {"dense": DENSE, "sparse": SPARSE}
    for provider, rows in costs.groupby("provider", sort=False):
        colour = sides["dense" if Provider.parse(provider).backend == "dense" else "sparse"]
        once = rows.drop_duplicates("gpus")
        left.plot(once["gpus"], once["compute"], color=colour, marker="o", markersize=3)
        few = rows[rows["gpus"] == rows["gpus"].min()]
        for shards, (_, line) in _SENDING.items():
            some = pd.concat([few, rows[rows["shards"] == shards]]).drop_duplicates("gpus")
            right.plot(some["gpus"], some["hours"], color=colour, linestyle=line, linewidth=1.4)
            if shards == "a node":
                ends = some["hours"], some["hours_apart"]
                right.fill_between(some["gpus"], *ends, color=colour, alpha=0.15, linewidth=0)
    first = costs[costs["provider"] == costs["provider"].iloc[0]]
    few = first[first["gpus"] == first["gpus"].min()]
    for shards, (colour, line) in _SENDING.items():
        some = pd.concat([few, first[first["shards"] == shards]]).drop_duplicates("gpus")
        left.plot(some["gpus"], some["send"], color=colour, linestyle=line)
    for ax, label in ((left, "time of a step (ms)"), (right, "time of the training (hours)")):
        ax.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=label)
        numbers = sorted(set(costs["gpus"]))
        ax.set_xticks(numbers, map(str, numbers))
        ax.minorticks_off()
        plain(ax.yaxis)
    entries = {f"{side}, computing": _key(colour) for side, colour in sides.items()}
    entries |= {
        f"sending, sharded over {shards}": _key(colour, linestyle=line)
        for shards, (colour, line) in _SENDING.items()
    }
    _legend(figure, "lower center", entries, ncols=4)
    _caption(
        figure,
        about,
        "Computed, not measured: one measured step of one GPU, and sending by formula.",
        "Right: lines are full overlap of computing and sending, bands reach to none, for sharding",
        "over a node; dotted lines are sharded over all GPUs.",
    )
    return figure
