import pytest
import torch

from tests.factories import SEED


@pytest.fixture(autouse=True)
def seeded():
    """Every random number of a test follows from SEED."""
    torch.manual_seed(SEED)
