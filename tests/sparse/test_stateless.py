"""The layer without state, and the folder that it goes into; `make installed` loads that folder."""

import ast
import json
import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.factories.models import DEVICE
from tests.factories.sparse import relative, triton_here
from twell import kernel_folder
from twell.__main__ import main
from twell.kernels.options import OPTIONS
from twell.results import write_atomically
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
    with pytest.raises(ValueError, match="is for layers with ReLU, and this one has SiLU"):
        SparseMLP.forward(*make("silu"))


def test_the_folder_has_all_that_it_imports(tmp_path, capsys):
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
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 2:
                    module = variant / node.module.replace(".", "/")
                    names = (
                        [module / one.name for one in node.names] if module.is_dir() else [module]
                    )
                    assert all(name.with_suffix(".py").is_file() for name in names), file
                if isinstance(node, ast.Import | ast.ImportFrom):
                    assert not re.search(r"import twell|from twell", ast.unparse(node)), file
    assert main(["layer", "--out", str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_interrupted_command_leaves_no_folder(tmp_path, monkeypatch):
    folder, written = tmp_path / "layer", []

    def stop_at_the_sixth(path, text):
        written.append(path)
        if len(written) == 6:
            raise KeyboardInterrupt
        write_atomically(path, text)

    monkeypatch.setattr(kernel_folder, "write_atomically", stop_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        kernel_folder.write_layer(folder)
    assert not folder.exists()
    monkeypatch.undo()
    (tmp_path / ".layer.part" / "left over").touch()
    assert kernel_folder.write_layer(folder) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["layer"]
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "build"]
