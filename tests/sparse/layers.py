"""Layers and helpers that the tests of the sparse layer share."""

import copy

import pytest
import torch

from twell.sparse.calibration import Calibration, Point
from twell.sparse.layer import SparseFFN, backend_status


def make(
    gated=True, bias=False, activation="relu", backend="dense", dtype=torch.float64, sizes=(24, 70)
):
    torch.manual_seed(torch.seed() % 2**31)
    ffn = SparseFFN(
        *sizes, gated=gated, bias=bias, activation=activation, backend=backend, dtype=dtype
    )
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.normal_()
    return ffn


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


# --- the Triton backend, in Triton's interpreter where there is no GPU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

triton_here = pytest.mark.skipif(
    backend_status()["triton"] is not None, reason=str(backend_status()["triton"])
)

# --- the backend that chooses


def calibration(gated=True, hidden_size=32, **changes):
    """Decoding (up to 8 tokens) and unions are fast for unions of up to 35 of 70 neurons."""
    times = [Point(m, 70, 70, {"dense": 1.0}) for m in (1, 8, 9, 100)]
    for m in (1, 8, 9, 100):
        sparse = "decode" if m <= 8 else "union"
        times += [
            Point(m, 1, 35, {sparse: 0.5}),
            Point(m, 1, 35.01, {sparse: 2.0}),
            Point(m, 70, 70, {sparse: 3.0}),
        ]
    about = {"device": "", "intermediate_size": 70, "dtype": "float16", "versions": "", "date": ""}
    about |= {"hidden_size": hidden_size, "gated": gated, "times": tuple(times)}
    return Calibration(**about | changes)


def make_auto(gated=True, bias=False, dtype=torch.float16):
    """A layer with 3 of 70 neurons active for positive inputs and 67 for negative ones, and who was
    called for it.
    """
    ffn = make(gated, bias, dtype=dtype, sizes=(32, 70)).to(DEVICE).eval().requires_grad_(False)
    gate = ffn.gate_proj if gated else ffn.up_proj
    sign = torch.where(torch.arange(70, device=DEVICE) < 3, 1, -1)[:, None]
    gate.weight.data = (gate.weight.abs() + 0.5) * sign
    ffn.backend = "auto"
    ffn.calibration = calibration(gated)
    return ffn


def exact(ffn, x):
    ffn = copy.deepcopy(ffn).double()
    ffn.backend = "dense"
    return ffn(x.double())


def call(ffn, x):
    """The layer's output, after a look at its error; on a GPU a copy of the counters has arrived by
    the next call.
    """
    with torch.no_grad():
        y = ffn(x)
    assert relative(y, exact(ffn, x)) < 1e-3
    if x.is_cuda:
        torch.cuda.synchronize()
    return y
