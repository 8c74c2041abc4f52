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

DATA = Path(__file__).parents[2] / "data"
# Commands, and what the error names. RUN is a finished run, PLACE its folder, OUT a new path, TEXT
# a text, TRACE and AGGREGATE files of another model, TRAIN a command whose fields may change.
COMMANDS = {
    "TRAIN l1=3e-3": "'l1'; .*l1_coefficient",
    "TRAIN activation=gelu": r"'gelu' .*relu, relu2, drelu, silu",
    "TRAIN num_layers=1e12": r"not enough memory: lower the sizes",
    "TRAIN source=hf:some/data tokenizer=RUN/model": "'some/data'",
    "TRAIN source=RUN/nothing.txt": r"nothing\.txt",
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
    "inspect TRACE --out OUT.html --compare RUN": "compare it with a trace",
    "inspect AGGREGATE --out OUT.html": r"other\.npz",
    "atlas AGGREGATE --out OUT --labels TEXT": r"text\.jsonl, line 1",
    "runs PLACE --out TEXT": r"text\.jsonl",
    "measure ffn --tokens 1,many": "--tokens.*'1,many'",
    "measure ffn --mode bogus": "'bogus' is not one of 'stream', 'graph'",
    "measure model --batches 64": "--batches.*'64'",
    "measure model RUN --text a --active 3": "--active",
    "measure calibrate --out RUN/config.yaml": r"config\.yaml.*\.json",
    "measure calibrate DATA/checkpoints/twell-6m": "twell-6m is recorded data; .* writes there",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(place, capsys, monkeypatch, command):
    """It prints one line of error, and writes nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(place.folder)
    paths = {"RUN": place.run, "PLACE": place.folder, "TEXT": place.text}
    paths |= {"OUT": place.folder / "OUT", "DATA": DATA}
    if "AGGREGATE" in command or "TRACE" in command:
        paths |= {"AGGREGATE": place.folder / "other.npz", "TRACE": place.folder / "trace.npz"}
        trace, _ = make_trace(0, num_layers=3, intermediate_size=96)
        trace.save(paths["TRACE"])
        aggregate_of(trace).save(paths["AGGREGATE"])
    arguments = shlex.split(command)
    for name, path in paths.items():
        arguments = [re.sub(rf"\b{name}\b", str(path), word) for word in arguments]
    if arguments[0] == "TRAIN":
        arguments = place.train(*arguments[1:])
    before = contents(place.folder)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and re.search(COMMANDS[command], error), error
    assert contents(place.folder) == before


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
