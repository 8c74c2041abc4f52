"""Names of providers: those in data/bench, each of which is parsed."""

import subprocess
import sys

import pandas as pd
import pytest

from twell import results
from twell.measure.providers import (
    AUTO,
    COMPILED,
    DENSE_EAGER,
    DENSE_KERNELS,
    EAGER,
    TUNED,
    UNION_COMPILED,
    Provider,
    compilations,
    model_providers,
)


def recorded_names():
    names = set()
    for path in (results.root() / "data" / "bench").glob("*.csv"):
        names |= set(pd.read_csv(path).get("provider", pd.Series(dtype=str)))
    return sorted(names)


@pytest.mark.parametrize("name", recorded_names())
def test_recorded_names_are_parsed_and_written_alike(name):
    provider = Provider.parse(name)
    assert provider.name == str(provider) == name
    assert provider.compiled == ("torch.compile" in name)
    assert provider.sparse_path == any(path in name.split() for path in PATHS)
    assert (provider.compilation == TUNED) == name.endswith("tuned")


PATHS = "union", "rowwise", "decode", "hybrid"


def test_the_parts_of_names():
    assert Provider.parse("dense") == DENSE_KERNELS == Provider("triton", "dense")
    assert Provider.parse("dense eager") == DENSE_EAGER == Provider("dense", None, EAGER)
    assert Provider.parse("auto") == AUTO
    assert Provider.parse("triton union torch.compile") == UNION_COMPILED
    assert Provider("triton", None, TUNED).name == "triton torch.compile tuned"
    for name in ("union", "triton eager", "dense union", "", "dense torch.compiled"):
        with pytest.raises(ValueError, match=f"provider '{name}' is unknown"):
            Provider.parse(name)


def test_the_providers_of_a_model_are_those_of_its_compilations():
    eager = ["dense eager", "triton", "auto"]
    compiled, tuned = (
        [f"{backend} {kind}" for backend in ("dense", "triton", "auto")]
        for kind in (COMPILED, TUNED)
    )
    for arguments, expected in (
        ((None,), eager + compiled),
        ((None, True), eager + compiled + tuned),
        ((True,), compiled),
        ((True, True), compiled + tuned),
        ((False,), eager),
    ):
        assert [provider.name for provider in model_providers(*arguments)] == expected
    assert compilations(None, True) == [EAGER, COMPILED, TUNED]


def test_importing_the_names_is_cheap():
    code = "import sys, twell.measure.providers; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_face_of_the_package_loads():
    from twell import measure

    for name in measure.__all__:
        assert getattr(measure, name) is not None and name in dir(measure)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        measure.nothing  # noqa: B018
