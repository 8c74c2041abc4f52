"""Models with FP8 weights: saved, loaded, and refused where something is missing."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import twell
from tests.factories.models import assert_same, make, stock, tokens
from twell.sparse.float8 import FLOAT8, Float8Linear

SCALE = "model.layers.1.mlp.gate_proj.weight_scale"
GATE, NORM = SCALE.removesuffix("_scale"), "model.norm.weight"


def in_bf16(model):
    """The model with weights in bf16, and rotary tables as they were."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    """A quantised model in bf16, and its folder."""
    model = in_bf16(make(l1_coefficient=0.0))
    twell.quantize_(model)
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("down", [False, True])
@torch.no_grad()
def test_a_saved_model_is_loaded_with_its_bits(tmp_path, down):
    model, folder = in_bf16(make(l1_coefficient=0.0, intermediate_size=96)), tmp_path
    twell.quantize_(model, twell.Float8DynamicActivationFloat8WeightConfig(down=down))
    model.save_pretrained(folder)
    ids = tokens(2, 9)
    for loaded in (AutoModelForCausalLM.from_pretrained(folder), twell.load(folder)[0]):
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert all(type(ffn.gate_proj) is Float8Linear for ffn in loaded.ffns)
        assert all((ffn.dense_down is not None) == down for ffn in loaded.ffns)
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8))
    assert again[SCALE].dtype == torch.float32 and again[GATE].dtype == FLOAT8
    with pytest.warns(UserWarning, match="not kept in bf16"):
        twell.dequantize_(loaded)
    folder = tmp_path / "bf16"
    loaded.save_pretrained(folder)
    for again in (twell.load(folder)[0], AutoModelForCausalLM.from_pretrained(folder)):
        assert_same(again.state_dict(), loaded.state_dict())


@torch.no_grad()
def test_a_sparsified_model_keeps_its_weights(tmp_path):
    model, ids = twell.sparsify(in_bf16(stock("llama"))), tokens(2, 9)
    twell.quantize_(model)
    model.save_pretrained(tmp_path)
    loaded, _ = twell.load(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="FP8 weights"):
        twell.densify(model)


def test_damaged_weights_are_named(saved):
    _, folder = saved
    file = folder / "model.safetensors"
    whole = load_file(file)
    for name, tensor, words in (
        (SCALE, torch.ones(83), r"mismatched keys, .*gate_proj.weight_scale.*83"),
        (GATE, torch.ones(84, 32), "gate_proj.weight has type torch.float32"),
        (NORM, torch.ones(32).to(FLOAT8), "norm.weight has type torch.float8"),
    ):
        save_file(whole | {name: tensor}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            twell.load(folder)


def test_other_ways_to_load_are_refused(saved, tmp_path):
    model, folder = saved
    twell.dequantize_(model.ffns[0])
    with pytest.raises(ValueError, match="some layers are in FP8"):
        model.save_pretrained(tmp_path / "mixed")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no SparseFFN layer"):
        LlamaForCausalLM.from_pretrained(folder)  # it would take FP8 values for the weights
    with pytest.raises(ValueError, match="torch.float32"):
        twell.load(folder, dtype=torch.float32)
