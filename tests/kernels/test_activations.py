"""Squared ReLU, dReLU and thresholds in the kernels; tests/sparse has their formulas."""

import copy
from dataclasses import replace

import pytest
import torch

from tests import fuzz, fuzz_training
from tests.factories import SEED
from tests.factories.kernels import DEVICE, integer_case
from tests.factories.ops import train
from tests.factories.sparse import make, relative, watched
from twell import SparseTraining
from twell.kernels import training
from twell.sparse import ops, reference
from twell.sparse.activations import get_activation
from twell.sparse.backends import operands

slow = pytest.mark.slow
# (activation, threshold, gated)
KINDS = [
    ("relu", 1.5, True),
    ("relu", 1.5, False),
    ("relu2", 0.0, True),
    ("relu2", 1.5, False),
    ("drelu", 0.0, True),
    ("drelu", 1.5, True),
]
EACH = pytest.mark.parametrize(("activation", "threshold", "gated"), KINDS)
# Each path, and each kernel of decoding: one token without tensor cores, few, and a block.
SIZES = [("rowwise", 3), ("union", 9), ("decode", 1), ("decode", 9)]


def some(of=SIZES):
    """All pairs of a kind and a case; those without a mark meet every kind and every case."""
    pairs = [(i, j) for i in range(len(KINDS)) for j in range(len(of))]
    return [
        pytest.param(*KINDS[i], *of[j], marks=() if i % len(of) == j else slow) for i, j in pairs
    ]


@pytest.mark.parametrize("activation, threshold, gated, path, num_tokens", some())
def test_inference_is_exact(activation, threshold, gated, path, num_tokens):
    changes = dict(num_tokens=num_tokens, intermediate_size=40, hidden_size=16, pattern="skewed")
    changes |= dict(activation=activation, threshold=threshold, gated=gated, biases=not gated)
    assert fuzz.check(integer_case(path, **changes), DEVICE) == 0


@pytest.mark.parametrize("activation, threshold, gated, dense_from", some(of=[(1,), (10**6,)]))
def test_training_is_exact(activation, threshold, gated, dense_from, monkeypatch):
    """With lists alone, and with the backup alone."""
    monkeypatch.setattr(training, "DENSE_FROM", dense_from)
    changes = dict(num_tokens=9, intermediate_size=20, hidden_size=16, pattern="skewed")
    changes |= dict(activation=activation, threshold=threshold, gated=gated, biases=True)
    assert fuzz_training.check_training(integer_case("union", **changes), DEVICE, "union") == 0


@slow
@EACH
@pytest.mark.parametrize("pattern", ["empty", "full"])
def test_empty_and_full_rows_train(pattern, activation, threshold, gated):
    changes = dict(num_tokens=3, intermediate_size=20, hidden_size=16, pattern=pattern)
    changes |= dict(activation=activation, threshold=threshold, gated=gated)
    assert fuzz_training.check_training(integer_case("union", **changes), DEVICE, "union") == 0


@slow
@EACH
@pytest.mark.parametrize(("path", "num_tokens"), SIZES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_special_values_are_those_of_the_reference(
    path, num_tokens, value, activation, threshold, gated
):
    case = fuzz.Case(path, num_tokens, 40, 16, gated=gated, pattern="skewed", seed=SEED)
    tensors = fuzz.layer(case, DEVICE)
    tensors["x"][num_tokens // 2, 7] = value
    act = get_activation(activation, threshold)
    y = fuzz.run(replace(case, activation=activation, threshold=threshold), tensors)
    g = reference.gate_pack(tensors["x"], *reference.Layer(**tensors).first, act=act)
    expected = reference.rowwise_ffn(g, *tensors.values(), act=act)
    assert torch.equal(y.isfinite().all(1), expected.isfinite().all(1))
    finite = expected.isfinite().all(1)
    torch.testing.assert_close(y[finite], expected[finite], rtol=2**-6, atol=1e-2)


@pytest.mark.parametrize(("path", "num_tokens"), [*SIZES, ("dense", 3)])
def test_squares_overflow_in_fp16_on_every_path(path, num_tokens):
    """From g = 256 on, as torch's do, gated too, where h could be finite."""
    ffn = make(True, False, "relu2", dtype=torch.float16, sizes=(16, 32)).to(DEVICE).eval()
    with torch.no_grad():
        for weight in (ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight.t()):
            weight.zero_()[:16] = torch.eye(16)
        ffn.up_proj.weight[3, 3] = 2.0**-10
        ffn.backend, ffn.path = "triton", path
        x = torch.zeros(num_tokens, 16, dtype=torch.float16, device=DEVICE)
        x[0, 3] = 200
        x[-1, 5] = 20
        below = ffn(x)
        x[0, 3] = 260
        above = ffn(x)
    assert below[0, 3] == 200**2 * 200 / 2**10 and below[-1, 5] == 8000
    assert above[0, 3] == torch.inf or (path == "dense" and not above[0, 3].isfinite())
    if num_tokens > 1:
        assert above[-1, 5] == 8000


@slow
@EACH
def test_a_layer_trains_as_the_dense_one(activation, threshold, gated):
    """Through SparseTraining, which retries with the capacity that the step needs."""
    ffn = make(gated, True, activation, "triton", torch.float16, (16, 40), threshold / 4)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter /= 3
    ffn = ffn.to(DEVICE)
    dense = copy.deepcopy(ffn).double()
    dense.backend = "dense"
    x = torch.randn(9, 16, dtype=torch.float16, device=DEVICE)
    sparse = SparseTraining(ffn)
    for _ in sparse.attempts():
        ffn.zero_grad()
        y, l1 = watched(ffn, x, counts=True)
        (y.sum() + l1.sum()).backward()
    exact, l1 = watched(dense, x.double(), counts=True)
    (exact.sum() + l1.sum()).backward()
    assert ffn.train_path is None or relative(y, exact) < 3e-3
    for ours, theirs in zip(ffn.parameters(), dense.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < 5e-3
    counts = ffn.stats.take()[0], dense.stats.take()[0]
    assert int((counts[0] - counts[1]).abs().sum()) <= 1  # a gate at the threshold may be rounded


def test_hybrid_takes_relu_alone():
    tensors = fuzz.layer(integer_case("union", num_tokens=3, intermediate_size=20), DEVICE)
    with pytest.raises(ValueError, match="'hybrid' takes 'relu' .*; use path 'union' for 'relu2'"):
        train("hybrid", 8, *tensors.values(), act=get_activation("relu2"))
    layer = make(True, False, "relu2", "triton", torch.float16, (16, 40))
    with pytest.raises(ValueError, match="'hybrid' takes 'relu' .*, and a layer has 'relu2'"):
        SparseTraining(layer, path="hybrid")


@pytest.mark.parametrize("path", ["union", "rowwise", "decode"])
def test_auto_counts_what_is_above_the_threshold(path):
    ffn = make(True, False, "relu", "triton", torch.float16, (16, 40), 1.5).to(DEVICE).eval()
    x = torch.randn(5, 16, dtype=torch.float16, device=DEVICE)
    counters = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        rows, weights, _ = operands(ffn, x)
        ops.sparse_ffn(rows, weights, path, activity=counters)
        active = ffn.activations(x)[0] != 0
    expected = [5, 1, int(active.sum()), int(active.any(0).sum())]
    difference = counters - torch.tensor(expected, device=DEVICE)
    assert int(difference.abs().max()) <= 2
