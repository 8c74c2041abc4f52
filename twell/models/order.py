"""Compute feed-forward layers with similar tokens side by side."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from twell.models.convert import sparse_ffns
from twell.sparse.order import TokenOrder, similar_side_by_side

# A guess: with fewer tokens, sorting and gathering may take what smaller unions save.
MIN_TOKENS = 4096


class OrderedTokens(AbstractContextManager):
    """What `order_tokens` returns: `remove()` undoes it, as does the end of a `with` block."""

    def __init__(self, model: nn.Module, clusters: int):
        self.ffns = sparse_ffns(model)
        embedding = model.get_input_embeddings()
        weight = embedding.weight
        if weight.is_meta:
            raise ValueError("the input embedding is offloaded; order the tokens before")
        # T5's encoder and decoder have modules of their own for one weight.
        modules = (m for m in model.modules() if isinstance(m, nn.Embedding))
        modules = [m for m in modules if m.weight is weight] or [embedding]
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.places = similar_side_by_side(weight.detach(), clusters)
        self._handles = [module.register_forward_pre_hook(self) for module in modules]

    def __call__(self, embedding: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        ids, order = inputs[0].reshape(-1), None
        # With gradients layers compute tokens as they come: activation checkpointing would compute
        # a layer again in the order of a later pass.
        if len(ids) >= MIN_TOKENS and not torch.is_grad_enabled():
            if self.places.device != ids.device:
                self.places = self.places.to(ids.device)
            known = ids.clamp(max=len(self.places) - 1)  # the embedding may have grown
            order = TokenOrder.by(self.places[known])
        for ffn in self.ffns:
            if order is not None or ffn.token_order is not None:  # to set it takes microseconds
                ffn.token_order = None if order is None else order.to(ffn.device)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for ffn in self.ffns:
            ffn.token_order = None

    def __exit__(self, *_: object) -> None:
        self.remove()


@torch.no_grad()
def order_tokens(model: nn.Module, clusters: int = 64) -> OrderedTokens:
    """Let a model's SparseFFN layers compute tokens with similar embeddings side by side.

    Such tokens activate the same neurons, so that blocks of 64 have smaller unions. A table of the
    vocabulary gives the order, one for all layers of a pass of at least 4,096 tokens; it is made
    here from the input embedding [V, K] by k-means with so many clusters. y stays the same but for
    the order of its sums. Layers compute tokens as they come where gradients are wanted, where the
    backend is "dense", and where a mask leaves tokens out of statistics.

    `twell.tune` calls this where it pays. Call it before torch.compile. When the embedding has
    changed much, remove it and call it again. Raises ValueError for a model without SparseFFN
    layers or with an offloaded embedding.
    """
    return OrderedTokens(model, clusters)
