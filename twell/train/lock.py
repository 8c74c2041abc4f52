"""One process at a time trains in a run's folder.

The operating system locks the file `train.lock` in the folder, and releases it when the process
ends. A file that a killed process left behind therefore stops nobody. Its text names the process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock

from twell.results import LOCK


@contextlib.contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a run's folder.

    Makes the folder if needed, and removes it again if it stays empty. Raises FileExistsError,
    naming the process, when another one holds it.
    """
    folder = Path(folder)
    new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        holder = path.read_text().strip() or "another process"  # it may have just begun
        raise FileExistsError(
            f"{folder} is held by {holder} ({path}): wait for it, or choose another folder"
        ) from None
    try:
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # not empty: it holds a run
                folder.rmdir()
