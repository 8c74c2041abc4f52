"""Layers and models of random weights with a given activity, to measure without training.

A pattern says how the activity varies between neurons and tokens. "Even" neurons are independent
and equally likely. "Skewed" ones imitate trained models: popular neurons, busy tokens, documents
whose tokens are alike.

Of a model, two channels of the residual stream are kept apart. The embedding sets them, one to a
constant and one to a draw of each token, and no layer writes them. A gate that reads them has a
threshold and a part of each token's liveliness, as in `synthetic_layer`, and is still nothing but a
matrix: no operation is added to the model.

RMSNorm divides both channels by the size of the whole stream, which grows from layer to layer and
differs by token. So the thresholds are found layer by layer on a sample of tokens, each behind the
layers that are already set. What the layers add to the stream is small beside the embedding:
otherwise lively tokens, whose stream grows more, would lose their threshold on the way.

Tokens of one document are alike because each document keeps to one topic, a share of the vocabulary
whose embeddings have a part in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from twell.measure.check import Weights, hooked
from twell.measure.rows import require
from twell.models.llama import SparseLlamaForCausalLM
from twell.sparse.calibration import BLOCK
from twell.sparse.layer import SparseFFN
from twell.sparse.observe import summarize_activity

DOCUMENT = 2048  # consecutive tokens of a layer's input that share a part of their variance
# The paper's Fig. 6 in words: a hump around layer 6 of 28, the first two layers least active.
PEAK, HUMP, WIDTH, FIRST = 6 / 27, 2.0, 0.13, (0.4, 0.6)
# Mean active neurons over layers at the recommended L1 coefficient, from the paper's text. It does
# not print that of 1b, which lies between its neighbours. ACTIVE: of a size that it does not have.
PAPER_ACTIVE, ACTIVE = {"0.5b": 39.0, "1b": 32.0, "1.5b": 29.0, "2b": 24.0}, 29.0


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
LIVELY = Pattern(popularity=0.4, liveliness=0.8, shared=0.5)
PATTERNS = {"skewed": SKEWED, "even": EVEN, "lively": LIVELY}
# Of models. With shared=0.1, unions of 64 and 128 tokens are within 10% of recorded ones at 7 to 45
# active neurons of 5,632; with 0.3, which layers keep for the sake of recorded rows, 20% smaller.
IMPOSED = Pattern(popularity=0.6, liveliness=0.4, shared=0.1)


def layer_means(profile: str, num_layers: int, active: float | None, size: str = "") -> list:
    """Return each layer's mean active neurons per token, for a mean of `active` over layers.

    active: None takes the paper's, of a model's size. profile: "flat", or "paper": a hump at layer
    6 of 28, scaled to the depth, three times the last layers. The paper does not print the values
    of its Fig. 6.
    """
    require(profile in ("flat", "paper"), f"profile {profile!r} is unknown; use flat or paper")
    active = PAPER_ACTIVE.get(size, ACTIVE) if active is None else active
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
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of a gated layer in bf16 with a mean of `active` neurons per token, 0 to N.

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
    return x.bfloat16(), w_gate.bfloat16(), w_up.bfloat16(), w_down_t.bfloat16().t()


def bisect(too_low: Callable[[float], bool], low: float, high: float, steps: int) -> list[float]:
    """Return the two ends of an interval after `steps` halvings."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return [low, high]


def _threshold(draws: Tensor, spread: Tensor, active: float, liveliness: float) -> float:
    """Return the threshold that gives a mean of `active` neurons."""
    # Few tokens: their own draws decide. Many: the distribution of the draws does.
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


# --- models -----------------------------------------------------------------------------------

CONSTANT, DRAW = 0, 1  # the two channels
TOPICS = 64
# Root mean square of a feed-forward layer's part of a stream that begins with 1, and of an
# attention layer's at the first position (later ones are averages, and less).
FFN_PART, ATTENTION_PART = 0.02, 0.1
# Standard deviation of logits, but for the token's own: the head is tied to the embedding.
LOGIT = 0.1


def draw_tokens(
    vocab_size: int, batch: int, context: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Return random documents [batch, context] int64, each of every TOPICS-th token."""
    g = torch.Generator(device).manual_seed(seed)
    topic = torch.randint(min(TOPICS, vocab_size), (batch, 1), generator=g, device=device)
    places = max(vocab_size // TOPICS, 1)
    return TOPICS * torch.randint(places, (batch, context), generator=g, device=device) + topic


@torch.no_grad()
def draw_weights(model: SparseLlamaForCausalLM, seed: int = 0) -> None:
    """Draw all weights anew in place, with the two channels apart; `impose` then sets thresholds.

    The head, tied to the embedding or not, does not read the two channels: the last norm's gain is
    0 there. Biases become 0.
    """
    config, embedding = model.config, model.model.embed_tokens.weight
    g = torch.Generator(embedding.device).manual_seed(seed)

    def draw(weight: Tensor, deviation: float) -> None:
        weight.normal_(0.0, deviation, generator=g)

    for parameter in model.parameters():  # gains of norms, biases
        if parameter.dim() == 1:
            parameter.zero_()
    draw(embedding, math.sqrt(1 - IMPOSED.shared))
    topics = embedding.new_empty(TOPICS, config.hidden_size)
    draw(topics, math.sqrt(IMPOSED.shared))
    embedding += topics[torch.arange(len(embedding), device=embedding.device) % TOPICS]
    embedding[:, CONSTANT] = 1
    draw(embedding[:, DRAW], 1.0)
    if not config.tie_word_embeddings:
        draw(model.lm_head.weight, 1.0)
    unit = config.hidden_size**-0.5
    for layer in model.model.layers:
        layer.input_layernorm.weight.fill_(1)
        layer.post_attention_layernorm.weight.fill_(1)
        attention, ffn = layer.self_attn, layer.mlp
        inner = attention.q_proj, attention.k_proj, attention.v_proj, ffn.gate_proj, ffn.up_proj
        for part in inner:
            if part is not None:
                draw(part.weight, unit)
        draw(attention.o_proj.weight, ATTENTION_PART * attention.o_proj.in_features**-0.5)
        draw(ffn.down_proj.weight, FFN_PART)  # to be scaled once the activity is known
        for part in (attention.o_proj, ffn.down_proj):
            part.weight[[CONSTANT, DRAW]] = 0
    model.model.norm.weight.fill_(LOGIT * unit)
    model.model.norm.weight[[CONSTANT, DRAW]] = 0


@torch.no_grad()
def impose(
    model: SparseLlamaForCausalLM,
    means: Sequence[float],
    tokens: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Set gates so that layer l has a mean of means[l] active neurons on `tokens` [B, S].

    In a model of `draw_weights`, by one dense pass under the present autocast; may be repeated. The
    down projections are scaled too, so layers of any activity add alike to the stream. tokens:
    None draws 64 documents. Raises ValueError for means that a layer cannot have.
    """
    config, most = model.config, model.config.intermediate_size
    if tokens is None:
        context = min(config.max_position_embeddings, 128)
        tokens = draw_tokens(config.vocab_size, 64, context, device=model.device, seed=1)
    require(
        len(means) == len(model.ffns) and all(0 < mean < most for mean in means),
        f"active is {', '.join(f'{mean:.4g}' for mean in means)}; each of {len(model.ffns)} layers "
        f"can have more than 0 and less than {most} active neurons",
    )

    def set_gate(index: int, ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2)
        _set_threshold(ffn.first.weight, rows, means[index], seed + 1 + index)

    def scale(_: int, ffn: SparseFFN, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        size = float(y.float().square().mean().sqrt())
        factor = FFN_PART / size if size else 1.0
        ffn.down_proj.weight *= factor
        torch.clear_autocast_cache()
        return y * factor

    model.eval()
    with hooked(model.ffns, set_gate, before=True), hooked(model.ffns, scale):
        model.model(input_ids=tokens, use_cache=False)


def _set_threshold(weight: Tensor, rows: Tensor, mean: float, seed: int) -> None:
    """Set both channels of a gate [N, K] so that `rows` [T, K] activate `mean` neurons."""
    g = torch.Generator(weight.device).manual_seed(seed)
    spread = IMPOSED.popularity * torch.randn(len(weight), generator=g, device=weight.device)
    weight[:, CONSTANT] = -spread.to(weight.dtype)
    weight[:, DRAW] = IMPOSED.liveliness
    # The constant channel is positive: a neuron is active where the rest exceeds its threshold.
    ratio = F.linear(rows, weight.detach()).float() / rows[:, CONSTANT, None].float()
    ends = float(ratio.min()) - 1, float(ratio.max()) + 1
    _, high = bisect(lambda least: int((ratio > least).sum()) > mean * len(rows), *ends, 40)
    weight[:, CONSTANT] = -(spread + high).to(weight.dtype)
    torch.clear_autocast_cache()  # it holds casts of weights that have gradients, as they were


@torch.no_grad()
def activity_of(model: SparseLlamaForCausalLM, tokens: Tensor, behind: int = 0) -> list[dict]:
    """Return each layer's `summarize_activity` and mean union of blocks in a pass.

    tokens: [B, S]. behind: count only the tokens after so many, as decoding does: one token of each
    document at a time.
    """
    activity: list[dict] = []

    def visit(_: int, ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
        x, block = inputs[0], BLOCK
        if behind:
            x, block = x[:, behind:].transpose(0, 1), min(len(x), BLOCK)
        active = torch.relu(ffn.first(x.flatten(0, -2))) != 0
        histogram = torch.bincount(active.sum(1), minlength=ffn.intermediate_size + 1)
        union = torch.stack([rows.any(0).sum() for rows in active.split(block)]).double().mean()
        activity.append(summarize_activity(active.sum(0), histogram) | {"union": float(union)})

    with hooked(model.ffns, visit, before=True):
        model.model(input_ids=tokens, use_cache=False)
    return activity
