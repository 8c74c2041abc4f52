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
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_COLUMNS = 65_536
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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


def to_slots(dense: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Move the non-zeros of dense [..., n] to the front of slots [..., width].

    `columns` [..., n] are the numbers of its columns. Returns values, indices (uint16) and counts
    (int32), which include the non-zeros past the width.
    """
    active = dense != 0
    positions = active.cumsum(-1) - 1
    fits = active & (positions < width)
    place = *fits.nonzero(as_tuple=True)[:-1], positions[fits]
    values = dense.new_zeros(*dense.shape[:-1], width)
    values[place] = dense[fits]
    indices = columns.new_zeros(values.shape)
    indices[place] = columns.expand_as(dense)[fits]
    return values, indices.to(torch.uint16), active.sum(-1).int()


def from_slots(values: Tensor, indices: Tensor, counts: Tensor, n_cols: int) -> Tensor:
    """The dense rows [M, N] of entries at the front of slots [M, ..., width]."""
    used = torch.arange(values.shape[-1], device=values.device) < counts[..., None]
    dense = values.new_zeros(len(values), n_cols)
    dense[used.nonzero()[:, 0], indices.long()[used]] = values[used]
    return dense


def _without_sign_of_zero(dense: Tensor) -> Tensor:
    return dense.masked_fill(dense == 0, 0)  # -0.0 becomes +0.0


class SparseRows:
    """What follows from `unpack` in every format."""

    def unpack(self) -> Tensor:
        """The dense matrix [M, N], bit for bit what was packed, except +0.0 for -0.0."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return tuple(self.unpack().shape)

    @property
    def nnz(self) -> Tensor:
        """Number of non-zeros, 0-d int64."""
        return (self.unpack() != 0).sum()

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
        columns = torch.arange(dense.shape[1], device=dense.device)
        slots = to_slots(dense, columns, longest if width is None else width)
        return cls(*slots, dense.shape[1])

    def unpack(self) -> Tensor:
        return from_slots(self.values, self.indices, self.counts, self.n_cols)


@dataclass(frozen=True, eq=False)
class TwELL(SparseRows):
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
        sizes = f"tile_n={tile_n} with compression={compression}"
        if tile_n < 1 or compression < 1 or tile_n % compression:
            raise ValueError(f"{sizes} must be a positive multiple of it")
        capacity = tile_n // compression - cls._words_for_count
        if capacity < 1:
            most = f"expected a compression of at most {tile_n // 2}"
            raise ValueError(f"{sizes} leaves a tile no slot beside the count; {most}")
        n_cols = dense.shape[1]
        tiles = F.pad(dense, (0, -n_cols % tile_n)).unflatten(1, (-1, tile_n))
        columns = torch.arange(tile_n * tiles.shape[1], device=dense.device).view(-1, tile_n)
        values, indices, counts = to_slots(tiles, columns, capacity)
        overflow = (counts > capacity).any(1).nonzero().flatten()
        dense_rows = overflow.int(), _without_sign_of_zero(dense[overflow])
        return cls(values, indices, counts, *dense_rows, n_cols, tile_n, compression)

    def unpack(self) -> Tensor:
        dense = from_slots(self.values, self.indices, self.counts, self.n_cols)
        dense[self.overflow_rows.long()] = self.overflow_values
        return dense


class PackedTwELL(TwELL):
    """TwELL as one 32-bit matrix, `words`: the count of a row's tile, then its S - 1 slots.

    Values are bf16 or fp16. The other fields are the parts of the words; values and indices
    [M, N_T, S - 1]. Paper: TwELL as one matrix.
    """

    _words_for_count = 1

    @classmethod
    def pack(cls, dense: Tensor, tile_n: int = 256, compression: int = 8) -> PackedTwELL:
        """Pack dense [M, N] of bf16 or fp16; N need not be a multiple of `tile_n`.

        Raises TypeError for wider types, whose values do not fit a word, and ValueError if `tile_n`
        is no multiple of `compression` or leaves no slot beside the count.
        """
        check_dense(dense, torch.bfloat16, torch.float16)
        return super().pack(dense, tile_n, compression)

    @property
    def words(self) -> Tensor:
        """[M, N_T * S] int32, S = tile_n // compression.

        Word 0 of each row's tile is the count, each other word the 16 value bits << 16 | the column.
        """
        slots = self.values.view(torch.int16).int() << 16 | self.indices.int()
        return torch.cat([self.counts[:, :, None], slots], dim=2).flatten(1)


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
        padded = F.pad(_without_sign_of_zero(dense), (0, 0, 0, -n_rows % block_m))
        blocks = padded.view(num_blocks, block_m, n_cols)
        active = (blocks != 0).any(1)
        offsets = F.pad(active.sum(1).cumsum(0), (1, 0))
        parts = [block[:, union].flatten() for block, union in zip(blocks, active, strict=True)]
        values = torch.cat([dense.new_zeros(0), *parts])
        return cls(values, active.nonzero()[:, 1].int(), offsets, n_rows, n_cols, block_m)

    def block(self, b: int) -> tuple[Tensor, Tensor]:
        """Columns [U_b] int32 of block b's union and values [rows, U_b], without padding."""
        start, end = self.offsets[b : b + 2].tolist()
        values = self.values[self.block_m * start : self.block_m * end]
        rows = values.view(self.block_m, end - start)[: self.n_rows - b * self.block_m]
        return self.indices[start:end], rows

    def unpack(self) -> Tensor:
        dense = self.values.new_zeros(self.n_rows, self.n_cols)
        for b in range(len(self.offsets) - 1):
            columns, values = self.block(b)
            dense[b * self.block_m :][: len(values), columns.long()] = values
        return dense


@dataclass(frozen=True, eq=False)
class Hybrid(SparseRows):
    """Short rows in a compact ELL matrix, long ones in a dense backup matrix.

    ell: E compact rows; backup [B, N], 0 where inactive; slot [M] int32: >= 0 is a row of `ell`, <
    0 is backup row ~slot. Paper: training, hybrid format, with a backup that always suffices.
    """

    ell: ELL
    backup: Tensor
    slot: Tensor

    @classmethod
    def pack(cls, dense: Tensor, ell_width: int = 128) -> Hybrid:
        """Pack dense [M, N]; rows of over `ell_width` non-zeros go to the backup."""
        check_dense(dense)
        long = (dense != 0).sum(1) > ell_width
        slot = torch.where(long, ~(long.cumsum(0) - 1), (~long).cumsum(0) - 1)
        backup = _without_sign_of_zero(dense[long])
        return cls(ELL.pack(dense[~long], ell_width), backup, slot.int())

    def unpack(self) -> Tensor:
        # A negative slot counts from the end, so backup row b is the last but b.
        return torch.cat([self.ell.unpack(), self.backup.flip(0)])[self.slot.long()]
