"""The inspector in a browser: numbers, texts, keys and links of pages opened from a file."""

import re

import numpy as np
import pytest

from study import analysis
from tests.browser import (
    IN_BROWSER,
    click,
    coloured,
    go_to,
    neurons,
    settle,
    state,
    texts,
    values,
    violations,
)
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace
from twell import inspector
from twell.inspector import Side

pytestmark = IN_BROWSER

HEBREW = "\u05e9\u05dc\u05d5\u05dd| \u05e2\u05d5\u05dc\u05dd|,| \u05d6\u05d4|.\n".split("|")
# Tokens that do not show themselves, and what is shown.
MARKS = {
    **{"\n": "\u23ce", "\n\n": "\u23ce\u23ce", "\t": "\u21e5\u00a0\u00a0", "": "empty", " ": " "},
    **{"\r": "U+000D", "\x00": "U+0000", "\u202e": "U+202E", "\u200b": "U+200B"},
    **{"\u00a0": "U+00A0", "    if": "    if"},
}
BYTES = ["<0xF0><0x9F>", "<0x91>", "<0xA9>"]
PLAIN = [
    *("The", " Senate", " \U0001f469\u200d\U0001f467", " na\u00efve", "\u4e2d\u6587", "<|end|>"),
    *("<script>alert(1)</script>", "<img/src=x/onerror=alert(2)>", "&amp;", "<b>"),
]
HARD = [*PLAIN, "\n", *HEBREW, *BYTES, *list(MARKS)[1:], "\n  x"]


@pytest.fixture
def hard_trace():
    passage, mask = make_trace(SEED, num_tokens=len(HARD), context=len(HARD))
    passage.strings = HARD
    passage.token_ids = np.arange(len(HARD), dtype=np.int32)
    passage.meta["special_ids"] = [HARD.index("<|end|>")]
    return passage, mask


def test_a_page_shows_the_trace(open_page, hard_trace):
    passage, mask = hard_trace
    counted = aggregate_of(passage)
    page = open_page([Side("random", passage, counted)])
    token, layer = np.argwhere(mask.sum(-1).T > 1)[-1].tolist()
    click(page, ".tw-t", token)
    assert values(page, ".tw-count") == mask[:, token].sum(-1).tolist()
    click(page, ".tw-layer-name", layer)
    h = passage.layer(layer)[[token]]
    order = np.lexsort((h.indices, -np.abs(h.data)))
    neuron = int(h.indices[order[0]])
    assert neurons(page) == h.indices[order].tolist()
    shown = values(page, "button.tw-entry > b")
    np.testing.assert_allclose(shown, h.data[order], rtol=6e-3, atol=1e-12)
    share, rate = (values(page, f"button.tw-entry > {at}")[0] for at in ("b + span", ":last-child"))
    assert share == pytest.approx(100 * abs(h.data).max() / abs(h.data).sum(), rel=0.07)
    assert rate == pytest.approx(100 * mask[layer, :, neuron].mean(), rel=0.07)

    click(page, "button.tw-entry", 0)
    fires = np.flatnonzero(mask[layer, :, neuron])
    column = passage.layer(layer).toarray()[:, neuron]
    # The first token is left out of colours, and the card says so.
    assert coloured(page).keys() == {t for t in fires if t > 0}
    left_out = page.get_by_text("Colours leave out 1 firing at first tokens.")
    assert left_out.count() == (0 in fires)
    assert all(sign == np.sign(column[t]) for t, sign in coloured(page).items() if column[t])
    assert f"{len(fires)} of {len(HARD)}" in texts(page, ".tw-neuron .tw-fact b")[0]
    page.wait_for_selector(".tw-histogram text:has-text('tokens (n = ')", state="attached")
    bars = texts(page, ".tw-histogram rect title")
    assert sum(int(re.search(r": ([\d,]+) token", bar)[1]) for bar in bars) == len(fires)
    largest = np.sort(np.abs(column[fires]))[::-1]
    places = np.abs(values(page, ".tw-place b"))
    np.testing.assert_allclose(places, largest, rtol=6e-3, atol=1e-12)
    page.get_by_label("examples", exact=True).select_option("strongest of all")
    settle(page)
    top = analysis.contexts(counted, layer, neuron)
    np.testing.assert_allclose(values(page, ".tw-place b"), top["value"], rtol=6e-3, atol=1e-12)
    assert texts(page, ".tw-place mark") == top["token"].tolist()


def test_hard_texts_are_shown_as_text(open_page, hard_trace):
    page = open_page([Side("hard", hard_trace[0])])
    shown = dict(zip(HARD, texts(page, ".tw-t"), strict=True))
    assert {text: shown[text] for text in MARKS} == MARKS
    assert all(shown[text] == text for text in [*PLAIN, *HEBREW[:-1]])
    assert page.locator(".tw-text :is(img, b, script)").count() == 0
    assert texts(page, ".tw-t.tw-special") == ["<|end|>"]
    # In a line from right to left the tokens follow each other to the left.
    left = [page.locator(".tw-t").nth(HARD.index(word)).bounding_box()["x"] for word in HEBREW[:2]]
    assert left[1] < left[0]


def test_keys_and_pointer(open_page):
    passage, mask = make_trace(SEED, num_tokens=40, context=40)
    page = open_page([Side("random", passage)])
    page.locator(".tw-t").nth(5).click()
    assert state(page) == "token=5"
    for key, expected in (
        ("ArrowRight", "token=6"),
        ("ArrowDown", "token=6&layer=0"),
        ("ArrowDown", "token=6&layer=1"),
        ("ArrowUp", "token=6&layer=0"),
        ("End", "token=39&layer=0"),
        ("Home", "token=0&layer=0"),
    ):
        page.keyboard.press(key)
        assert state(page) == expected, key
    layer, token = np.argwhere(mask.sum(-1) > 1)[-1].tolist()
    go_to(page, f"token={token}&layer={layer}")
    strongest = neurons(page)[0]
    page.locator(".tw-text").press("Enter")
    chosen = f"token={token}&layer={layer}&neuron={strongest}&colour=neuron"
    assert state(page) == chosen
    for expected in (f"token={token}&layer={layer}", f"layer={layer}", ""):
        page.locator(".tw-text").press("Escape")
        assert state(page) == expected
    # Elsewhere keys do what they do in any page.
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    assert state(page) == ""
    page.locator(".tw-t").nth(7).hover()
    page.wait_for_selector(".tw-card.tw-peek")
    assert state(page) == ""
    box = page.locator(".tw-canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 10.5 / 40, box["y"] + (box["height"] - 13) / 2)
    assert state(page) == "token=10&layer=1"
    # A token's name has its value.
    active = float(f"{mask[:, 10].sum(-1).mean():.3g}")
    name = f"token 10, active {active:g}: {passage.strings[10]}"
    page.get_by_role("option", name=name, exact=True).wait_for(timeout=2000)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_pages_are_accessible(open_page, model, theme, width):
    shown = inspector.sides(model, "ba de fun " * 30)
    page = open_page(shown, width=width, theme=theme)
    layer, neuron = 1, int(shown[0].trace.layer(1).indices[3])
    for address in (
        "",
        "token=5&layer=0",
        f"token=5&layer={layer}&neuron={neuron}&colour=neuron",
        "colour=surprise",
        "finding=yes",
        "finding=yes&where=selected",
    ):
        go_to(page, address)
        if "finding" in address:
            page.locator("button.tw-hit").first.wait_for()
        assert violations(page) == [], address


def view(page):
    """What the controls, the scales and the list of found neurons show."""
    settle(page)
    controls = page.eval_on_selector_all(
        ".tw-bar :is(select, input)",
        "(nodes) => nodes.map((node) => [node.ariaLabel, node.value, node.checked].join())",
    )
    shown = [texts(page, names) for names in (".tw-legend small", "button.tw-hit", "[role=status]")]
    return controls, shown, page.locator("[aria-selected]").count()


def test_links_hold_the_whole_state_and_the_search(open_page):
    begin = {"token": 3, "layer": 1, "neuron": 5, "colour": "neuron"}
    passage = make_trace(SEED, num_tokens=300)[0]
    page = open_page([Side("random", passage, aggregate_of(passage))], begin)
    assert state(page) == ""
    first = view(page)
    page.get_by_label("without first tokens").uncheck()
    page.locator(".tw-token .tw-close").click()
    address = "token=none&skip_first=no"
    assert state(page) == address
    page.locator("summary").click()
    page.get_by_label("where", exact=True).select_option("tell tokens apart")
    page.get_by_label("pattern of tokens").fill("5")
    page.locator(".tw-finding").get_by_label("layer", exact=True).select_option("layer 1")
    page.get_by_label("sort", exact=True).select_option("fires")
    page.locator("[role=status]", has_text="of 900 neurons").wait_for()
    words = "selected=5&where=selected&within=1&sort=rate"
    assert state(page) == f"{address}&{words}&finding=yes"
    expected = view(page)
    assert expected[2] == 0 and len(expected[1][1]) > 3
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.locator("button.tw-hit").first.wait_for()
    assert view(page) == expected
    go_to(page, "")  # an edit of the address counts at once
    assert view(page)[0][:2] == first[0][:2] and page.locator("[aria-selected]").count() == 1
