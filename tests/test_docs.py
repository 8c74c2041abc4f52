"""README and docs/: code blocks run or parse, links lead somewhere, terms are explained, and the site can be built."""

import json
import re
import shutil
import subprocess

import pytest

from tests import pages
from tests.pages import (
    ROOT,
    anchors,
    blocks,
    broken_links,
    builder,
    commands,
    parse,
    run,
    unexplained,
    workplace,
)
from twell.config import TrainConfig

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LINKED = [
    *PAGES,
    "data/README.md",
    *(["kernels/README.md"] if (ROOT / "kernels" / "README.md").is_file() else []),
]
# Terms that a reader of README cannot know, by their anchors in the glossary: linked at or before the first use, or bold
# where README explains them itself.
TERMS = {
    "active-neuron": "active neurons?",
    "aggregate": r"aggregates?\b",
    "balanced-columns": "balanced columns",
    "cuda-graph": "CUDA graphs?",
    "dead-neuron": "dead neurons?",
    "flagship": "flagship",
    "gated-layer": "(non-)?gated",
    "hybrid-format": "hybrid",
    "imposed-activity": "imposed",
    "l1-coefficient": "L1 coefficients?",
    "nats": "nats",
    "overflow": "overflow",
    "re-initialisation": "re-initialis",
    "relative-rms": "relative RMS",
    "row-wise": "row-?wise",
    "seed-interval-": "± is|seed intervals?",
    "skewed-and-even-activity": "skewed",
    "twell": "(?-i:TwELL)",
    "union": r"unions?\b",
}


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path):
    every = [block for block in blocks(page, text_of(page)) if block.needs is None]
    failure = run(every, workplace(tmp_path))
    assert failure is None, failure


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_do_not_run_here_parse(page):
    failures = [
        failure
        for block in blocks(page, text_of(page))
        if block.needs and (failure := parse(block))
    ]
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page):
    assert broken_links(page, text_of(page)) == []


@pytest.mark.parametrize("page", LINKED)
def test_targets_of_make_exist(page):
    commands = re.findall(r"`(make [a-z]+[^`\n]*)`", text_of(page))
    assert [
        wrong for command in commands if (wrong := pages.mistake_in_command(command.split()))
    ] == []


def test_readme_is_short():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 130
    assert [n for n, line in enumerate(lines, 1) if len(line) > 200] == []


@pytest.mark.skipif(not (ROOT / "docs" / "glossary.md").is_file(), reason="there is no glossary")
def test_readme_explains_its_terms():
    assert set(TERMS) <= anchors(text_of("docs/glossary.md"))
    assert unexplained(text_of("README.md"), TERMS) == []


def test_index_lists_every_page_and_notebook():
    listed = [
        page for _, entries in builder().contents(text_of("docs/index.md")) for _, page in entries
    ]
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

Prose.

```python
assert note == "made 1\\n"
open("runs/note", "w").write("again\\n")
```

```bash
grep again runs/note
{last}
```
"""


def test_blocks_of_a_page_run_in_order_and_share_one_interpreter(tmp_path):
    every = blocks("docs/a.md", PAGE.format(last="true"))
    assert [(block.language, block.line) for block in every] == [
        ("bash", 3),
        ("python", 7),
        ("python", 13),
        ("bash", 18),
    ]
    assert run(every, tmp_path) is None


@pytest.mark.parametrize(
    ("last", "output"),
    [
        ("echo before; false; echo after", "before\nexit status 1"),
        ("echo $unset", "unbound variable"),
    ],
)
def test_a_block_that_fails_is_named(tmp_path, last, output):
    failure = run(blocks("docs/a.md", PAGE.format(last=last)), tmp_path)
    assert failure.startswith("docs/a.md:18, block 4 (bash) failed\ngrep again runs/note\n")
    assert output in failure and "after" not in failure.partition("--- output")[2]


def test_a_python_block_that_fails_names_the_line_of_the_page(tmp_path):
    page = PAGE.format(last="true").replace("made 1", "made 2")
    failure = run(blocks("docs/a.md", page), tmp_path)
    assert failure.startswith("docs/a.md:13, block 3 (python) failed")
    assert 'File "docs/a.md", line 14' in failure and "AssertionError" in failure
    slow = run(blocks("docs/a.md", "```bash\nsleep 60\n```\n"), tmp_path, seconds=1)
    assert slow.startswith("docs/a.md:1, block 1 (bash) did not end within the 1 seconds of a page")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- needs: moonlight -->\n```bash\ntrue\n```\n", "a.md:1: a block needs 'moonlight'"),
        (
            "<!-- needs: gpu -->\n\n```bash\ntrue\n```\n",
            "a.md:1: this marker does not stand directly above a block",
        ),
        ("```sh\ntrue\n```\n", "a.md:1: a block of sh; write bash or python"),
    ],
)
def test_markers_and_languages_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        blocks("a.md", text)


def test_what_blocks_write_stays_out_of_the_checkout(tmp_path):
    folder = workplace(tmp_path)
    (folder / "data" / "bench" / "new.csv").write_text("x")
    (folder / "runs").mkdir()
    assert (folder / "data" / "paper.yaml").is_file() and (
        folder / "twell" / "kernels" / "union.py"
    ).is_file()
    assert not (ROOT / "data" / "bench" / "new.csv").exists()


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("python -m twell train 20m source=texts/ tokens=1e8 --out runs/a", None),
        ("FEW=1 twell train my.yaml any=1 && python -m twell runs | head", None),
        (
            "accelerate launch --multi_gpu --num_processes 8 -m twell train 1b \\\n  tokens=1e9 --resume",
            None,
        ),
        ("python -m twell train --help  # all fields", None),
        (
            "for l1 in 0 1e-3; do\n  twell train quick l1_coefficient=$l1 --out runs/l1-$l1\ndone",
            None,
        ),
        (
            "python -m pytest tests/test_docs.py::test_readme_is_short -q\nmake test JOBS=2\npip install -e .",
            None,
        ),
        ("python -m tests.fuzz --cases 100 --training", None),
        ("if true; then", "syntax error"),
        ("python -m twell train 20m --output runs/a", "No such option: --output"),
        ("python -m twell train 20m tokns=1e8", "did you mean 'tokens'?"),
        ("python -m twell train 21m", "21m"),
        ('twell train "$config" tokns="$tokens"', "unknown field in tokns=$tokens"),
        ('twell trace "$run" --valid --aggregate --tokens "$tokens" --out x.npz', None),
        ("accelerate launch --many_gpus -m twell train 1b", "--many_gpus"),
        ("accelerate launch -m twell train 1b --steps 3", "No such option: --steps"),
        ("twell measure model --decode", "requires an argument"),
        ("make lunch", "no target lunch"),
        ("python -m tests.fuss", "there is no tests/fuss.py"),
        ("python -m tests.fuzz --case 100", "has no option --case"),
        ("python -m pytest tests/test_doc.py", "there is no tests/test_doc.py"),
        (
            "python -m pytest tests/test_docs.py::test_nothing",
            "there is no test_nothing in tests/test_docs.py",
        ),
        ("bash scripts/receipt.sh laptop", "there is no scripts/receipt.sh"),
    ],
)
def test_commands_are_parsed(code, wrong):
    (block,) = blocks("docs/a.md", f"<!-- needs: minutes -->\n```bash\n{code}\n```\n")
    failure = parse(block)
    assert failure is None if wrong is None else wrong in failure, failure


def test_commands_are_cut_at_operators_only():
    code = "A=1 B='2 3' twell info | head -1; (cd x && make y) # make z\nwhile true; do twell runs; done"
    assert list(commands(code)) == [
        ["twell", "info"],
        ["head", "-1"],
        ["cd", "x"],
        ["make", "y"],
        ["while", "true"],
        ["twell", "runs"],
        ["done"],
    ]


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("import twell\nmodel = twell.load('x')\ntwell.Trace.load('y').counts()", None),
        ("from twell import SparseFFN, analysis\nimport twell.kernels.ops", None),
        ("twell.lode('x')", "there is no twell.lode"),
        ("twell.Trace.lode('x')", "there is no twell.Trace.lode"),
        ("from twell import Spars", "there is no twell.Spars"),
        ("import twell.nothing", "there is no twell.nothing"),
        ("x = (", "line 1:"),
    ],
)
def test_names_in_python_are_checked(code, wrong):
    (block,) = blocks("docs/a.md", f"<!-- needs: gpu -->\n```python\n{code}\n```\n")
    failure = parse(block)
    assert failure is None if wrong is None else wrong in failure, failure


def test_anchors_are_githubs():
    text = "# Speed (2B): `auto`, and *dense*\n\n## The [paper](x.md)\n\n## The paper\n\n```bash\n# no heading\n```\n"
    assert anchors(text) == {"speed-2b-auto-and-dense", "the-paper", "the-paper-1"}
    assert anchors("## re-initialisation, L1 warm-up\n### Über_x\n") == {
        "re-initialisation-l1-warm-up",
        "über_x",
    }


def test_broken_links_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("# Here\n")
    (tmp_path / "pic ture.png").touch()
    text = (
        "[a](b.md#here) [a](../docs/) [a](https://x.org/y) [a](#own) `[no](link.md)` <!-- [no](link.md) -->\n\n# Own\n"
        '[a](c.md)\n[a](b.md#there)\n![a](../figure.png)\n[![a](x.png)](b.md)\n<img src="y.png">\n[a](#none)\n'
        "```text\n[no](link.md)\n```\n"
    )
    (tmp_path / "docs" / "a.md").write_text(text)
    assert broken_links("docs/a.md", text, tmp_path) == [
        "docs/a.md:4: there is no docs/c.md",
        "docs/a.md:5: docs/b.md has no heading #there",
        "docs/a.md:6: there is no figure.png",
        "docs/a.md:7: there is no docs/x.png",
        "docs/a.md:8: there is no docs/y.png",
        "docs/a.md:9: docs/a.md has no heading #none",
    ]


def test_terms_are_explained_or_linked_at_their_first_use():
    terms = {
        "union": "unions?",
        "overflow": "overflow",
        "nats": "nats",
        "skewed": "skewed",
        "auto": "auto",
        "dead": "dead",
    }
    text = (
        "# A union\n`nats` [unions](docs/glossary.md#union) and a union.\n**Overflow** means that. nats\n"
        "Skewed [skewed](docs/glossary.md#skewed) [x](docs/auto.md) [they die](docs/glossary.md#dead)\nDead.\n"
    )
    assert unexplained(text, terms) == ["nats (line 3)", "skewed (line 4)"]


# The site.


def small_repository(folder):
    files = {
        "README.md": "# Top\n\n[a](docs/a.md#part) [code](src/x.py#L3) [folder](src/) ![p](pic.png)\n",
        "docs/index.md": "# Pages\n\n## First\n\n- [The page](a.md): x\n- [Data](../data/README.md)\n- [01](../notebooks/n.ipynb)\n",
        "docs/a.md": "# A\n\n## Part\n\n[up](../README.md) [data](../data/) [card](../data/card.md) `[no](x)`\n",
        "data/README.md": "# Data\n",
        "data/card.md": "---\nlicense: mit\n---\n# Card\n",
        "src/x.py": "x = 1\n",
        "pic.png": "",
        "live/view.html": "<p>view</p>",
    }
    cells = [
        {
            "cell_type": "code",
            "metadata": {"tags": ["parameters"]},
            "source": "a = 1\nb = 2",
            "outputs": [],
        },
        {
            "cell_type": "code",
            "metadata": {"tags": ["injected-parameters"]},
            "source": "a = 1\nb = 3\nc = 4",
            "outputs": [],
        },
        {"cell_type": "markdown", "metadata": {}, "source": ["# N\n", "[a](../docs/a.md)"]},
        {
            "cell_type": "code",
            "metadata": {},
            "source": "widget",
            "outputs": [
                {
                    "output_type": "display_data",
                    "data": {"text/markdown": ["Written to `live/view.html`."]},
                },
                {
                    "output_type": "display_data",
                    "data": {"application/vnd.jupyter.widget-view+json": {}},
                },
            ],
        },
    ]
    notebook = {"cells": cells, "metadata": {"widgets": {}}, "nbformat": 4, "nbformat_minor": 5}
    files["build/notebooks/n.ipynb"] = json.dumps(notebook)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_site_gathers_pages_with_links_that_hold(tmp_path):
    source = tmp_path / "source"
    builder().Pages(small_repository(tmp_path), source).write()
    start = (source / "index.md").read_text()
    assert "[a](docs/a.md#part) [code](src/x.py) folder ![p](pic.png)" in start
    assert (
        ":caption: First\n\nThe page </docs/a>\nData </data/README>\n01 </notebooks/n>\n```"
        in start
    )
    assert (source / "src" / "x.py").is_file() and (source / "pic.png").is_file()
    page = (source / "docs" / "a.md").read_text()
    assert "[up](../index.md) [data](../data/README.md) [card](../data/card.md) `[no](x)`" in page
    assert (source / "data" / "card.md").read_text() == "---\norphan: true\n---\n\n# Card\n"
    notebook = json.loads((source / "notebooks" / "n.ipynb").read_text())
    assert "widgets" not in notebook["metadata"]
    assert notebook["cells"][1]["source"] == "# As executed for this page\nb = 3"
    assert notebook["cells"][2]["source"] == "# N\n[a](../docs/a.md)"
    assert (
        '<iframe class="inspector" src="view.html"'
        in notebook["cells"][3]["outputs"][1]["data"]["text/html"]
    )
    assert (source / "extra" / "notebooks" / "view.html").read_text() == "<p>view</p>"


def test_a_site_that_needs_a_network_is_refused(tmp_path):
    page = tmp_path / "a.html"
    page.write_text(
        '<script src="a.js"></script><a href="https://x.org">x</a><link href="style.css">'
    )
    assert builder().loaded_from_elsewhere(tmp_path) == []
    page.write_text('<script async src="https://cdn.org/a.js"></script>')
    assert builder().loaded_from_elsewhere(tmp_path) == [f"{page}: https://cdn.org/a.js"]


@pytest.mark.parametrize(
    ("scale", "launcher", "steps"),
    [("laptop", "python", 293), ("gpu", "python", 1526), ("four-gpus", "accelerate", 1526)],
)
def test_the_recipe_gives_commands_that_exist(scale, launcher, steps, tmp_path):
    """The recipe runs with programs that only note how they were called; trainings leave a configuration behind."""
    (tmp_path / "scripts").mkdir()
    recipe = shutil.copy(ROOT / "scripts" / "recipe.sh", tmp_path / "scripts")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "accelerate"):
        (programs / name).write_text(
            f"""#!/bin/sh\n(printf '{name}'; printf '\\t%s' "$@"; echo) >> commands\n"""
            'for out in "$@"; do :; done\n'
            'case "$*" in *" train "*) mkdir -p "$out" && touch "$out/config.yaml";; *--out*) touch "$out";; esac\n'
        )
        (programs / name).chmod(0o755)
    calls = []
    for _ in range(2):
        done = subprocess.run(["bash", recipe, scale, "texts/"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        calls.append(
            [line.split("\t") for line in (tmp_path / "commands").read_text().splitlines()]
        )
        (tmp_path / "commands").unlink()
    first, again = calls
    assert [wrong for words in first + again if (wrong := pages.mistake_in_command(words))] == []
    trainings = [words for words in first if "train" in words]
    assert [words[0] for words in trainings] == [launcher] * 2 and "--resume" not in sum(
        trainings, []
    )
    # What is there is not made again, and trainings resume.
    assert [words[words.index("twell") + 1] for words in again] == [
        "info",
        "train",
        "train",
        "runs",
    ]
    assert all("--resume" in words for words in again if "train" in words)
    dense, sparse = ([word for word in words if "=" in word] for words in trainings)
    differences = {word.partition("=")[0] for word in set(dense) ^ set(sparse)}
    assert differences == {"l1_coefficient", "backend"}
    name = trainings[0][trainings[0].index("train") + 1]
    assert (
        TrainConfig.load(name, [word for word in dense if not word.startswith("source=")]).steps
        == steps
    )


def test_the_recipe_says_what_is_missing():
    for arguments, message in ((["moon"], "usage: "), (["gpu"], "needs a folder of texts")):
        done = subprocess.run(
            ["bash", ROOT / "scripts" / "recipe.sh", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 2 and message in done.stderr
