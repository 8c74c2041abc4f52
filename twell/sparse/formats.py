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
  * Non-zeros stand in column order. Indices are column numbers of the whole matrix: 16 bits
    (torch.uint16), so N <= 65,536; int32 in unions. Unused slots hold value +0.0 and index 0.
  * Overflow of TwELL and PackedTwELL: counts are true counts, never clamped. A tile with more
    non-zeros than slots keeps the first ones, and its row becomes an overflow row: the whole dense
    row stands in `overflow_values`, its number in `overflow_rows`, and readers take it from there.
    Nothing is lost.
  * A Hybrid whose backup is too small raises `BufferOverflow` with the number of rows needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell.sparse.hybrid import Hybrid, check_backup
from twell.sparse.rows import (
    DTYPES,
    ELL,
    MAX_COLUMNS,
    BufferOverflow,
    SparseRows,
    check_dense,
    check_tensor,
    pack_rows,
)

__all__ = [
    "DTYPES",
    "ELL",
    "MAX_COLUMNS",
    "BufferOverflow",
    "Hybrid",
    "PackedTwELL",
    "SparseRows",
    "TileUnion",
    "TwELL",
    "check_backup",
    "check_tensor",
]


class _TileFormat(SparseRows):
    """What TwELL and PackedTwELL share: slots per row and tile, and the dense overflow rows beside
    them.
    """

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
                f"tile_n={tile_n} with compression={compression} "
                "leaves a tile no slot for a non-zero; "
                f"expected a compression of at most {tile_n // (1 + cls._words_for_count)}"
            )
        return capacity

    @classmethod
    def _pack_tiles(cls, dense: Tensor, tile_n: int, compression: int):
        """Values and columns (int64) [M, N_T, capacity], true counts int32 [M, N_T] and the
        overflow rows.
        """
        capacity = cls._capacity(tile_n, compression)
        num_rows, n_cols = dense.shape
        num_tiles = -(-n_cols // tile_n)
        rows, columns = (dense != 0).nonzero(as_tuple=True)
        tiles = rows * num_tiles + columns // tile_n
        packed = pack_rows(tiles, columns, dense[rows, columns], num_rows * num_tiles, capacity)
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
    """Tile-wise ELLPACK with S = tile_n // compression slots for each row and tile of `tile_n`
    columns.

    values [M, N_T, S]; indices [M, N_T, S] uint16; counts [M, N_T] int32, never clamped; N_T =
    ceil(N / tile_n); overflow_rows [R] int32, sorted; overflow_values [R, N]; n_cols = N. Raises
    ValueError or TypeError for parts that do not fit together. Paper: TwELL; the overflow rule is
    ours (module docstring).
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
        check_dense(dense, *DTYPES)
        values, columns, *rest = cls._pack_tiles(dense, tile_n, compression)
        return cls(values, columns.to(torch.uint16), *rest, dense.shape[1], tile_n, compression)


@dataclass(frozen=True, eq=False)
class PackedTwELL(_TileFormat):
    """TwELL as one 32-bit matrix: the count of a row's tile, then its S - 1 slots, S = tile_n //
    compression.

    words [M, N_T * S] int32: word 0 of each row's tile is the count, never clamped, each other word
    is the 16 value bits << 16 | the column. overflow_rows [R] int32, sorted; overflow_values [R, N]
    of bf16 or fp16, whose dtype is that of the values; n_cols = N. Raises ValueError or TypeError
    for parts that do not fit together. Paper: TwELL as one matrix.
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

        Raises TypeError for wider types, of which a word has no room for the value, and ValueError
        if `tile_n` is no multiple of `compression` or leaves no slot beside the count.
        """
        check_dense(dense, torch.bfloat16, torch.float16)
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
class TileUnion(SparseRows):
    """For each block of `block_m` tokens the sorted union of their active columns, and dense values
    over it.

    With U_b the union size of block b and B = ceil(M / block_m): offsets [B + 1] int64 are the
    running sums of U_b; indices [total] int32; values [block_m * total], where block b is the
    row-major matrix [block_m, U_b] that begins at block_m * offsets[b]. The last block is filled up
    with rows of zeros. The sizes are the true ones, so nothing can overflow. Raises ValueError or
    TypeError for parts that do not fit together.
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
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64; ValueError for a `block_m` below 1."""
        check_dense(dense, *DTYPES)
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
        """The place in `values` of each union entry and token, [total, block_m]."""
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
        """Columns [U_b] int32 of block b's union and values [rows, U_b], without padding."""
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
