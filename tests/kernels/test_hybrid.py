"""Training by the hybrid format at small shapes, in Triton's interpreter where there is no GPU.

With small integers every sum is exact in fp32, so all results equal the reference bit for bit.
Other values come close to the reference in fp64. There x and the gate's weights lie on a coarse
grid, so that g, and with it the active neurons, is exact too.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    SEED,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell import reference
from twell.kernels import common, options
from twell.kernels.paper import hybrid, hybrid_pack, hybrid_weights
from twell.kernels.paper.hybrid_pack import HybridSaved

COUNTS = "token_counts", "neuron_counts"
GRADIENTS = "dx", "dw_gate", "dw_up", "dw_down_t", "db_gate", "db_up"
NAMES = "y", "l1", *COUNTS, *GRADIENTS


def integer_step(num_tokens, num_neurons, hidden_size=48, *, values="integer", **changes):
    """Tensors of a layer, dy, dl1 and a token mask."""
    changes = dict(pattern="even", seed=SEED) | changes
    case = fuzz.Case("", num_tokens, num_neurons, hidden_size, values=values, **changes)
    t = fuzz.layer(case, DEVICE)
    given = dict(generator=torch.Generator(DEVICE).manual_seed(SEED), device=DEVICE)
    dy = torch.randint(-2, 3, (num_tokens, hidden_size), **given).to(case.dtype)
    dl1 = torch.randint(-3, 4, (num_tokens,), **given).float()
    mask = torch.rand(num_tokens, **given) < 0.7
    return t, dy, dl1, mask


def forward(t, mask, capacity):
    weights = t["w_gate"], t["w_up"], t["w_down"].t()
    biases = t["b_gate"], t["b_up"], t["b_down"]
    return hybrid.forward(t["x"], *weights, *biases, mask, capacity)


def backward(t, saved, dy, dl1):
    given = t["x"], t["w_gate"], t["w_up"], t["w_down"].t(), t["b_gate"], t["b_up"]
    needs = [tensor is not None for tensor in given]
    return hybrid.backward(*given, HybridSaved(*saved), dy, dl1, needs)


def step(t, dy, dl1, mask, capacity):
    """`needed` and all results by name."""
    y, l1, token_counts, neuron_counts, needed, *saved = forward(t, mask, capacity)
    results = y, l1, token_counts, neuron_counts, *backward(t, saved, dy, dl1)
    return int(needed), dict(zip(NAMES, results, strict=True))


def reference_step(t, dy, dl1, mask=None):
    """All results by name, from the reference: in fp64 for fp64, else rounded as the kernels do."""
    y, l1, token_counts, saved = reference.ffn_forward(**t)
    d = reference.ffn_backward(saved, dy, dl1)
    tokens, neurons, _ = (saved.h if saved.g is None else saved.g).entries()
    if mask is not None:
        neurons = neurons[mask[tokens]]
    neuron_counts = neurons.bincount(minlength=len(t["w_up"])).int()
    gradients = d.x, d.w_gate, d.w_up, d.w_down.t(), d.b_gate, d.b_up
    return dict(zip(NAMES, (y, l1, token_counts, neuron_counts, *gradients), strict=True))


def assert_equal(results, expected, names=NAMES):
    for name in names:
        if expected[name] is None:
            assert results[name] is None, name
        else:
            torch.testing.assert_close(
                results[name],
                expected[name],
                rtol=0,
                atol=0,
                equal_nan=True,
                msg=lambda text, n=name: f"{n}: {text}",
            )


def heavy_neurons(counts, num_tokens, capacity):
    """The neurons with more tokens than a list holds, and the backup rows for them."""
    num_backup = hybrid_pack.backup_rows(num_tokens, len(counts), capacity)
    heavy = counts > hybrid_pack.list_width(num_tokens)
    rows = hybrid_pack.transposed_rows(num_tokens, len(counts), num_backup)
    return int(heavy.sum()), rows


def suffices(counts, heavy_tokens, num_tokens, capacity):
    heavy, rows = heavy_neurons(counts, num_tokens, capacity)
    token_rows = hybrid_pack.backup_rows(num_tokens, len(counts), capacity)
    return heavy_tokens <= token_rows and heavy <= rows


def test_the_compared_sums_are_exact():
    """The largest sums of the tests stay below 2^24, or equality would prove nothing."""
    t, dy, dl1, _ = integer_step(130, 300, 112, pattern="full", biases=True)
    g = t["x"].double() @ t["w_gate"].double().t()
    h = (g * (t["x"].double() @ t["w_up"].double().t())).abs().max()
    assert h * 300 * 2 < 2**24 and h * 130 * 2 < 2**24
    assert (dy.double() @ t["w_down"].double()).abs().max() * g.abs().max() * 300 * 4 < 2**24


@pytest.mark.parametrize(
    ("num_tokens", "num_neurons", "hidden_size", "pattern", "gated"),
    [
        (1, 40, 48, "even", False),
        (1, 300, 112, "full", True),
        (33, 1, 16, "full", True),
        (33, 300, 80, "even", True),
        (9, 129, 48, "full", True),  # one more than a list holds
        (9, 128, 48, "full", True),
        (130, 140, 48, "heavy", True),
        (130, 300, 48, "heavy", False),
        (130, 140, 112, "full", True),
        (130, 40, 16, "edges", True),  # two neurons have all 130 tokens, the others none
        (130, 140, 48, "empty", True),
        (33, 140, 48, "empty", False),
        (130, 40, 64, "skewed", True),
    ],
)
def test_exact_with_the_least_capacity(num_tokens, num_neurons, hidden_size, pattern, gated):
    """The least capacity comes from trying all."""
    changes = dict(pattern=pattern, gated=gated, biases=num_tokens != 33)
    changes["dtype"] = torch.float16 if hidden_size == 48 else torch.bfloat16
    t, dy, dl1, mask = integer_step(num_tokens, num_neurons, hidden_size, **changes)
    mask = None if hidden_size == 16 else mask
    expected = reference_step(t, dy, dl1, mask)
    counts = reference_step(t, dy, dl1)["neuron_counts"]
    heavy_tokens = int((expected["token_counts"] > 128).sum())
    capacity = next(c for c in itertools.count() if suffices(counts, heavy_tokens, num_tokens, c))
    needed, results = step(t, dy, dl1, mask, capacity)
    assert needed == capacity
    assert_equal(results, expected)
    if pattern == "edges":
        assert heavy_neurons(counts, num_tokens, capacity)[0] == 2


def grid(*shape, step):
    return torch.randn(shape, device=DEVICE).div(step).round().mul(step)


def layer_of_all_kinds(num_tokens, num_neurons, hidden_size, gated, dtype):
    """Short and full rows, rare neurons and frequent ones; the gate's products are exact."""
    x = grid(num_tokens, hidden_size, step=0.25)
    first = grid(num_neurons, hidden_size, step=0.25) / 8
    x[:, 0], first[:, 0] = 1, -2
    x[:, 1], first[:, 1] = 0, 16
    x[::13, 1] = 1  # heavy tokens
    first[::30, 0] = 1  # frequent neurons, not active for every token
    second = torch.randn(num_neurons, hidden_size, device=DEVICE) / 8
    biases = torch.randn(num_neurons, device=DEVICE), grid(num_neurons, step=0.25)
    tensors = {
        "x": x,
        "w_gate": first if gated else None,
        "w_up": second if gated else first,
        "w_down": (torch.randn(num_neurons, hidden_size, device=DEVICE) / 16).t(),
        "b_gate": grid(num_neurons, step=0.25) / 4 if gated else None,
        "b_up": biases[0 if gated else 1] / 4,
        "b_down": torch.randn(hidden_size, device=DEVICE),
    }
    t = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
    t["w_down"] = t["w_down"].t().contiguous().t()
    return t


@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_close_to_the_reference_in_fp64(gated, dtype):
    """tests/test_reference.py compares this reference with autograd."""
    num_tokens, num_neurons, hidden_size, capacity = 130, 150, 48, 13
    t = layer_of_all_kinds(num_tokens, num_neurons, hidden_size, gated, dtype)
    dy = torch.randn(num_tokens, hidden_size, device=DEVICE).to(dtype)
    dl1 = torch.randn(num_tokens, device=DEVICE)
    doubles = {name: None if tensor is None else tensor.double() for name, tensor in t.items()}
    expected = reference_step(doubles, dy.double(), dl1.double())
    needed, results = step(t, dy, dl1, None, capacity)
    assert needed <= capacity
    counts = results["token_counts"]
    assert_equal(results, expected, COUNTS)
    assert (counts > 128).any() and ((counts > 0) & (counts < 64)).any()
    assert heavy_neurons(results["neuron_counts"], num_tokens, capacity)[0] == 5
    for name in ("y", "l1", *GRADIENTS):
        if expected[name] is None:
            assert results[name] is None and not gated, name
            continue
        error = fuzz.relative_rms(results[name], expected[name])
        assert error < (5e-3 if dtype == torch.bfloat16 else 1e-3), f"{name}: {error}"


def test_a_large_capacity_changes_nothing():
    t, dy, dl1, mask = integer_step(20, 140, 32, pattern="heavy", biases=True)
    t["x"][::9, 1] = 1
    assert_equal(step(t, dy, dl1, mask, 1000)[1], reference_step(t, dy, dl1, mask))


# Overflow


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 130, 1000, 16_384, 100_000])
@pytest.mark.parametrize("num_neurons", [1, 40, 300, 5632])
def test_needed_is_the_least_capacity_that_fits(num_tokens, num_neurons):
    for spread, part in itertools.product((0.0, 1.5, 4.0), (0.0, 0.001, 0.3, 1.0)):
        rate = torch.randn(num_neurons).mul(spread).add(-3).exp().clamp(max=1)
        counts = (rate * num_tokens).round().int().to(DEVICE)
        heavy_tokens = torch.tensor([round(part * num_tokens)], dtype=torch.int32, device=DEVICE)
        needed = torch.empty((), dtype=torch.int64, device=DEVICE)
        hybrid_pack.least_capacity(counts, heavy_tokens, num_tokens, needed)
        least = int(needed)
        assert suffices(counts, int(heavy_tokens), num_tokens, least)
        assert least == 0 or not suffices(counts, int(heavy_tokens), num_tokens, least - 1)


@pytest.mark.parametrize("pattern", ["full", "heavy", "frequent"])
def test_overflow_is_reported_and_stays_inside(pattern, monkeypatch):
    """Counts are right, so is y of tokens with a list, and no buffer is written past its end."""
    if pattern == "frequent":
        t, dy, dl1, mask = integer_step(70, 70, 32)
        t["w_gate"][::7, 0] = 40  # active for every token; a list of tokens holds 64
    else:
        t, dy, dl1, mask = integer_step(24, 140, 32, pattern=pattern)
    if pattern == "heavy":
        t["x"][:10, 1] = 1
    expected = reference_step(t, dy, dl1, mask)
    needed = int(forward(t, mask, 1000)[4])
    assert needed > 2
    behind = []

    def guarded(*args):
        tensors = []
        for tensor in saved_like(*args):
            storage = tensor.new_full((tensor.numel() + 5000,), 77)
            behind.append(storage[tensor.numel() :])
            tensors.append(storage[: tensor.numel()].view(tensor.shape))
        return HybridSaved(*tensors)

    saved_like = hybrid.saved_like
    monkeypatch.setattr(hybrid, "saved_like", guarded)
    for capacity in (0, needed - 1):
        reported, results = step(t, dy, dl1, mask, capacity)
        assert reported == needed
        assert_equal(results, expected, COUNTS)
        fine = expected["token_counts"] <= 128
        assert torch.equal(results["y"][fine], expected["y"][fine])
        assert torch.equal(results["dx"][fine], expected["dx"][fine])
        assert not torch.equal(results["dw_up"], expected["dw_up"])
        if pattern == "frequent":
            listed = reference_step(t, dy, dl1)["neuron_counts"] <= 64
            assert torch.equal(results["dw_up"][listed], expected["dw_up"][listed])
    assert behind and all(bool((rest == 77).all()) for rest in behind)
    reported, results = step(t, dy, dl1, mask, needed)
    assert reported == needed
    assert_equal(results, expected)


# What results do not depend on


def test_order_of_backup_rows_does_not_matter():
    t, dy, dl1, mask = integer_step(33, 140, 32, pattern="heavy", values="normal")
    t["x"][:, 1] = 0
    t["x"][::3, 1] = 1
    needed, *saved = forward(t, mask, 70)[4:]
    saved = HybridSaved(*saved)
    assert needed <= 70 and saved.used == 11
    before = backward(t, saved, dy, dl1)
    order = torch.randperm(11, device=DEVICE)
    rows = torch.cat([order, torch.arange(11, len(saved.owners), device=DEVICE)])
    place = saved.place.clone()
    place[saved.owners[order].long()] = ~torch.arange(11, dtype=torch.int32, device=DEVICE)
    dense = dict(dense_g=saved.dense_g[rows], dense_u=saved.dense_u[rows])
    moved = saved._replace(place=place, owners=saved.owners[rows], **dense)
    after = backward(t, moved, dy, dl1)
    for a, b in zip(after, before, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_two_calls_give_the_same_bits():
    t, dy, dl1, mask = integer_step(70, 140, 32, pattern="heavy", values="normal", biases=True)
    t["x"][:, 1] = 0
    t["x"][::9, 1], t["w_gate"][::50, 0] = 1, 20  # some of every kind
    needed, results = step(t, dy, dl1, mask, 20)
    counts = reference_step(t, dy, dl1)["neuron_counts"]
    assert needed <= 20 and heavy_neurons(counts, 70, 20)[0] == 3
    assert_equal(step(t, dy, dl1, mask, 20)[1], results)


def test_chunks_of_tokens_give_the_same_bits(monkeypatch):
    t, dy, dl1, mask = integer_step(260, 140, 16, pattern="empty")
    t["x"][:, 1] = 0
    t["x"][[3, 258], 1] = 1
    t["w_gate"][:, 1] = 400
    whole = step(t, dy, dl1, mask, 100)
    assert whole[0] <= 100 and whole[1]["y"][[3, 258]].any(1).all()
    monkeypatch.setattr(hybrid_pack, "WORKSPACE_BYTES", 1)
    chunks = step(t, dy, dl1, mask, 100)
    assert chunks[0] == whole[0]
    assert_equal(chunks[1], whole[1])


def test_parts_of_columns_give_the_same_bits(monkeypatch):
    t, dy, dl1, mask = integer_step(17, 40, 80, pattern="skewed", biases=True)
    whole = step(t, dy, dl1, mask, 40)[1]
    monkeypatch.setattr(hybrid_weights, "COLUMN_BYTES", 1)
    assert_equal(step(t, dy, dl1, mask, 40)[1], whole)


# The other architectures have one of these.
@pytest.mark.parametrize("architecture", ["default", "sm_80", "sm_89", "sm_90"])
def test_every_configuration(architecture, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(options, "architecture", lambda device: architecture)
    t, dy, dl1, mask = integer_step(9, 140, 80, pattern="heavy", biases=True)
    t["x"][:, 1] = 0
    t["x"][4, 1] = 1
    needed, results = step(t, dy, dl1, mask, 100)
    assert needed <= 100
    assert_equal(results, reference_step(t, dy, dl1, mask))


# Values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gated", [True, False])
def test_a_row_that_is_not_finite_is_that_of_the_reference(gated, value):
    """In lists, where it reaches its own row of y and dx, and the weights of its active neurons."""
    t, dy, dl1, _ = integer_step(9, 40, 48, pattern="skewed", gated=gated, biases=True)
    # No zeros where the value goes, so that it makes infinities and not only NaN.
    for w in (t["w_gate"], t["w_up"], t["w_down"].t()):
        if w is not None:
            w[:, 7] = torch.randint(0, 2, (40,), device=DEVICE) * 2 - 1
    t["x"][4, 7] = value
    dy[6, 7] = value
    _, results = step(t, dy, dl1, None, 40)
    assert_equal(results, reference_step(t, dy, dl1))
    others = torch.arange(9, device=DEVICE) != 4
    assert results["y"][others].isfinite().all() and not results["y"][4].isfinite().all()


def test_a_nan_in_a_backup_row_reaches_its_own_row():
    t, dy, dl1, _ = integer_step(9, 140, 48, pattern="full")
    _, before = step(t, dy, dl1, None, 140)
    t["x"][4, 7] = float("nan")
    _, after = step(t, dy, dl1, None, 140)
    others = torch.arange(9, device=DEVICE) != 4
    for name in ("y", "dx", "l1"):
        assert after[name][4].isnan().all()
        assert torch.equal(after[name][others], before[name][others])
    assert after["token_counts"][4] == 140


def test_weights_of_inactive_neurons_do_not_matter():
    # The first and the last neuron alone are active.
    t, dy, dl1, mask = integer_step(9, 140, 48, pattern="edges")
    _, before = step(t, dy, dl1, mask, 1)
    t["w_up"][1:-1] = float("nan")
    t["w_down"][:, 1:-1] = float("inf")
    _, after = step(t, dy, dl1, mask, 1)
    assert_equal(after, before)
    for name in ("dw_gate", "dw_up", "dw_down_t"):
        assert not after[name][1:-1].any() and after[name][0].any()


def test_up_weights_of_inactive_neurons_do_not_reach_backup_rows():
    t, dy, dl1, mask = integer_step(9, 200, 48, pattern="full")
    t["w_gate"][150:, 0] = -200
    before = forward(t, mask, 200)
    t["w_up"][150:] = float("inf")
    after = forward(t, mask, 200)
    assert (after[2] == 150).all() and after[4] <= 200
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])


# The saved tensors


@pytest.mark.parametrize("capacity", [0, 7, 300])
@pytest.mark.parametrize("gated", [True, False])
def test_saved_tensors_are_those_announced(gated, capacity):
    t, *_, mask = integer_step(20, 300, 32, gated=gated)
    saved = HybridSaved(*forward(t, mask, capacity)[5:])
    assert all(tensor.dtype in (torch.int16, torch.int32) for tensor in saved)
    assert saved.u.numel() == saved.g.numel() * gated
    assert saved.dense_u.numel() == saved.dense_g.numel() * gated
    assert len(saved.owners) == len(saved.dense_g) == max(1, -(-20 * capacity // 300))
    with FakeTensorMode() as mode:
        fake = hybrid.saved_like(mode.from_tensor(t["x"]), 300, capacity, gated)
    for a, b in zip(fake, saved, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def test_sizes_at_full_scale():
    """16,384 tokens of 5,632 neurons, 64 entries each: a small part of the dense layer."""
    num_backup = hybrid_pack.backup_rows(16_384, 5632, 64)
    assert num_backup == 187
    assert hybrid_pack.list_width(16_384) == 256 and hybrid_pack.list_width(100) == 64
    assert hybrid_pack.transposed_rows(16_384, 5632, num_backup) == 257
    assert hybrid_pack.transposed_rows(16_384, 5632, 1) == 1
    assert hybrid_pack.transposed_rows(100, 300, 100) == 300
