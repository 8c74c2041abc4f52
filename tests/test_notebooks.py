"""Lessons draw the tracked figures from what is recorded, and name what is missing."""

import contextlib
import dataclasses
import logging
import shutil
import warnings
from itertools import combinations

import nbformat
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from tests.pages import script
from twell import measure, results
from twell.trace import aggregate_run, trace_validation
from twell.train import train

ROOT = results.root()
LESSONS = script("lessons")
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
FIGURES = {
    "00_paper": "",
    "01_format": "fig01_formats fig01_bytes",
    "02_sparsity": "fig02_training_curves fig03_frontier over_tokens"
    " fig09_activity_over_training fig08_remedies",
    "03_layerwise": "fig06_layers",
    "04_tokens": "fig07a_tokens fig07b_positions fig07_passage",
    "05_speedup": "ffn_activity ffn_tokens ffn_training fp8_quality",
    "06_downstream": "paired_tasks",
    "07_inspect": "inspect_specific inspect_surprise inspect_silenced inspect_passage",
    "08_models": "table1_scale overview fig04_levels fig05_levels fig06_contributions"
    " model_parts model_decode",
    "09_training_choices": "scale_activity race",
    "10_clusters": "",
    "11_one_word": "around_word",
    "12_pretrained": "relufied_frontier",
}
# These compute with a model, so their pages differ a little from machine to machine.
MODEL = "01_format", "04_tokens", "06_downstream", "07_inspect", "11_one_word"
# They run a tiny model here, in place of the model that ships.
TINY = "06_downstream", "07_inspect", "11_one_word"
LIVELY = "02_sparsity", "03_layerwise", "04_tokens", "07_inspect"
WIDGETS = {"07_inspect": "inspector", "11_one_word": "one_word"}
SMALL = {"tokens": 512, "silenced_tokens": 64, "silenced_neurons": 3, "sparse_items": 3}
SMALL |= {"word": None}
UNHEARD = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning
SLOW = pytest.mark.slow
SLACK = 8  # pixels by which boxes, which are larger than their letters, may overlap


def execute(name, **given):
    """Run a lesson in this process; return its cells and its names."""
    return LESSONS.run(NOTEBOOKS[name], given)


def figures_of(cells):
    return [cell.value.get_label() for cell in cells if isinstance(cell.value, Figure)]


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A folder for figures, in parameters of every notebook. Pictures are not rendered."""

    def blank(figure, file, format, **options):
        Image.new("RGB", (1, 1)).save(file, format)

    monkeypatch.setattr(Figure, "savefig", blank)
    folder = tmp_path / "figures"
    return {"figures": str(folder), "live_figures": str(folder), "folder": folder}


@pytest.fixture(scope="module")
def model(tiny_run, tmp_path_factory):
    """A small model with the aggregate that the inspector needs."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_run, folder)
    aggregate_run(folder).save(folder / "aggregate.npz")
    return folder


@contextlib.contextmanager
def in_silence(capsys):
    """Fail where a kernel would show a warning, or anything else on its error stream."""
    messages, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in (None, "transformers", "lm_eval")]
    for logger in loggers:
        logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert [str(one.message) for one in caught if not issubclass(one.category, UNHEARD)] == []
    assert messages == [] and capsys.readouterr().err == ""


def texts(figure):
    """The visible texts of a drawn figure and their boxes, without ticks outside the limits."""
    ticks = [tick for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)
             for tick in [*axis.majorTicks, *axis.minorTicks]]  # fmt: skip
    hidden = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    every = [text for text in figure.findobj(Text) if id(text) not in hidden]
    every = [text for text in every if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in every]


def assert_readable(figure):
    """No text lies on another or leaves the canvas."""
    figure.set_dpi(200)
    figure.draw_without_rendering()
    boxes, canvas = texts(figure), figure.bbox
    for text, box in boxes:
        assert box.x0 > -SLACK and box.x1 < canvas.x1 + SLACK, f"{text!r} leaves the canvas"
        assert box.y0 > -SLACK and box.y1 < canvas.y1 + SLACK, f"{text!r} leaves the canvas"
    for (one, box), (other, second) in combinations(boxes, 2):
        across = min(box.x1, second.x1) - max(box.x0, second.x0)
        down = min(box.y1, second.y1) - max(box.y0, second.y0)
        assert min(across, down) <= SLACK, f"{one!r} lies on {other!r}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_lessons_draw_the_tracked_figures(name, figures, model, capsys):
    """They warn of nothing, their texts are readable, and their pages are up to date."""
    given = SMALL | {"model": str(model)} if name in TINY else {}
    with in_silence(capsys):
        cells, _ = execute(name, **figures | given)
    assert figures_of(cells) == FIGURES[name].split()
    assert {file.stem for file in figures["folder"].glob("*.png")} == set(FIGURES[name].split())
    for cell in cells:
        if isinstance(cell.value, Figure):
            assert_readable(cell.value)
    if name in WIDGETS:
        assert any(LESSONS.WIDGET in cell.shown for cell in cells)
        page = (figures["folder"] / f"{WIDGETS[name]}.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>")
    page = (LESSONS.PAGES / f"{name}.md").read_text(encoding="utf-8")
    if name not in MODEL:
        assert page == LESSONS.page(name, cells), "write the pages again: make lessons"
    for block in LESSONS.page(name, cells, outputs=False).split("\n\n"):
        assert block in page, "write the pages again: make lessons"


def test_every_tracked_figure_is_drawn_by_a_lesson_that_stores_no_output():
    live = {figure for name in WIDGETS for figure in FIGURES[name].split()}
    names = {name for names in FIGURES.values() for name in names.split()} - live
    assert {path.stem for path in (ROOT / "figures").glob("*.png")} == names | {"inspector"}
    assert set(FIGURES) == set(NOTEBOOKS)
    assert {path.stem for path in LESSONS.PAGES.glob("[0-9]*.md")} == set(NOTEBOOKS)
    for path in NOTEBOOKS.values():
        code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


# What "Try it" proposes as other parameters.
TRY = {
    "00_paper": {"verdict": "contradicted"},
    "01_format": {"token": 0, "layer": 5},
    "03_layerwise": {"aggregate": "data/checkpoints/twell-6m/aggregate.npz"},
    "05_speedup": {"widths": [4096, 14336], "level": 73},
    "08_models": {"trained_model": "twell-6m"},
    "09_training_choices": {"family": "85m-50m-l1-*-seed-0"},
    "10_clusters": {"size": "1.5b", "active": 29},
    "11_one_word": {"word": " United"},
    "12_pretrained": {"relufied": "relufy-0.0*"},
}


@SLOW
@pytest.mark.parametrize("name", TRY)
def test_what_a_lesson_proposes_to_try_runs(name):
    cells, names = execute(name, **TRY[name])
    assert {key: names[key] for key in TRY[name]} == TRY[name]
    assert any(cell.shown for cell in cells)


@pytest.fixture(scope="module")
def sweep(tiny_config, tmp_path_factory):
    """A clone without recorded data, with a sweep in runs/live as `make reproduce` trains it, and
    an unfinished run, which lessons leave out.
    """
    root = tmp_path_factory.mktemp("clone")
    (root / "data").mkdir()
    shutil.copy(ROOT / "data" / "paper.yaml", root / "data")
    folder = root / "runs" / "live"
    tiny_config = dataclasses.replace(tiny_config, tokens=48 * 512)
    for name, l1 in {"l1-0": 0.0, "l1-3e-3": 1e-3, "l1-3e-2": 1e-1}.items():
        train(dataclasses.replace(tiny_config, l1_coefficient=l1), folder / name, quiet=True)
    trace_validation(folder / "l1-3e-3").save(folder / "l1-3e-3" / "trace.npz")
    aggregate_run(folder / "l1-3e-3").save(folder / "l1-3e-3" / "aggregate.npz")
    config = dataclasses.asdict(dataclasses.replace(tiny_config, num_layers=3))
    results.write_run(folder / "l1-unfinished", config, results.provenance() | {"complete": False})
    (folder / "l1-unfinished" / "log.csv").write_text(",".join(results.LOG_COLUMNS) + "\n")
    return root


@SLOW
@pytest.mark.parametrize("name", LIVELY)
def test_lessons_look_at_a_sweep_that_was_trained_here(name, sweep, figures, monkeypatch):
    monkeypatch.chdir(sweep)
    cells, names = execute(name, live=True, **figures | SMALL | {"min_count": 2})
    of_recorded = "fig08_remedies", "over_tokens"
    assert figures_of(cells) == [one for one in FIGURES[name].split() if one not in of_recorded]
    if name == "02_sparsity":
        assert len(names["recipe"]) == 3 and len(names["every_run"]) == 4


@pytest.mark.parametrize(
    ("name", "given", "drawn", "missing"),
    [
        (
            "02_sparsity",
            {"family": "none-*", "longer": "none-*", "budgets": "none-*"},
            "fig02_training_curves fig03_frontier fig09_activity_over_training",
            "over_tokens fig08_remedies",
        ),
        (
            "09_training_choices",
            {"by_size": "none-*", "race": "flagship-dense"},
            "",
            "scale_activity race",
        ),
    ],
)
def test_figures_without_data_are_named(name, given, drawn, missing, figures):
    cells, _ = execute(name, **figures | given)
    assert set(drawn.split()) <= set(figures_of(cells))
    said = [cell.value for cell in cells if isinstance(cell.value, str)]
    for figure in missing.split():
        assert f"{figure} is not drawn: nothing is recorded for it here." in said


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("08_models", {"bench": "."}, "nothing is recorded in .*model.csv"),
        ("09_training_choices", {"runs": "."}, "no run that fits '85m-50m-"),
        *((name, {"live": True}, "runs/live: `make reproduce` trains them") for name in LIVELY),
    ],
)
def test_a_lesson_without_its_numbers_says_so(name, given, message, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "paper.yaml", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        execute(name, **given)


def test_speed_of_the_small_grid_of_a_gpu(tmp_path, figures, monkeypatch):
    """All figures but that of quality are drawn from the cases that `live` measures."""
    for name, tokens in {"ffn": [1, 64, 16384], "training": [16384]}.items():
        rows = pd.read_csv(ROOT / "data" / "bench" / f"{name}.csv")
        few = rows["pattern"].isin(["skewed", "even"]) & (rows["hidden_size"] == 2048)
        levels = sum(rows["active"].between(0.8 * n, 1.2 * n) for n in (3, 29, 300)) > 0
        rows[few & levels & rows["tokens"].isin(tokens)].to_csv(tmp_path / f"{name}.csv")
    monkeypatch.setattr(measure, "small_grid", lambda folder: tmp_path)
    cells, _ = execute("05_speedup", live=True, **figures)
    assert figures_of(cells) == ["ffn_activity", "ffn_tokens", "ffn_training"]


def test_execution_by_papermill_gives_a_notebook_its_own_parameters(tmp_path, monkeypatch, capsys):
    given = []

    def execute_notebook(notebook, out, values, **_):
        given.append(values)
        out.touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("papermill.execute_notebook", execute_notebook)
    (tmp_path / "build" / "notebooks").mkdir(parents=True)
    for name in ("02_sparsity", "11_one_word"):
        words = str(NOTEBOOKS[name]), f"{name}.ipynb", "3", "live=true", "figures=a"
        script("execute").main(*words)
    assert given == [{"live": True, "figures": "a"}, {}]
    assert "2 of 3: 11_one_word.ipynb" in capsys.readouterr().out
