"""The atlas of a model, opened from disk in Chromium: numbers, links, times and sizes."""

import gzip
import json
import statistics

import numpy as np
import pytest
import torch

import twell
from tests.browser import IN_BROWSER, click, search, settle, texts, values
from tests.factories import SEED
from twell import inspector, results, trace
from twell.__main__ import main

pytestmark = IN_BROWSER
SHIPPED = results.root() / "data" / "checkpoints" / "twell-6m"


@pytest.fixture
def open_atlas(browser):
    """Open an atlas from disk; a message, an error, or a request but for its files fails."""
    contexts, wrong = [], []

    def go(folder, address="", wait=".tw-hit", width=1400, theme="light"):
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, color_scheme=theme))
        page = contexts[-1].new_page()
        page.files = []
        for event in ("console", "pageerror", "dialog"):
            page.on(event, lambda said, event=event: wrong.append(f"{event}: {said}"))
        page.on("request", lambda one: page.files.append(one.url.removeprefix(folder.as_uri())))
        page.goto(f"{(folder / 'index.html').as_uri()}{address}")
        page.wait_for_selector(wait, state="attached")
        return page

    yield go
    for context in contexts:
        assert all(name[0] == "/" for page in context.pages for name in page.files)
        context.close()
    assert not wrong


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The atlas of the model that ships."""
    out = tmp_path_factory.mktemp("atlas") / "twell-6m"
    inspector.write_atlas(SHIPPED, out)
    return out


def activations(model, sequences):
    """h of every layer and token, [L, T, N], from the weights and the inputs of the layers."""
    inputs = [[] for _ in model.ffns]
    hooks = [
        ffn.register_forward_pre_hook(lambda _, given, own=own: own.append(given[0][0]))
        for ffn, own in zip(model.ffns, inputs, strict=True)
    ]
    with torch.no_grad():
        for sequence in sequences:
            model(input_ids=torch.tensor([sequence]))
        for hook in hooks:
            hook.remove()
        x = [torch.cat(own) for own in inputs]
        parts = [(ffn.gate_proj.weight, ffn.up_proj.weight) for ffn in model.ffns]
        both = zip(x, parts, strict=True)
        return np.stack([((x @ g.t()).relu() * (x @ u.t())).numpy() for x, (g, u) in both])


def test_numbers_of_random_cards_are_those_of_the_model(open_atlas, tiny_run, tmp_path):
    text = "ba de fun " * 40 + "fun fun de ba " * 20
    counted = trace.aggregate_run(tiny_run, text)
    counted.save(tmp_path / "counted.npz")
    inspector.write_note(tmp_path / "mine.txt", 1, 3, "ends of words")
    command = ["atlas", str(tiny_run), "--aggregate", str(tmp_path / "counted.npz")]
    command += ["--labels", str(tmp_path / "mine.txt"), "--out", str(tmp_path / "atlas")]
    assert main(command) == 0
    model, tokenizer = twell.load(tiny_run)
    sequences = trace.cut(trace.encode(tokenizer, text), model)
    h = activations(model, sequences)
    ids = np.concatenate(sequences)
    unembedding = model.get_output_embeddings().weight * model.model.norm.weight
    random = np.random.default_rng(SEED)
    alive = np.argwhere((h != 0).any(1))
    for layer, neuron in random.permutation(alive)[:10].tolist():
        address = f"#layer={layer}&neuron={neuron}"
        page = open_atlas(tmp_path / "atlas", address, wait=".tw-word")
        page.wait_for_selector(".tw-example")
        column = h[layer, :, neuron]
        fires = column != 0
        shown = values(page, ".tw-neuron .tw-fact b")
        expected = 100 * fires.mean(), column[fires].mean(), abs(column).max()
        np.testing.assert_allclose(shown, expected, rtol=0.06, atol=0.006)
        np.testing.assert_allclose(shown[1:], expected[1:], rtol=6e-3)
        bars = texts(page, ".tw-histogram rect title")
        assert sum(int(bar.split(": ")[1].split()[0]) for bar in bars) == fires.sum()
        largest = np.sort(np.abs(column[fires]))[::-1][:8]
        np.testing.assert_allclose(np.abs(values(page, ".tw-place b")), largest, rtol=6e-3)
        places = np.lexsort((np.arange(len(ids)), -np.abs(column)))[: len(largest)]
        tokens = trace.token_strings(tokenizer, ids[places])
        pairs = zip(texts(page, ".tw-example mark"), tokens, strict=True)
        assert all(mark == token for mark, token in pairs if token.strip().isalpha())
        with torch.no_grad():
            change = unembedding @ model.ffns[layer].down_proj.weight[:, neuron]
            change = np.sort((change - change.mean()).numpy())
        logits = [*change[::-1][:10], *-change[:10]]
        np.testing.assert_allclose(
            values(page, ".tw-both-words small"), logits, rtol=6e-3, atol=1e-6
        )
    page = open_atlas(tmp_path / "atlas", "#layer=1&neuron=3", wait=".tw-noted")
    assert texts(page, ".tw-noted") == ["ends of words"]
    lines = gzip.decompress((tmp_path / "atlas" / "neurons.jsonl.gz").read_bytes()).splitlines()
    assert len(lines) == h.shape[0] * h.shape[2]
    one = json.loads(lines[h.shape[2] + 3])
    assert (one["layer"], one["neuron"], one["note"]) == (1, 3, "ends of words")
    assert one["fires"] == (h[1, :, 3] != 0).sum() and one["tokens"] == len(ids)


def test_the_shipped_atlas_is_small_and_answers_at_once(open_atlas, shipped):
    """15 MB, 2 MB of them to open; a search and a card in 100 ms."""
    sizes = {path.name: path.stat().st_size for path in shipped.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 15e6
    page = open_atlas(shipped, "#layer=5&neuron=482", wait=".tw-word")
    page.wait_for_selector(".tw-example")
    settle(page)
    opened = [name.rpartition("/")[2] for name in page.files]
    assert sum(sizes[name.partition("#")[0]] for name in opened) < 2e6, opened
    assert [page.input_value(f"input[aria-label={name}]") for name in ("layer", "neuron")] == [
        "5",
        "482",
    ]
    search(page, "warm")
    searches = [search(page, words) for words in ("congress", "the", "of the", "ba", "1913")]
    hits = page.locator("button.tw-hit")
    assert hits.count()
    cards = [click(page, "button.tw-hit", number) for number in range(min(hits.count(), 5))]
    # Another layer's chunks come from the disk.
    page.get_by_label("words to find").fill("")
    page.get_by_label("layer", exact=True).last.select_option("layer 2")
    settle(page)
    took = page.evaluate(
        """async () => {
            const start = performance.now();
            document.querySelector("button.tw-hit").click();
            const other = () => document.querySelector("input[aria-label=layer]")?.value === "2"
                && document.querySelector(".tw-example") && document.querySelector(".tw-word");
            while (!other()) await new Promise((done) => setTimeout(done));
            return performance.now() - start;
        }"""
    )
    print(f"searches {searches}, cards {cards}, of another layer {took}")
    assert statistics.median(searches) < 100 and statistics.median(cards) < 100


def test_links_open_what_they_name(open_atlas, shipped):
    page = open_atlas(shipped)
    rows = texts(page, "button.tw-layer-line > b")
    assert rows == [str(layer) for layer in range(6)] and page.locator(".tw-neuron").count() == 0
    click(page, "button.tw-layer-line", 3)
    assert all(name.startswith("3 ") for name in texts(page, "button.tw-hit b"))
    page.evaluate("location.hash = '#layer=3&neuron=49'")
    page.wait_for_selector(".tw-example")
    assert page.input_value("input[aria-label=neuron]") == "49"
    click(page, ".tw-kin .tw-chip")
    other = page.input_value("input[aria-label=neuron]")
    assert page.evaluate("location.hash") == f"#layer=3&neuron={other}" != "#layer=3&neuron=49"
    page.go_back()
    settle(page)
    assert page.input_value("input[aria-label=neuron]") == "49"
    # So is a search.
    search(page, "of the")
    page.get_by_label("sort", exact=True).select_option("fires")
    settle(page)
    expected = texts(page, "button.tw-hit")
    address = page.evaluate("location.hash")
    assert address == "#layer=3&neuron=49&words=of%20the&sort=rate"
    again = open_atlas(shipped, address)
    again.locator("[role=status]", has_text="of 4,224").wait_for()
    settle(again)
    assert texts(again, "button.tw-hit") == expected
    for nonsense in ("#layer=6&neuron=0", "#layer=x&neuron=704", "#"):
        page.evaluate("(address) => (location.hash = address)", nonsense)
        settle(page)
        assert page.locator(".tw-neuron").count() == 0


def test_an_aggregate_alone_has_an_atlas_without_words(open_atlas, tmp_path):
    recorded = results.root() / "data" / "traces" / "85m-50m-l1-6e-4-aggregate.npz"
    side = inspector.write_atlas(recorded, tmp_path / "85m")
    layer, neuron = np.unravel_index(side.aggregate.max_abs.argmax(), side.shape)
    page = open_atlas(tmp_path / "85m", f"#layer={layer}&neuron={neuron}", wait=".tw-example")
    assert "no weights: no promoted words" in texts(page, ".tw-name")[0]
    assert page.locator(".tw-word, .tw-kin").count() == 0
    assert "keep h at the marked token alone" in texts(page, ".tw-places")[0]
