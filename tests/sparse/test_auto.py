import dataclasses
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

from tests.factories.sparse import (
    DEVICE,
    call,
    exact,
    make,
    make_auto,
    positive,
    relative,
    small_threshold,
    triton_here,
    watched,
)
from twell.sparse.calibration import Floor
from twell.sparse.layer import captured_by_hand

DENSE = ((2**20, "dense"),)


@triton_here
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_auto_follows_what_it_sees(taken, gated, bias):
    ffn, x = make_auto(gated, bias), positive(70)
    assert ffn.observed is None and ffn.plan == DENSE

    def calls(x, times):
        for _ in range(times):
            call(ffn, x)
        return taken[-1]

    assert calls(x, 1) == "dense"
    assert calls(x, 3) == "union" and ffn.observed == (3, 3)
    assert calls(-x, 11) == "union" and calls(-x, 1) == "dense" and ffn.observed[0] > 60
    assert calls(x, 47) == "dense"  # dense calls count their activity now and then: the 32nd did
    assert calls(x, 1) == "union" and ffn.observed == (3, 3)


@triton_here
def test_a_trace_shows_auto_no_activity(taken):
    ffn, x = make_auto(), positive(70)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for _ in range(3):
                ffn(mode.from_tensor(x))
        for _ in range(3):
            ffn(x)
    assert ffn.observed == (3, 3)


@triton_here
def test_auto_is_right_whatever_the_plan_says(taken):
    x, others = positive(70), torch.arange(70, device=DEVICE) != 7
    x[7, 3] = float("nan")
    for sign in (1, -1):
        for observed in ((0, 0), (70, 70)):
            ffn = make_auto()
            ffn.observe(*observed)
            with torch.no_grad():
                y = ffn(sign * x)
                assert ffn(x[None, :0]).shape == (1, 0, 32)
            assert y[7].isnan().all()
            assert relative(y[others], exact(ffn, sign * x)[others]) < 1e-3
    assert set(taken) == {"decode", "union", "dense"}


@triton_here
def test_compiled_code_keeps_to_the_plan_and_is_shared():
    torch.compiler.reset()
    ffn, graphs, x = make_auto(), CompileCounter(), positive(70)
    ffn.observe(3, 20)
    compiled = torch.compile(ffn, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for _ in range(2):
            assert relative(compiled(x), ffn(x)) < 1e-3  # the call on the right counts and plans
        assert graphs.frame_count == 1
        assert ffn.observed == (3, 3) or x.is_cuda  # the compiled ones do not
        for observed in ((70, 70), (3, 21)):  # the code for the second plan is there
            ffn.observe(*observed)
            compiled(x)
            assert graphs.frame_count == 2
        assert ffn.plan != DENSE

        torch.compiler.reset()
        graphs, layers = CompileCounter(), [make_auto() for _ in range(3)]
        given = small_threshold()
        times = tuple(point for point in given.times if "decode" not in point.ms)
        layers[1].calibration = dataclasses.replace(given, times=times)  # few tokens densely
        cases = zip(layers, ((3, 20), (3, 20), (70, 70)), (1, 1, 2), strict=True)
        for ffn, observed, expected in cases:
            ffn.observe(*observed)
            ffn.compile(fullgraph=True, backend=graphs, dynamic=False)
            ffn(x)
            assert graphs.frame_count == expected
        assert len({ffn.plan for ffn in layers}) == 3
        assert [ffn.chooser.path(70) for ffn in layers] == ["union", "union", "dense"]


@triton_here
def test_compiled_code_for_any_number_of_tokens_serves_all_with_one_path():
    ffn, graphs = make_auto(), CompileCounter()
    compiled = torch.compile(ffn, fullgraph=True, backend=graphs, dynamic=True)
    with torch.no_grad():
        for observed, expected in (((70, 70), 1), ((3, 3), 3)):
            torch.compiler.reset()
            graphs.clear()
            ffn.observe(*observed)
            assert len(ffn.plans["graph"]) == (expected + 1) // 2
            for tokens in (5, 2, 7, 9, 40, 300, 3):
                x = positive(tokens)
                assert relative(compiled(x), exact(ffn, x)) < 1e-2
            assert graphs.frame_count <= expected


def waiting():
    """A layer whose eager and compiled calls are dense for 70 tokens, and its unions captured."""
    ffn = make_auto()
    floors = (Floor("eager", 1, {"union": 9.0}), Floor("compiled", 1, {"union": 9.0}))
    ffn.calibration = dataclasses.replace(ffn.calibration, floors=floors)
    ffn.observe(3, 3)
    return ffn


@triton_here
def test_the_path_depends_on_the_situation(taken):
    ffn, x = waiting(), positive(70)
    assert ffn.plan == ffn.plans["eager"]
    assert ffn.plan == ((8, "decode"), (65_536, "dense"), (2**20, "union"))
    assert ffn.plans["graph"] == ((8, "decode"), (2**20, "union"))
    with torch.no_grad():
        for _ in range(2):  # the first call warms up what a graph would launch
            ffn(x)
    assert taken == ["union", "dense", "dense"]


@triton_here
def test_compiled_code_notices_that_it_will_be_captured():
    ffn, x = waiting(), positive(70)
    by_inductor, with_graphs = {"backend": "inductor"}, {"mode": "reduce-overhead"}
    for options, by_hand, sparse in (
        ({"backend": "aot_eager"}, False, False),
        (by_inductor, False, False),
        (with_graphs, False, True),
        (by_inductor, True, True),
    ):
        torch.compiler.reset()
        with torch.no_grad(), captured_by_hand() if by_hand else nullcontext():
            launches = watched_launches(torch.compile(ffn, fullgraph=True, **options), x)
        assert launches == (["union"] if sparse else []), options


def watched_launches(compiled, x):
    """The sparse paths that run in a call of compiled code, after a check of the result."""
    from twell.sparse import ops

    launches, union = [], ops.PATHS["union"]
    ops.PATHS["union"] = lambda *a, **o: launches.append("union") or union(*a, **o)
    try:
        assert relative(compiled(x), exact(compiled._orig_mod, x)) < 1e-3
    finally:
        ops.PATHS["union"] = union
    return launches


@triton_here
def test_a_small_dense_call_loads_what_a_graph_would_launch(taken):
    """Which is the dense kernel; the call itself is computed by the projections, as later ones."""
    ffn, x = make_auto(), -positive(70)
    ffn.observe(70, 70)
    assert ffn.plans["graph"] == DENSE
    with torch.no_grad():
        first, second = ffn(x), ffn(x)
    assert taken == ["dense"] * 3 and torch.equal(first, second)


@triton_here
def test_auto_with_gradients_l1_or_statistics_is_dense(taken):
    ffn = make_auto(dtype=torch.float64).requires_grad_(True)
    ffn.observe(3, 3)
    x, results = positive(70, dtype=torch.float64), {"dense": [], "auto": []}
    for backend, result in results.items():
        ffn.backend = backend
        for training in (True, False):
            ffn.train(training).zero_grad()
            y, _ = watched(ffn, x, counts=True)
            y.sum().backward()
            result += [y, *ffn.stats.take(), *(p.grad.clone() for p in ffn.parameters())]
    for dense, auto in zip(*results.values(), strict=True):
        torch.testing.assert_close(auto, dense)
    assert taken == []


@pytest.mark.parametrize("case", ["no triton", "float64", "odd width"])
def test_auto_works_where_the_kernels_do_not(case, monkeypatch):
    if case == "no triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    width = 24 if case == "odd width" else 32
    dtype = torch.float64 if case == "float64" else torch.float16
    ffn = make(dtype=dtype, sizes=(width, 70), backend="auto").to(DEVICE).eval()
    ffn.calibration = small_threshold(hidden_size=width)
    ffn.observe(3, 3)
    x = torch.randn(70, width, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        y = ffn(x)
        ffn.backend = "dense"
        torch.testing.assert_close(y, ffn(x))


@triton_here
def test_auto_under_autocast(taken):
    ffn, x = make_auto(dtype=torch.float32), positive(70, dtype=torch.float32)
    ffn.observe(3, 3)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = ffn(x)
    assert y.dtype == torch.bfloat16 and taken == ["union"]
    assert relative(y, ffn.requires_grad_(True)(x)) < 1e-2
