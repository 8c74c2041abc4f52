"""A pretrained model with ReLU in place of SiLU, which learns from the original.

The student begins with the teacher's weights and ReLU. It minimises the KL divergence of its
predictions from the teacher's, over all tokens of a text, plus the L1 term.

Logits exist for CHUNK tokens at a time, and the backward pass computes them again: the logits of a
whole batch would not fit. With `compile`, the teacher's layers and the losses are compiled too:
uncompiled, the losses alone move several MB a token. Ours; the paper trains from scratch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from twell.config import SIZES, TrainConfig
from twell.models.convert import sparse_ffns, sparsify
from twell.models.l1 import L1Terms
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.loading import load_stock, resolve, stock_config
from twell.sparse.layer import SparseFFN
from twell.train.dead import balance

CHUNK = 2048  # tokens whose logits exist at a time
RELUFIABLE = "llama", "mistral", "qwen2", "qwen3"
LLAMAS = "llama", SparseLlamaConfig.model_type


@dataclass
class StudentOutput:
    """Losses in nats a token.

    loss = kl + l1_scale * l1_coefficient * l1 + hidden_weight * hidden, where hidden is the mean of
    `_distance` over tokens and layers. l1 and hidden are None in evaluation mode.
    """

    loss: Tensor
    kl: Tensor
    cross_entropy: Tensor
    cross_entropy_teacher: Tensor
    l1: Tensor | None = None
    hidden: Tensor | None = None


class Student(nn.Module):
    """A model with SparseFFN layers that learns the predictions of another one.

    The teacher is on `device`. It is not a submodule, so it is neither trained nor saved.
    """

    recording = False  # as in SparseLlamaForCausalLM

    def __init__(self, config: TrainConfig, device: torch.device):
        super().__init__()
        kind = torch.bfloat16 if config.precision == "bf16" else torch.float32
        teacher = load_stock(config.teacher, kind).to(device)
        self.teacher = (teacher.requires_grad_(False).eval(),)
        self.student = relu_student(config)
        if config.balance_every:  # before AdamW has moments: later calls change the weights little
            balance(self.student)
        self.config = self.student.config
        self.l1_coefficient, self.hidden_weight = config.l1_coefficient, config.hidden_weight
        self.losses, self.distance = _losses, _distance
        self.outputs: tuple[list[Tensor], ...] = [], []  # of the student's and teacher's layers
        self._no_split_modules = self.student._no_split_modules  # FSDP shards these

    @property
    def ffns(self) -> list[SparseFFN]:
        return sparse_ffns(self.student)

    @property
    def model(self) -> nn.Module:
        return self.student.base_model

    @property
    def device(self) -> torch.device:
        return self.student.device

    def compile_teacher(self) -> None:
        """Compile the teacher's layers, and the losses."""
        # One code each for teacher and student, gradients, counters, silence and batch sizes.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        for layer in self.teacher[0].base_model.layers:
            layer.compile(fullgraph=True)
        self.losses = torch.compile(_losses, fullgraph=True)
        self.distance = torch.compile(_distance, fullgraph=True)

    def watch_layers(self) -> None:
        """Collect the outputs of both models' layers. Call this after compiling them."""
        models = self.model, self.teacher[0].base_model
        for model, outputs in zip(models, self.outputs, strict=True):
            for layer in model.layers:
                # Outside of compiled code, which would ignore a hook
                call = layer._compiled_call_impl or layer._call_impl
                layer._compiled_call_impl = functools.partial(self._collect, call, outputs)

    def _collect(self, call: Callable, outputs: list[Tensor], *args: Any, **options: Any) -> Tensor:
        output = call(*args, **options)
        if self.training:
            outputs.append(output)
        return output

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        use_cache: bool = False,
        num_items_in_batch: int | None = None,
        num_tokens_in_batch: int | None = None,
        l1_scale: float = 1.0,
    ) -> StudentOutput:
        """Run both models on `input_ids` [B, S] without padding, which are the labels too."""
        (teacher,) = self.teacher
        self._forget()  # outputs of a pass that raised
        with L1Terms(self.ffns, counts=self.training or self.recording) as terms:
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        with torch.no_grad():
            wanted = teacher.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        following = F.pad(input_ids[:, 1:], (0, 1), value=-100)
        pairs = [t.flatten(0, 1).split(CHUNK) for t in (hidden, wanted, following)]

        def compare(hidden: Tensor, wanted: Tensor, following: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                expected = teacher.get_output_embeddings()(wanted)
            return self.losses(self.student.get_output_embeddings()(hidden), expected, following)

        options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
        parts = [checkpoint(compare, *chunk, **options) for chunk in zip(*pairs, strict=True)]
        divergence, *losses = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
        tokens = num_tokens_in_batch or input_ids.numel()
        kl = divergence / tokens
        losses = [loss / (num_items_in_batch or input_ids[:, 1:].numel()) for loss in losses]
        if not self.training:
            return StudentOutput(kl, kl, *losses)
        l1, distance = terms.mean(num_tokens=num_tokens_in_batch), None
        loss = kl + l1_scale * self.l1_coefficient * l1
        if self.hidden_weight:
            layers = zip(*self.outputs, strict=True)
            distance = torch.stack([self.distance(*pair) for pair in layers]).mean() / tokens
            loss = loss + self.hidden_weight * distance
            self._forget()
        return StudentOutput(loss, kl, *losses, l1, distance)

    def _forget(self) -> None:
        for outputs in self.outputs:
            outputs.clear()


def _losses(
    logits: Tensor, teacher_logits: Tensor, following: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum KL(teacher, student) and both models' -log p of the following token over tokens [T]."""
    target = torch.log_softmax(teacher_logits.float(), -1)
    logprob = torch.log_softmax(logits.float(), -1)
    # Summing by token first lets the compiler read each token's logits once, from cache.
    divergence = F.kl_div(logprob, target, log_target=True, reduction="none").sum(-1).sum()
    loss, expected = (
        F.nll_loss(one, following, ignore_index=-100, reduction="sum") for one in (logprob, target)
    )
    return divergence, loss, expected


def _distance(ours: Tensor, wanted: Tensor) -> Tensor:
    """Sum |ours - wanted|^2 / |wanted|^2 of hidden states [B, S, K] over tokens."""
    ours, wanted = ours.float(), wanted.float()
    return ((ours - wanted).square().sum(-1) / wanted.square().sum(-1)).sum()


def relu_student(config: TrainConfig) -> PreTrainedModel:
    """Return the teacher in fp32 with sparse ReLU layers, and without dropout of attention."""
    model = load_stock(config.teacher, torch.float32)
    model.config.attention_dropout = 0.0  # for a Llama, which is built anew from it
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    if model.config.model_type not in LLAMAS:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # training follows
            return sparsify(model, relufy=True, backend=config.backend)
    # A Llama becomes a SparseLlamaForCausalLM, whose configuration can save a threshold.
    fields = model.config.to_dict() | {
        "hidden_act": "relu",
        "activation_threshold": config.threshold,
        "l1_coefficient": config.l1_coefficient,
    }
    # transformers unties weights that are tied in the configuration but differ in the files.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    fields["tie_word_embeddings"] = head.weight is embedding.weight
    student = SparseLlamaForCausalLM(SparseLlamaConfig.from_dict(fields))
    student.load_state_dict(model.state_dict())
    student.generation_config = model.generation_config
    student.set_ffn_backend(config.backend)
    return student


# --- from a model to a configuration


def relufy_config(name: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration that relufies a model: configs/relufy.yaml with the model's sizes.

    name: a folder, a run, or a name on the hub, of a type in RELUFIABLE. overrides: fields as
    key=value, `source` among them. Raises ValueError for another type of model, without a source,
    for fields that the teacher decides, and for fields that do not fit the model or each other.
    """
    folder = resolve(name)
    teacher = str(folder) if Path(name).is_dir() else str(name)
    config, _ = stock_config(folder)
    if config.model_type not in (*RELUFIABLE, *LLAMAS):
        known = ", ".join(RELUFIABLE)
        raise ValueError(f"{name} is a {config.model_type} model; relufy knows {known}")
    if (act := config.hidden_act) in ("relu2", "drelu"):
        raise ValueError(f"{name} has {act}, which is sparse already; relufy would make it ReLU")
    given = [override.partition("=")[0] for override in overrides]
    if "source" not in given:
        raise ValueError("give source=, the text from which the student learns, such as a file")
    fields = {field: getattr(config, own) for field, own in SIZES.items()}
    fields |= {"teacher": teacher, "tokenizer": teacher}
    fields["gated"] = getattr(config, "gated_mlp", True)
    if theta := (config.rope_parameters or {}).get("rope_theta"):
        fields["rope_theta"] = theta
    for field in given:
        if field in (*fields, "activation"):
            raise ValueError(f"{field} follows from the teacher {name}; leave it out")
    fields["context"] = min(1024, config.max_position_embeddings)
    fields["threshold"] = getattr(config, "activation_threshold", 0.0)
    loaded = TrainConfig.load("relufy", overrides, **fields)
    if loaded.context > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise ValueError(f"context is {loaded.context}; {name} reads at most {most}")
    if loaded.threshold and config.model_type not in LLAMAS:
        kind = f"the teacher is a {config.model_type}; only a Llama can save a threshold"
        raise ValueError(f"threshold is {loaded.threshold}, and {kind}")
    return loaded
