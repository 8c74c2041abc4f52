"""Draw figures/inspector.png, the picture of the inspector: python -m scripts.screenshot MODEL"""

import sys

from PIL import Image

from tests.browser import chromium
from twell import inspector, results

PASSAGE = (
    "Fellow citizens of the Senate and House of Representatives: I have the honor to report that "
    "the relations of the United States with foreign nations continue to be peaceful, and that the "
    "public debt has been reduced by $1,234,567 since the last session of Congress.\n"
    "The Secretary of the Treasury will lay before you a statement of the receipts and "
    "expenditures of the Government for the year. It is believed that the revenue derived from "
    "customs, from the sales of public lands, and from other sources will be sufficient to defray "
    "the expenses of the Government.\n"
    "America is strong tonight because our people are free. We will never waver, we will never "
    "tire, we will never fail."
)


def main(model: str) -> None:
    shown = inspector.sides(model, PASSAGE)
    presets = {preset["name"]: preset["view"] for preset in inspector.presets(shown[0])}
    view = inspector.VIEW | presets["Busiest token"] | {"layer": shown[0].shape[0] - 1}
    view["neuron"] = int(inspector.entries(shown, view)["neuron"][0])
    page = results.root() / "build" / "inspector.html"
    results.write_atomically(page, inspector.page(shown, view))
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_selector(".tw-both-words")
        picture = results.root() / "figures" / "inspector.png"
        tab.screenshot(path=picture, full_page=True)
    with Image.open(picture) as image:  # a third of the bytes
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
