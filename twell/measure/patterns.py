"""Layers of a known activity.

A pattern says how the activity varies between neurons and tokens. "Even" neurons are independent
and equally likely. "Skewed" ones imitate trained models: popular neurons, busy tokens, documents
whose tokens are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twell.measure.rows import require

DOCUMENT = 2048  # consecutive tokens of a layer's input that share a part of their variance
# The paper's Fig. 6 in words: a hump around layer 6 of 28, the first two layers least active.
PEAK, HUMP, WIDTH, FIRST = 6 / 27, 2.0, 0.13, (0.4, 0.6)

Weights = tuple[Tensor | None, Tensor, Tensor]


@dataclass(frozen=True)
class Pattern:
    """How activity varies between neurons and tokens; each input has a variance of 1.

    popularity: standard deviation of the neurons' thresholds. liveliness: standard deviation of
    what a token adds to all its gates. shared: the share of their variance that tokens of one
    document (a model: of one topic) share.
    """

    popularity: float = 0.0
    liveliness: float = 0.0
    shared: float = 0.0


EVEN = Pattern()
SKEWED = Pattern(popularity=0.6, liveliness=0.4, shared=0.3)
PATTERNS = {"skewed": SKEWED, "even": EVEN}
# Of models. With shared=0.1, unions of 64 and 128 tokens are within 10% of recorded ones at 7 to 45
# active neurons of 5,632; with 0.3, which layers keep for the sake of recorded rows, 20% smaller.
IMPOSED = Pattern(popularity=0.6, liveliness=0.4, shared=0.1)


def layer_means(profile: str, num_layers: int, active: float) -> list[float]:
    """Return each layer's mean active neurons per token, for a mean of `active` over layers.

    profile: "flat", or "paper": a hump at layer 6 of 28, scaled to the depth, three times the last
    layers. The paper does not print the values of its Fig. 6.
    """
    require(profile in ("flat", "paper"), f"profile {profile!r} is unknown; use flat or paper")
    if profile == "flat" or num_layers <= len(FIRST):
        return [float(active)] * num_layers
    last = num_layers - 1
    distances = (np.arange(num_layers) - max(PEAK * last, len(FIRST))) / (WIDTH * last)
    heights = 1 + HUMP * np.exp(-(distances**2))
    heights[: len(FIRST)] = FIRST
    return (active * heights / heights.mean()).tolist()


def synthetic_layer(
    num_tokens: int,
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    active: float = 29,
    pattern: Pattern = SKEWED,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of a gated layer with a mean of `active` neurons per token, from 0 to N.

    x [M, K], w_gate and w_up [N, K] and w_down [K, N] (strides (1, K)). Raises ValueError for an
    `active` that the layer cannot have. Ours.
    """
    most = f"a layer of {intermediate_size} neurons can have 0 to all of them"
    require(0 <= active <= intermediate_size, f"active is {active:g}; {most}")
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    documents = normal(-(-num_tokens // DOCUMENT), hidden_size)
    documents = documents.repeat_interleave(DOCUMENT, 0)[:num_tokens]
    own = math.sqrt(1 - pattern.shared) * normal(num_tokens, hidden_size)
    x = own + math.sqrt(pattern.shared) * documents
    x[:, 0] = 1
    x[:, 1] = normal(num_tokens)
    w_gate, w_up, w_down_t = (
        normal(intermediate_size, hidden_size) / math.sqrt(inputs)
        for inputs in (hidden_size, hidden_size, intermediate_size)
    )
    spread = pattern.popularity * normal(intermediate_size)
    w_gate[:, 0] = -(_threshold(x[:, 1:2], spread, active, pattern.liveliness) + spread)
    w_gate[:, 1] = pattern.liveliness
    return x.to(dtype), w_gate.to(dtype), w_up.to(dtype), w_down_t.to(dtype).t()


def bisect(too_low: Callable[[float], bool], low: float, high: float, steps: int) -> list[float]:
    """Return the two ends of what is left of an interval after `steps` halvings."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return [low, high]


def _threshold(draws: Tensor, spread: Tensor, active: float, liveliness: float) -> float:
    """Return the threshold that gives a mean of `active` neurons."""
    # Of few tokens each counts as it is, of many their distribution.
    few = len(draws) <= DOCUMENT
    known = liveliness * draws if few else draws.new_zeros(1, 1)
    scale = math.sqrt(2 * (1.0 if few else 1 + liveliness**2))

    def too_low(threshold: float) -> bool:
        likely = 0.5 * torch.erfc((threshold + spread - known) / scale)
        return bool(likely.sum() > active * len(known))

    return bisect(too_low, -10.0, 10.0, 50)[0]


def permuted(weights: Weights, seed: int) -> Weights:
    """Return the same layer with its neurons in another order: other memory, the same work.

    `weights` are w_gate [N, K] or None, w_up [N, K] and w_down [K, N] with strides (1, K); so are
    the permuted ones.
    """
    w_gate, w_up, w_down = weights
    g = torch.Generator(w_up.device).manual_seed(seed)
    order = torch.randperm(len(w_up), generator=g, device=w_up.device)
    return None if w_gate is None else w_gate[order], w_up[order], w_down.t()[order].t()
