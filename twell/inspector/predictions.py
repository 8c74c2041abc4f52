"""The words that a model expects after each token of a passage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

WORDS = 10


class Predictions(NamedTuple):
    """The likeliest next tokens after each of T tokens, falling: ids and probabilities [T, 10]."""

    ids: np.ndarray
    probability: np.ndarray


@contextlib.contextmanager
def watch_predictions(model: PreTrainedModel) -> Iterator[list[Predictions]]:
    """Yield a list that grows by the predictions of each batch which the model runs inside."""
    seen = []

    def hook(head: torch.nn.Module, inputs: tuple, logits: Tensor) -> None:
        for row in logits.flatten(0, -2).split(1024):  # fp32 of few tokens at a time
            logprob = row.float().log_softmax(-1)
            top = logprob.topk(min(WORDS, logprob.shape[-1]))
            seen.append(Predictions(top.indices.cpu().numpy(), top.values.exp().cpu().numpy()))

    handle = model.get_output_embeddings().register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def joined(seen: list[Predictions]) -> Predictions | None:
    """Return the predictions of consecutive batches as one; None of no batch."""
    return Predictions(*map(np.concatenate, zip(*seen, strict=True))) if seen else None
