"""Documents to tokens: a byte-level BPE, and a cache of tokenised text."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from twell.corpus.sources import HOLD_OUT_EVERY, NO_SOTU, source_files, split

END_OF_TEXT = "<|endoftext|>"
ENCODED_TOGETHER = 256  # documents
CHECKSUMS = "sha256.json"  # of the files in a folder of the cache


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` entries; decoding an encoded text gives the text.

    Raises ValueError when vocab_size does not hold the 256 bytes and the end-of-text token.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size is {vocab_size}; "
            f"a byte-level BPE needs at least 257 (256 bytes and {END_OF_TEXT})"
        )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Load an existing tokenizer by path or hub name; it neither cuts nor pads.

    Raises ValueError when it does not serve a model of vocab_size.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise
    except Exception as error:  # none there, or damaged files: a dozen kinds
        known = isinstance(error, OSError)
        reason = str(error).splitlines()[0] if known else f"{type(error).__name__}: {error}"
        raise ValueError(f"no tokenizer at {name}: {' '.join(reason.split())}") from None
    entries = max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if entries > vocab_size:
        raise ValueError(
            f"the tokenizer has {entries} entries; vocab_size {vocab_size} does not hold them"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {name} has no end-of-text token (eos_token), which separates documents"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer {name} has no tokenizer.json; "
            "only those of the library tokenizers are read"
        )
    tokenizer.backend_tokenizer.no_truncation()  # a fine-tuning may have stored these
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return a text's token ids, after what the tokenizer begins every text with."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return [*beginning(tokenizer), *ids]


def beginning(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the begin-of-text token, as Llama 2 and Mistral put it before a text, or nothing."""
    bare, ids = (
        tokenizer.backend_tokenizer.encode("a", add_special_tokens=special).ids
        for special in (False, True)
    )
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] and ids[1:][: len(bare)] == bare else []


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: `train` and `valid` are 1-D unsigned arrays of token ids.

    An end-of-text token ends each document, and where the tokenizer has it a begin-of-text token
    begins it.
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
) -> Corpus:
    """Tokenise a source, or read the tokens of the same texts and settings from the cache.

    Args:
        source, valid_source: see sources.py.
        vocab_size: entries of the tokenizer that is trained on the training text.
        cache: folder for the result, named by a hash of the files' contents and the settings.
        tokenizer: path or hub name of an existing tokenizer to use instead.
    Raises ValueError for an empty corpus, a damaged cache or a tokenizer that does not fit.
    """
    given, rules = None, None
    if tokenizer is not None:
        given = load_tokenizer(tokenizer, vocab_size)
        # As loaded: files beside tokenizer.json may change it, and what comes to one place.
        rules = given.backend_tokenizer.to_str(), given.eos_token_id
    key = {
        "format": 4,
        "texts": [_fingerprints(source), _fingerprints(valid_source)],
        "vocab_size": vocab_size,
        "tokenizer": rules,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / name
    if not folder.is_dir():
        model = given
        if model is None:
            texts = (text for part, text in split(source, valid_source) if part == "train")
            model = train_tokenizer(texts, vocab_size)
        arrays = _tokenize(source, valid_source, model, vocab_size)
        _write(folder, arrays, None if given is not None else model)
    return _read(folder, given)


def _fingerprints(source: str | None) -> list:
    if source is None:
        return [None]
    if source != "sotu":
        return [[file.name, _sha256(file)] for file in source_files(source)]
    try:
        return [["sotu", importlib.metadata.version("sotu")]]
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(NO_SOTU) from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tokenize(
    source: str, valid_source: str | None, model: PreTrainedTokenizerFast, vocab_size: int
) -> dict[str, np.ndarray]:
    """Return the tokens of the parts "train" and "valid"."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    pieces: dict[str, list[np.ndarray]] = {"train": [], "valid": []}
    texts, begin = split(source, valid_source), beginning(model)
    while batch := list(itertools.islice(texts, ENCODED_TOGETHER)):
        # The library spreads a batch over processors, unless TOKENIZERS_PARALLELISM says no.
        encodings = model.backend_tokenizer.encode_batch_fast(
            [text for _, text in batch], add_special_tokens=False
        )
        for (part, _), encoding in zip(batch, encodings, strict=True):
            if encoding.ids:
                ids = [*begin, *encoding.ids, model.eos_token_id]
                pieces[part].append(np.array(ids, dtype=dtype))
    for part, arrays in pieces.items():
        if not arrays:
            raise ValueError(
                f"the {part} part of {source} is empty: "
                f"no document with text ({HOLD_OUT_EVERY} are needed)"
            )
    return {part: np.concatenate(arrays) for part, arrays in pieces.items()}


def _write(
    folder: Path, arrays: dict[str, np.ndarray], trained: PreTrainedTokenizerFast | None
) -> None:
    """Write `folder` whole or not at all: under another name, and then rename it.

    trained: the tokenizer, where it is of this text.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        if trained is not None:
            trained.save_pretrained(temporary)
        for part, array in arrays.items():
            np.save(temporary / f"{part}.npy", array)
        sums = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        (temporary / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
        os.rename(temporary, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first, with the same contents
            reason = error.strerror or error
            message = f"{folder} could not be written: {reason}; TWELL_CACHE names another place"
            raise OSError(message) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(folder: Path, given: PreTrainedTokenizerFast | None) -> Corpus:
    """Read what `_write` wrote; its tokenizer where none is given.

    Raises ValueError naming a damaged file.
    """
    file = folder / CHECKSUMS
    try:
        for name, expected in json.loads(file.read_text(encoding="utf-8")).items():
            file = folder / name
            if _sha256(file) != expected:
                raise ValueError("another SHA-256")
        arrays = {}
        for part in ("train", "valid"):
            file = folder / f"{part}.npy"
            arrays[part] = np.load(file, mmap_mode="r")
        file = folder / "tokenizer.json"
        return Corpus(given or AutoTokenizer.from_pretrained(folder), **arrays)
    except (PermissionError, MemoryError):
        raise
    except Exception:  # transformers and numpy have a dozen kinds
        raise ValueError(
            f"{file} is damaged or missing: "
            f"delete the folder {folder}, and the text is tokenised again"
        ) from None
