"""Write the table of parts in docs/maintaining.md, from the imports: scripts/house.py"""

from __future__ import annotations

import ast

import grimp

from study.pages import between
from twell import results

BEGIN, END = "<!-- house: python scripts/house.py -->", "<!-- end of house -->"
# These hand on the names of other modules, and nothing imports them.
ALIASES = {"format", "ffn", "reference", "model"}
# The layer chooses between reference and kernels, and kernels know formats and the reference; the
# configuration loads text and models when asked (pyproject.toml, `ignore_imports`).
UPWARD = {("kernels", "sparse"), ("config", "corpus"), ("config", "models")}


def imports() -> dict[str, set[str]]:
    """Return the parts of the package, folders and modules, with the parts that each imports."""
    graph = grimp.build_graph("twell", "twell.kernels", cache_dir=None)
    parts: dict[str, set[str]] = {}
    for module in graph.modules - {"twell"}:
        part = module.split(".")[1]
        imported = (name.split(".") for name in graph.find_modules_directly_imported_by(module))
        parts.setdefault(part, set()).update(name[1] for name in imported if len(name) > 1)
    return {
        part: {other for other in others - {part} if (part, other) not in UPWARD}
        for part, others in parts.items()
        if part not in ALIASES
    }


def floors(parts: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each part: one above the highest part that it imports."""
    floor: dict[str, int] = {}
    while len(floor) < len(parts):
        ready = [
            part for part, others in parts.items() if part not in floor and others <= set(floor)
        ]
        if not ready:
            raise ValueError(f"imports go in a circle among {sorted(set(parts) - set(floor))}")
        for part in ready:
            floor[part] = 1 + max((floor[other] for other in parts[part]), default=-1)
    return floor


def about(part: str) -> str:
    """Return the first sentence of a part's docstring."""
    folder = results.root() / "twell" / part
    if part == "kernels":
        return "Triton kernels of the sparse feed-forward layer"
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = " ".join(text.split("\n\n")[0].split())
    return sentence.split(". ")[0].split(": ")[0].rstrip(".:")


def picture() -> str:
    """Return the table of all parts, the highest floor first."""
    parts = imports()
    floor = floors(parts)
    lines = ["| floor | part | about | imports |", "|---:|---|---|---|"]
    for part in sorted(parts, key=lambda part: (-floor[part], part)):
        others = ", ".join(f"`{other}`" for other in sorted(parts[part])) or "–"
        lines.append(f"| {floor[part]} | `{part}` | {about(part)} | {others} |")
    return "\n".join(lines)


def main() -> None:
    page = results.root() / "docs" / "maintaining.md"
    text = page.read_text(encoding="utf-8")
    table = f"\n{picture()}\n"
    results.write_atomically(page, between(text, BEGIN, END, table))


if __name__ == "__main__":
    main()
