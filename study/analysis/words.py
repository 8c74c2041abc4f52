"""One word and its neuron: what a changed neuron does to the loss around the word."""

from __future__ import annotations

import numpy as np
import pandas as pd

import twell

WHERE = ("right after the word", "elsewhere in sequences with it", "in sequences without it")
MIN_SEQUENCES = 8  # for an interval


def neuron_of(specific: pd.DataFrame, word: str) -> tuple[int, int]:
    """Return layer and number of the neuron most specific to a token (of `analysis.specific`).

    Raises ValueError for a token to which no neuron is most specific.
    """
    rows = specific[specific["token"] == word]
    if rows.empty:
        known = ", ".join(map(repr, specific["token"].drop_duplicates().head(8)))
        raise ValueError(
            f"no neuron stands for the token {word!r} in the text that was searched: raise tokens, "
            f"so that it occurs more often, or take another, such as {known}"
        )
    return int(rows["layer"].iloc[0]), int(rows["neuron"].iloc[0])


def around_word(before: twell.Trace, logprob: np.ndarray, word: str) -> pd.DataFrame:
    """Return the rise of the loss from a trace to other log probabilities of its tokens, by place.

    logprob [T]: of a changed model, such as `trace.scaled_logprob`. Columns: where (WHERE), tokens,
    rise (nats a token, above 0 where the changed model predicts worse), low, high: the 95% interval
    of 1,000 bootstrap samples of sequences, NaN below 8 sequences. First tokens of sequences are
    not predicted. Raises ValueError for another number of tokens, and for a token that does not
    occur. Ours.
    """
    if len(logprob) != before.num_tokens:
        raise ValueError(f"logprob has {len(logprob)} tokens, the trace {before.num_tokens}")
    at = np.flatnonzero(np.array(before.strings, dtype=object) == word)
    if not len(at):
        raise ValueError(f"the token {word!r} does not occur in the text")
    predicted = before.position > 0
    following = np.zeros(before.num_tokens + 1, bool)
    following[at + 1] = True
    following = following[:-1]
    having = np.isin(before.sequence, before.sequence[at])
    rise = before.logprob.astype(np.float64) - logprob
    random, rows = np.random.default_rng(0), []
    for where, place in zip(WHERE, (following, having & ~following, ~having), strict=True):
        chosen = place & predicted
        sequence = np.unique(before.sequence[chosen], return_inverse=True)[1]
        number = sequence.max(initial=-1) + 1
        sums, counts = np.bincount(sequence, rise[chosen], number), np.bincount(sequence)
        mean = sums.sum() / counts.sum() if number else np.nan
        low = high = np.nan
        if number >= MIN_SEQUENCES:
            weights = random.multinomial(number, np.full(number, 1 / number), 1000)
            low, high = np.quantile((weights @ sums) / (weights @ counts), [0.025, 0.975])
        rows.append((where, int(chosen.sum()), mean, low, high))
    return pd.DataFrame(rows, columns=["where", "tokens", "rise", "low", "high"])
