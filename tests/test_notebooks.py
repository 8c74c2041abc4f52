"""Lessons draw the tracked figures from what is recorded, say what is missing, and stay true."""

import contextlib
import dataclasses
import json
import logging
import re
import shutil
import warnings

import nbformat
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests.factories.analysis import (
    family,
    kept_answers,
    relufied_study,
    speed_rows,
    trained,
    write_runs,
)
from tests.factories.lessons import NUMBERS, TRY, wrong_numbers
from tests.pages import script
from twell import measure, results
from twell.trace import aggregate_run, trace_validation
from twell.train import train

ROOT = results.root()
LESSONS = script("lessons")
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
FIGURES = {
    "01_format": "fig01_formats fig01_bytes",
    "02_sparsity": "fig02_training_curves fig03_frontier frontier over_tokens"
    " fig09_activity_over_training fig08_remedies",
    "03_layerwise": "fig06_layers fig10_layers_dense fig11_layers_sparsest",
    "04_tokens": "fig07a_tokens fig07b_positions fig07_passage",
    "05_speedup": "ffn_activity ffn_tokens ffn_roofline ffn_training fp8_quality",
    "06_downstream": "table6_tasks fig03_accuracy paired_tasks",
    "07_inspect": "inspect_specific inspect_surprise inspect_silenced inspect_passage",
    "08_models": "table1_scale overview fig04_levels fig05_levels fig06_contributions"
    " fig10_contributions fig11_contributions fig06_trained model_parts model_decode decode_parts",
    "09_training_choices": "choices_frontier scale_activity flagship race processes",
    "10_clusters": "cluster_costs",
    "11_one_word": "around_word",
    "12_pretrained": "relufied_course relufied_price relufied_tasks relufied_tokens"
    " relufied_frontier gains_by_share",
}
# These compute with a model; the others show recorded numbers alone.
MODEL = ("01_format", "04_tokens", "06_downstream", "07_inspect", "11_one_word")
NO_CLAIMS = ("10_clusters", "11_one_word")
# In place of the model that ships, where a lesson evaluates or traces it.
TINY = ("06_downstream", "07_inspect", "11_one_word")
LIVELY = "02_sparsity", "03_layerwise", "04_tokens", "07_inspect"
WIDGETS = {"07_inspect": "inspector", "11_one_word": "one_word"}  # they compute here and now
SMALL = {"tokens": 512, "silenced_tokens": 64, "silenced_neurons": 3, "sparse_items": 3}
SMALL |= {"word": None}
UNHEARD = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning
SLOW = pytest.mark.slow


def execute(name, **given):
    """Run a lesson here; return its cells and its names."""
    return LESSONS.run(NOTEBOOKS[name], given)


def figures_of(cells):
    return [cell.value.get_label() for cell in cells if isinstance(cell.value, Figure)]


def claims_of(cells):
    """The last table, that of the claims."""
    return [cell.value for cell in cells if cell.kind == "code"][-1].data


def drawn_in(folder):
    return {file.stem for file in folder.glob("*.png")}


def blank(figure, file, format, **options):
    """In place of rendering, which tests/plots do: the least picture."""
    Image.new("RGB", (1, 1)).save(file, format)


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """A folder for figures, in parameters of every notebook; they are drawn and not rendered."""
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
    """Fails where a kernel would show a warning, or anything else on its error stream."""
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


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_lessons_draw_the_tracked_figures(name, figures, model, capsys):
    """By name, and what they say is so."""
    given = SMALL | {"model": str(model)} if name in TINY else {}
    with in_silence(capsys):
        cells, names = execute(name, **figures | given)
    expected = FIGURES[name].split()
    assert figures_of(cells) == expected and drawn_in(figures["folder"]) == set(expected)
    claims = claims_of(cells)
    table = [cell for cell in cells if cell.kind == "code"][-1]
    assert not re.search(r"\bnan\b|None", table.shown["text/html"])
    assert name in NO_CLAIMS or list(claims) == ["claim", "paper", "ours", "verdict", "note"]
    if name not in ("04_tokens", *NO_CLAIMS, *TINY):  # of another model
        page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
        for row in claims.itertuples():
            begin, end = f"\n| {row.claim} | {row.paper}", f" | {row.ours} | {row.verdict}"
            assert re.search(f"{re.escape(begin)}[^|]*{re.escape(end)}", page), (begin, end)
    if name not in TINY:
        assert wrong_numbers(cells, names, NUMBERS[name]) == []
    if name in WIDGETS:
        assert any(LESSONS.WIDGET in cell.shown for cell in cells)
        page = (figures["folder"] / f"{WIDGETS[name]}.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>")
    assert_the_page_is_current(name, cells)


def assert_the_page_is_current(name, cells):
    """With all that the lesson shows, or, where a model computes that, its text and code."""
    page = (LESSONS.PAGES / f"{name}.md").read_text(encoding="utf-8")
    write = "write the pages again: make lessons"
    if name not in MODEL:
        assert page == LESSONS.page(name, cells), write
    end = 0
    for block in LESSONS.page(name, cells, outputs=False).split("\n\n"):
        end = page.find(block, end)
        assert end >= 0, f"{write}: {block}"


@SLOW
@pytest.mark.parametrize("name", TINY)
def test_lessons_that_compute_say_what_the_model_does(name, figures):
    cells, names = execute(name, **figures)
    assert wrong_numbers(cells, names, NUMBERS[name]) == []


@SLOW
@pytest.mark.parametrize(("name", "given"), [(name, one) for name in TRY for one in TRY[name]])
def test_what_a_lesson_proposes_to_try_runs(name, given):
    text = nbformat.read(NOTEBOOKS[name], 4).cells[-1].source.replace("\n  ", " ")
    assert all(json.dumps(value) in text for key, value in given.items())
    cells, _ = execute(name, **given)
    assert figures_of(cells)


@pytest.fixture(scope="module")
def sweep(tiny_config, tmp_path_factory):
    """A clone without recorded data, in runs/live a sweep as `make reproduce` trains it, and an
    unfinished run, which is left out.
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
def test_lessons_look_at_a_sweep_that_was_trained_here(name, sweep, figures, capsys, monkeypatch):
    monkeypatch.chdir(sweep)
    # The text of lesson 4 is longer than the context of so small a model, which is said.
    with contextlib.nullcontext() if name == "04_tokens" else in_silence(capsys):
        cells, names = execute(name, live=True, **figures | SMALL | {"min_count": 2})
    of_more = "fig08_remedies", "over_tokens"  # than the sweep
    expected = [figure for figure in FIGURES[name].split() if figure not in of_more]
    assert figures_of(cells) == expected
    if name == "02_sparsity":
        assert len(names["recipe"]) == 3 and len(names["every_run"]) == 4


@pytest.mark.parametrize("name", LIVELY)
def test_a_lesson_without_models_trained_here_names_the_command(name, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "paper.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="runs/live: `make reproduce` trains them"):
        execute(name, live=True)


NOTHING = {"evaluations": None}
LEVELS = {"family": "85m-50m-l1-*", "by_size": "none-*", "flagship": "flagship-dense"}
LEVELS |= {"race": "flagship-dense"}
NONE = {"family": "none-*", "longer": "none-*"}


@pytest.mark.parametrize(
    ("name", "given", "drawn"),
    [
        pytest.param("06_downstream", NOTHING, "", marks=SLOW),
        ("09_training_choices", LEVELS, "choices_frontier processes"),
        ("02_sparsity", NONE, " ".join(FIGURES["02_sparsity"].split()[:-1])),
    ],
)
def test_what_is_missing_is_said(name, given, drawn, figures, model, tmp_path):
    """An empty folder in place of None."""
    (tmp_path / "empty").mkdir()
    given = {key: value or str(tmp_path / "empty") for key, value in given.items()}
    here = SMALL | {"model": str(model)} if name in TINY else {}
    cells, _ = execute(name, **figures | here | given)
    assert figures_of(cells) == drawn.split() and drawn_in(figures["folder"]) == set(drawn.split())
    said = [cell.value for cell in cells if isinstance(cell.value, str)]
    missing = [figure for figure in FIGURES[name].split() if figure not in drawn.split()]
    assert said == [
        f"{figure} is not drawn: nothing is recorded for it here." for figure in missing
    ]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("08_models", "bench", "nothing is recorded in .*model.csv; docs/benchmarks.md says"),
        ("09_training_choices", "runs", "no run that fits '85m-50m-\\*' in .*"),
    ],
)
def test_a_lesson_without_its_numbers_says_so(name, given, message, tmp_path):
    with pytest.raises(FileNotFoundError, match=message):
        execute(name, **{given: str(tmp_path)})


def test_a_notebook_that_was_executed_says_how_many_are_done(tmp_path, monkeypatch, capsys):
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
    lines = r"1 of 3: 02_sparsity.ipynb, done in \d s\n2 of 3: 11_one_word.ipynb, done in \d s\n"
    assert re.fullmatch(lines, capsys.readouterr().out)


def test_speed_of_what_was_measured(tmp_path, figures):
    """Few cases and no kernels, no energy, no sparse path: nothing empty is drawn."""
    rows = speed_rows(16384, 29.0, {"dense torch.compile": 4.0, "dense eager": 5.0}, pattern="even")
    alone = speed_rows(16384, 29.0, {"triton union": 1.0})
    pd.concat([rows, alone]).to_csv(tmp_path / "ffn.csv", index=False)
    cells, _ = execute("05_speedup", bench=str(tmp_path), **figures)
    assert figures_of(cells) == []
    assert sum("is not drawn" in str(cell.value) for cell in cells) == 5
    assert set(claims_of(cells)["verdict"]) == {"not measured"}


def test_speed_of_the_small_grid_of_a_gpu(tmp_path, figures, monkeypatch):
    """All but that of quality are drawn from the cases that `live` measures, here recorded ones."""
    grid = {"ffn": [1, 64, 16384], "kernels": [1, 64, 16384], "training": [16384]}
    for name, tokens in grid.items():
        rows = pd.read_csv(ROOT / "data" / "bench" / f"{name}.csv")
        few = rows["pattern"].isin(["skewed", "even"]) & (rows["hidden_size"] == 2048)
        levels = sum(rows["active"].between(0.8 * n, 1.2 * n) for n in (3, 29, 300)) > 0
        rows[few & levels & rows["tokens"].isin(tokens)].to_csv(tmp_path / f"{name}.csv")
    shutil.copy(ROOT / "data" / "bench" / "ceilings.csv", tmp_path)
    monkeypatch.setattr(measure, "small_grid", lambda folder: tmp_path)
    cells, _ = execute("05_speedup", live=True, **figures)
    assert figures_of(cells) == FIGURES["05_speedup"].split()[:-1]


def test_trainings_without_memory(tmp_path, figures):
    """Runs on a CPU: the figure and the table do without memory. Other choices may be missing."""
    ways = [trained("f-a", [8, 4], [10, 20], backend="triton"), trained("f-b", [8, 4], [30, 40])]
    write_runs(tmp_path, *family(), *ways)
    given = {"runs": str(tmp_path), "family": "[!f]*", "flagship": "f-*", "processes": "none-*"}
    cells, _ = execute("09_training_choices", **given | {"by_size": "none-*"}, **figures)
    assert figures_of(cells) == ["choices_frontier", "flagship"]
    claims = claims_of(cells).set_index("claim")["ours"]
    memory = claims[claims.index.str.startswith("Peak memory falls")]
    assert "−50% tokens/s" in claims.tolist() and memory.tolist() == ["not measured"] * 2


def test_students_that_answered_and_saw_several_numbers_of_tokens(tmp_path, figures):
    """The lesson draws their tasks and tokens, too, from the answers that it compares alone."""
    write_runs(tmp_path / "runs", *relufied_study())
    (tmp_path / "eval").mkdir()
    for run, rows in kept_answers().groupby("run"):
        rows.drop(columns="run").to_csv(tmp_path / "eval" / f"{run}.csv.xz", index=False)
    given = {"runs": str(tmp_path / "runs"), "relufied": "*", "evaluations": str(tmp_path / "eval")}
    cells, names = execute("12_pretrained", **given, **figures)
    assert figures_of(cells) == FIGURES["12_pretrained"].split()
    for pairs in (names["pairs"], names["answers"]):
        runs = {*pairs["run"], *pairs["beside"]}
        assert runs == {"alone", "longer", "small-original-abcdef12", "tenth"}
    (shown,) = [cell for cell in cells if "relufied_answers" in cell.source]
    assert shown.value.data["name"].tolist() == ["ReLU alone", "10%", "10%, 0.002 M tokens"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_lessons_are_lessons(name):
    """A question, parameters, a set-up of ten lines, figures between their texts, two trials."""
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    nbformat.validate(notebook)
    first, parameters, set_up, *cells = notebook.cells
    assert re.match(rf"# {int(name[:2])}\. .+\?\n", first.source)
    assert parameters.metadata["tags"] == ["parameters"]
    lines = [line for line in set_up.source.splitlines() if line]
    assert len(lines) <= 10 and "import" in set_up.source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    trials = re.findall(r"^- ", cells[-1].source, re.M)
    assert cells[-1].source.startswith("## Try it\n") and len(trials) == 2
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "ow to read" in text and "**What we see" in text and "Caveat" in text
    assert "plots." in "".join(cell.source for cell in code[2:])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_lesson_reads_what_is_recorded_unless_told(name):
    names = {}
    exec(nbformat.read(NOTEBOOKS[name], 4).cells[1].source, names)
    assert names.get("live", False) is False
    assert names.get("figures") is None  # Run All changes no tracked file


def test_every_tracked_figure_is_drawn_by_a_lesson():
    live = {figure for name in WIDGETS for figure in FIGURES[name].split()}
    names = {name for names in FIGURES.values() for name in names.split()} - live
    assert drawn_in(ROOT / "figures") == names | {"inspector"}


def test_a_page_shows_cells_that_look_like_tags():
    cells = ["<1 active", "<= 2%", "a < b", "c > 30%"]
    html = pd.DataFrame({"paper": cells}).style.hide().to_html()
    written = re.findall(r"<td>(.*)</td>", LESSONS.table(html))
    assert written == ["&lt;1 active", "&lt;= 2%", "a &lt; b", "c > 30%"]


def test_every_lesson_has_its_page():
    assert {path.stem for path in LESSONS.PAGES.glob("[0-9]*.md")} == set(NOTEBOOKS)
    index = (LESSONS.PAGES / "README.md").read_text(encoding="utf-8")
    assert [f"({name}.md)" in index for name in NOTEBOOKS] == [True] * len(NOTEBOOKS)
