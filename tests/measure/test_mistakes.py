"""Mistakes in the arguments of measurements are named before anything is built or measured."""

import re

import pytest
import torch

from study import record
from tests.factories.measure import TINY, K, N
from twell.__main__ import main
from twell.measure import layer, trainer
from twell.measure.calibration import calibrate
from twell.measure.layer import ffn
from twell.measure.model import language_model
from twell.measure.step import crossover, ffn_steps
from twell.measure.trainer import train_step

pytest.importorskip("triton")
UNWRITABLE = "cannot be written: name a file in a folder that exists"
LAYER = [
    ({"patterns": ["evn"]}, "pattern 'evn' is unknown; use one of even, skewed, recorded"),
    ({"tokens": [4, 0]}, "tokens holds 0; it has to be at least 1"),
    ({"hidden_size": 0}, "hidden_size is 0; the kernels need a multiple of 16"),
    ({"intermediate_size": 0}, "intermediate_size is 0; it has to be at least 1"),
    ({"kernels": True}, "say in which folder"),
    ({"out": "."}, r"(ffn|training).csv has the columns"),
]
STEPS = [
    ({"active": 0}, "active is 0; it has to be above 0 and below 2816"),
    ({"profile": "hump"}, "profile 'hump' is unknown; use one of paper, flat"),
    ({"out": "."}, "train_step.csv has the columns"),
    ({"overrides": ["micro_batch=-1"]}, "micro_batch is -1; it has to be at least 1"),
    ({"overrides": ["precision=fp32"]}, "precision is 'fp32'; the sparse path of training needs"),
]
MODEL = [
    ({"size": "no"}, "no configuration no"),
    ({"active": None}, "active: the paper has no model 'quick'; say how many neurons"),
    ({"active": [96]}, "each of 3 layers can have more than 0 and less than 96 active neurons"),
    ({"profile": "hump"}, "profile 'hump' is unknown; use one of paper, flat"),
    ({"shapes": [(4, 0)]}, "shapes holds 0; it has to be at least 1"),
    ({"shapes": [], "layers": True}, "layers: measured on the first of the batches, and there"),
    ({"tuned": True}, "tuned: decoding is timed so with compiled layers"),
    ({"layers": True, "ordered": True}, "layers: they are timed in the text's order"),
    ({"overrides": [*TINY, "activation=silu"]}, "quick has the activation 'silu'; sparse"),
    ({"out": "."}, r"decode.csv has the columns \['tokens', 'active'"),
]
SHAPE = {"hidden_size": K, "intermediate_size": N}
GIVEN = {"size": "quick", "overrides": TINY, "shapes": [(2, 32)], "active": [20]}
CASES = [(ffn, {"tokens": [4]} | options, words) for options, words in LAYER]
CASES += [(ffn_steps, {"tokens": [4]} | options, words) for options, words in LAYER]
CASES += [(ffn, {"tokens": [4], "mode": "fast"}, "mode 'fast' is unknown; use one of stream, gr")]
CASES += [(ffn, {"tokens": [4], "activation": "drelu", "gated": False}, "'drelu' needs a gate")]
CASES += [(ffn_steps, {"tokens": [4], "mode": "graph"}, "'graph' is unknown for steps; use one of")]
CASES += [(train_step, options, words) for options, words in STEPS]
CASES += [(language_model, GIVEN | options, words) for options, words in MODEL]
CASES += [(calibrate, SHAPE | {"out": out}, UNWRITABLE) for out in ("none/c.json", ".")]
CASES += [(calibrate, SHAPE | {"hidden_size": 33, "out": "c.json"}, "hidden_size is 33")]
CASES += [(crossover, SHAPE | {"hidden_size": 33}, "hidden_size is 33; the kernels need a mult")]
CASES += [(crossover, SHAPE | {"tokens": 0}, "tokens holds 0")]


@pytest.mark.parametrize("measured, options, words", CASES)
def test_mistakes_are_named(dense_kernels, tmp_path, monkeypatch, measured, options, words):
    monkeypatch.setattr(layer, "cases", lambda *_, **__: pytest.fail("measured something"))
    monkeypatch.setattr(trainer, "Trainer", lambda *_: pytest.fail("built something"))
    monkeypatch.chdir(tmp_path)
    for name in ("ffn", "training", "train_step", "decode"):
        (tmp_path / f"{name}.csv").write_text("tokens,active,device\n1,2,x\n")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        measured(**options)
    assert not dense_kernels.timed


MEASURED = re.compile("twell measure (?!quality)")  # which needs no GPU


def recorded_commands():
    commands = [command for commands in record.MEASURED.values() for command in commands]
    return [c.removeprefix("twell ").split() for c in commands if MEASURED.match(c)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
@pytest.mark.parametrize("command", recorded_commands(), ids=" ".join)
def test_the_commands_that_record_rows_are_understood(command, tmp_path, capsys):
    assert main([part.format(out=tmp_path, corpus=tmp_path) for part in command]) == 2
    assert "measuring needs a GPU, and torch sees none" in capsys.readouterr().err
