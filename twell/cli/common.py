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
    "max_content_width": 100,
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


def option(text: str, panel: str | None = None, *, name: str | None = None, **settings):
    """Return a Typer option with a help text, in a panel of the help; name: not its parameter's."""
    names = () if name is None else (name,)
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def flag(name: str, text: str, panel: str | None = None):
    """Return a Typer option that is given or not."""
    return option(text, panel, name=name)


def argument(name: str, text: str):
    """Return a Typer argument with a help text."""
    return typer.Argument(metavar=name, help=text)


MODEL = "A run, a folder with a model and its tokenizer, or a name on the Hugging Face hub."
OVERRIDES = "Fields of the configuration to change, such as l1_coefficient=3e-4."
STATISTICS = (
    "Statistics of each neuron (`twell trace --aggregate`); default: aggregate.npz in the model's "
    "folder."
)
CONFIG = "A YAML file, or one of the package's configurations."
Model = Annotated[str, argument("MODEL", MODEL)]
Config = Annotated[str, argument("CONFIG", CONFIG)]
Text = Annotated[str | None, option("The text itself.", INPUT)]
File = Annotated[Path | None, option("A UTF-8 text file.", INPUT)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help=OVERRIDES, show_default=False),
]
Overwrite = Annotated[bool, flag("--overwrite", "Replace what is already there.", OUTPUT)]
Resume = Annotated[bool, flag("--resume", "Go on from the run's checkpoint.")]
Statistics = Annotated[Path | None, option(STATISTICS, metavar="FILE")]


def split_config(size: str, overrides: list[str] | None, default: str) -> dict:
    """Return a configuration and its overrides; key=value in its place leaves the default."""
    if "=" in size:
        return {"size": default, "overrides": [size, *(overrides or ())]}
    return {"size": size, "overrides": list(overrides or ())}


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


def prepare_out(path: Path, ending: str) -> None:
    """Refuse a folder and a file of another kind, and create the parent folder.

    A slip must not replace weights or a text, and a mistake shows before the work.
    """
    from twell import results

    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; --out is the {ending} file to write")
    if path.suffix != ending:
        raise ValueError(f"--out is {str(path)!r}; give a file that ends in {ending}")
    if path.name in results.KEPT_FILES and path.exists():
        raise FileExistsError(f"{path} belongs to a run or a model; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
