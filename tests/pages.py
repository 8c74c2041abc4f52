"""The code blocks of documents, which run or are parsed."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.factories.commands import read_command
from twell import results
from twell.config import TrainConfig

ROOT = results.root()
NEEDS = (None, "gpu", "network", "minutes")
OTHER_NAMES = "sh shell console zsh py python3 pycon".split()  # of code that nothing would check
BLOCK = re.compile(r"^ *```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^ *```[ \t]*$", re.M | re.S)
MARKER = re.compile(r"<!--\s*needs:\s*(.*?)\s*-->")
# A page runs in a folder with links to the checkout: code as linked folders, data as folders of
# links, where new files do not reach the checkout.
CODE = "twell", "kernels", "study", "tests", "scripts"
DATA = "data", "figures", "notebooks", "docs"
REPOSITORY = re.compile(r"(tests|kernels|scripts|twell)/[\w/.-]+")

# One process imports what blocks need and forks for each page: pages share imports and nothing
# else. Python blocks of a page share its interpreter. It ends with the first block that fails.
PRELOADED = (
    "import pandas, peft, torch, transformers, study.analysis, twell.model, twell.inspector.widget"
)
DRIVER = r"""
import json, os, subprocess, sys

def run(page, folder, blocks):
    os.chdir(folder)
    os.environ["TWELL_CACHE"] = os.environ.get("TWELL_CACHE", folder + "/build/cache")
    shared = {"__name__": "__main__"}
    for language, line, code in blocks:
        print(f"--- {page}:{line}", flush=True)
        if language == "bash":
            subprocess.run(["bash", "-c", "set -euo pipefail\n" + code], check=True)
        else:
            exec(compile("\n" * line + code, page, "exec"), shared)

pages, sys.argv = json.loads(sys.argv[1]), [""]
for page in pages:
    if os.fork() == 0:
        run(*page)
        sys.exit()
    if os.wait()[1]:
        sys.exit(1)
"""


def script(name: str):
    """The module scripts/NAME.py."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block: the line of its fence, from 1, and what it needs that CI has not."""

    page: str
    line: int
    language: str
    code: str
    needs: str | None


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page; every marker stands directly above one."""
    every, text = [], text_of(page)
    lines = text.splitlines()
    markers = {n: match[1] for n, line in enumerate(lines, 1) if (match := MARKER.search(line))}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        needs = markers.pop(line - 1, None)
        assert needs in NEEDS, f"{page}:{line}: a block needs {needs!r}"
        assert match["language"] not in OTHER_NAMES, f"{page}:{line}: write bash or python"
        if match["language"] in ("bash", "python"):
            code = textwrap.dedent(match["code"])
            every.append(Block(page, line, match["language"], code, needs))
    assert not markers, f"{page}: markers without a block: {markers}"
    return every


def workplace(folder: Path) -> Path:
    """Fill a folder with links to the checkout, so that what blocks write stays in it."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in CODE or path.is_file():
            (folder / path.name).symlink_to(path)
        elif path.name in DATA:
            shutil.copytree(path, folder / path.name, copy_function=os.symlink)
    return folder


def run(every: list[Block], folder: Path) -> None:
    """Run blocks of pages, each page in a folder of its own; what they print ends with a mistake."""
    pages: dict[str, list] = {}
    for block in every:
        pages.setdefault(block.page, []).append((block.language, block.line, block.code))
    places = {page: workplace(folder / page.replace("/", "-")) for page in pages}
    left_out = "TRITON_INTERPRET", "PYTHONPATH"
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "HF_HUB_OFFLINE": "1"}
    # Tests may run beside each other: threads that wait for each other's cores are twenty times
    # slower.
    env = {"OMP_NUM_THREADS": "1"} | env | {"MPLBACKEND": "Agg"}
    given = json.dumps([(page, str(places[page]), code) for page, code in pages.items()])
    command = [sys.executable, "-c", f"{PRELOADED}\n{DRIVER}", given]
    here = next(iter(places.values()))  # twell is imported from here
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=here, env=env, timeout=600, **streams)
    assert not done.returncode, done.stdout


def check(block: Block) -> None:
    """Check a block without running it: commands and names of twell have to exist."""
    if block.language == "python":
        check_python(block.code)
        return
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    for words in commands(block.code):
        check_command(words)


def commands(code: str) -> Iterator[list[str]]:
    """Yield the simple commands of a script as lists of words, without assignments before them."""
    for line in re.sub(r"\\\n", " ", code).splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
        words.whitespace_split, words.commenters = True, "#"
        command = []
        for word in [*words, ";"]:
            if word and set(word) <= set(";&|()"):
                while command and re.match(r"\w+=|(do|then|else|if|!|time)$", command[0]):
                    command.pop(0)
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def check_command(words: list[str]) -> None:
    """Check one command, as far as it is one of this repository."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z]+):", text_of("Makefile"), re.M)
        assert {word for word in arguments if re.fullmatch(r"[a-z_]+", word)} <= {*targets}, words
    if program == "accelerate" and arguments[:1] == ["launch"]:
        from accelerate.commands.launch import launch_command_parser

        options = launch_command_parser().parse_args(arguments[1:])
        arguments = [options.training_script, *options.training_script_args]
        arguments = ["-m", *arguments] if options.module else arguments
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        program, arguments = arguments[1], arguments[2:]
    if program == "twell":
        check_twell(arguments)
        return
    if program.startswith(("tests.", "scripts.")):
        arguments = [program.replace(".", "/") + ".py"]
    paths = [match[0] for word in arguments if (match := re.match(REPOSITORY, word))]
    assert [path for path in paths if not (ROOT / path).exists()] == [], words


def check_twell(arguments: list[str]) -> None:
    """Check a command of twell. The text of a training need not be there."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            words, given = read_command(arguments)
    except ValueError as error:
        if any("$" in word for word in arguments) and "Invalid value" in str(error):
            return  # the shell's variable holds another type
        raise
    out = f"{given.get('out') or 'build'}/"
    outside = f"{arguments}: --out is not below build/ or runs/, which git ignores"
    assert not re.match(r"(?!build/|runs/)[\w.]", out), outside
    if words != ["train"] or not given or given["config"].endswith(".yaml"):
        return
    config = "quick" if "$" in given["config"] else given["config"]
    TrainConfig.load(config, [word for word in given["overrides"] or [] if "$" not in word])


def check_python(code: str) -> None:
    """Check the names that Python code takes from twell."""
    names = [("twell", name) for name in re.findall(r"\btwell\.([a-zA-Z]\w*)", code)]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("twell"):
            names += [(node.module, alias.name) for alias in node.names]
    for module, name in names:
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
