"""One process at a time trains in a folder, and a lock that was left behind holds nobody up."""

import multiprocessing
import socket

import pytest

from twell.train import lock


def hold(folder, pipe):
    with lock.hold(folder):
        pipe.send("held")
        pipe.recv()


def test_one_process_wins_and_the_other_says_which(tmp_path):
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=hold, args=(tmp_path / "run", theirs))
    process.start()
    assert pipe.recv() == "held"
    for _ in range(2):
        with pytest.raises(FileExistsError) as refusal, lock.hold(tmp_path / "run"):
            pass
        assert f"process {process.pid} on {socket.gethostname()}" in str(refusal.value)
    pipe.send("end")
    process.join()
    assert not (tmp_path / "run").exists()  # it was empty


def test_a_killed_process_holds_nobody_up(tmp_path):
    (tmp_path / "train.lock").write_text("process 3")
    with lock.hold(tmp_path):
        assert "process 3" not in (tmp_path / "train.lock").read_text()
    assert tmp_path.is_dir()
