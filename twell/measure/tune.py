"""Choose the path of every layer of a model for good, by the activity of one batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from twell.measure.calibration import calibrate
from twell.models.convert import ACTIVITY, apply_activity, sparse_ffns
from twell.models.order import MIN_TOKENS, order_tokens
from twell.sparse.layer import SparseFFN
from twell.sparse.plan import BLOCK, count_activity, sampled_blocks

# Similar tokens go side by side where unions shrink to this share, which is a guess. Two trained
# models gained 3.2 and 3.9% on an H200 (data/bench/model.csv).
SMALLER = 0.75


@torch.no_grad()
def tune(
    model: nn.Module, batch: Mapping[str, Any] | Tensor | None, *, measure: bool = False
) -> pd.DataFrame | None:
    """Fix the paths of "auto" by the activity of a batch; print and return the table.

    A layer that is not tuned counts the activity of its calls, and adopts it at fixed numbers of
    calls. A tuned one counts nothing, and takes the same paths from the first call on. The activity
    stands in the configuration, so `save_pretrained` saves it and loading restores it. Where it
    makes unions a quarter smaller, tokens are put in order too (`order_tokens`), which is not
    saved. Tune again after training.

    Args:
        model: with SparseFFN layers, on the device where it will run.
        batch: keyword arguments of the model, or token ids [B, S]; 64 tokens or more are typical
            for reading, fewer for writing, and 4,096 or more may be put in order. None: undo it,
            and count again; returns None.
        measure: also time the paths on this GPU, some minutes for each shape of layer.

    The table has a row a layer: mean `active` neurons of a token, mean union of a block, of 4,096
    tokens and more also `in order`, and by situation the paths with the most tokens of each. Raises
    ValueError for a model without SparseFFN layers, and where a layer did not run. Ours.
    """
    ffns, config = sparse_ffns(model), getattr(model, "config", None)
    if (earlier := model.__dict__.pop("ordered_tokens", None)) is not None:
        earlier.remove()
    if batch is None:
        for ffn in ffns:
            ffn.chooser.freeze(None)
        if hasattr(config, ACTIVITY):
            delattr(config, ACTIVITY)
        return None
    if measure:
        times = functools.cache(calibrate)
        for ffn in ffns:
            options = {"gated": ffn.gated, "quantized": ffn.quantized}
            ffn.calibration = times(ffn.hidden_size, ffn.intermediate_size, **options)
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, counted = given.get("input_ids"), {}
    may_order = ids is not None and ids.numel() >= MIN_TOKENS

    def count(ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
        rows, order = inputs[0].reshape(-1, ffn.hidden_size), ffn.token_order
        fits = order is not None and order.fits(rows)
        counted[ffn] = _activity(ffn, rows), _activity(ffn, order.take(rows) if fits else rows)

    training = model.training
    with ExitStack() as hooks:
        hooks.callback(model.train, training)
        for ffn in ffns:
            hooks.callback(ffn.register_forward_pre_hook(count).remove)
        if may_order:
            hooks.enter_context(order_tokens(model))
        model.eval()(**given)
    if idle := len(ffns) - len(counted):
        raise ValueError(f"{idle} of {len(ffns)} layers did not run on this batch; give another")
    activity, in_order = zip(*(counted[ffn] for ffn in ffns), strict=True)
    apply_activity(ffns, activity)
    if config is not None:
        setattr(config, ACTIVITY, activity)
    rows = []
    for layer, (ffn, (size, active, union)) in enumerate(zip(ffns, activity, strict=True)):
        row = {"layer": layer, "active": active, f"union of {size}": union}
        row |= {"in order": in_order[layer][2]} if may_order else {}
        rows.append(row | {situation: _text(plan) for situation, plan in ffn.plans.items()})
    before, after = (sum(union for *_, union in layers) for layers in (activity, in_order))
    if may_order and after <= SMALLER * before:
        model.ordered_tokens = order_tokens(model)
    table = pd.DataFrame(rows).set_index("layer").round(1)
    print(table.to_string(), flush=True)
    return table


def _activity(ffn: SparseFFN, rows: Tensor) -> list[float]:
    """Return the tokens of a block, and the mean active neurons of a token and of a block."""
    counters = torch.zeros(4, dtype=torch.int64, device=rows.device)
    count_activity(sampled_blocks(rows), lambda x: ffn.act.gate(ffn.first(x)), counters)
    tokens, blocks, active, union = counters.tolist()
    return [min(len(rows), BLOCK), active / tokens, union / blocks]


def _text(plan: tuple[tuple[int, str], ...]) -> str:
    *pairs, (_, last) = plan
    return ", ".join([*(f"{path} to {most:,}" for most, path in pairs), last])
