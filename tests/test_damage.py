"""Damaged files: each gives one sentence with its name, and nothing is lost."""

import dataclasses
import json
import re
import shutil

import pytest

from tests.factories.train import contents, stop_training
from twell.__main__ import main
from twell.train import train


@pytest.fixture(scope="module")
def whole(tiny_config, tiny_text, tmp_path_factory):
    """A folder with a run that was stopped, a finished one, its text, trace and statistics."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(tiny_text, folder / "text.jsonl")
    config = dataclasses.replace(tiny_config, source="text.jsonl", checkpoint_every=4, log_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TWELL_CACHE", "cache")
        train(config, folder / "run", quiet=True)
        stop_training(config, folder / "stopped", 12)
        assert main([*VALID[:-1], "trace.npz"]) == 0
        assert main([*VALID[:-1], "aggregate.npz", "--aggregate"]) == 0
    line = json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0})
    (folder / "piqa.jsonl").write_text(line + "\n")
    return folder


@pytest.fixture
def place(whole, tmp_path, monkeypatch):
    """A copy of it, which is the working folder."""
    monkeypatch.chdir(shutil.copytree(whole, tmp_path / "place"))
    monkeypatch.setenv("TWELL_CACHE", "cache")
    return tmp_path / "place"


RESUME = ["train", "stopped/config.yaml", "--out", "stopped", "--resume"]
TRAIN = ["train", "run/config.yaml", "--out", "new"]
TRACE = ["trace", "run", "--text", "ba de", "--out", "out.npz"]
VALID = ["trace", "run", "--valid", "--out", "out.npz"]
INSPECT = ["inspect", "run", "--text", "ba", "--aggregate", "aggregate.npz", "--out", "out.html"]
TRACED = "inspect trace.npz --out out.html".split()
EVALUATE = "evaluate run --tasks piqa --data . --out out.json".split()


def half(data):
    return data[: len(data) // 2]


def flipped(data):
    return bytes(byte ^ 0x55 if n % 97 == 50 else byte for n, byte in enumerate(data))


def empty(data):
    return b""


def listed(data):
    return b"[1, 2]"


def surrogates(data):
    return data.replace(b'"ba', b'"\\ud800', 1) + b'{"text": "\\ud800"}\n'


def other_method(data):
    """Members of a zip file compressed in a way that nobody knows."""
    return re.sub(rb"(PK\x03\x04.{4}|PK\x01\x02.{6})..", rb"\g<1>" + b"c\0", data, flags=re.DOTALL)


def encrypted(data):
    return re.sub(rb"(PK\x03\x04..|PK\x01\x02.{4}).", rb"\g<1>" + b"\1", data, flags=re.DOTALL)


# file, what happens to it, the command that reads it
DAMAGES = [
    ("stopped/checkpoint-*/state.pt", (half, empty), RESUME),
    ("stopped/checkpoint-*/__0_0.distcp", (flipped,), RESUME),
    ("stopped/log.csv", (half, flipped), RESUME),
    ("stopped/provenance.json", (half, listed), RESUME),
    ("run/config.yaml", (listed,), VALID),
    ("run/model/config.json", (half, listed), TRACE),
    ("run/model/model.safetensors", (half, empty), TRACE),
    ("run/model/tokenizer.json", (half, listed), TRACE),
    ("run/model/tokenizer_config.json", (empty,), TRACE),
    ("cache/*/train.npy", (half,), TRAIN),
    ("cache/*/valid.npy", (flipped,), TRAIN),
    ("cache/*/tokenizer.json", (flipped,), TRAIN),
    ("text.jsonl", (half, surrogates), TRAIN),
    ("aggregate.npz", (half, empty), INSPECT),
    ("trace.npz", (flipped, other_method, encrypted), TRACED),
    ("piqa.jsonl", (half,), EVALUATE),
]


@pytest.mark.parametrize(
    ("name", "damages", "command"), DAMAGES, ids=[name for name, *_ in DAMAGES]
)
def test_a_damaged_file_is_named(place, capsys, name, damages, command):
    paths = sorted(place.glob(name))
    intact = {path: path.read_bytes() for path in paths}
    assert paths
    for damage in damages:
        for path, data in intact.items():
            path.write_bytes(damage(data))
        before = contents(place)
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and paths[0].name in error, error
        assert contents(place) == before
