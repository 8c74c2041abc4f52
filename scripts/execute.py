"""Execute a notebook: scripts/execute.py NOTEBOOK OUT [NAME=VALUE ...]

A notebook gets the parameters that it declares. The kernel talks through sockets in a file system:
of kernels that start at the same moment, two can choose the same port.
"""

import sys
import tempfile
import time
from pathlib import Path

import papermill
import yaml
from traitlets.config import Config


def main(notebook: str, out: str, *given: str) -> None:
    start, unfinished = time.monotonic(), Path(f"{out}.part.ipynb")
    pairs = (one.split("=") for one in given)
    declared = papermill.inspect_notebook(notebook)
    with tempfile.TemporaryDirectory(prefix="twell-") as folder:
        kernel = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        papermill.execute_notebook(
            notebook,
            unfinished,
            {name: yaml.safe_load(value) for name, value in pairs if name in declared},
            cwd=".",
            progress_bar=False,
            config=Config(KernelManager=kernel),
            # The manager interrupts a kernel before it stops it, which the kernel logs as an error.
            extra_arguments=["--IPKernelApp.log_level=50"],
        )
    unfinished.replace(out)
    print(f"{out}, done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
