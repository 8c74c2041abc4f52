"""Two sides: whether their tokens and their neurons can be compared, and what changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from twell.inspector.side import Side
from twell.models import sparse_ffns
from twell.trace import Trace

ALIKE = 0.3  # median cosine below which neurons with equal numbers are hardly the same ones
MOST = 20  # neurons that changed most


def compared(shown: Sequence[Side]) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header's entries about two sides, and the arrays of `alike`.

    aligned: the tokens are the same, one by one; same: one model object; paired: a neuron of one
    side is the neuron with its number on the other; reasons: sentences about what is not compared.
    """
    if len(shown) < 2:
        return {"aligned": False, "same": False, "paired": False, "reasons": []}, {}
    left, right = shown
    reasons, arrays = [], {}
    same = left.model is not None and left.model is right.model
    aligned = np.array_equal(left.trace.token_ids, right.trace.token_ids)
    if not aligned:
        reasons.append("The sides have different tokens, so no token has a difference.")
    paired = left.shape == right.shape
    if not paired:
        sizes = " and ".join("{} layers of {}".format(*side.shape) for side in shown)
        reasons.append(f"The models have {sizes} neurons, so neurons are not compared.")
    elif not same and None not in (left.model, right.model):
        arrays = alike(left.model, right.model)
        if arrays and (middle := np.median(arrays["alike_in"])) < ALIKE:
            reasons.append(
                f"The cosine of a neuron's input weights in the two models is {middle:.2f} in the "
                "median: equal numbers are hardly the same neurons."
            )
    about = {"aligned": aligned, "same": same, "paired": paired, "reasons": reasons}
    if aligned and paired and left.trace.num_tokens:
        about["changed"] = changed(left.trace, right.trace)
    return about, arrays


def changed(left: Trace, right: Trace) -> list[tuple[int, int, float]]:
    """Return the MOST neurons with the largest mean |difference of h|: layer, neuron, the mean.

    First tokens of sequences do not count.
    """
    later = np.flatnonzero(left.position > 0)
    layers = range(left.num_layers)
    sums = np.stack([abs(right.layer(n) - left.layer(n))[later].sum(0) for n in layers])
    order = np.argsort(-sums, axis=None, kind="stable")[:MOST]
    means = sums.reshape(-1)[order] / max(len(later), 1)
    places = zip(*np.unravel_index(order, sums.shape), means, strict=True)
    return [(int(n), int(neuron), float(mean)) for n, neuron, mean in places if mean > 0]


@torch.no_grad()
def alike(left: PreTrainedModel, right: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the cosines of each neuron's input and output weights in two models, [L * N]."""
    pairs = list(zip(sparse_ffns(left), sparse_ffns(right), strict=True))
    same_width = left.config.hidden_size == right.config.hidden_size
    if not same_width or not all(ffn.readable for pair in pairs for ffn in pair):
        return {}
    rows = {
        "alike_in": lambda ffn: ffn.first.weight.cpu().float(),
        "alike_out": lambda ffn: ffn.down_proj.weight.t().cpu().float(),
    }
    return {
        name: torch.cat([torch.cosine_similarity(of(a), of(b)) for a, b in pairs]).numpy()
        for name, of in rows.items()
    }
