"""From text to sequences of token ids, and from a token id to the string that a reader sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from twell import corpus
from twell.models import load


def load_with_tokenizer(
    name_or_path: str | Path, **options
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and tokenizer of `twell.load`.

    Raises ValueError without a tokenizer, and for an encoder-decoder model.
    """
    model, tokenizer = load(name_or_path, **options)
    check_causal(model)
    if tokenizer is None:
        raise ValueError(f"{name_or_path} has no tokenizer; put tokenizer.json beside the model")
    return model, tokenizer


def check_causal(model: PreTrainedModel) -> None:
    """Raise ValueError for an encoder-decoder model."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; traces, the inspector and "
            "evaluations take causal language models"
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text, after what the tokenizer begins every text with.

    Raises ValueError for an empty one, and lone surrogates.
    """
    text = corpus.checked_text(text, "the text")
    # verbose=False: tokenizers warn of long texts, but `cut` takes texts of any length.
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not ids:
        raise ValueError("the text is empty; give at least one character")
    return [*corpus.beginning(tokenizer), *ids]


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

    whole: of a source that is held out as a whole. Each document is cut by `cut`, so each sequence
    is of one document. Raises ValueError where the source holds out fewer tokens.
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
    """Return the text of each token; a part of a character shows its bytes, as in <0xF0>."""
    # Byte-level BPE writes every byte as a printable character.
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    strings: dict[int, str] = {}
    for token in np.unique(np.asarray(token_ids)).tolist():
        strings[token] = tokenizer.decode([token])
        if "\ufffd" in strings[token]:
            characters = tokenizer.convert_ids_to_tokens(token)
            if all(character in byte_of for character in characters):
                strings[token] = "".join(f"<0x{byte_of[one]:02X}>" for one in characters)
    return [strings[int(token)] for token in token_ids]
