"""The inspector in a real browser: pages opened from a file, and the widget in JupyterLab; screenshots in build/screenshots."""

import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import nbformat
import numpy as np
import pytest

import twell
from tests.browser import SCREENSHOTS, chromium, why_no_browser
from tests.factories.trace import aggregate_of
from tests.test_analysis import make_trace
from twell import inspector, trace
from twell.inspector import Side
from twell.trace import Trace

pytestmark = pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))

HEBREW = [
    "\u05e9\u05dc\u05d5\u05dd",
    " \u05e2\u05d5\u05dc\u05dd",
    ",",
    " \u05d6\u05d4",
    " \u05de\u05d1\u05d7\u05df",
    ".\n",
]
HARD = [
    *("The", " Senate", " \U0001f469\u200d\U0001f467", " na\u00efve", "\n"),
    *HEBREW,
    *(
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(2)>",
        "&amp;",
        "<b>",
        "\n\n",
        "    if",
        "\t",
        "\r",
        "\x00",
    ),
    *(
        "\u202e",
        "\u200b",
        "\u00a0",
        "<0xF0><0x9F>",
        "<0x91>",
        "<0xA9>",
        " ",
        "",
        "\u4e2d\u6587",
        "<|end|>",
        "\n  x",
    ),
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a page from a file; whatever it logs, asks the network for or stumbles over fails the test."""
    contexts, wrong = [], []

    def go(sides, view=None, width=1400, theme="light", wait=".tw-bar"):
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(
            sides if isinstance(sides, str) else inspector.page(sides, view), encoding="utf-8"
        )
        contexts.append(
            browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        )
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        page.on(
            "request",
            lambda request: request.url == path.as_uri() or wrong.append(f"request: {request.url}"),
        )
        page.goto(path.as_uri())
        page.wait_for_selector(wait, state="attached")
        return page

    yield go
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def seed():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


def keep(page, name):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def settle(page):
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def click(page, selector, number=0):
    """Click as a script does, and return the milliseconds until it is drawn."""
    return page.evaluate(
        """async ([selector, number]) => {
            const node = document.querySelectorAll(selector)[number], start = performance.now();
            node.click();
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            return performance.now() - start;
        }""",
        [selector, number],
    )


def texts(page, selector):
    return page.eval_on_selector_all(selector, "(nodes) => nodes.map((node) => node.textContent)")


def value(text):
    return float(text.replace("\u2212", "-").replace(",", ""))


def coloured(page, side=0):
    """Tokens with a colour: which, and whether more orange (+1) or blue (-1)."""
    shades = page.evaluate(
        """(side) => [...document.querySelectorAll(".tw-text")[side].querySelectorAll(".tw-t")].map(
            (node) => (node.style.backgroundColor.match(/[\\d.]+/g) ?? []).map(Number))""",
        side,
    )
    return {token: (1 if rgb[0] > rgb[2] else -1) for token, rgb in enumerate(shades) if rgb}


def hard_trace(seed):
    found, mask = make_trace(seed, num_tokens=len(HARD), context=len(HARD))
    found.strings = HARD
    found.token_ids = np.arange(len(HARD), dtype=np.int32)
    found.meta["special_ids"] = [HARD.index("<|end|>")]
    return found, mask


# --- what is shown


def test_a_page_shows_the_trace(open_page, seed):
    found, mask = hard_trace(seed)
    counted = aggregate_of(found)
    page = open_page([Side("random", found, counted)])
    assert texts(page, ".tw-name")[0].startswith(
        f"random{len(HARD)} tokens \u00b7 3 layers of 300 neurons"
    )
    random = np.random.default_rng(seed)
    # What the browser has: 24 bits of each value.
    found.values = (inspector.leading(found.values, 24) << np.uint32(8)).view(np.float32)
    sizes = np.stack([abs(found.layer(layer)).sum(axis=1) for layer in range(3)])
    tokens = random.choice(np.flatnonzero(sizes.min(0) > 0), 3, replace=False)
    for token in tokens.tolist():
        click(page, ".tw-t", token)
        assert [value(text) for text in texts(page, ".tw-count b")] == mask[:, token].sum(
            -1
        ).tolist()
        layer = int(random.integers(3))
        if page.get_attribute(f"[data-focus='0-layer-{layer}']", "aria-expanded") == "false":
            click(page, ".tw-layer-name", layer)
        if page.locator(".tw-under .tw-link").count():
            click(page, ".tw-under .tw-link")
        h = found.layer(layer)[[token]]
        order = sorted(zip(-np.abs(h.data), h.indices, h.data, strict=True))
        assert texts(page, "button.tw-entry > span:first-child") == [
            str(neuron) for _, neuron, _ in order
        ]
        shown = [value(text) for text in texts(page, "button.tw-entry > b")]
        np.testing.assert_allclose(shown, [v for _, _, v in order], rtol=6e-3, atol=1e-12)
        share = value(texts(page, "button.tw-entry > b + span")[0].rstrip("%"))
        assert share == pytest.approx(100 * abs(order[0][2]) / np.abs(h.data).sum(), rel=0.07)
        rate = texts(page, "button.tw-entry > span:last-child")[0].rstrip("%")
        assert value(rate) == pytest.approx(100 * mask[layer, :, order[0][1]].mean(), rel=0.07)

        click(page, "button.tw-entry", 0)
        neuron = order[0][1]
        fires = np.flatnonzero(mask[layer, :, neuron])
        column = found.layer(layer).toarray()[:, neuron]
        inside = [t for t in fires if t > 0]  # the first token is left out of colours
        assert set(coloured(page)) == set(inside)
        assert all(sign == np.sign(column[t]) for t, sign in coloured(page).items() if column[t])
        assert f"{len(fires)} of {len(HARD)}" in texts(page, ".tw-neuron .tw-fact b")[0]
        page.wait_for_selector(".tw-histogram text:has-text('tokens (n = ')", state="attached")
        assert f"h, over {len(HARD)} tokens (n = {len(fires)})" in texts(page, ".tw-axis-name")
        bars = page.eval_on_selector_all(
            ".tw-histogram rect title", "(nodes) => nodes.map((node) => node.textContent)"
        )
        assert sum(int(re.search(r": ([\d,]+) token", bar)[1]) for bar in bars) == len(fires)
        places = [value(text) for text in texts(page, ".tw-place b")]
        np.testing.assert_allclose(
            np.abs(places), np.sort(np.abs(column[fires]))[::-1][:8], rtol=6e-3, atol=1e-12
        )
        if len(fires) > 8:
            assert texts(page, ".tw-more") == [f"show all {len(fires)}"]
            click(page, ".tw-more")
            assert page.locator(".tw-place").count() == len(fires)
        click(page, ".tw-tabs button", 1)
        top = inspector.cards(Side("", found, counted), [(layer, int(neuron))])[0]["top"]
        np.testing.assert_allclose(
            [value(text) for text in texts(page, ".tw-place b")], [t[0] for t in top], rtol=6e-3
        )
        click(page, ".tw-tabs button", 0)
    keep(page, "page")


def test_hard_texts_are_shown_as_text(open_page, seed):
    found, _ = hard_trace(seed)
    page = open_page([Side("hard", found)])
    shown = dict(enumerate(texts(page, ".tw-t")))
    plain = {
        token: text
        for token, text in enumerate(HARD)
        if re.fullmatch(r" ?[^\s\x00-\x1f\u00a0\u200b\u202e]+", text)
    }
    assert len(plain) == 17 and all(shown[token] == text for token, text in plain.items())
    marks = {
        "\n": "\u23ce",
        "\n\n": "\u23ce\u23ce",
        "\t": "\u21e5\u00a0\u00a0",
        "\r": "U+000D",
        "\x00": "U+0000",
    }
    marks |= {
        "\u202e": "U+202E",
        "\u200b": "U+200B",
        "\u00a0": "U+00A0",
        "": "empty",
        " ": " ",
        "    if": "    if",
    }
    for text, mark in marks.items():
        assert shown[HARD.index(text)] == mark
    assert page.locator(".tw-text img, .tw-text b, .tw-text script").count() == 0
    assert texts(page, ".tw-t.tw-special") == ["<|end|>"]
    framed = [text for text in texts(page, ".tw-t .tw-bytes") if text.startswith("<")]
    assert framed == ["<0xF0><0x9F>", "<0x91>", "<0xA9>"]
    rows = page.eval_on_selector_all(
        ".tw-line", "(lines) => lines.map((line) => [line.dir, line.textContent])"
    )
    assert [text.replace("\u23ce", "\n") for way, text in rows if way == "rtl"] == ["".join(HEBREW)]
    # In a line from right to left the tokens follow each other to the left.
    left = [page.locator(".tw-t").nth(HARD.index(word)).bounding_box()["x"] for word in HEBREW[:2]]
    assert left[1] < left[0]
    for token in range(len(HARD)):
        click(page, ".tw-t", token)
        if HARD[token] == "<0x91>":
            assert texts(page, ".tw-fact .tw-pill") == ["\U0001f469"]
    keep(page, "hard")
    nothing = Trace(
        *(np.zeros(0, np.int32), []),
        *[np.zeros(0, np.int32)] * 3,
        np.zeros(1, np.int64),
        *[np.zeros(0)] * 2,
        9,
    )
    page = open_page([Side("nothing", nothing)], wait=".tw-empty")
    assert texts(page, ".tw-empty") == ["The text is empty: there is no token to show."]


def test_keys_and_pointer(open_page, seed):
    found, mask = make_trace(seed, num_tokens=40, context=40)
    page = open_page([Side("random", found)])

    def state():
        return dict(
            part.split("=") for part in page.evaluate("location.hash").lstrip("#").split("&")
        )

    page.locator(".tw-t").nth(5).click()
    assert state() == {"side": "0", "token": "5", "colour": "count"}
    for key, expected in [
        ("ArrowRight", {"token": "6"}),
        ("ArrowDown", {"token": "6", "layer": "0"}),
        ("ArrowDown", {"token": "6", "layer": "1"}),
        ("ArrowUp", {"token": "6", "layer": "0"}),
        ("ArrowLeft", {"token": "5", "layer": "0"}),
        ("End", {"token": "39", "layer": "0"}),
        ("ArrowRight", {"token": "39", "layer": "0"}),
        ("Home", {"token": "0", "layer": "0"}),
    ]:
        page.locator(".tw-text").press(key)
        assert state() == {"side": "0", "colour": "count"} | expected, key
    settle(page)
    assert texts(page, ".tw-said")[0].startswith(
        f"token 0: {found.strings[0]}, layer 0, {mask[0, 0].sum()} active"
    )
    layer, token = np.argwhere(mask.sum(-1) > 1)[-1].tolist()
    page.evaluate(f"location.hash = '#side=0&token={token}&layer={layer}&colour=count'")
    page.reload()
    page.wait_for_selector(".tw-opened")
    strongest = texts(page, "button.tw-entry > span:first-child")[0]
    page.locator(".tw-text").press("Enter")
    assert state()["neuron"] == strongest and state()["colour"] == "neuron"
    for expected in ({"token", "layer"}, {"layer"}, set()):
        page.locator(".tw-text").press("Escape")
        assert set(state()) == {"side", "colour"} | expected and state()["colour"] == "count"
    # Hovering peeks and leaves no trace; the heat map tells which layer.
    page.locator(".tw-t").nth(7).hover()
    page.wait_for_selector(".tw-card.tw-peek")
    assert "token 7" in texts(page, ".tw-tip")[0] and set(state()) == {"side", "colour"}
    box = page.locator(".tw-canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 10.5 / 40, box["y"] + 1.5 * (box["height"] - 13) / 3)
    page.wait_for_function(
        "() => document.querySelector('.tw-tip').textContent.includes('token 10')"
    )
    assert f"active in layer 1{mask[1, 10].sum()}" in texts(page, ".tw-tip")[0]
    page.mouse.down()
    page.mouse.up()
    assert state() == {"side": "0", "token": "10", "layer": "1", "colour": "count"}
    page.mouse.move(2, 2)
    page.wait_for_selector(".tw-tip", state="hidden")
    for nonsense in (
        "token=40&layer=x&neuron=2",
        "side=7&token=-1&layer=2&neuron=9e9&colour=neuron",
        "token=2.5&layer=1.5",
    ):
        page.evaluate(f"location.hash = '#{nonsense}'")
        page.reload()
        page.wait_for_selector(".tw-card")
    assert page.locator(".tw-t.tw-pinned").count() == 1 and page.locator(".tw-opened").count() == 1


def test_two_models_beside_each_other(open_page, seed):
    first, mask = make_trace(seed, num_tokens=30)
    second, other = make_trace(seed + 1, num_tokens=30, num_layers=2, intermediate_size=500)
    for name in ("token_ids", "strings", "sequence", "position"):
        setattr(second, name, getattr(first, name))
    page = open_page([Side("dense", first), Side("sparse", second)])
    click(page, ".tw-t", 30 + 4)  # of the second side
    assert page.locator(".tw-t.tw-pinned").count() == 2 and texts(page, ".tw-of") == [
        "dense",
        "sparse",
    ]
    counts = [value(text) for text in texts(page, ".tw-count b")]
    assert counts == [*mask[:, 4].sum(-1), *other[:, 4].sum(-1)]
    page.locator("label", has_text="difference").locator("input").check()
    settle(page)
    change = other.sum(-1).mean(0) - mask.sum(-1).mean(0)
    later = first.position > 0
    expected = {t: np.sign(change[t]) for t in range(30) if later[t] and change[t]}
    assert coloured(page, 1) == expected
    for theme, width in (("light", 1400), ("dark", 700)):
        page = open_page(
            [Side("dense", first), Side("sparse", second)], {"token": 4, "layer": 1}, width, theme
        )
        assert ("tw-dark" in page.get_attribute(".twell", "class")) == (theme == "dark")
        keep(page, f"compare-{width}-{theme}")
        wide = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]  # nothing sticks out


def test_words_and_choices(open_page, tiny_run):
    model, tokenizer = twell.load(tiny_run)
    counted = trace.aggregate_run(tiny_run, tokens=256)
    shown = [
        inspector.Side(
            "tiny", trace.trace_text(model, tokenizer, "ba de fun " * 20), counted, model, tokenizer
        )
    ]
    found = shown[0].trace
    layer, neuron = 1, int(found.layer(1).indices[0])
    page = open_page(shown, {"layer": layer, "neuron": neuron, "colour": "neuron"}, wait=".tw-word")
    card = inspector.cards(shown[0], [(layer, neuron)])[0]
    words = texts(page, ".tw-word .tw-pill")
    visible = ["".join(w) for w, _ in card["promotes"] + card["suppresses"]]
    assert [w for w, v in zip(words, visible, strict=True) if v.isalpha()] == [
        v for v in visible if v.isalpha()
    ]
    page.get_by_label("first layer").select_option("1")
    settle(page)
    click(page, ".tw-option", 0)
    counts = found.counts()
    assert "layer 1" in texts(page, ".tw-legend .tw-label")[0] and texts(
        page, ".tw-labels button"
    ) == ["1"]
    later = found.position > 0
    ticks = [value(text) for text in texts(page, ".tw-legend:first-child .tw-ticks span")]
    assert (ticks[0], ticks[-1]) == (
        counts[1][later & (counts[1] > 0)].min(),
        counts[1][later].max(),
    )
    page.get_by_label("without first tokens").uncheck()
    settle(page)
    assert value(texts(page, ".tw-legend:first-child .tw-ticks span")[-1]) == counts[1].max()
    page.get_by_label("end of the colour scale").fill("200")
    page.keyboard.press("Tab")
    settle(page)
    assert texts(page, ".tw-legend:first-child .tw-ticks span")[-1] == "200"
    click(page, ".tw-option", 2)
    assert "nats" in texts(page, ".tw-legend .tw-label")[0]
    first = np.flatnonzero(found.position == 0)
    assert set(coloured(page)) == set(range(found.num_tokens)) - set(first.tolist())
    page.get_by_label("go to").select_option("Busiest token")
    settle(page)
    busiest = counts[:, later].mean(0).argmax()
    pinned = page.evaluate(
        "() => [...document.querySelectorAll('.tw-t')].findIndex((t) => t.matches('.tw-pinned'))"
    )
    assert counts[:, pinned].mean() == counts[:, np.flatnonzero(later)[busiest]].mean()


# --- how fast


def random_trace(seed, tokens, layers, neurons, active):
    random = np.random.default_rng(seed)
    counts = random.poisson(active, layers * tokens)
    indices = np.concatenate([np.sort(random.choice(neurons, n, replace=False)) for n in counts])
    words = [
        f" {word}"
        for word in "the of and to in that is was for it with as his on be at by had not are".split()
    ]
    ids = random.integers(0, len(words), tokens).astype(np.int32)
    return Trace(
        token_ids=ids,
        strings=[words[n] for n in ids],
        logprob=-random.exponential(3, tokens).astype(np.float32),
        sequence=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
        indptr=np.concatenate([[0], counts.cumsum()]),
        indices=indices.astype(np.uint16),
        values=(
            random.lognormal(-1, 1, len(indices)) * random.choice([-1, 1], len(indices))
        ).astype(np.float32),
        intermediate_size=neurons,
    )


def test_a_large_page_is_small_and_answers_at_once(open_page, seed):
    """2,048 tokens x 12 layers x 2,816 neurons, 30 active: under 3 MB, painted in 1 s, a click answered in 100 ms."""
    found = random_trace(seed, 2048, 12, 2816, 30)
    side = Side("large", found)
    whole = inspector.page([side])
    assert len(whole.encode()) < 3e6
    painted, clicks, neurons = [], [], []
    for _ in range(3):
        page = open_page(whole)
        painted.append(
            page.evaluate("() => performance.getEntriesByName('twell-painted')[0].startTime")
        )
        clicks += [click(page, ".tw-t", token) for token in (100, 2000, 7, 1024, 1500)]
        click(page, ".tw-layer-name", 5)
        neurons += [click(page, "button.tw-entry", n) for n in (0, 3, 1, 4, 2)]
    print(f"painted {painted}, tokens {clicks}, neurons {neurons}")
    assert statistics.median(painted) < 1000
    assert statistics.median(clicks) < 100 and statistics.median(neurons) < 100
    assert texts(page, ".tw-note") == [
        "Values are rounded to bf16, within 0.4%."
    ]  # and nothing is left out
    click(page, ".tw-link")
    shown = {int(n) for n in texts(page, "button.tw-entry > span:first-child")}
    assert shown == set(found.layer(5)[[1500]].indices.tolist())
    keep(page, "large")


def test_of_a_dense_page_the_strongest_are_kept(open_page, seed):
    found = random_trace(seed, 512, 6, 2816, 500)
    page = open_page([Side("dense", found)])
    (note,) = texts(page, ".tw-note")
    kept = int(
        re.match(r"Of each token and layer the (\d+) strongest neurons are kept here", note)[1]
    )
    assert 250 <= kept <= 270 and "rounded to bf16" in note
    click(page, ".tw-t", 300)
    assert [value(text) for text in texts(page, ".tw-count b")] == found.counts()[:, 300].tolist()
    click(page, ".tw-layer-name", 2)
    assert texts(page, ".tw-link") == [f"show the {kept} kept"]
    click(page, ".tw-link")
    click(page, "button.tw-entry", 0)
    neuron = int(texts(page, "button.tw-entry > span:first-child")[0])
    assert f"{found.neurons()[0][2, neuron]} of 512" in texts(page, ".tw-neuron .tw-fact b")[0]


# --- in JupyterLab


@pytest.fixture
def lab(tmp_path, tiny_run):
    """A JupyterLab, dark, with a notebook that makes the widget; yields its address."""
    cells = [
        f"import twell\nw = twell.inspect({str(tiny_run)!r}, 'ba de fun ' * 9, aggregate={str(tmp_path / 'a.npz')!r})\nw",
        "print('state', w.token, w.layer, w.neuron, w.colour, w.texts)",
        "w.token = 3; w.preset('Most surprising token'); print('preset', w.token)",
    ]
    trace.aggregate_run(tiny_run, tokens=256).save(tmp_path / "a.npz")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / "inspect.ipynb")
    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": "JupyterLab Dark"}))
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ip": "127.0.0.1",
        "port": port,
        "port_retries": 0,
        "root_dir": tmp_path / "notebooks",
    }
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        "--no-browser",
        "--allow-root",
        "--IdentityProvider.token=",
    ]
    command += [f"--ServerApp.{name}={value}" for name, value in options.items()]
    folders = {
        f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    folders |= {
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    folders |= {
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | folders, stdout=log, stderr=log)
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/lab/tree/inspect.ipynb?reset"
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def test_the_widget_in_jupyterlab(browser, lab, tiny_run):
    page = browser.new_page(viewport={"width": 1500, "height": 1400})
    page.set_default_timeout(60_000)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(lab)

    def run(cell):
        page.locator(".jp-Cell .cm-content").nth(cell).click()
        page.keyboard.press("Shift+Enter")

    def output(start):
        return page.locator(".jp-OutputArea-output pre", has_text=start).last.inner_text()

    page.get_by_text(
        "Python 3 (ipykernel) | Idle"
    ).wait_for()  # a cell that is run before is run by nothing
    run(0)
    page.locator(".tw-t").first.wait_for()
    assert "tw-dark" in page.get_attribute(".twell", "class")
    model, tokenizer = twell.load(tiny_run)
    traced = trace.trace_text(model, tokenizer, "ba de fun " * 9)
    assert page.locator(".tw-t").count() == traced.num_tokens
    layer, token = np.argwhere(traced.counts() > 1)[-1].tolist()
    page.locator(".tw-t").nth(token).click()
    page.locator(".tw-layer-name").nth(layer).click()
    page.locator("button.tw-entry").first.click()
    page.locator(".tw-word").first.wait_for()  # the kernel answered
    h = traced.layer(layer)[[token]]
    neuron = h.indices[np.abs(h.data).argmax()]
    assert page.locator("button.tw-entry > span:first-child").first.inner_text() == str(neuron)
    # JupyterLab leaves the keys to the widget.
    page.locator(".tw-text").press("ArrowLeft")
    page.locator(".tw-text").press("ArrowRight")
    keep(page, "lab")
    run(1)
    page.locator("pre", has_text="state").wait_for()
    assert (
        output("state").strip() == f"state {token} {layer} {neuron} neuron ['{'ba de fun ' * 9}']"
    )
    # Typed text is run, the cursor stays; what Python sets is shown.
    page.locator(".tw-type").fill("")
    page.locator(".tw-empty").wait_for()
    page.keyboard.type("de fun ba de fun", delay=20)
    expected = trace.trace_text(model, tokenizer, "de fun ba de fun")
    page.wait_for_function(
        "(n) => document.querySelectorAll('.tw-t').length === n", arg=expected.num_tokens
    )
    assert page.locator(".tw-type").input_value() == "de fun ba de fun"
    assert page.evaluate("() => document.activeElement.className") == "tw-type"
    run(2)
    page.locator("pre", has_text="preset").wait_for()
    at = int(output("preset").split()[1])
    assert at == np.nanargmin(expected.logprob)
    page.locator(".tw-t").nth(at).and_(page.locator(".tw-pinned")).wait_for()
    page.close()
    assert not errors
