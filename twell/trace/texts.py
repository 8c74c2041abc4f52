"""Text to sequences of token ids, and token ids to the strings that a reader sees."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from twell import corpus
from twell.models import load


def load_with_tokenizer(
    name_or_path: str | Path, **options
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return `twell.load`'s result. Raises ValueError without tokenizer or causal model."""
    model, tokenizer = load(name_or_path, **options)
    check_causal(model)
    if tokenizer is None:
        raise ValueError(f"{name_or_path} has no tokenizer; put tokenizer.json beside the model")
    return model, tokenizer


def check_causal(model: PreTrainedModel) -> None:
    """Raise ValueError for an encoder-decoder model."""
    if model.config.is_encoder_decoder:
        name = f"{type(model).__name__} is an encoder-decoder model"
        raise ValueError(f"{name}; traces, the inspector and evaluations take causal models")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text, with its begin-of-text token.

    Raises ValueError for an empty text, and for lone surrogates.
    """
    ids = corpus.encode(tokenizer, corpus.checked_text(text, "the text"))
    if not ids:
        raise ValueError("the text is empty; give at least one character")
    return ids


def cut(token_ids: Sequence[int], model: PreTrainedModel) -> list[Sequence[int]]:
    """Cut tokens into sequences of the model's context length; the last one may be shorter."""
    context = model.config.max_position_embeddings
    return [token_ids[start : start + context] for start in range(0, len(token_ids), context)]


def held_out(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    *,
    whole: bool = False,
) -> list[Sequence[int]]:
    """Return the first held-out documents of a source as sequences, at least `tokens` in all.

    whole: all documents of the source are held out. Each document is cut by `cut`, so a sequence
    has one document. Raises ValueError where the source holds out fewer tokens.
    """
    sequences, total = [], 0
    documents = (("valid", text) for text in corpus.documents(source))
    for part, text in documents if whole else corpus.split(source):
        for sequence in cut(encode(tokenizer, text), model) if part == "valid" else ():
            sequences.append(sequence)
            total += len(sequence)
            if total >= tokens:
                return sequences
    raise ValueError(f"{source} holds out {total:,} tokens, not {tokens:,}; ask for fewer")


def token_strings(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token inside a text, spaces included, as the tokenizer decodes it.

    A part of a character shows its bytes, as in <0xF0>; an id without a token is <500>.
    """
    special, added = set(tokenizer.all_special_ids), tokenizer.added_tokens_decoder
    decode = tokenizer.convert_tokens_to_string
    decodes = not tokenizer.is_fast or tokenizer.backend_tokenizer.decoder is not None
    # Decoders treat the first and the last token of a text specially, so each token gets
    # neighbours. Where the decoder puts spaces between words, it gets none after it.
    after = "a" if decode(["a", "a"]) == "aa" else ""

    @functools.cache
    def string(token: int) -> str:
        name = tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return f"<{token}>"
        if token in special or not decodes:
            return name
        text = decode(["a", name, *after]).removeprefix("a").removesuffix(after)
        if "\ufffd" in text:
            return name if token in added else _bytes(name)
        return text or name

    return [string(int(token)) for token in token_ids]


def _bytes(name: str) -> str:
    """Return the string of a token whose bytes are not whole characters."""
    # Byte-level BPE writes every byte as a printable character.
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    if not byte_of.keys() >= set(name):
        return name
    raw = bytes(byte_of[character] for character in name)
    try:
        return raw.decode()  # U+FFFD itself, or a token that is called <0xF0>
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)
