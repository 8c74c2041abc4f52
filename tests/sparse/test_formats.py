"""Packing is exact: every format against slow loops in plain Python that look at the bits."""

import pytest
import torch

from tests.factories.sparse import BITS, PATTERNS, bits_of, dense_matrix, entries_by_row
from twell.sparse.formats import ELL, Hybrid, PackedTwELL, TileUnion, TwELL

SHAPES = [(0, 300), (1, 1), (1, 257), (70, 100)]
PACKS = [ELL.pack, TwELL.pack, PackedTwELL.pack, Hybrid.pack, TileUnion.pack]


def filled(entries, width):
    """Columns and value bits of a row or tile in `width` slots; unused slots hold zeros."""
    entries = (entries + [(0, 0)] * width)[:width]
    return [n for n, _ in entries], [bits for _, bits in entries]


def dense_rows(rows, n_cols):
    return [[row.get(n, 0) for n in range(n_cols)] for row in map(dict, rows)]


def assert_slots(packed, rows, width):
    expected = [filled(row, width) for row in rows]
    assert packed.indices.flatten(0, -2).tolist() == [columns for columns, _ in expected]
    assert bits_of(packed.values.flatten(0, -2)) == [bits for _, bits in expected]
    assert packed.indices.dtype == torch.uint16 and packed.counts.dtype == torch.int32


def assert_unpacks(packed, dense):
    rows = entries_by_row(dense)
    unpacked = packed.unpack()
    assert packed.shape == tuple(dense.shape) and unpacked.dtype == dense.dtype
    assert bits_of(unpacked) == dense_rows(rows, dense.shape[1])
    assert packed.nnz.shape == () and int(packed.nnz) == sum(map(len, rows))


def tiles_of(dense, tile_n):
    """For each row and tile its (column, value bits), in one list."""
    starts = range(0, dense.shape[1], tile_n)
    rows = entries_by_row(dense)
    return [[e for e in row if s <= e[0] < s + tile_n] for row in rows for s in starts]


def assert_overflow(packed, dense, tiles, capacity):
    rows = entries_by_row(dense)
    counts = [len(tile) for tile in tiles]
    width = len(counts) // max(len(dense), 1)
    overflow = [m for m in range(len(dense)) if max(counts[m * width :][:width]) > capacity]
    assert packed.counts.flatten().tolist() == counts
    assert packed.overflow_rows.tolist() == overflow
    expected = dense_rows([rows[m] for m in overflow], dense.shape[1])
    assert bits_of(packed.overflow_values) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [*((pattern, torch.bfloat16) for pattern in PATTERNS), ("heavy", torch.float32)],
)
class TestAgainstLoops:
    def test_ell(self, shape, pattern, dtype):
        dense = dense_matrix(pattern, shape, dtype)
        rows = entries_by_row(dense)
        longest = max(map(len, rows), default=0)
        for width in (None, longest + 3):
            packed, slots = ELL.pack(dense, width), width or longest
            assert packed.counts.tolist() == [len(row) for row in rows]
            assert packed.nbytes == shape[0] * slots * (dtype.itemsize + 2) + 4 * shape[0]
            assert_slots(packed, rows, slots)
            assert_unpacks(packed, dense)

    @pytest.mark.parametrize(("tile_n", "compression"), [(256, 8), (6, 3), (4, 1)])
    def test_twell_and_packed_twell(self, shape, pattern, dtype, tile_n, compression):
        dense, width = dense_matrix(pattern, shape, dtype), tile_n // compression
        tiles = tiles_of(dense, tile_n)
        packed = TwELL.pack(dense, tile_n, compression)
        assert_slots(packed, tiles, width)
        assert_overflow(packed, dense, tiles, width)
        assert_unpacks(packed, dense)
        extra = len(packed.overflow_rows) * (4 + dtype.itemsize * shape[1])
        assert packed.nbytes == len(tiles) * (width * (dtype.itemsize + 2) + 4) + extra
        if dtype.itemsize > 2:
            return
        packed = PackedTwELL.pack(dense, tile_n, compression)
        slots = [filled(tile, width - 1) for tile in tiles]
        words = [
            [len(tile), *((bits << 16) + n for n, bits in zip(*slot, strict=True))]
            for tile, slot in zip(tiles, slots, strict=True)
        ]
        assert packed.words.dtype == torch.int32
        assert packed.words.reshape(-1, width).tolist() == words
        assert_overflow(packed, dense, tiles, width - 1)
        assert_unpacks(packed, dense)

    @pytest.mark.parametrize("ell_width", [128, 5, 0])
    def test_hybrid(self, shape, pattern, dtype, ell_width):
        dense = dense_matrix(pattern, shape, dtype)
        rows = entries_by_row(dense)
        long = [m for m, row in enumerate(rows) if len(row) > ell_width]
        short = [m for m, row in enumerate(rows) if len(row) <= ell_width]
        packed = Hybrid.pack(dense, ell_width)
        slot = [short.index(m) if m in short else ~long.index(m) for m in range(shape[0])]
        assert packed.slot.dtype == torch.int32 and packed.slot.tolist() == slot
        assert_slots(packed.ell, [rows[m] for m in short], ell_width)
        backup = dense_rows([rows[m] for m in long], shape[1])
        assert bits_of(packed.backup) == backup
        tensors = packed.ell.nbytes + dtype.itemsize * packed.backup.numel()
        assert packed.nbytes == 4 * shape[0] + tensors
        assert_unpacks(packed, dense)

    @pytest.mark.parametrize("block_m", [1, 3, 64])
    def test_tile_union(self, shape, pattern, dtype, block_m):
        dense = dense_matrix(pattern, shape, dtype)
        packed, rows = TileUnion.pack(dense, block_m), entries_by_row(dense)
        values, indices, offsets = [], [], [0]
        for start in range(0, shape[0], block_m):
            block = rows[start : start + block_m]
            union = sorted({n for row in block for n, _ in row})
            expected = [[dict(row).get(n, 0) for n in union] for row in block]
            columns, part = packed.block(start // block_m)
            assert columns.tolist() == union and bits_of(part) == expected
            values += sum(expected, []) + [0] * len(union) * (block_m - len(block))
            indices += union
            offsets.append(len(indices))
        assert packed.indices.dtype == torch.int32 and packed.offsets.dtype == torch.int64
        assert packed.offsets.tolist() == offsets and packed.indices.tolist() == indices
        assert bits_of(packed.values) == values
        assert packed.nbytes == 8 * len(offsets) + 4 * len(indices) + dtype.itemsize * len(values)
        assert_unpacks(packed, dense)


@pytest.mark.parametrize("pack", PACKS)
def test_wide_matrices_every_dtype_and_strides(pack):
    dense = dense_matrix("sparse", (2, 65_536))
    dense[0, -1] = 1.5
    assert_unpacks(pack(dense), dense)
    for dtype in BITS:
        dense = dense_matrix("heavy", (30, 300), dtype)
        if pack != PackedTwELL.pack or dtype.itemsize == 2:
            assert_unpacks(pack(dense), dense)
    dense = dense_matrix("heavy", (300, 40))
    packed = pack(dense.t())
    assert_unpacks(packed, dense.t().contiguous())


# --- refusals

EIGHT = torch.ones(2, 8, dtype=torch.bfloat16)
# The format, the matrix, its sizes, the exception and the value that it names.
UNFIT = [
    *(
        (pack, dense, (), error, value)
        for pack in PACKS
        for dense, error, value in (
            (torch.zeros(3), ValueError, r"\(3,\)"),
            (torch.zeros(2, 65_537), ValueError, "65537"),
            (torch.zeros(2, 0), ValueError, "0 columns"),
            (torch.zeros(2, 3, dtype=torch.int64), TypeError, "torch.int64"),
        )
    ),
    (TwELL.pack, EIGHT, (256, 7), ValueError, "compression=7"),
    (TwELL.pack, EIGHT, (0, 1), ValueError, "tile_n=0"),
    (PackedTwELL.pack, EIGHT, (8, 8), ValueError, "at most 4"),
    (PackedTwELL.pack, EIGHT.float(), (), TypeError, "torch.float32"),
    (TileUnion.pack, EIGHT, (0,), ValueError, "block_m=0"),
    (ELL.pack, EIGHT, (7,), ValueError, "row 0 has 8 .*width=7"),
]


def test_what_just_fits_and_what_does_not():
    for pack, dense, sizes, error, value in UNFIT:
        with pytest.raises(error, match=value):
            pack(dense, *sizes)
    for pack, *sizes in ((PackedTwELL.pack, 8, 4), (TwELL.pack, 8, 8), (Hybrid.pack, 7)):
        assert_unpacks(pack(EIGHT, *sizes), EIGHT)
