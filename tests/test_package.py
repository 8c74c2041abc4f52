"""What a user installs, and the model that ships."""

import json
import re
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement

from study import analysis
from twell import results
from twell.cli import main
from twell.cli.runs import BEGIN, END
from twell.models import load
from twell.models.llama import AUTO_MAP, CODE
from twell.trace import Aggregate

ROOT = results.root()
SHIPPED = ROOT / "data" / "checkpoints" / "twell-6m"
TEXT = "The river rises in the hills north of the town; in most years it can be crossed on foot. "

WHEEL = f"{sys.executable} -m pip wheel -q --no-deps --no-build-isolation -w".split()


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize(("gpu", "python"), [("", "3.11"), (".gpu", "3.12")])
def test_pins_lie_within_the_ranges_and_conda_takes_them(gpu, python):
    lines = (ROOT / f"requirements{gpu}.lock").read_text().splitlines()
    pairs = [line.split(" ;")[0].split("==") for line in lines if re.match(r"[\w.-]+==", line)]
    pins = {name.lower().replace("_", "-"): version for name, version in pairs}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        if not text.startswith(("twell[", "vllm")):  # vLLM pins a torch of its own
            requirement = Requirement(text)
            version = pins[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(version), text
    assert ("nvidia-cublas" in pins) == bool(gpu)
    listed = yaml.safe_load((ROOT / f"environment{gpu}.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    assert pip == [f"-r requirements{gpu}.lock", "-e ."] and f"python={python}" in listed


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


def test_the_list_of_recorded_runs_is_up_to_date(tmp_path):
    page, expected = tmp_path / "README.md", (ROOT / "data" / "README.md").read_text("utf-8")
    before, after = expected.partition(BEGIN)[0], expected.partition(END)[2]
    page.write_text(before + BEGIN + END + after, encoding="utf-8")
    assert main(["runs", str(ROOT / "data" / "runs"), "--out", str(page)]) == 0
    assert page.read_text("utf-8") == expected


def test_the_shipped_model_is_the_recorded_run():
    run = "5m-500m-l1-1.5e-3-seed-0"
    config, log = results.load_run(ROOT / "data" / "runs" / run)
    model, tokenizer = load(SHIPPED)
    counted = Aggregate.load(SHIPPED / "aggregate.npz")
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        assert getattr(model.config, name) == config[name]
    assert sum(p.numel() for p in model.parameters()) == config["parameters"]
    assert model.config.training_tokens == config["tokens"]
    assert counted.num_tokens == 2**20 and counted.meta["run"] == run
    logged = analysis.logged_layers(log, config["intermediate_size"])["mean"].to_numpy()
    np.testing.assert_allclose(analysis.per_layer(counted)["mean"], logged, rtol=0.02)
    # On text that it has not seen it predicts far better than a guess among 4,096 tokens, 8.3 nats.
    ids = tokenizer(TEXT * 2, return_tensors="pt", return_token_type_ids=False).input_ids
    assert model(input_ids=ids, labels=ids).cross_entropy.item() < 5
    runs, logs = results.load_runs(ROOT / "data" / "runs", "5m-500m-*-seed-0")
    sparse, dense = analysis.sweep(runs, logs).sort_values("active")["cross_entropy"]
    row = f"| cross-entropy, nats a token | {sparse:.4f} | {dense:.4f} |"
    assert row in (SHIPPED / "README.md").read_text(encoding="utf-8")
    assert (SHIPPED / CODE.name).read_bytes() == CODE.read_bytes()
    assert json.loads((SHIPPED / "config.json").read_text())["auto_map"] == AUTO_MAP
