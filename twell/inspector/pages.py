"""A page that shows sides without a server or a network, and the script that the widget shares."""

from __future__ import annotations

import base64
import html
import json
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from twell.inspector.catalog import Catalog
from twell.inspector.packing import MAX_ENTRIES, pack
from twell.inspector.shown import VIEW
from twell.inspector.side import Side

PAGE_BYTES = 5_000_000  # the most that a page may have
FOLDER = Path(__file__).with_name("browser")
END_OF_DATA = "<!-- end of data -->"
STYLES = ("view.css", "passage.css", "cards.css")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.M)


def script(entry: str = "page.js") -> str:
    """Return an ES module and the modules that it imports as one, which imports nothing.

    Each module stands below those that it imports. Names are shared: a browser refuses a name that
    two modules declare.
    """
    seen, bodies = set(), []

    def add(module: str) -> None:
        if module in seen:
            return
        seen.add(module)
        text = (FOLDER / module).read_text(encoding="utf-8")
        for other in _IMPORT.findall(text):
            add(other)
        body = re.sub(r"^export (?!default )", "", _IMPORT.sub("", text), flags=re.M)
        bodies.append(body.strip())

    add(entry)
    return "\n\n".join(bodies)


def style() -> str:
    """Return the CSS of the inspector."""
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in STYLES)


def page(shown: Sequence[Side], view: dict | None = None) -> str:
    """Return one HTML file that shows these sides without a server, of at most PAGE_BYTES.

    It holds the chunks of each model's neurons (catalog.py) that fit. Where the passage alone is
    larger, its weaker entries are left out. view: where to begin (VIEW). Raises ValueError for a
    passage whose counts alone do not fit.
    """
    names = dict.fromkeys(side.name for side in shown)
    title = " and ".join(names) + ": active neurons"
    max_entries = MAX_ENTRIES

    def written() -> str:
        data = {"data": pack(shown, max_entries=max_entries, level=9)}
        return document(title, view or {}, data)

    while (room := PAGE_BYTES - len((text := written()).encode())) < 0:
        max_entries = max_entries * 4 // 5
        if max_entries < 1000:
            tokens = sum(side.trace.num_tokens for side in shown)
            raise ValueError(f"{tokens} tokens do not fit into {PAGE_BYTES} bytes")
    for key, chunk in _chunks(shown):
        more = _data(key, chunk)
        if len(more) <= room:
            text, room = text.replace(END_OF_DATA, more + END_OF_DATA, 1), room - len(more)
        elif "words" in key:
            break  # each takes long to compute, and the others are as large
    return text


def _chunks(shown: Sequence[Side]) -> Iterator[tuple[str, bytes]]:
    """Yield the chunks of all models, the most useful first; keys are "side:name"."""
    same = len(shown) == 2 and shown[0].model is not None and shown[0].model is shown[1].model
    catalogs = [Catalog(side) for side in shown[: 1 if same else None]]
    for kind in ("overview", "text", "layer", "words"):
        for number, catalog in enumerate(catalogs):
            for name in catalog.names:
                if name.startswith(kind):
                    yield f"{number}:{name}", catalog.chunk(name)


def document(title: str, view: dict, data: dict[str, bytes], atlas: bool = False) -> str:
    """Return an HTML page that opens a view. data: blocks of bytes by the ids of elements."""
    begin = json.dumps(VIEW | view)
    template = string.Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(title),
        css=style(),
        js=script(),
        call=f'openPage(document.getElementById("twell"), {begin}, {json.dumps(atlas)});',
        data="".join(_data(key, part) for key, part in data.items()) + END_OF_DATA,
    )


def _data(key: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return f'<script id="{key}" type="text/plain">{text}</script>\n'
