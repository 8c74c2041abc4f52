"""Every notebook runs on small runs and leaves its figures; none is committed with outputs."""

import ast
import dataclasses
import json
import os
import re
import shutil

import nbformat
import pandas as pd
import papermill
import pytest
import yaml

from tests.factories.analysis import (
    BY_TWO,
    DENSELY,
    SPARSELY,
    ceiling_rows,
    decode_rows,
    evaluation,
    family,
    kernel_rows,
    model_layer_rows,
    model_rows,
    part_rows,
    scaled,
    speed_rows,
    step_rows,
    trained,
    training_rows,
    write_runs,
)
from twell import analysis, results
from twell.trace import Aggregate, aggregate_run, trace_validation
from twell.train import train

FOLDER = results.root() / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIGURES = {
    "01_format": ["fig01_formats", "fig01_bytes"],
    "02_sparsity": [
        "fig02_training_curves",
        "fig03_frontier",
        "fig09_activity_over_training",
        "frontier",
    ]
    + ["fig08_remedies"],
    "03_layerwise": ["fig06_layers", "fig10_layers_dense", "fig11_layers_sparsest"],
    "04_tokens": ["fig07a_tokens", "fig07b_positions", "fig07_passage"],
    "07_inspect": ["inspect_passage", "inspect_specific", "inspect_surprise", "inspect_silenced"],
    "05_speedup": [
        "ffn_activity",
        "ffn_tokens",
        "ffn_roofline",
        "ffn_training",
        "ffn_training_devices",
    ],
    "06_downstream": ["table6_tasks", "fig03_accuracy"],
    "08_models": [
        "table1_scale",
        "fig04_levels",
        "fig05_levels",
        "fig06_contributions",
        "fig10_contributions",
    ]
    + ["fig11_contributions", "fig06_trained", "model_parts", "model_decode", "decode_parts"],
    "09_training_choices": ["choices_frontier", "scale_activity", "flagship", "processes"],
}


# Of `trained`: the runs that 09_training_choices compares, zf-* dense and sparse, zp-* on one device and on two.
WAYS = {"f-a": SPARSELY, "f-b": DENSELY, "p-a": SPARSELY, "p-b": BY_TWO}


def code_cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def parameters_of(path):
    """Names that a notebook's parameters cell assigns."""
    nodes = ast.walk(ast.parse(code_cells(path)[0].source))
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def execute(path, given, folder):
    """The notebook as it is after running with these parameters."""
    options = {"kernel_name": "python3", "progress_bar": False, "cwd": str(results.root())}
    return papermill.execute_notebook(str(path), str(folder / "done.ipynb"), given, **options)


@pytest.fixture(scope="module")
def live(tiny_config, tmp_path_factory):
    """A sweep of three levels, one of them with two seeds, one traced, and an unfinished run, which the notebooks leave out."""
    folder = tmp_path_factory.mktemp("live")
    sweep = {"l1-0": {}, "l1-0.001": {"l1_coefficient": 1e-3}, "l1-0.1": {"l1_coefficient": 1e-1}}
    sweep |= {"l1-0-again": {"seed": 1}, "longer-0": {"tokens": 64 * 512}}
    for name, changes in sweep.items():
        changes = {"tokens": 48 * 512, "l1_coefficient": 0.0} | changes
        train(dataclasses.replace(tiny_config, **changes), folder / name, quiet=True)
    run = folder / "l1-0.001"
    trace_validation(run).save(run / "trace.npz")
    aggregate_run(run).save(run / "aggregate.npz")
    shutil.copy(run / "aggregate.npz", folder / "largest.npz")
    config = dataclasses.asdict(dataclasses.replace(tiny_config, l1_coefficient=0.5, num_layers=3))
    results.write_run(folder / "l1-unfinished", config, results.provenance() | {"complete": False})
    (folder / "l1-unfinished" / "log.csv").write_text(",".join(results.LOG_COLUMNS) + "\n")
    write_bench(folder / "bench")
    window = {"dead_window_tokens": 500}
    write_runs(folder / "choices", *((row | window, log) for row, log in family()))
    sizes = [scaled("z-0", 10, 0, 0, 20), scaled("z-a", 10, 1e-3, 1.5, 5)]
    write_runs(
        folder / "choices", *sizes, scaled("z-b", 40, 0, 0, 20), scaled("z-c", 40, 1e-3, 1.2, 4)
    )
    # One training in several ways; an unfinished run among them is left out.
    ways = [(row | {"run": f"z{name}"}, log) for name, (row, log) in WAYS.items()]
    write_runs(
        folder / "choices", *ways, trained("zf-unfinished", [1], [1], complete=False, tokens=9)
    )
    # Named like a level of the sweep, and none: the notebook of the sweep leaves it out.
    shutil.copytree(folder / "choices" / "reinit-0", folder / "l1-0.001-reinit")
    evaluated = [("a", 0, 0.1, "dense"), ("b", 1e-3, 0.09, "dense"), ("b", 1e-3, 0.09, "reference")]
    for name, l1, gain, backend in (*evaluated, ("b-warmup", 1e-3, 0.5, "dense")):
        record = evaluation(name, l1=l1, gain=gain, backend=backend)
        results.write_evaluation(folder / "eval" / f"{name}-{backend}.json", record)
    return folder


def write_bench(folder):
    """Rows of speed: a sparse path that is twice as fast as dense at 29 active, half as fast at 464, and energy."""
    compiled, few = "dense torch.compile", {"mode": "graph", "weight_sets": 8}
    times = {compiled: 4.0, "dense eager": 5.0, "auto": 2.5}
    rows = [speed_rows(16384, 29.0, times | {"triton union": 2.0}, energy=[40.0, 50.0, 25.0, 10.0])]
    rows += [
        speed_rows(16384, 464.0, times | {"triton union": 8.0}),
        speed_rows(1, 31.0, times, **few),
    ]
    rows += [speed_rows(16384, 29.0, times | {"triton rowwise": 3.0}, pattern="even")]
    rows += [
        speed_rows(
            16384, 7.0, times | {"triton union": 1.0}, hidden_size=1024, pattern="recorded busy"
        )
    ]
    folder.mkdir()
    pd.concat(rows).to_csv(folder / "ffn.csv", index=False)
    kernel_rows(("gate", 5.0, 3.2e12, 2e9), ("lists", 0.04, None, None)).to_csv(
        folder / "kernels.csv", index=False
    )
    ceiling_rows().to_csv(folder / "ceilings.csv", index=False)
    # A training step: twice as fast at 10 active, half as fast at 640, and 30% of the memory held; on another GPU slower.
    times = {compiled: 4.0, "dense eager": 5.0}
    held = {"held": [1000, 1000, 300]}
    rows = [
        training_rows(16384, a, times | {"triton union": t}, **held)
        for a, t in ((10.0, 2.0), (640.0, 8.0))
    ]
    rows += [training_rows(16384, 10.0, times | {"triton union": 3.0}, device="other GPU", **held)]
    rows += [training_rows(16384, 10.0, times | {"triton union": 3.5}, pattern="even", **held)]
    rows += [
        training_rows(16384, 10.0, times | {"triton union": 0.1}, pattern="recorded busy", **held)
    ]
    pd.concat(rows).to_csv(folder / "training.csv", index=False)
    steps = {compiled: 800.0, "triton union torch.compile": 500.0}
    steps = [
        step_rows(steps, peak=[80, 60]),
        step_rows(steps | {compiled: 700.0}, peak=[80, 60], micro_batch=16),
    ]
    pd.concat(steps).to_csv(folder / "train_step.csv", index=False)
    # Whole models: 25% faster at 29 active; auto loses nothing at 911; one row of another GPU, measured before.
    rows = [
        model_rows([10.0, 8.0, 8.0], energy=[10.0, 7.0, 7.0], idle=0.0),
        model_rows([10.0, 20.0, 10.0], active=911.0),
    ]
    rows += [model_rows([10.0, 8.0, 7.0], model="2b", active=24.0)]
    rows += [model_rows([10.0, 1.0, 1.0], device="other GPU", date="2026-11-20T10:00:00+00:00")]
    pd.concat(rows).to_csv(folder / "model.csv", index=False)
    levels = ((29.0, [9.0, 7.0, 8.5]), (911.0, [14.0, 12.0, 13.0]), (1.0, [5.0, 4.0, 4.5]))
    rows = [model_layer_rows(10.0, sparse, [50.0, 10.0, 40.0], level) for level, sparse in levels]
    rows += [
        model_layer_rows(
            1.0, [0.5, 0.7], [5.0, 8.0], 6.5, model="trained", profile="checkpoint", num_layers=2
        )
    ]
    pd.concat(rows).to_csv(folder / "model_layers.csv", index=False)
    dense = {"attention": 3.0, "gate": 4.0, "up and down": 8.0}
    parts = [
        part_rows(dense, dense | {"up and down": 2.0}, model="2b", **where)
        for where in (
            {},
            {"batch": 1, "tokens": 1, "context": 512},
            {"batch": 8, "tokens": 8, "context": 512},
        )
    ]
    pd.concat(parts).to_csv(folder / "model_parts.csv", index=False)
    decode_rows([4.0, 2.0, 2.0], model="2b").to_csv(folder / "decode.csv", index=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, live, tmp_path):
    figures = tmp_path / "figures"
    wanted = {"runs": str(live), "sweep": "l1-*", "longer": "longer-*", "source": "recorded"}
    wanted |= {"figures": str(figures), "drawn": str(figures), "tracked_figures": str(figures)}
    wanted |= {
        name: str(live / f"{file}.npz")
        for name, file in (
            ("sparse_aggregate", "l1-0.001/aggregate"),
            ("aggregate", "largest"),
            ("passage", "l1-0.001/trace"),
        )
    }
    wanted |= {
        "dense_run": "l1-0",
        "sparse_run": "l1-0.001",
        "sparsest_run": "l1-0.1",
        "min_count": 2,
    }
    wanted |= {
        "num_tokens": 16,
        "intermediate_size": 768,
        "active": [2, 29, 300],
        "bench": str(live / "bench"),
    }
    wanted |= {
        "evaluations": str(live / "eval"),
        "model": str(live / "l1-0.001"),
        "sparse_items": 3,
    }
    wanted |= {
        "family": "choices/[!z]*",
        "by_size": "z-*",
        "left_out": "none *-warmup",
        "flagship": "zf-*",
        "processes": "zp-*",
    }
    wanted |= {"runs": str(live / "choices"), "family": "[!z]*"} if path.stem[:2] == "09" else {}
    wanted |= {
        "tokens": 512,
        "silenced_tokens": 64,
        "silenced_neurons": 3,
        "trained_model": "trained",
    }
    given = {name: value for name, value in wanted.items() if name in parameters_of(path)}
    done = execute(path, given, tmp_path)

    assert sorted(file.stem for file in figures.glob("*.png")) == sorted(FIGURES[path.stem])
    data = 0
    for name in FIGURES[path.stem]:
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        origin = json.loads((figures / f"{name}.json").read_text())
        assert origin["source"] == (
            "live" if path.stem in ("01_format", "07_inspect") else "recorded"
        )
        for file, digest in origin["inputs"].items():
            assert (results.root() / file).resolve().is_relative_to(live)
            assert digest == results.file_hash(results.root() / file)
            data += 1
    counts = {
        "01_format": 0,
        "02_sparsity": 17 + 6,
        "03_layerwise": 3,
        "04_tokens": 3,
        "05_speedup": 6,
    }
    counts |= {
        "06_downstream": 8,
        "07_inspect": 8,
        "08_models": 11,
        "09_training_choices": 14 + 18 + 2 + 2,
    }
    assert data == counts[path.stem]

    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == len(
        FIGURES[path.stem]
    )
    table = outputs[-1]["data"]["text/html"]
    assert all(heading in table for heading in ("claim", "paper", "ours", "verdict", "note"))
    assert re.search(">(reproduced|in part|contradicted|not testable|ours)<", table)
    assert not re.search(r"\bnan\b|None", table)
    assert not any("Loading weights" in str(output) for output in outputs)
    said = " ".join(
        output["data"].get("text/markdown", "") for output in outputs if "data" in output
    )
    if path.stem == "02_sparsity":
        every_run, log = results.load_runs(live, "l1-*")
        levels = analysis.levels(
            analysis.sweep(every_run[analysis.choice(every_run) == "recipe"], log)
        )
        best = analysis.recommended(levels)
        assert (
            f"**L1 = {analysis.level_name(best['l1_coefficient'])}**, {best['active']:.1f} active neurons"
            in said
        )
        assert "Runs of other choices of training, left out here: 1." in said
        assert "4 complete runs" in said and "incomplete: ['l1-unfinished']" in said
        assert (
            f"**0.0246 M tokens**: 95% inactive costs {analysis.price_at(levels, 0.05):+.2f}%"
            in said
        )
        assert f"L1 = 0: 2 runs, ± {levels['cross_entropy_std'][0]:.4f} nats" in said
        assert "**0.0328 M tokens**" in said and "one seed a level" in said
        assert "not drawn" not in said and "paper's alone" not in said
        inputs = json.loads((figures / "fig08_remedies.json").read_text())["inputs"]
        assert {name.split("/")[-2] for name in inputs} == {
            "l1-a-0",
            "l1-a-1",
            "reinit-0",
            "reinit-1",
            "warm-0",
            "warm-1",
        }
        assert json.loads((figures / "fig08_remedies.json").read_text())["device"] == "made"
        tables = [
            output["data"]["text/html"]
            for output in outputs
            if "text/html" in output.get("data", {})
        ]
        captions = [html for html in tables if "<caption>Table" in html]
        assert [re.search(r"<caption>(.*?)</caption>", html)[1] for html in captions] == [
            "Table 3",
            "Table 4",
            "Table 5",
        ]
        # Table 5 has the remedies: the warm-up, of two seeds, at our level; its 8 active neurons.
        assert ">L1 warm-up<" in captions[2] and ">8<" in captions[2] and ">1e-3<" in captions[2]
    if path.stem == "03_layerwise":
        trace = Aggregate.load(live / "l1-0.001" / "aggregate.npz")
        assert f"{trace.num_tokens:,} tokens at L1 = 1e-3" in said and "first two" in table
        assert (
            f"`l1-0.001`: {trace.num_layers} layers of {trace.intermediate_size:,} neurons, L1 = 1e-3"
            in said
        )
    if path.stem == "04_tokens":
        assert "tokens at L1 = 1e-3" in said
    if path.stem == "07_inspect":
        assert "512 tokens traced" in said and "sequences" not in said
        assert f"Written to `{os.path.relpath(figures / 'inspector.html', results.root())}`" in said
        tables = [
            output["data"]["text/html"]
            for output in outputs
            if "text/html" in output.get("data", {})
        ]
        assert (
            not any("NaN" in html for html in tables[1:3]) and "<th>quantile</th>" not in tables[1]
        )
        assert "<th>quantile</th>" in tables[2]
        page = (figures / "inspector.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and "l1-0.001" in page
        shown = [
            output["data"]
            for output in outputs
            if "Inspector(" in output.get("data", {}).get("text/plain", "")
        ]
        assert len(shown) == 1 and "application/vnd.jupyter.widget-view+json" in shown[0]
    if path.stem == "05_speedup":
        tables = "".join(
            output["data"].get("text/html", "") for output in outputs if "data" in output
        )
        # Half way between 29 and 464 neurons in logarithms; energy a token; a layer of another width.
        assert "faster below 116 active" in tables
        assert "recorded busy" in tables and ">-75.000<" in tables
        assert "not drawn" not in said and "no rows" not in said
        assert ">+100%<" in table and ">1.60 times<" in table and ">2.00 times dense<" in table
        # Training: half way between 10 and 640; nothing from the other GPU or a recorded pattern.
        assert (
            "faster below 80 active" in tables
            and "triton union torch.compile" in tables
            and ">-25.00<" in tables
        )
        assert ">−70%<" in table and ">80 active<" in table
        devices = json.loads((figures / "ffn_training_devices.json").read_text())["device"]
        assert devices == "NVIDIA H200; other GPU"
        assert json.loads((figures / "ffn_training.json").read_text())["device"] == "NVIDIA H200"
    if path.stem == "08_models":
        # The overview needs all four sizes; tests/test_plots.py draws it.
        assert re.findall(r"\w+ is not drawn", said) == ["overview is not drawn"]
        assert "9 rows of forward passes on NVIDIA H200" in said
        # The paper's gain and ours: forward passes of 1.5B and 2B, a step of 1.5B; 100% in decoding.
        for ours in (
            "+25% tokens/s",
            "+43% tokens/s",
            "+40% tokens/s",
            "r = −1.000",
            "+100% tokens/s",
        ):
            assert f">{ours}<" in table, ours
        assert "other GPU" not in {
            json.loads(path.read_text())["device"] for path in figures.glob("*.json")
        }
    if path.stem == "09_training_choices":
        assert "not drawn" not in said and "paper's alone" not in said
        assert (
            "14 complete runs fit" in said and "2 sizes" in said and "compared at L1 = 1e-3" in said
        )
        assert (
            ">0.5% dead (2 seeds)<" in table and ">5.0 → 4.0<" in table and "at L1 = 1e-3;" in table
        )
        # One training in two ways: speed, memory, cross-entropy; the paper's beside them.
        for name, runs in (("flagship", {"zf-a", "zf-b"}), ("processes", {"zp-a", "zp-b"})):
            origin = json.loads((figures / f"{name}.json").read_text())
            assert {file.split("/")[-2] for file in origin["inputs"]} == runs
            assert origin["parameters"]["flagship"] == "zf-*" and origin["device"] == "a GPU"
        for claim, printed, ours in (
            ("Training is faster in its second half", r"−1.5 to \+21.9% .*", r"\+150% tokens/s"),
            ("Peak memory falls in the second half", r"−19.2% \(0.5B\)", "−20%"),
            ("Two GPUs over one", "–", "1.90 times the tokens/s"),
        ):
            assert re.search(
                rf">{claim}</td>\s*<td[^>]*>{printed}</td>\s*<td[^>]*>{ours}</td>", table
            ), claim
        tables = "".join(
            output["data"].get("text/html", "") for output in outputs if "data" in output
        )
        assert ">apart_mean<" in tables and ">peak_memory (GB)<" in tables and ">5e-07<" in tables
    if path.stem == "06_downstream":
        tables = "".join(
            output["data"].get("text/html", "") for output in outputs if "data" in output
        )
        assert "lm-eval and our loss over the same windows differ by" in said
        assert "4 recorded evaluations, lm-eval 0.4.13, on a CPU" in said
        # live: items of the run's own text, the same accuracies from both backends; recorded: the pair and the mean
        assert "held_out_continuation, acc_mutual_info" in tables and ">dense, reference<" in tables
        assert (
            ">35.0 ± 1.0<" in tables and ">−1.0 ± 1.4 points<" in table and ">reproduced<" in table
        )
        assert (
            ">0 points<" in table and "of 11 accuracies" in table
        )  # three live and eight recorded


def test_downstream_without_anything_recorded(live, tmp_path):
    path = FOLDER / "06_downstream.ipynb"
    given = {
        "evaluations": str(tmp_path / "eval"),
        "figures": str(tmp_path / "figures"),
        "sparse_items": 3,
    }
    given["model"] = str(live / "l1-0.001")
    done = execute(path, given, tmp_path)
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    said = " ".join(
        str(output.get("data", {}).get("text/markdown", output.get("text"))) for output in outputs
    )
    assert "**Nothing is recorded**" in said
    assert "**table6_tasks is not drawn:**" in said and "**fig03_accuracy is not drawn:**" in said
    assert not (tmp_path / "figures").exists()
    table = outputs[-1]["data"]["text/html"]
    assert (
        table.count(">not measured<") == 2 * 3
        and "reproduced" not in table
        and "contradicted" not in table
    )


def test_speed_of_what_was_measured(tmp_path):
    """Few cases and no kernels, no energy, no sparse path: what is missing is said, and nothing empty is drawn."""
    rows = speed_rows(16384, 29.0, {"dense torch.compile": 4.0, "dense eager": 5.0}, pattern="even")
    alone = speed_rows(16384, 29.0, {"triton union": 1.0})
    pd.concat([rows, alone]).to_csv(tmp_path / "ffn.csv", index=False)
    path, given = (
        FOLDER / "05_speedup.ipynb",
        {"bench": str(tmp_path), "figures": str(tmp_path / "figures")},
    )
    done = execute(path, given, tmp_path)
    assert [file.stem for file in (tmp_path / "figures").glob("*.png")] == ["ffn_activity"]
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    said = " ".join(
        str(output.get("data", {}).get("text/markdown", output.get("text"))) for output in outputs
    )
    assert "left out: 1 of 3 rows have no dense torch.compile" in said
    assert "**ffn_tokens is not drawn:**" in said and "**ffn_roofline is not drawn:**" in said
    assert "**energy_per_token:** no rows" in said
    table = outputs[-1]["data"]["text/html"]
    assert (
        "**ffn_training is not drawn:**" in said
        and "**ffn_training_devices is not drawn:**" in said
    )
    assert table.count("not measured") == 2 * (2 + 4) and table.count(">ours<") == 1  # the heading


def test_models_without_rows(tmp_path):
    """Nothing was measured yet: every figure says so, and the comparison too."""
    path, given = (
        FOLDER / "08_models.ipynb",
        {"bench": str(tmp_path), "figures": str(tmp_path / "figures")},
    )
    done = execute(path, given, tmp_path)
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    said = " ".join(
        str(output.get("data", {}).get("text/markdown", output.get("text"))) for output in outputs
    )
    assert (
        "**Nothing is recorded** of forward passes" in said
        and "0 rows" not in said
        and "nan" not in said
    )
    assert all(f"**{name} is not drawn:**" in said for name in FIGURES["08_models"])
    table = outputs[-1]["data"]["text/html"]
    assert table.count("not measured") == 2 * (13 + 8) and "reproduced" not in table


def test_choices_without_runs(tmp_path, live):
    """No run of a family, and a family of the recipe alone: what is missing is said. One run is not compared with itself."""
    path = FOLDER / "09_training_choices.ipynb"
    for runs, pattern, flagship in (
        (tmp_path, "*", "zf-*"),
        (live / "choices", "l1-*", "zf-b zf-unfinished"),
    ):
        figures = tmp_path / pattern[:2] / "figures"
        given = {"runs": str(runs), "family": pattern, "by_size": "none-*", "figures": str(figures)}
        done = execute(path, given | {"flagship": flagship, "processes": "none-*"}, tmp_path)
        outputs = [
            output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs
        ]
        said = " ".join(
            str(output.get("data", {}).get("text/markdown", output.get("text")))
            for output in outputs
        )
        assert all(f"**{name} is not drawn:**" in said for name in FIGURES["09_training_choices"])
        assert (
            f"{0 if pattern == '*' else 1} complete runs fit `{flagship}`; there is nothing to compare"
            in said
        )
        assert ("**Nothing to compare:**" in said) == (pattern == "*")
        assert not figures.exists()
        table = outputs[-1]["data"]["text/html"]
        assert table.count(">not measured<") == 2 * (16 + 4 + 7) and "contradicted" not in table


def test_trainings_without_memory(tmp_path):
    """Runs on a CPU: the figure and the table do without memory, and say so."""
    ways = [trained("f-a", [8, 4], [10, 20], backend="triton"), trained("f-b", [8, 4], [30, 40])]
    write_runs(tmp_path / "runs", *ways)
    given = {
        "runs": str(tmp_path / "runs"),
        "figures": str(tmp_path / "figures"),
        "flagship": "f-*",
    }
    given |= dict.fromkeys(("family", "by_size", "processes"), "none-*")
    done = execute(FOLDER / "09_training_choices.ipynb", given, tmp_path)
    assert [file.stem for file in (tmp_path / "figures").glob("*.png")] == ["flagship"]
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    table = outputs[-1]["data"]["text/html"]
    assert ">−50% tokens/s<" in table and table.count("Peak memory falls") == 2
    assert (
        len(
            re.findall(
                r">Peak memory falls.*</td>\s*<td[^>]*>.*</td>\s*<td[^>]*>not measured<", table
            )
        )
        == 2
    )
    assert "peak_memory" not in "".join(
        output["data"].get("text/html", "") for output in outputs if "data" in output
    )


def test_a_sweep_without_other_choices(tmp_path, live):
    """No family, and one of the recipe alone: what is the paper's alone is said, and the rest is drawn. Longer runs may be missing."""
    for number, pattern in enumerate((None, "choices/l1-*")):
        figures = tmp_path / str(number)
        given = {"runs": str(live), "family": pattern, "longer": "none-*", "figures": str(figures)}
        done = execute(FOLDER / "02_sparsity.ipynb", given, tmp_path)
        outputs = [
            output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs
        ]
        said = " ".join(
            str(output.get("data", {}).get("text/markdown", output.get("text")))
            for output in outputs
        )
        assert "**fig08_remedies is not drawn:**" in said
        assert all(f"**Table {n} is the paper's alone:**" in said for n in (3, 4, 5))
        drawn = {file.stem for file in figures.glob("*.png")}
        assert drawn == set(FIGURES["02_sparsity"]) - {"fig08_remedies"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    cells = code_cells(path)
    nbformat.validate(nbformat.read(path, 4))
    assert cells[0].metadata["tags"] == ["parameters"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert path.stem in FIGURES


@pytest.mark.parametrize(
    "path", sorted((FOLDER / "profiles").glob("*.yaml")), ids=lambda path: path.stem
)
def test_profile_names_parameters_of_the_notebooks(path):
    known = set().union(*map(parameters_of, NOTEBOOKS))
    assert set(yaml.safe_load(path.read_text())) <= known
