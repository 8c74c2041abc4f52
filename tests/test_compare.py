"""Two sides of the inspector: what can be compared, in Python and in a browser that clicks."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

import twell
from tests.browser import click, coloured, in_browser, keep, overlaps, settle, texts
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, float32, make_trace, unpack
from twell import inspector
from twell.inspector import Side

TEXT = "ba de fun " * 9


@pytest.fixture(scope="module")
def models(tiny_run):
    """A model, the same one trained on (as far as a test goes), and an unrelated one."""
    model, tokenizer = twell.load(tiny_run)
    later, other = copy.deepcopy(model), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for network, share, kept in ((later, 0.1, 1), (other, 1, 0)):
            for parameter in network.model.layers.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() == 2:
                    parameter.copy_(kept * parameter + share * parameter.std() * noise)
    return [(network, tokenizer) for network in (model, later, other)]


def test_what_can_be_compared_is_said(models):
    model, later, other = models
    header, arrays = unpack(twell.inspect(model, TEXT, compare=later).data)
    assert (header["aligned"], header["same"], header["paired"]) == (True, False, True)
    assert header["reasons"] == []
    for name, weight in (("alike_in", "gate_proj.weight"), ("alike_out", "down_proj.weight")):
        expected = []
        for one, two in zip(model[0].ffns, later[0].ffns, strict=True):
            a, b = (dict(ffn.named_parameters())[weight].double() for ffn in (one, two))
            a, b = (a.t(), b.t()) if name == "alike_out" else (a, b)
            expected += [(x @ y / x.norm() / y.norm()).item() for x, y in zip(a, b, strict=True)]
        np.testing.assert_allclose(float32(arrays[name]), expected, atol=5e-3)
    unrelated = unpack(twell.inspect(model, TEXT, compare=other).data)[0]
    assert "equal numbers are hardly the same neurons" in unrelated["reasons"][0]
    pair_of_texts = unpack(twell.inspect(model, (TEXT, "de")).data)[0]
    assert pair_of_texts["paired"] and pair_of_texts["same"]
    assert pair_of_texts["reasons"] == [
        "The sides have different tokens, so no token has a difference."
    ]
    first, second = make_trace(SEED)[0], make_trace(SEED, num_layers=2, intermediate_size=500)[0]
    sizes = unpack(inspector.pack([Side("a", first), Side("b", second)]))[0]
    assert not sizes["paired"] and sizes["reasons"][1:] == [
        "The models have 3 layers of 300 and 2 layers of 500 neurons: the number of a neuron at "
        "the left means no neuron at the right."
    ]
    alone = unpack(inspector.pack([Side("a", first)]))[0]
    assert not alone["paired"] and alone["reasons"] == []


@pytest.fixture
def two():
    """Two traces of the same tokens and sizes, where values differ a little."""
    first, mask = make_trace(SEED, num_tokens=40, context=40)
    random = np.random.default_rng(SEED)
    second = dataclasses.replace(first, values=first.values.copy())
    changed = random.random(len(first.values)) < 0.2
    second.values[changed] *= random.uniform(0.2, 3, changed.sum()).astype(np.float32)
    return first, second


@in_browser
def test_the_same_neuron_in_two_checkpoints(open_page, two):
    first, second = two
    sides = [Side("early", first, aggregate_of(first)), Side("late", second, aggregate_of(second))]
    later = first.position > 0
    change = np.stack(
        [abs(b - a)[later].sum(0) for a, b in zip(*(layers(one) for one in two), strict=True)]
    )
    most = np.dstack(np.unravel_index(np.argsort(-change, axis=None), change.shape))[0]
    page = open_page(sides)
    rows = texts(page, ".tw-changed-most button.tw-entry > span:first-child")
    assert rows == [f"{layer} \u00b7 {neuron}" for layer, neuron in most[:20]]
    shown = [float(text) for text in texts(page, ".tw-changed-most button.tw-entry > b")]
    expected = np.sort(change, axis=None)[::-1][:20] / later.sum()
    np.testing.assert_allclose(shown, expected, rtol=6e-3)
    click(page, ".tw-changed-most button.tw-entry", 1)
    layer, neuron = most[1].tolist()
    # Two cards, each of its own side, and one scale.
    assert texts(page, ".tw-neuron .tw-of") == ["early", "late"]
    values = [layers(one)[layer][:, neuron] for one in two]
    for card, column in enumerate(values):
        strongest = column[np.abs(column).argmax()]
        fact = page.locator(".tw-neuron").nth(card).locator(".tw-fact", has_text="strongest here")
        assert float(fact.locator("b").text_content().replace("\u2212", "-")) == pytest.approx(
            strongest, rel=6e-3
        )
    for scale in ("the same for all", "each layer its own", "each neuron its own"):
        page.get_by_label("colour scale", exact=True).select_option(scale)
        settle(page)
        ends = texts(page, ".tw-side > div > .tw-legend .tw-ticks")
        assert ends[0] == ends[1], scale
    for colour in (0, 2):
        click(page, ".tw-option", colour)
        for scale in ("the same for all", "each layer its own"):
            if page.get_by_label("colour scale", exact=True).is_enabled():
                page.get_by_label("colour scale", exact=True).select_option(scale)
            settle(page)
            ends = texts(page, ".tw-ticks")
            assert ends[0] == ends[2] and ends[1] == ends[3]
    # The difference of h at each token.
    click(page, ".tw-option", 1)
    page.get_by_label("right: difference to left").check()
    settle(page)
    expected = values[1] - values[0]
    signs = {t: np.sign(expected[t]) for t in np.flatnonzero(later & (expected != 0))}
    assert coloured(page, 1) == signs and signs
    assert "difference to early: h of layer" in texts(page, ".tw-legend .tw-label")[2]
    assert "difference=yes" in page.evaluate("location.hash")
    view = {"token": 5, "layer": layer, "neuron": neuron, "colour": "neuron", "difference": True}
    for width, theme in ((1400, "light"), (1400, "dark"), (700, "light")):
        page = open_page(sides, view, width, theme)
        settle(page)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        assert overlaps(page) == []
        keep(page, f"checkpoints-{width}-{theme}")


def histograms(page):
    """Of both histograms the numbers of the axes, and (bin, count, left, height) of each bar."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".tw-histogram")].map((svg) => ({
            axes: [...svg.querySelectorAll("text:not(.tw-axis-name)")].map((node) =>
                [node.textContent, node.getAttribute("x"), node.getAttribute("y")].join()),
            name: svg.querySelector(".tw-axis-name").textContent,
            bars: [...svg.querySelectorAll("rect")].map((node) => [
                ...node.textContent.split(/: | tokens?$/).slice(0, 2),
                ...["x", "height"].map((side) => Number(node.getAttribute(side)))])}))"""
    )


@in_browser
@pytest.mark.parametrize("counted", ["both", "left", "none"])
def test_two_histograms_share_bins_and_axes(open_page, two, counted):
    """The right side's values are larger, and fewer."""
    first, second = two
    kept = np.random.default_rng(SEED).random(len(second.values)) < 0.6
    rows = np.repeat(np.arange(len(second.indptr) - 1), np.diff(second.indptr))
    counts = np.bincount(rows[kept], minlength=len(second.indptr) - 1)
    second = dataclasses.replace(
        second,
        values=4 * second.values[kept],
        indices=second.indices[kept],
        indptr=np.append(0, counts.cumsum()),
    )
    fires = [np.stack(layers(one)).astype(bool).sum(1) for one in (first, second)]
    layer, neuron = np.unravel_index(np.minimum(*fires).argmax(), fires[0].shape)
    aggregates = [aggregate_of(first), aggregate_of(second)]
    number = ["none", "left", "both"].index(counted)
    aggregates[number:] = [None] * (2 - number)
    sides = [
        Side(*parts) for parts in zip(("early", "late"), (first, second), aggregates, strict=True)
    ]
    view = {"layer": int(layer), "neuron": int(neuron)}
    page = open_page(sides, view)
    page.wait_for_selector(".tw-tabs button + button" if number else ".tw-histogram")
    settle(page)
    left, right = histograms(page)
    assert left["axes"] == right["axes"] and len(left["axes"]) > 5
    where = "over 40 tokens" if counted == "both" else "in this passage"
    for shown, own in zip((left, right), fires, strict=True):
        assert where in shown["name"] and f"(n = {own[layer, neuron]})" in shown["name"]
        assert sum(int(count) for _, count, _, _ in shown["bars"]) == own[layer, neuron]
    # A bin stands at one place in both, and a count has one height.
    for pairs in (
        [(bar[0], bar[2]) for bar in left["bars"] + right["bars"]],
        [(bar[1], bar[3]) for bar in left["bars"] + right["bars"]],
    ):
        assert len(set(pairs)) == len({key for key, _ in pairs}) < len(pairs)
    said = texts(page, ".tw-neuron .tw-quiet")
    assert said.count("Both histograms have the same bins and the same axes.") == 2
    if counted == "both":
        for width, theme in ((1400, "light"), (1400, "dark"), (700, "light")):
            page = open_page(sides, view, width, theme)
            settle(page)
            keep(page, f"histograms-{width}-{theme}")
    alone = open_page(sides[:1], view, wait=".tw-histogram")
    settle(alone)
    assert "Both histograms" not in " ".join(texts(alone, ".tw-quiet"))


def layers(passage):
    return [passage.layer(layer).toarray() for layer in range(passage.num_layers)]


@in_browser
def test_what_cannot_be_compared_says_why(open_page):
    first = make_trace(SEED, num_tokens=30)[0]
    second = make_trace(SEED + 1, num_tokens=20, num_layers=2, intermediate_size=500)[0]
    page = open_page([Side("a", first), Side("b", second)])
    (note,) = texts(page, ".tw-note")
    assert "different tokens, so no token has a difference" in note
    assert "3 layers of 300 and 2 layers of 500 neurons" in note
    assert page.locator(".tw-changed-most").count() == 0
    assert page.get_by_label("right: difference to left").count() == 0
    page.locator(".tw-t").nth(7).click()
    page.locator(".tw-chip").first.click()
    page.locator(".tw-neuron").wait_for()  # the card comes a frame later
