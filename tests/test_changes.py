"""Two sides of the inspector, compared or changed: in Python, and in a browser that clicks."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import traitlets

import twell
from tests.browser import coloured, in_browser, settle, texts, violations
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace, unpack
from twell import inspector, trace
from twell.inspector import Side
from twell.trace import trace_text

TEXT = "ba de fun " * 9


def test_predictions_are_the_models(pair):
    model, tokenizer = pair
    widget = twell.inspect(pair, TEXT)
    parts = torch.tensor(trace.encode(tokenizer, TEXT)).split(model.config.max_position_embeddings)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
    probability = logits.softmax(-1).numpy()
    predicted = widget.sides[0].predictions
    np.testing.assert_allclose(predicted.probability, -np.sort(-probability)[:, :10], rtol=1e-4)
    own = np.take_along_axis(probability, predicted.ids, -1)
    np.testing.assert_allclose(own, predicted.probability, rtol=1e-4)
    table = widget.predictions(5)
    assert table["probability"].tolist() == predicted.probability[5].tolist()
    assert table["text"].tolist() == trace.token_strings(tokenizer, predicted.ids[5])
    # A trace has them by its model; without one none are known.
    traced = trace_text(model, tokenizer, TEXT)
    by_trace = twell.inspect(traced, model=pair).sides[0].predictions
    np.testing.assert_allclose(by_trace.probability, predicted.probability, rtol=1e-5)
    with pytest.raises(ValueError, match="ran no model"):
        twell.inspect(traced, token=3).predictions()


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
    later = [one.trace.layer(1).toarray() for one in (after, widget.sides[0])]
    np.testing.assert_allclose(later[0], expected.layer(1).toarray(), rtol=1e-3, atol=1e-5)
    assert not np.array_equal(*later)
    header, _ = unpack(widget.data)
    assert header["aligned"] and [side["changes"] for side in header["sides"]] == [[], changes]
    widget.texts = ["de fun"]  # changes stay when another text is run
    assert widget.sides[1].trace.strings == widget.sides[0].trace.strings and widget.error == ""
    widget.changes = []
    assert len(widget.sides) == 1
    assert all(ffn.edit is None for ffn in model.ffns)


def test_changes_that_cannot_be_are_refused(pair):
    traced = trace_text(*pair, TEXT)
    one, fine = twell.inspect(pair, "ba"), {"layer": 0, "neuron": 1, "scale": 0}
    for view, change, words in [
        (one, {"layer": 2, "neuron": 0, "scale": 0}, "layer 2"),
        (one, {"layer": 0, "neuron": 96, "scale": 0}, "neuron 96"),
        (twell.inspect(pair, ("ba", "de")), fine, "compares already"),
        (twell.inspect(traced, model=pair, start=3), fine, "position 3"),
    ]:
        with pytest.raises(traitlets.TraitError, match=words):
            view.changes = [change]
        assert view.changes == []


@in_browser
def test_a_click_silences_a_neuron(live, pair):
    widget = twell.inspect(pair, TEXT)
    h = widget.trace.layer(0)
    token = int(np.flatnonzero((widget.trace.position > 0) & (np.diff(h.indptr) > 0))[3])
    row = h[[token]]
    neuron = int(row.indices[np.abs(row.data).argmax()])
    page = live(widget)
    page.locator(".tw-t").nth(token).click()
    page.locator(".tw-layer-name").first.click()
    page.locator("button.tw-entry").first.click()
    page.get_by_role("button", name="silence").click()
    strip = page.locator(".tw-strip-of-changes")
    strip.wait_for()
    assert widget.changes == [{"layer": 0, "neuron": neuron, "scale": 0}]
    losses = [-np.nanmean(side.trace.logprob) for side in widget.sides]
    assert f"loss {losses[0]:.3f} \u2192 {losses[1]:.3f} nats" in strip.text_content()
    # The view opens on what changed: the surprise of each token.
    assert widget.view["colour"] == "surprise" and widget.view["difference"]
    assert coloured(page, 1).keys() != set()
    # Later layers are shown as they became, beside what they were.
    before, after = widget.sides
    counts = [int(count) for count in texts(page, ".tw-token .tw-count")]
    assert counts == [*before.trace.counts()[:, token], *after.trace.counts()[:, token]]
    page.get_by_text("undo all").click()
    strip.wait_for(state="detached")
    assert widget.changes == [] and page.locator(".tw-text").count() == 1


@in_browser
def test_neurons_of_the_list_are_silenced_together(live, pair):
    widget = twell.inspect(pair, TEXT)
    page = live(widget)
    page.get_by_text("Neurons that are a class").click()
    page.get_by_label("class of tokens").select_option("word start")
    settle(page)
    names = [page.locator("button.tw-hit b").nth(n).text_content() for n in (0, 2)]
    for name in names:
        page.get_by_label(f"choose {name}", exact=True).check()
    page.get_by_role("button", name="silence 2 neurons together").click()
    strip = page.locator(".tw-strip-of-changes")
    strip.wait_for()
    pairs = [tuple(map(int, name.split(" \u00b7 "))) for name in names]
    expected = [{"layer": layer, "neuron": neuron, "scale": 0} for layer, neuron in pairs]
    assert widget.changes == expected
    # The loss at the selected tokens, too.
    strings = widget.trace.strings
    words = [text.startswith(" ") and text != " " for text in strings]
    chosen = np.array(words) | (widget.trace.position == 0)
    assert sum(chosen) == page.locator(".tw-member").count() / 2
    losses = [-np.nanmean(side.trace.logprob[chosen]) for side in widget.sides]
    line = f"at the selected tokens {losses[0]:.3f} \u2192 {losses[1]:.3f} nats"
    assert line in strip.text_content()


# --- two sides


@pytest.fixture(scope="module")
def models(tiny_run):
    """A model, and the same one trained on (as far as a test goes)."""
    model, tokenizer = twell.load(tiny_run)
    later = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in later.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    return [(network, tokenizer) for network in (model, later)]


def test_what_can_be_compared_is_said(models):
    model, later = models
    header, _ = unpack(twell.inspect(model, TEXT, compare=later).data)
    assert (header["aligned"], header["same"], header["paired"]) == (True, False, True)
    assert header["reasons"] == []
    pair_of_texts = unpack(twell.inspect(model, (TEXT, "de")).data)[0]
    assert pair_of_texts["paired"] and pair_of_texts["same"]
    assert "different tokens" in pair_of_texts["reasons"][0]
    first, second = make_trace(SEED)[0], make_trace(SEED, num_layers=2, intermediate_size=500)[0]
    sizes = unpack(inspector.pack([Side("a", first), Side("b", second)]))[0]
    assert not sizes["paired"] and "3 layers of 300 and 2 layers of 500" in sizes["reasons"][1]


@pytest.fixture
def two():
    """Two traces of the same tokens and sizes, where values differ a little."""
    first, _ = make_trace(SEED, num_tokens=40, context=40)
    random = np.random.default_rng(SEED)
    second = dataclasses.replace(first, values=first.values.copy())
    changed = random.random(len(first.values)) < 0.2
    second.values[changed] *= random.uniform(0.2, 3, changed.sum()).astype(np.float32)
    return first, second


def layers(passage):
    return np.stack([passage.layer(layer).toarray() for layer in range(passage.num_layers)])


def test_the_neurons_that_changed_most(two):
    first, second = two
    later = first.position > 0
    change = abs(layers(second) - layers(first))[:, later].mean(1)
    header, _ = unpack(inspector.pack([Side("early", first), Side("late", second)]))
    most = np.sort(change, axis=None)[::-1][:20]
    np.testing.assert_allclose([mean for _, _, mean in header["changed"]], most, rtol=1e-5)
    for layer, neuron, mean in header["changed"]:
        assert mean == pytest.approx(change[layer, neuron], rel=1e-5)
    same, _ = unpack(inspector.pack([Side("early", first), Side("late", first)]))
    assert same["changed"] == []


@in_browser
def test_the_same_neuron_in_two_checkpoints(open_page, two):
    sides = [Side(name, one, aggregate_of(one)) for name, one in zip("ab", two, strict=True)]
    page = open_page(sides)
    row = page.locator(".tw-changed-most button.tw-entry").nth(1)
    name = row.locator("span").first.text_content()
    row.click()
    layer, neuron = map(int, name.split(" \u00b7 "))
    # Two cards, each of its own side, and one scale.
    page.locator(".tw-neuron").nth(1).wait_for()
    assert texts(page, ".tw-neuron .tw-of") == ["a", "b"]
    columns = [layers(one)[layer][:, neuron] for one in two]
    facts = page.locator(".tw-neuron .tw-fact", has_text="strongest here").locator("b")
    for shown, column in zip(facts.all_text_contents(), columns, strict=True):
        strongest = column[np.abs(column).argmax()]
        assert float(shown.replace("\u2212", "-")) == pytest.approx(strongest, rel=6e-3)
    ends = texts(page, ".tw-legend svg")
    assert ends[0] == ends[2] and ends[1] == ends[3]
    # The difference of h at each token.
    page.get_by_label("right: difference to left").check()
    settle(page)
    change = columns[1] - columns[0]
    later = np.flatnonzero((two[0].position > 0) & (change != 0))
    assert coloured(page, 1) == {t: np.sign(change[t]) for t in later} != {}
    page.locator(".tw-t").nth(5).click()
    assert violations(page) == []
