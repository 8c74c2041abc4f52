import random

import pytest
import torch

from tests.factories import SEED
from tests.factories.ops import as_sparse_train
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
    from twell.sparse import backends, ops

    names, sparse, dense = [], ops.sparse_ffn, backends.dense

    def noted(x, weights, path, **options):
        names.append(path)
        return sparse(x, weights, path, **options)

    monkeypatch.setattr(ops, "sparse_ffn", noted)

    def chosen(layer, *given):
        if layer.backend == "auto" and not torch.is_grad_enabled():
            names.append("dense")
        return dense(layer, *given)

    monkeypatch.setattr(backends, "dense", chosen)
    monkeypatch.setattr(SparseFFN, "_is_quick", lambda *_: False)
    return names


@pytest.fixture
def fake(monkeypatch):
    from twell.sparse import training_ops

    fake = FakeKernels()
    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(fake))
    return fake
