"""A pretrained model with ReLU in place of SiLU, which learns from the original.

The student begins with the teacher's weights and ReLU; `fit` fits its down projections to that. It
minimises the KL divergence of its predictions from the teacher's, over all tokens of a text, plus
the L1 term. Where `active_share` is set, `steer` brings activity there by the L1 coefficient, or by
the threshold. All else is as in any training: steps, schedule, checkpoints, log.

Predictions are compared CHUNK tokens at a time, and computed again in the backward pass, so that
no logits of a whole batch exist. With `compile` the teacher's layers and the losses are compiled
too: uncompiled, the losses alone move several MB a token. Ours; the paper trains from scratch.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from twell import results
from twell.config import TrainConfig, cache_folder
from twell.corpus import load_tokenizer
from twell.models.convert import sparse_ffns, sparsify
from twell.models.l1 import l1_by_layer
from twell.models.llama import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.models.loading import load_stock, resolve, stock_config
from twell.sparse.layer import SparseFFN
from twell.train.dead import balance

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
SAMPLES = 2**20  # tokens that a teacher writes where no text is given
SAMPLED = 64  # texts of a batch
WRITER_FILES = "generation_config.json tokenizer.json tokenizer_config.json"  # decide texts too
TIMED = 8  # tokens that a batch writes first, to say how long it will take


@dataclass
class StudentOutput:
    """Losses in nats a token: loss = kl + l1_scale * l1_coefficient * l1, in training mode.

    cross_entropy is of the text's own tokens, cross_entropy_teacher the teacher's. l1 is None in
    evaluation mode.
    """

    loss: Tensor
    kl: Tensor
    cross_entropy: Tensor
    cross_entropy_teacher: Tensor
    l1: Tensor | None = None


class Student(nn.Module):
    """A model that learns the predictions of another one, as a module with one loss.

    student: a model with SparseFFN layers. The teacher is no part of the module, so that it is
    neither trained nor saved.
    """

    recording = False  # as in SparseLlamaForCausalLM

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, l1_coefficient: float):
        super().__init__()
        self.student, self.teacher = student, (teacher,)
        self.l1_coefficient = l1_coefficient
        self.losses = _losses
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
        return cls(student, teacher, config.l1_coefficient)

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
        for ffn in self.ffns:
            # Stays set after the pass: activation checkpointing repeats the layer during backward.
            ffn.observer.collect_l1 = self.training
            ffn.observer.record = self.training or self.recording
        (teacher,) = self.teacher
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        for ffn in self.ffns:
            ffn.observer.record = False
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
        l1 = l1_by_layer(self.student, None, num_tokens_in_batch).mean()
        return StudentOutput(kl + l1_scale * self.l1_coefficient * l1, kl, *losses, l1)


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
    as key=value. Without a `source` the teacher writes SAMPLES tokens of text at last, after
    `check`. Raises ValueError for another type of model, for fields that only the teacher decides,
    for a context or a threshold that the model cannot have, and for a tokenizer with more entries
    than the model.
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
    for field in fields:
        if field in given:
            raise ValueError(f"{field} is that of the teacher {name}; leave it out")
    if "activation" in given:
        raise ValueError("activation is relu in every student; leave it out")
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
    tokenizer = load_tokenizer(str(folder), loaded.vocab_size)
    check(loaded)
    if config.hidden_act == "relu":
        say(f"{name} has ReLU already: it learns its own predictions, and the L1 term")
    elif config.hidden_act != "silu":
        say(f"{name} has {config.hidden_act}, which is exchanged for ReLU")
    if not torch.cuda.is_available():
        say("no GPU was found: this trains on the CPU, and each row says how long it will take")
    say(_memory(config, loaded))
    if "source" not in given:
        samples = _samples(folder, tokenizer, loaded.context, say)
        loaded = dataclasses.replace(loaded, source=str(samples))
    return loaded


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


def teacher_hash(name: str | Path, others: str = "") -> str:
    """Return the SHA-256 of a model's configuration and weights, and of other files there."""
    folder, hashes = resolve(name), []
    for pattern in f"config.json *.safetensors pytorch_model*.bin {others}".split():
        hashes += [(file.name, results.file_hash(file)) for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


@torch.no_grad()
def _samples(
    folder: Path, tokenizer: PreTrainedTokenizerFast, context: int, say: Callable[[str], None]
) -> Path:
    """Let the teacher write SAMPLES tokens; return the file, a document a line, in the cache.

    An interrupted call goes on where it stopped: every batch has a seed of its own.
    """
    about = json.dumps([teacher_hash(folder, WRITER_FILES), context, SAMPLES, SAMPLED])
    name = hashlib.sha256(about.encode()).hexdigest()[:16]
    path = cache_folder() / f"samples-{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock"):
        if path.is_file():
            return path
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = load_stock(folder, kind).to(device).eval()
        part = path.with_suffix(".part")
        lines = part.read_text(encoding="utf-8").split("\n")[:-1] if part.is_file() else []
        batches, written = math.ceil(SAMPLES / (SAMPLED * context)), len(lines) // SAMPLED
        results.write_atomically(part, "".join(f"{line}\n" for line in lines[: written * SAMPLED]))

        start = time.perf_counter()
        _write(model, tokenizer, TIMED)
        seconds = (time.perf_counter() - start) / TIMED * context * (batches - written)
        texts = f"{(batches - written) * SAMPLED} texts of up to {context} tokens"
        say(f"the teacher writes {texts}, in about {_clock(seconds)} or more: {path}")
        start = time.perf_counter()
        for batch in range(written, batches):
            torch.manual_seed(batch)
            texts = tokenizer.batch_decode(
                _write(model, tokenizer, context - 1), skip_special_tokens=True
            )
            with open(part, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            pace = (time.perf_counter() - start) / (batch + 1 - written)
            left = _clock(pace * (batches - batch - 1))
            say(f"{batch + 1} of {batches} batches of texts, {left} left")
        part.rename(path)
    return path


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokens: int) -> Tensor:
    """Return the ids of SAMPLED texts that a model writes, drawn from its own probabilities."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = model.generation_config.eos_token_id  # may be several
    ends = end if ends is None else ends
    # The model's own settings may prefer some tokens, as a repetition penalty does.
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=end)
    ids = torch.full((SAMPLED, 1), end if begin is None else begin, device=model.device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens}
    # Without a mask a first token that is also the padding would be hidden.
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 1:]


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
