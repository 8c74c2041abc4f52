"""A run that stopped at any moment goes on exactly as if it had not, or says what is damaged."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.factories import SEED
from tests.factories.train import (
    SHORT,
    contents,
    resume,
    stop_training,
    stream_config,
    train_changed,
)
from tests.kills import differences, kill_rounds
from twell import results
from twell.train import checkpoint, start, train
from twell.train.checkpoint import Checkpoints
from twell.train.loop import Run


@pytest.fixture(scope="module")
def expected(tiny_config, tmp_path_factory):
    """A run of 16 steps that did not stop."""
    return train(tiny_config, tmp_path_factory.mktemp("expected") / "run", quiet=True)


@pytest.fixture(scope="module")
def stopped_run(tiny_config, tmp_path_factory):
    """A run with checkpoints of the steps 4 and 8."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    stop_training(dataclasses.replace(tiny_config, checkpoint_every=4), run, 8)
    return run


@pytest.fixture
def stopped(stopped_run, tiny_config, tmp_path):
    """A copy of that run, and its configuration."""
    config = dataclasses.replace(tiny_config, checkpoint_every=4)
    return shutil.copytree(stopped_run, tmp_path / "run"), config


def train_and_press(config, run, step, number):
    """Train, and send the signal two steps before the row of a step."""
    take_step = Run.step

    def press(self, now):
        if now == step - 2:
            os.kill(os.getpid(), number)
        return take_step(self, now)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(Run, "step", press)
        train(config, run)
    return str(stopped.value)


def test_kills_at_random_moments(tiny_config, tmp_path):
    settings = {"checkpoint_every": 2, "log_every": 2, "balance_every": 3}
    config = dataclasses.replace(tiny_config, **settings, l1_warmup_steps=10, reinit=0.1)
    assert len(list(kill_rounds(config, tmp_path, 2, SEED))) == 2


# Where a run stops, by itself or by a signal.
STAGES = {
    "in a window of dead neurons": (10, None),
    "in a stream": (8, None),
    "at the row after SIGTERM": (8, signal.SIGTERM),
    "in a stage of a student's threshold": (15, signal.SIGINT),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_resumes_exactly(config, tiny_config, tiny_text, tmp_path, stage):
    step, number = STAGES[stage]
    if "dead" in stage:
        remedies = {"l1_coefficient": 0.3, "learning_rate": 1e-2, "reinit": 0.3, "micro_batch": 3}
        remedies |= {"balance_every": 3, "l1_zero_steps": 3, "l1_warmup_steps": 20}
        config = dataclasses.replace(tiny_config, checkpoint_every=2, log_every=2, **remedies)
    elif "stream" in stage:
        config = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    elif "student" in stage:
        fields = "tokens=10240 active_share=0.2 hidden_weight=0.5 threshold=0.1 l1_coefficient=0"
        config = dataclasses.replace(config(*fields.split()), micro_batch=9)
    else:
        config = tiny_config
    whole, run = train(config, tmp_path / "whole", quiet=True), tmp_path / "run"
    if number:
        before = signal.getsignal(number)
        message = train_and_press(config, run, step, number)
        assert f"{run} has a checkpoint of step {step} of" in message
        assert signal.getsignal(number) is before
    else:
        stop_training(config, run, step)
    assert differences(resume(config, run), whole) == []


def test_a_copy_that_decays_is_the_run_that_ends_there(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, log_every=2, l1_warmup_steps=4, reinit=0.1)
    config = dataclasses.replace(config, decay_at="5120, 7168")
    whole, run = train(config, tmp_path / "whole", quiet=True), tmp_path / "run"
    # Copies leave no mark on the run, and each is the run that ends at its tokens.
    for tokens, folder in ((5120, "model-at-5120"), (7168, "model-at-7168"), (8192, "model")):
        short = train_changed(config, tmp_path / folder, tokens=tokens, decay_at="3072")
        expected = load_file(whole / folder / "model.safetensors")
        weights = load_file(short / "model" / "model.safetensors")
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())

    validate = Run.validate

    def stop(self, step, split="valid"):
        if (step, split) == (14, "valid-decay"):
            raise KeyboardInterrupt
        validate(self, step, split)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "validate", stop)
        train(config, run, quiet=True)
    assert differences(resume(config, run), whole) == []
    log = results.load_run(whole)[1].query("split == 'valid-decay' and metric == 'cross_entropy'")
    assert log["tokens"].tolist() == [5120, 7168]


def test_a_kill_after_the_last_file_leaves_nothing_behind(stopped, expected, monkeypatch):
    (run, config), unlink, moments = stopped, Path.unlink, itertools.count()

    def kill(path, **options):
        complete = json.loads((run / "provenance.json").read_text())["complete"]
        if complete and not path.name.endswith(".part") and next(moments) == 1:
            raise ZeroDivisionError
        unlink(path, **options)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, "unlink", kill)
        resume(config, run)
    (run / ".config.yaml.abcdefgh.part").write_text("half")
    assert list(run.glob("checkpoint-*"))
    assert differences(resume(config, run), expected) == []
    before = (run / "log.csv").stat().st_mtime_ns
    resume(config, run)  # a complete run is left as it is
    assert (run / "log.csv").stat().st_mtime_ns == before


def test_every_changed_bit_is_found(stopped):
    (run, _), draw = stopped, random.Random(SEED)
    path, _ = Checkpoints(run).paths()
    data = path.read_bytes()
    places = draw.sample(range(len(data)), 20)
    changed = [data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] for place in places]
    for damaged in (*changed, data[: draw.randrange(len(data))]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=path.name):
            checkpoint.read(path)
    path.write_bytes(data)
    assert checkpoint.read(path)["step"] == 8


def test_a_checkpoint_of_an_older_version_is_refused(stopped):
    Checkpoints(stopped[0]).remove()
    (old := stopped[0] / "checkpoint-00000008").mkdir()
    (old / "state.pt").touch()
    with pytest.raises(ValueError, match=f"{old} is of an older version: delete it"):
        resume(stopped[1], stopped[0])


def test_the_last_whole_checkpoint_is_used(stopped, capsys, expected):
    run, config = stopped
    file, previous = Checkpoints(run).paths()
    file.write_bytes(file.read_bytes()[:-9])
    with open(run / "log.csv", "a") as log:
        log.write("12,6144,train,,loss,1")  # a row that a kill cut short
    stop_training(config, run, 8, resume=True, quiet=False)
    out = capsys.readouterr().out
    assert str(file) in out and f"{previous}, step 4\n" in out
    assert [checkpoint.read(path)["step"] for path in Checkpoints(run).paths()] == [8, 4]
    assert [start["step"] for start in results.load_provenance(run)["starts"]] == [0, 4]
    assert differences(resume(config, run), expected) == []


def test_a_run_goes_on_with_its_configuration_processes_and_text_alone(
    tiny_config, tiny_text, tmp_path, monkeypatch
):
    text, run = shutil.copy(tiny_text, tmp_path / "text.jsonl"), tmp_path / "run"
    config = dataclasses.replace(tiny_config, source=str(text), checkpoint_every=8)
    stop_training(config, run, 8)
    before = contents(run)
    with pytest.raises(ValueError, match="seed was 0 and is 7"):
        resume(dataclasses.replace(config, seed=7), run)

    class Two(start.Accelerator):
        num_processes = 2

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="1 processes.* not 2"):
        patch.setattr(start, "Accelerator", Two)
        resume(config, run)

    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match="validation tokens and training tokens of"):
        resume(config, run)
    assert contents(run).keys() == before.keys()
    assert results.load_run(run)[0]["complete"] is False


@pytest.mark.parametrize("name", ["log.csv", "provenance.json"])
def test_damaged_records_are_named(stopped, name):
    run, config = stopped
    (run / name).write_bytes((run / name).read_bytes()[:200])
    before = contents(run)
    with pytest.raises(ValueError, match=name):
        resume(config, run)
    assert contents(run) == before


MINE = [".env", "notes.txt", "model/notes.txt", ".config.yaml.original"]
MINE += ["checkpoint-00000001/notes.txt", "checkpoint-mine/state.pt", "checkpoint-00000002"]


def test_overwrite_deletes_nothing_of_the_users(tiny_config, tmp_path):
    folder, config = tmp_path / "run", dataclasses.replace(tiny_config, checkpoint_every=4)
    folder.mkdir()
    (folder / ".env").write_text("keep")  # hidden files are no run
    stop_training(config, folder, 4)
    for name in MINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("keep")
    for left in (".log.csv.a1b2c3d4.part", ".checkpoint.part"):
        (folder / left).write_text("left by a kill")
    train(dataclasses.replace(config, seed=1), folder, overwrite=True, quiet=True)
    kept = {"config.yaml", "provenance.json", "log.csv", "valid.npy", *MINE}
    names = {str(path.relative_to(folder)) for path in contents(folder)}
    assert {name for name in names if "model/" not in name or "notes" in name} == kept
    assert all((folder / name).read_text() == "keep" for name in MINE)
    assert results.load_run(folder)[0]["seed"] == 1


REFUSED = [  # what is in the folder, options, the error and what it names
    ("nothing", {"resume": True}, FileNotFoundError, "no run to resume"),
    ("run", {"overwrite": True, "source": "nothing.txt"}, FileNotFoundError, "nothing.txt"),
    ("nothing", {"intermediate_size": 10**12}, MemoryError, "GiB"),
    ("a config.yaml alone", {"overwrite": True}, FileExistsError, "provenance.json"),
    ("no provenance.json", {"resume": True}, FileExistsError, "provenance.json"),
]


@pytest.mark.parametrize(("kind", "options", "error", "words"), REFUSED)
def test_a_folder_that_does_not_fit_is_left_alone(
    tiny_config, tiny_run, tmp_path, kind, options, error, words
):
    folder = tmp_path / "run"
    if kind == "a config.yaml alone":
        folder.mkdir()
        (folder / "config.yaml").write_text("base: quick  # written by hand\n")
    elif kind != "nothing":
        shutil.copytree(tiny_run, folder)
    if kind.startswith("no "):
        (folder / kind.removeprefix("no ")).unlink()
    before = contents(tmp_path)
    fields = {name: value for name, value in options.items() if name in vars(tiny_config)}
    options = {name: value for name, value in options.items() if name not in fields}
    with pytest.raises(error, match=words):
        train(dataclasses.replace(tiny_config, **fields), folder, quiet=True, **options)
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


def test_a_run_that_was_killed_at_its_start_begins_again(tiny_config, tmp_path):
    short = dataclasses.replace(tiny_config, **SHORT)
    results.write_run(tmp_path / "run", dataclasses.asdict(short), results.provenance())
    train(short, tmp_path / "run", resume=True, quiet=True)
    assert results.load_run(tmp_path / "run")[0]["complete"]
