"""Build the site of the documents with Sphinx: python scripts/build_site.py

docs/conf.py says which pages belong to it. A warning, such as for a link that leads nowhere, is an
error. The atlas of the shipped model goes into build/site/atlas.
"""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE, DOCTREES = ROOT / "build" / "site", ROOT / "build" / "site-doctrees"
SHIPPED = ROOT / "data" / "checkpoints" / "twell-6m"


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    from twell.inspector import write_atlas

    shutil.rmtree(SITE, ignore_errors=True)
    options = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    if status := sphinx([*options, "-d", str(DOCTREES), str(ROOT), str(SITE)]):
        return status
    write_atlas(SHIPPED, SITE / "atlas")
    (SITE / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')

    print(os.path.relpath(SITE / "index.html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
