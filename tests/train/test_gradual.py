"""A student whose SiLU turns into ReLU over its first steps."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from tests.factories import SEED
from tests.factories.train import log_of, series, stop_training, write_pretrained
from twell import results
from twell.models import load
from twell.sparse.activations import Activation
from twell.train import train
from twell.train.loop import Run

# 40 steps, of which 15 have SiLU; the threshold moves from step 25 on.
GRADUAL = dict(silu_steps=15, l1_zero_steps=20, active_share=0.1, l1_coefficient=0.0)
GRADUAL |= dict(threshold=0.3, tokens=20480, checkpoint_every=5)


@pytest.mark.parametrize("threshold", [0, 0.5])
def test_the_gate_is_between_silu_and_relu(threshold):
    a = torch.randn(1000, generator=torch.Generator().manual_seed(SEED)).double()
    relu = a * (a > threshold)
    assert torch.equal(Activation("relu", threshold=threshold).gate(a), relu)
    for share in (0.25, 1):
        expected = share * F.silu(a) + (1 - share) * relu
        gate = Activation("relu", threshold=threshold, silu=share).gate(a)
        torch.testing.assert_close(gate, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_student_begins_as_its_teacher_and_ends_with_relu(
    config, tmp_path, monkeypatch, compiled
):
    given = dataclasses.replace(config(), **GRADUAL, compile=compiled)
    step, shares = Run.step, []

    def seen(run, number):
        result = step(run, number)
        shares.append([ffn.act.silu for ffn in run.model.ffns])
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", seen)
        run = train(given, tmp_path / "whole", quiet=True)
    expected = [max(0, 1 - number / 15) for number in range(1, 41)]
    assert [one for one, _ in shares] == [other for _, other in shares] == pytest.approx(expected)

    log = results.load_run(run)[1]
    kl = series(log, "kl", "valid").droplevel("layer")
    at_once = log_of(config("tokens=1024"), tmp_path / "at-once")
    assert kl[0] < 1e-6 and series(at_once, "kl", "valid").iloc[0] > 0.01
    active = series(log, "active_mean").groupby("step").mean() / 96
    assert (active[[5, 10]] > 0.99).all() and (active.loc[20:] < 0.5).all()
    thresholds = series(log, "threshold").droplevel("layer")
    assert thresholds.loc[:25].nunique() == 1 and thresholds.loc[25:].nunique() > 2
    assert 0.07 < active[40] < 0.115

    # The saved model has ReLU above the last threshold: its loss is the one that was logged.
    model, blocks = load(run)[0].eval(), given.prepare_text()[2]
    assert model.config.hidden_act == "relu" and {ffn.act.silu for ffn in model.ffns} == {0}
    ids = blocks.draw(range(len(blocks)))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    logged = series(log, "cross_entropy", "valid").droplevel("layer")[40]
    assert loss == pytest.approx(logged, rel=1e-4)

    for stopped in () if compiled else (10, 25):
        folder = tmp_path / str(stopped)
        stop_training(given, folder, stopped)
        again = results.load_run(train(given, folder, resume=True, quiet=True))[1]
        for metric in ("kl", "active_mean", "threshold"):
            assert series(log, metric).equals(series(again, metric)), (metric, stopped)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("tokens", 7680, "silu_steps is 15 and the run has 15 steps: raise tokens"),
        ("fit_tokens", 512, "silu_steps is 15: .* nothing to fit; set fit_tokens to 0, not 512"),
        ("l1_zero_steps", 14, "silu_steps is 15, .*; set l1_zero_steps to as many or more, not 14"),
        (
            "backend",
            "triton",
            "silu_steps is 15, for which backend has to be 'dense', not 'triton'",
        ),
        ("silu_steps", -1, "silu_steps is -1; it has to be a finite number, 0 or more"),
    ],
)
def test_what_does_not_fit_silu_steps_is_refused(config, field, value, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config(), **GRADUAL | {field: value})


def test_silu_steps_need_a_teacher_with_silu(config, tmp_path, tiny_text):
    given = dataclasses.replace(config(), **GRADUAL)
    with pytest.raises(ValueError, match="silu_steps is 15; only `twell relufy`, with a teacher"):
        train(dataclasses.replace(given, teacher=None), tmp_path / "run", quiet=True)
    folder = write_pretrained(tmp_path / "model", tiny_text, hidden_act="gelu")
    with pytest.raises(
        ValueError, match="silu_steps is 15, and the teacher has gelu, not SiLU; leave"
    ):
        config("silu_steps=15", "tokens=20480", "active_share=0", "l1_coefficient=0", model=folder)
