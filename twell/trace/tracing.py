"""Traces and aggregates of sequences, texts and runs; the loss without single neurons."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from accelerate.utils import tqdm
from scipy.sparse import csr_array
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twell import results
from twell.models import intervene, sparse_ffns
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import Collector
from twell.trace.counter import Counter, Near
from twell.trace.records import Aggregate, Trace
from twell.trace.texts import check_causal, cut, encode, load_with_tokenizer, token_strings
from twell.train.text import run_text

LayerEntries = tuple[Tensor, Tensor, Tensor]
BATCH_TOKENS = 8192
MAX_BYTES = 2_000_000
# Compressed counts of a neuron at 1% active over 2^20 tokens (53 bytes at 50%). A model that would
# need more than the limit is refused before it runs.
BYTES_A_NEURON = 32
MOST_TOKENS = 2**20  # of a run's aggregate, by default
COLUMNS = ["layer", "neuron", "fires", "loss_change", "stderr", "change_after"]


class Entries(Collector):
    """Collects the active entries of each layer in a pass: token, neuron and h."""

    def __init__(self, ffns: Sequence[SparseFFN]):
        super().__init__(ffns, hidden=True)
        self.by_layer: dict[SparseFFN, LayerEntries] = {}

    def see(self, ffn: SparseFFN, g: Tensor, h: Tensor) -> None:
        token, neuron = (g != 0).nonzero(as_tuple=True)
        self.by_layer[ffn] = token, neuron, h[token, neuron].float()


@torch.no_grad()
def passes(
    model: PreTrainedModel,
    sequences: Iterable[Sequence[int]],
    ffns: Sequence[SparseFFN] = (),
) -> Iterator[tuple[Tensor, list[LayerEntries], Tensor]]:
    """Run sequences of token ids through the model, in batches of one length.

    Yields for each batch its ids, int64 [B, S]; of each of `ffns` the n active entries: token and
    neuron int64 [n], ascending, tokens numbered from 0 in the batch, and their h, float32 [n]; and
    log p of each token, fp32 [B, S], NaN for the first one of each sequence. Raises ValueError for
    a token that the model does not have, and for an empty sequence, and RuntimeError for compiled
    layers.
    """
    check_causal(model)
    training, size = model.training, model.config.vocab_size
    model.eval()
    try:
        for group in same_length(sequences, BATCH_TOKENS):
            ids = torch.tensor(group, device=model.device)
            for token in (int(ids.min()), int(ids.max())):
                if not 0 <= token < size:
                    known = f"the model has tokens 0 to {size - 1}"
                    raise ValueError(f"token {token} does not exist: {known}")
            entries = Entries(ffns)
            with entries if ffns else nullcontext():  # an open collector costs every layer
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            for number, ffn in enumerate(ffns):
                if ffn not in entries.by_layer:
                    raise RuntimeError(
                        f"layer {number} showed no activity, as under torch.compile; "
                        "trace the model before it is compiled"
                    )
            logprob = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            logprob = torch.nn.functional.pad(logprob, (1, 0), value=float("nan"))
            yield ids, [entries.by_layer[ffn] for ffn in ffns], logprob
    finally:
        model.train(training)


def same_length(sequences: Iterable[Sequence[int]], batch_tokens: int) -> Iterator[list[list[int]]]:
    """Yield groups of consecutive sequences of one length, of at most `batch_tokens` tokens."""
    for length, run in itertools.groupby(sequences, len):
        if not length:
            raise ValueError("an empty sequence cannot be traced; give at least one token")
        batch = max(batch_tokens // length, 1)
        while group := [[int(token) for token in one] for one in itertools.islice(run, batch)]:
            yield group


def _with_bar(items: Sequence, unit: str, shown: bool) -> Iterable:
    return tqdm(items, unit=f" {unit}", mininterval=5, disable=not shown)


# --- records of sequences, texts and runs


def record(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Trace:
    """Return the trace of sequences, without the strings of their tokens."""
    ffns = sparse_ffns(model)
    size = ffns[0].intermediate_size
    # Of each layer the batches [T, N].
    parts: list[list[csr_array]] = [[] for _ in ffns]
    logprobs = [np.zeros(0, np.float32)]
    for ids, layers, logprob in passes(model, sequences, ffns):
        logprobs.append(logprob.reshape(-1).cpu().numpy())
        for part, (token, neuron, value) in zip(parts, layers, strict=True):
            ends = torch.bincount(token, minlength=ids.numel()).cumsum(0)
            ends, neuron, value = (t.cpu().numpy() for t in (ends, neuron.int(), value))
            part.append(csr_array((value, neuron, np.append(0, ends)), (ids.numel(), size)))
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    token_ids = np.fromiter(itertools.chain(*sequences), np.int32)
    return Trace(
        token_ids=token_ids,
        strings=[""] * len(token_ids),
        logprob=np.concatenate(logprobs),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=np.fromiter(itertools.chain(*map(range, lengths)), np.int32),
        intermediate_size=size,
        **Trace.entries([*itertools.chain(*parts)], size),
    )


def trace_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    meta: dict | None = None,
) -> Trace:
    """Run sequences of token ids through the model, each from position 0, and return their trace.

    Raises ValueError for a token that the model does not have.
    """
    traced = record(model, sequences)
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
    blocks = run_text(run)
    model, tokenizer = load_with_tokenizer(run)
    meta = results.provenance() | {name: row[name] for name in ("run", "l1_coefficient")}
    return trace_tokens(model, tokenizer, blocks.draw(range(len(blocks))).tolist(), meta=meta)


def aggregate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    max_bytes: int = MAX_BYTES,
    meta: dict | None = None,
    progress: bool = False,
) -> Aggregate:
    """Run sequences of token ids through the model, each from position 0, and count.

    A second run reads the values at the tokens around the places that are shown.

    max_bytes: the limit of the file; progress: show a bar. Raises ValueError for a token that the
    model does not have, and for a model whose counts exceed max_bytes; FloatingPointError for
    values that are not finite.
    """
    if not len(sequences):
        raise ValueError("there is no sequence to count; give at least one")
    ffns = sparse_ffns(model)
    layers, size = len(ffns), ffns[0].intermediate_size
    if (needed := layers * size * BYTES_A_NEURON) > max_bytes:
        counts = f"{layers} layers of {size} neurons may need {needed} bytes"
        raise ValueError(f"{counts}; max_bytes is {max_bytes}")
    counter = Counter(layers, size, sequences, device=model.device)

    for one in passes(model, _with_bar(sequences, "sequences", progress), ffns):
        counter.add(*one)
    near = Near(counter)
    for ids, entries, _ in passes(model, _with_bar(sequences, "examples", progress), ffns):
        near.add(ids, entries)
    meta = (meta or {}) | {"context": max(map(len, sequences))}
    return counter.finish(near, tokenizer, max_bytes, meta)


def aggregate_run(
    run: str | Path,
    text: str | None = None,
    tokens: int | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    progress: bool = False,
) -> Aggregate:
    """Count a run over its whole validation split or a text, on a GPU where there is one.

    tokens: their number; None: all, at most 2^20. Raises ValueError when there are fewer.
    """
    model, tokenizer = load_with_tokenizer(run)
    meta = results.provenance() | {"l1_coefficient": getattr(model.config, "l1_coefficient", None)}
    if text is None:
        row, _ = results.load_run(run)
        meta["run"] = row["run"]
        # A stream holds out no more than its validations read.
        ids = run_text(run, None if row["source"].startswith("hf:") else 2**62).tokens
    else:
        ids = encode(tokenizer, text)
    if tokens is not None and not 1 <= tokens <= len(ids):
        raise ValueError(f"{tokens} tokens were asked for; there are {len(ids)}")
    ids = ids[: MOST_TOKENS if tokens is None else tokens]
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    options = {"max_bytes": max_bytes, "meta": meta, "progress": progress}
    return aggregate(model, tokenizer, cut(ids, model), **options)


# --- the loss without single neurons


def silenced_loss(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    neurons: Sequence[tuple[int, int]],
    *,
    progress: bool = False,
) -> pd.DataFrame:
    """Silence neurons (layer, neuron) one at a time; return the change of the loss for each.

    Columns: layer, neuron; fires, the tokens that activate it; loss_change in nats per predicted
    token of these sequences of token ids, above 0 where the neuron helps; stderr, its standard
    error from the differences between sequences (NaN for a single one); change_after, the mean
    over the tokens right after a firing (NaN without any).

    Only sequences in which a neuron fires are computed again: it cannot change the others.
    progress: show a bar. Raises IndexError for a neuron that does not exist, ValueError when no
    token is predicted. Ours.
    """
    traced = record(model, sequences)
    predicted = np.bincount(traced.sequence) - 1  # tokens, by sequence
    if not predicted.sum():
        raise ValueError("no token is predicted; give a sequence of at least two tokens")
    rows = []
    for layer, neuron in _with_bar(neurons, "neurons", progress):
        fires = _firings(traced, layer, neuron)
        silent = scaled_logprob(model, sequences, traced, layer, neuron, 0)
        change = pd.Series(traced.logprob.astype(np.float64) - silent)  # of each token's loss
        total = change.groupby(traced.sequence).sum()
        mean = total.sum() / predicted.sum()
        stderr = (total - mean * predicted).sem() * len(total) / predicted.sum()
        after = change.shift(-1).iloc[fires].mean()
        rows.append((layer, neuron, len(fires), mean, stderr, after))
    return pd.DataFrame(rows, columns=COLUMNS)


def scaled_logprob(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    traced: Trace,
    layer: int,
    neuron: int,
    scale: float,
) -> np.ndarray:
    """Return log p of each token of the traced sequences with a neuron scaled, float32 [T].

    scale: the factor of its h, where 0 silences it. NaN for first tokens, as in the trace. Only
    sequences in which the neuron fires are computed again: it cannot change the others. Raises
    IndexError for a neuron that does not exist. Ours.
    """
    with intervene(model, layer, neuron, scale=scale):
        again = np.unique(traced.sequence[_firings(traced, layer, neuron)])
        chosen = [sequences[number] for number in again]
        parts = [logprob.reshape(-1).cpu().numpy() for *_, logprob in passes(model, chosen)]
    result = traced.logprob.copy()
    result[np.isin(traced.sequence, again)] = np.concatenate([traced.logprob[:0], *parts])
    return result


def _firings(traced: Trace, layer: int, neuron: int) -> np.ndarray:
    """Return the tokens that activate a neuron."""
    h = traced.layer(layer)[:, [neuron]]
    return np.flatnonzero(np.diff(h.indptr))
