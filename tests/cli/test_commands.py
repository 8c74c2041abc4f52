"""What commands do, what they pass on, and what `--help` costs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from tests.factories.commands import read_command
from twell import evaluate, measure, results
from twell.cli import app, main
from twell.cli.runs import BEGIN, END
from twell.measure import runner
from twell.sparse.calibration import Calibration, Point
from twell.sparse.layer import backend_status


def every_command(command=None, words=()):
    """Yield the words of every command."""
    command = command or typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))
    if not getattr(command, "commands", None):
        yield " ".join(words)


def python(code, **environment):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {code}"],
        cwd=results.root(),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_every_command_has_help_with_an_example_that_parses(capsys):
    commands = list(every_command())
    assert len(commands) == 16
    for command in commands:
        assert main([*command.split(), "--help"]) == 0
        example = capsys.readouterr().out.partition("Example: twell ")[2]
        assert " ".join(read_command(shlex.split(example))[0]) == command


def test_words_of_a_command_go_in_any_order():
    words = "train quick seed=1 --out a tokens=5"
    assert read_command(words.split()) == read_command(
        "train --out a quick seed=1 tokens=5".split()
    )
    assert read_command(words.split())[1]["overrides"] == ["seed=1", "tokens=5"]
    # Hyphens and underscores are one.
    for option in ("--num-fewshot=3", "--num_fewshot=3", "--num-fewshot 3"):
        assert read_command(["evaluate", "m", *option.split()])[1]["num_fewshot"] == 3


# --- train, trace, inspect, export, evaluate --------------------------------------------------


def test_outputs_go_to_build_and_runs_by_default(place, monkeypatch, capsys):
    monkeypatch.chdir(place.folder)
    train = place.train("seed=7")
    for arguments, expected in (
        (train[: train.index("--out")], "runs/quick-l1-0-seed-7/config.yaml"),
        (["trace", "run", "--text", "ba de"], "build/traces/run.npz"),
        (["trace", "run", "--text", "ba de", "--aggregate"], "build/traces/run-aggregate.npz"),
        (["inspect", "run", "--text", "ba de"], "build/inspect/run.html"),
        (
            ["atlas", "run", "--aggregate", "build/traces/run-aggregate.npz"],
            "build/atlas/run/index.html",
        ),
        (["export", "run", "--trained-on", "Words."], "build/export/run/README.md"),
    ):
        capsys.readouterr()
        assert main(arguments) == 0, arguments
        assert Path(expected).is_file()
        if arguments[0] != "train":
            assert expected.removesuffix("/README.md") in capsys.readouterr().out
    assert main(["runs"]) == 0


def test_inspect_takes_models_traces_and_two_texts(place, capsys):
    page = place.folder / "out.html"
    other = shutil.copytree(place.run, place.folder / "other")
    assert main(place.inspect("--text", "ba de fun <b>", "--compare", str(other))) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    printed = capsys.readouterr().out
    assert re.search(r"^run: \d+ tokens, [\d.]+ of 96 neurons", printed, re.M)
    assert "\nother: " in printed
    assert main(place.inspect("--file", place.write("long.txt", "ba de fun " * 3000))) == 0
    assert re.search(r"run: 4096 tokens, the first of \d{4,}, ", capsys.readouterr().out)

    assert main(place.trace("--text", "ba de fun")) == 0
    traced = place.folder / "out.npz"
    assert main(place.inspect(run=traced)) == 0
    options = ["--model", str(place.run), "--start", "2", "--compare-text", "fun"]
    assert main(place.inspect(*options, run=traced)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^out: \d+ tokens", printed, re.M) and "\nout, text 2: " in printed
    compared = place.write("other.txt", "de ba")
    assert main(place.inspect("--text", "ba de fun", "--compare-file", compared)) == 0
    assert "\nrun, text 2: " in capsys.readouterr().out


def test_a_text_may_be_longer_than_names_of_files(place):
    assert main(place.trace("--text", "ж" * 200)) == 0  # two bytes each


def test_evaluate_passes_lm_evals_words_on(monkeypatch, tmp_path):
    options = {}

    def run(*arguments, **given):
        options.update(given, arguments=arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "run", run)
    monkeypatch.chdir(tmp_path)
    words = "evaluate m --tasks piqa --num_fewshot 2 --limit 5 --log_samples --batch_size 4"
    assert main(words.split()) == 130
    assert options["arguments"] == ("m", "piqa") and options["batch_size"] == 4
    assert (options["num_fewshot"], options["limit"], options["log_samples"]) == (2, 5, True)


# --- runs and info ----------------------------------------------------------------------------


def test_runs_are_listed_and_written_into_a_file(tiny_run, tmp_path, capsys):
    folder = tmp_path / "runs"
    for name in ("live/one", "one", "other", "stopped"):
        shutil.copytree(tiny_run, folder / name)
    origin = json.loads((folder / "other" / "provenance.json").read_text())
    (folder / "other" / "provenance.json").write_text(json.dumps(origin | {"complete": False}))
    shutil.rmtree(folder / "other" / "model")
    shutil.rmtree(folder / "stopped" / "model")
    (folder / "stopped" / "checkpoint-00000004").mkdir()
    config, log = results.load_run(tiny_run)
    log.loc[(log["split"] == "valid") & (log["metric"] == "active_mean"), "value"] = 95.62
    log.to_csv(folder / "one" / "log.csv", index=False)
    assert main(["runs", str(folder)]) == 0
    heading, rule, *lines = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in (heading, rule, *lines)} == {12}
    live, one, other, stopped = ([word.strip() for word in line.split("|")[1:-1]] for line in lines)
    assert [live[0], one[0], other[0]] == ["`live/one`", "`one`", "`other` (not complete)"]
    last = log[(log["split"] == "valid") & (log["step"] == log["step"].max())]
    loss = last.groupby("metric")["value"].mean()["cross_entropy"]
    expected = [str(config["seed"]), f"{loss:.3f}", "95.6 (100%)"]
    assert one[4:7] == expected and one[-2] == config["device"]
    assert [one[-1], other[-1], stopped[-1]] == ["model", "–", "checkpoint"]
    for pattern, expected in {"o[t]*": [lines[2]], "one": lines[:2], "live/*": lines[:1]}.items():
        assert main(["runs", str(folder), "--pattern", pattern]) == 0
        assert capsys.readouterr().out.splitlines() == [heading, rule, *expected]

    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # the second time replaces the first
        assert main(["runs", str(folder), "--out", str(page)]) == 0
    expected = ["before", BEGIN, heading, rule, *lines, END, "after"]
    assert page.read_text().splitlines() == expected


def test_info_names_versions_devices_and_backends(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed and "device: " in printed and "backend dense: on" in printed
    triton = backend_status()["triton"]
    assert f"backend triton: {'on' if triton is None else 'off: ' + triton}" in printed


@pytest.mark.parametrize("after", ["| true", ">&-"])
def test_nobody_reading_is_no_error(tiny_run, after):
    assert python(f"-m twell runs {tiny_run.parent} {after}")[2] == ""


def test_a_name_that_cannot_be_printed_is_no_error(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "läuft")
    code, printed, error = python(f"-m twell runs {tmp_path}", PYTHONIOENCODING="ascii")
    assert (code, error) == (0, "") and r"| `l\xe4uft` |" in printed


# --- measure ----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that runs a command, and returns what the measurement was given."""
    given = {}

    def recorder(name):
        return lambda *arguments, **options: given.update({name: (arguments, options)})

    for name in ("ffn", "train_step", "language_model"):
        monkeypatch.setattr(measure, name, recorder(name))
    monkeypatch.setattr(runner, "Gpu", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(words, name):
        given.clear()
        assert main(["measure", *words.split()]) == 0
        return given[name]

    return run


def test_measurements_get_everything(measured):
    words = "ffn --tokens 1,64 --pattern even,skewed --mode graph --bias --energy --active 2.5,9 "
    words += "--hidden-size 64 --intermediate-size 128 --non-gated --kernels --activation relu2"
    arguments, options = measured(f"{words} --out x", "ffn")
    assert arguments == ([1, 64], [2.5, 9.0], ["even", "skewed"])
    expected = {"hidden_size": 64, "intermediate_size": 128, "gated": False, "energy": True}
    expected |= {"activation": "relu2", "bias": True, "mode": "graph", "out": Path("x")}
    assert options == expected | {"kernels": True, "backward": False}
    arguments, options = measured("ffn --backward", "ffn")
    assert arguments[0] == [65536, 16384] and options["backward"] and options["mode"] is None

    words = "train-step quick gated=false --active 9 --spread paper --no-compile --energy seed=1"
    arguments, options = measured(words, "train_step")
    assert arguments == ("quick", ["gated=false", "seed=1"])
    expected = dict(active=9.0, profile="paper", compiled=False, energy=True, largest=False)
    assert options == expected | {"out": Path("build/bench")}
    arguments, _ = measured("train-step micro_batch=5", "train_step")
    assert arguments == ("171m", ["micro_batch=5"])

    words = "model 1.5b num_layers=2 --batches 4x64,1x128 --spread flat --active 2.5,9 --layers "
    words += "--decode 1,8 --context 30 --no-compile --tuned --energy --fp8 --out x --no-graphs"
    arguments, options = measured(words, "language_model")
    expected = dict(checkpoint=None, shapes=[(4, 64), (1, 128)], profile="flat", active=[2.5, 9.0])
    expected |= dict(layers=True, decode=[1, 8], decode_context=30, compiled=False)
    expected |= dict(tuned=True, fp8=True, energy=True, out=Path("x"), ordered=False)
    expected |= dict(graphs=False, alike=False)
    assert arguments == ("1.5b", ["num_layers=2"]) and options == expected


def test_a_checkpoint_has_the_name_of_its_run_and_the_tokens_of_all_texts(measured, tiny_run):
    texts = ["bain", "", "bain"]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for model in (tiny_run, tiny_run / "model"):
        words = f"model {model} --source texts.jsonl --order-tokens --alike --batches 1x2"
        _, options = measured(words, "language_model")
        name, loaded, ids = options["checkpoint"]
        assert name == tiny_run.name and loaded.dtype == torch.bfloat16
        assert ids and ids[: len(ids) // 2] == ids[len(ids) // 2 :]
        assert options["ordered"] and options["alike"]


@pytest.fixture
def calibrating(tmp_path, monkeypatch):
    """Return the shapes that `measure calibrate` gives, without measuring, in an empty folder."""
    shapes = []

    def calibrate(*shape, gated, quantized, out):
        shapes.append((*shape, gated))
        points = (Point(1, 1, 1, {"dense": 1.0, "union": 0.5}),)
        calibration = Calibration("x", *shape, gated, "bfloat16", "", "", points)
        calibration.save(out)
        return calibration

    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr(measure, "crossover", lambda *shape, gated: 12.5)
    monkeypatch.chdir(tmp_path)
    return shapes


@pytest.mark.parametrize(
    ("words", "shape", "out"),
    [
        ("run", (32, 96, True), "run/model/calibration.json"),
        ("run/model --out new/c.json", (32, 96, True), "new/c.json"),
        ("--hidden-size 64 --non-gated", (64, 5632, False), "build/calibration.json"),
    ],
)
def test_a_layer_is_calibrated(calibrating, tiny_run, words, shape, out):
    shutil.copytree(tiny_run, "run")
    assert main(["measure", "calibrate", *words.split()]) == 0
    written = Calibration.load(out)
    assert calibrating == [shape] and written.training == 12.5
    assert written.times[0].ms == {"dense": 1.0, "union": 0.5}
    written.check_shape(*shape)


def test_times_are_kept_where_training_cannot_be_measured(calibrating, monkeypatch, capsys):
    def crossover(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(measure, "crossover", crossover)
    assert main(["measure", "calibrate", "--hidden-size", "64"]) == 2
    message = "twell measure calibrate: not enough memory: lower the sizes (out of memory)\n"
    assert capsys.readouterr().err == message
    assert Calibration.load("build/calibration.json").training is None
