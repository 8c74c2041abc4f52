import copy
import json
import math
import pickle
import random

import numpy as np
import pytest
import torch

from twell.sparse import plan as choose
from twell.sparse.calibration import (
    BLOCK,
    DEPENDS_ON,
    MARGIN,
    SCALED_MARGIN,
    Calibration,
    Point,
    default,
)
from twell.sparse.plan import CLASSES, POWERS, Chooser

ABOUT = {
    "device": "a device",
    "hidden_size": 32,
    "intermediate_size": 1000,
    "gated": True,
    "dtype": "bfloat16",
    "versions": "torch 2",
    "date": "2026-01-01",
}
PATHS = tuple(DEPENDS_ON)


def calibration(rows, **changes):
    """From rows (tokens, active, union, path, ms)."""
    keys = ("tokens", "active", "union", "path", "p50")
    return Calibration.fit([dict(zip(keys, row, strict=True)) for row in rows], **ABOUT | changes)


def random_rows(tokens=(1, 8, 64, 4096)):
    """A full grid of cases with random times: {(tokens, active): (union, {path: ms})}."""
    levels = sorted(random.sample(range(1, 999), 4)) + [1000]
    return {
        (m, active): (min(1000.0, active * 1.7), {path: random.uniform(0.1, 2) for path in PATHS})
        for m in tokens
        for active in levels
    }


def from_grid(grid, **changes):
    rows = [
        (m, active, union, path, time)
        for (m, active), (union, times) in grid.items()
        for path, time in times.items()
    ]
    random.shuffle(rows)
    return calibration(rows, **changes)


def threshold(crossing=100.0, **changes):
    """Union wins below a union of `crossing` neurons at 33 tokens and more, decode at 32 and fewer."""
    rows = []
    for m in (1, 32, 33, 4096):
        sparse = "decode" if m <= 32 else "union"
        rows += [(m, 1000, 1000, "dense", 1.0), (m, 0, 0, sparse, 0.5)]
        rows += [
            (m, 1, crossing, sparse, 0.96),
            (m, 1, crossing + 1e-6, sparse, 1.5),
            (m, 1000, 1000, sparse, 9.0),
        ]
    return calibration(rows, **changes)


# --- prediction and choice


@pytest.mark.parametrize("repeat", range(20))
def test_choice_is_the_fastest_that_beats_dense_by_the_margin(repeat):
    grid = random_rows()
    margin = random.choice([0, 0.03, 0.2])
    made = from_grid(grid, margin=margin)
    for (m, active), (union, times) in grid.items():
        dense = float(
            np.median([other["dense"] for (at, _), (_, other) in grid.items() if at == m])
        )
        # several levels may have the same union: their median counts
        same = [other for (at, _), (u, other) in grid.items() if at == m and u == union]
        expected = {"dense": dense, "rowwise": times["rowwise"]}
        expected |= {
            path: float(np.median([other[path] for other in same])) for path in ("union", "decode")
        }
        assert made.predict(m, active, union) == pytest.approx(expected)
        best = min(expected, key=expected.get)
        chosen = made.choose(m, active, union)
        assert chosen == (best if expected[best] <= (1 - margin) * dense else "dense")


@pytest.mark.parametrize("repeat", range(20))
def test_prediction_between_the_points_is_that_of_numpy(repeat):
    grid = random_rows()
    made = from_grid(grid)
    sizes = sorted({m for m, _ in grid})
    for _ in range(20):
        m, active, union = (
            math.exp(random.uniform(0, math.log(4096))),
            random.uniform(0, 1000),
            random.uniform(0, 1000),
        )
        found = made.predict(m, active, union)
        assert set(found) == set(PATHS)
        for path, x in (("rowwise", active), ("union", union), ("decode", union), ("dense", 0)):
            lines = []
            for size in sizes:
                points = {}
                for (at, level), (u, times) in grid.items():
                    if at == size:
                        place = {"rowwise": level, "dense": 0}.get(path, u)
                        points.setdefault(place, []).append(times[path])
                xs = sorted(points)
                lines.append(np.log(np.interp(x, xs, [np.median(points[place]) for place in xs])))
            assert found[path] == pytest.approx(np.exp(np.interp(np.log(m), np.log(sizes), lines)))
        high = made.predict(4096 * 10, active, union)
        edge = made.predict(4096, active, union)
        assert high == pytest.approx({path: 10 * time for path, time in edge.items()})


def test_times_rise_with_activity_and_tokens_where_measured_ones_do():
    grid = {
        (m, a): (3.0 * a, {"dense": m, "rowwise": m * a / 90, "union": m * (0.3 + a / 200)})
        for m in (1, 10, 100)
        for a in (1, 60, 250)
    }
    made = from_grid(grid)
    steps = [made.predict(50, x, 3 * x) for x in range(0, 251, 10)]
    for path in ("rowwise", "union"):
        times = [step[path] for step in steps]
        assert times == sorted(times) and times[-1] > 2 * times[0]
        times = [made.predict(m, 60, 180)[path] for m in range(1, 300)]
        assert times == sorted(times)
    choices = [made.choose(50, x, 3 * x) for x in range(0, 251, 5)]
    assert choices[0] == "rowwise" and choices[-1] == "dense" and "union" in choices
    runs = [a for a, b in zip(choices, [*choices[1:], None], strict=True) if a != b]
    assert runs == ["rowwise", "union", "dense"]


def test_what_was_not_measured_is_never_chosen():
    rows = [(16, 5, 20, path, 0.1) for path in ("rowwise", "union", "decode")]
    rows += [(m, 5, 20, "dense", 1.0) for m in (1, 16, 64)]
    rows += [(64, 9, 50, path, 0.1) for path in ("rowwise", "union", "decode")]
    made = calibration(rows)
    assert set(made.predict(16, 5, 20)) == set(PATHS)
    assert set(made.predict(16, 5.1, 20)) == set(PATHS) - {"rowwise"}
    assert set(made.predict(16, 5, 20.1)) == {"dense", "rowwise"}
    assert set(made.predict(64, 9, 50)) == set(PATHS)
    assert set(made.predict(32, 9, 50)) == {"dense"}  # 16 tokens were not measured at this activity
    assert made.predict(15, 1, 1) == {"dense": 1.0} and made.choose(15, 1, 1) == "dense"
    assert set(made.predict(10**6, 9, 50)) == set(PATHS)
    assert made.choose(10**6, 9.1, 50.1) == "dense"


def test_fit_takes_the_median_and_leaves_other_providers_out():
    rows = [
        {
            "tokens": "8",
            "active": "3.5",
            "union": "9",
            "path": "dense",
            "p50": ms,
            "provider": provider,
        }
        for ms, provider in [
            ("1", "dense"),
            ("5", "dense"),
            ("2", "dense"),
            ("0.1", "auto"),
            ("9", "dense eager"),
        ]
    ]
    rows += [dict(rows[0], provider="dense torch.compile", p50=7)]
    assert Calibration.fit(rows, **ABOUT).times == (Point(8, 3.5, 9.0, {"dense": 2.0}),)


# --- files


@pytest.mark.parametrize(("expected", "training"), [(None, 0.5), ((3.5, 20.0), None), (None, 1000)])
def test_files_keep_everything(tmp_path, expected, training):
    made = from_grid(random_rows(), expected=expected, margin=0.07, gated=False, training=training)
    made.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    for field in Calibration.__dataclass_fields__:
        assert getattr(again, field) == getattr(made, field), field
    text = (tmp_path / "c.json").read_text()
    assert (
        text.count('{"tokens"')
        == len(made.times)
        == sum('{"tokens"' in line for line in text.splitlines())
    )
    assert copy.deepcopy(made) is made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop("gated"), "the file has no field 'gated'"),
        (lambda f: f.pop("times"), "it has no list 'times'"),
        (lambda f: f.update(times=[]), "times is 'without dense ones'; expected some"),
        (lambda f: f.update(speed=3), "the file has an unknown field 'speed'"),
        (lambda f: f["times"][0].pop("union"), "times has no field 'union'"),
        (lambda f: f["times"].append(7), "times holds 7; expected an object"),
        (
            lambda f: f["times"][0]["ms"].update(dense=-0.5),
            r"the time of 'dense' is -0\.5; expected a number above 0",
        ),
        (lambda f: f["times"][0]["ms"].update(dense=float("nan")), "the time of 'dense' is nan"),
        (lambda f: f["times"][0]["ms"].update(dense="1"), "the time of 'dense' is '1'"),
        (
            lambda f: f["times"][0]["ms"].update(fast=1),
            "a path is 'fast'; expected one of dense, rowwise, union",
        ),
        (lambda f: f["times"][0].update(ms=3), "ms is 3; expected times by path"),
        (lambda f: f["times"][0].update(tokens=0), "tokens is 0; expected a number above 0"),
        (
            lambda f: f["times"][0].update(active=1001),
            "active is 1001; expected a number from 0 to 1000",
        ),
        (lambda f: f["times"][0].update(union=-1), "union is -1"),
        (
            lambda f: f.update(intermediate_size=0),
            "intermediate_size is 0; expected an integer from 1",
        ),
        (lambda f: f.update(gated="yes"), "gated is 'yes'; expected true or false"),
        (lambda f: f.update(margin=1), "margin is 1; expected 0 or more and below 1"),
        (lambda f: f.update(expected=[1]), "expected is"),
        (lambda f: f.update(expected=[1, 1001]), "expected two numbers from 0 to 1000"),
        (lambda f: f.update(expected="29"), "expected is '29'"),
        (lambda f: f.update(training=1001), "training is 1001; expected a number from 0 to 1000"),
        (lambda f: f.update(training=-1), "training is -1"),
        (lambda f: f.update(training=True), "training is True"),
        (lambda f: f.update(training=float("inf")), "training is inf"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, change, words):
    threshold().save(tmp_path / "c.json")
    fields = json.loads((tmp_path / "c.json").read_text())
    change(fields)
    (tmp_path / "c.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"c\.json is no calibration: .*{words}"):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1]", b"null"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"c\.json is no calibration: it (is not JSON|has no list)|can't decode"
    ):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "d.json")


def test_files_from_before_training_was_measured_still_load(tmp_path):
    threshold(training=80.0).save(tmp_path / "c.json")
    fields = json.loads((tmp_path / "c.json").read_text())
    assert fields.pop("training") == 80.0
    (tmp_path / "c.json").write_text(json.dumps(fields))
    assert Calibration.load(tmp_path / "c.json").training is None


def test_calibrations_of_other_layers_are_refused():
    chooser = Chooser(32, 500, True)
    with pytest.raises(
        ValueError,
        match=r"for hidden_size=32, intermediate_size=1000, gated=True; this layer has .*=500",
    ):
        chooser.calibration = threshold()
    assert chooser.calibration is None


# --- without a file


@pytest.mark.parametrize(
    "shape", [(2048, 5632, True), (1024, 2816, True), (2048, 8192, False), (4096, 14336, True)]
)
def test_default_takes_sparse_paths_for_many_sparse_tokens_alone(shape):
    made = default(*shape)
    n = shape[1] / 5632
    assert made.choose(131072, 29 * n, 782 * n) == "union"
    assert made.choose(131072, shape[1], shape[1]) == "dense"
    assert made.choose(131072, 911 * n, 0.9 * shape[1]) == "dense"
    assert made.choose(1, n, n) in ("dense", "decode")
    assert made.margin == SCALED_MARGIN > MARGIN


@pytest.mark.parametrize("intermediate_size", [1, 3, 100, 127, 2827, 14336])
def test_all_neurons_stay_all_neurons(intermediate_size):
    made = default(64, intermediate_size, True)
    assert (
        max(point.active for point in made.times)
        == max(point.union for point in made.times)
        == intermediate_size
    )
    assert (
        threshold(training=1000).scaled(64, intermediate_size, True).training == intermediate_size
    )


def test_scaling_keeps_the_time_of_equal_work():
    made = threshold()
    half = made.scaled(32, 500, True)
    assert half.training is None and threshold(training=90).scaled(64, 500, True).training == 45
    assert half.predict(64, 20, 40) == pytest.approx(made.predict(32, 40, 80))
    rows = [(8, 10, 20, "dense", 6.0), (8, 10, 20, "union", 3.0), (8, 10, 20, "rowwise", 90.0)]
    other = calibration(rows).scaled(32, 1000, False)
    # gate 2; the rest of dense loses one of two products, that of a sparse path too
    assert other.predict(8, 10, 20) == pytest.approx({"dense": 4.0, "union": 2.5, "rowwise": 46.0})
    with pytest.raises(ValueError, match="non-gated"):
        other.scaled(32, 1000, True)


# --- the choice of a layer


def test_a_fresh_layer_is_dense_unless_told_what_to_expect():
    chooser = Chooser(32, 1000, True)
    assert chooser.plan == ((POWERS[-1], "dense"),) and chooser.observed is None
    chooser.calibration = threshold()
    assert chooser.plan == ((POWERS[-1], "dense"),)
    chooser.calibration = threshold(expected=(2.0, 50.0))
    assert chooser.plan == ((32, "decode"), (POWERS[-1], "union")) and chooser.observed is None
    assert [chooser.path(m) for m in (1, 32, 33, 10**9)] == ["decode", "decode", "union", "union"]
    chooser.observe(1000, 1000)
    assert chooser.plan == ((POWERS[-1], "dense"),)  # what was seen counts more
    chooser.observe(2, 50)
    chooser.calibration = threshold(crossing=40.0)
    assert chooser.path(4096) == "dense"  # a new calibration, a new plan


@pytest.mark.parametrize("repeat", range(10))
def test_the_plan_is_the_calibrations_choice_at_every_power(repeat):
    made = from_grid(random_rows(tokens=(1, 8, 64, 512, 4096, 2**20)))
    chooser = Chooser(32, 1000, True)
    chooser.calibration = made
    active = random.uniform(1, 300)
    union = random.uniform(active, 1000)
    chooser.observe(active, union)
    for power in POWERS:
        block = min(power, BLOCK)
        between = (
            union
            if block == BLOCK
            else active * (union / active) ** (math.log(block) / math.log(BLOCK))
        )
        expected = made.choose(power, active, between)
        assert chooser.path(power) == expected
        assert chooser.path(power // 2 + 1) == expected or power == 1
    assert all(a[1] != b[1] for a, b in zip(chooser.plan, chooser.plan[1:], strict=False))


def test_unions_of_few_tokens_bound_those_of_more():
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold(crossing=100.0)
    chooser.observe(10, 10, tokens=1)
    assert chooser.path(1) == "decode" and chooser.path(8) == "decode"  # 80 at most
    assert chooser.path(16) == "dense" and chooser.path(4096) == "dense"  # 160, 640 at most
    chooser.observe(0, 0, tokens=64)
    assert chooser.path(1) == "decode" and chooser.path(4096) == "union"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 5), "active is -1"),
        ((5, 1001), "union is 1001; expected a number from 0 to 1000"),
        ((float("nan"), 5), "active is nan"),
        ((5, 5, 65), "tokens is 65; expected an integer from 1 to 64"),
        ((5, 5, 0), "tokens is 0"),
    ],
)
def test_impossible_observations_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Chooser(32, 1000, True).observe(*arguments)


# --- counting

CPU = torch.device("cpu")


def call(chooser, num_tokens, active, union):
    """What a sparse call does: adds to the counters; blocks have the mean union."""
    chooser.update(num_tokens)
    path = chooser.path(num_tokens)
    blocks = -(-num_tokens // BLOCK)
    chooser.counters(num_tokens, CPU).add_(
        torch.tensor([num_tokens, blocks, num_tokens * active, blocks * union])
    )
    return path


def test_the_newest_window_alone_decides():
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold(crossing=100.0)
    for _ in range(5):
        call(chooser, 2**20, 2, 50)
    chooser.update(2**20)
    assert chooser.observed == (2, 50) and chooser.path(4096) == "union"
    call(chooser, 64, 500, 800)  # few tokens, but the newest
    chooser.update(2**20)
    assert chooser.observed == (500, 800) and chooser.path(4096) == "dense"
    call(chooser, 2**14, 4, 60)
    chooser.update(2**14)
    assert chooser.observed == (4, 60) and chooser.path(4096) == "union"


def test_small_changes_leave_the_plan_as_it_is():
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold(crossing=100.0)
    call(chooser, 2**14, 3, 90)
    call(chooser, 2**14, 3, 104)
    plan = chooser.plan
    call(chooser, 2**14, 3, 104)
    assert chooser.observed == (3, 104) and chooser.plan is plan and chooser.path(4096) == "union"
    call(chooser, 2**14, 3, 120)
    chooser.update(2**14)
    assert chooser.path(4096) == "dense"


def test_reading_and_writing_are_observed_apart():
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold(crossing=100.0)
    for _ in range(3):
        call(chooser, 4096, 2, 200)
        for _ in range(200):
            call(chooser, 1, 3, 3)
    assert chooser.path(1) == "decode" and chooser.path(4096) == "dense"
    assert chooser._known == {1: (3, 3), 64: (2, 200)}


def test_every_class_holds_its_numbers_of_tokens():
    for m in range(1, 300):
        assert CLASSES[choose._class(m)] == min(2 ** math.ceil(math.log2(m)), 64)


def test_no_call_waits_for_a_copy(monkeypatch):
    arrived, begun = [], []

    def begin(counters):
        begun.append(counters.clone())
        return begun[-1], lambda: bool(arrived)

    monkeypatch.setattr(choose, "_begin_copy", begin)
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold(crossing=100.0)
    call(chooser, 2**14, 2, 50)
    for _ in range(20):
        assert call(chooser, 2**14, 900, 1000) == "dense"
    assert len(begun) == 1 and chooser.observed is None  # one at a time, and it has not arrived
    arrived.append(True)
    assert call(chooser, 2**14, 900, 1000) == "union"  # it holds what was counted before it
    assert chooser.observed == (2, 50)
    assert call(chooser, 2**14, 900, 1000) == "dense"  # and the next one the rest
    assert chooser.observed == (900, 1000) and len(begun) == 2


def test_watching_costs_little(monkeypatch):
    reads, probes = [], []
    begin = choose._begin_copy
    monkeypatch.setattr(choose, "_begin_copy", lambda counters: reads.append(1) or begin(counters))
    monkeypatch.setattr(choose, "count_activity", lambda *_: probes.append(1))
    x = torch.zeros(1, 32)
    chooser = Chooser(32, 1000, True)
    for _ in range(2560):
        call(chooser, 1, 900, 900)
        chooser.probe(x, x, None)
    assert len(probes) == 10  # every 256th
    assert len(reads) == 80  # every 32nd
    reads.clear()
    chooser = Chooser(32, 1000, True)
    for _ in range(256):
        chooser.update(1)
        chooser.probe(x, x, None)
    assert len(reads) == 1  # nothing was counted but by the first probe


def test_counters_outlive_inference_mode_and_change_device():
    chooser = Chooser(32, 1000, True)
    with torch.inference_mode():
        counters = chooser.counters(70, CPU)
        counters += 1
    counters += 1
    assert counters.tolist() == [2] * 4 and counters.dtype == torch.int64
    assert (
        chooser.counters(65, CPU).data_ptr()
        == counters.data_ptr()
        != chooser.counters(1, CPU).data_ptr()
    )
    assert chooser.counters(70, torch.device("meta")).device.type == "meta"
    assert chooser.counters(70, CPU).tolist() == [0] * 4


def test_copies_keep_the_plan_and_count_for_themselves(monkeypatch):
    monkeypatch.setattr(choose, "_begin_copy", lambda counters: (counters.clone(), lambda: False))
    chooser = Chooser(32, 1000, True)
    chooser.calibration = threshold()
    chooser.observe(2, 50)
    call(chooser, 2**14, 3, 60)
    chooser.update(2**14)  # a copy is under way: its event could not be pickled
    monkeypatch.undo()
    for again in (copy.deepcopy(chooser), pickle.loads(pickle.dumps(chooser))):
        assert again.plan == chooser.plan and again.observed == chooser.observed == (2, 50)
        for _ in range(3):
            call(again, 2**14, 500, 999)
        assert again.path(4096) == "dense"
    assert chooser.counters(4096, CPU).tolist() == [2**14, 2**8, 3 * 2**14, 60 * 2**8]
    assert chooser.path(4096) == "union"


@pytest.mark.parametrize("num_tokens", [1, 3, 63, 64, 65, 130, 1024, 1100, 4096, 131072])
def test_sampled_blocks_are_consecutive_tokens_from_everywhere(num_tokens):
    x = torch.arange(num_tokens)[:, None].expand(-1, 3)
    blocks = choose.sampled_blocks(x)
    assert len(blocks) == min(max(num_tokens // 64, 1), 16) and blocks.shape[1:] == (
        min(num_tokens, 64),
        3,
    )
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
    choose.count_activity(x, weight, bias, counters)
    active = [
        [
            [bool((w @ token + b).relu() != 0) for w, b in zip(weight, bias, strict=True)]
            for token in block
        ]
        for block in x
    ]
    assert sum(active[2][3]) == 40
    entries = sum(sum(token) for block in active for token in block)
    unions = sum(sum(map(any, zip(*block, strict=True))) for block in active)
    assert counters.tolist() == [1 + 35, 2 + 5, 3 + entries, 4 + unions]
