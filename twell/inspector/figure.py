"""The style of all figures, the inspector's colours, and texts on colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Colours of the inspector, light and dark: counts and surprise from the background to strong,
# signed values from blue through the background to orange. Steps of lightness are read without
# seeing colour.
PALETTES = {
    "light": {
        "sequential": "#ffffff #e4f2df #b5e0c6 #7bcac6 #43a9c4 #2a80b4 #27549b #202a68".split(),
        "diverging": (
            "#123e7c #2f74b8 #83b4dd #d3e5f3 #ffffff #fde3c4 #f6ae62 #d96d0f #8f3a05"
        ).split(),
    },
    "dark": {
        "sequential": "#15181d #2b2f56 #34508b #2a788e #22a884 #63cb5f #b8de3b #fde725".split(),
        "diverging": (
            "#a9d3ff #5aa4f0 #2c66ad #1e3a61 #15181d #5b3314 #a85a12 #ee9434 #ffd39b"
        ).split(),
    },
}
PAGE = 6.8  # width of a page of a paper, inches
LINE = 0.17  # height of a line of text, inches
FIXED_WIDTH = ["DejaVu Sans Mono", "DejaVu Sans"]  # the second has scripts that the first lacks
_STYLE = {
    **{"font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8.5},
    **{"xtick.labelsize": 7.5, "ytick.labelsize": 7.5},
    **{"legend.fontsize": 7.5, "legend.title_fontsize": 7.5},
    **{"legend.frameon": False, "legend.handlelength": 1.6},
    **{"axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.4, "grid.color": "0.9"},
    **{"lines.linewidth": 1.3, "pdf.fonttype": 42},
    **{"xtick.major.width": 0.6, "xtick.major.size": 2.5, "xtick.minor.size": 0},
    **{"ytick.major.width": 0.6, "ytick.major.size": 2.5, "ytick.minor.size": 0},
}


def style() -> None:
    """Set the one style of all figures."""
    sns.set_theme("paper", "ticks", "colorblind", "DejaVu Sans", rc=_STYLE)


def plain(*axes: mpl.axis.Axis) -> None:
    """Write few plain numbers at log axes: 1, 2, 5 in each decade, or only 1 of many decades."""
    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def visible(token: str) -> str:
    """Return a token with white space and control characters made visible."""
    seen = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return "".join(seen.get(c, c if c.isprintable() else repr(c)[1:-1]) for c in token)


def typeset(tokens: Iterable[str], columns: int) -> tuple[list[tuple[int, int, str]], int]:
    """Set tokens in lines: x, y and text of each, and the number of lines."""
    places, x, y = [], 0, 0
    for token in map(visible, tokens):
        if x and x + len(token) > columns:
            x, y = 0, y + 1
        places.append((x, y, token))
        x = 0 if token.endswith("⏎") else x + len(token)
        y += token.endswith("⏎")
    return places, places[-1][1] + 1


def write_tokens(
    ax: Axes, places: list, lines: int, colours: Sequence[tuple], columns: int
) -> None:
    """Write tokens on their colours."""
    points = 72 * (PAGE - 0.15) / columns / 0.602  # DejaVu Sans Mono advances by 0.602 of its size
    look = {"family": FIXED_WIDTH, "fontsize": points, "va": "center", "parse_math": False}
    for (x, y, token), colour in zip(places, colours, strict=True):
        ax.add_patch(Rectangle((x, y), len(token), 0.94, facecolor=colour, linewidth=0))
        ink = "white" if np.dot(colour[:3], (0.3, 0.59, 0.11)) < 0.5 else "black"
        ax.text(x, y + 0.5, token.replace("␣", " "), color=ink, **look)
    ax.set(xlim=(0, columns), ylim=(lines, 0))
    ax.axis("off")


def text_scale(
    figure, ax: Axes, norm: Normalize, colours, location: str, label: str, extend: str = "neither"
) -> Colorbar:
    """The colour bar of a text, above or below it; extend: at which ends values go on."""
    look = {"location": location, "aspect": 60, "shrink": 0.6, "pad": 0.02, "extend": extend}
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=ax, **look)
    bar.set_label(label)
    bar.outline.set_linewidth(0.4)
    if isinstance(norm, LogNorm):
        plain(bar.ax.xaxis)
    return bar


def inspector_colours() -> LinearSegmentedColormap:
    """The inspector's colours of counts."""
    return LinearSegmentedColormap.from_list("twell", PALETTES["light"]["sequential"])
