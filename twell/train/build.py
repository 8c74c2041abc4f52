"""The parts of a run: model, compilation, optimiser, the rows of its log, and Ctrl-C."""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import signal
import threading
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerFast

from twell import results
from twell.config import TrainConfig
from twell.models import SparseLlamaForCausalLM, save
from twell.sparse.training import SparseTraining
from twell.train.relufy import Student

# Metrics of a log, and their names in the results of `summarize_activity`.
ACTIVITY = {
    "active_mean": "mean",
    "active_p99": "p99",
    "active_max": "max",
    "dead_fraction": "dead",
}
NOTICE = b"\nstopping at the next row of the log, or at the end; Ctrl-C again stops at once\n"
SIGNALS = signal.SIGINT, signal.SIGTERM


def build_model(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> SparseLlamaForCausalLM | Student:
    """Return a model with random weights, the same on every backend, or a teacher's student."""
    if config.teacher is not None:
        return Student.of(config, device)
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
    if config.checkpoint_activations and config.compile:
        # Around the compiled layers: within one, the layer could not keep its L1 term.
        for layer in model.model.layers:
            compiled = layer._compiled_call_impl
            layer._compiled_call_impl = functools.partial(checkpoint, compiled, use_reentrant=False)
    elif config.checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
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


def save_model(
    model: SparseLlamaForCausalLM | Student,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    weights: dict[str, torch.Tensor],
) -> None:
    """Write the trained model; of a student and its teacher, the student."""
    if isinstance(model, Student):
        model = model.student
        weights = {name.removeprefix("student."): weight for name, weight in weights.items()}
    # A saved model is fp32, for which there are no kernels, whatever backend trained it.
    if hasattr(model.config, "ffn_backend"):
        model.config.ffn_backend = "dense"
    save(model, tokenizer, folder, state_dict=weights)


class Log:
    """Appends tidy rows to a run's log.csv, each call's rows at once.

    A resumed run gives the `size` in bytes from its checkpoint. Rows after it are removed, whole or
    not: the run writes them again.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        if size is None:
            path.write_text(",".join(results.LOG_COLUMNS) + "\n", encoding="utf-8")
        else:
            os.truncate(path, size)

    def write(
        self, step: int, tokens: int, split: str, values: dict[str, float | list[float]]
    ) -> None:
        """Write one row for each number, and one for each layer of a list."""
        rows = []
        for metric, value in values.items():
            numbered = enumerate(value) if isinstance(value, list) else [("", value)]
            rows += [(step, tokens, split, layer, metric, f"{x:.6g}") for layer, x in numbered]
        # Mode "a" would create a deleted log again, without its header.
        with results.naming(self.path), open(self.path, "r+", encoding="utf-8") as file:
            file.seek(0, os.SEEK_END)
            csv.writer(file, lineterminator="\n").writerows(rows)


def activity_columns(layers: list[dict]) -> dict[str, list[float]]:
    """Return the per-layer metrics of a log from the results of `summarize_activity`."""
    return {metric: [layer[key] for layer in layers] for metric, key in ACTIVITY.items()}


class Interrupt:
    """Notes the first Ctrl-C, or SIGTERM of a scheduler, in `pressed`.

    A second Ctrl-C interrupts at once. A second SIGTERM does not: launchers send it again to
    processes that have it already.
    """

    def __init__(self, loud: bool):
        self.loud, self.pressed, self.before = loud, False, []

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            self.before = [signal.signal(number, self._press) for number in SIGNALS]
        return self

    def __exit__(self, *_) -> None:
        for number, before in zip(SIGNALS, self.before, strict=False):
            if before is not None:  # None: not set from Python, so it cannot be restored
                signal.signal(number, before)

    def _press(self, number: int, _: object) -> None:
        if self.pressed and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.loud and not self.pressed:
            os.write(2, NOTICE)  # print is not reentrant
        self.pressed = True
