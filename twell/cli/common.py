"""What commands share: groups, kinds of options, and checks of texts and of files to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

# Where results go; git ignores these folders. Recorded results were written to data/ by --out.
RUNS, BUILD = Path("runs"), Path("build")
INPUT, OUTPUT = "Input", "Output"
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


def group(description: str, name: str | None = None) -> typer.Typer:
    """Return an empty group of commands."""
    return typer.Typer(
        name=name,
        help=description,
        add_completion=False,
        rich_markup_mode="markdown",
        no_args_is_help=True,
        context_settings=SETTINGS,
    )


def add(app: typer.Typer, commands: dict[Callable, str], panel: str | None = None) -> None:
    """Add commands to a group, each with an example, whose first word is its name."""
    path = "twell" if app.info.name is None else f"twell {app.info.name}"
    for command, example in commands.items():
        about = {"epilog": f"Example: {path} {example}", "context_settings": SETTINGS}
        app.command(example.split()[0], **about, rich_help_panel=panel)(command)


def option(default: object, text: str, panel: str | None = None, *, name: str = "", **settings):
    """Return a Typer option with a help text, in a panel of the help; name: not its parameter's."""
    names = (name,) if name else ()
    return typer.Option(default, *names, help=text, rich_help_panel=panel, **settings)


def argument(name: str, text: str, default: object = ..., **settings):
    """Return a Typer argument with a help text."""
    return typer.Argument(default, metavar=name, help=text, **settings)


Model = Annotated[str, argument("MODEL", "A run, a model's folder, or a name on the hub.")]
Config = Annotated[str, argument("CONFIG", "A YAML file, or one of the package's own by name.")]
Text = Annotated[str | None, option(..., "The text itself.", INPUT)]
File = Annotated[Path | None, option(..., "A UTF-8 text file.", INPUT)]
Overrides = Annotated[list[str], argument("KEY=VALUE", "Fields, such as tokens=1e6.")]
Form = Annotated[
    bool | None,
    option(..., "Rows as Markdown, as in a pipe; or as JSON.", OUTPUT, name="--markdown/--json"),
]
Overwrite = Annotated[bool, option(..., "Replace what is there.", OUTPUT, name="--overwrite")]
Resume = Annotated[bool, option(..., "Go on from the run's checkpoint.", name="--resume")]
Statistics = Annotated[Path | None, option(..., "Statistics; default: its own.", metavar="FILE")]


def split_config(size: str, overrides: list[str], default: str) -> dict:
    """Return a configuration and its overrides; key=value in its place leaves the default."""
    if "=" in size:
        return {"size": default, "overrides": [size, *overrides]}
    return {"size": size, "overrides": list(overrides)}


def read_text(
    text: str | None, file: Path | None, as_text: str = "--text", as_file: str = "--file"
) -> str:
    """Return the text of one of two options. Raises ValueError unless exactly one is given."""
    if (text is None) == (file is None):
        raise ValueError(f"give a text by {as_text} or by {as_file}, and not by both")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: byte {error.start}") from None
    elif os.path.isfile(text):  # pathlib's raises for what cannot be a name
        raise ValueError(f"{as_text} is the text itself; to read the file {text}, give {as_file}")
    if not text:
        raise ValueError("the text is empty; give at least one character")
    return text


def prepare_out(given: Path | None, default: Path) -> Path:
    """Return the file to write, and make its folder. Refuse a file of another kind.

    A slip must not replace weights or a text, and a mistake shows before the work.
    """
    from twell import results

    path = given or default
    if path.suffix != default.suffix:
        raise ValueError(f"--out is {str(path)!r}; give a file that ends in {default.suffix}")
    if path.name in results.KEPT_FILES and path.exists():
        raise FileExistsError(f"{path} belongs to a run or a model; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
