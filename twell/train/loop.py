"""A run, from its first step or its checkpoint to its last.

`results.py` lists the files of a run's folder. A run that was killed at any moment resumes from its
checkpoint as if it had not stopped.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import datetime
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule,
)

from twell import results
from twell.config import TrainConfig, l1_schedule
from twell.models import SparseLlamaForCausalLM, save, silence
from twell.sparse.observe import summarize_activity
from twell.sparse.training import SparseTraining
from twell.train.bar import TrainingBar
from twell.train.checkpoint import GATHERED, Checkpoints
from twell.train.dead import DeadWindow, balance, reinitialize
from twell.train.relufy import Student
from twell.train.steer import Steering
from twell.train.text import check_inputs, evaluate, teacher_hash, text_hashes

NOTICE = b"\nstopping at the next row of the log, or at the end; Ctrl-C again stops at once\n"
SIGNALS = signal.SIGINT, signal.SIGTERM


def build_model(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> SparseLlamaForCausalLM | Student:
    """Return a model with random weights, the same on every backend, or a teacher's student."""
    if config.teacher is not None:
        return Student(config, device)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    # The kernels' layout of the weights would draw them in another order.
    dense = dataclasses.replace(config, backend="dense")
    model = SparseLlamaForCausalLM(dense.model_config(**ends))
    model.set_ffn_backend(config.backend)
    return model


def prepare_layers(
    model: SparseLlamaForCausalLM | Student, config: TrainConfig, sparse: SparseTraining
) -> None:
    """Compile the decoder layers, or recompute them in backward passes, as `config` says."""
    if config.compile:
        if sparse.active:
            sparse.allow_recompiling()
        torch._dynamo.config.optimize_ddp = False  # it would split the compiled layers into buckets
        if isinstance(model, Student):
            model.compile_teacher()
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    if config.checkpoint_activations:
        # Around compiled layers: within one, the layer could not keep its L1 term.
        for layer in model.model.layers:
            call = layer._compiled_call_impl or layer._call_impl
            layer._compiled_call_impl = functools.partial(checkpoint, call, use_reentrant=False)
    if config.hidden_weight:
        model.watch_layers()


def adamw(
    model: torch.nn.Module,
    config: TrainConfig,
    device: torch.device,
    learning_rate: float | None = None,
) -> torch.optim.AdamW:
    """Return AdamW by `config` for a model that trains on `device`.

    Matrices decay; vectors (the norms' gains, biases) do not, as usual for transformers.
    learning_rate: None takes the configuration's.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate if learning_rate is None else learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda" or None,  # one pass over weights and moments
    )


def activity_columns(layers: list[dict]) -> dict[str, list[float]]:
    """Return the per-layer metrics of a log from the results of `summarize_activity`."""
    return {f"active_{key}": [layer[key] for layer in layers] for key in ("mean", "p99", "max")}


@contextlib.contextmanager
def noted_signals(loud: bool) -> Iterator[list[int]]:
    """Give the list of a training's signals: Ctrl-C, and SIGTERM of a scheduler.

    A second Ctrl-C interrupts at once. A second SIGTERM does not: launchers send it again to
    processes that have it already.
    """
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        if loud and not noted:
            os.write(2, NOTICE)  # print is not reentrant
        noted.append(number)

    in_main = threading.current_thread() is threading.main_thread()  # others get no signals
    before = {number: signal.signal(number, note) for number in SIGNALS if in_main}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python, so it cannot be restored
                signal.signal(number, handler)


class Run:
    """A training in one process: `train` is its course, `step` one optimiser step."""

    def __init__(
        self, config: TrainConfig, folder: Path, accelerator: Accelerator, quiet: bool, resume: bool
    ):
        self.config, self.folder, self.accelerator, self.quiet = config, folder, accelerator, quiet
        self.log = folder / "log.csv"
        self.main, self.device = accelerator.is_main_process, accelerator.device
        self.world, self.rank = accelerator.num_processes, accelerator.process_index
        set_seed(config.seed)
        with accelerator.main_process_first():
            text = config.prepare_text(self.rank, self.world)
        self.tokenizer, self.blocks, self.valid_blocks = text
        self.inputs = {"text_sha256": text_hashes(self.blocks, self.valid_blocks)}
        if config.teacher:
            self.inputs["teacher_sha256"] = teacher_hash(config.teacher)

        self.model = build_model(config, self.tokenizer, self.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.checkpoints = Checkpoints(folder, main=self.main)
        self.resume = resume
        path = "union" if config.precision == "bf16" else None  # the kernels take 16-bit inputs
        self.sparse = SparseTraining(self.model, path=path)
        prepare_layers(self.model, config, self.sparse)
        if accelerator.distributed_type == DistributedType.FSDP:  # refuses unusual strides
            for parameter in self.model.parameters():
                parameter.data = parameter.data.contiguous()
        optimizer = adamw(self.model, config, self.device)
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.schedule = self.make_schedule(config.steps)
        self.window = DeadWindow(config.dead_window_tokens)
        self.steering = Steering(config, self.model)

        taught = ["kl"] * bool(config.teacher) + ["hidden"] * bool(config.hidden_weight)
        self.losses = ["loss", "cross_entropy", "l1", *taught]
        # Since the last row: sums of the losses and the gradient norm.
        self.sums = torch.zeros(len(self.losses) + 1, device=self.device)
        self.active = 0.0  # mean active neurons a token and layer, in the last row

    def train(self, bar: TrainingBar) -> Path:
        """Train from the beginning or from the last checkpoint; return the run's folder."""
        config, size = self.config, None
        self.bar, self.done = bar, 0
        if self.resume and self.checkpoints.paths():
            check_inputs(self.folder, self.inputs)
            self.done, size = self.load_checkpoint()
        elif self.resume and (older := [*self.folder.glob("checkpoint-*/state.pt")]):
            raise ValueError(f"{older[0].parent} is of an older version: delete it, and start again")
        elif self.resume:
            self.say(f"{self.folder} has no checkpoint yet: it starts from the beginning")
        if self.main:
            self.open_folder(size)

        with noted_signals(self.main and not self.quiet) as signals:
            if not self.done:
                self.validate(0)
            self.restart_meters()
            for step in range(self.done + 1, config.steps + 1):
                if step - 1 in config.decays:
                    self.decay(step - 1, config.decays[step - 1], signals)
                last = step == config.steps
                self.sums += self.step(step)
                bar.step(step, config.steps, self.describe)
                if last or step % config.log_every == 0:
                    self.record(step)
                if last or step % config.valid_every == 0:
                    self.validate(step)
                self.steering.after(step, self.active)
                if not last:
                    self.keep(step, signals)
            return self.finish()

    def open_folder(self, log_size: int | None) -> None:
        starts = results.load_provenance(self.folder)["starts"] if self.resume else []
        origin = results.provenance()
        self.origin = origin | {
            "parameters": self.parameters,
            "complete": False,
            **self.inputs,
            "starts": [*starts, origin | {"step": self.done}],
        }
        if self.resume:
            results.remove_unfinished(self.folder)
        else:
            results.remove_run(self.folder)  # only now that all checks have passed
            self.checkpoints.remove()
        results.write_run(self.folder, dataclasses.asdict(self.config), self.origin)
        np.save(self.folder / results.VALID, self.valid_blocks.tokens)
        if log_size is None:
            self.log.write_text(",".join(results.LOG_COLUMNS) + "\n", encoding="utf-8")
        else:  # the rows after the checkpoint, whole or not, are written again
            os.truncate(self.log, log_size)
        where = f"from step {self.done} " if self.done else ""
        self.say(
            f"{self.folder}: {self.parameters / 1e6:.2f}M parameters, "
            f"{self.config.steps} steps {where}on {self.origin['device']}"
        )

    def make_schedule(self, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
        """Return the schedule of a run, or of a copy, with this many steps."""
        optimizer, warmup = self.optimizer.optimizer, self.config.warmup_steps
        if self.config.decay_at is None:
            return get_cosine_schedule_with_warmup(optimizer, warmup, steps)
        decay = steps - steps * 9 // 10
        return get_wsd_schedule(optimizer, warmup, decay, steps, decay_type="linear")

    def decay(self, start: int, end: int, signals: list[int]) -> None:
        """Decay from the checkpoint at `start`, save the model at `end`, and return to `start`.

        A run that is resumed from this checkpoint decays again.
        """
        schedule, self.schedule = self.schedule, self.make_schedule(end)
        self.return_to(start)
        for step in range(start + 1, end + 1):
            self.sums += self.step(step)
            self.bar.step(step, self.config.steps, self.describe)
            if step == end or step % self.config.log_every == 0:
                self.record(step, "train-decay")
                if self.any_process(signals):
                    raise self.interruption(start)
        self.validate(end, "valid-decay")
        self.write_model(f"model-at-{end * self.config.batch_tokens}")
        self.schedule = schedule
        self.return_to(start)

    def return_to(self, step: int) -> None:
        """Load the checkpoint of a step. Raises RuntimeError where an older one is the newest."""
        if (found := self.load_checkpoint()[0]) != step:
            raise RuntimeError(f"the checkpoint of step {step} is damaged; --resume from {found}")
        self.restart_meters()

    # --- a step

    def step(self, step: int) -> torch.Tensor:
        """Take one optimiser step; return [losses, gradient norm] of it, over all processes."""
        config = self.config
        warmed = l1_schedule(step, config.l1_zero_steps, config.l1_warmup_steps)
        sequences = config.batch_tokens // config.context
        totals = {
            "num_items_in_batch": sequences * (config.context - 1),
            "num_tokens_in_batch": config.batch_tokens,
            "l1_scale": warmed * self.steering.factor,
        }
        first = (step - 1) * sequences
        batches = self.draw(range(first + self.rank, first + sequences, self.world))
        self.wrapped.train()
        for _ in self.sparse.attempts():  # each has the same text
            self.optimizer.zero_grad()
            losses = self.accumulate(batches, totals)
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), config.max_grad_norm)
        self.learning_rate = self.optimizer.param_groups[0]["lr"]  # before the schedule advances
        self.optimizer.step()
        if config.balance_every and step % config.balance_every == 0:
            balance(self.model)
        self.schedule.step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return torch.cat([self.accelerator.reduce(losses), norm.detach().float().reshape(1)])

    def draw(self, share: range) -> list[torch.Tensor]:
        """Return these blocks as micro-batches on the device; no pass waits for text."""
        micro = self.config.micro_batch or len(share)
        starts = range(0, len(share), micro)
        drawn = [self.blocks.draw(share[start : start + micro]) for start in starts]
        if self.device.type == "cuda":
            drawn = [tokens.pin_memory() for tokens in drawn]
        return [tokens.to(self.device, non_blocking=True) for tokens in drawn]

    def accumulate(self, batches: list[torch.Tensor], totals: dict) -> torch.Tensor:
        """Accumulate the gradients of all micro-batches; return the sums of their losses."""
        sums = torch.zeros(len(self.losses), device=self.device)
        for number, tokens in enumerate(batches, 1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                with self.autocast():
                    output = self.wrapped(
                        input_ids=tokens, labels=tokens, use_cache=False, **totals
                    )
                self.accelerator.backward(output.loss * self.world)  # gradients are averaged
            sums += torch.stack([getattr(output, name).detach() for name in self.losses])
        return sums

    def autocast(self) -> torch.autocast:
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    # --- records

    def record(self, step: int, split: str = "train") -> None:
        """Write losses and activity since the last row, and at the end of a window dead neurons."""
        config, line = self.config, self.describe(step)
        steps = (step - 1) % config.log_every + 1  # since the last row
        tokens = steps * config.batch_tokens
        counts = self.accelerator.reduce([ffn.stats.take() for ffn in self.model.ffns])
        dead = self.window.add([neurons for neurons, _ in counts], tokens)
        *losses, norm = (self.sums / steps).tolist()
        self.sums.zero_()
        values = dict(zip(self.losses, losses, strict=True))
        self.check_finite("loss", values["loss"], step)
        speed = tokens / (time.perf_counter() - self.since)
        values |= {"lr": self.learning_rate, "grad_norm": norm, "tokens_per_second": speed}
        values |= activity_columns([summarize_activity(*pair) for pair in counts])
        if self.sparse.active:
            summary = self.sparse.summary()
            values |= {name: summary[name] for name in ("sparse_layers", "repeated_steps")}
        if self.device.type == "cuda":  # bytes, of one device, in these steps
            values["peak_memory"] = torch.cuda.max_memory_allocated()
        if dead is not None:  # at the end of a window
            values["dead_fraction"] = [float(layer.double().mean()) for layer in dead]
            if config.reinit:
                reinitialize(self.model, dead, config.reinit, [config.seed, self.window.number])
        self.active = sum(values["active_mean"]) / config.num_layers
        if config.active_share:
            values[self.steering.name] = self.steering.value
        self.write(step, split, values, line)

    def describe(self, step: int) -> str:
        """Return a line on the steps since the last row: in this process, with the time left."""
        steps, active = (step - 1) % self.config.log_every + 1, 0.0
        # The last sum is the gradient norm's.
        losses = dict(zip(self.losses, (self.sums / steps).tolist(), strict=False))
        for ffn in self.model.ffns:
            ffn.stats.counters = neurons, histogram = ffn.stats.take()  # which clears them
            active += float(neurons.sum() / histogram.sum()) / self.config.num_layers
        seconds = (time.perf_counter() - self.since) / steps
        left = datetime.timedelta(seconds=int(seconds * (self.config.steps - step)))
        kl = f"KL {losses['kl']:.4f}  " if "kl" in losses else ""
        speed = f"{self.config.batch_tokens / seconds:,.0f} tokens/s  {left} left"
        return f"loss {losses['cross_entropy']:.3f}  {kl}active {active:.1f}  {speed}"

    def validate(self, step: int, split: str = "valid") -> None:
        """Write the validation loss and activity, after the last step also the silenced loss."""
        self.bar.phase("validating")
        # Every process evaluates everything: with sharded weights each forward pass needs all.
        with self.autocast():
            result = evaluate(self.model, self.valid_blocks)
        layers = result.pop("layers")
        values = result | activity_columns(layers)
        values["dead_fraction"] = [layer["dead"] for layer in layers]
        self.check_finite("validation loss", values["cross_entropy"], step)
        if step == self.config.steps:
            with silence(self.model), self.autocast():
                silenced = evaluate(self.model, self.valid_blocks)
            values["cross_entropy_silenced"] = silenced["cross_entropy"]
            if missed := self.steering.missed(values["active_mean"]):
                self.say(f"{self.folder.name}  {missed}")
        kl = f"  KL {values['kl']:.4f}" if "kl" in values else ""
        self.write(step, split, values, f"validation {values['cross_entropy']:.3f}{kl}")

    def write(self, step: int, split: str, values: dict, line: str) -> None:
        """Append tidy rows, one a number or layer; say the line, and restart the meters."""
        rows, tokens = [], step * self.config.batch_tokens
        for metric, value in values.items():
            numbered = enumerate(value) if isinstance(value, list) else [("", value)]
            rows += [(step, tokens, split, layer, metric, f"{x:.6g}") for layer, x in numbered]
        if self.main:
            # Mode "a" would create a deleted log again, without its header.
            with results.naming(self.log), open(self.log, "r+", encoding="utf-8") as file:
                file.seek(0, os.SEEK_END)
                csv.writer(file, lineterminator="\n").writerows(rows)
        end = f"{self.config.steps}{'  decaying' if split.endswith('-decay') else ''}"
        if self.bar.disable or split.startswith("valid") or step == self.config.steps:
            self.say(f"{self.folder.name}  step {step}/{end}  {line}")
        self.restart_meters()

    def check_finite(self, name: str, loss: float, step: int) -> None:
        """Raise FloatingPointError for a run that diverged."""
        if not math.isfinite(loss):
            remedy = "lower learning_rate or l1_coefficient"
            raise FloatingPointError(f"the {name} is {loss} at step {step}; {remedy}")

    def restart_meters(self) -> None:
        """Measure speed and memory from now on: validations and checkpoints do not count."""
        self.since = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def say(self, line: str) -> None:
        if self.main and not self.quiet:
            print(line, flush=True)

    # --- stopping and resuming

    def keep(self, step: int, signals: list[int]) -> None:
        """Write a checkpoint where one is due. Raises KeyboardInterrupt after Ctrl-C, at a row."""
        config = self.config
        if step % config.log_every:  # between two rows, sums would be lost
            return
        stop = self.any_process(signals)
        due = config.checkpoint_every and step % config.checkpoint_every == 0
        if stop or due or step in config.decays:
            self.save_checkpoint(step)
            self.restart_meters()
        if stop:
            raise self.interruption(step)

    def any_process(self, signals: list[int]) -> bool:
        """Return whether a signal has reached any process; it may have reached some only."""
        return bool(self.accelerator.reduce(torch.tensor(float(len(signals)), device=self.device)))

    def interruption(self, step: int) -> KeyboardInterrupt:
        return KeyboardInterrupt(
            f"interrupted; {self.folder} has a checkpoint of step {step} of {self.config.steps}. "
            "To go on, give the same command with --resume, and without --overwrite"
        )

    def save_checkpoint(self, step: int) -> None:
        """Write a checkpoint: everything that the later steps and rows depend on."""
        state = {
            "step": step,  # and so the place in the text
            "schedule": self.schedule.state_dict(),
            "window": self.window.state(),
            "sparse": self.sparse.state(),
            "random": torch.get_rng_state(),
            "streams": gather_object([self.blocks.state()]),
            **self.steering.state(),
        }
        self.checkpoints.write(state, self.wrapped, self.optimizer.optimizer)
        self.accelerator.wait_for_everyone()  # the main process writes the file

    def load_checkpoint(self) -> tuple[int, int]:
        """Load the newest whole checkpoint; return its step and the log's size at that step."""
        state = self.checkpoints.read(self.say)
        if (processes := len(state["streams"])) != self.world:
            raise ValueError(
                f"{self.checkpoints.good} is of {processes} processes; resume with as many, "
                f"not {self.world}"
            )
        self.checkpoints.load(state, self.wrapped, self.optimizer.optimizer)
        self.schedule.load_state_dict(state["schedule"])
        self.window.restore(state["window"], self.device)
        self.sparse.restore(state["sparse"])
        self.steering.restore(state)
        self.blocks.restore(state["streams"][self.rank])
        torch.set_rng_state(state["random"])
        return state["step"], state["log"]

    def finish(self) -> Path:
        """Write the model, mark the run complete and remove its checkpoints."""
        self.write_model("model")
        if self.main:
            complete = self.origin | {"complete": True}
            results.write_run(self.folder, dataclasses.asdict(self.config), complete)
            self.checkpoints.remove()
        self.accelerator.wait_for_everyone()
        return self.folder

    def write_model(self, name: str) -> None:
        """Write the trained model; of a student and its teacher, the student."""
        model, weights = self.model, get_model_state_dict(self.wrapped, options=GATHERED)
        if not self.main:
            return
        if isinstance(model, Student):
            model = model.student
            weights = {name.removeprefix("student."): weight for name, weight in weights.items()}
        # A saved model is fp32, for which there are no kernels, whatever backend trained it.
        if hasattr(model.config, "ffn_backend"):
            model.config.ffn_backend = "dense"
        save(model, self.tokenizer, self.folder / name, state_dict=weights)
