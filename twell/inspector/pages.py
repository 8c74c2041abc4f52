"""A page that shows sides without a server or a network, and the script that the widget shares."""

from __future__ import annotations

import base64
import html
import json
import re
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twell.inspector.packing import MAX_ENTRIES, pack
from twell.inspector.shown import VIEW, cards, presets
from twell.inspector.side import Side

PAGE_BYTES = 2_950_000  # at most, of a page
FOLDER = Path(__file__).with_name("browser")
STYLES = ("frame.css", "passage.css", "cards.css")
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

    It takes along as many cards as there is room for, first those of the neurons that carry most of
    the passage. Where the passage alone would be larger, fewer of its weaker entries are kept; the
    page says how many. view: where to begin (VIEW). Raises ValueError for a passage of which even
    the counts do not fit.
    """
    view = VIEW | (view or {})
    names = dict.fromkeys(side.name for side in shown)
    template = string.Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    parts = {
        "title": html.escape(" and ".join(names) + ": active neurons"),
        "view": json.dumps({name: view[name] for name in VIEW}),
        "css": style(),
        "js": script(),
    }

    def written(data: bytes) -> str:
        return template.substitute(parts, data=base64.b64encode(data).decode())

    def room(data: bytes) -> int:
        return PAGE_BYTES - len(written(data).encode())

    max_entries = MAX_ENTRIES
    data = pack(shown, max_entries=max_entries, chosen={})
    while room(data) < 0:
        max_entries = max_entries * 4 // 5
        if max_entries < 1000:
            tokens = sum(side.trace.num_tokens for side in shown)
            raise ValueError(f"{tokens} tokens do not fit into {PAGE_BYTES} bytes")
        data = pack(shown, max_entries=max_entries, chosen={})
    order = _by_weight(shown, view)
    if not order:
        return written(data)
    sample = _cards(shown, order[:256])
    spent = room(data) - room(pack(shown, max_entries=max_entries, chosen=sample))
    fit = int(0.97 * room(data) * len(sample) / max(spent, 1))
    known = list(_cards(shown, order[:fit]).items())
    while room(data := pack(shown, max_entries=max_entries, chosen=dict(known))) < 0:
        known = known[: len(known) * 9 // 10]
    return written(data)


def _by_weight(shown: Sequence[Side], view: dict) -> list[tuple[int, int, int]]:
    """(side, layer, neuron) of those where the view and its presets begin, then by falling weight.

    Weight: the sum over tokens of the shares of |h|. Only of sides with an aggregate or a model.
    """
    first, weights = [(view["side"], view["layer"], view["neuron"])], []
    for number, side in enumerate(shown):
        views = [preset["view"] for preset in presets(side)]
        first += [(number, begin.get("layer"), begin.get("neuron")) for begin in views]
        for layer in range(side.trace.num_layers):
            h = abs(side.trace.layer(layer))
            total = h.sum(axis=1)
            weight = h.T @ np.divide(1, total, out=np.zeros_like(total), where=total > 0)
            fires = np.unique(h.indices).tolist()
            weights += [(-weight[neuron], (number, layer, neuron)) for neuron in fires]
    known = [side.aggregate is not None or side.model is not None for side in shown]
    every = dict.fromkeys([*first, *(key for _, key in sorted(weights))])
    return [key for key in every if None not in key and known[key[0]]]


def _cards(shown: Sequence[Side], neurons: Sequence[tuple[int, int, int]]) -> dict[str, dict]:
    """Cards by "side:layer:neuron", in this order."""
    found = dict.fromkeys(neurons)
    for number, side in enumerate(shown):
        own = [key for key in neurons if key[0] == number]
        found |= dict(zip(own, cards(side, [key[1:] for key in own]), strict=True))
    return {":".join(map(str, key)): card for key, card in found.items()}
