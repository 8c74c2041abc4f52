"""Inference by rows: lists and chunks. tests/kernels/test_kernels.py has the layer."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    as_words,
    bits,
    integer_case,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import common, rowwise


@pytest.mark.parametrize("intermediate_size", [1, 31, 300])
@pytest.mark.parametrize("likely", [0.0, 0.05, 1.0])
def test_lists_of_rows(intermediate_size, likely):
    width = common.round_up(intermediate_size, 256)
    g = torch.randn(5, width, device=DEVICE).abs().to(torch.bfloat16)
    active = torch.rand(5, width, device=DEVICE) < likely
    active[:, intermediate_size:] = False
    active[2], active[3, intermediate_size - 1] = False, True
    g[4, 0] = float("nan")
    active[4, 0] = True
    packed = rowwise.make_lists(g, as_words(active), intermediate_size)
    for row in range(5):
        neurons = active[row].nonzero().flatten()
        expected = (bits(g[row, neurons]).int() << 16) | neurons.int()
        assert packed[row, 0] == len(neurons)
        assert torch.equal(packed[row, 1 : 1 + len(neurons)], expected)


def test_rows_in_chunks_give_the_same_bits(monkeypatch):
    case = integer_case("rowwise", num_tokens=260, intermediate_size=70, values="normal")
    tensors = fuzz.layer(case, DEVICE)
    whole = fuzz.run(case, tensors)
    monkeypatch.setattr(rowwise, "WORKSPACE_BYTES", 1)
    assert rowwise.chunk_tokens(70) == 256
    assert torch.equal(fuzz.run(case, tensors), whole)
