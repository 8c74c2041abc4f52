"""Draw figures/inspector.png and .gif, the inspector at work: python -m scripts.screenshot MODEL"""

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


# The questions of docs/inspector.md, as addresses of a page.
ASKED = "finding=yes&where=selected"
QUESTIONS = (
    f"{ASKED}&selected=digits",
    f"{ASKED}&selected=digits&layer=1&neuron=587&colour=neuron",
    f"{ASKED}&selected=sentence%20start&over=examples&layer=0&neuron=357&colour=neuron",
)
SEEN = {"difference": True, "colour": "surprise"}
SILENCED = [{"layer": 1, "neuron": neuron, "scale": 0} for neuron in (19, 587)]


def main(model: str) -> None:
    sides = inspector.sides(model, PASSAGE)
    changed = [sides[0], sides[0].changed(SILENCED)]
    pages = [inspector.page(sides)] * len(QUESTIONS) + [inspector.page(changed, SEEN)]
    frames = []
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 760}, color_scheme="light")
        for html, address in zip(pages, (*QUESTIONS, QUESTIONS[0]), strict=True):
            path = results.root() / "build" / f"inspector{len(frames)}.html"
            results.write_atomically(path, html)
            tab.goto(f"{path.as_uri()}#{address}")
            tab.wait_for_selector(".tw-hit")
            tab.wait_for_timeout(2000)  # every chunk is there
            image = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            frames.append(image.quantize(128, dither=Image.Dither.NONE))  # a third of the bytes
    frames[1].save(results.root() / "figures" / "inspector.png", optimize=True)
    rest = {"save_all": True, "append_images": frames[1:], "duration": 4000, "loop": 0}
    frames[0].save(results.root() / "figures" / "inspector.gif", **rest)


if __name__ == "__main__":
    main(sys.argv[1])
