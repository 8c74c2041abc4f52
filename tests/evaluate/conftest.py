from pathlib import Path

import datasets
import lm_eval
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from tests.factories import SEED
from tests.factories.evaluate import write_both
from twell.evaluate import tasks

THEIRS = "arc hellaswag openbookqa piqa winogrande commonsense_qa".split()


@pytest.fixture
def random():
    return np.random.default_rng(SEED)


class Few(TaskManager):
    """lm-eval's index of tasks, of these folders alone: all of them take seconds."""

    def __init__(self, include_path, include_defaults, metadata):
        theirs = (
            [Path(lm_eval.__file__).parent / "tasks" / name for name in THEIRS]
            if include_defaults
            else []
        )
        include_path = [*theirs, *include_path]
        super().__init__(include_path=include_path, include_defaults=False, metadata=metadata)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    monkeypatch.setattr(tasks, "TaskManager", Few)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda storage: None)  # seconds
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def both_sources(tmp_path, monkeypatch):
    """A function that makes items of each task: a folder of files, and the same on a hub."""

    def make(random):
        monkeypatch.setattr(datasets, "load_dataset", write_both(random, tmp_path / "tasks"))
        return tmp_path / "tasks"

    return make
