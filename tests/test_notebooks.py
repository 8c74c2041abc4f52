"""Notebooks draw the tracked figures from what is recorded, and say what is missing."""

import ast
import dataclasses
import json
import re
import shutil
from unittest.mock import patch

import nbformat
import pandas as pd
import pytest
import yaml
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure
from PIL import Image

from tests.factories.analysis import family, speed_rows, trained, write_runs
from twell import results
from twell.trace import aggregate_run, trace_validation
from twell.train import train

ROOT = results.root()
FOLDER = ROOT / "notebooks"
NOTEBOOKS = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
PROFILES = (FOLDER / "profiles").glob("*.yaml")
PROFILES = {path.stem: yaml.safe_load(path.read_text()) for path in PROFILES}
FIGURES = {
    "01_format": "fig01_formats fig01_bytes",
    "02_sparsity": "fig02_training_curves fig03_frontier fig09_activity_over_training frontier"
    " fig08_remedies",
    "03_layerwise": "fig06_layers fig10_layers_dense fig11_layers_sparsest",
    "04_tokens": "fig07a_tokens fig07b_positions fig07_passage",
    "05_speedup": "ffn_activity ffn_tokens ffn_roofline ffn_training",
    "06_downstream": "table6_tasks fig03_accuracy",
    "07_inspect": "inspect_passage inspect_specific inspect_surprise inspect_silenced",
    "08_models": "overview table1_scale fig04_levels fig05_levels fig06_contributions"
    " fig10_contributions fig11_contributions fig06_trained model_parts model_decode decode_parts",
    "09_training_choices": "choices_frontier scale_activity flagship processes",
}
# Lines of code of the cell with the imports: it may shrink.
SET_UP = {"02_sparsity": 22, "05_speedup": 41, "07_inspect": 26, "08_models": 44}
SET_UP |= {"09_training_choices": 35}


def code_cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def parameters_of(path):
    """Names that a notebook's parameters cell assigns."""
    nodes = ast.walk(ast.parse(code_cells(path)[0].source))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


@dataclasses.dataclass
class Executed:
    """What a notebook displayed, by MIME type; `claims` is its last table."""

    shown: list[tuple[object, dict]]

    def of(self, kind):
        return [data[kind] for _, data in self.shown if kind in data]

    @property
    def said(self):
        return " ".join(self.of("text/markdown"))

    @property
    def claims(self):
        return self.shown[-1][0].data


def execute(name, **given):
    """Run a notebook here, with parameters as papermill sets them in `make reproduce`."""
    path, executed, names = NOTEBOOKS[name], Executed([]), {}
    formats = DisplayFormatter()

    def display(*values):
        executed.shown += [(value, formats.format(value)[0]) for value in values]

    with patch("IPython.display.display", display):
        for number, cell in enumerate(code_cells(path)):
            tree = ast.parse(cell.source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), names)
            value = last and eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                display(value)
            if number == 0:
                names |= {key: given[key] for key in parameters_of(path) & set(given)}
    return executed


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
    return dict.fromkeys(("figures", "drawn", "tracked_figures"), str(folder)) | {"folder": folder}


@pytest.fixture(scope="module")
def model(tiny_run, tmp_path_factory):
    """A small model with the aggregate that the inspector needs."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_run, folder)
    aggregate_run(folder).save(folder / "aggregate.npz")
    return folder


def origin_of(path):
    """What a figure was drawn from; not by which commit, or which versions of libraries."""
    origin = json.loads(path.read_text())
    return {key: origin[key] for key in ("source", "device", "inputs", "parameters")}


SLOW = pytest.mark.slow
SMALL = {"tokens": 512, "silenced_tokens": 64, "silenced_neurons": 3, "sparse_items": 3}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_draw_the_tracked_figures(name, figures, model):
    """From the same inputs, with the same parameters; the live parts look at a small model."""
    done = execute(name, **PROFILES["recorded"] | figures | SMALL | {"model": str(model)})
    wanted = FIGURES[name].split()
    assert drawn_in(figures["folder"]) == set(wanted)
    assert len(done.of("image/png")) == len(wanted) and "not drawn" not in done.said
    for figure in wanted:
        path = figures["folder"] / f"{figure}.json"
        if name != "07_inspect":  # a model computes its numbers here and now
            assert origin_of(path) == origin_of(ROOT / "figures" / path.name)
    assert not re.search(r"\bnan\b|None", done.of("text/html")[-1])
    assert list(done.claims) == ["claim", "paper", "ours", "verdict", "note"]
    if name not in ("04_tokens", "06_downstream", "07_inspect"):  # of another model
        page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
        for row in done.claims.itertuples():
            begin, end = f"\n| {row.claim} | {row.paper}", f" | {row.ours} | {row.verdict}"
            assert re.search(f"{re.escape(begin)}[^|]*{re.escape(end)}", page), (begin, end)
    if name == "07_inspect":
        (shown,) = [data for _, data in done.shown if "Inspector(" in data.get("text/plain", "")]
        assert "application/vnd.jupyter.widget-view+json" in shown
        page = (figures["folder"] / "inspector.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and "512 tokens traced" in done.said
    if name == "06_downstream":
        assert "lm-eval and our loss over the same windows differ by" in done.said


@pytest.fixture(scope="module")
def sweep(tiny_config, tmp_path_factory):
    """A sweep, as `make reproduce` trains it, and an unfinished run, which is left out."""
    folder = tmp_path_factory.mktemp("live")
    tiny_config = dataclasses.replace(tiny_config, tokens=48 * 512)
    for name, l1 in {"l1-0": 0.0, "l1-3e-3": 1e-3, "l1-3e-2": 1e-1}.items():
        train(dataclasses.replace(tiny_config, l1_coefficient=l1), folder / name, quiet=True)
    trace_validation(folder / "l1-3e-3").save(folder / "l1-3e-3" / "trace.npz")
    aggregate_run(folder / "l1-3e-3").save(folder / "l1-3e-3" / "aggregate.npz")
    config = dataclasses.asdict(dataclasses.replace(tiny_config, num_layers=3))
    results.write_run(folder / "l1-unfinished", config, results.provenance() | {"complete": False})
    (folder / "l1-unfinished" / "log.csv").write_text(",".join(results.LOG_COLUMNS) + "\n")
    return folder


@SLOW
@pytest.mark.parametrize("name", ["02_sparsity", "03_layerwise", "04_tokens", "07_inspect"])
def test_notebooks_look_at_a_sweep_that_was_trained_here(name, sweep, figures):
    live = PROFILES["live"].items()
    here = {key: str(value).replace("runs/live", str(sweep)) for key, value in live}
    done = execute(name, **here | figures | SMALL | {"min_count": 2})
    wanted = set(FIGURES[name].split()) - {"fig08_remedies"}
    assert drawn_in(figures["folder"]) == wanted
    for figure in wanted:
        inputs = origin_of(figures["folder"] / f"{figure}.json")["inputs"]
        assert inputs and all((ROOT / file).resolve().is_relative_to(sweep) for file in inputs)
    if name == "02_sparsity":
        assert "3 complete runs" in done.said and "incomplete: ['l1-unfinished']" in done.said


NOTHING = {"evaluations": None}
LEVELS = {"family": "85m-50m-l1-*", "by_size": "none-*", "flagship": "flagship-dense"}


@pytest.mark.parametrize(
    ("name", "given", "drawn", "said"),
    [
        pytest.param("06_downstream", NOTHING, "", "**Nothing is recorded**", marks=SLOW),
        ("08_models", {"bench": None}, "", "**Nothing is recorded** of forward passes"),
        ("09_training_choices", {"runs": None}, "", "**Nothing to compare:**"),
        ("09_training_choices", LEVELS, "choices_frontier processes", "1 complete runs fit"),
        (
            *("02_sparsity", {"family": "none-*", "longer": "none-*"}),
            "fig02_training_curves fig03_frontier fig09_activity_over_training frontier",
            "**Table 5 is the paper's alone:**",
        ),
    ],
)
def test_what_is_missing_is_said(name, given, drawn, said, figures, model, tmp_path):
    """An empty folder in place of None."""
    (tmp_path / "empty").mkdir()
    given = {key: value or str(tmp_path / "empty") for key, value in given.items()}
    done = execute(name, **PROFILES["recorded"] | figures | SMALL | {"model": str(model)} | given)
    assert said in done.said and " nan" not in done.said
    assert drawn_in(figures["folder"]) == set(drawn.split())
    for figure in set(FIGURES[name].split()) - set(drawn.split()):
        assert f"**{figure} is not drawn:**" in done.said
    if name in ("08_models", "09_training_choices") and not drawn:
        assert set(done.claims["verdict"]) == {"not measured"}


def test_speed_of_what_was_measured(tmp_path, figures):
    """Few cases and no kernels, no energy, no sparse path: nothing empty is drawn."""
    rows = speed_rows(16384, 29.0, {"dense torch.compile": 4.0, "dense eager": 5.0}, pattern="even")
    alone = speed_rows(16384, 29.0, {"triton union": 1.0})
    pd.concat([rows, alone]).to_csv(tmp_path / "ffn.csv", index=False)
    done = execute("05_speedup", bench=str(tmp_path), **figures)
    assert drawn_in(figures["folder"]) == {"ffn_activity"}
    for figure in FIGURES["05_speedup"].split()[1:]:
        assert f"**{figure} is not drawn:**" in done.said
    assert "**energy_per_token:** no rows" in done.said
    assert set(done.claims["verdict"]) == {"not measured"}


def test_trainings_without_memory(tmp_path, figures):
    """Runs on a CPU: the figure and the table do without memory. Other choices may be missing."""
    ways = [trained("f-a", [8, 4], [10, 20], backend="triton"), trained("f-b", [8, 4], [30, 40])]
    write_runs(tmp_path, *family(), *ways)
    given = {"runs": str(tmp_path), "family": "[!f]*", "flagship": "f-*", "processes": "none-*"}
    done = execute("09_training_choices", **given, **figures)
    assert drawn_in(figures["folder"]) == {"choices_frontier", "flagship"}
    claims = done.claims.set_index("claim")["ours"]
    memory = claims[claims.index.str.startswith("Peak memory falls")]
    assert "−50% tokens/s" in claims.tolist() and memory.tolist() == ["not measured"] * 2
    assert not any("peak_memory" in html for html in done.of("text/html"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_clean(name):
    parameters, set_up, *_ = cells = code_cells(NOTEBOOKS[name])
    nbformat.validate(nbformat.read(NOTEBOOKS[name], 4))
    assert parameters.metadata["tags"] == ["parameters"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert len(set_up.source.splitlines()) <= SET_UP.get(name, 17)


def test_every_tracked_figure_is_drawn_by_a_notebook():
    live = set(FIGURES["07_inspect"].split())
    names = {name for names in FIGURES.values() for name in names.split()} - live
    assert {path.stem for path in (ROOT / "figures").glob("*.json")} == names


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_name_parameters_of_the_notebooks(name):
    known = set().union(*map(parameters_of, NOTEBOOKS.values()))
    assert set(PROFILES[name]) <= known
