"""Runs a model over sequences and hands the active entries of every layer to an observer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twell.models import sparse_ffns
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import Collector
from twell.trace.texts import check_causal

SAY_EVERY = 5  # seconds between two lines about the progress


class Progress:
    """Says every five seconds how much is done, and how long the rest will take."""

    def __init__(self, total: int, unit: str, say: Callable[[str], None] | None):
        self.total, self.unit, self.say, self.done = total, unit, say, 0
        self.start = self.said = time.perf_counter()

    def add(self, number: int = 1) -> None:
        """Note that `number` more are done."""
        self.done += number
        now = time.perf_counter()
        if self.say and now - self.said > SAY_EVERY:
            speed = self.done / (now - self.start)
            minutes, seconds = divmod(int(max(self.total - self.done, 0) / speed), 60)
            done = f"{self.done:,} of {self.total:,} {self.unit}"
            self.say(f"{done}  {speed:,.1f}/s  {minutes}:{seconds:02d} left")
            self.said = now

    def over(self, items: Iterable, size: Callable[[Any], int] = lambda item: 1) -> Iterator:
        """Yield the items, and note each as done when the next one is requested."""
        for item in items:
            yield item
            self.add(size(item))


class Watcher(Collector):
    """Hands the active entries of layers to an observer."""

    def __init__(self, ffns: Sequence[SparseFFN], observer: Any):
        super().__init__(ffns, hidden=True)
        self.observer, self.number = observer, {id(ffn): n for n, ffn in enumerate(ffns)}
        self.seen: set[int] = set()  # the layers of a batch

    def see(self, ffn: SparseFFN, g: Tensor, h: Tensor) -> None:
        self.seen.add(id(ffn))
        token, neuron = (g != 0).nonzero(as_tuple=True)
        self.observer.layer(self.number[id(ffn)], token, neuron, h[token, neuron].float())

    def end(self, logprob: Tensor) -> None:
        """End a batch. Raises RuntimeError where a layer showed nothing."""
        missing = [n for key, n in self.number.items() if key not in self.seen]
        if missing:
            raise RuntimeError(
                f"layer {missing[0]} showed no activity, as under torch.compile; "
                "trace the model before it is compiled"
            )
        self.seen.clear()
        self.observer.end(logprob)


def watch(
    model: PreTrainedModel, sequences: Iterable[Sequence[int]], batch: int, observer: Any
) -> None:
    """Run sequences of token ids through the model, in batches of one length.

    For each batch it calls the observer's begin(ids), with int64 [B, S]; for every layer
    layer(layer, token, neuron, value) with its n active entries: token and neuron int64 [n],
    ascending, tokens numbered from 0 in the batch, and their h, float32 [n]; and end(logprob), with
    fp32 [B, S], NaN for the first token of each sequence. Raises ValueError for a token that the
    model does not have, and for an empty sequence, and RuntimeError for compiled layers.
    """
    with Watcher(sparse_ffns(model), observer) as watcher:
        score(model, sequences, batch, watcher.end, observer.begin)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    sequences: Iterable[Sequence[int]],
    batch: int,
    end: Callable[[Tensor], object],
    begin: Callable[[Tensor], object] = lambda ids: None,
) -> None:
    """Run the model as `watch` does, but only call an observer's `begin` and `end`."""
    check_causal(model)
    training, size = model.training, model.config.vocab_size
    model.eval()
    try:
        for group in same_length(sequences, batch):
            ids = torch.tensor(group, device=model.device)
            for token in (int(ids.min()), int(ids.max())):
                if not 0 <= token < size:
                    known = f"the model has tokens 0 to {size - 1}"
                    raise ValueError(f"token {token} does not exist: {known}")
            begin(ids)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            logprob = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            end(torch.nn.functional.pad(logprob, (1, 0), value=float("nan")))
    finally:
        model.train(training)


def same_length(sequences: Iterable[Sequence[int]], batch: int) -> Iterator[list[list[int]]]:
    """Yield groups of at most `batch` consecutive sequences of one length."""
    for length, run in itertools.groupby(sequences, len):
        if not length:
            raise ValueError("an empty sequence cannot be traced; give at least one token")
        while group := [[int(token) for token in one] for one in itertools.islice(run, batch)]:
            yield group
