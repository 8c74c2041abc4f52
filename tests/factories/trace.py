"""Random traces with the cases that go wrong, their aggregates, and their dense form."""

import itertools

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from twell.trace import Aggregate, Trace
from twell.trace.counter import Counter, Near

LENGTHS = (40, 40, 40, 40, 7, 1, 1, 64, 64, 64, 64, 64, 100, 3)
DEAD, OFTEN, AT_MOST_ONCE = 7, 8, 9  # neurons of `random_activity`
BELOW_4 = np.nextafter(np.float32(4), np.float32(0))
# 0, -0.0, ties, powers of two, tiny and huge values.
ODD = (0.0, -0.0, 1.0, -1.0, 2.0, 2.0, 1e-20, -1e-20, BELOW_4, -4.0, 1000.0)
NO_WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))  # 5 is "<5>"


def random_activity(
    seed, lengths=LENGTHS, layers=2, neurons=600, rate=0.05, vocab_size=50, odd=ODD
):
    """A trace of sequences with silent and full rows, dead neurons and odd values."""
    random = np.random.default_rng(seed)
    tokens = sum(lengths)
    mask = random.random((layers, tokens, neurons)) < rate * random.lognormal(
        0, 1, (layers, tokens, 1)
    )
    mask[0, random.integers(tokens)] = True
    mask[:, random.integers(tokens)] = False
    mask[:, :, DEAD] = False
    mask[:, :, OFTEN] = random.random((layers, tokens)) < 0.5
    mask[:, 1:, AT_MOST_ONCE] = False
    values = random.standard_normal(mask.sum()) * random.lognormal(0, 1, mask.sum())
    odd = random.choice(np.array(odd, np.float32), len(values))
    token_ids = random.integers(0, vocab_size, tokens).astype(np.int32)
    position = np.concatenate([np.arange(length) for length in lengths])
    return Trace(
        token_ids=token_ids,
        strings=[f"<{token}>" for token in token_ids],
        logprob=np.where(position == 0, np.nan, -random.random(tokens)).astype(np.float32),
        sequence=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        position=position.astype(np.int32),
        indptr=np.concatenate([[0], mask.sum(2).reshape(-1).cumsum()]).astype(np.int64),
        indices=mask.nonzero()[2].astype(np.uint16),
        values=np.where(random.random(len(values)) < 0.3, odd, values.astype(np.float32)),
        intermediate_size=neurons,
    )


def aggregate_of(trace: Trace, batch=3, max_bytes=10**9) -> Aggregate:
    """Show a trace to the counter, at most `batch` sequences at a time."""
    starts = np.flatnonzero(trace.position == 0)
    sequences = np.split(trace.token_ids, starts[1:])
    counter = Counter(trace.num_layers, trace.intermediate_size, sequences)
    for one in batches(trace, batch):
        counter.add(*one)
    near = Near(counter)
    for ids, layers, _ in batches(trace, batch):
        near.add(ids, layers)
    return counter.finish(near, NO_WORDS, max_bytes, {})


def batches(trace, batch):
    """The batches of a trace, as `tracing.passes` yields them."""
    rows = np.split(np.arange(trace.num_tokens), np.flatnonzero(trace.position == 0)[1:])
    while rows:
        length = len(rows[0])
        group = list(itertools.takewhile(lambda row, n=length: len(row) == n, rows[:batch]))
        rows = rows[len(group) :]
        every = np.concatenate(group)
        ids = torch.from_numpy(trace.token_ids[every]).long().view(len(group), length)
        layers = []
        for layer in range(trace.num_layers):
            h = trace.layer(layer)[every]
            token = np.repeat(np.arange(ids.numel()), np.diff(h.indptr))
            parts = (token, h.indices.astype(np.int64), h.data)
            layers.append([torch.from_numpy(part) for part in parts])
        yield ids, layers, torch.from_numpy(trace.logprob[every]).view(ids.shape)


def dense(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Which neurons are active, and their h, both [L, T, N]."""
    shape = (trace.num_layers, trace.num_tokens, trace.intermediate_size)
    active, h = np.zeros(shape, bool), np.zeros(shape)
    row = np.repeat(np.arange(len(trace.indptr) - 1), np.diff(trace.indptr))
    place = (*np.divmod(row, trace.num_tokens), trace.indices)
    active[place], h[place] = True, trace.values
    return active, h
