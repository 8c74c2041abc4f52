"""Pages and atlases, which open without a server or a network; their script is the widget's, too.

An atlas is the page of a side without a text. `index.html` has the script and the overview, and
`chunks/` the other chunks of the catalog, each a script, since a page from disk may not fetch.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from twell import results
from twell.inspector.catalog import Catalog
from twell.inspector.packing import MAX_ENTRIES, pack
from twell.inspector.shown import VIEW
from twell.inspector.side import AGGREGATE, Side, load_side
from twell.trace import Aggregate

PAGE_BYTES = 5_000_000  # the most that a page may have
FOLDER = Path(__file__).with_name("browser")
END_OF_DATA = "<!-- end of data -->"
STYLES = ("view.css", "passage.css", "cards.css")


def script() -> str:
    """Return the ES module of widget and page, as `npm run build` in browser/ bundled it."""
    return (FOLDER / "bundle.js").read_text(encoding="utf-8")


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
        call=f'twellOpen(document.getElementById("twell"), {begin}, {json.dumps(atlas)});',
        data="".join(_data(key, part) for key, part in data.items()) + END_OF_DATA,
    )


def _data(key: str, data: bytes) -> str:
    return f'<script id="{key}" type="text/plain">{_base64(data)}</script>\n'


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def write_atlas(
    what: str | Path,
    out: str | Path,
    *,
    aggregate: Aggregate | str | Path | None = None,
    labels: str | Path | None = None,
) -> Side:
    """Write the atlas of a model, or of an aggregate's file, to the folder `out`.

    aggregate: of a model, if it is not beside it; labels: a file of notes (notes.py) in place of
    the one beside the model. Returns what was shown. Raises ValueError for a model without an
    aggregate, and FileExistsError for a folder with other files.
    """
    out, alone = Path(out), str(what).endswith(".npz")
    if not alone and aggregate is None and not (Path(what) / AGGREGATE).is_file():
        raise ValueError(
            f"{what} has no {AGGREGATE}; make one by `twell trace {what} --aggregate`, "
            "or name it by --aggregate"
        )
    if alone and aggregate is not None:
        raise ValueError(f"{what} is an aggregate itself; leave out --aggregate")
    if labels is not None and not Path(labels).is_file():
        raise FileNotFoundError(f"there is no file of notes at {labels}")
    side = load_side(what, aggregate)
    side = dataclasses.replace(side, notes_file=Path(labels) if labels else side.notes_file)
    if out.is_dir() and any(out.iterdir()) and not (out / "chunks" / "text.js").is_file():
        raise FileExistsError(f"{out} has other files; choose an empty folder, or an atlas")
    catalog = Catalog(side)
    first = {"data": pack([side]), "0:overview": catalog.chunk("overview")}  # reads the notes
    (out / "chunks").mkdir(parents=True, exist_ok=True)
    for path in (out / "chunks").glob("*.js"):
        path.unlink()
    for name in catalog.names[1:]:
        call = f'twellChunk("{name}", "{_base64(catalog.chunk(name))}");\n'
        results.write_atomically(out / "chunks" / f"{name}.js", call)
    title = f"{side.name}: an atlas of its neurons"
    results.write_atomically(out / "index.html", document(title, {}, first, atlas=True))
    return side
