"""The text of a run, as tokens. It must not change while the run lasts, or between its parts."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from twell import corpus, results
from twell.config import TrainConfig


def text_hashes(
    config: TrainConfig, blocks: corpus.Blocks | corpus.Stream, valid: corpus.Blocks
) -> dict[str, str]:
    """Return the SHA-256 of a run's validation tokens and, unless streamed, training tokens."""
    hashes = {"validation": _sha256(valid.tokens[: config.valid_tokens])}
    if isinstance(blocks, corpus.Blocks):
        hashes["training"] = _sha256(blocks.tokens)
    return hashes


def _sha256(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens)).hexdigest()


def run_text(
    run: str | Path, valid_tokens: int | None = None
) -> tuple[PreTrainedTokenizerFast, corpus.Blocks | corpus.Stream, corpus.Blocks]:
    """Return a run's tokenizer, training blocks and validation blocks.

    valid_tokens: the number of validation tokens, instead of the run's own. Raises ValueError when
    the validation text has changed since the run started; the training tokens are not read.
    """
    config = TrainConfig.load(Path(run) / "config.yaml")
    number = config.valid_tokens if valid_tokens is None else valid_tokens
    tokenizer, blocks, valid = dataclasses.replace(config, valid_tokens=number).prepare_text()
    hashes = {"validation": _sha256(valid.tokens[: config.valid_tokens])}
    check_inputs(run, {"text_sha256": hashes})
    return tokenizer, blocks, valid


def check_inputs(run: str | Path, hashes: dict) -> None:
    """Raise ValueError when a run started with another text or teacher.

    hashes: fields of its provenance, of which versions of old wrote none.
    """
    before = results.load_provenance(run)
    text, teacher = hashes["text_sha256"], hashes.get("teacher_sha256")
    old = before.get("text_sha256") or {}
    if changed := [part for part in text if text[part] != old.get(part, text[part])]:
        raise ValueError(
            f"the text of {run} has changed since the run started: "
            f"its {' and '.join(changed)} tokens differ; "
            "put back the text that config.yaml names, or train a new run"
        )
    if teacher and before.get("teacher_sha256", teacher) != teacher:
        raise ValueError(
            f"the teacher of {run} has changed since the run started: its weights or config.json "
            "differ; put them back, or train a new run"
        )
