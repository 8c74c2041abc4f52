"""Imports go one way (the order below); the test reads the sources and holds the line."""

import ast
import importlib
import subprocess
import sys

import pytest

from twell import results

PACKAGE = results.root() / "twell"
# Every module with the modules of ours it may import. From outside, analysis and plots are imported as a whole.
MAY_IMPORT = {
    "format": set(),
    "results": set(),
    "corpus": set(),
    "lock": {"results"},
    "checkpoint": {"results"},
    "reference": {"format"},
    "kernels": {"format", "kernels"},
    "choose": set(),
    "ffn": {"format", "reference", "choose", "kernels"},
    "model": {"format", "reference", "choose", "ffn"},
    "sparse_training": {"choose", "ffn"},
    "train": {"checkpoint", "corpus", "ffn", "lock", "model", "results", "sparse_training"},
    "trace": {"ffn", "model", "corpus", "results", "train"},
    "evaluate": {"corpus", "model", "results", "trace", "train"},
    "analysis.runs": set(),
    "analysis.variants": {"analysis.runs"},
    "analysis.activity": set(),
    "analysis.formats": {"format"},
    "analysis.speed": {"analysis.runs", "measure.providers"},
    "analysis.tasks": {"analysis.runs"},
    "analysis.trained": {"analysis.runs", "analysis.variants"},
    "analysis.counted": {"analysis.runs", "analysis.tasks"},
    "analysis.measured": {"analysis.speed", "measure.providers"},
    "analysis.quantities": {
        *(
            "format",
            "results",
            "trace",
            "analysis.trained",
            "analysis.counted",
            "analysis.measured",
        ),
        *(f"analysis.{name}" for name in "runs variants activity speed tasks".split()),
    },
    "analysis.claims": {"results"},
    "analysis": {
        *("analysis.quantities", "analysis.claims"),
        *(f"analysis.{name}" for name in "runs variants activity formats speed tasks".split()),
    },
    "plots.base": {"results"},
    "plots.formats": {"plots.base"},
    "plots.training": {"analysis", "plots.base"},
    "plots.activity": {"analysis", "plots.base"},
    "plots.speed": {"analysis", "measure.providers", "plots.base"},
    "plots.models": {"analysis", "measure.providers", "plots.base"},
    "plots.overview": {"measure.providers", "plots.base"},
    "plots": {
        f"plots.{name}" for name in "base formats training activity speed models overview".split()
    },
    "export": {"analysis", "model", "results", "trace", "train"},
    "inspector": {"analysis", "model", "plots", "trace"},
    "widget": {"inspector", "plots", "results", "trace"},
    "__init__": set(),
    # Providers are a leaf: tables and figures read recorded names by it.
    "measure.providers": set(),
    "measure": {
        *("kernels", "measure", "measure.providers", "model", "results", "train", "sparse"),
        *(f"sparse.{name}" for name in "layer plan reference training".split()),
    },
    "__main__": {
        *(
            "analysis",
            "choose",
            "evaluate",
            "export",
            "ffn",
            "inspector",
            "measure",
        ),
        *("model", "results", "trace", "train"),
    },
}


def entry(name):
    """The entry of the table that a dotted name belongs to; the kernels have one together."""
    while name not in MAY_IMPORT and "." in name:
        name = name.rpartition(".")[0]
    return name


def imported(path):
    """Entries of our modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path.name}: write imports in full, not relative")
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        ours = [name.removeprefix("twell.") for name in names if name.startswith("twell.")]
        yield from (entry(name) for name in ours if name != "__version__")


SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py")])
}


@pytest.mark.parametrize("name", SOURCES)
def test_imports_go_one_way(name):
    assert set(imported(SOURCES[name])) <= MAY_IMPORT[entry(name)]


@pytest.mark.parametrize("package", ["analysis", "plots"])
def test_a_package_hands_on_the_public_names_of_its_modules(package):
    whole = importlib.import_module(f"twell.{package}")
    # Handed on whole, as modules: `analysis.quantities.sweep`.
    named = {f"analysis.{name}" for name in "trained counted measured quantities claims".split()}
    parts = [name for name in SOURCES if name.startswith(f"{package}.") and name not in named]
    assert len(parts) > 1
    for part in parts:
        of = importlib.import_module(f"twell.{part}")
        for name, value in vars(of).items():
            defined = (
                getattr(value, "__module__", None) == of.__name__
                or name.isupper()
                and name != "TYPE_CHECKING"
            )
            # Loading a module puts it into the package under its own name, in place of what else may have it.
            if defined and not name.startswith("_"):
                assert getattr(whole, name) is value, f"{part}.{name}"


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
