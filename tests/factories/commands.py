"""Commands of twell, read without running them."""

import typer

from twell import cli


def read_command(arguments):
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
