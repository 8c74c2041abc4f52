"""README and docs/: blocks run or parse, links resolve, the recipe gives commands that exist."""

import re
import shutil
import subprocess

import pytest

from tests import pages
from tests.pages import ROOT, text_of

DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
LESSONS = sorted(f"docs/lessons/{path.name}" for path in (ROOT / "docs" / "lessons").glob("*.md"))
LINKED = ["README.md", *DOCS, *LESSONS, "data/README.md", "kernels/README.md"]
SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in DOCS]


@pytest.mark.parametrize("page", ["README.md", *SLOW])
def test_blocks_run(page, tmp_path):
    pages.run(page, tmp_path / "page")


@pytest.mark.parametrize("page", ["README.md", *DOCS])
def test_commands_in_documents_exist(page):
    for block in pages.blocks(page):
        if block.language == "bash":
            for arguments in pages.commands(block.code):
                pages.check_command(arguments)


def anchors(text):
    """The anchors that GitHub gives to headings."""
    names = []
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        heading = re.sub(r"!?\[(.*?)\]\(.*?\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return names


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    for target in re.findall(r'(?:\]\(|(?:src|href)=")(?!\w+:)([^)"\s]+)', text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file.read_text()), target


# The recipe. The program notes how it was called; trainings leave a configuration behind, traces a
# file.
PROGRAM = r"""#!/bin/sh
(printf '%s\t' "$@"; echo) >> commands
for out in "$@"; do :; done
case "$*" in
  *" train "*) mkdir -p "$out" && touch "$out/config.yaml";;
  *--out*) touch "$out";;
esac
"""


def test_the_recipe_gives_commands_that_exist(tmp_path):
    program = tmp_path / ".venv" / "bin" / "python"
    for folder in (tmp_path / "scripts", program.parent):
        folder.mkdir(parents=True)
    recipe = shutil.copy(ROOT / "scripts" / "recipe.sh", tmp_path / "scripts")
    program.write_text(PROGRAM)
    program.chmod(0o755)
    calls = []
    for _ in range(2):
        subprocess.run(["bash", recipe, "laptop", "texts/"], capture_output=True, check=True)
        noted = (tmp_path / "commands").read_text().splitlines()
        calls.append([line.split("\t")[2:-1] for line in noted])
        (tmp_path / "commands").unlink()
    for arguments in calls[0] + calls[1]:
        pages.check_command(arguments)
    # What is there is not made again, and trainings resume.
    assert [arguments[0] for arguments in calls[1]] == ["info", "train", "train", "runs"]
    assert not any("--resume" in arguments for arguments in calls[0])
    assert ["--resume" in arguments for arguments in calls[1]] == [False, True, True, False]
