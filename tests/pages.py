"""The documents as tests see them: code blocks, which run or are parsed, links, headings, terms."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
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

from twell import cli, results
from twell.config import TrainConfig

ROOT = results.root()
NEEDS = ("gpu", "network", "minutes")
LANGUAGES = ("bash", "python")
OTHER_NAMES = ("sh", "shell", "console", "zsh", "py", "python3", "pycon")
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^ *```[ \t]*$", re.M | re.S
)
MARKER = re.compile(r"<!--\s*needs:\s*(.*?)\s*-->")
# A page runs in a folder with links to the checkout: code as linked folders, data as folders of
# links, so that new files stay out of the checkout.
CODE, DATA = ("twell", "kernels", "tests", "scripts"), ("data", "figures", "notebooks", "docs")
SECONDS_A_PAGE = 300

# One process runs the blocks of a page in order. Python blocks share its interpreter. The number
# that it printed last is of the block that failed.
DRIVER = r"""
import json, subprocess, sys, traceback
page, blocks = json.loads(sys.argv[1])
sys.argv = [""]
shared = {"__name__": "__main__"}
for number, (language, line, code) in enumerate(blocks):
    print(f"\0{number}", flush=True)
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
        sys.exit(1)
    sys.stdout.flush()
"""


@functools.cache
def builder():
    """The module scripts/build_site.py, which knows what a link is."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Block:
    """A fenced block of bash or Python: the line of its fence, from 1, and what it needs here."""

    page: str
    line: int
    number: int
    language: str
    code: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}, block {self.number} ({self.language})"


def blocks(page: str, text: str) -> list[Block]:
    """Return the blocks of a page. Raises ValueError for an unknown marker, language or place."""
    every = []
    lines = text.splitlines()
    markers = {n: match[1] for n, line in enumerate(lines, 1) if (match := MARKER.search(line))}
    for match in BLOCK.finditer(text):
        line, language = line_of(text, match.start()), match["language"]
        needs = markers.pop(line - 1, None)
        if needs not in (None, *NEEDS):
            known = ", ".join(NEEDS)
            raise ValueError(f"{page}:{line - 1}: a block needs {needs!r}; use one of {known}")
        if language in OTHER_NAMES:
            raise ValueError(f"{page}:{line}: a block of {language}; write bash or python, or text")
        if language in LANGUAGES:
            code = textwrap.dedent(match["code"])
            every.append(Block(page, line, len(every) + 1, language, code, needs))
    for line in markers:
        raise ValueError(f"{page}:{line}: this marker does not stand directly above a block")
    return every


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def workplace(folder: Path) -> Path:
    """Fill a folder with links to the checkout, so that what blocks write stays in it."""
    for path in ROOT.iterdir():
        if path.name in DATA:
            shutil.copytree(path, folder / path.name, copy_function=os.symlink)
        elif path.name in CODE or path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def run(every: list[Block], folder: Path, seconds: float = SECONDS_A_PAGE) -> str | None:
    """Run blocks of one page in a folder; return None, or which one failed and what it printed."""
    if not every:
        return None
    # Several pages may run at once: threads that wait for each other's cores are slow.
    env = {"OMP_NUM_THREADS": "1", "TWELL_CACHE": str(folder / ".cache")} | os.environ
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }
    for name in ("TRITON_INTERPRET", "PYTHONPATH"):
        env.pop(name, None)
    script = [(block.language, block.line, block.code) for block in every]
    command = [sys.executable, "-c", DRIVER, json.dumps([every[0].page, script])]
    with open(folder / ".output", "w+b") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        try:
            end = subprocess.run(command, cwd=folder, env=env, timeout=seconds, **streams)
            status = "failed" if end.returncode else None
        except subprocess.TimeoutExpired:
            status = f"did not end within the {seconds:.0f} seconds of a page"
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status is None:
        return None
    _, number, last = re.split(r"\0(\d+)\n", text)[-3:]
    block = every[int(number)]
    return f"{block} {status}\n{block.code}--- output\n{last.strip()}"


def commands(code: str) -> Iterator[list[str]]:
    """Yield the simple commands of a script as lists of words, without assignments before them."""
    for line in re.sub(r"\\\n", " ", code).splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
        words.whitespace_split, words.commenters = True, "#"
        command = []
        for word in [*words, ";"]:
            if not word or not set(word) <= set(";&|()"):
                command.append(word)
                continue
            while command and re.fullmatch(r"\w+=.*|do|then|else|if|!|time", command[0], re.S):
                command.pop(0)
            if command:
                yield command
            command = []


def parse(block: Block) -> str | None:
    """Check a block that does not run here; return None, or what is wrong with it."""
    check = mistakes_in_bash if block.language == "bash" else mistakes_in_python
    wrong = check(block.code)
    return "\n".join([f"{block} (parsed only)", *wrong]) if wrong else None


def mistakes_in_bash(code: str) -> list[str]:
    """Return what bash or the commands of this repository refuse, before they run."""
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    if done.returncode:
        return [done.stderr.strip()]
    wrong = [(words, mistake_in_command(words)) for words in commands(code)]
    return [f"{shlex.join(words)}: {mistake}" for words, mistake in wrong if mistake]


def mistake_in_command(words: list[str]) -> str | None:
    """Return what is wrong with one command, as far as it is one of this repository."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "accelerate" and arguments[:1] == ["launch"]:
        errors = io.StringIO()
        try:
            from accelerate.commands.launch import launch_command_parser

            with contextlib.redirect_stderr(errors):
                options = launch_command_parser().parse_args(arguments[1:])
        except SystemExit:
            return errors.getvalue().strip().splitlines()[-1]
        program, arguments = "python", [options.training_script, *options.training_script_args]
        if options.module:
            arguments.insert(0, "-m")
    if program in ("python", "python3") and arguments[:1] == ["-m"] and len(arguments) > 1:
        return mistake_in_module(arguments[1], arguments[2:])
    if program in ("python", "python3", "bash", "sh") and arguments:
        is_file = arguments[0].endswith((".py", ".sh"))
        return missing(arguments[0]) if is_file else None
    if program in ("twell", "pytest"):
        return mistake_in_module(program, arguments)
    if program == "make":
        targets = re.findall(r"^([a-z]+):", _read("Makefile"), re.M)
        named = [word for word in arguments if re.fullmatch(r"[a-z_]+", word)]
        unknown = [word for word in named if word not in targets]
        return f"no target {', '.join(unknown)} in the Makefile" if unknown else None
    return None


def missing(path: str) -> str | None:
    return None if (ROOT / path).exists() else f"there is no {path}"


def mistake_in_module(module: str, arguments: list[str]) -> str | None:
    if module == "twell":
        return mistake_in_twell(arguments)
    if module == "pytest":
        for word in arguments:
            path, _, name = word.partition("::")
            if not re.match(r"(tests|kernels|twell)\b", path):
                continue
            if mistake := missing(path):
                return mistake
            name = name.split("[")[0].split("::")[-1]
            if name and not re.search(rf"(def|class) {re.escape(name)}\b", _read(path)):
                return f"there is no {name} in {path}"
    if module.partition(".")[0] in ("tests", "scripts"):
        path = module.replace(".", "/") + ".py"
        if mistake := missing(path):
            return mistake
        options = [word for word in arguments if word.startswith("--")]
        unknown = [word for word in options if f'"{word.split("=")[0]}"' not in _read(path)]
        return f"{path} has no option {', '.join(unknown)}" if unknown else None
    return None


def mistake_in_twell(arguments: list[str]) -> str | None:
    """Return what the command line refuses; a variable of the shell may have any value."""
    if "--help" in arguments:
        return None
    try:
        words, options = cli.parse(arguments)
        if words != ["train"] or options["config"].endswith(".yaml"):
            return None
        return mistake_in_fields(options["config"], list(options["overrides"] or ()))
    except (ValueError, TypeError, FileNotFoundError) as error:
        of_shell = "Invalid value" in str(error) and any("$" in word for word in arguments)
        return None if of_shell else str(error)


def mistake_in_fields(config: str, overrides: list[str]) -> str | None:
    """Return which field of a shipped configuration is none; the text need not be there."""
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    of_shell = [override for override in overrides if "$" in override]
    named = [word for word in of_shell if "=" in word]
    if unknown := [word for word in named if word.partition("=")[0] not in known]:
        return f"unknown field in {', '.join(unknown)}"
    literal = [word for word in overrides if word not in of_shell]
    TrainConfig.load("quick" if "$" in config else config, literal)
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
    ours = sorted(name for name in names if re.match(r"twell\.[\w.]+$", name))
    return [f"there is no {name}" for name in ours if not exists(name)]


def exists(name: str) -> bool:
    """Whether a dotted name, such as twell.Trace.load, is an attribute or a module."""
    found, parts = importlib.import_module("twell"), name.split(".")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError:
                # An attribute of instances, such as a field of a dataclass without a default.
                return part in getattr(found, "__annotations__", {})
        found = getattr(found, part)
    return True


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    every, count = set(), {}
    without = BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", without, re.M):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.replace("`", "").lower()).replace(" ", "-")
        number = count[slug] = count.get(slug, -1) + 1
        every.add(f"{slug}-{number}" if number else slug)
    return every | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def broken_links(page: str, text: str, root: Path = ROOT) -> list[str]:
    """Return the relative links of a page to files or headings that do not exist, by line."""
    wrong = []
    for _, begin, _, target in builder().targets(text):
        if re.match(r"[a-z][a-z+.-]*:", target, re.I):
            continue
        path, anchor = builder().resolve(page, target)
        path = page if target.startswith("#") else path
        where = f"{page}:{line_of(text, begin)}"
        if not (root / path).exists():
            wrong.append(f"{where}: there is no {path}")
        elif anchor and path.endswith(".md"):
            if anchor not in anchors((root / path).read_text(encoding="utf-8")):
                wrong.append(f"{where}: {path} has no heading #{anchor}")
    return wrong


def unexplained(text: str, terms: dict[str, str]) -> list[str]:
    """Return the terms that a page uses in prose before it explains them.

    It explains a term by a link to the glossary, or sets it in bold or italics. terms: anchors of
    the glossary, each with a regular expression of the words for it.
    """

    def blank(match):
        return " " * len(match[0])

    prose = re.sub(r"^#+ .*$|<[^>]*>", blank, builder().prose(text), flags=re.M)
    linked = {}
    for match, begin, end, target in builder().targets(text):
        if "glossary.md#" in target:
            linked.setdefault(target.partition("#")[2], match.start())
        prose = prose[:begin] + " " * (end - begin) + prose[end:]  # addresses are no prose
    unlinked = []
    for anchor, pattern in terms.items():
        first = re.search(rf"(?<![\w-])(?:{pattern})", prose, re.I)
        if first is None or linked.get(anchor, len(text)) <= first.start():
            continue
        if not prose[: first.start()].endswith("*"):
            unlinked.append(f"{anchor} (line {line_of(text, first.start())})")
    return unlinked
