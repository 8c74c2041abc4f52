"""Two sides: whether their tokens and their neurons can be compared, and what changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twell.inspector.side import Side
from twell.trace import Trace

MOST = 20  # neurons that changed most


def compared(shown: Sequence[Side]) -> dict:
    """Return the header's entries about two sides.

    aligned: the tokens are the same, one by one; same: one model object; paired: a neuron of one
    side is the neuron with its number on the other; reasons: sentences about what is not compared.
    """
    if len(shown) < 2:
        return {"aligned": False, "same": False, "paired": False, "reasons": []}
    left, right = shown
    reasons = []
    same = left.model is not None and left.model is right.model
    aligned = np.array_equal(left.trace.token_ids, right.trace.token_ids)
    if not aligned:
        reasons.append("The sides have different tokens, so no token has a difference.")
    paired = left.shape == right.shape
    if not paired:
        sizes = " and ".join("{} layers of {}".format(*side.shape) for side in shown)
        reasons.append(f"The models have {sizes} neurons, so neurons are not compared.")
    about = {"aligned": aligned, "same": same, "paired": paired, "reasons": reasons}
    if aligned and paired and left.trace.num_tokens:
        about["changed"] = changed(left.trace, right.trace)
    return about


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
