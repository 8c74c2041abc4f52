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

PAGE_BYTES = 5_000_000  # at most, of a page
FOLDER = Path(__file__).with_name("browser")
HOST = 'document.getElementById("twell")'
END_OF_DATA = "<!-- end of data -->"
STYLES = ("dots.css", "frame.css", "passage.css", "cards.css", "compare.css", "find.css")
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.M)
_DECLARED = re.compile(
    r"^(export )?(?:(?:async )?function\*?|class|const|let|var) (\w+|[\[{])", re.M
)


def script(entry: str = "page.js", folder: Path = FOLDER) -> str:
    """Return an ES module and the modules that it imports as one, which imports nothing.

    A module stands behind those that it imports; `export default` is left as it is. Understood are
    imports of names from a module of the folder, and declarations of one name. Raises ValueError
    for others, for modules that import each other, for a name that two modules declare, and for an
    imported name that the module does not export.
    """
    homes: dict[str, str] = {}  # of every declared name
    exported: dict[str, set[str]] = {}  # of every module
    bodies: list[str] = []

    def add(module: str, above: tuple[str, ...]) -> None:
        if module in above:
            raise ValueError(f"modules import each other: {' -> '.join([*above, module])}")
        if module in exported:
            return
        text = (folder / module).read_text(encoding="utf-8")
        for names, other in _IMPORT.findall(text):
            add(other, (*above, module))
            for name in {name.strip() for name in names.split(",")} - {""} - exported[other]:
                raise ValueError(f"{module} imports {name}, which {other} does not export")
        body = _IMPORT.sub("", text)
        declared = _DECLARED.findall(body)
        if re.search(r"^(?:import\b|export (?:\{|\*))", body, re.M) or any(
            name in "[{" for _, name in declared
        ):
            raise ValueError(f"{module} imports, exports or declares in a way that is not joined")
        for _, name in declared:
            if homes.setdefault(name, module) != module:
                raise ValueError(f"{homes[name]} and {module} both declare {name}")
        exported[module] = {name for public, name in declared if public}
        bodies.append(re.sub(r"^export (?!default )", "", body, flags=re.M).strip())

    add(entry, ())
    return "\n\n".join(bodies)


def style() -> str:
    """Return the CSS of the inspector."""
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in STYLES)


def page(shown: Sequence[Side], view: dict | None = None) -> str:
    """Return one HTML file that shows these sides without a server, of at most PAGE_BYTES.

    It takes along as many chunks of each model's neurons (see catalog.py) as there is room for.
    Where the passage alone would be larger, fewer of its weaker entries are kept; the page says
    how many. view: where to begin (VIEW). Raises ValueError for a passage of which even the counts
    do not fit.
    """
    view = VIEW | (view or {})
    names = dict.fromkeys(side.name for side in shown)
    title = html.escape(" and ".join(names) + ": active neurons")
    begin = json.dumps({name: view[name] for name in VIEW})
    max_entries = MAX_ENTRIES

    def written() -> str:
        data = {"data": pack(shown, max_entries=max_entries, level=9)}
        return document(title, "page.js", f"openPage({HOST}, {begin});", data)

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
    """Yield the chunks of all models, first those that most need; keys "side:name"."""
    same = len(shown) == 2 and shown[0].model is not None and shown[0].model is shown[1].model
    catalogs = [Catalog(side) for side in shown[: 1 if same else None]]
    for kind in ("overview", "text", "layer", "words"):
        for number, catalog in enumerate(catalogs):
            for name in catalog.names:
                if name.startswith(kind):
                    yield f"{number}:{name}", catalog.chunk(name)


def document(
    title: str, entry: str, call: str, data: dict[str, bytes], sources: str = "'unsafe-inline'"
) -> str:
    """Return an HTML page: a module's script, a call of it, and data by the ids of elements.

    sources: where scripts may come from (Content-Security-Policy).
    """
    template = string.Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    every = "".join(_data(key, part) for key, part in data.items())
    parts = {"title": title, "css": style(), "js": script(entry), "call": call, "sources": sources}
    return template.substitute(parts, data=every + END_OF_DATA)


def _data(key: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return f'<script id="{key}" type="text/plain">{text}</script>\n'
