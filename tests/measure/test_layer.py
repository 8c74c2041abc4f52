"""Inference of one layer: every provider is checked and timed; calibrations; wrong results."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories.measure import SIZES, case, fresh_mask
from tests.factories.measure import run as by_reference
from tests.factories.ops import as_sparse_ffn
from twell import cli
from twell.measure import calibration as calibrations
from twell.measure import case as cases
from twell.measure import layer
from twell.measure.calibration import BEHIND, calibrate
from twell.measure.check import TOLERANCE
from twell.measure.layer import ffn
from twell.measure.rows import COLUMNS
from twell.measure.step import ffn_steps
from twell.sparse.calibration import DEPENDS_ON, Calibration

ops = pytest.importorskip("twell.sparse.ops")
PROVIDERS = ["dense eager", "dense torch.compile", "dense"]
PROVIDERS += ["triton rowwise", "triton union", "triton decode", "auto"]


def test_rows_say_what_was_measured(dense_kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "GRAPH_TOKENS", 20)
    dense_kernels.shown = lambda call: call() is not None and [("nvjet", 0.5)] * 3 + [("other", 1)]
    rows = ffn([5, 24], [9], ["even", "skewed"], **SIZES, kernels=True, energy=True, out=tmp_path)
    assert all(list(row) == COLUMNS["ffn"] for row in rows)
    table = pd.read_csv(tmp_path / "ffn.csv")
    assert list(table["provider"]) == 4 * PROVIDERS and len(rows) == len(table)
    assert table["date"].nunique() == 1  # one command, one date
    few = table["tokens"] == 5
    assert (table["mode"] == few.map({True: "graph", False: "stream"})).all()
    assert (table["weight_sets"] == few.map({True: 8, False: 1})).all()
    assert (table["p50"] == few.map({True: 1 / 8, False: 1.0})).all()
    assert (table["pattern"].value_counts() == len(rows) // 2).all()
    assert table["energy"].notna().all() and table["gated"].all()
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    parts = pd.read_csv(tmp_path / "kernels.csv")
    assert set(parts["provider"]) == {"dense", "triton rowwise", "triton union", "triton decode"}
    product = parts.query("kernel == 'cublas matmul' and provider == 'dense'").iloc[0]
    assert (product["launches"], product["ms"]) == (3.0, 1.5)


@pytest.mark.slow
def test_the_kernels_themselves_are_measured(gpu, monkeypatch):
    """Also in FP8, with biases and other activations, by Triton's interpreter."""
    monkeypatch.setattr(gpu, "flushed_times", lambda *_: np.ones(3))  # they were called once
    for name, gated, bias in (("relu2", False, True), ("drelu", True, False)):
        options = {"activation": name, "gated": gated, "bias": bias, "mode": "stream"}
        rows = ffn([70], [9], **SIZES, **options)
        assert [row["provider"] for row in rows] == PROVIDERS
        column = " ".join(["skewed", *[name] * (name != "relu"), *["biases"] * bias])
        assert {row["pattern"] for row in rows} == {column}
        assert all(1e-4 < row["relative_rms"] < 1.5 * TOLERANCE["layer"] for row in rows)
    monkeypatch.setattr(cases.float8, "why_not", lambda device: None)
    rows = ffn([70], [9], **SIZES, mode="stream")
    dense = ["dense FP8 torch.compile", "dense FP8 by tensors torch.compile"]
    paths = [f"triton {path} FP8" for path in ("dense", "rowwise", "union", "decode")]
    names = [*PROVIDERS[:2], *dense, *PROVIDERS[2:], *paths, "auto FP8"]
    assert [row["provider"] for row in rows] == names
    errors = {row["provider"]: row["relative_rms"] for row in rows}
    assert all(errors[path] < TOLERANCE["layer"] for path in paths)
    assert all(0.005 < errors[name] < 0.05 for name in dense)  # h is quantised too


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_calls_back_to_back(mode, dense_kernels, monkeypatch):
    compiled = []
    compile_ = lambda function, **_: compiled.append(function) or function  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile_)
    rows = ffn([24], [9], **SIZES, mode=mode)
    assert [row["provider"] for row in rows] == PROVIDERS
    assert {(row["mode"], row["weight_sets"], row["p50"]) for row in rows} == {(mode, 8, 0.125)}
    # The layers of dense torch.compile; those of four paths and of "auto".
    assert len(compiled) == 8 * (1 + 5 * (mode == "compiled"))


def test_recorded_rows_have_the_activity_of_their_masks(dense_kernels):
    masks = {"a": fresh_mask(20, 40), "b": fresh_mask(10, 30)}
    options = {"patterns": ["recorded"], "gated": False, "masks": masks}
    for measured, hidden_size in ((ffn, 16), (ffn_steps, 32)):
        rows = measured([25], hidden_size=hidden_size, **options)
        assert {row["pattern"] for row in rows} == {"recorded a", "recorded b"}
        for name, mask in masks.items():
            length = min(len(mask), hidden_size)  # as many tokens as the hidden size allows
            mask = mask[np.arange(25) % length]
            own = [row for row in rows if row["pattern"] == f"recorded {name}"]
            assert {row["intermediate_size"] for row in own} == {mask.shape[1]}
            activity = round(mask.sum() / 25, 2), mask.sum(1).max(), mask.any(0).sum()
            assert {(row["active"], row["active_max"], row["union"]) for row in own} == {activity}


def test_paths_that_would_take_too_long_are_left_out(monkeypatch):
    monkeypatch.setattr(cases, "DECODE_TOKENS", 20)
    monkeypatch.setattr(cases, "ROWWISE_ENTRIES", 70 * 4)
    assert case(20).paths() == ["dense", "rowwise", "union", "decode"]
    assert case(70).paths() == ["dense", "union"]


@pytest.mark.parametrize("wrong", ["union", "auto"])
def test_a_wrong_result_ends_the_command_before_anything_is_timed(
    dense_kernels, tmp_path, monkeypatch, wrong
):
    def run(path, *tensors, **options):
        return by_reference(path, *tensors) * (1.02 if path == "union" else 1.0)

    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(run))
    if wrong == "auto":
        monkeypatch.setattr(cases.Case, "paths", lambda self: ["dense"])
        monkeypatch.setattr("twell.sparse.plan.Chooser.path", lambda *_: "union")
    with pytest.raises(ArithmeticError, match=f"{wrong} at .* 24 tokens  skewed .* is wrong"):
        ffn([24], [9], **SIZES, mode="stream", out=tmp_path)
    assert not dense_kernels.timed and not list(tmp_path.iterdir())


# --- calibrations -----------------------------------------------------------------------------


@pytest.fixture
def timed(dense_kernels, monkeypatch):
    """Calls take the ms of a formula, by path, tokens and active entries; the ms by these."""
    log = {}

    def run(path, x, w_gate, *tensors, **_):
        entries = int((torch.relu(x.double() @ w_gate.double().t()) != 0).sum())
        ms = {"dense": 0.02 * len(x) + 0.02, "rowwise": entries / 200}
        log[len(x), entries, path] = ms.get(path, 0.01 + entries / 2000)
        dense_kernels.spend(log[len(x), entries, path])
        return by_reference(path, x, w_gate, *tensors)

    def dense(self, x):
        return run("dense", x, *(p.weight for p in (self.gate_proj, self.up_proj, self.down_proj)))

    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(run))
    monkeypatch.setattr(cases.DenseLayer, "forward", dense)
    monkeypatch.setattr(calibrations, "WEIGHT_SETS", 1)
    monkeypatch.setattr(calibrations, "WAITING", 0)
    monkeypatch.setattr(calibrations, "FLOOR_TOKENS", (1, 8, 32))
    monkeypatch.setattr(cases, "GRAPH_TOKENS", 8)
    return log


def test_a_calibration_holds_its_times(timed, tmp_path):
    result = calibrate(32, 64, out=tmp_path / "c.json", tokens=(1, 8, 16))
    again = Calibration.load(tmp_path / "c.json")
    assert again.times == result.times and again.floors == result.floors
    assert (again.hidden_size, again.intermediate_size, again.gated) == (32, 64, True)
    points = {(p.tokens, round(p.tokens * p.active)): p.ms for p in result.times}
    for (m, entries), times in points.items():
        for path, ms in times.items():
            assert ms == pytest.approx(timed[m, entries, path], rel=1e-3)
    # Floors are of layers with one active neuron a token; 32 tokens are too many.
    situations = [(floor.situation, floor.tokens) for floor in result.floors]
    assert situations == [(s, m) for m in (1, 8) for s in ("eager", "compiled")]
    assert all(set(floor.ms) == set(DEPENDS_ON) for floor in result.floors)
    # The busiest layer of each number of tokens is timed densely; a path far behind is dropped.
    for m in (1, 8, 16):
        curve = [points[key] for key in sorted(points) if key[0] == m]
        assert max(key for key in points if key[0] == m) == (m, m * 64) and "dense" in curve[-1]
        for path in set(DEPENDS_ON) - {"dense"}:
            ratios = [ms[path] / ms["dense"] for ms in curve if path in ms]
            assert all(ratio <= BEHIND for ratio in ratios[:-1])
            assert len(ratios) == len(curve) or ratios[-1] > BEHIND


def test_a_small_grid_is_measured_by_commands(gpu, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(layer.subprocess, "run", lambda words, check: commands.append(words))
    assert layer.small_grid(tmp_path) == tmp_path
    layers, training = (cli.parse(words[3:])[1] for words in commands)
    assert layers["kernels"] and training["backward"] and not layers["backward"]
    assert layers["out"] == training["out"] == tmp_path
