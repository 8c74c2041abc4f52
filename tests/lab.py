"""Run all lessons in JupyterLab, in a browser, in a clone: python -m tests.lab [--with FOLDER ...]

The clone has the last commit, and with --with the given folders that git ignores, such as runs and
figures/live after `make reproduce`. Each lesson is opened, all its cells are run from the menu, and
it is saved. An error, a warning or a cell that did not run fails; pictures of the pages go to
build/screenshots.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from tests.browser import SCREENSHOTS, chromium, jupyter_lab
from twell import results

ROOT = results.root()
SECONDS = 300


def mistakes(path: Path) -> list[str]:
    """What a saved notebook shows that it should not, and cells that did not run."""
    wrong = []
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            wrong.append(f"did not run: {cell.source[:60]}")
        for output in cell.outputs:
            if output.output_type == "error":
                wrong.append(f"{output.ename}: {output.evalue}")
            elif output.get("name") == "stderr":
                wrong.append(f"stderr: {output.text}")
    return wrong


def run_all(page, address: str, path: Path) -> list[str]:
    """Open a notebook, run all its cells and save it; return its mistakes."""
    messages = []
    page.on("pageerror", lambda error: messages.append(f"page: {error}"))
    page.goto(f"{address}/lab/tree/notebooks/{path.name}?reset")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    end = time.time() + SECONDS
    while time.time() < end:
        page.wait_for_timeout(1000)
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=1000 * SECONDS)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(500)
        if not [wrong for wrong in mistakes(path) if wrong.startswith("did not run")]:
            break
        if any(not wrong.startswith("did not run") for wrong in mistakes(path)):
            break
    page.keyboard.press("Control+b")  # hides the list of files
    height = page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollHeight")
    page.set_viewport_size({"width": 1200, "height": min(height + 150, 16000)})
    page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
    page.wait_for_timeout(1000)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"lesson-{path.stem}.png")
    return messages + mistakes(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--with", dest="folders", nargs="*", default=[], metavar="FOLDER")
    given = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="twell-lab-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for name in given.folders:
            shutil.copytree(ROOT / name, clone / name, dirs_exist_ok=True)
        sys.path[:] = [str(clone), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ |= {"TWELL_CACHE": str(ROOT / "build" / "cache")}
        with jupyter_lab(Path(folder), clone) as address, chromium() as browser:
            for path in sorted((clone / "notebooks").glob("*.ipynb")):
                start = time.time()
                page = browser.new_page(viewport={"width": 1200, "height": 1000})
                page.set_default_timeout(60_000)
                wrong = run_all(page, address, path)
                page.close()
                failures += bool(wrong)
                print(f"{path.stem}: {time.time() - start:.0f} s", *wrong, sep="\n  ", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
