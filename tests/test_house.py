"""The house keeps its order: imports go one way."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from twell import results

ROOT = results.root()


def name(path):
    return str(path.relative_to(ROOT))


def test_imports_go_one_way():
    """The contracts stand in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").glob("test_*.py")), ids=name)
def test_what_runs_on_gpus_alone_uses_names_that_exist(path):
    """Of modules. Elsewhere nobody would notice."""
    there = vars(importlib.import_module(f"tests.gpu.{path.stem}"))
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    own = {node.id for node in nodes if type(node) is ast.Name and type(node.ctx) is ast.Store}
    modules = {n for n, value in there.items() if type(value) is types.ModuleType} - own
    used = [n for n in nodes if type(n) is ast.Attribute and type(n.value) is ast.Name]
    used = [(n.value.id, n.attr) for n in used if n.value.id in modules]
    assert used and [pair for pair in used if not hasattr(there[pair[0]], pair[1])] == []


CHEAP = {
    "import twell, twell.config, twell.measure.providers": "torch transformers triton pandas",
    "import twell.cli as c; c.main(['train', '-h'])": "torch transformers triton pandas numpy",
    "from twell.trace import Aggregate; Aggregate.load(sys.argv[1])": "torch transformers triton",
}


@pytest.mark.parametrize("code", CHEAP)
def test_importing_is_cheap(code):
    file = ROOT / "data" / "checkpoints" / "twell-6m" / "aggregate.npz"
    code = f"import sys; {code}; print({{*{CHEAP[code].split()}}} & {{*sys.modules}})"
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_every_public_name_loads():
    import twell

    for public in twell.__all__:
        assert getattr(twell, public).__doc__, public
        # Loading a module puts it into the package under its own name, over anything else.
        assert not (ROOT / "twell" / f"{public}.py").exists(), public
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twell.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("format", "ELL TwELL PackedTwELL Hybrid TileUnion BufferOverflow check_tensor"),
        ("reference", "ffn gate_pack up_down down union_up_down union_down ffn_forward"),
        ("reference", "ffn_backward sampled_matmul multiply transpose_matmul to_hybrid Saved"),
        ("trace", "Trace Aggregate aggregate aggregate_run trace_text trace_tokens cut encode"),
        ("trace", "trace_validation silenced_loss load_with_tokenizer token_strings CONTEXTS"),
        ("model", "SparseLlamaConfig SparseLlamaForCausalLM SparseCausalLMOutput sparse_ffns"),
        ("model", "sparsify densify l1_by_layer silence save load CALIBRATION"),
        ("model", "MASKED SPARSIFIABLE HYBRID DTYPES SIZES NO_WEIGHTS"),
        ("train", "TrainConfig CONFIGS train evaluate Log DeadWindow reinitialize balance"),
        ("train", "run_text text_hashes cache_folder l1_schedule activity_columns"),
        ("corpus", "documents split source_files checked_text prepare Corpus Blocks Stream"),
        ("corpus", "train_tokenizer load_tokenizer END_OF_TEXT SUFFIXES HOLD_OUT_EVERY NO_SOTU"),
    ],
)
def test_modules_that_moved_hand_on_their_names(module, names):
    public = importlib.import_module(f"twell.{module}")
    for one in names.split():
        assert hasattr(public, one), one
