"""The layer by every path of inference."""

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from tests.kernels.cases import (  # noqa: F401
    ALL_PATHS,
    DEVICE,
    FEW,
    PATHS,
    SEED,
    integer_case,
    pytestmark,
    seeds,
    unwritten_memory_is_nan,
)
from twell.kernels import ops, options


@seeds(100 if DEVICE == "cuda" else 40)
def test_random_case(seed):
    fuzz.check(fuzz.draw(seed, large=False), DEVICE)


@pytest.mark.parametrize("intermediate_size", [1, 70, 257, 300, 520])
@pytest.mark.parametrize("hidden_size", [16, 48, 80, 128])
@pytest.mark.parametrize("path", PATHS)
def test_every_width(path, hidden_size, intermediate_size):
    case = fuzz.Case(path, 2, intermediate_size, hidden_size, pattern="heavy", seed=SEED)
    fuzz.check(case, DEVICE)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 17, 70, 130, 300])
@pytest.mark.parametrize("path", ["union", "decode"])
def test_every_number_of_tokens(path, num_tokens):
    assert fuzz.check(integer_case(path, num_tokens=num_tokens, biases=True), DEVICE) == 0


@pytest.mark.parametrize("architecture", ["default", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("path", ALL_PATHS)
def test_every_configuration(path, architecture, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("a GPU runs its own configuration")
    monkeypatch.setattr(options, "architecture", lambda device: architecture)
    num_tokens = 130 if path in ("union", "decode") else 2
    assert fuzz.check(integer_case(path, num_tokens=num_tokens, hidden_size=80), DEVICE) == 0
    # Kernels for one and two tokens. All neurons active are more words of flags than one step has.
    for num_tokens in (1, 2) if path == "decode" else ():
        case = integer_case(
            path, num_tokens=num_tokens, hidden_size=80, intermediate_size=600, pattern="full"
        )
        assert fuzz.check(case, DEVICE) == 0


@pytest.mark.parametrize("path", ALL_PATHS)
def test_no_tokens(path):
    case = integer_case(path)
    tensors = fuzz.layer(case, DEVICE)
    tensors["x"] = tensors["x"][:0]
    y = fuzz.run(case, tensors)
    assert y.shape == (0, case.hidden_size) and y.dtype == case.dtype


# Non-finite values


@pytest.mark.parametrize("path, num_tokens", [*((path, 9) for path in ALL_PATHS), *FEW])
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
    # Neurons that the NaN adds to the block are 0 for the others, but may change the order of sums.
    torch.testing.assert_close(after[others], before[others], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("path, num_tokens", [*((path, 9) for path in ALL_PATHS), *FEW])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_inactive_neurons_do_not_matter(path, num_tokens, value):
    # Of "edges" only the first and the last neuron are active.
    case = integer_case(path, num_tokens=num_tokens, pattern="edges")
    tensors = fuzz.layer(case, DEVICE)
    before = fuzz.run(case, tensors)
    tensors["w_up"][1:-1] = value
    tensors["w_down"][:, 1:-1] = value
    assert torch.equal(fuzz.run(case, tensors), before)


@pytest.mark.parametrize("path, num_tokens", [*((path, 17) for path in ALL_PATHS), *FEW])
def test_what_fills_up_a_step_does_not_matter(path, num_tokens):
    """All but three neurons are inactive, the first and last too, with NaN in w_up and w_down."""
    case = integer_case(path, num_tokens=num_tokens, pattern="empty")
    tensors = fuzz.layer(case, DEVICE)
    busy = torch.tensor([5, 40, 41])
    tensors["w_gate"][busy] = tensors["x"][0].sign()  # active for the first token at least
    tensors["w_gate"][busy, 0] = 0  # the threshold of the others stands in this column
    before = fuzz.run(case, tensors)
    idle = torch.ones(case.intermediate_size, dtype=torch.bool).index_fill(0, busy, False)
    tensors["w_up"][idle] = float("nan")
    tensors["w_down"][:, idle] = float("nan")
    assert before[0].any() and torch.equal(fuzz.run(case, tensors), before)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_infinite_up_weights_reach_only_tokens_with_that_neuron_active(path):
    case = integer_case(path, num_tokens=9, pattern="edges")
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


# Counting


def expected_activity(tensors):
    """Tokens, blocks of 64, active entries and entries of the blocks' unions."""
    active = fuzz.exact(tensors)[0].to(tensors["x"].dtype) != 0
    blocks = active.split(64)
    in_unions = sum(int(block.any(0).sum()) for block in blocks)
    return [len(active), len(blocks), int(active.sum()), in_unions]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 64, 130])
@pytest.mark.parametrize("path", PATHS)
def test_activity_is_counted(path, num_tokens, gated):
    case = integer_case(
        path, num_tokens=num_tokens, intermediate_size=140, gated=gated, biases=True
    )
    tensors = fuzz.layer(case, DEVICE)
    before = torch.tensor([5, 2**40, 0, 7], device=DEVICE)
    activity = before.clone()
    y = ops.run(path, *tensors.values(), activity=activity)
    assert (activity - before).tolist() == expected_activity(tensors)
    assert torch.equal(y, ops.PATHS[path](**tensors))
    ops.run(path, *{**tensors, "x": tensors["x"][:0]}.values(), activity=activity)
    assert (activity - before).tolist() == expected_activity(tensors)
