"""Draw figures/inspector.png for docs/inspector.md: python -m scripts.screenshot MODEL"""

import io
import sys

from PIL import Image

from tests.browser import chromium
from twell import inspector, results

PASSAGE = (
    "Fellow citizens of the Senate and House of Representatives: I have the honor to report that "
    "the relations of the United States with foreign nations continue to be peaceful, and that the "
    "public debt has been reduced by $1,234,567 since the last session of Congress. In 1862 the "
    "revenue was $51,935,720, and in the year ending June 30, 1863, it was $112,697,290.\n"
    "The Secretary of the Treasury will lay before you a statement of the receipts and "
    "expenditures of the Government for the year. It is believed that the revenue derived from "
    "customs, from the sales of public lands, and from other sources will be sufficient to defray "
    "the expenses of the Government.\n"
    "America is strong tonight because our people are free. We will never waver, we will never "
    "tire, we will never fail."
)

# The address of a page that asks for the neuron of numbers.
QUESTION = "finding=yes&where=selected&selected=digits&layer=1&neuron=587&colour=neuron"


def main(model: str) -> None:
    sides = inspector.sides(model, PASSAGE)
    inspector.silence_each(sides[0], 200)
    path = results.root() / "build" / "inspector.html"
    results.write_atomically(path, inspector.page(sides))
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1180, "height": 880}, color_scheme="light")
        tab.goto(f"{path.as_uri()}#{QUESTION}")
        tab.wait_for_selector(".tw-card")
        tab.wait_for_timeout(2000)  # every chunk is there
        image = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(results.root() / "figures" / "inspector.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
