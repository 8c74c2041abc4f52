"""The browser of the tests."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from importlib.resources import files

import pytest

from twell import inspector

NAMES = ("chromium", "chromium-browser", "google-chrome")


def why_no_browser() -> str | None:
    """None where the tests can drive a browser, else what is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "no browser: playwright is not installed (pip install 'twell[dev]')"
    if not any(map(shutil.which, NAMES)):
        return f"no browser: none of {', '.join(NAMES)} (Debian: apt-get install chromium)"
    return None


# A stand-in for the model of anywidget: it hands traits and messages to Python and back.
LIVE = """
import widget from "data:text/javascript;base64,%s";

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
class Live {
  constructor(state) { this.state = state; this.listeners = new Map(); this.dirty = {}; }
  get(name) { return this.state[name]; }
  set(name, value) { this.dirty[name] = value; this.take(name, value); }
  take(name, value) {
    if (JSON.stringify(this.state[name]) === JSON.stringify(value)) return;
    this.state[name] = value;
    for (const react of this.listeners.get(`change:${name}`) ?? []) react();
  }
  async save_changes() {
    const changed = this.dirty;
    this.dirty = {};
    const { data, ...traits } = await toPython(changed);
    for (const [name, value] of Object.entries(traits)) this.take(name, value);
    if (data) this.take("data", bytes(data));
  }
  on(name, react) { this.listeners.set(name, [...(this.listeners.get(name) ?? []), react]); }
  off() {}
  async send(message) {
    for (const [content, buffers] of await askPython(message))
      for (const react of this.listeners.get("msg:custom") ?? [])
        react(content, buffers.map((text) => new DataView(bytes(text).buffer)));
  }
}
const { data, ...traits } = await toPython({});
widget.render({ model: new Live({ ...traits, data: bytes(data) }), el: document.body });
"""


def show_live(tab, widget) -> None:
    """Show a widget in a page of the browser; its traits and messages go to Python and back."""
    names = [name for name in inspector.Inspector.class_own_traits(sync=True) if name[0] != "_"]
    known: dict[str, bytes] = {}

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    def to_python(changed: dict) -> dict:
        widget.set_state(changed)
        state = {name: getattr(widget, name) for name in names}
        data = state.pop("data")
        if known.get("data") is not data:
            known["data"] = data
            state["data"] = encoded(data)
        return state

    def ask_python(message: dict) -> list:
        answers: list = []
        widget.send = lambda content, buffers=(): answers.append(
            [content, [encoded(bytes(buffer)) for buffer in buffers or ()]]
        )
        widget._handle_custom_msg(message, [])
        return answers

    tab.expose_function("toPython", to_python)
    tab.expose_function("askPython", ask_python)
    tab.set_content(f"<!doctype html><style>{inspector.style()}</style><body></body>")
    script = base64.b64encode(inspector.script().encode()).decode()
    tab.add_script_tag(content=LIVE % script, type="module")
    tab.wait_for_selector(".tw-bar", state="attached")


IN_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser())),
]


def in_browser(test):
    """Mark one test that needs a browser."""
    return IN_BROWSER[0](IN_BROWSER[1](test))


@contextlib.contextmanager
def chromium() -> Iterator:
    """A headless browser of playwright's."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)))
    # Root, as which CI runs, has no sandbox; a container without a GPU has little shared memory.
    options = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


def settle(page):
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def click(page, selector, number=0):
    """Click as a script does, and wait until it is drawn."""
    page.evaluate(
        "([selector, number]) => document.querySelectorAll(selector)[number].click()",
        [selector, number],
    )
    settle(page)


def texts(page, selector):
    return page.eval_on_selector_all(selector, "(nodes) => nodes.map((node) => node.textContent)")


def values(page, selector):
    numbers = (text.replace("\u2212", "-").replace(",", "") for text in texts(page, selector))
    return [float(number.strip("<%")) for number in numbers]


def neurons(page):
    return [int(text) for text in texts(page, "button.tw-entry > span:first-child")]


def coloured(page, side=0):
    """Tokens with a colour: which, and whether more orange (+1) or blue (-1)."""
    shades = page.evaluate(
        """(side) => [...document.querySelectorAll(".tw-text")[side].querySelectorAll(".tw-t")]
            .map((node) => (node.style.backgroundColor.match(/[\\d.]+/g) ?? []).map(Number))""",
        side,
    )
    return {token: (1 if rgb[0] > rgb[2] else -1) for token, rgb in enumerate(shades) if rgb}


def state(page):
    return page.evaluate("location.hash").lstrip("#")


def go_to(page, address):
    page.evaluate(
        """async (address) => {
            const { hash } = location;
            const followed = new Promise((done) => addEventListener("hashchange", done));
            location.hash = address;
            if (location.hash !== hash) await followed;
        }""",
        address,
    )
    settle(page)


def violations(page) -> list[str]:
    """What axe-core finds wrong: the rule, and the elements."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    # The fragment of a test's page: a site gives the page its landmarks.
    result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {node['html'][:200]} ({node['failureSummary']})"
        for rule in result["violations"]
        for node in rule["nodes"]
    ]


def watch(page) -> list[str]:
    """Return a list that every message and error of a page is added to."""
    wrong: list[str] = []
    for event in ("console", "pageerror", "dialog"):
        page.on(event, lambda message, event=event: wrong.append(f"{event}: {message}"))
    return wrong
