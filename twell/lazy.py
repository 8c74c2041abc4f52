"""Modules load when they are needed: those of a package at first use, others after a given one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
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


def load_after(trigger: str, module: str) -> None:
    """Import a module as soon as `trigger`, another module, has been imported; now if it has."""
    if trigger in sys.modules:
        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, _Follower(trigger, module))


class _Follower(MetaPathFinder):
    """Finds `trigger` as Python does, and lets the import of `module` follow."""

    def __init__(self, trigger: str, module: str):
        self.trigger, self.module = trigger, module

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.trigger else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_both(loaded: ModuleType) -> None:
            execute(loaded)
            importlib.import_module(self.module)

        spec.loader.exec_module = execute_both
        return spec
