"""The sparse layer as a folder for Hugging Face's package `kernels`, without the package twell.

For each backend it has `build/torch-BACKEND` with a module `layers`, metadata.json and the launch
options as options.json. Its modules are copies of twell's own, with relative imports and a name of
their own for the operators, so that it works with any version of twell beside it, and without one.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import twell
from twell.kernels.options import OPTIONS
from twell.results import write_atomically

IMPORT = re.compile(r"^ *from twell\.(kernels|sparse)(?:\.(\w+))? import ([\w, ]*)", re.M)
BACKENDS = ("cuda", "rocm", "cpu")  # on the CPU in Triton's interpreter alone
INIT = '"""Sparse feed-forward layers; see README.md."""\n\nfrom . import layers\n'
LAYERS = '''"""The layer; its kernels are launched with options.json."""

import json
from pathlib import Path

from .kernels import options
from .sparse.stateless import SparseMLP

options.OPTIONS.update(json.loads(Path(__file__).with_name("options.json").read_text()))
__all__ = ["SparseMLP"]
'''
README = Path(__file__).with_name("templates") / "layer.md"


def write_layer(folder: Path) -> Path:
    """Write the folder, whole or not at all. Raises FileExistsError where it exists.

    An interrupted call leaves `.NAME.part`, which the next one replaces.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} already exists; choose another folder")
    part = folder.with_name(f".{folder.name}.part")
    if part.exists():
        shutil.rmtree(part)
    files = {
        f"{name}.py": re.sub(r"^( *from )twell\.(?=kernels|sparse)", r"\1..", text, flags=re.M)
        for name, text in _sources("sparse/stateless").items()
    }
    files |= {"__init__.py": INIT, "layers.py": LAYERS}
    files |= {"kernels/__init__.py": "", "sparse/__init__.py": ""}
    files["options.json"] = json.dumps(OPTIONS, indent=1) + "\n"
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    for backend in BACKENDS:
        name = f"_twell_ffn_{backend}_{digest}"  # of the module and its operators
        metadata = {"id": name, "name": "twell-ffn", "version": 1, "license": "Apache-2.0"}
        metadata |= {"python-depends": [], "backend": {"type": backend}}
        files["metadata.json"] = json.dumps(metadata, indent=1) + "\n"
        for path, text in files.items():
            target = part / "build" / f"torch-{backend}" / path
            write_atomically(target, text.replace('"twell::', f'"{name}::'))
    page = README.read_text(encoding="utf-8").format(version=twell.__version__, folder=folder)
    write_atomically(part / "README.md", page)
    return part.rename(folder)


def _sources(name: str) -> dict[str, str]:
    """Return the source code of a module of twell, and of all that it imports from twell."""
    root, sources, names = Path(twell.__file__).parent, {}, [name]
    while names:
        name = names.pop()
        if name not in sources:
            sources[name] = (root / f"{name}.py").read_text(encoding="utf-8")
            for part, module, imported in IMPORT.findall(sources[name]):
                modules = [module] if module else imported.split(", ")
                names += [f"{part}/{one}" for one in modules]
    return dict(sorted(sources.items()))
