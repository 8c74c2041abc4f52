"""`twell layer`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from twell.cli.common import BUILD, OUTPUT, option

EXAMPLE = "twell layer"


def command(
    out: Annotated[Path, option("The folder to write.", OUTPUT, metavar="DIR")] = BUILD / "layer",
) -> None:
    """Write the sparse layer and its kernels as a folder for Hugging Face's package kernels."""
    from twell.kernel_folder import write_layer

    print(write_layer(out))
