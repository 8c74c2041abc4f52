"""Stop the build when the link twell/kernels is broken. pyproject.toml describes everything else."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

if not (Path(__file__).parent / "twell" / "kernels" / "options.py").is_file():
    raise SystemExit(
        "twell/kernels is not a link to ../kernels (some programs that unpack archives make a text file of a link), "
        "so the package would have no kernels: clone the repository with git, or delete twell/kernels and "
        "run `ln -s ../kernels twell/kernels` (on Windows: copy the folder kernels to twell/kernels)"
    )


class Editable(editable_wheel):
    """An editable install also finds `study`, which no wheel holds."""

    def run(self):
        self.distribution.packages += find_packages(include=["study*"])
        super().run()


setup(cmdclass={"editable_wheel": Editable})
