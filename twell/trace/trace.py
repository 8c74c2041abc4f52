"""A trace: every active neuron of every token of a text, with its value."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import scipy.sparse

from twell import results
from twell.trace import files

PER_TOKEN = ("token_ids", "strings", "logprob", "sequence", "position")
ARRAYS = ("token_ids", "logprob", "sequence", "position", "indptr", "indices", "values")


@dataclass
class Trace:
    """T tokens, traced through a model of L layers with N neurons each.

    token_ids int32 [T]. strings [T]: the text of each token. sequence int32 [T]. position int32
    [T], from 0 within the sequence. logprob float32 [T]: the natural logarithm of
    p(token | earlier tokens of its sequence), NaN for the first of a sequence.

    indptr int64 [L * T + 1], indices uint16, values float32: token t activates in layer l the
    neurons indices[indptr[l * T + t] : indptr[l * T + t + 1]], ascending; values are their h. A
    neuron is active where g != 0 (not gated: h != 0), so a stored value can be 0.

    meta: where model and text came from. Raises ValueError when the sizes do not fit together.
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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        return (len(self.indptr) - 1) // max(self.num_tokens, 1)

    def part(self, start: int, stop: int) -> Trace:
        """Return tokens `start` to `stop` (not included) as a trace; sequences and positions stay.

        Raises ValueError unless 0 <= start <= stop <= T.
        """
        tokens = self.num_tokens
        if not 0 <= start <= stop <= tokens:
            raise ValueError(f"tokens {start} to {stop} are no part of a trace of {tokens}")
        layers = range(self.num_layers if stop > start else 0)
        rows = [slice(layer * tokens + start, layer * tokens + stop) for layer in layers]
        entries = [slice(self.indptr[row.start], self.indptr[row.stop]) for row in rows]
        # The empty first arrays keep the dtype where no layer is left.
        return Trace(
            **{name: getattr(self, name)[start:stop] for name in PER_TOKEN},
            indptr=np.concatenate([[0], *(np.diff(self.indptr)[row] for row in rows)]).cumsum(),
            indices=np.concatenate([self.indices[:0], *(self.indices[part] for part in entries)]),
            values=np.concatenate([self.values[:0], *(self.values[part] for part in entries)]),
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

    def counts(self) -> np.ndarray:
        """Return the active neurons of each token in each layer, int32 [L, T]."""
        return np.diff(self.indptr).reshape(self.num_layers, self.num_tokens).astype(np.int32)

    def histogram(self) -> np.ndarray:
        """Return tokens by their number of active neurons, int64 [L, N + 1]."""
        bins = self.intermediate_size + 1
        return np.stack([np.bincount(counts, minlength=bins) for counts in self.counts()])

    def by_token(self) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
        """Return the V different token ids, ascending, and of each the string and two counts.

        The counts are its occurrences and its active neurons, summed over layers, int64 [V].
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
        size = self.intermediate_size
        counts = np.zeros((self.num_layers, size), np.int64)
        sums = np.zeros((self.num_layers, size))
        largest = np.zeros((self.num_layers, size), np.float32)
        for layer in range(self.num_layers):
            h = self.layer(layer)
            counts[layer] = np.bincount(h.indices, minlength=size)
            sums[layer] = np.bincount(h.indices, weights=h.data, minlength=size)
            np.maximum.at(largest[layer], h.indices, np.abs(h.data))
        return counts, sums, largest

    def unions(self, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sizes of the unions of whole blocks of consecutive tokens.

        Three arrays, int64 [L, len(blocks)]: the sum and the maximum over blocks, and the active
        entries in these blocks. Blocks start at the first token and cross the ends of sequences.
        """
        totals = np.zeros((3, self.num_layers, len(blocks)), np.int64)
        for layer, counts in enumerate(self.counts()):
            token = np.repeat(np.arange(self.num_tokens), counts)
            neuron = self.layer(layer).indices
            for n, block in enumerate(blocks):
                end = self.num_tokens // block * block
                inside = token < end
                pairs = token[inside] // block * self.intermediate_size + neuron[inside]
                sizes = np.bincount(np.unique(pairs) // self.intermediate_size, minlength=1)
                totals[:, layer, n] = sizes.sum(), sizes.max(), counts[:end].sum()
        return tuple(totals)

    def overflows(self, tile_n: int, compressions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens with an overflowing tile, and overflowing tiles.

        Both int64 [L, len(compressions)]. A tile overflows with more than
        tile_n / compression - 1 active neurons.
        """
        num_tiles = -(-self.intermediate_size // tile_n)
        shape = (self.num_tokens, num_tiles)
        totals = np.zeros((2, self.num_layers, len(compressions)), np.int64)
        for layer, counts in enumerate(self.counts()):
            first = np.repeat(np.arange(self.num_tokens), counts) * num_tiles
            tile = first + self.layer(layer).indices // tile_n
            in_tile = np.bincount(tile, minlength=self.num_tokens * num_tiles).reshape(shape)
            for n, compression in enumerate(compressions):
                over = in_tile > tile_n // compression - 1
                totals[:, layer, n] = over.any(axis=1).sum(), over.sum()
        return tuple(totals)

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        described = {name: getattr(self, name) for name in ("strings", "intermediate_size", "meta")}
        arrays = {name: getattr(self, name) for name in ARRAYS}
        results.write_atomically(path, files.pack(arrays, described, zipfile.ZIP_DEFLATED))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read the file that `save` wrote. Raises ValueError naming a damaged or other file."""
        return files.unpack(path, cls, ARRAYS, "a trace")
