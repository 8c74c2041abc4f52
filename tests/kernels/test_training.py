"""The training operators of both paths, and the kernels by unions; without a GPU, interpreted.

tests/fuzz.py compares y, the L1 term and every gradient with fp64. Here are cases that a random one
seldom meets. test_hybrid.py has the paper's path alone, test_training_layer.py the
layer around the operators.
"""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    SEED,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import entries, options, training, training_ops, weight_gradients
from twell.sparse import reference

PATHS = sorted(training_ops.TRAIN_PATHS)
NAMES = "x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"


@pytest.fixture
def in_backup(monkeypatch):
    """For each backward pass by unions, the neurons that need a row of the backup."""
    numbers, backward = [], training.backward

    def counting(*arguments):
        numbers.append(int(arguments[6].totals[1]))
        return backward(*arguments)

    monkeypatch.setattr(training, "backward", counting)
    return numbers


def case_of(path, **changes):
    # The interpreter needs milliseconds for a token, a neuron, or an entry of a list.
    case = fuzz.Case(path, 70, 140, 48, values="integer", pattern="heavy", biases=True, seed=SEED)
    return replace(case, **changes)


def leaves_of(case):
    tensors = fuzz.layer(case, DEVICE)
    return {name: None if t is None else t.requires_grad_() for name, t in tensors.items()}


def gradients_of(trained, leaves, dy, dl1):
    given = [t for t in leaves.values() if t is not None]
    return torch.autograd.grad([trained.y, trained.l1], given, [dy, dl1])


def results_of(path, capacity, leaves, dy):
    """y, l1 and all gradients, with ones for the gradient of l1."""
    trained = training_ops.train(path, capacity, **leaves)
    gradients = gradients_of(trained, leaves, dy, torch.ones_like(trained.l1))
    return trained.y, trained.l1, *gradients


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
@pytest.mark.parametrize("path", PATHS)
def test_random_case(path, seed, monkeypatch):
    case = fuzz.draw(seed, large=False)
    if DEVICE == "cpu":
        most = 70 if case.pattern == "full" else 257
        case = replace(case, intermediate_size=min(case.intermediate_size, most))
    monkeypatch.setattr(training, "DENSE_FROM", random.Random(seed).choice([1, 16, 64]))
    fuzz.check_training(case, DEVICE, path)


@pytest.mark.parametrize(
    "path, pattern", [*(("union", pattern) for pattern in fuzz.PATTERNS), ("hybrid", "tile")]
)
def test_every_pattern_is_exact(path, pattern):
    num_neurons = {"full": 40, "tile": 300}.get(pattern, 140)
    case = case_of(path, pattern=pattern, intermediate_size=num_neurons)
    assert fuzz.check_training(case, DEVICE, path) == 0


NUMBERS = (1, True), (1, False), (31, False), (33, True), (65, False), (130, True), (130, False)


@pytest.mark.parametrize(
    "path, num_tokens, gated",
    [*(("union", *number) for number in NUMBERS), *(("hybrid", *n) for n in NUMBERS[::3])],
)
def test_every_number_of_tokens(path, num_tokens, gated):
    changes = dict(intermediate_size=70, gated=gated, dtype=torch.float16)
    case = case_of(path, num_tokens=num_tokens, **changes)
    assert fuzz.check_training(case, DEVICE, path) == 0


@pytest.mark.parametrize("gated", [True, False])
def test_integers_equal_the_reference(gated, monkeypatch):
    """Every result of a step by unions, with some neurons in lists and some in the backup."""
    monkeypatch.setattr(training, "DENSE_FROM", 16)
    leaves = leaves_of(case_of("union", pattern="skewed", gated=gated))
    dy = torch.randint(-2, 3, (70, 48), device=DEVICE).to(leaves["x"].dtype)
    dl1 = torch.randint(-3, 4, (70,), device=DEVICE).float()
    trained = training_ops.train("union", 140, **leaves)
    gradients = gradients_of(trained, leaves, dy, dl1)
    with torch.no_grad():
        *expected, saved = reference.union_train_forward(*leaves.values())
        expected_gradients = reference.union_train_backward(saved, dy, dl1)
    for result, other in zip(trained[:4], expected, strict=True):
        assert torch.equal(result, other)
    given = [g for g in expected_gradients if g is not None]
    for result, other in zip(gradients, given, strict=True):
        assert torch.equal(result, other)


@pytest.mark.parametrize("architecture", ["default", "sm_80", "sm_89", "sm_90"])
def test_every_configuration(architecture, monkeypatch, in_backup):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(options, "architecture", lambda device: architecture)
    monkeypatch.setattr(training, "DENSE_FROM", 16)
    case = case_of("union", hidden_size=80, pattern="skewed")
    assert fuzz.check_training(case, DEVICE, "union") == 0
    assert 0 < in_backup[0] < 140


# Lists and backup


class Launches:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.number = kernel, 0

    def __getitem__(self, grid):
        self.number += 1
        return self.kernel[grid]


@pytest.fixture
def rounds(monkeypatch):
    kernel = Launches(weight_gradients.backup_gradients_kernel)
    monkeypatch.setattr(weight_gradients, "backup_gradients_kernel", kernel)
    return kernel


@pytest.mark.parametrize("pattern", ["skewed", "full"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dense_from", [1, 16, 10**6])
def test_lists_and_backup_give_the_same(dense_from, gated, pattern, monkeypatch, in_backup):
    """All neurons in lists, some in the backup, or all."""
    monkeypatch.setattr(training, "DENSE_FROM", dense_from)
    num_tokens, num_neurons = (70, 70) if pattern == "skewed" else (17, 40)
    sizes = dict(num_tokens=num_tokens, intermediate_size=num_neurons)
    case = case_of("union", **sizes, pattern=pattern, gated=gated)
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
    sizes = dict(num_tokens=33, intermediate_size=200, hidden_size=16)
    case = case_of("union", **sizes, pattern="full", gated=gated)
    assert fuzz.check_training(case, DEVICE, "union") == 0
    assert set(in_backup) == {200} and rounds.number == 2 * len(in_backup)


@pytest.mark.parametrize("capacity", [9, 300])
def test_every_frequent_neuron_is_in_the_backup(capacity):
    """Each of 300 neurons is active for two of 70 tokens, more than one in 64."""
    tokens = torch.arange(300) % 70
    x = torch.eye(70, 80)
    w = torch.full((300, 80), -1.0)
    w[torch.arange(300), tokens] = w[torch.arange(300), (tokens + 1) % 70] = 1
    x, w = x.to(DEVICE, torch.float16), w.to(DEVICE, torch.float16)
    arguments = x, w, w, w, None, None, None, None
    y, l1, _, counts, needed, *saved = training.forward(*arguments, capacity)
    assert needed == 9 and (counts == 2).all()
    saved = entries.UnionSaved(*saved)
    neurons = torch.arange(300, device=DEVICE).int()
    assert saved.spans[2].all() and saved.backup[:300].sort().values.equal(neurons)


def test_slabs_of_columns_give_the_same(monkeypatch):
    monkeypatch.setattr(training, "DENSE_FROM", 1)
    monkeypatch.setattr(weight_gradients, "CACHE_BYTES", 1)
    # Two slabs of 128 and one of 16.
    case = case_of("union", intermediate_size=70, hidden_size=272, pattern="skewed")
    assert fuzz.check_training(case, DEVICE, "union") == 0


# Capacity


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_results_do_not_depend_on_the_capacity(path, gated, monkeypatch):
    """The least capacity, and larger ones. Every frequent neuron gets a row of the backup."""
    monkeypatch.setattr(training, "DENSE_FROM", 10**6)
    case = case_of(path, num_tokens=70, pattern="skewed", values="normal", gated=gated)
    leaves = leaves_of(case)
    # A third of the neurons are active for every token, more than a list of hybrid holds.
    with torch.no_grad():
        leaves["w_gate" if gated else "w_up"][::3, 0] = 40
    dy = torch.randn(70, 48, device=DEVICE).to(case.dtype)
    needed = int(training_ops.train(path, 140, **leaves).needed)
    assert 1 < needed < 130
    expected = results_of(path, needed, leaves, dy)
    for capacity in (needed + 3, 140):
        for a, b in zip(results_of(path, capacity, leaves, dy), expected, strict=True):
            assert torch.equal(a, b)


def test_an_overflow_is_reported_and_counts_stay_right():
    path = "union"  # test_hybrid.py has the other
    leaves = leaves_of(case_of(path, pattern="skewed", values="normal"))
    enough = training_ops.train(path, 140, **leaves)
    needed = int(enough.needed)
    assert needed == -(-int(enough.token_counts.sum()) // 70) and needed > 2
    for capacity in (1, needed - 1):
        trained = training_ops.train(path, capacity, **leaves)
        assert int(trained.needed) > capacity
        assert torch.equal(trained.token_counts, enough.token_counts)
        assert torch.equal(trained.neuron_counts, enough.neuron_counts)
        # Wrong gradients, but nothing breaks.
        gradients_of(trained, leaves, torch.ones_like(trained.y), torch.ones_like(trained.l1))
    exactly = training_ops.train(path, needed, **leaves)
    assert int(exactly.needed) == needed
    assert torch.equal(exactly.y, enough.y) and torch.equal(exactly.l1, enough.l1)


# The operators


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "names",
    [("x",), ("w_gate",), ("w_up",), ("w_down",), ("b_gate", "b_up"), ("x", "w_down")],
    ids=str,
)
@pytest.mark.parametrize("gated", [True, False])
def test_only_the_gradients_that_are_needed(path, names, gated, monkeypatch):
    """They equal those of a step with all gradients; the operator returns nothing for others."""
    monkeypatch.setattr(training, "DENSE_FROM", 8)  # some in lists, some in the backup
    sizes = dict(num_tokens=33, intermediate_size=40, hidden_size=16)
    case = case_of(path, **sizes, pattern="skewed", gated=gated)
    leaves = leaves_of(case)
    names = [name for name in names if leaves[name] is not None]
    if not names:
        pytest.skip("a non-gated layer has no gate")
    dy = torch.randn(33, 16, device=DEVICE).to(case.dtype)
    trained = training_ops.train(path, 40, **leaves)
    given = [name for name in NAMES if leaves[name] is not None]
    expected = dict(zip(given, gradients_of(trained, leaves, dy, trained.l1), strict=True))

    some = {name: t if t is None or name in names else t.detach() for name, t in leaves.items()}
    trained = training_ops.train(path, 40, **some)
    needs = [name in names for name in NAMES[:6]]
    backward = getattr(torch.ops.twell, f"train_{path}_backward")
    returned = backward(*trained.y.grad_fn.saved_tensors, dy, trained.l1.detach(), needs)
    assert [t.numel() > 0 for t in returned] == needs
    leaves = {name: some[name] for name in names}
    for name, gradient in zip(names, gradients_of(trained, leaves, dy, trained.l1), strict=True):
        assert torch.equal(gradient, expected[name]), name


def test_two_calls_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(training, "DENSE_FROM", 16)  # some in lists, some in the backup
    size = 70 if DEVICE == "cpu" else 1000  # there programs run at the same time
    sizes = dict(num_tokens=size, intermediate_size=2 * size)
    case = case_of("union", **sizes, pattern="skewed", values="normal")
    leaves = leaves_of(case)
    dy = torch.randn(size, 48, device=DEVICE).to(case.dtype)
    first, second = (results_of("union", 2 * size, leaves, dy) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_operators_keep_the_rules_of_pytorch(path, gated):
    sizes = dict(num_tokens=5, intermediate_size=20)
    case = case_of(path, **sizes, gated=gated, values="normal", pattern="skewed")
    arguments = [*leaves_of(case).values(), torch.ones(5, device=DEVICE), 20]
    # On a GPU two calls may store entries in another order, which no result depends on; there
    # tests/gpu compares the code compiled by Inductor instead.
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
    # 31 are added to the place of an entry that does not fit, and the sum has to fit 32 bits.
    most = 2**31 - 31
    with pytest.raises(ValueError, match=f"capacity={most} for 1 tokens"):
        training_ops.train("union", most, **{**leaves, "x": leaves["x"][:1]})
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\), expected 70"):
        training_ops.train("union", 8, **leaves, token_mask=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="x has no token"):
        training_ops.train("union", 8, **{**leaves, "x": leaves["x"][:0]})
