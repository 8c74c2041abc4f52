"""A run that stopped at any moment goes on exactly as if it had not, or says what is damaged."""

import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.factories import SEED
from tests.factories.train import contents, resume, stop_training, stream_config, write_config
from tests.kills import differences, kill_rounds
from twell import results
from twell.train import checkpoint, loop, start, train
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


def train_and_press(config, run, at, number=signal.SIGINT, **options):
    """Train, and send the signal at the beginning of a step; return the interrupt's message."""
    step = Run.step

    def press(self, now):
        if now == at:
            os.kill(os.getpid(), number)
        return step(self, now)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(Run, "step", press)
        train(config, run, **options)
    return str(stopped.value)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# --- exact


def test_kills_and_exact_resumes(tiny_config, tmp_path):
    settings = {"checkpoint_every": 2, "log_every": 2, "tokens": 32 * 512, "balance_every": 3}
    remedies = {"l1_warmup_steps": 20, "reinit": 0.1}
    config = dataclasses.replace(tiny_config, **settings, **remedies)
    assert len(list(kill_rounds(config, tmp_path, 3, SEED))) == 3


def test_rows_after_the_checkpoint_are_written_again(stopped, expected):
    run, config = stopped
    names = sorted(path.name for path in run.glob("*checkpoint*"))
    assert names == ["checkpoint-00000004", "checkpoint-00000008"]
    with open(run / "log.csv", "a") as log:
        log.write("12,6144,train,,loss,1")  # a row that a kill cut short
    assert resume(config, run) == run and differences(run, expected) == []
    stamp = (run / "log.csv").stat().st_mtime_ns
    resume(config, run)  # complete: left as it is
    assert (run / "log.csv").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        resume(dataclasses.replace(config, seed=1), run)


@pytest.mark.parametrize("moment", range(4))
def test_a_kill_after_the_last_file_leaves_nothing_behind(stopped, expected, monkeypatch, moment):
    run, config = stopped
    unlink, moments = Path.unlink, itertools.count()

    def kill(path, **options):
        provenance = json.loads((run / "provenance.json").read_text())
        if provenance["complete"] and next(moments) == moment:
            raise ZeroDivisionError
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        with pytest.raises(ZeroDivisionError):
            resume(config, run)
    (run / ".config.yaml.abcdefgh.part").write_text("half")
    assert list(run.glob("checkpoint-*"))
    assert differences(resume(config, run), expected) == []


@pytest.mark.parametrize("kind", ["micro-batches", "remedies", "stream"])
def test_other_runs_resume_exactly(tiny_config, tiny_text, tmp_path, kind):
    if kind == "stream":
        config = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    else:
        changes = {"micro_batch": 3, "l1_zero_steps": 3, "l1_warmup_steps": 20}
        if kind == "remedies":  # step 10 is in the middle of a window
            changes = {"l1_coefficient": 0.3, "learning_rate": 1e-2}
            changes |= {"micro_batch": 16, "reinit": 0.3, "balance_every": 3}
        config = dataclasses.replace(tiny_config, checkpoint_every=2, **{"log_every": 2} | changes)
    whole = train(config, tmp_path / "whole", quiet=True)
    stop_training(config, tmp_path / "run", 8 if kind == "stream" else 10)
    assert differences(resume(config, tmp_path / "run"), whole) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_a_checkpoint_between_two_rows(tiny_config, tmp_path, capfd, expected, number):
    run, before = tmp_path / "run", signal.getsignal(number)
    # It writes rows every four steps and, but for the key, no checkpoint.
    message = train_and_press(tiny_config, run, 6, number)
    assert f"{run / 'checkpoint-00000006'} has step 6 of 16" in message and "--resume" in message
    assert "stopping after this step" in capfd.readouterr().err
    assert signal.getsignal(number) is before
    assert differences(resume(tiny_config, run), expected) == []


@pytest.mark.parametrize("fields", ["l1_coefficient=0 threshold=0.1", "l1_growth=1.2"])
def test_ctrl_c_between_two_rows_of_a_student_is_exact(config, tmp_path, fields):
    """Its hidden states, divergence and activity are means over all steps of a row."""
    brief = "tokens=10240 l1_stage_steps=5 active_share=0.2 hidden_weight=0.5"
    given = dataclasses.replace(config(*brief.split(), *fields.split()), micro_batch=3)
    whole = train(given, tmp_path / "whole", quiet=True)
    run = tmp_path / "run"
    train_and_press(given, run, 12, quiet=True)  # rows are written every five steps
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-00000012"]
    assert differences(resume(given, run), whole) == []
    assert "hidden" in set(results.load_run(run)[1]["metric"])


def test_ctrl_c_while_the_model_is_written_loses_nothing(
    tiny_config, tmp_path, monkeypatch, capfd, expected
):
    """No checkpoint is there to go on from."""
    save, run = loop.save_model, tmp_path / "run"

    def press(*given):
        os.kill(os.getpid(), signal.SIGINT)
        save(*given)

    monkeypatch.setattr(loop, "save_model", press)
    train(dataclasses.replace(tiny_config, checkpoint_every=0), run)
    assert "its model is being written" in capfd.readouterr().err
    assert results.load_run(run)[0]["complete"] and differences(run, expected) == []


def test_a_second_ctrl_c_stops_at_once(tiny_config, tmp_path, monkeypatch):
    def press(self, now):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("still there")

    monkeypatch.setattr(Run, "step", press)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, tmp_path / "run", quiet=True)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"config.yaml", "provenance.json", "log.csv"}


# --- damaged


def test_every_changed_bit_is_found(stopped):
    (run, _), draw = stopped, random.Random(SEED)
    path = run / "checkpoint-00000008"
    assert {file.name for file in path.iterdir()} == {".metadata", "__0_0.distcp", "state.pt"}
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        places = draw.sample(range(len(data)), 30)
        if file.name == "state.pt":  # the checksums of a zip file do not cover its directory
            places += range(data.index(b"PK\x01\x02"), len(data), 7)
        changed = [data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] for place in places]
        for damaged in (*changed, data[: draw.randrange(len(data))]):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{file.name} is damaged"):
                checkpoint.read(path)
        file.write_bytes(data)
    assert checkpoint.read(path)["step"] == 8
    (path / ".metadata").unlink()
    with pytest.raises(ValueError, match="metadata is damaged or missing"):
        checkpoint.read(path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.pt"])
def test_the_last_whole_checkpoint_is_used(stopped, capsys, expected, name):
    run, config = stopped
    file, previous = run / "checkpoint-00000008" / name, run / "checkpoint-00000004"
    flip(file, 100)
    capsys.readouterr()
    stop_training(config, run, 8, resume=True, quiet=False)
    out = capsys.readouterr().out
    assert f"{file} is damaged" in out and f": going on from {previous}, step 4\n" in out
    assert [checkpoint.read(path)["step"] for path in Checkpoints(run).paths()] == [8, 4]
    assert differences(resume(config, run), expected) == []


@pytest.mark.parametrize("place", [(torch, "save"), (results.tempfile, "mkstemp")])
def test_a_full_disk_leaves_the_checkpoint_before(stopped, monkeypatch, expected, place):
    (run, config), save = stopped, Run.save_checkpoint

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def save_full(self, step):
        with monkeypatch.context() as patch:
            patch.setattr(*place, full)
            save(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save_checkpoint", save_full)
        with pytest.raises(OSError, match=r"checkpoint-00000012.* could not be written: .*No s"):
            resume(config, run)
    assert checkpoint.read(run / "checkpoint-00000008")["step"] == 8
    assert differences(resume(config, run), expected) == []


def test_a_run_goes_on_with_its_configuration_processes_and_text_alone(
    tiny_config, tiny_text, tmp_path, monkeypatch
):
    text, run = shutil.copy(tiny_text, tmp_path / "text.jsonl"), tmp_path / "run"
    config = dataclasses.replace(tiny_config, source=str(text), checkpoint_every=8)
    stop_training(config, run, 8)
    before = contents(run)

    edited = dataclasses.replace(config, seed=7)
    write_config(edited, run / "config.yaml")
    with pytest.raises(ValueError, match="seed was 0 and is 7"):
        resume(edited, run)
    write_config(config, run / "config.yaml")

    class Two(start.Accelerator):
        num_processes = 2

    with monkeypatch.context() as patch:
        patch.setattr(start, "Accelerator", Two)
        with pytest.raises(ValueError, match="written by 1 processes.* not 2"):
            resume(config, run)

    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match="validation and training tokens differ"):
        resume(config, run)
    assert contents(run).keys() == before.keys()
