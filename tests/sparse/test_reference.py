"""The reference against dense products and autograd in fp64, and against dense in 16 bits."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from tests import fuzz
from tests.factories import SEED
from twell.sparse import reference as r
from twell.sparse.activations import get_activation
from twell.sparse.formats import ELL, Hybrid, TileUnion, TwELL

GATED = pytest.mark.parametrize("gated", [True, False])
NAMES = ["x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"]
K = 24


def cast(layer, dtype):
    """The same numbers in another type, as new leaves."""
    tensors = {
        name: None if t is None else t.detach().to(dtype).requires_grad_()
        for name, t in vars(layer).items()
    }
    return SimpleNamespace(**tensors)


def tensors_of(num_tokens, n, pattern, gated=True, biases=True, dtype=torch.float64, k=K):
    options = {"gated": gated, "biases": biases, "pattern": pattern, "seed": SEED}
    case = fuzz.Case("reference", num_tokens, n, k, dtype=torch.float16, **options)
    return cast(SimpleNamespace(**fuzz.layer(case, "cpu")), dtype)


def first(layer):
    return r.Layer(**vars(layer)).first


def gate_and_h(layer):
    return r.activations(layer.x, layer.w_gate, layer.w_up, layer.b_gate, layer.b_up)


def infer(layer, g, packed, block_m=64):
    """y by `from_gate` for each format in `packed`, and by unions."""
    results = [r.from_gate(one, **vars(layer)) for one in packed]
    return [*results, r.from_gate(TileUnion.pack(g, block_m), **vars(layer), block=block_m)]


def step(layer, dy, dl1, block=64):
    """y, l1, active neurons of each token and the gradients by unions of blocks of tokens."""
    given = {name: t for name, t in vars(layer).items() if t is not None}
    with torch.enable_grad():
        y, l1, active = r.union_train(**vars(layer), block=block)
    gradients = torch.autograd.grad((y, l1), list(given.values()), (dy, dl1))
    return y.detach(), l1.detach(), active.sum(1), dict(zip(given, gradients, strict=True))


# The paper's step, and by unions
STEPS = {"hybrid": partial(step, block=1), "union": step, "union of 5": partial(step, block=5)}


def dense_gradients(layer, dy, dl1):
    y, (_, h) = r.ffn(**vars(layer)), gate_and_h(layer)
    loss = (y * dy).sum() + (h.abs().sum(1) * dl1).sum()
    given = {name: t for name, t in vars(layer).items() if t is not None}
    return dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))


def error(got, expected):
    """Relative RMS; where everything is 0 the RMS itself."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    difference, scale = (got - expected).norm(), expected.norm()
    return float(difference / scale) if scale else float(difference)


def assert_close(got, expected):
    assert got.dtype == expected.dtype and error(got, expected) < 1e-12


@pytest.mark.parametrize("biases", [True, False])
@torch.no_grad()
def test_dense_layers_are_those_of_llama_and_torch(biases):
    layer = tensors_of(7, 257, "even", biases=biases)
    config = {"hidden_size": K, "num_attention_heads": 1, "intermediate_size": 257}
    for activation in ("relu", "silu"):
        mlp = LlamaMLP(LlamaConfig(**config, hidden_act=activation, mlp_bias=biases)).double()
        for kind in ("gate", "up", "down"):
            part = getattr(mlp, f"{kind}_proj")
            part.weight.copy_(getattr(layer, f"w_{kind}"))
            if biases:
                part.bias.copy_(getattr(layer, f"b_{kind}"))
        assert_close(r.ffn(**vars(layer), act=get_activation(activation)), mlp(layer.x))
    layer = tensors_of(7, 257, "even", gated=False, biases=biases)
    h = nn.functional.linear(layer.x, layer.w_up, layer.b_up).relu()
    assert_close(r.ffn(**vars(layer)), nn.functional.linear(h, layer.w_down, layer.b_down))


@pytest.mark.parametrize(("gated", "biases"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("num_tokens", "n", "pattern"),
    [(0, 300, "even"), (1, 257, "full"), (130, 100, "empty"), (130, 100, "heavy")],
)
def test_inference_and_training_against_autograd(num_tokens, n, pattern, gated, biases):
    layer = tensors_of(num_tokens, n, pattern, gated, biases)
    dy, dl1 = torch.randn(num_tokens, K).double(), torch.randn(num_tokens).double()
    expected_y, (gate, h) = r.ffn(**vars(layer)), gate_and_h(layer)
    expected = dense_gradients(layer, dy, dl1)
    with torch.no_grad():
        packed = r.gate_pack(layer.x, *first(layer), tile_n=64, compression=8)
        assert_close(packed.unpack(), gate)
        assert packed.counts.sum(1).equal((gate != 0).sum(1))
        formats = packed, ELL.pack(gate), Hybrid.pack(gate, 20)
        for y in infer(layer, gate, formats) + infer(layer, gate, (), 16):
            assert_close(y, expected_y)
        for function in STEPS.values():
            y, l1, nnz, gradients = function(layer, dy, dl1)
            assert_close(y, expected_y)
            assert_close(l1, h.abs().sum(1))
            assert nnz.equal((gate != 0).sum(1))
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                assert_close(gradient, expected[name])


@pytest.mark.parametrize("name", STEPS)
def test_l1_gradient_where_an_active_h_is_zero(name):
    """u = 0 at an active neuron: the L1 term has gradient 0 there, the others go on."""
    layer = tensors_of(7, 300, "full", biases=False)
    layer.w_up.data[:100] = 0
    dy, dl1 = torch.zeros(7, K, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    dy[3] = torch.randn(K, dtype=torch.float64)
    expected = dense_gradients(layer, dy, dl1)
    _, _, nnz, gradients = STEPS[name](layer, dy, dl1)
    assert nnz.tolist() == [300] * 7 and expected["w_up"][:100].norm() > 0
    for part in expected:
        assert_close(gradients[part], expected[part])


@GATED
@torch.no_grad()
def test_nan_in_x_stays_in_its_row(gated):
    layer = tensors_of(130, 300, "heavy", gated, dtype=torch.float32)
    dy, dl1, others = torch.randn(130, K), torch.rand(130), torch.ones(130, dtype=torch.bool)
    cleans = {name: function(layer, dy, dl1) for name, function in STEPS.items()}
    others[[3, 65]] = False
    layer.x[[3, 65], 5] = torch.nan
    gate = r.gate_pack(layer.x, *first(layer))
    results = infer(layer, gate.unpack(), [gate])
    for name, function in STEPS.items():
        y, l1, nnz, gradients = function(layer, dy, dl1)
        results.append(y)
        _, clean_l1, clean_nnz, clean = cleans[name]
        assert nnz[~others].tolist() == [300, 300] and nnz[others].equal(clean_nnz[others])
        assert l1[~others].isnan().all() and error(l1[others], clean_l1[others]) < 1e-6
        assert error(gradients["x"][others], clean["x"][others]) < 1e-6
    for result in results:
        assert result[~others].isnan().all()
        assert error(result[others], cleans["hybrid"][0][others]) < 1e-6


# --- refusals


@torch.no_grad()
def test_inputs_that_do_not_fit_are_refused():
    layer = tensors_of(7, 300, "even")
    gate, (x, w_up, w_down) = gate_and_h(layer)[0], (layer.x, layer.w_up, layer.w_down)
    short = [SimpleNamespace(**vars(layer) | {n: getattr(layer, n)[1:]}) for n in NAMES[1:]]
    forwards = r.ffn, r.union_train
    for value, function, *arguments in (
        *(("has shape", forward, *vars(bad).values()) for bad in short for forward in forwards),
        (r"w_down has shape \(300, 24\)", r.ffn, x, None, w_up, w_down.t()),
        ("b_gate", r.union_train, x, None, w_up, w_down, layer.b_gate),
        (r"g has shape \(7, 299\)", r.from_gate, TwELL.pack(gate[:, :-1]), x, None, w_up, w_down),
        (r"g has shape \(6, 300\)", r.from_gate, TileUnion.pack(gate[:-1]), x, None, w_up, w_down),
    ):
        with pytest.raises(ValueError, match=value):
            function(*arguments)
