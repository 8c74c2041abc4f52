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
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from twell import results
from twell.config import TrainConfig, cache_folder
from twell.corpus.tokens import beginning, encode
from twell.models.loading import load_stock, resolve, stock_config

WRITTEN = 512  # tokens of a text at most
SAMPLED = 64  # texts of a batch on a CPU
MOST_SAMPLED = 2048  # texts of a batch on a GPU; their keys and values take a third of its memory
TEMPERATURE = 0.8  # fewer rare tokens than at 1, after which a small model may go astray
WRITER_FILES = "generation_config.json tokenizer.json tokenizer_config.json"  # decide texts too
MARK = "\ue000"  # a character of private use, which no template has


def teacher_hash(name: str | Path, others: str = "") -> str:
    """Return the SHA-256 of a model's configuration and weights, and of other files there."""
    folder, hashes = resolve(name), []
    for pattern in f"config.json *.safetensors pytorch_model*.bin {others}".split():
        hashes += [(file.name, results.file_hash(file)) for file in sorted(folder.glob(pattern))]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


@torch.no_grad()
def write_samples(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    config: TrainConfig,
    say: Callable[[str], None],
) -> Path:
    """Let the teacher write `sampled_tokens`; return the file, a document a line, in the cache.

    An interrupted call goes on where it stopped: every batch has its own seed. The device decides
    how many texts a batch has, and so their words; the name of the file does not tell it.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():  # any rank may be the one that writes
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    length = min(WRITTEN, config.context)
    number = math.ceil(config.sampled_tokens / length)
    size = min(number, _texts_at_once(stock_config(folder)[0], length, device))
    batches = math.ceil(number / size)
    header = chat_header(tokenizer) if config.sampled_chat else ""
    first = _first(tokenizer, header)
    if len(first) >= length:
        raise ValueError(
            f"context is {config.context}; the header of a chat alone has {len(first)} tokens"
        )
    about = [teacher_hash(folder, WRITER_FILES), length, number, TEMPERATURE]
    about += [header] * config.sampled_chat
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    path = cache_folder() / f"samples-{name}.jsonl"
    with filelock.FileLock(f"{path}.lock"):
        if path.is_file():
            return path
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = load_stock(folder, kind).to(device).eval()
        part = path.with_suffix(".part")
        lines = part.read_text(encoding="utf-8").split("\n")[:-1] if part.is_file() else []
        written = len(lines) // size
        results.write_atomically(part, "".join(f"{line}\n" for line in lines[: written * size]))
        texts = f"{number - written * size} texts of up to {length} tokens"
        say(f"the teacher writes {texts}: {path}")
        start = time.perf_counter()
        for batch in range(written, batches):
            torch.manual_seed(batch)
            rows = min(size, number - batch * size)
            ids = _write(model, tokenizer, rows, length - len(first), first, ends=not header)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=not header)
            with open(part, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": header + text}) + "\n" for text in texts)
            pace = (time.perf_counter() - start) / (batch + 1 - written)
            left = datetime.timedelta(seconds=round(pace * (batches - batch - 1)))
            say(f"{batch + 1} of {batches} batches of texts, {left} left")
        part.rename(path)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the training that follows
    return path


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
    """Return the text that the chat template puts before the words of a first user.

    It has no begin-of-text token where the tokenizer puts one before every text. Raises ValueError
    where there is no template, or no such header.
    """
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


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    size: int,
    tokens: int,
    first: list[int],
    ends: bool = True,
) -> Tensor:
    """Return the ids of texts that a model writes after `first`, without `first`.

    They are drawn from its probabilities at TEMPERATURE. ends: an end-of-text token ends a text. In
    a conversation this token only ends a turn: the model writes on, for both sides.
    """
    end = tokenizer.eos_token_id
    own = model.generation_config.eos_token_id  # may be several
    stops = (end if own is None else own) if ends else None
    # Drop settings of the model that change its probabilities, such as a repetition penalty.
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=end)
    ids = torch.tensor(size * [first], device=model.device)
    options = {"do_sample": True, "top_k": 0, "temperature": TEMPERATURE, "max_new_tokens": tokens}
    # Without this mask, a first token that equals the padding would be masked.
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, len(first) :]
