"""A training starts in a fit folder, alone, and deletes only files of a run."""

import dataclasses
import json
import os
import shutil

import pytest

from tests.factories.train import SHORT, contents, stop_training, train_changed
from twell import results
from twell.train import lock, start, train

MINE = [".env", ".gitignore", "notes.txt", "model/notes.txt", ".config.yaml.original"]
MINE += ["checkpoint-00000001/notes.txt", "checkpoint-mine/state.pt", "checkpoint-00000002"]


@pytest.fixture
def short(tiny_config):
    return dataclasses.replace(tiny_config, **SHORT)


@pytest.fixture
def run(tiny_run, tmp_path):
    """A copy of a complete run."""
    return shutil.copytree(tiny_run, tmp_path / "run")


def test_overwrite_deletes_nothing_of_the_users(tiny_config, tmp_path):
    folder, config = tmp_path / "run", dataclasses.replace(tiny_config, checkpoint_every=4)
    folder.mkdir()
    for name in MINE[:2]:
        (folder / name).write_text("keep")
    stop_training(config, folder, 4)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(config, folder, quiet=True)
    for name in MINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("keep")
    for left in (".log.csv.a1b2c3d4.part", "checkpoint-00000001/__0_0.distcp"):
        (folder / left).write_text("left by a kill")
    train(dataclasses.replace(config, seed=1), folder, overwrite=True, quiet=True)
    kept = {"config.yaml", "provenance.json", "log.csv", *MINE}
    names = {str(path.relative_to(folder)) for path in contents(folder)}
    assert {name for name in names if "model/" not in name or "notes" in name} == kept
    assert all((folder / name).read_text() == "keep" for name in MINE)
    assert results.load_run(folder)[0]["seed"] == 1


@pytest.mark.parametrize("missing", ["config.yaml", "provenance.json", "log.csv"])
def test_a_run_is_known_by_all_of_its_files(short, run, missing):
    (run / missing).unlink()
    before = contents(run)
    for options in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(FileExistsError, match=rf"is no run \(it has no {missing}\)"):
            train(short, run, quiet=True, **options)
    assert contents(run) == before
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "config.yaml").write_text("base: quick  # written by hand\n")
    with pytest.raises(FileExistsError, match="is no run"):
        train(short, run, overwrite=True, quiet=True)


def test_a_start_that_fails_leaves_what_is_there(tiny_config, run, tmp_path):
    before = contents(run)
    config = dataclasses.replace(tiny_config, source=str(tmp_path / "nothing.txt"))
    with pytest.raises(FileNotFoundError, match="no text at"):
        train(config, run, overwrite=True)
    with lock.hold(run):
        before |= contents(run)
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(FileExistsError, match=f"run is held by process {os.getpid()} on "):
                train(tiny_config, run, quiet=True, **options)
        assert contents(run) == before
    with pytest.raises(FileNotFoundError, match="no text at"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name, kind in (("file", "a file"), ("link", "a link to nothing")):
        with pytest.raises(FileExistsError, match=f"{name} is {kind}; a run is a folder"):
            train(tiny_config, tmp_path / name)
    with pytest.raises(MemoryError, match=r"weights in fp32 need .* GiB, and this machine has"):
        train_changed(tiny_config, tmp_path / "new", intermediate_size=10**12)


PROCESSES = [(3, None), (3, 6), (3, 5), (3, 4), (2, 3), (5, 1), (16, 1)]


@pytest.mark.parametrize(("processes", "micro"), PROCESSES)
def test_sharded_processes_have_equally_many_forward_passes(tiny_config, processes, micro):
    config = dataclasses.replace(tiny_config, micro_batch=micro)  # 16 sequences
    start.check_shares(config, processes, sharded=False)
    shares = [range(first, 16, processes) for first in range(processes)]
    passes = {len(range(0, len(share), micro or 16)) for share in shares}
    if len(passes) == 1:
        start.check_shares(config, processes, sharded=True)
    else:
        with pytest.raises(ValueError, match=f"micro_batch {micro}"):
            start.check_shares(config, processes, sharded=True)
    with pytest.raises(ValueError, match="16 sequences .* for 17 processes"):
        start.check_shares(config, 17, sharded=False)


@pytest.mark.parametrize(
    ("environment", "policy", "said"),
    [
        ({}, None, False),
        ({"ACCELERATE_USE_FSDP": "true"}, "TRANSFORMER_BASED_WRAP", True),
        ({"ACCELERATE_USE_FSDP": "true", "RANK": "1"}, "TRANSFORMER_BASED_WRAP", False),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "NO_WRAP", False),
    ],
)
def test_fsdp_without_a_wrap_policy_wraps_decoder_layers(monkeypatch, environment, policy, said):
    monkeypatch.setattr(os, "environ", environment)
    assert start.wrap_layers() == said
    assert environment.get("FSDP_AUTO_WRAP_POLICY") == policy


def test_only_a_run_is_resumed(short, tmp_path, capsys):
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match="holds no run to resume"):
            train(short, folder, resume=True)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="--resume"):
        train(short, tmp_path / "run", resume=True, overwrite=True)
    # As a run that was killed right after its start.
    results.write_run(tmp_path / "run", dataclasses.asdict(short), results.provenance())
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(short, tmp_path / "run")
    train(short, tmp_path / "run", resume=True)
    assert "starts from the beginning" in capsys.readouterr().out
    assert results.load_run(tmp_path / "run")[0]["complete"]


def test_provenance_has_every_start(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, checkpoint_every=4)
    for commit, last in (("first", 4), ("second", 12)):
        monkeypatch.setenv("TWELL_COMMIT", commit)
        stop_training(config, tmp_path / "run", last, resume=commit == "second")
        if commit == "first":  # a file of an older version
            path = tmp_path / "run" / "provenance.json"
            row = json.loads(path.read_text())
            del row["starts"]
            path.write_text(json.dumps(row))
    monkeypatch.setenv("TWELL_COMMIT", "third")
    train(config, tmp_path / "run", resume=True, quiet=True)
    row = results.load_provenance(tmp_path / "run")
    assert [one["commit"] for one in row["starts"]] == ["first", "second", "third"]
    assert [one.get("step") for one in row["starts"]] == [None, 4, 12]
    assert row["commit"] == "third"
    for one in row["starts"]:
        assert all(one[name] for name in ("device", "versions", "command", "date"))


def test_a_model_folder_that_is_a_link_stays_one(short, run, tmp_path):
    shutil.move(run / "model", tmp_path / "elsewhere")
    (run / "model").symlink_to(tmp_path / "elsewhere")
    train(short, run, overwrite=True, quiet=True)
    assert (run / "model").is_symlink() and (tmp_path / "elsewhere" / "config.json").is_file()
