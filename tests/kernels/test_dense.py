"""The dense layer: cuBLAS products and one kernel, against the one dense formula."""

import functools

import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.kernels import DEVICE
from tests.factories.ops import run
from twell.kernels import common, dense
from twell.sparse import reference
from twell.sparse.activations import get_activation


@pytest.mark.parametrize("compute", [functools.partial(run, "dense"), reference.ffn])
@pytest.mark.parametrize("seed", range(SEED, SEED + 8))
def test_dense_path_in_a_random_case(compute, seed):
    case = fuzz.draw(seed, large=False)
    tensors = fuzz.layer(case, DEVICE)
    y = compute(*tensors.values(), act=case.act)
    assert y.shape == tensors["x"].shape and y.dtype == case.dtype and y.is_contiguous()
    few = int((fuzz.exact(tensors, act=case.act)[0] > 0).sum()) < fuzz.FEW  # see fuzz.check
    # cuBLAS may round parts of a sum, and once more before the bias.
    exact = case.values == "integer" and DEVICE == "cpu" and not case.act.squared
    options, dtype = {"dense": True, "act": case.act}, case.dtype
    if exact or few:
        expected = fuzz.exact(tensors, dtype, dtype, dtype, **options)[1].to(dtype).double()
        slack = 0 if exact else fuzz.TWO_UNITS[dtype]
        assert fuzz.relative_rms(y, expected) <= slack, case
    else:
        assert fuzz.relative_rms(y, fuzz.exact(tensors, **options)[1]) <= case.tolerance, case


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
