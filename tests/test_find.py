"""All neurons in a browser: the search, notes, and the atlas of a model, opened from disk."""

import re

import numpy as np
import pytest

import twell
from tests.browser import IN_BROWSER, click, coloured, settle, texts, values, violations, watch
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace
from twell import inspector, results, trace
from twell.__main__ import main
from twell.inspector import Side

pytestmark = IN_BROWSER
SHIPPED = results.root() / "data" / "checkpoints" / "twell-6m"


def hits(page):
    """All neurons of the list, (layer, neuron)."""
    while page.locator(".tw-found .tw-more").count():
        click(page, ".tw-found .tw-more")
    names = texts(page, "button.tw-hit b")
    return [tuple(int(number) for number in name.split(" \u00b7 ")) for name in names]


def picked(page):
    names = ("layer", "neuron")
    return tuple(int(page.input_value(f".tw-neuron input[aria-label={name}]")) for name in names)


def test_neurons_are_listed_and_sorted(open_page):
    passage, mask = make_trace(SEED, 200, 3, 100)
    counted, fires = aggregate_of(passage), mask.sum(1)
    strength = inspector.leading(counted.abs_sum / np.maximum(fires, 1), 3)  # as in the browser
    page = open_page([Side("random", passage, counted)])
    page.locator("summary").click()
    every = list(np.ndindex(3, 100))
    assert hits(page) == sorted(every, key=lambda one: (-strength[one], one))
    page.get_by_label("layer", exact=True).select_option("layer 1")
    page.get_by_label("sort", exact=True).select_option("fires")
    settle(page)
    page.locator(".tw-browse [role=status]", has_text="100 of 300 neurons").wait_for()
    assert hits(page) == sorted(every[100:200], key=lambda one: (-fires[one], one))
    # A click opens the card.
    first = hits(page)[0]
    click(page, "button.tw-hit", 0)
    assert page.locator(".tw-hit[aria-current=true]").count() == 1 and picked(page) == first


# --- tokens to neurons

WORDS = ["The", " year", " 18", "62", ".", " It", " was", " $", "51", ",", " In", "ner"]
# Of each selection an expression of Python's that matches its tokens in the text.
SELECTED = {
    "digits": r"\d",
    "digits after digits": r"(?<=\d)(?:62|51)",
    "capitals": r"The| In| It",
    "punctuation": r"[.,]| \$",
    "word start": r"(?<![a-zA-Z0-9])(?:The|ner)| (?:year|It|was|In)",
    "inside of a word": r"(?<=[a-zA-Z0-9])(?:The|ner)",
    "/1|wa/": "1|wa",
    "6": "6",  # no token's number
    r"/\d*/": r"\d+",  # nothing empty matches
    "/[^a-z .]/": "(?i)[^a-z .]",  # nothing between sequences
    "in": r"(?i)\bin\b",  # whole words, from here on
}


def members_of(passage, pattern):
    """Of each token whether it has a part of a match; no match crosses a sequence."""
    members = np.zeros(len(passage.strings), bool)
    for number in np.unique(passage.sequence):
        (at,) = np.nonzero(passage.sequence == number)
        parts = [passage.strings[token] for token in at]
        token = np.repeat(at, [len(part) for part in parts])
        for match in re.finditer(pattern, "".join(parts)):
            members[token[match.start() : match.end()]] = True
    return members


@pytest.fixture
def spoken():
    """A trace of words and numbers, its mask, and the number of each token's word."""
    passage, mask = make_trace(SEED, 200, 3, 60, context=50)
    passage.strings = [WORDS[token] for token in passage.token_ids]
    return passage, mask


def phi(fires, members):
    """The correlation of two masks; 0 where one is constant."""
    if fires.all() or members.all() or not fires.any() or not members.any():
        return 0.0
    return float(np.corrcoef(fires, members)[0, 1])


def ranks(page):
    """The rows of the ranking: layer, neuron, and the numbers behind."""
    page.locator("button.tw-hit").first.wait_for()
    rows = page.eval_on_selector_all(
        "button.tw-hit", "(nodes) => nodes.map((n) => [...n.children].map((c) => c.textContent))"
    )
    plain = [[cell.replace("\u2212", "-").strip("%<") for cell in row] for row in rows]
    return [(tuple(map(int, row[0].split(" \u00b7 "))), row[1:]) for row in plain]


def check_ranks(page, passage, mask, members, later):
    """The ranking has every neuron with a phi above 0, as slow loops compute it."""
    expected = {}
    for layer, neuron in np.ndindex(mask.shape[0], mask.shape[2]):
        fires, chosen = mask[layer, later, neuron], members[later]
        if (value := phi(fires, chosen)) > 1e-9:
            both = (fires & chosen).sum()
            h = passage.layer(layer).toarray()[later, neuron]
            expected[layer, neuron] = (
                *(value, 100 * both / fires.sum(), 100 * both / chosen.sum(), 100 * fires.mean()),
                *(h[chosen].mean(), h[~chosen].mean()),
            )
    while page.locator(".tw-found .tw-more").count():
        click(page, ".tw-found .tw-more")
    shown = ranks(page)
    assert {name for name, _ in shown} == expected.keys()
    values = [float(row[0]) for _, row in shown]
    assert values == sorted(values, reverse=True)
    for name, row in shown[:20]:
        np.testing.assert_allclose([*map(float, row)], expected[name], rtol=0.06, atol=0.006)


@pytest.mark.parametrize("width", [1400, 720, 390])
def test_the_card_is_in_view_and_leaves_the_list_within_reach(open_page, width):
    passage, _ = make_trace(SEED, 400, 3, 60)
    page = open_page([Side("random", passage, aggregate_of(passage))], width=width)
    page.locator("summary").click()
    card = page.locator(".tw-neuron")
    for number in (1, 4, 2):
        page.locator("button.tw-hit").nth(number).click()
        page.wait_for_function("() => !document.getAnimations().length")
        assert 0 <= card.bounding_box()["y"] < 500
        card.get_by_label("neuron", exact=True).click(trial=True)  # nothing covers it
        if width < 700:
            page.get_by_text("\u2190 back").click()
            card.wait_for(state="detached")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_neurons_are_ranked_by_the_tokens_that_they_tell_apart(open_page, spoken):
    passage, mask = spoken
    page = open_page([Side("random", passage)], {"skip_first": True})
    click(page, "summary")
    page.get_by_label("where", exact=True).select_option("tell tokens apart")
    later = passage.position > 0
    for name, pattern in SELECTED.items():
        members = members_of(passage, pattern)
        if name in texts(page, "[aria-label='class of tokens'] option"):
            page.get_by_label("class of tokens").select_option(name)
        else:
            page.get_by_label("pattern of tokens").fill(name)
        if name == "in":
            page.get_by_label("whole words").check()
        settle(page)
        counted = later | members
        page.locator("[role=status]", has_text=f"for {members.sum()} of 200 tokens").wait_for()
        check_ranks(page, passage, mask, members, counted)
        assert page.locator(".tw-member").count() == members.sum()
    page.get_by_label("pattern of tokens").fill("/(/")
    page.locator("[role=status]", has_text="Invalid regular expression").wait_for()


def test_tokens_are_selected_by_dragging_and_clicking(open_page, spoken):
    passage, mask = spoken
    page = open_page([Side("random", passage)])
    tokens = page.locator(".tw-t")
    tokens.nth(3).hover()
    page.mouse.down()
    tokens.nth(6).hover()
    page.mouse.up()
    members = np.zeros(200, bool)
    members[3:7] = True
    check_ranks(page, passage, mask, members, passage.position > 0)
    tokens.nth(10).click()
    tokens.nth(12).click(modifiers=["Shift"])
    settle(page)
    members[10:13] = True
    check_ranks(page, passage, mask, members, passage.position > 0)
    assert "selected=%233%2C4%2C5%2C6%2C10%2C11%2C12" in page.evaluate("location.hash")


def test_tokens_are_told_apart_over_the_examples(open_page, spoken):
    passage, _ = spoken
    counted = aggregate_of(passage)
    counted.strings = [WORDS[token] for token in counted.token_ids]
    page = open_page([Side("random", passage, counted)], {"skip_first": False})
    page.goto(page.url + "#finding=yes&where=selected&selected=digits&over=examples")
    expected = {}
    for layer, neuron in np.ndindex(3, 60):
        every = (*counted.top_at[layer, neuron], *counted.quantile_at[layer, neuron])
        fires, members = [], []
        for at, near in zip(every, counted.near[layer, neuron], strict=True):
            if at < 0:
                continue
            _, _, ids, here = counted.context(at)
            start = counted.before - here
            fires += (near[start : start + len(ids)] != 0).tolist()
            members += np.isin(ids, [2, 3, 8]).tolist()
        value = phi(np.array(fires), np.array(members)) if fires else 0.0
        if value > 1e-9:
            expected[layer, neuron] = value
    shown = {name: float(row[0]) for name, row in ranks(page)}
    assert len(shown) == 50
    best = sorted(expected, key=expected.get, reverse=True)[: len(shown)]
    for name in best[:40]:
        assert shown[name] == pytest.approx(expected[name], abs=6e-4)


def test_the_preset_has_the_best_class_of_each_neuron(open_page, spoken):
    passage, mask = spoken
    page = open_page([Side("random", passage)])
    page.get_by_text("Neurons that are a class").click()
    digits = members_of(passage, r"\d")
    (layer, neuron), (name, value, *_) = ranks(page)[0]
    later = passage.position > 0
    assert float(value) >= round(phi(mask[layer, later, neuron], digits[later]), 3)
    page.get_by_label("class of tokens").select_option(name)
    settle(page)
    assert ranks(page)[0][0] == (layer, neuron) and ranks(page)[0][1][0] == value


NUMBERS = (
    "The public debt has been reduced by $1,234,567 since the last session. In 1862 the revenue was "
    "$51,935,720, and in the year ending June 30, 1863, it was $112,697,290. The Secretary will lay "
    "before you a statement. It is believed that the revenue will be sufficient."
)


def test_two_questions_of_a_researcher(live):
    """Which neurons fire on numbers? Is there one for sentence starts?"""
    widget = twell.inspect(SHIPPED, NUMBERS)
    page = live(widget)
    page.get_by_text("Neurons that are a class", exact=True).click()
    page.get_by_label("class of tokens").select_option("digits")
    page.get_by_label("over", exact=True).select_option("over the examples")
    page.locator("[role=status]", has_text="neurons").wait_for()
    (name, measures), *_ = ranks(page)
    assert name == (1, 587) and float(measures[0]) > 0.85
    page.locator("button.tw-hit").first.click()
    page.locator(".tw-label", has_text="digits, phi 0.9").wait_for()
    numbers = {n for n, text in enumerate(widget.trace.strings) if re.search(r"\d", text)}
    assert numbers <= coloured(page).keys() and len(coloured(page)) <= len(numbers) + 2

    page.get_by_label("class of tokens").select_option("sentence start")
    settle(page)
    name, measures = ranks(page)[0]
    assert name[0] == 0 and float(measures[0]) > 0.6

    # Labels are found by their words.
    page.get_by_label("where", exact=True).select_option("label or note")
    page.get_by_label("words to find").fill("digits, phi 0.9")
    page.locator("button.tw-hit", has_text="1 \u00b7 587").wait_for()


def find_note(page, words):
    page.locator("summary").click()
    page.get_by_label("where", exact=True).select_option("label or note")
    page.get_by_label("words to find").fill(words)
    page.locator("[role=status]", has_text="1 of 192 neurons").wait_for()


def test_notes_are_in_pages_and_words_are_found(open_page, tiny_run, tmp_path):
    model, tokenizer = twell.load(tiny_run)
    inspector.write_note(tmp_path / "notes.txt", 1, 7, "ends of words")
    passage = trace.trace_text(model, tokenizer, "ba de fun")
    counted = trace.aggregate_run(tiny_run, tokens=256)
    side = Side("tiny", passage, counted, model, tokenizer, notes_file=tmp_path / "notes.txt")
    page = open_page([side], {"layer": 1, "neuron": 7}, wait=".tw-word")
    assert texts(page, ".tw-noted") == ["ends of words"]
    assert not texts(page, ".tw-label")  # the note stands in its place
    find_note(page, "Words")
    assert hits(page) == [(1, 7)]
    # Neighbours in later and earlier layers lead on.
    click(page, "[data-kin=written] .tw-chip")
    page.locator("[data-kin=read]").wait_for()
    assert picked(page)[0] == 0
    click(page, "button.tw-hit")
    page.locator(".tw-noted").wait_for()
    # By a word that it promotes.
    words = texts(page, ".tw-both-words .tw-pill")
    page.get_by_label("where", exact=True).select_option("promotes")
    word = next(word for word in words if word.strip() and word.isprintable())
    page.get_by_label("words to find").fill(word)
    page.locator("button.tw-hit", has_text="1 \u00b7 7").first.wait_for()


def test_the_widget_computes_what_is_asked_for_and_keeps_notes(live, tiny_run, tmp_path):
    trace.aggregate_run(tiny_run, tokens=256).save(tmp_path / "a.npz")
    view = {"layer": 1, "neuron": 5, "aggregate": tmp_path / "a.npz"}
    page = live(twell.inspect(tiny_run, "ba de fun", **view))
    page.locator(".tw-both-words").wait_for()
    page.locator("[aria-label=examples] option").nth(1).wait_for(state="attached")
    page.locator(".tw-noting").fill("ends of words")
    page.keyboard.press("Tab")
    find_note(page, "ends")
    assert (tiny_run / "notes.txt").read_text() == "1:5 ends of words\n"
    # Typed text runs, and the cursor stays. The neurons stay, even without a text.
    for text, shown in (("de", ".tw-text"), ("", ".tw-empty")):
        page.locator(".tw-type").fill("")
        page.keyboard.type(text)
        page.locator(shown, has_not_text="fun").wait_for()
        settle(page)
        assert page.locator(".tw-type").input_value() == text
        assert page.evaluate("() => document.activeElement.className") == "tw-type"
        assert hits(page) == [(1, 5)] and page.locator(".tw-both-words .tw-word").count() == 20


# --- the atlas


@pytest.fixture
def open_atlas(browser):
    """Open an atlas from disk; a message, an error, or a request but for its files fails."""
    pages, wrong = [], []

    def go(folder, address="", wait=".tw-hit"):
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        pages.append(page)
        page.files = []
        wrong.append(watch(page))
        page.on("request", lambda one: page.files.append(one.url.removeprefix(folder.as_uri())))
        page.goto(f"{(folder / 'index.html').as_uri()}{address}")
        page.wait_for_selector(wait, state="attached")
        return page

    yield go
    for page in pages:
        page.close()
        assert all(name[0] == "/" for name in page.files)
    assert not any(wrong)


def test_an_atlas_has_the_numbers_of_the_aggregate(open_atlas, tiny_run, tmp_path):
    counted = trace.aggregate_run(tiny_run, "ba de fun " * 40 + "fun fun de ba " * 20)
    counted.save(tmp_path / "counted.npz")
    (tmp_path / "mine.txt").write_text("1:3 ends of words")
    command = ["atlas", str(tiny_run), "--aggregate", str(tmp_path / "counted.npz")]
    command += ["--labels", str(tmp_path / "mine.txt"), "--out", str(tmp_path / "atlas")]
    assert main(command) == 0
    fires, sums, largest = counted.neurons()
    layer, neuron = np.unravel_index(fires.argmax(), fires.shape)
    page = open_atlas(tmp_path / "atlas", f"#layer={layer}&neuron={neuron}", wait=".tw-word")
    page.wait_for_selector(".tw-example")
    often = fires[layer, neuron]
    expected = 100 * often / counted.num_tokens, sums[layer, neuron] / often, largest[layer, neuron]
    np.testing.assert_allclose(values(page, ".tw-neuron .tw-fact b"), expected, rtol=0.06)
    page = open_atlas(tmp_path / "atlas", "#layer=1&neuron=3", wait=".tw-noted")
    assert texts(page, ".tw-noted") == ["ends of words"] and violations(page) == []
