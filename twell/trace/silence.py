"""By how much the loss changes when single neurons are silenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from twell.models import silence
from twell.trace.tracing import record
from twell.trace.watch import Progress, logprobs

COLUMNS = ["layer", "neuron", "fires", "loss_change", "stderr", "change_after"]


def silenced_loss(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    neurons: Sequence[tuple[int, int]],
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
    traced = record(model, sequences, batch)
    starts = np.flatnonzero(traced.position == 0)
    predicted = np.diff(starts, append=traced.num_tokens) - 1  # tokens, by sequence
    if not predicted.sum():
        raise ValueError("no token is predicted; give a sequence of at least two tokens")
    by_neuron = {layer: traced.layer(layer).tocsc() for layer, _ in neurons}
    rows = []
    for layer, neuron in Progress(len(neurons), "neurons", say).over(neurons):
        h = by_neuron[layer]
        fires = h.indices[h.indptr[neuron] : h.indptr[neuron + 1]]
        change = np.where(traced.position, 0.0, np.nan)  # of each token's loss
        again = np.unique(traced.sequence[fires])
        with silence(model, layer, neuron):
            silent = logprobs(model, [sequences[number] for number in again], batch)
        tokens = np.isin(traced.sequence, again)
        change[tokens] = traced.logprob[tokens].astype(np.float64) - silent
        total = np.add.reduceat(np.nan_to_num(change), starts)
        mean = total.sum() / predicted.sum()
        variance = np.square(total - mean * predicted).sum() * (many := len(starts))
        stderr = np.sqrt(variance / (many - 1)) / predicted.sum() if many > 1 else np.nan
        after = change[fires[fires + 1 < len(change)] + 1]
        after = after[~np.isnan(after)]
        after = after.mean() if len(after) else np.nan
        rows.append((layer, neuron, len(fires), mean, stderr, after))
    return pd.DataFrame(rows, columns=COLUMNS)
