"""Lessons run with several parameters, draw the tracked figures, and match their pages."""

import re

import pytest
from matplotlib.figure import Figure
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
SMALL |= {"word": None}


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A folder for figures, in parameters of every notebook. Pictures are not rendered."""

    def blank(figure, file, format, **options):
        Image.new("RGB", (1, 1)).save(file, format)

    monkeypatch.setattr(Figure, "savefig", blank)
    folder = tmp_path / "figures"
    return {"figures": str(folder), "live_figures": str(folder), "folder": folder}


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "00_paper"])
def test_lessons_draw_the_tracked_figures(name, figures, model):
    given = SMALL | {"model": str(model)} if name in TINY else {}
    cells, _ = lessons.run(NOTEBOOKS[name], figures | given)
    page = (lessons.PAGES / f"{name}.md").read_text(encoding="utf-8")
    drawn = [cell.value.get_label() for cell in cells if isinstance(cell.value, Figure)]
    assert drawn == DRAWN.findall(page)
    assert {file.stem for file in figures["folder"].glob("*.png")} == set(drawn)
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
