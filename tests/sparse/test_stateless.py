"""The layer without state, and the folder that it goes into; `make installed` loads that folder."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.factories.sparse import DEVICE, relative, triton_here
from twell.__main__ import main
from twell.kernels.options import OPTIONS
from twell.sparse.stateless import SparseMLP

BACKENDS = {"torch-cuda", "torch-rocm", "torch-cpu"}


def make(act="relu"):
    """An MLP whose neuron 5 is never active and has infinite weights, and its input."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "mlp_bias": True}
    mlp = LlamaMLP(LlamaConfig(hidden_act=act, **sizes)).bfloat16().to(DEVICE)
    mlp.requires_grad_(False)
    mlp.gate_proj.bias -= 0.5
    mlp.gate_proj.bias[5], mlp.up_proj.weight[5] = -1e4, torch.inf
    return mlp, torch.randn(2, 35, 32, device=DEVICE).bfloat16()


@triton_here
def test_inactive_neurons_are_skipped():
    mlp, x = make()
    assert mlp(x).isnan().all()
    for rows in (x, x[0, :3]):  # unions and decoding
        with torch.inference_mode():
            y = SparseMLP.forward(mlp, rows).clone()
        weight = mlp.down_proj.weight
        assert y.shape == rows.shape and weight.t().is_contiguous() and not weight.is_inference()
        finite, _ = make()
        finite.load_state_dict(mlp.state_dict())
        finite.up_proj.weight[5] = 0
        assert relative(y, finite(rows)) < 0.01


def test_the_mlp_computes_where_the_kernels_cannot():
    mlp, x = make()
    handle = mlp.up_proj.register_forward_hook(lambda module, args, y: 0 * y.nan_to_num())
    assert torch.equal(SparseMLP.forward(mlp, x), mlp(x))
    handle.remove()
    assert SparseMLP.forward(mlp.float(), x.float()).isnan().all()
    mlp.bfloat16().requires_grad_(True)
    mlp.up_proj.weight.data[5] = 0
    SparseMLP.forward(mlp, x).sum().backward()
    assert mlp.gate_proj.weight.grad.any()
    with pytest.raises(ValueError, match="SiLU"):
        SparseMLP.forward(*make("silu"))


def test_the_folder_stands_alone(tmp_path):
    folder = tmp_path / "layer"
    assert main(["layer", "--out", str(folder)]) == 0
    variants = list((folder / "build").iterdir())
    assert {variant.name for variant in variants} == BACKENDS
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        assert variant.name == f"torch-{metadata['backend']['type']}"
        assert json.loads((variant / "options.json").read_text()) == OPTIONS
        assert f'"{metadata["id"]}::ffn' in (variant / "sparse" / "ops.py").read_text()
        for file in variant.rglob("*.py"):
            assert not re.search(r"^\s*(import|from) twell", file.read_text(), re.MULTILINE), file
    assert main(["layer", "--out", str(folder)]) == 2  # it is there
