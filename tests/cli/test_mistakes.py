"""Mistakes on the command line: a clear error, exit status 2, and nothing is written."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.factories.analysis import make_trace
from tests.factories.trace import aggregate_of
from tests.factories.train import contents
from twell.cli import main

# Overrides of a configuration, and what the error names; tests/test_config.py has more.
FIELDS = {
    "l1=3e-3": "'l1'; .*l1_coefficient",
    "activation=gelu": r"'gelu' .*relu, relu2, drelu, silu",
    "num_layers=1e12": r"not enough memory: lower the sizes",
    "source=hf:some/data tokenizer=RUN/model": "'some/data'",
    "source=RUN/nothing.txt": r"nothing\.txt",
}
# Commands, and what the error names. RUN is a finished run, PLACE its folder, OUT a new path, TEXT
# a text, TRACE and AGGREGATE files of another model.
COMMANDS = {
    "train quik --out OUT": "quik; .*quick",
    "train quick --resume --overwrite": "--resume .*--overwrite",
    "train quick --out RUN": "run already holds a run",
    "bogus": "'bogus'",
    "trace RUN --text ''": "the text is empty",
    "trace RUN": "--text or by --file",
    "trace RUN --file OUT.txt": r"OUT\.txt",
    "trace RUN --file RUN/model/model.safetensors": r"safetensors is not UTF-8 text: byte \d",
    "trace RUN --valid --tokens 10": "--tokens and --max-bytes belong to --aggregate",
    "trace RUN --aggregate --valid --max-bytes 5000 --out OUT.npz": "6144 bytes",
    "trace RUN --text a --out RUN/model/model.safetensors": r"\.npz",
    "inspect TRACE --out OUT.html --text a": "a trace has its own text",
    "inspect AGGREGATE --out OUT.html": r"other\.npz",
    "atlas AGGREGATE --out OUT --labels TEXT": r"text\.jsonl, line 1",
    "runs PLACE --out TEXT": r"text\.jsonl",
    "measure ffn --tokens 1,many": "--tokens.*'1,many'",
    "measure ffn --mode bogus": "'bogus' is not one of 'stream', 'graph'",
    "measure ffn --out OUT": "measuring needs a GPU, and torch sees none",
    "measure model --batches 64": "--batches.*'64'",
    "measure model RUN --text a --active 3": "--active",
    "measure calibrate --out RUN/config.yaml": r"config\.yaml.*\.json",
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
        assert "Traceback" not in error and re.search(words, error), error
        assert contents(place.folder) == before

    return check


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


def test_recorded_data_is_not_written_unasked(refused):
    folder = Path(__file__).parents[2] / "data" / "checkpoints" / "twell-6m"
    words = r"twell-6m is recorded data; --out .*calibration\.json writes there"
    refused(["measure", "calibrate", str(folder)], words)


def test_a_fault_keeps_its_traceback_and_bad_input_has_one_on_demand(place, monkeypatch, capsys):
    def faulty(self, step):
        raise ValueError("a bug")  # by a file outside the package, as a library would

    monkeypatch.setattr("twell.train.loop.Run.step", faulty)
    with pytest.raises(ValueError, match="a bug"):
        main(place.train())
    assert main([*place.train("seed=many"), "--debug"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):") and "seed is 'many'" in error


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "twell.evaluate", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"datasets: pip install 'twell\[evaluate\]'"):
        importlib.import_module("twell.evaluate")
