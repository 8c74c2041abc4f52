"""Packing is exact: every format against slow loops in plain Python that look at the bits of each
number.

The matrices are made of random bits, so NaNs with payloads, infinities, subnormals and negative
numbers occur, and the inactive entries are a mixture of +0.0 and -0.0.
"""

from __future__ import annotations

import pytest
import torch

from twell.sparse.formats import ELL, BufferOverflow, Hybrid, PackedTwELL, TileUnion, TwELL

BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
CASES = ["empty", "full", "sparse", "heavy", "first", "last", "one_row"]
SHAPES = [(0, 300), (1, 1), (1, 257), (7, 300), (70, 100), (3, 512)]


@pytest.fixture
def generator():
    generator = torch.Generator()
    print("seed", generator.seed())  # shown when a test fails
    return generator


def make_active(case: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator)
    active = torch.zeros(shape, dtype=torch.bool)
    if case == "full":
        active[:] = True
    elif case == "sparse":
        active = uniform < 0.05
    elif case == "heavy":  # from rows with none to rows with nearly all
        active = uniform < torch.rand(shape[0], 1, generator=generator) ** 4
    elif case == "first":
        active[:, 0] = True
    elif case == "last":
        active[:, -1] = True
    elif case == "one_row":
        active[shape[0] // 2 :][:1] = True
    return active


def make_dense(case, shape, generator, dtype=torch.bfloat16) -> torch.Tensor:
    """Random bits where active, +0.0 or -0.0 elsewhere."""
    bits = BITS[dtype]
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    sign = torch.tensor(low, dtype=bits)
    noise = torch.randint(low, high, shape, dtype=bits, generator=generator)
    noise[(noise | sign) == sign] = 1  # neither zero may be among the active ones
    zeros = torch.where(noise < 0, sign, 0)
    return torch.where(make_active(case, shape, generator), noise, zeros).view(dtype)


def bits_of(tensor: torch.Tensor) -> list:
    return tensor.view(BITS[tensor.dtype]).tolist()


def active_of(dense: torch.Tensor) -> list[list[tuple[int, int]]]:
    """For each row the (column, value bits) of its non-zeros."""
    minus_zero = torch.iinfo(BITS[dense.dtype]).min
    rows = bits_of(dense)
    return [
        [(n, bits) for n, bits in enumerate(row) if bits not in (0, minus_zero)] for row in rows
    ]


def filled(numbers: list[int], width: int) -> list[int]:
    return (numbers + [0] * width)[:width]


def assert_unpacks(packed, dense: torch.Tensor) -> None:
    expected = [[0] * dense.shape[1] for _ in range(len(dense))]
    rows, columns, bits = [], [], []
    for m, entries in enumerate(active_of(dense)):
        for n, value in entries:
            expected[m][n] = value
            rows.append(m), columns.append(n), bits.append(value)
    assert packed.shape == tuple(dense.shape)
    assert packed.dtype == dense.dtype
    assert bits_of(packed.unpack()) == expected
    got = packed.entries()
    assert [got[0].tolist(), got[1].tolist(), bits_of(got[2])] == [rows, columns, bits]
    assert packed.nnz.shape == () and int(packed.nnz) == len(rows)
    by_row = [list(zip(n.tolist(), bits_of(v), strict=True)) for n, v in packed.rows()]
    assert by_row == active_of(dense)


def assert_overflow(packed, dense: torch.Tensor, tile_n: int, capacity: int) -> None:
    active = active_of(dense)
    num_tiles = -(-dense.shape[1] // tile_n)
    counts = [[sum(n // tile_n == t for n, _ in row) for t in range(num_tiles)] for row in active]
    overflow = [m for m, row in enumerate(counts) if max(row) > capacity]
    assert packed.counts.tolist() == counts
    assert packed.overflow_rows.tolist() == overflow
    assert packed.overflow.tolist() == [m in overflow for m in range(len(dense))]
    expected = [[dict(active[m]).get(n, 0) for n in range(dense.shape[1])] for m in overflow]
    assert bits_of(packed.overflow_values) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ell(shape, case, dtype, generator):
    dense = make_dense(case, shape, generator, dtype)
    active = active_of(dense)
    longest = max(map(len, active), default=0)
    for width in (None, longest + 3):
        packed = ELL.pack(dense, width)
        slots = longest if width is None else width
        assert packed.values.shape == packed.indices.shape == (shape[0], slots)
        assert packed.indices.dtype == torch.uint16 and packed.counts.dtype == torch.int32
        assert packed.counts.tolist() == [len(row) for row in active]
        assert bits_of(packed.values) == [
            filled([bits for _, bits in row], slots) for row in active
        ]
        assert packed.indices.tolist() == [filled([n for n, _ in row], slots) for row in active]
        assert packed.nbytes == shape[0] * slots * (dtype.itemsize + 2) + 4 * shape[0]
        assert_unpacks(packed, dense)


def test_ell_too_narrow():
    dense = torch.zeros(5, 30)
    dense[2, :7] = dense[3, :9] = 1
    with pytest.raises(ValueError, match="row 3 has 9 non-zeros, more than width=8; a width of 9"):
        ELL.pack(dense, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tile_n", "compression"), [(256, 8), (6, 3), (4, 1)])
def test_twell(tile_n, compression, shape, case, dtype, generator):
    dense = make_dense(case, shape, generator, dtype)
    packed = TwELL.pack(dense, tile_n, compression)
    num_tiles, slots = -(-shape[1] // tile_n), tile_n // compression
    values, indices = [], []
    for row in active_of(dense):
        tiles = [[entry for entry in row if entry[0] // tile_n == t] for t in range(num_tiles)]
        values.append([filled([bits for _, bits in tile], slots) for tile in tiles])
        indices.append([filled([n for n, _ in tile], slots) for tile in tiles])
    assert packed.values.shape == packed.indices.shape == (shape[0], num_tiles, slots)
    assert packed.indices.dtype == torch.uint16 and packed.counts.dtype == torch.int32
    assert bits_of(packed.values) == values
    assert packed.indices.tolist() == indices
    assert_overflow(packed, dense, tile_n, slots)
    side = len(packed.overflow_rows) * (4 + dtype.itemsize * shape[1])
    assert packed.nbytes == shape[0] * num_tiles * (slots * (dtype.itemsize + 2) + 4) + side
    assert_unpacks(packed, dense)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tile_n", "compression"), [(256, 8), (6, 3), (4, 1)])
def test_packed_twell(tile_n, compression, shape, case, generator):
    dense = make_dense(case, shape, generator)
    packed = PackedTwELL.pack(dense, tile_n, compression)
    num_tiles, slots = -(-shape[1] // tile_n), tile_n // compression
    words = []
    for row in active_of(dense):
        words.append([])
        for t in range(num_tiles):
            tile = [entry for entry in row if entry[0] // tile_n == t]
            words[-1] += [len(tile)] + filled([(bits << 16) + n for n, bits in tile], slots - 1)
    assert packed.words.dtype == torch.int32
    assert packed.words.tolist() == words
    assert_overflow(packed, dense, tile_n, slots - 1)
    side = len(packed.overflow_rows) * (4 + 2 * shape[1])
    assert packed.nbytes == 4 * shape[0] * num_tiles * slots + side
    assert_unpacks(packed, dense)


@pytest.mark.parametrize("cls", [TwELL, PackedTwELL])
def test_a_full_tile_does_not_overflow_and_one_more_does(cls, generator):
    capacity = 32 if cls is TwELL else 31
    dense = torch.zeros(3, 300, dtype=torch.bfloat16)
    dense[0, torch.randperm(256, generator=generator)[:capacity]] = 1
    dense[1, torch.randperm(256, generator=generator)[: capacity + 1]] = 1
    dense[1, 299] = 2  # a tile that has room, in a row that overflows elsewhere
    packed = cls.pack(dense)
    assert packed.overflow.tolist() == [False, True, False]
    assert packed.counts.tolist() == [[capacity, 0], [capacity + 1, 1], [0, 0]]
    assert packed.unpack().equal(dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ell_width", "spare"), [(128, None), (5, 2), (0, 0)])
def test_hybrid(ell_width, spare, shape, case, dtype, generator):
    dense = make_dense(case, shape, generator, dtype)
    active = active_of(dense)
    long = [m for m, row in enumerate(active) if len(row) > ell_width]
    short = [m for m, row in enumerate(active) if len(row) <= ell_width]
    capacity = None if spare is None else len(long) + spare
    packed = Hybrid.pack(dense, ell_width, capacity)
    slot = [short.index(m) if m in short else ~long.index(m) for m in range(shape[0])]
    assert packed.slot.dtype == torch.int32 and packed.slot.tolist() == slot
    assert packed.ell.counts.tolist() == [len(active[m]) for m in short]
    assert bits_of(packed.ell.values) == [
        filled([b for _, b in active[m]], ell_width) for m in short
    ]
    assert packed.ell.indices.tolist() == [
        filled([n for n, _ in active[m]], ell_width) for m in short
    ]
    backup = [[dict(active[m]).get(n, 0) for n in range(shape[1])] for m in long]
    assert bits_of(packed.backup) == backup + [[0] * shape[1]] * (spare or 0)
    assert (
        packed.nbytes == 4 * shape[0] + packed.ell.nbytes + dtype.itemsize * packed.backup.numel()
    )
    assert_unpacks(packed, dense)


def test_hybrid_backup_too_small(generator):
    dense = make_dense("full", (9, 40), generator)
    dense[4] = 0
    with pytest.raises(BufferOverflow, match="8 rows have more than ell_width=39") as caught:
        Hybrid.pack(dense, ell_width=39, backup_rows=7)
    assert caught.value.needed == 8
    assert_unpacks(Hybrid.pack(dense, ell_width=39, backup_rows=caught.value.needed), dense)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [(), (3,), (3, 400)])
def test_hybrid_transpose(sizes, shape, case, generator):
    dense = make_dense(case, shape, generator)
    packed = Hybrid.pack(dense, ell_width=5)
    transposed = packed.transpose(*sizes)
    assert_unpacks(transposed, dense.t().contiguous())
    width = sizes[0] if sizes else -(-2 * int(packed.nnz) // shape[1])
    assert transposed.ell.values.shape[1] == width
    assert len(transposed.backup) == (
        sizes[1] if len(sizes) == 2 else int((dense != 0).sum(0).gt(width).sum())
    )
    assert_unpacks(transposed.transpose(), dense)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_keeps_the_pattern_where_values_are_zero(shape, case, generator):
    g = Hybrid.pack(make_dense(case, shape, generator), ell_width=5)
    rows, columns, _ = g.entries()
    values = torch.randn(len(rows), generator=generator)
    values[::2] = 0
    u = g.with_entries(values)
    expected = torch.zeros(shape)
    expected[rows, columns] = values
    assert [part.tolist() for part in u.entries()] == [
        rows.tolist(),
        columns.tolist(),
        values.tolist(),
    ]
    assert u.unpack().equal(expected)
    assert u.nnz == g.nnz
    assert u.pattern is g.backup and u.slot is g.slot and u.ell.indices is g.ell.indices

    nothing = u.with_entries(torch.zeros_like(u.entries()[2]))
    assert nothing.nnz == g.nnz and not nothing.unpack().any()
    assert nothing.pattern is g.backup

    transposed = u.transpose(ell_width=3)
    assert transposed.nnz == g.nnz and transposed.unpack().equal(expected.t())
    order = sorted(zip(columns.tolist(), rows.tolist(), strict=True))
    assert (
        list(zip(transposed.entries()[0].tolist(), transposed.entries()[1].tolist(), strict=True))
        == order
    )
    assert nothing.transpose(ell_width=3).transpose(ell_width=5).nnz == g.nnz


def test_transpose_of_more_tokens_than_16_bits_count():
    dense = torch.zeros(65_537, 3, dtype=torch.float16)
    dense[65_536, 1] = 2.0
    dense[[0, 7], 2] = 3.0
    transposed = Hybrid.pack(dense, ell_width=1).transpose(ell_width=1)
    assert transposed.ell.indices.dtype == torch.int32
    assert transposed.unpack().equal(dense.t())
    assert Hybrid.pack(dense[1:], ell_width=1).transpose(1).ell.indices.dtype == torch.uint16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_m", [1, 3, 64])
def test_tile_union(block_m, shape, case, dtype, generator):
    dense = make_dense(case, shape, generator, dtype)
    packed = TileUnion.pack(dense, block_m)
    active = active_of(dense)
    values, indices, offsets = [], [], [0]
    for start in range(0, shape[0], block_m):
        block = active[start : start + block_m]
        union = sorted({n for row in block for n, _ in row})
        rows = [[dict(row).get(n, 0) for n in union] for row in block]
        got_indices, got_values = packed.block(start // block_m)
        assert got_indices.tolist() == union and bits_of(got_values) == rows
        values += sum(rows, []) + [0] * len(union) * (block_m - len(block))
        indices += union
        offsets.append(len(indices))
    assert packed.indices.dtype == torch.int32 and packed.offsets.dtype == torch.int64
    assert packed.offsets.tolist() == offsets
    assert packed.indices.tolist() == indices
    assert bits_of(packed.values) == values
    assert packed.nbytes == 8 * len(offsets) + 4 * len(indices) + dtype.itemsize * len(values)
    assert_unpacks(packed, dense)


PACKS = [ELL.pack, TwELL.pack, PackedTwELL.pack, Hybrid.pack, TileUnion.pack]


@pytest.mark.parametrize("pack", PACKS)
def test_the_widest_matrix(pack, generator):
    dense = make_dense("sparse", (2, 65_536), generator)
    dense[0, -1] = 1.5
    assert_unpacks(pack(dense), dense)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype(dtype, pack, generator):
    dense = make_dense("heavy", (30, 300), generator, dtype)
    if pack == PackedTwELL.pack and dtype.itemsize > 2:
        with pytest.raises(TypeError, match=f"{dtype}, expected torch.bfloat16 or torch.float16"):
            pack(dense)
    else:
        assert_unpacks(pack(dense), dense)


@pytest.mark.parametrize("pack", PACKS)
def test_pack_of_what_is_not_contiguous(pack, generator):
    dense = make_dense("heavy", (300, 40), generator)
    assert_unpacks(pack(dense.t()), dense.t().contiguous())


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    ("dense", "error", "match"),
    [
        (torch.zeros(3), ValueError, r"shape \(3,\)"),
        (torch.zeros(2, 3, 4), ValueError, r"shape \(2, 3, 4\)"),
        (torch.zeros(2, 65_537), ValueError, "65537 columns"),
        (torch.zeros(2, 0), ValueError, "0 columns"),
        (torch.zeros(2, 3, dtype=torch.int64), TypeError, "torch.int64"),
        (torch.zeros(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
    ],
)
def test_pack_refuses(pack, dense, error, match):
    with pytest.raises(error, match=match):
        pack(dense)


@pytest.mark.parametrize("cls", [TwELL, PackedTwELL])
@pytest.mark.parametrize(("tile_n", "compression"), [(256, 7), (0, 1), (8, 0), (8, 16), (-8, 8)])
def test_tiles_that_do_not_divide(cls, tile_n, compression):
    with pytest.raises(ValueError, match=f"tile_n={tile_n} .*compression={compression}"):
        cls.pack(torch.zeros(2, 3, dtype=torch.bfloat16), tile_n, compression)


def test_packed_twell_needs_a_slot_beside_the_count():
    dense = torch.ones(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tile_n=8 with compression=8 .*compression of at most 4"):
        PackedTwELL.pack(dense, 8, 8)
    assert_unpacks(PackedTwELL.pack(dense, 8, 4), dense)
    assert_unpacks(TwELL.pack(dense, 8, 8), dense)


@pytest.mark.parametrize("block_m", [0, -3])
def test_tile_union_refuses_empty_blocks(block_m):
    with pytest.raises(ValueError, match=f"block_m={block_m}"):
        TileUnion.pack(torch.zeros(2, 3), block_m)


def parts_of(packed) -> dict:
    return {name: getattr(packed, name) for name in packed.__dataclass_fields__}


@pytest.mark.parametrize(
    ("pack", "name", "change", "error"),
    [
        (ELL.pack, "values", lambda t: t[0], ValueError),
        (ELL.pack, "values", lambda t: t.int(), TypeError),
        (ELL.pack, "indices", lambda t: t[:, 1:], ValueError),
        (ELL.pack, "indices", lambda t: t.int(), TypeError),
        (ELL.pack, "counts", lambda t: t[1:], ValueError),
        (ELL.pack, "counts", lambda t: t.long(), TypeError),
        (TwELL.pack, "values", lambda t: t[:, :1], ValueError),
        (TwELL.pack, "values", lambda t: t.float(), TypeError),
        (TwELL.pack, "indices", lambda t: t[:, :, 1:], ValueError),
        (TwELL.pack, "indices", lambda t: t.int(), TypeError),
        (TwELL.pack, "counts", lambda t: t[:, 1:], ValueError),
        (TwELL.pack, "counts", lambda t: t.long(), TypeError),
        (TwELL.pack, "overflow_rows", lambda t: t[1:], ValueError),
        (TwELL.pack, "overflow_rows", lambda t: t.long(), TypeError),
        (TwELL.pack, "overflow_values", lambda t: t[:, 1:], ValueError),
        (TwELL.pack, "n_cols", lambda n: n + 256, ValueError),
        (TwELL.pack, "compression", lambda n: 7, ValueError),
        (PackedTwELL.pack, "words", lambda t: t[:, 1:], ValueError),
        (PackedTwELL.pack, "words", lambda t: t.long(), TypeError),
        (PackedTwELL.pack, "overflow_values", lambda t: t.float(), TypeError),
        (PackedTwELL.pack, "n_cols", lambda n: 65_537, ValueError),
        (Hybrid.pack, "backup", lambda t: t[:, 1:], ValueError),
        (Hybrid.pack, "backup", lambda t: t.float(), TypeError),
        (Hybrid.pack, "slot", lambda t: torch.cat([t, t]), ValueError),
        (Hybrid.pack, "slot", lambda t: t.long(), TypeError),
        (Hybrid.pack, "pattern", lambda t: torch.zeros(1, 1), ValueError),
        (TileUnion.pack, "values", lambda t: t[1:], ValueError),
        (TileUnion.pack, "values", lambda t: t.int(), TypeError),
        (TileUnion.pack, "indices", lambda t: t.long(), TypeError),
        (TileUnion.pack, "offsets", lambda t: t[1:], ValueError),
        (TileUnion.pack, "offsets", lambda t: t.int(), TypeError),
        (TileUnion.pack, "block_m", lambda n: 0, ValueError),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(pack, name, change, error):
    dense = torch.ones(4, 300, dtype=torch.bfloat16)
    dense[0] = 0
    packed = pack(dense)
    parts = parts_of(packed)
    type(packed)(**parts)
    parts[name] = change(parts[name])
    # A number or a row list that does not fit shows in the tensor beside it.
    blamed = {
        "n_cols": "n_cols|overflow_values",
        "overflow_rows": "overflow_",
        "compression": "tile_n",
    }.get(name, name)
    with pytest.raises(error, match=f"({blamed}).*(expected|must be)"):
        type(packed)(**parts)


@pytest.mark.parametrize("pack", PACKS)
def test_to_moves_every_tensor(pack, generator):
    packed = pack(make_dense("heavy", (7, 300), generator))
    if isinstance(packed, Hybrid):
        packed = packed.with_entries(packed.entries()[2])
    moved = packed.to("meta")
    assert (
        type(moved) is type(packed)
        and moved.shape == packed.shape
        and moved.nbytes == packed.nbytes
    )
    for part in list(parts_of(moved).values()) + list(
        parts_of(getattr(moved, "ell", moved)).values()
    ):
        assert not isinstance(part, torch.Tensor) or part.device.type == "meta"
