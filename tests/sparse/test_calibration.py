import copy
import json
import math
import random

import numpy as np
import pytest

from tests.sparse.calibrations import ABOUT, PATHS, calibration, from_grid, random_rows, threshold
from twell.sparse.calibration import (
    MARGIN,
    SCALED_MARGIN,
    Calibration,
    Point,
    crossing,
    default,
)
from twell.sparse.plan import Chooser

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


# --- where a curve falls


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([(10, 2.0), (1000, 0.5)], 100),
        ([(10, 2.0), (30, 0.5), (50, 1.5), (80, 0.5)], 10 * 3**0.5),  # the first fall
        ([(10, 0.5), (20, 2.0), (80, 0.5)], 40),
        ([(10, 1.0), (20, 0.5)], 10),
        ([(10, 0.9), (20, 1.5)], 20),
        ([(10, 2.0), (20, 1.0)], 20),
        ([(10, 1.5), (20, 0.5), (30, 0.4)], 10 * 2 ** (math.log(1.5) / math.log(3))),
        ([(29, 0.9)], 0),
        ([(29, 1.9)], 29),
    ],
)
def test_crossing(levels, expected):
    assert crossing(levels) == pytest.approx(expected)
    tenfold = [(x, 10 * y) for x, y in levels]
    assert crossing(tenfold, 10) == pytest.approx(expected)
