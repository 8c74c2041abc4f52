"""Build the site of the documents with Sphinx: python scripts/build_site.py

docs/conf.py says which pages belong to it. A warning, such as for a link that leads nowhere, is an
error. The atlas of the shipped model goes into build/site/atlas.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE, DOCTREES = ROOT / "build" / "site", ROOT / "build" / "site-doctrees"
SHIPPED = ROOT / "data" / "checkpoints" / "twell-6m"
LOADS = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"')


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return the scripts, styles and images that pages load over a network."""
    pages = [path for path in sorted(site.rglob("*.html")) if path.parent.name != "_static"]
    texts = ((path, path.read_text(encoding="utf-8")) for path in pages)
    return [f"{path}: {address}" for path, text in texts for address in LOADS.findall(text)]


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    from twell.inspector import write_atlas

    shutil.rmtree(SITE, ignore_errors=True)
    options = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    if status := sphinx([*options, "-d", str(DOCTREES), str(ROOT), str(SITE)]):
        return status
    write_atlas(SHIPPED, SITE / "atlas")
    (SITE / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')

    if outside := loaded_from_elsewhere(SITE):
        print("The site would need a network:", *outside, sep="\n", file=sys.stderr)
        return 1
    print(os.path.relpath(SITE / "index.html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
