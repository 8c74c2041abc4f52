"""The command line: `twell COMMAND --help`.

The modules here import Typer alone, so that `--help` is fast. A command imports
torch and the rest when it runs.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from pathlib import Path

import typer

from twell.cli import measure, models, runs
from twell.cli.common import add, group, option

DEBUG = "--debug"
RESULTS = "Results and machine"
PACKAGE = Path(__file__).parent.parent
# A library that raises one of these has met a fault; this package raises them for bad input.
REFUSALS = ValueError, IndexError, RuntimeError, ArithmeticError
UsageError = typer.BadParameter.__base__  # Typer has no public name for it

app = group("Sparse feed-forward layers for language models.")
add(app, models.COMMANDS, "Models")
app.add_typer(measure.app, rich_help_panel=RESULTS)
add(app, runs.COMMANDS, RESULTS)


@app.callback()
def options(debug: bool = option(False, "Print tracebacks of bad input too.", name=DEBUG)) -> None:
    """Options of all commands. `main` reads them, wherever they stand."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Bad input prints a message to standard error and returns 2. A fault in the code keeps its
    traceback. An interrupt returns 130, a closed pipe 141.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal cannot print must not end a training.
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    debug, arguments = DEBUG in arguments, [word for word in arguments if word != DEBUG]
    words, command = find(arguments)
    name = " ".join(["twell", *words])
    try:
        with command.make_context(name, arguments[len(words) :]) as context:
            command.invoke(context)
        print(end="", flush=True)
    except typer.Exit as done:
        return done.exit_code
    except UsageError as error:
        error.show()
        return 2
    except BrokenPipeError:  # `twell runs | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt as interrupt:
        print(f"{name}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    except Exception as error:
        if not _is_bad_input(error):
            raise
        if debug:
            traceback.print_exc()
        print(f"{name}: {_message(error)}", file=sys.stderr)
        return 2
    return 0


def find(arguments: list[str]) -> tuple[list[str], typer.core.TyperCommand]:
    """Return the words that name a command, such as measure and ffn, and the command."""
    words, command = [], typer.main.get_command(app)
    (debug,) = command.params
    debug.expose_value = False  # commands have no such parameter; `main` reads it
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        words.append(word)
        command = command.commands[word]
        command.params.append(debug)  # for the help
    return words, command


def _is_bad_input(error: Exception) -> bool:
    """Return whether the input caused an error: a file, a package, memory, or a refusal of ours."""
    if isinstance(error, OSError | ImportError) or _lacks_memory(error):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
    return ours and isinstance(error, REFUSALS)


def _lacks_memory(error: Exception) -> bool:
    """Return whether memory ran out: OutOfMemoryError on a GPU, RuntimeError on the CPU."""
    on_cpu = "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or on_cpu


def _message(error: Exception) -> str:
    """Return an error in one line."""
    reason = "not enough memory: lower the sizes: " if _lacks_memory(error) else ""
    return " ".join(f"{reason}{error}".split())
