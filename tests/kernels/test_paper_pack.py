"""Conversions of the formats on a device, bit for bit those of twell.sparse.formats."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    bits,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import common
from twell.kernels.paper import pack
from twell.sparse import formats


def dense_matrix(pattern, dtype, num_tokens=37, n_cols=300):
    dense = torch.randn(num_tokens, n_cols, device=DEVICE).to(dtype)
    likely = {"empty": 0.0, "sparse": 0.03, "half": 0.5, "full": 1.0}[pattern]
    dense[torch.rand(num_tokens, n_cols, device=DEVICE) >= likely] = 0
    dense[torch.rand(num_tokens, n_cols, device=DEVICE) < 0.05] *= -1  # also makes -0.0
    if num_tokens:
        dense[0] = 0
        dense[num_tokens // 2] = 1.5
        dense[-1] = 0
        dense[-1, 0], dense[-1, -1] = float("nan"), float("-inf")
        # A NaN with a payload.
        bits(dense)[-1, n_cols // 2] = torch.iinfo(bits(dense).dtype).max - 5
    return dense


def equal(a, b):
    """Assert that two objects of a format hold the same bits.

    b comes from the CPU: torch's deterministic assignment by index alters NaN payloads on a GPU.
    """
    a = a.to("cpu")
    for name in vars(b):
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(right, torch.Tensor):
            assert left.dtype == right.dtype and left.shape == right.shape, name
            assert torch.equal(
                left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            ), name
        elif isinstance(right, formats.SparseRows):
            equal(left, right)
        else:
            assert left == right, name


def assert_round_trip(packed, dense):
    back = pack.unpack(packed)
    assert torch.equal(bits(back), bits(dense.masked_fill(dense == 0, 0)))


shapes = pytest.mark.parametrize("shape", [(0, 5), (1, 1), (19, 300), (3, 513)], ids=str)
patterns = pytest.mark.parametrize("pattern", ["empty", "sparse", "half", "full"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@shapes
@patterns
@dtypes
@pytest.mark.parametrize("tile", [(256, 8), (256, 2), (24, 3), (40, 40)], ids=str)
def test_pack_twell(shape, pattern, dtype, tile):
    dense = dense_matrix(pattern, dtype, *shape)
    packed = pack.to_twell(dense, *tile)
    equal(packed, formats.TwELL.pack(dense.cpu(), *tile))
    assert_round_trip(packed, dense)


@shapes
@patterns
@pytest.mark.parametrize("dtype", common.DTYPES, ids=str)
@pytest.mark.parametrize("tile", [(256, 2), (256, 16), (12, 3)], ids=str)
def test_pack_packed_twell(shape, pattern, dtype, tile):
    dense = dense_matrix(pattern, dtype, *shape)
    packed = pack.to_packed_twell(dense, *tile)
    equal(packed, formats.PackedTwELL.pack(dense.cpu(), *tile))
    assert_round_trip(packed, dense)


@shapes
@patterns
@dtypes
def test_pack_ell(shape, pattern, dtype):
    dense = dense_matrix(pattern, dtype, *shape)
    for width in (None, shape[1] + 7):
        packed = pack.to_ell(dense, width)
        equal(packed, formats.ELL.pack(dense.cpu(), width))
        assert_round_trip(packed, dense)


@shapes
@patterns
@dtypes
@pytest.mark.parametrize("ell_width", [1, 16, 400])
def test_pack_hybrid(shape, pattern, dtype, ell_width):
    dense = dense_matrix(pattern, dtype, *shape)
    for backup_rows in (None, shape[0]):
        packed = pack.to_hybrid(dense, ell_width, backup_rows)
        equal(packed, formats.Hybrid.pack(dense.cpu(), ell_width, backup_rows))
        assert_round_trip(packed, dense)
        assert_round_trip(packed.to("cpu").transpose().to(DEVICE), dense.t())


@shapes
@patterns
@dtypes
@pytest.mark.parametrize("block_m", [1, 5, 64])
def test_pack_union(shape, pattern, dtype, block_m):
    dense = dense_matrix(pattern, dtype, *shape)
    packed = pack.to_union(dense, block_m)
    equal(packed, formats.TileUnion.pack(dense.cpu(), block_m))
    assert_round_trip(packed, dense)


def test_packing_refuses_what_does_not_fit():
    dense = dense_matrix("half", torch.bfloat16)
    with pytest.raises(ValueError, match="width of 300 is needed"):
        pack.to_ell(dense, 7)
    with pytest.raises(formats.BufferOverflow, match="backup_rows=1") as problem:
        pack.to_hybrid(dense, 16, 1)
    assert problem.value.needed == int(((dense != 0).sum(1) > 16).sum())
    with pytest.raises(TypeError, match="float64"):
        pack.to_twell(dense.double())
    with pytest.raises(TypeError, match="float32"):
        pack.to_packed_twell(dense.float())
    with pytest.raises(ValueError, match="block_m=0"):
        pack.to_union(dense, 0)
    with pytest.raises(ValueError, match="compression=7"):
        pack.to_twell(dense, 256, 7)
    with pytest.raises(TypeError, match="float64"):
        pack.unpack(formats.ELL.pack(dense.double()))
