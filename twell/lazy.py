"""A package hands on the public names of its modules, which load at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def hand_on(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    package: its `__name__`. modules: by module, as ".name" in the package or in full, the public
    names in it, with spaces between.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name], package), name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, listed, sorted(homes)
