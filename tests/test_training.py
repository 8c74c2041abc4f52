"""Gradients of the layer on the paths of training, in Triton's interpreter where there is no GPU.

tests/fuzz.py compares y, the L1 term and every gradient with fp64; here are the cases that a random one seldom meets, and
the layer around the operators.
"""

import os
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from twell.ffn import SparseFFN
from twell.kernels import common, ops, training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(10**6)
PATHS = sorted(ops.TRAIN_PATHS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not common.INTERPRETED,
        reason="the kernels were imported without TRITON_INTERPRET=1",
    ),
]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def case_of(path, **changes):
    case = fuzz.Case(path, 70, 300, 48, values="integer", pattern="heavy", biases=True, seed=SEED)
    return replace(case, **changes)


def leaves_of(case):
    tensors = fuzz.layer(case, DEVICE)
    return {name: None if t is None else t.requires_grad_() for name, t in tensors.items()}


def gradients_of(found, leaves, dy, dl1):
    return torch.autograd.grad([found.y, found.l1], [t for t in leaves.values() if t is not None], [dy, dl1])


@pytest.mark.parametrize("seed", range(SEED, SEED + 12))
@pytest.mark.parametrize("path", PATHS)
def test_random_case(path, seed):
    fuzz.check_training(fuzz.draw(seed, large=False), DEVICE, path)


@pytest.mark.parametrize("pattern", fuzz.PATTERNS)
@pytest.mark.parametrize("path", PATHS)
def test_every_pattern_is_exact(path, pattern):
    assert fuzz.check_training(case_of(path, pattern=pattern), DEVICE, path) == 0


@pytest.mark.parametrize("num_tokens", [1, 31, 33, 65, 130])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_every_number_of_tokens(path, gated, num_tokens):
    case = case_of(path, num_tokens=num_tokens, intermediate_size=70, gated=gated, dtype=torch.float16)
    assert fuzz.check_training(case, DEVICE, path) == 0


@pytest.mark.parametrize("architecture", ["default", "sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("path", PATHS)
def test_every_configuration(path, architecture, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(common, "architecture", lambda device: architecture)
    assert fuzz.check_training(case_of(path, num_tokens=130, hidden_size=80), DEVICE, path) == 0


@pytest.mark.parametrize("dense_from, backup", [(1, 4), (64, 4), (10**6, 4), (64, 10**6), (10**6, 1)])
def test_lists_and_backup_give_the_same(dense_from, backup, monkeypatch):
    """All neurons in lists; some in the backup; more than it has rows for."""
    monkeypatch.setattr(training, "DENSE_FROM", dense_from)
    monkeypatch.setattr(training, "BACKUP", backup)
    for pattern in ("heavy", "full"):
        assert fuzz.check_training(case_of("union", pattern=pattern), DEVICE, "union", capacity=300) == 0


def test_slabs_of_columns_give_the_same(monkeypatch):
    case = case_of("union", hidden_size=272, pattern="skewed")  # two slabs of 128 and one of 16
    assert fuzz.check_training(case, DEVICE, "union") == 0
    monkeypatch.setattr(training, "CACHE_BYTES", 1)
    assert fuzz.check_training(case, DEVICE, "union") == 0


def test_too_little_room_is_told_and_counts_stay_right():
    path = "union"  # tests/test_hybrid.py has the other
    case = case_of(path, num_tokens=130, pattern="skewed", values="normal")
    leaves = leaves_of(case)
    enough = ops.train(path, 300, **leaves)
    needed = int(enough.needed)
    assert needed == -(-int(enough.token_counts.sum()) // 130) and needed > 2
    for capacity in (1, needed - 1):
        found = ops.train(path, capacity, **leaves)
        assert int(found.needed) > capacity
        assert torch.equal(found.token_counts, enough.token_counts)
        assert torch.equal(found.neuron_counts, enough.neuron_counts)
        gradients_of(found, leaves, torch.ones_like(found.y), torch.ones_like(found.l1))  # wrong, but nothing breaks
    exactly = ops.train(path, needed, **leaves)
    assert int(exactly.needed) == needed
    assert torch.equal(exactly.y, enough.y) and torch.equal(exactly.l1, enough.l1)


@pytest.mark.parametrize("path", PATHS)
def test_two_calls_give_the_same_bits(path):
    case = case_of(path, num_tokens=130, pattern="skewed", values="normal")
    leaves = leaves_of(case)
    dy = torch.randn(130, 48, device=DEVICE).to(case.dtype)
    results = []
    for _ in range(2):
        found = ops.train(path, 300, **leaves)
        results.append([found.y, found.l1, *gradients_of(found, leaves, dy, torch.ones_like(found.l1))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_operators_keep_the_rules_of_pytorch(path, gated):
    case = case_of(path, num_tokens=33, intermediate_size=40, gated=gated, values="normal", pattern="skewed")
    arguments = [*leaves_of(case).values(), torch.ones(33, device=DEVICE), 40]
    torch.library.opcheck(ops.TRAIN_PATHS[path], tuple(arguments))


def test_bad_input_is_named():
    leaves = leaves_of(case_of("union"))
    with pytest.raises(ValueError, match="path 'ell' is unknown; use one of .*union"):
        ops.train("ell", 8, **leaves)
    with pytest.raises(ValueError, match="capacity=0"):
        ops.train("union", 0, **leaves)
    with pytest.raises(ValueError, match="capacity=40000000 for 70 tokens"):
        ops.train("union", 40_000_000, **leaves)
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\), expected 70"):
        ops.train("union", 8, **leaves, token_mask=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="x has no token"):
        ops.train("union", 8, **{**leaves, "x": leaves["x"][:0]})


# The layer


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
    pair[1].train_path, pair[1].capacity, pair[1].watched = "union", 100, True
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


def assert_alike(ours, dense, limit=1.2e-2):
    for a, b in zip(ours, dense, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # Each is within 5e-3 of the exact one; biases' sums cancel.
        assert (a - b).float().norm() <= limit * b.float().norm()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype, autocast", [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("path", PATHS)
def test_layer_has_the_gradients_of_the_dense_one(path, dtype, autocast, gated):
    dense, sparse, x = layers(gated, True, dtype)
    sparse.train_path = path
    y, expected = step(dense, x, autocast)
    ours, found = step(sparse, x, autocast)
    assert sparse.needed is not None, "the layer was computed densely"
    assert_alike([ours, *found], [y, *expected])
    assert found[0].dtype == dtype and all(g.dtype == dtype for g in found)
    assert (sparse.l1 - dense.l1).abs().max() <= 2e-2 * dense.l1.abs().max()


def test_statistics_are_exact_with_padding():
    dense, sparse, x = layers()
    mask = torch.rand(2, 40, device=DEVICE) < 0.6
    for ffn in (dense, sparse):
        ffn.record, ffn.token_mask = True, mask
        step(ffn, x)
        step(ffn, x)
    for ours, theirs in zip(sparse.stats.take(), dense.stats.take(), strict=True):
        assert torch.equal(ours, theirs)
    active = dense.activations(x.bfloat16().float())[0] != 0  # near zero autocast may round otherwise
    assert abs(int(sparse.needed) - float(active.float().sum(-1).mean())) <= 1.1


@pytest.mark.parametrize("why", ["not managed", "fp32", "too many entries"])
def test_else_gradients_are_dense(why, monkeypatch):
    """Without SparseTraining, and where the kernels cannot be used."""
    dense, sparse, x = layers()
    if why == "not managed":
        sparse.train_path = None
    if why == "too many entries":
        sparse.capacity = 2**31 // 80 + 1
    monkeypatch.setattr(ops, "train", None)
    y, expected = step(dense, x, autocast=why != "fp32")
    ours, found = step(sparse, x, autocast=why != "fp32")
    for a, b in zip([ours, *found], [y, *expected], strict=True):  # w_down's strides differ, and so may the sums' order
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

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
    found = step(torch.compile(sparse, fullgraph=True, backend="aot_eager"), x)
    for a, b in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


def test_steps_follow_those_of_the_dense_layer():
    """Losses of training with L1 on the same data stay as near to each other as bf16 lets them be."""
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
            losses[name].append(float(loss))
    assert losses["dense"][-1] < 0.9 * losses["dense"][0]
    assert max(abs(a / b - 1) for a, b in zip(losses["sparse"], losses["dense"], strict=True)) < 1e-2
