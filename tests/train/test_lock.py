"""One process at a time trains in a folder, and a lock that was left behind holds nobody up."""

import json
import multiprocessing
import os
import socket
import threading
import time

import pytest

from twell.train import lock


def assert_refused(folder, message):
    with pytest.raises(FileExistsError, match=message), lock.hold(folder):
        pass


def hold(folder, pipe):
    with lock.hold(folder):
        pipe.send("held")
        pipe.recv()


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the folder `run` until it is told to end."""
    pipe, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=hold, args=(tmp_path / "run", theirs))
    process.start()
    assert pipe.recv() == "held"
    yield process, pipe
    process.kill()
    process.join()


def test_one_process_wins_and_the_other_says_which(tmp_path, holder):
    process, pipe = holder
    name = f"process {process.pid} on {socket.gethostname()}"
    for _ in range(2):
        message = rf"run is held by {name}, since 20.*train\.lock\): wait for it"
        assert_refused(tmp_path / "run", message)
    pipe.send("end")
    process.join()
    assert not (tmp_path / "run").exists()  # nothing was left in it
    with lock.hold(tmp_path / "run"):
        assert (tmp_path / "run" / "train.lock").is_file()


def test_a_killed_process_holds_nothing(tmp_path, holder):
    process, _ = holder
    process.kill()
    process.join()
    path = tmp_path / "run" / "train.lock"
    left = json.loads(path.read_text())
    assert left["process"] == process.pid
    # The number may be in use again: here it is that of a process which is alive.
    path.write_text(json.dumps(left | {"process": os.getppid()}))
    with lock.hold(tmp_path / "run"):
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert not path.exists()


def test_another_hosts_lock_counts_while_somebody_touches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "PATIENCE", 0.6)
    path, ended = tmp_path / "train.lock", threading.Event()
    path.write_text(json.dumps({"process": 5, "host": "elsewhere", "since": "2026-01-01"}))

    def touch():
        while not ended.wait(0.1):
            os.utime(path)

    toucher = threading.Thread(target=touch, daemon=True)
    toucher.start()
    assert_refused(tmp_path, "held by process 5 on elsewhere, since 2026-01-01")
    ended.set()
    toucher.join()
    assert json.loads(path.read_text())["process"] == 5
    with lock.hold(tmp_path):
        first = path.stat().st_mtime_ns
        time.sleep(0.3)
        assert path.stat().st_mtime_ns > first  # it beats


@pytest.mark.parametrize("text", ["", "[1]", '{"process": 3}'])
def test_a_lock_file_is_read_once_it_is_whole(tmp_path, text):
    path = tmp_path / "train.lock"
    path.write_text(text)
    with lock.hold(tmp_path):  # an unreadable file holds nobody up
        whole = path.read_text()
        path.write_text(text)
        if text == "":  # a holder that has just begun
            threading.Timer(0.2, path.write_text, [whole]).start()
        number = {"": os.getpid(), "[1]": r"\?"}.get(text, 3)
        assert_refused(tmp_path, rf"is held by process {number} .*\(.*train\.lock\)")
