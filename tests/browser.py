"""The browser of the tests; `python -m tests.browser MODEL` draws the picture of the inspector."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from twell import inspector, results

SCREENSHOTS = results.root() / "build" / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome")
PASSAGE = (
    "Fellow citizens of the Senate and House of Representatives: I have the honor to report that "
    "the relations of the United States with foreign nations continue to be peaceful, and that the "
    "public debt has been reduced by $1,234,567 since the last session of Congress.\n"
    "The Secretary of the Treasury will lay before you a statement of the receipts and "
    "expenditures of the Government for the year. It is believed that the revenue derived from "
    "customs, from the sales of public lands, and from other sources will be sufficient to defray "
    "the expenses of the Government.\n"
    "America is strong tonight because our people are free. We will never waver, we will never "
    "tire, we will never fail."
)


def why_no_browser() -> str | None:
    """None where the tests can drive a browser, else what is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "no browser: playwright is not installed (pip install 'twell[dev]')"
    if not any(map(shutil.which, NAMES)):
        return f"no browser: none of {', '.join(NAMES)} (Debian: apt-get install chromium)"
    return None


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


@contextlib.contextmanager
def jupyter_lab(folder: Path, root: Path, theme: str = "JupyterLab Light") -> Iterator[str]:
    """A JupyterLab that shows a folder `root` and keeps its own files in `folder`; its address."""
    extensions = folder / "settings" / "@jupyterlab"
    settings = {
        "apputils-extension/themes": {"theme": theme},
        "apputils-extension/notification": {"fetchNews": "false"},
        "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page
    }
    for name, values in settings.items():
        path = extensions / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": root}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += ["--IdentityProvider.token="]
    command += [f"--ServerApp.{name}={option}" for name, option in options.items()]
    folders = "JUPYTER_CONFIG_DIR JUPYTER_DATA_DIR JUPYTER_RUNTIME_DIR IPYTHONDIR".split()
    environment = {name: str(folder / name) for name in folders} | {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    address = f"http://127.0.0.1:{port}"
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None, (folder / "log").read_text()
                    time.sleep(0.2)
            yield address
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def main(model: str) -> None:
    shown = inspector.sides(model, PASSAGE)
    presets = {preset["name"]: preset["view"] for preset in inspector.presets(shown[0])}
    view = inspector.VIEW | presets["Busiest token"] | {"layer": shown[0].shape[0] - 1}
    view["neuron"] = int(inspector.entries(shown, view)["neuron"][0])
    page = results.root() / "build" / "inspector.html"
    results.write_atomically(page, inspector.page(shown, view))
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_selector(".tw-word")
        tab.screenshot(path=results.root() / "figures" / "inspector.png", full_page=True)


if __name__ == "__main__":
    main(sys.argv[1])
