"""The atlas of a model, opened from disk in Chromium: numbers, links and sizes."""

import gzip
import json

import numpy as np
import pytest

from tests.browser import IN_BROWSER, click, go_to, settle, texts, values, watch
from twell import inspector, results, trace
from twell.__main__ import main

pytestmark = IN_BROWSER
SHIPPED = results.root() / "data" / "checkpoints" / "twell-6m"


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
    inspector.write_note(tmp_path / "mine.txt", 1, 3, "ends of words")
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
    assert texts(page, ".tw-noted") == ["ends of words"]
    lines = gzip.decompress((tmp_path / "atlas" / "neurons.jsonl.gz").read_bytes()).splitlines()
    neurons = [json.loads(line) for line in lines]
    assert [one["fires"] for one in neurons] == fires.reshape(-1).tolist()
    one = neurons[fires.shape[1] + 3]
    assert (one["layer"], one["neuron"], one["note"]) == (1, 3, "ends of words")


def test_the_shipped_atlas_is_small_and_its_links_open_what_they_name(open_atlas, tmp_path):
    inspector.write_atlas(SHIPPED, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 15e6
    page = open_atlas(tmp_path)
    click(page, ".tw-overview button.tw-item", 3)
    assert all(name.startswith("3 ") for name in texts(page, "button.tw-hit b"))
    go_to(page, "layer=3&neuron=49")
    page.wait_for_selector(".tw-example")
    picked = page.locator("input[aria-label=neuron]")
    assert picked.input_value() == "49"
    click(page, ".tw-kin .tw-chip")
    other = picked.input_value()
    assert page.evaluate("location.hash") == f"#layer=3&neuron={other}" != "#layer=3&neuron=49"
    page.go_back()
    opened = "() => document.querySelector('input[aria-label=neuron]').value === '49'"
    page.wait_for_function(opened)
    # So is a search.
    page.get_by_label("words to find").fill("of the")
    settle(page)
    page.locator("[role=status]", has_text="of 4,224").wait_for()
    again = open_atlas(tmp_path, page.evaluate("location.hash"))
    again.locator("[role=status]", has_text="of 4,224").wait_for()
    assert texts(again, "button.tw-hit") == texts(page, "button.tw-hit")
    for nonsense in ("layer=6&neuron=0", "layer=x&neuron=704", ""):
        go_to(page, nonsense)
        picked.wait_for(state="detached")
