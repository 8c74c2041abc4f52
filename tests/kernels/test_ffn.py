"""The public operator: twell.ffn."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.nn import functional as F

import twell
from tests import fuzz
from tests.factories.kernels import DEVICE, integer_case

NAMES = "x", "w_gate", "w_up", "w_down_t", "b_gate", "b_up", "b_down"


def arguments(**changes):
    """Arguments of twell.ffn of small integers, whose sums are exact, by name."""
    sizes = dict(num_tokens=9, intermediate_size=40, hidden_size=16, pattern="skewed", biases=True)
    tensors = fuzz.layer(integer_case("union", **sizes | changes), DEVICE)
    values = [t.t() if name == "w_down" else t for name, t in tensors.items()]
    return dict(zip(NAMES, values, strict=True))


def dense(x, w_gate, w_up, w_down_t, b_gate, b_up, b_down, *, activation="relu", threshold=0.0):
    """The formula in fp64."""
    x, w_gate, w_up, w_down_t, b_gate, b_up, b_down = (
        None if t is None else t.double() for t in (x, w_gate, w_up, w_down_t, b_gate, b_up, b_down)
    )
    u = F.linear(x, w_up, b_up)
    a = u if w_gate is None else F.linear(x, w_gate, b_gate)
    h = torch.where(a > threshold, a, 0)
    h = h.square() if activation == "relu2" else h
    if w_gate is not None:
        h = h * (u.relu() if activation == "drelu" else u)
    return F.linear(h, w_down_t.t(), b_down)


@pytest.mark.parametrize("path", [None, "union", "rowwise", "dense"])
def test_every_path_any_leading_shape_and_out(path):
    given = arguments()
    y = twell.ffn(**given, path=path)
    assert fuzz.relative_rms(y, dense(**given)) < 5e-3
    given["x"] = given["x"].view(3, 3, 16)
    assert torch.equal(twell.ffn(**given, path=path), y.view(3, 3, 16))
    out = torch.full_like(given["x"], torch.nan)
    assert twell.ffn(**given, path=path, out=out) is out and torch.equal(out, y.view(3, 3, 16))
    out = torch.full_like(out[0], torch.nan)
    rows = {**given, "x": given["x"][0], "b_down": None}
    twell.ffn(**rows, path=path, out=out)
    assert torch.equal(out, twell.ffn(**rows, path=path))
    assert twell.ffn(**{**given, "x": given["x"][:, :0]}, path=path).shape == (3, 0, 16)


def test_partial_sums_of_slices_of_neurons_are_the_layer():
    """As two ranks compute them: the weights are views, and one rank has the bias."""
    given = arguments(dtype=torch.float16)
    whole, parts = twell.ffn(**given), []
    for rank, part in enumerate((slice(0, 24), slice(24, 40))):
        shard = {name: None if t is None else t[part] for name, t in given.items()}
        shard |= {"x": given["x"], "b_down": given["b_down"] if rank == 0 else None}
        parts.append(twell.ffn(**shard))
    torch.testing.assert_close(sum(parts), whole, rtol=2**-9, atol=0.5)


@pytest.mark.parametrize(
    "activation, threshold, gated, path",
    [
        ("relu", 1.5, True, None),
        ("relu2", 0.0, False, None),
        ("drelu", 0.0, True, None),
        ("relu2", 1.5, True, "dense"),
    ],
)
def test_gradients(gated, activation, threshold, path):
    given = arguments(gated=gated, values="normal", dtype=torch.float16)
    leaves = {n: None if t is None else t.detach().requires_grad_() for n, t in given.items()}
    exact = {n: None if t is None else t.double().requires_grad_() for n, t in given.items()}
    dy = torch.randn(9, 16, device=DEVICE)
    options = {"activation": activation, "threshold": threshold, "path": path}
    tensors = [t for t in leaves.values() if t is not None]
    y = twell.ffn(**leaves, **options)
    computed = torch.autograd.grad(y, tensors, dy.to(y.dtype))
    y = dense(**exact, activation=activation, threshold=threshold)
    expected = torch.autograd.grad(y, [t for t in exact.values() if t is not None], dy.double())
    for ours, theirs in zip(computed, expected, strict=True):
        assert fuzz.relative_rms(ours, theirs) < 5e-3


def test_gradients_of_weights_that_are_made_of_each_other():
    given = arguments(biases=False, values="normal", dtype=torch.float16)
    x, w = given["x"], given["w_up"].requires_grad_()

    def gradient(x, w, layer, *others):
        return torch.autograd.grad(layer(x, w, w + x.mean(), w, *others).sum(), w)[0]

    computed = gradient(x, w, lambda *tensors: twell.ffn(*tensors, path="union"))
    expected = gradient(x.double(), w.detach().double().requires_grad_(), dense, *[None] * 3)
    assert fuzz.relative_rms(computed, expected) < 5e-3


def test_one_compiled_graph_serves_every_number_of_tokens():
    """Across the number at which the path changes."""
    given = arguments(num_tokens=513, intermediate_size=20)
    rest, counter = list(given.values())[1:], CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(x):
        return twell.ffn(x, *rest) + 1

    for size in (513, 2, 1):
        x = given["x"][:size].clone()
        torch._dynamo.decorators.mark_unbacked(x, 0)  # else PyTorch makes one more for one token
        assert torch.equal(compiled(x), twell.ffn(x, *rest) + 1)
    assert counter.frame_count == 1


def test_tensors_that_the_kernels_do_not_take_are_computed_densely():
    given = arguments(values="normal")
    wide = {name: t.double().cpu() for name, t in given.items()}
    torch.testing.assert_close(twell.ffn(**wide), dense(**wide))
    odd = {n: t[..., :13] if t.shape[-1] == 16 else t for n, t in wide.items()}
    odd = {name: t.contiguous() for name, t in odd.items()}
    torch.testing.assert_close(twell.ffn(**odd), dense(**odd))
    out = torch.empty_like(odd["x"])
    assert twell.ffn(**odd, out=out) is out and torch.equal(out, twell.ffn(**odd))


def test_autograd_learns_that_out_has_changed():
    given = arguments()
    saved, weight = torch.ones_like(given["x"]), torch.ones_like(given["x"], requires_grad=True)
    loss = (weight * saved).sum()
    with torch.no_grad():
        twell.ffn(**given, path="union", out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="out is given"):
        twell.ffn(**given, out=weight)


def tangent(f, dx):
    return lambda x: torch.func.jvp(f, (x,), (dx.to(x),))[1]


@pytest.mark.parametrize("path", [None, "dense"])
def test_transforms_and_tangents_are_those_of_the_formula(path):
    x, *rest = arguments(values="normal").values()
    dx = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)

    def layer(x):
        return twell.ffn(x, *rest, path=path)

    def formula(x):
        return dense(x, *rest)

    expected = tangent(formula, dx)(x.double())
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, dx))).tangent
    assert fuzz.relative_rms(dual, expected) < 2e-2
    assert fuzz.relative_rms(tangent(layer, dx)(x), expected) < 2e-2
    for transform in (
        lambda f, x: torch.func.grad(lambda x: (f(x) * dx).sum())(x),
        lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    ):
        assert fuzz.relative_rms(transform(layer, x), transform(formula, x.double())) < 2e-2


def test_transforms_survive_compilation():
    """Inside of compiled code, and around it; code for plain calls stays as it is."""
    x, *rest = arguments(values="normal").values()
    dx, ffn = torch.randn(x.shape).to(x), twell.SparseFFN(16, 40, backend="triton", dtype=x.dtype)
    ffn.to(DEVICE).eval().requires_grad_(False)
    for layer, formula in (
        (lambda x: twell.ffn(x, *rest), lambda x: dense(x, *rest)),
        (ffn, lambda x: F.linear(ffn.activations(x)[1], ffn.down_proj.weight)),
    ):
        torch.compiler.reset()
        expected, compiled = tangent(formula, dx)(x), torch.compile(layer, backend="aot_eager")
        inside = torch.compile(tangent(layer, dx), backend="aot_eager")
        for transformed in (inside, tangent(compiled, dx)):
            assert fuzz.relative_rms(transformed(x), expected) < 2e-2
        assert fuzz.relative_rms(compiled(x), formula(x)) < 2e-2


def test_out_may_not_share_memory_with_x():
    given = arguments()
    rows = torch.cat([given["x"], given["x"][:8]])
    x = rows[:9]
    for path in ("union", "dense"):
        for out in (x, rows[1:10], rows[8:]):
            with pytest.raises(ValueError, match="out shares memory with x"):
                twell.ffn(**{**given, "x": x}, path=path, out=out)
    assert torch.equal(x, given["x"])
    two = torch.stack([x] * 2)  # one storage, and no byte of both
    y = twell.ffn(**{**given, "x": two[0]}, path="union", out=two[1])
    assert torch.equal(y, twell.ffn(**given, path="union"))


def test_autocast_casts_as_linear_does():
    given = arguments(values="normal")
    wide = {name: t.float() for name, t in given.items()}
    expected = twell.ffn(**given, path="union")
    with torch.autocast(given["x"].device.type, torch.bfloat16):
        for tensors in (wide, {**wide, "x": given["x"]}):
            y = twell.ffn(**tensors, path="union")
            assert torch.equal(y, expected) and y.dtype == torch.bfloat16
        assert twell.ffn(**{name: t.double() for name, t in given.items()}).dtype == torch.float64


def test_no_neurons_are_no_sum():
    given = arguments()
    none = {name: t[:0] for name, t in given.items() if name not in ("x", "b_down")}
    assert torch.equal(twell.ffn(**given | none), given["b_down"].expand(9, 16))


def test_warming_up_needs_no_gradients():
    given = arguments()
    given["w_up"].requires_grad_()
    given.pop("x")
    twell.warm_up([1, 9], *given.values(), activation="relu2")
    twell.warm_up([2], **given)
