"""How a training starts: in a folder that is free, in one process at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from pathlib import Path

import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, broadcast_object_list

from twell import results
from twell.config import TrainConfig
from twell.train import lock
from twell.train.checkpoint import Checkpoints
from twell.train.loop import Run


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    quiet: bool = False,
) -> Path:
    """Train a model and leave the run in `folder`.

    Args:
        overwrite: replace a run: its files are deleted by their names, all others stay.
        resume: go on from the run's checkpoint (from the beginning where it has none yet), exactly
            as if it had not stopped. A complete run only loses left-over checkpoints.
        quiet: print nothing.

    Ctrl-C ends the training after the current step, with a checkpoint; a second one ends it at
    once. Raises FileNotFoundError where there is no run to resume. Raises FileExistsError when the
    folder holds something else, another process trains in it, or it holds a run and neither
    `resume` nor `overwrite` is set. Raises ValueError for a run of another configuration or with
    damaged checkpoints, and MemoryError for weights that do not fit this machine.
    """
    folder = Path(folder)
    _check_options(config, folder, overwrite, resume)
    _check_memory(config)
    if wrap_layers() and not quiet:
        print("no --fsdp_auto_wrap_policy is given: FSDP takes TRANSFORMER_BASED_WRAP", flush=True)
    # The buffers are constant. We use our own autocast: Accelerate fixes its own per process.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp])
    main = accelerator.is_main_process
    with contextlib.ExitStack() as stack:
        refusal = None
        if main:
            try:
                stack.enter_context(lock.hold(folder))
            except OSError as error:
                refusal = error
        (refusal,) = broadcast_object_list([refusal])  # every process raises it
        if refusal is not None:
            raise refusal
        state = results.run_state(folder)
        accelerator.wait_for_everyone()  # every process looks before the first one writes
        _check_state(folder, state, resume, overwrite)
        if resume:
            config = _as_begun(config, folder, quiet or not main)
        if resume and results.load_provenance(folder).get("complete"):
            if main:  # the process may have been killed while it removed these
                results.remove_unfinished(folder)
                Checkpoints(folder).remove()
            return folder
        sharded = accelerator.distributed_type == DistributedType.FSDP
        check_shares(config, accelerator.num_processes, sharded)
        return Run(config, folder, accelerator, quiet, resume).train()


def _as_begun(config: TrainConfig, folder: Path, quiet: bool) -> TrainConfig:
    """Reset the fields that the version that began the run did not have.

    Raises ValueError for another configuration than the run's.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return config
    before = vars(TrainConfig.load(path))
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    later = {name: value for name, value in before.items() if name not in written}
    unused = ", ".join(name for name in later if vars(config)[name] != later[name])
    if unused and not quiet:
        print(f"{folder} was begun by a version without {unused}; it goes on so", flush=True)
    config = dataclasses.replace(config, **later)
    if changes := config.changes(before):
        raise ValueError(f"{folder} holds a run of another configuration: {changes}")
    return config


def wrap_layers() -> bool:
    """Let FSDP gather one decoder layer at a time where the launcher got no wrap policy.

    Accelerate would gather all layers at once and keep them until the backward pass is over.
    Returns True on the rank that prints this.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return False
    if "FSDP_AUTO_WRAP_POLICY" in os.environ:
        return False
    os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    return os.environ.get("RANK", "0") == "0"


def check_folder(
    config: TrainConfig, folder: Path, *, overwrite: bool = False, resume: bool = False
) -> None:
    """Refuse options and a folder that do not suit each other, as `train` does."""
    _check_options(config, folder, overwrite, resume)
    _check_state(folder, results.run_state(folder), resume, overwrite)


def _check_options(config: TrainConfig, folder: Path, overwrite: bool, resume: bool) -> None:
    """Refuse options that no folder of a run suits."""
    if resume and overwrite:
        raise ValueError("--resume goes on with a run and --overwrite deletes it; give one of them")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        kind = "a file" if folder.exists() else "a link to nothing"
        raise FileExistsError(f"{folder} is {kind}; a run is a folder")
    teacher = Path(config.teacher or "")
    if config.teacher and teacher.exists() and teacher.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the teacher {teacher} is in {folder}; give the run another folder")


def _check_state(folder: Path, state: str, resume: bool, overwrite: bool) -> None:
    """Refuse a folder whose `results.run_state` does not suit the options."""
    if state == "else":
        missing = ", ".join(results.missing_of_run(folder))
        raise FileExistsError(
            f"{folder} is no run (it has no {missing}), so it is left alone: put back a copy of "
            "these files, or choose another folder"
        )
    if state == "nothing" and resume:
        raise FileNotFoundError(f"{folder} holds no run to resume: start it without --resume")
    if state != "nothing" and not (resume or overwrite):
        raise FileExistsError(
            f"{folder} already holds a run; choose another folder, --resume or --overwrite it"
        )


def _check_memory(config: TrainConfig) -> None:
    """Refuse weights that exceed this machine's memory: allocating them can halt it."""
    projections = (3 if config.gated else 2) * config.intermediate_size + 4 * config.hidden_size
    weights = config.hidden_size * (config.vocab_size + config.num_layers * projections)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * weights > memory:
        raise MemoryError(
            f"{weights:.3g} weights in fp32 need {4 * weights / 2**30:.3g} GiB, "
            f"and this machine has {memory / 2**30:.3g} GiB"
        )


def check_shares(config: TrainConfig, processes: int, sharded: bool) -> None:
    """Refuse a step that leaves a process without text, or sharded processes waiting forever."""
    sequences = config.batch_tokens // config.context
    sizes = f"batch_tokens {config.batch_tokens}, context {config.context}"
    step = f"a step has {sequences} sequences ({sizes}) for {processes} processes"
    if sequences < processes:
        raise ValueError(f"{step}; each needs at least one")
    least, most = sequences // processes, math.ceil(sequences / processes)
    micro = config.micro_batch or most
    if sharded and math.ceil(least / micro) != math.ceil(most / micro):
        raise ValueError(
            f"{step}: with micro_batch {micro} some have one more forward pass, which FSDP does "
            "not allow; make batch_tokens a multiple of context times processes"
        )
