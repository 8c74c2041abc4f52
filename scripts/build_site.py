"""Build the static site of the documents and the executed notebooks: python scripts/build_site.py, as `make site` does.

1. Pages are gathered in build/site-source: README.md as the start page, docs/, pages that these link to, and the
   notebooks that `make reproduce` executed.
2. Their links are rewritten: to pages of the site, or to copies of other files. A link to a folder without a README
   becomes plain text.
3. Sphinx writes build/site. Its warnings are errors, so a link or an anchor that leads nowhere fails.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, SITE, EXECUTED = Path("build/site-source"), Path("build/site"), Path("build/notebooks")

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S)
CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)\1(?!`)", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
# [text](target "title"), where text may hold one image or brackets; ![text](target); <img src="target">; [name]: target
LINK = re.compile(
    r"""(?P<image>!?)\[(?P<text>(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*)\]\(<?(?P<inline>[^\s()<>]+)>?(?:\s+"[^"]*")?\)
    |<(?:img|a)\b[^>]*?\b(?:src|href)="(?P<html>[^"]+)"
    |^\ {0,3}\[[^\]]+\]:\s*<?(?P<named>[^\s<>]+)""",
    re.X | re.M,
)


def prose(text: str) -> str:
    """Return Markdown with its code and comments blanked; every other character stays where it is."""
    for pattern in (COMMENT, FENCE, CODE):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def targets(text: str) -> Iterator[tuple[re.Match, int, int, str]]:
    """Yield each link or image of Markdown: its match, the begin and end of its target, and the target."""
    blank = prose(text)
    for match in LINK.finditer(blank):
        group = next(name for name in ("inline", "html", "named") if match[name])
        yield match, *match.span(group), match[group]
        if match["text"]:  # an image in the text of a link
            begin = match.start("text")
            for inner in LINK.finditer(blank, begin, match.end("text")):
                if inner["inline"]:
                    yield inner, *inner.span("inline"), inner["inline"]


def is_outside(target: str) -> bool:
    """Whether a target has a scheme, such as https:, or is an anchor of its own page."""
    return target.startswith("#") or re.match(r"[a-z][a-z+.-]*:", target, re.I) is not None


def resolve(page: str, target: str) -> tuple[str, str]:
    """Return the path from the root and the anchor of a link that stands on a page."""
    path, _, anchor = target.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)), anchor


class Pages:
    """The pages of the site: written to the source folder with links that hold there."""

    def __init__(self, root: Path, source: Path):
        self.root, self.source = root, source
        self.titles = contents((root / "docs" / "index.md").read_text(encoding="utf-8"))
        listed = [page for _, entries in self.titles for _, page in entries]
        self.waiting = dict.fromkeys(["README.md", *listed])
        pages = [
            f"docs/{path.name}"
            for path in sorted((root / "docs").glob("*.md"))
            if path.name != "index.md"
        ]
        notebooks = [f"notebooks/{path.name}" for path in sorted((root / EXECUTED).glob("*.ipynb"))]
        self.waiting |= dict.fromkeys(pages + notebooks)
        self.listed = set(self.waiting)

    def write(self) -> None:
        """Write all pages; a Markdown file that only a page links to becomes a page without a place in the contents."""
        shutil.rmtree(self.source, ignore_errors=True)
        done = set()
        while left := [page for page in self.waiting if page not in done]:
            for page in left:
                self._write(page)
                done.add(page)

    def _write(self, page: str) -> None:
        place = self.source / self.place(page)
        place.parent.mkdir(parents=True, exist_ok=True)
        if page.endswith(".ipynb"):
            notebook = json.loads(
                (self.root / EXECUTED / Path(page).name).read_text(encoding="utf-8")
            )
            self._make_static(notebook, page)
            place.write_text(json.dumps(notebook, ensure_ascii=False, indent=1), encoding="utf-8")
            return
        text = self.linked(page, (self.root / page).read_text(encoding="utf-8"))
        if page == "README.md":
            text = f"{text}\n{toctrees(self.titles)}"
        elif page not in self.listed:
            text = (
                text.split("\n---\n", 1)[-1] if text.startswith("---\n") else text
            )  # of a model card
            text = f"---\norphan: true\n---\n\n{text}"
        place.write_text(text, encoding="utf-8")

    def place(self, page: str) -> str:
        """Where a page of the repository stands in the source of the site."""
        return "index.md" if page == "README.md" else page

    def linked(self, page: str, text: str) -> str:
        """Return the text of a page with targets that hold in the site."""
        changes = []
        for match, begin, end, target in targets(text):
            if is_outside(target):
                continue
            path, anchor = resolve(page, target)
            if (self.root / path).is_dir():
                readme = next(
                    (
                        name
                        for name in ("README.md", "index.md")
                        if (self.root / path / name).is_file()
                    ),
                    None,
                )
                if readme is None and match["inline"]:
                    changes.append(
                        (match.start(), match.end(), text[match.start("text") : match.end("text")])
                    )
                    continue
                path = posixpath.normpath(posixpath.join(path, readme or ""))
            if path.endswith(".md") and (self.root / path).is_file():
                self.waiting.setdefault(path)
            elif path not in self.waiting and (self.root / path).is_file():
                anchor = ""
                (self.source / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.root / path, self.source / path)
            here = posixpath.dirname(self.place(page)) or "."
            new = posixpath.relpath(self.place(path), here)
            changes.append((begin, end, f"{new}#{anchor}" if anchor else new))
        for begin, end, new in sorted(changes, reverse=True):
            text = text[:begin] + new + text[end:]
        return text

    def _make_static(self, notebook: dict, page: str) -> None:
        """Rewrite links, and replace widgets, which need a running notebook, by the page that their cell wrote."""
        notebook["metadata"].pop("widgets", None)
        keep_own_parameters(notebook)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked(page, "".join(cell["source"]))
            for output in cell.get("outputs", []):
                if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                    output["data"] = self._instead_of_widget(cell, page)

    def _instead_of_widget(self, cell: dict, page: str) -> dict:
        written = re.search(r"`([\w/.-]+\.html)`", json.dumps(cell["outputs"]))
        if not written or not (self.root / written[1]).is_file():
            return {"text/plain": "The widget needs a running notebook."}
        extra = self.source / "extra" / posixpath.dirname(page)
        extra.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.root / written[1], extra)
        name = Path(written[1]).name
        return {"text/html": f'<iframe class="inspector" src="{name}" title="{name}"></iframe>'}


def keep_own_parameters(notebook: dict) -> None:
    """Of the parameters that papermill set, keep those that the notebook has, with another value than its own."""
    values = {}
    for cell in list(notebook["cells"]):
        tags = cell["metadata"].get("tags", [])
        statements = ast.parse("".join(cell["source"])).body if "parameters" in str(tags) else []
        if "parameters" in tags:
            values |= {
                name.id: ast.unparse(node.value) for node in statements for name in _names(node)
            }
        elif "injected-parameters" in tags:
            lines = [ast.unparse(node) for node in statements if _differs(node, values)]
            cell["source"] = "\n".join(["# As executed for this page", *lines])
            if not lines:
                notebook["cells"].remove(cell)


def _names(node: ast.stmt) -> list[ast.Name]:
    return [name for name in getattr(node, "targets", []) if isinstance(name, ast.Name)]


def _differs(node: ast.stmt, values: dict[str, str]) -> bool:
    return any(
        name.id in values and values[name.id] != ast.unparse(node.value) for name in _names(node)
    )


def contents(index: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of docs/index.md, each with the titles and paths of the pages that it lists."""
    sections = []
    for part in re.split(r"^## +", index, flags=re.M)[1:]:
        links = [
            (match["text"], resolve("docs/index.md", target)[0])
            for match, _, _, target in targets(part)
        ]
        sections.append((part.partition("\n")[0].strip(), links))
    return sections


def toctrees(sections: list[tuple[str, list[tuple[str, str]]]]) -> str:
    """Return the contents as Sphinx reads them."""
    trees = []
    for caption, entries in sections:
        lines = [f"{title} </{path.rpartition('.')[0]}>" for title, path in entries]
        trees.append(
            "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```", ""])
        )
    return "\n".join(trees)


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return what pages of the site load over a network: scripts, styles and images. It should be nothing."""
    pattern = re.compile(
        r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"'
    )
    pages = [path for path in sorted(site.rglob("*.html")) if path.parent.name != "_static"]
    return [
        f"{path}: {found}"
        for path in pages
        for found in pattern.findall(path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    source, site = ROOT / SOURCE, ROOT / SITE
    Pages(ROOT, source).write()
    shutil.rmtree(site, ignore_errors=True)
    (source / "extra").mkdir(exist_ok=True)
    options = [
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-c",
        str(ROOT / "docs"),
        "-d",
        str(ROOT / "build/site-doctrees"),
    ]
    options += ["-D", f"html_extra_path={source / 'extra'}"]
    if status := sphinx([*options, str(source), str(site)]):
        return status
    if outside := loaded_from_elsewhere(site):
        print("The site would need a network:", *outside, sep="\n", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(
        f"{os.path.relpath(site / 'index.html')}: {len(list(site.rglob('*.html')))} pages, {size / 1e6:.1f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
