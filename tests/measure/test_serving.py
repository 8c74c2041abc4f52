"""Serving at toy size: processes in place of vLLM's, which answer as the saved model does."""

import importlib.util
import io
import json
import subprocess
import sys

import pandas as pd
import pytest
import torch

import twell
from tests.factories.measure import TINY
from twell.__main__ import main
from twell.measure import serving

RESULT = dict.fromkeys(serving.COLUMNS["serve"][-7:], 2.0)
SIZES = {"LEVELS": {1: 2, 4: 6}, "ROUNDS": 2, "CHECKED": (1, 40), "ANSWER": 3}


class Vllm:
    """Servers that were started, benchmarks that were run, and how far its answers are off."""

    def __init__(self, out):
        self.out, self.folder, self.servers, self.words = out, out / "serve/model", [], []
        self.token = self.chance = 0

    def measure(self, *options, model=("2b", *TINY)):
        return main(["measure", "serve", *model, *options, "--out", str(self.out)])

    def answer(self, request, timeout):
        if isinstance(request, str):
            return io.BytesIO()
        body = json.loads(request.data)
        model, _ = twell.load(self.folder, backend="dense")
        ids = torch.tensor([body["prompt"]])
        new = model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=False)
        chances = model(ids).logits[0].float().log_softmax(-1) + self.chance
        read = [{str(t): {"logprob": float(chances[i, t])}} for i, t in enumerate(body["prompt"][1:])]
        choice = {"token_ids": (new[0, ids.shape[1] :] + self.token).tolist()}
        choice["prompt_logprobs"] = [None, *read]
        return io.BytesIO(json.dumps({"choices": [choice]}).encode())

    def bench(self, words):
        self.words.append(words)
        number = int(words[words.index("--num-prompts") + 1])
        return RESULT | {"completed": number, "total_input_tokens": 100 * number}


@pytest.fixture
def vllm(dense_kernels, monkeypatch, tmp_path):
    vllm, popen = Vllm(tmp_path), subprocess.Popen

    def start(command, **options):
        if command[0] != "sleeps":
            return popen(command, **options)
        process = popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)
        vllm.servers.append((command, process))
        return process

    for name, value in {"VLLM": ["sleeps"], "bench": vllm.bench, **SIZES}.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving.urllib.request, "urlopen", vllm.answer)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 300))
    yield vllm
    assert all(process.returncode is not None for _, process in vllm.servers)


@pytest.mark.parametrize("options, precision", [([], "bfloat16"), (["--fp8"], "FP8")])
def test_both_servers_are_timed_in_turns(vllm, options, precision):
    assert vllm.measure(*options) == 0
    rows = pd.read_csv(vllm.out / "serve.csv")
    names = ["dense torch.compile", "auto torch.compile"]
    assert rows["provider"].tolist() == [*names[::-1] * 2, *names * 2]
    assert rows["at_once"].tolist() == [1, 1, 4, 4] * 2
    assert rows["requests"].tolist() == [2, 2, 6, 6] * 2
    assert rows["round"].tolist() == [1] * 4 + [2] * 4
    assert (rows["prompt_tokens"] == 100 * rows["requests"]).all()
    assert (rows["precision"] == precision).all() and (rows[[*RESULT]] == 2).all(axis=None)
    _, active, _ = zip(*json.loads((vllm.folder / "config.json").read_text())["ffn_activity"], strict=True)
    assert rows["active"].tolist() == pytest.approx([sum(active) / 3] * 8, abs=0.01)
    (dense, _), (sparse, _) = vllm.servers
    assert '{"ffn_backend": "dense"}' in dense and not {'{"ffn_backend": "dense"}'} & {*sparse}
    texts = [json.loads(line)["prompt"] for line in (vllm.out / "serve/prompts.jsonl").open()]
    assert len(texts) == 6 and all(128 <= len(text.split()) <= 1024 for text in texts)
    assert len(vllm.words) == 12  # one round more, which warms up


def test_a_saved_folder_is_served_with_a_text(vllm, tmp_path, capsys):
    vllm.folder = tmp_path / "mine"
    serving.create(vllm.folder, "2b", TINY, False, torch.device("cpu"))
    (tmp_path / "words.txt").write_text(" ".join(f"w{i % 9}" for i in range(70_000)))
    options = {"model": [str(vllm.folder), "--source", str(tmp_path / "words.txt")]}
    assert vllm.measure(**options) == 0
    rows = pd.read_csv(vllm.out / "serve.csv")
    assert (rows["model"] == "mine").all() and (rows["profile"] == "checkpoint").all()
    assert all(str(vllm.folder) in command for command, _ in vllm.servers)
    assert "w8 w0 w1" in (vllm.out / "serve/prompts.jsonl").read_text()
    model, tokenizer = twell.load(vllm.folder)
    twell.tune(model, None)
    model.save_pretrained(vllm.folder)
    assert vllm.measure(**options) == 2 and "twell.tune" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"token": 1}, {"chance": 0.1}, {"chance": float("nan")}])
def test_wrong_answers_are_not_timed(vllm, capsys, wrong):
    vars(vllm).update(wrong)
    assert vllm.measure() == 2
    assert "wrong" in capsys.readouterr().err and not vllm.words
    assert len(vllm.servers) == 2 and not (vllm.out / "serve.csv").exists()


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt, 130), (OSError, 2)])
def test_servers_are_stopped_after_an_error(vllm, monkeypatch, error, status):
    def fail(words):
        raise error("interrupted")

    monkeypatch.setattr(serving, "bench", fail)
    assert vllm.measure() == status
    assert len(vllm.servers) == 2


def test_a_server_that_ends_shows_its_log(vllm, monkeypatch, capfd):
    words = [sys.executable, "-c", "raise SystemExit('no such model')"]
    monkeypatch.setattr(serving, "VLLM", words)
    monkeypatch.setattr(serving.urllib.request, "urlopen", lambda *_, **__: open("/none"))
    assert vllm.measure() == 2
    assert "no such model" in capfd.readouterr().err


def test_what_is_missing_is_named(vllm, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert vllm.measure() == 2
    assert "pip install -e '.[vllm]'" in capsys.readouterr().err
    assert not (vllm.out / "serve").exists()
