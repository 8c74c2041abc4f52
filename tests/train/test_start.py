"""A training starts in a fit folder, alone, and deletes only files of a run."""

import contextlib
import dataclasses
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from tests.factories.train import SHORT, contents, stop_training
from twell import results
from twell.train import start, train

MINE = [".env", "notes.txt", "model/notes.txt", ".config.yaml.original"]
MINE += ["checkpoint-00000001/notes.txt", "checkpoint-mine/state.pt", "checkpoint-00000002"]


@pytest.fixture
def short(tiny_config):
    return dataclasses.replace(tiny_config, **SHORT)


def test_overwrite_deletes_nothing_of_the_users(tiny_config, tmp_path):
    folder, config = tmp_path / "run", dataclasses.replace(tiny_config, checkpoint_every=4)
    folder.mkdir()
    (folder / ".env").write_text("keep")  # hidden files are no run
    stop_training(config, folder, 4)
    for name in MINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("keep")
    for left in (".log.csv.a1b2c3d4.part", "checkpoint-00000001/__0_0.distcp"):
        (folder / left).write_text("left by a kill")
    train(dataclasses.replace(config, seed=1), folder, overwrite=True, quiet=True)
    kept = {"config.yaml", "provenance.json", "log.csv", "valid.npy", *MINE}
    names = {str(path.relative_to(folder)) for path in contents(folder)}
    assert {name for name in names if "model/" not in name or "notes" in name} == kept
    assert all((folder / name).read_text() == "keep" for name in MINE)
    assert results.load_run(folder)[0]["seed"] == 1


REFUSED = [  # what is in the folder, options, the error and what it names
    ("nothing", {"resume": True}, FileNotFoundError, "no run to resume"),
    ("run", {}, FileExistsError, "already holds a run"),
    ("run", {"overwrite": True, "source": "nothing.txt"}, FileNotFoundError, "nothing.txt"),
    ("nothing", {"intermediate_size": 10**12}, MemoryError, "GiB"),
    ("link to nothing", {}, FileExistsError, "run"),
    ("a config.yaml alone", {"overwrite": True}, FileExistsError, "provenance.json"),
    ("no provenance.json", {"resume": True}, FileExistsError, "provenance.json"),
]


@pytest.mark.parametrize(("kind", "options", "error", "words"), REFUSED)
def test_a_folder_that_does_not_fit_is_left_alone(
    short, tiny_run, tmp_path, kind, options, error, words
):
    folder = tmp_path / "run"
    if kind == "link to nothing":
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "a config.yaml alone":
        folder.mkdir()
        (folder / "config.yaml").write_text("base: quick  # written by hand\n")
    elif kind != "nothing":
        shutil.copytree(tiny_run, folder)
    if kind.startswith("no "):
        (folder / kind.removeprefix("no ")).unlink()
    before = contents(tmp_path)
    fields = {name: value for name, value in options.items() if name in vars(short)}
    options = {name: value for name, value in options.items() if name not in fields}
    with pytest.raises(error, match=words):
        train(dataclasses.replace(short, **fields), folder, quiet=True, **options)
    assert contents(tmp_path) == before
    assert kind != "nothing" or not folder.exists()


def hold(folder, pipe):
    with start.hold(folder):
        pipe.send("held")
        pipe.recv()


def test_one_process_trains_and_another_learns_which(tiny_config, tmp_path):
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=hold, args=(tmp_path / "run", theirs))
    process.start()
    assert pipe.recv() == "held"
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(FileExistsError, match=f"process {process.pid} on "):
            train(tiny_config, tmp_path / "run", quiet=True, **options)
    pipe.send("end")
    process.join()
    assert not (tmp_path / "run").exists()  # it was empty
    tmp_path.joinpath("train.lock").write_text("of a killed process")
    with start.hold(tmp_path):
        pass
    assert tmp_path.is_dir()


def test_sharded_processes_have_equally_many_forward_passes(tiny_config):
    for processes, micro, fits in [(3, None, True), (3, 6, True), (3, 5, False), (5, 1, False)]:
        config = dataclasses.replace(tiny_config, micro_batch=micro)  # 16 sequences
        start.check_shares(config, processes, sharded=False)
        refused = pytest.raises(ValueError, match=f"micro_batch {micro}")
        with contextlib.nullcontext() if fits else refused:
            start.check_shares(config, processes, sharded=True)
    with pytest.raises(ValueError, match="17 processes"):
        start.check_shares(config, 17, sharded=False)


def test_a_run_that_was_killed_at_its_start_begins_again(short, tmp_path):
    results.write_run(tmp_path / "run", dataclasses.asdict(short), results.provenance())
    train(short, tmp_path / "run", resume=True, quiet=True)
    assert results.load_run(tmp_path / "run")[0]["complete"]


def test_a_run_of_an_older_version_goes_on(tiny_config, tmp_path, monkeypatch):
    """Without later fields. Provenance has every start."""
    config, run = dataclasses.replace(tiny_config, checkpoint_every=4), tmp_path / "run"
    monkeypatch.setenv("TWELL_COMMIT", "first")
    stop_training(config, run, 4)
    origin = json.loads((run / "provenance.json").read_text())
    del origin["starts"]
    (run / "provenance.json").write_text(json.dumps(origin))
    lines = [line for line in open(run / "config.yaml") if "balance_every" not in line]
    (run / "config.yaml").write_text("".join(lines))
    monkeypatch.setenv("TWELL_COMMIT", "second")
    later = dataclasses.replace(config, balance_every=1)  # as a configuration may have by now
    train(later, run, resume=True, quiet=True)
    row = results.load_provenance(run)
    assert [(one["commit"], one.get("step")) for one in row["starts"]] == [
        ("first", None),
        ("second", 4),
    ]
    assert row["complete"] and results.load_run(run)[0]["balance_every"] == 0


def test_a_kill_while_a_run_is_deleted_leaves_a_run(tiny_run, tmp_path, monkeypatch):
    """One that --overwrite replaces, and --resume does not take for complete."""
    run, unlink, moments = shutil.copytree(tiny_run, tmp_path / "run"), Path.unlink, iter(range(99))

    def kill(path, **options):
        if next(moments) == 4:
            raise ZeroDivisionError
        unlink(path, **options)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, "unlink", kill)
        results.remove_run(run)
    assert results.run_state(run) == "run" and not (run / "config.yaml").exists()
