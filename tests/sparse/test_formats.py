"""Packing is exact: every format against slow loops in plain Python that look at the bits."""

import pytest
import torch

from tests.factories.sparse import BITS, PATTERNS, bits_of, dense_matrix, entries_by_row
from twell.sparse.formats import ELL, BufferOverflow, Hybrid, PackedTwELL, TileUnion, TwELL

SHAPES = [(0, 300), (1, 1), (1, 257), (7, 300), (70, 100), (3, 512)]
PACKS = [ELL.pack, TwELL.pack, PackedTwELL.pack, Hybrid.pack, TileUnion.pack]
over_matrices = pytest.mark.parametrize("pattern", PATTERNS)


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
    flat = [(m, n, bits) for m, row in enumerate(rows) for n, bits in row]
    assert packed.shape == tuple(dense.shape) and packed.dtype == dense.dtype
    assert bits_of(packed.unpack()) == dense_rows(rows, dense.shape[1])
    m, n, values = packed.entries()
    assert list(zip(m.tolist(), n.tolist(), bits_of(values), strict=True)) == flat
    assert packed.nnz.shape == () and int(packed.nnz) == len(flat)
    assert [list(zip(n.tolist(), bits_of(v), strict=True)) for n, v in packed.rows()] == rows


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
    assert packed.overflow.tolist() == [m in overflow for m in range(len(dense))]
    expected = dense_rows([rows[m] for m in overflow], dense.shape[1])
    assert bits_of(packed.overflow_values) == expected


@over_matrices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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

    @pytest.mark.parametrize(("ell_width", "spare"), [(128, None), (5, 2), (0, 0)])
    def test_hybrid(self, shape, pattern, dtype, ell_width, spare):
        dense = dense_matrix(pattern, shape, dtype)
        rows = entries_by_row(dense)
        long = [m for m, row in enumerate(rows) if len(row) > ell_width]
        short = [m for m, row in enumerate(rows) if len(row) <= ell_width]
        packed = Hybrid.pack(dense, ell_width, None if spare is None else len(long) + spare)
        slot = [short.index(m) if m in short else ~long.index(m) for m in range(shape[0])]
        assert packed.slot.dtype == torch.int32 and packed.slot.tolist() == slot
        assert_slots(packed.ell, [rows[m] for m in short], ell_width)
        backup = dense_rows([rows[m] for m in long] + [[]] * (spare or 0), shape[1])
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


@over_matrices
@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_transposes_and_keeps_the_pattern_where_values_are_zero(shape, pattern):
    dense = dense_matrix(pattern, shape)
    g = Hybrid.pack(dense, ell_width=5)
    for sizes in ((), (3,), (3, 400)):
        transposed = g.transpose(*sizes)
        assert_unpacks(transposed, dense.t().contiguous())
        width = sizes[0] if sizes else -(-2 * int(g.nnz) // shape[1])
        assert transposed.ell.values.shape[1] == width
        needed = int((dense != 0).sum(0).gt(width).sum())
        assert len(transposed.backup) == (sizes[1] if len(sizes) == 2 else needed)
        assert_unpacks(transposed.transpose(), dense)
    rows, columns, _ = g.entries()
    values = torch.randn(len(rows))
    values[::2] = 0
    u, expected = g.with_entries(values), torch.zeros(shape)
    expected[rows, columns] = values
    for given, part in zip((rows, columns, values), u.entries(), strict=True):
        assert part.equal(given)
    assert u.unpack().equal(expected) and u.nnz == g.nnz
    assert u.pattern is g.backup and u.slot is g.slot and u.ell.indices is g.ell.indices
    nothing = u.with_entries(torch.zeros_like(values))
    assert nothing.nnz == g.nnz and not nothing.unpack().any() and nothing.pattern is g.backup
    transposed = u.transpose(ell_width=3)
    assert transposed.nnz == g.nnz and transposed.unpack().equal(expected.t())
    order = sorted(zip(columns.tolist(), rows.tolist(), strict=True))
    m, n, _ = transposed.entries()
    assert list(zip(m.tolist(), n.tolist(), strict=True)) == order
    assert nothing.transpose(ell_width=3).transpose(ell_width=5).nnz == g.nnz


def test_transpose_of_more_tokens_than_16_bits_count():
    dense = torch.zeros(65_537, 3, dtype=torch.float16)
    dense[65_536, 1] = 2.0
    dense[[0, 7], 2] = 3.0
    transposed = Hybrid.pack(dense, ell_width=1).transpose(ell_width=1)
    assert transposed.ell.indices.dtype == torch.int32 and transposed.unpack().equal(dense.t())
    assert Hybrid.pack(dense[1:], ell_width=1).transpose(1).ell.indices.dtype == torch.uint16


@pytest.mark.parametrize("pack", PACKS)
def test_wide_matrices_every_dtype_strides_and_devices(pack):
    dense = dense_matrix("sparse", (2, 65_536))
    dense[0, -1] = 1.5
    assert_unpacks(pack(dense), dense)
    for dtype in BITS:
        dense = dense_matrix("heavy", (30, 300), dtype)
        if pack == PackedTwELL.pack and dtype.itemsize > 2:
            with pytest.raises(TypeError, match=f"{dtype}, expected torch.bfloat16 or torch.fl"):
                pack(dense)
        else:
            assert_unpacks(pack(dense), dense)
    dense = dense_matrix("heavy", (300, 40))
    packed = pack(dense.t())
    assert_unpacks(packed, dense.t().contiguous())
    moved = packed.to("meta")
    assert type(moved) is type(packed) and moved.shape == packed.shape
    assert moved.nbytes == packed.nbytes
    parts = [*vars(moved).values(), *vars(getattr(moved, "ell", moved)).values()]
    assert all(part.is_meta for part in parts if isinstance(part, torch.Tensor))


@pytest.mark.parametrize("cls", [TwELL, PackedTwELL])
def test_a_full_tile_does_not_overflow_and_one_more_does(cls):
    capacity = 32 if cls is TwELL else 31
    dense = torch.zeros(3, 300, dtype=torch.bfloat16)
    dense[0, torch.randperm(256)[:capacity]] = 1
    dense[1, torch.randperm(256)[: capacity + 1]] = 1
    dense[1, 299] = 2  # a tile with a free slot, in a row that overflows elsewhere
    packed = cls.pack(dense)
    assert packed.overflow.tolist() == [False, True, False]
    assert packed.counts.tolist() == [[capacity, 0], [capacity + 1, 1], [0, 0]]
    assert packed.unpack().equal(dense)


# --- refusals


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    ("dense", "error", "match"),
    [
        (torch.zeros(3), ValueError, r"shape \(3,\)"),
        (torch.zeros(2, 3, 4), ValueError, r"shape \(2, 3, 4\)"),
        (torch.zeros(2, 65_537), ValueError, "columns.* 65537, expected 1 to 65536"),
        (torch.zeros(2, 0), ValueError, "columns.* 0, expected 1 to 65536"),
        (torch.zeros(2, 3, dtype=torch.int64), TypeError, "torch.int64"),
        (torch.zeros(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
    ],
)
def test_pack_refuses(pack, dense, error, match):
    with pytest.raises(error, match=match):
        pack(dense)


def test_capacities_that_do_not_fit_are_refused():
    ones = torch.ones(2, 8, dtype=torch.bfloat16)
    for cls in (TwELL, PackedTwELL):
        for tile_n, compression in ((256, 7), (0, 1), (8, 0), (8, 16), (-8, 8)):
            with pytest.raises(ValueError, match=f"tile_n={tile_n} .*compression={compression}"):
                cls.pack(ones, tile_n, compression)
    with pytest.raises(ValueError, match="tile_n=8 with compression=8 .*compression of at most 4"):
        PackedTwELL.pack(ones, 8, 8)
    assert_unpacks(PackedTwELL.pack(ones, 8, 4), ones)
    assert_unpacks(TwELL.pack(ones, 8, 8), ones)
    for block_m in (0, -3):
        with pytest.raises(ValueError, match=f"block_m={block_m}"):
            TileUnion.pack(ones, block_m)
    dense = torch.zeros(5, 30)
    dense[2, :7] = dense[3, :9] = 1
    with pytest.raises(ValueError, match="row 3 has 9 non-zeros, more than width=8; a width of 9"):
        ELL.pack(dense, 8)
    dense = dense_matrix("full", (9, 40))
    dense[4] = 0
    with pytest.raises(BufferOverflow, match="8 rows have more than ell_width=39") as caught:
        Hybrid.pack(dense, ell_width=39, backup_rows=7)
    assert caught.value.needed == 8
    assert_unpacks(Hybrid.pack(dense, ell_width=39, backup_rows=8), dense)


def shorter(t):
    return t[1:]


def narrower(t):
    return t[..., 1:]


@pytest.mark.parametrize(
    ("pack", "error", "changes"),
    [
        (ELL.pack, ValueError, {"values": lambda t: t[0], "indices": narrower, "counts": shorter}),
        (ELL.pack, TypeError, dict.fromkeys(("values", "indices"), torch.Tensor.int)),
        (ELL.pack, TypeError, {"counts": torch.Tensor.long}),
        (TwELL.pack, ValueError, dict.fromkeys(("values", "indices", "counts"), narrower)),
        (TwELL.pack, ValueError, {"overflow_rows": shorter, "overflow_values": narrower}),
        (TwELL.pack, ValueError, {"n_cols": lambda n: n + 256, "compression": lambda n: 7}),
        (TwELL.pack, TypeError, {"values": torch.Tensor.float, "indices": torch.Tensor.int}),
        (TwELL.pack, TypeError, dict.fromkeys(("counts", "overflow_rows"), torch.Tensor.long)),
        (PackedTwELL.pack, ValueError, {"words": narrower, "n_cols": lambda n: 65_537}),
        (PackedTwELL.pack, TypeError, {"words": torch.Tensor.long}),
        (PackedTwELL.pack, TypeError, {"overflow_values": torch.Tensor.float}),
        (Hybrid.pack, ValueError, {"backup": narrower, "slot": lambda t: torch.cat([t, t])}),
        (Hybrid.pack, ValueError, {"pattern": lambda t: torch.zeros(1, 1)}),
        (Hybrid.pack, TypeError, {"backup": torch.Tensor.float, "slot": torch.Tensor.long}),
        (TileUnion.pack, ValueError, {"values": shorter, "offsets": shorter}),
        (TileUnion.pack, ValueError, {"block_m": lambda n: 0}),
        (TileUnion.pack, TypeError, dict.fromkeys(("values", "offsets"), torch.Tensor.int)),
        (TileUnion.pack, TypeError, {"indices": torch.Tensor.long}),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(pack, error, changes):
    dense = torch.ones(4, 300, dtype=torch.bfloat16)
    dense[0] = 0
    packed = pack(dense)
    type(packed)(**vars(packed))
    # A number or a row list that does not fit shows in the tensor beside it.
    blamed = {"n_cols": "n_cols|overflow_values", "overflow_rows": "overflow_"}
    blamed["compression"] = "tile_n"
    for name, change in changes.items():
        parts = vars(packed) | {name: change(getattr(packed, name))}
        with pytest.raises(error, match=f"({blamed.get(name, name)}).*(expected|must be)"):
            type(packed)(**parts)
