"""What commands do, pass on and print: tables as wide as a terminal, a bar, plain text in pipes."""

import contextlib
import io
import json
import re
import shlex
import shutil
import sys
import threading
from pathlib import Path

import pexpect
import pytest
import typer
from pytest import approx

from tests.factories.train import series
from tests.kills import differences
from tests.pages import read_command
from twell import measure, results
from twell.cli import app, find, main
from twell.cli.runs import BEGIN, END
from twell.sparse.calibration import Calibration, Point
from twell.train.bar import TrainingBar


def every_command(command=None, words=()):
    """Yield the words of every command."""
    command = command or typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))
    if not getattr(command, "commands", None):
        yield " ".join(words)


def test_every_command_has_help_with_an_example_that_parses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = list(every_command())
    assert len(commands) == 16
    for command in commands:
        assert main([*command.split(), "--help"]) == 0
        out = capsys.readouterr().out
        example = out.partition("Example: twell ")[2]
        assert " ".join(read_command(shlex.split(example))[0]) == command
        options = find(command.split())[1].params
        words = " ".join(option.help for option in options).replace("`", "").split()
        assert {*words, "--debug"} <= {*out.split()}  # no word is broken
        assert out.count("<") == len(re.findall(r"<[^\n>]+>", out))
        assert not re.search(r"--\w+_", out)


def test_outputs_go_to_build_and_runs_by_default(place, monkeypatch, capsys):
    monkeypatch.chdir(place.folder)
    train = place.train("seed=7")
    for arguments, expected in (
        (train[: train.index("--out")], "runs/quick-l1-0-seed-7/config.yaml"),
        (["trace", "run", "--text", "ba de"], "build/traces/run.npz"),
        (["trace", "run", "--text", "ba de", "--aggregate"], "build/traces/run-aggregate.npz"),
        (["inspect", "run", "--text", "ba de"], "build/inspect/run.html"),
        (["inspect", "build/traces/run.npz"], "build/inspect/run-trace.html"),
        ("atlas run --aggregate build/traces/run-aggregate.npz".split(), "build/atlas/run/index.html"),
        (["export", "run", "--trained-on", "Words."], "build/export/run/README.md"),
    ):
        capsys.readouterr()
        assert main(arguments) == 0, arguments
        assert Path(expected).is_file()
        assert arguments[0] == "train" or expected.removesuffix("/README.md") in capsys.readouterr().out
    assert main(["runs"]) == 0


def test_inspect_takes_models_traces_and_two_texts(place, capsys):
    page = place.folder / "out.html"
    other = shutil.copytree(place.run, place.folder / "other")
    assert main(place.inspect("--text", "ba de fun <b>", "--compare", str(other))) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    printed = capsys.readouterr().out
    assert re.search(r"^run: \d+ tokens, [\d.]+ of 96 neurons", printed, re.M)
    assert "\nother: " in printed
    assert main(place.trace("--text", "ba de fun")) == 0
    traced = place.folder / "out.npz"
    options = ["--model", str(place.run), "--start", "2", "--compare-text", "fun"]
    assert main(place.inspect(*options, run=traced)) == 0
    assert "\nout, text 2: " in capsys.readouterr().out


def test_runs_are_listed_and_written_into_a_file(tiny_run, tmp_path, capsys):
    folder = tmp_path / "runs"
    for name in ("live/one", "one", "stopped"):
        shutil.copytree(tiny_run, folder / name)
    origin = json.loads((folder / "stopped" / "provenance.json").read_text())
    (folder / "stopped" / "provenance.json").write_text(json.dumps(origin | {"complete": False}))
    shutil.rmtree(folder / "stopped" / "model")
    (folder / "stopped" / "checkpoint-00000004").mkdir()
    config, log = results.load_run(tiny_run)
    assert main(["runs", str(folder)]) == 0
    heading, rule, *lines = capsys.readouterr().out.splitlines()
    live, one, stopped = ([word.strip() for word in line.split("|")[1:-1]] for line in lines)
    assert [live[0], one[0], stopped[0]] == ["`live/one`", "`one`", "`stopped` (not complete)"]
    loss = series(log, "cross_entropy", "valid").iloc[-1]
    assert one[4:6] == [str(config["seed"]), f"{loss:.3f}"] and one[-2] == config["device"]
    assert [one[-1], stopped[-1]] == ["model", "checkpoint"]
    assert main(["runs", str(folder), "--json"]) == 0
    for row, cells in zip(json.loads(capsys.readouterr().out), (live, one, stopped), strict=True):
        numbers = [float(cell.split()[0].replace(",", "")) for cell in (*cells[3:7], cells[8])]
        fields = "l1_coefficient seed cross_entropy active tokens_per_second".split()
        assert numbers == approx([row[field] for field in fields], rel=5e-3)
    assert main(["runs", str(folder), "--pattern", "s[t]*"]) == 0
    assert capsys.readouterr().out.splitlines() == [heading, rule, lines[2]]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(["runs", str(folder), "--out", str(page)]) == 0
    expected = ["before", BEGIN, heading, rule, *lines, END, "after"]
    assert page.read_text().splitlines() == expected


def test_measurements_get_everything_and_are_printed(monkeypatch, tmp_path, capsys):
    given, rows = [], [{"tokens": 64, "provider": "auto", "p50": 0.125, "union": 3}]

    def measured(**options):
        given.append(options)
        print("progress")
        return {"case": rows}

    for name in ("ffn", "language_model"):
        monkeypatch.setattr(measure, name, measured)
    monkeypatch.chdir(tmp_path)
    words = "ffn --tokens 1,64 --pattern even,skewed --mode graph --bias --active 2.5,9 --non-gated"
    assert main(["measure", *words.split()]) == 0
    options = given.pop()
    expected = {"tokens": [1, 64], "active": [2.5, 9.0], "patterns": ["even", "skewed"]}
    expected |= {"gated": False, "bias": True, "mode": "graph", "out": Path("build/bench")}
    assert expected.items() <= options.items()
    table = "| file | tokens | provider | p50 |\n|---|---:|---|---:|\n"
    assert capsys.readouterr() == (f"{table}| case | 64 | auto | 0.1250 |\n", "progress\n")

    words = "model 1.5b num_layers=2 --batches 4x64,1x128 --spread flat --active 2.5,9 --layers "
    words += "--decode 1,8 --context 30 --no-compile --tuned --energy --fp8 --out x --no-graphs"
    assert main(["measure", *words.split(), "--json", "--provider", "a.b:c,d:e"]) == 0
    options = given.pop()
    expected = dict(size="1.5b", overrides=["num_layers=2"], shapes=[(4, 64), (1, 128)])
    expected |= dict(profile="flat", active=[2.5, 9.0])
    expected |= dict(layers=True, decode=[1, 8], decode_context=30, compiled=False)
    expected |= dict(tuned=True, fp8=True, energy=True, out=Path("x"))
    expected |= dict(graphs=False, alike=False, ordered=False, providers=["a.b:c", "d:e"])
    assert options == expected
    assert json.loads(capsys.readouterr().out) == [{"file": "case"} | rows[0]]


def test_a_layer_is_calibrated(tiny_run, tmp_path, monkeypatch):
    def calibrate(hidden_size, intermediate_size, gated, quantized):
        points = (Point(1, 1, 1, {"dense": 1.0, "union": 0.5}),)
        sizes = hidden_size, intermediate_size, gated
        return Calibration("x", *sizes, "bfloat16", "", "", points)

    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr(measure, "crossover", lambda *_, **__: 12.5)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run, "run")
    assert main(["measure", "calibrate", "run"]) == 0
    written = Calibration.load("run/model/calibration.json")
    assert written.training == 12.5 and written.times[0].ms == {"dense": 1.0, "union": 0.5}
    written.check(32, 96, True, quantized=False)


# --- terminals

NOW = r"step \d+/40 .*loss [\d.]+  active [\d.]+  [\d,]+ tokens/s  [\d:]+ left"


@pytest.fixture
def watched(monkeypatch):
    for name in ("CI", "JPY_PARENT_PID", "MAKELEVEL", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def terminal():
    """Return a context in which standard output is a terminal, as a stream."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    return contextlib.redirect_stdout(stream)


def test_a_bar_shows_at_once_ends_by_ctrl_c_and_changes_no_number(place, watched, capsys):
    command = place.train("tokens=20480", "log_every=5", "checkpoint_every=5", "valid_every=20")
    options = {"dimensions": (30, 100), "timeout": 300, "encoding": "utf-8"}
    child = pexpect.spawn(sys.executable, ["-m", "twell", *command], **options)
    for text in ("loading PyTorch", r"40 steps on [^\r]*\r\n", "new  step 0/40  validation", NOW):
        child.expect(text)
    child.sendintr()
    child.expect("interrupted; .*checkpoint of step .*--resume")
    assert "\x1b[?25h" in child.before  # the cursor is back
    child.expect(pexpect.EOF)
    assert child.wait() == 130
    assert main([*command, "--resume"]) == 0
    out = capsys.readouterr().out
    assert re.search(f"^new  {NOW}$", out, re.M) and "\x1b" not in out  # a pipe
    assert main([*command[:-1], str(place.folder / "whole")]) == 0
    assert differences(place.folder / "new", place.folder / "whole") == []


@pytest.mark.parametrize("given", "RANK=1 CI=1 JPY_PARENT_PID=7 MAKELEVEL=1 TERM=dumb A=b".split())
def test_a_bar_is_drawn_where_somebody_looks_and_by_no_thread(watched, monkeypatch, given):
    monkeypatch.setenv(*given.split("="))
    threads = threading.active_count()
    with terminal() as stream, TrainingBar() as bar:
        bar.step(1, 2, lambda step: f"at {step}")
        assert threading.active_count() == threads
    assert ("at 1" in stream.getvalue()) == (given == "A=b")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_table_fits_the_terminal(watched, monkeypatch, tiny_run, tmp_path, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("one", "another-run-of-a-long-name"):
        shutil.copytree(tiny_run, tmp_path / name)
    with terminal() as stream:
        assert main(["runs", str(tmp_path)]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert re.search(r"^another-run-of-a-long-name [^…]*\w *$", "\n".join(lines), re.M)  # not cut
