"""Build the site of the documents and the executed notebooks: python scripts/build_site.py.

1. Pages are gathered in build/site-source: README.md as the start page, docs/, pages that these
   link to, and the notebooks that `make reproduce` executed.
2. Their links are rewritten: to pages of the site, or to copies of other files. A link to a folder
   without a README becomes plain text.
3. Sphinx writes build/site. Its warnings are errors, so a link that leads nowhere fails.
4. The atlas of the shipped model goes into build/site/atlas.
"""

from __future__ import annotations

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
SHIPPED = Path("data/checkpoints/twell-6m")
ATLAS = '<p><a href="atlas/index.html">An atlas of the shipped model: all its neurons</a></p>'
WIDGET = "application/vnd.jupyter.widget-view+json"

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S)
CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)\1(?!`)", re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
# [text](target "title"), where text may hold one image or brackets; ![text](target);
# <img src="target">; [name]: target
LINK = re.compile(
    r"""(?P<image>!?)\[(?P<text>(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*)\]
        \(<?(?P<inline>[^\s()<>]+)>?(?:\s+"[^"]*")?\)
    |<(?:img|a)\b[^>]*?\b(?:src|href)="(?P<html>[^"]+)"
    |^\ {0,3}\[[^\]]+\]:\s*<?(?P<named>[^\s<>]+)""",
    re.X | re.M,
)


def prose(text: str) -> str:
    """Return Markdown with its code and comments blanked; all else stays where it is."""
    for pattern in (COMMENT, FENCE, CODE):
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def targets(text: str) -> Iterator[tuple[re.Match, int, int, str]]:
    """Yield each link or image: its match, the begin and end of its target, and the target."""
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
        docs = [f"docs/{path.name}" for path in sorted((root / "docs").glob("*.md"))]
        docs.remove("docs/index.md")
        notebooks = [f"notebooks/{path.name}" for path in sorted((root / EXECUTED).glob("*.ipynb"))]
        self.waiting = dict.fromkeys(["README.md", *listed, *docs, *notebooks])
        self.listed = set(self.waiting)

    def write(self) -> None:
        """Write all pages, and the Markdown files that only a page links to."""
        shutil.rmtree(self.source, ignore_errors=True)
        done = set()
        while left := [page for page in self.waiting if page not in done]:
            for page in left:
                place = self.source / self.place(page)
                place.parent.mkdir(parents=True, exist_ok=True)
                written = self._notebook(page) if page.endswith(".ipynb") else self._text(page)
                place.write_text(written, encoding="utf-8")
            done.update(left)

    def place(self, page: str) -> str:
        """Return where a page of the repository stands in the source of the site."""
        return "index.md" if page == "README.md" else page

    def _text(self, page: str) -> str:
        text = self.linked(page, (self.root / page).read_text(encoding="utf-8"))
        if page == "README.md":
            return f"{text}\n{ATLAS}\n\n{toctrees(self.titles)}"
        if page in self.listed:
            return text
        if text.startswith("---\n"):  # of a model card
            text = text.split("\n---\n", 1)[-1]
        return f"---\norphan: true\n---\n\n{text}"

    def _file(self, path: str) -> str | None:
        """Return the file that a target means: of a folder its page, of a lesson its notebook."""
        lesson = f"notebooks/{Path(path).stem}.ipynb"
        if posixpath.dirname(path) == "docs/lessons" and lesson in self.waiting:
            return lesson
        if not (self.root / path).is_dir():
            return path
        pages = (posixpath.normpath(f"{path}/{name}") for name in ("README.md", "index.md"))
        return next((page for page in pages if (self.root / page).is_file()), None)

    def linked(self, page: str, text: str) -> str:
        """Return the text of a page with targets that hold in the site."""
        changes = []
        for match, begin, end, target in targets(text):
            if is_outside(target):
                continue
            folder, anchor = resolve(page, target)
            path = self._file(folder)
            if path is None and match["inline"]:
                changes.append((*match.span(), text[slice(*match.span("text"))]))
                continue
            path = path or folder
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

    def _notebook(self, page: str) -> str:
        """Return an executed notebook without papermill's parameters.

        The page that a widget's cell wrote takes the place of the widget.
        """
        path = self.root / EXECUTED / Path(page).name
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["metadata"].pop("widgets", None)
        cells = notebook["cells"]
        own = [one for one in cells if "injected-parameters" not in one["metadata"].get("tags", ())]
        notebook["cells"] = own
        for cell in own:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked(page, "".join(cell["source"]))
            for output in cell.get("outputs", []):
                if WIDGET in output.get("data", {}):
                    written = re.search(r"`([\w/.-]+\.html)`", json.dumps(cell["outputs"]))[1]
                    extra = self.source / "extra" / posixpath.dirname(page)
                    extra.mkdir(parents=True, exist_ok=True)
                    name = Path(shutil.copy(self.root / written, extra)).name
                    frame = f'<iframe class="inspector" src="{name}" title="{name}"></iframe>'
                    output["data"] = {"text/html": frame}
        return json.dumps(notebook, ensure_ascii=False, indent=1)


def contents(index: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of docs/index.md, each with titles and paths of its pages."""
    sections = []
    for part in re.split(r"^## +", index, flags=re.M)[1:]:
        links = ((match["text"], target) for match, _, _, target in targets(part))
        entries = [(title, resolve("docs/index.md", target)[0]) for title, target in links]
        sections.append((part.partition("\n")[0].strip(), entries))
    return sections


def toctrees(sections: list[tuple[str, list[tuple[str, str]]]]) -> str:
    """Return the contents as Sphinx reads them."""
    trees = []
    for caption, entries in sections:
        lines = [f"{title} </{path.rpartition('.')[0]}>" for title, path in entries]
        head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
        trees.append("\n".join([*head, *lines, "```", ""]))
    return "\n".join(trees)


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return the scripts, styles and images that pages load over a network."""
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"')
    pages = [path for path in sorted(site.rglob("*.html")) if path.parent.name != "_static"]
    texts = ((path, path.read_text(encoding="utf-8")) for path in pages)
    return [f"{path}: {address}" for path, text in texts for address in loads.findall(text)]


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    from twell.inspector import write_atlas

    source, site = ROOT / SOURCE, ROOT / SITE
    Pages(ROOT, source).write()
    shutil.rmtree(site, ignore_errors=True)
    (source / "extra").mkdir(exist_ok=True)
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    options += ["-d", str(ROOT / "build/site-doctrees")]
    options += ["-D", f"html_extra_path={source / 'extra'}", str(source), str(site)]
    if status := sphinx(options):
        return status
    write_atlas(ROOT / SHIPPED, site / "atlas")
    if outside := loaded_from_elsewhere(site):
        print("The site would need a network:", *outside, sep="\n", file=sys.stderr)
        return 1
    print(os.path.relpath(site / "index.html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
