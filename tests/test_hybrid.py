"""Training by rows at small shapes, in Triton's interpreter where there is no GPU.

With small integers every sum is exact in fp32, so all results have to equal fp64 with the same roundings, bit for bit. Other
values come close to fp64 autograd; there x and the gate's weights lie on a coarse grid, so that g, and with it which neurons
are active, is exact too.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.test_kernels import DEVICE, SEED, pytestmark, unwritten_memory_is_nan  # noqa: F401
from twell.kernels import common, hybrid
from twell.sparse import reference

NAMES = (
    "y",
    "l1",
    "token_counts",
    "neuron_counts",
    "dx",
    "dw_gate",
    "dw_up",
    "dw_down_t",
    "db_gate",
    "db_up",
)


def integer_step(
    num_tokens,
    num_neurons,
    hidden_size=48,
    *,
    pattern="even",
    values="integer",
    seed=SEED,
    **changes,
):
    """Tensors of a layer, dy, dl1 and a token mask."""
    case = fuzz.Case(
        "",
        num_tokens,
        num_neurons,
        hidden_size,
        pattern=pattern,
        values=values,
        seed=seed,
        **changes,
    )
    t = fuzz.layer(case, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dy = torch.randint(-2, 3, (num_tokens, hidden_size), generator=generator, device=DEVICE).to(
        case.dtype
    )
    dl1 = torch.randint(-3, 4, (num_tokens,), generator=generator, device=DEVICE).float()
    mask = torch.rand(num_tokens, generator=generator, device=DEVICE) < 0.7
    return t, dy, dl1, mask


def forward(t, mask, capacity):
    return hybrid.forward(
        t["x"],
        t["w_gate"],
        t["w_up"],
        t["w_down"].t(),
        t["b_gate"],
        t["b_up"],
        t["b_down"],
        mask,
        capacity,
    )


def backward(t, saved, dy, dl1):
    given = t["x"], t["w_gate"], t["w_up"], t["w_down"].t(), t["b_gate"], t["b_up"]
    return hybrid.backward(
        *given, hybrid.Saved(*saved), dy, dl1, [tensor is not None for tensor in given]
    )


def step(t, dy, dl1, mask, capacity):
    """`needed` and all results by name."""
    y, l1, token_counts, neuron_counts, needed, *saved = forward(t, mask, capacity)
    return int(needed), dict(
        zip(NAMES, (y, l1, token_counts, neuron_counts, *backward(t, saved, dy, dl1)), strict=True)
    )


def exact_step(t, dy, dl1, mask):
    """All results of finite inputs in fp64, rounded where the kernels round; in the kernels' types."""
    dtype, gated = t["x"].dtype, t["w_gate"] is not None

    def rounded(value):
        return value.to(dtype).double()

    def gradient(value, name):
        return None if t[name] is None else value.to(dtype)

    d = {name: None if tensor is None else tensor.double() for name, tensor in t.items()}
    dy, dl1 = dy.double(), dl1.double()[:, None]
    first = torch.nn.functional.linear(
        d["x"], *((d["w_gate"], d["b_gate"]) if gated else (d["w_up"], d["b_up"]))
    )
    g = rounded(first.relu())
    u = (
        rounded(torch.nn.functional.linear(d["x"], d["w_up"], d["b_up"]))
        if gated
        else torch.ones_like(g)
    )
    h = rounded(g * u)
    dh = dy @ d["w_down"] + h.sign() * dl1
    du = rounded(dh * g if gated else dh * (g != 0))
    dg = rounded(dh * u * (g != 0))
    dx = du @ d["w_up"] + (dg @ d["w_gate"] if gated else 0)
    active = g != 0
    counted = active if mask is None else active[mask]
    results = (
        torch.nn.functional.linear(h, d["w_down"], d["b_down"]).to(dtype),
        h.abs().sum(1).float(),
        active.sum(1).int(),
        counted.sum(0).int(),
        dx.to(dtype),
        gradient(dg.t() @ d["x"], "w_gate"),
        gradient(du.t() @ d["x"], "w_up"),
        (h.t() @ dy).to(dtype),
        gradient(dg.sum(0), "b_gate"),
        gradient(du.sum(0), "b_up"),
    )
    return dict(zip(NAMES, results, strict=True))


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
    """How many neurons with these numbers of tokens have no room in a list, and the backup rows for them."""
    num_backup = hybrid.backup_rows(num_tokens, len(counts), capacity)
    heavy = counts > hybrid.list_width(num_tokens)
    return int(heavy.sum()), hybrid.transposed_rows(num_tokens, len(counts), num_backup)


def fits(counts, heavy_tokens, num_tokens, capacity):
    heavy, transposed_backup = heavy_neurons(counts, num_tokens, capacity)
    return (
        heavy_tokens <= hybrid.backup_rows(num_tokens, len(counts), capacity)
        and heavy <= transposed_backup
    )


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
        (9, 129, 48, "full", True),  # one more than a list has room for
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
    """Found by trying."""
    options = dict(pattern=pattern, gated=gated, biases=num_tokens != 33)
    options["dtype"] = torch.float16 if hidden_size == 48 else torch.bfloat16
    t, dy, dl1, mask = integer_step(num_tokens, num_neurons, hidden_size, **options)
    mask = None if hidden_size == 16 else mask
    expected = exact_step(t, dy, dl1, mask)
    counts = (
        expected["neuron_counts"] if mask is None else exact_step(t, dy, dl1, None)["neuron_counts"]
    )
    heavy_tokens = int((expected["token_counts"] > 128).sum())
    capacity = next(c for c in itertools.count() if fits(counts, heavy_tokens, num_tokens, c))
    needed, results = step(t, dy, dl1, mask, capacity)
    assert needed == capacity
    assert_equal(results, expected)
    if pattern == "edges":
        assert heavy_neurons(counts, num_tokens, capacity)[0] == 2


@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_close_to_autograd_in_fp64(gated, dtype):
    """Short and full rows, rare neurons and frequent ones: entries of all four kinds."""
    num_tokens, num_neurons, hidden_size = 130, 150, 48

    def grid(*shape, step):
        return torch.randn(shape, device=DEVICE).div(step).round().mul(step)

    x, first = (
        grid(num_tokens, hidden_size, step=0.25),
        grid(num_neurons, hidden_size, step=0.25) / 8,
    )
    x[:, 0], first[:, 0] = 1, -2
    x[:, 1], first[:, 1] = 0, 16
    x[::13, 1] = 1  # heavy tokens
    first[::30, 0] = 1  # frequent neurons, not active for every token
    second = torch.randn(num_neurons, hidden_size, device=DEVICE) / 8
    tensors = {
        "x": x,
        "w_gate": first if gated else None,
        "w_up": second if gated else first,
        "w_down": (torch.randn(num_neurons, hidden_size, device=DEVICE) / 16).t(),
        "b_gate": grid(num_neurons, step=0.25) / 4 if gated else None,
        "b_up": (torch.randn(num_neurons, device=DEVICE) if gated else grid(num_neurons, step=0.25))
        / 4,
        "b_down": torch.randn(hidden_size, device=DEVICE),
    }
    t = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}
    t["w_down"] = t["w_down"].t().contiguous().t()
    dy = torch.randn(num_tokens, hidden_size, device=DEVICE).to(dtype)
    dl1 = torch.randn(num_tokens, device=DEVICE)
    d = {
        name: None if tensor is None else tensor.double().requires_grad_()
        for name, tensor in t.items()
    }
    g = torch.nn.functional.linear(
        d["x"], *((d["w_gate"], d["b_gate"]) if gated else (d["w_up"], d["b_up"]))
    ).relu()
    h = g * torch.nn.functional.linear(d["x"], d["w_up"], d["b_up"]) if gated else g
    y, l1 = torch.nn.functional.linear(h, d["w_down"], d["b_down"]), h.abs().sum(1)
    ((y * dy.double()).sum() + (l1 * dl1.double()).sum()).backward()

    capacity = 13
    needed, results = step(t, dy, dl1, None, capacity)
    assert needed <= capacity
    counts = results["token_counts"]
    assert torch.equal(counts, (g != 0).sum(1).int())
    assert (counts > 128).any() and ((counts > 0) & (counts < 64)).any()
    assert heavy_neurons(results["neuron_counts"], num_tokens, capacity)[0] == 5
    expected = dict(
        y=y, l1=l1, dx=d["x"].grad, dw_up=d["w_up"].grad, dw_down_t=d["w_down"].grad.t()
    )
    expected["db_up"] = d["b_up"].grad
    if gated:
        expected |= dict(dw_gate=d["w_gate"].grad, db_gate=d["b_gate"].grad)
    for name, value in expected.items():
        error = fuzz.relative_rms(results[name], value.detach())
        assert error < (5e-3 if dtype == torch.bfloat16 else 1e-3), f"{name}: {error}"


def test_a_large_capacity_changes_nothing():
    t, dy, dl1, mask = integer_step(20, 140, 32, pattern="heavy", biases=True)
    t["x"][::9, 1] = 1
    assert_equal(step(t, dy, dl1, mask, 1000)[1], exact_step(t, dy, dl1, mask))


# Overflow


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 130, 1000, 16_384, 100_000])
@pytest.mark.parametrize("num_neurons", [1, 40, 300, 5632])
def test_needed_is_the_least_capacity_that_fits(num_tokens, num_neurons):
    for spread, part in itertools.product((0.0, 1.5, 4.0), (0.0, 0.001, 0.3, 1.0)):
        rate = torch.randn(num_neurons).mul(spread).add(-3).exp().clamp(max=1)
        counts = (rate * num_tokens).round().int().to(DEVICE)
        heavy_tokens = torch.tensor([round(part * num_tokens)], dtype=torch.int32, device=DEVICE)
        needed = torch.empty((), dtype=torch.int64, device=DEVICE)
        hybrid.find_needed(counts, heavy_tokens, num_tokens, needed)
        assert fits(counts, int(heavy_tokens), num_tokens, int(needed))
        assert needed == 0 or not fits(counts, int(heavy_tokens), num_tokens, int(needed) - 1)


@pytest.mark.parametrize("pattern", ["full", "heavy", "frequent"])
def test_overflow_is_told_and_stays_inside(pattern, monkeypatch):
    """Counts are right, tokens that had room have the right y, and nothing is written behind a buffer."""
    if pattern == "frequent":
        t, dy, dl1, mask = integer_step(70, 70, 32)
        t["w_gate"][::7, 0] = 40  # active for every token; a list of tokens has room for 64
    else:
        t, dy, dl1, mask = integer_step(24, 140, 32, pattern=pattern)
    if pattern == "heavy":
        t["x"][:10, 1] = 1
    expected = exact_step(t, dy, dl1, mask)
    needed = int(forward(t, mask, 1000)[4])
    assert needed > 2
    behind = []

    def guarded(*args):
        tensors = []
        for tensor in saved_like(*args):
            storage = tensor.new_full((tensor.numel() + 5000,), 77)
            behind.append(storage[tensor.numel() :])
            tensors.append(storage[: tensor.numel()].view(tensor.shape))
        return tensors

    saved_like = hybrid.saved_like
    monkeypatch.setattr(hybrid, "saved_like", guarded)
    for capacity in (0, needed - 1):
        told, results = step(t, dy, dl1, mask, capacity)
        assert told == needed
        assert_equal(results, expected, ("token_counts", "neuron_counts"))
        fine = expected["token_counts"] <= 128
        assert torch.equal(results["y"][fine], expected["y"][fine])
        assert torch.equal(results["dx"][fine], expected["dx"][fine])
        assert not torch.equal(results["dw_up"], expected["dw_up"])
        if pattern == "frequent":
            listed = exact_step(t, dy, dl1, None)["neuron_counts"] <= 64
            assert torch.equal(results["dw_up"][listed], expected["dw_up"][listed])
    assert behind and all(bool((rest == 77).all()) for rest in behind)
    told, results = step(t, dy, dl1, mask, needed)
    assert told == needed
    assert_equal(results, expected)


# What results do not depend on


def test_order_of_backup_rows_does_not_matter():
    t, dy, dl1, mask = integer_step(33, 140, 32, pattern="heavy", values="normal")
    t["x"][:, 1] = 0
    t["x"][::3, 1] = 1
    *_, needed, place, indices, g, u, tokens, used, dense_g, dense_u = forward(t, mask, 70)
    assert needed <= 70 and used == 11
    before = backward(t, [place, indices, g, u, tokens, used, dense_g, dense_u], dy, dl1)
    order = torch.randperm(int(used), device=DEVICE)
    rest = torch.arange(int(used), len(tokens), device=DEVICE)
    rows = torch.cat([order, rest])
    moved = place.clone()
    moved[tokens[order].long()] = ~torch.arange(int(used), dtype=torch.int32, device=DEVICE)
    after = backward(
        t, [moved, indices, g, u, tokens[rows], used, dense_g[rows], dense_u[rows]], dy, dl1
    )
    for a, b in zip(after, before, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_two_calls_give_the_same_bits():
    t, dy, dl1, mask = integer_step(70, 140, 32, pattern="heavy", values="normal", biases=True)
    t["x"][:, 1] = 0
    t["x"][::9, 1], t["w_gate"][::50, 0] = 1, 20  # some of every kind
    needed, results = step(t, dy, dl1, mask, 20)
    assert (
        needed <= 20
        and heavy_neurons(exact_step(t, dy, dl1, None)["neuron_counts"], 70, 20)[0] == 3
    )
    assert_equal(step(t, dy, dl1, mask, 20)[1], results)


def test_chunks_of_tokens_give_the_same_bits(monkeypatch):
    t, dy, dl1, mask = integer_step(260, 140, 16, pattern="empty")
    t["x"][:, 1] = 0
    t["x"][[3, 258], 1] = 1
    t["w_gate"][:, 1] = 400
    whole = step(t, dy, dl1, mask, 100)
    assert whole[0] <= 100 and whole[1]["y"][[3, 258]].any(1).all()
    monkeypatch.setattr(hybrid, "WORKSPACE_BYTES", 1)
    chunks = step(t, dy, dl1, mask, 100)
    assert chunks[0] == whole[0]
    assert_equal(chunks[1], whole[1])


def test_parts_of_columns_give_the_same_bits(monkeypatch):
    t, dy, dl1, mask = integer_step(17, 40, 80, pattern="skewed", biases=True)
    whole = step(t, dy, dl1, mask, 40)[1]
    monkeypatch.setattr(hybrid, "COLUMN_BYTES", 1)
    assert_equal(step(t, dy, dl1, mask, 40)[1], whole)


@pytest.mark.parametrize(
    "architecture", ["default", "sm_80", "sm_89", "sm_90"]
)  # the others have one of these
def test_every_configuration(architecture, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(common, "architecture", lambda device: architecture)
    t, dy, dl1, mask = integer_step(9, 140, 80, pattern="heavy", biases=True)
    t["x"][:, 1] = 0
    t["x"][4, 1] = 1
    needed, results = step(t, dy, dl1, mask, 100)
    assert needed <= 100
    assert_equal(results, exact_step(t, dy, dl1, mask))


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
    y, l1, l0, saved = reference.ffn_forward(**t)
    d = reference.ffn_backward(saved, dy, dl1)
    expected = (y, l1, l0, None, d.x, d.w_gate, d.w_up, d.w_down.t(), d.b_gate, d.b_up)
    assert_equal(
        results,
        dict(zip(NAMES, expected, strict=True)),
        [name for name in NAMES if name != "neuron_counts"],
    )
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
    t, dy, dl1, mask = integer_step(
        9, 140, 48, pattern="edges"
    )  # the first and the last neuron alone are active
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


# What is saved


@pytest.mark.parametrize("capacity", [0, 7, 300])
@pytest.mark.parametrize("gated", [True, False])
def test_saved_tensors_are_those_announced(gated, capacity):
    from torch._subclasses.fake_tensor import FakeTensorMode

    t, *_, mask = integer_step(20, 300, 32, gated=gated)
    *_, place, indices, g, u, tokens, used, dense_g, dense_u = forward(t, mask, capacity)
    saved = [place, indices, g, u, tokens, used, dense_g, dense_u]
    assert all(tensor.dtype in (torch.int16, torch.int32) for tensor in saved)
    assert u.numel() == g.numel() * gated and dense_u.numel() == dense_g.numel() * gated
    assert len(tokens) == len(dense_g) == max(1, -(-20 * capacity // 300))
    with FakeTensorMode() as mode:
        fake = hybrid.saved_like(mode.from_tensor(t["x"]), 300, capacity, gated)
    assert [(f.shape, f.dtype, f.device) for f in fake] == [
        (s.shape, s.dtype, s.device) for s in saved
    ]


def test_sizes_at_full_scale():
    """16,384 tokens of 5,632 neurons, 64 entries each: backup rows and lists take a small part of the dense layer."""
    num_backup = hybrid.backup_rows(16_384, 5632, 64)
    assert num_backup == 187
    assert hybrid.list_width(16_384) == 256 and hybrid.list_width(100) == 64
    assert hybrid.transposed_rows(16_384, 5632, num_backup) == 257
    assert hybrid.transposed_rows(16_384, 5632, 1) == 1
    assert hybrid.transposed_rows(100, 300, 100) == 300
