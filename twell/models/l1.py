"""The L1 term of the training loss, layer by layer, and the padding that it leaves out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Cache

from twell.models.convert import sparse_ffns

MASKED = -100.0  # a query does not attend to a key with this additive mask, or with a lower one


def l1_by_layer(
    model: nn.Module, token_mask: Tensor | None = None, num_tokens: Tensor | int | None = None
) -> Tensor:
    """Return each layer's L1 term of the last forward pass, [L].

    A term is the sum over tokens of sum_n |h|, divided by `num_tokens`: by default the tokens of
    this pass. `token_mask` [B, S] is zero for padding, which neither counts. Where all tokens are
    padding the terms are 0. An encoder and a decoder, such as T5's, have a mask each. For any
    model in training mode: add `coefficient * l1_by_layer(model).mean()` to its loss. Paper: the L1
    loss, in the definition of SparseLlamaForCausalLM. Raises RuntimeError when the layers kept no
    L1 term, or one without a gradient, and ValueError for a mask of another shape.
    """
    ffns = sparse_ffns(model)
    if any(ffn.observer.l1 is None for ffn in ffns):
        raise RuntimeError("the layers kept no L1 term: run the model in training mode first")
    if len({ffn.observer.l1.shape for ffn in ffns}) > 1 or _has_two_parts(model):
        if token_mask is not None or num_tokens is not None:
            raise ValueError(
                "the layers of an encoder and of a decoder see tokens of their own; "
                "call l1_by_layer on model.encoder and on model.decoder, with a mask each"
            )
        return torch.cat([l1_by_layer(ffn) for ffn in ffns])
    per_token = torch.stack([ffn.observer.l1 for ffn in ffns])
    learns = ffns[0].training and torch.is_grad_enabled()
    learns = learns and any(p.requires_grad for ffn in ffns for p in ffn.parameters())
    if learns and not per_token.requires_grad:
        raise RuntimeError(
            "the L1 term has no gradient: activation checkpointing with use_reentrant=True drops "
            "it; use model.gradient_checkpointing_enable({'use_reentrant': False})"
        )
    counted = per_token[0].numel()
    if token_mask is not None:
        if token_mask.numel() == counted and per_token.dim() == 2:  # OPT's layers see [B * S]
            token_mask = token_mask.reshape(-1)
        if token_mask.shape != per_token.shape[1:]:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}; "
                f"expected {tuple(per_token.shape[1:])}, one entry a token"
            )
        counted = (token_mask != 0).sum()
        # No product: inf and NaN at padding positions must not reach the sum.
        per_token = torch.where(token_mask != 0, per_token, 0.0)
    total = counted if num_tokens is None else num_tokens
    return per_token.flatten(1).sum(1) / divisor(total, counted)


def _has_two_parts(model: nn.Module) -> bool:
    return hasattr(model, "encoder") and hasattr(model, "decoder")


def divisor(total: Tensor | int, counted: Tensor | int) -> Tensor | int:
    """Return `total`, plus 1 where nothing is counted: a mean and its gradients are then 0."""
    if not isinstance(total, Tensor) and total != 0:  # saves a copy to the device
        return total
    nothing = counted == 0
    if isinstance(total, Tensor) and isinstance(nothing, Tensor):
        total = total.to(nothing.device)
    return total + nothing


def token_mask(
    attention_mask: object, inputs: Tensor | None, cache: Cache | None = None
) -> Tensor | None:
    """Return [B, S], zero for the padding among the tokens of this pass; None without a mask.

    `inputs` [B, S, ...] are ids or embeddings. SparseLlamaForCausalLM lists the masks that can be
    read. Raises ValueError for others.
    """
    if attention_mask is None or inputs is None:
        return None
    batch, length = inputs.shape[:2]
    is_tensor = isinstance(attention_mask, Tensor)
    shape = tuple(getattr(attention_mask, "shape", ()))
    if is_tensor and len(shape) == 2 and shape[0] == batch and shape[1] >= length:
        return attention_mask[:, -length:].to(inputs.device)
    is_4d = is_tensor and len(shape) == 4
    if is_4d and shape[0] in (1, batch) and shape[2] in (1, length) and shape[3] >= length:
        # A static cache allocates later keys too: there the last key is not the last token.
        first = shape[3] - length if cache is None else cache.get_seq_length()
        return _attends_to_itself(attention_mask.to(inputs.device), batch, length, first)
    given = f"has shape {shape}" if is_tensor else f"is a {type(attention_mask).__name__}"
    raise ValueError(
        f"attention_mask {given}; expected None, ({batch}, {length} or more) or "
        f"({batch} or 1, heads or 1, {length} or 1, {length} or more): "
        "the loss or the statistics have to know which tokens are padding"
    )


def _attends_to_itself(mask: Tensor, batch: int, length: int, first: int) -> Tensor:
    """Return [B, S] bool for a mask [B or 1, heads or 1, S or 1, keys]; token 0 is key `first`."""
    heads, keys = mask.shape[1], mask.shape[3]
    own = torch.arange(length, device=mask.device) + first
    own = own.clamp(max=keys - 1)[:, None].expand(batch, heads, length, 1)
    value = mask.expand(batch, -1, length, -1).gather(-1, own)[..., 0]
    attends = value > MASKED if value.is_floating_point() else value != 0
    return attends.any(1)
