import copy
import sys

import pytest
import torch

from twell import reference
from twell.ffn import ActivityStats, SparseFFN, backend_status, summarize_activity


def make(gated=True, bias=False, activation="relu", backend="dense", dtype=torch.float64, sizes=(24, 70)):
    torch.manual_seed(torch.seed() % 2**31)
    ffn = SparseFFN(*sizes, gated=gated, bias=bias, activation=activation, backend=backend, dtype=dtype)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.normal_()
    return ffn


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


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
    exact = reference.ffn(x.double(), *(p.weight.double() for p in (ffn.gate_proj, ffn.up_proj, ffn.down_proj)))
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
        for row, keep in zip((ffn.activations(x)[0] != 0).reshape(-1, 70), mask.reshape(-1), strict=True):
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


# --- the Triton backend, in Triton's interpreter where there is no GPU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton_here = pytest.mark.skipif(backend_status()["triton"] is not None, reason=str(backend_status()["triton"]))


@triton_here
@pytest.mark.parametrize("path", [None, "rowwise", "union", "decode"])
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_triton_computes_what_dense_does(gated, bias, path, monkeypatch):
    from twell.kernels import ops

    taken = []
    for name, operator in list(ops.PATHS.items()):
        monkeypatch.setitem(
            ops.PATHS, name, lambda *t, name=name, operator=operator: taken.append(name) or operator(*t)
        )
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
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in ffn.state_dict().items()}
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
    ffn.down_proj.weight.data = ffn.down_proj.weight.data.contiguous()
    with pytest.raises(ValueError, match=r"w_down has strides \(70, 1\), expected \(1, hidden_size\)"), torch.no_grad():
        ffn(x)


@triton_here
def test_triton_refuses_other_types():
    ffn = make(dtype=torch.float32, backend="triton", sizes=(32, 70)).to(DEVICE).eval()
    with (
        pytest.raises(TypeError, match=r"x has dtype torch\.float32, expected torch\.bfloat16 or torch\.float16"),
        torch.no_grad(),
    ):
        ffn(torch.randn(4, 32, device=DEVICE))


def test_backends_say_why_they_are_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert backend_status() == {"dense": None, "reference": None, "triton": "the package triton is not installed"}
    with pytest.raises(RuntimeError, match="backend 'triton' cannot be used: the package triton is not installed"):
        SparseFFN(16, 32, backend="triton")
