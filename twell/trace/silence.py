"""By how much the loss changes when single neurons are silenced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from twell.models import SparseLlamaForCausalLM, silence
from twell.trace.watch import (
    SAY_EVERY,
    Recorder,
    concatenate,
    evaluating,
    logprob,
    same_length,
    watch,
)

Neuron = tuple[int, int]  # layer, neuron
COLUMNS = ["layer", "neuron", "fires", "loss_change", "stderr", "change_after"]


@torch.no_grad()
def silenced_loss(
    model: SparseLlamaForCausalLM,
    sequences: Sequence[Sequence[int]],
    neurons: Sequence[Neuron],
    *,
    batch: int = 32,
    say: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Silence neurons (layer, neuron) one at a time; return the change of the loss, a row each.

    Columns: layer, neuron; fires, the tokens that activate it; loss_change in nats per predicted
    token of these sequences of token ids, above 0 where the neuron helps; stderr, its standard
    error from the differences between sequences (NaN for a single one); change_after, the mean
    over the tokens right after a firing (NaN without any).

    Only sequences in which a neuron fires are computed again: it cannot change the others. `say`
    gets a line every five seconds. Raises IndexError for a neuron that does not exist, ValueError
    when no token is predicted. Ours.
    """
    for pair in neurons:
        with silence(model, *pair):  # refuses a neuron that does not exist, before the work
            pass
    losses = _Losses(model, sequences, batch)
    with evaluating(model):
        rows = [losses.without(*pair) for pair in _progress(neurons, say)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _progress(neurons: Sequence[Neuron], say: Callable[[str], None] | None) -> Iterator[Neuron]:
    start = said = time.perf_counter()
    for done, pair in enumerate(neurons, 1):
        yield pair
        if say and time.perf_counter() - said > SAY_EVERY:
            said = time.perf_counter()
            left = int((said - start) / done * (len(neurons) - done))
            say(f"{done} of {len(neurons)} neurons  {left // 60}:{left % 60:02d} left")


class _Losses:
    """Log-probabilities of sequences under the whole model, and where its neurons fire."""

    def __init__(
        self, model: SparseLlamaForCausalLM, sequences: Sequence[Sequence[int]], batch: int
    ):
        self.model, self.sequences, self.batch = model, sequences, batch
        lengths = [len(sequence) for sequence in sequences]
        self.starts = np.cumsum([0, *lengths])
        self.predicted = np.array(lengths) - 1  # tokens, by sequence
        self.recorder = Recorder(len(model.ffns))
        watch(model, sequences, batch, self.recorder)
        if not self.predicted.sum():
            raise ValueError("no token is predicted; give a sequence of at least two tokens")
        self.whole = concatenate(self.recorder.logprob, np.float64)

    def without(self, layer: int, neuron: int) -> tuple:
        """Return a row of COLUMNS."""
        fires = self._firings(layer, neuron)
        change = self._change(layer, neuron, fires)
        by_sequence = np.add.reduceat(np.nan_to_num(change), self.starts[:-1])
        total, many = self.predicted.sum(), len(self.sequences)
        mean = by_sequence.sum() / total
        spread = np.square(by_sequence - mean * self.predicted).sum()
        stderr = np.sqrt(spread * many / (many - 1)) / total if many > 1 else np.nan
        following = change[fires[fires + 1 < len(change)] + 1]
        following = following[~np.isnan(following)]
        after = following.mean() if len(following) else np.nan
        return layer, neuron, len(fires), mean, stderr, after

    def _firings(self, layer: int, neuron: int) -> np.ndarray:
        """Return the numbers of the tokens that activate a neuron."""
        batches = self.recorder.layers[layer]
        counts, indices = (concatenate([part[n] for part in batches], np.int64) for n in range(2))
        return np.repeat(np.arange(len(counts)), counts)[indices == neuron]

    def _change(self, layer: int, neuron: int, fires: np.ndarray) -> np.ndarray:
        """Return the change of each token's loss, NaN for the first of a sequence."""
        change = np.zeros(self.starts[-1])
        change[self.starts[:-1]] = np.nan
        numbers = np.unique(np.searchsorted(self.starts, fires, side="right") - 1)
        after = []
        with silence(self.model, layer, neuron):
            for group in same_length([self.sequences[n] for n in numbers], self.batch):
                ids = torch.tensor(group, device=self.model.device)
                after.extend(logprob(self.model, ids).cpu().numpy())
        for n, silent in zip(numbers, after, strict=True):
            tokens = slice(self.starts[n], self.starts[n + 1])
            change[tokens] = self.whole[tokens] - silent
        return change
