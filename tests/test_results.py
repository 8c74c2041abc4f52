import json
import lzma
import os
import subprocess
import sys

import pytest

from twell import results

PROVENANCE = {"device": "here", "versions": {"python": "3"}, "commit": "abc", "command": "make"}


def test_paper_values():
    assert len(results.paper()) > 300
    row = results.paper("avg_nonzeros", source="Table 3", sparse=True)
    assert row.value.tolist() == [29]
    with pytest.raises(KeyError, match="no column 'colour'"):
        results.paper(colour="red")


def test_root_is_found_from_below_and_missing_elsewhere(tmp_path):
    assert (results.root() / "pyproject.toml").is_file()
    assert results.root(results.root() / "twell") == results.root()
    with pytest.raises(FileNotFoundError, match="no data/paper.yaml in"):
        results.root(tmp_path)


def test_provenance_is_whole():
    origin = results.provenance("some command")
    assert (
        all(origin[field] for field in results.PROVENANCE_FIELDS)
        and origin["command"] == "some command"
    )


LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}  # by Accelerate's launcher


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "python -m twell"),
        ({"WORLD_SIZE": "1"}, "python -m twell"),
        ({"WORLD_SIZE": "16", "FSDP_VERSION": "2"}, "python -m twell"),  # a cluster's
        (LAUNCHED, "accelerate launch --num_processes 1 -m twell"),
        (LAUNCHED | {"WORLD_SIZE": "16"}, "accelerate launch --num_processes 16 -m twell"),
        (
            LAUNCHED | {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"},
            "accelerate launch --num_processes 2 -m twell",
        ),
        (
            LAUNCHED | {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 -m twell",
        ),
    ],
)
def test_the_command_says_how_processes_were_started(monkeypatch, environment, start):
    for name in ("WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        results.sys, "argv", ["/somewhere/twell/__main__.py", "train", "171m", "source=my texts/"]
    )
    assert results.provenance()["command"] == f"{start} train 171m 'source=my texts/'"
    assert results.provenance("make")["command"] == "make"


@pytest.mark.parametrize("missing", results.PROVENANCE_FIELDS)
def test_a_run_without_provenance_is_refused(tmp_path, missing):
    with pytest.raises(ValueError, match=f"provenance without {missing}"):
        results.write_run(tmp_path / "run", {}, PROVENANCE | {missing: ""})
    assert not (tmp_path / "run").exists()


def test_runs_are_read_back(tmp_path):
    for name, value in (("a", 1.5), ("b", 2.5)):
        results.write_run(
            tmp_path / name, {"l1_coefficient": value}, PROVENANCE | {"complete": True}
        )
        (tmp_path / name / "log.csv").write_text(
            f"step,tokens,split,layer,metric,value\n4,8,train,,loss,{value}\n4,8,train,1,x,2\n"
        )
    runs, log = results.load_runs(tmp_path)
    assert (
        runs.run.tolist() == ["a", "b"]
        and runs.l1_coefficient.tolist() == [1.5, 2.5]
        and runs.complete.all()
    )
    assert log.value.tolist() == [1.5, 2, 2.5, 2] and log.layer.isna().tolist() == [True, False] * 2
    (tmp_path / "a" / "config.yaml").write_text("l1_coefficient: [0.1, 0.2]")
    with pytest.raises(
        ValueError, match=r"config\.yaml: l1_coefficient is \[0\.1, 0\.2\]; it has to be one number"
    ):
        results.load_runs(tmp_path)


def test_a_compressed_log_is_read_and_a_plain_one_goes_before_it(tmp_path):
    for name in ("a", "b", "deep-1"):
        results.write_run(tmp_path / name, {}, PROVENANCE | {"complete": True})
        text = f"step,tokens,split,layer,metric,value\n4,8,train,,loss,{ord(name[0])}\n"
        (tmp_path / name / "log.csv.xz").write_bytes(lzma.compress(text.encode()))
    assert results.log_path(tmp_path / "b") == tmp_path / "b" / "log.csv.xz"
    assert results.log_path(tmp_path / "none") == tmp_path / "none" / "log.csv"
    runs, log = results.load_runs(tmp_path, "deep-* a d*")
    assert runs.run.tolist() == ["a", "deep-1"] and log.value.tolist() == [ord("a"), ord("d")]
    assert results.load_runs(tmp_path, "", required=False)[0].empty
    with pytest.raises(FileNotFoundError, match=r"no run that fits 'x\* y' in"):
        results.load_runs(tmp_path, "x* y")
    (tmp_path / "a" / "log.csv").write_text(
        "step,tokens,split,layer,metric,value\n4,8,train,,loss,3\n"
    )
    assert results.load_run(tmp_path / "a")[1].value.tolist() == [3]
    assert results.log_path(tmp_path / "a") == tmp_path / "a" / "log.csv"
    packed = tmp_path / "b" / "log.csv.xz"
    for broken in (packed.read_bytes()[:-9], b"step,tokens"):
        packed.write_bytes(broken)
        with pytest.raises(ValueError, match=r"log\.csv\.xz is not a run's log"):
            results.load_run(tmp_path / "b")


def test_what_is_not_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run in"):
        results.load_runs(tmp_path)
    runs, log = results.load_runs(tmp_path, "85m-*", required=False)
    assert (
        runs.empty
        and runs[runs["complete"]].empty
        and log.empty
        and list(log) == ["run", *results.LOG_COLUMNS]
    )
    results.write_run(tmp_path / "a", {"seed": 1}, PROVENANCE)
    with pytest.raises(FileNotFoundError, match=r"a is not a run: it has no log\.csv"):
        results.load_run(tmp_path / "a")
    (tmp_path / "a" / "log.csv").write_text("step,value\n1,2\n")
    with pytest.raises(ValueError, match=r"log\.csv .*columns"):
        results.load_run(tmp_path / "a")
    (tmp_path / "a" / "log.csv").write_text(
        "step,tokens,split,layer,metric,value\n4,8,train,,loss,lo"
    )
    with pytest.raises(ValueError, match=r"log\.csv is not a run's log"):
        results.load_run(tmp_path / "a")
    (tmp_path / "a" / "provenance.json").write_text(json.dumps(PROVENANCE)[:-4])
    with pytest.raises(
        ValueError, match=r"provenance\.json is not JSON: .*; put back a copy of it"
    ):
        results.load_run(tmp_path / "a")
    for origin, words in (
        ({}, "has no device, versions, "),
        (PROVENANCE | {"starts": 5}, "starts is 5; expected"),
    ):
        (tmp_path / "a" / "provenance.json").write_text(json.dumps(origin))
        with pytest.raises(
            ValueError, match=rf"provenance\.json:? {words}.* put back a copy of it"
        ):
            results.load_run(tmp_path / "a")
    (tmp_path / "a" / "provenance.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"is not a run: it has no provenance\.json"):
        results.load_run(tmp_path / "a")


def test_atomic_writing_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    results.write_atomically(tmp_path / "x", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        results.write_atomically(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_rows_are_kept_with_their_provenance(tmp_path):
    origin = PROVENANCE | {"date": "2026-01-01"}
    results.append_rows(
        tmp_path / "bench" / "a.csv",
        [{"tokens": 1, "p50": 0.5}, {"tokens": 2, "p50": 0.75}],
        origin,
    )
    results.append_rows(
        tmp_path / "bench" / "a.csv", [{"tokens": 3, "p50": 1.0}], origin | {"device": "there"}
    )
    rows = results.pd.read_csv(tmp_path / "bench" / "a.csv")
    assert rows.tokens.tolist() == [1, 2, 3] and rows.device.tolist() == ["here", "here", "there"]
    assert rows.versions.tolist() == ["python 3"] * 3 and rows.command.tolist() == ["make"] * 3
    with pytest.raises(ValueError, match="a.csv has the columns .*; these rows have"):
        results.append_rows(tmp_path / "bench" / "a.csv", [{"tokens": 3}], origin)
    with pytest.raises(ValueError, match="provenance without commit"):
        results.append_rows(tmp_path / "b.csv", [{"tokens": 3}], origin | {"commit": None})
    assert not (tmp_path / "b.csv").exists()


def test_rows_that_two_processes_append_are_all_kept(tmp_path):
    code = (
        "import sys; from twell import results\n"
        "origin = {'device': 'a', 'versions': {'b': '1'}, 'commit': 'c', 'command': 'd', 'date': 'e'}\n"
        "for n in range(40): results.append_rows(sys.argv[1], [{'n': n}], origin)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.csv")]
    environment = os.environ | {"PYTHONPATH": str(results.root())}
    processes = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert sorted(results.pd.read_csv(tmp_path / "a.csv")["n"]) == sorted([*range(40)] * 3)


def test_evaluations_are_kept_with_their_provenance(tmp_path):
    record = PROVENANCE | {
        "model": {"name": "é"},
        "backend": "dense",
        "tasks": {"a": {}},
        "lm_eval": {"results": {}},
    }
    results.write_evaluation(tmp_path / "eval" / "b.json", record)
    results.write_evaluation(tmp_path / "eval" / "a.json", record | {"backend": "triton"})
    assert [found["backend"] for found in results.load_evaluations(tmp_path / "eval")] == [
        "triton",
        "dense",
    ]
    assert results.load_evaluations(tmp_path / "eval")[1] == record
    assert results.load_evaluations(tmp_path / "nothing") == []
    packed = tmp_path / "eval" / "b.json.xz"
    packed.write_bytes(lzma.compress((tmp_path / "eval" / "b.json").read_bytes()))
    assert len(results.load_evaluations(tmp_path / "eval")) == 2
    (tmp_path / "eval" / "b.json").unlink()
    assert results.load_evaluations(tmp_path / "eval")[1] == record
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.json\.xz is not an evaluation"):
        results.load_evaluations(tmp_path / "eval")
    results.write_evaluation(tmp_path / "eval" / "b.json", record)  # the new one takes its place
    assert not packed.exists() and results.load_evaluations(tmp_path / "eval")[1] == record
    with pytest.raises(ValueError, match="provenance without device"):
        results.write_evaluation(tmp_path / "c.json", record | {"device": ""})
    assert not (tmp_path / "c.json").exists()
    for damaged in ("{", "[1]", '"text"', '{"model": {"name": "a"}, "backend": "dense"}'):
        (tmp_path / "eval" / "c.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"c\.json is not an evaluation"):
            results.load_evaluations(tmp_path / "eval")


def test_only_whole_files_are_evaluations(tmp_path):
    names = "a.json b.json.xz both.json both.json.xz folder.json.xz"
    others = ".a.json.x8f3 .hidden.json .packed.json.xz held_out.jsonl a.json~ a.json.xz.part a.json.bak a.txt"
    for name in (names + " " + others).split():
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "inner.json.xz").mkdir()
    expected = ["a.json", "b.json.xz", "both.json", "folder.json.xz"]
    assert results.evaluation_paths(tmp_path) == [tmp_path / name for name in expected]
    assert results.evaluation_paths(tmp_path / "nothing") == []


def test_models_are_called_by_their_run_or_folder(tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    assert (
        results.model_name(tmp_path / "mine")
        == results.model_name(tmp_path / "mine" / "model")
        == "mine"
    )
    assert results.model_name("SakanaAI/SparseLM1.5B") == "SparseLM1.5B"
    monkeypatch.chdir(tmp_path / "mine")
    assert results.model_name(".") == results.model_name("model/") == "mine"
