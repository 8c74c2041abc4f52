"""A checkpoint's file with any change is read as it was written, or refused by name."""

import random
import zipfile

import pytest
import torch

from twell.train import checkpoint
from twell.train.checkpoint import Checkpoints


def state(step):
    rest = dict.fromkeys(("schedule", "window", "sparse", "random", "streams"), 0)
    return {"step": step, "model": {"w": torch.arange(3000.0)}, "optimizer": {"lr": 0.1}, **rest}


@pytest.fixture
def kept(tmp_path):
    (tmp_path / "log.csv").write_text("step\n1\n2\n")
    return Checkpoints(tmp_path, tmp_path / "log.csv")


def test_two_are_kept_and_the_newest_whole_one_is_read(tmp_path, kept):
    said = []
    for step in (1, 2, 3):
        kept.write(state(step))
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == [
        "checkpoint-previous.pt",
        "checkpoint.pt",
    ]
    again = Checkpoints(tmp_path, tmp_path / "log.csv")
    assert again.read(said.append)["step"] == 3 and said == []
    again.last.write_bytes(again.last.read_bytes()[:100])
    assert again.read(said.append)["step"] == 2
    assert said == [
        f"{again.last} is damaged or cut short (BadZipFile): going on from {again.previous}, step 2"
    ]
    again.write(state(4))  # takes the damaged one's place, not the good one's
    assert [checkpoint.read(path)["step"] for path in (again.last, again.previous)] == [4, 2]
    (tmp_path / "log.csv").write_text("step\n1\n")
    with pytest.raises(
        ValueError,
        match=r"log\.csv is shorter .*; .*put back a copy, or start again with --overwrite",
    ):
        again.read(said.append)
    again.remove()
    assert not again.exist() and [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_full_disk_leaves_the_one_before(kept, monkeypatch):
    kept.write(state(1))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"checkpoint\.pt could not be written"),
    ):
        patch.setattr(checkpoint.results.tempfile, "mkstemp", full)
        kept.write(state(2))
    assert Checkpoints(kept.last.parent, kept.log).read(lambda _: None)["step"] == 1


def test_any_damage_is_found(tmp_path, kept):
    kept.write(state(7))
    whole, draw = kept.last.read_bytes(), random.Random()
    for number in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 400])):
            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        if number % 10 == 0:
            data = data[: draw.randrange(len(data))]
        kept.last.write_bytes(data)
        try:
            found = checkpoint.read(kept.last)
        except ValueError as error:
            assert str(kept.last) in str(error)
            continue
        # a byte that means nothing, such as one that fills up to 64
        assert found["step"] == 7 and torch.equal(found["model"]["w"], state(7)["model"]["w"])
        assert found["log_sha256"] == checkpoint.results.file_hash(kept.log) and found[
            "optimizer"
        ] == {"lr": 0.1}


def test_a_changed_bit_of_the_zip_files_directory_is_found(kept):
    """Its CRC-32 do not cover it, and torch then reads other weights."""
    kept.write(state(7))
    whole = kept.last.read_bytes()
    start = whole.index(b"PK\x01\x02")
    for place in range(start, len(whole)):
        for bit in (1, 4):
            kept.last.write_bytes(
                whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            )
            with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
                checkpoint.read(kept.last)


def test_a_checkpoint_of_an_older_version_is_read(kept):
    torch.save(state(7) | {"log": 0}, kept.last)
    assert checkpoint.read(kept.last)["step"] == 7


def test_another_programs_file_is_no_checkpoint(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is no checkpoint of a run"):
        checkpoint.read(tmp_path / "checkpoint.pt")
    with zipfile.ZipFile(tmp_path / "checkpoint.pt", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is (damaged|no checkpoint)"):
        checkpoint.read(tmp_path / "checkpoint.pt")
