"""Gradients of the layer by unions, and both paths of training behind the operators; in Triton's interpreter without a GPU.

tests/fuzz.py compares y, the L1 term and every gradient with fp64; here are the cases that a random one seldom meets, and
the layer around the operators. tests/test_hybrid.py has the paper's path alone.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton")

from tests import fuzz
from tests.test_kernels import DEVICE, SEED, pytestmark, unwritten_memory_is_nan  # noqa: F401
from twell.kernels import common, ops, training, training_ops
from twell.sparse.layer import SparseFFN
from twell.sparse.training import SparseTraining

PATHS = sorted(training_ops.TRAIN_PATHS)


@pytest.fixture
def in_backup(monkeypatch):
    """For each backward pass by unions the neurons that asked for a row of the backup; the others are in lists."""
    found, backward = [], training.backward

    def noting(*arguments):
        found.append(int(arguments[6].totals[1]))
        return backward(*arguments)

    monkeypatch.setattr(training, "backward", noting)
    return found


def case_of(path, **changes):
    # The interpreter needs milliseconds for a token, a neuron, or an entry of a list.
    case = fuzz.Case(path, 70, 140, 48, values="integer", pattern="heavy", biases=True, seed=SEED)
    return replace(case, **changes)


def leaves_of(case):
    tensors = fuzz.layer(case, DEVICE)
    return {name: None if t is None else t.requires_grad_() for name, t in tensors.items()}


def gradients_of(found, leaves, dy, dl1):
    return torch.autograd.grad(
        [found.y, found.l1], [t for t in leaves.values() if t is not None], [dy, dl1]
    )


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
@pytest.mark.parametrize("path", PATHS)
def test_random_case(path, seed, monkeypatch):
    case = fuzz.draw(seed, large=False)
    if DEVICE == "cpu":
        case = replace(
            case,
            intermediate_size=min(case.intermediate_size, 70 if case.pattern == "full" else 257),
        )
    monkeypatch.setattr(training, "DENSE_FROM", random.Random(seed).choice([1, 16, 64]))
    fuzz.check_training(case, DEVICE, path)


@pytest.mark.parametrize(
    "path, pattern", [*(("union", pattern) for pattern in fuzz.PATTERNS), ("hybrid", "tile")]
)
def test_every_pattern_is_exact(path, pattern):
    num_neurons = {"full": 40, "tile": 300}.get(pattern, 140)
    assert (
        fuzz.check_training(
            case_of(path, pattern=pattern, intermediate_size=num_neurons), DEVICE, path
        )
        == 0
    )


NUMBERS = (1, True), (1, False), (31, False), (33, True), (65, False), (130, True), (130, False)


@pytest.mark.parametrize(
    "path, num_tokens, gated",
    [*(("union", *number) for number in NUMBERS), *(("hybrid", *n) for n in NUMBERS[::3])],
)
def test_every_number_of_tokens(path, num_tokens, gated):
    case = case_of(
        path, num_tokens=num_tokens, intermediate_size=70, gated=gated, dtype=torch.float16
    )
    assert fuzz.check_training(case, DEVICE, path) == 0


@pytest.mark.parametrize("architecture", ["default", "sm_80", "sm_89", "sm_90"])
def test_every_configuration(architecture, monkeypatch, in_backup):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(common, "architecture", lambda device: architecture)
    monkeypatch.setattr(training, "DENSE_FROM", 16)
    assert (
        fuzz.check_training(case_of("union", hidden_size=80, pattern="skewed"), DEVICE, "union")
        == 0
    )
    assert 0 < in_backup[0] < 140


class Launches:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.number = kernel, 0

    def __getitem__(self, grid):
        self.number += 1
        return self.kernel[grid]


@pytest.fixture
def rounds(monkeypatch):
    kernel = Launches(training.backup_gradient_kernel)
    monkeypatch.setattr(training, "backup_gradient_kernel", kernel)
    return kernel


@pytest.mark.parametrize("pattern", ["skewed", "full"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dense_from", [1, 16, 10**6])
def test_lists_and_backup_give_the_same(dense_from, gated, pattern, monkeypatch, in_backup):
    """All neurons in lists, some in the backup, or all."""
    monkeypatch.setattr(training, "DENSE_FROM", dense_from)
    num_tokens, num_neurons = (70, 70) if pattern == "skewed" else (17, 40)
    case = case_of(
        "union", num_tokens=num_tokens, intermediate_size=num_neurons, pattern=pattern, gated=gated
    )
    assert fuzz.check_training(case, DEVICE, "union") == 0
    if dense_from == 1:
        assert set(in_backup) == {0}
    elif pattern == "full":
        assert set(in_backup) == {num_neurons}
    else:
        assert 0 < in_backup[0] < num_neurons


@pytest.mark.parametrize("gated", [True, False])
def test_a_backup_that_needs_two_rounds(gated, monkeypatch, in_backup, rounds):
    monkeypatch.setattr(training, "DENSE_FROM", 10**6)
    case = case_of(
        "union", num_tokens=33, intermediate_size=200, hidden_size=16, pattern="full", gated=gated
    )
    assert fuzz.check_training(case, DEVICE, "union") == 0
    assert set(in_backup) == {200} and rounds.number == 2 * len(in_backup)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_results_do_not_depend_on_the_capacity(path, gated, monkeypatch):
    """Every neuron is frequent enough for a row of the backup; buffers just large enough and with room for everything."""
    monkeypatch.setattr(training, "DENSE_FROM", 10**6)
    case = case_of(path, num_tokens=70, pattern="skewed", values="normal", gated=gated)
    leaves = leaves_of(case)
    # A third of the neurons active for every token, which is more than a list of the hybrid format has room for.
    with torch.no_grad():
        leaves["w_gate" if gated else "w_up"][::3, 0] = 40
    dy = torch.randn(70, 48, device=DEVICE).to(case.dtype)
    needed = int(training_ops.train(path, 140, **leaves).needed)
    assert 1 < needed < 130
    results = []
    for capacity in (needed, needed + 3, 140):
        found = training_ops.train(path, capacity, **leaves)
        results.append(
            [found.y, found.l1, *gradients_of(found, leaves, dy, torch.ones_like(found.l1))]
        )
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("capacity", [9, 300])
def test_every_frequent_neuron_is_in_the_backup(capacity):
    """Each of 300 neurons is active for two of 70 tokens, more than one in 64; both capacities have room for them."""
    tokens = torch.arange(300) % 70
    x = torch.eye(70, 80)
    w = torch.full((300, 80), -1.0)
    w[torch.arange(300), tokens] = w[torch.arange(300), (tokens + 1) % 70] = 1
    x, w = x.to(DEVICE, torch.float16), w.to(DEVICE, torch.float16)
    y, l1, _, counts, needed, *saved = training.forward(
        x, w, w, w, None, None, None, None, capacity
    )
    assert needed == 9 and (counts == 2).all()
    saved = training.Saved(*saved)
    assert saved.spans[2].all() and saved.backup[:300].sort().values.equal(
        torch.arange(300, device=DEVICE).int()
    )


NAMES = "x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "wanted",
    [("x",), ("w_gate",), ("w_up",), ("w_down",), ("b_gate", "b_up"), ("x", "w_down")],
    ids=str,
)
@pytest.mark.parametrize("gated", [True, False])
def test_only_the_gradients_that_are_asked_for(path, wanted, gated, monkeypatch):
    """They are the ones of a step that asks for all; the operator returns nothing for the others."""
    monkeypatch.setattr(training, "DENSE_FROM", 8)  # some in lists, some in the backup
    case = case_of(
        path, num_tokens=33, intermediate_size=40, hidden_size=16, pattern="skewed", gated=gated
    )
    leaves = leaves_of(case)
    wanted = [name for name in wanted if leaves[name] is not None]
    if not wanted:
        pytest.skip("a non-gated layer has no gate")
    dy = torch.randn(33, 16, device=DEVICE).to(case.dtype)
    found = training_ops.train(path, 40, **leaves)
    expected = dict(
        zip(
            [n for n in NAMES if leaves[n] is not None],
            gradients_of(found, leaves, dy, found.l1),
            strict=True,
        )
    )
    returned, backward = [], getattr(torch.ops.twell, f"train_{path}_backward")
    given = {name: t if t is None or name in wanted else t.detach() for name, t in leaves.items()}
    found = training_ops.train(path, 40, **given)
    saved = found.y.grad_fn.saved_tensors if hasattr(found.y.grad_fn, "saved_tensors") else None
    assert saved is not None
    needs = [name in wanted for name in NAMES[:6]]
    returned = backward(*saved, dy, found.l1.detach(), needs)
    assert [t.numel() > 0 for t in returned] == needs
    gradients = torch.autograd.grad(
        [found.y, found.l1], [given[name] for name in wanted], [dy, found.l1]
    )
    for name, gradient in zip(wanted, gradients, strict=True):
        assert torch.equal(gradient, expected[name]), name


def test_slabs_of_columns_give_the_same(monkeypatch):
    monkeypatch.setattr(training, "DENSE_FROM", 1)
    monkeypatch.setattr(training, "CACHE_BYTES", 1)
    case = case_of(
        "union", intermediate_size=70, hidden_size=272, pattern="skewed"
    )  # two slabs of 128 and one of 16
    assert fuzz.check_training(case, DEVICE, "union") == 0


def test_too_little_room_is_told_and_counts_stay_right():
    path = "union"  # tests/test_hybrid.py has the other
    case = case_of(path, pattern="skewed", values="normal")
    leaves = leaves_of(case)
    enough = training_ops.train(path, 140, **leaves)
    needed = int(enough.needed)
    assert needed == -(-int(enough.token_counts.sum()) // 70) and needed > 2
    for capacity in (1, needed - 1):
        found = training_ops.train(path, capacity, **leaves)
        assert int(found.needed) > capacity
        assert torch.equal(found.token_counts, enough.token_counts)
        assert torch.equal(found.neuron_counts, enough.neuron_counts)
        gradients_of(
            found, leaves, torch.ones_like(found.y), torch.ones_like(found.l1)
        )  # wrong, but nothing breaks
    exactly = training_ops.train(path, needed, **leaves)
    assert int(exactly.needed) == needed
    assert torch.equal(exactly.y, enough.y) and torch.equal(exactly.l1, enough.l1)


def test_two_calls_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(training, "DENSE_FROM", 16)  # some in lists, some in the backup
    size = 70 if DEVICE == "cpu" else 1000  # there programs run at the same time
    case = case_of(
        "union", num_tokens=size, intermediate_size=2 * size, pattern="skewed", values="normal"
    )
    leaves = leaves_of(case)
    dy = torch.randn(size, 48, device=DEVICE).to(case.dtype)
    results = []
    for _ in range(2):
        found = training_ops.train("union", 2 * size, **leaves)
        results.append(
            [found.y, found.l1, *gradients_of(found, leaves, dy, torch.ones_like(found.l1))]
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_operators_keep_the_rules_of_pytorch(path, gated):
    case = case_of(
        path, num_tokens=5, intermediate_size=20, gated=gated, values="normal", pattern="skewed"
    )
    arguments = [*leaves_of(case).values(), torch.ones(5, device=DEVICE), 20]
    # Entries take their places as programs come, so on a GPU two calls may keep them in another order, which no result
    # depends on; there tests/gpu compares what Inductor makes of it instead.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] if DEVICE == "cpu" else []
    torch.library.opcheck(training_ops.operator(path), tuple(arguments), test_utils=checks)


def test_bad_input_is_named():
    leaves = leaves_of(case_of("union"))
    with pytest.raises(ValueError, match="path 'ell' is unknown; use one of .*union"):
        training_ops.train("ell", 8, **leaves)
    with pytest.raises(ValueError, match="capacity=0"):
        training_ops.train("union", 0, **leaves)
    with pytest.raises(ValueError, match="capacity=40000000 for 70 tokens"):
        training_ops.train("union", 40_000_000, **leaves)
    entries = (
        2**31 - 31
    )  # to the place of an entry that does not fit 31 are added, and that has to fit 32 bits
    with pytest.raises(ValueError, match=f"capacity={entries} for 1 tokens"):
        training_ops.train("union", entries, **{**leaves, "x": leaves["x"][:1]})
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\), expected 70"):
        training_ops.train("union", 8, **leaves, token_mask=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="x has no token"):
        training_ops.train("union", 8, **{**leaves, "x": leaves["x"][:0]})


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
    active = (
        dense.activations(x.bfloat16().float())[0] != 0
    )  # near zero autocast may round otherwise
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
    for a, b in zip(
        [ours, *found], [y, *expected], strict=True
    ):  # w_down's strides differ, and so may the sums' order
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


@torch._dynamo.config.patch(
    allow_unspec_int_on_nn_module=False, recompile_limit=8, accumulated_recompile_limit=256
)
@pytest.mark.parametrize("path", PATHS)
def test_compiled_code_serves_every_room(path):
    _, sparse, x = layers()
    SparseTraining(sparse).allow_recompiling()
    sparse.train_path = path
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparse, fullgraph=True, backend=counter)
    for capacity in (100, 97, 80, 91, 100):
        sparse.capacity = capacity
        expected, found = step(sparse, x), step(compiled, x)
        for a, b in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)
    assert counter.frame_count == 2  # for the first, and for all others


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
            losses[name].append(loss.item())
    assert losses["dense"][-1] < 0.9 * losses["dense"][0]
    assert (
        max(abs(a / b - 1) for a, b in zip(losses["sparse"], losses["dense"], strict=True)) < 1e-2
    )
