import pytest

from tests.sparse.steps import Fake
from twell.sparse import plan


@pytest.fixture
def taken(monkeypatch):
    """Names of the operators called, in order; the layer reads its counters at every call."""
    from twell.kernels import ops

    names = []
    run = ops.run
    monkeypatch.setattr(ops, "run", lambda name, *t, **o: names.append(name) or run(name, *t, **o))
    monkeypatch.setattr(plan, "READ_EVERY", 1)
    return names


@pytest.fixture
def fake(monkeypatch):
    from twell.kernels import training_ops

    fake = Fake()
    monkeypatch.setattr(training_ops, "train", fake)
    return fake
