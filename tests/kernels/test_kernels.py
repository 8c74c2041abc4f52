"""The layer by every path of inference, and the kernels that make bits and lists.

tests/fuzz.py compares each case with fp64; with small integers the results are exact.
"""

from dataclasses import replace

import hypothesis
import pytest
import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.kernels import DEVICE, OPERATORS, integer_case, run_as
from tests.factories.ops import run
from twell.kernels import common, decode, dense, few, gate, rowwise, union
from twell.kernels import float8 as float8_kernels
from twell.kernels.paper.gate import COMPRESSIONS, gate_words
from twell.sparse import float8, ops
from twell.sparse.activations import get_activation

slow = pytest.mark.slow
NON_GATED, BIASED, HALF = {"gated": False}, {"biases": True}, {"dtype": torch.float16}
FP8, NAN, INF = {"fp8": True}, {"nonfinite": "nan"}, {"nonfinite": "inf"}


def act(activation, threshold):
    return {"activation": activation, "threshold": threshold, "pattern": "skewed"}


# Path, tokens, neurons and hidden size, below, at and above a tile of each; the activity is heavy
# where nothing else is said. Decoding has kernels for 1 token, for 2 and 3, and for blocks.
EXACT = [
    ("rowwise", 0, 70, 48, {}),
    ("rowwise", 2, 1, 16, NON_GATED),
    ("rowwise", 3, 257, 80, BIASED | HALF),
    ("rowwise", 3, 40, 16, act("drelu", 0.0) | INF),
    ("rowwise", 3, 40, 16, act("relu2", 1.5) | NON_GATED),
    ("rowwise", 3, 40, 48, FP8 | BIASED | NAN),
    ("twell", 0, 70, 48, {}),
    *(("twell", 2, 300, 48, {"pattern": "full", "compression": c} | NAN) for c in COMPRESSIONS),
    ("twell", 2, 257, 48, {"pattern": "tile", "compression": 2} | NON_GATED | BIASED | HALF),
    ("union", 0, 70, 48, {}),
    ("union", 1, 1, 16, NON_GATED),
    ("union", 130, 130, 80, BIASED | HALF | {"layout": "transposed"}),
    ("union", 19, 140, 48, {"pattern": "empty"} | INF),
    ("union", 9, 40, 16, act("relu", 1.5) | NON_GATED | NAN),
    ("union", 9, 40, 16, act("drelu", 1.5) | INF),
    ("union", 70, 140, 48, FP8 | BIASED | NAN),
    ("union", 9, 40, 48, FP8 | NON_GATED | {"pattern": "edges"}),
    ("dense", 19, 96, 48, FP8),
    ("dense", 19, 7, 48, FP8 | BIASED | NON_GATED),
    ("decode", 0, 70, 48, {}),
    ("decode", 1, 33, 16, BIASED | HALF),
    ("decode", 1, 20, 16, act("relu2", 0.0) | NON_GATED),
    ("decode", 1, 20, 48, FP8 | {"pattern": "full"} | INF),
    ("decode", 2, 1, 16, NON_GATED),
    ("decode", 3, 20, 48, act("drelu", 1.5) | NAN | {"layout": "offset"}),
    ("decode", 9, 40, 16, act("relu", 1.5) | BIASED | NAN),
    ("decode", 17, 33, 80, {"pattern": "full"} | INF),
    ("decode", 19, 140, 48, FP8 | BIASED | NAN),
]


@pytest.fixture(autouse=True)
def plans_anew():
    """Tests change options, which plans keep."""
    for module in (few, decode):
        module.make_plan.cache_clear()
    yield
    for module in (few, decode):
        module.make_plan.cache_clear()


def sizes(num_tokens, intermediate_size, hidden_size=48):
    return dict(num_tokens=num_tokens, intermediate_size=intermediate_size, hidden_size=hidden_size)


@hypothesis.given(fuzz.cases(large=DEVICE == "cuda"))
def test_random_case(case):
    fuzz.check(case, DEVICE)
    if DEVICE == "cpu":  # cuBLAS may round parts of a sum
        fuzz.check(replace(case, path="dense", fp8=False), DEVICE)
    if not case.fp8:
        path = "rowwise" if case.path == "twell" else case.path
        fuzz.check(replace(case, path=path, fp8=True, dtype=torch.bfloat16), DEVICE)


@pytest.mark.parametrize("path, num_tokens, num_neurons, hidden_size, changes", EXACT, ids=str)
def test_exact(path, num_tokens, num_neurons, hidden_size, changes):
    case = integer_case(path, **sizes(num_tokens, num_neurons, hidden_size))
    assert fuzz.check(replace(case, **changes), DEVICE) == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs its own configuration")
@pytest.mark.parametrize(
    "architecture", [*(pytest.param(a, marks=slow) for a in ("sm_80", "sm_89")), "sm_90"]
)
@pytest.mark.parametrize("path", OPERATORS)
def test_every_configuration_is_exact(path, architecture, monkeypatch):
    run_as(architecture, monkeypatch)
    tokens = {"union": [(66, 130)], "decode": [(2, 20), (30, 130), (140, 130)]}
    for num_tokens, num_neurons in tokens.get(path, [(2, 130)]):
        assert fuzz.check(integer_case(path, **sizes(num_tokens, num_neurons, 80)), DEVICE) == 0
    if path == "decode" and architecture == "sm_80":  # more flags than one step has
        assert fuzz.check(integer_case(path, **sizes(2, 600, 80), pattern="full"), DEVICE) == 0


# Each path and each kernel of decoding.
PATHS = [("rowwise", 5, 60), ("twell", 5, 60), ("union", 9, 140), ("decode", 9, 60)]
PATHS += [("decode", num_tokens, 20) for num_tokens in (1, 3)]


@pytest.mark.parametrize("path, num_tokens, num_neurons", PATHS)
def test_weights_of_inactive_neurons_do_not_matter(path, num_tokens, num_neurons):
    """All but four neurons are inactive, the first and last too, which may fill up a step.

    One of the four is active for the last token alone, and only that one sees its weights.
    """
    case = integer_case(path, **sizes(num_tokens, num_neurons), pattern="empty")
    t = fuzz.layer(case, DEVICE)
    busy = torch.tensor([5, 7, 10, 11], device=DEVICE)
    t["w_gate"][busy] = t["x"][0].sign()  # active for the first token at least
    t["w_gate"][busy, 0] = 0  # the threshold of the others stands in this column
    t["x"][:, 1], t["x"][-1, 1], t["w_gate"][7] = 0, 1, 0
    t["w_gate"][7, 1] = 80
    before = fuzz.run(case, t)
    idle = torch.ones(num_neurons, dtype=torch.bool, device=DEVICE).index_fill(0, busy, False)
    t["w_up"][idle], t["w_down"][:, idle] = float("nan"), float("inf")
    assert before[0].any() and torch.equal(fuzz.run(case, t), before)
    t["w_up"][7] = float("inf")
    after = fuzz.run(case, t)
    assert torch.equal(after[:-1], before[:-1]) and not after[-1].isfinite().any()


@pytest.mark.parametrize(
    "path, num_tokens", [("rowwise", 3), ("union", 9), ("decode", 1), ("decode", 9), ("dense", 3)]
)
def test_squares_overflow_in_fp16_on_every_path(path, num_tokens):
    """From g = 256 on, as torch's do, gated too, where h could be finite."""
    one, act = torch.eye(16, dtype=torch.float16, device=DEVICE), get_activation("relu2")
    up = one * 2.0**-10
    x = torch.zeros(num_tokens, 16, dtype=torch.float16, device=DEVICE)
    x[0, 3] = 200
    assert run(path, x, one, up, one.t(), act=act)[0, 3] == 200**2 * 200 / 2**10
    x[0, 3] = 260
    above = run(path, x, one, up, one.t(), act=act)[0, 3]
    assert above == torch.inf or (path == "dense" and not above.isfinite())


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


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name, threshold", [("relu", 0.0), ("relu2", 0.1), ("drelu", 2.5)])
def test_h_is_quantised_as_it_would_be_after_it_was_stored(name, threshold, gated):
    act = get_activation(name, threshold)
    g = hard_rows(48)
    u = g.flip(0) if gated else None
    stored = float8.quantize(dense.relu_times(g.clone(), u, act))
    for values, expected in zip(float8_kernels.quantize(g, u, act), stored, strict=True):
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("size", [16, 48, 1040])
def test_rows_are_quantised_as_torch_rounds(size):
    rows = hard_rows(size)
    for given in (rows, rows[::2], rows[:, :16], rows.t()) if size == 48 else (rows,):
        values, scale = float8_kernels.quantize(given)
        expected, expected_scale = float8.quantize(given.contiguous())
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale.view(torch.int32), expected_scale.view(torch.int32))
    values, scale = float8_kernels.quantize(rows)
    assert scale.isnan().nonzero().flatten().tolist() == [1, 2]
    # The reference, from its definition: no value is further than half a step of FP8 away.
    finite = ~scale.isnan()
    wide = values.double() * scale.double()[:, None]
    step = torch.maximum(rows.double().abs() / 8, scale.double()[:, None] * 2.0**-9)
    assert ((wide - rows.double()).abs() <= step / 2 * (1 + 1e-6))[finite].all()
    assert (values.float().abs().amax(1) == 448)[rows.float().abs().amax(1) > 1e-11].sum() >= 30


# Counting and chunks


@pytest.mark.parametrize(
    "path, num_tokens, changes, block_m",
    [
        ("rowwise", 66, {"pattern": "skewed"}, 128),
        ("union", 66, NON_GATED, 64),
        ("union", 130, act("relu", 1.5), 128),
        ("union", 17, FP8, 128),
        ("decode", 130, act("relu", 1.5), 128),
        ("decode", 2, NON_GATED | {"pattern": "full"}, 128),
    ],
)
def test_activity_is_counted(path, num_tokens, changes, block_m, monkeypatch):
    """Tokens, blocks of 64, active entries and entries of the blocks' unions."""
    monkeypatch.setattr(union, "block_tokens", lambda *_, **__: block_m)
    case = replace(integer_case(path, **sizes(num_tokens, 33, 16), biases=True), **changes)
    given = tensors = fuzz.layer(case, DEVICE)
    if case.fp8:
        given, tensors = fuzz.quantized(case, tensors)
    active = fuzz.exact(tensors, act=case.act)[0].to(case.dtype) != 0
    blocks = active.split(64)
    in_unions = sum(int(block.any(0).sum()) for block in blocks)
    before = torch.tensor([5, 2**40, 0, 7], device=DEVICE)
    activity = before.clone()
    arguments = [given.get(name) for name in ops.TENSORS]
    run(path, *arguments, act=case.act, activity=activity)
    assert active.any()
    expected = [num_tokens, len(blocks), int(active.sum()), in_unions]
    assert (activity - before).tolist() == expected


@pytest.mark.parametrize(
    "path, module, limit, value",
    [
        pytest.param("rowwise", rowwise, "WORKSPACE_BYTES", 1, marks=slow),
        ("union", union, "WORKSPACE_BYTES", 1),
        ("decode", few, "MAX_TOKENS", 128),
    ],
)
def test_chunks_give_the_same_bits(path, module, limit, value, monkeypatch):
    case = integer_case(path, **sizes(260, 33, 16), values="normal", pattern="skewed")
    tensors = fuzz.layer(case, DEVICE)
    activity = [torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    whole = run(path, *tensors.values(), activity=activity[0])
    monkeypatch.setattr(module, limit, value)
    assert torch.equal(run(path, *tensors.values(), activity=activity[1]), whole)
    assert torch.equal(*activity) and activity[0][0] == 260


# Bits


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
