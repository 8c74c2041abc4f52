import copy
import pickle
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize, prune

from twell.sparse import plan as choose
from twell.sparse import reference
from twell.sparse.calibration import Calibration, Point
from twell.sparse.layer import ActivityStats, SparseFFN, backend_status, summarize_activity


def make(
    gated=True, bias=False, activation="relu", backend="dense", dtype=torch.float64, sizes=(24, 70)
):
    torch.manual_seed(torch.seed() % 2**31)
    ffn = SparseFFN(
        *sizes, gated=gated, bias=bias, activation=activation, backend=backend, dtype=dtype
    )
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


# --- the Triton backend, in Triton's interpreter where there is no GPU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton_here = pytest.mark.skipif(
    backend_status()["triton"] is not None, reason=str(backend_status()["triton"])
)


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


# --- the backend that chooses


def calibration(gated=True, hidden_size=32, **changes):
    """Decoding (up to 8 tokens) and unions are fast for unions of up to 35 of 70 neurons."""
    times = [Point(m, 70, 70, {"dense": 1.0}) for m in (1, 8, 9, 100)]
    for m in (1, 8, 9, 100):
        sparse = "decode" if m <= 8 else "union"
        times += [
            Point(m, 1, 35, {sparse: 0.5}),
            Point(m, 1, 35.01, {sparse: 2.0}),
            Point(m, 70, 70, {sparse: 3.0}),
        ]
    about = {"device": "", "intermediate_size": 70, "dtype": "float16", "versions": "", "date": ""}
    about |= {"hidden_size": hidden_size, "gated": gated, "times": tuple(times)}
    return Calibration(**about | changes)


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


def make_auto(gated=True, bias=False, dtype=torch.float16):
    """A layer with 3 of 70 neurons active for positive inputs and 67 for negative ones, and who was called for it."""
    ffn = make(gated, bias, dtype=dtype, sizes=(32, 70)).to(DEVICE).eval().requires_grad_(False)
    gate = ffn.gate_proj if gated else ffn.up_proj
    sign = torch.where(torch.arange(70, device=DEVICE) < 3, 1, -1)[:, None]
    gate.weight.data = (gate.weight.abs() + 0.5) * sign
    ffn.backend = "auto"
    ffn.calibration = calibration(gated)
    return ffn


@pytest.fixture
def taken(monkeypatch):
    """Names of the operators called, in order; the layer reads its counters at every call."""
    from twell.kernels import ops

    names = []
    run = ops.run
    monkeypatch.setattr(ops, "run", lambda name, *t, **o: names.append(name) or run(name, *t, **o))
    monkeypatch.setattr(choose, "READ_EVERY", 1)
    return names


def exact(ffn, x):
    ffn = copy.deepcopy(ffn).double()
    ffn.backend = "dense"
    return ffn(x.double())


def call(ffn, x):
    """The layer's output, after a look at its error; on a GPU a copy of the counters has arrived by the next call."""
    with torch.no_grad():
        y = ffn(x)
    assert relative(y, exact(ffn, x)) < 1e-3
    if x.is_cuda:
        torch.cuda.synchronize()
    return y


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
    ffn.chooser._unprobed = choose.PROBE_EVERY
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
    monkeypatch.setattr(choose, "READ_EVERY", 1)
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


# --- projections that are not what their weight says


class Scaled(torch.nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 1.5 * super().forward(x)


class Adapter(torch.nn.Module):
    """A low-rank adapter around a projection; as peft's, it hands on the weight that it stands around."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        options = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.down = torch.nn.Linear(base.in_features, 2, **options)
        self.up = torch.nn.Linear(2, base.out_features, **options)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Int8(torch.nn.Linear):
    """Weights in eight bits, read with a scale."""

    def __init__(self, base):
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, dtype=base.weight.dtype
        )
        scale = base.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter(
            (base.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.register_buffer("scale", 1.5 * scale)
        self.bias = base.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def scaled(base):
    changed = Scaled(
        base.in_features, base.out_features, bias=base.bias is not None, dtype=base.weight.dtype
    )
    changed.load_state_dict(base.state_dict())
    return changed.to(base.weight.device)


def hooked(base):
    base.register_forward_hook(lambda module, args, y: 1.5 * y)
    return base


def hooked_before(base):
    base.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    return base


def hooked_backward(base):
    base.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    return base


def own_forward(base):
    forward = base.forward
    base.forward = lambda x: 1.5 * forward(x)
    return base


def pruned(base):
    prune.random_unstructured(base, "weight", 0.5)
    with torch.no_grad():
        base.weight_orig.mul_(
            1.5
        )  # as an optimiser would; `weight` is stale until the module is called
    return base


def normed(base):
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(base)
    with torch.no_grad():
        base.weight_g.mul_(1.5)
    return base


def parametrised(base):
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(base, "weight", Double())
    return base


CHANGES = {
    "adapter": Adapter,
    "subclass": scaled,
    "int8": lambda base: Int8(base).to(base.weight.device),
    "hook": hooked,
    "pre-hook": hooked_before,
    "backward hook": hooked_backward,
    "own forward": own_forward,
    "prune": pruned,
    "weight_norm": normed,
    "parametrisation": parametrised,
}
BACKENDS = [
    "reference",
    pytest.param("triton", marks=triton_here),
    pytest.param("auto", marks=triton_here),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", CHANGES)
def test_projections_are_called_where_their_weight_is_not_all(change, part, backend):
    """Values, the L1 term, counts and gradients are those of the dense layer; the layer says what it does."""
    dense = make(bias=True, dtype=torch.bfloat16, sizes=(32, 48)).to(DEVICE)
    before = dense(x := torch.randn(5, 32, dtype=torch.bfloat16, device=DEVICE) / 8).detach()
    sparse = copy.deepcopy(dense)
    for ffn in (dense, sparse):
        torch.manual_seed(0)
        setattr(ffn, part, CHANGES[change](getattr(ffn, part)))
    sparse.backend = backend
    sparse.chooser.observe(1, 2)  # at which auto would take a sparse path
    results = []
    for ffn in (dense, sparse):
        ffn.record = True
        leaf = x.clone().requires_grad_()
        y = ffn(leaf)
        (y.float().square().sum() / 100 + ffn.l1.sum()).backward()
        results.append(
            [
                y,
                ffn.l1,
                leaf.grad,
                *ffn.stats.take(),
                *(p.grad for p in ffn.parameters() if p.requires_grad),
            ]
        )
        ffn.eval().record = False
        with torch.no_grad():
            results[-1].append(ffn(x))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
    if change != "backward hook":
        assert relative(results[0][0], before) > 0.01
    assert (
        sparse.path == "dense"
        and not sparse.readable
        and f"path=dense ({part} is a" in repr(sparse)
    )
    assert sparse.plan == ((2**20, "dense"),) and "path=dense" not in repr(dense)


@triton_here
def test_hooks_that_come_and_go(taken):
    ffn = make_auto()
    ffn.backend = "triton"
    x = torch.randn(3, 32, dtype=torch.float16, device=DEVICE)
    with torch.no_grad():
        plain = ffn(x)
        handle = ffn.up_proj.register_forward_hook(lambda module, args, y: 0 * y)
        assert not ffn(x).any() and len(taken) == 1
        handle.remove()
        assert torch.equal(ffn(x), plain) and len(taken) == 2 and ffn.path is None and ffn.readable


@triton_here
def test_a_device_map_of_accelerate_does_not_make_it_dense(taken):
    """Its hooks move inputs; where they also fetch weights, the projections are called."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    ffn = make_auto()
    ffn.backend = "triton"
    x = torch.randn(3, 32, dtype=torch.float16, device=DEVICE)
    with torch.no_grad():
        expected = ffn(x)
        device = x.device if x.is_cuda else torch.device("cpu")
        for part in (ffn, ffn.gate_proj, ffn.up_proj, ffn.down_proj):
            add_hook_to_module(part, AlignDevicesHook(execution_device=device))
        assert torch.equal(ffn(x), expected) and len(taken) == 2
        weights = {name: tensor.clone() for name, tensor in ffn.up_proj.state_dict().items()}
        add_hook_to_module(
            ffn.up_proj,
            AlignDevicesHook(execution_device=device, offload=True, weights_map=weights),
        )
        assert ffn.up_proj.weight.is_meta and ffn.path == "dense"
        assert relative(ffn(x), expected) < 2e-3 and len(taken) == 2


def test_tensor_parallel_shards_are_refused_where_they_would_be_miscounted():
    ffn = make()
    ffn.up_proj, ffn.gate_proj = torch.nn.Linear(24, 35).double(), torch.nn.Linear(24, 35).double()
    ffn.down_proj = torch.nn.Linear(35, 24).double()
    with pytest.raises(
        ValueError, match="returns 35 neurons, and the layer has 70: of tensor-parallel shards"
    ):
        ffn(torch.randn(2, 24).double())


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


def test_hooks_for_all_modules_are_called_too():
    ffn = make(backend="reference").eval()
    x = torch.randn(3, 24, dtype=torch.float64)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, y: 0 * y if module is ffn.up_proj else None
    )
    try:
        with torch.no_grad():
            assert not ffn(x).any() and "path=dense (every module has hooks)" in repr(ffn)
    finally:
        handle.remove()
    with torch.no_grad():
        assert ffn(x).any() and ffn.readable


def test_a_layer_can_be_copied_after_a_step():
    ffn = make()
    ffn(torch.randn(3, 24, dtype=torch.float64)).sum().backward()
    again = copy.deepcopy(ffn)
    assert again.l1 is None and ffn.l1 is not None
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ffn.parameters(), strict=True))


@pytest.mark.parametrize("adapter", [False, True])
def test_directions_are_columns_of_the_down_projection(adapter):
    ffn = make(bias=True)
    if adapter:
        ffn.down_proj = Adapter(ffn.down_proj)
    h = torch.zeros(70, dtype=torch.float64)
    zero = ffn.down_proj(h).detach()
    h[13] = 2
    torch.testing.assert_close(ffn.direction(13), (ffn.down_proj(h).detach() - zero) / 2)
    assert ffn.direction(13).shape == (24,)
