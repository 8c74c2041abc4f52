"""What a figure shows, as plain data.

`python -m tests.plots.drawn` writes drawn.yaml again; read its changes.
"""

import warnings
from pathlib import Path

import numpy as np
import yaml
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from tests.factories.plots import CASES
from twell import plots

RECORDED = Path(__file__).with_name("drawn.yaml")


def draw(case):
    """The rendered figure of a case.

    What cannot be drawn (mathematics in a token, a log axis of zeros) raises or warns, which fails.
    """
    name, arguments = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = getattr(plots, name)(*arguments())
        figure.draw_without_rendering()  # the canvas of a figure without pyplot draws nothing
    return figure


def numbers(values):
    """Rounded; cells that are masked as nan."""
    values = np.ma.filled(np.ma.asarray(values, float), np.nan)
    return np.char.mod("%.5g", values.round(9) + 0.0).tolist()


def texts(artists):
    return [artist.get_text() for artist in artists]


def line(artist):
    look = f"{artist.get_linestyle()} {artist.get_marker()} {to_hex(artist.get_color())}"
    look += f" {artist.get_linewidth():g} {artist.get_markersize():g}"
    return [look, *map(numbers, artist.get_xydata().T)]


def bar(patch):
    return [to_hex(patch.get_facecolor()), *numbers(patch.get_bbox().bounds)]


def marks(collection):
    """Points of a scatter plot, with their colours and corners; ends of bars; corners of a band."""
    if isinstance(collection, QuadMesh):
        return ["a scale of colours"]
    if not isinstance(collection, PathCollection):
        return [numbers(path.vertices) for path in collection.get_paths()]
    corners, colours = len(collection.get_paths()[0]), collection.get_facecolors()
    size, points = collection.get_sizes().tolist(), numbers(collection.get_offsets())
    return [corners, *size, [*map(to_hex, colours)], points]


def text(artist):
    """A text, its size and place; of an annotation also the offset from it."""
    place = artist.get_position()
    place = [*artist.xy, *place] if isinstance(artist, Annotation) else place
    return [artist.get_text(), *numbers([artist.get_fontsize(), *place])]


def legend(shown):
    return texts([shown.get_title(), *shown.get_texts()])


def has_grid(axis):
    return any(line.get_visible() for line in axis.get_gridlines())


def panel(ax):
    titles = [ax.get_title(loc=place) for place in ("left", "center")]
    shown = {
        "titles": [*titles, ax.get_xlabel(), ax.get_ylabel()],
        "scales": [ax.get_xscale(), ax.get_yscale()],
        "grid": [has_grid(axis) for axis in (ax.xaxis, ax.yaxis)],
        "limits": numbers([ax.get_xlim(), ax.get_ylim()]),
        "ticks": [texts(axis.get_ticklabels()) for axis in (ax.xaxis, ax.yaxis)],
        "lines": [line(artist) for artist in ax.get_lines()],
        "bars": [bar(patch) for patch in ax.patches if isinstance(patch, Rectangle)],
        "marks": [marks(collection) for collection in ax.collections],
        "texts": [text(artist) for artist in ax.texts],
        "images": [[*image.get_clim(), numbers(image.get_array())] for image in ax.images],
        "legend": ax.get_legend() and legend(ax.get_legend()),
    }
    return {name: value for name, value in shown.items() if value}


def drawn(figure):
    parts = [figure, *figure.subfigs]
    return {
        "title": figure.get_suptitle(),
        "size": numbers(figure.get_size_inches()),
        "caption": texts(figure.texts),
        "legends": [legend(shown) for part in parts for shown in part.legends],
        "panels": [panel(ax) for ax in figure.axes],
    }


if __name__ == "__main__":
    recorded = {case: drawn(draw(case)) for case in CASES}
    options = {"allow_unicode": True, "sort_keys": False, "default_flow_style": None}
    RECORDED.write_text(yaml.safe_dump(recorded, width=100, **options), encoding="utf-8")
