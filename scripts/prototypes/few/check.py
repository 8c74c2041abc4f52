"""Every plan in the interpreter, against fp64: TRITON_INTERPRET=1 PYTHONPATH=.:.scratch/few python check.py"""
import itertools
import sys

import torch
from few import Plan, ffn

from twell.kernels import decode, union
from twell.kernels.common import Layer
from twell.sparse.activations import get_activation

torch.use_deterministic_algorithms(True, warn_only=True)


def exact(x, layer):
    a = layer.act
    d = lambda t: None if t is None else t.double()  # noqa: E731
    lin = lambda x, w, b: d(x) @ d(w).t() + (0 if b is None else d(b))  # noqa: E731
    first = lin(x, *layer.first).float().to(x.dtype)
    g = torch.where(first.float() <= a.threshold, 0.0, first.double())
    h = g.square() if a.name == "relu2" else g
    if layer.gated:
        u = lin(x, layer.w_up, layer.b_up)
        h = torch.where(g != 0, h * (u.relu() if a.name == "drelu" else u), 0.0)
    h = h.float().to(x.dtype).double()
    return h @ d(layer.w_down_t) + (0 if layer.b_down is None else d(layer.b_down))


def case(m, n, k, gated, biases, act, mean, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=gen)  # noqa: E731
    x, wg, wu, wd = r(m, k), r(n, k) / k**0.5, r(n, k) / k**0.5, r(n, k) / n**0.5
    x[:, 0] = 1
    first = wg if gated else wu
    first[:, 0] += mean
    b = (r(n) if gated and biases else None, *((r(n), r(k)) if biases else (None, None)))
    t = lambda v: None if v is None else v.to(dtype)  # noqa: E731
    layer = Layer(t(wg) if gated else None, t(wu), t(wd), *map(t, b), act=act)
    return t(x), layer


def plan_for(m, form, fused_bn=32):
    block = max(16, 1 << (m - 1).bit_length()) if m <= 64 else 128
    if form == "fused":
        return Plan("fused", dict(BN=fused_bn, BK=32, STEP=32), down=dict(BN=16, BK=32), block=block)
    gate = dict(BM=block * (2 if m > 128 else 1), BN=32, BK=32, RESIDENT=m > 128)
    return Plan("tiles", gate, dict(TM=max(16, block // 2), BN=16, BK=32, PER_SM=2),
                dict(TM=max(16, block // 2), BN=32, BK=32), block=block)


def main():
    n_ok = 0
    grid = itertools.product((2, 5, 16, 33, 64, 70, 128, 200, 300), ("fused", "tiles"), (-2.0, 2.0, -30.0, 0.0))
    for i, (m, form, mean) in enumerate(grid):
        if form == "fused" and m > 64:
            continue
        gated, biases = i % 3 != 0, i % 2 == 0
        names = [("relu", 0.0), ("relu2", 0.1), ("drelu", 0.0), ("relu", 0.2)]
        name, threshold = names[i % 4]
        if not gated and name == "drelu":
            name = "relu"
        act = get_activation(name, threshold, gated=gated)
        n, k = (130, 80) if i % 5 else (33, 48)
        dtype = torch.bfloat16 if i % 2 else torch.float16
        x, layer = case(m, n, k, gated, biases, act, mean, dtype, i)
        place = m // 2
        plan = plan_for(m, form)
        old = torch.zeros(4, dtype=torch.int64)
        new = torch.zeros(4, dtype=torch.int64)
        y = ffn(x, layer, plan, activity=new)
        z = (decode.ffn if m <= 64 else union.ffn)(x, layer, activity=old)
        e = exact(x, layer)
        rms = ((y - e).square().mean() / e.square().mean().clamp_min(1e-30)).sqrt().item()
        rms_old = ((z - e).square().mean() / e.square().mean().clamp_min(1e-30)).sqrt().item()
        same = torch.equal(y, z)
        assert torch.equal(old, new), (old, new)
        assert rms < 5e-3 and rms <= 1.05 * rms_old + 1e-6, (m, form, mean, name, rms, rms_old)
        x[place, 7] = float("nan")
        bad = ffn(x, layer, plan)
        assert bad[place].isnan().all()
        keep = torch.arange(m) != place
        assert not bad[keep].isnan().any() and torch.allclose(bad[keep].float(), y[keep].float(), atol=0.02, rtol=0.02), (m, form, "nan leaked")
        n_ok += 1
        print(m, form, mean, name, gated, biases, f"{rms:.2e} {rms_old:.2e} same={same}", flush=True)
    print(n_ok, "cases agree")


if __name__ == "__main__":
    main()
