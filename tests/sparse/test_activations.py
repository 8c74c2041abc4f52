import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import twell
from tests.factories.sparse import make, relative, watched
from twell.models import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.sparse.activations import get_activation
from twell.sparse.layer import SparseFFN

# (activation, threshold, gated)
KINDS = [
    ("relu", 0.0, True),
    ("relu", 0.5, True),
    ("relu", 0.5, False),
    ("relu2", 0.0, True),
    ("relu2", 0.0, False),
    ("relu2", 0.5, True),
    ("drelu", 0.0, True),
    ("drelu", 0.5, True),
]
EACH = pytest.mark.parametrize(("activation", "threshold", "gated"), KINDS)


def plain(ffn, x):
    """The layer's formula, spelled out in torch's operators; y and h."""
    first = ffn.gate_proj if ffn.gated else ffn.up_proj
    a = first(x)
    g = torch.where(a > ffn.threshold, a, 0)
    h = g * g if ffn.activation == "relu2" else g
    if ffn.gated:
        u = ffn.up_proj(x)
        h = h * (torch.relu(u) if ffn.activation == "drelu" else u)
    return ffn.down_proj(h), h


@EACH
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_values_l1_and_gradients_are_those_of_the_formula(activation, threshold, gated, backend):
    ffn = make(gated, True, activation, backend, threshold=threshold)
    x = torch.randn(11, 24, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(11, dtype=torch.float64)
    y, l1 = watched(ffn, x, counts=True)
    (y.square().sum() + (scale * l1).sum()).backward()
    computed = [y, l1, x.grad, *(p.grad for p in ffn.parameters())]
    ffn.zero_grad()
    x.grad = None
    y, h = plain(ffn, x)
    (y.square().sum() + (scale * h.abs().sum(1)).sum()).backward()
    expected = [y, h.abs().sum(1), x.grad, *(p.grad for p in ffn.parameters())]
    for ours, theirs in zip(computed, expected, strict=True):
        assert relative(ours, theirs) < 1e-12
    g, same = ffn.activations(x)
    assert torch.equal(same, h)
    assert torch.equal(ffn.stats.take()[0], (g != 0).sum(0))
    with torch.no_grad():
        assert relative(ffn.eval()(x), y) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_torchs_bits(dtype):
    a = torch.cat([torch.randn(4096) * 3, torch.tensor([0.0, -0.0, 300.0, 1e-4, 1e38])])
    a = torch.cat([a, torch.tensor([torch.inf, -torch.inf, torch.nan])]).to(dtype)
    relu, squared = get_activation("relu"), get_activation("relu2")
    bits = torch.int16
    assert torch.equal(relu.gate(a).view(bits), torch.relu(a).view(bits))
    ours = squared.hidden(squared.gate(a), None)
    assert torch.equal(ours.view(bits), torch.relu(a).square().view(bits))
    for threshold in (0.3, 1.0, 2.71828, 1 + 2**-20):
        g = get_activation("relu", threshold).gate(a)
        assert [bool(value) for value in g != 0] == [not v <= threshold for v in a.tolist()]
        assert torch.equal(g[g != 0].view(bits), a[g != 0].view(bits))  # NaN among them


@EACH
@pytest.mark.parametrize("shift", [-20.0, 20.0, float("nan"), float("inf")])
def test_empty_full_and_special_rows(activation, threshold, gated, shift):
    """One row of each kind beside ordinary ones, which it does not change."""
    ffn = make(gated, True, activation, threshold=threshold, sizes=(24, 71)).eval()
    first = ffn.gate_proj if gated else ffn.up_proj
    x = torch.randn(4, 24, dtype=torch.float64)
    with torch.no_grad():
        first.weight[:, 0] = 1.0
        first.bias.fill_(-1)
        x[2, 0] = shift * 1e3
        expected, _ = plain(ffn, x)
        ordinary = ffn(x[[0, 1, 3]])
        ffn.backend = "reference"
        y = ffn(x)
    torch.testing.assert_close(y[[0, 1, 3]], ordinary, rtol=1e-12, atol=1e-12)
    if shift == -20:
        assert torch.equal(y[2], ffn.down_proj.bias)
    elif shift == 20:
        torch.testing.assert_close(y[2], expected[2], rtol=1e-10, atol=1e-10)
    else:
        assert not y[2].isfinite().any()


def test_squares_overflow_in_fp16_as_torchs_do():
    layer = make(False, False, "relu2", dtype=torch.float16, sizes=(16, 16)).eval()
    with torch.no_grad():
        layer.up_proj.weight.copy_(torch.eye(16))
        layer.down_proj.weight.copy_(torch.eye(16))
        x = torch.full((1, 16), 255.0, dtype=torch.float16)
        x[0, 3:5] = torch.tensor([256.0, 1e-4])
        for backend in ("dense", "reference"):
            layer.backend = backend
            y = layer(x)[0]
            # Matrix products multiply inf by 0, except by unions and rows.
            assert y[3] == torch.inf if backend == "reference" else not y[3].isfinite()
        g, h = layer.activations(x)
    assert g[0, 4] != 0 and h[0, 4] == 0  # active, and its square is 0


def test_names_and_thresholds_are_checked_and_shown():
    for message, arguments in {
        "'drelu' needs a gate": ("drelu", 0.0, False),
        "threshold is -0.1; it has to be a finite number": ("relu", -0.1, True),
        "threshold is nan; it has to": ("relu", float("nan"), True),
        "threshold is 0.1; activation 'silu' takes none": ("silu", 0.1, True),
    }.items():
        with pytest.raises(ValueError, match=message):
            SparseFFN(16, 16, activation=arguments[0], threshold=arguments[1], gated=arguments[2])
    ffn = SparseFFN(16, 16, activation="relu2", threshold=0.25, backend="reference")
    assert "activation=relu2, threshold=0.25, backend=reference" in repr(ffn)
    assert copy.deepcopy(ffn).threshold == 0.25


def test_a_saved_model_keeps_activation_and_threshold(tmp_path):
    config = SparseLlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_act="relu2",
        activation_threshold=0.125,
    )
    model = SparseLlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded = SparseLlamaForCausalLM.from_pretrained(tmp_path)
    assert [ffn.act for ffn in loaded.ffns] == [get_activation("relu2", 0.125)] * 2
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.hidden_act == "relu2" and loaded.config.activation_threshold == 0.125
    assert [ffn.act for ffn in twell.load(tmp_path)[0].ffns] == [ffn.act for ffn in model.ffns]
    with pytest.raises(KeyError, match="relu2_above_threshold"):  # it would ignore the threshold
        LlamaForCausalLM.from_pretrained(tmp_path)
    config.update(config.to_dict())
    assert SparseLlamaForCausalLM(config).ffns[0].act == model.ffns[0].act
    assert config.to_dict()["hidden_act"] == "relu2_above_threshold"
    with pytest.raises(ValueError, match="'relu2_above_threshold', and activation_threshold 0.0"):
        SparseLlamaConfig.from_dict(config.to_dict() | {"activation_threshold": 0.0})
