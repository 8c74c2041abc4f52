"""Serving at toy size: processes in place of vLLM's, which answer as the saved model does."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import twell
from tests.factories.measure import TINY
from tests.factories.models import change_config
from twell import results
from twell.__main__ import main
from twell.measure import serving
from twell.models import read_json

SIZES = {"LEVELS": {1: 2, 4: 6}, "ROUNDS": 2, "CHECKED": (1, 40), "ANSWER": 3, "TOGETHER": 2}
SLEEP, EXIT = "import time; time.sleep(600)", "raise SystemExit('no such model')"


class Vllm:
    """Servers that were started and benchmarks that were run; other attributes may go wrong."""

    def __init__(self, out):
        self.out, self.folder, self.servers, self.words = out, out / "serve/model", [], []
        self.given, self.package, self.program = ["2b", *TINY], "vllm", SLEEP
        self.error, self.token, self.of_many, self.chance = None, 0, 0, 0

    def measure(self):
        return main(["measure", "serve", *self.given, "--out", str(self.out)])

    def start(self, command, **options):
        process = subprocess.Popen([sys.executable, "-c", self.program], **options)
        self.servers.append((command, process))
        return process

    def answer(self, request, timeout):
        if isinstance(request, str):
            return io.BytesIO() if self.program == SLEEP else open("/none")
        body = json.loads(request.data)
        model, _ = twell.load(self.folder, backend="dense")
        choices = []
        for index, prompt in reversed([*enumerate(body["prompt"])]):
            ids = torch.tensor([prompt])
            new = model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=False)
            chances = model(ids).logits[0].float().log_softmax(-1) + self.chance
            read = [{str(t): {"logprob": float(chances[i, t])}} for i, t in enumerate(prompt[1:])]
            wrong = self.token + self.of_many * (len(body["prompt"]) > 1)
            new = (new[0, ids.shape[1] :] + wrong).tolist()
            logprobs = {"prompt_logprobs": [None, *read]}
            choices.append({"index": index, "token_ids": new} | logprobs)
        return io.BytesIO(json.dumps({"choices": choices}).encode())

    def bench(self, words):
        if self.error:
            raise self.error
        self.words.append(words)
        number = int(words[words.index("--num-prompts") + 1])
        assert len(open(words[words.index("--dataset-path") + 1]).readlines()) >= number
        result = {"completed": number, "total_input_tokens": 100 * number}
        return result | dict.fromkeys(serving.COLUMNS["serve"][-7:], 2.0)


@pytest.fixture
def vllm(dense_kernels, monkeypatch, tmp_path):
    vllm = Vllm(tmp_path)
    fakes = {"bench": vllm.bench, "subprocess": SimpleNamespace(Popen=vllm.start)}
    for name, value in (fakes | SIZES).items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(serving.urllib.request, "urlopen", vllm.answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: vllm.package)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 300))
    yield vllm
    assert all(process.returncode is not None for _, process in vllm.servers)


@pytest.mark.parametrize("kind", ["bfloat16", "FP8", "a folder"])
def test_both_servers_are_timed_in_turns(vllm, tmp_path, kind):
    about = ["2b", "paper", kind]
    if kind == "FP8":
        vllm.given += ["--fp8"]
    elif kind == "a folder":
        about, vllm.folder = [kind, "checkpoint", "bfloat16"], tmp_path / kind
        serving.create(vllm.folder, "2b", TINY, False, torch.device("cpu"))
        (tmp_path / "text.txt").write_text(" ".join(f"w{i % 9}" for i in range(70_000)))
        vllm.given = [str(vllm.folder), "--source", str(tmp_path / "text.txt")]
    assert vllm.measure() == 0
    rows = pd.read_csv(vllm.out / "serve.csv")
    columns = ["provider", "round", "at_once", "requests", "prompt_tokens", "p99_tpot_ms"]
    assert rows[columns].to_numpy().tolist() == [
        [f"{name} torch.compile", count, at_once, requests, 100 * requests, 2.0]
        for count, names in ((1, ("auto", "dense")), (2, ("dense", "auto")))
        for at_once, requests in ((1, 2), (4, 6))
        for name in names
    ]
    assert len(vllm.words) == 12  # one round more, which warms up
    assert rows[["model", "profile", "precision"]].to_numpy().tolist() == [about] * 8
    _, active, _ = zip(*read_json(vllm.folder / "config.json")["ffn_activity"], strict=True)
    assert rows["active"].tolist() == pytest.approx([sum(active) / 3] * 8, abs=0.01)
    (dense, _), (sparse, _) = vllm.servers
    assert str(vllm.folder) in sparse and dense[:-2] == sparse[:-2] + serving.DENSE  # but ports
    prompts = [json.loads(line)["prompt"] for line in (vllm.out / "serve/prompts.jsonl").open()]
    assert len(prompts) == 6 and all(128 <= len(prompt.split()) <= 1024 for prompt in prompts)
    assert all("w8 w0 w1" in prompt for prompt in prompts) == (kind == "a folder")


@pytest.mark.parametrize(
    "name, value, status, words, servers",
    [
        ("token", 1, 2, "is wrong", 2),
        ("of_many", 1, 2, "is wrong", 2),
        ("chance", 0.1, 2, "is wrong", 2),
        ("chance", float("nan"), 2, "is wrong", 2),
        ("error", KeyboardInterrupt("enough"), 130, "enough", 2),
        ("program", EXIT, 2, "no such model", 2),
        ("package", None, 2, r"pip install -e '\.\[vllm\]'", 0),
        ("given", [str(results.root() / "data/checkpoints/twell-6m")], 2, "twell.tune", 0),
    ],
)
def test_nothing_is_recorded_and_servers_stop(vllm, capfd, name, value, status, words, servers):
    setattr(vllm, name, value)
    assert vllm.measure() == status
    assert re.search(words, capfd.readouterr().err) and len(vllm.servers) == servers
    assert not vllm.words and not (vllm.out / "serve.csv").exists()


def test_a_model_of_short_sequences_is_refused(vllm, capfd, tmp_path):
    serving.create(tmp_path, "2b", TINY, False, torch.device("cpu"))
    change_config(max_position_embeddings=383)(tmp_path)
    vllm.given = [str(tmp_path)]
    assert vllm.measure() == 2 and "384 tokens" in capfd.readouterr().err and not vllm.servers
