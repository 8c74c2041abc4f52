"""Modules load when they are needed: those of a package at first use, others after a given one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def hand_on(
    package: str, modules: Mapping[str, str], attributes: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    package: its `__name__`. modules: by module, as ".name" in the package or in full, the public
    names in it, with spaces between. attributes: modules that are attributes before their import.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    inner = attributes.split()

    def load(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name], package), name)
        if name in inner:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *inner})

    return load, listed, sorted(homes)


def load_after(triggers: Sequence[str], module: str) -> None:
    """Import a module as soon as one of `triggers`, other modules, has been imported; now if so.

    Triggers may import each other: the outermost one counts, whose names then exist.
    """
    if any(trigger in sys.modules for trigger in triggers):
        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, _Follower(triggers, module))


class _Follower(MetaPathFinder):
    """Finds `triggers` as Python does, and lets the import of `module` follow."""

    def __init__(self, triggers: Sequence[str], module: str):
        self.triggers, self.module, self.depth = triggers, module, 0

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self.triggers else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_both(loaded: ModuleType) -> None:
            self.depth += 1
            try:
                execute(loaded)
            finally:
                self.depth -= 1
            if self.depth == 0:
                importlib.import_module(self.module)

        spec.loader.exec_module = execute_both
        return spec
