"""The loss and the activity of a model on held-out text."""

from __future__ import annotations

import torch

from twell.corpus import Blocks
from twell.models import SparseLlamaForCausalLM
from twell.sparse.layer import summarize_activity
from twell.train.relufy import Student


@torch.no_grad()
def evaluate(model: SparseLlamaForCausalLM | Student, blocks: Blocks, batch: int = 32) -> dict:
    """Return the mean cross-entropy (nats per predicted token) and each layer's activity.

    Result: {"cross_entropy": float, "layers": [summarize_activity(...) of each layer]}, over all
    blocks; for a student also "kl" and "cross_entropy_teacher" (relufy.py). The layers' own
    counters keep their values.
    """
    training, before = model.training, [ffn.stats.counters for ffn in model.ffns]
    model.eval()
    model.recording = True
    for ffn in model.ffns:
        ffn.stats.take()

    totals = {"cross_entropy": 0.0}
    if isinstance(model, Student):
        totals |= {"kl": 0.0, "cross_entropy_teacher": 0.0}
    for start in range(0, len(blocks), batch):
        tokens = blocks.draw(range(start, min(start + batch, len(blocks)))).to(model.device)
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        for name in totals:
            totals[name] += float(getattr(output, name)) * len(tokens)

    model.train(training)
    model.recording = False
    layers = [summarize_activity(*ffn.stats.take()) for ffn in model.ffns]
    for ffn, counted in zip(model.ffns, before, strict=True):
        ffn.stats.counters = counted
    return {name: total / len(blocks) for name, total in totals.items()} | {"layers": layers}
