"""Choose the path of every layer of a model for good, by the activity of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from twell.measure.check import hooked
from twell.models.convert import ACTIVITY, apply_activity, sparse_ffns
from twell.sparse.layer import SparseFFN
from twell.sparse.plan import BLOCK, count_activity, sampled_blocks


@torch.no_grad()
def tune(
    model: nn.Module, batch: Mapping[str, Any] | Tensor | None
) -> pd.DataFrame | None:
    """Fix the paths of "auto" by the activity of a batch; print and return the table.

    A layer that is not tuned counts the activity of its calls, and adopts it at fixed numbers of
    calls. A tuned one counts nothing, and takes the same paths from the first call on. The activity
    stands in the configuration, so `save_pretrained` saves it and loading restores it. Tune again
    after training.

    Args:
        model: with SparseFFN layers, on the device where it will run.
        batch: keyword arguments of the model, or token ids [B, S]; 64 tokens or more are typical
            for reading, fewer for writing. None: count again, as before `tune`; returns None.

    The table has a row a layer: mean `active` neurons of a token, mean `union` of a block, and by
    situation the paths with the most tokens of each. Raises ValueError for a model without
    SparseFFN layers, and where a layer did not run. Ours.
    """
    ffns, config = sparse_ffns(model), getattr(model, "config", None)
    if batch is None:
        for ffn in ffns:
            ffn.chooser.freeze(None)
        if hasattr(config, ACTIVITY):
            delattr(config, ACTIVITY)
        return None
    counted: dict[SparseFFN, list[int]] = {}

    def count(index: int, ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].reshape(-1, ffn.hidden_size)
        counters = torch.zeros(4, dtype=torch.int64, device=rows.device)
        count_activity(sampled_blocks(rows), lambda x: ffn.act.gate(ffn.first(x)), counters)
        counted[ffn] = [*counters.tolist(), min(len(rows), BLOCK)]

    training = model.training
    try:
        with hooked(ffns, count, before=True):
            model.eval()(**(batch if isinstance(batch, Mapping) else {"input_ids": batch}))
    finally:
        model.train(training)
    if idle := len(ffns) - len(counted):
        raise ValueError(f"{idle} of {len(ffns)} layers did not run on this batch; give another")
    activity, rows = [], []
    for ffn in ffns:
        tokens, blocks, active, union, size = counted[ffn]
        activity.append([size, active / tokens, union / blocks])
    apply_activity(ffns, activity)
    if config is not None:
        setattr(config, ACTIVITY, activity)
    for layer, (ffn, (size, active, union)) in enumerate(zip(ffns, activity, strict=True)):
        row = {"layer": layer, "active": active, f"union of {size}": union}
        rows.append(row | {situation: _text(plan) for situation, plan in ffn.plans.items()})
    table = pd.DataFrame(rows).set_index("layer").round(1)
    print(table.to_string(), flush=True)
    return table


def _text(plan: tuple[tuple[int, str], ...]) -> str:
    *pairs, (_, last) = plan
    return ", ".join([*(f"{path} to {most:,}" for most, path in pairs), last])
