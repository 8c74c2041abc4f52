"""Rows, runs and evaluations are kept with where they came from, and read back or refused."""

import json
import lzma
import os
import subprocess
import sys

import pandas as pd
import pytest

from twell import results

PROVENANCE = {"device": "here", "versions": {"python": "3"}, "commit": "abc", "command": "make"}
HEADER = "step,tokens,split,layer,metric,value\n"


def write_run(folder, log="4,8,train,,loss,1\n4,8,train,1,x,2\n", **config):
    results.write_run(folder, {"seed": 1} | config, PROVENANCE | {"complete": True})
    (folder / "log.csv").write_text(HEADER + log)
    return folder


# --- provenance

FSDP = {
    "ACCELERATE_MIXED_PRECISION": "no",  # set by Accelerate's launcher
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "false",  # the default
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}
LAUNCH = "accelerate launch --use_fsdp --fsdp_version 2 --num_machines 2 --num_processes 2"


def test_the_command_says_how_processes_were_started(monkeypatch):
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["twell/__main__.py", "train", "171m", "source=my texts/"])
    origin = results.provenance()
    assert origin["command"] == f"{LAUNCH} -m twell train 171m 'source=my texts/'"
    assert all(origin[field] for field in (*results.PROVENANCE_FIELDS, "date"))
    assert {"python", "torch", "numpy"} <= {*origin["versions"]}


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_COMMIT", raising=False)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "twell" / "results.py"))
    one, other = tmp_path / "twell" / "results.py", tmp_path / "other.py"
    one.parent.mkdir()
    for path in (other, one):
        assert results.commit() == "unknown"  # no repository, or another project's
        path.write_text("")
        user = "-c user.name=a -c user.email=a"
        for command in ("init", "add .", f"{user} commit -m x", "rev-parse HEAD"):
            done = subprocess.run(["git", *command.split()], cwd=tmp_path, stdout=subprocess.PIPE)
    commit = done.stdout.decode().strip()
    other.write_text("changed")
    assert results.commit() == commit
    one.write_text("changed")
    assert results.commit() == f"{commit}-dirty"
    monkeypatch.setenv("TWELL_COMMIT", "given")
    assert results.commit() == "given"


def test_the_models_of_a_run_have_its_name(tmp_path):
    for folder, name in (("model", "run"), ("model-at-8192", "run-at-8192"), ("models", "models")):
        (tmp_path / "run" / folder).mkdir(parents=True)
        assert results.model_name(tmp_path / "run" / folder) == name


def test_nothing_is_kept_without_provenance(tmp_path):
    for missing in results.PROVENANCE_FIELDS:
        origin = PROVENANCE | {missing: ""}
        with pytest.raises(ValueError, match=missing):
            results.write_run(tmp_path / "run", {}, origin)
        with pytest.raises(ValueError, match=missing):
            results.append_rows(tmp_path / "b.csv", [{"tokens": 3}], origin)
        with pytest.raises(ValueError, match=missing):
            results.write_evaluation(tmp_path / "c.json", origin | {"lm_eval": {}})
    assert not any(tmp_path.iterdir())


def test_atomic_writing_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    results.write_atomically(tmp_path / "x", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="x .*No space"):
        results.write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


# --- rows


def test_rows_are_kept_with_their_provenance(tmp_path):
    path, origin = tmp_path / "bench" / "a.csv", PROVENANCE | {"date": "2026-01-01"}
    results.append_rows(path, [{"tokens": 1, "p50": 0.5}, {"tokens": 2, "p50": 0.75}], origin)
    results.append_rows(path, [{"tokens": 3, "p50": 1.0}], origin | {"device": "there"})
    rows = pd.read_csv(path)
    assert rows["tokens"].tolist() == [1, 2, 3]
    assert rows["device"].tolist() == ["here", "here", "there"]
    assert {*rows["versions"]} == {"python 3"} and {*rows["command"]} == {"make"}
    with pytest.raises(ValueError, match="a.csv"):
        results.append_rows(path, [{"tokens": 3}], origin)


# --- runs


def test_runs_are_read_back(tmp_path):
    for name in ("a", "b", "deep-1"):
        write_run(tmp_path / name, l1_coefficient=float(ord(name[0])))
    packed = tmp_path / "b" / "log.csv.xz"
    packed.write_bytes(lzma.compress((tmp_path / "b" / "log.csv").read_bytes()))
    (tmp_path / "b" / "log.csv").unlink()
    runs, log = results.load_runs(tmp_path)
    assert runs["run"].tolist() == ["a", "b", "deep-1"] and runs["complete"].all()
    assert runs["l1_coefficient"].tolist() == [97, 98, 100]
    assert log["run"].tolist() == ["a", "a", "b", "b", "deep-1", "deep-1"]
    assert log["value"].tolist() == [1, 2] * 3 and log["layer"].isna().tolist() == [True, False] * 3
    assert list(log) == ["run", *results.LOG_COLUMNS]
    assert results.load_runs(tmp_path, "deep-* a d*")[0]["run"].tolist() == ["a", "deep-1"]


def test_no_run_is_an_error_or_two_empty_tables(tmp_path):
    with pytest.raises(FileNotFoundError):
        results.load_runs(tmp_path)
    runs, log = results.load_runs(tmp_path, "85m-*", required=False)
    assert runs[runs["complete"]].empty and list(log) == ["run", *results.LOG_COLUMNS]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("log.csv", b"step,value\n1,2\n"),
        ("log.csv.xz", lzma.compress(HEADER.encode())[:-9]),
        ("provenance.json", json.dumps(PROVENANCE | {"starts": [5]}).encode()),
        ("config.yaml", b"text"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, file, content):
    folder = write_run(tmp_path / "a")
    if file == "log.csv.xz":
        (folder / "log.csv").unlink()
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"a/{file}"):
        results.load_runs(tmp_path)
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match="a .* " + file.removesuffix(".xz")):
        results.load_run(folder)


# --- evaluations


def test_evaluations_are_read_back(tmp_path):
    fields = {"model": {"name": "é"}, "backend": "dense", "tasks": {"a": {}}}
    record = PROVENANCE | fields | {"lm_eval": {"results": {}}}
    packed = tmp_path / "b.json.xz"
    results.write_evaluation(tmp_path / "b.json", record)
    results.write_evaluation(tmp_path / "a.json", record | {"backend": "triton"})
    assert results.load_evaluations(tmp_path) == [record | {"backend": "triton"}, record]
    packed.write_bytes(lzma.compress((tmp_path / "b.json").read_bytes()))
    (tmp_path / "b.json").unlink()
    assert results.load_evaluations(tmp_path)[1] == record
    for damaged in ("{", "[1]", '{"model": {"name": "a"}, "backend": "dense"}'):
        (tmp_path / "c.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"c\.json"):
            results.load_evaluations(tmp_path)
