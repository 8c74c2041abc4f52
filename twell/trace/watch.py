"""Runs a model over sequences and hands the active entries of every layer to an observer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from twell.models import SparseLlamaForCausalLM

SAY_EVERY = 5  # seconds between two lines about the progress


class Observer(Protocol):
    """Sees the batches of a model, one after the other."""

    def begin(self, ids: Tensor) -> None:
        """A batch of token ids int64 [B, S] starts."""

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        """The n active entries of the batch in one layer.

        token, neuron: int64 [n], ascending, tokens numbered from 0 in the batch; value: their h,
        float32 [n].
        """

    def end(self, logprob: Tensor) -> None:
        """The batch is done; logprob fp32 [B, S], NaN for the first token of each sequence."""


class Recorder:
    """An observer that keeps everything: for each batch, logprob and the layers' active entries."""

    def __init__(self, num_layers: int):
        # Of each layer and batch: active neurons of each token, indices, values.
        self.layers: list[list[tuple[np.ndarray, ...]]] = [[] for _ in range(num_layers)]
        self.logprob: list[np.ndarray] = []

    def begin(self, ids: Tensor) -> None:
        self.num_tokens = ids.numel()

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        counts = torch.bincount(token, minlength=self.num_tokens)
        counts, neuron, value = (t.cpu().numpy() for t in (counts, neuron, value))
        self.layers[layer].append((counts, neuron.astype(np.uint16), value))

    def end(self, logprob: Tensor) -> None:
        self.logprob.append(logprob.reshape(-1).cpu().numpy())


@torch.no_grad()
def watch(
    model: SparseLlamaForCausalLM,
    sequences: Sequence[Sequence[int]],
    batch: int,
    observer: Observer,
) -> None:
    """Run sequences of token ids through the model, in batches of `same_length`.

    Raises ValueError for a token that the model does not have, and for an empty sequence.
    """
    with evaluating(model), contextlib.ExitStack() as hooks:
        for layer, ffn in enumerate(model.ffns):
            hooks.callback(ffn.register_forward_hook(_hook(observer, layer)).remove)
        for group in same_length(sequences, batch):
            ids = torch.tensor(group, device=model.device)
            _check_tokens(ids, model.config.vocab_size)
            observer.begin(ids)
            observer.end(logprob(model, ids))


def _hook(observer: Observer, layer: int) -> Callable:
    def hook(ffn, inputs, _):
        # Computed again, densely, so that a trace does not depend on the backend.
        g, h = (t.reshape(-1, ffn.intermediate_size) for t in ffn.activations(inputs[0]))
        token, neuron = (g != 0).nonzero(as_tuple=True)
        observer.layer(layer, token, neuron, h[token, neuron].float())

    return hook


def _check_tokens(ids: Tensor, vocab_size: int) -> None:
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocab_size:
        wrong, last = least if least < 0 else most, vocab_size - 1
        raise ValueError(f"token {wrong} does not exist: the model has tokens 0 to {last}")


@contextlib.contextmanager
def evaluating(model: SparseLlamaForCausalLM) -> Iterator[None]:
    """Evaluation mode while it lasts."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def logprob(model: SparseLlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return log p of each token [B, S] given the tokens before it, fp32; NaN for the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0), value=float("nan"))


def same_length(sequences: Sequence[Sequence[int]], batch: int) -> Iterator[list[list[int]]]:
    """Yield groups of at most `batch` consecutive sequences of one length."""
    group: list[list[int]] = []
    for sequence in sequences:
        if len(sequence) < 1:
            raise ValueError("an empty sequence cannot be traced; give at least one token")
        if group and (len(group) == batch or len(group[0]) != len(sequence)):
            yield group
            group = []
        group.append([int(token) for token in sequence])
    if group:
        yield group


def concatenate(arrays: Sequence, dtype) -> np.ndarray:
    """np.concatenate as `dtype`, of no arrays too."""
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
