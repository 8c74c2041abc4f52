"""Figures of pretrained models that became sparse, and of the speed that their activity allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from study import analysis
from study.plots.base import (
    DECODE,
    GATE,
    HYBRID,
    PAGE,
    ROWWISE,
    SPARSE,
    UP,
    _apart,
    _bars,
    _caption,
    _figure,
    _instead,
    _key,
    _legend,
    _note,
    _panel,
    _range,
    _sentence,
    _width,
    plain,
)

_LAYERS = [(SPARSE, "o"), (DECODE, "s"), (ROWWISE, "D"), (HYBRID, "^"), (GATE, "v"), (UP, "P")]
_LAYERS += [("0.45", "X"), ("black", "*")]  # colour and marker of measured layers
_SHARE, _POINTS = "active neurons (%)", "accuracy difference (points)"
_DASHES = [
    "-",
    "--",
    ":",
    "-.",
    (0, (5, 1)),
    (0, (1, 1)),
    (0, (8, 2)),
    (0, (3, 1, 1, 1)),
    (0, (2, 3)),
]
_KINDS = list(zip("os^DvPX<>", _DASHES, strict=True))
_WAYS = {"L1": "L1 alone", "both": "L1 and a fixed threshold", "steered": "A steered threshold"}
_REFERENCES = {
    analysis.ORIGINAL: "student − original",
    analysis.WITHOUT_L1: "student − ReLU alone on as many tokens",
}


def _looks(table: pd.DataFrame, sized: bool = True) -> dict[str, dict]:
    """Look of each run, by its name; ReLU alone first, then from the largest wanted share down.

    The colour is that of the wanted share: black without L1, then from dark to light the sparser.
    Marker and dashes tell apart what makes it sparse; sized: both grow with the tokens where these
    differ.
    """
    shares = sorted(set(table["wanted"]) - {0}, reverse=True)
    places = np.linspace(0.15, 0.85, len(shares)) if len(shares) > 1 else [0.15] * len(shares)
    colours = {0: "black"} | dict(zip(shares, map(mpl.colormaps["viridis"], places), strict=True))
    kinds = dict(zip(sorted(set(table["by"])), cycle(_KINDS), strict=False))
    budgets = sorted(set(table["tokens"]))
    ends = (-1, 1) if sized and len(budgets) > 1 else (0, 0)
    sizes = dict(zip(budgets, np.linspace(*ends, len(budgets)), strict=True))
    looks, order = {}, {share: place for place, share in enumerate([0, *shares])}
    table = table.assign(order=table["wanted"].map(order))
    for row in table.sort_values(["order", "by", "tokens"]).to_dict("records"):
        marker, dashes = kinds[row["by"]]
        size = float(sizes[row["tokens"]])
        look = {"color": colours[row["wanted"]], "marker": marker, "linestyle": dashes}
        looks[row["name"]] = look | {"linewidth": 1.2 + 0.5 * size, "markersize": 5 + 1.5 * size}
    return looks


def _way(by: str) -> str:
    """Which of _WAYS makes a run's neurons inactive."""
    if by.startswith("threshold"):
        return "steered"
    return "both" if "threshold" in by else "L1"


def _ncols(names: Sequence[str]) -> int:
    """The most columns, up to four, in which the names fit below a figure, with their lines."""
    widths = np.array([_width(name, 7.5) + 30 for name in names])  # 30: line and gaps, in points
    for columns in (4, 3, 2):
        parts = np.array_split(widths, columns)
        if sum(part.max(initial=0) for part in parts) + 15 * (columns - 1) < 0.95 * 72 * PAGE:
            return columns
    return 1


def _panels(height: float, names: Sequence[str], **options) -> tuple[Figure, Axes, Axes]:
    """A figure with two panels, which the rows of its legend leave as high as two rows would."""
    rows = -(-len(names) // _ncols(names))
    figure, ((left, right),) = _figure(PAGE, height + 0.16 * max(rows - 2, 0), 1, 2, **options)
    return figure, left, right


def _end(figure: Figure, looks: dict[str, dict], *sentences: str) -> None:
    """The legend and the caption of a figure of runs."""
    entries = {name: _key(**look) for name, look in looks.items()}
    title = "wanted share of active neurons"
    options = {"ncols": _ncols([*looks]), "title": title, "handlelength": 2.6}
    _legend(figure, "lower center", entries, **options)
    _caption(figure, *sentences)


def _budgets(table: pd.DataFrame) -> str:
    """Which tokens the runs saw whose names do not say so."""
    named = f"{_usual(table) / 1e6:,.3g} M training tokens where no others are named."
    return named if table["tokens"].nunique() > 1 else ""


def _usual(table: pd.DataFrame) -> float:
    """The most frequent number of tokens."""
    return table["tokens"].mode().iloc[0]


def relufied_course(course: pd.DataFrame, table: pd.DataFrame, about: str = "") -> Figure:
    """Draw KL divergence from the teacher and activity over training, a line a run.

    course, table: `analysis.relufied_course` and `analysis.relufied_runs`. about: the model. A row
    of panels for each way to make neurons inactive, with ReLU alone in each. Runs on different
    numbers of tokens are drawn over the share of their training. All is of training text, of which
    long runs may read some again.
    """
    looks = {name: look | {"marker": ""} for name, look in _looks(table).items()}
    way_of = table["by"].map(_way)
    ways = [way for way in _WAYS if way in set(way_of[table["wanted"] > 0])] or ["L1"]
    rows_of_legend = -(-len(looks) // _ncols([*looks]))
    height = 1.5 * len(ways) + 0.16 * rows_of_legend + 1.4
    figure, axes = _figure(PAGE, height, len(ways), 2, sharex=True, sharey="col")
    last = course.groupby("name")["tokens"].max()
    alike = last.nunique() == 1
    for (left, right), way in zip(axes, ways, strict=True):
        for name in table.loc[(way_of == way) | (table["wanted"] == 0), "name"]:
            line = course[course["name"] == name].sort_values("tokens")
            x = line["tokens"] / (1e6 if alike else last[name] / 100)
            left.plot(x, line["kl"], **looks[name])
            right.plot(x, 100 * line["active_fraction"], **looks[name])
        if len(ways) > 1:
            left.set_title(_WAYS[way], loc="left")
        left.set_ylabel("KL divergence (nats)")
        right.set_ylabel(_SHARE)
        for ax in (left, right):
            ax.set_yscale("log")
            plain(ax.yaxis)
    for ax in axes[-1]:
        ax.set_xlabel("training tokens (millions)" if alike else "share of the training (%)")
        ax.xaxis.set_major_locator(MaxNLocator(5))
    _end(figure, looks, _sentence(about), "One run each, on training text.", _budgets(table))
    return figure


def relufied_price(table: pd.DataFrame, layers: pd.DataFrame, about: str = "") -> Figure:
    """Draw what activity costs, two marks a run, and the activity of each layer, a line a run.

    table, layers: `analysis.relufied_runs` and `analysis.relufied_layers`. about: the model. Layers
    are of the runs on the most frequent number of tokens.
    """
    looks = _looks(table)
    figure, left, right = _panels(2.6, [*looks])
    for row in table.to_dict("records"):
        look = looks[row["name"]] | {"linestyle": "", "zorder": 3}
        left.plot(100 * row["active_fraction"], row["kl"], **look)
        # Smaller: where it lies on the other mark, both show.
        look |= {"markerfacecolor": "white", "markersize": 0.75 * look["markersize"]}
        left.plot(100 * row["active_fraction"], row["rise"], **look)
    left.set(xlabel=_SHARE, xscale="log", ylabel="nats")
    # Room for the legend.
    left.set_ylim(min(0, 1.1 * table["rise"].min()), 1.3 * table[["kl", "rise"]].max(axis=None))
    plain(left.xaxis)
    look = {"linestyle": "", "marker": "o", "markersize": 5}
    hollow = look | {"markerfacecolor": "white", "markersize": 3.75}
    left.legend(
        [_key("0.4", **look), _key("0.4", **hollow)],
        ["KL divergence from the original", "cross-entropy over the original's"],
    )
    for name in table.loc[table["tokens"] == _usual(table), "name"]:
        line, size = layers[layers["name"] == name], looks[name]["markersize"] / 2
        shares = 100 * line["active_fraction"]
        right.plot(line["layer"], shares, **looks[name] | {"markersize": size})
    right.set(xlabel="layer", yscale="log", ylabel=_SHARE)
    right.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    plain(right.yaxis)
    some = f"Right: runs on {_usual(table) / 1e6:,.3g} M tokens."
    some = some if table["tokens"].nunique() > 1 else ""
    sentences = _sentence(about), "One run each, on held-out text.", some
    _end(figure, looks, *sentences, _budgets(table))
    return figure


def _side_by_side(shares: pd.Series) -> pd.Series:
    """The shares, of which nearly equal ones are moved apart as they are seen on a log axis."""
    low, high = np.log(shares.min()), np.log(shares.max())
    if low == high:
        return shares
    places = _apart(((np.log(shares) - low) / (high - low)).to_numpy(), 0.025)
    return pd.Series(np.exp(low + places * (high - low)), shares.index)


def relufied_tasks(pairs: pd.DataFrame, table: pd.DataFrame, about: str = "") -> Figure:
    """Draw how much more accurate runs are than the original, and than ReLU alone, by activity.

    pairs, table: `analysis.relufied_pairs` and `analysis.relufied_runs`. about: the model. A mark a
    run, the mean over tasks.
    """
    answered = table[table["run"].isin(pairs["run"])]
    looks = {name: look | {"linestyle": ""} for name, look in _looks(table).items()}
    looks = {name: look for name, look in looks.items() if name in set(answered["name"])}
    figure, *axes = _panels(2.8, [*looks], sharex=True, sharey=True)
    shares = 100 * answered.set_index("name")["active_fraction"].clip(lower=1e-5)  # a log axis
    shares = _side_by_side(shares)
    means = pairs[pairs["task"] == "mean"]
    for ax, (reference, title) in zip(axes, _REFERENCES.items(), strict=True):
        beside = means[means["reference"] == reference]
        if beside.empty:
            _instead(ax, "no answers to compare with")
        for row in beside.to_dict("records"):
            look, x = looks[row["name"]], [shares[row["name"]]]
            middle, low, high = ([100 * row[end]] for end in ("difference", "low", "high"))
            ax.plot(x, middle, **look)
            _bars(ax, x, middle, low, high, look["color"])
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(title=title, xlabel=_SHARE, xscale="log")
    plain(axes[0].xaxis)
    axes[0].set_ylabel(_POINTS)
    tasks = _range(pairs.groupby(["run", "reference"]).size() - 1)
    what = f"Mean accuracy of {tasks} tasks, {_range(means['items'])} items in all."
    bars = "Bars are 95% intervals over the items (paired bootstrap), not over seeds."
    apart = "Marks of nearly the same activity stand side by side."
    sentences = _sentence(about), "One run each.", what, bars, apart
    _end(figure, looks, *sentences, _budgets(table))
    return figure


def relufied_tokens(budgets: pd.DataFrame, table: pd.DataFrame, about: str = "") -> Figure:
    """Draw KL divergence and the accuracy of tasks over training tokens, a line a level.

    budgets, table: `analysis.relufied_budgets` and `analysis.relufied_runs`. about: the model.
    Without answers the second panel is empty and says so.
    """
    looks = _looks(table, sized=False)
    levels = budgets.drop_duplicates("level").set_index("level")["name"]
    looks = {level: looks[name] for level, name in levels.items()}
    if budgets.drop_duplicates("level")["wanted"].duplicated().any():  # a share is no name
        shades = mpl.colormaps["viridis"](np.linspace(0.15, 0.7, len(looks)))
        for look, shade in zip(looks.values(), shades, strict=True):
            look["color"] = tuple(shade)
    figure, left, right = _panels(2.6, [*looks], sharex=True)
    for place, (level, look) in enumerate(looks.items()):
        line = budgets[budgets["level"] == level]
        millions = line["tokens"] / 1e6 * 1.04 ** (place - (len(looks) - 1) / 2)  # side by side
        middle, low, high = (100 * line[end] for end in ("difference", "low", "high"))
        for ax, values in ((left, line["kl"]), (right, middle)):
            means = values.groupby(millions).mean().dropna()
            ax.plot(means.index, means, **look | {"marker": ""})
            ax.plot(millions, values, **look | {"linestyle": ""})
        shares = 100 * line["active_fraction"]
        if shares.max() > (1 + analysis.ALIKE) * shares.min():
            for n, (x, kl) in enumerate(zip(millions, line["kl"], strict=True)):
                offset = (0, 6) if n else (-3, -13)  # other lines fall from above the first mark
                text = f"{shares.iloc[n]:.2g}%"
                _note(left, text, (x, kl), offset, ha="center", color=look["color"])
        _bars(right, millions, middle, low, high, look["color"])
    left.set(xlabel="training tokens (millions)", xscale="log")
    right.set(xlabel="training tokens (millions)", ylabel=_POINTS)
    left.set_ylabel("KL divergence (nats)")
    plain(left.xaxis)
    shares = "Left: numbers are active neurons, where these change."
    bars = "Right: student − original, mean over tasks; bars are 95% intervals over the items."
    if budgets["difference"].isna().all():
        _instead(right, "no answers are recorded")
        bars = ""
    left.set_ylim(0, 1.2 * budgets["kl"].max())
    left.margins(x=0.12)
    apart = "Marks of as many tokens stand side by side." if len(looks) > 1 else ""
    alike = budgets.duplicated(["level", "tokens"]).any()
    runs = "A mark a run; lines join means of runs that are alike." if alike else "One run each."
    _end(figure, looks, _sentence(about), runs, shares, bars, apart)
    return figure


def relufied_frontier(
    pairs: pd.DataFrame, table: pd.DataFrame, frontier: dict[str, float], about: str = ""
) -> Figure:
    """Draw how much less accurate than the original students are over their divergence from it.

    pairs, table, frontier: `analysis.relufied_pairs`, `analysis.relufied_runs` and
    `analysis.relufied_frontier`. about: the model. A mark a run, of the colour of its wanted share.
    """
    figure, ax = _panel(PAGE, 2.9)
    means = pairs[(pairs["task"] == "mean") & (pairs["reference"] == analysis.ORIGINAL)]
    looks, runs = _looks(table, sized=False), table.set_index("run")
    entries: dict[str, Line2D] = {}
    order = runs["wanted"].where(runs["wanted"] > 0, 1.0).sort_values(ascending=False).index
    for run in [run for run in order if run in set(means["run"])]:
        share, colour = runs.loc[run, "wanted"], looks[runs.loc[run, "name"]]["color"]
        mark = _key(colour, marker="o", linestyle="")
        entries[f"{100 * share:g}%" if share else runs.loc[run, "level"]] = mark
        (difference,) = means.loc[means["run"] == run, "difference"]
        ax.plot(runs.loc[run, "kl"], 100 * difference, "o", color=colour, zorder=3)
    x = np.array([0.95 * min(frontier["low"], runs["kl"].min()), 1.05 * runs["kl"].max()])
    line = 100 * (frontier["intercept"] + frontier["slope"] * np.log(x))
    off = 100 * frontier["deviation"]
    ax.plot(x, line, color="0.35", linewidth=1)
    ax.fill_between(x, line - off, line + off, color="0.9", linewidth=0, zorder=0)
    lost = 100 * frontier["lost"]
    ax.plot([frontier["low"], frontier["high"]], [-lost, -lost], color="black", linewidth=3)
    ax.set(xlabel="KL divergence (nats)", xscale="log", ylabel=_POINTS)
    plain(ax.xaxis)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8)))
    _legend(figure, "right", entries, title="wanted share")
    what = f"{frontier['students']} students, mean over tasks, student − original."
    drawn = "Grey: the line of least squares and one standard deviation of the students around it."
    needed = f"Black: where it is {lost:.3g} points below, with the 95% interval over "
    needed += "items and students."
    _caption(figure, _sentence(about), what, drawn, needed)
    return figure


def gains_by_share(gains: pd.DataFrame, reached: Iterable[float] = (), device: str = "") -> Figure:
    """Draw the speed-up of measured layers by their share of active neurons.

    gains: `analysis.gains_by_share`. reached: shares of active neurons (0 to 1), drawn as lines.
    device: that of all layers whose line names no other. Of many tokens the largest measured number
    counts, of each kind of layer.
    """
    figure, axes = _figure(PAGE, 2.9, 1, 2, sharex=True, sharey=True)
    shape = ["hidden_size", "intermediate_size", "gated", "device"]
    looks = dict(zip([keys for keys, _ in gains.groupby(shape)], cycle(_LAYERS), strict=False))
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
        plain(ax.xaxis, ax.yaxis)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes[0, 0].set_ylabel("speed-up over dense")
    entries = {}
    for (k, n, gated, on), (colour, marker) in looks.items():
        gate, other = "" if gated else ", no gate", f", {on}" if on != device else ""
        entries[f"{k} x {n}{gate}{other}"] = _key(colour, marker=marker)
    _legend(figure, "lower center", entries, ncols=3)
    about = "Each point is the fastest sparse path of one measured layer, bf16, with imposed, "
    about += f"skewed activity{f', on {device} where no other is named' if device else ''}."
    drawn = "Light lines are the shares of the models above." if list(reached) else ""
    _caption(figure, about, drawn)
    return figure
