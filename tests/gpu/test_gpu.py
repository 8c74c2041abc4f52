"""The kernels on a GPU at real shapes, in CUDA graphs, on streams, and compiled by Inductor."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from tests import fuzz
from tests.factories import SEED
from tests.factories import ops as factories
from tests.factories.ops import run
from twell.kernels import union
from twell.measure import synthetic_layer
from twell.sparse import ops
from twell.sparse.calibration import Calibration, Floor, Point
from twell.sparse.layer import SparseFFN

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")
PATHS = sorted(factories.PATHS)
NO_BIASES = dict.fromkeys(("b_gate", "b_up", "b_down"))


def assert_close(y, tensors):
    """Within the tolerance, and with many outputs within 1.25 times the dense layer's error."""
    _, expected = fuzz.exact(tensors)
    error = fuzz.relative_rms(y, expected)
    assert error <= fuzz.TOLERANCE[y.dtype]
    assert y.numel() < fuzz.MANY or error <= 1.25 * fuzz.relative_rms_of_dense(tensors, expected)


def skewed(num_tokens, hidden_size=2048, intermediate_size=5632, **options):
    parts = synthetic_layer(num_tokens, hidden_size, intermediate_size, **{"seed": SEED, **options})
    return dict(zip(("x", "w_gate", "w_up", "w_down"), parts, strict=True)) | NO_BIASES


@pytest.mark.parametrize(
    "shape", [(1024, 2816), (2048, 5632), (3072, 8192), (4096, 14_336), (1040, 2827)], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256, 2048])
@pytest.mark.parametrize("path", PATHS)
def test_skewed_layer(path, num_tokens, shape):
    tensors = skewed(num_tokens, *shape)
    assert_close(factories.PATHS[path](**tensors), tensors)


@pytest.mark.usefixtures("whole_card")
def test_union_workspace_is_bounded_and_chunks_agree(monkeypatch):
    tensors = skewed(131_072)
    y = factories.PATHS["union"](**tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = factories.PATHS["union"](**tensors)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= union.WORKSPACE_BYTES + y.nbytes + 2**22
    assert torch.equal(y, again)
    monkeypatch.setattr(union, "WORKSPACE_BYTES", 2**27)
    assert torch.equal(factories.PATHS["union"](**tensors), y)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_compiled_code_launches_decode_by_itself(gated, fp8, mode):
    """Up to four tokens; for five it calls the operator.

    All have the bits of eager calls but for four, which few.py computes there.
    """
    torch.use_deterministic_algorithms(False)
    case = fuzz.Case("decode", 5, 5632, 2048, gated=gated, biases=True, seed=SEED)
    tensors = fuzz.layer(case, "cuda")
    if fp8:
        tensors, _ = fuzz.quantized(case, tensors)
    x, *weights, x_scale, s_gate, s_up = (tensors.get(name) for name in ops.TENSORS)

    def calls(x, scale):
        return [run("decode", x, *weights, scale, s_gate, s_up) for _ in range(2)]

    torch.compiler.reset()
    compiled = torch.compile(calls, fullgraph=True, dynamic=False, mode=mode)
    for num_tokens in (1, 2, 3, 4, 5):
        scale = x_scale if x_scale is None else x_scale[:num_tokens].clone()
        for given in (x[:num_tokens].clone(), x[-num_tokens:].clone()):
            torch.compiler.cudagraph_mark_step_begin()
            y, again = compiled(given, scale)
            expected = calls(given, scale)[0]
            assert torch.equal(y, again)
            assert fuzz.relative_rms(y, expected) <= (4e-3 if num_tokens == 4 else 0)


def test_threads_that_call_at_once():
    """Each with sizes of its own, first calls included."""
    layers = [skewed(m, 1024, 1408, seed=SEED + m) for m in (1, 2, 3, 40, 600, 1300)]
    stop = time.monotonic() + 3

    def call(tensors):
        first = last = None
        with torch.cuda.stream(torch.cuda.Stream()):
            while last is None or time.monotonic() < stop:
                last = [factories.PATHS[path](**tensors) for path in PATHS]
                first = first or last
            torch.cuda.current_stream().synchronize()
        return first, last

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(layers)) as pool:
        results = list(pool.map(call, layers))
    for tensors, pairs in zip(layers, results, strict=True):
        for path, y, again in zip(PATHS, *pairs, strict=True):
            assert torch.equal(y, again) and torch.equal(y, factories.PATHS[path](**tensors))
            assert_close(y, tensors)


def test_nothing_waits_for_the_device():
    tensors = skewed(64)
    for path in PATHS:
        factories.PATHS[path](**tensors)
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for path in PATHS:
            factories.PATHS[path](**tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# M * N, then M * K, above 2^31; everything else as small as it can be.
LARGE = (40_000, 65_536, 16), (131_200, 16, 16_384)


def large_layer(num_tokens, intermediate_size, hidden_size):
    """Tensors of a layer with one neuron in a thousand active."""
    g = torch.Generator("cuda").manual_seed(SEED)

    def normal(*shape):
        return torch.randn(shape, generator=g, device="cuda")

    x, w_down = normal(num_tokens, hidden_size), normal(intermediate_size, hidden_size)
    w_gate, w_up = (normal(intermediate_size, hidden_size) / hidden_size**0.5 for _ in range(2))
    x[:, 0], w_gate[:, 0] = 1, -3.1
    x, w_gate, w_up, w_down = (t.bfloat16() for t in (x, w_gate, w_up, w_down))
    return dict(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down.t()) | NO_BIASES


def some_rows(num_tokens):
    """The first and last tokens, and some between."""
    return torch.cat(
        [torch.arange(256), torch.randint(num_tokens, (256,)), num_tokens - 1 - torch.arange(256)]
    ).cuda()


@pytest.mark.usefixtures("whole_card")
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_more_than_2_to_the_31_entries(path, shape):
    torch.use_deterministic_algorithms(False)
    tensors = large_layer(*shape)
    y = factories.PATHS[path](**tensors)
    rows = some_rows(shape[0])
    _, expected = fuzz.exact({**tensors, "x": tensors["x"][rows]})
    assert fuzz.relative_rms(y[rows], expected) <= 5e-3
    last = factories.PATHS[path](**{**tensors, "x": tensors["x"][-64:]})
    assert path == "union" or torch.equal(last, y[-64:])


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("num_tokens", [64, 700])
def test_a_graph_may_take_another_path_than_the_calls_before(num_tokens):
    torch.use_deterministic_algorithms(False)
    sizes, path = (176, 336), ops.choose(num_tokens)  # widths that no other test compiles
    tensors = {name: t if t is None else t.half() for name, t in skewed(num_tokens, *sizes).items()}
    layer = SparseFFN(*sizes, backend="auto", device="cuda", dtype=torch.float16).eval()
    for name in ("gate", "up", "down"):
        getattr(layer, f"{name}_proj").weight = nn.Parameter(tensors[f"w_{name}"], False)
    points = tuple(Point(num_tokens, 0, n, {"dense": 1.0, path: 0.5}) for n in (0, sizes[1]))
    about = "x", *sizes, True, "float16", "", "", points
    layer.calibration = Calibration(*about, floors=(Floor("eager", 1, {path: 2.0}),))
    layer.observe(0, 0)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            dense = layer(tensors["x"])
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            y = layer(tensors["x"])
        graph.replay()
        assert torch.equal(y, factories.PATHS[path](**tensors))
    assert fuzz.relative_rms(y, dense) < 2e-3


@two_gpus
@pytest.mark.parametrize("num_tokens", [1, 200, 700])
def test_auto_on_a_device_that_is_not_the_current_one(num_tokens):
    """Eager, compiled and in a CUDA graph."""
    torch.use_deterministic_algorithms(False)
    tensors = skewed(num_tokens, 256, 704)
    layer = SparseFFN(256, 704, device="cuda", dtype=torch.bfloat16).eval()
    for name in ("gate", "up", "down"):
        getattr(layer, f"{name}_proj").weight = nn.Parameter(tensors[f"w_{name}"], False)
    x = tensors["x"].to("cuda:1")
    layer.to("cuda:1").backend = "auto"
    most = 1 << (num_tokens - 1).bit_length()  # for which a plan asks
    half = Point(most, 0, 704, {"dense": 1.0, ops.choose(num_tokens): 0.5})
    layer.calibration = Calibration("x", 256, 704, True, "bfloat16", "", "", (half,))
    layer.observe(0, 0)
    assert layer.chooser.path(num_tokens) == ops.choose(num_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.device(0):
        results = [layer(x), torch.compile(layer, fullgraph=True, dynamic=False)(x)]
        with torch.cuda.device(1):
            torch.cuda.synchronize()
            # By default a capture takes the stream of the first one, on whatever device that was.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                results.append(layer(x))
        graph.replay()
        torch.cuda.synchronize("cuda:1")
    for y in results:
        assert y.device == x.device
        assert_close(y.to("cuda:0"), tensors)
