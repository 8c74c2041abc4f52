import copy
import pickle
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.sparse.layers import (
    DEVICE,
    calibration,
    call,
    exact,
    make,
    make_auto,
    relative,
    triton_here,
)
from twell.sparse import plan
from twell.sparse.layer import SparseFFN


@triton_here
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_auto_follows_what_it_sees(taken, gated, bias):
    ffn = make_auto(gated, bias)
    x = torch.rand(70, 32, dtype=torch.float16, device=DEVICE) + 0.5
    assert ffn.observed is None and ffn.plan == ((2**20, "dense"),)
    for _ in range(8):
        call(ffn, x)
    # on a GPU the counters are on their way for a call longer
    assert taken[0] == "dense" and taken[-1] == "union" and taken.count("dense") <= 2
    assert ffn.observed == (3, 3)
    taken.clear()
    for _ in range(8):
        call(ffn, -x)
    assert taken[0] == "union" and taken[-1] == "dense"
    assert ffn.observed[0] > 60
    # dense calls look at their activity only now and then
    ffn.chooser._unprobed = plan.PROBE_EVERY
    taken.clear()
    for _ in range(8):
        call(ffn, x)
    assert taken[0] == "dense" and taken[-1] == "union" and ffn.observed == (3, 3)


@triton_here
def test_auto_takes_the_path_of_the_number_of_tokens(taken):
    ffn = make_auto()
    ffn.observe(3, 20)
    assert ffn.plan == ((8, "decode"), (2**20, "union"))
    for shape in ((1, 1), (8,), (2, 5), (3, 30)):
        call(ffn, torch.rand(*shape, 32, dtype=torch.float16, device=DEVICE))
    assert taken == ["decode", "decode", "union", "union"]
    with torch.no_grad():
        assert ffn(torch.zeros(3, 0, 32, dtype=torch.float16, device=DEVICE)).shape == (3, 0, 32)


@triton_here
def test_auto_is_right_whatever_the_plan_says(taken):
    x = torch.rand(70, 32, dtype=torch.float16, device=DEVICE) + 0.5
    x[7, 3] = float("nan")
    for sign in (1, -1):
        for observed in ((0, 0), (3, 3), (70, 70)):
            ffn = make_auto()
            ffn.observe(*observed)
            with torch.no_grad():
                y = ffn(sign * x)
            assert y[7].isnan().all()
            keep = torch.arange(70, device=DEVICE) != 7
            assert relative(y[keep], exact(ffn, sign * x)[keep]) < 1e-3
    assert set(taken) == {"union", "dense"}


@triton_here
def test_auto_keeps_to_its_plan_in_compiled_code(monkeypatch):
    monkeypatch.setattr(plan, "READ_EVERY", 1)
    torch.compiler.reset()
    ffn = make_auto()
    ffn.observe(3, 20)
    graphs = CompileCounter()
    compiled = torch.compile(ffn, fullgraph=True, backend=graphs)
    x = torch.rand(70, 32, dtype=torch.float16, device=DEVICE) + 0.5
    with torch.no_grad():
        for _ in range(3):
            assert relative(compiled(x), ffn(x)) < 1e-3  # the call on the right counts and plans
        assert graphs.frame_count == 1
        assert ffn.observed == (3, 3) or x.is_cuda  # the compiled ones do not
        ffn.observe(70, 70)
        assert ffn.plan == ((2**20, "dense"),)
        compiled(x)
        assert graphs.frame_count == 2
        ffn.observe(3, 21)
        compiled(x)
        assert graphs.frame_count == 2  # the code for that plan is there


@triton_here
def test_layers_that_take_the_same_path_share_compiled_code():
    torch.compiler.reset()
    graphs, layers = CompileCounter(), [make_auto() for _ in range(3)]
    x = torch.rand(70, 32, dtype=torch.float16, device=DEVICE) + 0.5
    without = tuple(point for point in calibration().times if "decode" not in point.ms)
    layers[1].calibration = calibration(times=without)  # few tokens densely
    for ffn, observed in zip(layers, ((3, 20), (3, 20), (70, 70)), strict=True):
        ffn.observe(*observed)
        ffn.compile(fullgraph=True, backend=graphs, dynamic=False)
    assert len({ffn.plan for ffn in layers}) == 3
    assert [ffn.chooser.path(70) for ffn in layers] == ["union", "union", "dense"]
    with torch.no_grad():
        for ffn, expected in zip(layers, (1, 1, 2), strict=True):
            ffn(x)
            assert graphs.frame_count == expected


@triton_here
def test_auto_with_gradients_l1_or_statistics_is_dense(taken):
    ffn = make_auto(dtype=torch.float64)
    ffn.observe(3, 3)
    ffn.requires_grad_(True)
    x = torch.rand(70, 32, dtype=torch.float64, device=DEVICE)
    results = []
    for backend in ("dense", "auto"):
        ffn.backend = backend
        ffn.record = True
        for training in (True, False):
            ffn.train(training).zero_grad()
            y = ffn(x)
            y.sum().backward()
            results.append([y, *ffn.stats.take(), *(p.grad.clone() for p in ffn.parameters())])
    for dense, auto in zip(results[:2], results[2:], strict=True):
        for a, b in zip(dense, auto, strict=True):
            torch.testing.assert_close(a, b)
    assert taken == []


@pytest.mark.parametrize("case", ["no triton", "float64", "odd width"])
def test_auto_works_where_the_kernels_do_not(case, monkeypatch):
    if case == "no triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    width, dtype = (
        (24, torch.float16)
        if case == "odd width"
        else (32, torch.float64 if case == "float64" else torch.float16)
    )
    ffn = make(dtype=dtype, sizes=(width, 70), backend="auto").to(DEVICE).eval()
    ffn.calibration = calibration(hidden_size=width)
    ffn.observe(3, 3)
    x = torch.randn(70, width, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        y = ffn(x)
        ffn.backend = "dense"
        torch.testing.assert_close(y, ffn(x))


@triton_here
def test_auto_under_autocast(taken):
    ffn = make_auto(dtype=torch.float32)
    ffn.observe(3, 3)
    x = torch.rand(70, 32, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = ffn(x)
    assert y.dtype == torch.bfloat16 and taken == ["union"]
    assert relative(y, ffn.requires_grad_(True)(x)) < 1e-2


@triton_here
def test_copies_of_an_auto_layer_plan_alike():
    ffn = make_auto()
    names = list(ffn.state_dict())
    x = torch.rand(70, 32, dtype=torch.float16, device=DEVICE) + 0.5
    with torch.inference_mode():
        ffn(x)
    ffn.observe(3, 20)
    for again in (copy.deepcopy(ffn), pickle.loads(pickle.dumps(ffn))):
        assert again.plan == ffn.plan != ((2**20, "dense"),)
        assert torch.equal(call(again, x), call(ffn, x))
    assert (
        list(ffn.state_dict())
        == names
        == [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    )
    assert not list(ffn.buffers())


def test_calibrations_of_other_layers_are_refused():
    ffn = SparseFFN(32, 71, backend="auto")
    with pytest.raises(
        ValueError, match="intermediate_size=70, gated=True; this layer has .*intermediate_size=71"
    ):
        ffn.calibration = calibration()
