"""One process at a time trains in a folder, and a lock that was left behind holds nobody up."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from twell import results
from twell.train import lock

HOLDING = """import sys
from twell.train import lock
with lock.hold(sys.argv[1]):
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the folder `run` until its input ends."""
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(results.root())}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout.readline() == b"\n"
        yield process


def test_one_process_wins_and_the_other_says_which(tmp_path, holder):
    name = f"process {holder.pid} on {socket.gethostname()}"
    message = rf"run is held by {name}, since 20.*train\.lock\): wait for it"
    for _ in range(2):
        with pytest.raises(FileExistsError, match=message), lock.hold(tmp_path / "run"):
            pass
    holder.communicate()
    assert not (tmp_path / "run").exists()  # nothing was left in it
    with lock.hold(tmp_path / "run"):
        assert (tmp_path / "run" / "train.lock").is_file()


def test_a_killed_process_holds_nothing(tmp_path, holder):
    holder.kill()
    holder.wait()
    left = json.loads((tmp_path / "run" / "train.lock").read_text())
    assert left["process"] == holder.pid
    # The number may be in use again: here it is that of a process which is alive.
    (tmp_path / "run" / "train.lock").write_text(json.dumps(left | {"process": os.getppid()}))
    with lock.hold(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "train.lock").read_text())["process"] == os.getpid()
    assert not (tmp_path / "run" / "train.lock").exists()


def test_of_another_host_counts_what_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "PATIENCE", 0.6)
    path = tmp_path / "train.lock"
    path.write_text(json.dumps({"process": 5, "host": "elsewhere", "since": "2026-01-01"}))
    ended = threading.Event()
    heart = threading.Thread(target=lock._beat, args=(path, ended))
    heart.start()
    with pytest.raises(FileExistsError, match="held by process 5 on elsewhere, since 2026-01-01"):
        with lock.hold(tmp_path):
            pass
    ended.set()
    heart.join()
    assert json.loads(path.read_text())["process"] == 5
    with lock.hold(tmp_path):
        first = path.stat().st_mtime_ns
        time.sleep(0.3)
        assert path.stat().st_mtime_ns > first  # it beats


def test_a_holder_that_has_just_begun_is_named(tmp_path):
    with lock.hold(tmp_path):
        path = tmp_path / "train.lock"
        text = path.read_text()
        path.write_text("")
        threading.Timer(0.2, path.write_text, [text]).start()
        with (
            pytest.raises(FileExistsError, match=f"held by process {os.getpid()}"),
            lock.hold(tmp_path),
        ):
            pass


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"process": 3}'])
def test_an_unreadable_lock_file_holds_nobody_up(tmp_path, text):
    (tmp_path / "train.lock").write_text(text)
    with lock.hold(tmp_path):
        with (
            pytest.raises(FileExistsError, match=f"held by process {os.getpid()}"),
            lock.hold(tmp_path),
        ):
            pass
        (tmp_path / "train.lock").write_text(text)
        with pytest.raises(FileExistsError, match=r"is held by .*process .*\(.*train\.lock\)"):
            with lock.hold(tmp_path):
                pass
