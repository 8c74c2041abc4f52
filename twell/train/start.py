"""How a training starts: in a folder that is free, in one process at a time."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, broadcast_object_list

from twell import results
from twell.config import TrainConfig
from twell.train.bar import TrainingBar
from twell.train.checkpoint import Checkpoints
from twell.train.loop import Run


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    quiet: bool = False,
    bar: TrainingBar | None = None,
) -> Path:
    """Train a model and leave the run in `folder`.

    Args:
        overwrite: replace a run: its files are deleted by their names, all others stay.
        resume: go on from the run's checkpoint (from the beginning where it has none yet), exactly
            as if it had not stopped. A complete run only loses left-over checkpoints.
        quiet: print nothing.
        bar: shows steps in place of their lines.

    After Ctrl-C or SIGTERM it trains on to the next row of the log, writes a checkpoint and stops;
    a second Ctrl-C ends it at once. Raises FileNotFoundError where there is no run to resume.
    Raises FileExistsError when the folder holds something else, another process trains in it, or it
    holds a run and neither `resume` nor `overwrite` is set. Raises ValueError for a run of another
    configuration or with damaged checkpoints, and MemoryError for weights that do not fit this
    machine.
    """
    folder = Path(folder)
    _check_memory(config)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        # By default Accelerate would gather all layers at once, until the backward pass is over.
        os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    # The buffers are constant. We use our own autocast: Accelerate fixes its own per process.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp])
    main = accelerator.is_main_process
    with contextlib.ExitStack() as stack:
        refusal = None
        if main:
            try:
                stack.enter_context(hold(folder))
                _check_folder(config, folder, overwrite, resume)
            except (OSError, ValueError) as error:
                refusal = error
        (refusal,) = broadcast_object_list([refusal])  # every process raises it
        if refusal is not None:
            raise refusal
        path = folder / "config.yaml"
        complete = resume and results.load_provenance(folder).get("complete")
        # A process that was killed at its start may have left no config.yaml.
        if resume and (complete or path.is_file() or Checkpoints(folder).paths()):
            if changes := config.changes(TrainConfig.load(path)):
                raise ValueError(f"{folder} holds a run of another configuration: {changes}")
        if complete:
            if main:  # the process may have been killed while it removed these
                results.remove_unfinished(folder)
                Checkpoints(folder).remove()
            return folder
        sharded = accelerator.distributed_type == DistributedType.FSDP
        check_shares(config, accelerator.num_processes, sharded)
        bar = bar or TrainingBar(shown=False)
        bar.phase("preparing the text")
        return Run(config, folder, accelerator, quiet, resume).train(bar)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder: the file `train.lock`, whose text names the process.

    The operating system releases the lock when a process ends, so the file of a killed process
    stops nobody. Makes the folder if needed, and removes it again if it stays empty. Raises
    FileExistsError when the folder is a file or another process, by name, holds it.
    """
    new, path = not folder.is_dir(), folder / results.LOCK
    lock = filelock.FileLock(path, blocking=False)
    try:
        lock.acquire()  # makes the folder
    except filelock.Timeout:
        holder = path.read_text().strip() or "another process"  # it may have just begun
        raise FileExistsError(f"{folder} is held by {holder} ({path})") from None
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


def _check_folder(config: TrainConfig, folder: Path, overwrite: bool, resume: bool) -> None:
    """Refuse options and a folder that do not suit each other."""
    if resume and overwrite:
        raise ValueError("--resume goes on with a run and --overwrite deletes it; give one of them")
    teacher = Path(config.teacher or "")
    if config.teacher and teacher.exists() and teacher.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the teacher {teacher} is in {folder}; give the run another folder")
    names = {path.name for path in folder.glob("[!.]*")} - {results.LOCK}
    is_run = "provenance.json" in names  # which is written first
    if names and not is_run:
        files = "config.yaml, provenance.json and log.csv"
        raise FileExistsError(f"{folder} is not empty, and no run, which has {files}")
    if resume and not is_run:
        raise FileNotFoundError(f"{folder} holds no run to resume: start it without --resume")
    if is_run and not (resume or overwrite):
        choice = "choose another folder, --resume or --overwrite it"
        raise FileExistsError(f"{folder} already holds a run; {choice}")


def _check_memory(config: TrainConfig) -> None:
    """Refuse weights that exceed this machine's memory: allocating them can halt it."""
    projections = (3 if config.gated else 2) * config.intermediate_size + 4 * config.hidden_size
    weights = config.hidden_size * (config.vocab_size + config.num_layers * projections)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * weights > memory:
        raise MemoryError(f"{weights:.3g} weights in fp32, and {memory / 2**30:.3g} GiB of memory")


def check_shares(config: TrainConfig, processes: int, sharded: bool) -> None:
    """Refuse a step that leaves a process without text, or sharded processes waiting forever."""
    sequences = config.batch_tokens // config.context
    step = f"a step of batch_tokens {config.batch_tokens} has {sequences} sequences"
    if sequences < processes:
        raise ValueError(f"{step}, and there are {processes} processes; each needs at least one")
    least, most = sequences // processes, math.ceil(sequences / processes)
    micro = config.micro_batch or most
    if sharded and math.ceil(least / micro) != math.ceil(most / micro):
        raise ValueError(
            f"{step} for {processes} processes: with micro_batch {micro} some have one more pass, "
            "which FSDP does not allow; batch_tokens has to be a multiple of context x processes"
        )
