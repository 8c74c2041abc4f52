"""Write docs/lessons/, the lessons with what they show, as pages that GitHub displays.

    python scripts/lessons.py [NAME ...]

Each notebook runs in this process with its own parameters. A page has its text and code; printed
text, tables, and links to the figures follow the cells. Pictures that are not among the tracked
figures, since a model computes them here, are kept beside the pages.
"""

import ast
import contextlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Cell
from typing import Any

import nbformat
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure

from study import plots
from twell import results

ROOT = results.root()
NOTEBOOKS, PAGES = ROOT / "notebooks", ROOT / "docs" / "lessons"
DOTS = 110  # an inch, of pictures that are kept beside the pages
WIDGET = "application/vnd.jupyter.widget-view+json"
SPAN = re.compile(r' (?:row|col)span="\d+"')
HEAD = """<!-- python scripts/lessons.py writes this page from the notebook -->

*The notebook [{name}](../../notebooks/{name}.ipynb) and what it shows.
`make lab` opens it, to run and to change. [All lessons](README.md)*
"""


def run(path: Path, given: Mapping[str, Any]) -> tuple[list[Cell], dict[str, Any]]:
    """Run a notebook in this process, without lines of IPython; return its cells and its names.

    given: parameters, of which it takes those that it declares. A cell has its last value, what
    IPython shows of it by MIME type, and the printed text.
    """
    done, names, formats = [], {}, DisplayFormatter()
    for one in nbformat.read(path, 4).cells:
        cell = Cell(kind=one.cell_type, source=one.source, value=None, shown={}, printed="")
        done.append(cell)
        if cell.kind != "code":
            continue
        tree = ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.M))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, path.stem, "exec"), names)
            if last is not None:
                cell.value = eval(compile(ast.Expression(last.value), path.stem, "eval"), names)
        cell.printed = printed.getvalue()
        if cell.value is not None:
            cell.shown = formats.format(cell.value)[0]
        if "parameters" in one.metadata.get("tags", ()):
            names |= {name: given[name] for name in names.keys() & given.keys()}
    return done, names


def table(text: str) -> str:
    """Return a table of pandas without its looks, a row a line."""
    text = re.sub(r"<style.*?</style>|</?(?:div|p|caption)\b[^>]*>|\s*\n\s*", "", text, flags=re.S)
    text = re.search(r"<table.*</table>", text, re.S)[0]
    text = re.sub(r"<(?!/?[a-z])", "&lt;", text)  # of a cell such as "<1 active"
    text = re.sub(r"<(\w+)([^>]*)>", lambda tag: f"<{tag[1]}{''.join(SPAN.findall(tag[2]))}>", text)
    return re.sub(r"(<table>|</thead>|<tbody>|</tr>|<thead>)", r"\1\n", text)


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def shown(cell: Cell, heading: str) -> list[str]:
    """Return what a cell showed as blocks of Markdown."""
    blocks = [fenced(cell.printed, "text")] if cell.printed.strip() else []
    if isinstance(cell.value, Figure):
        name = f"{cell.value.get_label()}.png"
        tracked = (ROOT / "figures" / name).is_file()
        path = f"../../figures/{name}" if tracked else name
        blocks.append(f"![{heading}]({path})")
        if tracked and getattr(cell.value, "caption", ""):  # others were saved with it
            blocks.append(f"*{cell.value.caption.replace('*', chr(92) + '*')}*")
    elif WIDGET in cell.shown:
        words = "The view needs a running notebook. [The inspector](../inspector.md) shows it."
        blocks.append(f"*{words}*")
    elif "text/html" in cell.shown:
        blocks.append(table(cell.shown["text/html"]))
    elif cell.value is not None:
        blocks.append(fenced(str(cell.value), "text"))
    return blocks


def page(name: str, done: Sequence[Cell], outputs: bool = True) -> str:
    """Return the page of a notebook's cells, after they ran or without what they show."""
    blocks, heading = [], ""
    for cell in done:
        if cell.kind == "markdown":
            headings = re.findall(r"^#+ +(.+)$", cell.source, re.M)
            heading = headings[-1] if headings else heading
            links = cell.source.replace("](../", "](../../")  # seen from the page
            blocks.append(re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](\1.md", links))
            continue
        blocks.append(fenced(cell.source, "python"))
        blocks += shown(cell, heading) if outputs else []
    first, *rest = blocks
    title, _, begin = first.partition("\n")
    return "\n\n".join([title, HEAD.format(name=name).strip(), begin.strip(), *rest]) + "\n"


def main(*names: str) -> None:
    os.chdir(ROOT)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        done, _ = run(path, {})
        for cell in done:
            name = cell.value.get_label() if isinstance(cell.value, Figure) else ""
            if name and not (ROOT / "figures" / f"{name}.png").is_file():
                results.write_atomically(PAGES / f"{name}.png", plots.png(cell.value, DOTS))
        results.write_atomically(PAGES / f"{path.stem}.md", page(path.stem, done))
        print(f"docs/lessons/{path.stem}.md")


if __name__ == "__main__":
    main(*sys.argv[1:])
