"""No text lies on another, and none leaves the canvas."""

from itertools import combinations

import pytest
from matplotlib.text import Text

from tests.factories.plots import CASES, draw

DPI = 200  # as figures are saved: letters are a little wider at 100
SLACK = 3  # pixels by which boxes, which are larger than their letters, may overlap


def not_drawn(ax):
    """Labels of ticks beyond the limits of a panel, and all labels of one without axes."""
    for axis in (ax.xaxis, ax.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        drawn = [tick for tick in ticks if ax.axison and low <= tick.get_loc() <= high]
        # An axis keeps ticks that it no longer places.
        for tick in {*axis.majorTicks, *axis.minorTicks} - {*drawn}:
            yield from (tick.label1, tick.label2)
        if not ax.axison:
            yield from (axis.label, axis.offsetText)


def written(figure):
    """Texts of a drawn figure, with the box of each in pixels."""
    hidden = {id(text) for ax in figure.axes for text in not_drawn(ax)}
    texts = [text for text in figure.findobj(Text) if id(text) not in hidden]
    texts = [text for text in texts if text.get_visible() and text.get_text().strip()]
    return [(" ".join(text.get_text().split()), text.get_window_extent()) for text in texts]


def overlap(one, other):
    """How far two boxes reach into each other, in the direction in which that is less."""
    return min(
        min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
    )


@pytest.mark.parametrize("case", CASES)
def test_texts_stay_apart_and_on_the_canvas(case):
    figure = draw(case)
    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    boxes, canvas = written(figure), figure.bbox
    over = [
        f"{one!r} lies on {other!r}"
        for (one, box), (other, second) in combinations(boxes, 2)
        if overlap(box, second) > SLACK
    ]
    outside = [
        f"{text!r} leaves the canvas"
        for text, box in boxes
        if box.x0 < -SLACK or box.y0 < -SLACK
        or box.x1 > canvas.x1 + SLACK or box.y1 > canvas.y1 + SLACK
    ]  # fmt: skip
    assert not over + outside
