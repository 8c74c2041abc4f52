"""Made-up traces, runs, measured rows and evaluations, as study.analysis reads them."""

import numpy as np
import pandas as pd

from tests.factories import SEED
from tests.factories.trace import dense, random_activity

# --- traces -----------------------------------------------------------------------------------


def make_trace(seed, num_tokens=60, num_layers=3, intermediate_size=300, context=16):
    """A random trace of few different tokens, with values of 0, and its mask [L, T, N]."""
    lengths = [min(context, num_tokens - start) for start in range(0, num_tokens, context)]
    options = {"vocab_size": 12, "odd": (0.0,)}
    trace = random_activity(seed, lengths, num_layers, intermediate_size, **options)
    return trace, dense(trace)[0]


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
    own = {"run": name, "l1_coefficient": l1, "seed": 0, "complete": complete}
    return SHAPE | own | config, log


def tables(*runs):
    """The configurations and the log of runs, as `results.load_runs` returns them."""
    rows, logs = zip(*runs, strict=True)
    return pd.DataFrame(rows), pd.concat(logs, ignore_index=True)


DENSE = make_run("dense", 0.0, 4.0, 5.0, (30, 20))
GOOD = make_run("good", 1e-3, 4.04, 5.0, (3, 1), (0.2, 0.4), window=(0.1, 0.3, 0.5))
UNUSED = make_run("unused", 1e-2, 4.4, 4.41, (1, 1))
UNFINISHED = make_run("unfinished", 5e-4, 4.0, 5.0, (1, 1), complete=False)


# --- measured rows ----------------------------------------------------------------------------

BASE = "dense torch.compile"
CALL = {"device": "NVIDIA H200", "commit": "a" * 40, "date": "2026-11-22T10:00:00+00:00"}


def speed_rows(tokens, active, times, **columns):
    """Rows of ffn.csv, as one call leaves them for one case; times: provider -> ms."""
    case = {"tokens": tokens, "hidden_size": 2048, "intermediate_size": 5632, "gated": True}
    case |= {"dtype": "bfloat16", "pattern": "skewed", "active": active, "mode": "stream"}
    case |= {"weight_sets": 1, "energy": np.nan, "command": "python -m twell measure ffn"}
    paths = [name.removeprefix("triton ").removesuffix(" FP8") for name in times]
    own = {"path": paths, "provider": list(times), "p50": list(times.values())}
    return pd.DataFrame(case | CALL | columns | own)


def together(*frames):
    """The frames as one table, in a random order, as nothing may depend on it."""
    return pd.concat(frames, ignore_index=True).sample(frac=1, random_state=SEED % 2**32)
