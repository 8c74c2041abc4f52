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


def test_imports_go_one_way():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests/gpu").glob("test_*.py")), ids=lambda path: path.stem
)
def test_tests_of_gpus_use_names_that_exist(path):
    """Without a GPU only this notices a module's name that is gone."""
    there = vars(importlib.import_module(f"tests.gpu.{path.stem}"))
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    own = {node.id for node in nodes if type(node) is ast.Name and type(node.ctx) is ast.Store}
    modules = {n for n, value in there.items() if type(value) is types.ModuleType} - own
    used = [n for n in nodes if type(n) is ast.Attribute and type(n.value) is ast.Name]
    used = [(n.value.id, n.attr) for n in used if n.value.id in modules]
    assert used and [pair for pair in used if not hasattr(there[pair[0]], pair[1])] == []


def test_importing_is_cheap():
    """None of these imports slow packages."""
    file = ROOT / "data" / "checkpoints" / "twell-6m" / "aggregate.npz"
    code = f"""if True:
    import sys
    import twell, twell.config, twell.measure.providers, twell.train.bar
    assert "pandas" not in sys.modules
    import twell.cli
    twell.cli.main(["train", "-h"])
    from twell.trace import Aggregate
    Aggregate.load({str(file)!r})
    print({{"torch", "transformers", "triton"}} & {{*sys.modules}})"""
    command = [sys.executable, "-c", code]
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
