"""Which tokens of a pass are padding, read from any attention mask."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

MASKED = -100.0  # a query does not attend to a key with this additive mask, or with a lower one


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
