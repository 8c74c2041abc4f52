"""The gate: g and its bits, by tokens and by neurons."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    as_flags,
    integer_case,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import common, gate
from twell.kernels.paper.gate import gate_words


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_a_gate_that_rounds_to_zero_is_inactive(dtype):
    x = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
    w = torch.zeros(3, 16, dtype=dtype, device=DEVICE)
    # The product is above 0 in fp32, and rounds to 0 in fp16 and bf16.
    x[:, 0], w[:, 0] = torch.finfo(dtype).smallest_normal, 2.0**-30
    for by_neuron in (True, False):
        g, words = gate.gate_bits(x, w, None, by_neuron=by_neuron)
        g = g.t() if by_neuron else g
        assert not g[:2, :3].any() and not (words[:, :3] if by_neuron else words[:2, :1]).any()
    assert not gate_words(x, w).any()


@pytest.mark.parametrize("nonfinite", ["", "nan", "inf"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 32, 65, 300])
@pytest.mark.parametrize("intermediate_size", [1, 32, 300])
@pytest.mark.parametrize("by_neuron", [True, False])
def test_gate_bits(by_neuron, intermediate_size, num_tokens, biases, nonfinite):
    case = integer_case(
        num_tokens=num_tokens,
        intermediate_size=intermediate_size,
        pattern="skewed",
        biases=biases,
        nonfinite=nonfinite,
    )
    t = fuzz.layer(case, DEVICE)
    expected = fuzz.exact(t)[0]
    g, words = gate.gate_bits(t["x"], t["w_gate"], t["b_gate"], by_neuron=by_neuron)
    active = as_flags(words.t()).t() if by_neuron else as_flags(words)
    # Bits beyond M or N are 0 within a column of words; nothing reads the rest.
    if by_neuron:
        g, active = g.t(), active[:, :intermediate_size]
        assert not active[num_tokens:].any()
    else:
        active = active[:num_tokens, : -(-intermediate_size // 32) * 32]
        assert not active[:, intermediate_size:].any()
    g, active = g[:num_tokens, :intermediate_size], active[:num_tokens, :intermediate_size]
    rounded = expected.to(case.dtype).double()
    torch.testing.assert_close(g.double(), rounded, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(active, expected != 0)
