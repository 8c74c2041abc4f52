"""Traces and aggregates of token sequences, texts and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twell import results
from twell.config import TrainConfig
from twell.models import sparse_ffns
from twell.trace.aggregates import Aggregate
from twell.trace.counter import Counter
from twell.trace.texts import cut, encode, load_with_tokenizer, token_strings
from twell.trace.trace import Trace
from twell.trace.watch import Progress, concatenate, watch
from twell.train.text import run_text

BATCH_TOKENS = 8192
MAX_BYTES = 2_000_000
# Compressed counts of a neuron at 1% active over 2^20 tokens (53 bytes at 50%). A model that would
# need more than the limit is refused before it runs.
BYTES_A_NEURON = 32
MOST_TOKENS = 2**20  # of a run's aggregate, by default


class Recorder:
    """An observer that keeps every active entry."""

    def __init__(self, num_layers: int, intermediate_size: int):
        self.dtype = Trace.dtype(intermediate_size)
        # For each layer and batch: active neurons of each token, indices, values.
        self.layers: list[list[tuple[np.ndarray, ...]]] = [[] for _ in range(num_layers)]
        self.logprob: list[np.ndarray] = []

    def begin(self, ids: Tensor) -> None:
        self.num_tokens = ids.numel()

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        counts = torch.bincount(token, minlength=self.num_tokens)
        counts, neuron, value = (t.cpu().numpy() for t in (counts, neuron, value))
        self.layers[layer].append((counts, neuron.astype(self.dtype), value))

    def end(self, logprob: Tensor) -> None:
        self.logprob.append(logprob.reshape(-1).cpu().numpy())


def record(model: PreTrainedModel, sequences: Sequence[Sequence[int]], batch: int) -> Trace:
    """Return `trace_tokens` without the strings of the tokens."""
    ffns = sparse_ffns(model)
    recorder = Recorder(len(ffns), ffns[0].intermediate_size)
    watch(model, sequences, batch, recorder)
    parts = [part for layer in recorder.layers for part in layer]
    counts, indices, values = (
        concatenate([part[n] for part in parts], dtype)
        for n, dtype in enumerate((np.int64, recorder.dtype, np.float32))
    )
    token_ids, lengths = concatenate(sequences, np.int32), list(map(len, sequences))
    return Trace(
        token_ids=token_ids,
        strings=[""] * len(token_ids),
        logprob=concatenate(recorder.logprob, np.float32),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=concatenate(map(np.arange, lengths), np.int32),
        indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        indices=indices,
        values=values,
        intermediate_size=ffns[0].intermediate_size,
    )


def trace_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    batch: int = 32,
    meta: dict | None = None,
) -> Trace:
    """Run sequences of token ids through the model, each from position 0, and return their trace.

    Consecutive sequences of one length run together, at most `batch` at a time. Raises ValueError
    for a token that the model does not have.
    """
    traced = record(model, sequences, batch)
    traced.strings = token_strings(tokenizer, traced.token_ids)
    traced.meta = (meta or {}) | {"special_ids": sorted(tokenizer.all_special_ids)}
    return traced


def trace_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Trace:
    """Trace a text, cut into sequences of the model's context length.

    Raises ValueError for an empty text.
    """
    sequences = cut(encode(tokenizer, text), model)
    return trace_tokens(model, tokenizer, sequences, meta=results.provenance())


def trace_validation(run: str | Path) -> Trace:
    """Trace the tokens of a run's last validation. The run's log has the same counts."""
    row, _ = results.load_run(run)
    config = TrainConfig.load(Path(run) / "config.yaml")
    _, _, blocks = run_text(run)
    model, tokenizer = load_with_tokenizer(run)
    meta = results.provenance() | {"run": row["run"], "l1_coefficient": config.l1_coefficient}
    return trace_tokens(model, tokenizer, blocks.draw(range(len(blocks))).tolist(), meta=meta)


def aggregate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
    meta: dict | None = None,
    say: Callable[[str], None] | None = None,
) -> Aggregate:
    """Run sequences of token ids through the model, each from position 0, and count.

    A second run reads the values at the tokens around the places that are shown.

    seed: decides which firings are sampled; max_bytes: the limit of the file; say: gets a line
    every five seconds. Raises ValueError for a token that the model does not have, for no tokens,
    and for a model whose counts exceed max_bytes; FloatingPointError for values that are not
    finite.
    """
    ffns = sparse_ffns(model)
    layers, size = len(ffns), ffns[0].intermediate_size
    needed = layers * size * BYTES_A_NEURON
    if needed > max_bytes:
        raise ValueError(
            f"{layers} layers of {size} neurons may need {needed} bytes; max_bytes is {max_bytes}"
        )
    if not len(sequences):
        raise ValueError("there is no sequence to count; give at least one token")
    longest = max(map(len, sequences))
    counter = Counter(
        layers, size, model.config.vocab_size, longest, seed=seed, device=model.device
    )
    batch = max(BATCH_TOKENS // longest, 1)
    progress = Progress(sum(map(len, sequences)), "tokens", say)
    watch(model, progress.over(sequences, len), batch, counter)
    near = counter.near(sequences)
    progress = Progress(sum(map(len, near.held)), "tokens of examples", say)
    watch(model, progress.over(near.held, len), batch, near)
    meta = (meta or {}) | {"context": longest, "seed": seed}
    return counter.finish(sequences, near, tokenizer, max_bytes, meta)


def aggregate_run(
    run: str | Path,
    text: str | None = None,
    tokens: int | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    say: Callable[[str], None] | None = None,
) -> Aggregate:
    """Count a run over its whole validation split or a text, on a GPU where there is one.

    tokens: their number; None: all, at most 2^20. Raises ValueError when there are fewer.
    """
    meta = results.provenance()
    if text is None:
        row, _ = results.load_run(run)
        meta |= {"run": row["run"]}
    model, tokenizer = load_with_tokenizer(run)
    if text is None:  # a stream holds out no more than its validations read
        streamed = TrainConfig.load(Path(run) / "config.yaml").source.startswith("hf:")
        ids = run_text(run, valid_tokens=None if streamed else 2**62)[2].tokens
    else:
        ids = encode(tokenizer, text)
    if tokens is not None and not 1 <= tokens <= len(ids):
        raise ValueError(f"{tokens} tokens were asked for; there are {len(ids)}")
    ids = ids[: MOST_TOKENS if tokens is None else tokens]
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    meta |= {"l1_coefficient": getattr(model.config, "l1_coefficient", None)}
    return aggregate(model, tokenizer, cut(ids, model), max_bytes=max_bytes, meta=meta, say=say)
