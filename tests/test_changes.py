"""Changing neurons in the inspector, and predictions: in Python, and in a browser that clicks."""

import copy

import numpy as np
import pytest
import torch
import traitlets

import twell
from tests.browser import in_browser, show_live, texts
from tests.factories import SEED
from tests.factories.inspector import make_trace, unpack
from twell import trace
from twell.trace import trace_text

TEXT = "ba de fun " * 9


@pytest.fixture(scope="module")
def pair(tiny_run):
    return twell.load(tiny_run)


@torch.no_grad()
def expected_predictions(model, ids):
    """By one pass: probabilities of every token after each."""
    context = model.config.max_position_embeddings
    parts = [torch.tensor([ids[n : n + context]]) for n in range(0, len(ids), context)]
    return np.concatenate([model(input_ids=part).logits[0].softmax(-1).numpy() for part in parts])


def test_predictions_are_the_models(pair):
    model, tokenizer = pair
    widget = twell.inspect(pair, TEXT)
    ids = trace.encode(tokenizer, TEXT)
    probability = expected_predictions(model, ids)
    predicted = widget.sides[0].predictions
    np.testing.assert_allclose(predicted.probability, -np.sort(-probability)[:, :10], rtol=1e-4)
    own = np.take_along_axis(probability, predicted.ids, -1)
    np.testing.assert_allclose(own, predicted.probability, rtol=1e-4)
    table = widget.predictions(5)
    assert table["probability"].tolist() == predicted.probability[5].tolist()
    assert table["text"].tolist() == trace.token_strings(tokenizer, predicted.ids[5])
    assert table["model"].unique().tolist() == ["model"]
    with pytest.raises(ValueError, match="no token is selected"):
        widget.predictions()
    header, arrays = unpack(widget.data)
    words = [header["sides"][0]["expected"][n] for n in arrays["0.expected"]]
    assert words == trace.token_strings(tokenizer, predicted.ids.reshape(-1))
    np.testing.assert_allclose(arrays["0.probability"], predicted.probability.reshape(-1), 4e-3)
    # A trace has them by its model; without one none are known.
    traced = trace_text(model, tokenizer, TEXT)
    by_trace = twell.inspect(traced, model=pair).sides[0].predictions
    np.testing.assert_allclose(by_trace.probability, predicted.probability, rtol=1e-5)
    view = twell.inspect(traced, token=3)
    assert "0.expected" not in unpack(view.data)[1]
    with pytest.raises(ValueError, match="ran no model"):
        view.predictions()


def test_changes_run_the_model_again(pair):
    model, tokenizer = pair
    widget = twell.inspect(pair, TEXT)
    before, neuron = widget.sides[0], int(widget.trace.layer(0).indices[0])
    changes = [
        {"layer": 0, "neuron": neuron, "scale": 0},
        {"layer": 0, "neuron": neuron + 1, "value": 2.0},
        {"layer": 1, "neuron": 3, "scale": -4.0},
    ]
    widget.changes = changes
    assert len(widget.sides) == 2 and widget.sides[0] is before and not widget.busy
    after = widget.sides[1]
    by_hand = copy.deepcopy(model)
    first, second = (ffn.down_proj for ffn in by_hand.ffns)
    constant = 2.0 * first.weight[:, neuron + 1].detach()
    first.register_forward_hook(lambda module, _, y: y + constant)
    first.weight.data[:, [neuron, neuron + 1]] = 0
    second.weight.data[:, 3] *= -4
    expected = trace_text(by_hand, tokenizer, TEXT)
    np.testing.assert_allclose(after.trace.logprob, expected.logprob, rtol=2e-4, atol=1e-5)
    assert np.abs(after.trace.logprob - before.trace.logprob)[1:].max() > 1e-3
    same = after.trace.layer(0) - before.trace.layer(0)
    assert not same.data.any()  # its own layer computes as before, the next one does not
    np.testing.assert_allclose(
        after.trace.layer(1).toarray(), expected.layer(1).toarray(), rtol=1e-3, atol=1e-5
    )
    probability = expected_predictions(by_hand, trace.encode(tokenizer, TEXT))
    np.testing.assert_allclose(
        after.predictions.probability, -np.sort(-probability)[:, :10], rtol=2e-3
    )
    header, _ = unpack(widget.data)
    assert header["aligned"] and header["same"]
    assert [side["changes"] for side in header["sides"]] == [[], changes]
    assert after.name == "model, changed"
    widget.side = 1
    assert widget.to_frame()["model"].unique().tolist() == ["model, changed"]
    widget.texts = ["de fun"]  # changes stay when another text is run
    assert widget.sides[1].trace.strings == widget.sides[0].trace.strings and widget.error == ""
    widget.texts = [""]
    assert [side.trace.num_tokens for side in widget.sides] == [0, 0] and widget.error == ""
    widget.changes = []
    assert len(widget.sides) == 1 and widget.side == 0
    assert all(ffn.edit is None for ffn in model.ffns)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": 2, "neuron": 0, "scale": 0}, "layer 2"),
        ({"layer": 0, "neuron": 96, "scale": 0}, "neuron 96"),
        ({"layer": 0, "neuron": 1}, "scale or value"),
        ({"layer": 0, "neuron": 1, "scale": float("inf")}, "finite"),
        ({"layer": 0, "scale": 1}, "layer, neuron, and scale or value"),
        ({"layer": 0, "neuron": 1, "factor": 1}, "layer, neuron, and scale or value"),
    ],
)
def test_changes_that_do_not_exist_are_refused(pair, change, words):
    widget = twell.inspect(pair, "ba")
    with pytest.raises(traitlets.TraitError, match=words):
        widget.changes = [change]
    assert widget.changes == [] and len(widget.sides) == 1


def test_views_that_cannot_change_say_why(pair):
    traced = trace_text(*pair, TEXT)
    for view, words in [
        (twell.inspect(pair, ("ba", "de")), "compares already"),
        (twell.inspect(make_trace(SEED)[0]), "there is no model"),
        (twell.inspect(traced, model=pair, start=3), "begins at position 3"),
    ]:
        with pytest.raises(traitlets.TraitError, match=words):
            view.changes = [{"layer": 0, "neuron": 1, "scale": 0}]


# --- in a browser


@pytest.fixture
def live(browser):
    """Open a page with a live widget; an error in it fails the test."""
    wrong = []
    page = browser.new_page()
    for event in ("console", "pageerror"):
        page.on(event, lambda said, event=event: wrong.append(f"{event}: {said}"))

    def go(widget):
        show_live(page, widget)
        return page

    yield go
    page.close()
    assert not wrong


def shown_predictions(page, card):
    """Of a token card: words with their percentages, and the one that comes."""
    chips = page.locator(".tw-token").nth(card).locator(".tw-expected")
    pairs = chips.evaluate_all(
        """(nodes) => nodes.map((node) => [node.querySelector(".tw-pill").textContent,
            parseFloat(node.querySelector("b").textContent.replace("<", ""))])"""
    )
    comes = page.locator(".tw-token").nth(card).locator(".tw-comes .tw-pill")
    return pairs, comes.all_text_contents()


@in_browser
def test_a_click_silences_a_neuron(live, pair):
    widget = twell.inspect(pair, TEXT)
    h = widget.trace.layer(0)
    token = int(np.flatnonzero((widget.trace.position > 0) & (np.diff(h.indptr) > 0))[3])
    row = h[[token]]
    neuron = int(row.indices[np.abs(row.data).argmax()])
    other = (neuron + 1) % 96
    page = live(widget)
    page.locator(".tw-t").nth(token).click()
    before = widget.sides[0]
    pairs, comes = shown_predictions(page, 0)
    expected = before.predictions.probability[token]
    np.testing.assert_allclose([p for _, p in pairs[:10]], 100 * expected, rtol=0.06)
    assert comes == [before.trace.strings[token + 1]]
    page.locator(".tw-layer-name").first.click()
    page.locator("button.tw-entry").first.click()
    page.get_by_role("button", name="0, silent").click()
    page.locator(".tw-strip-of-changes").wait_for()
    assert widget.changes == [{"layer": 0, "neuron": neuron, "scale": 0}]
    after = widget.sides[1]
    losses = [-np.nanmean(side.trace.logprob) for side in widget.sides]
    strip = texts(page, ".tw-strip-of-changes")[0]
    assert f"loss {losses[0]:.3f} \u2192 {losses[1]:.3f} nats" in strip
    pairs, _ = shown_predictions(page, 1)
    expected = 100 * after.predictions.probability[token]
    np.testing.assert_allclose([p for _, p in pairs[:10]], expected, rtol=0.06)
    # Later layers are shown as they became, beside what they were.
    counts = texts(page, ".tw-token .tw-count")
    expected = [*before.trace.counts()[:, token], *after.trace.counts()[:, token]]
    assert [int(count) for count in counts] == expected
    # A second neuron is set, the first one scaled instead, and all is undone.
    page.locator("input[aria-label=neuron]").first.fill(str(other))
    page.keyboard.press("Tab")
    page.get_by_label("set the neuron to").first.fill("1.5")
    page.keyboard.press("Tab")
    page.locator(".tw-changed").nth(1).wait_for()
    assert widget.changes[1] == {"layer": 0, "neuron": other, "value": 1.5}
    page.locator(".tw-changed .tw-close").first.click()
    page.wait_for_function("() => document.querySelectorAll('.tw-changed').length === 1")
    page.get_by_label("scale the neuron by").first.fill("-2")
    page.keyboard.press("Tab")
    page.locator(".tw-changed", has_text="\u00d7 -2").wait_for()
    assert widget.changes == [{"layer": 0, "neuron": other, "scale": -2}]
    page.get_by_text("undo all").click()
    page.wait_for_selector(".tw-strip-of-changes", state="detached")
    assert widget.changes == [] and page.locator(".tw-text").count() == 1
