import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from tests.factories.ops import as_sparse_train
from tests.factories.sparse import FakeKernels, on_cpu
from tests.factories.train import launch, series, stop_training, stream_config
from tests.kills import differences
from twell import results
from twell.sparse import training as sparse_training
from twell.sparse import training_ops
from twell.train import train
from twell.train.loop import Run

BF16 = {"precision": "bf16"}


def heavy_steps(monkeypatch, fake, heavy):
    """Let the fake need 60 entries more in some (step, micro-batch)."""
    inner, draw = Run.step, Run.autocast

    def step(self, number):
        batches, passes = math.ceil(16 / (self.config.micro_batch or 16)), itertools.count()

        def autocast():
            fake.extra = 60 if (number, next(passes) % batches) in heavy else 0
            return draw(self)

        self.autocast = autocast
        try:
            return inner(self, number)
        finally:
            del self.autocast
            fake.extra = 0

    monkeypatch.setattr(Run, "step", step)


def unlike(run, expected):
    """The differences between two runs besides the number of repeated steps."""
    ignored = "metric not in ('tokens_per_second', 'repeated_steps')"
    one, other = (results.load_run(path)[1].query(ignored) for path in (run, expected))
    same = one.reset_index(drop=True).equals(other.reset_index(drop=True))
    return [name for name in differences(run, expected) if not (same and name == "log.csv")]


@on_cpu
@pytest.mark.parametrize("kind", ["blocks", "stream"])
def test_runs_are_the_same_bit_for_bit(tiny_config, tiny_text, tmp_path, monkeypatch, kind):
    fake, ends, finish = FakeKernels(scale=8), [], Run.finish
    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(fake))
    noting = lambda self: ends.append(torch.get_rng_state()) or finish(self)  # noqa: E731
    monkeypatch.setattr(Run, "finish", noting)
    config = tiny_config
    if kind == "stream":
        config = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    changes = {"backend": "triton", "micro_batch": 7, "tokens": 10 * 512, "reinit": 0.1}
    config = dataclasses.replace(config, **BF16, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(sparse_training, "SMALLEST", 96)
        expected = train(config, tmp_path / "expected", quiet=True)
    assert {capacity for _, capacity, _ in fake.calls} == {96} and len(fake.calls) == 10 * 3 * 2
    log = results.load_run(expected)[1]
    assert series(log, "sparse_layers").tolist() == [2] * 3
    assert series(log, "repeated_steps").tolist() == [0] * 3
    fake.calls.clear()
    heavy_steps(monkeypatch, fake, {(5, 1), (8, 2)})
    result = train(config, tmp_path / "result", quiet=True)
    assert {capacity for _, capacity, _ in fake.calls} == {32, 96} and len(fake.calls) == 11 * 3 * 2
    log = results.load_run(result)[1]
    assert series(log, "repeated_steps").tolist() == [0, 1, 1]
    assert unlike(result, expected) == [] and torch.equal(*ends)
    assert np.isfinite(series(log, "loss")).all()


# In the third step of the heavy training the second of two processes needs more than there is room
# for, the first does not. Before it comes one with room for everything, in the same processes: to
# start them takes longer than to train.
TWO = """
from tests.factories.ops import as_sparse_train
from tests.factories.sparse import FakeKernels
from twell.sparse import training as sparse_training
from twell.sparse import training_ops

heavy = False
fake = FakeKernels(scale=8)
training_ops.sparse_train = as_sparse_train(fake)
inner = Run.step

def step(self, number):
    alone = heavy and number == 3 and self.accelerator.process_index == 1
    fake.extra = 60 if alone else 0
    before = len(fake.calls)
    done = inner(self, number)
    short = [needed > capacity for _, capacity, needed in fake.calls[before:]]
    calls = 8 if heavy and number == 3 else 4
    assert any(short) == alone and len(short) == calls, (number, short)
    return done

Run.step = step
smallest, sparse_training.SMALLEST = sparse_training.SMALLEST, 96
train(TrainConfig.load(sys.argv[2]), sys.argv[-1] + "-expected", quiet=True)
sparse_training.SMALLEST, heavy = smallest, True
"""


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_of_two_processes_is_enough_to_repeat(tiny_config, tmp_path, kind):
    settings = {"backend": "triton", "tokens": 5 * 512, "micro_batch": 4, "log_every": 1}
    config = dataclasses.replace(tiny_config, **BF16, **settings)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    log, _ = launch(tmp_path, "heavy", kind, prelude=TWO)
    expected = tmp_path / "heavy-expected"
    assert series(log, "repeated_steps").tolist() == [0, 0, 1, 1, 1]
    assert not series(results.load_run(expected)[1], "repeated_steps").any()
    assert unlike(tmp_path / "heavy", expected) == []


@on_cpu
def test_a_resumed_run_makes_the_same_choices(tiny_config, tmp_path, monkeypatch):
    fake = FakeKernels()
    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(fake))
    heavy_steps(monkeypatch, fake, {(3, 0), (14, 1)})
    times = dataclasses.replace(sparse_training.default(32, 96, True), training=43.0)
    monkeypatch.setattr(sparse_training, "default", lambda *_, **__: times)
    monkeypatch.setattr(sparse_training, "CAPACITY_MARGIN", 1.1)
    settings = {"backend": "auto", "micro_batch": 8, "checkpoint_every": 2, "log_every": 1}
    config = dataclasses.replace(tiny_config, l1_coefficient=0.05, **BF16, **settings)
    whole = train(config, tmp_path / "whole", quiet=True)
    layers = series(results.load_run(whole)[1], "sparse_layers").tolist()
    assert layers[0] == 0 and layers[-1] == 2, layers
    for stop in (4, 10):
        stop_training(config, tmp_path / str(stop), stop)
        train(config, tmp_path / str(stop), resume=True, quiet=True)
        assert differences(tmp_path / str(stop), whole) == []


@on_cpu
def test_runs_that_cannot_be_sparse_are_as_before(tiny_config, tmp_path, fake):
    logs = []
    for backend in ("dense", "triton", "auto"):  # the kernels are not for fp32
        config = dataclasses.replace(tiny_config, tokens=4 * 512, backend=backend, log_every=1)
        logs.append(results.load_run(train(config, tmp_path / backend, quiet=True))[1])
    assert not {"sparse_layers", "repeated_steps"} & set(logs[1].metric) and not fake.calls
    for log in logs[1:]:
        # the same initial weights, though they are stored in another order
        np.testing.assert_allclose(series(log, "loss"), series(logs[0], "loss"), rtol=1e-5)


@pytest.mark.slow  # tests/kernels/test_training_layer.py covers a layer
# Put back what training sets.
@torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256)
@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False, optimize_ddp=True)
def test_training_with_the_kernels_is_close_to_dense(tiny_config, tmp_path, monkeypatch):
    if not torch.cuda.is_available():  # inductor's code for the other modules takes most time
        eager = functools.partialmethod(nn.Module.compile, backend="aot_eager")
        monkeypatch.setattr(nn.Module, "compile", eager)
    sizes = dict.fromkeys(("context", "batch_tokens", "valid_tokens"), 16) | BF16
    settings = sizes | {"tokens": 2 * 16, "intermediate_size": 80, "log_every": 1}
    logs = []
    for backend in ("dense", "triton"):
        options = settings | {"backend": backend, "compile": backend == "triton"}
        run = dataclasses.replace(tiny_config, **options)
        logs.append(results.load_run(train(run, tmp_path / backend, quiet=True))[1])
    torch.compiler.reset()
    # Half of the neurons are active at first.
    assert series(logs[1], "repeated_steps").tolist() == [1, 1]
    for metric in ("loss", "l1", "grad_norm", "active_mean"):
        expected, options = series(logs[0], metric), {"rtol": 1e-2, "err_msg": metric}
        np.testing.assert_allclose(series(logs[1], metric), expected, **options)
