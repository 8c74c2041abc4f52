"""Models of random weights whose layers are as active as wanted, for measurements without a checkpoint.

Two channels of the residual stream are kept apart. The embedding sets them, one to a constant and one to a draw of each
token, and no layer writes them: their rows of the projections back into the stream are zero. A gate that reads them has a
threshold and tokens of different liveliness, as in `measure.synthetic_layer`, and is still nothing but a matrix: no
operation is added that a trained model would not compute.

RMSNorm divides both channels by the size of the whole stream, which grows from layer to layer and differs by token. So the
thresholds are found layer by layer on a sample of tokens, where each layer sees what those before it, already set, make of
them. What the layers add to the stream is small beside the embedding: else lively tokens, to whose stream more is added,
would lose their threshold on the way, and with it all likeness to a trained model's.

Tokens of one document are alike because each document keeps to one topic, a share of the vocabulary whose embeddings
have a part in common.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell.measure import BLOCK, LIVELINESS, POPULARITY
from twell.model import SparseLlamaForCausalLM
from twell.sparse.layer import ActivityStats, SparseFFN, summarize_activity

CONSTANT, DRAW = 0, 1  # the two channels
TOPICS = 64
# The share of their variance that embeddings of a topic have in common. With it unions of 64 and 128 tokens are within 10%
# of recorded ones (the masks of `measure.recorded_masks`, with twice their neurons) at 7 to 45 active of 5,632; with the 0.3
# of skewed layers, which measure.py keeps for the sake of recorded rows, they are 20% smaller.
TOPIC = 0.1
# Root mean square of what a feed-forward layer adds to a stream that begins with 1, and of an attention layer at the first
# position (it averages over what came before, so that later ones get less).
FFN_PART, ATTENTION_PART = 0.02, 0.1
LOGIT = (
    0.1  # standard deviation of logits, but for the token's own: the head is tied to the embedding
)
PROFILES = "paper", "flat"
# Mean active neurons over layers at the recommended L1 coefficient, as the paper's text has them; that of 1b, which it does not
# print, lies between its neighbours.
PAPER_ACTIVE = {"0.5b": 39.0, "1b": 32.0, "1.5b": 29.0, "2b": 24.0}
# The paper's Fig. 6 in words: a hump around layer 6 of 28, the first two layers least active.
PEAK, HUMP, WIDTH, FIRST = 6 / 27, 2.0, 0.13, (0.4, 0.6)
CHUNK = 8192  # tokens whose activity is counted at a time


def profile(name: str, num_layers: int, active: float) -> list[float]:
    """Return each layer's mean active neurons per token, for a mean of `active` over layers.

    "flat": the same in each. "paper": a hump where the paper has it (layer 6 of 28, scaled to the depth) that is three times
    the last layers, and the first two layers least active, as in its Fig. 6, whose values it does not print. Raises
    ValueError for another name.
    """
    if name not in PROFILES:
        raise ValueError(f"profile {name!r} is unknown; use one of {', '.join(PROFILES)}")
    if name == "flat" or num_layers <= len(FIRST):
        return [float(active)] * num_layers
    last = num_layers - 1
    peak = max(PEAK * last, len(FIRST))
    shape = [
        1 + HUMP * math.exp(-(((layer - peak) / (WIDTH * last)) ** 2))
        for layer in range(num_layers)
    ]
    shape[: len(FIRST)] = FIRST
    return [active * num_layers * height / sum(shape) for height in shape]


def draw_tokens(
    vocab_size: int, batch: int, context: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Return random documents [batch, context] int64, each of tokens of one topic: every TOPICS-th of the vocabulary."""
    g = torch.Generator(device).manual_seed(seed)
    topic = torch.randint(min(TOPICS, vocab_size), (batch, 1), generator=g, device=device)
    places = max(vocab_size // TOPICS, 1)
    return TOPICS * torch.randint(places, (batch, context), generator=g, device=device) + topic


def _first(ffn: SparseFFN) -> nn.Linear:
    """The projection that decides which neurons are active."""
    return ffn.gate_proj if ffn.gated else ffn.up_proj


@torch.no_grad()
def draw_weights(model: SparseLlamaForCausalLM, seed: int = 0) -> None:
    """Draw all weights anew, with the two channels kept apart; `impose` then sets thresholds.

    In the model's dtype and on its device, in place. What a projection gives for a normed input has a variance of 1, but for
    those that add to the stream. The head, tied to the embedding or not, sees nothing of the two channels: the last norm's
    gain is 0 there. Biases become 0.
    """
    config, embedding = model.config, model.model.embed_tokens.weight
    g = torch.Generator(embedding.device).manual_seed(seed)

    def draw(weight: Tensor, deviation: float) -> None:
        weight.normal_(0.0, deviation, generator=g)

    for parameter in model.parameters():  # gains of norms, biases
        if parameter.dim() == 1:
            parameter.zero_()
    draw(embedding, math.sqrt(1 - TOPIC))
    topics = torch.empty(TOPICS, config.hidden_size, device=embedding.device, dtype=embedding.dtype)
    draw(topics, math.sqrt(TOPIC))
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
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            draw(part.weight, unit)
        for part in (ffn.gate_proj, ffn.up_proj):
            if part is not None:
                draw(part.weight, unit)
        draw(attention.o_proj.weight, ATTENTION_PART * attention.o_proj.in_features**-0.5)
        draw(ffn.down_proj.weight, FFN_PART)  # to be scaled once the activity is known
        for part in (attention.o_proj, ffn.down_proj):
            part.weight[[CONSTANT, DRAW]] = 0
    model.model.norm.weight.fill_(LOGIT * unit)
    model.model.norm.weight[[CONSTANT, DRAW]] = 0


@contextlib.contextmanager
def before_ffn(
    model: SparseLlamaForCausalLM, visit: Callable[[int, SparseFFN, Tensor], None]
) -> Iterator[None]:
    """While it lasts, visit(place, layer, x) is called with each feed-forward layer's input before it computes."""

    def hook(place: int) -> Callable:
        return lambda ffn, inputs: visit(place, ffn, inputs[0])

    hooks = [ffn.register_forward_pre_hook(hook(place)) for place, ffn in enumerate(model.ffns)]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def impose(
    model: SparseLlamaForCausalLM, wanted: Sequence[float], tokens: Tensor, seed: int = 0
) -> None:
    """Set gates so that layer l has a mean of wanted[l] active neurons on `tokens` [B, S], in a model of `draw_weights`.

    In place, by one dense pass under whatever autocast is on; may be repeated for other means. The down projections are scaled
    too, so that layers of any activity add alike to the stream. Raises ValueError for means that a layer cannot have.
    """
    ffns = model.ffns
    most = model.config.intermediate_size
    if len(wanted) != len(ffns) or not all(0 < mean < most for mean in wanted):
        raise ValueError(
            f"activity of {', '.join(f'{mean:.4g}' for mean in wanted)} was asked for: each of {len(ffns)} layers can "
            f"have more than 0 and less than {most} active neurons"
        )

    def threshold(place: int, ffn: SparseFFN, x: Tensor) -> None:
        rows, weight = x.flatten(0, -2), _first(ffn).weight
        g = torch.Generator(weight.device).manual_seed(seed + 1 + place)
        spread = POPULARITY * torch.randn(len(weight), generator=g, device=weight.device)
        weight[:, CONSTANT] = -spread.to(weight.dtype)
        weight[:, DRAW] = LIVELINESS
        # The constant channel is positive: a neuron is active where the rest of its input exceeds its threshold.
        ratio = F.linear(rows, weight.detach()).float() / rows[:, CONSTANT, None].float()
        low, high = float(ratio.min()) - 1, float(ratio.max()) + 1
        for _ in range(40):
            middle = (low + high) / 2
            above = int((ratio > middle).sum())
            low, high = (middle, high) if above > wanted[place] * len(rows) else (low, middle)
        weight[:, CONSTANT] = -(spread + high).to(weight.dtype)
        torch.clear_autocast_cache()  # it holds casts of weights that have gradients, as they were

    def size(ffn: SparseFFN, _: tuple[Tensor, ...], y: Tensor) -> Tensor:
        found = float(y.float().square().mean().sqrt())
        factor = FFN_PART / found if found else 1.0
        ffn.down_proj.weight *= factor
        torch.clear_autocast_cache()
        return y * factor

    hooks = [ffn.register_forward_hook(size) for ffn in ffns]
    model.eval()
    try:
        with before_ffn(model, threshold):
            model.model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def layer_activity(ffn: SparseFFN, x: Tensor, block: int = BLOCK) -> dict[str, float]:
    """Return what `summarize_activity` does of a layer's input x [..., K], and union: the mean over blocks of tokens.

    Blocks have `block` consecutive tokens; what is left over of the tokens is one more.
    """
    stats, unions, part = ActivityStats(ffn.intermediate_size), [], _first(ffn)
    for rows in x.flatten(0, -2).split(CHUNK // block * block):
        active = torch.relu(part(rows)) != 0
        stats.record(active)
        whole = len(rows) // block * block
        unions.append(active[:whole].view(-1, block, active.shape[1]).any(1).sum(1))
        if whole < len(rows):
            unions.append(active[whole:].any(0).sum()[None])
    return summarize_activity(*stats.take()) | {"union": float(torch.cat(unions).double().mean())}


@torch.no_grad()
def activity_of(model: SparseLlamaForCausalLM, tokens: Tensor) -> list[dict[str, float]]:
    """Return `layer_activity` of each layer, by one pass over `tokens` [B, S]."""
    found: list[dict[str, float]] = []
    with before_ffn(model, lambda _, ffn, x: found.append(layer_activity(ffn, x))):
        model.model(input_ids=tokens, use_cache=False)
    return found
