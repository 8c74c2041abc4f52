"""Mistakes in the arguments of measurements are named before anything is built or measured."""

import re

import pytest
import torch

from study import record
from tests.factories.measure import TINY, K, N
from twell.__main__ import main
from twell.measure import layer, trainer
from twell.measure.calibration import calibrate, crossover
from twell.measure.layer import ffn
from twell.measure.model import language_model
from twell.measure.trainer import train_step

pytest.importorskip("triton")
LAYER = [
    ({"patterns": ["evn"]}, "pattern 'evn' is unknown"),
    ({"tokens": [4, 0]}, "tokens holds 0"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"intermediate_size": 0}, "intermediate_size is 0"),
    ({"kernels": True}, "out"),
    ({"out": "."}, "ffn.csv has the columns"),
    ({"mode": "fast"}, "mode 'fast' is unknown"),
    ({"activation": "drelu", "gated": False}, "'drelu' needs a gate"),
    ({"mode": "graph", "backward": True}, "mode 'graph' is unknown"),
    ({"bias": True, "backward": True}, "biases"),
    ({"out": ".", "backward": True}, "training.csv has the columns"),
]
STEPS = [
    ({"active": 0}, "active is 0"),
    ({"profile": "hump"}, "profile 'hump' is unknown"),
    ({"out": "."}, "train_step.csv has the columns"),
    ({"overrides": ["micro_batch=-1"]}, "micro_batch is -1"),
    ({"overrides": ["precision=fp32"]}, "precision is 'fp32'"),
]
MODEL = [
    ({"size": "no"}, "no configuration no"),
    ({"active": [96]}, "active is .* less than 96"),
    ({"profile": "hump"}, "profile 'hump' is unknown"),
    ({"shapes": [(4, 0)]}, "hold 0; it has to be at least 1"),
    ({"shapes": [], "layers": True}, "layers: measured on the first of the batches"),
    ({"layers": True, "ordered": True}, "layers: they are timed in the text's order"),
    ({"tuned": True}, "tuned: decoding"),
    ({"overrides": [*TINY, "activation=silu"]}, "quick has the activation 'silu'"),
    ({"out": "."}, r"decode.csv has the columns \['tokens', 'active'"),
]
SHAPE = {"hidden_size": K, "intermediate_size": N}
GIVEN = {"size": "quick", "overrides": TINY, "shapes": [(2, 32)], "active": [20]}
SMALL = {"model": "quick", "overrides": [*TINY, "precision=bf16"]}
CASES = [(ffn, {"tokens": [4]} | options, words) for options, words in LAYER]
CASES += [(train_step, SMALL | options, words) for options, words in STEPS]
CASES += [(language_model, GIVEN | options, words) for options, words in MODEL]
CASES += [(calibrate, {"out": out}, "cannot be written") for out in ("none/c.json", ".")]
CASES += [(calibrate, SHAPE | {"hidden_size": 33}, "hidden_size is 33")]
CASES += [(crossover, SHAPE | {"tokens": 0}, "tokens holds 0")]


@pytest.mark.parametrize("measured, options, words", CASES)
def test_mistakes_are_named(dense_kernels, tmp_path, monkeypatch, measured, options, words):
    monkeypatch.setattr(layer, "Exact", None)  # nothing is computed
    monkeypatch.setattr(trainer, "adamw", None)
    monkeypatch.chdir(tmp_path)
    for name in ("ffn", "training", "train_step", "decode"):
        (tmp_path / f"{name}.csv").write_text("tokens,active,device\n1,2,x\n")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        measured(**options)
    assert not dense_kernels.timed


MEASURED = re.compile("twell measure (?!quality)")  # which needs no GPU
RECORDED = [command for commands in record.MEASURED.values() for command in commands]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_the_commands_that_record_rows_are_understood(tmp_path, capsys):
    commands = [c.removeprefix("twell ").split() for c in RECORDED if MEASURED.match(c)]
    for command in commands:
        assert main([part.format(out=tmp_path, corpus=tmp_path) for part in command]) == 2, command
        assert "measuring needs a GPU, and torch sees none" in capsys.readouterr().err
