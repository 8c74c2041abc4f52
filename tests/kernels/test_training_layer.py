"""SparseFFN that trains sparsely, beside a dense layer of the same weights."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.factories.kernels import DEVICE
from tests.factories.sparse import watched
from twell.sparse import training_ops
from twell.sparse.layer import SparseFFN
from twell.sparse.training import SparseTraining

PATHS = sorted(training_ops.TRAIN_PATHS)
TOKENS = 8


def layers(gated=True, bias=False, dtype=torch.float32):
    """A dense layer, one of the same weights that trains sparsely, and x."""
    pair = []
    for name in ("dense", "triton"):
        ffn = SparseFFN(48, 40, gated=gated, bias=bias, backend=name, device=DEVICE, dtype=dtype)
        pair.append(ffn)
    with torch.no_grad():
        for parameter in pair[0].parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        first = pair[0].gate_proj if gated else pair[0].up_proj
        first.weight[:, 0] = -1.5
    pair[1].load_state_dict(pair[0].state_dict())
    pair[1].train_path, pair[1].capacity = "union", 40
    pair[1].outbox.watch_capacity = True
    x = torch.randn(2, TOKENS, 48, device=DEVICE, dtype=dtype)
    x[..., 0] = 1
    return (*pair, x)


def loss_of(y, l1):
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).cos()
    return (y.float() * weights).sum() + 0.01 * l1.sum()


def step(ffn, x, autocast=True, layer=None, **wants):
    """y, its L1 term and all gradients; `layer` computes in place of `ffn`."""
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        y, l1 = watched(ffn, x, layer, **wants)
    return [y, l1, *torch.autograd.grad(loss_of(y, l1), [x, *ffn.parameters()])]


def assert_close(results, expected, rtol=2**-7, atol=1e-3):
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "path, dtype, autocast, gated",
    [
        ("union", torch.float32, True, True),
        ("union", torch.bfloat16, False, False),
        pytest.param("hybrid", torch.float32, True, False, marks=pytest.mark.slow),
    ],
)
def test_layer_has_the_gradients_of_the_dense_one(path, dtype, autocast, gated):
    dense, sparse, x = layers(gated, True, dtype)
    sparse.train_path = path
    expected, results = step(dense, x, autocast), step(sparse, x, autocast)
    assert sparse.outbox.needed is not None  # else the layer was computed densely
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # Each is within 5e-3 of the exact one; biases' sums cancel.
        assert (a - b).float().norm() <= 1.2e-2 * b.float().norm()
    assert all(gradient.dtype == dtype for gradient in results[2:])
    assert (results[1] - expected[1]).abs().max() <= 2e-2 * expected[1].abs().max()


def test_statistics_are_exact_with_padding():
    dense, sparse, x = layers()
    mask = torch.arange(2 * TOKENS, device=DEVICE).view(2, TOKENS) % 5 < 3
    for ffn in (dense, sparse):
        step(ffn, x, counts=True, token_mask=mask)
        step(ffn, x, counts=True, token_mask=mask)
    for a, b in zip(sparse.stats.take(), dense.stats.take(), strict=True):
        assert torch.equal(a, b)
    # Near zero autocast may round otherwise.
    active = dense.activations(x.bfloat16().float())[0] != 0
    assert abs(int(sparse.outbox.needed) - float(active.float().sum(-1).mean())) <= 1.1


@pytest.mark.parametrize("reason", ["not managed", "fp32", "too many entries"])
def test_else_gradients_are_dense(reason, monkeypatch):
    """Without SparseTraining, and where the kernels cannot be used."""
    dense, sparse, x = layers()
    if reason == "not managed":
        sparse.train_path = None
    if reason == "too many entries":
        sparse.capacity = 2**31 // (2 * TOKENS) + 1
    monkeypatch.setattr(training_ops, "sparse_train", None)
    pair = (step(ffn, x, autocast=reason != "fp32") for ffn in (sparse, dense))
    # w_down's strides differ, and so may the order of its sums.
    assert_close(*pair, rtol=2e-2)


@pytest.mark.slow
def test_activation_checkpointing_and_weights_that_lost_their_strides():
    _, sparse, x = layers()
    expected = step(sparse, x)
    results = step(sparse, x, layer=partial(checkpoint, sparse, use_reentrant=False))
    sparse.down_proj.weight.data = sparse.down_proj.weight.data.contiguous()
    for a, b, c in zip(results, step(sparse, x), expected, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


@torch._dynamo.config.patch(
    allow_unspec_int_on_nn_module=False, recompile_limit=8, accumulated_recompile_limit=256
)
@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_compiled_code_serves_every_capacity(path):
    _, sparse, x = layers()
    SparseTraining(sparse).allow_recompiling()
    sparse.train_path = path
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparse, fullgraph=True, backend=counter)
    expected = step(sparse, x)
    for capacity in (40, 37, 31):
        sparse.capacity = capacity
        assert_close(step(sparse, x, layer=compiled), expected)
    assert counter.frame_count == 2  # for the first, and for all others
