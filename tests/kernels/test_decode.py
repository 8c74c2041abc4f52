"""Inference with few tokens: chunks and idle neurons. test_kernels.py has the layer."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    integer_case,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import common, decode, ops, options


def test_decoding_reads_no_weights_of_idle_neurons():
    assert decode.MAX_TOKENS == 64
    case = integer_case("decode", num_tokens=2, pattern="empty", biases=True)
    tensors = fuzz.layer(case, DEVICE)
    y = fuzz.run(case, tensors)
    assert torch.equal(y, tensors["b_down"].expand_as(y))


def test_chunks_of_decoding_give_the_same_bits(monkeypatch):
    case = integer_case("decode", num_tokens=150, values="normal", biases=True)
    tensors = fuzz.layer(case, DEVICE)
    activity = [torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    expected = ops.run("decode", *tensors.values(), activity=activity[0])
    monkeypatch.setattr(decode, "WORKSPACE_BYTES", 1)
    assert decode.chunk_tokens(48, 140, torch.device(DEVICE)) == 64
    assert torch.equal(ops.run("decode", *tensors.values(), activity=activity[1]), expected)
    assert torch.equal(*activity) and activity[0][0] == 150


@pytest.mark.parametrize(
    "hidden_size, intermediate_size", [(16, 1), (2048, 5632), (16_384, 65_536)]
)
def test_decoding_many_tokens_is_bounded(hidden_size, intermediate_size):
    """Lists and h of a chunk stay below the workspace, and the grid below 65,536 blocks."""
    device = torch.device("cpu")
    tokens = decode.chunk_tokens(hidden_size, intermediate_size, device)
    columns = hidden_size // options.launch_options("decode_down", device)["BN"]
    width = common.round_up(intermediate_size, 64)
    assert tokens % 64 == 0 and 64 <= tokens <= 64 * 65_535
    workspace = tokens // 64 * width * (64 * 2 + columns * 4)
    assert tokens == 64 or workspace <= decode.WORKSPACE_BYTES
    assert tokens * width < 2**31
