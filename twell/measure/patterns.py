"""Layers of a known activity.

A pattern says how the activity varies between neurons and tokens. "Even" neurons are independent
and equally likely. "Skewed" ones imitate trained models: popular neurons, busy tokens, documents
whose tokens are alike. "Recorded" is the activity of a trained layer, neuron by neuron.
"""

from __future__ import annotations

import functools
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twell import results
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
PATTERNS = {"skewed": SKEWED, "even": EVEN, "recorded": None}
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
    normal = _normal(device, seed)
    documents = normal(-(-num_tokens // DOCUMENT), hidden_size)
    documents = documents.repeat_interleave(DOCUMENT, 0)[:num_tokens]
    own = math.sqrt(1 - pattern.shared) * normal(num_tokens, hidden_size)
    x = own + math.sqrt(pattern.shared) * documents
    x[:, 0] = 1
    x[:, 1] = normal(num_tokens)
    w_gate = normal(intermediate_size, hidden_size) / math.sqrt(hidden_size)
    w_up, w_down = _up_and_down(normal, intermediate_size, hidden_size, dtype)
    spread = pattern.popularity * normal(intermediate_size)
    w_gate[:, 0] = -(_threshold(x[:, 1:2], spread, active, pattern.liveliness) + spread)
    w_gate[:, 1] = pattern.liveliness
    return x.to(dtype), w_gate.to(dtype), w_up, w_down


def _normal(device: torch.device | str, seed: int) -> Callable[..., Tensor]:
    g = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=g, device=device)


def _up_and_down(normal: Callable[..., Tensor], n: int, k: int, dtype: torch.dtype):
    w_up, w_down_t = normal(n, k) / math.sqrt(k), normal(n, k) / math.sqrt(n)
    return w_up.to(dtype), w_down_t.to(dtype).t()


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


def imposed_layer(
    mask: np.ndarray,
    num_tokens: int,
    hidden_size: int = 1024,
    *,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of a gated bf16 layer that is active exactly where `mask` is, as above.

    `mask` [T, N] bool, T at most K; token t has the activity of mask[t % T]. The rows of x are
    orthogonal, so any matrix G [T, N] is x w_gate^T for w_gate = G^T x / K. G has the signs of the
    mask, at a distance from 0 that rounding cannot cross. Raises ValueError for a mask that does
    not fit, ArithmeticError if rounding changed the pattern. Ours.
    """
    mask = torch.as_tensor(mask, dtype=torch.bool, device=device)
    expected = f"expected [1 to {hidden_size} (hidden_size), neurons]"
    fits = mask.dim() == 2 and 1 <= len(mask) <= hidden_size
    require(fits, f"the mask has shape {tuple(mask.shape)}, {expected}")
    normal = _normal(device, seed)
    length, intermediate_size = mask.shape
    x = math.sqrt(hidden_size) * torch.linalg.qr(normal(hidden_size, length)).Q.t()
    # Rounding to bf16 moves g by 2e-3 (standard deviation), so a distance of 0.1 is safe.
    values = normal(length, intermediate_size).abs() + 0.1
    w_gate = torch.where(mask, values, -values).t() @ x / hidden_size
    w_up, w_down = _up_and_down(normal, intermediate_size, hidden_size, torch.bfloat16)
    x, w_gate = x.bfloat16(), w_gate.bfloat16()
    wrong = int(((x.double() @ w_gate.double().t() > 0) != mask).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {mask.numel()} entries differ from the mask in bf16")
    return x.repeat(-(-num_tokens // length), 1)[:num_tokens], w_gate, w_up, w_down


def recorded_masks(path: str | Path | None = None) -> dict[str, np.ndarray]:
    """Return recorded activity, name -> [T, N] bool; by default that of data/traces/masks.npz.

    Raises FileNotFoundError without the file, ValueError for a file of something else.
    """
    path = Path(path or results.root() / "data" / "traces" / "masks.npz")
    try:
        with np.load(path) as file:
            masks = dict(file)
        unpack = functools.partial(np.unpackbits, axis=1, count=int(masks.pop("intermediate_size")))
        return {name: unpack(packed).astype(bool) for name, packed in masks.items()}
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no file of masks: {error}") from None


def permuted(weights: Weights, seed: int) -> Weights:
    """Return the same layer with its neurons in another order: other memory, the same work.

    `weights` are w_gate [N, K] or None, w_up [N, K] and w_down [K, N] with strides (1, K); so are
    the permuted ones.
    """
    w_gate, w_up, w_down = weights
    g = torch.Generator(w_up.device).manual_seed(seed)
    order = torch.randperm(len(w_up), generator=g, device=w_up.device)
    return None if w_gate is None else w_gate[order], w_up[order], w_down.t()[order].t()
