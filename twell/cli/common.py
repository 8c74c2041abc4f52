"""What commands share: kinds of options, and checks of texts and of files to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

# Where results go; git ignores these folders. Recorded results were written to data/ by --out.
RUNS, BENCH, BUILD = Path("runs"), Path("build/bench"), Path("build")
INPUT, OUTPUT, LAYER, RANDOM = "Input", "Output", "Layer", "Random weights"


def option(text: str, panel: str | None = None, *, name: str | None = None, metavar=None):
    """Return a Typer option with a help text, in a panel of the help."""
    names = [name] if name else []
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, a folder with a model and its tokenizer, or a name on the Hugging Face hub.",
    ),
]
Text = Annotated[str | None, option("The text itself.", INPUT)]
File = Annotated[Path | None, option("A UTF-8 text file.", INPUT)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Fields of the configuration to change, such as l1_coefficient=3e-4.",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, option("Replace what is already there.", OUTPUT, name="--overwrite")]
Resume = Annotated[bool, option("Go on from the run's checkpoint.", name="--resume")]
Statistics = Annotated[
    Path | None,
    option(
        "Statistics of each neuron (`twell trace --aggregate`); default: aggregate.npz in the "
        "model's folder.",
        metavar="FILE",
    ),
]
Bench = Annotated[Path, option("The folder of the CSV files.", OUTPUT, metavar="DIR")]
Energy = Annotated[
    bool, option("Also measure energy: over a second more for each row.", name="--energy")
]
Compile = Annotated[
    bool | None,
    option(
        "Time only compiled layers, or only eager ones; default: both.",
        name="--compile/--no-compile",
    ),
]
Spread = Annotated[
    Literal["flat", "paper"] | None,
    option("How active neurons are spread over layers: evenly, or as in the paper's Fig. 6."),
]
CalibrationFile = Annotated[
    Path | None,
    option("The times that auto chooses by; see `twell measure calibrate`.", name="--calibration"),
]
HiddenSize = Annotated[int | None, option("Width of the model; default: 2048.", LAYER)]
IntermediateSize = Annotated[int | None, option("Neurons; default: 5632.", LAYER)]
NonGated = Annotated[bool, option("A layer without a gate.", LAYER, name="--non-gated")]


def split_config(name: str, overrides: list[str] | None, default: str) -> tuple[str, list[str]]:
    """Return a configuration and its overrides; key=value in its place leaves the default."""
    if "=" in name:
        return default, [name, *(overrides or ())]
    return name, list(overrides or ())


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


def numbers(option: str, text: str, kind: Callable[[str], float]) -> list:
    """Return numbers that are written with commas."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        message = f"{option} is {text!r}; write numbers with commas, such as 1,16,256"
        raise ValueError(message) from None


def load_calibration(path: Path | None):
    """Return the calibration of a file, None without one."""
    from twell.sparse.calibration import Calibration

    return Calibration.load(path) if path else None


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)
