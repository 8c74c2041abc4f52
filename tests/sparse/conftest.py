import random

import pytest
import torch

from tests.factories import SEED
from tests.factories.sparse import FakeKernels
from twell.sparse.layer import SparseFFN


@pytest.fixture(autouse=True)
def rng():
    """Every random number of a test follows from SEED."""
    torch.manual_seed(SEED)
    return random.Random(SEED)


@pytest.fixture
def taken(monkeypatch):
    """Names of the paths called, in order; no call takes the short way of dense ones."""
    from twell.kernels import ops

    names, run, dense = [], ops.run, SparseFFN._dense
    monkeypatch.setattr(ops, "run", lambda name, *t, **o: names.append(name) or run(name, *t, **o))

    def chosen(layer, *given):
        if layer.backend == "auto" and not torch.is_grad_enabled():
            names.append("dense")
        return dense(layer, *given)

    monkeypatch.setattr(SparseFFN, "_dense", chosen)
    monkeypatch.setattr(SparseFFN, "_is_quick", lambda *_: False)
    return names


@pytest.fixture
def fake(monkeypatch):
    from twell.kernels import training_ops

    fake = FakeKernels()
    monkeypatch.setattr(training_ops, "train", fake)
    return fake
