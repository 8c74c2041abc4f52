"""The command line: `twell COMMAND --help`.

One file a command. Modules here import Typer alone; a command imports torch and the rest when it
runs, so that `--help` is fast. `spelling` rewrites and refuses options before Typer sees them.
"""

from __future__ import annotations

import dis
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
    measure_serve,
    measure_train_step,
    relufy,
    runs,
    spelling,
    trace,
    train,
)

DEBUG = "--debug"
MODELS, RESULTS = "Models", "Results and machine"


def _app(description: str) -> typer.Typer:
    names = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    return typer.Typer(
        help=description,
        add_completion=False,
        rich_markup_mode="rich",
        no_args_is_help=True,
        context_settings=names,
    )


def _add(group: typer.Typer, module, name: str, panel: str | None = None) -> None:
    paragraphs = module.command.__doc__.split("\n\n")
    text = "\n\n".join(" ".join(one.split()) for one in paragraphs)  # the terminal breaks lines
    about = {"help": text, "epilog": f"Example: {module.EXAMPLE}"}
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
_add(measure, measure_serve, "serve")
app.add_typer(measure, name="measure", rich_help_panel=RESULTS)
_add(app, runs, "runs", RESULTS)
_add(app, info, "info", RESULTS)


def parse(arguments: list[str]) -> tuple[list[str], dict]:
    """Return the words of a command and the values of its parameters, without running it.

    The values are empty where help is asked for.
    Raises ValueError for an unknown command or option, an option given twice, and a value of a
    wrong type.
    """
    command = typer.main.get_command(app)
    try:
        words, rest = spelling.command_words(command, arguments)
        rest = spelling.rewrite(command, words, rest)
        for word in words:
            command = command.commands[word]
        with command.make_context(" ".join(["twell", *words]), rest) as context:
            return words, context.params
    except typer.Exit:  # after its help
        return words, {}
    except Exception as error:
        if _is_usage(error):
            raise ValueError(error.format_message()) from None
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Bad input prints one line to standard error and returns 2; a fault in the code keeps its
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
    command = typer.main.get_command(app)
    words, _ = spelling.command_words(command, arguments)
    name = " ".join(["twell", *words])
    try:
        arguments = [*words, *spelling.rewrite(command, words, arguments[len(words) :])]
        with command.make_context("twell", arguments) as context:
            command.invoke(context)
        if sys.stdout is not None:  # it may have been closed before the start
            sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except BrokenPipeError:  # `twell runs | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt as interrupt:
        print(f"{name}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    except Exception as error:
        if not _is_usage(error) and not _is_bad_input(error):
            raise
        if debug:
            traceback.print_exc()
        if message := _message(error):
            print(f"{name}: {message}", file=sys.stderr)
        return 2
    return 0


def _is_usage(error: Exception) -> bool:
    """Whether Typer refused the arguments. The class has moved between Typer's versions."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _is_bad_input(error: Exception) -> bool:
    """Return whether bad input caused an error: a file, a package, or a `raise` in this package.

    Errors of the same classes that Python or a library raises are faults in the code.
    """
    if isinstance(error, OSError) or _lacks_memory(error):
        return True
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0] != "twell"
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    raised = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and Path(code.co_filename).is_relative_to(Path(__file__).parent.parent)


def _lacks_memory(error: Exception) -> bool:
    """Return whether memory ran out: OutOfMemoryError on a GPU, RuntimeError on the CPU."""
    on_cpu = "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or on_cpu


def _message(error: Exception) -> str:
    """Return the one line that describes an error, empty where help was printed instead."""
    if _is_usage(error):
        # A group without a command carries its help as the message.
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return ""
        text = error.format_message()
    elif isinstance(error, KeyError) and error.args:
        text = error.args[0]
    elif isinstance(error, OSError) and error.errno and error.filename is None:
        text = error.strerror
    else:
        text = str(error)
    if _lacks_memory(error):
        text = f"not enough memory: lower the sizes ({text})" if text else "not enough memory"
    return " ".join(str(text).split())
