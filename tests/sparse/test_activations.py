import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.factories.sparse import make, relative, watched
from twell.models import SparseLlamaConfig
from twell.sparse.activations import get_activation

# (activation, threshold, gated)
KINDS = [
    ("relu", 0.0, True),
    ("relu", 0.5, False),
    ("relu2", 0.0, False),
    ("relu2", 0.5, True),
    ("drelu", 0.5, True),
]
BACKENDS = [(*kind, backend) for kind in KINDS for backend in ("dense", "reference")]
BACKENDS += [("silu", 0.0, gated, "dense") for gated in (True, False)]


def plain(ffn, x):
    """The layer's formula, spelled out in torch's operators; y and h."""
    a = ffn.first(x)
    g = F.silu(a) if ffn.activation == "silu" else torch.where(a > ffn.threshold, a, 0)
    h = g * g if ffn.activation == "relu2" else g
    if ffn.gated:
        u = ffn.up_proj(x)
        h = h * (torch.relu(u) if ffn.activation == "drelu" else u)
    return ffn.down_proj(h), h


@pytest.mark.parametrize(("activation", "threshold", "gated", "backend"), BACKENDS)
def test_values_l1_counts_and_gradients_are_those_of_the_formula(
    activation, threshold, gated, backend
):
    ffn = make(gated, True, activation, backend, threshold=threshold)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(2, 5, dtype=torch.float64)
    tensors = [x, *ffn.parameters()]
    y, l1 = watched(ffn, x, counts=True)
    computed = torch.autograd.grad(y.square().sum() + (scale * l1).sum(), tensors)
    exact, h = plain(ffn, x)
    loss = exact.square().sum() + (scale * h.abs().sum(-1)).sum()
    expected = [exact, h.abs().sum(-1), *torch.autograd.grad(loss, tensors, retain_graph=True)]
    for ours, theirs in zip([y, l1, *computed], expected, strict=True):
        assert relative(ours, theirs) < 1e-12
    g, same = ffn.activations(x)
    assert torch.equal(same, h)
    assert torch.equal(ffn.stats.take()[0], (g != 0).sum((0, 1)))
    (expected,) = torch.autograd.grad(exact.square().sum(), x)
    copied = copy.deepcopy(ffn).eval()  # without the graph of the last pass
    (gradient,) = torch.autograd.grad(copied(x).square().sum(), x)
    with torch.no_grad():
        assert relative(copied(x), exact) < 1e-12 and relative(gradient, expected) < 1e-12
    assert watched(copied, x)[1] is None and not copied.stats.counters  # nobody asked for them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_torchs_bits(dtype):
    a = torch.cat([torch.randn(4096) * 3, torch.tensor([0.0, -0.0, 300.0, 1e-4, 1e38])])
    a = torch.cat([a, torch.tensor([torch.inf, -torch.inf, torch.nan])]).to(dtype)
    relu, squared, bits = get_activation("relu"), get_activation("relu2"), torch.int16
    assert torch.equal(relu.gate(a).view(bits), torch.relu(a).view(bits))
    ours = squared.hidden(squared.gate(a), None)
    assert torch.equal(ours.view(bits), torch.relu(a).square().view(bits))
    for threshold in (0.3, 1.0, 1 + 2**-20):
        g = get_activation("relu", threshold).gate(a)
        assert [bool(value) for value in g != 0] == [not v <= threshold for v in a.tolist()]
        assert torch.equal(g[g != 0].view(bits), a[g != 0].view(bits))  # NaN among them


def test_a_threshold_is_not_ignored_by_transformers_and_not_left_out(tmp_path):
    config = SparseLlamaConfig(hidden_act="relu2", activation_threshold=0.125)
    config.save_pretrained(tmp_path)
    with pytest.raises(KeyError, match="relu2_above_threshold"):  # it would ignore the threshold
        LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path, num_hidden_layers=1))
    for wrong in ("activation_threshold", 0.0), ("l1_coefficient", -1.0), ("gated_mlp", "false"):
        with pytest.raises(ValueError, match="{} .*{}".format(*wrong)):
            SparseLlamaConfig.from_dict(config.to_dict() | dict([wrong]))
