"""README and docs/: blocks run or parse, and the site gathers them; `make site` checks links."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from tests import pages
from tests.pages import (
    ROOT,
    blocks,
    builder,
    parse,
    run,
    workplace,
)
from twell.config import CONFIGS, TrainConfig

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LESSONS = sorted(f"docs/lessons/{path.name}" for path in (ROOT / "docs" / "lessons").glob("*.md"))
LINKED = [*PAGES, *LESSONS, "data/README.md", "kernels/README.md"]
# They train, trace and evaluate by the command line, as tests of these do.
SLOW = ["docs/training.md", "docs/inspector.md", "docs/evaluation.md"]
FAST = [page for page in PAGES if page not in SLOW]


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("pages", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_blocks_run(pages, tmp_path):
    every = [block for page in pages for block in blocks(page, text_of(page))]
    failure = run([block for block in every if block.needs is None], tmp_path)
    assert failure is None, failure
    written = [path for path in tmp_path.glob("*/**/*") if path.is_file() and not path.is_symlink()]
    names = {str(Path(*path.relative_to(tmp_path).parts[1:])) for path in written}
    ignored = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True)
    assert names - {*ignored.stdout.decode().splitlines()} == set()


def test_blocks_that_do_not_run_here_parse():
    every = [block for page in PAGES for block in blocks(page, text_of(page)) if block.needs]
    failures = [failure for block in every if (failure := parse(block))]
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("page", LINKED)
def test_targets_of_make_exist(page):
    every = re.findall(r"`(make [a-z]+[^`\n]*)`", text_of(page))
    assert [wrong for one in every if (wrong := pages.mistake_in_command(one.split()))] == []


def test_readme_is_short():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 130
    assert [n for n, line in enumerate(lines, 1) if len(line) > 200] == []


def test_the_page_of_trainings_names_every_configuration():
    names = {file.stem for file in CONFIGS.glob("*.yaml")}
    assert names <= {*re.findall(r"`([\w.]+)`", text_of("docs/training.md"))}


def test_index_lists_every_page_and_notebook():
    sections = builder().contents(text_of("docs/index.md"))
    listed = [page for _, entries in sections for _, page in entries]
    expected = {page for page in PAGES if page not in ("README.md", "docs/index.md")}
    expected |= {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert expected <= set(listed) and len(listed) == len(set(listed))


# The machinery itself, on small pages.

PAGE = """# A page

```bash
x=1; mkdir -p runs && echo "made $x" > runs/note
```

```python
note = open("runs/note").read()
```

```python
assert note == "made 1\\n"
```

```bash
{last}
```
"""
SECOND = "```python\nassert 'note' not in globals()\nopen('runs/note')\n```\n"


@pytest.mark.parametrize(
    ("last", "start", "output"),
    [
        ("grep made runs/note", "docs/b.md:1, block 1 (python) failed\n", "FileNotFoundError"),
        ("echo before; false; echo after", "docs/a.md:15, block 4 (bash) failed\n", "before\nexit"),
        ("echo $unset", "docs/a.md:15, block 4 (bash) failed\n", "unbound variable"),
        ("echo before; sleep 60", "docs/a.md:15, block 4 (bash) did not end within 6", "before"),
    ],
)
def test_blocks_share_a_page_alone_and_one_that_fails_is_named(
    tmp_path, monkeypatch, last, start, output
):
    monkeypatch.setattr(pages, "PRELOADED", "")
    every = blocks("docs/a.md", PAGE.format(last=last)) + blocks("docs/b.md", SECOND)
    assert [block.line for block in every] == [3, 7, 11, 15, 1]
    failure = run(every, tmp_path, seconds=6)
    assert failure.startswith(start)
    printed = failure.partition("--- output")[2]
    assert output in printed and "after" not in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- needs: moonlight -->\n```bash\ntrue\n```\n", "a.md:1: a block needs 'moonlight'"),
        ("<!-- needs: gpu -->\n\n```bash\ntrue\n```\n", "does not stand directly above a block"),
        ("```sh\ntrue\n```\n", "a.md:1: a block of sh; write bash or python"),
    ],
)
def test_markers_and_languages_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        blocks("a.md", text)


def test_what_blocks_write_stays_out_of_the_checkout(tmp_path):
    (workplace(tmp_path) / "data" / "bench" / "new.csv").write_text("x")
    assert not (ROOT / "data" / "bench" / "new.csv").exists()
    every = ("data/paper.yaml", "twell/kernels/union.py")
    assert all((tmp_path / name).is_file() for name in every)


CORRECT = """
python -m twell train 20m source=texts/ tokens=1e8 --out runs/a
FEW=1 twell train my.yaml any=1 && python -m twell runs | head
accelerate launch --multi_gpu --num_processes 8 -m twell train 1b \\
  tokens=1e9 --resume
python -m twell train --help  # all fields
for l1 in 0 1e-3; do
  twell train quick l1_coefficient=$l1 --out runs/l1-$l1
done
twell trace "$run" --valid --aggregate --tokens "$tokens" --out build/x.npz
python -m pytest tests/test_docs.py::test_readme_is_short -q
make test JOBS=2
pip install -e .
python -m tests.fuzz --cases 100 --training
"""
WRONG = {
    "if true; then": "syntax error",
    "python -m twell train 20m --output runs/a": "No such option: --output",
    "python -m twell train 20m --out mine": "--out mine/ is not below build/ or runs/",
    "python -m twell train 20m tokns=1e8": "unknown field 'tokns'",
    "python -m twell train 21m": "21m",
    'twell train "$config" tokns="$tokens"': "unknown field in tokns=$tokens",
    "accelerate launch --many_gpus -m twell train 1b": "--many_gpus",
    "accelerate launch -m twell train 1b --steps 3": "No such option: --steps",
    "twell measure model --decode": "requires an argument",
    "make lunch": "no target lunch",
    "python -m tests.fuss": "there is no tests/fuss.py",
    "python -m tests.fuzz --case 100": "no option --case",
    "python -m pytest tests/test_doc.py": "there is no tests/test_doc.py",
    "bash scripts/receipt.sh laptop": "there is no scripts/receipt.sh",
}
PYTHON = {
    "import twell\ntwell.Trace.load('y').counts()\nimport twell.sparse.ops": None,
    "twell.lode('x')": "there is no twell.lode",
    "twell.Trace.lode('x')": "there is no twell.Trace.lode",
    "from twell import Spars": "there is no twell.Spars",
    "import twell.nothing": "there is no twell.nothing",
    "x = (": "line 1:",
}
CODE = [("bash", CORRECT, None), *(("bash", *item) for item in WRONG.items())]


@pytest.mark.parametrize(
    ("language", "code", "wrong"), CODE + [("python", *item) for item in PYTHON.items()]
)
def test_commands_and_names_are_checked(language, code, wrong):
    (block,) = blocks("a.md", f"<!-- needs: minutes -->\n```{language}\n{code.strip()}\n```\n")
    failure = parse(block)
    assert failure is None if wrong is None else wrong in failure, failure


# The site.

FILES = {
    "README.md": "# Top\n\n[a](docs/a.md#part) [code](src/x.py#L3) [folder](src/)\n",
    "docs/index.md": "# Pages\n\n## First\n\n- [The page](a.md): x\n- [01](../notebooks/n.ipynb)\n",
    "docs/a.md": "# A\n\n## Part\n\n[card](../data/card.md) [lesson](lessons/n.md) `[no](x)`\n",
    "docs/lessons/n.md": "# A page of the notebook\n",
    "data/card.md": "---\nlicense: mit\n---\n# Card\n",
    **{"src/x.py": "x = 1\n", "live/view.html": "<p>view</p>"},
}


def executed_notebook():
    """With parameters as papermill leaves them, a link and a widget whose cell wrote a page."""
    shown = [{"text/markdown": "Written to `live/view.html`."}]
    shown += [{"application/vnd.jupyter.widget-view+json": {}}]
    outputs = [nbformat.v4.new_output("display_data", data) for data in shown]
    tags = [{"tags": ["parameters"]}, {"tags": ["injected-parameters"]}]
    cells = [
        nbformat.v4.new_code_cell("a = 1\nb = 2", metadata=tags[0]),
        nbformat.v4.new_code_cell("a = 1\nb = 3\nc = 4", metadata=tags[1]),
        nbformat.v4.new_markdown_cell("# N\n[a](../docs/a.md)"),
        nbformat.v4.new_code_cell("widget", outputs=outputs),
    ]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {}}))


def test_the_site_gathers_pages_with_links_that_hold(tmp_path):
    for name, text in (FILES | {"build/notebooks/n.ipynb": executed_notebook()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    source = tmp_path / "source"
    builder().Pages(tmp_path, source).write()
    start = (source / "index.md").read_text()
    assert (
        "[a](docs/a.md#part) [code](src/x.py) folder" in start and (source / "src/x.py").is_file()
    )
    assert ":caption: First\n\nThe page </docs/a>\n01 </notebooks/n>\n```" in start
    page = (source / "docs" / "a.md").read_text()
    assert "[card](../data/card.md) [lesson](../notebooks/n.ipynb) `[no](x)`" in page
    assert (source / "data" / "card.md").read_text() == "---\norphan: true\n---\n\n# Card\n"
    notebook = json.loads((source / "notebooks" / "n.ipynb").read_text())
    assert "widgets" not in notebook["metadata"]
    own, prose, widget = notebook["cells"]
    assert "".join(own["source"]) == "a = 1\nb = 2"  # without papermill's parameters
    assert prose["source"] == "# N\n[a](../docs/a.md)"
    html = widget["outputs"][1]["data"]["text/html"]
    assert '<iframe class="inspector" src="view.html"' in html
    assert (source / "extra" / "notebooks" / "view.html").read_text() == "<p>view</p>"


def test_a_site_that_needs_a_network_is_refused(tmp_path):
    page, here = tmp_path / "a.html", '<script src="a.js"></script><link href="style.css">'
    page.write_text(here + '<a href="https://x.org">x</a>')
    assert builder().loaded_from_elsewhere(tmp_path) == []
    page.write_text('<script async src="https://cdn.org/a.js"></script>')
    assert builder().loaded_from_elsewhere(tmp_path) == [f"{page}: https://cdn.org/a.js"]


def test_formulas_are_shown_without_a_network(tmp_path):
    sphinx = pytest.importorskip("sphinx.cmd.build").main
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    text = "# Loss\n\nIt is $\\lambda$ times\n\n$$\\frac{1}{N}\\sum_n |h_n|.$$\n"
    (source / "index.md").write_text(text, encoding="utf-8")
    assert sphinx(["-q", "-W", "-b", "html", "-c", str(ROOT / "docs"), str(source), str(site)]) == 0
    page = (site / "index.html").read_text(encoding="utf-8")
    assert page.count("<math") == 2 and "λ" in page and "\\lambda" not in page
    assert builder().loaded_from_elsewhere(site) == []


# The recipe.

# It notes how it was called; trainings leave a configuration behind, traces a file.
PROGRAM = r"""#!/bin/sh
(printf NAME; printf '\t%s' "$@"; echo) >> commands
for out in "$@"; do :; done
case "$*" in
  *" train "*) mkdir -p "$out" && touch "$out/config.yaml";;
  *--out*) touch "$out";;
esac
"""


@pytest.mark.parametrize(
    ("scale", "launcher", "steps"),
    [("laptop", "python", 293), ("gpu", "python", 1526), ("four-gpus", "accelerate", 1526)],
)
def test_the_recipe_gives_commands_that_exist(scale, launcher, steps, tmp_path):
    programs = tmp_path / ".venv" / "bin"
    for folder in (tmp_path / "scripts", programs):
        folder.mkdir(parents=True)
    recipe = shutil.copy(ROOT / "scripts" / "recipe.sh", tmp_path / "scripts")
    for name in ("python", "accelerate"):
        (programs / name).write_text(PROGRAM.replace("NAME", name))
        (programs / name).chmod(0o755)
    calls = []
    for _ in range(2):
        subprocess.run(["bash", recipe, scale, "texts/"], capture_output=True, check=True)
        noted = (tmp_path / "commands").read_text().splitlines()
        calls.append([line.split("\t") for line in noted])
        (tmp_path / "commands").unlink()
    first, again = calls
    assert [wrong for words in first + again if (wrong := pages.mistake_in_command(words))] == []
    trainings = [words for words in first if "train" in words]
    assert [words[0] for words in trainings] == [launcher] * 2
    assert not any("--resume" in words for words in trainings)
    # What is there is not made again, and trainings resume.
    called = [words[words.index("twell") + 1] for words in again]
    assert called == ["info", "train", "train", "runs"]
    assert all("--resume" in words for words in again if "train" in words)
    dense, sparse = ([word for word in words if "=" in word] for words in trainings)
    differences = {word.partition("=")[0] for word in set(dense) ^ set(sparse)}
    assert differences == {"l1_coefficient", "backend"}
    name = trainings[0][trainings[0].index("train") + 1]
    fields = [word for word in dense if not word.startswith("source=")]
    assert TrainConfig.load(name, fields).steps == steps


def test_the_recipe_says_what_is_missing():
    for scale, message in (("moon", "usage: "), ("gpu", "needs a folder of texts")):
        command = ["bash", ROOT / "scripts" / "recipe.sh", scale]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr


def test_tests_that_the_documents_name_exist():
    named = {  # the kernel log is of the past
        name
        for page in (ROOT / "docs").rglob("*.md")
        if page.stem != "kernel-log"
        for name in re.findall(r"`(test_\w+)`", page.read_text())
    }
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert named and not {name for name in named if f"def {name}(" not in sources}
