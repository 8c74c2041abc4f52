"""Compiled, recomputed, in micro-batches or in two processes: the same numbers."""

import dataclasses

import pytest
import torch
import yaml

from tests.train.runs import assert_same_numbers, launch, log_of
from twell.models import load
from twell.train import build, train


def test_compiled_layers_are_computed_again_too(tiny_config, tmp_path, monkeypatch):
    passes, plain = [], build.checkpoint

    def counted(function, *args, **kwargs):
        def forward(*args, **kwargs):
            passes.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return plain(forward, *args, **kwargs)

    monkeypatch.setattr(build, "checkpoint", counted)
    config = dataclasses.replace(
        tiny_config, tokens=3 * 512, compile=True, checkpoint_activations=True
    )
    train(config, tmp_path / "run", quiet=True)
    torch.compiler.reset()
    # With gradients: both layers, forward and again, in three steps.
    assert sum(passes) == 2 * 2 * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_activations": True},
        {"compile": True},
        {"compile": True, "checkpoint_activations": True},
        {"micro_batch": 5},
    ],
)
def test_other_ways_to_compute_change_nothing(tiny_config, tmp_path, changes):
    short = dataclasses.replace(
        tiny_config, tokens=3 * 512, log_every=1, dead_window_tokens=512, reinit=0.1
    )
    one, other = log_of(short, tmp_path / "one"), log_of(short, tmp_path / "other", **changes)
    torch.compiler.reset()
    assert_same_numbers(one, other, 2e-4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(tiny_config, tmp_path, kind):
    settings = {
        "tokens": 8 * 512,
        "micro_batch": 3,
        "reinit": 0.3,
        "checkpoint_every": 4,
        "learning_rate": 1e-2,
        "balance_every": 3,
    }
    config = dataclasses.replace(tiny_config, **settings)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    one = log_of(config, tmp_path / "one")
    two, model = launch(tmp_path, "two", kind)
    assert_same_numbers(two, one, 3e-4)
    expected = load(tmp_path / "one")[0].state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-4, msg=name)
