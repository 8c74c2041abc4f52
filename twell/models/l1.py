"""The L1 term of the training loss, layer by layer, and the padding that it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell.models.convert import sparse_ffns
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import Collector


class L1Terms(Collector):
    """The L1 terms of the passes inside a `with` block; `collect_l1` explains them."""

    def by_layer(
        self, token_mask: Tensor | None = None, num_tokens: Tensor | int | None = None
    ) -> Tensor:
        """Return the term of each layer that ran, [L]; arguments as of `mean`."""
        self.check_gradient()
        # The terms of a layer in several passes count as of one pass over all their tokens.
        by_ffn: dict[SparseFFN, Tensor] = {}
        for ffn, l1 in self.terms:
            before = by_ffn.get(ffn)
            by_ffn[ffn] = l1 if before is None else torch.cat([before.flatten(), l1.flatten()])
        return means(list(by_ffn.values()), token_mask, num_tokens)

    def check_gradient(self) -> None:
        """Raise RuntimeError where the term has lost its gradient."""
        if self.no_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "the L1 term has no gradient: activation checkpointing with use_reentrant=True "
                "drops it; use model.gradient_checkpointing_enable({'use_reentrant': False}). "
                "Where torch.no_grad() is intended in training mode, read the term inside of it"
            )

    def mean(
        self, token_mask: Tensor | None = None, num_tokens: Tensor | int | None = None
    ) -> Tensor:
        """Return the L1 term: the mean over tokens and over the layers that ran of sum_n |h|.

        token_mask: of the passes' leading shape, zero for padding, which is left out. Where all
        tokens are padding the term is 0. num_tokens: divides the sum over tokens; by default the
        tokens of these passes. Raises RuntimeError where no layer ran, and where the term has lost
        its gradient, ValueError for a mask of another shape.
        """
        return self.by_layer(token_mask, num_tokens).mean()


def collect_l1(model: nn.Module) -> L1Terms:
    """Return a context that holds the L1 terms of a model's SparseFFN layers.

        with twell.collect_l1(model) as terms:
            loss = model(input_ids=ids, labels=ids).loss
        (loss + coefficient * terms.mean()).backward()

    It holds what passes inside the block computed in this thread, for any model or layer, in
    training and in evaluation mode. A layer that a pass skips contributes nothing. An encoder and a
    decoder see tokens of their own: where padding counts, open a block for each. Where layers are
    compiled, open a block for each pass, in one thread at a time; RuntimeError says so.
    SparseLlamaForCausalLM adds the term to its loss by itself. Raises ValueError for a model
    without SparseFFN layers. Paper: the L1 loss, in the definition of SparseLlamaForCausalLM.
    """
    return L1Terms(sparse_ffns(model), wants_l1=True)


def with_l1(
    model: nn.Module, loss: Callable[..., Tensor] | None = None, *, label_smoothing: float = 0.0
) -> Callable[..., Tensor]:
    """Return a `compute_loss_func` for transformers' Trainer: a loss plus the model's L1 term.

    A Trainer with a loss of its own gives SparseLlamaForCausalLM no labels, so its loss would lack
    the term. loss: called as loss(outputs, labels, num_items_in_batch=...); None: cross-entropy of
    the next token with `label_smoothing`, as TrainingArguments.label_smoothing_factor defines it.
    The term has the weight of cross-entropy: the micro-batch's share of the predicted tokens.
    Raises ValueError for a model whose output has no L1 term, and where a batch has no labels.
    """
    if not hasattr(model.config, "l1_coefficient"):
        name = f"model is a {type(model).__name__}, whose output has no L1 term"
        raise ValueError(f"{name}; twell.collect_l1 collects it for a loss of your own")

    def compute(
        outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if labels is None:
            raise ValueError("labels is None; a batch needs them for the weight of the L1 term")
        targets = labels[..., 1:].flatten()
        predicted = (targets != -100).sum()
        total = predicted if num_items_in_batch is None else num_items_in_batch
        total = divisor(total, predicted)
        if loss is None:
            logits = outputs.logits[..., :-1, :].flatten(0, -2).float()
            options = {"reduction": "sum", "label_smoothing": label_smoothing}
            value = F.cross_entropy(logits, targets.to(logits.device), **options) / total
        else:
            value = loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        if outputs.l1 is None:  # in evaluation mode
            return value
        return value + model.config.l1_coefficient * outputs.l1 * predicted / total

    return compute


def means(
    terms: list[Tensor], token_mask: Tensor | None, num_tokens: Tensor | int | None
) -> Tensor:
    """The mean over tokens of each term: see `L1Terms.mean`."""
    if not terms:
        raise RuntimeError("no SparseFFN layer ran inside the block in this thread")
    device = terms[0].device  # a device map may place layers on several
    if len({term.shape for term in terms}) > 1:
        if token_mask is not None or num_tokens is not None:
            raise ValueError(
                "an encoder and a decoder see tokens of their own, which one mask or number does "
                "not fit; collect the terms of model.encoder and of model.decoder"
            )
        return torch.stack([means([term], None, None)[0].to(device) for term in terms])
    per_token = torch.stack([term.to(device) for term in terms])
    counted = per_token[0].numel()
    if token_mask is not None:
        if token_mask.numel() == counted and per_token.dim() == 2:  # OPT's layers see [B * S]
            token_mask = token_mask.reshape(-1)
        if token_mask.shape != per_token.shape[1:]:
            shapes = f"{tuple(token_mask.shape)}; expected {tuple(per_token.shape[1:])}"
            raise ValueError(f"token_mask has shape {shapes}, one entry a token")
        counted = (token_mask != 0).sum()
        # No product: inf and NaN at padding positions must not reach the sum.
        per_token = torch.where(token_mask != 0, per_token, 0.0)
    total = counted if num_tokens is None else num_tokens
    return per_token.flatten(1).sum(1) / divisor(total, per_token)


def divisor(total: Tensor | int, like: Tensor) -> Tensor | int:
    """Return `total` on a device, at least 1: a mean of nothing and its gradients are then 0."""
    return total.to(like.device).clamp(min=1) if isinstance(total, Tensor) else max(total, 1)


def token_mask(attention_mask: object, inputs: Tensor | None) -> Tensor | None:
    """Return [B, S], zero for the padding among the tokens of this pass; None without a mask.

    `inputs` [B, S, ...] are ids or embeddings. Raises ValueError for a mask other than [B, keys].
    """
    if attention_mask is None or inputs is None:
        return None
    batch, length = inputs.shape[:2]
    shape = tuple(getattr(attention_mask, "shape", ()))
    if len(shape) != 2 or shape[0] != batch or shape[1] < length:
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__} of shape {shape}; to leave out "
            f"padding it has to be None or ({batch}, {length} or more)"
        )
    return attention_mask[:, -length:].to(inputs.device)
