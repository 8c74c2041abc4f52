"""The last two checkpoints of a run. When one is damaged, the run goes on from the other.

The main process writes a checkpoint by `torch.save`, with the weights and the optimiser gathered
from all processes, and the SHA-256 of the log. The file is called checkpoint-STEP-HASH.pt, where
HASH begins the file's own SHA-256. It gets this name when it is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from twell import results

DIGITS = 16  # of HASH
NAMES = f"checkpoint-{'[0-9]' * 8}-{'[0-9a-f]' * DIGITS}.pt"
PARTIAL = f".checkpoint{results.UNFINISHED}"
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on the main process


class Checkpoints:
    """The checkpoints in a run's folder. Only the main process writes and deletes."""

    def __init__(self, folder: Path, *, main: bool = True):
        self.folder, self.log, self.main = folder, folder / "log.csv", main
        self.good: Path | None = None  # the newest that this process read or wrote

    def paths(self) -> list[Path]:
        """Return the files of checkpoints, newest first."""
        return sorted(self.folder.glob(NAMES), reverse=True)

    def write(self, state: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the newest checkpoint, all processes together. At every moment one is whole."""
        weights, moments = get_state_dict(model, optimizer, options=GATHERED)
        if not self.main:
            return
        self.remove(but=self.good)
        with open(self.log, "rb+") as log:
            os.fsync(log.fileno())  # a checkpoint must not outlive the rows that it counts
        state = state | {
            "log": self.log.stat().st_size,
            "log_sha256": results.file_hash(self.log),
            "tensors": {"model_state_dict": weights, "optim_state_dict": moments},
        }
        unfinished = self.folder / PARTIAL
        with results.naming(unfinished), open(unfinished, "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        digits = results.file_hash(unfinished)[:DIGITS]
        name = f"checkpoint-{state['step']:08d}-{digits}.pt"
        self.good = unfinished.rename(self.folder / name)

    def read(self, say: Callable[[str], None]) -> dict:
        """Return the state of the newest whole checkpoint with a whole log.

        `say` reports a damaged one. Raises ValueError, naming each damaged file, when none is
        whole.
        """
        problems = []
        for path in self.paths():
            try:
                state = read(path)
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

    @staticmethod
    def load(state: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the weights and the optimiser of a state that `read` returned."""
        # It cuts whole tensors into shards, but first copies all of them to the GPU.
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        options = StateDictOptions(full_state_dict=sharded)
        set_state_dict(model, optimizer, **state["tensors"], options=options)

    def remove(self, but: Path | None = None) -> None:
        """Delete the checkpoints, `but` one."""
        for path in {*self.paths(), self.folder / PARTIAL} - {but}:
            path.unlink(missing_ok=True)


def read(path: Path) -> dict:
    """Read a checkpoint. Raises ValueError, naming the file, when it is damaged."""
    if not path.stem.endswith(results.file_hash(path)[:DIGITS]):
        raise ValueError(f"{path} is damaged or cut short")
    # Mapped: the processes of a machine share the memory.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
