"""Figures of activity: layers (Figs 6, 10, 11), tokens (Fig. 7), and neurons (ours)."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from study import analysis
from study.plots import base
from twell.inspector.figure import (
    LINE,
    inspector_colours,
    text_scale,
    typeset,
    visible,
    write_tokens,
)


def fig06_layers(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw mean, 99th percentile and maximum of active neurons by layer (`analysis.per_layer`)."""
    figure, ax = base.panel(base.COLUMN, 2.7)
    layer, overall = table["layer"], table["mean"].mean()
    shown = table[["mean", "p99", "max"]].clip(lower=base.ACTIVE_FLOOR)
    line, dots = {"color": base.BLUE, "linestyle": ":", "linewidth": 1}, {"edgecolors": base.BLUE}
    ax.vlines(layer, shown["mean"], shown["max"], color="0.85", linewidth=1, zorder=1)
    entries = {
        "mean": ax.scatter(layer, shown["mean"], 18, color=base.BLUE),
        f"mean of all layers: {overall:.3g}": ax.axhline(max(overall, base.ACTIVE_FLOOR), **line),
        "99th percentile": ax.scatter(layer, shown["p99"], 30, marker="_", color=base.BLUE),
        "busiest token": ax.scatter(layer, shown["max"], 18, "white", marker="^", **dots),
    }
    _decades(ax, shown["mean"].min(), shown["max"].max())
    ax.set(xlabel="layer", ylabel="active neurons per token")
    ax.set_xticks(layer[:: max(1, len(layer) // 10)])
    ax.grid(False, axis="x")
    base.legend(figure, "lower center", entries, ncols=2, labelspacing=0.3)
    base.caption(
        figure, base.sentence(about), "Grey lines reach from the mean to the busiest token."
    )
    return figure


def _decades(ax: Axes, low: float, high: float) -> None:
    """A logarithmic axis of active neurons with some room around its values."""
    ax.set(yscale="log", ylim=(0.6 * low, 1.6 * high))
    base.plain(ax.yaxis)


def fig07a_tokens(table: pd.DataFrame, num_tokens: int = 6, about: str = "") -> Figure:
    """Draw the tokens of lowest and of highest mean activity (`analysis.per_token`)."""
    lowest, highest = table.head(num_tokens), table.iloc[num_tokens:].tail(num_tokens)
    both = pd.concat([lowest, highest])
    figure, ax = base.panel(base.COLUMN, 1.0 + 0.19 * len(both))
    y = np.arange(len(both))
    y = y + 1.2 * (y >= len(lowest))  # a gap between the two groups
    ax.barh(y, both["mean_active"], 0.75, color=base.BLUE)
    base.row_names(ax, y, [visible(token)[:16] for token in both["token"]])
    for place, value, count in zip(y, both["mean_active"], both["count"], strict=True):
        base.note(ax, f"{value:.3g} (n = {count:,})", (value, place), (3, 0), va="center")
    for name, group in (("lowest", y[: len(lowest)]), ("highest", y[len(lowest) :])):
        if len(group):
            look = {"xycoords": ("axes fraction", "data"), "va": "center", "style": "italic"}
            base.note(ax, f"the {len(group)} {name}", (0, group[0] - 0.95), (3, 0), **look)
    ax.set_ylim(y[-1] + 0.6, -1.5)
    # Notes stand beyond the axes: the layout leaves them as much as they need.
    ax.set_xlim(0, 1.02 * both["mean_active"].max())
    ax.set_xlabel("active neurons per token\n(mean over its n occurrences and all layers)")
    base.caption(figure, base.sentence(about))
    return figure


def fig07b_positions(table: pd.DataFrame, about: str = "") -> Figure:
    """Draw mean activity against position in the sequence, log-log.

    table: `analysis.by_position` of one or more traces, with the column l1_coefficient. Strong
    lines are means over ranges of positions that grow by a factor of _RANGE.
    """
    figure, ax = base.panel(base.COLUMN, 2.7)
    colours = base.level_colours(table["l1_coefficient"])
    for l1, line in table.groupby("l1_coefficient"):
        position, active = line["position"] + 1, line["mean_active"].clip(lower=base.ACTIVE_FLOOR)
        ax.plot(position, active, color=colours[l1], alpha=0.3, linewidth=0.8)
        ranges = (np.log(position) / np.log(_RANGE)).astype(int)
        means = pd.DataFrame({"x": np.log(position), "y": active}).groupby(ranges).mean()
        look = {"color": colours[l1], "marker": "o", "markersize": 2.5, "linewidth": 1}
        ax.plot(np.exp(means["x"]), means["y"], label=analysis.level_name(l1), **look)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="position in the sequence (the first is 1)", ylabel="active neurons per token")
    base.plain(ax.xaxis, ax.yaxis)
    if len(colours) > 2:  # of L1 = 0 and more than one other level
        ax.legend(title="L1 coefficient")
    means = "Points are means over ranges of positions, thin lines single positions."
    base.caption(figure, base.sentence(about), means)
    return figure


_RANGE = 1.25


def fig_passage(table: pd.DataFrame, columns: int = 96, about: str = "") -> Figure:
    """Draw a passage (`analysis.passage`), each token coloured by its active neurons.

    columns: characters a line.
    """
    colours = inspector_colours()
    # A log scale has no zero: silent tokens get the colour of the least active ones.
    positive = table.loc[table["active"] > 0, "active"]
    active = table["active"].clip(lower=base.ACTIVE_FLOOR if positive.empty else positive.min())
    low, high = active.quantile([0.02, 0.98])
    norm = LogNorm(low, max(high, 1.001 * low), clip=True)
    places, lines = typeset(table["token"], columns)
    figure, ax = base.panel(base.PAGE, LINE * lines + 0.75)
    write_tokens(ax, places, lines, [colours(norm(value)) for value in active], columns)
    label = "active neurons per token, mean over layers (⏎: end of a line)"
    text_scale(figure, ax, norm, colours, "bottom", label, "both")
    scale = "The scale spans the middle 96% of the tokens."
    base.caption(figure, base.sentence(about), scale)
    return figure


def fig_specific(table: pd.DataFrame, rows: int = 12, about: str = "") -> Figure:
    """Draw share and coverage of the neurons most specific to a token (`analysis.specific`)."""
    shown = table.head(rows)
    figure, ax = base.panel(base.COLUMN, 1.0 + 0.2 * len(shown))
    y, share, coverage = np.arange(len(shown)), 100 * shown["share"], 100 * shown["coverage"]
    ax.hlines(y, share, coverage, color="0.8", linewidth=1.5, zorder=1)
    ax.scatter(share, y, 18, color=base.BLUE, label="share of its n firings that are at the token")
    look = {"color": "0.3", "marker": "D", "label": "share of the token's places at which it fires"}
    ax.scatter(coverage, y, 14, **look)
    words = {".": ". (full stop)", ",": ", (comma)"}  # a mark alone is hard to see
    tokens = [words.get(token, visible(token)[:14]) for token in shown["token"]]
    names = [
        f"{row.layer} · {row.neuron}  {token}"
        for row, token in zip(shown.itertuples(), tokens, strict=True)
    ]
    base.row_names(ax, y, names)
    for place, fires in enumerate(shown["fires"]):
        base.note(ax, f"n = {fires}", (102, place), (2, 0), va="center", annotation_clip=False)
    least = min(share.min(), coverage.min())
    ax.set(xlabel="%", xlim=(max(10 * (least // 10) - 5, 0), 102))
    base.legend(figure, "lower center", ncols=1, labelspacing=0.2)
    base.caption(figure, base.sentence(about), "A row is a neuron: layer, number, and its token.")
    return figure


def fig_surprise(bins: pd.DataFrame, correlations: pd.DataFrame, about: str = "") -> Figure:
    """Draw activity against surprise, and how they correlate in each layer.

    bins: `analysis.by_surprise`; correlations: `analysis.surprise_correlation`.
    """
    figure, ((left, right),) = base.subplots(base.PAGE, 2.7, 1, 2)
    surprise, look = bins["surprise"], {"color": base.BLUE, "alpha": 0.18, "linewidth": 0}
    left.fill_between(surprise, bins["q25"], bins["q75"], label="middle half of its tokens", **look)
    name = "mean of a bin"
    left.plot(surprise, bins["active"], "o-", color=base.BLUE, markersize=3.5, label=name)
    left.set(xlabel="surprise of the token, $-$log p (nats)", ylabel="active neurons per token")
    left.set_ylim(0, None)
    base.legend(figure, "lower left", ncols=2)
    looks = {
        "surprise": ("this token's", base.BLUE, "o", -0.12),
        "next_surprise": ("the next token's", "0.3", "D", 0.12),
    }
    layers = correlations["layer"].max() + 1
    for of, rows in correlations.groupby("of", sort=False):
        name, colour, marker, aside = looks[of]
        x = rows["layer"].where(rows["layer"] >= 0, layers + 0.5) + aside
        spread = np.abs(rows[["low", "high"]].to_numpy().T - rows["spearman"].to_numpy())
        look = {"fmt": marker, "color": colour, "markersize": 3, "elinewidth": 1}
        right.errorbar(x, rows["spearman"], spread, label=f"{name} surprise", **look)
    right.axhline(0, color="0.4", linewidth=0.6)
    ticks = range(0, layers, max(1, -(-layers // 10)))
    right.set_xticks([*ticks, layers + 0.5], [*map(str, ticks), "mean"])
    known = " (95% interval)" if correlations["low"].notna().any() else ""
    right.set(xlabel="layer", ylabel=f"rank correlation with\nactive neurons{known}")
    right.margins(y=0.15)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    base.caption(figure, base.sentence(about))
    return figure


def fig_silenced(table: pd.DataFrame, rows: int = 16, about: str = "") -> Figure:
    """Draw the largest changes of the loss by silencing a neuron (`trace.silenced_loss`)."""
    order = table["loss_change"].abs().sort_values(ascending=False, kind="stable").index[:rows]
    shown = table.loc[order].sort_values("loss_change", ascending=False, kind="stable")
    figure, ax = base.panel(base.COLUMN, 0.9 + 0.17 * len(shown))
    y, spread = np.arange(len(shown)), 1.96e3 * shown["stderr"]
    look = {"fmt": "o", "color": base.BLUE, "markersize": 3.5, "elinewidth": 1}
    ax.errorbar(1e3 * shown["loss_change"], y, xerr=spread, **look)
    ax.axvline(0, color="0.4", linewidth=0.6)
    ax.set_yticks(y, [f"{row.layer} · {row.neuron}" for row in shown.itertuples()])
    ax.invert_yaxis()
    known = "; 95% interval" if spread.notna().any() else ""
    ax.set_xlabel(f"rise of the loss without the neuron\n(0.001 nats a token{known})")
    ax.set_ylabel("layer · neuron")
    ax.grid(False, axis="y")
    base.caption(figure, base.sentence(about))
    return figure


def fig_around_word(table: pd.DataFrame, word: str, about: str = "") -> Figure:
    """Draw the rise of the loss by the factor of a neuron, at each place around its word.

    table: tables of `analysis.around_word` with a column factor.
    """
    figure, ax = base.panel(base.COLUMN, 2.6)
    looks = ((base.RED, "o", "-"), (base.BLUE, "D", "--"), ("0.4", "s", ":"))
    for where, (colour, marker, line) in zip(table["where"].unique(), looks, strict=False):
        rows = table[table["where"] == where].sort_values("factor")
        ends = (rows[["rise", "rise"]].to_numpy() - rows[["low", "high"]].to_numpy()).T
        look = {"color": colour, "marker": marker, "linestyle": line, "markersize": 3.5}
        spread = None if np.isnan(ends).any() else np.abs(ends)
        ax.errorbar(rows["factor"], rows["rise"], spread, label=where, elinewidth=1, **look)
    ax.axhline(0, color="0.4", linewidth=0.6)
    known = "; 95% interval" if table["low"].notna().any() else ""
    ax.set(
        xlabel="factor of the neuron's h\n(0: silent, 1: unchanged)",
        ylabel=f"rise of the loss\n(nats a token{known})",
        title=f"the word {visible(word)}",
    )
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    base.caption(figure, base.sentence(about))
    return figure
