import copy
import math
import pickle
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from tests.factories.sparse import from_grid, random_grid, threshold
from twell.sparse import plan
from twell.sparse.calibration import BLOCK
from twell.sparse.plan import POWERS, Chooser

CPU, DENSE = torch.device("cpu"), ((POWERS[-1], "dense"),)


def make(**changes):
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold(**changes)
    return chooser


def call(chooser, num_tokens, active, union, times=1):
    """Eager calls that count as sparse ones do, with this mean union; the path of the last one."""
    for _ in range(times):
        due = chooser.begin(num_tokens)
        path, blocks = chooser.path(num_tokens), -(-num_tokens // BLOCK)
        counts = torch.tensor([num_tokens, blocks, num_tokens * active, blocks * union])
        chooser.counters(num_tokens, CPU).add_(counts)
        if due:
            chooser.end()
    return path


# --- the choice of a layer


def test_a_fresh_layer_is_dense_until_it_observes():
    chooser = make()
    assert chooser.plans["eager"] == DENSE and chooser.observed is None
    chooser.observe(2, 50)
    assert chooser.plans["eager"] == ((32, "decode"), (POWERS[-1], "union"))
    assert [chooser.path(m) for m in (1, 32, 33, 10**9)] == ["decode", "decode", "union", "union"]
    chooser.observe(1000, 1000)
    assert chooser.plans["eager"] == DENSE
    chooser.observe(2, 50)
    chooser.calibration = threshold(crossing=40.0)
    assert chooser.path(4096) == "dense"  # a new calibration, a new plan
    with pytest.raises(ValueError, match="intermediate_size=500.*intermediate_size=1000"):
        chooser.calibration = threshold(intermediate_size=500)


@pytest.mark.parametrize("repeat", range(3))
def test_the_plan_is_the_calibrations_choice_at_every_power(rng, repeat):
    rng.seed(repeat)
    chooser, active = Chooser(32, 1000, True), rng.uniform(1, 300)
    made = from_grid(random_grid(rng, tokens=(1, 8, 64, 512, 4096, 2**20)))
    chooser.calibration, union = made, rng.uniform(active, 1000)
    chooser.observe(active, union)
    for power in POWERS:
        share = math.log(min(power, BLOCK)) / math.log(BLOCK)
        expected = made.choices(power, active, active * (union / active) ** share)["graph"]
        assert chooser.path(power) == expected
        assert chooser.path(power // 2 + 1) == expected or power == 1
    paths = [path for _, path in chooser.plans["eager"]]
    assert all(a != b for a, b in pairwise(paths))


def test_unions_of_few_tokens_bound_those_of_more():
    chooser = make()
    chooser.observe(10, 10, tokens=1)  # of 8 tokens at most 80, of 16 at most 160
    assert [chooser.path(m) for m in (1, 8, 16, 4096)] == ["decode", "decode", "dense", "dense"]
    chooser.observe(0, 0, tokens=64)
    assert chooser.path(1) == "decode" and chooser.path(4096) == "union"


def test_impossible_observations_are_refused():
    for arguments, value in (
        ((-1, 5), "active is -1"),
        ((5, 1001), "union is 1001"),
        ((float("nan"), 5), "active is nan"),
        ((5, 5, 65), "tokens is 65"),
        ((5, 5, 0), "tokens is 0"),
    ):
        with pytest.raises(ValueError, match=value):
            Chooser(32, 1000, True).observe(*arguments)


# --- counting


def test_activity_is_adopted_at_fixed_numbers_of_calls():
    """At the calls 2, 4, 8 and so on of a class, of what was counted up to the one before these."""
    chooser, paths = make(), []
    for number in range(1, 17):
        activity = (2, 50) if number <= 4 else (500, 800)
        paths.append(call(chooser, 4096, *activity))
    assert paths == ["dense"] + ["union"] * 14 + ["dense"]  # the calls 5 to 8, at the 16th
    assert chooser.observed == (500, 800)
    assert [call(chooser, 1, 3, 3) for _ in range(3)] == ["dense", "decode", "decode"]
    assert call(chooser, 4096, 500, 800) == "dense"  # reading is observed apart from writing


def test_small_changes_leave_the_plan_as_it_is():
    chooser = make()
    call(chooser, 2**14, 3, 90)
    call(chooser, 2**14, 3, 104)
    before = chooser.plans["eager"]
    call(chooser, 2**14, 3, 104, times=2)
    assert chooser.plans["eager"] is before and chooser.path(4096) == "union"
    call(chooser, 2**14, 3, 120, times=12)
    assert chooser.path(4096) == "dense"


def test_watching_ends_where_the_plan_is_frozen():
    chooser = make()
    assert sum(chooser.begin(1) for _ in range(2560)) == 12  # 1, 2, 4, ... 2048
    chooser.freeze({1: (3, 3), 40: (2, 100)})
    plans = chooser.plans
    call(chooser, 4096, 500, 800, times=40)
    assert chooser.plans is plans and chooser.path(4096) == "union"
    assert not any(chooser.begin(4096) for _ in range(40))
    assert pickle.loads(pickle.dumps(chooser)).frozen
    chooser.freeze(None)
    call(chooser, 4096, 500, 800, times=2)
    assert chooser.path(4096) == "dense"


def test_counters_outlive_inference_mode_and_are_not_copied():
    chooser = make()
    with torch.inference_mode():
        counters = chooser.counters(70, CPU)
        counters += 1
    counters += 1
    assert counters.tolist() == [2] * 4 and counters.dtype == torch.int64
    assert chooser.counters(70, torch.device("meta")).device.type == "meta"
    assert chooser.counters(70, CPU).tolist() == [0] * 4

    chooser.observe(2, 50)
    call(chooser, 2**14, 3, 60)
    for again in (copy.deepcopy(chooser), pickle.loads(pickle.dumps(chooser))):
        assert again.plans == chooser.plans and again.observed == chooser.observed == (2, 50)
        call(again, 2**14, 500, 999, times=2)
        assert again.path(4096) == "dense"
    assert chooser.counters(4096, CPU).tolist() == [2**14, 2**8, 3 * 2**14, 60 * 2**8]
    assert chooser.path(4096) == "union"


@pytest.mark.parametrize("num_tokens", [1, 63, 65, 1100, 131072])
def test_sampled_blocks_are_consecutive_tokens_from_everywhere(num_tokens):
    blocks = plan.sampled_blocks(torch.arange(num_tokens)[:, None].expand(-1, 3))
    assert blocks.shape == (min(max(num_tokens // 64, 1), 16), min(num_tokens, 64), 3)
    starts = blocks[:, 0, 0]
    assert torch.equal(blocks[..., 0], starts[:, None] + torch.arange(blocks.shape[1]))
    assert torch.equal(starts, starts.unique()) and starts[0] == 0
    if num_tokens == 131072:
        assert starts[-1] > 0.9 * num_tokens
        assert len((starts % 2048).unique()) == 16  # not 16 times the first tokens of a sequence


def test_activity_is_counted_as_a_loop_counts():
    x, weight, bias = torch.randn(5, 7, 16), torch.randn(40, 16), torch.randn(40) - 2
    x[2, 3, 1] = float("nan")
    counters = torch.tensor([1, 2, 3, 4])
    plan.count_activity(x, lambda blocks: F.linear(blocks, weight, bias).relu(), counters)
    active = [(F.linear(block, weight, bias).relu() != 0).tolist() for block in x]
    assert sum(active[2][3]) == 40
    entries = sum(sum(token) for block in active for token in block)
    unions = sum(sum(map(any, zip(*block, strict=True))) for block in active)
    assert counters.tolist() == [1 + 35, 2 + 5, 3 + entries, 4 + unions]
