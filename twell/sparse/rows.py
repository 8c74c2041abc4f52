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
        return sum(part.nbytes for part in self._parts().values())

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return replace(self, **{name: part.to(device) for name, part in self._parts().items()})

    def _parts(self) -> dict[str, Tensor | SparseRows]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v for name, v in parts.items() if isinstance(v, Tensor | SparseRows)}

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
