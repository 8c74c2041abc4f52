"""Kill a training at random moments, resume it, and compare with one that ran through.

    python -m tests.kills --kills 50

Every weight and every logged number (but the clock's) then has to equal that of a training without
a kill. Prints one line a round and exits with status 1 at the first difference.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import typer
from safetensors.torch import load_file
from tqdm.std import TqdmDefaultWriteLock

from twell import results
from twell.config import TrainConfig
from twell.train import train
from twell.train.checkpoint import Checkpoints

SMALL = (
    "hidden_size=32 intermediate_size=96 num_layers=2 num_heads=2 vocab_size=512 context=32 "
    "batch_tokens=512 tokens=32768 valid_tokens=1024 valid_every=16 log_every=2 checkpoint_every=2 "
    "l1_coefficient=1e-2 l1_warmup_steps=20 reinit=0.1 dead_window_tokens=2048"
).split()
# All forks would share this lock, and one that is killed while it writes a bar would keep it.
TqdmDefaultWriteLock.mp_lock = None
FILES = {"config.yaml", "provenance.json", "log.csv", "valid.npy", "model"}


def start(config: TrainConfig, folder: Path) -> int:
    """Train in a forked process, which has everything imported already; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # a fork has no threads of a pool, and would wait for them
            train(config, folder, resume=(folder / "provenance.json").is_file(), quiet=True)
            os._exit(0)
        except BaseException as error:  # a forked process must never return into the test runner
            print(f"training failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def finish(config: TrainConfig, folder: Path) -> None:
    _, status = os.waitpid(start(config, folder), 0)
    if status:
        raise AssertionError(f"the training in {folder} ended with status {status}")


def differences(folder: Path, expected: Path) -> list[str]:
    """Return the names of what differs between two runs, clock aside."""
    files = [load_file(path / "model" / "model.safetensors") for path in (folder, expected)]
    names = [name for name, weight in files[1].items() if not torch.equal(files[0][name], weight)]
    logs = [
        results.load_run(path)[1].query("metric != 'tokens_per_second'").reset_index(drop=True)
        for path in (folder, expected)
    ]
    if not logs[0].equals(logs[1]):
        names.append("log.csv")
    left = {path.name for path in folder.iterdir() if not path.name.startswith("model-at-")}
    if left != FILES:
        names.append("left-over files")
    if not results.load_run(folder)[0]["complete"]:
        names.append("an incomplete run")
    return names


def kill_rounds(config: TrainConfig, folder: Path, kills: int, seed: int | None = None):
    """Yield (seconds until the kill, step of the checkpoint then or None) for each kill."""
    expected = folder / "expected"
    began = time.perf_counter()
    finish(config, expected)
    duration = time.perf_counter() - began
    moments, done = random.Random(seed), 0
    while done < kills:
        run, delay = folder / f"run-{done}", moments.uniform(0, duration)
        child = start(config, run)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            if status:
                raise AssertionError(f"the training in {run} ended with status {status}")
            shutil.rmtree(run)  # it was faster than the kill: once more
            duration *= 0.95
            continue
        checkpoints = Checkpoints(run)
        step = checkpoints.read(print)["step"] if checkpoints.paths() else None
        finish(config, run)
        if names := differences(run, expected):
            killed = f"killed after {delay:.2f} s (checkpoint of step {step}), resumed"
            raise AssertionError(f"{killed}, and different: {names}")
        done += 1
        yield delay, step


def main(kills: int = 50, seed: int | None = None) -> None:
    torch.set_num_threads(1)
    config = TrainConfig.load("quick", SMALL)
    config.prepare_text()
    with tempfile.TemporaryDirectory() as folder:
        rounds = kill_rounds(config, Path(folder), kills, seed)
        for number, (delay, step) in enumerate(rounds, 1):
            kill = f"kill {number}/{kills} after {delay:.2f} s"
            print(f"{kill}, checkpoint of step {step}: resumed exactly", flush=True)


if __name__ == "__main__":
    typer.run(main)
