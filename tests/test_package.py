"""What a user installs: the wheel holds every file that the code opens, and the pins fit the ranges."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement

from twell import analysis, results
from twell.__main__ import main

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
        assert requirement.specifier.contains(pins()[requirement.name.lower().replace("_", "-")]), requirement


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
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import twell, twell.train as t; "
        "print(twell.__file__); print(sorted(f.name for f in t.CONFIGS.iterdir())); "
        "[t.TrainConfig.load(f) for f in t.CONFIGS.iterdir()]; import twell.kernels.ops; "
        "import twell.choose as c; c.default(2048, 5632, True); "
        "import twell.evaluate as e, lm_eval.tasks as l; "
        "print([l.TaskManager(include_path=e.TASKS / f, include_defaults=False).all_tasks for f in ('both', 'hub', 'local')]); "
        "import twell.inspector as i; [f.read_text(encoding='utf-8') for f in i.FILES.values()]"
    )
    # -P: the repository, as the working folder, must not lend its own files
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "site")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    where, configs, tasks = done.stdout.splitlines()
    assert where.startswith(str(tmp_path / "site"))
    assert configs == str(sorted(f.name for f in (ROOT / "twell" / "configs").iterdir()))
    folders = [(ROOT / "twell" / "tasks" / name).glob("*.yaml") for name in ("both", "hub", "local")]
    assert tasks == str([sorted(file.stem for file in files) for files in folders])


def test_readme_names_real_commands_and_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z]+)", text)) <= targets
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link


def test_the_list_of_recorded_runs_is_up_to_date(tmp_path):
    page = shutil.copy(ROOT / "data" / "README.md", tmp_path)
    assert main(["runs", str(ROOT / "data" / "runs"), "--into", str(page)]) == 0
    assert Path(page).read_text(encoding="utf-8") == (ROOT / "data" / "README.md").read_text(encoding="utf-8")


def test_readme_states_what_the_recorded_runs_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    runs, log = results.load_runs(ROOT / "data" / "runs")
    quick = runs[runs["run"].str.startswith("quick-")]
    table = analysis.sweep(quick, log).set_index("l1_coefficient")
    dense, good, sparse = table.loc[0.0], table.loc[3e-3], table.loc[1e-2]
    settled = (
        analysis.training_curves(quick, log, "active_mean").query("l1_coefficient == 3e-3").set_index("step")["value"]
    )
    last = log[(log["run"] == good["run"]) & (log["split"] == "valid") & (log["step"] == 480)]
    layers = last.pivot_table(index="layer", columns="metric", values="value")
    over = layers["active_max"] / layers["active_mean"]
    for words in (
        f"{dense['active']:.0f} of 512 ({100 * dense['active_fraction']:.1f}%)",
        f"{dense['active'] / good['active']:.1f} times for −{-good['cross_entropy_change']:.1f}% (L1 = 3e-3)",
        f"{dense['active'] / sparse['active']:.0f} times for +{sparse['cross_entropy_change']:.1f}% (1e-2)",
        f"fell {sparse['fall']:.0f} times since initialisation",
        f"costs {sparse['ffn_gain']:.2f} nats",
        f"{settled[100]:.1f} active after 21% of the training, {settled[480]:.1f} at its end",
        f"{over.min():.0f} to {over.max():.0f} by layer",
        f"{100 * good['dead_fraction_train']:.1f}% (3e-3; silent for 131,072 tokens)",
    ):
        assert words in text
    assert sparse["min_layer_active"] > 1 and list(table["status"][-2:]) == ["unused", "dead layer"]


def test_readme_states_what_the_measured_rows_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = analysis.speedups(pd.read_csv(ROOT / "data" / "bench" / "ffn.csv"))
    ours = rows.query("hidden_size == 2048 and gated and 25 < active < 35")
    ours = ours[ours["provider"].isin(["triton union", "triton rowwise", "triton decode"])]

    def best(tokens, pattern="skewed", mode="stream", rows=ours):
        case = rows[(rows["tokens"] == tokens) & (rows["pattern"] == pattern) & (rows["mode"] == mode)]
        return f"{case['speedup'].max():.2f}"

    others = rows[rows["provider"] == "triton union"]
    hundred = others.query("hidden_size == 2048 and gated and 98 < active < 102")
    plain = others.query("not gated")
    expected = {
        "131,072 tokens, skewed, 29 active": best(131072),
        "131,072 tokens, even, 29 active": best(131072, "even"),
        "131,072 tokens, skewed, 100 active": best(131072, rows=hundred),
        "16,384 tokens, skewed, 29 active": best(16384),
        "2,048 tokens, skewed, 29 active, in a CUDA graph": best(2048, mode="graph"),
        "2,048 tokens, one call after the other": best(2048),
        "1 token, in a CUDA graph": best(1, mode="graph"),
        "2 tokens": best(2, mode="graph"),
        "16 tokens": best(16, mode="graph"),
        "64 tokens": best(64, mode="graph"),
        "non-gated, N = 8192, 131,072 tokens, skewed, 40 active": best(131072, rows=plain),
    }
    for case, speed in expected.items():
        assert f"| {case} | {speed} |" in text, (case, speed)
    auto = pd.read_csv(ROOT / "data" / "bench" / "auto.csv")
    worst = analysis.speedups(auto).query("provider == 'auto'")["speedup"].min()
    assert f"never below {worst:.2f} times" in text
    measured = pd.read_csv(ROOT / "data" / "bench" / "ffn.csv").query("tokens == 131072 and energy == energy")
    energy = measured.set_index("provider")["energy"]
    assert f"−{100 - 100 * energy['triton union'] / energy['dense torch.compile']:.0f}% energy" in text
    fuzz = pd.read_csv(ROOT / "data" / "bench" / "fuzz.csv")
    worst = fuzz.query("dtype == 'bfloat16'")["worst_relative_rms"].max()
    assert f"{fuzz['cases'][0]:,} random cases, worst relative RMS {worst:.1e}".replace("e-0", "e-") in text


def test_readme_states_what_the_measured_training_rows_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = pd.read_csv(ROOT / "data" / "bench" / "training.csv")
    cases = {
        "16,384 tokens, even, 29 active": (16_384, True, "even", 29.13),
        "16,384 tokens, skewed, 29 active": (16_384, True, "skewed", 28.24),
        "16,384 tokens, skewed, 10 active": (16_384, True, "skewed", 9.67),
        "65,536 tokens, skewed, 60 active": (65_536, True, "skewed", 60.77),
        "16,384 tokens, skewed, 197 active": (16_384, True, "skewed", 197.4),
        "non-gated, N = 8192, 16,384 tokens, skewed, 29 active": (16_384, False, "skewed", 29.2),
    }
    for name, key in cases.items():
        case = rows[(rows[["tokens", "gated", "pattern", "active"]] == list(key)).all(axis=1)].set_index("provider")
        dense, union, hybrid = (case.loc[p] for p in ("dense torch.compile", "triton union", "triton hybrid"))
        held = union["held"] / dense["held"]
        line = f"| {name} | {dense['p50'] / union['p50']:.2f} | {dense['p50'] / hybrid['p50']:.2f} | {held:.3f} |"
        assert line in text, line
    steps = pd.read_csv(ROOT / "data" / "bench" / "train_step.csv").set_index(["model", "provider"])
    gains, peaks = {}, {}
    for model in ("1.5b", "171m"):
        dense, union = (steps.loc[(model, f"{p} torch.compile")] for p in ("dense", "triton union"))
        gains[model] = f"+{100 * (union['tokens_per_second'] / dense['tokens_per_second'] - 1):.0f}%"
        peaks[model] = f"−{100 - 100 * union['peak'] / dense['peak']:.0f}%"
    assert f"29 active: {gains['1.5b']} tokens/s; 171M: {gains['171m']}; the layer alone 2.49 times" in text
    assert f"peak of the same steps {peaks['1.5b']}, {peaks['171m']}; the layer keeps 0.165 times" in text


def test_tracked_files_stay_small():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 24e6
    assert len(files) > 100
