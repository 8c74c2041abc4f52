"""The command line: `twell COMMAND --help`.

One file a command. The modules here import Typer alone, so that `--help` is fast. A command imports
torch and the rest when it runs.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from pathlib import Path

import typer

from twell.cli import (
    atlas,
    evaluate,
    export,
    info,
    inspect,
    layer,
    measure_calibrate,
    measure_ffn,
    measure_model,
    measure_quality,
    measure_train_step,
    relufy,
    runs,
    trace,
    train,
)

DEBUG = "--debug"
MODELS, RESULTS = "Models", "Results and machine"
PACKAGE = Path(__file__).parent.parent
# A library that raises one of these has met a fault; this package raises them for bad input.
REFUSALS = ValueError, IndexError, RuntimeError, ArithmeticError
UsageError = typer.BadParameter.__base__  # Typer has no public name for it


SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


def _app(description: str) -> typer.Typer:
    return typer.Typer(
        help=description,
        add_completion=False,
        rich_markup_mode="markdown",
        no_args_is_help=True,
        context_settings=SETTINGS,
    )


def _add(group: typer.Typer, module, name: str, panel: str | None = None) -> None:
    about = {"epilog": f"Example: {module.EXAMPLE}", "context_settings": SETTINGS}
    group.command(name, **about, rich_help_panel=panel)(module.command)


app = _app(
    "Sparse feed-forward layers for language models. With --debug, bad input prints its traceback."
)
_add(app, train, "train", MODELS)
_add(app, relufy, "relufy", MODELS)
_add(app, trace, "trace", MODELS)
_add(app, inspect, "inspect", MODELS)
_add(app, atlas, "atlas", MODELS)
_add(app, evaluate, "evaluate", MODELS)
_add(app, export, "export", MODELS)
_add(app, layer, "layer", MODELS)
measure = _app("Time layers and models on this GPU. A result is checked before it is timed.")
_add(measure, measure_ffn, "ffn")
_add(measure, measure_train_step, "train-step")
_add(measure, measure_model, "model")
_add(measure, measure_calibrate, "calibrate")
_add(measure, measure_quality, "quality")
app.add_typer(measure, name="measure", rich_help_panel=RESULTS)
_add(app, runs, "runs", RESULTS)
_add(app, info, "info", RESULTS)


def parse(arguments: list[str]) -> tuple[list[str], dict]:
    """Return the words of a command and the values of its parameters, without running it.

    The values are empty where help is asked for. Raises ValueError for an unknown command or
    option, and for a value of a wrong type.
    """
    words, command = _find(arguments)
    try:
        with command.make_context("twell", arguments[len(words) :]) as context:
            return words, context.params
    except typer.Exit:  # after its help
        return words, {}
    except UsageError as error:
        raise ValueError(error.format_message()) from None


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
    words, command = _find(arguments)
    name = " ".join(["twell", *words])
    try:
        with command.make_context(name, arguments[len(words) :]) as context:
            command.invoke(context)
        if sys.stdout is not None:  # it may have been closed before the start
            sys.stdout.flush()
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


def _find(arguments: list[str]) -> tuple[list[str], typer.core.TyperCommand]:
    """Return the words that name a command, such as measure and ffn, and the command."""
    words, command = [], typer.main.get_command(app)
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        words.append(word)
        command = command.commands[word]
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
    text = str(error)
    if isinstance(error, OSError) and error.errno and error.filename is None:
        text = error.strerror
    if _lacks_memory(error):
        text = f"not enough memory: lower the sizes ({text})"
    return " ".join(text.split())
