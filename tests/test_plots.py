"""The figures draw the numbers they are given, and saving is exact, complete and repeatable."""

import hashlib
import io
import json
import secrets
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from tests.factories.analysis import (
    BY_TWO,
    CHANCE,
    DENSELY,
    SPARSELY,
    decode_rows,
    evaluation,
    family,
    made,
    model_layer_rows,
    model_rows,
    part_rows,
    scaled,
    step_rows,
    tables,
    trained,
)
from twell import analysis, plots, results


def lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def draw(figure):
    """Render; what cannot be drawn (mathematics in a token, a log axis of zeros) raises here or warns, which fails."""
    figure.draw_without_rendering()  # the canvas of a figure without pyplot draws nothing


pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def random():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def make_curves(random, levels=(0, 1e-3, 3e-3), points=30, scale=5.0):
    rows = [
        (f"run-{l1:g}", l1, step, step * 4096, scale * random.random() + 0.1)
        for l1 in levels
        for step in range(10, 10 * (points + 1), 10)
    ]
    return pd.DataFrame(rows, columns=["run", "l1_coefficient", "step", "tokens", "value"])


def make_sweep(**columns):
    table = {
        "run": ["a", "b", "c", "d"],
        "l1_coefficient": [0, 1e-3, 1e-2, 1e-1],
        "cross_entropy": [4.0, 4.04, 4.2, 4.4],
        "cross_entropy_change": [0, 1, 5, 10],
        "active": [150.0, 30.0, 3.0, 0.0],
        "status": ["alive", "alive", "unused", "dead layer"],
    }
    return pd.DataFrame(table | columns)


def test_fig01_formats_draws_every_cell(random):
    dense = (random.random((6, 16)) < 0.3).astype(np.float32)
    dense[2] = 1  # overflows
    cells = analysis.format_cells(dense, tile_n=8, compression=2, ell_width=7)
    figure = plots.fig01_formats(cells, tile_n=8)
    draw(figure)
    assert {ax.get_title(loc="left") for ax in figure.axes} == {"Dense", "ELL", "TwELL", "Hybrid"}
    for ax in figure.axes:
        panel = cells[cells["format"] == ax.get_title(loc="left")]
        assert len(ax.patches) == len(panel)
        shown = [text for text in texts(ax) if text.isdigit()]
        assert sorted(map(int, shown)) == sorted(panel.loc[panel["label"] >= 0, "label"])
        blue = sum(patch.get_facecolor()[:3] == to_rgba(plots.BLUE)[:3] for patch in ax.patches)
        assert blue == ((panel["kind"] == "value") & (panel["label"] < 8)).sum()


def test_fig01_bytes():
    table = analysis.format_bytes(32, 512, [2.0, 60.0])
    ax = plots.fig01_bytes(table).axes[0]
    assert set(lines(ax)) == set(table["format"])
    for name, line in lines(ax).items():
        rows = table[table["format"] == name]
        np.testing.assert_allclose(line.get_xdata(), 100 * rows["active_share"])
        np.testing.assert_allclose(line.get_ydata(), rows["relative"])


def test_fig02_smooths_over_a_twentieth_of_the_points(random):
    curves = make_curves(random, points=40)
    figure = plots.fig02_training_curves(curves)
    draw(figure)
    for ax in figure.axes:
        assert list(lines(ax)) == ["0", "1e-3", "3e-3"]
        for label, line in lines(ax).items():
            values = curves.loc[curves["l1_coefficient"] == float(label), "value"].to_numpy()
            np.testing.assert_allclose(line.get_ydata()[1:], (values[1:] + values[:-1]) / 2)
            np.testing.assert_allclose(line.get_xdata(), np.arange(10, 410, 10) * 4096 / 1e6)
    assert figure.axes[1].get_xlim()[0] >= 0.5 * curves["tokens"].max() / 1e6
    assert legend(figure) == ["0", "1e-3", "3e-3"]


def test_l1_levels_keep_their_colour_within_a_figure(random):
    figure = plots.fig09_activity_over_training(
        make_curves(random), make_curves(random, scale=0.5), 1000
    )
    colours = [{label: line.get_color() for label, line in lines(ax).items()} for ax in figure.axes]
    assert colours[0] == colours[1]
    assert colours[0]["0"] == "black"
    assert len(set(colours[0].values())) == 3


def test_fig03_shows_prices_activity_and_status():
    figure = plots.fig03_frontier(make_sweep())
    draw(figure)
    top, bottom = figure.axes
    assert texts(top) == ["+1.0%", "+5.0%", "+10.0%"]
    assert texts(bottom) == ["150", "30", "3", "0"]
    np.testing.assert_allclose(bottom.get_lines()[0].get_ydata(), [150, 30, 3, plots.ACTIVE_FLOOR])
    assert [label.get_text() for label in bottom.get_xticklabels()] == ["0", "1e-3", "1e-2", "0.1"]
    assert legend(figure) == ["alive", "feed-forward unused", "dead layer"]
    marks = {len(collection.get_paths()[0].vertices) for collection in top.collections}
    assert len(marks) == 3


def test_fig03_averages_runs_of_one_level_and_needs_no_baseline():
    table = make_sweep(
        l1_coefficient=[1e-3, 1e-3, 1e-2, 1e-2], cross_entropy_change=[np.nan] * 4, status="alive"
    )
    figure = plots.fig03_frontier(table)
    draw(figure)
    assert texts(figure.axes[0]) == []
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_ydata(), [4.02, 4.3])
    assert sum(len(collection.get_offsets()) for collection in figure.axes[0].collections) == 4
    assert not figure.legends  # all are alive


def test_frontier():
    levels = make_sweep(tokens=1e6, runs=[3, 1, 1, 1], active_std=15.0, cross_entropy_std=0.1)
    levels["active_fraction"] = levels["active"] / 500
    longer = levels[:2].assign(tokens=2e6, cross_entropy=levels["cross_entropy"] - 1, runs=1)
    table = pd.concat([levels, longer], ignore_index=True)
    figure = plots.frontier(table)
    draw(figure)
    ax = figure.axes[0]
    drawn = lines(ax)
    alive = levels[levels["status"] == "alive"].sort_values("active")
    np.testing.assert_allclose(drawn["1 M tokens"].get_xdata(), 100 * alive["active_fraction"])
    np.testing.assert_allclose(drawn["1 M tokens"].get_ydata(), alive["cross_entropy"])
    assert len(drawn["2 M tokens"].get_xdata()) == 2
    assert texts(ax) == ["0.1", "1e-2", "1e-3", "0"]  # of the shorter training alone
    price = [line.get_ydata()[0] for line in ax.get_lines() if line.get_linestyle() == "--"]
    dense = levels.loc[levels["l1_coefficient"] == 0, "cross_entropy"].item()
    np.testing.assert_allclose(price, [1.02 * dense, 1.02 * (dense - 1)])
    across = ax.collections[0].get_segments()[0][:, 0]  # of the three runs at L1 = 0
    np.testing.assert_allclose(np.ptp(across), 100 * 2 * 15 / 500)
    assert legend(figure) == ["1 M tokens", "2 M tokens", "2% above L1 = 0", "95% inactive"]


def test_labels_of_the_frontier_stay_within_its_axes():
    levels = make_sweep(
        l1_coefficient=[0, 1.5e-4, 6e-4, 5e-3],
        cross_entropy=[3.75, 3.66, 3.7, 4.01],
        status="alive",
    )
    levels = levels.assign(
        tokens=1e6,
        runs=1,
        active_fraction=levels["active"] / 500,
        active_std=np.nan,
        cross_entropy_std=np.nan,
    )
    figure = plots.frontier(levels)
    draw(figure)
    low, high = figure.axes[0].get_window_extent().intervaly
    found = {
        label.get_text(): label.get_window_extent().intervaly for label in figure.axes[0].texts
    }
    assert set(found) == {"0", "1.5e-4", "6e-4", "5e-3"}
    assert all(low + 5 < bottom and top < high for bottom, top in found.values()), found  # pixels


def test_fig09(random):
    active, dead = make_curves(random), make_curves(random, scale=0.5)
    active.loc[3, "value"] = 0
    figure = plots.fig09_activity_over_training(active, dead, 131072)
    draw(figure)
    left, right = figure.axes
    np.testing.assert_allclose(
        lines(left)["0"].get_ydata(), active["value"][:30].clip(lower=plots.ACTIVE_FLOOR)
    )
    np.testing.assert_allclose(lines(right)["3e-3"].get_ydata(), 100 * dead["value"][60:])
    assert "131,072 tokens" in right.get_ylabel()
    assert left.get_yscale() == "log"


def test_fig09_without_a_filled_window(random):
    active = make_curves(random)
    figure = plots.fig09_activity_over_training(active, active[:0], 1000)
    draw(figure)
    assert texts(figure.axes[1]) == ["no window was filled"]


def test_fig08_shows_means_and_bands_of_seeds():
    runs, log = tables(*family(), made("reinit-2", 1e-3, 1.0, 2, 6.5, reinit=0.1))
    runs = analysis.remedied(runs, 1e-3)
    active, dead = (
        analysis.training_curves(runs, log, metric) for metric in ("active_mean", "dead_fraction")
    )
    active.loc[active["choice"] == "L1 warm-up", "value"] = 0.0
    figure = plots.fig08_remedies(active, dead, 1000)
    draw(figure)
    left, right = figure.axes
    names = ["recipe, 2 seeds", "re-initialisation, 3 seeds", "L1 warm-up, 2 seeds"]
    assert legend(figure) == names and figure.legends[0].get_title().get_text() == "L1 = 1e-3"
    np.testing.assert_allclose(lines(left)[names[0]].get_ydata(), [20.5, 40.5, 100.5])
    np.testing.assert_allclose(lines(left)[names[2]].get_ydata(), [plots.ACTIVE_FLOOR] * 3)
    np.testing.assert_allclose(
        lines(right)[names[1]].get_ydata(), [90, 2.5]
    )  # of 0.5, 0.5 and 6.5%
    band = right.collections[1].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.5) and 6.5 in band[:, 1].round(6)
    assert (
        "1,000 tokens" in right.get_ylabel()
        and len({line.get_linestyle() for line in left.get_lines()}) == 3
    )
    single = plots.fig08_remedies(active[active["run"] == "l1-a-0"], dead[:0], 1000)
    draw(single)
    assert legend(single) == ["recipe, 1 seed"] and not single.axes[0].collections
    assert texts(single.axes[1]) == ["no window was filled"]
    with pytest.raises(ValueError, match="shows one level of L1; these curves have 2"):
        plots.fig08_remedies(
            active.assign(l1_coefficient=[0] + [1] * (len(active) - 1)), dead, 1000
        )


def test_choices_frontier():
    unused = made("ours-b", 3e-3, 3.0, 1.0, 5.0, balance_every=1)
    table = analysis.levels(analysis.choices(*tables(*family(), unused)))
    table.loc[
        (table["choice"] == "balanced columns") & (table["l1_coefficient"] == 3e-3), "status"
    ] = "unused"
    figure = plots.choices_frontier(table)
    draw(figure)
    left, right = figure.axes
    names = ["recipe", "re-initialisation", "L1 warm-up", "balanced columns"]
    assert legend(figure) == [
        *names,
        "2% above L1 = 0",
    ]  # SiLU has no zeros, the non-gated layer other neurons
    np.testing.assert_allclose(lines(left)["recipe"].get_xdata(), [1, 2, 20])
    np.testing.assert_allclose(lines(left)["recipe"].get_ydata(), [3, 1, 0], atol=1e-9)
    np.testing.assert_allclose(lines(right)["recipe"].get_ydata(), [60, 40, 0])
    np.testing.assert_allclose(lines(left)["balanced columns"].get_xdata(), [2])
    assert texts(right) == ["3e-3", "1e-3", "0"] and texts(left) == []
    sideways, upright = (
        bars.get_segments() for bars in left.collections[:2]
    )  # of the recipe's two levels with seeds
    np.testing.assert_allclose(
        [np.ptp(bar[:, 0]) for bar in sideways], [2 * 0.02 * np.sqrt(2), 0], atol=1e-9
    )
    np.testing.assert_allclose(
        [np.ptp(bar[:, 1]) for bar in upright], [0, 2 * 0.2 * np.sqrt(2)], atol=1e-9
    )
    assert len({lines(left)[name].get_marker() for name in names}) == 4


def test_scale_activity():
    runs = [scaled("a", 1e7, 0, 0, 20), scaled("b", 1e7, 1e-3, 1.0, 5)]
    runs += [scaled("c", 9e7, 0, 0, 20, width=200), scaled("d", 9e7, 1e-3, 3.0, 6, width=200)]
    runs += [scaled("e", 2e7, 1e-3, 3.0, 5.5)]  # no dense model of its size
    table, paper = analysis.sizes(*tables(*runs)), analysis.paper_sizes(results.paper())
    figure = plots.scale_activity(
        table, paper, {"active_fraction": 0.1, "cross_entropy_change": 0.2}
    )
    draw(figure)
    left, right = figure.axes
    np.testing.assert_allclose(lines(left)["ours"].get_xdata(), [10, 20, 90])
    np.testing.assert_allclose(lines(left)["ours"].get_ydata(), [5, 5.5, 3])
    np.testing.assert_allclose(lines(left)["paper"].get_xdata(), [500, 1500, 2000])
    np.testing.assert_allclose(
        lines(left)["paper"].get_ydata(), [100 * n / 5632 for n in (39, 29, 24)]
    )
    np.testing.assert_allclose(lines(right)["ours"].get_xdata(), [10, 90])
    np.testing.assert_allclose(lines(right)["ours"].get_ydata(), [1, 3])
    np.testing.assert_allclose(lines(right)["paper"].get_ydata(), [100 * (2.297 / 2.255 - 1)])
    assert texts(left) == ["5", "5.5", "6", "39", "29", "24"]
    assert [np.ptp(bar[:, 1]) for bar in left.collections[0].get_segments()] == pytest.approx(
        [1, 1.1, 0.6]
    )
    assert [np.ptp(bar[:, 1]) for bar in right.collections[0].get_segments()] == pytest.approx(
        [0.4 * np.sqrt(2)] * 2
    )
    assert (
        legend(figure) == ["ours, L1 = 1e-3", "paper, L1 = 2e-5", "2%"] and right.get_ylim()[0] == 0
    )
    unknown = plots.scale_activity(
        table, paper, {"active_fraction": np.nan, "cross_entropy_change": np.nan}
    )
    draw(unknown)
    assert not unknown.axes[0].collections and not unknown.axes[1].collections


def test_one_training_computed_in_several_ways():
    runs = tables(SPARSELY, BY_TWO, DENSELY)
    table, curves = analysis.computed_otherwise(*runs), analysis.computed_curves(*runs)
    figure = plots.computed_otherwise(table, curves.sample(frac=1, random_state=1))
    draw(figure)
    ways = ["dense, 1 device", "sparse kernels, 1 device", "sparse kernels, 2 devices"]
    assert legend(figure) == ways == table["way"].tolist()
    losses, speed, memory = figure.axes
    for ax, values in (
        (losses, ([8, 6, 5, 4.5], [8, 6.5, 5, 4], [8, 6.5, 5, 4.25])),
        (speed, ([0.03, 0.03, 0.02, 0.02], [0.01, 0.02, 0.06, 0.04], [0.001, 0.001, 0.09, 0.1])),
        (memory, ([8e-7, 5e-7, 5e-7, 5e-7], [9e-7, 7e-7, 3e-7, 4e-7], [6e-7, 1e-9, 1e-9, 2e-7])),
    ):
        for way, value in zip(ways, values, strict=True):
            np.testing.assert_allclose(lines(ax)[way].get_ydata(), value)
            np.testing.assert_allclose(lines(ax)[way].get_xdata(), [1e-4, 2e-4, 3e-4, 4e-4])
    widths = [line.get_linewidth() for line in losses.get_lines()]
    assert (
        widths[0] > 2 * max(widths[1:])
        and len({line.get_color() for line in losses.get_lines()}) == 3
    )
    assert (
        speed.get_ylim()[0] == memory.get_ylim()[0] == 0
        and losses.get_ylim()[0] > 3
        and not texts(memory)
    )
    single = plots.computed_otherwise(table[:1], curves)
    draw(single)
    assert legend(single) == ways[:1] and [len(ax.get_lines()) for ax in single.axes] == [1, 1, 1]
    many = pd.concat([table, table.assign(run="x"), table.assign(run="y")])
    with pytest.raises(ValueError, match="shows up to 5 runs; this table has 9"):
        plots.computed_otherwise(many, curves)


def test_a_training_on_a_cpu_says_that_no_memory_was_logged():
    runs = tables(trained("a", [8, 4], [10, 20], backend="triton"), trained("b", [8, 4], [30, 40]))
    figure = plots.computed_otherwise(
        analysis.computed_otherwise(*runs), analysis.computed_curves(*runs)
    )
    draw(figure)
    assert [texts(ax) for ax in figure.axes] == [[], [], ["not logged"]]
    assert not figure.axes[2].get_lines() and legend(figure) == ["dense", "sparse kernels"]
    # One of two has it: its line alone.
    runs = tables(
        trained("a", [8, 4], [10, 20], [1, 2], backend="triton"), trained("b", [8, 4], [30, 40])
    )
    figure = plots.computed_otherwise(
        analysis.computed_otherwise(*runs), analysis.computed_curves(*runs)
    )
    draw(figure)
    assert [len(line.get_ydata()) for line in figure.axes[2].get_lines()] == [0, 2] and not texts(
        figure.axes[2]
    )


def make_layers(means):
    means = np.array(means)
    return pd.DataFrame(
        {"layer": range(len(means)), "mean": means, "p99": 4 * means, "max": np.ceil(12 * means)}
    )


@pytest.mark.parametrize(
    "means", [[3.0, 20.0, 11.0], [5.0], [0.0, 0.3], [0.0, 0.0], list(range(1, 29))]
)
def test_fig06(means):
    table = make_layers(means)
    figure = plots.fig06_layers(table, "L1 = 0.5")
    draw(figure)
    ax = figure.axes[0]
    floor = plots.ACTIVE_FLOOR
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], np.maximum(means, floor))
    p99, largest = (collection.get_offsets()[:, 1] for collection in ax.collections)
    np.testing.assert_allclose(p99, np.maximum(table["p99"], floor))
    np.testing.assert_allclose(largest, np.maximum(table["max"], floor))
    assert ax.get_ylim()[0] < np.maximum(means, floor).min() and ax.get_ylim()[1] > largest.max()
    assert figure.legends[0].get_title().get_text() == "L1 = 0.5"
    assert f"mean of all: {np.mean(means):.3g}" in legend(figure)


def make_tokens(strings):
    count = np.arange(len(strings)) + 16
    return pd.DataFrame(
        {"token": strings, "count": count, "mean_active": np.arange(len(strings)) + 0.5}
    )


def test_fig07a_shows_both_ends_and_any_token():
    strings = [
        "a$_b",
        " the",
        "\n",
        "$",
        "\t",
        "\x00",
        *"skipped",
        "\\frac",
        "x" * 40,
        "é",
        "$x$",
        "%",
        "_^{",
    ]
    figure = plots.fig07a_tokens(make_tokens(strings))
    draw(figure)
    ax = figure.axes[0]
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == [
        "a$_b",
        "␣the",
        "⏎",
        "$",
        "⇥",
        "\\x00",
        "\\frac",
        "x" * 16,
        "é",
        "$x$",
        "%",
        "_^{",
    ]
    np.testing.assert_allclose(
        [bar.get_width() for bar in ax.patches], [*np.arange(6) + 0.5, *np.arange(13, 19) + 0.5]
    )
    assert texts(ax)[0] == "0.5 (n = 16)"
    ends = [note.get_window_extent().x1 for note in ax.texts]
    assert (
        0.9 * figure.bbox.x1 < max(ends) <= figure.bbox.x1
    )  # the notes take what the bars leave, and no more is left
    assert ax.yaxis_inverted()  # the lowest stand on top


@pytest.mark.parametrize("number", [1, 6, 7, 11])
def test_fig07a_draws_no_token_twice(number):
    figure = plots.fig07a_tokens(make_tokens([f"t{n}" for n in range(number)]))
    draw(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        f"t{n}" for n in range(number)
    ]


def test_fig07a_refuses_an_empty_table():
    with pytest.raises(ValueError, match="no token is left to draw; lower min_count"):
        plots.fig07a_tokens(make_tokens([]))


def test_fig07b(random):
    table = pd.DataFrame(
        {"position": np.tile(np.arange(50), 2), "l1_coefficient": np.repeat([0, 0.1], 50)}
    )
    table["mean_active"] = random.random(100) + 0.1
    table.loc[60, "mean_active"] = 0
    figure = plots.fig07b_positions(table)
    draw(figure)
    ax = figure.axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    np.testing.assert_array_equal(lines(ax)["0"].get_xdata(), np.arange(1, 51))
    expected = table["mean_active"][50:].clip(lower=plots.ACTIVE_FLOOR)
    np.testing.assert_allclose(lines(ax)["0.1"].get_ydata(), expected)


def test_fig_passage_colours_by_activity_and_breaks_lines(random):
    active = random.random(40) * 30
    active[[4, 9]] = 0, active.max() + 1
    strings = ["$x", " word", "\n", "", *[f" t{n}" for n in range(36)]]
    figure = plots.fig_passage(pd.DataFrame({"token": strings, "active": active}), columns=30)
    draw(figure)
    ax = figure.axes[0]
    assert [text for text in texts(ax)] == ["$x", " word", "⏎", "", *strings[4:]]
    assert all(patch.get_x() + patch.get_width() <= 30 for patch in ax.patches)
    assert [patch.get_y() for patch in ax.patches[:4]] == [0, 0, 0, 1]
    # Viridis grows lighter all the way, so lightness has to follow activity.
    light = [np.dot(patch.get_facecolor()[:3], (0.3, 0.59, 0.11)) for patch in ax.patches]
    order = np.argsort(np.maximum(active, active[active > 0].min()), kind="stable")
    assert (np.diff(np.array(light)[order]) >= -0.01).all()
    assert light[9] - light[4] > 0.4


@pytest.mark.parametrize("active", [[0.0, 0.0], [2.0, 2.0], [0.25]])
def test_fig_passage_of_equal_tokens(active):
    draw(plots.fig_passage(pd.DataFrame({"token": ["a"] * len(active), "active": active})))


# --- speed of the layer -------------------------------------------------------------------------


# --- neurons


@pytest.mark.parametrize(
    "ends", [(-2.0, 2.0), (0.0, 5.0), (1.5, 40.0)], ids=["signed", "linear", "log"]
)
def test_fig_inspector_shows_values_counts_and_overflow(random, ends):
    strings = [" the", "$x_1$", "\n", "a", "\x00", "\u05e9", *(f" w{n}" for n in range(60))]
    values = random.uniform(*ends, len(strings))
    values[3] = np.nan
    counts = pd.DataFrame(
        random.integers(0, 90, (5, len(strings))).astype(float),
        range(2, 7),
        range(30, 30 + len(strings)),
    )
    counts.iloc[:, 3] = np.nan
    over = counts > 70
    figure = plots.fig_inspector(
        pd.DataFrame({"token": strings, "value": values}), counts, over, "h of a neuron", ends
    )
    draw(figure)
    text, heat = (part.axes[0] for part in figure.subfigs)
    shown = [t.get_text() for t in text.texts]
    assert shown == [plots.visible(s).replace("␣", " ") for s in strings]
    boxes = [patch.get_facecolor() for patch in text.patches]
    assert boxes[3] == (1, 1, 1, 1) and len(set(boxes)) > 20
    (image,) = heat.images
    drawn = image.get_array()
    assert drawn[np.isnan(counts.to_numpy())].mask.all() and drawn.shape == counts.shape
    known = counts.to_numpy()[:, [0, 5, 40]]
    np.testing.assert_array_equal(drawn[:, [0, 5, 40]], np.where(known == 0, 0.5, known))
    marks = {(round(patch.get_x() - 29.5), round(patch.get_y() + 0.5)) for patch in heat.patches}
    assert marks == {(column, row) for row, column in np.argwhere(over.to_numpy())}
    labels = {ax.get_xlabel() for ax in figure.axes} | {ax.get_ylabel() for ax in figure.axes}
    assert labels >= {"h of a neuron", "token", "layer", "active\nneurons"}


def test_fig_specific(random):
    table = pd.DataFrame(
        {
            "layer": 1,
            "neuron": range(30),
            "token": [" $a", "\n", *"bcdefghijklmnopqrstuvwxyz012"],
            "fires": 9,
        }
    )
    table["share"], table["coverage"] = random.random(30), random.random(30)
    figure = plots.fig_specific(table, rows=5)
    draw(figure)
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "1 · 0  ␣$a",
        "1 · 1  ⏎",
        "1 · 2  b",
        "1 · 3  c",
        "1 · 4  d",
    ]
    share, coverage = (points.get_offsets()[:, 0] for points in ax.collections[1:])
    np.testing.assert_allclose(
        [share, coverage], 100 * table[["share", "coverage"]][:5].to_numpy().T
    )
    assert texts(ax) == ["n = 9"] * 5 and len(legend(figure)) == 2
    with pytest.raises(ValueError, match="no neuron fires often enough; lower min_fires"):
        plots.fig_specific(table[:0])


def test_fig_surprise(random):
    bins = pd.DataFrame(
        {
            "surprise": [0.5, 2.0, 7.0],
            "active": [10.0, 20.0, 60.0],
            "q25": [8.0, 15, 30],
            "q75": [12.0, 30, 80],
        }
    )
    rows = [
        (n, of, *np.sort(random.random(3)))
        for of in ("surprise", "next_surprise")
        for n in (0, 1, 2, -1)
    ]
    table = pd.DataFrame(rows, columns=["layer", "of", "low", "spearman", "high"])
    figure = plots.fig_surprise(bins, table)
    draw(figure)
    left, right = figure.axes
    np.testing.assert_array_equal(lines(left)["mean"].get_ydata(), bins["active"])
    assert [label.get_text() for label in right.get_xticklabels()] == ["0", "1", "2", "mean"]
    names = [[text.get_text() for text in shown.get_texts()] for shown in figure.legends]
    assert names == [
        ["middle half", "mean"],
        ["surprise of this token", "surprise of the next token"],
    ]
    assert not any(ax.get_legend() for ax in figure.axes)  # which would stand on the band
    for bars, (_, drawn) in zip(right.containers, table.groupby("of", sort=False), strict=True):
        np.testing.assert_allclose(bars.lines[0].get_ydata().astype(float), drawn["spearman"])
        segments = bars.lines[2][0].get_segments()
        np.testing.assert_allclose(
            [[low[1], high[1]] for low, high in segments], drawn[["low", "high"]]
        )
    draw(plots.fig_surprise(bins, table.assign(low=np.nan, high=np.nan)))


def test_fig_silenced(random):
    table = pd.DataFrame(
        {
            "layer": 2,
            "neuron": range(30),
            "loss_change": random.standard_normal(30),
            "stderr": random.random(30),
        }
    )
    figure = plots.fig_silenced(table, rows=8)
    draw(figure)
    ax = figure.axes[0]
    largest = table.loc[table["loss_change"].abs().nlargest(8).index].sort_values(
        "loss_change", ascending=False
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"2 · {n}" for n in largest["neuron"]
    ]
    drawn = np.concatenate([bars.lines[0].get_xdata() for bars in ax.containers]).astype(float)
    np.testing.assert_allclose(drawn, 1000 * largest["loss_change"])
    spans = [segment[:, 0] for bars in ax.containers for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(np.ptp(spans, axis=1), 2 * 1960 * largest["stderr"])
    draw(plots.fig_silenced(table.assign(stderr=np.nan)))
    with pytest.raises(ValueError, match="no neuron was silenced"):
        plots.fig_silenced(table[:0])


def make_speeds(random, cases, providers=tuple(plots.PROVIDERS), **columns):
    """A table as of `analysis.speedups`, with random speed-ups; cases: (tokens, active, pattern, mode, weight_sets)."""
    table = pd.DataFrame(cases, columns=["tokens", "active", "pattern", "mode", "weight_sets"])
    table = table.merge(pd.DataFrame({"provider": list(providers)}), how="cross").assign(
        hidden_size=2048,
        intermediate_size=5632,
        gated=True,
        dtype="bfloat16",
        device="a GPU",
        **columns,
    )
    return table.assign(speedup=0.2 + 2 * random.random(len(table))).sample(frac=1, random_state=1)


def curves(ax, provider):
    """The curves of a provider, each as a list of points."""
    found = [line for line in ax.get_lines() if line.get_color() == plots.PROVIDERS[provider][0]]
    return sorted(line.get_xydata().tolist() for line in found if line.get_marker() != "|")


def test_ffn_activity(random):
    levels = (3, 29.2, 300)
    cases = [
        (t, a, p, "stream", 1) for t in (131072, 16384) for a in levels for p in ("even", "skewed")
    ]
    table = make_speeds(random, cases)
    crossings = pd.DataFrame(
        [
            ("skewed", 131072, "triton union", 150.4),
            ("skewed", 16384, "triton rowwise", 39.6),
            ("skewed", 16384, "triton union", np.nan),
            ("even", 16384, "triton union", 77.0),
            ("even", 16384, "triton decode", 50.0),  # not drawn, so not marked
        ],
        columns=["pattern", "tokens", "provider", "crossover"],
    )
    figure = plots.ffn_activity(table, crossings)
    draw(figure)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["skewed", "even"]
    assert [sorted(texts(ax)) for ax in figure.axes] == [["150", "40"], ["77"]]
    for ax in figure.axes:
        assert ax.get_xscale() == ax.get_yscale() == "log"
        for provider in ("auto", "triton union", "triton rowwise", "dense eager"):
            rows = table[
                (table["pattern"] == ax.get_title(loc="left")) & (table["provider"] == provider)
            ]
            wanted = [
                r[["active", "speedup"]].to_numpy().tolist()
                for _, r in rows.sort_values("active").groupby("tokens")
            ]
            assert curves(ax, provider) == sorted(wanted)
        assert not curves(ax, "dense")
        marks = [line for line in ax.get_lines() if line.get_marker() == "|"]
        assert [line.get_ydata()[0] for line in marks] == [1] * len(texts(ax))
        assert sorted(f"{line.get_xdata()[0]:.0f}" for line in marks) == sorted(texts(ax))
    assert legend(figure)[-3:] == ["dense torch.compile", "131,072 tokens", "16,384 tokens"]
    assert legend(figure)[:-3] == ["auto", "triton union", "triton rowwise", "dense eager"]
    assert figure.get_suptitle() == "gated layer, 2048 x 5632, bfloat16, a GPU"
    dashed = {
        line.get_linestyle()
        for line in figure.axes[0].get_lines()
        if line.get_color() == plots.BLUE
    }
    assert len(dashed - {"None"}) == 2  # batch sizes differ without colour


def test_ffn_activity_of_what_there_is(random):
    table = make_speeds(
        random, [(64, 29.0, "even", "stream", 1)], ["triton union", "dense torch.compile"]
    )
    figure = plots.ffn_activity(table, analysis.crossovers(table))
    draw(figure)
    assert len(figure.axes) == 1 and legend(figure) == [
        "triton union",
        "dense torch.compile",
        "64 tokens",
    ]
    with pytest.raises(ValueError, match="shows one layer on one device; this table has 0"):
        plots.ffn_activity(table[:0], table)
    with pytest.raises(ValueError, match="shows one layer on one device; this table has 2"):
        plots.ffn_activity(pd.concat([table, table.assign(gated=False)]), table)
    many = make_speeds(random, [(tokens, 29.0, "even", "stream", 1) for tokens in range(1, 5)])
    with pytest.raises(
        ValueError, match="4 batch sizes cannot be told apart in one figure; give at most 3"
    ):
        plots.ffn_activity(many, analysis.crossovers(many))


def make_training(
    random, cases, providers=("triton union", "triton hybrid", "dense eager", "dense torch.compile")
):
    """A table as of `analysis.training_speedups`; cases: (tokens, active, pattern)."""
    table = make_speeds(random, [(*case, "stream", 1) for case in cases], providers).drop(
        columns=["mode", "weight_sets"]
    )
    return table.assign(held_share=10 + 90 * random.random(len(table)))


def test_training_activity(random):
    cases = [(t, a, p) for t in (65536, 16384) for a in (3, 29.2, 300) for p in ("even", "skewed")]
    table = make_training(random, cases)
    crossings = pd.DataFrame(
        [("skewed", 65536, "triton union", 150.4), ("skewed", 16384, "triton hybrid", 39.6)]
        + [
            ("even", 16384, "triton union", np.nan),
            ("even", 65536, "triton rowwise", 50.0),
        ],  # the last is not drawn
        columns=["pattern", "tokens", "provider", "crossover"],
    )
    figure = plots.training_activity(table, crossings)
    draw(figure)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["skewed", "", "even", ""]
    assert [sorted(texts(ax)) for ax in figure.axes] == [["150", "40"], [], [], []]
    for at, ax in enumerate(figure.axes):
        column, pattern, level = (
            ("speedup", "held_share")[at % 2],
            ("skewed", "even")[at // 2],
            (1, 100)[at % 2],
        )
        for provider in ("triton union", "triton hybrid", "dense eager"):
            rows = table[
                (table["pattern"] == pattern) & (table["provider"] == provider)
            ].sort_values("active")
            wanted = [r[["active", column]].to_numpy().tolist() for _, r in rows.groupby("tokens")]
            assert curves(ax, provider) == sorted(wanted)
        baseline = [line for line in ax.get_lines() if line.get_color() == "black"]
        assert [set(line.get_ydata()) for line in baseline] == [{level}]
        assert ax.get_xscale() == "log" and ax.get_ylim()[0] <= level <= ax.get_ylim()[1]
    names = ["triton union", "triton hybrid", "dense eager", "dense torch.compile"]
    assert legend(figure) == [*names, "65,536 tokens", "16,384 tokens"]
    looks = {
        (line.get_color(), line.get_marker())
        for line in figure.axes[0].get_lines()
        if line.get_marker() in "oXv"
    }
    assert len({marker for _, marker in looks}) == 3  # providers differ without colour
    assert (
        figure.get_suptitle() == "gated layer, 2048 x 5632, bfloat16, a GPU; forward and backward"
    )


def test_training_activity_of_what_there_is(random):
    table = make_training(
        random, [(64, 29.0, "recorded a")], ["triton union", "dense torch.compile"]
    )
    figure = plots.training_activity(table, analysis.crossovers(table))
    draw(figure)
    assert len(figure.axes) == 2 and legend(figure) == [
        "triton union",
        "dense torch.compile",
        "64 tokens",
    ]
    with pytest.raises(ValueError, match="shows one layer on one device; this table has 2"):
        plots.training_activity(pd.concat([table, table.assign(device="other")]), table)
    with pytest.raises(ValueError, match="shows one layer on one device; this table has 0"):
        plots.training_activity(table[:0], table)


def test_training_devices(random):
    levels = (3.1, 28.9, 302.0)
    table = make_training(random, [(64, active, "skewed") for active in levels])
    other = make_training(random, [(64, active, "skewed") for active in (3.1, 29.1)]).assign(
        device="B"
    )
    figure = plots.training_devices(pd.concat([table, other]))
    draw(figure)
    for ax, column in zip(figure.axes, ("speedup", "held_share"), strict=True):
        assert [label.get_text() for label in ax.get_xticklabels()] == ["3.1", "29", "300"]
        assert len(ax.containers) == 2  # a group a level, in it a bar a device
        for bars, rows, hatch in zip(ax.containers, (other, table), ("", "////"), strict=True):
            rows = rows[rows["provider"] == "triton union"].sort_values("active")
            expected = (
                100 * (rows["speedup"] - 1) if column == "speedup" else rows[column] - 100
            ).tolist()
            found = sorted((bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars)
            assert [height for _, height in found] == pytest.approx(expected)
            assert [round(x) for x, _ in found] == list(range(len(rows)))
            assert {bar.get_hatch() for bar in bars} == {hatch}  # devices differ without colour
        places = [bar.get_x() for bars in ax.containers for bar in bars]
        assert len(set(np.round(places, 3))) == 5
        assert sorted(texts(ax)) == sorted(
            f"{bar.get_height():+.0f}" for bars in ax.containers for bar in bars
        )
    assert legend(figure) == ["B", "a GPU"]
    assert "64 tokens, skewed; triton union against dense torch.compile" in figure.get_suptitle()
    draw(plots.training_devices(table))
    draw(plots.training_devices(table, "triton hybrid"))


def test_training_devices_refuses_what_it_cannot_show(random):
    table = make_training(random, [(64, 29.0, "skewed")])
    with pytest.raises(
        ValueError, match="shows one layer, pattern and batch size; this table has 2"
    ):
        plots.training_devices(pd.concat([table, table.assign(tokens=128)]))
    with pytest.raises(
        ValueError, match="shows one layer, pattern and batch size; this table has 0"
    ):
        plots.training_devices(table, "triton rowwise")
    with pytest.raises(
        ValueError, match="5 devices cannot be told apart in one figure; give at most 4"
    ):
        plots.training_devices(pd.concat([table.assign(device=name) for name in "abcde"]))


def test_ffn_tokens(random):
    cases = [
        (1, 178.0, "graph", 8),
        (1, 178.0, "stream", 1),
        (1000, 30.0, "graph", 8),
        (1024, 29.0, "stream", 1),
    ]
    cases += [(131072, 23.5, "stream", 1), (16384, 23.0, "stream", 1)]
    table = make_speeds(random, [(t, a, "skewed", mode, sets) for t, a, mode, sets in cases])
    figure = plots.ffn_tokens(table, 29)
    draw(figure)
    ax = figure.axes[0]
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["1\n(178)", "1,000", "1k", "16k\n(23)", "128k"]
    assert ax.get_xlabel() == "tokens in the batch (in brackets: active, where it is far from 29)"
    for provider in set(plots.PROVIDERS) - {"dense torch.compile"}:
        rows = table[table["provider"] == provider].sort_values("tokens")
        wanted = [r[["tokens", "speedup"]].to_numpy().tolist() for _, r in rows.groupby("mode")]
        assert curves(ax, provider) == sorted(wanted)
    ways = ["one call after the other", "CUDA graph, 8 sets of weights in turn"]
    assert legend(figure) == [*plots.PROVIDERS, *ways]
    assert (
        ax.get_title(loc="left") == "gated layer, 2048 x 5632, bfloat16, a GPU; skewed, 29 active"
    )
    near = plots.ffn_tokens(table[table["tokens"] == 1024], 29)
    assert near.axes[0].get_xlabel() == "tokens in the batch"
    assert legend(near)[-1] == "one call after the other"
    with pytest.raises(
        ValueError, match="one figure shows one pattern; this table has even, skewed"
    ):
        plots.ffn_tokens(pd.concat([table, table.assign(pattern="even")]), 29)


def make_kernels(random):
    case = make_speeds(
        random, [(131072, 29.4, "skewed", "stream", 1)], ["triton union", "dense torch.compile"]
    )
    kernels = pd.DataFrame(
        [
            ("gate", 5.0, 640.0, 1600.0, 4.0),
            ("lists", 0.04, 0.0, 0.0, 0.02),
            ("other", 0.1, *[np.nan] * 3),
        ]
        + [("up", 2.0, 640.0, 1500.0, 3.0), ("down", 1.0, 4.0, 2.0, 0.5)],
        columns=["kernel", "ms", "tflops", "intensity", "floor"],
    )
    table = case.merge(kernels, how="cross").assign(peak=800.0, bandwidth=4000.0)
    return table.assign(share=table["floor"] / table["ms"])


def test_ffn_roofline(random):
    table = make_kernels(random)
    figure = plots.ffn_roofline(table)
    draw(figure)
    left, right = figure.axes
    roof, *points = left.get_lines()
    x, y = roof.get_xdata(), roof.get_ydata()
    assert (x[1], y[1], y[2]) == (200, 800, 800) and y[0] == pytest.approx(4 * x[0])
    places = sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in points)
    assert places == [(2, 4)] * 2 + [(1500, 640)] * 2 + [(1600, 640)] * 2
    # The sparse path comes first; kernels that lie together share a label.
    assert texts(left) == ["matmul 800 TFLOP/s", "copy 4000 GB/s", "1, 4, 6, 9", "5, 10"]
    names = ["gate", "lists", "other", "up", "down"]
    assert [label.get_text() for label in right.get_yticklabels()] == [
        f"{n}  {i + 1}" for i, n in enumerate(2 * names)
    ]
    bars = [bar.get_width() for bar in right.patches]
    assert bars[:10] == 2 * [5, 0.04, 0.1, 2, 1]
    assert bars[10:] == 2 * [4, 0.02, 0, 2, 0.5]  # no floor beyond the time
    shares = ["5 ms, 80%", "0.04 ms, 50%", "0.1 ms, floor not known", "2 ms, 150%", "1 ms, 50%"]
    assert texts(right) == 2 * shares
    assert legend(figure) == ["triton union", "dense torch.compile"]
    assert figure.get_suptitle().endswith("a GPU; 131,072 tokens, skewed, 29 active")


def test_ffn_roofline_of_what_there_is(random):
    table = make_kernels(random)
    draw(plots.ffn_roofline(table[table["kernel"] == "other"]))  # nothing known: a roof and a bar
    with pytest.raises(ValueError, match="one figure shows one case; this table has 2"):
        plots.ffn_roofline(pd.concat([table, table.assign(tokens=64)]))
    with pytest.raises(ValueError, match="shows one layer on one device; this table has 0"):
        plots.ffn_roofline(table[:0])


def levels_of(*records):
    return analysis.by_level(analysis.seven_tasks(analysis.evaluations(records)))


def test_table6_tasks():
    table = levels_of(
        evaluation("a", gain=0.1),
        evaluation("b", l1=1e-3),
        evaluation("c", gain=0.2, parameters=40_000_000),
    )
    figure = plots.table6_tasks(table, analysis.paper_tasks(results.paper()))
    draw(figure)
    assert [ax.get_title() for ax in figure.axes] == [title for title, _ in analysis.TASKS.values()]
    for ax, task in zip(figure.axes, analysis.TASKS, strict=True):
        heights = {round(float(y), 3) for line in ax.get_lines() for y in line.get_ydata()}
        chance = 100 * CHANCE[task]
        assert {round(chance + more, 3) for more in (0, 10, 20)} <= heights
        (dashed,) = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
        assert list(dashed.get_ydata()) == pytest.approx([chance, chance])
        # one dense model of two sizes, filled; the sparse one is near chance, hollow
        dots = [
            line for line in ax.get_lines() if line.get_marker() == "o" and len(line.get_xdata())
        ]
        filled = {len(dot.get_xdata()) for dot in dots if dot.get_markerfacecolor() != "white"}
        hollow = [dot for dot in dots if dot.get_markerfacecolor() == "white"]
        assert filled == {2} and [len(dot.get_xdata()) for dot in hollow] == [1]
        assert hollow[0].get_ydata()[0] == pytest.approx(chance)
        bars = [part for container in ax.containers for part in container[2]]
        assert sorted(len(part.get_segments()) for part in bars) == [1, 2]
        low, high = bars[-1].get_segments()[0][:, 1]
        assert high - low == pytest.approx(2.0)
    squares = [line for line in figure.axes[-1].get_lines() if line.get_marker() == "s"]
    assert [list(line.get_ydata()) for line in squares] == [
        pytest.approx([40.4, 44.6, 46.4, 49.1]),
        pytest.approx([40.4, 44.7, 46.2, 48.8]),
    ]
    expected = [
        "ours, L1 = 0",
        "ours, L1 = 1e-3",
        "paper, L1 = 0",
        "paper, L1 = 2e-5",
        "not above chance",
        "chance",
    ]
    assert legend(figure) == expected


def test_fig03_accuracy():
    records = [
        evaluation("a", gain=0.1),
        evaluation("b", l1=1e-2, gain=0.08),
        evaluation("c", l1=1e-3),
    ]
    more = {"parameters": 40_000_000, "training_tokens": None}
    records += [evaluation(f"d{l1}", l1=l1, **more) for l1 in (1e-3, 3e-5, 0, 1e-5)]
    figure = plots.fig03_accuracy(
        analysis.several_levels(levels_of(*records)), analysis.paper_levels(results.paper())
    )
    draw(figure)
    small, large, printed = figure.axes
    titles = ["2 M parameters,\n1 M tokens", "40 M parameters", "the paper, 1.5 B"]
    assert [ax.get_title() for ax in figure.axes] == titles
    ticks = [[tick.get_text() for tick in ax.get_xticklabels()] for ax in (small, large)]
    assert ticks == [["0", "1e-3", "1e-2"], ["0", "1e-5", "3e-5", "1e-3"]]
    for ax, heights in (
        (small, [41.43, 31.43, 39.43]),
        (large, 4 * [31.43]),
        (printed, [46.36, 46.2, 44.83]),
    ):
        assert list(ax.collections[0].get_offsets()[:, 1]) == pytest.approx(heights)
        (dashed,) = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
        assert list(dashed.get_ydata()) == pytest.approx([31.43, 31.43])
        bars = [part.get_segments() for container in ax.containers for part in container[2]]
        assert [len(segments) for segments in bars] == ([] if ax is printed else [len(heights)])
    assert texts(printed) == ["chance 31.4"] and texts(small) == []


# --- whole models -------------------------------------------------------------------------------


def heights(ax):
    return [round(bar.get_height(), 6) for bar in ax.patches]


def make_models():
    rows = [
        model_rows([10.0, 8.0, 8.0], energy=[10.0, 7.0, 7.0]),
        model_rows([10.0, 20.0, 10.0], active=911.0),
    ]
    return analysis.model_speedups(pd.concat(rows))


def test_fig04_levels():
    figure = plots.fig04_levels(make_models())
    draw(figure)
    left, right = figure.axes
    assert heights(left) == [-50, 25, 0, 25] and heights(right) == [30, 30]  # sparse, then auto
    assert [label.get_text() for label in left.get_xticklabels()] == ["911", "29"]
    assert texts(left) == ["-50", "+25", "+0", "+25"] and legend(figure) == ["sparse", "auto"]
    title = "1.5b, 28 layers, NVIDIA H200; random weights, imposed activity; 64 x 2048 tokens"
    assert figure.get_suptitle() == title
    with pytest.raises(ValueError, match="shows one model on one device; this table has 2"):
        plots.fig04_levels(pd.concat([make_models(), make_models().assign(model="2b")]))


def test_fig05_levels():
    times = {"dense torch.compile": 6.0, "triton union torch.compile": 4.0}
    figure = plots.fig05_levels(analysis.step_speedups(step_rows(times, peak=[100, 72])))
    draw(figure)
    assert [heights(ax) for ax in figure.axes] == [[50], [28]] and legend(figure) == ["sparse"]
    assert figure.get_suptitle().endswith("steps of 4 x 2048 tokens")


def test_fig06_contributions():
    rows = model_layer_rows(10.0, [9.0, 7.0, 12.0], [50.0, 10.0, 0.0], auto=[9.0, 7.0, 10.0])
    table = analysis.layer_contributions(rows)
    figure = plots.fig06_contributions(table.sample(frac=1, random_state=1))
    draw(figure)
    top, bottom = figure.axes
    assert heights(top) == [50, 10, plots.ACTIVE_FLOOR] and heights(bottom) == [1, 3, -2]
    assert [tuple(place) for place in bottom.collections[0].get_offsets()] == [
        (0, 1),
        (1, 3),
        (2, 0),
    ]
    r = np.corrcoef([50, 10, 0], [1, 3, -2])[0, 1]
    assert [text.get_text() for text in bottom.get_legend().get_texts()] == [
        "auto",
        f"sparse (r = {r:.3f})",
    ]
    assert "29 active" in figure.get_suptitle() and "imposed" in figure.get_suptitle()
    with pytest.raises(ValueError, match="shows one level of activity; this table has 2"):
        plots.fig06_contributions(pd.concat([table, table.assign(level=3.0)]))


def test_model_parts():
    parts = {"attention": 3.0, "norms, rotary, residuals": 1.0, "gate": 4.0, "up and down": 8.0}
    table = analysis.layer_parts(part_rows(parts, parts | {"up and down": 2.0}))
    figure = plots.model_parts(table)
    draw(figure)
    (ax,) = figure.axes
    assert [bar.get_width() for bar in ax.patches] == [3, 3, 1, 1, 4, 4, 8, 2]
    assert [bar.get_x() for bar in ax.patches] == [0, 0, 3, 3, 4, 4, 8, 8]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["dense", "sparse"] and legend(
        figure
    ) == list(parts)
    assert ax.get_lines()[0].get_xdata()[0] == 8
    assert texts(ax)[-3:] == ["16 ms", "10 ms, +60%", "dense without up and down: +100%"]
    assert "64 x 2048 tokens, 24 active" in figure.get_suptitle()
    with pytest.raises(ValueError, match="shows batches of one kind, each once"):
        plots.model_parts(pd.concat([table, table.assign(tokens=table["batch"])]))


def test_model_parts_of_decoding():
    parts = {"attention": 0.03, "projections": 0.01, "gate": 0.04, "up and down": 0.08}
    rows = [
        part_rows(
            parts,
            parts | {"gate": 0.05, "up and down": 0.01 * batch},
            batch=batch,
            tokens=batch,
            context=512,
        )
        for batch in (4, 1)
    ]
    table = analysis.layer_parts(pd.concat(rows, ignore_index=True))
    figure = plots.model_parts(table)
    draw(figure)
    (ax,) = figure.axes
    names = ["1 document, dense", "1 document, sparse", "4 documents, dense", "4 documents, sparse"]
    assert [label.get_text() for label in ax.get_yticklabels()] == names
    assert np.allclose([bar.get_width() for bar in ax.patches[-4:]], [80, 10, 80, 40])
    assert np.allclose([line.get_xdata()[0] for line in ax.get_lines()], 80)
    assert [text for text in texts(ax) if "µs" in text] == [
        "160 µs",
        "100 µs, +60%",
        "160 µs",
        "130 µs, +23%",
    ]
    assert (
        "a token each behind 512 tokens" in figure.get_suptitle()
        and ax.get_xlabel() == "µs of one decoder layer"
    )


def test_model_decode():
    rows = [decode_rows([4.0, 2.0, 2.0]), decode_rows([8.0, 10.0, 8.0], batch=32)]
    auto_is_dense = (rows[1]["provider"] == "auto torch.compile", "path")
    rows[1].loc[auto_is_dense] = "dense 28"
    figure = plots.model_decode(analysis.decode_speedups(pd.concat(rows)))
    draw(figure)
    (ax,) = figure.axes
    assert [list(line.get_ydata()) for line in ax.get_lines()[:2]] == [
        [100, pytest.approx(-20)],
        [100, 0],
    ]
    assert texts(ax) == ["+100%", "-20%", "auto is dense"] and legend(figure) == ["sparse", "auto"]
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == ["1\n29 active\ndense 250 tokens/s", "32\n29 active\ndense 4,000 tokens/s"]
    tuned = decode_rows([3.0, 2.0, 2.0])
    tuned["provider"] += " tuned"
    figure = plots.model_decode(analysis.decode_speedups(pd.concat([*rows, tuned])))
    draw(figure)
    (ax,) = figure.axes
    assert texts(ax) == ["+100%", "-20%", "auto is dense", "+50%"]
    assert legend(figure) == ["sparse", "auto", "sparse, both sides tuned"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ticks
    with pytest.raises(ValueError, match="shows one length of context; this table has 2"):
        plots.model_decode(analysis.decode_speedups(pd.concat([*rows, rows[0].assign(context=64)])))


def test_table1_scale():
    models = analysis.model_speedups(model_rows([10.0, 9.0, 8.0], model="2b", active=24.0))
    table = analysis.scale_table(results.paper(), models, pd.DataFrame())
    figure = plots.table1_scale(table)
    draw(figure)
    left, right = figure.axes  # energy and training were not measured
    assert heights(left) == [410, 185, 119, 87.8, 480, 219, 141, 106]
    assert (
        heights(right)[3::4] == [pytest.approx(13107.2), pytest.approx(16384)]
        and texts(right)[0] == "+25.0%"
    )
    assert texts(right)[1:] == [" not measured"] * 3
    assert texts(left) == ["+17.0%", "+18.1%", "+18.8%", "+20.5%"]
    assert (
        left.get_title(loc="left") == "paper, H100 PCIe"
        and right.get_title(loc="left") == "ours, NVIDIA H200, imposed activity"
    )
    with pytest.raises(ValueError, match="none of the quantities of Table 1 was measured"):
        plots.table1_scale(analysis.scale_table(results.paper(), pd.DataFrame(), pd.DataFrame()))


def test_overview():
    activity = pd.DataFrame({"place": [0, 0, 1], "token": [" a", " a", "b"], "neuron": [3, 7, 2]})
    kernels = [("dense", "cublas matmul", 9.0), ("dense", "relu_times_kernel", 1.0)]
    times = {"gate_bits_kernel": 3.0, "lists_kernel": 0.5, "up_kernel": 1.5, "down_kernel": 1.0}
    kernels += [("triton union", name, ms) for name, ms in times.items()]
    kernels = pd.DataFrame(kernels, columns=["provider", "kernel", "ms"])
    models = pd.DataFrame(
        [
            (quantity, model, 10.0 + n, 5.0)
            for quantity in ("forward speed", "training speed")
            for n, model in enumerate("ab")
        ],
        columns=["quantity", "model", "change", "paper_change"],
    ).assign(device="NVIDIA B1", paper_device="H1")
    figure = plots.overview(activity, 10, kernels, models)
    draw(figure)
    tokens, layer, gains = figure.axes
    assert tokens.lines[0].get_xdata().tolist() == [3, 7, 2] and tokens.lines[
        0
    ].get_ydata().tolist() == [0, 0, 1]
    assert [label.get_text() for label in tokens.get_yticklabels()] == [
        "a",
        "b",
    ] and "15.0%" in tokens.get_title()
    assert heights(layer) == [10, 3, 2, 1] and texts(layer) == ["10.0 ms", "6.0 ms"]
    assert [line.get_ydata().tolist() for line in gains.lines[:4]] == [[10, 11], [5, 5]] * 2
    names = [text.get_text() for text in gains.get_legend().get_texts()]
    assert (
        names == ["forward pass", "training step", "ours, B1", "paper, H1"]
        and gains.get_ylim()[1] > 11
    )


# --- saving -------------------------------------------------------------------------------------

SAVE = """
import sys
import pandas as pd
from twell import plots
table = pd.DataFrame({"token": ["a", "b$", "\\u00e9"], "count": [20, 30, 40], "mean_active": [1.0, 2.0, 3.0]})
plots.save(plots.fig07a_tokens(table), sys.argv[1], [], {}, "live")
"""


def test_save_writes_the_same_bytes_in_another_process(tmp_path):
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SAVE, str(tmp_path / seed / "fig")],
            env={"PYTHONHASHSEED": seed, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            cwd=results.root(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    for suffix in ("png", "pdf", "json"):
        first, second = (tmp_path / seed / f"fig.{suffix}" for seed in "12")
        assert first.read_bytes() == second.read_bytes(), suffix
    pdf = (tmp_path / "1" / "fig.pdf").read_bytes()
    assert b"CreationDate" not in pdf and b"/CIDFontType2" in pdf and b"/Type3" not in pdf


def test_save_says_where_the_numbers_came_from(tmp_path):
    data = tmp_path / "log.csv"
    data.write_text("numbers")
    figure = plots.fig06_layers(make_layers([1.0, 2.0]), "title")
    path = plots.save(
        figure, tmp_path / "new" / "fig.v2", [data], {"n": [1, 2]}, "recorded", "a GPU"
    )
    assert path == tmp_path / "new" / "fig.v2.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "fig.v2.json",
        "fig.v2.pdf",
        "fig.v2.png",
    ]
    origin = json.loads(path.with_suffix(".json").read_text())
    (name, digest), *rest = origin.pop("inputs").items()
    assert not rest and (results.root() / name).resolve() == data
    assert digest == hashlib.sha256(b"numbers").hexdigest()
    assert origin == {
        "source": "recorded",
        "device": "a GPU",
        "parameters": {"n": [1, 2]},
        "commit": results.source_commit(plots.MODULES),
        "versions": {name: results.versions()[name] for name in plots.DRAWN_WITH},
    }


def test_few_colours_look_like_all(tmp_path):
    figure = plots.fig06_layers(make_layers([1.0, 2.0, 30.0]), "title")
    path = plots.save(figure, tmp_path / "fig", [], {}, "live")
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=200)
    with Image.open(path) as few, Image.open(whole) as drawn:
        assert few.mode == "P" and few.size == drawn.size
        assert few.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        apart = np.abs(np.asarray(few.convert("RGB"), int) - np.asarray(drawn.convert("RGB"), int))
    assert apart.mean() < 0.1 and (apart > 64).mean() < 1e-4
    assert path.stat().st_size < 0.6 * len(whole.getvalue())
    shades = Figure(figsize=(1, 1))
    shades.figimage(np.random.default_rng().random((200, 200, 3)))
    with Image.open(plots.save(shades, tmp_path / "shades", [], {}, "live")) as all_of_them:
        assert all_of_them.mode != "P" and all_of_them.getcolors(8192) is None


def test_save_overwrites_and_keeps_the_old_figure_when_it_fails(tmp_path):
    figure = plots.fig06_layers(make_layers([1.0, 2.0]), "title")
    path = plots.save(figure, tmp_path / "fig", [], {}, "live")
    before = path.read_bytes()

    class Broken(Figure):
        def savefig(self, buffer, **options):
            buffer.write(b"half a fig")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        plots.save(Broken(), tmp_path / "fig", [], {}, "live")
    assert path.read_bytes() == before
    plots.save(plots.fig06_layers(make_layers([7.0]), "other"), tmp_path / "fig", [], {}, "live")
    assert path.read_bytes() != before
    assert len(list(tmp_path.iterdir())) == 3


def test_save_refuses_an_unknown_source(tmp_path):
    with pytest.raises(ValueError, match="source is 'measured'; use 'live', 'recorded' or 'paper'"):
        plots.save(Figure(), tmp_path / "fig", [], {}, "measured")
    assert not list(tmp_path.iterdir())
