"""Serving at toy size: the numbers of answers whose times are known, and what is refused."""

from types import SimpleNamespace

import pandas as pd
import pytest
from transformers import GenerationMixin

from tests.factories.measure import TINY
from twell.__main__ import main
from twell.measure import serving as module

LOAD = {"REQUESTS": 3, "SHORTEST": 4, "LONGEST": 40, "NEW_TOKENS": 5}
SECONDS = {"dense": 2.0, "triton": 1.0, "auto": 1.0}


@pytest.fixture
def answers(dense_kernels, monkeypatch):
    """Continuous batching that takes SECONDS by backend, half of them to the first tokens."""
    calls = []
    for name, value in LOAD.items():
        monkeypatch.setattr(module, name, value)

    def generate_batch(model, prompts, generation_config, record_timestamps, **options):
        backend = model.ffns[0].backend
        calls.append((backend, prompts, options))
        seconds, start, number = SECONDS[backend], 100.0, len(prompts)
        tokens = [0] * generation_config.max_new_tokens
        times = [start + seconds * (i + 1) / len(tokens) for i in range(len(tokens))]
        times[0] = start + seconds / 2
        one = {"created_time": start, "timestamps": times, "generated_tokens": tokens}
        return {f"{i}": SimpleNamespace(**one) for i in range(number)}

    monkeypatch.setattr(GenerationMixin, "generate_batch", generate_batch)
    return calls


def test_requests_are_served_by_all_providers_in_turns(answers, tmp_path):
    command = ["measure", "serve", "2b", *TINY, "--active", "9", "--out", str(tmp_path)]
    assert main(command) == 0
    rows = pd.read_csv(tmp_path / "serve.csv").set_index("provider")
    assert list(rows.index) == ["dense eager", "triton", "auto"]
    assert rows["requests_per_second"].tolist() == [1.5, 3, 3]
    assert rows["tokens_per_second"].tolist() == [7.5, 15, 15]
    assert rows["first_token"].tolist() == [1000, 500, 500]
    assert rows["p50"].tolist() == [2000, 1000, 1000] and (rows["rounds"] == 2).all()
    assert (rows["attention"] == "default").all()
    assert (rows["active"] - 9).abs().max() < 4 and rows["layer_rms"].max() < 0.02
    backends, prompts, options = zip(*answers, strict=True)
    assert all(backends.count(backend) == 3 for backend in SECONDS)  # 2 rounds, one before
    assert all(one == prompts[0] for one in prompts)
    assert not any(one["persistent_manager"] for one in options)
    lengths = [len(prompt) for prompt in prompts[0]]
    assert len(set(lengths)) > 1 and 4 <= min(lengths) <= max(lengths) <= 40
    assert rows["prompt_tokens"].tolist() == [sum(lengths)] * 3
