"""A pretrained model with ReLU in place of SiLU, which learns from the original.

The student begins with the teacher's weights and ReLU; with `fit_tokens` the down projections are
fitted to that first. It minimises the KL divergence of its predictions from the teacher's, over all
tokens of a text, plus the L1 term. Where `active_share` is set, `steer` brings activity there by
the L1 coefficient, or by the threshold. All else is as in any training: steps, schedule,
checkpoints, log.

Predictions are compared CHUNK tokens at a time, and computed again in the backward pass, so that
no logits of a whole batch exist. With `compile` the teacher's layers and the losses are compiled
too: uncompiled, the losses alone move several MB a token. Ours; the paper trains from scratch.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from twell.config import TrainConfig
from twell.corpus import load_tokenizer
from twell.models.convert import sparse_ffns, sparsify
from twell.models.l1 import L1Terms
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.loading import load_stock, resolve, stock_config
from twell.sparse.layer import SparseFFN
from twell.train.dead import balance
from twell.train.samples import write_samples

CHUNK = 2048  # tokens whose logits exist at a time
# Tensors as large as these logits in fp32, at the peak of `_losses` and its gradients.
LOGITS = {"fp32": 7, "bf16": 6}
# Fields of a configuration that the teacher decides, and their names in its own.
OF_TEACHER = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
BYTES = {"fp32": 4, "bf16": 2}  # of a teacher's weight
RELUFIABLE = "llama", "mistral", "qwen2", "qwen3"


@dataclass
class StudentOutput:
    """Losses in nats a token, and the loss that is minimised in training mode:

    kl + l1_scale * l1_coefficient * l1 + hidden_weight * hidden. cross_entropy is of the text's own
    tokens, cross_entropy_teacher the teacher's. hidden is `_distance` a token, a ratio, as a mean
    over layers. l1 and hidden are None in evaluation mode, and hidden without a hidden_weight.
    """

    loss: Tensor
    kl: Tensor
    cross_entropy: Tensor
    cross_entropy_teacher: Tensor
    l1: Tensor | None = None
    hidden: Tensor | None = None


class Student(nn.Module):
    """A model that learns the predictions of another one, as a module with one loss.

    student: a model with SparseFFN layers. The teacher is no part of the module, so that it is
    neither trained nor saved.
    """

    recording = False  # as in SparseLlamaForCausalLM

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        l1_coefficient: float,
        hidden_weight: float = 0.0,
    ):
        super().__init__()
        self.student, self.teacher = student, (teacher,)
        self.l1_coefficient, self.hidden_weight = l1_coefficient, hidden_weight
        self.losses, self.distance = _losses, _distance
        self.outputs: tuple[list[Tensor], ...] = [], []  # of the layers of student and teacher
        self._no_split_modules = student._no_split_modules  # FSDP shards by these

    @classmethod
    def of(cls, config: TrainConfig, device: torch.device) -> Student:
        """Return the student and the teacher of a configuration, the latter on its device."""
        kind = torch.bfloat16 if config.precision == "bf16" else torch.float32
        teacher = load_stock(config.teacher, kind).to(device)
        for name, weight in teacher.named_parameters():
            if not weight.isfinite().all():
                raise ValueError(
                    f"{name} of the teacher {config.teacher} is not finite; put back a whole copy"
                )
        teacher.requires_grad_(False).eval()
        student = relu_student(config)
        if config.balance_every:  # before AdamW has moments: later calls change little
            balance(student)
        return cls(student, teacher, config.l1_coefficient, config.hidden_weight)

    @property
    def ffns(self) -> list[SparseFFN]:
        return sparse_ffns(self.student)

    @property
    def model(self) -> nn.Module:
        return self.student.base_model

    @property
    def config(self):
        return self.student.config

    @property
    def device(self) -> torch.device:
        return self.student.device

    def compile_teacher(self) -> None:
        """Compile the teacher's layers, and the losses."""
        for layer in self.teacher[0].base_model.layers:
            layer.compile(fullgraph=True)
        self.losses = torch.compile(_losses, fullgraph=True)
        self.distance = torch.compile(_distance, fullgraph=True)

    def watch_layers(self) -> None:
        """Let the layers of both models leave their outputs, once they are compiled."""
        models = self.model, self.teacher[0].base_model
        for model, outputs in zip(models, self.outputs, strict=True):
            for layer in model.layers:
                self._watch(layer, outputs)

    def _watch(self, layer: nn.Module, outputs: list[Tensor]) -> None:
        """Append what a decoder layer returns; of a compiled one outside of what is compiled."""

        def leave(output: Tensor) -> Tensor:
            if self.training:
                outputs.append(output)
            return output

        compiled = layer._compiled_call_impl
        if compiled is None:
            layer.register_forward_hook(lambda _, inputs, output: leave(output))
        else:
            layer._compiled_call_impl = lambda *args, **options: leave(compiled(*args, **options))

    def gradient_checkpointing_enable(self, *arguments) -> None:
        self.student.gradient_checkpointing_enable(*arguments)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        use_cache: bool = False,
        num_items_in_batch: int | None = None,
        num_tokens_in_batch: int | None = None,
        l1_scale: float = 1.0,
    ) -> StudentOutput:
        """Run both models on `input_ids` [B, S] without padding; the ids are the labels too.

        The totals are those of a step of several micro-batches, as in SparseLlamaForCausalLM.
        """
        (teacher,) = self.teacher
        self._forget()  # what activation checkpointing left
        with L1Terms(self.ffns, counts=self.training or self.recording) as terms:
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        with torch.no_grad():
            wanted = teacher.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        following = F.pad(input_ids[:, 1:], (0, 1), value=-100)
        pairs = [t.flatten(0, 1).split(CHUNK) for t in (hidden, wanted, following)]
        heads = self.student.get_output_embeddings(), teacher.get_output_embeddings()
        options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
        parts = [
            checkpoint(_compare, self.losses, *heads, *chunk, **options)
            for chunk in zip(*pairs, strict=True)
        ]
        divergence, *losses = (torch.stack(sums).sum() for sums in zip(*parts, strict=True))
        kl = divergence / (num_tokens_in_batch or input_ids.numel())
        losses = [loss / (num_items_in_batch or input_ids[:, 1:].numel()) for loss in losses]
        if not self.training:
            return StudentOutput(kl, kl, *losses)
        l1 = terms.mean(num_tokens=num_tokens_in_batch)
        loss = kl + l1_scale * self.l1_coefficient * l1
        if not self.hidden_weight:
            return StudentOutput(loss, kl, *losses, l1)
        layers = zip(*self.outputs, strict=True)
        apart = torch.stack([self.distance(*pair) for pair in layers]).mean()
        apart = apart / (num_tokens_in_batch or input_ids.numel())
        self._forget()
        return StudentOutput(loss + self.hidden_weight * apart, kl, *losses, l1, apart)

    def _forget(self) -> None:
        for outputs in self.outputs:
            outputs.clear()


def _compare(
    losses: Callable[..., tuple[Tensor, Tensor, Tensor]],
    head: nn.Module,
    teacher_head: nn.Module,
    hidden: Tensor,
    wanted: Tensor,
    following: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `losses` of the logits of both models."""
    with torch.no_grad():
        expected = teacher_head(wanted)
    return losses(head(hidden), expected, following)


def _losses(
    logits: Tensor, teacher_logits: Tensor, following: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over tokens [T] of KL(teacher, student), and of both models' -log p of what follows."""
    target = torch.log_softmax(teacher_logits.float(), -1)
    logprob = torch.log_softmax(logits.float(), -1)
    # Token by token first: so the compiler needs one pass over each token's logits in cache.
    divergence = F.kl_div(logprob, target, log_target=True, reduction="none").sum(-1).sum()
    loss, expected = (
        F.nll_loss(one, following, ignore_index=-100, reduction="sum") for one in (logprob, target)
    )
    return divergence, loss, expected


def _distance(ours: Tensor, wanted: Tensor) -> Tensor:
    """Sum over tokens of the squared distance of hidden states [B, S, K] over the wanted square."""
    ours, wanted = ours.float(), wanted.float()
    return ((ours - wanted).square().sum(-1) / wanted.square().sum(-1)).sum()


def relu_student(config: TrainConfig) -> PreTrainedModel:
    """Return the teacher in fp32 with sparse ReLU layers, as it begins to learn.

    A Llama becomes a SparseLlamaForCausalLM, which knows a threshold. Attention has no dropout: the
    teacher predicts without. Raises ValueError for a threshold in another model, whose saved
    configuration has no place for it, and for sizes that are not the teacher's.
    """
    model = load_stock(config.teacher, torch.float32)
    model.config.attention_dropout = 0.0  # of a Llama, which is made anew; others have it in layers
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    for field, own in OF_TEACHER.items():
        size, expected = getattr(config, field), getattr(model.config, own)
        if size != expected:
            raise ValueError(
                f"{field} is {size}, and {expected} in the teacher {config.teacher}; "
                "`twell relufy` takes the sizes from there"
            )
    if model.config.model_type in ("llama", SparseLlamaConfig.model_type):
        fields = model.config.to_dict() | {
            "hidden_act": "relu",
            "activation_threshold": config.threshold,
            "l1_coefficient": config.l1_coefficient,
        }
        # Weights that its configuration ties, and its files do not, transformers leaves apart.
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        fields["tie_word_embeddings"] = head.weight is embedding.weight
        student = SparseLlamaForCausalLM(SparseLlamaConfig.from_dict(fields))
        student.load_state_dict(model.state_dict())
        student.generation_config = model.generation_config
        student.set_ffn_backend(config.backend)
        return student
    _check_threshold(config, model.config)
    if model.config.hidden_act == "relu":
        return sparsify(model, backend=config.backend)
    return _quietly_relufied(model, config.backend)


def _quietly_relufied(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it is trained here
        return sparsify(model, relufy=True, backend=backend)


# --- from a model to a configuration


def relufy_config(
    name: str | Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = print,
    check: Callable[[TrainConfig], None] = lambda config: None,
) -> TrainConfig:
    """Return the configuration that relufies a model: configs/relufy.yaml with the model's sizes.

    name: a folder, a run, or a name on the hub, of a type in RELUFIABLE. overrides: fields
    as key=value. Without a `source`, or with a `sampled_share`, the teacher writes
    `sampled_tokens` tokens of text at last, after `check`. Raises ValueError for another type of
    model, for fields that only the teacher decides, for a context or a threshold that the model
    cannot have, for a tokenizer with more entries than the model, for a `sampled_share` without
    a source or of a stream, and for a `sampled_chat` without a chat template or sampled text.
    """
    folder = resolve(name)
    teacher = str(folder) if Path(name).is_dir() else str(name)
    config, _ = stock_config(folder)
    if config.model_type not in (*RELUFIABLE, SparseLlamaConfig.model_type):
        raise ValueError(
            f"{name} is a {config.model_type} model; relufy knows {', '.join(RELUFIABLE)}"
        )
    given = [override.partition("=")[0] for override in overrides]
    fields = {field: getattr(config, own) for field, own in OF_TEACHER.items()}
    fields |= {"teacher": teacher, "tokenizer": teacher}
    fields["gated"] = getattr(config, "gated_mlp", True)
    if theta := (config.rope_parameters or {}).get("rope_theta"):
        fields["rope_theta"] = theta
    _check_given(given, fields, name)
    if "context" not in given:
        fields["context"] = min(1024, config.max_position_embeddings)
    if "threshold" not in given:
        fields["threshold"] = getattr(config, "activation_threshold", 0.0)
    written = [
        f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in fields.items()
    ]
    loaded = TrainConfig.load("relufy", [*written, *overrides])
    if loaded.context > config.max_position_embeddings:
        raise ValueError(
            f"context is {loaded.context}; {name} reads at most {config.max_position_embeddings}"
        )
    _check_threshold(loaded, config)
    _check_share(loaded, "source" in given)
    tokenizer = load_tokenizer(str(folder), loaded.vocab_size)
    check(loaded)
    if config.hidden_act == "relu":
        say(f"{name} has ReLU already: it learns its own predictions, and the L1 term")
    elif config.hidden_act != "silu":
        say(f"{name} has {config.hidden_act}, which is exchanged for ReLU")
    if not torch.cuda.is_available():
        say("no GPU was found: this trains on the CPU, and each row says how long it will take")
    say(_memory(config, loaded))
    if "source" in given and not loaded.sampled_share:
        return loaded
    file = write_samples(folder, tokenizer, loaded, say)
    if "source" in given:
        return dataclasses.replace(loaded, samples=file.name)
    parse = loaded.parse_special or loaded.sampled_chat
    return dataclasses.replace(loaded, source=str(file), parse_special=parse)


def _check_given(given: Sequence[str], fields: Iterable[str], name: str | Path) -> None:
    """Refuse fields that nobody but the teacher decides."""
    reasons = {field: f"that of the teacher {name}" for field in fields}
    reasons |= {
        "samples": "what the teacher wrote, for which sampled_share asks",
        "activation": "relu in every student",
    }
    for field in given:
        if field in reasons:
            raise ValueError(f"{field} is {reasons[field]}; leave it out")


def _check_share(config: TrainConfig, has_source: bool) -> None:
    if config.sampled_share and (config.source.startswith("hf:") or not has_source):
        reason = "of a stream" if has_source else "without a source all text is sampled"
        raise ValueError(f"sampled_share is {config.sampled_share}: {reason}; leave it out")
    if config.sampled_chat and has_source and not config.sampled_share:
        raise ValueError(
            "sampled_chat is true, and the teacher writes nothing: set sampled_share, "
            "or leave it out"
        )


def _check_threshold(config: TrainConfig, teacher: PreTrainedConfig) -> None:
    if config.threshold and teacher.model_type not in ("llama", SparseLlamaConfig.model_type):
        raise ValueError(
            f"threshold is {config.threshold}, and the teacher is a {teacher.model_type}; "
            "only the configuration of a Llama can save a threshold"
        )


def _memory(config: PreTrainedConfig, loaded: TrainConfig) -> str:
    """What teacher and student take, without activations."""
    with torch.device("meta"):
        number = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    teacher, student = BYTES[loaded.precision] * number, 16 * number
    logits = LOGITS[loaded.precision] * 4 * CHUNK * loaded.vocab_size
    sizes = {"teacher": teacher, "student, gradients and AdamW": student, "logits": logits}
    parts = ", ".join(f"{part} {size / 2**30:.2f} GiB" for part, size in sizes.items())
    return f"memory without activations: {parts}"
