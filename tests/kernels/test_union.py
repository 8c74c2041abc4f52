"""Inference by unions: lists, blocks and chunks. tests/kernels/test_kernels.py has the layer."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    DEVICE,
    as_words,
    integer_case,
    pytestmark,
    unwritten_memory_is_nan,
)
from twell.kernels import common, options, union
from twell.kernels.gate import gate_bits


@pytest.mark.parametrize("intermediate_size", [1, 256, 1500, 5000])
@pytest.mark.parametrize("likely", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("block_m", [64, 128])
def test_lists_are_sorted_complete_and_filled_up(block_m, intermediate_size, likely):
    width = common.round_up(intermediate_size, 256)
    step = options.launch_options(f"union_up_{block_m}", torch.device(DEVICE))["BN"]
    active = torch.rand(3, block_m, width, device=DEVICE) < likely / block_m
    active[1] = False
    active[1, block_m - 1, intermediate_size - 1] = True
    words = as_words(active.view(-1, width).t().contiguous()).t().contiguous()
    activity = torch.tensor([1, 2, 3, 4], device=DEVICE)
    num_tokens = 3 * block_m - 1
    queue = union.queue(num_tokens, intermediate_size, block_m, torch.device(DEVICE)).zero_()
    unions = union.make_lists(words, queue, num_tokens, intermediate_size, block_m, activity)
    assert unions.queue is queue
    active = active[:, :, :intermediate_size]
    flags = active.any(1)
    max_tiles = -(-intermediate_size // step)
    tiles = []
    for block in range(3):
        neurons = flags[block].nonzero().flatten().tolist()
        assert unions.counts[block] == len(neurons)
        padding = [neurons[0]] * (-len(neurons) % step) if neurons else []
        expected = neurons + padding
        assert unions.lists[block, : len(expected)].tolist() == expected
        tiles += [block * max_tiles + tile for tile in range(-(-len(neurons) // step))]
    assert queue[0] == len(tiles) and sorted(queue[1 : 1 + len(tiles)].tolist()) == tiles
    in_unions = int(active.view(3, block_m // 64, 64, -1).any(2).sum())
    counts = num_tokens, -(-num_tokens // 64), int(active.sum()), in_unions
    assert activity.tolist() == [a + b for a, b in zip(counts, (1, 2, 3, 4), strict=True)]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("block_m", [64, 128])
def test_product_over_unions(block_m, biases, add):
    """The product of training: exact also where a token is inactive, plus a number for each."""
    case = integer_case(num_tokens=130, pattern="skewed", biases=biases)
    t = fuzz.layer(case, DEVICE)
    queue = union.queue(130, 300, block_m, torch.device(DEVICE))
    _, bits = gate_bits(t["x"], t["w_gate"], t["b_gate"], by_neuron=True, zero=queue)
    unions = union.make_lists(bits, queue, 130, 300, block_m)
    num_blocks = len(unions.counts)
    numbers = torch.arange(num_blocks * block_m, device=DEVICE).float() if add else None
    result = union.product(t["x"], t["w_up"], t["b_up"], unions, block_m, numbers)
    result = result.view(num_blocks, -1, block_m)
    u = torch.nn.functional.linear(
        t["x"].double(), t["w_up"].double(), None if t["b_up"] is None else t["b_up"].double()
    )
    u = u if numbers is None else u + numbers[:130, None]
    for block, rows in enumerate(u.to(case.dtype).split(block_m)):
        neurons = unions.lists[block, : unions.counts[block]].long()
        assert len(neurons) and torch.equal(
            result[block, : len(neurons), : len(rows)].t(), rows[:, neurons]
        )


def test_union_in_chunks_gives_the_same_bits(monkeypatch):
    case = integer_case("union", num_tokens=300, values="normal")
    tensors = fuzz.layer(case, DEVICE)
    whole = fuzz.run(case, tensors)
    monkeypatch.setattr(union, "WORKSPACE_BYTES", 1)
    assert union.chunk_tokens(case.intermediate_size) == 256
    assert torch.equal(fuzz.run(case, tensors), whole)


def test_blocks_of_64_and_of_128_tokens_agree(monkeypatch):
    case = integer_case("union", num_tokens=300, biases=True)
    assert options.block_tokens(300) == 128 and fuzz.check(case, DEVICE) == 0
    monkeypatch.setattr(options, "LARGE_BLOCK_TOKENS", 0)
    assert options.block_tokens(300) == 64 and fuzz.check(case, DEVICE) == 0


@pytest.mark.parametrize("intermediate_size", [1, 2816, 5632, 65_536])
def test_union_workspace_stays_below_its_bound(intermediate_size):
    size = union.chunk_tokens(intermediate_size)
    width = common.round_up(intermediate_size, 256)
    assert size % 256 == 0
    g_and_h = 2 * 2 * size * width
    bits = size // 32 * width * 4
    lists = size // 64 * (width + 1 + -(-intermediate_size // 64)) * 4
    assert g_and_h + bits + lists <= union.WORKSPACE_BYTES
