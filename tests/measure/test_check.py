"""Which results pass: layers and steps against fp64, hidden states against fp32."""

from functools import partial

import pytest
import torch

from tests.factories import SEED, measure
from tests.factories.sparse import relative
from twell.measure import check
from twell.measure.check import Exact
from twell.measure.imposed import synthetic_layer
from twell.measure.layer import DenseLayer, Step, TrainingCase
from twell.sparse import reference


@pytest.mark.parametrize("gated", [True, False])
def test_the_exact_layer_is_that_of_the_reference_and_autograd(gated, monkeypatch):
    monkeypatch.setattr(check, "CHUNK", 128)
    num_tokens = 230
    x, w_gate, w_up, w_down = synthetic_layer(num_tokens, 16, 40, active=7, device="cpu", seed=SEED)
    weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
    mask = x.double() @ w_gate.double().t() > 0
    g = torch.Generator().manual_seed(SEED)
    dy = torch.randn(num_tokens, 16, generator=g).bfloat16()
    dl1 = torch.rand(num_tokens, generator=g)
    unions = [int(mask[start : start + 64].any(0).sum()) for start in range(0, num_tokens, 64)]
    exact = Exact.of(x, weights, dy, dl1)
    for one in (exact, Exact.of(x, weights)):
        assert one.counts.tolist() == mask.sum(1).tolist() and one.entries == mask.sum()
        assert one.unions.tolist() == unions
    assert list(one.tensors) == ["y"] and torch.equal(one.y, exact.y)
    names = [n for n in ("x", "w_gate", "w_up", "w_down") if gated or n != "w_gate"]
    leaves = [t.double().requires_grad_() for t in (x, *weights) if t is not None]
    arguments = leaves if gated else [leaves[0], None, *leaves[1:]]
    y = reference.ffn(*arguments)
    l1 = reference.activations(*arguments[:3])[1].abs().sum(1)
    gradients = torch.autograd.grad((y * dy).sum() + (l1 * dl1).sum(), leaves)
    expected = {f"d{n}": gradient for n, gradient in zip(names, gradients, strict=True)}
    expected |= {"y": y.detach(), "l1": l1.detach()}
    assert set(exact.tensors) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(exact.tensors[name], tensor, msg=name)


@pytest.mark.parametrize("active, gated", [(1, True), (100, True), (100, False)])
def test_errors_of_sums_in_fp8_are_allowed_and_no_more(active, gated):
    layer = partial(synthetic_layer, active=active, device="cpu", seed=SEED)
    x, w_gate, w_up, w_down = (t.double() for t in layer(64, 128, 512))
    weights = (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)
    exact, without = Exact.of(x, weights, fp8=True), Exact.of(x, weights)
    few = exact.entries < check.FEW_ENTRIES
    assert few == (active == 1)
    g = torch.Generator().manual_seed(SEED)
    size = check.FP8_SUM_OF_FEW if few else check.FP8_SUM
    noise = [torch.randn(64, 512, generator=g) * (x.abs() @ w.abs().t()) for w in (w_gate, w_up)]

    def y(times):
        gate = (x @ w_gate.t() + times * size * noise[0]).relu()
        u = x @ w_up.t() + times * size * noise[1] if gated else 1.0
        return (gate * u) @ w_down.t()

    # What is allowed is what such errors change.
    assert 0.8 < float((y(1.0) - exact.y).norm()) / exact.either["y"] < 1.25
    assert exact.check(y(0.5), "sums") > without.check(y(0.0), "sums")
    with pytest.raises(ArithmeticError, match="twenty is wrong"):
        exact.check(y(20.0), "twenty")


def test_a_gate_at_the_edge_may_be_active_or_not():
    """Its sum in fp32 comes out on either side of zero; the whole gradient is allowed for."""
    x = torch.tensor([[1.0, 1.0]]).repeat(1, 8).bfloat16()
    w_gate = torch.stack([torch.tensor([1.0, -1.0]).repeat(8), torch.ones(16)]).bfloat16()
    w_up, w_down = torch.ones(2, 16).bfloat16(), torch.ones(16, 2).bfloat16()
    exact = Exact.of(x, (w_gate, w_up, w_down), torch.ones_like(x), torch.ones(1))
    dh, u = 16 + 1.0, 16.0
    assert exact.either["dw_gate"] == pytest.approx(dh * u * 4)  # the norm of x is 4
    assert exact.either["dx"] == pytest.approx(dh * u * 4)
    flipped = exact.tensors | {"dx": exact.tensors["dx"] + dh * u * w_gate[:1].double()}
    assert exact.check_step(flipped, "case")[0] == "dx"
    with pytest.raises(ArithmeticError, match="dx of case is wrong"):
        exact.check_step(exact.tensors | {"dx": flipped["dx"] * 1.3}, "case")


@pytest.mark.parametrize("gated", [True, False])
def test_a_wrong_tensor_is_named_and_rounding_is_not_wrong(gated):
    # Of 150 tokens, rounding is more than 5e-3 in one of some hundred draws.
    case = measure.case(1000, gated, kind=TrainingCase)
    exact, dense = case.exact, DenseLayer(case.sets[0])
    tensors = Step(dense, dense.with_l1, case)()
    worst, error = exact.check_step(tensors, "dense")
    errors = {name: relative(tensors[name], t) for name, t in exact.tensors.items()}
    assert error > 1e-3 and worst == max(errors, key=errors.get)
    assert error == pytest.approx(errors[worst], rel=1e-12)
    for name in exact.tensors:
        for wrong in (1.05 * tensors[name], tensors[name] * float("nan")):
            with pytest.raises(ArithmeticError, match=f"^{name} of union is wrong"):
                exact.check_step(tensors | {name: wrong}, "union")
    case.gradients = case.gradients[0], torch.zeros(1000)
    with pytest.raises(ArithmeticError, match="^d.* is wrong"):
        exact.check_step(Step(dense, dense.with_l1, case)(), "dense")
