import secrets

import pytest


@pytest.fixture
def seed():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed
