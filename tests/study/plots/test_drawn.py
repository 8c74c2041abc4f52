"""Figures draw the numbers they are given, and refuse tables that they cannot show."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgba

from study import plots
from tests.factories import plots as made
from tests.factories.plots import draw


def test_every_figure_has_a_case():
    names = {name for name, _ in made.CASES.values()}
    functions = {name for name in plots.__all__ if callable(getattr(plots, name))}
    assert functions - names == {"Keep", "png", "save", "style", "visible"}


def test_labels_stay_within_the_figure():
    figure = draw("tokens")
    # The notes take what the bars leave, and no more is left.
    last = max(note.get_window_extent().x1 for note in figure.axes[0].texts)
    assert 0.9 < last / figure.bbox.x1 <= 1
    (ax,) = draw("two budgets").axes
    low, high = ax.get_window_extent().intervaly
    places = [label.get_window_extent().intervaly for label in ax.texts]
    assert all(low + 5 < bottom and top < high for bottom, top in places), places  # pixels


def test_names_of_lines_stand_in_the_order_of_their_ends():
    for ax in draw("over training").axes:
        *names, title = ax.texts
        ends = {line.get_color(): line.get_ydata()[-1] for line in ax.get_lines()}
        colours = sorted(ends, key=ends.get)
        ordered = sorted(names, key=lambda name: name.get_position()[1])
        assert title.get_text() == "L1" and len(names) == len(colours)
        assert [name.arrow_patch.get_edgecolor() for name in ordered] == list(map(to_rgba, colours))


def test_the_darker_a_token_the_more_active_it_is():
    """The inspector's colours grow darker all the way; the scale leaves out 2% at either end."""
    ax, table = draw("passage").axes[0], made.passage()
    colours = [patch.get_facecolor()[:3] for patch in ax.patches]
    light = pd.Series([0.3 * r + 0.59 * g + 0.11 * b for r, g, b in colours])
    order = table["active"].clip(lower=1).sort_values(kind="stable").index
    assert light[order].is_monotonic_decreasing and light[4] - light[5] > 0.4


def test_a_level_looks_alike_in_all_figures():
    """By share and threshold; ReLU alone is black, whatever its threshold. Lines have no marks."""
    _, table = made.CASES["many relufied"][1]()
    legends = [draw(case).legends[0] for case in ("many relufied", "price of many")]
    looks = [
        {
            text.get_text(): (to_hex(line.get_color()), line.get_marker(), line.get_linestyle())
            for text, line in zip(shown.get_texts(), shown.get_lines(), strict=True)
        }
        for shown in legends
    ]
    unmarked = {name: (colour, "", dashes) for name, (colour, _, dashes) in looks[1].items()}
    assert looks[0] == unmarked and [*looks[0]][0] == "ReLU alone"
    looks = table.assign(look=table["name"].map(looks[1]))
    looks[["colour", "marker", "dashes"]] = looks["look"].to_list()
    assert set(looks.query("wanted == 0")["colour"]) == {"#000000"}
    for asked, seen in (("wanted", "colour"), ("threshold", "marker"), ("threshold", "dashes")):
        alike = looks.groupby(asked)[seen].nunique()
        assert (alike == 1).all() and looks[seen].nunique() == len(alike)
    budgets = table[(table["wanted"] == 0.1) & (table["threshold"] == 0.5)]
    columns = {"level": "10%, threshold 0.5", "difference": 0.0, "low": 0.0, "high": 0.0}
    line, marks = plots.relufied_tokens(budgets.assign(**columns), table).axes[0].get_lines()[:2]
    expected = looks.set_index("name").loc["10%, threshold 0.5", "look"]
    assert (to_hex(line.get_color()), marks.get_marker(), line.get_linestyle()) == expected


def test_a_line_of_budgets_joins_the_means_of_runs_that_are_alike():
    _, table, _ = made.answered()
    row = table.iloc[[0]].assign(level="10%", low=0.0, high=0.0)
    seeds = [(1e6, 0.4, -0.3), (2e6, 0.2, -0.1), (2e6, 0.3, np.nan)]
    rows = [row.assign(tokens=n, kl=kl, difference=lost) for n, kl, lost in seeds]
    figure = plots.relufied_tokens(pd.concat(rows, ignore_index=True), table)
    for ax, means, values in zip(
        figure.axes, ([0.4, 0.25], [-30, -10]), ([0.4, 0.2, 0.3], [-30, -10, np.nan]), strict=True
    ):
        line, marks = ax.get_lines()[:2]
        assert line.get_ydata() == pytest.approx(means) and line.get_marker() == ""
        assert marks.get_ydata() == pytest.approx(values, nan_ok=True)
    assert "lines join means" in " ".join(text.get_text() for text in figure.texts)


def test_marks_of_one_activity_stand_side_by_side():
    """The others stand at their activity."""
    pairs, table, _ = made.answered()
    table.loc[table["run"] == "longer", "active_fraction"] = 0.1  # as "tenth"
    (left, _) = plots.relufied_tasks(pairs, table).axes
    left.figure.draw_without_rendering()
    places = [line.get_xydata()[0] for line in left.get_lines() if line.get_marker() == "o"]
    (x1, y1), (x2, y2), (x3, y3) = sorted(map(tuple, places), key=lambda place: place[1])
    assert (y1, y2, y3) == pytest.approx((-50, -37.5, -12.5)) and x3 == pytest.approx(50)
    across = [
        left.transAxes.inverted().transform(left.transData.transform((x, 0)))[0] for x in (x1, x2)
    ]
    assert 0.02 < abs(across[0] - across[1]) < 0.04 and 9 < min(x1, x2) < max(x1, x2) < 11.5


@pytest.mark.parametrize("number", [1, 6, 7, 11])
def test_no_token_is_in_both_groups(number):
    strings = [f"t{n}" for n in range(number)]
    (ax,) = plots.fig07a_tokens(made.tokens(strings)).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == strings


def several(case, **columns):
    """The first table of a case once for each value of a column, and its other arguments."""
    ((column, values),) = columns.items()
    table, *others = made.CASES[case][1]()
    return [pd.concat([table[:0], *(table.assign(**{column: value}) for value in values)]), *others]


@pytest.mark.parametrize(
    ("case", "columns", "message"),
    [
        ("tokens", {"count": []}, "no token is left to draw; lower min_count"),
        ("specific", {"fires": []}, "no neuron fires often enough; lower min_fires"),
        ("silenced", {"layer": []}, "no neuron was silenced"),
        ("around a word", {"factor": []}, "no factor of the neuron was measured"),
        ("remedies", {"l1_coefficient": [0, 1]}, "shows one level of L1; this table has 2"),
        ("ways", {"run": "xyz"}, "shows up to 5 runs; this table has 9"),
        ("by activity", {"gated": []}, "shows one layer on one device; this table has 0"),
        ("by activity", {"gated": [True, False]}, "one layer on one device; this table has 2"),
        ("training", {"tokens": range(4)}, "4 batch sizes cannot be told apart .* at most 3"),
        ("training", {"mode": ["stream", "eager"]}, "shows one mode; this table has 2"),
        ("training", {"device": "ab"}, "shows one layer on one device; this table has 2"),
        ("batches", {"pattern": ["even", "skewed"]}, "shows one pattern; this table has 2"),
        ("roofline", {"tokens": [64, 65]}, "shows one case; this table has 2"),
        ("forward", {"model": "ab"}, "shows one model on one device; this table has 2"),
        ("contributions", {"level": [1, 2]}, "shows one level of activity; this table has 2"),
        ("parts", {"tokens": [1, 64]}, "shows batches of one kind, each once"),
        ("parts", {"total": [1, 2]}, "shows batches of one kind, each once"),
        ("decoding", {"context": [1, 2]}, "shows one length of context; this table has 2"),
        ("table 1", {"dense": [float("nan")]}, "none of the quantities of Table 1 was measured"),
    ],
)
def test_tables_that_cannot_be_shown_are_refused(case, columns, message):
    name, _ = made.CASES[case]
    with pytest.raises(ValueError, match=message):
        getattr(plots, name)(*several(case, **columns))
