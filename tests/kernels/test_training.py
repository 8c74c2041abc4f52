"""The training operators by unions and by the paper's hybrid format.

tests/fuzz_training.py compares y, the L1 term, the counts and every gradient with fp64; with small
integers all sums are exact. Here are cases that a random one seldom meets.
"""

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies

from tests import fuzz, fuzz_training
from tests.factories import SEED
from tests.factories.kernels import DEVICE, run_as
from tests.factories.ops import train
from twell.kernels import training, weight_gradients
from twell.kernels.paper import hybrid, hybrid_format
from twell.sparse import training_ops
from twell.sparse.activations import get_activation

slow = pytest.mark.slow
PATHS = sorted(training_ops.TRAIN_PATHS)
# The hybrid format takes many times as long in the interpreter.
quick_union = pytest.mark.parametrize("path", [pytest.param("hybrid", marks=slow), "union"])
NAMES = "x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"


def case_of(path, *sizes, **changes):
    case = fuzz.Case(path, *sizes, values="integer", pattern="skewed", biases=True, seed=SEED)
    return replace(case, **changes)


def step_of(path, *sizes, **changes):
    return fuzz_training.Step.of(case_of(path, *sizes, **changes), path, DEVICE)


def assert_same(results, expected):
    for name in expected:
        torch.testing.assert_close(
            results[name], expected[name], rtol=0, atol=0, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("path", PATHS)
@hypothesis.given(fuzz.cases(large=DEVICE == "cuda"), strategies.sampled_from([1, 16, 64]))
def test_random_case(path, case, dense_from):
    if DEVICE == "cpu":
        tokens, neurons = min(case.num_tokens, 70), min(case.intermediate_size, 40)
        case = replace(case, num_tokens=tokens, intermediate_size=neurons)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "DENSE_FROM", dense_from)
        fuzz_training.check_training(case, DEVICE, path, beyond=True)


LISTS, MIXED, BACKUP = 1, 16, 10**6  # values of DENSE_FROM, by which the backup holds neurons
HALF, NON_GATED = {"dtype": torch.float16}, {"gated": False}


def act(activation, threshold, **changes):
    return {"activation": activation, "threshold": threshold} | changes


# Tokens, neurons, hidden size and DENSE_FROM; the activity is skewed where nothing else is said.
# The last case by unions needs two rounds of the backup. A list of hybrid holds 128 neurons or 64
# tokens.
EXACT = [
    ("union", 1, 20, 48, LISTS, {"pattern": "even"} | NON_GATED | HALF),
    ("union", 33, 1, 16, MIXED, {"pattern": "full"}),
    ("union", 70, 20, 16, MIXED, {"pattern": "edges"}),
    ("union", 33, 20, 16, MIXED, HALF),
    ("union", 9, 20, 16, LISTS, act("drelu", 0.0)),
    ("union", 9, 20, 16, BACKUP, act("relu", 1.5, gated=False)),
    ("union", 9, 20, 16, LISTS, act("relu2", 1.5, gated=False)),
    ("union", 9, 20, 16, MIXED, act("drelu", 1.5)),
    ("union", 3, 20, 16, LISTS, act("relu2", 1.5, pattern="empty")),
    pytest.param("union", 9, 140, 16, BACKUP, {"pattern": "full"} | NON_GATED, marks=slow),
    ("hybrid", 1, 129, 16, MIXED, {"pattern": "full"}),
    ("hybrid", 9, 20, 16, MIXED, HALF),
    pytest.param("hybrid", 9, 129, 16, MIXED, {"pattern": "full"} | NON_GATED, marks=slow),
    pytest.param("hybrid", 70, 40, 16, MIXED, {"pattern": "edges"}, marks=slow),
    *(
        pytest.param(path, 130, 300, 48, MIXED, {"pattern": "heavy"} | HALF, marks=slow)
        for path in PATHS
    ),
]


@pytest.mark.parametrize("path, tokens, neurons, hidden_size, dense_from, changes", EXACT, ids=str)
def test_exact(path, tokens, neurons, hidden_size, dense_from, changes, monkeypatch):
    monkeypatch.setattr(training, "DENSE_FROM", dense_from)
    case = case_of(path, tokens, neurons, hidden_size, **changes)
    assert fuzz_training.check_training(case, DEVICE, path) == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs its own configuration")
@slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("path", PATHS)
def test_every_configuration_is_exact(path, architecture, monkeypatch):
    run_as(architecture, monkeypatch)
    monkeypatch.setattr(training, "DENSE_FROM", MIXED)
    for pattern in ("skewed", "full"):  # hybrid has lists of tokens, then rows of the backup
        case = case_of(path, 9, 140, 80, pattern=pattern)
        assert fuzz_training.check_training(case, DEVICE, path) == 0


# Capacity


@quick_union
def test_overflow_is_reported_and_the_least_capacity_suffices(path, monkeypatch):
    """The counts stay right. Some neurons are active for every token, and two tokens are heavy."""
    monkeypatch.setattr(training, "DENSE_FROM", MIXED)
    num_neurons, capacities = (140, (1,)) if path == "hybrid" else (20, (1, 2))
    step = step_of(path, 66, num_neurons, 16, biases=False)
    step.tensors["x"][:, 1] = 0
    step.tensors["x"][::35, 1] = 1
    step.tensors["w_gate"][:, 1] = 400
    step.tensors["w_gate"][::10, 0] = 40
    enough, expected = step.run(140)
    needed = int(enough.needed)
    assert path == "hybrid" or needed == -(-int(enough.token_counts.sum()) // 66)
    for capacity in (*capacities, needed - 1, needed):
        trained, results = step.run(capacity)
        assert trained.needed == needed
        assert torch.equal(trained.token_counts, enough.token_counts)
        assert torch.equal(trained.neuron_counts, enough.neuron_counts)
        fine = enough.token_counts <= 128  # tokens with a list
        if path == "hybrid":
            assert torch.equal(trained.y[fine], enough.y[fine])
            assert torch.equal(results["x"][fine], expected["x"][fine])
    assert_same(results, expected)


@pytest.mark.parametrize(
    "path, module, name",
    [
        ("union", weight_gradients, "CACHE_BYTES"),
        pytest.param("hybrid", hybrid, "COLUMN_BYTES", marks=slow),
        pytest.param("hybrid", hybrid_format, "WORKSPACE_BYTES", marks=slow),
    ],
)
def test_parts_give_the_same_bits(path, module, name, monkeypatch):
    """Slabs of columns, and chunks of tokens."""
    monkeypatch.setattr(training, "DENSE_FROM", LISTS)
    sizes = (260, 40, 16) if name == "WORKSPACE_BYTES" else (3, 20, 272)
    step = step_of(path, *sizes, values="normal")
    whole = step.run(40)[1]
    monkeypatch.setattr(module, name, 1)
    assert_same(step.run(40)[1], whole)


# Values that are not finite


@quick_union
def test_weights_of_inactive_neurons_do_not_matter(path):
    step = step_of(path, 5, 140 if path == "hybrid" else 20, 16, pattern="edges")
    _, before = step.run(140)
    step.tensors["w_up"][1:-1] = float("nan")
    step.tensors["w_down"][:, 1:-1] = float("inf")
    _, after = step.run(140)
    assert_same(after, before)
    for name in ("w_gate", "w_up"):
        assert not after[name][1:-1].any() and after[name][0].any()


# The operators


@quick_union
def test_only_the_gradients_that_are_needed(path, monkeypatch):
    """They equal those of a step with all gradients."""
    monkeypatch.setattr(training, "DENSE_FROM", 2)  # some in lists, some in the backup
    step = step_of(path, 5, 20, 16)
    expected = step.run(40)[1]
    for names in (("x",), ("w_gate",), ("w_down",), ("b_gate", "b_up")):
        leaves = {n: None if t is None else t.detach() for n, t in step.tensors.items()}
        given = [leaves[name].requires_grad_() for name in names]
        trained = train(path, 40, **leaves)
        gradients = torch.autograd.grad([trained.y, trained.l1], given, [step.dy, step.dl1])
        for name, gradient in zip(names, gradients, strict=True):
            assert torch.equal(gradient, expected[name]), name


@quick_union
def test_operators_keep_the_rules_of_pytorch(path):
    tensors = step_of(path, 2, 20, 16, values="normal").tensors
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors.values()]
    leaves[3] = leaves[3].detach().t().requires_grad_()  # the operator takes w_down_t
    arguments = *leaves, torch.ones(2, device=DEVICE), 20, "relu", 0.0
    # On a GPU two calls may store entries in another order, which no result depends on; there
    # tests/gpu compares the code compiled by Inductor instead.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] if DEVICE == "cpu" else []
    torch.library.opcheck(training_ops.TRAIN_PATHS[path].operator, arguments, test_utils=checks)


@quick_union
def test_a_graph_has_no_second_gradients_and_may_be_offloaded(path):
    """Offloaded tensors come back with other strides."""
    tensors = step_of(path, 2, 20, 16, values="normal").tensors
    x = tensors["x"].detach().requires_grad_()
    y = train(path, 20, **{**tensors, "x": x}).y
    dy = torch.randn(y.shape, device=DEVICE).to(y.dtype)
    (gradient,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()

    def copy(tensor):  # pinned memory is allocated by shape alone
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(copy, lambda tensor: tensor.to(DEVICE)):
        y = train(path, 20, **{**tensors, "x": x}).y
        assert torch.equal(torch.autograd.grad(y, x, dy)[0], gradient)


def test_bad_input_is_named():
    tensors = step_of("union", 70, 140, 48).tensors
    one = tensors | {"x": tensors["x"][:1]}
    # 31 are added to the place of an entry that does not fit, and the sum has to fit 32 bits.
    for path, capacity, given, value in (
        ("ell", 8, tensors, "'ell'"),
        ("union", 0, tensors, "capacity=0 for 70"),
        ("union", 40_000_000, tensors, "capacity=40000000 for 70"),
        ("union", 2**31 - 31, one, f"capacity={2**31 - 31} for 1"),
        ("union", 8, tensors | {"token_mask": torch.ones(3, device=DEVICE)}, r"\(3,\)"),
        ("union", 8, tensors | {"x": tensors["x"][:0]}, "for 0 tokens"),
        ("hybrid", 8, tensors | {"act": get_activation("relu2")}, "'relu2'"),
    ):
        with pytest.raises(ValueError, match=value):
            train(path, capacity, **given)
