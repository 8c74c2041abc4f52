"""What a user installs: the wheel holds every file that the code opens, and the pins fit the ranges."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement

from twell import __main__ as commands
from twell import analysis, results
from twell.__main__ import main
from twell.model import load
from twell.sparse_training import rooms
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
    (tmp_path / "zip" / "twell" / "kernels").write_text("../kernels")  # what some programs make of a link
    said = "is not a link to ../kernels"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path / "zip")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode and said in done.stderr and not list(tmp_path.glob("*.whl"))
    for what in (["-c", "import twell"], ["-m", "twell", "info"]):
        done = subprocess.run([sys.executable, *what], capture_output=True, text=True, cwd=tmp_path / "zip")
        assert done.returncode and said in done.stderr.splitlines()[-1] and "ln -s" in done.stderr.splitlines()[-1]


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
    clean = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nclean:\n")[2].splitlines()[0].split()
    assert not {"build", "build/bench", "build/eval", "runs"} & set(clean)  # what somebody trained or measured stays


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_runs_a_notebook_once_more_and_says_so(tmp_path):
    for name in ("data/paper.yaml", "notebooks/a.ipynb", "notebooks/profiles/recorded.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("results", "trace", "format"):
        (tmp_path / "twell").mkdir(exist_ok=True)
        (tmp_path / "twell" / f"{name}.py").touch()
    runner = tmp_path / "runner"  # fails as often as the file says, and leaves the executed notebook, its last argument
    runner.write_text(
        "#!/bin/sh\nread fail < fail; echo $((fail - 1)) > fail\n"
        '[ $fail -gt 0 ] && exit 1\nfor out in "$@"; do :; done; echo done > "$out"\n'
    )
    runner.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), f"RUN={runner}", "build/notebooks/a.ipynb"]
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PROFILE")}
    for fail, again in ((0, False), (1, True), (2, True)):
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        (tmp_path / "fail").write_text(f"{fail}\n")
        done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True)
        assert done.stdout.count("notebooks/a.ipynb: once more\n") == again, done
        assert (done.returncode == 0) == (tmp_path / "build" / "notebooks" / "a.ipynb").is_file() == (fail < 2)


def test_the_list_of_recorded_runs_is_up_to_date(tmp_path):
    page = shutil.copy(ROOT / "data" / "README.md", tmp_path)
    assert main(["runs", str(ROOT / "data" / "runs"), "--into", str(page)]) == 0
    assert Path(page).read_text(encoding="utf-8") == (ROOT / "data" / "README.md").read_text(encoding="utf-8")


def signed(value, digits=1):
    return f"{value:+.{digits}f}".replace("-", "−")


def with_limit(found):
    """A difference of `analysis.contrast` with what seeds explain."""
    return f"{signed(found['difference'])} ± {found['limit']:.1f}%"


def test_readme_states_what_the_sweep_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    runs, log = results.load_runs(ROOT / "data" / "runs", "85m-50m-*")
    recipe = analysis.choice(runs) == "recipe"
    table = analysis.levels(analysis.sweep(runs[recipe], log))
    best, table = analysis.recommended(table), table.set_index("l1_coefficient")
    assert best["l1_coefficient"] == 6e-4 and list(table["runs"]) == [3 if l1 in (0, 6e-4) else 1 for l1 in table.index]
    assert table["status"].eq("alive").all()
    dense, good, costly, broken = (table.loc[l1] for l1 in (0.0, 6e-4, 1.5e-3, 5e-3))
    choices = analysis.choices(runs, log)

    def against(column, choice, l1, other=("recipe", 6e-4)):
        return analysis.contrast(choices, column, (choice, l1), other)

    noise = against("cross_entropy_change", "recipe", 6e-4, ("recipe", 0.0))
    single = against("cross_entropy_change", "recipe", 1.5e-4, ("recipe", 0.0))
    moderate = table["cross_entropy_change"][[2e-5, 6e-5, 1.5e-4, 3e-4]]
    assert noise["verdict"] == "less" and (moderate < -single["limit"]).all()
    longer = analysis.levels(analysis.sweep(*results.load_runs(ROOT / "data" / "runs", "85m-100m-*")))
    longer = longer.set_index("l1_coefficient")
    longer, longer_dead = longer["cross_entropy_change"], longer["dead_fraction_train"][6e-4]
    active = analysis.training_curves(runs[runs["run"] == good["run"]], log, "active_mean")
    settled = 100 * analysis.settles_after(active)
    counted, wide = (
        Aggregate.load(ROOT / "data" / "traces" / f"{name}-aggregate.npz") for name in ("85m-50m-l1-6e-4", "flagship")
    )
    layers, wide_layers = analysis.per_layer(counted), analysis.per_layer(wide)
    over, wide_over = layers["max_over_mean"], wide_layers["max_over_mean"]
    least = [
        analysis.logged_layers(log[log["run"] == f"85m-50m-l1-6e-4-seed-{seed}"], 2112)["max_over_mean"].min()
        for seed in (0, 1)
    ]
    tiles = [analysis.tile_overflow(found).query("compression == 8").set_index("layer") for found in (counted, wide)]
    overflow = [100 * found["overflow_rows"].max() for found in tiles]
    assert tiles[0]["overflow_rows"].idxmax() == 11
    position, wide_position = (analysis.by_position(found)["mean_active"] for found in (counted, wide))
    sizes = analysis.sizes(*results.load_runs(ROOT / "data" / "runs", "depth-* 85m-100m-l1-*"))
    assert sizes["num_layers"].tolist() == [2, 4, 8, 12] and sizes["active"].is_monotonic_decreasing
    reinit, warm, balanced = (
        {column: against(column, name, 6e-4) for column in analysis.QUANTITIES}
        for name in ("re-initialisation", "L1 warm-up", "balanced columns")
    )
    chosen = analysis.levels(choices).set_index(["choice", "l1_coefficient"])
    frontier = (
        analysis.against_frontier(choices).set_index(["choice", "l1_coefficient"]).loc[("balanced columns", 6e-4)]
    )
    assert frontier["verdict"] == "less" and balanced["active_fraction"]["verdict"] == "less"
    assert reinit["cross_entropy_change"]["verdict"] == reinit["active_fraction"]["verdict"] == "within noise"
    ungated = [against("cross_entropy_change", "non-gated", l1, ("recipe", l1)) for l1 in (0.0, 6e-4)]
    assert [found["verdict"] for found in ungated] == ["more", "within noise"]
    silu = against("cross_entropy_change", "SiLU", 0.0, ("recipe", 0.0))
    assert silu["verdict"] == "within noise"
    for words in (
        f"{dense['active']:.0f} of 2,112 ({100 * dense['active_fraction']:.1f}%)",
        f"{good['active']:.1f} active ({100 - 100 * good['active_fraction']:.1f}% inactive, "
        f"{dense['active'] / good['active']:.0f} times fewer) for {with_limit(noise)} (L1 = 6e-4",
        f"99.5%, +1.9% cross-entropy | {100 - 100 * good['active_fraction']:.1f}%, {with_limit(noise)} (99 M parameters)",
        f"From 2e-5 to 3e-4 {signed(moderate.max())} to {signed(moderate.min())}%, one seed each (± {single['limit']:.1f}%)",
        f"On twice the tokens {signed(longer[6e-4])}% at 6e-4, {signed(longer[1.5e-4])}% at 1.5e-4",
        f"{signed(costly['cross_entropy_change'])}% at 1.5e-3 ({costly['active']:.1f} active)",
        f"{signed(broken['cross_entropy_change'])}% at 5e-3 ({broken['active']:.2f} active)",
        f"costs {good['ffn_gain']:.1f} nats at 6e-4 ({dense['ffn_gain']:.1f} at L1 = 0)",
        f"at 5e-3, {broken['ffn_gain']:.2f}: there they hardly do",
        f"within 20% of its last value after {settled:.0f}% of a training of 1,526 steps",
        f"{100 * good['dead_fraction_train']:.0f}% (silent for 2^20 tokens), {100 * longer_dead:.0f}% on twice the tokens",
        f"{100 * table['dead_fraction_train'][6e-4]:.0f} to {100 * reinit['dead_fraction_train']['value']:.1f}% dead, cross-entropy "
        f"{with_limit(reinit['cross_entropy_change'])}, activity {with_limit(reinit['active_fraction'])}",
        f"{' → '.join(f'{active:.1f}' for active in sizes['active'])} active with 2, 4, 8 and 12 layers",
        f"{signed(sizes['change'].min())} to {signed(sizes['change'].max())}% cross-entropy over dense",
        f"{100 * warm['dead_fraction_train']['value']:.0f}% dead, {chosen['active']['L1 warm-up', 6e-4]:.1f} active, "
        f"cross-entropy {with_limit(warm['cross_entropy_change'])}",
        f"{with_limit(silu)}, one seed: as much as in the paper",
        f"{with_limit(ungated[0])} without L1, {with_limit(ungated[1])} at 6e-4, "
        f"with {chosen['active']['non-gated', 6e-4]:.1f} of 3,168 active",
        f"{chosen['active']['balanced columns', 6e-4]:.1f} active ({with_limit(balanced['active_fraction'])}), cross-entropy "
        f"{with_limit(balanced['cross_entropy_change'])}",
        f"{signed(frontier['difference'])} ± {frontier['limit']:.1f}% over a recipe that is as sparse",
        f"{over.min():.0f} to {over.max():.0f} times by layer; of the other two seeds the least layer has {least[0]:.1f} and "
        f"{least[1]:.1f}; in the flagship {wide_over.min():.0f} to {wide_over.max():.0f}",
        f"{overflow[0]:.1f}% of the tokens have one that does, in the last layer; in the flagship {overflow[1]:.2f}%",
        f"the last the most ({layers['mean'].iloc[-1]:.0f} active)",
        f"{position.iloc[0]:.1f} active at the first position, {position.iloc[512:].mean():.1f} over the second half; in the "
        f"flagship {wide_position.iloc[0]:.0f} and {wide_position.iloc[512:].mean():.1f}",
    ):
        assert words in text, words
    assert over.min() > 10 and wide_over.min() > 10
    assert set(layers["mean"].nsmallest(3).index) == {2, 3, 4} and layers["mean"].idxmax() == 11
    assert wide_layers["mean"].idxmin() == 1 and wide_layers["mean"].idxmax() == 7


def test_readme_states_what_was_computed_in_two_ways():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    runs, log = results.load_runs(ROOT / "data" / "runs", "flagship-dense flagship-triton")
    dense, sparse = analysis.computed_otherwise(runs, log).to_dict("records")
    assert (dense["run"], sparse["run"]) == ("flagship-dense", "flagship-triton")
    faster, lighter, heavier = (
        100 * (sparse[name] / dense[name] - 1) for name in ("tokens_per_second", "peak_memory", "peak_memory_whole")
    )
    seconds = {}
    for run, rows in log[log["metric"] == "tokens_per_second"].groupby("run"):
        seconds[run] = (rows["tokens"].diff().fillna(rows["tokens"]) / rows["value"]).sum()
    whole = 100 * (seconds["flagship-dense"] / seconds["flagship-triton"] - 1)
    losses = analysis.training_curves(runs, log, "cross_entropy").pivot(index="step", columns="run", values="value")
    later = losses[losses.index > losses.index[-1] / 2]
    lower = (later["flagship-dense"] - later["flagship-triton"]).mean()
    active = analysis.training_curves(runs[runs["run"] == "flagship-triton"], log, "active_mean")
    dead = analysis.training_curves(runs[runs["run"] == "flagship-triton"], log, "dead_fraction")["value"].iloc[-1]
    for words in (
        f"{signed(whole, 0)}% over the whole training, {signed(faster, 0)}% in its second half ({sparse['active']:.1f} of 5,632 active)",
        f"a loss {lower:.3f} nats lower there",
        f"peak {signed(lighter, 0)}% in the second half; {signed(heavier, 0)}% in the first steps, which are not sparse",
        f"in the flagship after {100 * analysis.settles_after(active):.0f}% of 1,145",
        f"in the flagship {100 * dead:.0f}% |",
    ):
        assert words in text, words
    _, half = results.load_runs(ROOT / "data" / "runs", "flagship-half")
    speeds = half[half["metric"] == "tokens_per_second"]["value"].reset_index(drop=True)
    slowed = (speeds < 0.9 * speeds.rolling(5, center=True, min_periods=1).median()).sum()
    assert f"(`flagship-half`: {slowed} of {len(speeds)} rows)" in text
    pair = results.load_runs(ROOT / "data" / "runs", "171m-30m-1-gpu 171m-30m-2-gpus")
    one, two = analysis.computed_otherwise(*pair).to_dict("records")
    speed = two["tokens_per_second"] / one["tokens_per_second"]
    _, log = results.load_runs(ROOT / "data" / "runs", "171m-30m-*")
    ends = log[(log["split"] == "valid") & (log["metric"] == "cross_entropy")].groupby("run")["value"].last()
    two_end, one_end, before = (ends[f"171m-30m-{run}"] for run in ("2-gpus", "1-gpu", "1-gpu-before"))
    said = f"{speed:.2f} times the tokens/s of one in the second half of a training; cross-entropy at the end {two_end:.3f}, "
    assert said + f"of one GPU {one_end:.3f} and, before, {before:.3f}" in text


def test_the_log_of_the_kernels_states_what_whole_trainings_say():
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    speed = {}
    for name in ("171m-30m-{}-before", "171m-40m-{}-before", "171m-40m-{}", "171m-30m-{}"):
        name = f"{name.format('1-gpu')} {name.format('2-gpus')}"
        runs, log = results.load_runs(ROOT / "data" / "runs", name)
        speed[name] = analysis.computed_otherwise(runs, log)["tokens_per_second"].tolist()
    ratios = [two / one for one, two in speed.values()]
    (before, before_two), (after, after_two), (last, last_two) = list(speed.values())[1:]
    for words in (
        f"{ratios[0]:.2f} (medians of the second half",
        f"four times the tokens: {ratios[1]:.2f} too",
        f"one GPU went from {before / 1e3:.0f} to {after / 1e3:.0f} thousand tokens/s, two from {before_two / 1e3:.0f} to "
        f"{after_two / 1e3:.0f}: the ratio fell to {ratios[2]:.2f}",
        f"{last / 1e3:.0f} thousand tokens/s on one, {last_two / 1e3:.0f} on two: {ratios[3]:.2f}",
    ):
        assert words in text, words
    dense, sparse = analysis.computed_otherwise(
        *results.load_runs(ROOT / "data" / "runs", "flagship-dense flagship-triton")
    ).to_dict("records")
    memory = [dense["peak_memory"], sparse["peak_memory"], sparse["peak_memory_whole"]]
    late, held, early = (f"{value / 1e9:.1f}" for value in memory)
    assert f"peak {held} instead of\n  {late} GB" in text and f"({early} GB)" in text
    assert len(rooms(5632)) == 16 and "one of 16 sizes" in text


def test_readmes_state_what_single_runs_say():
    text, data = ((ROOT / folder / "README.md").read_text(encoding="utf-8") for folder in (".", "data"))
    runs, log = results.load_runs(ROOT / "data" / "runs")
    at_end = log[(log["split"] == "valid") & (log["metric"] == "cross_entropy")].groupby("run")["value"].last()
    active = log[(log["split"] == "valid") & (log["metric"] == "active_mean")]
    active = active[active["step"] == active.groupby("run")["step"].transform("max")].groupby("run")["value"].mean()
    high, high_sparse, low = (
        100 * (at_end[f"lr-{rate}-l1-{name}"] / at_end[f"85m-50m-l1-{name}-seed-0"] - 1)
        for rate, name in (("2e-3", "0"), ("2e-3", "3e-4"), ("5e-4", "0"))
    )
    assert f"2e-3: dense {high:.1f}% worse, L1 = 3e-4 {high_sparse:.1f}%; 5e-4: dense {low:.1f}%" in text
    assert (
        f"2e-3 dense is {high:.1f}% worse and L1 = 3e-4 {high_sparse:.1f}%; at 5e-4 dense is {low:.1f}% worse" in data
    )
    commits = runs.set_index("run")["commit"].str[:7]
    later = {f"171m-40m-{gpus}": "1dc4a04" for gpus in ("1-gpu", "2-gpus")}
    later |= dict.fromkeys(["171m-30m-1-gpu", "171m-30m-2-gpus", "flagship-half"], "e38d17b")
    assert commits[list(later)].to_dict() == later and "`171m-40m-1-gpu` and `-2-gpus`: 1dc4a04" in data
    assert "`171m-30m-1-gpu`, `-2-gpus` and `flagship-half`: e38d17b" in data
    assert set(commits.drop(list(later))) == {"3032514", "376facd"} and "of the commits 3032514 and 376facd" in data
    sparse, dense = "5m-500m-l1-1.5e-3-seed-0", "5m-500m-l1-0-seed-0"
    price, inactive = 100 * (at_end[sparse] / at_end[dense] - 1), 100 - 100 * active[sparse] / 704
    assert f"5.9 M parameters on 500 M tokens: {inactive:.1f}% inactive for {signed(price)}%" in text
    parameters = runs.set_index("run")["parameters"][sparse]
    assert f"{parameters / 1e6:.1f} M parameters, 500 M tokens, {inactive:.1f}% of the neurons" in text
    card = (ROOT / "data" / "checkpoints" / "twell-6m" / "README.md").read_text(encoding="utf-8")
    assert f"| cross-entropy, nats a token | {at_end[sparse]:.4f} | {at_end[dense]:.4f} |" in card
    assert f"The twin is the run `{dense}` of commit " in card and f"the price is {price:+.2f}% cross-entropy." in card


def test_readme_states_what_the_paper_prints():
    text, paper = (ROOT / "README.md").read_text(encoding="utf-8"), results.paper()

    def printed(metric, **filters):
        rows = results.paper(metric, **filters)
        return {row["model"]: row["value"] for row in rows.to_dict("records")}

    table = paper[(paper["source"] == "Table 1") & paper["sparse"].eq(True)]
    for metric, after in (
        ("training_throughput_change", " tokens/s |"),
        ("training_peak_memory_change", " (with a larger micro-batch) |"),
    ):
        rows = table[table["metric"] == metric].set_index("model")["value"].astype(float)
        said = ", ".join(f"{model} {signed(rows[model])}%" for model in ("0.5B", "1B", "1.5B", "2B"))
        assert f"| {said}{after}" in text, said
    active = printed("avg_nonzeros", l1=2e-5)
    assert f"| {active['0.5B']:.0f} → {active['1.5B']:.0f} → {active['2B']:.0f} active, 0.5 to 2B |" in text


def test_readme_states_what_was_evaluated():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = analysis.evaluations(results.load_evaluations(ROOT / "data" / "eval"))
    assert set(table.loc[table["model"] == "twell-6m", "training_tokens"]) == {5e8}
    levels = [f"85m-100m-l1-{level}-seed-0" for level in ("0", "1.5e-4", "6e-4")]
    fp32 = table[(table["dtype"] == "float32") & (table["backend"] == "dense") & table["model"].isin(levels)]

    def percent(task):
        rows = fp32[(fp32["task"] == task) & (fp32["metric"] == "acc")].set_index("model").loc[levels]
        return ", ".join(f"{100 * value:.1f}" for value in rows["accuracy"]), 100 * rows["stderr"].max()

    (means, error), (continued, continued_error) = percent("paper7"), percent("held_out_continuation")
    assert f"{means} ± {error:.1f}% at L1 = 0, 1.5e-4, 6e-4 (chance 31.4)" in text
    assert f"{continued} ± {continued_error:.1f}% (chance 25)" in text


def test_the_shipped_model_is_the_recorded_run():
    folder = ROOT / "data" / "checkpoints" / "twell-6m"
    config, log = results.load_run(ROOT / "data" / "runs" / "5m-500m-l1-1.5e-3-seed-0")
    model, tokenizer = load(folder)
    counted = Aggregate.load(folder / "aggregate.npz")
    sizes = (model.config.num_hidden_layers, model.config.hidden_size, model.config.intermediate_size)
    assert sizes == (config["num_layers"], config["hidden_size"], config["intermediate_size"])
    assert sum(p.numel() for p in model.parameters()) == config["parameters"] and len(tokenizer) == config["vocab_size"]
    assert model.config.training_tokens == config["tokens"]
    assert counted.num_tokens == 2**20 and counted.meta["run"] == "5m-500m-l1-1.5e-3-seed-0"
    logged = analysis.logged_layers(log, config["intermediate_size"])["mean"].to_numpy()
    np.testing.assert_allclose(analysis.per_layer(counted)["mean"], logged, rtol=0.02)
    # On text that it has not seen it predicts: far better than a guess among 4,096 tokens (8.3 nats).
    text = "The river rises in the hills north of the town, and for most of the year it can be crossed on foot. " * 2
    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids
    assert float(model.eval()(input_ids=ids, labels=ids).cross_entropy) < 5
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15e6


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
    assert f"−{100 - 100 * energy['triton union'] / energy['dense torch.compile']:.0f}% at 131,072 tokens" in text
    fuzz = pd.read_csv(ROOT / "data" / "bench" / "fuzz.csv")
    fuzz = fuzz[fuzz["dtype"] == "bfloat16"]
    training = fuzz["path"].str.startswith("training")
    (cases, worst), (more, gradients) = (
        (some["cases"].iloc[0], some["worst_relative_rms"].max()) for some in (fuzz[~training], fuzz[training])
    )
    said = f"{cases:,} random cases, worst relative RMS {worst:.1e} in bf16; gradients too: {more:,} cases, {gradients:.1e}"
    assert said.replace("e-0", "e-") in text


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


def test_readme_states_what_was_measured_of_whole_models():
    text, bench = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "data" / "bench"
    models = analysis.model_speedups(pd.read_csv(bench / "model.csv"))
    steps = analysis.step_speedups(pd.read_csv(bench / "train_step.csv"))
    forward = models.query("profile == 'paper' and batch == 64 and context == 2048")
    plain = steps.query("profile == 'paper' and micro_batch == 16 and not checkpoint_activations")
    scale = analysis.scale_table(results.paper(), forward, plain)

    def changes(quantity, column, digits=0):
        rows = scale[scale["quantity"] == quantity].set_index("model")[column]
        return ", ".join(signed(rows[model], digits) for model in ("0.5B", "1B", "1.5B", "2B")) + "%"

    auto = forward[forward["provider"] == "auto torch.compile"].set_index("model")
    near = auto[auto["active"].between(20, 40)].sort_values("active", key=lambda active: (active - 29).abs())["active"]
    recommended = near[~near.index.duplicated()]  # of 1.5B there are three levels
    active = ", ".join(f"{recommended[model]:.0f}" for model in ("0.5b", "1b", "1.5b"))
    dense_level = forward[forward["active"] > 800].set_index("provider")
    layers = analysis.layer_contributions(pd.read_csv(bench / "model_layers.csv"))
    imposed = analysis.layers_at(layers.query("profile == 'paper' and model == '1.5b'"), 29)
    trained = layers.query("model == 'flagship-half'")
    gain = models.query("model == 'flagship-half' and provider == 'auto torch.compile'").iloc[0]
    small_model = models.query("model == 'twell-6m'").set_index("provider")["speedup"]
    decode = pd.read_csv(bench / "decode.csv")
    assert decode.loc[decode["provider"] == "dense torch.compile tuned", "date"].nunique() == 3
    decode = analysis.decode_speedups(decode)
    (by_tuning,) = decode.query("tuned and provider == 'triton torch.compile'")["speedup"]
    decode = decode[~decode["tuned"]]
    dense, sparse = (
        decode[decode["provider"] == f"{side} torch.compile"].set_index("batch") for side in ("dense", "triton")
    )
    alone, eight, more = (signed(100 * (sparse["speedup"][batch] - 1), 0) for batch in (1, 8, 32))
    few = ", ".join(f"{sparse['active'][batch]:.0f}" for batch in (1, 8, 32))
    eager = models[(models["model"] == "2b") & (models["tokens"] == 131072)].set_index("provider")["p50"]
    small_step = steps[steps["model"] == "171m"].set_index("provider")["speedup"]
    training = steps[(steps["model"] == "1.5b") & steps["largest"].notna()]
    training = training.set_index(["checkpoint_activations", "provider"])
    forced = steps[(steps["active"] > 800) & (steps["provider"] == "triton union torch.compile")].iloc[0]
    fits, again = training["largest"][False], training["largest"][True]
    again_faster = training["speedup"][True, "triton union torch.compile"]
    r, r_trained = (signed(analysis.correlation(table), 3) for table in (imposed, trained))
    row = scale.set_index(["quantity", "model"])
    largest, middle = (
        [signed(row.loc[(quantity, model), "change"], 0) for quantity in quantities]
        for model, quantities in (
            ("2B", ("forward speed", "forward energy")),
            ("1.5B", ("training speed", "training memory")),
        )
    )
    for words in (
        f"| +20.5% tokens/s, −17.0% energy | {largest[0]}%, {largest[1]}% |",
        f"| +11.6% tokens/s, −28.1% peak memory | {middle[0]}%, {middle[1]}% |",
        f"| decoding one document, 2B | – | {alone}% tokens/s; "
        f"{signed(100 * (by_tuning - 1), 0)}% where the compiler tunes",
        f"whole models {changes('forward speed', 'paper_change', 1)} tokens/s (0.5, 1, 1.5, 2B)",
        f"{changes('forward speed', 'change')} with {active}, {recommended['2b']:.0f} active (a point or two between calls); "
        f"not compiled {signed(100 * (eager['dense eager'] / eager['auto'] - 1), 0)}% for 2B; the layer alone 1.89 times",
        f"{changes('forward energy', 'paper_change', 1)} a token",
        f"{changes('forward energy', 'change')} (a few points between calls); the layer alone −46%",
        f"{r} over the layers of 1.5B, whose profile is imposed; {r_trained} over the {len(trained)} layers of a trained",
        f"{signed(100 * (dense_level.loc['triton torch.compile', 'speedup'] - 1), 0)}% with 897 active; `auto` computes "
        f"densely there, at {100 * dense_level.loc['auto torch.compile', 'speedup']:.1f}% of dense",
        f"{alone}% tokens/s for one document (",
        f"{eight}% for 8, {more}% for 32 ({few} active); at 128 `auto` is dense",
        f"which differs from call to call: {signed(100 * (by_tuning - 1), 0)}%, the fastest of three calls",
        f"{active}, {recommended['2b']:.0f} active: {changes('training speed', 'change')}, of 1.5B with checkpointed activations "
        f"{signed(100 * (again_faster - 1), 0)}%, without L1 ({forced['active']:.0f} active) "
        f"{signed(100 * (forced['speedup'] - 1), 0)}%; the layer alone 2.49",
        f"{changes('training memory', 'change')}, and {fits['triton union torch.compile']:.0f} documents of 2,048 tokens fit where "
        f"dense fits {fits['dense torch.compile']:.0f} (1.5B; with checkpointed activations "
        f"{again['triton union torch.compile']:.0f} and {again['dense torch.compile']:.0f}); the layer keeps 0.165 times",
        f"(445 M, {gain['active']:.1f} active): {signed(100 * (gain['speedup'] - 1), 0)}%",
        f"6 M model takes {1 / small_model['triton torch.compile']:.1f} times as long by the kernels as densely, and "
        f"{1 / small_model['auto torch.compile']:.1f} times with `auto`; a compiled training step of 171 M gives "
        f"{signed(100 * (small_step['triton union torch.compile'] - 1), 0)}% tokens/s, not compiled "
        f"{signed(100 * (small_step['triton union'] / small_step['dense eager'] - 1), 0)}%.",
    ):
        assert words in text, words
    assert decode.query("batch == 128 and provider == 'auto torch.compile'")["path"].tolist() == ["dense 38"]
    assert round(dense_level["active"].iloc[0]) == 897 and models["layer_rms"].max() < 5e-3


def test_tracked_files_stay_small():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 24e6
    assert len(files) > 100
