"""The training operators by unions and by the paper's hybrid format.

tests/fuzz.py compares y, the L1 term, the counts and every gradient with fp64; with small integers
all sums are exact. Here are cases that a random one seldom meets.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import fuzz, fuzz_training
from tests.factories import SEED
from tests.factories.kernels import DEVICE, run_as
from tests.factories.ops import train, weights_of
from twell.kernels import entries, training, weight_gradients
from twell.kernels.common import Gradients
from twell.kernels.paper import hybrid, hybrid_format
from twell.sparse import hybrid_reference, reference, training_ops

slow = pytest.mark.slow
PATHS = sorted(training_ops.TRAIN_PATHS)
# The hybrid format takes many times as long in the interpreter.
quick_union = pytest.mark.parametrize("path", [pytest.param("hybrid", marks=slow), "union"])
MODULES = {"union": training, "hybrid": hybrid}
NAMES = "x", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"
paths = pytest.mark.parametrize("path", PATHS)
both = pytest.mark.parametrize("gated", [True, False])


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


@pytest.fixture(params=[1, 16, 10**6], ids=["lists", "some in the backup", "all in the backup"])
def dense_from(request, monkeypatch):
    monkeypatch.setattr(training, "DENSE_FROM", request.param)
    return request.param


@paths
@pytest.mark.parametrize(
    "seed", [SEED, *(pytest.param(SEED + i, marks=slow) for i in range(1, 10))]
)
def test_random_case(path, seed, monkeypatch):
    case = fuzz.draw(seed, large=False)
    if DEVICE == "cpu":
        most = 70 if case.pattern == "full" else 257
        case = replace(case, intermediate_size=min(case.intermediate_size, most))
    monkeypatch.setattr(training, "DENSE_FROM", random.Random(seed).choice([1, 16, 64]))
    fuzz_training.check_training(case, DEVICE, path, beyond=True)


# Tokens, neurons, hidden size, pattern and gated. A list of hybrid holds 128 neurons or 64 tokens.
SMALL = [(1, 40, 48, "even", False), (33, 1, 16, "full", True), (70, 40, 16, "edges", True)]
LARGE = [(1, 130, 80, "full", True), (9, 128, 16, "full", True), (9, 129, 16, "full", False)]
LARGE += [(33, 40, 48, "empty", False), (65, 70, 48, "even", True)]
LARGE += [(130, 300, 48, "heavy", False), (70, 300, 48, "tile", True)]
EXACT = [(path, *case) for path in PATHS for case in SMALL] + [("hybrid", *LARGE[0])]
EXACT += [pytest.param("union", *case, marks=slow) for case in LARGE]
EXACT += [pytest.param("hybrid", *case, marks=slow) for case in LARGE[1:]]


@pytest.mark.parametrize("path, num_tokens, num_neurons, hidden_size, pattern, gated", EXACT)
def test_exact(path, num_tokens, num_neurons, hidden_size, pattern, gated):
    dtype = torch.float16 if hidden_size == 48 else torch.bfloat16
    sizes = num_tokens, num_neurons, hidden_size
    case = case_of(path, *sizes, pattern=pattern, gated=gated, dtype=dtype)
    assert fuzz_training.check_training(case, DEVICE, path) == 0


@quick_union
@both
def test_integers_equal_the_reference(path, gated, monkeypatch):
    """Every result, with some neurons in lists and some in the backup."""
    monkeypatch.setattr(training, "DENSE_FROM", 16)
    step = step_of(path, 33, 70, 16, gated=gated)
    trained, results = step.run(70)
    t = step.tensors
    if path == "union":
        *expected, saved = reference.union_train_forward(*t.values())
        gradients = reference.union_train_backward(saved, step.dy, step.dl1)
    else:
        *expected, saved = hybrid_reference.ffn_forward(**t)
        gradients = hybrid_reference.ffn_backward(saved, step.dy, step.dl1)
    assert_same(dict(enumerate(trained[:3])), dict(enumerate(expected[:3])))
    for name, gradient in zip(NAMES, gradients, strict=True):
        if t[name] is not None:
            assert torch.equal(results[name], gradient), name


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs its own configuration")
@slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90"])
@paths
def test_every_configuration_is_exact(path, architecture, monkeypatch):
    run_as(architecture, monkeypatch)
    monkeypatch.setattr(training, "DENSE_FROM", 16)
    for pattern in ("skewed", "full"):  # hybrid has lists of tokens, then rows of the backup
        assert (
            fuzz_training.check_training(case_of(path, 9, 140, 80, pattern=pattern), DEVICE, path)
            == 0
        )


# Lists and backup of unions

RUNS = 2 if DEVICE == "cuda" else 1  # on a GPU check_training runs a case twice


@pytest.fixture
def rounds(monkeypatch):
    """For each round of the backup, the number of neurons that need a row."""
    numbers, kernel = [], weight_gradients.backup_fill_kernel

    class Counting:
        def __getitem__(self, grid):
            def launch(*args, **options):
                numbers.append(int(args[4][1]))
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(weight_gradients, "backup_fill_kernel", Counting())
    return numbers


@both
def test_lists_and_backup_give_the_same(dense_from, gated, rounds):
    case = case_of("union", 33, 70, 16, gated=gated)
    assert fuzz_training.check_training(case, DEVICE, "union") == 0
    needed = 0 if dense_from == 1 else rounds[0]
    assert rounds == [needed] * RUNS and (0 < needed <= 70 or dense_from == 1)


@pytest.mark.parametrize("gated", [pytest.param(True, marks=slow), False])
def test_a_backup_that_needs_two_rounds(gated, monkeypatch, rounds):
    monkeypatch.setattr(training, "DENSE_FROM", 10**6)
    case = case_of("union", 33, 200, 16, pattern="full", gated=gated)
    assert fuzz_training.check_training(case, DEVICE, "union") == 0
    assert rounds == [200, 200] * RUNS


@both
def test_a_step_beyond_the_capacity_writes_its_own_neurons_only(gated):
    """More neurons need a row of the backup than it lists, and the last of its rounds is short."""
    num_neurons, capacity, unwritten = 700, 10, 7.0
    step = step_of("union", 33, num_neurons, 16, pattern="full", gated=gated, biases=False)
    x, w_gate, w_up, w_down, *_ = step.tensors.values()
    layer = weights_of(w_gate, w_up, w_down.t().contiguous().t())
    _, _, _, _, needed, *saved = training.forward(x, layer, None, capacity)
    saved = entries.UnionSaved(*saved)
    listed = len(saved.backup)
    assert needed > capacity and saved.totals[1] > listed
    # What follows the list would lead to rows behind the weights' gradients.
    behind = torch.full_like(saved.backup, num_neurons)
    saved = saved._replace(backup=torch.cat([saved.backup, behind])[:listed])
    saved.index[:, num_neurons:] = 0
    written = [x.new_full((num_neurons + 1, x.shape[1]), unwritten) for _ in range(3)]
    gradients = Gradients(None, written[0] if gated else None, *written[1:], None, None)
    training.backward(x, layer, saved, step.dy, step.dl1, gradients)
    assert all((gradient[num_neurons] == unwritten).all() for gradient in written)
    assert all((gradient[:num_neurons] != unwritten).any() for gradient in written[1:])


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
    monkeypatch.setattr(training, "DENSE_FROM", 1)
    sizes = (260, 40, 16) if name == "WORKSPACE_BYTES" else (9, 40, 272)
    step = step_of(path, *sizes, values="normal")
    whole = step.run(40)[1]
    monkeypatch.setattr(module, name, 1)
    assert_same(step.run(40)[1], whole)


# Capacity


def busy_step(path, **changes):
    """Neurons that are active for every token, more than a list of hybrid holds; heavy tokens."""
    step = step_of(path, 70, 140, 16, biases=False, **changes)
    first = step.tensors["w_gate" if step.case.gated else "w_up"]
    step.tensors["x"][:, 1] = 0
    step.tensors["x"][::35, 1] = 1
    first[:, 1] = 400
    first[::20, 0] = 40
    return step


@slow
@paths
def test_overflow_is_reported_and_stays_inside(path, monkeypatch):
    """Counts stay right, and no buffer is written past its end. The least capacity suffices."""
    step = busy_step(path)
    enough, expected = step.run(140)
    needed, behind = int(enough.needed), []
    if path == "union":
        assert needed == -(-int(enough.token_counts.sum()) // 70)
    saved_like = MODULES[path].saved_like

    def guarded(*args):
        saved = saved_like(*args)
        tensors = []
        for tensor in saved:
            storage = tensor.new_full((tensor.numel() + 5000,), 77)
            behind.append(storage[tensor.numel() :])
            tensors.append(storage[: tensor.numel()].view(tensor.shape))
        return type(saved)(*tensors)

    monkeypatch.setattr(MODULES[path], "saved_like", guarded)
    for capacity in (1, needed - 1):
        trained, results = step.run(capacity)
        assert trained.needed == needed
        assert torch.equal(trained.token_counts, enough.token_counts)
        assert torch.equal(trained.neuron_counts, enough.neuron_counts)
        fine = enough.token_counts <= 128  # tokens with a list
        if path == "hybrid":
            assert torch.equal(trained.y[fine], enough.y[fine])
            assert torch.equal(results["x"][fine], expected["x"][fine])
    trained, results = step.run(needed)
    assert trained.needed == needed and 1 < needed < 140
    assert_same(results, expected)
    assert behind and all(bool((rest == 77).all()) for rest in behind)


def suffices(counts, heavy_tokens, num_tokens, capacity):
    """Whether tokens and neurons beyond a list's length have backup rows."""
    token_rows = hybrid_format.backup_rows(num_tokens, len(counts), capacity)
    rows = hybrid_format.transposed_rows(num_tokens, len(counts), token_rows)
    heavy = int((counts > hybrid_format.list_width(num_tokens)).sum())
    return heavy_tokens <= token_rows and heavy <= rows


@pytest.mark.parametrize("num_tokens", [1, 65, 1000, 100_000])
@pytest.mark.parametrize("num_neurons", [1, 300, 5632])
def test_needed_is_the_least_capacity_that_fits(num_tokens, num_neurons):
    generator = torch.Generator().manual_seed(SEED)
    for spread, part in itertools.product((0.0, 1.5, 4.0), (0.0, 0.001, 0.3, 1.0)):
        numbers = torch.randn(num_neurons, generator=generator)
        rate = numbers.mul(spread).add(-3).exp().clamp(max=1)
        counts = (rate * num_tokens).round().int().to(DEVICE)
        heavy = torch.tensor([round(part * num_tokens)], dtype=torch.int32, device=DEVICE)
        needed = torch.empty((), dtype=torch.int64, device=DEVICE)
        hybrid_format.least_capacity(counts, heavy, num_tokens, needed)
        least = int(needed)
        assert suffices(counts, int(heavy), num_tokens, least)
        assert least == 0 or not suffices(counts, int(heavy), num_tokens, least - 1)


# What results do not depend on


# Values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@both
def test_a_row_that_is_not_finite_is_that_of_the_reference(gated, value):
    """In lists, where it reaches its own row of y and dx, and the weights of its active neurons."""
    step = step_of("hybrid", 9, 40, 48, gated=gated)
    t = step.tensors
    # No zeros where the value goes, so that it makes infinities and not only NaN.
    for w in (t["w_gate"], t["w_up"], t["w_down"].t()):
        if w is not None:
            w[:, 7] = torch.arange(40, device=DEVICE) % 2 * 2 - 1
    t["x"][4, 7] = step.dy[6, 7] = value
    _, results = step.run(40)
    *expected, saved = hybrid_reference.ffn_forward(**t)
    gradients = hybrid_reference.ffn_backward(saved, step.dy, step.dl1)
    given = {n: g for n, g in zip(NAMES, gradients, strict=True) if t[n] is not None}
    assert_same(results, {"y": expected[0], "l1": expected[1], **given})
    others = torch.arange(9, device=DEVICE) != 4
    assert results["y"][others].isfinite().all() and not results["y"][4].isfinite().all()


@slow
def test_a_nan_in_a_backup_row_reaches_its_own_row():
    step = step_of("hybrid", 9, 140, 48, pattern="full")
    _, before = step.run(140)
    step.tensors["x"][4, 7] = float("nan")
    trained, after = step.run(140)
    others = torch.arange(9, device=DEVICE) != 4
    for name in ("y", "x", "l1"):
        assert after[name][4].isnan().all()
        assert torch.equal(after[name][others], before[name][others])
    assert trained.token_counts[4] == 140


@slow
@paths
def test_weights_of_inactive_neurons_do_not_matter(path):
    """In lists; and of w_up also in backup rows of hybrid, which a full pattern fills."""
    step = step_of(path, 9, 140, 16, pattern="edges")
    _, before = step.run(140)
    step.tensors["w_up"][1:-1] = float("nan")
    step.tensors["w_down"][:, 1:-1] = float("inf")
    _, after = step.run(140)
    assert_same(after, before)
    for name in ("w_gate", "w_up"):
        assert not after[name][1:-1].any() and after[name][0].any()
    step = step_of(path, 9, 200, 16, pattern="full")
    step.tensors["w_gate"][150:, 0] = -200
    before = step.run(200)[0]
    step.tensors["w_up"][150:] = float("inf")
    after = step.run(200)[0]
    assert (after.token_counts == 150).all()
    assert torch.equal(after.y, before.y) and torch.equal(after.l1, before.l1)


# The operators


@quick_union
@pytest.mark.parametrize("names", [*((name,) for name in NAMES[:4]), ("b_gate", "b_up")], ids=str)
@both
def test_only_the_gradients_that_are_needed(path, names, gated, monkeypatch):
    """They equal those of a step with all gradients; the operator returns nothing for others."""
    monkeypatch.setattr(training, "DENSE_FROM", 8)  # some in lists, some in the backup
    step = step_of(path, 33, 20, 16, gated=gated)
    names = [name for name in names if step.tensors[name] is not None]
    if not names:
        pytest.skip("a non-gated layer has no gate")
    expected = step.run(40)[1]
    leaves = {n: None if t is None else t.detach() for n, t in step.tensors.items()}
    given = [leaves[name].requires_grad_() for name in names]
    trained = train(path, 40, **leaves)
    needs = [name in names for name in NAMES[:6]]
    backward = getattr(torch.ops.twell, f"train_{path}_backward")
    returned = backward(*trained.y.grad_fn.saved_tensors, step.dy, step.dl1, needs, "relu")
    assert [t.numel() > 0 for t in returned] == needs
    outputs, gradients = [trained.y, trained.l1], [step.dy, step.dl1]
    for name, gradient in zip(names, torch.autograd.grad(outputs, given, gradients), strict=True):
        assert torch.equal(gradient, expected[name]), name


@quick_union
@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=slow)])
def test_operators_keep_the_rules_of_pytorch(path, gated):
    tensors = step_of(path, 5, 20, 48, gated=gated, values="normal").tensors
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors.values()]
    leaves[3] = leaves[3].detach().t().requires_grad_()  # the operator takes w_down_t
    arguments = *leaves, torch.ones(5, device=DEVICE), 20, "relu", 0.0
    # On a GPU two calls may store entries in another order, which no result depends on; there
    # tests/gpu compares the code compiled by Inductor instead.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] if DEVICE == "cpu" else []
    torch.library.opcheck(training_ops.TRAIN_PATHS[path].operator, arguments, test_utils=checks)


class Watch(TorchDispatchMode):
    """Keeps the names of our operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names += [function._opname] if function.namespace == "twell" else []
        return function(*args, **(kwargs or {}))


@quick_union
def test_an_eager_step_needs_no_operator(path, monkeypatch):
    """It has the results of the operators, which run where something watches the call."""
    step = step_of(path, 5, 20, 48, values="normal")
    with Watch() as watch:
        expected = step.run(20)[1]
    assert watch.names == [f"train_{path}", f"train_{path}_backward"]
    operators = training_ops.TRAIN_PATHS[path]
    monkeypatch.setattr(operators, "operator", None)
    monkeypatch.setattr(operators, "backward_operator", None)
    assert_same(step.run(20)[1], expected)


def graph_of(path):
    """x, and y of a step whose only gradient is that of x."""
    tensors = step_of(path, 5, 20, 48, values="normal").tensors
    x = tensors["x"].detach().requires_grad_()
    return x, train(path, 20, **{**tensors, "x": x}).y


@quick_union
def test_a_graph_is_used_again_but_has_no_second_gradients(path):
    x, y = graph_of(path)
    first, again = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(first, gradient)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@quick_union
def test_saved_tensors_may_come_back_with_other_strides(path):
    """As from offloading to pinned memory, which copies to `torch.empty` of the same shape."""
    step = step_of(path, 5, 20, 48, values="normal")
    expected = step.run(20)[1]
    copy = lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # noqa: E731
    back = lambda tensor: tensor.to(DEVICE)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(copy, back):
        assert_same(step.run(20)[1], expected)


@quick_union
def test_gradients_in_a_batch_are_those_of_a_loop(path):
    x, y = graph_of(path)
    several = torch.randn(3, *y.shape, device=DEVICE).to(y.dtype)
    loop = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in several]
    (batch,) = torch.autograd.grad(y, x, several, is_grads_batched=True)
    assert torch.equal(batch, torch.stack(loop))


def test_bad_input_is_named():
    tensors = step_of("union", 70, 140, 48).tensors
    with pytest.raises(ValueError, match="path 'ell' is unknown; use one of .*union"):
        train("ell", 8, **tensors)
    for capacity, x in ((0, tensors["x"]), (40_000_000, tensors["x"]), (2**31 - 31, None)):
        # 31 are added to the place of an entry that does not fit, and the sum has to fit 32 bits.
        x = tensors["x"][:1] if x is None else x
        with pytest.raises(ValueError, match=f"capacity={capacity} for {len(x)} tokens"):
            train("union", capacity, **{**tensors, "x": x})
    with pytest.raises(ValueError, match=r"token_mask has shape \(3,\), expected 70"):
        train("union", 8, **tensors, token_mask=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="x has no token"):
        train("union", 8, **{**tensors, "x": tensors["x"][:0]})
