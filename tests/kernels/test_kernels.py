"""The layer by every path of inference, and the kernels that make bits and lists."""

import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.kernels import (
    DEVICE,
    OPERATORS,
    as_flags,
    as_words,
    bits,
    integer_case,
    random,
    run_as,
)
from tests.factories.ops import run
from twell.kernels import common, decode, few, gate, options, rowwise, union
from twell.kernels.paper.gate import gate_words

slow = pytest.mark.slow
seeds = [*range(SEED, SEED + 3), *(pytest.param(SEED + i, marks=slow) for i in range(3, 60))]
# Each path and each branch by the number of tokens. Few tokens decode with a program a neuron.
CASES = [("rowwise", 5, 60), ("twell", 5, 60), ("union", 9, 140), ("decode", 9, 140)]
CASES += [("decode", num_tokens, 60) for num_tokens in (1, 2, 3, 5)]


@pytest.fixture(autouse=True)
def plans_anew():
    """Tests change options, which plans keep."""
    for module in (few, decode):
        module.make_plan.cache_clear()
    yield
    for module in (few, decode):
        module.make_plan.cache_clear()


@pytest.mark.parametrize("seed", seeds)
def test_random_case(seed):
    fuzz.check(fuzz.draw(seed, large=False), DEVICE)


# Tokens, neurons and hidden size: below, at and above a tile of each.
SIZES = {
    "rowwise": [(0, 70, 48), (2, 1, 16), (3, 257, 80)],
    "twell": [(0, 70, 48), (2, 1, 16)],
    "union": [(0, 70, 48), (1, 1, 16), (130, 130, 80)],
    "decode": [(0, 70, 48), (1, 130, 16), (2, 1, 16), (3, 60, 48), (17, 33, 80), (130, 70, 48)],
}


@pytest.mark.parametrize("path, size", [(path, size) for path in SIZES for size in SIZES[path]])
def test_every_size_is_exact(path, size):
    sizes = dict(zip(("num_tokens", "intermediate_size", "hidden_size"), size, strict=True))
    gated = size[1] > 1
    assert fuzz.check(integer_case(path, **sizes, gated=gated, biases=gated), DEVICE) == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs its own configuration")
@pytest.mark.parametrize(
    "architecture", [*(pytest.param(a, marks=slow) for a in ("sm_80", "sm_89")), "sm_90"]
)
@pytest.mark.parametrize("path", OPERATORS)
def test_every_configuration_is_exact(path, architecture, monkeypatch):
    run_as(architecture, monkeypatch)
    for num_tokens in {"union": (66,), "decode": (2, 3, 30, 66, 260)}.get(path, (2,)):
        sizes = dict(num_tokens=num_tokens, intermediate_size=130, hidden_size=80)
        assert fuzz.check(integer_case(path, **sizes), DEVICE) == 0


@slow
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_more_flags_than_one_step_has(num_tokens, monkeypatch):
    run_as("sm_90", monkeypatch)
    sizes = dict(num_tokens=num_tokens, hidden_size=80, intermediate_size=600)
    assert fuzz.check(integer_case("decode", **sizes, pattern="full"), DEVICE) == 0


@pytest.mark.parametrize("pattern", ["even", "full", "edges", "empty"])
@pytest.mark.parametrize("joined", [1, 2, 4, 16])
def test_segments_that_share_tiles(joined, pattern, monkeypatch):
    """Also more than there are, and more neurons than a tile has places."""
    whole = few.options_by_tokens

    def of(kernel, *size):
        return whole(kernel, *size) | (dict(JOIN=joined, BN=32) if kernel == "few_up_" else {})

    monkeypatch.setattr(few, "options_by_tokens", of)
    sizes = dict(num_tokens=140, hidden_size=48, intermediate_size=650)
    assert fuzz.check(integer_case("decode", **sizes, pattern=pattern), DEVICE) == 0


# Non-finite values


@pytest.mark.parametrize("path, num_tokens, num_neurons", CASES)
@pytest.mark.parametrize("gated", [True, False])
def test_nan_reaches_its_own_row_only(path, num_tokens, num_neurons, gated):
    case = fuzz.Case(path, num_tokens, num_neurons, 48, gated=gated, pattern="skewed", seed=SEED)
    tensors = fuzz.layer(case, DEVICE)
    before = fuzz.run(case, tensors)
    place = num_tokens // 2
    tensors["x"][place, 7] = float("nan")
    after = fuzz.run(case, tensors)
    assert after[place].isnan().all()
    others = torch.arange(num_tokens, device=DEVICE) != place
    # Neurons that the NaN adds to the block are 0 for the others, but may change the order of sums.
    torch.testing.assert_close(after[others], before[others], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("path, num_tokens, num_neurons", CASES)
def test_weights_of_inactive_neurons_do_not_matter(path, num_tokens, num_neurons):
    """All but three neurons are inactive, the first and last too, which may fill up a step."""
    sizes = dict(num_tokens=num_tokens, intermediate_size=num_neurons)
    case = integer_case(path, **sizes, pattern="empty")
    tensors = fuzz.layer(case, DEVICE)
    busy = torch.tensor([5, 40, 41], device=DEVICE)
    tensors["w_gate"][busy] = tensors["x"][0].sign()  # active for the first token at least
    tensors["w_gate"][busy, 0] = 0  # the threshold of the others stands in this column
    before = fuzz.run(case, tensors)
    idle = torch.ones(num_neurons, dtype=torch.bool, device=DEVICE).index_fill(0, busy, False)
    tensors["w_up"][idle] = float("nan")
    tensors["w_down"][:, idle] = float("inf")
    assert before[0].any() and torch.equal(fuzz.run(case, tensors), before)


@pytest.mark.parametrize("path", OPERATORS)
def test_infinite_up_weights_reach_only_tokens_with_that_neuron_active(path):
    case = integer_case(path, num_tokens=9, intermediate_size=140, pattern="edges")
    tensors = fuzz.layer(case, DEVICE)
    # Neuron 7 becomes active for token 5 only.
    tensors["x"][:, 1] = 0
    tensors["x"][5, 1] = 1
    tensors["w_gate"][7] = 0
    tensors["w_gate"][7, 1] = 80
    before = fuzz.run(case, tensors)
    tensors["w_up"][7] = float("inf")
    after = fuzz.run(case, tensors)
    others = torch.arange(9, device=DEVICE) != 5
    assert torch.equal(after[others], before[others])
    assert not after[5].isfinite().any()


# Counting, chunks and blocks


def expected_activity(tensors):
    """Tokens, blocks of 64, active entries and entries of the blocks' unions."""
    active = fuzz.exact(tensors)[0].to(tensors["x"].dtype) != 0
    blocks = active.split(64)
    in_unions = sum(int(block.any(0).sum()) for block in blocks)
    return [len(active), len(blocks), int(active.sum()), in_unions]


@pytest.mark.parametrize(
    "path, num_tokens, gated, block_m",
    [
        ("rowwise", 66, True, 128),
        ("union", 66, False, 64),
        ("union", 130, True, 128),
        ("decode", 130, True, 128),
        ("decode", 17, True, 128),
        ("decode", 2, False, 128),
    ],
)
def test_activity_is_counted(path, num_tokens, gated, block_m, monkeypatch):
    monkeypatch.setattr(union, "block_tokens", lambda fp8: block_m)
    changes = dict(num_tokens=num_tokens, intermediate_size=33, hidden_size=16, gated=gated)
    tensors = fuzz.layer(integer_case(path, **changes, biases=True), DEVICE)
    before = torch.tensor([5, 2**40, 0, 7], device=DEVICE)
    activity = before.clone()
    run(path, *tensors.values(), activity=activity)
    assert (activity - before).tolist() == expected_activity(tensors)
    run(path, *{**tensors, "x": tensors["x"][:0]}.values(), activity=activity)
    assert (activity - before).tolist() == expected_activity(tensors)


CHUNKS = [
    pytest.param("rowwise", rowwise, "WORKSPACE_BYTES", 1, marks=slow),
    ("union", union, "WORKSPACE_BYTES", 1),
    ("decode", few, "MAX_TOKENS", 128),
]


@pytest.mark.parametrize("path, module, limit, value", CHUNKS)
def test_chunks_give_the_same_bits(path, module, limit, value, monkeypatch):
    num_tokens = 260
    changes = dict(num_tokens=num_tokens, intermediate_size=33, hidden_size=16, values="normal")
    tensors = fuzz.layer(integer_case(path, **changes, pattern="skewed"), DEVICE)
    activity = [torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    whole = run(path, *tensors.values(), activity=activity[0])
    monkeypatch.setattr(module, limit, value)
    assert torch.equal(run(path, *tensors.values(), activity=activity[1]), whole)
    assert torch.equal(*activity) and activity[0][0] == num_tokens


@pytest.mark.parametrize("num_neurons", [1, 5632, 65_536])
def test_workspace_of_a_chunk_is_bounded(num_neurons):
    """Where 256 tokens fit."""
    tokens, width = union.chunk_tokens(num_neurons), common.round_up(num_neurons, 256)
    lists = tokens // 64 * (width + 1 + -(-num_neurons // 64)) * 4
    assert tokens % 256 == 0
    assert 4 * tokens * width + tokens // 8 * width + lists <= union.WORKSPACE_BYTES
    tokens = rowwise.chunk_tokens(num_neurons)
    assert tokens % 256 == 0 and 6 * tokens * num_neurons <= rowwise.WORKSPACE_BYTES


# Bits and lists


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_a_gate_that_rounds_to_zero_is_inactive(dtype):
    x = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
    w = torch.zeros(3, 16, dtype=dtype, device=DEVICE)
    # The product is above 0 in fp32, and rounds to 0 in fp16 and bf16.
    x[:, 0], w[:, 0] = torch.finfo(dtype).smallest_normal, 2.0**-30
    for by_neuron in (True, False):
        g, words = gate.gate_bits(x, w, None, by_neuron=by_neuron)
        g = g.permute(0, 2, 1).flatten(0, 1) if by_neuron else g
        assert not g[:2, :3].any() and not (words[:, :3] if by_neuron else words[:2, :1]).any()
    assert not gate_words(x, w).any()


@pytest.mark.parametrize("nonfinite", ["", "nan", "inf"])
@pytest.mark.parametrize("num_tokens, num_neurons", [(1, 300), (32, 32), (65, 1), (130, 300)])
@pytest.mark.parametrize("by_neuron", [True, False])
def test_gate_bits(by_neuron, num_tokens, num_neurons, nonfinite):
    sizes = dict(num_tokens=num_tokens, intermediate_size=num_neurons, nonfinite=nonfinite)
    case = integer_case(**sizes, pattern="skewed", biases=num_tokens % 2 == 0)
    t = fuzz.layer(case, DEVICE)
    expected = fuzz.exact(t)[0]
    g, words = gate.gate_bits(t["x"], t["w_gate"], t["b_gate"], by_neuron=by_neuron)
    active = as_flags(words.t()).t() if by_neuron else as_flags(words)
    # Bits beyond M or N are 0 within a column of words; nothing reads the rest.
    if by_neuron:
        g, active = g.permute(0, 2, 1).flatten(0, 1), active[:, :num_neurons]
        assert not active[num_tokens:].any()
    else:
        active = active[:num_tokens, : -(-num_neurons // 32) * 32]
        assert not active[:, num_neurons:].any()
    g, active = g[:num_tokens, :num_neurons], active[:num_tokens, :num_neurons]
    rounded = expected.to(case.dtype).double()
    torch.testing.assert_close(g.double(), rounded, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(active, expected != 0)


@pytest.mark.parametrize("num_neurons, likely", [(1, 1.0), (31, 0.05), (70, 1.0), (300, 0.02)])
def test_lists_of_rows(num_neurons, likely):
    width = common.round_up(num_neurons, 256)
    g = (random(5, width) + 1).to(torch.bfloat16)
    active = random(width, 5).t() < likely
    active[:, num_neurons:] = False
    active[2], active[3, num_neurons - 1], active[4, 0] = False, True, True
    g[4, 0] = float("nan")
    packed = rowwise.make_lists(g, as_words(active.contiguous()), num_neurons)
    for row in range(5):
        neurons = active[row].nonzero().flatten()
        expected = (bits(g[row, neurons]).int() << 16) | neurons.int()
        assert packed[row, 0] == len(neurons)
        assert torch.equal(packed[row, 1 : 1 + len(neurons)], expected)


@pytest.mark.parametrize("num_neurons, likely", [(1, 1.0), (1500, 0.01), (5000, 0.5), (256, 1.0)])
@pytest.mark.parametrize("block_m", [64, 128])
def test_lists_are_sorted_complete_and_filled_up(block_m, num_neurons, likely):
    width, num_tokens = common.round_up(num_neurons, 256), 3 * block_m - 1
    step = options.launch_options(f"union_up_{block_m}", torch.device(DEVICE))["BN"]
    active = random(3, block_m, width) < likely / block_m
    active[1] = False
    active[1, block_m - 1, num_neurons - 1] = True
    words = as_words(active.view(-1, width).t().contiguous()).t().contiguous()
    activity = torch.tensor([1, 2, 3, 4], device=DEVICE)
    unions = union.empty_unions(num_tokens, num_neurons, block_m, torch.device(DEVICE))
    unions.queue.zero_()
    union.make_lists(words, unions, num_tokens, num_neurons, block_m, activity)
    active = active[:, :, :num_neurons]
    tiles = []
    for block in range(3):
        neurons = active[block].any(0).nonzero().flatten().tolist()
        expected = neurons + [neurons[0]] * (-len(neurons) % step) if neurons else []
        assert unions.counts[block] == len(neurons)
        assert unions.lists[block, : len(expected)].tolist() == expected
        tiles += [block * -(-num_neurons // step) + tile for tile in range(len(expected) // step)]
    assert unions.queue[0] == len(tiles)
    assert sorted(unions.queue[1 : 1 + len(tiles)].tolist()) == tiles
    in_unions = int(active.reshape(3, block_m // 64, 64, -1).any(2).sum())
    counts = num_tokens, -(-num_tokens // 64), int(active.sum()), in_unions
    assert activity.tolist() == [a + b for a, b in zip(counts, (1, 2, 3, 4), strict=True)]
