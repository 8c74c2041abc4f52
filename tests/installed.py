"""Does with an installed twell, in an empty folder, what the documents promise: `make installed`.

Builds an sdist from the checkout and a wheel from it, installs the wheel into an environment of its
own, and there trains, exports and loads a small model, reads every data file, and gives the sparse
layer to Hugging Face's package `kernels`. Dependencies are those of the running Python, or with
`--python PYTHON` of another; twell itself is never taken from the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"

# Each program runs in the empty folder, after the commands between.
FILES = """
import json, lm_eval.tasks, sys, twell, twell.evaluate.tasks as e, twell.train as t
import twell.inspector, twell.sparse.ops, twell.sparse.calibration as c
assert twell.__file__.startswith(sys.prefix), twell.__file__
assert len([t.TrainConfig.load(file) for file in t.CONFIGS.iterdir()]) > 9
twell.inspector.script(), twell.inspector.style()
c.default(2048, 5632, True), c.default(2048, 5632, True, True)
manager = lm_eval.tasks.TaskManager
for folder in ("both", "hub", "local"):
    assert manager(include_path=e.TASKS / folder, include_defaults=False).all_tasks
with open("text.jsonl", "w") as file:
    for document in range(80):
        text = " ".join(f"word{i * i % 97}" for i in range(150 * document, 150 * document + 150))
        print(json.dumps({"text": text}), file=file)
"""
TRAIN = """train quick source=text.jsonl vocab_size=320 context=32 hidden_size=32 num_layers=2
num_heads=2 intermediate_size=96 batch_tokens=512 tokens=4096 warmup_steps=2 valid_tokens=512
dead_window_tokens=2048 log_every=4 valid_every=8 --out run"""
LOAD = """
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
model = AutoModelForCausalLM.from_pretrained("given", trust_remote_code=True)
assert type(model).__name__ == "SparseLlamaForCausalLM", type(model)
stock, ids = LlamaForCausalLM.from_pretrained("given"), torch.arange(9)[None]
assert torch.equal(model(ids).logits, stock(ids).logits)
"""
LAYER = """
import sys
sys.modules["twell"] = None
import torch
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub
from kernels import use_kernel_mapping
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

model, ids = LlamaForCausalLM.from_pretrained("given"), torch.arange(60)[None]
for layer in model.model.layers:  # neuron 5 is never active: sparse layers do not read it
    layer.mlp.gate_proj.weight.data[5] = 0
    layer.mlp.up_proj.weight.data[5] = torch.inf
relu = lambda mlp: isinstance(mlp.act_fn, torch.nn.ReLU)
replace_kernel_forward_from_hub(LlamaMLP, "SparseMLP", relu)
layer = LocalLayerRepository(Path("layer"), layer_name="SparseMLP")
with torch.no_grad(), use_kernel_mapping({"SparseMLP": {"cpu": layer}}):
    assert model(ids).logits.isnan().all()  # densely, infinity * 0
    kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)
    assert model(ids).logits.isfinite().all()
"""


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command in the folder and return its output; exits where it fails."""
    clean = {"HOME": str(folder), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    clean |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    clean |= {"HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def install(python: str, folder: Path) -> Path:
    """Make an environment with the wheel and with `python`'s packages; return its programs."""
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True, **QUIET)
    (sdist,) = folder.glob("*.tar.gz")
    wheel = f"-m pip wheel -q --no-deps --no-build-isolation -w {folder} {sdist}"
    run([sys.executable, *wheel.split()], folder)
    (wheel,) = folder.glob("*.whl")
    run([python, "-m", "venv", "--without-pip", "own"], folder)
    own = folder / "own" / "bin"
    site = Path(run([str(own / "python"), "-c", SITE], folder).strip())
    # A folder in a .pth file lends its packages, and no editable installation of twell: that has a
    # .pth file of its own, which is not read.
    (site / "lent.pth").write_text(run([python, "-c", SITE], folder))
    pip = f"-m pip --python {own / 'python'} install -q --no-deps {wheel}"
    run([sys.executable, *pip.split()], folder)
    return own


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", default=sys.executable, help="with the packages to use")
    python = options.parse_args().python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        own = install(python, folder)
        work = folder / "empty"
        work.mkdir()
        python, twell = str(own / "python"), str(own / "twell")
        run([twell, "info"], work)
        run([python, "-c", FILES], work)
        run([twell, *TRAIN.split()], work)
        run([twell, "export", "run", "--trained-on", "Words.", "--out", "given"], work)
        run([python, "-c", LOAD], work)
        run([twell, "layer", "--out", "layer"], work)
        run([python, "-c", LAYER], work, TRITON_INTERPRET="1")
    print("the installed package works")


if __name__ == "__main__":
    main()
