"""Saved folders in transformers' Auto classes: with twell, with consent, and without either."""

import subprocess
import sys

import pytest
import torch

import twell
from tests.factories.models import make, tokens
from tests.models.test_quantize import in_bf16
from twell import results

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
