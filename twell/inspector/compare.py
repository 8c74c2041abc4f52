"""What two sides have in common: whether their tokens and their neurons can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from twell.inspector.side import Side
from twell.models import sparse_ffns

ALIKE = 0.3  # median cosine below which neurons with equal numbers are hardly the same ones


def compared(shown: Sequence[Side]) -> tuple[dict, dict[str, np.ndarray]]:
    """Return what a view says about its two sides, and arrays.

    aligned: the tokens are the same, one by one; same: one model object; paired: a neuron of one
    side is the neuron with its number on the other; reasons: sentences about what is not compared.
    Arrays of two models with layers of equal sizes: alike_in and alike_out [L * N], the cosines of
    each neuron's input and output weights. Of one side nothing can be compared.
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
        reasons.append(
            f"The models have {sizes} neurons: the number of a neuron at the left means no neuron "
            "at the right."
        )
    elif not same:
        if left.model is not None and right.model is not None:
            arrays = alike(left.model, right.model)
        middle = np.median(arrays["alike_in"]) if arrays else 1
        if middle < ALIKE:
            reasons.append(
                f"The cosine of a neuron's input weights in the two models is {middle:.2f} in the "
                "median: equal numbers are hardly the same neurons."
            )
    return {"aligned": aligned, "same": same, "paired": paired, "reasons": reasons}, arrays


@torch.no_grad()
def alike(left: PreTrainedModel, right: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return alike_in and alike_out, float32 [L * N]; nothing of layers without plain weights."""
    if left.config.hidden_size != right.config.hidden_size:
        return {}
    pairs = list(zip(sparse_ffns(left), sparse_ffns(right), strict=True))
    if not all(one.readable for pair in pairs for one in pair):
        return {}
    parts = {
        "alike_in": lambda ffn: ffn.first.weight,
        "alike_out": lambda ffn: ffn.down_proj.weight.t(),
    }
    return {
        name: torch.cat(
            [torch.cosine_similarity(of(a).cpu().float(), of(b).cpu().float()) for a, b in pairs]
        ).numpy()
        for name, of in parts.items()
    }
