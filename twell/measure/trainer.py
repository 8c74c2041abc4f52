"""One optimiser step of a language model, dense and sparse, eager and with compiled layers.

Each provider takes steps from the same weights; a sparse one has to reach the loss of the dense
one. Steps that are timed have the learning rate 0, so the activity stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from twell.config import TrainConfig
from twell.measure import imposed, runner
from twell.measure.check import TOLERANCE
from twell.measure.imposed import layer_means
from twell.measure.providers import DENSE_EAGER, HYBRID, UNION, Provider, by_compilation
from twell.measure.rows import Rows, require, significant
from twell.measure.runner import Call, bench
from twell.measure.sides import check_model, compile_layers, model_columns
from twell.models.l1 import collect_l1
from twell.models.llama import SparseLlamaForCausalLM
from twell.sparse.training import SparseTraining
from twell.train.loop import adamw

CHECKED_STEPS = 3  # optimiser steps before losses are compared
L1_COEFFICIENT = 2e-5
FIELDS = "context", "micro_batch", "precision", "checkpoint_activations"  # columns of rows
LOSS_CHUNK = 4096  # tokens whose logits exist at a time
COMPARED = (
    (f"the loss after {CHECKED_STEPS} steps", "loss"),
    ("the norm of the first gradient", "gradient norm"),
    ("the norm of the first gradient of feed-forward weights", "gradient norm"),
)


def train_step(
    size: str = "171m",
    overrides: Sequence[str] = (),
    *,
    active: float | None = None,
    profile: str = "flat",
    compiled: bool | None = None,
    hybrid: bool = False,
    energy: bool = False,
    out: str | Path | None = None,
) -> list[dict]:
    """Time one optimiser step on random tokens, dense and by unions: `twell measure train-step`.

    A step is a forward and backward pass of one micro-batch under bf16 autocast, clipping and AdamW
    on fp32 weights, with the L1 term at 2e-5 and the cross-entropy in chunks. Each provider takes 3
    steps at the configuration's learning rate. Its loss then, and the norms of its first gradient
    (of all weights, and of the feed-forward ones), have to equal dense's. hybrid: also by the
    paper's format. Returns the rows of train_step.csv. Raises as `ffn` does. Ours.
    """
    gpu, rows = runner.Gpu(energy), Rows(out, "train_step")
    config = model_config(size, overrides)
    trainer = Trainer(size, config, profile, active, gpu)
    providers = by_compilation([DENSE_EAGER, UNION, *[HYBRID] * hybrid], compiled)
    for call in bench(gpu, trainer.prepare, providers, "optimizer").values():
        speed = round(1e3 * trainer.tokens.numel() / call.columns["p50"])
        rows.add("train_step", [call.columns | {"tokens_per_second": speed}])
    return rows.by_file["train_step"]


def model_config(model: str, overrides: Sequence[str]) -> TrainConfig:
    """Return the configuration of a model to be timed: one micro-batch a step."""
    config = TrainConfig.load(model, [*overrides, f"l1_coefficient={L1_COEFFICIENT}"])
    unfit = f"precision is {config.precision!r}; the sparse path of training needs 'bf16'"
    require(config.precision == "bf16", unfit)
    check_model(model, config.model_config(), config.context)
    config.micro_batch = config.micro_batch or config.batch_tokens // config.context
    return config


def _chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss: Callable = _chunk_loss
) -> Tensor:
    """Return the mean cross-entropy in nats, with the logits of LOSS_CHUNK tokens at a time.

    hidden [T, K], weight [V, K] of the head, labels [T] int64, -100 for no label. All logits of
    32,768 tokens and a vocabulary of 49,152 would be 6.4 GB in fp32, and their gradient as much.
    """
    parts = zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True)
    sums = [checkpoint(loss, part, weight, label, use_reentrant=False) for part, label in parts]
    return torch.stack(sums).sum() / (labels != -100).sum()


class Trainer:
    """A model that takes optimiser steps on one batch, by one provider and then by another."""

    def __init__(
        self, name: str, config: TrainConfig, profile: str, active: float | None, gpu: runner.Gpu
    ):
        self.name, self.config, self.profile, self.gpu = name, config, profile, gpu
        means = layer_means(profile, config.num_layers, active, name)
        with gpu.device:
            self.model = SparseLlamaForCausalLM(config.model_config())
        imposed.draw_weights(self.model, config.seed)
        shape = config.micro_batch, config.context
        self.tokens = imposed.draw_tokens(config.vocab_size, *shape, device=gpu.device)
        # Each document predicts its own next tokens.
        self.labels = F.pad(self.tokens[:, 1:], (0, 1), value=-100).flatten()
        self.autocast = functools.partial(torch.autocast, gpu.device.type, torch.bfloat16)
        with self.autocast():
            imposed.impose(self.model, means)
            self.active = [layer["mean"] for layer in imposed.activity_of(self.model, self.tokens)]
        parameters = self.model.named_parameters()
        self.start = {name: p.detach().to("cpu", copy=True) for name, p in parameters}
        self.expected: tuple[float, ...] = ()  # results of the first provider
        if config.checkpoint_activations:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.compiled_loss = runner.compiled(_chunk_loss)
        self.sparse = SparseTraining(self.model)
        self.sparse.allow_recompiling()

    def become(self, provider: Provider, learning_rate: float) -> None:
        """Take the first weights, a fresh optimiser, and the provider's backend and compilation."""
        self.optimizer = None  # before the next one: two would not fit
        self.model.zero_grad()
        compile_layers(self.model, provider.compilation)
        self.loss = self.compiled_loss if provider.compiled else _chunk_loss
        parts = *self.model.model.layers, self.model.model.norm
        for layer in parts if self.config.checkpoint_activations else ():
            layer.gradient_checkpointing = not provider.compiled
            if provider.compiled:
                # Around a compiled layer: within it, it could not keep its L1 term.
                call = functools.partial(checkpoint, layer._compiled_call_impl)
                layer._compiled_call_impl = functools.partial(call, use_reentrant=False)
        self.model.set_ffn_backend("dense")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                # Dense layers have plain strides; the optimiser's state copies them.
                parameter.data = self.start[name].to(self.gpu.device, copy=True)
        self.model.set_ffn_backend(provider.backend)
        self.sparse.path = provider.path
        self.model.train()
        self.optimizer = adamw(self.model, self.config, self.gpu.device, learning_rate)

    def all_sparse(self) -> bool:
        """Whether the kernels computed every layer in the last step; SparseFFN may be dense."""
        from twell.sparse import ops, training_ops

        rows = torch.empty(0, self.config.hidden_size, dtype=torch.bfloat16, device=self.gpu.device)
        entries = max(ffn.capacity for ffn in self.model.ffns) * self.tokens.numel()
        fits = entries < training_ops.MAX_ENTRIES
        return ops.takes(rows, self.config.intermediate_size) and fits and all(self.sparse.sparse)

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step; return the loss before it and its gradient's norms: all, feed-forward."""
        for _ in self.sparse.attempts():
            self.optimizer.zero_grad()
            with self.autocast():
                # Not by SparseLlamaForCausalLM's own forward, which counts statistics and computes
                # all logits at once.
                with collect_l1(self.model) as terms:
                    outputs = self.model.model(input_ids=self.tokens, use_cache=False)
                hidden, head = outputs.last_hidden_state.flatten(0, 1), self.model.lm_head.weight
                loss = chunked_cross_entropy(hidden, head, self.labels, self.loss)
                loss = loss + self.config.l1_coefficient * terms.mean()
            loss.backward()
        own = nn.utils.get_total_norm([p.grad for ffn in self.model.ffns for p in ffn.parameters()])
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return loss.detach(), norm.detach(), own

    def steps(self) -> tuple[float, float, float]:
        """Return the loss after CHECKED_STEPS steps, and the norms of the first gradient."""
        steps = [torch.stack(self.step()) for _ in range(CHECKED_STEPS + 1)]
        return float(steps[-1][0]), float(steps[0][1]), float(steps[0][2])

    def prepare(self, provider: Provider) -> Call:
        """Compare a provider's steps with the first provider's, which is dense."""
        what = f"{provider} of {self.name}"
        self.become(provider, self.config.learning_rate)
        results = self.steps()
        self.expected = self.expected or results
        for (name, kind), value, exact in zip(COMPARED, results, self.expected, strict=True):
            if not abs(value - exact) <= TOLERANCE[kind] * abs(exact):
                raise ArithmeticError(f"{what} is wrong: {name} is {value:.5g}, dense {exact:.5g}")
        if provider.backend == "triton" and not self.all_sparse():
            raise ArithmeticError(f"{what} computed a layer densely")
        # Training changed the activity, and so the capacity; timed steps have the first weights.
        sparse = SparseTraining(self.model)

        def enter() -> None:
            self.sparse = sparse  # a path has its own capacity
            self.become(provider, 0.0)

        enter()
        self.step()  # allocates the optimiser's state
        columns = model_columns(self.name, self.model, self.profile) | {
            **{name: getattr(self.config, name) for name in FIELDS},
            "active": round(float(np.mean(self.active)), 2),
            "active_max": round(max(self.active), 2),
            "provider": provider.name,
            "path": provider.path or "dense",
            "capacity": self.sparse.capacity if provider.path else None,
            "loss": significant(results[0], 6),
            "grad_norm": significant(results[1], 4),
            "peak": self.gpu.peak(self.step)[1],
        }
        return Call(self.step, columns, enter=enter)
