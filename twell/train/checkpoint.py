"""The last two checkpoints of a run. When one is damaged, the run goes on from the other.

Each process writes its share of weights and optimiser into the folder `checkpoint-STEP`, by
`torch.distributed.checkpoint`. The main process writes `state.pt` last: a folder without it is
unfinished. `state.pt` is the zip file of `torch.save` followed by its SHA-256, since the checksums
in a zip file do not cover its directory. It has the SHA-256 of the other files and of the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from twell import results

STATE, TENSORS = "state.pt", (".metadata", "__*_*.distcp")


class Checkpoints:
    """The checkpoints in a run's folder. Only the main process writes `state.pt` and deletes."""

    def __init__(self, folder: Path, *, main: bool = True):
        self.folder, self.log, self.main = folder, folder / "log.csv", main
        self.good: Path | None = None  # the newest whole one

    def paths(self) -> list[Path]:
        """Return the folders of checkpoints, newest first, unfinished ones too."""
        folders = sorted(self.folder.glob("checkpoint-" + "[0-9]" * 8), reverse=True)
        return list(filter(Path.is_dir, folders))

    def exist(self) -> bool:
        return any((path / STATE).is_file() for path in self.paths())

    def write(self, state: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the newest checkpoint, all processes together. At every moment one is whole."""
        folder = self.folder / f"checkpoint-{state['step']:08d}"
        if self.main:
            self.remove(but=self.good)
        _transfer(dcp.save, _tensors(model, optimizer), folder, "written")
        if self.main:
            with open(self.log, "rb+") as log:
                os.fsync(log.fileno())  # a checkpoint must not outlive the rows that it counts
            paths = [path for pattern in TENSORS for path in folder.glob(pattern)]
            state = state | {
                "log": self.log.stat().st_size,
                "log_sha256": results.file_hash(self.log),
                "files": {path.name: results.file_hash(path) for path in paths},
            }
            buffer = io.BytesIO()
            torch.save(state, buffer)
            packed = buffer.getvalue()
            results.write_atomically(folder / STATE, packed + _seal(packed))
        self.good = folder

    def read(self, say: Callable[[str], None]) -> dict:
        """Return the state of the newest whole checkpoint with a whole log.

        `say` reports a damaged one. Raises ValueError, naming each damaged file, when none is
        whole.
        """
        problems = []
        for path in self.paths():
            if not (path / STATE).is_file():
                continue
            try:
                state = read(path)
                if state.get("row"):
                    raise ValueError(f"{path} is of an older version, between two rows of the log")
                rows = self.log.read_bytes()[: state["log"]] if self.log.is_file() else b""
                if hashlib.sha256(rows).hexdigest() != state["log_sha256"]:
                    raise ValueError(f"{self.log} is damaged: it has changed since the checkpoint")
            except ValueError as error:
                problems.append(str(error))
                continue
            if problems:
                say(f"{problems[0]}: going on from {path}, step {state['step']}")
            self.good = path
            return state
        remedy = "put back a copy, or start again with --overwrite"
        raise ValueError(f"{'; '.join(problems)}: the run cannot be resumed; {remedy}")

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the weights and the optimiser of the checkpoint whose state `read` returned."""
        tensors = _tensors(model, optimizer)
        _transfer(dcp.load, tensors, self.good, "read")
        weights, moments = tensors["model"], tensors["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    def remove(self, but: Path | None = None) -> None:
        """Delete the checkpoints by the names of their files, `but` one."""
        for path in self.paths():
            if path != but:
                (path / STATE).unlink(missing_ok=True)  # first: the rest is no checkpoint then
                for pattern in (*TENSORS, ".metadata.tmp", f".{STATE}.*{results.UNFINISHED}"):
                    for file in path.glob(pattern):
                        file.unlink()
                with contextlib.suppress(OSError):  # it has files of somebody else
                    path.rmdir()


def read(path: Path) -> dict:
    """Read a checkpoint's state. Raises ValueError, naming the file, when one is damaged."""
    file = path / STATE
    data, size = file.read_bytes(), len(_seal(b""))
    if data[-size:] != _seal(data[:-size]):
        raise ValueError(f"{file} is damaged or cut short")
    state = torch.load(io.BytesIO(data[:-size]), map_location="cpu", weights_only=True)
    for name, expected in state["files"].items():
        if not (path / name).is_file() or results.file_hash(path / name) != expected:
            raise ValueError(f"{path / name} is damaged or missing")
    return state


def _seal(data: bytes) -> bytes:
    return b"\nsha256 " + hashlib.sha256(data).hexdigest().encode()


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _transfer(transfer: Callable, tensors: dict, folder: Path, verb: str) -> None:
    """Save or load with all processes. DCP warns where there is only one."""
    try:
        with warnings.catch_warnings(action="ignore"):
            transfer(tensors, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:  # a BaseException
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, KeyboardInterrupt):
            raise failure from None
        # torch hides that a disk is full.
        free = shutil.disk_usage(folder.parent).free
        raise OSError(f"{folder} could not be {verb}: {failure} ({free} bytes are free)") from None
