"""A neuron beyond the passage: statistics and examples of the aggregate, words of the unembedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twell import analysis, trace
from twell.inspector.side import Side
from twell.trace import Aggregate

WORDS = 10  # that a neuron promotes, and suppresses
BATCH = 256  # neurons whose logits are computed at once


def cards(side: Side, neurons: Sequence[tuple[int, int]]) -> list[dict]:
    """Return a card for each neuron (layer, neuron): what is known of it beyond the passage.

    With an aggregate: tokens (of the aggregate), fires, mean and largest h, edges and histogram of h,
    and the places top and quantiles, each [h, quantile, before, token, after, sequence, position].
    With a model: promotes and suppresses, the words whose logits an h of 1 raises and lowers most,
    relative to the mean over the vocabulary, without the effect of later layers: [word, change].
    Raises IndexError for a neuron that does not exist.
    """
    layers, size = side.shape
    for layer, neuron in neurons:
        if not (0 <= layer < layers and 0 <= neuron < size):
            raise IndexError(
                f"layer {layer}, neuron {neuron} does not exist: there are {layers} layers of {size}"
            )
    found: list[dict] = [{} for _ in neurons]
    if side.aggregate is not None:
        for card, (layer, neuron) in zip(found, neurons, strict=True):
            card |= _statistics(side.aggregate, layer, neuron)
    if side.model is not None:
        for start in range(0, len(neurons), BATCH):
            part = slice(start, start + BATCH)
            for card, words in zip(found[part], _words(side, neurons[part]), strict=True):
                card |= words
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _statistics(aggregate: Aggregate, layer: int, neuron: int) -> dict:
    histogram = aggregate.value_histogram[layer, neuron]
    fires = int(histogram.sum())
    card = {
        "tokens": aggregate.num_tokens,
        "fires": fires,
        "mean": float(aggregate.value_sum[layer, neuron]) / max(fires, 1),
        "largest": float(aggregate.max_abs[layer, neuron]),
        "edges": [float(edge) for edge in aggregate.value_edges],
        "histogram": histogram.tolist(),
    }
    for kind, name in (("top", "top"), ("quantile", "quantiles")):
        card[name] = [
            [_short(value), None if kind == "top" else quantile, *around]
            for value, quantile, *around in analysis.places(aggregate, layer, neuron, kind)
        ]
    return card


@torch.no_grad()
def _words(side: Side, neurons: Sequence[tuple[int, int]]) -> list[dict]:
    model = side.model
    unembedding, norm = model.get_output_embeddings().weight, model.base_model.norm.weight
    directions = torch.stack([model.ffns[layer].direction(n) for layer, n in neurons], 1)
    logits = (unembedding @ (directions * norm[:, None])).float()  # [V, n]
    logits = (logits - logits.mean(0)).t()
    lists = []
    for largest in (True, False):
        values, ids = logits.topk(min(WORDS, logits.shape[1]), largest=largest)
        strings = iter(trace.token_strings(side.tokenizer, ids.reshape(-1).tolist()))
        lists.append([[[next(strings), _short(v)] for v in row] for row in values.tolist()])
    return [{"promotes": up, "suppresses": down} for up, down in zip(*lists, strict=True)]
