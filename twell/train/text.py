"""The text of a configuration and of a run, as tokens. A run's text must not change under it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from twell import corpus, results
from twell.config import TrainConfig

Text = tuple[PreTrainedTokenizerFast, corpus.Blocks | corpus.Stream, corpus.Blocks]


def prepare(config: TrainConfig, process: int = 0, num_processes: int = 1) -> Text:
    """Return the tokenizer, training blocks and validation blocks of `TrainConfig.prepare_text`."""
    source, context = config.source, config.context
    if not source.startswith("hf:"):
        text = corpus.prepare(
            source,
            vocab_size=config.vocab_size,
            cache=cache_folder(),
            valid_source=config.valid_source,
            tokenizer=config.tokenizer,
        )
        valid = corpus.Blocks(text.valid[: config.valid_tokens], context)
        return text.tokenizer, corpus.Blocks(text.train, context, config.seed), valid
    if config.tokenizer is None:
        raise ValueError(
            f"source {source} is streamed, so no tokenizer is trained on it; set tokenizer"
        )
    if config.valid_source is not None:
        raise ValueError(
            f"valid_source {config.valid_source}: of a stream the first documents are held out"
        )
    tokenizer = corpus.load_tokenizer(config.tokenizer, config.vocab_size)
    share = {"process": process, "num_processes": num_processes}
    stream = corpus.Stream(source, tokenizer, context, valid_tokens=config.valid_tokens, **share)
    return tokenizer, stream, corpus.Blocks(stream.valid, context)


def cache_folder() -> Path:
    """Return the folder of tokenised text: TWELL_CACHE, else in the user's cache folder."""
    return Path(os.environ.get("TWELL_CACHE") or Path.home() / ".cache" / "twell")


def text_hashes(
    config: TrainConfig, blocks: corpus.Blocks | corpus.Stream, valid: corpus.Blocks
) -> dict[str, str]:
    """Return the SHA-256 of a run's validation tokens and, unless streamed, training tokens."""
    tokens = {"validation": valid.tokens[: config.valid_tokens]}
    if isinstance(blocks, corpus.Blocks):
        tokens["training"] = blocks.tokens
    return {
        part: hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
        for part, array in tokens.items()
    }


def run_text(run: str | Path, valid_tokens: int | None = None) -> Text:
    """Return a run's tokenizer, training blocks and validation blocks.

    valid_tokens: take so many validation tokens instead of the run's own number. Raises ValueError
    when the text has changed since the run started.
    """
    config = TrainConfig.load(Path(run) / "config.yaml")
    number = config.valid_tokens if valid_tokens is None else valid_tokens
    tokenizer, blocks, valid = dataclasses.replace(config, valid_tokens=number).prepare_text()
    check_text(run, text_hashes(config, blocks, valid))
    return tokenizer, blocks, valid


def check_text(run: str | Path, hashes: dict[str, str]) -> None:
    """Raise ValueError when a run started with tokens of other hashes."""
    expected = results.load_provenance(run).get("text_sha256") or {}  # older versions wrote none
    if changed := [part for part in hashes if hashes[part] != expected.get(part, hashes[part])]:
        raise ValueError(
            f"the text of {run} has changed since the run started: "
            f"its {' and '.join(changed)} tokens differ; "
            "put back the text that config.yaml names, or train a new run"
        )
