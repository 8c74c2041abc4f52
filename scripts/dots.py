"""Write a font whose only glyph is a space with a dot in it: scripts/dots.py

Thousands of background images would draw the dots, too, at ten milliseconds for each repaint.
"""

from __future__ import annotations

import base64
import io

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from twell import results
from twell.inspector.pages import FOLDER

WIDTH, HEIGHT, RADIUS = 278, 300, 47  # of a space, of the dot above the line; thousandths of an em
# The browser takes the height of a line from the font that has the space.
ASCENT, DESCENT = 930, -240
RULE = """/* A space with a dot in it, faint as it is small; written by scripts/dots.py. */

@font-face {{
  font-family: "twell dots";
  src: url("data:font/ttf;base64,{}");
  unicode-range: U+20;
}}
"""


def dot():
    """Return a glyph: four arcs, each by the corner of the square around them."""
    pen = TTGlyphPen(None)
    middle, r = WIDTH // 2, RADIUS
    pen.moveTo((middle - r, HEIGHT))
    for corner, end in [
        ((-1, 1), (0, 1)),
        ((1, 1), (1, 0)),
        ((1, -1), (0, -1)),
        ((-1, -1), (-1, 0)),
    ]:
        pen.qCurveTo(*((middle + r * x, HEIGHT + r * y) for x, y in (corner, end)))
    pen.closePath()
    return pen.glyph()


def font() -> bytes:
    """Return the font as TrueType."""
    build = FontBuilder(1000, isTTF=True)
    build.setupGlyphOrder([".notdef", "space"])
    build.setupCharacterMap({ord(" "): "space"})
    build.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "space": dot()})
    build.setupHorizontalMetrics({".notdef": (WIDTH, 0), "space": (WIDTH, WIDTH // 2 - RADIUS)})
    build.setupHorizontalHeader(ascent=ASCENT, descent=DESCENT)
    build.setupNameTable({})
    build.setupOS2()
    build.setupPost(keepGlyphNames=False)
    build.updateHead(created=0, modified=0)
    build.font.recalcTimestamp = False
    file = io.BytesIO()
    build.save(file)
    return file.getvalue()


if __name__ == "__main__":
    rule = RULE.format(base64.b64encode(font()).decode())
    results.write_atomically(FOLDER / "dots.css", rule)
