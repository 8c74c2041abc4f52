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


def write_run(folder, log="4,8,train,,loss,1\n", config=None):
    results.write_run(folder, config or {"seed": 1}, PROVENANCE | {"complete": True})
    (folder / "log.csv").write_text(HEADER + log)
    return folder


def test_root_is_found_from_below_and_missing_elsewhere(tmp_path):
    root = results.root()
    assert (root / "pyproject.toml").is_file() and results.root(root / "twell") == root
    assert results.is_recorded(root / "data" / "runs" / "new")
    assert not results.is_recorded(root / "build") and not results.is_recorded(tmp_path / "data")
    with pytest.raises(FileNotFoundError, match="no data/paper.yaml in"):
        results.root(tmp_path)


# --- provenance ---------------------------------------------------------------------------------

FSDP = {
    "ACCELERATE_MIXED_PRECISION": "no",  # set by Accelerate's launcher
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_OFFLOAD_PARAMS": "false",  # the default
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}
LAUNCH = (
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_transformer_layer_cls_to_wrap "
    "LlamaDecoderLayer --num_machines 2 --num_processes 2"
)


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "python"),
        ({"WORLD_SIZE": "16"}, "python"),  # a cluster's variable
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch --num_processes 1"),
        (FSDP, LAUNCH),
    ],
)
def test_the_command_says_how_processes_were_started(monkeypatch, environment, start):
    for name in {*FSDP, *results.FSDP_DEFAULTS}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["twell/__main__.py", "train", "171m", "source=my texts/"])
    origin = results.provenance()
    assert origin["command"] == f"{start} -m twell train 171m 'source=my texts/'"
    assert all(origin[field] for field in (*results.PROVENANCE_FIELDS, "date"))
    assert {"python", "torch", "numpy"} <= {*origin["versions"]}
    assert results.provenance("make")["command"] == "make"


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_COMMIT", raising=False)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "twell" / "results.py"))
    assert results.commit() == "unknown"
    commits, one, other = [], tmp_path / "twell" / "results.py", tmp_path / "other.py"
    one.parent.mkdir()
    for path in (other, one):
        # Of a package in a folder of another project.
        assert results.commit() == "unknown"
        path.write_text("")
        user = "-c user.name=a -c user.email=a"
        for command in ("init", "add .", f"{user} commit -m x", "rev-parse HEAD"):
            done = subprocess.run(["git", *command.split()], cwd=tmp_path, stdout=subprocess.PIPE)
        commits.append(done.stdout.decode().strip())
    other.write_text("changed")
    assert results.commit() == commits[1]
    one.write_text("changed")
    assert results.commit() == f"{commits[1]}-dirty"
    monkeypatch.setenv("TWELL_COMMIT", "given")
    assert results.commit() == "given"


def test_atomic_writing_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    results.write_atomically(tmp_path / "x", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="x .*No space"):
        results.write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


# --- rows ---------------------------------------------------------------------------------------


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


def test_rows_that_two_processes_append_are_all_kept(tmp_path):
    code = """import sys; from twell import results
origin = dict(device="a", versions={"b": "1"}, commit="c", command="d", date="e")
for n in range(40): results.append_rows(sys.argv[1], [{"n": n}], origin)"""
    command = [sys.executable, "-c", code, str(tmp_path / "a.csv")]
    environment = os.environ | {"PYTHONPATH": str(results.root())}
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert sorted(pd.read_csv(tmp_path / "a.csv")["n"]) == sorted([*range(40)] * 2)


# --- runs ---------------------------------------------------------------------------------------


def test_runs_are_read_back(tmp_path):
    for name, value in (("a", 1.5), ("b", 2.5)):
        log = f"4,8,train,,loss,{value}\n4,8,train,1,x,2\n"
        write_run(tmp_path / name, log, {"l1_coefficient": value})
    runs, log = results.load_runs(tmp_path)
    assert runs["run"].tolist() == ["a", "b"] and runs["complete"].all()
    assert runs["l1_coefficient"].tolist() == [1.5, 2.5]
    assert log["run"].tolist() == ["a", "a", "b", "b"] and log["value"].tolist() == [1.5, 2, 2.5, 2]
    assert list(log) == ["run", *results.LOG_COLUMNS]
    assert log["layer"].isna().tolist() == [True, False] * 2
    (only,) = results.load_provenance(tmp_path / "a")["starts"]
    assert only == PROVENANCE | {"date": None}


def test_a_compressed_log_is_read_and_a_plain_one_goes_before_it(tmp_path):
    for name in ("a", "b", "deep-1"):
        folder = write_run(tmp_path / name, f"4,8,train,,loss,{ord(name[0])}\n")
        (folder / "log.csv.xz").write_bytes(lzma.compress((folder / "log.csv").read_bytes()))
        (folder / "log.csv").unlink()
    assert results.log_path(tmp_path / "b") == tmp_path / "b" / "log.csv.xz"
    assert results.log_path(tmp_path / "none") == tmp_path / "none" / "log.csv"
    runs, log = results.load_runs(tmp_path, "deep-* a d*")
    assert runs["run"].tolist() == ["a", "deep-1"] and log["value"].tolist() == [ord("a"), ord("d")]
    (tmp_path / "a" / "log.csv").write_text(HEADER + "4,8,train,,loss,3\n")
    assert results.load_run(tmp_path / "a")[1]["value"].tolist() == [3]
    packed = tmp_path / "b" / "log.csv.xz"
    for broken in (packed.read_bytes()[:-9], b"step,tokens"):
        packed.write_bytes(broken)
        with pytest.raises(ValueError, match=r"log\.csv\.xz"):
            results.load_run(tmp_path / "b")


def test_no_run_is_an_error_or_two_empty_tables(tmp_path):
    for pattern, error in (
        ("*", FileNotFoundError),
        ("x* y", FileNotFoundError),
        ("/x", ValueError),
    ):
        with pytest.raises(error, match=str(tmp_path) if pattern == "*" else pattern[:2]):
            results.load_runs(tmp_path, pattern)
    runs, log = results.load_runs(tmp_path, "85m-*", required=False)
    assert runs.empty and runs[runs["complete"]].empty
    assert log.empty and list(log) == ["run", *results.LOG_COLUMNS]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("log.csv", "step,value\n1,2\n"),
        ("log.csv", HEADER + "4,8,train,,loss,lo"),
        ("provenance.json", "{"),
        ("provenance.json", "[]"),
        ("provenance.json", "{}"),
        ("provenance.json", json.dumps(PROVENANCE | {"starts": 5})),
        ("provenance.json", json.dumps(PROVENANCE | {"starts": [5]})),
        ("config.yaml", "a: ["),
        ("config.yaml", "text"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, file, content):
    (write_run(tmp_path / "a") / file).write_text(content)
    with pytest.raises(ValueError, match=f"a/{file}"):
        results.load_runs(tmp_path)


@pytest.mark.parametrize("file", ["config.yaml", "provenance.json", "log.csv"])
def test_a_missing_file_of_a_run_is_named(tmp_path, file):
    folder = write_run(tmp_path / "a")
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"a .* {file}"):
        results.load_run(folder)


@pytest.mark.parametrize("missing", results.PROVENANCE_FIELDS)
def test_nothing_is_kept_without_provenance(tmp_path, missing):
    origin = PROVENANCE | {missing: ""}
    for write in (
        lambda: results.write_run(tmp_path / "run", {}, origin),
        lambda: results.append_rows(tmp_path / "b.csv", [{"tokens": 3}], origin),
        lambda: results.write_evaluation(tmp_path / "c.json", origin | {"lm_eval": {}}),
    ):
        with pytest.raises(ValueError, match=missing):
            write()
    assert not any(tmp_path.iterdir())


# --- evaluations --------------------------------------------------------------------------------


def test_evaluations_are_kept_with_their_provenance(tmp_path):
    fields = {"model": {"name": "é"}, "backend": "dense", "tasks": {"a": {}}}
    record = PROVENANCE | fields | {"lm_eval": {"results": {}}}
    folder, packed = tmp_path / "eval", tmp_path / "eval" / "b.json.xz"
    results.write_evaluation(folder / "b.json", record)
    results.write_evaluation(folder / "a.json", record | {"backend": "triton"})
    assert [one["backend"] for one in results.load_evaluations(folder)] == ["triton", "dense"]
    assert results.load_evaluations(folder)[1] == record
    assert results.load_evaluations(tmp_path / "nothing") == []
    packed.write_bytes(lzma.compress((folder / "b.json").read_bytes()))
    (folder / "b.json").unlink()
    assert results.load_evaluations(folder)[1] == record
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.json\.xz is not an evaluation"):
        results.load_evaluations(folder)
    results.write_evaluation(folder / "b.json", record)  # the new one takes its place
    assert not packed.exists() and results.load_evaluations(folder)[1] == record
    for damaged in ("{", "[1]", '"text"', '{"model": {"name": "a"}, "backend": "dense"}'):
        (folder / "c.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"c\.json is not an evaluation"):
            results.load_evaluations(folder)


def test_models_are_called_by_their_run_or_folder(tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    for path in (tmp_path / "mine", tmp_path / "mine" / "model"):
        assert results.model_name(path) == "mine"
    assert results.model_name("SakanaAI/SparseLM1.5B") == "SparseLM1.5B"
    monkeypatch.chdir(tmp_path / "mine")
    assert results.model_name(".") == results.model_name("model/") == "mine"
