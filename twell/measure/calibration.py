"""Times for "auto", the activity up to which sparse training is faster, and paths by a batch."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from twell import results
from twell.measure import runner
from twell.measure.check import hooked
from twell.measure.layer import Case, TrainingCase, check_sizes, default_mode
from twell.measure.providers import DENSE_COMPILED, FP8, UNION, Provider
from twell.measure.rows import significant
from twell.measure.runner import bench
from twell.models.convert import ACTIVITY, apply_activity, sparse_ffns
from twell.models.order import MIN_TOKENS, order_tokens
from twell.sparse.calibration import COMPILED, EAGER, FLOAT8, Calibration, Floor, Point, crossing
from twell.sparse.layer import SparseFFN
from twell.sparse.plan import BLOCK, WAITING, count_activity, sampled_blocks

CALIBRATION_TOKENS = 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384, 131072
BEHIND = 2  # a path this many times slower than dense is not timed at higher activity
# Where a call may wait for Python: up to 4 tokens, up to 512, and more take different kernels.
FLOOR_TOKENS = 1, 2, 4, 8, 512, 2048
# Similar tokens go side by side where unions shrink to this share, which is a guess. Two trained
# models gained 3.2 and 3.9% on an H200 (data/bench/model.csv).
SMALLER = 0.75
CROSSOVER_TOKENS = 16384
CROSSOVER_SHARES = 0.005, 0.02, 0.05, 0.1, 0.2  # mean active neurons per token, of all


@torch.no_grad()
def calibrate(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    quantized: bool = False,
    tokens: Sequence[int] = CALIBRATION_TOKENS,
) -> Calibration:
    """Time the kernels' dense path and each sparse path, by which "auto" chooses.

    The layer is in bf16, or with `quantized` in FP8, its activity skewed, from one neuron per token
    to all. Calls that may wait for Python are also timed eager and compiled, without a CUDA graph.
    About two minutes on an H100. `crossover` measures training. Raises as `ffn` does. Ours.
    """
    gpu, precision = runner.Gpu(), FP8 if quantized else None
    check_sizes(tokens, hidden_size)
    sizes = hidden_size, intermediate_size

    def timed(case: Case, turns: str, column: str, behind: Container[str] = ()) -> dict:
        """Return ms by path."""
        paths = [path for path in case.paths() if path not in behind]
        by = {path: Provider("triton", path, precision=precision) for path in paths}
        # As "auto" calls dense where it does not wait for the kernels.
        waits = case.mode == EAGER and case.columns["tokens"] > WAITING
        if turns == "floor" and precision is None and not waits:
            by["dense"] = Provider("dense", "dense")
        calls = bench(gpu, case.prepare, by.values(), turns)
        times = {path: calls[provider].columns[column] for path, provider in by.items()}
        shown = "  ".join(f"{path} {ms:.4f}" for path, ms in times.items())
        print(f"{case}  {case.mode:<8}  {shown}", flush=True)
        return times

    points, floors, half = [], [], intermediate_size // 2
    levels = {level for level in (1, 10, 30, 100, 300, 1000) if level < half}
    for num_tokens in tokens:
        behind: set[str] = set()
        for active in sorted(levels | {max(half, 1), intermediate_size}):
            mode = default_mode(num_tokens)
            case = Case.draw(gpu, (num_tokens, *sizes), active, mode=mode, gated=gated)
            times = timed(case, "calibration", "p50", behind)
            behind |= {path for path, ms in times.items() if ms > BEHIND * times["dense"]}
            points.append(Point(num_tokens, case.columns["active"], case.columns["union"], times))
    for num_tokens in [n for n in FLOOR_TOKENS if n <= max(tokens)]:
        for situation in (EAGER, COMPILED):  # of a layer with hardly any activity
            case = Case.draw(gpu, (num_tokens, *sizes), 1, mode=situation, gated=gated)
            floors.append(Floor(situation, num_tokens, timed(case, "floor", "p20")))
        torch.compiler.reset()  # compiled anew for each path, up to a limit
    origin = results.provenance()
    return Calibration(
        device=origin["device"],
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        gated=gated,
        dtype=FLOAT8 if quantized else "bfloat16",
        versions="; ".join(f"{name} {version}" for name, version in origin["versions"].items()),
        date=origin["date"],
        times=tuple(points),
        floors=tuple(floors),
    )


def crossover(
    hidden_size: int = 2048,
    intermediate_size: int = 5632,
    *,
    gated: bool = True,
    tokens: int = CROSSOVER_TOKENS,
) -> float:
    """Return up to how many active neurons per token a sparse step is faster than a dense one.

    The value of `Calibration.training`: by the path "union", over dense torch.compile. Activity is
    skewed and rises from 0.5% to 20% of the neurons until sparse is slower; each level is printed.
    0: sparse is slower at the lowest. Raises as `ffn` does. Ours.
    """
    gpu = runner.Gpu()
    check_sizes([tokens], hidden_size)
    levels: list[tuple[float, float]] = []
    for active in sorted({max(share * intermediate_size, 1.0) for share in CROSSOVER_SHARES}):
        shape = tokens, hidden_size, intermediate_size
        case = TrainingCase.draw(gpu, shape, active, gated=gated)
        calls = bench(gpu, case.prepare, [DENSE_COMPILED, UNION], "step")
        dense, sparse = (call.columns["p50"] for call in calls.values())
        print(f"{case}  step: dense {dense:.4f} ms  sparse {sparse:.4f} ms", flush=True)
        levels.append((case.columns["active"], dense / sparse))
        if dense < sparse:
            break
    torch.compiler.reset()
    result = crossing(levels)
    if result < levels[-1][0]:
        result = significant(result, 4)
    print(f"training is faster sparsely up to {result:g} active neurons per token", flush=True)
    return result


@torch.no_grad()
def tune(
    model: nn.Module, batch: Mapping[str, Any] | Tensor | None, *, measure: bool = False
) -> pd.DataFrame | None:
    """Fix the paths of "auto" by the activity of a batch; print and return the table.

    A tuned layer counts nothing, and takes the same paths from the first call on. The configuration
    holds the activity, so `save_pretrained` saves it and loading restores it. Where order makes
    unions a quarter smaller, tokens are put in order too (`order_tokens`), which is not saved. Tune
    again after training.

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

    def count(_: int, ffn: SparseFFN, inputs: tuple[Tensor, ...]) -> None:
        rows, order = inputs[0].reshape(-1, ffn.hidden_size), ffn.token_order
        fits = order is not None and order.fits(rows)
        counted[ffn] = _activity(ffn, rows), _activity(ffn, order.take(rows) if fits else rows)

    training = model.training
    try:
        with order_tokens(model) if may_order else nullcontext(), hooked(ffns, count, before=True):
            model.eval()(**given)
    finally:
        model.train(training)
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
        for situation, (*pairs, (_, last)) in ffn.plans.items():
            row[situation] = ", ".join([*(f"{path} to {most:,}" for most, path in pairs), last])
        rows.append(row)
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
