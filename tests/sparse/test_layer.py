import copy
import sys

import pytest
import torch

from tests.sparse.layers import (
    DEVICE,
    call,
    make,
    make_auto,
    relative,
    triton_here,
)
from twell.sparse import reference
from twell.sparse.layer import ActivityStats, SparseFFN, backend_status, summarize_activity


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_dense_is_the_formula(gated, bias, activation):
    ffn = make(gated, bias, activation)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    parts = (ffn.gate_proj, ffn.up_proj, ffn.down_proj)
    weights = [part and part.weight for part in parts] + [part and part.bias for part in parts]
    expected = reference.ffn(x.reshape(15, 24), *weights, activation=activation).reshape(3, 5, 24)
    torch.testing.assert_close(ffn(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_backends_agree_in_values_l1_and_gradients(gated, bias):
    ffn = make(gated, bias)
    x = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 9, dtype=torch.float64)
    results = {}
    for backend in ("dense", "reference"):
        ffn.backend = backend
        ffn.zero_grad()
        x.grad = None
        y = ffn(x)
        (y.square().sum() + (weights * ffn.l1).sum()).backward()
        results[backend] = [y, ffn.l1, x.grad, *(p.grad for p in ffn.parameters())]
        ffn.eval()
        with torch.no_grad():
            results[backend].append(ffn(x))
        assert ffn.l1 is None  # nobody asked for it in evaluation
        ffn.train()
    for dense, sparse in zip(*results.values(), strict=True):
        assert relative(sparse, dense) < 1e-12


def test_gradients_flow_in_evaluation_mode_too():
    ffn = make(backend="reference").eval()
    x = torch.randn(4, 24, dtype=torch.float64)
    ffn(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in ffn.parameters())


def test_reference_accumulates_in_fp32_under_autocast():
    ffn = make(backend="reference", dtype=torch.float32, sizes=(256, 512))
    x = torch.randn(6, 256)
    exact = reference.ffn(
        x.double(), *(p.weight.double() for p in (ffn.gate_proj, ffn.up_proj, ffn.down_proj))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ffn.eval()
        with torch.no_grad():
            sparse = ffn(x)
            ffn.backend = "dense"
            dense = ffn(x)
    assert sparse.dtype == dense.dtype == torch.bfloat16
    assert relative(sparse, exact) < max(1.25 * relative(dense, exact), 1e-2)


def test_l1_is_the_sum_over_neurons():
    ffn = make()
    x = torch.randn(5, 24, dtype=torch.float64)
    g, h = ffn.activations(x)
    ffn(x)
    torch.testing.assert_close(ffn.l1.double(), h.abs().sum(-1), rtol=1e-12, atol=1e-12)
    assert ffn.l1.shape == (5,)


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("gated", [True, False])
def test_statistics_count_what_a_loop_counts(backend, gated):
    ffn = make(gated, backend=backend)
    ffn.record = True
    neurons, histogram = torch.zeros(70, dtype=torch.int64), torch.zeros(71, dtype=torch.int64)
    for size in (1, 13, 0, 4):
        x = torch.randn(2, size, 24, dtype=torch.float64) - 0.3
        mask = torch.rand(2, size) < 0.6
        ffn.token_mask = mask.to(torch.int64)
        ffn(x)
        for row, keep in zip(
            (ffn.activations(x)[0] != 0).reshape(-1, 70), mask.reshape(-1), strict=True
        ):
            if keep:
                neurons += row
                histogram[int(row.sum())] += 1
    counted = ffn.stats.take()
    assert torch.equal(counted[0], neurons) and torch.equal(counted[1], histogram)
    assert summarize_activity(*ffn.stats.take())["tokens"] == 0  # taking starts again


def test_nothing_is_recorded_unless_asked():
    ffn = make()
    ffn(torch.randn(3, 24, dtype=torch.float64))
    assert ffn.stats.neuron_counts is None


def test_summary_against_sorting():
    counts = torch.randint(0, 40, (1000,))
    counts[3] = 64
    stats = ActivityStats(64)
    active = torch.stack([torch.randperm(64) < count for count in counts])
    active[:, 7] = False
    stats.record(active)
    found = summarize_activity(*stats.take())
    per_token = active.sum(1).sort().values
    assert found["tokens"] == 1000
    assert found["mean"] == pytest.approx(float(per_token.double().mean()))
    assert found["max"] == int(per_token[-1])
    assert found["p99"] == int(per_token[989])  # 990 of 1000 tokens do not exceed it
    assert found["dead"] == pytest.approx(float((~active.any(0)).double().mean()))
    assert found["dead"] > 0


def test_nan_row_stays_in_its_row():
    for backend in ("dense", "reference"):
        ffn = make(backend=backend).eval()
        x = torch.randn(4, 24, dtype=torch.float64)
        x[2, 3] = float("nan")
        with torch.no_grad():
            y = ffn(x)
        assert y[2].isnan().all() and not y[[0, 1, 3]].isnan().any()


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="'gelu' is unknown; use one of relu, silu"):
        SparseFFN(8, 16, activation="gelu")
    with pytest.raises(ValueError, match="'cuda' is unknown"):
        SparseFFN(8, 16, backend="cuda")
    with pytest.raises(ValueError, match="needs activation 'relu'; this layer has 'silu'"):
        SparseFFN(8, 16, activation="silu", backend="reference")
    with pytest.raises(ValueError, match="intermediate_size is 0"):
        SparseFFN(8, 0)
    with pytest.raises(ValueError, match=r"shape \(2, 9\); its last size has to be 8"):
        SparseFFN(8, 16)(torch.zeros(2, 9))


@triton_here
@pytest.mark.parametrize("path", [None, "rowwise", "union", "decode"])
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_triton_computes_what_dense_does(gated, bias, path, monkeypatch):
    from twell.kernels import ops

    taken = []
    run = ops.run
    monkeypatch.setattr(ops, "run", lambda name, *t, **o: taken.append(name) or run(name, *t, **o))
    ffn = make(gated, bias, dtype=torch.float16, sizes=(32, 70)).to(DEVICE).eval()
    x = torch.randn(3, 7, 32, dtype=torch.float16, device=DEVICE)
    exact = copy.deepcopy(ffn).double()(x.double())
    with torch.no_grad():
        dense = ffn(x)
        ffn.backend, ffn.path = "triton", path
        sparse = ffn(x)
    assert taken == [path or "decode"]
    assert relative(sparse, exact) < max(1.25 * relative(dense, exact), 1e-3)


@triton_here
def test_triton_trains_and_counts_by_the_dense_path():
    ffn = make(dtype=torch.float64, sizes=(32, 70)).to(DEVICE)
    x = torch.randn(5, 32, dtype=torch.float64, device=DEVICE)
    expected = []
    for backend in ("dense", "triton"):
        ffn.backend = backend
        ffn.record = True
        ffn.zero_grad()
        y = ffn(x)
        (y.sum() + ffn.l1.sum()).backward()
        expected.append([y, ffn.l1, *ffn.stats.take(), *(p.grad for p in ffn.parameters())])
    for dense, sparse in zip(*expected, strict=True):
        torch.testing.assert_close(sparse, dense)


@triton_here
def test_the_down_weight_keeps_the_strides_of_the_kernels(tmp_path):
    ffn = make(dtype=torch.float16, sizes=(32, 70)).to(DEVICE).eval()
    state = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in ffn.state_dict().items()
    }
    x = torch.randn(4, 32, dtype=torch.float16, device=DEVICE)
    ffn.backend = "triton"
    for load in (
        lambda: None,
        lambda: ffn.load_state_dict(state),
        lambda: ffn.load_state_dict(state, assign=True),
        lambda: ffn.to(torch.float32).to(torch.float16),
    ):
        load()
        assert ffn.down_proj.weight.shape == (32, 70) and ffn.down_proj.weight.stride() == (1, 32)
        with torch.no_grad():
            ffn(x)


@triton_here
def test_triton_refuses_other_types():
    ffn = make(dtype=torch.float32, backend="triton", sizes=(32, 70)).to(DEVICE).eval()
    with (
        pytest.raises(
            TypeError,
            match=r"x has dtype torch\.float32, expected torch\.bfloat16 or torch\.float16",
        ),
        torch.no_grad(),
    ):
        ffn(torch.randn(4, 32, device=DEVICE))


def test_backends_say_why_they_are_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert backend_status() == {
        "dense": None,
        "reference": None,
        "triton": "the package triton is not installed",
        "auto": None,
    }
    with pytest.raises(
        RuntimeError, match="backend 'triton' cannot be used: the package triton is not installed"
    ):
        SparseFFN(16, 32, backend="triton")


MUTED = [(backend, gated) for backend in ("dense", "reference") for gated in (True, False)]

MUTED += [
    pytest.param("triton union", True, marks=triton_here)
]  # all its paths take their weights from one place


@pytest.mark.parametrize(("backend", "gated"), MUTED)
def test_muted_neurons_add_nothing_and_learn_nothing(backend, gated):
    name, _, path = backend.partition(" ")
    ffn = make(gated, bias=True, dtype=torch.float16 if path else torch.float64, sizes=(16, 40)).to(
        DEVICE
    )
    ffn.backend, ffn.train_path, ffn.capacity = name, path or None, 40
    muted = torch.arange(40) % 3 == 0
    without = copy.deepcopy(ffn)
    without.down_proj.weight.data[:, muted] = 0
    ffn.muted = muted
    x = torch.randn(3, 16, dtype=ffn.up_proj.weight.dtype, device=DEVICE) / 4
    found = []
    for layer in (ffn, without):
        y = layer(x)
        (y.square().sum() / 100 + 0 * layer.l1.sum()).backward()
        found.append([y, layer.l1, *(p.grad for p in layer.parameters())])
    for (ours, expected), (parameter, _) in zip(
        zip(*found, strict=True), [("y", None), ("l1", None), *ffn.named_parameters()], strict=True
    ):
        if parameter == "down_proj.weight":
            assert not ours[:, muted].any() and expected[:, muted].any()
            ours, expected = ours[:, ~muted], expected[:, ~muted]
        assert relative(ours, expected) < (1e-3 if path else 1e-12), parameter
    with torch.no_grad():
        for layer in (ffn, without):
            layer.eval()
        assert relative(ffn(x), without(x)) < (1e-3 if path else 1e-12)
        ffn.muted = None
        assert relative(ffn(x), without(x)) > 0.01


@triton_here
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_layers_around_others_keep_the_strides_of_the_kernels(backend):
    mlp = torch.nn.Module()
    mlp.hidden_size, mlp.intermediate_size = 32, 70
    for name, sizes in (("gate_proj", (32, 70)), ("up_proj", (32, 70)), ("down_proj", (70, 32))):
        mlp.add_module(
            name, torch.nn.Linear(*sizes, bias=False, dtype=torch.float16, device=DEVICE)
        )
    ffn = SparseFFN.around(mlp, backend=backend).eval().requires_grad_(False)
    assert ffn.down_proj is mlp.down_proj and ffn.down_proj.weight.stride() == (1, 32)
    call(ffn, torch.randn(4, 32, dtype=torch.float16, device=DEVICE))


@triton_here
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_weights_that_lost_their_strides_or_alignment(backend, taken):
    ffn = make_auto()
    ffn.backend = backend
    ffn.observe(3, 3)
    x = torch.rand(5, 32, dtype=torch.float16, device=DEVICE)
    with torch.no_grad():
        expected = ffn(x)
        ffn.down_proj.weight.data = ffn.down_proj.weight.data.contiguous()
        assert torch.equal(ffn(x), expected)
        ffn.gate_proj.weight.data = ffn.gate_proj.weight.data.t().contiguous().t()
        assert torch.equal(ffn(x), expected)
        for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj):
            flat = torch.empty(part.weight.numel() + 1, dtype=torch.float16, device=DEVICE)[1:]
            part.weight.data = flat.view(part.weight.shape).copy_(part.weight)
        assert ffn.up_proj.weight.data_ptr() % 16 and torch.equal(ffn(x), expected)
    assert len(taken) == 4 and "dense" not in taken


def test_the_reference_has_no_second_derivative():
    ffn = make(backend="reference")
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ffn(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_reference_notices_a_weight_that_changed_before_backward():
    ffn = make(backend="reference")
    y = ffn(torch.randn(3, 24, dtype=torch.float64, requires_grad=True))
    with torch.no_grad():
        ffn.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_paths_that_do_not_exist_are_refused():
    with pytest.raises(
        ValueError, match="path 'unions' is unknown; use one of dense, rowwise, union, decode"
    ):
        make().path = "unions"


@triton_here
def test_run_refuses_tensors_that_require_gradients():
    from twell.kernels import ops

    ffn = make(dtype=torch.float16, sizes=(32, 70), backend="triton").to(DEVICE)
    x = torch.randn(4, 32, dtype=torch.float16, device=DEVICE)
    weights = [part.weight for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj)]
    for path in ("dense", "decode"):
        with pytest.raises(RuntimeError, match="ops.run computes no gradients"):
            ops.run(path, x, *weights, None, None, None)
        with torch.no_grad():
            ops.run(path, x, *weights, None, None, None)


def test_a_layer_can_be_copied_after_a_step():
    ffn = make()
    ffn(torch.randn(3, 24, dtype=torch.float64)).sum().backward()
    again = copy.deepcopy(ffn)
    assert again.l1 is None and ffn.l1 is not None
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ffn.parameters(), strict=True))
