"""Whether an adapter says what its module computes: both compute the same random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.models.adapters import Site
from twell.sparse.layer import SparseFFN
from twell.sparse.projections import CALLED_WITH

# The largest relative error between a module and its SparseFFN, which compute the same products.
SAME = {torch.float64: 1e-6, torch.float32: 1e-4}
SAME_IN_HALF = 0.01  # bf16 and fp16


@torch.no_grad()
def check_same(site: Site, ffn: SparseFFN) -> None:
    """Compare a module with the SparseFFN for it on random tokens, and again while training.

    Skipped where weights are not plain or not there: sharded, offloaded, quantised, or adapted by
    peft; and where a projection has hooks, which would see these tokens. A down projection of
    zeros, as some trainings begin with, is random for the moment. Raises ValueError where they
    differ.
    """
    parts = [part for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj) if part is not None]
    here = all(map(_can_compute, parts))
    if site.adapter.inline or not here:
        return
    modules = [*site.module.modules(), *ffn.modules()]
    before, down = [module.training for module in modules], ffn.down_proj.weight
    weight, kind = down.data, type(site.module).__name__
    try:
        if not weight.any():
            down.data = _random(weight.shape, weight)
        for training in (False, True) if weight.device.type in ("cpu", "cuda") else (False,):
            for module in modules:
                module.training = training
            x, expected = _expected(site.module, _random((1, 4, ffn.hidden_size), weight))
            result = _seeded(ffn, x).double()
            error = float((result - expected).norm() / expected.norm().clamp(min=1e-30))
            if error > SAME.get(weight.dtype, SAME_IN_HALF) and expected.isfinite().all():
                raise ValueError(
                    f"the adapter of {kind} describes something else than the module computes: a "
                    f"relative error of {error:.2g} on random tokens"
                    + (" while training; only an nn.Dropout of h may differ there" * training)
                )
    finally:
        down.data, ffn.outbox.last = weight, None
        for module, was in zip(modules, before, strict=True):
            module.training = was


def _can_compute(part: nn.Module) -> bool:
    """Whether a projection has a plain weight, also one of a class that inherits from nn.Linear."""
    weight = getattr(part, "weight", None)
    if not isinstance(part, nn.Linear) or "forward" in part.__dict__:
        return False
    if type(weight) is not nn.Parameter or weight.is_meta:
        return False
    hooks = any(getattr(part, name) for name in CALLED_WITH)
    return not hooks and weight.shape == (part.out_features, part.in_features)


def _random(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def _seeded(layer: nn.Module, x: Tensor) -> Any:
    """What a layer's own forward returns, with the same random numbers for all layers.

    torch.manual_seed would also seed the other devices, now or when they are first used.
    """
    numbers = (
        torch.cuda.default_generators[x.get_device()] if x.is_cuda else torch.default_generator
    )
    state = numbers.get_state()
    numbers.manual_seed(0)
    try:
        return layer.forward(x)
    finally:
        numbers.set_state(state)


def _expected(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [1, M, K] or, where the module takes rows alone, [M, K]; and its result in fp64."""
    kind = type(module).__name__
    try:
        y = _seeded(module, x)
    except Exception as error:
        try:
            x = x[0]
            y = _seeded(module, x)
        except Exception:
            shape = tuple(x[None].shape)
            raise ValueError(f"a {kind} cannot compute {shape} values: {error}") from error
    if not isinstance(y, Tensor) or y.shape != x.shape:
        given = f"the shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(f"a {kind} returns {given} for {tuple(x.shape)} values; expected as many")
    return x, y.double()
