"""Execute a notebook and say how many are done.

    scripts/execute.py NOTEBOOK OUT TOTAL [NAME=VALUE ...]

A notebook gets the parameters that it declares. The kernel talks through sockets in a file system:
of kernels that start at the same moment, two can choose the same port.
"""

import sys
import tempfile
import time
from pathlib import Path

import papermill
import yaml
from lessons import parameters
from traitlets.config import Config

DONE = Path("build/notebooks/done")  # has a character for each notebook that is done


def main(notebook: str, out: str, total: str, *given: str) -> None:
    start, unfinished = time.monotonic(), Path(f"{out}.part.ipynb")
    pairs = (one.split("=") for one in given)
    declared = parameters(Path(notebook))
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
    with open(DONE, "a") as done:
        done.write(".")
        number = done.tell()
    print(f"{number} of {total}: {out}, done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
