"""Sparse formats for activations: M tokens (rows) x N neurons (columns), few of them active.

After a ReLU most neurons of a token are exactly zero. So a matmul kernel can store the non-zeros of
its output alone. The formats differ in how much of a row must be known to place a non-zero.

    ELL          the whole row: non-zeros at the front of a slot array as wide as the longest row
    TwELL        one tile of `tile_n` columns, so a matmul kernel can pack its own output tile
    PackedTwELL  the same in one 32-bit matrix: count, then value and column in one word
    Hybrid       ELL for the many short rows, dense backup rows for the few long ones (training)
    TileUnion    per block of tokens the union of their active columns, and dense values over it

Rules of all formats:
  * A non-zero is any value `!= 0` in the storage type: NaN is one, -0.0 is not. `unpack` returns
    the dense matrix bit for bit, NaN payloads included, except that -0.0 becomes +0.0.
  * `pack` takes dense [M, N] of bf16, fp16, fp32 or fp64, 1 <= N <= 65,536. It raises ValueError or
    TypeError for other inputs.
  * Non-zeros stand in column order. Indices are column numbers of the whole matrix: 16 bits
    (torch.uint16), int32 in unions. Unused slots hold value +0.0 and index 0.
  * Overflow of TwELL and PackedTwELL: counts are true counts, never clamped. A tile with more
    non-zeros than slots keeps the first ones, and its row becomes an overflow row: the whole dense
    row stands in `overflow_values`, its number in `overflow_rows`, and readers take it from there.
    Nothing is lost.
  * A Hybrid whose backup is too small raises `BufferOverflow` with the number of rows needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

MAX_COLUMNS = 65_536
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Entries = tuple[Tensor, Tensor, Tensor]  # rows, columns, values


class BufferOverflow(ValueError):
    """A buffer of a given capacity is too small; `needed` is the capacity that would do."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError for another shape and, if dtypes are given, TypeError for another dtype."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if dtypes and tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected {expected}")


def check_dense(dense: Tensor, *dtypes: torch.dtype) -> None:
    if dense.dim() != 2:
        raise ValueError(f"dense has shape {tuple(dense.shape)}, expected [tokens, neurons]")
    if not 1 <= dense.shape[1] <= MAX_COLUMNS:
        number = f"dense has {dense.shape[1]} columns"
        raise ValueError(f"{number}, expected 1 to {MAX_COLUMNS} (16-bit indices)")
    check_tensor("dense", dense, tuple(dense.shape), *(dtypes or DTYPES))


def active_entries(dense: Tensor) -> Entries:
    """The non-zeros of a dense matrix, by row."""
    rows, columns = (dense != 0).nonzero(as_tuple=True)
    return rows, columns, dense[rows, columns]


def in_slots(values: Tensor, indices: Tensor, counts: Tensor) -> Entries:
    """The entries at the front of slots [rows, ..., slots]."""
    slots = torch.arange(values.shape[-1], device=counts.device)
    place = (slots < counts[..., None]).nonzero(as_tuple=True)
    return place[0], indices.long()[place], values[place]


def by_row(*parts: Entries) -> Entries:
    """Join entries and sort them by row; in each row they keep their order."""
    rows, columns, values = (torch.cat(part) for part in zip(*parts, strict=True))
    order = rows.argsort(stable=True)
    return rows[order], columns[order], values[order]


def positions_in_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Position of each entry in its row, for entries sorted by row; `counts` entries a row."""
    return torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]


def pack_rows(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, width: int) -> Entries:
    """Move entries, sorted by row, to the front of [num_rows, width]: values, columns, counts.

    The counts include the entries past the width.
    """
    counts = torch.bincount(rows, minlength=num_rows)
    positions = positions_in_rows(rows, counts)
    fits = positions < width
    packed = []
    for part in (values, columns):
        slots = part.new_zeros(num_rows, width)
        slots[rows[fits], positions[fits]] = part[fits]
        packed.append(slots)
    return packed[0], packed[1], counts.int()


class SparseRows:
    """What all formats share: the list of entries, and what follows from it. `shape` is (M, N)."""

    shape: tuple[int, int]

    def entries(self) -> Entries:
        """Rows and columns [nnz] int64, values [nnz] of the pattern, by row, then by column."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of the values."""
        return self.values.dtype

    @property
    def nnz(self) -> Tensor:
        """Number of entries, 0-d int64; those of overflow rows are among them."""
        return self.counts.sum()

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each row in turn its active columns [count] int64 and their values [count]."""
        rows, columns, values = self.entries()
        counts = torch.bincount(rows, minlength=self.shape[0]).tolist()
        yield from zip(columns.split(counts), values.split(counts), strict=True)

    def unpack(self) -> Tensor:
        """The dense matrix [M, N], bit for bit what was packed, except +0.0 for -0.0."""
        rows, columns, values = self.entries()
        dense = values.new_zeros(self.shape)
        dense[rows, columns] = values
        return dense

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held (one shared with another object counts in both)."""
        parts = [getattr(self, field.name) for field in fields(self)]
        return sum(part.nbytes for part in parts if isinstance(part, Tensor | SparseRows))


@dataclass(frozen=True, eq=False)
class ELL(SparseRows):
    """Row-wise ELLPACK with a count per row (ELLPACK-R).

    values [M, W]; indices [M, W] uint16; counts [M] int32; n_cols = N. Paper: figure 1.
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
    n_cols: int

    @classmethod
    def pack(cls, dense: Tensor, width: int | None = None) -> ELL:
        """Pack dense [M, N] into `width` slots a row; None takes the longest row.

        Raises ValueError, naming the longest row, if it has more than `width` non-zeros.
        """
        check_dense(dense)
        counts = (dense != 0).sum(1)
        longest = int(counts.max()) if len(counts) else 0
        if width is not None and longest > width:
            raise ValueError(
                f"row {int(counts.argmax())} has {longest} non-zeros, more than width={width}; "
                f"a width of {longest} is needed"
            )
        return cls._from_entries(
            active_entries(dense), dense.shape, longest if width is None else width
        )

    @classmethod
    def _from_entries(cls, entries: Entries, shape: tuple[int, int], width: int) -> ELL:
        values, columns, counts = pack_rows(*entries, shape[0], width)
        return cls(values, columns.to(torch.uint16), counts, shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.n_cols

    def entries(self) -> Entries:
        return in_slots(self.values, self.indices, self.counts)


def _without_sign_of_zero(dense: Tensor) -> Tensor:
    return dense.masked_fill(dense == 0, 0)  # -0.0 becomes +0.0


class _TileFormat(SparseRows):
    """What TwELL and PackedTwELL share: slots per row and tile, and the dense overflow rows."""

    @classmethod
    def _capacity(cls, tile_n: int, compression: int) -> int:
        """Non-zeros that a tile can hold; ValueError if the two numbers do not make a tile."""
        sizes = f"tile_n={tile_n} with compression={compression}"
        if tile_n < 1 or compression < 1 or tile_n % compression:
            raise ValueError(f"{sizes} must be a positive multiple of it")
        capacity = tile_n // compression - cls._words_for_count
        if capacity < 1:
            most = tile_n // (1 + cls._words_for_count)
            raise ValueError(
                f"{sizes} leaves a tile no slot for a non-zero; "
                f"expected a compression of at most {most}"
            )
        return capacity

    @classmethod
    def _pack_tiles(cls, dense: Tensor, tile_n: int, compression: int) -> tuple[Tensor, ...]:
        """Values and columns (int64) [M, N_T, capacity], counts [M, N_T], and the overflow rows."""
        capacity = cls._capacity(tile_n, compression)
        num_rows, num_tiles = dense.shape[0], -(-dense.shape[1] // tile_n)
        rows, columns, values = active_entries(dense)
        tiles = rows * num_tiles + columns // tile_n
        packed = pack_rows(tiles, columns, values, num_rows * num_tiles, capacity)
        values, columns = (part.view(num_rows, num_tiles, capacity) for part in packed[:2])
        counts = packed[2].view(num_rows, num_tiles)
        overflow = (counts > capacity).any(1).nonzero().flatten()
        return values, columns, counts, overflow.int(), _without_sign_of_zero(dense[overflow])

    @property
    def shape(self) -> tuple[int, int]:
        return self.counts.shape[0], self.n_cols

    @property
    def overflow(self) -> Tensor:
        """Which rows are overflow rows, [M] bool, told from the counts."""
        return (self.counts > self._capacity(self.tile_n, self.compression)).any(1)

    def entries(self) -> Entries:
        counts = self.counts.masked_fill(self.overflow[:, None], 0)
        extra, *rest = active_entries(self.overflow_values)
        slots = in_slots(self.values, self.indices, counts)
        return by_row(slots, (self.overflow_rows.long()[extra], *rest))


@dataclass(frozen=True, eq=False)
class TwELL(_TileFormat):
    """Tile-wise ELLPACK: S = tile_n // compression slots for each row and tile of `tile_n` columns.

    values [M, N_T, S]; indices [M, N_T, S] uint16; counts [M, N_T] int32, never clamped; N_T =
    ceil(N / tile_n); overflow_rows [R] int32, sorted; overflow_values [R, N]; n_cols = N. Paper:
    TwELL; the overflow rule is ours (module docstring).
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

    @classmethod
    def pack(cls, dense: Tensor, tile_n: int = 256, compression: int = 8) -> TwELL:
        """Pack dense [M, N]; N need not be a multiple of `tile_n`.

        Raises ValueError if `tile_n` is no multiple of `compression`.
        """
        check_dense(dense)
        values, columns, *rest = cls._pack_tiles(dense, tile_n, compression)
        return cls(values, columns.to(torch.uint16), *rest, dense.shape[1], tile_n, compression)


@dataclass(frozen=True, eq=False)
class PackedTwELL(_TileFormat):
    """TwELL as one 32-bit matrix: the count of a row's tile, then its S - 1 slots.

    words [M, N_T * S] int32, S = tile_n // compression: word 0 of each row's tile is the count,
    never clamped, each other word is the 16 value bits << 16 | the column. overflow_rows [R] int32,
    sorted; overflow_values [R, N] of bf16 or fp16, the dtype of the values; n_cols = N. Paper:
    TwELL as one matrix.
    """

    words: Tensor
    overflow_rows: Tensor
    overflow_values: Tensor
    n_cols: int
    tile_n: int = 256
    compression: int = 8

    _words_for_count = 1

    @classmethod
    def pack(cls, dense: Tensor, tile_n: int = 256, compression: int = 8) -> PackedTwELL:
        """Pack dense [M, N] of bf16 or fp16; N need not be a multiple of `tile_n`.

        Raises TypeError for wider types, whose values do not fit a word, and ValueError if `tile_n`
        is no multiple of `compression` or leaves no slot beside the count.
        """
        check_dense(dense, torch.bfloat16, torch.float16)
        values, columns, counts, *overflow = cls._pack_tiles(dense, tile_n, compression)
        slots = values.view(torch.int16).int() << 16 | columns.int()
        words = torch.cat([counts[:, :, None], slots], dim=2).flatten(1)
        return cls(words, *overflow, dense.shape[1], tile_n, compression)

    @property
    def dtype(self) -> torch.dtype:
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
class TileUnion(SparseRows):
    """For each block of tokens the sorted union of their active columns, and dense values over it.

    With U_b the union size of block b and B = ceil(M / block_m): offsets [B + 1] int64 are the
    running sums of U_b; indices [total] int32; values [block_m * total], where block b is the
    row-major matrix [block_m, U_b] that begins at block_m * offsets[b]. The last block is filled up
    with rows of zeros. The sizes are the true ones, so nothing can overflow.
    """

    values: Tensor
    indices: Tensor
    offsets: Tensor
    n_rows: int
    n_cols: int
    block_m: int = 64

    @classmethod
    def pack(cls, dense: Tensor, block_m: int = 64) -> TileUnion:
        """Pack dense [M, N]; ValueError for a `block_m` below 1."""
        check_dense(dense)
        if block_m < 1:
            raise ValueError(f"block_m={block_m}, expected at least 1")
        n_rows, n_cols = dense.shape
        num_blocks = -(-n_rows // block_m)
        padded = dense.new_zeros(num_blocks * block_m, n_cols)
        padded[:n_rows] = _without_sign_of_zero(dense)
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
        """The place in `values` of each union entry and token, [total, block_m]."""
        sizes, tokens = offsets.diff(), torch.arange(block_m, device=blocks.device)
        starts = block_m * offsets[blocks] + positions_in_rows(blocks, sizes)
        return starts[:, None] + sizes[blocks][:, None] * tokens

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, self.n_cols

    @property
    def nnz(self) -> Tensor:
        """Number of non-zeros, 0-d int64; the zeros within a union are not counted."""
        return (self.values != 0).sum()

    def block(self, b: int) -> tuple[Tensor, Tensor]:
        """Columns [U_b] int32 of block b's union and values [rows, U_b], without padding."""
        start, end = self.offsets[b : b + 2].tolist()
        values = self.values[self.block_m * start : self.block_m * end]
        rows = values.view(self.block_m, end - start)[: self.n_rows - b * self.block_m]
        return self.indices[start:end], rows

    def entries(self) -> Entries:
        blocks = torch.repeat_interleave(self.offsets.diff())
        values = self.values[self._places(blocks, self.offsets, self.block_m)]
        entry, token, values = active_entries(values)
        return by_row((blocks[entry] * self.block_m + token, self.indices.long()[entry], values))


@dataclass(frozen=True, eq=False)
class Hybrid(SparseRows):
    """Short rows in a compact ELL matrix, long ones in a dense backup matrix.

    ell: E compact rows; backup [B, N], 0 where inactive; slot [M] int32: >= 0 is a row of `ell`, <
    0 is backup row ~slot. Unused rows of either hold counts of 0 and zeros. Paper: training, hybrid
    format.
    """

    ell: ELL
    backup: Tensor
    slot: Tensor

    @classmethod
    def pack(cls, dense: Tensor, ell_width: int = 128, backup_rows: int | None = None) -> Hybrid:
        """Pack dense [M, N]; rows of over `ell_width` non-zeros go to the backup.

        `backup_rows` is the capacity of the backup; None takes what is needed. Raises
        BufferOverflow, with the capacity needed, if it is too small.
        """
        check_dense(dense)
        shape = dense.shape
        rows, columns, values = active_entries(dense)
        compact = torch.bincount(rows, minlength=shape[0]) <= ell_width
        needed = int((~compact).sum())
        backup_rows = needed if backup_rows is None else backup_rows
        if needed > backup_rows:
            raise BufferOverflow(
                f"{needed} rows have more than ell_width={ell_width} non-zeros, "
                f"but backup_rows={backup_rows}; at least {needed} are needed",
                needed,
            )
        slot = torch.where(compact, compact.cumsum(0) - 1, ~((~compact).cumsum(0) - 1))
        short, slots = compact[rows], slot[rows]
        ell_entries = slots[short], columns[short], values[short]
        ell = ELL._from_entries(ell_entries, (shape[0] - needed, shape[1]), ell_width)
        backup = values.new_zeros(backup_rows, shape[1])
        backup[~slots[~short], columns[~short]] = values[~short]
        return cls(ell, backup, slot.int())

    @property
    def shape(self) -> tuple[int, int]:
        return self.slot.shape[0], self.ell.n_cols

    @property
    def dtype(self) -> torch.dtype:
        return self.backup.dtype

    @property
    def nnz(self) -> Tensor:
        """Number of non-zeros, 0-d int64."""
        return self.ell.nnz + (self.backup != 0).sum()

    def entries(self) -> Entries:
        ell_rows, *ell_rest = self.ell.entries()
        extra, *rest = active_entries(self.backup)
        # The inverse of `slot`: a negative index counts from the end, so backup row b belongs to
        # token[~b].
        token = self.slot.new_zeros(self.ell.shape[0] + len(self.backup), dtype=torch.int64)
        token[self.slot.long()] = torch.arange(len(self.slot), device=self.slot.device)
        return by_row((token[ell_rows], *ell_rest), (token[~extra], *rest))
