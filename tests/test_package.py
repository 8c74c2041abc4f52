"""What a user installs: the wheel holds every file that the code opens, and the pins fit the ranges."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement

from twell import __main__ as commands
from twell import analysis, results
from twell.__main__ import main
from twell.models import load
from twell.trace import Aggregate

ROOT = results.root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {
        name.lower().replace("_", "-"): version
        for name, version in (x.split(" ;")[0].split("==") for x in lines if "==" in x)
    }


def requirements():
    extras = PROJECT["optional-dependencies"].values()
    every = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    return [Requirement(text) for text in every if not text.startswith("twell[")]


def test_pins_lie_within_the_ranges():
    for requirement in requirements():
        assert requirement.specifier.contains(pins()[requirement.name.lower().replace("_", "-")]), (
            requirement
        )


def test_conda_environment_has_the_same_versions():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    assert pip == ["-r requirements.lock", "-e ."]
    assert "python=3.11" in listed


def test_the_wheel_works_elsewhere(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], check=True
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import twell, twell.train as t; "
        "print(twell.__file__); print(sorted(f.name for f in t.CONFIGS.iterdir())); "
        "[t.TrainConfig.load(f) for f in t.CONFIGS.iterdir()]; import twell.kernels.ops; "
        "import twell.sparse.plan as c; c.default(2048, 5632, True); "
        "import twell.evaluate as e, lm_eval.tasks as l; "
        "print([l.TaskManager(include_path=e.TASKS / f, include_defaults=False).all_tasks for f in ('both', 'hub', 'local')]); "
        "import twell.analysis.claims as a; a.load(); "
        "import twell.inspector as i; i.script(); i.script('widget.js'); i.style()"
    )
    # -P: the repository, as the working folder, must not lend its own files
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    where, configs, tasks = done.stdout.splitlines()
    assert where.startswith(str(tmp_path / "site"))
    assert configs == str(sorted(f.name for f in (ROOT / "twell" / "configs").iterdir()))
    folders = [
        (ROOT / "twell" / "tasks" / name).glob("*.yaml") for name in ("both", "hub", "local")
    ]
    assert tasks == str([sorted(file.stem for file in files) for files in folders])


def test_without_its_link_the_package_is_neither_built_nor_imported(tmp_path):
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "kernels", "twell"]
    ignore = shutil.ignore_patterns("__pycache__")
    (tmp_path / "zip").mkdir()
    for name in [name for name in names if (ROOT / name).exists()]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "zip" / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tmp_path / "zip" / name)
    (tmp_path / "zip" / "twell" / "kernels").unlink()
    (tmp_path / "zip" / "twell" / "kernels").write_text(
        "../kernels"
    )  # what some programs make of a link
    said = "is not a link to ../kernels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "zip")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode and said in done.stderr and not list(tmp_path.glob("*.whl"))
    for what in (["-c", "import twell"], ["-m", "twell", "info"]):
        done = subprocess.run(
            [sys.executable, *what], capture_output=True, text=True, cwd=tmp_path / "zip"
        )
        assert (
            done.returncode
            and said in done.stderr.splitlines()[-1]
            and "ln -s" in done.stderr.splitlines()[-1]
        )


def test_results_go_where_git_does_not_look():
    folders = [
        commands.RUNS,
        commands.BENCH,
        commands.EVALUATIONS,
        Path("build"),
        Path("runs/live"),
        Path("figures/live"),
    ]
    paths = [str(folder / "x") for folder in folders]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout.split() == paths
    for name in ("Makefile", "notebooks/profiles/live.yaml"):
        assert "data/live" not in (ROOT / name).read_text(encoding="utf-8")
    clean = (
        (ROOT / "Makefile")
        .read_text(encoding="utf-8")
        .partition("\nclean:\n")[2]
        .splitlines()[0]
        .split()
    )
    assert not {"build", "build/bench", "build/eval", "runs"} & set(
        clean
    )  # what somebody trained or measured stays


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_runs_a_notebook_once_more_and_says_so(tmp_path):
    sources = ("data/paper.yaml", "twell/results.py", "twell/sparse/formats.py")
    for name in (*sources, "notebooks/a.ipynb", "notebooks/profiles/recorded.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    runner = (
        tmp_path / "runner"
    )  # fails as often as the file says, and leaves the executed notebook, its last argument
    runner.write_text(
        "#!/bin/sh\nread fail < fail; echo $((fail - 1)) > fail\n"
        '[ $fail -gt 0 ] && exit 1\nfor out in "$@"; do :; done; echo done > "$out"\n'
    )
    runner.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), f"RUN={runner}", "build/notebooks/a.ipynb"]
    outside = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PROFILE")
    }
    for fail, again in ((0, False), (1, True), (2, True)):
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        (tmp_path / "fail").write_text(f"{fail}\n")
        done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True)
        assert done.stdout.count("notebooks/a.ipynb: once more\n") == again, done
        assert (
            (done.returncode == 0)
            == (tmp_path / "build" / "notebooks" / "a.ipynb").is_file()
            == (fail < 2)
        )


def test_the_list_of_recorded_runs_is_up_to_date(tmp_path):
    page = shutil.copy(ROOT / "data" / "README.md", tmp_path)
    assert main(["runs", str(ROOT / "data" / "runs"), "--into", str(page)]) == 0
    assert Path(page).read_text(encoding="utf-8") == (ROOT / "data" / "README.md").read_text(
        encoding="utf-8"
    )


def test_the_shipped_model_is_the_recorded_run():
    folder = ROOT / "data" / "checkpoints" / "twell-6m"
    config, log = results.load_run(ROOT / "data" / "runs" / "5m-500m-l1-1.5e-3-seed-0")
    model, tokenizer = load(folder)
    counted = Aggregate.load(folder / "aggregate.npz")
    sizes = (
        model.config.num_hidden_layers,
        model.config.hidden_size,
        model.config.intermediate_size,
    )
    assert sizes == (config["num_layers"], config["hidden_size"], config["intermediate_size"])
    assert (
        sum(p.numel() for p in model.parameters()) == config["parameters"]
        and len(tokenizer) == config["vocab_size"]
    )
    assert model.config.training_tokens == config["tokens"]
    assert counted.num_tokens == 2**20 and counted.meta["run"] == "5m-500m-l1-1.5e-3-seed-0"
    logged = analysis.logged_layers(log, config["intermediate_size"])["mean"].to_numpy()
    np.testing.assert_allclose(analysis.per_layer(counted)["mean"], logged, rtol=0.02)
    # On text that it has not seen it predicts: far better than a guess among 4,096 tokens (8.3 nats).
    text = (
        "The river rises in the hills north of the town, and for most of the year it can be crossed on foot. "
        * 2
    )
    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids
    assert float(model.eval()(input_ids=ids, labels=ids).cross_entropy) < 5
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    runs, logs = results.load_runs(ROOT / "data" / "runs", "5m-500m-*")
    sparse, dense = analysis.sweep(runs, logs).sort_values("active")["cross_entropy"]
    assert f"| cross-entropy, nats a token | {sparse:.4f} | {dense:.4f} |" in card


def test_tracked_files_stay_small():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 24e6
    assert len(files) > 100
