"""Mistakes in the arguments of measurements are named before anything is built or measured."""

import re

import pytest
import torch

from study import record
from tests.factories import measure
from tests.factories.measure import TINY, K, N
from twell.__main__ import main
from twell.measure import layer, trainer
from twell.measure.calibration import crossover
from twell.measure.layer import ffn
from twell.measure.model import language_model
from twell.measure.trainer import train_step

pytest.importorskip("triton")
FOREIGN = "tests.factories.measure:"
LAYER = [
    ({"patterns": ["evn"]}, "'evn'"),
    ({"tokens": [4, 0]}, "tokens holds 0"),
    ({"out": "."}, "ffn.csv has the columns"),
    ({"mode": "graph", "backward": True}, "'graph'"),
    ({"providers": ["tests.none:x"]}, "provider tests.none:x: No module named 'tests.none'"),
    ({"providers": [f"{FOREIGN}x"]}, f"provider {FOREIGN}x: .* no attribute 'x'.*module:function"),
    ({"providers": ["tests.factories"]}, "provider tests.factories: .*module:function"),
    ({"providers": [f"{FOREIGN}plain"], "bias": True}, "without biases"),
]
MODEL = [
    ({"providers": ["tests"]}, "provider tests: .*module:function"),
    ({"active": [96]}, "active is .* less than 96"),
    ({"shapes": [(4, 0)]}, "hold 0"),
    ({"shapes": [], "alike": True}, "first of the batches"),
    ({"overrides": [*TINY, "activation=silu"]}, "'silu'"),
    ({"checkpoint": ("x", measure.model(hidden_size=40), [1])}, "hidden_size is 40"),
    ({"checkpoint": ("x", measure.model(), [1]), "shapes": [(1, 300)]}, "x is for 256 tokens"),
]
GIVEN = {"size": "quick", "overrides": TINY, "shapes": [(2, 32)], "active": [20]}
SMALL = {"size": "quick", "overrides": [*TINY, "precision=bf16"]}
CASES = [(ffn, {"tokens": [4]} | options, words) for options, words in LAYER]
CASES += [(train_step, SMALL | {"profile": "hump"}, "'hump'")]
CASES += [(language_model, GIVEN | options, words) for options, words in MODEL]
CASES += [(crossover, {"hidden_size": K, "intermediate_size": N, "tokens": 0}, "tokens holds 0")]


@pytest.mark.parametrize("measured, options, words", CASES)
def test_mistakes_are_named(dense_kernels, tmp_path, monkeypatch, measured, options, words):
    monkeypatch.setattr(layer, "Exact", None)  # nothing is computed
    monkeypatch.setattr(trainer, "adamw", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ffn.csv").write_text("tokens,active,device\n1,2,x\n")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        measured(**options)
    assert not dense_kernels.timed


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "name, words",
    [
        ("refusing", "K is 32; this layer needs 2048"),
        ("narrow", r"its results have the shapes .*31.*, expected .*4, 32"),
    ],
)
def test_a_third_party_that_does_not_fit_is_named(dense_kernels, name, words, backward):
    options = {"hidden_size": K, "intermediate_size": N, "backward": backward}
    with pytest.raises(ValueError, match=f"{FOREIGN}{name} does not compute .*: {words}"):
        ffn([4], [9], **options, providers=[FOREIGN + name])
    assert not dense_kernels.timed


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_the_commands_that_record_rows_are_understood(tmp_path, capsys):
    commands = [command for commands in record.MEASURED.values() for command in commands]
    for command in filter(re.compile("twell measure (?!quality|model {out})").match, commands):
        words = command.removeprefix("twell ").format(out=tmp_path, corpus=tmp_path).split()
        assert main(words) == 2, command
        assert "measuring needs a GPU, and torch sees none" in capsys.readouterr().err
