"""The L1 term of the training loss, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twell.models.convert import sparse_ffns
from twell.sparse.layer import SparseFFN


def l1_by_layer(
    model: nn.Module, token_mask: Tensor | None = None, num_tokens: Tensor | int | None = None
) -> Tensor:
    """Return each layer's L1 term of the last forward pass, [L].

    A term is the sum over tokens of sum_n |h|, divided by `num_tokens`: by default the tokens of
    this pass. `token_mask` [B, S] is zero for padding, which neither counts. Where all tokens are
    padding the terms are 0. For any model in training mode: add
    `coefficient * l1_by_layer(model).mean()` to its loss. Paper: the L1 loss, in the definition of
    SparseLlamaForCausalLM. Raises RuntimeError when the layers kept no L1 term, or one without a
    gradient, and ValueError for a mask of another shape.
    """
    ffns = sparse_ffns(model)
    if any(ffn.observer.l1 is None for ffn in ffns):
        raise RuntimeError("the layers kept no L1 term: run the model in training mode first")
    per_token = torch.stack([ffn.observer.l1 for ffn in ffns])
    _check_gradient(per_token, ffns)
    counted = per_token[0].numel()
    if token_mask is not None:
        if token_mask.shape != per_token.shape[1:]:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}; "
                f"expected {tuple(per_token.shape[1:])}, one entry a token"
            )
        counted = (token_mask != 0).sum()
        # No product: inf and NaN at padding positions must not reach the sum.
        per_token = torch.where(token_mask != 0, per_token, 0.0)
    return per_token.flatten(1).sum(1) / divisor(
        counted if num_tokens is None else num_tokens, counted
    )


def _check_gradient(per_token: Tensor, ffns: list[SparseFFN]) -> None:
    """Refuse a term without a gradient where training needs one."""
    if per_token.requires_grad or not (ffns[0].training and torch.is_grad_enabled()):
        return
    if any(parameter.requires_grad for ffn in ffns for parameter in ffn.parameters()):
        raise RuntimeError(
            "the L1 term has no gradient: activation checkpointing with use_reentrant=True drops "
            "it; use model.gradient_checkpointing_enable({'use_reentrant': False})"
        )


def divisor(total: Tensor | int, counted: Tensor | int) -> Tensor | int:
    """Return `total`, plus 1 where nothing is counted: a mean and its gradients are then 0."""
    if not isinstance(total, Tensor) and total != 0:  # saves a copy to the device
        return total
    nothing = counted == 0
    if isinstance(total, Tensor) and isinstance(nothing, Tensor):
        total = total.to(nothing.device)
    return total + nothing
