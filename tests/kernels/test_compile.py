"""Every kernel compiles without a GPU and fits the shared memory, its grids what CUDA allows.

Kernels in Gluon share out registers themselves; they must fit too, and spill none.

compiled.py compiles in a subprocess. The Triton of requirements.gpu.lock compiles the kernels as
well as the installed one does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
OLDER = Path(sys.prefix) / "triton-older"  # where `make test MARK=slow` installs it
OLDER_VERSION = re.search(r"triton==(\S+)", (ROOT / "requirements.gpu.lock").read_text())[1]

LIMITS = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
# sm_90 is the architecture of the measurements. sm_100 is the only one with tensor memory, and has
# passes of its own in the compiler.
OLDER_ARCHITECTURES = ("sm_90", "sm_100")
NAMES = {
    f"twell.kernels.{'.'.join(path.relative_to(KERNELS).with_suffix('').parts)}.{name}"
    for path in KERNELS.rglob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}
WITH_FP8 = "sm_89", "sm_90", "sm_100", "sm_120"  # architectures with tensor cores for it
IN_FP8 = {"twell.kernels.float8.quantize_kernel"}
ON_HOPPER = {"twell.kernels.gate_hopper.gate_hopper_kernel"}


def in_subprocess(tmp_path: Path, *arguments: str, older: bool = False):
    """The output of tests/kernels/compiled.py under the installed or the older Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    if older:
        if triton.__version__ == OLDER_VERSION:
            pytest.skip(f"the installed Triton is {OLDER_VERSION}")
        if not (OLDER / "triton").exists():
            pytest.skip(f"`make test MARK=slow` installs Triton {OLDER_VERSION}")
        paths = [str(OLDER), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, result = json.loads(done.stdout.splitlines()[-1])
    assert version == (OLDER_VERSION if older else triton.__version__)
    return result


slow = pytest.mark.slow
# The quick test compiles one form of each kernel for the architecture of the measurements.
COMPILERS = [
    pytest.param("sm_90", "first", False, id="sm_90 each kernel"),
    *(pytest.param(name, "all", False, id=name, marks=slow) for name in LIMITS),
    *(pytest.param(n, "all", True, id=f"{n}-older", marks=slow) for n in OLDER_ARCHITECTURES),
]


@pytest.mark.parametrize(("architecture", "variants", "older"), COMPILERS)
def test_all_kernels_compile_and_fit(architecture, variants, older, tmp_path):
    shared, problems = in_subprocess(tmp_path, "compile", architecture, variants, older=older)
    expected = NAMES - (set() if architecture in WITH_FP8 else IN_FP8)
    assert set(shared) == expected - (set() if architecture == "sm_90" else ON_HOPPER)
    assert max(shared.values()) <= LIMITS[architecture], shared
    assert not problems, "\n".join(problems)


@slow
def test_grids_are_in_range_at_the_largest_sizes(tmp_path):
    launched, problems = in_subprocess(tmp_path, "launch", "sm_90")
    assert set(launched) == NAMES
    assert not problems, "\n".join(problems)
