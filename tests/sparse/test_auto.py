import copy
import dataclasses
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounter

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
from twell.sparse import ops
from twell.sparse.calibration import Floor
from twell.sparse.edit import Edit
from twell.sparse.layer import captured_by_hand

DENSE = ((2**20, "dense"),)


@triton_here
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_auto_follows_what_it_sees(taken, gated, bias):
    ffn, x = make_auto(gated, bias), positive(70)
    assert ffn.observed is None and ffn.plans["eager"] == DENSE

    def last_path(x, calls):
        for _ in range(calls):
            taken.clear()
            call(ffn, x)
        return taken[-1] if taken else "dense"

    assert last_path(x, 1) == "dense"
    assert last_path(x, 3) == "union" and ffn.observed == (3, 3)
    assert last_path(-x, 11) == "union"
    assert last_path(-x, 1) == "dense" and ffn.observed[0] > 60
    assert last_path(x, 47) == "dense"  # dense calls count their activity now and then: the 32nd
    assert last_path(x, 1) == "union" and ffn.observed == (3, 3)
    assert ffn(x[None, :0]).shape == (1, 0, 32)


@triton_here
def test_compiled_code_keeps_to_the_plan_and_is_shared():
    torch.compiler.reset()
    graphs, x = CompileCounter(), positive(9)
    layers, given = [make_auto() for _ in range(3)], small_threshold()
    times = tuple(point for point in given.times if "decode" not in point.ms)
    layers[1].calibration = dataclasses.replace(given, times=times)  # few tokens densely
    for ffn, seen, expected in zip(layers, ((3, 20), (3, 20), (70, 70)), (1, 1, 2), strict=True):
        ffn.observe(*seen)
        ffn.compile(fullgraph=True, backend=graphs, dynamic=False)
        with torch.no_grad():
            assert relative(ffn(x), exact(ffn, x)) < 1e-3
        assert graphs.frame_count == expected
    assert len({ffn.plans["eager"] for ffn in layers}) == 3
    assert [ffn.chooser.path(70) for ffn in layers] == ["union", "union", "dense"]
    with torch.no_grad():
        for seen in ((70, 70), (3, 21)):  # the code for either plan is there
            layers[0].observe(*seen)
            assert layers[0](x).isfinite().all()
            assert graphs.frame_count == 2 and layers[0].observed == seen  # none counts


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
            for tokens in (5, 2, 40):
                x = positive(tokens)
                assert relative(compiled(x), exact(ffn, x)) < 1e-2
            assert graphs.frame_count <= expected


@triton_here
def test_the_path_depends_on_the_situation(taken, monkeypatch):
    """Eager and compiled calls are dense for 9 tokens; captured ones take unions."""
    ffn, x = make_auto(), positive(9)
    floors = tuple(Floor(situation, 1, {"union": 9.0}) for situation in ("eager", "compiled"))
    ffn.calibration = dataclasses.replace(ffn.calibration, floors=floors)
    ffn.observe(3, 3)
    assert ffn.plans["eager"] == ((8, "decode"), (65_536, "dense"), (2**20, "union"))
    assert ffn.plans["graph"] == ((8, "decode"), (2**20, "union"))
    with torch.no_grad():
        for layer in (ffn, ffn, copy.deepcopy(ffn)):  # the first call warms up for graphs of all
            assert relative(layer(x), exact(layer, x)) < 1e-3
        layer.edit = Edit(torch.ones(70), torch.zeros(70))  # other kernels, of a layer with a bias
        assert relative(layer(x), exact(layer, x)) < 1e-3
    assert taken == ["union"] * 2
    launches, union = [], ops.PATHS["union"]
    monkeypatch.setitem(ops.PATHS, "union", lambda *a, **o: launches.append(1) or union(*a, **o))
    for options, by_hand, sparse in (
        ({"backend": "aot_eager"}, False, False),
        ({"mode": "reduce-overhead"}, False, True),
        ({"backend": "aot_eager"}, True, True),
    ):
        torch.compiler.reset()
        with torch.no_grad(), captured_by_hand() if by_hand else nullcontext():
            compiled = torch.compile(ffn, fullgraph=True, **options)
            assert relative(compiled(x), exact(ffn, x)) < 1e-3
        assert launches == [1] * sparse, options
        launches.clear()


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
    ffn, x = make_auto(dtype=torch.float32), positive(9, dtype=torch.float32)
    ffn.observe(3, 3)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = ffn(x)
    assert y.dtype == torch.bfloat16 and taken == ["union"] * 2
    assert relative(y, ffn.requires_grad_(True)(x)) < 1e-2
