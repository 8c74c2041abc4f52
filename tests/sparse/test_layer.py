import copy
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.factories.sparse import (
    DEVICE,
    make,
    make_auto,
    positive,
    relative,
    small_threshold,
    triton_here,
    watched,
)
from twell.sparse.activations import get_activation
from twell.sparse.edit import Edit
from twell.sparse.layer import SparseFFN, backend_status
from twell.sparse.observe import Activity, ActivityStats, Collector, summarize_activity

GATED = pytest.mark.parametrize("gated", [True, False])
BACKENDS = pytest.mark.parametrize("backend", ["dense", "reference"])


def half(**changes):
    """A small layer in the kernels' type, on their device."""
    return make(**{"dtype": torch.float16, "sizes": (32, 70)} | changes).to(DEVICE)


# --- statistics


@BACKENDS
@GATED
def test_statistics_count_what_a_loop_counts(backend, gated):
    ffn = make(gated, backend=backend)
    neurons, histogram = torch.zeros(70, dtype=torch.int64), torch.zeros(71, dtype=torch.int64)
    for size in (1, 13, 0, 4):
        x, mask = torch.randn(2, size, 24, dtype=torch.float64) - 0.3, torch.rand(2, size) < 0.6
        watched(ffn, x, counts=True, token_mask=mask.to(torch.int64))
        for row in (ffn.activations(x)[0] != 0)[mask]:
            neurons += row
            histogram[int(row.sum())] += 1
    counted = ffn.stats.take()
    assert torch.equal(counted[0], neurons) and torch.equal(counted[1], histogram)
    assert summarize_activity(*ffn.stats.take())["tokens"] == 0  # taking starts again


def traced(ffn, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ffn(mode.from_tensor(x))


def test_traces_leave_nothing_in_the_statistics():
    ffn, x = make(), torch.randn(3, 24, dtype=torch.float64)
    watched(ffn, x, counts=True)
    expected = ffn.stats.take()
    for trace in (traced, lambda ffn, x: torch.export.export(ffn, (x,))):
        with Collector([ffn], counts=True):
            trace(ffn, x)
        watched(ffn, x, counts=True)
        counted = ffn.stats.take()
        assert all(map(torch.equal, counted, expected)) and type(counted[0]) is torch.Tensor
    meta = make().to("meta")  # and weights that come later
    watched(meta, x.to("meta"), counts=True)
    meta = meta.to_empty(device="cpu")
    meta.load_state_dict(ffn.state_dict())
    watched(meta, x, counts=True)
    assert all(map(torch.equal, meta.stats.take(), expected))


def test_summary_against_sorting():
    counts = torch.randint(0, 40, (1000,))
    counts[3] = 64
    active = torch.stack([torch.randperm(64) < count for count in counts])
    active[:, 7] = False
    stats = ActivityStats(64)
    stats.add(Activity.of(active))
    result, per_token = summarize_activity(*stats.take()), active.sum(1).sort().values
    assert result["tokens"] == 1000 and result["max"] == int(per_token[-1])
    assert result["mean"] == pytest.approx(float(per_token.double().mean()))
    assert result["p99"] == int(per_token[989])  # 990 of 1000 tokens do not exceed it
    assert 0 < result["dead"] == pytest.approx(float((~active.any(0)).double().mean()))
    histogram = torch.tensor([0, 985, 5, 10])  # 99% of the tokens have at most 2
    assert summarize_activity(torch.ones(3), histogram)["p99"] == 2


# --- the kernels


@triton_here
def test_the_down_weight_keeps_the_strides_of_the_kernels():
    ffn = half(backend="triton").eval()
    state = {name: tensor.contiguous().clone() for name, tensor in ffn.state_dict().items()}
    for load in (
        lambda: ffn.load_state_dict(state),
        lambda: ffn.load_state_dict(state, assign=True),
        lambda: ffn.to(torch.float32).to(torch.float16),
    ):
        assert ffn.down_proj.weight.shape == (32, 70) and ffn.down_proj.weight.stride() == (1, 32)
        load()
    assert ffn.down_proj.weight.stride() == (1, 32)
    ffn = half(backend="dense")
    with torch.inference_mode():
        ffn.backend = "triton"
    assert ffn.down_proj.weight.stride() == (1, 32) and not ffn.down_proj.weight.is_inference()


@triton_here
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_weights_that_lost_their_strides(backend, taken):
    ffn, x = make_auto(), positive(9)
    ffn.backend, ffn.path = backend, "union"
    ffn.observe(3, 3)
    with torch.no_grad():
        expected = ffn(x)
        ffn.down_proj.weight.data = ffn.down_proj.weight.data.contiguous()
        ffn.gate_proj.weight.data = ffn.gate_proj.weight.data.t().contiguous().t()
        assert torch.equal(ffn(x), expected)
    assert taken == ["union"] * (4 if backend == "auto" else 2)  # auto loads both kinds first


# --- changing neurons

EDITED = [(backend, gated) for backend in ("dense", "reference") for gated in (True, False)]
# All paths of the kernels take their weights from one place.
EDITED += [pytest.param("triton union", True, marks=triton_here)]


@pytest.mark.parametrize(("backend", "gated"), EDITED)
def test_edited_neurons_add_other_values(backend, gated):
    """Silent, scaled and set neurons against products with an h that was changed by hand."""
    name, _, path = backend.partition(" ")
    dtype, bound = (torch.float16, 2e-3) if path else (torch.float64, 1e-12)
    ffn = make(gated, bias=gated, dtype=dtype, sizes=(16, 40)).to(DEVICE)
    ffn.backend, ffn.train_path, ffn.capacity = name, path or None, 40
    ffn.path = path or None
    number = torch.arange(40, device=DEVICE)
    silent, scaled, fixed = (number % 8 == n for n in (0, 2, 5))
    factor = torch.ones(40, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
    factor[silent], factor[scaled], factor[fixed] = 0, -1.5, 0
    ffn.edit = Edit(factor, torch.where(fixed, 0.25, 0.0).to(factor))
    by_hand = copy.deepcopy(ffn).double()
    x = torch.randn(3, 16, dtype=dtype, device=DEVICE) / 4

    def expected(x):
        h = by_hand.first(x.double()).relu() * (by_hand.up_proj(x.double()) if gated else 1)
        changed = torch.where(scaled, -1.5 * h, h).masked_fill(silent, 0).masked_fill(fixed, 0.25)
        return changed @ by_hand.down_proj.weight.T + (by_hand.down_proj.bias if gated else 0), h

    (y, l1), (y_by_hand, h) = watched(ffn, x), expected(x)
    assert relative(y, y_by_hand) < bound and relative(l1, h.abs().sum(-1)) < bound
    for result in (y, y_by_hand):
        (result.square().sum() / 100).backward()
    for (name, parameter), ours in zip(ffn.named_parameters(), by_hand.parameters(), strict=True):
        assert relative(parameter.grad, ours.grad) < 5 * bound, name
    # Silent neurons learn nothing, and set ones in the down projection alone.
    assert not ffn.up_proj.weight.grad[silent | fixed].any()
    assert not ffn.down_proj.weight.grad[:, silent].any()
    with torch.no_grad():
        assert relative(ffn.eval()(x), expected(x)[0]) < bound
        ffn.edit = None
        assert relative(ffn(x), y) > 0.01


# --- refusals


OPTIONS = [
    ({"activation": "gelu"}, "'gelu'"),
    ({"activation": "drelu", "gated": False}, "'drelu'"),
    ({"intermediate_size": 0}, "16 and 0"),
    ({"threshold": -0.1}, "-0.1"),
    ({"threshold": float("nan")}, "nan"),
    ({"threshold": 0.1, "activation": "silu"}, "0.1.*'silu'"),
    ({"backend": "cuda"}, "'cuda'"),
    ({"activation": "silu", "backend": "auto"}, "'auto'.*'silu'"),
]


def test_what_does_not_fit_is_refused():
    for options, value in OPTIONS:
        with pytest.raises(ValueError, match=value):
            SparseFFN(**{"hidden_size": 16, "intermediate_size": 16} | options)
    ffn = make()
    with pytest.raises(ValueError, match=r"\(2, 9\).* 24"):
        ffn(torch.zeros(2, 9))
    with pytest.raises(ValueError, match="'unions'"):
        ffn.path = "unions"
    with pytest.raises(ValueError, match="hidden_size=32.*hidden_size=24"):
        ffn.calibration = small_threshold()
    assert ffn.calibration is None
    ffn.up_proj, ffn.gate_proj = (torch.nn.Linear(24, 35).double() for _ in range(2))
    with pytest.raises(ValueError, match="35 neurons.* 70"):  # shards would be miscounted
        ffn(torch.randn(2, 24).double())


def test_backends_say_why_they_are_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = "the package triton is not installed"
    status = {"dense": None, "reference": None, "triton": reason, "auto": None}
    assert backend_status() == status
    with pytest.raises(RuntimeError, match=f"'triton'.*{reason}"):
        SparseFFN(16, 32, backend="triton")


CHANGES = {
    "threshold": lambda ffn: setattr(ffn, "act", get_activation("relu", 0.3)),
    "activation": lambda ffn: setattr(ffn, "act", get_activation("relu2")),
    "silenced": lambda ffn: setattr(ffn, "silenced", True),
    "edit": lambda ffn: setattr(ffn, "edit", Edit(torch.arange(70.0).double())),
    "bias": lambda ffn: setattr(ffn.up_proj, "bias", torch.nn.Parameter(torch.ones(70).double())),
    "training": lambda ffn: ffn.train().add_module("h_dropout", torch.nn.Dropout(1.0)),
}
"""What changes a layer after it was compiled."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("backend", ["dense", "auto"])
def test_compiled_code_follows_changes_of_the_layer(backend, change):
    torch.compiler.reset()
    ffn, x = make(backend=backend).eval(), torch.randn(5, 24, dtype=torch.float64)
    compiled = torch.compile(ffn, fullgraph=True, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        assert torch.equal(before, ffn(x))
        change(ffn)
        after = compiled(x)
        assert torch.equal(after, ffn(x)) and not torch.equal(after, before)
