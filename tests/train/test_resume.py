"""A run that stopped at any moment goes on exactly as if it had not."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import yaml

from tests.kills import differences, kill_rounds
from tests.train.runs import stop_training, stream_config
from twell import results
from twell.train import train
from twell.train.loop import Run


def test_kills_and_exact_resumes(tiny_config, tmp_path):
    settings = {
        "checkpoint_every": 2,
        "log_every": 2,
        "tokens": 48 * 512,
        "l1_warmup_steps": 20,
        "reinit": 0.1,
        "balance_every": 3,
    }
    config = dataclasses.replace(tiny_config, **settings)
    config.prepare_text()
    rounds = list(kill_rounds(config, tmp_path, 5))
    assert len(rounds) == 5


def test_resume_continues_and_rewrites_rows_after_the_checkpoint(
    tiny_config, tmp_path, monkeypatch
):
    config = dataclasses.replace(tiny_config, checkpoint_every=8)
    whole = train(config, tmp_path / "whole", quiet=True)
    stop_training(config, tmp_path / "run", 8)
    with open(tmp_path / "run" / "log.csv", "a") as log:
        log.write("12,6144,train,,loss,1")  # a row that a kill cut short
    assert train(config, tmp_path / "run", resume=True, quiet=True) == tmp_path / "run"
    assert differences(tmp_path / "run", whole) == []
    stamp = (tmp_path / "run" / "log.csv").stat().st_mtime_ns
    train(config, tmp_path / "run", resume=True, quiet=True)  # complete: left as it is
    assert (tmp_path / "run" / "log.csv").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="run of another configuration: seed was 0 and is 1"):
        train(dataclasses.replace(config, seed=1), tmp_path / "run", resume=True, quiet=True)


def test_ctrl_c_saves_a_checkpoint_between_two_rows(tiny_config, tmp_path, monkeypatch, capfd):
    whole = train(tiny_config, tmp_path / "whole", quiet=True)
    step = Run.step

    def press(self, now):
        if now == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, now)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(Run, "step", press)
        # It writes rows every four steps and, but for the key, no checkpoint.
        train(tiny_config, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    assert str(stopped.value) == (
        f"interrupted; {checkpoint} has step 6 of 16. "
        "To go on, give the same command with --resume, and without --overwrite"
    )
    assert "stopping after this step with a checkpoint" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before and checkpoint.is_file()
    train(tiny_config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "run", whole) == []


def test_a_second_ctrl_c_stops_at_once(tiny_config, tmp_path, monkeypatch):
    def press(self, now):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("still there")

    monkeypatch.setattr(Run, "step", press)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config, tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run").glob("checkpoint*"))
    assert not (tmp_path / "run" / "train.lock").exists()


def test_damaged_checkpoints_are_named(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, checkpoint_every=8)
    stop_training(config, tmp_path / "run", 8)
    checkpoint, log = tmp_path / "run" / "checkpoint.pt", tmp_path / "run" / "log.csv"
    (tmp_path / "run" / "checkpoint-previous.pt").unlink(missing_ok=True)
    whole, rows = checkpoint.read_bytes(), log.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nothing", b""):
        checkpoint.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged or cut short"):
            train(config, tmp_path / "run", resume=True, quiet=True)
        assert checkpoint.read_bytes() == damaged and log.read_bytes() == rows
    checkpoint.write_bytes(whole)
    log.write_bytes(rows[:-100])
    with pytest.raises(ValueError, match=r"log\.csv is shorter than the checkpoint says"):
        train(config, tmp_path / "run", resume=True, quiet=True)
    log.write_bytes(rows.replace(b",train,", b",trial,", 1))
    remedy = "put back a copy, or start again with --overwrite"
    with pytest.raises(ValueError, match=rf"log\.csv is damaged: .*{remedy}"):
        train(config, tmp_path / "run", resume=True, quiet=True)


def test_the_last_good_checkpoint_is_kept_and_used(tiny_config, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(tiny_config, checkpoint_every=4, log_every=2)
    whole = train(config, tmp_path / "whole", quiet=True)
    stop_training(config, tmp_path / "run", 12)
    last, previous = (tmp_path / "run" / name for name in results.CHECKPOINTS)
    assert len(list((tmp_path / "run").glob("*checkpoint*"))) == 2
    assert [torch.load(path, weights_only=True)["step"] for path in (last, previous)] == [12, 8]
    data = bytearray(last.read_bytes())
    for place in np.random.default_rng(0).integers(0, len(data), 400):
        data[place] ^= 255
    last.write_bytes(data)
    capsys.readouterr()
    stop_training(config, tmp_path / "run", 12, resume=True, quiet=False)
    said = capsys.readouterr().out
    assert f"{last} is damaged" in said and f": going on from {previous}, step 8\n" in said
    assert [torch.load(path, weights_only=True)["step"] for path in (last, previous)] == [12, 8]
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "run", whole) == []


def test_a_checkpoint_or_provenance_of_something_else_is_named(tiny_config, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config, checkpoint_every=8)
    stop_training(config, tmp_path / "run", 8)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    provenance = tmp_path / "run" / "provenance.json"
    whole = torch.load(checkpoint, weights_only=True)
    # As older versions wrote it, without a seal.
    part = {name: whole[name] for name in whole if name not in ("sealed", "sparse")}
    states = (part, "sparse"), ([1], "step, model"), ({"step": 8}, "model, opti")
    for state, names in states:
        torch.save(state, checkpoint)
        message = rf"checkpoint\.pt is no checkpoint of a run: it has no {names}"
        with pytest.raises(ValueError, match=message):
            train(config, tmp_path / "run", resume=True, quiet=True)
    for text in ("", "[1]"):
        provenance.write_text(text)
        with pytest.raises(ValueError, match=r"provenance\.json is n"):
            train(config, tmp_path / "run", resume=True, quiet=True)


def test_a_run_goes_on_with_its_configuration_and_text_alone(
    tiny_config, tiny_text, tmp_path, monkeypatch
):
    text = shutil.copy(tiny_text, tmp_path / "text.jsonl")
    config = dataclasses.replace(tiny_config, source=str(text), checkpoint_every=8)
    stop_training(config, tmp_path / "run", 8)
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.iterdir()}

    edited = dataclasses.replace(config, seed=7)
    (run / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(edited)))
    message = r"checkpoint\.pt was written with another configuration: seed was 0 and is 7; "
    with pytest.raises(ValueError, match=message):
        train(edited, run, resume=True, quiet=True)
    (run / "config.yaml").write_bytes(before[run / "config.yaml"])

    text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    message = r"the text of \S*run has changed since .* validation and training tokens differ"
    with pytest.raises(ValueError, match=message):
        train(config, run, resume=True, quiet=True)
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_run_of_an_older_version_goes_on(tiny_config, tmp_path):
    config, run = dataclasses.replace(tiny_config, checkpoint_every=8), tmp_path / "run"
    stop_training(config, run, 8)
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    del state["config"], state["sealed"]
    torch.save(state, run / "checkpoint.pt")
    row = json.loads((run / "provenance.json").read_text())
    del row["text_sha256"]
    (run / "provenance.json").write_text(json.dumps(row))
    train(config, run, resume=True, quiet=True)
    assert results.load_run(run)[0]["complete"]


@pytest.mark.parametrize(
    "changes", [{"micro_batch": 3}, {"micro_batch": 16, "reinit": 0.3, "balance_every": 3}]
)
def test_resumes_with_micro_batches_are_exact(tiny_config, tmp_path, monkeypatch, changes):
    config = dataclasses.replace(
        tiny_config, checkpoint_every=4, l1_zero_steps=3, l1_warmup_steps=20, **changes
    )
    whole = train(config, tmp_path / "whole", quiet=True)
    stop_training(config, tmp_path / "run", 12)
    assert differences(train(config, tmp_path / "run", resume=True, quiet=True), whole) == []


def test_streamed_training_resumes_exactly(tiny_config, tiny_text, tmp_path, monkeypatch):
    config = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    whole = train(config, tmp_path / "whole", quiet=True)
    stop_training(config, tmp_path / "run", 8)
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "run", whole) == []
