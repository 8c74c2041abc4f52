"""twell.ffn on a GPU: graphs captured after warm_up, one compiled graph, two GPUs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import twell
from tests import fuzz
from tests.factories import SEED, parallel
from tests.factories.ops import run
from tests.gpu.test_gpu import two_gpus
from twell.kernels import replay
from twell.measure import synthetic_layer
from twell.sparse.activations import get_activation

KINDS = [("relu", 0.0), ("relu", 0.1), ("relu2", 0.0), ("drelu", 0.0)]


def layer(num_tokens, device="cuda"):
    """x, w_gate, w_up and w_down_t."""
    x, w_gate, w_up, w_down = synthetic_layer(num_tokens, 2048, 5632, seed=SEED, device=device)
    return x, w_gate, w_up, w_down.t()


@pytest.mark.parametrize("activation, threshold", KINDS)
@pytest.mark.parametrize("path, num_tokens", [("decode", 1), ("decode", 16), ("union", 2048)])
@pytest.mark.parametrize("gated", [True, False])
def test_real_shapes(activation, threshold, path, num_tokens, gated):
    if activation == "drelu" and not gated:
        pytest.skip("dReLU has a gate")
    x, w_gate, w_up, w_down_t = layer(num_tokens)
    weights = (w_gate if gated else None, w_up if gated else w_gate, w_down_t)
    options = {"activation": activation, "threshold": threshold}
    y = twell.ffn(x, *weights, **options, path=path)
    names = ("x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
    tensors = dict(zip(names, (x, *weights[:2], w_down_t.t(), None, None, None), strict=True))
    _, expected = fuzz.exact(tensors, act=get_activation(activation, threshold))
    assert fuzz.relative_rms(y, expected) < 1.5 * fuzz.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64, 65, 4096])
def test_a_graph_is_captured_after_warm_up(num_tokens):
    x, *weights = layer(num_tokens)
    options = {"activation": "relu2", "threshold": 0.1}
    twell.warm_up([num_tokens], *weights, **options)
    out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        twell.ffn(x, *weights, **options, out=out)
    x.copy_(x.roll(1, 0) * 1.01)  # new tokens
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, twell.ffn(x, *weights, **options))


@pytest.mark.parametrize("path", ["decode", "union", "rowwise", "dense"])
@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_repeated_calls_replay_what_they_launched(path, num_tokens, monkeypatch):
    x, w_gate, w_up, w_down_t = layer(num_tokens)
    tensors = w_gate, w_up, w_down_t.t(), None, None, None
    counted = [torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(2)]
    replay.clear()
    out, streams = torch.empty_like(x), [torch.cuda.current_stream(), torch.cuda.Stream()]
    for turn in range(12):
        x = x.roll(1, 0) * 1.01  # at another address
        w_up.mul_(0.99)  # in place, so that addresses stay
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 2]), torch.no_grad():
            run(path, x, *tensors, activity=counted[0], out=out)
            torch.cuda.synchronize()
            with monkeypatch.context() as patch:
                patch.setattr(replay, "MAX_TOKENS", 0)
                assert torch.equal(out, run(path, x, *tensors, activity=counted[1]))
    assert torch.equal(*counted)
    graphs = [case for case in replay._cases.values() if type(case) is replay.Graph]
    assert len(graphs) == 2  # one for each stream


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_that_is_replayed_follows_its_weights_hooks_and_threads(quantized, monkeypatch):
    """Calls of "auto" that need no look at the layer: the same bits as of calls that look."""
    ffn = twell.SparseFFN(2048, 5632, backend="auto", device="cuda", dtype=torch.bfloat16).eval()
    nn.init.normal_(ffn.gate_proj.weight, -0.05, 0.02)
    ffn.gate_proj.weight[::300].neg_()  # these neurons alone are active
    if quantized:
        twell.quantize_(ffn)
    sizes = (1, 20) if quantized else (1500, 2000)  # fewer are dense in bf16
    inputs = [torch.rand(n, 2, 2048, device="cuda").bfloat16() for n in sizes for _ in range(3)]
    ffn.chooser.freeze({1: (20.0, 20.0), 64: (20.0, 200.0)})

    def check() -> None:
        for x in inputs:
            y = ffn(x)
            with monkeypatch.context() as patch:
                patch.setattr(replay, "MAX_TOKENS", 0)
                assert torch.equal(y, ffn(x))

    replay.clear()
    with torch.inference_mode():
        check()
        check()
    check()
    assert sum(type(case) is replay.Graph for case in replay._cases.values()) == 2
    ffn.up_proj.weight.view(torch.uint8).bitwise_xor_(128)
    ffn.down_proj.weight.neg_()
    check()
    expected = [ffn(x) for x in inputs]
    assert all(y.any() for y in expected)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            # Threads begin with gradients.
            for y, one in zip(pool.map(torch.no_grad()(ffn), inputs), expected, strict=True):
                assert torch.equal(y, one)
    ffn.down_proj.weight.data = ffn.down_proj.weight.data.clone()
    check()
    ffn.down_proj.register_forward_hook(lambda part, given, y: 0 * y)
    assert all((ffn(x) == 0).all() for x in inputs)


def test_inductor_compiles_once_for_every_number_of_tokens():
    x, *weights = layer(300)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(
        lambda rows: twell.ffn(rows, *weights) + rows, fullgraph=True, dynamic=True
    )
    for size in (300, 64, 65, 2, 17):
        rows = x[:size].clone()
        expected = twell.ffn(rows, *weights) + rows
        torch.testing.assert_close(compiled(rows), expected, rtol=2**-7, atol=2**-7)
    assert counters["stats"]["unique_graphs"] == 1


@two_gpus
def test_two_processes_with_nccl_compute_one_layer(tmp_path):
    """The all-reduce runs eagerly, and inside a CUDA graph."""
    results = parallel.compute_by_two((1, 64, 2048), tmp_path)
    assert len(results) == 2 * 9
    for result in results:
        assert result.from_one < 8e-3 and result.from_fp64 < 8e-3, result
        assert result.replayed, result
