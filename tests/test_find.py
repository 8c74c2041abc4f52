"""Finding neurons in a browser: the search, the scatter, the cards of all neurons, notes."""

import numpy as np

import twell
from tests.browser import IN_BROWSER, click, drag, settle, show_live, texts, values
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, float32, make_trace
from twell import inspector, trace
from twell.inspector import Side

pytestmark = IN_BROWSER


def examples(counted, layer, neuron):
    """The places of a neuron, as numbers of tokens, and the tokens around each."""
    for at in (*counted.top_at[layer, neuron], *counted.quantile_at[layer, neuron]):
        if at >= 0:
            _, _, ids, here = counted.context(at)
            yield ids, here


def hits(page):
    """All neurons of the list, (layer, neuron)."""
    while page.locator(".tw-found .tw-more").count():
        click(page, ".tw-found .tw-more")
    names = texts(page, "button.tw-hit b")
    return [tuple(int(number) for number in name.split(" \u00b7 ")) for name in names]


def picked(page):
    names = ("layer", "neuron")
    return tuple(int(page.input_value(f".tw-neuron input[aria-label={name}]")) for name in names)


def test_neurons_are_found_by_their_examples(open_page):
    passage, mask = make_trace(SEED, num_tokens=200)
    counted = aggregate_of(passage)
    page = open_page([Side("random", passage, counted)])
    page.locator("summary").click()
    fires = mask.sum(1)

    def found(number):
        page.locator(".tw-browse [role=status]", has_text=f"{number} of 900 neurons").wait_for()
        return hits(page)

    alive = [tuple(one) for one in np.argwhere(fires > 0).tolist()]
    strength = counted.abs_sum / np.maximum(fires, 1)
    strength = float32(inspector.leading(strength, 24), 8)  # as in the browser
    assert found(len(alive)) == sorted(alive, key=lambda one: (-strength[one], one))
    query = page.get_by_label("words to find")
    for mode, inside in [
        ("fires at", lambda ids, here: ids[here] == 5),
        ("text around", lambda ids, here: 5 in ids),
    ]:
        page.get_by_label("where").select_option(mode)
        query.fill("5")
        counts = {one: sum(inside(*place) for place in examples(counted, *one)) for one in alive}
        matching = [one for one, count in counts.items() if count]
        order = sorted(matching, key=lambda one: (-counts[one], -strength[one], one))
        assert found(len(matching)) == order
        matches = texts(page, "button.tw-hit > span:last-child")
        assert matches == [f"{counts[one]} of 13" for one in order]
    page.get_by_label("layer", exact=True).select_option("layer 1")
    in_layer = [one for one in order if one[0] == 1]
    assert found(len(in_layer)) == in_layer
    page.get_by_label("sort", exact=True).select_option("fires")
    settle(page)
    rates = [int(fires[one]) for one in found(len(in_layer))]
    assert rates == sorted(rates, reverse=True)
    query.fill("")
    page.get_by_label("layer", exact=True).select_option("all layers")
    page.get_by_label("state").select_option("dead")
    dead = np.argwhere(fires == 0).tolist()
    assert sorted(map(list, found(len(dead)))) == dead
    page.get_by_label("state").select_option("that fire")
    # A click opens the card.
    settle(page)
    third = hits(page)[2]
    click(page, "button.tw-hit", 2)
    assert page.locator(".tw-hit[aria-current=true]").count() == 1 and picked(page) == third


def test_neurons_are_brushed(open_page):
    passage, mask = make_trace(SEED, num_tokens=200)
    page = open_page([Side("random", passage, aggregate_of(passage))])
    page.locator("summary").click()
    status = page.locator(".tw-browse [role=status]")
    status.locator("text=of 900 neurons").wait_for()
    fires = mask.sum(1)
    page.get_by_label("upright axis").select_option("layer")
    settle(page)
    # The right part of the row of layer 0, which is the lowest.
    high = (300 - 34 - 8) / 3
    box = drag(page, (0.985, (300 - 34 - 2) / 300), (0.5, (300 - 34 - high + 2) / 300))
    low, top = fires[fires > 0].min() / 1.2, fires.max() * 1.2
    share = (box["width"] / 2 - 58) / (box["width"] - 12 - 58)
    least = low * (top / low) ** share
    expected = {(0, int(n)) for n in np.flatnonzero(fires[0] >= least)}
    assert set(hits(page)) == expected and len(expected) > 3
    status.get_by_text("clear brush").click()
    status.locator(f"text={(fires > 0).sum()} of").wait_for()
    # A click takes the nearest point.
    n = int(fires[0].argmax())
    x = np.log(fires[0, n] / low) / np.log(top / low) * (box["width"] - 70) + 58
    y = 300 - 34 - high * (0.5 + 0.7 * (n / 300 - 0.5))
    page.mouse.click(box["x"] + x, box["y"] + y)
    settle(page)
    assert picked(page) == (0, n)


def shaded(page, number):
    """The tokens of an example: whether more orange (+1) or blue (-1), else 0.

    Each token begins with a space.
    """
    return page.evaluate(
        """(n) => [...document.querySelectorAll(".tw-example")[n].childNodes].flatMap((node) => {
            const rgb = node.style?.backgroundColor.match(/[\\d.]+/g) ?? [0, 0, 0];
            return node.textContent.trim().split(" ").map(() => Math.sign(rgb[0] - rgb[2]));
        })""",
        number,
    )


def test_cards_shade_every_token_and_lead_on(open_page):
    passage, mask = make_trace(SEED, num_tokens=200)
    passage.strings = [f" {word}" for word in passage.token_ids]
    counted = aggregate_of(passage)
    counted.strings = [f" {word}" for word in counted.token_ids]
    layer, neuron = np.unravel_index(mask.sum(1).argmax(), (3, 300))
    view = {"layer": int(layer), "neuron": int(neuron), "colour": "neuron"}
    side = Side("random", passage, counted)
    page = open_page([side], view, wait=".tw-tabs button + button")
    h = passage.layer(layer).toarray()[:, neuron]
    for tab, places in ((1, counted.top_at), (2, counted.quantile_at)):
        click(page, ".tw-tabs button", tab)
        for number, at in enumerate(places[layer, neuron]):
            _, _, ids, here = counted.context(at)
            expected = np.sign(h[at - here : at - here + len(ids)])
            assert shaded(page, number) == expected.tolist()
    # Examples are of this passage: a click goes there.
    click(page, "button.tw-place", 0)
    token = counted.quantile_at[layer, neuron, 0]
    assert page.evaluate("() => document.querySelector('.tw-pinned').number") == token
    assert page.locator(".tw-quantile").count() == 5
    chips = texts(page, "[data-kin=together] .tw-chip span")
    assert chips == [str(n) for n in counted.together_at[layer, neuron] if n >= 0] and chips
    click(page, "[data-kin=together] .tw-chip")
    assert picked(page) == (layer, int(chips[0]))
    # Statistics of an older version keep h at the place alone, and say so.
    counted.near = np.zeros((3, 300, 0, 0), np.int8)
    counted.together = np.zeros((3, 300, 0), np.float32)
    counted.together_at = np.full((3, 300, 0), -1)
    page = open_page([side], view, wait=".tw-tabs button + button")
    click(page, ".tw-tabs button", 1)
    assert sum(map(abs, shaded(page, 0))) == 1 and page.locator(".tw-kin").count() == 0
    assert "twell trace --aggregate" in texts(page, ".tw-places > .tw-quiet")[0]


def test_neighbours_across_layers(open_page, tiny_run):
    model, tokenizer = twell.load(tiny_run)
    passage = trace.trace_text(model, tokenizer, "ba de fun")
    side = Side("tiny", passage, None, model, tokenizer)
    page = open_page([side], {"layer": 0, "neuron": 7}, wait="[data-kin=read]")
    # That they are the nearest is tested with the catalog.
    output = model.ffns[0].down_proj.weight[:, 7]
    names = texts(page, "[data-kin=read] .tw-chip span")
    first = [tuple(map(int, name.split(" \u00b7 "))) for name in names]
    gates = model.ffns[1].gate_proj.weight[[neuron for _, neuron in first]]
    cosines = (gates @ output / gates.norm(dim=1) / output.norm()).tolist()
    np.testing.assert_allclose(values(page, "[data-kin=read] .tw-chip b"), cosines, rtol=0.06)
    assert {layer for layer, _ in first} == {1} and page.locator("[data-kin=written]").count() == 0
    click(page, "[data-kin=read] .tw-chip")
    page.locator("[data-kin=written]").wait_for()
    assert picked(page) == first[0] and page.locator("[data-kin=read]").count() == 0


def test_notes_are_in_pages_and_words_are_found(open_page, tiny_run, tmp_path):
    model, tokenizer = twell.load(tiny_run)
    inspector.write_note(tmp_path / "notes.txt", 1, 7, "ends of words")
    passage = trace.trace_text(model, tokenizer, "ba de fun")
    counted = trace.aggregate_run(tiny_run, tokens=256)
    side = Side("tiny", passage, counted, model, tokenizer, notes_file=tmp_path / "notes.txt")
    page = open_page([side], {"layer": 1, "neuron": 7}, wait=".tw-word")
    assert texts(page, ".tw-noted") == ["ends of words"]
    page.locator("summary").click()
    page.get_by_label("state").select_option("all")
    page.get_by_label("where").select_option("note")
    page.get_by_label("words to find").fill("Words")
    page.locator("[role=status]", has_text="1 of 192 neurons").wait_for()
    assert hits(page) == [(1, 7)]
    # By a word that it promotes, and one that it suppresses.
    words = np.array(texts(page, ".tw-both-words .tw-pill")).reshape(2, -1).tolist()
    for where, own in zip(("promotes", "suppresses"), words, strict=True):
        word = next(word for word in own if word.strip() and word.isprintable())
        page.get_by_label("where").select_option(where)
        page.get_by_label("words to find").fill(word)
        settle(page)
        assert (1, 7) in hits(page)


def test_the_widget_computes_what_is_asked_for_and_keeps_notes(browser, tiny_run, tmp_path):
    trace.aggregate_run(tiny_run, tokens=256).save(tmp_path / "a.npz")
    view = {"layer": 1, "neuron": 5, "aggregate": tmp_path / "a.npz"}
    widget = twell.inspect(tiny_run, "ba de fun", **view)
    page = browser.new_page()
    show_live(page, widget)
    page.locator(".tw-both-words").wait_for()
    page.locator(".tw-tabs button").nth(1).wait_for()
    page.locator(".tw-noting").fill("ends of words")
    page.keyboard.press("Tab")
    page.locator("summary").click()
    page.get_by_label("state").select_option("all")
    page.get_by_label("where").select_option("note")
    page.get_by_label("words to find").fill("ends")
    page.locator("[role=status]", has_text="1 of 192 neurons").wait_for()
    assert (tiny_run / "notes.txt").read_text() == "1:5 ends of words\n"
    # What is known of the neurons stays when there is another text, or none.
    for text in ("de", ""):
        widget.texts = [text]
        settle(page)
        assert hits(page) == [(1, 5)] and page.locator(".tw-both-words .tw-word").count() == 20
    page.close()
