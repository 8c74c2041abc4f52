"""README and docs/: blocks run or parse, links resolve, and the recipe gives commands that exist."""

import re
import shutil
import subprocess

import pytest
from markdown_it import MarkdownIt

from tests import pages
from tests.pages import ROOT, text_of

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
LESSONS = sorted(f"docs/lessons/{path.name}" for path in (ROOT / "docs" / "lessons").glob("*.md"))
LINKED = ["README.md", *DOCS, *LESSONS, "data/README.md", "kernels/README.md"]


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs", marks=pytest.mark.slow)])
def test_blocks_run(page, tmp_path):
    named = DOCS if page == "docs" else [page]
    every = [block for one in named for block in pages.blocks(one)]
    pages.run([block for block in every if block.needs is None], tmp_path)


@pytest.mark.parametrize("page", ["README.md", *DOCS])
def test_commands_and_names_in_documents_exist(page):
    for block in pages.blocks(page):
        pages.check(block)
    for command in re.findall(r"`(make [a-z]+[^`\n]*)`", text_of(page)):
        pages.check_command(command.split())


# Links.


def parsed(text):
    return MarkdownIt("commonmark").enable("table").parse(re.sub(r"\A---\n.*?\n---\n", "", text))


def anchors(text):
    """The anchors that GitHub gives to headings."""
    tokens, names = parsed(text), []
    for token, inline in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            heading = "".join(one.content for one in inline.children if one.type != "image")
            name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            names.append(f"{name}-{names.count(name)}" if name in names else name)
    return names


def links(text):
    inline = [one for token in parsed(text) for one in token.children or ()]
    targets = [one.attrs.get("href") or one.attrs.get("src") for one in inline]
    html = re.findall(r'<(?:img|a)\b[^>]*?(?:src|href)="([^"]+)"', text)
    return [target for target in [*targets, *html] if target and not re.match(r"\w+:", target)]


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_to_files_and_headings(page):
    for target in links(text_of(page)):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file.read_text()), target


# The recipe. The program notes how it was called; trainings leave a configuration behind, traces a
# file.
PROGRAM = r"""#!/bin/sh
(printf python; printf '\t%s' "$@"; echo) >> commands
for out in "$@"; do :; done
case "$*" in
  *" train "*) mkdir -p "$out" && touch "$out/config.yaml";;
  *--out*) touch "$out";;
esac
"""


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_the_recipe_gives_commands_that_exist(scale, tmp_path):
    programs = tmp_path / ".venv" / "bin"
    for folder in (tmp_path / "scripts", programs):
        folder.mkdir(parents=True)
    recipe = shutil.copy(ROOT / "scripts" / "recipe.sh", tmp_path / "scripts")
    (programs / "python").write_text(PROGRAM)
    (programs / "python").chmod(0o755)
    calls = []
    for _ in range(2):
        subprocess.run(["bash", recipe, scale, "texts/"], capture_output=True, check=True)
        noted = (tmp_path / "commands").read_text().splitlines()
        calls.append([line.split("\t") for line in noted])
        (tmp_path / "commands").unlink()
    first, again = calls
    for words in first + again:
        pages.check_command(words)
    trainings = [words for words in first if "train" in words]
    assert len(trainings) == 2
    # What is there is not made again, and trainings resume.
    repeated = [words[words.index("twell") + 1] for words in again]
    assert repeated == ["info", "train", "train", "runs"]
    assert ["--resume" in words for words in first] == [False] * len(first)
    assert ["--resume" in words for words in again] == [False, True, True, False]
    dense, sparse = ([word for word in words if "=" in word] for words in trainings)
    differences = {word.partition("=")[0] for word in set(dense) ^ set(sparse)}
    assert differences == {"l1_coefficient"}
