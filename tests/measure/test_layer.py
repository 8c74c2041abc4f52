"""One layer, forward and in training: every provider is checked and timed; wrong results."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories.measure import SIZES, K, N, counts_of
from tests.factories.measure import run as by_reference
from tests.factories.measure import train as train_densely
from tests.factories.ops import as_sparse_ffn, as_sparse_train
from twell.measure import calibration, layer
from twell.measure.calibration import BEHIND, calibrate, crossover
from twell.measure.check import TOLERANCE
from twell.measure.layer import Case, DenseLayer, ffn
from twell.measure.rows import COLUMNS
from twell.sparse.calibration import DEPENDS_ON, Calibration

ops = pytest.importorskip("twell.sparse.ops")
from twell.sparse import training_ops  # noqa: E402

FOREIGN = "tests.factories.measure:"
PROVIDERS = ["dense eager", "dense torch.compile", "dense"]
PROVIDERS += ["triton rowwise", "triton union", "triton decode", "auto"]


def test_rows_say_what_was_measured(dense_kernels, tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "GRAPH_TOKENS", 20)
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


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_calls_back_to_back(mode, dense_kernels, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda part, **_: compiled.append(part) or part)
    rows = ffn([24], [9], **SIZES, mode=mode)
    assert [row["provider"] for row in rows] == PROVIDERS
    assert {(row["mode"], row["weight_sets"], row["p50"]) for row in rows} == {(mode, 8, 0.125)}
    # The layers of dense torch.compile; those of four paths and of "auto".
    assert len(compiled) == 8 * (1 + 5 * (mode == "compiled"))


def test_layers_in_fp8_are_compared_with_their_own_rounded_weights(dense_kernels, monkeypatch):
    monkeypatch.setattr(layer.float8, "why_not", lambda device: None)
    rows = ffn([200], [9], **SIZES, mode="stream")
    errors = {row["provider"]: row["relative_rms"] for row in rows}
    dense = {name for name in errors if "FP8" in name and "dense" in name}
    assert len(errors) == 14 and len(dense) == 3
    for row in rows:
        limit = "FP8 layer" if "FP8" in row["provider"] and row["path"] == "dense" else "layer"
        assert 1e-3 < row["relative_rms"] < TOLERANCE[limit], row["provider"]
    assert min(errors[name] for name in dense) > TOLERANCE["layer"]  # h is rounded, too


@pytest.mark.parametrize("wrong", ["union", "auto"])
def test_a_wrong_result_ends_the_command_before_anything_is_timed(
    dense_kernels, tmp_path, monkeypatch, wrong
):
    def run(path, *tensors, **options):
        return by_reference(path, *tensors) * (1.02 if path == "union" else 1.0)

    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(run))
    if wrong == "auto":
        monkeypatch.setattr(Case, "paths", lambda self: ["dense"])
        monkeypatch.setattr("twell.sparse.plan.Chooser.path", lambda *_: "union")
    with pytest.raises(ArithmeticError, match=f"{wrong} at .* 24 tokens  skewed .* is wrong"):
        ffn([24], [9], **SIZES, mode="stream", out=tmp_path)
    assert not dense_kernels.timed and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("backward", "mode"), [(False, "graph"), (False, "eager"), (True, None)])
def test_third_parties_are_measured_beside_ours_with_their_errors(
    dense_kernels, tmp_path, capsys, backward, mode
):
    names = [FOREIGN + name for name in ("plain", "wrong", "empty")]
    names += [] if backward else ["study.untuned:layer", "study.dense:joined"]
    options = {"backward": backward, "mode": mode, "out": tmp_path, "providers": names}
    rows = ffn([70], [9], **SIZES, **options)
    errors = {row["provider"]: row["relative_rms"] for row in rows}
    plain, wrong, empty, *ours = (errors[name] for name in names)
    assert max([plain, *ours]) < TOLERANCE["step"] and wrong == pytest.approx(0.4, abs=0.02)
    assert empty == np.inf and all(row["p50"] for row in rows)
    assert len(rows) == len(names) + (4 if backward else len(PROVIDERS))
    assert f"path {names[1]}  relative_rms {wrong}" in capsys.readouterr().out
    table = pd.read_csv(tmp_path / ("training.csv" if backward else "ffn.csv"))
    assert np.isfinite(table["relative_rms"]).sum() == len(rows) - 1
    assert list(table["path"][-len(names) :]) == names


@pytest.mark.parametrize(("mode", "gated"), [("stream", True), ("eager", False)])
def test_rows_of_training_say_what_was_measured(dense_kernels, tmp_path, mode, gated):
    dense_kernels.shown = lambda call: call() and [("nvjet", 0.5)] * 3
    options = SIZES | {"kernels": True, "energy": True, "out": tmp_path, "mode": mode}
    rows = ffn([70, 130], [20], ["even", "skewed"], **options, gated=gated, backward=True)
    assert all(list(row) == COLUMNS["training"] for row in rows)
    table = pd.read_csv(tmp_path / "training.csv")
    union = {"stream": "triton union", "eager": "triton"}[mode]
    providers = ["dense eager", "dense torch.compile", union, "triton hybrid"]
    assert list(table["provider"]) == 4 * providers and set(table["mode"]) == {mode}
    assert list(table["path"]) == 4 * ["dense", "dense", *training_ops.TRAIN_PATHS]
    # 1.5 times what it needs, which SparseTraining knows after a first step.
    assert (table["capacity"].notna() == (table["path"] != "dense")).all()
    assert table["capacity"].dropna().between(1.4 * table["active"].min(), 96).all()
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    assert set(table["worst"]) <= {"y", "dx", "dw_gate", "dw_up", "dw_down"}
    assert (table["held"] == 500_000 - 4 * table["tokens"]).all() and (table["p50"] == 1).all()
    assert table["energy"].notna().all() and table["watts"].notna().all()
    parts = pd.read_csv(tmp_path / "training_kernels.csv")
    assert list(parts["provider"]) == list(table["provider"]) and set(parts["ms"]) == {1.5}


@pytest.mark.parametrize("wrong", ["dw_gate", "l1"])
def test_a_wrong_step_is_found_and_earlier_rows_are_kept(
    dense_kernels, tmp_path, monkeypatch, wrong
):
    def train(path, capacity, x, w_gate, *tensors, **options):
        busy = float(counts_of(x.detach(), w_gate.detach()).double().mean()) > 15
        if wrong == "dw_gate" and busy and w_gate.requires_grad:
            w_gate = w_gate.view_as(w_gate)
            w_gate.register_hook(lambda gradient: 0.98 * gradient)
        result = train_densely(path, capacity, x, w_gate, *tensors, **options)
        return result._replace(l1=(1.02 if wrong == "l1" and busy else 1) * result.l1)

    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(train))
    message = f"^{wrong} of triton union at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        ffn([70], [9, 20, 30], **SIZES, backward=True, out=tmp_path)
    assert len(pd.read_csv(tmp_path / "training.csv")) == 4  # of the first level


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
    monkeypatch.setattr(DenseLayer, "forward", dense)
    monkeypatch.setattr(Case, "weight_sets", 1)
    monkeypatch.setattr(calibration, "WAITING", 0)
    monkeypatch.setattr(calibration, "FLOOR_TOKENS", (1, 8, 32))
    monkeypatch.setattr(layer, "GRAPH_TOKENS", 8)
    return log


def test_a_calibration_holds_its_times(timed, tmp_path):
    result = calibrate(32, 64, tokens=(1, 8, 16))
    result.save(tmp_path / "c.json")
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
    # A path far behind is dropped.
    for m in (1, 8, 16):
        curve = [points[key] for key in sorted(points) if key[0] == m]
        for path in set(DEPENDS_ON) - {"dense"}:
            ratios = [ms[path] / ms["dense"] for ms in curve if path in ms]
            assert all(ratio <= BEHIND for ratio in ratios[:-1])
            assert len(ratios) == len(curve) or ratios[-1] > BEHIND


@pytest.mark.parametrize("pays, gated", [(17.0, True), (17.0, False), (0.5, True), (1e3, True)])
def test_at_the_crossover_both_take_as_long(dense_kernels, monkeypatch, pays, gated):
    """Sparse steps take the ms of a formula; with `pays` neurons they take as long as dense."""
    levels = []

    def train(path, capacity, x, w_gate, w_up, *tensors, **options):
        first = (w_up if w_gate is None else w_gate).detach()
        levels.append(float(counts_of(x.detach(), first).double().mean()))
        dense_kernels.spend((levels[-1] / pays) ** 0.5)
        return train_densely(path, capacity, x, w_gate, w_up, *tensors, **options)

    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(train))
    monkeypatch.setattr(calibration, "CROSSOVER_SHARES", (0.02, 0.1, 0.3, 0.6))  # of 96 neurons
    result = crossover(K, N, tokens=70, gated=gated)
    # No level after the first slower one.
    assert len({*levels}) == {0.5: 1, 17.0: 3, 1e3: 4}[pays]
    # p50 has four digits.
    expected = {0.5: 0, 17.0: 17.0, 1e3: levels[-1]}[pays]
    assert result == pytest.approx(expected, rel=5e-3)
