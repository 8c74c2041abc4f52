"""Cases of the layer for the tests of the kernels.

Without a GPU the kernels run in Triton's interpreter, which needs milliseconds for a token, a
neuron or an entry of a list: shapes are small.
"""

from dataclasses import replace

import torch

from tests import fuzz
from tests.factories import SEED
from tests.factories.ops import PATHS
from twell.kernels import options
from twell.sparse.paper import ffn_twell

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATORS = {**PATHS, "twell": ffn_twell}


def integer_case(path="union", **changes):
    """A case of small integers, whose results have to be exact."""
    case = fuzz.Case(path, 70, 300, 48, values="integer", pattern="heavy", seed=SEED)
    return replace(case, **changes)


def run_as(architecture, monkeypatch):
    """Lets the interpreter take an architecture's launch options."""
    monkeypatch.setattr(options, "architecture", lambda device: architecture)
