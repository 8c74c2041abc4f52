"""Execute a notebook with parameters of a profile: scripts/execute.py NOTEBOOK PROFILE OUT

A notebook gets the parameters that it declares. The kernel talks through sockets in a file system:
of kernels that start at the same moment, two can choose the same port.
"""

import sys
import tempfile
from pathlib import Path

import papermill
from lessons import parameters, profile
from traitlets.config import Config


def main(notebook: str, profile_name: str, out: str) -> None:
    unfinished, declared = Path(f"{out}.part.ipynb"), parameters(Path(notebook))
    given = {name: value for name, value in profile(profile_name).items() if name in declared}
    with tempfile.TemporaryDirectory(prefix="twell-") as folder:
        kernel = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        papermill.execute_notebook(
            notebook,
            unfinished,
            given,
            cwd=".",
            progress_bar=False,
            config=Config(KernelManager=kernel),
            # The manager interrupts a kernel before it stops it, which the kernel logs as an error.
            extra_arguments=["--IPKernelApp.log_level=50"],
        )
    unfinished.replace(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
