"""The last two checkpoints of a run. When one is damaged, the run goes on from the other.

A checkpoint is the zip file that `torch.save` writes, and behind it the SHA-256 of this file.
Reading compares it first. (The zip file's own CRC-32 do not cover its directory: one changed bit
there gives other weights.) A checkpoint also has the run's configuration, and the size and the
SHA-256 of its log. The checkpoint before the last stays as `checkpoint-previous.pt`.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from twell import results

LAST, PREVIOUS = results.CHECKPOINTS
FIELDS = "step model optimizer schedule window sparse random streams log".split()


class Checkpoints:
    """The checkpoints in a run's folder; `log` is the file whose rows they count."""

    def __init__(self, folder: Path, log: Path):
        self.last, self.previous, self.log = folder / LAST, folder / PREVIOUS, log
        self.good: Path | None = None  # the newest whole one

    def exist(self) -> bool:
        return self.last.is_file() or self.previous.is_file()

    def write(self, state: dict) -> None:
        """Write the newest checkpoint. At every moment at least one is whole."""
        with open(self.log, "rb+") as log:
            os.fsync(log.fileno())  # a checkpoint must not outlive the rows that it counts
        state = state | {"log": self.log.stat().st_size, "log_sha256": results.file_hash(self.log)}
        buffer = io.BytesIO()
        torch.save(state | {"sealed": True}, buffer)
        buffer.write(_seal(hashlib.sha256(buffer.getbuffer())))
        if self.good == self.last:
            os.replace(self.last, self.previous)
            self.good = self.previous
        else:
            self.last.unlink(missing_ok=True)  # a damaged one
        results.write_atomically(self.last, buffer.getbuffer())
        self.good = self.last

    def read(self, say: Callable[[str], None]) -> dict:
        """Return the newest whole checkpoint with a whole log. `say` reports a damaged one.

        Raises ValueError, naming the files and what is wrong with each, when none is whole.
        """
        problems = []
        for path in (self.last, self.previous):
            if not path.is_file():
                continue
            try:
                state = read(path)
                check_log(self.log, state)
            except ValueError as error:
                problems.append(str(error))
                continue
            if problems:
                say(f"{problems[0]}: going on from {path}, step {state['step']}")
            self.good = path
            return state
        raise ValueError(
            f"{'; '.join(problems)}: the run cannot be resumed; "
            "put back a copy, or start again with --overwrite"
        )

    def remove(self) -> None:
        """Remove all checkpoints."""
        self.last.unlink(missing_ok=True)
        self.previous.unlink(missing_ok=True)


def read(path: Path) -> dict:
    """Read one checkpoint. Raises ValueError, naming the file, when it is damaged."""
    try:
        sealed = _is_sealed(path)
        part = None if sealed else _damaged_part(path)
        state = torch.load(path, map_location="cpu", weights_only=True) if part is None else None
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # zipfile and torch raise a dozen kinds
        raise ValueError(f"{path} is damaged or cut short ({type(error).__name__})") from None
    if part is not None:
        raise ValueError(f"{path} is damaged (the CRC-32 of {part} differs)")
    # Checkpoints of older versions have no SHA-256.
    if not sealed and isinstance(state, dict) and "sealed" in state:
        raise ValueError(f"{path} is damaged (its SHA-256 differs)")
    missing = [name for name in FIELDS if not isinstance(state, dict) or name not in state]
    if missing:
        raise ValueError(f"{path} is no checkpoint of a run: it has no {', '.join(missing)}")
    return state


def _damaged_part(path: Path) -> str | None:
    """Return the first part of a zip file whose CRC-32 differs, or None."""
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def _seal(digest: hashlib._Hash) -> bytes:
    """Return what stands behind a checkpoint with this SHA-256."""
    return b"\nsha256 " + digest.hexdigest().encode()


def _is_sealed(path: Path) -> bool:
    """Return whether a file ends with the SHA-256 of the bytes before it."""
    size = path.stat().st_size - len(_seal(hashlib.sha256()))
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0 and (part := file.read(min(size, 2**24))):
            digest.update(part)
            size -= len(part)
        return file.read() == _seal(digest)


def check_log(path: Path, state: dict) -> None:
    """Raise ValueError, naming the log, when its rows before a checkpoint have changed."""
    rows = path.read_bytes() if path.is_file() else b""
    size = state["log"]
    if len(rows) < size:
        raise ValueError(
            f"{path} is shorter than the checkpoint says ({len(rows)} of {size} bytes)"
        )
    expected = state.get("log_sha256")  # checkpoints of older versions have none
    if expected is not None and hashlib.sha256(rows[:size]).hexdigest() != expected:
        raise ValueError(
            f"{path} is damaged: its first {size} bytes have changed since the checkpoint"
        )
