"""Figures of training: sweeps (Figs 2, 3, 9), choices (Fig. 8), sizes (section 4.2), ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from study import analysis
from study.plots.base import (
    ACTIVE_FLOOR,
    AUTO,
    COLUMN,
    DENSE,
    GREEN,
    OURS,
    PAGE,
    PAPER,
    PURPLE,
    RED,
    SPARSE,
    _caption,
    _end_labels,
    _figure,
    _instead,
    _key,
    _legend,
    _level_colours,
    _named,
    _note,
    _one,
    _panel,
    _range,
    _sentence,
    plain,
)

STATUS_MARKERS = {"alive": "o", "unused": "s", "dead layer": "X"}
# Text above lines.
_ON_WHITE = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}, "zorder": 4}
_PRICE = {"color": "0.5", "linestyle": "--", "linewidth": 0.8}  # the price that the paper accepts


# --- sweeps (Figs 2, 3, 9) ----------------------------------------------------------------------


def _signed(percent: float) -> str:
    return f"{percent:+.1f}%".replace("-", "−")


def _level_lines(ax: Axes, curves: pd.DataFrame, window: int = 1) -> None:
    """One line a run, coloured by its L1 coefficient; the running mean over `window` points."""
    colours = _level_colours(curves["l1_coefficient"])
    for (l1, _), curve in curves.groupby(["l1_coefficient", "run"]):
        smooth = curve["value"].rolling(window, min_periods=1).mean()
        ax.plot(curve["tokens"] / 1e6, smooth, color=colours[l1])
    _of_training(ax)


def _of_training(ax: Axes, steps: int = 6) -> None:
    """Name the horizontal axis, with few numbers, which are long for a small run."""
    ax.set_xlabel("training tokens (millions)")
    ax.xaxis.set_major_locator(MaxNLocator(steps))


def _name_levels(ax: Axes, curves: pd.DataFrame, window: int = 1) -> None:
    """Write the level of L1 at the end of each line; of a level with several runs at the first."""
    colours, ends = _level_colours(curves["l1_coefficient"]), []
    for l1, some in curves.groupby("l1_coefficient"):
        first = some[some["run"] == some["run"].iloc[0]]
        ends.append((first["value"].tail(window).mean(), analysis.level_name(l1), colours[l1]))
    ax.set_xlim(right=curves["tokens"].max() / 1e6)
    _end_labels(ax, "L1", ends)


def _over_lowest(curves: pd.DataFrame) -> tuple[float, pd.DataFrame]:
    """The lowest level, and curves less the first run at it, interpolated between its steps."""
    lowest = curves["l1_coefficient"].min()
    at_lowest = curves[curves["l1_coefficient"] == lowest]
    base = at_lowest[at_lowest["run"] == at_lowest["run"].iloc[0]].sort_values("tokens")
    there = np.interp(curves["tokens"], base["tokens"], base["value"])
    return lowest, curves.assign(value=curves["value"] - there)


def _number(runs: pd.Series) -> str:
    return f"{_range(runs)} run{'s' if runs.max() > 1 else ''}"


def _runs_a_level(table: pd.DataFrame) -> str:
    number = _number(table.groupby("l1_coefficient")["run"].nunique())
    return f"{number} a level.".replace("1 run ", "One run ")


def fig02_training_curves(curves: pd.DataFrame, about: str = "") -> Figure:
    """Draw cross-entropy over training for each L1, and its difference from the lowest L1.

    curves: `analysis.training_curves` of cross_entropy; smoothed over 5% of the points. about: the
    model, above the panels.
    """
    figure, ((left, right),) = _figure(PAGE, 2.7, 1, 2)
    window = max(1, curves.groupby("run").size().max() // 20)
    lowest, over = _over_lowest(curves)
    for ax, lines in ((left, curves), (right, over)):
        _level_lines(ax, lines, window)
    _name_levels(right, over, window)  # at the left they end too near to each other
    left.set_ylabel("training cross-entropy (nats)")
    right.set_ylabel(f"cross-entropy minus L1 = {analysis.level_name(lowest)} (nats)")
    _caption(figure, _sentence(about), _runs_a_level(curves), "Running means over 5% of a run.")
    return figure


_STATUS_NAMES = {"alive": "alive", "unused": "feed-forward unused", "dead layer": "dead layer"}


def _status_keys(statuses: Iterable[str]) -> dict[str, Artist]:
    """Marks of the legend, unless all levels are alive."""
    shown = [status for status in _STATUS_NAMES if status in set(statuses)]
    if shown == ["alive"]:
        return {}
    look = {"linestyle": "", "markersize": 5}
    return {_STATUS_NAMES[one]: _key("0.55", marker=STATUS_MARKERS[one], **look) for one in shown}


def fig03_frontier(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw cross-entropy, its price in % of L1 = 0, and active neurons for each L1.

    table: `analysis.sweep`. Each mark is a run, lines join the means of a level. Levels at which a
    layer is dead or the feed-forward layers are unused have a mark of their own. about: the model.
    """
    figure, axes = _figure(COLUMN, 4.0, 2, 1, sharex=True)
    top, bottom = axes[:, 0]
    levels = sorted(table["l1_coefficient"].unique())
    colours = _level_colours(levels)
    table = table.assign(level=table["l1_coefficient"].map(levels.index))
    means = table.groupby("level")[["cross_entropy", "cross_entropy_change", "active"]].mean()
    for ax, column in ((top, "cross_entropy"), (bottom, "active")):
        ax.plot(means[column].clip(lower=ACTIVE_FLOOR), color="0.7", linewidth=1)
        for status, rows in table.groupby("status"):
            colour = [colours[l1] for l1 in rows["l1_coefficient"]]
            look = {"marker": STATUS_MARKERS[status], "linewidth": 0.4, "edgecolor": "white"}
            heights = rows[column].clip(lower=ACTIVE_FLOOR)
            ax.scatter(rows["level"], heights, 26, colour, zorder=3, **look)
        ax.margins(0.09, 0.2)
    # Notes stand where the line does not go.
    lowest, losses = table.groupby("level")["cross_entropy"].min(), means["cross_entropy"]
    for level, price in means.loc[means.index > 0, "cross_entropy_change"].dropna().items():
        rises = level - 1 in losses.index and losses[level - 1] < losses[level]
        look = {"ha": "left" if rises else "center"} | _ON_WHITE
        _note(top, _signed(price), (level, lowest[level]), (3 * rises, -12), **look)
    for level, active in means["active"].items():
        place = level, max(active, ACTIVE_FLOOR)
        _note(bottom, f"{active:.3g}", place, (4, 4), ha="left", **_ON_WHITE)
    top.set_ylabel("cross-entropy (nats)")
    bottom.set(yscale="log", ylabel="active neurons per token", xlabel="L1 coefficient")
    bottom.set_xticks(range(len(levels)), [analysis.level_name(l1) for l1 in levels], fontsize=6.5)
    plain(bottom.yaxis)
    if entries := _status_keys(table["status"]):
        _legend(figure, "upper center", entries, ncols=3, columnspacing=1, handletextpad=0)
    runs = f"Each mark is a run, {_number(table.groupby('level').size())} a level"
    change = "The percentages are changes of cross-entropy from L1 = 0."
    _caption(figure, _sentence(about), f"{runs}; the line joins means of a level.", change)
    return figure


_SEED_BARS = (
    "Bars are ± one standard deviation of seeds; no bars: one run, or bars within the mark."
)


def _seed_bars(ax: Axes, rows: pd.DataFrame, x, y, xerr, yerr, **look) -> None:
    """Bars of the deviation over seeds, where there are several."""
    seeds = rows["runs"] > 1
    look = {"fmt": "none", "elinewidth": 1} | look
    ax.errorbar(x[seeds], y[seeds], xerr=xerr[seeds], yerr=yerr[seeds], **look)


_BUDGETS = ["-", "--", ":", "-."]  # of the lines of `frontier`


def frontier(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw cross-entropy by share of active neurons, a line for each number of training tokens.

    table: `analysis.levels` of one or more sweeps. Bars are the standard deviation over seeds,
    light lines the price that the paper accepts (analysis.MAX_PRICE above L1 = 0), the dotted one
    95% inactive neurons. Levels at which a layer is dead or the feed-forward layers are
    unused have a mark of their own and are not joined. about: the model.
    """
    figure, ax = _panel(0.66 * PAGE, 2.9)
    colours = _level_colours(table["l1_coefficient"])
    budgets = sorted(table["tokens"].unique())
    entries = {}
    for tokens, dash in zip(budgets, _BUDGETS, strict=False):
        rows = table[table["tokens"] == tokens].sort_values("active")
        share, loss = 100 * rows["active_fraction"].clip(lower=1e-6), rows["cross_entropy"]
        alive = rows["status"] == "alive"
        (line,) = ax.plot(share[alive], loss[alive], color="0.45", linestyle=dash, linewidth=1)
        entries[f"{tokens / 1e6:.3g} M training tokens"] = line
        neurons = (rows["active"] / rows["active_fraction"]).max()
        aside = 100 * rows["active_std"] / neurons
        _seed_bars(ax, rows, share, loss, aside, rows["cross_entropy_std"], ecolor="0.2")
        for status, some in rows.groupby("status"):
            shades = [colours[l1] for l1 in some["l1_coefficient"]]
            look = {"color": shades, "marker": STATUS_MARKERS[status], "s": 10, "zorder": 3}
            ax.scatter(share[some.index], some["cross_entropy"], **look)
        dense = loss[rows["l1_coefficient"] == 0]
        if len(dense):
            price = (1 + analysis.MAX_PRICE / 100) * dense.item()
            ax.axhline(price, **_PRICE | {"linestyle": dash, "color": "0.75"})
    few = ax.axvline(5, color="0.5", linestyle=":", linewidth=1)
    ax.set(xscale="log", xlabel="active neurons per token (% of all)")
    ax.set_ylabel("cross-entropy (nats)")
    ax.margins(0.1, 0.15)
    plain(ax.xaxis)
    dots = {"marker": "o", "markersize": 4, "linestyle": ""}
    levels = {analysis.level_name(l1): _key(colour, **dots) for l1, colour in colours.items()}
    _legend(figure, "right center", levels, title="L1", handletextpad=0.1)
    entries |= {
        f"{analysis.MAX_PRICE:g}% above L1 = 0": _key(
            **_PRICE | {"linestyle": "-", "color": "0.75"}
        )
    }
    entries |= {"95% inactive": few}
    _legend(figure, "lower center", entries | _status_keys(table["status"]), ncols=2)
    _caption(figure, _sentence(about), _SEED_BARS)
    return figure


def _over_training(axes: np.ndarray, dead: pd.DataFrame):
    """Finish two panels over training: active neurons, and dead ones, if a window was filled."""
    left, right = axes[0]
    left.set(yscale="log", ylabel="active neurons per token")
    plain(left.yaxis)
    low, high = left.get_ylim()
    if high < 200 * low:
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    right.set_ylabel("dead neurons (%)")
    right.set_xlim(left.get_xlim())
    if dead.empty:
        _instead(right, "no window was filled")


def _dead_sentence(window_tokens: int) -> str:
    return f"A dead neuron was silent for {window_tokens:,} tokens."


def fig09_activity_over_training(
    active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int, about: str = ""
) -> Figure:
    """Draw active neurons and the dead fraction over training for each L1 level.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction; window_tokens: for
    how many tokens a neuron that counts as dead was silent; about: the model.
    """
    figure, axes = _figure(PAGE, 2.7, 1, 2)
    active = active.assign(value=active["value"].clip(lower=ACTIVE_FLOOR))
    dead = dead.assign(value=100 * dead["value"])
    _level_lines(axes[0, 0], active)
    if len(dead):
        _level_lines(axes[0, 1], dead)
    _over_training(axes, dead)
    _name_levels(axes[0, 0], active)
    if len(dead):
        _name_levels(axes[0, 1], dead)
    _caption(figure, _sentence(about), _runs_a_level(active), _dead_sentence(window_tokens))
    return figure


# --- choices of training and sizes (Fig. 8, section 4.2), ways to compute -----------------------

# Of `analysis.choice`: colour, mark and dash. No path of the layer stands beside them.
CHOICES = {
    "recipe": (OURS, "o", "-"),
    "re-initialisation": (GREEN, "s", "--"),
    "L1 warm-up": (PURPLE, "^", "-."),
    "balanced columns": (RED, "D", ":"),
}


def _by_choice(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, tuple]]:
    """The choices that a table has: name, rows and look."""
    for name, look in CHOICES.items():
        rows = table[table["choice"] == name]
        if len(rows):
            yield name, rows, look


def fig08_remedies(
    active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int, about: str = ""
) -> Figure:
    """Draw active and dead neurons over training for each remedy: means, and bands of all seeds.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction, of one level of L1;
    window_tokens: for how many tokens a neuron that counts as dead was silent; about: the model.
    Raises ValueError for several levels.
    """
    (level,) = _one(active, ["l1_coefficient"], "level of L1")
    figure, axes = _figure(PAGE, 2.8, 1, 2)
    for ax, curves, unit in zip(axes.flat, (active, dead), (1, 100), strict=True):
        for name, rows, (colour, _, dash) in _by_choice(curves):
            values = (unit * rows["value"]).groupby(rows["tokens"]).agg(["mean", "min", "max"])
            values = values.clip(lower=ACTIVE_FLOOR) if unit == 1 else values
            seeds, tokens = rows["run"].nunique(), values.index / 1e6
            number = f"{seeds} seeds" if seeds > 1 else "one run"
            ax.plot(tokens, values["mean"], dash, color=colour, label=f"{name}, {number}")
            if seeds > 1:
                look = {"color": colour, "alpha": 0.25, "linewidth": 0}
                ax.fill_between(tokens, values["min"], values["max"], **look)
        _of_training(ax)
    _over_training(axes, dead)
    _legend(figure, "lower center", ncols=len(_named(axes[0, 0])))
    about = ", ".join(part for part in (about, f"L1 = {analysis.level_name(level)}") if part)
    bands = "Lines are means, bands reach from the lowest to the highest seed."
    _caption(figure, _sentence(about), bands, _dead_sentence(window_tokens))
    return figure


def choices_frontier(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw the price and the dead neurons of each choice against its share of active neurons.

    table: `analysis.levels` of `analysis.choices`; drawn are the CHOICES, at levels that are alive,
    joined where there are several. Bars are the standard deviation over seeds. The dashed line is
    the price that the paper accepts. about: the model.
    """
    figure, ((left, right),) = _figure(PAGE, 3.1, 1, 2)
    table = table[table["status"] == "alive"].sort_values("active_fraction")
    panels = (left, "cross_entropy_change", 1), (right, "dead_fraction_train", 100)
    for ax, column, unit in panels:
        for name, rows, (colour, marker, dash) in _by_choice(table):
            share, height = 100 * rows["active_fraction"], unit * rows[column]
            look = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1}
            label = f"{name} ({_number(rows['runs'])})"
            ax.plot(share, height, dash, label=label, **look)
            errors = 100 * rows["active_fraction_std"], unit * rows[f"{column}_std"]
            _seed_bars(ax, rows, share, height, *errors, ecolor=colour)
            if name == "recipe" and ax is right:  # where the line falls, and nothing is above it
                names = [analysis.level_name(l1) for l1 in rows["l1_coefficient"]]
                for x, y, text in zip(share, height, names, strict=True):
                    last = x == share.max() and len(share) > 1
                    place = {"ha": "right", "va": "top"} if last else {}
                    _note(
                        ax,
                        f"L1 = {text}" if last else text,
                        (x, y),
                        (3, -5 if last else 3),
                        **place,
                    )
        ax.set(xscale="log", xlabel="active neurons per token (% of all)")
        ax.margins(0.1, 0.12)
        plain(ax.xaxis)
    price = left.axhline(analysis.MAX_PRICE, **_PRICE)
    left.set_ylabel("cross-entropy (% over L1 = 0)")
    right.set_ylabel("dead neurons (%)")
    entries = _named(left) | {f"{analysis.MAX_PRICE:g}% above L1 = 0": price}
    _legend(figure, "lower center", entries, ncols=3)
    names = "Numbers at the right are the recipe's levels of L1."
    _caption(figure, _sentence(about), _SEED_BARS, names)
    return figure


def scale_activity(
    table: pd.DataFrame, paper: pd.DataFrame, noise: dict[str, float], about: str = ""
) -> Figure:
    """Draw active neurons and the gap to the dense model by size, ours and the paper's.

    table, paper: `analysis.sizes` and `analysis.paper_sizes`; noise: the deviation of
    `analysis.seed_noise` for active_fraction and cross_entropy_change; the standard errors that it
    gives are drawn as bars. about: a further sentence of the caption.
    """
    figure, axes = _figure(PAGE, 2.9, 1, 2, sharex=True)
    left, right = axes[0]
    entries, bars_of = {}, ""
    for whose, rows, colour, marker in (("ours", table, OURS, "o"), ("paper", paper, PAPER, "s")):
        level = analysis.level_name(rows["l1_coefficient"].iloc[0])
        rows = rows.sort_values("parameters").assign(share=100 * rows["active_fraction"])
        for ax, column in ((left, "share"), (right, "change")):
            known = rows.dropna(subset=column)
            size, height = known["parameters"] / 1e6, known[column]
            look = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1}
            (line,) = ax.plot(size, height, linestyle=":", **look)
            entries.setdefault(f"{whose}, L1 = {level}{_sizes_name(rows)}", line)
            bar = _standard_errors(known, column, noise) if whose == "ours" else np.array(np.nan)
            if np.isfinite(bar).all():
                ax.errorbar(size, height, bar, fmt="none", ecolor=colour, elinewidth=1)
                bars_of = "Bars are ± one standard error by the noise of seeds at one size."
            if ax is left:
                for x, y in zip(size, height, strict=True):
                    _note(ax, f"{y:.2f}%", (x, y), (4, 4), color=colour)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="parameters (millions)")
        ax.margins(0.12)
        plain(ax.xaxis)
    left.set(yscale="log", ylabel="active neurons per token (% of all)")
    plain(left.yaxis)
    name = f"{analysis.MAX_PRICE:g}%, the rise that the paper accepts"
    entries[name] = right.axhline(analysis.MAX_PRICE, **_PRICE)
    low, high = right.get_ylim()
    right.set_ylabel("cross-entropy (% over L1 = 0)")
    right.set_ylim(min(low, 0), max(high, 1.15 * analysis.MAX_PRICE))
    _legend(figure, "lower center", entries, ncols=2)
    _caption(figure, "The percentages at the left are shares of active neurons.", bars_of, about)
    return figure


def _standard_errors(rows: pd.DataFrame, column: str, noise: dict[str, float]) -> pd.Series:
    """Of a mean share of active neurons, whose logarithm scatters, or of a change of the loss."""
    if column == "share":
        return rows[column] * noise["active_fraction"] / np.sqrt(rows["runs"])
    return noise["cross_entropy_change"] * np.sqrt(1 / rows["runs"] + 1 / rows["dense_runs"])


def _sizes_name(rows: pd.DataFrame) -> str:
    """The neurons of a layer if all sizes have as many, and the runs if each size has one."""
    widths = rows["intermediate_size"].unique()
    single = "runs" in rows and (rows["runs"] == 1).all()
    width = f", {widths[0]:,} neurons a layer" if len(widths) == 1 else ""
    return width + (", one run a size" if single else "")


# How a training was computed: colour by backend, dashes of further runs by the same.
BACKENDS = {"dense": DENSE, "triton": SPARSE, "auto": AUTO}
_AGAIN = ["-", (0, (3, 1.5)), (0, (1, 1)), "-.", (0, (5, 1, 1, 1, 1, 1))]


def computed_otherwise(table: pd.DataFrame, curves: pd.DataFrame, about: str = "") -> Figure:
    """Draw a training that was computed in several ways: cross-entropy, speed and peak memory.

    table, curves: `analysis.computed_otherwise` and `analysis.computed_curves` of the same runs.
    Cross-entropy is drawn as the difference from the first run, at each logged step and as running
    mean over 5% of the steps. Where no memory was logged, the third panel says so. about: the
    model. Raises ValueError for more runs than there are dashes.
    """
    if len(table) > len(_AGAIN):
        raise ValueError(f"this figure shows up to {len(_AGAIN)} runs; this table has {len(table)}")
    figure, axes = _figure(PAGE, 2.7, 1, 3)
    again = table.groupby("backend").cumcount()
    looks = {
        run: {"color": BACKENDS.get(backend, GREEN), "linestyle": _AGAIN[number], "label": label}
        for run, backend, number, label in zip(
            table["run"], table["backend"], again, _ways(table), strict=True
        )
    }
    panels = {
        "tokens_per_second": ("speed (thousand tokens/s)", 1e-3),
        "peak_memory": ("peak memory of a GPU (GB)", 1e-9),
    }
    window = _differences(axes[0, 0], table, curves, looks)
    for ax, (metric, (label, factor)) in zip(axes[0, 1:], panels.items(), strict=True):
        _of_training(ax, 3)
        ax.set_ylabel(label)
        some = curves[curves["metric"] == metric].sort_values("step")
        if some.empty:
            _instead(ax, "not logged")
            continue
        for run, look in looks.items():
            curve = some[some["run"] == run]
            ax.plot(curve["tokens"] / 1e6, factor * curve["value"], **look | {"linewidth": 1})
        ax.set_ylim(bottom=0)
    for ax in axes[0, 1:]:
        ax.set_xlim(axes[0, 0].get_xlim())
    _legend(figure, "lower center", ncols=2)
    means = "Left, thin lines are logged steps, strong ones running means over 5% of them."
    _caption(figure, _sentence(about), "One run each.", means if window > 1 else "")
    return figure


def _ways(table: pd.DataFrame) -> list[str]:
    """Names of the runs, with their cross-entropy at the end."""
    ends = [f": {loss:.3f} nats at the end" for loss in table["cross_entropy"]]
    known = table["cross_entropy"].notna()
    return [way + end * ok for way, end, ok in zip(table["way"], ends, known, strict=True)]


def _differences(ax: Axes, table: pd.DataFrame, curves: pd.DataFrame, looks: dict) -> int:
    """Training cross-entropy of each run minus that of the first, and its running mean.

    A row is a mean over the steps since the last one: only rows of the same steps are compared.
    Returns over how many rows the running mean is.
    """
    losses = curves[curves["metric"] == "cross_entropy"].sort_values(["run", "tokens"])
    losses = losses.assign(since=losses.groupby("run")["tokens"].shift(fill_value=0))
    losses = losses.pivot(index=["since", "tokens"], columns="run", values="value")
    window = max(1, len(losses) // 20)
    for run, look in looks.items():
        over = (losses[run] - losses[table["run"].iloc[0]]).dropna()
        tokens = over.index.get_level_values("tokens") / 1e6
        if window > 1:
            ax.plot(tokens, over, color=look["color"], alpha=0.25, linewidth=0.6)
        ax.plot(tokens, over.rolling(window, min_periods=1).mean(), **look | {"linewidth": 1.2})
    _of_training(ax, 3)
    ax.set_ylabel(f"cross-entropy minus that of\n{table['way'].iloc[0]} (nats)")
    return window
