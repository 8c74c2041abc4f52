"""One fake clock for all tests: calls run and are checked, but no time is taken."""

import itertools
import random

import numpy as np
import pytest
import torch

from tests.measure import factories
from twell.measure import check, clock, decode, model, step
from twell.measure import layer as layers


@pytest.fixture
def seed():
    """Another one in each run; pytest prints it when a test fails."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def fake_clock(monkeypatch):
    """Calls take 1 ms; no graph, no compiler, no energy counter. Kernels run as they are."""
    allocated = itertools.count(1000, 500_000)

    def stream_times(call, *_):
        call()
        return np.array([0.9, 1.0, 1.1])

    def between_replays(call, number, lead=3):
        for _ in range(number):
            call()
        return np.ones(number)

    monkeypatch.setattr(clock, "gpu", lambda: torch.device(factories.DEVICE))
    monkeypatch.setattr(layers, "ceilings", lambda: [dict(row) for row in factories.PEAKS])
    monkeypatch.setattr(clock, "capture", factories.capture)
    monkeypatch.setattr(clock, "stream_times", stream_times)
    monkeypatch.setattr(clock, "graph_times", lambda call, calls, budget: stream_times(call))
    monkeypatch.setattr(clock, "between_replays", between_replays)
    for name, value in {"LAYER_ROUNDS": 2, "MODEL_ROUNDS": 1, "SETTLE": 1}.items():
        monkeypatch.setattr(clock, name, value)
    for name in ("MODEL_TURN", "OPTIMIZER_TURN"):
        monkeypatch.setattr(clock, name, 2)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: next(allocated))


@pytest.fixture
def fake_kernels(fake_clock, monkeypatch):
    """The fake clock, and sparse paths by dense products on the CPU; small models."""
    ops = pytest.importorskip("twell.kernels.ops")
    from twell.kernels import common

    monkeypatch.setattr(clock, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(ops, "run", factories.run)
    monkeypatch.setattr(ops, "takes", lambda x, _: x.dtype in common.DTYPES)
    monkeypatch.setattr(step.training_ops(), "train", factories.train)
    monkeypatch.setattr(check, "SAMPLE", 128)
    for module in (decode, model):
        monkeypatch.setattr(module, "GENERATION", 3)
