"""The text of a run, which must not change while the run lasts, and a model's loss on it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from twell import corpus, results
from twell.config import TrainConfig
from twell.models import SparseLlamaForCausalLM, resolve
from twell.sparse.observe import summarize_activity
from twell.train.relufy import Student

BATCH = 32  # sequences of a validation pass


def text_hashes(blocks: corpus.Blocks | corpus.Stream, valid: corpus.Blocks) -> dict[str, str]:
    """Return the SHA-256 of a run's validation tokens and, unless streamed, training tokens."""
    hashes = {"validation": _sha256(valid.tokens)}
    if isinstance(blocks, corpus.Blocks):
        hashes["training"] = _sha256(blocks.tokens)
    return hashes


def _sha256(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens)).hexdigest()


def teacher_hash(name: str | Path) -> str:
    """Return the SHA-256 of a model's configuration and weights."""
    folder, hashes = resolve(name), []
    for pattern in ("config.json", "*.safetensors", "pytorch_model*.bin"):
        hashes += [(file.name, results.file_hash(file)) for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def run_text(run: str | Path, valid_tokens: int | None = None) -> corpus.Blocks:
    """Return the validation blocks of a run.

    They are in its folder, unless an older version wrote it. valid_tokens: another number of
    validation tokens, for which the text has to be at hand. Raises ValueError when the validation
    text has changed since the run started.
    """
    run = Path(run)
    config = TrainConfig.load(run / "config.yaml")
    if valid_tokens is None:
        with contextlib.suppress(OSError, ValueError, EOFError, KeyError):  # absent or damaged
            tokens = np.load(run / results.VALID)
            if _sha256(tokens) == results.load_provenance(run)["text_sha256"]["validation"]:
                return corpus.Blocks(tokens, config.context)
    number = config.valid_tokens if valid_tokens is None else valid_tokens
    _, _, valid = dataclasses.replace(config, valid_tokens=number).prepare_text()
    hashes = {"validation": _sha256(valid.tokens[: config.valid_tokens])}
    check_inputs(run, {"text_sha256": hashes})
    return valid


def check_inputs(run: str | Path, hashes: dict) -> None:
    """Raise ValueError when a run started with another text or teacher, by its provenance."""
    before = results.load_provenance(run)
    text, teacher = hashes["text_sha256"], hashes.get("teacher_sha256")
    old = before.get("text_sha256") or {}
    changed = [f"{part} tokens" for part in text if text[part] != old.get(part, text[part])]
    if teacher and before.get("teacher_sha256", teacher) != teacher:
        changed.append("teacher's weights or config.json")
    if changed:
        raise ValueError(
            f"{' and '.join(changed)} of {run} have changed since the run started; put back what "
            "config.yaml names, or train a new run"
        )


@torch.no_grad()
def evaluate(model: SparseLlamaForCausalLM | Student, blocks: corpus.Blocks) -> dict:
    """Return the mean cross-entropy (nats per predicted token) and each layer's activity.

    Result: {"cross_entropy": float, "layers": [summarize_activity(...) of each layer]}, over all
    blocks; for a student also "kl" and "cross_entropy_teacher" (relufy.py). The layers' own
    counters keep their values.
    """
    training, before = model.training, [ffn.stats.counters for ffn in model.ffns]
    model.eval()
    model.recording = True
    for ffn in model.ffns:
        ffn.stats.counters = None

    names = ["cross_entropy"] + ["kl", "cross_entropy_teacher"] * isinstance(model, Student)
    totals = dict.fromkeys(names, 0.0)
    for start in range(0, len(blocks), BATCH):
        tokens = blocks.draw(range(start, min(start + BATCH, len(blocks)))).to(model.device)
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        for name in totals:
            totals[name] += float(getattr(output, name)) * len(tokens)

    model.train(training)
    model.recording = False
    layers = [summarize_activity(*ffn.stats.take()) for ffn in model.ffns]
    for ffn, counted in zip(model.ffns, before, strict=True):
        ffn.stats.counters = counted
    return {name: total / len(blocks) for name, total in totals.items()} | {"layers": layers}
