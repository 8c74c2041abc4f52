"""The parts of a run that follow from its configuration: model, compilation, optimiser."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerFast

from twell.config import TrainConfig
from twell.models import SparseLlamaForCausalLM, save
from twell.sparse.training import SparseTraining
from twell.train.relufy import Student


def build_model(
    config: TrainConfig, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> SparseLlamaForCausalLM | Student:
    """Return a model with random weights, or the student of a teacher that computes on `device`.

    Random weights depend on the random state only, not on the backend.
    """
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
        _compile_layers(model, config, sparse)
    elif config.checkpoint_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.hidden_weight:
        model.watch_layers()


def _compile_layers(
    model: SparseLlamaForCausalLM | Student, config: TrainConfig, sparse: SparseTraining
) -> None:
    if sparse.active:
        sparse.allow_recompiling()
    torch._dynamo.config.optimize_ddp = False  # it would split the compiled layers into buckets
    if isinstance(model, Student):
        model.compile_teacher()
        # One code each for teacher and student, gradients, counters, silence and batch sizes.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
        if config.checkpoint_activations:
            # Around the compiled layer: within it, the layer could not keep its L1 term.
            compiled = layer._compiled_call_impl
            layer._compiled_call_impl = functools.partial(checkpoint, compiled, use_reentrant=False)


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
        model, prefix = model.student, "student."
        weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    # A saved model is fp32, for which there are no kernels, whatever backend trained it.
    if hasattr(model.config, "ffn_backend"):
        model.config.ffn_backend = "dense"
    save(model, tokenizer, folder, state_dict=weights)
