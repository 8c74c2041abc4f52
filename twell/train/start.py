"""How a training starts: in a folder that is free, by one process at a time, with a fit step."""

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

FIT_NEEDS = 4  # tokens for each neuron


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
            as if it had not stopped; of a complete run only left-over checkpoints are removed.
        quiet: print nothing.

    Ctrl-C ends the training after the current step, with a checkpoint; a second one ends it at
    once. Raises FileNotFoundError where there is no run to resume. Raises FileExistsError when the
    folder holds something else, another process trains in it, or it holds a run and neither
    `resume` nor `overwrite` is set. Raises ValueError for a run of another configuration or with
    damaged checkpoints, and MemoryError for weights that do not fit this machine.
    """
    folder = Path(folder)
    _check_options(config, folder, overwrite, resume)
    _check_samples(config)
    _check_memory(config)
    if wrap_layers() and not quiet:
        print("no --fsdp_auto_wrap_policy is given: FSDP takes TRANSFORMER_BASED_WRAP", flush=True)
    # The buffers are constant. autocast is ours: Accelerate's cannot change within a process.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp])
    with contextlib.ExitStack() as stack:
        refusal = None
        if accelerator.is_main_process:
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
        if resume and (folder / "config.yaml").is_file():
            config = _as_begun(config, folder, quiet or not accelerator.is_main_process)
        if resume and results.load_provenance(folder).get("complete"):
            if accelerator.is_main_process:  # a kill may have come just before the end of this
                results.remove_unfinished(folder)
                Checkpoints(folder).remove()
            return folder
        sharded = accelerator.distributed_type == DistributedType.FSDP
        check_shares(config, accelerator.num_processes, sharded)
        return Run(config, folder, accelerator, quiet, resume).train()


def _as_begun(config: TrainConfig, folder: Path, quiet: bool) -> TrainConfig:
    """Return the configuration without what the version that began the run did not know.

    Raises ValueError for another one than the run's.
    """
    before = vars(TrainConfig.load(folder / "config.yaml"))
    written = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
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
    Returns whether this process is to say so.
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
    """Refuse what no run in the folder could do."""
    if resume and overwrite:
        raise ValueError("--resume goes on with a run and --overwrite deletes it; give one of them")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        kind = "a file" if folder.exists() else "a link to nothing"
        raise FileExistsError(f"{folder} is {kind}; a run is a folder")
    if config.fit_tokens and not config.teacher:
        raise ValueError(
            f"fit_tokens is {config.fit_tokens}; only `twell relufy` has a teacher to be fitted to"
        )
    if config.hidden_weight and not config.teacher:
        raise ValueError(
            f"hidden_weight is {config.hidden_weight}; only `twell relufy` has a teacher, whose "
            "hidden states are to be met"
        )
    if 0 < config.fit_tokens < (least := FIT_NEEDS * config.intermediate_size):
        raise ValueError(
            f"fit_tokens is {config.fit_tokens}; fewer than {least}, {FIT_NEEDS} for each neuron "
            "of a layer, may do harm; raise it, or set it to 0 for no fit"
        )
    teacher = Path(config.teacher or "")
    if config.teacher and teacher.exists() and teacher.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the teacher {teacher} is in {folder}; give the run another folder")


def _check_samples(config: TrainConfig) -> None:
    """Refuse a share of the text that nothing wrote, or that a stream cannot mix."""
    given = f"sampled_share is {config.sampled_share}, and samples {config.samples!r}"
    if bool(config.sampled_share) != (config.samples is not None):
        raise ValueError(f"{given}; only `twell relufy` has a teacher, which writes them")
    if config.sampled_chat and not config.teacher:
        raise ValueError(
            "sampled_chat is true; only `twell relufy` has a teacher, which writes text"
        )
    if config.samples and config.source.startswith("hf:"):
        raise ValueError(f"{given}; of a stream, such as {config.source}, no share is sampled")


def _check_state(folder: Path, state: str, resume: bool, overwrite: bool) -> None:
    """Refuse a folder whose `results.run_state` does not suit the options."""
    if state == "else":
        missing = ", ".join(results.missing_of_run(folder))
        remedy = "put back a copy of it" if resume else "choose another folder"
        raise FileExistsError(
            f"{folder} is no run (it has no {missing}), so it is left alone: {remedy}"
        )
    if state == "nothing" and resume:
        raise FileNotFoundError(f"{folder} holds no run to resume: start it without --resume")
    if state != "nothing" and not (resume or overwrite):
        raise FileExistsError(
            f"{folder} already holds a run; choose another folder, --resume or --overwrite it"
        )


def _check_memory(config: TrainConfig) -> None:
    """Refuse a model whose weights exceed this machine's memory: building it halts the machine."""
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
            f"{step}, and with micro_batch {micro} some of them have one forward pass more, "
            "which FSDP does not allow; make batch_tokens a multiple of context times processes"
        )
