"""Compiled, recomputed, in micro-batches or in two processes: the same numbers."""

import dataclasses

import numpy as np
import pytest
import torch
import yaml

from tests.train.runs import launch, series
from twell import results
from twell.model import load
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
    assert (
        sum(passes) == 2 * 2 * 3
    )  # with gradients: both layers, forward and again, in three steps


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
    one = results.load_run(train(short, tmp_path / "one", quiet=True))[1]
    other = results.load_run(
        train(dataclasses.replace(short, **changes), tmp_path / "other", quiet=True)
    )[1]
    torch.compiler.reset()
    for split, metrics in (
        ("train", ["loss", "cross_entropy", "l1", "grad_norm", "active_mean", "dead_fraction"]),
        ("valid", ["cross_entropy", "cross_entropy_silenced", "active_mean"]),
    ):
        for metric in metrics:
            np.testing.assert_allclose(
                series(one, metric, split), series(other, metric, split), rtol=2e-4, err_msg=metric
            )


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one(tiny_config, tmp_path, kind):
    settings = {
        "tokens": 8 * 512,
        "micro_batch": 3,
        "reinit": 0.3,
        "checkpoint_every": 4,
        "learning_rate": 1e-2,
    }
    settings["balance_every"] = 3
    config = dataclasses.replace(tiny_config, **settings)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    one = results.load_run(train(config, tmp_path / "one", quiet=True))[1]
    two, model = launch(tmp_path, "two", kind)
    for split, metrics in (
        ("train", ["loss", "cross_entropy", "l1", "grad_norm", "active_mean", "dead_fraction"]),
        ("valid", ["cross_entropy", "cross_entropy_silenced", "active_mean"]),
    ):
        for metric in metrics:
            np.testing.assert_allclose(
                series(two, metric, split), series(one, metric, split), rtol=3e-4, err_msg=metric
            )
    for (name, a), (_, b) in zip(
        model.state_dict().items(), load(tmp_path / "one")[0].state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=name)
