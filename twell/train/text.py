"""The text of a run, as tokens. It must not change under the run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from twell import corpus, results
from twell.config import TrainConfig

Text = tuple[PreTrainedTokenizerFast, corpus.Blocks | corpus.Stream, corpus.Blocks]


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
