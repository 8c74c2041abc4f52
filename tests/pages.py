"""The code blocks of documents, which run or are parsed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
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
from dataclasses import dataclass
from pathlib import Path

from tests.factories.commands import read_command
from twell import results

ROOT = results.root()
NEEDS = ("gpu", "network", "minutes")
LANGUAGES = ("bash", "python")
OTHER_NAMES = ("sh", "shell", "console", "zsh", "py", "python3", "pycon")
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^ *```[ \t]*$", re.M | re.S
)
MARKER = re.compile(r"<!--\s*needs:\s*(.*?)\s*-->")
# A page runs in a folder with links to the checkout: code as linked folders, data as folders of
# links, where new files do not reach the checkout.
CODE = "twell", "kernels", "study", "tests", "scripts"
DATA = "data", "figures", "notebooks", "docs"
SECONDS = 600
REPOSITORY = re.compile(r"(tests|kernels|scripts|twell)/[\w/.-]+")

# One process imports what blocks need and forks for each page: pages share imports and nothing
# else. Python blocks of a page share its interpreter. It prints page and number of each block, and
# ends with the first that fails.
PRELOADED = (
    "import pandas, peft, torch, transformers, study.analysis, twell.model, twell.inspector.widget"
)
DRIVER = r"""
import json, os, subprocess, sys, traceback

def run(page, folder, blocks):
    os.chdir(folder)
    os.environ["TWELL_CACHE"] = os.environ.get("TWELL_CACHE", folder + "/build/cache")
    shared = {"__name__": "__main__"}
    for number, (language, line, code) in enumerate(blocks):
        print(f"\0{page}\0{number}", flush=True)
        try:
            if language == "bash":
                subprocess.run(["bash", "-c", "set -euo pipefail\n" + code], check=True)
            else:
                exec(compile("\n" * line + code, page, "exec"), shared)
        except BaseException as error:
            sys.stdout.flush()
            if language == "python":
                traceback.print_exc()
            else:
                print(f"exit status {getattr(error, 'returncode', error)}", flush=True)
            return 1
    return 0

pages, sys.argv = json.loads(sys.argv[1]), [""]
for page in pages:
    child = os.fork()
    if child == 0:
        status = run(*page)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


def script(name: str):
    """The module scripts/NAME.py."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its fence, from 1, and what it needs that CI has not."""

    page: str
    line: int
    number: int
    language: str
    code: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}, block {self.number} ({self.language})"


def blocks(page: str, text: str) -> list[Block]:
    """Return the blocks of a page. Raises ValueError for an unknown marker, language or place of a
    marker.
    """
    every = []
    lines = text.splitlines()
    markers = {n: match[1] for n, line in enumerate(lines, 1) if (match := MARKER.search(line))}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        needs = markers.pop(line - 1, None)
        if needs is not None and needs not in NEEDS:
            raise ValueError(
                f"{page}:{line - 1}: a block needs {needs!r}; use one of {', '.join(NEEDS)}"
            )
        if match["language"] in OTHER_NAMES:
            raise ValueError(
                f"{page}:{line}: a block of {match['language']}; write bash or python, or text"
            )
        if match["language"] in LANGUAGES:
            code = textwrap.dedent(match["code"])
            every.append(Block(page, line, len(every) + 1, match["language"], code, needs))
    for line in markers:
        raise ValueError(f"{page}:{line}: this marker does not stand directly above a block")
    return every


def workplace(folder: Path) -> Path:
    """Fill a folder with links to the checkout, so that what blocks write stays in it."""
    for path in ROOT.iterdir():
        if path.name in CODE:
            (folder / path.name).symlink_to(path)
        elif path.name in DATA:
            shutil.copytree(path, folder / path.name, copy_function=os.symlink)
        elif path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def run(every: list[Block], folder: Path, seconds: float = SECONDS) -> str | None:
    """Run blocks of pages, each page in a folder of its own; return None, or which failed and what
    it printed.
    """
    pages = {}
    for block in every:
        of_page = pages.setdefault(block.page, [])
        of_page.append((block.language, block.line, block.code))
    places = {page: folder / page.replace("/", "-") for page in pages}
    for place in places.values():
        if not place.exists():
            place.mkdir()
            workplace(place)
    left_out = "TRITON_INTERPRET", "PYTHONPATH"
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "HF_HUB_OFFLINE": "1"}
    # Tests may run beside each other: threads that wait for each other's cores are twenty times
    # slower.
    env = {"OMP_NUM_THREADS": "1"} | env | {"MPLBACKEND": "Agg"}
    given = json.dumps([(page, str(places[page]), code) for page, code in pages.items()])
    with open(folder / "output", "w+b") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT, "env": env}
        try:
            command = [sys.executable, "-c", f"{PRELOADED}\n{DRIVER}", given]
            here = next(iter(places.values()))  # twell is imported from here
            end = subprocess.run(command, cwd=here, timeout=seconds, **streams)
            status = "failed" if end.returncode else None
        except subprocess.TimeoutExpired:
            status = f"did not end within {seconds:.0f} seconds"
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status is None:
        return None
    if "\0" not in text:
        return text
    _, page, number, last = re.split(r"\0([^\0\n]+)\0(\d+)\n", text)[-4:]
    block = [block for block in every if block.page == page][int(number)]
    return f"{block} {status}\n{block.code}--- output\n{last.strip()}"


def commands(code: str) -> Iterator[list[str]]:
    """Yield the simple commands of a script as lists of words, without assignments before them."""
    for line in re.sub(r"\\\n", " ", code).splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
        words.whitespace_split, words.commenters = True, "#"
        command = []
        for word in [*words, ";"]:
            if word and set(word) <= set(";&|()"):
                while command and (
                    re.match(r"\w+=", command[0])
                    or command[0] in ("do", "then", "else", "if", "!", "time")
                ):
                    command.pop(0)
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def parse(block: Block) -> str | None:
    """Check a block that does not run here; return None, or what is wrong with it."""
    check = {"bash": mistakes_in_bash, "python": mistakes_in_python}[block.language]
    wrong = check(block.code)
    return "\n".join([f"{block} (parsed only)", *wrong]) if wrong else None


def mistakes_in_bash(code: str) -> list[str]:
    """Return what bash or the commands of this repository refuse, before they run."""
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    if done.returncode:
        return [done.stderr.strip()]
    wrong = {shlex.join(words): mistake_in_command(words) for words in commands(code)}
    return [f"{words}: {mistake}" for words, mistake in wrong.items() if mistake]


def mistake_in_command(words: list[str]) -> str | None:
    """Return what is wrong with one command, as far as it is one of this repository."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z]+):", _read("Makefile"), re.M)
        named = [word for word in arguments if re.fullmatch(r"[a-z_]+", word)]
        return next((f"no target {word}" for word in named if word not in targets), None)
    if program == "accelerate" and arguments[:1] == ["launch"]:
        options, wrong = launched(arguments[1:])
        if wrong:
            return wrong
        arguments = [options.training_script, *options.training_script_args]
        arguments = ["-m", *arguments] if options.module else arguments
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        program, arguments = arguments[1], arguments[2:]
    if program == "twell":
        return mistake_in_twell(arguments)
    if program.startswith(("tests.", "scripts.")):
        file = program.replace(".", "/") + ".py"
        options = [word.split("=")[0] for word in arguments if word.startswith("--")]
        if (ROOT / file).is_file():
            text = _read(file)
            return next((f"no option {word}" for word in options if f'"{word}"' not in text), None)
        arguments = [file]
    paths = [match[0] for word in arguments if (match := re.match(REPOSITORY, word))]
    return next((f"there is no {path}" for path in paths if not (ROOT / path).exists()), None)


def launched(arguments: list[str]) -> tuple:
    """Return the options of `accelerate launch` and None, or None and what its parser says."""
    from accelerate.commands.launch import launch_command_parser

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return launch_command_parser().parse_args(arguments), None
    except SystemExit:
        return None, errors.getvalue().strip().splitlines()[-1]


def mistake_in_twell(arguments: list[str]) -> str | None:
    """Return what a command of twell refuses. The text of a training need not be there."""
    from twell.config import TrainConfig

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            words, given = read_command(arguments)
    except ValueError as error:
        of_the_shell = any("$" in word for word in arguments) and "Invalid value" in str(error)
        return None if of_the_shell else str(error)
    if re.match(r"(?!build/|runs/)[\w.]", out := f"{given.get('out') or 'build'}/"):
        return f"--out {out} is not below build/ or runs/, which git ignores"
    if words != ["train"] or not given or given["config"].endswith(".yaml"):
        return None
    config = "quick" if "$" in given["config"] else given["config"]
    overrides = given["overrides"] or []
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for word in overrides:
        if "$" in word and "=" in word and word.partition("=")[0] not in known:
            return f"unknown field in {word}"
    try:
        TrainConfig.load(config, [word for word in overrides if "$" not in word])
    except (ValueError, TypeError, FileNotFoundError) as error:
        return str(error)
    return None


def mistakes_in_python(code: str) -> list[str]:
    """Return a syntax error, and the names of twell that do not exist."""
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return [
        f"there is no {name}"
        for name in sorted(names)
        if re.match(r"twell\.[\w.]+$", name) and not exists(name)
    ]


def exists(name: str) -> bool:
    """Whether a dotted name, such as twell.Trace.load, is an attribute or a module."""
    found, parts = importlib.import_module("twell"), name.split(".")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError:
                # Attributes of instances, such as those of a dataclass without default, are seen by
                # its fields alone.
                return part in getattr(found, "__annotations__", {})
        found = getattr(found, part)
    return True


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
