import dataclasses

import numpy as np
import pytest
import torch

from tests.factories.sparse import on_cpu
from tests.factories.train import launch, series, stop_training, stream_config, write_config
from tests.kills import differences
from twell import results
from twell.sparse import training as sparse_training
from twell.train import train

BF16 = {"precision": "bf16"}
# Two layers and three micro-batches, the last one short.
MICRO_BATCHES = {"backend": "triton", "micro_batch": 7, "tokens": 10 * 512, "reinit": 0.1}


def repeated(run):
    return series(results.load_run(run)[1], "repeated_steps").tolist()


def unlike(run, expected):
    """The differences between two runs besides the number of repeated steps."""
    ignored = "metric not in ('tokens_per_second', 'repeated_steps')"
    one, other = (results.load_run(path)[1].query(ignored) for path in (run, expected))
    same = one.reset_index(drop=True).equals(other.reset_index(drop=True))
    return [name for name in differences(run, expected) if not (same and name == "log.csv")]


@on_cpu
@pytest.mark.parametrize("kind", ["blocks", "stream"])
def test_runs_are_the_same_bit_for_bit(tiny_config, tiny_text, tmp_path, monkeypatch, fake, kind):
    """Two micro-batches overflow; their steps are repeated with larger buffers."""
    config = tiny_config
    if kind == "stream":
        config = stream_config(tiny_config, tiny_text, tmp_path / "hub")
    config = dataclasses.replace(config, **BF16, **MICRO_BATCHES)
    fake.scale = 8
    with monkeypatch.context() as patch:
        patch.setattr(sparse_training, "SMALLEST", 96)
        expected = train(config, tmp_path / "expected", quiet=True)
    random_state = torch.get_rng_state()
    assert {capacity for _, capacity, _ in fake.calls} == {96} and len(fake.calls) == 10 * 3 * 2
    assert repeated(expected) == [0] * 3
    fake.calls.clear()
    fake.heavy = {26, 52}  # in the steps 5 and 8; the larger buffers suffice for the second
    result = train(config, tmp_path / "result", quiet=True)
    assert {capacity for _, capacity, _ in fake.calls} == {32, 96} and len(fake.calls) == 11 * 3 * 2
    assert repeated(result) == [0, 1, 1]
    assert unlike(result, expected) == [] and torch.equal(torch.get_rng_state(), random_state)
    assert np.isfinite(series(results.load_run(result)[1], "loss")).all()


# In the third step the second of two processes needs more than there is room for, the first does
# not. Before it comes a run with room for everything, in the same processes: to start them takes
# longer than to train.
TWO = """
import os

from tests.factories.ops import as_sparse_train
from tests.factories.sparse import FakeKernels
from twell.sparse import training as sparse_training
from twell.sparse import training_ops

fake = FakeKernels(scale=8)
training_ops.sparse_train = as_sparse_train(fake)
smallest, sparse_training.SMALLEST = sparse_training.SMALLEST, 96
train(TrainConfig.load(sys.argv[2]), sys.argv[-1] + "-expected", quiet=True)
sparse_training.SMALLEST = smallest
fake.calls.clear()
fake.heavy = {9} if os.environ["RANK"] == "1" else set()
"""


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_of_two_processes_is_enough_to_repeat(tiny_config, tmp_path, kind):
    settings = {"backend": "triton", "tokens": 5 * 512, "micro_batch": 4, "log_every": 1}
    config = dataclasses.replace(tiny_config, **BF16, **settings)
    write_config(config, tmp_path / "config.yaml")
    launch(tmp_path, "heavy", kind, prelude=TWO)
    assert repeated(tmp_path / "heavy") == [0, 0, 1, 1, 1]
    assert not any(repeated(tmp_path / "heavy-expected"))
    assert unlike(tmp_path / "heavy", tmp_path / "heavy-expected") == []


@on_cpu
def test_a_resumed_run_makes_the_same_choices(tiny_config, tmp_path, monkeypatch, fake):
    times = dataclasses.replace(sparse_training.default(32, 96, True), training=43.0)
    monkeypatch.setattr(sparse_training, "default", lambda *_, **__: times)
    monkeypatch.setattr(sparse_training, "CAPACITY_MARGIN", 1.1)
    settings = {"backend": "auto", "micro_batch": 8, "checkpoint_every": 2, "log_every": 1}
    config = dataclasses.replace(tiny_config, l1_coefficient=0.05, **BF16, **settings)
    fake.heavy = {13}
    whole = train(config, tmp_path / "whole", quiet=True)
    layers = series(results.load_run(whole)[1], "sparse_layers").tolist()
    assert layers[0] == 0 and layers[-1] == 2, layers
    assert repeated(whole)[-1] > 0
    for stop in (4, 10):
        fake.calls.clear()
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
