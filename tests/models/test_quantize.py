"""Models with FP8 weights: saved, loaded, and refused where something is missing."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import twell
from tests.factories.models import assert_same, change_config, make, stock, tokens
from twell import results
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
    assert again[SCALE].dtype == torch.float32
    assert again[GATE].dtype == FLOAT8
    twell_config = json.loads((folder / "config.json").read_text())
    assert twell_config["quantization_config"]["quant_method"] == "twell_float8"
    with pytest.warns(UserWarning, match="not kept in bf16"):
        twell.dequantize_(loaded)
    # Files in bf16 have no `quantization_config`, whose null older readers take for a method.
    folder = tmp_path / "bf16"
    loaded.save_pretrained(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    change_config(quantization_config=None)(folder)  # as versions before wrote it
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


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda t: t.pop(SCALE), "gate_proj.weight_scale is missing"),
        (lambda t: t.update({SCALE: torch.ones(83)}), r"gate_proj.weight_scale has shape \(83,\)"),
        (lambda t: t.update({GATE: torch.ones(84, 32)}), "gate_proj.weight has type torch.float32"),
        (lambda t: t[GATE].view(torch.uint8).fill_(0x7F), "gate_proj.weight has NaN or infinite"),
        (
            lambda t: t.update({NORM: torch.ones(32).to(FLOAT8)}),
            "norm.weight has type torch.float8",
        ),
    ],
)
def test_damaged_weights_are_named(saved, change, names):
    _, folder = saved
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=names):
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


# --- transformers' Auto classes


ROOT = results.root()
NO_TWELL = "sys.modules['twell'] = None"  # importing it raises ImportError
PROGRAM = """
import sys
{first}
from transformers import AutoModelForCausalLM, LlamaForCausalLM
{then}
import torch
from transformers import AutoModel
for folder in sys.argv[1:]:
    model = {loads}
    print(type(model).__module__, type(model).__name__)
    with torch.no_grad():
        logits = model.eval()(torch.load(folder + "/ids.pt")).logits
    torch.save(logits, folder + "/logits.pt")
"""
AUTO, CONSENT = "AutoModelForCausalLM.from_pretrained(folder{})", ", trust_remote_code=True"
OURS = "twell.models.llama SparseLlamaForCausalLM"


def run(*folders, first="", then="", loads=None):
    code = PROGRAM.format(first=first, then=then, loads=loads or AUTO.format(""))
    environment = {"HF_MODULES_CACHE": str(folders[0] / "modules"), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    options = {"env": environment, "capture_output": True, "text": True, "input": ""}
    return subprocess.run([sys.executable, "-c", code, *map(str, folders)], **options)


def save(folder, *, fp8=False, **changes):
    """Write a model in bf16 to a folder, and return its logits."""
    model = in_bf16(make(**changes))
    if fp8:
        twell.quantize_(model)
    model.save_pretrained(folder)
    ids = tokens(2, 9)
    torch.save(ids, folder / "ids.pt")
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def folders(tmp_path):
    """Folders with a gated, a non-gated and a quantised model, each with its logits."""
    kinds = {
        "gated": {},
        "non-gated": {"gated_mlp": False},
        "fp8": {"fp8": True, "mlp_bias": True},
    }
    return {tmp_path / name: save(tmp_path / name, **changes) for name, changes in kinds.items()}


PROGRAMS = [{"first": "import twell"}, {"then": "import twell"}, {"loads": AUTO.format(CONSENT)}]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_folders_load_sparse(folders, program):
    for folder in folders:  # with twell imported the folder's own code is not needed
        if "import twell" in program.values():
            (folder / "modeling_twell.py").write_text("raise RuntimeError('this ran')")
    done = run(*folders, **program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [OURS] * len(folders)
    for folder, logits in folders.items():
        assert torch.equal(torch.load(folder / "logits.pt"), logits), folder


@pytest.mark.slow
def test_no_code_runs_without_consent_and_a_missing_twell_is_named(tmp_path):
    save(tmp_path)
    code = tmp_path / "modeling_twell.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + code.read_text())
    done = run(tmp_path)
    assert "trust_remote_code=True" in done.stderr and not (tmp_path / "ran").exists()
    done = run(tmp_path, first=NO_TWELL, loads=AUTO.format(CONSENT))
    assert (tmp_path / "ran").exists()
    assert "the package twell, which cannot be imported here" in done.stderr
