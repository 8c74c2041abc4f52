"""This repository's evidence: tables of recorded rows, figures of tables, and recording scripts.

    analysis    rows to tables (DataFrames)
    plots       a table to a figure, one function a figure
    paper       the paper number by number, with rules for each claim
    record      measures and trains on a GPU what data/ holds
    price       the price of L1 on text that is read once, by the plan price.yaml
    keep        reduces a trained run to the small files of data/

It is in no wheel: a clone has it, installed with `pip install -e .`. twell never imports it.
"""

import importlib
from collections.abc import Callable
from typing import Any


def first_of(package: str, modules: str) -> Callable[[str], Any]:
    """Return `__getattr__` of a package, which searches a public name in modules, in order."""

    def load(name: str) -> Any:
        for module in modules.split() if not name.startswith("_") else ():
            public = importlib.import_module(module, package)
            if hasattr(public, name):
                return getattr(public, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
