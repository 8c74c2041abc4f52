"""Calibrations: the grid of times, the file, and the check of the choices."""

import re

import numpy as np
import pytest
import torch

from tests.measure import factories
from twell.measure import calibration as calibrations
from twell.measure import clock, layer
from twell.measure.calibration import BEHIND, Layers, calibrate, calibration_levels
from twell.sparse.calibration import DEPENDS_ON, Calibration, Point

pytest.importorskip("triton")


def test_calibration_levels_end_with_half_and_all():
    assert calibration_levels(5632) == [1, 10, 30, 100, 300, 1000, 2816, 5632]
    assert calibration_levels(600) == [1, 10, 30, 100, 300, 600]
    assert calibration_levels(1) == [1]


def dense_ms(m):
    return 0.02 + 0.02 * m


@pytest.fixture
def timed(fake_clock, monkeypatch):
    """Times by a formula; calls run and are checked. The list has (tokens, active, what, ms)."""
    log = []

    def milliseconds(case, what, calls):
        case.exact.check(calls[0](), what)
        m, active, union = (case.columns[name] for name in ("tokens", "active", "union"))
        path = what.split("(")[-1].removesuffix(")")
        ms = {
            "rowwise": m * active / 200 or 0.001,
            "union": 0.02 + union * m / 4000,
            "decode": 0.01 + union * m / 2000,
        }
        log.append((m, active, what, ms.get(path, dense_ms(m))))
        return log[-1][-1]

    monkeypatch.setattr(calibrations, "milliseconds", milliseconds)
    monkeypatch.setattr(calibrations, "CHECKED_TOKENS", (4, 20))
    return log


def test_a_calibration_holds_its_times_and_is_checked(timed, tmp_path, capsys):
    result = calibrate(32, 64, out=tmp_path / "c.json", tokens=(1, 8, 16))
    again = Calibration.load(tmp_path / "c.json")
    shape = again.hidden_size, again.intermediate_size, again.gated
    assert again.times == result.times and shape == (32, 64, True)
    grid = [row for row in timed if row[2] in DEPENDS_ON and row[0] in (1, 8, 16)]
    points = {(p.tokens, p.active): p.ms for p in result.times}
    assert all(points[m, active].get(path) == ms for m, active, path, ms in grid)
    assert sum(len(ms) for ms in points.values()) == len(grid)
    # The busiest layer of each number of tokens is timed densely; a path far behind is dropped.
    for m in (1, 8, 16):
        curve = [points[key] for key in sorted(points) if key[0] == m]
        assert max(key for key in points if key[0] == m) == (m, 64) and "dense" in curve[-1]
        for path in ("rowwise", "union", "decode"):
            ratios = [ms[path] / ms["dense"] for ms in curve if path in ms]
            assert all(ratio <= BEHIND for ratio in ratios[:-1])
            assert len(ratios) == len(curve) or ratios[-1] > BEHIND
            assert path != "rowwise" or m == 1 or len(ratios) < len(curve)
    output = capsys.readouterr().out
    ratios = re.findall(r"alike .* ([0-9.]+) of the time of torch.compile", output)
    assert len(ratios) == 4  # two numbers of tokens; 20 active and all
    worst = max(map(float, ratios))
    summary = f"dense torch.compile: {worst:.2f} of its time with the activity known"
    assert worst <= 1 and summary in output
    names = {what for m, _, what, _ in timed if m in (4, 20)}
    assert names >= {"dense torch.compile", "auto (union)"}


def test_the_worst_of_each_kind_is_reported(timed, monkeypatch):
    # Planned for 29 active neurons layers go by rows: m * 64 / 200 ms with all 64 neurons active.
    rowwise = {1: 0.001, 40: 0.001, 64: 10.0}
    points = tuple(
        Point(m, active, active, {"dense": dense_ms(m), "rowwise": ms})
        for m in (4, 20)
        for active, ms in rowwise.items()
    )
    calibration = Calibration("x", 32, 64, True, "bfloat16", "", "", points)
    monkeypatch.setattr(calibrations, "CHECKED_ACTIVE", (5,))
    layers = Layers(32, 64, True, torch.device(factories.DEVICE))
    worst = layers.check_choices(calibration)
    assert set(worst) == {"alike", "even", "busier"}
    expected = max(m * 64 / 200 / dense_ms(m) for m in (4, 20))
    assert worst["busier"] == pytest.approx(expected)
    full = {what for _, active, what, _ in timed if active == 64}
    assert full >= {"auto (dense)", "auto (rowwise)"}
    rows = [row for row in timed if row[2] == "auto (rowwise)" and row[1] < 20]
    alike = {(m, active): ms / dense_ms(m) for m, active, _, ms in rows}
    assert len(alike) == 2 and worst["alike"] == pytest.approx(max(1.0, *alike.values()))


@pytest.mark.parametrize("num_tokens, mode, number", [(4, "graph", 8), (5, "stream", 1)])
def test_few_tokens_are_calibrated_in_a_graph(fake_clock, monkeypatch, num_tokens, mode, number):
    monkeypatch.setattr(calibrations, "GRAPH_TOKENS", 4)
    seen = []

    def checked(case, what, calls, mode):
        def times(budget):
            seen.append((len(calls), mode, budget))
            return np.array([3.0, 7.0, 8.0])

        return layer.Checked(1e-3, times, calls[0])

    monkeypatch.setattr(calibrations, "checked", checked)
    case = Layers(32, 96, True, torch.device("cpu")).case(num_tokens, 9)
    assert calibrations.milliseconds(case, "dense", case.path_calls("dense")) == 7.0
    assert seen == [(number, mode, clock.CALIBRATION_TURN)]


def test_a_calibration_that_could_not_be_saved_is_not_begun(timed, tmp_path):
    message = "cannot be written: name a file in a folder that exists"
    for out in (tmp_path / "none" / "c.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=message):
            calibrate(32, 64, out=out, tokens=(1,))
    with pytest.raises(ValueError, match="hidden_size is 33"):
        calibrate(33, 64, out=tmp_path / "c.json")
    assert not timed
