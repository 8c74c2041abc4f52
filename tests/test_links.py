"""Keys, links and explanations of the inspector, in a browser."""

import numpy as np

from tests.browser import IN_BROWSER, drag, go_to, neurons, settle, state, texts
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace
from twell.inspector import Side

pytestmark = IN_BROWSER


def test_keys_and_pointer(open_page):
    passage, mask = make_trace(SEED, num_tokens=40, context=40)
    page = open_page([Side("random", passage)])
    # Keys work before anything has the focus, and wherever it is, unless a control needs them.
    page.keyboard.press("ArrowRight")
    assert state(page) == "token=0"
    page.locator(".tw-t").nth(5).click()
    assert state(page) == "token=5"
    focus = [".tw-text", ".tw-canvas", ".tw-layer-name", ".tw-copy", "input[type=checkbox]"]
    for number, (key, expected) in enumerate(
        [
            ("ArrowRight", "token=6"),
            ("ArrowDown", "token=6&layer=0"),
            ("ArrowDown", "token=6&layer=1"),
            ("ArrowUp", "token=6&layer=0"),
            ("End", "token=39&layer=0"),
            ("ArrowRight", "token=39&layer=0"),
            ("Home", "token=0&layer=0"),
            ("Control+ArrowRight", "token=0&layer=0"),
        ]
    ):
        page.locator(focus[number % len(focus)]).first.focus()
        page.keyboard.press(key)
        assert state(page) == expected, key
    page.get_by_label("end of the colour scale", exact=True).focus()
    page.keyboard.press("End")
    assert "token=0" in state(page)
    layer, token = np.argwhere(mask.sum(-1) > 1)[-1].tolist()
    go_to(page, f"token={token}&layer={layer}")
    strongest = neurons(page)[0]
    page.locator(".tw-text").press("Enter")
    chosen = f"token={token}&layer={layer}&neuron={strongest}&colour=neuron&scale=neuron"
    assert state(page) == chosen
    for expected in (f"token={token}&layer={layer}", f"layer={layer}", ""):
        page.locator(".tw-text").press("Escape")
        assert state(page) == expected
    # Hovering peeks and leaves no trace; the map tells which layer.
    page.locator(".tw-t").nth(7).hover()
    page.wait_for_selector(".tw-card.tw-peek")
    assert state(page) == ""
    box = page.locator(".tw-canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 10.5 / 40, box["y"] + (box["height"] - 13) / 2)
    title = page.get_attribute(".tw-canvas", "title")
    assert "token 10:" in title and f"active in layer 1: {mask[1, 10].sum()}" in title
    assert state(page) == "token=10&layer=1"
    # Question marks explain the label before them.
    page.locator(".tw-group", has_text="Overflow").locator(".tw-help").press("Space")
    page.locator(".tw-tip:popover-open").wait_for()


def view(page):
    """What the controls, the scales and the list of found neurons show."""
    settle(page)
    controls = page.eval_on_selector_all(
        ".tw-bar :is(select, input)",
        "(nodes) => nodes.map((node) => [node.ariaLabel, node.value, node.checked].join())",
    )
    shown = [texts(page, names) for names in (".tw-ticks", "button.tw-hit", "[role=status]")]
    counts = [page.locator(one).count() for one in ("[aria-selected]", ".tw-brush:not([hidden])")]
    return controls, shown, counts


def test_links_hold_the_whole_state_and_the_search(open_page):
    begin = {"token": 3, "layer": 1, "neuron": 5, "colour": "neuron", "scale": "neuron"}
    passage = make_trace(SEED, num_tokens=300)[0]
    page = open_page([Side("random", passage, aggregate_of(passage))], begin)
    assert state(page) == ""
    first = view(page)
    page.get_by_label("last layer").select_option("1")
    page.get_by_label("mark overflow").select_option("C = 16")
    page.get_by_label("without first tokens").uncheck()
    page.get_by_label("colour scale", exact=True).select_option("the same for all")
    page.get_by_label("end of the colour scale").fill("7.5")
    page.keyboard.press("Tab")
    page.locator(".tw-token .tw-close").click()
    address = "token=none&scale=all&limit=7.5&layers=0-1&skip_first=no&compression=16"
    assert state(page) == address
    page.locator("summary").click()
    page.get_by_label("where").select_option("text around")
    page.get_by_label("words to find").fill("5")
    page.get_by_label("layer", exact=True).last.select_option("layer 1")
    page.get_by_label("state").select_option("all")
    page.get_by_label("sort", exact=True).select_option("fires")
    page.locator("[role=status]", has_text="of 900 neurons").wait_for()
    drag(page, (0.7, 0.1), (0.99, 0.85))
    page.get_by_text("clear brush").wait_for()
    words, _, box = state(page).removeprefix(f"{address}&").partition("&box=")
    assert words == "words=5&where=around&within=1&state=all&sort=rate"
    assert box.count("~") == 3 and box.endswith("&finding=yes")

    expected = view(page)
    assert expected[2] == [0, 1] and len(expected[1][1]) > 3
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("copy link").click()
    page.get_by_text("copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    page.goto("about:blank")
    page.goto(link)
    page.locator("button.tw-hit").first.wait_for()
    assert view(page) == expected
    go_to(page, "")  # an edit of the address counts at once
    assert view(page)[0][:6] == first[0][:6] and page.locator("[aria-selected]").count() == 1
