"""Whole models on a GPU: every measurement of a small one, with the real kernels and clock."""

import pandas as pd
import pytest
import torch

pytest.importorskip("triton")

from twell.__main__ import main
from twell.measure import decode, model, runner
from twell.measure.calibration import calibrate, crossover
from twell.measure.model import language_model
from twell.measure.providers import model_providers
from twell.measure.trainer import train_step

pytestmark = pytest.mark.usefixtures("whole_card")
SMALL = "num_layers=3 hidden_size=512 intermediate_size=1408 num_heads=8 vocab_size=4096".split()


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(runner, "TURNS", dict.fromkeys(runner.TURNS, runner.Turns(3, 10)))
    monkeypatch.setattr(runner, "ENERGY_MS", 200)
    for module in (decode, model):
        monkeypatch.setattr(module, "GENERATION", 8)
    yield
    torch.compiler.reset()


def test_a_model_is_measured_in_every_way(tmp_path):
    options = {"shapes": [(16, 512), (2, 200)], "active": [10, 300], "layers": True}
    options |= {"decode": [1, 8, 70], "decode_context": 50, "energy": True, "out": tmp_path}
    rows = language_model("0.5b", SMALL, **options)
    assert {name: len(rows) for name, rows in rows.items()} == {
        "model": 2 * 2 * 6,
        "model_layers": 2 * 3,
        "decode": 2 * 3 * 6,
    }
    assert {row["mode"] for row in rows["model"] if row["batch"] == 2} == {"graph"}
    assert all(row["p50"] > 0 and row["peak"] > 1e6 for row in rows["model"])
    for row in rows["model"] + rows["decode"]:
        expected = "decode" if row["tokens"] <= 512 else "union"
        if row["provider"].startswith("dense"):
            expected = "dense"
        assert row["provider"].startswith("auto") or row["path"] == f"{expected} 3"
    assert all(row["same"] > 0.9 for row in rows["decode"])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_steps_are_measured(tmp_path, checkpointed):
    sizes = [*SMALL, "context=256", "micro_batch=4", f"checkpoint_activations={checkpointed}"]
    rows = train_step("0.5b", sizes, active=20, profile="paper", compiled=True, out=tmp_path)
    names = ["dense torch.compile", "triton union torch.compile"]
    assert [row["provider"] for row in rows] == names
    assert all(row["peak"] > 1e6 and row["p50"] > 0 for row in rows)


MODES = "stream", "graph", "eager", "compiled", "stream --backward", "eager --backward"


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_measured_in_every_mode(mode, tmp_path):
    sizes = "--hidden-size 512 --intermediate-size 1408 --active 20 --energy --kernels"
    words = f"--debug measure ffn --tokens 600 --mode {mode} {sizes} --out {tmp_path}"
    assert main(words.split()) == 0
    rows = pd.read_csv(tmp_path / ("training.csv" if "backward" in mode else "ffn.csv"))
    assert (rows["p50"] > 0).all() and (rows["relative_rms"] < 0.05).all()
    assert (rows["energy"] > 0).all()


def test_a_layer_is_calibrated():
    calibration = calibrate(512, 1408, tokens=(1, 64, 4096))
    assert {point.tokens for point in calibration.times} == {1, 64, 4096}
    assert crossover(512, 1408, tokens=2048) >= 0


def test_decoding_with_tuned_layers():
    options = {"shapes": [], "active": [10], "decode": [1], "decode_context": 50}
    rows = language_model("0.5b", SMALL, **options, compiled=True, tuned=True)
    names = [provider.name for provider in model_providers(True, tuned=True)]
    assert [row["provider"] for row in rows["decode"]] == names
    assert all(row["same"] > 0.9 and row["p50"] > 0 for row in rows["decode"])
