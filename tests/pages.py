"""The code blocks of documents, which run, and their commands, which are parsed."""

from __future__ import annotations

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
from typing import Any, NamedTuple

import typer

from twell import cli, results
from twell.config import TrainConfig

ROOT = results.root()
BLOCK = re.compile(r"(<!-- needs: \w+ -->\n)?^ *```(bash|python)\n(.*?)^ *```$", re.M | re.S)
# A page runs in a folder with links to the checkout: code as linked folders, data as folders of
# links, where new files do not reach the checkout.
CODE = "twell", "kernels", "study", "tests", "scripts"
DATA = "data", "figures", "notebooks", "docs"
# Python blocks of a page share its interpreter. It ends with the first block that fails.
DRIVER = r"""
import json, subprocess, sys
shared, blocks = {"__name__": "__main__"}, json.loads(sys.argv.pop())
for language, line, code in blocks:
    print(f"--- line {line}", flush=True)
    if language == "bash":
        subprocess.run(["bash", "-c", "set -euo pipefail\n" + code], check=True)
    else:
        exec(compile("\n" * line + code, "page", "exec"), shared)
"""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block, and whether it needs more than CI has: a GPU, the network or minutes."""

    language: str
    line: int
    code: str
    needs_more: bool


def blocks(page: str) -> list[Block]:
    every, text = [], text_of(page)
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        every.append(Block(match[2], line, textwrap.dedent(match[3]), bool(match[1])))
    return every


def run(page: str, folder: Path) -> None:
    """Run the blocks of a page in a new folder; what they print ends with a mistake."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in CODE or path.is_file():
            (folder / path.name).symlink_to(path)
        elif path.name in DATA:
            shutil.copytree(path, folder / path.name, copy_function=os.symlink)
    left_out = "TRITON_INTERPRET", "PYTHONPATH"
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env = {"OMP_NUM_THREADS": "1", "TWELL_CACHE": f"{folder}/build/cache"} | env
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "HF_HUB_OFFLINE": "1"}
    env |= {"MPLBACKEND": "Agg"}
    given = json.dumps([block[:3] for block in blocks(page) if not block.needs_more])
    command = [sys.executable, "-c", DRIVER, given]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=env, timeout=600, **streams)
    assert not done.returncode, done.stdout


def commands(code: str) -> Iterator[list[str]]:
    """Yield the arguments of each command of twell in a script."""
    for line in re.sub(r"\\\n", " ", code).splitlines():
        if match := re.search(r"(?:^ *|-m )twell (.*?)(?: [|;&>]|$)", line):
            yield shlex.split(match[1], comments=True)


def read_command(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The words of a command and the values of its parameters; no values where it asks for help.

    Raises ValueError for an unknown command or option, and for a value of a wrong type.
    """
    words, command = cli.find(arguments)
    try:
        with command.make_context("twell", arguments[len(words) :]) as context:
            return words, context.params
    except typer.Exit:  # after its help
        return words, {}
    except cli.UsageError as error:
        raise ValueError(error.format_message()) from None


def check_command(arguments: list[str]) -> None:
    """Parse a command of twell and load its configuration. The text need not be there."""
    try:
        words, given = read_command(arguments)
    except ValueError as error:
        if any("$" in word for word in arguments) and "Invalid value" in str(error):
            return  # the shell's variable holds another type
        raise
    if words == ["train"] and given and not given["config"].endswith(".yaml"):
        config = "quick" if "$" in given["config"] else given["config"]
        TrainConfig.load(config, [word for word in given["overrides"] or [] if "$" not in word])
