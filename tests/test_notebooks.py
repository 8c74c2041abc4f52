"""Lessons run with several parameters, draw readable figures, and match their pages."""

import ast
import re
from itertools import combinations

import nbformat
import papermill
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from scripts import lessons
from study.plots import base
from twell import results

ROOT = results.root()
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# These run a tiny model here, in place of the model that ships.
TINY = "04_tokens", "06_downstream", "07_inspect", "10_one_word"
# These compute with a model, so their pages differ a little from machine to machine.
MODEL = "01_format", *TINY
DRAWN = re.compile(r"^!\[.*\]\((?:.*/)?(\w+)\.png\)", re.M)  # of a page
SMALL = {"tokens": 512, "silenced_tokens": 64, "silenced_neurons": 3, "sparse_items": 3}
SMALL |= {"word": None, "number_tokens": 2048}
SLACK = 8  # pixels by which boxes, which are larger than their letters, may overlap


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A folder for figures, in parameters of every notebook. Pictures are not rendered."""
    monkeypatch.setattr(base, "png", lambda figure: b"")
    return {"figures": str(tmp_path), "live_figures": str(tmp_path), "folder": tmp_path}


def texts(figure):
    """The visible texts of a drawn figure and their boxes, without ticks outside the limits."""
    hidden = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval()) if axis.axes.axison else (1, 0)
        out = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
        hidden |= {label for tick in out for label in (tick.label1, tick.label2)}
    every = [text for text in figure.findobj(Text) if text not in hidden and text.get_visible()]
    every = [text for text in every if text.get_text().strip()]
    renderer = FigureCanvasAgg(figure).get_renderer()  # else each text makes one
    return [(text.get_text(), text.get_window_extent(renderer)) for text in every]


def assert_readable(figure):
    """No text lies on another or leaves the canvas, and data have labelled axes."""
    figure.set_dpi(200)
    figure.draw_without_rendering()
    shown = [ax for ax in figure.axes if ax.axison and ax.has_data()]
    assert not shown or any(ax.get_xlabel() or ax.get_ylabel() for ax in shown)
    boxes = [(text, box.padded(-SLACK / 2)) for text, box in texts(figure)]
    outside = [text for text, box in boxes if not all(map(figure.bbox.contains, *box.corners().T))]
    over = [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]
    assert not outside and not over


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "00_paper"])
def test_lessons_draw_the_tracked_figures(name, figures, model):
    given = SMALL | {"model": str(model)} if name in TINY else {}
    cells, _ = lessons.run(NOTEBOOKS[name], figures | given)
    page = (lessons.PAGES / f"{name}.md").read_text(encoding="utf-8")
    shown = [cell.value for cell in cells if isinstance(cell.value, Figure)]
    drawn = [figure.get_label() for figure in shown]
    assert drawn == DRAWN.findall(page)
    assert {file.stem for file in figures["folder"].glob("*.png")} == set(drawn)
    for figure in shown:
        assert_readable(figure)
    widgets = sum(lessons.WIDGET in cell.shown for cell in cells)
    assert widgets == len([*figures["folder"].glob("*.html")]) == name.startswith(("07", "10"))
    if name not in MODEL:
        assert page == lessons.page(name, cells), "write the pages again: make lessons"
    for block in lessons.page(name, cells, outputs=False).split("\n\n"):
        assert block in page, "write the pages again: make lessons"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_papermill_lists_every_parameter(name):
    (cell,) = [one for one in nbformat.read(NOTEBOOKS[name], 4).cells if "tags" in one.metadata]
    listed = papermill.inspect_notebook(NOTEBOOKS[name]).values()
    defaults = {one["name"]: ast.literal_eval(one["default"]) for one in listed}
    exec(cell.source, names := {})
    assert defaults == {name: names[name] for name in names.keys() - {"__builtins__"}}


# What "Try it" proposes as other parameters.
TRY = {
    "00_paper": {"verdict": "contradicted"},
    "01_format": {"token": 0, "layer": 5},
    "03_layerwise": {"aggregate": "data/checkpoints/twell-6m/aggregate.npz"},
    "05_speedup": {"widths": [4096, 14336], "level": 73},
    "08_models": {"trained_model": "twell-6m"},
    "09_training_choices": {"family": "85m-50m-l1-*-seed-0"},
    "10_one_word": {"word": " United"},
    "11_pretrained": {"relufied": "relufy-0.0*"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRY)
def test_what_a_lesson_proposes_to_try_runs(name):
    _, names = lessons.run(NOTEBOOKS[name], TRY[name])
    assert {key: names[key] for key in TRY[name]} == TRY[name]
