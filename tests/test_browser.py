"""The inspector in a browser: pages opened from a file."""

import re

import numpy as np
import pytest

import twell
from study import analysis
from tests.browser import IN_BROWSER, click, coloured, neurons, settle, texts, values
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace
from twell import trace
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
    # The first token is left out of colours.
    assert coloured(page).keys() == {t for t in fires if t > 0}
    assert all(sign == np.sign(column[t]) for t, sign in coloured(page).items() if column[t])
    assert f"{len(fires)} of {len(HARD)}" in texts(page, ".tw-neuron .tw-fact b")[0]
    page.wait_for_selector(".tw-histogram text:has-text('tokens (n = ')", state="attached")
    bars = texts(page, ".tw-histogram rect title")
    assert sum(int(re.search(r": ([\d,]+) token", bar)[1]) for bar in bars) == len(fires)
    largest = np.sort(np.abs(column[fires]))[::-1]
    places = np.abs(values(page, ".tw-place b"))
    np.testing.assert_allclose(places, largest, rtol=6e-3, atol=1e-12)
    page.get_by_label("examples").select_option("strongest of all")
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
    click(page, ".tw-t", HARD.index("<0x91>"))
    assert texts(page, ".tw-fact .tw-pill") == ["\U0001f469"]


@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (390, "dark")])
def test_nothing_sticks_out(open_page, width, theme):
    passage = make_trace(SEED, num_tokens=60)[0]
    one = Side("one", passage, aggregate_of(passage))
    view = {"token": 5, "layer": 1, "neuron": int(passage.layer(1).indices[0])}
    nothing = Side("nothing", passage.part(0, 0), one.aggregate)
    for sides in ([one], [one, one], [nothing]):
        page = open_page(sides, view, width, theme)
        page.locator("summary").click()
        page.locator("button.tw-hit").first.wait_for()
        assert f"color-scheme: {theme}" in page.get_attribute(".twell", "style")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_choices(open_page, tiny_run):
    model, tokenizer = twell.load(tiny_run)
    passage = trace.trace_text(model, tokenizer, "ba de fun " * 20)
    view = {"layer": 1, "neuron": int(passage.layer(1).indices[0]), "colour": "neuron"}
    page = open_page([Side("tiny", passage)], view)
    page.get_by_label("first layer").select_option("1")
    page.get_by_label("colour", exact=True).select_option("active neurons")
    settle(page)
    counts = passage.counts()
    later = passage.position > 0
    assert texts(page, ".tw-labels button.tw-row") == ["1"]
    inside = counts[1][later]
    ticks = ".tw-side > div:first-child .tw-ticks span"
    ends = values(page, ticks)[0], values(page, ticks)[-1]
    assert ends == (inside[inside > 0].min(), inside.max())
    page.get_by_label("without first tokens").uncheck()
    settle(page)
    assert values(page, ticks)[-1] == counts[1].max()
    page.get_by_label("go to").select_option("Busiest token")
    settle(page)
    pinned = page.evaluate("() => document.querySelector('[aria-selected]').number")
    assert counts[:, pinned].sum() == counts[:, later].sum(0).max()
