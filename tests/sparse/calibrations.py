"""Calibrations that the tests of calibration and plan share."""

import random

from twell.sparse.calibration import DEPENDS_ON, Calibration

ABOUT = {
    "device": "a device",
    "hidden_size": 32,
    "intermediate_size": 1000,
    "gated": True,
    "dtype": "bfloat16",
    "versions": "torch 2",
    "date": "2026-01-01",
}

PATHS = tuple(DEPENDS_ON)


def calibration(rows, **changes):
    """From rows (tokens, active, union, path, ms)."""
    keys = ("tokens", "active", "union", "path", "p50")
    return Calibration.fit([dict(zip(keys, row, strict=True)) for row in rows], **ABOUT | changes)


def random_rows(tokens=(1, 8, 64, 4096)):
    """A full grid of cases with random times: {(tokens, active): (union, {path: ms})}."""
    levels = sorted(random.sample(range(1, 999), 4)) + [1000]
    return {
        (m, active): (min(1000.0, active * 1.7), {path: random.uniform(0.1, 2) for path in PATHS})
        for m in tokens
        for active in levels
    }


def from_grid(grid, **changes):
    rows = [
        (m, active, union, path, time)
        for (m, active), (union, times) in grid.items()
        for path, time in times.items()
    ]
    random.shuffle(rows)
    return calibration(rows, **changes)


def threshold(crossing=100.0, **changes):
    """Union wins below a union of `crossing` neurons from 33 tokens on, decode below."""
    rows = []
    for m in (1, 32, 33, 4096):
        sparse = "decode" if m <= 32 else "union"
        rows += [(m, 1000, 1000, "dense", 1.0), (m, 0, 0, sparse, 0.5)]
        rows += [
            (m, 1, crossing, sparse, 0.96),
            (m, 1, crossing + 1e-6, sparse, 1.5),
            (m, 1000, 1000, sparse, 9.0),
        ]
    return calibration(rows, **changes)
