import dataclasses
import json
import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # The kernels' tests run in Triton's interpreter. Triton reads the variable at its first import.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.factories import SEED  # noqa: E402
from twell.config import TrainConfig  # noqa: E402
from twell.train import train  # noqa: E402

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "ain", "o", "un")]


def pytest_report_header():
    return f"TWELL_SEED={SEED}"


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory):
    """A file of 80 documents with some structure: every word decides the next but two."""
    random = np.random.default_rng(11)
    follow = random.integers(0, len(WORDS), (len(WORDS), 3))
    path = tmp_path_factory.mktemp("text") / "tiny.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(80):
            word, words = int(random.integers(len(WORDS))), []
            for _ in range(150):
                words.append(WORDS[word])
                word = int(follow[word, random.integers(3)])
            file.write(json.dumps({"text": " ".join(words), "source": "tiny"}) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny_config(tiny_text, tmp_path_factory):
    """A configuration that trains in about two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWELL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield TrainConfig(
            source=str(tiny_text),
            vocab_size=320,
            context=32,
            hidden_size=32,
            intermediate_size=96,
            num_layers=2,
            num_heads=2,
            tokens=16 * 512,
            batch_tokens=512,
            warmup_steps=2,
            learning_rate=5e-3,
            l1_coefficient=1e-2,
            dead_window_tokens=2048,
            log_every=4,
            valid_every=8,
            valid_tokens=512,
        )


@pytest.fixture(scope="session")
def tiny_run(tiny_config, tmp_path_factory):
    """A finished run of it."""
    return train(
        dataclasses.replace(tiny_config), tmp_path_factory.mktemp("runs") / "tiny", quiet=True
    )
