"""The kernels at small shapes, in Triton's interpreter where there is no GPU.

Exact equality where they pack and where values are small integers; close to fp64 where they sum.
"""

import functools
import os
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from twell.kernels import common, decode, dense, gate, ops, options, pack, rowwise, union
from twell.sparse import formats as format
from twell.sparse import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One for all workers of pytest-xdist; it is part of every case that a failure prints.
SEED = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(10**6)
PATHS = sorted(ops.PATHS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not common.INTERPRETED,
        reason="the kernels were imported without TRITON_INTERPRET=1",
    ),
]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """torch.empty gives NaN and the largest integers, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def seeds(number):
    return pytest.mark.parametrize("seed", range(SEED, SEED + number))


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def integer_case(path="union", seed=SEED, **changes):
    return replace(
        fuzz.Case(path, 70, 300, 48, values="integer", pattern="heavy", seed=seed), **changes
    )


# The layer


@seeds(100 if DEVICE == "cuda" else 40)
def test_random_case(seed):
    case = fuzz.draw(seed, large=False)
    fuzz.check(case, DEVICE)


@pytest.mark.parametrize("intermediate_size", [1, 70, 257, 300, 520])
@pytest.mark.parametrize("hidden_size", [16, 48, 80, 128])
@pytest.mark.parametrize("path", PATHS)
def test_every_width(path, hidden_size, intermediate_size):
    fuzz.check(
        fuzz.Case(path, 2, intermediate_size, hidden_size, pattern="heavy", seed=SEED), DEVICE
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 17, 70, 130, 300])
@pytest.mark.parametrize("path", ["union", "decode"])
def test_every_number_of_tokens(path, num_tokens):
    assert fuzz.check(integer_case(path, num_tokens=num_tokens, biases=True), DEVICE) == 0


@pytest.mark.parametrize("dtype", common.DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("compression", gate.COMPRESSIONS)
@pytest.mark.parametrize("pattern", ["full", "heavy", "tile", "edges"])
def test_overflow_is_exact(pattern, compression, gated, dtype):
    case = integer_case(
        "rowwise",
        num_tokens=2,
        pattern=pattern,
        compression=compression,
        gated=gated,
        dtype=dtype,
        biases=True,
    )
    assert fuzz.check(case, DEVICE) == 0


@pytest.mark.parametrize("architecture", ["default", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("path", PATHS)
def test_every_configuration(path, architecture, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(options, "architecture", lambda device: architecture)
    assert (
        fuzz.check(
            integer_case(path, num_tokens=2 if path == "rowwise" else 130, hidden_size=80), DEVICE
        )
        == 0
    )
    if (
        path == "decode"
    ):  # other kernels; all neurons active are more words of flags than one step takes
        for num_tokens in (1, 2):
            case = integer_case(
                path, num_tokens=num_tokens, hidden_size=80, intermediate_size=600, pattern="full"
            )
            assert fuzz.check(case, DEVICE) == 0


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens(path):
    case = integer_case(path)
    tensors = fuzz.layer(case, DEVICE)
    tensors["x"] = tensors["x"][:0]
    y = fuzz.run(case, tensors)
    assert y.shape == (0, case.hidden_size) and y.dtype == case.dtype


# Numbers of tokens that other kernels compute, or that they compute otherwise.
FEW = [("decode", num_tokens) for num_tokens in (1, 2, 3, 4)]


@pytest.mark.parametrize("path, num_tokens", [*((path, 9) for path in PATHS), *FEW])
@pytest.mark.parametrize("gated", [True, False])
def test_nan_reaches_its_own_row_only(path, num_tokens, gated):
    case = fuzz.Case(path, num_tokens, 300, 48, gated=gated, pattern="skewed", seed=SEED)
    tensors = fuzz.layer(case, DEVICE)
    before = fuzz.run(case, tensors)
    place = num_tokens // 2
    tensors["x"][place, 7] = float("nan")
    after = fuzz.run(case, tensors)
    assert after[place].isnan().all()
    others = torch.arange(num_tokens, device=DEVICE) != place
    # Neurons that the NaN adds to the block hold no value for the others, but may change the order of their
    # sums.
    torch.testing.assert_close(after[others], before[others], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("path, num_tokens", [*((path, 9) for path in PATHS), *FEW])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_inactive_neurons_do_not_matter(path, num_tokens, value):
    case = integer_case(
        path, num_tokens=num_tokens, pattern="edges"
    )  # only the first and the last neuron are active
    tensors = fuzz.layer(case, DEVICE)
    before = fuzz.run(case, tensors)
    tensors["w_up"][1:-1] = value
    tensors["w_down"][:, 1:-1] = value
    assert torch.equal(fuzz.run(case, tensors), before)


@pytest.mark.parametrize("path, num_tokens", [*((path, 17) for path in PATHS), *FEW])
def test_what_fills_up_a_step_does_not_matter(path, num_tokens):
    """Each neuron but three is idle for all tokens, the first and the last one too, and has a NaN in w_up and w_down."""
    case = integer_case(path, num_tokens=num_tokens, pattern="empty")
    tensors = fuzz.layer(case, DEVICE)
    busy = torch.tensor([5, 40, 41])
    tensors["w_gate"][busy] = tensors["x"][0].sign()  # active for the first token at least
    tensors["w_gate"][busy, 0] = 0  # what keeps all others idle stands in the first column
    before = fuzz.run(case, tensors)
    idle = torch.ones(case.intermediate_size, dtype=torch.bool).index_fill(0, busy, False)
    tensors["w_up"][idle] = float("nan")
    tensors["w_down"][:, idle] = float("nan")
    assert before[0].any() and torch.equal(fuzz.run(case, tensors), before)


@pytest.mark.parametrize("path", PATHS)
def test_infinite_up_weights_reach_only_tokens_with_that_neuron_active(path):
    case = integer_case(path, num_tokens=9, pattern="edges")
    tensors = fuzz.layer(case, DEVICE)
    tensors["x"][:, 1] = 0
    tensors["x"][5, 1] = 1
    tensors["w_gate"][7, 1] = (
        80  # neuron 7 becomes active for token 5 only, for all the threshold of -212
    )
    tensors["w_gate"][7, 0] = 0
    tensors["w_gate"][7, 2:] = 0
    before = fuzz.run(case, tensors)
    tensors["w_up"][7] = float("inf")
    after = fuzz.run(case, tensors)
    others = torch.arange(9, device=DEVICE) != 5
    assert torch.equal(after[others], before[others])
    assert not after[5].isfinite().any()


def test_union_in_chunks_gives_the_same_bits(monkeypatch):
    case = integer_case("union", num_tokens=300, values="normal")
    tensors = fuzz.layer(case, DEVICE)
    whole = fuzz.run(case, tensors)
    monkeypatch.setattr(union, "WORKSPACE_BYTES", 1)
    assert union.chunk_tokens(case.intermediate_size) == 256
    assert torch.equal(fuzz.run(case, tensors), whole)


def test_blocks_of_64_and_of_128_tokens_agree(monkeypatch):
    case = integer_case("union", num_tokens=300, biases=True)
    assert union.block_tokens(300) == 128 and fuzz.check(case, DEVICE) == 0
    monkeypatch.setattr(union, "LARGE_BLOCK_TOKENS", 0)
    assert union.block_tokens(300) == 64 and fuzz.check(case, DEVICE) == 0


def test_rows_in_chunks_give_the_same_bits(monkeypatch):
    case = integer_case("rowwise", num_tokens=260, intermediate_size=70, values="normal")
    tensors = fuzz.layer(case, DEVICE)
    whole = fuzz.run(case, tensors)
    monkeypatch.setattr(rowwise, "WORKSPACE_BYTES", 1)
    assert torch.equal(fuzz.run(case, tensors), whole)


@pytest.mark.parametrize("intermediate_size", [1, 2816, 5632, 65_536])
def test_union_workspace_stays_below_its_bound(intermediate_size):
    size = union.chunk_tokens(intermediate_size)
    width = common.round_up(intermediate_size, 256)
    assert size % 256 == 0
    g_and_h = 2 * 2 * size * width
    bits = size // 32 * width * 4
    blocks = size // 64
    lists = blocks * (width + 1 + -(-intermediate_size // 64)) * 4
    assert g_and_h + bits + lists <= union.WORKSPACE_BYTES


# What kernels hand on to the next


@pytest.mark.parametrize("num_tokens", [0, 1, 70, 130])
@pytest.mark.parametrize("intermediate_size", [1, 257, 520])
@pytest.mark.parametrize("compression", gate.COMPRESSIONS)
@pytest.mark.parametrize("pattern", ["even", "heavy"])
def test_gate_words_are_those_of_the_format(num_tokens, intermediate_size, compression, pattern):
    case = integer_case(
        num_tokens=130, intermediate_size=intermediate_size, pattern=pattern, biases=True
    )
    t = fuzz.layer(case, DEVICE)
    x = t["x"][:num_tokens]
    g = torch.relu(x.double() @ t["w_gate"].double().t() + t["b_gate"].double()).to(x.dtype)
    expected = format.PackedTwELL.pack(g, compression=compression)
    assert torch.equal(gate.gate_words(x, t["w_gate"], t["b_gate"], compression), expected.words)


def test_gate_words_of_a_nan_row():
    t = fuzz.layer(integer_case(nonfinite="nan"), DEVICE)
    tiles = gate.gate_words(t["x"], t["w_gate"])[35].view(2, 32)
    assert tiles[:, 0].tolist() == [
        256,
        300 - 256,
    ]  # neurons beyond the last are not active, not even here
    assert torch.equal(
        tiles[:, 1:] & 0xFFFF,
        torch.arange(31, device=DEVICE) + torch.tensor([[0], [256]], device=DEVICE),
    )
    assert (tiles[:, 1:] >> 16).to(torch.int16).view(torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_a_gate_that_rounds_to_zero_is_inactive(dtype):
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.zeros(2, 16, dtype=dtype, device=DEVICE)
    w = torch.zeros(3, 16, dtype=dtype, device=DEVICE)
    x[:, 0], w[:, 0] = (
        tiny,
        2.0**-30,
    )  # the product is above 0 in fp32 for fp16, and far below any bf16
    for by_neuron in (True, False):
        g, words = gate.gate_bits(x, w, None, by_neuron=by_neuron)
        g = g.t() if by_neuron else g
        assert not g[:2, :3].any() and not (words[:, :3] if by_neuron else words[:2, :1]).any()
    assert not gate.gate_words(x, w).any()


def unpacked(words):
    """[M, W] int32 -> [M, 32 W] bool."""
    place = torch.arange(32, dtype=torch.int32, device=words.device)
    return (((words[:, :, None] >> place) & 1) != 0).reshape(len(words), -1)


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
    bias = t["b_gate"].double() if biases else None
    exact = torch.relu(torch.nn.functional.linear(t["x"].double(), t["w_gate"].double(), bias))
    g, words = gate.gate_bits(t["x"], t["w_gate"], t["b_gate"], by_neuron=by_neuron)
    active = unpacked(words.t()).t() if by_neuron else unpacked(words)
    if by_neuron:
        g, active = g.t(), active[:, :intermediate_size]  # beyond these rows of bits nobody reads
        assert not active[num_tokens:].any()
    else:
        active = active[:num_tokens, : -(-intermediate_size // 32) * 32]
        assert not active[:, intermediate_size:].any()
    g, active = g[:num_tokens, :intermediate_size], active[:num_tokens, :intermediate_size]
    torch.testing.assert_close(
        g.double(), exact.to(case.dtype).double(), rtol=0, atol=0, equal_nan=True
    )
    assert torch.equal(active, exact != 0)


@pytest.mark.parametrize("intermediate_size", [1, 256, 1500, 5000])
@pytest.mark.parametrize("likely", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("block_m", [64, 128])
def test_lists_are_sorted_complete_and_filled_up(block_m, intermediate_size, likely):
    width = common.round_up(intermediate_size, 256)
    step = common.config(f"union_up_{block_m}", torch.device(DEVICE))["BN"]
    active = torch.rand(3, block_m, width, device=DEVICE) < likely / block_m
    active[1] = False
    active[1, block_m - 1, intermediate_size - 1] = True
    place = torch.arange(32, device=DEVICE)[:, None]
    words = (
        (active.view(3, block_m // 32, 32, width).long() << place)
        .sum(2)
        .to(torch.int32)
        .view(-1, width)
    )
    activity = torch.tensor([1, 2, 3, 4], device=DEVICE)
    num_tokens = 3 * block_m - 1
    tiles = union.queue(num_tokens, intermediate_size, block_m, torch.device(DEVICE)).zero_()
    lists, counts = union.make_lists(words, tiles, num_tokens, intermediate_size, block_m, activity)
    active = active[:, :, :intermediate_size]
    flags = active.any(1)
    max_tiles = -(-intermediate_size // step)
    queue = []
    for block in range(3):
        expected = flags[block].nonzero().flatten().tolist()
        assert counts[block] == len(expected)
        padding = [expected[0]] * (-len(expected) % step) if expected else []
        assert lists[block, : len(expected + padding)].tolist() == expected + padding
        queue += [block * max_tiles + tile for tile in range(-(-len(expected) // step))]
    assert tiles[0] == len(queue) and sorted(tiles[1 : 1 + len(queue)].tolist()) == queue
    in_unions = int(active.view(3, block_m // 64, 64, -1).any(2).sum())
    counted = [num_tokens, -(-num_tokens // 64), int(active.sum()), in_unions]
    assert (activity.tolist()) == [a + b for a, b in zip(counted, (1, 2, 3, 4), strict=True)]


@pytest.mark.parametrize("intermediate_size", [1, 31, 300])
@pytest.mark.parametrize("likely", [0.0, 0.05, 1.0])
def test_lists_of_rows(intermediate_size, likely):
    g = (
        torch.randn(5, common.round_up(intermediate_size, 256), device=DEVICE)
        .abs()
        .to(torch.bfloat16)
    )
    active = torch.rand(5, g.shape[1], device=DEVICE) < likely
    active[:, intermediate_size:] = False
    active[2], active[3, intermediate_size - 1] = False, True
    g[4, 0] = float("nan")
    active[4, 0] = True
    place = torch.arange(32, device=DEVICE)
    words = (active.view(5, -1, 32).long() << place).sum(2).to(torch.int32)
    packed = rowwise.make_lists(g, words, intermediate_size)
    for row in range(5):
        neurons = active[row].nonzero().flatten()
        expected = (bits(g[row, neurons]).int() << 16) | neurons.int()
        assert packed[row, 0] == len(neurons)
        assert torch.equal(packed[row, 1 : 1 + len(neurons)], expected)


# Packing


def dense_matrix(pattern, dtype, num_tokens=37, n_cols=300):
    dense = torch.randn(num_tokens, n_cols, device=DEVICE).to(dtype)
    likely = {"empty": 0.0, "sparse": 0.03, "half": 0.5, "full": 1.0}[pattern]
    dense[torch.rand(num_tokens, n_cols, device=DEVICE) >= likely] = 0
    dense[torch.rand(num_tokens, n_cols, device=DEVICE) < 0.05] *= -1  # also makes -0.0
    if num_tokens:
        dense[0] = 0
        dense[num_tokens // 2] = 1.5
        dense[-1] = 0
        dense[-1, 0], dense[-1, -1] = float("nan"), float("-inf")
        bits(dense)[-1, n_cols // 2] = (
            torch.iinfo(bits(dense).dtype).max - 5
        )  # a NaN with a payload
    return dense


def equal(a, b):
    """Assert that two objects of a format hold the same bits.

    b comes from the CPU: torch's deterministic assignment by index alters NaN payloads on a GPU.
    """
    a = a.to("cpu")
    for name in vars(b):
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(right, torch.Tensor):
            assert left.dtype == right.dtype and left.shape == right.shape, name
            assert torch.equal(
                left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            ), name
        elif isinstance(right, format.SparseRows):
            equal(left, right)
        else:
            assert left == right, name


def assert_round_trip(packed, dense):
    back = pack.unpack(packed)
    assert torch.equal(bits(back), bits(dense.masked_fill(dense == 0, 0)))


shapes = pytest.mark.parametrize("shape", [(0, 5), (1, 1), (19, 300), (3, 513)], ids=str)
patterns = pytest.mark.parametrize("pattern", ["empty", "sparse", "half", "full"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@shapes
@patterns
@dtypes
@pytest.mark.parametrize("tile", [(256, 8), (256, 2), (24, 3), (40, 40)], ids=str)
def test_pack_twell(shape, pattern, dtype, tile):
    dense = dense_matrix(pattern, dtype, *shape)
    packed = pack.to_twell(dense, *tile)
    equal(packed, format.TwELL.pack(dense.cpu(), *tile))
    assert_round_trip(packed, dense)


@shapes
@patterns
@pytest.mark.parametrize("dtype", common.DTYPES, ids=str)
@pytest.mark.parametrize("tile", [(256, 2), (256, 16), (12, 3)], ids=str)
def test_pack_packed_twell(shape, pattern, dtype, tile):
    dense = dense_matrix(pattern, dtype, *shape)
    packed = pack.to_packed_twell(dense, *tile)
    equal(packed, format.PackedTwELL.pack(dense.cpu(), *tile))
    assert_round_trip(packed, dense)


@shapes
@patterns
@dtypes
def test_pack_ell(shape, pattern, dtype):
    dense = dense_matrix(pattern, dtype, *shape)
    for width in (None, shape[1] + 7):
        packed = pack.to_ell(dense, width)
        equal(packed, format.ELL.pack(dense.cpu(), width))
        assert_round_trip(packed, dense)


@shapes
@patterns
@dtypes
@pytest.mark.parametrize("ell_width", [1, 16, 400])
def test_pack_hybrid(shape, pattern, dtype, ell_width):
    dense = dense_matrix(pattern, dtype, *shape)
    for backup_rows in (None, shape[0]):
        packed = pack.to_hybrid(dense, ell_width, backup_rows)
        equal(packed, format.Hybrid.pack(dense.cpu(), ell_width, backup_rows))
        assert_round_trip(packed, dense)
        assert_round_trip(packed.to("cpu").transpose().to(DEVICE), dense.t())


@shapes
@patterns
@dtypes
@pytest.mark.parametrize("block_m", [1, 5, 64])
def test_pack_union(shape, pattern, dtype, block_m):
    dense = dense_matrix(pattern, dtype, *shape)
    packed = pack.to_union(dense, block_m)
    equal(packed, format.TileUnion.pack(dense.cpu(), block_m))
    assert_round_trip(packed, dense)


def test_packing_refuses_what_does_not_fit():
    dense = dense_matrix("half", torch.bfloat16)
    with pytest.raises(ValueError, match="width of 300 is needed"):
        pack.to_ell(dense, 7)
    with pytest.raises(format.BufferOverflow, match="backup_rows=1") as problem:
        pack.to_hybrid(dense, 16, 1)
    assert problem.value.needed == int(((dense != 0).sum(1) > 16).sum())
    with pytest.raises(TypeError, match="float64"):
        pack.to_twell(dense.double())
    with pytest.raises(TypeError, match="float32"):
        pack.to_packed_twell(dense.float())
    with pytest.raises(ValueError, match="block_m=0"):
        pack.to_union(dense, 0)
    with pytest.raises(ValueError, match="compression=7"):
        pack.to_twell(dense, 256, 7)
    with pytest.raises(TypeError, match="float64"):
        pack.unpack(format.ELL.pack(dense.double()))


# Operators


def test_choice():
    assert [ops.choose(m) for m in (0, 1, 64, 65, 10**6)] == ["decode"] * 3 + ["union"] * 2


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda t: t.update(x=t["x"].float()), TypeError, "torch.float32"),
        (lambda t: t.update(x=t["x"][0]), ValueError, r"\(48,\)"),
        (lambda t: t.update(x=t["x"][:, :40]), ValueError, "hidden_size=40"),
        (lambda t: t.update(w_up=t["w_up"][:, :32]), ValueError, r"w_up has shape \(300, 32\)"),
        (lambda t: t.update(w_up=t["w_up"].half()), TypeError, "w_up has dtype torch.float16"),
        (
            lambda t: t.update(w_gate=t["w_gate"].t().contiguous().t()),
            ValueError,
            r"w_gate has strides \(1, 300\)",
        ),
        (
            lambda t: t.update(w_down=t["w_down"].contiguous()),
            ValueError,
            r"w_down has strides \(300, 1\)",
        ),
        (lambda t: t.update(b_up=t["b_up"][:5]), ValueError, r"b_up has shape \(5,\)"),
        (lambda t: t.update(b_down=t["b_down"].to("meta")), ValueError, "b_down is on meta"),
        (lambda t: t.update(w_gate=None), ValueError, "b_gate is given without w_gate"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_operators_refuse(path, change, error, message):
    tensors = fuzz.layer(integer_case(biases=True), DEVICE)
    change(tensors)
    with pytest.raises(error, match=message):
        ops.PATHS[path](**tensors)


def test_operators_refuse_compressions():
    with pytest.raises(ValueError, match="compression=3"):
        ops.ffn_rowwise(**fuzz.layer(integer_case(), DEVICE), compression=3)


@pytest.mark.parametrize("path", PATHS)
def test_weights_at_addresses_that_tensor_descriptors_do_not_take(path):
    tensors = fuzz.layer(integer_case(path), DEVICE)
    expected = ops.PATHS[path](**tensors)
    for name in ("w_gate", "w_up", "w_down"):
        w = tensors[name].t() if name == "w_down" else tensors[name]
        w = torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)
        assert w.data_ptr() % 16
        tensors[name] = w.t() if name == "w_down" else w
    assert torch.equal(ops.PATHS[path](**tensors), expected)


def test_chunks_of_decoding_give_the_same_bits(monkeypatch):
    tensors = fuzz.layer(
        integer_case("decode", num_tokens=150, values="normal", biases=True), DEVICE
    )
    activity = [torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    expected = ops.run("decode", *tensors.values(), activity=activity[0])
    monkeypatch.setattr(decode, "WORKSPACE_BYTES", 1)
    assert decode.chunk_tokens(48, 140, torch.device(DEVICE)) == 64
    assert torch.equal(ops.run("decode", *tensors.values(), activity=activity[1]), expected)
    assert torch.equal(*activity) and activity[0][0] == 150


def test_decoding_many_tokens_is_bounded():
    """Lists and h of a chunk stay below the workspace, and the grid below 65,536 blocks, at any size."""
    for hidden_size, intermediate_size in ((16, 1), (2048, 5632), (16_384, 65_536)):
        tokens = decode.chunk_tokens(hidden_size, intermediate_size, torch.device("cpu"))
        columns = hidden_size // common.config("decode_down", torch.device("cpu"))["BN"]
        width = common.round_up(intermediate_size, 64)
        assert tokens % 64 == 0 and 64 <= tokens <= 64 * 65_535
        assert (
            tokens == 64 or tokens // 64 * width * (64 * 2 + columns * 4) <= decode.WORKSPACE_BYTES
        )
        assert tokens * width < 2**31


def test_sharded_tensors_are_refused():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    tensors = fuzz.layer(integer_case("union", num_tokens=3), DEVICE)
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        tensors["w_up"] = distribute_tensor(tensors["w_up"], DeviceMesh(DEVICE, [0]), [Replicate()])
        with pytest.raises(TypeError, match="w_up is a DTensor, expected a plain tensor"):
            ops.run("union", *tensors.values())
    finally:
        destroy_process_group()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_operator_obeys_the_rules_of_operators(path, gated):
    tensors = fuzz.layer(integer_case(path, num_tokens=3, gated=gated, biases=gated), DEVICE)
    torch.library.opcheck(ops.PATHS[path], (), tensors)


@pytest.mark.parametrize("path", PATHS)
def test_compiled_as_one_graph(path):
    case = integer_case(path, num_tokens=3)
    tensors = fuzz.layer(case, DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def twice(x):
        y = ops.PATHS[path](x, *list(tensors.values())[1:])
        return y + 1

    for rows in (3, 2):
        x = tensors["x"][:rows]
        assert torch.equal(twice(x), fuzz.run(case, {**tensors, "x": x}) + 1)


def test_there_is_no_gradient():
    tensors = fuzz.layer(integer_case(), DEVICE)
    tensors["w_up"].requires_grad_()
    with pytest.raises(RuntimeError, match="autograd"):
        ops.ffn_union(**tensors).sum().backward()


def test_rowwise_reads_what_the_reference_reads():
    """From TwELL, in the format's own words."""
    case = fuzz.Case("rowwise", 9, 300, 48, dtype=torch.float16, pattern="skewed", seed=SEED)
    t = fuzz.layer(case, DEVICE)
    g = reference.gate_pack(t["x"], t["w_gate"])
    words = format.PackedTwELL.pack(g.unpack()).words
    y = rowwise.up_down(t["x"], words, t["w_gate"], t["w_up"], t["w_down"].t(), None, None, None, 8)
    expected = reference.up_down(t["x"], g, t["w_up"], t["w_down"])
    torch.testing.assert_close(y, expected, rtol=2**-9, atol=1e-4)


def test_decoding_reads_no_weights_of_idle_neurons():
    assert decode.MAX_TOKENS == 64
    case = integer_case("decode", num_tokens=2, pattern="empty", biases=True)
    tensors = fuzz.layer(case, DEVICE)
    y = fuzz.run(case, tensors)
    assert torch.equal(y, tensors["b_down"].expand_as(y))


# The dense path


def exact_dense(tensors, dtype=torch.float64):
    """y [M, K] in fp64, where g, u and h are rounded to `dtype`."""
    t = {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}

    def linear(name):
        return torch.nn.functional.linear(t["x"], t[f"w_{name}"], t[f"b_{name}"]).to(dtype).double()

    h = (
        linear("up").relu()
        if t["w_gate"] is None
        else (linear("gate").relu() * linear("up")).to(dtype).double()
    )
    return torch.nn.functional.linear(h, t["w_down"], t["b_down"])


@pytest.mark.parametrize("compute", [functools.partial(ops.run, "dense"), dense.plain])
@seeds(60)
def test_dense_path_in_a_random_case(compute, seed):
    case = fuzz.draw(seed, large=False)
    tensors = fuzz.layer(case, DEVICE)
    y = compute(*tensors.values())
    assert y.shape == tensors["x"].shape and y.dtype == case.dtype and y.is_contiguous()
    active, _ = fuzz.exact(tensors, None, None)
    few = int((active > 0).sum()) < fuzz.FEW  # a rounding error or two decide: see fuzz.check
    # cuBLAS may round parts of a sum, and once more before the bias.
    exact = case.values == "integer" and DEVICE == "cpu"
    if exact or few:
        slack = 0 if exact else 2.0**-6 if case.dtype == torch.bfloat16 else 2.0**-9
        expected = exact_dense(tensors, case.dtype).to(case.dtype)
        assert fuzz.relative_rms(y, expected.double()) <= slack, case
    else:
        assert fuzz.relative_rms(y, exact_dense(tensors)) <= fuzz.TOLERANCE[case.dtype], case


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_dense_product_of_every_kind_of_value(dtype):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -2.5, 3.0, 6e-8, 1e4]
    g, u = torch.tensor(special, dtype=dtype), torch.tensor(special, dtype=dtype)
    g, u = (part.contiguous().to(DEVICE) for part in torch.meshgrid(g, u, indexing="ij"))
    size = 77  # not all 81: what lies behind the end stays as it is
    expected = torch.cat(
        [(g.float().relu() * u.float()).to(dtype).flatten()[:size], g.flatten()[size:]]
    )
    dense.relu_times_kernel[(3,)](g, u, size, BLOCK=32)
    torch.testing.assert_close(g.flatten(), expected, rtol=0, atol=0, equal_nan=True)


def test_dense_path_of_several_programs_and_none():
    case = integer_case(num_tokens=31, intermediate_size=401, hidden_size=32)
    assert 31 * 401 > 3 * dense.BLOCK
    tensors = fuzz.layer(case, DEVICE)
    assert torch.equal(
        ops.run("dense", *tensors.values()), exact_dense(tensors, case.dtype).to(case.dtype)
    )
    assert ops.run("dense", *{**tensors, "x": tensors["x"][:0]}.values()).shape == (0, 32)


@pytest.mark.parametrize("gated", [True, False])
def test_the_dense_layer_compiled_is_the_eager_one(gated):
    tensors = fuzz.layer(integer_case(num_tokens=3, gated=gated, biases=gated), DEVICE)
    w_down = tensors["w_down"]
    with pytest.raises(ValueError, match=r"w_down has strides \(300, 1\)"):
        ops.run("dense", *{**tensors, "w_down": w_down.contiguous()}.values())
    rest = list(tensors.values())[1:]
    compiled = torch.compile(lambda x, *rest: ops.run("dense", x, *rest) + 1, fullgraph=True)
    assert torch.equal(compiled(tensors["x"], *rest), ops.run("dense", *tensors.values()) + 1)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="expected torch.bfloat16 or torch.float16"
    ):
        compiled(tensors["x"].float(), *rest)


# Counting


def counted(tensors):
    """Tokens, blocks of 64, active entries and entries of the blocks' unions, with the layer's own rounding."""
    w, b = ("w_up", "b_up") if tensors["w_gate"] is None else ("w_gate", "b_gate")
    bias = None if tensors[b] is None else tensors[b].double()
    g = torch.nn.functional.linear(tensors["x"].double(), tensors[w].double(), bias)
    active = g.relu().to(tensors["x"].dtype) != 0
    blocks = active.split(64)
    return [
        len(active),
        len(blocks),
        int(active.sum()),
        sum(int(block.any(0).sum()) for block in blocks),
    ]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("path", "num_tokens"), [(path, m) for path in PATHS for m in (1, 64, 130)]
)
def test_activity_is_counted(path, num_tokens, gated):
    case = integer_case(
        path, num_tokens=num_tokens, intermediate_size=140, gated=gated, biases=True
    )
    tensors = fuzz.layer(case, DEVICE)
    before = torch.tensor([5, 2**40, 0, 7], device=DEVICE)
    activity = before.clone()
    y = ops.run(path, *tensors.values(), activity=activity)
    assert (activity - before).tolist() == counted(tensors)
    assert torch.equal(y, ops.PATHS[path](**tensors))
    ops.run(path, *{**tensors, "x": tensors["x"][:0]}.values(), activity=activity)
    assert (activity - before).tolist() == counted(tensors)


def test_counting_refuses():
    tensors = fuzz.layer(integer_case(num_tokens=3), DEVICE)
    activity = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"activity is torch\.int32 \(4,\), expected torch\.int64 \(4,\)"
    ):
        ops.run("union", *tensors.values(), activity=activity.int())
    with pytest.raises(ValueError, match="activity is on meta"):
        ops.run("union", *tensors.values(), activity=activity.to("meta"))


@pytest.mark.parametrize("path", ["dense", *PATHS])
def test_run_under_compilation_is_the_operator(path):
    """Of dense layers torch's own, which the compiler can fuse."""
    tensors = fuzz.layer(integer_case(path, num_tokens=3), DEVICE)
    called: list[str] = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if "twell" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(
        lambda x: ops.run(path, x, *list(tensors.values())[1:]), fullgraph=True, backend=backend
    )
    assert torch.equal(compiled(tensors["x"]), ops.run(path, *tensors.values()))
    assert called == ([] if path == "dense" else [f"twell.ffn_{path}.default"])
