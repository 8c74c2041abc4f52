"""Made-up traces, runs, measured rows and evaluations, as study.analysis reads them."""

import numpy as np
import pandas as pd

from study import analysis
from tests.factories import SEED
from twell.trace import Trace

# --- traces -----------------------------------------------------------------------------------


def make_trace(seed, num_tokens=60, num_layers=3, intermediate_size=300, context=16):
    """A random trace with empty and full rows, a silent neuron, values of 0 and negative ones."""
    random = np.random.default_rng(seed)
    shape = (num_layers, num_tokens, intermediate_size)
    mask = random.random(shape) < random.lognormal(-3, 1.5, shape[:2])[:, :, None]
    mask[random.integers(num_layers), random.integers(num_tokens)] = True
    mask[random.integers(num_layers), random.integers(num_tokens)] = False
    mask[:, :, 7] = False
    values = random.standard_normal(mask.sum()).astype(np.float32)
    values[random.random(len(values)) < 0.1] = 0
    token_ids = random.integers(0, 12, num_tokens).astype(np.int32)
    position = np.arange(num_tokens, dtype=np.int32) % context
    trace = Trace(
        token_ids=token_ids,
        strings=[f"<{token}>" for token in token_ids],
        logprob=np.where(position == 0, np.nan, -random.random(num_tokens)).astype(np.float32),
        sequence=np.arange(num_tokens, dtype=np.int32) // context,
        position=position,
        indptr=np.concatenate([[0], mask.sum(2).reshape(-1).cumsum()]).astype(np.int64),
        indices=mask.nonzero()[2].astype(np.uint16),
        values=values,
        intermediate_size=intermediate_size,
    )
    return trace, mask


# --- runs -------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 8, "intermediate_size": 100, "num_layers": 2, "tokens": 1000}


def make_run(name, l1, loss, silenced, active, dead=(0.0, 0.0), window=(), complete=True, **config):
    """Return a run's configuration and its log with a first, a middle and a last validation.

    active and dead: of each layer at the end; window: dead fractions over training.
    """
    rows = [(step, "valid", None, "cross_entropy", x) for step, x in ((0, 9), (10, loss), (5, 99))]
    rows += [(10, "valid", None, "cross_entropy_silenced", silenced)]
    for layer in range(2):
        actives = (0, 50 + layer), (5, 77), (10, active[layer])
        rows += [(step, "valid", layer, "active_mean", value) for step, value in actives]
        deaths = (0, 0.9), (10, dead[layer])
        rows += [(step, "valid", layer, "dead_fraction", value) for step, value in deaths]
        rows += [
            (step, "train", layer, "dead_fraction", value) for step, value in enumerate(window)
        ]
        rows += [(step, "train", layer, "active_mean", 10 * step + layer) for step in (4, 2, 10)]
    log = pd.DataFrame(rows, columns=["step", "split", "layer", "metric", "value"])
    log = log.assign(run=name, tokens=log["step"] * 100, layer=log["layer"].astype("Int64"))
    return SHAPE | {"run": name, "l1_coefficient": l1, "complete": complete} | config, log


def tables(*runs):
    """The configurations and the log of runs, as `results.load_runs` returns them."""
    rows, logs = zip(*runs, strict=True)
    return pd.DataFrame(rows), pd.concat(logs, ignore_index=True)


DENSE = make_run("dense", 0.0, 4.0, 5.0, (30, 20))
GOOD = make_run("good", 1e-3, 4.04, 5.0, (3, 1), (0.2, 0.4), window=(0.1, 0.3, 0.5))
UNUSED = make_run("unused", 1e-2, 4.4, 4.41, (1, 1))
UNFINISHED = make_run("unfinished", 5e-4, 4.0, 5.0, (1, 1), complete=False)


def made(name, l1, price, active, dead, train_price=0.0, **config):
    """A run, its price in % over a cross-entropy of 4, its dead neurons in %.

    train_price: of the last training step, over a cross-entropy of 2.
    """
    loss = 4 * (1 + price / 100)
    window = 0.9, dead / 100
    run, log = make_run(name, l1, loss, loss + 1, (active, active), window=window, **config)
    rows = [(step, value * (1 + train_price / 100)) for step, value in ((2, 7), (10, 2))]
    more = pd.DataFrame(rows, columns=["step", "value"]).assign(run=name, split="train")
    more = more.assign(metric="cross_entropy", tokens=more["step"] * 100, layer=pd.NA)
    return run, pd.concat([log, more.astype({"layer": "Int64"})], ignore_index=True)


def relufied_run(name, share, active, kl, **config):
    """A run of `twell relufy` that ends with these active neurons and this divergence."""
    coefficient = 1e-3 if share else 0.0
    asked = {"active_share": share, "threshold": 0.0, "teacher": "original"}
    asked["learning_rate"] = 1e-3
    row, log = make_run(name, coefficient, 4.0 + kl, 5.0, active, **asked | config)
    rows = [(step, "valid", "kl", value) for step, value in ((0, 5.0), (10, kl))]
    rows += [(10, "valid", "cross_entropy_teacher", 4.0)]
    rows += [(step, "train", "kl", value) for step, value in ((2, 1.0), (10, kl))]
    steered = "l1_coefficient" if row["l1_coefficient"] else "threshold"
    rows += [(step, "train", steered, 4e-4 * step) for step in (2, 10) if share]
    more = pd.DataFrame(rows, columns=["step", "split", "metric", "value"])
    more = more.assign(run=name, tokens=more["step"] * 100, layer=pd.array([pd.NA] * len(more)))
    log = log[(log["split"] == "valid") | (log["metric"] != "active_mean")]
    for layer in range(2):
        layers = {2: 20.0, 10: active[layer]}
        values = [(step, "train", layer, "active_mean", value) for step, value in layers.items()]
        values += [(10, "valid", layer, name, 0.0) for name in ("active_p99", "active_max")]
        columns = ["step", "split", "layer", "metric", "value"]
        of_layer = pd.DataFrame(values, columns=columns)
        more = pd.concat([more, of_layer.assign(run=name, tokens=100 * of_layer["step"])])
    log = pd.concat([log, more.astype({"layer": "Int64"})], ignore_index=True)
    return row, log.assign(tokens=log["tokens"] * row["tokens"] // SHAPE["tokens"])


TEACHER = "abcdef12" + 56 * "0"  # a hash
# Marks of a run on each item of two tasks, by name; that of the original ends with TEACHER.
MARKS = {
    "no-student-abcdef12": ("00000000", "0000"),
    "small-original-abcdef12": ("11111111", "1100"),
    "small-original-00000000": ("00000000", "0000"),
    "alone": ("11111100", "1100"),
    "tenth": ("11000000", "1100"),
    "longer": ("11110000", "0000"),
}


def relufied_study():
    """ReLU alone and 10% on 1,000 tokens, 10% on 2,000, and a run that has no answers."""
    same = {"teacher_sha256": TEACHER}
    return (
        relufied_run("alone", 0.0, (60, 40), 0.1, **same),
        relufied_run("tenth", 0.1, (12, 8), 0.3, **same),
        relufied_run("longer", 0.1, (11, 8), 0.2, tokens=2000, **same),
        relufied_run("silent", 0.0, (50, 30), 0.1, threshold=0.5, **same),
    )


def kept_answers(marks=MARKS):
    """What `study.keep` leaves of each run, with its name."""
    parts = []
    for run, of_tasks in marks.items():
        for task, correct in zip(("piqa", "arc_easy"), of_tasks, strict=True):
            parts.append(pd.DataFrame({"run": run, "task": task, "correct": map(int, correct)}))
        parts.append(pd.DataFrame({"run": run, "task": "held_out_text", "nats": [3.0]}))
    return pd.concat(parts, ignore_index=True)


def family(reinit=0.0, warm_active=8.0, silu=-1.0, without=40.0):
    """The recipe at three levels, two of them with two seeds, and every other choice.

    Prices of seeds differ at L1 = 0 alone.
    """
    wide = {"gated": False, "intermediate_size": 150}
    warm = {"l1_zero_steps": 3, "l1_warmup_steps": 5}
    runs = [made(f"l1-0-{seed}", 0.0, price, 20, 0.0) for seed, price in enumerate((-0.2, 0.2))]
    seeds = enumerate((1.98, 2.02))
    runs += [made(f"l1-a-{seed}", 1e-3, 1.0, active, without) for seed, active in seeds]
    runs += [made("l1-b-0", 3e-3, 3.0, 1.0, 60.0)]
    runs += [made("l1-c-0", 1e-4, 0.2, 10.0, 2.0, complete=False)]
    runs += [made(f"reinit-{seed}", 1e-3, 1.0 + reinit, 2, 0.5, reinit=0.1) for seed in (0, 1)]
    runs += [made(f"warm-{seed}", 1e-3, 0.9, warm_active, 0.0, **warm) for seed in (0, 1)]
    runs += [made(f"silu-{seed}", 0.0, silu, 100, 0.0, activation="silu") for seed in (0, 1)]
    runs += [made("wide-0", 0.0, 0.1, 15, 0.0, **wide), made("wide-a", 1e-3, 1.1, 3, 20.0, **wide)]
    return runs + [made("ours", 1e-3, 0.25, 2, 10.0, balance_every=1)]


def scaled(name, parameters, l1, price, active, width=100, **config):
    """A run of a model of some size, on 20 tokens a parameter."""
    size = {"parameters": parameters, "tokens": 20 * parameters, "intermediate_size": width}
    return made(name, l1, price, active, 10.0, **(size | config))


def trained(
    name,
    losses,
    speeds,
    memory=(),
    backend="dense",
    devices=1,
    every=1,
    complete=True,
    last=4.0,
    **config,
):
    """A run with a row of the log every so many steps of 100 tokens.

    last: cross-entropy of the last validation, where 5 of 100 neurons are active.
    """
    columns = {"cross_entropy": losses, "tokens_per_second": speeds, "peak_memory": memory}
    rows = [
        (every * n, "train", None, metric, value)
        for metric, values in columns.items()
        for n, value in enumerate(values, 1)
    ]
    end = every * len(losses)
    rows += [(step, "valid", None, "cross_entropy", x) for step, x in ((0, 9.0), (end, last))]
    rows += [(end, "valid", layer, "active_mean", 4.0 + 2 * layer) for layer in (0, 1)]
    log = pd.DataFrame(rows, columns=["step", "split", "layer", "metric", "value"])
    log = log.assign(run=name, tokens=100 * log["step"], layer=log["layer"].astype("Int64"))
    launched = f"accelerate launch --num_processes {devices} -m twell train"
    row = SHAPE | {"run": name, "complete": complete, "backend": backend, "device": "a GPU"}
    row |= {"command": launched if devices > 1 else "python -m twell train", "tokens": 100 * end}
    row |= {"parameters": 7e6, "batch_tokens": 100, "vocab_size": 16_384}
    return row | {"l1_coefficient": 1e-3, "seed": 0} | config, log


SPARSELY = trained(
    "a-sparse", [8, 6.5, 5, 4], [10, 20, 60, 40], [900, 700, 300, 400], "triton", last=4.1
)
DENSELY = trained("dense", [8, 6, 5, 4.5], [30, 30, 20, 20], [800, 500, 500, 500])
BY_TWO = trained(
    "b-two", [8, 6.5, 5, 4.25], [1, 1, 90, 100], [600, 1, 1, 200], "triton", devices=2, last=4.2
)

# --- measured rows ----------------------------------------------------------------------------

BASE = "dense torch.compile"
COMPILED = [BASE, "triton torch.compile", "auto torch.compile"]
CALL = {"device": "NVIDIA H200", "commit": "a" * 40, "date": "2026-11-22T10:00:00+00:00"}
OF_1_5B = {"model": "1.5b", "num_layers": 28, "hidden_size": 2048, "intermediate_size": 5632}
OF_1_5B |= {"num_heads": 32, "vocab_size": 49152, "gated": True, "profile": "paper"} | CALL
MODEL = OF_1_5B | {"dtype": "bfloat16", "sdpa": "default", "batch": 64, "context": 2048}
MODEL |= {"tokens": 131072, "command": "python -m twell measure model"}


def rows_of(case, times):
    """A row a provider; times: provider -> ms, or ms of COMPILED."""
    times = times if isinstance(times, dict) else dict(zip(COMPILED, times, strict=True))
    return pd.DataFrame(case | {"provider": list(times), "p50": list(times.values())})


def speed_rows(tokens, active, times, **columns):
    """Rows of ffn.csv, as one call leaves them for one case; times: provider -> ms."""
    case = {"tokens": tokens, "hidden_size": 2048, "intermediate_size": 5632, "gated": True}
    case |= {"dtype": "bfloat16", "pattern": "skewed", "active": active, "active_max": 99}
    case |= {"union": 200.0, "mode": "stream", "weight_sets": 1, "relative_rms": 0.003}
    case |= {"energy": np.nan, "command": "python -m twell measure ffn"} | CALL | columns
    return rows_of(
        case | {"path": [name.removeprefix("triton ").removesuffix(" FP8") for name in times]},
        times,
    )


def training_rows(tokens, active, times, **columns):
    """Rows of training.csv, as one call leaves them for one case; times: provider -> ms."""
    rows = speed_rows(tokens, active, times).drop(columns="weight_sets")
    more = {"forward": rows["p50"] / 4, "held": 600, "peak": 1000, "capacity": np.nan}
    more |= {"worst": "dx", "command": "python -m twell measure ffn --backward"}
    return rows.assign(**more | columns)


def step_rows(times, **columns):
    """Rows of train_step.csv, as one call leaves them; times: provider -> ms."""
    case = OF_1_5B | {"context": 2048, "micro_batch": 4, "precision": "bf16", "active": 29.0}
    case |= {"checkpoint_activations": False, "active_max": 31.0, "peak": 50, "energy": np.nan}
    case |= {"largest": np.nan, "largest_tokens_per_second": np.nan}
    return rows_of(case | {"command": "python -m twell measure train-step"} | columns, times)


def model_rows(times, active=29.0, **columns):
    """Rows of model.csv, as one call leaves them for one case; times: as `rows_of`."""
    case = MODEL | {"active": active, "active_max": 700, "union": 800.0, "mode": "stream"}
    case |= {"path": "union 28", "relative_rms": 0.01, "peak": 100, "energy": np.nan}
    rows = rows_of(case | {"idle": np.nan} | columns, times)
    return rows.assign(tokens_per_ms=rows["tokens"] / rows["p50"])


def decode_rows(times, batch=1, **columns):
    """Rows of decode.csv for one case; times: as `rows_of`."""
    case = {"batch": batch, "context": 512, "tokens": batch, "steps": 64, "mode": "graph"}
    rows = model_rows(times, **case | columns).drop(columns=["peak", "tokens_per_ms"])
    return rows.assign(tokens_per_second=1e3 * batch / rows["p50"])


def model_layer_rows(dense, sparse, active, level=29.0, auto=None, **columns):
    """Rows of model_layers.csv, a layer an entry of the lists."""
    case = MODEL | {"level": level, "active_max": [50 * a for a in active], "union": 800.0}
    case |= {"layer": range(len(active)), "active": active} | columns
    return pd.DataFrame(case | {"dense": dense, "sparse": sparse, "auto": auto or sparse})


def part_rows(dense, sparse, **columns):
    """Rows of model_parts.csv for one layer; dense, sparse: part -> ms."""
    sides = zip(COMPILED, (dense, sparse), strict=False)
    parts = [(name, part, ms) for name, side in sides for part, ms in side.items()]
    rows = pd.DataFrame(parts, columns=["provider", "part", "ms"])
    return rows.assign(**MODEL | {"active": 24.0} | columns)


def together(*frames):
    """The frames as one table, in a random order, as nothing may depend on it."""
    return pd.concat(frames, ignore_index=True).sample(frac=1, random_state=SEED % 2**32)


# --- evaluations ------------------------------------------------------------------------------

CHANCE = {task: 0.25 for task in (*analysis.TASKS, analysis.MEAN)}
CHANCE |= {"piqa": 0.5, "winogrande": 0.5, "commonsense_qa": 0.2, "paper7": 0.3143}


def evaluation(name="small", l1=0.0, gain=0.0, tasks=(*analysis.TASKS, analysis.MEAN), **changes):
    """What `twell evaluate` writes, as far as tables read it.

    Each accuracy is chance and `gain`, with an error of 0.01.
    """
    scores = {
        task: {
            "sample_len": 700 if task == "paper7" else 100,
            "acc,none": CHANCE[task] + gain,
            "acc_stderr,none": 0.01,
        }
        for task in tasks
    }
    model = {"name": name, "parameters": 2_000_000, "training_tokens": 10**6, "l1_coefficient": l1}
    model |= {field: changes.pop(field) for field in list(changes) if field in model}
    record = {"model": model, "backend": "dense", "dtype": "float32"}
    record |= {"tasks": {task: {"chance": CHANCE[task]} for task in tasks}}
    record |= {"lm_eval": {"results": scores, "lm_eval_version": "0.4.13"}, "device": "a CPU"}
    return record | {"versions": {"python": "3"}, "commit": "abc", "command": "make"} | changes
