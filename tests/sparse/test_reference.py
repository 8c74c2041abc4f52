"""The reference against dense products and autograd in fp64, and against dense in 16 bits."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from twell.reference import (
    activations,
    down,
    ffn,
    ffn_backward,
    ffn_forward,

    gate_pack,
    hybrid_matmul,
    multiply,
    sampled_matmul,
    to_hybrid,
    transpose_matmul,
    union_down,
    union_train_backward,
    union_train_forward,
    union_up_down,
    up_down,
)
from twell.sparse.reference import Layer
from twell.sparse.formats import ELL, BufferOverflow, Hybrid, PackedTwELL, TileUnion, TwELL

PATTERNS = ["empty", "full", "sparse", "heavy"]
SIZES = [(0, 300), (1, 257), (7, 300), (130, 100)]
K = 24
NAMES = ["x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def make_layer(
    num_tokens, n, pattern, generator, gated=True, biases=True, dtype=torch.float64, k=K
):
    """Random x and weights whose gate has the pattern; the first feature of x is 1 and steers it.

    "heavy" has tokens with hardly any active neuron beside some with nearly all.
    """

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = randn(num_tokens, k)
    first = randn(n, k) / k**0.5
    x[:, 0] = 1
    first[:, 0] = {"empty": -20, "full": 20, "sparse": -2, "heavy": -1}[pattern]
    if pattern == "heavy":
        x[:, 0] = 3
        x[::5, 0] = -3
    second = randn(n, k) / k**0.5
    w_down = (randn(n, k) / n**0.5).t()
    b_first, b_up, b_down = (0.3 * randn(n), randn(n), randn(k)) if biases else (None, None, None)
    layer = (x, first, second, w_down, b_first, b_up, b_down)
    if not gated:
        layer = (x, None, first, w_down, None, b_first, b_down)
    # Rounded to the dtype once, so that the fp64 comparison has the same inputs.
    return cast(SimpleNamespace(**dict(zip(NAMES, layer, strict=True))), dtype)


def undecided(layer):
    """Whether a gate is so near zero that the order of its sum, in fp32, decides whether it is
    active.
    """
    with torch.no_grad():
        x, w, b = (tensor.double() for tensor in (layer.x, *first(layer)))
        linear = torch.nn.functional.linear
        return bool((linear(x, w, b).abs() <= 2.0**-20 * linear(x.abs(), w.abs(), b.abs())).any())


def cast(layer, dtype):
    """The same numbers in another type, as new leaves."""
    return SimpleNamespace(
        **{
            k: None if v is None else v.detach().to(dtype).requires_grad_()
            for k, v in vars(layer).items()
        }
    )


def first(layer):
    return Layer(**vars(layer)).first


def dense_gate(layer):
    return activations(layer.x, layer.w_gate, layer.w_up, layer.b_gate, layer.b_up)[0]


def dense_layer(layer):
    """y and h of the dense layer."""
    first = layer.x, layer.w_gate, layer.w_up, layer.b_gate, layer.b_up
    return ffn(**vars(layer)), activations(*first)[1]


def hybrid_step(layer, dy, dl1):
    """y, l1, active neurons of each token and the gradients by the paper's training step."""
    y, l1, nnz, saved = ffn_forward(**vars(layer), ell_width=20, tile_n=64, compression=8)
    return y, l1, nnz, ffn_backward(saved, dy, dl1)


def union_step(layer, dy, dl1, block=64):
    """The same by unions of blocks of tokens."""
    y, l1, nnz, counts, saved = union_train_forward(**vars(layer), block=block)
    assert counts.sum() == nnz.sum() and counts.shape == (len(layer.w_up),)
    return y, l1, nnz, union_train_backward(saved, dy, dl1)


STEPS = {"hybrid": hybrid_step, "union": union_step, "union of 5": partial(union_step, block=5)}


def dense_gradients(layer, dy, dl1):
    y, h = dense_layer(layer)
    loss = (y * dy).sum() + (h.abs().sum(1) * dl1).sum()
    given = {name: t for name, t in vars(layer).items() if t is not None}
    return dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))


def error(got, expected) -> float:
    """Relative RMS; where everything is 0 the RMS itself."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    if not expected.numel():
        return 0.0
    difference, scale = (got - expected).norm(), expected.norm()
    return float(difference / scale) if scale else float(difference)


def assert_close(got, expected, tolerance=1e-12) -> None:
    assert got.dtype == expected.dtype
    assert error(got, expected) < tolerance


def test_patterns_are_what_they_say(generator):
    """Otherwise the tests below would test less than they seem to."""
    active = {p: (dense_gate(make_layer(130, 300, p, generator)) != 0).sum(1) for p in PATTERNS}
    assert active["empty"].max() == 0 and active["full"].min() == 300
    assert 0 < active["sparse"].double().mean() < 60
    assert active["heavy"].max() > 250 and active["heavy"].median() < 30
    overflow = gate_pack(
        *(getattr(make_layer(130, 300, "heavy", generator), n) for n in ("x", "w_gate"))
    ).overflow
    assert 0 < overflow.sum() < 130


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("num_tokens", "n"), SIZES)
@torch.no_grad()
def test_the_gated_layer_is_the_one_of_llama(num_tokens, n, biases, activation, generator):
    layer = make_layer(num_tokens, n, "sparse", generator, biases=biases)
    config = LlamaConfig(
        hidden_size=K,
        num_attention_heads=1,
        intermediate_size=n,
        hidden_act=activation,
        mlp_bias=biases,
    )
    mlp = LlamaMLP(config).double()
    for part, kind in ((mlp.gate_proj, "gate"), (mlp.up_proj, "up"), (mlp.down_proj, "down")):
        part.weight.copy_(getattr(layer, f"w_{kind}"))
        if biases:
            part.bias.copy_(getattr(layer, f"b_{kind}"))
    assert_close(ffn(**vars(layer), activation=activation), mlp(layer.x))


@pytest.mark.parametrize("biases", [True, False])
@torch.no_grad()
def test_the_non_gated_layer_is_two_linears_around_relu(biases, generator):
    layer = make_layer(7, 300, "sparse", generator, gated=False, biases=biases)
    module = nn.Sequential(nn.Linear(K, 300, biases), nn.ReLU(), nn.Linear(300, K, biases)).double()
    module[0].weight.copy_(layer.w_up)
    module[2].weight.copy_(layer.w_down)
    if biases:
        module[0].bias.copy_(layer.b_up)
        module[2].bias.copy_(layer.b_down)
    assert_close(ffn(**vars(layer)), module(layer.x))


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("num_tokens", "n"), SIZES)
@torch.no_grad()
def test_inference(num_tokens, n, pattern, gated, biases, generator):
    layer = make_layer(num_tokens, n, pattern, generator, gated, biases)
    expected, _ = dense_layer(layer)
    g = dense_gate(layer)
    packed = gate_pack(layer.x, *first(layer), tile_n=64, compression=8)
    assert (packed.tile_n, packed.compression) == (64, 8)
    assert_close(packed.unpack(), g)
    assert packed.counts.sum(1).equal((g != 0).sum(1))
    for active in (packed, ELL.pack(g), Hybrid.pack(g, 20)):
        if gated:
            y = up_down(layer.x, active, layer.w_up, layer.w_down, layer.b_up, layer.b_down)
        else:
            y = down(active, layer.w_down, layer.b_down)
        assert_close(y, expected)
    for block_m in (1, 16, 64):
        union = TileUnion.pack(g, block_m)
        if gated:
            y = union_up_down(layer.x, union, layer.w_up, layer.w_down, layer.b_up, layer.b_down)
        else:
            y = union_down(union, layer.w_down, layer.b_down)
        assert_close(y, expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("num_tokens", "n"), SIZES)
@torch.no_grad()
def test_training_parts(num_tokens, n, pattern, generator):
    layer = make_layer(num_tokens, n, pattern, generator)
    dense_g = dense_gate(layer)
    active = dense_g != 0
    packed = TwELL.pack(dense_g, 64, 8)
    g, l0 = to_hybrid(packed, ell_width=20)
    assert l0.dtype == torch.int32 and l0.equal(active.sum(1, dtype=torch.int32))
    assert g.unpack().equal(dense_g)
    assert len(g.backup) == (l0 > 20).sum()

    dense_u = torch.where(active, linear(layer.x, layer.w_up, layer.b_up), 0)
    u = sampled_matmul(layer.x, layer.w_up, g, layer.b_up)
    assert u.nnz == g.nnz
    assert_close(u.unpack(), dense_u)
    assert_close(sampled_matmul(layer.x, layer.w_up, u).unpack(), dense_u - active * layer.b_up)

    h, l1 = multiply(u, g)
    dense_h = dense_u * dense_g
    assert h.nnz == g.nnz
    assert_close(h.unpack(), dense_h)
    assert_close(l1, dense_h.abs().sum(1))
    assert_close(hybrid_matmul(h, layer.w_down), dense_h @ layer.w_down.t())
    assert_close(transpose_matmul(h, layer.x), dense_h.t() @ layer.x)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("num_tokens", "n"), SIZES)
def test_training_step_against_autograd(num_tokens, n, pattern, gated, biases, step, generator):
    layer = make_layer(num_tokens, n, pattern, generator, gated, biases)
    dy = torch.randn(num_tokens, K, generator=generator, dtype=torch.float64)
    dl1 = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    expected_y, expected_h = dense_layer(layer)
    expected = dense_gradients(layer, dy, dl1)
    with torch.no_grad():
        y, l1, nnz, gradients = STEPS[step](layer, dy, dl1)
    assert_close(y, expected_y)
    assert_close(l1, expected_h.abs().sum(1))
    assert nnz.dtype == torch.int32
    assert nnz.equal((dense_gate(layer) != 0).sum(1, dtype=torch.int32))
    assert gradients._fields == tuple(NAMES)
    for name, gradient in gradients._asdict().items():
        if name in expected:
            assert_close(gradient, expected[name])
        else:
            assert gradient is None


@pytest.mark.parametrize("step", STEPS)
def test_l1_gradient_where_an_active_h_is_zero(step, generator):
    """u = 0 at an active neuron: h is 0 there, the L1 term has gradient 0, yet the other gradients
    go on.
    """
    layer = make_layer(7, 300, "full", generator, biases=False)
    with torch.no_grad():
        layer.w_up[:100] = 0
    dy, dl1 = torch.zeros(7, K, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    dy[3] = torch.randn(K, generator=generator, dtype=torch.float64)
    expected = dense_gradients(layer, dy, dl1)
    with torch.no_grad():
        _, _, nnz, gradients = STEPS[step](layer, dy, dl1)
    assert nnz.tolist() == [300] * 7
    assert expected["w_up"][:100].norm() > 0
    for name in expected:
        assert_close(getattr(gradients, name), expected[name])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", ["full", "sparse", "heavy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_less_exact_than_the_dense_layer(dtype, pattern, gated, generator):
    # Of a gate that rounding decides, fp64 may have the whole gradient where both layers have none,
    # or one of them.
    while undecided(layer := make_layer(130, 1000, pattern, generator, gated, dtype=dtype, k=64)):
        pass
    exact = cast(layer, torch.float64)
    dy = torch.randn(130, 64, generator=generator).to(dtype)
    dl1 = torch.rand(130, generator=generator)
    expected_y, expected_h = dense_layer(exact)
    dense_y, _ = dense_layer(layer)
    bound = 1.25 * error(dense_y, expected_y)
    with torch.no_grad():
        assert error(ffn(**vars(layer)), expected_y) <= bound
        g = gate_pack(layer.x, *first(layer))
        assert g.dtype == dtype
        union = TileUnion.pack(g.unpack())
        packed = PackedTwELL.pack(g.unpack())
        if gated:
            rest = layer.w_up, layer.w_down, layer.b_up, layer.b_down
            results = [up_down(layer.x, g, *rest), up_down(layer.x, packed, *rest)]
            results.append(union_up_down(layer.x, union, *rest))
        else:
            rest = layer.w_down, layer.b_down
            results = [down(g, *rest), down(packed, *rest), union_down(union, *rest)]
    for result in results:
        assert result.dtype == dtype
        assert error(result, expected_y) <= bound
    expected = dense_gradients(exact, dy.double(), dl1.double())
    dense = dense_gradients(layer, dy, dl1)
    for step in STEPS.values():
        with torch.no_grad():
            y, l1, _, gradients = step(layer, dy, dl1)
        assert y.dtype == dtype and l1.dtype == torch.float32
        assert error(y, expected_y) <= bound
        assert error(l1, expected_h.abs().sum(1)) < 3 * torch.finfo(dtype).eps
        for name, exact_gradient in expected.items():
            got = getattr(gradients, name)
            assert got.dtype == dtype
            assert error(got, exact_gradient) <= 1.25 * error(dense[name], exact_gradient), name


@torch.no_grad()
def test_u_and_h_are_not_rounded_in_the_fused_kernel():
    """u = 1 + 2^-10 is not a bf16 number; with g = 1 and a second neuron that takes 1 away, 2^-10
    remains.
    """
    x = torch.tensor([[1.0, 2**-10]], dtype=torch.bfloat16)
    w_up = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.bfloat16)
    w_down = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    for y in (
        up_down(x, TwELL.pack(ones), w_up, w_down),
        union_up_down(x, TileUnion.pack(ones), w_up, w_down),
    ):
        assert y.tolist() == [[2**-10, 0]]
    h, _ = multiply(sampled_matmul(x, w_up, Hybrid.pack(ones)), Hybrid.pack(ones))
    assert hybrid_matmul(h, w_down).tolist() == [[0, 0]]  # training stores u and h


@torch.no_grad()
def test_dh_is_not_rounded_before_the_l1_term():
    """dh = 1 + 2^-10 is not a bf16 number; an L1 gradient of -1 leaves 2^-10."""
    x, w_up = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)
    w_down, b_up = torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    *_, saved = ffn_forward(x, None, w_up, w_down, b_up=b_up)
    dy = torch.tensor([[1.0, 2**-10]], dtype=torch.bfloat16)
    gradients = ffn_backward(saved, dy, torch.tensor([-1.0]))
    assert gradients.b_up.tolist() == [2**-10]
    assert gradients.w_up.tolist() == gradients.x.tolist() == [[2**-10, 2**-10]]


@pytest.mark.parametrize("gated", [True, False])
@torch.no_grad()
def test_nan_in_x_stays_in_its_row(gated, generator):
    layer = make_layer(130, 300, "heavy", generator, gated, dtype=torch.float32)
    step = torch.randn(130, K, generator=generator), torch.rand(130, generator=generator)
    cleans = {name: function(layer, *step) for name, function in STEPS.items()}
    clean = cleans["hybrid"]
    layer.x[[3, 65], 5] = torch.nan
    g = gate_pack(layer.x, *first(layer))
    union = TileUnion.pack(g.unpack())
    rest = (layer.w_down, layer.b_down)
    if gated:
        results = [up_down(layer.x, g, layer.w_up, rest[0], layer.b_up, rest[1])]
        results.append(union_up_down(layer.x, union, layer.w_up, rest[0], layer.b_up, rest[1]))
    else:
        results = [down(g, *rest), union_down(union, *rest)]
    others = torch.ones(130, dtype=torch.bool)
    others[[3, 65]] = False
    for name, function in STEPS.items():
        y, l1, nnz, gradients = function(layer, *step)
        results.append(y)
        assert nnz[~others].tolist() == [300, 300] and nnz[others].equal(cleans[name][2][others])
        assert l1[~others].isnan().all() and error(l1[others], cleans[name][1][others]) < 1e-6
        assert error(gradients.x[others], cleans[name][3].x[others]) < 1e-6
    for result in results:
        assert result[~others].isnan().all()
        assert error(result[others], clean[0][others]) < 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@torch.no_grad()
def test_bad_weights_reach_only_tokens_where_their_neuron_is_active(bad, generator):
    layer = make_layer(7, 300, "sparse", generator, dtype=torch.float32)
    g = dense_gate(layer)
    g[:, 10], g[2, 10], g[:, 11] = 0, 1, 0
    g[4, 20:] = 1  # a long row, in the backup and beside the slots
    others = torch.arange(7) != 2
    clean = up_down(layer.x, TwELL.pack(g), layer.w_up, layer.w_down)
    h = Hybrid.pack(g, ell_width=100)
    product, gradient = hybrid_matmul(h, layer.w_down), transpose_matmul(h, layer.x)
    for weight in (layer.w_up, layer.w_down.t()):
        weight[10:12] = bad
        y = up_down(layer.x, TwELL.pack(g), layer.w_up, layer.w_down)
        assert y[others].equal(clean[others])
        assert not y[2].isfinite().any()
        # In the union form a neuron active for no token of the block, and w_up of any inactive one.
        y = union_up_down(layer.x, TileUnion.pack(g, block_m=2), layer.w_up, layer.w_down)
        blocks = others if weight is layer.w_up else (torch.arange(7) < 2) | (torch.arange(7) > 3)
        assert error(y[blocks], clean[blocks]) < 1e-6
        assert not y[2].isfinite().any()
    assert sampled_matmul(layer.x, layer.w_up, h).unpack()[others].isfinite().all()
    assert hybrid_matmul(h, layer.w_down)[others].equal(product[others])
    layer.x[4] = bad  # only neurons active for token 4 see it
    assert transpose_matmul(h, layer.x)[g[4] == 0].equal(gradient[g[4] == 0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@torch.no_grad()
def test_bad_values_reach_only_the_weight_gradients_of_active_neurons(bad, generator):
    """In a step by unions: a token's dy is bad, and w_up of a neuron that is never active."""
    layer = make_layer(9, 300, "sparse", generator, dtype=torch.float32)
    dy, dl1 = torch.randn(9, K, generator=generator), torch.rand(9, generator=generator)
    active = dense_gate(layer) != 0
    token, idle = int(active.sum(1).argmax()), int((~active.any(0)).nonzero()[0])
    clean = union_step(layer, dy, dl1, block=3)
    layer.w_up[idle] = bad
    dy[token] = bad
    y, l1, _, gradients = union_step(layer, dy, dl1, block=3)
    assert y.equal(clean[0]) and l1.equal(clean[1])
    others = torch.arange(9) != token
    assert gradients.x[others].equal(clean[3].x[others]) and not gradients.x[token].isfinite().any()
    for name in ("w_gate", "w_up", "w_down"):
        gradient, expected = (getattr(g, name) for g in (gradients, clean[3]))
        if name == "w_down":
            gradient, expected = gradient.t(), expected.t()
        assert gradient[~active[token]].equal(expected[~active[token]])


@torch.no_grad()
def test_backup_too_small_is_raised_and_a_repeat_succeeds(generator):
    layer = make_layer(130, 300, "heavy", generator)
    with pytest.raises(BufferOverflow) as caught:
        ffn_forward(**vars(layer), ell_width=20, backup_rows=1)
    y, *_ = ffn_forward(**vars(layer), ell_width=20, backup_rows=caught.value.needed)
    assert_close(y, dense_layer(layer)[0])


@torch.no_grad()
def test_inputs_that_do_not_fit_are_refused(generator):
    layer = make_layer(7, 300, "sparse", generator)
    g = dense_gate(layer)
    h = Hybrid.pack(g)
    x, w_up, w_down = layer.x, layer.w_up, layer.w_down
    for name in NAMES[1:]:
        bad = SimpleNamespace(**vars(layer))
        setattr(bad, name, getattr(layer, name)[1:])
        for function in (ffn, ffn_forward, union_train_forward):
            with pytest.raises(ValueError, match="has shape .* expected"):
                function(**vars(bad))
    with pytest.raises(ValueError, match=r"w_down has shape \(300, 24\), expected \(24, 300\)"):
        ffn(x, None, w_up, w_down.t())
    with pytest.raises(ValueError, match=r"x has shape \(1, 7, 24\)"):
        ffn_forward(x[None], None, w_up, w_down)
    with pytest.raises(ValueError, match="activation='gelu'.*relu"):
        ffn(x, None, w_up, w_down, activation="gelu")
    with pytest.raises(ValueError, match="b_gate is given without w_gate"):
        ffn_forward(x, None, w_up, w_down, b_gate=layer.b_gate)
    for other in (g[:, :-1], g[:-1], torch.cat([g, g])):
        match = f"g is {other.shape[0]} x {other.shape[1]}, expected 7 x 300"
        with pytest.raises(ValueError, match=match):
            up_down(x, TwELL.pack(other), w_up, w_down)
        with pytest.raises(ValueError, match=match):
            union_up_down(x, TileUnion.pack(other), w_up, w_down)
    wide = torch.cat([w_down, w_down], dim=1)
    for call in (
        lambda: down(TwELL.pack(g), wide),
        lambda: union_down(TileUnion.pack(g), wide),
        lambda: hybrid_matmul(h, wide),
        lambda: sampled_matmul(x[1:], w_up, h),
        lambda: sampled_matmul(x, w_up[1:], h),
        lambda: transpose_matmul(h, torch.cat([x, x])),
    ):
        with pytest.raises(ValueError, match="has shape .* expected"):
            call()
    saved = ffn_forward(**vars(layer))[-1]
    with pytest.raises(ValueError, match=r"dy has shape \(6, 24\)"):
        ffn_backward(saved, x[1:], g[:, 0])
    with pytest.raises(ValueError, match=r"dl1 has shape \(1,\)"):
        ffn_backward(saved, x, g[:1, 0])
    saved = union_train_forward(**vars(layer))[-1]
    with pytest.raises(ValueError, match=r"dy has shape \(6, 24\)"):
        union_train_backward(saved, x[1:], g[:, 0])
    with pytest.raises(ValueError, match=r"dl1 has shape \(1,\)"):
        union_train_backward(saved, x, g[:1, 0])
