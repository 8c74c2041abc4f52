"""What all figures share: the style, sizes and colours, levels of L1, plain log axes, and `save`, which writes a figure.

Every figure is built without pyplot, in one style, and saved so that the same inputs give the same bytes; a JSON beside it
says what it was drawn from.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from twell import results

_DPI = 200
_SHADES = 8192  # of a line drawing at most, smoothed edges included
COLUMN, PAGE = 3.35, 6.8  # widths in a two-column paper, inches
BLUE, ORANGE, GREEN, RED, PURPLE = sns.color_palette("colorblind", 5)
ACTIVE_FLOOR = 0.01  # log axes of active neurons show anything below, zero included, at this height
DRAWN_WITH = (
    "matplotlib",
    "numpy",
    "pandas",
)  # only these: tracked figures must not change with the torch build
# What a figure depends on beside its inputs: the commit in its JSON is the last one that changed these.
MODULES = [Path(__file__).parents[1] / name for name in ("analysis", "sparse/formats.py", "plots")]


def style() -> None:
    """Set the one style of all figures: matplotlib's own fonts, 8 pt, thin lines, fonts embedded as text."""
    sns.set_theme(context="paper", style="ticks", palette="colorblind", font="DejaVu Sans")
    mpl.rcParams.update(
        {
            "font.size": 8,
            "axes.labelsize": 8,
            "axes.titlesize": 8.5,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "legend.fontsize": 7.5,
            "legend.title_fontsize": 7.5,
            "legend.frameon": False,
            "legend.handlelength": 1.6,
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.linewidth": 0.4,
            "grid.color": "0.9",
            "lines.linewidth": 1.3,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "pdf.fonttype": 42,
        }
    )


def _figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options
) -> tuple[Figure, np.ndarray]:
    """A figure in the style with its axes, [rows, columns]."""
    style()
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _level_colours(levels: Iterable[float]) -> dict[float, tuple]:
    levels = sorted(set(levels) - {0})
    scale = mpl.colormaps["viridis"](np.linspace(0.12, 0.88, len(levels)))
    return {0: "black"} | dict(zip(levels, map(tuple, scale), strict=True))


def _plain(axis: mpl.axis.Axis) -> None:
    """Write a log axis' ticks as few plain numbers: 1, 2, 5 in each decade, or only 1 when it spans many."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _in_few_colours(picture: io.BytesIO) -> io.BytesIO:
    """The same PNG with a palette of 256 colours, a third of the size; itself where it has shades that would merge."""
    drawn = Image.open(picture).convert("RGB")
    if drawn.getcolors(_SHADES) is None:
        return picture
    buffer = io.BytesIO()
    drawn.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        buffer, "png", optimize=True, dpi=(_DPI, _DPI)
    )
    return buffer


def save(
    figure: Figure,
    path: str | Path,
    inputs: Sequence[Path],
    parameters: dict,
    source: str,
    device: str | None = None,
) -> Path:
    """Write a figure as PNG (200 dpi) and PDF with a JSON beside it, and return the path of the PNG.

    path: without suffix. inputs: the files that the numbers came from. source: where they came from: "live"
    (measured by this run), "recorded" (kept in data/) or "paper"; device: on what they were measured. The
    same inputs give the same bytes. Each file appears whole or not at all. Raises ValueError for another
    source.
    """
    if source not in ("live", "recorded", "paper"):
        raise ValueError(f"source is {source!r}; use 'live', 'recorded' or 'paper'")
    path = Path(path)
    without_dates = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    for suffix, metadata in without_dates.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata)
        if suffix == "png":
            buffer = _in_few_colours(buffer)
        results.write_atomically(path.with_name(f"{path.name}.{suffix}"), buffer.getvalue())
    origin = {
        "source": source,
        "device": device,
        "inputs": {
            os.path.relpath(file, results.root()): results.file_hash(file) for file in inputs
        },
        "parameters": parameters,
        "commit": results.source_commit(MODULES),
        "versions": {
            name: version for name, version in results.versions().items() if name in DRAWN_WITH
        },
    }
    results.write_atomically(
        path.with_name(f"{path.name}.json"), json.dumps(origin, indent=2) + "\n"
    )
    return path.with_name(f"{path.name}.png")
