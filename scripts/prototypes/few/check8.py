"""The 8-bit copy changes no bit: TRITON_INTERPRET=1 PYTHONPATH=.:.scratch/few python check8.py"""
import itertools

import torch
from check import case
from gate8 import copy_gate, ffn

from twell.kernels import decode
from twell.sparse.activations import get_activation


def hostile(x, layer, kind, gen):
    """Changes tensors in place so that gates are near their edge, or numbers are extreme."""
    w = layer.w_gate
    if kind == "edge":  # exact gates of 0, and one unit in the last place to either side
        w[:, 1::2] = -w[:, ::2]
        x[:, 1::2] = x[:, ::2]
        last = torch.randint(0, 3, (len(w),), generator=gen)
        w[last == 1, 0] *= 1 + 2**-7
        w[last == 2, 0] *= 1 - 2**-7
    elif kind == "outlier":
        w[::3, 5] = 300.0
        w[1::3, 6] = -300.0
    elif kind == "tiny":
        w *= 2.0**-100
        x *= 2.0**-30
    elif kind == "subnormal":
        w *= 2.0**-126
        x *= 2.0**-20
    elif kind == "huge":
        w *= 2.0**70
        x *= 2.0**60
    elif kind == "zeros":
        w[::2] = 0
        w[1::2, :64] = 0
    elif kind == "nonfinite":
        w[3, 2] = float("nan")
        w[5, 2] = float("inf")
        w[7, 2] = -float("inf")
    elif kind == "nan x":
        x[0, 3] = float("nan")
    elif kind == "inf x":
        x[0, 3] = float("inf")


def main():
    kinds = ("plain", "edge", "outlier", "tiny", "subnormal", "huge", "zeros", "nonfinite", "nan x", "inf x")
    number = skipped = 0
    for i, (kind, m, mean) in enumerate(itertools.product(kinds, (1, 2), (0.0, -2.0))):
        act = get_activation(("relu", "relu2", "drelu", "relu")[i % 4], (0.0, 0.1, 0.0, 0.25)[i % 4], gated=True)
        n, k = 20, 128
        gen = torch.Generator().manual_seed(i)
        x, layer = case(m, n, k, True, i % 3 == 0, act, mean, torch.bfloat16, i)
        hostile(x, layer, kind, gen)
        read = torch.zeros(1, dtype=torch.int32)
        old, new = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        y = ffn(x, layer, copy_gate(layer.w_gate, 64), dict(BN=(1, 4)[i % 2], GROUP=64), new, read)
        z = decode.ffn(x, layer, activity=old)
        bits = lambda t: t.view(torch.int16)  # noqa: E731
        nans = y.isnan() & z.isnan()
        assert ((bits(y) == bits(z)) | nans).all(), (kind, m, mean)
        assert torch.equal(old, new), (kind, old, new)
        number += 1
        skipped += n - int(read)
        print(kind, m, mean, act.name, "active", int(old[3]), "read", int(read), "of", n, flush=True)
    print(number, "cases agree,", skipped, "rows skipped")


if __name__ == "__main__":
    main()
