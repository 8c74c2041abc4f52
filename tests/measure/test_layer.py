"""Inference of one layer: rows, checks and the choice of "auto", by the real kernels."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.measure.factories import DEVICE, PEAKS, Graph, K, N, fresh_mask
from twell.measure import case, clock, layer, patterns
from twell.measure.check import TOLERANCE, Exact
from twell.measure.layer import ffn
from twell.measure.rows import COLUMNS
from twell.sparse import plan
from twell.sparse.calibration import Calibration, Point

pytest.importorskip("triton")
PROVIDERS = ["dense eager", "dense torch.compile", "dense"]
PROVIDERS += ["triton rowwise", "triton union", "triton decode", "auto"]
SIZES = {"hidden_size": K, "intermediate_size": N}


def test_rows_say_what_was_measured(fake_clock, tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "GRAPH_TOKENS", 20)
    monkeypatch.setattr(layer, "WEIGHT_SETS", 3)
    kernels = {"cublas matmul": (3.0, 0.5), "other": (1.0, 0.1)}
    monkeypatch.setattr(clock, "kernel_times", lambda calls: kernels)
    rows = ffn([5, 24], [9], ["even", "skewed"], **SIZES, kernels=True, out=tmp_path)
    assert all(list(row) == COLUMNS["ffn"] for row in rows)
    table = pd.read_csv(tmp_path / "ffn.csv")
    assert list(table["provider"]) == 2 * 2 * PROVIDERS and len(rows) == len(table)
    assert table["date"].nunique() == 1  # one command, one date
    few = table["tokens"] == 5
    assert (table["mode"] == few.map({True: "graph", False: "stream"})).all()
    assert (table["weight_sets"] == few.map({True: 3, False: 1})).all()
    assert (table["pattern"].value_counts() == len(rows) // 2).all()
    dense = table.query("provider == 'dense' and tokens == 24").iloc[0]
    assert (dense["flops"], dense["bytes"]) == (6 * 24 * N * K, 2 * (3 * N * K + 2 * 24 * K))
    assert table["energy"].isna().all() and table["gated"].all()
    assert set(table["dtype"]) == {"bfloat16"}
    assert (table["relative_rms"] < TOLERANCE["layer"]).all()
    parts = pd.read_csv(tmp_path / "kernels.csv")
    assert set(parts["provider"]) == {"dense", "triton rowwise", "triton union", "triton decode"}
    assert parts.query("kernel == 'other'")["flops"].isna().all()
    query = "kernel == 'cublas matmul' and provider == 'dense' and tokens == 5"
    product = parts.query(query).iloc[0]
    assert (product["flops"], product["launches"], product["ms"]) == (6 * 5 * N * K, 3.0, 0.5)
    peaks = [row["value"] for row in PEAKS]
    assert pd.read_csv(tmp_path / "ceilings.csv")["value"].tolist() == peaks


def test_recorded_rows_have_the_activity_of_their_masks(fake_clock, seed, monkeypatch):
    monkeypatch.setattr(case, "ROWWISE_ENTRIES", 0)  # slow in the interpreter
    r = np.random.default_rng(seed)
    masks = {"a": fresh_mask(r, 20, 40), "b": fresh_mask(r, 10, 30)}
    rows = ffn([25], patterns=["recorded"], hidden_size=16, gated=False, masks=masks)
    for name, mask in masks.items():
        length = min(len(mask), 16)  # of 20 tokens as many as the hidden size allows
        mask = mask[np.arange(25) % length]
        own = [row for row in rows if row["pattern"] == f"recorded {name}"]
        assert len(own) == len(PROVIDERS) - 1 and not any(row["gated"] for row in own)
        assert {row["intermediate_size"] for row in own} == {mask.shape[1]}
        activity = round(mask.sum() / 25, 2), mask.sum(1).max(), mask.any(0).sum()
        assert {(row["active"], row["active_max"], row["union"]) for row in own} == {activity}


def test_paths_that_would_take_too_long_are_left_out(fake_clock, monkeypatch):
    monkeypatch.setattr(case, "DECODE_TOKENS", 20)
    monkeypatch.setattr(case, "ROWWISE_ENTRIES", 70 * 4)
    rows = ffn([20, 70], [9], ["even"], **SIZES, mode="stream")
    few, many = ({row["path"] for row in rows if row["tokens"] == tokens} for tokens in (20, 70))
    assert few == {"dense", "rowwise", "union", "decode"} and many == {"dense", "union"}


def test_rows_are_kept_when_a_later_case_fails(fake_clock, tmp_path, monkeypatch):
    check, seen = Exact.check, []

    def fails_later(self, y, what):
        seen.append(what)
        return check(self, y * 2 if len(seen) == 12 else y, what)

    monkeypatch.setattr(Exact, "check", fails_later)
    message = "triton union at .* 70 tokens  skewed .* is wrong"
    with pytest.raises(ArithmeticError, match=message):
        ffn([70], [4, 9, 20], **SIZES, mode="stream", out=tmp_path)
    table = pd.read_csv(tmp_path / "ffn.csv")
    assert list(table["provider"]) == PROVIDERS and table["active"].nunique() == 1


def test_nothing_is_timed_before_all_is_checked(fake_clock, monkeypatch):
    monkeypatch.setattr(clock, "stream_times", lambda *_: pytest.fail("timed"))
    check = Exact.check

    def wrong(self, y, what):
        return check(self, y * 2 if what.startswith("auto") else y, what)

    monkeypatch.setattr(Exact, "check", wrong)
    with pytest.raises(ArithmeticError, match="^auto at .* is wrong"):
        ffn([5], [20], **SIZES, mode="stream")


def test_each_output_of_a_graph_is_checked(fake_clock, monkeypatch):
    class Forgets(Graph):
        def replay(self):
            super().replay()
            self.outputs[-1] *= 0

    def capture(calls):
        graph = Forgets(calls)
        return graph, graph.outputs

    monkeypatch.setattr(clock, "capture", capture)
    with pytest.raises(ArithmeticError, match="dense eager at .* is wrong"):
        ffn([5], [20], **SIZES)


def test_energy_without_a_counter_is_left_empty(fake_clock, monkeypatch, capsys):
    def meter():
        raise RuntimeError("no such counter")

    monkeypatch.setattr(clock, "energy_meter", meter)
    rows = ffn([5], [4], **SIZES, mode="stream", energy=True)
    assert {row["energy"] for row in rows} == {None}
    assert "energy is not measured: no such counter" in capsys.readouterr().out


MISTAKES = [
    ({"patterns": ["evn"]}, "pattern 'evn' is unknown; use one of even, skewed, recorded"),
    ({"tokens": [4, 0]}, "tokens holds 0; it has to be at least 1"),
    ({"hidden_size": 0}, "hidden_size is 0; the kernels need a multiple of 16"),
    ({"hidden_size": 40}, "hidden_size is 40; the kernels need a multiple of 16"),
    ({"intermediate_size": 0}, "intermediate_size is 0; it has to be at least 1"),
    ({"kernels": True}, "say in which folder"),
]


@pytest.mark.parametrize(
    "options, message",
    [*MISTAKES, ({"mode": "fast"}, "mode 'fast' is unknown; use 'stream' or 'graph'")],
)
def test_mistakes_are_found_before_anything_is_measured(fake_clock, monkeypatch, options, message):
    monkeypatch.setattr(layer, "ceilings", lambda: pytest.fail("measured something"))
    with pytest.raises(ValueError, match=message):
        ffn(**({"tokens": [4]} | options))


def test_unfit_files_are_found_before_anything_is_measured(fake_clock, tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "ceilings", lambda: pytest.fail("measured something"))
    (tmp_path / "kernels.csv").write_text("tokens,active,device\n1,2,x\n")
    with pytest.raises(ValueError, match="kernels.csv has the columns"):
        ffn([4], out=tmp_path)
    with pytest.raises(NotADirectoryError, match="csv is a file; out is a folder, for ffn.csv"):
        ffn([4], out=tmp_path / "kernels.csv")


@pytest.mark.parametrize("activity, path", [((1.0, 2.0), "union"), ((90.0, 95.0), "dense")])
def test_auto_knows_the_activity_and_its_path_is_recorded(fake_clock, monkeypatch, activity, path):
    made = []

    def fast_unions(shape):
        made.append(shape)
        points = (Point(70, 1, u, {"dense": 1.0, "union": u / 50}) for u in (1, 96))
        return Calibration("x", *shape, "bfloat16", "", "", tuple(points))

    monkeypatch.setattr(plan, "default", lambda *shape: fast_unions(shape))
    monkeypatch.setattr(Exact, "check", lambda *_: 1e-3)
    monkeypatch.setattr(case, "ROWWISE_ENTRIES", 0)  # slow in the interpreter
    rows = ffn([70], [activity[0]], **SIZES, mode="stream")
    assert made and [row["path"] for row in rows if row["provider"] == "auto"] == [path]
    inputs = patterns.synthetic_layer(70, K, N, active=activity[0], device=DEVICE)
    for auto in case.Case.of("skewed", inputs, True, 2).auto_layers():  # before any input
        assert auto.chooser.path(70) == path


def test_measuring_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="measuring needs a GPU, and torch sees none"):
        ffn([4])
