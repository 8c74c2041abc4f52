"""A tiny SiLU model, and configurations that relufy it."""

import functools

import pytest
import torch

from tests.factories.train import BRIEF, write_pretrained
from twell.train import relufy_config


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_text):
    return write_pretrained(tmp_path_factory.mktemp("relufy") / "teacher", tiny_text)


@pytest.fixture
def config(teacher, tiny_text):
    """Return the configuration of a training with some fields given."""

    def with_fields(*fields, model=teacher):
        return relufy_config(model, [f"source={tiny_text}", *BRIEF, *fields])

    return with_fields


@pytest.fixture
def eager(monkeypatch):
    """Let Dynamo compile alone: inductor takes a minute. tests/gpu has it."""
    method = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", method)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
