"""FP8 on a GPU: real shapes, graphs, Inductor, a second device."""

import pytest
import torch

pytest.importorskip("triton")

import twell
from tests import fuzz
from tests.factories import SEED
from twell.kernels import dense
from twell.kernels import float8 as kernels
from twell.measure import synthetic_layer
from twell.sparse import float8
from twell.sparse.activations import RELU

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and float8.why_not(torch.device("cuda")) is not None,
    reason="needs a GPU with FP8",
)


def quantized(num_tokens, backend="triton", seed=SEED):
    """x, and a SparseFFN in FP8."""
    x, w_gate, w_up, w_down = synthetic_layer(num_tokens, 2048, 5632, seed=seed)
    layer = twell.SparseFFN(2048, 5632, backend=backend, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for part, weight in ((layer.gate_proj, w_gate), (layer.up_proj, w_up)):
            part.weight.copy_(weight)
        layer.down_proj.weight.copy_(w_down)
    twell.quantize_(layer.eval())
    return x, layer


@pytest.mark.parametrize("path, num_tokens", [("decode", 1), ("decode", 17), ("union", 2100)])
@pytest.mark.parametrize("pattern", ["skewed", "heavy", "full"])
@pytest.mark.parametrize("values", ["normal", "integer"])
def test_real_shapes(path, num_tokens, pattern, values):
    options = dict(pattern=pattern, values=values, biases=True, fp8=True, seed=SEED)
    fuzz.check(fuzz.Case(path, num_tokens, 5632, 2048, **options), "cuda")


@pytest.mark.parametrize("num_tokens", [1, 3, 300])
def test_one_kernel_quantises_as_the_reference_does(num_tokens):
    x = torch.randn(num_tokens, 2048, device="cuda", dtype=torch.bfloat16)
    x[0, 3], x[-1] = 1e4, 0
    g, u = torch.randn(2, num_tokens, 5632, device="cuda", dtype=torch.bfloat16)
    stored = dense.relu_times(g.clone(), u)
    for given, rows in (((x,), x), ((g, u, RELU), stored), ((g, None, RELU), g.relu())):
        for result, expected in zip(kernels.quantize(*given), float8.quantize(rows), strict=True):
            assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 64, 2100])
def test_compiled_and_in_a_graph(num_tokens):
    x, layer = quantized(num_tokens)
    expected = layer(x)
    torch.testing.assert_close(torch.compile(layer)(x), expected, rtol=2**-6, atol=2**-6)
    other, graph = quantized(num_tokens, seed=SEED + 1)[0], torch.cuda.CUDAGraph()
    fresh, static = layer(other), x.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = layer(static)
    static.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, fresh)
