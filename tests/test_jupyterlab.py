"""The widget in JupyterLab, in a browser."""

import os
import sys

import nbformat
import numpy as np
import pytest

import twell
from tests.browser import IN_BROWSER, neurons
from twell import trace
from twell.measure.serving import server

pytestmark = IN_BROWSER


@pytest.fixture
def lab(tmp_path, tiny_run, monkeypatch):
    """A JupyterLab with a notebook that makes the widget; yields its address."""
    folders = "JUPYTER_CONFIG_DIR JUPYTER_DATA_DIR JUPYTER_RUNTIME_DIR IPYTHONDIR".split()
    for name in (*folders, "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    # Every cell is in the page.
    extension = "JUPYTERLAB_SETTINGS_DIR/@jupyterlab/notebook-extension"
    (tmp_path / extension).mkdir(parents=True)
    (tmp_path / extension / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    trace.aggregate_run(tiny_run, tokens=256).save(tmp_path / "a.npz")
    cells = [
        f"import twell\nmodel, aggregate = {str(tiny_run)!r}, {str(tmp_path / 'a.npz')!r}\n"
        "w = twell.inspect(model, 'ba de fun ' * 9, aggregate=aggregate)\nw",
        "print('state', w.token, w.layer, w.neuron, w.colour, w.texts)",
        "w.token, w.colour = 3, 'surprise'; print('set', w.token)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / "inspect.ipynb")
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path / 'notebooks'}"]
    with server(command, tmp_path / "log", "/api/status") as ready:
        yield f"{ready()}/lab/tree/inspect.ipynb?reset"


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
        line = page.locator(".jp-OutputArea-output pre", has_text=start).last
        line.wait_for()
        return line.inner_text().strip()

    # Before the kernel is there a cell would be run by nothing.
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    run(0)
    page.locator(".tw-t").first.wait_for()
    model, tokenizer = twell.load(tiny_run)
    typed = "ba de fun " * 9
    traced = trace.trace_text(model, tokenizer, typed)
    assert page.locator(".tw-t").count() == traced.num_tokens
    layer, token = np.argwhere(traced.counts() > 1)[-1].tolist()
    page.locator(".tw-t").nth(token).click()
    page.locator(".tw-layer-name").nth(layer).click()
    page.locator("button.tw-entry").first.click()
    page.locator(".tw-both-words").wait_for()  # the kernel answered
    h = traced.layer(layer)[[token]]
    neuron = h.indices[np.abs(h.data).argmax()]
    assert neurons(page)[0] == neuron
    run(1)
    assert output("state") == f"state {token} {layer} {neuron} neuron ['{typed}']"
    # Typed text is run, the cursor stays; what Python sets is shown.
    page.locator(".tw-type").fill("")
    page.locator(".tw-empty").wait_for()
    page.keyboard.type("de fun ba de fun", delay=20)
    expected = trace.trace_text(model, tokenizer, "de fun ba de fun")
    shown = "(n) => document.querySelectorAll('.tw-t').length === n"
    page.wait_for_function(shown, arg=expected.num_tokens)
    assert page.locator(".tw-type").input_value() == "de fun ba de fun"
    assert page.evaluate("() => document.activeElement.className") == "tw-type"
    run(2)
    assert output("set") == "set 3"
    page.locator(".tw-t").nth(3).and_(page.locator("[aria-selected]")).wait_for()
    assert not page.locator("iframe.twell-page").is_visible()  # it is for exported notebooks
    page.close()
    assert not errors
