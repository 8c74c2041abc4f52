"""Compiled, recomputed, in micro-batches or in two processes: the same numbers."""

import dataclasses
import functools

import pytest
import torch

from tests.factories.train import assert_same_numbers, launch, log_of, write_config
from tests.kills import differences
from twell.models import load
from twell.train import build


def compare(config, tmp_path, changes, rtol):
    settings = {"tokens": 3 * 512, "log_every": 1, "dead_window_tokens": 512, "reinit": 0.1}
    short = dataclasses.replace(config, **settings)
    one, other = log_of(short, tmp_path / "one"), log_of(short, tmp_path / "other", **changes)
    torch.compiler.reset()
    assert_same_numbers(one, other, rtol)


@pytest.mark.parametrize("changes", [{"compile": True}, {"micro_batch": 5}])
def test_other_ways_to_compute_change_nothing(tiny_config, tmp_path, monkeypatch, changes):
    passes, plain = [], build.checkpoint

    def counted(function, *args, **kwargs):
        def forward(*args, **kwargs):
            passes.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return plain(forward, *args, **kwargs)

    monkeypatch.setattr(build, "checkpoint", counted)
    # Inductor takes a minute. `test_compiled_by_inductor` has it.
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    with torch._dynamo.config.patch(optimize_ddp=True):  # put back
        compare(tiny_config, tmp_path, {"checkpoint_activations": True} | changes, 2e-4)
    # With gradients: both layers, forward and again, in three steps.
    assert sum(passes) == (2 * 2 * 3 if "compile" in changes else 0)


@pytest.mark.slow
def test_compiled_by_inductor(tiny_config, tmp_path):
    compare(tiny_config, tmp_path, {"compile": True, "checkpoint_activations": True}, 2e-4)


# In the same two processes: a run that does not stop, and one that stops at step 4.
STOPPED = """
import pathlib
out = sys.argv[4]
config = TrainConfig.load(sys.argv[2])
train(config, out + "-expected", quiet=True)
save = Run.save_checkpoint

def save_and_stop(self, step):
    save(self, step)
    self.accelerator.wait_for_everyone()
    raise KeyboardInterrupt

Run.save_checkpoint = save_and_stop
try:
    train(config, out, quiet=True)
except KeyboardInterrupt:
    Run.save_checkpoint = save
files = sorted(path.name for path in pathlib.Path(out, "checkpoint-00000004").iterdir())
assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"], files
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_resume_exactly_and_give_the_losses_of_one(tiny_config, tmp_path, kind):
    settings = {"tokens": 8 * 512, "micro_batch": 3, "checkpoint_every": 4, "learning_rate": 1e-2}
    config = dataclasses.replace(tiny_config, reinit=0.3, balance_every=3, **settings)
    write_config(config, tmp_path / "config.yaml")
    one = log_of(config, tmp_path / "one")
    two, model = launch(tmp_path, "two", kind, "--resume", prelude=STOPPED)
    assert differences(tmp_path / "two", tmp_path / "two-expected") == []
    assert_same_numbers(two, one, 3e-4)
    expected = load(tmp_path / "one")[0].state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-4, msg=name)
