"""What all figures share: a style, colours, notes, legends and axes, and `Keep`, which saves them.

Every figure is built without pyplot. The same inputs give the same bytes.
"""

import io
import re
from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.textpath import text_to_path
from PIL import Image, ImageChops

from twell import results
from twell.inspector.figure import plain, style  # noqa: F401 (figures take it from here)

_DPI = 200
_SHADES = 8192  # of a line drawing at most, smoothed edges included
_NEAR = 12  # of 255: shades that look alike
COLUMN, PAGE = 3.3, 5.6  # widths in inches; a page is read at half of its width, too
_FONTS = {"font.size": 9, "axes.labelsize": 9, "axes.titlesize": 9, "legend.fontsize": 8.5}
_FONTS |= {"xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.title_fontsize": 8.5}
SMALL = 7.5  # letters of notes; none are smaller
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, *_, CYAN = sns.color_palette("colorblind", 10)
# One meaning, one colour, in all figures: the authors' numbers and their release are black. Numbers
# in FP8 are darker (`in_fp8`), levels of L1 have the map of `level_colours`.
OURS = SPARSE = BLUE  # also the union path, which "sparse" is for many tokens
PAPER, DENSE, AUTO = "black", "0.6", ORANGE
TWELL = ROWWISE = GREEN
DECODE, HYBRID, ELL = CYAN, RED, PURPLE
# Of text over lines.
HALO = {"path_effects": [withStroke(linewidth=1.5, foreground="white")], "zorder": 5}
ACTIVE_FLOOR = 0.01  # log axes show fewer active neurons, zero included, at this height
_LOWEST_LEVEL, _HIGHEST_LEVEL = 1e-5, 5e-3  # of L1; the map of its colours ends there


def empty(width: float, height: float) -> Figure:
    """A figure in the style, without axes."""
    style()
    mpl.rcParams.update(_FONTS)
    return Figure(figsize=(width, height), layout="constrained")


def subplots(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """A figure in the style with its axes, [rows, columns]."""
    figure = empty(width, height)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure in the style with one pair of axes."""
    figure, axes = subplots(width, height)
    return figure, axes[0, 0]


def one_case(table: pd.DataFrame, columns: Sequence[str], what: str) -> tuple:
    """The one value of each column. Raises ValueError where there are several, or none."""
    cases = table[[*columns]].drop_duplicates()
    if len(cases) != 1:
        raise ValueError(f"this figure shows one {what}; this table has {len(cases)}")
    return tuple(cases.iloc[0])


def shade(place: float) -> tuple:
    """The colour of a place from 0 (hardly sparse) to 1 (very sparse) in the one sequential map."""
    return tuple(sns.color_palette("flare", as_cmap=True)(float(np.clip(place, 0, 1))))


def level_colours(levels: Iterable[float]) -> dict[float, tuple | str]:
    """A colour for each level of L1, the same in all figures: grey for 0, then light to dark."""
    span = np.log(_HIGHEST_LEVEL / _LOWEST_LEVEL)
    colours = {level: shade(np.log(level / _LOWEST_LEVEL) / span) for level in {*levels} - {0}}
    return {0: DENSE} | dict(sorted(colours.items()))


def in_fp8(color: str | tuple) -> tuple:
    """The darker shade of a colour that stands for the same in FP8."""
    return tuple(0.5 * channel for channel in mpl.colors.to_rgb(color))


SIDES = {"dense": DENSE, "sparse": SPARSE}  # of `analysis.fastest`, and their colours
SIDES |= {f"{side} FP8": in_fp8(colour) for side, colour in SIDES.items()}


def note(ax: Axes, text: str, at: tuple, offset: tuple = (0, 0), **look) -> Annotation:
    """Write a note in small letters, `offset` points away from a place."""
    return ax.annotate(text, at, offset, textcoords="offset points", **{"fontsize": SMALL} | look)


def named(ax: Axes) -> dict[str, Artist]:
    """What is labelled in a panel, by its label."""
    handles, names = ax.get_legend_handles_labels()
    return dict(zip(names, handles, strict=True))


def change(percent: float, digits: int = 0) -> str:
    """A signed change in %, with a minus as long as the plus, and no minus before 0."""
    return f"{round(percent, digits) + 0:+.{digits}f}%".replace("-", "−")


def _wrapped(text: str, size: float, width: float) -> list[str]:
    """Lines of a text, each at most so many points wide."""
    font, lines = FontProperties(size=size), []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        wide, _, _ = text_to_path.get_text_width_height_descent(longer, font, False)
        lines[-1:] = [longer] if wide <= width or not lines else [lines[-1], word]
    return lines


def model_name(model: str) -> str:
    """Return a model's name, as the paper writes its sizes: 1.5B."""
    return model.upper() if re.fullmatch(r"[\d.]+b", model) else model


def number_range(numbers: pd.Series) -> str:
    """One number, or the least and the most."""
    low, high = numbers.min(), numbers.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def sentence(about: str) -> str:
    """What a figure is about, as a sentence of its caption, or nothing."""
    return about and f"{about}."


def caption(figure: Figure, *sentences: str) -> None:
    """Note in `figure.caption` what a figure needs to be read alone, without empty sentences."""
    figure.caption = " ".join(sentence for sentence in sentences if sentence)


def draw_title(figure: Figure, title: str, conditions: str = "") -> None:
    """Write a message above a figure, and below it, smaller, what all panels share."""
    width, height = 72 * figure.get_size_inches()  # points
    lines = [(line, 10, "bold") for line in _wrapped(title, 11.6, width)]  # bold letters are wider
    lines += [(line, SMALL, "normal") for line in _wrapped(conditions, SMALL, 0.93 * width) if line]
    figure.title_room = room = 1.3 * sum(size for _, size, _ in lines) + 4
    figure.set_figheight((height + room) / 72)
    figure.get_layout_engine().set(rect=(0, 0, 1, height / (height + room)))
    y = height + room - 2
    for line, size, weight in lines:
        look = {"fontsize": size, "fontweight": weight, "va": "top", "parse_math": False}
        figure.text(0.01, y / (height + room), line, **look)
        y -= 1.3 * size


def draw_caption(figure: Figure) -> None:
    """Write the caption below a finished figure, which grows by that."""
    width, height = figure.get_size_inches()
    size, margin = SMALL, 4  # points
    text = figure.caption.replace(" = ", "\u00a0=\u00a0")  # no line breaks there
    lines = _wrapped(text, size, 0.95 * (72 * width - 2 * margin))  # letters differ by resolution
    room = (1.3 * size * len(lines) + 2 * margin) / 72
    share, above = room / (height + room), getattr(figure, "title_room", 0) / 72 / (height + room)
    figure.set_size_inches(width, height + room)
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share - above))
    for legend in figure.legends:
        if legend._outside_loc == "lower":  # between panels and caption
            legend.borderaxespad += 72 * room / legend.get_texts()[0].get_fontsize()
    place = margin / 72 / width, margin / 72 / (height + room)
    look = {"fontsize": size, "color": "0.25", "va": "bottom", "linespacing": 1.3}
    figure.text(*place, "\n".join(lines), parse_math=False, **look)


def legend(figure: Figure, where: str, entries: dict[str, Artist] | None = None, **options):
    """A legend beside the panels, of the first one unless entries are given."""
    entries = named(figure.axes[0]) if entries is None else entries
    figure.legend(entries.values(), entries.keys(), loc=f"outside {where}", **options)


def row_names(ax: Axes, y: Iterable[float], names: Iterable[str]) -> None:
    """Name horizontal bars or rows of points, the first on top. Names may be any text."""
    ax.set_yticks(y, names)
    for name in ax.get_yticklabels():
        name.set_parse_math(False)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)


def measured(calls: str = "calls", mark: str = "point", whiskers: str = "bars") -> str:
    """Return the sentence of a caption on repeats."""
    spread = f"{whiskers} span p20 to p80 of the {calls} of both sides"
    return f"Each {mark} is one measurement, the median of its timed {calls}; {spread}."


def bars(ax: Axes, x, y, low, high, color: str | tuple, **look) -> None:
    """Error bars to known ends, where there are any."""
    known = np.isfinite(low) & np.isfinite(high)
    if known.any():
        x, y, low, high = (np.asarray(values)[known] for values in (x, y, low, high))
        ends = np.clip([y - low, high - y], 0, None)
        look = {"fmt": "none", "elinewidth": 0.9, "capsize": 1.5, "capthick": 0.9} | look
        ax.errorbar(x, y, ends, ecolor=color, **look)


def png(figure: Figure, dpi: int = _DPI) -> bytes:
    """A figure as PNG with 256 colours, a third of the size; with all where these would differ."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    drawn = Image.open(buffer).convert("RGB")
    if drawn.getcolors(_SHADES) is not None:
        drawn = drawn.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    else:
        few = drawn.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        apart = ImageChops.difference(drawn, few.convert("RGB")).getextrema()
        drawn = few if max(most for _, most in apart) <= _NEAR else drawn
    buffer = io.BytesIO()
    drawn.save(buffer, "png", optimize=True, dpi=(dpi, dpi))
    return buffer.getvalue()


class Keep:
    """Saves the figures of a notebook in a folder, or nowhere.

    folder: below the repository's root, None to save nothing. titles: whether figures have their
    message above, which is of recorded data. A call saves the picture and returns the figure with
    its caption, which the notebook then shows and a reader can change; its label is its name.
    """

    def __init__(self, folder: str | None, *, titles: bool = True) -> None:
        self.folder, self.titles = folder, titles

    def __call__(self, figure: Figure | None, name: str, title: str = "") -> Figure | str:
        """Save the figure under `name`; None returns the sentence that nothing is recorded."""
        if figure is None:
            return f"{name} is not drawn: nothing is recorded for it here."
        figure.set_label(name)
        if title and self.titles:
            draw_title(figure, title, getattr(figure, "conditions", ""))
        if self.folder is not None:
            results.write_atomically(results.root() / self.folder / f"{name}.png", png(figure))
        if getattr(figure, "caption", ""):
            draw_caption(figure)
        return figure
