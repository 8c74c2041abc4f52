"""A trace: every active neuron of every token of a text, with its value."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import scipy.sparse

from twell.trace import files

PER_TOKEN = ("token_ids", "strings", "logprob", "sequence", "position")


@dataclass(repr=False)
class Trace(files.Record):
    """T tokens, traced through a model of L layers with N neurons each.

    Token t activates in layer l the neurons indices[indptr[l * T + t] : indptr[l * T + t + 1]],
    ascending; values are their h. A neuron is active where g != 0 (not gated: h != 0), so a stored
    value can be 0. Raises ValueError when the sizes do not fit together.
    """

    kind, compression = "a trace", zipfile.ZIP_DEFLATED

    token_ids: np.ndarray  # int32 [T]
    strings: list[str]  # [T], the text of each token
    # float32 [T]: log p(token | earlier tokens of its sequence), natural; NaN for the first.
    logprob: np.ndarray
    sequence: np.ndarray  # int32 [T], number of the token's sequence
    position: np.ndarray  # int32 [T], from 0 within the sequence
    indptr: np.ndarray  # int64 [L * T + 1]
    indices: np.ndarray  # `Trace.dtype` of N
    values: np.ndarray  # float32
    intermediate_size: int  # N
    meta: dict = field(default_factory=dict)  # where model and text came from

    def __post_init__(self):
        tokens, rows, entries = self.num_tokens, len(self.indptr) - 1, len(self.indices)
        for name in PER_TOKEN:
            if (length := len(getattr(self, name))) != tokens:
                raise ValueError(f"{name} has {length} entries; the trace has {tokens} tokens")
        if rows < 0 or (rows % tokens if tokens else rows):
            raise ValueError(
                f"indptr has {len(self.indptr)} entries; expected layers x {tokens} tokens + 1"
            )
        if not entries == len(self.values) == self.indptr[-1]:
            raise ValueError(
                f"{entries} indices and {len(self.values)} values; indptr ends at {self.indptr[-1]}"
            )
        if entries and self.indices.max() >= self.intermediate_size:
            raise ValueError(f"neuron {self.indices.max()} in a layer of {self.intermediate_size}")

    @staticmethod
    def dtype(intermediate_size: int) -> np.dtype:
        """Return the type of neuron numbers in a layer of this size: uint16, or uint32."""
        return np.min_scalar_type(max(intermediate_size - 1, 256))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        return (len(self.indptr) - 1) // max(self.num_tokens, 1)

    def part(self, start: int, stop: int) -> Trace:
        """Return tokens `start` to `stop` - 1 as a trace, with their sequences and positions.

        Raises ValueError unless 0 <= start <= stop <= T.
        """
        if not 0 <= start <= stop <= (tokens := self.num_tokens):
            raise ValueError(f"tokens {start} to {stop} are no part of a trace of {tokens}")
        layers = range(self.num_layers if stop > start else 0)
        parts = [self.layer(layer)[start:stop] for layer in layers]
        # The empty first arrays set the dtype of a part without tokens.
        indices = np.concatenate([self.indices[:0], *(h.indices for h in parts)])
        return Trace(
            **{name: getattr(self, name)[start:stop] for name in PER_TOKEN},
            indptr=np.concatenate([[0], *(np.diff(h.indptr) for h in parts)]).cumsum(),
            indices=indices.astype(self.indices.dtype),
            values=np.concatenate([self.values[:0], *(h.data for h in parts)]),
            intermediate_size=self.intermediate_size,
            meta=self.meta,
        )

    def layer(self, layer: int) -> scipy.sparse.csr_array:
        """Return the values h of one layer, [T, N] float32; stored entries are active, 0 too."""
        if not 0 <= layer < self.num_layers:
            last = self.num_layers - 1
            raise IndexError(f"layer {layer} does not exist: the trace has layers 0 to {last}")
        rows = self.indptr[layer * self.num_tokens : (layer + 1) * self.num_tokens + 1]
        entries = slice(rows[0], rows[-1])
        shape = (self.num_tokens, self.intermediate_size)
        indices = self.indices[entries].astype(np.int32)
        return scipy.sparse.csr_array((self.values[entries], indices, rows - rows[0]), shape)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each token and layer.

        Columns: token, its number; text; sequence, position; logprob; layer; active, the number of
        active neurons.
        """
        token, layer = np.indices((self.num_tokens, self.num_layers)).reshape(2, -1)
        table = {"token": token, "text": [self.strings[number] for number in token]}
        table |= {name: getattr(self, name)[token] for name in ("sequence", "position", "logprob")}
        return pd.DataFrame(table | {"layer": layer, "active": self.counts()[layer, token]})

    def counts(self) -> np.ndarray:
        """Return the active neurons of each token in each layer, int32 [L, T]."""
        return np.diff(self.indptr).reshape(self.num_layers, self.num_tokens).astype(np.int32)

    def histogram(self) -> np.ndarray:
        """Return tokens by their number of active neurons, int64 [L, N + 1]."""
        bins = self.intermediate_size + 1
        return np.stack([np.bincount(counts, minlength=bins) for counts in self.counts()])

    def by_token(self) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
        """Return the V different token ids, ascending, their strings, and two counts of each.

        The counts are int64 [V]: occurrences, and active neurons summed over layers.
        """
        ids, first, inverse = np.unique(self.token_ids, return_index=True, return_inverse=True)
        active = np.bincount(inverse, weights=self.counts().sum(0)).astype(np.int64)
        strings = [self.strings[token] for token in first]
        return ids.astype(np.int64), strings, np.bincount(inverse), active

    def by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens at each of the P positions, int64 [P], and active neurons, int64 [L, P]."""
        active = [np.bincount(self.position, weights=counts) for counts in self.counts()]
        return np.bincount(self.position), np.stack(active).astype(np.int64)

    def neurons(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays [L, N], one entry a neuron.

        Tokens that activate it, int64; the sum of its values, float64; its largest |value|.
        """
        shape = self.num_layers, self.intermediate_size
        counts, sums, largest = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, "f4")
        for layer in range(self.num_layers):
            h = self.layer(layer)
            counts[layer] = np.bincount(h.indices, minlength=shape[1])
            sums[layer] = np.bincount(h.indices, weights=h.data, minlength=shape[1])
            np.maximum.at(largest[layer], h.indices, np.abs(h.data))
        return counts, sums, largest

    def unions(self, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sizes of the unions of whole blocks of consecutive tokens.

        Three arrays, int64 [L, len(blocks)]: the sum and the maximum over blocks, and the active
        entries in these blocks. Blocks start at the first token and cross the ends of sequences.
        """
        totals = np.zeros((3, self.num_layers, len(blocks)), np.int64)
        for layer, token, neuron in self._entries():
            for n, block in enumerate(blocks):
                inside = token < self.num_tokens // block * block
                pairs = token[inside] // block * self.intermediate_size + neuron[inside]
                sizes = np.bincount(np.unique(pairs) // self.intermediate_size, minlength=1)
                totals[:, layer, n] = sizes.sum(), sizes.max(), inside.sum()
        return tuple(totals)

    def overflows(self, tile_n: int, compressions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens with an overflowing tile, and overflowing tiles.

        Both int64 [L, len(compressions)]. A tile overflows with more than
        tile_n / compression - 1 active neurons.
        """
        num_tiles = -(-self.intermediate_size // tile_n)
        shape = (self.num_tokens, num_tiles)
        totals = np.zeros((2, self.num_layers, len(compressions)), np.int64)
        for layer, token, neuron in self._entries():
            tile = token * num_tiles + neuron // tile_n
            in_tile = np.bincount(tile, minlength=self.num_tokens * num_tiles).reshape(shape)
            for n, compression in enumerate(compressions):
                over = in_tile > tile_n // compression - 1
                totals[:, layer, n] = over.any(axis=1).sum(), over.sum()
        return tuple(totals)

    def _entries(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each layer, and the tokens and neurons of its active entries."""
        for layer, counts in enumerate(self.counts()):
            yield layer, np.repeat(np.arange(self.num_tokens), counts), self.layer(layer).indices
