"""Layers, calibrations, random matrices and stand-ins for kernels for the tests of twell.sparse."""

import copy
import dataclasses
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories import SEED
from tests.factories.ops import Trained
from twell.sparse import reference
from twell.sparse.activations import RELU
from twell.sparse.calibration import DEPENDS_ON, Calibration, Point, default
from twell.sparse.layer import SparseFFN, backend_status
from twell.sparse.observe import Collector

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels, else their interpreter
NO_TRITON = backend_status()["triton"]
triton_here = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in computes on the CPU")


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


# --- matrices for the formats: random bits where active, +0.0 or -0.0 elsewhere

BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
PATTERNS = ["empty", "full", "heavy"]


def bits_of(tensor):
    return tensor.view(BITS[tensor.dtype]).tolist()


def dense_matrix(pattern, shape, dtype=torch.bfloat16):
    """NaNs with payloads, infinities, subnormals and negative numbers occur."""
    g = torch.Generator().manual_seed(SEED)
    uniform, bits = torch.rand(shape, generator=g), BITS[dtype]
    active = {
        "empty": uniform < 0,
        "full": uniform >= 0,
        "sparse": uniform < 0.05,
        # from rows with none to rows with nearly all
        "heavy": uniform < torch.rand(shape[0], 1, generator=g) ** 4,
    }[pattern]
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    sign = torch.tensor(low, dtype=bits)
    noise = torch.randint(low, high, shape, dtype=bits, generator=g)
    noise[(noise | sign) == sign] = 1  # neither zero may be among the active ones
    return torch.where(active, noise, torch.where(noise < 0, sign, 0)).view(dtype)


def entries_by_row(dense):
    """For each row the (column, value bits) of its non-zeros, by a loop."""
    zeros = 0, torch.iinfo(BITS[dense.dtype]).min
    return [
        [(n, bits) for n, bits in enumerate(row) if bits not in zeros] for row in bits_of(dense)
    ]


# --- layers as modules


def make(
    gated=True,
    bias=False,
    activation="relu",
    backend="dense",
    dtype=torch.float64,
    sizes=(24, 70),
    threshold=0.0,
):
    """A layer with normal weights."""
    options = {"gated": gated, "bias": bias, "activation": activation, "backend": backend}
    ffn = SparseFFN(*sizes, **options, threshold=threshold, dtype=dtype)
    for parameter in ffn.parameters():
        nn.init.normal_(parameter)
    return ffn


def make_auto(gated=True, bias=False, dtype=torch.float16):
    """A layer with 3 of 70 neurons active for positive inputs and 67 for negative ones."""
    ffn = make(gated, bias, dtype=dtype, sizes=(32, 70)).to(DEVICE).eval().requires_grad_(False)
    gate = ffn.gate_proj if gated else ffn.up_proj
    sign = torch.where(torch.arange(70, device=DEVICE) < 3, 1, -1)[:, None]
    gate.weight.data = (gate.weight.abs() + 0.5) * sign
    ffn.backend, ffn.calibration = "auto", small_threshold(gated=gated)
    return ffn


def positive(*shape, dtype=torch.float16):
    return torch.rand(*shape, 32, dtype=dtype, device=DEVICE) + 0.5


def exact(ffn, x):
    ffn = copy.deepcopy(ffn).double()
    ffn.backend = "dense"
    return ffn(x.double())


def call(ffn, x):
    """The layer's output, after a look at its error.

    On a GPU a copy of the counters has arrived by the next call.
    """
    with torch.no_grad():
        y = ffn(x)
    assert relative(y, exact(ffn, x)) < 1e-3
    if x.is_cuda:
        torch.cuda.synchronize()
    return y


# --- calibrations

PATHS = tuple(DEPENDS_ON)
ABOUT = {
    **{"device": "a device", "hidden_size": 32, "intermediate_size": 1000, "gated": True},
    **{"dtype": "bfloat16", "versions": "torch 2", "date": "2026-01-01"},
}


def calibration(rows, **changes):
    """From rows (tokens, active, union, path, ms)."""
    times = tuple(Point(*case, {path: ms}) for *case, path, ms in rows)
    return Calibration(times=times, **ABOUT | changes)


def random_grid(rng: random.Random, tokens=(1, 8, 64, 4096)):
    """A full grid of cases with random times: {(tokens, active): (union, {path: ms})}."""
    levels = sorted(rng.sample(range(1, 999), 4)) + [1000]
    return {
        (m, active): (min(1000.0, active * 1.7), {path: rng.uniform(0.1, 2) for path in PATHS})
        for m in tokens
        for active in levels
    }


def from_grid(grid, **changes):
    rows = [(*case, u, path, ms) for case, (u, ms) in grid.items() for path, ms in ms.items()]
    return calibration(rows[::-1], **changes)


def threshold(crossing=100.0, most=32, **changes):
    """Unions win below a union of `crossing` neurons, decoding does up to `most` tokens."""
    rows, n = [], changes.get("intermediate_size", 1000)
    for m in (1, most, most + 1, 4096):
        sparse = "decode" if m <= most else "union"
        rows += [(m, n, n, "dense", 1.0), (m, 0, 0, sparse, 0.5), (m, 1, crossing, sparse, 0.96)]
        rows += [(m, 1, crossing + 1e-6, sparse, 1.5), (m, n, n, sparse, 9.0)]
    return calibration(rows, **changes)


def small_threshold(**changes):
    """Decoding (up to 8 tokens) and unions are fast for unions of up to 35 of 70 neurons."""
    return threshold(35, 8, **{"intermediate_size": 70, "dtype": "float16"} | changes)


# --- training steps


def watched(ffn, x, call=None, **wants):
    """y of `ffn` or of `call`, and its L1 term."""
    with Collector([ffn], **wants) as seen:
        y = (ffn if call is None else call)(x)
    return y, seen.terms[0][1] if seen.terms else None


class FakeKernels:
    """sparse_train by dense products, times random numbers as dropout would draw them.

    NaN where the capacity is too small. It counts one in `scale` of a token's active neurons, and
    needs the mean of that, and 60 entries more in the calls whose number is in `heavy`.
    """

    def __init__(self, scale=1, noise=0.1):
        self.scale, self.noise, self.heavy, self.calls = scale, noise, set(), []

    def __call__(self, path, capacity, x, *weights, act=RELU, token_mask=None):
        w_gate, w_up, w_down, b_gate, b_up, b_down = (*weights, None, None, None)[:6]
        g, h = reference.activations(x, w_gate, w_up, b_gate, b_up, act=act)
        active = g != 0
        counts = active.sum(1).int() // self.scale
        needed = math.ceil(int(counts.sum()) / len(x)) + 60 * (len(self.calls) in self.heavy)
        self.calls.append((path, capacity, needed))
        y = F.linear(h, w_down, b_down) * (1 + self.noise * torch.rand(len(x), 1)).to(x.dtype)
        l1 = h.abs().sum(-1, dtype=torch.float32)
        if needed > capacity:
            y, l1 = y * math.nan, l1 * math.nan
        kept = active if token_mask is None else active & (token_mask.reshape(-1, 1) != 0)
        return Trained(y, l1, counts, kept.sum(0).int(), torch.tensor(needed))


class Stack(nn.Module):
    """Layers with dropout between them; few neurons of the sparse layers are active.

    training: the activity up to which each layer trains sparsely, for the backend "auto".
    """

    def __init__(self, sizes=(256, 256, 192), backend="triton", training=()):
        super().__init__()
        self.ffns = nn.ModuleList(SparseFFN(32, size, bias=True, backend=backend) for size in sizes)
        for ffn in self.ffns:
            nn.init.constant_(ffn.gate_proj.bias, -0.9)
        for ffn, level in zip(self.ffns, training, strict=False):
            times = default(32, ffn.intermediate_size, True)
            ffn.calibration = dataclasses.replace(times, training=level)

    def forward(self, x):
        with Collector(self.ffns, counts=True):
            for ffn in self.ffns:
                x = x + ffn(F.dropout(F.layer_norm(x, (32,)), 0.1))
        return x


def step(sparse, *needed):
    """A step in which the layers need so many entries (None: no pass); returns the attempts."""
    attempts = 0
    for _ in sparse.attempts():
        attempts += 1
        for ffn, number in zip(sparse.layers, needed, strict=True):
            assert torch.equal(ffn.outbox.needed, torch.tensor(-1))
            if number is not None:
                ffn.outbox.needed = torch.tensor(number)
    return attempts
