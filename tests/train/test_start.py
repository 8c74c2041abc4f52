"""A training starts in a fit folder, alone, and deletes only files of a run."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from accelerate import Accelerator

from tests.train.runs import stop_training
from twell import results
from twell.train import lock, start, train


def test_overwrite_replaces_runs_and_nothing_else(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    train(short, tmp_path / "run", quiet=True)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(short, tmp_path / "run", quiet=True)
    train(short, tmp_path / "run", overwrite=True, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is no run"):
        train(short, tmp_path / "mine", overwrite=True, quiet=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


MINE = {
    ".env": "SECRET=1",
    ".gitignore": "*",
    "notes.txt": "keep",
    "model/notes.txt": "keep",
    ".config.yaml.original": "keep",
}


def put_mine(folder):
    for name, text in MINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def assert_mine(folder):
    assert {name: (folder / name).read_text() for name in MINE if (folder / name).is_file()} == MINE


def test_nothing_of_the_users_is_deleted(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=2 * 512)
    (tmp_path / "run").mkdir()
    for name in (".env", ".gitignore"):
        (tmp_path / "run" / name).write_text(MINE[name])
    train(short, tmp_path / "run", quiet=True)
    put_mine(tmp_path / "run")
    (tmp_path / "run" / ".log.csv.a1b2c3d4.part").write_text("left by a kill")
    train(dataclasses.replace(short, seed=1), tmp_path / "run", overwrite=True, quiet=True)
    assert_mine(tmp_path / "run")
    assert results.load_run(tmp_path / "run")[0]["seed"] == 1
    assert not (tmp_path / "run" / ".log.csv.a1b2c3d4.part").exists()


def test_a_run_is_known_by_all_of_its_files(tiny_config, tiny_run, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    for name in ("config.yaml", "provenance.json", "log.csv"):
        folder = shutil.copytree(tiny_run, tmp_path / f"without-{name}")
        (folder / name).unlink()
        before = {path.name for path in folder.rglob("*")}
        for options in ({"overwrite": True}, {"resume": True}, {}):
            message = rf"is no run \(it has no {name}\), so it is left alone"
            with pytest.raises(FileExistsError, match=message):
                train(short, folder, quiet=True, **options)
        assert {path.name for path in folder.rglob("*")} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("base: quick  # written by hand\n")
    with pytest.raises(FileExistsError, match="is no run"):
        train(short, tmp_path / "mine", overwrite=True, quiet=True)


def test_a_start_that_fails_leaves_the_run_that_it_was_to_replace(tiny_config, tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    config = dataclasses.replace(tiny_config, source=str(tmp_path / "nothing.txt"))
    with pytest.raises(FileNotFoundError, match="no text at"):
        train(config, folder, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with pytest.raises(FileNotFoundError, match="no text at"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_step_that_leaves_a_process_without_text_is_refused(tiny_config, tmp_path, monkeypatch):
    class Many(Accelerator):
        num_processes = 17

    monkeypatch.setattr(start, "Accelerator", Many)
    step = r"a step has 16 sequences \(batch_tokens 512, context 32\) for 17 processes"
    with pytest.raises(ValueError, match=f"{step}; each needs at least one"):
        train(tiny_config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("processes", "micro", "allowed"),
    [
        (3, None, True),
        (3, 6, True),
        (3, 5, False),
        (3, 4, True),
        (2, 3, True),
        (5, 1, False),
        (16, 1, True),
    ],
)
def test_sharded_processes_have_equally_many_forward_passes(tiny_config, processes, micro, allowed):
    config = dataclasses.replace(tiny_config, micro_batch=micro)  # 16 sequences
    start.check_shares(config, processes, sharded=False)
    shares = [range(first, 16, processes) for first in range(processes)]
    passes = {len(range(0, len(share), micro or 16)) for share in shares}
    assert (len(passes) == 1) == allowed
    if allowed:
        start.check_shares(config, processes, sharded=True)
    else:
        message = f"micro_batch {micro} some of them have one forward pass more"
        with pytest.raises(ValueError, match=message):
            start.check_shares(config, processes, sharded=True)


@torch._dynamo.config.patch(optimize_ddp=True)
def test_options_of_ddp(tiny_config, tmp_path, monkeypatch):
    accelerators, whole = [], []

    def noting(**options):
        accelerators.append(Accelerator(**options))
        return accelerators[-1]

    monkeypatch.setattr(start, "Accelerator", noting)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    for compiled in (False, True):
        config = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0, compile=compiled)
        train(config, tmp_path / str(compiled), quiet=True)
        whole.append(torch._dynamo.config.optimize_ddp is False)
    options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    assert [one.ddp_handler.to_kwargs() for one in accelerators] == [options, options]
    # Compiled layers are not cut into DDP's buckets; else the setting is left alone.
    assert whole == [False, True]


def test_only_a_run_is_resumed(tiny_config, tmp_path, capsys):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    for folder in (tmp_path / "nothing", tmp_path):
        message = "holds no run to resume: start it without --resume"
        with pytest.raises(FileNotFoundError, match=message):
            train(short, folder, resume=True)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ValueError, match="--resume goes on with a run and --overwrite deletes it"):
        train(short, tmp_path / "run", resume=True, overwrite=True)
    # As a run that was killed right after its start.
    results.write_run(tmp_path / "run", dataclasses.asdict(short), results.provenance())
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(short, tmp_path / "run")
    capsys.readouterr()
    train(short, tmp_path / "run", resume=True)
    assert "run has no checkpoint yet: it starts from the beginning\n" in capsys.readouterr().out
    assert results.load_run(tmp_path / "run")[0]["complete"]


def test_one_process_trains_in_a_folder(tiny_config, tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    with lock.hold(folder):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(FileExistsError, match=f"run is held by process {os.getpid()} on "):
                train(tiny_config, folder, quiet=True, **options)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


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
            assert results.load_provenance(tmp_path / "run")["starts"][0]["commit"] == "first"
    monkeypatch.setenv("TWELL_COMMIT", "third")
    train(config, tmp_path / "run", resume=True, quiet=True)
    row = results.load_provenance(tmp_path / "run")
    assert [start["commit"] for start in row["starts"]] == ["first", "second", "third"]
    assert [one.get("step") for one in row["starts"]] == [None, 4, 12]
    assert row["commit"] == "third"
    for one in row["starts"]:
        assert all(one[name] for name in ("device", "versions", "command", "date"))


def test_a_model_folder_that_is_a_link_stays_one(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, tokens=512, warmup_steps=0)
    train(short, tmp_path / "run", quiet=True)
    shutil.move(tmp_path / "run" / "model", tmp_path / "elsewhere")
    (tmp_path / "run" / "model").symlink_to(tmp_path / "elsewhere")
    train(short, tmp_path / "run", overwrite=True, quiet=True)
    assert (tmp_path / "run" / "model").is_symlink()
    assert (tmp_path / "elsewhere" / "model.safetensors").is_file()


def test_a_resume_without_a_log_says_what_to_put_back(tiny_config, tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    (folder / "log.csv").unlink()
    message = r"has no log\.csv\), so it is left alone: put back a copy of it"
    with pytest.raises(FileExistsError, match=message):
        train(tiny_config, folder, resume=True, quiet=True)
