"""One clock of our own, in place of the GPU's: calls run and are checked, on the CPU."""

import pytest
import torch

from tests.factories import measure as factories
from tests.factories.ops import as_sparse_ffn, as_sparse_train
from twell.measure import check, decode, model, runner
from twell.sparse import float8


@pytest.fixture
def gpu(monkeypatch):
    """A FakeGpu as the clock of every measurement; short turns, no compiler."""
    gpu = factories.FakeGpu()

    def begin(energy=False):
        gpu.meter = (lambda: 0) if energy else None
        return gpu

    monkeypatch.setattr(runner, "Gpu", begin)
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: gpu.spend(1e3 * seconds))
    monkeypatch.setattr(runner, "TURNS", dict.fromkeys(runner.TURNS, runner.Turns(1, 2)))
    for name, value in {"SETTLE_MS": 1, "ENERGY_MS": 2, "LEAD": 0}.items():
        monkeypatch.setattr(runner, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return gpu


@pytest.fixture
def dense_kernels(gpu, monkeypatch):
    """The fake clock, and sparse paths by dense products; small models."""
    ops = pytest.importorskip("twell.sparse.ops")
    monkeypatch.setattr(ops, "sparse_ffn", as_sparse_ffn(factories.run))
    monkeypatch.setattr("twell.kernels.float8.quantize", float8.quantize)
    monkeypatch.setattr(ops, "takes", lambda x, *_: x.dtype != torch.float16)
    monkeypatch.setattr("twell.sparse.training_ops.sparse_train", as_sparse_train(factories.train))
    monkeypatch.setattr(check, "SAMPLE", 128)
    for module in (decode, model):
        monkeypatch.setattr(module, "GENERATION", 3)
    return gpu
