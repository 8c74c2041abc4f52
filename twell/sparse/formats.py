"""Sparse formats for activations: M tokens (rows) x N neurons (columns), of which few are active.

The idea: after a ReLU most neurons of a token are exactly zero, so what a matmul kernel has just computed can
be stored as its non-zeros alone. The formats differ in what has to be known before a non-zero finds its
place.

  ELL          a whole row: its non-zeros stand at the front of a slot array as wide as the longest row.
  TwELL        only one tile of `tile_n` columns of a row, so a matmul kernel can pack its own output tile.
  PackedTwELL  the same in one 32-bit matrix: count, then value and column together, one coalesced read.
  Hybrid       ELL for the many short rows, dense backup rows for the few long ones (training).
  TileUnion    per block of tokens, the union of their active columns and the dense values over it.

Rules that all of them keep:
  * A non-zero is whatever is `!= 0` in the storage type: NaN is one, -0.0 is not. `unpack` gives the dense
    matrix back bit for bit, NaN payloads included, except that -0.0 comes back as +0.0.
  * Non-zeros stand in column order. Indices are column numbers of the whole matrix, not of the tile: 16 bit
    (torch.uint16), so N <= 65,536; int32 in unions. Unused slots hold value +0.0 and index 0.
  * Overflow of TwELL and PackedTwELL: counts are true counts, never clamped. A tile with more non-zeros than
    it has room for keeps its first ones in the slots, and its row is an overflow row: a row kept whole and
    dense in `overflow_values`, with its number in `overflow_rows`. A reader takes such a row from there.
    Nothing is lost.
  * A Hybrid whose backup buffer is too small is refused with `BufferOverflow`, which says how many rows
    are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

MAX_COLUMNS = 65_536
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class BufferOverflow(ValueError):
    """A buffer of a given capacity is too small; `needed` is the capacity that would do."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Refuse a tensor of another shape (ValueError) or, if dtypes are given, of another dtype (TypeError)."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}"
        )


def _check_dense(dense: Tensor, *dtypes: torch.dtype) -> None:
    if dense.dim() != 2:
        raise ValueError(
            f"dense has shape {tuple(dense.shape)}, expected two dimensions [tokens, neurons]"
        )
    if not 1 <= dense.shape[1] <= MAX_COLUMNS:
        raise ValueError(
            f"dense has {dense.shape[1]} columns, expected 1 to {MAX_COLUMNS} (16-bit indices)"
        )
    if dense.dtype not in dtypes:
        raise TypeError(f"dense has dtype {dense.dtype}, expected {' or '.join(map(str, dtypes))}")


def _index_dtype(n_cols: int) -> torch.dtype:
    # Only a transposed Hybrid, whose columns are tokens, can be too wide for 16 bits.
    return torch.uint16 if n_cols <= MAX_COLUMNS else torch.int32


def _positions(rows: Tensor, counts: Tensor) -> Tensor:
    """Position of each entry in its row, for entries sorted by row, `counts` of them in each row."""
    starts = counts.cumsum(0) - counts
    return torch.arange(len(rows), device=rows.device) - starts[rows]


def _pack_rows(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, width: int):
    """Move entries, sorted by row, to the front of [num_rows, width]; those past the width just counted."""
    counts = torch.bincount(rows, minlength=num_rows)
    positions = _positions(rows, counts)
    fits = positions < width
    place = rows[fits], positions[fits]
    packed_values = values.new_zeros(num_rows, width)
    packed_values[place] = values[fits]
    packed_columns = columns.new_zeros(num_rows, width)
    packed_columns[place] = columns[fits]
    return packed_values, packed_columns, counts.int()


class SparseRows:
    """What all formats share: the list of entries, and what follows from it."""

    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of the values."""
        return self.values.dtype

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and columns [nnz] int64 and values [nnz] of the pattern, by row and in each row by column."""
        raise NotImplementedError

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each row in turn its active columns [count] int64 and their values [count]."""
        rows, columns, values = self.entries()
        counts = torch.bincount(rows, minlength=self.shape[0]).tolist()
        start = 0
        for count in counts:
            yield columns[start : start + count], values[start : start + count]
            start += count

    def unpack(self) -> Tensor:
        """The dense matrix [M, N], bit for bit what was packed, except +0.0 for -0.0."""
        rows, columns, values = self.entries()
        dense = values.new_zeros(self.shape)
        dense[rows, columns] = values
        return dense

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held (one shared with another object counts in both)."""
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(part.nbytes for part in parts if isinstance(part, Tensor | SparseRows))

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{k: v.to(device) for k, v in parts.items() if isinstance(v, Tensor | SparseRows)},
        )


@dataclass(frozen=True, eq=False)
class ELL(SparseRows):
    """Row-wise ELLPACK with a count per row (ELLPACK-R).

    values [M, W]; indices [M, W] uint16; counts [M] int32; n_cols = N. Raises ValueError or TypeError for
    parts that do not fit together. Paper: figure 1. (Indices are int32 where n_cols > 65,536, which only
    `Hybrid.transpose` makes.)
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
    n_cols: int

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise ValueError(f"values has shape {tuple(self.values.shape)}, expected [rows, width]")
        check_tensor("values", self.values, tuple(self.values.shape), *DTYPES)
        check_tensor("indices", self.indices, tuple(self.values.shape), _index_dtype(self.n_cols))
        check_tensor("counts", self.counts, (self.values.shape[0],), torch.int32)

    @classmethod
    def pack(cls, dense: Tensor, width: int | None = None) -> ELL:
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64 into `width` slots a row; None takes the longest row.

        Raises ValueError, naming the longest row, if it has more than `width` non-zeros.
        """
        _check_dense(dense, *DTYPES)
        active = dense != 0
        counts = active.sum(1)
        longest = int(counts.max()) if len(counts) else 0
        if width is None:
            width = longest
        if longest > width:
            raise ValueError(
                f"row {int(counts.argmax())} has {longest} non-zeros, more than width={width}; "
                f"a width of {longest} is needed"
            )
        rows, columns = active.nonzero(as_tuple=True)
        return cls._from_entries(rows, columns, dense[rows, columns], dense.shape, width)

    @classmethod
    def _from_entries(
        cls, rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], width: int
    ):
        values, columns, counts = _pack_rows(rows, columns, values, shape[0], width)
        return cls(values, columns.to(_index_dtype(shape[1])), counts, shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.values.shape[0], self.n_cols

    @property
    def nnz(self) -> Tensor:
        """Number of entries, 0-d int64."""
        return self.counts.sum()

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        slots = torch.arange(self.values.shape[1], device=self.values.device)
        place = (slots < self.counts[:, None]).nonzero(as_tuple=True)
        return place[0], self.indices.long()[place], self.values[place]


class _TileFormat(SparseRows):
    """What TwELL and PackedTwELL share: slots per row and tile, and the dense overflow rows beside them."""

    def _check_common(self, num_rows: int) -> None:
        if not 1 <= self.n_cols <= MAX_COLUMNS:
            raise ValueError(f"n_cols={self.n_cols}, expected 1 to {MAX_COLUMNS} (16-bit indices)")
        self._capacity(self.tile_n, self.compression)
        num_overflow = len(self.overflow_rows)
        if num_overflow > num_rows:
            raise ValueError(
                f"overflow_rows names {num_overflow} rows, expected at most {num_rows}"
            )
        check_tensor("overflow_rows", self.overflow_rows, (num_overflow,), torch.int32)
        check_tensor("overflow_values", self.overflow_values, (num_overflow, self.n_cols))

    @classmethod
    def _capacity(cls, tile_n: int, compression: int) -> int:
        """Non-zeros that a tile has room for; ValueError if the two numbers do not make a tile."""
        if tile_n < 1 or compression < 1 or tile_n % compression:
            raise ValueError(
                f"tile_n={tile_n} must be a positive multiple of compression={compression}"
            )
        capacity = tile_n // compression - cls._words_for_count
        if capacity < 1:
            raise ValueError(
                f"tile_n={tile_n} with compression={compression} leaves a tile no room for a non-zero; "
                f"expected a compression of at most {tile_n // (1 + cls._words_for_count)}"
            )
        return capacity

    @classmethod
    def _pack_tiles(cls, dense: Tensor, tile_n: int, compression: int):
        """Values and columns (int64) [M, N_T, capacity], true counts int32 [M, N_T] and the overflow rows."""
        capacity = cls._capacity(tile_n, compression)
        num_rows, n_cols = dense.shape
        num_tiles = -(-n_cols // tile_n)
        rows, columns = (dense != 0).nonzero(as_tuple=True)
        tiles = rows * num_tiles + columns // tile_n
        packed = _pack_rows(tiles, columns, dense[rows, columns], num_rows * num_tiles, capacity)
        values, columns = (part.view(num_rows, num_tiles, capacity) for part in packed[:2])
        counts = packed[2].view(num_rows, num_tiles)
        overflow_rows = (counts > capacity).any(1).nonzero().flatten()
        overflow_values = dense[overflow_rows]
        overflow_values = overflow_values.masked_fill(overflow_values == 0, 0)  # -0.0 becomes +0.0
        return values, columns, counts, overflow_rows.int(), overflow_values

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.counts.shape[0], self.n_cols

    @property
    def nnz(self) -> Tensor:
        """Number of non-zeros, 0-d int64; those of overflow rows are among them."""
        return self.counts.sum()

    @property
    def overflow(self) -> Tensor:
        """Which rows are overflow rows, [M] bool, told from the counts."""
        return (self.counts > self._capacity(self.tile_n, self.compression)).any(1)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        counts = self.counts.masked_fill(self.overflow[:, None], 0)
        slots = torch.arange(self.values.shape[2], device=counts.device)
        place = (slots < counts[:, :, None]).nonzero(as_tuple=True)
        extra = (self.overflow_values != 0).nonzero(as_tuple=True)
        rows = torch.cat([place[0], self.overflow_rows.long()[extra[0]]])
        columns = torch.cat([self.indices.long()[place], extra[1]])
        values = torch.cat([self.values[place], self.overflow_values[extra]])
        order = rows.argsort(stable=True)
        return rows[order], columns[order], values[order]


@dataclass(frozen=True, eq=False)
class TwELL(_TileFormat):
    """Tile-wise ELLPACK with S = tile_n // compression slots for each row and tile of `tile_n` columns.

    values [M, N_T, S]; indices [M, N_T, S] uint16; counts [M, N_T] int32, never clamped; N_T = ceil(N /
    tile_n); overflow_rows [R] int32, sorted; overflow_values [R, N]; n_cols = N. Raises ValueError or
    TypeError for parts that do not fit together. Paper: TwELL; the overflow rule is ours (module docstring).
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
    overflow_rows: Tensor
    overflow_values: Tensor
    n_cols: int
    tile_n: int = 256
    compression: int = 8

    _words_for_count = 0

    def __post_init__(self) -> None:
        num_rows = self.values.shape[0]
        self._check_common(num_rows)
        shape = (num_rows, -(-self.n_cols // self.tile_n), self.tile_n // self.compression)
        check_tensor("values", self.values, shape, *DTYPES)
        check_tensor("indices", self.indices, shape, torch.uint16)
        check_tensor("counts", self.counts, shape[:2], torch.int32)
        check_tensor(
            "overflow_values", self.overflow_values, self.overflow_values.shape, self.values.dtype
        )

    @classmethod
    def pack(cls, dense: Tensor, tile_n: int = 256, compression: int = 8) -> TwELL:
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64; N need not be a multiple of `tile_n`.

        Raises ValueError if `tile_n` is no multiple of `compression`.
        """
        _check_dense(dense, *DTYPES)
        values, columns, *rest = cls._pack_tiles(dense, tile_n, compression)
        return cls(values, columns.to(torch.uint16), *rest, dense.shape[1], tile_n, compression)


@dataclass(frozen=True, eq=False)
class PackedTwELL(_TileFormat):
    """TwELL as one 32-bit matrix: the count of a row's tile, then its S - 1 slots, S = tile_n // compression.

    words [M, N_T * S] int32: word 0 of each row's tile is the count, never clamped, each other word is the 16
    value bits << 16 | the column. overflow_rows [R] int32, sorted; overflow_values [R, N] of bf16 or fp16,
    whose dtype is that of the values; n_cols = N. Raises ValueError or TypeError for parts that do not fit
    together. Paper: TwELL as one matrix.
    """

    words: Tensor
    overflow_rows: Tensor
    overflow_values: Tensor
    n_cols: int
    tile_n: int = 256
    compression: int = 8

    _words_for_count = 1

    def __post_init__(self) -> None:
        num_rows = self.words.shape[0]
        self._check_common(num_rows)
        num_words = -(-self.n_cols // self.tile_n) * (self.tile_n // self.compression)
        check_tensor("words", self.words, (num_rows, num_words), torch.int32)
        dtypes = torch.bfloat16, torch.float16
        check_tensor("overflow_values", self.overflow_values, self.overflow_values.shape, *dtypes)

    @classmethod
    def pack(cls, dense: Tensor, tile_n: int = 256, compression: int = 8) -> PackedTwELL:
        """Pack dense [M, N] of bf16 or fp16; N need not be a multiple of `tile_n`.

        Raises TypeError for wider types, of which a word has no room for the value, and ValueError if
        `tile_n` is no multiple of `compression` or leaves no slot beside the count.
        """
        _check_dense(dense, torch.bfloat16, torch.float16)
        values, columns, counts, *overflow = cls._pack_tiles(dense, tile_n, compression)
        slots = values.view(torch.int16).int() << 16 | columns.int()
        words = torch.cat([counts[:, :, None], slots], dim=2).flatten(1)
        return cls(words, *overflow, dense.shape[1], tile_n, compression)

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of the values."""
        return self.overflow_values.dtype

    @property
    def _tiles(self) -> Tensor:
        return self.words.unflatten(1, (-1, self.tile_n // self.compression))

    @property
    def values(self) -> Tensor:
        """Values of the slots, decoded, [M, N_T, S - 1]."""
        return (self._tiles[:, :, 1:] >> 16).to(torch.int16).view(self.dtype)

    @property
    def indices(self) -> Tensor:
        """Columns of the slots, decoded, [M, N_T, S - 1] uint16."""
        return (self._tiles[:, :, 1:] & 0xFFFF).to(torch.uint16)

    @property
    def counts(self) -> Tensor:
        """True number of non-zeros of each row's tile, [M, N_T] int32."""
        return self._tiles[:, :, 0]


@dataclass(frozen=True, eq=False)
class Hybrid(SparseRows):
    """Short rows in a compact ELL matrix, long ones in a dense backup matrix, and a vector of where each is.

    ell: E compact rows; backup [B, N], 0 where inactive; slot [M] int32: >= 0 is a row of `ell`, < 0 is
    backup row ~slot. Unused rows of either hold counts of 0 and zeros. Paper: training, hybrid format.

    The pattern, i.e. which entries are active, is part of it, apart from the values: an active value may be
    0, as in u or in a gradient that was computed at the active entries of g. In `ell` the pattern is the
    counts. In the backup it is the non-zeros of `pattern` [B, N]: the backup of the Hybrid that these values
    were computed for, shared with it, so that it costs no memory; None means that of `backup` itself. Raises
    ValueError or TypeError for parts that do not fit together.
    """

    ell: ELL
    backup: Tensor
    slot: Tensor
    pattern: Tensor | None = None

    def __post_init__(self) -> None:
        num_backup = self.backup.shape[0]
        check_tensor("backup", self.backup, (num_backup, self.ell.n_cols), self.ell.values.dtype)
        if self.slot.dim() != 1 or self.slot.shape[0] > num_backup + self.ell.shape[0]:
            raise ValueError(
                f"slot has shape {tuple(self.slot.shape)}, expected one number for each of at most "
                f"{self.ell.shape[0]} ELL rows and {num_backup} backup rows"
            )
        check_tensor("slot", self.slot, tuple(self.slot.shape), torch.int32)
        if self.pattern is not None:
            check_tensor("pattern", self.pattern, tuple(self.backup.shape))

    @classmethod
    def pack(cls, dense: Tensor, ell_width: int = 128, backup_rows: int | None = None) -> Hybrid:
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64; rows of over `ell_width` non-zeros go to the backup.

        `backup_rows` is the capacity of the backup; None takes what is needed. Raises BufferOverflow, with
        the capacity needed, if it is too small.
        """
        _check_dense(dense, *DTYPES)
        rows, columns = (dense != 0).nonzero(as_tuple=True)
        return cls._from_entries(
            rows, columns, dense[rows, columns], dense.shape, ell_width, backup_rows
        )

    @classmethod
    def _from_entries(cls, rows, columns, values, shape, ell_width, backup_rows) -> Hybrid:
        """Build from entries sorted by row and in each row by column, none of whose values is 0."""
        compact = torch.bincount(rows, minlength=shape[0]) <= ell_width
        needed = int((~compact).sum())
        if backup_rows is None:
            backup_rows = needed
        if needed > backup_rows:
            raise BufferOverflow(
                f"{needed} rows have more than ell_width={ell_width} non-zeros, "
                f"but backup_rows={backup_rows}; at least {needed} are needed",
                needed,
            )
        slot = torch.where(compact, compact.cumsum(0) - 1, ~((~compact).cumsum(0) - 1))
        short, slots = compact[rows], slot[rows]
        ell_shape = shape[0] - needed, shape[1]
        ell = ELL._from_entries(slots[short], columns[short], values[short], ell_shape, ell_width)
        backup = values.new_zeros(backup_rows, shape[1])
        backup[~slots[~short], columns[~short]] = values[~short]
        return cls(ell, backup, slot.int())

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.slot.shape[0], self.ell.n_cols

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of the values."""
        return self.backup.dtype

    @property
    def nnz(self) -> Tensor:
        """Number of active entries, values of 0 among them, 0-d int64."""
        return self.ell.nnz + (self.backup_pattern != 0).sum()

    @property
    def backup_pattern(self) -> Tensor:
        """[B, N], not 0 where the backup is active."""
        return self.backup if self.pattern is None else self.pattern

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        ell_rows, ell_columns, ell_values = self.ell.entries()
        extra = (self.backup_pattern != 0).nonzero(as_tuple=True)
        # The inverse of `slot`: a negative index counts from the end, so backup row b belongs to token[~b].
        token = self.slot.new_zeros(self.ell.shape[0] + len(self.backup), dtype=torch.int64)
        token[self.slot.long()] = torch.arange(len(self.slot), device=self.slot.device)
        rows = torch.cat([token[ell_rows], token[~extra[0]]])
        columns = torch.cat([ell_columns, extra[1]])
        values = torch.cat([ell_values, self.backup[extra]])
        order = rows.argsort(stable=True)
        return rows[order], columns[order], values[order]

    def with_values(self, ell_values: Tensor, backup: Tensor) -> Hybrid:
        """The same pattern with other values [E, W] and [B, N], 0 where the pattern is inactive."""
        return Hybrid(replace(self.ell, values=ell_values), backup, self.slot, self.backup_pattern)

    def with_entries(self, values: Tensor) -> Hybrid:
        """The same pattern with other values [nnz], in the order of `entries`."""
        rows, columns, _ = self.entries()
        check_tensor("values", values, (len(rows),))
        slots = self.slot.long()[rows]
        positions = _positions(rows, torch.bincount(rows, minlength=self.shape[0]))
        short = slots >= 0
        ell_values = values.new_zeros(self.ell.values.shape)
        ell_values[slots[short], positions[short]] = values[short]
        backup = values.new_zeros(self.backup.shape)
        backup[~slots[~short], columns[~short]] = values[~short]
        return self.with_values(ell_values, backup)

    def transpose(self, ell_width: int | None = None, backup_rows: int | None = None) -> Hybrid:
        """The transpose [N, M] with sizes of its own; the pattern is kept, also where values are 0.

        `ell_width` None takes twice the mean number of entries a row; `backup_rows` as in `pack`. More than
        65,536 tokens become columns with int32 indices. Raises BufferOverflow as `pack` does. Paper:
        training, weight gradients.
        """
        rows, columns, values = self.entries()
        order = columns.argsort(stable=True)
        shape = self.shape[::-1]
        if ell_width is None:
            ell_width = -(-2 * len(values) // max(1, shape[0]))
        entries = columns[order], rows[order]
        pattern = Hybrid._from_entries(
            *entries, torch.ones_like(values), shape, ell_width, backup_rows
        )
        return pattern.with_entries(values[order])


@dataclass(frozen=True, eq=False)
class TileUnion(SparseRows):
    """For each block of `block_m` tokens the sorted union of their active columns, and dense values over it.

    With U_b the union size of block b and B = ceil(M / block_m): offsets [B + 1] int64 are the running sums
    of U_b; indices [total] int32; values [block_m * total], where block b is the row-major matrix [block_m,
    U_b] that begins at block_m * offsets[b]. The last block is filled up with rows of zeros. The sizes are
    the true ones, so nothing can overflow. Raises ValueError or TypeError for parts that do not fit together.
    """

    values: Tensor
    indices: Tensor
    offsets: Tensor
    n_rows: int
    n_cols: int
    block_m: int = 64

    def __post_init__(self) -> None:
        if self.block_m < 1:
            raise ValueError(f"block_m={self.block_m}, expected at least 1")
        check_tensor("offsets", self.offsets, (-(-self.n_rows // self.block_m) + 1,), torch.int64)
        check_tensor("indices", self.indices, tuple(self.indices.shape[:1]), torch.int32)
        check_tensor("values", self.values, (self.block_m * len(self.indices),), *DTYPES)

    @classmethod
    def pack(cls, dense: Tensor, block_m: int = 64) -> TileUnion:
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64. Raises ValueError if `block_m` is below 1."""
        _check_dense(dense, *DTYPES)
        if block_m < 1:
            raise ValueError(f"block_m={block_m}, expected at least 1")
        n_rows, n_cols = dense.shape
        num_blocks = -(-n_rows // block_m)
        padded = dense.new_zeros(num_blocks * block_m, n_cols)
        padded[:n_rows] = dense.masked_fill(dense == 0, 0)  # -0.0 becomes +0.0
        padded = padded.view(num_blocks, block_m, n_cols)
        active = (padded != 0).any(1)
        blocks, columns = active.nonzero(as_tuple=True)
        offsets = torch.zeros(num_blocks + 1, dtype=torch.int64, device=dense.device)
        offsets[1:] = active.sum(1).cumsum(0)
        values = dense.new_zeros(block_m * len(columns))
        values[cls._places(blocks, offsets, block_m)] = padded[blocks, :, columns]
        return cls(values, columns.int(), offsets, n_rows, n_cols, block_m)

    @staticmethod
    def _places(blocks: Tensor, offsets: Tensor, block_m: int) -> Tensor:
        """Where in `values` each union entry (of block `blocks`) has each token, [total, block_m]."""
        union_size = offsets.diff()[blocks]
        position = torch.arange(len(blocks), device=blocks.device) - offsets[blocks]
        tokens = torch.arange(block_m, device=blocks.device)
        return (block_m * offsets[blocks] + position)[:, None] + union_size[:, None] * tokens

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.n_rows, self.n_cols

    @property
    def nnz(self) -> Tensor:
        """Number of non-zeros, 0-d int64; the zeros within a union are not counted."""
        return (self.values != 0).sum()

    def block(self, b: int) -> tuple[Tensor, Tensor]:
        """Columns [U_b] int32 of block b's union and its values [rows, U_b], without filling rows."""
        start, end = self.offsets[b : b + 2].tolist()
        values = self.values[self.block_m * start : self.block_m * end].view(
            self.block_m, end - start
        )
        return self.indices[start:end], values[: self.n_rows - b * self.block_m]

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        blocks = torch.repeat_interleave(self.offsets.diff())
        values = self.values[self._places(blocks, self.offsets, self.block_m)]
        union_entry, token = (values != 0).nonzero(as_tuple=True)
        rows = blocks[union_entry] * self.block_m + token
        order = rows.argsort(stable=True)
        return (
            rows[order],
            self.indices.long()[union_entry[order]],
            values[union_entry, token][order],
        )
