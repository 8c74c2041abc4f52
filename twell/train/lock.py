"""One process at a time trains in a run's folder.

The operating system locks the file `train.lock` in the folder, and releases it when the process
ends. A file that a killed process left behind therefore stops nobody. The file names the process,
its host and the time, in JSON. The lock does not depend on its text.

Network file systems may not share locks between hosts. The holder therefore touches the file every
BEAT seconds. A file from another host stops a training if somebody touches it within PATIENCE
seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from twell.results import LOCK

BEAT, PATIENCE = 5.0, 20.0  # seconds


@contextlib.contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a run's folder.

    Makes the folder if needed, and removes it again if it stays empty. Raises FileExistsError,
    naming the process, when another one holds it.
    """
    folder = Path(folder)
    new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    path, lock = folder / LOCK, filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise _refusal(path) from None
    ended = threading.Event()
    try:
        if _beats_elsewhere(path):
            raise _refusal(path)
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        path.write_text(json.dumps(holder) + "\n")
        heart = threading.Thread(target=_beat, args=(path, ended), daemon=True)
        heart.start()
        try:
            yield
        finally:
            ended.set()
            heart.join()
            path.unlink(missing_ok=True)
    finally:
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # not empty: it holds a run
                folder.rmdir()


def _read(path: Path) -> dict:
    try:
        holder = json.loads(path.read_text())
        return holder if isinstance(holder, dict) else {}
    except (OSError, ValueError):  # half written
        return {}


def _refusal(path: Path) -> FileExistsError:
    for _ in range(20):  # a second: the holder may just have begun
        if holder := _read(path):
            break
        time.sleep(0.05)
    number, host, since = (holder.get(name, "?") for name in ("process", "host", "since"))
    return FileExistsError(
        f"{path.parent} is held by process {number} on {host}, since {since} ({path}): "
        "wait for it, or choose another folder"
    )


def _beats_elsewhere(path: Path) -> bool:
    """Return whether a process on another host touches the file."""
    here = socket.gethostname()
    if _read(path).get("host", here) == here:
        return False
    first, end = _touched(path), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(min(BEAT, PATIENCE) / 5)
        if _touched(path) != first:
            return True
    return False


def _touched(path: Path) -> int:
    with open(path, "rb") as file:  # network file systems look at a file anew when it is opened
        return os.fstat(file.fileno()).st_mtime_ns


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)
