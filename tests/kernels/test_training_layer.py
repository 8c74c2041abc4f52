"""SparseFFN that trains sparsely, beside a dense layer of the same weights."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    SEED,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import training_ops
from twell.sparse.layer import SparseFFN
from twell.sparse.training import SparseTraining

PATHS = sorted(training_ops.TRAIN_PATHS)


def layers(gated=True, bias=False, dtype=torch.float32, backend="triton", seed=SEED):
    """A dense layer and one of the same weights that trains sparsely."""
    torch.manual_seed(seed)
    pair = []
    for name in ("dense", backend):
        ffn = SparseFFN(48, 100, gated=gated, bias=bias, backend=name, device=DEVICE, dtype=dtype)
        pair.append(ffn)
    with torch.no_grad():
        for parameter in pair[0].parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        first = pair[0].gate_proj if gated else pair[0].up_proj
        first.weight[:, 0] = -1.5
    pair[1].load_state_dict(pair[0].state_dict())
    pair[1].train_path, pair[1].capacity = "union", 100
    pair[1].observer.watch_capacity = True
    x = torch.randn(2, 40, 48, device=DEVICE, dtype=dtype)
    x[..., 0] = 1
    return (*pair, x)


def step(ffn, x, autocast=True, coefficient=0.01):
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        y = ffn(x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).cos()
    loss = (y.float() * weights).sum() + coefficient * ffn.l1.sum()
    return y, [*torch.autograd.grad(loss, [x, *ffn.parameters()])]


def assert_alike(sparse, dense, limit=1.2e-2):
    for a, b in zip(sparse, dense, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # Each is within 5e-3 of the exact one; biases' sums cancel.
        assert (a - b).float().norm() <= limit * b.float().norm()


@pytest.mark.parametrize(
    "path, dtype, autocast, gated",
    [
        ("union", torch.float32, True, True),
        ("union", torch.bfloat16, True, False),
        ("union", torch.bfloat16, False, True),
        ("hybrid", torch.float32, True, False),
        ("hybrid", torch.bfloat16, True, True),
        ("hybrid", torch.bfloat16, False, False),
    ],
)
def test_layer_has_the_gradients_of_the_dense_one(path, dtype, autocast, gated):
    dense, sparse, x = layers(gated, True, dtype)
    sparse.train_path = path
    y, expected = step(dense, x, autocast)
    sparse_y, gradients = step(sparse, x, autocast)
    assert sparse.observer.needed is not None, "the layer was computed densely"
    assert_alike([sparse_y, *gradients], [y, *expected])
    assert all(gradient.dtype == dtype for gradient in gradients)
    assert (sparse.l1 - dense.l1).abs().max() <= 2e-2 * dense.l1.abs().max()


def test_statistics_are_exact_with_padding():
    dense, sparse, x = layers()
    mask = torch.rand(2, 40, device=DEVICE) < 0.6
    for ffn in (dense, sparse):
        ffn.record, ffn.token_mask = True, mask
        step(ffn, x)
        step(ffn, x)
    for a, b in zip(sparse.stats.take(), dense.stats.take(), strict=True):
        assert torch.equal(a, b)
    # Near zero autocast may round otherwise.
    active = dense.activations(x.bfloat16().float())[0] != 0
    assert abs(int(sparse.observer.needed) - float(active.float().sum(-1).mean())) <= 1.1


@pytest.mark.parametrize("reason", ["not managed", "fp32", "too many entries"])
def test_else_gradients_are_dense(reason, monkeypatch):
    """Without SparseTraining, and where the kernels cannot be used."""
    dense, sparse, x = layers()
    if reason == "not managed":
        sparse.train_path = None
    if reason == "too many entries":
        sparse.capacity = 2**31 // 80 + 1
    monkeypatch.setattr(training_ops, "train", None)
    y, expected = step(dense, x, autocast=reason != "fp32")
    sparse_y, gradients = step(sparse, x, autocast=reason != "fp32")
    # w_down's strides differ, and so may the order of its sums.
    for a, b in zip([sparse_y, *gradients], [y, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def test_activation_checkpointing():
    _, sparse, x = layers()
    expected = step(sparse, x)[1]
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y, l1 = checkpoint(lambda x: (sparse(x), sparse.l1), x, use_reentrant=False)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).cos()
    loss = (y.float() * weights).sum() + 0.01 * l1.sum()
    for a, b in zip(torch.autograd.grad(loss, [x, *sparse.parameters()]), expected, strict=True):
        assert torch.equal(a, b)


def test_weights_that_lost_their_strides():
    _, sparse, x = layers()
    expected = step(sparse, x)[1]
    sparse.down_proj.weight.data = sparse.down_proj.weight.data.contiguous()
    for a, b in zip(step(sparse, x)[1], expected, strict=True):
        assert torch.equal(a, b)


def test_a_row_with_nan_leaves_the_other_rows_alone():
    _, sparse, x = layers(dtype=torch.bfloat16)
    y, (dx, *_) = step(sparse, x, False)
    x[1, 7, 3] = float("nan")
    y_nan, (dx_nan, *_) = step(sparse, x, False)
    others = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    others[1, 7] = False
    assert y_nan[1, 7].isnan().all() and dx_nan[1, 7].isnan().all()
    torch.testing.assert_close(y_nan[others], y[others], rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(dx_nan[others], dx[others], rtol=2**-6, atol=1e-2)


def test_compiled_layer():
    _, sparse, x = layers()
    expected = step(sparse, x)
    results = step(torch.compile(sparse, fullgraph=True, backend="aot_eager"), x)
    for a, b in zip([results[0], *results[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


@torch._dynamo.config.patch(
    allow_unspec_int_on_nn_module=False, recompile_limit=8, accumulated_recompile_limit=256
)
@pytest.mark.parametrize("path", PATHS)
def test_compiled_code_serves_every_capacity(path):
    _, sparse, x = layers()
    SparseTraining(sparse).allow_recompiling()
    sparse.train_path = path
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparse, fullgraph=True, backend=counter)
    for capacity in (100, 97, 80, 91, 100):
        sparse.capacity = capacity
        expected, results = step(sparse, x), step(compiled, x)
        for a, b in zip([results[0], *results[1]], [expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)
    assert counter.frame_count == 2  # for the first, and for all others


def test_steps_follow_those_of_the_dense_layer():
    """On the same data, with L1, losses differ by rounding to bf16 alone."""
    dense, sparse, x = layers(bias=True)
    losses = {}
    for name, ffn in (("dense", dense), ("sparse", sparse)):
        torch.manual_seed(SEED)
        optimizer = torch.optim.AdamW(ffn.parameters(), lr=1e-2)
        target = torch.randn_like(x)
        losses[name] = []
        for _ in range(6):
            with torch.autocast(DEVICE, torch.bfloat16):
                y = ffn(x)
            loss = (y - target).square().mean() + 1e-3 * ffn.l1.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["dense"][-1] < 0.9 * losses["dense"][0]
    pairs = zip(losses["sparse"], losses["dense"], strict=True)
    assert max(abs(a / b - 1) for a, b in pairs) < 1e-2
