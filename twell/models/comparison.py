"""Whether an adapter describes its module: both compute the same random tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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

    A down projection of zeros, as some trainings begin with, is random for the moment. Nothing is
    compared where weights are elsewhere (sharded, offloaded), quantised or adapted by peft, or
    where a projection has hooks, which would see these tokens. Raises ValueError where the results
    differ.
    """
    parts = [part for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj) if part is not None]
    if site.adapter.inline or not all(map(_can_compute, parts)):
        return
    modules = [*site.module.modules(), *ffn.modules()]
    before, down = [module.training for module in modules], ffn.down_proj.weight
    weight, kind = down.data, type(site.module).__name__
    try:
        if not weight.any():
            down.data = _random(weight.shape, weight)
        for training in (False, True):
            for module in modules:
                module.training = training
            x, expected = _expected(site.module, _random((1, 4, ffn.hidden_size), weight))
            with _seeded(x):
                result = ffn.forward(x).double()
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
    """Return whether a projection has a plain weight; its class may inherit from nn.Linear."""
    weight = getattr(part, "weight", None)
    if not isinstance(part, nn.Linear) or "forward" in vars(part):
        return False
    if type(weight) is not nn.Parameter or weight.device.type not in ("cpu", "cuda"):
        return False
    hooks = any(getattr(part, name) for name in CALLED_WITH)
    return not hooks and weight.shape == (part.out_features, part.in_features)


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


@contextlib.contextmanager
def _seeded(x: Tensor) -> Iterator[None]:
    """Draw the same random numbers in every block.

    torch.manual_seed would also seed the other devices, now or when they are first used.
    """
    generators = torch.cuda.default_generators if x.is_cuda else [torch.default_generator]
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        generators[max(x.get_device(), 0)].manual_seed(0)
        yield


def _expected(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [1, M, K], or [M, K] where the module takes rows alone, and its fp64 result."""
    kind, problem = type(module).__name__, None
    for tokens in (x, x[0]):
        try:
            with _seeded(x):
                y = module.forward(tokens)
        except Exception as error:
            problem = problem or error
            continue
        if not isinstance(y, Tensor) or y.shape != tokens.shape:
            given = getattr(y, "shape", type(y).__name__)
            raise ValueError(f"a {kind} returns {given} for {tuple(tokens.shape)} values")
        return tokens, y.double()
    raise ValueError(f"a {kind} cannot compute {tuple(x.shape)} values: {problem}") from problem
