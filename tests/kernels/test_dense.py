"""The dense layer: cuBLAS products and one kernel, against the one dense formula."""

import functools

import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.kernels import DEVICE, integer_case
from tests.factories.ops import run
from twell.kernels import common, dense
from twell.sparse import reference
from twell.sparse.activations import RELU, get_activation


def rounded(tensors, dtype, act=RELU):
    """y in `dtype` of the layer in fp64 that rounds g, u and h to `dtype`, as dense layers do."""
    return fuzz.exact(tensors, dtype, dtype, dtype, dense=True, act=act)[1].to(dtype)


@pytest.mark.parametrize("compute", [functools.partial(run, "dense"), reference.ffn])
@pytest.mark.parametrize("seed", range(SEED, SEED + 12))
def test_dense_path_in_a_random_case(compute, seed):
    case = fuzz.draw(seed, large=False)
    tensors = fuzz.layer(case, DEVICE)
    y = compute(*tensors.values(), act=case.act)
    assert y.shape == tensors["x"].shape and y.dtype == case.dtype and y.is_contiguous()
    few = int((fuzz.exact(tensors, act=case.act)[0] > 0).sum()) < fuzz.FEW  # see fuzz.check
    # cuBLAS may round parts of a sum, and once more before the bias.
    exact = case.values == "integer" and DEVICE == "cpu" and not case.act.squared
    if exact or few:
        slack = 0 if exact else fuzz.TWO_UNITS[case.dtype]
        expected = rounded(tensors, case.dtype, case.act).double()
        assert fuzz.relative_rms(y, expected) <= slack, case
    else:
        _, expected = fuzz.exact(tensors, dense=True, act=case.act)
        assert fuzz.relative_rms(y, expected) <= case.tolerance, case


@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name, threshold", [("relu", 0.0), ("relu2", 0.0), ("drelu", 2.5)])
def test_dense_product_of_every_kind_of_value(dtype, gated, name, threshold):
    act = get_activation(name, threshold)
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -2.5, 3.0, 6e-8, 1e4]
    g, u = torch.tensor(special, dtype=dtype), torch.tensor(special, dtype=dtype)
    g, u = (part.contiguous().to(DEVICE) for part in torch.meshgrid(g, u, indexing="ij"))
    size = 77  # not all 81: the entries behind the end stay as they are
    product = act.of_gate(act.gate(g)).float() * (act.of_up(u.float()) if gated else 1)
    product = product.to(dtype).flatten()
    expected = torch.cat([product[:size], g.flatten()[size:]])
    arguments = g, u if gated else None, threshold or None, size
    dense.relu_times_kernel[(3,)](*arguments, ACT=name, BLOCK=32)
    torch.testing.assert_close(g.flatten(), expected, rtol=0, atol=0, equal_nan=True)


def test_dense_path_of_several_programs_and_none():
    case = integer_case(num_tokens=31, intermediate_size=401, hidden_size=32)
    block = dense.launch_options("dense", torch.device(DEVICE))["BLOCK"]
    assert 31 * 401 > 3 * block
    tensors = fuzz.layer(case, DEVICE)
    assert torch.equal(run("dense", *tensors.values()), rounded(tensors, case.dtype))
    assert run("dense", *{**tensors, "x": tensors["x"][:0]}.values()).shape == (0, 32)
