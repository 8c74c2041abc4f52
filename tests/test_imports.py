"""Imports go one way (the order below); the test reads the sources and holds the line."""

import ast
import subprocess
import sys

import pytest

from twell import results

PACKAGE = results.root() / "twell"
# Every module with the modules of ours it may import.
MAY_IMPORT = {
    "format": set(),
    "results": set(),
    "corpus": set(),
    "reference": {"format"},
    "kernels": {"format", "kernels"},
    "choose": set(),
    "ffn": {"format", "reference", "choose", "kernels"},
    "model": {"format", "reference", "choose", "ffn"},
    "sparse_training": {"choose", "ffn"},
    "train": {"ffn", "model", "corpus", "results", "sparse_training"},
    "trace": {"ffn", "model", "corpus", "results", "train"},
    "evaluate": {"corpus", "model", "results", "trace", "train"},
    "analysis": {"format", "results"},
    "plots": {"results", "analysis"},
    "export": {"analysis", "model", "results", "train"},
    "inspector": {"analysis", "model", "plots", "trace"},
    "widget": {"inspector", "plots", "results", "trace"},
    "__init__": set(),
    "measure": {"choose", "ffn", "kernels", "results"},
    "imposed": {"ffn", "measure", "model"},
    "measure_training": {"imposed", "kernels", "measure", "model", "results", "sparse_training", "train"},
    "measure_model": {"choose", "ffn", "imposed", "kernels", "measure", "model", "results", "train"},
    "__main__": {
        *("analysis", "choose", "evaluate", "export", "ffn", "inspector", "measure", "measure_model"),
        *("measure_training", "model", "results", "trace", "train"),
    },
}


def imported(path):
    """Names of our modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "twell":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("twell."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path.name}: write imports in full, not relative")
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("twell."))


SOURCES = sorted([*PACKAGE.glob("*.py"), *(PACKAGE / "kernels").glob("*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_imports_go_one_way(path):
    assert set(imported(path)) <= MAY_IMPORT["kernels" if path.parent.name == "kernels" else path.stem]


def test_importing_twell_is_cheap():
    code = "import sys, twell; print(sorted({'torch', 'transformers', 'triton', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads():
    import twell

    for name in twell.__all__:
        assert getattr(twell, name).__doc__, name
        # Loading a module puts it there under its own name, in place of what else may have it.
        assert not (PACKAGE / f"{name}.py").exists(), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twell.nothing  # noqa: B018
