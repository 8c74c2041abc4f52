"""The shipped model behind transformers' continuous batching, by HTTP."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import twell
from twell import results
from twell.models import save

MODEL = results.root() / "data" / "checkpoints" / "twell-6m"
PROMPTS = ["The United States", "My fellow citizens, in the year of", "Peace"] * 2
TOKENS = 12


@contextlib.contextmanager
def server(folder, log):
    """`transformers serve` in a process of its own, which does not import twell by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--trust-remote-code --continuous-batching --device cpu --port {port}"
    options += " --host 127.0.0.1 --attn-implementation sdpa"
    options += " --cb-num-blocks 16 --cb-max-batch-tokens 256"  # the defaults fill the memory
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), *options.split()]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                    break
                assert process.poll() is None, log.read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            process.terminate()


def answered(address, folder, prompt):
    """The server's text after a prompt."""
    body = {"model": str(folder), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


@pytest.mark.slow
def test_requests_over_http_are_answered_together(tmp_path):
    """A neuron that is never active has infinite weights: dense layers would compute NaN."""
    folder, texts = tmp_path / "model", []
    model, tokenizer = twell.load(MODEL, backend="reference", dtype=torch.float32)
    with torch.no_grad():
        model.ffns[0].gate_proj.weight[0] = 0
        model.ffns[0].up_proj.weight[0] = torch.inf
    save(model, tokenizer, folder)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        new = model.generate(ids, **options)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    with server(folder, tmp_path / "log") as address, ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(lambda prompt: answered(address, folder, prompt), PROMPTS)) == texts
