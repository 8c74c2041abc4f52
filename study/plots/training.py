"""Figures of training: sweeps (Figs 2, 3, 9), remedies (Fig. 8), sizes, tokens, races, students."""

import itertools

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from study import analysis
from study.plots import base

_ON_WHITE = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}, "zorder": 4}
_PRICE = {"color": "0.5", "linestyle": "--", "linewidth": 0.8}  # the price that the paper accepts


def _number(runs: pd.Series) -> str:
    return f"{base.number_range(runs)} run{'s' if runs.max() > 1 else ''}"


def _level_lines(ax: Axes, curves: pd.DataFrame, window: int = 1) -> None:
    """Draw a line a run, coloured by its L1; the running mean over `window` points."""
    colours = base.level_colours(curves["l1_coefficient"])
    for (l1, _), curve in curves.groupby(["l1_coefficient", "run"]):
        smooth = curve["value"].rolling(window, min_periods=1).mean()
        ax.plot(curve["tokens"] / 1e6, smooth, color=colours[l1])
    _of_training(ax)


def _of_training(ax: Axes) -> None:
    ax.set_xlabel("training tokens (millions)")
    ax.xaxis.set_major_locator(MaxNLocator(6))


def fig02_training_curves(curves: dict[str, pd.DataFrame], window: int, about: str = "") -> Figure:
    """Draw cross-entropy over training for each L1, and active and dead neurons (Figs 2, 9).

    curves: `analysis.training_curves` of cross_entropy, active_mean and dead_fraction; the first is
    smoothed over 5% of the points. window: for how many tokens a dead neuron was silent.
    """
    figure, axes = base.subplots(base.PAGE, 4.2, 2, 2)
    loss, active, dead = curves.values()
    smooth = max(1, loss.groupby("run").size().max() // 20)
    lowest = loss["l1_coefficient"].min()
    first = loss[loss["l1_coefficient"] == lowest]
    first = first[first["run"] == first["run"].iloc[0]].sort_values("tokens")
    over = loss["value"] - np.interp(loss["tokens"], first["tokens"], first["value"])
    _level_lines(axes[0, 0], loss, smooth)
    _level_lines(axes[0, 1], loss.assign(value=over), smooth)
    _level_lines(axes[1, 0], active.assign(value=active["value"].clip(lower=base.ACTIVE_FLOOR)))
    if len(dead):
        _level_lines(axes[1, 1], dead.assign(value=100 * dead["value"]))
    _over_training(*axes[1], dead)
    axes[0, 0].set_ylabel("cross-entropy (nats)")
    axes[0, 1].set_ylabel(f"nats over L1 = {analysis.level_name(lowest)}")
    for ax in axes[0]:
        ax.set_xlabel("")
    colours = base.level_colours(loss["l1_coefficient"]).items()
    keys = {f"L1 = {analysis.level_name(l1)}": Line2D([], [], color=one) for l1, one in colours}
    base.legend(figure, "lower center", keys, ncols=3)
    silent = f"A dead neuron was silent for {window:,} tokens."
    smoothed = "Cross-entropy is on the training text, as running means over 5% of a run."
    number = _number(loss.groupby("l1_coefficient")["run"].nunique())
    runs = f"{number} a level.".replace("1 run ", "One run ")
    base.caption(figure, base.sentence(about), runs, smoothed, silent)
    return figure


def fig03_frontier(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw cross-entropy, its price in % of L1 = 0, and active neurons for each L1.

    table: `analysis.sweep`. Each mark is a run, lines join the means of a level.
    """
    figure, axes = base.subplots(base.COLUMN, 4.2, 2, 1, sharex=True)
    top, bottom = axes[:, 0]
    levels = sorted(table["l1_coefficient"].unique())
    colours = base.level_colours(levels)
    table = table.assign(level=table["l1_coefficient"].map(levels.index))
    means = table.groupby("level")[["cross_entropy", "cross_entropy_change", "active"]].mean()
    for ax, column in ((top, "cross_entropy"), (bottom, "active")):
        ax.plot(means[column].clip(lower=base.ACTIVE_FLOOR), color="0.7", linewidth=1)
        heights, shades = table[column].clip(lower=base.ACTIVE_FLOOR), table["l1_coefficient"]
        look = {"linewidth": 0.4, "edgecolor": "white", "zorder": 3}
        ax.scatter(table["level"], heights, 26, shades.map(colours), **look)
        ax.margins(0.09, 0.2)
    # Notes stand where the line does not go.
    lowest, losses = table.groupby("level")["cross_entropy"].min(), means["cross_entropy"]
    for level, price in means.loc[means.index > 0, "cross_entropy_change"].dropna().items():
        rises = level - 1 in losses.index and losses[level - 1] < losses[level]
        look = {"ha": "left" if rises else "center"} | _ON_WHITE
        place = (level, lowest[level]), (3 * rises, -12)
        base.note(top, base.change(price, 1)[: None if level == 1 else -1], *place, **look)
    for level, active in means["active"].items():
        place = level, max(active, base.ACTIVE_FLOOR)
        number = f"{active:,.0f}" if active > 99 else f"{active:.3g}"
        base.note(bottom, number, place, (4, 4), ha="left", **_ON_WHITE)
    top.set_ylabel("cross-entropy (nats)")
    bottom.set(yscale="log", ylabel="active neurons per token", xlabel="L1 coefficient")
    bottom.set_xticks(range(len(levels)), [analysis.level_name(l1) for l1 in levels], rotation=45)
    base.plain(bottom.yaxis)
    runs = f"Each mark is a run, {_number(table.groupby('level').size())} a level"
    change = "Numbers above: the change of cross-entropy from L1 = 0, in %."
    joined = f"{runs}; the line joins means of a level."
    base.caption(figure, base.sentence(about), joined, change)
    return figure


def _over_training(left: Axes, right: Axes, dead: pd.DataFrame) -> None:
    """Finish two panels over training: active neurons, and dead ones, if a window was filled."""
    left.set(yscale="log", ylabel="active neurons per token")
    base.plain(left.yaxis)
    right.set_ylabel("dead neurons (%)")
    right.set_xlim(left.get_xlim())
    if dead.empty:
        right.text(0.5, 0.5, "no window was filled", ha="center", transform=right.transAxes)


CHOICES = {  # of `analysis.choice`: colour and dash
    "recipe": (base.OURS, "-"),
    "re-initialisation": (base.PINK, "--"),
    "L1 warm-up": (base.BROWN, "-."),
}


def fig08_remedies(
    active: pd.DataFrame, dead: pd.DataFrame, window_tokens: int, about: str = ""
) -> Figure:
    """Draw active and dead neurons over training for each remedy: means, and bands of all seeds.

    active, dead: `analysis.training_curves` of active_mean and dead_fraction, of one level of L1;
    window_tokens: for how many tokens a dead neuron was silent.
    """
    (level,) = base.one_case(active, ["l1_coefficient"], "level of L1")
    figure, (axes,) = base.subplots(base.PAGE, 2.5, 1, 2)
    for ax, curves, unit in zip(axes, (active, dead), (1, 100), strict=True):
        for name, (colour, dash) in CHOICES.items():
            rows = curves[curves["choice"] == name]
            if rows.empty:
                continue
            values = (unit * rows["value"]).groupby(rows["tokens"]).agg(["mean", "min", "max"])
            values = values.clip(lower=base.ACTIVE_FLOOR) if unit == 1 else values
            seeds, tokens = rows["run"].nunique(), values.index / 1e6
            number = f"{seeds} seeds" if seeds > 1 else "one run"
            ax.plot(tokens, values["mean"], dash, color=colour, label=f"{name}, {number}")
            if seeds > 1:
                look = {"color": colour, "alpha": 0.25, "linewidth": 0}
                ax.fill_between(tokens, values["min"], values["max"], **look)
        _of_training(ax)
    _over_training(*axes, dead)
    base.legend(figure, "lower center", ncols=len(base.named(axes[0])))
    about = ", ".join(part for part in (about, f"L1 = {analysis.level_name(level)}") if part)
    bands = "Lines are means, bands reach from the lowest to the highest seed."
    silent = f"A dead neuron was silent for {window_tokens:,} tokens."
    base.caption(figure, base.sentence(about), bands, silent)
    return figure


def scale_activity(
    table: pd.DataFrame, paper: pd.DataFrame, noise: dict[str, float], about: str = ""
) -> Figure:
    """Draw active neurons and the gap to the dense model by size, ours and the paper's.

    table, paper: `analysis.sizes` and `analysis.paper_sizes`; noise: the deviation of
    `analysis.seed_noise` for active_fraction and cross_entropy_change.
    """
    figure, ((left, right),) = base.subplots(base.PAGE, 2.5, 1, 2, sharex=True)
    runs = np.sqrt(1 / table["runs"] + 1 / table["dense_runs"])
    errors = {  # the logarithm of activity scatters
        "share": 100 * table["active_fraction"] * noise["active_fraction"] / np.sqrt(table["runs"]),
        "change": noise["cross_entropy_change"] * runs,
    }
    for whose, rows, colour, marker in (
        ("ours", table, base.OURS, "o"),
        ("paper", paper, base.PAPER, "s"),
    ):
        level = analysis.level_name(rows["l1_coefficient"].iloc[0])
        rows = rows.assign(share=100 * rows["active_fraction"])
        for ax, column in ((left, "share"), (right, "change")):
            known = rows.dropna(subset=column)
            size, height = known["parameters"] / 1e6, known[column]
            look = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1}
            ax.plot(size, height, linestyle=":", **look)
            if whose == "ours":
                bar = errors[column][known.index]
                ax.errorbar(size, height, bar, fmt="none", ecolor=colour, elinewidth=1)
            if ax is left:
                place, look = (size.iloc[0], height.iloc[0]), {"va": "bottom", "color": colour}
                base.note(ax, f"{whose}, L1 = {level}", place, (-4, 6), **look)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="parameters (millions)")
        ax.margins(0.12)
        base.plain(ax.xaxis)
    left.set(yscale="log", ylabel="active neurons (%)")
    base.plain(left.yaxis)
    right.axhline(analysis.MAX_PRICE, **_PRICE)
    low, high = right.get_ylim()
    right.set_ylabel("cross-entropy (% over L1 = 0)")
    right.set_ylim(min(low, 0), max(high, 1.15 * analysis.MAX_PRICE))
    widths = " and ".join(f"{rows['intermediate_size'].iloc[0]:,.0f}" for rows in (table, paper))
    limit = f"Layers have {widths} neurons. Dashed: the rise that the paper accepts."
    bars = "Bars are ± one standard error by the noise of seeds at one size."
    base.caption(figure, limit, bars, about)
    return figure


_PAPER_RATIO = 20  # training tokens a parameter (Table 1)


def price(table: pd.DataFrame, pairs: pd.DataFrame, limit: float, about: str = "") -> Figure:
    """Draw the price of L1 over tokens and over tokens a parameter, and the share that is active.

    table, pairs: `study.price.prices` and `study.price.pairs` of one text and level. limit: the
    rise that the paper accepts, in %.
    """
    figure, (axes,) = base.subplots(base.PAGE, 2.5, 1, 3)
    sizes = table.sort_values("parameters")["size"].unique()
    shades = sns.light_palette(base.OURS, len(sizes) + 1)[1:]
    for size, colour in zip(sizes, shades, strict=True):
        rows = table[table["size"] == size].sort_values("tokens")
        parameters = rows["parameters"].iloc[0]
        look = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.2}
        heights = rows["price"], rows["price"], 100 * rows["share"]
        for ax, unit, height in zip(axes, (1e6, parameters, 1e6), heights, strict=True):
            x = rows["tokens"] / unit
            ax.plot(x, height, **look)
            last = x.iloc[-1], height.iloc[-1]
            base.note(ax, f"{parameters / 1e6:.0f}M", last, (4, -2), color=colour, **base.HALO)
        for _, one in pairs[pairs["size"] == size].sort_values("tokens").groupby("seed"):
            axes[0].plot(one["tokens"] / 1e6, one["price"], color=colour, lw=0.6, alpha=0.5)
        band = rows[rows["seeds"] > 2]
        ends, look = (band["low"], band["high"]), {"color": colour, "alpha": 0.15, "lw": 0}
        axes[1].fill_between(band["tokens"] / parameters, *ends, **look)
    for ax in axes[:2]:
        ax.axhline(0, color="black", linewidth=0.8)
        ax.axhline(limit, **_PRICE)
    axes[1].axvline(_PAPER_RATIO, **_PRICE)
    axes[0].set(ylabel="cross-entropy (% over L1 = 0)")
    axes[1].set(xlabel="tokens per parameter", xscale="log")
    axes[1].margins(x=0.3)  # for the names
    axes[2].set(ylabel="active neurons (%)", ylim=(0, None))
    for ax in axes[::2]:
        ax.set(xlabel="tokens (millions)", xlim=(0, 1.2e-6 * table["tokens"].max()))
    base.plain(axes[1].xaxis)
    base.caption(
        figure,
        base.sentence(about),
        f"Dashed: the paper's limit of {limit:g}%, and its {_PAPER_RATIO} tokens a parameter.",
        "Thin lines: pairs of runs. Bands: 95%, of three pairs.",
    )
    return figure


_USES = {"inference": "forward pass (ns per token)", "training": "optimiser step (ns per token)"}


def worth(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw cross-entropy over the time of a token, dense models of several widths and sparse ones.

    table: `study.price.worth`. A row of panels is a size.
    """
    sizes = table.sort_values("parameters")["model"].unique()
    figure, axes = base.subplots(base.PAGE, 3.1 * len(sizes), len(sizes), 2, sharey="row")
    for (size, use), ax in zip(itertools.product(sizes, _USES), axes.flat, strict=True):
        rows = table[(table["use"] == use) & (table["model"] == size)].sort_values("nanoseconds")
        for sparse, models in rows.groupby("sparse"):
            models, colour = models.set_index("nanoseconds"), base.SPARSE if sparse else base.DENSE
            ax.plot(models["cross_entropy"], "o" if sparse else "o-", color=colour, markersize=5)
            ax.plot(models.filter(like="seed "), "_", color=colour, markersize=10, mew=0.8)
        apart, above = 0.1 * np.ptp(rows["cross_entropy"]), -np.inf
        for row in rows.sort_values("cross_entropy").itertuples():
            level = f"L1 = {analysis.level_name(row.l1_coefficient)}" if row.sparse else "dense"
            name = f"{row.intermediate_size:,} ({row.parameters / 1e6:.0f} M), {level}"
            above = max(row.cross_entropy, above + apart)  # of the name: names do not collide
            base.note(ax, name, (row.nanoseconds, above), (12, -2), **base.HALO)
        ax.margins(0.15)
        first, *_, last = rows["nanoseconds"]
        ax.set(xlabel=_USES[use], xlim=(0.7 * first, 1.7 * last))  # for the names
        ax.xaxis.set_major_locator(MaxNLocator(4))
        one = rows.filter(like="seed ").count(axis=1).max() == 1
        ax.set_title(f"{use}, one run each" if one else use, loc="left")
    for ax in axes[:, 0]:
        ax.set_ylabel("cross-entropy (nats)")
    base.caption(
        figure,
        base.sentence(about),
        "Numbers: neurons of a layer, and parameters.",
        "Points are means of the seeds that models of several seeds share, thin marks single seeds.",
    )
    return figure


def relufied_frontier(
    pairs: pd.DataFrame, table: pd.DataFrame, frontier: dict[str, float], about: str = ""
) -> Figure:
    """Draw how much less accurate than the original students are over their divergence from it.

    pairs, table, frontier: `analysis.relufied_pairs`, `analysis.relufied_runs` and
    `analysis.relufied_frontier`. Each mark is one run; its colour is the target share.
    """
    figure, ax = base.panel(base.PAGE, 2.9)
    means = analysis.beside_original(pairs)["difference"]
    shares = sorted(set(table["wanted"]) - {0}, reverse=True)
    places = map(base.shade, np.linspace(0.1, 1, len(shares)))
    colours = {0: base.DENSE} | dict(zip(shares, places, strict=True))
    runs = table[table["run"].isin(means.index)].set_index("run")
    for share, colour in colours.items():
        some = runs[runs["wanted"] == share]
        name = f"{100 * share:g}%" if share else "ReLU alone"
        ax.plot(some["kl"], 100 * means[some.index], "o", color=colour, zorder=3, label=name)
    x = np.array([0.95 * min(frontier["low"], runs["kl"].min()), 1.05 * runs["kl"].max()])
    line = 100 * (frontier["intercept"] + frontier["slope"] * np.log(x))
    off = 100 * frontier["deviation"]
    ax.plot(x, line, color="0.35", linewidth=1)
    ax.fill_between(x, line - off, line + off, color="0.9", linewidth=0, zorder=0)
    lost = 100 * frontier["lost"]
    ax.plot([frontier["low"], frontier["high"]], [-lost, -lost], color="black", linewidth=3)
    ax.set(xlabel="KL divergence (nats)", xscale="log", ylabel="accuracy difference (points)")
    base.plain(ax.xaxis)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8)))
    base.legend(figure, "right", title="wanted share\nactive")
    base.caption(
        figure,
        base.sentence(about),
        f"{frontier['students']} students, mean over tasks, student − original.",
        "Grey: the line of least squares and one standard deviation of the students around it.",
        f"Black: where it is {lost:.3g} points below, with the 95% interval over",
        "items and students.",
    )
    return figure
