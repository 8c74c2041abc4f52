"""Stand-ins for the kernels of training, and models, that the tests of sparse steps share."""

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from twell.sparse import reference
from twell.sparse.calibration import default
from twell.sparse.layer import SparseFFN

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in for the kernels computes on the CPU"
)


class Trained(NamedTuple):
    y: torch.Tensor
    l1: torch.Tensor
    token_counts: torch.Tensor
    neuron_counts: torch.Tensor
    needed: torch.Tensor


class Fake:
    """training_ops.train by dense products: NaN where the capacity is too small, and random numbers
    as dropout would draw.

    It counts one in `scale` of a token's active neurons, and needs room for the mean of that and
    `extra` entries.
    """

    def __init__(self, scale=1):
        self.scale, self.extra, self.calls = scale, 0, []

    def __call__(
        self,
        path,
        capacity,
        x,
        w_gate,
        w_up,
        w_down,
        b_gate=None,
        b_up=None,
        b_down=None,
        *,
        token_mask=None,
    ):
        g, h = reference.activations(x, w_gate, w_up, b_gate, b_up)
        active = g != 0
        counts = active.sum(1).int() // self.scale
        needed = math.ceil(int(counts.sum()) / len(x)) + self.extra
        self.calls.append((path, capacity, needed))
        y = F.linear(h, w_down, b_down) * (1 + 0.1 * torch.rand(len(x), 1)).to(x.dtype)
        l1 = h.abs().sum(-1, dtype=torch.float32)
        if needed > capacity:
            y, l1 = y * math.nan, l1 * math.nan
        kept = active if token_mask is None else active & (token_mask.reshape(-1, 1) != 0)
        return Trained(y, l1, counts, kept.sum(0).int(), torch.tensor(needed))


class Stack(nn.Module):
    """Layers with dropout between them; few neurons of the sparse layers are active."""

    def __init__(self, sizes=(256, 256, 192), backend="triton"):
        super().__init__()
        self.ffns = nn.ModuleList(SparseFFN(32, size, bias=True, backend=backend) for size in sizes)
        for ffn in self.ffns:
            nn.init.constant_(ffn.gate_proj.bias, -0.9)
            ffn.record = True

    def forward(self, x):
        for ffn in self.ffns:
            x = x + ffn(F.dropout(F.layer_norm(x, (32,)), 0.1))
        return x


def calibrated(model, *training):
    """Set the activity up to which each layer trains sparsely."""
    for ffn, most in zip(model.ffns, training, strict=True):
        shape = ffn.hidden_size, ffn.intermediate_size, ffn.gated
        ffn.calibration = dataclasses.replace(default(*shape), training=most)
    return model


def step(sparse, *needed):
    """A step in which the layers need so many entries (None: no pass), in each attempt; returns the
    attempts.
    """
    attempts = 0
    for _ in sparse.attempts():
        attempts += 1
        for ffn, number in zip(sparse.layers, needed, strict=True):
            assert torch.equal(ffn.observer.needed, torch.tensor(-1))
            if number is not None:
                ffn.observer.needed = torch.tensor(number)
    return attempts


def roomy(sparse):
    """With room for everything from the start."""
    sparse.restore(sparse.state() | {"capacity": sparse.capacities[-1]})
    return sparse
