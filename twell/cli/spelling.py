"""Options as users write them: with hyphens or underscores, and none is given twice."""

from __future__ import annotations

from itertools import islice


def command_words(command, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that name a command, such as measure and ffn, and the other arguments."""
    words = []
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        words.append(word)
        command = command.commands[word]
    return words, list(arguments[len(words) :])


def rewrite(command, words: list[str], arguments: list[str]) -> list[str]:
    """Return a command's arguments with its options as they are declared.

    Hyphens and underscores may be written for each other. Raises ValueError for an option that is
    given twice.
    """
    for word in words:
        command = command.commands[word]
    declared = {}
    for parameter in command.params:
        for option in [*parameter.opts, *parameter.secondary_opts]:
            declared[_plain(option)] = option, parameter
    rewritten, given, rest = [], set(), iter(arguments)
    for word in rest:
        option, equals, value = word.partition("=")
        if word == "--":
            return [*rewritten, word, *rest]
        if not option.startswith("--"):
            rewritten.append(word)
            continue
        option, parameter = declared.get(_plain(option), (option, None))
        if parameter is not None and parameter.name in given:
            raise ValueError(f"{option} is given twice")
        rewritten.append(option + equals + value)
        if parameter is None:
            continue
        given.add(parameter.name)
        if not parameter.is_flag and not equals:
            rewritten += islice(rest, 1)
    return rewritten


def _plain(option: str) -> str:
    return option.replace("_", "-") if option.startswith("--") else option
