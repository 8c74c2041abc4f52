"""Serving at toy size: processes in place of vLLM's, which answer as the saved model does."""

import importlib.util
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import twell
from tests.factories.measure import TINY
from twell.__main__ import main
from twell.measure import serving
from twell.models import read_json

RESULT = dict.fromkeys(serving.COLUMNS["serve"][-7:], 2.0)
SIZES = {"LEVELS": {1: 2, 4: 6}, "ROUNDS": 2, "CHECKED": (1, 40), "ANSWER": 3}
SLEEP, EXIT = "import time; time.sleep(600)", "raise SystemExit('no such model')"
DENSE = '{"ffn_backend": "dense"}'


class Vllm:
    """Servers that were started and benchmarks that were run; the other attributes go wrong."""

    def __init__(self, out):
        self.out, self.folder, self.servers, self.words = out, out / "serve/model", [], []
        self.package, self.program, self.error, self.token, self.chance = "vllm", SLEEP, None, 0, 0

    def measure(self, *options, model=("2b", *TINY)):
        return main(["measure", "serve", *model, *options, "--out", str(self.out)])

    def start(self, command, **options):
        process = subprocess.Popen([sys.executable, "-c", self.program], **options)
        self.servers.append((command, process))
        return process

    def answer(self, request, timeout):
        if isinstance(request, str):
            return io.BytesIO() if self.program == SLEEP else open("/none")
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
        if self.error:
            raise self.error
        self.words.append(words)
        number = int(words[words.index("--num-prompts") + 1])
        return RESULT | {"completed": number, "total_input_tokens": 100 * number}


@pytest.fixture
def vllm(dense_kernels, monkeypatch, tmp_path):
    vllm = Vllm(tmp_path)
    processes = SimpleNamespace(Popen=vllm.start)
    for name, value in {"bench": vllm.bench, "subprocess": processes, **SIZES}.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving.urllib.request, "urlopen", vllm.answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: vllm.package)
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
    _, active, _ = zip(*read_json(vllm.folder / "config.json")["ffn_activity"], strict=True)
    assert rows["active"].tolist() == pytest.approx([sum(active) / 3] * 8, abs=0.01)
    assert [DENSE in command for command, _ in vllm.servers] == [True, False]
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
    model, _ = twell.load(vllm.folder)
    twell.tune(model, None)
    model.save_pretrained(vllm.folder)
    assert vllm.measure(**options) == 2 and "twell.tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, value, status, words, servers",
    [
        ("token", 1, 2, "is wrong", 2),
        ("chance", 0.1, 2, "is wrong", 2),
        ("chance", float("nan"), 2, "is wrong", 2),
        ("error", KeyboardInterrupt("enough"), 130, "enough", 2),
        ("error", OSError("no answer"), 2, "no answer", 2),
        ("program", EXIT, 2, "no such model", 1),
        ("package", None, 2, "pip install -e '.[vllm]'", 0),
    ],
)
def test_nothing_is_recorded_and_servers_stop(vllm, capfd, name, value, status, words, servers):
    setattr(vllm, name, value)
    assert vllm.measure() == status
    assert words in capfd.readouterr().err and len(vllm.servers) == servers
    assert not vllm.words and not (vllm.out / "serve.csv").exists()
