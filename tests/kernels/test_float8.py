"""Kernels in FP8: rows are quantised as torch rounds; test_kernels.py has the paths."""

from dataclasses import replace

import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.kernels import DEVICE, integer_case
from tests.factories.ops import run
from twell.kernels import float8 as kernels
from twell.sparse import float8


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


def arguments(case):
    """The tensors of a case in FP8 by the operator's order, and in fp64 by name."""
    given, wide = fuzz.quantized(case, fuzz.layer(case, DEVICE))
    return {name: given.get(name) for name in float8.Layer._fields}, wide


@pytest.mark.parametrize("size", [16, 48, 1040])
def test_rows_are_quantised_as_torch_rounds(size):
    rows = hard_rows(size)
    for given in (rows, rows[::2], rows[:, :16], rows.t()) if size == 48 else (rows,):
        values, scale = kernels.quantize(given)
        expected, expected_scale = float8.quantize(given.contiguous())
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale.view(torch.int32), expected_scale.view(torch.int32))
    values, scale = kernels.quantize(rows)
    assert scale.isnan().nonzero().flatten().tolist() == [1, 2]
    # The reference, from its definition: no value is further than half a step of FP8 away.
    finite = ~scale.isnan()
    wide = values.double() * scale.double()[:, None]
    step = torch.maximum(rows.double().abs() / 8, scale.double()[:, None] * 2.0**-9)
    assert ((wide - rows.double()).abs() <= step / 2 * (1 + 1e-6))[finite].all()
    assert (values.float().abs().amax(1) == 448)[rows.float().abs().amax(1) > 1e-11].sum() >= 30


@pytest.mark.parametrize("num_neurons, gated, biases", [(96, True, False), (7, False, True)])
def test_dense_is_exact(gated, biases, num_neurons):
    """A GPU's product wants a multiple of 16 neurons."""
    sizes = dict(num_tokens=19, intermediate_size=num_neurons)
    case = integer_case(gated=gated, biases=biases, **sizes, fp8=True)
    given, wide = arguments(case)
    half = torch.bfloat16
    _, expected = fuzz.exact(wide, half, half, half, dense=True)
    assert torch.equal(run("dense", *given.values()), expected.to(half))


@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
def test_random_case(seed):
    case = fuzz.draw(seed, large=False)
    path = "rowwise" if case.path == "twell" else case.path
    fuzz.check(replace(case, path=path, fp8=True, dtype=torch.bfloat16), DEVICE)


def test_the_reference_is_close_to_the_layer_that_was_quantised():
    case = fuzz.Case("union", 40, 300, 128, seed=SEED)
    given, _ = arguments(case)
    _, expected = fuzz.exact(fuzz.layer(case, DEVICE))
    for y in (float8.ffn(*given.values()), float8.dense(*given.values())):
        assert y.dtype == torch.bfloat16
        assert 1e-3 < fuzz.relative_rms(y, expected) < 0.2  # 8 bits of 16, and gates near zero
