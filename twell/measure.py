"""Measurements on a GPU: check the result first, then time it, and keep the row with where it came from.

No speed is recorded unless the same call found the result right: every path is compared with the fp64 result of the
same inputs before it is timed, and a path that is wrong ends the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from twell import results
from twell.ffn import SparseFFN

# Relative RMS against fp64 that a bf16 layer has to keep; the dense one is at 3e-3 to 4e-3.
TOLERANCE = 5e-3


def synthetic_layer(
    num_tokens: int,
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    active: float = 29,
    skewed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of a gated layer that is active as often as wanted, and as unevenly as in trained models.

    x [M, K], w_gate and w_up [N, K] and w_down [K, N] (strides (1, K)), with a mean of `active` neurons per token.
    Even: neurons are independent and equally likely. Skewed: neurons differ in popularity (spread 0.6), tokens in
    activity (0.4), and tokens of the same 2,048 share 30% of their variance.
    """
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    popularity, activity, shared = (0.6, 0.4, 0.3) if skewed else (0.0, 0.0, 0.0)
    documents = normal(-(-num_tokens // 2048), hidden_size).repeat_interleave(2048, 0)[:num_tokens]
    x = math.sqrt(1 - shared) * normal(num_tokens, hidden_size) + math.sqrt(shared) * documents
    x[:, 0] = 1
    x[:, 1] = normal(num_tokens)
    w_gate, w_up = (normal(intermediate_size, hidden_size) / math.sqrt(hidden_size) for _ in range(2))
    w_down_t = normal(intermediate_size, hidden_size) / math.sqrt(intermediate_size)

    # Column 0 is the threshold: bisect for the one that gives the mean wanted. Column 1 is the token's activity.
    spread = popularity * normal(intermediate_size)
    low, high = -10.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        likely = 0.5 * torch.erfc((middle + spread) / math.sqrt(2 * (1 + activity**2)))
        low, high = (middle, high) if likely.sum() > active else (low, middle)
    w_gate[:, 0] = -(low + spread)
    w_gate[:, 1] = activity
    return x.to(dtype), w_gate.to(dtype), w_up.to(dtype), w_down_t.to(dtype).t()


def ffn(
    tokens: Sequence[int], active: Sequence[float], skewed: bool, hidden_size: int = 2048, intermediate_size: int = 5632
) -> list[dict]:
    """Time the gated layer in bf16: densely (eager and compiled) and by each path of the Triton backend.

    Returns rows: tokens, hidden_size, intermediate_size, pattern, active (mean, measured), active_max, provider,
    relative_rms, and p20, p50, p80 in ms. Raises ArithmeticError when a result is wrong, RuntimeError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("measuring needs a GPU, and torch sees none")
    from twell.kernels import ops

    rows = []
    for num_tokens in tokens:
        for wanted in active:
            x, *weights = synthetic_layer(num_tokens, hidden_size, intermediate_size, active=wanted, skewed=skewed)
            layer = SparseFFN(hidden_size, intermediate_size, device="cuda", dtype=x.dtype).eval().requires_grad_(False)
            for part, weight in zip((layer.gate_proj, layer.up_proj, layer.down_proj), weights, strict=True):
                part.weight.data = weight
            exact, counts = _exact(layer, x)
            case = {"tokens": num_tokens, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
            case |= {"pattern": "skewed" if skewed else "even", "active": round(float(counts.double().mean()), 2)}
            case |= {"active_max": int(counts.max())}
            providers: dict[str, Callable[[], Tensor]] = {"dense eager": lambda layer=layer, x=x: layer(x)}
            compiled = torch.compile(layer, fullgraph=True)
            providers["dense torch.compile"] = lambda compiled=compiled, x=x: compiled(x)
            arguments = (x, *weights)
            for name, operator in ops.PATHS.items():
                if name != "decode" or num_tokens <= 4096:
                    providers[f"triton {name}"] = lambda operator=operator, arguments=arguments: operator(*arguments)
            for provider, call in providers.items():
                error = float((call().double() - exact).norm() / exact.norm())
                if not error <= TOLERANCE:
                    raise ArithmeticError(
                        f"{provider} is wrong at {case}: relative RMS {error:.2e}, allowed {TOLERANCE}"
                    )
                rows.append(case | {"provider": provider, "relative_rms": float(f"{error:.3g}")} | _times(call))
                print(
                    f"{num_tokens:>7} tokens  {rows[-1]['active']:>6} active  {provider:<20} {rows[-1]['p50']:.4f} ms",
                    flush=True,
                )
            torch.compiler.reset()
    return rows


def _exact(layer: SparseFFN, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's result in fp64 for the same inputs, 4,096 tokens at a time, and the active neurons of each token."""
    wide = [part.weight.double() for part in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    parts, counts = [], []
    for rows in x.split(4096):
        g = torch.relu(rows.double() @ wide[0].t())
        parts.append((g * (rows.double() @ wide[1].t())) @ wide[2].t())
        counts.append((g.to(x.dtype) != 0).sum(1))
    return torch.cat(parts), torch.cat(counts)


def _times(call: Callable[[], Tensor]) -> dict[str, float]:
    from triton.testing import do_bench

    times = do_bench(call, warmup=25, rep=100, quantiles=[0.2, 0.5, 0.8])
    return dict(zip(("p20", "p50", "p80"), (float(f"{time:.4g}") for time in times), strict=True))


def save(rows: list[dict], path: str | Path) -> None:
    """Append rows, each with its provenance, to a CSV in data/bench/."""
    results.append_rows(path, rows, results.provenance())
