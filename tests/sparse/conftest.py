import random

import pytest

from tests.factories import SEED
from tests.factories.ops import as_sparse_train
from tests.factories.sparse import FakeKernels


@pytest.fixture
def rng():
    return random.Random(SEED)


@pytest.fixture
def taken(monkeypatch):
    """Names of the paths that layers hand to the kernels, in order."""
    from twell.sparse import ops

    names, compute = [], ops.sparse_ffn

    def noted(x, weights, path, **options):
        names.append(path)
        return compute(x, weights, path, **options)

    monkeypatch.setattr(ops, "sparse_ffn", noted)
    monkeypatch.setattr(ops, "LOADED", set())
    return names


@pytest.fixture
def fake(monkeypatch):
    from twell.sparse import training_ops

    fake = FakeKernels()
    monkeypatch.setattr(training_ops, "sparse_train", as_sparse_train(fake))
    return fake
