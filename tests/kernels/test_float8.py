"""Kernels in FP8: rows are quantised as torch rounds, and every path computes the reference."""

import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories import ops as factories
from tests.factories.kernels import DEVICE, integer_case
from tests.factories.ops import run
from twell.kernels import float8 as kernels
from twell.sparse import float8

PRODUCT = float8._product
PATHS = pytest.mark.parametrize("path", factories.PATHS)
slow = pytest.mark.slow


def padded_product(x, x_scale, w, w_scale):
    """As on a GPU: torch's own product, or on a CPU one with its rules."""
    if x.is_cuda:
        return PRODUCT(x, x_scale, w, w_scale)
    assert len(w) % 16 == 0 and x.shape[1] % 16 == 0 and x.is_contiguous() and w.is_contiguous()
    return ((x.float() @ w.float().t()) * (w_scale * x_scale[:, None])).bfloat16()


def hard_rows(size):
    """Rows of every size, and zeros, the smallest and largest numbers, NaN and inf."""
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randn(40, size, generator=generator)
    rows *= 10.0 ** torch.randint(-12, 12, (40, 1), generator=generator)
    rows[0], rows[1, 0], rows[2, -1] = 0, float("nan"), float("-inf")
    rows[3], rows[4] = 1e-40, 3e38
    rows[5], rows[6, 0] = 0, 448.0  # alone in its row, at the end of the range
    rows[7] = torch.linspace(-448, 448, size)  # with ties
    return rows.bfloat16().to(DEVICE)


@pytest.mark.parametrize("size", [16, 48, 1040])
def test_rows_are_quantised_as_torch_rounds(size):
    rows = hard_rows(size)
    values, scale = kernels.quantize(rows)
    expected, expected_scale = float8.quantize(rows)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale.view(torch.int32), expected_scale.view(torch.int32))
    assert scale.isnan().nonzero().flatten().tolist() == [1, 2]
    # The reference, from its definition: no value is further than half a step of FP8 away.
    finite = ~scale.isnan()
    wide = values.double() * scale.double()[:, None]
    step = torch.maximum(rows.double().abs() / 8, scale.double()[:, None] * 2.0**-9)
    assert ((wide - rows.double()).abs() <= step / 2 * (1 + 1e-6))[finite].all()
    assert (values.float().abs().amax(1) == 448)[rows.float().abs().amax(1) > 1e-11].sum() >= 30


def test_rows_with_strides_are_read_in_place():
    rows = hard_rows(64)
    for given in (rows[::2], rows[:, :16], rows.t()):
        plain = given.contiguous()
        results = zip(kernels.quantize(given), float8.quantize(plain), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in results)


@PATHS
@pytest.mark.parametrize(
    "num_tokens", [1, pytest.param(3, marks=slow), 17, pytest.param(70, marks=slow)]
)
@pytest.mark.parametrize("gated", [True, False])
def test_exact(path, num_tokens, gated):
    biases, by_rows = num_tokens > 3, path == "rowwise"  # slow in the interpreter: fewer tokens
    sizes = dict(num_tokens=min(num_tokens, 17), intermediate_size=100) if by_rows else {}
    sizes = dict(num_tokens=num_tokens) | sizes
    case = integer_case(path, **sizes, gated=gated, biases=biases, fp8=True)
    assert fuzz.check(case, DEVICE) == 0


@PATHS
@pytest.mark.parametrize(
    "pattern", ["empty", *(pytest.param(p, marks=slow) for p in ("full", "edges")), "heavy"]
)
@pytest.mark.parametrize(
    "nonfinite", [pytest.param("", marks=slow), "nan", pytest.param("inf", marks=slow)]
)
def test_hard_activity(path, pattern, nonfinite):
    """A NaN or inf in a row of x makes this row of y NaN and no other."""
    sizes = dict(num_tokens=3 if path == "rowwise" else 19, intermediate_size=140)
    case = integer_case(path, pattern=pattern, nonfinite=nonfinite, **sizes, fp8=True)
    assert fuzz.check(case, DEVICE) == 0


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("num_neurons", [96, 300, 7])  # torch's product wants a multiple of 16
def test_dense_is_exact(gated, biases, num_neurons, monkeypatch):
    monkeypatch.setattr(float8, "_product", padded_product)
    sizes = dict(num_tokens=19, intermediate_size=num_neurons)
    case = integer_case(gated=gated, biases=biases, **sizes, fp8=True)
    given, wide = fuzz.quantized(case, fuzz.layer(case, DEVICE))
    y = run("dense", *[given.get(name) for name in float8.Layer._fields])
    half = torch.bfloat16
    _, expected = fuzz.exact(wide, half, half, half, dense=True)
    assert torch.equal(y, expected.to(half))


@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
def test_random_case(seed):
    fuzz.check_number(seed, DEVICE, large=False, train=False, fp8=True)


def test_the_reference_is_close_to_the_layer_that_was_quantised():
    case = fuzz.Case("union", 40, 300, 128, seed=SEED)
    tensors = fuzz.layer(case, "cpu")
    given, _ = fuzz.quantized(case, tensors)
    given = [given.get(name) for name in float8.Layer._fields]
    _, expected = fuzz.exact(tensors)
    for y in (float8.ffn(*given), float8.dense(*given)):
        assert y.dtype == torch.bfloat16
        assert 1e-3 < fuzz.relative_rms(y, expected) < 0.2  # 8 bits of 16, and gates near zero


@PATHS
def test_activity_is_counted(path):
    case = integer_case(path, num_tokens=17, fp8=True)
    given, wide = fuzz.quantized(case, fuzz.layer(case, DEVICE))
    activity = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    run(path, *[given.get(name) for name in float8.Layer._fields], activity=activity)
    active = fuzz.exact(wide)[0] != 0
    assert activity.tolist() == [17, 1, int(active.sum()), int(active.any(0).sum())]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x_scale": None}, "x_scale is missing, and x is torch.float8_e4m3fn"),
        ({"s_up": None}, "s_up is missing"),
        ({"s_gate": torch.ones(7)}, r"s_gate has shape \(7,\)"),
        ({"w_gate": torch.ones(300, 48)}, "w_gate has dtype torch.float32"),
        ({"w_down": torch.ones(48, 300).half()}, "w_down_t has dtype torch.float16"),
        ({"x": torch.ones(70, 48).bfloat16()}, "x_scale is given, and x is torch.bf"),
    ],
)
def test_unfit_tensors_are_named(change, message):
    given, _ = fuzz.quantized(integer_case(), fuzz.layer(integer_case(), DEVICE))
    change = {name: t if t is None else t.to(DEVICE) for name, t in change.items()}
    tensors = [(given | change).get(name) for name in float8.Layer._fields]
    with pytest.raises((ValueError, TypeError), match=message):
        factories.PATHS["union"](*tensors)


def test_the_operator_obeys_the_rules_of_operators():
    given, _ = fuzz.quantized(integer_case(), fuzz.layer(integer_case(), DEVICE))
    tensors = tuple(given.get(name) for name in float8.Layer._fields)
    # The test of the schema multiplies, which torch cannot do in FP8.
    torch.library.opcheck(torch.ops.twell.ffn.default, tensors, test_utils=("test_faketensor",))
