import copy
import json
import math

import numpy as np
import pytest

from tests.factories.sparse import PATHS, calibration, from_grid, random_grid, threshold
from twell.sparse.calibration import MARGIN, SCALED_MARGIN, Calibration, Floor, crossing, default

# --- prediction and choice


def work(path, active, union):
    """The neurons by which a path is timed; the path "union" has blocks of twice 64 tokens."""
    two = min(union * (union / active) ** (1 / 6), 1000) if active else union
    return {"rowwise": active, "dense": 0, "union": two, "decode": union}[path]


def curve(grid, path, m):
    """Activities and median times of one path at m tokens, from a grid of cases."""
    points = {}
    for (size, active), (union, times) in grid.items():
        if size == m:
            points.setdefault(work(path, active, union), []).append(times[path])
    return sorted(points), [float(np.median(points[x])) for x in sorted(points)]


@pytest.mark.parametrize("repeat", range(4))
def test_prediction_is_that_of_numpy_and_the_fastest_beats_dense_by_the_margin(rng, repeat):
    rng.seed(repeat)
    grid, margin = random_grid(rng), rng.choice([0, 0.03, 0.2])
    made = from_grid(grid, margin=margin)
    sizes = sorted({m for m, _ in grid})
    between = [
        (math.exp(rng.uniform(0, math.log(4096))), rng.uniform(0, 1000), rng.uniform(0, 1000))
        for _ in range(20)
    ]
    for m, active, union in between + [(m, a, union) for (m, a), (union, _) in grid.items()]:
        expected = {}
        for path in PATHS if m <= 512 else set(PATHS) - {"decode"}:
            x = work(path, active, union)
            logs = [math.log(np.interp(x, *curve(grid, path, size))) for size in sizes]
            expected[path] = math.exp(np.interp(math.log(m), np.log(sizes), logs))
        assert made.predict(m, active, union) == pytest.approx(expected)
        best = min(expected, key=expected.get)
        sparse = expected[best] <= (1 - margin) * expected["dense"]
        assert made.choices(m, active, union)["graph"] == (best if sparse else "dense")
        edge = made.predict(4096, active, union)
        ten = {path: 10 * time for path, time in edge.items()}
        assert made.predict(40960, active, union) == pytest.approx(ten)


@pytest.mark.parametrize("card", ["", "NVIDIA H100 80GB HBM3"])
def test_even_activity_goes_row_by_row(card):
    """Its unions grow more from 64 to 128 tokens, which a block has in bf16."""
    made = default(2048, 5632, True, device_name=card)
    assert made.choices(131072, 29, 1599)["eager"] == "rowwise"
    assert made.choices(131072, 29, 782)["eager"] == "union"


def test_what_was_not_measured_is_never_chosen():
    rows = [(16, 5, 20, path, 0.1) for path in ("rowwise", "union", "decode")]
    rows += [(m, 5, 20, "dense", ms) for m in (1, 16, 64) for ms in (0.5, 1.0, 9.0)]  # the median
    rows += [(64, 9, 50, path, 0.1) for path in ("rowwise", "union", "decode")]
    made = calibration(rows)
    assert set(made.predict(16, 5, 20)) == set(PATHS)
    assert set(made.predict(16, 5.1, 20)) == set(PATHS) - {"rowwise"}
    assert set(made.predict(16, 5, 20.1)) == {"dense", "rowwise"}
    assert set(made.predict(64, 9, 50)) == set(PATHS)
    assert set(made.predict(32, 9, 50)) == {"dense"}  # 16 tokens were not measured at this activity
    assert made.predict(15, 1, 1) == {"dense": 1.0} and made.choices(15, 1, 1)["graph"] == "dense"
    assert set(made.predict(10**6, 9, 50)) == set(PATHS) - {"decode"}
    assert made.choices(10**6, 9.1, 50.1)["graph"] == "dense"


def floored(*floors):
    """Alone dense takes 1 ms and a union 0.2 ms, of any number of tokens."""
    rows = [(m, 5, 20, path, ms) for m in (1, 5000) for path, ms in (("dense", 1), ("union", 0.2))]
    return calibration(rows, floors=floors)


def predicted(made, situation, tokens):
    """ms by path, none below the floor of the situation."""
    alone = made.predict(tokens, 5, 20)
    return {path: max(ms, made._floor(path, tokens, situation)) for path, ms in alone.items()}


def test_no_time_is_below_the_floor_of_its_situation():
    """Floors stay beyond those measured, and fewer tokens take no longer."""
    floors = [Floor("eager", 1000, {"dense": 8.0, "union": 4.0})]
    made = floored(*floors, Floor("eager", 10, {"dense": 2.0, "union": 9.0}))
    for tokens, dense in ((1, 2.0), (10, 2.0), (100, 4.0), (1000, 8.0), (5000, 8.0)):
        assert predicted(made, "eager", tokens) == pytest.approx({"dense": dense, "union": 4})
        for situation in ("graph", "compiled"):
            expected = pytest.approx({"dense": 1, "union": 0.2})
            assert predicted(made, situation, tokens) == expected


@pytest.mark.parametrize(
    ("situation", "dense", "union", "choice"),
    [
        ("eager", 8.0, 3.1, "union"),
        ("eager", 8.0, 3.3, "dense"),
        ("eager", 0.5, 0.39, "union"),
        ("eager", 0.5, 0.41, "dense"),
        ("compiled", 8.0, 6.7, "union"),
        ("compiled", 8.0, 6.9, "dense"),
        ("compiled", 0.5, 0.96, "union"),
        ("compiled", 0.5, 0.99, "dense"),  # the margin
        ("graph", 8.0, 7.7, "union"),
    ],
)
def test_a_sparse_path_leaves_time_of_the_host_to_the_rest_of_a_model(
    situation, dense, union, choice
):
    made = floored(Floor(situation, 1, {"dense": dense, "union": union}))
    choices = dict.fromkeys(("graph", "eager", "compiled"), "union") | {situation: choice}
    assert made.choices(70, 5, 20) == choices


# --- files


@pytest.mark.parametrize("training", [0.5, None, 1000])
def test_files_keep_everything(rng, tmp_path, training):
    floors = Floor("eager", 1, {"dense": 0.5}), Floor("compiled", 8, {"dense": 0.25, "union": 3.0})
    options = {"margin": 0.07, "gated": False, "training": training}
    options["floors"] = floors
    made, path = from_grid(random_grid(rng), **options), tmp_path / "c.json"
    made.save(path)
    assert vars(Calibration.load(path)) == vars(made)
    fields = json.loads(path.read_text())  # as before training and situations were measured
    del fields["training"], fields["floors"]
    path.write_text(json.dumps(fields))
    again = Calibration.load(path)
    assert again.training is None and again.floors == ()


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "c.json"
    threshold().save(path)
    right = json.loads(path.read_text())
    for change, words in (
        (lambda f: f.pop("gated"), "'gated'"),
        (lambda f: f.update(times=[]), "times"),
        (lambda f: f.update(speed=3), "'speed'"),
        (lambda f: f["times"][0].pop("union"), "'union'"),
        (lambda f: f["times"][0]["ms"].update(fast=1.0), "'fast'"),
    ):
        fields = copy.deepcopy(right)
        change(fields)
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=rf"c\.json .*{words}"):
            Calibration.load(path)
    for content in (b"{", b"\xff\xfe\x00", b"null"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"c\.json is no calibration"):
            Calibration.load(path)
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "d.json")


# --- without a file


@pytest.mark.parametrize(
    "shape", [(2048, 5632, True), (1024, 2816, True), (2048, 8192, False), (4096, 14336, True)]
)
def test_default_takes_sparse_paths_for_many_sparse_tokens_alone(shape):
    made = default(*shape)
    n = shape[1] / 5632
    assert made.choices(131072, 29 * n, 782 * n)["graph"] == "union"
    assert made.choices(131072, shape[1], shape[1])["graph"] == "dense"
    assert made.choices(131072, 911 * n, 0.9 * shape[1])["graph"] == "dense"
    assert (default(*shape, device_name="NVIDIA H200").margin == MARGIN) == (shape[0] == 2048)
    assert made.margin == SCALED_MARGIN > MARGIN


def test_scaling_keeps_the_time_of_equal_work():
    made = threshold()
    half = made.scaled(32, 500, True)
    assert half.training is None
    assert threshold(training=90).scaled(64, 500, True).training == 45
    assert half.predict(64, 20, 40) == pytest.approx(made.predict(32, 40, 80))
    slow = threshold(
        floors=(Floor("eager", 32, {"dense": 7.0}), Floor("eager", 64, {"dense": 9.0}))
    )
    for m, floor in ((1, 7.0), (64, 7.0), (128, 9.0), (256, 9.0)):
        scaled = slow.scaled(32, 500, True)
        assert predicted(scaled, "eager", m)["dense"] == pytest.approx(floor, rel=1e-12)
    rows = [(8, 10, 20, "dense", 6.0), (8, 10, 20, "union", 3.0), (8, 10, 20, "rowwise", 90.0)]
    other = calibration(rows).scaled(32, 1000, False)
    # gate 2; the rest of dense loses one of two products, that of a sparse path too
    assert other.predict(8, 10, 20) == pytest.approx({"dense": 4.0, "union": 2.5, "rowwise": 46.0})
    rows += [(8, 30, 40, "union", 5.0)]  # where dense was not measured again
    assert calibration(rows).scaled(32, 1000, False).predict(8, 30, 40)["union"] == 3.5
    with pytest.raises(ValueError, match="non-gated"):
        other.scaled(32, 1000, True)


def test_one_token_of_a_smaller_layer_has_the_times_of_one_token():
    """A share of one token is no case."""
    of_one, n = default(2048, 5632, True), 768 / 2048
    expected = of_one.predict(1, 29, 29)
    assert default(768, 2112, True).predict(1, 29 * n, 29 * n) == pytest.approx(expected)
    larger = of_one.scaled(4096, 11264, True)
    assert larger.predict(1, 58, 58) == pytest.approx(of_one.predict(4, 29, 29))


# --- where a curve falls


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([(10, 2.0), (30, 0.5), (50, 1.5), (80, 0.5)], 10 * 3**0.5),  # the first fall
        ([(10, 0.5), (20, 2.0), (80, 0.5)], 40),
        ([(10, 0.9), (20, 1.5)], 20),
        ([(29, 0.9)], 0),
        ([(29, 1.9)], 29),
    ],
)
def test_crossing(levels, expected):
    assert crossing(levels) == pytest.approx(expected)
