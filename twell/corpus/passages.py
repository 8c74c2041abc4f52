"""Task items from held-out text: choose a continuation, or complete a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np


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
