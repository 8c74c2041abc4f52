"""Activity is brought to the wanted share: by the L1 coefficient, or by the threshold."""

import dataclasses
import functools
import math

import pytest
import torch

from tests.factories.train import series
from twell import results
from twell.config import TrainConfig
from twell.export import export
from twell.models import load
from twell.train import train
from twell.train.loop import Run
from twell.train.steer import Steering


def steering(*fields):
    given = "active_share=0.2", "l1_growth=1.5", "l1_stage_steps=10", "l1_zero_steps=10"
    return Steering(TrainConfig.load("relufy", [*given, *fields]), None)


@pytest.mark.parametrize(
    "shares, factors",
    [
        ([0.5, 0.5], [1.5**3, 1.5**3]),  # too many: at most three factors a stage
        ([0.4, 0.25], [1.5**3, 1.0]),  # falls below the aim in the next stage
        ([0.1, 0.125], [1 / 1.5**3, 1.0]),  # comes back within five stages
        ([0.05, 0.051], [1 / 1.5**3, 1 / 1.5**3]),  # comes back too slowly
        (8 * [0.001], [*5 * [1 / 1.5**3], 1e-3 * 1.5**15, 1.0, 1.0]),  # at a thousandth it ends
    ],
)
def test_the_coefficient_waits_for_activity_on_its_way(shares, factors):
    steered, found = steering(), []
    steered.after(10, 0.9 * steered.config.intermediate_size)  # the term does not act yet
    assert steered.factor == 1 and steered.value == 1e-3
    for stage, share in enumerate(shares, 2):
        before = steered.factor
        for step in range(10 * stage - 9, 10 * stage + 1):
            steered.after(step, share * steered.config.intermediate_size)
        found.append(steered.factor / before)
    assert found == pytest.approx(factors) and steered.value == 1e-3 * steered.factor


def test_the_threshold_finds_an_exponential_share_at_once():
    """No stage changes it by more than three factors."""
    steered = steering("l1_coefficient=0", "threshold=0.5")
    exact = 0.5 * math.log(0.196 / 0.5) / math.log(0.3 / 0.5)
    assert 0.5 * steered.of_threshold(0.3) == pytest.approx(exact)
    for share, factor in ((0.0, 1.5**-3), (0.9, 1.5**3), (0.499, 1.5**3), (0.196, 1.0)):
        assert steered.of_threshold(share) == pytest.approx(factor)


def test_a_run_says_that_it_missed_the_wanted_share():
    steered = steering()
    size = steered.config.intermediate_size
    for share, remedy in ((0.21, "raise tokens, l1_coefficient"), (0.1, "lower l1_coefficient")):
        line = steered.missed(3 * [share * size])
        assert f"{share:.1%}" in line and remedy in line
    assert steered.missed(3 * [0.17 * size]) is None


def test_without_l1_the_threshold_rises_until_few_are_active(config, tmp_path, monkeypatch):
    """In compiled layers too, which have to see each new threshold."""
    compile = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile)  # inductor takes minutes
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    words = "active_share=0.1 l1_coefficient=0 threshold=0.05 l1_stage_steps=5 tokens=30720"
    given = dataclasses.replace(config(*words.split()), compile=True)
    validate, validated = Run.validate, {}

    def seen(run, step):
        validated[step] = run.model.ffns[0].threshold
        validate(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "validate", seen)
        run = train(given, tmp_path / "whole", quiet=True)
    log = results.load_run(run)[1]
    thresholds = series(log, "threshold").droplevel("layer")
    assert thresholds.iloc[0] == pytest.approx(0.05) and thresholds.nunique() > 5
    assert "l1_coefficient" not in set(log["metric"])
    shares = series(log, "active_mean", "valid").groupby("step").mean() / 96
    assert shares.iloc[0] > 0.3 and 0.07 < shares.iloc[-1] < 0.115
    # A validation has the threshold of its row, also where a stage ends.
    del validated[0]
    rows = thresholds.groupby("step").first()[[*validated]]
    assert len(validated) == 3 and validated == pytest.approx(rows.to_dict(), rel=1e-4)
    # The model has the threshold of the last row.
    model = load(run)[0]
    assert {ffn.threshold for ffn in model.ffns} == {model.config.activation_threshold}
    assert model.config.activation_threshold == pytest.approx(thresholds.iloc[-1], rel=1e-4)
    card = (export(run, tmp_path / "out", text="Words.") / "README.md").read_text()
    last = f"{model.config.activation_threshold:.3g}"
    assert f"| activation | relu above {last} |" in card
