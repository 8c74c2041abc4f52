"""Damaged files: each gives one sentence with its name and a remedy, and nothing is lost."""

import dataclasses
import json
import re
import shutil

import pytest

from tests.factories.trace import aggregate_of
from tests.test_analysis import make_trace
from tests.train.runs import stop_training
from twell import results
from twell.__main__ import main
from twell.train import train

REMEDY = (
    r"put back|start again|delete the folder|makes it again|write \{|use one of|expected|take one|"
    "cut within"
)


@pytest.fixture(scope="module")
def whole(tiny_config, tiny_text, tmp_path_factory):
    """A folder with a run that was stopped, a finished one, its text, trace and statistics."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(tiny_text, folder / "text.jsonl")
    config = dataclasses.replace(
        tiny_config, source="text.jsonl", checkpoint_every=4, log_every=2, tokens=16 * 512
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TWELL_CACHE", "cache")
        train(config, folder / "run", quiet=True)
        stop_training(config, folder / "stopped", 12)
    make_trace(0, num_layers=2, intermediate_size=96)[0].save(folder / "trace.npz")
    aggregate_of(make_trace(0, num_layers=2, intermediate_size=96)[0]).save(
        folder / "aggregate.npz"
    )
    (folder / "piqa.jsonl").write_text(
        json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n"
    )
    return folder


RESUME = ["train", "stopped/config.yaml", "--out", "stopped", "--resume"]
TRAIN = ["train", "run/config.yaml", "--out", "new"]
TRACE = ["trace", "run", "--text", "ba de", "--out", "out.npz"]
VALID = ["trace", "run", "--valid", "--out", "out.npz"]
INSPECT = ["inspect", "ba", "--model", "run", "--aggregate", "aggregate.npz", "--out", "out.html"]
MASKS = "measure ffn --trace trace.npz --layer 0 --pattern recorded --out b".split()
EVALUATE = "evaluate run --tasks piqa --data . --out out.json".split()


def half(data):
    return data[: len(data) // 2]


def flipped(data):
    return bytes(byte ^ 0x55 if n % 97 == 50 else byte for n, byte in enumerate(data))


def empty(data):
    return b""


def listed(data):
    return b"[1, 2]"


# file, what happens to it, the command that reads it
DAMAGES = [
    ("stopped/checkpoint*.pt", half, RESUME),
    ("stopped/checkpoint*.pt", flipped, RESUME),
    ("stopped/checkpoint*.pt", empty, RESUME),
    ("stopped/log.csv", half, RESUME),
    ("stopped/log.csv", flipped, RESUME),
    ("stopped/provenance.json", half, RESUME),
    ("stopped/provenance.json", listed, RESUME),
    ("run/config.yaml", listed, VALID),
    ("run/log.csv", listed, VALID),
    ("run/model/config.json", half, TRACE),
    ("run/model/config.json", listed, TRACE),
    ("run/model/model.safetensors", half, TRACE),
    ("run/model/model.safetensors", empty, TRACE),
    ("run/model/tokenizer.json", half, TRACE),
    ("run/model/tokenizer.json", listed, TRACE),
    ("run/model/tokenizer_config.json", empty, TRACE),
    ("cache/*/train.npy", half, TRAIN),
    ("cache/*/valid.npy", flipped, TRAIN),
    ("cache/*/tokenizer.json", flipped, VALID),
    ("cache/*/sha256.json", half, TRAIN),
    ("text.jsonl", half, TRAIN),
    (
        "text.jsonl",
        lambda data: data.replace(b'"ba', b'"\\ud800', 1) + b'{"text": "\\ud800"}\n',
        TRAIN,
    ),
    ("aggregate.npz", half, INSPECT),
    ("aggregate.npz", empty, INSPECT),
    ("trace.npz", flipped, MASKS),
    ("piqa.jsonl", lambda data: data[:-9], EVALUATE),
]


@pytest.mark.parametrize(
    ("name", "damage", "command"), DAMAGES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_damaged_file_is_named_with_what_to_do(
    whole, tmp_path, monkeypatch, capsys, name, damage, command
):
    shutil.copytree(whole, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.setenv("TWELL_CACHE", "cache")
    paths = sorted((tmp_path / "place").glob(name))
    assert paths
    for path in paths:
        path.write_bytes(damage(path.read_bytes()))
    before = {path: path.read_bytes() for path in (tmp_path / "place").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and paths[0].name in error and re.search(REMEDY, error), error
    assert {
        path: path.read_bytes() for path in (tmp_path / "place").rglob("*") if path.is_file()
    } == before


def test_one_damaged_checkpoint_loses_nothing(whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(whole, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.setenv("TWELL_CACHE", "cache")
    last = tmp_path / "place" / "stopped" / "checkpoint.pt"
    last.write_bytes(flipped(last.read_bytes()))
    capsys.readouterr()
    assert main(RESUME) == 0
    assert "checkpoint.pt is damaged" in capsys.readouterr().out
    logs = [
        results.load_run(name)[1].query("metric != 'tokens_per_second'")
        for name in ("run", "stopped")
    ]
    assert logs[0].reset_index(drop=True).equals(logs[1].reset_index(drop=True))
