"""Keys, links and labels of the inspector, in a browser. Screenshots go to build/screenshots."""

import numpy as np

from tests.browser import IN_BROWSER, click, go_to, keep, neurons, overlaps, settle, state, texts
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
            ("ArrowLeft", "token=5&layer=0"),
            ("End", "token=39&layer=0"),
            ("ArrowRight", "token=39&layer=0"),
            ("Home", "token=0&layer=0"),
            ("Control+ArrowRight", "token=0&layer=0"),
        ]
    ):
        page.locator(focus[number % len(focus)]).first.focus()
        page.keyboard.press(key)
        assert state(page) == expected, key
    for control in ("end of the colour scale", "colour scale"):
        page.get_by_label(control, exact=True).focus()
        page.keyboard.press("Home")
        assert "token=0" in state(page)
    go_to(page, "token=0&layer=0")
    spoken = f"token 0: {passage.strings[0]}, layer 0, {mask[0, 0].sum()} active"
    assert texts(page, ".tw-said")[0] == spoken
    layer, token = np.argwhere(mask.sum(-1) > 1)[-1].tolist()
    go_to(page, f"token={token}&layer={layer}")
    strongest = neurons(page)[0]
    page.locator(".tw-text").press("Enter")
    chosen = f"token={token}&layer={layer}&neuron={strongest}&colour=neuron&scale=neuron"
    assert state(page) == chosen
    # A card that closes leaves the focus to the view.
    click(page, ".tw-neuron .tw-close")
    page.locator(".tw-token .tw-close").click()
    page.keyboard.press("ArrowRight")
    assert state(page) == f"token=0&layer={layer}"
    go_to(page, chosen)
    for expected in (f"token={token}&layer={layer}", f"layer={layer}", ""):
        page.locator(".tw-text").press("Escape")
        assert state(page) == expected
    # Hovering peeks and leaves no trace; the map tells which layer.
    page.locator(".tw-t").nth(7).hover()
    page.wait_for_selector(".tw-card.tw-peek")
    assert "token 7" in texts(page, ".tw-tip")[0] and state(page) == ""
    box = page.locator(".tw-canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 10.5 / 40, box["y"] + 1.5 * (box["height"] - 13) / 3)
    page.locator(".tw-tip", has_text="token 10").wait_for()
    assert f"active in layer 1{mask[1, 10].sum()}" in texts(page, ".tw-tip")[0]
    page.mouse.down()
    page.mouse.up()
    assert state(page) == "token=10&layer=1"
    page.mouse.move(2, 2)
    page.wait_for_selector(".tw-tip", state="hidden")


def test_links_hold_the_whole_state(open_page):
    begin = {"token": 3, "layer": 1, "neuron": 5, "colour": "neuron", "scale": "neuron"}
    passage = make_trace(SEED, num_tokens=40, context=40)[0]
    page = open_page([Side("random", passage)], begin)
    assert state(page) == ""
    page.get_by_label("last layer").select_option("1")
    page.get_by_label("mark overflow").select_option("C = 16")
    page.get_by_label("without first tokens").uncheck()
    page.get_by_label("colour scale", exact=True).select_option("the same for all")
    page.get_by_label("end of the colour scale").fill("7.5")
    page.keyboard.press("Tab")
    page.locator(".tw-token .tw-close").click()
    address = "token=none&scale=all&limit=7.5&layers=0-1&skip_first=no&compression=16"
    assert state(page) == address
    settle(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("copy link").click()
    page.get_by_text("copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.endswith(f"#{address}")

    def shown(page):
        names = "first layer", "last layer", "mark overflow", "end of the colour scale"
        values = [page.get_by_label(name).input_value() for name in names]
        return values, texts(page, ".tw-ticks"), page.locator(".tw-pinned").count()

    expected = shown(page)
    assert expected[0] == ["0", "1", "C = 16", "7.5"] and expected[1][0] == "\u22127.500+7.50"
    go_to(page, "")  # an edit of the address counts at once
    assert shown(page)[0] == ["0", "2", "C = 8", ""] and page.locator(".tw-pinned").count() == 1
    go_to(page, address)
    assert shown(page) == expected
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(".tw-card")
    assert shown(page) == expected and not page.get_by_label("without first tokens").is_checked()
    for nonsense in (
        "token=40&layer=x&neuron=2",
        "side=7&token=-1&layer=2&neuron=9e9&colour=red&scale=&compression=a",
        "token=2.5&layer=1.5&layers=2-1&limit=-3&skip_first=maybe&side=none",
    ):
        go_to(page, nonsense)
        assert page.locator(".tw-card").count()
    assert shown(page)[0] == ["0", "2", "C = 8", ""] and page.locator(".tw-pinned").count() == 1


def found(page):
    """The search: its controls, its number, its list, and the picture of its scatter."""
    names = "words to find", "where", "layer", "state", "sort", "upright axis"
    inside = page.locator(".tw-finding")
    boxes = [inside.get_by_label(name, exact=True) for name in names]
    settle(page)
    status = texts(page, ".tw-browse [role=status]")
    drawn = page.evaluate("() => document.querySelector('.tw-points').toDataURL()")
    return [box.input_value() for box in boxes], status, texts(page, "button.tw-hit"), drawn


def test_links_hold_the_search(open_page):
    passage = make_trace(SEED, num_tokens=300)[0]
    shown = [Side("random", passage, aggregate_of(passage))]
    page = open_page(shown)
    page.locator("summary").click()
    page.get_by_label("where").select_option("text around")
    page.get_by_label("words to find").fill("5")
    page.get_by_label("layer", exact=True).select_option("layer 1")
    page.get_by_label("state").select_option("all")
    page.get_by_label("sort").select_option("fires")
    page.get_by_label("upright axis").select_option("layer")
    page.locator("[role=status]", has_text="of 900 neurons").wait_for()
    settle(page)
    canvas = page.locator(".tw-points")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + 260, steps=4)
    page.mouse.up()
    page.get_by_text("clear brush").wait_for()
    click(page, "button.tw-hit", 2)

    expected = found(page)
    values = ["5", "text around", "layer 1", "all", "fires", "layer"]
    assert expected[0] == values and len(expected[2]) > 3
    address = state(page)
    parts = dict(part.split("=") for part in address.split("&"))
    assert [*parts][-8:] == "words where within state sort upright box finding".split()
    assert int(parts["layer"]) == 1 and parts["box"].count("~") == 3
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_text("copy link").click()
    page.get_by_text("copied").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.endswith(f"#{address}")
    page.goto("about:blank")
    page.goto(link)
    page.locator("button.tw-hit").first.wait_for()
    page.mouse.move(2, 2)
    again = found(page)
    assert again[:3] == expected[:3]
    # The brush is drawn where it was: it can be seen in the picture, and goes with the address.
    go_to(page, address.replace(f"&box={parts['box']}", ""))
    without = found(page)
    assert int(without[1][0].split()[0]) > int(expected[1][0].split()[0])
    assert without[3] != again[3]
    assert page.get_by_text("clear brush").count() == 0
    go_to(page, address)
    assert found(page) == again
    keep(page, "link-search")


def test_words_are_anything_and_nonsense_is_as_the_page_begins(open_page):
    passage = make_trace(SEED, num_tokens=300)[0]
    page = open_page([Side("random", passage, aggregate_of(passage))])
    page.locator("summary").click()
    page.get_by_label("sort").select_option("fires")
    words = "a&b=c+d %20~#\u00e9"
    page.get_by_label("words to find").fill(words)
    typed = state(page)
    go_to(page, "")
    assert page.locator(".tw-browse").get_attribute("open") is None
    go_to(page, typed)
    assert found(page)[0] == [words, "fires at", "all layers", "that fire", "fires", "mean |h|"]
    go_to(page, "finding=yes&where=x&within=7&sort=size&upright=&box=1~2~3&state=none")
    begin = ["", "fires at", "all layers", "that fire", "match", "mean |h|"]
    assert found(page)[0] == begin and len(found(page)[2]) == 50


def test_labels_explain_themselves_and_numbers_keep_apart(open_page):
    passage = make_trace(SEED, num_tokens=40, context=40)[0]
    passage.values = (np.sign(passage.values) * 0.00482).astype(np.float32)
    layer, neuron = 1, int(passage.layer(1).indices[0])
    view = {"token": 5, "layer": layer, "neuron": neuron, "colour": "neuron"}
    for width, theme in ((1400, "light"), (1400, "dark"), (700, "light")):
        page = open_page([Side("random", passage, aggregate_of(passage))], view, width, theme)
        for label, words in [
            ("Overflow", "256 / C \u2212 1"),
            ("without first tokens", "by far the most active"),
            ("text", "one column a token"),
            ("h of layer", "the neuron adds h times its column"),
        ]:
            marks = page.locator(":is(.tw-group, .tw-row, .tw-label)", has_text=label)
            mark = marks.locator(".tw-help").first
            mark.hover()
            tip = page.locator(".tw-tip", has_text=words)
            tip.wait_for()
            box = tip.bounding_box()
            assert 0 <= box["x"] and box["x"] + box["width"] <= width
            page.mouse.move(2, 2)
            page.wait_for_selector(".tw-tip", state="hidden")
            mark.focus()
            tip.wait_for()
        page.keyboard.press("Tab")
        for tab in range(3):
            click(page, ".tw-tabs button", tab)
            assert overlaps(page) == []
        keep(page, f"labels-{width}-{theme}")
