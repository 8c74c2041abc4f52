import random

import pytest
import torch

from tests.factories import SEED
from tests.factories.sparse import FakeKernels
from twell.sparse import plan


@pytest.fixture(autouse=True)
def rng():
    """Every random number of a test follows from SEED."""
    torch.manual_seed(SEED)
    return random.Random(SEED)


@pytest.fixture
def taken(monkeypatch):
    """Names of the operators called, in order; the layer reads its counters at every call."""
    from twell.kernels import ops

    names, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda name, *t, **o: names.append(name) or run(name, *t, **o))
    monkeypatch.setattr(plan, "READ_EVERY", 1)
    return names


@pytest.fixture
def fake(monkeypatch):
    from twell.kernels import training_ops

    fake = FakeKernels()
    monkeypatch.setattr(training_ops, "train", fake)
    return fake
