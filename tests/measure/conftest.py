"""One clock of our own, in place of the GPU's: calls run and are checked, on the CPU."""

import pytest
import torch

from tests.factories import measure as factories
from twell.measure import check, clock, decode, model, step
from twell.measure import layer as layers
from twell.sparse import float8


@pytest.fixture
def gpu(monkeypatch):
    """A FakeGpu as the clock of every measurement; short turns, no compiler."""
    gpu = factories.FakeGpu()
    peaks = [("copy bandwidth", 4000.0, "GB/s"), ("matmul", 800.0, "TFLOP/s")]
    peaks = [dict(zip(("metric", "value", "unit"), peak, strict=True)) for peak in peaks]

    def begin(energy=False):
        gpu.meter = (lambda: 0) if energy else None
        return gpu

    monkeypatch.setattr(clock, "Gpu", begin)
    monkeypatch.setattr(layers, "ceilings", lambda gpu: peaks)
    monkeypatch.setattr(clock.time, "sleep", lambda seconds: gpu.spend(1e3 * seconds))
    for name, value in {"LAYER_ROUNDS": 2, "MODEL_ROUNDS": 1, "SETTLE": 1}.items():
        monkeypatch.setattr(clock, name, value)
    for name in "LAYER CALIBRATION MODEL OPTIMIZER ENERGY".split():
        monkeypatch.setattr(clock, f"{name}_TURN", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return gpu


@pytest.fixture
def dense_kernels(gpu, monkeypatch):
    """The fake clock, and sparse paths by dense products; small models."""
    ops = pytest.importorskip("twell.kernels.ops")
    monkeypatch.setattr(ops, "run", factories.run)
    monkeypatch.setattr("twell.kernels.float8.quantize", float8.quantize)
    monkeypatch.setattr(ops, "takes", lambda x, *_: x.dtype != torch.float16)
    monkeypatch.setattr(step.training_ops(), "train", factories.train)
    monkeypatch.setattr(check, "SAMPLE", 128)
    for module in (decode, model):
        monkeypatch.setattr(module, "GENERATION", 3)
    return gpu
