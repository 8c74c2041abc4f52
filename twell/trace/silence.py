"""How the loss changes when single neurons are silenced or scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from twell.models import intervene, silence
from twell.trace.trace import Trace
from twell.trace.tracing import record
from twell.trace.watch import Progress, score

COLUMNS = ["layer", "neuron", "fires", "loss_change", "stderr", "change_after"]


def silenced_loss(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    neurons: Sequence[tuple[int, int]],
    *,
    batch: int = 32,
    say: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Silence neurons (layer, neuron) one at a time; return the change of the loss for each.

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
    rows = []
    for layer, neuron in Progress(len(neurons), "neurons", say).over(neurons):
        fires = _firings(traced, layer, neuron)
        silent = scaled_logprob(model, sequences, traced, layer, neuron, 0, batch=batch)
        change = traced.logprob.astype(np.float64) - silent  # of each token's loss
        total = np.add.reduceat(np.nan_to_num(change), starts)
        mean = total.sum() / predicted.sum()
        variance = np.square(total - mean * predicted).sum() * (many := len(starts))
        stderr = np.sqrt(variance / (many - 1)) / predicted.sum() if many > 1 else np.nan
        after = change[fires[fires + 1 < len(change)] + 1]
        after = after[~np.isnan(after)]
        after = after.mean() if len(after) else np.nan
        rows.append((layer, neuron, len(fires), mean, stderr, after))
    return pd.DataFrame(rows, columns=COLUMNS)


def scaled_logprob(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    traced: Trace,
    layer: int,
    neuron: int,
    scale: float,
    *,
    batch: int = 32,
) -> np.ndarray:
    """Return log p of each token of the traced sequences with a neuron scaled, float32 [T].

    scale: the factor of its h, where 0 silences it. NaN for first tokens, as in the trace. Only
    sequences in which the neuron fires are computed again: it cannot change the others. Raises
    IndexError for a neuron that does not exist. Ours.
    """
    with intervene(model, layer, neuron, scale=scale):
        again = np.unique(traced.sequence[_firings(traced, layer, neuron)])
        parts = [traced.logprob[:0]]
        chosen = [sequences[number] for number in again]
        score(model, chosen, batch, lambda logprob: parts.append(logprob.reshape(-1).cpu().numpy()))
    result = traced.logprob.copy()
    result[np.isin(traced.sequence, again)] = np.concatenate(parts)
    return result


def _firings(traced: Trace, layer: int, neuron: int) -> np.ndarray:
    """Return the tokens that activate a neuron."""
    h = traced.layer(layer)[:, [neuron]]
    return np.flatnonzero(np.diff(h.indptr))
