"""Which neurons fire for which token: all of it for a text (Trace), or what a million tokens come to (Aggregate).

A trace keeps, for every token and layer, the active neurons and their values h, signed, with what is needed to read
them: token ids and strings, positions, log-probabilities, and where model and text came from. It grows with the text.

An aggregate has a fixed size and is filled in one pass. It keeps counts that are exact over all tokens (by token id,
position, layer, neuron, block of tokens and TwELL tile) and, for every neuron, a few places in the text: the strongest,
and examples at set quantiles of its values. The words around these places are stored once, however many neurons
point to them. Both answer the same questions (`histogram`, `by_token`, `by_position`, `neurons`, `unions`, `overflows`),
from which analysis makes the same tables.
"""

from __future__ import annotations

import bisect
import functools
import io
import json
import lzma
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from twell import corpus, results
from twell.config import TrainConfig
from twell.model import SparseLlamaForCausalLM, load, silence
from twell.train.text import run_text

ARRAYS = ("token_ids", "logprob", "sequence", "position", "indptr", "indices", "values")


@dataclass
class Trace:
    """T tokens under a model of L layers with N neurons each.

    token_ids int32 [T]; strings [T], the text of each token; logprob float32 [T], natural logarithm of
    p(token | tokens before it in its sequence), NaN for the first of a sequence; sequence int32 [T]; position int32 [T], from 0
    within the sequence; indptr int64 [L * T + 1]: the active neurons of token t in layer l are
    indices[indptr[l * T + t] : indptr[l * T + t + 1]], ascending, uint16, and values float32 are their h.
    A neuron is active where g != 0 (non-gated: h != 0), so that a value can be 0. `meta` says where it came from.
    Raises ValueError when the sizes do not fit together.
    """

    token_ids: np.ndarray
    strings: list[str]
    logprob: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    intermediate_size: int
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        tokens = len(self.token_ids)
        for name in ("strings", "logprob", "sequence", "position"):
            if len(getattr(self, name)) != tokens:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries; the trace has {tokens} tokens"
                )
        rows = len(self.indptr) - 1
        if rows < 0 or (rows % tokens if tokens else rows):
            raise ValueError(
                f"indptr has {len(self.indptr)} entries; expected layers x {tokens} tokens + 1"
            )
        if not len(self.indices) == len(self.values) == self.indptr[-1]:
            raise ValueError(
                f"{len(self.indices)} indices and {len(self.values)} values; indptr ends at {self.indptr[-1]}"
            )
        if len(self.indices) and self.indices.max() >= self.intermediate_size:
            raise ValueError(f"neuron {self.indices.max()} in a layer of {self.intermediate_size}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        return (len(self.indptr) - 1) // max(self.num_tokens, 1)

    def part(self, start: int, stop: int) -> Trace:
        """Tokens `start` to `stop` (not included) as a trace of their own, sequences and positions as they are.

        Raises ValueError unless 0 <= start <= stop <= T.
        """
        tokens = self.num_tokens
        if not 0 <= start <= stop <= tokens:
            raise ValueError(f"tokens {start} to {stop} are no part of a trace of {tokens}")
        rows = [
            slice(n * tokens + start, n * tokens + stop)
            for n in range(self.num_layers if stop > start else 0)
        ]
        counts = [np.diff(self.indptr)[row] for row in rows]
        inside = [slice(self.indptr[row.start], self.indptr[row.stop]) for row in rows]
        return Trace(
            **{
                name: getattr(self, name)[start:stop]
                for name in ("token_ids", "strings", "logprob", "sequence", "position")
            },
            indptr=np.concatenate([[0], *counts]).cumsum(),
            indices=_concatenate([self.indices[entries] for entries in inside], np.uint16),
            values=_concatenate([self.values[entries] for entries in inside], np.float32),
            intermediate_size=self.intermediate_size,
            meta=self.meta,
        )

    def layer(self, layer: int) -> scipy.sparse.csr_array:
        """The values h of one layer, [T, N] float32; what is stored is active, zeros included."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(
                f"layer {layer} does not exist: the trace has layers 0 to {self.num_layers - 1}"
            )
        rows = self.indptr[layer * self.num_tokens : (layer + 1) * self.num_tokens + 1]
        inside = slice(rows[0], rows[-1])
        shape = (self.num_tokens, self.intermediate_size)
        return scipy.sparse.csr_array(
            (self.values[inside], self.indices[inside].astype(np.int32), rows - rows[0]), shape
        )

    def counts(self) -> np.ndarray:
        """Active neurons of each token in each layer, int32 [L, T]."""
        return np.diff(self.indptr).reshape(self.num_layers, self.num_tokens).astype(np.int32)

    def histogram(self) -> np.ndarray:
        """Tokens by their number of active neurons, int64 [L, N + 1]."""
        return np.stack(
            [np.bincount(counts, minlength=self.intermediate_size + 1) for counts in self.counts()]
        )

    def by_token(self) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
        """The V different token ids, ascending; their strings; occurrences [V]; active neurons, summed over layers [V]."""
        ids, first, which = np.unique(self.token_ids, return_index=True, return_inverse=True)
        active = np.bincount(which, weights=self.counts().sum(0)).astype(np.int64)
        return ids.astype(np.int64), [self.strings[at] for at in first], np.bincount(which), active

    def by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens at each of the P positions in a sequence, int64 [P], and their active neurons, int64 [L, P]."""
        active = [np.bincount(self.position, weights=counts) for counts in self.counts()]
        return np.bincount(self.position), np.stack(active).astype(np.int64)

    def neurons(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each neuron: tokens that activate it, int64; sum of its values, float64; largest |value|; all [L, N]."""
        shape = (self.num_layers, self.intermediate_size)
        counts, sums, largest = (
            np.zeros(shape, np.int64),
            np.zeros(shape),
            np.zeros(shape, np.float32),
        )
        for layer in range(self.num_layers):
            h = self.layer(layer)
            counts[layer] = np.bincount(h.indices, minlength=self.intermediate_size)
            sums[layer] = np.bincount(h.indices, weights=h.data, minlength=self.intermediate_size)
            np.maximum.at(largest[layer], h.indices, np.abs(h.data))
        return counts, sums, largest

    def unions(self, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Different neurons in each whole block of consecutive tokens: sum and max over blocks, active entries in them.

        Each int64 [L, len(blocks)]. Blocks start at the first token and pass over the ends of sequences.
        """
        found = np.zeros((3, self.num_layers, len(blocks)), np.int64)
        for layer, counts in enumerate(self.counts()):
            token = np.repeat(np.arange(self.num_tokens), counts)
            neuron = self.layer(layer).indices
            for n, block in enumerate(blocks):
                whole = self.num_tokens // block * block
                kept = token < whole
                pairs = np.unique(token[kept] // block * self.intermediate_size + neuron[kept])
                sizes = np.bincount(pairs // self.intermediate_size, minlength=1)
                found[:, layer, n] = sizes.sum(), sizes.max(), counts[:whole].sum()
        return tuple(found)

    def overflows(self, tile_n: int, compressions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with a tile above tile_n / compression - 1 active neurons, and such tiles; int64 [L, len(compressions)]."""
        num_tiles = -(-self.intermediate_size // tile_n)
        found = np.zeros((2, self.num_layers, len(compressions)), np.int64)
        for layer, counts in enumerate(self.counts()):
            tile = (
                np.repeat(np.arange(self.num_tokens), counts) * num_tiles
                + self.layer(layer).indices // tile_n
            )
            in_tile = np.bincount(tile, minlength=self.num_tokens * num_tiles).reshape(
                self.num_tokens, num_tiles
            )
            for n, compression in enumerate(compressions):
                over = in_tile > tile_n // compression - 1
                found[:, layer, n] = over.any(axis=1).sum(), over.sum()
        return tuple(found)

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        described = {
            "strings": self.strings,
            "intermediate_size": self.intermediate_size,
            "meta": self.meta,
        }
        arrays = {name: getattr(self, name) for name in ARRAYS}
        results.write_atomically(path, _pack(arrays, described, zipfile.ZIP_DEFLATED))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError naming a file that is no trace or not whole."""
        return _unpack(path, cls, ARRAYS, "a trace")


# What an aggregate counts: TwELL's tiles at these compressions (section 3.2), blocks of tokens, octaves of |h|.
TILE_N = 256
COMPRESSIONS = (2, 4, 8, 16)
BLOCKS = (16, 32, 64, 128, 256)  # each a multiple of the first and a divisor of the last
OCTAVES = 12
# What is kept of the places where a neuron fires: (strongest, quantiles, tokens before, tokens after). An aggregate takes
# the first of these rows with which its file stays under its limit. Counts are never reduced.
CONTEXTS = (
    (8, [0.1, 0.3, 0.5, 0.7, 0.9], 12, 4),
    (8, [0.1, 0.5, 0.9], 12, 4),
    (5, [0.1, 0.5, 0.9], 12, 4),
    (3, [0.1, 0.5, 0.9], 12, 4),
    (3, [0.1, 0.5, 0.9], 8, 3),
    (3, [0.5], 8, 3),
    (2, [0.5], 8, 3),
    (2, [0.5], 5, 2),
    (1, [0.5], 5, 2),
    (1, [0.5], 3, 1),
    (1, [], 3, 1),
    (0, [], 0, 0),
)
SAMPLE = (
    32  # firings drawn evenly from all of a neuron's, from which the quantile examples are taken
)
MAX_BYTES = 2_000_000
COUNTED = (
    *(
        "token_ids",
        "occurrences",
        "token_active",
        "lengths",
        "position_active",
        "active_histogram",
        "value_edges",
    ),
    *(
        "value_histogram",
        "value_sum",
        "abs_sum",
        "max_abs",
        "union_sum",
        "union_max",
        "union_active",
    ),
    *("overflow_rows", "overflow_tiles"),
)
PLACES = ("top_at", "top_value", "quantile_at", "quantile_value", "text_at", "text")


@dataclass
class Aggregate:
    """What T tokens in S sequences, under a model of L layers with N neurons each, come to.

    Counts are int64 and exact. Tokens: token_ids [V], those that occur, ascending, with strings [V], occurrences [V] and
    token_active [V], active neurons summed over layers; lengths [S] of the sequences; position_active [L, P], active
    neurons at each position. Layers: active_histogram [L, N + 1], tokens by their number of active neurons.

    Neurons, all [L, N]: value_sum and abs_sum, sums of h and |h|, float32; max_abs float32; and value_histogram [L, N, 24]
    of the signed values, in 12 octaves of either sign that end at the power of two above the largest |h| of all:
    value_edges float32 [25] = -2^e ... -2^(e-11), 0, 2^(e-11) ... 2^e. Both bins beside 0 are half open, [0, .) holds 0
    itself. Their sum is the neuron's firing count; it is dead where that is 0.

    union_sum, union_max and union_active [L, 5] are `unions` of BLOCKS; overflow_rows and overflow_tiles [L, 4] `overflows`
    of COMPRESSIONS at TILE_N. cross_entropy: nats per predicted token (the first of a sequence is not).

    Places: top_at [L, N, K] numbers the tokens with the largest |h|, falling, of equal ones the earliest, and quantile_at
    [L, N, Q] tokens whose h stands at these `quantiles` of the neuron's signed values (of a sample of 32 of its firings
    drawn without regard to their value; of all of them where it fires less often); -1 for none. top_value and
    quantile_value are their h, float32 rounded to 12 significant bits, 0 for none. Tokens are numbered over all sequences;
    text_at ascending [W] and text [W] are the numbers and ids of the tokens that stand at most `before` before and `after`
    after these places, within their sequences. `meta` says where it all came from.
    Raises ValueError when the sizes do not fit together.
    """

    token_ids: np.ndarray
    strings: list[str]
    occurrences: np.ndarray
    token_active: np.ndarray
    lengths: np.ndarray
    position_active: np.ndarray
    active_histogram: np.ndarray
    value_edges: np.ndarray
    value_histogram: np.ndarray
    value_sum: np.ndarray
    abs_sum: np.ndarray
    max_abs: np.ndarray
    union_sum: np.ndarray
    union_max: np.ndarray
    union_active: np.ndarray
    overflow_rows: np.ndarray
    overflow_tiles: np.ndarray
    top_at: np.ndarray
    top_value: np.ndarray
    quantile_at: np.ndarray
    quantile_value: np.ndarray
    text_at: np.ndarray
    text: np.ndarray
    quantiles: list[float]
    before: int
    after: int
    cross_entropy: float
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        layers, neurons = self.value_sum.shape
        top, quantiles = self.top_at.shape[-1], len(self.quantiles)
        expected = {
            **dict.fromkeys(("token_ids", "occurrences", "token_active"), (len(self.strings),)),
            "position_active": (layers, max(self.lengths, default=0)),
            "active_histogram": (layers, neurons + 1),
            "value_edges": (2 * OCTAVES + 1,),
            "value_histogram": (layers, neurons, 2 * OCTAVES),
            **dict.fromkeys(("abs_sum", "max_abs"), (layers, neurons)),
            **dict.fromkeys(("union_sum", "union_max", "union_active"), (layers, len(BLOCKS))),
            **dict.fromkeys(("overflow_rows", "overflow_tiles"), (layers, len(COMPRESSIONS))),
            **dict.fromkeys(("top_at", "top_value"), (layers, neurons, top)),
            **dict.fromkeys(("quantile_at", "quantile_value"), (layers, neurons, quantiles)),
            "text": self.text_at.shape,
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} has the shape {getattr(self, name).shape}; expected {shape}"
                )
        for name, counted in (
            ("occurrences", self.occurrences),
            ("active_histogram", self.active_histogram[:1]),
        ):
            if counted.sum() != self.num_tokens:
                raise ValueError(
                    f"{name} counts {counted.sum()} tokens; the sequences have {self.num_tokens}"
                )

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_layers(self) -> int:
        return self.value_sum.shape[0]

    @property
    def intermediate_size(self) -> int:
        return self.value_sum.shape[1]

    def histogram(self) -> np.ndarray:
        """As Trace.histogram."""
        return self.active_histogram

    def by_token(self) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
        """As Trace.by_token."""
        return self.token_ids, self.strings, self.occurrences, self.token_active

    def by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """As Trace.by_position."""
        ends = np.bincount(self.lengths)[1:]  # sequences whose last position is 0, 1, ...
        return ends[::-1].cumsum()[::-1], self.position_active

    def neurons(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As Trace.neurons, to the precision of float32."""
        return self.value_histogram.sum(-1), self.value_sum.astype(np.float64), self.max_abs

    def unions(self, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As Trace.unions. Raises ValueError for a block size that was not counted."""
        columns = [_counted(block, BLOCKS, "block") for block in blocks]
        return self.union_sum[:, columns], self.union_max[:, columns], self.union_active[:, columns]

    def overflows(self, tile_n: int, compressions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """As Trace.overflows. Raises ValueError for a tile width or compression that was not counted."""
        _counted(tile_n, (TILE_N,), "tile_n")
        columns = [
            _counted(compression, COMPRESSIONS, "compression") for compression in compressions
        ]
        return self.overflow_rows[:, columns], self.overflow_tiles[:, columns]

    def context(self, at: int) -> tuple[int, int, np.ndarray, int]:
        """Of a token in top_at or quantile_at: sequence, position, the ids around it, and which of these it is."""
        starts = self.lengths.cumsum() - self.lengths
        sequence = int(np.searchsorted(starts, at, side="right")) - 1
        first = max(at - self.before, starts[sequence])
        last = min(at + self.after, starts[sequence] + self.lengths[sequence] - 1)
        inside = slice(*np.searchsorted(self.text_at, [first, last + 1]))
        return sequence, int(at - starts[sequence]), self.text[inside], int(at - first)

    def pack(self) -> bytes:
        """The contents of the file that `save` writes."""
        arrays = {name: getattr(self, name) for name in (*COUNTED, *PLACES)}
        # Small numbers, and many of them 1: gaps compress far better than what they lead to.
        arrays["text_at"] = np.diff(self.text_at, prepend=0)
        # One more, so that none (-1) is 0 and unsigned types serve.
        arrays |= {name: arrays[name] + 1 for name in ("top_at", "quantile_at")}
        names = ("strings", "quantiles", "before", "after", "cross_entropy", "meta")
        described = {name: getattr(self, name) for name in names}
        # LZMA: on counts it saves a third of what deflate leaves.
        return _pack(
            {name: _narrow(array) for name, array in arrays.items()}, described, zipfile.ZIP_LZMA
        )

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        results.write_atomically(path, self.pack())

    @classmethod
    def load(cls, path: str | Path) -> Aggregate:
        """Read what `save` wrote. Raises ValueError naming a file that is no aggregate or not whole."""

        def make(**fields) -> Aggregate:
            for name, array in fields.items():
                if isinstance(array, np.ndarray) and array.dtype.kind == "u":
                    fields[name] = array.astype(np.int64)
            fields["text_at"] = fields["text_at"].cumsum()
            fields["top_at"], fields["quantile_at"] = (
                fields["top_at"] - 1,
                fields["quantile_at"] - 1,
            )
            return cls(**fields)

        return _unpack(path, make, (*COUNTED, *PLACES), "an aggregate")


def _counted(value: int, known: Sequence[int], name: str) -> int:
    if value not in known:
        raise ValueError(
            f"{name} {value} was not counted; the aggregate has {', '.join(map(str, known))}"
        )
    return known.index(value)


def _narrow(array: np.ndarray) -> np.ndarray:
    """Counts in the narrowest unsigned type that holds them; anything else as it is."""
    if array.dtype.kind not in "iu":
        return array
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _pack(arrays: dict[str, np.ndarray], described: dict, compression: int) -> bytes:
    """An .npz that numpy.load reads, by one of zipfile's kinds of compression; the same contents give the same bytes."""
    arrays = arrays | {"described": np.frombuffer(json.dumps(described).encode(), np.uint8)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _unpack(path: str | Path, make: Callable, names: Sequence[str], kind: str):
    try:
        with np.load(path) as file:
            described = json.loads(file["described"].tobytes())
            return make(**{name: file[name] for name in names}, **described)
    except (KeyError, ValueError, TypeError, zipfile.BadZipFile, lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"{path} is not {kind}, or it is damaged: {error}; `twell trace` makes it again"
        ) from None


# --- watching a model ---------------------------------------------------------------------------------


@torch.no_grad()
def _watch(
    model: SparseLlamaForCausalLM, sequences: Sequence[Sequence[int]], batch: int, observer
) -> None:
    """Run sequences through the model and tell the observer, for each batch, begin, layer (for each) and end.

    Sequences of one length that follow each other are run together, at most `batch` at a time.
    """
    vocab_size = model.config.vocab_size
    training = model.training
    model.eval()
    hooks = [
        ffn.register_forward_hook(_tell(observer, layer)) for layer, ffn in enumerate(model.ffns)
    ]
    try:
        for group in _same_length(sequences, batch):
            ids = torch.tensor(group, device=model.device)
            if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
                raise ValueError(
                    f"token {wrong} does not exist: the model has tokens 0 to {vocab_size - 1}"
                )
            observer.begin(ids)
            observer.end(_logprob(model, ids))
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)


def _logprob(model: SparseLlamaForCausalLM, ids: Tensor) -> Tensor:
    """log p of each token [B, S] given those before it, fp32; NaN for the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0), value=float("nan"))


def _tell(observer, layer: int):
    def hook(ffn, inputs, _):
        # The activations are computed once more, densely, so that a trace does not depend on the backend.
        g, h = (t.reshape(-1, ffn.intermediate_size) for t in ffn.activations(inputs[0]))
        token, neuron = (g != 0).nonzero(as_tuple=True)
        observer.layer(layer, token, neuron, h[token, neuron].float())

    return hook


def _same_length(sequences: Sequence[Sequence[int]], batch: int) -> Iterator[list[list[int]]]:
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


class _Keep:
    """An observer that keeps everything, for a Trace."""

    def __init__(self, num_layers: int):
        self.layers: list[list[tuple[np.ndarray, ...]]] = [
            [] for _ in range(num_layers)
        ]  # counts, indices, values
        self.logprob: list[np.ndarray] = []

    def begin(self, ids: Tensor) -> None:
        self.num_tokens = ids.numel()

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        counts = torch.bincount(token, minlength=self.num_tokens)
        counts, neuron, value = (t.cpu().numpy() for t in (counts, neuron, value))
        self.layers[layer].append((counts, neuron.astype(np.uint16), value))

    def end(self, logprob: Tensor) -> None:
        self.logprob.append(logprob.reshape(-1).cpu().numpy())


def trace_tokens(
    model: SparseLlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    batch: int = 32,
    meta: dict | None = None,
) -> Trace:
    """Run sequences of token ids through the model, each from position 0, and keep what fires.

    Sequences of one length that follow each other are run together, at most `batch` at a time. Raises ValueError
    for a token that the model does not have.
    """
    kept = _Keep(len(model.ffns))
    _watch(model, sequences, batch, kept)
    counts, indices, values = (
        _concatenate([part[n] for parts in kept.layers for part in parts], dtype)
        for n, dtype in enumerate((np.int64, np.uint16, np.float32))
    )
    token_ids = _concatenate(sequences, np.int32)
    lengths = [len(s) for s in sequences]
    return Trace(
        token_ids=token_ids,
        strings=token_strings(tokenizer, token_ids),
        logprob=_concatenate(kept.logprob, np.float32),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=_concatenate([np.arange(length) for length in lengths], np.int32),
        indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        indices=indices,
        values=values,
        intermediate_size=model.config.intermediate_size,
        meta=(meta or {}) | {"special_ids": sorted(tokenizer.all_special_ids)},
    )


def _concatenate(arrays: Sequence, dtype) -> np.ndarray:
    return np.concatenate(
        [np.zeros(0, dtype), *(np.asarray(array, dtype=dtype) for array in arrays)]
    )


def token_strings(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; a token that is only part of a character shows its bytes, as in <0xF0>."""
    known: dict[int, str] = {}
    for token in np.unique(np.asarray(token_ids)).tolist():
        text = tokenizer.decode([token])
        if "\ufffd" in text:
            text = _bytes_of(tokenizer.convert_ids_to_tokens(token)) or text
        known[token] = text
    return [known[int(token)] for token in token_ids]


def _bytes_of(token: str) -> str | None:
    """The bytes behind a byte-level BPE token, whose alphabet maps every byte to a printable character."""
    alphabet = _byte_alphabet()
    if any(character not in alphabet for character in token):
        return None
    return "".join(f"<0x{alphabet[character]:02X}>" for character in token)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(rest)
    }


def trace_text(
    model: SparseLlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str
) -> Trace:
    """Trace a text, cut into sequences of the model's context length. Raises ValueError for an empty text."""
    return trace_tokens(
        model, tokenizer, cut(encode(tokenizer, text), model), meta=results.provenance()
    )


def trace_validation(run: str | Path) -> Trace:
    """Trace the tokens that a run's evaluation used, so that the counts are those that its log states."""
    row, _ = results.load_run(run)
    config = TrainConfig.load(Path(run) / "config.yaml")
    _, _, blocks = run_text(run)
    model, tokenizer = load_with_tokenizer(run)
    meta = results.provenance() | {"run": row["run"], "l1_coefficient": config.l1_coefficient}
    return trace_tokens(model, tokenizer, blocks.draw(range(len(blocks))).tolist(), meta=meta)


def load_with_tokenizer(
    name_or_path: str | Path, **options
) -> tuple[SparseLlamaForCausalLM, PreTrainedTokenizerBase]:
    """`twell.load`, for what needs words. Raises ValueError where there is no tokenizer."""
    model, tokenizer = load(name_or_path, **options)
    if tokenizer is None:
        raise ValueError(f"{name_or_path} has no tokenizer; put tokenizer.json beside the model")
    return model, tokenizer


def cut(token_ids: Sequence[int], model: SparseLlamaForCausalLM) -> list[Sequence[int]]:
    """Cut tokens into sequences of the model's context length; the last one may be shorter."""
    context = model.config.max_position_embeddings
    return [token_ids[at : at + context] for at in range(0, len(token_ids), context)]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text. Raises ValueError for one that is empty or has lone surrogates."""
    # verbose=False: the length is no reason to warn, `cut` takes texts of any.
    ids = tokenizer(
        corpus.checked_text(text, "the text"), add_special_tokens=False, verbose=False
    ).input_ids
    if not ids:
        raise ValueError("the text is empty; give at least one character")
    return ids


# --- silent neurons -------------------------------------------------------------------------------------


@torch.no_grad()
def silenced_loss(
    model: SparseLlamaForCausalLM,
    sequences: Sequence[Sequence[int]],
    neurons: Sequence[tuple[int, int]],
    *,
    batch: int = 32,
    say: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Return by how much the loss on these sequences of token ids changes when each neuron is silenced, one row a neuron.

    neurons: pairs (layer, neuron), silenced one at a time. Columns: layer, neuron; fires (tokens that activate it);
    loss_change in nats per predicted token, of all of them, above 0 where the neuron helps; stderr, its standard error from the
    differences between sequences (NaN for a single one); change_after, the mean over the tokens that follow a firing
    (NaN without any). Only sequences in which a neuron fires are computed again: the others cannot change. `say` gets a line
    every five seconds. Raises IndexError for a neuron that does not exist, ValueError when no token is predicted. Ours.
    """
    kept = _Keep(len(model.ffns))
    for layer, neuron in neurons:
        with silence(model, layer, neuron):  # which refuses what does not exist, before the work
            pass
    _watch(model, sequences, batch, kept)
    before = np.split(
        _concatenate(kept.logprob, np.float64), np.cumsum([len(s) for s in sequences])[:-1]
    )
    starts = np.cumsum([0, *map(len, sequences)])
    predicted = np.array([len(s) - 1 for s in sequences])
    if not predicted.sum():
        raise ValueError("no token is predicted; give a sequence of at least two tokens")
    training = model.training
    model.eval()
    rows, shown, begun = [], time.perf_counter(), time.perf_counter()
    try:
        for number, (layer, neuron) in enumerate(neurons):
            counts, indices = (
                _concatenate([part[n] for part in kept.layers[layer]], np.int64) for n in range(2)
            )
            fires = np.repeat(np.arange(len(counts)), counts)[indices == neuron]
            where = np.unique(np.searchsorted(starts, fires, side="right") - 1)
            change = np.zeros(starts[-1])
            change[starts[:-1]] = np.nan  # not predicted
            with silence(model, layer, neuron):
                after = _same_length([sequences[n] for n in where], batch)
                after = [
                    row.cpu().numpy()
                    for ids in after
                    for row in _logprob(model, torch.tensor(ids, device=model.device))
                ]
            for n, logprob in zip(where, after, strict=True):
                change[starts[n] : starts[n + 1]] = before[n] - logprob
            by_sequence = np.add.reduceat(np.nan_to_num(change), starts[:-1])
            mean, many = by_sequence.sum() / predicted.sum(), len(sequences)
            spread = np.square(by_sequence - mean * predicted).sum()
            stderr = np.sqrt(spread * many / (many - 1)) / predicted.sum() if many > 1 else np.nan
            following = change[fires[fires + 1 < len(change)] + 1]
            following = following[~np.isnan(following)]
            rows.append(
                (
                    layer,
                    neuron,
                    len(fires),
                    mean,
                    stderr,
                    following.mean() if len(following) else np.nan,
                )
            )
            if say and time.perf_counter() - shown > 5:
                shown = time.perf_counter()
                left = (shown - begun) / (number + 1) * (len(neurons) - number - 1)
                say(
                    f"{number + 1} of {len(neurons)} neurons  {int(left) // 60}:{int(left) % 60:02d} left"
                )
    finally:
        model.train(training)
    return pd.DataFrame(
        rows, columns=["layer", "neuron", "fires", "loss_change", "stderr", "change_after"]
    )


# --- aggregates ---------------------------------------------------------------------------------------


class _Best:
    """Of each group the k entries with the highest score in a stream; of equal scores the earliest.

    What does not exceed the k-th score that a group already has is left out where the entries are; the others are
    gathered in main memory and sorted in once they are as many as all that can be held.
    """

    def __init__(self, groups: int, k: int, device: torch.device | str):
        self.groups, self.k = groups, k
        self.threshold = torch.full((groups,), -torch.inf, device=device)
        self.parts = [
            tuple(np.zeros(0, kind) for kind in (np.int64, np.int64, np.float32, np.float32))
        ]
        self.waiting = 0

    def add(self, group: Tensor, at: Tensor, score: Tensor, value: Tensor) -> None:
        """Entries [n]: int64, int64 ascending from call to call in each group, float32, float32."""
        kept = score > self.threshold[group]
        self.parts.append(tuple(t[kept].cpu().numpy() for t in (group, at, score, value)))
        self.waiting += len(self.parts[-1][0])
        if self.waiting > self.groups * self.k:
            self.merge()

    def merge(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return what is kept: group, rank in it, at, value; sorted by group and rank."""
        group, at, score, value = (np.concatenate(parts) for parts in zip(*self.parts, strict=True))
        order = np.lexsort((at, -score, group))
        rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
        order, rank = order[rank < self.k], rank[rank < self.k]
        self.parts, self.waiting = [(group[order], at[order], score[order], value[order])], 0
        last = order[rank == self.k - 1]
        device = self.threshold.device
        self.threshold[torch.from_numpy(group[last]).to(device)] = torch.from_numpy(score[last]).to(
            device
        )
        return group[order], rank, at[order], value[order]

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return at [groups, k], -1 for none, and value [groups, k], 0 for none."""
        group, rank, at, value = self.merge()
        table = np.full((self.groups, self.k), -1), np.zeros((self.groups, self.k), np.float32)
        table[0][group, rank], table[1][group, rank] = at, value
        return table


class _Count:
    """An observer that keeps an Aggregate's counts, on the model's device, and candidates for its places.

    Its size does not depend on the number of tokens. All counts are sums of integers, so that neither the batches nor the
    device change them; which firings are sampled depends on the seed and on their numbers alone.
    """

    LOWEST, HIGHEST = (
        -31,
        32,
    )  # exponents e of |h| in [2^(e-1), 2^e) that are told apart while counting
    WIDTH = HIGHEST - LOWEST + 1

    def __init__(
        self,
        num_layers: int,
        intermediate_size: int,
        vocab_size: int,
        context: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        neurons = (num_layers, intermediate_size)
        self.num_layers, self.intermediate_size = neurons
        self.num_tokens = 0
        self.num_predicted, self.nll = 0, zeros(dtype=torch.float64)
        self.occurrences, self.token_active = zeros(vocab_size), zeros(vocab_size)
        self.position_active = zeros(num_layers, context)
        self.active_histogram = zeros(num_layers, intermediate_size + 1)
        self.value_histogram = zeros(*neurons, 2 * self.WIDTH)
        self.value_sum, self.abs_sum = (
            zeros(*neurons, dtype=torch.float64),
            zeros(*neurons, dtype=torch.float64),
        )
        self.max_abs = zeros(*neurons, dtype=torch.float32)
        self.union_sum, self.union_max, self.union_active = (
            zeros(num_layers, len(BLOCKS)) for _ in range(3)
        )
        self.overflow_rows, self.overflow_tiles = (
            zeros(num_layers, len(COMPRESSIONS)) for _ in range(2)
        )
        # Of the largest block that is not full yet, by smallest block: which neurons, how many active entries.
        parts = BLOCKS[-1] // BLOCKS[0]
        self.open_neurons = zeros(num_layers, parts, intermediate_size, dtype=torch.bool)
        self.open_active = zeros(num_layers, parts)
        groups = num_layers * intermediate_size
        self.top = _Best(groups, CONTEXTS[0][0], device)
        self.sample = _Best(groups, SAMPLE, device)
        self.random = np.random.default_rng(seed)

    def begin(self, ids: Tensor) -> None:
        self.shape, self.ids = ids.shape, ids.reshape(-1)
        self.occurrences += torch.bincount(self.ids, minlength=len(self.occurrences))
        # One random number a token, for all neurons: a neuron keeps those of its firings with the highest, which is an
        # even sample of them, and neurons share places in the text, whose words are stored once.
        self.keys = torch.from_numpy(self.random.random(len(self.ids)).astype(np.float32)).to(
            ids.device
        )

    def layer(self, layer: int, token: Tensor, neuron: Tensor, value: Tensor) -> None:
        """Active entries of the batch in one layer, [n], by token and neuron: their numbers, int64, and h, float32."""
        num_tokens, size, magnitude = len(self.ids), self.intermediate_size, value.abs()
        active = torch.bincount(token, minlength=num_tokens)
        self.active_histogram[layer] += torch.bincount(active, minlength=size + 1)
        self.token_active.index_add_(0, self.ids, active)
        self.position_active[layer, : self.shape[1]] += active.view(self.shape).sum(0)

        exponent = torch.where(magnitude > 0, torch.frexp(magnitude).exponent, self.LOWEST)
        bins = exponent.clamp(self.LOWEST, self.HIGHEST) - self.LOWEST + self.WIDTH * (value < 0)
        cells = torch.bincount(neuron * 2 * self.WIDTH + bins, minlength=size * 2 * self.WIDTH)
        self.value_histogram[layer] += cells.view(size, -1)
        self.value_sum[layer].index_add_(0, neuron, value.double())
        self.abs_sum[layer].index_add_(0, neuron, magnitude.double())
        self.max_abs[layer].scatter_reduce_(0, neuron, magnitude, "amax")

        num_tiles = -(-size // TILE_N)
        in_tile = torch.bincount(
            token * num_tiles + neuron // TILE_N, minlength=num_tokens * num_tiles
        )
        for n, compression in enumerate(COMPRESSIONS):
            over = in_tile.view(num_tokens, num_tiles) > TILE_N // compression - 1
            self.overflow_rows[layer, n] += over.any(1).sum()
            self.overflow_tiles[layer, n] += over.sum()

        self._unions(layer, token, neuron, active)
        group, at = layer * size + neuron, self.num_tokens + token
        self.top.add(group, at, magnitude, value)
        self.sample.add(group, at, self.keys[token], value)

    def _unions(self, layer: int, token: Tensor, neuron: Tensor, active: Tensor) -> None:
        largest, smallest = BLOCKS[-1], BLOCKS[0]
        start = self.num_tokens % largest
        end = start + len(active)
        parts = (
            (end // largest + 1) * largest // smallest
        )  # whole largest blocks, and one that stays open
        flags = self.open_neurons.new_zeros(parts, self.intermediate_size)
        flags[: len(self.open_neurons[layer])] = self.open_neurons[layer]
        flags[(start + token) // smallest, neuron] = True
        counts = self.open_active.new_zeros(parts)
        counts[: len(self.open_active[layer])] = self.open_active[layer]
        counts.index_add_(
            0, (start + torch.arange(len(active), device=active.device)) // smallest, active
        )
        whole = parts - largest // smallest
        self._blocks(layer, flags[:whole], counts[:whole], end // largest * largest)
        self.open_neurons[layer], self.open_active[layer] = flags[whole:], counts[whole:]

    def _blocks(self, layer: int, flags: Tensor, active: Tensor, num_tokens: int) -> None:
        """Count the whole blocks among tokens whose smallest blocks have these neurons [., N] and active entries [.]."""
        for n, block in enumerate(BLOCKS):
            whole, width = num_tokens // block, block // BLOCKS[0]
            if whole:
                sizes = flags[: whole * width].view(whole, width, -1).any(1).sum(1)
                self.union_sum[layer, n] += sizes.sum()
                self.union_max[layer, n] = torch.maximum(self.union_max[layer, n], sizes.max())
                self.union_active[layer, n] += active[: whole * width].sum()

    def end(self, logprob: Tensor) -> None:
        """The batch's logprob, of the shape of its ids, NaN for what was not predicted."""
        self.num_predicted += logprob[:, 1:].numel()
        self.nll -= logprob[:, 1:].double().sum()
        self.num_tokens += len(self.ids)
        wrong = (~self.abs_sum.isfinite()).any(1).nonzero()
        if len(wrong):
            raise FloatingPointError(
                f"layer {int(wrong[0])} has values that are not finite; they cannot be counted"
            )

    def finish(
        self,
        sequences: Sequence[Sequence[int]],
        tokenizer: PreTrainedTokenizerBase,
        max_bytes: int,
        meta: dict,
    ) -> Aggregate:
        """Return the aggregate of the sequences that went by, with the most places that keep it within max_bytes."""
        for layer in range(self.num_layers):
            self._blocks(
                layer,
                self.open_neurons[layer],
                self.open_active[layer],
                self.num_tokens % BLOCKS[-1],
            )
        arrays = {
            name: value.cpu().numpy()
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        ids = np.flatnonzero(arrays["occurrences"])
        edges, histogram = self._octaves(arrays["value_histogram"], arrays["max_abs"])
        neurons = (self.num_layers, self.intermediate_size)
        top, sample = (
            [t.reshape(*neurons, -1) for t in best.table()] for best in (self.top, self.sample)
        )
        counted = {
            **{name: arrays[name] for name in COUNTED if name in arrays},
            "token_ids": ids,
            "strings": token_strings(tokenizer, ids),
            "occurrences": arrays["occurrences"][ids],
            "token_active": arrays["token_active"][ids],
            "lengths": np.array([len(sequence) for sequence in sequences], np.int64),
            "value_edges": edges,
            "value_histogram": histogram,
            "value_sum": arrays["value_sum"].astype(np.float32),
            "abs_sum": arrays["abs_sum"].astype(np.float32),
            "cross_entropy": float(arrays["nll"]) / self.num_predicted
            if self.num_predicted
            else float("nan"),
        }

        def with_places(row: int) -> Aggregate:
            places = _places(CONTEXTS[row], top, sample, sequences)
            names = ("top", "quantiles", "before", "after")
            kept, wanted = (dict(zip(names, CONTEXTS[n], strict=True)) for n in (row, 0))
            reduced = {name: wanted[name] for name in names if kept[name] != wanted[name]}
            described = {
                "num_tokens": self.num_tokens,
                "max_bytes": max_bytes,
                "kept": kept,
                "reduced": reduced,
            }
            return Aggregate(**counted, **places, meta=meta | described)

        # Each row takes less than the one before, so that the first which fits is found in four trials.
        rows = range(len(CONTEXTS))
        row = bisect.bisect_left(
            rows, True, key=lambda row: len(with_places(row).pack()) <= max_bytes
        )
        if row == len(CONTEXTS):
            size = len(with_places(rows[-1]).pack())
            raise ValueError(f"the counts alone need {size} bytes; max_bytes is {max_bytes}")
        return with_places(row)

    def _octaves(self, wide: np.ndarray, max_abs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The edges and the histogram of the last OCTAVES octaves that occur; what is smaller is in the innermost bins."""
        top = int(np.clip(np.frexp(max_abs.max())[1], self.LOWEST + OCTAVES - 1, self.HIGHEST))
        last = top - self.LOWEST + 1
        first = last - OCTAVES
        sides = []
        for side in (wide[..., : self.WIDTH], wide[..., self.WIDTH :]):
            inner = side[..., : first + 1].sum(-1, keepdims=True)
            sides.append(np.concatenate([inner, side[..., first + 1 : last]], -1))
        edges = 2.0 ** np.arange(top - OCTAVES + 1, top + 1)
        edges = np.concatenate([-edges[::-1], [0], edges]).astype(np.float32)
        return edges, np.concatenate([sides[1][..., ::-1], sides[0]], -1)


def _places(
    row: tuple, top: list[np.ndarray], sample: list[np.ndarray], sequences: Sequence[Sequence[int]]
) -> dict:
    """The fields of an Aggregate that say where neurons fire, by one row of CONTEXTS."""
    strongest, quantiles, before, after = row
    quantile = _at_quantiles(*sample, quantiles)
    at = [top[0][..., :strongest], quantile[0]]
    found = np.unique(np.concatenate([a.reshape(-1) for a in at]))
    text_at, text = _words(found[found >= 0], before, after, sequences)
    return {
        "top_at": at[0],
        "top_value": _rounded(top[1][..., :strongest]),
        "quantile_at": at[1],
        "quantile_value": _rounded(quantile[1]),
        "text_at": text_at,
        "text": text,
        "quantiles": quantiles,
        "before": before,
        "after": after,
    }


def _at_quantiles(
    at: np.ndarray, value: np.ndarray, quantiles: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Of a sample [L, N, R] of firings (at -1: none) those at the quantiles of their values; each at most once."""
    held = (at >= 0).sum(-1, keepdims=True)
    order = np.argsort(np.where(at >= 0, value, np.inf), axis=-1, kind="stable")
    place = np.rint(np.array(quantiles) * (held - 1).clip(0)).astype(np.int64)
    chosen = np.take_along_axis(order, place, -1)
    at, value = np.take_along_axis(at, chosen, -1), np.take_along_axis(value, chosen, -1)
    again = np.zeros(at.shape, bool)
    again[..., 1:] = place[..., 1:] == place[..., :-1]
    return np.where(again, -1, at), np.where(again, 0, value)


def _words(
    at: np.ndarray, before: int, after: int, sequences: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens around these ones (numbers, ascending), each once: their numbers and ids."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    ends = lengths.cumsum()
    sequence = np.searchsorted(ends, at, side="right")
    near = at[:, None] + np.arange(-before, after + 1)
    inside = (near >= (ends - lengths)[sequence, None]) & (near < ends[sequence, None])
    numbers = np.unique(near[inside])
    which = np.searchsorted(ends, numbers, side="right")
    pieces = np.split(numbers, np.flatnonzero(np.diff(which)) + 1)
    texts = [
        np.asarray(sequences[n])[piece - (ends - lengths)[n]]
        for n, piece in zip(np.unique(which), pieces, strict=False)
    ]
    return numbers, _concatenate(texts, np.int64)


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 to 12 significant bits, half away from zero: the rest would not compress and shows nowhere."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x800)) & np.uint32(0xFFFFF000)).view(np.float32)


BATCH_TOKENS = 8192
# What the counts of a neuron take at 1% active, compressed, over 2^20 tokens (53 at half of all active): a model for which this is too
# much is refused before it runs, one that turns out to need more at the end.
BYTES_A_NEURON = 32


def aggregate(
    model: SparseLlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
    meta: dict | None = None,
    say: Callable[[str], None] | None = None,
) -> Aggregate:
    """Run sequences of token ids through the model, each from position 0, and count what fires.

    `seed` decides which firings are sampled; `max_bytes` is what the file may have; `say` gets a line every five seconds.
    Raises ValueError for a token that the model does not have, no tokens at all, and a model whose counts do not fit
    into max_bytes; FloatingPointError for activations that are not finite.
    """
    config, layers = model.config, len(model.ffns)
    needed = layers * config.intermediate_size * BYTES_A_NEURON
    if needed > max_bytes:
        raise ValueError(
            f"{layers} layers of {config.intermediate_size} neurons may need {needed} bytes; max_bytes is {max_bytes}"
        )
    if not len(sequences):
        raise ValueError("there is no sequence to count; give at least one token")
    longest = max(map(len, sequences))
    counter = _Count(
        layers, config.intermediate_size, config.vocab_size, longest, seed=seed, device=model.device
    )
    meta = (meta or {}) | {"context": longest, "seed": seed}
    watched = _progress(sequences, say) if say else sequences
    _watch(model, watched, max(BATCH_TOKENS // longest, 1), counter)
    return counter.finish(sequences, tokenizer, max_bytes, meta)


def _progress(
    sequences: Sequence[Sequence[int]], say: Callable[[str], None]
) -> Iterator[Sequence[int]]:
    total, done = sum(map(len, sequences)), 0
    start = shown = time.perf_counter()
    for sequence in sequences:
        now = time.perf_counter()
        if now - shown > 5 and done:
            speed = done / (now - start)
            minutes, seconds = divmod(int((total - done) / speed), 60)
            say(
                f"{done:,} of {total:,} tokens  {speed:,.0f} tokens/s  {minutes}:{seconds:02d} left"
            )
            shown = now
        yield sequence
        done += len(sequence)


def aggregate_run(
    run: str | Path,
    text: str | None = None,
    tokens: int | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    say: Callable[[str], None] | None = None,
) -> Aggregate:
    """Count what fires in a run, on its GPU where there is one, over its whole validation split or a text.

    `tokens`: so many from the start; None: all, at most 2^20. Raises ValueError when there are fewer than asked for.
    """
    meta = results.provenance()
    if text is None:
        row, _ = results.load_run(run)
        meta |= {"run": row["run"]}
    model, tokenizer = load_with_tokenizer(run)
    if text is None:
        # Of a stream nothing more was held out than evaluations use.
        streamed = TrainConfig.load(Path(run) / "config.yaml").source.startswith("hf:")
        ids = run_text(run, valid_tokens=None if streamed else 2**62)[2].tokens
    else:
        ids = encode(tokenizer, text)
    if tokens is not None and not 1 <= tokens <= len(ids):
        raise ValueError(f"{tokens} tokens were asked for; there are {len(ids)}")
    ids = ids[: 2**20 if tokens is None else tokens]
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    meta |= {"l1_coefficient": model.config.l1_coefficient}
    return aggregate(model, tokenizer, cut(ids, model), max_bytes=max_bytes, meta=meta, say=say)
