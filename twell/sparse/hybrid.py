"""The hybrid format of the paper's training step: short rows in ELL, long rows dense."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twell.sparse.rows import (
    DTYPES,
    ELL,
    BufferOverflow,
    SparseRows,
    check_dense,
    check_tensor,
    positions_in_rows,
)


def check_backup(needed: int, ell_width: int, backup_rows: int | None) -> int:
    """Return the rows of a backup, `needed` where None is given; BufferOverflow for too few."""
    if backup_rows is None:
        return needed
    if needed > backup_rows:
        raise BufferOverflow(
            f"{needed} rows have more than ell_width={ell_width} non-zeros, "
            f"but backup_rows={backup_rows}; at least {needed} are needed",
            needed,
        )
    return backup_rows


@dataclass(frozen=True, eq=False)
class Hybrid(SparseRows):
    """Short rows in a compact ELL matrix, long ones in a dense backup matrix, and a vector of where
    each is.

    ell: E compact rows; backup [B, N], 0 where inactive; slot [M] int32: >= 0 is a row of `ell`, <
    0 is backup row ~slot. Unused rows of either hold counts of 0 and zeros. Paper: training, hybrid
    format.

    The pattern, i.e. which entries are active, is part of it, apart from the values: an active
    value may be 0, as in u or in a gradient that was computed at the active entries of g. In `ell`
    the pattern is the counts. In the backup it is the non-zeros of `pattern` [B, N]: the backup of
    the Hybrid that these values were computed for, shared with it, so that it costs no memory; None
    means that of `backup` itself. Raises ValueError or TypeError for parts that do not fit
    together.
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
        """Pack dense [M, N] of bf16, fp16, fp32 or fp64; rows of over `ell_width` non-zeros go to
        the backup.

        `backup_rows` is the capacity of the backup; None takes what is needed. Raises
        BufferOverflow, with the capacity needed, if it is too small.
        """
        check_dense(dense, *DTYPES)
        rows, columns = (dense != 0).nonzero(as_tuple=True)
        return cls._from_entries(
            rows, columns, dense[rows, columns], dense.shape, ell_width, backup_rows
        )

    @classmethod
    def _from_entries(cls, rows, columns, values, shape, ell_width, backup_rows) -> Hybrid:
        """Build from entries sorted by row and in each row by column, none of whose values is 0."""
        compact = torch.bincount(rows, minlength=shape[0]) <= ell_width
        needed = int((~compact).sum())
        backup_rows = check_backup(needed, ell_width, backup_rows)
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
        # The inverse of `slot`: a negative index counts from the end, so backup row b belongs to
        # token[~b].
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
        positions = positions_in_rows(rows, torch.bincount(rows, minlength=self.shape[0]))
        short = slots >= 0
        ell_values = values.new_zeros(self.ell.values.shape)
        ell_values[slots[short], positions[short]] = values[short]
        backup = values.new_zeros(self.backup.shape)
        backup[~slots[~short], columns[~short]] = values[~short]
        return self.with_values(ell_values, backup)

    def transpose(self, ell_width: int | None = None, backup_rows: int | None = None) -> Hybrid:
        """The transpose [N, M] with sizes of its own; the pattern is kept, also where values are 0.

        `ell_width` None takes twice the mean number of entries a row; `backup_rows` as in `pack`.
        More than 65,536 tokens become columns with int32 indices. Raises BufferOverflow as `pack`
        does. Paper: training, weight gradients.
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
