"""twell.ffn on a GPU: graphs captured after warm_up, one compiled graph, two GPUs."""

import pytest
import torch

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
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, twell.ffn(x, *weights, **options))


@pytest.mark.parametrize("path", ["decode", "union", "rowwise"])
@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_repeated_calls_replay_what_they_launched(path, num_tokens, monkeypatch):
    x, w_gate, w_up, w_down_t = layer(num_tokens)
    tensors = x, w_gate, w_up, w_down_t.t(), None, None, None
    counted = [torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(2)]
    replay.clear()
    out, streams = torch.empty_like(x), [torch.cuda.current_stream(), torch.cuda.Stream()]
    for turn in range(12):
        x.copy_(x.roll(1, 0) * 1.01)
        w_up.mul_(0.99)  # in place, so that addresses stay
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 2]), torch.no_grad():
            run(path, *tensors, activity=counted[0], out=out)
            torch.cuda.synchronize()
            with monkeypatch.context() as patch:
                patch.setattr(replay, "MAX_TOKENS", 0)
                assert torch.equal(out, run(path, *tensors, activity=counted[1]))
    assert torch.equal(*counted)
    graphs = [case for case in replay._cases.values() if isinstance(case, torch.cuda.CUDAGraph)]
    assert len(graphs) == 2  # one for each stream


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
    sizes = [(None, 1), (None, 64), (None, 2048)]
    results = parallel.compute_by_two(parallel.cases(sizes, 5632, 2048), "cuda", tmp_path)
    assert len(results) == 2 * 9
    for result in results:
        assert result.from_one < 8e-3 and result.from_fp64 < 8e-3, result
        assert result.replayed, result
