"""An aggregate: exact counts over any number of tokens, and a few places in the text per neuron."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twell import results
from twell.trace import files

TILE_N, COMPRESSIONS = 256, (2, 4, 8, 16)  # TwELL's tiles, section 3.2
BLOCKS = (16, 32, 64, 128, 256)  # each a multiple of the first and a divisor of the last
OCTAVES = 12  # of |h|
COUNTED = (
    *("token_ids", "occurrences", "token_active", "lengths", "position_active"),
    *("active_histogram", "value_edges", "value_histogram", "value_sum", "abs_sum", "max_abs"),
    *("union_sum", "union_max", "union_active", "overflow_rows", "overflow_tiles"),
)
PLACES = ("top_at", "top_value", "quantile_at", "quantile_value", "text_at", "text")
DESCRIBED = ("strings", "quantiles", "before", "after", "cross_entropy", "meta")


@dataclass
class Aggregate:
    """Counts of T tokens in S sequences, under a model of L layers with N neurons each.

    Counts are int64 and exact.

    Tokens: token_ids [V], the ids that occur, ascending; strings [V]; occurrences [V];
    token_active [V], active neurons summed over layers; lengths [S] of the sequences;
    position_active [L, P], active neurons at each position. cross_entropy: nats per predicted
    token (the first of a sequence is not predicted).

    Layers: active_histogram [L, N + 1], tokens by their number of active neurons. union_sum,
    union_max and union_active [L, 5]: `unions` of BLOCKS. overflow_rows and overflow_tiles [L, 4]:
    `overflows` of COMPRESSIONS at TILE_N.

    Neurons, all [L, N]: value_sum and abs_sum, sums of h and |h|, float32; max_abs float32.
    value_histogram [L, N, 24] counts the signed values in 12 octaves of either sign, which end at
    the power of two above the largest |h| of the model: value_edges float32 [25] =
    -2^e ... -2^(e-11), 0, 2^(e-11) ... 2^e. The two bins beside 0 take all smaller values; the
    upper one takes 0 itself. A neuron's bins add up to its firings; a dead neuron has none.

    Places: top_at [L, N, K] are the numbers of the tokens with the largest |h|, descending, of
    equal ones the earliest first. quantile_at [L, N, Q] are the tokens at these `quantiles` of the
    neuron's signed values, taken from a sample of 32 firings drawn whatever their value, or from
    all where a neuron fires less often. -1 stands for none. top_value and quantile_value are
    their h, float32 rounded to 12 significant bits, 0 for none.

    Text: tokens are numbered over all sequences. text_at [W], ascending, and text [W] are numbers
    and ids of the tokens at most `before` before and `after` after a place, in its sequence.

    meta: where model and text came from. Raises ValueError when the sizes do not fit together.
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
        for name, expected in self._shapes().items():
            if (shape := getattr(self, name).shape) != expected:
                raise ValueError(f"{name} has the shape {shape}; expected {expected}")
        tokens, histogram = self.num_tokens, self.active_histogram[:1]
        for name, counts in (("occurrences", self.occurrences), ("active_histogram", histogram)):
            if (total := counts.sum()) != tokens:
                raise ValueError(f"{name} counts {total} tokens; the sequences have {tokens}")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        layers, neurons = self.value_sum.shape
        top, quantiles = self.top_at.shape[-1], len(self.quantiles)
        shapes = {
            "token_ids occurrences token_active": (len(self.strings),),
            "position_active": (layers, max(self.lengths, default=0)),
            "active_histogram": (layers, neurons + 1),
            "value_edges": (2 * OCTAVES + 1,),
            "value_histogram": (layers, neurons, 2 * OCTAVES),
            "abs_sum max_abs": (layers, neurons),
            "union_sum union_max union_active": (layers, len(BLOCKS)),
            "overflow_rows overflow_tiles": (layers, len(COMPRESSIONS)),
            "top_at top_value": (layers, neurons, top),
            "quantile_at quantile_value": (layers, neurons, quantiles),
            "text": self.text_at.shape,
        }
        return {name: shape for names, shape in shapes.items() for name in names.split()}

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
        columns = [_column(block, BLOCKS, "block") for block in blocks]
        return self.union_sum[:, columns], self.union_max[:, columns], self.union_active[:, columns]

    def overflows(self, tile_n: int, compressions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """As Trace.overflows.

        Raises ValueError for a tile width or compression that was not counted.
        """
        _column(tile_n, (TILE_N,), "tile_n")
        columns = [_column(one, COMPRESSIONS, "compression") for one in compressions]
        return self.overflow_rows[:, columns], self.overflow_tiles[:, columns]

    def context(self, at: int) -> tuple[int, int, np.ndarray, int]:
        """Return where the token numbered `at`, of top_at or quantile_at, stands.

        Its sequence, its position there, the ids around it, and its index among these.
        """
        starts = self.lengths.cumsum() - self.lengths
        sequence = int(np.searchsorted(starts, at, side="right")) - 1
        first = max(at - self.before, starts[sequence])
        last = min(at + self.after, starts[sequence] + self.lengths[sequence] - 1)
        inside = slice(*np.searchsorted(self.text_at, [first, last + 1]))
        return sequence, int(at - starts[sequence]), self.text[inside], int(at - first)

    def pack(self) -> bytes:
        """Return the contents of the file that `save` writes."""
        arrays = {name: getattr(self, name) for name in (*COUNTED, *PLACES)}
        # Gaps are small, and many are 1: they compress far better than the numbers themselves.
        arrays["text_at"] = np.diff(self.text_at, prepend=0)
        # None becomes 0, so that unsigned types serve.
        arrays |= {name: arrays[name] + 1 for name in ("top_at", "quantile_at")}
        arrays = {name: _narrow(array) for name, array in arrays.items()}
        described = {name: getattr(self, name) for name in DESCRIBED}
        # On counts, LZMA saves a third of the bytes that deflate leaves.
        return files.pack(arrays, described, zipfile.ZIP_LZMA)

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        results.write_atomically(path, self.pack())

    @classmethod
    def load(cls, path: str | Path) -> Aggregate:
        """Read the file that `save` wrote. Raises ValueError naming a damaged or other file."""
        return files.unpack(path, cls._of_file, (*COUNTED, *PLACES), "an aggregate")

    @classmethod
    def _of_file(cls, **fields) -> Aggregate:
        """Undo `pack`."""
        for name, array in fields.items():
            if isinstance(array, np.ndarray) and array.dtype.kind == "u":
                fields[name] = array.astype(np.int64)
        fields["text_at"] = fields["text_at"].cumsum()
        fields |= {name: fields[name] - 1 for name in ("top_at", "quantile_at")}
        return cls(**fields)


def _column(value: int, counted: Sequence[int], name: str) -> int:
    if value not in counted:
        known = ", ".join(map(str, counted))
        raise ValueError(f"{name} {value} was not counted; the aggregate has {known}")
    return counted.index(value)


def _narrow(array: np.ndarray) -> np.ndarray:
    """Return counts in the narrowest unsigned type that holds them; other arrays as they are."""
    if array.dtype.kind not in "iu":
        return array
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))
