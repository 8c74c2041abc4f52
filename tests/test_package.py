"""What a user installs: the wheel holds every file that the code opens; pins fit the ranges."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement

from study import analysis
from twell import results
from twell.cli import common, main
from twell.models import load
from twell.models.llama import AUTO_MAP, CODE
from twell.trace import Aggregate

ROOT = results.root()
WHEEL = f"{sys.executable} -m pip wheel -q --no-deps --no-build-isolation -w".split()


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


def tracked(*command):
    """Lines of a git command; skips the test outside of a checkout."""
    done = run(["git", *command], cwd=ROOT)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


@pytest.mark.parametrize(("gpu", "python"), [("", "3.11"), (".gpu", "3.12")])
def test_pins_lie_within_the_ranges_and_conda_takes_them(gpu, python):
    lines = (ROOT / f"requirements{gpu}.lock").read_text().splitlines()
    pairs = [line.split(" ;")[0].split("==") for line in lines if re.match(r"[\w.-]+==", line)]
    pins = {name.lower().replace("_", "-"): version for name, version in pairs}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        if not text.startswith("twell["):
            requirement = Requirement(text)
            version = pins[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(version), text
    assert ("nvidia-cublas" in pins) == bool(gpu)
    listed = yaml.safe_load((ROOT / f"environment{gpu}.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    assert pip == [f"-r requirements{gpu}.lock", "-e ."] and f"python={python}" in listed


def test_one_table_names_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (
        (ROOT / "docs" / "serving.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    )
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(project["optional-dependencies"])


@pytest.mark.slow
def test_the_pins_for_a_gpu_can_be_installed_together(tmp_path):
    """Resolved by the registry, the pins need each other and no other package."""
    lock, target = ROOT / "requirements.gpu.lock", "--python-platform x86_64-manylinux_2_28"
    command = f"{sys.executable} -m uv pip compile {lock} -q --python-version 3.12 {target}"
    command = f"{command} --no-annotate --no-header --system-certs"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run(command.split(), cwd=tmp_path, env=environment)  # uv builds some packages
    assert done.returncode == 0, done.stderr
    pins = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert done.stdout.splitlines() == pins


def test_without_its_link_the_package_is_neither_built_nor_imported(tmp_path):
    copy = tmp_path / "zip"
    (copy / "twell").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("__init__.py", "__main__.py", "lazy.py"):
        shutil.copy(ROOT / "twell" / name, copy / "twell")
    (copy / "twell" / "kernels").write_text("../kernels")  # as some programs store a link
    message = "is not a link to ../kernels"
    done = run([*WHEEL, str(tmp_path), str(copy)], cwd=tmp_path)
    assert done.returncode and message in done.stderr and not list(tmp_path.glob("*.whl"))
    for command in (["-c", "import twell"], ["-m", "twell", "info"]):
        done = run([sys.executable, *command], cwd=copy)
        last = done.stderr.splitlines()[-1]
        assert done.returncode and message in last and "ln -s" in last


def test_results_go_where_git_does_not_look_and_tracked_files_stay_small():
    folders = [common.RUNS, common.BUILD, "runs/live"]
    paths = [str(Path(folder) / "x") for folder in (*folders, "figures/live")]
    assert tracked("check-ignore", *paths) == paths
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "data/live" not in makefile
    cleaned = makefile.partition("\nclean:\n")[2].splitlines()[0].split()
    # Runs and measurements of the user stay.
    assert not {"build", "build/bench", "build/eval", "runs"} & set(cleaned)
    files = [ROOT / name for name in tracked("ls-files")]
    assert len(files) > 100
    assert sum(file.stat().st_size for file in files if file.is_file()) < 30e6


# Of the make that may run the tests, which hands its variables on.
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
PYTHON = """#!/bin/sh
echo "$*" >> calls
for last in "$@"; do :; done
case "$*" in
  *execute.py*) touch "$5";;
  *" train "*) mkdir -p "$8";;
  *" trace "*) touch "$last";;
esac
"""


def test_make_counts_its_notebooks_and_traces_a_run_before_them(tmp_path):
    """With a Python that notes how it is called, and makes empty files."""
    for name in ("twell", "study", "data", "scripts", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / ".venv" / "installed").touch()

    def make():
        (tmp_path / "calls").write_text("")
        run(["make", "reproduce", "JOBS=2"], cwd=tmp_path, env=OUTSIDE, check=True)
        calls = [call.split() for call in (tmp_path / "calls").read_text().splitlines()]
        executed = {call[4]: n for n, call in enumerate(calls) if "scripts/execute.py" in call}
        assert all(calls[n][5] == str(len(executed)) for n in executed.values())
        traced = {Path(call[-1]).name: n for n, call in enumerate(calls) if "trace" in call}
        return executed, traced

    executed, traced = make()
    names = "02_sparsity", "03_layerwise", "04_tokens", "07_inspect"
    live = [executed[f"build/notebooks/live/{name}.ipynb"] for name in names]
    assert traced["aggregate.npz"] < min(live[1:]) and traced["trace.npz"] < live[2]
    assert make() == ({}, {})
    (tmp_path / "notebooks" / "03_layerwise.ipynb").touch()
    again = {f"build/notebooks/{kind}03_layerwise.ipynb" for kind in ("", "live/")}
    assert set(make()[0]) == again


@pytest.mark.parametrize("user", [0, 1000])
def test_jupyterlab_runs_as_root_where_it_has_to(user, tmp_path):
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(["make", "-n", "lab"], cwd=ROOT, env=OUTSIDE | {"PATH": path})
    assert ("--allow-root" in done.stdout) == (user == 0), done.stdout


def test_the_list_of_recorded_runs_is_up_to_date(tmp_path):
    page = Path(shutil.copy(ROOT / "data" / "README.md", tmp_path))
    assert main(["runs", str(ROOT / "data" / "runs"), "--out", str(page)]) == 0
    assert page.read_bytes() == (ROOT / "data" / "README.md").read_bytes()


TEXT = "The river rises in the hills north of the town; in most years it can be crossed on foot. "


def test_the_shipped_model_is_the_recorded_run():
    folder, run = ROOT / "data" / "checkpoints" / "twell-6m", "5m-500m-l1-1.5e-3-seed-0"
    config, log = results.load_run(ROOT / "data" / "runs" / run)
    model, tokenizer = load(folder)
    counted = Aggregate.load(folder / "aggregate.npz")
    assert model.config.num_hidden_layers == config["num_layers"]
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        assert getattr(model.config, name) == config[name]
    assert sum(p.numel() for p in model.parameters()) == config["parameters"]
    assert len(tokenizer) == config["vocab_size"]
    assert model.config.training_tokens == config["tokens"]
    assert counted.num_tokens == 2**20 and counted.meta["run"] == run
    logged = analysis.logged_layers(log, config["intermediate_size"])["mean"].to_numpy()
    np.testing.assert_allclose(analysis.per_layer(counted)["mean"], logged, rtol=0.02)
    # On text that it has not seen it predicts far better than a guess among 4,096 tokens, 8.3 nats.
    ids = tokenizer(TEXT * 2, return_tensors="pt", return_token_type_ids=False).input_ids
    assert model(input_ids=ids, labels=ids).cross_entropy.item() < 5
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15e6
    runs, logs = results.load_runs(ROOT / "data" / "runs", "5m-500m-*-seed-0")
    sparse, dense = analysis.sweep(runs, logs).sort_values("active")["cross_entropy"]
    row = f"| cross-entropy, nats a token | {sparse:.4f} | {dense:.4f} |"
    assert row in (folder / "README.md").read_text(encoding="utf-8")


def test_the_shipped_model_has_the_code_that_loads_it():
    shipped = ROOT / "data/checkpoints/twell-6m"
    assert (shipped / CODE.name).read_bytes() == CODE.read_bytes()
    assert json.loads((shipped / "config.json").read_text())["auto_map"] == AUTO_MAP
