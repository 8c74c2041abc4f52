"""The two records of activity, a trace and an aggregate, and their files: one compressed .npz."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import pandas as pd
import scipy.sparse

from twell import results

TILE_N, COMPRESSIONS = 256, (2, 4, 8, 16)  # TwELL's tiles, section 3.2
BLOCKS = (16, 32, 64, 128, 256)  # each a multiple of the first and a divisor of the last
OCTAVES = 12  # of |h|
PER_TOKEN = ("token_ids", "strings", "logprob", "sequence", "position")
PLACES = ("top_at", "quantile_at", "together_at")  # -1 for none
# Fields that older files lack: their type, and their shape then, after [L, N].
LATER = {"near": (np.int8, (0, 0)), "together_at": (np.int64, (0,)), "together": (np.float32, (0,))}


class Record:
    """A dataclass of arrays, and of fields that JSON can hold."""

    compression: ClassVar[int]  # one of zipfile's constants

    def __repr__(self) -> str:
        layers = f"{self.num_layers} layers of {self.intermediate_size:,} neurons"
        return f"{type(self).__name__}({self.num_tokens:,} tokens, {layers})"

    @classmethod
    def arrays(cls) -> list[str]:
        """Return the names of the fields that are arrays."""
        return [field.name for field in dataclasses.fields(cls) if field.type == "np.ndarray"]

    def pack(self) -> bytes:
        """Return the .npz that `save` writes; the same contents give the same bytes."""
        arrays = self._to_file({name: getattr(self, name) for name in self.arrays()})
        described = {name: value for name, value in vars(self).items() if name not in arrays}
        arrays["described"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", self.compression) as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    array = np.ascontiguousarray(array)
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        results.write_atomically(path, self.pack())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file that `save` wrote. Raises ValueError naming a damaged or other file."""
        with results.reading(path, "`twell trace` makes it again"), np.load(path) as file:
            described = json.loads(file["described"].tobytes())
            arrays = {name: file[name] for name in cls.arrays() if name in file}
            return cls(**cls._of_file(arrays), **described)

    _to_file = _of_file = staticmethod(dict)  # arrays by name, as files have them


@dataclass(repr=False)
class Trace(Record):
    """T tokens, traced through a model of L layers with N neurons each.

    Token t activates in layer l the neurons indices[indptr[l * T + t] : indptr[l * T + t + 1]],
    ascending; values are their h. A neuron is active where g != 0 (not gated: h != 0), so a stored
    value can be 0.
    """

    compression = zipfile.ZIP_DEFLATED

    token_ids: np.ndarray  # int32 [T]
    strings: list[str]  # [T], the text of each token
    # float32 [T]: log p(token | earlier tokens of its sequence), natural; NaN for the first.
    logprob: np.ndarray
    sequence: np.ndarray  # int32 [T], number of the token's sequence
    position: np.ndarray  # int32 [T], from 0 within the sequence
    indptr: np.ndarray  # int64 [L * T + 1]
    indices: np.ndarray  # uint16, or uint32 where N needs it
    values: np.ndarray  # float32
    intermediate_size: int  # N
    meta: dict = field(default_factory=dict)  # where model and text came from

    @staticmethod
    def entries(
        layers: Sequence[scipy.sparse.csr_array], intermediate_size: int
    ) -> dict[str, np.ndarray]:
        """Return the fields indptr, indices and values for the h of layers, each [T, N]."""
        none = scipy.sparse.csr_array((0, intermediate_size), dtype=np.float32)
        h = scipy.sparse.vstack([none, *layers], format="csr")
        dtype = np.min_scalar_type(max(intermediate_size - 1, 256))
        indptr, indices = h.indptr.astype(np.int64), h.indices.astype(dtype)
        return {"indptr": indptr, "indices": indices, "values": h.data}

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
        layers = [self.layer(layer)[start:stop] for layer in range(self.num_layers)]
        per_token = {name: getattr(self, name)[start:stop] for name in PER_TOKEN}
        entries = self.entries(layers, self.intermediate_size)
        return dataclasses.replace(self, **per_token, **entries)

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


@dataclass(repr=False)
class Aggregate(Record):
    """Counts of T tokens in S sequences, under a model of L layers with N neurons each.

    Counts are int64 and exact. Tokens are numbered over all sequences.
    """

    compression = zipfile.ZIP_LZMA  # on counts it saves a third of the bytes that deflate leaves

    # Tokens
    token_ids: np.ndarray  # [V], the ids that occur, ascending
    strings: list[str]  # [V]
    occurrences: np.ndarray  # [V]
    token_active: np.ndarray  # [V], active neurons summed over layers
    lengths: np.ndarray  # [S], tokens of each sequence
    position_active: np.ndarray  # [L, P], active neurons at each position

    # Neurons and layers
    active_histogram: np.ndarray  # [L, N + 1], tokens by their number of active neurons
    # float32 [25] = -2^e ... -2^(e-11), 0, 2^(e-11) ... 2^e, above the largest |h| of the model
    value_edges: np.ndarray
    # [L, N, 24], signed values h. The two bins beside 0 take all smaller values, the upper one 0
    # itself. A neuron's bins add up to its firings; a dead neuron has none.
    value_histogram: np.ndarray
    value_sum: np.ndarray  # float32 [L, N], sum of h
    abs_sum: np.ndarray  # float32 [L, N], sum of |h|
    max_abs: np.ndarray  # float32 [L, N]
    # [L, 5], one column a size of BLOCKS: of whole blocks of consecutive tokens, which start at
    # the first token and cross the ends of sequences, the sum and the maximum of the neurons that
    # any token of a block activates, and the active entries.
    union_sum: np.ndarray
    union_max: np.ndarray
    union_active: np.ndarray
    # [L, 4], one column a compression of COMPRESSIONS: tokens with an overflowing tile, and
    # overflowing tiles, which have more than TILE_N / compression - 1 active neurons.
    overflow_rows: np.ndarray
    overflow_tiles: np.ndarray

    # Places in the text, -1 for none; values are h, float32, rounded to 12 significant bits
    top_at: np.ndarray  # [L, N, K], tokens with the largest |h|, descending, then the earliest
    top_value: np.ndarray
    # [L, N, Q], tokens at `quantiles` of the neuron's signed values, in an even sample of 32
    # firings, or in all firings of a neuron with fewer.
    quantile_at: np.ndarray
    quantile_value: np.ndarray
    text_at: np.ndarray  # [W], ascending: tokens near a place, in its sequence
    text: np.ndarray  # [W], their ids
    quantiles: list[float]  # Q of them
    before: int  # tokens before a place that are in `text`, where its sequence has them
    after: int
    cross_entropy: float  # nats per predicted token: all but the first of each sequence
    meta: dict = field(default_factory=dict)  # where model and text came from

    # Older files lack these.
    # int8 [L, N, K + Q, before + 1 + after], the neuron's h at the tokens around the places of
    # top_at and then quantile_at, in 127ths of its max_abs. Active entries are at least 1 or -1.
    near: np.ndarray = None
    together_at: np.ndarray = None  # [L, N, J], neurons of the layer that fire with it, or -1
    together: np.ndarray = None  # float32: correlations phi, descending, without first tokens

    def __post_init__(self):
        for name, (dtype, shape) in LATER.items():
            if getattr(self, name) is None:
                setattr(self, name, np.zeros((*self.value_sum.shape, *shape), dtype))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_layers(self) -> int:
        return self.value_sum.shape[0]

    @property
    def intermediate_size(self) -> int:
        return self.value_sum.shape[1]

    def neurons(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the arrays of `Trace.neurons`."""
        return self.value_histogram.sum(-1), self.value_sum.astype(np.float64), self.max_abs

    def context(self, at: int) -> tuple[int, int, np.ndarray, int]:
        """Return the surroundings of the token numbered `at`, of top_at or quantile_at.

        These are its sequence, its position there, the ids around it, and its index among them.
        """
        starts = self.lengths.cumsum() - self.lengths
        sequence = int(np.searchsorted(starts, at, side="right")) - 1
        first = max(at - self.before, starts[sequence])
        last = min(at + self.after, starts[sequence] + self.lengths[sequence] - 1)
        inside = slice(*np.searchsorted(self.text_at, [first, last + 1]))
        return sequence, int(at - starts[sequence]), self.text[inside], int(at - first)

    @staticmethod
    def _to_file(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Gaps are small, and many are 1: they compress far better than the numbers.
        arrays["text_at"] = np.diff(arrays["text_at"], prepend=0)
        # -1 becomes 0, so that unsigned types suffice.
        arrays |= {name: arrays[name] + 1 for name in PLACES}
        arrays["near"] = arrays["near"].view(np.uint8)
        narrow = {name: array for name, array in arrays.items() if array.dtype.kind in "iu"}
        least = {name: np.min_scalar_type(int(a.max(initial=0))) for name, a in narrow.items()}
        return arrays | {name: array.astype(least[name]) for name, array in narrow.items()}

    @staticmethod
    def _of_file(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if "near" in arrays:
            arrays["near"] = arrays["near"].view(np.int8)
        counts = {name: array for name, array in arrays.items() if array.dtype.kind == "u"}
        arrays |= {name: array.astype(np.int64) for name, array in counts.items()}
        arrays["text_at"] = arrays["text_at"].cumsum()
        return arrays | {name: arrays[name] - 1 for name in PLACES if name in arrays}
