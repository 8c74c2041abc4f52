import fcntl
import os
import tempfile
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(skip)


@pytest.fixture
def whole_card():
    """Tests that need most of the card's memory run one at a time on it, in any processes."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with Path(tempfile.gettempdir(), f"twell-whole-card-{card}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
