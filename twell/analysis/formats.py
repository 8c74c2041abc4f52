"""Tables of the formats: small matrices cell by cell, and the bytes that a format takes as activations grow denser (Fig. 1).

twell.sparse.formats needs torch, whose import takes seconds, and nothing else of this package does: it is imported where it is
used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def format_cells(dense: np.ndarray, tile_n: int, compression: int, ell_width: int) -> pd.DataFrame:
    """Return a small matrix packed in each format, cell by cell, to be drawn (Fig. 1).

    dense [M, N] float32. Columns: format ("Dense", "ELL", "TwELL", "Hybrid"); part of that format; row and
    slot of the cell within the part; token, the row of `dense` it belongs to; kind ("value", "count",
    "unused", "zero"); label, the column in `dense` of a value, the number in a count, -1 otherwise. TwELL is
    the one-matrix form. Read from the packed objects.
    """
    import torch

    from twell.sparse.formats import ELL, Hybrid, PackedTwELL

    matrix = torch.from_numpy(dense).bfloat16()
    ell = ELL.pack(matrix)
    twell = PackedTwELL.pack(matrix, tile_n, compression)
    hybrid = Hybrid.pack(matrix, ell_width)

    def dense_row(row: torch.Tensor) -> list[tuple[str, int]]:
        return [
            ("value", column) if value else ("zero", -1)
            for column, value in enumerate(row.tolist())
        ]

    def slot_row(indices: torch.Tensor, count: int) -> list[tuple[str, int]]:
        return [
            ("value", i) if slot < count else ("unused", -1)
            for slot, i in enumerate(indices.tolist())
        ]

    def ell_part(ell: ELL) -> list[list[tuple[str, int]]]:
        return [
            [("count", count), *slot_row(i, count)]
            for i, count in zip(ell.indices, ell.counts.tolist(), strict=True)
        ]

    def twell_row(indices: torch.Tensor, counts: torch.Tensor) -> list[tuple[str, int]]:
        tiles = zip(indices, counts.tolist(), strict=True)
        return [cell for i, count in tiles for cell in [("count", count), *slot_row(i, count)]]

    everyone = range(len(dense))
    slots = hybrid.slot.tolist()
    short = [token for token in everyone if slots[token] >= 0]
    long = [token for token in everyone if slots[token] < 0]
    tiles = [twell_row(i, counts) for i, counts in zip(twell.indices, twell.counts, strict=True)]
    parts = [
        ("Dense", "all rows", everyone, [dense_row(row) for row in matrix]),
        ("ELL", "all rows", everyone, ell_part(ell)),
        ("TwELL", "all rows", everyone, tiles),
        (
            "TwELL",
            "overflow rows",
            twell.overflow_rows.tolist(),
            [dense_row(row) for row in twell.overflow_values],
        ),
        ("Hybrid", "ELL rows", short, ell_part(hybrid.ell)),
        (
            "Hybrid",
            "backup rows",
            long,
            [dense_row(hybrid.backup[~slots[token]]) for token in long],
        ),
    ]
    return pd.DataFrame(
        [
            (name, part, row, slot, token, kind, label)
            for name, part, tokens, rows in parts
            for row, (token, cells) in enumerate(zip(tokens, rows, strict=True))
            for slot, (kind, label) in enumerate(cells)
        ],
        columns=["format", "part", "row", "slot", "token", "kind", "label"],
    )


def format_bytes(
    num_tokens: int,
    intermediate_size: int,
    active: Sequence[float],
    tile_n: int = 256,
    compressions: Sequence[int] = (8, 4, 2),
    ell_width: int = 128,
    spread: float = 1.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the bytes of each format as activations grow denser, from packing random bf16 matrices (Fig. 1).

    For each mean number of active neurons in `active`, a matrix [num_tokens, intermediate_size] is drawn
    whose rows are uneven as the paper reports them: their means are lognormal with standard deviation
    `spread` of the logarithm (at 1 the longest of 1,000 rows is about ten times the mean). Which neurons are
    active is independent, as TwELL hopes. Columns: active and active_share as drawn, format, nbytes (of all
    tensors held, overflow and backup rows included), relative (to dense bf16).
    """
    import torch

    from twell.sparse.formats import ELL, Hybrid, PackedTwELL

    generator = np.random.default_rng(seed)
    rows = []
    for mean in active:
        row_means = generator.lognormal(np.log(mean) - spread**2 / 2, spread, (num_tokens, 1))
        mask = (
            generator.random((num_tokens, intermediate_size), dtype=np.float32)
            < row_means / intermediate_size
        )
        dense = torch.from_numpy(mask).bfloat16()
        packed = {
            "Dense": dense,
            "ELL": ELL.pack(dense),
            f"Hybrid, width {ell_width}": Hybrid.pack(dense, ell_width),
        }
        for compression in compressions:
            packed[f"TwELL, C = {compression}"] = PackedTwELL.pack(dense, tile_n, compression)
        drawn = mask.sum() / num_tokens
        for name, form in packed.items():
            rows.append(
                (drawn, drawn / intermediate_size, name, form.nbytes, form.nbytes / dense.nbytes)
            )
    return pd.DataFrame(rows, columns=["active", "active_share", "format", "nbytes", "relative"])
