"""The numbers behind the claims: by subject of `claims.yaml` a function from tables to a flat dict.

A notebook gives the functions its own tables; `recorded` gives them those of data/.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pandas as pd

from twell import results
from twell.analysis import activity, runs, speed, variants
from twell.analysis import tasks as accuracy
from twell.analysis.counted import formats, layers, neurons, seed_layers, tasks, tokens
from twell.analysis.measured import layer_speed, layer_training, models, steps, trained_models
from twell.analysis.trained import choices, devices, single, sizes, slowed, sweep, training

Runs = tuple[pd.DataFrame, pd.DataFrame]  # configurations and logs, as `results.load_runs`
SWEEP, LONGER, BY_SIZE = "85m-50m-*", "85m-100m-*", "depth-* 85m-100m-l1-*"
FLAGSHIP = "flagship-dense flagship-triton"
NO_SEEDS = "*-reinit-*", "*-warmup-*", "*-silu-*", "*-nongated-*"  # evaluated, of other choices
PAIRS = {  # one training on one GPU and on two: the newest version, and those before it
    "devices": "171m-30m-1-gpu 171m-30m-2-gpus",
    "before": "171m-30m-1-gpu-before 171m-30m-2-gpus-before",
    "larger": "171m-40m-1-gpu-before 171m-40m-2-gpus-before",
    "drawn": "171m-40m-1-gpu 171m-40m-2-gpus",
}


def recorded(root: str | Path) -> dict[str, dict[str, Any]]:
    """Return the quantities of every subject from data/ of a repository, by subject.

    Raises FileNotFoundError where data/ is not whole.
    """
    data = Path(root) / "data"
    every, log = results.load_runs(data / "runs")
    result = {"formats": _formats(data)} | _runs(every, log)
    return result | _speed(data) | _traces(data, log)


def _bench(data: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(data / "bench" / f"{name}.csv")


def _formats(data: Path) -> dict[str, Any]:
    """Of a small tensor with full, empty and overflowing rows, and of all fuzz cases."""
    import torch

    from twell.sparse.formats import PackedTwELL

    dense = torch.zeros(4, 5632, dtype=torch.bfloat16)
    dense[0], dense[1, ::100], dense[2, :40] = 1, 2, 3
    packed = PackedTwELL.pack(dense, 256, 8)
    return formats(packed, torch.equal(packed.unpack(), dense), _bench(data, "fuzz"))


def _fitting(every: pd.DataFrame, log: pd.DataFrame, pattern: str) -> Runs:
    """The runs whose name fits one of several patterns, and their log."""
    names = [name for name in every["run"] if any(Path(name).match(one) for one in pattern.split())]
    some = every[every["run"].isin(names)].dropna(axis=1, how="all")
    return some.reset_index(drop=True), log[log["run"].isin(names)].reset_index(drop=True)


def _runs(every: pd.DataFrame, log: pd.DataFrame) -> dict[str, dict[str, Any]]:
    family, family_log = _fitting(every, log, SWEEP)
    recipe = family[runs.choice(family) == "recipe"]
    table = runs.levels(runs.sweep(recipe, family_log))
    longer = runs.levels(runs.sweep(*_fitting(every, log, LONGER)))
    chosen = variants.choices(family, family_log)
    active = runs.training_curves(recipe, family_log, "active_mean")
    by_size = variants.sizes(*_fitting(every, log, BY_SIZE))

    pair = _fitting(every, log, FLAGSHIP)
    flagships, curves = variants.computed_otherwise(*pair), variants.computed_curves(*pair)
    scaled = {
        name: variants.computed_otherwise(*_fitting(every, log, pattern))
        for name, pattern in PAIRS.items()
    }
    sparse_log = log[log["run"] == "flagship-triton"]
    whole = training(flagships, scaled["devices"], curves, sparse_log)
    for name, table_of_pair in scaled.items():
        whole |= devices(table_of_pair, name)
    return {
        "sweep": sweep(table, active, chosen, longer) | single(runs.list_runs(every, log)),
        "choices": choices(chosen),
        "sizes": sizes(by_size, chosen),
        "training": whole | slowed(log[log["run"] == "flagship-half"]),
    }


def _speed(data: Path) -> dict[str, dict[str, Any]]:
    bench = functools.partial(_bench, data)
    rows, training_rows = bench("ffn"), bench("training")
    by_tokens = speed.model_speedups(bench("model"))
    by_step = speed.step_speedups(bench("train_step"))
    imposed = by_tokens.query("profile == 'paper' and batch == 64 and context == 2048")
    plain = by_step.query("profile == 'paper' and micro_batch == 16 and not checkpoint_activations")
    scale = speed.scale_table(results.paper(), imposed, plain)
    every_layer = speed.layer_contributions(bench("model_layers"))
    of_middle = every_layer.query("profile == 'paper' and model == '1.5b'")
    decode = speed.decode_speedups(bench("decode"))
    auto = speed.speedups(bench("auto"))
    whole = models(scale, imposed, decode, speed.layers_at(of_middle, 29))
    return {
        "layer_speed": layer_speed(speed.speedups(rows), auto, rows),
        "layer_training": layer_training(speed.training_speedups(training_rows)),
        "models": whole | trained_models(by_tokens, every_layer),
        "steps": steps(scale, by_step),
    }


def _traces(data: Path, log: pd.DataFrame) -> dict[str, dict[str, Any]]:
    from twell.trace import Aggregate, Trace

    logs = {}
    for level in ("0", "5e-3"):
        logs[level] = runs.logged_layers(log[log["run"] == f"85m-50m-l1-{level}-seed-0"], 2112)
    names = [f"85m-50m-l1-6e-4-seed-{seed}" for seed in (0, 1)]
    seeds = seed_layers(log[log["run"].isin(names)], 2112)
    where, which = {}, {}
    for prefix, name in (("", "85m-50m-l1-6e-4"), ("flagship_", "flagship")):
        counted = Aggregate.load(data / "traces" / f"{name}-aggregate.npz")
        table, tiles = activity.per_layer(counted), activity.tile_overflow(counted)
        beyond = (logs["0"], logs["5e-3"]) if not prefix else (table[:0], table[:0])
        where |= layers(table, *beyond, tiles, None if prefix else seeds, prefix)
        by_token = activity.per_token(counted, min_count=16)
        which |= tokens(by_token, activity.by_position(counted), prefix)
    passage = Trace.load(data / "traces" / "flagship-passage.npz")
    correlation = activity.surprise_correlation(passage)
    evaluated = accuracy.evaluations(results.load_evaluations(data / "eval"))
    of_recipe = [not any(Path(name).match(one) for one in NO_SEEDS) for name in evaluated["model"]]
    of_tasks = tasks(evaluated[of_recipe], accuracy.backend_differences(evaluated))
    return {"layers": where, "tokens": which, "neurons": neurons(correlation), "tasks": of_tasks}
