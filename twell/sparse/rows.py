"""What all sparse formats share: a list of active entries; and ELL, the simplest of them.

The rules that every format keeps stand in twell/sparse/formats.py.
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
    """Refuse a tensor of another shape (ValueError) or, if dtypes are given, of another dtype
    (TypeError).
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}"
        )


def check_dense(dense: Tensor, *dtypes: torch.dtype) -> None:
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


def positions_in_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Position of each entry in its row, for entries sorted by row; `counts` entries a row."""
    starts = counts.cumsum(0) - counts
    return torch.arange(len(rows), device=rows.device) - starts[rows]


def pack_rows(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, width: int):
    """Move entries, sorted by row, to the front of [num_rows, width]; those past the width just
    counted.
    """
    counts = torch.bincount(rows, minlength=num_rows)
    positions = positions_in_rows(rows, counts)
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
        """Rows and columns [nnz] int64 and values [nnz] of the pattern, by row and in each row by
        column.
        """
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

    values [M, W]; indices [M, W] uint16; counts [M] int32; n_cols = N. Raises ValueError or
    TypeError for parts that do not fit together. Paper: figure 1. (Indices are int32 where n_cols >
    65,536, which only `Hybrid.transpose` makes.)
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
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64 into `width` slots a row; None takes the
        longest row.

        Raises ValueError, naming the longest row, if it has more than `width` non-zeros.
        """
        check_dense(dense, *DTYPES)
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
        values, columns, counts = pack_rows(rows, columns, values, shape[0], width)
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
