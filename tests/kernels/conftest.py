import importlib.util

import pytest
import torch

from tests.factories import memory

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*"]
WARNINGS = ("invalid value", "overflow encountered", ".*deterministic")


def pytest_collection_modifyitems(items):
    for item in items:
        if "kernels" in item.path.parts:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture(autouse=True)
def accesses_are_of_given_tensors(unwritten_memory_is_nan, monkeypatch):
    """In the interpreter no kernel reads or writes outside of the tensors of its launch."""
    if not torch.cuda.is_available():
        memory.check_accesses(monkeypatch.setattr)
