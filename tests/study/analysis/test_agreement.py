"""Findings about activity, in how many models each holds."""

import pandas as pd
import pytest

from study import analysis
from tests.factories.analysis import make_run, make_trace, tables
from twell import results


def layered(name, *means, most=20.0, **config):
    """A run whose layers have these means, and a busiest token of `most` times each."""
    columns = {"active_mean": 1.0, "active_p99": 2.0, "active_max": most, "dead_fraction": 0.0}
    rows = [
        (10, 1000, "valid", layer, metric, factor * mean)
        for layer, mean in enumerate(means)
        for metric, factor in columns.items()
    ]
    log = pd.DataFrame(rows, columns=results.LOG_COLUMNS).astype({"layer": "Int64"})
    shape = {"num_layers": len(means), "activation": "relu", "seed": 0}
    run = make_run(name, 6e-4, 4, 5, (1, 1), **shape | config)[0]
    return run, log.assign(run=name)


def test_what_all_models_share_is_no_accident():
    trace, _ = make_trace(0)
    kept = analysis.kept_activity(trace)
    layers = kept[kept["metric"] == "mean"]
    assert layers["value"].to_numpy() == pytest.approx(analysis.per_layer(trace)["mean"], abs=1e-6)
    first = kept.set_index("metric").loc["first", "value"]
    assert first == pytest.approx(analysis.by_position(trace)["mean_active"][0], abs=1e-6)
    kept = pd.concat([kept.assign(run="m-seed-0"), kept.assign(run="m-seed-1")])
    runs = [layered(f"m-seed-{seed}", 1, 2, 9, 4, seed=seed) for seed in range(3)]
    runs += [layered("low", 5, 9, 3, 4, most=9.0), layered("two", 1, 2)]
    runs += [layered("student", 1, 2, 9, 4, teacher="silu")]
    runs += [layered("silu", 1, 2, 9, 4, activation="silu")]
    table = analysis.findings(*tables(*runs), kept, peak_depth=0.6)
    assert table["run"].tolist() == [f"m-seed-{n}" for n in range(3)] + ["low", "two"]
    assert table["first_two_least"].tolist() == [True] * 3 + [False, None]
    seeds = analysis.shared(table[table["setting"] == "m"]).set_index("finding")
    every = analysis.shared(table).set_index("finding")
    assert seeds.loc["first_two_least"].tolist() == [3, 3, "in all"]
    assert every.loc["first_two_least"].tolist() == [3, 4, "in some"]
    assert every.loc["ten_times"].tolist() == [4, 5, "in some"]
    assert seeds.loc["no_overflow", "models"] == 2  # of those that were traced
