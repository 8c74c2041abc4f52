"""The dense layer: cuBLAS products and one kernel, against the one dense formula."""

import functools

import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.kernels import DEVICE, integer_case
from twell.kernels import common, dense, ops
from twell.sparse import reference


def rounded(tensors, dtype):
    """y in `dtype` of the layer in fp64 that rounds g, u and h to `dtype`, as dense layers do."""
    return fuzz.exact(tensors, dtype, dtype, dtype, dense=True)[1].to(dtype)


@pytest.mark.parametrize("compute", [functools.partial(ops.run, "dense"), reference.ffn])
@pytest.mark.parametrize("seed", range(SEED, SEED + 12))
def test_dense_path_in_a_random_case(compute, seed):
    case = fuzz.draw(seed, large=False)
    tensors = fuzz.layer(case, DEVICE)
    y = compute(*tensors.values())
    assert y.shape == tensors["x"].shape and y.dtype == case.dtype and y.is_contiguous()
    few = int((fuzz.exact(tensors)[0] > 0).sum()) < fuzz.FEW  # see fuzz.check
    # cuBLAS may round parts of a sum, and once more before the bias.
    exact = case.values == "integer" and DEVICE == "cpu"
    if exact or few:
        slack = 0 if exact else fuzz.TWO_UNITS[case.dtype]
        assert fuzz.relative_rms(y, rounded(tensors, case.dtype).double()) <= slack, case
    else:
        expected = reference.ffn(*fuzz.doubles(tensors).values())
        assert fuzz.relative_rms(y, expected) <= fuzz.TOLERANCE[case.dtype], case


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_dense_product_of_every_kind_of_value(dtype):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -2.5, 3.0, 6e-8, 1e4]
    g, u = torch.tensor(special, dtype=dtype), torch.tensor(special, dtype=dtype)
    g, u = (part.contiguous().to(DEVICE) for part in torch.meshgrid(g, u, indexing="ij"))
    size = 77  # not all 81: the entries behind the end stay as they are
    product = (g.float().relu() * u.float()).to(dtype).flatten()
    expected = torch.cat([product[:size], g.flatten()[size:]])
    dense.relu_times_kernel[(3,)](g, u, size, BLOCK=32)
    torch.testing.assert_close(g.flatten(), expected, rtol=0, atol=0, equal_nan=True)


def test_dense_path_of_several_programs_and_none():
    case = integer_case(num_tokens=31, intermediate_size=401, hidden_size=32)
    block = dense.launch_options("dense", torch.device(DEVICE))["BLOCK"]
    assert 31 * 401 > 3 * block
    tensors = fuzz.layer(case, DEVICE)
    assert torch.equal(ops.run("dense", *tensors.values()), rounded(tensors, case.dtype))
    assert ops.run("dense", *{**tensors, "x": tensors["x"][:0]}.values()).shape == (0, 32)
