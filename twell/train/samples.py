"""The hash of a teacher's files, and the text that a teacher writes. Ours."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import filelock
import torch
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from twell import results
from twell.config import TrainConfig, cache_folder
from twell.corpus.tokens import beginning, encode, load_tokenizer
from twell.models.loading import load_stock, resolve, stock_config

WRITTEN = 512  # tokens of a text at most
SAMPLED = 64  # texts of a batch on a CPU
MOST_SAMPLED = 2048  # texts of a batch on a GPU; their keys and values take a third of its memory
TEMPERATURE = 0.8  # fewer rare tokens than at 1, after which a small model may go astray
WRITER_FILES = "generation_config.json tokenizer.json tokenizer_config.json"  # decide texts too
PREFIX = "samples-"  # of the names of files
MARK = "\ue000"  # a character of private use, which no template has


def teacher_hash(name: str | Path, others: str = "") -> str:
    """Return the SHA-256 of a model's configuration and weights, and of other files there."""
    folder, hashes = resolve(name), []
    for pattern in f"config.json *.safetensors pytorch_model*.bin {others}".split():
        hashes += [(file.name, results.file_hash(file)) for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


class Plan:
    """What a teacher writes: `number` texts of `length` tokens at most, after the ids `first`.

    path: their file in the cache. Its name is a hash of all that decides them but the device.
    """

    def __init__(self, config: TrainConfig):
        self.tokenizer = load_tokenizer(str(resolve(config.teacher)), config.vocab_size)
        self.header = chat_header(self.tokenizer) if config.sampled_chat else ""
        self.first = _first(self.tokenizer, self.header)
        self.length = min(WRITTEN, config.context)
        self.number = math.ceil(config.sampled_tokens / self.length)
        if (size := len(self.first)) >= self.length:
            raise ValueError(f"context is {config.context}; the chat's header has {size} tokens")
        files = teacher_hash(config.teacher, WRITER_FILES)
        about = [files, self.length, self.number, TEMPERATURE, *[self.header] * config.sampled_chat]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"{PREFIX}{name}.jsonl"


@torch.no_grad()
def write_samples(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Let the teacher write its part of the text, a document a line, if it is not in the cache.

    An interrupted call goes on where it stopped: every batch has its own seed.
    """
    path = cache_folder() / config.samples if config.samples else Path(config.source)
    is_sampled = config.teacher is not None and path.name.startswith(PREFIX)
    if not is_sampled or path.is_file() or path != (plan := Plan(config)).path:
        return
    folder = resolve(config.teacher)
    device = torch.device("cpu")
    if torch.cuda.is_available():  # any rank may be the one that writes
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    size = min(plan.number, _texts_at_once(stock_config(folder)[0], plan.length, device))
    batches = math.ceil(plan.number / size)
    with filelock.FileLock(f"{path}.lock"):
        if path.is_file():
            return
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = load_stock(folder, kind).to(device).eval()
        part = path.with_suffix(".part")
        lines = part.read_text(encoding="utf-8").split("\n")[:-1] if part.is_file() else []
        written = len(lines) // size
        results.write_atomically(part, "".join(f"{line}\n" for line in lines[: written * size]))
        say(f"the teacher writes {plan.number} texts of up to {plan.length} tokens: {path}")
        start = time.perf_counter()
        for batch in range(written, batches):
            torch.manual_seed(batch)
            texts = _write(model, plan, min(size, plan.number - batch * size))
            with open(part, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": plan.header + text}) + "\n" for text in texts)
            pace = (time.perf_counter() - start) / (batch + 1 - written)
            left = datetime.timedelta(seconds=round(pace * (batches - batch - 1)))
            say(f"{batch + 1} of {batches} batches of texts, {left} left")
        part.rename(path)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the training that follows


def _texts_at_once(config: PreTrainedConfig, length: int, device: torch.device) -> int:
    """Return the number of texts in a batch; on a GPU its memory decides."""
    if device.type == "cpu":
        return SAMPLED
    heads = config.num_attention_heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    text = 4 * length * config.num_hidden_layers * kept * head_size  # bytes, keys and values, bf16
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(MOST_SAMPLED, memory // 3 // text))


def chat_header(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what the chat template puts before a first user's words, without a second begin."""
    header = mark = ""
    if tokenizer.chat_template:
        first = [{"role": "user", "content": MARK}]
        header, mark, _ = tokenizer.apply_chat_template(first, tokenize=False).partition(MARK)
    if not (header and mark):
        raise ValueError(
            "sampled_chat is true, and the teacher has no chat template with a header before a "
            "user's words: leave sampled_chat out"
        )
    return header.removeprefix(tokenizer.bos_token) if beginning(tokenizer) else header


def _first(tokenizer: PreTrainedTokenizerFast, header: str) -> list[int]:
    """Return the ids after which the teacher writes: the header's, or the begin-of-text token."""
    if header:
        return encode(tokenizer, header, parse_special=True)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [end if begin is None else begin]


def _write(model: PreTrainedModel, plan: Plan, size: int) -> list[str]:
    """Return texts, drawn at TEMPERATURE. In a conversation an end token ends a turn only."""
    end, own = plan.tokenizer.eos_token_id, model.generation_config.eos_token_id  # maybe several
    stops = None if plan.header else end if own is None else own
    # Drop settings of the model that change its probabilities, such as a repetition penalty.
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=end)
    ids = torch.tensor(size * [plan.first], device=model.device)
    options = {"do_sample": True, "top_k": 0, "temperature": TEMPERATURE}
    options["max_new_tokens"] = plan.length - len(plan.first)
    # Without this mask, a first token that equals the padding would be masked.
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, len(plan.first) :]
    return plan.tokenizer.batch_decode(ids, skip_special_tokens=not plan.header)
