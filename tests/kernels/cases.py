"""Cases and settings that the tests of the kernels share.

Import `pytestmark` and `unwritten_memory_is_nan` to apply them to a file. Without a GPU the kernels
run in Triton's interpreter, at small shapes. Results are equal where values are small integers and
where kernels pack, and close to fp64 where they sum other values.
"""

import os
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz
from twell.kernels import common, ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One for all workers of pytest-xdist; it is part of every case that a failure prints.
SEED = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(10**6)
PATHS = sorted(ops.PATHS)
# The paper's row-wise kernel too.
ALL_PATHS = [*PATHS, "twell"]
# Paths and numbers of tokens that use other kernels, or other branches of them.
FEW = [("decode", num_tokens) for num_tokens in (1, 2, 3, 4)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not common.INTERPRETED,
        reason="the kernels were imported without TRITON_INTERPRET=1",
    ),
]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """torch.empty gives NaN and the largest integers, so that an unwritten result fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def seeds(number):
    return pytest.mark.parametrize("seed", range(SEED, SEED + number))


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def integer_case(path="union", seed=SEED, **changes):
    case = fuzz.Case(path, 70, 300, 48, values="integer", pattern="heavy", seed=seed)
    return replace(case, **changes)


def as_words(active):
    """[M, 32 W] bool -> [M, W] int32, the first column in the lowest bit."""
    place = torch.arange(32, device=active.device)
    return (active.view(len(active), -1, 32).long() << place).sum(2).to(torch.int32)


def as_flags(words):
    """[M, W] int32 -> [M, 32 W] bool."""
    place = torch.arange(32, dtype=torch.int32, device=words.device)
    return (((words[:, :, None] >> place) & 1) != 0).reshape(len(words), -1)
