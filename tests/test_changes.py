"""Two sides of the inspector, compared or changed: in Python, and in a browser that clicks."""

import copy
import dataclasses

import nbformat
import numpy as np
import pytest
import torch
import traitlets
from nbclient import NotebookClient
from nbconvert import HTMLExporter

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
    assert len(widget.sides) == 1 and all(ffn.edit is None for ffn in model.ffns)


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


@torch.no_grad()
def test_direct_effects_sum_to_the_logits(pair):
    """Against plain torch in fp64: what attention and each neuron write, behind the last norm."""
    model, _ = pair
    side, attention = twell.inspect(pair, "ba de fun de ba").sides[0], []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *each: attention.append(each[2][0][0]))
        for layer in model.model.layers
    ]
    ids = torch.tensor(side.trace.token_ids.astype(int))
    output = model(input_ids=ids[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    h = [torch.tensor(side.trace.layer(layer).toarray()).double() for layer in range(2)]
    down = [ffn.down_proj.weight.T.double() for ffn in model.ffns]
    writes = [output.hidden_states[0][0].double(), *(one.double() for one in attention)]
    stream = sum(writes) + sum(one @ rows for one, rows in zip(h, down, strict=True))
    norm, head, logits = model.model.norm, model.lm_head.weight, output.logits[0].double()
    scale = (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    for word, at in enumerate((logits.argmax(-1), ids.roll(-1))):
        to = (head[at] - head.mean(0)).double() * norm.weight.double() * scale
        to[len(ids) - word :] = 0  # no word follows the last token
        start, *rest = ((one * to).sum(-1) for one in writes)
        each = [one * (to @ rows.T) for one, rows in zip(h, down, strict=True)]
        sums = torch.stack([one.sum(-1) for one in each], 1)
        fired = torch.cat([one[values != 0] for one, values in zip(each, h, strict=True)])
        expected = (start, torch.stack(rest, 1), sums, fired)
        for found, values in zip(side.direct, expected, strict=True):
            np.testing.assert_allclose(found[..., word], values, rtol=1e-3, atol=2e-6)
        total = (start + sum(rest) + sums.sum(1))[: len(ids) - word]
        centred = (logits - logits.mean(-1, keepdim=True)).gather(1, at[:, None])[: len(total), 0]
        np.testing.assert_allclose(total, centred, rtol=1e-4, atol=1e-5)


def test_silencing_each_is_the_model_without_the_neuron(pair):
    model, tokenizer = pair
    widget = twell.inspect(pair, TEXT)
    widget.silence_each(3)
    layers, neurons, rises = widget.sides[0].silenced
    share = widget.to_frame().query("position > 0").groupby(["layer", "neuron"])["share"].max()
    assert share[list(zip(layers, neurons, strict=True))].min() >= share.nlargest(3).min()
    for layer, neuron, rise in zip(layers, neurons, rises, strict=True):
        by_hand = copy.deepcopy(model)
        by_hand.ffns[layer].down_proj.weight.data[:, neuron] = 0
        expected = widget.trace.logprob - trace_text(by_hand, tokenizer, TEXT).logprob
        np.testing.assert_allclose(rise, expected, rtol=1e-4, atol=1e-5)
        assert np.nanmax(np.abs(rise)) > 1e-4


@in_browser
def test_a_page_has_direct_effects_and_silences(open_page, pair):
    side = twell.inspect(pair, TEXT).sides[0]
    inspector.silence_each(side, 4)
    (layer, *_), (neuron, *_), (rise, *_) = side.silenced
    page = open_page([side], {"token": 12})
    token = np.concatenate([side.trace.layer(n).tocoo().coords[0] for n in range(2)])
    largest = np.abs(side.direct.neurons[token == 12]).max()
    rows = page.locator("button.tw-effect")
    shown = [float(text.replace("\u2212", "-")) for text in rows.first.locator("b").all_inner_texts()]
    assert max(map(abs, shown[:2])) == pytest.approx(largest, rel=0.06)
    logit = page.locator(".tw-effects .tw-item", has_text="logit").locator("b").first.inner_text()
    total = side.direct.start[12, 0] + (side.direct.attention + side.direct.sums)[12, :, 0].sum()
    assert float(logit) == pytest.approx(total, rel=0.06)
    assert violations(page) == []
    page.goto(f"{page.url}#layer={layer}&neuron={neuron}")
    page.get_by_role("button", name="silence", exact=True).click()
    before = -np.nanmean(side.trace.logprob)
    line = f"loss {before:.3f} \u2192 {before + np.nanmean(rise):.3f} nats"
    page.locator(".tw-strip-of-changes", has_text=line).wait_for()
    colours = coloured(page)
    assert all(sign == np.sign(rise[n]) for n, sign in colours.items()) and colours
    assert violations(page) == []


@in_browser
def test_an_exported_notebook_shows_the_view_without_a_network(browser, model, tmp_path):
    code = f"import twell\ntwell.inspect({str(model)!r}, 'ba de fun', token=2)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3").execute()
    (tmp_path / "exported.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((tmp_path / "exported.html").as_uri())
    page.frame_locator(".twell-page").locator(".tw-token").wait_for()
    page.frame_locator(".twell-page").locator(".tw-t").first.click()
    page.frame_locator(".twell-page").locator(".tw-token", has_text="token 0").wait_for()
    context.close()


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
    strings = widget.trace.strings
    words = [text.startswith(" ") and text != " " for text in strings]
    chosen = np.array(words) | (widget.trace.position == 0)
    assert sum(chosen) == page.locator(".tw-member").count() / 2
    losses = [-np.nanmean(side.trace.logprob[chosen]) for side in widget.sides]
    line = f"at the selected tokens {losses[0]:.3f} \u2192 {losses[1]:.3f} nats"
    assert line in strip.text_content()


# --- two sides


def test_what_can_be_compared_is_said(pair):
    other = copy.deepcopy(pair[0]), pair[1]
    header, _ = unpack(twell.inspect(pair, TEXT, compare=other).data)
    assert (header["aligned"], header["same"], header["paired"]) == (True, False, True)
    assert header["reasons"] == []
    pair_of_texts = unpack(twell.inspect(pair, (TEXT, "de")).data)[0]
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
    page.locator(".tw-neuron").nth(1).wait_for()
    assert texts(page, ".tw-neuron .tw-of") == ["a", "b"]
    columns = [layers(one)[layer][:, neuron] for one in two]
    facts = page.locator(".tw-neuron .tw-fact", has_text="strongest here").locator("b")
    for shown, column in zip(facts.all_text_contents(), columns, strict=True):
        strongest = column[np.abs(column).argmax()]
        assert float(shown.replace("\u2212", "-")) == pytest.approx(strongest, rel=6e-3)
    ends = texts(page, ".tw-legend")
    assert ends[0] == ends[2] and ends[1] == ends[3]
    page.get_by_label("right: difference to left").check()
    settle(page)
    change = columns[1] - columns[0]
    later = np.flatnonzero((two[0].position > 0) & (change != 0))
    assert coloured(page, 1) == {t: np.sign(change[t]) for t in later} != {}
    page.locator(".tw-t").nth(5).click()
    assert violations(page) == []
