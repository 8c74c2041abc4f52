"""An aggregate: exact counts over any number of tokens, and a few places in the text per neuron."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from twell.trace import files

TILE_N, COMPRESSIONS = 256, (2, 4, 8, 16)  # TwELL's tiles, section 3.2
BLOCKS = (16, 32, 64, 128, 256)  # each a multiple of the first and a divisor of the last
OCTAVES = 12  # of |h|
PLACES = ("top_at", "quantile_at", "together_at")  # -1 for none
PLAIN = {"near": np.int8, "together_at": np.int64, "together": np.float32}


@dataclass(repr=False)
class Aggregate(files.Record):
    """Counts of T tokens in S sequences, under a model of L layers with N neurons each.

    Counts are int64 and exact. Tokens are numbered over all sequences. Raises ValueError when
    counts do not add up to the tokens of the sequences.
    """

    # On counts, LZMA saves a third of the bytes that deflate leaves.
    kind, compression = "an aggregate", zipfile.ZIP_LZMA

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
    union_sum: np.ndarray  # [L, 5], as `unions` of BLOCKS
    union_max: np.ndarray
    union_active: np.ndarray
    overflow_rows: np.ndarray  # [L, 4], as `overflows` of COMPRESSIONS at TILE_N
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
        absent = {"near": (0, 0), "together_at": (0,), "together": (0,)}
        for name, shape in absent.items():
            if getattr(self, name) is None:
                setattr(self, name, np.zeros((*self.value_sum.shape, *shape), PLAIN[name]))
        tokens, histogram = self.num_tokens, self.active_histogram[:1]
        for name, counts in (("occurrences", self.occurrences), ("active_histogram", histogram)):
            if (total := counts.sum()) != tokens:
                raise ValueError(f"{name} counts {total} tokens; the sequences have {tokens}")

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
    def to_file(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Gaps are small, and many are 1: they compress far better than the numbers.
        arrays["text_at"] = np.diff(arrays["text_at"], prepend=0)
        # -1 becomes 0, so that unsigned types suffice.
        arrays |= {name: arrays[name] + 1 for name in PLACES}
        arrays["near"] = arrays["near"].view(np.uint8)
        narrow = {name: array for name, array in arrays.items() if array.dtype.kind in "iu"}
        least = {name: np.min_scalar_type(int(a.max(initial=0))) for name, a in narrow.items()}
        return arrays | {name: array.astype(least[name]) for name, array in narrow.items()}

    @staticmethod
    def of_file(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if "near" in arrays:
            arrays["near"] = arrays["near"].view(np.int8)
        counts = {name: array for name, array in arrays.items() if array.dtype.kind == "u"}
        arrays |= {name: array.astype(np.int64) for name, array in counts.items()}
        arrays["text_at"] = arrays["text_at"].cumsum()
        return arrays | {name: arrays[name] - 1 for name in PLACES if name in arrays}


def _column(value: int, counted: Sequence[int], name: str) -> int:
    if value not in counted:
        known = ", ".join(map(str, counted))
        raise ValueError(f"{name} {value} was not counted; the aggregate has {known}")
    return counted.index(value)
