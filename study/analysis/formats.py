"""Tables of the formats: small matrices cell by cell, and their bytes by activity (Fig. 1)."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from twell.sparse.formats import ELL, Hybrid, PackedTwELL


def format_cells(dense: np.ndarray, tile_n: int, compression: int, ell_width: int) -> pd.DataFrame:
    """Return a small matrix packed in each format, cell by cell, to be drawn (Fig. 1).

    dense [M, N] float32. row and slot: of the cell within its part; token: its row of `dense`;
    kind: "value", "count", "unused" or "zero"; label: the column in `dense` of a value, or a count.
    """
    matrix = torch.from_numpy(dense).bfloat16()
    ell, hybrid = ELL.pack(matrix), Hybrid.pack(matrix, ell_width)
    twell = PackedTwELL.pack(matrix, tile_n, compression)

    def dense_row(row: torch.Tensor) -> list[tuple[str, int]]:
        return [("value", n) if value else ("zero", -1) for n, value in enumerate(row.tolist())]

    def packed_row(indices: torch.Tensor, counts: torch.Tensor) -> list[tuple[str, int]]:
        """Tiles of a count and its slots; indices [tiles, slots], counts [tiles]."""
        cells = []
        for tile, count in zip(indices.tolist(), counts.tolist(), strict=True):
            used = [("value", column) for column in tile[:count]]
            cells += [("count", count), *used, *[("unused", -1)] * (len(tile) - count)]
        return cells

    def packed_rows(indices: torch.Tensor, counts: torch.Tensor) -> list[list[tuple[str, int]]]:
        return [packed_row(*row) for row in zip(indices, counts, strict=True)]

    everyone, slots = list(range(len(dense))), hybrid.slot.tolist()
    overflow = [dense_row(row) for row in twell.overflow_values]
    fits = [token for token in everyone if slots[token] >= 0]
    backed_up = [token for token in everyone if slots[token] < 0]
    compact = packed_rows(hybrid.ell.indices[:, None], hybrid.ell.counts[:, None])
    backup = [dense_row(hybrid.backup[~slots[token]]) for token in backed_up]
    parts = [
        ("Dense", "all rows", everyone, [dense_row(row) for row in matrix]),
        ("ELL", "all rows", everyone, packed_rows(ell.indices[:, None], ell.counts[:, None])),
        ("TwELL", "all rows", everyone, packed_rows(twell.indices, twell.counts)),
        ("TwELL", "overflow rows", twell.overflow_rows.tolist(), overflow),
        ("Hybrid", "ELL rows", fits, compact),
        ("Hybrid", "backup rows", backed_up, backup),
    ]
    rows = [
        (name, part, row, slot, token, kind, label)
        for name, part, tokens, rows in parts
        for row, (token, cells) in enumerate(zip(tokens, rows, strict=True))
        for slot, (kind, label) in enumerate(cells)
    ]
    columns = ["format", "part", "row", "slot", "token", "kind", "label"]
    return pd.DataFrame(rows, columns=columns)


def format_bytes(
    num_tokens: int, intermediate_size: int, active: Sequence[float], tile_n: int, ell_width: int
) -> pd.DataFrame:
    """Return the bytes of each format by activity, from packing random bf16 matrices (Fig. 1).

    active: mean numbers of active neurons. Rows are uneven, as the paper reports them: their means
    are lognormal, with a standard deviation of 1 of the logarithm. nbytes is of all tensors,
    relative is to dense bf16.
    """
    generator = np.random.default_rng(0)
    shape, rows = (num_tokens, intermediate_size), []
    for mean in active:
        row_means = generator.lognormal(np.log(mean) - 0.5, 1, (num_tokens, 1))
        mask = generator.random(shape, dtype=np.float32) < row_means / intermediate_size
        dense = torch.from_numpy(mask).bfloat16()
        packed = {"Dense": dense, "ELL": ELL.pack(dense)}
        packed[f"Hybrid, width {ell_width}"] = Hybrid.pack(dense, ell_width)
        for compression in (8, 4, 2):
            packed[f"TwELL, C = {compression}"] = PackedTwELL.pack(dense, tile_n, compression)
        drawn = mask.sum() / num_tokens
        for name, form in packed.items():
            relative = form.nbytes / dense.nbytes
            rows.append((drawn, drawn / intermediate_size, name, form.nbytes, relative))
    return pd.DataFrame(rows, columns=["active", "active_share", "format", "nbytes", "relative"])
