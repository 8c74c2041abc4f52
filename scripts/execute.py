"""Execute a notebook with parameters of a profile: scripts/execute.py NOTEBOOK PROFILE OUT

A notebook gets the parameters that it declares. The kernel talks through sockets in a file system:
of kernels that start at the same moment, two can choose the same port.
"""

import ast
import sys
import tempfile
from pathlib import Path

import nbformat
import papermill
import yaml
from traitlets.config import Config


def declared(notebook: str) -> set[str]:
    """Return the names that a notebook's parameters cell assigns."""
    cells = nbformat.read(notebook, 4).cells
    (cell,) = [one for one in cells if "parameters" in one.metadata.get("tags", ())]
    nodes = ast.walk(ast.parse(cell.source))
    return {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def main(notebook: str, profile_name: str, out: str) -> None:
    path = Path(__file__).parents[1] / "notebooks" / "profiles" / f"{profile_name}.yaml"
    unfinished = Path(f"{out}.part.ipynb")
    profile = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = declared(notebook)
    parameters = {name: value for name, value in profile.items() if name in names}
    with tempfile.TemporaryDirectory(prefix="twell-") as folder:
        kernel = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        papermill.execute_notebook(
            notebook,
            unfinished,
            parameters,
            cwd=".",
            progress_bar=False,
            config=Config(KernelManager=kernel),
            # The manager interrupts a kernel before it stops it, which the kernel logs as an error.
            extra_arguments=["--IPKernelApp.log_level=50"],
        )
    unfinished.replace(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
