"""Text that the teacher writes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.factories.train import BRIEF, write_pretrained
from twell import results
from twell.config import TrainConfig
from twell.corpus import load_tokenizer
from twell.train import relufy_config, samples, train


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path))
    monkeypatch.setattr(samples, "SAMPLED", 16)


@pytest.fixture
def speaker(tmp_path, tiny_text):
    return write_pretrained(tmp_path / "model", tiny_text, bos_token_id=5)


def write(config):
    """Return the texts that the teacher writes."""
    samples.write_samples(config, lambda line: None)
    return [json.loads(line)["text"] for line in open(config.source, encoding="utf-8")]


def test_without_a_source_the_teacher_writes_when_the_run_starts(teacher, tmp_path):
    config = relufy_config(teacher, [*BRIEF, "sampled_tokens=3000", "tokens=1024"])
    file, run = Path(config.source), tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        train(config, run, resume=True)
    assert not file.exists()  # the folder is refused before hours of writing
    train(config, run, quiet=True)
    assert results.load_run(run)[0]["complete"]
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    assert len(lines) == 94 and len(text) > 3000 and len(set(text)) > 5
    # Stopped in its third batch, or at its end, with half a line, it goes on to the same file.
    part = file.with_suffix(".part")
    for number in (2 * 16 + 3, 94):
        part.write_text("".join(lines[:number]) + '{"te')
        file.unlink()
        write(config)
        assert file.read_text(encoding="utf-8") == text and not part.exists()


def test_the_teacher_writes_conversations(speaker):
    fields = [*BRIEF, "sampled_tokens=3000", "sampled_chat=true", "tokens=1024"]
    tokenizer = load_tokenizer(str(speaker), 320)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(speaker)
    with pytest.raises(ValueError, match="no chat template with a header"):
        relufy_config(speaker, fields)
    tokenizer.chat_template = "U: {{ messages[0].content }}<|endoftext|>"
    tokenizer.save_pretrained(speaker)
    config = relufy_config(speaker, fields)
    texts = write(config)
    assert len(texts) == len(set(texts)) == 94
    assert all(text.startswith("U: ") for text in texts)
    # An end of text does not end a conversation, and becomes that token when it is read.
    assert "<|endoftext|>" in "".join(text[3:] for text in texts)
    ids = config.prepare_text()[1].tokens.tolist()  # without each 20th text
    assert ids.count(tokenizer.eos_token_id) > 94 - 94 // 20


@pytest.mark.parametrize("share", [0.25, 0.005])  # repeated, cut
def test_a_share_of_the_text_is_written(config, monkeypatch, tmp_path, share):
    plain = config().prepare_text()[1].tokens
    mixed = config("sampled_tokens=300", f"sampled_share={share}", "tokens=1024")
    train(mixed, tmp_path / "run", quiet=True)
    assert TrainConfig.load(tmp_path / "run" / "config.yaml").samples == mixed.samples
    file = str(tmp_path / mixed.samples)  # in the cache
    alone = dict(source=file, valid_source=file, samples=None, sampled_share=0.0)
    written = dataclasses.replace(mixed, **alone).prepare_text()[1].tokens  # none is held out
    text = mixed.prepare_text()[1].tokens
    rest = text[len(plain) :]
    assert abs(len(rest) / len(text) - share) < 1e-3 and (len(rest) > len(written)) == (share > 0.1)
    assert (text[: len(plain)] == plain).all()
    assert (rest == written[np.arange(len(rest)) % len(written)]).all()
    monkeypatch.setenv("TWELL_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        mixed.prepare_text()
