"""Options as users write them: old spellings name the new one, and no option is given twice."""

from __future__ import annotations

# Old spellings by command, and what to write instead.
RENAMED = {
    "evaluate": {"--text": "--source, which takes a file, a folder or a corpus"},
    "export": {"--text": "--trained-on"},
    "runs": {"--into": "--out"},
    "measure ffn": {"--hidden": "--hidden-size", "--intermediate": "--intermediate-size"},
    "measure train-step": {
        "--model": "the first argument: twell measure train-step 171m",
        "--layers": "num_layers=NUMBER",
        "--hidden": "hidden_size=NUMBER",
        "--intermediate": "intermediate_size=NUMBER",
        "--heads": "num_heads=NUMBER",
        "--vocab": "vocab_size=NUMBER",
        "--context": "context=NUMBER",
        "--micro-batch": "micro_batch=NUMBER",
        "--non-gated": "gated=false",
        "--checkpoint-activations": "checkpoint_activations=true",
        "--profile": "--spread",
    },
    "measure model": {
        "--model": "the first argument: twell measure model MODEL --file FILE",
        "--size": "the first argument: twell measure model 2b",
        "--tokens": "--batches, such as 64x2048",
        "--profile": "--spread",
    },
    "measure calibrate": {
        "--model": "the first argument: twell measure calibrate MODEL",
        "--hidden": "--hidden-size",
        "--intermediate": "--intermediate-size",
    },
}


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

    Hyphens and underscores may be written for each other. Raises ValueError for an old spelling
    and for an option that is given twice.
    """
    for word in words:
        command = command.commands[word]
    declared = {}
    for parameter in command.params:
        for option in [*parameter.opts, *parameter.secondary_opts]:
            declared[_plain(option)] = option, parameter
    renamed = RENAMED.get(" ".join(words), {})
    rewritten, given, rest = [], set(), iter(arguments)
    for word in rest:
        option, equals, value = word.partition("=")
        if word == "--":
            return [*rewritten, word, *rest]
        if not option.startswith("--"):
            rewritten.append(word)
            continue
        if option in renamed:
            raise ValueError(f"{option} is now {renamed[option]}")
        option, parameter = declared.get(_plain(option), (option, None))
        if parameter is not None and parameter.name in given:
            raise ValueError(f"{option} is given twice")
        rewritten.append(option + equals + value)
        if parameter is None:
            continue
        given.add(parameter.name)
        if not parameter.is_flag and not equals:
            rewritten += [next_word for next_word in [next(rest, None)] if next_word is not None]
    return rewritten


def _plain(option: str) -> str:
    return option.replace("_", "-") if option.startswith("--") else option
