"""Lessons run with several parameters, draw readable figures, and match their pages."""

import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from scripts import lessons
from twell import results

ROOT = results.root()
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# These run a tiny model here, in place of the model that ships.
TINY = "04_tokens", "06_downstream", "07_inspect", "11_one_word"
# These compute with a model, so their pages differ a little from machine to machine.
MODEL = "01_format", *TINY
DRAWN = re.compile(r"^!\[.*\]\((?:.*/)?(\w+)\.png\)", re.M)  # of a page
SMALL = {"tokens": 512, "silenced_tokens": 64, "silenced_neurons": 3, "sparse_items": 3}
SMALL |= {"word": None, "number_tokens": 2048}
SLACK = 8  # pixels by which boxes, which are larger than their letters, may overlap


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A folder for figures, in parameters of every notebook. Pictures are not rendered."""

    def blank(figure, file, format, **options):
        Image.new("RGB", (1, 1)).save(file, format)

    monkeypatch.setattr(Figure, "savefig", blank)
    folder = tmp_path / "figures"
    return {"figures": str(folder), "live_figures": str(folder), "folder": folder}


def texts(figure):
    """The visible texts of a drawn figure and their boxes, without ticks outside the limits."""
    ticks = [tick for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)
             for tick in [*axis.majorTicks, *axis.minorTicks]]  # fmt: skip
    hidden = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    every = [text for text in figure.findobj(Text) if id(text) not in hidden]
    every = [text for text in every if text.get_visible() and text.get_text().strip()]
    renderer = FigureCanvasAgg(figure).get_renderer()  # else each text makes one
    return [(text.get_text(), text.get_window_extent(renderer)) for text in every]


def assert_readable(figure):
    """No text lies on another or leaves the canvas, and data have labelled axes."""
    figure.set_dpi(200)
    figure.draw_without_rendering()
    shown = [ax for ax in figure.axes if ax.axison and ax.has_data()]
    assert not shown or any(ax.get_xlabel() or ax.get_ylabel() for ax in shown)
    boxes, canvas = texts(figure), figure.bbox
    left, bottom, right, top = np.array([box.extents for _, box in boxes], "f4").T
    inside = (left > -SLACK) & (bottom > -SLACK)
    inside &= (right < canvas.x1 + SLACK) & (top < canvas.y1 + SLACK)
    assert inside.all(), f"{boxes[int(np.argmin(inside))][0]!r} leaves the canvas"
    across = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    down = np.minimum.outer(top, top) - np.maximum.outer(bottom, bottom)
    over = np.argwhere(np.triu(np.minimum(across, down) > SLACK, 1))
    assert not len(over), [boxes[number][0] for number in over[0]]


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "00_paper"])
def test_lessons_draw_the_tracked_figures(name, figures, model):
    given = SMALL | {"model": str(model)} if name in TINY else {}
    cells, _ = lessons.run(NOTEBOOKS[name], figures | given)
    page = (lessons.PAGES / f"{name}.md").read_text(encoding="utf-8")
    drawn = [cell.value.get_label() for cell in cells if isinstance(cell.value, Figure)]
    assert drawn == DRAWN.findall(page)
    assert {file.stem for file in figures["folder"].glob("*.png")} == set(drawn)
    for cell in cells:
        if isinstance(cell.value, Figure):
            assert_readable(cell.value)
    if name in ("07_inspect", "11_one_word"):
        assert any(lessons.WIDGET in cell.shown for cell in cells)
        assert len([*figures["folder"].glob("*.html")]) == 1
    if name not in MODEL:
        assert page == lessons.page(name, cells), "write the pages again: make lessons"
    for block in lessons.page(name, cells, outputs=False).split("\n\n"):
        assert block in page, "write the pages again: make lessons"


# What "Try it" proposes as other parameters.
TRY = {
    "00_paper": {"verdict": "contradicted"},
    "01_format": {"token": 0, "layer": 5},
    "03_layerwise": {"aggregate": "data/checkpoints/twell-6m/aggregate.npz"},
    "05_speedup": {"widths": [4096, 14336], "level": 73},
    "08_models": {"trained_model": "twell-6m"},
    "09_training_choices": {"family": "85m-50m-l1-*-seed-0"},
    "11_one_word": {"word": " United"},
    "12_pretrained": {"relufied": "relufy-0.0*"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRY)
def test_what_a_lesson_proposes_to_try_runs(name):
    cells, names = lessons.run(NOTEBOOKS[name], TRY[name])
    assert {key: names[key] for key in TRY[name]} == TRY[name]
    assert any(cell.shown for cell in cells)
