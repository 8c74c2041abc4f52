"""Finding neurons in a browser: the search, the scatter, the cards of all neurons, notes."""

import numpy as np

import twell
from tests.browser import IN_BROWSER, click, keep, settle, show_live, texts, values
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
    """The neurons of the list, (layer, neuron)."""
    names = texts(page, "button.tw-hit b")
    return [tuple(int(number) for number in name.split(" \u00b7 ")) for name in names]


def test_neurons_are_found_by_their_examples(open_page):
    passage, mask = make_trace(SEED, num_tokens=300)
    counted = aggregate_of(passage)
    page = open_page([Side("random", passage, counted)])
    page.locator("summary").click()
    fires = mask.sum(1)

    def found(number):
        page.locator(".tw-browse [role=status]", has_text=f"{number} of 900 neurons").wait_for()
        while page.locator(".tw-found .tw-more").count():
            click(page, ".tw-found .tw-more")
        return hits(page)

    alive = np.argwhere(fires > 0).tolist()
    strength = counted.abs_sum / np.maximum(fires, 1)
    strength = float32(inspector.leading(strength, 24), 8)  # as in the browser
    order = sorted(alive, key=lambda one: (-strength[*one], one))
    np.testing.assert_array_equal(found(len(alive)), order)
    query, where = page.get_by_label("words to find"), page.get_by_label("where")
    for mode, inside in [
        ("fires at", lambda ids, here: ids[here] == 5),
        ("text around", lambda ids, here: 5 in ids),
    ]:
        where.select_option(mode)
        query.fill("5")
        counts = {
            (layer, neuron): sum(inside(*one) for one in examples(counted, layer, neuron))
            for layer, neuron in alive
        }
        matching = [one for one, count in counts.items() if count]
        order = sorted(matching, key=lambda one: (-counts[one], -strength[*one], one))
        assert found(len(matching)) == order
        matches = texts(page, "button.tw-hit > span:last-child")
        assert matches == [f"{counts[one]} of 13" for one in order]
    page.get_by_label("layer", exact=True).select_option("layer 1")
    in_layer = [one for one in order if one[0] == 1]
    assert found(len(in_layer)) == in_layer
    page.get_by_label("sort").select_option("fires")
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
    layer, neuron = hits(page)[2]
    click(page, "button.tw-hit", 2)
    assert page.locator(".tw-hit[aria-current=true]").count() == 1
    assert page.input_value("[data-focus=neuron]") == str(neuron)
    assert f"layer={layer}" in page.evaluate("location.hash")
    keep(page, "find")


def test_neurons_are_brushed(open_page):
    passage, mask = make_trace(SEED, num_tokens=300)
    page = open_page([Side("random", passage, aggregate_of(passage))])
    page.locator("summary").click()
    status = page.locator(".tw-browse [role=status]")
    status.locator("text=of 900 neurons").wait_for()
    fires = mask.sum(1)
    page.get_by_label("upright axis").select_option("layer")
    settle(page)
    canvas = page.locator(".tw-points")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    # The right part of the row of layer 0, which is the lowest.
    bottom, high = box["y"] + 300 - 34, (300 - 34 - 8) / 3
    page.mouse.move(box["x"] + box["width"] - 8, bottom - 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, bottom - high + 2, steps=5)
    page.mouse.up()
    settle(page)
    low, top = fires[fires > 0].min() / 1.2, fires.max() * 1.2
    share = (box["width"] / 2 - 58) / (box["width"] - 12 - 58)
    least = low * (top / low) ** share
    expected = {(0, int(n)) for n in np.flatnonzero(fires[0] >= least)}
    while page.locator(".tw-found .tw-more").count():
        click(page, ".tw-found .tw-more")
    assert set(hits(page)) == expected and len(expected) > 3
    keep(page, "brush")
    status.get_by_text("clear brush").click()
    page.locator(".tw-browse [role=status]", has_text=f"{(fires > 0).sum()} of").wait_for()
    # A click takes the nearest point.
    n = int(fires[0].argmax())
    x = np.log(fires[0, n] / low) / np.log(top / low) * (box["width"] - 70) + 58
    y = bottom - high * (0.5 + 0.7 * (n / 300 - 0.5))
    page.mouse.click(box["x"] + x, y)
    settle(page)
    assert page.input_value("[data-focus=neuron]") == str(n)


def shaded(page, number):
    """Of an example the tokens: whether more orange (+1) or blue (-1), else 0.

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
    passage, mask = make_trace(SEED, num_tokens=300)
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
            sequence, _, ids, here = counted.context(at)
            expected = np.sign(h[at - here : at - here + len(ids)])
            assert shaded(page, number) == expected.tolist() and passage.sequence[at] == sequence
    # Examples are of this passage: a click goes there.
    click(page, "button.tw-place", 0)
    token = counted.quantile_at[layer, neuron, 0]
    assert page.evaluate("() => document.querySelector('.tw-pinned').number") == token
    assert page.locator(".tw-quantile").count() == 5
    together = counted.together_at[layer, neuron]
    chips = texts(page, "[data-kin=together] .tw-chip span")
    assert chips == [str(n) for n in together if n >= 0] and chips
    click(page, "[data-kin=together] .tw-chip")
    assert page.input_value("[data-focus=neuron]") == chips[0]
    for theme, width in (("light", 1400), ("dark", 700)):
        page = open_page([side], view, width, theme, wait=".tw-tabs button + button")
        page.locator("summary").click()
        page.locator("button.tw-hit").first.wait_for()
        click(page, ".tw-tabs button", 1)
        keep(page, f"card-{width}-{theme}")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    # Statistics of an older version keep h at the place alone, and say so.
    counted.near, counted.together_at = np.zeros((3, 300, 0, 0), np.int8), together[:0]
    counted.together = np.zeros((3, 300, 0), np.float32)
    counted.together_at = np.full((3, 300, 0), -1)
    page = open_page([side], view, wait=".tw-tabs button + button")
    click(page, ".tw-tabs button", 1)
    assert sum(map(abs, shaded(page, 0))) == 1 and page.locator(".tw-kin").count() == 0
    assert "keep h at the marked token alone" in texts(page, ".tw-places > .tw-quiet")[0]


def test_neighbours_across_layers(open_page, tiny_run):
    model, tokenizer = twell.load(tiny_run)
    passage = trace.trace_text(model, tokenizer, "ba de fun")
    counted = trace.aggregate_run(tiny_run, tokens=256)
    side = Side("tiny", passage, counted, model, tokenizer)
    gates, outputs = (
        [(rows / rows.norm(dim=1, keepdim=True)).detach().numpy() for rows in own]
        for own in (
            [ffn.gate_proj.weight for ffn in model.ffns],
            [ffn.down_proj.weight.t() for ffn in model.ffns],
        )
    )

    def shown(page, kin):
        names = texts(page, f"[data-kin={kin}] .tw-chip span")
        sizes = values(page, f"[data-kin={kin}] .tw-chip b")
        return [tuple(map(int, name.split(" \u00b7 "))) for name in names], sizes

    page = open_page([side], {"layer": 0, "neuron": 7}, wait="[data-kin=read]")
    titles = texts(page, ".tw-kins h5")
    assert titles == ["In layer 0", "In all layers: layer \u00b7 neuron"]
    for kin, row, others, layers in [
        ("down", outputs[0][7], outputs, (0, 1)),
        ("read", outputs[0][7], gates, (1,)),
    ]:
        names, sizes = shown(page, kin)
        expected = [others[layer][n] @ row for layer, n in names]
        np.testing.assert_allclose(sizes, expected, rtol=0.06)
        every = [abs(others[layer] @ row) for layer in layers]
        if kin == "down":
            every[0][7] = 0
        largest = np.sort(np.concatenate(every))[::-1][:5]
        np.testing.assert_allclose(np.abs(expected), largest, rtol=1e-4)
        assert {layer for layer, _ in names} <= {*layers} and len(names) == 5
    # A click goes to the other layer, which reads what the neuron writes.
    assert page.locator("[data-kin=written]").count() == 0
    reader = shown(page, "read")[0][0]
    click(page, "[data-kin=read] .tw-chip")
    page.locator("[data-kin=written]").wait_for()
    picked = [page.input_value(f"[data-focus={name}]") for name in ("layer", "neuron")]
    assert picked == [str(number) for number in reader]
    names, sizes = shown(page, "written")
    expected = [outputs[layer][n] @ gates[1][reader[1]] for layer, n in names]
    np.testing.assert_allclose(sizes, expected, rtol=0.06)
    largest = np.sort(abs(outputs[0] @ gates[1][reader[1]]))[::-1][:5]
    np.testing.assert_allclose(np.abs(expected), largest, rtol=1e-4)
    assert page.locator("[data-kin=read]").count() == 0
    for width, theme in ((1400, "light"), (1400, "dark"), (700, "light")):
        view = {"layer": 0, "neuron": 7}
        page = open_page([side], view, width, theme, wait="[data-kin=read]")
        keep(page, f"neighbours-{width}-{theme}")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


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
    words = np.array(texts(page, ".tw-word .tw-pill")).reshape(2, -1).tolist()
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
    page.locator(".tw-word").first.wait_for()
    page.locator(".tw-tabs button").nth(1).wait_for()
    page.locator(".tw-noting").fill("ends of words")
    page.keyboard.press("Tab")
    page.locator("summary").click()
    page.get_by_label("state").select_option("all")
    page.get_by_label("where").select_option("note")
    page.get_by_label("words to find").fill("ends")
    page.locator("[role=status]", has_text="1 of 192 neurons").wait_for()
    assert (tiny_run / "notes.txt").read_text() == "1:5 ends of words\n"
    # Another text: what is known of the neurons stays.
    widget.texts = ["de"]
    assert hits(page) == [(1, 5)] and page.locator(".tw-word").count() == 20
    page.close()
