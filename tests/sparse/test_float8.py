"""Layers with FP8 weights: every backend computes the reference, and what does not fit is named."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import twell
from tests.factories.sparse import DEVICE, make, relative, triton_here, watched
from twell.sparse import float8
from twell.sparse.activations import Weights
from twell.sparse.calibration import default
from twell.sparse.edit import Edit
from twell.sparse.float8 import Float8DynamicActivationFloat8WeightConfig

GATED = pytest.mark.parametrize("gated", [True, False])
KEEP = Float8DynamicActivationFloat8WeightConfig(keep_original=True)


def layer(gated=True, **changes):
    """A layer in bf16 of 80 neurons, of which few are active."""
    ffn = make(gated, True, dtype=torch.bfloat16, sizes=(32, 80), **changes).to(DEVICE).eval()
    with torch.no_grad():
        ffn.first.bias -= 1.5
    return ffn


def quantized(*arguments, config=None, **changes):
    ffn = layer(*arguments, **changes)
    twell.quantize_(ffn, config)
    return ffn


def inputs(*shape):
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)


def expected(ffn, x):
    """The reference, from the layer's own tensors."""
    parts = ffn.gate_proj, ffn.up_proj, ffn.down_proj
    w_gate, w_up, w_down = [part and part.weight for part in parts]
    biases = [part and part.bias for part in parts]
    scales = [part and part.weight_scale for part in parts[:2]]
    weights = Weights(w_gate, w_up, w_down.t(), *biases, *scales, act=ffn.act)
    return float8.ffn(x.reshape(-1, 32), weights).reshape(x.shape)


@pytest.mark.parametrize(
    "gated, activation", [(True, "relu"), (False, "relu"), (True, "drelu"), (False, "relu2")]
)
@torch.no_grad()
def test_every_backend_computes_the_reference(gated, activation):
    ffn, x = layer(gated, activation=activation), inputs(2, 2)
    before = ffn(x)
    twell.quantize_(ffn, Float8DynamicActivationFloat8WeightConfig(down=False))
    twice = 2 if activation == "relu2" else 1  # a square doubles errors
    for backend, why_not in twell.backend_status().items():
        if why_not is not None:
            continue
        ffn.backend = backend
        y = ffn(x)
        assert y.shape == x.shape and y.dtype == torch.bfloat16
        # The dense layer rounds u too, so a last bit of h may differ.
        limit = twice * (8e-3 if backend in ("dense", "auto") else 4e-3)
        assert relative(y, expected(ffn, x)) < limit
        assert 1e-3 < relative(y, before) < twice * 0.15
        assert ffn(x[:0]).shape == (0, 2, 32) and ffn.readable


@torch.no_grad()
def test_dense_passes_follow_the_down_projection():
    ffn, x = quantized(backend="dense"), inputs(3, 7)
    before, bias = ffn(x), ffn.down_proj.bias.expand_as(x)
    for change in (torch.Tensor.neg_, torch.Tensor.zero_):
        change(ffn.down_proj.weight)
    assert torch.equal(ffn(x), bias) and not torch.equal(before, bias)
    ffn.down_proj.weight = nn.Parameter(torch.ones_like(ffn.down_proj.weight))
    assert not torch.equal(ffn(x), bias)
    part, ffn.down_proj = ffn.down_proj, nn.Identity()  # as peft merges
    part.weight.data -= 1
    ffn.down_proj = part
    assert torch.equal(ffn(x), bias)
    ffn.down_proj = nn.Sequential(ffn.down_proj, nn.Threshold(1e9, 5.0))
    ffn.backend = "auto"
    assert (ffn(x) == 5).all()


@pytest.mark.parametrize(
    ("backend", "gated"),
    [
        ("dense", True),
        pytest.param("triton", True, marks=triton_here),
        pytest.param("triton", False, marks=triton_here),
    ],
)
@torch.no_grad()
def test_down_in_fp8_of_dense_passes(gated, backend):
    ffn, x = layer(gated), inputs(3, 7)
    before, names = copy.deepcopy(ffn), [*ffn.state_dict()]
    twell.quantize_(ffn)
    sparsely = expected(ffn, x)
    ffn.backend, ffn.path = backend, "dense"
    _, h = ffn.activations(x)
    h, w = (float8.wide(*float8.quantize(t)) for t in (h.flatten(0, -2), ffn.down_proj.weight))
    exact = (h @ w.t() + ffn.down_proj.bias.double()).reshape(x.shape)
    assert relative(ffn(x), exact) < 0.004 < relative(sparsely, exact)
    assert not [name for name in ffn.state_dict() if "dense_down" in name]
    ffn.load_state_dict(ffn.state_dict() | {"down_proj.weight": 2 * ffn.down_proj.weight})
    assert torch.equal(float8.wide(*ffn.dense_down.tensors[:2]), 2 * w)
    ffn.edit = Edit(torch.zeros(80, device=DEVICE))
    assert torch.equal(ffn(x), ffn.down_proj.bias.expand_as(x))
    ffn.edit = None
    with pytest.warns(UserWarning, match="not kept"):
        twell.dequantize_(ffn)
    assert ffn.dense_down is None and [*ffn.state_dict()] == names
    assert relative(ffn.up_proj.weight, before.up_proj.weight) < 0.04


@GATED
@torch.no_grad()
def test_undoing_restores_every_bit_that_was_kept(gated):
    ffn, x = layer(gated), inputs(9)
    ffn.up_proj.bias.requires_grad_(False)
    before, weights = ffn(x), {name: t.clone() for name, t in ffn.state_dict().items()}
    twell.quantize_(ffn, KEEP)
    with warnings.catch_warnings(action="error"):
        twell.dequantize_(ffn)
    assert torch.equal(ffn(x), before) and not ffn.quantized
    assert all(torch.equal(ffn.state_dict()[name], weight) for name, weight in weights.items())
    twell.quantize_(ffn)
    values = ffn.up_proj.weight.float() * ffn.up_proj.weight_scale[:, None]
    with pytest.warns(UserWarning, match=f"{1 + gated} weights were not kept"):
        twell.dequantize_(ffn)
    assert torch.equal(ffn.up_proj.weight, values.bfloat16())
    assert type(ffn.up_proj) is nn.Linear and ffn.up_proj.weight.requires_grad
    assert not ffn.up_proj.bias.requires_grad
    with pytest.raises(ValueError, match="no layer in FP8"):
        twell.dequantize_(ffn)


@torch.no_grad()
def test_weights_are_saved_moved_and_copied_as_they_are():
    ffn, x = quantized(), inputs(9)
    y, file = ffn(x), io.BytesIO()
    torch.save(ffn.state_dict(), file)
    file.seek(0)
    other = quantized()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), y) and torch.equal(copy.deepcopy(ffn)(x), y)
    scale = ffn.up_proj.weight_scale.clone()
    ffn.to(torch.float32).to(torch.bfloat16)  # FP8 values are no weights to convert
    assert ffn.up_proj.weight.dtype == float8.FLOAT8 and torch.equal(ffn(x), y)
    assert torch.equal(ffn.up_proj.weight_scale, scale)
    assert sum(t.nbytes for t in ffn.up_proj.state_dict().values()) == 80 * (32 + 4 + 2)


@torch.no_grad()
def test_the_layer_watches_and_compiles():
    ffn, x = quantized(), inputs(9)
    g, _ = ffn.activations(x)
    _, l1 = watched(ffn, x, counts=True, wants_l1=True)
    assert torch.equal(ffn.stats.take()[0], (g != 0).sum(0))
    assert l1.shape == (9,) and l1.dtype == torch.float32
    compiled = torch.compile(ffn, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x), ffn(x)) < 8e-3
    wide = x.float() * (1 + 2**-10)  # bf16 cannot hold it
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(ffn(wide), ffn(wide.bfloat16()))


def test_a_calibration_is_of_the_layers_precision():
    ffn = layer()
    times = default(32, 80, True)
    ffn.calibration = times
    twell.quantize_(ffn)
    assert ffn.calibration is None
    with pytest.raises(ValueError, match="bfloat16.*FP8"):
        ffn.calibration = times


def test_training_and_other_types_are_refused():
    ffn, x = quantized(), inputs(4)
    for backend in ("dense", "auto"):
        ffn.backend = backend
        with pytest.raises(RuntimeError, match="no gradients"):
            ffn(x)  # down has weights to train
    ffn.requires_grad_(False)
    assert ffn(x).shape == x.shape
    with pytest.raises(RuntimeError, match="no gradients"):
        ffn(x.clone().requires_grad_())
    with pytest.raises(TypeError, match="torch.float16"):
        ffn(x.half())


@torch.no_grad()
def test_weights_of_the_other_kind_are_not_loaded():
    ffn, plain = quantized(config=KEEP), layer()
    before = {name: tensor.clone() for name, tensor in ffn.state_dict().items()}
    with pytest.raises(ValueError, match="gate_proj.weight is torch.bfloat16"):
        ffn.load_state_dict(plain.state_dict())
    assert torch.equal(ffn.gate_proj.weight_scale, before["gate_proj.weight_scale"])
    kept = plain.gate_proj.weight.clone()
    with pytest.raises(ValueError, match="gate_proj.weight is in FP8"):
        plain.load_state_dict(before, strict=False)
    assert torch.equal(plain.gate_proj.weight, kept)
    # Other weights than those that were kept: the kept ones are not put back.
    other = layer()
    weight = other.up_proj.weight.clone()
    twell.quantize_(other)
    ffn.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match="not kept"):
        twell.dequantize_(ffn)
    assert relative(ffn.up_proj.weight, weight) < 0.05


def with_nan(ffn):
    ffn.up_proj.weight.data[3, 4] = float("nan")
    return ffn


def with_hook(ffn):
    ffn.gate_proj.register_forward_hook(lambda *_: None)
    return ffn


UNFIT = [
    (lambda: nn.Linear(16, 16), None, "no SparseFFN"),
    (lambda: layer().float(), None, "gate_proj of layer 0 is torch.float32"),
    (lambda: with_nan(layer()), None, "up_proj of layer 0"),
    (lambda: with_hook(layer()), None, "gate_proj of layer 0"),
    (quantized, None, "layer 0 is in FP8 already"),
    (lambda: twell.SparseFFN(24, 8, dtype=torch.bfloat16), None, "hidden_size=24"),
    (layer, "fp8", "str"),
]


def test_what_cannot_be_quantised_is_named_and_stays():
    for make_layer, config, value in UNFIT:
        module = make_layer()
        before = repr(module)
        with pytest.raises(ValueError, match=value):
            twell.quantize_(module, config)
        assert repr(module) == before


def test_gpus_without_fp8_are_named(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "NVIDIA A100 (sm_80)" in float8.why_not(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert float8.why_not(cuda) is None
