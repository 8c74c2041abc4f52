"""The layer for Hugging Face's package `kernels`: in a folder, offline, in place of an MLP."""

import subprocess
import sys

import pytest

from tests.factories.sparse import triton_here
from twell import results
from twell.__main__ import main

# The program of a user: this file's folder is not on its path, so it has no twell.
PROGRAM = """
import sys, torch
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub
from kernels import use_kernel_mapping
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, vocab_size=90)
sizes |= dict(num_attention_heads=2, mlp_bias=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
make = lambda act: LlamaForCausalLM(LlamaConfig(hidden_act=act, **sizes)).bfloat16().to(device)
model, ids = make("relu").eval(), torch.arange(60, device=device)[None]
for layer in model.model.layers:
    layer.mlp.gate_proj.bias.data.fill_(-0.3)
    layer.mlp.up_proj.weight.data[5], layer.mlp.gate_proj.bias.data[5] = torch.inf, -1e4
with torch.no_grad():
    assert model(ids).logits.isnan().all()  # densely, 0 * inf
relu = lambda mlp: isinstance(mlp.act_fn, torch.nn.ReLU)
replace_kernel_forward_from_hub(LlamaMLP, "SparseMLP", relu)
layer = LocalLayerRepository(Path(sys.argv[1]), layer_name="SparseMLP")
with use_kernel_mapping({"SparseMLP": {device: layer}}):
    kernelize(model, mode=Mode.INFERENCE, device=device, use_fallback=False)
    other = kernelize(make("silu"), mode=Mode.INFERENCE, device=device)
with torch.no_grad():
    logits = model(ids).logits
    assert logits.isfinite().all()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data[5] = 0
        del layer.mlp.forward
    expected = model(ids).logits
    assert (logits - expected).float().norm() < 0.02 * expected.float().norm()
    assert other(ids).logits.isfinite().all()  # SiLU layers keep their own forward
operators = [name for name in dir(torch.ops) if "twell" in name]
print(len(operators), "twell" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path):
    assert main(["layer", "--out", str(tmp_path / "layer")]) == 0
    return tmp_path / "layer"


@triton_here
@pytest.mark.slow
def test_the_folder_works_without_twell(folder):
    environment = {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    paths = [path for path in sys.path if path and not path.startswith(str(results.root()))]
    command = [sys.executable, "-P", "-c", "import sys; sys.path[:] = sys.argv.pop(1).split(':')"]
    command[-1] += "; sys.modules['twell'] = None\n" + PROGRAM
    command += [":".join(paths), str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
