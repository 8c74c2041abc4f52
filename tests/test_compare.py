"""Two sides of the inspector: what can be compared, in Python and in a browser that clicks."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import twell
from tests.browser import coloured, in_browser, settle, texts
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace, unpack
from twell import inspector
from twell.inspector import Side

TEXT = "ba de fun " * 9


@pytest.fixture(scope="module")
def models(tiny_run):
    """A model, the same one trained on (as far as a test goes), and an unrelated one."""
    model, tokenizer = twell.load(tiny_run)
    later, other = copy.deepcopy(model), type(model)(model.config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in later.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    return [(network, tokenizer) for network in (model, later, other)]


def test_what_can_be_compared_is_said(models):
    model, later, other = models
    header, arrays = unpack(twell.inspect(model, TEXT, compare=later).data)
    assert (header["aligned"], header["same"], header["paired"]) == (True, False, True)
    assert header["reasons"] == []
    alike_in, alike_out = [], []
    for one, two in zip(model[0].ffns, later[0].ffns, strict=True):
        alike_in.append(F.cosine_similarity(one.gate_proj.weight, two.gate_proj.weight, 1))
        alike_out.append(F.cosine_similarity(one.down_proj.weight, two.down_proj.weight, 0))
    for name, expected in (("alike_in", alike_in), ("alike_out", alike_out)):
        np.testing.assert_allclose(arrays[name], torch.cat(expected).detach(), atol=5e-3)
    unrelated = unpack(twell.inspect(model, TEXT, compare=other).data)[0]
    assert "equal numbers are hardly the same neurons" in unrelated["reasons"][0]
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
    ends = texts(page, ".tw-ticks")
    assert ends[0] == ends[2] and ends[1] == ends[3]
    # The difference of h at each token.
    page.get_by_label("right: difference to left").check()
    settle(page)
    change = columns[1] - columns[0]
    later = np.flatnonzero((two[0].position > 0) & (change != 0))
    assert coloured(page, 1) == {t: np.sign(change[t]) for t in later} != {}
